// Command srp-initiator reaches SCSI storage by the SCSI RDMA Protocol, from userspace.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"srp-initiator/rdma"
	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/verbs"
	"srp-initiator/srp"
	"srp-initiator/srp/disk"
)

// Exit codes.
const (
	exitOK       = 0
	exitFailed   = 1 // a command or a comparison failed
	exitUsage    = 2 // bad input; no data was moved
	exitDevice   = 3 // no usable RDMA device
	exitNoTarget = 4 // the target does not answer, or the connection was lost
	exitRejected = 5 // the target refused the login
	exitSIGHUP   = 129
	exitSIGINT   = 130
	exitSIGPIPE  = 141
	exitSIGTERM  = 143
)

const exitText = `Exit codes:
  0  done
  1  a SCSI command, a comparison or a local file failed
  2  bad input; no data was moved
  3  no usable RDMA device (name, rights, limits)
  4  the target does not answer, or the connection was lost
  5  the target refused the login
  129, 130, 143  ended by SIGHUP, SIGINT, SIGTERM after a clean disconnect
  141  standard output was closed by its reader; after a clean disconnect too`

// exitDeadline is when a signal ends the program at the latest; interruptGrace and the disconnect fit in.
const exitDeadline = 850 * time.Millisecond

// verb is one subcommand.
type verb struct {
	name    string
	args    string // after the name, in the usage line
	short   string
	long    string
	example string
	flags   func(*pflag.FlagSet) func(*env) error // registers flags and returns what runs
}

// env is what a running verb has.
type env struct {
	ctx    context.Context
	args   []string
	stdin  io.Reader
	stdout *output
	stderr io.Writer
	json   bool
	mu     sync.Mutex
	line   *progress // being drawn
}

var verbs_ = []*verb{devicesVerb, probeVerb, lsVerb, inqVerb, readcapVerb, readVerb, writeVerb, rawVerb, turVerb, syncVerb, unmapVerb, resetVerb, benchVerb, experimentVerb, selftestVerb, versionVerb}

// usageError is bad input.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, a ...any) error { return &usageError{fmt.Errorf(format, a...)} }

// interrupted is why the context ends after a signal.
type interrupted struct {
	sig os.Signal
	end *time.Timer // when the program ends whatever it does
}

func (e *interrupted) Error() string {
	switch e.sig {
	case syscall.SIGHUP:
		return "interrupted by SIGHUP"
	case syscall.SIGTERM:
		return "interrupted by SIGTERM"
	}
	return "interrupted by SIGINT"
}

// mayTake allows local work, such as files to be written, after the session has been closed.
func (e *interrupted) mayTake(d time.Duration) {
	if e.end != nil {
		e.end.Reset(d)
	}
}

// output is standard output; it keeps the first error, so that a table that met a full disk is no success.
type output struct {
	w   io.Writer
	mu  sync.Mutex
	err error
}

func (o *output) Write(b []byte) (int, error) {
	n, err := o.w.Write(b)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err == nil {
		o.err = err
	}
	return n, err
}

func (o *output) failed() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

func main() {
	ctx, cancel := context.WithCancelCause(context.Background())
	sigs := make(chan os.Signal, 2)
	signal.Notify(sigs, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // nohup(1) wants it ignored
		signal.Notify(sigs, syscall.SIGHUP)
	}
	signal.Ignore(syscall.SIGPIPE) // else it ends the program at once, and the target keeps a session that nobody answers for
	go func() {
		sig := <-sigs
		why := &interrupted{sig, time.NewTimer(exitDeadline)}
		cancel(why)
		select {
		case sig = <-sigs: // impatient
		case <-why.end.C: // stuck in a read or write of a pipe; the session has been closed meanwhile
			fmt.Fprintf(os.Stderr, "srp-initiator: %s\n", why)
		}
		os.Exit(signalCode(sig))
	}()
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

func signalCode(sig os.Signal) int {
	switch sig {
	case syscall.SIGHUP:
		return exitSIGHUP
	case syscall.SIGTERM:
		return exitSIGTERM
	}
	return exitSIGINT
}

// run is the program; it returns the exit code.
func run(ctx context.Context, args []string, stdin io.Reader, out, stderr io.Writer) int {
	stdout := &output{w: out}
	if len(args) == 0 {
		usage(stderr)
		return exitUsage
	}
	switch args[0] {
	case "help", "-h", "--help":
		switch {
		case len(args) == 1:
			usage(stdout)
		case len(args) > 2:
			fmt.Fprintf(stderr, "srp-initiator: unexpected argument %q: srp-initiator help [VERB]\n", args[2])
			return exitUsage
		case args[1] == "target":
			targetHelp(stdout)
		default:
			v := findVerb(args[1])
			if v == nil {
				fmt.Fprintf(stderr, "srp-initiator: no help on %q: want a verb or \"target\"\n", args[1])
				return exitUsage
			}
			v.help(stdout)
		}
		return printed(stdout, stderr)
	case "--version":
		args = append([]string{versionVerb.name}, args[1:]...)
	}
	v := findVerb(args[0])
	if v == nil {
		fmt.Fprintf(stderr, "srp-initiator: unknown verb %q; known: %s\n", args[0], strings.Join(verbNames(), ", "))
		return exitUsage
	}
	e := &env{ctx: ctx, stdin: stdin, stdout: stdout, stderr: stderr}
	fs, action := v.flagSet(e)
	if err := fs.Parse(args[1:]); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			v.help(stdout)
			return printed(stdout, stderr)
		}
		return e.fail(v, badFlag(err))
	}
	if err := checkGiven(fs); err != nil {
		return e.fail(v, err)
	}
	e.args = fs.Args()
	if want := len(strings.Fields(v.args)); len(e.args) != want && !strings.Contains(v.args, "...") {
		if len(e.args) < want {
			return e.fail(v, usagef("missing argument: %s", v.usage()))
		}
		return e.fail(v, usagef("unexpected argument %q: %s", e.args[want], v.usage()))
	}
	return e.fail(v, action(e))
}

