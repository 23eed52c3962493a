// Package provider is the seam between the uverbs binding and the device families
// (rxe, mlx5, mlx4): what a family must supply, and nothing else.
//
// The binding owns everything that is the same on all devices: enumeration, the device file, protection
// domains, memory regions and windows, channels and events, queue pair attributes, user
// handles, and the order of destruction. A family owns its private command bytes, its mapped pages and rings,
// and the four data-path calls. It issues create and destroy commands itself, through
// the kernel.Device it was opened with, because it must prepare memory before and map or free it after.
package provider

import (
	"fmt"
	"syscall"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/abi"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
)

// Family is one device family.
type Family interface {
	// Name is what verbs.Context.Provider reports.
	Name() string
	// DriverID is the ioctl header's driver id.
	DriverID() uint32
	// ABI is the range of driver ABI versions (sysfs abi_version) that the family's code knows.
	ABI() (oldest, newest int)
	// Open issues GET_CONTEXT with the family's private part and maps what it needs.
	Open(k *kernel.Device, info Info) (Device, error)
}

// Info is what sysfs says of the device.
type Info struct {
	Name       string // "mlx5_0"
	ABIVersion int    // the driver's
	Vendor     uint16 // PCI ids, 0 for a virtual device
	PCIDevice  uint16
}

// Device is an opened device. Methods may be called concurrently.
type Device interface {
	// CompVectors is the number of completion vectors, from GET_CONTEXT.
	CompVectors() int
	// AllocPD issues ALLOC_PD with the family's private part.
	AllocPD() (handle uint32, err error)
	// CreateCQ makes a ring for at least a.CQE entries and the queue.
	CreateCQ(a kernel.CQArgs) (CQ, error)
	// CreateQP makes the rings and the queue pair. a.Cap is what the caller asked
	// for; the family rounds it as it must.
	CreateQP(a QPArgs) (QP, error)
	// Close unmaps and frees. Everything made has been destroyed before.
	Close()
}

// CQ is a completion queue. The rules of verbs.CompletionQueue hold: Poll and Arm are called by
// one goroutine at a time.
type CQ interface {
	Poll(wcs []verbs.WorkCompletion) int
	// Arm requests a notification and tells, from the ring and after the request took effect,
	// whether an unpolled entry is there.
	Arm(solicitedOnly bool) (missed bool, err error)
	// Notified says that one event of the queue was read from its channel. It may run
	// beside Poll and Arm.
	Notified()
	Capacity() int
	Handle() uint32
	// Destroy issues DESTROY_CQ and, when that succeeds or finds the device gone (kernel.Gone), frees the ring.
	Destroy() (abi.DestroyCQResp, error)
}

// QPArgs says what queue pair to create.
type QPArgs struct {
	kernel.QPArgs // UserHandle, PD, CQ handles, Cap, SignalAll
	SendCQ        CQ
	RecvCQ        CQ
}

// Wanted is Cap as package verbs has it.
func (a *QPArgs) Wanted() verbs.QPCap {
	return verbs.QPCap{MaxSendWR: int(a.Cap.MaxSendWR), MaxRecvWR: int(a.Cap.MaxRecvWR), MaxSendSGE: int(a.Cap.MaxSendSGE),
		MaxRecvSGE: int(a.Cap.MaxRecvSGE), MaxInlineData: int(a.Cap.MaxInlineData)}
}

// OwnCQs are the completion queues as the family's own type.
func OwnCQs[T CQ](a *QPArgs, family string) (send, recv T, err error) {
	send, ok := a.SendCQ.(T)
	recv, ok2 := a.RecvCQ.(T)
	if !ok || !ok2 {
		err = fmt.Errorf("%s: completion queues of another device: %w", family, syscall.EINVAL)
	}
	return send, recv, err
}

// QP is a queue pair. The rules of verbs.QueuePair hold. The binding has checked
// the state: PostSend is called in RTS, SQD, SQE or ERR, PostRecv not in RESET.
type QP interface {
	// PostSend and PostRecv must check everything that a caller can get wrong (SGE count, inline size,
	// opcode) before they write a byte of the entry, and must allocate nothing.
	PostSend(wrs []verbs.SendWorkRequest) (posted int, err error)
	PostRecv(wrs []verbs.RecvWorkRequest) (posted int, err error)
	Handle() uint32
	QPN() uint32
	Cap() verbs.QPCap
	// Modify issues MODIFY_QP for a change of state from one to the other (equal when req changes no state)
	// and does what the family's rings need before and after.
	Modify(req *abi.ModifyQP, from, to verbs.QPState) error
	// Destroy issues DESTROY_QP and, as for a CQ, frees the rings. Entries of the queue pair that are still in a completion
	// ring must not confuse a later Poll.
	Destroy() (eventsReported uint32, err error)
}

// Window is what a family sees of a verbs.MemoryWindow in an OpBindMW request: Bound records
// the key that a posted bind gives the window.
type Window interface {
	verbs.MemoryWindow
	Bound(rkey uint32)
}
