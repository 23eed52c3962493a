// Package simnet is a seeded IP network in virtual time, for tests: loss, reordering, duplication, delay, corruption and
// partitions, each direction of each path by itself. All that happens on it follows from the seed and from what
// its nodes do.
//
// It runs in one of two ways. Machines without goroutines are stepped: Attach handlers, then Step or Run; thousands of sessions take
// seconds. Whole devices with goroutines run inside a testing/synctest bubble: Listen gives them Conns, and Drive, in a goroutine of
// the bubble, delivers when the bubble's clock says so.
package simnet

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"
)

// Faults describe one direction of one path. The zero value is a perfect link without delay.
type Faults struct {
	Loss, Duplicate, Reorder, Corrupt float64 // probability for each datagram, 0 to 1
	// Delay is the one-way delay; Jitter adds a random part, which does not reorder.
	Delay, Jitter time.Duration
	// ReorderDelay bounds the extra delay of datagrams that Reorder picked, which others may overtake.
	ReorderDelay time.Duration
	// Bandwidth in bytes per second spreads datagrams out; 0 is no limit. Queue is how many bytes may wait for it: what does not fit is lost.
	Bandwidth float64
	Queue     int
}

// Stats count datagrams of one direction.
type Stats struct {
	Sent, Delivered, Lost, Duplicated, Reordered, Corrupted, Partitioned, Overflowed uint64
}

type direction struct{ from, to netip.Addr }

type link struct {
	faults Faults
	cut    bool
	rng    *rand.Rand
	free   time.Duration // when the wire is free again
	last   time.Duration // arrival of the latest datagram that was not reordered
	stats  Stats
}

type event struct {
	at   time.Duration
	seq  uint64 // order among equals
	fire func() // a timer, or
	data *datagram
}

type datagram struct {
	from, to netip.AddrPort
	b        []byte
}

// Net is a network. Its methods may be called from handlers; with Drive also from other goroutines.
type Net struct {
	mu       sync.Mutex
	seed     uint64
	now      time.Duration
	seq      uint64
	heap     []event
	ports    map[netip.AddrPort]*Port
	links    map[direction]*link
	defaults Faults
	pool     []*datagram
	wake     chan struct{} // of Drive
	start    time.Time
	driven   bool
	// Tap, when set, sees every datagram as it is sent, before the network does anything to it.
	Tap func(at time.Duration, from, to netip.AddrPort, b []byte)
}

// Port is a node's UDP port. Handle is called with each datagram that arrives; b is valid during the call.
type Port struct {
	net    *Net
	addr   netip.AddrPort
	handle func(from netip.AddrPort, b []byte)
}

// New makes a network with perfect links.
func New(seed uint64) *Net {
	return &Net{seed: seed, ports: map[netip.AddrPort]*Port{}, links: map[direction]*link{}, wake: make(chan struct{}, 1)}
}

// SetDefault sets the faults of all paths, also of those that SetFaults named.
func (n *Net) SetDefault(f Faults) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.defaults = f
	for _, l := range n.links {
		l.faults = f
	}
}

// SetFaults sets the faults of the path from one node to another.
func (n *Net) SetFaults(from, to netip.Addr, f Faults) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.link(from, to).faults = f
}

// Partition cuts or restores the path from one node to another, one way.
func (n *Net) Partition(from, to netip.Addr, cut bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.link(from, to).cut = cut
}

// Stats are the counters of the path from one node to another.
func (n *Net) Stats(from, to netip.Addr) Stats {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.link(from, to).stats
}

// link's random numbers depend on seed and addresses only, so that traffic elsewhere does not change what happens here.
func (n *Net) link(from, to netip.Addr) *link {
	d := direction{from, to}
	l := n.links[d]
	if l == nil {
		h := n.seed
		mix := func(a netip.Addr) {
			for _, b := range a.As16() {
				h = (h ^ uint64(b)) * 0x100000001b3
			}
		}
		mix(from)
		mix(to)
		l = &link{faults: n.defaults, rng: rand.New(rand.NewPCG(n.seed, h))}
		n.links[d] = l
	}
	return l
}

// Now is the virtual time since New.
func (n *Net) Now() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.clock()
}

func (n *Net) clock() time.Duration {
	if n.driven {
		return time.Since(n.start)
	}
	return n.now
}

// Attach puts a node's port on the network; a port that is taken is replaced. nil handle detaches.
func (n *Net) Attach(addr netip.AddrPort, handle func(from netip.AddrPort, b []byte)) *Port {
	n.mu.Lock()
	defer n.mu.Unlock()
	if handle == nil {
		delete(n.ports, addr)
		return nil
	}
	p := &Port{net: n, addr: addr, handle: handle}
	n.ports[addr] = p
	return p
}

// Addr is the port's address.
func (p *Port) Addr() netip.AddrPort { return p.addr }

