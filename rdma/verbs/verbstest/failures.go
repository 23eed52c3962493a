package verbstest

import (
	"errors"
	"time"

	"srp-initiator/rdma/verbs"
)

// badWorkRequests offers what the caller must not; nothing of it may reach the ring, and the queue pair must go on.
func badWorkRequests(t TB, p Pair) {
	r := newRig(t, p, setup{cap: verbs.QPCap{MaxInlineData: 32, MaxSendSGE: 2, MaxRecvSGE: 2}})
	c := r.a.qp.Cap()
	tooMany := make([]verbs.SGE, c.MaxSendSGE+1)
	for i := range tooMany {
		tooMany[i] = r.a.sge(i, 1)
	}
	huge := []verbs.SGE{r.a.sge(0, 1), r.a.sge(0, 1)}
	huge[0].Length, huge[1].Length = 0xfffffff0, 0x20 // 16 when added in 32 bits
	for _, bad := range []struct {
		what string
		wr   verbs.SendWorkRequest
	}{
		{"too many SGEs", verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: tooMany}},
		{"one inline byte too many", verbs.SendWorkRequest{Opcode: verbs.OpSend, Flags: verbs.SendInline, SGList: r.a.list(0, c.MaxInlineData+1)}},
		{"inline bytes whose sum wraps 32 bits", verbs.SendWorkRequest{Opcode: verbs.OpSend, Flags: verbs.SendInline, SGList: huge}},
		{"bytes whose sum wraps 32 bits", verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: huge}},
		{"an inline READ", verbs.SendWorkRequest{Opcode: verbs.OpRDMARead, Flags: verbs.SendInline, SGList: r.a.list(0, 8), RemoteAddr: r.b.mr.Addr(), RKey: r.b.mr.RKey()}},
		{"an unknown opcode", verbs.SendWorkRequest{Opcode: 99, SGList: r.a.list(0, 8)}},
		{"a bind of nothing", verbs.SendWorkRequest{Opcode: verbs.OpBindMW}},
	} {
		good := verbs.SendWorkRequest{WRID: 1, Opcode: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGList: r.a.list(0, 8), RemoteAddr: r.b.mr.Addr(), RKey: r.b.mr.RKey()}
		bad.wr.WRID, bad.wr.Flags = 2, bad.wr.Flags|verbs.SendSignaled
		n, err := r.a.qp.PostSend([]verbs.SendWorkRequest{good, bad.wr, good})
		if n != 1 || err == nil {
			t.Errorf("%s: %d posted, %v", bad.what, n, err)
		}
		r.a.awaitSend(1, verbs.WCRDMAWrite)
		good.WRID = 3
		r.a.post(good)
		r.a.awaitSend(3, verbs.WCRDMAWrite)
	}
	tooMany = tooMany[:0]
	for i := range c.MaxRecvSGE + 1 {
		tooMany = append(tooMany, r.a.sge(i, 1))
	}
	if n, err := r.a.qp.PostRecv([]verbs.RecvWorkRequest{{SGList: tooMany}}); n != 0 || err == nil {
		t.Errorf("a receive with too many SGEs: %d posted, %v", n, err)
	}
	rid := r.a.recv(0, 64)
	r.b.post(verbs.SendWorkRequest{WRID: 4, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.b.list(0, 8)})
	r.a.awaitRecv(rid, verbs.WCRecv, 8)
	r.b.awaitSend(4, verbs.WCSend)
}

// failed checks that a queue pair that failed flushes what follows.
func (e *end) failed() {
	e.t.Helper()
	e.post(verbs.SendWorkRequest{WRID: 0xf1, Opcode: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGList: e.list(0, 1)})
	expect(e.t, e.sendCQ, e.qp.QPN(), 0xf1, verbs.WCFlushError)
}

// localErrors are the statuses of a send request whose own memory is wrong.
func localErrors(p Pair) []verbs.WCStatus {
	list := []verbs.WCStatus{verbs.WCLocalProtectionError, verbs.WCLocalLengthError, verbs.WCLocalQPOperationError}
	if p.VagueLocalErrors {
		list = append(list, verbs.WCFlushError)
	}
	return list
}

