package completion

// Waiting. In modes Direct and Adaptive the goroutine that waits for a command polls for
// it: the first becomes the leader, the others follow, and a leader whose own command is done passes the role
// on. Who has polled for Spin without success arms the queue and blocks.

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// Waiter is where one goroutine waits for one signal. The zero value is ready to use; a Waiter
// may be used again and again, and must not be copied.
type Waiter struct {
	state atomic.Uint32
	wake  chan struct{} // made by the first wait that blocks; one token
	timer *time.Timer
	alarm *Alarm // in place of the timer; nil: none

	// Guarded by followers.mu.
	prev, next *Waiter
	listed     bool
	granted    bool  // the instance is owned by this waiter
	rests      bool  // the waiter's own: it has found that polling is not worth it
	spinUntil  int64 // worth the polling role until then
}

const (
	waiterIdle uint32 = iota
	waiterSignaled
	waiterBlocked
)

// Signal ends the current or the next Wait. It never blocks; signals do not add up.
func (w *Waiter) Signal() {
	if w.state.Swap(waiterSignaled) == waiterBlocked {
		w.token()
	}
}

// take consumes a pending signal.
func (w *Waiter) take() bool {
	return w.state.Load() == waiterSignaled && w.state.CompareAndSwap(waiterSignaled, waiterIdle)
}

func (w *Waiter) token() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// prepare makes what block needs; before that nobody may send a token.
func (w *Waiter) prepare() {
	if w.wake == nil {
		w.wake = make(chan struct{}, 1)
	}
}

// block waits for a signal, a token or the deadline (zero: none). It may return early, without
// reason; it returns false only at the deadline.
func (w *Waiter) block(deadline time.Time) bool {
	if !w.state.CompareAndSwap(waiterIdle, waiterBlocked) {
		return true // signaled
	}
	inTime := true
	if deadline.IsZero() {
		<-w.wake
	} else if left := time.Until(deadline); left <= 0 {
		inTime = false
	} else if on, ok := w.byAlarm(left); ok {
		inTime = on
	} else {
		if w.timer == nil {
			w.timer = time.NewTimer(left)
		} else {
			w.timer.Reset(left)
		}
		select {
		case <-w.wake:
		case <-w.timer.C:
			inTime = false
		}
		w.timer.Stop()
	}
	w.state.CompareAndSwap(waiterBlocked, waiterIdle)
	return inTime
}

// SetAlarm makes w's deadlines go by a, which must outlive its Waits; nil: by Go's timers, which may be a millisecond late. Nobody may be in Wait.
func (w *Waiter) SetAlarm(a *Alarm) { w.alarm = a }

func (w *Waiter) byAlarm(left time.Duration) (inTime, done bool) {
	if w.alarm == nil {
		return false, false
	}
	return w.alarm.block(w, left)
}

// followers are the waiters that somebody else polls for.
type followers struct {
	mu   sync.Mutex
	head *Waiter
}

func (f *followers) push(w *Waiter) {
	f.mu.Lock()
	w.prev, w.next = nil, f.head
	if f.head != nil {
		f.head.prev = w
	}
	f.head, w.listed = w, true
	f.mu.Unlock()
}

func (f *followers) unlink(w *Waiter) {
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		f.head = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	}
	w.prev, w.next, w.listed = nil, nil, false
}

// remove takes w off and reports whether it was made the leader meanwhile.
func (f *followers) remove(w *Waiter) bool {
	f.mu.Lock()
	if w.listed {
		f.unlink(w)
	}
	granted := w.granted
	w.granted = false
	f.mu.Unlock()
	return granted
}

// passRole makes a follower that still wants to poll the owner. The caller was.
func (i *Instance) passRole() bool {
	f := &i.followers
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.head == nil {
		return false
	}
	at := now()
	for w := f.head; w != nil; w = w.next {
		if w.state.Load() != waiterSignaled && at < w.spinUntil {
			f.unlink(w)
			w.granted = true
			w.token()
			return true
		}
	}
	return false
}

// crowd size from which polling is left to nobody: with so many goroutines that wait a notification brings dozens of completions, whose waking is
// what costs, and who polls takes a CPU from those who submit.
const crowdedAt = 48

// crowded reports whether so many goroutines are blocked in Wait that polling takes more from them than it saves.
func (i *Instance) crowded() bool { return i.parked.Load() >= crowdedAt }

// spin is how long a waiter polls before it blocks.
func (i *Instance) spin() time.Duration {
	switch {
	case i.cfg.Spin < 0:
		return 0
	case i.cfg.Spin > 0:
		return i.cfg.Spin
	case i.Mode() == Adaptive && (i.crowded() || i.crowd.blocks() || i.pace.gauges[Adaptive].arms.Load()):
		return 0
	}
	return DefaultDirectSpin // at the most: in mode Adaptive the leader's pace ends it before
}

