package targetemu

import (
	"errors"
	"fmt"
	"time"

	"srp-initiator/rdma/verbs"
	"srp-initiator/srp/iu"
	"srp-initiator/srp/scsi"
	"srp-initiator/target-emu/lun"
)

// The road of a command on its channel. One batch of completions is handled under ch.mu; what it leads to
// is posted at the end: receives first, then all sends with one doorbell.
//
//	RECV -> receive -> begin: decode, faults, lun.Begin
//	   Done or no data           -> answer
//	   immediate data            -> execute from the receive slot -> answer
//	   external table            -> RDMA READ of the table into a large buffer -> tableDone -> move
//	   data-in  (move)           -> [wait for a large buffer] -> read the store (or not: direct) -> RDMA WRITEs ... -> answer
//	   data-out (move)           -> [wait for a large buffer] -> RDMA READs -> stepDone: write the store (or not: direct) -> answer
//	answer -> [held by a fault] -> [wait for send queue room] -> RDMA WRITEs of the last step, unsignaled, and the SEND in one run.
//	   The order of one send queue is the fence between data and response. Within a batch the data of commands up to aheadLen
//	   go in front of everything else: all data, then all responses, so that requests of equal size follow one another and can
//	   leave as one train.
//	SEND completion -> retire: frees the command slot, of this and all earlier groups. A RECV that the response
//	   provoked may be handled before it, which is why there are more command slots than credits.
//
// The data buffers belong to the device from the post of a group until it is retired; an aborted command keeps
// its buffers until then.

type cmdState uint8

const (
	cmdFree    cmdState = iota
	cmdActive           // in the hands of the handler
	cmdQueued           // in waitLarge or waitSQ
	cmdMoving           // RDMA requests in flight that will call stepDone
	cmdHeld             // the answer is held back by a fault
	cmdFencing          // PREEMPT AND ABORT, executed, until the others' commands have ended
	cmdSent             // response posted
)

type cmdPhase uint8

const (
	phaseTable cmdPhase = iota
	phaseMove
	phaseAnswer
)

const noLarge = 0xff

// command is one command slot.
type command struct {
	index   uint16
	state   cmdState
	phase   cmdPhase
	dead    bool // aborted while in a queue or moving: no response
	tas     bool // aborted by another nexus: TASK ABORTED
	isTMF   bool
	open    bool // task.Begin was called and End was not
	direct  bool // data moves straight to or from the store's memory
	large   uint8
	tag     uint64
	solNot  iu.SolicitedNotification
	number  uint32 // LUN
	unit    *chanUnit
	tmfs    []*taskMgmt // wait for this command to end
	errand  errand      // for a worker of the unit
	verdict *verdict    // faults that apply

	task    lun.Task
	descs   []iu.Descriptor
	desc    int    // position of the next byte: descriptor
	descOff uint32 // and offset in it
	want    int64  // bytes to move
	moved   int64  // bytes moved, or for data-in posted
	step    int64  // bytes of the step in flight
	cut     int64  // bytes that a fault leaves out of the data but not of the residual
	bufLen  int64  // what the initiator's buffer holds
	out     bool   // direction of that buffer

	bye     error // the channel ends when this command's response has been sent
	rspCode iu.TaskCode
	tx      []byte
	small   []byte
	one     [1]iu.Descriptor
	rspData [4]byte
	iu      iu.Command
	cdb     [iu.MaxCDB]byte
	table   []iu.Descriptor // external tables are decoded here
}

func (c *command) endTask() {
	if c.open {
		c.open = false
		c.task.End()
	}
}

// handle is the completion handler.
func (ch *channel) handle(wcs []verbs.WorkCompletion) {
	ch.mu.Lock()
	for i := range wcs {
		wc := &wcs[i]
		if wc.Status != verbs.WCSuccess {
			ch.failed(wc)
			continue
		}
		switch wc.WRID & wrMask {
		case wrRecv:
			ch.receive(arrival{uint16(wc.WRID), wc.ByteLen})
		case wrGroup:
			ch.retire(uint32(wc.WRID))
		}
	}
	ch.flush()
	ch.mu.Unlock()
}

