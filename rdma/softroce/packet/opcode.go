package packet

// Opcode is BTH byte 0: the transport in the top three bits, the operation below (IBA vol. 1, table 38).
type Opcode uint8

const (
	SendFirst         Opcode = 0x00
	SendMiddle        Opcode = 0x01
	SendLast          Opcode = 0x02
	SendLastImm       Opcode = 0x03
	SendOnly          Opcode = 0x04
	SendOnlyImm       Opcode = 0x05
	WriteFirst        Opcode = 0x06
	WriteMiddle       Opcode = 0x07
	WriteLast         Opcode = 0x08
	WriteLastImm      Opcode = 0x09
	WriteOnly         Opcode = 0x0a
	WriteOnlyImm      Opcode = 0x0b
	ReadRequest       Opcode = 0x0c
	ReadResponseFirst Opcode = 0x0d
	ReadResponseMid   Opcode = 0x0e
	ReadResponseLast  Opcode = 0x0f
	ReadResponseOnly  Opcode = 0x10
	Acknowledge       Opcode = 0x11
	AtomicAcknowledge Opcode = 0x12
	CompareSwap       Opcode = 0x13
	FetchAdd          Opcode = 0x14
	SendLastInv       Opcode = 0x16
	SendOnlyInv       Opcode = 0x17
	Flush             Opcode = 0x1c // kernel 6.12 on
	AtomicWrite       Opcode = 0x1d // kernel 6.12 on

	UDSendOnly    Opcode = 0x64
	UDSendOnlyImm Opcode = 0x65
)

// Kind says in flags what an opcode is.
type Kind uint16

const (
	KindKnown   Kind = 1 << iota
	KindSend         // SEND of any form
	KindWrite        // RDMA WRITE of any form
	KindRead         // RDMA READ request
	KindRefused      // a request that this stack answers with NAK invalid request: atomics, FLUSH, ATOMIC WRITE
	KindReadResponse
	KindAck   // ACKNOWLEDGE and ATOMIC ACKNOWLEDGE
	KindFirst // begins a message; ONLY has First and Last
	KindMiddle
	KindLast
	KindImm // ImmDt present
	KindInv // IETH present
	KindUD
	kindRETH
	kindAETH
)

// KindRequest holds the kinds that travel from requester to responder.
const KindRequest = KindSend | KindWrite | KindRead | KindRefused

// KindResponse holds the kinds that travel from responder to requester.
const KindResponse = KindReadResponse | KindAck

type opcodeInfo struct {
	kind Kind
	hdr  uint8 // length of BTH and extension headers
	imm  uint8 // offset of ImmDt or IETH from the BTH, 0 without
	name string
}

const (
	middle = KindMiddle
	first  = KindFirst
	last   = KindLast
	only   = KindFirst | KindLast
)

var opcodes = func() (t [256]opcodeInfo) {
	set := func(op Opcode, k Kind, name string) {
		n := uint8(BTHLen)
		if k&kindRETH != 0 {
			n += RETHLen
		}
		if k&kindAETH != 0 {
			n += AETHLen
		}
		if k&KindUD != 0 {
			n += DETHLen
		}
		i := opcodeInfo{kind: k | KindKnown, name: name}
		if k&(KindImm|KindInv) != 0 {
			i.imm = n
			n += ImmLen
		}
		switch op {
		case CompareSwap, FetchAdd:
			n += 28 // AtomicETH
		case AtomicAcknowledge:
			n += 8 // AtomicAckETH
		case Flush:
			n += 4 // FETH, before the RETH
		}
		i.hdr = n
		t[op] = i
	}
	set(SendFirst, KindSend|first, "SEND First")
	set(SendMiddle, KindSend|middle, "SEND Middle")
	set(SendLast, KindSend|last, "SEND Last")
	set(SendLastImm, KindSend|last|KindImm, "SEND Last with immediate")
	set(SendOnly, KindSend|only, "SEND Only")
	set(SendOnlyImm, KindSend|only|KindImm, "SEND Only with immediate")
	set(SendLastInv, KindSend|last|KindInv, "SEND Last with invalidate")
	set(SendOnlyInv, KindSend|only|KindInv, "SEND Only with invalidate")
	set(WriteFirst, KindWrite|first|kindRETH, "RDMA WRITE First")
	set(WriteMiddle, KindWrite|middle, "RDMA WRITE Middle")
	set(WriteLast, KindWrite|last, "RDMA WRITE Last")
	set(WriteLastImm, KindWrite|last|KindImm, "RDMA WRITE Last with immediate")
	set(WriteOnly, KindWrite|only|kindRETH, "RDMA WRITE Only")
	set(WriteOnlyImm, KindWrite|only|kindRETH|KindImm, "RDMA WRITE Only with immediate")
	set(ReadRequest, KindRead|only|kindRETH, "RDMA READ Request")
	set(ReadResponseFirst, KindReadResponse|first|kindAETH, "RDMA READ Response First")
	set(ReadResponseMid, KindReadResponse|middle, "RDMA READ Response Middle")
	set(ReadResponseLast, KindReadResponse|last|kindAETH, "RDMA READ Response Last")
	set(ReadResponseOnly, KindReadResponse|only|kindAETH, "RDMA READ Response Only")
	set(Acknowledge, KindAck|kindAETH, "Acknowledge")
	set(AtomicAcknowledge, KindAck|kindAETH, "Atomic Acknowledge")
	set(CompareSwap, KindRefused|only, "Compare Swap")
	set(FetchAdd, KindRefused|only, "Fetch Add")
	set(Flush, KindRefused|only|kindRETH, "Flush")
	set(AtomicWrite, KindRefused|only|kindRETH, "Atomic Write")
	set(UDSendOnly, KindUD|KindSend|only, "UD SEND Only")
	set(UDSendOnlyImm, KindUD|KindSend|only|KindImm, "UD SEND Only with immediate")
	return t
}()

// Kind is the opcode's flags, 0 for an opcode that this stack does not know.
func (o Opcode) Kind() Kind { return opcodes[o].kind }

// HeaderLen is the length of BTH plus extension headers in bytes, 0 for an unknown opcode.
func (o Opcode) HeaderLen() int { return int(opcodes[o].hdr) }

func (o Opcode) String() string {
	if n := opcodes[o].name; n != "" {
		return n
	}
	const hex = "0123456789abcdef"
	return "opcode 0x" + string([]byte{hex[o>>4], hex[o&15]})
}
