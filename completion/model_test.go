package completion

// The interleaving proof: an explicit-state model checker over the real state machine.
//
// A world is everything that goroutines share, as one comparable value: the ownership word, the flags, the
// tokens in flight, the completion queue, the pollers' mailboxes and lists, the waiters; and where every
// goroutine stands. A move loads the world into a real Instance, real Pollers and real Waiters, runs one real step
// of one goroutine (Instance.step, state.schedule, Poller.push ...) and saves what has become of it. All worlds
// that any order of moves can reach are visited. In each:
//
//   - one owner: the number of goroutines, tokens and lists that hold the instance is exactly the owned bit;
//   - disable wins: after a disabler has asked, at most one more turn begins;
//   - a promise to poll on is kept: while there is one, somebody who polls owns the instance, or is about to get it;
//   - no lost wake-up: without any further event from outside (no completion, no command, no change of mode) a
//     world can be reached where all that has completed so far is reaped, and all whose command is among it have
//     returned; where that is not so, a command waits for other traffic, or for ever.
//
// The idle guard's timer does not exist in the model: nothing may need it. What a policy decides by the clock (linger or
// arm, spin or block) is a choice here, and both are explored.
//
// Rules are removed one by one, as variations of a step; each must be noticed.

import (
	"fmt"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"srp-initiator/rdma/verbs"
)

// The goroutines of the model.
const (
	producer = iota // the device
	notifierProc
	reaperProc
	poller0, poller1 = iota, iota + 1
	disablerProc     = iota + 1
	waiter0, waiter1 = iota + 1, iota + 2
	asyncProc        = iota + 2 // posts commands that nobody waits for
	switchProc       = iota + 2 // Poller.SetPolling
	closerProc       = iota + 2 // Poller.Close
	procs            = iota + 2
)

// proc is where one goroutine stands: pc in its own program, the rest in a turn.
type proc struct {
	pc     uint8
	phase  phase
	here   bool
	poller int8
	work   int8
	first  bool // serving the first turn in mode poll
	at     int8 // for this poller
	flag   bool
	round  uint8
}

const (
	commands  = 4 // 0 and 1: the waiters'; 2 and 3: asyncProc's
	phaseLate = phase(100)
)

type world struct {
	word                           uint32
	armed, handed, token, disabled bool
	parked, unattended             int8
	mode                           Mode
	queue                          [commands]int8
	queued                         int8
	cqArmed, event, promised       bool
	posted, produced, reaped       uint8 // sets of commands
	wstate                         [2]uint8
	wtoken, granted, spins         [2]bool
	first, second                  int8 // the followers' list, -1: nobody
	mailbox, list, asleep, wake    [2]bool
	closed, stopped                [2]bool
	bound                          int8
	off                            bool
	turnsAfterDisable              int8
	p                              [procs]proc
	violated                       uint8
}

// violations.
const (
	vTwice = 1 + iota
	vOwners
	vDisable
	vBeside
	vPanic
	vPromise
)

var violationText = [...]string{"", "a completion was delivered twice", "not exactly one owner", "the disabler was starved", "the queue was armed beside its owner", "the state machine panicked",
	"nobody polls who has promised to"}

// scenario says who takes part.
type scenario struct {
	mode    Mode
	waiters int
	async   int
	modes   []Mode // what the disabler does, one round each: Disable, change to the mode, Enable
	weight  int
	polling bool // SetPolling(false), SetPolling(true)
	closing bool // Close of the first poller, the second inherits
}

func (s scenario) String() string {
	return fmt.Sprintf("%v,waiters=%d,async=%d,disable=%v,weight=%d,switch=%v,close=%v", s.mode, s.waiters, s.async, s.modes, s.weight, s.polling, s.closing)
}

// variation replaces steps by wrong ones; nil fields are right.
type variation struct {
	name      string
	step      func(m *model, i *Instance, t *turn) bool // true: done here
	noRing    bool                                      // a follower takes the role without asking twice
	noEnable  bool                                      // Enable only clears the owned bit
	noWait    bool                                      // the disabler does not wait for the owner
	noRecheck bool                                      // the poller sleeps without looking once more
	lateCount bool                                      // an unattended command is counted after the question
}

type model struct {
	t    testing.TB
	s    scenario
	v    *variation
	i    *Instance
	p    [2]*Poller
	w    [2]*Waiter
	cq   modelCQ
	wrld *world // loaded
}

// modelCQ is the completion queue of the loaded world.
type modelCQ struct {
	verbs.CompletionQueue
	m *model
}

func (q *modelCQ) Poll(wcs []verbs.WorkCompletion) int {
	w := q.m.wrld
	n := min(int(w.queued), len(wcs))
	for k := range n {
		wcs[k] = verbs.WorkCompletion{WRID: uint64(w.queue[k])}
	}
	copy(w.queue[:], w.queue[n:])
	w.queued -= int8(n)
	for k := w.queued; k < commands; k++ {
		w.queue[k] = 0
	}
	return n
}

// PollsOn and Rests make it a verbs.Driver.
func (q *modelCQ) PollsOn() { q.m.wrld.promised = true }
func (q *modelCQ) Rests()   { q.m.wrld.promised = false }

func (q *modelCQ) Arm(bool) (bool, error) {
	q.m.wrld.cqArmed, q.m.wrld.promised = true, false
	return q.m.wrld.queued > 0, nil
}

