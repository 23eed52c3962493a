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
//	spell:  the better way, for so long that the trials of the worse one have cost little beside it
//
// The verdict goes by the CPU time per completion, that of the whole process:
// what it does besides costs the same in both ways. A way that gets more completions done in the same time (nobody but the queue depth
// sets the pace) may cost as much more. All methods are the owner's.
type gauge struct {
	until int64       // when to look again, due or before; 0: nothing has begun
	polls bool        // the way now
	arms  atomic.Bool // the opposite, for those who come to wait; they poll until anything is known

	settling bool  // the way has changed: what follows is not counted yet
	best     bool  // polling is
	trial    int8  // 0 to 3; spell: no trial
	odd      int8  // windows of the spell in a row in which the load was larger, or with a minus smaller
	same     int8  // verdicts in a row
	due      int64 // end of the trial, of its settling time or of the window
	from     usage // when what counts began
	stay     usage // when the other way began,
	stayed   usage // and what it has used
	ends     int64 // of the spell
	length   int64 // of spells
	// Of these trials, arming and polling: CPU time and time in ns, completions.
	spent, took, done [2]float64
	paces             [4]float64 // completions per ns of each
	// Means of log(polling / arming) of the CPU time per completion and of the completions per time, over the verdicts at one load.
	cost, gain float64
	rate       float64 // that load: the mean of completions per ns in its first windows; 0: not known yet
	looks      int8    // the number of these
	ran        usage   // the better way's windows in this spell: time and completions; without time: not known
	skip       int8    // windows that do not count for that
	trials     usage   // when the trials began
}

// usage is what the clocks and counters said at a time.
type usage struct {
	at   int64 // ns
	work uint64
	cpu  int64 // ns
}

const (
	spell       = int8(-1)
	trialTime   = int64(3 * time.Millisecond)
	settleTime  = int64(5 * time.Millisecond)   // in which a peer notices, and batches get as long as they will
	probeTime   = int64(time.Millisecond)       // between two looks whether the other way is far too dear
	trialWork   = 48                            // completions that a trial must see,
	longTrial   = int64(200 * time.Millisecond) // unless it takes so long; nothing is measured where nobody asks for so long
	firstSpell  = int64(32 * time.Millisecond)
	longSpell   = int64(256 * time.Millisecond) // where the ways are equal
	maxSpell    = int64(4 * time.Second)        // what a change that leaves the load as it was may go unnoticed for
	windowTime  = int64(8 * time.Millisecond)   // between two looks at the load
	loadChanged = 1.4                           // the factor from which it is another,
	allLooks    = 16                            // windows that say what the load is
	newWindows  = 2                             // that do not tell what a way gets done, in which it makes up for what the other has left undone
	oddWindows  = 3                             // in so many windows in a row: machines stand still now and then

	// exploring is what trials of the worse way may cost beside the spell that follows: a quarter of the 2 % below which nobody calls two costs different.
	exploring = 0.005
	// favour is what polling may cost more and is still preferred, for its answers come sooner: half of those 2 %.
	favour = 0.01
	// plainly is how much dearer, as a logarithm, needs no second look.
	plainly = 0.3
	// A trial of the other way ends when it has cost farTooDear times as much as the better way would have for the completions it has seen and some more.
	farTooDear = 2
	someMore   = 8
	// chance is how far two rates may be apart, as a logarithm, that are the same.
	chance = 0.15
	// verdicts is over how many of them the means go.
	verdicts = 8
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
	here := usage{at, completions, cpu}
	work, took := completions-g.from.work, at-g.from.at
	switch {
	case g.until == 0 && g.same > 1 && g.trial == spell: // what was known holds for what was left of the spell
		left := g.ends - g.from.at
		g.beginSpell(here)
		g.ends = at + left
		return
	case g.until == 0:
		g.best = g.best || g.same == 0
		g.ran = usage{}
		g.beginTrials()
		g.settle(here)
		return
	case at-g.until > longTrial: // the load has paused: that says nothing about the way, and does not count as time of a spell
		if g.trial != spell {
			g.stay, g.ran = here, usage{}
			g.count(here)
			return
		}
		g.ends += at - g.until
		g.window(here)
		return
	case g.probing() && g.farTooDear(here):
		g.add(here, g.stay, someMore)
		g.leave(here)
		g.judge(here)
		return
	case at < g.due:
		g.waitUntil(at, g.due)
		return
	case g.settling:
		g.count(here)
		return
	case g.trial == spell && work < trialWork && took < longTrial:
		g.waitUntil(at, at+windowTime)
		return
	case g.trial == spell:
		if g.skip > 0 {
			g.skip--
		} else {
			g.ran.at, g.ran.work = g.ran.at+took, g.ran.work+work
		}
		g.look(here, float64(work)/float64(took))
		if g.trial == spell {
			return
		}
		g.count(here)
		return
	case work < trialWork && took < longTrial:
		g.waitUntil(at, at+trialTime/2)
		return
	case work == 0: // nobody uses it
		g.restart()
		return
	}
	g.add(here, g.from, 0)
	g.paces[g.trial] = float64(work) / float64(took)
	switch g.trial++; g.trial {
	case 1:
		g.stay, g.polls = here, !g.polls
		g.settle(here)
	case 2:
		if g.plain() {
			g.leave(here)
			g.judge(here)
			return
		}
		g.count(here)
	case 3:
		g.leave(here)
		g.polls = !g.polls
		g.settle(here)
	case 4:
		g.judge(here)
	}
}

