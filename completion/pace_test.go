package completion

import (
	"testing"
	"time"

	"srp-initiator/rdma/verbs"
)

// stretch polls on: each find comes after so many empty polls, gap apart. It returns how many finds there were before polling ended.
func stretch(p *pace, at *int64, empty int, gap time.Duration, most int) int {
	p.begin(*at, false)
	for n := range most {
		for range empty {
			*at += int64(gap)
			if !p.pays(0, *at, int64(time.Second), nil) {
				return n
			}
		}
		*at += int64(10 * time.Microsecond) // our own work
		p.found(*at)
		if !p.pays(1, *at, int64(time.Second), nil) {
			return n + 1
		}
	}
	return most
}

// TestPace: where nobody waits polling goes on while a find costs less time in vain than a notification; what was others' work is
// not counted, but the CPU's being wanted is.
func TestPace(t *testing.T) {
	for _, tc := range []struct {
		name   string
		empty  int
		gap    time.Duration
		goesOn bool
	}{
		{"dense", 20, 2 * time.Microsecond, true},
		{"sparse", 40, 2 * time.Microsecond, false},
		{"one CPU: the yields are the peer's work", 1, 150 * time.Microsecond, true},
		{"others want the CPU", 1, 250 * time.Microsecond, false},
	} {
		var p pace
		at := int64(time.Second)
		n := stretch(&p, &at, tc.empty, tc.gap, 1000)
		if goesOn := n == 1000; goesOn != tc.goesOn {
			t.Errorf("%s: polling went on for %d finds of 1000", tc.name, n)
		}
	}
}

// TestPaceTriesAgain: a try that does not pay makes the next one wait for twice as many notifications, up to a bound; tries that pay halve it.
func TestPaceTriesAgain(t *testing.T) {
	var i Instance
	p := &i.pace
	at := int64(time.Second)
	rest := func() (n int) {
		for !i.tries() {
			n++
		}
		return n
	}
	for n, want := range []int{0, 1, 2, 4, 8, 16, 32, 32} {
		if got := rest(); got != want {
			t.Fatalf("try %d: waited for %d notifications, want %d", n, got, want)
		}
		stretch(p, &at, 50, 2*time.Microsecond, 10)
	}
	rest()
	for want := 16; want > 0; want /= 2 {
		if n := stretch(p, &at, 5, 2*time.Microsecond, 20); n != 20 {
			t.Fatalf("polling ended after %d finds", n)
		}
		p.ended(false)
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