// modelChannel only has to be woken: handedOver is what the notification goroutine looks at.
type modelChannel struct{ verbs.CompletionChannel }

func (modelChannel) Wake() {}

func newModel(t testing.TB, s scenario, v *variation) *model {
	if v == nil {
		v = &variation{}
	}
	m := &model{t: t, s: s, v: v}
	m.cq.m = m
	cfg := Config{Mode: s.mode, Weight: s.weight}
	if err := cfg.fill(); err != nil {
		t.Fatal(err)
	}
	m.i = newInstance(&m.cq, modelChannel{}, cfg, m.handle)
	m.i.guarded.Store(true) // no idle guard
	m.i.token = make(chan struct{}, 1)
	for k := range m.p {
		p, err := NewPoller(PollerConfig{})
		if err != nil {
			t.Fatal(err)
		}
		m.p[k] = p
		m.w[k] = &Waiter{wake: make(chan struct{}, 1)}
	}
	m.p[0].heir = m.p[1]
	return m
}

func (m *model) handle(wcs []verbs.WorkCompletion) {
	w := m.wrld
	for _, wc := range wcs {
		bit := uint8(1) << wc.WRID
		if w.reaped&bit != 0 {
			w.violated = vTwice
		}
		w.reaped |= bit
		if wc.WRID < 2 {
			m.w[wc.WRID].Signal()
		} else {
			m.i.unattended.Add(-1)
		}
	}
}

func setToken(c chan struct{}, full bool) {
	select {
	case <-c:
	default:
	}
	if full {
		c <- struct{}{}
	}
}

func (m *model) load(w *world) {
	m.wrld = w
	i := m.i
	i.state.word.Store(w.word)
	i.armed.Store(w.armed)
	i.handedOver.Store(w.handed)
	i.parked.Store(int32(w.parked))
	i.unattended.Store(int64(w.unattended))
	i.mode.Store(uint32(w.mode))
	i.poller.Store(m.p[w.bound])
	setToken(i.token, w.token)
	setToken(i.disabled, w.disabled)
	setToken(i.kick, false)
	for k, wt := range m.w {
		wt.state.Store(uint32(w.wstate[k]))
		setToken(wt.wake, w.wtoken[k])
		wt.granted = w.granted[k]
		wt.spinUntil = 0
		if w.spins[k] {
			wt.spinUntil = math.MaxInt64
		}
		wt.prev, wt.next, wt.listed = nil, nil, false
	}
	i.followers.head = nil
	if w.second >= 0 {
		i.followers.push(m.w[w.second])
	}
	if w.first >= 0 {
		i.followers.push(m.w[w.first])
	}
	i.next = nil
	for k, p := range m.p {
		p.mailbox.Store(nil)
		p.head, p.last, p.length = nil, nil, 0
		if w.mailbox[k] {
			p.mailbox.Store(i)
		}
		if w.list[k] {
			p.append(i)
		}
		p.asleep.Store(w.asleep[k])
		p.closed.Store(w.closed[k])
		p.stop.Store(w.stopped[k])
		p.off.Store(w.off)
		setToken(p.wake, w.wake[k])
	}
}

func (m *model) save(w *world) {
	i := m.i
	w.word = i.state.word.Load()
	w.armed = i.armed.Load()
	w.handed = i.handedOver.Load()
	w.parked = int8(i.parked.Load())
	w.unattended = int8(i.unattended.Load())
	w.mode = i.Mode()
	w.token = len(i.token) > 0
	w.disabled = len(i.disabled) > 0
	w.bound = 0
	if i.poller.Load() == m.p[1] {
		w.bound = 1
	}
	w.first, w.second = -1, -1
	for k, wt := range m.w {
		w.wstate[k] = uint8(wt.state.Load())
		w.wtoken[k] = len(wt.wake) > 0
		w.granted[k] = wt.granted
		if wt.listed {
			if i.followers.head == wt {
				w.first = int8(k)
			} else {
				w.second = int8(k)
			}
		}
	}
	for k, p := range m.p {
		w.mailbox[k] = p.mailbox.Load() != nil
		w.list[k] = p.head != nil
		w.asleep[k] = p.asleep.Load()
		w.closed[k] = p.closed.Load()
		w.stopped[k] = p.stop.Load()
		w.wake[k] = len(p.wake) > 0
	}
}

func (m *model) start() world {
	w := world{word: owned, mode: m.s.mode, first: -1, second: -1}
	w.p[disablerProc] = proc{pc: 3, phase: dispatching} // Start
	return w
}

// step is one real step of a turn, or its variation.
func (m *model) step(p *proc) {
	t := turn{phase: p.phase, here: p.here, work: int(p.work), weight: m.s.weight, poller: m.p[p.poller]}
	if t.phase == reaping && t.work == 0 && m.i.state.word.Load()&disabling != 0 {
		if m.wrld.turnsAfterDisable++; m.wrld.turnsAfterDisable > 1 {
			m.wrld.violated = vDisable
		}
	}
	if m.v.step == nil || !m.v.step(m, m.i, &t) {
		m.i.step(&t)
	}
	dispatched := p.phase == dispatching && t.phase == reaping
	p.phase, p.work, p.poller = t.phase, int8(t.work), 0
	if dispatched && m.i.Mode() == Poll && !m.p[0].off.Load() {
		p.first, p.at = true, m.wrld.bound
	}
	if t.poller == m.p[1] {
		p.poller = 1
	}
	if p.phase != nudging && p.phase != pushing {
		p.poller = 0
	}
}

