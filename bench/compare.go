package bench

import (
	"context"
	"fmt"
	"io"
	"sort"
	"text/tabwriter"
)

// Variant is one side of a comparison.
type Variant struct {
	Name string
	Run  func(context.Context) (*Result, error)
}

// Spread is the middle and the extremes of a figure over the rounds.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	rounds int
}

// NewSpread is the spread of v, which is not empty.
func NewSpread(v []float64) Spread {
	s := append([]float64(nil), v...)
	sort.Float64s(s)
	n := len(s)
	return Spread{Median: (s[(n-1)/2] + s[n/2]) / 2, Min: s[0], Max: s[n-1], rounds: n}
}

// Noise is how far from 1 a median ratio must be before it is called a difference.
const Noise = 0.02

// Verdict says what a paired ratio allows to say: with every round on one side of 1, and the median beyond
// Noise, "higher" or "lower"; else "within noise". One round agrees with
// itself only: "too few rounds".
func (r Spread) Verdict() string {
	switch {
	case r.rounds < 2:
		return fewRounds
	case r.Min > 1 && r.Median > 1+Noise:
		return "higher"
	case r.Max < 1 && r.Median < 1-Noise:
		return "lower"
	}
	return "within noise"
}

// fewRounds is the verdict on rounds that cannot disagree.
const fewRounds = "too few rounds"

// Compared is one variant of a comparison.
type Compared struct {
	Name   string    `json:"name"`
	Rounds []*Result `json:"rounds"`
	IOPS   Spread    `json:"iops"`
	MeanUS Spread    `json:"lat_mean_us"`
	P99US  Spread    `json:"lat_p99_us"`
	CPU    Spread    `json:"cpu_us_per_io"`
	PerIO  Spread    `json:"notifications_per_io"`
	// The same figures divided, round by round, by the first variant's of the same round.
	IOPSRatio Spread `json:"iops_ratio"`
	MeanRatio Spread `json:"lat_mean_ratio"`
	CPURatio  Spread `json:"cpu_ratio"`
}

// Compare runs the variants one after the other, rounds times, each round starting one variant later, so that
// a drift of the machine meets all of them. Ratios are taken within a round. When ctx ends, the rounds that were whole are returned beside the error.
func Compare(ctx context.Context, rounds int, variants []Variant, report func(round int, name string, r *Result)) ([]Compared, error) {
	out := make([]Compared, len(variants))
	for i, v := range variants {
		out[i] = Compared{Name: v.Name, Rounds: make([]*Result, rounds)}
	}
	var failed error
rounds:
	for n := range rounds {
		for k := range variants {
			i := (n + k) % len(variants)
			r, err := variants[i].Run(ctx)
			if err != nil {
				failed = fmt.Errorf("%s, round %d: %w", variants[i].Name, n+1, err)
				if ctx.Err() == nil || n == 0 {
					return nil, failed
				}
				for i := range out {
					out[i].Rounds = out[i].Rounds[:n]
				}
				break rounds
			}
			out[i].Rounds[n] = r
			if report != nil {
				report(n+1, variants[i].Name, r)
			}
		}
	}
	for i := range out {
		c := &out[i]
		figure := func(f func(*Result) float64) (Spread, Spread) {
			var abs, rel []float64
			for n, r := range c.Rounds {
				abs = append(abs, f(r))
				if base := f(out[0].Rounds[n]); base > 0 {
					rel = append(rel, f(r)/base)
				}
			}
			if len(rel) == 0 {
				rel = []float64{0}
			}
			return NewSpread(abs), NewSpread(rel)
		}
		c.IOPS, c.IOPSRatio = figure(func(r *Result) float64 { return r.IOPS })
		c.MeanUS, c.MeanRatio = figure(func(r *Result) float64 { return r.MeanUS })
		c.P99US, _ = figure(func(r *Result) float64 { return r.P99US })
		c.CPU, c.CPURatio = figure(func(r *Result) float64 { return r.CPUPerIOUS })
		c.PerIO, _ = figure(func(r *Result) float64 { return r.NotificationsPerIO })
	}
	return out, failed
}

// WriteTable prints a comparison: medians, spreads, and ratios to the first variant with what they allow to say.
func WriteTable(w io.Writer, cs []Compared) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "variant\tIOPS\t[min-max]\tmean us\tp99 us\tCPU us/IO\tnotif/IO\tcmds/notif\t| IOPS ratio\tverdict\tCPU ratio\tverdict\t")
	for i, c := range cs {
		perNotif := "-"
		if c.PerIO.Median > 0 {
			perNotif = fmt.Sprintf("%.1f", 1/c.PerIO.Median)
		}
		fmt.Fprintf(t, "%s\t%.0f\t[%.0f-%.0f]\t%.1f\t%.1f\t%.2f\t%.3f\t%s\t", c.Name, c.IOPS.Median, c.IOPS.Min, c.IOPS.Max, c.MeanUS.Median, c.P99US.Median, c.CPU.Median, c.PerIO.Median, perNotif)
		if i == 0 {
			fmt.Fprint(t, "| 1\tbase\t1\tbase\t\n")
			continue
		}
		fmt.Fprintf(t, "| %.2f\t%s\t%.2f\t%s\t\n", c.IOPSRatio.Median, c.IOPSRatio.Verdict(), c.CPURatio.Median, c.CPURatio.Verdict())
	}
	return t.Flush()
}
