package rc

import (
	"bytes"
	"flag"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"
	"time"

	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/softroce/simnet"
	"srp-initiator/rdma/verbs"
)

var (
	simSeeds = flag.Int("sim.seeds", 2000, "number of seeds that the simulated sessions run with")
	simSeed  = flag.Uint64("sim.seed", 0, "run this seed alone")
)

// Sessions of two queue pairs over a bad network. Each side posts a random mix of all operations. Judged are:
//
//   - each posted request completes once, in order, successfully; each receive gets exactly the message that was sent in its turn
//   - memory that the peer writes equals, at each receive completion, what all earlier WRITEs in order make of it: nothing later, nothing twice
//   - READs bring the bytes that were there
//   - windows are bound and invalidated once
//   - with the faults off everything that was begun ends, and an idle connection sends nothing

const (
	maxLength = 12 << 10 // of a message: 48 packets at the smallest MTU
	writeArea = 2 * maxLength
)

type expectation struct {
	data   []byte
	wc     verbs.WCOpcode
	flags  verbs.WCFlags
	imm    uint32
	length uint32
	sum    uint32 // of the receiver's write area at that time
	se     bool
}

type posted struct {
	id       uint64
	signaled bool
	op       verbs.SendOpcode
	length   uint32
	read     []byte // sink of a READ
	want     []byte
}

type simSide struct {
	*endpoint
	name     string
	other    *simSide
	source   *testRegion // payloads are taken from here
	sink     *testRegion // receives
	readOnly *testRegion // the peer READs from here
	written  *testRegion // the peer WRITEs here
	readSink *testRegion
	shadow   []byte // what written is to be when the peer's posted WRITEs are all done
	expect   []expectation
	posted   []posted
	toPost   int
	nextID   uint64
	recvSize int
	recvIDs  []uint64
	recvID   uint64
	recvOff  int
	readOff  int
	srcOff   int
	mtu      int
	windows  int
	invs     int // windows of this side that the peer is going to invalidate, and its own
	slack    time.Duration
}

