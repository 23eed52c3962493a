package verbs

import "time"

// CQInit says what completion queue to create.
type CQInit struct {
	Capacity int               // entries that must fit; the provider may round up
	Channel  CompletionChannel // nil: the queue can be polled only
	Vector   int               // completion vector, modulo DeviceAttr.CompVectors
	// Cookie is the caller's; Cookie() returns it, and it comes back with events.
	Cookie any
}

// CompletionChannel delivers notifications of armed completion queues.
//
// Exactly one goroutine may be in Wait or WaitThread at a time.
type CompletionChannel interface {
	// Wait parks the calling goroutine until at least one attached queue has
	// raised its notification, Wake was called, or the channel was closed. It fills events
	// and returns how many; 0 with a nil error means Wake. After Close: ErrClosed.
	// When the device is gone: ErrDeviceGone.
	// A notification may be spurious or late; whoever gets it polls the queue empty.
	Wait(events []CompletionQueue) (int, error)
	// WaitThread is Wait for a goroutine that is locked to its OS thread: it blocks
	// the thread in the kernel, at most timeout (negative: for ever; 0 and nil after it).
	WaitThread(events []CompletionQueue, timeout time.Duration) (int, error)
	// Wake makes the current or the next Wait or WaitThread return. It never blocks.
	Wake()
	// Close wakes a waiter with ErrClosed. All queues of the channel must be destroyed before.
	Close() error
}

// CompletionQueue collects the results of work requests.
//
// Poll may be called by one goroutine at a time; Arm likewise and never
// beside Poll. Whoever owns the queue calls both (package completion keeps that).
type CompletionQueue interface {
	// Poll takes up to len(wcs) completions without blocking or allocating
	// and returns how many it took.
	Poll(wcs []WorkCompletion) int
	// Arm asks for one notification on the queue's channel: for the next completion,
	// or with solicitedOnly for the next solicited or failed one (a provider that cannot tell them
	// apart notifies of any). An arm for any completion is not weakened by a later one for solicited ones. missed reports
	// that the queue already holds an entry the caller has not polled, which will raise no
	// notification: the caller MUST poll again. Arming twice is arming once.
	Arm(solicitedOnly bool) (missed bool, err error)
	// Capacity is the number of entries the queue holds.
	Capacity() int
	Cookie() any
	// Destroy fails with EBUSY while a queue pair uses the queue. Undelivered
	// notifications of the queue are dropped; delivered ones must have been handled.
	Destroy() error
}

// Mover is a CompletionQueue whose Poll drives the transport itself. Moved reports whether the last Poll, which returned no completion, moved
// packets of its queue pairs all the same: part of a long message, say. Whoever owns the queue calls it.
type Mover interface {
	Moved() bool
}

// Driver is a CompletionQueue whose Poll drives the transport for all queues of its device. Its owner may promise to poll on, so that nobody needs to be
// woken for packets meanwhile. Nobody has to: without the promise somebody watches the transport while any queue is armed. Whoever owns the queue calls both.
type Driver interface {
	// PollsOn promises that the owner, without waiting for anything in between, calls Poll again and again until it calls Arm, which takes
	// the promise back whatever it returns, or Rests. Calling it twice is calling it once. Whoever the owner gives the queue to with the promise, keeps it.
	PollsOn()
	// Rests takes the promise back. Without one it does nothing.
	Rests()
}

// WCStatus is the result of a work request (enum ib_wc_status).
type WCStatus uint32

const (
	WCSuccess WCStatus = iota
	WCLocalLengthError
	WCLocalQPOperationError
	WCLocalEECOperationError
	WCLocalProtectionError
	WCFlushError
	WCMWBindError
	WCBadResponseError
	WCLocalAccessError
	WCRemoteInvalidRequestError
	WCRemoteAccessError
	WCRemoteOperationError
	WCRetryExceeded
	WCRNRRetryExceeded
	WCLocalRDDViolationError
	WCRemoteInvalidRDRequest
	WCRemoteAborted
	WCInvalidEECN
	WCInvalidEECState
	WCFatalError
	WCResponseTimeout
	WCGeneralError
)

var wcStatusText = [...]string{
	"success", "local length error", "local QP operation error", "local EE context operation error",
	"local protection error", "work request flushed", "memory window bind error", "bad response",
	"local access error", "remote invalid request", "remote access error", "remote operation error",
	"transport retry counter exceeded", "RNR retry counter exceeded", "local RDD violation",
	"remote invalid RD request", "remote aborted", "invalid EE context number",
	"invalid EE context state", "fatal error", "response timeout", "general error",
}

func (s WCStatus) String() string {
	if int(s) < len(wcStatusText) {
		return wcStatusText[s]
	}
	return "unknown completion status"
}

// WCOpcode says which operation completed (enum ib_uverbs_wc_opcode).
type WCOpcode uint32

const (
	WCSend        WCOpcode = 0
	WCRDMAWrite   WCOpcode = 1
	WCRDMARead    WCOpcode = 2
	WCCompareSwap WCOpcode = 3
	WCFetchAdd    WCOpcode = 4
	WCBindMW      WCOpcode = 5
	WCLocalInv    WCOpcode = 6
	WCRecv        WCOpcode = 128
	WCRecvRDMAWr  WCOpcode = 129 // received RDMA WRITE with immediate
)

// WCFlags qualify a completion (enum ib_uverbs_wc_flags).
type WCFlags uint32

const (
	WCWithGRH WCFlags = 1 << 0
	WCWithImm WCFlags = 1 << 1
	WCWithInv WCFlags = 1 << 3
)

// WorkCompletion is one entry of a completion queue. When Status is not
// WCSuccess only WRID, Status, VendorErr and QPN mean anything.
type WorkCompletion struct {
	WRID    uint64
	Status  WCStatus
	Opcode  WCOpcode
	ByteLen uint32 // received or read bytes
	// ImmData is the immediate value in host order when Flags has WCWithImm; with WCWithInv it
	// is the R_Key that the peer invalidated.
	ImmData   uint32
	QPN       uint32
	Flags     WCFlags
	VendorErr uint32
}
