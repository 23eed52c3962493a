package completion

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"srp-initiator/rdma/verbs"
)

// stall is how long a test waits before it calls a completion lost. Nothing in the package waits
// that long: the idle guard, the only timer, is set to an hour in these tests.
const stall = 10 * time.Second

func rounds(n int) int {
	if testing.Short() {
		return n / 10
	}
	return n
}

// everyMode runs f in every mode, with small, odd and large weights and budgets.
func everyMode(t *testing.T, f func(t *testing.T, cfg Config)) {
	for _, m := range Modes() {
		for _, wb := range []struct{ weight, budget int }{{1, 1}, {3, 7}, {32, 256}, {1000, 31}} {
			t.Run(fmt.Sprintf("%v/weight=%d,budget=%d", m, wb.weight, wb.budget), func(t *testing.T) {
				cfg := Config{Mode: m, Weight: wb.weight, Budget: wb.budget}
				if m == Poll {
					cfg.Poller = newPoller(t, PollerConfig{Budget: wb.budget})
				}
				f(t, cfg)
			})
		}
	}
}

func newPoller(t testing.TB, cfg PollerConfig) *Poller {
	t.Helper()
	p, err := NewPoller(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// device answers requests in batches of at most burst, from a goroutine of its own, and only when it
// is told to go on after each batch if held.
type device struct {
	q        *nullCQ
	requests chan uint64
	done     chan struct{}
}

func startDevice(q *nullCQ, burst int) *device {
	d := &device{q, make(chan uint64, 4096), make(chan struct{})}
	go func() {
		defer close(d.done)
		batch := make([]verbs.WorkCompletion, 0, burst)
		for id := range d.requests {
			batch = append(batch[:0], verbs.WorkCompletion{WRID: id})
		more:
			for len(batch) < burst {
				select {
				case id, ok := <-d.requests:
					if !ok {
						break more
					}
					batch = append(batch, verbs.WorkCompletion{WRID: id})
				default:
					break more
				}
			}
			q.complete(batch...)
		}
	}()
	return d
}

func (d *device) stop() {
	close(d.requests)
	<-d.done
}

// TestQueueDepthOne sends one request after the other; the answer comes from another goroutine.
func TestQueueDepthOne(t *testing.T) {
	everyMode(t, func(t *testing.T, cfg Config) {
		var w Waiter
		var got uint64
		i, q := open(t, 64, cfg, func(wcs []verbs.WorkCompletion) {
			for _, wc := range wcs {
				got = wc.WRID
			}
			w.Signal()
		})
		d := startDevice(q, 1)
		defer d.stop()
		for id := uint64(1); id <= uint64(rounds(20000)); id++ {
			d.requests <- id
			if !i.Wait(&w, time.Now().Add(stall)) {
				t.Fatalf("request %d: no completion in %v; state %b, stats %+v", id, stall, i.state.word.Load(), i.Stats())
			}
			if got != id {
				t.Fatalf("completion of %d, want %d", got, id)
			}
		}
	})
}

// jobs is a load: every job has a waiter and one request at a time; unattended requests go beside them.
type jobs struct {
	t         *testing.T
	waiters   []Waiter
	seen      []atomic.Uint64 // requests of job k that have completed
	delivered atomic.Uint64
	callbacks atomic.Uint64
	i         *Instance
}

func newJobs(t *testing.T, n int) *jobs {
	return &jobs{t: t, waiters: make([]Waiter, n), seen: make([]atomic.Uint64, n)}
}

func (j *jobs) handle(wcs []verbs.WorkCompletion) {
	j.delivered.Add(uint64(len(wcs)))
	for _, wc := range wcs {
		if k := int(wc.WRID); k < len(j.waiters) {
			j.seen[k].Add(1)
			j.waiters[k].Signal()
		} else {
			j.callbacks.Add(1)
			j.i.Unattended(-1)
		}
	}
}

// run makes every job send n requests through d.
func (j *jobs) run(d *device, n int, callbacks int) {
	var wg sync.WaitGroup
	for k := range j.waiters {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for r := 1; r <= n; r++ {
				d.requests <- uint64(k)
				if !j.i.Wait(&j.waiters[k], time.Now().Add(stall)) {
					j.t.Errorf("job %d: request %d not completed in %v; mode %v state %b armed %v parked %d stats %+v",
						k, r, stall, j.i.Mode(), j.i.state.word.Load(), j.i.armed.Load(), j.i.parked.Load(), j.i.Stats())
					return
				}
				if got := j.seen[k].Load(); got != uint64(r) {
					j.t.Errorf("job %d: %d completions after request %d", k, got, r)
					return
				}
			}
		}()
	}
	for sent := range callbacks {
		for end := time.Now().Add(stall); sent-int(j.callbacks.Load()) > 1000 && time.Now().Before(end); {
			runtime.Gosched()
		}
		j.i.Unattended(1)
		d.requests <- uint64(len(j.waiters))
		if j.callbacks.Load()%7 == 0 {
			runtime.Gosched()
		}
	}
	wg.Wait()
	for end := time.Now().Add(stall); j.callbacks.Load() < uint64(callbacks); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			j.t.Errorf("%d of %d callbacks; mode %v state %b armed %v unattended %d stats %+v", j.callbacks.Load(), callbacks,
				j.i.Mode(), j.i.state.word.Load(), j.i.armed.Load(), j.i.unattended.Load(), j.i.Stats())
			return
		}
	}
	if want := uint64(n*len(j.waiters) + callbacks); j.delivered.Load() != want {
		j.t.Errorf("%d completions delivered, want %d", j.delivered.Load(), want)
	}
}

