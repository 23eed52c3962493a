package rdma

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"

	"srp-initiator/rdma/softroce"
)

// openSoftroce opens the userspace device on the address in name, or on the one from which the kernel would
// reach the peer; towards loopback, and without a peer, on a free loopback address of its own, so that any number of
// processes run side by side.
func openSoftroce(name string, o *options) (*Fabric, error) {
	var opts []softroce.Option
	if o.capture != nil {
		opts = append(opts, softroce.WithCapture(o.capture))
	}
	var addr netip.Addr
	if _, a, ok := strings.Cut(name, ":"); ok {
		var err error
		if addr, err = netip.ParseAddr(a); err != nil {
			return nil, &NameError{Name: name, Reason: fmt.Sprintf("%q is not an IP address", a)}
		}
		if addr.Is6() && addr.IsLinkLocalUnicast() && addr.Zone() == "" {
			return nil, &NameError{Name: name, Reason: fmt.Sprintf("%%INTERFACE is missing after the link-local address: want such as softroce:%s%%eth0", addr)}
		}
	} else if o.hasPeer {
		var err error
		if addr, err = localAddr(o); err != nil {
			return nil, err
		}
	}
	d, err := softroce.Open(addr, opts...)
	if err != nil {
		return nil, err
	}
	return &Fabric{ctx: d, conn: d.Connector(), closers: []io.Closer{d}}, nil
}

// localAddr is the source address towards the peer; the zero Addr when that is loopback's.
func localAddr(o *options) (netip.Addr, error) {
	if o.src.IsValid() {
		return o.src.Addr(), nil
	}
	if o.peer.IsIB() {
		return netip.Addr{}, fmt.Errorf("%s is an InfiniBand address: softroce reaches IP addresses only", o.peer)
	}
	if peer := o.peer.IP.Addr(); peer.IsLoopback() {
		if peer.Is4() || peer.Is4In6() {
			return netip.Addr{}, nil
		}
		return peer, nil // ::1 is the only one of its kind
	}
	// Connecting a UDP socket sends nothing; it makes the kernel choose.
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(o.peer.IP))
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
		return netip.Addr{}, fmt.Errorf("cannot look for a route to %s: %w", o.peer, softroce.NameLimit(err))
	}
	if err != nil {
		return netip.Addr{}, fmt.Errorf("no route to %s: %w", o.peer, err)
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap(), nil
}
