package softroce

import (
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
)

func descriptors(t *testing.T) int {
	t.Helper()
	es, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(es)
}

// A device closes at any moment of a transfer to a peer that is gone, with waiters of both kinds, at once and without a trace.
func TestCloseAnytime(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 4))
	var goroutines, fds int
	for round := range 40 {
		if round == 5 {
			goroutines, fds = runtime.NumGoroutine(), descriptors(t)
		}
		d, err := Open(netip.Addr{})
		if err != nil {
			t.Fatal(err)
		}
		pd, err := d.AllocPD()
		if err != nil {
			t.Fatal(err)
		}
		ch, err := d.CreateCompletionChannel()
		if err != nil {
			t.Fatal(err)
		}
		cq, err := d.CreateCQ(verbs.CQInit{Capacity: 64, Channel: ch})
		if err != nil {
			t.Fatal(err)
		}
		mem, err := hostmem.Alloc(1 << 20)
		if err != nil {
			t.Fatal(err)
		}
		mr, err := pd.RegisterMemory(mem, verbs.AccessLocalWrite)
		if err != nil {
			t.Fatal(err)
		}
		qp, err := pd.CreateQP(verbs.QPInit{SendCQ: cq, RecvCQ: cq, Cap: verbs.QPCap{MaxSendWR: 16, MaxRecvWR: 16, MaxSendSGE: 1, MaxRecvSGE: 1}})
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range []struct {
			a    verbs.QPAttr
			mask verbs.QPAttrMask
		}{
			{verbs.QPAttr{State: verbs.QPInitState, Port: 1}, verbs.QPMaskToInit},
			{verbs.QPAttr{State: verbs.QPReadyToReceive, AV: verbs.AddressVector{DGID: verbs.GIDFromAddr(netip.MustParseAddr("127.255.1.1")), IsGlobal: true},
				PathMTU: verbs.MTU4096, DestQPN: 5, MaxDestRdAtomic: 1, MinRNRTimer: 12}, verbs.QPMaskToRTR},
			{verbs.QPAttr{State: verbs.QPReadyToSend, MaxRdAtomic: 1, Timeout: 8, RetryCount: 7, RNRRetry: 7}, verbs.QPMaskToRTS}, // 1 ms
		} {
			if err := qp.Modify(&m.a, m.mask); err != nil {
				t.Fatal(err)
			}
		}
		waited := make(chan error, 1)
		go func() {
			events := make([]verbs.CompletionQueue, 1)
			for {
				cq.Arm(false)
				var err error
				if round%2 == 0 {
					_, err = ch.Wait(events)
				} else {
					_, err = ch.WaitThread(events, -1)
				}
				if err != nil {
					waited <- err
					return
				}
			}
		}()
		for range 4 {
			qp.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: []verbs.SGE{{Addr: mr.Addr(), Length: 1 << 18, LKey: mr.LKey()}}}})
		}
		time.Sleep(time.Duration(r.IntN(12)) * time.Millisecond)
		start := time.Now()
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		mem.Free()
		if took := time.Since(start); took > time.Second {
			t.Errorf("Close took %v", took)
		}
		select {
		case <-waited:
		case <-time.After(5 * time.Second):
			t.Fatal("Close left a waiter behind")
		}
	}
	for limit := time.Now().Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		g, f := runtime.NumGoroutine(), descriptors(t)
		if g <= goroutines && f <= fds {
			break
		}
		if time.Now().After(limit) {
			t.Fatalf("%d goroutines and %d descriptors, were %d and %d", g, f, goroutines, fds)
		}
	}
}