// TestJobs has several goroutines wait on one instance, with unattended requests beside them.
func TestJobs(t *testing.T) {
	everyMode(t, func(t *testing.T, cfg Config) {
		j := newJobs(t, 9)
		i, q := open(t, 8192, cfg, j.handle)
		j.i = i
		d := startDevice(q, 5)
		defer d.stop()
		j.run(d, rounds(1500), rounds(1500))
	})
}

// TestBurstThenSilence holds answers back, releases them together and sends nothing after
// them: whoever relied on later traffic, or on a timer, would wait for ever.
func TestBurstThenSilence(t *testing.T) {
	everyMode(t, func(t *testing.T, cfg Config) {
		j := newJobs(t, 37)
		i, q := open(t, 256, cfg, j.handle)
		j.i = i
		for round := range rounds(200) {
			var wg sync.WaitGroup
			var waiting atomic.Int32
			for k := range j.waiters {
				wg.Add(1)
				go func() {
					defer wg.Done()
					waiting.Add(1)
					if !i.Wait(&j.waiters[k], time.Now().Add(stall)) {
						t.Errorf("round %d job %d: not completed in %v; stats %+v", round, k, stall, i.Stats())
					}
				}()
			}
			// Every fourth round releases while they are still arriving, every other after some have given up polling.
			switch round % 4 {
			case 0:
			case 1:
				time.Sleep(2 * DefaultAdaptiveSpin)
			case 2:
				time.Sleep(2 * DefaultDirectSpin)
			case 3:
				for int(waiting.Load()) < len(j.waiters) {
					runtime.Gosched()
				}
			}
			var burst []verbs.WorkCompletion
			for k := range j.waiters {
				burst = append(burst, verbs.WorkCompletion{WRID: uint64(k)})
			}
			q.complete(burst...)
			wg.Wait()
			if t.Failed() {
				return
			}
		}
	})
}

// TestSwitchUnderLoad changes everything that can be changed while requests run.
func TestSwitchUnderLoad(t *testing.T) {
	pollers := []*Poller{newPoller(t, PollerConfig{Budget: 7}), newPoller(t, PollerConfig{})}
	j := newJobs(t, 5)
	i, q := open(t, 8192, Config{Weight: 3, Poller: pollers[0]}, j.handle)
	j.i = i
	d := startDevice(q, 4)
	defer d.stop()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		rng := rand.New(rand.NewPCG(1, 2))
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			switch k := rng.IntN(10); {
			case k < 6:
				if err := i.SetMode(Modes()[rng.IntN(len(Modes()))]); err != nil {
					t.Error(err)
					return
				}
			case k < 8:
				i.Disable()
				before := j.delivered.Load()
				time.Sleep(time.Duration(rng.IntN(50)) * time.Microsecond)
				if after := j.delivered.Load(); after != before {
					t.Errorf("%d completions delivered while disabled", after-before)
				}
				i.Enable()
			case k < 9:
				pollers[0].SetPolling(n%2 == 0)
				pollers[1].SetPolling(n%2 == 1)
			default:
				i.Stats()
				_, err := i.Poll(2)
				if err != nil && !errors.Is(err, ErrOwned) {
					t.Error(err)
				}
			}
			if n == 300 {
				if err := pollers[0].Close(pollers[1]); err != nil {
					t.Error(err)
				}
			}
			time.Sleep(time.Duration(rng.IntN(200)) * time.Microsecond)
		}
	}()
	j.run(d, rounds(30000), rounds(30000))
	close(stop)
	<-stopped
}

