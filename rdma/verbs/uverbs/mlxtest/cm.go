package mlxtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/verbs"
)

// The net's connection manager takes requests from one end to the other in this process, without MADs, and moves the queue
// pairs as rdma_cm has its users do it: INIT, RTR and RTS by Modify on the caller's queue pair.

// reasonNoListener is the REJ reason "invalid service id".
const reasonNoListener = 8

// Connector connects queue pairs of ctx, a context of the net.
func (n *Net) Connector(ctx verbs.Context) cm.Connector {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, d := range n.devices {
		if d.name == ctx.Name() && !d.closed {
			return &connector{net: n, dev: d, ctx: ctx}
		}
	}
	panic("mlxtest: " + ctx.Name() + " is not a device of this net")
}

// Addr is the address of ctx's port.
func (n *Net) Addr(ctx verbs.Context) netip.Addr {
	return n.Connector(ctx).(*connector).dev.addr
}

type connector struct {
	net *Net
	dev *device
	ctx verbs.Context
}

// Resolve implements cm.Connector.
func (c *connector) Resolve(_ context.Context, src netip.AddrPort, dst cm.Addr) (cm.Conn, error) {
	if dst.IsIB() {
		return nil, fmt.Errorf("mlxtest: only IP addresses are known, not %s", dst)
	}
	c.net.mu.Lock()
	var peer *device
	for _, d := range c.net.devices {
		if d.addr == dst.IP.Addr() && !d.closed {
			peer = d
		}
	}
	c.net.mu.Unlock()
	if peer == nil {
		return nil, fmt.Errorf("mlxtest: nobody is at %s: %w", dst, cm.ErrUnreachable)
	}
	return newConn(c, peer, cm.Addr{IP: netip.AddrPortFrom(c.dev.addr, src.Port())}, dst), nil
}

// Listen implements cm.Connector.
func (c *connector) Listen(addr netip.AddrPort, backlog int) (cm.Listener, error) {
	c.net.cmMu.Lock()
	defer c.net.cmMu.Unlock()
	if a := addr.Addr(); a.IsValid() && !a.IsUnspecified() && a != c.dev.addr {
		return nil, fmt.Errorf("mlxtest: %s is not the address of %s, which is %s", a, c.dev.name, c.dev.addr)
	}
	port := addr.Port()
	for port == 0 || c.net.ports[netip.AddrPortFrom(c.dev.addr, port)] != nil {
		if addr.Port() != 0 {
			return nil, fmt.Errorf("mlxtest: port %d is in use", port)
		}
		c.net.nextPort++
		port = 20000 + c.net.nextPort
	}
	l := &listener{c: c, addr: netip.AddrPortFrom(c.dev.addr, port), requests: make(chan *conn, max(backlog, 1)), closed: make(chan struct{})}
	c.net.ports[l.addr] = l
	return l, nil
}

type listener struct {
	c        *connector
	addr     netip.AddrPort
	requests chan *conn
	closed   chan struct{}
	once     sync.Once
}

func (l *listener) Addr() netip.AddrPort { return l.addr }

