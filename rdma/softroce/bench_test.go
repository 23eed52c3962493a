package softroce

// What a storage command costs over the device alone: a 100-byte SEND one way, a RDMA WRITE of 4 KiB or more and an 80-byte SEND back, as
// an SRP read has them. The target is another process. "poll" spins with sched_yield on both sides, "block" waits for notifications on both.
// QD 32 posts in batches: all WRITEs of a batch before its SENDs, which is what lets them leave as trains.

import (
	"bufio"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/verbs"
)

const (
	benchRequest, benchResponse = 100, 80
	benchSlots                  = 128
	benchTargetEnv              = "SOFTROCE_BENCH_TARGET" // how to wait, and bytes per command
)

// reap takes completions in one way or another until stop.
type reaper struct {
	e      *end
	how    string
	wcs    [64]verbs.WorkCompletion
	events [4]verbs.CompletionQueue
}

func (r *reaper) next() []verbs.WorkCompletion {
	for {
		if n := r.e.cq.Poll(r.wcs[:]); n > 0 {
			return r.wcs[:n]
		}
		switch r.how {
		case "poll":
			unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
			continue
		}
		missed, err := r.e.cq.Arm(false)
		if err != nil {
			return nil
		}
		if missed {
			continue
		}
		if r.how == "thread" {
			_, err = r.e.ch.WaitThread(r.events[:], -1)
		} else {
			_, err = r.e.ch.Wait(r.events[:])
		}
		if err != nil {
			return nil
		}
	}
}

// TestBenchTarget is the target process of the benchmarks.
func TestBenchTarget(t *testing.T) {
	how, size, ok := strings.Cut(os.Getenv(benchTargetEnv), " ")
	if !ok {
		t.Skip("is run by the benchmarks")
	}
	benchBlock, err := strconv.Atoi(size)
	if err != nil {
		t.Fatal(err)
	}
	d := open(t)
	e := newEnd(t, d, false)
	l, err := d.Connector().Listen(netip.AddrPortFrom(d.Addr(), 0), 1)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("listening %s\n", l.Addr())
	c, err := l.Accept(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	e.conn = c
	if err := c.InitQP(e.qp); err != nil {
		t.Fatal(err)
	}
	recvs := make([]verbs.RecvWorkRequest, benchSlots)
	for i := range recvs {
		recvs[i] = verbs.RecvWorkRequest{WRID: uint64(i), SGList: e.sge(i*128, 128)}
	}
	if _, err := e.qp.PostRecv(recvs); err != nil {
		t.Fatal(err)
	}
	if err := c.Accept(context.Background(), connParam); err != nil {
		t.Fatal(err)
	}
	// The initiator's buffers: slot i of 4 KiB at 1 MiB, told in the request's private data.
	var base uint64
	var rkey uint32
	fmt.Sscan(string(c.Request().PrivateData), &base, &rkey)
	r := reaper{e: e, how: how}
	var writes, sends [64]verbs.SendWorkRequest
	for i := range writes {
		writes[i] = verbs.SendWorkRequest{Opcode: verbs.OpRDMAWrite, RKey: rkey, SGList: make([]verbs.SGE, 1)}
		sends[i] = verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: e.sge(512<<10, benchResponse)}
	}
	all := make([]verbs.SendWorkRequest, 0, 128)
	posted := 0
	for {
		wcs := r.next()
		if wcs == nil {
			return
		}
		n := 0
		for i := range wcs {
			wc := &wcs[i]
			if wc.Status != verbs.WCSuccess {
				return
			}
			if wc.Opcode != verbs.WCRecv {
				continue
			}
			slot := int(e.mem.Bytes()[wc.WRID*128])
			w := &writes[n]
			w.SGList[0] = e.sge(1<<20+slot*benchBlock, benchBlock)[0]
			w.RemoteAddr = base + uint64(slot*benchBlock)
			if _, err := e.qp.PostRecv(recvs[wc.WRID : wc.WRID+1]); err != nil {
				t.Fatal(err)
			}
			n++
		}
		if n == 0 {
			continue
		}
		all = append(append(all[:0], writes[:n]...), sends[:n]...)
		for i := range all {
			all[i].Flags = 0
		}
		if posted += 2 * n; posted >= 64 {
			all[len(all)-1].Flags, posted = verbs.SendSignaled, 0
		}
		if k, err := e.qp.PostSend(all); err != nil {
			fmt.Printf("posted %d of %d: %v\n", k, len(all), err)
			return
		}
	}
}

