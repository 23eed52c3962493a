package completion

// The budgeted poller, after lib/irq_poll.c. An instance on its list is owned by it. One turn:
//
// The first turn after a notification is run by the notification goroutine (serveFirst). Then
//
//	collect the mailbox -> head of the list: at most weight completions
//	   work < weight   arm, release; or linger at the tail while completions are frequent
//	   work >= weight  to the tail; a disabler wins
//	until the total budget or the slice is used up or a round found nothing; then others run, then the next turn.
//
// The mailbox is the only part that several goroutines touch; it is a lock-free stack, emptied at once.

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// PollerConfig describes a Poller.
type PollerConfig struct {
	Budget int           // completions per turn, over all instances; 0: DefaultBudget
	Slice  time.Duration // length of a turn; 0: DefaultSlice
	// LockThread gives the poller an OS thread of its own; CPUs and Nice need it. Unlocked is the default because handing
	// work to a locked thread costs several thread switches in Go.
	LockThread bool
	CPUs       []int // where the thread may run, best the CPUs near the device; nil: anywhere
	Nice       int
}

// PollerStats are a Poller's counters.
type PollerStats struct {
	Turns           uint64 `json:"turns"`
	BudgetExhausted uint64 `json:"budget_exhausted"` // turns ended by the budget
	TimeExhausted   uint64 `json:"time_exhausted"`   // turns ended by the slice
	Parks           uint64 `json:"parks"`            // times there was nothing to do
}

// Poller serves the instances that are bound to it. It has a goroutine while any are.
type Poller struct {
	mailbox atomic.Pointer[Instance]
	asleep  atomic.Bool
	wake    chan struct{} // one token
	off     atomic.Bool
	closed  atomic.Bool

	// The poller goroutine's.
	head, last *Instance
	length     int
	cfg        PollerConfig

	turns, budgetExhausted, timeExhausted, parks atomic.Uint64

	mu    sync.Mutex // guards what follows
	bound map[*Instance]struct{}
	ended chan struct{} // closed when the goroutine has ended; nil: there is none
	stop  atomic.Bool
	heir  *Poller // after Close; set before closed
}

// NewPoller makes a poller that runs while instances are bound to it.
func NewPoller(cfg PollerConfig) (*Poller, error) {
	if cfg.Budget < 0 || cfg.Slice < 0 {
		return nil, fmt.Errorf("completion: poll budget %d and slice %v must not be negative", cfg.Budget, cfg.Slice)
	}
	if !cfg.LockThread && (cfg.Nice != 0 || len(cfg.CPUs) > 0) {
		return nil, errors.New("completion: a nice value or CPUs need LockThread")
	}
	if cfg.Budget == 0 {
		cfg.Budget = DefaultBudget
	}
	if cfg.Slice == 0 {
		cfg.Slice = DefaultSlice
	}
	return &Poller{cfg: cfg, wake: make(chan struct{}, 1), bound: map[*Instance]struct{}{}}, nil
}

var defaults struct {
	mu      sync.Mutex
	pollers []*Poller
}

// DefaultPoller is the process's poller for a completion vector: one per CPU that Go uses, vectors dealt out in turn.
func DefaultPoller(vector int) *Poller {
	defaults.mu.Lock()
	defer defaults.mu.Unlock()
	if defaults.pollers == nil {
		for range runtime.GOMAXPROCS(0) {
			p, err := NewPoller(PollerConfig{})
			if err != nil {
				panic(err)
			}
			defaults.pollers = append(defaults.pollers, p)
		}
	}
	return defaults.pollers[max(vector, 0)%len(defaults.pollers)]
}

// Stats are the counters so far.
func (p *Poller) Stats() PollerStats {
	return PollerStats{p.turns.Load(), p.budgetExhausted.Load(), p.timeExhausted.Load(), p.parks.Load()}
}

// SetPolling turns the poller off and on (the sysctl kernel.blk_iopoll of 2009). While it
// is off, instances in mode Poll are served where their notification arrives; those on the list are
// finished first. No completion is lost.
func (p *Poller) SetPolling(on bool) { p.off.Store(!on) }

func (p *Poller) polling() bool { return !p.off.Load() }

