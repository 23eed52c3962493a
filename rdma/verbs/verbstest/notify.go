package verbstest

import (
	"errors"
	"runtime"
	"sync"
	"time"

	"srp-initiator/rdma/verbs"
)

// awaitEvent waits for an event of cq on ch.
func awaitEvent(t TB, ch verbs.CompletionChannel, cq verbs.CompletionQueue) {
	t.Helper()
	var events [4]verbs.CompletionQueue
	n, err := ch.WaitThread(events[:1], patience)
	if err != nil || n != 1 || events[0] != cq {
		t.Fatalf("WaitThread = %d, %v; want one event of the queue", n, err)
	}
}

func noEvent(t TB, ch verbs.CompletionChannel) {
	t.Helper()
	var events [4]verbs.CompletionQueue
	if n, err := ch.WaitThread(events[:], quiet); n != 0 || err != nil {
		t.Fatalf("WaitThread = %d, %v; want no event", n, err)
	}
}

// within runs a wait that has no time limit of its own, and fails when it does not return.
func within(t TB, what string, wait func() (int, error)) (int, error) {
	t.Helper()
	type result struct {
		n   int
		err error
	}
	done := make(chan result, 1)
	go func() {
		n, err := wait()
		done <- result{n, err}
	}()
	select {
	case r := <-done:
		return r.n, r.err
	case <-time.After(patience):
		t.Fatalf("%s: not back after %v", what, patience)
	}
	return 0, nil
}

func arm(t TB, cq verbs.CompletionQueue, solicited bool) (missed bool) {
	t.Helper()
	missed, err := cq.Arm(solicited)
	if err != nil {
		t.Fatalf("Arm: %v", err)
	}
	return missed
}

// write makes one send completion at a.
func (r *rig) write(id uint64) {
	r.t.Helper()
	r.a.post(verbs.SendWorkRequest{WRID: id, Opcode: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGList: r.a.list(0, 8),
		RemoteAddr: r.b.mr.Addr(), RKey: r.b.mr.RKey()})
}

// armOnce: one arm, one event, however often it was armed and however many completions follow.
func armOnce(t TB, p Pair) {
	r := newRig(t, p, setup{channel: true})
	cq := r.a.sendCQ
	if cq.Cookie() != any(r.a) {
		t.Errorf("the cookie did not come back")
	}
	for round := range 5 {
		for range round + 1 {
			if arm(t, cq, false) {
				t.Fatalf("round %d: missed on an empty queue", round)
			}
		}
		for i := range 3 {
			r.write(uint64(i))
		}
		awaitEvent(t, r.a.ch, cq)
		for i, wc := range await(t, cq, 3) {
			r.a.check(wc, uint64(i), verbs.WCRDMAWrite)
		}
		noEvent(t, r.a.ch)
		// Not armed: no event.
		r.write(9)
		r.a.awaitSend(9, verbs.WCRDMAWrite)
		noEvent(t, r.a.ch)
	}
	// By way of Wait.
	arm(t, cq, false)
	r.write(1)
	var events [1]verbs.CompletionQueue
	n, err := within(t, "Wait for an event", func() (int, error) { return r.a.ch.Wait(events[:]) })
	if n != 1 || err != nil || events[0] != cq {
		t.Fatalf("Wait = %d, %v", n, err)
	}
	r.a.awaitSend(1, verbs.WCRDMAWrite)
}

// armReportsMissed: what is in the queue when it is armed raises no event; missed says so.
func armReportsMissed(t TB, p Pair) {
	r := newRig(t, p, setup{channel: true})
	cq := r.a.sendCQ
	for i := range 20 {
		id := uint64(i)
		r.write(2 * id)
		r.write(2*id + 1)
		// A completion known to be there: the first is polled, the second is behind it.
		r.a.awaitSend(2*id, verbs.WCRDMAWrite)
		rid := r.b.recv(0, 0)
		r.a.post(verbs.SendWorkRequest{WRID: 7, Opcode: verbs.OpRDMAWriteImm})
		r.b.awaitRecv(rid, verbs.WCRecvRDMAWr, 0)
		early := false // armed before the second completion came, which then raises an event of its own
		for deadline := time.Now().Add(patience); !arm(t, cq, false); {
			early = true
			if time.Now().After(deadline) {
				t.Fatalf("round %d: an entry lies in the queue and Arm does not say so", i)
			}
			time.Sleep(time.Millisecond)
		}
		r.a.awaitSend(2*id+1, verbs.WCRDMAWrite)
		// The arm may or may not have been answered meanwhile; take the event off the channel.
		var events [1]verbs.CompletionQueue
		r.write(99)
		r.a.awaitSend(99, verbs.WCRDMAWrite)
		if n, err := r.a.ch.WaitThread(events[:], patience); n != 1 || err != nil {
			t.Fatalf("round %d: armed, a new completion, and no event: %d, %v", i, n, err)
		}
		if early {
			if _, err := r.a.ch.WaitThread(events[:], quiet); err != nil {
				t.Fatalf("round %d: %v", i, err)
			}
		}
		noEvent(t, r.a.ch)
	}
}

