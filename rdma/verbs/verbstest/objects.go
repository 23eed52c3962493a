package verbstest

import (
	"errors"
	"time"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
)

func queries(t TB, p Pair) {
	for _, s := range []Side{p.A, p.B} {
		c := s.Context
		if c.Name() == "" || c.Provider() == "" {
			t.Errorf("name %q, provider %q", c.Name(), c.Provider())
		}
		d, err := c.QueryDevice()
		if err != nil {
			t.Fatalf("QueryDevice: %v", err)
		}
		for what, v := range map[string]int{"MaxQP": d.MaxQP, "MaxQPWR": d.MaxQPWR, "MaxSGE": d.MaxSGE, "MaxCQ": d.MaxCQ, "MaxCQE": d.MaxCQE,
			"MaxMR": d.MaxMR, "MaxPD": d.MaxPD, "MaxQPReadAtom": d.MaxQPReadAtom, "MaxQPInitRdAtom": d.MaxQPInitRdAtom,
			"PhysPorts": d.PhysPorts, "CompVectors": d.CompVectors} {
			if v <= 0 {
				t.Errorf("%s is %d", what, v)
			}
		}
		if d.NodeGUID == 0 || d.MaxMRSize == 0 {
			t.Errorf("node GUID %#x, largest region %d", d.NodeGUID, d.MaxMRSize)
		}
		port, err := c.QueryPort(s.Port)
		if err != nil {
			t.Fatalf("QueryPort: %v", err)
		}
		if port.State != verbs.PortActive || port.ActiveMTU.Bytes() == 0 || port.MaxMTU < port.ActiveMTU || port.MaxMsgSize == 0 ||
			port.GIDTableLen <= 0 || port.PKeyTblLen <= 0 || port.LinkLayer == verbs.LinkUnspecified {
			t.Errorf("port %+v", port)
		}
		for _, bad := range []uint8{0, uint8(d.PhysPorts + 1), 255} {
			if _, err := c.QueryPort(bad); err == nil {
				t.Errorf("QueryPort(%d) succeeded", bad)
			}
		}
		if port.LinkLayer == verbs.LinkEthernet {
			e, err := c.QueryGID(s.Port, s.GIDIndex)
			if err != nil || e.GID.IsZero() || e.Index != s.GIDIndex {
				t.Errorf("QueryGID(%d) = %+v, %v", s.GIDIndex, e, err)
			}
		}
		if _, err := c.QueryGID(s.Port, port.GIDTableLen); !errors.Is(err, verbs.ErrNoEntry) {
			t.Errorf("QueryGID past the end: %v", err)
		}
		if _, err := c.QueryGID(s.Port, -1); err == nil {
			t.Errorf("QueryGID(-1) succeeded")
		}
		if k, err := c.QueryPKey(s.Port, 0); err != nil || k&0x7fff == 0 {
			t.Errorf("QueryPKey(0) = %#x, %v", k, err)
		}
		if _, err := c.QueryPKey(s.Port, port.PKeyTblLen); !errors.Is(err, verbs.ErrNoEntry) {
			t.Errorf("QueryPKey past the end: %v", err)
		}
	}
}

