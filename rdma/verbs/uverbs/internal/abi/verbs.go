package abi

import "structs"

// Everything in this file is from ib_user_verbs.h.

// Command numbers of the write interface (enum ib_uverbs_write_cmds).
const (
	CmdGetContext        = 0
	CmdQueryDevice       = 1
	CmdQueryPort         = 2
	CmdAllocPD           = 3
	CmdDeallocPD         = 4
	CmdRegMR             = 9
	CmdDeregMR           = 13
	CmdAllocMW           = 14
	CmdDeallocMW         = 16
	CmdCreateCompChannel = 17
	CmdCreateCQ          = 18
	CmdDestroyCQ         = 20
	CmdReqNotifyCQ       = 23
	CmdCreateQP          = 24
	CmdModifyQP          = 26
	CmdDestroyQP         = 27
	CmdPostSend          = 28

	// CmdExtended marks a command that has an ExCmdHeader (IB_USER_VERBS_CMD_FLAG_EXTENDED).
	CmdExtended = 0x80000000
)

// CmdHeader opens a write() (struct ib_uverbs_cmd_hdr).
type CmdHeader struct {
	_       structs.HostLayout
	Command uint32
	// InWords and OutWords count 4-byte words: the whole write, and the room for core and driver response. For an extended
	// command they count 8-byte words of the core part, without the headers.
	InWords  uint16
	OutWords uint16
}

// ExCmdHeader follows CmdHeader in an extended command (struct ib_uverbs_ex_cmd_hdr).
type ExCmdHeader struct {
	_                structs.HostLayout
	Response         uint64
	ProviderInWords  uint16 // 8-byte words
	ProviderOutWords uint16 // 8-byte words
	Reserved         uint32
}

// GetContext is struct ib_uverbs_get_context.
type GetContext struct {
	_        structs.HostLayout
	Response uint64
}

// GetContextResp is struct ib_uverbs_get_context_resp.
type GetContextResp struct {
	_              structs.HostLayout
	AsyncFD        uint32
	NumCompVectors uint32
}

// QueryDevice is struct ib_uverbs_query_device.
type QueryDevice struct {
	_        structs.HostLayout
	Response uint64
}

// QueryDeviceResp is struct ib_uverbs_query_device_resp.
type QueryDeviceResp struct {
	_                     structs.HostLayout
	FWVer                 uint64
	NodeGUID              [8]uint8 // big endian
	SysImageGUID          [8]uint8 // big endian
	MaxMRSize             uint64
	PageSizeCap           uint64
	VendorID              uint32
	VendorPartID          uint32
	HWVer                 uint32
	MaxQP                 uint32
	MaxQPWR               uint32
	DeviceCapFlags        uint32
	MaxSGE                uint32
	MaxSGERd              uint32
	MaxCQ                 uint32
	MaxCQE                uint32
	MaxMR                 uint32
	MaxPD                 uint32
	MaxQPRdAtom           uint32
	MaxEERdAtom           uint32
	MaxResRdAtom          uint32
	MaxQPInitRdAtom       uint32
	MaxEEInitRdAtom       uint32
	AtomicCap             uint32
	MaxEE                 uint32
	MaxRDD                uint32
	MaxMW                 uint32
	MaxRawIPv6QP          uint32
	MaxRawEthyQP          uint32
	MaxMcastGrp           uint32
	MaxMcastQPAttach      uint32
	MaxTotalMcastQPAttach uint32
	MaxAH                 uint32
	MaxFMR                uint32
	MaxMapPerFMR          uint32
	MaxSRQ                uint32
	MaxSRQWR              uint32
	MaxSRQSGE             uint32
	MaxPKeys              uint16
	LocalCAAckDelay       uint8
	PhysPortCnt           uint8
	Reserved              [4]uint8
}

// Bits of QueryDeviceResp.DeviceCapFlags (enum ib_uverbs_device_cap_flags).
const (
	DeviceMemWindow       = 1 << 17
	DeviceMemMgtExt       = 1 << 21
	DeviceMemWindowType2A = 1 << 23
	DeviceMemWindowType2B = 1 << 24
)

// QueryPort is struct ib_uverbs_query_port.
type QueryPort struct {
	_        structs.HostLayout
	Response uint64
	PortNum  uint8
	Reserved [7]uint8
}

