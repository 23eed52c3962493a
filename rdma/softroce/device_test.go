package softroce

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"srp-initiator/internal/require"
	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/softroce/rc"
	"srp-initiator/rdma/softroce/udp"
	"srp-initiator/rdma/verbs"
)

// end is one side of a connection with memory.
type end struct {
	d      *Device
	pd     verbs.ProtectionDomain
	ch     verbs.CompletionChannel
	cq     verbs.CompletionQueue
	qp     verbs.QueuePair
	mem    *hostmem.Region
	mr     verbs.MemoryRegion
	conn   cm.Conn
	events []verbs.CompletionQueue
}

const memSize = 8 << 20

func newEnd(t testing.TB, d *Device, all bool) *end {
	t.Helper()
	e := &end{d: d, events: make([]verbs.CompletionQueue, 4)}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var err error
	e.pd, err = d.AllocPD()
	must(err)
	e.ch, err = d.CreateCompletionChannel()
	must(err)
	e.cq, err = d.CreateCQ(verbs.CQInit{Capacity: 1024, Channel: e.ch, Cookie: e})
	must(err)
	e.qp, err = e.pd.CreateQP(verbs.QPInit{SendCQ: e.cq, RecvCQ: e.cq, SignalAll: all, Cap: verbs.QPCap{MaxSendWR: 256, MaxRecvWR: 256, MaxSendSGE: 4, MaxRecvSGE: 4, MaxInlineData: 128}})
	must(err)
	e.mem, err = hostmem.Alloc(memSize)
	must(err)
	e.mr, err = e.pd.RegisterMemory(e.mem, verbs.AccessLocalWrite|verbs.AccessRemoteWrite|verbs.AccessRemoteRead|verbs.AccessMWBind)
	must(err)
	t.Cleanup(func() {
		if e.conn != nil {
			e.conn.Disconnect()
		}
		for _, f := range []func() error{e.qp.Destroy, e.cq.Destroy, e.ch.Close, e.mr.Deregister, e.pd.Dealloc, e.mem.Free} {
			if err := f(); err != nil && !errors.Is(err, verbs.ErrClosed) { // a test may have closed the device
				t.Error(err)
			}
		}
		if e.conn != nil {
			e.conn.Close()
		}
	})
	return e
}

func (e *end) sge(off, n int) []verbs.SGE {
	return []verbs.SGE{{Addr: e.mr.Addr() + uint64(off), Length: uint32(n), LKey: e.mr.LKey()}}
}

// poll reaps n completions by polling, 10 s at most.
func (e *end) poll(t testing.TB, n int) []verbs.WorkCompletion {
	t.Helper()
	var out []verbs.WorkCompletion
	wcs := make([]verbs.WorkCompletion, 16)
	for limit := time.Now().Add(10 * time.Second); len(out) < n; {
		k := e.cq.Poll(wcs)
		out = append(out, wcs[:k]...)
		if k == 0 && time.Now().After(limit) {
			t.Fatalf("%s: %d of %d completions: %+v", e.d.Name(), len(out), n, e.d.Stats())
		}
	}
	return out
}

// wait reaps n completions by notifications, within half a minute.
func (e *end) wait(t testing.TB, n int) []verbs.WorkCompletion {
	t.Helper()
	var out []verbs.WorkCompletion
	wcs := make([]verbs.WorkCompletion, 16)
	limit := time.Now().Add(30 * time.Second)
	impatience := time.AfterFunc(time.Until(limit), e.ch.Wake)
	defer impatience.Stop()
	for {
		for {
			k := e.cq.Poll(wcs)
			out = append(out, wcs[:k]...)
			if k == 0 {
				break
			}
		}
		if len(out) >= n {
			return out
		}
		if time.Now().After(limit) {
			t.Fatalf("%s: %d of %d completions: %+v", e.d.Name(), len(out), n, e.d.Stats())
		}
		missed, err := e.cq.Arm(false)
		if err != nil {
			t.Fatal(err)
		}
		if missed {
			continue
		}
		if _, err := e.ch.Wait(e.events); err != nil {
			t.Fatal(err)
		}
	}
}

func (e *end) send(t testing.TB, wrs ...verbs.SendWorkRequest) {
	t.Helper()
	if n, err := e.qp.PostSend(wrs); err != nil {
		t.Fatalf("posted %d of %d: %v", n, len(wrs), err)
	}
}

func (e *end) recv(t testing.TB, id uint64, off, n int) {
	t.Helper()
	if _, err := e.qp.PostRecv([]verbs.RecvWorkRequest{{WRID: id, SGList: e.sge(off, n)}}); err != nil {
		t.Fatal(err)
	}
}

func openForTest(opts ...Option) (*Device, error) { return Open(netip.Addr{}, opts...) }

func open(t testing.TB, opts ...Option) *Device {
	t.Helper()
	d, err := openForTest(opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil && !errors.Is(err, verbs.ErrClosed) {
			t.Error(err)
		}
	})
	return d
}

// The ACK timeout is 4.3 s: on a machine under load a process may not run for a second and longer. What the timer alone would send is seen nevertheless (quiet).
var connParam = cm.ConnParam{ResponderResources: 4, InitiatorDepth: 4, RetryCount: 7, RNRRetryCount: 7, ACKTimeout: 20}

// connect joins a and b; prepare is called with both queue pairs in INIT.
func connect(t testing.TB, a, b *end) {
	t.Helper()
	connectWith(t, a, b, connParam)
}

