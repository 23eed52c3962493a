package completion

// The data path. One turn of an instance's owner:
//
//	reaping --(work < weight)--> idle --executor's choice--> arming --> releasing --> gone
//	   |                          |                             |           |
//	   +--(work >= weight)--+     +--(linger, still polling)-+  | missed    | rang
//	                        v                                v  v           v
//	                      spent ------------------------------------------> tail
//	                        |  a disabler waits
//	                        +--> gone
//
// and on the way in: noting (a notification was taken) or asking (somebody needs one) --> scheduling --> dispatching.
//
// Behind a notification the first completion is handled by itself: the peer may sleep as this end did, and what the handler posts for it wakes the
// peer while the others are handled. Where many are found at a time the peer has something to do anyway; where all are handled at once, he cannot.
//
// The completions of a batch lie in Instance.wcs, which belongs to the owner; the
// handler may read its slice until it returns. Nothing here allocates or blocks.
//
// Every step touches state shared with other goroutines at most once, so that
// the interleaving proof can stop between any two of them.

import "srp-initiator/rdma/verbs"

type phase uint8

const (
	reaping   phase = iota // poll one batch
	spent                  // weight used up, or nothing found and lingering: serve a disabler, else go to the tail
	arming                 // ask for a notification
	releasing              // give ownership back
	leaving                // where waiters poll, the owner gives up the role: to a disabler,
	passing                // to a follower, to a notification, or to nobody

	noting      // a notification was taken: the queue is not armed any more
	asking      // somebody who does not poll depends on the instance: is it a mode where others poll?
	askingArmed // and is no notification due?
	scheduling  // the test-and-set
	dispatching // an owned instance goes to its mode's executor,
	pushing     // into the poller's mailbox
	nudging     // wake the poller whose mailbox was filled

	// Verdicts: the executor decides what happens next.
	idle // still the owner; work < weight
	tail // still the owner; belongs at the end of the executor's list
	gone // not the owner any more
)

// turn is what an owner carries through one turn.
type turn struct {
	phase    phase
	notified bool    // a notification led to it
	here     bool    // the caller is the notification goroutine: it may serve the instance in place, and never leaves it unarmed
	poller   *Poller // that gets the instance
	work     int     // completions reaped in this turn
	weight   int     // at most so many
}

// run steps until there is a verdict.
func (i *Instance) run(t *turn) phase {
	for t.phase < idle {
		i.step(t)
	}
	return t.phase
}

// step makes the owner's next move.
func (i *Instance) step(t *turn) {
	switch t.phase {
	case noting:
		i.armed.Store(false)
		t.phase, t.notified = scheduling, true
	case asking:
		t.phase = gone
		if i.Mode().polledByWaiters() {
			t.phase = askingArmed
		}
	case askingArmed:
		t.phase = scheduling
		if i.armed.Load() {
			t.phase = gone
		}
	case scheduling:
		t.phase = dispatching
		if !i.state.schedule() {
			i.count.refused.Add(1)
			t.phase = gone
			break
		}
		i.first = t.notified && i.batch == i.cfg.Batch && i.cfg.Batch < maxBatch
	case dispatching:
		i.dispatchTo(t)
	case pushing:
		t.phase = nudging // before the push: then the instance is the poller's
		t.poller.push(i)
	case nudging:
		t.poller.nudge()
		t.phase = gone

	case reaping:
		// __ib_process_cq: batches until the queue is empty or the budget is used up.
		want := min(len(i.wcs), i.batch, t.weight-t.work)
		n := i.cq.Poll(i.wcs[:want])
		i.count.polls.Add(1)
		if n == 0 {
			i.count.emptyPolls.Add(1)
		} else {
			i.count.completions.Add(uint64(n))
			alone := 0
			if i.first && n > 1 {
				alone = 1
				i.deliver(i.wcs[:1])
			}
			i.deliver(i.wcs[alone:n])
			t.work += n
			i.found += n
		}
		i.first = false // also behind a notification that brought nothing: what comes later is another turn's
		if n < want {
			i.batch = max(i.cfg.Batch, i.found/2)
			i.found = 0
		}
		switch {
		case t.work >= t.weight:
			t.phase = spent
		case n < want:
			t.phase = idle
		}
	case spent:
		// irq_poll_softirq: with the weight used up only a pending disable takes the instance off the list.
		t.phase = tail
		if i.yields() {
			t.phase = gone
		}
	case arming:
		// ib_poll_handler arms after irq_poll_complete, under the lock of the kernel's queue. Ours has no lock: Arm must
		// not run beside Poll, so the owner arms while it still owns, and release notices who rang meanwhile.
		i.armed.Store(true) // before Arm: the notification may be taken before Arm returns, and clears it
		missed, err := i.cq.Arm(false)
		i.count.arms.Add(1)
		switch {
		case err != nil:
			i.armed.Store(false)
			i.fail(err)
			t.phase = releasing
		case missed:
			i.armed.Store(false)
			i.count.missed.Add(1)
			t.phase = spent // schedules itself again
		default:
			t.phase = releasing
		}
	case releasing:
		switch i.state.release() {
		case released:
			t.phase = gone
		case lookAgain:
			t.phase = tail
		case handed:
			i.disabled <- struct{}{}
			t.phase = gone
		}
	case leaving:
		t.phase = passing
		if i.yields() {
			t.phase = gone
		}
	case passing:
		switch {
		case !i.Mode().polledByWaiters():
			t.phase = arming // the mode changed before this waiter took the role; nobody will ask for a notification
		case i.passRole():
			t.phase = gone
		case t.here || i.awaited():
			t.phase = arming
		default:
			i.rests()
			i.guardIdle()
			t.phase = releasing
		}
	default:
		panic("completion: step after a verdict")
	}
}

// awaited reports whether somebody who does not poll depends on the instance.
func (i *Instance) awaited() bool { return i.parked.Load() > 0 || i.unattended.Load() > 0 }

// promise tells the provider that the instance is polled until it is armed, or given to a disabler or to nobody. Whoever else gets it, a poller or a follower, polls it:
// the promise goes with the ownership. Nobody needs to be woken for packets of the same device meanwhile.
func (i *Instance) promise() {
	if i.driver != nil {
		i.driver.PollsOn()
	}
}

// rests takes the promise back. The caller still owns the instance. Arming does it too.
func (i *Instance) rests() {
	if i.driver != nil {
		i.driver.Rests()
	}
}

// yields gives the instance to a disabler, if one waits.
func (i *Instance) yields() bool {
	if !i.state.disablerWaits() {
		return false
	}
	i.rests() // before: what comes for others must not wait until the disabler runs
	if !i.state.yieldToDisabler() {
		return false
	}
	i.disabled <- struct{}{}
	return true
}

// deliver calls the handler so that a failed completion is the last of its batch. What
// follows it is delivered too: a loop that returned at an error once lost the answers behind it.
func (i *Instance) deliver(wcs []verbs.WorkCompletion) {
	start := 0
	for k := range wcs {
		if wcs[k].Status != verbs.WCSuccess {
			i.handler(wcs[start : k+1])
			start = k + 1
		}
	}
	if start < len(wcs) {
		i.handler(wcs[start:])
	}
}
