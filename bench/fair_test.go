package bench_test

import (
	"sync/atomic"
	"testing"
	"time"

	"srp-initiator/completion"
	"srp-initiator/srp"
)

// TestSessionsShareAPoller overloads two sessions that one poller serves, in this process without a wire: each always has commands to
// complete, because every one that is done is submitted again. Neither gets less than 30 % of what is done.
func TestSessionsShareAPoller(t *testing.T) {
	for _, depths := range [][2]int{{64, 64}, {64, 1024}} {
		p, err := completion.NewPoller(completion.PollerConfig{})
		if err != nil {
			t.Fatal(err)
		}
		var done [2]atomic.Int64
		var stop atomic.Bool
		var both [2]*core
		for k, depth := range depths {
			c := newCoreWith(t, depth, completion.Config{Mode: completion.Direct, IdleGuard: -1, Poller: p})
			both[k] = c
			for n := range c.cmds {
				c.cmds[n].Done = func(cmd *srp.Command) {
					done[k].Add(1)
					if !stop.Load() {
						if err := c.s.Submit(cmd); err != nil {
							t.Error(err)
						}
					}
				}
			}
			c.submit(t)
		}
		// Until now nobody reaps; both start together.
		began := time.Now()
		for _, c := range both {
			if err := c.s.SetMode(completion.Poll); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(200 * time.Millisecond)
		a, b := done[0].Load(), done[1].Load()
		took := time.Since(began)
		stop.Store(true)
		share := 100 * float64(min(a, b)) / float64(a+b)
		t.Logf("%d and %d commands in flight: %d and %d done in %v, the smaller share is %.1f %%; %+v", depths[0], depths[1], a, b, took.Round(time.Millisecond), share, p.Stats())
		if !(share >= 30) {
			t.Errorf("the smaller share is %.1f %%, want 30 %% or more", share)
		}
		for k, c := range both {
			for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
				if st := c.s.Stats().Total; st.Responses == st.Commands {
					break
				}
				if time.Now().After(end) {
					t.Fatalf("session %d: %+v", k, c.s.Stats().Total)
				}
			}
		}
	}
}