func connectWith(t testing.TB, a, b *end, param cm.ConnParam) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	l, err := b.d.Connector().Listen(netip.AddrPortFrom(b.d.Addr(), 0), 4)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	accepted := make(chan error, 1)
	go func() {
		accepted <- func() error {
			c, err := l.Accept(ctx)
			if err != nil {
				return err
			}
			b.conn = c
			if err := c.InitQP(b.qp); err != nil {
				return err
			}
			if got := c.Request(); !bytes.HasPrefix(got.PrivateData, []byte("hello\x00")) || len(got.PrivateData) != cm.MaxConnectData {
				return fmt.Errorf("request %+v", got)
			}
			p := param
			p.PrivateData = []byte("welcome")
			return c.Accept(ctx, p)
		}()
	}()
	c, err := a.d.Connector().Resolve(ctx, netip.AddrPort{}, cm.Addr{IP: l.Addr()})
	if err != nil {
		t.Fatal(err)
	}
	a.conn = c
	if err := c.InitQP(a.qp); err != nil {
		t.Fatal(err)
	}
	p := param
	p.PrivateData = []byte("hello")
	rep, err := c.Connect(ctx, p)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.HasPrefix(rep.PrivateData, []byte("welcome\x00")) || rep.ResponderResources != 4 {
		t.Fatalf("reply %+v", rep)
	}
	if err := <-accepted; err != nil {
		t.Fatal(err)
	}
	if a.qp.State() != verbs.QPReadyToSend || b.qp.State() != verbs.QPReadyToSend {
		t.Fatalf("connected in %v and %v", a.qp.State(), b.qp.State())
	}
}

func pair(t testing.TB, opts ...Option) (a, b *end) {
	t.Helper()
	a, b = newEnd(t, open(t, opts...), true), newEnd(t, open(t, opts...), true)
	connect(t, a, b)
	return a, b
}

func fill(b []byte, seed byte) {
	for i := range b {
		b[i] = byte(i)*13 + byte(i>>8)*7 + byte(i>>16) + seed
	}
}

// quiet checks that nothing was lost, sent again or refused.
func quiet(t *testing.T, ends ...*end) {
	t.Helper()
	for _, e := range ends {
		s := e.d.Stats()
		tr := s.Transport
		if s.ICRCErrors+s.Malformed+s.UnknownQPN+s.WrongPeer+s.BadMAD+s.MADsLost+s.CQOverruns+s.Socket.KernelDrops+s.Socket.SendErrors+
			tr.Retransmits+tr.Timeouts+tr.TxNakSequence+tr.RxNakSequence+tr.ImpliedNaks+tr.Duplicates+tr.OutOfOrder+tr.Dropped+tr.TxRNR+tr.RxRNR+
			s.CM.Retransmits+s.CM.Malformed+s.CM.Duplicates != 0 {
			t.Errorf("%s is not quiet: %+v", e.d.Name(), s)
		}
	}
}

func TestSendWriteRead(t *testing.T) {
	for _, c := range []struct {
		name string
		opts []Option
	}{{"offload", nil}, {"plain", []Option{WithoutOffload()}}, {"mtu1024", []Option{WithMTU(verbs.MTU1024)}}} {
		t.Run(c.name, func(t *testing.T) {
			a, b := pair(t, c.opts...)
			reaps := map[string]func(*end, testing.TB, int) []verbs.WorkCompletion{"poll": (*end).poll, "notify": (*end).wait}
			for how, reap := range reaps {
				for i, n := range []int{0, 1, 3, 64, 1023, 1024, 1025, 4095, 4096, 4097, 65536, 1 << 20} {
					src, dst := a.mem.Slice(0, n), b.mem.Slice(1<<20, n)
					fill(src, byte(i))
					b.recv(t, 7, 1<<20, 1<<20)
					a.send(t, verbs.SendWorkRequest{WRID: 1, Opcode: verbs.OpSend, SGList: a.sge(0, n)})
					if wc := reap(b, t, 1)[0]; wc.Status != verbs.WCSuccess || wc.WRID != 7 || wc.ByteLen != uint32(n) || wc.Opcode != verbs.WCRecv || wc.QPN != b.qp.QPN() {
						t.Fatalf("%s: receive of %d bytes: %+v", how, n, wc)
					}
					if wc := reap(a, t, 1)[0]; wc.Status != verbs.WCSuccess || wc.WRID != 1 || wc.Opcode != verbs.WCSend {
						t.Fatalf("%s: send of %d bytes: %+v", how, n, wc)
					}
					if !bytes.Equal(src, dst) {
						t.Fatalf("%s: SEND of %d bytes: wrong data", how, n)
					}
					fill(src, byte(i)+100)
					a.send(t, verbs.SendWorkRequest{WRID: 2, Opcode: verbs.OpRDMAWrite, SGList: a.sge(0, n), RemoteAddr: b.mr.Addr() + 2<<20 + 3, RKey: b.mr.RKey()})
					if wc := reap(a, t, 1)[0]; wc.Status != verbs.WCSuccess || wc.Opcode != verbs.WCRDMAWrite {
						t.Fatalf("%s: WRITE of %d bytes: %+v", how, n, wc)
					}
					if !bytes.Equal(src, b.mem.Slice(2<<20+3, n)) {
						t.Fatalf("%s: WRITE of %d bytes: wrong data", how, n)
					}
					a.send(t, verbs.SendWorkRequest{WRID: 3, Opcode: verbs.OpRDMARead, SGList: a.sge(3<<20, n), RemoteAddr: b.mr.Addr() + 2<<20 + 3, RKey: b.mr.RKey()})
					if wc := reap(a, t, 1)[0]; wc.Status != verbs.WCSuccess || wc.Opcode != verbs.WCRDMARead || wc.ByteLen != uint32(n) {
						t.Fatalf("%s: READ of %d bytes: %+v", how, n, wc)
					}
					if !bytes.Equal(src, a.mem.Slice(3<<20, n)) {
						t.Fatalf("%s: READ of %d bytes: wrong data", how, n)
					}
				}
			}
			quiet(t, a, b)
		})
	}
}

