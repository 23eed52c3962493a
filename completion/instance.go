package completion

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"srp-initiator/rdma/verbs"
)

// Defaults of Config.
const (
	DefaultWeight = 32  // blk-iopoll's weight in its published measurements
	DefaultBudget = 256 // irq_poll's total budget, IB_POLL_BUDGET_IRQ
	// DefaultBatch is IB_POLL_BATCH.
	DefaultBatch = 16
	maxBatch     = 64

	// DefaultSlice bounds a turn in time, as irq_poll_softirq does with one jiffy.
	DefaultSlice = time.Millisecond
	// DefaultAdaptiveSpin is about what waking a thread on another CPU costs on a virtual machine. DefaultLinger is longer, so that it is
	// the time polled in vain that ends polling, unless others have the CPU meanwhile.
	DefaultLinger       = 200 * time.Microsecond
	DefaultAdaptiveSpin = 50 * time.Microsecond
	DefaultDirectSpin   = time.Millisecond
	DefaultIdleGuard    = 100 * time.Millisecond
)

// ErrOwned says that somebody else is reaping the instance right now.
var ErrOwned = errors.New("completion: the instance is being reaped by somebody else")

// Handler consumes completions. It is called by the instance's one owner,
// with at least one entry; an entry that failed is the last of its call. It must not retain
// wcs, block, or call Disable, SetMode, Close or Wait of the same instance.
type Handler func(wcs []verbs.WorkCompletion)

// Config says how an instance is reaped. The zero value is mode Interrupt with the defaults.
type Config struct {
	Mode   Mode
	Weight int // completions per turn; 0: DefaultWeight
	Vector int // completion vector of the queue; chooses the default Poller too
	// Batch is how many completions the handler gets at once, at most. What it posts for a batch leaves behind it, so that the peer has something to
	// do while the next is handled; the first behind a notification it gets alone. 0: DefaultBatch; where the process has one CPU only, on which no peer of the same machine could, 64.
	Batch int
	// Budget and Slice bound what one wake-up of Interrupt, Thread and Adaptive does before others get a
	// turn. 0: DefaultBudget completions, DefaultSlice. A Poller has its own.
	Budget int
	Slice  time.Duration

	Poller *Poller // mode Poll; nil: DefaultPoller(Vector)
	// Linger is how long a Poller goes on polling an instance that has become empty, as long as that costs less than notifications.
	// 0: DefaultLinger; negative: not at all, as irq_poll.
	Linger time.Duration

	LockThread bool  // mode Thread: an OS thread of its own
	Nice       int   // mode Thread with LockThread: the thread's nice value
	CPUs       []int // mode Thread with LockThread: where it may run; nil: anywhere

	// Spin is how long a goroutine in Wait polls before it blocks. 0: DefaultDirectSpin, in mode Adaptive only
	// while that costs less than a notification. Negative: not at all.
	Spin time.Duration
	// Hybrid makes Wait sleep half the mean latency before it polls (block layer hybrid polling, 2016), when
	// that is long enough to sleep at all and nobody else is waiting. An answer that comes earlier than half the mean is seen
	// when the sleep ends: the one place where a completion waits for a timer, hence not the default.
	Hybrid bool

	// IdleGuard is how long what the peer sends on its own may lie in the queue of an instance that a waiter has left unarmed
	// (modes Direct and Adaptive). No command depends on it. 0: DefaultIdleGuard; negative: for ever.
	IdleGuard time.Duration

	// Failed is called once, when the channel or the queue stops working (verbs.ErrDeviceGone).
	// The instance cannot be notified any more; what the queue still holds has been reaped. It may call Err, and must not
	// call methods that wait for the owner.
	Failed func(error)
}

// Instance is one completion queue with its owner-to-be. Methods are safe for concurrent use.
type Instance struct {
	// Shared by all who schedule.
	state      state
	armed      atomic.Bool  // a notification is due; may stay set until the notification has been taken
	parked     atomic.Int32 // goroutines blocked in Wait
	waited     atomic.Bool  // some goroutine has been in Wait
	unattended atomic.Int64 // requests whose completion nobody waits for
	mode       atomic.Uint32
	handedOver atomic.Bool   // ownership is on its way to the notification goroutine
	woken      atomic.Bool   // a notification was taken, and nobody has asked since
	guarded    atomic.Bool   // the idle guard's timer runs
	guardSaw   atomic.Uint64 // leads when it was last looked at
	latency    atomic.Int64  // mean time in Wait where waiters poll, ns
	crowd      crowd

	// The owner's.
	cq       verbs.CompletionQueue
	mover    verbs.Mover  // cq, if it tells
	driver   verbs.Driver // cq, if it wants to know
	handler  Handler
	wcs      []verbs.WorkCompletion
	weight   int
	batch    int       // most completions of the next batch
	first    bool      // the next completion is the first behind a notification
	found    int       // completions since the queue was last seen empty
	next     *Instance // in a Poller's list or mailbox
	pace     pace
	adaptive adaptive
	count    counters

	followers followers

	// Below: cold.
	cfg      Config
	channel  verbs.CompletionChannel
	poller   atomic.Pointer[Poller]
	token    chan struct{} // mode Thread: ownership for the reaping goroutine
	reaperOK chan struct{} // closed when the reaping goroutine has ended
	disabled chan struct{} // ownership for the disabler
	kick     chan struct{} // wakes the notification goroutine once its channel is dead
	stopping atomic.Bool
	notifier chan struct{} // closed when the notification goroutine has ended
	guard    *time.Timer
	alarm    *Alarm // Config.Hybrid: ends a waiter's nap

	mu      sync.Mutex // guards what follows; held while a disabler waits
	depth   int        // nested disables; New counts as one until Start
	started bool
	closed  bool

	failOnce sync.Once
	err      atomic.Pointer[error]
}

