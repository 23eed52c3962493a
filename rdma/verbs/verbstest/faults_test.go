package verbstest

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/mlxtest"
)

// recorder is a TB that keeps what it is told.
type recorder struct {
	mu       sync.Mutex
	failed   bool
	messages []string
	cleanups []func()
}

func (r *recorder) Helper()             {}
func (r *recorder) Name() string        { return "recorder" }
func (r *recorder) Logf(string, ...any) {}
func (r *recorder) Cleanup(f func())    { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Failed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failed
}
func (r *recorder) Errorf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = true
	r.messages = append(r.messages, fmt.Sprintf(format, args...))
}
func (r *recorder) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	runtime.Goexit()
}

// try runs the case called name on a provider with fault f and returns what it had to say.
func try(t *testing.T, name string, f fault) *recorder {
	r := &recorder{}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			for i := len(r.cleanups) - 1; i >= 0; i-- {
				r.cleanups[i]()
			}
		}()
		for _, c := range Cases {
			if c.Name == name {
				c.Run(r, faultyPair(r, f))
				return
			}
		}
		r.Errorf("there is no case %q", name)
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatalf("case %s did not end", name)
	}
	return r
}

// fault is one thing that a provider does wrong; unset hooks leave it right.
type fault struct {
	poll     func(n int, wcs []verbs.WorkCompletion) int // after the real Poll
	arm      func(missed bool) bool
	event    func(n int, events []verbs.CompletionQueue) int // after the real wait
	wake     func() bool                                     // false: forget it
	send     func(wrs []verbs.SendWorkRequest) []verbs.SendWorkRequest
	sent     func(n, asked int, err error) (int, error)
	received func(n, asked int, err error) (int, error)
	destroy  func(err error) error // of a completion queue
	cap      func(*verbs.QPCap)
	access   func(verbs.AccessFlags) verbs.AccessFlags
}

func faultyPair(t TB, f fault) Pair {
	n := mlxtest.NewNet()
	p := Pair{Windows: true}
	for _, s := range []*Side{&p.A, &p.B} {
		ctx, err := n.Open(mlxtest.Config{Family: "mlx5"})
		if err != nil {
			t.Fatalf("%v", err)
		}
		t.Cleanup(func() { ctx.Close() })
		if *s, err = OpenSide(&context{Context: ctx, f: f}); err != nil {
			t.Fatalf("%v", err)
		}
	}
	t.Cleanup(func() { n.Close() })
	return p
}

type context struct {
	verbs.Context
	f  fault
	mu sync.Mutex
	qs map[verbs.CompletionQueue]*queue
}

func (c *context) AllocPD() (verbs.ProtectionDomain, error) {
	pd, err := c.Context.AllocPD()
	if err != nil {
		return nil, err
	}
	return &domain{ProtectionDomain: pd, c: c}, nil
}

func (c *context) CreateCompletionChannel() (verbs.CompletionChannel, error) {
	ch, err := c.Context.CreateCompletionChannel()
	if err != nil {
		return nil, err
	}
	return &channel{CompletionChannel: ch, c: c}, nil
}

func (c *context) CreateCQ(init verbs.CQInit) (verbs.CompletionQueue, error) {
	if init.Channel != nil {
		init.Channel = init.Channel.(*channel).CompletionChannel
	}
	cq, err := c.Context.CreateCQ(init)
	if err != nil {
		return nil, err
	}
	q := &queue{CompletionQueue: cq, c: c}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.qs == nil {
		c.qs = map[verbs.CompletionQueue]*queue{}
	}
	c.qs[cq] = q
	return q, nil
}

type channel struct {
	verbs.CompletionChannel
	c *context
}

func (ch *channel) events(n int, err error, events []verbs.CompletionQueue) (int, error) {
	if f := ch.c.f.event; f != nil {
		n = f(n, events)
	}
	ch.c.mu.Lock()
	defer ch.c.mu.Unlock()
	for i := range events[:n] {
		if q := ch.c.qs[events[i]]; q != nil {
			events[i] = q
		}
	}
	return n, err
}

func (ch *channel) Wait(events []verbs.CompletionQueue) (int, error) {
	n, err := ch.CompletionChannel.Wait(events)
	return ch.events(n, err, events)
}

func (ch *channel) WaitThread(events []verbs.CompletionQueue, d time.Duration) (int, error) {
	n, err := ch.CompletionChannel.WaitThread(events, d)
	return ch.events(n, err, events)
}

func (ch *channel) Wake() {
	if f := ch.c.f.wake; f == nil || f() {
		ch.CompletionChannel.Wake()
	}
}

type queue struct {
	verbs.CompletionQueue
	c *context
}

