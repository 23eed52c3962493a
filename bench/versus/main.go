// Command versus measures srp-initiator and target-emu beside other programs that do the same work, all in
// alternation in one run, and prints a table in Markdown.
//
//	versus peers    on one machine over loopback: tgt and iscsi-perf, nbdkit and fio, target-emu and srp-initiator, and the
//	                limit program, which moves the same packets and nothing else; each pinned to one CPU and unpinned
//	versus fio      in a machine with a kernel SRP target (see docs/testing.md): fio on the kernel's ib_srp, and
//	                srp-initiator, on the same unit
//
// CPU time is initiator and target together: with peers, that of the two processes (work of the loopback interface
// is done in the sender's name); with fio, everything the machine did, because most of both ends is in the kernel.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"srp-initiator/bench"
)

func fatal(format string, a ...any) {
	fmt.Fprintf(os.Stderr, "versus: "+format+"\n", a...)
	os.Exit(1)
}

// point is one load.
type point struct {
	rw string
	bs int
	qd int
}

func (p point) String() string {
	bs := fmt.Sprintf("%d KiB", p.bs>>10)
	if p.bs >= 1<<20 {
		bs = fmt.Sprintf("%d MiB", p.bs>>20)
	}
	return fmt.Sprintf("%s %s QD %d", bs, p.rw, p.qd)
}

// sample is one measurement of one contestant.
type sample struct {
	IOPS float64 `json:"iops"`
	CPU  float64 `json:"cpu_us_per_io"`
	Note string  `json:"note,omitempty"`
}

// contestant is one way of doing the work. start makes it ready, for pinning cpu (-1: none); run measures one point.
type contestant interface {
	name() string
	start(ctx context.Context, cpu int) error
	run(ctx context.Context, p point, span time.Duration) (sample, error)
	stop()
}

// row is what one contestant did at one point.
type row struct {
	Point   string       `json:"point"`
	Pinned  bool         `json:"pinned"`
	Name    string       `json:"name"`
	Samples []sample     `json:"samples"`
	IOPS    bench.Spread `json:"iops"`
	CPU     bench.Spread `json:"cpu_us_per_io"`
	// Ratio has, for each base, this contestant's IOPS over the base's, round by round.
	Ratio map[string]bench.Spread `json:"iops_ratio,omitempty"`
	bs    int
}

