package softroce

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/softroce/udp"
	"srp-initiator/rdma/verbs"
)

// Link is the packet I/O under a device: a udp.Socket, or an end of a simulated network. The device calls Receive, Send, Arm,
// Disarm and Close one at a time, WaitReadable from one goroutine beside them and Park from another, SetDeadline and Unpark from any.
type Link interface {
	// Addr is the one address of the device.
	Addr() netip.Addr
	// Receive takes what has arrived without blocking; the messages are valid until the next call.
	Receive() ([]udp.Message, error)
	// Send sends trains in order and returns how many it took; udp.ErrWouldBlock when the others have to wait.
	Send([]udp.Train) (int, error)
	// GSO reports that a Train may hold more than one datagram.
	GSO() bool
	// WaitReadable parks until the armed link has something (nil), the deadline has passed (os.ErrDeadlineExceeded), or
	// the link was closed (os.ErrClosed).
	WaitReadable() error
	// Arm lets WaitReadable return once for something that has arrived or arrives; Disarm takes it back.
	Arm() error
	Disarm() error
	SetDeadline(time.Time) error
	// Park parks until something has arrived (true), Unpark was called (false), or the link was closed (os.ErrClosed).
	Park() (bool, error)
	// Unpark ends the current or the next Park.
	Unpark()
	Close() error
}

// descriptor is a Link that a thread can wait for in poll(2).
type descriptor interface{ FD() int }

// linkMTU is the path MTU that the interface of addr carries: the largest that fits its MTU with 80 bytes of headers, as rxe counts
// (rxe_net.c). The interface's name comes with it. An address that no interface has, of a local route, gets MTU1024.
func linkMTU(addr netip.Addr) (verbs.MTU, string, error) {
	ifs, err := net.Interfaces()
	if err != nil {
		return 0, "", fmt.Errorf("MTU of the interface of %s: %w", addr, NameLimit(err))
	}
	var missed error // of an interface that may have been the one
	for _, i := range ifs {
		if zone := udp.Scope(addr); zone != 0 && zone != uint32(i.Index) {
			continue // interfaces may have the same link-local address
		}
		addrs, err := i.Addrs()
		if err != nil {
			missed = err
			continue
		}
		for _, a := range addrs {
			p, err := netip.ParsePrefix(a.String())
			if err != nil {
				continue
			}
			if p.Addr().Unmap() == addr.WithZone("") || addr.IsLoopback() && i.Flags&net.FlagLoopback != 0 && p.Contains(addr) {
				return mtuFor(i.MTU), i.Name, nil
			}
		}
	}
	if missed != nil {
		return 0, "", fmt.Errorf("MTU of the interface of %s: %w", addr, NameLimit(missed))
	}
	return verbs.MTU1024, "", nil
}

// NameLimit names the limit when err is that this process, or the machine, has no file descriptor left.
func NameLimit(err error) error {
	var l unix.Rlimit
	switch {
	case errors.Is(err, unix.EMFILE) && unix.Getrlimit(unix.RLIMIT_NOFILE, &l) == nil:
		return fmt.Errorf("%w: this process may have %d (ulimit -n)", err, l.Cur)
	case errors.Is(err, unix.ENFILE):
		return fmt.Errorf("%w: the machine's limit is sysctl fs.file-max", err)
	}
	return err
}

// noDescriptor reports that err says nothing about the peer: there is no file descriptor left to find out with.
func noDescriptor(err error) bool { return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) }

// mtuFor is the largest path MTU for a link of n bytes.
func mtuFor(n int) verbs.MTU {
	m := verbs.MTU4096
	for m > verbs.MTU256 && m.Bytes()+80 > n {
		m--
	}
	return m
}
