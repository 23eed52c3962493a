package completion

import (
	"sync/atomic"
	"time"
)

// pace tells a Poller whether an instance that has become empty is worth polling on. Polling saves a notification
// per find and costs the empty polls before it; blk-iopoll polls on regardless or not at all, and its first critic saw what
// that means below saturation: a schedule, a complete and an interrupt for every command. So the
// empty polls are counted. While they are fewer than a notification is worth, polling goes on; where they are not, the queue is armed at
// once, and polling is tried again ever more rarely.
type pace struct {
	last    int64 // when work was last found
	polled  int64 // when the queue was last polled
	barren  int   // empty polls since work was last found, and time lost to others
	cost    int   // mean empty polls before a find, in 1/16
	batch   int   // mean completions of a find, in 1/16
	finds   int   // since polling began: notifications saved
	resting int   // notifications to be served in place before polling is tried again
	backoff int
	worth   int // least batch
}

const (
	// barrenWorth is how many empty polls, each with a yield of the CPU, cost what a notification costs where CPUs are busy. Waking an
	// idle CPU costs more, but then the CPU time that polling takes is seen in full.
	barrenWorth = 3
	// worthBatch is how many completions a find must bring on average: for one command after the other the peer's way to us is shortest when
	// we sleep, and its wake-up on another CPU the dearest part of it when we do not. A process that has one CPU has no such wake-ups: there
	// any find will do.
	worthBatch = 2

	paying     = 8   // finds for which a stretch of polling was worth its beginning and end
	maxBackoff = 256 // notifications between two tries
)

// lostTime is how much time away between two polls counts as one more: when others want the CPU who yields waits for all of them,
// while a notification would have been let in before them. Our own work between two polls takes less. A variable for
// the tests, which others' load would rule.
var lostTime = int64(200 * time.Microsecond)

// found notes that a turn that ended at time at had work.
func (p *pace) found(work int, at int64) {
	p.away(at)
	p.batch += (16*min(work, 64) - p.batch) / 8
	p.cost += (16*min(p.barren, 4*barrenWorth) - p.cost) / 8
	p.barren, p.last = 0, at
	p.finds++
}

// away counts the time since the last poll.
func (p *pace) away(at int64) {
	if p.polled != 0 {
		p.barren += int((at - p.polled) / lostTime)
	}
	p.polled = at
}

// tries reports whether a notification is followed by polling.
func (p *pace) tries() bool {
	if p.resting > 0 {
		p.resting--
		return false
	}
	return p.batch >= p.worth
}

// pays reports whether to poll on at time at, after a turn that found the queue empty in the end, or from the beginning.
func (p *pace) pays(work int, at, linger int64) bool {
	if work == 0 {
		p.away(at)
		p.barren++
	}
	if p.batch >= p.worth && p.cost <= 16*barrenWorth && p.barren <= 2*barrenWorth && at-p.last < linger {
		return true
	}
	p.ended()
	return false
}

// ended notes that the queue is armed again.
func (p *pace) ended() {
	if p.finds >= paying {
		p.backoff /= 2
	} else {
		p.backoff = min(max(1, 2*p.backoff), maxBackoff)
	}
	p.resting, p.finds, p.barren, p.polled = p.backoff, 0, 0, 0
	p.cost = min(p.cost, 16*barrenWorth) // else it would never be tried again
}

// Adaptive polling, in units of 1/256 completion.
const (
	perCompletion = 256
	enterAt       = 3 * perCompletion // a wake-up that finds several on average starts polling
	leaveAt       = perCompletion     // one or less on average ends it
)

// adaptive is the owner's memory in mode Adaptive.
type adaptive struct {
	perWake   int64 // mean completions found by a wake-up
	perWindow int64 // mean completions found in the time that one wake-up costs, while polling
}

// crowd tells waiters in mode Adaptive whether others want the CPU: who yields it while polling then waits for all of them, and who
// blocks is let in before them when the notification comes.
type crowd struct {
	skip    atomic.Int32 // waits that are to block at once
	backoff atomic.Int32
}

const maxSkip = 1024

// yielded notes how long a waiter was away when it yielded the CPU. Lost updates do no harm.
func (c *crowd) yielded(ns int64) {
	switch b := c.backoff.Load(); {
	case ns >= lostTime:
		b = min(max(4, 2*b), maxSkip)
		c.backoff.Store(b)
		c.skip.Store(b)
	case b > 0:
		c.backoff.Store(b - 1)
	}
}

// blocks reports whether a wait is to block at once.
func (c *crowd) blocks() bool { return c.skip.Load() > 0 && c.skip.Add(-1) >= 0 }

// serveAdaptive reaps like serveUntilEmpty; when wake-ups keep finding several completions it stays
// and polls, without notifications, until a window of Spin finds one on average, or none at all twice (the stall guard). Where
// no goroutine waits, as on a target, it also stays while a few empty polls cost less than the notification they save.
func (i *Instance) serveAdaptive() {
	a := &i.adaptive
	window := int64(i.cfg.Spin)
	if window == 0 {
		window = int64(DefaultAdaptiveSpin)
	}
	if window < 0 {
		i.serveUntilEmpty()
		return
	}
	began := now()
	slice, budget := began, i.cfg.Budget
	polling := a.perWake >= enterAt
	if polling {
		i.count.pollEntered.Add(1)
		a.perWindow = a.perWake
	}
	lingering := !polling && i.cfg.Linger > 0 && i.parked.Load() == 0 && i.pace.tries()
	found, lastFind, total := int64(0), began, int64(0)
	woken := int64(-1) // of total, what the notification was about
	for {
		t := turn{weight: i.weight, here: true}
		verdict := i.run(&t)
		found += int64(t.work)
		total += int64(t.work)
		budget -= t.work
		at := now()
		if t.work > 0 {
			lastFind = at
			if lingering && verdict != gone {
				i.pace.found(t.work, at)
			}
		}
		if verdict == idle {
			if woken < 0 {
				woken = total
			}
			if polling && at-began >= window {
				a.perWindow += (found*perCompletion*window/(at-began) - a.perWindow) / 8
				found, began = 0, at
				if a.perWindow <= leaveAt {
					polling = false
					a.perWake = perCompletion
				} else if at-lastFind >= 2*window {
					i.count.pollStalled.Add(1)
					polling = false
					a.perWake = perCompletion
				}
			}
			if lingering {
				lingering = i.parked.Load() == 0 && i.pace.pays(t.work, at, int64(i.cfg.Linger))
			}
			t.phase = leaving
			if polling || lingering {
				t.phase = spent
			}
			verdict = i.run(&t)
		}
		if verdict == gone {
			if total == 0 {
				i.count.barren.Add(1)
			}
			if !polling {
				if woken < 0 {
					woken = total
				}
				a.perWake += (min(woken, 1024)*perCompletion - a.perWake) / 8
			}
			return
		}
		switch {
		case budget <= 0:
			i.count.budgetExhausted.Add(1)
		case at-slice >= int64(i.cfg.Slice):
			i.count.timeExhausted.Add(1)
		case (polling || lingering) && t.work == 0:
		default:
			continue
		}
		giveWay()
		budget, slice = i.cfg.Budget, now()
	}
}
