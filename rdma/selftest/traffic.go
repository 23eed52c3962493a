package selftest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/verbstest"
)

// pair is two connected queue pairs of one opened device, A and B.
type pair struct {
	ctx    verbs.Context
	pd     verbs.ProtectionDomain
	ch     verbs.CompletionChannel
	a, b   end
	undo   []func() error
	closer io.Closer
}

type end struct {
	cq  verbs.CompletionQueue
	qp  verbs.QueuePair
	mem *hostmem.Region
	mr  verbs.MemoryRegion
}

const (
	slots    = 8
	slotSize = 256 << 10
)

// withPair opens the device, connects a pair, runs f and closes all.
func withPair(o *Options, f func(*pair) error) (err error) {
	p := &pair{}
	defer func() {
		for i := len(p.undo) - 1; i >= 0; i-- {
			if e := p.undo[i](); e != nil && err == nil {
				err = fmt.Errorf("clean up: %w", e)
			}
		}
	}()
	if p.ctx, p.closer, err = o.Open(); err != nil {
		return err
	}
	p.undo = append(p.undo, p.closer.Close)
	side, err := o.side(p.ctx)
	if err != nil {
		return err
	}
	if p.pd, err = p.ctx.AllocPD(); err != nil {
		return err
	}
	p.undo = append(p.undo, p.pd.Dealloc)
	if p.ch, err = p.ctx.CreateCompletionChannel(); err != nil {
		return err
	}
	p.undo = append(p.undo, p.ch.Close)
	for _, e := range []*end{&p.a, &p.b} {
		if err := p.make(e); err != nil {
			return err
		}
	}
	if err := p.connect(side, &p.a, &p.b); err != nil {
		return err
	}
	if err := p.connect(side, &p.b, &p.a); err != nil {
		return err
	}
	return f(p)
}

func (p *pair) make(e *end) (err error) {
	if e.cq, err = p.ctx.CreateCQ(verbs.CQInit{Capacity: 8 * slots, Channel: p.ch}); err != nil {
		return err
	}
	p.undo = append(p.undo, e.cq.Destroy)
	if e.mem, err = hostmem.Alloc(slots * slotSize); err != nil {
		return err
	}
	p.undo = append(p.undo, e.mem.Free)
	if e.mr, err = p.pd.RegisterMemory(e.mem, verbs.AccessLocalWrite|verbs.AccessRemoteRead|verbs.AccessRemoteWrite); err != nil {
		return err
	}
	p.undo = append(p.undo, e.mr.Deregister)
	if e.qp, err = p.pd.CreateQP(verbs.QPInit{SendCQ: e.cq, RecvCQ: e.cq,
		Cap: verbs.QPCap{MaxSendWR: 2 * slots, MaxRecvWR: 2 * slots, MaxSendSGE: 1, MaxRecvSGE: 1}}); err != nil {
		return err
	}
	p.undo = append(p.undo, e.qp.Destroy)
	return nil
}

func (p *pair) connect(s verbstest.Side, e, to *end) error {
	port, err := p.ctx.QueryPort(s.Port)
	if err != nil {
		return err
	}
	av := verbs.AddressVector{Port: s.Port, DLID: port.LID}
	if port.LinkLayer != verbs.LinkInfiniBand {
		g, err := p.ctx.QueryGID(s.Port, s.GIDIndex)
		if err != nil {
			return err
		}
		av = verbs.AddressVector{Port: s.Port, IsGlobal: true, DGID: g.GID, SGIDIndex: uint8(s.GIDIndex), HopLimit: 64}
	}
	for _, step := range []struct {
		attr verbs.QPAttr
		mask verbs.QPAttrMask
	}{
		{verbs.QPAttr{State: verbs.QPInitState, Port: s.Port, Access: verbs.AccessRemoteRead | verbs.AccessRemoteWrite}, verbs.QPMaskToInit},
		{verbs.QPAttr{State: verbs.QPReadyToReceive, AV: av, PathMTU: port.ActiveMTU, DestQPN: to.qp.QPN(), RQPSN: 7, MaxDestRdAtomic: 4, MinRNRTimer: 12}, verbs.QPMaskToRTR},
		{verbs.QPAttr{State: verbs.QPReadyToSend, Timeout: 17, RetryCount: 7, RNRRetry: 7, SQPSN: 7, MaxRdAtomic: 4}, verbs.QPMaskToRTS},
	} {
		if err := e.qp.Modify(&step.attr, step.mask); err != nil {
			return fmt.Errorf("connect: to %s: %w", step.attr.State, err)
		}
	}
	return nil
}

