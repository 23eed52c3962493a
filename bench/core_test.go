package bench_test

// The core without a wire: whole sessions on a device whose target answers every command while it is being posted. What remains is
// our own work: encode the command, post it, reap the completions, decode the response, tell the caller.

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"srp-initiator/completion"
	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
	"srp-initiator/srp"
	"srp-initiator/srp/iu"
	"srp-initiator/srp/scsi"
)

// instantDevice is a verbs.Context, ProtectionDomain and cm.Connector in one. Keys are indices of regions.
type instantDevice struct {
	verbs.Context
	mu      sync.Mutex
	regions []*hostmem.Region
	limit   int // commands that the target takes at once
}

func (d *instantDevice) Name() string     { return "instant" }
func (d *instantDevice) Provider() string { return "test" }
func (d *instantDevice) QueryDevice() (verbs.DeviceAttr, error) {
	return verbs.DeviceAttr{MaxQPWR: 1 << 16, MaxCQE: 1 << 16}, nil
}
func (d *instantDevice) AllocPD() (verbs.ProtectionDomain, error) { return instantPD{d}, nil }
func (d *instantDevice) CreateCompletionChannel() (verbs.CompletionChannel, error) {
	return &instantChannel{wake: make(chan struct{}, 1), closed: make(chan struct{})}, nil
}
func (d *instantDevice) CreateCQ(i verbs.CQInit) (verbs.CompletionQueue, error) {
	size := 1
	for size < i.Capacity {
		size *= 2
	}
	return &instantCQ{ring: make([]verbs.WorkCompletion, size), channel: i.Channel.(*instantChannel)}, nil
}
func (d *instantDevice) Resolve(context.Context, netip.AddrPort, cm.Addr) (cm.Conn, error) {
	return &instantConn{d: d, done: make(chan struct{})}, nil
}
func (d *instantDevice) Listen(netip.AddrPort, int) (cm.Listener, error) {
	return nil, verbs.ErrNotSupported
}

type instantPD struct{ d *instantDevice }

func (p instantPD) Context() verbs.Context { return p.d }
func (p instantPD) Dealloc() error         { return nil }

func (p instantPD) RegisterMemory(r *hostmem.Region, _ verbs.AccessFlags) (verbs.MemoryRegion, error) {
	d := p.d
	d.mu.Lock()
	defer d.mu.Unlock()
	d.regions = append(d.regions, r)
	return instantMR{r, uint32(len(d.regions) - 1)}, nil
}
func (p instantPD) AllocMW() (verbs.MemoryWindow, error) { return nil, verbs.ErrNotSupported }
func (p instantPD) CreateQP(i verbs.QPInit) (verbs.QueuePair, error) {
	size := 1
	for size < i.Cap.MaxRecvWR {
		size *= 2
	}
	return &instantQP{d: p.d, cq: i.RecvCQ.(*instantCQ), recvs: make([]instantRecv, size)}, nil
}

type instantMR struct {
	r   *hostmem.Region
	key uint32
}

func (m instantMR) Addr() uint64      { return m.r.Addr() }
func (m instantMR) Len() int          { return m.r.Len() }
func (m instantMR) LKey() uint32      { return m.key }
func (m instantMR) RKey() uint32      { return m.key }
func (m instantMR) Deregister() error { return nil }

type instantChannel struct{ wake, closed chan struct{} }

func (c *instantChannel) Wait([]verbs.CompletionQueue) (int, error) {
	select {
	case <-c.wake:
		return 0, nil
	case <-c.closed:
		return 0, verbs.ErrClosed
	}
}
func (c *instantChannel) WaitThread(q []verbs.CompletionQueue, _ time.Duration) (int, error) {
	return c.Wait(q)
}
func (c *instantChannel) Wake() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}
func (c *instantChannel) Close() error { close(c.closed); return nil }

// instantCQ is polled by whoever posts: the benchmarks have one goroutine per session.
type instantCQ struct {
	ring       []verbs.WorkCompletion
	head, tail int
	channel    *instantChannel
}

func (q *instantCQ) push(wc verbs.WorkCompletion) {
	q.ring[q.tail&(len(q.ring)-1)] = wc
	q.tail++
}
func (q *instantCQ) Poll(wcs []verbs.WorkCompletion) (n int) {
	for ; n < len(wcs) && q.head != q.tail; n++ {
		wcs[n] = q.ring[q.head&(len(q.ring)-1)]
		q.head++
	}
	return n
}
func (q *instantCQ) Arm(bool) (bool, error) { return q.head != q.tail, nil }
func (q *instantCQ) Capacity() int          { return len(q.ring) }
func (q *instantCQ) Cookie() any            { return nil }
func (q *instantCQ) Destroy() error         { return nil }

