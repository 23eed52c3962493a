package bench_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"srp-initiator/bench"
)

// TestVerdict: only enough rounds that agree make a difference, and only enough that are near 1 make none.
func TestVerdict(t *testing.T) {
	for _, c := range []struct {
		ratios []float64
		want   string
	}{
		{[]float64{1.3, 1.2, 1.4, 1.3, 1.2, 1.4}, bench.Higher},
		{[]float64{1.3, 1.2, 1.4, 1.3, 1.2, 0.99}, bench.WithinNoise},
		{[]float64{0.7, 0.8, 0.7, 0.8, 0.7, 0.8, 0.9}, bench.Lower},
		{[]float64{0.995, 0.999, 0.99, 0.99, 0.99, 0.99}, bench.Same},
		{[]float64{0.98, 0.999, 0.99, 1.02, 0.99, 0.99}, bench.Same},
		{[]float64{0.979, 0.999, 0.99, 1.02, 0.99, 0.99}, bench.WithinNoise},
		{[]float64{0.98, 0.999, 0.99, 1.021, 0.99, 0.99}, bench.WithinNoise},
		{[]float64{1.01, 1.019, 1.019, 1.019, 1.5, 1.02}, bench.WithinNoise},
		{[]float64{1, 1.3, 1.3, 1.3, 1.3, 1.3}, bench.WithinNoise},
		{[]float64{1, 1, 1, 1, 1, 1}, bench.Same},
		{[]float64{0, 0, 0, 0, 0, 0}, bench.Lower},
		{[]float64{1}, bench.FewRounds},
		{[]float64{2}, bench.FewRounds},
		{[]float64{1, 1, 1, 1, 1}, bench.FewRounds},
		{[]float64{0.5, 0.5, 0.5, 0.5, 0.5}, bench.FewRounds},
		{[]float64{2, 2, 2, 2, 2}, bench.FewRounds},
		{[]float64{2, 0.5}, bench.FewRounds},
		// More rounds bear outliers: 9 of 30, not 10.
		{slices.Concat(slices.Repeat([]float64{0.5}, 9), slices.Repeat([]float64{1.3}, 21)), bench.Higher},
		{slices.Concat(slices.Repeat([]float64{0.5}, 10), slices.Repeat([]float64{1.3}, 20)), bench.WithinNoise},
		{slices.Concat(slices.Repeat([]float64{0.5}, 9), slices.Repeat([]float64{1.01}, 12), slices.Repeat([]float64{9}, 9)), bench.Same},
	} {
		if got := bench.NewRatio(c.ratios).Verdict; got != c.want {
			t.Errorf("%v: %s, want %s", c.ratios, got, c.want)
		}
	}
}

// TestMedianInterval: the order statistics of the 95 % interval of a median are those of the tables of the sign test.
func TestMedianInterval(t *testing.T) {
	for n, want := range map[int]int{6: 1, 7: 1, 8: 1, 9: 2, 10: 2, 11: 2, 12: 3, 15: 4, 16: 4, 17: 5, 20: 6, 22: 6, 25: 8, 27: 8, 30: 10, 40: 14, 50: 18, 100: 40, 1000: 469, 5000: 2431} {
		v := make([]float64, n) // 1 to n, the largest first
		for k := range v {
			v[k] = float64(n - k)
		}
		if r := bench.NewRatio(v); r.Low != float64(want) || r.High != float64(n+1-want) || r.Min != 1 || r.Max != float64(n) {
			t.Errorf("%d rounds: [%g, %g], want [%d, %d]", n, r.Low, r.High, want, n+1-want)
		}
	}
	for n := 1; n < bench.FewestRounds; n++ {
		v := []float64{5, 1, 3, 2, 4}[:n]
		if r := bench.NewRatio(v); r.Low != r.Min || r.High != r.Max || r.Low != slices.Min(v) || r.High != slices.Max(v) {
			t.Errorf("%v: %+v, want the extremes", v, r)
		}
	}
}

