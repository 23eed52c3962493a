package scsi

import (
	"fmt"
	"strings"
)

// SenseKey is the sense key (SPC-4, table 48).
type SenseKey uint8

const (
	NoSense        SenseKey = 0x0
	RecoveredError SenseKey = 0x1
	NotReady       SenseKey = 0x2
	MediumError    SenseKey = 0x3
	HardwareError  SenseKey = 0x4
	IllegalRequest SenseKey = 0x5
	UnitAttention  SenseKey = 0x6
	DataProtect    SenseKey = 0x7
	BlankCheck     SenseKey = 0x8
	VendorSpecific SenseKey = 0x9
	CopyAborted    SenseKey = 0xa
	AbortedCommand SenseKey = 0xb
	VolumeOverflow SenseKey = 0xd
	Miscompare     SenseKey = 0xe
	Completed      SenseKey = 0xf
)

var senseKeyNames = [16]string{
	"NO SENSE", "RECOVERED ERROR", "NOT READY", "MEDIUM ERROR", "HARDWARE ERROR", "ILLEGAL REQUEST", "UNIT ATTENTION",
	"DATA PROTECT", "BLANK CHECK", "VENDOR SPECIFIC", "COPY ABORTED", "ABORTED COMMAND", "sense key 0xc", "VOLUME OVERFLOW",
	"MISCOMPARE", "COMPLETED",
}

func (k SenseKey) String() string { return senseKeyNames[k&0xf] }

// ASC is an additional sense code and its qualifier: 0x2904 is ASC 29h, ASCQ 04h.
type ASC uint16

// The codes that this project makes or acts on (SPC-4, annex E, table E.15).
const (
	ASCNone                      ASC = 0x0000
	ASCUnitNotReadyInit          ASC = 0x0402
	ASCUnitNotReadyManual        ASC = 0x0403
	ASCWriteError                ASC = 0x0c00
	ASCUnrecoveredRead           ASC = 0x1100
	ASCParameterListLength       ASC = 0x1a00
	ASCMiscompareDuringVerify    ASC = 0x1d00
	ASCInvalidOpcode             ASC = 0x2000
	ASCLBAOutOfRange             ASC = 0x2100
	ASCInvalidFieldInCDB         ASC = 0x2400
	ASCLUNotSupported            ASC = 0x2500
	ASCInvalidFieldInParameters  ASC = 0x2600
	ASCInvalidRelease            ASC = 0x2604
	ASCWriteProtected            ASC = 0x2700
	ASCPowerOn                   ASC = 0x2900
	ASCBusReset                  ASC = 0x2902
	ASCBusDeviceReset            ASC = 0x2903
	ASCNexusLoss                 ASC = 0x2907
	ASCModeParametersChanged     ASC = 0x2a01
	ASCReservationsPreempted     ASC = 0x2a03
	ASCReservationsReleased      ASC = 0x2a04
	ASCRegistrationsPreempted    ASC = 0x2a05
	ASCCapacityChanged           ASC = 0x2a09
	ASCCommandsClearedByOther    ASC = 0x2f00
	ASCSavingNotSupported        ASC = 0x3900
	ASCInquiryDataChanged        ASC = 0x3f03
	ASCReportedLUNsChanged       ASC = 0x3f0e
	ASCInternalTargetFailure     ASC = 0x4400
	ASCDataPhaseError            ASC = 0x4b00
	ASCOverlappedCommands        ASC = 0x4e00
	ASCInsufficientResources     ASC = 0x5503
	ASCInsufficientRegistrations ASC = 0x5504
	ASCInvalidTransferLength     ASC = 0x0e03
)

