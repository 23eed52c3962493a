package main

import (
	"encoding/json"

	"github.com/spf13/pflag"

	"srp-initiator/srp/disk"
)

func marshal(v any) ([]byte, error) { return json.Marshal(v) }

var readcapVerb = &verb{
	name: "readcap", args: "TARGET",
	short: "show the capacity of a logical unit",
	long:  `Shows number and size of the blocks of a logical unit (READ CAPACITY(16), or (10) of units that know no other).`,
	example: `  srp-initiator readcap srp://10.0.0.1:5555/505400fffe123456 --lun 1
  srp-initiator readcap srp://10.0.0.1:5555/505400fffe123456 --json | jq .size`,
	flags: func(fs *pflag.FlagSet) func(*env) error {
		return unitVerb(fs, func(e *env, u *disk.Unit) error {
			cap, err := u.Capacity(e.ctx)
			if err != nil {
				return err
			}
			out := newFacts("capacity of LUN " + u.LUN.String())
			out.add("last_lba", cap.LastLBA)
			out.add("blocks", cap.Blocks())
			out.add("block_size", cap.BlockSize)
			out.add("size", cap.Size())
			out.add("physical_block_exponent", cap.PhysExponent)
			out.add("lowest_aligned_lba", cap.LowestAligned)
			out.add("thin_provisioned", cap.Provisioned)
			out.add("unmapped_reads_zero", cap.UnmappedZero)
			out.add("protection_enabled", cap.ProtEnabled)
			if e.json {
				return e.printJSON(out)
			}
			out.print(e)
			return nil
		})
	},
}
