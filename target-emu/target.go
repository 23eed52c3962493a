package targetemu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/verbs"
	"srp-initiator/srp/iu"
	"srp-initiator/target-emu/lun"
)

// Target is an SRP target port.
type Target struct {
	ctx  verbs.Context
	conn cm.Connector
	cfg  Config
	acl  *ACL

	pd      verbs.ProtectionDomain
	attr    verbs.DeviceAttr
	regions map[*lun.Unit][]verbs.MemoryRegion
	workers map[*lun.Unit]*workers // of units over slow stores
	// memoryLock, of a device that is a verbs.MemoryLocker, keeps writes to regions out of its packets.
	memoryLock sync.Locker
	port       iu.PortID
	portRev10  iu.PortID // the same with its halves swapped, as I/O class 0xff00 writes it
	idExt      uint64
	iocGUID    uint64

	listener cm.Listener
	faults   *faultRun
	stopping chan struct{} // closed when Serve begins to end
	quit     chan struct{} // closed when all channels are gone
	wg       sync.WaitGroup

	tmMu    sync.Mutex
	tmQueue []*taskMgmt // guarded by tmMu
	tmWake  chan struct{}

	mu       sync.Mutex
	nexuses  map[iu.PortID]*nexus // guarded by mu; by initiator port
	sessions int                  // guarded by mu; logins under way count
	underWay map[netip.Addr]int   // guarded by mu: logins by address
	gone     time.Time            // guarded by mu: vanished until then
	past     []ChannelStats       // guarded by mu: of ended channels

	logins, rejected, ended atomic.Uint64
	pending                 atomic.Int32 // logins under way
	arrivals                uint64       // acceptLoop's: logins that came
}

// nexus is an I_T nexus: all channels between one initiator port and this target port.
type nexus struct {
	initiator iu.PortID
	multi     atomic.Bool // has, or had, more than one channel
	chans     []*channel  // guarded by Target.mu
	refs      int         // guarded by Target.mu: channels and logins under way
	next      int         // guarded by Target.mu: number of the next channel
	first     uint64      // guarded by Target.mu: arrival of the last single-channel login; what came before it is superseded
}

// New makes a target port on ctx and starts listening; Serve takes the logins.
func New(ctx verbs.Context, conn cm.Connector, cfg Config) (_ *Target, err error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	t := &Target{
		ctx: ctx, conn: conn, cfg: cfg, stopping: make(chan struct{}), quit: make(chan struct{}), tmWake: make(chan struct{}, 1),
		nexuses: map[iu.PortID]*nexus{}, underWay: map[netip.Addr]int{}, regions: map[*lun.Unit][]verbs.MemoryRegion{}, workers: map[*lun.Unit]*workers{},
	}
	if t.acl, err = ParseACL(cfg.ACL); err != nil {
		return nil, err
	}
	if t.attr, err = ctx.QueryDevice(); err != nil {
		return nil, fmt.Errorf("targetemu: %w", err)
	}
	guid := t.attr.NodeGUID
	if g, err := ctx.QueryGID(1, 0); err == nil && (guid == 0 || ctx.Provider() == "softroce") {
		// softroce's node GUID differs each time: make one from the address, so that initiators find the target again.
		h := fnv.New64a()
		h.Write(g.GID[:])
		guid = h.Sum64()&^(1<<56) | 1<<57 // locally administered, not a group
	}
	if l, ok := ctx.(verbs.MemoryLocker); ok {
		t.memoryLock = l.MemoryLock()
	}
	t.idExt, t.iocGUID = cmp.Or(cfg.IDExt, guid), cmp.Or(cfg.IOCGUID, guid)
	t.port = iu.MakePortID(t.idExt, t.iocGUID)
	t.portRev10 = iu.MakePortID(t.iocGUID, t.idExt)
	if t.pd, err = ctx.AllocPD(); err != nil {
		return nil, fmt.Errorf("targetemu: %w", err)
	}
	defer func() {
		if err != nil {
			t.free()
		}
	}()
	for _, num := range cfg.Units.Numbers() {
		u := cfg.Units.Find(num)
		if _, ok := t.regions[u]; ok {
			continue
		}
		if u.Slow() {
			t.workers[u] = newWorkers()
		}
		var mrs []verbs.MemoryRegion
		for _, r := range u.Regions() {
			mr, err := t.pd.RegisterMemory(r, verbs.AccessLocalWrite)
			if err != nil {
				// Without it data is copied through the channel's buffers: slower, and no other difference.
				cfg.Log.Warn("cannot register a LUN's memory with the device; its data will be copied", "lun", num, "error", err)
				for _, m := range mrs {
					_ = m.Deregister()
				}
				mrs = nil
				break
			}
			mrs = append(mrs, mr)
		}
		t.regions[u] = mrs
		if t.memoryLock != nil {
			u.AddMemoryLock(t.memoryLock)
		}
	}
	if cfg.Faults != nil {
		t.faults = newFaultRun(t, cfg.Faults)
	}
	if t.listener, err = conn.Listen(cfg.Listen, 128); err != nil {
		return nil, fmt.Errorf("targetemu: listen on %s: %w", cfg.Listen, err)
	}
	return t, nil
}

