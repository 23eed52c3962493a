package srp

// One RDMA channel: the data path.
//
//	Submit:   start() takes a credit and a slot, describes the data, encodes the SRP_CMD in the slot's IU and
//	          appends a SEND to the batch; flush() posts the batch with one doorbell.
//	Complete: handle() gets the completions of one reap. A SEND retires the slots up to its own; a receive is
//	          decoded where it lies, its command taken off its slot, its credit added. Then the receives are posted again, waiting
//	          commands started, and only then the callers told.
//
// Who owns what:
//
//	data      the HCA, from the post to the response. After a timeout until the answer to the task management
//	          function, or until the queue pair is destroyed; never shorter.
//	tx IU     the channel; the HCA until the SEND is known complete. A SEND is signaled once in signalEvery, so
//	          a slot becomes free when its response AND a signaled completion at or behind its SEND have come.
//	rx IU     the HCA while posted, handle during the call; sense data are copied out before it is posted again.
//	bounce    the command, until its data have been copied.
//
// mu guards everything except what the comments call fixed or the handler's. The handler is called by one owner at
// a time (package completion); Submit and the session's supervisor run beside it. While the handler runs, batching is set: sends
// are collected and posted when it ends.

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"srp-initiator/completion"
	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/verbs"
	"srp-initiator/srp/iu"
	"srp-initiator/srp/scsi"
)

const (
	// immDataOffset is where immediate data begin: behind the longest CDB and its descriptor, as ib_srp places them.
	immDataOffset = iu.CommandSize + (scsi.MaxCDBLen - 16) + iu.ImmediateSize

	// rxSize holds the longest response: 36 bytes, 4 of response data, 252 of sense data; and an AER.
	rxSize = 512
	// targetRequests is how many requests of the target may be on their way at once; more is a protocol error.
	targetRequests = 16
	replySlots     = 2 * targetRequests
	replySize      = 64
	// taskReserve is room for answers to task management that were given up waiting for.
	taskReserve = 8
	maxBatch    = 64
)

// Tags. An answer is taken only if all of its tag is what was sent: a late one for a slot in new use differs in generation.
//
//	63..32 generation   31 task management   23..16 channel   15..0 slot
const (
	tagTask         = 1 << 31
	tagChannelShift = 16
)

// Work request ids: kind in bits 63..56, receive slot or send sequence below.
const (
	wrSend uint64 = 1 << 56
	wrRecv uint64 = 2 << 56
	wrKind uint64 = 0xff << 56
)

// What a position of the send queue was used for.
const (
	sentCommand uint8 = iota
	sentReply
	sentTask
	sentOther // bind or invalidate of a memory window
)

type sent struct {
	kind uint8
	slot uint16
}

type txSlot struct {
	gen      uint32
	cmd      *Command // nil: answered, given up, or never used
	sendDone bool
	aborting bool // the supervisor sees to it; not to be aborted twice
}

type channelState uint8

const (
	connecting channelState = iota
	live
	dead
)

type channel struct {
	s     *Session
	index int

	// Fixed once connected.
	conn         cm.Conn
	qp           verbs.QueuePair
	inst         *completion.Instance
	tx, rx       *Memory
	stride       int // of tx slots
	iuLimit      int // of units we send
	immLimit     int // bytes of immediate data, 0: none
	inlineDescs  int // descriptors that fit in a command
	maxDescs     int // descriptors of a command in all
	tableAt      int // offset of the external tables in tx
	queueLimit   int // commands outstanding
	signalEvery  int
	sendCapacity uint32
	login        iu.LoginRsp
	route        cm.Route

	mu    sync.Mutex
	state channelState
	err   error // why it is dead

	reqLim   int32
	inflight int
	waiting  list // commands for which there was no credit, slot or memory
	slots    []txSlot
	free     []uint16
	sendSeq  uint32 // of the next send
	doneSeq  uint32 // all before are known complete
	sends    []sent // by sequence
	unsignal int    // sends since the last signaled one
	replies  []uint16
	batching bool
	batch    []verbs.SendWorkRequest
	sges     []verbs.SGE
	bounce   bouncePool
	enc      iu.Command
	descs    []iu.Descriptor
	stats    ChannelStats

	taskBusy bool // the task management unit is the HCA's
	taskGen  uint32
	taskTag  uint64 // waited for, 0: none
	taskDone chan taskAnswer

	starvedAt int64 // since when there is no credit and nothing on its way
	starved   bool  // and a command has waited for one since

	waitMu   sync.Mutex
	stopping bool
	waiters  []*completion.Waiter
	idle     chan struct{} // closed when stopping and the last waiter has left

	// The handler's.
	rsp     iu.Response
	recvs   []verbs.RecvWorkRequest
	recvSGE []verbs.SGE
	posted  int // receives that the HCA has
	repost  []verbs.RecvWorkRequest
	done    list

	failed atomic.Bool // state is dead; readable without mu
}