// failed ends the channel for a failed work request; flushed ones are the consequence of another failure or of the end.
func (ch *channel) failed(wc *verbs.WorkCompletion) {
	if wc.Status == verbs.WCFlushError {
		ch.closing = true
		ch.fail(&verbs.StatusError{Status: wc.Status, QPN: wc.QPN, Doing: "channel"})
		return
	}
	doing := "receive"
	if wc.WRID&wrMask == wrGroup {
		doing = "RDMA or SEND of a response"
	}
	ch.closing = true
	ch.fail(&verbs.StatusError{Status: wc.Status, VendorErr: wc.VendorErr, QPN: wc.QPN, Doing: doing})
}

// flush posts what the batch produced.
func (ch *channel) flush() {
	ch.count.add(&ch.tally)
	if ch.closing {
		ch.wrs, ch.data, ch.recvs, ch.groupStart, ch.groupData = ch.wrs[:0], ch.data[:0], ch.recvs[:0], 0, 0
		return
	}
	if len(ch.recvs) > 0 {
		if _, err := ch.qp.PostRecv(ch.recvs); err != nil {
			ch.closing = true
			ch.fail(fmt.Errorf("post receives: %w", err))
		}
		ch.recvs = ch.recvs[:0]
	}
	if len(ch.wrs) > 0 {
		wrs := ch.wrs
		if len(ch.data) > 0 { // never without the responses, which are in wrs
			ch.data = append(ch.data, wrs...)
			wrs = ch.data
		}
		ch.count.doorbells.Add(1)
		ch.count.workRequests.Add(uint64(len(wrs)))
		if n, err := ch.qp.PostSend(wrs); err != nil {
			ch.closing = true
			ch.fail(fmt.Errorf("post sends: %d of %d: %w", n, len(wrs), err))
		}
		ch.wrs, ch.data, ch.groupStart = ch.wrs[:0], ch.data[:0], 0
	}
}

// repost queues a receive slot for posting.
func (ch *channel) repost(slot uint16) {
	i := len(ch.recvs)
	ch.recvs = ch.recvs[:i+1]
	ch.recvs[i].WRID = wrRecv | uint64(slot)
	ch.recvSGEs[i] = verbs.SGE{Addr: ch.base + uint64(int(slot)*ch.rxLen), Length: uint32(ch.rxLen), LKey: ch.lkey}
}

// receive handles one unit.
func (ch *channel) receive(a arrival) {
	b := ch.mem[int(a.slot)*ch.rxLen:][:min(int(a.n), ch.rxLen)]
	op, ok := iu.PeekOpcode(b)
	if !ok || len(b) < iu.ShortSize {
		ch.protocolError(iu.LogoutInvalidType, fmt.Sprintf("a unit of %d bytes", len(b)))
		ch.repost(a.slot)
		return
	}
	switch op {
	case iu.OpCommand, iu.OpTaskMgmt:
		if len(ch.free) == 0 {
			ch.waitRx = append(ch.waitRx, a)
			return
		}
		if op == iu.OpCommand {
			if ch.begin(b, a.slot) {
				return
			}
		} else {
			ch.beginTaskMgmt(b)
		}
	case iu.OpCredRsp:
		ch.count.credRsp.Add(1)
	case iu.OpAERRsp:
		ch.count.aerRsp.Add(1)
	case iu.OpILogout:
		ch.fail(errLogout)
	default:
		ch.protocolError(iu.LogoutInvalidType, "an information unit with "+op.String())
	}
	ch.repost(a.slot)
}

var (
	errLogout   = errors.New("the initiator logged out")
	errShutdown = errors.New("the target is shutting down")
)

// protocolError ends the channel as SRP r16a, 5.3 says: SRP_T_LOGOUT with the reason, then the disconnect.
func (ch *channel) protocolError(reason iu.LogoutReason, what string) {
	ch.count.malformed.Add(1)
	var u [iu.ShortSize]byte
	lo := iu.TLogout{Reason: reason}
	n, _ := lo.Encode(u[:])
	ch.goodbye(u[:n], fmt.Errorf("protocol error: %s (%s)", what, reason))
}

