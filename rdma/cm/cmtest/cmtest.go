// Package cmtest is the contract of package cm in executable form. Each
// provider of connection management runs it from a test of its own.
package cmtest

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
)

// Node is one end: a device, its connector and the address it is reached at.
type Node struct {
	Context   verbs.Context
	Connector cm.Connector
	Addr      netip.Addr
}

// limit is far above what any of these exchanges takes, even in an emulated machine.
const limit = 60 * time.Second

// Run runs the contract. open returns the active and the passive node, which may be the same; it is
// called once per test and cleans up by t.Cleanup.
func Run(t *testing.T, open func(t *testing.T) (active, passive Node)) {
	for _, c := range []struct {
		name string
		f    func(t *testing.T, a, p Node)
	}{
		{"ConnectAndSend", testConnectAndSend},
		{"PrivateData", testPrivateData},
		{"Reject", testReject},
		{"NobodyListens", testNobodyListens},
		{"ActiveDisconnects", func(t *testing.T, a, p Node) { testDisconnect(t, a, p, true) }},
		{"PassiveDisconnects", func(t *testing.T, a, p Node) { testDisconnect(t, a, p, false) }},
		{"CloseDisconnects", testCloseDisconnects},
		{"ListenerCloseWakesAccept", testListenerClose},
		{"AcceptContext", testAcceptContext},
		{"ConnectContext", testConnectContext},
		{"TooMuchPrivateData", testTooMuch},
		{"ManyConnections", testMany},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, p := open(t)
			c.f(t, a, p)
		})
	}
}

// end is one side's objects.
type end struct {
	pd   verbs.ProtectionDomain
	cq   verbs.CompletionQueue
	qp   verbs.QueuePair
	mem  *hostmem.Region
	mr   verbs.MemoryRegion
	conn cm.Conn
}

func newEnd(t *testing.T, n Node) *end {
	t.Helper()
	e := &end{}
	var err error
	must := func(what string) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	e.pd, err = n.Context.AllocPD()
	must("AllocPD")
	e.cq, err = n.Context.CreateCQ(verbs.CQInit{Capacity: 16})
	must("CreateCQ")
	e.qp, err = e.pd.CreateQP(verbs.QPInit{SendCQ: e.cq, RecvCQ: e.cq, Cap: verbs.QPCap{MaxSendWR: 4, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1}})
	must("CreateQP")
	e.mem, err = hostmem.Alloc(8192)
	must("Alloc")
	e.mr, err = e.pd.RegisterMemory(e.mem, verbs.AccessLocalWrite)
	must("RegisterMemory")
	return e
}

func (e *end) bind(t *testing.T, c cm.Conn) {
	t.Helper()
	e.conn = c
	if err := c.InitQP(e.qp); err != nil {
		t.Fatalf("InitQP: %v", err)
	}
	if _, err := e.qp.PostRecv([]verbs.RecvWorkRequest{{WRID: 1, SGList: []verbs.SGE{{Addr: e.mr.Addr(), Length: 4096, LKey: e.mr.LKey()}}}}); err != nil {
		t.Fatalf("PostRecv: %v", err)
	}
}