type taskAnswer struct {
	code iu.TaskCode
	err  error
}

// fail ends the channel's life; the first reason counts. Called with mu held.
func (ch *channel) fail(err error) {
	if ch.state == dead {
		return
	}
	ch.state = dead
	ch.err = err
	ch.failed.Store(true)
	ch.s.wake()
}

func (ch *channel) failLocking(err error) {
	ch.mu.Lock()
	ch.fail(err)
	ch.mu.Unlock()
}

func (ch *channel) protocolError(err error, format string, a ...any) error {
	ch.stats.ProtocolErrors++
	return &ProtocolError{Channel: ch.index, What: fmt.Sprintf(format, a...), Err: err}
}

// plug holds back the doorbell of one channel, as a block layer plug holds back a queue. It rings for half of many commands when nothing else is under way, so that the
// target begins on them while the others are made, and then answers them while this end is at work on the others' answers: with all in one lump, each end would wait for
// the other. And for the first command after this end had been asleep: it wakes the target.
type plug struct {
	ch   *channel // whose doorbell is held back
	last *channel // of the last command
	n    int      // commands in a row to that one
	half int      // 0: they are not many
}

// manyCommands is from how many on half of them are enough for a batch of their own, at the target too.
const manyCommands = 16

func plugFor(commands int) plug {
	if commands < manyCommands {
		return plug{}
	}
	return plug{half: commands / 2}
}

// rings reports whether the doorbell is to ring for what was started on ch up to now, which is locked.
func (p *plug) rings(ch *channel) bool {
	p.n++
	return ch.inflight == p.n && (p.n == p.half || p.n == 1 && ch.inst.Woken())
}

// pull rings it.
func (p *plug) pull() {
	if ch := p.ch; ch != nil {
		p.ch = nil
		ch.mu.Lock()
		if !ch.batching {
			ch.flush()
		}
		ch.mu.Unlock()
	}
}

// submit starts c or lets it wait. False: the channel is dead and did not take it. With p the doorbell waits for p.
func (ch *channel) submit(c *Command, p *plug) bool {
	if p != nil && p.last != ch {
		p.pull()
		p.last, p.n = ch, 0
	}
	ch.mu.Lock()
	if ch.state != live {
		ch.mu.Unlock()
		return false
	}
	c.where.Store(ch)
	if !c.attended {
		ch.inst.Unattended(1)
	}
	if ch.waiting.head != nil || !ch.start(c) {
		ch.waiting.push(c)
		ch.stats.Waited++
	}
	switch {
	case ch.batching:
	case p != nil && !p.rings(ch):
		p.ch = ch
	default:
		if p != nil {
			p.ch = nil
		}
		ch.flush()
	}
	ch.mu.Unlock()
	return true
}

// startWaiting starts commands that waited, in order, as far as credits and room go. Called with mu held.
func (ch *channel) startWaiting() {
	for c := ch.waiting.head; c != nil && ch.state == live; c = ch.waiting.head {
		if !ch.start(c) {
			return
		}
		ch.waiting.pop()
	}
}

