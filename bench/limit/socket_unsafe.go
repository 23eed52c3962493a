package main

import (
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	maxTrain    = 65535 - 48
	maxSegments = 64
	batch       = 16
)

type mmsghdr struct {
	hdr unix.Msghdr
	len uint32
	_   uint32
}

// socket is a UDP socket with UDP_GRO, read and written in batches without allocation.
type socket struct {
	fd   int
	rx   [batch]mmsghdr
	rxio [batch]unix.Iovec
	rxc  [batch][64]byte
	bufs [batch][]byte
	tx   [batch]mmsghdr
	txio [batch]unix.Iovec
	txc  [batch][32]byte
}

// train is one or more datagrams of seg bytes, the last of which may be shorter.
type train struct {
	data []byte
	seg  int
}

func newSocket(fd int) (*socket, error) {
	s := &socket{fd: fd}
	if err := unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_GRO, 1); err != nil {
		return nil, os.NewSyscallError("UDP_GRO", err)
	}
	for _, o := range []int{unix.SO_RCVBUFFORCE, unix.SO_RCVBUF} {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, o, 8<<20) == nil {
			break
		}
	}
	unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 8<<20)
	for i := range s.rx {
		s.bufs[i] = make([]byte, 1<<16)
		s.rxio[i].Base = &s.bufs[i][0]
		s.rxio[i].SetLen(1 << 16)
		s.rx[i].hdr.Iov = &s.rxio[i]
		s.rx[i].hdr.SetIovlen(1)
		s.rx[i].hdr.Control = &s.rxc[i][0]
		s.tx[i].hdr.Iov = &s.txio[i]
		s.tx[i].hdr.SetIovlen(1)
		c := (*unix.Cmsghdr)(unsafe.Pointer(&s.txc[i][0]))
		c.Level, c.Type = unix.SOL_UDP, unix.UDP_SEGMENT
		c.SetLen(unix.CmsgLen(2))
	}
	return s, nil
}

// receive calls f for every datagram that is there; false: none was.
func (s *socket) receive(f func(b []byte)) bool {
	for i := range s.rx {
		s.rx[i].hdr.SetControllen(len(s.rxc[i]))
	}
	n, _, e := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&s.rx[0])), batch, unix.MSG_DONTWAIT, 0, 0)
	if e != 0 {
		return false
	}
	for i := range int(n) {
		b, seg := s.bufs[i][:s.rx[i].len], 0
		for c := s.rxc[i][:s.rx[i].hdr.Controllen]; len(c) >= unix.SizeofCmsghdr; {
			h := (*unix.Cmsghdr)(unsafe.Pointer(&c[0]))
			if h.Level == unix.SOL_UDP && h.Type == unix.UDP_GRO {
				seg = int(*(*uint32)(unsafe.Pointer(&c[unix.SizeofCmsghdr])))
			}
			c = c[min(len(c), unix.CmsgSpace(int(h.Len)-unix.SizeofCmsghdr)):]
		}
		if seg == 0 {
			seg = len(b)
		}
		for len(b) > 0 {
			n := min(seg, len(b))
			f(b[:n])
			b = b[n:]
		}
	}
	return n > 0
}

// send sends trains on the connected socket; it waits when the send buffer is full.
func (s *socket) send(trains []train) {
	for len(trains) > 0 {
		n := min(len(trains), batch)
		for i, t := range trains[:n] {
			s.txio[i].Base = &t.data[0]
			s.txio[i].SetLen(len(t.data))
			h := &s.tx[i].hdr
			h.Control = nil
			h.SetControllen(0)
			if t.seg < len(t.data) {
				*(*uint16)(unsafe.Pointer(&s.txc[i][unix.SizeofCmsghdr])) = uint16(t.seg)
				h.Control = &s.txc[i][0]
				h.SetControllen(unix.CmsgSpace(2))
			}
		}
		sent, _, e := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&s.tx[0])), uintptr(n), unix.MSG_DONTWAIT, 0, 0)
		if e == 0 {
			trains = trains[sent:]
			continue
		}
		if e != syscall.EAGAIN && e != syscall.ENOBUFS {
			fatal("sendmmsg: %v", e)
		}
		schedYield()
	}
}

func schedYield() { unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// readable blocks the thread until the socket is readable.
func (s *socket) readable() {
	fds := [1]unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}
	unix.Poll(fds[:], 1000)
}
