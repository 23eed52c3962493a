package bench

// The published experiments, re-run. Every point of an experiment compares variants (completion settings) under one workload in alternating
// rounds; the published figures for the same point stand beside ours. Variants that differ in the mode alone take turns on one session, each other has
// its own, logged in once.

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"time"

	"srp-initiator/completion"
	"srp-initiator/srp"
	"srp-initiator/srp/disk"
)

// Opener logs in with the given completion settings and opens so many units. close logs out.
type Opener func(ctx context.Context, cfg completion.Config, units int) (s *srp.Session, ds []*disk.Disk, close func() error, err error)

// Setting is one variant of an experiment.
type Setting struct {
	Name   string
	Config completion.Config
	Budget int // of the Poller in mode Poll
}

// onlyMode reports that a setting is a mode and the defaults. Such settings share a session: beside idle sessions, whose channels the target has armed, a thread of
// the target's would be woken for each packet of the one that it polls.
func (s *Setting) onlyMode() bool {
	c := &s.Config
	return (c.Weight == 0 || c.Weight == completion.DefaultWeight) && (s.Budget == 0 || s.Budget == completion.DefaultBudget) &&
		c.Batch == 0 && c.Budget == 0 && c.Slice == 0 && c.Poller == nil && c.Linger == 0 && !c.LockThread && c.Spin == 0 && !c.Hybrid && c.IdleGuard == 0
}

// Published is a figure that somebody printed, for one point and one variant.
type Published struct {
	Setting string  `json:"variant"`
	Metric  string  `json:"metric"` // a name of Metrics
	Value   float64 `json:"value"`
}

// Point is one row or curve point of an experiment.
type Point struct {
	Label    string // "4 KiB x 128 jobs"
	Series   string // what the x axis counts within, "512 B"; points of one series make a line
	X        float64
	Workload Workload
	// PercentOfPeak sets the rate to so many percent of the IOPS that the first setting reached at the point of the same Series whose
	// PercentOfPeak is 0 and that comes before. 0: as many as go.
	PercentOfPeak float64
	Published     []Published
}

// Experiment is a named suite.
type Experiment struct {
	Name     string
	Title    string
	Source   string // who published what
	Question string // what to look at
	XAxis    string
	LogX     bool
	Settings []Setting
	Points   []Point
	Units    int // units in a stripe; 0: one, not striped
	Chunk    int // of the stripe, bytes
	// Stacked makes the stripe a disk.Stripe whose members belong to sessions of their own, read as a block device is.
	Stacked bool
	Procs   int // of every workload (Workload.Procs)
}

// Writes reports whether it overwrites the unit's data.
func (e *Experiment) Writes() bool {
	return slices.ContainsFunc(e.Points, func(p Point) bool { return p.Workload.Pattern.writes() })
}

// Metric is a figure of a Result that reports know by name.
type Metric struct {
	Name, Unit string
	Of         func(*Result) float64
}

// Metrics are the figures in reports, in their order.
var Metrics = []Metric{
	{"iops", "1/s", func(r *Result) float64 { return r.IOPS }},
	{"mb_per_s", "MB/s", func(r *Result) float64 { return r.MBPerS }},
	{"lat_mean", "us", func(r *Result) float64 { return r.MeanUS }},
	{"lat_p50", "us", func(r *Result) float64 { return r.P50US }},
	{"lat_p99", "us", func(r *Result) float64 { return r.P99US }},
	{"lat_p999", "us", func(r *Result) float64 { return r.P999US }},
	{"lat_max", "us", func(r *Result) float64 { return r.MaxUS }},
	{"cpu_per_io", "us", func(r *Result) float64 { return r.CPUPerIOUS }},
	{"cpu_user", "%", func(r *Result) float64 { return percent(r.UserCPU, r.Seconds) }},
	{"cpu_system", "%", func(r *Result) float64 { return percent(r.SystemCPU, r.Seconds) }},
	{"switches_per_io", "", func(r *Result) float64 { return r.SwitchesPerIO }},
	{"notifications", "1/s", func(r *Result) float64 { return r.NotificationsPerS }},
	{"notifications_per_io", "", func(r *Result) float64 { return r.NotificationsPerIO }},
	{"commands_per_notification", "", commandsPerNotification},
}

// commandsPerNotification is not a number where there was no notification, which no figure could be better than: such a round has none.
func commandsPerNotification(r *Result) float64 {
	if r.CommandsPerNotif == 0 {
		return math.NaN()
	}
	return r.CommandsPerNotif
}

