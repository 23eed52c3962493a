package bench_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"srp-initiator/bench"
	"srp-initiator/completion"
	"srp-initiator/internal/require"
	"srp-initiator/rdma"
	"srp-initiator/srp"
	"srp-initiator/srp/disk"
	"srp-initiator/srp/scsi"
	targetemu "srp-initiator/target-emu"
	"srp-initiator/target-emu/lun"
	"srp-initiator/target-emu/lun/luntest"

	"os"
)

// open logs in to target-emu over softroce in this process, or in a test guest to the kernel's target.
func open(t testing.TB, mode completion.Mode, spec string, change ...func(*targetemu.Config)) (*srp.Session, *disk.Disk) {
	t.Helper()
	var text string
	if os.Getenv("VMTEST_GUEST") != "" {
		addr, id := require.SRPT(t)
		text = "srp://" + addr + "/" + id
	} else {
		text = startTargetWith(t, change, spec)
	}
	p, o, err := srp.ParseTarget(text)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Resolve(t.Context()); err != nil {
		t.Fatal(err)
	}
	f, err := rdma.Open("auto", rdma.WithPeer(p.Src, p.Addr()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	o.Completion = completion.Config{Mode: mode}
	s, err := srp.Login(t.Context(), srp.Config{Device: f.Context(), Connector: f.Connector()}, p, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close session: %v", err)
		}
	})
	l, err := scsi.ParseLUN("0")
	if err != nil {
		t.Fatal(err)
	}
	d, err := disk.Open(t.Context(), s, l)
	if err != nil {
		t.Fatal(err)
	}
	return s, d
}

// startTarget serves one unit per spec, from LUN 0 on.
func startTarget(t testing.TB, specs ...string) string {
	t.Helper()
	return startTargetWith(t, nil, specs...)
}

