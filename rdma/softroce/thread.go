package softroce

import (
	"encoding/binary"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/verbs"
)

// waitThread is WaitThread on a link with a descriptor: the thread blocks in poll(2) on the socket itself and on the channel's eventfd, and drives
// the device when packets come. One thread of a device watches the socket; others, and a thread whose
// queue somebody else fills, are woken by their eventfd.
func (ch *channel) waitThread(s descriptor, events []verbs.CompletionQueue, timeout time.Duration) (int, error) {
	d := ch.d
	if err := ch.enterThread(); err != nil {
		return 0, err
	}
	defer ch.leaveThread()
	ch.served.Store(true)
	var deadline time.Time
	if timeout >= 0 {
		deadline = time.Now().Add(timeout)
	}
	for {
		// Who comes first watches the socket, unless somebody polls on. poll(2) tells what is there already as well as what comes.
		d.mu.Lock()
		leader := d.drivers == 0 && d.lead()
		wait := time.Duration(-1)
		ch.dozes.Store(!leader)
		// Timers are the pump's; only with packets left unsent is it quicker to look again oneself.
		if leader && d.tx.stalled() {
			wait = watchdog
		}
		d.unlock()
		if n, done, err := ch.collect(events, onEvent); done {
			if leader {
				d.leave(false)
			}
			return n, err
		}
		if !deadline.IsZero() {
			left := max(time.Until(deadline), 0)
			if wait < 0 || left < wait {
				wait = left
			}
		}
		fds := [2]unix.PollFd{{Fd: int32(ch.event), Events: unix.POLLIN}, {Fd: int32(s.FD()), Events: unix.POLLIN}}
		n := 1
		if leader {
			n = 2
		}
		var ts *unix.Timespec
		if wait >= 0 {
			v := unix.NsecToTimespec(int64(wait))
			ts = &v
		}
		_, err := unix.Ppoll(fds[:n], ts, nil)
		if fds[0].Revents != 0 {
			var b [8]byte
			unix.Read(ch.event, b[:])
		}
		ch.awake()
		if leader {
			d.leave(fds[1].Revents != 0 || wait == watchdog)
		}
		if err != nil && err != unix.EINTR {
			return 0, err
		}
		if !deadline.IsZero() && !time.Now().Before(deadline) {
			n, _, err := ch.collect(events, onSignal)
			return n, err
		}
	}
}

// enterThread makes the eventfd that wakes the thread, which lives as long as the channel.
func (ch *channel) enterThread() error {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	if ch.event < 0 {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			return fmt.Errorf("softroce: eventfd: %w", err)
		}
		ch.event = fd
	}
	ch.threadIn = true
	return nil
}

func (ch *channel) leaveThread() {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	ch.threadIn = false
	ch.dozes.Store(false)
	ch.waits = onSignal
	ch.closeEvent()
}

// closeEvent closes the eventfd of a channel that has ended, unless a thread still looks at it. ch.mu is held.
func (ch *channel) closeEvent() {
	if ch.closed && !ch.threadIn && ch.event >= 0 {
		unix.Close(ch.event)
		ch.event = -1
	}
}

// signalEvent makes an eventfd readable.
func signalEvent(fd int) {
	if fd >= 0 {
		var b [8]byte
		binary.NativeEndian.PutUint64(b[:], 1)
		unix.Write(fd, b[:])
	}
}