// Addr is where the target listens.
func (t *Target) Addr() netip.AddrPort { return t.listener.Addr() }

// PortID is the target port identifier.
func (t *Target) PortID() iu.PortID { return t.port }

// LoginString is the kernel's add_target string that leads here, reached at addr (with the listener's port when that is 0).
func (t *Target) LoginString(addr netip.AddrPort) string {
	if addr.Port() == 0 {
		addr = netip.AddrPortFrom(addr.Addr(), t.Addr().Port())
	}
	return fmt.Sprintf("id_ext=%016x,ioc_guid=%016x,dest=%s", t.idExt, t.iocGUID, addr)
}

// ServeOption changes what Serve does.
type ServeOption func(*serveOptions)

type serveOptions struct{ onEnd func(Stats) }

// OnEnd calls f with the last counters, before the channels that are still there are disconnected.
func OnEnd(f func(Stats)) ServeOption { return func(o *serveOptions) { o.onEnd = f } }

// Serve takes logins until ctx is done, then disconnects every channel, waits for their end and releases what the target
// holds. It returns nil after ctx's end.
func (t *Target) Serve(ctx context.Context, opts ...ServeOption) error {
	defer t.free()
	var o serveOptions
	for _, f := range opts {
		f(&o)
	}
	var manager sync.WaitGroup
	manager.Go(t.taskManager)
	if t.faults != nil {
		t.faults.start()
	}
	err := t.acceptLoop(ctx)
	close(t.stopping)
	_ = t.listener.Close()
	if o.onEnd != nil {
		o.onEnd(t.Stats())
	}
	for _, ch := range t.channels() {
		ch.fail(errShutdown)
	}
	t.wg.Wait()
	if t.faults != nil {
		t.faults.stop()
	}
	close(t.quit)
	manager.Wait()
	return err
}

func (t *Target) acceptLoop(ctx context.Context) error {
	for {
		conn, err := t.listener.Accept(ctx)
		switch {
		case err == nil:
		case ctx.Err() != nil || errors.Is(err, net.ErrClosed):
			return nil
		default:
			return fmt.Errorf("targetemu: %w", err)
		}
		if from := peerAddr(conn); t.pending.Load() >= maxLogins || !t.begins(from) {
			t.reject(conn, 0, &rejection{reason: iu.RejectInsufficientResources, why: "too many logins at once"})
			_ = conn.Close()
			continue
		}
		t.pending.Add(1)
		t.arrivals++
		arrival := t.arrivals
		t.wg.Go(func() { t.login(ctx, conn, arrival) })
	}
}

// begins counts a login of an address, unless it has enough under way.
func (t *Target) begins(from netip.Addr) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.underWay[from] >= maxLoginsFrom {
		return false
	}
	t.underWay[from]++
	return true
}

// ends undoes begins, and the counting in pending.
func (t *Target) ends(from netip.Addr) {
	t.pending.Add(-1)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.underWay[from]--; t.underWay[from] <= 0 {
		delete(t.underWay, from)
	}
}

// login takes one connection request to its end. arrival is its place in the order in which they came, which its goroutine may be overtaken in.
func (t *Target) login(ctx context.Context, conn cm.Conn, arrival uint64) {
	counted := true
	defer func() {
		if counted {
			t.ends(peerAddr(conn))
		}
	}()
	// While it is away the request is lost; the peer repeats it, and the one that comes when the target is back is answered, unless the peer gave up.
	for d := t.vanishedFor(); d > 0; d = t.vanishedFor() {
		select {
		case <-time.After(d):
			continue
		case <-conn.Done():
		case <-ctx.Done():
		}
		_ = conn.Close()
		return
	}
	req, err := decodeLogin(conn.Request().PrivateData, conn.Route().Local.IsIB())
	if err != nil {
		t.reject(conn, 0, &rejection{reason: iu.RejectUnableToEstablish, why: err.Error()})
		_ = conn.Close()
		return
	}
	ch, rej := t.admit(ctx, conn, &req, arrival)
	if rej != nil {
		if rej.ignore {
			t.sleep(ctx, loginTimeout)
		} else {
			t.reject(conn, req.Tag, rej)
		}
		_ = conn.Close()
		return
	}
	if ch == nil {
		_ = conn.Close()
		return
	}
	counted = false
	t.ends(peerAddr(conn))
	ch.run()
}