// start sends c if there is a credit beyond the one for task management, a slot, room in the send queue, and memory. Called with mu held; without all
// of that it changes nothing.
func (ch *channel) start(c *Command) bool {
	switch {
	case ch.reqLim <= 1:
		ch.stats.ZeroReqLim++
		return false
	case ch.inflight >= ch.queueLimit:
		return false
	case len(ch.free) == 0 || ch.room() <= replySlots+1:
		return false
	}
	slot := ch.free[len(ch.free)-1]
	e := &ch.enc
	e.LUN = iu.LUN(c.LUN)
	e.TaskAttr = c.Attr
	e.CDB = c.CDB.Bytes()
	e.Out.Format, e.In.Format = iu.NoData, iu.NoData
	size := e.Size() // without descriptors
	buf := ch.tx.region.Slice(int(slot)*ch.stride, ch.stride)
	immediate := false
	if c.length > 0 {
		dir := &e.In
		if c.Dir == DataOut {
			dir = &e.Out
			immediate = c.length <= ch.immLimit
		}
		if immediate {
			dir.Format, dir.Total = iu.Immediate, uint32(c.length)
		} else if !ch.describe(c, dir, slot, size) {
			return false
		}
	}
	ch.free = ch.free[:len(ch.free)-1]
	s := &ch.slots[slot]
	s.gen++
	s.cmd, s.sendDone, s.aborting = c, false, false
	c.slot = int32(slot)
	e.Tag = uint64(s.gen)<<32 | uint64(ch.index)<<tagChannelShift | uint64(slot)
	n, err := e.Encode(buf)
	if err != nil {
		panic("srp: command does not fit its slot: " + err.Error())
	}
	if immediate {
		n = immDataOffset + c.length
		c.copyTo(buf[immDataOffset:n])
		ch.stats.Immediate++
	}
	ch.reqLim--
	ch.inflight++
	ch.stats.Commands++
	c.deadline = ch.s.deadline(c.Timeout)
	ch.queueSend(sent{sentCommand, slot}, int(slot)*ch.stride, n, len(ch.free) < ch.signalEvery)
	return true
}

// describe gives the target access to c's data: pieces in place, or a bounce buffer. False: no bounce memory now.
func (ch *channel) describe(c *Command, dir *iu.Buffer, slot uint16, size int) bool {
	if c.inPlace {
		descs := ch.gather(c)
		n := len(descs)
		if n == 1 {
			dir.Format, dir.Desc = iu.Direct, descs[0]
			return true
		}
		if n <= ch.maxDescs {
			dir.Format, dir.Total, dir.List = iu.Indirect, uint32(c.length), descs
			dir.Desc = iu.Descriptor{Key: ch.tx.rkey, Len: uint32(n * iu.DescriptorSize)}
			// The table is the partial list itself, where it lies in the command.
			dir.Desc.Addr = ch.tx.base + uint64(int(slot)*ch.stride+size+iu.TableSize)
			if n > ch.inlineDescs {
				ch.externalTable(dir, slot)
			}
			return true
		}
	}
	at := ch.bounce.take(c.length)
	if at < 0 {
		ch.stats.BounceWaits++
		return false
	}
	c.bounce = at
	m := ch.bounce.mem
	if c.Dir == DataOut {
		c.copyTo(ch.bounce.bytes(at, c.length))
	}
	ch.stats.Bounced++
	dir.Format = iu.Direct
	dir.Desc = iu.Descriptor{Addr: m.base + uint64(at)*bounceUnit, Key: m.rkey, Len: uint32(c.length)}
	return true
}

// gather lists the memory of a command whose pieces are all registered; pieces that meet are joined.
func (ch *channel) gather(c *Command) []iu.Descriptor {
	descs := ch.descs[:0]
	one := [1][]byte{c.Data}
	pieces := c.Gather
	if len(pieces) == 0 {
		pieces = one[:]
	}
	for _, p := range pieces {
		if len(p) == 0 {
			continue
		}
		m, addr := ch.s.memories.find(p), addressOf(p)
		if m == nil {
			panic("srp: memory freed under a command")
		}
		if k := len(descs) - 1; k >= 0 && descs[k].Key == m.rkey && descs[k].Addr+uint64(descs[k].Len) == addr {
			descs[k].Len += uint32(len(p))
			continue
		}
		descs = append(descs, iu.Descriptor{Addr: addr, Key: m.rkey, Len: uint32(len(p))})
	}
	return descs
}

// externalTable lays the descriptors out in the slot's table, for the target to fetch, and leaves in the command what fits.
func (ch *channel) externalTable(dir *iu.Buffer, slot uint16) {
	at := ch.tableAt + int(slot)*ch.s.opts.SGTableSize*iu.DescriptorSize
	table := ch.tx.region.Slice(at, len(dir.List)*iu.DescriptorSize)
	for i, d := range dir.List {
		iu.PutDescriptor(table[i*iu.DescriptorSize:], d)
	}
	dir.Desc.Addr = ch.tx.base + uint64(at)
	dir.List = dir.List[:ch.inlineDescs]
	ch.stats.ExternalTables++
}