// closing serializes Close, which holds the locks of two pollers.
var closing sync.Mutex

// Close ends the poller. Its instances move to heir, with what they have pending; with a nil heir they
// change to mode Interrupt.
func (p *Poller) Close(heir *Poller) error {
	closing.Lock()
	defer closing.Unlock()
	if heir == p || heir != nil && heir.closed.Load() {
		return errors.New("completion: a closed poller cannot take over instances")
	}
	if heir == nil {
		p.mu.Lock()
		var all []*Instance
		for i := range p.bound {
			all = append(all, i)
		}
		p.mu.Unlock()
		for _, i := range all {
			if err := i.leavePoller(p); err != nil {
				return err
			}
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed.Load() {
		return nil
	}
	if heir == nil && len(p.bound) > 0 {
		return errors.New("completion: instances were bound to the poller while it closed")
	}
	p.heir = heir
	for i := range p.bound {
		if err := heir.adopt(i); err != nil {
			return err
		}
	}
	clear(p.bound)
	p.closed.Store(true)
	p.endLocked()
	return nil
}

// leavePoller moves i to mode Interrupt if p still serves it.
func (i *Instance) leavePoller(p *Poller) error {
	i.mu.Lock()
	mine := !i.closed && i.Mode() == Poll && i.poller.Load() == p
	i.mu.Unlock()
	if !mine {
		return nil
	}
	return i.SetMode(Interrupt)
}

// adopt makes p the poller of i. It is called by the instance's disabler, or by a poller that closes.
func (p *Poller) adopt(i *Instance) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed.Load() {
		if p.heir != nil {
			return p.heir.adopt(i)
		}
		return errors.New("completion: the poller is closed")
	}
	if p.ended == nil {
		ended, placed := make(chan struct{}), make(chan error, 1)
		p.stop.Store(false)
		go p.loop(ended, placed)
		if err := <-placed; err != nil {
			return err
		}
		p.ended = ended
	}
	p.bound[i] = struct{}{}
	i.poller.Store(p)
	return nil
}

// unbind is called by the instance's disabler: the instance is on no list.
func (p *Poller) unbind(i *Instance) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.bound[i]; !ok {
		if p.heir != nil {
			p.heir.unbind(i)
		}
		return
	}
	delete(p.bound, i)
	if len(p.bound) == 0 {
		p.endLocked()
	}
}

func (p *Poller) endLocked() {
	if p.ended == nil {
		return
	}
	p.stop.Store(true)
	p.ring()
	<-p.ended
	p.ended = nil
}

func (p *Poller) ring() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// push puts an owned instance into the mailbox. Any goroutine may call it, and calls nudge next.
func (p *Poller) push(i *Instance) {
	for {
		old := p.mailbox.Load()
		i.next = old
		if p.mailbox.CompareAndSwap(old, i) {
			return
		}
	}
}

// nudge sees to it that somebody looks into the mailbox. The mailbox is filled before the flags are read, and
// the poller sets its flags before it looks into the mailbox: one of the two sees the other.
func (p *Poller) nudge() {
	switch {
	case p.closed.Load():
		p.bequeath()
	case p.asleep.Load():
		p.ring()
	}
}

// add is push and nudge.
func (p *Poller) add(i *Instance) {
	p.push(i)
	p.nudge()
}

// bequeath moves what is in a closed poller's mailbox to its heir.
func (p *Poller) bequeath() {
	for i := p.mailbox.Swap(nil); i != nil; {
		next := i.next
		p.heir.add(i)
		i = next
	}
}

// collect moves the mailbox to the list's tail, oldest first.
func (p *Poller) collect() {
	if p.mailbox.Load() == nil {
		return
	}
	var oldest *Instance
	for i := p.mailbox.Swap(nil); i != nil; {
		i.next, oldest, i = oldest, i, i.next
	}
	for oldest != nil {
		i := oldest
		oldest = i.next
		p.append(i)
	}
}

func (p *Poller) append(i *Instance) {
	i.next = nil
	if p.head == nil {
		p.head = i
	} else {
		p.last.next = i
	}
	p.last = i
	p.length++
}

func (p *Poller) pop() *Instance {
	i := p.head
	p.head, i.next = i.next, nil
	p.length--
	return i
}

