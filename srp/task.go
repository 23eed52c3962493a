package srp

// Task management and timeouts: the session's supervisor looks at every command's deadline a few times a second. A command past it
// is aborted on its own channel; if that is not confirmed, its logical unit is reset; if that is not
// either, the connection is made anew. One step at a time, each with its own time limit. A command's buffers stay in use
// until the answer that confirms the step, or until the queue pair is gone.

import (
	"errors"
	"fmt"
	"time"

	"srp-initiator/srp/iu"
	"srp-initiator/srp/scsi"
)

// TaskError is a task management function that the target did not confirm.
type TaskError struct {
	Function iu.TaskFunction
	Code     iu.TaskCode
	Answered bool // false: no answer in time, or it could not be sent
	Err      error
}

func (e *TaskError) Error() string {
	switch {
	case e.Answered:
		return fmt.Sprintf("srp: %s: %s (response code %d)", e.Function, e.Code, uint8(e.Code))
	case e.Err != nil:
		return fmt.Sprintf("srp: %s: %s", e.Function, e.Err)
	}
	return fmt.Sprintf("srp: %s: no answer", e.Function)
}

func (e *TaskError) Unwrap() error { return e.Err }

var (
	errNoCredit   = errors.New("the target's request limit is used up")
	errNoCode     = errors.New("the response has no response data")
	errTaskSend   = errors.New("an earlier task management request is still being sent")
	errTaskAnswer = errors.New("no answer in time")
)

// sendTask sends a task management unit. It may use the last credit.
func (ch *channel) sendTask(fn iu.TaskFunction, lun scsi.LUN, taskTag uint64) error {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	switch {
	case ch.state != live:
		return ErrConnectionLost
	case ch.taskBusy || ch.room() == 0:
		return errTaskSend
	case ch.reqLim < 1:
		return errNoCredit
	}
	select { // an answer that nobody waited for any more
	case <-ch.taskDone:
	default:
	}
	ch.taskGen++
	tm := iu.TaskMgmt{Tag: uint64(ch.taskGen)<<32 | tagTask | uint64(ch.index)<<tagChannelShift, LUN: iu.LUN(lun), Function: fn, TaskTag: taskTag}
	n, err := tm.Encode(ch.tx.region.Slice(ch.taskAt(), replySize))
	if err != nil {
		panic("srp: task management unit does not fit: " + err.Error())
	}
	ch.taskBusy, ch.taskTag = true, tm.Tag
	ch.reqLim--
	ch.stats.TaskMgmt++
	ch.inst.Unattended(1)
	ch.queueSend(sent{kind: sentTask}, ch.taskAt(), n, true)
	if !ch.batching {
		ch.flush()
	}
	return nil
}

// taskResponse handles the answer. Called with mu held.
func (ch *channel) taskResponse(r *iu.Response, err error) {
	if ch.taskTag == 0 || r.Tag != ch.taskTag {
		ch.stats.UnknownTags++
		return
	}
	ch.taskTag = 0
	a := taskAnswer{err: err}
	if err == nil {
		var ok bool
		if a.code, ok = r.TaskCode(); !ok {
			a.err = errNoCode // nothing said is not success
		}
	}
	ch.taskDone <- a // has room: one answer per request, taken or drained before the next
}

// task runs a task management function and returns nil when the target confirmed it. Called by the supervisor.
func (s *Session) task(ch *channel, fn iu.TaskFunction, lun scsi.LUN, taskTag uint64) error {
	if err := ch.sendTask(fn, lun, taskTag); err != nil {
		return &TaskError{Function: fn, Err: err}
	}
	defer ch.inst.Unattended(-1)
	limit := time.NewTimer(s.opts.TaskMgmtTimeout)
	defer limit.Stop()
	tick := time.NewTicker(tickInterval)
	defer tick.Stop()
	for {
		select {
		case a := <-ch.taskDone:
			switch {
			case a.err != nil:
				return &TaskError{Function: fn, Err: a.err}
			case a.code != iu.TaskComplete:
				return &TaskError{Function: fn, Code: a.code, Answered: true}
			}
			return nil
		case <-limit.C:
			ch.mu.Lock()
			ch.taskTag = 0
			ch.mu.Unlock()
			return &TaskError{Function: fn, Err: errTaskAnswer}
		case <-tick.C:
			s.updateClock()
			if ch.failed.Load() {
				return &TaskError{Function: fn, Err: ErrConnectionLost}
			}
		case <-s.closing:
			return &TaskError{Function: fn, Err: ErrClosed}
		}
	}
}

// overdue is a command that must be aborted.
type overdue struct {
	ch  *channel
	c   *Command
	tag uint64
	lun scsi.LUN
}