func (t *Target) sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

func (t *Target) reject(conn cm.Conn, tag uint64, r *rejection) {
	t.rejected.Add(1)
	t.cfg.Log.Warn("login rejected", "from", peerAddr(conn), "reason", fmt.Sprintf("0x%08x", uint32(r.reason)), "why", r.why)
	data := r.raw
	if data == nil {
		rej := iu.LoginRej{Tag: tag, Reason: r.reason, Formats: t.cfg.Formats}
		data = make([]byte, iu.LoginRejSize)
		_, _ = rej.Encode(data)
	}
	_ = conn.Reject(data)
}

// admit checks a login, makes its channel and accepts the connection. Both results are nil when the peer went away meanwhile.
func (t *Target) admit(ctx context.Context, conn cm.Conn, req *iu.LoginReq, arrival uint64) (*channel, *rejection) {
	if rej := t.judge(req, peerAddr(conn)); rej != nil {
		return nil, rej
	}
	rsp := t.accept(req)
	var rspRaw []byte
	if t.faults != nil {
		rej, raw := t.faults.login(ctx, req, &rsp, peerAddr(conn))
		if rej != nil {
			return nil, rej
		}
		rspRaw = raw
	}
	n, number, old, rej := t.join(req, arrival)
	if rej != nil {
		return nil, rej
	}
	joined := false
	defer func() {
		if !joined {
			t.leave(n, nil)
		}
	}()
	single := req.Flags&iu.MultiChannelMask == iu.SingleChannel
	switch {
	case len(old) == 0:
	case single:
		rsp.Flags |= iu.ChannelsTerminated
		for _, ch := range old {
			ch.fail(errors.New("ended by a new login of the same initiator port"))
		}
		for _, ch := range old {
			select {
			case <-ch.done:
			case <-time.After(loginTimeout):
			}
		}
	default:
		rsp.Flags |= iu.ChannelsMaintained
	}
	ch, err := t.newChannel(n, number, conn, req, &rsp)
	if err != nil {
		return nil, &rejection{reason: iu.RejectInsufficientResources, why: err.Error()}
	}
	data := rspRaw
	if data == nil {
		data = make([]byte, iu.LoginRspSize)
		_, _ = rsp.Encode(data)
	}
	// The handler runs before the REP is sent: the initiator's first command may overtake its RTU.
	ch.started = true
	t.mu.Lock()
	late := arrival < n.first // a later login did not see this one among the channels that it ends
	if !late {
		n.chans = append(n.chans, ch)
	}
	t.mu.Unlock()
	if late {
		ch.started = false
		ch.release()
		return nil, superseded()
	}
	if err = ch.inst.Start(); err == nil {
		their := conn.Request()
		actx, cancel := context.WithTimeout(ctx, loginTimeout)
		go func() { // a later login does not wait long for a peer that may be dead
			select {
			case <-ch.stop:
				t.sleep(actx, supersededGrace)
				cancel()
			case <-actx.Done():
			}
		}()
		err = conn.Accept(actx, cm.ConnParam{
			PrivateData: data, RetryCount: 7, RNRRetryCount: 7, FlowControl: true,
			// At least one: with none a WRITE would wait for ever; a peer that really serves no READ refuses it, and that ends the channel.
			InitiatorDepth:     uint8(max(1, min(int(their.ResponderResources), t.attr.MaxQPInitRdAtom, 16))),
			ResponderResources: uint8(min(int(their.InitiatorDepth), max(t.attr.MaxQPReadAtom, 1), 16)),
		})
		cancel()
	}
	if err != nil {
		t.cfg.Log.Warn("login not completed", "from", peerAddr(conn), "error", err)
		joined = true // forget leaves
		t.forget(ch)
		ch.release()
		close(ch.done)
		return nil, nil
	}
	joined = true
	qpn := ch.qp.QPN()
	t.logins.Add(1)
	t.cfg.Log.Info("login", "initiator", req.InitiatorPort, "from", ch.from, "channel", number, "iu_len", req.ITIULen,
		"immediate_offset", ch.immOffset, "credits", rsp.ReqLimDelta, "qpn", qpn)
	return ch, nil
}

