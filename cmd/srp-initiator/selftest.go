package main

import (
	"fmt"
	"io"
	"net/netip"
	"strings"
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

The contract takes two devices at a time. With softroce:ADDR the second one takes a free address of 127.0.0.0/8, of which
every machine has plenty, whether ADDR is one of them or of a network interface: the packets stay in the machine. IPv6 has no
address to spare like that, so an IPv6 ADDR is refused.

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
			open := func(name string) func() (verbs.Context, io.Closer, error) {
				return func() (verbs.Context, io.Closer, error) {
					f, err := rdma.Open(name)
					if err != nil {
						return nil, nil, err
					}
					return f.Context(), f, nil
				}
			}
			o := selftest.Options{Duration: d, Open: open(e.args[0])}
			if text, ok := strings.CutPrefix(e.args[0], "softroce:"); ok {
				if a, err := netip.ParseAddr(text); err == nil && !a.Unmap().Is4() {
					return usagef("DEVICE %s: the contract takes two addresses and IPv6 has no second one to spare; want softroce, or softroce: and an IPv4 address", e.args[0])
				}
				o.OpenPeer = open("softroce")
			}
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
