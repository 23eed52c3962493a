package completion

import (
	"testing"
	"time"

	"srp-initiator/rdma/verbs"
)

// stretch polls on: each find brings work after so many empty polls, gap apart. It returns how many finds there were before polling ended.
func stretch(p *pace, at *int64, work, empty int, gap time.Duration, most int) int {
	p.begin(*at, p.wakes)
	for n := range most {
		for range empty {
			*at += int64(gap)
			if !p.pays(0, *at, int64(time.Second)) {
				return n
			}
		}
		*at += int64(10 * time.Microsecond) // our own work
		p.found(work, *at)
		if !p.pays(work, *at, int64(time.Second)) {
			return n + 1
		}
	}
	return most
}

// TestPace: polling goes on while a find costs less time in vain than a notification, or the share of one that the find replaces where each find
// wakes somebody too; what was others' work is not counted, but the CPU's being wanted is.
func TestPace(t *testing.T) {
	for _, tc := range []struct {
		name    string
		wakes   bool
		perWake int // completions of a notification
		work    int
		empty   int
		gap     time.Duration
		goesOn  bool
	}{
		{"dense", false, 1, 1, 20, 2 * time.Microsecond, true},
		{"sparse", false, 1, 1, 40, 2 * time.Microsecond, false},
		{"sparse with many", false, 20, 20, 40, 2 * time.Microsecond, false},
		{"one CPU: the yields are the peer's work", false, 1, 1, 1, 150 * time.Microsecond, true},
		{"others want the CPU", false, 1, 1, 1, 250 * time.Microsecond, false},
		{"wakes, one of one", true, 1, 1, 10, 2 * time.Microsecond, true},
		{"wakes, one of one, late", true, 1, 1, 15, 2 * time.Microsecond, false},
		{"wakes, as many as a notification brings", true, 4, 4, 15, 2 * time.Microsecond, true},
		{"wakes, half of it", true, 4, 2, 2, 2 * time.Microsecond, false},
		{"wakes, half of it, but many", true, 20, 10, 15, 2 * time.Microsecond, true},
		{"wakes, half of it, many, late", true, 20, 10, 25, 2 * time.Microsecond, false},
	} {
		var p pace
		at := int64(time.Second)
		for range 100 {
			p.woken(tc.perWake)
		}
		p.wakes = tc.wakes
		n := stretch(&p, &at, tc.work, tc.empty, tc.gap, 1000)
		if goesOn := n == 1000; goesOn != tc.goesOn {
			t.Errorf("%s: polling went on for %d finds of 1000", tc.name, n)
		}
	}
}

// TestPaceOfWakes: where each find wakes a goroutine, finds that only show how few completions they bring do not make a try one that paid.
func TestPaceOfWakes(t *testing.T) {
	p := pace{wakes: true}
	at := int64(time.Second)
	for range 100 {
		p.woken(3)
	}
	for n, want := range []int{0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 256} {
		got := 0
		for !p.tries() {
			got++
		}
		if got != want {
			t.Fatalf("try %d: waited for %d notifications, want %d", n, got, want)
		}
		if finds := stretch(&p, &at, 1, 2, 2*time.Microsecond, 100); finds < paying || finds == 100 {
			t.Fatalf("try %d: polling ended after %d finds: the test shows nothing", n, finds)
		}
	}
}

// TestPaceTriesAgain: a try that does not pay makes the next one wait for twice as many notifications, up to a bound; tries that pay halve it.
func TestPaceTriesAgain(t *testing.T) {
	var p pace
	at := int64(time.Second)
	rest := func() (n int) {
		for !p.tries() {
			n++
		}
		return n
	}
	for n, want := range []int{0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 256} {
		if got := rest(); got != want {
			t.Fatalf("try %d: waited for %d notifications, want %d", n, got, want)
		}
		stretch(&p, &at, 1, 50, 2*time.Microsecond, 10)
	}
	rest()
	for want := 128; want > 0; want /= 2 {
		if n := stretch(&p, &at, 1, 5, 2*time.Microsecond, 20); n != 20 {
			t.Fatalf("polling ended after %d finds", n)
		}
		p.ended()
		if got := rest(); got != want {
			t.Fatalf("waited for %d notifications after a try that paid, want %d", got, want)
		}
	}
}

// TestPaceOfMoves: polls that move packets are not in vain, however many come before a find; those behind them count from the last that did.
func TestPaceOfMoves(t *testing.T) {
	for _, moves := range []bool{true, false} {
		i, q := open(t, 64, Config{Mode: Adaptive}, func([]verbs.WorkCompletion) {})
		i.Disable() // the owner is the test
		q.moves = moves
		at := int64(time.Second)
		i.pace.begin(at, false)
		polls := 0
		for ; polls < 1000; polls++ {
			if at += int64(150 * time.Microsecond); !i.pays(0, at, int64(DefaultLinger)) {
				break
			}
		}
		if goesOn := polls == 1000; goesOn != moves {
			t.Errorf("packets moved %v: polling went on for %d polls of 1000", moves, polls)
		}
		q.moves = false
		if moves && !i.pays(0, at+int64(DefaultLinger)-1, int64(DefaultLinger)) {
			t.Error("polling ended although packets had come just before")
		}
		if moves && i.pays(0, at+int64(DefaultLinger), int64(DefaultLinger)) {
			t.Error("polling goes on without packets")
		}
		i.Enable()
	}
}

// TestLeaderPollsWhilePacketsMove: who waits in mode Adaptive does not conclude from a long message that polling is not worth it.
func TestLeaderPollsWhilePacketsMove(t *testing.T) {
	for _, moves := range []bool{true, false} {
		i, q := open(t, 64, Config{Mode: Adaptive}, func([]verbs.WorkCompletion) {})
		q.mu.Lock()
		q.moves = moves
		q.mu.Unlock()
		var w Waiter
		if i.Wait(&w, time.Now().Add(5*time.Millisecond)) {
			t.Fatal("signaled by nobody")
		}
		i.Disable()
		if gaveUp := i.pace.backoff > 0; gaveUp == moves {
			t.Errorf("packets moved %v: the leader gave up: %v", moves, gaveUp)
		}
		i.Enable()
	}
}
