package completion

import (
	"fmt"
	"runtime"
	"runtime/metrics"
	"sync/atomic"

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

// runnable asks the runtime how many goroutines wait for a processor. Whoever asks has taken the flag: metrics.Read makes who
// comes second wait.
var runnable = struct {
	asked  atomic.Bool
	sample []metrics.Sample
}{sample: []metrics.Sample{{Name: "/sched/goroutines/runnable:goroutines"}}}

// giveWay lets other goroutines run, then other threads on this CPU: a poller that shares its CPU with
// the peer it polls for must let it work. It goes to the Go scheduler only when a goroutine waits for that: a Gosched with
// nobody to run wakes an idle thread on another CPU all the same, which takes the poller along. A process
// with one processor has no such thread, and its timers run only when the scheduler does.
func giveWay() {
	if runtime.GOMAXPROCS(0) == 1 || othersRunnable() {
		runtime.Gosched()
	}
	unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
}

func othersRunnable() bool {
	if !runnable.asked.CompareAndSwap(false, true) {
		return false // another poller is asking
	}
	metrics.Read(runnable.sample)
	v := runnable.sample[0].Value
	some := v.Kind() != metrics.KindUint64 || v.Uint64() > 0
	runnable.asked.Store(false)
	return some
}
