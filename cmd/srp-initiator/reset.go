package main

import (
	"github.com/spf13/pflag"

	"srp-initiator/srp/disk"
)

var resetVerb = &verb{
	name: "reset", args: "TARGET",
	short: "reset a logical unit",
	long: `Sends the task management function LOGICAL UNIT RESET: commands of all initiators at the unit are ended, and each
initiator is told by a unit attention.`,
	example: "  srp-initiator reset srp://10.0.0.1:5555/505400fffe123456 --lun 1",
	flags: func(fs *pflag.FlagSet) func(*env) error {
		f := &connectFlags{functions: true}
		act := f.unitVerb(fs, func(e *env, u *disk.Unit) error {
			if err := u.Session.LUNReset(u.LUN); err != nil {
				return err
			}
			if e.json {
				return e.printJSON(map[string]any{"lun": u.LUN.String(), "reset": true})
			}
			return nil
		})
		fs.Lookup("timeout").Usage = "of the reset: how long its answer may take (default: tmf_tmo of TARGET, 5s)"
		return act
	},
}