// Accept implements cm.Listener.
func (l *listener) Accept(ctx context.Context) (cm.Conn, error) {
	select {
	case <-l.closed:
		return nil, net.ErrClosed
	default:
	}
	select {
	case c := <-l.requests:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Close implements cm.Listener.
func (l *listener) Close() error {
	l.once.Do(func() {
		l.c.net.cmMu.Lock()
		delete(l.c.net.ports, l.addr)
		l.c.net.cmMu.Unlock()
		close(l.closed)
	})
	return nil
}

// answer is a REP or a REJ.
type answer struct {
	param cm.ConnParam
	qpn   uint32
	err   error
}

type conn struct {
	c         *connector
	peerDev   *device
	local     cm.Addr
	peer      cm.Addr
	req       cm.ConnParam
	reqQPN    uint32
	other     *conn // the other end, once there is one
	answers   chan answer
	ready     chan error // passive side: RTU, or that the active side gave up
	done      chan struct{}
	mu        sync.Mutex
	qp        verbs.QueuePair
	connected bool
	err       error
}

func newConn(c *connector, peer *device, local, remote cm.Addr) *conn {
	return &conn{c: c, peerDev: peer, local: local, peer: remote, answers: make(chan answer, 1), ready: make(chan error, 1), done: make(chan struct{})}
}

// Route implements cm.Conn.
func (k *conn) Route() cm.Route {
	r := cm.Route{Device: k.c.dev.name, Port: 1, Local: k.local, Peer: k.peer, SGID: verbs.GIDFromAddr(k.c.dev.addr), DGID: verbs.GIDFromAddr(k.peerDev.addr),
		PKey: 0xffff, PathMTU: verbs.MTU1024, NodeGUID: k.c.dev.guid}
	r.LocalPortGID, _ = k.c.dev.gid(0)
	if k.c.dev.cfg.InfiniBand {
		r.PathMTU = verbs.MTU4096
	}
	return r
}

func (k *conn) Request() cm.ConnParam { return k.req }

// InitQP implements cm.Conn.
func (k *conn) InitQP(qp verbs.QueuePair) error {
	k.mu.Lock()
	k.qp = qp
	k.mu.Unlock()
	return qp.Modify(&verbs.QPAttr{State: verbs.QPInitState, Port: 1, Access: verbs.AccessLocalWrite | verbs.AccessRemoteWrite | verbs.AccessRemoteRead | verbs.AccessMWBind}, verbs.QPMaskToInit)
}

// ready moves the queue pair to RTS, connected to qpn.
func (k *conn) connectQP(qpn uint32, mine, theirs cm.ConnParam) error {
	r := k.Route()
	av := verbs.AddressVector{Port: 1, DLID: k.peerDev.lid}
	if !k.c.dev.cfg.InfiniBand {
		av = verbs.AddressVector{Port: 1, IsGlobal: true, DGID: r.DGID, SGIDIndex: 1, HopLimit: 64}
	}
	timer := mine.MinRNRTimer
	if timer == 0 {
		timer = 12
	}
	if err := k.qp.Modify(&verbs.QPAttr{State: verbs.QPReadyToReceive, AV: av, PathMTU: r.PathMTU, DestQPN: qpn, RQPSN: 1,
		MaxDestRdAtomic: max(mine.ResponderResources, 1), MinRNRTimer: timer}, verbs.QPMaskToRTR); err != nil {
		return err
	}
	return k.qp.Modify(&verbs.QPAttr{State: verbs.QPReadyToSend, Timeout: 17, RetryCount: theirs.RetryCount, RNRRetry: theirs.RNRRetryCount,
		SQPSN: 1, MaxRdAtomic: max(mine.InitiatorDepth, 1)}, verbs.QPMaskToRTS)
}

func padded(p cm.ConnParam, n int) cm.ConnParam {
	b := make([]byte, n)
	copy(b, p.PrivateData)
	p.PrivateData = b
	return p
}

// Connect implements cm.Conn.
func (k *conn) Connect(ctx context.Context, p cm.ConnParam) (cm.ConnParam, error) {
	if len(p.PrivateData) > cm.MaxConnectData {
		return cm.ConnParam{}, fmt.Errorf("mlxtest: %d bytes of private data, a REQ takes %d", len(p.PrivateData), cm.MaxConnectData)
	}
	if p.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, p.Timeout)
		defer cancel()
	}
	n := k.c.net
	n.cmMu.Lock()
	l := n.ports[k.peer.IP]
	var far *conn
	if l != nil {
		far = newConn(l.c, k.c.dev, k.peer, k.local)
		far.req, far.reqQPN, far.other = padded(p, cm.MaxConnectData), k.qp.QPN(), k
		// The peer's view of depth and resources is the mirror image.
		far.req.ResponderResources, far.req.InitiatorDepth = p.ResponderResources, p.InitiatorDepth
	}
	n.cmMu.Unlock()
	if l == nil {
		return cm.ConnParam{}, &cm.RejectError{Reason: reasonNoListener, PrivateData: make([]byte, cm.MaxRejectData)}
	}
	select {
	case l.requests <- far:
	case <-ctx.Done():
		return cm.ConnParam{}, ctx.Err()
	}
	var a answer
	select {
	case a = <-k.answers:
	case <-ctx.Done():
		far.ready <- fmt.Errorf("mlxtest: the peer gave up: %w", cm.ErrUnreachable)
		return cm.ConnParam{}, ctx.Err()
	}
	if a.err != nil {
		return cm.ConnParam{}, a.err
	}
	mine := p
	if err := k.connectQP(a.qpn, mine, p); err != nil {
		far.ready <- err
		return cm.ConnParam{}, err
	}
	k.mu.Lock()
	k.other, k.connected = far, true
	k.mu.Unlock()
	far.ready <- nil
	return a.param, nil
}

// Accept implements cm.Conn.
func (k *conn) Accept(ctx context.Context, p cm.ConnParam) error {
	if len(p.PrivateData) > cm.MaxAcceptData {
		return fmt.Errorf("mlxtest: %d bytes of private data, a REP takes %d", len(p.PrivateData), cm.MaxAcceptData)
	}
	if p.InitiatorDepth == 0 {
		p.InitiatorDepth = k.req.ResponderResources
	}
	if err := k.connectQP(k.reqQPN, p, k.req); err != nil {
		return err
	}
	k.mu.Lock()
	k.connected = true
	k.mu.Unlock()
	k.other.answers <- answer{param: padded(p, cm.MaxAcceptData), qpn: k.qp.QPN()}
	select {
	case err := <-k.ready:
		if err != nil {
			k.end(err)
		}
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Reject implements cm.Conn.
func (k *conn) Reject(data []byte) error {
	if len(data) > cm.MaxRejectData {
		return fmt.Errorf("mlxtest: %d bytes of private data, a REJ takes %d", len(data), cm.MaxRejectData)
	}
	b := make([]byte, cm.MaxRejectData)
	copy(b, data)
	k.other.answers <- answer{err: &cm.RejectError{Reason: cm.ReasonConsumerDefined, PrivateData: b}}
	return nil
}

// Disconnect implements cm.Conn.
func (k *conn) Disconnect() error {
	k.mu.Lock()
	other, was := k.other, k.connected
	k.mu.Unlock()
	if !was {
		return nil
	}
	k.end(cm.ErrDisconnected)
	if other != nil {
		other.end(cm.ErrDisconnected)
	}
	return nil
}

// end moves the queue pair to ERR and says why the connection is over.
func (k *conn) end(why error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.err != nil {
		return
	}
	k.err = why
	if k.qp != nil {
		if err := k.qp.Modify(&verbs.QPAttr{State: verbs.QPError}, verbs.QPMaskState); err != nil && !errors.Is(err, verbs.ErrClosed) {
			k.err = err
		}
	}
	close(k.done)
}

func (k *conn) Done() <-chan struct{} { return k.done }

// Err implements cm.Conn.
func (k *conn) Err() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.err
}

// Close implements cm.Conn.
func (k *conn) Close() error { return k.Disconnect() }
