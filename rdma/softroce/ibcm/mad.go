// Package ibcm speaks the InfiniBand communication manager: the MADs that two nodes
// exchange over QP1 to connect and disconnect queue pairs (IBA vol. 1, chapter 12), with the RDMA/CM addressing header in the REQ's
// private data (annex A11), as the Linux kernel's ib_cm and rdma_cm speak it.
//
// The codec turns 256-byte datagrams into values and back. Machine holds the connections: it takes
// datagrams, calls and the time, and gives datagrams, events and the time of its next
// deadline. It has no socket, no clock, no goroutine and no lock; its caller brings all four.
package ibcm

import (
	"encoding/binary"
	"errors"
	"fmt"

	"srp-initiator/rdma/verbs"
)

// MADSize is the size of every management datagram.
const MADSize = 256

// MAD is one management datagram.
type MAD [MADSize]byte

// Attr is a MAD's attribute id: which CM message it is (IBA vol. 1, 12.6, table 98).
type Attr uint16

// The messages that Machine speaks.
const (
	AttrREQ  Attr = 0x10 // request a connection
	AttrMRA  Attr = 0x11 // message receipt acknowledgement: wait
	AttrREJ  Attr = 0x12 // reject
	AttrREP  Attr = 0x13 // reply
	AttrRTU  Attr = 0x14 // ready to use
	AttrDREQ Attr = 0x15 // request to disconnect
	AttrDREP Attr = 0x16 // reply to it
)

func (a Attr) String() string {
	switch a {
	case AttrREQ:
		return "REQ"
	case AttrMRA:
		return "MRA"
	case AttrREJ:
		return "REJ"
	case AttrREP:
		return "REP"
	case AttrRTU:
		return "RTU"
	case AttrDREQ:
		return "DREQ"
	case AttrDREP:
		return "DREP"
	}
	return fmt.Sprintf("attribute 0x%02x", uint16(a))
}

// MAD header (24 bytes; IBA vol. 1, 13.4.3): base version 1, class 7
// (communication management) version 2, method 3 (Send).
const (
	headerSize   = 24
	bodySize     = MADSize - headerSize
	classCM      = 0x07
	classVersion = 2
	methodSend   = 0x03
)

// Private-data sizes of the messages, in bytes.
const (
	PrivateREQ  = 92
	PrivateREP  = 196
	PrivateRTU  = 224
	PrivateMRA  = 222
	PrivateREJ  = 148
	PrivateDREQ = 220
	PrivateDREP = 224
	sizeARI     = 72
)

var (
	// ErrNotCM: a management datagram of another class, or not one at all.
	ErrNotCM = errors.New("ibcm: not a communication management datagram")
	// ErrMalformed: a CM message whose content cannot be.
	ErrMalformed = errors.New("ibcm: malformed message")
)

var be = binary.BigEndian

func put24(b []byte, v uint32) { b[0], b[1], b[2] = byte(v>>16), byte(v>>8), byte(v) }
func get24(b []byte) uint32    { return uint32(b[0])<<16 | uint32(b[1])<<8 | uint32(b[2]) }

// start clears m and writes its header.
func (m *MAD) start(a Attr, tid uint64) (body []byte) {
	*m = MAD{}
	m[0], m[1], m[2], m[3] = 1, classCM, classVersion, methodSend
	be.PutUint64(m[8:], tid)
	be.PutUint16(m[16:], uint16(a))
	return m[headerSize:]
}

// Attr is the message's kind.
func (m *MAD) Attr() Attr { return Attr(be.Uint16(m[16:])) }

// TID is the transaction id.
func (m *MAD) TID() uint64 { return be.Uint64(m[8:]) }

func (m *MAD) body() []byte { return m[headerSize:] }

// Parse checks b's size and header and copies it into m.
func (m *MAD) Parse(b []byte) error {
	if len(b) != MADSize || b[0] != 1 || b[1] != classCM || b[3] != methodSend {
		return ErrNotCM
	}
	if b[2] != classVersion {
		return fmt.Errorf("%w: class version %d", ErrMalformed, b[2])
	}
	copy(m[:], b)
	return nil
}

// Path is the primary or alternate path of a REQ.
type Path struct {
	LocalLID, RemoteLID uint16
	LocalGID, RemoteGID verbs.GID
	FlowLabel           uint32 // 20 bits
	PacketRate          uint8  // 6 bits
	TrafficClass        uint8
	HopLimit            uint8
	SL                  uint8 // 4 bits
	SubnetLocal         bool
	ACKTimeout          uint8 // 5 bits, 4.096 us * 2^n
}

