package completion

// A null device: a completion queue and its channel, with nothing behind them. It is
// how the core is measured and tested without a wire; the providers' own queues are used
// in integration_test.go.

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"srp-initiator/rdma/verbs"
)

type nullDevice struct{ verbs.Context }

func (nullDevice) CreateCompletionChannel() (verbs.CompletionChannel, error) {
	return newNullChannel(), nil
}

func (nullDevice) CreateCQ(init verbs.CQInit) (verbs.CompletionQueue, error) {
	size := 1
	for size < init.Capacity {
		size *= 2
	}
	return &nullCQ{ring: make([]verbs.WorkCompletion, size), channel: init.Channel.(*nullChannel), cookie: init.Cookie}, nil
}

type nullChannel struct {
	token  chan struct{}
	closed chan struct{}

	mu     sync.Mutex
	events []verbs.CompletionQueue
	woken  bool
	broken error
}

func newNullChannel() *nullChannel {
	return &nullChannel{token: make(chan struct{}, 1), closed: make(chan struct{}), events: make([]verbs.CompletionQueue, 0, 8)}
}

func (c *nullChannel) Wait(events []verbs.CompletionQueue) (int, error) {
	return c.WaitThread(events, -1)
}

func (c *nullChannel) WaitThread(events []verbs.CompletionQueue, timeout time.Duration) (int, error) {
	var late <-chan time.Time
	if timeout >= 0 {
		late = time.After(timeout)
	}
	for {
		c.mu.Lock()
		if n := copy(events, c.events); n > 0 {
			c.events = c.events[:copy(c.events, c.events[n:])]
			c.mu.Unlock()
			return n, nil
		}
		woken, broken := c.woken, c.broken
		c.woken = false
		c.mu.Unlock()
		if broken != nil {
			return 0, broken
		}
		if woken {
			return 0, nil
		}
		select {
		case <-c.token:
		case <-late:
			return 0, nil
		case <-c.closed:
			return 0, verbs.ErrClosed
		}
	}
}

func (c *nullChannel) raise(q verbs.CompletionQueue) {
	c.mu.Lock()
	c.events = append(c.events, q)
	c.mu.Unlock()
	c.ring()
}

func (c *nullChannel) ring() {
	select {
	case c.token <- struct{}{}:
	default:
	}
}

func (c *nullChannel) Wake() {
	c.mu.Lock()
	c.woken = true
	c.mu.Unlock()
	c.ring()
}

func (c *nullChannel) fail(err error) {
	c.mu.Lock()
	c.broken = err
	c.mu.Unlock()
	c.ring()
}

func (c *nullChannel) Close() error {
	close(c.closed)
	return nil
}

// nullCQ is strict about its contract: two goroutines in Poll or Arm at once are a panic, and an overrun is one too.
type nullCQ struct {
	channel *nullChannel
	cookie  any

	mu      sync.Mutex
	user    sync.Mutex // held by whoever is in Poll or Arm
	ring    []verbs.WorkCompletion
	head    int // next to be polled
	tail    int // next to be filled
	armed   bool
	polled  int   // what the last poll found
	moves   bool  // what Moved says
	slow    bool  // Poll and Arm let others run before they return, and Arm before it looks: races that take nanoseconds are met often
	endless bool  // every poll finds as much as is asked for
	refused error // what Arm says
}

func (q *nullCQ) enter() {
	if !q.user.TryLock() {
		panic("completion queue used by two goroutines at once")
	}
}

func (q *nullCQ) Poll(wcs []verbs.WorkCompletion) int {
	q.enter()
	defer q.user.Unlock()
	defer q.dawdle()
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.endless {
		clear(wcs)
		return len(wcs)
	}
	n := 0
	for n < len(wcs) && q.head != q.tail {
		wcs[n] = q.ring[q.head&(len(q.ring)-1)]
		q.head++
		n++
	}
	q.polled = n
	return n
}

// Moved implements verbs.Mover.
func (q *nullCQ) Moved() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.moves
}

// dawdle lets others run for a while, if the queue is a slow one.
func (q *nullCQ) dawdle() {
	if q.slow {
		for range rand.IntN(4) {
			runtime.Gosched()
		}
	}
}

func (q *nullCQ) Arm(bool) (bool, error) {
	q.enter()
	defer q.user.Unlock()
	defer q.dawdle()
	q.dawdle()
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.refused != nil {
		return false, q.refused
	}
	q.armed = true
	return q.head != q.tail, nil
}

// complete is the device: it adds entries and raises the notification when armed.
func (q *nullCQ) complete(wcs ...verbs.WorkCompletion) {
	q.mu.Lock()
	for _, wc := range wcs {
		if q.tail-q.head == len(q.ring) {
			panic("completion queue overrun")
		}
		q.ring[q.tail&(len(q.ring)-1)] = wc
		q.tail++
	}
	raise := q.armed && len(wcs) > 0
	if raise {
		q.armed = false
	}
	q.mu.Unlock()
	if raise {
		q.channel.raise(q)
	}
}

func (q *nullCQ) Capacity() int { return len(q.ring) }
func (q *nullCQ) Cookie() any   { return q.cookie }
func (q *nullCQ) Destroy() error {
	return nil
}

// open makes an instance on a null device, starts it, and closes it at the end of the test.
func open(t testing.TB, capacity int, cfg Config, h Handler) (*Instance, *nullCQ) {
	t.Helper()
	cfg.IdleGuard = time.Hour // whatever needs the idle guard stalls
	i, err := New(nullDevice{}, capacity, cfg, h)
	if err != nil {
		t.Fatal(err)
	}
	if err := i.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := i.Close(); err != nil {
			t.Error(err)
		}
	})
	return i, i.CQ().(*nullCQ)
}
