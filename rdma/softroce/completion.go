package softroce

// Completion queues and their channels.
//
// Whoever holds Device.mu (a poller, a poster, the pump) puts entries into a queue's ring; its owner takes them without a lock. A
// poller who finds the ring empty drives the socket itself if nobody else does at that moment: that is the whole data path of a polling
// program, with no other goroutine in it. Arm leaves word that a notification is wanted; the ring's producer then puts the queue on its
// channel's list once and wakes who waits there.

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"srp-initiator/rdma/verbs"
)

// completionQueue implements verbs.CompletionQueue.
type completionQueue struct {
	d        *Device
	channel  *channel
	cookie   any
	capacity int

	ring []verbs.WorkCompletion
	mask uint32
	head atomic.Uint32 // moved by the owner
	tail atomic.Uint32 // moved under Device.mu

	dead  atomic.Bool   // destroyed, or the device closed
	armed atomic.Uint32 // armedNot, armedSolicited, armedAny
	// reapedAt is when Poll last gave entries to the owner, while the owner has neither polled to the end nor armed; else 0.
	reapedAt atomic.Int64
	// polledAt is when Poll last drove the device and found nothing, while the owner has not armed since; else 0.
	polledAt atomic.Int64
	// moved is set when the last Poll, of an empty ring, received packets for its queue pairs. The owner's.
	moved bool
	// promised is set while the owner polls on, drives while that is counted in Device.drivers. The owner's, drives changes under Device.mu.
	promised, drives bool

	// Guarded by Device.mu.
	users    int // queue pairs
	overrun  bool
	notified bool // waits in Device.notify for the end of the turn
	gone     bool
	batches  uint64 // received for its queue pairs

	queued bool // in channel.pending; guarded by channel.mu
}

const (
	armedNot = iota
	armedSolicited
	armedAny
)

// CreateCQ makes a completion queue; its capacity is rounded up to a power of two.
func (d *Device) CreateCQ(init verbs.CQInit) (verbs.CompletionQueue, error) {
	if init.Capacity < 1 || init.Capacity > maxCQE {
		return nil, fmt.Errorf("softroce: completion queue of %d entries, allowed are 1 to %d: %w", init.Capacity, maxCQE, syscall.EINVAL)
	}
	size := 1
	for size < init.Capacity {
		size *= 2
	}
	c := &completionQueue{d: d, cookie: init.Cookie, capacity: size, ring: make([]verbs.WorkCompletion, size), mask: uint32(size - 1)}
	if init.Channel != nil {
		ch, ok := init.Channel.(*channel)
		if !ok || ch.d != d {
			return nil, fmt.Errorf("softroce: the completion channel is another device's: %w", syscall.EINVAL)
		}
		c.channel = ch
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, verbs.ErrClosed
	}
	if len(d.cqs) >= maxCQ {
		return nil, fmt.Errorf("softroce: %d completion queues in use: %w", maxCQ, syscall.ENOMEM)
	}
	d.cqs[c] = struct{}{}
	if c.channel != nil {
		c.channel.users++
	}
	return c, nil
}

func (c *completionQueue) Capacity() int { return c.capacity }
func (c *completionQueue) Cookie() any   { return c.cookie }

// take moves entries from the ring to wcs.
func (c *completionQueue) take(wcs []verbs.WorkCompletion) int {
	head, tail := c.head.Load(), c.tail.Load()
	n := min(int(tail-head), len(wcs))
	if n == 0 {
		return 0
	}
	i := int(head & c.mask)
	if k := copy(wcs[:n], c.ring[i:]); k < n {
		copy(wcs[k:n], c.ring)
	}
	c.head.Store(head + uint32(n))
	return n
}

func (c *completionQueue) Poll(wcs []verbs.WorkCompletion) int {
	if c.dead.Load() {
		return 0
	}
	n := c.take(wcs)
	if n == 0 && len(wcs) > 0 {
		c.endTurn()
		c.moved = false
		if d := c.d; d.mu.TryLock() {
			before := c.batches
			c.drive()
			at := d.pollTurn()
			c.moved = c.batches != before
			d.unlock()
			if n = c.take(wcs); n == 0 {
				c.polledAt.Store(int64(at))
			}
		}
	}
	if n > 0 {
		c.reapedAt.Store(int64(c.d.now()))
		if c.d.reaper.Load() != c {
			c.d.reaper.Store(c)
		}
	}
	return n
}

