package softroce

// The device against the kernel's rxe in a test guest: this process has the kernel device, and a child in the network namespace at the
// other end of a veth pair has the userspace device. Both families, both directions of connecting; what either side counts as
// lost, repeated or out of order must be nothing.

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"srp-initiator/internal/require"
	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/cm/ucm"
	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs"
)

const peerEnv = "SOFTROCE_PEER" // "listen ADDR" or "connect ADDR ADDR:PORT"

// exchange is one side of a connection that talks to its like over whatever device.
type exchange struct {
	ch     verbs.CompletionChannel
	cq     verbs.CompletionQueue
	qp     verbs.QueuePair
	mem    *hostmem.Region
	mr     verbs.MemoryRegion
	raddr  uint64
	rkey   uint32
	recvs  []verbs.WorkCompletion // reaped and not yet looked at
	sends  []verbs.WorkCompletion
	failed error
	events [4]verbs.CompletionQueue
}

const (
	exRecvSlots = 32
	exSlot      = 128 << 10 // receive slots from 0, then one source, one READ destination, one target of the peer's WRITEs
	exSource    = exRecvSlots * exSlot
	exRead      = exSource + 4*exSlot
	exTarget    = exRead + 4*exSlot
	exSize      = exTarget + 4*exSlot
)

func newExchange(t testing.TB, ctx verbs.Context) *exchange {
	t.Helper()
	x := &exchange{}
	step := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	pd, err := ctx.AllocPD()
	step(err)
	x.ch, err = ctx.CreateCompletionChannel()
	step(err)
	x.cq, err = ctx.CreateCQ(verbs.CQInit{Capacity: 512, Channel: x.ch})
	step(err)
	x.qp, err = pd.CreateQP(verbs.QPInit{SendCQ: x.cq, RecvCQ: x.cq, SignalAll: true, Cap: verbs.QPCap{MaxSendWR: 128, MaxRecvWR: 64, MaxSendSGE: 1, MaxRecvSGE: 1}})
	step(err)
	x.mem, err = hostmem.Alloc(exSize)
	step(err)
	x.mr, err = pd.RegisterMemory(x.mem, verbs.AccessLocalWrite|verbs.AccessRemoteRead|verbs.AccessRemoteWrite)
	step(err)
	return x
}

func (x *exchange) private() []byte {
	b := binary.BigEndian.AppendUint64(nil, x.mr.Addr())
	return binary.BigEndian.AppendUint32(b, x.mr.RKey())
}

func (x *exchange) learn(private []byte) {
	x.raddr, x.rkey = binary.BigEndian.Uint64(private), binary.BigEndian.Uint32(private[8:])
}

func (x *exchange) sge(off, n int) []verbs.SGE {
	return []verbs.SGE{{Addr: x.mr.Addr() + uint64(off), Length: uint32(n), LKey: x.mr.LKey()}}
}

func (x *exchange) postRecv(slot uint64) error {
	_, err := x.qp.PostRecv([]verbs.RecvWorkRequest{{WRID: slot, SGList: x.sge(int(slot)*exSlot, exSlot)}})
	return err
}

func (x *exchange) reap() error {
	var wcs [16]verbs.WorkCompletion
	for {
		got := false
		for n := x.cq.Poll(wcs[:]); n > 0; n = x.cq.Poll(wcs[:]) {
			for _, wc := range wcs[:n] {
				got = true
				if wc.Status != verbs.WCSuccess {
					// What succeeded before it still counts: a peer that has all it wants may be gone already.
					if x.failed == nil {
						x.failed = fmt.Errorf("completion %d: %s (vendor 0x%x)", wc.WRID, wc.Status, wc.VendorErr)
					}
					continue
				}
				if wc.Opcode == verbs.WCRecv {
					x.recvs = append(x.recvs, wc)
				} else {
					x.sends = append(x.sends, wc)
				}
			}
		}
		if got {
			return nil
		}
		missed, err := x.cq.Arm(false)
		if err != nil {
			return err
		}
		if missed {
			continue
		}
		if n, err := x.ch.WaitThread(x.events[:], 60*time.Second); err != nil || n == 0 {
			return fmt.Errorf("no completion within a minute: %v", err)
		}
	}
}

