package ucm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/verbs"
)

// defaultMinRNRTimer is 0.64 ms (IBA vol. 1 table 45). The kernel leaves the field 0, which means
// 655.36 ms: a peer that is early by one message would stall that long.
const defaultMinRNRTimer = 12

// id is one rdma_cm id: a connection (cm.Conn), or the inside of a listener.
type id struct {
	c        *Connector
	uid      uint64
	handle32 uint32 // the kernel's
	passive  bool

	route   cm.Route
	request cm.ConnParam

	events   chan event // progress of resolve, connect and accept
	requests chan event // listener only

	mu     sync.Mutex
	qp     verbs.QueuePair
	live   bool // RTU sent or received: Disconnect means something
	closed bool
	err    error
	done   chan struct{}
	gone   chan struct{} // closed at TIMEWAIT_EXIT
}

var _ cm.Conn = (*id)(nil)

func newID(c *Connector) *id {
	return &id{c: c, events: make(chan event, 16), done: make(chan struct{}), gone: make(chan struct{})}
}

// handle runs in the event loop.
func (x *id) handle(ev event) {
	switch ev.kind {
	case evConnectRequest:
		select {
		case x.requests <- ev:
		default:
			// The kernel's backlog is what bounds this; a full queue means it was raised behind our back.
			x.c.rejectHandle(ev.id, nil)
			x.c.destroy(ev.id)
		}
	case evDisconnected:
		x.mu.Lock()
		qp, live := x.qp, x.live
		x.live = false
		x.mu.Unlock()
		// The peer's DREQ waits for our DREP, which DISCONNECT sends; the queue pair
		// goes to ERR so that what is posted comes back flushed.
		if live {
			if qp != nil {
				qp.Modify(&verbs.QPAttr{State: verbs.QPError}, verbs.QPMaskState)
			}
			x.disconnectCommand()
		}
		x.end(cm.ErrDisconnected)
	case evDeviceRemoval:
		x.end(verbs.ErrDeviceGone)
	case evAddrChange:
		// The interface has other addresses now; the connection itself lives on until its timer says otherwise.
	case evTimewaitExit:
		x.end(cm.ErrDisconnected)
		x.mu.Lock()
		select {
		case <-x.gone:
		default:
			close(x.gone)
		}
		x.mu.Unlock()
	default:
		select {
		case x.events <- ev:
		default:
		}
	}
}

// end records why the connection is over; the first reason stays.
func (x *id) end(err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.err == nil {
		x.err = err
		close(x.done)
	}
}

// await waits for the event want, turning the failures into typed errors.
func (x *id) await(ctx context.Context, want uint32) (event, error) {
	for {
		select {
		case ev := <-x.events:
			switch ev.kind {
			case want:
				return ev, nil
			case evRejected:
				return ev, &cm.RejectError{Reason: uint16(ev.status), PrivateData: ev.param.PrivateData}
			case evUnreachable:
				return ev, fmt.Errorf("%w (%s)", cm.ErrUnreachable, errnoText(ev.status))
			case evAddrError, evRouteError, evConnectError:
				return ev, statusErrno(ev.status)
			}
		case <-x.done:
			return event{}, x.Err()
		case <-ctx.Done():
			return event{}, ctx.Err()
		}
	}
}

func statusErrno(status int32) error {
	if status < 0 {
		return unix.Errno(-status)
	}
	return fmt.Errorf("status %d", status)
}

func errnoText(status int32) string { return statusErrno(status).Error() }

// Route implements cm.Conn.
func (x *id) Route() cm.Route { return x.route }

// Request implements cm.Conn.
func (x *id) Request() cm.ConnParam { return x.request }

// initAttr asks the kernel for the attributes that move the queue pair to state.
func (x *id) initAttr(state verbs.QPState) (verbs.QPAttr, verbs.QPAttrMask, error) {
	var body [sizeInitQPAttr]byte
	var resp [sizeQPAttr]byte
	host.PutUint32(body[8:], x.handle32)
	host.PutUint32(body[12:], uint32(state))
	if err := x.c.command(cmdInitQPAttr, body[:], 0, resp[:]); err != nil {
		return verbs.QPAttr{}, 0, fmt.Errorf("ucm: attributes for %s: %w", state, err)
	}
	a, m := qpAttr(resp[:])
	a.State = state
	return a, m | verbs.QPMaskState, nil
}

