// Package selftest tries out an RDMA device that a user has: the contract of package verbs, traffic with data check,
// notifications, and what the device does per second. Its report can be attached to a bug.
//
// It needs no peer: two queue pairs of the device are connected to each other. On most adapters such traffic
// turns around inside the adapter, so it says nothing of the cable or the switch.
package selftest

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/verbstest"
)

// Options say what to test.
type Options struct {
	// Open opens the device; it is called once for each part and twice for each case of the contract (once with
	// OpenPeer). The closer closes the context too.
	Open func() (verbs.Context, io.Closer, error)
	// OpenPeer opens the second device of a case, where Open cannot twice: a socket's address is taken by the first. Optional.
	OpenPeer func() (verbs.Context, io.Closer, error)
	// Port of the device, 0 for 1.
	Port uint8
	// Duration of each part that measures; 0: 2 s.
	Duration time.Duration
	// Progress is told in one line each what has been tried. Optional.
	Progress func(string)
}

// Report is what came out.
type Report struct {
	Time    time.Time
	System  string // kernel release, architecture, processors
	Name    string
	Driver  string // verbs.Context.Provider
	Device  verbs.DeviceAttr
	Port    verbs.PortAttr
	GIDs    []verbs.GIDEntry
	Cases   []Result // the contract
	Parts   []Result // traffic, notifications, latency, bandwidth
	Figures []Figure
}

// Result is one thing tried.
type Result struct {
	Name    string
	Passed  bool
	Took    time.Duration
	Details []string // what went wrong, or was left out
}

// Figure is one measurement.
type Figure struct {
	Name  string
	Value float64
	Unit  string
}

// Passed reports whether everything did.
func (r *Report) Passed() bool {
	for _, list := range [][]Result{r.Cases, r.Parts} {
		for _, x := range list {
			if !x.Passed {
				return false
			}
		}
	}
	return true
}

// caseLimit is how long one case may take before it counts as hanging.
const caseLimit = 2 * time.Minute

// Run tests the device. The error says why it could not; what failed in the tests is in the report.
func Run(ctx context.Context, o Options) (*Report, error) {
	if o.Duration <= 0 {
		o.Duration = 2 * time.Second
	}
	if o.Port == 0 {
		o.Port = 1
	}
	if o.OpenPeer == nil {
		o.OpenPeer = o.Open
	}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	r := &Report{Time: time.Now().Truncate(time.Second), System: system()}
	if err := r.describe(&o); err != nil {
		return nil, err
	}
	for _, c := range verbstest.Cases {
		if err := context.Cause(ctx); err != nil {
			return r, err
		}
		res := runCase(&o, c)
		r.Cases = append(r.Cases, res)
		o.Progress(res.line())
	}
	for _, p := range []struct {
		name string
		run  func(context.Context, *pair, *Report, time.Duration) error
	}{{"traffic with data check", traffic}, {"notifications", notifications}, {"latency", latency}, {"bandwidth", bandwidth}} {
		if err := context.Cause(ctx); err != nil {
			return r, err
		}
		res := Result{Name: p.name}
		start := time.Now()
		err := withPair(&o, func(pr *pair) error { return p.run(ctx, pr, r, o.Duration) })
		res.Took, res.Passed = time.Since(start), err == nil
		if err != nil {
			res.Details = []string{err.Error()}
		}
		r.Parts = append(r.Parts, res)
		o.Progress(res.line())
	}
	return r, nil
}

func system() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return runtime.GOARCH
	}
	return fmt.Sprintf("Linux %s, %s, %d processors", unix.ByteSliceToString(u.Release[:]), runtime.GOARCH, runtime.NumCPU())
}

func (r *Report) describe(o *Options) error {
	c, closer, err := o.Open()
	if err != nil {
		return err
	}
	defer closer.Close()
	r.Name, r.Driver = c.Name(), c.Provider()
	if r.Device, err = c.QueryDevice(); err != nil {
		return err
	}
	if r.Port, err = c.QueryPort(o.Port); err != nil {
		return err
	}
	for i := range r.Port.GIDTableLen {
		if g, err := c.QueryGID(o.Port, i); err == nil {
			r.GIDs = append(r.GIDs, g)
		}
	}
	if r.Port.State != verbs.PortActive {
		return fmt.Errorf("%s port %d is not active (state %d): bring its link up first", r.Name, o.Port, r.Port.State)
	}
	return nil
}

// side is o's port of c.
func (o *Options) side(c verbs.Context) (verbstest.Side, error) {
	s, err := verbstest.OpenSide(c)
	s.Port = o.Port
	return s, err
}

// tb runs a case of the contract outside a Go test.
type tb struct {
	name string

	mu       sync.Mutex
	failed   bool     // guarded by mu
	log      []string // guarded by mu
	cleanups []func() // guarded by mu
}

func (t *tb) Helper()      {}
func (t *tb) Name() string { return t.name }

