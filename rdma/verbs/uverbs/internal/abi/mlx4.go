package abi

import "structs"

// Everything in this file is from mlx4-abi.h.

// Version 4 of the driver's ABI added the reply that names the CQE size; version 3's is
// shorter (MLX4_IB_UVERBS_NO_DEV_CAPS_ABI_VERSION).
const (
	MLX4Version   = 4
	MLX4VersionV3 = 3
)

// MLX4GetContextResp is struct mlx4_ib_alloc_ucontext_resp.
type MLX4GetContextResp struct {
	_             structs.HostLayout
	DevCaps       uint32
	QPTabSize     uint32
	BFRegSize     uint16
	BFRegsPerPage uint16
	CQESize       uint32
}

// MLX4UserDevCapCQESize says that CQESize counts (MLX4_USER_DEV_CAP_LARGE_CQE).
const MLX4UserDevCapCQESize = 1 << 0

// MLX4GetContextRespV3 is struct mlx4_ib_alloc_ucontext_resp_v3.
type MLX4GetContextRespV3 struct {
	_             structs.HostLayout
	QPTabSize     uint32
	BFRegSize     uint16
	BFRegsPerPage uint16
}

// MLX4AllocPDResp is struct mlx4_ib_alloc_pd_resp.
type MLX4AllocPDResp struct {
	_        structs.HostLayout
	PDN      uint32
	Reserved uint32
}

// MLX4CreateCQ is struct mlx4_ib_create_cq.
type MLX4CreateCQ struct {
	_       structs.HostLayout
	BufAddr uint64
	DBAddr  uint64
}

// MLX4CreateCQResp is struct mlx4_ib_create_cq_resp.
type MLX4CreateCQResp struct {
	_        structs.HostLayout
	CQN      uint32
	Reserved uint32
}

// MLX4CreateQP is struct mlx4_ib_create_qp.
type MLX4CreateQP struct {
	_            structs.HostLayout
	BufAddr      uint64
	DBAddr       uint64
	LogSQBBCount uint8
	LogSQStride  uint8
	SQNoPrefetch uint8
	Reserved     uint8
	InlRecvSz    uint32
}
