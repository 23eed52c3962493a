package rc

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"

	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/softroce/simnet"
	"srp-initiator/rdma/verbs"
)

// wireQueue is an Output that holds packets for the peer, without a network in between.
type wireQueue struct {
	slab  []byte
	pkts  [][2]int
	pkt   packet.Packet
	sends int
	recvs int
	fail  int
}

func (w *wireQueue) Packet(hdr []byte, payload [][]byte, pad uint8, ahead uint64) bool {
	at := len(w.slab)
	w.slab = append(w.slab, hdr...)
	for _, p := range payload {
		w.slab = append(w.slab, p...)
	}
	w.slab = append(w.slab, 0, 0, 0, 0, 0, 0, 0)[:len(w.slab)+int(pad)+packet.ICRCLen]
	w.pkts = append(w.pkts, [2]int{at, len(w.slab)})
	return true
}

func (w *wireQueue) Complete(wc *verbs.WorkCompletion, recv, _ bool) {
	if wc.Status != verbs.WCSuccess {
		w.fail++
	}
	if recv {
		w.recvs++
	} else {
		w.sends++
	}
}

func (w *wireQueue) Event(verbs.AsyncEventType) { w.fail++ }

func (w *wireQueue) deliver(now Time, to *QP) int {
	n := len(w.pkts)
	for _, p := range w.pkts {
		if w.pkt.Parse(w.slab[p[0]:p[1]]) == nil {
			to.Receive(now, &w.pkt)
		}
	}
	w.pkts, w.slab = w.pkts[:0], w.slab[:0]
	to.EndBatch(now, false)
	return n
}

// couple is two queue pairs back to back.
type couple struct {
	a, b       *QP
	ao, bo     wireQueue
	ma, mb     *testMemory
	bufA, bufB *testRegion
	now        Time
}

func newCouple(tb testing.TB, tune Tuning) *couple {
	c := &couple{ma: newTestMemory(1), mb: newTestMemory(2)}
	c.bufA, c.bufB = c.ma.register(make([]byte, 2<<20), allAccess), c.mb.register(make([]byte, 2<<20), allAccess)
	cp := verbs.QPCap{MaxSendWR: 256, MaxRecvWR: 256, MaxSendSGE: 2, MaxRecvSGE: 2}
	c.a = New(Config{QPN: 1, Cap: cp, Tuning: tune}, c.ma, &c.ao)
	c.b = New(Config{QPN: 2, Cap: cp, Tuning: tune}, c.mb, &c.bo)
	for _, q := range []*QP{c.a, c.b} {
		at := baseAttr()
		at.PathMTU, at.DestQPN = verbs.MTU4096, 3-q.QPN()
		for _, st := range []struct {
			s verbs.QPState
			m verbs.QPAttrMask
		}{{verbs.QPInitState, verbs.QPMaskToInit}, {verbs.QPReadyToReceive, verbs.QPMaskToRTR}, {verbs.QPReadyToSend, verbs.QPMaskToRTS}} {
			at.State = st.s
			if err := q.Modify(0, &at, st.m); err != nil {
				tb.Fatal(err)
			}
		}
	}
	return c
}

func (c *couple) settle() {
	for c.ao.deliver(c.now, c.b)+c.bo.deliver(c.now, c.a) > 0 {
	}
}

func mustPost(tb testing.TB, q *QP, now Time, wrs []verbs.SendWorkRequest) {
	if n, err := q.PostSend(now, wrs); n != len(wrs) {
		tb.Fatal(n, err)
	}
	q.Ride(now)
}

// srpRead is the traffic of one SRP READ of 4 KiB: a request, the data, a response.
func (c *couple) srpRead(tb testing.TB) func() {
	req := []verbs.SendWorkRequest{{Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: []verbs.SGE{c.bufA.sge(0, 68)}}}
	rsp := []verbs.SendWorkRequest{
		{Opcode: verbs.OpRDMAWrite, SGList: []verbs.SGE{c.bufB.sge(4096, 4096)}, RemoteAddr: c.bufA.addr + 8192, RKey: c.bufA.key},
		{Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: []verbs.SGE{c.bufB.sge(0, 36)}},
	}
	ra := []verbs.RecvWorkRequest{{SGList: []verbs.SGE{c.bufA.sge(1<<20, 256)}}}
	rb := []verbs.RecvWorkRequest{{SGList: []verbs.SGE{c.bufB.sge(1<<20, 256)}}}
	return func() {
		c.now += 1000
		if n, err := c.a.PostRecv(ra); n != 1 {
			tb.Fatal(err)
		}
		if n, err := c.b.PostRecv(rb); n != 1 {
			tb.Fatal(err)
		}
		mustPost(tb, c.a, c.now, req)
		c.ao.deliver(c.now, c.b)
		mustPost(tb, c.b, c.now, rsp)
		c.settle()
	}
}

func (c *couple) rdmaRead(tb testing.TB, n int) func() {
	wr := []verbs.SendWorkRequest{{Opcode: verbs.OpRDMARead, Flags: verbs.SendSignaled, SGList: []verbs.SGE{c.bufA.sge(0, n)}, RemoteAddr: c.bufB.addr, RKey: c.bufB.key}}
	return func() {
		c.now += 1000
		mustPost(tb, c.a, c.now, wr)
		c.settle()
	}
}