// goodbye ends the channel once the unit u has been sent, or soon if it cannot be.
func (ch *channel) goodbye(u []byte, why error) {
	if c := ch.sendUnit(u); c != nil {
		c.bye = why
		time.AfterFunc(time.Second, func() { ch.fail(why) })
		return
	}
	ch.fail(why)
}

// take gets a command slot; there is one.
func (ch *channel) take() *command {
	c := &ch.cmds[ch.free[len(ch.free)-1]]
	ch.free = ch.free[:len(ch.free)-1]
	c.state, c.phase = cmdActive, phaseAnswer
	c.dead, c.tas, c.isTMF, c.open, c.direct, c.out = false, false, false, false, false, false
	c.unit, c.verdict, c.descs, c.bye, c.rspCode = nil, nil, nil, nil, 0
	c.desc, c.descOff, c.want, c.moved, c.step, c.cut, c.bufLen = 0, 0, 0, 0, 0, 0, 0
	c.errand.filled, c.errand.kept = false, false
	return c
}

// request notes a unit that cost the initiator a credit.
func (ch *channel) request() {
	ch.tally.outstanding++
	n := ch.count.outstanding.Load() + ch.tally.outstanding
	if n > ch.count.maxOutstanding.Load() {
		ch.count.maxOutstanding.Store(n)
	}
	if n > ch.limit {
		ch.count.beyondLimit.Add(1)
	}
}

// begin starts a command from its unit b in a receive slot, which stays the command's when it reports true.
func (ch *channel) begin(b []byte, slot uint16) (kept bool) {
	c := ch.take()
	ch.request()
	ch.tally.commands++
	err := c.iu.Decode(b)
	c.tag, _ = iu.PeekTag(b)
	if err == nil && c.iu.In.Format != iu.NoData && c.iu.Out.Format != iu.NoData {
		err = iu.ErrFormat // both directions: no command here has them
	}
	if err != nil {
		c.solNot = 0
		ch.malformed(c)
		return false
	}
	c.solNot = c.iu.SolNot
	c.task.CDB = c.cdb[:copy(c.cdb[:], c.iu.CDB)]
	if c.iu.Out.Format != iu.NoData {
		c.out, c.bufLen = true, int64(c.iu.Out.Len())
	} else {
		c.bufLen = int64(c.iu.In.Len())
	}
	var nx *lun.Nexus
	number, ok := parseLUN(c.iu.LUN)
	c.number = number
	if ok {
		if c.unit = ch.unit(number); c.unit != nil {
			nx = c.unit.nexus
		}
	}
	if f := ch.t.faults; f != nil {
		if c.verdict = f.command(ch, c); c.verdict != nil && ch.preempted(c, nx) {
			return false
		}
	}
	ch.t.cfg.Units.Begin(&c.task, nx)
	c.open = true
	c.errand.slot = slot
	ch.start(c, b)
	return c.errand.kept
}

// start goes on after lun.Begin.
func (ch *channel) start(c *command, b []byte) {
	t := &c.task
	switch t.Way {
	case lun.WayNone:
		ch.count.others.Add(1)
		ch.answer(c)
		return
	case lun.WayWork:
		ch.count.others.Add(1)
		if ch.slow(c) {
			ch.delegate(c, errandFinish, nil)
			return
		}
		t.Finish()
		ch.answer(c)
		return
	case lun.WayIn, lun.WayRead:
		if t.Way == lun.WayRead {
			ch.tally.reads++
		} else {
			ch.count.others.Add(1)
		}
		if c.out || c.bufLen == 0 { // nowhere to put it: all of it is overflow
			t.FinishStream()
			ch.answer(c)
			return
		}
		c.want = min(t.InLen, c.bufLen)
		c.curtail()
	default:
		if t.Way == lun.WayWrite {
			ch.count.writes.Add(1)
		} else {
			ch.count.others.Add(1)
		}
		if !c.out || c.bufLen < t.OutLen {
			// Less data than the CDB asks for: nothing is written (SRP r16a leaves it to the device server).
			t.Fail(scsi.Sense{Key: scsi.IllegalRequest, ASC: scsi.ASCInvalidTransferLength})
			ch.answer(c)
			return
		}
		c.want = t.OutLen
		c.curtail()
		if c.iu.Out.Format == iu.Immediate {
			ch.immediate(c, b)
			return
		}
	}
	buf := &c.iu.In
	if c.out {
		buf = &c.iu.Out
	}
	if buf.Format == iu.Direct {
		c.one[0] = buf.Desc
		c.descs = c.one[:]
	} else {
		c.descs = buf.List
		if n := buf.TableEntries(); n != len(buf.List) {
			ch.fetchTable(c, buf, n)
			return
		}
		if !covers(c.descs, buf.Total) {
			ch.malformed(c)
			return
		}
	}
	c.phase = phaseMove
	ch.move(c)
}