// Wait returns true when w has been signaled, false when the deadline (zero: none) has passed before. In
// modes Direct and Adaptive the calling goroutine may run the handler meanwhile.
func (i *Instance) Wait(w *Waiter, deadline time.Time) bool {
	if w.take() {
		return true
	}
	w.prepare()
	if !i.waited.Load() {
		i.waited.Store(true)
	}
	if !i.Mode().polledByWaiters() {
		return i.waitBlocked(w, deadline)
	}
	return i.waitPolling(w, deadline)
}

// waitBlocked leaves the polling to others.
func (i *Instance) waitBlocked(w *Waiter, deadline time.Time) bool {
	i.parked.Add(1)
	defer i.parked.Add(-1)
	for {
		i.needNotification()
		inTime := w.block(deadline)
		if w.take() {
			return true
		}
		if !inTime {
			return false
		}
	}
}

// needNotification makes sure that in a mode where waiters poll the instance is owned or armed, now that somebody
// depends on it who does not poll. The caller has raised parked or unattended before.
func (i *Instance) needNotification() {
	i.run(&turn{phase: asking})
}

// Unattended adds n to the number of posted requests whose completion nobody waits for: raise it by
// one before such a request is posted, lower it by one when the handler has seen its completion. In modes Direct and
// Adaptive the queue stays armed while it is above zero; other modes need no such help but must count too, since the
// mode may change.
func (i *Instance) Unattended(n int) {
	if i.unattended.Add(int64(n)) > 0 && n > 0 {
		i.needNotification()
	}
}

func (i *Instance) waitPolling(w *Waiter, deadline time.Time) bool {
	began := now()
	until := began + int64(i.spin())
	end := int64(1<<63 - 1)
	if !deadline.IsZero() {
		end = after(began, time.Until(deadline))
	}
	if nap := i.nap(); nap > 0 {
		// Nobody else waits, so nobody is kept waiting by an unarmed queue.
		own := w.alarm
		w.alarm = i.alarm
		w.block(earlier(deadline, time.Now().Add(nap)))
		w.alarm = own
		until += int64(nap)
	}
	for now() < until {
		var done, ok bool
		if i.state.tryOwn() {
			done, ok = i.lead(w, until, end)
		} else {
			done, ok = i.follow(w, until, end, deadline)
		}
		if w.rests {
			w.rests, until = false, 0
		}
		if done {
			i.noteLatency(now()-began, ok)
			return ok
		}
	}
	ok := i.waitBlocked(w, deadline)
	i.noteLatency(now()-began, ok)
	return ok
}

// minNap is the shortest sleep that is worth it: an Alarm is late by tens of microseconds.
const minNap = 100 * time.Microsecond

// nap is how long Config.Hybrid lets this wait sleep before it polls.
func (i *Instance) nap() time.Duration {
	if !i.cfg.Hybrid || i.awaited() {
		return 0
	}
	if half := time.Duration(i.latency.Load() / 2); half >= minNap {
		return half
	}
	return 0
}

// noteLatency keeps the mean time that Wait took. Lost updates do no harm.
func (i *Instance) noteLatency(took int64, signaled bool) {
	if signaled {
		old := i.latency.Load()
		i.latency.Store(old + (took-old)/8)
	}
}

// after is the time d after at, or the last there is.
func after(at int64, d time.Duration) int64 { return at + min(int64(d), math.MaxInt64-at) }

// earlier is the earlier of two times; the zero deadline is no time.
func earlier(deadline, t time.Time) time.Time {
	if deadline.IsZero() || t.Before(deadline) {
		return t
	}
	return deadline
}

// lead polls as the owner until w is signaled, the deadline passes or polling is not worth it any more; then it leaves.
func (i *Instance) lead(w *Waiter, until, end int64) (done, signaled bool) {
	i.count.leads.Add(1)
	// In mode Adaptive polling must also be worth it.
	paced := i.cfg.Spin == 0 && i.Mode() == Adaptive
	if paced {
		if !i.tries() {
			until, paced, w.rests = 0, false, true
		}
		i.pace.begin(now(), true)
	}
	for budget := i.cfg.Budget; ; {
		if w.take() {
			i.leave()
			return true, true
		}
		t := turn{weight: i.weight}
		verdict := i.run(&t)
		if verdict == gone {
			return false, false
		}
		at := now()
		if paced {
			if t.work > 0 {
				i.pace.found(at)
			} else if !i.pays(0, at, int64(DefaultDirectSpin)) {
				until, paced, w.rests = 0, false, true
			}
		}
		if w.take() {
			// What found this waiter's completion may have left work half done, and nobody polls after a waiter that leaves the
			// queue unarmed: a provider that holds posted requests back until the queue has been seen empty must see that.
			if t.work == 0 || i.pollsOn(&t) && i.run(&turn{weight: i.weight}) != gone {
				i.leave()
			}
			return true, true
		}
		if at >= end {
			i.leave()
			return true, false
		}
		if t.work == 0 && at >= until {
			// Counted before it leaves, so that the queue is armed.
			i.parked.Add(1)
			i.leave()
			i.parked.Add(-1)
			return false, false
		}
		if t.work == 0 {
			i.promise()
		}
		if !i.pollsOn(&t) {
			return false, false
		}
		if budget -= t.work; t.work == 0 || budget <= 0 {
			giveWay()
			budget = i.cfg.Budget
			if t.work == 0 {
				i.crowd.yielded(now() - at)
			}
		}
	}
}

