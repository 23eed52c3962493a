package completion

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

// TestGiveWay: a goroutine that is ready gets the only processor from one that polls, long before the runtime would take it away.
func TestGiveWay(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for range 100 {
		var ran atomic.Bool
		go ran.Store(true)
		if !othersRunnable() && !ran.Load() {
			t.Fatal("a ready goroutine is not seen")
		}
		turns := 0
		for end := time.Now().Add(stall); !ran.Load(); turns++ {
			if time.Now().After(end) {
				t.Fatal("a ready goroutine did not run")
			}
			giveWay()
		}
		if turns > 10 {
			t.Fatalf("a ready goroutine waited for %d turns", turns)
		}
	}
	if n := testing.AllocsPerRun(100, giveWay); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
