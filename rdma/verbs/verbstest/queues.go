package verbstest

import (
	"errors"
	"runtime"
	"sync"
	"testing"

	"srp-initiator/rdma/verbs"
)

// batches posts several requests per call, of several kinds.
func batches(t TB, p Pair) {
	r := newRig(t, p, setup{cap: verbs.QPCap{MaxSendWR: 32, MaxRecvWR: 32}})
	for size := 1; size <= 16; size++ {
		var recvs []verbs.RecvWorkRequest
		var sends []verbs.SendWorkRequest
		for i := range size {
			fill(r.a.mem[i*256:i*256+256], byte(size+i))
			recvs = append(recvs, verbs.RecvWorkRequest{WRID: r.b.wrID(), SGList: r.b.list(i*256, 256)})
			sends = append(sends, verbs.SendWorkRequest{WRID: r.a.wrID(), Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.a.list(i*256, 256-i)})
		}
		r.b.postRecv(recvs...)
		r.a.post(sends...)
		for i, wc := range await(t, r.b.recvCQ, size) {
			r.b.check(wc, recvs[i].WRID, verbs.WCRecv)
			if int(wc.ByteLen) != 256-i {
				t.Errorf("receive %d of %d bytes", i, wc.ByteLen)
			}
			same(t, "batched SEND", r.b.mem[i*256:i*256+256-i], r.a.mem[i*256:i*256+256-i])
		}
		for i, wc := range await(t, r.a.sendCQ, size) {
			r.a.check(wc, sends[i].WRID, verbs.WCSend)
		}
	}
	// Nothing at all is a batch, too.
	if n, err := r.a.qp.PostSend(nil); n != 0 || err != nil {
		t.Errorf("PostSend(nil) = %d, %v", n, err)
	}
	if n, err := r.a.qp.PostRecv(nil); n != 0 || err != nil {
		t.Errorf("PostRecv(nil) = %d, %v", n, err)
	}
}

// unsignaledSends goes several laps with one signaled request in eight; its completion gives back the slots before it.
func unsignaledSends(t TB, p Pair) {
	r := newRig(t, p, setup{})
	laps := 5 * r.a.qp.Cap().MaxSendWR / 8
	for i := range laps {
		var wrs []verbs.SendWorkRequest
		for j := range 8 {
			fill(r.a.mem[j*64:j*64+64], byte(i*8+j))
			wrs = append(wrs, verbs.SendWorkRequest{WRID: uint64(i*8 + j), Opcode: verbs.OpRDMAWrite, SGList: r.a.list(j*64, 64),
				RemoteAddr: r.b.mr.Addr() + uint64(j*64), RKey: r.b.mr.RKey()})
		}
		wrs[7].Flags = verbs.SendSignaled
		r.a.post(wrs...)
		r.a.awaitSend(uint64(i*8+7), verbs.WCRDMAWrite)
		same(t, "unsignaled WRITEs", r.b.mem[:512], r.a.mem[:512])
	}
	nothing(t, r.a.sendCQ)
}

func signalAll(t TB, p Pair) {
	r := newRig(t, p, setup{signalAll: true})
	for i := range 3 {
		r.a.post(verbs.SendWorkRequest{WRID: uint64(i), Opcode: verbs.OpRDMAWrite, SGList: r.a.list(0, 8), RemoteAddr: r.b.mr.Addr(), RKey: r.b.mr.RKey()})
	}
	for i, wc := range await(t, r.a.sendCQ, 3) {
		r.a.check(wc, uint64(i), verbs.WCRDMAWrite)
	}
}

// receiveQueueFull posts exactly as many receives as Cap says, and finds that one more does not fit.
func receiveQueueFull(t TB, p Pair) {
	r := newRig(t, p, setup{cap: verbs.QPCap{MaxRecvWR: 5}, cqCapacity: 256})
	n := r.b.qp.Cap().MaxRecvWR
	for lap := range 3 {
		wrs := make([]verbs.RecvWorkRequest, n+3)
		for i := range wrs {
			wrs[i] = verbs.RecvWorkRequest{WRID: uint64(lap<<16 | i), SGList: r.b.list(i*16, 16)}
		}
		posted, err := r.b.qp.PostRecv(wrs)
		if posted != n || !errors.Is(err, verbs.ErrQueueFull) {
			t.Fatalf("lap %d: %d of %d receives posted: %v; Cap says %d", lap, posted, len(wrs), err, n)
		}
		if again, err := r.b.qp.PostRecv(wrs[:1]); again != 0 || !errors.Is(err, verbs.ErrQueueFull) {
			t.Fatalf("a full queue took %d more: %v", again, err)
		}
		for i := range n {
			r.a.post(verbs.SendWorkRequest{WRID: 1, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.a.list(0, i%17)})
			wc := await(t, r.b.recvCQ, 1)[0]
			r.b.check(wc, uint64(lap<<16|i), verbs.WCRecv)
			r.a.awaitSend(1, verbs.WCSend)
		}
	}
}

