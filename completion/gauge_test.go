package completion

import (
	"math"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"srp-initiator/rdma/verbs"
)

// load is what an instance costs in each way, arming and polling.
type load struct {
	cpu  [2]float64 // ns per completion
	rate [2]float64 // completions per second
}

// bout lets a gauge decide under a load for a time: both are as they are on average, and each 100 us of them up to 40 % off. It returns how large a part of the
// time was spent polling.
func bout(g *gauge, at *int64, done *uint64, cpu *float64, l load, d time.Duration, rng *rand.Rand) float64 {
	polled, all := 0, 0
	for end := *at + int64(d); *at < end; all++ {
		w := 0
		if g.polls {
			w = 1
			polled++
		}
		*at += int64(100 * time.Microsecond)
		n := l.rate[w]*100e-6*(0.6+0.8*rng.Float64()) + rng.Float64() // rounded up or down by chance
		*done += uint64(n)
		*cpu += float64(int(n)) * l.cpu[w] * (0.6 + 0.8*rng.Float64())
		if *at >= g.until {
			g.turn(*at, *done, int64(*cpu))
		}
	}
	return float64(polled) / float64(all)
}

// TestGauge: the cheaper way is found and nearly all of the time spent on it, at high rates and low ones, and again when the load changes. What gets more done in
// the same time may cost as much more, and of equal ways it is polling.
func TestGauge(t *testing.T) {
	const k = 1000
	for _, tc := range []struct {
		name  string
		load  load
		polls bool
		waste float64 // of the time, on the other way, once the verdict is settled
	}{
		{"polling costs half", load{[2]float64{20 * k, 10 * k}, [2]float64{50 * k, 50 * k}}, true, 0.006},
		{"polling costs twice", load{[2]float64{10 * k, 20 * k}, [2]float64{50 * k, 50 * k}}, false, 0.006},
		{"polling costs a tenth more", load{[2]float64{10 * k, 11 * k}, [2]float64{100 * k, 100 * k}}, false, 0.04},
		{"polling costs a tenth less", load{[2]float64{11 * k, 10 * k}, [2]float64{100 * k, 100 * k}}, true, 0.04},
		{"equal", load{[2]float64{10 * k, 10 * k}, [2]float64{300 * k, 300 * k}}, true, 0.5},
		{"few", load{[2]float64{60 * k, 200 * k}, [2]float64{500, 500}}, false, 0.2},
		{"few, polling is cheaper", load{[2]float64{60 * k, 20 * k}, [2]float64{500, 500}}, true, 0.2},
		{"polling costs a tenth more and gets half as much more done", load{[2]float64{10 * k, 11 * k}, [2]float64{100 * k, 150 * k}}, true, 0.04},
		{"polling costs a tenth less and gets half done", load{[2]float64{11 * k, 10 * k}, [2]float64{100 * k, 50 * k}}, false, 0.04},
	} {
		var g gauge
		at, done, cpu, rng := int64(time.Second), uint64(0), 0.0, rand.New(rand.NewPCG(1, 2))
		bout(&g, &at, &done, &cpu, tc.load, 2*time.Second, rng)
		part := bout(&g, &at, &done, &cpu, tc.load, 20*time.Second, rng)
		if !tc.polls {
			part = 1 - part
		}
		if part < 1-tc.waste {
			t.Errorf("%s: %.3f of the time on the right way, want %.3f", tc.name, part, 1-tc.waste)
		}
		// The opposite at another rate.
		other := load{[2]float64{tc.load.cpu[1], tc.load.cpu[0]}, [2]float64{1.8 * tc.load.rate[1], 1.8 * tc.load.rate[0]}}
		if tc.name == "equal" {
			continue
		}
		bout(&g, &at, &done, &cpu, other, time.Second, rng)
		if part = bout(&g, &at, &done, &cpu, other, 10*time.Second, rng); tc.polls {
			part = 1 - part
		}
		if part < 1-tc.waste-0.03 {
			t.Errorf("%s, then the opposite: %.3f of the time on the right way, want %.3f", tc.name, part, 1-tc.waste)
		}
	}
}

