package rdma

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/Mellanox/rdmamap"
	"github.com/jaypipes/ghw"
)

// DeviceInfo is what can be told of a device before it is opened.
type DeviceInfo struct {
	Name        string     `json:"name"`
	Provider    string     `json:"provider,omitempty"` // which code would serve it
	Unserved    string     `json:"unserved,omitempty"` // why none would
	Driver      string     `json:"driver,omitempty"`   // kernel driver
	CharDevices []string   `json:"char_devices,omitempty"`
	Firmware    string     `json:"firmware,omitempty"`
	BoardID     string     `json:"board_id,omitempty"`
	NodeGUID    string     `json:"node_guid,omitempty"`
	PCIAddress  string     `json:"pci_address,omitempty"` // of the device, or of the netdev below a software device
	NUMANode    int        `json:"numa_node"`             // -1: none told
	NearCPUs    []int      `json:"near_cpus,omitempty"`
	CompVectors int        `json:"completion_vectors,omitempty"`
	Ports       []PortInfo `json:"ports,omitempty"`
}

// PortInfo is one port of a device.
type PortInfo struct {
	Port      int       `json:"port"`
	LinkLayer string    `json:"link_layer"`
	State     string    `json:"state"`
	PhysState string    `json:"phys_state,omitempty"`
	Rate      string    `json:"rate,omitempty"`
	MTU       int       `json:"mtu,omitempty"` // active path MTU, bytes
	LID       string    `json:"lid,omitempty"`
	Netdevs   []string  `json:"netdevs,omitempty"`
	GIDs      []GIDInfo `json:"gids,omitempty"`
	PKeys     []string  `json:"pkeys,omitempty"`
}

// GIDInfo is one used entry of a port's GID table.
type GIDInfo struct {
	Index  int    `json:"index"`
	GID    string `json:"gid"`
	Type   string `json:"type"`
	Netdev string `json:"netdev,omitempty"`
}

// sysfs reads one attribute below root; "" when it is absent or, as unused GID slots are, unreadable.
type sysfs string