// pollsOn ends a leader's turn; it serves a disabler, and reports whether there is to be another turn.
func (i *Instance) pollsOn(t *turn) bool {
	if t.phase == idle {
		t.phase = spent
		i.run(t)
	}
	return t.phase == tail
}

// leave gives up the polling role.
func (i *Instance) leave() {
	for range 8 {
		t := turn{phase: leaving, weight: i.weight}
		if i.run(&t) == gone {
			return
		}
		// Somebody rang, or the arm missed something.
		t = turn{weight: i.weight}
		if i.run(&t) == gone {
			return
		}
	}
	// There is always more: not this goroutine's business any longer.
	if i.run(&turn{phase: spent}) == tail {
		i.dispatch()
	}
}

// follow waits while somebody else owns the instance.
func (i *Instance) follow(w *Waiter, until, end int64, deadline time.Time) (done, signaled bool) {
	w.spinUntil = until
	i.parked.Add(1)
	i.followers.push(w)
	mine := i.state.schedule() // refused: the owner will look at the followers before it goes
	inTime := true
	if !mine {
		inTime = w.block(deadline)
	}
	granted := i.followers.remove(w)
	i.parked.Add(-1)
	if granted && mine {
		panic("completion: two owners")
	}
	if granted || mine {
		return i.lead(w, until, end)
	}
	if w.take() {
		return true, true
	}
	return !inTime, false
}

// guardIdle starts the idle guard's timer, if it does not run. Called by the owner.
func (i *Instance) guardIdle() {
	if i.cfg.IdleGuard > 0 && i.guarded.CompareAndSwap(false, true) {
		i.guardSaw.Store(i.count.leads.Load())
		i.guard.Reset(i.cfg.IdleGuard)
	}
}

// guardExpired arms an instance that a leader has left unarmed and nobody has polled since. No
// request depends on it: this is for what the peer sends on its own, requests and the flush of a connection it ended.
func (i *Instance) guardExpired() {
	if leads := i.count.leads.Load(); i.guardSaw.Swap(leads) != leads {
		i.guard.Reset(i.cfg.IdleGuard) // in use
		return
	}
	i.guarded.Store(false)
	i.run(&turn{phase: asking})
}

// Poll reaps at most budget completions in the calling goroutine, in any mode, and returns how many. ErrOwned: somebody
// else is at it. It is what a device stacked on several instances calls for each of them.
func (i *Instance) Poll(budget int) (int, error) {
	if !i.state.tryOwn() {
		return 0, ErrOwned
	}
	t := turn{weight: max(budget, 1)}
	if i.run(&t) == gone {
		return t.work, nil
	}
	work := t.work
	if i.Mode().polledByWaiters() {
		i.leave()
		return work, nil
	}
	if t.phase == idle {
		t.phase = arming
		i.run(&t)
	}
	if t.phase == tail {
		i.dispatch()
	}
	return work, nil
}

// Wait is Instance.Wait without an instance, for a signal that no completion queue stands behind.
func (w *Waiter) Wait(deadline time.Time) bool {
	w.prepare()
	for {
		if w.take() {
			return true
		}
		if !w.block(deadline) && !w.take() {
			return false
		}
	}
}

// WaitAny is Instance.Wait for a goroutine that depends on several instances, as a device stacked on several sessions
// makes it: it polls all of them in turn. That is done only if each is in a mode where waiters poll; else it blocks, and
// each member is reaped as its mode says. A member that somebody else reaps just now is passed over.
func WaitAny(w *Waiter, deadline time.Time, members []*Instance) bool {
	if len(members) == 1 {
		return members[0].Wait(w, deadline)
	}
	w.prepare()
	began := now()
	until := began
	for k, i := range members {
		if !i.waited.Load() {
			i.waited.Store(true)
		}
		if !i.Mode().polledByWaiters() {
			until = began
			break
		}
		if u := began + int64(i.spin()); k == 0 || u < until {
			until = u
		}
	}
	end := int64(1<<63 - 1)
	if !deadline.IsZero() {
		end = after(began, time.Until(deadline))
	}
	for at := began; ; at = now() {
		if w.take() {
			return true
		}
		if at >= end {
			return false
		}
		if at >= until {
			break
		}
		work := 0
		for _, i := range members {
			n, _ := i.Poll(i.weight)
			work += n
		}
		if work == 0 {
			giveWay()
		}
	}
	for _, i := range members {
		i.parked.Add(1)
		defer i.parked.Add(-1)
	}
	for {
		for _, i := range members {
			i.needNotification()
		}
		inTime := w.block(deadline)
		if w.take() {
			return true
		}
		if !inTime {
			return false
		}
	}
}