// percent is part/whole in percent, 0 when nothing was measured.
func percent(part, whole float64) float64 {
	if whole <= 0 {
		return 0
	}
	return 100 * part / whole
}

// MetricNamed finds a metric.
func MetricNamed(name string) (Metric, bool) {
	i := slices.IndexFunc(Metrics, func(m Metric) bool { return m.Name == name })
	if i < 0 {
		return Metric{}, false
	}
	return Metrics[i], true
}

// Options of a run of an experiment.
type Options struct {
	Rounds  int           // per point; 0: FewestRounds
	Runtime time.Duration // per round and variant; 0: 500 ms
	Warmup  time.Duration // 0: a fifth of Runtime
	Offset  int64         // of the range used
	Size    int64         // of the range used; 0: to the end
	Seed    uint64
	// MayWrite allows experiments that write; without it they are refused.
	MayWrite bool
	// SkipUnfit leaves out the points that the unit cannot do, and says so in the report; without it they are an *UnfitError.
	SkipUnfit bool
	Procs     *int // in place of the experiment's; nil: that
	Progress  func(done, all int, point string)
}

// ErrWouldWrite: the experiment overwrites data, and Options.MayWrite was not given.
var ErrWouldWrite = errors.New("bench: this experiment overwrites the logical unit's data")

// UnfitError names the points whose workload the unit cannot do. Nothing but INQUIRY and the like was sent.
type UnfitError struct {
	Points []string // their labels
	All    int      // points of the experiment
	Err    error    // why not the first of them; a *WorkloadError
}

func (e *UnfitError) Error() string {
	return fmt.Sprintf("%d of %s cannot run on this unit (%s): %s", len(e.Points), Counted(e.All, "point"), strings.Join(e.Points, "; "), e.Err)
}

func (e *UnfitError) Unwrap() error { return e.Err }

// PointResult is what one point measured.
type PointResult struct {
	Label     string      `json:"point"`
	Series    string      `json:"series"`
	X         float64     `json:"x"`
	Rate      float64     `json:"rate_limit,omitempty"`
	Variants  []Compared  `json:"variants"`
	Published []Published `json:"published,omitempty"`
	Skipped   string      `json:"skipped,omitempty"` // why it was not run
	Failed    string      `json:"failed,omitempty"`  // what ended it; nothing of it counts
	// Cut says after how many of its rounds a signal ended it: those that were whole are in Variants.
	Cut string `json:"cut,omitempty"`
}

// missing says why there are no figures, or nothing.
func (p *PointResult) missing() string {
	switch {
	case p.Skipped != "":
		return "not run: " + p.Skipped
	case p.Failed != "":
		return "failed: " + p.Failed
	}
	return ""
}

// Report is a run of an experiment.
type Report struct {
	Experiment string   `json:"experiment"`
	Title      string   `json:"title"`
	Source     string   `json:"source"`
	Question   string   `json:"question"`
	XAxis      string   `json:"x_axis"`
	LogX       bool     `json:"log_x"`
	Command    []string `json:"command"`
	Machine    Machine  `json:"machine"`
	Rounds     int      `json:"rounds"`
	RuntimeMS  int64    `json:"runtime_ms"`
	Procs      int      `json:"procs"` // CPUs that the process might use at once while it measured
	// Interrupted says how far it came when a signal ended it.
	Interrupted string        `json:"interrupted,omitempty"`
	Points      []PointResult `json:"points"`
}

