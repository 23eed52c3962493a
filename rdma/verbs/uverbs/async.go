package uverbs

import (
	"encoding/binary"
	"errors"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/verbs"
)

// asyncReader reads a context's asynchronous events, always, whether somebody asks for
// them or not: they also tell the binding that a queue pair failed or that the device is gone.
//
//	kernel -> file -> run (the one reader) -> element's count and state -> queue -> next
type asyncReader struct {
	ctx     *Context
	file    *os.File
	queue   chan verbs.AsyncEvent
	dropped atomic.Uint64 // events that found the queue full
	closing chan struct{}
	done    chan struct{} // closed when run has returned
	isGone  bool          // set before done is closed
}

// asyncQueueLen bounds what nobody has asked for yet. A context that is not listened to keeps
// the oldest events: they tell how the trouble began.
const asyncQueueLen = 256

func newAsyncReader(c *Context, fd int) (*asyncReader, error) {
	f, err := pollable(fd, "uverbs-async")
	if err != nil {
		return nil, err
	}
	a := &asyncReader{ctx: c, file: f, queue: make(chan verbs.AsyncEvent, asyncQueueLen),
		closing: make(chan struct{}), done: make(chan struct{})}
	go a.run()
	return a, nil
}

// pollable puts an event descriptor into Go's poller. It takes the descriptor over.
func pollable(fd int, name string) (*os.File, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	if err := f.SetReadDeadline(noDeadline); err != nil { // says ErrNoDeadline when the poller would not have it
		f.Close()
		return nil, err
	}
	return f, nil
}

func (a *asyncReader) run() {
	defer close(a.done)
	var buf [16]byte // struct ib_uverbs_async_event_desc
	for {
		n, err := a.file.Read(buf[:])
		if err != nil || n != len(buf) {
			// Closed by us, or the kernel let go of the device (EIO, end of file).
			select {
			case <-a.closing:
			default:
				if !errors.Is(err, os.ErrClosed) {
					a.isGone = true
					a.ctx.lost()
				}
			}
			return
		}
		a.handle(binary.NativeEndian.Uint64(buf[0:]), verbs.AsyncEventType(binary.NativeEndian.Uint32(buf[8:])))
	}
}

func (a *asyncReader) handle(element uint64, typ verbs.AsyncEventType) {
	e := verbs.AsyncEvent{Type: typ}
	switch typ {
	case verbs.EventQPFatal, verbs.EventQPRequestError, verbs.EventQPAccessError,
		verbs.EventCommEstablished, verbs.EventSQDrained, verbs.EventQPLastWQE, verbs.EventCQError:
		a.ctx.mu.Lock()
		x := a.ctx.elements[element]
		a.ctx.mu.Unlock()
		switch x := x.(type) {
		case *queuePair:
			if typ != verbs.EventCommEstablished && typ != verbs.EventSQDrained {
				x.failed()
			}
			e.QP = x
			defer x.asyncSeen.Add(1)
		case *completionQueue:
			e.CQ = x
			defer x.asyncSeen.Add(1)
		default:
			return // destroyed meanwhile
		}
	case verbs.EventDeviceFatal:
		a.ctx.lost()
	default:
		e.Port = uint8(element)
	}
	select {
	case a.queue <- e:
	default:
		a.dropped.Add(1)
	}
}

func (a *asyncReader) next() (verbs.AsyncEvent, error) {
	select {
	case <-a.closing:
		return verbs.AsyncEvent{}, verbs.ErrClosed
	default:
	}
	select {
	case e := <-a.queue:
		return e, nil
	default:
	}
	select {
	case e := <-a.queue:
		return e, nil
	case <-a.closing:
		return verbs.AsyncEvent{}, verbs.ErrClosed
	case <-a.done:
	}
	select {
	case e := <-a.queue: // read before the end
		return e, nil
	default:
	}
	if a.isGone {
		return verbs.AsyncEvent{}, verbs.ErrDeviceGone
	}
	return verbs.AsyncEvent{}, verbs.ErrClosed
}

func (a *asyncReader) close() {
	close(a.closing)
	a.file.Close()
	<-a.done
}