func (p *Path) encode(b []byte) {
	be.PutUint16(b, p.LocalLID)
	be.PutUint16(b[2:], p.RemoteLID)
	copy(b[4:], p.LocalGID[:])
	copy(b[20:], p.RemoteGID[:])
	be.PutUint32(b[36:], p.FlowLabel<<12|uint32(p.PacketRate&0x3f))
	b[40], b[41] = p.TrafficClass, p.HopLimit
	b[42] = p.SL << 4
	if p.SubnetLocal {
		b[42] |= 1 << 3
	}
	b[43] = p.ACKTimeout << 3
}

func (p *Path) decode(b []byte) {
	p.LocalLID, p.RemoteLID = be.Uint16(b), be.Uint16(b[2:])
	copy(p.LocalGID[:], b[4:])
	copy(p.RemoteGID[:], b[20:])
	v := be.Uint32(b[36:])
	p.FlowLabel, p.PacketRate = v>>12, uint8(v&0x3f)
	p.TrafficClass, p.HopLimit = b[40], b[41]
	p.SL, p.SubnetLocal = b[42]>>4, b[42]&(1<<3) != 0
	p.ACKTimeout = b[43] >> 3
}

// Transport service types of a REQ.
const TransportRC = 0

// REQ asks for a connection (IBA vol. 1, 12.6.5). StartingPSN is where the RECEIVER of the REQ begins to send: what the
// sender expects first.
type REQ struct {
	LocalCommID        uint32
	VendorID           uint32 // 24 bits
	ServiceID          uint64
	CAGUID             uint64
	QKey               uint32
	LocalQPN           uint32
	ResponderResources uint8 // RDMA READs the sender can serve
	InitiatorDepth     uint8 // RDMA READs the sender will have outstanding
	RemoteCMTimeout    uint8 // 5 bits: how soon the receiver should answer
	Transport          uint8 // 2 bits
	FlowControl        bool
	StartingPSN        uint32
	LocalCMTimeout     uint8 // 5 bits: how soon the sender will answer
	RetryCount         uint8 // 3 bits
	PKey               uint16
	PathMTU            verbs.MTU
	RNRRetryCount      uint8 // 3 bits
	MaxCMRetries       uint8 // 4 bits
	SRQ                bool
	Primary, Alternate Path
	PrivateData        [PrivateREQ]byte
}

// Encode writes q as a MAD.
func (q *REQ) Encode(m *MAD, tid uint64) {
	b := m.start(AttrREQ, tid)
	be.PutUint32(b, q.LocalCommID)
	put24(b[5:], q.VendorID)
	be.PutUint64(b[8:], q.ServiceID)
	be.PutUint64(b[16:], q.CAGUID)
	be.PutUint32(b[28:], q.QKey)
	put24(b[32:], q.LocalQPN)
	b[35] = q.ResponderResources
	b[39] = q.InitiatorDepth
	b[43] = q.RemoteCMTimeout<<3 | (q.Transport&3)<<1 | bit(q.FlowControl, 0)
	put24(b[44:], q.StartingPSN)
	b[47] = q.LocalCMTimeout<<3 | q.RetryCount&7
	be.PutUint16(b[48:], q.PKey)
	b[50] = uint8(q.PathMTU)<<4 | q.RNRRetryCount&7
	b[51] = q.MaxCMRetries<<4 | bit(q.SRQ, 3)
	q.Primary.encode(b[52:])
	q.Alternate.encode(b[96:])
	copy(b[140:], q.PrivateData[:])
}

func bit(v bool, n uint) uint8 {
	if v {
		return 1 << n
	}
	return 0
}

// Decode reads a REQ. It checks what no receiver could use; what one may dislike (service id, P_Key, MTU) is Machine's.
func (q *REQ) Decode(m *MAD) error {
	if m.Attr() != AttrREQ {
		return fmt.Errorf("%w: %v where a REQ was due", ErrMalformed, m.Attr())
	}
	b := m.body()
	q.LocalCommID = be.Uint32(b)
	q.VendorID = get24(b[5:])
	q.ServiceID = be.Uint64(b[8:])
	q.CAGUID = be.Uint64(b[16:])
	q.QKey = be.Uint32(b[28:])
	q.LocalQPN = get24(b[32:])
	q.ResponderResources, q.InitiatorDepth = b[35], b[39]
	q.RemoteCMTimeout, q.Transport, q.FlowControl = b[43]>>3, b[43]>>1&3, b[43]&1 != 0
	q.StartingPSN = get24(b[44:])
	q.LocalCMTimeout, q.RetryCount = b[47]>>3, b[47]&7
	q.PKey = be.Uint16(b[48:])
	q.PathMTU, q.RNRRetryCount = verbs.MTU(b[50]>>4), b[50]&7
	q.MaxCMRetries, q.SRQ = b[51]>>4, b[51]&8 != 0
	q.Primary.decode(b[52:])
	q.Alternate.decode(b[96:])
	copy(q.PrivateData[:], b[140:])
	if q.LocalQPN < 2 {
		return fmt.Errorf("%w: REQ from QPN %d", ErrMalformed, q.LocalQPN)
	}
	return nil
}