// TestGaugeOfALimitedLoad: where a rate is set, and arming falls behind when it has just begun, what polling catches up is no gain. Where arming
// stays behind polling has to make up for it.
func TestGaugeOfALimitedLoad(t *testing.T) {
	for _, keepsUp := range []bool{true, false} {
		var g gauge
		at, done, cpu, rng := int64(time.Second), uint64(0), 0.0, rand.New(rand.NewPCG(1, 2))
		const rate = 130000.0
		behind, armed, polled := 0.0, 0, 0
		for k := range 200000 {
			if k == 20000 {
				polled = 0
			}
			armed++
			could := 0.75 * rate
			if armed > 200 && keepsUp {
				could = 1.1 * rate
			}
			if g.polls {
				armed, could = 0, 2*rate
				polled++
			}
			gets := min(could, rate+behind/100e-6)
			behind += (rate - gets) * 100e-6
			bout(&g, &at, &done, &cpu, load{[2]float64{6000, 6700}, [2]float64{gets, gets}}, 100*time.Microsecond, rng)
		}
		if part := float64(polled) / 180000; part > 0.1 && keepsUp {
			t.Errorf("%.3f of the time polling, for more CPU time and no gain", part)
		}
		if late := behind / rate; late > 0.1 {
			t.Errorf("arming keeps up %v: %.3f s behind in the end", keepsUp, late)
		}
	}
}

// TestGaugeExploresForLittle: from the first second on the trials cost less than 2 % more CPU time than the better way alone, at any rate, also where polling takes the
// whole CPU whatever there is to find.
func TestGaugeExploresForLittle(t *testing.T) {
	for _, tc := range []struct {
		name   string
		rate   float64 // completions per second
		arming float64 // CPU time per completion
		busy   float64 // part of a CPU that polling takes; 0: it costs polling per completion
		cost   float64
	}{
		{"polling takes the CPU, 1,000/s", 1000, 40000, 1, 0},
		{"polling takes the CPU, 5,000/s", 5000, 40000, 1, 0},
		{"polling takes the CPU, 20,000/s", 20000, 18000, 1, 0},
		{"polling takes half a CPU, 20,000/s", 20000, 18000, 0.5, 0},
		{"arming costs three times as much", 50000, 13000, 0, 5000},
		{"arming costs five times as much", 10000, 25000, 0, 5000},
		{"arming costs a tenth more", 100000, 7700, 0, 7000},
	} {
		var g gauge
		at, done, cpu, rng := int64(time.Second), uint64(0), 0.0, rand.New(rand.NewPCG(1, 2))
		step := func() {
			polling := tc.cost
			if tc.busy > 0 {
				polling = tc.busy * 1e9 / tc.rate
			}
			l := load{[2]float64{tc.arming, polling}, [2]float64{tc.rate, tc.rate}}
			before := done
			bout(&g, &at, &done, &cpu, l, 100*time.Microsecond, rng)
			if g.polls && tc.busy > 0 { // whatever it has found
				cpu += tc.busy*100e3 - float64(done-before)*polling
			}
		}
		for range 10000 {
			step()
		}
		begun, before := cpu, done
		for range 200000 {
			step()
		}
		better := min(tc.arming, tc.cost)
		if tc.busy > 0 {
			better = tc.arming
		}
		if more := (cpu-begun)/(better*float64(done-before)) - 1; more > 0.02 {
			t.Errorf("%s: %.1f %% more CPU time than the better way", tc.name, 100*more)
		}
	}
}

// TestGaugeFollowsADrift: a load that grows so slowly that no window differs from those before it is tried again before it has doubled.
func TestGaugeFollowsADrift(t *testing.T) {
	var g gauge
	at, done, cpu, rng := int64(time.Second), uint64(0), 0.0, rand.New(rand.NewPCG(1, 2))
	bout(&g, &at, &done, &cpu, load{[2]float64{10000, 30000}, [2]float64{50000, 50000}}, 2*time.Second, rng)
	known := g.same
	for k := range 400 {
		rate := 50000 * math.Pow(2, float64(k)/400)
		bout(&g, &at, &done, &cpu, load{[2]float64{10000, 30000}, [2]float64{rate, rate}}, 10*time.Millisecond, rng)
		if g.same < known {
			return
		}
		known = g.same
	}
	t.Error("a load that doubled in 4 s was not noticed")
}