var errSilent = errors.New("no completion for 10 s")

// wait polls cq for one completion.
func wait(ctx context.Context, cq verbs.CompletionQueue) (verbs.WorkCompletion, error) {
	var wc [1]verbs.WorkCompletion
	for spins, end := 0, time.Now().Add(10*time.Second); ; spins++ {
		if cq.Poll(wc[:]) == 1 {
			if wc[0].Status != verbs.WCSuccess {
				return wc[0], &verbs.StatusError{Status: wc[0].Status, VendorErr: wc[0].VendorErr, QPN: wc[0].QPN, Doing: "self-test"}
			}
			return wc[0], nil
		}
		if spins%64 == 63 {
			runtime.Gosched()
			if err := context.Cause(ctx); err != nil {
				return wc[0], err
			}
			if time.Now().After(end) {
				return wc[0], errSilent
			}
		}
	}
}

func (e *end) sge(slot, n int) []verbs.SGE {
	return []verbs.SGE{{Addr: e.mr.Addr() + uint64(slot)*slotSize, Length: uint32(n), LKey: e.mr.LKey()}}
}

func (e *end) bytes(slot, n int) []byte { return e.mem.Slice(slot*slotSize, n) }

// post posts one request with slot as its identifier.
func (e *end) post(op verbs.SendOpcode, slot, n int, to *end) error {
	wr := [1]verbs.SendWorkRequest{{WRID: uint64(slot), Opcode: op, Flags: verbs.SendSignaled, SGList: e.sge(slot, n),
		RemoteAddr: to.mr.Addr() + uint64(slot)*slotSize, RKey: to.mr.RKey()}}
	_, err := e.qp.PostSend(wr[:])
	return err
}

func (e *end) recv(slot, n int) error {
	_, err := e.qp.PostRecv([]verbs.RecvWorkRequest{{WRID: 1000 + uint64(slot), SGList: e.sge(slot, n)}})
	return err
}

func fill(b []byte, r *rand.Rand) {
	for i := 0; i+8 <= len(b); i += 8 {
		v := r.Uint64()
		for k := range 8 {
			b[i+k] = byte(v >> (8 * k))
		}
	}
}

// traffic keeps all slots busy with SENDs, WRITEs and READs of random size and compares every byte.
func traffic(ctx context.Context, p *pair, r *Report, d time.Duration) error {
	rnd := rand.New(rand.NewPCG(1, 2))
	type job struct {
		op verbs.SendOpcode
		n  int
	}
	var jobs [slots]job
	ops := []verbs.SendOpcode{verbs.OpSend, verbs.OpRDMAWrite, verbs.OpRDMARead}
	start := func(s int) error {
		j := job{ops[rnd.IntN(len(ops))], 1 + rnd.IntN(slotSize)}
		if rnd.IntN(3) == 0 {
			j.n = 1 + rnd.IntN(300)
		}
		jobs[s] = j
		from, to := &p.a, &p.b
		if j.op == verbs.OpRDMARead {
			from, to = to, from
		}
		fill(from.bytes(s, j.n), rnd)
		clear(to.bytes(s, j.n))
		if j.op == verbs.OpSend {
			if err := p.b.recv(s, j.n); err != nil {
				return err
			}
		}
		return p.a.post(j.op, s, j.n, &p.b)
	}
	moved, requests := 0, 0
	deadline := time.Now().Add(d)
	for time.Now().Before(deadline) {
		for s := range slots {
			if err := start(s); err != nil {
				return err
			}
		}
		for range slots {
			if _, err := wait(ctx, p.a.cq); err != nil {
				return err
			}
		}
		for s := range slots {
			if jobs[s].op == verbs.OpSend {
				wc, err := wait(ctx, p.b.cq)
				if err != nil {
					return err
				}
				if k := int(wc.WRID) - 1000; k < 0 || k >= slots || int(wc.ByteLen) != jobs[k].n {
					return fmt.Errorf("receive %d of %d bytes does not fit any SEND", wc.WRID, wc.ByteLen)
				}
			}
		}
		for s, j := range jobs {
			if !bytes.Equal(p.a.bytes(s, j.n), p.b.bytes(s, j.n)) {
				return fmt.Errorf("data differ after opcode %d of %d bytes in slot %d", j.op, j.n, s)
			}
			moved += j.n
			requests++
		}
	}
	r.figure("checked requests", float64(requests), "")
	r.figure("checked data", float64(moved)/1e6, "MB")
	return nil
}

