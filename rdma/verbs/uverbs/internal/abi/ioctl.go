package abi

import "structs"

// IoctlNumber is RDMA_VERBS_IOCTL (rdma_user_ioctl_cmds.h).
const IoctlNumber = 0xc0181b01

// IoctlHeader is struct ib_uverbs_ioctl_hdr without its attribute array.
type IoctlHeader struct {
	_         structs.HostLayout
	Length    uint16 // bytes, header and attributes; at most a page
	ObjectID  uint16
	MethodID  uint16
	NumAttrs  uint16
	Reserved1 uint64
	DriverID  uint32
	Reserved2 uint32
}

// IoctlAttr is struct ib_uverbs_attr.
type IoctlAttr struct {
	_        structs.HostLayout
	AttrID   uint16
	Len      uint16 // pointers only: bytes. Input of up to 8 bytes lies in Data itself.
	Flags    uint16
	Reserved uint16 // attr_data
	Data     uint64 // pointer, inline value, handle or file descriptor
}

// Attribute flags.
const (
	AttrMandatory   = 1 << 0 // UVERBS_ATTR_F_MANDATORY
	AttrValidOutput = 1 << 1 // UVERBS_ATTR_F_VALID_OUTPUT, set by the kernel
)

// Objects (enum uverbs_default_objects, ib_user_ioctl_cmds.h).
const (
	ObjectDevice     = 0
	ObjectPD         = 1
	ObjectCQ         = 3
	ObjectQP         = 4
	ObjectMR         = 7
	ObjectMW         = 8
	ObjectAsyncEvent = 16
)

// Driver-private attributes of any method.
const (
	AttrDriverIn  = 0x1000 // UVERBS_ATTR_UHW_IN
	AttrDriverOut = 0x1001 // UVERBS_ATTR_UHW_OUT
)

// Methods and attributes of the device object.
const (
	MethodInvokeWrite = 0
	AttrCoreIn        = 0
	AttrCoreOut       = 1
	AttrWriteCommand  = 2

	MethodQueryPort    = 2
	AttrQueryPortNum   = 0
	AttrQueryPortResp  = 1
	MethodGetContext   = 3
	AttrNumCompVectors = 0
	AttrCoreSupport    = 1
)

// Methods and attributes of the completion queue object.
const (
	MethodCQCreate          = 0
	AttrCreateCQHandle      = 0
	AttrCreateCQCQE         = 1
	AttrCreateCQUserHandle  = 2
	AttrCreateCQCompChannel = 3
	AttrCreateCQCompVector  = 4
	AttrCreateCQFlags       = 5
	AttrCreateCQRespCQE     = 6
	AttrCreateCQEventFD     = 7

	MethodCQDestroy     = 1
	AttrDestroyCQHandle = 0
	AttrDestroyCQResp   = 1
)

// Methods and attributes of the queue pair object.
const (
	MethodQPCreate           = 0
	AttrCreateQPHandle       = 0
	AttrCreateQPPDHandle     = 2
	AttrCreateQPSendCQHandle = 4
	AttrCreateQPRecvCQHandle = 5
	AttrCreateQPUserHandle   = 7
	AttrCreateQPCap          = 8
	AttrCreateQPType         = 9
	AttrCreateQPFlags        = 10
	AttrCreateQPEventFD      = 12
	AttrCreateQPRespCap      = 13
	AttrCreateQPRespQPNum    = 14

	MethodQPDestroy     = 1
	AttrDestroyQPHandle = 0
	AttrDestroyQPResp   = 1
)

// The methods that destroy the remaining objects, and the one that makes an asynchronous event file.
const (
	MethodPDDestroy     = 0
	AttrDestroyPDHandle = 0

	MethodMRDestroy     = 1
	AttrDestroyMRHandle = 0

	MethodMWDestroy     = 0
	AttrDestroyMWHandle = 0

	MethodAsyncEventAlloc = 0
	AttrAsyncEventFD      = 0
)

// QPCap is struct ib_uverbs_qp_cap (ib_user_ioctl_verbs.h).
type QPCap struct {
	_             structs.HostLayout
	MaxSendWR     uint32
	MaxRecvWR     uint32
	MaxSendSGE    uint32
	MaxRecvSGE    uint32
	MaxInlineData uint32
}

// QueryPortRespEx is struct ib_uverbs_query_port_resp_ex of Linux 6.1.
// (Newer kernels name a part of Reserved active_speed_ex; the size is the same.)
type QueryPortRespEx struct {
	_             structs.HostLayout
	Legacy        QueryPortResp
	PortCapFlags2 uint16
	Reserved      [6]uint8
}