// room is how many send work requests the send queue can still take.
func (ch *channel) room() uint32 { return ch.sendCapacity - (ch.sendSeq - ch.doneSeq) }

// queueSend appends a SEND of n bytes at offset off of tx to the batch. Called with mu held and room in the queue.
func (ch *channel) queueSend(what sent, off, n int, signal bool) {
	if len(ch.batch) == cap(ch.batch) {
		ch.flush()
	}
	seq := ch.sendSeq
	ch.sendSeq++
	ch.sends[seq%uint32(len(ch.sends))] = what
	ch.unsignal++
	flags := verbs.SendFlags(0)
	if signal || what.kind != sentCommand || ch.unsignal >= ch.signalEvery {
		flags = verbs.SendSignaled
		ch.unsignal = 0
	}
	i := len(ch.sges)
	ch.sges = append(ch.sges, verbs.SGE{Addr: ch.tx.base + uint64(off), Length: uint32(n), LKey: ch.tx.lkey})
	ch.batch = append(ch.batch, verbs.SendWorkRequest{WRID: wrSend | uint64(seq), Opcode: verbs.OpSend, Flags: flags, SGList: ch.sges[i : i+1 : i+1]})
}

// flush posts the batch. Called with mu held.
func (ch *channel) flush() {
	if len(ch.batch) == 0 {
		return
	}
	n, err := ch.qp.PostSend(ch.batch)
	ch.stats.Doorbells++
	if err != nil || n < len(ch.batch) {
		// The send queue was sized so that this cannot be for want of room: what remains is a dead queue pair, and the
		// supervisor deals with the commands of a dead channel.
		if err == nil {
			err = verbs.ErrQueueFull
		}
		ch.fail(fmt.Errorf("srp: channel %d: post send: %w", ch.index, err))
	}
	ch.batch, ch.sges = ch.batch[:0], ch.sges[:0]
}

// retire marks the sends up to seq complete and frees slots. Called with mu held.
func (ch *channel) retire(seq uint32) {
	if seq-ch.doneSeq >= ch.sendSeq-ch.doneSeq {
		return // already retired: a flush entry behind a signaled one
	}
	for ; ch.doneSeq != seq+1; ch.doneSeq++ {
		switch what := ch.sends[ch.doneSeq%uint32(len(ch.sends))]; what.kind {
		case sentCommand:
			s := &ch.slots[what.slot]
			s.sendDone = true
			if s.cmd == nil {
				ch.free = append(ch.free, what.slot)
			}
		case sentReply:
			ch.replies = append(ch.replies, what.slot)
		case sentTask:
			ch.taskBusy = false
		}
	}
}

// finish takes the command off its slot and puts it on the list of done ones. Called with mu held.
func (ch *channel) finish(slot uint16) {
	s := &ch.slots[slot]
	c := s.cmd
	s.cmd = nil
	ch.inflight--
	if s.sendDone {
		ch.free = append(ch.free, slot)
	}
	ch.done.push(c)
}

// addCredit applies a request limit delta. Called with mu held.
func (ch *channel) addCredit(delta int32) {
	sum := int64(ch.reqLim) + int64(delta)
	// Credits left and requests outstanding make up the target's limit, which a target may lower, but not below nothing.
	if sum > math.MaxInt32 || sum+int64(ch.inflight)+1 < 0 {
		ch.fail(ch.protocolError(nil, "request limit %d changed by %d", ch.reqLim, delta))
		return
	}
	ch.reqLim = int32(sum)
}

