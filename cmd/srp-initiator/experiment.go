package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"srp-initiator/bench"
	"srp-initiator/completion"
	"srp-initiator/rdma"
	"srp-initiator/srp"
	"srp-initiator/srp/disk"
	"srp-initiator/srp/scsi"
)

var experimentVerb = &verb{
	name: "experiment", args: "NAME TARGET",
	short: "re-run a published experiment on completion modes",
	long: `Runs a named experiment on a logical unit and sets its figures beside the published ones. Completion settings that differ in
the mode alone share a session; each other (the budgets of e2) and each member of e3s gets one of its own, with an initiator_ext of its
own (that of TARGET or 0, and those that follow it): a target with an access list has to know them. The settings take turns, --rounds times for each point. What the machine was, and the command, go into every report.
While it measures, this program uses one CPU at a time; e4 all, for it asks whether another one helps. --procs says otherwise (see bench).
` + verdictText + `

Before anything is measured the unit is looked at: when it cannot do a point (its blocks are larger, its end is nearer, it is read-only),
nothing is run, unless --skip says to run the others. A point that fails is named, the others are run, and the exit code is not 0.
A signal ends the experiment and shows what was finished until then.

Experiments:
` + experimentText() + `
The published tables were measured on null storage (target-emu --lun 0=null:1g, or a NULLIO unit of SCST). e2 writes: it
needs --write and destroys the unit's data.

CPU time is this process's: what the target spends is not in it.`,
	example: `  srp-initiator experiment e4 srp://10.0.0.1:5555/505400fffe123456
  srp-initiator experiment matrix srp://10.0.0.1:5555/505400fffe123456 --rounds 7 --runtime 2s --csv matrix.csv --plots .
  srp-initiator experiment e2 --write srp://10.0.0.1:5555/505400fffe123456 --json`,
	flags: func(fs *pflag.FlagSet) func(*env) error {
		var f connectFlags
		var l lunFlag
		var o bench.Options
		offset, size := sizeFlag(0), sizeFlag(0)
		fs.IntVar(&o.Rounds, "rounds", bench.FewestRounds, "rounds per point, 1 to 1000; fewer than "+strconv.Itoa(bench.FewestRounds)+" call no difference")
		fs.DurationVar(&o.Runtime, "runtime", 500*time.Millisecond, "of each setting in each round")
		fs.DurationVar(&o.Warmup, "ramp-time", 0, "run before measuring begins (default: a fifth of --runtime)")
		fs.Var(&offset, "offset", "start of the range used")
		fs.Var(&size, "size", "size of the range used (0: to the unit's end)")
		fs.Uint64Var(&o.Seed, "seed", 1, "of offsets")
		fs.BoolVar(&o.MayWrite, "write", false, "e2: allow it to overwrite the unit's data")
		fs.BoolVar(&o.SkipUnfit, "skip", false, "leave out the points that the unit cannot do")
		procs := fs.Int("procs", 0, "CPUs that this program uses at once while it measures (0: all it may use; default 1, for e4 0)")
		csvFile := fs.String("csv", "", "write all figures to this file; - for standard output, in place of the report")
		markdown := fs.Bool("markdown", false, "print the report as Markdown tables")
		plots := fs.String("plots", "", "draw the figures into this directory, which must exist (PNG and SVG)")
		l.register(fs)
		second := lunFlag{text: "1"}
		fs.StringVar(&second.text, "lun2", second.text, "e3, e3s: the other unit of the stripe, on the same target")
		f.register(fs)
		for _, name := range completionFlags {
			fs.Lookup(name).Hidden = true
		}
		return func(e *env) error {
			x, err := bench.ExperimentNamed(e.args[0])
			if err != nil {
				return &usageError{err}
			}
			for _, two := range [][2]string{{"json", "markdown"}, {"json", "csv"}, {"markdown", "csv"}} {
				if fs.Changed(two[0]) && fs.Changed(two[1]) && (two[1] != "csv" || *csvFile == "-") {
					return usagef("--%s and --%s both say what standard output gets: want one of them", two[0], two[1])
				}
			}
			for _, name := range completionFlags {
				if fs.Changed(name) {
					return usagef("--%s: the experiment chooses who reaps completions; bench --compare compares what you name", name)
				}
			}
			t, login, err := srp.ParseTarget(e.args[1])
			if err != nil {
				return err
			}
			if err := l.check(); err != nil {
				return err
			}
			if err := second.check(); err != nil {
				return err
			}
			switch {
			case o.Rounds < 1 || o.Rounds > 1000:
				return usagef("--rounds %d: want 1 to 1000", o.Rounds)
			case *procs < 0 || *procs > bench.MaxProcs:
				return usagef("--procs %d: want 1 to %d CPUs, or 0 for all that this program may use", *procs, bench.MaxProcs)
			case o.Runtime <= 0 || o.Warmup < 0:
				return usagef("--runtime must be positive, --ramp-time not negative")
			case x.Units > 1 && sameUnit(l.text, second.text):
				return usagef("--lun %s and --lun2 %s are the same unit: %s stripes over two", l.text, second.text, x.Name)
			case x.Units < 2 && fs.Changed("lun2"):
				return usagef("--lun2: %s uses one unit; those that stripe over two are %s", x.Name, experimentsThat(func(x *bench.Experiment) bool { return x.Units > 1 }))
			case !x.Writes() && fs.Changed("write"):
				return usagef("--write: %s does not write; those that do are %s", x.Name, experimentsThat((*bench.Experiment).Writes))
			}
			if *plots != "" {
				if err := noStdout("plots", *plots); err != nil {
					return err
				}
				if st, err := os.Stat(*plots); err != nil {
					return usagef("--plots %s: %w; want a directory that exists", *plots, errors.Unwrap(err))
				} else if !st.IsDir() {
					return usagef("--plots %s: not a directory", *plots)
				}
			}
			var table *outFile
			if *csvFile != "" && *csvFile != "-" {
				if table, err = openOutput(*csvFile); err != nil {
					return err
				}
				defer table.close()
			}
			o.Offset, o.Size = int64(offset), int64(size)
			if fs.Changed("procs") {
				o.Procs = procs
			}
			for _, p := range x.Points {
				login.QueueSize = max(login.QueueSize, min(p.Workload.Depth*p.Workload.Jobs, 128))
			}
			o.Progress = func(done, all int, point string) {
				if done < all {
					fmt.Fprintf(e.stderr, "%s %d/%d: %s\n", x.Name, done+1, all, point)
				}
			}
			rep, err := x.Run(e.ctx, f.opener(e, []*lunFlag{&l, &second}, t, login), o)
			if errors.Is(err, bench.ErrWouldWrite) {
				return usagef("%s overwrites the unit's data: say --write to allow it", x.Name)
			}
			var unfit *bench.UnfitError
			if errors.As(err, &unfit) {
				if len(unfit.Points) < unfit.All {
					return usagef("%s: %w; --skip runs the others", x.Name, err)
				}
				return usagef("%s: %w", x.Name, err)
			}
			if rep == nil {
				return err
			}
			var intr *interrupted
			if errors.As(err, &intr) && (table != nil || *plots != "") {
				intr.mayTake(time.Minute)
			}
			rep.Command = os.Args
			if rerr := e.report(rep, table, *csvFile == "-", *plots, *markdown); rerr != nil && err != nil {
				return fmt.Errorf("%w; and %w", err, rerr)
			} else if rerr != nil {
				return rerr
			}
			if err != nil && e.json {
				err = &shown{err}
			}
			return err
		}
	},
}

