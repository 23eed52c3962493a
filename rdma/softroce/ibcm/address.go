package ibcm

import (
	"fmt"
	"net/netip"
)

// AddressSize is the size of the RDMA/CM header at the front of a REQ's private data.
const AddressSize = 36

// Address is the RDMA/CM header (annex A11; the kernel's struct cma_hdr): the IP endpoints
// that a connection is made between. The consumer's own private data follows it.
type Address struct {
	Source      netip.AddrPort
	Destination netip.Addr // its port is in the service id
}

// Encode writes a into the first 36 bytes of private.
func (a *Address) Encode(private []byte) {
	b := private[:AddressSize]
	clear(b)
	b[1] = 0x60
	if a.Source.Addr().Unmap().Is4() {
		b[1] = 0x40
	}
	be.PutUint16(b[2:], a.Source.Port())
	putIP(b[4:20], a.Source.Addr())
	putIP(b[20:36], a.Destination)
}

// putIP writes an address: an IPv4 one sits in the last 4 bytes, the others zero.
func putIP(b []byte, a netip.Addr) {
	if a = a.Unmap(); a.Is4() {
		v := a.As4()
		copy(b[12:], v[:])
		return
	}
	v := a.As16()
	copy(b, v[:])
}

// Decode reads the header from the front of private.
func (a *Address) Decode(private []byte) error {
	if len(private) < AddressSize {
		return fmt.Errorf("%w: %d bytes of RDMA/CM header", ErrMalformed, len(private))
	}
	if private[0] != 0 {
		return fmt.Errorf("%w: RDMA/CM header version %d", ErrMalformed, private[0])
	}
	var src, dst netip.Addr
	switch private[1] >> 4 {
	case 4:
		src = netip.AddrFrom4([4]byte(private[16:20]))
		dst = netip.AddrFrom4([4]byte(private[32:36]))
	case 6:
		src = netip.AddrFrom16([16]byte(private[4:20]))
		dst = netip.AddrFrom16([16]byte(private[20:36]))
	default:
		return fmt.Errorf("%w: RDMA/CM header for IP version %d", ErrMalformed, private[1]>>4)
	}
	if src.IsMulticast() || dst.IsMulticast() || src.IsUnspecified() || dst.IsUnspecified() {
		return fmt.Errorf("%w: RDMA/CM addresses %v to %v", ErrMalformed, src, dst)
	}
	a.Source, a.Destination = netip.AddrPortFrom(src, be.Uint16(private[2:])), dst
	return nil
}

// PortSpaceTCP is the RDMA/CM port space of reliable connections.
const PortSpaceTCP = 0x0106

// ServiceID is the service id of a port in the TCP port space (the kernel's rdma_get_service_id).
func ServiceID(port uint16) uint64 { return PortSpaceTCP<<16 | uint64(port) }

// ServicePort is the port of a service id in the TCP port space.
func ServicePort(id uint64) (port uint16, ok bool) { return uint16(id), id>>16 == PortSpaceTCP }