// probing reports whether the way that was not the better one is being tried, and there is something to compare it with.
func (g *gauge) probing() bool { return g.trial == 1 || g.trial == 2 }

// farTooDear reports whether the other way has cost so much since it began that its trials need not be waited for.
func (g *gauge) farTooDear(here usage) bool {
	b := index(g.best)
	return float64(here.cpu-g.stay.cpu) > farTooDear*g.spent[b]/g.done[b]*float64(here.work-g.stay.work+someMore)
}

// leave notes what the other way has used in its stay.
func (g *gauge) leave(here usage) {
	g.stayed = usage{here.at - g.stay.at, here.work - g.stay.work, here.cpu - g.stay.cpu}
}

// add counts what was spent since a time, and done, with a few completions more, for the way now.
func (g *gauge) add(here, since usage, more float64) {
	w := index(g.polls)
	g.spent[w] += float64(max(0, here.cpu-since.cpu)) // its logarithm must be a number, whatever the clock does
	g.took[w] += float64(here.at - since.at)
	g.done[w] += float64(here.work-since.work) + more
}

func index(polls bool) int {
	if polls {
		return 1
	}
	return 0
}

// beginTrials begins with the way that is thought to be the better; at first with polling.
func (g *gauge) beginTrials() {
	g.trial, g.polls = 0, g.best
	g.spent, g.took, g.done = [2]float64{}, [2]float64{}, [2]float64{}
}

// settle lets a way that is new settle.
func (g *gauge) settle(here usage) {
	g.settling = true
	g.waitUntil(here.at, here.at+settleTime)
}

// count begins the part of a trial that counts.
func (g *gauge) count(here usage) {
	g.settling, g.from = false, here
	g.waitUntil(here.at, here.at+trialTime)
}

// waitUntil sets when something is due.
func (g *gauge) waitUntil(at, due int64) {
	g.due, g.until = due, due
	if g.probing() {
		g.until = min(due, at+probeTime)
	}
}

func (g *gauge) beginSpell(here usage) {
	g.trial, g.odd, g.settling, g.polls = spell, 0, false, g.best
	g.ran, g.skip = usage{}, newWindows
	g.ends = here.at + g.length
	g.from = here
	g.waitUntil(here.at, here.at+min(windowTime, g.length))
}

// window begins the next look at the load.
func (g *gauge) window(here usage) {
	g.from = here
	g.waitUntil(here.at, here.at+windowTime)
}