// QueryPortResp is struct ib_uverbs_query_port_resp.
type QueryPortResp struct {
	_             structs.HostLayout
	PortCapFlags  uint32
	MaxMsgSz      uint32
	BadPKeyCntr   uint32
	QKeyViolCntr  uint32
	GIDTblLen     uint32
	PKeyTblLen    uint16
	LID           uint16
	SMLID         uint16
	State         uint8
	MaxMTU        uint8
	ActiveMTU     uint8
	LMC           uint8
	MaxVLNum      uint8
	SMSL          uint8
	SubnetTimeout uint8
	InitTypeReply uint8
	ActiveWidth   uint8
	ActiveSpeed   uint8
	PhysState     uint8
	LinkLayer     uint8
	Flags         uint8
	Reserved      uint8
}

// AllocPD is struct ib_uverbs_alloc_pd.
type AllocPD struct {
	_        structs.HostLayout
	Response uint64
}

// AllocPDResp is struct ib_uverbs_alloc_pd_resp.
type AllocPDResp struct {
	_        structs.HostLayout
	PDHandle uint32
}

// DeallocPD is struct ib_uverbs_dealloc_pd.
type DeallocPD struct {
	_        structs.HostLayout
	PDHandle uint32
}

// RegMR is struct ib_uverbs_reg_mr. Start and HCAVA must agree in their offset in the page.
type RegMR struct {
	_           structs.HostLayout
	Response    uint64
	Start       uint64
	Length      uint64
	HCAVA       uint64
	PDHandle    uint32
	AccessFlags uint32
}

// RegMRResp is struct ib_uverbs_reg_mr_resp.
type RegMRResp struct {
	_        structs.HostLayout
	MRHandle uint32
	LKey     uint32
	RKey     uint32
}

// DeregMR is struct ib_uverbs_dereg_mr.
type DeregMR struct {
	_        structs.HostLayout
	MRHandle uint32
}

// AllocMW is struct ib_uverbs_alloc_mw.
type AllocMW struct {
	_        structs.HostLayout
	Response uint64
	PDHandle uint32
	MWType   uint8 // enum ib_mw_type
	Reserved [3]uint8
}

// MWType2 is IB_MW_TYPE_2.
const MWType2 = 2

// AllocMWResp is struct ib_uverbs_alloc_mw_resp.
type AllocMWResp struct {
	_        structs.HostLayout
	MWHandle uint32
	RKey     uint32
}

// DeallocMW is struct ib_uverbs_dealloc_mw.
type DeallocMW struct {
	_        structs.HostLayout
	MWHandle uint32
}

// CreateCompChannel is struct ib_uverbs_create_comp_channel.
type CreateCompChannel struct {
	_        structs.HostLayout
	Response uint64
}

// CreateCompChannelResp is struct ib_uverbs_create_comp_channel_resp.
type CreateCompChannelResp struct {
	_  structs.HostLayout
	FD uint32
}

// CreateCQ is struct ib_uverbs_create_cq.
type CreateCQ struct {
	_           structs.HostLayout
	Response    uint64
	UserHandle  uint64 // comes back in completion events
	CQE         uint32
	CompVector  uint32
	CompChannel int32 // file descriptor, or -1
	Reserved    uint32
}

// CreateCQResp is struct ib_uverbs_create_cq_resp.
type CreateCQResp struct {
	_        structs.HostLayout
	CQHandle uint32
	CQE      uint32
}

// ReqNotifyCQ is struct ib_uverbs_req_notify_cq.
type ReqNotifyCQ struct {
	_             structs.HostLayout
	CQHandle      uint32
	SolicitedOnly uint32
}

// DestroyCQ is struct ib_uverbs_destroy_cq.
type DestroyCQ struct {
	_        structs.HostLayout
	Response uint64
	CQHandle uint32
	Reserved uint32
}

// DestroyCQResp is struct ib_uverbs_destroy_cq_resp: how many events of the queue were ever read.
type DestroyCQResp struct {
	_                   structs.HostLayout
	CompEventsReported  uint32
	AsyncEventsReported uint32
}

// CreateQP is struct ib_uverbs_create_qp.
type CreateQP struct {
	_             structs.HostLayout
	Response      uint64
	UserHandle    uint64 // comes back in asynchronous events
	PDHandle      uint32
	SendCQHandle  uint32
	RecvCQHandle  uint32
	SRQHandle     uint32
	MaxSendWR     uint32
	MaxRecvWR     uint32
	MaxSendSGE    uint32
	MaxRecvSGE    uint32
	MaxInlineData uint32
	SQSigAll      uint8
	QPType        uint8
	IsSRQ         uint8
	Reserved      uint8
}

