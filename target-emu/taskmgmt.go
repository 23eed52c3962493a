package targetemu

import (
	"slices"
	"sync/atomic"

	"srp-initiator/srp/iu"
	"srp-initiator/srp/scsi"
	"srp-initiator/target-emu/lun"
)

// Task management. A function that touches one channel's commands only (ABORT TASK of a command that is on the channel) is done
// in place; all others go to the target's one task manager goroutine, which locks one channel at a time.
//
// The response is sent when the commands it aborted have no RDMA request in flight any more: then the
// initiator may take its buffers back.

// taskMgmt is a task management function under way.
type taskMgmt struct {
	ch      *channel
	cmd     *command // the slot that will carry the response: the function's, or for PREEMPT AND ABORT the command's
	fn      iu.TaskFunction
	number  uint32
	unit    *lun.Unit
	tag     uint64
	ports   [][16]byte   // for PREEMPT AND ABORT: whose commands
	pending atomic.Int32 // commands that must end first, and one for the function itself
}

// beginTaskMgmt starts a function from its unit.
func (ch *channel) beginTaskMgmt(b []byte) {
	c := ch.take()
	ch.request()
	ch.count.taskMgmt.Add(1)
	c.isTMF = true
	var req iu.TaskMgmt
	if err := req.Decode(b); err != nil {
		c.tag, _ = iu.PeekTag(b)
		ch.count.malformed.Add(1)
		c.rspCode = iu.TaskInvalidFields
		ch.answer(c)
		return
	}
	c.tag, c.solNot = req.Tag, req.SolNot
	c.rspCode = iu.TaskComplete
	number, ok := parseLUN(req.LUN)
	c.number = number
	if f := ch.t.faults; f != nil {
		c.verdict = f.taskMgmt(ch, c, req.Function)
	}
	switch req.Function {
	case iu.AbortTask, iu.AbortTaskSet, iu.ClearTaskSet, iu.LUNReset:
	default: // CLEAR ACA among them: NormACA is 0
		c.rspCode = iu.TaskNotSupported
		ch.answer(c)
		return
	}
	if ok {
		c.unit = ch.unit(number)
	}
	if c.unit == nil {
		c.rspCode = iu.TaskInvalidFields
		ch.answer(c)
		return
	}
	m := &taskMgmt{ch: ch, cmd: c, fn: req.Function, number: number, unit: c.unit.nexus.Unit(), tag: req.TaskTag}
	m.pending.Store(1)
	c.state = cmdActive
	if req.Function == iu.AbortTask {
		for i := range ch.cmds {
			if v := &ch.cmds[i]; v != c && !v.isTMF && v.state != cmdFree && v.tag == req.TaskTag && v.number == number {
				ch.abort(v, m, false)
				ch.t.taskDone(m, ch)
				return
			}
		}
		if !ch.nexus.multi.Load() {
			ch.t.taskDone(m, ch) // not there: completed before, which is as good
			return
		}
	}
	ch.t.manage(m)
}

// abort ends command v for m, without a response or, for another nexus's function, with TASK ABORTED.
func (ch *channel) abort(v *command, m *taskMgmt, tas bool) {
	switch v.state {
	case cmdFree, cmdSent: // its response is on the way, before the function's
		return
	case cmdHeld:
		if v.verdict != nil && v.verdict.keep {
			return
		}
		ch.unhold(v)
		if tas {
			v.verdict = nil
			v.want = v.moved
			v.task.SetStatus(scsi.StatusTaskAborted)
			ch.answer(v)
			return
		}
		ch.drop(v)
	case cmdQueued:
		if tas {
			v.task.SetStatus(scsi.StatusTaskAborted)
			v.phase = phaseAnswer
			return
		}
		fallthrough
	case cmdFencing: // has done what it does; nobody waits for it, or two could wait for each other
		if tas {
			v.tas = true
		} else {
			v.dead = true
		}
	case cmdMoving:
		if tas {
			v.tas = true
		} else {
			v.dead = true
		}
		if ch.recall(v) {
			ch.back(v)
			return
		}
		v.tmfs = append(v.tmfs, m)
		m.pending.Add(1)
	}
}