// REP answers a REQ (IBA vol. 1, 12.6.8).
type REP struct {
	LocalCommID, RemoteCommID uint32
	QKey                      uint32
	LocalQPN                  uint32
	VendorID                  uint32 // 24 bits
	StartingPSN               uint32
	ResponderResources        uint8
	InitiatorDepth            uint8
	TargetACKDelay            uint8 // 5 bits
	FailoverAccepted          uint8 // 2 bits
	FlowControl               bool
	RNRRetryCount             uint8 // 3 bits
	SRQ                       bool
	CAGUID                    uint64
	PrivateData               [PrivateREP]byte
}

// Encode writes p as a MAD.
func (p *REP) Encode(m *MAD, tid uint64) {
	b := m.start(AttrREP, tid)
	be.PutUint32(b, p.LocalCommID)
	be.PutUint32(b[4:], p.RemoteCommID)
	be.PutUint32(b[8:], p.QKey)
	put24(b[12:], p.LocalQPN)
	b[15], b[19], b[23] = byte(p.VendorID>>16), byte(p.VendorID>>8), byte(p.VendorID)
	put24(b[20:], p.StartingPSN)
	b[24], b[25] = p.ResponderResources, p.InitiatorDepth
	b[26] = p.TargetACKDelay<<3 | (p.FailoverAccepted&3)<<1 | bit(p.FlowControl, 0)
	b[27] = p.RNRRetryCount<<5 | bit(p.SRQ, 4)
	be.PutUint64(b[28:], p.CAGUID)
	copy(b[36:], p.PrivateData[:])
}

// Decode reads a REP.
func (p *REP) Decode(m *MAD) error {
	if m.Attr() != AttrREP {
		return fmt.Errorf("%w: %v where a REP was due", ErrMalformed, m.Attr())
	}
	b := m.body()
	p.LocalCommID, p.RemoteCommID = be.Uint32(b), be.Uint32(b[4:])
	p.QKey = be.Uint32(b[8:])
	p.LocalQPN = get24(b[12:])
	p.VendorID = uint32(b[15])<<16 | uint32(b[19])<<8 | uint32(b[23])
	p.StartingPSN = get24(b[20:])
	p.ResponderResources, p.InitiatorDepth = b[24], b[25]
	p.TargetACKDelay, p.FailoverAccepted, p.FlowControl = b[26]>>3, b[26]>>1&3, b[26]&1 != 0
	p.RNRRetryCount, p.SRQ = b[27]>>5, b[27]&0x10 != 0
	p.CAGUID = be.Uint64(b[28:])
	copy(p.PrivateData[:], b[36:])
	if p.LocalQPN < 2 {
		return fmt.Errorf("%w: REP from QPN %d", ErrMalformed, p.LocalQPN)
	}
	return nil
}

// RTU says that the active side is ready (IBA vol. 1, 12.6.9).
type RTU struct {
	LocalCommID, RemoteCommID uint32
	PrivateData               [PrivateRTU]byte
}

// Encode writes r as a MAD.
func (r *RTU) Encode(m *MAD, tid uint64) {
	b := m.start(AttrRTU, tid)
	be.PutUint32(b, r.LocalCommID)
	be.PutUint32(b[4:], r.RemoteCommID)
	copy(b[8:], r.PrivateData[:])
}

// Decode reads an RTU.
func (r *RTU) Decode(m *MAD) error {
	if m.Attr() != AttrRTU {
		return fmt.Errorf("%w: %v where an RTU was due", ErrMalformed, m.Attr())
	}
	b := m.body()
	r.LocalCommID, r.RemoteCommID = be.Uint32(b), be.Uint32(b[4:])
	copy(r.PrivateData[:], b[8:])
	return nil
}

// Which message an MRA or REJ speaks of.
const (
	MessageREQ   = 0
	MessageREP   = 1
	MessageOther = 2
)

// MRA asks for patience (IBA vol. 1, 12.6.6).
type MRA struct {
	LocalCommID, RemoteCommID uint32
	Message                   uint8 // MessageREQ, MessageREP; 2 is a LAP here
	ServiceTimeout            uint8 // 5 bits, 4.096 us * 2^n
	PrivateData               [PrivateMRA]byte
}

// Encode writes a as a MAD.
func (a *MRA) Encode(m *MAD, tid uint64) {
	b := m.start(AttrMRA, tid)
	be.PutUint32(b, a.LocalCommID)
	be.PutUint32(b[4:], a.RemoteCommID)
	b[8] = a.Message << 6
	b[9] = a.ServiceTimeout << 3
	copy(b[10:], a.PrivateData[:])
}

