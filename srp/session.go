// Package srp is a SCSI RDMA Protocol initiator.
//
// Login connects one or more channels to a target port and returns a Session. Session.Submit sends a
// Command and calls back, Session.Do waits. The session keeps the target's request limits, times commands out, and
// makes lost connections anew. channel.go holds the data path, task.go what happens to
// commands that are late, recover.go what happens to connections that are lost.
package srp

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	// tickInterval is the resolution of command timeouts.
	tickInterval = 50 * time.Millisecond
	// maxTries is how often a command that may be retried is sent in all, as often as the kernel's sd does.
	maxTries = 5
)

// State is the state of a session's transport, named as the kernel's srp_remote_ports name theirs.
type State uint8

const (
	Running  State = iota
	Blocked        // no connection; commands wait
	FailFast       // no connection for fast_io_fail_tmo; commands fail
	Lost           // given up
	Closed
)

func (st State) String() string {
	switch st {
	case Running:
		return "running"
	case Blocked:
		return "blocked"
	case FailFast:
		return "fail-fast"
	case Lost:
		return "lost"
	case Closed:
		return "closed"
	}
	return "?"
}

// Config is what Login needs beside the target.
type Config struct {
	Device    verbs.Context
	Connector cm.Connector
	// Notice is told in one line each what a user should hear of: reconnects, resets, fewer channels than
	// asked for. Optional; it must not block.
	Notice func(string)
	// Event is told of the target's asynchronous events; sense is valid during the call only. Optional; it runs on the completion path and must not block.
	Event func(lun scsi.LUN, sense []byte)
}

// Session is a login to one target port. Its methods are safe for concurrent use.
type Session struct {
	cfg         Config
	target      TargetPort
	opts        LoginOptions
	attr        verbs.DeviceAttr
	pd          verbs.ProtectionDomain
	memories    memories
	maxTransfer int
	began       time.Time
	clock       atomic.Int64 // since began, advanced by the supervisor
	turn        atomic.Uint32
	modeMu      sync.Mutex // orders SetMode and the arrival of new channels
	mode        atomic.Uint32
	noImmediate bool // the target refused units that large
	iuLimit     atomic.Int32

	current atomic.Pointer[[]*channel]

	kick    chan struct{}
	tasks   chan taskRequest
	closing chan struct{}
	ended   chan struct{} // closed when the supervisor has ended
	once    sync.Once

	mu         sync.Mutex
	state      State
	lostErr    error // why Lost, or why not connected
	held       list  // commands without a channel
	reconnects uint64
	failures   uint64 // attempts to reconnect that failed
	retired    ChannelStats
	retiredCQ  completion.Stats
}

// Login logs in to the target port t. ctx bounds the login only. Errors: *LoginRejectedError, *cm.RejectError, cm.ErrUnreachable,
// *ProtocolError, or what the device says.
func Login(ctx context.Context, cfg Config, t TargetPort, o LoginOptions) (*Session, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	attr, err := cfg.Device.QueryDevice()
	if err != nil {
		return nil, fmt.Errorf("srp: query %s: %w", cfg.Device.Name(), err)
	}
	s := &Session{cfg: cfg, target: t, opts: o, attr: attr, began: time.Now(), maxTransfer: o.MaxSectors * 512,
		kick: make(chan struct{}, 1), tasks: make(chan taskRequest), closing: make(chan struct{}), ended: make(chan struct{})}
	s.mode.Store(uint32(o.Completion.Mode))
	if err := s.fitDevice(); err != nil {
		return nil, err
	}
	if s.pd, err = cfg.Device.AllocPD(); err != nil {
		return nil, fmt.Errorf("srp: protection domain on %s: %w", cfg.Device.Name(), err)
	}
	chans, err := s.connectAll(ctx)
	if err != nil {
		s.pd.Dealloc()
		return nil, err
	}
	s.publish(chans)
	go s.supervise()
	return s, nil
}

// validate holds for options that did not come from ParseTarget.
func (o *LoginOptions) validate() error {
	for i := range loginKeys {
		k := &loginKeys[i]
		var t TargetPort
		var scratch LoginOptions
		if v := k.get(&TargetPort{Host: "x:1", IOClass: IOClassRev16a}, o); v != "" && k.Name != "dest" {
			if err := k.set(&t, &scratch, v); err != nil {
				return &TargetError{Item: k.Name, Value: v, Reason: err.Error() + "; want " + k.Values}
			}
		}
	}
	return o.check(map[string]bool{"sg_tablesize": true, "cmd_sg_entries": true})
}

// fitDevice lowers the queue size to what the device can hold.
func (s *Session) fitDevice() error {
	o := &s.opts
	if o.TargetCanQueue > 0 {
		o.ChannelCount = min(o.ChannelCount, o.TargetCanQueue)
		o.QueueSize = min(o.QueueSize, o.TargetCanQueue/o.ChannelCount)
	}
	for ; o.QueueSize > 0; o.QueueSize-- {
		q := queueSizes(o.QueueSize)
		if int(q.send) <= s.attr.MaxQPWR && q.recv <= s.attr.MaxQPWR && int(q.send)+q.recv <= s.attr.MaxCQE {
			return nil
		}
	}
	return fmt.Errorf("srp: %s takes %d work requests per queue pair and %d entries per completion queue: too few for one command",
		s.cfg.Device.Name(), s.attr.MaxQPWR, s.attr.MaxCQE)
}

