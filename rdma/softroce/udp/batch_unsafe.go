package udp

import (
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The batches keep the kernel's structures, with every pointer typed so that the garbage collector sees it, in
// arrays made once. The system calls never block (MSG_DONTWAIT), so they are raw: the scheduler need not know.

// mmsghdr is struct mmsghdr of <bits/socket.h>.
type mmsghdr struct {
	hdr unix.Msghdr
	len uint32
	_   uint32
}

// take takes the armed event if it has come.
func (w *wait) take() bool {
	n, _, e := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(w.ep), uintptr(unsafe.Pointer(&w.event[0])), 1, 0, 0, 0)
	return e == 0 && n == 1
}

// controlSize is room for the two control messages that are asked for, UDP_GRO and SO_RXQ_OVFL.
const controlSize = 64

// receiver owns the receive buffers. What Receive returns points into them until the next Receive.
type receiver struct {
	hdrs     []mmsghdr
	iovs     []unix.Iovec
	names    [][unix.SizeofSockaddrInet6]byte
	controls [][controlSize]byte
	bufs     []byte
	size     int
	out      []Message
	filled   int // headers the kernel changed in the last call
	drops    uint32
}

func (r *receiver) init(gro bool) {
	n, size := batchPlain, plainBuffer
	if gro {
		n, size = batchGRO, trainBuffer
	}
	r.size = size
	r.bufs = make([]byte, n*size)
	r.hdrs, r.iovs, r.names, r.controls = make([]mmsghdr, n), make([]unix.Iovec, n), make([][unix.SizeofSockaddrInet6]byte, n), make([][controlSize]byte, n)
	r.out = make([]Message, 0, n)
	for i := range r.hdrs {
		r.iovs[i].Base = &r.bufs[i*size]
		r.iovs[i].SetLen(size)
		h := &r.hdrs[i].hdr
		h.Name, h.Iov, h.Control = &r.names[i][0], &r.iovs[i], &r.controls[i][0]
		h.SetIovlen(1)
	}
	r.filled = n
}

// Receive takes what has arrived without waiting. The messages are valid until the next call. None and nil: nothing is there.
func (s *Socket) Receive() ([]Message, error) {
	r := &s.rx
	for i := range r.hdrs[:r.filled] {
		h := &r.hdrs[i].hdr
		h.Namelen = unix.SizeofSockaddrInet6
		h.SetControllen(len(r.controls[i]))
		h.Flags = 0
	}
	s.stats.ReceiveCalls++
	n, _, e := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&r.hdrs[0])), uintptr(len(r.hdrs)), unix.MSG_DONTWAIT, 0, 0)
	r.filled = 0
	if e != 0 {
		if e == syscall.EAGAIN || e == syscall.EINTR {
			return nil, nil
		}
		return nil, e
	}
	r.filled = int(n)
	r.out = r.out[:0]
	for i := range r.hdrs[:n] {
		h := &r.hdrs[i]
		if h.hdr.Flags&unix.MSG_TRUNC != 0 {
			s.stats.Truncated++
			continue
		}
		m := Message{Data: r.bufs[i*r.size : i*r.size+int(h.len)], From: source(&r.names[i])}
		m.Segment = s.control(r.controls[i][:h.hdr.Controllen])
		if m.Segment >= len(m.Data) {
			m.Segment = 0
		}
		r.out = append(r.out, m)
	}
	s.stats.MessagesReceived += uint64(len(r.out))
	return r.out, nil
}

// control reads the segment size of a UDP_GRO train and the drop counter.
func (s *Socket) control(b []byte) (segment int) {
	for len(b) >= unix.SizeofCmsghdr {
		h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
		n := int(h.Len)
		if n < unix.SizeofCmsghdr || n > len(b) {
			break
		}
		if data := b[unix.SizeofCmsghdr:n]; len(data) >= 4 {
			v := *(*uint32)(unsafe.Pointer(&data[0]))
			switch {
			case h.Level == unix.SOL_UDP && h.Type == unix.UDP_GRO:
				segment = int(v)
			case h.Level == unix.SOL_SOCKET && h.Type == unix.SO_RXQ_OVFL:
				s.stats.KernelDrops += uint64(v - s.rx.drops)
				s.rx.drops = v
			}
		}
		b = b[min(len(b), unix.CmsgSpace(n-unix.SizeofCmsghdr)):]
	}
	return segment
}