// Run runs the experiment. Before it measures anything it looks for points whose workload the unit cannot do (Options.SkipUnfit). A point that
// fails is named in the report and in the error beside it, and the others are run, unless the connection is lost. When ctx ends, the report
// has what was finished until then, and the error is the cause of that.
func (e *Experiment) Run(ctx context.Context, open Opener, o Options) (rep *Report, err error) {
	if o.Rounds == 0 {
		o.Rounds = FewestRounds
	}
	if o.Runtime == 0 {
		o.Runtime = 500 * time.Millisecond
	}
	if o.Warmup == 0 {
		o.Warmup = o.Runtime / 5
	}
	if e.Writes() && !o.MayWrite {
		return nil, ErrWouldWrite
	}
	procs := e.Procs
	if o.Procs != nil {
		procs = *o.Procs
	}
	type side struct {
		s *srp.Session
		d []*disk.Disk
		// A stacked device, and the sessions of all members.
		stripe disk.Device
		ss     []*srp.Session
	}
	sides := make([]side, len(e.Settings))
	shared := -1 // the first of those settings that differ in the mode alone: they take turns on one session
	for k, set := range e.Settings {
		cfg := set.Config
		if set.onlyMode() {
			if shared >= 0 {
				sides[k] = sides[shared]
				continue
			}
			shared, cfg = k, completion.Config{Mode: cfg.Mode}
		}
		if !set.onlyMode() && cfg.Mode == completion.Poll && cfg.Poller == nil {
			if cfg.Poller, err = completion.NewPoller(completion.PollerConfig{Budget: set.Budget}); err != nil {
				return nil, err
			}
		}
		var members []disk.Device
		for range max(e.Units, 1) {
			s, d, end, err := open(ctx, cfg, max(e.Units, 1))
			if err != nil {
				return nil, fmt.Errorf("%s: %w", set.Name, err)
			}
			defer func() {
				if cerr := end(); err == nil {
					err = cerr
				}
			}()
			side := &sides[k]
			side.s, side.d = s, d
			if !e.Stacked {
				break
			}
			side.ss = append(side.ss, s)
			members = append(members, d[len(members)])
		}
		if e.Stacked {
			if sides[k].stripe, err = disk.NewStripe(members, int64(e.Chunk)); err != nil {
				return nil, fmt.Errorf("%s: %w", set.Name, err)
			}
		}
	}
	rep = &Report{Experiment: e.Name, Title: e.Title, Source: e.Source, Question: e.Question, XAxis: e.XAxis, LogX: e.LogX,
		Machine: ThisMachine(), Rounds: o.Rounds, RuntimeMS: o.Runtime.Milliseconds(), Procs: procs}
	if procs == 0 {
		rep.Procs = runtime.GOMAXPROCS(0)
	}
	inq := sides[0].d[0].Inquiry()
	rep.Machine.Device = sides[0].s.Device().Name() + " (" + sides[0].s.Device().Provider() + ")"
	rep.Machine.Target = strings.Join(strings.Fields(inq.Vendor+" "+inq.Product+" "+inq.Revision), " ")
	workload := func(p Point) Workload {
		w := p.Workload
		w.Runtime, w.Warmup, w.Offset, w.Size, w.Seed, w.Procs = o.Runtime, o.Warmup, o.Offset, o.Size, o.Seed, procs
		return w
	}
	unfit, reasons := &UnfitError{All: len(e.Points)}, map[string]string{}
	for _, p := range e.Points {
		w := workload(p)
		for _, side := range sides {
			var err error
			if e.Stacked {
				err = w.checkDevice(side.stripe)
			} else {
				err = w.checkUnits(side.s, side.d, e.Chunk)
			}
			if err != nil {
				if unfit.Err == nil {
					unfit.Err = err
				}
				unfit.Points = append(unfit.Points, p.Label)
				reasons[p.Label] = err.Error()
				break
			}
		}
	}
	if n := len(unfit.Points); n > 0 && (!o.SkipUnfit || n == len(e.Points)) {
		return nil, unfit
	}
	peaks := map[string]float64{}
	var failed []error
	for n, p := range e.Points {
		if o.Progress != nil {
			o.Progress(n, len(e.Points), p.Label)
		}
		w := workload(p)
		pr := PointResult{Label: p.Label, Series: p.Series, X: p.X, Published: p.Published}
		fail := func(err error) {
			pr.Failed = err.Error()
			failed = append(failed, fmt.Errorf("%s: %w", p.Label, err))
			rep.Points = append(rep.Points, pr)
		}
		if pr.Skipped = reasons[p.Label]; pr.Skipped != "" {
			rep.Points = append(rep.Points, pr)
			continue
		}
		if p.PercentOfPeak > 0 {
			if peaks[p.Series] == 0 {
				fail(errors.New("no peak was measured"))
				continue
			}
			w.Rate = max(peaks[p.Series]*p.PercentOfPeak/100, MinRate)
		}
		pr.Rate = w.Rate
		variants := make([]Variant, len(sides))
		for k, side := range sides {
			mode := e.Settings[k].Config.Mode
			variants[k] = Variant{Name: e.Settings[k].Name, Run: func(ctx context.Context) (*Result, error) {
				for _, s := range append(side.ss, side.s) {
					if err := s.SetMode(mode); err != nil {
						return nil, err
					}
				}
				if e.Stacked {
					return RunDevice(ctx, side.stripe, side.ss, w)
				}
				return RunStriped(ctx, side.s, side.d, max(e.Chunk, 1), w)
			}}
		}
		cs, err := Compare(ctx, o.Rounds, variants, nil)
		pr.Variants = cs
		rep.Machine.Pinned = pinned(rep.Machine.CPUs) // who runs the program may have pinned it meanwhile
		if cause := context.Cause(ctx); cause != nil && err != nil {
			rep.Interrupted = fmt.Sprintf("%s; finished: %d of %s", cause, n, Counted(len(e.Points), "point"))
			if len(cs) > 0 {
				pr.Cut = fmt.Sprintf("after %d of %s", len(cs[0].Rounds), Counted(o.Rounds, "round"))
				rep.Points = append(rep.Points, pr)
			}
			if len(rep.Points) == 0 {
				rep = nil
			}
			return rep, fmt.Errorf("%s: %w", p.Label, cause)
		}
		if err != nil {
			if fail(err); over(err) {
				rep.Interrupted = fmt.Sprintf("%s; finished: %d of %s", err, n, Counted(len(e.Points), "point"))
				break
			}
			continue
		}
		if p.PercentOfPeak == 0 && len(cs) > 0 {
			peaks[p.Series] = cs[0].IOPS.Median
		}
		rep.Points = append(rep.Points, pr)
	}
	if o.Progress != nil {
		o.Progress(len(e.Points), len(e.Points), "")
	}
	switch len(failed) {
	case 0:
		return rep, nil
	case 1:
		return rep, failed[0]
	}
	return rep, fmt.Errorf("%d of %s failed, the first: %w", len(failed), Counted(len(e.Points), "point"), failed[0])
}

