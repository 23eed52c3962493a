// Command vmtest runs programs in a guest with a real Linux kernel. See docs/testing.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"srp-initiator/internal/vmtest"
)

const usage = `usage:
  vmtest deps                       install the Debian packages needed (as root) and fetch the kernels
  vmtest run [flags] -- CMD ARGS    boot a guest, run CMD in it, end with its exit code
  vmtest shell [flags]              boot a guest and give an interactive shell in it

Exit codes: CMD's own (124: it ran into --timeout); 2: wrong usage or packages missing; 3: the guest panicked, hung or failed.
Flags:
`

func main() { os.Exit(run(os.Args[1:])) }

type fileFlags []vmtest.File

func (f *fileFlags) String() string { return "" }
func (f *fileFlags) Set(s string) error {
	host, guest, ok := strings.Cut(s, ":")
	if !ok {
		guest = "/root/" + filepath.Base(host)
	}
	*f = append(*f, vmtest.File{Host: host, Guest: guest})
	return nil
}

type stringFlags []string

func (f *stringFlags) String() string     { return "" }
func (f *stringFlags) Set(s string) error { *f = append(*f, s); return nil }

func run(args []string) int {
	fs := flag.NewFlagSet("vmtest", flag.ContinueOnError)
	var files fileFlags
	var env stringFlags
	kernel := fs.String("kernel", "6.12", "kernel series: "+strings.Join(vmtest.Kernels, " or "))
	var names []string
	for _, s := range vmtest.Scenarios {
		names = append(names, string(s))
	}
	scenario := fs.String("scenario", "rxe", "what the guest sets up first: "+strings.Join(names, ", "))
	fs.Var(&files, "file", "`host[:guest]` file or folder to copy in; default place /root/NAME; repeatable")
	fs.Var(&env, "env", "`KEY=VALUE` for CMD; repeatable")
	out := fs.String("out", "", "`folder` that gets what CMD leaves in $VMTEST_OUT, and dmesg.txt")
	console := fs.String("console", "", "`file` for the guest's console; default in the cache folder")
	timeout := fs.Duration("timeout", 10*time.Minute, "limit for CMD")
	cpus := fs.Int("cpus", 2, "emulated CPUs")
	memory := fs.Int("memory", 3072, "guest's memory in MiB")
	single := fs.Bool("single", false, "emulated CPUs take turns (safe, but bad for programs that poll)")
	fs.Usage = func() {
		fmt.Fprint(os.Stderr, usage)
		fs.PrintDefaults()
	}
	if len(args) == 0 {
		fs.Usage()
		return 2
	}
	verb := args[0]
	if err := fs.Parse(args[1:]); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	log := func(s string) { fmt.Fprintln(os.Stderr, "vmtest:", s) }
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	job := vmtest.Job{
		Kernel: *kernel, Scenario: vmtest.Scenario(*scenario), Files: files, OutDir: *out, Console: *console,
		CPUs: *cpus, MemoryMB: *memory, Single: *single, Log: log,
	}
	known := false
	for _, s := range names {
		known = known || s == *scenario
	}
	if !known {
		fmt.Fprintf(os.Stderr, "vmtest: --scenario %q: allowed are %s\n", *scenario, strings.Join(names, ", "))
		return 2
	}
	switch verb {
	case "deps":
		return report(deps(ctx, log))
	case "shell":
		if fs.NArg() != 0 {
			fmt.Fprintln(os.Stderr, "vmtest: shell takes no command")
			return 2
		}
		job.Shell = true
		_, err := vmtest.Run(ctx, job)
		return report(err)
	case "run":
		if fs.NArg() == 0 {
			fmt.Fprintln(os.Stderr, "vmtest: run needs a command after --")
			return 2
		}
		job.Programs = []vmtest.Program{{Argv: fs.Args(), Env: env, Timeout: *timeout, Stdout: os.Stdout, Stderr: os.Stderr}}
		rs, err := vmtest.Run(ctx, job)
		if err != nil {
			return report(err)
		}
		if rs[0].TimedOut {
			log(fmt.Sprintf("%s ran into its limit of %v", rs[0].Name, *timeout))
			return 124
		}
		return rs[0].ExitCode
	}
	fmt.Fprintf(os.Stderr, "vmtest: unknown verb %q: allowed are deps, run, shell\n", verb)
	return 2
}

func deps(ctx context.Context, log func(string)) error {
	if err := vmtest.EnsurePackages(ctx, true, log); err != nil {
		return err
	}
	for _, series := range vmtest.Kernels {
		k, err := vmtest.PrepareKernel(ctx, series, true, log)
		if err != nil {
			return err
		}
		log("kernel " + k.Version + " is ready")
	}
	return nil
}

func report(err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "vmtest:", err)
	var missing *vmtest.MissingPackagesError
	if errors.As(err, &missing) {
		return 2
	}
	return 3
}
