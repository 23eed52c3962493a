package softroce

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/softroce/ibcm"
	"srp-initiator/rdma/softroce/rc"
	"srp-initiator/rdma/softroce/udp"
	"srp-initiator/rdma/verbs"
)

const (
	defaultConnectTimeout = 10 * time.Second

	// ACK timeout codes, 4.096 us * 2^n. Between processes of one machine nothing takes 134 ms but a scheduler under load; the kernel's
	// rdma_cm gives 17, 537 ms, and a kernel target uses the initiator's value for its own timer and its timewait.
	ackTimeoutLoopback = 15
	ackTimeoutNetwork  = 17

	defaultMinRNRTimer = 12 // 0.64 ms
)

// Connector makes and takes connections by the CM protocol over QP1.
type Connector struct{ d *Device }

// Connector is the device's connection manager.
func (d *Device) Connector() cm.Connector { return Connector{d} }

// Resolve checks that dst can be reached from the device's address and finds the path MTU of the way there.
func (k Connector) Resolve(ctx context.Context, src netip.AddrPort, dst cm.Addr) (cm.Conn, error) {
	d := k.d
	if dst.IsIB() {
		return nil, fmt.Errorf("softroce connects to IP addresses, not to %s: %w", dst, verbs.ErrNotSupported)
	}
	peer := netip.AddrPortFrom(dst.IP.Addr().Unmap().WithZone(""), dst.IP.Port())
	if src.IsValid() && src.Addr().IsValid() && src.Addr().Unmap().WithZone("") != d.addr {
		return nil, fmt.Errorf("source address %s is not that of device %s", src.Addr(), d.name)
	}
	a := peer.Addr()
	switch {
	case a.Is4() != d.addr.Is4(), a.IsUnspecified(), a.IsMulticast(), peer.Port() == 0:
		return nil, fmt.Errorf("%s cannot be reached from device %s: %w", dst.IP, d.name, cm.ErrUnreachable)
	case a.IsLoopback() != d.addr.IsLoopback():
		return nil, fmt.Errorf("%s cannot be reached from device %s: one is a loopback address, the other is not; use softroce:ADDR with an address on the way to the peer: %w",
			dst.IP, d.name, cm.ErrUnreachable)
	}
	mtu := d.mtu
	if _, ok := d.link.(descriptor); ok {
		if zoned := dst.IP.Addr(); a.IsLinkLocalUnicast() && a.Is6() && (d.scope == 0 || zoned.Zone() != "" && udp.Scope(zoned) != d.scope) {
			return nil, fmt.Errorf("link-local address %s cannot be reached from device %s; use softroce:ADDR%%INTERFACE with the link-local address of the interface on the way to the peer: %w",
				zoned, d.name, cm.ErrUnreachable)
		}
		m, err := routeMTU(ctx, d.addr, a, d.scope)
		if noDescriptor(err) {
			return nil, fmt.Errorf("device %s cannot look for a route to %s: %w", d.name, dst.IP.Addr(), NameLimit(err))
		}
		if err != nil {
			return nil, fmt.Errorf("no route from device %s to %s: %w: %w", d.name, dst.IP.Addr(), cm.ErrUnreachable, err)
		}
		mtu = min(mtu, m)
	}
	c := d.newConnection()
	port := src.Port()
	if port == 0 {
		port = 49152 + uint16(d.random()%16384)
	}
	c.peer = peer
	c.route = d.route(netip.AddrPortFrom(d.addr, port), peer, mtu)
	return c, nil
}

