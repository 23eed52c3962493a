package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"srp-initiator/bench"
	"srp-initiator/completion"
	"srp-initiator/srp/disk"
)

var benchVerb = &verb{
	name: "bench", args: "TARGET",
	short: "measure a logical unit, and completion modes against each other",
	long: `Keeps commands under way on a logical unit and measures IOPS, latency, CPU time and notifications. Flags have fio's names.
Patterns that write overwrite the unit's data in the range of --offset and --size; so does --verify, which fills the range first.

With --compare the same workload runs in each of the given completion modes, one after the other, --rounds times: two or more of
interrupt (or thread=n), thread (or thread=y), poll, direct, adaptive. "+lock" behind thread or poll gives it an operating system thread of
its own, as --lock-thread does, on --cpus: thread=n,thread=y,thread=y+lock. Each of those has a session of its own, with an initiator_ext that follows
TARGET's. The table shows medians, spreads, and ratios to the first mode with their verdicts.
` + verdictText + `

While it measures, this program uses one CPU at a time, as storage and RDMA benchmarks do unless told otherwise: with more, Go's scheduler wakes a thread whenever
a goroutine becomes ready, which costs CPU time with every command (on two CPUs at depth 32, a sixth to a third more). --procs says otherwise. A thread of its
own (--lock-thread, thread+lock, poll+lock) is of no use without another CPU, so with these all CPUs are used unless --procs is given.

With --verify a write is read back at once: the commands and IOPS have these too, and say how many.

SIGUSR1 changes to the next completion mode while commands run, but for --compare; the result then names all modes that it is about. SIGINT ends the
run and shows what was measured until then; of --compare, the rounds that were whole.
CPU time is this process's: what the target spends is not in it.`,
	example: `  srp-initiator bench srp://10.0.0.1:5555/505400fffe123456 --rw randread --bs 4k --iodepth 32 --runtime 5s
  srp-initiator bench srp://10.0.0.1:5555/505400fffe123456 --rw randrw --verify --loops 100000 --iodepth 64
  srp-initiator bench srp://10.0.0.1:5555/505400fffe123456 --compare thread=n,thread=y,poll --iodepth 32`,
	flags: func(fs *pflag.FlagSet) func(*env) error {
		var f connectFlags
		var l lunFlag
		var w bench.Workload
		var compare string
		var rounds int
		bs, offset, size := sizeFlag(4096), sizeFlag(0), sizeFlag(0)
		rw := fs.String("rw", "randread", "read, write, randread, randwrite or randrw")
		fs.Var(&bs, "bs", "bytes per command")
		fs.IntVar(&w.Depth, "iodepth", 1, "commands under way per job")
		fs.IntVar(&w.Jobs, "jobs", 1, "jobs, each with commands of its own under way")
		fs.IntVar(&w.ReadPct, "rwmixread", 50, "percent of reads in randrw")
		fs.DurationVar(&w.Runtime, "runtime", 0, "how long to measure (default 2s without --loops)")
		fs.Int64Var(&w.Loops, "loops", 0, "end after so many commands")
		fs.DurationVar(&w.Warmup, "ramp-time", 200*time.Millisecond, "run before measuring begins (not with --loops, which measures every command)")
		rate := fs.String("rate", "0", "commands per second of all jobs together, 1 or more (0: as many as go), or percent of what goes, with --compare in its first mode: 30%. Those of a job that would be due within 50 us are due together; one that finds --iodepth others under way waits; latency counts from when it is sent")
		fs.Var(&offset, "offset", "start of the range used")
		fs.Var(&size, "size", "size of the range used (0: to the unit's end)")
		fs.BoolVar(&w.Verify, "verify", false, "check every byte read, and read back what was written")
		fs.Uint64Var(&w.Seed, "seed", 1, "of offsets and data")
		fs.StringVar(&compare, "compare", "", "completion modes to compare, separated by commas")
		fs.IntVar(&rounds, "rounds", bench.FewestRounds, "rounds of --compare, 1 to 1000; fewer than "+strconv.Itoa(bench.FewestRounds)+" call no difference")
		fs.IntVar(&w.Procs, "procs", 1, "CPUs that this program uses at once while it measures (0: all it may use, as with --lock-thread and \"+lock\" unless this is given)")
		profile := fs.String("cpuprofile", "", "write where this process's CPU time goes to this file (go tool pprof reads it)")
		l.register(fs)
		f.register(fs)
		return func(e *env) error {
			w.Pattern, w.BlockSize, w.Offset, w.Size = bench.Pattern(*rw), int(bs), int64(offset), int64(size)
			if w.Runtime == 0 && w.Loops == 0 {
				w.Runtime = 2 * time.Second
			}
			if w.Loops > 0 {
				w.Warmup = 0
			}
			if err := l.check(); err != nil {
				return err
			}
			if fs.Changed("loops") && w.Loops < 1 {
				return usagef("--loops %d: want 1 or more", w.Loops)
			}
			if err := noStdout("cpuprofile", *profile); err != nil {
				return err
			}
			perCent, err := parseRate(*rate, &w)
			if err != nil {
				return err
			}
			modes, err := parseModes(compare)
			if err != nil {
				return err
			}
			locks := slices.ContainsFunc(modes, func(m variant) bool { return m.lock })
			if (locks || f.lockThread) && !fs.Changed("procs") {
				w.Procs = 0
			}
			if err := w.Validate(); err != nil {
				return &usageError{err}
			}
			for _, name := range []string{"completion", "thread", "lock-thread"} {
				if modes != nil && fs.Changed(name) {
					return usagef("--%s does not go with --compare, which runs the completion modes that it lists", name)
				}
			}
			random := w.Pattern != bench.Read && w.Pattern != bench.Write
			switch {
			case modes != nil && fs.Changed("cpus") && !locks:
				return usagef("--cpus goes with a mode of --compare that has a thread of its own: thread+lock or poll+lock")
			case fs.Changed("rwmixread") && w.Pattern != bench.RandRW:
				return usagef("--rwmixread goes with --rw=randrw, not with %s", w.Pattern)
			case fs.Changed("ramp-time") && w.Loops > 0:
				return usagef("--ramp-time does not go with --loops, which measures every command")
			case fs.Changed("seed") && !random && !w.Verify:
				return usagef("--seed goes with --verify and with --rw=randread, randwrite or randrw, not with %s", w.Pattern)
			case rounds < 1 || rounds > 1000:
				return usagef("--rounds %d: want 1 to 1000", rounds)
			}
			if fs.Changed("rounds") && modes == nil {
				return usagef("--rounds goes with --compare")
			}
			f.fixed = modes != nil
			stop, err := startProfile(*profile)
			if err != nil {
				return err
			}
			err = f.with(e, func(c *connection) error {
				lun, err := l.lun(e.ctx, c.Session)
				if err != nil {
					return err
				}
				d, err := disk.Open(e.ctx, c.Session, lun)
				if err != nil {
					return err
				}
				var we *bench.WorkloadError
				if perCent > 0 {
					if len(modes) > 0 {
						if err := c.Session.SetMode(modes[0].mode); err != nil {
							return err
						}
					}
					if w.Rate, err = e.peak(c, d, w, perCent); err != nil {
						return err
					}
				}
				if len(modes) > 0 {
					err = e.benchCompare(&f, c, d, w, modes, rounds)
				} else {
					err = e.benchOnce(c, d, w)
				}
				if errors.As(err, &we) {
					return &usageError{err}
				}
				return err
			})
			return errors.Join(err, stop())
		}
	},
}