// sendQueueFull fills the send queue while the peer has no receives posted, and
// sees that all of it arrives in order when it has.
func sendQueueFull(t TB, p Pair) {
	r := newRig(t, p, setup{cap: verbs.QPCap{MaxSendWR: 5, MaxRecvWR: 64}, cqCapacity: 256})
	n := r.a.qp.Cap().MaxSendWR
	for lap := range 2 {
		wrs := make([]verbs.SendWorkRequest, n+3)
		for i := range wrs {
			wrs[i] = verbs.SendWorkRequest{WRID: uint64(lap<<16 | i), Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.a.list(i, i%64)}
		}
		posted, err := r.a.qp.PostSend(wrs)
		if posted != n || !errors.Is(err, verbs.ErrQueueFull) {
			t.Fatalf("lap %d: %d of %d sends posted: %v; Cap says %d", lap, posted, len(wrs), err, n)
		}
		for i := range n {
			r.b.recv(0, 64)
			wc := await(t, r.b.recvCQ, 1)[0]
			if wc.Status != verbs.WCSuccess || int(wc.ByteLen) != i%64 {
				t.Fatalf("receive %d: %s, %d bytes", i, wc.Status, wc.ByteLen)
			}
		}
		for i, wc := range await(t, r.a.sendCQ, n) {
			r.a.check(wc, uint64(lap<<16|i), verbs.WCSend)
		}
	}
}

// ringLaps goes round all rings more than three times in steps that do not divide them.
func ringLaps(t TB, p Pair) {
	r := newRig(t, p, setup{cap: verbs.QPCap{MaxSendWR: 7, MaxRecvWR: 7}})
	total := 4 * max(r.a.qp.Cap().MaxSendWR, r.a.sendCQ.Capacity()+1)
	sent, step := 0, 1
	for sent < total {
		for i := range step {
			fill(r.a.mem[i*512:i*512+300], byte(sent+i))
			r.b.recv(i*512, 512)
		}
		var wrs []verbs.SendWorkRequest
		for i := range step {
			wrs = append(wrs, verbs.SendWorkRequest{WRID: uint64(sent + i), Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.a.list(i*512, 300)})
		}
		r.a.post(wrs...)
		for i, wc := range await(t, r.b.recvCQ, step) {
			if wc.Status != verbs.WCSuccess || wc.ByteLen != 300 {
				t.Fatalf("receive %d: %s, %d bytes", sent+i, wc.Status, wc.ByteLen)
			}
			same(t, "SEND on a lap", r.b.mem[i*512:i*512+300], r.a.mem[i*512:i*512+300])
		}
		for i, wc := range await(t, r.a.sendCQ, step) {
			r.a.check(wc, uint64(sent+i), verbs.WCSend)
		}
		sent += step
		step = step%7 + 1
	}
}

// counterWrap posts more than 2^16 requests and receives on one queue pair: devices count their ring entries in 16 bits.
func counterWrap(t TB, p Pair) {
	const batch, total = 60, 1<<16 + 2000
	r := newRig(t, p, setup{cap: verbs.QPCap{MaxSendWR: 2 * batch, MaxRecvWR: 2 * batch}})
	wrs := make([]verbs.SendWorkRequest, batch)
	recvs := make([]verbs.RecvWorkRequest, batch)
	for sent := 0; sent < total; sent += batch {
		for i := range wrs {
			wrs[i] = verbs.SendWorkRequest{WRID: uint64(sent + i), Opcode: verbs.OpSend}
			recvs[i] = verbs.RecvWorkRequest{WRID: uint64(sent + i)}
		}
		wrs[batch-1].Flags = verbs.SendSignaled
		r.b.postRecv(recvs...)
		r.a.post(wrs...)
		for i, wc := range await(t, r.b.recvCQ, batch) {
			r.b.check(wc, uint64(sent+i), verbs.WCRecv)
		}
		r.a.awaitSend(uint64(sent+batch-1), verbs.WCSend)
	}
}

// queueHoldsCapacity lets as many completions pile up as the queue says it holds. The receive queue has room for all of
// them: an adapter's driver learns from the completions alone that receives were used.
func queueHoldsCapacity(t TB, p Pair) {
	r := newRig(t, p, setup{cap: verbs.QPCap{MaxSendWR: 8, MaxRecvWR: 127}, cqCapacity: 15, separateCQs: true})
	n := r.b.recvCQ.Capacity()
	for round := range 2 {
		for i := range n {
			r.b.recv(0, 16)
			r.a.post(verbs.SendWorkRequest{WRID: uint64(i), Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.a.list(0, 1+i%15)})
			r.a.awaitSend(uint64(i), verbs.WCSend)
		}
		for i, wc := range await(t, r.b.recvCQ, n) {
			if wc.Status != verbs.WCSuccess || int(wc.ByteLen) != 1+i%15 {
				t.Fatalf("round %d, entry %d of %d: %s, %d bytes", round, i, n, wc.Status, wc.ByteLen)
			}
		}
	}
	nothing(t, r.b.recvCQ)
}