// join finds or makes the nexus of a login and counts the new channel against the limits. old are the channels that the nexus has.
func (t *Target) join(req *iu.LoginReq, arrival uint64) (n *nexus, number int, old []*channel, rej *rejection) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n = t.nexuses[req.InitiatorPort]
	single := req.Flags&iu.MultiChannelMask == iu.SingleChannel
	have, replaced := 0, 0
	if n != nil {
		have = len(n.chans)
	}
	if single {
		replaced = have
	}
	switch {
	case n != nil && arrival < n.first:
		return nil, 0, nil, superseded()
	case !single && have >= t.cfg.MaxChannels:
		return nil, 0, nil, &rejection{reason: iu.RejectChannelLimit, why: fmt.Sprintf("the initiator port has %d channels, which is the limit", have)}
	case t.sessions-replaced >= t.cfg.MaxSessions:
		return nil, 0, nil, &rejection{reason: iu.RejectInsufficientResources, why: fmt.Sprintf("the target has %d channels, which is the limit", t.sessions)}
	}
	t.sessions++
	if n == nil {
		n = &nexus{initiator: req.InitiatorPort}
		t.nexuses[n.initiator] = n
	}
	if !single {
		n.multi.Store(true)
	}
	n.refs++
	old = slices.Clone(n.chans)
	if single {
		n.next, n.first = 0, arrival
	}
	number = n.next
	n.next++
	return n, number, old, nil
}

// superseded refuses what an initiator sent before it logged in anew: its peer is gone, or waits for something else.
func superseded() *rejection {
	return &rejection{reason: iu.RejectUnableToEstablish, why: "a later login of the same initiator port has come"}
}

// leave takes a channel, or a login that came to nothing, off the books.
func (t *Target) leave(n *nexus, ch *channel) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sessions--
	n.refs--
	if i := slices.Index(n.chans, ch); i >= 0 {
		n.chans = slices.Delete(n.chans, i, i+1)
	}
	if n.refs == 0 && t.nexuses[n.initiator] == n {
		delete(t.nexuses, n.initiator)
	}
}

// forget is leave for a channel that was there; its counters are kept.
func (t *Target) forget(ch *channel) {
	t.ended.Add(1)
	t.leave(ch.nexus, ch)
	s := ch.snapshot()
	t.mu.Lock()
	if len(t.past) == maxPast {
		t.past = slices.Delete(t.past, 0, 1)
	}
	t.past = append(t.past, s)
	t.mu.Unlock()
}

// channels lists all channels.
func (t *Target) channels() []*channel {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []*channel
	for _, n := range t.nexuses {
		out = append(out, n.chans...)
	}
	return out
}

// Stats are the counters of the target and of its live channels.
func (t *Target) Stats() Stats {
	s := Stats{Logins: t.logins.Load(), Rejected: t.rejected.Load(), Ended: t.ended.Load(), Channels: []ChannelStats{}}
	for _, ch := range t.channels() {
		s.Channels = append(s.Channels, ch.snapshot())
	}
	t.mu.Lock()
	s.Past = append([]ChannelStats{}, t.past...)
	t.mu.Unlock()
	slices.SortFunc(s.Channels, func(a, b ChannelStats) int {
		return cmp.Or(cmp.Compare(a.Initiator, b.Initiator), cmp.Compare(a.Channel, b.Channel))
	})
	return s
}

// vanish makes the target go silent: its channels stop answering, without a DREQ, and logins are not answered for d.
func (t *Target) vanish(d time.Duration) {
	t.mu.Lock()
	t.gone = time.Now().Add(d)
	t.mu.Unlock()
	for _, ch := range t.channels() {
		ch.breakOff()
	}
}

// breakOff ends a channel without telling the peer.
func (ch *channel) breakOff() {
	ch.once.Do(func() {
		ch.silent = true
		ch.why = errors.New("fault: the channel stops answering")
		close(ch.stop)
	})
}

func (t *Target) vanishedFor() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return time.Until(t.gone)
}

// free releases what New made.
func (t *Target) free() {
	if t.listener != nil {
		_ = t.listener.Close()
	}
	for u, mrs := range t.regions {
		for _, m := range mrs {
			_ = m.Deregister()
		}
		if t.memoryLock != nil {
			u.RemoveMemoryLock(t.memoryLock)
		}
	}
	t.regions = nil
	for _, w := range t.workers {
		w.close()
	}
	_ = t.pd.Dealloc()
}
