package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/pflag"

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
	weight     int
	budget     int
	pcap       string
	timeout    time.Duration
	connect    time.Duration
	verbose    bool
	settings   *completion.Config // in place of what the flags say
}

func (f *connectFlags) register(fs *pflag.FlagSet) {
	fs.StringVarP(&f.device, "device", "d", "auto", "RDMA device: "+rdma.Names)
	fs.StringVar(&f.completion, "completion", "", "who reaps completions: interrupt, thread, poll, direct or adaptive (default adaptive)")
	fs.StringVar(&f.thread, "thread", "", "y or n: other names for --completion=thread and --completion=interrupt")
	fs.BoolVar(&f.lockThread, "lock-thread", false, "--completion=thread: an operating system thread of its own")
	fs.IntVar(&f.weight, "poll-weight", 0, fmt.Sprintf("completions per turn of a channel (default %d)", completion.DefaultWeight))
	fs.IntVar(&f.budget, "poll-budget", 0, fmt.Sprintf("completions per wake-up or poller turn (default %d)", completion.DefaultBudget))
	fs.DurationVar(&f.timeout, "timeout", 0, "of a SCSI command before it is aborted (default: cmd_tmo of TARGET, 30s)")
	fs.DurationVar(&f.connect, "connect-timeout", 0, "of a channel's login (default: connect_tmo of TARGET, 10s)")
	fs.StringVar(&f.pcap, "pcap", "", "write the packets of a softroce device to this file (pcapng)")
	fs.BoolVarP(&f.verbose, "verbose", "v", false, "tell of reconnects, resets and the like on standard error")
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
	if f.weight < 0 || f.weight > 1<<16 || f.budget < 0 || f.budget > 1<<20 {
		return c, usagef("--poll-weight must be 0 to 65536, --poll-budget 0 to 1048576")
	}
	c.Weight, c.Budget, c.LockThread = f.weight, f.budget, f.lockThread
	if f.lockThread && c.Mode != completion.Thread {
		return c, usagef("--lock-thread goes with --completion=thread")
	}
	if c.Mode == completion.Poll && f.budget > 0 {
		if c.Poller, err = completion.NewPoller(completion.PollerConfig{Budget: f.budget}); err != nil {
			return c, err
		}
	}
	return c, nil
}

// connection is a session with what it stands on.
type connection struct {
	*srp.Session
	fabric  *rdma.Fabric
	capture *os.File
	stop    func() bool
	usr1    chan os.Signal
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
	var err error
	if o.Completion, err = f.completionConfig(); err != nil {
		return nil, err
	}
	if f.timeout < 0 || f.connect < 0 {
		return nil, usagef("a timeout must not be negative")
	}
	if f.timeout > 0 {
		o.CommandTimeout = f.timeout
	}
	if f.connect > 0 {
		o.ConnectTimeout = f.connect
	}
	if err := t.Resolve(e.ctx); err != nil {
		return nil, err
	}
	c := &connection{}
	opts := []rdma.Option{rdma.WithPeer(t.Src, t.Addr())}
	if f.pcap != "" {
		if c.capture, err = os.Create(f.pcap); err != nil {
			return nil, &usageError{err}
		}
		opts = append(opts, rdma.WithCapture(c.capture))
	}
	if c.fabric, err = rdma.Open(f.device, opts...); err != nil {
		c.closeFiles()
		var name *rdma.NameError
		if errors.As(err, &name) {
			return nil, err
		}
		return nil, &deviceError{err}
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
		return nil, err
	}
	c.usr1 = make(chan os.Signal, 1)
	signal.Notify(c.usr1, syscall.SIGUSR1)
	go c.changeModes(e)
	// A signal ends commands by aborting them; a target that does not answer that either loses the session.
	c.stop = context.AfterFunc(e.ctx, func() {
		time.Sleep(interruptGrace)
		c.Session.Close()
	})
	return c, nil
}

func (c *connection) closeFiles() error {
	var errs []error
	if c.fabric != nil {
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
		if cause := context.Cause(e.ctx); err != nil && cause != nil {
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

// lun finds the unit that the user means. Numbers from 256 on have more than one encoding and targets differ in which
// they know: there the target's own list decides.
func (l *lunFlag) lun(ctx context.Context, s *srp.Session) (scsi.LUN, error) {
	lun, err := scsi.ParseLUN(l.text)
	if err != nil {
		return lun, usagef("--lun: %w", err)
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
		return usagef("--lun: %w", err)
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
