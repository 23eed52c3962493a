package verbs

import (
	"errors"
	"fmt"
)

var (
	ErrClosed       = errors.New("verbs: closed")
	ErrDeviceGone   = errors.New("verbs: the device is gone")
	ErrNoEntry      = errors.New("verbs: no such table entry")
	ErrNotSupported = errors.New("verbs: not supported by this device")
	ErrQueueFull    = errors.New("verbs: work queue full")
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