// covers checks that descriptors hold exactly total bytes.
func covers(descs []iu.Descriptor, total uint32) bool {
	sum := uint64(0)
	for i := range descs {
		sum += uint64(descs[i].Len)
	}
	return sum == uint64(total)
}

// malformed answers a command whose unit does not hold together: CHECK CONDITION, invalid field in command information unit. (ib_srpt says
// BUSY, which has initiators try for ever.)
func (ch *channel) malformed(c *command) {
	ch.count.malformed.Add(1)
	c.task.Fail(scsi.Sense{Key: scsi.IllegalRequest, ASC: scsi.ASCInvalidTransferLength})
	ch.answer(c)
}

// immediate executes a command whose data-out came with it.
func (ch *channel) immediate(c *command, b []byte) {
	data, err := c.iu.ImmediateData(b, ch.immOffset)
	if ch.immOffset == 0 || err != nil {
		ch.malformed(c)
		return
	}
	ch.count.immediate.Add(1)
	t := &c.task
	if t.Way == lun.WayWhole {
		data = c.whole(data)
	} else {
		data = data[:c.want]
	}
	if c.verdict != nil {
		ch.spoil(c, data[:c.want])
	}
	ch.count.bytesOut.Add(uint64(c.want))
	if ch.slow(c) {
		c.errand.kept = true
		if t.Way == lun.WayWhole {
			c.moved = c.want
			ch.delegate(c, errandWhole, data)
		} else {
			ch.delegate(c, errandWrite, data)
		}
		return
	}
	c.moved = c.want
	if t.Way == lun.WayWhole {
		ch.whole(c, data)
		return
	}
	if t.WriteChunk(data, 0) {
		t.FinishStream()
	}
	ch.answer(c)
}

// whole executes a command whose data-out is all there.
func (ch *channel) whole(c *command, data []byte) {
	c.task.FinishOut(data)
	ch.executed(c)
}

// executed answers a command that was executed, after whatever it wants ended first.
func (ch *channel) executed(c *command) {
	if ports := c.task.Preempted(); len(ports) > 0 {
		ch.preemptAbort(c, ports)
		return
	}
	ch.answer(c)
}

// fetchTable reads a descriptor table that did not fit the command.
func (ch *channel) fetchTable(c *command, buf *iu.Buffer, n int) {
	if n > maxDescriptors {
		ch.malformed(c)
		return
	}
	c.phase = phaseTable
	c.one[0] = buf.Desc
	c.descs = c.one[:]
	ch.count.external.Add(1)
	ch.table(c)
}

// table posts the RDMA READ of the external table.
func (ch *channel) table(c *command) {
	if !ch.getLarge(c) || !ch.room(c, 1) {
		return
	}
	d := c.descs[0]
	ch.add(verbs.OpRDMARead, ch.largeAddr(c), d.Len, d.Addr, d.Key)
	c.step = int64(d.Len)
	ch.endStep(c)
}

// tableDone decodes the table that has arrived.
func (ch *channel) tableDone(c *command) {
	raw := ch.largeBuf(c)[:c.step]
	c.table = c.table[:0]
	for len(raw) >= iu.DescriptorSize {
		c.table = append(c.table, iu.GetDescriptor(raw))
		raw = raw[iu.DescriptorSize:]
	}
	ch.putLarge(c)
	c.descs, c.desc, c.descOff = c.table, 0, 0
	buf := &c.iu.In
	if c.out {
		buf = &c.iu.Out
	}
	if !covers(c.descs, buf.Total) {
		ch.malformed(c)
		return
	}
	c.phase = phaseMove
	ch.move(c)
}