// Moved implements verbs.Mover.
func (c *completionQueue) Moved() bool { return c.moved }

// endTurn notes that the owner is through with what Poll gave it.
func (c *completionQueue) endTurn() {
	if c.reapedAt.Load() != 0 {
		c.reapedAt.Store(0)
	}
}

func (c *completionQueue) Arm(solicitedOnly bool) (missed bool, err error) {
	c.endTurn()
	c.polledAt.Store(0)
	d := c.d
	if c.channel == nil {
		c.Rests()
		return false, fmt.Errorf("softroce: the completion queue has no channel: %w", syscall.EINVAL)
	}
	want := uint32(armedAny)
	if solicitedOnly {
		want = armedSolicited
	}
	d.mu.Lock()
	defer d.unlock()
	c.rest()
	if c.gone {
		return false, verbs.ErrClosed
	}
	missed = c.tail.Load() != c.head.Load()
	if had := c.armed.Load(); had < want {
		c.armed.Store(want)
		if had == armedNot {
			d.waiting++
		}
	}
	d.flushDeferred()
	if !missed && !d.led && d.watched() && (!c.channel.served.Load() || c.channel.dozes.Load()) {
		d.armPump()
	}
	return missed, nil
}

// retire makes the queue useless. Device.mu is held.
func (c *completionQueue) retire() {
	c.gone = true
	c.dead.Store(true)
}

// push puts an entry into the ring. Device.mu is held.
func (c *completionQueue) push(wc *verbs.WorkCompletion, solicited bool) {
	if c.gone {
		return
	}
	tail := c.tail.Load()
	if tail-c.head.Load() > c.mask {
		c.d.stats.CQOverruns++
		if !c.overrun {
			c.overrun = true
			c.d.overrun = append(c.d.overrun, c)
		}
		return
	}
	c.ring[tail&c.mask] = *wc
	c.tail.Store(tail + 1)
	if a := c.armed.Load(); a == armedAny || a == armedSolicited && solicited {
		c.armed.Store(armedNot)
		c.d.waiting--
		if !c.notified {
			c.notified = true
			c.d.notify = append(c.d.notify, c)
		}
	}
}

func (c *completionQueue) Destroy() error {
	d := c.d
	d.mu.Lock()
	defer d.unlock()
	if c.gone {
		return verbs.ErrClosed
	}
	if c.users > 0 {
		return fmt.Errorf("softroce: destroy completion queue: %d queue pairs use it: %w", c.users, syscall.EBUSY)
	}
	c.retire()
	c.endTurn()
	c.polledAt.Store(0)
	if c.armed.Swap(armedNot) != armedNot {
		d.waiting--
	}
	c.rest()
	delete(d.cqs, c)
	if ch := c.channel; ch != nil {
		ch.users--
		ch.drop(c)
	}
	return nil
}

// waitsOn is what wakes the waiter of a channel.
type waitsOn uint8

const (
	onSignal waitsOn = iota // or nobody waits, or he looks at the channel before he sleeps
	onEvent                 // a thread, in poll(2)
	onLink                  // the leading goroutine, in WaitReadable
)

// channel implements verbs.CompletionChannel.
type channel struct {
	d     *Device
	users int // completion queues; guarded by Device.mu

	signal chan struct{} // one token: look at what follows
	event  int           // eventfd that stands for signal while a thread waits; -1 before the first WaitThread. Changed under mu, and not while threadIn

	mu      sync.Mutex // guards what follows
	pending []*completionQueue
	woken   bool
	closed  bool
	gone    bool
	waits   waitsOn

	threadIn bool // a goroutine is in WaitThread

	// served is set once somebody has waited: who arms a queue of the channel will wait again, and then watch the link himself or see that
	// somebody does. Until then it is the pump's to watch.
	served atomic.Bool
	// dozes is set while a goroutine waits that does not watch the link.
	dozes atomic.Bool
}

// CreateCompletionChannel makes a channel for any number of completion queues of the device.
func (d *Device) CreateCompletionChannel() (verbs.CompletionChannel, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, verbs.ErrClosed
	}
	ch := &channel{d: d, signal: make(chan struct{}, 1), event: -1}
	d.channels[ch] = struct{}{}
	return ch, nil
}

// post puts a queue on the list and wakes the waiter.
func (ch *channel) post(c *completionQueue) {
	ch.mu.Lock()
	if !c.queued && !ch.closed {
		c.queued = true
		ch.pending = append(ch.pending, c)
	}
	ch.wakeLocked()
	ch.mu.Unlock()
}