// objects makes and destroys everything many times; identifiers stay sane.
func objects(t TB, p Pair) {
	c := p.A.Context
	for range 20 {
		pd, err := c.AllocPD()
		if err != nil {
			t.Fatalf("AllocPD: %v", err)
		}
		if pd.Context() != c {
			t.Errorf("the domain's context is another")
		}
		ch, err := c.CreateCompletionChannel()
		if err != nil {
			t.Fatalf("CreateCompletionChannel: %v", err)
		}
		cq, err := c.CreateCQ(verbs.CQInit{Capacity: 10, Channel: ch, Vector: 7})
		if err != nil {
			t.Fatalf("CreateCQ: %v", err)
		}
		if cq.Cookie() != nil {
			t.Errorf("a cookie from nowhere")
		}
		qp, err := pd.CreateQP(verbs.QPInit{SendCQ: cq, RecvCQ: cq, Cap: verbs.QPCap{MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 1}})
		if err != nil {
			t.Fatalf("CreateQP: %v", err)
		}
		mem, err := hostmem.Alloc(5000)
		if err != nil {
			t.Fatalf("%v", err)
		}
		mr, err := pd.RegisterMemory(mem, verbs.AccessLocalWrite)
		if err != nil {
			t.Fatalf("RegisterMemory: %v", err)
		}
		if mr.Addr() != mem.Addr() || mr.Len() != mem.Len() {
			t.Errorf("region %#x of %d bytes for memory %#x of %d", mr.Addr(), mr.Len(), mem.Addr(), mem.Len())
		}
		for _, step := range []struct {
			what string
			f    func() error
		}{{"destroy QP", qp.Destroy}, {"deregister", mr.Deregister}, {"destroy CQ", cq.Destroy}, {"close channel", ch.Close}, {"dealloc PD", pd.Dealloc}} {
			if err := step.f(); err != nil {
				t.Fatalf("%s: %v", step.what, err)
			}
			if err := step.f(); !errors.Is(err, verbs.ErrClosed) {
				t.Errorf("%s twice: %v", step.what, err)
			}
		}
		mem.Free()
		if n := cq.Poll(make([]verbs.WorkCompletion, 1)); n != 0 {
			t.Errorf("a destroyed queue holds %d entries", n)
		}
	}
	for _, bad := range []int{0, -1, 1 << 30} {
		if cq, err := c.CreateCQ(verbs.CQInit{Capacity: bad}); err == nil {
			t.Errorf("a queue of %d entries was made", bad)
			cq.Destroy()
		}
	}
}

func registrationRules(t TB, p Pair) {
	r := newRig(t, p, setup{})
	mem, err := hostmem.Alloc(3 * 4096)
	if err != nil {
		t.Fatalf("%v", err)
	}
	defer mem.Free()
	if mr, err := r.a.pd.RegisterMemory(mem, verbs.AccessRemoteWrite); err == nil {
		t.Errorf("remote write without local write was accepted")
		mr.Deregister()
	}
	// One memory, several regions, keys of their own.
	seen := map[uint32]bool{}
	for _, access := range []verbs.AccessFlags{0, verbs.AccessRemoteRead, verbs.AccessLocalWrite, allAccess} {
		mr, err := r.a.pd.RegisterMemory(mem, access)
		if err != nil {
			t.Fatalf("access %#x: %v", access, err)
		}
		defer mr.Deregister()
		if seen[mr.LKey()] {
			t.Errorf("LKey %#x twice", mr.LKey())
		}
		seen[mr.LKey()] = true
	}
	// A region without local write may be sent from.
	mr, err := r.a.pd.RegisterMemory(mem, 0)
	if err != nil {
		t.Fatalf("%v", err)
	}
	fill(mem.Bytes(), 3)
	rid := r.b.recv(0, 4096)
	r.a.post(verbs.SendWorkRequest{WRID: 1, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: []verbs.SGE{{Addr: mr.Addr() + 1, Length: 4000, LKey: mr.LKey()}}})
	r.b.awaitRecv(rid, verbs.WCRecv, 4000)
	r.a.awaitSend(1, verbs.WCSend)
	same(t, "SEND from a read-only region", r.b.mem[:4000], mem.Bytes()[1:4001])
	// After Deregister the key is dead.
	sge := verbs.SGE{Addr: mr.Addr(), Length: 10, LKey: mr.LKey()}
	if err := mr.Deregister(); err != nil {
		t.Fatalf("Deregister: %v", err)
	}
	r.a.post(verbs.SendWorkRequest{WRID: 2, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: []verbs.SGE{sge}})
	expect(t, r.a.sendCQ, r.a.qp.QPN(), 2, localErrors(p)...)
}