// pollBounds asks for fewer, as many and more entries than there are.
func pollBounds(t TB, p Pair) {
	r := newRig(t, p, setup{})
	const mark = 0x5a5a5a5a5a5a5a5a
	for _, room := range []int{0, 1, 2, 3, 5, 9} {
		var wrs []verbs.SendWorkRequest
		for i := range 7 {
			wrs = append(wrs, verbs.SendWorkRequest{WRID: uint64(i), Opcode: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGList: r.a.list(0, 1),
				RemoteAddr: r.b.mr.Addr(), RKey: r.b.mr.RKey()})
		}
		r.a.post(wrs...)
		// The last of the seven must be there: a WRITE behind them with an immediate tells.
		rid := r.b.recv(0, 0)
		r.a.post(verbs.SendWorkRequest{WRID: 7, Opcode: verbs.OpRDMAWriteImm, Flags: verbs.SendSignaled})
		r.b.awaitRecv(rid, verbs.WCRecvRDMAWr, 0)
		next := 0
		for tries := 0; next < 8 && tries < 1<<20; tries++ {
			buf := make([]verbs.WorkCompletion, room+1)
			for i := range buf {
				buf[i].WRID = mark
			}
			n := r.a.sendCQ.Poll(buf[:room])
			if n < 0 || n > room {
				t.Fatalf("Poll with room for %d returned %d", room, n)
			}
			for i := n; i < len(buf); i++ {
				if buf[i].WRID != mark {
					t.Fatalf("Poll returned %d and wrote entry %d", n, i)
				}
			}
			for _, wc := range buf[:n] {
				if wc.WRID != uint64(next) || wc.Status != verbs.WCSuccess {
					t.Fatalf("entry %d: wr_id %d %s", next, wc.WRID, wc.Status)
				}
				next++
			}
			if n == 0 {
				if room == 0 && tries > 3 {
					for i, wc := range await(t, r.a.sendCQ, 8) {
						if wc.WRID != uint64(i) {
							t.Fatalf("entry %d: wr_id %d", i, wc.WRID)
						}
					}
					next = 8
				}
				runtime.Gosched()
			}
		}
		if next != 8 {
			t.Fatalf("room %d: %d of 8 completions", room, next)
		}
	}
}

// twoQueues keeps sends and receives in completion queues of their own.
func twoQueues(t TB, p Pair) {
	r := newRig(t, p, setup{separateCQs: true})
	for i := range 10 {
		ra, rb := r.a.recv(0, 64), r.b.recv(0, 64)
		r.a.post(verbs.SendWorkRequest{WRID: uint64(i), Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.a.list(64, 10)})
		r.b.post(verbs.SendWorkRequest{WRID: uint64(i), Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.b.list(64, 20)})
		r.a.awaitRecv(ra, verbs.WCRecv, 20)
		r.b.awaitRecv(rb, verbs.WCRecv, 10)
		r.a.awaitSend(uint64(i), verbs.WCSend)
		r.b.awaitSend(uint64(i), verbs.WCSend)
	}
}

// manyQueuePairs runs 24 connections over one completion queue per side.
func manyQueuePairs(t TB, p Pair) {
	const n = 24
	r := newRig(t, p, setup{cqCapacity: n * 64})
	a, b := make([]*end, n), make([]*end, n)
	seen := map[uint32]bool{}
	for i := range n {
		for _, x := range []struct {
			list []*end
			e    *end
		}{{a, r.a}, {b, r.b}} {
			c := *x.e
			c.qp = c.newQP()
			c.psn = uint32(i * 1000)
			c.toInit()
			x.list[i] = &c
		}
		(&rig{t: t, a: a[i], b: b[i]}).connect()
		if seen[a[i].qp.QPN()] {
			t.Fatalf("QPN 0x%x twice", a[i].qp.QPN())
		}
		seen[a[i].qp.QPN()] = true
	}
	for round := range 4 {
		for i := range n {
			fill(r.a.mem[i*1024:i*1024+700], byte(i+round))
			b[i].postRecv(verbs.RecvWorkRequest{WRID: uint64(i), SGList: b[i].list(i*1024, 1024)})
		}
		for i := range n {
			a[i].post(verbs.SendWorkRequest{WRID: uint64(i), Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: a[i].list(i*1024, 700)})
		}
		for side, cq := range []verbs.CompletionQueue{r.a.sendCQ, r.b.recvCQ} {
			got := map[uint64]bool{}
			for _, wc := range await(t, cq, n) {
				list := [][]*end{a, b}[side]
				if wc.Status != verbs.WCSuccess || wc.WRID >= n || got[wc.WRID] || wc.QPN != list[wc.WRID].qp.QPN() {
					t.Fatalf("completion wr_id %d QPN 0x%x %s", wc.WRID, wc.QPN, wc.Status)
				}
				got[wc.WRID] = true
			}
		}
		for i := range n {
			same(t, "one of many", r.b.mem[i*1024:i*1024+700], r.a.mem[i*1024:i*1024+700])
		}
	}
}