func (ch *channel) wakeLocked() {
	switch ch.waits {
	case onEvent:
		signalEvent(ch.event)
		return
	case onLink:
		ch.d.link.Unpark()
		return
	}
	select {
	case ch.signal <- struct{}{}:
	default:
	}
}

func (ch *channel) drop(c *completionQueue) {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	for i, p := range ch.pending {
		if p == c {
			ch.pending = append(ch.pending[:i], ch.pending[i+1:]...)
			break
		}
	}
	c.queued = false
}

// collect takes what the channel has: queues, a wake-up, or its end.
// If there is nothing, the waiter is going to wait on what on says.
func (ch *channel) collect(events []verbs.CompletionQueue, on waitsOn) (n int, done bool, err error) {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	for n < len(events) && n < len(ch.pending) {
		ch.pending[n].queued = false
		events[n] = ch.pending[n]
		n++
	}
	rest := copy(ch.pending, ch.pending[n:])
	clear(ch.pending[rest:])
	ch.pending = ch.pending[:rest]
	switch {
	case n > 0:
		if rest > 0 {
			ch.wakeLocked()
		}
		done = true
	case ch.gone:
		done, err = true, verbs.ErrDeviceGone
	case ch.closed:
		done, err = true, verbs.ErrClosed
	case ch.woken:
		ch.woken = false
		done = true
	}
	if ch.waits = onSignal; !done {
		ch.waits = on
	}
	return n, done, err
}

func (ch *channel) Wait(events []verbs.CompletionQueue) (int, error) {
	if len(events) == 0 {
		return 0, fmt.Errorf("softroce: no room for events: %w", syscall.EINVAL)
	}
	d := ch.d
	ch.served.Store(true)
	for {
		leader := ch.enter()
		if !leader {
			if n, done, err := ch.collect(events, onSignal); done {
				ch.dozes.Store(false)
				return n, err
			}
			<-ch.signal
			continue
		}
		n, done, err := ch.collect(events, onLink)
		readable := false
		if !done {
			readable, _ = d.link.Park() // a link that was closed ends the channel as well
			ch.awake()
		}
		d.leave(readable)
		if done {
			return n, err
		}
	}
}

// enter makes the waiter the leader if somebody has to watch the link and nobody does. While no queue is armed, or somebody has promised to poll on,
// whoever polls drives the device: a leader parked on the link would be woken by each packet that is theirs.
func (ch *channel) enter() (leader bool) {
	d := ch.d
	d.mu.Lock()
	defer d.unlock()
	leader = d.watched() && d.lead()
	ch.dozes.Store(!leader)
	return leader
}

// awake notes that the waiter looks at the channel itself before he sleeps again: he need not be woken.
func (ch *channel) awake() {
	ch.mu.Lock()
	ch.waits = onSignal
	ch.mu.Unlock()
}

func (ch *channel) WaitThread(events []verbs.CompletionQueue, timeout time.Duration) (int, error) {
	if len(events) == 0 {
		return 0, fmt.Errorf("softroce: no room for events: %w", syscall.EINVAL)
	}
	if s, ok := ch.d.link.(descriptor); ok {
		return ch.waitThread(s, events, timeout)
	}
	// A link without a descriptor: nothing a thread could block on but this.
	var expired <-chan time.Time
	if timeout >= 0 {
		t := time.NewTimer(timeout)
		defer t.Stop()
		expired = t.C
	}
	for {
		if n, done, err := ch.collect(events, onSignal); done {
			return n, err
		}
		select {
		case <-ch.signal:
		case <-expired:
			return 0, nil
		}
	}
}

func (ch *channel) Wake() {
	ch.mu.Lock()
	ch.woken = true
	ch.wakeLocked()
	ch.mu.Unlock()
}

func (ch *channel) Close() error {
	d := ch.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.channels[ch]; !ok {
		return verbs.ErrClosed
	}
	if ch.users > 0 {
		return fmt.Errorf("softroce: close completion channel: %d completion queues use it: %w", ch.users, syscall.EBUSY)
	}
	delete(d.channels, ch)
	ch.end(false)
	return nil
}

// end wakes the waiter for good.
func (ch *channel) end(deviceGone bool) {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	ch.closed = true
	ch.gone = ch.gone || deviceGone
	ch.wakeLocked()
	ch.closeEvent()
}
