package completion

import "fmt"

// Mode says who reaps a completion queue.
type Mode uint8

const (
	Interrupt Mode = iota // in the goroutine that took the notification
	Thread                // in a dedicated reaping goroutine
	Poll                  // by a budgeted Poller
	Direct                // by the goroutine that waits
	Adaptive              // by whichever of these is cheaper just now
	modes
)

var modeNames = [modes]string{"interrupt", "thread", "poll", "direct", "adaptive"}

func (m Mode) String() string {
	if m < modes {
		return modeNames[m]
	}
	return fmt.Sprintf("Mode(%d)", uint8(m))
}

// Modes lists every mode.
func Modes() []Mode { return []Mode{Interrupt, Thread, Poll, Direct, Adaptive} }

// ParseMode reads a mode's name.
func ParseMode(s string) (Mode, error) {
	for m, name := range modeNames {
		if s == name {
			return Mode(m), nil
		}
	}
	return 0, fmt.Errorf("completion mode %q: allowed are interrupt, thread, poll, direct and adaptive", s)
}

// polledByWaiters reports whether a goroutine in Wait may own the instance.
func (m Mode) polledByWaiters() bool { return m == Direct || m == Adaptive }