// fullDuplex has both sides send at once, each posting sends, posting receives and polling in goroutines of their own.
func fullDuplex(t TB, p Pair) {
	const messages, size, window = 400, 1500, 8
	r := newRig(t, p, setup{cap: verbs.QPCap{MaxSendWR: window, MaxRecvWR: 2 * window}, separateCQs: true})
	var wg sync.WaitGroup
	fail := make(chan string, 8)
	run := func(f func() string) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if s := f(); s != "" {
				fail <- s
			}
		}()
	}
	for _, e := range []*end{r.a, r.b} {
		for i := range window {
			e.postRecv(verbs.RecvWorkRequest{WRID: uint64(i), SGList: e.list(128<<10+i*2048, size)})
		}
	}
	for _, e := range []*end{r.a, r.b} {
		run(func() string { // receiver: checks content, posts again
			for got := 0; got < messages; {
				wcs, ok := poll(e.recvCQ, 1)
				if !ok {
					return "receives did not come"
				}
				for _, wc := range wcs {
					if wc.Status != verbs.WCSuccess || wc.ByteLen != size {
						return "receive " + wc.Status.String()
					}
					slot := e.mem[128<<10+int(wc.WRID)*2048:][:size]
					for _, v := range slot {
						if v != byte(got) {
							return "a receive holds another message"
						}
					}
					got++
					if n, err := e.qp.PostRecv([]verbs.RecvWorkRequest{{WRID: wc.WRID, SGList: e.list(128<<10+int(wc.WRID)*2048, size)}}); n != 1 {
						return "post receive: " + err.Error()
					}
				}
			}
			return ""
		})
		run(func() string { // sender
			sent, done := 0, 0
			for done < messages {
				for sent < messages && sent-done < window {
					slot := e.mem[(sent%window)*2048:][:size]
					for j := range slot {
						slot[j] = byte(sent)
					}
					if n, err := e.qp.PostSend([]verbs.SendWorkRequest{{WRID: uint64(sent), Opcode: verbs.OpSend, Flags: verbs.SendSignaled,
						SGList: e.list((sent%window)*2048, size)}}); n != 1 {
						return "post send: " + err.Error()
					}
					sent++
				}
				wcs, ok := poll(e.sendCQ, 1)
				if !ok {
					return "sends did not complete"
				}
				for _, wc := range wcs {
					if wc.Status != verbs.WCSuccess || wc.WRID != uint64(done) {
						return "send " + wc.Status.String()
					}
					done++
				}
			}
			return ""
		})
	}
	wg.Wait()
	close(fail)
	for s := range fail {
		t.Errorf("%s", s)
	}
}

// noAllocation holds the data path to zero allocations per call.
func noAllocation(t TB, p Pair) {
	r := newRig(t, p, setup{cap: verbs.QPCap{MaxInlineData: 32}, channel: true})
	send := []verbs.SendWorkRequest{
		{WRID: 1, Opcode: verbs.OpRDMAWrite, SGList: r.a.list(0, 200), RemoteAddr: r.b.mr.Addr(), RKey: r.b.mr.RKey()},
		{WRID: 2, Opcode: verbs.OpSend, Flags: verbs.SendSignaled | verbs.SendInline, SGList: r.a.list(0, 32)},
	}
	recv := []verbs.RecvWorkRequest{{WRID: 3, SGList: r.b.list(4096, 64)}}
	wcs := make([]verbs.WorkCompletion, 8)
	drain := func(cq verbs.CompletionQueue) {
		for cq.Poll(wcs) == 0 {
			runtime.Gosched()
		}
	}
	for _, c := range []struct {
		what string
		f    func()
	}{
		{"an empty Poll", func() { r.a.sendCQ.Poll(wcs) }},
		{"PostRecv, PostSend and Poll", func() {
			r.b.qp.PostRecv(recv)
			r.a.qp.PostSend(send)
			drain(r.b.recvCQ)
			drain(r.a.sendCQ)
		}},
		{"Arm", func() { r.a.sendCQ.Arm(false) }},
	} {
		c.f()
		if n := testing.AllocsPerRun(200, c.f); n != 0 {
			t.Errorf("%s allocates %v times", c.what, n)
		}
	}
}