func running(p *proc) bool { return p.phase < idle || p.phase >= phaseLate }

// holds reports whether a goroutine with this turn owns the instance.
func holds(ph phase) bool {
	switch ph {
	case reaping, spent, arming, releasing, leaving, passing, dispatching, pushing, idle, tail, phaseLate:
		return true
	}
	return false
}

// lingering: may an executor decide not to arm?
func (m *model) lingers(who int, mode Mode) bool {
	return who == poller0 || who == poller1 || who == notifierProc && mode == Adaptive
}

// serve is an executor's move within a turn. choices: 1 or 2.
func (m *model) serveChoices(w *world, who int) int {
	if w.p[who].phase == idle && (m.lingers(who, w.mode) || w.p[who].first) || w.p[who].phase == tail && w.p[who].first {
		return 2
	}
	return 1
}

func (m *model) serve(p *proc, choice int) {
	switch p.phase {
	case idle:
		p.phase = arming
		if choice == 1 {
			m.i.promise()
			p.phase = spent
		} else if m.i.Mode().polledByWaiters() {
			p.phase = leaving // Instance.rest
		}
	case tail:
		p.phase, p.work = reaping, 0
		if p.first && choice == 0 { // serveFirst: to the poller, or look again
			p.phase, p.first, p.poller = pushing, false, p.at
		}
	}
	m.step(p)
	if p.phase == gone {
		*p = proc{phase: gone, round: p.round}
	}
}

// moves: how many ways process who can go on in w; external: the first is an event from outside.
func (m *model) moves(w *world, who int) (n int, external bool) {
	p := &w.p[who]
	switch who {
	case producer:
		for c := range uint8(commands) {
			if w.posted&^w.produced&(1<<c) != 0 {
				n++
			}
		}
		return n, true
	case notifierProc:
		switch {
		case p.pc == 0 && (w.event || w.handed):
			return 1, false
		case p.pc != 0:
			return m.serveChoices(w, who), false
		}
	case reaperProc:
		switch {
		case p.pc == 0 && w.token:
			return 1, false
		case p.pc != 0:
			return m.serveChoices(w, who), false
		}
	case poller0, poller1:
		k := who - poller0
		if k == 1 && !m.s.closing || m.s.mode != Poll && !has(m.s.modes, Poll) {
			return 0, false
		}
		switch p.pc {
		case 2:
			return m.serveChoices(w, who), false
		case 7:
			if !w.wake[k] {
				return 0, false
			}
		case 13:
			return 0, false
		}
		return 1, false
	case disablerProc:
		switch p.pc {
		case 0:
			if int(p.round) < len(m.s.modes) {
				return 1, true
			}
			return 0, false
		case 1:
			if !w.disabled && !m.v.noWait {
				return 0, false
			}
		}
		return 1, false
	case waiter0, waiter1:
		k := who - waiter0
		if k >= m.s.waiters || p.pc == 99 {
			return 0, false
		}
		switch p.pc {
		case 0:
			return 2, true
		case 6:
			return 3, false
		case 8:
			return 2, false
		case 14, 25:
			if !w.wtoken[k] {
				return 0, false
			}
		}
		return 1, false
	case asyncProc:
		switch p.pc {
		case 0:
			if int(p.round) < m.s.async {
				return 1, true
			}
			return 0, false
		}
		return 1, false
	case switchProc:
		if m.s.polling && p.pc < 2 {
			return 1, true
		}
	case closerProc:
		if m.s.closing && p.pc < 4 {
			if p.pc == 3 && w.p[poller0].pc != 13 {
				return 0, false
			}
			return 1, p.pc == 0
		}
	}
	return 0, false
}

func has(ms []Mode, m Mode) bool {
	for _, x := range ms {
		if x == m {
			return true
		}
	}
	return false
}

// move makes process who's move number choice. w is a copy.
func (m *model) move(w *world, who, choice int) {
	defer func() {
		if e := recover(); e != nil {
			w.violated = vPanic
		}
	}()
	m.load(w)
	i, p := m.i, &w.p[who]
	switch who {
	case producer:
		for c := range uint8(commands) {
			if w.posted&^w.produced&(1<<c) == 0 {
				continue
			}
			if choice > 0 {
				choice--
				continue
			}
			w.produced |= 1 << c
			w.queue[w.queued] = int8(c)
			w.queued++
			if w.cqArmed {
				w.cqArmed, w.event = false, true
			}
			break
		}
	case notifierProc:
		switch {
		case p.pc != 0:
			m.serve(p, choice)
		case w.event:
			w.event = false
			*p = proc{pc: 1, phase: noting, here: true}
		default:
			if i.handedOver.CompareAndSwap(true, false) {
				*p = proc{pc: 1, phase: reaping, here: true}
				p.first, p.at = i.Mode() == Poll && !w.off, w.bound
			}
		}
	case reaperProc:
		if p.pc == 0 {
			<-i.token
			*p = proc{pc: 1, phase: reaping, here: true}
		} else {
			m.serve(p, choice)
		}
	case poller0, poller1:
		m.movePoller(w, who-poller0, p, choice)
	case disablerProc:
		m.moveDisabler(w, p)
	case waiter0, waiter1:
		m.moveWaiter(w, who-waiter0, p, choice)
	case asyncProc:
		switch {
		case p.pc == 0: // Unattended(1)
			if !m.v.lateCount {
				i.unattended.Add(1)
			}
			p.pc, p.phase = 1, asking
		case running(p):
			m.step(p)
		default:
			if m.v.lateCount {
				i.unattended.Add(1)
			}
			w.posted |= 1 << (2 + p.round)
			*p = proc{round: p.round + 1}
		}
	case switchProc:
		w.off = p.pc == 0
		p.pc++
	case closerProc:
		switch p.pc {
		case 0: // adopt
			if w.mode == Poll {
				i.poller.Store(m.p[1])
			}
		case 1:
			m.p[0].closed.Store(true)
		case 2:
			m.p[0].stop.Store(true)
			m.p[0].ring()
		}
		p.pc++
	}
	m.save(w)
	m.check(w)
}