// New creates a notification channel and a completion queue of at least capacity entries on ctx. Nothing is
// delivered before Start. The caller closes the instance, after it has destroyed the queue pairs that use the queue.
func New(ctx verbs.Context, capacity int, cfg Config, h Handler) (*Instance, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	if h == nil {
		return nil, errors.New("completion: no handler")
	}
	var alarm *Alarm
	if cfg.Hybrid {
		var err error
		if alarm, err = NewAlarm(); err != nil {
			return nil, err
		}
	}
	ch, err := ctx.CreateCompletionChannel()
	if err != nil {
		alarm.Close()
		return nil, fmt.Errorf("completion: create channel: %w", err)
	}
	cq, err := ctx.CreateCQ(verbs.CQInit{Capacity: capacity, Channel: ch, Vector: cfg.Vector})
	if err != nil {
		ch.Close()
		alarm.Close()
		return nil, fmt.Errorf("completion: create queue of %d entries: %w", capacity, err)
	}
	i := newInstance(cq, ch, cfg, h)
	i.alarm = alarm
	return i, nil
}

func newInstance(cq verbs.CompletionQueue, ch verbs.CompletionChannel, cfg Config, h Handler) *Instance {
	i := &Instance{
		cq: cq, channel: ch, cfg: cfg, handler: h,
		weight:   cfg.Weight,
		batch:    cfg.Batch,
		wcs:      make([]verbs.WorkCompletion, min(cfg.Weight, maxBatch)),
		disabled: make(chan struct{}, 1),
		kick:     make(chan struct{}, 1),
		notifier: make(chan struct{}),
		depth:    1,
	}
	i.mover, _ = cq.(verbs.Mover)
	i.driver, _ = cq.(verbs.Driver)
	i.guard = time.AfterFunc(time.Hour, i.guardExpired)
	i.guard.Stop()
	i.state.word.Store(owned) // by the disabler that Start will be
	i.enter(cfg.Mode)
	return i
}

func (c *Config) fill() error {
	if c.Mode >= modes {
		return fmt.Errorf("completion: %v is no mode", c.Mode)
	}
	if c.Weight < 0 || c.Batch < 0 || c.Budget < 0 || c.Slice < 0 {
		return fmt.Errorf("completion: weight %d, batch %d, budget %d and slice %v must not be negative", c.Weight, c.Batch, c.Budget, c.Slice)
	}
	if c.Weight == 0 {
		c.Weight = DefaultWeight
	}
	if c.Batch == 0 {
		c.Batch = DefaultBatch
		if runtime.NumCPU() == 1 {
			c.Batch = maxBatch
		}
	}
	c.Batch = min(c.Batch, maxBatch)
	if c.Budget == 0 {
		c.Budget = DefaultBudget
	}
	if c.Slice == 0 {
		c.Slice = DefaultSlice
	}
	if c.IdleGuard == 0 {
		c.IdleGuard = DefaultIdleGuard
	}
	if c.Linger == 0 {
		c.Linger = DefaultLinger
	}
	if !c.LockThread && (c.Nice != 0 || len(c.CPUs) > 0) {
		return errors.New("completion: a nice value or CPUs need LockThread")
	}
	return nil
}

// CQ is the instance's completion queue, for queue pairs to be created on. Nobody but the instance polls or arms it.
func (i *Instance) CQ() verbs.CompletionQueue { return i.cq }

// Mode is the mode in force.
func (i *Instance) Mode() Mode { return Mode(i.mode.Load()) }

// Stats are the counters so far.
func (i *Instance) Stats() Stats { return i.count.snapshot() }

// Woken reports whether a notification has been taken since it was last asked. This end had nothing to do before, so that the peer, who has had no request from
// it, may sleep: who is about to submit several may send the first at once.
func (i *Instance) Woken() bool { return i.woken.Load() && i.woken.Swap(false) }

