package softroce

import (
	"encoding/binary"
	"io"
	"net/netip"
	"time"

	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/softroce/udp"
)

// capture writes pcapng (draft-ietf-opsawg-pcapng): a section, one interface of link type RAW (IP packets without a link layer), and an
// enhanced packet block for each packet. The IP and UDP headers are made up to be what is on the wire as far as the
// ICRC sees it: total length, identification, DF, addresses, ports. The UDP checksum, which the ICRC does not see, is made right.
type capture struct {
	w   io.Writer
	err error
	buf []byte
}

const (
	blockSection   = 0x0a0d0d0a
	blockInterface = 1
	blockPacket    = 6
	linkTypeRaw    = 101
)

func newCapture(w io.Writer) *capture {
	c := &capture{w: w, buf: make([]byte, 0, 4608)}
	b := c.begin(blockSection)
	b = binary.LittleEndian.AppendUint32(b, 0x1a2b3c4d)
	b = append(b, 1, 0, 0, 0)                                     // version 1.0
	b = append(b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff) // section length: not said
	c.finish(b)
	b = c.begin(blockInterface)
	b = append(b, linkTypeRaw, 0, 0, 0)
	b = binary.LittleEndian.AppendUint32(b, 0) // no snapshot limit
	b = append(b, 2, 0, 8, 0)                  // if_name
	b = append(b, "softroce"...)
	b = append(b, 9, 0, 1, 0, 9, 0, 0, 0) // if_tsresol: nanoseconds
	b = append(b, 0, 0, 0, 0)             // end of options
	c.finish(b)
	return c
}

func (c *capture) begin(kind uint32) []byte {
	b := binary.LittleEndian.AppendUint32(c.buf[:0], kind)
	return append(b, 0, 0, 0, 0)
}

func (c *capture) finish(b []byte) {
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	n := uint32(len(b) + 4)
	binary.LittleEndian.PutUint32(b[4:], n)
	b = binary.LittleEndian.AppendUint32(b, n)
	c.buf = b[:0]
	if c.err == nil {
		_, c.err = c.w.Write(b)
	}
}

// write records one packet from BTH to ICRC.
func (c *capture) write(at time.Time, src, dst netip.AddrPort, id uint16, pkt []byte) {
	if c.err != nil {
		return
	}
	b := c.begin(blockPacket)
	ns := uint64(at.UnixNano())
	b = binary.LittleEndian.AppendUint32(b, 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(ns>>32))
	b = binary.LittleEndian.AppendUint32(b, uint32(ns))
	var pseudo uint64 // the checksum's pseudo header
	udpLen := len(pkt) + 8
	s, d := src.Addr(), dst.Addr()
	total := udpLen + 20
	if !d.Is4() {
		total = udpLen + 40
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(total))
	b = binary.LittleEndian.AppendUint32(b, uint32(total))
	if d.Is4() {
		h := len(b)
		b = append(b, 0x45, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(total))
		b = binary.BigEndian.AppendUint16(b, id)
		b = append(b, 0x40, 0, 64, 17, 0, 0)
		s4, d4 := s.As4(), d.As4()
		b = append(b, s4[:]...)
		b = append(b, d4[:]...)
		binary.BigEndian.PutUint16(b[h+10:], ^fold(sum(0, b[h:])))
		pseudo = sum(0, b[h+12:])
	} else {
		b = append(b, 0x60, 0, 0, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(udpLen))
		b = append(b, 17, 64)
		s16, d16 := s.As16(), d.As16()
		b = append(b, s16[:]...)
		b = append(b, d16[:]...)
		pseudo = sum(0, b[len(b)-32:])
	}
	h := len(b)
	b = binary.BigEndian.AppendUint16(b, src.Port())
	b = binary.BigEndian.AppendUint16(b, dst.Port())
	b = binary.BigEndian.AppendUint16(b, uint16(udpLen))
	b = append(b, 0, 0)
	b = append(b, pkt...)
	check := ^fold(sum(pseudo+17+uint64(udpLen), b[h:]))
	if check == 0 {
		check = 0xffff
	}
	binary.BigEndian.PutUint16(b[h+6:], check)
	c.finish(b)
}

// sum adds the 16-bit words of b, the last one padded with zero, as the Internet checksum does; fold ends it.
func sum(s uint64, b []byte) uint64 {
	for ; len(b) >= 2; b = b[2:] {
		s += uint64(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		s += uint64(b[0]) << 8
	}
	return s
}

func fold(s uint64) uint16 {
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

// captureTrain records what was sent.
func (d *Device) captureTrain(t *udp.Train) {
	now := time.Now()
	from := netip.AddrPortFrom(d.addr, packet.Port)
	for i, b := 0, t.Data; len(b) > 0; i++ {
		n := min(t.Segment, len(b))
		d.capture.write(now, from, t.To.AddrPort(), uint16(i), b[:n])
		b = b[n:]
	}
}

// captureIn records what was received.
func (d *Device) captureIn(b []byte, from netip.AddrPort, id uint16) {
	if d.capture != nil {
		d.capture.write(time.Now(), from, netip.AddrPortFrom(d.addr, packet.Port), id, b)
	}
}