func (e *end) destroy(t *testing.T) {
	t.Helper()
	for _, f := range []func() error{e.qp.Destroy, e.cq.Destroy, e.mr.Deregister, e.pd.Dealloc, e.mem.Free} {
		if err := f(); err != nil {
			t.Errorf("destroy: %v", err)
		}
	}
	if e.conn != nil {
		if err := e.conn.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
}

func (e *end) poll(t *testing.T, want int) []verbs.WorkCompletion {
	t.Helper()
	var got []verbs.WorkCompletion
	buf := make([]verbs.WorkCompletion, 8)
	for end := time.Now().Add(limit); len(got) < want; {
		n := e.cq.Poll(buf)
		got = append(got, buf[:n]...)
		if n == 0 {
			if time.Now().After(end) {
				t.Fatalf("%d completions, want %d", len(got), want)
			}
			time.Sleep(time.Millisecond)
		}
	}
	return got
}

// send moves msg from e to o and checks it.
func (e *end) send(t *testing.T, o *end, msg []byte) {
	t.Helper()
	copy(e.mem.Bytes()[4096:], msg)
	if _, err := e.qp.PostSend([]verbs.SendWorkRequest{{WRID: 2, Opcode: verbs.OpSend, Flags: verbs.SendSignaled,
		SGList: []verbs.SGE{{Addr: e.mr.Addr() + 4096, Length: uint32(len(msg)), LKey: e.mr.LKey()}}}}); err != nil {
		t.Fatalf("PostSend: %v", err)
	}
	wc := o.poll(t, 1)[0]
	if wc.Status != verbs.WCSuccess || wc.WRID != 1 || int(wc.ByteLen) != len(msg) || !bytes.Equal(o.mem.Bytes()[:len(msg)], msg) {
		t.Fatalf("received %+v %q, want %q", wc, o.mem.Bytes()[:len(msg)], msg)
	}
	if wc := e.poll(t, 1)[0]; wc.Status != verbs.WCSuccess || wc.WRID != 2 {
		t.Fatalf("send completed with %+v", wc)
	}
}

func param(data string) cm.ConnParam {
	return cm.ConnParam{PrivateData: []byte(data), ResponderResources: 4, InitiatorDepth: 4, FlowControl: true, RetryCount: 7, RNRRetryCount: 7}
}

// listen opens a listener on a port of the provider's choice.
func listen(t *testing.T, p Node) cm.Listener {
	t.Helper()
	l, err := p.Connector.Listen(netip.AddrPortFrom(p.Addr, 0), 16)
	if err != nil {
		t.Fatalf("Listen: %v", err)
	}
	if l.Addr().Port() == 0 {
		t.Fatal("the listener has no port")
	}
	return l
}

// connect connects two fresh ends; data is the private data of REQ and REP.
func connect(t *testing.T, a, p Node, l cm.Listener) (active, passive *end, req, rep cm.ConnParam) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	active, passive = newEnd(t, a), newEnd(t, p)
	errc := make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		c, err := l.Accept(ctx)
		if err != nil {
			errc <- err
			return
		}
		passive.conn = c
		req = c.Request()
		if err := c.InitQP(passive.qp); err != nil {
			errc <- err
			return
		}
		passive.qp.PostRecv([]verbs.RecvWorkRequest{{WRID: 1, SGList: []verbs.SGE{{Addr: passive.mr.Addr(), Length: 4096, LKey: passive.mr.LKey()}}}})
		errc <- c.Accept(ctx, param("the passive side's answer"))
	})
	c, err := a.Connector.Resolve(ctx, netip.AddrPort{}, cm.Addr{IP: l.Addr()})
	if err != nil {
		t.Fatalf("Resolve: %v", err)
	}
	active.bind(t, c)
	rep, err = c.Connect(ctx, param("the active side's request"))
	if err != nil {
		t.Fatalf("Connect: %v", err)
	}
	if err := <-errc; err != nil {
		t.Fatalf("passive side: %v", err)
	}
	wg.Wait()
	return active, passive, req, rep
}

func testConnectAndSend(t *testing.T, a, p Node) {
	l := listen(t, p)
	defer l.Close()
	x, y, req, rep := connect(t, a, p, l)
	defer x.destroy(t)
	defer y.destroy(t)
	if req.ResponderResources == 0 || rep.ResponderResources == 0 || req.RNRRetryCount != 7 {
		t.Errorf("request %+v, reply %+v", req, rep)
	}
	r := x.conn.Route()
	if r.Peer.IP != l.Addr() || r.PathMTU.Bytes() == 0 || r.Port == 0 || r.SGID.IsZero() || r.DGID != verbs.GIDFromAddr(p.Addr) || r.PKey&0x7fff == 0 || r.LocalPortGID.IsZero() {
		t.Errorf("active route %+v", r)
	}
	if got := y.conn.Route().Peer.IP.Addr(); got != a.Addr {
		t.Errorf("passive side sees peer %s, want %s", got, a.Addr)
	}
	if x.qp.State() != verbs.QPReadyToSend || y.qp.State() != verbs.QPReadyToSend {
		t.Errorf("queue pairs in %s and %s", x.qp.State(), y.qp.State())
	}
	x.send(t, y, []byte("a message from the active side"))
	y.send(t, x, []byte("and one back"))
}

func testPrivateData(t *testing.T, a, p Node) {
	l := listen(t, p)
	defer l.Close()
	x, y, req, rep := connect(t, a, p, l)
	defer x.destroy(t)
	defer y.destroy(t)
	for _, c := range []struct {
		got, want string
		size      int
	}{
		{string(req.PrivateData), "the active side's request", cm.MaxConnectData},
		{string(rep.PrivateData), "the passive side's answer", cm.MaxAcceptData},
	} {
		if len(c.got) != c.size || c.got[:len(c.want)] != c.want || len(bytes.Trim([]byte(c.got[len(c.want):]), "\x00")) != 0 {
			t.Errorf("private data %d bytes %q, want %q padded with zeros to %d", len(c.got), c.got, c.want, c.size)
		}
	}
}

func testReject(t *testing.T, a, p Node) {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	l := listen(t, p)
	defer l.Close()
	reason := bytes.Repeat([]byte{0xc2, 0x5a}, 16)
	done := make(chan error, 1)
	go func() {
		c, err := l.Accept(ctx)
		if err == nil {
			err = errors.Join(c.Reject(reason), c.Close())
		}
		done <- err
	}()
	x := newEnd(t, a)
	defer x.destroy(t)
	c, err := a.Connector.Resolve(ctx, netip.AddrPort{}, cm.Addr{IP: l.Addr()})
	if err != nil {
		t.Fatalf("Resolve: %v", err)
	}
	x.bind(t, c)
	_, err = c.Connect(ctx, param(""))
	var rej *cm.RejectError
	if !errors.As(err, &rej) || rej.Reason != cm.ReasonConsumerDefined || len(rej.PrivateData) != cm.MaxRejectData || !bytes.Equal(rej.PrivateData[:len(reason)], reason) {
		t.Errorf("Connect: %v (%+v)", err, rej)
	}
	if err := <-done; err != nil {
		t.Errorf("passive side: %v", err)
	}
}

