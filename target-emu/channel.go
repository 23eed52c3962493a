package targetemu

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"srp-initiator/completion"
	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
	"srp-initiator/srp/iu"
	"srp-initiator/srp/scsi"
	"srp-initiator/target-emu/lun"
)

// A channel's memory is one region:
//
//	recvDepth receive slots of rxLen | commands response slots of txLen | commands small buffers of smallLen | largeBuffers of largeLen
//
// Receive slot: the device's while posted; the handler's during receive; it is posted again in the same batch, or when a command
// slot is free. Response slot, small and large buffer: the command's until its SEND is known to be complete.

// channel is one RDMA channel of an I_T nexus.
type channel struct {
	// mu is held by whoever owns the channel's state: the completion handler for a batch, task management and
	// faults for an action. No other lock of the package is taken under it but nothing waits under it either.
	mu sync.Mutex

	// Hot, guarded by mu.
	qp           verbs.QueuePair
	cmds         []command
	free         []uint16                // command slots
	wrs          []verbs.SendWorkRequest // to be posted at the end of the batch
	sges         []verbs.SGE             // one per entry of wrs
	data         []verbs.SendWorkRequest // the same, to be posted in front of wrs: small data whose response is in wrs
	dataSGEs     []verbs.SGE
	recvs        []verbs.RecvWorkRequest // the same for receives
	recvSGEs     []verbs.SGE
	groups       []group // posted requests in order, a ring
	gHead, gTail uint32
	groupStart   int // wrs that belong to the group being built start here
	groupData    int // and so many of data
	sqFree       int
	sinceSignal  int
	saved        int32 // credits of commands that ended without a response
	limit        int64 // credits granted less credits taken away
	units        map[uint32]*chanUnit
	waitLarge    fifo
	waitSQ       fifo
	waitRx       []arrival            // received, waiting for a command slot
	large        []uint8              // free large buffers
	held         []uint16             // answers held back by faults, in order
	groupEnds    map[string]*groupEnd // of those with a time limit
	closing      bool
	errands      sync.WaitGroup // with workers

	// Read-only after login.
	t         *Target
	nexus     *nexus
	logins    *nexusLogins
	number    int
	rxLen     int
	recvDepth int
	sqDepth   int
	immOffset uint16 // 0: immediate data was not agreed on
	maxTI     int    // largest unit to send
	lkey      uint32
	mem       []byte
	base      uint64
	txOff     int
	smallOff  int
	largeOff  int
	from      netip.Addr
	count     counters
	tally     tally // not yet in count

	// Cold.
	conn    cm.Conn
	inst    *completion.Instance
	region  *hostmem.Region
	mr      verbs.MemoryRegion
	stop    chan struct{} // closed by fail
	once    sync.Once
	why     error         // set before stop is closed
	silent  bool          // end without a DREQ, by a fault; set before stop is closed
	started bool          // inst.Start was called
	done    chan struct{} // closed when everything is released
}

// chanUnit is a logical unit as the channel reaches it.
type chanUnit struct {
	nexus   *lun.Nexus
	mrs     []verbs.MemoryRegion // parallel to the store's regions; empty: not registered
	null    bool
	whole   bool     // the device reads each block of the regions in one piece
	workers *workers // of a slow store, else nil
}

// arrival is a received unit.
type arrival struct {
	slot uint16
	n    uint32
}

// group is a run of posted requests that ends with one that may be signaled. Send queues complete in order, so a
// signaled completion retires all groups up to its own.
type group struct {
	wrs   uint16
	cmd   uint16
	final bool // the command's slot is free when the group is done
}

// fifo is a queue of command slots; it never holds more than there are.
type fifo struct {
	q []uint16
}

func (f *fifo) push(i uint16) { f.q = append(f.q, i) }
func (f *fifo) empty() bool   { return len(f.q) == 0 }
func (f *fifo) pop() uint16 {
	i := f.q[0]
	f.q = f.q[:copy(f.q, f.q[1:])]
	return i
}

// Work request ids: kind in the top byte, then a receive slot or a group's sequence number.
const (
	wrRecv  = uint64(1) << 56
	wrGroup = uint64(2) << 56
	wrMask  = uint64(0xff) << 56
)