func startTargetWith(t testing.TB, change []func(*targetemu.Config), specs ...string) string {
	t.Helper()
	f, err := rdma.Open("softroce")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	g, err := f.Context().QueryGID(1, 0)
	if err != nil {
		t.Fatal(err)
	}
	m := &lun.Map{}
	for k, spec := range specs {
		luntest.Units(t, m, map[uint32]string{uint32(k): spec})
	}
	cfg := targetemu.Config{Listen: netip.AddrPortFrom(g.GID.Addr(), 5555), Units: m, IDExt: 0x1122334455667788, IOCGUID: 0x99aabbccddeeff00}
	for _, f := range change {
		f(&cfg)
	}
	target, err := targetemu.New(f.Context(), f.Connector(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- target.Serve(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	return fmt.Sprintf("srp://%s:5555/1122334455667788:99aabbccddeeff00", g.GID.Addr())
}

var modes = []completion.Mode{completion.Interrupt, completion.Thread, completion.Poll, completion.Direct, completion.Adaptive}

// TestVerifiedPatterns runs every pattern with every byte checked, in every mode.
func TestVerifiedPatterns(t *testing.T) {
	for _, mode := range modes {
		s, d := open(t, mode, "ram:16m")
		for _, p := range bench.Patterns {
			for _, depth := range []int{1, 32} {
				w := bench.Workload{Pattern: p, BlockSize: 4096, Depth: depth, Jobs: 2, Loops: 500, Verify: true, Seed: 7, ReadPct: 50, Size: 4 << 20}
				r, err := bench.Run(t.Context(), s, d, w)
				if err != nil {
					t.Fatalf("%s %s depth %d: %v", mode, p, depth, err)
				}
				want := int64(500)
				if p == bench.Write || p == bench.RandWrite {
					want = 1000 // each read back
				}
				if p == bench.RandRW {
					want = r.Commands
				}
				backs := r.Commands - 500
				if r.ReadBacks != backs {
					t.Errorf("%s %s depth %d: %d of %d commands were read-backs, want %d", mode, p, depth, r.ReadBacks, r.Commands, backs)
				}
				if r.Commands != want || r.Verified < 500 || r.IOPS <= 0 || r.MaxUS < r.P50US || r.P50US <= 0 {
					t.Errorf("%s %s depth %d: %+v", mode, p, depth, r)
				}
			}
		}
		s.Close()
	}
}

// TestVerifyNotices writes behind the workload's back.
func TestVerifyNotices(t *testing.T) {
	s, d := open(t, completion.Interrupt, "ram:16m")
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	go func() {
		time.Sleep(200 * time.Millisecond)
		for i := int64(0); i < 256 && ctx.Err() == nil; i++ {
			d.WriteAt(make([]byte, 512), i*4096+2048)
		}
	}()
	_, err := bench.Run(ctx, s, d, bench.Workload{Pattern: bench.RandRead, BlockSize: 4096, Depth: 4, Jobs: 1, Runtime: 20 * time.Second, Verify: true, Size: 1 << 20})
	if !errors.Is(err, bench.ErrVerify) {
		t.Errorf("%v, want a mismatch", err)
	}
}

// TestBusyTarget: BUSY, TASK SET FULL and unit attentions cost time, not the run; no byte goes wrong.
func TestBusyTarget(t *testing.T) {
	script, err := os.ReadFile("../target-emu/testdata/storm.faults")
	if err != nil {
		t.Fatal(err)
	}
	faults, err := targetemu.ParseFaults(string(script))
	if err != nil {
		t.Fatal(err)
	}
	s, d := open(t, completion.Interrupt, "ram:16m", func(c *targetemu.Config) { c.Faults = faults })
	for _, w := range []struct {
		depth int
		loops int64
	}{{16, 1000}, {8, 300}, {8, 301}, {8, 302}, {2, 300}} { // what is held at the end goes by its time
		r, err := bench.Run(t.Context(), s, d, bench.Workload{Pattern: bench.RandRW, BlockSize: 4096, Depth: w.depth, Jobs: 1, Loops: w.loops, Verify: true, ReadPct: 50, Size: 1 << 20})
		if err != nil || r.Verified < w.loops {
			t.Fatalf("depth %d, %d loops: %v, %+v", w.depth, w.loops, err, r)
		}
		if r.MaxUS > 10e6 {
			t.Errorf("depth %d, %d loops: a command took %.0f us", w.depth, w.loops, r.MaxUS)
		}
	}
}

// TestResidualsEndARun: a good status is not enough, not even while the range is filled.
func TestResidualsEndARun(t *testing.T) {
	for _, c := range []struct {
		script, want string
		pattern      bench.Pattern
		verify       bool
	}{
		{"cmd op=write nth=20 : residual out-under=512", "3584 of 4096 bytes", bench.RandRead, true}, // filling
		{"cmd op=write nth=20 : residual out-over=512", "512 bytes more", bench.RandWrite, false},
		{"cmd op=write nth=20 : residual in-under=512", "3584 of 4096 bytes", bench.RandWrite, false}, // told for the other direction
		{"cmd op=read nth=20 : residual in-under=4096", "0 of 4096 bytes", bench.RandRead, false},
		{"cmd op=read nth=20 : residual in-over=4294967295", "4294967295 bytes more", bench.RandRead, false},
	} {
		faults, err := targetemu.ParseFaults(c.script)
		if err != nil {
			t.Fatal(err)
		}
		s, d := open(t, completion.Interrupt, "ram:16m", func(cfg *targetemu.Config) { cfg.Faults = faults })
		_, err = bench.Run(t.Context(), s, d, bench.Workload{Pattern: c.pattern, BlockSize: 4096, Depth: 4, Jobs: 2, Loops: 200, Verify: c.verify, Seed: 1, Size: 1 << 20})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want an error with %q", c.script, err, c.want)
		}
		s.Close()
	}
}

// TestNoWayToTryAgain: a command that got BUSY and cannot be sent again, because the session has ended meanwhile, is no success.
func TestNoWayToTryAgain(t *testing.T) {
	faults, err := targetemu.ParseFaults("cmd op=read : status busy")
	if err != nil {
		t.Fatal(err)
	}
	s, d := open(t, completion.Interrupt, "ram:16m", func(cfg *targetemu.Config) { cfg.Faults = faults })
	time.AfterFunc(100*time.Millisecond, func() { s.Close() })
	r, err := bench.Run(t.Context(), s, d, bench.Workload{Pattern: bench.RandRead, BlockSize: 4096, Depth: 1, Jobs: 1, Loops: 1, Size: 1 << 20})
	if !errors.Is(err, srp.ErrClosed) {
		t.Errorf("%v, %+v; want %v", err, r, srp.ErrClosed)
	}
}

func TestRate(t *testing.T) {
	s, d := open(t, completion.Adaptive, "ram:16m")
	r, err := bench.Run(t.Context(), s, d, bench.Workload{Pattern: bench.RandRead, BlockSize: 512, Depth: 4, Jobs: 2, Runtime: time.Second, Rate: 400, Warmup: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if r.IOPS < 300 || r.IOPS > 440 {
		t.Errorf("asked for 400 commands per second, got %.0f", r.IOPS)
	}
}

// TestVerifiedAreCounted: of a timed run the verified commands are those that count.
func TestVerifiedAreCounted(t *testing.T) {
	s, d := open(t, completion.Adaptive, "ram:16m")
	r, err := bench.Run(t.Context(), s, d, bench.Workload{Pattern: bench.RandRead, BlockSize: 4096, Depth: 8, Jobs: 1, Runtime: 100 * time.Millisecond, Warmup: 100 * time.Millisecond, Size: 1 << 20, Verify: true})
	if err != nil {
		t.Fatal(err)
	}
	if r.Verified != r.Commands || r.Commands == 0 {
		t.Errorf("%d of %d commands verified", r.Verified, r.Commands)
	}
}

// TestRateIsEven: with a rate each command is submitted when it is due, by itself, or with those of the same 50 us, by an alarm of each job's own.
func TestRateIsEven(t *testing.T) {
	for _, m := range []completion.Mode{completion.Interrupt, completion.Direct} {
		s, d := open(t, m, "ram:16m")
		for _, c := range []struct{ rate, most, least float64 }{{50, 1, 0.7}, {100000, 0.25, 0}} { // doorbells per command
			r, err := bench.Run(t.Context(), s, d, bench.Workload{Pattern: bench.RandRead, BlockSize: 512, Depth: 16, Jobs: 1, Runtime: 500 * time.Millisecond, Rate: c.rate})
			if err != nil {
				t.Fatal(err)
			}
			if got := float64(r.Channels.Doorbells) / float64(r.Channels.Commands); got > c.most || got < c.least {
				t.Errorf("%v, %.0f commands per second: rung for %.2f of them, want %.2f to %.2f", m, c.rate, got, c.least, c.most)
			}
		}
		before := timers(t)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			bench.Run(ctx, s, d, bench.Workload{Pattern: bench.RandRead, BlockSize: 512, Depth: 4, Jobs: 3, Runtime: time.Minute, Rate: 1000})
		}()
		for end := time.Now().Add(30 * time.Second); timers(t) != before+3; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Errorf("%v: %d alarms, want 3", m, timers(t)-before)
				break
			}
		}
		cancel()
		<-ended
		if n := timers(t); n != before {
			t.Errorf("%v: %d alarms after the run", m, n-before)
		}
	}
}

// timers counts this process's timerfds.
func timers(t *testing.T) (n int) {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.Contains(to, "timerfd") {
			n++
		}
	}
	return n
}