func (q *queue) Poll(wcs []verbs.WorkCompletion) int {
	n := q.CompletionQueue.Poll(wcs)
	if f := q.c.f.poll; f != nil {
		n = f(n, wcs)
	}
	return n
}

func (q *queue) Arm(solicited bool) (bool, error) {
	missed, err := q.CompletionQueue.Arm(solicited)
	if f := q.c.f.arm; f != nil {
		missed = f(missed)
	}
	return missed, err
}

func (q *queue) Destroy() error {
	err := q.CompletionQueue.Destroy()
	if f := q.c.f.destroy; f != nil {
		err = f(err)
	}
	return err
}

type domain struct {
	verbs.ProtectionDomain
	c *context
}

func (d *domain) Context() verbs.Context { return d.c }

func (d *domain) RegisterMemory(mem *hostmem.Region, access verbs.AccessFlags) (verbs.MemoryRegion, error) {
	if f := d.c.f.access; f != nil {
		access = f(access)
	}
	return d.ProtectionDomain.RegisterMemory(mem, access)
}

func (d *domain) CreateQP(init verbs.QPInit) (verbs.QueuePair, error) {
	init.SendCQ = init.SendCQ.(*queue).CompletionQueue
	init.RecvCQ = init.RecvCQ.(*queue).CompletionQueue
	qp, err := d.ProtectionDomain.CreateQP(init)
	if err != nil {
		return nil, err
	}
	return &pair{QueuePair: qp, c: d.c}, nil
}

type pair struct {
	verbs.QueuePair
	c *context
}

func (q *pair) Cap() verbs.QPCap {
	c := q.QueuePair.Cap()
	if f := q.c.f.cap; f != nil {
		f(&c)
	}
	return c
}

func (q *pair) PostSend(wrs []verbs.SendWorkRequest) (int, error) {
	asked := len(wrs)
	if f := q.c.f.send; f != nil {
		wrs = f(append([]verbs.SendWorkRequest(nil), wrs...))
	}
	n, err := q.QueuePair.PostSend(wrs)
	if f := q.c.f.sent; f != nil {
		n, err = f(n, asked, err)
	}
	return n, err
}

func (q *pair) PostRecv(wrs []verbs.RecvWorkRequest) (int, error) {
	n, err := q.QueuePair.PostRecv(wrs)
	if f := q.c.f.received; f != nil {
		n, err = f(n, len(wrs), err)
	}
	return n, err
}

// edit changes every completion.
func edit(change func(*verbs.WorkCompletion)) fault {
	return fault{poll: func(n int, wcs []verbs.WorkCompletion) int {
		for i := range wcs[:n] {
			change(&wcs[i])
		}
		return n
	}}
}

// change changes every send request.
func change(f func(*verbs.SendWorkRequest)) fault {
	return fault{send: func(wrs []verbs.SendWorkRequest) []verbs.SendWorkRequest {
		for i := range wrs {
			f(&wrs[i])
		}
		return wrs
	}}
}

var garbage any