func localKeyErrors(t TB, p Pair) {
	stranger := func(r *rig) verbs.SGE { s := r.a.sge(0, 64); s.LKey ^= 0x5a00; return s }
	beyond := func(r *rig) verbs.SGE { return r.a.sge(r.a.mr.Len()-8, 64) }
	local := localErrors(p)
	for _, c := range []struct {
		what string
		sge  func(*rig) verbs.SGE
	}{{"unknown key", stranger}, {"past the end", beyond}} {
		// As a source.
		r := newRig(t, p, setup{})
		rid := r.b.recv(0, 64)
		r.a.post(verbs.SendWorkRequest{WRID: 1, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: []verbs.SGE{c.sge(r)}})
		expect(t, r.a.sendCQ, r.a.qp.QPN(), 1, local...)
		r.a.failed()
		_ = rid
		// As the destination of a READ.
		r = newRig(t, p, setup{})
		r.a.post(verbs.SendWorkRequest{WRID: 2, Opcode: verbs.OpRDMARead, Flags: verbs.SendSignaled, SGList: []verbs.SGE{c.sge(r)},
			RemoteAddr: r.b.mr.Addr(), RKey: r.b.mr.RKey()})
		expect(t, r.a.sendCQ, r.a.qp.QPN(), 2, local...)
		r.a.failed()
		// As a receive: the receiver fails locally and tells the sender.
		r = newRig(t, p, setup{})
		r.a.postRecv(verbs.RecvWorkRequest{WRID: 3, SGList: []verbs.SGE{c.sge(r)}})
		r.b.post(verbs.SendWorkRequest{WRID: 4, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.b.list(0, 64)})
		expect(t, r.b.sendCQ, r.b.qp.QPN(), 4, verbs.WCRemoteOperationError, verbs.WCRemoteInvalidRequestError, verbs.WCRemoteAccessError)
		expect(t, r.a.recvCQ, r.a.qp.QPN(), 3, verbs.WCLocalProtectionError, verbs.WCLocalQPOperationError)
	}
}

func remoteAccessErrors(t TB, p Pair) {
	type try struct {
		what  string
		setup setup
		op    verbs.SendOpcode
		wrong func(*rig, *verbs.SendWorkRequest)
	}
	unknownKey := func(r *rig, wr *verbs.SendWorkRequest) { wr.RKey ^= 0x3c00 }
	before := func(r *rig, wr *verbs.SendWorkRequest) { wr.RemoteAddr = r.b.mr.Addr() - 1 }
	beyond := func(r *rig, wr *verbs.SendWorkRequest) { wr.RemoteAddr = r.b.mr.Addr() + uint64(r.b.mr.Len()) - 63 }
	wraps := func(r *rig, wr *verbs.SendWorkRequest) { wr.RemoteAddr = ^uint64(0) - 10 }
	nothing := func(r *rig, wr *verbs.SendWorkRequest) {}
	for _, c := range []try{
		{"READ with an unknown key", setup{}, verbs.OpRDMARead, unknownKey},
		{"WRITE with an unknown key", setup{}, verbs.OpRDMAWrite, unknownKey},
		{"WRITE that begins before the region", setup{}, verbs.OpRDMAWrite, before},
		{"WRITE that ends one byte late", setup{}, verbs.OpRDMAWrite, beyond},
		{"READ that ends one byte late", setup{}, verbs.OpRDMARead, beyond},
		{"WRITE whose range wraps", setup{}, verbs.OpRDMAWrite, wraps},
		{"READ of a region without remote read", setup{access: verbs.AccessLocalWrite | verbs.AccessRemoteWrite}, verbs.OpRDMARead, nothing},
		{"WRITE to a region without remote write", setup{access: verbs.AccessLocalWrite | verbs.AccessRemoteRead}, verbs.OpRDMAWrite, nothing},
		{"READ on a queue pair without remote read", setup{qpAccess: verbs.AccessRemoteWrite}, verbs.OpRDMARead, nothing},
		{"WRITE on a queue pair without remote write", setup{qpAccess: verbs.AccessRemoteRead}, verbs.OpRDMAWrite, nothing},
	} {
		r := newRig(t, p, c.setup)
		rid := r.b.recv(128, 64)
		wr := verbs.SendWorkRequest{WRID: 1, Opcode: c.op, Flags: verbs.SendSignaled, SGList: r.a.list(0, 64), RemoteAddr: r.b.mr.Addr(), RKey: r.b.mr.RKey()}
		c.wrong(r, &wr)
		n, err := r.a.qp.PostSend([]verbs.SendWorkRequest{wr, {WRID: 2, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.a.list(0, 8)}})
		if n != 2 || err != nil {
			t.Fatalf("%s: posted %d: %v", c.what, n, err)
		}
		wc := await(t, r.a.sendCQ, 1)[0]
		if wc.WRID != 1 || (wc.Status != verbs.WCRemoteAccessError && wc.Status != verbs.WCRemoteInvalidRequestError) {
			t.Fatalf("%s: wr_id %d %s", c.what, wc.WRID, wc.Status)
		}
		expect(t, r.a.sendCQ, r.a.qp.QPN(), 2, verbs.WCFlushError)
		r.a.failed()
		untouched(t, c.what, r.b.mem[:64])
		// The responder's queue pair failed too (IBA vol. 1, 9.7.5.2.4): its receive is flushed, now or when it is told to.
		r.b.toError()
		expect(t, r.b.recvCQ, r.b.qp.QPN(), rid, verbs.WCFlushError)
	}
}

