package main

import (
	"github.com/spf13/pflag"

	"srp-initiator/srp/disk"
)

var unmapVerb = &verb{
	name: "unmap", args: "TARGET",
	short: "tell a logical unit that a range is not needed any more, or zero it",
	long: `Deallocates the whole blocks of a range (UNMAP, or WRITE SAME with UNMAP), within the limits that the unit states. What
they read as afterwards is the unit's choice; --zero makes the range read as zeros on any unit. DATA IN THE RANGE IS LOST.`,
	example: `  srp-initiator unmap srp://10.0.0.1:5555/505400fffe123456 --offset 1M --length 16M
  srp-initiator unmap srp://10.0.0.1:5555/505400fffe123456 --offset 0 --length 4096 --zero`,
	flags: func(fs *pflag.FlagSet) func(*env) error {
		offset, length := sizeFlag(-1), sizeFlag(-1)
		var zero bool
		fs.VarP(&offset, "offset", "s", "where the range begins, in bytes")
		fs.VarP(&length, "length", "n", "length of the range in bytes")
		fs.BoolVar(&zero, "zero", false, "make the range read as zeros")
		act := diskVerb(fs, func(e *env, d *disk.Disk) error {
			off, n := int64(offset), int64(length)
			if off > d.Size() || n > d.Size()-off {
				return usagef("--offset %d and --length %d reach beyond the end of LUN %s at %d", off, n, d.Unit().LUN, d.Size())
			}
			var err error
			if zero {
				err = d.WriteZeros(e.ctx, off, n, true)
			} else {
				err = d.Discard(e.ctx, off, n)
			}
			if err == nil && e.json {
				err = e.printJSON(map[string]any{"lun": d.Unit().LUN.String(), "offset": off, "length": n, "zero": zero})
			}
			return err
		})
		return func(e *env) error {
			if offset < 0 || length < 0 {
				return usagef("--offset and --length must be given")
			}
			return act(e)
		}
	},
}