// knownAccess leaves out access bits that only newer kernels know (FLUSH, 6.12): every provider accepts the rest.
const knownAccess = verbs.AccessLocalWrite | verbs.AccessRemoteWrite | verbs.AccessRemoteRead | verbs.AccessRemoteAtomic

func (x *id) modifyInit(qp verbs.QueuePair) error {
	a, m, err := x.initAttr(verbs.QPInitState)
	if err != nil {
		return err
	}
	a.Access &= knownAccess
	return qp.Modify(&a, m)
}

// InitQP implements cm.Conn.
func (x *id) InitQP(qp verbs.QueuePair) error {
	if err := x.modifyInit(qp); err != nil {
		return err
	}
	x.mu.Lock()
	x.qp = qp
	x.mu.Unlock()
	return nil
}

// toRTS moves the queue pair through RTR to RTS. On the passive side p's own READ limits replace the
// request's, as the kernel replaces them in the REP.
func (x *id) toRTS(qp verbs.QueuePair, p *cm.ConnParam) error {
	a, m, err := x.initAttr(verbs.QPReadyToReceive)
	if err != nil {
		return err
	}
	a.MinRNRTimer = p.MinRNRTimer
	if a.MinRNRTimer == 0 {
		a.MinRNRTimer = defaultMinRNRTimer
	}
	m |= verbs.QPMaskMinRNRTimer
	if x.passive {
		a.MaxDestRdAtomic = p.ResponderResources
	}
	if err := qp.Modify(&a, m); err != nil {
		return err
	}
	if x.route.PathMTU == 0 {
		x.route.PathMTU = a.PathMTU
	}
	if a, m, err = x.initAttr(verbs.QPReadyToSend); err != nil {
		return err
	}
	if x.passive {
		a.MaxRdAtomic = p.InitiatorDepth
	}
	return qp.Modify(&a, m)
}

func (x *id) boundQP() (verbs.QueuePair, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.qp == nil {
		return nil, errors.New("ucm: InitQP was not called")
	}
	return x.qp, nil
}

// encodeConnect is CONNECT.
func encodeConnect(handle uint32, p *cm.ConnParam, qpn uint32) []byte {
	b := make([]byte, sizeConnect)
	putConnParam(b[0:sizeConnParam], p, qpn)
	host.PutUint32(b[272:], handle)
	return b
}

// encodeAccept is ACCEPT; a nil p is the form that sends the RTU.
func encodeAccept(uid uint64, handle uint32, p *cm.ConnParam, qpn uint32) []byte {
	b := make([]byte, sizeAccept)
	host.PutUint64(b[0:], uid)
	if p != nil {
		putConnParam(b[8:8+sizeConnParam], p, qpn)
	}
	host.PutUint32(b[280:], handle)
	return b
}

// Connect implements cm.Conn.
func (x *id) Connect(ctx context.Context, p cm.ConnParam) (cm.ConnParam, error) {
	room := cm.MaxConnectData
	if x.route.Peer.IsIB() {
		room = cm.MaxConnectDataIB
	}
	if len(p.PrivateData) > room {
		return cm.ConnParam{}, fmt.Errorf("ucm: %d bytes of private data, a REQ to this address has room for %d", len(p.PrivateData), room)
	}
	qp, err := x.boundQP()
	if err != nil {
		return cm.ConnParam{}, err
	}
	ctx, cancel := deadline(ctx, p.Timeout)
	defer cancel()
	if p.ACKTimeout != 0 {
		if err := x.setOption(optionACKTimeout, p.ACKTimeout); err != nil {
			return cm.ConnParam{}, err
		}
	}
	if err := x.c.command(cmdConnect, encodeConnect(x.handle32, &p, qp.QPN()), 0, nil); err != nil {
		return cm.ConnParam{}, fmt.Errorf("ucm: connect to %s: %w", x.route.Peer, err)
	}
	ev, err := x.await(ctx, evConnectResponse)
	if err != nil {
		return cm.ConnParam{}, fmt.Errorf("ucm: connect to %s: %w", x.route.Peer, err)
	}
	// Only now do the INIT attributes carry the remote access rights (cm_init_qp_init_attr).
	if err := x.modifyInit(qp); err != nil {
		return cm.ConnParam{}, err
	}
	if err := x.toRTS(qp, &p); err != nil {
		return cm.ConnParam{}, err
	}
	x.mu.Lock()
	x.live = true
	x.mu.Unlock()
	if err := x.c.command(cmdAccept, encodeAccept(x.uid, x.handle32, nil, 0), 0, nil); err != nil {
		return cm.ConnParam{}, fmt.Errorf("ucm: send RTU to %s: %w", x.route.Peer, err)
	}
	return ev.param, nil
}