// collectOverdue ends commands that were never sent and finds those that were, one per call; nil when there is none.
func (ch *channel) collectOverdue(now int64) (late *overdue, stuck bool) {
	var expired list
	ch.mu.Lock()
	if ch.state != live {
		ch.mu.Unlock()
		return nil, false
	}
	for c := ch.waiting.head; c != nil; {
		next := c.next
		if c.cancel || c.deadline != 0 && c.deadline <= now {
			ch.waiting.remove(c)
			if c.Err = ErrNotSent; c.cancel {
				c.Err = c.why
			}
			ch.stats.NotSent++
			expired.push(c)
		}
		c = next
	}
	for i := range ch.slots {
		s := &ch.slots[i]
		if c := s.cmd; c != nil && !s.aborting && (c.cancel || c.deadline != 0 && c.deadline <= now) {
			s.aborting = true
			late = &overdue{ch, c, uint64(s.gen)<<32 | uint64(ch.index)<<tagChannelShift | uint64(i), c.LUN}
			break
		}
	}
	// With nothing on its way no credit comes back by itself, only by a CRED_REQ.
	if ch.inflight > 0 || ch.reqLim > 1 {
		ch.starvedAt, ch.starved = 0, false
	} else {
		if ch.starvedAt == 0 {
			ch.starvedAt = now
		}
		ch.starved = ch.starved || ch.waiting.head != nil || expired.head != nil
		stuck = ch.starved && now-ch.starvedAt > int64(ch.s.opts.TaskMgmtTimeout)
	}
	ch.mu.Unlock()
	if expired.head != nil {
		ch.tell(expired.head)
	}
	return late, stuck
}

// release ends the command of slot, if it is still the one, with err.
func (ch *channel) release(tag uint64, err error) {
	slot := uint16(tag)
	ch.mu.Lock()
	s := &ch.slots[slot]
	if s.gen != uint32(tag>>32) || s.cmd == nil {
		ch.mu.Unlock()
		return // answered after all
	}
	s.cmd.Err = err
	ch.endLocked(slot)
}

// endLocked finishes slot's command outside of the handler; it unlocks mu.
func (ch *channel) endLocked(slot uint16) {
	s := &ch.slots[slot]
	c := s.cmd
	s.cmd = nil
	ch.inflight--
	if s.sendDone {
		ch.free = append(ch.free, slot)
	}
	ch.startWaiting()
	if !ch.batching {
		ch.flush()
	}
	ch.mu.Unlock()
	ch.tell(c)
}

// checkTimeouts looks for commands past their deadline and deals with them.
func (s *Session) checkTimeouts() {
	chans := s.channels()
	for _, ch := range chans {
		for {
			late, stuck := ch.collectOverdue(s.clock.Load())
			if stuck {
				ch.failLocking(fmt.Errorf("srp: channel %d: commands wait but the target took back all credits", ch.index))
				return
			}
			if late == nil {
				break
			}
			if !s.abort(chans, late) {
				return
			}
		}
	}
}

// abort ends one command. False: the connection was given up.
func (s *Session) abort(chans []*channel, o *overdue) bool {
	ch := o.ch
	reason := ErrAborted
	ch.mu.Lock()
	if c := ch.slots[uint16(o.tag)].cmd; c == o.c && c.cancel && c.why != nil {
		reason = c.why
	}
	ch.stats.Aborts++
	ch.mu.Unlock()
	err := s.task(ch, iu.AbortTask, o.lun, o.tag)
	if err == nil {
		ch.release(o.tag, reason)
		return true
	}
	if ch.slotFree(o.tag) {
		return true // its answer came meanwhile
	}
	if ch.failed.Load() || s.isClosing() {
		return false
	}
	s.note("%s; resetting logical unit %s", err, o.lun)
	ch.mu.Lock()
	ch.stats.Resets++
	ch.mu.Unlock()
	if err = s.resetUnit(chans, ch, o.lun, o.tag, reason); err == nil {
		return true
	}
	if ch.failed.Load() || s.isClosing() {
		return false
	}
	s.note("%s; giving the connection up", err)
	ch.failLocking(fmt.Errorf("srp: channel %d: a command was not answered and could not be ended: %w", ch.index, err))
	return false
}

// resetUnit resets a logical unit through ch and ends its commands on all channels. The command with tag, if
// it is not 0, ends with reason, the others with ErrReset.
func (s *Session) resetUnit(chans []*channel, ch *channel, lun scsi.LUN, tag uint64, reason error) error {
	// Commands sent after the reset are not ended by it.
	type hit struct {
		ch  *channel
		tag uint64
	}
	var hits []hit
	for _, x := range chans {
		x.mu.Lock()
		for i := range x.slots {
			if sl := &x.slots[i]; sl.cmd != nil && sl.cmd.LUN == lun {
				hits = append(hits, hit{x, uint64(sl.gen)<<32 | uint64(x.index)<<tagChannelShift | uint64(i)})
			}
		}
		x.mu.Unlock()
	}
	if err := s.task(ch, iu.LUNReset, lun, 0); err != nil {
		return err
	}
	for _, h := range hits {
		if h.ch != ch && !h.ch.slotFree(h.tag) {
			// Channels are not ordered among each other: the target may get this command after the reset. An abort on its own
			// channel cannot overtake it; that there is no such task any more may be reported as a failure.
			err := s.task(h.ch, iu.AbortTask, lun, h.tag)
			if te := (*TaskError)(nil); err != nil && !(errors.As(err, &te) && te.Answered) {
				return err
			}
		}
		err := ErrReset
		if h.ch == ch && h.tag == tag {
			err = reason
		}
		h.ch.releaseReset(h.tag, err)
	}
	return nil
}