func runSession(seed uint64) (err error) {
	r := rand.New(rand.NewPCG(seed, 99))
	net := simnet.New(seed)
	f := simnet.Faults{Delay: time.Duration(1+r.IntN(50)) * time.Microsecond, Jitter: time.Duration(1+r.IntN(10)) * time.Microsecond, ReorderDelay: 200 * time.Microsecond}
	level := []float64{0, 0.005, 0.02, 0.05}[r.IntN(4)]
	cut := r.Float64()
	f.Loss, f.Corrupt = level*cut, level*(1-cut)
	f.Duplicate, f.Reorder = level*r.Float64(), level*r.Float64()
	net.SetDefault(f)
	mtu := verbs.MTU(1 + r.IntN(5))
	if r.IntN(3) > 0 {
		mtu = verbs.MTU256
	}
	defer func() {
		if p := recover(); p != nil {
			if s, ok := p.(string); ok {
				err = fmt.Errorf("%s", s)
				return
			}
			panic(p)
		}
	}()
	side := func(name string, self, peer int, qpn uint32) *simSide {
		s := &simSide{name: name, mtu: mtu.Bytes(), toPost: 10 + r.IntN(40), slack: time.Duration(r.IntN(100)) * time.Microsecond}
		mem := newTestMemory(uint32(r.Uint32()) &^ 0xff)
		mk := func(n int, a verbs.AccessFlags) *testRegion {
			b := make([]byte, n)
			for i := 0; i < n; i += 4 {
				v := r.Uint32()
				b[i], b[i+1], b[i+2], b[i+3] = byte(v), byte(v>>8), byte(v>>16), byte(v>>24)
			}
			return mem.register(b, a)
		}
		s.source = mk(64<<10, 0)
		s.readOnly = mk(32<<10, verbs.AccessRemoteRead)
		s.written = mk(writeArea, verbs.AccessLocalWrite|verbs.AccessRemoteWrite|verbs.AccessMWBind)
		s.shadow = bytes.Clone(s.written.buf)
		s.recvSize = maxLength
		cap := verbs.QPCap{MaxSendWR: 1 + r.IntN(24), MaxRecvWR: 1 + r.IntN(16), MaxSendSGE: 4, MaxRecvSGE: 3, MaxInlineData: 128}
		s.sink = mem.register(make([]byte, s.recvSize*cap.MaxRecvWR*2), verbs.AccessLocalWrite)
		s.readSink = mem.register(make([]byte, maxLength*(cap.MaxSendWR*2+1)), verbs.AccessLocalWrite)
		tune := Tuning{}
		switch r.IntN(4) {
		case 0:
			tune.Window = 1 + r.IntN(8)
		case 1:
			tune.Window, tune.ReadChunk = 4+r.IntN(60), 1+r.IntN(10)
		}
		if r.IntN(2) == 0 {
			tune.AckDelay, tune.AckEvery = time.Duration(r.IntN(300))*time.Microsecond, 1+r.IntN(40)
		}
		tune.AckUnasked, tune.AskRarely = time.Duration(1+r.IntN(300))*time.Microsecond, r.IntN(2) == 0
		if r.IntN(3) == 0 {
			tune.ReadBurst, tune.ReadInterval = 1+r.IntN(4), time.Duration(1+r.IntN(40))*time.Microsecond
		}
		// Not from r: the seeds below, all odd, would no longer be what failed.
		if seed%2 == 0 {
			tune.DivideWrites = int((seed/2 + 7*uint64(self)) % 60)
		}
		addr := addrA
		paddr := addrB
		if self == 1 {
			addr, paddr = addrB, addrA
		}
		s.endpoint = newEndpoint(net, r, addr, paddr, Config{QPN: qpn, Cap: cap, Tuning: tune, SignalAll: r.IntN(4) == 0}, mem)
		s.batchDelay = time.Duration(r.IntN(8)) * time.Microsecond
		if r.IntN(3) == 0 {
			s.refuse = 0.1
		}
		s.onComplete, s.handle = s.judge, s.reap
		return s
	}
	a, b := side("A", 0, 1, 0x11+uint32(r.IntN(1<<20))), side("B", 1, 0, 0x200000+uint32(r.IntN(1<<20)))
	a.other, b.other = b, a
	psn := func() packet.PSN {
		if r.IntN(2) == 0 {
			return packet.MakePSN(-uint32(r.IntN(150)))
		}
		return packet.MakePSN(r.Uint32())
	}
	attr := baseAttr()
	attr.MaxRdAtomic = uint8(1 + r.IntN(4))
	attr.Timeout = uint8(9 + r.IntN(3))
	if err := connect(a.endpoint, b.endpoint, mtu, psn(), psn(), attr); err != nil {
		return err
	}
	for _, s := range []*simSide{a, b} {
		for range s.qp.Cap().MaxRecvWR {
			s.postRecv()
		}
	}
	for _, s := range []*simSide{a, b} {
		// Unsignaled requests end without a completion that would make post look again.
		var again func()
		again = func() {
			s.dropUnsignaled()
			s.post()
			if seed%2 == 0 { // what is under way keeps its division
				tune := s.qp.Tuning()
				tune.DivideWrites = (tune.DivideWrites + 17) % 60
				s.qp.SetTuning(tune)
			}
			if s.toPost > 0 {
				net.After(100*time.Microsecond, again)
			}
		}
		again()
	}
	if level > 0 && r.IntN(4) == 0 {
		// A partition, one way or both, that ends before the retries do.
		at := time.Duration(r.IntN(1000)) * time.Microsecond
		for i, dir := range [][2]*simSide{{a, b}, {b, a}} {
			if r.IntN(2) == 0 {
				continue
			}
			from, to := dir[0].port.Addr().Addr(), dir[1].port.Addr().Addr()
			net.After(at+time.Duration(i), func() { net.Partition(from, to, true) })
			net.After(at+time.Duration(1+r.IntN(6))*time.Millisecond, func() { net.Partition(from, to, false) })
		}
	}
	idle := func() bool {
		a.dropUnsignaled()
		b.dropUnsignaled()
		return a.toPost == 0 && b.toPost == 0 && len(a.posted) == 0 && len(b.posted) == 0 && len(a.expect) == 0 && len(b.expect) == 0
	}
	// Safety under faults; after 30 virtual ms liveness without.
	net.Run(30*time.Millisecond, idle)
	f.Loss, f.Corrupt, f.Duplicate, f.Reorder = 0, 0, 0, 0
	net.SetDefault(f)
	a.refuse, b.refuse = 0, 0
	if !net.Run(net.Now()+5*time.Second, idle) {
		return fmt.Errorf("no progress without faults: A %d to post, %d posted, %d expected; B %d, %d, %d\nA %+v\nB %+v",
			a.toPost, len(a.posted), len(a.expect), b.toPost, len(b.posted), len(b.expect), a.qp.Stats(), b.qp.Stats())
	}
	for _, s := range []*simSide{a, b} {
		if !bytes.Equal(s.shadow, s.written.buf) {
			return fmt.Errorf("%s: memory is not what the peer's WRITEs make of it", s.name)
		}
		if len(s.events) > 0 || s.qp.State() != verbs.QPReadyToSend {
			return fmt.Errorf("%s: events %v, state %s", s.name, s.events, s.qp.State())
		}
		if s.mem.invals != s.invs {
			return fmt.Errorf("%s: %d invalidations executed, %d asked for", s.name, s.mem.invals, s.invs)
		}
		if s.mem.binds != s.windows {
			return fmt.Errorf("%s: %d binds executed, %d asked for", s.name, s.mem.binds, s.windows)
		}
	}
	// Let what is under way arrive; then nothing more is sent.
	net.Run(net.Now()+200*time.Millisecond, nil)
	before := a.qp.Stats().TxPackets + b.qp.Stats().TxPackets
	net.Run(net.Now()+time.Second, nil)
	if n := a.qp.Stats().TxPackets + b.qp.Stats().TxPackets - before; n != 0 {
		return fmt.Errorf("%d packets on an idle connection", n)
	}
	for _, s := range []*simSide{a, b} {
		if s.qp.snd.una != s.qp.snd.next || s.qp.snd.readWQEs != 0 || s.qp.snd.reads != 0 {
			return fmt.Errorf("%s: idle with una %x next %x, %d+%d reads", s.name, s.qp.snd.una, s.qp.snd.next, s.qp.snd.readWQEs, s.qp.snd.reads)
		}
	}
	return nil
}

