package srp

// Lost connections. The supervisor is the only goroutine that makes and ends channels once the session is there:
//
//	Running --a channel fails--> Blocked --fast_io_fail_tmo--> FailFast --dev_loss_tmo--> Lost
//	   ^                            |                              |
//	   +------ all channels anew ---+------------------------------+
//
// As in ib_srp one failed channel takes the others with it: the first new login ends what the target remembers of the nexus, so that nothing
// old can still be executed when a command is sent again. Commands that were on their way are
// held if they may be sent again, else they end with ErrConnectionLost, in both cases only after
// their queue pair is gone.

import (
	"context"
	"errors"
	"fmt"
	"time"

	"srp-initiator/rdma/verbs"
)

// disconnectGrace is how long Close waits for the target's answers to its disconnect requests.
const disconnectGrace = 300 * time.Millisecond

func (s *Session) supervise() {
	defer close(s.ended)
	tick := time.NewTicker(tickInterval)
	defer tick.Stop()
	for {
		select {
		case <-s.closing:
			s.shutdown()
			return
		case r := <-s.tasks:
			s.updateClock()
			s.serve(r)
		case <-s.kick:
			s.updateClock()
		case <-tick.C:
			s.updateClock()
		}
		if ch := s.failedChannel(); ch != nil {
			s.block(ch.reason())
			if !s.reconnect(tick) {
				s.shutdown()
				return
			}
			continue
		}
		s.resume()
		s.checkTimeouts()
	}
}

// failedChannel is the first failed channel, nil when all live.
func (s *Session) failedChannel() *channel {
	for _, ch := range s.channels() {
		if ch.failed.Load() {
			return ch
		}
	}
	return nil
}

// reason is why a channel failed. A flushed work request says only that something did; the connection soon tells what.
func (ch *channel) reason() error {
	ch.mu.Lock()
	err := ch.err
	ch.mu.Unlock()
	var se *verbs.StatusError
	if errors.As(err, &se) && se.Status == verbs.WCFlushError {
		select {
		case <-ch.conn.Done():
			if cause := ch.conn.Err(); cause != nil {
				return fmt.Errorf("srp: channel %d: %w", ch.index, cause)
			}
		case <-time.After(tickInterval):
		}
	}
	return err
}

// block ends all channels and collects their commands.
func (s *Session) block(err error) {
	s.mu.Lock()
	s.state, s.lostErr = Blocked, err
	s.mu.Unlock()
	s.note("connection lost: %s", err)
	chans := s.channels()
	s.current.Store(nil)
	s.end(chans, fmt.Errorf("%w: %w", ErrConnectionLost, err), true)
}

// end stops channels and disposes of their commands: held for another try when retry is set and they may be, else ended with err.
func (s *Session) end(chans []*channel, err error, retry bool) {
	for _, ch := range chans {
		ch.disconnect()
	}
	for _, ch := range chans {
		ch.drain()
		s.dispose(ch)
	}
	for _, ch := range chans {
		for c := ch.takeAll(); c != nil; {
			next := c.next
			c.next = nil
			switch {
			case c.cancel: // nobody sets it any more: takeAll has taken the command off the channel
				c.Err = c.why
				c.complete(time.Now())
			case retry && (c.slot < 0 || c.Retry && c.tries < maxTries):
				if c.slot >= 0 {
					c.tries++
				}
				c.slot, c.bounce = -1, -1
				s.mu.Lock()
				s.held.push(c)
				s.mu.Unlock()
			default:
				c.Err = err
				c.complete(time.Now())
			}
			c = next
		}
	}
}

func (ch *channel) disconnect() {
	ch.failLocking(ErrConnectionLost)
	if ch.conn != nil {
		ch.conn.Disconnect()
	}
}

// drain takes over the completion queue, reaps the answers that had come before the end, and destroys the queue pair: from then on the
// device does not touch the channel's memory, nor that of its commands.
func (ch *channel) drain() {
	ch.expelWaiters()
	ch.inst.Disable()
	var wcs [32]verbs.WorkCompletion
	for {
		n := ch.inst.CQ().Poll(wcs[:])
		if n == 0 {
			break
		}
		ch.handle(wcs[:n])
	}
}

// takeAll takes every command off a channel that has ended, as a chain.
func (ch *channel) takeAll() *Command {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	var all list
	for i := range ch.slots {
		if c := ch.slots[i].cmd; c != nil {
			ch.slots[i].cmd = nil
			all.push(c)
		}
	}
	for c := ch.waiting.pop(); c != nil; c = ch.waiting.pop() {
		all.push(c)
	}
	for c := all.head; c != nil; c = c.next {
		c.where.Store(nil)
	}
	ch.inflight = 0
	return all.head
}

