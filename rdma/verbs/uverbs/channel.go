package uverbs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/verbs"
)

var noDeadline, longAgo = time.Time{}, time.Unix(1, 0)

// channel is a completion channel. Its file is non-blocking and in Go's poller.
//
//	event -> kernel queues 8 bytes (the queue's user handle) -> Wait or WaitThread reads them -> the
//	queue found under that handle -> the caller's events
//
// Wake sets woken and then disturbs both kinds of sleep: a past read deadline for
// the poller, an eventfd for ppoll. A sleeper clears the disturbance first and looks at woken after, so none is lost.
type channel struct {
	ctx  *Context
	file *os.File
	fd   int // file's number, for ppoll and read in WaitThread

	woken  atomic.Bool
	closed atomic.Bool

	waiting sync.Mutex // held while in Wait or WaitThread; guards buf, poll
	buf     [8]byte    // struct ib_uverbs_comp_event_desc
	poll    [2]unix.PollFd

	mu     sync.Mutex
	wakeFD int                         // eventfd, -1 after Close; guarded by mu
	cqs    map[uint64]*completionQueue // by user handle; guarded by mu
}

// CreateCompletionChannel implements verbs.Context.
func (c *Context) CreateCompletionChannel() (verbs.CompletionChannel, error) {
	fd, err := c.k.CreateCompChannel()
	if err != nil {
		return nil, c.fail("create completion channel", err)
	}
	f, err := pollable(fd, "uverbs-completion")
	if err != nil {
		return nil, c.fail("completion channel", err)
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		f.Close()
		return nil, c.fail("completion channel", err)
	}
	ch := &channel{ctx: c, file: f, fd: fd, wakeFD: wake, cqs: map[uint64]*completionQueue{}}
	if err := enter(c, c.channels, ch); err != nil {
		ch.release()
		return nil, err
	}
	return ch, nil
}

// Wait implements verbs.CompletionChannel. With room for one event it makes one read per
// event; with more room, one more to find that there are no further ones.
func (ch *channel) Wait(events []verbs.CompletionQueue) (int, error) {
	ch.waiting.Lock()
	defer ch.waiting.Unlock()
	if len(events) == 0 {
		return 0, fmt.Errorf("uverbs: Wait without room for an event: %w", syscall.EINVAL)
	}
	for {
		if stop, err := ch.stop(); stop {
			return 0, err
		}
		k, err := ch.file.Read(ch.buf[:])
		if err == nil && k != len(ch.buf) {
			err = syscall.EIO // no kernel gives half an event
		}
		if err == nil {
			if n := ch.take(events); n > 0 {
				return n, nil
			}
			continue // of a queue that is destroyed
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			ch.file.SetReadDeadline(noDeadline) // before stop looks at woken
			continue
		}
		return 0, ch.broken(err)
	}
}

// WaitThread implements verbs.CompletionChannel.
func (ch *channel) WaitThread(events []verbs.CompletionQueue, timeout time.Duration) (int, error) {
	ch.waiting.Lock()
	defer ch.waiting.Unlock()
	if len(events) == 0 {
		return 0, fmt.Errorf("uverbs: WaitThread without room for an event: %w", syscall.EINVAL)
	}
	ch.poll[0].Revents = 0
	var end time.Time
	if timeout >= 0 {
		end = time.Now().Add(timeout)
	}
	for {
		if stop, err := ch.stop(); stop {
			return 0, err
		}
		// Often an event is there already: one system call instead of two.
		err := ch.read()
		if err == nil {
			if n := ch.take(events); n > 0 {
				return n, nil
			}
			continue
		}
		if err != unix.EAGAIN {
			return 0, ch.broken(err)
		}
		if ch.poll[0].Revents&(unix.POLLERR|unix.POLLHUP|unix.POLLNVAL) != 0 {
			return 0, ch.broken(syscall.EIO) // the kernel says the channel is dead, and there is nothing to read
		}
		var ts *unix.Timespec
		if timeout >= 0 {
			left := time.Until(end)
			if left <= 0 {
				return 0, nil
			}
			t := unix.NsecToTimespec(int64(left))
			ts = &t
		}
		ch.poll = [2]unix.PollFd{{Fd: int32(ch.fd), Events: unix.POLLIN}, {Fd: int32(ch.wakeFD), Events: unix.POLLIN}}
		n, err := unix.Ppoll(ch.poll[:], ts, nil)
		if err != nil && err != unix.EINTR {
			return 0, ch.ctx.fail("ppoll a completion channel", err)
		}
		if n <= 0 {
			ch.poll[0].Revents = 0
		}
		if ch.poll[1].Revents != 0 {
			unix.Read(ch.wakeFD, ch.buf[:]) // before stop looks at woken
		}
	}
}