// newChannel makes the queue pair and everything around it for an admitted login.
func (t *Target) newChannel(n *nexus, number int, conn cm.Conn, req *iu.LoginReq, rsp *iu.LoginRsp) (_ *channel, err error) {
	// A fault may promise more credits than a channel can have.
	limit := max(min(int(rsp.ReqLimDelta), MaxRequestLimit), t.cfg.RequestLimit)
	ch := &channel{
		t: t, nexus: n, logins: n.logins.Load(), number: number, conn: conn, from: peerAddr(conn), limit: int64(rsp.ReqLimDelta),
		rxLen: (t.cfg.MaxITIULen + 63) &^ 63, recvDepth: limit + spareReceives, maxTI: int(min(req.ITIULen, rsp.MaxTIIULen, txLen)),
		stop: make(chan struct{}), done: make(chan struct{}), units: map[uint32]*chanUnit{},
	}
	if rsp.Flags&iu.ImmediateSupported != 0 {
		ch.immOffset = req.ImmDataOffset
	}
	commands := limit + 4*signalEvery
	ch.sqDepth = max(8*maxStepWRs, 4*commands)
	if t.attr.MaxQPWR > 0 {
		ch.sqDepth = min(ch.sqDepth, t.attr.MaxQPWR)
		ch.recvDepth = min(ch.recvDepth, t.attr.MaxQPWR)
	}
	if ch.sqDepth < 2*maxStepWRs {
		return nil, fmt.Errorf("the device allows only %d work requests per queue, %d are needed", t.attr.MaxQPWR, 2*maxStepWRs)
	}
	defer func() {
		if err != nil {
			ch.release()
		}
	}()
	ch.txOff = ch.recvDepth * ch.rxLen
	ch.smallOff = ch.txOff + commands*txLen
	ch.largeOff = ch.smallOff + commands*smallLen
	if ch.region, err = hostmem.Alloc(ch.largeOff + largeBuffers*largeLen); err != nil {
		return nil, err
	}
	ch.mem, ch.base = ch.region.Bytes(), ch.region.Addr()
	if ch.mr, err = t.pd.RegisterMemory(ch.region, verbs.AccessLocalWrite); err != nil {
		return nil, err
	}
	ch.lkey = ch.mr.LKey()
	cfg := t.cfg.Completion
	if t.attr.CompVectors > 0 {
		cfg.Vector = number % t.attr.CompVectors
	}
	cfg.Failed = func(err error) { ch.fail(err) }
	if ch.inst, err = completion.New(t.ctx, ch.recvDepth+ch.sqDepth, cfg, ch.handle); err != nil {
		return nil, err
	}
	cq := ch.inst.CQ()
	if ch.qp, err = t.pd.CreateQP(verbs.QPInit{SendCQ: cq, RecvCQ: cq, Cap: verbs.QPCap{MaxSendWR: ch.sqDepth, MaxRecvWR: ch.recvDepth, MaxSendSGE: 1, MaxRecvSGE: 1}}); err != nil {
		return nil, err
	}
	ch.sqFree = ch.sqDepth
	ch.cmds = make([]command, commands)
	for i := range ch.cmds {
		c := &ch.cmds[i]
		c.index = uint16(i)
		c.large = noLarge
		c.tx = ch.mem[ch.txOff+i*txLen:][:txLen:txLen]
		c.small = ch.mem[ch.smallOff+i*smallLen:][:smallLen:smallLen]
		c.task.Scratch = c.small
		ch.free = append(ch.free, uint16(commands-1-i))
	}
	for i := range largeBuffers {
		ch.large = append(ch.large, uint8(i))
	}
	ch.wrs = make([]verbs.SendWorkRequest, 0, ch.sqDepth)
	ch.sges = make([]verbs.SGE, ch.sqDepth)
	all := ch.wrs[:ch.sqDepth]
	for i := range all {
		all[i].SGList = ch.sges[i : i+1 : i+1]
	}
	ch.data = make([]verbs.SendWorkRequest, 0, ch.sqDepth)
	ch.dataSGEs = make([]verbs.SGE, ch.sqDepth)
	ch.groups = make([]group, pow2(ch.sqDepth))
	ch.recvs = make([]verbs.RecvWorkRequest, 0, ch.recvDepth)
	ch.recvSGEs = make([]verbs.SGE, ch.recvDepth)
	rx := ch.recvs[:ch.recvDepth]
	for i := range rx {
		rx[i].SGList = ch.recvSGEs[i : i+1 : i+1]
	}
	ch.waitRx = make([]arrival, 0, ch.recvDepth)
	ch.waitLarge.q = make([]uint16, 0, commands)
	ch.waitSQ.q = make([]uint16, 0, commands)
	for _, num := range t.cfg.Units.Numbers() {
		ch.unit(num)
	}
	if err = conn.InitQP(ch.qp); err != nil {
		return nil, err
	}
	for i := range ch.recvDepth {
		ch.repost(uint16(i))
	}
	if n, err := ch.qp.PostRecv(ch.recvs); err != nil {
		return nil, fmt.Errorf("post receives: %d of %d: %w", n, len(ch.recvs), err)
	}
	ch.recvs = ch.recvs[:0]
	return ch, nil
}