func (x *exchange) sent(n int) error {
	for len(x.sends) < n {
		if x.failed != nil {
			return x.failed
		}
		if err := x.reap(); err != nil {
			return err
		}
	}
	x.sends = x.sends[n:]
	return nil
}

func (x *exchange) received() (wc verbs.WorkCompletion, err error) {
	for len(x.recvs) == 0 {
		if x.failed != nil {
			return wc, x.failed
		}
		if err := x.reap(); err != nil {
			return wc, err
		}
	}
	wc = x.recvs[0]
	x.recvs = x.recvs[1:]
	return wc, nil
}

var exSizes = []int{0, 1, 3, 4, 255, 1023, 1024, 1025, 4095, 4096, 4097, 10000, 65536, exSlot - 1, exSlot}

func (x *exchange) drive() error {
	for i, n := range exSizes {
		src := x.mem.Slice(exSource, n)
		fill(src, byte(i))
		if _, err := x.qp.PostSend([]verbs.SendWorkRequest{
			{WRID: 1, Opcode: verbs.OpRDMAWrite, SGList: x.sge(exSource, n), RemoteAddr: x.raddr + exTarget, RKey: x.rkey},
			{WRID: 2, Opcode: verbs.OpRDMARead, SGList: x.sge(exRead, n), RemoteAddr: x.raddr + exTarget, RKey: x.rkey},
			{WRID: 3, Opcode: verbs.OpSend, SGList: x.sge(exSource, n)},
		}); err != nil {
			return err
		}
		if err := x.sent(3); err != nil {
			return err
		}
		if !bytes.Equal(src, x.mem.Slice(exRead, n)) {
			return fmt.Errorf("WRITE and READ of %d bytes: wrong data", n)
		}
		wc, err := x.received()
		if err != nil {
			return err
		}
		if int(wc.ByteLen) != n || !bytes.Equal(src, x.mem.Slice(int(wc.WRID)*exSlot, n)) {
			return fmt.Errorf("echo of %d bytes: %d bytes, wrong data", n, wc.ByteLen)
		}
		if err := x.postRecv(wc.WRID); err != nil {
			return err
		}
	}
	return nil
}

func (x *exchange) follow() error {
	for range exSizes {
		wc, err := x.received()
		if err != nil {
			return err
		}
		if _, err := x.qp.PostSend([]verbs.SendWorkRequest{{WRID: 4, Opcode: verbs.OpSend, SGList: x.sge(int(wc.WRID)*exSlot, int(wc.ByteLen))}}); err != nil {
			return err
		}
		if err := x.sent(1); err != nil {
			return err
		}
		if err := x.postRecv(wc.WRID); err != nil {
			return err
		}
	}
	return nil
}

// flood runs WRITEs, READs and SENDs both ways at once, several in flight.
func (x *exchange) flood(rounds int) error {
	const depth = 8
	for i := range rounds {
		var wrs []verbs.SendWorkRequest
		for j := range depth {
			n := 1 + (i*7919+j*104729)%65536
			wrs = append(wrs,
				verbs.SendWorkRequest{Opcode: verbs.OpRDMAWrite, SGList: x.sge(exSource+j, n), RemoteAddr: x.raddr + exTarget, RKey: x.rkey},
				verbs.SendWorkRequest{Opcode: verbs.OpRDMARead, SGList: x.sge(exRead, n), RemoteAddr: x.raddr + exTarget, RKey: x.rkey},
				verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: x.sge(exSource, min(n, 8192))})
		}
		if _, err := x.qp.PostSend(wrs); err != nil {
			return err
		}
		for range depth {
			wc, err := x.received()
			if err != nil {
				return err
			}
			if err := x.postRecv(wc.WRID); err != nil {
				return err
			}
		}
		if err := x.sent(len(wrs)); err != nil {
			return err
		}
	}
	return nil
}

// run is the whole conversation on a connection that is ready.
func (x *exchange) run(conn cm.Conn, active bool) error {
	first, second := x.drive, x.follow
	if !active {
		first, second = x.follow, x.drive
	}
	if err := first(); err != nil {
		return fmt.Errorf("first half: %w", err)
	}
	if err := second(); err != nil {
		return fmt.Errorf("second half: %w", err)
	}
	if err := x.flood(12); err != nil {
		return fmt.Errorf("flood: %w", err)
	}
	if active {
		// A last word, so that the other side is done before the connection goes.
		if _, err := x.received(); err != nil {
			return fmt.Errorf("last word: %w", err)
		}
		return conn.Disconnect()
	}
	if _, err := x.qp.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpSend}}); err != nil {
		return err
	}
	if err := x.sent(1); err != nil {
		return fmt.Errorf("last word: %w", err)
	}
	select {
	case <-conn.Done():
		if err := conn.Err(); !errors.Is(err, cm.ErrDisconnected) {
			return err
		}
	case <-time.After(30 * time.Second):
		return errors.New("the peer does not disconnect")
	}
	return conn.Disconnect()
}

