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
	// silence, of a device that can, makes it lose all packets for a time.
	silence   func(time.Duration)
	port      iu.PortID
	portRev10 iu.PortID // the same with its halves swapped, as I/O class 0xff00 writes it
	idExt     uint64
	iocGUID   uint64

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
	underWay []*pendingLogin      // guarded by mu: logins, the oldest first
	past     []ChannelStats       // guarded by mu: of ended channels

	gone                    atomic.Pointer[time.Time] // vanished until then
	logins, rejected, ended atomic.Uint64
	evicted                 atomic.Uint64
	arrivals                atomic.Uint64 // logins that came and were not refused at once
}

// nexus is an I_T nexus: all channels between one initiator port and this target port.
type nexus struct {
	initiator iu.PortID
	multi     atomic.Bool // has, or had, more than one channel
	chans     []*channel  // guarded by Target.mu
	refs      int         // guarded by Target.mu: channels and logins under way
	next      int         // guarded by Target.mu: number of the next channel
	logins    atomic.Pointer[nexusLogins]
	first     uint64 // guarded by Target.mu: arrival of the last single-channel login; what came before it is superseded
}

// nexusLogins counts the logins of an initiator port since its last single-channel login, which is one of them, and those that got a channel.
type nexusLogins struct{ asked, granted atomic.Int32 }