// armSolicited: only solicited or failed completions raise the event.
func armSolicited(t TB, p Pair) {
	r := newRig(t, p, setup{channel: true, separateCQs: true})
	cq := r.b.recvCQ
	send := func(id uint64, flags verbs.SendFlags) {
		r.a.post(verbs.SendWorkRequest{WRID: id, Opcode: verbs.OpSend, Flags: verbs.SendSignaled | flags, SGList: r.a.list(0, 8)})
		r.a.awaitSend(id, verbs.WCSend)
	}
	for range 3 {
		r1, r2, r3 := r.b.recv(0, 64), r.b.recv(0, 64), r.b.recv(0, 64)
		if arm(t, cq, true) {
			t.Fatalf("missed on an empty queue")
		}
		send(1, 0)
		r.b.awaitRecv(r1, verbs.WCRecv, 8)
		if p.EagerArm {
			awaitEvent(t, r.b.ch, cq)
			arm(t, cq, true)
		} else {
			noEvent(t, r.b.ch)
		}
		send(2, verbs.SendSolicited)
		awaitEvent(t, r.b.ch, cq)
		r.b.awaitRecv(r2, verbs.WCRecv, 8)
		// An arm for any completion is not weakened by one for solicited ones that follows.
		arm(t, cq, false)
		arm(t, cq, true)
		send(3, 0)
		awaitEvent(t, r.b.ch, cq)
		r.b.awaitRecv(r3, verbs.WCRecv, 8)
		noEvent(t, r.b.ch)
	}
	// What failed counts as solicited (IBA vol. 1, 11.4.2.2): a receive, and a send.
	rid := r.b.recv(0, 64)
	arm(t, cq, true)
	r.b.toError()
	awaitEvent(t, r.b.ch, cq)
	expect(t, cq, r.b.qp.QPN(), rid, verbs.WCFlushError)
	arm(t, r.a.sendCQ, true)
	r.a.toError()
	r.a.post(verbs.SendWorkRequest{WRID: 4, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.a.list(0, 8)})
	awaitEvent(t, r.a.ch, r.a.sendCQ)
	expect(t, r.a.sendCQ, r.a.qp.QPN(), 4, verbs.WCFlushError)
}

// serve reaps e's queue by the book (arm, poll again when missed, else wait) and calls f with
// every completion until f says that it is enough.
func (e *end) serve(thread bool, f func(wc verbs.WorkCompletion) (more bool, problem string)) string {
	if thread {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
	}
	var events [2]verbs.CompletionQueue
	var wcs [4]verbs.WorkCompletion
	for {
		for n := e.recvCQ.Poll(wcs[:]); n > 0; n = e.recvCQ.Poll(wcs[:]) {
			for _, wc := range wcs[:n] {
				if more, problem := f(wc); problem != "" || !more {
					return problem
				}
			}
		}
		missed, err := e.recvCQ.Arm(false)
		if err != nil {
			return err.Error()
		}
		if missed {
			continue
		}
		var n int
		if thread {
			n, err = e.ch.WaitThread(events[:], patience)
		} else {
			n, err = e.ch.Wait(events[:])
		}
		switch {
		case err != nil:
			return err.Error()
		case n == 0:
			return "a wake-up was lost: nothing came"
		}
	}
}

