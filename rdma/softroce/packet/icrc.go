package packet

// The invariant CRC (IBA vol. 1, 7.8.1 and annex A17; rxe_icrc.c): CRC-32 with the Ethernet polynomial over
//
//	8 bytes 0xff (in place of the LRH)
//	the IP header, with TOS, TTL and header checksum (IPv6: traffic class, flow label and hop limit) all ones
//	the UDP header, with its checksum all ones
//	the BTH, with byte 4 (FECN, BECN, reserved) all ones
//	extension headers, payload and padding as they are
//
// stored least significant byte first behind the padding. IPv4 total length, identification, DF and addresses are
// covered, UDP ports and length as well.
//
// A CRC is affine: what a field contributes does not depend on the other fields. A Flow therefore keeps the register
// after IP and UDP header with all variable fields 0, and Begin adds the contributions of length and identification from tables. For
// the same reason the identification can be computed from a CRC that differs only by it: Verify does that, because a UDP socket
// does not tell the identification of what it received.

import (
	"encoding/binary"
	"net/netip"
)

const poly = 0xedb88320 // CRC-32, reflected

var (
	// slice4 has, for k = 0 to 3, what byte b contributes to the register when k bytes follow.
	slice4 [4][256]uint32
	// What the two bytes of a 16-bit field contribute to the register at the end of the UDP header.
	id4, ipLen4, udpLen4, len6 [2][256]uint32
	// unshift[i] is x^(-8*4*i) mod P.
	unshift [Max/4 + 8]uint32
)

// Distances in bytes from the second byte of a field to the end of the UDP header.
const (
	idTail4     = 20 - 6 + 8
	ipLenTail4  = 20 - 4 + 8
	udpLenTail  = 2
	payLenTail6 = 40 - 6 + 8
)

func init() {
	for b := range 256 {
		r := uint32(b)
		for range 8 {
			r = r>>1 ^ poly&-(r&1)
		}
		slice4[0][b] = r
	}
	for k := 1; k < 4; k++ {
		for b := range 256 {
			r := slice4[k-1][b]
			slice4[k][b] = r>>8 ^ slice4[0][uint8(r)]
		}
	}
	field := func(t *[2][256]uint32, tail int) {
		for b := range 256 {
			r := slice4[0][b]
			for range tail {
				r = r>>8 ^ slice4[0][uint8(r)]
			}
			t[1][b] ^= r
			r = r>>8 ^ slice4[0][uint8(r)]
			t[0][b] ^= r
		}
	}
	field(&id4, idTail4)
	field(&ipLen4, ipLenTail4)
	field(&udpLen4, udpLenTail)
	field(&len6, udpLenTail) // IPv6's payload length is the UDP length
	field(&len6, payLenTail6)
	r := uint32(1 << 31) // x^0
	for i := range unshift {
		unshift[i] = r
		for range 32 {
			r = r<<1 ^ (poly<<1&0xffffffff|1)&-(r>>31) // divide by x
		}
	}
}

// mul multiplies two polynomials modulo P, bit 31 being x^0.
func mul(a, b uint32) (p uint32) {
	for range 32 {
		p ^= b & -(a >> 31)
		a <<= 1
		b = b>>1 ^ poly&-(b&1)
	}
	return p
}

// Flow is one direction of a path: addresses and UDP ports. The zero value is no path.
type Flow struct {
	reg uint32 // register after IP and UDP header, lengths and identification 0
	v6  bool
}

// NewFlow is the flow of packets from src to dst. IPv4-mapped IPv6 addresses
// count as IPv4. IPv4 packets have DF set and no options, IPv6 packets no extension headers: rxe and this stack send no other,
// and the ICRC of any other fails.
func NewFlow(src, dst netip.AddrPort) Flow {
	var h [8 + 40 + 8]byte
	for i := range h[:8] {
		h[i] = 0xff
	}
	s, d := src.Addr().Unmap(), dst.Addr().Unmap()
	v6 := d.Is6()
	ip := h[8:48]
	if v6 {
		copy(ip, []byte{0x6f, 0xff, 0xff, 0xff, 0, 0, 17, 0xff})
		s16, d16 := s.As16(), d.As16()
		copy(ip[8:], s16[:])
		copy(ip[24:], d16[:])
	} else {
		ip = h[8:28]
		copy(ip, []byte{0x45, 0xff, 0, 0, 0, 0, 0x40, 0, 0xff, 17, 0xff, 0xff})
		if s.Is4() {
			s4 := s.As4()
			copy(ip[12:], s4[:])
		}
		d4 := d.As4()
		copy(ip[16:], d4[:])
	}
	udp := h[8+len(ip) : 8+len(ip)+8]
	binary.BigEndian.PutUint16(udp, src.Port())
	binary.BigEndian.PutUint16(udp[2:], dst.Port())
	udp[6], udp[7] = 0xff, 0xff
	r := ^uint32(0)
	for _, b := range h[:8+len(ip)+8] {
		r = r>>8 ^ slice4[0][uint8(r)^b]
	}
	return Flow{reg: r, v6: v6}
}

