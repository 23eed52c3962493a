package abi

import "structs"

// Everything in this file is from rdma_user_rxe.h.

// RXEVersion is the driver ABI version of rdma_rxe (RXE_UVERBS_ABI_VERSION).
const RXEVersion = 2

// RXESGE is struct rxe_sge.
type RXESGE struct {
	_      structs.HostLayout
	Addr   uint64
	Length uint32
	LKey   uint32
}

// RXEMMInfo is struct mminfo: where to mmap a ring.
type RXEMMInfo struct {
	_      structs.HostLayout
	Offset uint64
	Size   uint32
	Pad    uint32
}

// RXEDMAInfo is struct rxe_dma_info without its SGEs or inline bytes.
type RXEDMAInfo struct {
	_         structs.HostLayout
	Length    uint32 // bytes, sum over the SGEs
	Resid     uint32 // bytes left: Length when posted
	CurSGE    uint32
	NumSGE    uint32
	SGEOffset uint32
	Reserved  uint32
}

// RXESendWR is struct rxe_send_wr. WR holds its union: see the Op structs below.
type RXESendWR struct {
	_         structs.HostLayout
	WRID      uint64
	Reserved  uint32
	Opcode    uint32
	SendFlags uint32
	Ex        uint32 // immediate (big endian) or R_Key to invalidate
	WR        [15]uint64
}

// RXERDMA is the union's member rdma.
type RXERDMA struct {
	_          structs.HostLayout
	RemoteAddr uint64
	RKey       uint32
	Reserved   uint32
}

// RXEMW is the union's member mw.
type RXEMW struct {
	_      structs.HostLayout
	Addr   uint64
	Length uint64
	MRLKey uint32
	MWRKey uint32 // the window's present key
	RKey   uint32 // the key that the bind makes
	Access uint32
}

// RXESendWQE is struct rxe_send_wqe: an entry of the send ring, followed by SGEs or inline bytes.
type RXESendWQE struct {
	_           structs.HostLayout
	WR          RXESendWR
	Status      uint32
	State       uint32
	IOVA        uint64
	Mask        uint32
	FirstPSN    uint32
	LastPSN     uint32
	AckLength   uint32
	SSN         uint32
	HasRdAtomic uint32
	DMA         RXEDMAInfo
}

// RXERecvWQE is struct rxe_recv_wqe: an entry of the receive ring, followed by SGEs.
type RXERecvWQE struct {
	_        structs.HostLayout
	WRID     uint64
	Reserved uint32
	Padding  uint32
	DMA      RXEDMAInfo
}

// RXECreateCQResp is struct rxe_create_cq_resp.
type RXECreateCQResp struct {
	_  structs.HostLayout
	MI RXEMMInfo
}

// RXECreateQPResp is struct rxe_create_qp_resp.
type RXECreateQPResp struct {
	_    structs.HostLayout
	RQMI RXEMMInfo
	SQMI RXEMMInfo
}

// RXEQueueBuf is struct rxe_queue_buf: the head of a mapped ring. The entries
// follow it, each 1<<Log2ElemSize bytes long. Indices are stored masked.
type RXEQueueBuf struct {
	_             structs.HostLayout
	Log2ElemSize  uint32
	IndexMask     uint32
	Pad1          [30]uint32
	ProducerIndex uint32
	Pad2          [31]uint32
	ConsumerIndex uint32
	Pad3          [31]uint32
}