func (t *tb) note(fail bool, format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failed = t.failed || fail
	t.log = append(t.log, fmt.Sprintf(format, args...))
}

func (t *tb) Logf(format string, args ...any)   { t.note(false, format, args...) }
func (t *tb) Errorf(format string, args ...any) { t.note(true, format, args...) }

// Fatalf implements verbstest.TB.
func (t *tb) Fatalf(format string, args ...any) {
	t.note(true, format, args...)
	runtime.Goexit()
}

// Failed implements verbstest.TB.
func (t *tb) Failed() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.failed
}

// Cleanup implements verbstest.TB.
func (t *tb) Cleanup(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cleanups = append(t.cleanups, f)
}

// clean runs the clean-ups, the last one first, even when one of them ends the goroutine.
func (t *tb) clean() {
	t.mu.Lock()
	n := len(t.cleanups)
	if n == 0 {
		t.mu.Unlock()
		return
	}
	f := t.cleanups[n-1]
	t.cleanups = t.cleanups[:n-1]
	t.mu.Unlock()
	defer t.clean()
	f()
}

// runCase runs one case on two fresh contexts.
func runCase(o *Options, c verbstest.Case) Result {
	t := &tb{name: c.Name}
	start := time.Now()
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer t.clean()
		defer func() {
			if p := recover(); p != nil {
				t.Errorf("panic: %v", p)
			}
		}()
		c.Run(t, openPair(t, o))
	}()
	select {
	case <-done:
	case <-time.After(caseLimit):
		t.Errorf("it hangs: no end after %v", caseLimit)
	}
	r := Result{Name: c.Name, Passed: !t.Failed(), Took: time.Since(start)}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !r.Passed {
		r.Details = t.log
	}
	return r
}

func openPair(t *tb, o *Options) verbstest.Pair {
	var p verbstest.Pair
	for _, x := range []struct {
		s    *verbstest.Side
		open func() (verbs.Context, io.Closer, error)
	}{{&p.A, o.Open}, {&p.B, o.OpenPeer}} {
		c, closer, err := x.open()
		if err != nil {
			t.Fatalf("open: %v", err)
		}
		t.Cleanup(func() { closer.Close() })
		if *x.s, err = o.side(c); err != nil {
			t.Fatalf("%v", err)
		}
	}
	if p.A.Context.Provider() == "rxe" { // what the kernel's rxe is known to do otherwise
		p.EagerArm, p.VagueLocalErrors, p.VagueLengthErrors, p.UnboundedWindows = true, true, true, true
	}
	if pd, err := p.A.Context.AllocPD(); err == nil {
		if mw, err := pd.AllocMW(); err == nil {
			p.Windows = true
			mw.Dealloc()
		}
		pd.Dealloc()
	}
	return p
}

func (r *Result) line() string {
	verdict := "ok"
	if !r.Passed {
		verdict = "FAILED: " + strings.Join(r.Details, "; ")
	}
	return fmt.Sprintf("%-34s %7.2f s  %s", r.Name, r.Took.Seconds(), verdict)
}

// WriteTo writes the report as text.
func (r *Report) WriteTo(w io.Writer) (int64, error) {
	var b strings.Builder
	p := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	p("RDMA device self-test, %s", r.Time.Format(time.RFC3339))
	p("system    %s", r.System)
	p("device    %s, served by %s, firmware %s, vendor %#x part %#x", r.Name, r.Driver, r.Device.FirmwareVersion, r.Device.VendorID, r.Device.VendorPartID)
	p("limits    %d queue pairs, %d work requests, %d SGEs, %d CQ entries, %d READs, %d completion vectors",
		r.Device.MaxQP, r.Device.MaxQPWR, r.Device.MaxSGE, r.Device.MaxCQE, r.Device.MaxQPReadAtom, r.Device.CompVectors)
	layer := map[verbs.LinkLayer]string{verbs.LinkInfiniBand: "InfiniBand", verbs.LinkEthernet: "Ethernet"}[r.Port.LinkLayer]
	p("port      %s, LID %d, MTU %d of %d", layer, r.Port.LID, r.Port.ActiveMTU.Bytes(), r.Port.MaxMTU.Bytes())
	for _, g := range r.GIDs {
		p("GID %-4d  %s %s %s", g.Index, g.GID, []string{"IB", "RoCE v1", "RoCE v2"}[g.Type], g.Netdev)
	}
	passed := 0
	for _, c := range r.Cases {
		if c.Passed {
			passed++
		}
	}
	p("contract  %d of %d cases passed", passed, len(r.Cases))
	for _, c := range r.Cases {
		if !c.Passed {
			p("    %s", c.line())
		}
	}
	for _, x := range r.Parts {
		p("%s", x.line())
	}
	for _, f := range r.Figures {
		p("    %-30s %10.2f %s", f.Name, f.Value, f.Unit)
	}
	if r.Passed() {
		p("all passed")
	} else {
		p("NOT all passed")
	}
	n, err := io.WriteString(w, b.String())
	return int64(n), err
}