// notificationPingPong bounces a message many times between two reapers that sleep whenever their queue
// is empty. A lost notification stops it.
func notificationPingPong(t TB, p Pair) {
	for _, thread := range []bool{false, true} {
		const rounds = 600
		r := newRig(t, p, setup{channel: true})
		for _, e := range []*end{r.a, r.b} {
			for range 4 {
				e.recv(1024, 64)
			}
		}
		// The first serve, before the reapers start: a queue pair is posted to by one goroutine at a time.
		r.a.post(verbs.SendWorkRequest{Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.a.list(0, 32)})
		var wg sync.WaitGroup
		problems := make([]string, 2)
		for i, e := range []*end{r.a, r.b} {
			wg.Add(1)
			go func() {
				defer wg.Done()
				got := 0
				problems[i] = e.serve(thread, func(wc verbs.WorkCompletion) (bool, string) {
					if wc.Status != verbs.WCSuccess {
						return false, wc.Status.String()
					}
					if wc.Opcode != verbs.WCRecv {
						return true, ""
					}
					got++
					if n, err := e.qp.PostRecv([]verbs.RecvWorkRequest{{SGList: e.list(1024, 64)}}); n != 1 {
						return false, err.Error()
					}
					if got == rounds && e == r.a {
						return false, ""
					}
					if n, err := e.qp.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: e.list(0, 32)}}); n != 1 {
						return false, err.Error()
					}
					return got < rounds, ""
				})
				if problems[i] != "" { // free the other one
					r.a.ch.Wake()
					r.b.ch.Wake()
				}
			}()
		}
		start := time.AfterFunc(3*patience, func() {
			r.a.ch.Wake()
			r.b.ch.Wake()
		})
		wg.Wait()
		start.Stop()
		for i, s := range problems {
			if s != "" {
				t.Fatalf("side %c (thread %v): %s", 'A'+i, thread, s)
			}
		}
	}
}

// twoQueuesOneChannel: events name their queue; a destroyed queue's events do not appear.
func twoQueuesOneChannel(t TB, p Pair) {
	r := newRig(t, p, setup{channel: true, separateCQs: true})
	arm(t, r.b.sendCQ, false)
	arm(t, r.b.recvCQ, false)
	rid := r.b.recv(0, 64)
	r.a.post(verbs.SendWorkRequest{WRID: 1, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.a.list(0, 8)})
	r.a.awaitSend(1, verbs.WCSend)
	awaitEvent(t, r.b.ch, r.b.recvCQ)
	r.b.awaitRecv(rid, verbs.WCRecv, 8)
	r.b.post(verbs.SendWorkRequest{WRID: 2, Opcode: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGList: r.b.list(0, 8), RemoteAddr: r.a.mr.Addr(), RKey: r.a.mr.RKey()})
	awaitEvent(t, r.b.ch, r.b.sendCQ)
	r.b.awaitSend(2, verbs.WCRDMAWrite)

	// Both at once, taken with room for both.
	arm(t, r.b.sendCQ, false)
	arm(t, r.b.recvCQ, false)
	rid = r.b.recv(0, 64)
	r.a.post(verbs.SendWorkRequest{WRID: 3, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.a.list(0, 8)})
	r.b.post(verbs.SendWorkRequest{WRID: 4, Opcode: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGList: r.b.list(0, 8), RemoteAddr: r.a.mr.Addr(), RKey: r.a.mr.RKey()})
	r.a.awaitSend(3, verbs.WCSend)
	r.b.awaitRecv(rid, verbs.WCRecv, 8)
	r.b.awaitSend(4, verbs.WCRDMAWrite)
	seen := map[verbs.CompletionQueue]int{}
	for len(seen) < 2 {
		var events [4]verbs.CompletionQueue
		n, err := r.b.ch.WaitThread(events[:], patience)
		if err != nil || n == 0 {
			t.Fatalf("WaitThread = %d, %v with %d of 2 events", n, err, len(seen))
		}
		for _, cq := range events[:n] {
			seen[cq]++
		}
	}
	if seen[r.b.sendCQ] != 1 || seen[r.b.recvCQ] != 1 {
		t.Errorf("events per queue: %v", seen)
	}

	// An unread event goes with its queue.
	arm(t, r.b.sendCQ, false)
	r.b.post(verbs.SendWorkRequest{WRID: 5, Opcode: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGList: r.b.list(0, 8), RemoteAddr: r.a.mr.Addr(), RKey: r.a.mr.RKey()})
	r.b.awaitSend(5, verbs.WCRDMAWrite)
	time.Sleep(quiet)
	for _, x := range []interface{ Destroy() error }{r.b.qp, r.b.sendCQ} {
		if err := x.Destroy(); err != nil {
			t.Fatalf("destroy: %v", err)
		}
	}
	noEvent(t, r.b.ch)
}