func receiveTooSmall(t TB, p Pair) {
	there, here := []verbs.WCStatus{verbs.WCRemoteInvalidRequestError}, []verbs.WCStatus{verbs.WCLocalLengthError}
	if p.VagueLengthErrors {
		there, here = append(there, verbs.WCRemoteOperationError), append(here, verbs.WCLocalQPOperationError)
	}
	mtu := newRig(t, p, setup{}).a.pathMTU.Bytes()
	for _, n := range []int{1, 64, 3 * mtu} {
		r := newRig(t, p, setup{})
		rid := r.b.recv(0, n)
		r.a.post(verbs.SendWorkRequest{WRID: 1, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.a.list(0, n+1)})
		expect(t, r.a.sendCQ, r.a.qp.QPN(), 1, there...)
		expect(t, r.b.recvCQ, r.b.qp.QPN(), rid, here...)
		untouched(t, "memory behind the receive", r.b.mem[n:])
	}
}

// receiverNotReady posts the receive after the SEND; and never, with a bounded number of tries.
func receiverNotReady(t TB, p Pair) {
	r := newRig(t, p, setup{})
	for i := range 3 {
		fill(r.a.mem[:5000], byte(i))
		r.a.post(verbs.SendWorkRequest{WRID: 1, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.a.list(0, 5000)})
		time.Sleep(20 * time.Millisecond)
		if n := r.a.sendCQ.Poll(make([]verbs.WorkCompletion, 1)); n != 0 {
			t.Fatalf("a SEND without a receive completed")
		}
		rid := r.b.recv(0, 8192)
		r.b.awaitRecv(rid, verbs.WCRecv, 5000)
		r.a.awaitSend(1, verbs.WCSend)
		same(t, "SEND that waited", r.b.mem[:5000], r.a.mem[:5000])
	}
	for _, tries := range []uint8{0, 2} {
		r := newRig(t, p, setup{rnrRetry: tries, rnrRetrySet: true})
		r.a.post(verbs.SendWorkRequest{WRID: 7, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.a.list(0, 8)},
			verbs.SendWorkRequest{WRID: 8, Opcode: verbs.OpSend, SGList: r.a.list(0, 8)})
		expect(t, r.a.sendCQ, r.a.qp.QPN(), 7, verbs.WCRNRRetryExceeded)
		expect(t, r.a.sendCQ, r.a.qp.QPN(), 8, verbs.WCFlushError)
	}
}

// silentPeer sends to a queue pair number that nobody has.
func silentPeer(t TB, p Pair) {
	r := newRig(t, p, setup{unconnected: true, retry: 1, timeout: 12})
	nobody := uint32(0xfffff0) // not in use: numbers are given out from below
	r.a.pathMTU = r.a.activeMTU()
	r.a.connectTo(r.b, nobody)
	start := time.Now()
	r.a.post(verbs.SendWorkRequest{WRID: 1, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.a.list(0, 8)})
	expect(t, r.a.sendCQ, r.a.qp.QPN(), 1, verbs.WCRetryExceeded)
	if d := time.Since(start); d > 10*time.Second {
		t.Errorf("it took %v to give up on 2 times 16.8 ms", d)
	}
	r.a.failed()
}

// flushInOrder fails a queue pair with both queues full of work.
func flushInOrder(t TB, p Pair) {
	r := newRig(t, p, setup{separateCQs: true})
	var sends []verbs.SendWorkRequest
	for i := range 8 {
		r.a.postRecv(verbs.RecvWorkRequest{WRID: uint64(100 + i), SGList: r.a.list(0, 64)})
		// The peer has no receives: these wait. One in two is unsignaled and must be flushed with an entry as well.
		wr := verbs.SendWorkRequest{WRID: uint64(i), Opcode: verbs.OpSend, SGList: r.a.list(0, 8)}
		if i%2 == 0 {
			wr.Flags = verbs.SendSignaled
		}
		sends = append(sends, wr)
	}
	r.a.post(sends...)
	time.Sleep(5 * time.Millisecond)
	r.a.toError()
	if s := r.a.qp.State(); s != verbs.QPError {
		t.Errorf("state %s", s)
	}
	for i := range 8 {
		expect(t, r.a.sendCQ, r.a.qp.QPN(), uint64(i), verbs.WCFlushError)
	}
	for i := range 8 {
		expect(t, r.a.recvCQ, r.a.qp.QPN(), uint64(100+i), verbs.WCFlushError)
	}
	nothing(t, r.a.sendCQ)
	nothing(t, r.a.recvCQ)
}

