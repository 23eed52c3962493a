package uverbs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"sort"
	"strconv"
	"strings"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/abi"
	"srp-initiator/rdma/verbs/uverbs/internal/mlx4"
	"srp-initiator/rdma/verbs/uverbs/internal/mlx5"
	"srp-initiator/rdma/verbs/uverbs/internal/provider"
	"srp-initiator/rdma/verbs/uverbs/internal/rxe"
)

// families are the device families this package serves, by name.
var families = []provider.Family{rxe.Family{}, mlx5.Family{}, mlx4.Family{}}

// DeviceInfo is one RDMA device that the kernel offers to user space.
type DeviceInfo struct {
	Name       string // "rxe0"
	CharDev    string // "/dev/infiniband/uverbs0"
	Driver     string // "rxe", "mlx5", ..., or the kernel driver's name when it is none of ours
	ABIVersion int    // the driver's user-verbs ABI version
	NodeGUID   uint64 // host order
	Ports      int
	// Provider is the family that serves the device, "" when none does; Reason then says why.
	Provider string
	Reason   string

	info provider.Info
}

// Devices lists the devices under /sys/class/infiniband_verbs, by name. A machine
// without RDMA has none; that is not an error.
func Devices() ([]DeviceInfo, error) { return devices(os.DirFS("/sys")) }

func devices(sys fs.FS) ([]DeviceInfo, error) {
	entries, err := fs.ReadDir(sys, "class/infiniband_verbs")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var list []DeviceInfo
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "uverbs") {
			continue
		}
		dir := path.Join("class/infiniband_verbs", e.Name())
		name := line(sys, path.Join(dir, "ibdev"))
		if name == "" {
			continue // gone since ReadDir
		}
		d := DeviceInfo{Name: name, CharDev: "/dev/infiniband/" + e.Name()}
		d.describe(sys, dir)
		list = append(list, d)
	}
	sort.Slice(list, func(i, j int) bool { return list[i].Name < list[j].Name })
	return list, nil
}

// describe fills in d what sysfs says, and finds its family.
func (d *DeviceInfo) describe(sys fs.FS, dir string) {
	ib := path.Join("class/infiniband", d.Name)
	d.ABIVersion, _ = strconv.Atoi(line(sys, path.Join(dir, "abi_version")))
	d.NodeGUID = parseGUID(line(sys, path.Join(ib, "node_guid")))
	ports, _ := fs.ReadDir(sys, path.Join(ib, "ports"))
	d.Ports = len(ports)
	d.info = provider.Info{Name: d.Name, ABIVersion: d.ABIVersion}
	d.info.Vendor = hex16(line(sys, path.Join(ib, "device/vendor")))
	d.info.PCIDevice = hex16(line(sys, path.Join(ib, "device/device")))
	d.Driver = driverName(sys, ib)

	var fam provider.Family
	for _, f := range families {
		if f.Name() == d.Driver {
			fam = f
		}
	}
	version := line(sys, "class/infiniband_verbs/abi_version")
	switch oldest, newest := abiRange(fam); {
	case fam == nil:
		d.Reason = fmt.Sprintf("no provider for driver %q", d.Driver)
	case version != strconv.Itoa(abi.Version):
		d.Reason = fmt.Sprintf("the kernel's user-verbs ABI is version %q, this program knows %d", version, abi.Version)
	case d.ABIVersion < oldest || d.ABIVersion > newest:
		d.Reason = fmt.Sprintf("driver %s has ABI version %d, this program knows %d to %d", d.Driver, d.ABIVersion, oldest, newest)
	default:
		d.Provider = fam.Name()
	}
}

func abiRange(f provider.Family) (oldest, newest int) {
	if f == nil {
		return 0, 0
	}
	return f.ABI()
}

