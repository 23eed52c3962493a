package bench

import (
	"context"
	"fmt"
	"io"
	"math/big"
	"slices"
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
}

// NewSpread is the spread of v, which is not empty.
func NewSpread(v []float64) Spread {
	s := slices.Sorted(slices.Values(v))
	n := len(s)
	return Spread{Median: (s[(n-1)/2] + s[n/2]) / 2, Min: s[0], Max: s[n-1]}
}

// Ratio is a figure of one variant divided, round by round, by that of another in the same round, and what that allows to say.
type Ratio struct {
	Spread
	// The 95 % interval of the median; of fewer rounds than FewestRounds, which have none, the extremes.
	Low     float64 `json:"low"`
	High    float64 `json:"high"`
	Verdict string  `json:"verdict"`
}

// What a ratio must be before it is called a difference.
const (
	FewestRounds = 6    // of fewer even the extremes are no 95 % interval of the median: 94 % for 5, 75 % for 3
	Noise        = 0.02 // how far from 1 the median must be
)

// Verdicts.
const (
	Higher      = "higher"
	Lower       = "lower"
	Same        = "within 2 %" // the whole interval lies that near to 1
	WithinNoise = "within noise"
	FewRounds   = "too few rounds" // fewer than FewestRounds: whatever they say
)

// Rule says in words what NewRatio's verdict is.
var Rule = fmt.Sprintf("a difference is called after %d rounds or more, when the 95 %% interval of the median lies on one side of 1 and the median is more than %g %% from it; "+
	"%q is said when the whole interval is no farther from 1 than that; of fewer rounds the extremes are shown, and nothing is said", FewestRounds, 100*Noise, Same)

// medianInterval is the largest k for which the k-th smallest and the k-th largest of n independent values hold the median of their
// distribution, whatever that is, between them with a probability of 95 % or more; 0: there is none. It is the sign test turned round: the
// median is below the k-th smallest when fewer than k of the values are below the median, each of which is so with a chance of 1/2, and above
// the k-th largest likewise: 2*P(Binomial(n, 1/2) < k) <= 5 %. The sum of binomial coefficients is exact, so that no n is too large.
func medianInterval(n int) (k int) {
	all := new(big.Int).Lsh(big.NewInt(1), uint(n)) // the ways in which n values can lie on either side
	ways, below, scaled := big.NewInt(1), new(big.Int), new(big.Int)
	for ; k < n; k++ {
		// ways is n over k: in so many exactly k values are below.
		below.Add(below, ways)
		if scaled.Mul(below, big.NewInt(2*20)).Cmp(all) > 0 {
			break
		}
		ways.Mul(ways, big.NewInt(int64(n-k)))
		ways.Quo(ways, big.NewInt(int64(k+1)))
	}
	return k
}

// NewRatio is the ratio with those rounds, of which there is one at least. This is the one place that decides what is called a difference.
func NewRatio(rounds []float64) Ratio {
	r := Ratio{Spread: NewSpread(rounds), Verdict: WithinNoise}
	r.Low, r.High = r.Min, r.Max
	if len(rounds) < FewestRounds {
		r.Verdict = FewRounds
		return r
	}
	s := slices.Sorted(slices.Values(rounds))
	k := medianInterval(len(s))
	r.Low, r.High = s[k-1], s[len(s)-k]
	switch {
	case r.Low > 1 && r.Median > 1+Noise:
		r.Verdict = Higher
	case r.High < 1 && r.Median < 1-Noise:
		r.Verdict = Lower
	case r.Low >= 1-Noise && r.High <= 1+Noise:
		r.Verdict = Same
	}
	return r
}

// Differs reports whether a difference was called.
func (r Ratio) Differs() bool { return r.Verdict == Higher || r.Verdict == Lower }

// String is median, its interval and verdict, the last only when it calls no difference.
func (r Ratio) String() string {
	s := fmt.Sprintf("%s %s", times(r.Median), r.interval())
	if !r.Differs() {
		s += ", " + r.Verdict
	}
	return s
}

func (r Ratio) interval() string { return fmt.Sprintf("[%s-%s]", times(r.Low), times(r.High)) }

// times is a ratio to two decimals, or to as many as show on which side of 1 it lies, and that it is not 0.
func times(x float64) string {
	switch s := fmt.Sprintf("%.2f", x); {
	case s == "1.00" && x != 1:
		return fmt.Sprintf("%.3f", x)
	case s == "0.00" && x != 0:
		return fmt.Sprintf("%.1g", x)
	default:
		return s
	}
}

