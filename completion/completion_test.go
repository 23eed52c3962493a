package completion

import (
	"fmt"
	"testing"
	"time"

	"srp-initiator/rdma/verbs"
)

// stall is how long a test waits before it calls a completion lost. Nothing in the
// package waits that long on purpose: the idle guard is a tenth of it and its firing would show in the latency checks.
const stall = 5 * time.Second

// everyMode runs f in every mode, with small, odd and large weights and budgets.
func everyMode(t *testing.T, f func(t *testing.T, cfg Config)) {
	for _, m := range Modes() {
		for _, wb := range []struct{ weight, budget int }{{1, 1}, {3, 7}, {32, 256}, {1000, 31}} {
			t.Run(fmt.Sprintf("%v/weight=%d,budget=%d", m, wb.weight, wb.budget), func(t *testing.T) {
				cfg := Config{Mode: m, Weight: wb.weight, Budget: wb.budget}
				if m == Poll {
					p, err := NewPoller(PollerConfig{Budget: wb.budget})
					if err != nil {
						t.Fatal(err)
					}
					cfg.Poller = p
				}
				f(t, cfg)
			})
		}
	}
}

// TestQueueDepthOne sends one request after the other. The device answers from another goroutine.
func TestQueueDepthOne(t *testing.T) {
	n := 20000
	if testing.Short() {
		n = 2000
	}
	everyMode(t, func(t *testing.T, cfg Config) {
		var w Waiter
		var got uint64
		i, q := open(t, 64, cfg, func(wcs []verbs.WorkCompletion) {
			for _, wc := range wcs {
				got = wc.WRID
			}
			w.Signal()
		})
		requests := make(chan uint64, 1)
		defer close(requests)
		go func() {
			for id := range requests {
				q.complete(verbs.WorkCompletion{WRID: id})
			}
		}()
		for id := uint64(1); id <= uint64(n); id++ {
			requests <- id
			if !i.Wait(&w, time.Now().Add(stall)) {
				t.Fatalf("request %d: no completion in %v; state %b, stats %+v", id, stall, i.state.word.Load(), i.Stats())
			}
			if got != id {
				t.Fatalf("completion of %d, want %d", got, id)
			}
		}
	})
}