// getLarge makes sure c has a large buffer; without one it is queued and false returned.
func (ch *channel) getLarge(c *command) bool {
	if c.large != noLarge {
		return true
	}
	if len(ch.large) == 0 {
		ch.count.waitedForBuffer.Add(1)
		c.state = cmdQueued
		ch.waitLarge.push(c.index)
		return false
	}
	c.large = ch.large[len(ch.large)-1]
	ch.large = ch.large[:len(ch.large)-1]
	return true
}

func (ch *channel) putLarge(c *command) {
	if c.large == noLarge {
		return
	}
	ch.large = append(ch.large, c.large)
	c.large = noLarge
	for !ch.waitLarge.empty() && len(ch.large) > 0 {
		w := &ch.cmds[ch.waitLarge.pop()]
		ch.resume(w)
	}
}

func (ch *channel) largeBuf(c *command) []byte {
	return ch.mem[ch.largeOff+int(c.large)*largeLen:][:largeLen]
}

func (ch *channel) largeAddr(c *command) uint64 {
	return ch.base + uint64(ch.largeOff+int(c.large)*largeLen)
}

// resume goes on with a command that waited.
func (ch *channel) resume(c *command) {
	if c.dead {
		ch.drop(c)
		return
	}
	c.state = cmdActive
	switch c.phase {
	case phaseTable:
		ch.table(c)
	case phaseMove:
		ch.move(c)
	case phaseAnswer:
		ch.answer(c)
	}
}

// room makes sure that n requests fit the send queue; else c is queued and false returned.
func (ch *channel) room(c *command, n int) bool {
	if ch.sqFree >= n {
		return true
	}
	ch.count.waitedForSendQueue.Add(1)
	c.state = cmdQueued
	ch.waitSQ.push(c.index)
	return false
}

// add appends a request to the group being built; there is room.
func (ch *channel) add(op verbs.SendOpcode, local uint64, n uint32, remote uint64, key uint32) {
	ch.addKey(op, local, n, ch.lkey, remote, key)
}

func (ch *channel) addKey(op verbs.SendOpcode, local uint64, n, lkey uint32, remote uint64, key uint32) {
	ch.wrs = putRequest(ch.wrs, ch.sges, op, local, n, lkey, remote, key)
	ch.sqFree--
}

// addData appends a WRITE that will be posted in front of the batch's other requests.
func (ch *channel) addData(local uint64, n, lkey uint32, remote uint64, key uint32) {
	ch.data = putRequest(ch.data, ch.dataSGEs, verbs.OpRDMAWrite, local, n, lkey, remote, key)
	ch.groupData++
	ch.sqFree--
}

func putRequest(wrs []verbs.SendWorkRequest, sges []verbs.SGE, op verbs.SendOpcode, local uint64, n, lkey uint32, remote uint64, key uint32) []verbs.SendWorkRequest {
	i := len(wrs)
	wrs = wrs[:i+1]
	sges[i] = verbs.SGE{Addr: local, Length: n, LKey: lkey}
	w := &wrs[i]
	w.WRID, w.Opcode, w.Flags, w.RemoteAddr, w.RKey, w.ImmData = 0, op, 0, remote, key, 0
	w.SGList = sges[i : i+1 : i+1]
	return wrs
}

// closeGroup ends the group being built.
func (ch *channel) closeGroup(c *command, final, signal bool) {
	last := &ch.wrs[len(ch.wrs)-1]
	last.WRID = wrGroup | uint64(ch.gTail)
	if signal {
		last.Flags |= verbs.SendSignaled
		ch.sinceSignal = 0
	}
	ch.groups[ch.gTail&uint32(len(ch.groups)-1)] = group{wrs: uint16(len(ch.wrs) - ch.groupStart + ch.groupData), cmd: c.index, final: final}
	ch.gTail++
	ch.groupStart, ch.groupData = len(ch.wrs), 0
}