func cpu(who int) time.Duration {
	var u syscall.Rusage
	syscall.Getrusage(who, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func processCPU(pid int) time.Duration {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	var u, s int64
	fmt.Sscan(f[11], &u)
	fmt.Sscan(f[12], &s)
	return time.Duration(u+s) * 10 * time.Millisecond
}

func BenchmarkRead(b *testing.B) {
	for _, how := range []string{"poll", "block", "thread"} {
		for _, c := range []struct{ size, depth int }{{4096, 1}, {4096, 8}, {4096, 32}, {4096, 128}, {64 << 10, 8}, {1 << 20, 4}} {
			b.Run(fmt.Sprintf("%s/%dk/qd%d", how, c.size>>10, c.depth), func(b *testing.B) { benchRead(b, how, c.size, c.depth) })
		}
	}
}

func benchRead(b *testing.B, how string, size, depth int) {
	b.SetBytes(int64(size))
	cmd := exec.Command(os.Args[0], "-test.run=^TestBenchTarget$", "-test.timeout=10m")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d", benchTargetEnv, how, size))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	var addr netip.AddrPort
	in := bufio.NewScanner(out)
	for in.Scan() {
		if a, ok := strings.CutPrefix(in.Text(), "listening "); ok {
			addr = netip.MustParseAddrPort(a)
			break
		}
	}
	go func() {
		for in.Scan() {
			if s := in.Text(); s != "PASS" && !strings.HasPrefix(s, "ok") {
				b.Log("target: ", s)
			}
		}
	}()
	e := newEnd(b, open(b), false)
	c, err := e.d.Connector().Resolve(context.Background(), netip.AddrPort{}, cm.Addr{IP: addr})
	if err != nil {
		b.Fatal(err)
	}
	e.conn = c
	if err := c.InitQP(e.qp); err != nil {
		b.Fatal(err)
	}
	recvs := make([]verbs.RecvWorkRequest, benchSlots)
	reqs := make([]verbs.SendWorkRequest, benchSlots)
	free := make([]int, 0, benchSlots)
	for i := range recvs {
		recvs[i] = verbs.RecvWorkRequest{WRID: uint64(i), SGList: e.sge(i*128, 128)}
		off := 64<<10 + i*128
		e.mem.Bytes()[off] = byte(i)
		reqs[i] = verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: e.sge(off, benchRequest)}
		if i < depth {
			free = append(free, i)
		}
	}
	if _, err := e.qp.PostRecv(recvs); err != nil {
		b.Fatal(err)
	}
	p := connParam
	p.PrivateData = []byte(fmt.Sprintf("%d %d ", e.mr.Addr()+1<<20, e.mr.RKey()))
	if _, err := c.Connect(context.Background(), p); err != nil {
		b.Fatal(err)
	}
	// Responses do not say which request they are for; they come in order.
	r := reaper{e: e, how: how}
	started, done, posted := 0, 0, 0
	batch := make([]verbs.SendWorkRequest, 0, benchSlots)
	order := make([]int, 0, benchSlots)
	post := func() {
		batch = batch[:0]
		for len(free) > 0 && started < b.N {
			slot := free[len(free)-1]
			free = free[:len(free)-1]
			order = append(order, slot)
			q := reqs[slot]
			if posted++; posted >= 32 {
				q.Flags, posted = verbs.SendSignaled, 0
			}
			batch = append(batch, q)
			started++
		}
		if len(batch) > 0 {
			if _, err := e.qp.PostSend(batch); err != nil {
				b.Fatal(err)
			}
		}
	}
	own, its := cpu(syscall.RUSAGE_SELF), processCPU(cmd.Process.Pid)
	b.ResetTimer()
	post()
	for done < b.N {
		for _, wc := range r.next() {
			if wc.Status != verbs.WCSuccess {
				b.Fatalf("%+v", wc)
			}
			if wc.Opcode != verbs.WCRecv {
				continue
			}
			if _, err := e.qp.PostRecv(recvs[wc.WRID : wc.WRID+1]); err != nil {
				b.Fatal(err)
			}
			free = append(free, order[0])
			order = append(order[:0], order[1:]...)
			done++
		}
		post()
	}
	b.StopTimer()
	used := cpu(syscall.RUSAGE_SELF) - own + processCPU(cmd.Process.Pid) - its
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "IO/s")
	b.ReportMetric(float64(used.Microseconds())/float64(b.N), "cpu-us/IO")
	s := e.d.Stats()
	b.ReportMetric(float64(s.Transport.Retransmits), "rtx")
}
