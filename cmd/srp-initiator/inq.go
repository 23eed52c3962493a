package main

import (
	"encoding/hex"
	"fmt"
	"strconv"

	"github.com/spf13/pflag"

	"srp-initiator/srp/disk"
	"srp-initiator/srp/scsi"
)

var inqVerb = &verb{
	name: "inq", args: "TARGET",
	short: "show what a logical unit says of itself (INQUIRY)",
	long: `Shows the standard INQUIRY data of a logical unit, a vital product data page with --page (00, 80, 83, b0, b1 and
b2 are decoded, others shown as bytes), or everything with --all.`,
	example: `  srp-initiator inq srp://10.0.0.1:5555/505400fffe123456 --lun 1
  srp-initiator inq srp://10.0.0.1:5555/505400fffe123456 --page 83
  srp-initiator inq srp://10.0.0.1:5555/505400fffe123456 --all --json`,
	flags: func(fs *pflag.FlagSet) func(*env) error {
		var page string
		var all bool
		var p uint64
		fs.StringVarP(&page, "page", "p", "", "vital product data page, in hexadecimal")
		fs.BoolVarP(&all, "all", "a", false, "the standard data and every page that the unit lists")
		act := unitVerb(fs, func(e *env, u *disk.Unit) error {
			if page != "" {
				return e.showPage(u, uint8(p))
			}
			q, err := u.Inquiry(e.ctx)
			if err != nil {
				return err
			}
			if q.Qualifier == scsi.QualifierNotThere {
				return fmt.Errorf("LUN %s: the target has no such logical unit", u.LUN)
			}
			facts := inquiryFacts(q)
			if !all {
				if e.json {
					return e.printJSON(facts)
				}
				facts.print(e)
				return nil
			}
			pages, err := u.SupportedVPD(e.ctx)
			if err != nil {
				return err
			}
			out := map[string]any{"standard": facts}
			if !e.json {
				facts.print(e)
			}
			for _, p := range pages {
				v, err := u.VPD(e.ctx, p)
				if err != nil {
					if e.ctx.Err() != nil {
						return err
					}
					v = scsi.VPD{}
					out[fmt.Sprintf("%02x", p)] = map[string]string{"error": err.Error()}
					if !e.json {
						fmt.Fprintf(e.stdout, "page %02x: %s\n", p, err)
					}
					continue
				}
				facts := pageFacts(v)
				out[fmt.Sprintf("%02x", p)] = facts
				if !e.json {
					facts.print(e)
				}
			}
			if e.json {
				return e.printJSON(out)
			}
			return nil
		})
		return func(e *env) (err error) {
			if page != "" {
				if p, err = strconv.ParseUint(page, 16, 8); err != nil {
					return usagef("--page %s: want a page code of one or two hexadecimal digits", page)
				}
				if all {
					return usagef("--page and --all exclude each other")
				}
			}
			return act(e)
		}
	},
}

func (e *env) showPage(u *disk.Unit, page uint8) error {
	v, err := u.VPD(e.ctx, page)
	if err != nil {
		return err
	}
	f := pageFacts(v)
	if e.json {
		return e.printJSON(f)
	}
	f.print(e)
	return nil
}

// facts is an ordered list of named values.
type facts struct {
	title string
	names []string
	Value map[string]any
}

func newFacts(title string) *facts { return &facts{title: title, Value: map[string]any{}} }

func (f *facts) add(name string, v any) {
	f.names = append(f.names, name)
	f.Value[name] = v
}

// MarshalJSON gives the values alone.
func (f *facts) MarshalJSON() ([]byte, error) { return marshal(f.Value) }

func (f *facts) print(e *env) {
	fmt.Fprintf(e.stdout, "%s\n", f.title)
	for _, n := range f.names {
		switch v := f.Value[n].(type) {
		case []string:
			for i, s := range v {
				if i > 0 {
					n = ""
				}
				fmt.Fprintf(e.stdout, "    %-26s %s\n", n, s)
			}
		default:
			fmt.Fprintf(e.stdout, "    %-26s %v\n", n, v)
		}
	}
}

