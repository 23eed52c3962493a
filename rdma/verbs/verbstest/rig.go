package verbstest

import (
	"bytes"
	"fmt"
	"runtime"
	"time"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
)

// patience is how long a case waits for what must come. It is long: emulated machines are slow. (A variable for the test of
// this package, whose faulty provider makes it wait in vain.)
var patience = 20 * time.Second

// quiet is how long a case waits for what must not come.
const quiet = 60 * time.Millisecond

// setup says how a rig is built; the zero value of a field means what its comment says.
type setup struct {
	cap         verbs.QPCap // 16 requests, 2 SGEs, no inline data
	cqCapacity  int         // room for both work queues; of a separate receive queue, exactly this
	memory      int         // bytes per side: 256 KiB
	access      verbs.AccessFlags
	noAccess    bool // access 0 is meant
	qpAccess    verbs.AccessFlags
	noQPAccess  bool
	signalAll   bool
	separateCQs bool
	channel     bool
	psnA, psnB  uint32 // first PSN that A (B) sends: 0x1000, 0x2000
	rdAtomic    uint8  // 4
	rnrRetry    uint8  // 7: for ever
	rnrRetrySet bool
	retry       uint8 // 7
	timeout     uint8 // 17: 0.5 s
	unconnected bool  // leave both queue pairs in INIT
}

const allAccess = verbs.AccessLocalWrite | verbs.AccessRemoteWrite | verbs.AccessRemoteRead

// end is one side of a rig.
type end struct {
	t        TB
	side     Side
	pd       verbs.ProtectionDomain
	ch       verbs.CompletionChannel
	sendCQ   verbs.CompletionQueue
	recvCQ   verbs.CompletionQueue // may be sendCQ
	qp       verbs.QueuePair
	mr       verbs.MemoryRegion
	mem      []byte
	psn      uint32 // first PSN that the end sends
	setup    setup
	pathMTU  verbs.MTU
	nextWRID uint64
}

// rig is two connected ends.
type rig struct {
	t    TB
	a, b *end
}

func newRig(t TB, p Pair, s setup) *rig {
	t.Helper()
	if s.cap.MaxSendWR == 0 {
		s.cap.MaxSendWR = 16
	}
	if s.cap.MaxRecvWR == 0 {
		s.cap.MaxRecvWR = 16
	}
	if s.cap.MaxSendSGE == 0 {
		s.cap.MaxSendSGE = 2
	}
	if s.cap.MaxRecvSGE == 0 {
		s.cap.MaxRecvSGE = 2
	}
	if s.memory == 0 {
		s.memory = 256 << 10
	}
	if s.access == 0 && !s.noAccess {
		s.access = allAccess
	}
	if s.qpAccess == 0 && !s.noQPAccess {
		s.qpAccess = verbs.AccessRemoteWrite | verbs.AccessRemoteRead
	}
	if s.psnA == 0 {
		s.psnA = 0x1000
	}
	if s.psnB == 0 {
		s.psnB = 0x2000
	}
	if s.rdAtomic == 0 {
		s.rdAtomic = 4
	}
	if !s.rnrRetrySet {
		s.rnrRetry = 7
	}
	if s.retry == 0 {
		s.retry = 7
	}
	if s.timeout == 0 {
		s.timeout = 17
	}
	r := &rig{t: t, a: newEnd(t, p.A, s), b: newEnd(t, p.B, s)}
	r.a.psn, r.b.psn = s.psnA, s.psnB
	r.a.toInit()
	r.b.toInit()
	if !s.unconnected {
		r.connect()
	}
	return r
}

func newEnd(t TB, side Side, s setup) *end {
	t.Helper()
	e := &end{t: t, side: side, setup: s}
	var err error
	if e.pd, err = side.Context.AllocPD(); err != nil {
		t.Fatalf("AllocPD: %v", err)
	}
	t.Cleanup(func() { e.gone("Dealloc", e.pd.Dealloc()) })
	e.mem, e.mr = e.region(s.memory, s.access)
	if s.channel {
		if e.ch, err = side.Context.CreateCompletionChannel(); err != nil {
			t.Fatalf("CreateCompletionChannel: %v", err)
		}
		t.Cleanup(func() { e.gone("close channel", e.ch.Close()) })
	}
	e.sendCQ = e.newCQ(max(s.cqCapacity, 2*(s.cap.MaxSendWR+s.cap.MaxRecvWR)))
	e.recvCQ = e.sendCQ
	if s.separateCQs {
		n := s.cqCapacity
		if n == 0 {
			n = 2 * s.cap.MaxRecvWR
		}
		e.recvCQ = e.newCQ(n)
	}
	e.qp = e.newQP()
	return e
}