// Of ratios of so many rounds: what stands in brackets, in a column's head and in a sentence.
func bracketHead(rounds int) string {
	if rounds < FewestRounds {
		return "[min-max]"
	}
	return "[95 %]"
}

func bracketText(rounds int) string {
	if rounds < FewestRounds {
		return "[min-max]"
	}
	return "[95 % interval of the median]"
}

// Compared is one variant of a comparison.
type Compared struct {
	Name   string    `json:"name"`
	Rounds []*Result `json:"rounds"`
	// Rounds in which no command began and ended: they are in no ratio, and in no figure but IOPS.
	WithoutCommands int    `json:"rounds_without_commands,omitempty"`
	IOPS            Spread `json:"iops"`
	MeanUS          Spread `json:"lat_mean_us"`
	P99US           Spread `json:"lat_p99_us"`
	CPU             Spread `json:"cpu_us_per_io"`
	PerIO           Spread `json:"notifications_per_io"`
	// The same figures divided, round by round, by the first variant's of the same round; nil for the first itself, where it has zeros, and where no round is left.
	IOPSRatio *Ratio `json:"iops_ratio,omitempty"`
	MeanRatio *Ratio `json:"lat_mean_ratio,omitempty"`
	CPURatio  *Ratio `json:"cpu_ratio,omitempty"`
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
		c.WithoutCommands = c.Idle()
		figure := func(name string) (Spread, *Ratio) {
			m, _ := MetricNamed(name)
			if i > 0 {
				if r, ok := c.Ratio(&out[0], m); ok {
					return c.Spread(m), &r
				}
			}
			return c.Spread(m), nil
		}
		c.IOPS, c.IOPSRatio = figure("iops")
		c.MeanUS, c.MeanRatio = figure("lat_mean")
		c.P99US, _ = figure("lat_p99")
		c.CPU, c.CPURatio = figure("cpu_per_io")
		c.PerIO, _ = figure("notifications_per_io")
	}
	return out, failed
}

// Counted is a number and what it counts: "1 round", "2 rounds".
func Counted[N int | int64](n N, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

// WriteTable prints a comparison: medians with the spread of IOPS, then medians of the ratios to
// the first variant within rounds, with their intervals and what they allow to say.
func WriteTable(w io.Writer, cs []Compared) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "variant\tIOPS\t[min-max]\tmean us\tp99 us\tCPU us/IO\tnotif/IO\tcmds/notif\t")
	for _, c := range cs {
		perNotif := "-"
		if c.PerIO.Median > 0 {
			perNotif = fmt.Sprintf("%.1f", 1/c.PerIO.Median)
		}
		if c.Idle() == len(c.Rounds) {
			fmt.Fprintf(t, "%s\t0\t\t-\t-\t-\t-\t-\t\n", c.Name)
			continue
		}
		fmt.Fprintf(t, "%s\t%.0f\t[%.0f-%.0f]\t%.1f\t%.1f\t%.2f\t%.3f\t%s\t\n", c.Name, c.IOPS.Median, c.IOPS.Min, c.IOPS.Max, c.MeanUS.Median, c.P99US.Median, c.CPU.Median, c.PerIO.Median, perNotif)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if s := idleText(cs); s != "" {
		if _, err := fmt.Fprintln(w, s); err != nil {
			return err
		}
	}
	if len(cs) < 2 {
		return nil
	}
	t = tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	rounds, few := len(cs[0].Rounds), len(cs[0].Rounds) < FewestRounds
	if _, err := fmt.Fprintf(w, "\nratios within rounds: median %s\n", bracketText(rounds)); err != nil {
		return err
	}
	head := bracketHead(rounds)
	fmt.Fprintf(t, "to %s\tIOPS\t%s\tverdict\tlatency\t%s\tverdict\tCPU/IO\t%s\tverdict\t\n", cs[0].Name, head, head, head)
	for _, c := range cs[1:] {
		fmt.Fprintf(t, "%s\t", c.Name)
		for _, r := range []*Ratio{c.IOPSRatio, c.MeanRatio, c.CPURatio} {
			if r == nil {
				fmt.Fprint(t, "-\t\t\t")
				continue
			}
			few = few || r.Verdict == FewRounds // rounds without commands may have left it fewer than the others
			fmt.Fprintf(t, "x%s\t%s\t%s\t", times(r.Median), r.interval(), r.Verdict)
		}
		fmt.Fprintln(t)
	}
	if err := t.Flush(); err != nil || !few {
		return err
	}
	_, err := fmt.Fprintf(w, "%s: %s\n", FewRounds, Rule)
	return err
}