func (s *simSide) postRecv() {
	off := s.recvOff
	if s.recvOff += s.recvSize; s.recvOff == len(s.sink.buf) {
		s.recvOff = 0
	}
	id := uint64(off)<<32 | s.recvID
	s.recvID++
	cut1 := s.rng.IntN(s.recvSize)
	cut2 := cut1 + s.rng.IntN(s.recvSize-cut1)
	sg := []verbs.SGE{s.sink.sge(off, cut1), s.sink.sge(off+cut1, cut2-cut1), s.sink.sge(off+cut2, s.recvSize-cut2)}
	if n, err := s.qp.PostRecv([]verbs.RecvWorkRequest{{WRID: id, SGList: sg}}); n != 1 || err != nil {
		s.fail("%s: PostRecv: %d, %v", s.name, n, err)
	}
	s.recvIDs = append(s.recvIDs, id)
}

func (s *simSide) length() int {
	switch s.rng.IntN(6) {
	case 0:
		return 0
	case 1:
		return s.rng.IntN(s.mtu + 1)
	case 2:
		return s.mtu * (1 + s.rng.IntN(5))
	}
	if s.rng.IntN(4) == 0 {
		return s.rng.IntN(maxLength + 1)
	}
	return s.rng.IntN(10 * s.mtu)
}