// sameUnit tells whether two texts of --lun name one unit.
func sameUnit(a, b string) bool {
	x, _ := scsi.ParseLUN(a)
	y, _ := scsi.ParseLUN(b)
	m, numbered := x.Number()
	n, also := y.Number()
	return x == y || numbered && also && m == n
}

func experimentText() string {
	var b strings.Builder
	for _, x := range bench.Experiments() {
		fmt.Fprintf(&b, "  %-8s %s\n           %s\n", x.Name, x.Title, x.Source)
	}
	return b.String()
}

// opener logs in for an experiment, once per session. The units of a stripe are --lun and --lun2. On one device all would
// have one initiator port identifier, and a login for a single channel ends the sessions that its initiator port has (SRP, 5.1.3.1: multi-channel
// action 0): so each takes the next first half.
func (f *connectFlags) opener(e *env, luns []*lunFlag, t srp.TargetPort, o srp.LoginOptions) bench.Opener {
	next := o.InitiatorExt
	// An address has its port, and a capture its file, once.
	oneDevice := f.pcap != "" || strings.HasPrefix(f.device, "softroce:")
	var shared *rdma.Fabric
	return func(ctx context.Context, cfg completion.Config, units int) (_ *srp.Session, ds []*disk.Disk, _ func() error, err error) {
		own := *f
		own.settings = &cfg
		own.shared = shared
		o := o
		o.InitiatorExt = next
		next++
		c, err := own.login(e, t, o)
		if err != nil {
			return nil, nil, nil, err
		}
		defer func() {
			if err != nil {
				c.close()
			}
		}()
		if oneDevice {
			shared = c.fabric
		}
		for _, l := range luns[:units] {
			lun, err := l.lun(ctx, c.Session)
			if err != nil {
				return nil, nil, nil, err
			}
			d, err := disk.Open(ctx, c.Session, lun)
			if err != nil {
				return nil, nil, nil, err
			}
			ds = append(ds, d)
		}
		return c.Session, ds, c.close, nil
	}
}

// verdictText says when a comparison calls a difference.
var verdictText = "Ratios are taken within each round and shown as their median with its 95 % interval, which comes from their order alone (sign test) and holds\nwhatever their distribution:\n" +
	strings.NewReplacer(", when ", ", when\n", "; ", ";\n").Replace(bench.Rule) +
	".\nMore rounds make the interval narrower; it bears outliers: 1 on each side with 9 rounds, 5 with 20, 9 with 30."

// experimentsThat names those for which f holds.
func experimentsThat(f func(*bench.Experiment) bool) string {
	var names []string
	for _, x := range bench.Experiments() {
		if f(x) {
			names = append(names, x.Name)
		}
	}
	return strings.Join(names, ", ")
}

func (e *env) report(rep *bench.Report, table *outFile, csvOut bool, plots string, markdown bool) error {
	if table != nil {
		if err := errors.Join(table.begin(), rep.WriteCSV(table), table.close()); err != nil {
			return err
		}
	}
	if plots != "" {
		files, err := rep.WritePlots(plots)
		if err != nil {
			return err
		}
		for _, name := range files {
			fmt.Fprintln(e.stderr, name)
		}
	}
	if csvOut {
		return rep.WriteCSV(e.stdout)
	}
	if e.json {
		return e.printJSON(rep)
	}
	if markdown {
		return rep.WriteMarkdown(e.stdout)
	}
	return rep.WriteText(e.stdout)
}