// movePoller follows Poller.loop, turn, serve and park.
func (m *model) movePoller(w *world, k int, p *proc, choice int) {
	pl := m.p[k]
	switch p.pc {
	case 0:
		p.pc = 1
		if pl.stop.Load() {
			p.pc = 10
		}
	case 1:
		pl.collect()
		p.pc = 5
		if pl.head != nil {
			pl.pop()
			*p = proc{pc: 2, phase: reaping}
		}
	case 2:
		m.serve(p, choice)
		switch p.phase {
		case tail:
			pl.append(m.i)
			*p = proc{}
		case gone:
			*p = proc{}
		}
	case 5:
		pl.asleep.Store(true)
		p.pc = 6
	case 6:
		p.pc = 8
		if m.v.noRecheck || pl.mailbox.Load() == nil && !pl.stop.Load() {
			p.pc = 7
		}
	case 7:
		<-pl.wake
		p.pc = 8
	case 8:
		pl.asleep.Store(false)
		p.pc = 0
	case 10:
		p.pc = 12
		if pl.head != nil {
			pl.heir.push(pl.pop())
			p.pc = 11
		}
	case 11:
		pl.heir.nudge()
		p.pc = 10
	case 12:
		pl.bequeath()
		p.pc = 13
	}
}

// moveDisabler follows SetMode: disableLocked, the change, enableLocked.
func (m *model) moveDisabler(w *world, p *proc) {
	switch p.pc {
	case 0:
		p.pc = 1
		w.turnsAfterDisable = 0
		if m.i.state.requestDisable() {
			p.pc = 2
		}
	case 1:
		if !m.v.noWait {
			<-m.i.disabled
		}
		p.pc = 2
		w.turnsAfterDisable = 0
	case 2:
		m.i.mode.Store(uint32(m.s.modes[p.round]))
		if m.s.modes[p.round] == Poll {
			m.i.poller.Store(m.p[0])
			if m.p[0].closed.Load() {
				m.i.poller.Store(m.p[1])
			}
		}
		*p = proc{pc: 3, phase: dispatching, round: p.round + 1}
		if m.v.noEnable {
			m.i.state.word.Store(0)
			*p = proc{round: p.round}
		}
	case 3:
		m.step(p)
		if p.phase == gone {
			*p = proc{round: p.round}
		}
	}
}

