package verbs

import (
	"errors"
	"fmt"
)

// Errors that callers compare with errors.Is.
var (
	// ErrClosed: the object, or its context, was closed or destroyed.
	ErrClosed = errors.New("verbs: closed")
	// ErrDeviceGone: the kernel or the network let go of the device; everything on it is dead.
	ErrDeviceGone = errors.New("verbs: the device is gone")
	// ErrNoEntry: a hole in a GID or P_Key table, or an index past its end.
	ErrNoEntry = errors.New("verbs: no such table entry")
	// ErrNotSupported: the provider does not have what was asked for.
	ErrNotSupported = errors.New("verbs: not supported by this device")
	// ErrQueueFull: the work queue has no room for the next request until earlier ones complete.
	ErrQueueFull = errors.New("verbs: work queue full")
)

// StatusError is a work request that did not succeed.
type StatusError struct {
	Status    WCStatus
	VendorErr uint32
	QPN       uint32
	// Doing is what the request was for: "receive", "send", "RDMA READ of write data".
	Doing string
}

func (e *StatusError) Error() string {
	s := fmt.Sprintf("%s on QP 0x%06x: %s", e.Doing, e.QPN, e.Status)
	if e.VendorErr != 0 {
		s += fmt.Sprintf(" (vendor code 0x%x)", e.VendorErr)
	}
	switch e.Status {
	case WCRetryExceeded:
		s += ": the peer does not answer; check its address, its link and that nothing drops UDP port 4791"
	case WCRNRRetryExceeded:
		s += ": the peer has no receive buffers posted"
	case WCRemoteAccessError:
		s += ": the peer refused a remote key or an address range"
	case WCFlushError:
		s += ": the queue pair had already failed or was closed"
	}
	return s
}
