package rc

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/softroce/simnet"
	"srp-initiator/rdma/verbs"
)

// testMemory is a key table over Go slices at made-up addresses.
type testMemory struct {
	regions map[uint32]*testRegion
	next    uint32
	addr    uint64
	binds   int
	invals  int
}

type testRegion struct {
	key    uint32
	addr   uint64
	buf    []byte
	access verbs.AccessFlags
	window bool
}

func newTestMemory(first uint32) *testMemory {
	return &testMemory{regions: map[uint32]*testRegion{}, next: first, addr: 0x1000_0000}
}

func (m *testMemory) register(buf []byte, access verbs.AccessFlags) *testRegion {
	m.next += 0x101
	r := &testRegion{key: m.next, addr: m.addr, buf: buf, access: access}
	m.addr += uint64(len(buf)) + 4096
	m.regions[r.key] = r
	return r
}

// window opens part of r under a key of its own.
func (m *testMemory) window(r *testRegion, off, n int, access verbs.AccessFlags) *testRegion {
	m.next += 0x101
	w := &testRegion{key: m.next, addr: r.addr + uint64(off), buf: r.buf[off : off+n], access: access, window: true}
	m.regions[w.key] = w
	return w
}

func (m *testMemory) find(key uint32, addr uint64, n uint32, access verbs.AccessFlags) ([]byte, bool) {
	r := m.regions[key]
	if r == nil || r.access&access != access || addr < r.addr || addr-r.addr > uint64(len(r.buf)) || uint64(n) > uint64(len(r.buf))-(addr-r.addr) {
		return nil, false
	}
	off := addr - r.addr
	return r.buf[off : off+uint64(n)], true
}

func (m *testMemory) Local(key uint32, addr uint64, n uint32, write bool) ([]byte, bool) {
	if n == 0 {
		panic("Local asked for nothing")
	}
	var a verbs.AccessFlags
	if write {
		a = verbs.AccessLocalWrite
	}
	return m.find(key, addr, n, a)
}

func (m *testMemory) Inline(addr uint64, n uint32) ([]byte, bool) {
	for _, r := range m.regions {
		if b, ok := m.find(r.key, addr, n, 0); ok {
			return b, true
		}
	}
	return nil, false
}

func (m *testMemory) Remote(key uint32, addr uint64, n uint32, access verbs.AccessFlags) ([]byte, bool) {
	if n == 0 {
		panic("Remote asked for nothing")
	}
	return m.find(key, addr, n, access)
}

func (m *testMemory) Invalidate(key uint32, byPeer bool) bool {
	r := m.regions[key]
	if r == nil || !r.window {
		return false
	}
	delete(m.regions, key)
	m.invals++
	return true
}

func (m *testMemory) Bind(b *verbs.BindMW) bool {
	r := m.regions[b.Region.RKey()]
	if r == nil || m.regions[b.RKey] != nil {
		return false
	}
	m.binds++
	m.regions[b.RKey] = &testRegion{key: b.RKey, addr: b.Addr, buf: r.buf[b.Addr-r.addr:][:b.Length], access: b.Access, window: true}
	return true
}

// testRegion is a verbs.MemoryRegion and, for binds, a verbs.MemoryWindow.
func (r *testRegion) Addr() uint64      { return r.addr }
func (r *testRegion) Len() int          { return len(r.buf) }
func (r *testRegion) LKey() uint32      { return r.key }
func (r *testRegion) RKey() uint32      { return r.key }
func (r *testRegion) Deregister() error { return nil }
func (r *testRegion) Dealloc() error    { return nil }

func (r *testRegion) sge(off, n int) verbs.SGE {
	return verbs.SGE{Addr: r.addr + uint64(off), Length: uint32(n), LKey: r.key}
}

type completion struct {
	wc        verbs.WorkCompletion
	recv      bool
	solicited bool
}