func TestCancel(t *testing.T) {
	s, d := open(t, completion.Interrupt, "ram:16m")
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(100*time.Millisecond, cancel)
	began := time.Now()
	if _, err := bench.Run(ctx, s, d, bench.Workload{Pattern: bench.RandRead, BlockSize: 4096, Depth: 32, Jobs: 4, Runtime: time.Minute}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("cancelled after %v", took)
	}
}

func TestWorkloadErrors(t *testing.T) {
	s, d := open(t, completion.Interrupt, "ram:16m")
	good := bench.Workload{Pattern: bench.Read, BlockSize: 4096, Depth: 1, Jobs: 1, Loops: 1}
	for _, c := range []struct {
		say    string
		change func(*bench.Workload)
	}{
		{"rw: ", func(w *bench.Workload) { w.Pattern = "trim" }},
		{"bs: ", func(w *bench.Workload) { w.BlockSize = 1000 }},
		{"bs: ", func(w *bench.Workload) { w.BlockSize = 1 << 30 }},
		{"iodepth: ", func(w *bench.Workload) { w.Depth = 0 }},
		{"jobs: ", func(w *bench.Workload) { w.Jobs = -1 }},
		{"runtime: ", func(w *bench.Workload) { w.Loops = 0 }},
		{"jobs: 1024 times iodepth 4096 are 4194304 commands under way; want 65536 at most", func(w *bench.Workload) { w.Jobs, w.Depth = 1024, 4096 }},
		{"bs: 1048576 bytes for each of 4096 commands under way are more than 1073741824 in all; want 262144 at most", func(w *bench.Workload) { w.Depth, w.BlockSize = 4096, 1<<20 }},
		{"rate: 0.5 is not 0 (as many as go) or 1 to 10000000", func(w *bench.Workload) { w.Rate = 0.5 }},
		{"rate: ", func(w *bench.Workload) { w.Rate = 2e9 }},
		{"loops: -1 is negative; want 1 or more", func(w *bench.Workload) { w.Loops = -1 }},
		{"rwmixread: ", func(w *bench.Workload) { w.ReadPct = 101 }},
		{"offset: ", func(w *bench.Workload) { w.Offset = 16 << 20 }},
		{"size: ", func(w *bench.Workload) { w.Offset, w.Size = 4096, 16<<20 }},
		{"size: ", func(w *bench.Workload) { w.Verify, w.Depth, w.Size = true, 64, 4096 }},
	} {
		w := good
		c.change(&w)
		var we *bench.WorkloadError
		if _, err := bench.Run(t.Context(), s, d, w); !errors.As(err, &we) || !strings.HasPrefix(err.Error(), c.say) {
			t.Errorf("%s: %v", c.say, err)
		}
	}
	if st := s.Stats(); st.Total.Commands > 20 {
		t.Errorf("%d commands were sent", st.Total.Commands)
	}
}