// New makes a target port on ctx and starts listening; Serve takes the logins.
func New(ctx verbs.Context, conn cm.Connector, cfg Config) (_ *Target, err error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	t := &Target{
		ctx: ctx, conn: conn, cfg: cfg, stopping: make(chan struct{}), quit: make(chan struct{}), tmWake: make(chan struct{}, 1),
		nexuses: map[iu.PortID]*nexus{}, regions: map[*lun.Unit][]verbs.MemoryRegion{}, workers: map[*lun.Unit]*workers{},
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
	if d, ok := ctx.(interface{ Silence(time.Duration) }); ok {
		t.silence = d.Silence
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
func (t *Target) Addr() netip.AddrPort {
	a := t.listener.Addr()
	if a.Addr().IsLinkLocalUnicast() && a.Addr().Zone() == "" {
		a = netip.AddrPortFrom(a.Addr().WithZone(t.cfg.Listen.Addr().Zone()), a.Port()) // leads nowhere without
	}
	return a
}

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
	if d, ok := t.ctx.(interface{ Refusals() <-chan cm.Refusal }); ok {
		manager.Go(func() { logRefusals(t.cfg.Log, d.Refusals(), t.quit) })
	}
	if t.faults != nil {
		t.faults.start()
	}
	err := t.acceptLoop(ctx)
	close(t.stopping)
	_ = t.listener.Close()
	if o.onEnd != nil {
		o.onEnd(t.Stats())
	}
	if t.vanishedFor() > 0 && t.silence != nil {
		t.silence(0) // who comes to its end says so
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
		l := t.begins(peerAddr(conn))
		if l == nil {
			t.reject(conn, 0, &rejection{reason: iu.RejectInsufficientResources, why: "too many logins at once"})
			_ = conn.Close()
			continue
		}
		arrival := t.arrivals.Add(1)
		t.wg.Go(func() { t.login(ctx, conn, l, arrival) })
	}
}

// pendingLogin is a login under way.
type pendingLogin struct {
	from netip.Addr

	// Guarded by Target.mu.
	cancel  context.CancelFunc // of what waits for the peer only: its RTU, or the end of its patience; nil: something else is waited for
	ch      *channel           // that waits for the RTU
	since   time.Time          // of the wait
	evicted bool
}

// halfOpen reports that nothing but the peer is missing, and that it has said nothing since its request, which anybody can send in any name. A command
// may come before the RTU.
func (l *pendingLogin) halfOpen() bool {
	return l.cancel != nil && (l.ch == nil || l.ch.count.commands.Load()+l.ch.count.taskMgmt.Load() == 0)
}

// old reports that the peer has had time to answer. Others may then have what is short; places for logins as such they may have at once, as the
// oldest of so many is old enough.
func (l *pendingLogin) old() bool { return time.Since(l.since) > halfOpenGrace }

// begins counts a login of an address; nil: there are too many. Half-open ones make room for it, the oldest first: of the same address when that has
// enough of them, else of any.
func (t *Target) begins(from netip.Addr) *pendingLogin {
	t.mu.Lock()
	defer t.mu.Unlock()
	same := 0
	for _, l := range t.underWay {
		if l.from == from {
			same++
		}
	}
	if same >= maxLoginsFrom && !t.evictLocked(func(l *pendingLogin) bool { return l.from == from && l.old() }) {
		return nil
	}
	if len(t.underWay) >= maxLogins && !t.evictLocked(func(*pendingLogin) bool { return true }) {
		return nil
	}
	l := &pendingLogin{from: from}
	t.underWay = append(t.underWay, l)
	return l
}

// evictLocked gives up the oldest half-open login that ok names. Its place, and its channel's among the sessions, are free at once.
func (t *Target) evictLocked(ok func(*pendingLogin) bool) bool {
	i := slices.IndexFunc(t.underWay, func(l *pendingLogin) bool { return l.halfOpen() && ok(l) })
	if i < 0 {
		return false
	}
	l := t.underWay[i]
	t.underWay = slices.Delete(t.underWay, i, i+1)
	l.evicted = true
	if l.ch != nil {
		t.sessions--
	}
	t.evicted.Add(1)
	l.cancel()
	return true
}

// awaits notes that l waits for its peer only, and can be given up by cancel.
func (t *Target) awaits(l *pendingLogin, ch *channel, cancel context.CancelFunc) {
	t.mu.Lock()
	l.ch, l.cancel, l.since = ch, cancel, time.Now()
	t.mu.Unlock()
}

// came notes that the wait is over. A login that was given up at the very moment at which its peer came is a session all the same.
func (t *Target) came(l *pendingLogin) {
	t.mu.Lock()
	defer t.mu.Unlock()
	l.cancel = nil
	if l.evicted {
		l.evicted = false
		t.sessions++
	}
}

// ends undoes begins.
func (t *Target) ends(l *pendingLogin) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if i := slices.Index(t.underWay, l); i >= 0 {
		t.underWay = slices.Delete(t.underWay, i, i+1)
	}
}

// login takes one connection request to its end. arrival is its place in the order in which they came, which its goroutine may be overtaken in.
func (t *Target) login(ctx context.Context, conn cm.Conn, l *pendingLogin, arrival uint64) {
	defer t.ends(l)
	if !t.awake(ctx, conn) {
		_ = conn.Close()
		return
	}
	req, err := decodeLogin(conn.Request().PrivateData, conn.Route().Local.IsIB())
	if err != nil {
		t.reject(conn, 0, &rejection{reason: iu.RejectUnableToEstablish, why: err.Error()})
		_ = conn.Close()
		return
	}
	ch, rej := t.admit(ctx, conn, l, &req, arrival)
	if rej != nil {
		if rej.ignore { // until the peer gives up: to close the connection would be an answer
			ictx, cancel := context.WithTimeout(ctx, ignoreTime)
			t.awaits(l, nil, cancel)
			select {
			case <-conn.Done():
			case <-ictx.Done():
			}
			cancel()
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
	t.ends(l)
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
func (t *Target) admit(ctx context.Context, conn cm.Conn, l *pendingLogin, req *iu.LoginReq, arrival uint64) (*channel, *rejection) {
	if rej := t.judge(req, peerAddr(conn)); rej != nil {
		return nil, rej
	}
	rsp := t.accept(req)
	var rspRaw []byte
	if t.faults != nil {
		rej, raw := t.faults.login(ctx, conn, req, &rsp)
		select {
		case <-conn.Done(): // the peer has not waited so long
			return nil, nil
		default:
		}
		// A login that made the target vanish is answered as the peer's CM repeats it when the target is back.
		if !t.awake(ctx, conn) {
			return nil, nil
		}
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
			t.leave(n, nil, true)
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
		t.awaits(l, ch, cancel)
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
		t.ends(l) // it cannot be given up any more
		if l.evicted {
			err = errors.New("given up for a newer login; the peer has not answered yet")
		}
		t.cfg.Log.Warn("login not completed", "from", peerAddr(conn), "error", err)
		joined = true // forget leaves
		t.forget(ch, !l.evicted)
		ch.release()
		close(ch.done)
		return nil, nil
	}
	t.came(l)
	joined = true
	ch.logins.granted.Add(1)
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
		if !single {
			n.logins.Load().asked.Add(1)
		}
	}
	if single {
		replaced = have
	}
	switch {
	case n != nil && arrival < n.first:
		return nil, 0, nil, superseded()
	case !single && have >= t.cfg.MaxChannels:
		return nil, 0, nil, &rejection{reason: iu.RejectChannelLimit, why: fmt.Sprintf("channel %d asked for by the initiator port, %d granted, which is the limit (--max-channels)", n.logins.Load().asked.Load(), have)}
	case t.sessions-replaced >= t.cfg.MaxSessions && !t.evictLocked(func(l *pendingLogin) bool { return l.ch != nil && l.old() }):
		return nil, 0, nil, &rejection{reason: iu.RejectInsufficientResources, why: fmt.Sprintf("the target has %d channels, which is the limit", t.sessions)}
	}
	t.sessions++
	if n == nil {
		n = &nexus{initiator: req.InitiatorPort}
		t.nexuses[n.initiator] = n
	}
	if single || n.logins.Load() == nil {
		c := &nexusLogins{}
		c.asked.Store(1)
		n.logins.Store(c)
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

// asked counts a login that will be refused because its initiator port may have no more channels, and returns how many it has asked for.
func (t *Target) asked(port iu.PortID) int32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := t.nexuses[port]; n != nil {
		return n.logins.Load().asked.Add(1)
	}
	return 1
}

// superseded refuses what an initiator sent before it logged in anew: its peer is gone, or waits for something else.
func superseded() *rejection {
	return &rejection{reason: iu.RejectUnableToEstablish, why: "a later login of the same initiator port has come"}
}

// leave takes a channel, or a login that came to nothing, off the books. counted: it is one of t.sessions.
func (t *Target) leave(n *nexus, ch *channel, counted bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if counted {
		t.sessions--
	}
	n.refs--
	if i := slices.Index(n.chans, ch); i >= 0 {
		n.chans = slices.Delete(n.chans, i, i+1)
	}
	if n.refs == 0 && t.nexuses[n.initiator] == n {
		delete(t.nexuses, n.initiator)
	}
}

// forget is leave for a channel that was there; its counters are kept.
func (t *Target) forget(ch *channel, counted bool) {
	t.ended.Add(1)
	t.leave(ch.nexus, ch, counted)
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
	s := Stats{Logins: t.logins.Load(), Rejected: t.rejected.Load(), Evicted: t.evicted.Load(), Ended: t.ended.Load(), Channels: []ChannelStats{}, Faults: []RuleStats{}}
	for _, ch := range t.channels() {
		s.Channels = append(s.Channels, ch.snapshot())
	}
	if t.faults != nil {
		s.Faults = t.faults.stats()
	}
	t.mu.Lock()
	s.Past = append([]ChannelStats{}, t.past...)
	t.mu.Unlock()
	slices.SortFunc(s.Channels, func(a, b ChannelStats) int {
		return cmp.Or(cmp.Compare(a.Initiator, b.Initiator), cmp.Compare(a.Channel, b.Channel))
	})
	return s
}

// vanish makes the target go silent: what comes within d is lost, what it says is lost, and then all goes on, for those whose retries have lasted. A
// device that cannot lose packets (a kernel's) loses its channels instead. May be called under a channel's lock.
func (t *Target) vanish(d time.Duration) {
	until := time.Now().Add(d)
	t.gone.Store(&until)
	if t.silence != nil {
		t.silence(d)
		return
	}
	go func() {
		for _, ch := range t.channels() {
			ch.breakOff()
		}
	}()
}

// awake waits until a target that has vanished is back, and reports whether conn's peer is then still there.
func (t *Target) awake(ctx context.Context, conn cm.Conn) bool {
	for d := t.vanishedFor(); d > 0; d = t.vanishedFor() {
		select {
		case <-time.After(d):
		case <-conn.Done():
			return false
		case <-ctx.Done():
			return false
		}
	}
	return true
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
	if until := t.gone.Load(); until != nil {
		return time.Until(*until)
	}
	return 0
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