// TestDisableMidTurn takes instances from owners that are in the middle of their work: what such an owner notes about
// it afterwards is the next owner's (under the race detector).
func TestDisableMidTurn(t *testing.T) {
	for _, m := range []Mode{Poll, Adaptive} {
		j := newJobs(t, 4)
		i, q := open(t, 8192, Config{Mode: m, Weight: 1, Poller: newPoller(t, PollerConfig{})}, j.handle)
		j.i = i
		d := startDevice(q, 4)
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			for {
				select {
				case <-stop:
					return
				default:
				}
				i.Disable()
				i.Enable()
				time.Sleep(5 * time.Microsecond)
			}
		}()
		j.run(d, rounds(20000), rounds(20000))
		close(stop)
		<-stopped
		d.stop()
	}
}

// TestPollersGoAway moves instances from poller to poller, and at last to their notifications, under load.
func TestPollersGoAway(t *testing.T) {
	for range rounds(50) {
		j := newJobs(t, 3)
		old := newPoller(t, PollerConfig{})
		i, q := open(t, 8192, Config{Mode: Poll, Poller: old}, j.handle)
		j.i = i
		d := startDevice(q, 3)
		done := make(chan struct{})
		go func() {
			defer close(done)
			for range 5 {
				next := newPoller(t, PollerConfig{})
				if err := old.Close(next); err != nil {
					t.Error(err)
				}
				old = next
				time.Sleep(50 * time.Microsecond)
			}
			if err := old.Close(nil); err != nil {
				t.Error(err)
			}
			if m := i.Mode(); m != Interrupt {
				t.Errorf("mode %v after the last poller closed", m)
			}
		}()
		j.run(d, 300, 300)
		<-done
		d.stop()
	}
}

// TestErrorEndsTheBatch gives the handler failed completions as the last of their call, and all that follow.
func TestErrorEndsTheBatch(t *testing.T) {
	for _, m := range Modes() {
		t.Run(m.String(), func(t *testing.T) {
			const n = 100
			var got []uint64
			done := make(chan struct{})
			i, q := open(t, 128, Config{Mode: m}, func(wcs []verbs.WorkCompletion) {
				for k, wc := range wcs {
					if wc.Status != verbs.WCSuccess && k != len(wcs)-1 {
						t.Errorf("a failed completion is number %d of %d", k, len(wcs))
					}
					got = append(got, wc.WRID)
				}
				if len(got) == n {
					close(done)
				}
			})
			i.Unattended(n)
			var burst []verbs.WorkCompletion
			for id := range uint64(n) {
				wc := verbs.WorkCompletion{WRID: id}
				if id%7 == 3 || id > 80 {
					wc.Status = verbs.WCFlushError
				}
				burst = append(burst, wc)
			}
			q.complete(burst...)
			select {
			case <-done:
			case <-time.After(stall):
				t.Fatalf("not all completions were delivered; stats %+v", i.Stats())
			}
			for k, id := range got {
				if id != uint64(k) {
					t.Fatalf("completion %d is number %d", id, k)
				}
			}
		})
	}
}

// TestDisableWins disables an instance whose queue is never empty.
func TestDisableWins(t *testing.T) {
	everyMode(t, func(t *testing.T, cfg Config) {
		var delivered atomic.Uint64
		i, q := open(t, 64, cfg, func(wcs []verbs.WorkCompletion) { delivered.Add(uint64(len(wcs))) })
		i.Unattended(1)
		q.mu.Lock()
		q.endless = true
		q.mu.Unlock()
		q.complete(verbs.WorkCompletion{})
		for range rounds(200) {
			i.Disable()
			before := delivered.Load()
			runtime.Gosched()
			if after := delivered.Load(); after != before {
				t.Fatalf("%d completions delivered while disabled", after-before)
			}
			i.Enable()
			for end := time.Now().Add(stall); delivered.Load() == before; runtime.Gosched() {
				if time.Now().After(end) {
					t.Fatalf("nothing delivered after Enable; stats %+v", i.Stats())
				}
			}
		}
		// Disable may have taken the instance from every turn so far before it was over.
		for end := time.Now().Add(stall); cfg.Mode == Poll && i.Stats().BudgetExhausted == 0 && i.Stats().TimeExhausted == 0; runtime.Gosched() {
			if time.Now().After(end) {
				t.Fatalf("no turn was ended by its budget or slice: %+v", i.Stats())
			}
		}
	})
}

// TestSharedPollerIsFair overloads two instances of one poller.
func TestSharedPollerIsFair(t *testing.T) {
	p := newPoller(t, PollerConfig{})
	var n [2]atomic.Uint64
	var both [2]*Instance
	for k := range n {
		i, q := open(t, 64, Config{Mode: Poll, Poller: p, Weight: []int{32, 31}[k]}, func(wcs []verbs.WorkCompletion) { n[k].Add(uint64(len(wcs))) })
		i.Disable() // both start together
		q.mu.Lock()
		q.endless = true
		q.mu.Unlock()
		both[k] = i
	}
	both[0].Enable()
	both[1].Enable()
	time.Sleep(100 * time.Millisecond)
	both[0].Disable()
	both[1].Disable()
	a, b := float64(n[0].Load()), float64(n[1].Load())
	share := min(a, b) / (a + b)
	t.Logf("%v and %v completions in 100 ms: the smaller share is %.2f", a, b, share)
	if !(share >= 0.3) {
		t.Errorf("%v and %v completions: the smaller share is %.2f", a, b, share)
	}
}

