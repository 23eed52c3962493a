package main

import (
	"testing"

	"golang.org/x/sys/unix"

	"srp-initiator/completion"
)

func TestCPUList(t *testing.T) {
	for _, c := range []struct {
		cpus []int
		want string
	}{{nil, ""}, {[]int{3}, "3"}, {[]int{0, 1}, "0-1"}, {[]int{0, 1, 4, 6, 7, 8, 1023}, "0-1,4,6-8,1023"}} {
		var set unix.CPUSet
		for _, n := range c.cpus {
			set.Set(n)
		}
		if got := cpuList(&set); got != c.want {
			t.Errorf("%v: %q, want %q", c.cpus, got, c.want)
		}
	}
}

func TestThreadPlacementFlags(t *testing.T) {
	for _, c := range []struct {
		f  connectFlags
		ok bool
	}{
		{connectFlags{completion: "thread", lockThread: true}, true},
		{connectFlags{completion: "poll", lockThread: true, cpus: []int{0}}, true},
		{connectFlags{completion: "direct", lockThread: true}, false},
		{connectFlags{completion: "poll", cpus: []int{0}}, false},
		{connectFlags{completion: "poll", lockThread: true, cpus: []int{-1}}, false},
		{connectFlags{completion: "poll", lockThread: true, cpus: []int{100000}}, false},
	} {
		if _, err := c.f.completionConfig(); (err == nil) != c.ok || err != nil && exitCode(err) != exitUsage {
			t.Errorf("%+v: %v", c.f, err)
		}
	}
}

// A budget that was given is the poller's too, also when mode poll comes later: by --compare or by a signal.
func TestPollBudget(t *testing.T) {
	for _, mode := range completion.Modes() {
		for _, budget := range []int{0, 7} {
			f := connectFlags{completion: mode.String(), budget: budget}
			c, err := f.completionConfig()
			if err != nil {
				t.Fatal(err)
			}
			if err := f.place(&c, nil); err != nil || c.Budget != budget || (c.Poller != nil) != (budget > 0) {
				t.Errorf("%s, budget %d: %v, %+v", mode, budget, err, c)
			}
		}
	}
}