// over tells whether an error means that no other point can be measured on these sessions.
func over(err error) bool {
	for _, end := range []error{srp.ErrClosed, srp.ErrConnectionLost, srp.ErrFailFast, srp.ErrDeviceLost} {
		if errors.Is(err, end) {
			return true
		}
	}
	return false
}

// Spread is a metric of one variant over the rounds. A round without commands has a throughput, 0, and else nothing to measure: no latency, no CPU time
// per command. The spread of no round at all is 0.
func (c *Compared) Spread(m Metric) Spread {
	v := make([]float64, 0, len(c.Rounds))
	for _, r := range c.Rounds {
		if !r.idle() || m.throughput() {
			if x := m.Of(r); !math.IsNaN(x) {
				v = append(v, x)
			}
		}
	}
	if len(v) == 0 {
		return Spread{}
	}
	return NewSpread(v)
}

func (m Metric) throughput() bool { return m.Name == "iops" || m.Name == "mb_per_s" }

// idle reports that no command began and ended in the measured time.
func (r *Result) idle() bool { return r.IOPS == 0 }

// Idle is the number of rounds without commands.
func (c *Compared) Idle() (n int) {
	for _, r := range c.Rounds {
		if r.idle() {
			n++
		}
	}
	return n
}

// idleText says which variants had rounds without commands, "" when none had.
func idleText(cs []Compared) string {
	var said []string
	for k := range cs {
		if n := cs[k].Idle(); n > 0 {
			said = append(said, fmt.Sprintf("%s did no command in %d of %s", cs[k].Name, n, Counted(len(cs[k].Rounds), "round")))
		}
	}
	if said == nil {
		return ""
	}
	return strings.Join(said, ", ") + ": no ratio counts those rounds, and no figure but IOPS; want a longer runtime"
}

// Ratio is a metric of c divided, round by round, by that of base, without the rounds in which either did no command. ok is false when base has
// zeros, or no round is left.
func (c *Compared) Ratio(base *Compared, m Metric) (r Ratio, ok bool) {
	v := make([]float64, 0, len(c.Rounds))
	for n, r := range c.Rounds {
		if r.idle() || base.Rounds[n].idle() {
			continue
		}
		b := m.Of(base.Rounds[n])
		if b == 0 {
			return Ratio{}, false
		}
		if x := m.Of(r) / b; !math.IsNaN(x) {
			v = append(v, x)
		}
	}
	if len(v) == 0 {
		return Ratio{}, false
	}
	return NewRatio(v), true
}
