// Package simlink puts userspace devices on a simulated network, so that whole sessions run in virtual time: inside a
// testing/synctest bubble everything that waits, waits on the bubble's clock.
//
//	net := simnet.New(seed)
//	go net.Drive(ctx)
//	d, err := simlink.Open(net, addr, verbs.MTU1024)
package simlink

import (
	"math/rand/v2"
	"net/netip"
	"os"
	"sync"
	"time"

	"srp-initiator/rdma/softroce"
	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/softroce/simnet"
	"srp-initiator/rdma/softroce/udp"
	"srp-initiator/rdma/verbs"
)

// Open opens a device at addr on net. Its keys, queue pair numbers and PSNs follow from the address, and from options.
func Open(net *simnet.Net, addr netip.Addr, mtu verbs.MTU, opts ...softroce.Option) (*softroce.Device, error) {
	seed := addr.As16()
	r := rand.New(rand.NewPCG(uint64(seed[15])<<8|uint64(seed[14]), uint64(seed[13])<<8|uint64(seed[12])))
	var mu sync.Mutex
	random := func() uint64 { mu.Lock(); defer mu.Unlock(); return r.Uint64() }
	return softroce.OpenLink(New(net, addr), mtu, append([]softroce.Option{softroce.WithRandom(random)}, opts...)...)
}

// batch is how many datagrams one Receive takes at most, queue how many may wait, as in a socket's buffer.
const (
	batch = 16
	queue = 4096
)

// Link is one end of a simulated network as a softroce.Link. What it receives is known to have IP identification 0.
type Link struct {
	net  *simnet.Net
	port *simnet.Port
	addr netip.Addr
	out  []udp.Message

	mu       sync.Mutex
	queue    []udp.Message
	lost     int
	closed   bool
	armed    bool
	deadline time.Time
	unpark   bool
	back     chan struct{} // 1 buffered: WaitReadable looks again
	front    chan struct{} // 1 buffered: Park looks again
}

// New makes a link at addr.
func New(net *simnet.Net, addr netip.Addr) *Link {
	l := &Link{net: net, addr: addr, back: make(chan struct{}, 1), front: make(chan struct{}, 1)}
	l.port = net.Attach(netip.AddrPortFrom(addr, packet.Port), l.arrive)
	return l
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (l *Link) arrive(from netip.AddrPort, b []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || len(l.queue) >= queue {
		l.lost++
		return
	}
	l.queue = append(l.queue, udp.Message{Data: append([]byte(nil), b...), From: from, KnowsID: true})
	if l.armed {
		signal(l.back)
	}
	signal(l.front)
}

// Addr implements softroce.Link.
func (l *Link) Addr() netip.Addr { return l.addr }

// GSO implements softroce.Link.
func (l *Link) GSO() bool { return false }

// Receive implements softroce.Link.
func (l *Link) Receive() ([]udp.Message, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := min(batch, len(l.queue))
	l.out = append(l.out[:0], l.queue[:n]...)
	if l.queue = l.queue[n:]; len(l.queue) == 0 {
		l.queue = nil
	}
	return l.out, nil
}

// Send implements softroce.Link.
func (l *Link) Send(trains []udp.Train) (int, error) {
	for i := range trains {
		l.port.Send(trains[i].To.AddrPort(), trains[i].Data)
	}
	return len(trains), nil
}

// Arm implements softroce.Link.
func (l *Link) Arm() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.armed = true
	signal(l.back)
	return nil
}

// Disarm implements softroce.Link.
func (l *Link) Disarm() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.armed = false
	return nil
}

// SetDeadline implements softroce.Link.
func (l *Link) SetDeadline(t time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deadline = t
	signal(l.back)
	return nil
}

// WaitReadable implements softroce.Link.
func (l *Link) WaitReadable() error {
	for {
		l.mu.Lock()
		wait := time.Duration(-1)
		if !l.deadline.IsZero() {
			wait = max(0, time.Until(l.deadline))
		}
		readable, closed := l.armed && len(l.queue) > 0, l.closed
		if readable {
			l.armed = false
		}
		l.mu.Unlock()
		switch {
		case closed:
			return os.ErrClosed
		case readable:
			return nil
		case wait == 0:
			return os.ErrDeadlineExceeded
		case wait < 0:
			<-l.back
			continue
		}
		t := time.NewTimer(wait)
		select {
		case <-l.back:
		case <-t.C:
		}
		t.Stop()
	}
}

// Park implements softroce.Link.
func (l *Link) Park() (readable bool, err error) {
	for {
		l.mu.Lock()
		unpark := l.unpark
		l.unpark = false
		readable, closed := len(l.queue) > 0, l.closed
		l.mu.Unlock()
		switch {
		case closed:
			return false, os.ErrClosed
		case unpark:
			return false, nil
		case readable:
			return true, nil
		}
		<-l.front
	}
}

// Unpark implements softroce.Link.
func (l *Link) Unpark() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unpark = true
	signal(l.front)
}

// Close implements softroce.Link.
func (l *Link) Close() error {
	l.net.Attach(netip.AddrPortFrom(l.addr, packet.Port), nil)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	signal(l.back)
	signal(l.front)
	return nil
}
