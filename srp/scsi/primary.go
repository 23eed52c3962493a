package scsi

// Builders and parsers of the commands that do not name blocks. A parser returns
// false when cdb is another command or too short.

// TestUnitReady asks whether the logical unit is ready; it moves no data (SPC-4, 6.47).
func TestUnitReady() (c CDB) { c.n = 6; return c }

// InquiryCDB is INQUIRY's request (SPC-4, 6.6).
type InquiryCDB struct {
	EVPD     bool
	Page     uint8 // EVPD only; must be 0 without
	AllocLen uint16
}

// CDB encodes the request.
func (q InquiryCDB) CDB() (c CDB) {
	c.n = 6
	c.b[0] = byte(OpInquiry)
	if q.EVPD {
		c.b[1] = 1
	}
	c.b[2] = q.Page
	be.PutUint16(c.b[3:], q.AllocLen)
	return c
}

// Inquiry asks for the standard data.
func Inquiry(allocLen uint16) CDB { return InquiryCDB{AllocLen: allocLen}.CDB() }

// InquiryVPD asks for a vital product data page.
func InquiryVPD(page uint8, allocLen uint16) CDB {
	return InquiryCDB{EVPD: true, Page: page, AllocLen: allocLen}.CDB()
}

// ParseInquiryCDB decodes an INQUIRY CDB.
func ParseInquiryCDB(cdb []byte) (q InquiryCDB, ok bool) {
	if len(cdb) < 6 || Opcode(cdb[0]) != OpInquiry {
		return q, false
	}
	return InquiryCDB{EVPD: cdb[1]&1 != 0, Page: cdb[2], AllocLen: be.Uint16(cdb[3:])}, true
}

// ReportLUNs asks for the LUN list; selectReport 0 all but well-known ones, 1 well-known, 2 all (SPC-4, 6.33).
func ReportLUNs(selectReport uint8, allocLen uint32) (c CDB) {
	c.n = 12
	c.b[0] = byte(OpReportLUNs)
	c.b[2] = selectReport
	be.PutUint32(c.b[6:], allocLen)
	return c
}

// ParseReportLUNsCDB decodes a REPORT LUNS CDB; allocLen is in bytes.
func ParseReportLUNsCDB(cdb []byte) (selectReport uint8, allocLen uint32, ok bool) {
	if len(cdb) < 12 || Opcode(cdb[0]) != OpReportLUNs {
		return 0, 0, false
	}
	return cdb[2], be.Uint32(cdb[6:]), true
}

// RequestSense asks for sense data, in descriptor format with desc.
func RequestSense(desc bool, allocLen uint8) (c CDB) {
	c.n = 6
	c.b[0] = byte(OpRequestSense)
	if desc {
		c.b[1] = 1
	}
	c.b[4] = allocLen
	return c
}

// ParseRequestSenseCDB decodes a REQUEST SENSE CDB; allocLen is in bytes.
func ParseRequestSenseCDB(cdb []byte) (desc bool, allocLen uint8, ok bool) {
	if len(cdb) < 6 || Opcode(cdb[0]) != OpRequestSense {
		return false, 0, false
	}
	return cdb[1]&1 != 0, cdb[4], true
}

// ReadCapacity10 asks for 8 bytes of ReadCapacity10Data.
func ReadCapacity10() (c CDB) {
	c.n = 10
	c.b[0] = byte(OpReadCapacity10)
	return c
}

// ReadCapacity16 asks for Capacity; 32 bytes is all of it.
func ReadCapacity16(allocLen uint32) (c CDB) {
	c.n = 16
	c.b[0] = byte(OpServiceActionIn16)
	c.b[1] = SAReadCapacity16
	be.PutUint32(c.b[10:], allocLen)
	return c
}

// ParseReadCapacity16CDB decodes a READ CAPACITY(16) CDB; allocLen is in bytes.
func ParseReadCapacity16CDB(cdb []byte) (allocLen uint32, ok bool) {
	if len(cdb) < 16 || Opcode(cdb[0]) != OpServiceActionIn16 || cdb[1]&0x1f != SAReadCapacity16 {
		return 0, false
	}
	return be.Uint32(cdb[10:]), true
}

// GetLBAStatus asks for the provisioning state of blocks from lba on.
func GetLBAStatus(lba uint64, allocLen uint32) (c CDB) {
	c.n = 16
	c.b[0] = byte(OpServiceActionIn16)
	c.b[1] = SAGetLBAStatus
	be.PutUint64(c.b[2:], lba)
	be.PutUint32(c.b[10:], allocLen)
	return c
}