func inquiryFacts(q scsi.InquiryData) *facts {
	f := newFacts("standard INQUIRY data")
	f.add("type", scsi.DeviceTypeName(q.DeviceType))
	f.add("qualifier", q.Qualifier)
	f.add("removable", q.Removable)
	f.add("version", q.Version)
	f.add("response_format", q.ResponseFormat)
	f.add("tpgs", q.TPGS)
	f.add("third_party_copy", q.ThirdPartyCopy)
	f.add("protect", q.Protect)
	f.add("command_queueing", q.CmdQueue)
	f.add("vendor", q.Vendor)
	f.add("product", q.Product)
	f.add("revision", q.Revision)
	if len(q.VersionDescs) > 0 {
		var s []string
		for _, v := range q.VersionDescs {
			s = append(s, fmt.Sprintf("%04x", v))
		}
		f.add("version_descriptors", s)
	}
	f.add("length", q.Length)
	if q.Received < q.Length {
		f.add("received", q.Received)
	}
	return f
}

func pageFacts(v scsi.VPD) *facts {
	title := map[uint8]string{scsi.VPDSupportedPages: "supported pages", scsi.VPDSerialNumber: "unit serial number", scsi.VPDDeviceID: "device identification",
		scsi.VPDBlockLimits: "block limits", scsi.VPDBlockCharacteristics: "block device characteristics", scsi.VPDProvisioning: "logical block provisioning"}[v.Page]
	if title == "" {
		title = "vital product data"
	}
	f := newFacts(fmt.Sprintf("page %02x: %s", v.Page, title))
	var err error
	switch v.Page {
	case scsi.VPDSupportedPages:
		var s []string
		for _, p := range v.Data {
			s = append(s, fmt.Sprintf("%02x", p))
		}
		f.add("pages", s)
	case scsi.VPDSerialNumber:
		f.add("serial", v.SerialNumber())
	case scsi.VPDDeviceID:
		var ds []scsi.Designator
		ds, err = v.Designators()
		s := []string{}
		for _, d := range ds {
			s = append(s, d.String())
		}
		f.add("designators", s)
	case scsi.VPDBlockLimits:
		var l scsi.BlockLimits
		if l, err = v.BlockLimits(); err == nil {
			f.add("max_compare_and_write", l.MaxCompareAndWrite)
			f.add("optimal_granularity", l.OptimalGranularity)
			f.add("max_transfer", l.MaxTransfer)
			f.add("optimal_transfer", l.OptimalTransfer)
			f.add("max_prefetch", l.MaxPrefetch)
			f.add("max_unmap_blocks", l.MaxUnmapBlocks)
			f.add("max_unmap_descriptors", l.MaxUnmapDescriptors)
			f.add("optimal_unmap_granularity", l.OptimalUnmapGranularity)
			if l.UnmapAlignmentValid {
				f.add("unmap_alignment", l.UnmapAlignment)
			}
			f.add("max_write_same", l.MaxWriteSame)
			f.add("write_same_nonzero", l.WSNZ)
		}
	case scsi.VPDBlockCharacteristics:
		var c scsi.BlockCharacteristics
		if c, err = v.BlockCharacteristics(); err == nil {
			switch c.RotationRate {
			case 0:
				f.add("rotation_rate", "not reported")
			case 1:
				f.add("rotation_rate", "no rotating medium")
			default:
				f.add("rotation_rate", c.RotationRate)
			}
			f.add("form_factor", c.FormFactor)
		}
	case scsi.VPDProvisioning:
		var p scsi.Provisioning
		if p, err = v.Provisioning(); err == nil {
			f.add("type", map[uint8]string{scsi.ProvisioningFull: "full", scsi.ProvisioningRes: "resource", scsi.ProvisioningThin: "thin"}[p.Type])
			f.add("unmap", p.Unmap)
			f.add("write_same_16_unmap", p.WriteSame16Unmap)
			f.add("write_same_10_unmap", p.WriteSame10Unmap)
			f.add("reads_zero", p.ReadsZero)
			f.add("anchor", p.AnchorSupported)
			f.add("threshold_exponent", p.ThresholdExponent)
		}
	default:
		f.add("data", hex.EncodeToString(v.Data))
	}
	if err != nil {
		f.add("malformed", err.Error())
	}
	if v.Truncated() {
		f.add("truncated", fmt.Sprintf("%d of %d bytes", len(v.Data), v.Length))
	}
	return f
}
