// Package rdma opens RDMA devices by name. It is the only place where the kernel-backed and the
// userspace provider meet: whoever holds a Fabric need not know which one it is.
package rdma

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"

	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/cm/ucm"
	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs"
)

// Fabric is an opened device with its connection manager.
type Fabric struct {
	ctx     verbs.Context
	conn    cm.Connector
	closers []io.Closer // in the order to close
}

// Context is the device.
func (f *Fabric) Context() verbs.Context { return f.ctx }

// Connector connects queue pairs of the device.
func (f *Fabric) Connector() cm.Connector { return f.conn }

// NearCPUs are the CPUs of the device's NUMA node, nil where the machine does not tell.
func (f *Fabric) NearCPUs() []int {
	if f.ctx.Provider() == "softroce" {
		return nil
	}
	d := []DeviceInfo{sysfs("/sys").describe(f.ctx.Name())}
	addTopology(d)
	return d[0].NearCPUs
}

// Close closes connection manager and device. Everything made from them must have been closed before.
func (f *Fabric) Close() error {
	var errs []error
	for _, c := range f.closers {
		errs = append(errs, c.Close())
	}
	f.closers = nil
	return errors.Join(errs...)
}

// Option changes how a device is opened.
type Option func(*options)

type options struct {
	peer    cm.Addr
	src     netip.AddrPort
	hasPeer bool
	capture io.Writer
}

// WithPeer says where connections will go: "auto" picks the device that reaches it, and "softroce" the
// local address.
func WithPeer(src netip.AddrPort, dst cm.Addr) Option {
	return func(o *options) { o.src, o.peer, o.hasPeer = src, dst, true }
}

// WithCapture writes what goes over the wire to w as pcapng. Only softroce devices can: a kernel device's packets never
// pass through this process.
func WithCapture(w io.Writer) Option { return func(o *options) { o.capture = w } }

// Names explains the device names that Open knows, for help texts.
const Names = `auto, a kernel device (rxe0, mlx5_0, mlx5_0/1), a network interface that has one (eth0), softroce, softroce:ADDR (link-local: fe80::1%eth0)`

// NameError is a device name that Open cannot make sense of.
type NameError struct {
	Name   string
	Reason string
}

func (e *NameError) Error() string {
	return fmt.Sprintf("device %q: %s (allowed: %s)", e.Name, e.Reason, Names)
}

// Open opens a device by name:
//
//	auto            with WithPeer the kernel device that reaches the peer, else the first that is served
//	                and has an active port; softroce when there is none
//	rxe0, mlx5_0/1  a kernel device; a port number must exist and be that of the route
//	eth0            the kernel device on a network interface
//	softroce        the userspace device on a local address of its choice
//	softroce:ADDR   the userspace device on that local address, a link-local one with its %INTERFACE
func Open(name string, opts ...Option) (*Fabric, error) {
	var o options
	for _, f := range opts {
		f(&o)
	}
	switch {
	case name == "auto" || name == "":
		return openAuto(&o)
	case name == "softroce" || strings.HasPrefix(name, "softroce:"):
		return openSoftroce(name, &o)
	}
	dev, port, err := splitPort(name)
	if err != nil {
		return nil, err
	}
	if !isKernelDevice(dev) {
		if d := deviceOfNetdev(dev); d != "" {
			dev = d
		}
	}
	return openKernel(dev, port, &o)
}

// splitPort splits "mlx5_0/1" into device and port; port is 0 when it is not given.
func splitPort(name string) (dev string, port uint8, err error) {
	dev, p, ok := strings.Cut(name, "/")
	if !ok {
		return dev, 0, nil
	}
	n, err := strconv.ParseUint(p, 10, 8)
	if err != nil || n == 0 {
		return "", 0, &NameError{Name: name, Reason: fmt.Sprintf("port %q is not a number from 1 to 255", p)}
	}
	return dev, uint8(n), nil
}

func isKernelDevice(name string) bool {
	for _, d := range kernelDevices() {
		if d == name {
			return true
		}
	}
	return false
}

func openKernel(name string, port uint8, o *options) (*Fabric, error) {
	if o.capture != nil {
		return nil, &NameError{Name: name, Reason: "packets of a kernel device cannot be captured here; capture with tcpdump, or use softroce"}
	}
	ctx, err := uverbs.Open(name)
	if err != nil {
		return nil, err
	}
	if port != 0 {
		if _, err := ctx.QueryPort(port); err != nil {
			ctx.Close()
			return nil, &NameError{Name: fmt.Sprintf("%s/%d", name, port), Reason: fmt.Sprintf("the device has no port %d", port)}
		}
	}
	conn, err := ucm.Open(ctx)
	if err != nil {
		ctx.Close()
		return nil, err
	}
	return &Fabric{ctx: ctx, conn: conn, closers: []io.Closer{conn, ctx}}, nil
}

// openAuto prefers a kernel device, because hardware is faster, and among them the one with a route.
func openAuto(o *options) (*Fabric, error) {
	infos, err := uverbs.Devices()
	if err != nil {
		return nil, err
	}
	var served []uverbs.DeviceInfo
	for _, d := range infos {
		if d.Provider != "" {
			served = append(served, d)
		}
	}
	if len(served) == 0 || o.capture != nil {
		return openSoftroce("softroce", o)
	}
	if !o.hasPeer {
		for _, d := range served {
			for _, p := range sysfs("/sys").describe(d.Name).Ports {
				if p.State == "ACTIVE" {
					return openKernel(d.Name, 0, o)
				}
			}
		}
		return openSoftroce("softroce", o)
	}
	route, err := ucm.ResolveDevice(context.Background(), o.src, o.peer)
	if err != nil {
		if o.peer.IsIB() {
			return nil, err
		}
		return openSoftroce("softroce", o)
	}
	for _, d := range served {
		if d.NodeGUID == route.NodeGUID {
			return openKernel(d.Name, 0, o)
		}
	}
	return nil, fmt.Errorf("%s is reached by a device with node GUID %016x, which no provider serves", o.peer, route.NodeGUID)
}

// Devices describes the kernel's RDMA devices, served or not, in name order.
func Devices() ([]DeviceInfo, error) {
	served, err := uverbs.Devices()
	if err != nil {
		return nil, err
	}
	byName := make(map[string]uverbs.DeviceInfo, len(served))
	for _, d := range served {
		byName[d.Name] = d
	}
	var out []DeviceInfo
	for _, name := range kernelDevices() {
		d := sysfs("/sys").describe(name)
		d.CharDevices = charDevices(name)
		u, ok := byName[name]
		switch {
		case !ok:
			d.Unserved = "the kernel offers no uverbs device for it: load the module ib_uverbs"
		case u.Provider == "":
			d.Driver, d.Unserved = u.Driver, u.Reason
		default:
			d.Driver, d.Provider = u.Driver, u.Provider
			d.addOpened(u)
		}
		out = append(out, d)
	}
	addTopology(out)
	return out, nil
}

// addOpened adds what only an opened device tells. A device that cannot be opened says why.
func (d *DeviceInfo) addOpened(u uverbs.DeviceInfo) {
	ctx, err := u.Open()
	if err != nil {
		d.Unserved = err.Error()
		return
	}
	defer ctx.Close()
	if a, err := ctx.QueryDevice(); err == nil {
		d.CompVectors = a.CompVectors
		if d.Firmware == "" {
			d.Firmware = a.FirmwareVersion
		}
	}
	for i := range d.Ports {
		if a, err := ctx.QueryPort(uint8(d.Ports[i].Port)); err == nil {
			d.Ports[i].MTU = a.ActiveMTU.Bytes()
		}
	}
}