// ParseGetLBAStatusCDB decodes a GET LBA STATUS CDB; allocLen is in bytes.
func ParseGetLBAStatusCDB(cdb []byte) (lba uint64, allocLen uint32, ok bool) {
	if len(cdb) < 16 || Opcode(cdb[0]) != OpServiceActionIn16 || cdb[1]&0x1f != SAGetLBAStatus {
		return 0, 0, false
	}
	return be.Uint64(cdb[2:]), be.Uint32(cdb[10:]), true
}

// Page control of MODE SENSE (SPC-4, 6.11).
const (
	ModeCurrent    = 0
	ModeChangeable = 1
	ModeDefault    = 2
	ModeSaved      = 3
)

// Mode pages. AllModePages with subpage 0 or 0xff asks for all.
const (
	ModePageErrorRecovery = 0x01
	ModePageDisconnect    = 0x02
	ModePageCaching       = 0x08
	ModePageControl       = 0x0a
	ModePageInformational = 0x1c
	AllModePages          = 0x3f
)

// ModeSenseCDB is MODE SENSE(6) or, with Ten, (10).
type ModeSenseCDB struct {
	Ten      bool
	DBD      bool // no block descriptors
	LLBAA    bool // (10) only: a long block descriptor may be returned
	PC       uint8
	Page     uint8
	Subpage  uint8
	AllocLen uint16 // 8 bits in (6)
}

// CDB encodes the request.
func (m ModeSenseCDB) CDB() (c CDB) {
	if m.DBD {
		c.b[1] |= 0x08
	}
	c.b[2] = m.PC<<6 | m.Page&0x3f
	c.b[3] = m.Subpage
	if !m.Ten {
		c.n = 6
		c.b[0] = byte(OpModeSense6)
		c.b[4] = byte(m.AllocLen)
		return c
	}
	c.n = 10
	c.b[0] = byte(OpModeSense10)
	if m.LLBAA {
		c.b[1] |= 0x10
	}
	be.PutUint16(c.b[7:], m.AllocLen)
	return c
}

// ModeSense6 asks for the current values of page.
func ModeSense6(page uint8, allocLen uint8) CDB {
	return ModeSenseCDB{Page: page, AllocLen: uint16(allocLen)}.CDB()
}

// ModeSense10 is the long form of ModeSense6.
func ModeSense10(page uint8, allocLen uint16) CDB {
	return ModeSenseCDB{Ten: true, Page: page, AllocLen: allocLen}.CDB()
}

// ParseModeSenseCDB decodes a MODE SENSE CDB of either form.
func ParseModeSenseCDB(cdb []byte) (m ModeSenseCDB, ok bool) {
	if len(cdb) < 6 {
		return m, false
	}
	switch Opcode(cdb[0]) {
	case OpModeSense6:
		m.AllocLen = uint16(cdb[4])
	case OpModeSense10:
		if len(cdb) < 10 {
			return m, false
		}
		m.Ten = true
		m.LLBAA = cdb[1]&0x10 != 0
		m.AllocLen = be.Uint16(cdb[7:])
	default:
		return m, false
	}
	m.DBD = cdb[1]&0x08 != 0
	m.PC, m.Page, m.Subpage = cdb[2]>>6, cdb[2]&0x3f, cdb[3]
	return m, true
}

// ModeSelectCDB is MODE SELECT(6) or, with Ten, (10).
type ModeSelectCDB struct {
	Ten      bool
	PF       bool // page format; always set by modern initiators
	SP       bool // save pages
	ParamLen uint16
}

// CDB encodes the request.
func (m ModeSelectCDB) CDB() (c CDB) {
	if m.PF {
		c.b[1] |= 0x10
	}
	if m.SP {
		c.b[1] |= 0x01
	}
	if !m.Ten {
		c.n = 6
		c.b[0] = byte(OpModeSelect6)
		c.b[4] = byte(m.ParamLen)
		return c
	}
	c.n = 10
	c.b[0] = byte(OpModeSelect10)
	be.PutUint16(c.b[7:], m.ParamLen)
	return c
}