// trains is a socket that notes the WRITE packets which leave, those of one train together.
type trains struct {
	*udp.Socket
	sent [][]string // guarded by Device.mu
}

func (l *trains) Send(ts []udp.Train) (int, error) {
	n, err := l.Socket.Send(ts)
	for i := range ts[:n] {
		var packets []string
		for b := range slices.Chunk(ts[i].Data, ts[i].Segment) {
			var p packet.Packet
			if p.Parse(b) != nil || p.Kind&packet.KindWrite == 0 {
				continue
			}
			s := fmt.Sprintf("%s of %d", strings.TrimPrefix(p.Opcode.String(), "RDMA WRITE "), len(p.Payload))
			if p.Kind&packet.KindFirst != 0 {
				h := p.RETH()
				s += fmt.Sprintf(" to %d+%d", h.Addr&0xfffff, h.Length)
			}
			packets = append(packets, s)
		}
		if packets != nil {
			l.sent = append(l.sent, packets)
		}
	}
	return n, err
}

// WRITEs of two packets that are posted together leave in one train for a peer of this implementation, each packet a message of its own. Any other peer, and one
// that trains do not go to, gets one message for each.
func TestSmallWritesShareATrain(t *testing.T) {
	const n, size = 6, 8192
	for _, c := range []struct {
		name         string
		opts         udp.Options
		stranger     bool
		divided, one bool
	}{
		{"this implementation", udp.Options{}, false, true, true},
		{"no trains", udp.Options{NoGSO: true}, false, false, false},
		{"stranger", udp.Options{}, true, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := udp.OpenLoopback(c.opts)
			if err != nil {
				t.Fatal(err)
			}
			if !c.opts.NoGSO && !s.GSO() {
				s.Close()
				require.Missing(t, "UDP_SEGMENT")
			}
			l := &trains{Socket: s}
			d, err := OpenLink(l, verbs.MTU4096)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { d.Close() })
			a, b := newEnd(t, d, true), newEnd(t, open(t), true)
			connect(t, a, b)
			if c.stranger {
				d.mu.Lock()
				a.qp.(*queuePair).setSoft(false)
				d.mu.Unlock()
			}
			fill(a.mem.Bytes(), 9)
			base := (b.mr.Addr() + 0xfffff) &^ 0xfffff
			var wrs []verbs.SendWorkRequest
			var want [][]string
			for i := range n {
				k := size
				if i == n-1 {
					k -= 4095 // the short end of a train
				}
				wrs = append(wrs, verbs.SendWorkRequest{Opcode: verbs.OpRDMAWrite, SGList: a.sge(i*size, k), RemoteAddr: base + uint64(i*size), RKey: b.mr.RKey()})
				first, last := fmt.Sprintf("First of 4096 to %d+%d", i*size, k), fmt.Sprintf("Last of %d", k-4096)
				if c.divided {
					first, last = fmt.Sprintf("Only of 4096 to %d+4096", i*size), fmt.Sprintf("Only of %d to %d+%d", k-4096, i*size+4096, k-4096)
				}
				want = append(want, []string{first}, []string{last})
			}
			if c.one {
				want = [][]string{slices.Concat(want...)}
			}
			a.send(t, wrs...)
			for _, wc := range a.poll(t, n) {
				if wc.Status != verbs.WCSuccess {
					t.Fatalf("%+v", wc)
				}
			}
			d.mu.Lock()
			if got := l.sent; !slices.EqualFunc(got, want, slices.Equal) {
				t.Errorf("left\n%q\nwant\n%q", got, want)
			}
			d.mu.Unlock()
			if at := int(base - b.mr.Addr()); !bytes.Equal(b.mem.Slice(at, n*size-4095), a.mem.Slice(0, n*size-4095)) {
				t.Error("other bytes")
			}
			quiet(t, a, b)
		})
	}
}

// How requests are sent follows the peer, also where a queue pair gets another one.
func TestTuningFollowsThePeer(t *testing.T) {
	for _, opts := range [][]Option{nil, {WithoutOffload()}} {
		d := open(t, opts...)
		e := newEnd(t, d, false)
		q := e.qp.(*queuePair)
		soft := rc.Tuning{AckDelay: ackDelay, AckEvery: ackEvery, AckUnasked: ackUnasked, AskRarely: true}
		if d.Stats().Socket.GSO {
			soft.DivideWrites = divideWrites
		}
		for _, c := range []struct {
			peer string
			want rc.Tuning
		}{{"127.1.2.3", soft}, {"192.0.2.1", anyPeer}, {"127.1.2.3", soft}} {
			for _, m := range []struct {
				a    verbs.QPAttr
				mask verbs.QPAttrMask
			}{
				{verbs.QPAttr{State: verbs.QPReset}, verbs.QPMaskState},
				{verbs.QPAttr{State: verbs.QPInitState, Port: 1}, verbs.QPMaskToInit},
				{verbs.QPAttr{State: verbs.QPReadyToReceive, AV: verbs.AddressVector{DGID: verbs.GIDFromAddr(netip.MustParseAddr(c.peer)), IsGlobal: true}, PathMTU: verbs.MTU1024,
					DestQPN: 0x777}, verbs.QPMaskToRTR},
			} {
				if err := q.Modify(&m.a, m.mask); err != nil {
					t.Fatal(err)
				}
			}
			d.mu.Lock()
			if got := q.rc.Tuning(); got != c.want {
				t.Errorf("%s: %+v, want %+v", c.peer, got, c.want)
			}
			d.mu.Unlock()
		}
	}
}