func exchangeParam(x *exchange) cm.ConnParam {
	return cm.ConnParam{PrivateData: x.private(), ResponderResources: 4, InitiatorDepth: 4, RetryCount: 7, RNRRetryCount: 7, Timeout: 40 * time.Second}
}

func (x *exchange) ready(c cm.Conn) error {
	if err := c.InitQP(x.qp); err != nil {
		return err
	}
	for i := range uint64(exRecvSlots) {
		if err := x.postRecv(i); err != nil {
			return err
		}
	}
	return nil
}

func (x *exchange) connect(k cm.Connector, to netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	c, err := k.Resolve(ctx, netip.AddrPort{}, cm.Addr{IP: to})
	if err != nil {
		return fmt.Errorf("resolve: %w", err)
	}
	defer c.Close()
	if err := x.ready(c); err != nil {
		return err
	}
	rep, err := c.Connect(ctx, exchangeParam(x))
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	x.learn(rep.PrivateData)
	return x.run(c, true)
}

func (x *exchange) accept(l cm.Listener) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	c, err := l.Accept(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := x.ready(c); err != nil {
		return err
	}
	x.learn(c.Request().PrivateData)
	if err := c.Accept(ctx, exchangeParam(x)); err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	return x.run(c, false)
}

// TestPeerProcess is the child with the userspace device.
func TestPeerProcess(t *testing.T) {
	f := strings.Fields(os.Getenv(peerEnv))
	if len(f) < 2 {
		t.Skip("is run by TestKernelPeer")
	}
	var opts []Option
	if out := os.Getenv("VMTEST_OUT"); out != "" && os.Getenv("SOFTROCE_CAPTURE") != "" {
		w, err := os.Create(filepath.Join(out, os.Getenv("SOFTROCE_CAPTURE")))
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		opts = append(opts, WithCapture(w))
	}
	d, err := Open(netip.MustParseAddr(f[1]), opts...)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	port, _ := d.QueryPort(1)
	fmt.Printf("mtu %d\n", port.ActiveMTU.Bytes())
	x := newExchange(t, d)
	if f[0] == "listen" {
		l, lerr := d.Connector().Listen(netip.AddrPortFrom(d.Addr(), 0), 4)
		if lerr != nil {
			t.Fatal(lerr)
		}
		fmt.Printf("listening %s\n", l.Addr())
		err = x.accept(l)
	} else {
		err = x.connect(d.Connector(), netip.MustParseAddrPort(f[2]))
	}
	time.Sleep(200 * time.Millisecond)
	b, _ := json.Marshal(d.Stats())
	fmt.Printf("stats %s\n", b)
	if err != nil {
		t.Fatal(err)
	}
}

// rxeCounters are the kernel device's counters that a quiet link leaves alone.
func rxeCounters(t *testing.T, dev string) map[string]int {
	t.Helper()
	m := map[string]int{}
	for _, name := range []string{"duplicate_request", "out_of_seq_request", "rcvd_seq_err", "rcvd_rnr_err", "send_rnr_err", "retry_exceeded_err", "completer_retry_err", "send_err"} {
		b, err := os.ReadFile("/sys/class/infiniband/" + dev + "/ports/1/hw_counters/" + name)
		if err != nil {
			t.Fatal(err)
		}
		m[name], _ = strconv.Atoi(strings.TrimSpace(string(b)))
	}
	return m
}