// endpoint is one queue pair on a simnet node, driven as a device drives it.
type endpoint struct {
	net        *simnet.Net
	rng        *rand.Rand
	mem        *testMemory
	qp         *QP
	port       *simnet.Port
	peer       netip.AddrPort
	out, in    packet.Flow
	refuse     float64 // probability that the Output has no room
	batchDelay time.Duration
	batched    bool
	pumped     bool
	timer      Time
	still      Time // until then neither packets nor timers are seen
	buf        [packet.Max]byte
	pkt        packet.Packet
	done       []completion
	events     []verbs.AsyncEventType
	badICRC    int
	onComplete func(c completion) // during the QP's call: looks, does not touch
	handle     func()             // after the QP's call: may post
	fail       func(format string, args ...any)
}

func newEndpoint(n *simnet.Net, rng *rand.Rand, self, peer netip.AddrPort, cfg Config, mem *testMemory) *endpoint {
	e := &endpoint{net: n, rng: rng, mem: mem, peer: peer, timer: Never, out: packet.NewFlow(self, peer), in: packet.NewFlow(peer, self)}
	e.qp = New(cfg, mem, e)
	e.port = n.Attach(self, e.arrive)
	e.fail = func(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
	return e
}

func (e *endpoint) now() Time { return Time(e.net.Now()) }

func (e *endpoint) Packet(hdr []byte, payload [][]byte, pad uint8, ahead uint64) bool {
	if e.refuse > 0 && e.rng.Float64() < e.refuse {
		return false
	}
	b := append(e.buf[:0], hdr...)
	n := 0
	for _, p := range payload {
		b = append(b, p...)
		n += len(p)
	}
	if packet.Pad(n) != pad {
		e.fail("%d bytes of padding behind %d of payload", pad, n)
	}
	b = b[:len(b)+int(pad)+packet.ICRCLen]
	clear(b[len(b)-int(pad)-packet.ICRCLen:])
	e.out.Seal(b, 0)
	e.port.Send(e.peer, b)
	return true
}

func (e *endpoint) Complete(wc *verbs.WorkCompletion, recv, solicited bool) {
	c := completion{*wc, recv, solicited}
	if e.onComplete != nil {
		e.onComplete(c)
	}
	e.done = append(e.done, c)
}

func (e *endpoint) Event(t verbs.AsyncEventType) { e.events = append(e.events, t) }

func (e *endpoint) arrive(from netip.AddrPort, b []byte) {
	if e.now() < e.still {
		late := bytes.Clone(b)
		e.net.After(time.Duration(e.still-e.now()), func() { e.arrive(from, late) })
		return
	}
	if len(b) < packet.BTHLen+packet.ICRCLen || len(b)&3 != 0 {
		e.badICRC++
		return
	}
	if id, ok := e.in.Verify(b, 0); !ok || id != 0 {
		e.badICRC++
		return
	}
	if err := e.pkt.Parse(b); err != nil {
		e.fail("a packet with a good ICRC does not parse: %v", err)
	}
	e.qp.Receive(e.now(), &e.pkt)
	if !e.batched {
		e.batched = true
		e.net.After(time.Duration(e.rng.Int64N(int64(e.batchDelay)+1)), func() {
			e.batched = false
			e.qp.EndBatch(e.now(), false)
			e.after()
		})
	}
	e.after()
}

// after is what a device does behind every call into the QP.
func (e *endpoint) after() {
	q := e.qp
	q.Ride(e.now())
	if err := q.check(); err != nil {
		e.fail("%v", err)
	}
	if q.Blocked() && !e.pumped {
		e.pumped = true
		e.net.After(5*time.Microsecond, func() {
			e.pumped = false
			e.qp.Pump(e.now())
			e.after()
		})
	}
	if e.handle != nil && len(e.done) > 0 {
		e.handle()
	}
	if d := q.Deadline(); d < e.timer {
		e.timer = d
		var run func()
		run = func() {
			if e.now() < e.still { // then behind the packets, as a device does
				e.net.After(time.Duration(e.still-e.now())+1, run)
				return
			}
			e.timer = Never
			if q.Deadline() <= e.now() {
				q.Tick(e.now())
				if q.Deadline() <= e.now() {
					e.fail("Tick at %d leaves the deadline at %d", e.now(), q.Deadline())
				}
			}
			e.after()
		}
		e.net.After(time.Duration(d-e.now()), run)
	}
}

// check holds the invariants of the state that a QP may be in between calls.
func (q *QP) check() error {
	s, r := &q.snd, &q.rcv
	switch {
	case s.nxt.Before(s.una) || s.max.Before(s.nxt) || s.next.Before(s.max):
		return fmt.Errorf("PSNs out of order: una %x nxt %x max %x next %x", s.una, s.nxt, s.max, s.next)
	case s.max.Sub(s.una) > s.window:
		return fmt.Errorf("%d packets in flight, window %d", s.max.Sub(s.una), s.window)
	case s.reads < 0 || s.reads > s.maxReads:
		return fmt.Errorf("%d READs outstanding, limit %d", s.reads, s.maxReads)
	case s.tail-s.head > s.size || s.cur-s.head > s.tail-s.head:
		return fmt.Errorf("send ring: head %d cur %d tail %d", s.head, s.cur, s.tail)
	case q.state == verbs.QPReadyToSend && s.timeout > 0 && s.una != s.max && s.rtxAt == Never && s.rnrAt == Never:
		return fmt.Errorf("packets in flight and no timer")
	case s.earlyAt != Never && (s.rtxAt == Never || s.earlyAt > s.rtxAt):
		return fmt.Errorf("early timer at %d, ACK timeout at %d", s.earlyAt, s.rtxAt)
	case s.una == s.max && s.rtxAt != Never:
		return fmt.Errorf("nothing in flight and a timer")
	case q.state == verbs.QPError && (s.head != s.tail || r.head != r.tail || q.Deadline() != Never):
		return fmt.Errorf("error state with work or timers left")
	}
	n := 0
	for i := range r.readCount {
		m := r.readAt(i)
		if m.pending {
			n++
		}
		if m.pending != (m.pos < m.end) {
			return fmt.Errorf("READ resource pending %v at %d of %d", m.pending, m.pos, m.end)
		}
	}
	if n != r.readsPending {
		return fmt.Errorf("%d pending READs, counted %d", n, r.readsPending)
	}
	return nil
}

// connect brings both queue pairs to RTS.
func connect(a, b *endpoint, mtu verbs.MTU, psnA, psnB packet.PSN, base verbs.QPAttr) error {
	up := func(e, peer *endpoint, send, recv packet.PSN) error {
		at := base
		at.PathMTU, at.DestQPN, at.RQPSN, at.SQPSN = mtu, peer.qp.QPN(), uint32(recv), uint32(send)
		for _, st := range []struct {
			s verbs.QPState
			m verbs.QPAttrMask
		}{{verbs.QPInitState, verbs.QPMaskToInit}, {verbs.QPReadyToReceive, verbs.QPMaskToRTR}, {verbs.QPReadyToSend, verbs.QPMaskToRTS}} {
			at.State = st.s
			if err := e.qp.Modify(e.now(), &at, st.m); err != nil {
				return err
			}
		}
		return nil
	}
	if err := up(a, b, psnA, psnB); err != nil {
		return err
	}
	return up(b, a, psnB, psnA)
}

var (
	addrA = netip.MustParseAddrPort("192.0.2.1:4791")
	addrB = netip.MustParseAddrPort("192.0.2.2:4791")
)

const allAccess = verbs.AccessLocalWrite | verbs.AccessRemoteWrite | verbs.AccessRemoteRead

func baseAttr() verbs.QPAttr {
	return verbs.QPAttr{Access: allAccess, MaxRdAtomic: 4, MaxDestRdAtomic: 4, MinRNRTimer: 1, Timeout: 10, RetryCount: 7, RNRRetry: 7}
}