// endStep posts a step whose completion goes on with the command.
func (ch *channel) endStep(c *command) {
	c.state = cmdMoving
	ch.closeGroup(c, false, true)
}

// retire handles a signaled completion: the groups up to seq are done.
func (ch *channel) retire(seq uint32) {
	for ch.gHead != seq+1 && ch.gHead != ch.gTail {
		g := &ch.groups[ch.gHead&uint32(len(ch.groups)-1)]
		ch.gHead++
		ch.sqFree += int(g.wrs)
		c := &ch.cmds[g.cmd]
		if g.final {
			ch.release1(c)
		} else {
			ch.stepDone(c)
		}
	}
	for n := len(ch.waitSQ.q); n > 0 && ch.sqFree > maxStepWRs; n-- {
		ch.resume(&ch.cmds[ch.waitSQ.pop()])
	}
}

// release1 frees a command slot, and serves a unit that waited for one.
func (ch *channel) release1(c *command) {
	c.endTask()
	c.state = cmdFree
	c.verdict, c.unit, c.descs = nil, nil, nil
	ch.free = append(ch.free, c.index)
	if c.bye != nil {
		ch.fail(c.bye)
	}
	ch.putLarge(c)
	for len(ch.waitRx) > 0 && len(ch.free) > 0 {
		a := ch.waitRx[0]
		ch.waitRx = ch.waitRx[:copy(ch.waitRx, ch.waitRx[1:])]
		ch.receive(a)
	}
}

// plan finds how many requests the next n bytes of c's descriptors take, at most maxStepWRs, and how many bytes those cover.
func (c *command) plan(n int64) (wrs int, bytes int64) {
	i, off := c.desc, c.descOff
	for bytes < n && wrs < maxStepWRs && i < len(c.descs) {
		l := min(int64(c.descs[i].Len-off), n-bytes, maxPiece)
		if l > 0 {
			wrs++
			bytes += l
		}
		if off += uint32(l); off == c.descs[i].Len {
			i, off = i+1, 0
		}
	}
	return wrs, bytes
}

// pieces appends the requests that plan counted. Small data whose response follows are gathered in front of the batch; large ones stay where they
// are, or the first response would wait for the data of all.
func (ch *channel) pieces(c *command, op verbs.SendOpcode, local uint64, lkey uint32, n int64) {
	ahead := op == verbs.OpRDMAWrite && c.want <= aheadLen && c.moved+n == c.want
	for n > 0 {
		d := &c.descs[c.desc]
		l := min(int64(d.Len-c.descOff), n, maxPiece)
		switch {
		case l == 0:
		case ahead:
			ch.addData(local, uint32(l), lkey, d.Addr+uint64(c.descOff), d.Key)
		default:
			ch.addKey(op, local, uint32(l), lkey, d.Addr+uint64(c.descOff), d.Key)
		}
		local += uint64(l)
		n -= l
		if c.descOff += uint32(l); c.descOff == d.Len {
			c.desc, c.descOff = c.desc+1, 0
		}
	}
}

// onBlocks reports that each descriptor but the last ends where a block does: no block is divided among requests.
func (c *command) onBlocks(size uint32) bool {
	for i := range len(c.descs) - 1 {
		if c.descs[i].Len%size != 0 {
			return false
		}
	}
	return true
}

// window finds memory for the next bytes of c's data: its address, key and length, 0 when c has been queued for a buffer.
func (ch *channel) window(c *command, rest int64) (addr uint64, lkey uint32, n int64) {
	t := &c.task
	spoiled := c.verdict != nil && c.verdict.corrupt > 0
	if (t.Way == lun.WayRead || t.Way == lun.WayWrite) && len(c.unit.mrs) > 0 && (c.unit.null || c.want > smallLen || c.unit.whole && !c.out && c.onBlocks(c.unit.nexus.Unit().BlockSize())) && !spoiled {
		if r, at, n := t.Direct(c.moved, rest); n > 0 {
			c.direct = true
			mr := c.unit.mrs[r]
			return mr.Addr() + uint64(at), mr.LKey(), n
		}
	}
	if c.want <= smallLen && t.Way != lun.WayVerify && t.Way != lun.WayWhole { // those two use the small buffer as scratch
		at := ch.smallOff + int(c.index)*smallLen
		return ch.base + uint64(at), ch.lkey, rest
	}
	if !ch.getLarge(c) {
		return 0, 0, 0
	}
	if t.Way == lun.WayWhole { // its steps lie behind one another
		return ch.largeAddr(c) + uint64(c.moved), ch.lkey, rest
	}
	return ch.largeAddr(c), ch.lkey, min(rest, largeLen)
}