// moveWaiter follows Wait: waitPolling, lead, leave, follow, waitBlocked.
func (m *model) moveWaiter(w *world, k int, p *proc, choice int) {
	i, wt := m.i, m.w[k]
	switch p.pc {
	case 0:
		w.posted |= 1 << k
		w.spins[k] = choice == 0
		p.pc = 1
	case 1:
		p.pc = 2
		if wt.take() {
			p.pc = 99
		}
	case 2:
		p.pc = 20
		if i.Mode().polledByWaiters() {
			p.pc = 3
		}
	case 3: // waitPolling
		p.pc = 10
		if !w.spins[k] {
			p.pc = 20
		} else if i.state.tryOwn() {
			*p = proc{pc: 4, phase: reaping}
		}
	case 4: // lead: its own signal first
		p.pc, p.phase, p.work = 5, reaping, 0
		if wt.take() {
			*p = proc{pc: 7, phase: leaving, flag: true}
		}
	case 5:
		m.step(p)
		switch p.phase {
		case gone:
			*p = proc{pc: 3}
		case idle, tail:
			p.pc = 6
			if wt.take() {
				switch {
				case p.work > 0 && p.phase == idle:
					p.pc, p.phase = 19, spent
				case p.work > 0:
					*p = proc{pc: 18, phase: reaping}
				default:
					*p = proc{pc: 7, phase: leaving, flag: true}
				}
			} else if p.work > 0 {
				m.leadOn(p)
			}
		}
	case 19: // pollsOn
		m.step(p)
		if p.phase == gone {
			*p = proc{pc: 99}
		} else {
			*p = proc{pc: 18, phase: reaping}
		}
	case 18: // a last look
		m.step(p)
		switch p.phase {
		case gone:
			*p = proc{pc: 99}
		case idle, tail:
			*p = proc{pc: 7, phase: leaving, flag: true}
		}
	case 6: // found nothing: go on, or block; a deadline is like blocking that nobody ends
		switch choice {
		case 0:
			m.i.promise()
			m.leadOn(p)
		default:
			w.spins[k] = false
			i.parked.Add(1)
			*p = proc{pc: 7, phase: leaving}
		}
	case 7: // leave
		m.step(p)
		switch p.phase {
		case gone:
			m.left(p)
		case idle, tail:
			if p.flag2() {
				p.pc = 8
			} else {
				p.phase, p.work, p.round = reaping, 0, 1
			}
		}
	case 8: // once more, or leave the rest to the executor
		if choice == 0 {
			p.pc, p.phase, p.round = 7, leaving, 0
		} else {
			p.pc, p.phase = 9, spent
		}
	case 9:
		m.step(p)
		switch p.phase {
		case gone:
			m.left(p)
		case tail:
			p.phase = dispatching
		}
	case 10: // follow
		i.parked.Add(1)
		p.pc = 11
	case 11:
		i.followers.push(wt)
		p.pc = 12
	case 12:
		p.pc, p.flag = 13, false
		own := false
		if m.v.noRing {
			own = i.state.tryOwn()
		} else {
			own = i.state.schedule()
		}
		if own {
			*p = proc{pc: 16, flag: true, phase: reaping}
		} else {
			p.phase = gone
		}
	case 13:
		p.pc = 16
		if wt.state.CompareAndSwap(waiterIdle, waiterBlocked) {
			p.pc = 14
		}
	case 14:
		<-wt.wake
		p.pc = 15
	case 15:
		wt.state.CompareAndSwap(waiterBlocked, waiterIdle)
		p.pc = 16
	case 16:
		granted := i.followers.remove(wt)
		if granted && p.flag {
			panic("two owners")
		}
		p.flag = p.flag || granted
		p.phase = gone
		if p.flag {
			p.phase = reaping
		}
		p.pc = 17
	case 17:
		i.parked.Add(-1)
		switch {
		case p.flag:
			*p = proc{pc: 4, phase: reaping}
		case wt.take():
			*p = proc{pc: 99}
		default:
			*p = proc{pc: 3}
			w.spins[k] = false // nothing but time wakes it without a reason
		}
	case 20: // waitBlocked
		i.parked.Add(1)
		p.pc, p.phase = 21, asking
	case 21:
		m.step(p)
		if p.phase == gone {
			p.pc = 24
		}
	case 24:
		p.pc = 26
		if wt.state.CompareAndSwap(waiterIdle, waiterBlocked) {
			p.pc = 25
		}
	case 25:
		<-wt.wake
		p.pc = 26
		wt.state.CompareAndSwap(waiterBlocked, waiterIdle)
	case 26:
		if wt.take() {
			i.parked.Add(-1)
			*p = proc{pc: 99}
		} else {
			p.pc, p.phase = 21, asking
		}
	}
}

// flag2: leave has reaped once after somebody rang.
func (p *proc) flag2() bool { return p.round == 1 }

func (m *model) leadOn(p *proc) {
	p.pc = 4
	if p.phase == idle {
		p.pc, p.phase = 5, spent
		m.stepSpent(p)
	}
}

// stepSpent lets a leader that goes on serve a disabler; its verdict tail begins the next turn.
func (m *model) stepSpent(p *proc) {
	m.step(p)
	if p.phase == gone {
		*p = proc{pc: 3}
		return
	}
	p.pc = 4
}

func (m *model) left(p *proc) {
	if p.flag {
		*p = proc{pc: 99}
		return
	}
	m.i.parked.Add(-1)
	*p = proc{pc: 3}
}

// check holds the invariants.
func (m *model) check(w *world) {
	if w.violated != 0 {
		return
	}
	holders := 0
	count := func(b bool) {
		if b {
			holders++
		}
	}
	count(w.token)
	count(w.handed)
	count(w.disabled)
	for k := range 2 {
		count(w.mailbox[k])
		count(w.list[k])
		count(w.granted[k])
	}
	for who := range procs {
		p := &w.p[who]
		switch who {
		case notifierProc, reaperProc, asyncProc:
			count(p.pc != 0 && holds(p.phase))
		case poller0, poller1:
			count(p.pc == 2 && holds(p.phase))
		case disablerProc:
			count(p.pc == 2 || p.pc == 3 && holds(p.phase))
		case waiter0, waiter1:
			switch p.pc {
			case 4, 5, 6, 7, 8, 9, 16, 17, 18, 19, 21:
				count(holds(p.phase) && (p.pc != 16 && p.pc != 17 || p.flag))
			}
		}
	}
	want := 0
	if w.word&owned != 0 {
		want = 1
	}
	if holders != want {
		w.violated = vOwners
	}
	if d := &w.p[disablerProc]; w.promised && (want == 0 || w.disabled || d.pc == 2 || d.pc == 3 && holds(d.phase)) {
		w.violated = vPromise
	}
}

// settled: nothing that has happened so far waits for anything.
func (m *model) settled(w *world) bool {
	if w.reaped != w.produced {
		return false
	}
	for k := range m.s.waiters {
		if w.produced&(1<<k) != 0 && w.p[waiter0+k].pc != 99 {
			return false
		}
	}
	d, a, c := w.p[disablerProc].pc, w.p[asyncProc].pc, w.p[closerProc].pc
	return d == 0 && a == 0 && (c == 0 || c == 4)
}

