package completion

import (
	"sync/atomic"
	"time"
)

// pace tells the owner of an instance that has become empty whether to poll on.
//
// Where goroutines wait for completions, a gauge measures whether that is cheaper. Where nobody does, as on a target, it depends on whether the peer polls, who
// in turn looks at this end: were both to measure, each would find that its polling alone saves nothing, and both would sleep. So there the time
// polled in vain is weighed: while a find costs less of it than a notification does, polling goes on; where it costs more, the queue is armed
// at once, and polling is tried again more rarely, but often enough for a peer that tries it.
type pace struct {
	last    int64 // when work was last found, or polling began
	polled  int64 // end of the last poll; 0: polling has not begun
	gauged  bool  // somebody waits
	vain    int64 // ns polled in vain since work was last found
	cost    int64 // mean of vain before a find
	finds   int   // since polling began: notifications saved
	resting int   // notifications or waits to be served by the notification before polling is tried again
	backoff int
	gauge   *gauge
	gauges  [modes]gauge // what polling on costs depends on who does it
}

const (
	// vainWorth is what a notification costs in CPU time of both ends where a sleeping thread has to be woken on another CPU: 45 to
	// 65 us on virtual machines.
	vainWorth = int64(60 * time.Microsecond)
	// vainPoll is the most that one empty poll and the yield behind it count for: what takes longer was somebody else's work.
	vainPoll = int64(5 * time.Microsecond)

	perCompletion = 256 // the unit of means of completions is 1/256: what a mean over eight loses by rounding must not matter

	paying     = 8  // finds for which a stretch of polling was worth its beginning and end
	maxBackoff = 32 // notifications between two tries
)

// lostTime is how much time away between two polls counts in full: when others want the CPU who yields waits for all of them,
// while a notification would have been let in before them. Our own work between two polls takes less. A variable for
// the tests, which others' load would rule.
var lostTime = int64(200 * time.Microsecond)

// found notes that a poll that ended at time at found work.
func (p *pace) found(at int64) {
	p.cost += (p.vain - p.cost) / 8
	p.vain, p.polled, p.last = 0, at, at
	p.finds++
}

// tries reports whether to poll on behind a notification, or in place of one.
func (i *Instance) tries() bool {
	p := &i.pace
	if p.resting > 0 {
		p.resting--
		return false
	}
	return !i.waited.Load() || p.gauge.way(now(), &i.count.completions)
}

// begin notes that polling begins, or goes on after a time that was not spent on it.
func (p *pace) begin(at int64, awaited bool) {
	p.polled, p.last, p.gauged = at, at, awaited
	if p.finds == 0 {
		p.cost = min(p.cost, vainWorth) // else it would end at once
	}
}

// begun reports whether polling has begun and not ended since.
func (p *pace) begun() bool { return p.polled != 0 }

// pays reports whether to poll on at time at, after a poll that found the queue empty in the end, or from the beginning.
func (i *Instance) pays(work int, at, linger int64) bool {
	p := &i.pace
	if work == 0 && i.mover != nil && i.mover.Moved() {
		// It moved packets: that is work, which waiting for a notification would not have saved.
		p.polled, p.last = at, at
	}
	return p.pays(work, at, linger, &i.count.completions)
}

func (p *pace) pays(work int, at, linger int64, completions *atomic.Uint64) bool {
	lost := false
	if work == 0 {
		away := at - p.polled
		if lost = away >= lostTime; !lost {
			away = min(away, vainPoll)
		}
		p.vain += away
	}
	p.polled = at
	var pays bool
	if p.gauged {
		pays = !lost && p.gauge.way(at, completions)
	} else {
		pays = p.cost <= vainWorth && p.vain <= 4*vainWorth
	}
	if pays && at-p.last < linger {
		return true
	}
	p.ended(lost)
	return false
}

// ended notes that the queue is armed again; lost: because others want the CPU.
func (p *pace) ended(lost bool) {
	if p.finds >= paying || p.gauged && !lost {
		p.backoff /= 2
	} else {
		p.backoff = min(max(1, 2*p.backoff), maxBackoff)
	}
	p.resting, p.finds, p.vain, p.polled = p.backoff, 0, 0, 0
	if p.gauged && !lost {
		p.resting = 0
	}
}

// Adaptive polling, in units of 1/256 completion.
const (
	enterAt = 3 * perCompletion // a wake-up that finds several on average starts polling
	leaveAt = perCompletion     // one or less on average ends it
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
// no goroutine waits, as on a target, it also stays while polling costs less than the notifications it saves.
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
	tried := i.tries() && i.cfg.Linger > 0 // asked in any case: while waiters block at once nobody else asks the gauge
	polling := a.perWake >= enterAt && tried
	if polling {
		i.count.pollEntered.Add(1)
		a.perWindow = a.perWake
	}
	lingering := !polling && i.parked.Load() == 0 && tried
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
			if woken >= 0 && verdict != gone && (polling || lingering) {
				i.pace.found(at)
			}
		}
		if verdict == idle {
			if woken < 0 {
				woken = total
				i.pace.begin(at, i.waited.Load())
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
			if (polling || lingering) && (i.crowded() || !i.pays(t.work, at, int64(i.cfg.Linger))) {
				polling, lingering = false, false
			}
			lingering = lingering && i.parked.Load() == 0
			t.phase = leaving
			if polling || lingering {
				i.promise()
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