func pow2(n int) int {
	p := 1
	for p < n {
		p <<= 1
	}
	return p
}

func peerAddr(c cm.Conn) netip.Addr {
	r := c.Route()
	if r.Peer.IsIB() {
		return r.DGID.Addr()
	}
	return r.Peer.IP.Addr().Unmap()
}

// unit finds a logical unit by number, attaching to it the first time; nil for none.
func (ch *channel) unit(num uint32) *chanUnit {
	if u := ch.units[num]; u != nil {
		return u
	}
	lu := ch.t.cfg.Units.Find(num)
	if lu == nil {
		return nil
	}
	n := lu.Attach(ch.nexus.initiator)
	if n == nil {
		return nil
	}
	u := &chanUnit{nexus: n, mrs: ch.t.regions[lu], null: lu.Store().Kind() == "null", workers: ch.t.workers[lu]}
	// Blocks begin where packets do: a block that is no larger than a packet's data lies in one packet.
	u.whole = ch.t.memoryLock != nil && int(lu.BlockSize()) <= ch.conn.Route().PathMTU.Bytes()
	ch.units[num] = u
	return u
}

// fail ends the channel: the first reason counts. Safe to call from anywhere, under mu or not.
func (ch *channel) fail(err error) {
	ch.once.Do(func() {
		ch.why = err
		close(ch.stop)
	})
}

// run lives as long as the channel and then takes it apart.
func (ch *channel) run() {
	select {
	case <-ch.conn.Done():
		ch.fail(cmp.Or(ch.conn.Err(), cm.ErrDisconnected))
	case <-ch.stop:
	}
	// A flushed request is the consequence of the connection's end, which may be reported a moment later.
	var se *verbs.StatusError
	if errors.As(ch.why, &se) && se.Status == verbs.WCFlushError {
		select {
		case <-ch.conn.Done():
			ch.why = cmp.Or(ch.conn.Err(), cm.ErrDisconnected)
		case <-time.After(time.Second):
		}
	}
	log := ch.t.cfg.Log.With("initiator", ch.nexus.initiator, "channel", ch.number)
	if errors.Is(ch.why, cm.ErrDisconnected) || errors.Is(ch.why, errShutdown) {
		log.Info("channel ended", "why", ch.why)
	} else {
		log.Warn("channel ended", "why", ch.why)
	}
	ch.mu.Lock()
	ch.closing = true
	ch.mu.Unlock()
	ch.t.forget(ch, true)
	if ch.silent {
		// No DREQ: in the error state the queue pair just stops answering. It stays until the fault's time is over.
		_ = ch.qp.Modify(&verbs.QPAttr{State: verbs.QPError}, verbs.QPMaskState)
		select {
		case <-time.After(max(ch.t.vanishedFor(), breakTime)):
		case <-ch.t.stopping:
		}
	}
	_ = ch.conn.Disconnect()
	ch.release()
	_ = ch.conn.Close()
	close(ch.done)
}

// release frees what newChannel made, as far as it got; the connection stays. Nobody delivers completions when it returns.
func (ch *channel) release() {
	if ch.started {
		ch.inst.Disable() // returns when no handler runs
	}
	if ch.qp != nil {
		_ = ch.qp.Destroy()
	}
	if ch.inst != nil {
		_ = ch.inst.Close()
	}
	ch.mu.Lock()
	ch.closing = true
	for name := range ch.groupEnds {
		ch.endGroup(name)
	}
	for i := range ch.cmds {
		if c := &ch.cmds[i]; c.state != cmdFree {
			ch.recall(c)
		}
	}
	ch.mu.Unlock()
	ch.errands.Wait()
	ch.mu.Lock()
	for i := range ch.cmds {
		if c := &ch.cmds[i]; c.state != cmdFree {
			c.endTask()
			ch.settle(c, nil)
			c.state = cmdFree
		}
	}
	for _, u := range ch.units {
		u.nexus.Detach()
	}
	ch.units = nil
	ch.mu.Unlock()
	if ch.mr != nil {
		_ = ch.mr.Deregister()
	}
	if ch.region != nil {
		_ = ch.region.Free()
	}
}

// parseLUN is the unit's number.
func parseLUN(l iu.LUN) (uint32, bool) { return scsi.LUN(l).Number() }