// Decode reads an MRA.
func (a *MRA) Decode(m *MAD) error {
	if m.Attr() != AttrMRA {
		return fmt.Errorf("%w: %v where an MRA was due", ErrMalformed, m.Attr())
	}
	b := m.body()
	a.LocalCommID, a.RemoteCommID = be.Uint32(b), be.Uint32(b[4:])
	a.Message, a.ServiceTimeout = b[8]>>6, b[9]>>3
	copy(a.PrivateData[:], b[10:])
	return nil
}

// Reject reasons (IBA vol. 1, 12.6.7.2) that this package gives.
const (
	ReasonNoQP             = 1
	ReasonNoResources      = 3
	ReasonTimeout          = 4
	ReasonUnsupported      = 5
	ReasonInvalidServiceID = 8
	ReasonInvalidTransport = 9
	ReasonStale            = 10
	ReasonInvalidGID       = 12
	ReasonInvalidMTU       = 26
	ReasonConsumer         = 28
	ReasonDuplicateCommID  = 30
)

// REJ refuses (IBA vol. 1, 12.6.7).
type REJ struct {
	LocalCommID, RemoteCommID uint32
	Message                   uint8
	Reason                    uint16
	ARI                       []byte // additional reject information, at most 72 bytes
	PrivateData               [PrivateREJ]byte
}

// Encode writes r as a MAD. It panics when ARI is longer than 72 bytes.
func (r *REJ) Encode(m *MAD, tid uint64) {
	if len(r.ARI) > sizeARI {
		panic("ibcm: additional reject information too long")
	}
	b := m.start(AttrREJ, tid)
	be.PutUint32(b, r.LocalCommID)
	be.PutUint32(b[4:], r.RemoteCommID)
	b[8] = r.Message << 6
	b[9] = uint8(len(r.ARI)) << 1
	be.PutUint16(b[10:], r.Reason)
	copy(b[12:], r.ARI)
	copy(b[84:], r.PrivateData[:])
}

// Decode reads a REJ. ARI points into m.
func (r *REJ) Decode(m *MAD) error {
	if m.Attr() != AttrREJ {
		return fmt.Errorf("%w: %v where a REJ was due", ErrMalformed, m.Attr())
	}
	b := m.body()
	n := int(b[9] >> 1)
	if n > sizeARI {
		return fmt.Errorf("%w: %d bytes of additional reject information", ErrMalformed, n)
	}
	r.LocalCommID, r.RemoteCommID = be.Uint32(b), be.Uint32(b[4:])
	r.Message, r.Reason = b[8]>>6, be.Uint16(b[10:])
	r.ARI = b[12 : 12+n]
	copy(r.PrivateData[:], b[84:])
	return nil
}

// DREQ ends a connection (IBA vol. 1, 12.6.10). RemoteQPN is the RECEIVER's queue pair.
type DREQ struct {
	LocalCommID, RemoteCommID uint32
	RemoteQPN                 uint32
	PrivateData               [PrivateDREQ]byte
}

// Encode writes d as a MAD.
func (d *DREQ) Encode(m *MAD, tid uint64) {
	b := m.start(AttrDREQ, tid)
	be.PutUint32(b, d.LocalCommID)
	be.PutUint32(b[4:], d.RemoteCommID)
	put24(b[8:], d.RemoteQPN)
	copy(b[12:], d.PrivateData[:])
}

// Decode reads a DREQ.
func (d *DREQ) Decode(m *MAD) error {
	if m.Attr() != AttrDREQ {
		return fmt.Errorf("%w: %v where a DREQ was due", ErrMalformed, m.Attr())
	}
	b := m.body()
	d.LocalCommID, d.RemoteCommID = be.Uint32(b), be.Uint32(b[4:])
	d.RemoteQPN = get24(b[8:])
	copy(d.PrivateData[:], b[12:])
	return nil
}

// DREP answers a DREQ (IBA vol. 1, 12.6.11).
type DREP struct {
	LocalCommID, RemoteCommID uint32
	PrivateData               [PrivateDREP]byte
}

// Encode writes d as a MAD.
func (d *DREP) Encode(m *MAD, tid uint64) {
	b := m.start(AttrDREP, tid)
	be.PutUint32(b, d.LocalCommID)
	be.PutUint32(b[4:], d.RemoteCommID)
	copy(b[8:], d.PrivateData[:])
}

// Decode reads a DREP.
func (d *DREP) Decode(m *MAD) error {
	if m.Attr() != AttrDREP {
		return fmt.Errorf("%w: %v where a DREP was due", ErrMalformed, m.Attr())
	}
	b := m.body()
	d.LocalCommID, d.RemoteCommID = be.Uint32(b), be.Uint32(b[4:])
	copy(d.PrivateData[:], b[8:])
	return nil
}