// TestSuiteNoticesFaults breaks a provider that passes in one way at a time: the case that is there for it must fail.
func TestSuiteNoticesFaults(t *testing.T) {
	defer func(d time.Duration) { patience = d }(patience)
	patience = time.Second // in the cases that must fail
	var count atomic.Uint32
	every := func(n uint32) bool { return count.Add(1)%n == 0 }
	for _, c := range []struct {
		what  string
		noted string // by case
		fault fault
	}{
		{"a completion is lost", "Batches", fault{poll: func(n int, _ []verbs.WorkCompletion) int {
			if n > 0 && every(5) {
				n--
			}
			return n
		}}},
		{"completions of a batch in another order", "Batches", fault{poll: func(n int, wcs []verbs.WorkCompletion) int {
			if n > 1 {
				wcs[0], wcs[1] = wcs[1], wcs[0]
			}
			return n
		}}},
		{"Poll writes past what it returns", "PollBounds", fault{poll: func(n int, wcs []verbs.WorkCompletion) int {
			for i := n; i < len(wcs); i++ {
				wcs[i].WRID = 0
			}
			return n
		}}},
		{"lengths are off by one", "Send", edit(func(wc *verbs.WorkCompletion) { wc.ByteLen++ })},
		{"the wrong QPN", "ManyQueuePairs", edit(func(wc *verbs.WorkCompletion) { wc.QPN++ })},
		{"wr_id cut to 32 bits", "Send", edit(func(wc *verbs.WorkCompletion) { wc.WRID &= 0xffffffff })},
		{"immediates byte-swapped", "SendWithImmediate", edit(func(wc *verbs.WorkCompletion) { wc.ImmData = wc.ImmData<<16 | wc.ImmData>>16 })},
		{"the invalidated key is not told", "MemoryWindows", edit(func(wc *verbs.WorkCompletion) { wc.Flags &^= verbs.WCWithInv })},
		{"errors look like success", "RemoteAccessErrors", edit(func(wc *verbs.WorkCompletion) { wc.Status = 0 })},
		{"flushes look like other errors", "FlushInOrder", edit(func(wc *verbs.WorkCompletion) {
			if wc.Status == verbs.WCFlushError {
				wc.Status = verbs.WCGeneralError
			}
		})},
		{"RNR looks like a timeout", "ReceiverNotReady", edit(func(wc *verbs.WorkCompletion) {
			if wc.Status == verbs.WCRNRRetryExceeded {
				wc.Status = verbs.WCRetryExceeded
			}
		})},
		{"every request is signaled", "UnsignaledSends", change(func(wr *verbs.SendWorkRequest) { wr.Flags |= verbs.SendSignaled })},
		{"solicited is forgotten", "ArmSolicited", change(func(wr *verbs.SendWorkRequest) { wr.Flags &^= verbs.SendSolicited })},
		{"inline is forgotten", "Inline", change(func(wr *verbs.SendWorkRequest) { wr.Flags &^= verbs.SendInline })},
		{"remote addresses cut to 32 bits", "RDMAWrite", change(func(wr *verbs.SendWorkRequest) { wr.RemoteAddr &= 0xffffffff })},
		{"the last SGE is forgotten", "ScatterGather", change(func(wr *verbs.SendWorkRequest) {
			if len(wr.SGList) > 2 {
				wr.SGList = wr.SGList[:len(wr.SGList)-1]
			}
		})},
		{"a batch is posted in another order", "Batches", fault{send: func(wrs []verbs.SendWorkRequest) []verbs.SendWorkRequest {
			if len(wrs) > 1 {
				wrs[0], wrs[1] = wrs[1], wrs[0]
			}
			return wrs
		}}},
		{"a full send queue is not told", "SendQueueFull", fault{sent: func(n, asked int, err error) (int, error) {
			if err == verbs.ErrQueueFull {
				return asked, nil
			}
			return n, err
		}}},
		{"one send more is promised than fits", "SendQueueFull", fault{cap: func(c *verbs.QPCap) { c.MaxSendWR++ }}},
		{"one receive more is promised than fits", "ReceiveQueueFull", fault{cap: func(c *verbs.QPCap) { c.MaxRecvWR++ }}},
		{"sends are taken in any state", "PostingByState", fault{sent: func(n, asked int, err error) (int, error) { return asked, nil }}},
		{"receives are taken in any state", "PostingByState", fault{received: func(n, asked int, err error) (int, error) { return asked, nil }}},
		{"bad requests are taken", "BadWorkRequests", fault{sent: func(n, asked int, err error) (int, error) { return asked, nil }}},
		{"every region may be read", "RemoteAccessErrors", fault{access: func(a verbs.AccessFlags) verbs.AccessFlags { return a | verbs.AccessRemoteRead }}},
		{"remote write without local write", "RegistrationRules", fault{access: func(a verbs.AccessFlags) verbs.AccessFlags { return a | verbs.AccessLocalWrite }}},
		{"a queue in use is destroyed", "DestroyOrder", fault{destroy: func(error) error { return nil }}},
		{"missed is never told", "ArmReportsMissed", fault{arm: func(bool) bool { return false }}},
		{"missed is always told", "ArmOnce", fault{arm: func(bool) bool { return true }}},
		{"a notification is lost", "NotificationPingPong", fault{event: func(n int, _ []verbs.CompletionQueue) int {
			if n > 0 && every(50) {
				return 0
			}
			return n
		}}},
		{"wakes are lost", "WakeAndTimeout", fault{wake: func() bool { return !every(3) }}},
		{"Poll allocates", "NoAllocation", fault{poll: func(n int, _ []verbs.WorkCompletion) int { garbage = make([]byte, 100); return n }}},
	} {
		t.Run(c.what, func(t *testing.T) {
			if r := try(t, c.noted, c.fault); !r.failed {
				t.Errorf("case %s passed", c.noted)
			} else {
				t.Logf("%s: %s", c.noted, r.messages[0])
			}
		})
	}
	// Without a fault the wrapped provider passes all of it.
	if testing.Short() {
		return
	}
	patience = 20 * time.Second
	for _, c := range Cases {
		if r := try(t, c.Name, fault{}); r.failed {
			t.Errorf("%s fails without a fault: %q", c.Name, r.messages)
		}
	}
}