// notifications arms, sends and waits, in the poller and on a thread, and tries the three answers of an arm.
func notifications(ctx context.Context, p *pair, r *Report, d time.Duration) error {
	var took []float64
	events := make([]verbs.CompletionQueue, 1)
	deadline := time.Now().Add(d)
	for i := 0; time.Now().Before(deadline); i++ {
		if err := p.b.recv(0, 64); err != nil {
			return err
		}
		missed, err := p.b.cq.Arm(i%5 == 4)
		if err != nil {
			return err
		}
		if missed {
			return fmt.Errorf("cycle %d: an arm says that it missed an entry of an empty queue", i)
		}
		start := time.Now()
		wr := [1]verbs.SendWorkRequest{{WRID: 1, Opcode: verbs.OpSend, Flags: verbs.SendSignaled | verbs.SendSolicited, SGList: p.a.sge(0, 64)}}
		if _, err := p.a.qp.PostSend(wr[:]); err != nil {
			return err
		}
		n := 0
		if i%2 == 0 {
			stop := time.AfterFunc(10*time.Second, p.ch.Wake)
			n, err = p.ch.Wait(events)
			stop.Stop()
		} else {
			n, err = p.ch.WaitThread(events, 10*time.Second)
		}
		if err != nil {
			return err
		}
		if n != 1 {
			return fmt.Errorf("cycle %d: no event within 10 s of an armed queue's completion", i)
		}
		if events[0] != p.b.cq {
			return fmt.Errorf("cycle %d: an event of a queue that was never armed", i)
		}
		took = append(took, float64(time.Since(start))/1e3)
		for _, q := range []verbs.CompletionQueue{p.b.cq, p.a.cq} {
			if _, err := wait(ctx, q); err != nil {
				return err
			}
		}
		if err := context.Cause(ctx); err != nil {
			return err
		}
	}
	slices.Sort(took)
	r.figure("arm/event cycles", float64(len(took)), "")
	r.percentiles("SEND to event", took)
	return nil
}

// latency measures one request at a time, polled.
func latency(ctx context.Context, p *pair, r *Report, d time.Duration) error {
	deadline := time.Now().Add(d / 2)
	var took []float64
	for time.Now().Before(deadline) {
		if err := errors.Join(p.b.recv(0, 64), p.a.recv(0, 64)); err != nil {
			return err
		}
		start := time.Now()
		left := map[*end]int{&p.a: 2, &p.b: 2} // a receive and a send each
		for _, s := range [][2]*end{{&p.a, &p.b}, {&p.b, &p.a}} {
			if err := s[0].post(verbs.OpSend, 0, 64, s[1]); err != nil {
				return err
			}
			for seen := false; !seen; left[s[1]]-- {
				wc, err := wait(ctx, s[1].cq)
				if err != nil {
					return err
				}
				seen = wc.Opcode == verbs.WCRecv
			}
		}
		took = append(took, float64(time.Since(start))/2e3)
		for e, n := range left {
			for range n {
				if _, err := wait(ctx, e.cq); err != nil {
					return err
				}
			}
		}
	}
	slices.Sort(took)
	r.percentiles("SEND 64 B, one way", took)
	return nil
}

// bandwidth keeps all slots busy with large requests.
func bandwidth(ctx context.Context, p *pair, r *Report, d time.Duration) error {
	for _, op := range []struct {
		name string
		code verbs.SendOpcode
	}{{"RDMA WRITE 256 KiB", verbs.OpRDMAWrite}, {"RDMA READ 256 KiB", verbs.OpRDMARead}} {
		start := time.Now()
		done := 0
		for s := range slots {
			if err := p.a.post(op.code, s, slotSize, &p.b); err != nil {
				return err
			}
		}
		for time.Since(start) < d/2 {
			wc, err := wait(ctx, p.a.cq)
			if err != nil {
				return err
			}
			done++
			if err := p.a.post(op.code, int(wc.WRID), slotSize, &p.b); err != nil {
				return err
			}
		}
		rate := float64(done) * slotSize / time.Since(start).Seconds() / 1e6
		for range slots {
			if _, err := wait(ctx, p.a.cq); err != nil {
				return err
			}
		}
		r.figure(op.name, rate, "MB/s")
	}
	return nil
}

func (r *Report) figure(name string, v float64, unit string) {
	r.Figures = append(r.Figures, Figure{name, v, unit})
}

func (r *Report) percentiles(name string, sorted []float64) {
	if n := len(sorted); n > 0 {
		r.figure(name+", median", sorted[n/2], "us")
		r.figure(name+", 99 %", sorted[n*99/100], "us")
	}
}
