package bench_test

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"srp-initiator/bench"
	"srp-initiator/completion"
	"srp-initiator/rdma"
	"srp-initiator/srp"
	"srp-initiator/srp/disk"
	"srp-initiator/srp/scsi"
	targetemu "srp-initiator/target-emu"
)

// opener logs in to target, once per call.
func opener(t testing.TB, target string) bench.Opener {
	return openerWith(t, target, func(*srp.LoginOptions) {})
}

func openerWith(t testing.TB, target string, change func(*srp.LoginOptions)) bench.Opener {
	return func(ctx context.Context, cfg completion.Config, units int) (*srp.Session, []*disk.Disk, func() error, error) {
		p, o, err := srp.ParseTarget(target)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Resolve(ctx); err != nil {
			t.Fatal(err)
		}
		f, err := rdma.Open("auto", rdma.WithPeer(p.Src, p.Addr()))
		if err != nil {
			t.Fatal(err)
		}
		o.Completion = cfg
		change(&o)
		s, err := srp.Login(ctx, srp.Config{Device: f.Context(), Connector: f.Connector()}, p, o)
		if err != nil {
			t.Fatal(err)
		}
		var ds []*disk.Disk
		for k := range units {
			l, err := scsi.ParseLUN(strconv.Itoa(k))
			if err != nil {
				t.Fatal(err)
			}
			d, err := disk.Open(ctx, s, l)
			if err != nil {
				t.Fatal(err)
			}
			ds = append(ds, d)
		}
		return s, ds, func() error { return errors.Join(s.Close(), f.Close()) }, nil
	}
}

