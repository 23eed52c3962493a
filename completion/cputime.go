package completion

import "golang.org/x/sys/unix"

// processTime is the CPU time that all threads of the process have used, in ns.
func processTime() int64 {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t) != nil {
		return 0
	}
	return t.Nano()
}