// QPTypeRC is IB_UVERBS_QPT_RC; QPFlagSQSigAll is IB_UVERBS_QP_CREATE_SQ_SIG_ALL, how the typed
// method says what CreateQP says with SQSigAll.
const (
	QPTypeRC       = 2
	QPFlagSQSigAll = 1 << 12
)

// CreateQPResp is struct ib_uverbs_create_qp_resp.
type CreateQPResp struct {
	_             structs.HostLayout
	QPHandle      uint32
	QPN           uint32
	MaxSendWR     uint32
	MaxRecvWR     uint32
	MaxSendSGE    uint32
	MaxRecvSGE    uint32
	MaxInlineData uint32
	Reserved      uint32
}

// QPDest is struct ib_uverbs_qp_dest.
type QPDest struct {
	_            structs.HostLayout
	DGID         [16]uint8
	FlowLabel    uint32
	DLID         uint16
	Reserved     uint16
	SGIDIndex    uint8
	HopLimit     uint8
	TrafficClass uint8
	SL           uint8
	SrcPathBits  uint8
	StaticRate   uint8
	IsGlobal     uint8
	PortNum      uint8
}

// ModifyQP is struct ib_uverbs_modify_qp.
type ModifyQP struct {
	_                structs.HostLayout
	Dest             QPDest
	AltDest          QPDest
	QPHandle         uint32
	AttrMask         uint32
	QKey             uint32
	RQPSN            uint32
	SQPSN            uint32
	DestQPNum        uint32
	QPAccessFlags    uint32
	PKeyIndex        uint16
	AltPKeyIndex     uint16
	QPState          uint8
	CurQPState       uint8
	PathMTU          uint8
	PathMigState     uint8
	EnSQDAsyncNotify uint8
	MaxRdAtomic      uint8
	MaxDestRdAtomic  uint8
	MinRNRTimer      uint8
	PortNum          uint8
	Timeout          uint8
	RetryCnt         uint8
	RNRRetry         uint8
	AltPortNum       uint8
	AltTimeout       uint8
	Reserved         [2]uint8
}

// DestroyQP is struct ib_uverbs_destroy_qp.
type DestroyQP struct {
	_        structs.HostLayout
	Response uint64
	QPHandle uint32
	Reserved uint32
}

// DestroyQPResp is struct ib_uverbs_destroy_qp_resp: how many asynchronous events of the queue pair were ever read.
type DestroyQPResp struct {
	_              structs.HostLayout
	EventsReported uint32
}

// PostSend is struct ib_uverbs_post_send without work requests.
type PostSend struct {
	_        structs.HostLayout
	Response uint64
	QPHandle uint32
	WRCount  uint32
	SGECount uint32
	WQESize  uint32
}

// SendWRSize is sizeof(struct ib_uverbs_send_wr), the least PostSend.WQESize that the kernel accepts.
const SendWRSize = 56

// PostSendResp is struct ib_uverbs_post_send_resp.
type PostSendResp struct {
	_     structs.HostLayout
	BadWR uint32
}

// CompEventDesc is struct ib_uverbs_comp_event_desc, what a read of a completion channel returns.
type CompEventDesc struct {
	_        structs.HostLayout
	CQHandle uint64 // CreateCQ.UserHandle
}

// AsyncEventDesc is struct ib_uverbs_async_event_desc, what a read of the asynchronous event file returns.
type AsyncEventDesc struct {
	_         structs.HostLayout
	Element   uint64 // UserHandle of the queue pair or completion queue, or the port number
	EventType uint32
	Reserved  uint32
}

// WC is struct ib_uverbs_wc, which is also rxe's completion queue entry.
type WC struct {
	_            structs.HostLayout
	WRID         uint64
	Status       uint32
	Opcode       uint32
	VendorErr    uint32
	ByteLen      uint32
	Ex           uint32 // immediate (big endian) or invalidated R_Key
	QPNum        uint32
	SrcQP        uint32
	WCFlags      uint32
	PKeyIndex    uint16
	SLID         uint16
	SL           uint8
	DLIDPathBits uint8
	PortNum      uint8
	Reserved     uint8
}