// TestIntervalHoldsMedian: whatever the distribution and the number of rounds, the interval of a median that is 1 has 1 in it in 95 % of
// the trials, in not many more (or it would say less than it can), and a difference is called in the others at most.
func TestIntervalHoldsMedian(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for name, draw := range map[string]func() float64{
		"log-normal":            func() float64 { return math.Exp(0.1 * rng.NormFloat64()) },
		"heavy tails":           func() float64 { return math.Exp(math.Pow(rng.NormFloat64(), 3)) },
		"one side much farther": func() float64 { return []float64{1 - 0.05*rng.Float64(), 1 + 20*rng.Float64()}[rng.IntN(2)] },
		"often exactly 1":       func() float64 { return 1 + float64(rng.IntN(3)-1)/10 },
	} {
		const trials = 5000
		held, wrong, many, heldMany := 0, 0, 0, 0
		for range trials {
			v := make([]float64, bench.FewestRounds+rng.IntN(195))
			for k := range v {
				v[k] = draw()
			}
			r := bench.NewRatio(v)
			in := r.Low <= 1 && 1 <= r.High
			if in {
				held++
			}
			if r.Differs() {
				wrong++
			}
			if len(v) >= 100 {
				if many++; in {
					heldMany++
				}
			}
		}
		// 0.9 % are three standard deviations of so many trials.
		if got := float64(held) / trials; got < 0.95-0.009 {
			t.Errorf("%s: 1 is in %.1f %% of the intervals", name, 100*got)
		}
		if wrong > trials-held {
			t.Errorf("%s: %d differences called, but only %d intervals without 1", name, wrong, trials-held)
		}
		if got := float64(heldMany) / float64(many); got > 0.98 && name != "often exactly 1" {
			t.Errorf("%s: 1 is in %.1f %% of the intervals of 100 rounds or more: they are wider than need be", name, 100*got)
		}
	}
}

