package main

import (
	"fmt"
	"runtime"

	"github.com/spf13/pflag"

	"srp-initiator/bench"
)

var versionVerb = &verb{
	name:    "version",
	short:   "show what this program was built from",
	long:    `Shows the revision, as the reports of experiment have it, and the Go version. "srp-initiator --version" is the same.`,
	example: "  srp-initiator version",
	flags: func(*pflag.FlagSet) func(*env) error {
		return func(e *env) error {
			if e.json {
				return e.printJSON(map[string]string{"name": "srp-initiator", "revision": bench.ProgramVersion(), "go": runtime.Version()})
			}
			fmt.Fprintf(e.stdout, "srp-initiator %s (%s)\n", bench.ProgramVersion(), runtime.Version())
			return nil
		}
	},
}
