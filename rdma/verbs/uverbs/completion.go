package uverbs

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
	"srp-initiator/rdma/verbs/uverbs/internal/provider"
)

// completionQueue is a completion queue. The ring is the family's (impl).
type completionQueue struct {
	impl      provider.CQ
	destroyed atomic.Bool

	ctx    *Context
	ch     *channel // nil: polled only
	handle uint64   // user handle
	cookie any

	compSeen  atomic.Uint32 // events of the queue that Wait has taken
	asyncSeen atomic.Uint32

	mu sync.Mutex // serialises Destroy
}

// CreateCQ implements verbs.Context.
func (c *Context) CreateCQ(init verbs.CQInit) (verbs.CompletionQueue, error) {
	cq := &completionQueue{ctx: c, handle: c.newHandle(), cookie: init.Cookie}
	if init.Capacity <= 0 {
		return nil, fmt.Errorf("%s: create completion queue: capacity %d: %w", c.name, init.Capacity, syscall.EINVAL)
	}
	args := kernel.CQArgs{UserHandle: cq.handle, CQE: init.Capacity, CompFD: -1}
	if v := c.dev.CompVectors(); v > 0 && init.Vector > 0 {
		args.CompVector = init.Vector % v
	}
	if init.Channel != nil {
		ch, ok := init.Channel.(*channel)
		if !ok || ch.ctx != c {
			return nil, fmt.Errorf("%s: create completion queue: the channel is another device's: %w", c.name, syscall.EINVAL)
		}
		if ch.closed.Load() {
			return nil, verbs.ErrClosed
		}
		cq.ch, args.CompFD = ch, ch.fd
	}
	impl, err := c.dev.CreateCQ(args)
	if err != nil {
		return nil, c.fail(fmt.Sprintf("create completion queue of %d entries", init.Capacity), err)
	}
	cq.impl = impl
	if cq.ch != nil {
		cq.ch.mu.Lock()
		cq.ch.cqs[cq.handle] = cq
		cq.ch.mu.Unlock()
	}
	c.mu.Lock()
	c.elements[cq.handle] = cq
	c.mu.Unlock()
	if err := enter(c, c.cqs, cq); err != nil {
		cq.Destroy()
		return nil, err
	}
	return cq, nil
}

// Poll implements verbs.CompletionQueue.
func (cq *completionQueue) Poll(wcs []verbs.WorkCompletion) int {
	if cq.destroyed.Load() {
		return 0
	}
	return cq.impl.Poll(wcs)
}

// Arm implements verbs.CompletionQueue.
func (cq *completionQueue) Arm(solicitedOnly bool) (missed bool, err error) {
	if cq.destroyed.Load() {
		return false, verbs.ErrClosed
	}
	missed, err = cq.impl.Arm(solicitedOnly)
	if err != nil {
		return false, cq.ctx.fail("arm a completion queue", err)
	}
	return missed, nil
}

func (cq *completionQueue) Capacity() int { return cq.impl.Capacity() }
func (cq *completionQueue) Cookie() any   { return cq.cookie }

// Destroy implements verbs.CompletionQueue. The kernel drops unread events and says how many were read; those are waited for,
// so that no event of the queue appears after Destroy has returned.
func (cq *completionQueue) Destroy() error {
	cq.mu.Lock()
	defer cq.mu.Unlock()
	if cq.destroyed.Load() {
		return verbs.ErrClosed
	}
	cq.destroyed.Store(true)
	resp, err := cq.impl.Destroy()
	if err != nil && !cq.ctx.gone.Load() {
		cq.destroyed.Store(false)
		return cq.ctx.fail("destroy completion queue", err)
	}
	if err == nil {
		acknowledged(&cq.compSeen, resp.CompEventsReported)
		acknowledged(&cq.asyncSeen, resp.AsyncEventsReported)
	}
	if cq.ch != nil {
		cq.ch.mu.Lock()
		delete(cq.ch.cqs, cq.handle)
		cq.ch.mu.Unlock()
	}
	cq.ctx.mu.Lock()
	delete(cq.ctx.elements, cq.handle)
	delete(cq.ctx.cqs, cq)
	cq.ctx.mu.Unlock()
	return nil
}

// acknowledged waits until our readers have dealt with as many events as the kernel counts as read. They
// lie at most between a read and a map lookup behind.
func acknowledged(seen *atomic.Uint32, reported uint32) {
	for int32(reported-seen.Load()) > 0 {
		runtime.Gosched()
	}
}

var _ verbs.CompletionQueue = (*completionQueue)(nil)
