package scsi

import (
	"encoding/hex"
	"fmt"
	"strings"
)

// MaxCDBLen is the longest CDB that an SRP_CMD carries here: 16 bytes in its fixed part and up to 16 additional ones.
const MaxCDBLen = 32

// CDB is a command descriptor block of up to MaxCDBLen bytes, held by value. The
// zero value is TEST UNIT READY with length 0; use the builders or NewCDB.
type CDB struct {
	b [MaxCDBLen]byte
	n uint8
}

// CDBLengthError is a number of bytes that no CDB has here.
type CDBLengthError int

func (n CDBLengthError) Error() string {
	return fmt.Sprintf("scsi: a CDB has 1 to %d bytes, not %d", MaxCDBLen, int(n))
}

// NewCDB copies raw. It fails with a CDBLengthError when raw is empty or longer than MaxCDBLen.
func NewCDB(raw []byte) (CDB, error) {
	var c CDB
	if len(raw) == 0 || len(raw) > MaxCDBLen {
		return c, CDBLengthError(len(raw))
	}
	c.n = uint8(copy(c.b[:], raw))
	return c, nil
}

// ParseCDB reads a CDB from hexadecimal digits, which blanks, colons or commas may separate.
func ParseCDB(s string) (CDB, error) {
	clean := strings.NewReplacer(" ", "", ":", "", ",", "", "\t", "", "0x", "").Replace(s)
	raw, err := hex.DecodeString(clean)
	if err != nil {
		return CDB{}, fmt.Errorf("scsi: CDB %q: want pairs of hexadecimal digits such as \"12 00 00 00 24 00\"", s)
	}
	return NewCDB(raw)
}

// Bytes is the CDB's bytes; they alias c.
func (c *CDB) Bytes() []byte { return c.b[:c.n] }

// Len is the CDB's length in bytes.
func (c *CDB) Len() int { return int(c.n) }

// Opcode is the first byte.
func (c *CDB) Opcode() Opcode { return Opcode(c.b[0]) }

// String names the command and shows the bytes.
func (c CDB) String() string {
	return fmt.Sprintf("%s (% x)", CommandName(c.b[:c.n]), c.b[:c.n])
}

// Opcode is the operation code, byte 0 of a CDB (SPC-4, table E.2).
type Opcode uint8

// The operation codes of this package.
const (
	OpTestUnitReady        Opcode = 0x00
	OpRequestSense         Opcode = 0x03
	OpRead6                Opcode = 0x08
	OpWrite6               Opcode = 0x0a
	OpInquiry              Opcode = 0x12
	OpModeSelect6          Opcode = 0x15
	OpReserve6             Opcode = 0x16
	OpRelease6             Opcode = 0x17
	OpModeSense6           Opcode = 0x1a
	OpStartStopUnit        Opcode = 0x1b
	OpPreventAllowRemoval  Opcode = 0x1e
	OpReadCapacity10       Opcode = 0x25
	OpRead10               Opcode = 0x28
	OpWrite10              Opcode = 0x2a
	OpWriteVerify10        Opcode = 0x2e
	OpVerify10             Opcode = 0x2f
	OpSynchronizeCache10   Opcode = 0x35
	OpWriteSame10          Opcode = 0x41
	OpUnmap                Opcode = 0x42
	OpLogSense             Opcode = 0x4d
	OpModeSelect10         Opcode = 0x55
	OpModeSense10          Opcode = 0x5a
	OpPersistentReserveIn  Opcode = 0x5e
	OpPersistentReserveOut Opcode = 0x5f
	OpVariableLength       Opcode = 0x7f
	OpATAPassThrough16     Opcode = 0x85
	OpRead16               Opcode = 0x88
	OpCompareAndWrite      Opcode = 0x89
	OpWrite16              Opcode = 0x8a
	OpWriteVerify16        Opcode = 0x8e
	OpVerify16             Opcode = 0x8f
	OpSynchronizeCache16   Opcode = 0x91
	OpWriteSame16          Opcode = 0x93
	OpServiceActionIn16    Opcode = 0x9e
	OpReportLUNs           Opcode = 0xa0
	OpMaintenanceIn        Opcode = 0xa3
	OpRead12               Opcode = 0xa8
	OpWrite12              Opcode = 0xaa
	OpWriteVerify12        Opcode = 0xae
	OpVerify12             Opcode = 0xaf
)

