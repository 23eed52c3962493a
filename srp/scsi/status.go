package scsi

import "fmt"

// Status is the SCSI status byte (SAM-5, 5.3.1).
type Status uint8

const (
	StatusGood                Status = 0x00
	StatusCheckCondition      Status = 0x02
	StatusConditionMet        Status = 0x04
	StatusBusy                Status = 0x08
	StatusReservationConflict Status = 0x18
	StatusTaskSetFull         Status = 0x28
	StatusACAActive           Status = 0x30
	StatusTaskAborted         Status = 0x40
)

func (s Status) String() string {
	switch s {
	case StatusGood:
		return "GOOD"
	case StatusCheckCondition:
		return "CHECK CONDITION"
	case StatusConditionMet:
		return "CONDITION MET"
	case StatusBusy:
		return "BUSY"
	case StatusReservationConflict:
		return "RESERVATION CONFLICT"
	case StatusTaskSetFull:
		return "TASK SET FULL"
	case StatusACAActive:
		return "ACA ACTIVE"
	case StatusTaskAborted:
		return "TASK ABORTED"
	}
	return fmt.Sprintf("status 0x%02x", uint8(s))
}

// Retryable reports the states in which the same command may succeed later: BUSY and TASK SET FULL.
func (s Status) Retryable() bool { return s == StatusBusy || s == StatusTaskSetFull }

// StatusError is a command that ended with a status that is neither GOOD nor CONDITION MET and carries no sense data.
type StatusError struct {
	Command string // CommandName of the CDB
	Status  Status
}

func (e *StatusError) Error() string {
	s := fmt.Sprintf("%s: %s", e.Command, e.Status)
	switch e.Status {
	case StatusBusy:
		s += ": the target cannot take the command now; try again later"
	case StatusTaskSetFull:
		s += ": the logical unit's queue is full; use a lower queue depth"
	case StatusReservationConflict:
		s += ": another initiator holds a reservation on the logical unit"
	case StatusTaskAborted:
		s += ": another initiator aborted it"
	}
	return s
}

// CheckConditionError is a command that ended with CHECK CONDITION.
type CheckConditionError struct {
	Command string // CommandName of the CDB
	Sense   Sense  // zero when the target sent none that could be read
	Raw     []byte // the sense bytes as received
}

func (e *CheckConditionError) Error() string {
	if len(e.Raw) == 0 {
		return e.Command + ": CHECK CONDITION without sense data"
	}
	return fmt.Sprintf("%s: %s", e.Command, e.Sense)
}

// Error turns the result of a command into an error: nil for GOOD and CONDITION MET, a *CheckConditionError with
// a copy of sense, or a *StatusError.
func Error(cdb []byte, status Status, sense []byte) error {
	switch status {
	case StatusGood, StatusConditionMet:
		return nil
	case StatusCheckCondition:
		e := &CheckConditionError{Command: CommandName(cdb), Raw: append([]byte(nil), sense...)}
		e.Sense, _ = ParseSense(sense)
		return e
	}
	return &StatusError{Command: CommandName(cdb), Status: status}
}