type instantRecv struct {
	id  uint64
	sge verbs.SGE
}

type instantQP struct {
	d          *instantDevice
	cq         *instantCQ
	recvs      []instantRecv
	head, tail int
}

func (q *instantQP) QPN() uint32                                  { return 1 }
func (q *instantQP) Cap() verbs.QPCap                             { return verbs.QPCap{} }
func (q *instantQP) State() verbs.QPState                         { return verbs.QPReadyToSend }
func (q *instantQP) Modify(*verbs.QPAttr, verbs.QPAttrMask) error { return nil }
func (q *instantQP) Destroy() error                               { return nil }

func (q *instantQP) bytes(s verbs.SGE) []byte {
	r := q.d.regions[s.LKey]
	return r.Slice(int(s.Addr-r.Addr()), int(s.Length))
}

func (q *instantQP) PostRecv(wrs []verbs.RecvWorkRequest) (int, error) {
	for k := range wrs {
		q.recvs[q.tail&(len(q.recvs)-1)] = instantRecv{wrs[k].WRID, wrs[k].SGList[0]}
		q.tail++
	}
	return len(wrs), nil
}

// PostSend answers every command with GOOD at once.
func (q *instantQP) PostSend(wrs []verbs.SendWorkRequest) (int, error) {
	for k := range wrs {
		b := q.bytes(wrs[k].SGList[0])
		if wrs[k].Flags&verbs.SendSignaled != 0 {
			q.cq.push(verbs.WorkCompletion{WRID: wrs[k].WRID, Opcode: verbs.WCSend})
		}
		if b[0] != byte(iu.OpCommand) {
			continue
		}
		r := &q.recvs[q.head&(len(q.recvs)-1)]
		q.head++
		rsp := q.bytes(r.sge)
		clear(rsp[:iu.ResponseSize])
		rsp[0] = byte(iu.OpResponse)
		binary.BigEndian.PutUint32(rsp[4:], 1) // request limit delta
		copy(rsp[8:16], b[8:16])               // tag
		q.cq.push(verbs.WorkCompletion{WRID: r.id, Opcode: verbs.WCRecv, ByteLen: iu.ResponseSize})
	}
	return len(wrs), nil
}

type instantConn struct {
	d    *instantDevice
	done chan struct{}
	once sync.Once
}

func (c *instantConn) Route() cm.Route                            { return cm.Route{NodeGUID: 1} }
func (c *instantConn) Request() cm.ConnParam                      { return cm.ConnParam{} }
func (c *instantConn) InitQP(verbs.QueuePair) error               { return nil }
func (c *instantConn) Accept(context.Context, cm.ConnParam) error { return verbs.ErrNotSupported }
func (c *instantConn) Reject([]byte) error                        { return verbs.ErrNotSupported }
func (c *instantConn) Disconnect() error                          { c.once.Do(func() { close(c.done) }); return nil }
func (c *instantConn) Done() <-chan struct{}                      { return c.done }
func (c *instantConn) Err() error                                 { return nil }
func (c *instantConn) Close() error                               { return c.Disconnect() }
func (c *instantConn) Connect(context.Context, cm.ConnParam) (cm.ConnParam, error) {
	b := make([]byte, iu.LoginRspSize)
	_, err := (&iu.LoginRsp{ReqLimDelta: int32(c.d.limit), MaxITIULen: 8260, MaxTIIULen: 512, Formats: iu.DirectFormat | iu.IndirectFormat}).Encode(b)
	return cm.ConnParam{PrivateData: b}, err
}

// core is one session on the instant device, with so many reads of 4 KiB.
type core struct {
	s      *srp.Session
	cmds   []srp.Command
	done   int
	waiter completion.Waiter
}

func newCore(t testing.TB, depth int) *core {
	return newCoreWith(t, depth, completion.Config{Mode: completion.Direct, IdleGuard: -1})
}

