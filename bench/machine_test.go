package bench

import (
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestPinned: the report tells of the CPUs that the process has been pinned to, and only if it has been.
func TestPinned(t *testing.T) {
	runtime.LockOSThread() // and ends with the test: nobody else gets this thread
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		t.Fatal(err)
	}
	if p := pinned(all.Count()); p != "" {
		t.Errorf("pinned to %q, with all CPUs", p)
	}
	var cpus []string
	for c := range 1024 {
		if all.IsSet(c) {
			one.Zero()
			one.Set(c)
			if err := unix.SchedSetaffinity(0, &one); err != nil {
				t.Fatal(err)
			}
			cpus = append(cpus, pinned(all.Count()+1))
		}
	}
	if len(cpus) != all.Count() || len(slices.Compact(slices.Clone(cpus))) != len(cpus) || strings.Contains(strings.Join(cpus, ""), ",") {
		t.Errorf("pinned to one of %d CPUs after the other: %v", all.Count(), cpus)
	}
	m := Machine{CPUs: 2, Pinned: "1"}
	if got, want := m.cpusText(), "2 CPUs, pinned to 1"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