func testNobodyListens(t *testing.T, a, p Node) {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	l := listen(t, p)
	addr := l.Addr()
	l.Close()
	x := newEnd(t, a)
	defer x.destroy(t)
	c, err := a.Connector.Resolve(ctx, netip.AddrPort{}, cm.Addr{IP: addr})
	if err != nil {
		t.Fatalf("Resolve: %v", err)
	}
	x.bind(t, c)
	_, err = c.Connect(ctx, param(""))
	var rej *cm.RejectError
	if !errors.As(err, &rej) || rej.Reason != 8 {
		t.Errorf("Connect: %v, want a rejection with reason 8", err)
	}
}

func ended(t *testing.T, e *end, who string) {
	t.Helper()
	select {
	case <-e.conn.Done():
	case <-time.After(limit):
		t.Fatalf("%s never learnt of the end", who)
	}
	if !errors.Is(e.conn.Err(), cm.ErrDisconnected) {
		t.Errorf("%s: %v, want ErrDisconnected", who, e.conn.Err())
	}
	if wc := e.poll(t, 1)[0]; wc.Status != verbs.WCFlushError {
		t.Errorf("%s: the posted receive completed with %v, want a flush", who, wc.Status)
	}
}

func testDisconnect(t *testing.T, a, p Node, byActive bool) {
	l := listen(t, p)
	defer l.Close()
	x, y, _, _ := connect(t, a, p, l)
	defer x.destroy(t)
	defer y.destroy(t)
	if x.conn.Err() != nil || y.conn.Err() != nil {
		t.Fatalf("ended before it began: %v, %v", x.conn.Err(), y.conn.Err())
	}
	who := x
	if !byActive {
		who = y
	}
	for range 2 { // the second is a no-op
		if err := who.conn.Disconnect(); err != nil {
			t.Fatalf("Disconnect: %v", err)
		}
	}
	ended(t, x, "active side")
	ended(t, y, "passive side")
	if err := x.conn.Disconnect(); err != nil {
		t.Errorf("Disconnect after the end: %v", err)
	}
}

func testCloseDisconnects(t *testing.T, a, p Node) {
	l := listen(t, p)
	defer l.Close()
	x, y, _, _ := connect(t, a, p, l)
	defer y.destroy(t)
	x.destroy(t)
	ended(t, y, "passive side")
}

func testListenerClose(t *testing.T, a, p Node) {
	l := listen(t, p)
	done := make(chan error, 1)
	go func() { _, err := l.Accept(context.Background()); done <- err }()
	time.Sleep(10 * time.Millisecond)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if !errors.Is(err, net.ErrClosed) {
			t.Errorf("Accept: %v, want net.ErrClosed", err)
		}
	case <-time.After(limit):
		t.Fatal("Accept outlived its listener")
	}
}

func testAcceptContext(t *testing.T, a, p Node) {
	l := listen(t, p)
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := l.Accept(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Accept: %v", err)
	}
}

// testConnectContext: a listener that never answers must not hold the caller past its context.
func testConnectContext(t *testing.T, a, p Node) {
	l := listen(t, p)
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	x := newEnd(t, a)
	defer x.destroy(t)
	c, err := a.Connector.Resolve(ctx, netip.AddrPort{}, cm.Addr{IP: l.Addr()})
	if err != nil {
		t.Fatalf("Resolve: %v", err)
	}
	x.bind(t, c)
	short, stop := context.WithTimeout(ctx, 100*time.Millisecond)
	defer stop()
	if _, err := c.Connect(short, param("")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Connect: %v, want DeadlineExceeded", err)
	}
}

func testTooMuch(t *testing.T, a, p Node) {
	l := listen(t, p)
	defer l.Close()
	x := newEnd(t, a)
	defer x.destroy(t)
	c, err := a.Connector.Resolve(t.Context(), netip.AddrPort{}, cm.Addr{IP: l.Addr()})
	if err != nil {
		t.Fatalf("Resolve: %v", err)
	}
	x.bind(t, c)
	if _, err := c.Connect(t.Context(), param(string(make([]byte, cm.MaxConnectData+1)))); err == nil {
		t.Error("57 bytes of private data were accepted")
	}
}

func testMany(t *testing.T, a, p Node) {
	l := listen(t, p)
	defer l.Close()
	var ends []*end
	for range 12 {
		x, y, _, _ := connect(t, a, p, l)
		ends = append(ends, x, y)
	}
	for i := 0; i < len(ends); i += 2 {
		ends[i].send(t, ends[i+1], []byte{byte(i), 1, 2, 3})
	}
	for _, e := range ends {
		e.destroy(t)
	}
}