// TestDirectIsQuiet: who polls for itself raises no notifications.
func TestDirectIsQuiet(t *testing.T) {
	for _, m := range []Mode{Direct, Adaptive} {
		var w Waiter
		i, q := open(t, 64, Config{Mode: m, Spin: time.Minute}, func([]verbs.WorkCompletion) { w.Signal() })
		d := startDevice(q, 1)
		for range 1000 {
			d.requests <- 1
			if !i.Wait(&w, time.Now().Add(stall)) {
				t.Fatal("no completion")
			}
		}
		d.stop()
		if s := i.Stats(); s.Notifications > 20 { // what Start asked for, until the first waiter found the queue free
			t.Errorf("%v: %d notifications for 1000 requests: %+v", m, s.Notifications, s)
		}
	}
}

// TestLeaderLeavesAnEmptyQueue: a waiter leaves a queue that nobody will poll for now, neither armed nor owned, only when it has seen it
// empty. A provider may hold back what is posted between a poll that found something and the next that does not, as
// softroce does for a millisecond: what the waiter posts next would lie as long.
func TestLeaderLeavesAnEmptyQueue(t *testing.T) {
	old := lostTime
	t.Cleanup(func() { lostTime = old }) // when the instances are closed
	lostTime = int64(time.Hour)          // how much CPU time others leave is not the question
	everyMode(t, func(t *testing.T, cfg Config) {
		if !cfg.Mode.polledByWaiters() {
			return
		}
		cfg.Spin = time.Minute
		var w Waiter
		i, q := open(t, 64, cfg, func([]verbs.WorkCompletion) { w.Signal() })
		d := startDevice(q, 1)
		defer d.stop()
		quiet := 0
		for n := range 1000 {
			d.requests <- 1
			if !i.Wait(&w, time.Now().Add(stall)) {
				t.Fatal("no completion")
			}
			// The notification goroutine may be at it, or will be. Who signals the waiter may look on while the test looks.
			polls, owned := i.Stats().Polls, i.state.word.Load() != 0
			q.mu.Lock()
			polled, armed := q.polled, q.armed
			q.mu.Unlock()
			if owned || armed || i.state.word.Load() != 0 || i.Stats().Polls != polls {
				continue
			}
			quiet++
			if polled != 0 {
				t.Fatalf("request %d: left after a poll that found %d", n, polled)
			}
		}
		if quiet == 0 {
			t.Error("the queue was never left unarmed: the test shows nothing")
		}
	})
}

// TestAdaptiveEntersAndLeaves feeds many completions per wake-up, then one at a time.
func TestAdaptiveEntersAndLeaves(t *testing.T) {
	var delivered atomic.Uint64
	i, q := open(t, 4096, Config{Mode: Adaptive}, func(wcs []verbs.WorkCompletion) { delivered.Add(uint64(len(wcs))) })
	i.Unattended(1)
	burst := make([]verbs.WorkCompletion, 20)
	for range 100 {
		before := delivered.Load()
		q.complete(burst...)
		for end := time.Now().Add(stall); delivered.Load() < before+20; runtime.Gosched() {
			if time.Now().After(end) {
				t.Fatal("burst not delivered")
			}
		}
		time.Sleep(200 * time.Microsecond)
	}
	if s := i.Stats(); s.PollEntered == 0 {
		t.Errorf("never polled although wake-ups found 20 completions: %+v", s)
	}
	for range 200 {
		before := delivered.Load()
		q.complete(burst[:1]...)
		for end := time.Now().Add(stall); delivered.Load() == before; runtime.Gosched() {
			if time.Now().After(end) {
				t.Fatal("completion not delivered")
			}
		}
		time.Sleep(200 * time.Microsecond)
	}
	before := i.Stats()
	for range 50 {
		q.complete(burst[:1]...)
		time.Sleep(200 * time.Microsecond)
	}
	if s := i.Stats().Sub(before); s.PollEntered > 2 || s.Notifications < 25 {
		t.Errorf("still polls although wake-ups find one completion: %+v", s)
	}
}

