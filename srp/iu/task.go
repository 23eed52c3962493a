package iu

import "fmt"

// TaskFunction is a task management function (<scsi/srp.h>).
type TaskFunction uint8

const (
	AbortTask    TaskFunction = 0x01
	AbortTaskSet TaskFunction = 0x02
	ClearTaskSet TaskFunction = 0x04
	LUNReset     TaskFunction = 0x08
	ClearACA     TaskFunction = 0x40
)

func (f TaskFunction) String() string {
	switch f {
	case AbortTask:
		return "ABORT TASK"
	case AbortTaskSet:
		return "ABORT TASK SET"
	case ClearTaskSet:
		return "CLEAR TASK SET"
	case LUNReset:
		return "LOGICAL UNIT RESET"
	case ClearACA:
		return "CLEAR ACA"
	}
	return fmt.Sprintf("task management function 0x%02x", uint8(f))
}

// TaskMgmt is SRP_TSK_MGMT.
type TaskMgmt struct {
	Tag      uint64
	SolNot   SolicitedNotification
	LUN      LUN
	Function TaskFunction
	TaskTag  uint64 // of the command to abort
}

// Encode writes the unit's 48 bytes.
func (t *TaskMgmt) Encode(b []byte) (int, error) {
	if err := begin(b, OpTaskMgmt, TaskMgmtSize, t.Tag); err != nil {
		return 0, err
	}
	b[1] = byte(t.SolNot)
	copy(b[20:], t.LUN[:])
	b[30] = byte(t.Function)
	be.PutUint64(b[32:], t.TaskTag)
	return TaskMgmtSize, nil
}

// Decode reads the unit.
func (t *TaskMgmt) Decode(b []byte) error {
	if err := check(b, OpTaskMgmt, TaskMgmtSize); err != nil {
		return err
	}
	t.Tag = be.Uint64(b[8:])
	t.SolNot = SolicitedNotification(b[1])
	t.LUN = LUN(b[20:28])
	t.Function = TaskFunction(b[30])
	t.TaskTag = be.Uint64(b[32:])
	return nil
}

// TaskCode is the RSP CODE of a response to task management (SRP r16a, table 24).
type TaskCode uint8

const (
	TaskComplete      TaskCode = 0
	TaskInvalidFields TaskCode = 2
	TaskNotSupported  TaskCode = 4
	TaskFailed        TaskCode = 5
)

func (c TaskCode) String() string {
	switch c {
	case TaskComplete:
		return "complete"
	case TaskInvalidFields:
		return "request fields invalid"
	case TaskNotSupported:
		return "function not supported"
	case TaskFailed:
		return "function failed"
	}
	return fmt.Sprintf("unknown response code %d", uint8(c))
}
