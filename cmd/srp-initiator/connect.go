package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"srp-initiator/completion"
	"srp-initiator/rdma"
	"srp-initiator/srp"
	"srp-initiator/srp/disk"
	"srp-initiator/srp/scsi"
)

// interruptGrace is how long commands get after a signal to end by themselves before the session is closed under them.
const interruptGrace = 250 * time.Millisecond

// deviceError is an RDMA device that cannot be used.
type deviceError struct{ err error }

func (e *deviceError) Error() string { return e.err.Error() }
func (e *deviceError) Unwrap() error { return e.err }

// connectFlags are the flags of all verbs that log in.
type connectFlags struct {
	device     string
	completion string
	thread     string
	lockThread bool
	cpus       []int
	weight     int
	budget     int
	pcap       string
	timeout    time.Duration
	connect    time.Duration
	verbose    bool
	settings   *completion.Config // in place of what the flags say
	shared     *rdma.Fabric       // in place of a device of its own
	functions  bool               // the timeout is that of task management functions
	fixed      bool               // SIGUSR1 changes nothing: the caller sets the mode
}

func (f *connectFlags) register(fs *pflag.FlagSet) {
	fs.StringVarP(&f.device, "device", "d", "auto", "RDMA device: "+rdma.Names)
	f.registerCompletion(fs)
	fs.DurationVar(&f.timeout, "timeout", 0, "of a SCSI command before it is aborted, and how long one is sent again to a unit that answers BUSY or TASK SET FULL (default: cmd_tmo of TARGET, 30s)")
	fs.DurationVar(&f.connect, "connect-timeout", 0, "of a channel's login (default: connect_tmo of TARGET, 10s)")
	fs.StringVar(&f.pcap, "pcap", "", "write the packets of a softroce device to this file (pcapng)")
	fs.BoolVarP(&f.verbose, "verbose", "v", false, "tell of reconnects, resets and the like on standard error")
}

// completionFlags say who reaps completions.
var completionFlags = []string{"completion", "thread", "lock-thread", "cpus", "poll-weight", "poll-budget"}

func (f *connectFlags) registerCompletion(fs *pflag.FlagSet) {
	fs.StringVar(&f.completion, "completion", "", "who reaps completions: interrupt, thread, poll, direct or adaptive (default adaptive)")
	fs.StringVar(&f.thread, "thread", "", "y or n: other names for --completion=thread and --completion=interrupt")
	fs.BoolVar(&f.lockThread, "lock-thread", false, "--completion=thread or poll: an operating system thread of its own")
	fs.IntSliceVar(&f.cpus, "cpus", nil, "--lock-thread: CPUs where that thread may run (default: those near the device, if it tells)")
	fs.IntVar(&f.weight, "poll-weight", 0, fmt.Sprintf("completions per turn of a channel, in every mode (default %d)", completion.DefaultWeight))
	fs.IntVar(&f.budget, "poll-budget", 0, fmt.Sprintf("completions per wake-up, poller turn or waiter's turn, in every mode (default %d)", completion.DefaultBudget))
}

func (f *connectFlags) completionConfig() (c completion.Config, err error) {
	if f.settings != nil {
		return *f.settings, nil
	}
	name := f.completion
	switch f.thread {
	case "":
	case "y", "n":
		other := map[string]string{"y": "thread", "n": "interrupt"}[f.thread]
		if name != "" && name != other {
			return c, usagef("--thread=%s means --completion=%s, not %s", f.thread, other, name)
		}
		name = other
	default:
		return c, usagef("--thread=%s: want y or n", f.thread)
	}
	if name == "" {
		name = completion.Adaptive.String()
	}
	if c.Mode, err = completion.ParseMode(name); err != nil {
		return c, &usageError{err}
	}
	if f.weight < 0 || f.weight > 1<<16 {
		return c, usagef("--poll-weight %d: want 0 to 65536", f.weight)
	}
	if f.budget < 0 || f.budget > 1<<20 {
		return c, usagef("--poll-budget %d: want 0 to 1048576", f.budget)
	}
	c.Weight, c.Budget, c.LockThread = f.weight, f.budget, f.lockThread
	if f.lockThread && c.Mode != completion.Thread && c.Mode != completion.Poll {
		return c, usagef("--lock-thread goes with --completion=thread and --completion=poll")
	}
	if len(f.cpus) > 0 && !f.lockThread && !f.fixed {
		return c, usagef("--cpus goes with --lock-thread")
	}
	var allowed unix.CPUSet
	if len(f.cpus) > 0 {
		if err := unix.SchedGetaffinity(0, &allowed); err != nil {
			return c, err
		}
	}
	for _, n := range f.cpus {
		if n < 0 || !allowed.IsSet(n) {
			return c, usagef("--cpus: this process may not run on CPU %d (it may on %s)", n, cpuList(&allowed))
		}
	}
	return c, nil
}