// source is the sender of a message. The zone of a link-local address is not looked up: a node has one
// address, so the zone is its own.
func source(name *[unix.SizeofSockaddrInet6]byte) netip.AddrPort {
	port := uint16(name[2])<<8 | uint16(name[3])
	if *(*uint16)(unsafe.Pointer(&name[0])) == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(name[4:8])), port)
	}
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte(name[8:24])).Unmap(), port)
}

// Destination is a node's address as the kernel takes it.
type Destination struct {
	addr netip.AddrPort
	name [unix.SizeofSockaddrInet6]byte
	len  uint32
}

// NewDestination makes a destination of an address and port; scope is the interface index for a link-local IPv6 address.
func NewDestination(to netip.AddrPort, scope uint32) *Destination {
	d := &Destination{addr: to}
	d.name[2], d.name[3] = byte(to.Port()>>8), byte(to.Port())
	if a := to.Addr().Unmap(); a.Is4() {
		*(*uint16)(unsafe.Pointer(&d.name[0])) = unix.AF_INET
		v := a.As4()
		copy(d.name[4:], v[:])
		d.len = unix.SizeofSockaddrInet4
	} else {
		*(*uint16)(unsafe.Pointer(&d.name[0])) = unix.AF_INET6
		v := a.As16()
		copy(d.name[8:], v[:])
		if a.IsLinkLocalUnicast() {
			*(*uint32)(unsafe.Pointer(&d.name[24])) = scope
		}
		d.len = unix.SizeofSockaddrInet6
	}
	return d
}

// AddrPort is what NewDestination was given.
func (d *Destination) AddrPort() netip.AddrPort { return d.addr }

type sender struct {
	hdrs     [batchSend]mmsghdr
	iovs     [batchSend]unix.Iovec
	controls [batchSend][32]byte
}

func (t *sender) init() {
	for i := range t.hdrs {
		t.hdrs[i].hdr.Iov = &t.iovs[i]
		t.hdrs[i].hdr.SetIovlen(1)
		c := (*unix.Cmsghdr)(unsafe.Pointer(&t.controls[i][0]))
		c.Level, c.Type = unix.SOL_UDP, unix.UDP_SEGMENT
		c.SetLen(unix.CmsgLen(2))
	}
}

// Send gives trains to the kernel in order and returns how many it took. ErrWouldBlock: the others have to wait until there is room. A train
// that the kernel refuses for another reason is lost, counted and passed over, as a network would lose it.
// The bytes are the kernel's own when Send returns.
func (s *Socket) Send(trains []Train) (int, error) {
	t := &s.tx
	sent := 0
	for sent < len(trains) {
		batch := trains[sent:min(len(trains), sent+batchSend)]
		for i := range batch {
			tr := &batch[i]
			h := &t.hdrs[i].hdr
			h.Name, h.Namelen = &tr.To.name[0], tr.To.len
			t.iovs[i].Base = &tr.Data[0]
			t.iovs[i].SetLen(len(tr.Data))
			if tr.Segment != 0 && tr.Segment < len(tr.Data) {
				*(*uint16)(unsafe.Pointer(&t.controls[i][unix.SizeofCmsghdr])) = uint16(tr.Segment)
				h.Control = &t.controls[i][0]
				h.SetControllen(unix.CmsgSpace(2))
			} else {
				h.Control = nil
				h.SetControllen(0)
			}
		}
		s.stats.SendCalls++
		n, _, e := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&t.hdrs[0])), uintptr(len(batch)), unix.MSG_DONTWAIT, 0, 0)
		switch {
		case e == 0:
			sent += int(n)
			s.stats.TrainsSent += uint64(n)
		case e == syscall.EINTR:
		case e == syscall.EAGAIN || e == syscall.ENOBUFS:
			return sent, ErrWouldBlock
		case batch[0].Segment != 0 && (e == syscall.EIO || e == syscall.EINVAL):
			// The way out cannot segment or checksum (udp_send_skb gives EIO): from now on one datagram each.
			s.stats.GSO, s.stats.SegmentationSwitchedOffSays = false, e
			s.sendApart(&batch[0])
			sent++
		default:
			s.stats.SendErrors++
			s.stats.LastSendError = e
			sent++
		}
	}
	return sent, nil
}

// sendApart sends the datagrams of a train one by one, and what finds no room is lost.
func (s *Socket) sendApart(tr *Train) {
	one := [1]Train{{To: tr.To}}
	for b := tr.Data; len(b) > 0; {
		n := min(tr.Segment, len(b))
		one[0].Data, b = b[:n], b[n:]
		if _, err := s.Send(one[:]); err != nil {
			s.stats.SendErrors++
			s.stats.LastSendError = err
		}
	}
}