// Accept implements cm.Conn.
func (x *id) Accept(ctx context.Context, p cm.ConnParam) error {
	if len(p.PrivateData) > cm.MaxAcceptData {
		return fmt.Errorf("ucm: %d bytes of private data, a REP has room for %d", len(p.PrivateData), cm.MaxAcceptData)
	}
	qp, err := x.boundQP()
	if err != nil {
		return err
	}
	if err := x.toRTS(qp, &p); err != nil {
		return err
	}
	x.mu.Lock()
	x.live = true
	x.mu.Unlock()
	ctx, cancel := deadline(ctx, p.Timeout)
	defer cancel()
	if err := x.c.command(cmdAccept, encodeAccept(x.uid, x.handle32, &p, qp.QPN()), 0, nil); err != nil {
		return fmt.Errorf("ucm: accept %s: %w", x.route.Peer, err)
	}
	if _, err := x.await(ctx, evEstablished); err != nil {
		return fmt.Errorf("ucm: accept %s: %w", x.route.Peer, err)
	}
	return nil
}

// Reject implements cm.Conn.
func (x *id) Reject(data []byte) error {
	if len(data) > cm.MaxRejectData {
		return fmt.Errorf("ucm: %d bytes of private data, a REJ has room for %d", len(data), cm.MaxRejectData)
	}
	return x.c.rejectHandle(x.handle32, data)
}

func encodeReject(handle uint32, data []byte) []byte {
	b := make([]byte, sizeReject)
	host.PutUint32(b[0:], handle)
	b[4] = byte(len(data))
	b[5] = cm.ReasonConsumerDefined
	copy(b[8:], data)
	return b
}

func (c *Connector) rejectHandle(handle uint32, data []byte) error {
	return c.command(cmdReject, encodeReject(handle, data), 0, nil)
}

func (x *id) disconnectCommand() error {
	var body [sizeDisconnect]byte
	host.PutUint32(body[:], x.handle32)
	return x.c.command(cmdDisconnect, body[:], 0, nil)
}

// Disconnect implements cm.Conn.
func (x *id) Disconnect() error {
	x.mu.Lock()
	qp, live := x.qp, x.live && !x.closed
	x.live = false
	x.mu.Unlock()
	if !live {
		return nil
	}
	if qp != nil {
		if err := qp.Modify(&verbs.QPAttr{State: verbs.QPError}, verbs.QPMaskState); err != nil && !errors.Is(err, verbs.ErrClosed) {
			return err
		}
	}
	return x.disconnectCommand()
}

// Done implements cm.Conn.
func (x *id) Done() <-chan struct{} { return x.done }

// Err implements cm.Conn.
func (x *id) Err() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.err
}

// Close implements cm.Conn. The kernel sends what the state asks for: a REJ, a DREQ or nothing, and finishes
// timewait by itself.
func (x *id) Close() error {
	x.mu.Lock()
	if x.closed {
		x.mu.Unlock()
		return nil
	}
	x.closed, x.live = true, false
	x.mu.Unlock()
	err := x.c.destroy(x.handle32)
	x.c.unregister(x)
	x.end(net.ErrClosed)
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("ucm: destroy id: %w", err)
	}
	return nil
}