// explore visits all worlds and returns their number and what is wrong, "" if nothing.
func (m *model) explore() (int, string) {
	first := m.start()
	ids := map[world]int32{first: 0}
	worlds := []world{first}
	parent := []int32{-1}
	by := []uint8{0}
	type edge struct{ from, to int32 }
	var internal []edge
	for at := 0; at < len(worlds); at++ {
		for who := range procs {
			n, external := m.moves(&worlds[at], who)
			for choice := range n {
				w := worlds[at]
				m.move(&w, who, choice)
				if w.violated != 0 {
					return len(worlds), violationText[w.violated] + m.path(worlds, parent, by, int32(at), who)
				}
				id, seen := ids[w]
				if !seen {
					id = int32(len(worlds))
					ids[w] = id
					worlds = append(worlds, w)
					parent = append(parent, int32(at))
					by = append(by, uint8(who))
					if len(worlds) > 8_000_000 {
						return len(worlds), "too many worlds"
					}
				}
				if !external {
					internal = append(internal, edge{int32(at), id})
				}
			}
		}
	}
	// Backwards from the settled worlds along internal moves.
	start := make([]int32, len(worlds)+1)
	for _, e := range internal {
		start[e.to+1]++
	}
	for k := 1; k < len(start); k++ {
		start[k] += start[k-1]
	}
	pred := make([]int32, len(internal))
	fill := append([]int32(nil), start...)
	for _, e := range internal {
		pred[fill[e.to]] = e.from
		fill[e.to]++
	}
	ok := make([]bool, len(worlds))
	var todo []int32
	for id := range worlds {
		if m.settled(&worlds[id]) {
			ok[id] = true
			todo = append(todo, int32(id))
		}
	}
	for len(todo) > 0 {
		id := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, q := range pred[start[id]:start[id+1]] {
			if !ok[q] {
				ok[q] = true
				todo = append(todo, q)
			}
		}
	}
	for id := range worlds {
		if !ok[id] {
			return len(worlds), "a wake-up was lost" + m.path(worlds, parent, by, int32(id), -1)
		}
	}
	return len(worlds), ""
}

// path tells how a world came about.
func (m *model) path(worlds []world, parent []int32, by []uint8, id int32, last int) string {
	names := [procs]string{"device", "notifier", "reaper", "poller0", "poller1", "disabler", "waiter0", "waiter1", "async", "switch", "closer"}
	var steps []string
	if last >= 0 {
		steps = append(steps, names[last])
	}
	for k := id; k > 0; k = parent[k] {
		p := worlds[k].p[by[k]]
		steps = append(steps, fmt.Sprintf("%s pc=%d phase=%d word=%b", names[by[k]], p.pc, p.phase, worlds[k].word))
	}
	var b strings.Builder
	for k := len(steps) - 1; k >= 0; k-- {
		b.WriteString("\n\t" + steps[k])
	}
	return fmt.Sprintf("%s\n\t%+v", b.String(), worlds[id])
}

// scenarios of the proof. Every mode alone with commands that are waited for and commands that are not; every change from
// one mode to another under load; disable and enable at any point; the poller switched off and on, and closed.
func scenarios(short bool) []scenario {
	var all []scenario
	for _, m := range Modes() {
		for _, weight := range []int{1, 2} {
			all = append(all,
				scenario{mode: m, async: 2, modes: []Mode{m}, weight: weight},
				scenario{mode: m, waiters: 1, async: 1, weight: weight},
				scenario{mode: m, waiters: 1, modes: []Mode{m}, weight: weight},
			)
		}
		if !short || m.polledByWaiters() {
			all = append(all, scenario{mode: m, waiters: 2, weight: 1})
		}
		for _, to := range Modes() {
			if to != m {
				all = append(all, scenario{mode: m, async: 1, modes: []Mode{to}, weight: 1},
					scenario{mode: m, waiters: 1, modes: []Mode{to}, weight: 1})
				if m.polledByWaiters() && to != Poll {
					all = append(all, scenario{mode: m, waiters: 1, async: 1, modes: []Mode{to}, weight: 1})
				}
				if !short {
					all = append(all, scenario{mode: m, waiters: 1, async: 1, modes: []Mode{to, m}, weight: 1})
				}
			}
		}
	}
	all = append(all,
		scenario{mode: Poll, async: 2, weight: 1, polling: true},
		scenario{mode: Poll, async: 1, modes: []Mode{Poll}, weight: 1, polling: true},
		scenario{mode: Poll, async: 1, weight: 1, closing: true},
	)
	if !short {
		all = append(all, scenario{mode: Poll, async: 2, weight: 1, closing: true})
		all = append(all, scenario{mode: Poll, async: 1, modes: []Mode{Interrupt, Poll}, weight: 1, closing: true})
		for _, m := range []Mode{Direct, Adaptive} {
			all = append(all, scenario{mode: m, waiters: 2, async: 1, weight: 1},
				scenario{mode: m, waiters: 2, modes: []Mode{Interrupt}, weight: 1})
		}
	}
	return all
}