// look ends a window of a spell, in which there were rate completions per ns, and the spell if it is over or the load another.
func (g *gauge) look(here usage, rate float64) {
	switch {
	case g.rate == 0:
		g.rate, g.looks = rate, 1
	case rate >= g.rate*loadChanged:
		g.odd = max(g.odd, 0) + 1
	case g.rate >= rate*loadChanged:
		g.odd = min(g.odd, 0) - 1
	case g.looks < allLooks:
		g.looks++
		g.rate += (rate - g.rate) / float64(g.looks)
		fallthrough
	default:
		g.odd = 0
	}
	if other := g.odd >= oddWindows || g.odd <= -oddWindows; other || here.at >= g.ends {
		if other {
			g.same, g.ran = 0, usage{}
		}
		g.beginTrials()
		g.trials = here
		return
	}
	g.window(here)
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

// judge says which way is the better, from these trials and those before them at the same load, and begins a spell of it.
func (g *gauge) judge(here usage) {
	cost := bounded(math.Log((g.spent[1]/g.done[1] + 1) / (g.spent[0]/g.done[0] + 1)))
	gain := bounded(g.gained(here))
	if g.same == 0 { // nothing is known, of this load at least
		g.cost, g.gain, g.rate, g.length = cost, gain, 0, firstSpell/2
	}
	g.same = min(g.same+1, 100)
	n := float64(min(g.same, verdicts))
	g.cost += (cost - g.cost) / n
	g.gain += (gain - g.gain) / n
	best, alone := dearer(g.cost, g.gain) < favour, dearer(cost, gain) < favour
	var repays int64
	switch {
	case best != g.best:
		g.best, g.length = best, firstSpell
		g.rate = 0 // the way may change it
	case best != alone: // what these trials say alone may be news
		g.length = max(firstSpell, g.length/4)
	default:
		g.length = min(2*g.length, longSpell)
		repays = g.repays()
	}
	g.beginSpell(here)
	g.ends = max(g.ends, here.at+repays)
}

// gained is the logarithm of how much more polling gets done in the same time. Where a rate is set, a way that has just begun falls behind, and the one after
// it makes up for that, in which the rates of their trials differ; but all trials together get done what was asked for. So what the other
// way gets done is told from what all of them did, beside the pace of the better one before. And a machine stands still now and then, which is made up for in the next
// trial or two: both trials of a way must show what it gets done more.
func (g *gauge) gained(here usage) float64 {
	if g.trial < 4 {
		return math.Log(g.rateOf(true) / g.rateOf(false))
	}
	p := &g.paces
	shown := max(0, math.Log(min(p[1], p[2])/max(p[0], p[3]))) + min(0, math.Log(max(p[1], p[2])/min(p[0], p[3])))
	if g.best {
		shown = -shown
	}
	if g.ran.at == 0 {
		return shown
	}
	took := float64(here.at - g.trials.at)
	more := float64(here.work-g.trials.work)*float64(g.ran.at)/(float64(g.ran.work)*took) - 1
	other := math.Log(max(0.1, 1+more*took/float64(g.stayed.at)))
	if g.best {
		other = -other
	}
	if other*shown <= 0 {
		return 0
	}
	return math.Copysign(min(math.Abs(other), math.Abs(shown)), other)
}

// repays is how long the better way must be kept, that the stay of the worse one has cost no more than exploring beside it, in CPU time or in completions.
func (g *gauge) repays() int64 {
	b := index(g.best)
	cpu := float64(g.stayed.cpu) - float64(g.stayed.work)*g.spent[b]/g.done[b]
	time := float64(g.stayed.at)*(1-chance) - float64(g.stayed.work)/g.rateOf(g.best)
	return int64(min(max(cpu*g.took[b]/g.spent[b], time, 0)/exploring, float64(maxSpell)))
}

// dearer is how much more polling costs, as a logarithm, less what it gets done more.
func dearer(cost, gain float64) float64 {
	return cost - math.Copysign(max(0, math.Abs(gain)-chance), gain)
}

// bounded keeps one verdict, in whose trials the machine may have stood still, from outweighing the next ones.
func bounded(x float64) float64 { return min(max(x, -0.7), 0.7) }