// Many requests under way both ways at once, of random kinds and sizes.
func TestTraffic(t *testing.T) {
	a, b := pair(t)
	r := rand.New(rand.NewPCG(1, 2))
	fill(a.mem.Bytes(), 1)
	fill(b.mem.Bytes()[memSize/2:], 2)
	const rounds, depth = 40, 16
	for round := range rounds {
		for i := range depth {
			b.recv(t, uint64(i), 0, 65536)
		}
		wrs := make([]verbs.SendWorkRequest, 0, 3*depth)
		reads := 0
		for i := range depth {
			n := r.IntN(40000)
			wrs = append(wrs, verbs.SendWorkRequest{WRID: uint64(i), Opcode: verbs.OpRDMAWrite, SGList: a.sge(i*40000, n), RemoteAddr: b.mr.Addr() + uint64(i*40000), RKey: b.mr.RKey()})
			if i%3 == 0 {
				wrs = append(wrs, verbs.SendWorkRequest{WRID: uint64(i), Opcode: verbs.OpRDMARead, SGList: a.sge(memSize/2+i*65536, n), RemoteAddr: b.mr.Addr() + memSize/2 + uint64(i*65536), RKey: b.mr.RKey()})
				reads++
			}
			wrs = append(wrs, verbs.SendWorkRequest{WRID: uint64(i), Opcode: verbs.OpSend, Flags: verbs.SendInline, SGList: a.sge(i*40000, min(n, 100))})
		}
		a.send(t, wrs...)
		var got []verbs.WorkCompletion
		if round%2 == 0 {
			got = append(a.poll(t, len(wrs)), b.poll(t, depth)...)
		} else {
			got = append(a.wait(t, len(wrs)), b.wait(t, depth)...)
		}
		for _, wc := range got {
			if wc.Status != verbs.WCSuccess {
				t.Fatalf("round %d: %+v", round, wc)
			}
		}
		for _, wr := range wrs {
			n, off := int(wr.SGList[0].Length), int(wr.SGList[0].Addr-a.mr.Addr())
			roff := int(wr.RemoteAddr - b.mr.Addr())
			if wr.Opcode == verbs.OpSend {
				continue
			}
			if wr.Opcode == verbs.OpRDMAWrite && off == 0 {
				continue // the receives share this place
			}
			if roff >= 65536 && !bytes.Equal(a.mem.Slice(off, n), b.mem.Slice(roff, n)) {
				t.Fatalf("round %d: opcode %d of %d bytes at %d: wrong data", round, wr.Opcode, n, off)
			}
		}
	}
	quiet(t, a, b)
}

func TestConnectErrors(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	a, b := newEnd(t, open(t), true), newEnd(t, open(t), true)
	dial := func(to netip.AddrPort, timeout time.Duration) error {
		t.Helper()
		e := newEnd(t, a.d, true)
		c, err := a.d.Connector().Resolve(ctx, netip.AddrPort{}, cm.Addr{IP: to})
		if err != nil {
			return err
		}
		defer c.Close()
		if err := c.InitQP(e.qp); err != nil {
			t.Fatal(err)
		}
		p := connParam
		p.Timeout = timeout
		_, err = c.Connect(ctx, p)
		return err
	}
	var rej *cm.RejectError
	if err := dial(netip.AddrPortFrom(b.d.Addr(), 5000), 0); !errors.As(err, &rej) || rej.Reason != 8 {
		t.Errorf("nobody listens: %v", err)
	}
	start := time.Now()
	if err := dial(netip.MustParseAddrPort("127.255.7.7:5000"), 300*time.Millisecond); !errors.Is(err, cm.ErrUnreachable) {
		t.Errorf("nobody there: %v", err)
	}
	if d := time.Since(start); d < 250*time.Millisecond || d > 3*time.Second {
		t.Errorf("gave up after %v", d)
	}
	if err := dial(netip.MustParseAddrPort("192.0.2.1:5000"), 0); !errors.Is(err, cm.ErrUnreachable) {
		t.Errorf("from loopback to elsewhere: %v", err)
	}
	l, err := b.d.Connector().Listen(netip.AddrPortFrom(b.d.Addr(), 0), 4)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.d.Connector().Listen(l.Addr(), 4); err == nil {
		t.Error("two listeners on one port")
	}
	go func() {
		if c, err := l.Accept(ctx); err == nil {
			c.Reject([]byte("no"))
		}
	}()
	if err := dial(l.Addr(), 0); !errors.As(err, &rej) || rej.Reason != cm.ReasonConsumerDefined || !bytes.HasPrefix(rej.PrivateData, []byte("no\x00")) {
		t.Errorf("rejected: %v", err)
	}
	// A listener that goes away refuses those who wait.
	errc := make(chan error)
	go func() { errc <- dial(l.Addr(), 5*time.Second) }()
	time.Sleep(50 * time.Millisecond)
	l.Close()
	if err := <-errc; !errors.As(err, &rej) {
		t.Errorf("listener closed: %v", err)
	}
	if _, err := l.Accept(ctx); err == nil {
		t.Error("Accept on a closed listener")
	}
}

func TestDisconnect(t *testing.T) {
	a, b := pair(t)
	for i := range 5 {
		b.recv(t, uint64(i), 0, 100)
	}
	if err := a.conn.Disconnect(); err != nil {
		t.Fatal(err)
	}
	for _, e := range []*end{a, b} {
		select {
		case <-e.conn.Done():
		case <-time.After(5 * time.Second):
			t.Fatal("Done is not closed")
		}
		if err := e.conn.Err(); !errors.Is(err, cm.ErrDisconnected) {
			t.Fatal(err)
		}
		if s := e.qp.State(); s != verbs.QPError {
			t.Fatal(s)
		}
	}
	for _, wc := range b.poll(t, 5) {
		if wc.Status != verbs.WCFlushError {
			t.Fatalf("%+v", wc)
		}
	}
	if _, err := a.qp.PostSend([]verbs.SendWorkRequest{{WRID: 9, Opcode: verbs.OpSend}}); err != nil {
		t.Fatal(err)
	}
	if wc := a.wait(t, 1)[0]; wc.Status != verbs.WCFlushError || wc.WRID != 9 {
		t.Fatalf("%+v", wc)
	}
}

