package completion

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// lockThread binds the calling goroutine to its OS thread, the thread to cpus (none: where it is) and sets its nice value.
func lockThread(cpus []int, nice int) error {
	runtime.LockOSThread()
	if len(cpus) > 0 {
		var set unix.CPUSet
		for _, c := range cpus {
			set.Set(c)
		}
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			return fmt.Errorf("completion: bind thread to CPUs %v: %w", cpus, err)
		}
	}
	if nice != 0 {
		if err := unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), nice); err != nil {
			return fmt.Errorf("completion: nice value %d (below 0 needs CAP_SYS_NICE): %w", nice, err)
		}
	}
	return nil
}

// giveWay lets other goroutines run, then other threads on this CPU: a poller that shares its CPU with
// the peer it polls for must let it work.
func giveWay() {
	runtime.Gosched()
	unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
}