func TestKernelPeer(t *testing.T) {
	require.Guest(t)
	ns := os.Getenv("VMTEST_PEER_NS")
	if ns == "" {
		require.Missing(t, "a network namespace: scenario netns or netns4096")
	}
	const dev = "rxe1"
	// A veth pair hands packets over on the CPU that sends them, so the two CPUs' packets overtake each other, which no wire lets them. Receive packet steering to one CPU
	// makes it a wire.
	for _, c := range [][]string{{"sh", "-c", "echo 1 > /sys/class/net/veth0/queues/rx-0/rps_cpus"},
		{"ip", "netns", "exec", ns, "sh", "-c", "echo 1 > /sys/class/net/veth1/queues/rx-0/rps_cpus"}} {
		if out, err := exec.Command(c[0], c[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v %s", c, err, out)
		}
	}
	for _, fam := range []struct{ name, kernel, soft string }{
		{"IPv4", os.Getenv("VMTEST_RXE_ADDR"), os.Getenv("VMTEST_PEER_ADDR")},
		{"IPv6", os.Getenv("VMTEST_RXE_ADDR6"), os.Getenv("VMTEST_PEER_ADDR6")},
	} {
		for _, listen := range []bool{true, false} {
			name := fam.name + "/softroce " + map[bool]string{true: "listens", false: "connects"}[listen]
			t.Run(name, func(t *testing.T) {
				ctx, err := uverbs.Open(dev)
				if err != nil {
					t.Fatal(err)
				}
				defer ctx.Close()
				k, err := ucm.Open(ctx)
				if err != nil {
					t.Fatal(err)
				}
				defer k.Close()
				before := rxeCounters(t, dev)
				x := newExchange(t, ctx)
				arg := "listen " + fam.soft
				var l cm.Listener
				if !listen {
					if l, err = k.Listen(netip.AddrPortFrom(netip.MustParseAddr(fam.kernel), 0), 4); err != nil {
						t.Fatal(err)
					}
					defer l.Close()
					arg = fmt.Sprintf("connect %s %s", fam.soft, netip.AddrPortFrom(netip.MustParseAddr(fam.kernel), l.Addr().Port()))
				}
				cmd := exec.Command("ip", "netns", "exec", ns, "/proc/self/exe", "-test.run=^TestPeerProcess$", "-test.timeout=4m")
				if exe, err := os.Executable(); err == nil {
					cmd.Args[4] = exe
				}
				cmd.Env = append(os.Environ(), peerEnv+"="+arg)
				cmd.Stderr = os.Stderr
				out, err := cmd.StdoutPipe()
				if err != nil {
					t.Fatal(err)
				}
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				lines := bufio.NewScanner(out)
				lines.Buffer(nil, 1<<20)
				listening := make(chan netip.AddrPort, 1)
				ended := make(chan struct{})
				var stats Stats
				go func() {
					defer close(ended)
					for lines.Scan() {
						s := lines.Text()
						if a, ok := strings.CutPrefix(s, "listening "); ok {
							listening <- netip.MustParseAddrPort(a)
						} else if j, ok := strings.CutPrefix(s, "stats "); ok {
							json.Unmarshal([]byte(j), &stats)
							continue
						}
						t.Log("peer: " + s)
					}
				}()
				if listen {
					select {
					case a := <-listening:
						err = x.connect(k, a)
					case <-ended:
						err = errors.New("the peer ended")
					}
				} else {
					err = x.accept(l)
				}
				if err != nil {
					t.Error(err)
				}
				<-ended
				if err := cmd.Wait(); err != nil {
					t.Errorf("peer: %v", err)
				}
				for name, n := range rxeCounters(t, dev) {
					if n != before[name] {
						t.Errorf("rxe counts %d of %s", n-before[name], name)
					}
				}
				if !stats.clean() || stats.PacketsReceived == 0 {
					t.Errorf("softroce counts what a quiet link does not have: %+v", stats)
				}
				t.Logf("%d packets sent, %d received, none lost or repeated", stats.PacketsSent, stats.PacketsReceived)
			})
		}
	}
}

// clean says that nothing was lost, repeated or out of order.
func (s *Stats) clean() bool {
	tr := &s.Transport
	return s.ICRCErrors+s.Malformed+s.WrongPeer+s.BadMAD+s.MADsLost+s.CQOverruns+s.Socket.KernelDrops+s.Socket.SendErrors+
		tr.Retransmits+tr.Timeouts+tr.TxNakSequence+tr.RxNakSequence+tr.ImpliedNaks+tr.Duplicates+tr.OutOfOrder+tr.ReadReplays+tr.TxRNR+tr.RxRNR+
		s.CM.Malformed == 0
	// CM messages are sent again when an answer takes more than a second, which on an emulated machine it may.
}