// releaseReset ends a command that a reset has ended, or sends it again when it may be.
func (ch *channel) releaseReset(tag uint64, err error) {
	slot := uint16(tag)
	ch.mu.Lock()
	s := &ch.slots[slot]
	if s.gen != uint32(tag>>32) || s.cmd == nil {
		ch.mu.Unlock()
		return
	}
	c := s.cmd
	if err != ErrReset || !c.Retry || c.tries >= maxTries {
		c.Err = err
		ch.endLocked(slot)
		return
	}
	c.tries++
	s.cmd = nil
	ch.inflight--
	if s.sendDone {
		ch.free = append(ch.free, slot)
	}
	if c.bounce >= 0 {
		ch.bounce.give(c.bounce, c.length)
		c.bounce = -1
	}
	c.slot = -1
	ch.waiting.push(c)
	ch.stats.Retries++
	ch.startWaiting()
	if !ch.batching {
		ch.flush()
	}
	ch.mu.Unlock()
}

func (ch *channel) slotFree(tag uint64) bool {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	s := &ch.slots[uint16(tag)]
	return s.gen != uint32(tag>>32) || s.cmd == nil
}

// Cancel aborts c as soon as possible; it ends with why (nil: ErrAborted), unless its answer comes first. A command that is done is left alone.
func (s *Session) Cancel(c *Command, why error) {
	if why == nil {
		why = ErrAborted
	}
	for c.state.Load() == cmdSubmitted {
		ch := c.where.Load()
		if ch == nil {
			if s.cancelHeld(c, why) {
				return
			}
			continue
		}
		ch.mu.Lock()
		if c.where.Load() != ch {
			ch.mu.Unlock()
			continue
		}
		if c.state.Load() == cmdSubmitted && !c.cancel {
			c.cancel, c.why = true, why
		}
		ch.mu.Unlock()
		s.wake()
		return
	}
}

// LUNReset resets a logical unit. Commands on their way to it end with ErrReset, or are sent again if they may be.
func (s *Session) LUNReset(lun scsi.LUN) error {
	return s.request(taskRequest{fn: iu.LUNReset, lun: lun})
}

// ClearTaskSet ends the logical unit's commands of all initiators; AbortTaskSet those of ours.
func (s *Session) TaskSet(fn iu.TaskFunction, lun scsi.LUN) error {
	switch fn {
	case iu.AbortTaskSet, iu.ClearTaskSet, iu.ClearACA:
		return s.request(taskRequest{fn: fn, lun: lun})
	}
	return &ArgumentError{fmt.Sprintf("%s is not a function of a task set", fn)}
}

// taskRequest is a caller's wish for task management, which the supervisor carries out.
type taskRequest struct {
	fn     iu.TaskFunction
	lun    scsi.LUN
	answer chan error
}

func (s *Session) request(r taskRequest) error {
	r.answer = make(chan error, 1)
	select {
	case s.tasks <- r:
	case <-s.ended:
		return s.endError()
	}
	select {
	case err := <-r.answer:
		return err
	case <-s.ended:
		return s.endError()
	}
}

func (s *Session) serve(r taskRequest) {
	chans := s.channels()
	if len(chans) == 0 {
		r.answer <- &TaskError{Function: r.fn, Err: ErrConnectionLost}
		return
	}
	if r.fn == iu.LUNReset {
		r.answer <- s.resetUnit(chans, chans[0], r.lun, 0, nil)
		return
	}
	// A task set function works on the channel's nexus; commands that it ends are answered or not at the target's will (TAS), so
	// each is ended as by a reset.
	if r.fn == iu.ClearACA {
		r.answer <- s.task(chans[0], r.fn, r.lun, 0)
		return
	}
	r.answer <- s.endTaskSet(chans, r)
}

func (s *Session) endTaskSet(chans []*channel, r taskRequest) error {
	for _, ch := range chans {
		ch.mu.Lock()
		var tags []uint64
		for i := range ch.slots {
			if sl := &ch.slots[i]; sl.cmd != nil && sl.cmd.LUN == r.lun {
				tags = append(tags, uint64(sl.gen)<<32|uint64(ch.index)<<tagChannelShift|uint64(i))
			}
		}
		ch.mu.Unlock()
		if err := s.task(ch, r.fn, r.lun, 0); err != nil {
			return err
		}
		for _, t := range tags {
			ch.releaseReset(t, ErrReset)
		}
	}
	return nil
}
