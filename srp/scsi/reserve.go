package scsi

import "fmt"

// PERSISTENT RESERVE IN service actions (SPC-4, 6.15).
const (
	PRReadKeys           = 0
	PRReadReservation    = 1
	PRReportCapabilities = 2
	PRReadFullStatus     = 3
)

// PERSISTENT RESERVE OUT service actions (SPC-4, 6.16).
const (
	PRRegister             = 0
	PRReserve              = 1
	PRRelease              = 2
	PRClear                = 3
	PRPreempt              = 4
	PRPreemptAbort         = 5
	PRRegisterIgnoreKey    = 6
	PRRegisterMove         = 7
	PRReplaceLostKey       = 8
	prOutParameterListSize = 24
)

// ReservationType is the type of a persistent reservation (SPC-4, table 208).
type ReservationType uint8

const (
	WriteExclusive                 ReservationType = 1
	ExclusiveAccess                ReservationType = 3
	WriteExclusiveRegistrantsOnly  ReservationType = 5
	ExclusiveAccessRegistrantsOnly ReservationType = 6
	WriteExclusiveAllRegistrants   ReservationType = 7
	ExclusiveAccessAllRegistrants  ReservationType = 8
)

func (t ReservationType) String() string {
	switch t {
	case WriteExclusive:
		return "write exclusive"
	case ExclusiveAccess:
		return "exclusive access"
	case WriteExclusiveRegistrantsOnly:
		return "write exclusive, registrants only"
	case ExclusiveAccessRegistrantsOnly:
		return "exclusive access, registrants only"
	case WriteExclusiveAllRegistrants:
		return "write exclusive, all registrants"
	case ExclusiveAccessAllRegistrants:
		return "exclusive access, all registrants"
	}
	return fmt.Sprintf("reservation type %d", uint8(t))
}

// Valid reports a type of SPC-4.
func (t ReservationType) Valid() bool {
	switch t {
	case WriteExclusive, ExclusiveAccess, WriteExclusiveRegistrantsOnly, ExclusiveAccessRegistrantsOnly, WriteExclusiveAllRegistrants, ExclusiveAccessAllRegistrants:
		return true
	}
	return false
}

// AllRegistrants reports the types that every registrant holds.
func (t ReservationType) AllRegistrants() bool {
	return t == WriteExclusiveAllRegistrants || t == ExclusiveAccessAllRegistrants
}

// RegistrantsOnly reports the types that let every registrant in, which include those of AllRegistrants.
func (t ReservationType) RegistrantsOnly() bool { return t >= WriteExclusiveRegistrantsOnly }

// ExcludesReads reports the types that keep others from reading.
func (t ReservationType) ExcludesReads() bool {
	return t == ExclusiveAccess || t == ExclusiveAccessRegistrantsOnly || t == ExclusiveAccessAllRegistrants
}

// PersistentReserveIn asks for reservation data.
func PersistentReserveIn(serviceAction uint8, allocLen uint16) (c CDB) {
	c.n = 10
	c.b[0] = byte(OpPersistentReserveIn)
	c.b[1] = serviceAction & 0x1f
	be.PutUint16(c.b[7:], allocLen)
	return c
}

// ParsePersistentReserveIn decodes a PERSISTENT RESERVE IN CDB; allocLen is in bytes.
func ParsePersistentReserveIn(cdb []byte) (serviceAction uint8, allocLen uint16, ok bool) {
	if len(cdb) < 10 || Opcode(cdb[0]) != OpPersistentReserveIn {
		return 0, 0, false
	}
	return cdb[1] & 0x1f, be.Uint16(cdb[7:]), true
}

// PersistentReserveOut changes registrations or the reservation; its parameter list is PROutParams.
func PersistentReserveOut(serviceAction uint8, t ReservationType, paramLen uint32) (c CDB) {
	c.n = 10
	c.b[0] = byte(OpPersistentReserveOut)
	c.b[1] = serviceAction & 0x1f
	c.b[2] = byte(t) & 0xf // scope 0: the logical unit
	be.PutUint32(c.b[5:], paramLen)
	return c
}

// ParsePersistentReserveOut decodes a PERSISTENT RESERVE OUT CDB; paramLen is in bytes.
func ParsePersistentReserveOut(cdb []byte) (serviceAction, scope uint8, t ReservationType, paramLen uint32, ok bool) {
	if len(cdb) < 10 || Opcode(cdb[0]) != OpPersistentReserveOut {
		return 0, 0, 0, 0, false
	}
	return cdb[1] & 0x1f, cdb[2] >> 4, ReservationType(cdb[2] & 0xf), be.Uint32(cdb[5:]), true
}

// PROutParams is the basic PERSISTENT RESERVE OUT parameter list (SPC-4, 6.16.3), 24 bytes.
type PROutParams struct {
	Key              uint64 // the registered key
	ServiceActionKey uint64 // the new or the preempted key
	SpecInitiators   bool   // SPEC_I_PT: a list of transport ids follows
	AllTargetPorts   bool
	PersistThroughPL bool // APTPL
}

// PROutParamsLen is the size of the basic list.
const PROutParamsLen = prOutParameterListSize