// usage is the verb with what follows it.
func (v *verb) usage() string { return strings.TrimRight("srp-initiator "+v.name+" "+v.args, " ") }

// printed is the exit code after a help text: a full disk has no help on it.
func printed(stdout *output, stderr io.Writer) int {
	switch err := stdout.failed(); {
	case err == nil:
		return exitOK
	case errors.Is(err, syscall.EPIPE):
		return exitSIGPIPE
	default:
		fmt.Fprintf(stderr, "srp-initiator: %s\n", err)
		return exitFailed
	}
}

// badFlag is what was wrong about a flag's value in words that say what is wanted.
func badFlag(err error) error {
	var v *pflag.InvalidValueError
	if !errors.As(err, &v) {
		return &usageError{err}
	}
	f := v.GetFlag()
	want := map[string]string{"int": "a whole number", "int64": "a whole number", "uint64": "a whole number from 0 on", "duration": "a time such as 5s or 100ms",
		"bool": "true or false", "intSlice": "whole numbers separated by commas, such as 0,1"}[f.Value.Type()]
	if want == "" {
		return usagef("--%s=%s: %w", f.Name, v.GetValue(), errors.Unwrap(v))
	}
	return usagef("--%s=%s: want %s", f.Name, v.GetValue(), want)
}

// checkGiven finds a flag that was given but says nothing: an empty text, as --output "$FILE" does when a script forgot to set FILE, or
// no time at all, which would mean the default. Only --ramp-time may be 0.
func checkGiven(fs *pflag.FlagSet) (err error) {
	fs.Visit(func(f *pflag.Flag) {
		if err != nil {
			return
		}
		switch f.Value.Type() {
		case "string":
			if f.Value.String() == "" {
				err = usagef("--%s is empty; want: %s", f.Name, f.Usage)
			}
		case "duration":
			if d, _ := fs.GetDuration(f.Name); d < 0 || d == 0 && f.Name != "ramp-time" {
				err = usagef("--%s %s: want a time above 0, such as 5s or 100ms; leave it out for the default", f.Name, d)
			}
		}
	})
	return err
}

func (v *verb) flagSet(e *env) (*pflag.FlagSet, func(*env) error) {
	fs := pflag.NewFlagSet(v.name, pflag.ContinueOnError)
	fs.SortFlags = false
	fs.Usage = func() {}
	fs.SetOutput(io.Discard)
	fs.BoolVar(&e.json, "json", false, "print facts and errors as JSON")
	return fs, v.flags(fs)
}

// fail reports err, if any, and returns the exit code that it means.
func (e *env) fail(v *verb, err error) int {
	e.endProgress()
	lost := e.stdout.failed()
	if errors.Is(lost, syscall.EPIPE) && (err == nil || errors.Is(err, syscall.EPIPE)) {
		return exitSIGPIPE // as a shell sees other programs end there, and as silent
	}
	if err == nil {
		err = lost
	}
	if err == nil {
		return exitOK
	}
	code := exitCode(err)
	var told *shown
	if errors.As(err, &told) {
		return code
	}
	if e.json && json.NewEncoder(e.stdout).Encode(map[string]any{"error": err.Error(), "exit_code": code}) == nil {
		return code
	}
	fmt.Fprintf(e.stderr, "srp-initiator %s: %s\n", v.name, err)
	return code
}