// gone checks the error of a clean-up; a case may have destroyed the object, or its context, itself.
func (e *end) gone(what string, err error) {
	if err != nil && err != verbs.ErrClosed && !e.t.Failed() {
		e.t.Errorf("%s: %v", what, err)
	}
}

func (e *end) newCQ(capacity int) verbs.CompletionQueue {
	e.t.Helper()
	cq, err := e.side.Context.CreateCQ(verbs.CQInit{Capacity: capacity, Channel: e.ch, Cookie: e})
	if err != nil {
		e.t.Fatalf("CreateCQ(%d): %v", capacity, err)
	}
	if cq.Capacity() < capacity {
		e.t.Errorf("a queue for %d entries has capacity %d", capacity, cq.Capacity())
	}
	e.t.Cleanup(func() { e.gone("destroy CQ", cq.Destroy()) })
	return cq
}

func (e *end) newQP() verbs.QueuePair {
	e.t.Helper()
	qp, err := e.pd.CreateQP(verbs.QPInit{SendCQ: e.sendCQ, RecvCQ: e.recvCQ, Cap: e.setup.cap, SignalAll: e.setup.signalAll})
	if err != nil {
		e.t.Fatalf("CreateQP(%+v): %v", e.setup.cap, err)
	}
	got, want := qp.Cap(), e.setup.cap
	if got.MaxSendWR < want.MaxSendWR || got.MaxRecvWR < want.MaxRecvWR || got.MaxSendSGE < want.MaxSendSGE ||
		got.MaxRecvSGE < want.MaxRecvSGE || got.MaxInlineData < want.MaxInlineData {
		e.t.Errorf("a queue pair of %+v was granted %+v", want, got)
	}
	if qp.QPN() == 0 || qp.QPN() > 0xffffff {
		e.t.Errorf("QPN 0x%x", qp.QPN())
	}
	e.t.Cleanup(func() { e.gone("destroy QP", qp.Destroy()) })
	return qp
}

// region is freshly registered memory, filled with what no test writes.
func (e *end) region(size int, access verbs.AccessFlags) ([]byte, verbs.MemoryRegion) {
	e.t.Helper()
	mem, err := hostmem.Alloc(size)
	if err != nil {
		e.t.Fatalf("%v", err)
	}
	mr, err := e.pd.RegisterMemory(mem, access)
	if err != nil {
		mem.Free()
		e.t.Fatalf("RegisterMemory(%d bytes, access %#x): %v", size, access, err)
	}
	e.t.Cleanup(func() {
		e.gone("deregister", mr.Deregister())
		mem.Free()
	})
	b := mem.Bytes()
	for i := range b {
		b[i] = 0xee
	}
	return b, mr
}

func (e *end) toInit() {
	e.t.Helper()
	attr := &verbs.QPAttr{State: verbs.QPInitState, Port: e.side.Port, Access: e.setup.qpAccess}
	if err := e.qp.Modify(attr, verbs.QPMaskToInit); err != nil {
		e.t.Fatalf("to INIT: %v", err)
	}
}

// connect brings both ends from INIT to RTS.
func (r *rig) connect() {
	r.t.Helper()
	mtu := min(r.a.activeMTU(), r.b.activeMTU())
	r.a.pathMTU, r.b.pathMTU = mtu, mtu
	r.a.connectTo(r.b, r.b.qp.QPN())
	r.b.connectTo(r.a, r.a.qp.QPN())
}

func (e *end) activeMTU() verbs.MTU {
	e.t.Helper()
	port, err := e.side.Context.QueryPort(e.side.Port)
	if err != nil {
		e.t.Fatalf("QueryPort: %v", err)
	}
	return port.ActiveMTU
}

