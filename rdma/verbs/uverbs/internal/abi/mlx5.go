package abi

import "structs"

// Everything in this file is from mlx5-abi.h and mlx5_user_ioctl_cmds.h.

// MLX5Version is the only version of the driver's ABI (MLX5_IB_UVERBS_ABI_VERSION).
const MLX5Version = 1

// MLX5GetContext is struct mlx5_ib_alloc_ucontext_req_v2. Kernels older than a field take the struct up to it.
type MLX5GetContext struct {
	_                   structs.HostLayout
	TotalNumBfregs      uint32
	NumLowLatencyBfregs uint32
	Flags               uint32 // 1: DEVX
	CompMask            uint32
	MaxCQEVersion       uint8
	Reserved0           uint8
	Reserved1           uint16
	Reserved2           uint32
	LibCaps             uint64
}

// Values of MLX5GetContext.
const (
	MLX5ContextDEVX = 1 << 0 // MLX5_IB_ALLOC_UCTX_DEVX
	MLX5Lib4KUAR    = 1 << 0 // MLX5_LIB_CAP_4K_UAR
	MLX5LibDynUAR   = 1 << 1 // MLX5_LIB_CAP_DYN_UAR
)

// MLX5GetContextResp is struct mlx5_ib_alloc_ucontext_resp.
type MLX5GetContextResp struct {
	_                  structs.HostLayout
	QPTabSize          uint32
	BFRegSize          uint32 // bytes of a BlueFlame register, both halves; 0: none
	TotBfregs          uint32 // 0: UARs are allocated one by one
	CacheLineSize      uint32
	MaxSQDescSz        uint16
	MaxRQDescSz        uint16
	MaxSendWQEBB       uint32
	MaxRecvWR          uint32
	MaxSRQRecvWR       uint32
	NumPorts           uint16
	FlowActionFlags    uint16
	CompMask           uint32
	ResponseLength     uint32
	CQEVersion         uint8
	CmdsSuppUHW        uint8
	EthMinInline       uint8
	ClockInfoVersions  uint8
	HCACoreClockOffset uint64
	LogUARSize         uint32
	NumUARsPerPage     uint32
	NumDynBfregs       uint32
	DumpFillMKey       uint32
}

// MLX5RespECE says that the kernel knows enhanced connection establishment
// (MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_ECE).
const MLX5RespECE = 1 << 2

// MLX5AllocPDResp is struct mlx5_ib_alloc_pd_resp.
type MLX5AllocPDResp struct {
	_   structs.HostLayout
	PDN uint32
}

// MLX5CreateCQ is struct mlx5_ib_create_cq.
type MLX5CreateCQ struct {
	_                structs.HostLayout
	BufAddr          uint64
	DBAddr           uint64
	CQESize          uint32
	CQECompEn        uint8
	CQECompResFormat uint8
	Flags            uint16
	UARPageIndex     uint16
	Reserved0        uint16
	Reserved1        uint32
}

// MLX5CQUARPageIndex says that UARPageIndex counts (MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX).
const MLX5CQUARPageIndex = 1 << 1

// MLX5CreateCQResp is struct mlx5_ib_create_cq_resp.
type MLX5CreateCQResp struct {
	_        structs.HostLayout
	CQN      uint32
	Reserved uint32
}

// MLX5CreateQP is struct mlx5_ib_create_qp.
type MLX5CreateQP struct {
	_          structs.HostLayout
	BufAddr    uint64
	DBAddr     uint64
	SQWQECount uint32
	RQWQECount uint32
	RQWQEShift uint32
	Flags      uint32
	UIDX       uint32
	BfregIndex uint32
	SQBufAddr  uint64
	ECEOptions uint32
	DCIStreams uint16
	Reserved   uint16
}

// Flags and values of MLX5CreateQP.
const (
	MLX5QPScatterCQE   = 1 << 1  // MLX5_QP_FLAG_SCATTER_CQE
	MLX5QPUARPageIndex = 1 << 10 // MLX5_QP_FLAG_UAR_PAGE_INDEX
	MLX5NoUIDX         = 0xffffff
	MLX5ECETrigger     = 0x10000000
)

// MLX5CreateQPResp is struct mlx5_ib_create_qp_resp.
type MLX5CreateQPResp struct {
	_          structs.HostLayout
	BfregIndex uint32
	ECEOptions uint32
	CompMask   uint32
	TIRN       uint32
	TISN       uint32
	RQN        uint32
	SQN        uint32
	Reserved   uint32
	TIRICMAddr uint64
}

// The UAR object (mlx5_user_ioctl_cmds.h).
const (
	ObjectMLX5UAR = 0x1008 // MLX5_IB_OBJECT_UAR

	MethodMLX5UARAlloc       = 0x1000
	AttrMLX5UARAllocHandle   = 0x1000
	AttrMLX5UARAllocType     = 0x1001
	AttrMLX5UARAllocOffset   = 0x1002
	AttrMLX5UARAllocLength   = 0x1003
	AttrMLX5UARAllocPageID   = 0x1004
	MethodMLX5UARDestroy     = 0x1001
	AttrMLX5UARDestroyHandle = 0x1000

	MLX5UARBlueFlame = 0 // MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF
	MLX5UARNoCache   = 1 // MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC
)

// mmap offsets of static UAR pages: the command is in bits 8..15 of the page number (enum mlx5_ib_mmap_cmd).
const (
	MLX5MmapRegular = 0 // write combining
	MLX5MmapNC      = 3 // uncached
)