// setOption sets a one-byte option of level RDMA_OPTION_ID.
func (x *id) setOption(name uint32, value uint8) error {
	return x.c.setOption(x.handle32, name, []byte{value})
}

// Listen implements cm.Connector.
func (c *Connector) Listen(addr netip.AddrPort, backlog int) (cm.Listener, error) {
	x, err := c.create(portSpaceTCP)
	if err != nil {
		return nil, err
	}
	x.requests = make(chan event, max(backlog, 1))
	fail := func(what string, err error) (cm.Listener, error) {
		x.Close()
		hint := ""
		if errors.Is(err, unix.EADDRINUSE) {
			hint = ": another RDMA listener has that port"
		}
		return nil, fmt.Errorf("ucm: %s %s: %w%s", what, addr, err, hint)
	}
	scope, err := scopeID(addr.Addr())
	if err != nil {
		return fail("listen on", err)
	}
	// A restarted target must get its port back while old connections linger in timewait.
	if err := c.setOption(x.handle32, optionReuseAddr, []byte{1, 0, 0, 0}); err != nil {
		return fail("set REUSEADDR for", err)
	}
	b := make([]byte, sizeBind)
	host.PutUint32(b[0:], x.handle32)
	host.PutUint16(b[4:], uint16(putSockaddrIP(b[8:], addr, scope)))
	if err := c.command(cmdBind, b, 0, nil); err != nil {
		return fail("bind to", err)
	}
	var body [sizeQuery]byte
	var resp [sizeQueryAddrResp]byte
	host.PutUint32(body[8:], x.handle32)
	host.PutUint32(body[12:], queryAddr)
	if err := c.command(cmdQuery, body[:], 0, resp[:]); err != nil {
		return fail("query", err)
	}
	bound := getSockaddr(resp[16:144]).IP
	var ls [sizeListen]byte
	host.PutUint32(ls[0:], x.handle32)
	host.PutUint32(ls[4:], uint32(backlog))
	if err := c.command(cmdListen, ls[:], 0, nil); err != nil {
		return fail("listen on", err)
	}
	return &listener{x: x, addr: bound}, nil
}

func (c *Connector) setOption(handle, name uint32, value []byte) error {
	// The option's value travels by pointer: it goes through a response page like any answer.
	var body [sizeSetOption]byte
	page, err := c.page()
	if err != nil {
		return err
	}
	defer c.release(page)
	copy(page.Bytes(), value)
	host.PutUint64(body[0:], page.Addr())
	host.PutUint32(body[8:], handle)
	host.PutUint32(body[12:], 0) // RDMA_OPTION_ID
	host.PutUint32(body[16:], name)
	host.PutUint32(body[20:], uint32(len(value)))
	return c.command(cmdSetOption, body[:], 0, nil)
}

type listener struct {
	x    *id
	addr netip.AddrPort
}

// Addr implements cm.Listener.
func (l *listener) Addr() netip.AddrPort { return l.addr }

// Accept implements cm.Listener.
func (l *listener) Accept(ctx context.Context) (cm.Conn, error) {
	for {
		select {
		case ev := <-l.x.requests:
			x := newID(l.x.c)
			x.handle32, x.passive, x.request = ev.id, true, ev.param
			if err := l.x.c.register(x); err != nil {
				l.x.c.destroy(ev.id)
				return nil, err
			}
			if err := x.query(); err != nil {
				x.Close()
				continue // the peer has given up meanwhile
			}
			if dev := l.x.c.dev; dev != nil && x.route.NodeGUID != l.x.c.guid {
				x.Reject(nil)
				x.Close()
				continue // it came in through another device
			}
			return x, nil
		case <-l.x.done:
			return nil, l.x.Err()
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Close implements cm.Listener. Requests that nobody accepted are refused.
func (l *listener) Close() error {
	err := l.x.Close()
	for {
		select {
		case ev := <-l.x.requests:
			l.x.c.destroy(ev.id)
		default:
			return err
		}
	}
}