// cpuList writes a set as "0-1,4".
func cpuList(set *unix.CPUSet) string {
	var parts []string
	for n := 0; n < len(set)*64; n++ {
		if !set.IsSet(n) {
			continue
		}
		first := n
		for set.IsSet(n + 1) {
			n++
		}
		if n == first {
			parts = append(parts, strconv.Itoa(n))
		} else {
			parts = append(parts, fmt.Sprintf("%d-%d", first, n))
		}
	}
	return strings.Join(parts, ",")
}

// place puts reaping threads on the CPUs that the user named, else on those near the device, and gives mode Poll
// its poller when it is not the common one.
func (f *connectFlags) place(c *completion.Config, near []int) (err error) {
	cpus := f.cpus
	if len(cpus) == 0 {
		cpus = near
	}
	switch {
	case f.settings != nil:
	case c.Mode == completion.Thread && f.lockThread:
		c.CPUs = cpus
	case f.budget > 0 || c.Mode == completion.Poll && f.lockThread: // it may become mode Poll later
		p := completion.PollerConfig{Budget: f.budget, LockThread: f.lockThread}
		if f.lockThread {
			p.CPUs = cpus
		}
		// A poller locks no thread in common with another mode: Config.LockThread is mode Thread's.
		c.LockThread = false
		c.Poller, err = completion.NewPoller(p)
	}
	return err
}

// connection is a session with what it stands on.
type connection struct {
	*srp.Session
	fabric   *rdma.Fabric
	borrowed bool // the fabric is another connection's
	capture  *os.File
	stop     func() bool
	usr1     chan os.Signal
	mu       sync.Mutex
	changes  []modeChange
}

// modeChange is what one SIGUSR1 did.
type modeChange struct {
	at time.Time
	to completion.Mode
}

// modesIn names the modes that were in force between from and to, when first was in force at the login.
func (c *connection) modesIn(first completion.Mode, from, to time.Time) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	names := []string{first.String()}
	for _, m := range c.changes {
		switch {
		case m.at.Before(from):
			names[0] = m.to.String()
		case m.at.Before(to):
			names = append(names, m.to.String())
		}
	}
	return names
}

// changeModes goes to the next completion mode at every SIGUSR1.
func (c *connection) changeModes(e *env) {
	for range c.usr1 {
		modes := completion.Modes()
		next := modes[(int(c.Session.Mode())+1)%len(modes)]
		if err := c.Session.SetMode(next); err != nil {
			e.notice("completion mode " + next.String() + ": " + err.Error())
			continue
		}
		c.mu.Lock()
		c.changes = append(c.changes, modeChange{time.Now(), next})
		c.mu.Unlock()
		e.notice("completion mode " + next.String())
	}
}

// connect parses target, opens the device and logs in.
func (f *connectFlags) connect_(e *env, target string) (*connection, error) {
	t, o, err := srp.ParseTarget(target)
	if err != nil {
		return nil, err
	}
	return f.login(e, t, o)
}

func (f *connectFlags) login(e *env, t srp.TargetPort, o srp.LoginOptions) (*connection, error) {
	err := noStdout("pcap", f.pcap)
	if err != nil {
		return nil, err
	}
	if o.Completion, err = f.completionConfig(); err != nil {
		return nil, err
	}
	for name, d := range map[string]time.Duration{"timeout": f.timeout, "connect-timeout": f.connect} {
		if d != 0 && (d < srp.LeastTimeout || d > srp.MostTimeout) {
			return nil, usagef("--%s %s: want %s to %.0fs", name, d, srp.LeastTimeout, srp.MostTimeout.Seconds())
		}
	}
	if f.timeout > 0 {
		o.CommandTimeout = f.timeout
		if f.functions {
			o.TaskMgmtTimeout = f.timeout
		}
	}
	if f.connect > 0 {
		o.ConnectTimeout = f.connect
	}
	if err := t.Resolve(e.ctx); err != nil {
		return nil, err
	}
	c := &connection{}
	if f.shared != nil {
		c.fabric, c.borrowed = f.shared, true
	} else if err := f.openDevice(c, t); err != nil {
		return nil, err
	}
	if err := f.place(&o.Completion, c.fabric.NearCPUs()); err != nil {
		c.closeFiles()
		return nil, &usageError{err}
	}
	cfg := srp.Config{Device: c.fabric.Context(), Connector: c.fabric.Connector()}
	if f.verbose {
		cfg.Notice = e.notice
	}
	if c.Session, err = srp.Login(e.ctx, cfg, t, o); err != nil {
		c.closeFiles()
		if cause := context.Cause(e.ctx); cause != nil {
			err = cause
		}
		if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) { // says nothing about the target
			err = &deviceError{err}
		}
		return nil, err
	}
	c.usr1 = make(chan os.Signal, 1)
	if f.settings == nil && !f.fixed {
		signal.Notify(c.usr1, syscall.SIGUSR1)
	} // else the caller chose the mode, and the Go runtime ignores the signal
	go c.changeModes(e)
	// A signal ends commands by aborting them; a target that does not answer that either loses the session.
	c.stop = context.AfterFunc(e.ctx, func() {
		time.Sleep(interruptGrace)
		c.Session.Close()
	})
	return c, nil
}