func (e *end) addressOf(peer *end) verbs.AddressVector {
	e.t.Helper()
	port, err := peer.side.Context.QueryPort(peer.side.Port)
	if err != nil {
		e.t.Fatalf("QueryPort: %v", err)
	}
	av := verbs.AddressVector{Port: e.side.Port}
	if port.LinkLayer == verbs.LinkInfiniBand {
		av.DLID = port.LID
		return av
	}
	gid, err := peer.side.Context.QueryGID(peer.side.Port, peer.side.GIDIndex)
	if err != nil {
		e.t.Fatalf("QueryGID(%d): %v", peer.side.GIDIndex, err)
	}
	av.IsGlobal, av.DGID, av.SGIDIndex, av.HopLimit = true, gid.GID, uint8(e.side.GIDIndex), 64
	return av
}

func (e *end) connectTo(peer *end, qpn uint32) {
	e.t.Helper()
	rtr := &verbs.QPAttr{State: verbs.QPReadyToReceive, AV: e.addressOf(peer), PathMTU: e.pathMTU, DestQPN: qpn,
		RQPSN: peer.psn, MaxDestRdAtomic: e.setup.rdAtomic, MinRNRTimer: 12}
	if err := e.qp.Modify(rtr, verbs.QPMaskToRTR); err != nil {
		e.t.Fatalf("to RTR: %v", err)
	}
	rts := &verbs.QPAttr{State: verbs.QPReadyToSend, Timeout: e.setup.timeout, RetryCount: e.setup.retry, RNRRetry: e.setup.rnrRetry,
		SQPSN: e.psn, MaxRdAtomic: e.setup.rdAtomic}
	if err := e.qp.Modify(rts, verbs.QPMaskToRTS); err != nil {
		e.t.Fatalf("to RTS: %v", err)
	}
	if s := e.qp.State(); s != verbs.QPReadyToSend {
		e.t.Errorf("state %s after RTS", s)
	}
}

func (e *end) toError() {
	e.t.Helper()
	if err := e.qp.Modify(&verbs.QPAttr{State: verbs.QPError}, verbs.QPMaskState); err != nil {
		e.t.Fatalf("to ERR: %v", err)
	}
}

// sge names n bytes of the end's region at offset off.
func (e *end) sge(off, n int) verbs.SGE {
	return verbs.SGE{Addr: e.mr.Addr() + uint64(off), Length: uint32(n), LKey: e.mr.LKey()}
}

func (e *end) list(off, n int) []verbs.SGE { return []verbs.SGE{e.sge(off, n)} }

// wrID returns request identifiers that use all 64 bits and never repeat.
func (e *end) wrID() uint64 {
	e.nextWRID++
	return 0xfedc_0000_0000_0000 | e.nextWRID
}

// post posts all of wrs or fails.
func (e *end) post(wrs ...verbs.SendWorkRequest) {
	e.t.Helper()
	n, err := e.qp.PostSend(wrs)
	if err != nil || n != len(wrs) {
		e.t.Fatalf("PostSend took %d of %d: %v", n, len(wrs), err)
	}
}

// recv posts one receive into n bytes at off and returns its identifier.
func (e *end) recv(off, n int) uint64 {
	e.t.Helper()
	wr := verbs.RecvWorkRequest{WRID: e.wrID()}
	if n > 0 {
		wr.SGList = e.list(off, n)
	}
	e.postRecv(wr)
	return wr.WRID
}

func (e *end) postRecv(wrs ...verbs.RecvWorkRequest) {
	e.t.Helper()
	n, err := e.qp.PostRecv(wrs)
	if err != nil || n != len(wrs) {
		e.t.Fatalf("PostRecv took %d of %d: %v", n, len(wrs), err)
	}
}

// poll polls cq until n completions are there, or patience ends.
func poll(cq verbs.CompletionQueue, n int) (got []verbs.WorkCompletion, ok bool) {
	end := time.Now().Add(patience)
	var wcs [16]verbs.WorkCompletion
	for idle := 0; len(got) < n; {
		k := cq.Poll(wcs[:min(len(wcs), n-len(got))])
		if k > 0 {
			got = append(got, wcs[:k]...)
			idle = 0
			continue
		}
		if idle++; idle < 50 {
			runtime.Gosched()
			continue
		}
		if time.Now().After(end) {
			return got, false
		}
		time.Sleep(50 * time.Microsecond)
	}
	return got, true
}