// buf is the memory that window gave, for commands that are not direct.
func (ch *channel) buf(c *command) []byte {
	if c.large != noLarge {
		return ch.largeBuf(c)
	}
	return c.small
}

// move posts the next step of a command's data.
func (ch *channel) move(c *command) {
	if c.want == 0 {
		c.task.FinishStream()
		ch.answer(c)
		return
	}
	addr, lkey, n := ch.window(c, c.want-c.moved)
	if n == 0 {
		return
	}
	wrs, bytes := c.plan(n)
	if c.out {
		if !ch.room(c, wrs) {
			return
		}
		ch.pieces(c, verbs.OpRDMARead, addr, lkey, bytes)
		c.step = bytes
		ch.endStep(c)
		return
	}
	last := c.moved+bytes == c.want
	if last && ch.deferred(c) {
		return
	}
	if !ch.room(c, wrs+c.verdict.units(ch.sqDepth)) {
		return
	}
	t := &c.task
	if t.Way == lun.WayRead && !c.direct {
		if b := ch.buf(c)[:bytes]; c.unit.workers == nil {
			if !t.ReadChunk(b, c.moved) {
				ch.answer(c)
				return
			}
		} else if !c.errand.filled && !t.TryReadChunk(b, c.moved) {
			ch.delegate(c, errandRead, b)
			return
		}
		c.errand.filled = false
	}
	if c.verdict != nil && !c.direct {
		ch.spoil(c, ch.buf(c)[:bytes])
	}
	ch.pieces(c, verbs.OpRDMAWrite, addr, lkey, bytes)
	ch.tally.bytesIn += uint64(bytes)
	c.moved += bytes
	if last {
		t.FinishStream()
		ch.send(c)
		return
	}
	c.step = 0
	ch.endStep(c)
}

// stepDone goes on when a step's requests are complete.
func (ch *channel) stepDone(c *command) {
	if ch.aborted(c) {
		return
	}
	t := &c.task
	if c.phase == phaseTable {
		ch.tableDone(c)
		return
	}
	if c.out {
		ch.count.bytesOut.Add(uint64(c.step))
		if c.verdict != nil && !c.direct {
			b := ch.buf(c)
			if t.Way == lun.WayWhole {
				b = b[c.moved:]
			}
			ch.spoil(c, b[:c.step])
		}
		if ch.slow(c) {
			ch.arrived(c)
			return
		}
		if t.Way != lun.WayWhole && !c.direct && !t.WriteChunk(ch.buf(c)[:c.step], c.moved) {
			ch.answer(c)
			return
		}
		c.moved += c.step
		if c.moved == c.want {
			if t.Way == lun.WayWhole {
				ch.whole(c, c.whole(ch.largeBuf(c)))
				return
			}
			t.FinishStream()
			ch.answer(c)
			return
		}
	}
	ch.move(c)
}

// drop ends an aborted command without a response.
func (ch *channel) drop(c *command) {
	ch.tally.outstanding--
	ch.count.aborted.Add(1)
	ch.saved++
	ch.limit--
	waiters := c.tmfs // before the slot is somebody else's
	c.tmfs = nil
	ch.release1(c)
	for _, m := range waiters {
		ch.t.taskDone(m, ch)
	}
}

// answer sends a command's response, when nothing holds it back.
func (ch *channel) answer(c *command) {
	c.phase = phaseAnswer
	c.endTask()
	if ch.deferred(c) || !ch.room(c, c.verdict.units(ch.sqDepth)) {
		return
	}
	ch.send(c)
}

