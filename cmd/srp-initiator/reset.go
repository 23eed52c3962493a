package main

import (
	"github.com/spf13/pflag"
)

var resetVerb = &verb{
	name: "reset", args: "TARGET",
	short: "reset a logical unit",
	long: `Sends the task management function LOGICAL UNIT RESET: commands of all initiators at the unit are ended, and each
initiator is told by a unit attention.`,
	example: "  srp-initiator reset srp://10.0.0.1:5555/505400fffe123456 --lun 1",
	flags: func(fs *pflag.FlagSet) func(*env) error {
		var f connectFlags
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
				if err := c.LUNReset(lun); err != nil {
					return err
				}
				if e.json {
					return e.printJSON(map[string]any{"lun": lun.String(), "reset": true})
				}
				return nil
			})
		}
	},
}
