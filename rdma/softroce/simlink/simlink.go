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
	l, err := New(net, addr)
	if err != nil {
		return nil, err
	}
	seed := addr.As16()
	r := rand.New(rand.NewPCG(uint64(seed[15])<<8|uint64(seed[14]), uint64(seed[13])<<8|uint64(seed[12])))
	var mu sync.Mutex
	random := func() uint64 { mu.Lock(); defer mu.Unlock(); return r.Uint64() }
	return softroce.OpenLink(l, mtu, append([]softroce.Option{softroce.WithRandom(random)}, opts...)...)
}

// batch is how many datagrams one Receive takes at most.
const batch = 16

// Link is one end of a simulated network as a softroce.Link. What it receives is known to have IP identification 0.
type Link struct {
	conn *simnet.Conn
	addr netip.Addr
	bufs [batch][packet.Max + 1]byte
	out  []udp.Message

	mu       sync.Mutex
	armed    bool
	deadline time.Time
	changed  chan struct{} // 1 buffered: armed or deadline is new
	ahead    int           // bytes of a datagram that WaitReadable has taken off the queue; -1: none
	aheadBuf [packet.Max + 1]byte
	aheadSrc netip.AddrPort
}

// New makes a link at addr.
func New(net *simnet.Net, addr netip.Addr) (*Link, error) {
	c, err := net.Listen(netip.AddrPortFrom(addr, packet.Port))
	if err != nil {
		return nil, err
	}
	return &Link{conn: c, addr: addr, out: make([]udp.Message, 0, batch), changed: make(chan struct{}, 1), ahead: -1}, nil
}

// Addr implements softroce.Link.
func (l *Link) Addr() netip.Addr { return l.addr }

// GSO implements softroce.Link.
func (l *Link) GSO() bool { return false }

// Receive implements softroce.Link.
func (l *Link) Receive() ([]udp.Message, error) {
	l.out = l.out[:0]
	l.mu.Lock()
	if l.ahead >= 0 {
		n := copy(l.bufs[0][:], l.aheadBuf[:l.ahead])
		l.out = append(l.out, udp.Message{Data: l.bufs[0][:n], From: l.aheadSrc, KnowsID: true})
		l.ahead = -1
	}
	l.mu.Unlock()
	for len(l.out) < batch {
		b := l.bufs[len(l.out)][:]
		n, from, ok := l.conn.Receive(b)
		if !ok {
			break
		}
		l.out = append(l.out, udp.Message{Data: b[:n], From: from, KnowsID: true})
	}
	return l.out, nil
}

// Send implements softroce.Link.
func (l *Link) Send(trains []udp.Train) (int, error) {
	for i := range trains {
		l.conn.Send(trains[i].To.AddrPort(), trains[i].Data)
	}
	return len(trains), nil
}

// change tells WaitReadable to look again.
func (l *Link) change() {
	select {
	case l.changed <- struct{}{}:
	default:
	}
	l.conn.Wake()
}

// Arm implements softroce.Link.
func (l *Link) Arm() error {
	l.mu.Lock()
	l.armed = true
	l.mu.Unlock()
	l.change()
	return nil
}

// Disarm implements softroce.Link.
func (l *Link) Disarm() error {
	l.mu.Lock()
	l.armed = false
	l.mu.Unlock()
	return nil
}

// SetDeadline implements softroce.Link.
func (l *Link) SetDeadline(t time.Time) error {
	l.mu.Lock()
	l.deadline = t
	l.mu.Unlock()
	l.change()
	return nil
}

// WaitReadable implements softroce.Link.
func (l *Link) WaitReadable() error {
	for {
		l.mu.Lock()
		wait := time.Duration(-1)
		if !l.deadline.IsZero() {
			if wait = time.Until(l.deadline); wait <= 0 {
				l.mu.Unlock()
				return os.ErrDeadlineExceeded
			}
		}
		armed := l.armed
		if armed {
			if l.ahead < 0 {
				if n, from, ok := l.conn.Receive(l.aheadBuf[:]); ok {
					l.ahead, l.aheadSrc = n, from
				}
			}
			if l.ahead >= 0 {
				l.armed = false
				l.mu.Unlock()
				return nil
			}
		}
		l.mu.Unlock()
		if armed {
			// Wake-ups by change come here too; the next round finds out.
			if err := l.conn.Wait(wait); err == os.ErrClosed {
				return err
			}
			continue
		}
		if wait < 0 {
			<-l.changed
			continue
		}
		t := time.NewTimer(wait)
		select {
		case <-l.changed:
			t.Stop()
		case <-t.C:
		}
	}
}

// Close implements softroce.Link.
func (l *Link) Close() error {
	err := l.conn.Close()
	l.change()
	return err
}
