package completion_test

// The modes over a real device: softroce, or in a test guest rxe. Two queue pairs, a client whose completions are
// reaped in the mode under test, and a server that echoes each message, or holds the
// answers and releases them together.

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"srp-initiator/completion"
	"srp-initiator/rdma"
	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
)

const (
	depth    = 32
	msgSize  = 64
	patience = 20 * time.Second // no timer of ours or the device's is that long
)

// end is one queue pair with depth receives posted and as many send buffers. WRIDs: index, plus sendID for sends.
type end struct {
	t    testing.TB
	inst *completion.Instance
	pd   verbs.ProtectionDomain
	qp   verbs.QueuePair
	mem  *hostmem.Region
	mr   verbs.MemoryRegion
	mu   sync.Mutex // guards posting
	conn cm.Conn
	bad  chan string

	flags verbs.SendFlags
}

const sendID = 1 << 32

func newEnd(t testing.TB, ctx verbs.Context, cfg completion.Config, h func(*end, []verbs.WorkCompletion)) *end {
	e := &end{t: t, bad: make(chan string, 1), flags: verbs.SendSignaled}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var err error
	e.inst, err = completion.New(ctx, 4*depth, cfg, func(wcs []verbs.WorkCompletion) { h(e, wcs) })
	must(err)
	e.pd, err = ctx.AllocPD()
	must(err)
	cq := e.inst.CQ()
	e.qp, err = e.pd.CreateQP(verbs.QPInit{SendCQ: cq, RecvCQ: cq, Cap: verbs.QPCap{MaxSendWR: 2 * depth, MaxRecvWR: depth, MaxSendSGE: 1, MaxRecvSGE: 1}})
	must(err)
	e.mem, err = hostmem.Alloc(2 * depth * msgSize)
	must(err)
	e.mr, err = e.pd.RegisterMemory(e.mem, verbs.AccessLocalWrite)
	must(err)
	return e
}

func (e *end) bind(c cm.Conn) error {
	e.conn = c
	if err := c.InitQP(e.qp); err != nil {
		return err
	}
	for k := range depth {
		e.recv(k)
	}
	return e.inst.Start()
}

func (e *end) sge(at int) []verbs.SGE {
	return []verbs.SGE{{Addr: e.mr.Addr() + uint64(at*msgSize), Length: msgSize, LKey: e.mr.LKey()}}
}

func (e *end) recv(k int) {
	if n, err := e.qp.PostRecv([]verbs.RecvWorkRequest{{WRID: uint64(k), SGList: e.sge(k)}}); n != 1 || err != nil {
		e.problem(fmt.Sprint("post receive: ", err))
	}
}

// send sends buffer k with tag in its first byte.
func (e *end) send(k int, tag byte) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mem.Bytes()[(depth+k)*msgSize] = tag
	if n, err := e.qp.PostSend([]verbs.SendWorkRequest{{WRID: sendID | uint64(k), Opcode: verbs.OpSend, Flags: e.flags, SGList: e.sge(depth + k)}}); n != 1 || err != nil {
		e.problem(fmt.Sprint("post send: ", err))
	}
}

func (e *end) problem(s string) {
	select {
	case e.bad <- s:
	default:
	}
}

func (e *end) close() {
	e.conn.Disconnect()
	for _, f := range []func() error{e.qp.Destroy, e.inst.Close, e.mr.Deregister, e.pd.Dealloc, e.mem.Free, e.conn.Close} {
		if err := f(); err != nil {
			e.t.Errorf("close: %v", err)
		}
	}
}

// pair is a client and a server.
type pair struct {
	t      testing.TB
	client *end
	server *end

	// The client's: tag k is job k's. A message is answered when its answer came and its send completed.
	waiters [depth]completion.Waiter
	missing [depth]int

	// The server's.
	holding bool
	held    []byte
	heldMu  sync.Mutex
}

func (p *pair) clientHandle(e *end, wcs []verbs.WorkCompletion) {
	for _, wc := range wcs {
		if wc.Status != verbs.WCSuccess {
			continue // flushed at the end
		}
		var job int
		if wc.WRID&sendID != 0 {
			job = int(wc.WRID &^ sendID)
		} else {
			job = int(e.mem.Bytes()[int(wc.WRID)*msgSize])
			e.recv(int(wc.WRID))
		}
		if p.missing[job]--; p.missing[job] == 0 {
			p.waiters[job].Signal()
		}
	}
}

func (p *pair) serverHandle(e *end, wcs []verbs.WorkCompletion) {
	for _, wc := range wcs {
		if wc.Status != verbs.WCSuccess {
			continue
		}
		if wc.WRID&sendID != 0 {
			continue
		}
		tag := e.mem.Bytes()[int(wc.WRID)*msgSize]
		e.recv(int(wc.WRID))
		p.heldMu.Lock()
		if p.holding {
			p.held = append(p.held, tag)
			p.heldMu.Unlock()
			continue
		}
		p.heldMu.Unlock()
		p.answer(tag)
	}
}

func (p *pair) answer(tag byte) { p.server.send(int(tag), tag) }

// heldCount is how many messages the server holds back.
func (p *pair) heldCount() int {
	p.heldMu.Lock()
	defer p.heldMu.Unlock()
	return len(p.held)
}

func (p *pair) setHolding(on bool) {
	p.heldMu.Lock()
	p.holding = on
	held := p.held
	p.held = nil
	p.heldMu.Unlock()
	for _, tag := range held {
		p.answer(tag)
	}
}