// ParseModeSelectCDB decodes a MODE SELECT CDB of either form.
func ParseModeSelectCDB(cdb []byte) (m ModeSelectCDB, ok bool) {
	if len(cdb) < 6 {
		return m, false
	}
	switch Opcode(cdb[0]) {
	case OpModeSelect6:
		m.ParamLen = uint16(cdb[4])
	case OpModeSelect10:
		if len(cdb) < 10 {
			return m, false
		}
		m.Ten = true
		m.ParamLen = be.Uint16(cdb[7:])
	default:
		return m, false
	}
	m.PF, m.SP = cdb[1]&0x10 != 0, cdb[1]&1 != 0
	return m, true
}

// Unmap deallocates the runs of blocks in a parameter list of paramLen bytes (AppendUnmap).
func Unmap(anchor bool, paramLen uint16) (c CDB) {
	c.n = 10
	c.b[0] = byte(OpUnmap)
	if anchor {
		c.b[1] = 1
	}
	be.PutUint16(c.b[7:], paramLen)
	return c
}

// ParseUnmapCDB decodes an UNMAP CDB; paramLen is in bytes.
func ParseUnmapCDB(cdb []byte) (anchor bool, paramLen uint16, ok bool) {
	if len(cdb) < 10 || Opcode(cdb[0]) != OpUnmap {
		return false, 0, false
	}
	return cdb[1]&1 != 0, be.Uint16(cdb[7:]), true
}

// StartStopCDB is START STOP UNIT (SBC-3, 5.25).
type StartStopCDB struct {
	Immed, LoEj, Start, NoFlush bool
	PowerCondition              uint8
}

// CDB encodes the request.
func (s StartStopCDB) CDB() (c CDB) {
	c.n = 6
	c.b[0] = byte(OpStartStopUnit)
	if s.Immed {
		c.b[1] = 1
	}
	c.b[4] = s.PowerCondition << 4
	if s.NoFlush {
		c.b[4] |= 4
	}
	if s.LoEj {
		c.b[4] |= 2
	}
	if s.Start {
		c.b[4] |= 1
	}
	return c
}

// ParseStartStopCDB decodes a START STOP UNIT CDB.
func ParseStartStopCDB(cdb []byte) (s StartStopCDB, ok bool) {
	if len(cdb) < 6 || Opcode(cdb[0]) != OpStartStopUnit {
		return s, false
	}
	return StartStopCDB{Immed: cdb[1]&1 != 0, NoFlush: cdb[4]&4 != 0, LoEj: cdb[4]&2 != 0, Start: cdb[4]&1 != 0, PowerCondition: cdb[4] >> 4}, true
}

// Reporting options of REPORT SUPPORTED OPERATION CODES (SPC-4, 6.34).
const (
	ReportAllOpcodes        = 0
	ReportOneOpcode         = 1 // error if the opcode has service actions
	ReportOneServiceAction  = 2 // error if it has none
	ReportOneOpcodeOrAction = 3
)

// ReportOpcodesCDB is REPORT SUPPORTED OPERATION CODES.
type ReportOpcodesCDB struct {
	RCTD          bool // return command timeouts descriptors
	Options       uint8
	Opcode        Opcode
	ServiceAction uint16
	AllocLen      uint32
}

// CDB encodes the request.
func (r ReportOpcodesCDB) CDB() (c CDB) {
	c.n = 12
	c.b[0] = byte(OpMaintenanceIn)
	c.b[1] = SAReportSupportedOpcodes
	c.b[2] = r.Options & 7
	if r.RCTD {
		c.b[2] |= 0x80
	}
	c.b[3] = byte(r.Opcode)
	be.PutUint16(c.b[4:], r.ServiceAction)
	be.PutUint32(c.b[6:], r.AllocLen)
	return c
}

// ParseReportOpcodesCDB decodes a REPORT SUPPORTED OPERATION CODES CDB.
func ParseReportOpcodesCDB(cdb []byte) (r ReportOpcodesCDB, ok bool) {
	if len(cdb) < 12 || Opcode(cdb[0]) != OpMaintenanceIn || cdb[1]&0x1f != SAReportSupportedOpcodes {
		return r, false
	}
	return ReportOpcodesCDB{RCTD: cdb[2]&0x80 != 0, Options: cdb[2] & 7, Opcode: Opcode(cdb[3]), ServiceAction: be.Uint16(cdb[4:]), AllocLen: be.Uint32(cdb[6:])}, true
}

// ReportSupportedTMFs asks which task management functions the logical unit knows.
func ReportSupportedTMFs(allocLen uint32) (c CDB) {
	c.n = 12
	c.b[0] = byte(OpMaintenanceIn)
	c.b[1] = SAReportSupportedTMFs
	be.PutUint32(c.b[6:], allocLen)
	return c
}
