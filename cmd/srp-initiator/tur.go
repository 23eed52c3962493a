package main

import (
	"fmt"

	"github.com/spf13/pflag"

	"srp-initiator/srp"
	"srp-initiator/srp/disk"
	"srp-initiator/srp/scsi"
)

var turVerb = &verb{
	name: "tur", args: "TARGET",
	short: "ask whether a logical unit is ready (TEST UNIT READY)",
	long: `Sends TEST UNIT READY. Exit code 0: ready; 1: not, with the reason. Unit attentions are retried; --once
shows the first answer.`,
	example: "  srp-initiator tur srp://10.0.0.1:5555/505400fffe123456 --lun 1 && echo ready",
	flags: func(fs *pflag.FlagSet) func(*env) error {
		var once bool
		fs.BoolVar(&once, "once", false, "do not retry unit attentions")
		return unitVerb(fs, func(e *env, u *disk.Unit) error {
			var err error
			if once {
				err = u.Session.Do(e.ctx, &srp.Command{LUN: u.LUN, CDB: scsi.TestUnitReady()})
			} else {
				_, err = u.Exec(e.ctx, scsi.TestUnitReady(), srp.NoData, nil)
			}
			if err != nil {
				return err
			}
			if e.json {
				return e.printJSON(map[string]any{"lun": u.LUN.String(), "ready": true})
			}
			fmt.Fprintf(e.stdout, "LUN %s is ready\n", u.LUN)
			return nil
		})
	},
}