// TestGaugeAverages: where what a trial says is off by two fifths either way, a difference of a tenth is still found, over several.
func TestGaugeAverages(t *testing.T) {
	var g gauge
	at, done, cpu, rng := int64(time.Second), uint64(0), 0.0, rand.New(rand.NewPCG(1, 2))
	polled := 0.0
	const blocks = 10000
	for range blocks {
		off := 0.6 + 0.8*rng.Float64()
		l := load{[2]float64{10000 * off, 11000 * off}, [2]float64{50000, 50000}}
		polled += bout(&g, &at, &done, &cpu, l, 4*time.Millisecond, rng) / blocks
	}
	if polled > 0.07 {
		t.Errorf("%.3f of the time polling, for a tenth more", polled)
	}
}

// TestGaugeOfAPauseInAStay: what the process does in a pause of the load is not put down to the way that was just being tried.
func TestGaugeOfAPauseInAStay(t *testing.T) {
	for _, counted := range []bool{false, true} {
		var g gauge
		at, done, cpu, rng := int64(time.Second), uint64(0), 0.0, rand.New(rand.NewPCG(1, 2))
		l := load{[2]float64{10000, 10000}, [2]float64{50000, 50000}}
		for g.trial != 1 || g.settling == counted {
			bout(&g, &at, &done, &cpu, l, 100*time.Microsecond, rng)
		}
		at, cpu = at+int64(time.Second), cpu+50e6
		bout(&g, &at, &done, &cpu, l, 1500*time.Microsecond, rng)
		if g.trial != 1 || g.settling {
			t.Errorf("paused when counting had begun %v: trial %d, settling %v, want trial 1 to begin again", counted, g.trial, g.settling)
		}
	}
}

// TestGaugeFindsChangedCosts: at the same rate of completions a change of what the ways cost is noticed by the trials that go on.
func TestGaugeFindsChangedCosts(t *testing.T) {
	var g gauge
	at, done, cpu, rng := int64(time.Second), uint64(0), 0.0, rand.New(rand.NewPCG(1, 2))
	rates := [2]float64{50000, 50000}
	bout(&g, &at, &done, &cpu, load{[2]float64{20000, 10000}, rates}, 10*time.Second, rng)
	bout(&g, &at, &done, &cpu, load{[2]float64{10000, 20000}, rates}, 10*time.Second, rng)
	if part := bout(&g, &at, &done, &cpu, load{[2]float64{10000, 20000}, rates}, 10*time.Second, rng); part > 0.02 {
		t.Errorf("%.3f of the time polling, ten seconds after it had become the dearer way", part)
	}
	// Also where a spell has to repay a try that took the whole CPU for very little.
	g, rates = gauge{}, [2]float64{300, 300}
	bout(&g, &at, &done, &cpu, load{[2]float64{10000, 3e6}, rates}, 10*time.Second, rng)
	bout(&g, &at, &done, &cpu, load{[2]float64{20000, 10000}, rates}, 40*time.Second, rng)
	if part := bout(&g, &at, &done, &cpu, load{[2]float64{20000, 10000}, rates}, 20*time.Second, rng); part < 0.8 {
		t.Errorf("%.3f of the time polling, forty seconds after it had become the cheaper way", part)
	}
}

// TestGaugeOfStandstills: a machine that stands still now and then does not make the gauge try the dearer way more often.
func TestGaugeOfStandstills(t *testing.T) {
	var g gauge
	at, done, cpu, rng := int64(time.Second), uint64(0), 0.0, rand.New(rand.NewPCG(1, 2))
	l := load{[2]float64{10000, 20000}, [2]float64{50000, 50000}}
	bout(&g, &at, &done, &cpu, l, 2*time.Second, rng)
	var part float64
	for range 100 {
		part += bout(&g, &at, &done, &cpu, l, 100*time.Millisecond, rng) / 100
		at += int64(20 * time.Millisecond)
		if at >= g.until {
			g.turn(at, done, int64(cpu))
		}
	}
	if part > 0.03 {
		t.Errorf("%.3f of the time polling", part)
	}
}