// Err is why the instance stopped being notified, nil while it works.
func (i *Instance) Err() error {
	if p := i.err.Load(); p != nil {
		return *p
	}
	return nil
}

// Start begins delivery: what the queue holds is reaped, then it is armed.
func (i *Instance) Start() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.started || i.closed || i.stopping.Load() {
		return errors.New("completion: started twice or after Close")
	}
	if err := i.startExecutor(i.Mode()); err != nil {
		return err
	}
	i.started = true
	go i.notifications()
	i.enableLocked()
	return nil
}

// Disable returns when nobody owns the instance; until Enable no completion is delivered. It wins
// against an owner that has more work than its weight. Calls nest.
func (i *Instance) Disable() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.disableLocked()
}

// Enable undoes one Disable. What came in between is reaped. Enable without Disable panics.
func (i *Instance) Enable() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.depth == 0 || !i.started {
		panic("completion: Enable of an instance that is not disabled")
	}
	i.enableLocked()
}

func (i *Instance) disableLocked() {
	if i.depth == 0 && !i.state.requestDisable() {
		<-i.disabled
	}
	i.depth++
}

// enableLocked passes the disabler's ownership on to the mode's executor, which reaps and arms: whoever was refused
// meanwhile is served.
func (i *Instance) enableLocked() {
	i.depth--
	if i.depth == 0 {
		i.dispatch()
	}
}

// SetMode changes the mode. No completion is lost, delivered twice or left waiting.
func (i *Instance) SetMode(m Mode) error {
	if m >= modes {
		return fmt.Errorf("completion: %v is no mode", m)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed {
		return verbs.ErrClosed
	}
	if m == i.Mode() {
		return nil
	}
	if !i.started {
		i.enter(m)
		return nil
	}
	i.disableLocked()
	defer i.enableLocked()
	old := i.Mode()
	i.stopExecutor(old)
	if err := i.startExecutor(m); err != nil {
		if back := i.startExecutor(old); back != nil {
			i.enter(Interrupt) // needs no executor of its own
		}
		return err
	}
	i.enter(m)
	return nil
}

// enter is for who owns the instance.
func (i *Instance) enter(m Mode) {
	i.mode.Store(uint32(m))
	i.pace.gauge = &i.pace.gauges[m]
	i.pace.gauge.restart()
}

// startExecutor and stopExecutor are called by the disabler, so nobody dispatches meanwhile.
func (i *Instance) startExecutor(m Mode) error {
	switch m {
	case Thread:
		return i.startReaper()
	case Poll:
		p := i.cfg.Poller
		if p == nil {
			p = DefaultPoller(i.cfg.Vector)
		}
		return p.adopt(i)
	}
	return nil
}

func (i *Instance) stopExecutor(m Mode) {
	switch m {
	case Thread:
		close(i.token)
		<-i.reaperOK
	case Poll:
		i.poller.Load().unbind(i)
	}
}

// dispatchTo sends an owned instance to its mode's executor. What its sender does next: serve it in place, if
// that may be done here, push it into the poller's mailbox, or nothing.
func (i *Instance) dispatchTo(t *turn) {
	t.phase = gone
	switch i.Mode() {
	case Thread:
		i.token <- struct{}{} // never blocks: there is one ownership
		return
	case Poll:
		// The notification goroutine serves the first turn in place, as a softirq runs at the interrupt's exit; only what
		// is more than that is the poller's, as it is ksoftirqd's there.
		if p := i.poller.Load(); p.polling() && !t.here {
			t.phase, t.poller = pushing, p
			return
		}
	}
	if t.here {
		t.phase = reaping
		return
	}
	i.handedOver.Store(true)
	i.wakeNotifier()
}

// dispatch is dispatchTo by somebody who does not serve.
func (i *Instance) dispatch() { i.run(&turn{phase: dispatching}) }

// Close ends delivery and destroys the queue and its channel. The queue pairs on
// the queue must have been destroyed and nobody may be in Wait. If the queue cannot be
// destroyed (EBUSY: a queue pair still uses it), Close may be called again.
func (i *Instance) Close() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed {
		return nil
	}
	if i.started {
		i.disableLocked()
		i.stopExecutor(i.Mode())
		i.started = false
		i.stopping.Store(true)
		i.wakeNotifier()
		<-i.notifier
		i.guard.Stop()
	}
	if err := i.cq.Destroy(); err != nil {
		return fmt.Errorf("completion: destroy queue: %w", err)
	}
	i.closed = true
	i.alarm.Close()
	i.alarm = nil
	if err := i.channel.Close(); err != nil {
		return fmt.Errorf("completion: close channel: %w", err)
	}
	return nil
}

func (i *Instance) fail(err error) {
	i.failOnce.Do(func() {
		i.err.Store(&err)
		if i.cfg.Failed != nil {
			i.cfg.Failed(err)
		}
	})
}