// undisturbed reports whether a test goes on that judges only rounds in which nothing came between. A busy machine, or one processor for
// all, has few of them, and the race detector none: what each round takes there is time enough for somebody else.
func undisturbed(start time.Time, judged int) bool {
	limit := 2 * time.Second
	if judged == 0 && !raceEnabled {
		limit = time.Minute
	}
	return judged < 20 && time.Since(start) < limit
}

// What is posted one by one while somebody polls in vain leaves with his next Poll, as one train; only the first does not wait, nor
// the acknowledgement that is owed.
func TestPostBesidePolling(t *testing.T) {
	a, b := pair(t)
	if !a.d.Stats().Socket.GSO {
		require.Missing(t, "UDP_SEGMENT")
	}
	const n = 8
	judged := 0
	for began := time.Now(); undisturbed(began, judged); {
		for i := range n {
			b.recv(t, uint64(i), i*64, 64)
		}
		a.recv(t, 99, 0, 64)
		b.send(t, verbs.SendWorkRequest{WRID: 1, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: b.sge(0, 8)})
		a.poll(t, 1) // which owes an acknowledgement now
		var wcs [4]verbs.WorkCompletion
		start := time.Now()
		if a.cq.Poll(wcs[:]) != 0 {
			t.Fatal("an entry that nothing accounts for")
		}
		drove := a.cq.(*completionQueue).polledAt.Load() != 0 // and not somebody else at that moment
		before := a.d.Stats().Socket
		for i := range n {
			a.send(t, verbs.SendWorkRequest{WRID: uint64(i), Opcode: verbs.OpSend, SGList: a.sge(0, 40)})
		}
		between := a.d.Stats().Socket
		done := a.cq.Poll(wcs[:])
		after := a.d.Stats().Socket
		// Who drives the device looks into its socket. The pump may do so at any moment, and sends what it finds.
		alone := between.ReceiveCalls == before.ReceiveCalls && after.ReceiveCalls <= between.ReceiveCalls+1
		if drove && alone && time.Since(start) < pollTime/2 { // else the watchdog or somebody's impatience may have been first
			judged++
			if between.TrainsSent > before.TrainsSent+1 || after.TrainsSent > between.TrainsSent+1 {
				t.Fatalf("%d trains before the Poll, %d with it", between.TrainsSent-before.TrainsSent, after.TrainsSent-between.TrainsSent)
			}
		}
		b.poll(t, n+1) // the receives and the SEND
		a.poll(t, n-done)
	}
	if judged == 0 && !raceEnabled { // the detector alone takes longer than the engine is patient
		t.Fatal("never undisturbed for long enough to judge")
	}
}

// An acknowledgement waits for the requests that come, and does not leave by itself because others had left before it was owed.
func TestAckWaitsForNextRequests(t *testing.T) {
	a, b := pair(t)
	var wcs [4]verbs.WorkCompletion
	judged := 0
	for began := time.Now(); undisturbed(began, judged); {
		b.recv(t, 1, 0, 64)
		a.recv(t, 2, 0, 64)
		a.send(t, verbs.SendWorkRequest{WRID: 3, Opcode: verbs.OpSend, SGList: a.sge(0, 8)}) // a owes nothing, and gets no acknowledgement
		b.poll(t, 1)
		for b.cq.Poll(wcs[:]) != 0 { // else b's answer waits for this
		}
		before, _ := a.d.QPStats(a.qp.QPN())
		start := time.Now()
		b.send(t, verbs.SendWorkRequest{WRID: 4, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: b.sge(0, 8)})
		a.poll(t, 1)
		after, _ := a.d.QPStats(a.qp.QPN())
		if time.Since(start) < ackDelay*9/10 { // else its time may have been up
			judged++
			if after.TxAcks != before.TxAcks {
				t.Fatal("an acknowledgement did not wait for a request to travel with")
			}
		}
		b.poll(t, 1)
	}
	if judged == 0 && !raceEnabled { // the detector alone takes longer than the engine is patient
		t.Fatal("never undisturbed for long enough to judge")
	}
}

// What is posted after a Poll that gave entries may wait for the next one, but leaves also when there is none.
func TestPostWithoutPoll(t *testing.T) {
	a, b := pair(t)
	for round := range 50 {
		b.recv(t, 1, 0, 64)
		a.recv(t, 2, 0, 64)
		a.send(t, verbs.SendWorkRequest{WRID: 3, Opcode: verbs.OpSend, SGList: a.sge(0, 8)})
		b.poll(t, 1)
		if round%2 == 1 {
			time.Sleep(time.Duration(round) * 20 * time.Microsecond)
		}
		b.send(t, verbs.SendWorkRequest{WRID: 4, Opcode: verbs.OpSend, SGList: b.sge(0, 8)})
		a.wait(t, 2) // its own send and b's
		b.poll(t, 1)
	}
	quiet(t, a, b)
}