// TestGaugeOfPauses: where the load comes in bursts, as short as the trials take, pauses of any length between them, in which the process does something else,
// make neither a verdict wrong nor the bursts trials.
func TestGaugeOfPauses(t *testing.T) {
	for _, pause := range []time.Duration{500 * time.Millisecond, 10 * time.Second, 5 * time.Hour} {
		for _, polls := range []bool{true, false} {
			l := load{[2]float64{10000, 20000}, [2]float64{50000, 50000}}
			if polls {
				l.cpu = [2]float64{20000, 10000}
			}
			var g gauge
			at, done, cpu, rng := int64(time.Second), uint64(0), 0.0, rand.New(rand.NewPCG(1, 2))
			part, wrong := 0.0, 0
			for n := range 300 {
				p := bout(&g, &at, &done, &cpu, l, time.Duration((0.5+rng.Float64())*20e6), rng)
				if n >= 100 {
					part += p / 200
					if g.best != polls {
						wrong++
					}
				}
				d := (0.5 + rng.Float64()) * float64(pause)
				at += int64(d)
				cpu += d / 20
			}
			if !polls {
				part = 1 - part
			}
			if wrong > 0 || part < 0.95 {
				t.Errorf("pauses of %v, polling is right %v: %d of 200 verdicts wrong, %.3f of the time on the right way", pause, polls, wrong, part)
			}
		}
	}
}

// TestGaugeOfFalseClocks: a CPU clock that stands still, or falls back now and then, does not keep the gauge from working once it is right.
func TestGaugeOfFalseClocks(t *testing.T) {
	for _, fall := range []float64{0, 1e9} {
		var g gauge
		at, done, cpu, rng := int64(time.Second), uint64(0), 0.0, rand.New(rand.NewPCG(1, 2))
		l := load{[2]float64{20000, 10000}, [2]float64{50000, 50000}}
		still := l
		if fall == 0 {
			still.cpu = [2]float64{}
		}
		for range 300 {
			bout(&g, &at, &done, &cpu, still, 9*time.Millisecond, rng)
			cpu -= fall
		}
		if math.IsNaN(g.cost) || g.length < firstSpell {
			t.Errorf("fall %v: log of costs %v, spells of %v", fall, g.cost, time.Duration(g.length))
		}
		bout(&g, &at, &done, &cpu, l, 10*time.Second, rng)
		if part := bout(&g, &at, &done, &cpu, l, 10*time.Second, rng); part < 0.95 {
			t.Errorf("fall %v: %.3f of the time polling, which is the cheaper", fall, part)
		}
	}
}

// TestGaugeOfOneStandstill: a trial during which the machine stood still does not rule the verdicts behind it for long.
func TestGaugeOfOneStandstill(t *testing.T) {
	var g gauge
	at, done, cpu, rng := int64(time.Second), uint64(0), 0.0, rand.New(rand.NewPCG(1, 2))
	l := load{[2]float64{10000, 12000}, [2]float64{50000, 50000}}
	bout(&g, &at, &done, &cpu, l, 200*time.Millisecond, rng)
	for g.polls || g.trial == spell || g.settling { // to a trial of arming, which loses most of its time
		bout(&g, &at, &done, &cpu, l, 100*time.Microsecond, rng)
	}
	at += int64(100 * time.Millisecond)
	if part := bout(&g, &at, &done, &cpu, l, 400*time.Millisecond, rng); part > 0.35 {
		t.Errorf("%.2f of the next 0.4 s polling, for a fifth more", part)
	}
}

// TestGaugeRestarts: after another mode what was known holds, without a trial; what is not known yet is tried.
func TestGaugeRestarts(t *testing.T) {
	var g gauge
	at, done, cpu, rng := int64(time.Second), uint64(0), 0.0, rand.New(rand.NewPCG(1, 2))
	l := load{[2]float64{10000, 20000}, [2]float64{50000, 50000}}
	if part := bout(&g, &at, &done, &cpu, l, 30*time.Millisecond, rng); part < 0.2 || part > 0.8 {
		t.Errorf("%.2f of the first 30 ms polling: no trials", part)
	}
	bout(&g, &at, &done, &cpu, l, 2*time.Second, rng)
	if g.trial != spell {
		bout(&g, &at, &done, &cpu, l, 50*time.Millisecond, rng)
	}
	at, done, cpu = at+int64(time.Second), done+1e6, cpu+1e9 // served in another mode
	g.restart()
	left := time.Duration(g.ends - g.from.at)
	if part := bout(&g, &at, &done, &cpu, l, left-10*time.Millisecond, rng); part > 0 {
		t.Errorf("%.3f of the next %v polling, what was left of the spell", part, left)
	}
	if part := bout(&g, &at, &done, &cpu, l, 40*time.Millisecond, rng); part == 0 {
		t.Errorf("no trial after that")
	}
}