func (p *Poller) loop(ended chan<- struct{}, placed chan<- error) {
	defer close(ended)
	if p.cfg.LockThread {
		if err := lockThread(p.cfg.CPUs, p.cfg.Nice); err != nil {
			placed <- err
			return
		}
	}
	placed <- nil
	for !p.stop.Load() {
		p.collect()
		if p.head == nil {
			p.park()
			continue
		}
		p.turn()
		if p.head != nil {
			giveWay()
		}
	}
	// Only Close stops a poller that still has instances.
	for p.head != nil {
		p.heir.add(p.pop())
	}
	if p.heir != nil {
		p.bequeath()
	}
}

// park blocks until the mailbox has something.
func (p *Poller) park() {
	p.asleep.Store(true)
	if p.mailbox.Load() == nil && !p.stop.Load() {
		p.parks.Add(1)
		<-p.wake
	}
	p.asleep.Store(false)
}

// turn serves the list once, within the budget and the slice.
func (p *Poller) turn() {
	p.turns.Add(1)
	budget, began := p.cfg.Budget, now()
	for at, barren := began, 0; p.head != nil && barren < p.length; p.collect() {
		i := p.pop()
		var work int
		work, at = p.serve(i)
		budget -= work
		if work > 0 {
			barren = 0
		} else {
			barren++
		}
		if p.head == nil {
			return
		}
		if budget <= 0 {
			p.budgetExhausted.Add(1)
			i.count.budgetExhausted.Add(1)
			return
		}
		if at-began >= int64(p.cfg.Slice) {
			p.timeExhausted.Add(1)
			i.count.timeExhausted.Add(1)
			return
		}
	}
}

// serve gives one instance its turn and puts it where it belongs. The instance may belong to somebody else
// when serve returns.
func (p *Poller) serve(i *Instance) (work int, at int64) {
	if !i.pace.begun() { // a notification brought more than the weight: no matter how long polling was to rest
		i.pace.begin(now(), i.waited.Load())
	}
	t := turn{weight: i.weight}
	verdict := i.run(&t)
	at = now()
	if t.work > 0 && verdict != gone { // a disabler may have taken the instance when its weight was used up
		i.pace.found(at)
	}
	if verdict == idle {
		t.phase = arming
		if linger := int64(i.cfg.Linger); linger > 0 && !i.crowded() && i.pays(t.work, at, linger) {
			i.promise()
			t.phase = spent
		}
		verdict = i.run(&t)
	}
	if verdict == tail {
		p.append(i)
	}
	return t.work, at
}

// looksInPlace is how often the notification goroutine looks again itself when its arm has missed something: an entry or two are not worth waking the poller.
const looksInPlace = 8

// serveFirst is what follows a notification, in the notification goroutine. The instance goes to the poller when it has more work than its
// weight, or still finds some after others had their turn; else it is armed again, and no poller has been woken for it.
func (i *Instance) serveFirst(p *Poller) {
	for looks := 0; ; looks++ {
		t := turn{weight: i.weight, here: true}
		verdict := i.run(&t)
		if t.work == 0 && looks == 0 {
			i.count.barren.Add(1)
		}
		lingering := verdict == idle && i.cfg.Linger > 0 && !i.crowded() && i.tries()
		if lingering {
			i.pace.begin(now(), i.waited.Load())
		}
		for lingering {
			i.promise()
			t.phase = spent
			if verdict = i.run(&t); verdict == gone {
				return
			}
			giveWay()
			t = turn{weight: i.weight, here: true}
			verdict = i.run(&t)
			switch {
			case verdict != idle: // the weight was used up, or it is another's now
				lingering = false
			case t.work > 0:
				i.pace.found(now())
				t.phase = spent
				verdict = i.run(&t)
				lingering = false
			default:
				lingering = i.pays(0, now(), int64(i.cfg.Linger))
			}
		}
		if verdict == idle {
			t.phase = arming
			if verdict = i.run(&t); verdict == tail && looks < looksInPlace {
				continue
			}
		}
		if verdict == tail {
			t.phase, t.poller = pushing, p
			i.run(&t)
		}
		return
	}
}