// destroyOrder: what is in use cannot go.
func destroyOrder(t TB, p Pair) {
	r := newRig(t, p, setup{channel: true, separateCQs: true})
	for _, step := range []struct {
		what string
		f    func() error
	}{{"send CQ", r.a.sendCQ.Destroy}, {"receive CQ", r.a.recvCQ.Destroy}, {"domain", r.a.pd.Dealloc}, {"channel", r.a.ch.Close}} {
		if err := step.f(); err == nil {
			t.Errorf("%s: destroyed while in use", step.what)
		}
	}
	// All of it still works.
	rid := r.a.recv(0, 64)
	r.b.post(verbs.SendWorkRequest{WRID: 1, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.b.list(0, 9)})
	arm(t, r.b.sendCQ, false)
	r.a.awaitRecv(rid, verbs.WCRecv, 9)
	r.b.awaitSend(1, verbs.WCSend)
	// A peer that goes away leaves the other side alive.
	if err := r.b.qp.Destroy(); err != nil {
		t.Fatalf("%v", err)
	}
	if err := r.b.recvCQ.Destroy(); err != nil {
		t.Errorf("receive CQ: %v", err)
	}
	r.a.toError()
}

// closeContext closes a context with everything alive in it.
func closeContext(t TB, p Pair) {
	r := newRig(t, p, setup{channel: true})
	r.a.recv(0, 64)
	waiting := make(chan error, 2)
	go func() {
		var events [1]verbs.CompletionQueue
		_, err := r.a.ch.Wait(events[:])
		waiting <- err
	}()
	go func() {
		for {
			if _, err := p.A.Context.NextAsyncEvent(); err != nil {
				waiting <- err
				return
			}
		}
	}()
	time.Sleep(20 * time.Millisecond)
	if err := p.A.Context.Close(); err != nil {
		t.Fatalf("Close: %v", err)
	}
	for range 2 {
		select {
		case err := <-waiting:
			if !errors.Is(err, verbs.ErrClosed) {
				t.Errorf("a waiter got %v", err)
			}
		case <-time.After(patience):
			t.Fatalf("Close left a waiter behind")
		}
	}
	if err := p.A.Context.Close(); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("Close twice: %v", err)
	}
	if _, err := p.A.Context.AllocPD(); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("AllocPD on a closed context: %v", err)
	}
	if _, err := p.A.Context.CreateCQ(verbs.CQInit{Capacity: 4}); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("CreateCQ on a closed context: %v", err)
	}
	if n, err := r.a.qp.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpSend}}); n != 0 || err == nil {
		t.Errorf("a send on a closed context: %d, %v", n, err)
	}
	if n := r.a.sendCQ.Poll(make([]verbs.WorkCompletion, 4)); n != 0 {
		t.Errorf("a queue of a closed context holds %d entries", n)
	}
	if err := r.a.qp.Destroy(); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("destroy after Close: %v", err)
	}
}

