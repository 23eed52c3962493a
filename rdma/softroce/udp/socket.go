// Package udp is the packet I/O of the userspace RoCE v2 device: one unconnected UDP socket bound
// to port 4791 of one address, read and written in batches by recvmmsg and sendmmsg, without a copy of its own and without allocation.
//
// Why the socket is as it is. The ICRC of RoCE v2 covers the IP header, so a sender must know what the kernel will
// write there: an unconnected socket with IP_MTU_DISCOVER set to DO sends DF and identification 0 (a connected one, or another
// setting, counts identifications up from a random value). Segments of a UDP_SEGMENT train get 0, 1, 2, ... when the
// kernel splits them. DF also forbids fragments, which no RoCE receiver reassembles. The source
// port is 4791 for everything that is sent: receivers do not look at it, and constant ports keep a path's packets in order.
// UDP checksums stay on, as UDP_SEGMENT requires; receivers ignore them or verify them in hardware.
package udp

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Port is RoCE v2's UDP port.
const Port = 4791

// Limits of one UDP_SEGMENT train: the kernel takes 64 segments (UDP_MAX_SEGMENTS) and one IP packet's worth of bytes.
const (
	MaxSegments = 64
	MaxTrain    = 65535 - 40 - 8
)

const (
	wantBuffer  = 8 << 20 // perf: at 8 MiB an unpaced sender loses under 1.5 %, at the usual 208 KiB 10 %
	batchGRO    = 16      // messages per recvmmsg; each may hold a train
	batchPlain  = 64
	trainBuffer = 64 << 10
	plainBuffer = 4352 // a RoCE packet of path MTU 4096 and room to see that one is too long
	batchSend   = 32
)

// Message is what one receive buffer holds: a datagram, or with Segment not 0 a train of datagrams of
// Segment bytes, the last of which may be shorter.
type Message struct {
	Data    []byte
	Segment int
	From    netip.AddrPort
	// KnowsID says that every datagram of the message had IP identification 0. A socket cannot tell; a simulated network can.
	KnowsID bool
}

// Train is what to send to one node: a datagram, or with Segment not 0 several of Segment bytes, of which the last may be shorter.
type Train struct {
	Data    []byte
	Segment int
	To      *Destination
}

// Stats counts what the socket did.
type Stats struct {
	ReceiveCalls, SendCalls     uint64
	MessagesReceived            uint64 // trains or single datagrams
	TrainsSent                  uint64 // likewise
	KernelDrops                 uint64 // datagrams lost because the socket's receive buffer was full
	SendErrors                  uint64 // datagrams or trains the kernel refused for good
	Truncated                   uint64
	GSO, GRO                    bool
	ReceiveBuffer, SendBuffer   int // bytes granted
	LastSendError               error
	SegmentationSwitchedOffSays error // why UDP_SEGMENT was given up, if it was
}

// Options change what Open asks of the kernel.
type Options struct {
	NoGSO, NoGRO bool
}

// Socket is one bound socket. Receive and Send may each be called by one goroutine at a time.
type Socket struct {
	fd    int
	addr  netip.Addr
	back  wait
	front wait

	rx    receiver
	tx    sender
	stats Stats
}

// PortInUseError says that port 4791 of an address is taken.
type PortInUseError struct {
	Addr netip.Addr
	RXE  bool // the kernel's rdma_rxe is loaded
}

func (e *PortInUseError) Error() string {
	s := fmt.Sprintf("UDP port %d on %s is in use", Port, e.Addr)
	if e.RXE {
		return s + ": the kernel module rdma_rxe owns it for all addresses of its network namespace; use the kernel's device instead (rdma link show), " +
			"or unload the module (modprobe -r rdma_rxe), or run in another network namespace"
	}
	return s + ": another softroce process, or something else that speaks RoCE v2, has this address; give this process another address of the machine, or end the other one (ss -lunp 'sport = 4791' names it)"
}

func (e *PortInUseError) Unwrap() error { return syscall.EADDRINUSE }