// post queues requests until the send ring is full or all are queued.
func (s *simSide) post() {
	for s.toPost > 0 {
		if len(s.posted) >= 2*s.qp.Cap().MaxSendWR-1 || s.qp.snd.tail-s.qp.snd.head == s.qp.snd.size {
			break // sinks are used in turn
		}
		r := s.rng
		n := min(s.length(), maxLength)
		if s.srcOff+n > len(s.source.buf) {
			s.srcOff = 0
		}
		src := s.source.buf[s.srcOff : s.srcOff+n]
		var sg []verbs.SGE
		for off, left := 0, n; ; {
			k := left
			if len(sg) < 3 && left > 0 {
				k = r.IntN(left + 1)
			}
			sg = append(sg, s.source.sge(s.srcOff+off, k))
			off, left = off+k, left-k
			if left == 0 {
				break
			}
		}
		s.srcOff += n
		p := posted{id: s.nextID, signaled: r.IntN(3) > 0 || s.qp.cfg.SignalAll, length: uint32(n)}
		wr := verbs.SendWorkRequest{WRID: p.id, SGList: sg}
		if p.signaled && !s.qp.cfg.SignalAll {
			wr.Flags |= verbs.SendSignaled
		}
		if r.IntN(8) == 0 {
			wr.Flags |= verbs.SendFence
		}
		if r.IntN(3) == 0 && n <= 128 {
			wr.Flags |= verbs.SendInline
		}
		se := r.IntN(4) == 0
		if se {
			wr.Flags |= verbs.SendSolicited
		}
		o := s.other
		x := expectation{data: src, wc: verbs.WCRecv, length: uint32(n), se: se}
		toWrite := -1
		expects := true
		switch k := r.IntN(20); {
		case k < 4:
			wr.Opcode = verbs.OpSend
		case k < 6:
			wr.Opcode, wr.ImmData = verbs.OpSendWithImm, r.Uint32()
			x.flags, x.imm = verbs.WCWithImm, wr.ImmData
		case k < 7:
			w := o.mem.window(o.written, 0, 16, verbs.AccessRemoteWrite)
			wr.Opcode, wr.ImmData = verbs.OpSendWithInv, w.key
			x.flags, x.imm = verbs.WCWithInv, w.key
		case k < 12:
			wr.Opcode = verbs.OpRDMAWrite
			toWrite, expects = r.IntN(writeArea-n), false
		case k < 14:
			wr.Opcode, wr.ImmData = verbs.OpRDMAWriteImm, r.Uint32()
			x.wc, x.flags, x.imm, x.data = verbs.WCRecvRDMAWr, verbs.WCWithImm, wr.ImmData, nil
			toWrite = r.IntN(writeArea - n)
		case k < 18:
			wr.Opcode, expects = verbs.OpRDMARead, false
			wr.Flags &^= verbs.SendInline
			if s.readOff+n > len(s.readSink.buf) {
				s.readOff = 0
			}
			off := r.IntN(len(o.readOnly.buf) - n)
			p.read, p.want = s.readSink.buf[s.readOff:s.readOff+n], o.readOnly.buf[off:off+n]
			clear(p.read)
			cut := r.IntN(n + 1)
			wr.SGList = []verbs.SGE{s.readSink.sge(s.readOff, cut), s.readSink.sge(s.readOff+cut, n-cut)}
			s.readOff += n
			wr.RemoteAddr, wr.RKey = o.readOnly.addr+uint64(off), o.readOnly.key
			if n == 0 {
				wr.RemoteAddr, wr.RKey = 0, 0
			}
		case k < 19:
			wr.Opcode, wr.SGList, expects, p.length = verbs.OpLocalInv, nil, false, 0
			w := s.mem.window(s.written, 0, 16, verbs.AccessRemoteWrite)
			wr.ImmData = w.key
		default:
			wr.Opcode, wr.SGList, expects, p.length = verbs.OpBindMW, nil, false, 0
			s.mem.next += 0x101
			wr.Bind = &verbs.BindMW{Window: s.written, Region: s.written, RKey: s.mem.next, Addr: s.written.addr, Length: 32, Access: verbs.AccessRemoteWrite}
		}
		if toWrite >= 0 {
			wr.RemoteAddr, wr.RKey = o.written.addr+uint64(toWrite), o.written.key
			if n == 0 {
				wr.RemoteAddr, wr.RKey = 0, 0
			}
		}
		p.op = wr.Opcode
		s.posted = append(s.posted, p) // a local operation may complete during the call
		taken, err := s.qp.PostSend(s.now(), []verbs.SendWorkRequest{wr})
		if taken == 0 {
			s.fail("%s: PostSend: %v", s.name, err)
		}
		// The request may have been executed by now only in virtual time zero: packets take longer.
		if toWrite >= 0 {
			copy(o.shadow[toWrite:], src)
		}
		switch wr.Opcode {
		case verbs.OpSendWithInv:
			o.invs++
		case verbs.OpLocalInv:
			s.invs++
		case verbs.OpBindMW:
			s.windows++
		}
		if expects {
			x.sum = crc32.ChecksumIEEE(o.shadow)
			o.expect = append(o.expect, x)
		}
		s.nextID++
		s.toPost--
	}
	s.after()
}