// call sends job's message and waits for its end.
func (p *pair) call(job int) {
	p.missing[job] = 1 // nobody looks at it before the send
	if p.client.flags&verbs.SendSignaled != 0 {
		p.missing[job]++
	}
	p.client.send(job, byte(job))
	if !p.client.inst.Wait(&p.waiters[job], time.Now().Add(patience)) {
		p.client.problem(fmt.Sprintf("job %d: no completion in %v; stats %+v", job, patience, p.client.inst.Stats()))
	}
}

// fabric is a *rdma.Fabric, or what a test makes itself.
type fabric interface {
	Context() verbs.Context
	Connector() cm.Connector
}

func openFabric(t testing.TB) fabric {
	t.Helper()
	f, err := rdma.Open(deviceName())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func deviceName() string {
	if os.Getenv("VMTEST_GUEST") != "" {
		return "rxe0"
	}
	return "softroce"
}

func newPair(t testing.TB, cfg completion.Config) *pair {
	t.Helper()
	server := openFabric(t)
	return newPairOn(t, openFabric(t), server, cfg, completion.Config{})
}

func newPairOn(t testing.TB, client, server fabric, cfg, serverCfg completion.Config) *pair {
	t.Helper()
	p := &pair{t: t}
	name := deviceName()
	entry, err := server.Context().QueryGID(1, 0)
	for k := 1; err == nil && name == "rxe0" && (entry.Type != verbs.GIDTypeRoCEv2 || !entry.GID.Addr().Is4()); k++ {
		entry, err = server.Context().QueryGID(1, k)
	}
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	l, err := server.Connector().Listen(netip.AddrPortFrom(entry.GID.Addr(), 0), 1)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p.server = newEnd(t, server.Context(), serverCfg, p.serverHandle)
	p.client = newEnd(t, client.Context(), cfg, p.clientHandle)
	par := cm.ConnParam{RetryCount: 7, RNRRetryCount: 7}
	accepted := make(chan error, 1)
	go func() {
		c, err := l.Accept(ctx)
		if err == nil {
			if err = p.server.bind(c); err == nil {
				err = c.Accept(ctx, par)
			}
		}
		accepted <- err
	}()
	c, err := client.Connector().Resolve(ctx, netip.AddrPort{}, cm.Addr{IP: l.Addr()})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.client.bind(c); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Connect(ctx, par); err != nil {
		t.Fatal(err)
	}
	if err := <-accepted; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.client.close()
		p.server.close()
	})
	return p
}

// check fails the test if either end met something wrong.
func (p *pair) check() {
	p.t.Helper()
	select {
	case s := <-p.client.bad:
		p.t.Fatal("client: ", s)
	case s := <-p.server.bad:
		p.t.Fatal("server: ", s)
	default:
	}
}

func everyModeOverDevice(t *testing.T, f func(t *testing.T, p *pair)) {
	for _, m := range completion.Modes() {
		for _, weight := range []int{1, 7, 512} {
			t.Run(fmt.Sprintf("%v/weight=%d", m, weight), func(t *testing.T) {
				cfg := completion.Config{Mode: m, Weight: weight, Budget: 2*weight + 1, IdleGuard: time.Hour}
				if m == completion.Poll {
					var err error
					if cfg.Poller, err = completion.NewPoller(completion.PollerConfig{Budget: cfg.Budget}); err != nil {
						t.Fatal(err)
					}
				}
				f(t, newPair(t, cfg))
			})
		}
	}
}

func short(n int) int {
	if testing.Short() {
		return n / 10
	}
	return n
}

// TestDeviceQueueDepthOne: one message after the other.
func TestDeviceQueueDepthOne(t *testing.T) {
	everyModeOverDevice(t, func(t *testing.T, p *pair) {
		for n := range short(3000) {
			p.call(n % depth)
			p.check()
		}
	})
}

// TestDeviceJobs: a goroutine per buffer, all at once.
func TestDeviceJobs(t *testing.T) {
	everyModeOverDevice(t, func(t *testing.T, p *pair) {
		var wg sync.WaitGroup
		for job := range depth {
			wg.Go(func() {
				for range short(300) {
					p.call(job)
				}
			})
		}
		wg.Wait()
		p.check()
	})
}

// TestDeviceBurst: the answers to all buffers are held, released together, and nothing follows them.
func TestDeviceBurst(t *testing.T) {
	everyModeOverDevice(t, func(t *testing.T, p *pair) {
		for round := range short(100) {
			p.setHolding(true)
			var wg sync.WaitGroup
			for job := range depth {
				wg.Go(func() { p.call(job) })
			}
			for end := time.Now().Add(patience); p.heldCount() < depth; time.Sleep(50 * time.Microsecond) {
				if time.Now().After(end) {
					t.Fatalf("round %d: the server has %d of %d messages", round, p.heldCount(), depth)
				}
			}
			p.setHolding(false)
			wg.Wait()
			p.check()
		}
	})
}

// TestDeviceSwitch changes modes while messages go back and forth.
func TestDeviceSwitch(t *testing.T) {
	p := newPair(t, completion.Config{})
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(n%7) * 200 * time.Microsecond):
			}
			if err := p.client.inst.SetMode(completion.Modes()[n*3%5]); err != nil {
				t.Error(err)
			}
			if err := p.server.inst.SetMode([]completion.Mode{completion.Interrupt, completion.Thread, completion.Poll}[n%3]); err != nil {
				t.Error(err)
			}
		}
	}()
	var wg sync.WaitGroup
	for job := range 8 {
		wg.Go(func() {
			for range short(3000) {
				p.call(job)
			}
		})
	}
	wg.Wait()
	close(stop)
	<-stopped
	p.check()
}