// TestNullUnit: what a null unit does to Verify is told as such.
func TestNullUnit(t *testing.T) {
	s, d := open(t, completion.Adaptive, "null:16m")
	for _, p := range []bench.Pattern{bench.RandRead, bench.RandWrite} {
		_, err := bench.Run(t.Context(), s, d, bench.Workload{Pattern: p, BlockSize: 4096, Depth: 4, Jobs: 1, Loops: 100, Verify: true, Size: 1 << 20})
		if !errors.Is(err, bench.ErrVerify) || !strings.Contains(err.Error(), "null units") {
			t.Errorf("%s: %v", p, err)
		}
	}
}

// TestReadOnlyUnit: found before anything is sent.
func TestReadOnlyUnit(t *testing.T) {
	s, d := open(t, completion.Adaptive, "ram:16m,ro")
	before := s.Stats().Total.Commands
	for want, w := range map[string]bench.Workload{"rw: randwrite writes": {Pattern: bench.RandWrite}, "verify: ": {Pattern: bench.Read, Verify: true}} {
		w.BlockSize, w.Depth, w.Jobs, w.Loops = 4096, 1, 1, 1
		var we *bench.WorkloadError
		if _, err := bench.Run(t.Context(), s, d, w); !errors.As(err, &we) || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if n := s.Stats().Total.Commands - before; n != 0 {
		t.Errorf("%d commands were sent", n)
	}
}

// TestCountersOfARun: counters are those of the measured time, whatever the session did before.
func TestCountersOfARun(t *testing.T) {
	s, d := open(t, completion.Interrupt, "ram:16m")
	for range 2 {
		r, err := bench.Run(t.Context(), s, d, bench.Workload{Pattern: bench.RandRead, BlockSize: 4096, Depth: 4, Jobs: 1, Loops: 100})
		if err != nil || r.Channels.Commands != 100 || r.Channels.Responses != 100 {
			t.Errorf("%v: %d commands, %d responses, want 100", err, r.Channels.Commands, r.Channels.Responses)
		}
	}
}

// TestSlowRateEnds: a run ends when its time is over, not when the next command would have been due.
func TestSlowRateEnds(t *testing.T) {
	s, d := open(t, completion.Interrupt, "ram:16m")
	began := time.Now()
	r, err := bench.Run(t.Context(), s, d, bench.Workload{Pattern: bench.RandRead, BlockSize: 4096, Depth: 1, Jobs: 10, Runtime: 100 * time.Millisecond, Rate: 1})
	if took := time.Since(began); err != nil || took > 5*time.Second || r.Commands != 1 {
		t.Errorf("%v after %s: %+v", err, took, r)
	}
}