// Append appends the list's 24 bytes.
func (p PROutParams) Append(dst []byte) []byte {
	var b [PROutParamsLen]byte
	be.PutUint64(b[0:], p.Key)
	be.PutUint64(b[8:], p.ServiceActionKey)
	bit(&b[20], 0x08, p.SpecInitiators)
	bit(&b[20], 0x04, p.AllTargetPorts)
	bit(&b[20], 0x01, p.PersistThroughPL)
	return append(dst, b[:]...)
}

// ParsePROutParams reads the basic list; what follows its 24 bytes is not looked at.
func ParsePROutParams(b []byte) (p PROutParams, err error) {
	if len(b) < PROutParamsLen {
		return p, shortError("PERSISTENT RESERVE OUT parameter list", len(b), PROutParamsLen)
	}
	return PROutParams{
		Key: be.Uint64(b), ServiceActionKey: be.Uint64(b[8:]),
		SpecInitiators: b[20]&8 != 0, AllTargetPorts: b[20]&4 != 0, PersistThroughPL: b[20]&1 != 0,
	}, nil
}

// PRMoveParams is the parameter list of REGISTER AND MOVE (SPC-4, 6.16.4): 24 bytes and a transport id.
type PRMoveParams struct {
	Key, ServiceActionKey uint64
	Unregister            bool
	PersistThroughPL      bool
	RelativePort          uint16
	TransportID           []byte
}

// Append appends the list: 24 bytes and the transport id.
func (p PRMoveParams) Append(dst []byte) []byte {
	var b [24]byte
	be.PutUint64(b[0:], p.Key)
	be.PutUint64(b[8:], p.ServiceActionKey)
	bit(&b[17], 0x02, p.Unregister)
	bit(&b[17], 0x01, p.PersistThroughPL)
	be.PutUint16(b[18:], p.RelativePort)
	be.PutUint32(b[20:], uint32(len(p.TransportID)))
	dst = append(dst, b[:]...)
	return append(dst, p.TransportID...)
}

// ParsePRMoveParams reads the list; TransportID aliases b.
func ParsePRMoveParams(b []byte) (p PRMoveParams, err error) {
	if len(b) < 24 {
		return p, shortError("REGISTER AND MOVE parameter list", len(b), 24)
	}
	n := be.Uint32(b[20:])
	if uint64(n)+24 > uint64(len(b)) {
		return p, shortError("REGISTER AND MOVE parameter list", len(b), int(n)+24)
	}
	return PRMoveParams{
		Key: be.Uint64(b), ServiceActionKey: be.Uint64(b[8:]), Unregister: b[17]&2 != 0, PersistThroughPL: b[17]&1 != 0,
		RelativePort: be.Uint16(b[18:]), TransportID: b[24 : 24+n],
	}, nil
}

// SRPTransportID is the transport id of an SRP initiator port (SPC-4, 7.6.4.6), 24 bytes: protocol 4 and the
// 16-byte initiator port identifier.
func SRPTransportID(portID [16]byte) (b [24]byte) {
	b[0] = 0x04
	copy(b[8:], portID[:])
	return b
}

// ParseSRPTransportID reads an SRP transport id.
func ParseSRPTransportID(b []byte) (portID [16]byte, err error) {
	if len(b) < 24 {
		return portID, shortError("transport id", len(b), 24)
	}
	if b[0]&0xf != 4 {
		return portID, fmt.Errorf("scsi: transport id of protocol %d, want 4 (SRP)", b[0]&0xf)
	}
	copy(portID[:], b[8:24])
	return portID, nil
}

// AppendPRKeys appends READ KEYS data.
func AppendPRKeys(dst []byte, generation uint32, keys []uint64) []byte {
	dst = be.AppendUint32(dst, generation)
	dst = be.AppendUint32(dst, uint32(8*len(keys)))
	for _, k := range keys {
		dst = be.AppendUint64(dst, k)
	}
	return dst
}

// ParsePRKeys reads READ KEYS data; total is how many keys there are.
func ParsePRKeys(b []byte) (generation uint32, keys []uint64, total int, err error) {
	if len(b) < 8 {
		return 0, nil, 0, shortError("READ KEYS data", len(b), 8)
	}
	generation, total = be.Uint32(b), int(be.Uint32(b[4:])/8)
	for b = b[8:]; len(b) >= 8 && len(keys) < total; b = b[8:] {
		keys = append(keys, be.Uint64(b))
	}
	return generation, keys, total, nil
}

// PRReservation is READ RESERVATION data. Held is false when there is no reservation.
type PRReservation struct {
	Generation uint32
	Held       bool
	Key        uint64
	Scope      uint8
	Type       ReservationType
}

// Append appends READ RESERVATION data.
func (r PRReservation) Append(dst []byte) []byte {
	dst = be.AppendUint32(dst, r.Generation)
	if !r.Held {
		return append(dst, 0, 0, 0, 0)
	}
	dst = append(dst, 0, 0, 0, 16)
	dst = be.AppendUint64(dst, r.Key)
	return append(dst, 0, 0, 0, 0, 0, r.Scope<<4|byte(r.Type)&0xf, 0, 0)
}

