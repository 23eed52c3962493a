package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/spf13/pflag"

	"srp-initiator/srp/disk"
	"srp-initiator/srp/scsi"
)

var lsVerb = &verb{
	name: "ls", args: "TARGET",
	short: "list the target's logical units with type, size, vendor and product",
	long: `Asks the target for its logical units (REPORT LUNS) and each of them what it is (INQUIRY, READ CAPACITY). A unit
that answers with an error is listed with it; the exit code is 1 then.`,
	example: `  srp-initiator ls srp://10.0.0.1:5555/505400fffe123456
  srp-initiator ls srp://10.0.0.1:5555/505400fffe123456 --json | jq '.[].size'`,
	flags: func(fs *pflag.FlagSet) func(*env) error {
		var f connectFlags
		f.register(fs)
		return func(e *env) error {
			return f.with(e, func(c *connection) error {
				luns, err := disk.LUNs(e.ctx, c.Session)
				if err != nil {
					return err
				}
				slices.SortFunc(luns, func(a, b scsi.LUN) int {
					m, _ := a.Number()
					n, _ := b.Number()
					return cmp.Or(cmp.Compare(m, n), bytes.Compare(a[:], b[:]))
				})
				list := []lunInfo{}
				var firstErr error
				for _, l := range luns {
					i, err := describeLUN(e.ctx, &disk.Unit{Session: c.Session, LUN: l})
					if err != nil {
						if e.ctx.Err() != nil {
							return err
						}
						i.Error = err.Error()
						if firstErr == nil {
							firstErr = fmt.Errorf("LUN %s: %w", l, err)
						}
					}
					list = append(list, i)
				}
				if e.json {
					if err := e.printJSON(list); err != nil {
						return err
					}
					return firstErr
				}
				if len(list) == 0 {
					fmt.Fprintln(e.stdout, "the target has no logical units for us")
				} else {
					fmt.Fprintf(e.stdout, "%-6s %-8s %12s %7s  %-8s %-16s %-4s %s\n", "LUN", "TYPE", "SIZE", "BLOCK", "VENDOR", "PRODUCT", "REV", "SERIAL")
				}
				for _, i := range list {
					if i.Error != "" {
						fmt.Fprintf(e.stdout, "%-6s %-8s %s\n", i.LUN, i.Type, i.Error)
						continue
					}
					size, block := "-", "-"
					if i.BlockSize > 0 {
						size, block = humanSize(i.Size), fmt.Sprint(i.BlockSize)
					}
					fmt.Fprintf(e.stdout, "%-6s %-8s %12s %7s  %-8s %-16s %-4s %s\n", i.LUN, i.Type, size, block, i.Vendor, i.Product, i.Revision, i.Serial)
				}
				return firstErr
			})
		}
	},
}

type lunInfo struct {
	LUN       string `json:"lun"`
	Bytes     string `json:"lun_bytes"`
	Type      string `json:"type"`
	Vendor    string `json:"vendor"`
	Product   string `json:"product"`
	Revision  string `json:"revision"`
	Serial    string `json:"serial,omitempty"`
	Blocks    uint64 `json:"blocks,omitempty"`
	BlockSize uint32 `json:"block_size,omitempty"`
	Size      int64  `json:"size,omitempty"` // bytes
	Error     string `json:"error,omitempty"`
}

func describeLUN(ctx context.Context, u *disk.Unit) (i lunInfo, err error) {
	i = lunInfo{LUN: u.LUN.String(), Bytes: fmt.Sprintf("%x", u.LUN[:])}
	if n, ok := u.LUN.Number(); ok { // in whatever encoding the target uses: --lun finds it again
		i.LUN = fmt.Sprint(n)
	}
	q, err := u.Inquiry(ctx)
	if err != nil {
		return i, err
	}
	i.Type = scsi.DeviceTypeName(q.DeviceType)
	i.Vendor, i.Product, i.Revision = q.Vendor, q.Product, q.Revision
	if v, err := u.VPD(ctx, scsi.VPDSerialNumber); err == nil {
		i.Serial = v.SerialNumber()
	} else if ctx.Err() != nil {
		return i, err
	}
	switch q.DeviceType {
	case scsi.TypeDisk, scsi.TypeRBC, scsi.TypeZoned, scsi.TypeCDDVD:
		if err := u.Ready(ctx); err != nil {
			return i, err
		}
		c, err := u.Capacity(ctx)
		if err != nil {
			return i, err
		}
		i.Blocks, i.BlockSize, i.Size = c.Blocks(), c.BlockSize, int64(c.Size())
	}
	return i, nil
}
