package completion

// pace tells a Poller whether an instance that has become empty is worth polling on: it is
// while completions come closer together than the linger time, about what a
// notification costs. blk-iopoll completes at once, and its first critic saw what that means below
// saturation: a schedule, a complete and an interrupt for every command.
type pace struct {
	last int64 // when work was last found
	gap  int64 // mean distance between finds, ns
}

// awaitedLinger is how much longer lingering is worth it while somebody waits for a completion.
const awaitedLinger = 4

// found notes that a poll at time at had work.
func (p *pace) found(at, linger int64) {
	// One long pause must not outweigh what follows it.
	gap := min(at-p.last, 2*awaitedLinger*linger)
	p.gap += (gap - p.gap) / 4
	p.last = at
}

// lingers reports whether to go on polling at time at.
func (p *pace) lingers(at, linger int64, awaited bool) bool {
	if awaited {
		linger *= awaitedLinger
	}
	return p.gap <= linger && at-p.last < min(8*p.gap+1000, linger)
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

// serveAdaptive reaps like serveUntilEmpty; when wake-ups keep finding several completions it stays
// and polls, without notifications, until a window of Spin finds one on average, or none at all twice (the stall guard).
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
	found, lastFind, total := int64(0), began, int64(0)
	for {
		t := turn{weight: i.weight, here: true}
		verdict := i.run(&t)
		found += int64(t.work)
		total += int64(t.work)
		budget -= t.work
		at := now()
		if t.work > 0 {
			lastFind = at
		}
		if verdict == idle {
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
			t.phase = leaving
			if polling {
				t.phase = spent
			}
			verdict = i.run(&t)
		}
		if verdict == gone {
			if total == 0 {
				i.count.barren.Add(1)
			}
			if !polling {
				a.perWake += (min(total, 1024)*perCompletion - a.perWake) / 8
			}
			return
		}
		switch {
		case budget <= 0:
			i.count.budgetExhausted.Add(1)
		case at-slice >= int64(i.cfg.Slice):
			i.count.timeExhausted.Add(1)
		case polling && t.work == 0:
		default:
			continue
		}
		giveWay()
		budget, slice = i.cfg.Budget, now()
	}
}