// taskDone notes that one of m's commands, or m's own work, has ended. The last one sends the response: here when it belongs to channel held,
// whose lock the caller holds, else by the task manager.
func (t *Target) taskDone(m *taskMgmt, held *channel) {
	if m.pending.Add(-1) > 0 {
		return
	}
	if held != nil && held == m.ch {
		m.ch.confirm(m.cmd)
		return
	}
	t.manage(m)
}

// confirm answers what had to wait for other commands' end: a function, or PREEMPT AND ABORT, which may itself have been aborted meanwhile.
func (ch *channel) confirm(c *command) {
	if !ch.aborted(c) {
		ch.answer(c)
	}
}

// aborted goes on with a command that something has ended: if it was aborted meanwhile it is dropped, or answered with TASK ABORTED, and who waits
// for its end is told.
func (ch *channel) aborted(c *command) bool {
	c.state = cmdActive
	switch {
	case c.dead:
		ch.drop(c)
	case c.tas:
		c.task.SetStatus(scsi.StatusTaskAborted)
		ch.answer(c)
		ch.settle(c, ch)
	default:
		return false
	}
	return true
}

// settle tells the functions that wait for c that it has ended; held is as for taskDone.
func (ch *channel) settle(c *command, held *channel) {
	waiters := c.tmfs
	c.tmfs = nil
	for _, m := range waiters {
		ch.t.taskDone(m, held)
	}
}

// manage hands m to the task manager; it never blocks.
func (t *Target) manage(m *taskMgmt) {
	t.tmMu.Lock()
	t.tmQueue = append(t.tmQueue, m)
	t.tmMu.Unlock()
	select {
	case t.tmWake <- struct{}{}:
	default:
	}
}

// taskManager serves t.tmQueue until t.quit is closed.
func (t *Target) taskManager() {
	for {
		select {
		case <-t.tmWake:
		case <-t.quit:
			return
		}
		for {
			t.tmMu.Lock()
			if len(t.tmQueue) == 0 {
				t.tmMu.Unlock()
				break
			}
			m := t.tmQueue[0]
			t.tmQueue = t.tmQueue[1:]
			t.tmMu.Unlock()
			if m.pending.Load() == 0 {
				m.ch.mu.Lock()
				if !m.ch.closing {
					m.ch.confirm(m.cmd)
					m.ch.flush()
				}
				m.ch.mu.Unlock()
				continue
			}
			t.perform(m)
			t.taskDone(m, nil)
		}
	}
}

// perform aborts what m's function names, on every channel that it reaches.
func (t *Target) perform(m *taskMgmt) {
	for _, ch := range t.channels() {
		own := ch.nexus == m.ch.nexus
		switch m.fn {
		case iu.AbortTask, iu.AbortTaskSet:
			if !own {
				continue
			}
		case preemptAbort:
			if !slices.Contains(m.ports, [16]byte(ch.nexus.initiator)) {
				continue
			}
		}
		hit := false
		ch.mu.Lock()
		if !ch.closing {
			for i := range ch.cmds {
				v := &ch.cmds[i]
				if v.state == cmdFree || v.isTMF || v.number != m.number || v.unit == nil || m.fn == iu.AbortTask && v.tag != m.tag {
					continue
				}
				if v.state != cmdSent {
					hit = true
				}
				ch.abort(v, m, !own)
			}
			ch.flush()
		}
		ch.mu.Unlock()
		if hit && !own && m.fn == iu.ClearTaskSet {
			if n := m.unit.Attach(ch.nexus.initiator); n != nil {
				n.Establish(scsi.ASCCommandsClearedByOther)
				n.Detach()
			}
		}
	}
	if m.fn == iu.LUNReset {
		m.unit.Reset()
	}
}

// preemptAbort is not a function on the wire: PREEMPT AND ABORT asks for it.
const preemptAbort iu.TaskFunction = 0xff

// preemptAbort ends the commands that the initiator ports have on c's unit, and answers c when none of them touches the unit any more: whoever
// has fenced others off must not be overtaken by what they had sent before.
func (ch *channel) preemptAbort(c *command, ports [][16]byte) {
	m := &taskMgmt{ch: ch, cmd: c, fn: preemptAbort, number: c.number, unit: c.unit.nexus.Unit(), ports: ports}
	m.pending.Store(1)
	c.state = cmdFencing
	ch.t.manage(m)
}