// TestAdaptiveLingers: where nobody waits and there is one CPU, completions that come one by one but close together are found by polling, and not each by a
// notification of its own.
func TestAdaptiveLingers(t *testing.T) {
	const n = 2000
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	old := lostTime
	t.Cleanup(func() { lostTime = old }) // when the instances are closed
	lostTime = int64(time.Hour)          // how much CPU time others leave is not the question
	notifications := func(linger time.Duration) uint64 {
		delivered := make(chan struct{}, 1)
		i, q := open(t, 64, Config{Mode: Adaptive, Linger: linger}, func([]verbs.WorkCompletion) { delivered <- struct{}{} })
		i.Unattended(1)
		one := make([]verbs.WorkCompletion, 1)
		for range n {
			q.complete(one...)
			<-delivered
		}
		return i.Stats().Notifications
	}
	with, without := notifications(time.Second), notifications(-1)
	if with > n/2 || without < n/2 {
		t.Errorf("%d completions came with %d notifications, and without lingering with %d", n, with, without)
	}
}

// TestCrowdIsNotPolledFor: where many goroutines are blocked in Wait the queue is armed as soon as it is empty, and in mode Adaptive one more of them blocks at once.
func TestCrowdIsNotPolledFor(t *testing.T) {
	old := lostTime
	t.Cleanup(func() { lostTime = old }) // when the instances are closed
	lostTime = int64(time.Hour)          // how much CPU time others leave is not the question
	const waiting = crowdedAt - 1
	emptyPolls := func(m Mode, parked int32) uint64 {
		var delivered atomic.Uint64
		i, q := open(t, 64, Config{Mode: m, Linger: time.Second}, func(wcs []verbs.WorkCompletion) { delivered.Add(uint64(len(wcs))) })
		i.parked.Add(parked)
		i.needNotification()
		burst := make([]verbs.WorkCompletion, 4)
		for n := range uint64(100) {
			q.complete(burst...)
			for end := time.Now().Add(stall); delivered.Load() < 4*(n+1) || i.state.word.Load() != 0; runtime.Gosched() {
				if time.Now().After(end) {
					t.Fatalf("%v: burst not delivered, or the queue kept", m)
				}
			}
		}
		if spins := i.spin() > 0; m == Adaptive && spins == (parked > waiting) {
			t.Errorf("%v: with %d goroutines blocked the next one polls: %v", m, parked, spins)
		}
		return i.Stats().EmptyPolls
	}
	for _, m := range []Mode{Poll, Adaptive} {
		few, many := emptyPolls(m, waiting), emptyPolls(m, waiting+1)
		// Start looks at an empty queue.
		if many > 2 || few < 10 {
			t.Errorf("%v: %d empty polls with %d goroutines blocked, %d with %d", m, many, waiting+1, few, waiting)
		}
	}
}