// What PostSend has held back leaves with the Arm of who polled, and else the pump is told to look after it.
func TestDeferredPostsLeave(t *testing.T) {
	a, b := pair(t)
	held := 0
	var wcs [4]verbs.WorkCompletion
	for began, round := time.Now(), 0; held < 20 && time.Since(began) < 2*time.Second; round++ {
		b.recv(t, 1, 0, 64)
		a.recv(t, 2, 0, 64)
		b.send(t, verbs.SendWorkRequest{WRID: 3, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: b.sge(0, 8)})
		for b.cq.Poll(wcs[:]) != 0 { // the SEND leaves
		}
		if round%2 == 1 { // the pump has put the entry into the ring, and has nothing to do for a long time
			time.Sleep(3 * time.Millisecond)
		}
		a.poll(t, 1)
		a.send(t, verbs.SendWorkRequest{WRID: 4, Opcode: verbs.OpSend, SGList: a.sge(0, 8)})
		look := func() (deferred bool, left time.Duration) {
			a.d.mu.Lock()
			defer a.d.mu.Unlock()
			return a.d.deferred, time.Duration(a.d.pumpAt - a.d.now())
		}
		if deferred, left := look(); deferred {
			held++
			if left > watchdog {
				t.Fatalf("the pump looks in %v", left)
			}
			if _, err := a.cq.Arm(false); err != nil {
				t.Fatal(err)
			}
			if deferred, _ := look(); deferred {
				t.Fatal("held back behind Arm")
			}
		}
		b.poll(t, 1)
	}
	if held == 0 {
		t.Fatal("nothing was held back: the test shows nothing")
	}
}

// TestPostsCrossOver: of what is posted behind completions a peer that runs on another CPU gets the first deferAtFirst packets at once, or as many as messages
// came together, if these were more, and the first one before them if the link had to wake this end; one that cannot run meanwhile gets all when the turn is over.
func TestPostsCrossOver(t *testing.T) {
	for _, c := range []struct {
		apart bool
		woken bool
		came  int
		leave []int // packets held back when some leave
	}{
		{false, false, 1, nil},
		{false, true, 1, nil},
		{true, false, 1, []int{16, 32, 48, 64, 80, 96}},
		{true, true, 1, []int{1, 17, 33, 49, 65, 81, 97}},
		{true, false, 40, []int{40, 80}},
		{true, true, 40, []int{40, 80}},
	} {
		leave, alone := crossing(t, c.apart, c.woken, c.came)
		for try := 0; !alone; try++ {
			if try == 100 {
				t.Fatal("the pump takes a turn among the posts each time")
			}
			leave, alone = crossing(t, c.apart, c.woken, c.came)
		}
		if !slices.Equal(leave, c.leave) {
			t.Errorf("apart %v, woken %v, %d messages: packets left at posts %v, want %v", c.apart, c.woken, c.came, leave, c.leave)
		}
	}
}

// crossing posts 100 packets behind came messages and tells at which of them some left, and whether nobody else took a turn meanwhile, which sends what is held
// back.
func crossing(t *testing.T, apart, woken bool, came int) (leave []int, alone bool) {
	const posts = 100
	a, b := pair(t)
	for range posts {
		b.recv(t, 1, 0, 64)
	}
	var wrs []verbs.SendWorkRequest
	for range came {
		a.recv(t, 2, 0, 64)
		wrs = append(wrs, verbs.SendWorkRequest{WRID: 3, Opcode: verbs.OpSend, SGList: b.sge(0, 8)})
	}
	b.send(t, wrs...)
	b.d.mu.Lock()
	b.d.flush(b.d.now())
	b.d.mu.Unlock()
	a.poll(t, came)
	a.d.mu.Lock()
	a.d.apart, a.d.woken = apart, woken
	// Whether the messages came in one batch is the kernel's, and how soon this test posts the machine's.
	a.d.deferAtMost = max(deferAtFirst, came)
	a.cq.(*completionQueue).reapedAt.Store(int64(a.d.now().Add(time.Minute)))
	// The pump is not to wake for datagrams, nor for the posts. It may be awake.
	a.d.disarmPump()
	a.d.pumpAt = 0
	a.d.link.SetDeadline(time.Time{})
	const nobody = -1
	a.d.came = nobody
	a.d.mu.Unlock()
	for n := range posts {
		a.send(t, verbs.SendWorkRequest{WRID: 4, Opcode: verbs.OpSend, SGList: a.sge(0, 8)})
		a.d.mu.Lock()
		if !a.d.deferred {
			leave = append(leave, n+1)
		}
		alone = a.d.came == nobody
		a.d.mu.Unlock()
	}
	return leave, alone
}

// TestLinkWakes: who waited for a notification on the link has been woken by it, until something is posted; who polled was not.
func TestLinkWakes(t *testing.T) {
	a, b := pair(t)
	woken := func() bool {
		a.d.mu.Lock()
		defer a.d.mu.Unlock()
		return a.d.woken
	}
	a.recv(t, 1, 0, 64)
	b.send(t, verbs.SendWorkRequest{WRID: 2, Opcode: verbs.OpSend, SGList: b.sge(0, 8)})
	a.poll(t, 1)
	if b.poll(t, 1); woken() {
		t.Error("woken by a message that a poll took")
	}
	for try := 0; !woken(); try++ { // a try in which the pump took the message shows nothing
		if try == 100 {
			t.Fatal("the link has woken nobody")
		}
		a.recv(t, 1, 0, 64)
		if missed, err := a.cq.Arm(false); missed || err != nil {
			t.Fatal(missed, err)
		}
		b.send(t, verbs.SendWorkRequest{WRID: 2, Opcode: verbs.OpSend, SGList: b.sge(0, 8)})
		if _, err := a.ch.Wait(a.events); err != nil {
			t.Fatal(err)
		}
		a.poll(t, 1)
		b.poll(t, 1)
	}
	b.recv(t, 1, 0, 64)
	a.send(t, verbs.SendWorkRequest{WRID: 2, Opcode: verbs.OpSend, SGList: a.sge(0, 8)})
	if woken() {
		t.Error("woken behind a post")
	}
}