// IsIPv6 reports the IP version.
func (f Flow) IsIPv6() bool { return f.v6 }

// ICRC is an ICRC in the making (the CRC's complement, as hash/crc32 keeps it).
type ICRC uint32

// Begin starts the ICRC of a packet whose UDP payload has n bytes (BTH to ICRC inclusive) and whose IPv4 header
// carries the identification id (without meaning on IPv6).
func (f Flow) Begin(n int, id uint16) ICRC {
	u := uint16(n + 8)
	if f.v6 {
		return ICRC(^(f.reg ^ len6[0][u>>8] ^ len6[1][uint8(u)]))
	}
	l := u + 20
	return ICRC(^(f.reg ^ udpLen4[0][u>>8] ^ udpLen4[1][uint8(u)] ^ ipLen4[0][l>>8] ^ ipLen4[1][uint8(l)] ^ id4[0][id>>8] ^ id4[1][uint8(id)]))
}

func step4(r, w uint32) uint32 {
	r ^= w
	return slice4[3][uint8(r)] ^ slice4[2][uint8(r>>8)] ^ slice4[1][uint8(r>>16)] ^ slice4[0][r>>24]
}

// Header goes on over h: BTH and extension headers, a multiple of 4 bytes.
func (c ICRC) Header(h []byte) ICRC {
	r := ^uint32(c)
	_ = h[BTHLen-1]
	r = step4(r, binary.LittleEndian.Uint32(h))
	r = step4(r, binary.LittleEndian.Uint32(h[4:])|0xff)
	r = step4(r, binary.LittleEndian.Uint32(h[8:]))
	for h = h[BTHLen:]; len(h) >= 4; h = h[4:] {
		r = step4(r, binary.LittleEndian.Uint32(h))
	}
	return ICRC(^r)
}

// Data goes on over payload bytes; a payload may come in any number of slices.
func (c ICRC) Data(b []byte) ICRC { return ICRC(update(uint32(c), b)) }

// Copy goes on over src and copies it to dst, which must not overlap it, in the same pass: memory is read once. The bytes counted
// are those copied, whatever becomes of src meanwhile. ahead is the virtual address of what will likely be copied next, 0 when that is not
// known: in the same pass as many bytes of it are asked for. There need not be any memory.
func (c ICRC) Copy(dst, src []byte, ahead uint64) ICRC {
	return ICRC(updateCopy(uint32(c), dst, src, ahead))
}

// Finish goes on over pad zero bytes and writes padding and ICRC to b, whose first pad+4 bytes it fills;
// it returns pad+4.
func (c ICRC) Finish(b []byte, pad uint8) int {
	r := ^uint32(c)
	for i := range pad {
		b[i] = 0
		r = r>>8 ^ slice4[0][uint8(r)]
	}
	binary.LittleEndian.PutUint32(b[pad:], ^r)
	return int(pad) + ICRCLen
}

// Seal writes the ICRC of b, one whole packet from BTH to the 4 bytes that the ICRC goes to.
func (f Flow) Seal(b []byte, id uint16) {
	end := len(b) - ICRCLen
	c := f.Begin(len(b), id).Header(b[:BTHLen]).Data(b[BTHLen:end])
	binary.LittleEndian.PutUint32(b[end:], uint32(c))
}

// Verify checks the ICRC of b, one whole packet that Parse takes. Over IPv4 it also finds the identification that the IP
// header carried: hint is tried first (0, or the segment's index in a GRO train, or the peer's last identification plus one),
// else the one identification is computed under which the ICRC would be right. There may be none: then ok is false.
//
// Knowing the identification, the check is worth 32 bits; having to compute it, 16. A caller that can predict
// identifications can take the returned one into account. Over IPv6 id is 0 and the check exact.
func (f Flow) Verify(b []byte, hint uint16) (id uint16, ok bool) {
	end := len(b) - ICRCLen
	if end < BTHLen || len(b) > Max {
		return 0, false
	}
	if f.v6 {
		hint = 0
	}
	c := f.Begin(len(b), hint).Header(b[:BTHLen]).Data(b[BTHLen:end])
	diff := uint32(c) ^ binary.LittleEndian.Uint32(b[end:])
	if diff == 0 {
		return hint, true
	}
	if f.v6 || end&3 != 0 {
		return 0, false
	}
	// diff is what (id xor hint) contributes. Turned back to where the identification enters the register, it is these
	// 16 bits themselves, or the packet is bad.
	d := mul(diff, unshift[(end+idTail4+2)/4])
	if d>>16 != 0 {
		return 0, false
	}
	return hint ^ (uint16(d)<<8 | uint16(d)>>8), true
}