// compared runs two variants whose commands per second are given round by round.
func compared(t *testing.T, base, other []float64) []bench.Compared {
	t.Helper()
	at := map[string]int{}
	variant := func(name string, iops []float64) bench.Variant {
		return bench.Variant{Name: name, Run: func(context.Context) (*bench.Result, error) {
			v := iops[at[name]]
			at[name]++
			return &bench.Result{IOPS: v, MeanUS: 1e6 / v, CPUPerIOUS: 10}, nil
		}}
	}
	cs, err := bench.Compare(t.Context(), len(base), []bench.Variant{variant("interrupt", base), variant("thread", other)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return cs
}

// Rounds that drift: the quotient of the medians is 1, the median of the quotients 2.
var drifting, beside = []float64{100, 400, 200, 100, 400, 200, 100}, []float64{200, 200, 400, 200, 200, 400, 200}

// TestCompareTable: every ratio has its spread and verdict, in the table and in JSON.
func TestCompareTable(t *testing.T) {
	cs := compared(t, []float64{100, 110, 120, 100, 110, 120}, []float64{200, 165, 180, 150, 165, 180})
	var table bytes.Buffer
	if err := bench.WriteTable(&table, cs); err != nil {
		t.Fatal(err)
	}
	words := strings.Join(strings.Fields(table.String()), " ")
	if want := "ratios within rounds: median [95 % interval of the median] to interrupt IOPS [95 %] verdict latency [95 %] verdict CPU/IO [95 %] verdict " +
		"thread x1.50 [1.50-2.00] higher x0.67 [0.50-0.67] lower x1.00 [1.00-1.00] within 2 %"; !strings.Contains(words, want) || strings.Contains(words, "too few") {
		t.Errorf("no %q in\n%s", want, table.String())
	}
	for _, line := range strings.Split(table.String(), "\n") {
		if len(line) > 120 {
			t.Errorf("a line of %d characters: %s", len(line), line)
		}
	}
	text, err := json.Marshal(cs)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"iops_ratio":{"median":1.5,"min":1.5,"max":2,"low":1.5,"high":2,"verdict":"higher"}`, `"verdict":"lower"`, `"cpu_ratio":{"median":1,"min":1,"max":1,"low":1,"high":1,"verdict":"within 2 %"}`} {
		if strings.Count(string(text), want) != 1 {
			t.Errorf("no %s, or not once, in %s", want, text)
		}
	}

	table.Reset()
	if err := bench.WriteTable(&table, compared(t, []float64{100, 100, 100, 100, 100}, []float64{200, 200, 200, 200, 200})); err != nil {
		t.Fatal(err)
	}
	if s := table.String(); strings.Contains(s, "higher") || strings.Contains(s, "[95 %") || strings.Count(s, "[min-max]") != 5 ||
		!strings.Contains(s, "too few rounds: a difference is called after 6 rounds or more") {
		t.Errorf("five rounds:\n%s", s)
	}
}

// TestReportIntervals: every form of a report shows the interval of a ratio's median where there is one, and says what it is.
func TestReportIntervals(t *testing.T) {
	for n, c := range map[int]struct {
		brackets         string
		text, md, sheets string
	}{
		// One outlier on each side: of nine rounds the interval is from the second to the eighth.
		9: {"median [95 % interval of the median]", "iops x1.20 [1.10-1.30] higher", "| **1.20** [1.10-1.30] |", ",9,,1.2,1.1,1.3,higher\n"},
		5: {"median [min-max]", "iops x1.20 [0.50-7.00] too few rounds", "| 1.20 [0.50-7.00], too few rounds |", ",5,,1.2,0.5,7,too few rounds\n"},
	} {
		base, other := slices.Repeat([]float64{100}, n), []float64{50, 700, 120, 130, 110, 110, 120, 130, 120}[:n]
		rep := bench.Report{Rounds: n, Points: []bench.PointResult{{Label: "p", Series: "s", Variants: compared(t, base, other)}}}
		var text, md, sheet bytes.Buffer
		if err := errors.Join(rep.WriteText(&text), rep.WriteMarkdown(&md), rep.WriteCSV(&sheet)); err != nil {
			t.Fatal(err)
		}
		for _, f := range []struct {
			form string
			want []string
		}{
			{text.String(), []string{c.brackets, c.text, bench.Rule}},
			{md.String(), []string{c.brackets, c.md, bench.Rule}},
			{sheet.String(), []string{"rounds,published,ratio,low,high,verdict\n", "thread,iops,1/s,120,50,700" + c.sheets, ",interrupt,iops,1/s,100,100,100," + strconv.Itoa(n) + ",,,,,\n"}},
		} {
			for _, want := range f.want {
				if strings.Count(f.form, want) != 1 {
					t.Errorf("%d rounds: no %q, or not once, in\n%s", n, want, f.form)
				}
			}
		}
	}
}

// TestBesidesSayVerdicts: beside a published ratio ours has its verdict in words, whatever it is.
func TestBesidesSayVerdicts(t *testing.T) {
	for verdict, other := range map[string][]float64{
		bench.Higher: {120, 121, 122, 123, 124, 125}, bench.Lower: {70, 71, 72, 73, 74, 75}, bench.WithinNoise: {80, 90, 100, 110, 120, 130},
	} {
		rep := bench.Report{Rounds: 6, Points: []bench.PointResult{{Label: "p", Series: "s", Variants: compared(t, slices.Repeat([]float64{100}, 6), other),
			Published: []bench.Published{{Setting: "interrupt", Metric: "iops", Value: 10}, {Setting: "thread", Metric: "iops", Value: 12}}}}}
		var text bytes.Buffer
		if err := rep.WriteText(&text); err != nil {
			t.Fatal(err)
		}
		if want := "], " + verdict + ")\n"; !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
}

// TestIdleRounds: a round without commands has no latency and no CPU time per command, and is in no ratio.
func TestIdleRounds(t *testing.T) {
	at := map[string]int{}
	variant := func(name string, iops ...float64) bench.Variant {
		return bench.Variant{Name: name, Run: func(context.Context) (*bench.Result, error) {
			v := iops[at[name]%len(iops)]
			at[name]++
			if v == 0 {
				return &bench.Result{Seconds: 1}, nil
			}
			return &bench.Result{Seconds: 1, IOPS: v, MeanUS: 1e6 / v, P99US: 2e6 / v, CPUPerIOUS: 10, NotificationsPerIO: 0.5}, nil
		}}
	}
	cs, err := bench.Compare(t.Context(), 8, []bench.Variant{variant("a", 100, 0, 100, 100, 100, 100, 100, 100), variant("b", 200, 200, 0, 200, 200, 200, 200, 200), variant("c", 0)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	a, b, c := &cs[0], &cs[1], &cs[2]
	if a.WithoutCommands != 1 || b.WithoutCommands != 1 || c.WithoutCommands != 8 || a.IOPS.Min != 0 || a.MeanUS.Min != 1e4 || b.MeanUS.Min != 5e3 || b.CPU.Min != 10 || b.PerIO.Min != 0.5 {
		t.Errorf("%+v\n%+v\n%+v", *a, *b, *c)
	}
	for _, r := range []*bench.Ratio{b.IOPSRatio, b.MeanRatio, b.CPURatio} {
		if r == nil {
			t.Fatal("no ratio")
		}
	}
	if r := b.IOPSRatio; r.Min != 2 || r.Max != 2 || r.Verdict != bench.Higher {
		t.Errorf("IOPS: %+v", *r)
	}
	if r := b.MeanRatio; r.Min != 0.5 || r.Max != 0.5 || r.Verdict != bench.Lower {
		t.Errorf("latency: %+v", *r)
	}
	if c.IOPSRatio != nil || c.MeanRatio != nil || c.CPURatio != nil {
		t.Errorf("ratios of nothing: %+v", *c)
	}
	rep := bench.Report{Rounds: 8, Points: []bench.PointResult{{Label: "p", Series: "s", Variants: cs}}}
	var table, text, md, sheet bytes.Buffer
	if err := errors.Join(bench.WriteTable(&table, cs), rep.WriteText(&text), rep.WriteMarkdown(&md), rep.WriteCSV(&sheet)); err != nil {
		t.Fatal(err)
	}
	const said = "a did no command in 1 of 8 rounds, b did no command in 1 of 8 rounds, c did no command in 8 of 8 rounds: no ratio counts those rounds"
	for _, s := range []string{table.String(), text.String(), md.String()} {
		if strings.Count(s, said) != 1 {
			t.Errorf("no %q in\n%s", said, s)
		}
	}
	words := strings.Join(strings.Fields(table.String()), " ")
	if want := "c 0 - - - - - "; !strings.Contains(words, want) || strings.Contains(words, "NaN") {
		t.Errorf("no %q in %s", want, words)
	}
	for _, want := range []string{"p,s,0,0,a,lat_mean,us,10000,10000,10000,7,", "p,s,0,0,a,iops,1/s,100,0,100,8,", "p,s,0,0,c,lat_mean,us,,,,0,"} {
		if !strings.Contains(sheet.String(), want) {
			t.Errorf("no %q in\n%s", want, sheet.String())
		}
	}
}

// TestMeasuredRatio: beside a published ratio stands the median of the ratios within rounds, not the ratio of medians.
func TestMeasuredRatio(t *testing.T) {
	rep := bench.Report{Rounds: len(drifting), Points: []bench.PointResult{{Label: "p", Series: "s", Variants: compared(t, drifting, beside),
		Published: []bench.Published{{Setting: "interrupt", Metric: "iops", Value: 10}, {Setting: "thread", Metric: "iops", Value: 15}}}}}
	var text, md bytes.Buffer
	if err := errors.Join(rep.WriteText(&text), rep.WriteMarkdown(&md)); err != nil {
		t.Fatal(err)
	}
	if want := "iops, published / ours:  interrupt 10.0 / 200  thread 15.0 / 200 (x1.50 / x2.00 [0.50-2.00], within noise)"; !strings.Contains(text.String(), want) {
		t.Errorf("no %q in\n%s", want, text.String())
	}
	if want := "| p | iops | thread | 15.0 | 200 | 1.50 | 2.00 [0.50-2.00], within noise |"; !strings.Contains(md.String(), want) {
		t.Errorf("no %q in\n%s", want, md.String())
	}
}

// TestReportCommand: a report says how it was made, in words that can be typed again.
func TestReportCommand(t *testing.T) {
	rep := bench.Report{Rounds: 1, Command: []string{"/some/where/srp-initiator", "experiment", "e1", "--rounds", "1", "srp://h:1/2?a=1&b=2"}}
	var text, md bytes.Buffer
	if err := errors.Join(rep.WriteText(&text), rep.WriteMarkdown(&md)); err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{text.String(), md.String()} {
		if want := "srp-initiator experiment e1 --rounds 1 'srp://h:1/2?a=1&b=2'"; !strings.Contains(s, want) || strings.Contains(s, "/some/where") || !strings.Contains(s, "1 round of") {
			t.Errorf("no %q in\n%s", want, s)
		}
	}
}

func TestCounted(t *testing.T) {
	for n, want := range map[int]string{0: "0 rounds", 1: "1 round", 2: "2 rounds"} {
		if got := bench.Counted(n, "round"); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	for _, e := range bench.Experiments() {
		for _, p := range e.Points {
			if strings.Contains(p.Label, " 1 readers") {
				t.Errorf("%s: %q", e.Name, p.Label)
			}
		}
	}
}