// driverName finds which kernel driver made the device: the PCI (or auxiliary bus) driver under it, or for a
// virtual device the file that rxe alone has.
func driverName(sys fs.FS, ib string) string {
	if target, err := fs.ReadLink(sys, path.Join(ib, "device/driver")); err == nil {
		name := path.Base(target)
		switch {
		case strings.HasPrefix(name, "mlx5"): // mlx5_core, mlx5_core.sf, mlx5_ib
			return "mlx5"
		case strings.HasPrefix(name, "mlx4"):
			return "mlx4"
		}
		return name
	}
	if line(sys, path.Join(ib, "parent")) != "" {
		return "rxe" // drivers/infiniband/sw/rxe/rxe_verbs.c, parent_show
	}
	return "unknown"
}

// line is the first line of a sysfs file, "" when it cannot be read.
func line(sys fs.FS, name string) string {
	b, err := fs.ReadFile(sys, name)
	if err != nil {
		return ""
	}
	s, _, _ := strings.Cut(string(b), "\n")
	return strings.TrimSpace(s)
}

func hex16(s string) uint16 {
	v, _ := strconv.ParseUint(strings.TrimPrefix(s, "0x"), 16, 16)
	return uint16(v)
}

// parseGUID reads "5054:00ff:fe12:3456".
func parseGUID(s string) uint64 {
	v, _ := strconv.ParseUint(strings.ReplaceAll(s, ":", ""), 16, 64)
	return v
}

// parseGID reads eight groups of four hexadecimal digits.
func parseGID(s string) (g verbs.GID, err error) {
	digits := strings.ReplaceAll(s, ":", "")
	if len(digits) != 32 {
		return g, fmt.Errorf("uverbs: %q is no GID", s)
	}
	for i := range g {
		v, err := strconv.ParseUint(digits[2*i:2*i+2], 16, 8)
		if err != nil {
			return g, fmt.Errorf("uverbs: %q is no GID", s)
		}
		g[i] = byte(v)
	}
	return g, nil
}

// QueryGID reads the port's GID table in sysfs; the kernel has kept it there since long before it had a command for it.
func (c *Context) QueryGID(port uint8, index int) (verbs.GIDEntry, error) {
	dir := path.Join("class/infiniband", c.name, "ports", strconv.Itoa(int(port)))
	file := path.Join(dir, "gids", strconv.Itoa(index))
	b, err := fs.ReadFile(c.sys, file)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			if _, portErr := fs.Stat(c.sys, dir); portErr != nil {
				return verbs.GIDEntry{}, fmt.Errorf("%s has no port %d", c.name, port)
			}
			return verbs.GIDEntry{}, verbs.ErrNoEntry
		}
		return verbs.GIDEntry{}, err
	}
	e := verbs.GIDEntry{Index: index}
	if e.GID, err = parseGID(strings.TrimSpace(string(b))); err != nil {
		return verbs.GIDEntry{}, err
	}
	if e.GID.IsZero() {
		return verbs.GIDEntry{}, verbs.ErrNoEntry
	}
	n := strconv.Itoa(index)
	e.Netdev = line(c.sys, path.Join(dir, "gid_attrs/ndevs", n))
	switch {
	case line(c.sys, path.Join(dir, "gid_attrs/types", n)) == "RoCE v2":
		e.Type = verbs.GIDTypeRoCEv2
	case line(c.sys, path.Join(dir, "link_layer")) == "Ethernet": // the type reads "IB/RoCE v1" on both
		e.Type = verbs.GIDTypeRoCEv1
	}
	return e, nil
}

// QueryPKey reads the port's P_Key table in sysfs.
func (c *Context) QueryPKey(port uint8, index int) (uint16, error) {
	file := path.Join("class/infiniband", c.name, "ports", strconv.Itoa(int(port)), "pkeys", strconv.Itoa(index))
	b, err := fs.ReadFile(c.sys, file)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, verbs.ErrNoEntry
	}
	if err != nil {
		return 0, err
	}
	v, err := strconv.ParseUint(strings.TrimPrefix(strings.TrimSpace(string(b)), "0x"), 16, 16)
	if err != nil {
		return 0, fmt.Errorf("uverbs: %s holds %q, not a P_Key", file, b)
	}
	return uint16(v), nil
}