// handle is the completion handler.
func (ch *channel) handle(wcs []verbs.WorkCompletion) {
	ch.mu.Lock()
	ch.batching = true
	for i := range wcs {
		wc := &wcs[i]
		kind, arg := wc.WRID&wrKind, uint32(wc.WRID)
		if kind == wrRecv {
			ch.posted--
		}
		switch {
		case wc.Status != verbs.WCSuccess:
			ch.workFailed(kind, wc)
			if kind == wrSend {
				ch.retire(arg)
			}
		case kind == wrSend:
			ch.retire(arg)
		case kind == wrRecv && arg < uint32(len(ch.recvs)) && wc.ByteLen <= rxSize:
			ch.received(ch.rx.region.Slice(int(arg)*rxSize, int(wc.ByteLen)))
			ch.repost = append(ch.repost, ch.recvs[arg])
		default:
			ch.fail(fmt.Errorf("srp: channel %d: the device completed an unknown work request %#x", ch.index, wc.WRID))
		}
	}
	if len(ch.repost) > 0 {
		if ch.state == live {
			ch.postReceives(ch.repost)
		}
		ch.repost = ch.repost[:0]
	}
	ch.startWaiting()
	first := ch.done.head
	ch.done = list{}
	if first == nil {
		ch.batching = false
		ch.flush()
		ch.mu.Unlock()
		return
	}
	ch.mu.Unlock()

	ch.tell(first)

	ch.mu.Lock()
	ch.batching = false
	ch.flush()
	ch.mu.Unlock()
}

// tell delivers a chain of finished commands. Called without mu.
func (ch *channel) tell(first *Command) {
	bounced := false
	for c := first; c != nil; c = c.next {
		if c.bounce >= 0 {
			bounced = true
			if n := c.Transferred(); c.Dir == DataIn && c.Err == nil && n > 0 {
				c.copyFrom(ch.bounce.bytes(c.bounce, n))
			}
		}
	}
	if bounced {
		ch.mu.Lock()
		for c := first; c != nil; c = c.next {
			if c.bounce >= 0 {
				ch.bounce.give(c.bounce, c.length)
				c.bounce = -1
			}
		}
		ch.startWaiting()
		if !ch.batching {
			ch.flush()
		}
		ch.mu.Unlock()
	}
	at := time.Now()
	for c := first; c != nil; {
		next := c.next
		if !c.attended {
			ch.inst.Unattended(-1)
		}
		c.complete(at)
		c = next
	}
}

// complete tells the caller. The command may be in new use before it returns.
func (c *Command) complete(at time.Time) {
	done, waiter := c.Done, c.Waiter
	c.next, c.Ended = nil, at
	c.state.Store(cmdIdle)
	if done != nil {
		done(c)
	}
	if waiter != nil {
		waiter.Signal()
	}
}

func (ch *channel) workFailed(kind uint64, wc *verbs.WorkCompletion) {
	doing := "send"
	if kind == wrRecv {
		doing = "receive"
	}
	ch.stats.WorkErrors++
	if ch.state != dead {
		ch.fail(fmt.Errorf("srp: channel %d: %w", ch.index, &verbs.StatusError{Status: wc.Status, VendorErr: wc.VendorErr, QPN: wc.QPN, Doing: doing}))
	} else if wc.Status != verbs.WCFlushError && ch.err != nil {
		// What failed first may have been reported by another way; the device's own reason says more.
		var se *verbs.StatusError
		if errors.Is(ch.err, cm.ErrDisconnected) || errors.As(ch.err, &se) && se.Status == verbs.WCFlushError {
			ch.err = fmt.Errorf("srp: channel %d: %w", ch.index, &verbs.StatusError{Status: wc.Status, VendorErr: wc.VendorErr, QPN: wc.QPN, Doing: doing})
		}
	}
}

func (ch *channel) postReceives(wrs []verbs.RecvWorkRequest) {
	n, err := ch.qp.PostRecv(wrs)
	ch.posted += n
	if err != nil {
		ch.fail(fmt.Errorf("srp: channel %d: post receive: %w", ch.index, err))
	}
}

// received handles one information unit. Called with mu held; b is the HCA's again after the call.
func (ch *channel) received(b []byte) {
	op, ok := iu.PeekOpcode(b)
	if !ok {
		ch.stats.UnknownUnits++
		return
	}
	switch op {
	case iu.OpResponse:
		ch.response(b)
	case iu.OpCredReq:
		var r iu.CredReq
		if err := r.Decode(b); err != nil {
			ch.fail(ch.protocolError(err, "%s of %d bytes", op, len(b)))
			return
		}
		ch.stats.CreditRequests++
		ch.addCredit(r.ReqLimDelta)
		ch.reply(func(p []byte) (int, error) { return (&iu.CredRsp{Tag: r.Tag}).Encode(p) })
	case iu.OpAERReq:
		var r iu.AERReq
		if err := r.Decode(b); err != nil {
			ch.fail(ch.protocolError(err, "%s of %d bytes", op, len(b)))
			return
		}
		ch.stats.AsyncEvents++
		ch.addCredit(r.ReqLimDelta)
		ch.reply(func(p []byte) (int, error) { return (&iu.AERRsp{Tag: r.Tag}).Encode(p) })
		ch.s.asyncEvent(scsi.LUN(r.LUN), r.Sense)
	case iu.OpTLogout:
		var r iu.TLogout
		if err := r.Decode(b); err != nil {
			ch.fail(ch.protocolError(err, "%s of %d bytes", op, len(b)))
			return
		}
		ch.fail(fmt.Errorf("srp: channel %d: the target logged out: %s (SRP_T_LOGOUT reason %d)", ch.index, r.Reason, uint32(r.Reason)))
	default:
		ch.stats.UnknownUnits++
	}
}