// ParsePRReservation reads READ RESERVATION data: 8 bytes, or 24 when there is a reservation.
func ParsePRReservation(b []byte) (r PRReservation, err error) {
	if len(b) < 8 {
		return r, shortError("READ RESERVATION data", len(b), 8)
	}
	r.Generation = be.Uint32(b)
	if be.Uint32(b[4:]) == 0 {
		return r, nil
	}
	if len(b) < 24 {
		return r, shortError("READ RESERVATION data", len(b), 24)
	}
	r.Held, r.Key, r.Scope, r.Type = true, be.Uint64(b[8:]), b[21]>>4, ReservationType(b[21]&0xf)
	return r, nil
}

// PRFullStatus is one descriptor of READ FULL STATUS (SPC-4, 6.15.5).
type PRFullStatus struct {
	Key          uint64
	AllPorts     bool
	Holder       bool
	Scope        uint8
	Type         ReservationType
	RelativePort uint16
	TransportID  []byte
}

// AppendPRFullStatus appends READ FULL STATUS data.
func AppendPRFullStatus(dst []byte, generation uint32, list []PRFullStatus) []byte {
	start := len(dst)
	dst = be.AppendUint32(dst, generation)
	dst = append(dst, 0, 0, 0, 0)
	for _, s := range list {
		dst = be.AppendUint64(dst, s.Key)
		var b [16]byte
		bit(&b[4], 2, s.AllPorts)
		if s.Holder {
			b[4] |= 1
			b[5] = s.Scope<<4 | byte(s.Type)&0xf
		}
		be.PutUint16(b[10:], s.RelativePort)
		be.PutUint32(b[12:], uint32(len(s.TransportID)))
		dst = append(dst, b[:]...)
		dst = append(dst, s.TransportID...)
	}
	be.PutUint32(dst[start+4:], uint32(len(dst)-start-8))
	return dst
}

// ParsePRFullStatus reads the descriptors that were received whole.
func ParsePRFullStatus(b []byte) (generation uint32, list []PRFullStatus, err error) {
	if len(b) < 8 {
		return 0, nil, shortError("READ FULL STATUS data", len(b), 8)
	}
	generation = be.Uint32(b)
	if n := uint64(be.Uint32(b[4:])) + 8; n < uint64(len(b)) {
		b = b[:n]
	}
	for b = b[8:]; len(b) >= 24; {
		n := uint64(be.Uint32(b[20:]))
		if 24+n > uint64(len(b)) {
			return generation, list, shortError("full status descriptor", len(b), int(24+n))
		}
		list = append(list, PRFullStatus{
			Key: be.Uint64(b), AllPorts: b[12]&2 != 0, Holder: b[12]&1 != 0, Scope: b[13] >> 4, Type: ReservationType(b[13] & 0xf),
			RelativePort: be.Uint16(b[18:]), TransportID: b[24 : 24+n],
		})
		b = b[24+n:]
	}
	return generation, list, nil
}

// PRCapabilities is REPORT CAPABILITIES data (SPC-4, 6.15.4), 8 bytes.
type PRCapabilities struct {
	ReplaceLostKey       bool
	CompatibleReserve    bool // CRH
	SpecInitiators       bool
	AllTargetPorts       bool
	PersistThroughPL     bool
	PersistThroughActive bool
	TypeMask             uint16 // bit n: reservation type n is supported; valid when not 0
}

// Append appends REPORT CAPABILITIES data.
func (c PRCapabilities) Append(dst []byte) []byte {
	var b [8]byte
	be.PutUint16(b[0:], 8)
	bit(&b[2], 0x80, c.ReplaceLostKey)
	bit(&b[2], 0x10, c.CompatibleReserve)
	bit(&b[2], 0x08, c.SpecInitiators)
	bit(&b[2], 0x04, c.AllTargetPorts)
	bit(&b[2], 0x01, c.PersistThroughPL)
	bit(&b[3], 0x01, c.PersistThroughActive)
	if c.TypeMask != 0 {
		b[3] |= 0x80
		// Byte 4 bit n is type n for n up to 7, byte 5 bit 0 is type 8.
		b[4], b[5] = byte(c.TypeMask), byte(c.TypeMask>>8)
	}
	return append(dst, b[:]...)
}

// ParsePRCapabilities reads REPORT CAPABILITIES data, of which 6 bytes are needed.
func ParsePRCapabilities(b []byte) (c PRCapabilities, err error) {
	if len(b) < 6 {
		return c, shortError("REPORT CAPABILITIES data", len(b), 6)
	}
	c = PRCapabilities{
		ReplaceLostKey: b[2]&0x80 != 0, CompatibleReserve: b[2]&0x10 != 0, SpecInitiators: b[2]&8 != 0,
		AllTargetPorts: b[2]&4 != 0, PersistThroughPL: b[2]&1 != 0, PersistThroughActive: b[3]&1 != 0,
	}
	if b[3]&0x80 != 0 {
		c.TypeMask = uint16(b[4]) | uint16(b[5])<<8
	}
	return c, nil
}
