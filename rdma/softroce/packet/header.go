package packet

import "encoding/binary"

// Flags of BTH byte 1 and 8.
const (
	bthSolicited = 0x80
	bthMigReq    = 0x40
	bthPadMask   = 0x30
	bthTVerMask  = 0x0f
	bthAckReq    = 0x80
)

// BTH is a base transport header to be written. TVer, FECN and BECN are 0 and MigReq is 1: hardware
// in the migrated state, which is where a queue pair without path migration lives,
// wants to see it; rxe ignores it.
type BTH struct {
	Opcode    Opcode
	Pad       uint8 // bytes of padding, 0 to 3
	Solicited bool
	AckReq    bool
	PKey      uint16
	DestQPN   uint32
	PSN       PSN
}

// Put writes the header to b[:BTHLen].
func (h *BTH) Put(b []byte) {
	_ = b[BTHLen-1]
	f := uint8(bthMigReq) | h.Pad<<4
	if h.Solicited {
		f |= bthSolicited
	}
	psn := uint32(h.PSN)
	if h.AckReq {
		psn |= bthAckReq << 24
	}
	b[0] = uint8(h.Opcode)
	b[1] = f
	binary.BigEndian.PutUint16(b[2:], h.PKey)
	binary.BigEndian.PutUint32(b[4:], h.DestQPN&0xffffff)
	binary.BigEndian.PutUint32(b[8:], psn)
}

// RETH is the RDMA extended transport header.
type RETH struct {
	Addr   uint64
	RKey   uint32
	Length uint32 // bytes of the whole message
}

// Put writes the header to b[:RETHLen].
func (h *RETH) Put(b []byte) {
	_ = b[RETHLen-1]
	binary.BigEndian.PutUint64(b, h.Addr)
	binary.BigEndian.PutUint32(b[8:], h.RKey)
	binary.BigEndian.PutUint32(b[12:], h.Length)
}

// Syndrome is AETH byte 0: the top three bits give the class, the rest a credit count, an RNR timer code or a NAK code
// (IBA vol. 1, table 42).
type Syndrome uint8

const (
	// SyndromeAck is ACK with "no credit limit", which is what a responder without end-to-end flow control sends.
	SyndromeAck          Syndrome = 0x1f
	SyndromeRNR          Syndrome = 0x20 // or'ed with the 5-bit timer code
	NakPSNSequence       Syndrome = 0x60
	NakInvalidRequest    Syndrome = 0x61
	NakRemoteAccess      Syndrome = 0x62
	NakRemoteOperational Syndrome = 0x63

	syndromeClass Syndrome = 0xe0
	syndromeValue Syndrome = 0x1f
	classAck      Syndrome = 0x00
	classNak      Syndrome = 0x60
)

// IsAck reports a positive acknowledgement.
func (s Syndrome) IsAck() bool { return s&syndromeClass == classAck }

// IsRNR reports receiver-not-ready; RNRTimer is its code.
func (s Syndrome) IsRNR() bool { return s&syndromeClass == SyndromeRNR }

// RNRTimer is the timer code of an RNR NAK, 0 to 31.
func (s Syndrome) RNRTimer() uint8 { return uint8(s & syndromeValue) }

// IsNak reports a negative acknowledgement other than RNR.
func (s Syndrome) IsNak() bool { return s&syndromeClass == classNak }

// AETH is the ACK extended transport header.
type AETH struct {
	Syndrome Syndrome
	MSN      uint32 // 24 bits: messages completed
}

// Put writes the header to b[:AETHLen].
func (h *AETH) Put(b []byte) {
	binary.BigEndian.PutUint32(b, uint32(h.Syndrome)<<24|h.MSN&0xffffff)
}

// DETH is the datagram extended transport header.
type DETH struct {
	QKey   uint32
	SrcQPN uint32
}

// Put writes the header to b[:DETHLen].
func (h *DETH) Put(b []byte) {
	_ = b[DETHLen-1]
	binary.BigEndian.PutUint32(b, h.QKey)
	binary.BigEndian.PutUint32(b[4:], h.SrcQPN&0xffffff)
}

// PutImm writes an immediate value or, for the INV opcodes, the R_Key to invalidate to b[:ImmLen].
func PutImm(b []byte, v uint32) { binary.BigEndian.PutUint32(b, v) }

// Pad is the number of padding bytes behind n bytes of payload.
func Pad(n int) uint8 { return uint8(-n) & 3 }