var ascText = map[ASC]string{
	0x0000: "no additional sense information", 0x0016: "operation in progress", 0x0100: "no index/sector signal",
	0x0300: "peripheral device write fault", 0x0400: "logical unit not ready, cause not reportable",
	0x0401: "logical unit is in process of becoming ready", 0x0402: "logical unit not ready, initializing command required",
	0x0403: "logical unit not ready, manual intervention required", 0x0404: "logical unit not ready, format in progress",
	0x0407: "logical unit not ready, operation in progress", 0x0409: "logical unit not ready, self-test in progress",
	0x040a: "logical unit not accessible, asymmetric access state transition", 0x040b: "logical unit not accessible, target port in standby state",
	0x040c: "logical unit not accessible, target port in unavailable state", 0x0411: "logical unit not ready, notify (enable spinup) required",
	0x0500: "logical unit does not respond to selection", 0x0800: "logical unit communication failure", 0x0801: "logical unit communication time-out",
	0x0802: "logical unit communication parity error", 0x0a00: "error log overflow", 0x0b00: "warning", 0x0b01: "warning - specified temperature exceeded",
	0x0c00: "write error", 0x0c02: "write error - auto reallocation failed", 0x0c0c: "write error - unexpected unsolicited data",
	0x0c0d: "write error - not enough unsolicited data", 0x0e00: "invalid information unit", 0x0e01: "information unit too short",
	0x0e02: "information unit too long", 0x0e03: "invalid field in command information unit", 0x1000: "ID CRC or ECC error",
	0x1001: "logical block guard check failed", 0x1002: "logical block application tag check failed", 0x1003: "logical block reference tag check failed",
	0x1100: "unrecovered read error", 0x1101: "read retries exhausted", 0x1104: "unrecovered read error - auto reallocate failed",
	0x1400: "recorded entity not found", 0x1401: "record not found", 0x1501: "mechanical positioning error",
	0x1700: "recovered data with no error correction applied", 0x1800: "recovered data with error correction applied",
	0x1a00: "parameter list length error", 0x1b00: "synchronous data transfer error", 0x1c00: "defect list not found",
	0x1d00: "miscompare during verify operation", 0x2000: "invalid command operation code", 0x2100: "logical block address out of range",
	0x2101: "invalid element address", 0x2104: "unaligned write command", 0x2400: "invalid field in CDB", 0x2401: "CDB decryption error",
	0x2500: "logical unit not supported", 0x2600: "invalid field in parameter list", 0x2601: "parameter not supported", 0x2602: "parameter value invalid",
	0x2603: "threshold parameters not supported", 0x2604: "invalid release of persistent reservation", 0x2606: "too many target descriptors",
	0x2700: "write protected", 0x2701: "hardware write protected", 0x2702: "logical unit software write protected",
	0x2707: "space allocation failed write protect", 0x2800: "not ready to ready change, medium may have changed",
	0x2900: "power on, reset, or bus device reset occurred", 0x2901: "power on occurred", 0x2902: "SCSI bus reset occurred",
	0x2903: "bus device reset function occurred", 0x2904: "device internal reset", 0x2907: "I_T nexus loss occurred",
	0x2a00: "parameters changed", 0x2a01: "mode parameters changed", 0x2a02: "log parameters changed", 0x2a03: "reservations preempted",
	0x2a04: "reservations released", 0x2a05: "registrations preempted", 0x2a06: "asymmetric access state changed",
	0x2a07: "implicit asymmetric access state transition failed", 0x2a09: "capacity data has changed", 0x2c00: "command sequence error",
	0x2c09: "previous reservation conflict status", 0x2f00: "commands cleared by another initiator",
	0x2f02: "commands cleared by device server", 0x3000: "incompatible medium installed", 0x3100: "medium format corrupted",
	0x3200: "no defect spare location available", 0x3700: "rounded parameter", 0x3807: "thin provisioning soft threshold reached",
	0x3900: "saving parameters not supported", 0x3a00: "medium not present", 0x3d00: "invalid bits in identify message",
	0x3e00: "logical unit has not self-configured yet", 0x3e01: "logical unit failure", 0x3e02: "timeout on logical unit",
	0x3f00: "target operating conditions have changed", 0x3f01: "microcode has been changed", 0x3f03: "INQUIRY data has changed",
	0x3f05: "device identifier changed", 0x3f0e: "reported LUNs data has changed", 0x4300: "message error", 0x4400: "internal target failure",
	0x4500: "select or reselect failure", 0x4700: "SCSI parity error", 0x4703: "information unit CRC error detected",
	0x4800: "initiator detected error message received", 0x4900: "invalid message error", 0x4a00: "command phase error", 0x4b00: "data phase error",
	0x4c00: "logical unit failed self-configuration", 0x4e00: "overlapped commands attempted", 0x5300: "media load or eject failed",
	0x5500: "system resource failure", 0x5503: "insufficient resources", 0x5504: "insufficient registration resources",
	0x5d00: "failure prediction threshold exceeded", 0x5e00: "low power condition on", 0x6500: "voltage fault", 0x6700: "configuration failure",
	0x6f00: "copy protection key exchange failure - authentication failure",
}