// postingAfterError posts on a queue pair in ERR; everything comes back flushed.
func postingAfterError(t TB, p Pair) {
	r := newRig(t, p, setup{separateCQs: true})
	r.a.toError()
	for i := range 3 * r.a.qp.Cap().MaxSendWR {
		r.a.post(verbs.SendWorkRequest{WRID: uint64(i), Opcode: verbs.OpSend, SGList: r.a.list(0, 8)})
		expect(t, r.a.sendCQ, r.a.qp.QPN(), uint64(i), verbs.WCFlushError)
		r.a.postRecv(verbs.RecvWorkRequest{WRID: uint64(1000 + i), SGList: r.a.list(0, 8)})
		expect(t, r.a.recvCQ, r.a.qp.QPN(), uint64(1000+i), verbs.WCFlushError)
	}
}

// resetAndReuse takes a failed queue pair through RESET and connects it again.
func resetAndReuse(t TB, p Pair) {
	r := newRig(t, p, setup{})
	for i := range 4 {
		for _, e := range []*end{r.a, r.b} {
			for j := range 3 {
				e.postRecv(verbs.RecvWorkRequest{WRID: uint64(500 + j), SGList: e.list(0, 64)})
			}
		}
		r.a.post(verbs.SendWorkRequest{WRID: 1, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.a.list(0, 10+i)})
		r.b.awaitRecv(500, verbs.WCRecv, 10+i)
		r.a.awaitSend(1, verbs.WCSend)
		for _, e := range []*end{r.a, r.b} {
			e.toError()
			left := 3
			if e == r.b {
				left = 2
			}
			for _, wc := range await(t, e.recvCQ, left) {
				if wc.Status != verbs.WCFlushError {
					t.Fatalf("%s, want a flush", wc.Status)
				}
			}
			if err := e.qp.Modify(&verbs.QPAttr{State: verbs.QPReset}, verbs.QPMaskState); err != nil {
				t.Fatalf("to RESET: %v", err)
			}
			if s := e.qp.State(); s != verbs.QPReset {
				t.Errorf("state %s", s)
			}
			if n, err := e.qp.PostRecv([]verbs.RecvWorkRequest{{}}); n != 0 || err == nil {
				t.Errorf("a receive in RESET: %d posted, %v", n, err)
			}
			e.psn += 0x100
			e.toInit()
		}
		r.connect()
	}
}

// postingByState: receives from INIT on, sends from RTS on.
func postingByState(t TB, p Pair) {
	r := newRig(t, p, setup{unconnected: true})
	send := []verbs.SendWorkRequest{{WRID: 1, Opcode: verbs.OpSend, SGList: r.a.list(0, 1)}}
	if n, err := r.a.qp.PostSend(send); n != 0 || err == nil {
		t.Errorf("a send in INIT: %d posted, %v", n, err)
	}
	rid := r.a.recv(0, 64)
	r.connect()
	r.b.post(verbs.SendWorkRequest{WRID: 2, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.b.list(0, 5)})
	r.a.awaitRecv(rid, verbs.WCRecv, 5)
	r.b.awaitSend(2, verbs.WCSend)

	fresh := r.a.newQP()
	if s := fresh.State(); s != verbs.QPReset {
		t.Errorf("a new queue pair is in %s", s)
	}
	if n, err := fresh.PostRecv([]verbs.RecvWorkRequest{{}}); n != 0 || err == nil {
		t.Errorf("a receive in RESET: %d posted, %v", n, err)
	}
	if n, err := fresh.PostSend(send); n != 0 || err == nil {
		t.Errorf("a send in RESET: %d posted, %v", n, err)
	}
	// A transition that is none.
	if err := fresh.Modify(&verbs.QPAttr{State: verbs.QPReadyToSend}, verbs.QPMaskToRTS); err == nil {
		t.Errorf("RESET to RTS went through")
	}
	if s := fresh.State(); s != verbs.QPReset {
		t.Errorf("after a refused transition it is in %s", s)
	}
	if err := fresh.Destroy(); err != nil {
		t.Errorf("%v", err)
	}
	if n, err := fresh.PostSend(send); n != 0 || !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("a send on a destroyed queue pair: %d, %v", n, err)
	}
	if err := fresh.Modify(&verbs.QPAttr{State: verbs.QPError}, verbs.QPMaskState); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("modify of a destroyed queue pair: %v", err)
	}
}