func (s sysfs) attr(elem ...string) string {
	b, err := os.ReadFile(filepath.Join(append([]string{string(s)}, elem...)...))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// numbers lists the numeric entries of a directory in order.
func (s sysfs) numbers(elem ...string) []int {
	ents, _ := os.ReadDir(filepath.Join(append([]string{string(s)}, elem...)...))
	var out []int
	for _, e := range ents {
		if n, err := strconv.Atoi(e.Name()); err == nil {
			out = append(out, n)
		}
	}
	sort.Ints(out)
	return out
}

const zeroGID = "0000:0000:0000:0000:0000:0000:0000:0000"

// describe fills what sysfs tells of the kernel's device name.
func (s sysfs) describe(name string) DeviceInfo {
	dir := filepath.Join("class", "infiniband", name)
	d := DeviceInfo{
		Name:     name,
		Firmware: s.attr(dir, "fw_ver"),
		BoardID:  s.attr(dir, "board_id"),
		NodeGUID: s.attr(dir, "node_guid"),
		NUMANode: -1,
	}
	if p, err := filepath.EvalSymlinks(filepath.Join(string(s), dir, "device", "driver")); err == nil {
		d.Driver = filepath.Base(p)
	}
	for _, n := range s.numbers(dir, "ports") {
		port := strconv.Itoa(n)
		pd := filepath.Join(dir, "ports", port)
		p := PortInfo{
			Port:      n,
			LinkLayer: s.attr(pd, "link_layer"),
			State:     afterColon(s.attr(pd, "state")),
			PhysState: afterColon(s.attr(pd, "phys_state")),
			Rate:      s.attr(pd, "rate"),
			LID:       s.attr(pd, "lid"),
		}
		for _, i := range s.numbers(pd, "gids") {
			is := strconv.Itoa(i)
			gid := s.attr(pd, "gids", is)
			if gid == "" || gid == zeroGID {
				continue
			}
			g := GIDInfo{Index: i, GID: gid, Type: s.attr(pd, "gid_attrs", "types", is), Netdev: s.attr(pd, "gid_attrs", "ndevs", is)}
			if g.Type == "" {
				g.Type = "IB"
			}
			p.GIDs = append(p.GIDs, g)
			if g.Netdev != "" && !slices.Contains(p.Netdevs, g.Netdev) {
				p.Netdevs = append(p.Netdevs, g.Netdev)
			}
		}
		for _, i := range s.numbers(pd, "pkeys") {
			if k := s.attr(pd, "pkeys", strconv.Itoa(i)); k != "" && k != "0x0000" {
				p.PKeys = append(p.PKeys, k)
			}
		}
		d.Ports = append(d.Ports, p)
	}
	d.PCIAddress = s.pciAddress(dir, d.Ports)
	return d
}

// afterColon is the word in "4: ACTIVE".
func afterColon(v string) string {
	if _, w, ok := strings.Cut(v, ":"); ok {
		return strings.TrimSpace(w)
	}
	return v
}

var pciAddress = regexp.MustCompile(`^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)

// pciAddress is the last PCI address on the device's path, or on that of the netdev below a software
// device, whose own path has none (a virtio NIC's parent is its PCI function).
func (s sysfs) pciAddress(dir string, ports []PortInfo) string {
	dirs := []string{filepath.Join(dir, "device")}
	for _, p := range ports {
		for _, n := range p.Netdevs {
			dirs = append(dirs, filepath.Join("class", "net", n, "device"))
		}
	}
	for _, l := range dirs {
		p, err := filepath.EvalSymlinks(filepath.Join(string(s), l))
		if err != nil {
			continue
		}
		parts := strings.Split(p, "/")
		for i := len(parts) - 1; i >= 0; i-- {
			if pciAddress.MatchString(parts[i]) {
				return parts[i]
			}
		}
	}
	return ""
}

// addTopology asks ghw where the device sits. Without a PCI database or with a topology that ghw cannot read the
// fields stay empty: they are advice for placing threads, not needed for I/O.
func addTopology(devs []DeviceInfo) {
	any := slices.ContainsFunc(devs, func(d DeviceInfo) bool { return d.PCIAddress != "" })
	if !any {
		return
	}
	topo, err := ghw.Topology(ghw.WithDisableWarnings(), ghw.WithDisableTools())
	if err != nil {
		return
	}
	cpus := make(map[int][]int) // by node
	for _, n := range topo.Nodes {
		for _, c := range n.Cores {
			cpus[n.ID] = append(cpus[n.ID], c.LogicalProcessors...)
		}
		sort.Ints(cpus[n.ID])
	}
	pci, err := ghw.PCI(ghw.WithDisableWarnings(), ghw.WithDisableTools())
	for i := range devs {
		d := &devs[i]
		if d.PCIAddress == "" {
			continue
		}
		if err == nil {
			if p := pci.GetDevice(d.PCIAddress); p != nil && p.Node != nil {
				d.NUMANode = p.Node.ID
			}
		}
		switch {
		case d.NUMANode >= 0:
			d.NearCPUs = cpus[d.NUMANode]
		case len(topo.Nodes) == 1:
			d.NearCPUs = cpus[topo.Nodes[0].ID]
		}
	}
}

// kernelDevices lists the kernel's RDMA devices in name order.
func kernelDevices() []string {
	names := rdmamap.GetRdmaDeviceList()
	sort.Strings(names)
	return names
}

// charDevices lists the device files of a kernel device.
func charDevices(name string) []string {
	files := rdmamap.GetRdmaCharDevices(name)
	sort.Strings(files)
	return files
}

// deviceOfNetdev is the RDMA device on the network interface name, "" if there is none.
func deviceOfNetdev(name string) string {
	if _, err := os.Stat(filepath.Join("/sys/class/net", name)); err != nil || strings.Contains(name, "/") {
		return ""
	}
	dev, err := rdmamap.GetRdmaDeviceForNetdevice(name)
	if err != nil {
		return ""
	}
	return dev
}