// Send sends one datagram; b is copied.
func (p *Port) Send(to netip.AddrPort, b []byte) {
	n := p.net
	n.mu.Lock()
	defer n.mu.Unlock()
	now := n.clock()
	if n.Tap != nil {
		n.Tap(now, p.addr, to, b)
	}
	l := n.link(p.addr.Addr(), to.Addr())
	l.stats.Sent++
	if l.cut {
		l.stats.Partitioned++
		return
	}
	f, r := &l.faults, l.rng
	hit := func(p float64) bool { return p > 0 && r.Float64() < p }
	if hit(f.Loss) {
		l.stats.Lost++
		return
	}
	at := now
	if f.Bandwidth > 0 {
		l.free = max(l.free, now)
		if wait := l.free - now; f.Queue > 0 && wait.Seconds()*f.Bandwidth+float64(len(b)) > float64(f.Queue) {
			l.stats.Overflowed++
			return
		}
		l.free += time.Duration(float64(len(b)) / f.Bandwidth * float64(time.Second))
		at = l.free
	}
	copies := 1
	if hit(f.Duplicate) {
		copies = 2
		l.stats.Duplicated++
	}
	for range copies {
		t := at + f.Delay
		if f.Jitter > 0 {
			t += time.Duration(r.Int64N(int64(f.Jitter)))
		}
		if hit(f.Reorder) {
			l.stats.Reordered++
			if f.ReorderDelay > 0 {
				t += time.Duration(r.Int64N(int64(f.ReorderDelay)))
			}
		} else {
			t = max(t, l.last)
			l.last = t
		}
		d := n.datagram(b)
		d.from, d.to = p.addr, to
		if hit(f.Corrupt) && len(d.b) > 0 {
			l.stats.Corrupted++
			corrupt(r, d)
		}
		n.push(event{at: t, data: d})
	}
}

// corrupt flips bits, overwrites a run of bytes, or cuts the datagram short.
func corrupt(r *rand.Rand, d *datagram) {
	switch i := r.IntN(len(d.b)); r.IntN(4) {
	case 0, 1:
		d.b[i] ^= 1 << r.IntN(8)
	case 2:
		for j := i; j < min(len(d.b), i+1+r.IntN(16)); j++ {
			d.b[j] = byte(r.Uint32())
		}
	default:
		d.b = d.b[:i]
	}
}

func (n *Net) datagram(b []byte) *datagram {
	var d *datagram
	if k := len(n.pool); k > 0 {
		d, n.pool = n.pool[k-1], n.pool[:k-1]
	} else {
		d = &datagram{}
	}
	d.b = append(d.b[:0], b...)
	return d
}

// After calls fire d from now. Timers cannot be taken back: fire looks whether it still has something to do.
func (n *Net) After(d time.Duration, fire func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.push(event{at: n.clock() + max(0, d), fire: fire})
}

func (n *Net) push(e event) {
	n.seq++
	e.seq = n.seq
	h := append(n.heap, e)
	i := len(h) - 1
	for i > 0 {
		up := (i - 1) / 2
		if !h[i].before(&h[up]) {
			break
		}
		h[i], h[up] = h[up], h[i]
		i = up
	}
	n.heap = h
	if n.driven && i == 0 {
		select {
		case n.wake <- struct{}{}:
		default:
		}
	}
}

func (a *event) before(b *event) bool { return a.at < b.at || a.at == b.at && a.seq < b.seq }

func (n *Net) pop() event {
	h := n.heap
	e, k := h[0], len(h)-1
	h[0] = h[k]
	h[k] = event{}
	h = h[:k]
	for i := 0; ; {
		c := 2*i + 1
		if c >= k {
			break
		}
		if c+1 < k && h[c+1].before(&h[c]) {
			c++
		}
		if !h[c].before(&h[i]) {
			break
		}
		h[i], h[c] = h[c], h[i]
		i = c
	}
	n.heap = h
	return e
}

// Step moves time to the next event and lets it happen; false when nothing is due any more.
func (n *Net) Step() bool {
	n.mu.Lock()
	if len(n.heap) == 0 {
		n.mu.Unlock()
		return false
	}
	e := n.pop()
	n.now = max(n.now, e.at)
	n.deliver(e)
	return true
}

// deliver is called with n.mu held and gives it back.
func (n *Net) deliver(e event) {
	if e.fire != nil {
		n.mu.Unlock()
		e.fire()
		return
	}
	p := n.ports[e.data.to]
	if p != nil {
		n.link(e.data.from.Addr(), e.data.to.Addr()).stats.Delivered++
	}
	n.mu.Unlock()
	if p != nil {
		p.handle(e.data.from, e.data.b)
	}
	n.mu.Lock()
	n.pool = append(n.pool, e.data)
	n.mu.Unlock()
}

// Run steps until the virtual time is until, or nothing is due any more, or stop (which may be nil) says so; it reports
// whether stop did.
func (n *Net) Run(until time.Duration, stop func() bool) bool {
	for {
		if stop != nil && stop() {
			return true
		}
		n.mu.Lock()
		idle := len(n.heap) == 0 || n.heap[0].at > until
		if idle {
			n.now = max(n.now, until)
		}
		n.mu.Unlock()
		if idle {
			return false
		}
		n.Step()
	}
}

// Drive delivers by the clock of package time until ctx ends: inside a testing/synctest bubble that clock is virtual. From the call on Now
// is the time since the call.
func (n *Net) Drive(ctx context.Context) {
	n.mu.Lock()
	n.driven, n.start = true, time.Now().Add(-n.now)
	t := time.NewTimer(time.Hour)
	defer t.Stop()
	for {
		// n.mu is held here
		now, next := n.clock(), time.Hour
		if len(n.heap) > 0 {
			if next = n.heap[0].at - now; next <= 0 {
				n.deliver(n.pop())
				n.mu.Lock()
				continue
			}
		}
		n.mu.Unlock()
		t.Reset(next)
		select {
		case <-ctx.Done():
			return
		case <-n.wake:
		case <-t.C:
		}
		n.mu.Lock()
	}
}