// judge looks at a completion at the moment it happens.
func (s *simSide) judge(c completion) {
	if c.wc.Status != verbs.WCSuccess || c.wc.QPN != s.qp.QPN() {
		s.fail("%s: completion %+v\n%+v", s.name, c, s.qp.Stats())
	}
	if !c.recv {
		for len(s.posted) > 0 && !s.posted[0].signaled {
			s.posted = s.posted[1:]
		}
		// Completed but unsignaled requests are known to be done by this one.
		if len(s.posted) == 0 || s.posted[0].id != c.wc.WRID {
			s.fail("%s: request %d completed out of order (%+v)", s.name, c.wc.WRID, s.posted)
		}
		p := s.posted[0]
		s.posted = s.posted[1:]
		if !bytes.Equal(p.read, p.want) {
			s.fail("%s: READ %d of %d bytes brought other bytes", s.name, p.id, p.length)
		}
		if p.op == verbs.OpRDMARead && c.wc.ByteLen != p.length {
			s.fail("%s: READ completion says %d bytes of %d", s.name, c.wc.ByteLen, p.length)
		}
		return
	}
	if len(s.expect) == 0 {
		s.fail("%s: message that nobody sent: %+v", s.name, c)
	}
	x := s.expect[0]
	s.expect = s.expect[1:]
	if len(s.recvIDs) == 0 || s.recvIDs[0] != c.wc.WRID {
		s.fail("%s: receive %x out of order", s.name, c.wc.WRID)
	}
	s.recvIDs = s.recvIDs[1:]
	off := int(c.wc.WRID >> 32)
	if c.wc.Opcode != x.wc || c.wc.Flags != x.flags || c.wc.ImmData != x.imm || c.wc.ByteLen != x.length || c.solicited != x.se {
		s.fail("%s: receive %+v, want %+v", s.name, c, x)
	}
	if !bytes.Equal(s.sink.buf[off:off+len(x.data)], x.data) {
		s.fail("%s: a message of %d bytes arrived changed", s.name, x.length)
	}
	if crc32.ChecksumIEEE(s.written.buf) != x.sum {
		s.fail("%s: at a receive, memory is not what the WRITEs in front of it make of it", s.name)
	}
}

// reap reposts receives, some of them late, and posts more.
func (s *simSide) reap() {
	recvs, sends := 0, false
	for _, c := range s.done {
		if c.recv {
			recvs++
		} else {
			sends = true
		}
	}
	s.done = s.done[:0]
	for range recvs {
		if s.rng.IntN(6) == 0 {
			s.net.After(s.slack, func() { s.postRecv(); s.after() })
		} else {
			s.postRecv()
		}
	}
	if sends || s.toPost > 0 {
		s.net.After(0, s.post)
	}
	s.dropUnsignaled()
}

func (s *simSide) dropUnsignaled() {
	for len(s.posted) > 0 && !s.posted[0].signaled && uint32(len(s.posted)) > s.qp.snd.tail-s.qp.snd.head {
		p := s.posted[0]
		if !bytes.Equal(p.read, p.want) {
			s.fail("%s: unsignaled READ %d brought other bytes", s.name, p.id)
		}
		s.posted = s.posted[1:]
	}
}

func TestSessions(t *testing.T) {
	if *simSeed != 0 {
		if err := runSession(*simSeed); err != nil {
			t.Fatal(err)
		}
		return
	}
	n := *simSeeds
	if testing.Short() {
		n /= 10
	}
	failed := 0
	// Seeds that once failed: an acknowledgement's timer outlived it.
	for _, seed := range []uint64{2881, 4715, 4951, 11295} {
		if err := runSession(seed); err != nil {
			t.Errorf("seed %d (-sim.seed=%d): %v", seed, seed, err)
		}
	}
	for seed := uint64(1); seed <= uint64(n) && failed < 5; seed++ {
		if err := runSession(seed); err != nil {
			failed++
			t.Errorf("seed %d (-sim.seed=%d): %v", seed, seed, err)
		}
	}
}