// TestCameCounts: how many messages a turn brought is what the next posts go by.
func TestCameCounts(t *testing.T) {
	a, b := pair(t)
	const n = 40
	var wcs [64]verbs.WorkCompletion
	most := 0
	for try := 0; most <= deferAtFirst; try++ { // a try whose messages came in small batches shows nothing
		if try == 100 {
			t.Fatalf("%d packets are held back at most behind %d messages", most, n)
		}
		var wrs []verbs.SendWorkRequest
		for range n {
			a.recv(t, 2, 0, 64)
			wrs = append(wrs, verbs.SendWorkRequest{WRID: 3, Opcode: verbs.OpSend, SGList: b.sge(0, 8)})
		}
		b.send(t, wrs...)
		for got := 0; got < n; {
			got += a.cq.Poll(wcs[:])
			a.d.mu.Lock()
			most = max(most, a.d.deferAtMost)
			a.d.mu.Unlock()
		}
		b.poll(t, n)
	}
	if most > n {
		t.Errorf("%d packets are held back behind %d messages", most, n)
	}
	a.d.mu.Lock()
	defer a.d.mu.Unlock()
	if a.d.turn(); a.d.deferAtMost != deferAtFirst {
		t.Errorf("%d packets are held back behind a turn that brought nothing, want %d", a.d.deferAtMost, deferAtFirst)
	}
}

// A window's key opens its bytes to the peer of the queue pair that bound it, and to no other of the same protection domain.
func TestWindowServesItsQueuePair(t *testing.T) {
	a, b := pair(t)
	a2 := newEnd(t, a.d, true)
	b2 := *b
	var err error
	if b2.qp, err = b.pd.CreateQP(verbs.QPInit{SendCQ: b.cq, RecvCQ: b.cq, SignalAll: true, Cap: b.qp.Cap()}); err != nil {
		t.Fatal(err)
	}
	w, err := b.pd.AllocMW()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Dealloc()
	defer func() {
		b2.conn.Disconnect()
		b2.qp.Destroy()
		b2.conn.Close()
	}()
	connect(t, a2, &b2)
	key := w.RKey() ^ 1
	b.send(t, verbs.SendWorkRequest{Opcode: verbs.OpBindMW, Bind: &verbs.BindMW{Window: w, Region: b.mr, RKey: key, Addr: b.mr.Addr() + 4096, Length: 4096, Access: verbs.AccessRemoteWrite}})
	if wc := b.poll(t, 1)[0]; wc.Status != verbs.WCSuccess || wc.Opcode != verbs.WCBindMW {
		t.Fatalf("%+v", wc)
	}
	write := func(e *end, off, n int) verbs.WCStatus {
		t.Helper()
		e.send(t, verbs.SendWorkRequest{Opcode: verbs.OpRDMAWrite, SGList: e.sge(0, n), RemoteAddr: b.mr.Addr() + uint64(off), RKey: key})
		return e.poll(t, 1)[0].Status
	}
	if s := write(a, 4096, 4096); s != verbs.WCSuccess {
		t.Fatalf("through the queue pair that bound the window: %v", s)
	}
	if s := write(a2, 4096, 4096); s != verbs.WCRemoteAccessError {
		t.Fatalf("through another queue pair: %v", s)
	}
	if s := write(a, 4095, 2); s != verbs.WCRemoteAccessError {
		t.Fatalf("beside the window: %v", s)
	}
}

// A window is revoked through the queue pair that bound it, and through no other of the same protection domain, by the peer or by the consumer.
func TestWindowIsRevokedByItsQueuePair(t *testing.T) {
	for _, side := range []string{"peer", "consumer"} {
		a, b := pair(t)
		a2 := newEnd(t, a.d, true)
		b2 := *b
		var err error
		if b2.cq, err = b.d.CreateCQ(verbs.CQInit{Capacity: 64}); err != nil {
			t.Fatal(err)
		}
		if b2.qp, err = b.pd.CreateQP(verbs.QPInit{SendCQ: b2.cq, RecvCQ: b2.cq, SignalAll: true, Cap: b.qp.Cap()}); err != nil {
			t.Fatal(err)
		}
		w, err := b.pd.AllocMW()
		if err != nil {
			t.Fatal(err)
		}
		connect(t, a2, &b2)
		key := w.RKey() ^ 1
		b.send(t, verbs.SendWorkRequest{Opcode: verbs.OpBindMW, Bind: &verbs.BindMW{Window: w, Region: b.mr, RKey: key, Addr: b.mr.Addr(), Length: 64, Access: verbs.AccessRemoteWrite}})
		if wc := b.poll(t, 1)[0]; wc.Status != verbs.WCSuccess {
			t.Fatalf("%+v", wc)
		}
		refused, want := a2, verbs.WCRemoteAccessError
		wr := verbs.SendWorkRequest{Opcode: verbs.OpSendWithInv, SGList: a2.sge(0, 8), ImmData: key}
		if side == "consumer" {
			refused, want = &b2, verbs.WCLocalQPOperationError
			wr = verbs.SendWorkRequest{Opcode: verbs.OpLocalInv, ImmData: key}
		}
		b2.recv(t, 1, 4096, 64)
		refused.send(t, wr)
		if wc := refused.poll(t, 1)[0]; wc.Status != want {
			t.Errorf("%s: %+v, want %v", side, wc, want)
		}
		write := func() verbs.WCStatus {
			a.send(t, verbs.SendWorkRequest{Opcode: verbs.OpRDMAWrite, SGList: a.sge(0, 64), RemoteAddr: b.mr.Addr(), RKey: key})
			return a.poll(t, 1)[0].Status
		}
		if s := write(); s != verbs.WCSuccess {
			t.Errorf("%s: the window is gone: %v", side, s)
		}
		b.send(t, verbs.SendWorkRequest{Opcode: verbs.OpLocalInv, ImmData: key})
		if wc := b.poll(t, 1)[0]; wc.Status != verbs.WCSuccess {
			t.Errorf("%s: through its own queue pair: %+v", side, wc)
		}
		if s := write(); s != verbs.WCRemoteAccessError {
			t.Errorf("%s: the key opens after its window was revoked: %v", side, s)
		}
		b2.conn.Disconnect()
		for _, f := range []func() error{b2.qp.Destroy, b2.cq.Destroy, w.Dealloc} {
			if err := f(); err != nil {
				t.Error(err)
			}
		}
		b2.conn.Close()
	}
}

