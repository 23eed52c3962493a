package completion

import (
	"math"
	"sync/atomic"
	"time"
)

// gauge measures which of two ways of serving an instance that has become empty costs less: to arm it at once, or to poll on. blk-iopoll polls on
// regardless or not at all, and its first critic saw what that means below saturation. What either way costs depends on the load, the
// machine, the peer, and how dear it is to wake a goroutine, so no constant can tell. Both are tried, each twice for a few milliseconds, in an order in which
// what drifts meets both:
//
//	trials: best, other, other, best -> verdict, or best, other when that is plain
//	spell:  the better way, for twice as long each time the verdict was the same, at most as long as the load is
//
// Trials of the worse way are 3 % of the time or less, and the less, the worse it is. The verdict goes by the CPU time per completion, that of the whole process:
// what it does besides costs the same in both ways. A way that gets more completions done in the same time (nobody but the queue depth
// sets the pace) may cost as much more. All methods are the owner's.
type gauge struct {
	until int64       // end of the trial, of its settling time or of the window; 0: nothing has begun
	polls bool        // the way now
	arms  atomic.Bool // the opposite, for those who come to wait; they poll until anything is known

	settling bool // the way has changed: what follows is not counted yet
	best     bool // polling is
	trial    int8 // 0 to 3; spell: no trial
	odd      int8 // windows of the spell in a row in which the load was larger, or with a minus smaller
	same     int8 // verdicts in a row
	at       int64
	work     uint64 // completions at at,
	cpu      int64  // and CPU time
	ends     int64  // of the spell
	length   int64  // of spells
	// Of these trials, arming and polling: CPU time and time in ns, completions.
	spent, took, done [2]float64
	// Means of log(polling / arming) of the CPU time per completion and of the completions per time, over the verdicts at one load.
	cost, gain float64
	rate       float64 // that load: the mean of completions per ns in the windows; 0: not known yet
}

const (
	spell       = int8(-1)
	trialTime   = int64(3 * time.Millisecond)
	settleTime  = int64(2 * time.Millisecond)   // in which a peer notices
	trialWork   = 48                            // completions that a trial must see,
	longTrial   = int64(200 * time.Millisecond) // unless it takes so long; nothing is measured where nobody asks for so long
	firstSpell  = int64(8 * time.Millisecond)
	longSpell   = int64(256 * time.Millisecond) // where the ways are equal; twelve times that where one costs twice as much
	windowTime  = int64(8 * time.Millisecond)   // between two looks at the load
	loadChanged = 1.4                           // the factor from which it is another,
	oddWindows  = 3                             // in so many windows in a row: machines stand still now and then

	// favour is what polling may cost more and is still preferred, for its answers come sooner: half of the 2 % below which nobody calls two costs different.
	favour = 0.01
	// plainly is how much dearer, as a logarithm, needs no second look.
	plainly = 0.3
	// chance is how far two rates may be apart, as a logarithm, that are the same.
	chance = 0.15
)

// way reports whether to poll on, at time at; completions is how many the instance has seen in all.
func (g *gauge) way(at int64, completions *atomic.Uint64) bool {
	if at >= g.until {
		g.turn(at, completions.Load(), processTime())
		if g.arms.Load() == g.polls {
			g.arms.Store(!g.polls)
		}
	}
	return g.polls
}

// restart forgets the trials under way: the instance has been served in another way meanwhile.
func (g *gauge) restart() { g.until = 0 }

// turn ends what was to end at time at, and begins what comes next.
func (g *gauge) turn(at int64, completions uint64, cpu int64) {
	work, took := completions-g.work, at-g.at
	switch {
	case g.until == 0 && g.same > 1 && g.trial == spell: // what was known holds for what was left of the spell
		left := g.ends - g.at
		g.beginSpell(at, completions)
		g.ends = at + left
		return
	case g.until == 0:
		g.best = g.best || g.same == 0
		g.beginTrials()
		g.settling, g.until = true, at+settleTime
		return
	case g.settling:
		g.count(at, completions, cpu)
		return
	case at-g.until > longTrial: // the load has paused: that says nothing about the way, and does not count as time of a spell
		if g.trial != spell {
			g.count(at, completions, cpu)
			return
		}
		g.ends += at - g.until
		g.at, g.work, g.until = at, completions, at+windowTime
		return
	case g.trial == spell && work < trialWork && took < longTrial:
		g.until = at + windowTime
		return
	case g.trial == spell:
		g.look(at, completions, float64(work)/float64(took))
		if g.trial == spell {
			return
		}
		g.count(at, completions, cpu)
		return
	case work < trialWork && took < longTrial:
		g.until = at + trialTime/2
		return
	case work == 0: // nobody uses it
		g.restart()
		return
	}
	w := 0
	if g.polls {
		w = 1
	}
	g.spent[w] += float64(max(0, cpu-g.cpu)) // its logarithm must be a number, whatever the clock does
	g.took[w] += float64(took)
	g.done[w] += float64(work)
	switch g.trial++; g.trial {
	case 1, 3:
		g.polls = !g.polls
		g.settling, g.until = true, at+settleTime
	case 2:
		if g.plain() {
			g.judge()
			g.beginSpell(at, completions)
			return
		}
		g.count(at, completions, cpu)
	case 4:
		g.judge()
		g.beginSpell(at, completions)
	}
}