func (c *couple) rdmaWrite(tb testing.TB, n int) func() {
	wr := []verbs.SendWorkRequest{{Opcode: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGList: []verbs.SGE{c.bufA.sge(0, n)}, RemoteAddr: c.bufB.addr, RKey: c.bufB.key}}
	return func() {
		c.now += 1000
		mustPost(tb, c.a, c.now, wr)
		c.settle()
	}
}

// What each end makes of divided WRITEs: the peer as many messages as packets, the requester one completion; a lost packet comes again, and no other byte is written than those
// named. Each packet's range is checked by itself, as that of several work requests is: of a WRITE that goes beyond its region the packets inside have been written.
func TestDividedWritesArrive(t *testing.T) {
	const n = 2*4096 + 3
	for lost, want := range map[int]struct{ again, twice uint64 }{-1: {}, 0: {again: 3}, 1: {again: 2}, 2: {again: 3, twice: 2}} { // the last one's loss is the timer's to find
		c := newCouple(t, Tuning{DivideWrites: 3})
		for i := range c.bufA.buf {
			c.bufA.buf[i] = byte(i*7 + i>>8)
		}
		write := func(to uint64) {
			t.Helper()
			mustPost(t, c.a, c.now, []verbs.SendWorkRequest{{Opcode: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGList: []verbs.SGE{c.bufA.sge(5, n)}, RemoteAddr: to, RKey: c.bufB.key}})
		}
		write(c.bufB.addr + 11)
		if len(c.ao.pkts) != 3 {
			t.Fatalf("%d packets", len(c.ao.pkts))
		}
		if lost >= 0 {
			c.ao.pkts = append(c.ao.pkts[:lost], c.ao.pkts[lost+1:]...)
		}
		c.settle()
		if lost == 2 {
			c.now = c.a.Deadline()
			c.a.Tick(c.now)
			c.settle()
		}
		if c.ao.sends != 1 || c.b.Stats().Messages != 3 || c.a.Stats().Retransmits != want.again || c.b.Stats().Duplicates != want.twice {
			t.Errorf("packet %d lost: %d completions; %+v; %+v", lost, c.ao.sends, c.a.Stats(), c.b.Stats())
		}
		mem := make([]byte, len(c.bufB.buf))
		copy(mem[11:], c.bufA.buf[5:5+n])
		if !bytes.Equal(c.bufB.buf, mem) {
			t.Errorf("packet %d lost: other bytes", lost)
		}
		// The last of the three is not inside.
		to := len(c.bufB.buf) - n + 1
		write(c.bufB.addr + uint64(to))
		c.settle()
		copy(mem[to:], c.bufA.buf[5:5+2*4096])
		if c.ao.sends != 2 || c.ao.fail != 2 || c.a.State() != verbs.QPError || c.b.Stats().Messages != 5 || !bytes.Equal(c.bufB.buf, mem) {
			t.Errorf("beyond the region: %d completions, %d failures, %s, %d messages, bytes as named: %v", c.ao.sends, c.ao.fail, c.a.State(), c.b.Stats().Messages, bytes.Equal(c.bufB.buf, mem))
		}
	}
}

func TestNoAllocation(t *testing.T) {
	for name, tune := range map[string]Tuning{"plain": {}, "divided WRITEs": {DivideWrites: 16}, "delayed ACKs": {AckDelay: time.Millisecond}, "few ACKs": {AckDelay: time.Millisecond, AckUnasked: time.Millisecond, AskRarely: true}} {
		c := newCouple(t, tune)
		for op, f := range map[string]func(){"SRP READ": c.srpRead(t), "READ 64 KiB": c.rdmaRead(t, 64<<10), "WRITE 64 KiB": c.rdmaWrite(t, 64<<10)} {
			f()
			if n := testing.AllocsPerRun(200, f); n != 0 {
				t.Errorf("%s, %s: %v allocations", name, op, n)
			}
		}
		if c.ao.fail+c.bo.fail > 0 || c.ao.sends == 0 || c.ao.recvs == 0 {
			t.Errorf("%s: %+v", name, c.ao)
		}
	}
}

func BenchmarkTransport(b *testing.B) {
	for _, bm := range []struct {
		name string
		f    func(c *couple, tb testing.TB) func()
		n    int64
	}{
		{"SRPRead4K", (*couple).srpRead, 4096},
		{"Read4K", func(c *couple, tb testing.TB) func() { return c.rdmaRead(tb, 4096) }, 4096},
		{"Read1M", func(c *couple, tb testing.TB) func() { return c.rdmaRead(tb, 1<<20) }, 1 << 20},
		{"Write1M", func(c *couple, tb testing.TB) func() { return c.rdmaWrite(tb, 1<<20) }, 1 << 20},
		{"Write0", func(c *couple, tb testing.TB) func() { return c.rdmaWrite(tb, 0) }, 0},
	} {
		b.Run(bm.name, func(b *testing.B) {
			c := newCouple(b, Tuning{})
			f := bm.f(c, b)
			b.SetBytes(bm.n)
			b.ReportAllocs()
			for range b.N {
				f()
			}
			if c.ao.fail+c.bo.fail > 0 {
				b.Fatal("failed completions")
			}
		})
	}
}