// Target is the target port.
func (s *Session) Target() TargetPort { return s.target }

// Options are the options in force; some may have been lowered to what the device can do.
func (s *Session) Options() LoginOptions { return s.opts }

// MaxTransfer is the largest buffer of one command, in bytes.
func (s *Session) MaxTransfer() int { return s.maxTransfer }

// Device is the device that the session uses.
func (s *Session) Device() verbs.Context { return s.cfg.Device }

// QueueDepth is how many commands can be outstanding over all channels just now.
func (s *Session) QueueDepth() (n int) {
	for _, ch := range s.channels() {
		n += ch.queueLimit
	}
	return n
}

// Channels is how many channels the session has just now.
func (s *Session) Channels() int { return len(s.channels()) }

// State is the state of the transport, with the reason if it is not Running.
func (s *Session) State() (State, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state, s.lostErr
}

// AllocMemory maps size bytes and registers them: data of commands that lie in it move without a copy. Close frees it.
func (s *Session) AllocMemory(size int) (*Memory, error) {
	if s.isClosing() {
		return nil, ErrClosed
	}
	m, err := register(s.pd, size, dataAccess)
	if err != nil {
		return nil, err
	}
	s.memories.add(m)
	return m, nil
}

// SetMode changes who reaps the session's completions, without losing any. Channels that are being made take the mode when the session takes them.
// After an error the old mode is in force.
func (s *Session) SetMode(m completion.Mode) error {
	if !slices.Contains(completion.Modes(), m) {
		return fmt.Errorf("srp: %v is no completion mode", m)
	}
	s.modeMu.Lock()
	defer s.modeMu.Unlock()
	err := s.setMode(s.channels(), m)
	if err != nil {
		_ = s.setMode(s.channels(), s.Mode()) // at worst a channel is left in another mode, in which it works too
		return err
	}
	s.mode.Store(uint32(m))
	return nil
}

// setMode puts channels into a mode. Called with modeMu held.
func (s *Session) setMode(chans []*channel, m completion.Mode) error {
	for _, ch := range chans {
		if !ch.enterWait(nil) {
			continue // being replaced: its successor takes the new mode
		}
		err := ch.inst.SetMode(m)
		ch.leaveWait(nil)
		if err != nil {
			return fmt.Errorf("srp: channel %d: %w", ch.index, err)
		}
	}
	return nil
}

// publish makes new channels the session's. Their logins took a while, and began in the mode of that time: what SetMode has said since then holds for them too.
func (s *Session) publish(chans []*channel) {
	s.modeMu.Lock()
	defer s.modeMu.Unlock()
	if err := s.setMode(chans, s.Mode()); err != nil {
		s.note("completion mode %s: %s", s.Mode(), err)
	}
	s.current.Store(&chans)
}

// Mode is the completion mode.
func (s *Session) Mode() completion.Mode { return completion.Mode(s.mode.Load()) }

func (s *Session) channels() []*channel {
	if p := s.current.Load(); p != nil {
		return *p
	}
	return nil
}

func (s *Session) updateClock() { s.clock.Store(int64(time.Since(s.began))) }

// deadline is when a command started now is overdue, by the session's clock.
func (s *Session) deadline(timeout time.Duration) int64 {
	if timeout == 0 {
		timeout = s.opts.CommandTimeout
	}
	if timeout < 0 {
		return 0
	}
	return s.clock.Load() + int64(timeout)
}

// Submit sends c, or lets it wait for a credit or the connection. With a nil error c is done exactly once, later
// or before Submit returns; with an error it was not taken.
func (s *Session) Submit(c *Command) error {
	return s.submit(c, nil)
}

// SubmitAll is Submit for each of cs in order; those that follow one another to the same channel are sent with one doorbell; only when nothing
// else is under way the first leaves by itself if a notification has ended a sleep, and the first half of sixteen or more. It stops at the first
// that is not taken, and returns how many were.
func (s *Session) SubmitAll(cs []*Command) (n int, err error) {
	p := plugFor(len(cs))
	for n < len(cs) && err == nil {
		if err = s.submit(cs[n], &p); err == nil {
			n++
		}
	}
	p.pull()
	return n, err
}

// submit is Submit; with p the command may lie in its channel's batch until p is pulled.
func (s *Session) submit(c *Command, p *plug) error {
	if !c.state.CompareAndSwap(cmdIdle, cmdSubmitted) {
		panic("srp: command submitted while it is under way")
	}
	if err := c.prepare(s); err != nil {
		c.state.Store(cmdIdle)
		return err
	}
	c.deadline = s.deadline(c.Timeout)
	if chans := s.channels(); len(chans) > 0 {
		n := c.Queue - 1
		if n < 0 {
			n = int(s.turn.Add(1) & 0xffffff)
		}
		if chans[n%len(chans)].submit(c, p) {
			return nil
		}
	}
	return s.hold(c)
}

