package uverbs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
	"srp-initiator/rdma/verbs/uverbs/internal/provider"
)

// Context is an opened device. It implements verbs.Context.
type Context struct {
	name   string
	family provider.Family
	k      *kernel.Device
	dev    provider.Device
	sys    fs.FS
	async  *asyncReader
	gone   atomic.Bool

	mu     sync.Mutex
	closed bool // guarded by mu, with everything below
	// What is alive, for Close.
	qps      map[*queuePair]struct{}
	cqs      map[*completionQueue]struct{}
	channels map[*channel]struct{}
	other    map[interface{ drop() error }]struct{} // regions and windows
	pds      map[*protectionDomain]struct{}
	// elements are queue pairs and completion queues by user handle.
	elements   map[uint64]any
	lastHandle uint64
}

// Open opens the device called name ("rxe0", "mlx5_0").
func Open(name string) (*Context, error) {
	list, err := Devices()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, d := range list {
		if d.Name == name {
			return d.Open()
		}
		names = append(names, d.Name)
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("no RDMA device %q: the kernel offers none (is ib_uverbs loaded? for soft-RoCE: rdma link add rxe0 type rxe netdev eth0)", name)
	}
	return nil, fmt.Errorf("no RDMA device %q: the kernel offers %s", name, strings.Join(names, ", "))
}

// Open opens the device.
func (d DeviceInfo) Open() (*Context, error) {
	if d.Provider == "" {
		return nil, fmt.Errorf("%s: %s", d.Name, d.Reason)
	}
	f, err := kernel.Open(d.CharDev)
	if err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return nil, fmt.Errorf("%s: %w (reading and writing %s is needed)", d.Name, err, d.CharDev)
		}
		return nil, fmt.Errorf("%s: %w", d.Name, err)
	}
	for _, fam := range families {
		if fam.Name() == d.Provider {
			return OpenOn(f, fam, d.info, os.DirFS("/sys"))
		}
	}
	panic("uverbs: provider " + d.Provider + " is listed but not there")
}

// OpenOn opens a device of family fam on calls, which it takes over: the real
// device file, or a simulated kernel. sys is /sys or what stands for it.
func OpenOn(calls kernel.Calls, fam provider.Family, info provider.Info, sys fs.FS) (*Context, error) {
	k := kernel.NewDevice(calls, fam.DriverID())
	c := &Context{name: info.Name, family: fam, k: k, sys: sys,
		qps: map[*queuePair]struct{}{}, cqs: map[*completionQueue]struct{}{}, channels: map[*channel]struct{}{},
		other: map[interface{ drop() error }]struct{}{}, pds: map[*protectionDomain]struct{}{}, elements: map[uint64]any{}}
	dev, err := fam.Open(k, info)
	if err != nil {
		if fd := k.AsyncFD(); fd >= 0 {
			unix.Close(fd)
		}
		k.Close()
		return nil, fmt.Errorf("%s: get context: %w", info.Name, err)
	}
	c.dev = dev
	if err := k.AllocAsyncFD(); err != nil {
		dev.Close()
		k.Close()
		return nil, fmt.Errorf("%s: asynchronous event file: %w", info.Name, err)
	}
	if c.async, err = newAsyncReader(c, k.AsyncFD()); err != nil {
		dev.Close()
		k.Close()
		return nil, fmt.Errorf("%s: asynchronous event file: %w", info.Name, err)
	}
	return c, nil
}

// Name implements verbs.Context: the kernel's name of the device.
func (c *Context) Name() string { return c.name }

// Provider implements verbs.Context: the name of the device family.
func (c *Context) Provider() string { return c.family.Name() }

// fail gives a command's error its context. When it says that the device is gone, everybody who waits is told.
func (c *Context) fail(doing string, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, os.ErrClosed) {
		return verbs.ErrClosed
	}
	if kernel.Gone(err) {
		c.lost()
		return fmt.Errorf("%s: %s: %w", c.name, doing, verbs.ErrDeviceGone)
	}
	return fmt.Errorf("%s: %s: %w", c.name, doing, err)
}

// lost marks the device as gone and wakes all waiters.
func (c *Context) lost() {
	if c.gone.Swap(true) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for ch := range c.channels {
		ch.Wake()
	}
}