func newCoreWith(t testing.TB, depth int, cfg completion.Config) *core {
	d := &instantDevice{limit: depth + 2}
	p, o, err := srp.ParseTarget(fmt.Sprintf("srp://192.0.2.1:5555/1:2?queue_size=%d", depth))
	if err != nil {
		t.Fatal(err)
	}
	o.Completion = cfg
	s, err := srp.Login(t.Context(), srp.Config{Device: d, Connector: d}, p, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	c := &core{s: s, cmds: make([]srp.Command, depth)}
	for s.Stats().Channels[0].Completion.Arms == 0 {
		time.Sleep(10 * time.Microsecond) // the session's own goroutine has yet to take its first look
	}
	mem, err := s.AllocMemory(depth * 4096)
	if err != nil {
		t.Fatal(err)
	}
	for k := range c.cmds {
		c.cmds[k] = srp.Command{CDB: scsi.Read10(uint32(8*k), 8), Dir: srp.DataIn, Data: mem.Bytes()[k*4096:][:4096:4096], Queue: 1,
			Waiter: &c.waiter, Done: func(*srp.Command) { c.done++ }}
	}
	return c
}

func (c *core) submit(t testing.TB) {
	c.done = 0
	for k := range c.cmds {
		if err := c.s.Submit(&c.cmds[k]); err != nil {
			t.Fatal(err)
		}
	}
}

func (c *core) reap(t testing.TB) {
	for tries := 0; c.done < len(c.cmds); tries++ {
		if c.s.Poll(256) == 0 && tries > 1e6 {
			t.Fatalf("%d of %d commands answered", c.done, len(c.cmds))
		}
	}
}

// BenchmarkCore is a command's way through the initiator without a wire: ns/op is for one command, encode and post and reap and decode. It
// should depend neither on how many are in flight nor on how many sessions take turns. submit-ns is the part until the command is posted (the
// device's answer in it), reap-ns the rest; at depth 1 reading the clock is a third of it all, and they are not told apart.
func BenchmarkCore(b *testing.B) {
	for _, sessions := range []int{1, 8, 64} {
		for _, depth := range []int{1, 4, 32, 128, 1024} {
			if sessions*depth > 2048 {
				continue // the caches' benchmark
			}
			b.Run(fmt.Sprintf("sessions=%d/depth=%d", sessions, depth), func(b *testing.B) {
				all := make([]*core, sessions)
				for k := range all {
					all[k] = newCore(b, depth)
					for range 4 { // every slot of the channel is touched once
						all[k].submit(b)
						all[k].reap(b)
					}
				}
				var submit, reap time.Duration
				b.ReportAllocs()
				b.ResetTimer()
				for n, k := 0, 0; n < b.N; n, k = n+depth, k+1 {
					c := all[k%sessions]
					if depth < 32 {
						c.submit(b)
						c.reap(b)
						continue
					}
					began := time.Now()
					c.submit(b)
					posted := time.Now()
					c.reap(b)
					submit += posted.Sub(began)
					reap += time.Since(posted)
				}
				if depth >= 32 {
					rounds := (b.N + depth - 1) / depth * depth
					b.ReportMetric(float64(submit)/float64(rounds), "submit-ns")
					b.ReportMetric(float64(reap)/float64(rounds), "reap-ns")
				}
			})
		}
	}
}

// BenchmarkCodec is the part of BenchmarkCore that turns values into bytes and back.
func BenchmarkCodec(b *testing.B) {
	buf := make([]byte, 512)
	cdb := scsi.Read10(8, 8)
	cmd := iu.Command{Tag: 1, CDB: cdb.Bytes()}
	cmd.In = iu.Buffer{Format: iu.Direct, Desc: iu.Descriptor{Addr: 1 << 40, Key: 7, Len: 4096}}
	b.Run("encode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := cmd.Encode(buf); err != nil {
				b.Fatal(err)
			}
		}
	})
	rsp := make([]byte, iu.ResponseSize)
	if _, err := (&iu.Response{Tag: 1, ReqLimDelta: 1}).Encode(rsp); err != nil {
		b.Fatal(err)
	}
	var r iu.Response
	b.Run("decode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if err := r.Decode(rsp); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// TestCoreAllocatesNothing: from Submit to Done, at every depth, in one session and in many.
func TestCoreAllocatesNothing(t *testing.T) {
	for _, sessions := range []int{1, 64} {
		for _, depth := range []int{1, 16, 1024 / sessions} {
			all := make([]*core, sessions)
			for k := range all {
				all[k] = newCore(t, depth)
			}
			round := func() {
				for _, c := range all {
					c.submit(t)
					c.reap(t)
				}
			}
			round()
			if raceEnabled {
				continue // the detector allocates
			}
			if n := testing.AllocsPerRun(20, round); n >= 1 {
				t.Errorf("%d sessions, %d commands in flight: %v allocations per round", sessions, depth, n)
			}
		}
	}
}