func main() {
	rounds := pflag.Int("rounds", 4, "rounds; each measures every contestant once per point")
	span := pflag.Duration("time", 1500*time.Millisecond, "length of one measurement")
	only := pflag.String("only", "", "measure only points whose name contains this")
	bin := pflag.String("bin", "", "folder with srp-initiator, target-emu and limit (default: the program's own)")
	out := pflag.String("json", "", "write all samples to this file")
	pin := pflag.String("pin", "both", "peers: pinned, unpinned or both")
	pflag.Parse()
	if *out == "-" {
		fmt.Fprintln(os.Stderr, "versus: --json -: standard output has the table; want the name of a file")
		os.Exit(2)
	}
	if pflag.NArg() != 1 || pflag.Arg(0) != "peers" && pflag.Arg(0) != "fio" || *rounds < 1 {
		fmt.Fprintln(os.Stderr, "usage: versus [flags] peers|fio")
		pflag.PrintDefaults()
		os.Exit(2)
	}
	if *bin == "" {
		self, err := os.Executable()
		if err != nil {
			fatal("%v", err)
		}
		*bin = self[:strings.LastIndexByte(self, '/')]
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	var points []point
	var cs []contestant
	var pins []int
	var bases []string
	if pflag.Arg(0) == "peers" {
		points = []point{{"randread", 4096, 1}, {"randread", 4096, 8}, {"randread", 4096, 32}, {"randread", 4096, 128}, {"read", 65536, 8}, {"read", 1 << 20, 4}}
		cs = peers(*bin)
		bases = []string{"iSCSI tgt tmpfs", "NBD nbdkit -t 1", "NBD nbdkit", "limit, yield", "limit, block"}
		switch *pin {
		case "both":
			pins = []int{-1, 0}
		case "pinned":
			pins = []int{0}
		case "unpinned":
			pins = []int{-1}
		default:
			fatal("--pin: %q is none of pinned, unpinned, both", *pin)
		}
	} else {
		points = []point{{"randread", 4096, 1}, {"randread", 4096, 8}, {"randread", 4096, 32}, {"randread", 4096, 64}, {"read", 65536, 4}, {"read", 512 << 10, 4}, {"read", 1 << 20, 4}}
		cs = kernelPair(*bin)
		bases = []string{"fio on ib_srp"}
		pins = []int{-1}
	}
	var rows []*row
	for _, cpu := range pins {
		got, err := measure(ctx, cs, points, cpu, *rounds, *span, *only)
		if err != nil {
			fatal("%v", err)
		}
		rows = append(rows, got...)
	}
	addRatios(rows, bases)
	printTable(os.Stdout, rows, bases, os.Args, *rounds, *span)
	if *out != "" {
		b, err := json.MarshalIndent(rows, "", " ")
		if err == nil {
			err = os.WriteFile(*out, b, 0o644)
		}
		if err != nil {
			fatal("%v", err)
		}
	}
}

func measure(ctx context.Context, cs []contestant, points []point, cpu, rounds int, span time.Duration, only string) ([]*row, error) {
	var rows []*row
	at := map[string]*row{}
	for _, p := range points {
		if !strings.Contains(p.String(), only) {
			continue
		}
		for _, c := range cs {
			r := &row{Point: p.String(), Pinned: cpu >= 0, Name: c.name(), bs: p.bs}
			rows = append(rows, r)
			at[r.Point+r.Name] = r
		}
	}
	for _, c := range cs {
		if err := c.start(ctx, cpu); err != nil {
			return nil, fmt.Errorf("%s: %w", c.name(), err)
		}
		defer c.stop()
	}
	for n := range rounds {
		for _, p := range points {
			if !strings.Contains(p.String(), only) {
				continue
			}
			for k := range cs {
				c := cs[(n+k)%len(cs)]
				s, err := c.run(ctx, p, span)
				if err != nil {
					return nil, fmt.Errorf("%s, %s: %w", c.name(), p, err)
				}
				r := at[p.String()+c.name()]
				r.Samples = append(r.Samples, s)
				fmt.Fprintf(os.Stderr, "round %d  %-24s %-28s %10.0f IOPS %8.2f us/IO\n", n+1, p, c.name(), s.IOPS, s.CPU)
			}
		}
	}
	for _, r := range rows {
		var iops, cpu []float64
		for _, s := range r.Samples {
			iops, cpu = append(iops, s.IOPS), append(cpu, s.CPU)
		}
		r.IOPS, r.CPU = bench.NewSpread(iops), bench.NewSpread(cpu)
	}
	return rows, nil
}

// addRatios divides by the bases, round by round.
func addRatios(rows []*row, bases []string) {
	for _, r := range rows {
		r.Ratio = map[string]bench.Spread{}
		for _, b := range bases {
			for _, o := range rows {
				if o.Name != b || o.Point != r.Point || o.Pinned != r.Pinned || o == r {
					continue
				}
				var v []float64
				for i := range r.Samples {
					v = append(v, r.Samples[i].IOPS/o.Samples[i].IOPS)
				}
				r.Ratio[b] = bench.NewSpread(v)
			}
		}
	}
}

func printTable(w io.Writer, rows []*row, bases, args []string, rounds int, span time.Duration) {
	host, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	fmt.Fprintf(w, "`%s`\n\n%s, kernel %s, %d CPUs, %s of %s in alternation: median [min-max]; ratios are taken within a round.\n",
		bench.CommandLine(args), time.Now().Format("2006-01-02"), strings.TrimSpace(string(host)), runtime.NumCPU(), bench.Counted(rounds, "round"), span)
	last := ""
	for _, r := range rows {
		head := r.Point
		if r.Pinned {
			head += ", all on one CPU"
		}
		if head != last {
			fmt.Fprintf(w, "\n**%s**\n\n| | IOPS | MB/s | CPU us/IO |", head)
			for _, b := range bases {
				fmt.Fprintf(w, " IOPS / %s |", b)
			}
			fmt.Fprintf(w, "\n|---|---|---|---|%s\n", strings.Repeat("---|", len(bases)))
			last = head
		}
		fmt.Fprintf(w, "| %s | %.0f [%.0f-%.0f] | %.0f | %.2f [%.2f-%.2f] |", r.Name, r.IOPS.Median, r.IOPS.Min, r.IOPS.Max,
			r.IOPS.Median*float64(r.bs)/1e6, r.CPU.Median, r.CPU.Min, r.CPU.Max)
		for _, b := range bases {
			if s, ok := r.Ratio[b]; ok {
				fmt.Fprintf(w, " %.2f [%.2f-%.2f] |", s.Median, s.Min, s.Max)
			} else {
				fmt.Fprint(w, " |")
			}
		}
		fmt.Fprintln(w)
	}
}