// openDevice opens the device, and the capture file.
func (f *connectFlags) openDevice(c *connection, t srp.TargetPort) (err error) {
	opts := []rdma.Option{rdma.WithPeer(t.Src, t.Addr())}
	if f.pcap != "" {
		if c.capture, err = os.Create(f.pcap); err != nil {
			return &usageError{err}
		}
		opts = append(opts, rdma.WithCapture(c.capture))
	}
	if c.fabric, err = rdma.Open(f.device, opts...); err != nil {
		c.closeFiles()
		var name *rdma.NameError
		if errors.As(err, &name) {
			return err
		}
		return &deviceError{err}
	}
	return nil
}

func (c *connection) closeFiles() error {
	var errs []error
	if c.fabric != nil && !c.borrowed {
		errs = append(errs, c.fabric.Close())
	}
	if c.capture != nil {
		errs = append(errs, c.capture.Close())
	}
	return errors.Join(errs...)
}

// close logs out and releases everything.
func (c *connection) close() error {
	c.stop()
	signal.Stop(c.usr1)
	close(c.usr1)
	return errors.Join(c.Session.Close(), c.closeFiles())
}

// with logs in to the verb's target, calls f, and logs out.
func (f *connectFlags) with(e *env, do func(*connection) error) (err error) {
	c, err := f.connect_(e, e.args[0])
	if err != nil {
		return err
	}
	defer func() {
		if cause := context.Cause(e.ctx); err != nil && cause != nil && !errors.Is(err, cause) {
			err = cause
		}
		if cerr := c.close(); err == nil {
			err = cerr
		}
	}()
	return do(c)
}

// lunFlag is --lun.
type lunFlag struct{ text string }

func (l *lunFlag) register(fs *pflag.FlagSet) {
	fs.StringVarP(&l.text, "lun", "l", "0", "logical unit: its number as ls shows it, or 0x and 16 hexadecimal digits")
}

func badLUN(text string) error {
	return usagef("--lun %.40q: want a number up to 4294967295, or 0x and 16 hexadecimal digits", text)
}

// lun finds the unit that the user means. Numbers from 256 on have more than one encoding and targets differ in which
// they know: there the target's own list decides.
func (l *lunFlag) lun(ctx context.Context, s *srp.Session) (scsi.LUN, error) {
	lun, err := scsi.ParseLUN(l.text)
	if err != nil {
		return lun, badLUN(l.text)
	}
	n, ok := lun.Number()
	if !ok || n < 256 || len(l.text) > 2 && l.text[:2] == "0x" {
		return lun, nil
	}
	luns, err := disk.LUNs(ctx, s)
	if err != nil {
		return lun, err
	}
	for _, x := range luns {
		if m, ok := x.Number(); ok && m == n {
			return x, nil
		}
	}
	return lun, nil
}

// check is for bad input that must be found before anything is sent.
func (l *lunFlag) check() error {
	if _, err := scsi.ParseLUN(l.text); err != nil {
		return badLUN(l.text)
	}
	return nil
}

func (e *env) notice(s string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.line != nil {
		e.line.clear()
	}
	fmt.Fprintln(e.stderr, s)
}

// unitVerb is a verb on one logical unit.
func unitVerb(fs *pflag.FlagSet, do func(*env, *disk.Unit) error) func(*env) error {
	return new(connectFlags).unitVerb(fs, do)
}

func (f *connectFlags) unitVerb(fs *pflag.FlagSet, do func(*env, *disk.Unit) error) func(*env) error {
	var l lunFlag
	l.register(fs)
	f.register(fs)
	return func(e *env) error {
		if err := l.check(); err != nil {
			return err
		}
		return f.with(e, func(c *connection) error {
			lun, err := l.lun(e.ctx, c.Session)
			if err != nil {
				return err
			}
			return do(e, &disk.Unit{Session: c.Session, LUN: lun})
		})
	}
}