// parseRate reads --rate: a number of commands per second into w, or the percents of "30%".
func parseRate(s string, w *bench.Workload) (perCent float64, err error) {
	number, isPercent := strings.CutSuffix(s, "%")
	v, err := strconv.ParseFloat(number, 64)
	if err != nil || math.IsNaN(v) || isPercent && !(v > 0 && v <= 100) || !isPercent && v != 0 && !(v >= bench.MinRate && v <= bench.MaxRate) {
		return 0, usagef("--rate=%s: want 0 (as many as go), %d to %.0f commands per second, or above 0%% to 100%% of the peak", s, bench.MinRate, float64(bench.MaxRate))
	}
	if isPercent {
		return v, nil
	}
	w.Rate = v
	return 0, nil
}

// peak measures what goes, in the mode in force, and returns perCent of it.
func (e *env) peak(c *connection, d *disk.Disk, w bench.Workload, perCent float64) (float64, error) {
	if w.Runtime == 0 {
		w.Runtime = time.Second
	}
	w.Rate, w.Loops, w.Verify = 0, 0, false
	r, err := bench.Run(e.ctx, c.Session, d, w)
	if err != nil {
		return 0, err
	}
	if r.Commands == 0 {
		return 0, fmt.Errorf("no command began and ended within %s: no peak to take %g %% of; want a longer --runtime", w.Runtime, perCent)
	}
	fmt.Fprintf(e.stderr, "peak: %.0f commands per second; running at %g %% of it\n", r.IOPS, perCent)
	return max(r.IOPS*perCent/100, bench.MinRate), nil
}