// Open binds port 4791 of addr.
func Open(addr netip.Addr, o Options) (*Socket, error) {
	addr = addr.Unmap()
	if !addr.IsValid() || addr.IsUnspecified() || addr.IsMulticast() {
		return nil, fmt.Errorf("softroce needs one unicast address of this machine, not %s", addr)
	}
	if addr.Is6() && addr.IsLinkLocalUnicast() {
		if addr.Zone() == "" {
			return nil, fmt.Errorf("link-local address %s: %%INTERFACE is missing; want such as %s%%eth0", addr, addr)
		}
		if Scope(addr) == 0 {
			return nil, fmt.Errorf("address %s: there is no network interface %q", addr, addr.Zone())
		}
	}
	var family int
	var name unix.Sockaddr
	if addr.Is4() {
		family, name = unix.AF_INET, &unix.SockaddrInet4{Port: Port, Addr: addr.As4()}
	} else {
		family, name = unix.AF_INET6, &unix.SockaddrInet6{Port: Port, Addr: addr.WithZone("").As16(), ZoneId: Scope(addr)}
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_UDP)
	if err != nil {
		return nil, fmt.Errorf("UDP socket: %w", err)
	}
	s := &Socket{fd: fd, addr: addr}
	if err := setOptions(fd, addr.Is6()); err != nil {
		unix.Close(fd)
		return nil, err
	}
	if err := unix.Bind(fd, name); err != nil {
		unix.Close(fd)
		switch err {
		case unix.EADDRINUSE:
			_, serr := os.Stat("/sys/module/rdma_rxe")
			return nil, &PortInUseError{Addr: addr, RXE: serr == nil}
		case unix.EADDRNOTAVAIL:
			return nil, fmt.Errorf("no interface of this machine has address %s: %w", addr, err)
		}
		return nil, fmt.Errorf("bind UDP port %d of %s: %w", Port, addr, err)
	}
	if err := s.back.init(fd); err != nil {
		unix.Close(fd)
		return nil, err
	}
	if err := s.front.init(fd); err != nil {
		s.back.file.Close()
		unix.Close(fd)
		return nil, err
	}
	s.front.ready = func(uintptr) bool {
		if !s.front.armed.Load() {
			// Before parking: what is there already counts, too, so the event comes at once.
			s.front.ask(s.fd, unix.EPOLLIN)
			return false
		}
		return s.front.fired()
	}
	s.probe(o)
	s.rx.init(s.stats.GRO)
	s.tx.init()
	return s, nil
}

// Scope is the interface index of a link-local address with a zone, 0 of any other.
func Scope(a netip.Addr) uint32 {
	if a.Zone() == "" {
		return 0
	}
	if i, err := net.InterfaceByName(a.Zone()); err == nil {
		return uint32(i.Index)
	}
	n, _ := strconv.ParseUint(a.Zone(), 10, 32)
	return uint32(n)
}

// wait is an epoll instance that stands between the socket and the Go runtime's own. Were the socket itself known to
// the runtime, each datagram that comes in would wake the thread that waits for network events, also while somebody polls the socket and
// nobody waits: on a virtual machine that costs more than the datagram. The instance is armed for one event at a time, by who means to wait.
type wait struct {
	ep    int
	file  *os.File
	raw   syscall.RawConn
	ready func(fd uintptr) bool // made once
	armed atomic.Bool           // the event was asked for and has not been taken
	event [1]unix.EpollEvent
}

// ask arms the instance for one event, or with events 0 disarms it.
func (w *wait) ask(fd int, events uint32) error {
	w.armed.Store(events != 0)
	return unix.EpollCtl(w.ep, unix.EPOLL_CTL_MOD, fd, &unix.EpollEvent{Events: events | unix.EPOLLONESHOT})
}

// fired is called before the goroutine parks and after each wake-up.
func (w *wait) fired() bool {
	if !w.armed.Load() {
		return false // one that is armed after this look wakes who parks after it
	}
	if !w.take() {
		return false
	}
	w.armed.Store(false)
	return true
}

func (w *wait) init(fd int) error {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return fmt.Errorf("epoll_create1: %w", err)
	}
	err = unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLONESHOT})
	if err == nil {
		err = unix.SetNonblock(ep, true) // os.NewFile then hands it to the runtime
	}
	if err != nil {
		unix.Close(ep)
		return fmt.Errorf("epoll: %w", err)
	}
	w.ep = ep
	w.file = os.NewFile(uintptr(ep), "softroce")
	w.ready = func(uintptr) bool { return w.fired() }
	if w.raw, err = w.file.SyscallConn(); err != nil {
		w.file.Close()
	}
	return err
}

