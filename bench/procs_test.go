package bench_test

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"srp-initiator/bench"
	"srp-initiator/completion"
	"srp-initiator/srp"
	"srp-initiator/srp/disk"
	"srp-initiator/srp/scsi"
	targetemu "srp-initiator/target-emu"
)

// procsBefore is what GOMAXPROCS is before a run of these tests; the runs ask for another number.
const procsBefore = 3

func withProcs(t *testing.T) {
	t.Helper()
	old := runtime.GOMAXPROCS(procsBefore)
	t.Cleanup(func() { runtime.GOMAXPROCS(old) })
}

func wantRestored(t *testing.T, after string) {
	t.Helper()
	if n := runtime.GOMAXPROCS(0); n != procsBefore {
		t.Errorf("after %s the process may use %d CPUs, want %d as before", after, n, procsBefore)
		runtime.GOMAXPROCS(procsBefore)
	}
}

// cancelOnceIn cancels the context that it returns when the process may use one CPU only, which is when the workload has begun.
func cancelOnceIn(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	go func() {
		for runtime.GOMAXPROCS(0) != 1 && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	return ctx
}

// TestProcs: a workload has the CPUs that it asks for from before its warm-up until it ends, however it ends, and the process has its own back then.
func TestProcs(t *testing.T) {
	faults, err := targetemu.ParseFaults("cmd op=read nth=500 : sense 3 11/00")
	if err != nil {
		t.Fatal(err)
	}
	s, d := open(t, completion.Interrupt, "ram:16m", func(c *targetemu.Config) { c.Faults = faults })
	withProcs(t)
	w := bench.Workload{Pattern: bench.RandRead, BlockSize: 4096, Depth: 4, Jobs: 2, Loops: 50, Procs: 1}
	if r, err := bench.Run(t.Context(), s, d, w); err != nil || r.Procs != 1 {
		t.Errorf("%v, %+v; want a run on one CPU", err, r)
	}
	wantRestored(t, "a run")
	w.Procs = 0
	if r, err := bench.Run(t.Context(), s, d, w); err != nil || r.Procs != procsBefore {
		t.Errorf("%v, %+v; want a run on %d CPUs", err, r, procsBefore)
	}
	w.Procs = 1
	w.Loops = 1000
	var cc *scsi.CheckConditionError
	if r, err := bench.Run(t.Context(), s, d, w); !errors.As(err, &cc) {
		t.Errorf("%v, %+v; want a command that fails", err, r)
	}
	wantRestored(t, "a failure")
	w.Loops, w.Runtime, w.Warmup = 0, time.Minute, time.Minute
	if r, err := bench.Run(cancelOnceIn(t), s, d, w); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, %+v; want a run that is cancelled in its warm-up", err, r)
	}
	wantRestored(t, "the end of its context")
	for _, n := range []int{-1, bench.MaxProcs + 1} {
		w.Procs = n
		var we *bench.WorkloadError
		if _, err := bench.Run(t.Context(), s, d, w); !errors.As(err, &we) || !strings.HasPrefix(err.Error(), "procs: ") {
			t.Errorf("%d CPUs: %v", n, err)
		}
		wantRestored(t, "a refusal")
	}
}

// observed is a device that notes how many CPUs its readers may use, and fails when told to.
type observed struct {
	disk.Device
	most atomic.Int64
	fail error
}

func (o *observed) ReadAt(b []byte, off int64) (int, error) {
	if n := int64(runtime.GOMAXPROCS(0)); n > o.most.Load() {
		o.most.Store(n)
	}
	if o.fail != nil {
		return 0, o.fail
	}
	return o.Device.ReadAt(b, off)
}

// TestProcsOfDevice: the same for a stacked device.
func TestProcsOfDevice(t *testing.T) {
	s, d := open(t, completion.Interrupt, "ram:16m")
	withProcs(t)
	ss, dev := []*srp.Session{s}, &observed{Device: d}
	w := bench.Workload{Pattern: bench.RandRead, BlockSize: 4096, Depth: 2, Jobs: 2, Warmup: 5 * time.Millisecond, Runtime: 20 * time.Millisecond, Procs: 1}
	if r, err := bench.RunDevice(t.Context(), dev, ss, w); err != nil || r.Procs != 1 || dev.most.Load() != 1 {
		t.Errorf("%v, %+v, reads saw %d CPUs; want 1", err, r, dev.most.Load())
	}
	wantRestored(t, "a run")
	dev.fail = errors.New("no more")
	if _, err := bench.RunDevice(t.Context(), dev, ss, w); !errors.Is(err, dev.fail) {
		t.Errorf("%v, want %v", err, dev.fail)
	}
	wantRestored(t, "a failure")
	dev.fail = nil
	w.Warmup = time.Minute
	if _, err := bench.RunDevice(cancelOnceIn(t), dev, ss, w); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want a run that is cancelled", err)
	}
	wantRestored(t, "the end of its context")
}

// TestProcsOfExperiments: all but e4 measure on one CPU, in every round, and the report says so; Options.Procs overrides that.
func TestProcsOfExperiments(t *testing.T) {
	for _, e := range bench.Experiments() {
		if want := map[bool]int{true: 0, false: 1}[e.Name == "e4"]; e.Procs != want {
			t.Errorf("%s: %d CPUs, want %d", e.Name, e.Procs, want)
		}
	}
	target := startTarget(t, "ram:16m", "ram:16m")
	withProcs(t)
	two, all := 2, 0
	for _, c := range []struct {
		name  string
		procs *int
		want  int
		text  string
	}{
		{"e1", nil, 1, "initiator on 1 CPU at once at most"},
		{"e1", &all, procsBefore, "initiator on 3 CPUs at once at most"},
		{"e3s", nil, 1, "initiator on 1 CPU at once at most"},
		{"e3s", &two, 2, "initiator on 2 CPUs at once at most"},
		{"e4", nil, procsBefore, "initiator on 3 CPUs at once at most"},
		{"e4", &two, 2, "initiator on 2 CPUs at once at most"},
	} {
		e, err := bench.ExperimentNamed(c.name)
		if err != nil {
			t.Fatal(err)
		}
		e.Points = e.Points[:1]
		rep, err := e.Run(t.Context(), opener(t, target), bench.Options{Rounds: 1, Runtime: 5 * time.Millisecond, Procs: c.procs})
		if err != nil {
			t.Fatal(err)
		}
		wantRestored(t, c.name)
		for _, v := range rep.Points[0].Variants {
			if n := v.Rounds[0].Procs; n != c.want {
				t.Errorf("%s, %s: %d CPUs, want %d", c.name, v.Name, n, c.want)
			}
		}
		var text, md bytes.Buffer
		if err := errors.Join(rep.WriteText(&text), rep.WriteMarkdown(&md)); err != nil {
			t.Fatal(err)
		}
		if rep.Procs != c.want || !strings.Contains(text.String(), c.text) || !strings.Contains(md.String(), c.text) {
			t.Errorf("%s: %d CPUs, want %d and %q in\n%s\n%s", c.name, rep.Procs, c.want, c.text, text.String(), md.String())
		}
	}
}