// TestWeightBeginsPolling: an instance that comes to the poller because its weight was used up is polled from then on, not measured against a time long past.
func TestWeightBeginsPolling(t *testing.T) {
	i, err := New(nullDevice{}, 64, Config{Mode: Poll}, func([]verbs.WorkCompletion) {})
	if err != nil {
		t.Fatal(err)
	}
	defer i.Close()
	p, err := NewPoller(PollerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	i.pace.resting = 100
	i.CQ().(*nullCQ).complete(make([]verbs.WorkCompletion, 1)...)
	// Before Start the test is the disabler, who owns the instance.
	if work, _ := p.serve(i); work != 1 || !i.pace.begun() || i.pace.backoff != 0 {
		t.Errorf("%d completions, begun %v, backoff %d", work, i.pace.begun(), i.pace.backoff)
	}
}

// TestDeviceGone: a dead channel is reported, what is in the queue is delivered, and Close returns.
func TestDeviceGone(t *testing.T) {
	for _, m := range Modes() {
		t.Run(m.String(), func(t *testing.T) {
			failed, delivered := make(chan error, 2), make(chan int, 10)
			i, q := open(t, 64, Config{Mode: m, Failed: func(err error) { failed <- err }},
				func(wcs []verbs.WorkCompletion) { delivered <- len(wcs) })
			i.Disable()
			q.complete(make([]verbs.WorkCompletion, 5)...)
			q.channel.fail(verbs.ErrDeviceGone)
			q.mu.Lock()
			q.refused = verbs.ErrDeviceGone
			q.mu.Unlock()
			i.Enable()
			select {
			case err := <-failed:
				if !errors.Is(err, verbs.ErrDeviceGone) || !errors.Is(i.Err(), verbs.ErrDeviceGone) {
					t.Errorf("failed with %v", err)
				}
			case <-time.After(stall):
				t.Fatal("the failure was not reported")
			}
			select {
			case n := <-delivered:
				if n != 5 {
					t.Errorf("%d completions delivered, want 5", n)
				}
			case <-time.After(stall):
				t.Fatal("completions lost with the device")
			}
		})
	}
}

// TestWaitDeadline returns false at the deadline and true when the signal came first.
func TestWaitDeadline(t *testing.T) {
	for _, m := range Modes() {
		for _, hybrid := range []bool{false, true} {
			var w Waiter
			i, q := open(t, 64, Config{Mode: m, Hybrid: hybrid}, func([]verbs.WorkCompletion) { w.Signal() })
			began := time.Now()
			if i.Wait(&w, began.Add(5*time.Millisecond)) {
				t.Errorf("%v: signaled by nobody", m)
			}
			if took := time.Since(began); took < 5*time.Millisecond {
				t.Errorf("%v: gave up after %v", m, took)
			}
			w.Signal()
			w.Signal()
			if !i.Wait(&w, time.Now().Add(-time.Second)) {
				t.Errorf("%v: a pending signal is not taken", m)
			}
			for range 20 { // latencies long enough for a hybrid sleep
				go func() {
					time.Sleep(time.Millisecond)
					q.complete(verbs.WorkCompletion{})
				}()
				if !i.Wait(&w, time.Now().Add(stall)) {
					t.Errorf("%v: not signaled", m)
				}
			}
		}
	}
}

// TestFarDeadline: a deadline that is farther away than 63 bits of nanoseconds tell is one that has not passed, also for a token that comes without a signal.
func TestFarDeadline(t *testing.T) {
	a, err := NewAlarm()
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	far := time.Unix(1<<45, 0)
	for _, m := range Modes() {
		for _, alarm := range []*Alarm{nil, a} {
			var w Waiter
			w.SetAlarm(alarm)
			i, q := open(t, 64, Config{Mode: m}, func([]verbs.WorkCompletion) { w.Signal() })
			w.prepare()
			for range 20 {
				w.token()
				go q.complete(verbs.WorkCompletion{})
				if !i.Wait(&w, far) {
					t.Fatalf("%v: the deadline has passed", m)
				}
				w.token()
				go w.Signal()
				if !w.Wait(far) {
					t.Fatal("without an instance: the deadline has passed")
				}
				go w.Signal()
				if !WaitAny(&w, far, []*Instance{i, i}) {
					t.Fatalf("%v: the deadline of any has passed", m)
				}
			}
		}
	}
}

// TestPollOwned: a second goroutine is refused while the queue has an owner.
func TestPollOwned(t *testing.T) {
	i, q := open(t, 64, Config{}, func([]verbs.WorkCompletion) {})
	i.Disable()
	q.complete(verbs.WorkCompletion{})
	if n, err := i.Poll(1); n != 0 || !errors.Is(err, ErrOwned) {
		t.Errorf("Poll of a disabled instance: %d, %v", n, err)
	}
	i.Enable()
	for end := time.Now().Add(stall); i.Stats().Completions == 0; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatal("not delivered after Enable")
		}
	}
}

// TestLockedThreads runs the reaping thread and a poller on OS threads of their own.
func TestLockedThreads(t *testing.T) {
	if err := lockThreadElsewhere([]int{0}, 5); err != nil {
		t.Fatal(err)
	}
	for _, cfg := range []Config{
		{Mode: Thread, LockThread: true, CPUs: []int{0}, Nice: 1},
		{Mode: Poll, Poller: newPoller(t, PollerConfig{LockThread: true, CPUs: []int{0}, Nice: 1})},
	} {
		var w Waiter
		i, q := open(t, 64, cfg, func([]verbs.WorkCompletion) { w.Signal() })
		for range 100 {
			q.complete(verbs.WorkCompletion{})
			if !i.Wait(&w, time.Now().Add(stall)) {
				t.Fatal("no completion")
			}
		}
	}
	if i, err := New(nullDevice{}, 1, Config{Mode: Thread, LockThread: true, CPUs: []int{1023}}, func([]verbs.WorkCompletion) {}); err != nil {
		t.Error(err)
	} else {
		if err := i.Start(); err == nil {
			t.Error("a thread on CPU 1023 was accepted")
		}
		i.Close()
	}
	if _, err := New(nullDevice{}, 1, Config{Nice: 5}, func([]verbs.WorkCompletion) {}); err == nil {
		t.Error("a nice value without a thread was accepted")
	}
}

func lockThreadElsewhere(cpus []int, nice int) error {
	c := make(chan error)
	go func() { c <- lockThread(cpus, nice) }()
	return <-c
}

// TestNoAllocation: the path from the device's completion to the waiter's return allocates nothing.
func TestNoAllocation(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	for _, m := range Modes() {
		var w Waiter
		i, q := open(t, 64, Config{Mode: m, Poller: newPoller(t, PollerConfig{})}, func([]verbs.WorkCompletion) {
			w.Signal()
		})
		cycle := func() {
			i.Unattended(1)
			q.complete(verbs.WorkCompletion{})
			if !i.Wait(&w, time.Now().Add(stall)) {
				t.Fatal("no completion")
			}
			i.Unattended(-1)
		}
		cycle() // the waiter's channel and timer
		if n := testing.AllocsPerRun(2000, cycle); n != 0 {
			t.Errorf("%v: %v allocations per completion", m, n)
		}
	}
}

