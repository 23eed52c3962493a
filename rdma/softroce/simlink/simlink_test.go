package simlink

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/softroce"
	"srp-initiator/rdma/softroce/simnet"
	"srp-initiator/rdma/verbs"
)

type end struct {
	d    *softroce.Device
	pd   verbs.ProtectionDomain
	ch   verbs.CompletionChannel
	cq   verbs.CompletionQueue
	qp   verbs.QueuePair
	mem  *hostmem.Region
	mr   verbs.MemoryRegion
	conn cm.Conn
}

func newEnd(d *softroce.Device) (e *end, err error) {
	e = &end{d: d}
	step := func(f func() error) {
		if err == nil {
			err = f()
		}
	}
	step(func() (err error) { e.pd, err = d.AllocPD(); return })
	step(func() (err error) { e.ch, err = d.CreateCompletionChannel(); return })
	step(func() (err error) { e.cq, err = d.CreateCQ(verbs.CQInit{Capacity: 256, Channel: e.ch}); return })
	step(func() (err error) {
		e.qp, err = e.pd.CreateQP(verbs.QPInit{SendCQ: e.cq, RecvCQ: e.cq, SignalAll: true, Cap: verbs.QPCap{MaxSendWR: 64, MaxRecvWR: 64, MaxSendSGE: 1, MaxRecvSGE: 1}})
		return
	})
	step(func() (err error) { e.mem, err = hostmem.Alloc(1 << 20); return })
	step(func() (err error) {
		e.mr, err = e.pd.RegisterMemory(e.mem, verbs.AccessLocalWrite|verbs.AccessRemoteWrite|verbs.AccessRemoteRead)
		return
	})
	return e, err
}

func (e *end) close() {
	e.conn.Disconnect()
	select {
	case <-e.conn.Done():
	case <-time.After(time.Minute):
	}
	e.conn.Close()
	e.qp.Destroy()
	e.cq.Destroy()
	e.ch.Close()
	e.mr.Deregister()
	e.pd.Dealloc()
	e.mem.Free()
}

// wait reaps n completions by notifications.
func (e *end) wait(n int) error {
	var wcs [16]verbs.WorkCompletion
	var evs [4]verbs.CompletionQueue
	for {
		for k := e.cq.Poll(wcs[:]); k > 0; k = e.cq.Poll(wcs[:]) {
			for _, wc := range wcs[:k] {
				if wc.Status != verbs.WCSuccess {
					return fmt.Errorf("completion %+v", wc)
				}
				n--
			}
		}
		if n == 0 {
			return nil
		}
		if missed, err := e.cq.Arm(false); err != nil {
			return err
		} else if missed {
			continue
		}
		if _, err := e.ch.Wait(evs[:]); err != nil {
			return err
		}
	}
}

func (e *end) sge(off, n int) []verbs.SGE {
	return []verbs.SGE{{Addr: e.mr.Addr() + uint64(off), Length: uint32(n), LKey: e.mr.LKey()}}
}