// TestEveryInterleaving is the proof. PROOF=all adds the scenarios with several rounds and more commands: about ten minutes.
func TestEveryInterleaving(t *testing.T) {
	if raceEnabled {
		t.Skip("the model runs in one goroutine")
	}
	total, began := 0, time.Now()
	for _, s := range scenarios(os.Getenv("PROOF") != "all") {
		n, wrong := newModel(t, s, nil).explore()
		total += n
		if wrong != "" {
			t.Errorf("%v: %s", s, wrong)
			break
		}
		t.Logf("%v: %d worlds", s, n)
	}
	t.Logf("%d worlds in %v", total, time.Since(began))
}

// variations are the rules, each removed in turn, with scenarios in which that must show.
var variations = []struct {
	variation
	in []scenario
}{
	{variation{name: "no test-and-set: whoever schedules owns", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != scheduling {
			return false
		}
		i.state.word.Store(i.state.word.Load() | owned)
		t.phase = dispatching
		return true
	}}, []scenario{{mode: Interrupt, async: 2, modes: []Mode{Interrupt}, weight: 1}, {mode: Poll, async: 2, weight: 1, modes: []Mode{Poll}}}},
	{variation{name: "a refused schedule leaves no mark", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != scheduling {
			return false
		}
		t.phase = gone
		if i.state.tryOwn() {
			t.phase = dispatching
		}
		return true
	}}, []scenario{{mode: Thread, async: 2, weight: 1}, {mode: Poll, async: 2, weight: 1}, {mode: Direct, waiters: 1, async: 1, weight: 1}, {mode: Adaptive, waiters: 1, async: 1, weight: 1}}},
	{variation{name: "no poll after an arm that missed", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != arming {
			return false
		}
		i.armed.Store(true)
		i.cq.Arm(false)
		t.phase = releasing
		return true
	}}, everyModeAlone()},
	{variation{name: "release ignores who was refused", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != releasing || i.state.word.Load()&disabling != 0 {
			return false
		}
		i.state.word.Store(0)
		t.phase = gone
		return true
	}}, []scenario{{mode: Thread, async: 2, weight: 1}, {mode: Poll, async: 2, weight: 1}, {mode: Direct, waiters: 1, async: 1, weight: 1}, {mode: Adaptive, waiters: 1, async: 1, weight: 1}}},
	{variation{name: "an exhausted weight ignores the disabler", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != spent {
			return false
		}
		t.phase = tail
		return true
	}}, []scenario{{mode: Interrupt, async: 2, modes: []Mode{Interrupt}, weight: 1}, {mode: Thread, async: 2, modes: []Mode{Thread}, weight: 1}, {mode: Poll, async: 2, modes: []Mode{Poll}, weight: 1}}},
	{variation{name: "release ignores the disabler", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != releasing || i.state.word.Load()&disabling == 0 {
			return false
		}
		i.state.word.Store(disabling)
		t.phase = gone
		return true
	}}, []scenario{{mode: Interrupt, async: 1, modes: []Mode{Interrupt}, weight: 2}, {mode: Poll, async: 1, modes: []Mode{Interrupt}, weight: 2}}},
	{variation{name: "a leaving waiter ignores the disabler", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != leaving {
			return false
		}
		t.phase = passing
		return true
	}}, []scenario{{mode: Direct, waiters: 2, modes: []Mode{Interrupt}, weight: 1}}},
	{variation{name: "arm after the release, without ownership", step: func(m *model, i *Instance, t *turn) bool {
		switch t.phase {
		case arming:
			i.rests()
			t.phase = phaseLate + 1
			if i.state.release() != released {
				t.phase = tail
			}
			return true
		case phaseLate + 1:
			if i.state.word.Load()&owned != 0 {
				m.wrld.violated = vBeside
			}
			missed, _ := i.cq.Arm(false)
			t.phase = gone
			if missed {
				t.phase = scheduling
			}
			return true
		}
		return false
	}}, []scenario{{mode: Direct, waiters: 1, async: 1, weight: 1}, {mode: Adaptive, waiters: 1, async: 1, weight: 1}}},
	{variation{name: "less than the weight is taken for empty: release without arming", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != arming {
			return false
		}
		i.rests()
		t.phase = releasing
		return true
	}}, everyModeAlone()},
	{variation{name: "the whole weight is taken for empty", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != spent {
			return false
		}
		i.rests()
		t.phase = releasing
		return true
	}}, []scenario{{mode: Interrupt, async: 2, weight: 1}, {mode: Thread, async: 2, weight: 1}, {mode: Poll, async: 2, weight: 1}}},
	{variation{name: "the note of an arm is made after it", step: func(m *model, i *Instance, t *turn) bool {
		switch t.phase {
		case arming:
			t.phase = phaseLate
			if missed, _ := i.cq.Arm(false); missed {
				t.phase = spent
			}
			return true
		case phaseLate:
			i.armed.Store(true)
			t.phase = releasing
			return true
		}
		return false
	}}, []scenario{{mode: Direct, waiters: 1, async: 2, weight: 1}}},
	{variation{name: "a taken notification is not noted", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != noting {
			return false
		}
		t.phase = scheduling
		return true
	}}, []scenario{{mode: Direct, waiters: 1, async: 2, weight: 1}}},
	{variation{name: "a leaving waiter forgets the blocked ones", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != passing {
			return false
		}
		t.phase = gone
		if !i.passRole() {
			i.rests()
			t.phase = releasing
			if i.unattended.Load() > 0 {
				t.phase = arming
			}
		}
		return true
	}}, []scenario{{mode: Direct, waiters: 2, weight: 1}, {mode: Adaptive, waiters: 2, weight: 1}}},
	{variation{name: "a leaving waiter forgets the unattended commands", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != passing {
			return false
		}
		t.phase = gone
		if !i.passRole() {
			i.rests()
			t.phase = releasing
			if i.parked.Load() > 0 {
				t.phase = arming
			}
		}
		return true
	}}, []scenario{{mode: Direct, waiters: 1, async: 1, weight: 1}, {mode: Adaptive, waiters: 1, async: 1, weight: 1}}},
	{variation{name: "a waiter that was overtaken by a change of mode leaves the queue unarmed", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != passing || i.Mode().polledByWaiters() {
			return false
		}
		t.phase = gone
		if !i.passRole() {
			i.rests()
			t.phase = releasing
		}
		return true
	}}, []scenario{{mode: Direct, waiters: 1, async: 1, modes: []Mode{Interrupt}, weight: 1}}},
	{variation{name: "a blocking waiter asks for nothing", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != asking {
			return false
		}
		t.phase = gone
		return true
	}}, []scenario{{mode: Direct, waiters: 1, async: 1, weight: 1}}},
	{variation{name: "a follower asks for the role once only", noRing: true}, []scenario{{mode: Direct, waiters: 2, weight: 1}}},
	{variation{name: "an unattended command is counted after the question", lateCount: true}, []scenario{{mode: Direct, waiters: 1, async: 1, weight: 1}}},
	{variation{name: "Enable leaves what came meanwhile", noEnable: true}, []scenario{{mode: Interrupt, async: 2, modes: []Mode{Interrupt}, weight: 1}, {mode: Poll, async: 2, modes: []Mode{Poll}, weight: 1}}},
	{variation{name: "the mode changes under its owner", noWait: true}, []scenario{{mode: Interrupt, async: 1, modes: []Mode{Poll}, weight: 1}, {mode: Adaptive, waiters: 1, modes: []Mode{Thread}, weight: 1}}},
	{variation{name: "the poller goes to sleep without a second look", noRecheck: true}, []scenario{{mode: Poll, async: 1, weight: 1}}},
	{variation{name: "an exhausted weight hands a promise to the disabler", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != spent || !i.state.yieldToDisabler() {
			return false
		}
		i.disabled <- struct{}{}
		t.phase = gone
		return true
	}}, []scenario{{mode: Poll, async: 1, modes: []Mode{Poll}, weight: 2}, {mode: Adaptive, async: 1, modes: []Mode{Interrupt}, weight: 1}, {mode: Direct, waiters: 1, modes: []Mode{Interrupt}, weight: 2}}},
	{variation{name: "a leaving waiter hands a promise to the disabler", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != leaving || !i.state.yieldToDisabler() {
			return false
		}
		i.disabled <- struct{}{}
		t.phase = gone
		return true
	}}, []scenario{{mode: Direct, waiters: 1, modes: []Mode{Interrupt}, weight: 1}, {mode: Adaptive, waiters: 1, modes: []Mode{Interrupt}, weight: 1}}},
	{variation{name: "a leaving waiter leaves a promise behind", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != passing || !i.Mode().polledByWaiters() || i.followers.head != nil || t.here || i.awaited() {
			return false
		}
		t.phase = releasing
		return true
	}}, []scenario{{mode: Direct, waiters: 1, weight: 1}, {mode: Adaptive, waiters: 1, weight: 1}}},
	{variation{name: "the promise is taken back after the hand-over", step: func(m *model, i *Instance, t *turn) bool {
		switch t.phase {
		case spent:
			t.phase = tail
			if i.state.yieldToDisabler() {
				i.disabled <- struct{}{}
				t.phase = phaseLate
			}
			return true
		case phaseLate:
			i.rests()
			t.phase = gone
			return true
		}
		return false
	}}, []scenario{{mode: Poll, async: 1, modes: []Mode{Poll}, weight: 2}}},
	{variation{name: "nobody wakes the poller", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != nudging {
			return false
		}
		t.phase = gone
		return true
	}}, []scenario{{mode: Poll, async: 1, weight: 1}}},
	{variation{name: "a closed poller's mailbox is forgotten", step: func(m *model, i *Instance, t *turn) bool {
		if t.phase != nudging || !t.poller.closed.Load() {
			return false
		}
		t.phase = gone
		return true
	}}, []scenario{{mode: Poll, async: 2, weight: 1, closing: true}}},
}

func everyModeAlone() (all []scenario) {
	for _, m := range Modes() {
		all = append(all, scenario{mode: m, async: 2, weight: 1})
	}
	return all
}

// TestRemovedRuleIsNoticed runs the proof on state machines that lack one rule.
func TestRemovedRuleIsNoticed(t *testing.T) {
	if raceEnabled {
		t.Skip("the model runs in one goroutine")
	}
	for _, v := range variations {
		t.Run(v.name, func(t *testing.T) {
			for _, s := range v.in {
				n, wrong := newModel(t, s, &v.variation).explore()
				if wrong == "" {
					t.Errorf("%v: not noticed in %d worlds", s, n)
				}
				if first, _, ok := strings.Cut(wrong, "\n"); ok {
					t.Logf("%v: %s", s.mode, first)
				}
			}
		})
	}
}