func exitCode(err error) int {
	var (
		usage  *usageError
		intr   *interrupted
		target *srp.TargetError
		arg    *srp.ArgumentError
		name   *rdma.NameError
		device *deviceError
		rej    *srp.LoginRejectedError
		cmrej  *cm.RejectError
		proto  *srp.ProtocolError
		status *verbs.StatusError
		lookup *net.DNSError
	)
	switch {
	case errors.As(err, &intr):
		return signalCode(intr.sig)
	case errors.As(err, &usage), errors.Is(err, disk.ErrReadOnly), errors.As(err, &target), errors.As(err, &arg), errors.As(err, &name):
		return exitUsage
	case errors.As(err, &rej), errors.As(err, &cmrej) && cmrej.Reason == cm.ReasonConsumerDefined: // with an SRP_LOGIN_REJ, or with other bytes
		return exitRejected
	case errors.As(err, &device), errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE): // limits say nothing about the target
		return exitDevice
	case errors.As(err, &cmrej), errors.As(err, &proto), errors.As(err, &status), errors.As(err, &lookup), errors.Is(err, cm.ErrUnreachable), errors.Is(err, cm.ErrDisconnected),
		errors.Is(err, srp.ErrConnectionLost), errors.Is(err, srp.ErrFailFast), errors.Is(err, srp.ErrDeviceLost), errors.Is(err, context.DeadlineExceeded):
		return exitNoTarget
	}
	return exitFailed
}

func findVerb(name string) *verb {
	for _, v := range verbs_ {
		if v.name == name {
			return v
		}
	}
	return nil
}

func verbNames() (names []string) {
	for _, v := range verbs_ {
		names = append(names, v.name)
	}
	return names
}

func usage(w io.Writer) {
	fmt.Fprint(w, `srp-initiator reaches SCSI storage by the SCSI RDMA Protocol (SRP) from userspace: no kernel initiator, no C library.

Usage: srp-initiator VERB [flags] [TARGET]

Verbs:
`)
	for _, v := range verbs_ {
		fmt.Fprintf(w, "  %-10s %s\n", v.name, v.short)
	}
	fmt.Fprintf(w, `
TARGET is what the kernel's ib_srp takes in add_target, or a URL:
  id_ext=505400fffe123456,ioc_guid=505400fffe123456,dest=10.0.0.1:5555
  srp://10.0.0.1:5555/505400fffe123456
"srp-initiator help target" lists its keys, "srp-initiator help VERB" the flags of a verb.

A first look at a target:
  srp-initiator probe srp://10.0.0.1:5555/505400fffe123456
  srp-initiator ls    srp://10.0.0.1:5555/505400fffe123456

%s
`, exitText)
}

func (v *verb) help(w io.Writer) {
	fs, _ := v.flagSet(&env{})
	fmt.Fprintf(w, "srp-initiator %s: %s\n\nUsage: srp-initiator %s [flags] %s\n\n%s\n", v.name, v.short, v.name, v.args, strings.TrimSpace(v.long))
	if v.example != "" {
		fmt.Fprintf(w, "\nExamples:\n%s\n", strings.TrimRight(v.example, "\n"))
	}
	fmt.Fprintf(w, "\nFlags:\n%s\n%s\n", fs.FlagUsagesWrapped(110), exitText)
}

func targetHelp(w io.Writer) {
	io.WriteString(w, `TARGET names an SRP target port and how to log in to it, in one of two forms:

  id_ext=ID,ioc_guid=GUID,dest=HOST:PORT[,key=value...]         as for the kernel's ib_srp (add_target)
  srp://HOST:PORT/ID_EXT[:IOC_GUID][?key=value&...]             IOC_GUID is ID_EXT if not given

On an InfiniBand fabric dgid=, pkey= and service_id= take the place of dest=. Quote the URL if it has a "&".
A link-local IPv6 address needs the interface it is on: dest=[fe80::1%eth0]:5555, in a URL srp://[fe80::1%25eth0]:5555/... (RFC 6874).

Keys:
`)
	for _, k := range srp.LoginKeys() {
		def := ""
		if k.Default != "" {
			def = "; default " + k.Default
		}
		fmt.Fprintf(w, "  %-18s %s (%s%s)\n", k.Name, k.Help, k.Values, def)
	}
	io.WriteString(w, `
A target that falls silent is found by the transport while something that we sent is not acknowledged. Where all was, it
is found by the first command that has no answer within cmd_tmo: fast_io_fail_tmo and dev_loss_tmo count from there.
Lower cmd_tmo, or --timeout, to know sooner.
`)
}

// printJSON prints v indented.
func (e *env) printJSON(v any) error {
	enc := json.NewEncoder(e.stdout)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false) // who reads it is no browser
	return enc.Encode(v)
}