// hold keeps a command for when there is a connection.
func (s *Session) hold(c *Command) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch s.state {
	case Running, Blocked:
		c.where.Store(nil)
		s.held.push(c)
		s.wake() // Running: the supervisor has yet to see that a channel is dead, or has just replaced it
		return nil
	}
	c.state.Store(cmdIdle)
	return s.stateError()
}

func (s *Session) stateError() error {
	switch s.state {
	case FailFast:
		return fmt.Errorf("%w: %w", ErrFailFast, s.lostErr)
	case Lost:
		return fmt.Errorf("%w: %w", ErrDeviceLost, s.lostErr)
	}
	return ErrClosed
}

func (s *Session) endError() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stateError()
}

func (s *Session) cancelHeld(c *Command, why error) bool {
	s.mu.Lock()
	ok := s.held.remove(c)
	s.mu.Unlock()
	if ok {
		c.Err = why
		c.complete(time.Now())
	}
	return ok
}

// Wait waits until w is signaled (true) or the deadline passes (false; zero: none). In
// modes that leave polling to the waiter, it reaps the channel that Command.Queue queue means. It may return true early, without a signal.
func (s *Session) Wait(queue int, w *completion.Waiter, deadline time.Time) bool {
	if chans := s.channels(); len(chans) > 0 {
		ch := chans[max(queue-1, 0)%len(chans)]
		if ch.enterWait(w) {
			ok := ch.inst.Wait(w, deadline)
			ch.leaveWait(w)
			return ok
		}
	}
	return w.Wait(deadline)
}

// Poll reaps at most budget completions of each channel in the calling goroutine, in any mode, and returns how many. A
// channel that somebody else is reaping is left to them.
func (s *Session) Poll(budget int) (work int) {
	for _, ch := range s.channels() {
		if ch.enterWait(nil) {
			n, _ := ch.inst.Poll(budget)
			work += n
			ch.leaveWait(nil)
		}
	}
	return work
}

func (s *Session) waitFor(c *Command) {
	if ch := c.where.Load(); ch != nil && ch.enterWait(&c.own) {
		ch.inst.Wait(&c.own, time.Time{})
		ch.leaveWait(&c.own)
		return
	}
	// Between channels: whoever takes the command up again or ends it signals. Looking again after a while covers that it was
	// taken up just before.
	c.own.Wait(time.Now().Add(tickInterval))
}

// enterWait notes that a goroutine uses the channel's completion instance. False: it is being closed.
func (ch *channel) enterWait(w *completion.Waiter) bool {
	ch.waitMu.Lock()
	defer ch.waitMu.Unlock()
	if ch.stopping {
		return false
	}
	ch.waiters = append(ch.waiters, w)
	return true
}

func (ch *channel) leaveWait(w *completion.Waiter) {
	ch.waitMu.Lock()
	defer ch.waitMu.Unlock()
	for i, x := range ch.waiters {
		if x == w {
			n := len(ch.waiters) - 1
			ch.waiters[i] = ch.waiters[n]
			ch.waiters = ch.waiters[:n]
			break
		}
	}
	if ch.stopping && len(ch.waiters) == 0 {
		close(ch.idle)
	}
}

// expelWaiters sends everybody who waits at the channel away.
func (ch *channel) expelWaiters() {
	ch.waitMu.Lock()
	ch.stopping = true
	ch.idle = make(chan struct{})
	for _, w := range ch.waiters {
		if w != nil {
			w.Signal()
		}
	}
	if len(ch.waiters) == 0 {
		close(ch.idle)
	}
	ch.waitMu.Unlock()
	<-ch.idle
}

func (s *Session) wake() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

func (s *Session) isClosing() bool {
	select {
	case <-s.closing:
		return true
	default:
		return false
	}
}

func (s *Session) note(format string, a ...any) {
	if s.cfg.Notice != nil {
		s.cfg.Notice(fmt.Sprintf(format, a...))
	}
}

func (s *Session) asyncEvent(lun scsi.LUN, sense []byte) {
	if s.cfg.Event != nil {
		s.cfg.Event(lun, sense)
	}
}

// Close logs out: commands under way end with ErrClosed, the channels are disconnected, all memory is freed. It must not be
// called from Command.Done.
func (s *Session) Close() error {
	s.once.Do(func() { close(s.closing) })
	<-s.ended
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pd == nil {
		return nil
	}
	err := s.memories.freeAll()
	err = errors.Join(err, s.pd.Dealloc())
	s.pd = nil
	return err
}

// LoginRejectedError is a login that the target refused.
type LoginRejectedError struct {
	Reason  iu.RejectReason
	Formats iu.BufferFormats // that the target supports
	Channel int
	Hint    string
}

func (e *LoginRejectedError) Error() string {
	s := fmt.Sprintf("login rejected by the target: %s (SRP_LOGIN_REJ reason 0x%08x)", e.Reason, uint32(e.Reason))
	if e.Channel > 0 {
		s += fmt.Sprintf(" on channel %d", e.Channel)
	}
	if e.Hint != "" {
		s += "; " + e.Hint
	}
	return s
}