// Service actions (byte 1, bits 4:0, or bytes 8 and 9 of a variable-length CDB).
const (
	SAReadCapacity16         = 0x10 // SERVICE ACTION IN(16)
	SAGetLBAStatus           = 0x12 // SERVICE ACTION IN(16)
	SAReportTargetPortGroups = 0x0a // MAINTENANCE IN
	SAReportSupportedOpcodes = 0x0c // MAINTENANCE IN
	SAReportSupportedTMFs    = 0x0d // MAINTENANCE IN
)

var opcodeNames = map[Opcode]string{
	OpTestUnitReady: "TEST UNIT READY", OpRequestSense: "REQUEST SENSE", OpRead6: "READ(6)", OpWrite6: "WRITE(6)",
	OpInquiry: "INQUIRY", OpModeSelect6: "MODE SELECT(6)", OpReserve6: "RESERVE(6)", OpRelease6: "RELEASE(6)",
	OpModeSense6: "MODE SENSE(6)", OpStartStopUnit: "START STOP UNIT", OpPreventAllowRemoval: "PREVENT ALLOW MEDIUM REMOVAL",
	OpReadCapacity10: "READ CAPACITY(10)", OpRead10: "READ(10)", OpWrite10: "WRITE(10)", OpWriteVerify10: "WRITE AND VERIFY(10)",
	OpVerify10: "VERIFY(10)", OpSynchronizeCache10: "SYNCHRONIZE CACHE(10)", OpWriteSame10: "WRITE SAME(10)", OpUnmap: "UNMAP",
	OpLogSense: "LOG SENSE", OpModeSelect10: "MODE SELECT(10)", OpModeSense10: "MODE SENSE(10)",
	OpPersistentReserveIn: "PERSISTENT RESERVE IN", OpPersistentReserveOut: "PERSISTENT RESERVE OUT",
	OpVariableLength: "variable-length CDB", OpATAPassThrough16: "ATA PASS-THROUGH(16)", OpRead16: "READ(16)",
	OpCompareAndWrite: "COMPARE AND WRITE", OpWrite16: "WRITE(16)", OpWriteVerify16: "WRITE AND VERIFY(16)", OpVerify16: "VERIFY(16)",
	OpSynchronizeCache16: "SYNCHRONIZE CACHE(16)", OpWriteSame16: "WRITE SAME(16)", OpServiceActionIn16: "SERVICE ACTION IN(16)",
	OpReportLUNs: "REPORT LUNS", OpMaintenanceIn: "MAINTENANCE IN", OpRead12: "READ(12)", OpWrite12: "WRITE(12)",
	OpWriteVerify12: "WRITE AND VERIFY(12)", OpVerify12: "VERIFY(12)",
}

func (o Opcode) String() string {
	if s, ok := opcodeNames[o]; ok {
		return s
	}
	return fmt.Sprintf("opcode 0x%02x", uint8(o))
}

// CommandName names the command in cdb, looking at its service action where the opcode alone does not tell.
func CommandName(cdb []byte) string {
	if len(cdb) == 0 {
		return "empty CDB"
	}
	op := Opcode(cdb[0])
	if len(cdb) > 1 {
		switch sa := cdb[1] & 0x1f; {
		case op == OpServiceActionIn16 && sa == SAReadCapacity16:
			return "READ CAPACITY(16)"
		case op == OpServiceActionIn16 && sa == SAGetLBAStatus:
			return "GET LBA STATUS"
		case op == OpMaintenanceIn && sa == SAReportTargetPortGroups:
			return "REPORT TARGET PORT GROUPS"
		case op == OpMaintenanceIn && sa == SAReportSupportedOpcodes:
			return "REPORT SUPPORTED OPERATION CODES"
		case op == OpMaintenanceIn && sa == SAReportSupportedTMFs:
			return "REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS"
		}
	}
	return op.String()
}

// CDBLen is the length in bytes that the CDB starting with cdb must have: by the
// group code (SPC-4, 4.2.5.1), or by byte 7 for a variable-length CDB. 0 when it cannot be
// told: vendor-specific groups, or too few bytes.
func CDBLen(cdb []byte) int {
	if len(cdb) == 0 {
		return 0
	}
	switch cdb[0] >> 5 {
	case 0:
		return 6
	case 1, 2:
		return 10
	case 3:
		if cdb[0] == byte(OpVariableLength) && len(cdb) >= 8 {
			return 8 + int(cdb[7])
		}
		return 0
	case 4:
		return 16
	case 5:
		return 12
	}
	return 0
}