// OpenLoopback binds port 4791 of a free address in 127.0.0.0/8 that no other process has, so that any number of processes run side by side.
func OpenLoopback(o Options) (*Socket, error) {
	var err error
	for range 64 {
		r := rand.Uint32()
		// Not 127.0.0.0/16, where services of the machine live, and no .0 or .255.
		a := netip.AddrFrom4([4]byte{127, 1 + byte(r)%254, byte(r >> 8), 1 + byte(r>>16)%254})
		var s *Socket
		if s, err = Open(a, o); err == nil {
			return s, nil
		}
		var busy *PortInUseError
		if !errors.As(err, &busy) || busy.RXE {
			return nil, err
		}
	}
	return nil, err
}

func setOptions(fd int, v6 bool) error {
	if v6 {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO); err != nil {
			return fmt.Errorf("IPV6_MTU_DISCOVER: %w", err)
		}
		// rxe sends zero checksums over IPv6 too (RFC 6936 allows that for tunnels).
		if err := unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_NO_CHECK6_RX, 1); err != nil {
			return fmt.Errorf("UDP_NO_CHECK6_RX: %w", err)
		}
		return nil
	}
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO); err != nil {
		return fmt.Errorf("IP_MTU_DISCOVER: %w", err)
	}
	return nil
}

// probe asks for buffers and offloads and notes what was granted.
func (s *Socket) probe(o Options) {
	buffer := func(force, plain int) int {
		if unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, force, wantBuffer) != nil {
			unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, plain, wantBuffer)
		}
		n, _ := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, plain)
		return n / 2 // the kernel reports twice what it was asked for
	}
	s.stats.ReceiveBuffer = buffer(unix.SO_RCVBUFFORCE, unix.SO_RCVBUF)
	s.stats.SendBuffer = buffer(unix.SO_SNDBUFFORCE, unix.SO_SNDBUF)
	unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RXQ_OVFL, 1)
	if !o.NoGSO {
		_, err := unix.GetsockoptInt(s.fd, unix.SOL_UDP, unix.UDP_SEGMENT)
		s.stats.GSO = err == nil
		s.stats.SegmentationSwitchedOffSays = err
	}
	if !o.NoGRO {
		s.stats.GRO = unix.SetsockoptInt(s.fd, unix.SOL_UDP, unix.UDP_GRO, 1) == nil
	}
}

// Addr is the bound address.
func (s *Socket) Addr() netip.Addr { return s.addr }

// GSO reports that trains may be sent to nodes that understand them.
func (s *Socket) GSO() bool { return s.stats.GSO }

// Stats reports the counters.
func (s *Socket) Stats() Stats { return s.stats }

// Close closes the socket and ends WaitReadable and Park. No other method may be running but these.
func (s *Socket) Close() error {
	s.back.file.Close()
	s.front.file.Close()
	return unix.Close(s.fd)
}

// Arm makes the next WaitReadable, or the one that is under way, return when something arrives or has
// arrived already; once.
func (s *Socket) Arm() error { return s.back.ask(s.fd, unix.EPOLLIN) }

// Disarm takes Arm back.
func (s *Socket) Disarm() error { return s.back.ask(s.fd, 0) }

// WaitReadable parks the goroutine until the armed socket has something or the time of SetDeadline has come
// (os.ErrDeadlineExceeded). After Close: os.ErrClosed.
func (s *Socket) WaitReadable() error {
	err := s.back.raw.Read(s.back.ready)
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		return os.ErrClosed // the runtime's own error for it is not exported
	}
	return err
}

// SetDeadline ends the current or next WaitReadable at t; zero means never.
func (s *Socket) SetDeadline(t time.Time) error { return s.back.file.SetReadDeadline(t) }

// Park parks a second goroutine until something arrives or has arrived already, and says so, or until Unpark. After Close: os.ErrClosed.
func (s *Socket) Park() (readable bool, err error) {
	err = s.front.raw.Read(s.front.ready)
	if err == nil {
		return true, nil
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return false, os.ErrClosed
	}
	s.front.file.SetReadDeadline(time.Time{})
	if s.front.armed.Load() {
		s.front.ask(s.fd, 0)
	}
	return false, nil
}

// Unpark ends the current or the next Park.
func (s *Socket) Unpark() { s.front.file.SetReadDeadline(time.Unix(1, 0)) }

// FD is the socket's descriptor, for poll(2). It is valid until Close.
func (s *Socket) FD() int { return s.fd }

// ErrWouldBlock: the kernel has no room for more datagrams now.
var ErrWouldBlock = errors.New("udp: no room to send")