// memoryWindows binds, uses and revokes type 2 windows.
func memoryWindows(t TB, p Pair) {
	if !p.Windows {
		pd, err := p.A.Context.AllocPD()
		if err != nil {
			t.Fatalf("%v", err)
		}
		defer pd.Dealloc()
		if _, err := pd.AllocMW(); !errors.Is(err, verbs.ErrNotSupported) {
			t.Errorf("AllocMW: %v; the provider promises no windows, so ErrNotSupported is due", err)
		}
		return
	}
	const at, size = 4096 + 64, 1000
	// B owns the window, A uses its key.
	prepare := func() (*rig, verbs.MemoryWindow) {
		r := newRig(t, p, setup{access: allAccess | verbs.AccessMWBind, qpAccess: verbs.AccessRemoteRead | verbs.AccessRemoteWrite | verbs.AccessMWBind})
		mw, err := r.b.pd.AllocMW()
		if err != nil {
			t.Fatalf("AllocMW: %v", err)
		}
		t.Cleanup(func() { r.b.gone("dealloc window", mw.Dealloc()) })
		return r, mw
	}
	bind := func(r *rig, mw verbs.MemoryWindow, access verbs.AccessFlags) uint32 {
		old := mw.RKey()
		key := old&^0xff | (old+1)&0xff
		r.b.post(verbs.SendWorkRequest{WRID: 20, Opcode: verbs.OpBindMW, Flags: verbs.SendSignaled,
			Bind: &verbs.BindMW{Window: mw, Region: r.b.mr, RKey: key, Addr: r.b.mr.Addr() + at, Length: size, Access: access}})
		r.b.awaitSend(20, verbs.WCBindMW)
		if mw.RKey() != key {
			t.Errorf("the window's key is %#x, bound was %#x", mw.RKey(), key)
		}
		return key
	}
	access := func(r *rig, op verbs.SendOpcode, key uint32, off, n int) verbs.WCStatus {
		r.a.post(verbs.SendWorkRequest{WRID: 30, Opcode: op, Flags: verbs.SendSignaled, SGList: r.a.list(0, n), RemoteAddr: r.b.mr.Addr() + at + uint64(off), RKey: key})
		return await(t, r.a.sendCQ, 1)[0].Status
	}
	refused := func(what string, s verbs.WCStatus) {
		if s != verbs.WCRemoteAccessError && s != verbs.WCRemoteInvalidRequestError && s != verbs.WCRemoteOperationError {
			t.Errorf("%s: %s, want it refused", what, s)
		}
	}
	both := verbs.AccessRemoteRead | verbs.AccessRemoteWrite

	// Inside: fine, all of it and its parts.
	r, mw := prepare()
	key := bind(r, mw, both)
	fill(r.a.mem[:size], 1)
	if s := access(r, verbs.OpRDMAWrite, key, 0, size); s != verbs.WCSuccess {
		t.Fatalf("WRITE through a window: %s", s)
	}
	same(t, "WRITE through a window", r.b.mem[at:at+size], r.a.mem[:size])
	fill(r.b.mem[at:at+size], 2)
	if s := access(r, verbs.OpRDMARead, key, 10, size-10); s != verbs.WCSuccess {
		t.Fatalf("READ through a window: %s", s)
	}
	same(t, "READ through a window", r.a.mem[:size-10], r.b.mem[at+10:at+size])
	// One byte outside: refused.
	if !p.UnboundedWindows {
		refused("WRITE one byte past the window", access(r, verbs.OpRDMAWrite, key, 1, size))
	}

	r, mw = prepare()
	refused("WRITE through a window without remote write", access(r, verbs.OpRDMAWrite, bind(r, mw, verbs.AccessRemoteRead), 0, 8))

	// LOCAL_INV takes the right back; a bind with the next key gives it again, not to the old key.
	r, mw = prepare()
	key = bind(r, mw, both)
	invalidate := func() {
		r.b.post(verbs.SendWorkRequest{WRID: 21, Opcode: verbs.OpLocalInv, Flags: verbs.SendSignaled, ImmData: mw.RKey()})
		r.b.awaitSend(21, verbs.WCLocalInv)
	}
	invalidate()
	again := bind(r, mw, both)
	if s := access(r, verbs.OpRDMAWrite, again, 0, 8); s != verbs.WCSuccess {
		t.Fatalf("WRITE through a window bound again: %s", s)
	}
	refused("WRITE with the key before the last", access(r, verbs.OpRDMAWrite, key, 0, 8))

	r, mw = prepare()
	key = bind(r, mw, both)
	r.b.post(verbs.SendWorkRequest{WRID: 21, Opcode: verbs.OpLocalInv, Flags: verbs.SendSignaled, ImmData: key})
	r.b.awaitSend(21, verbs.WCLocalInv)
	refused("WRITE through a revoked window", access(r, verbs.OpRDMAWrite, key, 0, 8))

	// The peer's SEND_WITH_INV revokes, and the receive tells which key.
	r, mw = prepare()
	key = bind(r, mw, both)
	rid := r.b.recv(0, 64)
	r.a.post(verbs.SendWorkRequest{WRID: 31, Opcode: verbs.OpSendWithInv, Flags: verbs.SendSignaled, SGList: r.a.list(0, 33), ImmData: key})
	wc := r.b.awaitRecv(rid, verbs.WCRecv, 33)
	if wc.Flags&verbs.WCWithInv == 0 || wc.ImmData != key {
		t.Errorf("receive with flags %#x key %#x, want the invalidated key %#x", wc.Flags, wc.ImmData, key)
	}
	r.a.awaitSend(31, verbs.WCSend)
	refused("WRITE through a window that the peer revoked", access(r, verbs.OpRDMAWrite, key, 0, 8))
}