// beginTrials begins with the way that is thought to be the better; at first with polling.
func (g *gauge) beginTrials() {
	g.trial, g.polls = 0, g.best
	g.spent, g.took, g.done = [2]float64{}, [2]float64{}, [2]float64{}
}

// count begins the part of a trial that counts.
func (g *gauge) count(at int64, completions uint64, cpu int64) {
	g.settling = false
	g.at, g.work, g.cpu, g.until = at, completions, cpu, at+trialTime
}

func (g *gauge) beginSpell(at int64, completions uint64) {
	g.trial, g.odd, g.settling, g.polls = spell, 0, false, g.best
	g.ends = at + g.length
	g.at, g.work, g.until = at, completions, at+min(windowTime, g.length)
}

// look ends a window of a spell, in which there were rate completions per ns, and the spell if it is over or the load another.
func (g *gauge) look(at int64, completions uint64, rate float64) {
	switch {
	case g.rate == 0:
		g.rate = rate
	case rate >= g.rate*loadChanged:
		g.odd = max(g.odd, 0) + 1
	case g.rate >= rate*loadChanged:
		g.odd = min(g.odd, 0) - 1
	default:
		g.odd = 0
		g.rate += (rate - g.rate) / 4
	}
	if other := g.odd >= oddWindows || g.odd <= -oddWindows; other || at >= g.ends {
		if other {
			g.same = 0
		}
		g.beginTrials()
		return
	}
	g.at, g.work, g.until = at, completions, at+windowTime
}

// rateOf is the completions per ns of a way in these trials.
func (g *gauge) rateOf(polls bool) float64 {
	if polls {
		return g.done[1] / g.took[1]
	}
	return g.done[0] / g.took[0]
}

// plain reports, after a trial of each way, that the other way is so much the dearer, as before, that a second look would only cost.
func (g *gauge) plain() bool {
	d := math.Log((g.spent[1]/g.done[1] + 1) / (g.spent[0]/g.done[0] + 1))
	if g.best {
		d = -d
	}
	return g.same > 1 && d > plainly && g.rateOf(g.best) > g.rateOf(!g.best)*(1-chance)
}

// judge says which way is the better, from these trials and those before them at the same load.
func (g *gauge) judge() {
	cost := bounded(math.Log((g.spent[1]/g.done[1] + 1) / (g.spent[0]/g.done[0] + 1)))
	gain := bounded(math.Log(g.rateOf(true) / g.rateOf(false)))
	if g.same == 0 { // nothing is known, of this load at least
		g.cost, g.gain, g.rate, g.length = cost, gain, 0, firstSpell
	} else {
		g.cost += (cost - g.cost) / 4
		g.gain += (gain - g.gain) / 4
	}
	d := dearer(g.cost, g.gain)
	if best := d < favour; best != g.best || best != (dearer(cost, gain) < favour) { // what these trials say alone may be news
		if best != g.best {
			g.rate = 0 // the way may change it
		}
		g.best, g.length = best, firstSpell
	}
	g.same = min(g.same+1, 100)
	g.length = min(2*g.length, int64(float64(longSpell)*(1+16*math.Abs(d))))
}

// dearer is how much more polling costs, as a logarithm, less what it gets done more.
func dearer(cost, gain float64) float64 {
	return cost - math.Copysign(max(0, math.Abs(gain)-chance), gain)
}

// bounded keeps one verdict, in whose trials the machine may have stood still, from outweighing the next ones.
func bounded(x float64) float64 { return min(max(x, -0.7), 0.7) }