// TestWaitersFollowTheGauge: in mode Adaptive who comes to wait blocks at once while the verdict is to arm, and polls while it is not.
func TestWaitersFollowTheGauge(t *testing.T) {
	i, _ := open(t, 64, Config{Mode: Adaptive}, func([]verbs.WorkCompletion) {})
	var w Waiter
	wait := func() uint64 {
		before := i.Stats().Leads
		i.Wait(&w, time.Now().Add(time.Millisecond))
		return i.Stats().Leads - before
	}
	polled := uint64(0)
	for n := 0; n < 1000 && polled == 0; n++ { // while Start's look at the queue lasts, a waiter only follows
		polled = wait()
	}
	if polled == 0 {
		t.Error("nobody polled before anything was known")
	}
	i.Disable() // nobody asks the gauge meanwhile
	g := &i.pace.gauges[Adaptive]
	g.polls, g.until = false, math.MaxInt64
	g.arms.Store(true)
	i.Enable()
	if n := wait(); n != 0 {
		t.Errorf("%d waiters polled against the verdict", n)
	}
}

// TestBlockedWaitersMoveTheGauge: while waiters block at once, notifications alone move the gauge, whether or not the instance lingers: else a trial of arming
// would never end.
func TestBlockedWaitersMoveTheGauge(t *testing.T) {
	for _, linger := range []time.Duration{0, -1} {
		var w Waiter
		i, q := open(t, 64, Config{Mode: Adaptive, Linger: linger}, func([]verbs.WorkCompletion) { w.Signal() })
		i.waited.Store(true)
		arms := &i.pace.gauges[Adaptive].arms
		arms.Store(true)
		for n := 0; arms.Load(); n++ {
			if n == 100 {
				t.Fatalf("linger %v: waiters block for ever", linger)
			}
			q.complete(verbs.WorkCompletion{})
			if !i.Wait(&w, time.Now().Add(stall)) {
				t.Fatal("a completion was left waiting")
			}
		}
	}
}

// TestGaugeOfStints: an instance that is in the mode for 70 ms at a time, as in a comparison of short rounds, spends no more of it on trials than one that stays.
func TestGaugeOfStints(t *testing.T) {
	var g gauge
	at, done, cpu, rng := int64(time.Second), uint64(0), 0.0, rand.New(rand.NewPCG(1, 2))
	l := load{[2]float64{10000, 15000}, [2]float64{50000, 50000}}
	var part float64
	const stints, learning = 300, 50
	for n := range stints {
		p := bout(&g, &at, &done, &cpu, l, 70*time.Millisecond, rng)
		if n >= learning {
			part += p / (stints - learning)
		}
		at, done, cpu = at+int64(70*time.Millisecond), done+3500, cpu+35e6
		g.restart()
	}
	if part > 0.02 {
		t.Errorf("%.3f of the time polling", part)
	}
	if g.same < 10 {
		t.Errorf("%d verdicts", g.same)
	}
}

// TestGaugeLooksOnce: where the other way is plainly the dearer again, it is tried once, else twice.
func TestGaugeLooksOnce(t *testing.T) {
	for _, c := range []struct {
		cpu  [2]float64
		once bool
	}{
		{[2]float64{10000, 25000}, true}, {[2]float64{25000, 10000}, true}, {[2]float64{10000, 10500}, false}, {[2]float64{10500, 10000}, false},
	} {
		var g gauge
		at, done, cpu, rng := int64(time.Second), uint64(0), 0.0, rand.New(rand.NewPCG(1, 2))
		l := load{c.cpu, [2]float64{50000, 50000}}
		step := func() { bout(&g, &at, &done, &cpu, l, 100*time.Microsecond, rng) }
		bout(&g, &at, &done, &cpu, l, 3*time.Second, rng)
		for g.trial != spell {
			step()
		}
		for g.trial == spell {
			step()
		}
		best, other := g.best, time.Duration(0)
		for ; g.trial != spell; step() {
			if g.polls != best {
				other += 100 * time.Microsecond
			}
		}
		if once := other < 7*time.Millisecond; once != c.once {
			t.Errorf("%v: the other way for %v", c.cpu, other)
		}
	}
}

