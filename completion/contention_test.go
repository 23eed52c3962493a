package completion

import (
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"srp-initiator/rdma/verbs"
)

// TestBusyLoop is no test: it is what contend runs in processes of its own. It ends when its input does.
func TestBusyLoop(t *testing.T) {
	if os.Getenv("COMPLETION_BUSY_LOOP") == "" {
		return
	}
	go func() {
		io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	var spins atomic.Uint64
	for {
		spins.Add(1)
	}
}

// contend keeps the CPUs busy until the test ends: with n processes at this one's priority, and with a goroutine in this one.
func contend(t *testing.T, n int) {
	t.Helper()
	for range n {
		cmd := exec.Command(os.Args[0], "-test.run=^TestBusyLoop$")
		cmd.Env = append(os.Environ(), "COMPLETION_BUSY_LOOP=1", "GOMAXPROCS=2")
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { in.Close(); cmd.Wait() })
	}
	var stop atomic.Bool
	var spins int
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stop.Load() {
			spins++
		}
	})
	t.Cleanup(func() { stop.Store(true); wg.Wait() })
}

// share divides the time of a contention test among so many parts.
func share(parts int) time.Duration {
	if testing.Short() {
		return 2 * time.Second / time.Duration(parts)
	}
	return 30 * time.Second / time.Duration(parts)
}

// lost is what a request may take on CPUs that dozens of others want too.
const lost = time.Minute

// openSlow is open with a slow queue.
func openSlow(t testing.TB, capacity int, cfg Config, h Handler) (*Instance, *nullCQ) {
	i, q := open(t, capacity, cfg, h)
	i.Disable()
	q.slow = true
	i.Enable()
	return i, q
}

// TestContention runs both loads in which a lost wake-up has nobody to cover it, on CPUs that are never free: one request after the other, and
// bursts of held answers released together with silence after them. The only timer of the package, the idle guard, is set to an hour, and no
// other traffic comes: a completion that waited for either would fail the request after lost, a 60th of that.
func TestContention(t *testing.T) {
	contend(t, 8)
	everyMode(t, func(t *testing.T, cfg Config) {
		const n = 37
		j := newJobs(t, n)
		i, q := openSlow(t, 64, cfg, j.handle)
		j.i = i
		d := startDevice(q, 1)
		defer d.stop()
		longest, requests := time.Duration(0), 0
		wait := func(job int) bool {
			began := time.Now()
			ok := i.Wait(&j.waiters[job], began.Add(lost))
			if !ok {
				t.Errorf("job %d: not completed in %v; state %b armed %v parked %d stats %+v", job, lost, i.state.word.Load(), i.armed.Load(), i.parked.Load(), i.Stats())
			}
			longest = max(longest, time.Since(began))
			requests++
			return ok
		}
		for end := time.Now().Add(share(40)); time.Now().Before(end); {
			if requests%4 == 2 { // so late that whoever polls has given up
				time.AfterFunc(2*DefaultDirectSpin, func() { d.requests <- 0 })
			} else {
				d.requests <- 0
			}
			if !wait(0) {
				return
			}
		}
		single := requests
		burst := make([]verbs.WorkCompletion, 0, n)
		for k := range n {
			burst = append(burst, verbs.WorkCompletion{WRID: uint64(k)})
		}
		for end := time.Now().Add(share(40)); time.Now().Before(end); {
			var all sync.WaitGroup
			for k := range n {
				all.Go(func() {
					began := time.Now()
					if !i.Wait(&j.waiters[k], began.Add(lost)) {
						t.Errorf("job %d of a burst: not completed in %v; state %b armed %v parked %d stats %+v", k, lost, i.state.word.Load(), i.armed.Load(), i.parked.Load(), i.Stats())
					}
				})
			}
			switch requests++; requests % 3 {
			case 0:
				runtime.Gosched()
			case 1:
				time.Sleep(2 * DefaultDirectSpin)
			}
			q.complete(burst...)
			all.Wait()
			if t.Failed() {
				return
			}
		}
		t.Logf("%d requests one after the other, the longest took %v; %d bursts of %d", single, longest, requests-single, n)
	})
}

// TestContentionOfUnattended posts requests that nobody waits for, one after the other and in bursts, on busy CPUs.
func TestContentionOfUnattended(t *testing.T) {
	contend(t, 8)
	everyMode(t, func(t *testing.T, cfg Config) {
		done := make(chan int, 64)
		var i *Instance
		i, q := openSlow(t, 64, cfg, func(wcs []verbs.WorkCompletion) { done <- len(wcs) })
		rounds := 0
		for end := time.Now().Add(share(20)); time.Now().Before(end); rounds++ {
			n := 1 + rounds%3*18
			i.Unattended(n)
			go q.complete(make([]verbs.WorkCompletion, n)...)
			for left := n; left > 0; {
				select {
				case k := <-done:
					left -= k
				case <-time.After(lost):
					t.Fatalf("%d of %d not delivered in %v; state %b armed %v stats %+v", left, n, lost, i.state.word.Load(), i.armed.Load(), i.Stats())
				}
			}
			i.Unattended(-n)
		}
		t.Logf("%d rounds", rounds)
	})
}
