package main

import (
	"fmt"

	"github.com/spf13/pflag"

	"srp-initiator/srp"
)

var probeVerb = &verb{
	name: "probe", args: "TARGET",
	short: "log in, show what both sides agreed on, log out",
	long: `Logs in with every channel that TARGET asks for, prints what was negotiated, and logs out. It sends no SCSI
command. A refusal is told in words with its code.`,
	example: `  srp-initiator probe srp://10.0.0.1:5555/505400fffe123456
  srp-initiator probe id_ext=505400fffe123456,ioc_guid=505400fffe123456,dest=10.0.0.1:5555,ch_count=4 --json`,
	flags: func(fs *pflag.FlagSet) func(*env) error {
		var f connectFlags
		f.register(fs)
		fs.Lookup("timeout").Hidden = true
		return func(e *env) error {
			if fs.Changed("timeout") {
				return usagef("--timeout: probe sends no SCSI command; want --connect-timeout, of a channel's login")
			}
			return f.with(e, func(c *connection) error {
				st := c.Stats()
				t, o := c.Target(), c.Options()
				info := probeInfo{Device: c.Device().Name(), Provider: c.Device().Provider(), TargetPort: t.ID().String(), Asked: o.ChannelCount,
					MaxTransfer: c.MaxTransfer(), AddTarget: srp.AddTarget(t, o), URL: srp.URL(t, o), Stats: st}
				if e.json {
					return e.printJSON(info)
				}
				e.printProbe(info)
				return nil
			})
		}
	},
}

type probeInfo struct {
	Device      string    `json:"device"`
	Provider    string    `json:"provider"`
	TargetPort  string    `json:"target_port"`
	Asked       int       `json:"channels_asked"`
	MaxTransfer int       `json:"max_transfer"`
	AddTarget   string    `json:"add_target"`
	URL         string    `json:"url,omitempty"`
	Stats       srp.Stats `json:"session"`
}

func (e *env) printProbe(i probeInfo) {
	w := e.stdout
	fmt.Fprintf(w, "target port     %s\n", i.TargetPort)
	fmt.Fprintf(w, "device          %s (%s)\n", i.Device, i.Provider)
	fmt.Fprintf(w, "channels        %d of %d\n", len(i.Stats.Channels), i.Asked)
	fmt.Fprintf(w, "completion      %s\n", i.Stats.Mode)
	fmt.Fprintf(w, "max. transfer   %s per command\n", humanSize(int64(i.MaxTransfer)))
	for _, c := range i.Stats.Channels {
		fmt.Fprintf(w, "channel %d\n", c.Index)
		fmt.Fprintf(w, "    connection      %s -> %s, QP 0x%06x, path MTU %d\n", c.Local, c.Peer, c.QPN, c.PathMTU)
		fmt.Fprintf(w, "    initiator port  %s\n", c.InitiatorPort)
		fmt.Fprintf(w, "    request limit   %d at login (commands outstanding: %d)\n", c.InitialCredits, c.QueueDepth)
		fmt.Fprintf(w, "    multi-channel   %s\n", c.MultiChannel)
		fmt.Fprintf(w, "    IU lengths      we send up to %d (target takes %d), target sends up to %d\n", c.IULimit, c.MaxITIULen, c.MaxTIIULen)
		fmt.Fprintf(w, "    data formats    %s; %d descriptors in a command\n", formatNames(c.Formats), c.Descriptors)
		imm := "no"
		if c.Immediate > 0 {
			imm = fmt.Sprintf("writes up to %d bytes", c.Immediate)
		}
		fmt.Fprintf(w, "    immediate data  %s\n", imm)
	}
	fmt.Fprintf(w, "add_target      %s\n", i.AddTarget)
	if i.URL != "" {
		fmt.Fprintf(w, "URL             %s\n", i.URL)
	}
}

func formatNames(f uint16) string {
	s := ""
	if f&2 != 0 {
		s = "direct"
	}
	if f&4 != 0 {
		if s != "" {
			s += ", "
		}
		s += "indirect"
	}
	if s == "" {
		s = "none stated"
	}
	return s
}
