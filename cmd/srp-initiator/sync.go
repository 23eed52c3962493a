package main

import (
	"github.com/spf13/pflag"

	"srp-initiator/srp/disk"
)

var syncVerb = &verb{
	name: "sync", args: "TARGET",
	short:   "have a logical unit write its cache to the medium",
	long:    `Sends SYNCHRONIZE CACHE for the whole unit. A unit that does not know the command has no cache: that is success.`,
	example: "  srp-initiator sync srp://10.0.0.1:5555/505400fffe123456 --lun 1",
	flags: func(fs *pflag.FlagSet) func(*env) error {
		return diskVerb(fs, func(e *env, d *disk.Disk) error {
			if err := d.Sync(e.ctx); err != nil {
				return err
			}
			if e.json {
				return e.printJSON(map[string]any{"lun": d.Unit().LUN.String(), "synchronized": true})
			}
			return nil
		})
	},
}

// diskVerb is a verb on one disk.
func diskVerb(fs *pflag.FlagSet, do func(*env, *disk.Disk) error) func(*env) error {
	return unitVerb(fs, func(e *env, u *disk.Unit) error {
		d, err := disk.Open(e.ctx, u.Session, u.LUN)
		if err != nil {
			return err
		}
		return do(e, d)
	})
}