// reply sends an answer to a request of the target; it costs no credit.
func (ch *channel) reply(encode func([]byte) (int, error)) {
	if ch.state != live {
		return
	}
	if len(ch.replies) == 0 || ch.room() == 0 {
		ch.fail(ch.protocolError(nil, "more than %d requests at once", targetRequests))
		return
	}
	slot := ch.replies[len(ch.replies)-1]
	ch.replies = ch.replies[:len(ch.replies)-1]
	off := ch.replyAt(int(slot))
	n, err := encode(ch.tx.region.Slice(off, replySize))
	if err != nil {
		panic("srp: reply does not fit: " + err.Error())
	}
	ch.queueSend(sent{sentReply, slot}, off, n, true)
}

// Layout of tx: command slots, replies, the task management unit, external tables.
func (ch *channel) replyAt(i int) int { return len(ch.slots)*ch.stride + i*replySize }
func (ch *channel) taskAt() int       { return ch.replyAt(replySlots) }

// response handles SRP_RSP.
func (ch *channel) response(b []byte) {
	r := &ch.rsp
	err := r.Decode(b)
	if len(b) < iu.ResponseSize {
		ch.fail(ch.protocolError(err, "%s of %d bytes", iu.OpResponse, len(b)))
		return
	}
	ch.stats.Responses++
	ch.addCredit(r.ReqLimDelta)
	if r.Tag&tagTask != 0 {
		ch.taskResponse(r, err)
		return
	}
	slot, gen := uint16(r.Tag), uint32(r.Tag>>32)
	if int(slot) >= len(ch.slots) || uint32(r.Tag)>>tagChannelShift != uint32(ch.index) ||
		ch.slots[slot].gen != gen || ch.slots[slot].cmd == nil {
		// A late answer to an aborted command, or a tag that never was. Its credit counts.
		ch.stats.UnknownTags++
		return
	}
	c := ch.slots[slot].cmd
	if err == nil {
		err = c.take(r)
	}
	if err != nil {
		c.Err = ch.protocolError(err, "response to %s", scsi.CommandName(c.CDB.Bytes()))
	}
	if c.Residual != 0 {
		ch.stats.Residuals++
	}
	ch.finish(slot)
}

var (
	errResidual = errors.New("residual larger than the buffer")
	errRspCode  = errors.New("response code tells of a failure")
)

// take copies the answer out of the receive buffer and checks it against the command.
func (c *Command) take(r *iu.Response) error {
	c.Status = scsi.Status(r.Status)
	if code, ok := r.TaskCode(); ok && code != iu.TaskComplete {
		return fmt.Errorf("%w: %s", errRspCode, code)
	}
	const in, out = iu.InUnderflow | iu.InOverflow, iu.OutUnderflow | iu.OutOverflow
	under, over, n := r.Flags&iu.InUnderflow, r.Flags&iu.InOverflow, r.InResidual
	// A residual counts even if it is told for the other direction, or for a command without a buffer: as ib_srp, rather
	// than take for whole what the target says is not.
	if r.Flags&out != 0 && (c.Dir == DataOut || r.Flags&in == 0) {
		under, over, n = r.Flags&iu.OutUnderflow, r.Flags&iu.OutOverflow, r.OutResidual
	}
	switch {
	case under != 0 && c.length > 0:
		if uint64(n) > uint64(c.length) {
			return fmt.Errorf("%w: %d of %d bytes", errResidual, n, c.length)
		}
		c.Residual = int64(n)
	case over != 0:
		c.Residual = -int64(n)
	}
	c.senseLen = copy(c.sense[:], r.Sense)
	return nil
}