// TestGoroutines: what an instance starts ends with it.
func TestGoroutines(t *testing.T) {
	before := runtime.NumGoroutine()
	for range rounds(200) {
		for _, m := range Modes() {
			i, err := New(nullDevice{}, 16, Config{Mode: m}, func([]verbs.WorkCompletion) {})
			if err != nil {
				t.Fatal(err)
			}
			if err := i.Start(); err != nil {
				t.Fatal(err)
			}
			if err := i.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	for end := time.Now().Add(stall); runtime.NumGoroutine() > before; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
		}
	}
}

func TestParseMode(t *testing.T) {
	for _, m := range Modes() {
		if got, err := ParseMode(m.String()); err != nil || got != m {
			t.Errorf("ParseMode(%q) = %v, %v", m.String(), got, err)
		}
	}
	if _, err := ParseMode("napi"); err == nil {
		t.Error("ParseMode accepts napi")
	}
}

// TestWaitAny waits on two instances whose completions come from either, in every mix of modes.
func TestWaitAny(t *testing.T) {
	for _, m0 := range Modes() {
		for _, m1 := range Modes() {
			var w Waiter
			var members []*Instance
			var queues []*nullCQ
			for _, m := range []Mode{m0, m1} {
				i, q := open(t, 64, Config{Mode: m}, func([]verbs.WorkCompletion) { w.Signal() })
				members, queues = append(members, i), append(queues, q)
			}
			for n := range rounds(1000) {
				go queues[n/3%2].complete(verbs.WorkCompletion{})
				if !WaitAny(&w, time.Now().Add(stall), members) {
					t.Fatalf("%v and %v: completion %d lost; %+v %+v", m0, m1, n, members[0].Stats(), members[1].Stats())
				}
			}
			if WaitAny(&w, time.Now().Add(3*time.Millisecond), members) {
				t.Errorf("%v and %v: signaled by nobody", m0, m1)
			}
		}
	}
	var w Waiter
	cycle := func() {}
	var members []*Instance
	for range 2 {
		i, q := open(t, 64, Config{Mode: Direct}, func([]verbs.WorkCompletion) { w.Signal() })
		members = append(members, i)
		cycle = func() {
			q.complete(verbs.WorkCompletion{})
			WaitAny(&w, time.Time{}, members)
		}
	}
	cycle()
	if n := testing.AllocsPerRun(1000, cycle); n != 0 && !raceEnabled {
		t.Errorf("%v allocations per wait", n)
	}
}