// On a link that loses nothing, nothing is sent twice: neither side's timers, windows or refusals by the Output cause a retransmission. The link
// holds exactly one window of the largest packets; more in flight would overflow it.
func TestQuietLink(t *testing.T) {
	seeds := uint64(40)
	if testing.Short() {
		seeds = 6
	}
	for seed := range seeds {
		quietLink(t, seed, false)
	}
}

// Nor is anything sent twice because the machine stood still for longer than the ACK timeout, both ends at once, with requests under way.
func TestStandstill(t *testing.T) {
	seeds := uint64(40)
	if testing.Short() {
		seeds = 6
	}
	for seed := range seeds {
		quietLink(t, seed, true)
	}
}

func quietLink(t *testing.T, seed uint64, standstills bool) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 5))
	net := simnet.New(seed)
	window := 2 + r.IntN(MaxWindow-1)
	const wireMax = 1024 + packet.HeaderMax + packet.TrailerMax
	net.SetDefault(simnet.Faults{Delay: 20 * time.Microsecond, Jitter: 5 * time.Microsecond, Bandwidth: 1e9, Queue: 2 * window * wireMax})
	var ends [2]*endpoint
	for i := range ends {
		self, peer := addrA, addrB
		if i == 1 {
			self, peer = peer, self
		}
		tune := Tuning{Window: window}
		if r.IntN(2) == 0 {
			tune.AckDelay = 50 * time.Microsecond
		}
		tune.AckUnasked, tune.AskRarely = 200*time.Microsecond, r.IntN(2) == 0
		e := newEndpoint(net, r, self, peer, Config{QPN: uint32(i + 1), Cap: verbs.QPCap{MaxSendWR: 64, MaxRecvWR: 200, MaxSendSGE: 1, MaxRecvSGE: 1}, Tuning: tune}, newTestMemory(7))
		e.batchDelay = 3 * time.Microsecond
		e.refuse = 0.02
		ends[i] = e
	}
	at := baseAttr()
	at.Timeout = 14 // 67 ms
	if err := connect(ends[0], ends[1], verbs.MTU1024, 0xffff80, 7, at); err != nil {
		t.Fatal(err)
	}
	if standstills {
		timeout := AckTimeout(at.Timeout)
		var stand func()
		stand = func() {
			until := ends[0].now().Add(timeout*11/10 + time.Duration(r.Int64N(int64(3*timeout))))
			ends[0].still, ends[1].still = until, until
			net.After(time.Duration(until-ends[0].now())+time.Duration(r.Int64N(int64(4*time.Millisecond))), stand)
		}
		net.After(time.Millisecond, stand)
	}
	left := 0
	for i, e := range ends {
		data := e.mem.register(bytes.Repeat([]byte{byte(i)}, 1<<20), allAccess)
		peer := ends[1-i]
		target := peer.mem.register(make([]byte, 1<<20), allAccess)
		for range 100 {
			e.qp.PostRecv([]verbs.RecvWorkRequest{{SGList: []verbs.SGE{data.sge(0, 0)}}})
		}
		ops := 60
		left += ops
		post := func() {
			for ops > 0 {
				n := r.IntN(200 << 10)
				wr := verbs.SendWorkRequest{Opcode: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGList: []verbs.SGE{data.sge(0, n)}, RemoteAddr: target.addr, RKey: target.key}
				switch r.IntN(3) {
				case 0:
					wr.Opcode = verbs.OpRDMARead
				case 1:
					wr.Opcode, wr.SGList = verbs.OpSend, nil
				}
				if k, _ := e.qp.PostSend(e.now(), []verbs.SendWorkRequest{wr}); k == 0 {
					break
				}
				ops--
			}
		}
		e.handle = func() {
			for _, c := range e.done {
				if c.wc.Status != verbs.WCSuccess {
					t.Fatalf("%+v", c)
				}
				if !c.recv {
					left--
				}
			}
			e.done = e.done[:0]
			net.After(0, func() { post(); e.after() })
		}
		net.After(0, func() { post(); e.after() })
	}
	if !net.Run(30*time.Second, func() bool { return left == 0 }) {
		t.Fatalf("seed %d: %d requests not done: %+v %+v", seed, left, ends[0].qp.Stats(), ends[1].qp.Stats())
	}
	net.Run(net.Now()+time.Second, nil)
	for i, e := range ends {
		st := e.qp.Stats()
		if st.Retransmits+st.Timeouts+st.ImpliedNaks+st.TxNakSequence+st.Duplicates+st.OutOfOrder+st.Dropped != 0 {
			t.Errorf("seed %d, side %d: %+v", seed, i, st)
		}
		if ns := net.Stats(e.port.Addr().Addr(), e.peer.Addr()); ns.Overflowed != 0 {
			t.Errorf("seed %d, side %d: %d packets did not fit a link that holds a window", seed, i, ns.Overflowed)
		}
	}
}