// QueryDevice implements verbs.Context.
func (c *Context) QueryDevice() (verbs.DeviceAttr, error) {
	r, err := c.k.QueryDevice()
	if err != nil {
		return verbs.DeviceAttr{}, c.fail("query device", err)
	}
	fw := line(c.sys, "class/infiniband/"+c.name+"/fw_ver")
	if fw == "" && r.FWVer != 0 {
		fw = fmt.Sprintf("%d.%d.%d", r.FWVer>>32, r.FWVer>>16&0xffff, r.FWVer&0xffff)
	}
	return verbs.DeviceAttr{
		FirmwareVersion: fw,
		NodeGUID:        binary.BigEndian.Uint64(r.NodeGUID[:]),
		SysImageGUID:    binary.BigEndian.Uint64(r.SysImageGUID[:]),
		VendorID:        r.VendorID, VendorPartID: r.VendorPartID, HWVersion: r.HWVer,
		MaxMRSize: r.MaxMRSize, MaxQP: int(r.MaxQP), MaxQPWR: int(r.MaxQPWR),
		MaxSGE: int(r.MaxSGE), MaxSGERead: int(r.MaxSGERd), MaxCQ: int(r.MaxCQ), MaxCQE: int(r.MaxCQE),
		MaxMR: int(r.MaxMR), MaxMW: int(r.MaxMW), MaxPD: int(r.MaxPD),
		MaxQPReadAtom: int(r.MaxQPRdAtom), MaxQPInitRdAtom: int(r.MaxQPInitRdAtom),
		LocalACKDelay: r.LocalCAAckDelay, PhysPorts: int(r.PhysPortCnt), CompVectors: c.dev.CompVectors(),
	}, nil
}

// QueryPort implements verbs.Context.
func (c *Context) QueryPort(port uint8) (verbs.PortAttr, error) {
	r, err := c.k.QueryPort(port)
	if err != nil {
		return verbs.PortAttr{}, c.fail(fmt.Sprintf("query port %d", port), err)
	}
	return verbs.PortAttr{
		State: verbs.PortState(r.State), MaxMTU: verbs.MTU(r.MaxMTU), ActiveMTU: verbs.MTU(r.ActiveMTU),
		LinkLayer: verbs.LinkLayer(r.LinkLayer), LID: r.LID, SMLID: r.SMLID,
		GIDTableLen: int(r.GIDTblLen), PKeyTblLen: int(r.PKeyTblLen), MaxMsgSize: r.MaxMsgSz,
		ActiveSpeed: r.ActiveSpeed, ActiveWidth: r.ActiveWidth, PhysState: r.PhysState,
	}, nil
}

// newHandle reserves a user handle: a number that is never used twice, so that
// a late event of a destroyed object finds nothing instead of another object.
func (c *Context) newHandle() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lastHandle++
	return c.lastHandle
}

// NextAsyncEvent implements verbs.Context.
func (c *Context) NextAsyncEvent() (verbs.AsyncEvent, error) { return c.async.next() }

// Close implements verbs.Context. What is still alive is destroyed, in the order that the kernel wants.
func (c *Context) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return verbs.ErrClosed
	}
	c.closed = true
	qps, cqs, channels, other, pds := keys(c.qps), keys(c.cqs), keys(c.channels), keys(c.other), keys(c.pds)
	c.mu.Unlock()
	for _, x := range qps {
		x.Destroy()
	}
	for _, x := range cqs {
		x.Destroy()
	}
	for _, x := range channels {
		x.shut()
	}
	for _, x := range other {
		x.drop()
	}
	for _, x := range pds {
		x.Dealloc()
	}
	c.async.close()
	c.dev.Close()
	return c.k.Close()
}

func keys[K comparable](m map[K]struct{}) []K {
	list := make([]K, 0, len(m))
	for k := range m {
		list = append(list, k)
	}
	return list
}

// enter adds x to one of the sets of live objects; ErrClosed once Close has begun.
func enter[K comparable](c *Context, set map[K]struct{}, x K) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return verbs.ErrClosed
	}
	set[x] = struct{}{}
	return nil
}

func leave[K comparable](c *Context, set map[K]struct{}, x K) {
	c.mu.Lock()
	delete(set, x)
	c.mu.Unlock()
}

var _ verbs.Context = (*Context)(nil)