// await polls cq until n completions are there. It fails when they do not come.
func await(t TB, cq verbs.CompletionQueue, n int) []verbs.WorkCompletion {
	t.Helper()
	got, ok := poll(cq, n)
	if !ok {
		t.Fatalf("%d of %d completions after %v: %s", len(got), n, patience, describe(got))
	}
	return got
}

func describe(wcs []verbs.WorkCompletion) string {
	var b bytes.Buffer
	for i := range wcs {
		fmt.Fprintf(&b, "{wr_id %#x opcode %d %s len %d} ", wcs[i].WRID, wcs[i].Opcode, wcs[i].Status, wcs[i].ByteLen)
	}
	return b.String()
}

// nothing fails when cq holds an entry now or in a little while.
func nothing(t TB, cq verbs.CompletionQueue) {
	t.Helper()
	var wcs [4]verbs.WorkCompletion
	for end := time.Now().Add(quiet); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if n := cq.Poll(wcs[:]); n > 0 {
			t.Fatalf("unexpected completions: %s", describe(wcs[:n]))
		}
	}
}

// awaitSend waits for one send completion of e and checks it.
func (e *end) awaitSend(id uint64, op verbs.WCOpcode) verbs.WorkCompletion {
	e.t.Helper()
	wc := await(e.t, e.sendCQ, 1)[0]
	e.check(wc, id, op)
	return wc
}

// awaitRecv waits for one receive completion of e and checks it, with n bytes.
func (e *end) awaitRecv(id uint64, op verbs.WCOpcode, n int) verbs.WorkCompletion {
	e.t.Helper()
	wc := await(e.t, e.recvCQ, 1)[0]
	e.check(wc, id, op)
	if int(wc.ByteLen) != n {
		e.t.Errorf("receive of %d bytes, want %d", wc.ByteLen, n)
	}
	return wc
}

func (e *end) check(wc verbs.WorkCompletion, id uint64, op verbs.WCOpcode) {
	e.t.Helper()
	if wc.WRID != id || wc.Status != verbs.WCSuccess || wc.Opcode != op || wc.QPN != e.qp.QPN() {
		e.t.Fatalf("completion wr_id %#x %s opcode %d QPN 0x%x, want wr_id %#x success opcode %d QPN 0x%x",
			wc.WRID, wc.Status, wc.Opcode, wc.QPN, id, op, e.qp.QPN())
	}
}

// expect waits for a completion of request id that failed with one of the statuses.
func expect(t TB, cq verbs.CompletionQueue, qpn uint32, id uint64, want ...verbs.WCStatus) {
	t.Helper()
	wc := await(t, cq, 1)[0]
	if wc.WRID != id || wc.QPN != qpn {
		t.Fatalf("completion wr_id %#x QPN 0x%x (%s), want wr_id %#x QPN 0x%x (%v)", wc.WRID, wc.QPN, wc.Status, id, qpn, want)
	}
	for _, s := range want {
		if wc.Status == s {
			return
		}
	}
	t.Fatalf("request %#x: %s, want %v", id, wc.Status, want)
}

// fill writes a pattern that depends on every byte's place.
func fill(b []byte, seed byte) {
	x := uint32(seed)*2654435761 + 12345
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x >> 24)
	}
}

// same fails when got differs from want, and says where.
func same(t TB, what string, got, want []byte) {
	t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	for i := range want {
		if i >= len(got) || got[i] != want[i] {
			t.Fatalf("%s: byte %d of %d is %#x, want %#x", what, i, len(want), got[i], want[i])
		}
	}
	t.Fatalf("%s: %d bytes, want %d", what, len(got), len(want))
}

// untouched fails when b holds anything but what region put there.
func untouched(t TB, what string, b []byte) {
	t.Helper()
	for i, v := range b {
		if v != 0xee {
			t.Fatalf("%s: byte %d was written (%#x)", what, i, v)
		}
	}
}