// TestBatches: the handler gets DefaultBatch completions at a time, and half of what was found between two empty polls where that was more; with a Batch that
// holds all, as where there is one CPU, it gets what the weight allows.
func TestBatches(t *testing.T) {
	for _, c := range []struct {
		batch int
		want  []int
	}{
		{0, []int{16, 14, 16, 16, 16, 16, 16, 16, 4, 32, 18, 25, 5}},
		{maxBatch, []int{30, 32, 32, 32, 4, 32, 18, 30}},
	} {
		var got []int
		i, err := New(nullDevice{}, 256, Config{Batch: c.batch, Weight: 32}, func(wcs []verbs.WorkCompletion) { got = append(got, len(wcs)) })
		if err != nil {
			t.Fatal(err)
		}
		defer i.Close()
		if c.batch == 0 { // whatever CPUs there are
			i.cfg.Batch, i.batch = DefaultBatch, DefaultBatch
		}
		// Before Start the test is the disabler, who owns the instance.
		for _, n := range []int{30, 100, 50, 30} {
			i.CQ().(*nullCQ).complete(make([]verbs.WorkCompletion, n)...)
			for {
				if tn := (turn{weight: 32}); i.run(&tn) == idle {
					break
				}
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("batch %d: the handler got %v, want %v", c.batch, got, c.want)
		}
	}
}

// TestFirstAlone: the handler gets the first completion behind a notification by itself, unless many were found the last time; without a notification it
// gets all there are.
func TestFirstAlone(t *testing.T) {
	for _, m := range Modes() {
		t.Run(m.String(), func(t *testing.T) {
			cfg := Config{Mode: m, Batch: DefaultBatch, Weight: 64, Linger: -1, Spin: -1}
			if m == Poll {
				cfg.Poller = newPoller(t, PollerConfig{})
			}
			var mu sync.Mutex
			var got []int
			i, q := open(t, 256, cfg, func(wcs []verbs.WorkCompletion) {
				mu.Lock()
				got = append(got, len(wcs))
				mu.Unlock()
			})
			i.Unattended(1) // keeps the queue armed in each mode
			for _, c := range []struct {
				n     int
				woken bool // by a notification
				want  []int
			}{
				{1, true, []int{1}},
				{5, true, []int{1, 4}},
				{40, true, []int{1, 15, 16, 8}},
				{5, true, []int{5}}, // behind many
				{5, true, []int{1, 4}},
				{5, false, []int{5}},
				{5, true, []int{1, 4}},
			} {
				if c.woken {
					for !i.armed.Load() || i.state.word.Load()&owned != 0 {
						runtime.Gosched()
					}
					i.Woken()
				} else {
					i.Disable()
					i.Woken()
				}
				q.complete(make([]verbs.WorkCompletion, c.n)...)
				if !c.woken {
					i.run(&turn{weight: 64})
					i.Enable()
				}
				var now []int
				for sum := 0; sum < c.n; {
					runtime.Gosched()
					mu.Lock()
					sum, now = 0, slices.Clone(got)
					mu.Unlock()
					for _, n := range now {
						sum += n
					}
				}
				if !slices.Equal(now, c.want) {
					t.Errorf("%d completions: the handler got %v, want %v", c.n, now, c.want)
				}
				if c.woken && (!i.Woken() || i.Woken()) {
					t.Errorf("%d completions behind a notification: Woken is not true once", c.n)
				}
				mu.Lock()
				got = nil
				mu.Unlock()
			}
			// A notification whose completions somebody else has taken says nothing of the next turn.
			i.Disable()
			i.first = true
			i.run(&turn{weight: 64})
			q.complete(make([]verbs.WorkCompletion, 5)...)
			i.run(&turn{weight: 64})
			mu.Lock()
			if !slices.Equal(got, []int{5}) {
				t.Errorf("behind a notification that brought nothing: the handler got %v, want all at once", got)
			}
			mu.Unlock()
			i.Enable()
			i.Unattended(-1)
		})
	}
	for _, c := range []struct {
		from  turn
		batch int
		first bool
	}{
		{turn{phase: noting}, DefaultBatch, true},
		{turn{phase: noting}, maxBatch, false}, // one CPU: no peer could begin meanwhile
		{turn{phase: scheduling}, DefaultBatch, false},
	} {
		i, err := New(nullDevice{}, 16, Config{Batch: c.batch, Weight: 64}, func([]verbs.WorkCompletion) {})
		if err != nil {
			t.Fatal(err)
		}
		i.state.word.Store(0)
		for t := c.from; t.phase < dispatching; {
			i.step(&t)
		}
		if i.first != c.first {
			t.Errorf("phase %d, batches of %d: first %v", c.from.phase, c.batch, i.first)
		}
		i.Close()
	}
}

// TestAlarm: a Wait with an Alarm ends sooner after its deadline than by Go's timers, which are a millisecond late, also the next one, and at once for a signal; a second
// Wait by the same Alarm goes by Go's timers.
func TestAlarm(t *testing.T) {
	a, err := NewAlarm()
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	var w Waiter
	w.SetAlarm(a)
	// Beside Go's timers, in turn: how late a machine lets a thread run is its own affair.
	var late [2][]time.Duration
	for n := range 202 {
		w.SetAlarm([]*Alarm{a, nil}[n%2])
		deadline := time.Now().Add(100 * time.Microsecond)
		if w.Wait(deadline) {
			t.Fatal("signaled by nobody")
		}
		d := time.Since(deadline)
		if d < 0 {
			t.Fatalf("%v before the deadline", -d)
		}
		late[n%2] = append(late[n%2], d)
	}
	w.SetAlarm(a)
	slices.Sort(late[0])
	slices.Sort(late[1])
	if late[0][50] > late[1][50]*3/4 {
		t.Errorf("late by %v, Go's timers by %v, medians of 101", late[0][50], late[1][50])
	}
	go w.Signal()
	if began := time.Now(); !w.Wait(began.Add(time.Hour)) || time.Since(began) > time.Minute {
		t.Errorf("signaled, and %v in Wait", time.Since(began))
	}
	a.mu.Lock()
	if began := time.Now(); w.Wait(began.Add(time.Millisecond)) || time.Since(began) < time.Millisecond {
		t.Errorf("without the alarm %v in Wait", time.Since(began))
	}
	a.mu.Unlock()
	deadline := time.Now()
	if n := testing.AllocsPerRun(100, func() { w.Wait(deadline.Add(time.Since(deadline) + 50*time.Microsecond)) }); n != 0 && !raceEnabled {
		t.Errorf("%v allocations per Wait", n)
	}
}