// String is the code in words and digits.
func (a ASC) String() string {
	if t, ok := ascText[a]; ok {
		return fmt.Sprintf("%s (%02Xh/%02Xh)", t, uint8(a>>8), uint8(a))
	}
	if a>>8 == 0x40 && a&0xff >= 0x80 {
		return fmt.Sprintf("diagnostic failure on component %02Xh (40h/%02Xh)", uint8(a), uint8(a))
	}
	return fmt.Sprintf("additional sense %02Xh/%02Xh", uint8(a>>8), uint8(a))
}

// Sense is sense data of either format (SPC-4, 4.5).
type Sense struct {
	Key      SenseKey
	ASC      ASC
	Deferred bool // about an earlier command
	// Descriptor tells the format it came in; Append uses it.
	Descriptor bool

	HasInformation bool
	Information    uint64 // a fixed-format field holds 32 bits of it
	CommandInfo    uint64
	FilemarkEOMILI uint8 // bits 7, 6 and 5 of byte 2, fixed format
	FRU            uint8 // field replaceable unit code

	// Field pointer of ILLEGAL REQUEST (SKSV with that key).
	HasField   bool
	InCDB      bool   // else in the parameter list
	Field      uint16 // byte number
	HasBit     bool
	BitPointer uint8

	HasProgress bool
	Progress    uint16 // of 65536
}

// InvalidField is the sense for a bad byte of the CDB (inCDB) or of the parameter list.
func InvalidField(inCDB bool, field uint16) Sense {
	s := Sense{Key: IllegalRequest, ASC: ASCInvalidFieldInParameters, HasField: true, InCDB: inCDB, Field: field}
	if inCDB {
		s.ASC = ASCInvalidFieldInCDB
	}
	return s
}

// String is the sense in words.
func (s Sense) String() string {
	var b strings.Builder
	if s.Deferred {
		b.WriteString("deferred ")
	}
	b.WriteString(s.Key.String())
	b.WriteString(", ")
	b.WriteString(s.ASC.String())
	if s.HasInformation {
		fmt.Fprintf(&b, ", information 0x%x", s.Information)
	}
	if s.HasField {
		where := "parameter list"
		if s.InCDB {
			where = "CDB"
		}
		fmt.Fprintf(&b, ", at byte %d of the %s", s.Field, where)
		if s.HasBit {
			fmt.Fprintf(&b, " bit %d", s.BitPointer)
		}
	}
	if s.HasProgress {
		fmt.Fprintf(&b, ", %d %% done", int(s.Progress)*100/65536)
	}
	return b.String()
}

// sks is the three sense-key specific bytes.
func (s *Sense) sks() (b [3]byte) {
	switch {
	case s.HasField:
		b[0] = 0x80
		if s.InCDB {
			b[0] |= 0x40
		}
		if s.HasBit {
			b[0] |= 0x08 | s.BitPointer&7
		}
		be.PutUint16(b[1:], s.Field)
	case s.HasProgress:
		b[0] = 0x80
		be.PutUint16(b[1:], s.Progress)
	}
	return b
}

func (s *Sense) setSKS(b []byte) {
	if b[0]&0x80 == 0 {
		return
	}
	switch s.Key {
	case IllegalRequest:
		s.HasField, s.InCDB = true, b[0]&0x40 != 0
		s.HasBit, s.BitPointer = b[0]&8 != 0, b[0]&7
		s.Field = be.Uint16(b[1:])
	case NoSense, NotReady:
		s.HasProgress, s.Progress = true, be.Uint16(b[1:])
	}
}

// FixedSenseLen is the length that AppendFixed appends.
const FixedSenseLen = 18

// Append appends the sense data in the format that s.Descriptor names.
func (s Sense) Append(dst []byte) []byte {
	if s.Descriptor {
		return s.AppendDescriptor(dst)
	}
	return s.AppendFixed(dst)
}

