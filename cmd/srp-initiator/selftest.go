package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/pflag"

	"srp-initiator/rdma"
	"srp-initiator/rdma/selftest"
	"srp-initiator/rdma/verbs"
)

var selftestVerb = &verb{
	name: "selftest", args: "DEVICE",
	short: "try out an RDMA device and print a report",
	long: `Runs the contract that this program expects of an RDMA device, traffic between two of its queue pairs with every byte
checked, arm and event cycles, and a short measurement of latency and bandwidth. It needs no peer and takes about
a minute. The report can be attached to a bug. Exit code 1 when something failed.

DEVICE is ` + rdma.Names + `.`,
	example: "  srp-initiator selftest mlx5_0 > mlx5_0.txt\n  srp-initiator selftest softroce:127.0.0.1",
	flags: func(fs *pflag.FlagSet) func(*env) error {
		var d time.Duration
		var quiet bool
		fs.DurationVar(&d, "duration", 2*time.Second, "length of each part that measures")
		fs.BoolVarP(&quiet, "quiet", "q", false, "no line for each part on standard error")
		return func(e *env) error {
			if d < 10*time.Millisecond || d > time.Hour {
				return usagef("--duration %v is not within 10ms and 1h", d)
			}
			o := selftest.Options{Duration: d, Open: func() (verbs.Context, io.Closer, error) {
				f, err := rdma.Open(e.args[0])
				if err != nil {
					return nil, nil, err
				}
				return f.Context(), f, nil
			}}
			if !quiet {
				o.Progress = func(line string) { fmt.Fprintln(e.stderr, line) }
			}
			r, err := selftest.Run(e.ctx, o)
			if r == nil {
				return &deviceError{err}
			}
			if e.json {
				if err := e.printJSON(r); err != nil {
					return err
				}
			} else if _, err := r.WriteTo(e.stdout); err != nil {
				return err
			}
			if err == nil && !r.Passed() {
				err = fmt.Errorf("%s does not keep the contract", r.Name)
			}
			return err
		}
	},
}
