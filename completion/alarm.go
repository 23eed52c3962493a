package completion

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Alarm ends a Waiter's blocked Wait at its deadline to within tens of microseconds, by a timer of the kernel (timerfd_create(2)). Go's own timers
// go off when its network poller comes back, which waits in whole milliseconds: a time.Sleep of 10 us in an idle process takes 1.1 ms.
// An Alarm serves one Wait at a time.
type Alarm struct {
	mu    sync.Mutex // held by the Wait that it serves
	fd    int
	file  *os.File // of fd, read through the network poller
	w     atomic.Pointer[Waiter]
	ended chan struct{}
}

// NewAlarm makes an Alarm. It costs a file descriptor and a goroutine until Close.
func NewAlarm() (*Alarm, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		var l unix.Rlimit
		if err == unix.EMFILE && unix.Getrlimit(unix.RLIMIT_NOFILE, &l) == nil {
			return nil, fmt.Errorf("completion: alarm: timerfd_create: %w: this process may have %d (ulimit -n)", err, l.Cur)
		}
		return nil, fmt.Errorf("completion: alarm: timerfd_create: %w", err)
	}
	a := &Alarm{fd: fd, file: os.NewFile(uintptr(fd), "timerfd"), ended: make(chan struct{})}
	go a.ring()
	return a, nil
}

// ring wakes the waiter whenever the timer has expired.
func (a *Alarm) ring() {
	defer close(a.ended)
	var expirations [8]byte
	for {
		if _, err := a.file.Read(expirations[:]); err != nil {
			return
		}
		if w := a.w.Load(); w != nil {
			w.token()
		}
	}
}

// block waits for a token of w's until left has passed. It reports whether there still was time, and returns false, having done nothing, in done if it serves
// somebody else.
func (a *Alarm) block(w *Waiter, left time.Duration) (inTime, done bool) {
	if !a.mu.TryLock() {
		return false, false
	}
	end := after(now(), left)
	a.w.Store(w)
	a.set(left)
	<-w.wake
	a.set(0)
	a.w.Store(nil)
	a.mu.Unlock()
	return now() < end, true
}

// set makes the timer expire after d, or not at all if that is 0.
func (a *Alarm) set(d time.Duration) {
	if err := unix.TimerfdSettime(a.fd, 0, &unix.ItimerSpec{Value: unix.NsecToTimespec(int64(d))}, nil); err != nil {
		panic(fmt.Sprintf("completion: alarm: timerfd_settime: %v", err)) // only for wrong arguments: who uses a closed one
	}
}

// Close ends the Alarm; a nil one there is nothing to end of. No Wait may use it any more.
func (a *Alarm) Close() {
	if a == nil {
		return
	}
	a.mu.Lock()
	a.file.Close()
	<-a.ended
}
