package completion

import (
	"sync/atomic"
	"time"
)

// pace tells the owner of an instance that has become empty whether to poll on. Polling saves a notification per find and costs
// the CPU time spent in vain before it; blk-iopoll polls on regardless or not at all, and its first critic saw what that means below
// saturation: a schedule, a complete and an interrupt for every command. So the time is measured. While a find costs less of it than a
// notification does, polling goes on; where it costs more, the queue is armed at once, and polling is tried again ever more rarely.
type pace struct {
	last    int64 // when work was last found, or polling began
	polled  int64 // end of the last poll; 0: polling has not begun
	vain    int64 // ns polled in vain since work was last found
	cost    int64 // mean of vain before a find
	batch   int64 // mean completions of a find, in 1/256
	perWake int64 // mean completions that a notification brought, in 1/256
	wakes   bool  // a find wakes a goroutine that waits
	finds   int   // since polling began: notifications saved
	resting int   // notifications or waits to be served by the notification before polling is tried again
	backoff int
}

const (
	// vainWorth is what a notification costs in CPU time of both ends where a sleeping thread has to be woken on another CPU: 45 to
	// 65 us on virtual machines.
	vainWorth = int64(60 * time.Microsecond)
	// vainPoll is the most that one empty poll and the yield behind it count for: what takes longer was somebody else's work.
	vainPoll = int64(5 * time.Microsecond)

	// findWakes is the part of it that a find costs, too, where it has to wake a goroutine: all but the notification goroutine's own waking.
	findWakes = int64(40 * time.Microsecond)
	// findSaves is what each completion of a find saves besides: with both ends awake more requests and answers share a system call. Saturated,
	// at 20 completions to a notification, a command costs 4 us less.
	findSaves = int64(5 * time.Microsecond)

	perCompletion = 256 // the unit of means of completions is 1/256: what a mean over eight loses by rounding must not matter

	paying     = 8   // finds for which a stretch of polling was worth its beginning and end
	payingWake = 32  // the same where finds wake: so many show how many completions a find brings
	maxBackoff = 256 // notifications between two tries
)

// lostTime is how much time away between two polls counts in full: when others want the CPU who yields waits for all of them,
// while a notification would have been let in before them. Our own work between two polls takes less. A variable for
// the tests, which others' load would rule.
var lostTime = int64(200 * time.Microsecond)

// woken notes what a notification brought. Polling finds fewer at a time, being quicker: what it saves is that part of a notification.
func (p *pace) woken(work int) {
	p.perWake += (perCompletion*int64(min(max(work, 1), 64)) - p.perWake) / 8
}

// found notes that a poll that ended at time at found work.
func (p *pace) found(work int, at int64) {
	p.cost += (p.vain - p.cost) / 8
	p.batch += (perCompletion*int64(min(work, 64)) - p.batch) / 8
	p.vain, p.polled, p.last = 0, at, at
	p.finds++
}

// tries reports whether to poll on behind a notification, or in place of one.
func (p *pace) tries() bool {
	if p.resting > 0 {
		p.resting--
		return false
	}
	return true
}

// begin notes that polling begins, or goes on after a time that was not spent on it; wakes: by a goroutine for others, which a find has to wake.
func (p *pace) begin(at int64, wakes bool) {
	p.polled, p.last, p.wakes = at, at, wakes
	if p.finds == 0 {
		p.batch = p.perWake             // until polling shows what it finds
		p.cost = min(p.cost, p.worth()) // else it would end at once
	}
}

// begun reports whether polling has begun and not ended since.
func (p *pace) begun() bool { return p.polled != 0 }

// moved notes a poll that ended at time at and found no completion but moved packets: that is work, which waiting for a notification would not have
// saved.
func (p *pace) moved(at int64) { p.polled, p.last = at, at }

// pays is pace.pays after a poll of the instance.
func (i *Instance) pays(work int, at, linger int64) bool {
	if work == 0 && i.mover != nil && i.mover.Moved() {
		i.pace.moved(at)
	}
	return i.pace.pays(work, at, linger)
}

// pays reports whether to poll on at time at, after a poll that found the queue empty in the end, or from the beginning.
func (p *pace) pays(work int, at, linger int64) bool {
	if work == 0 {
		away := at - p.polled
		if away < lostTime {
			away = min(away, vainPoll)
		}
		p.vain += away
	}
	p.polled = at
	if worth := p.worth(); p.cost <= worth && p.vain <= 4*worth && at-p.last < linger {
		return true
	}
	p.ended()
	return false
}

// worth is the time in vain that a find is worth: that of a notification. Where goroutines have to be woken for each find, too, it is the part of that
// which a notification spends on as many completions, and what they save by coming together, less the waking.
func (p *pace) worth() int64 {
	if !p.wakes {
		return vainWorth
	}
	batch, perWake := max(p.batch, perCompletion), max(p.perWake, perCompletion)
	return max(0, vainWorth*min(batch, perWake)/perWake+findSaves*batch/perCompletion-findWakes)
}

// ended notes that the queue is armed again.
func (p *pace) ended() {
	enough := paying
	if p.wakes {
		enough = payingWake
	}
	if p.finds >= enough {
		p.backoff /= 2
	} else {
		p.backoff = min(max(1, 2*p.backoff), maxBackoff)
	}
	p.resting, p.finds, p.vain, p.polled = p.backoff, 0, 0, 0
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
	tried := i.cfg.Linger > 0 && i.pace.tries()
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
				i.pace.found(t.work, at)
			}
		}
		if verdict == idle {
			if woken < 0 {
				woken = total
				i.pace.woken(int(woken))
				i.pace.begin(at, i.parked.Load() > 0)
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
