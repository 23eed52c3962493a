package mlxtest

import (
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing/fstest"
	"time"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs"
	"srp-initiator/rdma/verbs/uverbs/internal/mlx4"
	"srp-initiator/rdma/verbs/uverbs/internal/mlx5"
	"srp-initiator/rdma/verbs/uverbs/internal/provider"
)

// Config says what device to open.
type Config struct {
	Family     string // "mlx5" or "mlx4"
	InfiniBand bool   // an InfiniBand port, addressed by LID; else RoCE v2
	// Legacy is a kernel before 4.20: no ioctl, static UARs, CQE version 0 (mlx5) or 32-byte CQEs (mlx4).
	Legacy      bool
	StaticUARs  bool // mlx5: the ioctl interface, but a kernel without UAR objects
	NoBlueFlame bool
	NoECE       bool // mlx5: a kernel that does not know enhanced connection establishment
	CQE32       bool // mlx4: 32-byte completion entries
	// Getenv stands for the environment; nil has none of the MLX5_* switches.
	Getenv func(string) string
}

// Net connects devices.
type Net struct {
	mu      sync.Mutex
	devices []*device // guarded by mu, with everything in them
	faults  []string  // guarded by mu
	stop    chan struct{}
	done    chan struct{}
	work    atomic.Bool // a command may have made work

	cmMu     sync.Mutex
	ports    map[netip.AddrPort]*listener // guarded by cmMu
	nextPort uint16                       // guarded by cmMu
}

// NewNet starts a net. Close it after its contexts.
func NewNet() *Net {
	n := &Net{stop: make(chan struct{}), done: make(chan struct{}), ports: map[netip.AddrPort]*listener{}}
	go n.run()
	return n
}

// Close stops the engine.
func (n *Net) Close() {
	close(n.stop)
	<-n.done
}

// Faults returns what drivers did that adapters do not define.
func (n *Net) Faults() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.faults
}

// fault notes a driver's mistake. mu is held.
func (n *Net) fault(format string, args ...any) {
	if len(n.faults) < 20 {
		n.faults = append(n.faults, fmt.Sprintf(format, args...))
	}
}

// run is the engine's goroutine. With nothing to do it looks ever more rarely, to leave the processors to others.
func (n *Net) run() {
	defer close(n.done)
	idle := 0
	for {
		select {
		case <-n.stop:
			return
		default:
		}
		n.mu.Lock()
		busy := n.step(time.Now())
		n.mu.Unlock()
		switch {
		case busy || n.work.Swap(false):
			idle = 0
			runtime.Gosched()
		case idle < 200:
			idle++
			runtime.Gosched()
		default:
			idle++
			time.Sleep(min(20*time.Microsecond*time.Duration(idle/200), 500*time.Microsecond))
		}
	}
}

// step does what there is to do and reports whether there was any. mu is held.
func (n *Net) step(now time.Time) (busy bool) {
	for _, d := range n.devices {
		if d.fam.scan(d) {
			busy = true
		}
		for _, q := range d.byNum {
			if q.run(now) {
				busy = true
			}
		}
	}
	return busy
}

// Open opens a new device of the net.
func (n *Net) Open(c Config) (*uverbs.Context, error) {
	d := newDevice(n, c)
	n.mu.Lock()
	id := len(n.devices) + 1
	d.name = fmt.Sprintf("%s_%d", c.Family, id-1)
	d.lid = uint16(id)
	d.addr = netip.AddrFrom4([4]byte{192, 0, 2, byte(id)})
	d.guid = 0x0002c90300000000 | uint64(id)
	n.devices = append(n.devices, d)
	n.mu.Unlock()
	getenv := c.Getenv
	if getenv == nil {
		getenv = func(string) string { return "" }
	}
	var fam provider.Family
	info := provider.Info{Name: d.name, Vendor: 0x15b3}
	switch c.Family {
	case "mlx5":
		fam = mlx5.Family{Getenv: getenv}
		info.ABIVersion, info.PCIDevice = 1, 0x1017
	case "mlx4":
		fam = mlx4.Family{}
		info.ABIVersion, info.PCIDevice = 4, 0x1003
	default:
		return nil, fmt.Errorf("mlxtest: family %q, want mlx5 or mlx4", c.Family)
	}
	return uverbs.OpenOn(&calls{d}, fam, info, d.sysfs())
}

// sysfs is what the binding reads there.
func (d *device) sysfs() fstest.MapFS {
	fs := fstest.MapFS{}
	put := func(name, data string) { fs[name] = &fstest.MapFile{Data: []byte(data + "\n")} }
	dir := "class/infiniband/" + d.name
	put(dir+"/node_guid", fmt.Sprintf("%04x:%04x:%04x:%04x", d.guid>>48, d.guid>>32&0xffff, d.guid>>16&0xffff, d.guid&0xffff))
	put(dir+"/ports/1/pkeys/0", "0xffff")
	link := "Ethernet"
	if d.cfg.InfiniBand {
		link = "InfiniBand"
	}
	put(dir+"/ports/1/link_layer", link)
	for i := range gidTableLen {
		gid, typ := d.gid(i)
		put(fmt.Sprintf("%s/ports/1/gids/%d", dir, i), gid.String())
		if !gid.IsZero() {
			put(fmt.Sprintf("%s/ports/1/gid_attrs/types/%d", dir, i), typ)
			if !d.cfg.InfiniBand {
				put(fmt.Sprintf("%s/ports/1/gid_attrs/ndevs/%d", dir, i), "eth0")
			}
		}
	}
	return fs
}

// gidTableLen is how many entries of the port's GID table may be in use.
const gidTableLen = 2

// gid is entry i of the port's table.
func (d *device) gid(i int) (verbs.GID, string) {
	var local verbs.GID
	local[0], local[1] = 0xfe, 0x80
	for k := range 8 {
		local[8+k] = byte(d.guid >> (56 - 8*k))
	}
	switch {
	case i == 0:
		return local, "IB/RoCE v1"
	case i == 1 && !d.cfg.InfiniBand:
		return verbs.GIDFromAddr(d.addr), "RoCE v2"
	}
	return verbs.GID{}, ""
}

// peer finds the device that an address leads to.
func (n *Net) peer(av *addressVector) *device {
	for _, d := range n.devices {
		if d.closed {
			continue
		}
		if av.global {
			for i := range gidTableLen {
				if g, _ := d.gid(i); g == av.dgid && !g.IsZero() {
					return d
				}
			}
		} else if d.lid == av.dlid && d.cfg.InfiniBand {
			return d
		}
	}
	return nil
}