func wakeAndTimeout(t TB, p Pair) {
	r := newRig(t, p, setup{channel: true})
	var events [2]verbs.CompletionQueue
	start := time.Now()
	if n, err := r.a.ch.WaitThread(events[:], quiet); n != 0 || err != nil {
		t.Fatalf("WaitThread = %d, %v", n, err)
	}
	if d := time.Since(start); d < quiet || d > patience/2 {
		t.Errorf("a timeout of %v took %v", quiet, d)
	}
	if n, err := r.a.ch.WaitThread(events[:], 0); n != 0 || err != nil {
		t.Errorf("WaitThread(0) = %d, %v", n, err)
	}
	waits := []func() (int, error){
		func() (int, error) { return r.a.ch.Wait(events[:]) },
		func() (int, error) { return r.a.ch.WaitThread(events[:], -1) },
		func() (int, error) { return r.a.ch.WaitThread(events[:], patience) },
	}
	for round := range 30 {
		for i, wait := range waits {
			if (round+i)%2 == 0 { // before, or while waiting
				r.a.ch.Wake()
			} else {
				time.AfterFunc(time.Duration(round)*100*time.Microsecond, r.a.ch.Wake)
			}
			if n, err := within(t, "Wait with a Wake", wait); n != 0 || err != nil {
				t.Fatalf("round %d, wait %d: %d, %v; want to be woken", round, i, n, err)
			}
		}
	}
	// Wakes do not pile up, and leave nothing behind.
	for range 5 {
		r.a.ch.Wake()
	}
	if n, err := r.a.ch.WaitThread(events[:], patience); n != 0 || err != nil {
		t.Errorf("after five wakes: %d, %v", n, err)
	}
	noEvent(t, r.a.ch)
	// Events still come.
	arm(t, r.a.sendCQ, false)
	r.write(1)
	awaitEvent(t, r.a.ch, r.a.sendCQ)
	r.a.awaitSend(1, verbs.WCRDMAWrite)
}

func closeChannelWithWaiter(t TB, p Pair) {
	for _, thread := range []bool{false, true} {
		ch, err := p.A.Context.CreateCompletionChannel()
		if err != nil {
			t.Fatalf("%v", err)
		}
		cq, err := p.A.Context.CreateCQ(verbs.CQInit{Capacity: 8, Channel: ch})
		if err != nil {
			t.Fatalf("%v", err)
		}
		result := make(chan error, 1)
		go func() {
			var events [1]verbs.CompletionQueue
			var n int
			var err error
			if thread {
				n, err = ch.WaitThread(events[:], patience)
			} else {
				n, err = ch.Wait(events[:])
			}
			if n != 0 && err == nil {
				err = errors.New("an event on an idle channel")
			}
			result <- err
		}()
		time.Sleep(20 * time.Millisecond)
		if err := ch.Close(); err == nil {
			t.Errorf("a channel was closed under its queue")
		}
		select {
		case err := <-result:
			t.Fatalf("a refused Close ended the wait: %v", err)
		case <-time.After(quiet):
		}
		if err := cq.Destroy(); err != nil {
			t.Fatalf("%v", err)
		}
		if err := ch.Close(); err != nil {
			t.Fatalf("Close: %v", err)
		}
		select {
		case err := <-result:
			if !errors.Is(err, verbs.ErrClosed) {
				t.Errorf("Wait after Close: %v", err)
			}
		case <-time.After(patience):
			t.Fatalf("Close did not wake the waiter (thread %v)", thread)
		}
		var events [1]verbs.CompletionQueue
		if n, err := ch.Wait(events[:]); n != 0 || !errors.Is(err, verbs.ErrClosed) {
			t.Errorf("Wait on a closed channel = %d, %v", n, err)
		}
		if n, err := ch.WaitThread(events[:], patience); n != 0 || !errors.Is(err, verbs.ErrClosed) {
			t.Errorf("WaitThread on a closed channel = %d, %v", n, err)
		}
		ch.Wake()
		if err := ch.Close(); !errors.Is(err, verbs.ErrClosed) {
			t.Errorf("Close twice: %v", err)
		}
	}
}
