package main

import (
	"testing"

	"golang.org/x/sys/unix"
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
