package bench

import (
	"encoding/csv"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// tableMetrics are the columns of the text table.
var tableMetrics = []string{"iops", "lat_mean", "lat_p50", "lat_p99", "lat_p999", "cpu_per_io", "cpu_user", "cpu_system", "notifications", "commands_per_notification"}

// ratioMetrics are compared with the first variant.
var ratioMetrics = []string{"iops", "lat_mean", "cpu_per_io"}

// WriteText prints the report for reading: a block per point, a row per variant with medians; below it the
// ratios to the first variant with what the rounds allow to say, and the published figures beside ours.
func (rep *Report) WriteText(w io.Writer) error {
	m := rep.Machine
	fmt.Fprintf(w, "%s: %s\n  published: %s\n  question:  %s\n", rep.Experiment, rep.Title, rep.Source, rep.Question)
	fmt.Fprintf(w, "  machine:   %s, %s, %d MiB, virtual: %v, load average %.2f\n  system:    %s, Linux %s, %s\n  program:   %s; device %s; target %s\n",
		m.CPU, m.cpusText(), m.MemoryMiB, m.Hypervisor, m.LoadAverage, m.OS, m.Kernel, m.Go, m.Version, m.Device, m.Target)
	if len(rep.Command) > 0 {
		fmt.Fprintf(w, "  command:   %s\n", CommandLine(rep.Command))
	}
	fmt.Fprintf(w, "  %s; %s of %d ms each, alternating; %s; medians; CPU is this process's\n  ratios:    within rounds, to the first variant: median %s\n  verdicts:  %s\n",
		m.Time, Counted(rep.Rounds, "round"), rep.RuntimeMS, rep.procsText(), bracketText(rep.Rounds), Rule)
	if rep.Interrupted != "" {
		fmt.Fprintf(w, "  ended:     %s\n", rep.Interrupted)
	}
	fmt.Fprintln(w)
	for _, p := range rep.Points {
		if why := p.missing(); why != "" {
			fmt.Fprintf(w, "%s: %s\n\n", p.Label, why)
			continue
		}
		fmt.Fprint(w, p.Label)
		if p.Cut != "" {
			fmt.Fprintf(w, " (ended %s)", p.Cut)
		}
		if p.Rate > 0 {
			fmt.Fprintf(w, " (%.0f commands/s)", p.Rate)
		}
		fmt.Fprintln(w)
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprint(t, "  variant\tIOPS\t[min-max]\tmean us\tp50\tp99\tp99.9\tCPU us/IO\tuser %\tsystem %\tnotif/s\tcmds/notif\t\n")
		for k := range p.Variants {
			c := &p.Variants[k]
			fmt.Fprintf(t, "  %s\t", c.Name)
			for _, name := range tableMetrics {
				metric, _ := MetricNamed(name)
				s := c.Spread(metric)
				if c.Idle() == len(c.Rounds) && name != "iops" {
					fmt.Fprint(t, "-\t")
					continue
				}
				fmt.Fprintf(t, "%s\t", c.medianText(metric))
				if name == "iops" {
					fmt.Fprintf(t, "[%.0f-%.0f]\t", s.Min, s.Max)
				}
			}
			fmt.Fprintln(t)
		}
		if err := t.Flush(); err != nil {
			return err
		}
		for k := range p.Variants[1:] {
			c := &p.Variants[k+1]
			var said []string
			for _, name := range ratioMetrics {
				metric, _ := MetricNamed(name)
				if s, ok := c.Ratio(&p.Variants[0], metric); ok {
					said = append(said, fmt.Sprintf("%s x%s %s %s", name, times(s.Median), s.interval(), s.Verdict))
				}
			}
			if said == nil {
				said = []string{"no ratio"}
			}
			fmt.Fprintf(w, "  %s to %s: %s\n", c.Name, p.Variants[0].Name, strings.Join(said, "; "))
		}
		if s := idleText(p.Variants); s != "" {
			fmt.Fprintf(w, "  %s\n", s)
		}
		rep.writePublished(w, &p)
		fmt.Fprintln(w)
	}
	return nil
}

// procsText says how many CPUs the initiator might use.
func (rep *Report) procsText() string {
	return fmt.Sprintf("initiator on %s at once at most", Counted(rep.Procs, "CPU"))
}

// beside is a published figure with ours.
type beside struct {
	Published
	ours float64 // the median,
	text string  // and in words
	// To the first variant of the metric; ours is nil for that itself, and where it has zeros.
	publishedRatio float64
	ratio          *Ratio
}

// besides are the published figures of one metric that we have too.
func (p *PointResult) besides(m Metric) (all []beside) {
	var base *Compared
	var first float64
	for _, pub := range p.Published {
		k := p.find(pub.Setting)
		if pub.Metric != m.Name || k < 0 {
			continue
		}
		c := &p.Variants[k]
		b := beside{Published: pub, ours: c.Spread(m).Median, text: c.medianText(m)}
		if base == nil {
			base, first = c, pub.Value
		} else {
			b.publishedRatio = pub.Value / first
			if r, ok := c.Ratio(base, m); ok {
				b.ratio = &r
			}
		}
		all = append(all, b)
	}
	return all
}

// writePublished sets the published figures beside ours: the absolute ones, and the ratio between the variants, which is what can be compared. Ours
// is taken within rounds, as all ratios.
func (rep *Report) writePublished(w io.Writer, p *PointResult) {
	for _, name := range metricNames(p.Published) {
		metric, _ := MetricNamed(name)
		fmt.Fprintf(w, "  %s, published / ours:", name)
		for _, b := range p.besides(metric) {
			fmt.Fprintf(w, "  %s %s / %s", b.Setting, figure(b.Value), b.text)
			if b.ratio != nil {
				fmt.Fprintf(w, " (x%.2f / x%s", b.publishedRatio, b.ratio)
				if b.ratio.Differs() { // which bold says in Markdown
					fmt.Fprintf(w, ", %s", b.ratio.Verdict)
				}
				fmt.Fprint(w, ")")
			}
		}
		fmt.Fprintln(w)
	}
}

func metricNames(ps []Published) (names []string) {
	for _, m := range Metrics {
		for _, p := range ps {
			if p.Metric == m.Name {
				names = append(names, m.Name)
				break
			}
		}
	}
	return names
}

// figure prints a number with as many digits as mean something.
// medianText is a variant's median; no commands per notification where most rounds had no notification.
func (c *Compared) medianText(m Metric) string {
	if m.Name == "commands_per_notification" {
		if n, _ := MetricNamed("notifications"); c.Spread(n).Median == 0 {
			return "none"
		}
	}
	return figure(c.Spread(m).Median)
}

func figure(v float64) string {
	switch {
	case v == 0:
		return "0"
	case v >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 1:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 3, 64)
}

// WriteCSV writes a line per point, variant and metric: median, minimum, maximum and the published figure where there is one; of what is compared with
// the first variant also the median of the ratios within rounds, its interval (Ratio) and the verdict.
func (rep *Report) WriteCSV(w io.Writer) error {
	c := csv.NewWriter(w)
	c.Write([]string{"experiment", "point", "series", "x", "rate_limit", "variant", "metric", "unit", "median", "min", "max", "rounds", "published", "ratio", "low", "high", "verdict"})
	num := func(v float64) string { return strconv.FormatFloat(v, 'g', 8, 64) }
	for _, p := range rep.Points {
		for k := range p.Variants {
			v := &p.Variants[k]
			for _, m := range Metrics {
				s := v.Spread(m)
				published := ""
				for _, pub := range p.Published {
					if pub.Setting == v.Name && pub.Metric == m.Name {
						published = num(pub.Value)
					}
				}
				figures, rounds := []string{num(s.Median), num(s.Min), num(s.Max)}, len(v.Rounds)
				if !m.throughput() {
					if rounds -= v.Idle(); rounds == 0 {
						figures = []string{"", "", ""} // nothing was measured
					}
				}
				ratio := []string{"", "", "", ""}
				if k > 0 && slices.Contains(ratioMetrics, m.Name) {
					if r, ok := v.Ratio(&p.Variants[0], m); ok {
						ratio = []string{num(r.Median), num(r.Low), num(r.High), r.Verdict}
					}
				}
				figures = append(append(figures, strconv.Itoa(rounds), published), ratio...)
				c.Write(append([]string{rep.Experiment, p.Label, p.Series, num(p.X), num(p.Rate), v.Name, m.Name, m.Unit}, figures...))
			}
		}
	}
	c.Flush()
	return c.Error()
}

// WriteMarkdown prints the report for a document: where it ran, a table of medians, and a table of what was published beside
// what was measured.
func (rep *Report) WriteMarkdown(w io.Writer) error {
	m := rep.Machine
	var b strings.Builder
	fmt.Fprintf(&b, "%s. Published: %s. %s\n\n", rep.Title, rep.Source, rep.Question)
	if len(rep.Command) > 0 {
		fmt.Fprintf(&b, "`%s`\n\n", CommandLine(rep.Command))
	}
	fmt.Fprintf(&b, "%s, %s (virtual: %v), load average %.1f; Linux %s; %s; program %s; %s to %s; %s; %s of %d ms, alternating; %s. Medians; ratios are to the first variant, within rounds: median %s; %s. Differences are in bold.\n\n",
		m.CPU, m.cpusText(), m.Hypervisor, m.LoadAverage, m.Kernel, m.Go, m.Version, m.Device, m.Target, m.Time, Counted(rep.Rounds, "round"), rep.RuntimeMS, rep.procsText(), bracketText(rep.Rounds), Rule)
	if rep.Interrupted != "" {
		fmt.Fprintf(&b, "Ended before its end: %s.\n\n", rep.Interrupted)
	}
	fmt.Fprintln(&b, "| point | variant | IOPS | mean us | p99 us | CPU us/IO | notif/s | cmds/notif | IOPS ratio | latency ratio | CPU ratio |")
	fmt.Fprintln(&b, "|---|---|---|---|---|---|---|---|---|---|---|")
	median := func(c *Compared, name string) string {
		metric, _ := MetricNamed(name)
		if c.Idle() == len(c.Rounds) && !metric.throughput() {
			return "-"
		}
		return c.medianText(metric)
	}
	for _, p := range rep.Points {
		if why := p.missing(); why != "" {
			fmt.Fprintf(&b, "| %s | %s | | | | | | | | | |\n", p.Label, strings.ReplaceAll(why, "|", "/"))
			continue
		}
		label := p.Label
		if p.Cut != "" {
			label += " (ended " + p.Cut + ")"
		}
		for k := range p.Variants {
			c := &p.Variants[k]
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s | %s | %s |", label, c.Name, median(c, "iops"), median(c, "lat_mean"), median(c, "lat_p99"),
				median(c, "cpu_per_io"), median(c, "notifications"), median(c, "commands_per_notification"))
			for _, name := range ratioMetrics {
				metric, _ := MetricNamed(name)
				s, ok := c.Ratio(&p.Variants[0], metric)
				switch {
				case k == 0 || !ok:
					fmt.Fprint(&b, " |")
				default:
					fmt.Fprintf(&b, " %s |", markdownRatio(s))
				}
			}
			fmt.Fprintln(&b)
		}
	}
	for _, p := range rep.Points {
		if s := idleText(p.Variants); s != "" {
			fmt.Fprintf(&b, "\n%s: %s.\n", p.Label, s)
		}
	}
	rows := 0
	for _, p := range rep.Points {
		for _, name := range metricNames(p.Published) {
			metric, _ := MetricNamed(name)
			for _, at := range p.besides(metric) {
				if rows++; rows == 1 {
					fmt.Fprintln(&b, "\n| point | figure | variant | published | measured | published ratio | measured ratio |")
					fmt.Fprintln(&b, "|---|---|---|---|---|---|---|")
				}
				fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |", p.Label, name, at.Setting, figure(at.Value), at.text)
				switch {
				case at.publishedRatio == 0:
					fmt.Fprintln(&b, " | |")
				case at.ratio != nil:
					fmt.Fprintf(&b, " %.2f | %s |\n", at.publishedRatio, markdownRatio(*at.ratio))
				default:
					fmt.Fprintf(&b, " %.2f | n/a |\n", at.publishedRatio)
				}
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// markdownRatio has a difference in bold.
func markdownRatio(r Ratio) string {
	if !r.Differs() {
		return r.String()
	}
	return fmt.Sprintf("**%s** %s", times(r.Median), r.interval())
}

// CommandLine is a command as one types it, without the path to the program.
func CommandLine(args []string) string {
	words := append([]string{filepath.Base(args[0])}, args[1:]...)
	for k, w := range words {
		if strings.ContainsAny(w, " \t\n'\"`&|;<>()$\\*") || w == "" {
			words[k] = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
		}
	}
	return strings.Join(words, " ")
}

// find is the index of the variant named so, or -1.
func (p *PointResult) find(name string) int {
	for k := range p.Variants {
		if p.Variants[k].Name == name {
			return k
		}
	}
	return -1
}