// residual works out the residual fields (SRP r16a, 6.9: what the command wanted to move against what the buffer holds).
func (c *command) residual(r *iu.Response) {
	t := &c.task
	r.OutResidual, r.InResidual = 0, 0
	switch {
	case c.isTMF:
	case c.out:
		switch {
		case t.OutLen > c.bufLen:
			r.Flags |= iu.OutOverflow
			r.OutResidual = clamp(t.OutLen - c.bufLen)
		case c.moved+c.cut < c.bufLen:
			r.Flags |= iu.OutUnderflow
			r.OutResidual = clamp(c.bufLen - c.moved - c.cut)
		}
		if t.InLen > 0 && t.Status == scsi.StatusGood {
			r.Flags |= iu.InOverflow
			r.InResidual = clamp(t.InLen)
		}
	case t.OutLen > 0:
		r.Flags |= iu.OutOverflow
		r.OutResidual = clamp(t.OutLen)
		fallthrough
	default:
		switch {
		case t.InLen > c.bufLen && t.Status == scsi.StatusGood:
			r.Flags |= iu.InOverflow
			r.InResidual = clamp(t.InLen - c.bufLen)
		case c.moved+c.cut < c.bufLen:
			r.Flags |= iu.InUnderflow
			r.InResidual = clamp(c.bufLen - c.moved - c.cut)
		}
	}
}

func clamp(n int64) uint32 { return uint32(min(n, 1<<32-1)) }

// send encodes and queues the response; there is room for it.
func (ch *channel) send(c *command) {
	c.endTask()
	t := &c.task
	r := iu.Response{Tag: c.tag, ReqLimDelta: 1 + ch.saved}
	ch.saved = 0
	if c.isTMF {
		c.rspData = [4]byte{3: byte(c.rspCode)}
		r.Data = c.rspData[:]
	} else {
		r.Status = uint8(t.Status)
		switch t.Status {
		case scsi.StatusGood:
		case scsi.StatusCheckCondition:
			ch.count.checkConditions.Add(1)
			s := t.Sense()
			r.Sense = s[:max(0, min(len(s), ch.maxTI-iu.ResponseSize))]
		default:
			ch.count.otherStatus.Add(1)
		}
		c.residual(&r)
	}
	good := r.Status == 0 && c.rspCode == 0
	solicited := good && c.solNot&iu.NotifyOnSuccess != 0 || !good && c.solNot&iu.NotifyOnFailure != 0
	if solicited {
		r.SolNot = iu.Solicited
	}
	ch.tally.outstanding--
	n := 0
	if c.verdict == nil {
		n, _ = r.Encode(c.tx)
	} else {
		n = ch.distort(c, &r)
	}
	ch.limit += int64(r.ReqLimDelta) - 1
	ch.tally.credits += int64(r.ReqLimDelta)
	ch.post(c, n, solicited)
	if c.verdict != nil {
		for range c.verdict.dups {
			ch.sendUnit(c.tx[:n])
		}
	}
}

// post queues the SEND of n bytes of c.tx.
func (ch *channel) post(c *command, n int, solicited bool) {
	ch.add(verbs.OpSend, ch.base+uint64(ch.txOff+int(c.index)*txLen), uint32(n), 0, 0)
	if solicited {
		ch.wrs[len(ch.wrs)-1].Flags |= verbs.SendSolicited
	}
	ch.sinceSignal++
	signal := ch.sinceSignal >= signalEvery || c.bye != nil || c.large != noLarge || len(ch.free) < 2*signalEvery || ch.sqFree <= ch.sqDepth/2
	c.state = cmdSent
	ch.closeGroup(c, true, signal)
}

// sendUnit queues a unit that belongs to no command and returns the slot that carries it; nil when there is no slot or no room.
func (ch *channel) sendUnit(b []byte) *command {
	if len(ch.free) == 0 || ch.sqFree < 1 || ch.closing {
		return nil
	}
	c := ch.take()
	c.isTMF = true
	n := copy(c.tx, b)
	ch.sinceSignal = signalEvery // rare enough to be signaled each time
	ch.post(c, n, false)
	return c
}