// TestExperiments runs every experiment shortly, and reads its reports back.
func TestExperiments(t *testing.T) {
	target := startTarget(t, "ram:16m", "ram:16m")
	for _, e := range bench.Experiments() {
		t.Run(e.Name, func(t *testing.T) {
			if testing.Short() {
				e.Points = e.Points[:2]
			}
			for _, p := range e.Points {
				for _, pub := range p.Published {
					if _, ok := bench.MetricNamed(pub.Metric); !ok {
						t.Errorf("%s: published figure of unknown metric %q", p.Label, pub.Metric)
					}
				}
			}
			rep, err := e.Run(t.Context(), opener(t, target), bench.Options{Rounds: 2, Runtime: 10 * time.Millisecond, MayWrite: true, SkipUnfit: true})
			if err != nil {
				t.Fatal(err)
			}
			if len(rep.Points) != len(e.Points) {
				t.Fatalf("%d points, want %d", len(rep.Points), len(e.Points))
			}
			for _, p := range rep.Points {
				if p.Skipped != "" && !strings.Contains(p.Skipped, "bs: ") {
					t.Errorf("%s: %s", p.Label, p.Skipped)
				}
				if p.Skipped == "" && len(p.Variants) != len(e.Settings) {
					t.Errorf("%s: %d variants", p.Label, len(p.Variants))
				}
			}
			rep.Command = []string{"x"}
			var text, table bytes.Buffer
			if err := rep.WriteText(&text); err != nil {
				t.Fatal(err)
			}
			for _, want := range []string{e.Title, e.Points[0].Label, rep.Machine.Kernel} {
				if !strings.Contains(text.String(), want) {
					t.Errorf("text without %q:\n%s", want, text.String())
				}
			}
			var md bytes.Buffer
			if err := rep.WriteMarkdown(&md); err != nil {
				t.Fatal(err)
			}
			for n, line := range strings.Split(md.String(), "\n") {
				if cells := strings.Count(line, "|"); strings.HasPrefix(line, "|") && cells != 12 && cells != 8 {
					t.Errorf("line %d of the Markdown has %d bars: %s", n+1, cells, line)
				}
			}
			if err := rep.WriteCSV(&table); err != nil {
				t.Fatal(err)
			}
			rows, err := csv.NewReader(&table).ReadAll()
			if err != nil {
				t.Fatal(err)
			}
			lines := 1
			for _, p := range rep.Points {
				lines += len(p.Variants) * len(bench.Metrics)
			}
			if len(rows) != lines {
				t.Errorf("%d lines of CSV, want %d", len(rows), lines)
			}
			if _, err := json.Marshal(rep); err != nil {
				t.Error(err)
			}
			files, err := rep.WritePlots(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			if len(files) == 0 {
				t.Error("no plots")
			}
			for _, f := range files {
				if st, err := os.Stat(f); err != nil || st.Size() < 1000 {
					t.Errorf("%s: %v", f, err)
				}
			}
		})
	}
}

// TestMachineVersion: a report tells one build of the program from another, whether or not it was stamped.
func TestMachineVersion(t *testing.T) {
	v := bench.ThisMachine().Version
	if ok, _ := regexp.MatchString(`^[0-9a-f]{40}|SHA-256 of the executable [0-9a-f]{16}$`, v); !ok {
		t.Errorf("version %q names neither a commit nor an executable", v)
	}
}

// TestExperimentMayWrite: nothing is overwritten unasked.
func TestExperimentMayWrite(t *testing.T) {
	e, err := bench.ExperimentNamed("e2")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Run(t.Context(), nil, bench.Options{}); !errors.Is(err, bench.ErrWouldWrite) {
		t.Errorf("%v, want ErrWouldWrite", err)
	}
	if _, err := bench.ExperimentNamed("e9"); err == nil {
		t.Error("e9 exists")
	}
}

// TestStripe fills a stripe and reads it: every byte of a verified stripe is where it belongs, and both units have their share.
func TestStripe(t *testing.T) {
	s, ds, end, err := opener(t, startTarget(t, "ram:4m", "ram:5m"))(t.Context(), completion.Config{Mode: completion.Adaptive}, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer end()
	w := bench.Workload{Pattern: bench.RandRead, BlockSize: 4096, Depth: 16, Jobs: 1, Loops: 2000, Verify: true, Seed: 3}
	r, err := bench.RunStriped(t.Context(), s, ds, 65536, w)
	if err != nil {
		t.Fatal(err)
	}
	if r.Verified != 2000 {
		t.Errorf("%d commands verified, want 2000", r.Verified)
	}
	zero := make([]byte, 4096)
	for k, d := range ds {
		buf := make([]byte, 4<<20)
		if _, err := d.ReadAt(buf, 0); err != nil {
			t.Fatal(err)
		}
		for off := 0; off < len(buf); off += 4096 {
			if bytes.Equal(buf[off:off+4096], zero) {
				t.Fatalf("unit %d: nothing was written at %d", k, off)
			}
		}
	}
	var we *bench.WorkloadError
	w.BlockSize = 128 << 10
	if _, err := bench.RunStriped(t.Context(), s, ds, 65536, w); !errors.As(err, &we) {
		t.Errorf("commands larger than a chunk: %v", err)
	}
}

// short is an experiment of three points of which the second writes.
func short() *bench.Experiment {
	e, _ := bench.ExperimentNamed("e4")
	read := bench.Workload{Pattern: bench.RandRead, BlockSize: 4096, Depth: 4, Jobs: 1}
	write := read
	write.Pattern = bench.RandWrite
	e.Points = []bench.Point{{Label: "first", Series: "s", X: 1, Workload: read}, {Label: "second", Series: "s", X: 2, Workload: write},
		{Label: "third", Series: "s", X: 3, Workload: read}}
	return e
}

// TestPointFails: a point that fails is named, and the others are run and reported.
func TestPointFails(t *testing.T) {
	faults, err := targetemu.ParseFaults("cmd op=write nth=3 : sense 3 0c/00")
	if err != nil {
		t.Fatal(err)
	}
	target := startTargetWith(t, []func(*targetemu.Config){func(c *targetemu.Config) { c.Faults = faults }}, "ram:16m")
	rep, err := short().Run(t.Context(), opener(t, target), bench.Options{Rounds: 2, Runtime: 5 * time.Millisecond, MayWrite: true})
	var cc *scsi.CheckConditionError
	if !errors.As(err, &cc) || !strings.Contains(err.Error(), "second: ") || rep == nil || len(rep.Points) != 3 {
		t.Fatalf("%v, %+v", err, rep)
	}
	if p := rep.Points; p[0].Failed != "" || p[1].Failed == "" || p[2].Failed != "" || len(p[1].Variants) != 0 || len(p[2].Variants) != 2 {
		t.Errorf("%+v", p)
	}
	for name, write := range map[string]func(*bytes.Buffer) error{"text": func(b *bytes.Buffer) error { return rep.WriteText(b) },
		"Markdown": func(b *bytes.Buffer) error { return rep.WriteMarkdown(b) }} {
		var b bytes.Buffer
		if err := write(&b); err != nil || !strings.Contains(b.String(), "failed: ") {
			t.Errorf("%s: %v: %s", name, err, b.String())
		}
	}
	if _, err := rep.WritePlots(t.TempDir()); err != nil {
		t.Error(err)
	}
}

// TestConnectionLostInPoint: what comes after a lost connection is not tried, and what came before is kept.
func TestConnectionLostInPoint(t *testing.T) {
	e := short()
	e.Points[1].Workload.Pattern = bench.RandRead
	var ss []*srp.Session
	open := opener(t, startTarget(t, "ram:16m"))
	keep := func(ctx context.Context, cfg completion.Config, units int) (*srp.Session, []*disk.Disk, func() error, error) {
		s, ds, end, err := open(ctx, cfg, units)
		ss = append(ss, s)
		return s, ds, end, err
	}
	rep, err := e.Run(t.Context(), keep, bench.Options{Rounds: 1, Runtime: 5 * time.Millisecond, Progress: func(done, _ int, _ string) {
		if done == 1 {
			ss[0].Close()
		}
	}})
	if !errors.Is(err, srp.ErrClosed) || rep == nil || len(rep.Points) != 2 || rep.Points[0].Failed != "" || rep.Points[1].Failed == "" || !strings.Contains(rep.Interrupted, "finished: 1 of 3 points") {
		t.Errorf("%v, %+v", err, rep)
	}
}

// TestModesShareASession: settings that differ in the mode alone take turns on one session, in their modes; each other setting has its own.
func TestModesShareASession(t *testing.T) {
	target := startTarget(t, "ram:16m", "ram:16m")
	for name, want := range map[string]int{"e1": 1, "e2": 3, "e3": 1, "e3s": 2, "e4": 1, "matrix": 1} {
		e, err := bench.ExperimentNamed(name)
		if err != nil {
			t.Fatal(err)
		}
		e.Points = e.Points[:1]
		opened, open := 0, opener(t, target)
		count := func(ctx context.Context, cfg completion.Config, units int) (*srp.Session, []*disk.Disk, func() error, error) {
			opened++
			return open(ctx, cfg, units)
		}
		rep, err := e.Run(t.Context(), count, bench.Options{Rounds: 1, Runtime: 20 * time.Millisecond, MayWrite: true})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if opened != want {
			t.Errorf("%s: %d sessions, want %d", name, opened, want)
		}
		for k, v := range rep.Points[0].Variants {
			if mode := e.Settings[k].Config.Mode.String(); v.Rounds[0].Mode != mode {
				t.Errorf("%s: %s ran in mode %s, want %s", name, v.Name, v.Rounds[0].Mode, mode)
			}
		}
	}
}

// TestInterruptedExperiment: what was finished when ctx ended is reported beside the reason.
func TestInterruptedExperiment(t *testing.T) {
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	rep, err := short().Run(ctx, opener(t, startTarget(t, "ram:16m")), bench.Options{Rounds: 1, Runtime: 5 * time.Millisecond, MayWrite: true, Progress: func(done, _ int, _ string) {
		if done == 1 {
			cancel(why)
		}
	}})
	if !errors.Is(err, why) || rep == nil || len(rep.Points) != 1 || rep.Interrupted != "enough; finished: 1 of 3 points" {
		t.Errorf("%v, %+v", err, rep)
	}
}

// TestUnfitPoints: what the unit cannot do is found before anything is measured.
func TestUnfitPoints(t *testing.T) {
	target := startTarget(t, "ram:16m,bs=4096", "ram:16m,ro")
	var ss []*srp.Session
	open := opener(t, target)
	keep := func(unit int) bench.Opener {
		return func(ctx context.Context, cfg completion.Config, units int) (*srp.Session, []*disk.Disk, func() error, error) {
			s, ds, end, err := open(ctx, cfg, 2)
			ss = append(ss, s)
			return s, ds[unit:][:1], end, err
		}
	}
	for _, c := range []struct {
		name string
		unit int
		o    bench.Options
		all  bool
		want string
	}{
		{"e1", 0, bench.Options{}, false, "5 of 16 points cannot run on this unit (512 B, saturated; 512 B, 10 % load;"},
		{"e1", 0, bench.Options{}, false, "bs: 512 is not a multiple of the unit's block size 4096"},
		{"depth", 0, bench.Options{Offset: 1 << 30}, true, "offset: "},
		{"depth", 0, bench.Options{Offset: 512}, true, "offset: "},
		{"depth", 0, bench.Options{Size: 1 << 30}, true, "size: "},
		{"depth", 0, bench.Options{Size: 1 << 30, SkipUnfit: true}, true, "size: "}, // nothing would be left
		{"e2", 1, bench.Options{MayWrite: true}, true, "the unit is read-only"},
	} {
		e, err := bench.ExperimentNamed(c.name)
		if err != nil {
			t.Fatal(err)
		}
		ss = nil
		_, err = e.Run(t.Context(), keep(c.unit), c.o)
		var unfit *bench.UnfitError
		if !errors.As(err, &unfit) || !strings.Contains(err.Error(), c.want) || c.all != (len(unfit.Points) == unfit.All) {
			t.Errorf("%s %+v: %v", c.name, c.o, err)
		}
		for _, s := range ss {
			if n := s.Stats().Total.Commands; n > 40 {
				t.Errorf("%s %+v: %d commands were sent", c.name, c.o, n)
			}
		}
	}
	e, err := bench.ExperimentNamed("e4")
	if err != nil {
		t.Fatal(err)
	}
	e.Points = e.Points[:3]
	rep, err := e.Run(t.Context(), keep(0), bench.Options{Rounds: 1, Runtime: 5 * time.Millisecond, SkipUnfit: true})
	if err != nil || rep.Points[0].Skipped == "" || rep.Points[1].Skipped == "" || len(rep.Points[2].Variants) != 2 {
		t.Errorf("%v, %+v", err, rep)
	}
}