// stop tells whether a waiter must return at once, with what.
func (ch *channel) stop() (bool, error) {
	switch {
	case ch.closed.Load():
		return true, verbs.ErrClosed
	case ch.ctx.gone.Load():
		return true, verbs.ErrDeviceGone
	case ch.woken.Load() && ch.woken.Swap(false):
		return true, nil
	}
	return false, nil
}

// broken turns a failed read into the contract's errors. A kernel that lets go of the device answers
// EIO, end of file, or an error state that the poller will not wait on.
func (ch *channel) broken(err error) error {
	if ch.closed.Load() || errors.Is(err, os.ErrClosed) {
		return verbs.ErrClosed
	}
	ch.ctx.lost()
	return verbs.ErrDeviceGone
}

// read reads one event without waiting.
func (ch *channel) read() error {
	for {
		n, err := unix.Read(ch.fd, ch.buf[:])
		if err == unix.EINTR {
			continue
		}
		if err == nil && n != len(ch.buf) {
			return unix.EIO
		}
		return err
	}
}

// take looks up the event in buf, and with room for more, further events that are there.
func (ch *channel) take(events []verbs.CompletionQueue) int {
	n := 0
	for {
		ch.mu.Lock()
		cq := ch.cqs[binary.NativeEndian.Uint64(ch.buf[:])]
		ch.mu.Unlock()
		if cq != nil {
			cq.impl.Notified()
			cq.compSeen.Add(1)
			events[n] = cq
			n++
		}
		if n == len(events) || len(events) == 1 {
			return n
		}
		if err := ch.read(); err != nil {
			return n // an error that lasts is met by the next Wait
		}
	}
}

// Wake implements verbs.CompletionChannel.
func (ch *channel) Wake() {
	ch.woken.Store(true)
	ch.mu.Lock()
	defer ch.mu.Unlock()
	if ch.wakeFD < 0 {
		return
	}
	one := [8]byte{1}
	unix.Write(ch.wakeFD, one[:]) // EAGAIN: the count is full, which wakes as well
	ch.file.SetReadDeadline(longAgo)
}

// Close implements verbs.CompletionChannel.
func (ch *channel) Close() error {
	ch.mu.Lock()
	n := len(ch.cqs)
	ch.mu.Unlock()
	if n > 0 {
		return fmt.Errorf("%s: close completion channel: %d queues use it: %w", ch.ctx.name, n, syscall.EBUSY)
	}
	return ch.shut()
}

// shut is Close without the question who uses the channel.
func (ch *channel) shut() error {
	if ch.closed.Swap(true) {
		return verbs.ErrClosed
	}
	ch.Wake()
	ch.waiting.Lock() // until the waiter has left
	defer ch.waiting.Unlock()
	leave(ch.ctx, ch.ctx.channels, ch)
	return ch.release()
}

func (ch *channel) release() error {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	unix.Close(ch.wakeFD)
	ch.wakeFD = -1
	return ch.file.Close()
}

var _ verbs.CompletionChannel = (*channel)(nil)