// dispose releases what the channel holds, in the order that devices need. It works on a channel at any stage.
func (s *Session) dispose(ch *channel) {
	var errs []error
	if ch.qp != nil {
		errs = append(errs, ch.qp.Destroy())
	}
	if ch.inst != nil {
		s.mu.Lock()
		s.retiredCQ = s.retiredCQ.Add(ch.inst.Stats())
		s.mu.Unlock()
		errs = append(errs, ch.inst.Close())
	}
	if ch.conn != nil {
		errs = append(errs, ch.conn.Close())
	}
	for _, m := range []*Memory{ch.tx, ch.rx, ch.bounce.mem} {
		if m != nil {
			errs = append(errs, m.Free())
		}
	}
	s.mu.Lock()
	s.retired.add(ch.stats)
	s.mu.Unlock()
	if err := errors.Join(errs...); err != nil && !errors.Is(err, verbs.ErrDeviceGone) {
		s.note("releasing channel %d: %s", ch.index, err)
	}
}

// resume sends what is held.
func (s *Session) resume() {
	chans := s.channels()
	if len(chans) == 0 {
		return
	}
	for {
		s.mu.Lock()
		c := s.held.pop()
		s.mu.Unlock()
		if c == nil {
			return
		}
		n := c.Queue - 1
		if n < 0 {
			n = int(s.turn.Add(1) & 0xffffff)
		}
		c.deadline = s.deadline(c.Timeout)
		// Once submitted the command may complete at once and be its owner's again.
		waiter := c.Waiter
		if !chans[n%len(chans)].submit(c, nil) {
			s.mu.Lock()
			s.held.push(c)
			s.mu.Unlock()
			return
		}
		if waiter != nil {
			waiter.Signal() // so that it waits where the command is now
		}
	}
}

// reconnect tries until it has channels again (true), or the session ends (false).
func (s *Session) reconnect(tick *time.Ticker) bool {
	lost := time.Now()
	var failures int
	next := lost
	if s.opts.ReconnectDelay >= 0 {
		next = lost.Add(s.opts.ReconnectDelay)
	}
	var attempt chan attemptResult
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	abandon := func() {
		cancel()
		if attempt == nil {
			return
		}
		if r := <-attempt; r.err == nil {
			s.end(r.chans, ErrConnectionLost, true)
		}
	}
	for {
		select {
		case <-s.closing:
			abandon()
			return false
		case r := <-s.tasks:
			r.answer <- &TaskError{Function: r.fn, Err: ErrConnectionLost}
		case <-s.kick:
		case <-tick.C:
		case r := <-attempt:
			attempt = nil
			if r.err == nil {
				s.updateClock()
				s.publish(r.chans)
				s.mu.Lock()
				s.state, s.lostErr = Running, nil
				s.reconnects++
				s.mu.Unlock()
				s.note("reconnected after %s", time.Since(lost).Round(time.Millisecond))
				s.resume()
				return true
			}
			failures++
			s.mu.Lock()
			s.failures++
			s.lostErr = r.err
			s.mu.Unlock()
			s.note("reconnect attempt %d: %s", failures, r.err)
			// The kernel's backoff: constant at first, then growing linearly to a hundred times.
			next = time.Now().Add(s.opts.ReconnectDelay * time.Duration(max(1, min(failures-10, 100))))
		}
		now := time.Now()
		s.updateClock()
		down := now.Sub(lost)
		s.mu.Lock()
		state := s.state
		s.mu.Unlock()
		if s.opts.FastIOFail >= 0 && down >= s.opts.FastIOFail && state == Blocked {
			s.setState(FailFast)
			s.note("no connection for %s (fast_io_fail_tmo): commands fail from now on", s.opts.FastIOFail)
			s.failHeld()
		}
		if s.opts.DevLoss >= 0 && down >= s.opts.DevLoss {
			abandon()
			s.setState(Lost)
			s.note("no connection for %s (dev_loss_tmo): the session is given up", s.opts.DevLoss)
			s.failHeld()
			return false
		}
		if s.opts.ReconnectDelay >= 0 && attempt == nil && !now.Before(next) {
			attempt = make(chan attemptResult, 1)
			go func(answer chan<- attemptResult) {
				chans, err := s.connectAll(ctx)
				answer <- attemptResult{chans, err}
			}(attempt)
		}
	}
}

type attemptResult struct {
	chans []*channel
	err   error
}

func (s *Session) setState(st State) {
	s.mu.Lock()
	s.state = st
	s.mu.Unlock()
}

// failHeld ends the held commands with the state's error.
func (s *Session) failHeld() {
	for {
		s.mu.Lock()
		c := s.held.pop()
		err := s.stateError()
		s.mu.Unlock()
		if c == nil {
			return
		}
		c.Err = err
		c.complete(time.Now())
	}
}

// shutdown is the end of the session: closed by its user, or lost.
func (s *Session) shutdown() {
	chans := s.channels()
	s.mu.Lock()
	if s.state != Lost {
		s.state = Closed
	}
	s.mu.Unlock()
	s.current.Store(nil)
	for _, ch := range chans {
		ch.disconnect()
	}
	limit := time.NewTimer(disconnectGrace)
	defer limit.Stop()
	for _, ch := range chans {
		select {
		case <-ch.conn.Done():
		case <-limit.C:
			limit.Reset(0)
		}
	}
	s.end(chans, ErrClosed, false)
	s.failHeld()
}