// session connects two devices, runs random requests that are verified, and disconnects. It returns an error or nil; time is the bubble's.
func session(seed uint64, f simnet.Faults) (sa, sb softroce.Stats, took time.Duration, err error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r := rand.New(rand.NewPCG(seed, 3))
	net := simnet.New(seed)
	net.SetDefault(f)
	go net.Drive(ctx)
	mtu := verbs.MTU256 + verbs.MTU(r.IntN(5))
	var ends [2]*end
	for i := range ends {
		d, derr := Open(net, netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}), mtu)
		if derr != nil {
			return sa, sb, 0, derr
		}
		defer d.Close()
		if ends[i], err = newEnd(d); err != nil {
			return
		}
	}
	a, b := ends[0], ends[1]
	l, err := b.d.Connector().Listen(netip.AddrPort{}, 1)
	if err != nil {
		return
	}
	start := time.Now()
	p := cm.ConnParam{ResponderResources: 4, InitiatorDepth: 4, RetryCount: 7, RNRRetryCount: 7, Timeout: 5 * time.Minute}
	accepted := make(chan error, 1)
	go func() {
		accepted <- func() (err error) {
			if b.conn, err = l.Accept(ctx); err != nil {
				return err
			}
			if err = b.conn.InitQP(b.qp); err != nil {
				return err
			}
			return b.conn.Accept(ctx, p)
		}()
	}()
	if a.conn, err = a.d.Connector().Resolve(ctx, netip.AddrPort{}, cm.Addr{IP: l.Addr()}); err != nil {
		return
	}
	if err = a.conn.InitQP(a.qp); err != nil {
		return
	}
	if _, err = a.conn.Connect(ctx, p); err != nil {
		return sa, sb, 0, fmt.Errorf("connect: %w", err)
	}
	if err = <-accepted; err != nil {
		return sa, sb, 0, fmt.Errorf("accept: %w", err)
	}
	for round := range 6 {
		depth := 1 + r.IntN(8)
		for i := range depth {
			b.qp.PostRecv([]verbs.RecvWorkRequest{{WRID: uint64(i), SGList: b.sge(i*32768, 16384)}})
		}
		for i := range a.mem.Bytes()[:1<<19] {
			a.mem.Bytes()[i] = byte(r.Uint32())
		}
		for i := range b.mem.Bytes()[1<<19:] {
			b.mem.Bytes()[1<<19+i] = byte(r.Uint32())
		}
		var wrs []verbs.SendWorkRequest
		var checks []func() bool
		for i := range depth {
			n := r.IntN(16384)
			off := i * 32768
			wrs = append(wrs, verbs.SendWorkRequest{Opcode: verbs.OpRDMAWrite, SGList: a.sge(off+16384, n), RemoteAddr: b.mr.Addr() + uint64(off) + 16384, RKey: b.mr.RKey()})
			checks = append(checks, func() bool { return bytes.Equal(a.mem.Slice(off+16384, n), b.mem.Slice(off+16384, n)) })
			if r.IntN(2) == 0 {
				k := r.IntN(16384)
				wrs = append(wrs, verbs.SendWorkRequest{Opcode: verbs.OpRDMARead, SGList: a.sge(1<<19+off, k), RemoteAddr: b.mr.Addr() + 1<<19 + uint64(off), RKey: b.mr.RKey()})
				checks = append(checks, func() bool { return bytes.Equal(a.mem.Slice(1<<19+off, k), b.mem.Slice(1<<19+off, k)) })
			}
			wrs = append(wrs, verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: a.sge(off, n)})
			checks = append(checks, func() bool { return bytes.Equal(a.mem.Slice(off, n), b.mem.Slice(off, n)) })
		}
		if _, err = a.qp.PostSend(wrs); err != nil {
			return
		}
		if err = a.wait(len(wrs)); err != nil {
			return sa, sb, 0, fmt.Errorf("round %d, requester: %w", round, err)
		}
		if err = b.wait(depth); err != nil {
			return sa, sb, 0, fmt.Errorf("round %d, responder: %w", round, err)
		}
		for i, ok := range checks {
			if !ok() {
				return sa, sb, 0, fmt.Errorf("round %d: transfer %d: wrong bytes", round, i)
			}
		}
	}
	took = time.Since(start)
	sa, sb = a.d.Stats(), b.d.Stats()
	// A second node that knocks meanwhile does no harm, and both ends let go.
	go b.close()
	a.close()
	<-b.conn.Done()
	if e := b.conn.Err(); !errors.Is(e, cm.ErrDisconnected) {
		err = e
	}
	time.Sleep(30 * time.Second) // timewait
	return
}

func TestQuietSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sa, sb, took, err := session(1, simnet.Faults{Delay: 50 * time.Microsecond})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range []softroce.Stats{sa, sb} {
			tr := s.Transport
			if s.ICRCErrors+s.Malformed+tr.Retransmits+tr.Timeouts+tr.Duplicates+tr.OutOfOrder+s.CM.Retransmits+s.CM.Duplicates != 0 {
				t.Errorf("%+v", s)
			}
		}
		t.Logf("%v of virtual time", took)
	})
}

func TestBadNetwork(t *testing.T) {
	n := uint64(60)
	if testing.Short() {
		n = 4
	}
	var retransmits, icrc uint64
	for seed := range n {
		r := rand.New(rand.NewPCG(seed, 9))
		f := simnet.Faults{Loss: r.Float64() * .05, Duplicate: r.Float64() * .05, Reorder: r.Float64() * .05, Corrupt: r.Float64() * .05,
			Delay: 20 * time.Microsecond, Jitter: 20 * time.Microsecond, ReorderDelay: time.Millisecond}
		synctest.Test(t, func(t *testing.T) {
			sa, sb, took, err := session(seed, f)
			if err != nil {
				t.Errorf("seed %d, %+v: %v", seed, f, err)
			}
			retransmits += sa.Transport.Retransmits
			icrc += sa.ICRCErrors + sb.ICRCErrors
			if took > 5*time.Minute {
				t.Errorf("seed %d took %v", seed, took)
			}
		})
		if t.Failed() {
			return
		}
	}
	if retransmits == 0 || icrc == 0 {
		t.Errorf("the network was not bad: %d packets sent again, %d bad ICRCs", retransmits, icrc)
	}
	t.Logf("%d sessions, %d packets sent again, %d bad ICRCs", n, retransmits, icrc)
}