// AppendFixed appends 18 bytes of fixed-format sense (SPC-4, 4.5.3). Information is kept only when it fits 32 bits.
func (s Sense) AppendFixed(dst []byte) []byte {
	var b [FixedSenseLen]byte
	b[0] = 0x70
	if s.Deferred {
		b[0] = 0x71
	}
	if s.HasInformation && s.Information <= 1<<32-1 {
		b[0] |= 0x80
		be.PutUint32(b[3:], uint32(s.Information))
	}
	b[2] = byte(s.Key)&0xf | s.FilemarkEOMILI&0xe0
	b[7] = FixedSenseLen - 8
	be.PutUint32(b[8:], uint32(s.CommandInfo))
	be.PutUint16(b[12:], uint16(s.ASC))
	b[14] = s.FRU
	sks := s.sks()
	copy(b[15:], sks[:])
	return append(dst, b[:]...)
}

// AppendDescriptor appends descriptor-format sense (SPC-4, 4.5.2) with the descriptors that s has values for.
func (s Sense) AppendDescriptor(dst []byte) []byte {
	start := len(dst)
	rc := byte(0x72)
	if s.Deferred {
		rc = 0x73
	}
	dst = append(dst, rc, byte(s.Key)&0xf, byte(s.ASC>>8), byte(s.ASC), 0, 0, 0, 0)
	if s.HasInformation {
		dst = append(dst, 0x00, 0x0a, 0x80, 0)
		dst = be.AppendUint64(dst, s.Information)
	}
	if s.CommandInfo != 0 {
		dst = append(dst, 0x01, 0x0a, 0, 0)
		dst = be.AppendUint64(dst, s.CommandInfo)
	}
	if s.HasField || s.HasProgress {
		sks := s.sks()
		dst = append(dst, 0x02, 0x06, 0, 0, sks[0], sks[1], sks[2], 0)
	}
	if s.FRU != 0 {
		dst = append(dst, 0x03, 0x02, 0, s.FRU)
	}
	dst[start+7] = byte(len(dst) - start - 8)
	return dst
}

// ParseSense reads sense data of either format. ok is false when b does not begin with a response code of
// 70h to 73h or is too short to hold a sense key. Fields beyond the bytes received, or
// beyond the length that the data itself states, are left zero.
func ParseSense(b []byte) (s Sense, ok bool) {
	if len(b) < 3 {
		return s, false
	}
	switch b[0] & 0x7f {
	case 0x70, 0x71:
		s.Deferred = b[0]&0x7f == 0x71
		s.Key = SenseKey(b[2] & 0xf)
		s.FilemarkEOMILI = b[2] & 0xe0
		if len(b) >= 7 && b[0]&0x80 != 0 {
			s.HasInformation, s.Information = true, uint64(be.Uint32(b[3:]))
		}
		if len(b) < 8 {
			return s, true
		}
		if n := 8 + int(b[7]); n < len(b) {
			b = b[:n]
		}
		if len(b) >= 12 {
			s.CommandInfo = uint64(be.Uint32(b[8:]))
		}
		if len(b) >= 14 {
			s.ASC = ASC(be.Uint16(b[12:]))
		}
		if len(b) >= 15 {
			s.FRU = b[14]
		}
		if len(b) >= 18 {
			s.setSKS(b[15:18])
		}
		return s, true
	case 0x72, 0x73:
		s.Descriptor = true
		s.Deferred = b[0]&0x7f == 0x73
		s.Key = SenseKey(b[1] & 0xf)
		if len(b) < 4 {
			return s, true
		}
		s.ASC = ASC(be.Uint16(b[2:]))
		if len(b) < 8 {
			return s, true
		}
		if n := 8 + int(b[7]); n < len(b) {
			b = b[:n]
		}
		for d := b[8:]; len(d) >= 2; {
			n := 2 + int(d[1])
			if n > len(d) {
				break
			}
			switch {
			case d[0] == 0 && n >= 12:
				s.HasInformation, s.Information = d[2]&0x80 != 0, be.Uint64(d[4:])
			case d[0] == 1 && n >= 12:
				s.CommandInfo = be.Uint64(d[4:])
			case d[0] == 2 && n >= 7:
				s.setSKS(d[4:7])
			case d[0] == 3 && n >= 4:
				s.FRU = d[3]
			case d[0] == 4 && n >= 4:
				s.FilemarkEOMILI = d[3] & 0xe0
			}
			d = d[n:]
		}
		return s, true
	}
	return s, false
}
