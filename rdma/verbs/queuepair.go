package verbs

// QPInit says what RC queue pair to create. The provider may grant more than asked.
type QPInit struct {
	SendCQ, RecvCQ CompletionQueue
	Cap            QPCap
	SignalAll      bool // every send work request completes with an entry
}

// QPCap holds the sizes of a queue pair (struct ib_qp_cap).
type QPCap struct {
	MaxSendWR     int
	MaxRecvWR     int
	MaxSendSGE    int
	MaxRecvSGE    int
	MaxInlineData int // bytes
}

// QPState is a queue pair's state (enum ib_qp_state).
type QPState uint8

const (
	QPReset QPState = iota
	QPInitState
	QPReadyToReceive
	QPReadyToSend
	QPSendQueueDrained
	QPSendQueueError
	QPError
)

func (s QPState) String() string {
	names := [...]string{"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"}
	if int(s) < len(names) {
		return names[s]
	}
	return "?"
}

// QPAttrMask names the fields of QPAttr that a Modify sets (enum ib_qp_attr_mask).
type QPAttrMask uint32

const (
	QPMaskState           QPAttrMask = 1 << 0
	QPMaskAccess          QPAttrMask = 1 << 3
	QPMaskPKeyIndex       QPAttrMask = 1 << 4
	QPMaskPort            QPAttrMask = 1 << 5
	QPMaskAV              QPAttrMask = 1 << 7
	QPMaskPathMTU         QPAttrMask = 1 << 8
	QPMaskTimeout         QPAttrMask = 1 << 9
	QPMaskRetryCount      QPAttrMask = 1 << 10
	QPMaskRNRRetry        QPAttrMask = 1 << 11
	QPMaskRQPSN           QPAttrMask = 1 << 12
	QPMaskMaxRdAtomic     QPAttrMask = 1 << 13
	QPMaskMinRNRTimer     QPAttrMask = 1 << 15
	QPMaskSQPSN           QPAttrMask = 1 << 16
	QPMaskMaxDestRdAtomic QPAttrMask = 1 << 17
	QPMaskDestQPN         QPAttrMask = 1 << 20
)

// The masks that the RC transitions need (IBA vol. 1, 11.2.5.2, table 96).
const (
	QPMaskToInit = QPMaskState | QPMaskPKeyIndex | QPMaskPort | QPMaskAccess
	QPMaskToRTR  = QPMaskState | QPMaskAV | QPMaskPathMTU | QPMaskDestQPN | QPMaskRQPSN | QPMaskMaxDestRdAtomic | QPMaskMinRNRTimer
	QPMaskToRTS  = QPMaskState | QPMaskTimeout | QPMaskRetryCount | QPMaskRNRRetry | QPMaskSQPSN | QPMaskMaxRdAtomic
)

// AddressVector is the path to the peer (struct ib_uverbs_qp_dest).
type AddressVector struct {
	DGID         GID
	FlowLabel    uint32
	DLID         uint16
	SGIDIndex    uint8
	HopLimit     uint8
	TrafficClass uint8
	SL           uint8
	SrcPathBits  uint8
	StaticRate   uint8
	IsGlobal     bool
	Port         uint8
}

// QPAttr are a queue pair's attributes (struct ib_uverbs_qp_attr).
type QPAttr struct {
	State           QPState
	Access          AccessFlags
	PKeyIndex       uint16
	Port            uint8
	AV              AddressVector
	PathMTU         MTU
	DestQPN         uint32
	RQPSN, SQPSN    uint32 // 24 bits
	MaxRdAtomic     uint8  // READs this side may have outstanding
	MaxDestRdAtomic uint8  // READs this side will serve at once
	MinRNRTimer     uint8  // code of IBA vol. 1 table 45
	Timeout         uint8  // 4.096 us * 2^n, 0 for ever
	RetryCount      uint8  // 3 bits
	RNRRetry        uint8  // 3 bits, 7 for ever
}

// SendOpcode is a send work request's operation. Values up to SendWithInv are enum ib_uverbs_wr_opcode's.
type SendOpcode uint32

const (
	OpRDMAWrite    SendOpcode = 0
	OpRDMAWriteImm SendOpcode = 1
	OpSend         SendOpcode = 2
	OpSendWithImm  SendOpcode = 3
	OpRDMARead     SendOpcode = 4
	OpCompareSwap  SendOpcode = 5
	OpFetchAdd     SendOpcode = 6
	OpLocalInv     SendOpcode = 7
	OpBindMW       SendOpcode = 8
	OpSendWithInv  SendOpcode = 9
)

// SendFlags are enum ib_uverbs_send_flags.
type SendFlags uint32

const (
	SendFence     SendFlags = 1 << 0
	SendSignaled  SendFlags = 1 << 1
	SendSolicited SendFlags = 1 << 2
	SendInline    SendFlags = 1 << 3 // data is copied during PostSend; LKeys are not looked at
)

// SendWorkRequest is one entry for a send queue. The provider reads it, its SGList and,
// with SendInline, the bytes during PostSend only; the memory that the SGEs name belongs to the device until the
// request completes (an unsignaled one: until a later signaled one of the queue completes).
type SendWorkRequest struct {
	WRID       uint64
	Opcode     SendOpcode
	Flags      SendFlags
	SGList     []SGE
	RemoteAddr uint64 // RDMA operations
	RKey       uint32 // RDMA operations
	// ImmData is the immediate value in host order (OpSendWithImm, OpRDMAWriteImm) or the key
	// to invalidate (OpSendWithInv, OpLocalInv).
	ImmData uint32
	Bind    *BindMW // OpBindMW only
	Atomic  *Atomic // OpCompareSwap and OpFetchAdd only
}

// Atomic holds the operands of an atomic operation on the 8 bytes, aligned to 8, at RemoteAddr. The value that was there
// before goes to the request's one SGE of 8 bytes.
type Atomic struct {
	CompareAdd uint64 // what to compare with, or what to add
	Swap       uint64 // OpCompareSwap: what to store when equal
}

// BindMW is a type 2 window bind: Window gets RKey and opens SGE's bytes of Region.
// Region must have been registered with AccessMWBind.
type BindMW struct {
	Window MemoryWindow
	Region MemoryRegion
	RKey   uint32 // Window's key with a new low byte
	Addr   uint64
	Length uint64
	Access AccessFlags
}

// RecvWorkRequest is one entry for a receive queue.
type RecvWorkRequest struct {
	WRID   uint64
	SGList []SGE
}

// QueuePair is an RC queue pair.
//
// PostSend may be called by one goroutine at a time, PostRecv likewise; the two may run side by side,
// and beside Modify to QPError.
type QueuePair interface {
	QPN() uint32
	Cap() QPCap
	// State is the state as far as this process knows: a fatal error of the
	// transport may have moved the queue pair on; its completions then say so.
	State() QPState
	// Modify after Destroy is ErrClosed: a connection manager may still try to move a queue
	// pair to ERR whose owner has just given it up.
	Modify(attr *QPAttr, mask QPAttrMask) error
	// PostSend posts wrs in order with one doorbell and returns how many were
	// taken. ErrQueueFull when the ring has no room for the next one. In QPError requests are
	// taken and complete with WCFlushError.
	PostSend(wrs []SendWorkRequest) (posted int, err error)
	// PostRecv posts receives; allowed from INIT on. ErrQueueFull as for PostSend. In QPError they are
	// taken and complete with WCFlushError.
	PostRecv(wrs []RecvWorkRequest) (posted int, err error)
	// Destroy gives the queue pair up. Entries of it that are still in a completion
	// queue may or may not be polled afterwards.
	Destroy() error
}