// A window is bound to a region of its own protection domain, that allows it, and inside of it, under its own key with other low bits.
func TestBindRefusals(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, e, foreign *end, bind *verbs.BindMW){
		"a region of another domain": func(_ *testing.T, _, foreign *end, bind *verbs.BindMW) {
			bind.Region, bind.Addr = foreign.mr, foreign.mr.Addr()
		},
		"a window of another domain": func(t *testing.T, _, foreign *end, bind *verbs.BindMW) {
			w, err := foreign.pd.AllocMW()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { w.Dealloc() })
			bind.Window, bind.RKey = w, w.RKey()^1
		},
		"a region that does not allow it": func(t *testing.T, e, _ *end, bind *verbs.BindMW) {
			mr, err := e.pd.RegisterMemory(e.mem, verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { mr.Deregister() })
			bind.Region = mr
		},
		"longer than the region": func(_ *testing.T, e, _ *end, bind *verbs.BindMW) { bind.Length = memSize + 1 },
		"beyond the region":      func(_ *testing.T, e, _ *end, bind *verbs.BindMW) { bind.Addr = e.mr.Addr() + memSize - 63 },
		"in front of the region": func(_ *testing.T, e, _ *end, bind *verbs.BindMW) { bind.Addr = e.mr.Addr() - 1 },
		"no bytes":               func(_ *testing.T, _, _ *end, bind *verbs.BindMW) { bind.Length = 0 },
		"the same key again":     func(_ *testing.T, _, _ *end, bind *verbs.BindMW) { bind.RKey ^= 1 },
		"another key":            func(_ *testing.T, _, _ *end, bind *verbs.BindMW) { bind.RKey ^= 1 << 20 },
		"atomics":                func(_ *testing.T, _, _ *end, bind *verbs.BindMW) { bind.Access |= verbs.AccessRemoteAtomic },
	} {
		t.Run(name, func(t *testing.T) {
			a, _ := pair(t)
			foreign := newEnd(t, a.d, true)
			w, err := a.pd.AllocMW()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { w.Dealloc() })
			bind := verbs.BindMW{Window: w, Region: a.mr, RKey: w.RKey() ^ 1, Addr: a.mr.Addr(), Length: 64, Access: verbs.AccessRemoteWrite}
			spoil(t, a, foreign, &bind)
			a.send(t, verbs.SendWorkRequest{Opcode: verbs.OpBindMW, Bind: &bind})
			if wc := a.poll(t, 1)[0]; wc.Status != verbs.WCMWBindError {
				t.Errorf("%v, want %v", wc.Status, verbs.WCMWBindError)
			}
		})
	}
}

// A key of one protection domain opens nothing to the queue pairs of another, be it given by the peer or by the consumer.
func TestKeysOfAnotherDomain(t *testing.T) {
	for _, side := range []string{"remote", "local"} {
		a, b := pair(t)
		e := b // whose memory is in another domain
		if side == "local" {
			e = a
		}
		foreign := newEnd(t, e.d, true)
		b.recv(t, 1, 0, 64)
		wr := verbs.SendWorkRequest{WRID: 2, Opcode: verbs.OpRDMAWrite, SGList: a.sge(0, 64), RemoteAddr: foreign.mr.Addr(), RKey: foreign.mr.RKey()}
		want := verbs.WCRemoteAccessError
		if side == "local" {
			wr = verbs.SendWorkRequest{WRID: 2, Opcode: verbs.OpSend, SGList: foreign.sge(0, 64)}
			want = verbs.WCLocalProtectionError
		}
		fill(a.mem.Slice(0, 64), 1)
		fill(foreign.mem.Slice(0, 64), 2)
		before := bytes.Clone(foreign.mem.Slice(0, 64))
		a.send(t, wr)
		if wc := a.poll(t, 1)[0]; wc.Status != want {
			t.Errorf("%s key of another domain: %v, want %v", side, wc.Status, want)
		}
		if !bytes.Equal(foreign.mem.Slice(0, 64), before) {
			t.Errorf("%s key of another domain: the memory was written", side)
		}
	}
}

// A device that closes says goodbye: its peers need no timer to notice.
func TestCloseTellsPeers(t *testing.T) {
	a, b := pair(t)
	if err := a.d.Close(); err != nil {
		t.Fatal(err)
	}
	for _, e := range []*end{a, b} {
		select {
		case <-e.conn.Done():
		case <-time.After(5 * time.Second):
			t.Fatalf("%s does not know that the connection is over", e.d.Name())
		}
	}
	if err := a.conn.Err(); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("the closed end: %v", err)
	}
	if err := b.conn.Err(); !errors.Is(err, cm.ErrDisconnected) {
		t.Errorf("the other end: %v", err)
	}
	if s := b.qp.State(); s != verbs.QPError {
		t.Errorf("the other end's queue pair is in %v", s)
	}
}
