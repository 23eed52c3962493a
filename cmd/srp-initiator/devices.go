package main

import (
	"fmt"
	"strings"

	"github.com/spf13/pflag"

	"srp-initiator/rdma"
)

var devicesVerb = &verb{
	name: "devices", args: "",
	short: "list RDMA devices",
	long: `Lists the kernel's RDMA devices with what they are attached to, and which of them this program can use. The
userspace device "softroce" needs no entry: it works on any address of this machine (see --device).`,
	example: "  srp-initiator devices\n  srp-initiator devices --json | jq '.[].name'",
	flags: func(*pflag.FlagSet) func(*env) error {
		return func(e *env) error {
			devs, err := rdma.Devices()
			if err != nil {
				return &deviceError{err}
			}
			if e.json {
				if devs == nil {
					devs = []rdma.DeviceInfo{}
				}
				return e.printJSON(devs)
			}
			for _, d := range devs {
				e.printDevice(d)
			}
			if len(devs) == 0 {
				fmt.Fprintln(e.stdout, "no RDMA device of the kernel's")
			}
			fmt.Fprintln(e.stdout, "softroce: userspace RoCE v2 on any local address (--device softroce or softroce:ADDR)")
			return nil
		}
	},
}

func (e *env) printDevice(d rdma.DeviceInfo) {
	w := e.stdout
	fmt.Fprintf(w, "%s: ", d.Name)
	if d.Unserved != "" {
		fmt.Fprintf(w, "not usable: %s\n", d.Unserved)
	} else {
		fmt.Fprintf(w, "served by %s\n", d.Provider)
	}
	item := func(name, value string) {
		if value != "" {
			fmt.Fprintf(w, "    %-12s %s\n", name, value)
		}
	}
	item("driver", d.Driver)
	item("firmware", d.Firmware)
	item("board", d.BoardID)
	item("node GUID", d.NodeGUID)
	item("PCI", d.PCIAddress)
	if d.NUMANode >= 0 {
		item("NUMA node", fmt.Sprint(d.NUMANode))
	}
	if len(d.NearCPUs) > 0 {
		item("near CPUs", strings.Trim(fmt.Sprint(d.NearCPUs), "[]"))
	}
	if d.CompVectors > 0 {
		item("vectors", fmt.Sprint(d.CompVectors))
	}
	item("files", strings.Join(d.CharDevices, " "))
	for _, p := range d.Ports {
		mtu := ""
		if p.MTU > 0 {
			mtu = fmt.Sprintf(", path MTU %d", p.MTU)
		}
		item(fmt.Sprintf("port %d", p.Port), fmt.Sprintf("%s, %s, %s%s %s", p.LinkLayer, p.State, p.Rate, mtu, strings.Join(p.Netdevs, " ")))
		for _, g := range p.GIDs {
			item("", fmt.Sprintf("GID %d %s %s %s", g.Index, g.GID, g.Type, g.Netdev))
		}
		if len(p.PKeys) > 0 {
			item("  P_Keys", strings.Join(p.PKeys, " "))
		}
	}
}