// startProfile writes a CPU profile to file until the returned function is called; "" is none.
func startProfile(file string) (stop func() error, err error) {
	if file == "" {
		return func() error { return nil }, nil
	}
	f, err := os.Create(file)
	if err != nil {
		return nil, &usageError{err}
	}
	w := &output{w: f} // package pprof keeps no error
	if err := pprof.StartCPUProfile(w); err != nil {
		f.Close()
		return nil, err
	}
	return func() error {
		pprof.StopCPUProfile()
		cerr := f.Close()
		if err := w.failed(); err != nil {
			return err
		}
		return cerr
	}, nil
}

// variant is one side of --compare.
type variant struct {
	mode completion.Mode
	lock bool // by an operating system thread of its own
}

func (v variant) String() string {
	if v.lock {
		return v.mode.String() + lockSuffix
	}
	return v.mode.String()
}

const lockSuffix = "+lock"

// parseModes reads a list of completion modes.
func parseModes(list string) (modes []variant, err error) {
	if list == "" {
		return nil, nil
	}
	for _, word := range strings.Split(list, ",") {
		name, lock := strings.CutSuffix(strings.TrimSpace(word), lockSuffix)
		switch name {
		case "thread=y":
			name = completion.Thread.String()
		case "thread=n":
			name = completion.Interrupt.String()
		}
		m, err := completion.ParseMode(name)
		if err != nil {
			return nil, usagef("--compare: %w, thread=n and thread=y; thread%s and poll%s have a thread of their own", err, lockSuffix, lockSuffix)
		}
		v := variant{m, lock}
		if lock && m != completion.Thread && m != completion.Poll {
			return nil, usagef("--compare: %s: %q goes with thread and poll, which have a thread to lock", v, lockSuffix)
		}
		if slices.Contains(modes, v) {
			return nil, usagef("--compare %s: %s is there twice", list, v)
		}
		modes = append(modes, v)
	}
	if len(modes) < 2 {
		return nil, usagef("--compare %s: want two modes or more, separated by commas; --completion %s measures one", list, modes[0].mode)
	}
	return modes, nil
}

func (e *env) benchOnce(c *connection, d *disk.Disk, w bench.Workload) error {
	first := c.Options().Completion.Mode
	r, err := bench.Run(e.ctx, c.Session, d, w)
	if r == nil || r.Interrupted && r.Commands == 0 {
		if e.ctx.Err() != nil {
			err = fmt.Errorf("%w; nothing was measured until then", err)
		}
		return err
	}
	if err == nil && r.Commands == 0 {
		return fmt.Errorf("no command began and ended within %s: want a longer --runtime", w.Runtime)
	}
	if names := c.modesIn(first, r.Began, r.Ended); len(names) > 1 {
		r.Mode = switchedModes(names)
	} else {
		r.Mode = names[0]
	}
	if e.json {
		return e.shownJSON(r, err)
	}
	fmt.Fprintf(e.stdout, "%s bs=%s iodepth=%d jobs=%d procs=%d%s completion=%s: %s in %.2f s\n", r.Pattern, humanSize(int64(r.BlockSize)), r.Depth, r.Jobs, r.Procs, rateText(w), r.Mode, bench.Counted(r.Commands, "command"), r.Seconds)
	if r.ReadBacks > 0 {
		fmt.Fprintf(e.stdout, "  of these       %s of what was written\n", bench.Counted(r.ReadBacks, "read-back"))
	}
	fmt.Fprintf(e.stdout, "  IOPS           %.0f, %.1f MB/s\n", r.IOPS, r.MBPerS)
	fmt.Fprintf(e.stdout, "  latency us     mean %.1f, p50 %.1f, p99 %.1f, p99.9 %.1f, max %.1f\n", r.MeanUS, r.P50US, r.P99US, r.P999US, r.MaxUS)
	fmt.Fprintf(e.stdout, "  CPU            user %.2f s, system %.2f s, %.2f us per command\n", r.UserCPU, r.SystemCPU, r.CPUPerIOUS)
	per := "none"
	if r.CommandsPerNotif > 0 {
		per = fmt.Sprintf("%.0f/s, %.1f commands per notification", r.NotificationsPerS, r.CommandsPerNotif)
	}
	fmt.Fprintf(e.stdout, "  notifications  %s\n", per)
	if w.Verify {
		fmt.Fprintf(e.stdout, "  verified       %s\n", bench.Counted(r.Verified, "command"))
	}
	return err
}