// TestGaugeIsTheModes: what was learnt in one mode does not rule another.
func TestGaugeIsTheModes(t *testing.T) {
	i, _ := open(t, 64, Config{Mode: Adaptive}, func([]verbs.WorkCompletion) {})
	g := i.pace.gauge
	if err := i.SetMode(Poll); err != nil {
		t.Fatal(err)
	}
	if i.pace.gauge == g {
		t.Error("mode poll goes by adaptive's verdict")
	}
}

// TestGaugeAllocatesNothing and is cheap while nothing ends.
func TestGaugeAllocatesNothing(t *testing.T) {
	var g gauge
	var done atomic.Uint64
	at := int64(time.Second)
	if n := testing.AllocsPerRun(10000, func() {
		at += int64(10 * time.Microsecond)
		done.Add(3)
		g.way(at, &done)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestGaugeWaitsForWork: a trial says nothing before it has seen some completions, and nothing at all where there are none.
func TestGaugeWaitsForWork(t *testing.T) {
	var g gauge
	at := int64(time.Second)
	g.turn(at, 0, 0) // begins
	at = g.until
	g.turn(at, 0, 0) // settled
	at = g.until
	g.turn(at, trialWork-1, 1e6)
	if g.trial != 0 || g.done[1] != 0 {
		t.Errorf("a trial of %d completions in %v was counted", trialWork-1, time.Duration(trialTime))
	}
	if at = g.until; at > int64(time.Second)+int64(20*time.Millisecond) {
		t.Errorf("the next look is only %v later", time.Duration(at)-time.Second)
	}
	g.turn(at, trialWork, 1e6)
	if g.trial != 1 || g.done[1] != trialWork {
		t.Errorf("trial %d, %v completions: one that had seen %d was not counted", g.trial, g.done[1], trialWork)
	}
	for range 1000 {
		at += int64(longTrial)
		g.turn(at, trialWork, 1e6)
	}
	if g.same != 0 {
		t.Errorf("%d verdicts without a completion", g.same)
	}
}

// TestGainIsShownTwice: what only one of a way's trials got done more, or only all trials together, was made up for after a standstill; that is no gain.
func TestGainIsShownTwice(t *testing.T) {
	const ms = int64(time.Millisecond)
	for _, c := range []struct {
		paces [4]float64 // best, other, other, best
		work  uint64     // in all of the 20 ms of trials, where the better way would have done 2,000
		want  float64    // of the other way
	}{
		{[4]float64{1, 1.5, 1.5, 1}, 2500, 0.405},
		{[4]float64{1, 1.5, 1.8, 1.1}, 2500, math.Log(1.5 / 1.1)},
		{[4]float64{1, 1.5, 1, 1}, 2500, 0},
		{[4]float64{1, 1, 1.5, 1}, 2500, 0},
		{[4]float64{1, 1.5, 1.5, 1.5}, 2500, 0},
		{[4]float64{1, 1.5, 1.5, 1}, 2000, 0},
		{[4]float64{1, 1.5, 1.5, 1}, 2200, math.Log(1.2)},
		{[4]float64{1, 0.5, 0.6, 1}, 1000, math.Log(0.6)},
		{[4]float64{1, 0.5, 1, 1}, 1000, 0},
		{[4]float64{1, 0.5, 0.5, 0.4}, 1000, 0},
		{[4]float64{1, 0.5, 0.5, 1}, 2500, 0},
	} {
		for _, best := range []bool{false, true} {
			g := gauge{trial: 4, best: best, paces: c.paces, ran: usage{at: 100 * ms, work: 10000}, stayed: usage{at: 10 * ms}, trials: usage{at: 1000 * ms, work: 50000}}
			want := c.want
			if best {
				want = -want
			}
			if got := g.gained(usage{at: 1020 * ms, work: 50000 + c.work}); math.Abs(got-want) > 0.001 {
				t.Errorf("paces %v, %d in all, polling is best: %v: polling gains %.3f, want %.3f", c.paces, c.work, best, got, want)
			}
		}
	}
}
