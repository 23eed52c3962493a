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
			rep, err := e.Run(t.Context(), opener(t, target), bench.Options{Rounds: 2, Runtime: 10 * time.Millisecond, MayWrite: true})
			if err != nil {
				t.Fatal(err)
			}
			if len(rep.Points) != len(e.Points) {
				t.Fatalf("%d points, want %d", len(rep.Points), len(e.Points))
			}
			for _, p := range rep.Points {
				if p.Skipped != "" && p.Rate == 0 && !strings.Contains(p.Skipped, "bs: ") {
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

// TestVerdict: only rounds that agree make a difference.
func TestVerdict(t *testing.T) {
	for _, c := range []struct {
		ratios []float64
		want   string
	}{
		{[]float64{1.3, 1.2, 1.4}, "higher"},
		{[]float64{1.3, 0.99, 1.4}, "within noise"},
		{[]float64{0.7, 0.8}, "lower"},
		{[]float64{0.995, 0.999, 0.99}, "within noise"},
		{[]float64{1}, "too few rounds"},
		{[]float64{2}, "too few rounds"},
		{[]float64{0.5}, "too few rounds"},
		{[]float64{0, 0}, "lower"},
	} {
		if got := bench.NewSpread(c.ratios).Verdict(); got != c.want {
			t.Errorf("%v: %s, want %s", c.ratios, got, c.want)
		}
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