// routeMTU asks the kernel for the way from one address to another and what it carries, by a UDP socket that
// sends nothing.
func routeMTU(ctx context.Context, from, to netip.Addr, scope uint32) (verbs.MTU, error) {
	network, level, opt := "udp4", syscall.IPPROTO_IP, syscall.IP_MTU
	if to.Is6() {
		network, level, opt = "udp6", syscall.IPPROTO_IPV6, syscall.IPV6_MTU
		// A link-local address means nothing without its interface, neither the one nor the other.
		if zone := fmt.Sprint(scope); scope != 0 {
			if to.IsLinkLocalUnicast() {
				to = to.WithZone(zone)
			}
			if from.IsLinkLocalUnicast() {
				from = from.WithZone(zone)
			}
		}
	}
	dialer := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
	c, err := dialer.DialContext(ctx, network, netip.AddrPortFrom(to, 4791).String())
	if err != nil {
		return 0, err
	}
	defer c.Close()
	raw, err := c.(*net.UDPConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	n := 0
	if cerr := raw.Control(func(fd uintptr) { n, err = syscall.GetsockoptInt(int(fd), level, opt) }); cerr != nil {
		return 0, cerr
	}
	return mtuFor(n), err
}

func (d *Device) route(local, peer netip.AddrPort, mtu verbs.MTU) cm.Route {
	return cm.Route{
		Device: d.name, Port: 1, Local: cm.Addr{IP: local}, Peer: cm.Addr{IP: peer}, SGID: d.gid, DGID: verbs.GIDFromAddr(peer.Addr()),
		PKey: 0xffff, PathMTU: mtu, NodeGUID: d.guid, LocalPortGID: d.gid,
	}
}

// listener implements cm.Listener.
type listener struct {
	d    *Device
	addr netip.AddrPort
	come chan struct{} // holds one when queue may have something for another Accept
	done chan struct{}

	// Guarded by Device.mu.
	queue  []*connection // who waits to be accepted, the oldest first; who gives up leaves
	closed bool
}

// Listen accepts connections for the device's address, or the unspecified one, which means the same.
func (k Connector) Listen(addr netip.AddrPort, backlog int) (cm.Listener, error) {
	d := k.d
	if a := addr.Addr().Unmap().WithZone(""); a.IsValid() && !a.IsUnspecified() && a != d.addr {
		return nil, fmt.Errorf("cannot listen on %s: device %s has address %s only", addr, d.name, d.addr)
	}
	backlog = max(backlog, 1)
	backlog = min(backlog, 512)
	l := &listener{d: d, come: make(chan struct{}, 1), done: make(chan struct{})}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, verbs.ErrClosed
	}
	port, err := d.cm.Listen(addr.Port(), backlog, l)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", addr, errors.Join(err, syscall.EADDRINUSE))
	}
	l.addr = netip.AddrPortFrom(d.addr.WithZone(d.link.Addr().Zone()), port) // with its interface: others have to name it, too
	return l, nil
}

func (l *listener) Addr() netip.AddrPort { return l.addr }