// switchedModes names the modes of a run, in their order; of many only the first ones and the last.
func switchedModes(names []string) string {
	const shown = 6
	changes := len(names) - 1
	if len(names) > shown {
		names = append(append(names[:shown-2:shown-2], "..."), names[changes])
	}
	text := "switched: " + strings.Join(names, " -> ")
	if changes >= shown {
		text += fmt.Sprintf(" (%d changes)", changes)
	}
	return text
}

// shownJSON prints what a run gave; the exit code tells of err, which ended it.
func (e *env) shownJSON(v any, err error) error {
	if perr := e.printJSON(v); perr != nil || err == nil {
		return perr
	}
	return &shown{err}
}

// rateText says at which rate commands were submitted, if there was one.
func rateText(w bench.Workload) string {
	if w.Rate == 0 {
		return ""
	}
	return fmt.Sprintf(" rate=%.0f", w.Rate)
}

func (e *env) benchCompare(f *connectFlags, c *connection, d *disk.Disk, w bench.Workload, modes []variant, rounds int) error {
	var variants []bench.Variant
	o := c.Options()
	for _, m := range modes {
		c, d := c, d
		if m.lock {
			// Which thread reaps is settled at the login. On one device all sessions would have one initiator port, and each login would end
			// the one before: so each takes the next first half.
			own := *f
			own.completion, own.lockThread, own.shared = m.mode.String(), true, c.fabric
			o.InitiatorExt++
			var err error
			if c, err = own.login(e, c.Target(), o); err != nil {
				return fmt.Errorf("%s: %w", m, err)
			}
			defer c.close()
			if d, err = disk.Open(e.ctx, c.Session, d.Unit().LUN); err != nil {
				return fmt.Errorf("%s: %w", m, err)
			}
		}
		variants = append(variants, bench.Variant{Name: m.String(), Run: func(ctx context.Context) (*bench.Result, error) {
			if !m.lock {
				if err := c.Session.SetMode(m.mode); err != nil {
					return nil, err
				}
			}
			r, err := bench.Run(ctx, c.Session, d, w)
			if r != nil {
				r.Mode = m.String()
			}
			return r, err
		}})
	}
	cs, err := bench.Compare(e.ctx, rounds, variants, nil)
	if cs == nil {
		return err
	}
	for _, c := range cs {
		if n := len(c.Rounds); err == nil && c.WithoutCommands == n {
			err = fmt.Errorf("%s did no command in %s of %s: want a longer --runtime", c.Name, bench.Counted(n, "round"), w.Runtime)
		}
	}
	if e.json {
		return e.shownJSON(cs, err)
	}
	procs := w.Procs
	if procs == 0 {
		procs = runtime.GOMAXPROCS(0)
	}
	fmt.Fprintf(e.stdout, "%s bs=%s iodepth=%d jobs=%d procs=%d%s, %s, medians\n", w.Pattern, humanSize(int64(w.BlockSize)), w.Depth, w.Jobs, procs, rateText(w), bench.Counted(len(cs[0].Rounds), "round"))
	for _, c := range cs {
		if w.Rate > 0 && c.IOPS.Median < 0.98*w.Rate {
			fmt.Fprintf(e.stdout, "%s does not reach the rate: compare its CPU time and latency with care\n", c.Name)
		}
	}
	return errors.Join(err, bench.WriteTable(e.stdout, cs))
}