func (l *listener) Accept(ctx context.Context) (cm.Conn, error) {
	for {
		if c := l.take(); c != nil {
			return c, nil
		}
		select {
		case <-l.come:
		case <-l.done:
			return nil, net.ErrClosed
		case <-l.d.done:
			return nil, net.ErrClosed
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// take is the oldest request that waits, nil when none does.
func (l *listener) take() *connection {
	l.d.mu.Lock()
	defer l.d.mu.Unlock()
	if len(l.queue) == 0 || l.d.closed {
		return nil
	}
	c := l.queue[0]
	l.queue = slices.Delete(l.queue, 0, 1)
	c.waitsIn = nil
	if len(l.queue) > 0 {
		l.wake()
	}
	return c
}

func (l *listener) wake() {
	select {
	case l.come <- struct{}{}:
	default:
	}
}

// Close refuses the requests that nobody has accepted.
func (l *listener) Close() error {
	d := l.d
	d.mu.Lock()
	defer d.unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	close(l.done)
	d.cm.Unlisten(l.addr.Port())
	for len(l.queue) > 0 {
		c := l.queue[0]
		d.cm.Reject(c.mc, ibcm.ReasonConsumer, nil)
		c.end(net.ErrClosed) // leaves the queue
	}
	d.settleCM(d.now())
	d.flush(d.now())
	return nil
}

// connection implements cm.Conn.
type connection struct {
	d       *Device
	peer    netip.AddrPort
	route   cm.Route
	request cm.ConnParam // passive
	events  chan cmHappening
	done    chan struct{}

	// Guarded by Device.mu.
	mc        *ibcm.Conn         // nil on the active side before Connect
	first     *ibcm.ConnectParam // active: of the REQ under way, while another may follow it
	qp        *queuePair
	waitsIn   *listener // passive: until somebody takes it from there
	awaitsRTU bool
	ended     bool
	err       error
}

type cmHappening struct {
	kind     ibcm.EventKind
	rejected error
}

func (d *Device) newConnection() *connection {
	return &connection{d: d, events: make(chan cmHappening, 4), done: make(chan struct{})}
}

// cmEvent tells a connection what happened. Device.mu is held.
func (d *Device) cmEvent(now rc.Time, e *ibcm.Event) {
	if e.Kind == ibcm.EventRequest {
		d.cmRequest(e.Conn)
		return
	}
	c, _ := e.Conn.Owner.(*connection)
	if c == nil {
		return
	}
	switch e.Kind {
	case ibcm.EventReply, ibcm.EventEstablished, ibcm.EventUnreachable, ibcm.EventRejected:
		var rejected error
		if e.Kind == ibcm.EventRejected {
			if c.connectAgain(now, e) {
				return
			}
			rejected = rejection(e)
		}
		c.first = nil
		select {
		case c.events <- cmHappening{e.Kind, rejected}:
		default:
		}
		switch e.Kind {
		case ibcm.EventUnreachable:
			c.leave(now, cm.ErrUnreachable)
		case ibcm.EventRejected:
			c.leave(now, rejected)
		}
	case ibcm.EventDisconnected:
		c.leave(now, cm.ErrDisconnected)
	}
}

// connectAgain sends a second REQ, with the path MTU that the peer carries, when it refused the first for a larger one. Device.mu is held.
func (c *connection) connectAgain(now rc.Time, e *ibcm.Event) bool {
	p := c.first
	if p == nil || c.ended || e.Conn != c.mc || e.MTU == 0 || e.MTU >= p.PathMTU {
		return false
	}
	c.first = nil
	p.PathMTU = e.MTU
	mc, err := c.d.cm.Connect(c.d.clock(now), *p, c)
	if err != nil {
		return false
	}
	c.mc = mc
	return true
}

func rejection(e *ibcm.Event) error {
	err := &cm.RejectError{Reason: e.Reject.Reason, PrivateData: append([]byte(nil), e.Reject.PrivateData[:]...)}
	if err.Reason != ibcm.ReasonInvalidMTU {
		return err
	}
	carries := "does not say what it carries"
	if e.MTU != 0 {
		carries = fmt.Sprintf("carries %d at most", e.MTU.Bytes())
	}
	return fmt.Errorf("path MTU %d asked for, the peer %s: %w", e.Conn.REQ().PathMTU.Bytes(), carries, err)
}

// cmRequest hands a request to its listener.
func (d *Device) cmRequest(mc *ibcm.Conn) {
	l, _ := d.cm.ListenerOf(mc).(*listener)
	if l == nil || l.closed {
		d.cm.Reject(mc, ibcm.ReasonInvalidServiceID, nil)
		return
	}
	c := d.newConnection()
	q, a := mc.REQ(), mc.Address()
	c.mc, c.peer = mc, netip.AddrPortFrom(mc.Peer(), a.Source.Port())
	c.route = d.route(netip.AddrPortFrom(d.addr, mc.ServicePort()), c.peer, q.PathMTU)
	c.request = cm.ConnParam{
		PrivateData:        append([]byte(nil), q.PrivateData[ibcm.AddressSize:]...),
		ResponderResources: q.ResponderResources, InitiatorDepth: q.InitiatorDepth, FlowControl: q.FlowControl,
		RetryCount: q.RetryCount, RNRRetryCount: q.RNRRetryCount, ACKTimeout: q.Primary.ACKTimeout,
	}
	mc.Owner = c
	c.waitsIn = l
	l.queue = append(l.queue, c) // no more than the backlog: the machine counts those that wait here, and they leave when it forgets them
	l.wake()
}

// leave moves the queue pair to the error state and ends the connection.
func (c *connection) leave(now rc.Time, err error) {
	if c.qp != nil {
		c.qp.fail(now)
	}
	c.end(err)
}

// end closes Done. Device.mu is held.
func (c *connection) end(err error) {
	if !c.ended {
		c.ended = true
		c.err = err
		c.awaitsRTU = false
		if l := c.waitsIn; l != nil {
			c.waitsIn = nil
			l.queue = slices.DeleteFunc(l.queue, func(o *connection) bool { return o == c })
		}
		close(c.done)
	}
}

func (c *connection) Route() cm.Route       { return c.route }
func (c *connection) Request() cm.ConnParam { return c.request }
func (c *connection) Done() <-chan struct{} { return c.done }

func (c *connection) Err() error {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	return c.err
}

func (c *connection) InitQP(qp verbs.QueuePair) error {
	q, ok := qp.(*queuePair)
	if !ok || q.d != c.d {
		return fmt.Errorf("softroce: the queue pair is another device's: %w", syscall.EINVAL)
	}
	d := c.d
	d.mu.Lock()
	defer d.unlock()
	if c.qp != nil && c.qp != q || q.conn != nil && q.conn != c {
		return fmt.Errorf("softroce: connection or queue pair is bound already: %w", syscall.EINVAL)
	}
	err := q.modify(&verbs.QPAttr{
		State: verbs.QPInitState, Port: 1, Access: verbs.AccessLocalWrite | verbs.AccessRemoteRead | verbs.AccessRemoteWrite,
	}, verbs.QPMaskToInit)
	if err == nil {
		c.qp, q.conn = q, c
	}
	return err
}

// path is what the two sides agreed on.
type path struct {
	qpn, rqPSN, sqPSN      uint32
	mtu                    verbs.MTU
	reads, readsServed     uint8
	ackTimeout, retry, rnr uint8
	minRNRTimer            uint8
	flowLabel              uint32
	trafficClass, hopLimit uint8
	soft                   bool
}

// ready takes the queue pair through RTR to RTS. Device.mu is held.
func (c *connection) ready(p *path) error {
	if c.qp == nil {
		return fmt.Errorf("softroce: the connection has no queue pair: call InitQP first: %w", syscall.EINVAL)
	}
	err := c.qp.modify(&verbs.QPAttr{
		State: verbs.QPReadyToReceive, PathMTU: p.mtu, DestQPN: p.qpn, RQPSN: p.rqPSN, MaxDestRdAtomic: p.readsServed, MinRNRTimer: p.minRNRTimer,
		AV: verbs.AddressVector{DGID: c.route.DGID, IsGlobal: true, Port: 1, FlowLabel: p.flowLabel, TrafficClass: p.trafficClass, HopLimit: p.hopLimit},
	}, verbs.QPMaskToRTR)
	if err == nil {
		if p.soft {
			c.qp.setSoft(true)
		}
		err = c.qp.modify(&verbs.QPAttr{
			State: verbs.QPReadyToSend, SQPSN: p.sqPSN, MaxRdAtomic: p.reads, Timeout: p.ackTimeout, RetryCount: p.retry, RNRRetry: p.rnr,
		}, verbs.QPMaskToRTS)
	}
	return err
}

func (d *Device) randomPSN() uint32 { return uint32(d.random()) & 0xffffff }

func (c *connection) defaults(p *cm.ConnParam) {
	if p.ACKTimeout == 0 {
		p.ACKTimeout = ackTimeoutNetwork
		if c.d.addr.IsLoopback() {
			p.ACKTimeout = ackTimeoutLoopback
		}
	}
	if p.MinRNRTimer == 0 {
		p.MinRNRTimer = defaultMinRNRTimer
	}
	if p.Timeout <= 0 {
		p.Timeout = defaultConnectTimeout
	}
	p.ResponderResources, p.InitiatorDepth = min(p.ResponderResources, maxReads), min(p.InitiatorDepth, maxReads)
	p.RetryCount, p.RNRRetryCount, p.ACKTimeout, p.MinRNRTimer = p.RetryCount&7, p.RNRRetryCount&7, p.ACKTimeout&31, p.MinRNRTimer&31
}

func (c *connection) Connect(ctx context.Context, p cm.ConnParam) (cm.ConnParam, error) {
	d := c.d
	if len(p.PrivateData) > cm.MaxConnectData {
		return cm.ConnParam{}, fmt.Errorf("softroce: %d bytes of private data, at most %d: %w", len(p.PrivateData), cm.MaxConnectData, syscall.EINVAL)
	}
	c.defaults(&p)
	psn := d.randomPSN()
	d.mu.Lock()
	switch {
	case d.closed:
		d.mu.Unlock()
		return cm.ConnParam{}, verbs.ErrClosed
	case c.qp == nil || c.mc != nil || c.ended:
		d.mu.Unlock()
		return cm.ConnParam{}, fmt.Errorf("softroce: Connect once, after InitQP: %w", syscall.EINVAL)
	}
	now := d.now()
	first := ibcm.ConnectParam{
		Peer: c.peer, SourcePort: c.route.Local.IP.Port(), LocalQPN: c.qp.qpn, StartingPSN: psn,
		ResponderResources: p.ResponderResources, InitiatorDepth: p.InitiatorDepth, FlowControl: p.FlowControl,
		RetryCount: p.RetryCount, RNRRetryCount: p.RNRRetryCount, PathMTU: c.route.PathMTU, ACKTimeout: p.ACKTimeout, PrivateData: p.PrivateData,
	}
	mc, err := d.cm.Connect(d.clock(now), first, c)
	if err != nil {
		d.mu.Unlock()
		return cm.ConnParam{}, err
	}
	c.mc, c.first = mc, &first
	d.settleCM(now)
	d.flush(now)
	d.unlock()

	h, err := c.await(ctx, p.Timeout)
	if err != nil {
		return cm.ConnParam{}, err
	}
	if h.kind != ibcm.EventReply {
		return cm.ConnParam{}, fmt.Errorf("softroce: unexpected CM event %d", h.kind)
	}
	d.mu.Lock()
	defer d.unlock()
	now = d.now()
	if mc = c.mc; c.ended || mc.State() != ibcm.REPReceived {
		return cm.ConnParam{}, c.endError()
	}
	rep, req := mc.REP(), mc.REQ()
	c.route.PathMTU = req.PathMTU
	err = c.ready(&path{
		qpn: rep.LocalQPN, rqPSN: psn, sqPSN: rep.StartingPSN, mtu: req.PathMTU,
		reads: min(p.InitiatorDepth, rep.ResponderResources), readsServed: min(max(p.ResponderResources, rep.InitiatorDepth), maxReads),
		ackTimeout: p.ACKTimeout, retry: p.RetryCount, rnr: rep.RNRRetryCount, minRNRTimer: p.MinRNRTimer,
		flowLabel: req.Primary.FlowLabel, hopLimit: req.Primary.HopLimit, soft: mc.PeerIsSoftroce(),
	})
	if err == nil {
		err = d.cm.Ready(mc)
	}
	if err != nil {
		d.cm.Disconnect(d.clock(now), mc)
		c.leave(now, err)
	}
	d.settleCM(now)
	d.flush(now)
	if err != nil {
		return cm.ConnParam{}, err
	}
	return cm.ConnParam{
		PrivateData:        append([]byte(nil), rep.PrivateData[:]...),
		ResponderResources: rep.ResponderResources, InitiatorDepth: rep.InitiatorDepth, FlowControl: rep.FlowControl,
		RNRRetryCount: rep.RNRRetryCount, RetryCount: p.RetryCount, ACKTimeout: p.ACKTimeout, MinRNRTimer: p.MinRNRTimer,
	}, nil
}

// await waits for the peer. When it does not answer in time, the peer is told that nobody waits any more.
func (c *connection) await(ctx context.Context, timeout time.Duration) (cmHappening, error) {
	d := c.d
	began := time.Now()
	t := time.NewTimer(timeout)
	defer t.Stop()
	silent := func(cause error) error {
		waited := timeout // not the time that has passed: the timer of a busy machine is late
		if at, ok := ctx.Deadline(); ok {
			waited = min(waited, at.Sub(began).Round(100*time.Millisecond))
		}
		return fmt.Errorf("no answer from %s within %v: check that it listens, and that UDP port 4791 is not filtered: %w", c.peer, waited, cause)
	}
	var err error
	select {
	case h := <-c.events:
		return c.judge(h)
	case <-c.done:
		// What happened and its end come together: prefer the former.
		select {
		case h := <-c.events:
			return c.judge(h)
		default:
			return cmHappening{}, c.Err()
		}
	case <-d.done:
		return cmHappening{}, verbs.ErrClosed
	case <-ctx.Done():
		// A caller whose context ends with its timeout learns the same, whichever is first.
		if err = ctx.Err(); errors.Is(err, context.DeadlineExceeded) {
			err = silent(err)
		}
	case <-t.C:
		err = silent(cm.ErrUnreachable)
	}
	d.mu.Lock()
	defer d.unlock()
	now := d.now()
	d.cm.Disconnect(d.clock(now), c.mc)
	c.leave(now, err)
	d.settleCM(now)
	d.flush(now)
	return cmHappening{}, err
}

func (c *connection) judge(h cmHappening) (cmHappening, error) {
	switch h.kind {
	case ibcm.EventRejected:
		return h, h.rejected
	case ibcm.EventUnreachable:
		return h, fmt.Errorf("%s does not answer: %w", c.peer, cm.ErrUnreachable)
	}
	return h, nil
}

// endError is why a connection that has ended did so. Device.mu is held.
func (c *connection) endError() error {
	if c.err != nil {
		return c.err
	}
	return cm.ErrDisconnected
}

func (c *connection) Accept(ctx context.Context, p cm.ConnParam) error {
	d := c.d
	if len(p.PrivateData) > cm.MaxAcceptData {
		return fmt.Errorf("softroce: %d bytes of private data, at most %d: %w", len(p.PrivateData), cm.MaxAcceptData, syscall.EINVAL)
	}
	retry := p.RetryCount
	if retry == 0 {
		retry = c.request.RetryCount
	}
	if p.ACKTimeout == 0 {
		p.ACKTimeout = c.request.ACKTimeout
	}
	c.defaults(&p)
	psn := d.randomPSN()
	d.mu.Lock()
	now := d.now()
	switch {
	case d.closed:
		d.mu.Unlock()
		return verbs.ErrClosed
	case c.ended:
		defer d.mu.Unlock()
		return c.endError()
	case c.mc == nil || c.mc.State() != ibcm.REQReceived:
		d.mu.Unlock()
		return fmt.Errorf("softroce: nothing to accept: %w", syscall.EINVAL)
	}
	req := c.mc.REQ()
	err := c.ready(&path{
		qpn: req.LocalQPN, rqPSN: psn, sqPSN: req.StartingPSN, mtu: req.PathMTU,
		reads: min(p.InitiatorDepth, req.ResponderResources), readsServed: min(max(p.ResponderResources, req.InitiatorDepth), maxReads),
		ackTimeout: p.ACKTimeout, retry: retry & 7, rnr: req.RNRRetryCount, minRNRTimer: p.MinRNRTimer,
		flowLabel: req.Primary.FlowLabel, trafficClass: req.Primary.TrafficClass, hopLimit: req.Primary.HopLimit, soft: c.mc.PeerIsSoftroce(),
	})
	if err == nil {
		err = d.cm.Reply(d.clock(now), c.mc, ibcm.ReplyParam{
			LocalQPN: c.qp.qpn, StartingPSN: psn, ResponderResources: p.ResponderResources, InitiatorDepth: p.InitiatorDepth,
			FlowControl: p.FlowControl, RNRRetryCount: p.RNRRetryCount, PrivateData: p.PrivateData,
		})
	}
	if err != nil {
		d.cm.Reject(c.mc, ibcm.ReasonConsumer, nil)
		c.leave(now, err)
	} else {
		c.awaitsRTU = true
	}
	d.settleCM(now)
	d.flush(now)
	d.unlock()
	if err != nil {
		return err
	}
	h, err := c.await(ctx, p.Timeout)
	if err == nil && h.kind != ibcm.EventEstablished {
		err = fmt.Errorf("softroce: unexpected CM event %d", h.kind)
	}
	return err
}

func (c *connection) Reject(data []byte) error {
	if len(data) > cm.MaxRejectData {
		return fmt.Errorf("softroce: %d bytes of private data, at most %d: %w", len(data), cm.MaxRejectData, syscall.EINVAL)
	}
	d := c.d
	d.mu.Lock()
	defer d.unlock()
	if c.mc == nil {
		return fmt.Errorf("softroce: nothing to reject: %w", syscall.EINVAL)
	}
	err := d.cm.Reject(c.mc, ibcm.ReasonConsumer, data)
	c.leave(d.now(), cm.ErrDisconnected)
	d.settleCM(d.now())
	d.flush(d.now())
	return err
}

func (c *connection) Disconnect() error {
	d := c.d
	d.mu.Lock()
	defer d.unlock()
	now := d.now()
	if c.qp != nil {
		c.qp.fail(now)
	}
	if d.closed {
		return nil
	}
	if c.mc == nil {
		c.end(cm.ErrDisconnected)
		return nil
	}
	d.cm.Disconnect(d.clock(now), c.mc)
	if s := c.mc.State(); s == ibcm.Gone {
		c.end(cm.ErrDisconnected)
	}
	d.settleCM(now)
	d.flush(now)
	return nil
}

// Close disconnects. The manager remembers the connection until its timewait is over.
func (c *connection) Close() error {
	err := c.Disconnect()
	d := c.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.qp != nil {
		c.qp.conn = nil
		c.qp = nil
	}
	return err
}

// leaveAll says goodbye on every connection. Device.mu is held.
func (d *Device) leaveAll(now rc.Time) {
	for _, c := range d.cm.Conns() {
		d.cm.Disconnect(d.clock(now), c)
		if o, ok := c.Owner.(*connection); ok {
			o.leave(now, verbs.ErrClosed)
		}
	}
	d.settleCM(now)
}
