// Package ucm connects queue pairs through the kernel's connection manager,
// /dev/infiniband/rdma_cm.
//
// One file descriptor serves all connections of a Connector. A command is one
// write(2) whose body names a response page; the kernel reports progress as
// events, which one goroutine reads and hands to the connection they are for.
// The kernel checks that the credentials of the writer are those of the opener:
// a process that changes its credentials must open a new Connector.
package ucm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
)

// DevicePath is the kernel's connection manager.
const DevicePath = "/dev/infiniband/rdma_cm"

// resolveTimeoutMS bounds each of address and route resolution in the kernel.
const resolveTimeoutMS = 5000

// Connector implements cm.Connector for one kernel device.
type Connector struct {
	file *os.File
	raw  syscall.RawConn
	dev  verbs.Context
	guid uint64 // node GUID of dev, host order

	scratch chan *hostmem.Region // pages the kernel reads from and answers into

	mu   sync.Mutex
	ids  map[uint64]*id // by uid
	fail error          // set when the event loop has ended
	uid  atomic.Uint64
	done chan struct{} // closed when the event loop has ended
}

var _ cm.Connector = (*Connector)(nil)

// Open opens the kernel's connection manager for connections over dev. dev may be nil for
// ResolveDevice alone.
func Open(dev verbs.Context) (*Connector, error) {
	var guid uint64
	if dev != nil {
		attr, err := dev.QueryDevice()
		if err != nil {
			return nil, fmt.Errorf("ucm: %w", err)
		}
		guid = attr.NodeGUID
	}
	fd, err := unix.Open(DevicePath, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("ucm: %s is missing: load the kernel module rdma_ucm", DevicePath)
		}
		return nil, fmt.Errorf("ucm: open %s: %w", DevicePath, err)
	}
	c := &Connector{
		file: os.NewFile(uintptr(fd), DevicePath),
		dev:  dev, guid: guid,
		ids:     make(map[uint64]*id),
		scratch: make(chan *hostmem.Region, 4),
		done:    make(chan struct{}),
	}
	if c.raw, err = c.file.SyscallConn(); err != nil {
		c.file.Close()
		return nil, fmt.Errorf("ucm: %w", err)
	}
	page, err := hostmem.Alloc(os.Getpagesize())
	if err != nil {
		c.file.Close()
		return nil, err
	}
	go c.eventLoop(page)
	return c, nil
}

// Close ends the event loop. Connections must have been closed before; those that
// are left get net.ErrClosed.
func (c *Connector) Close() error {
	err := c.file.Close()
	<-c.done
	for {
		select {
		case p := <-c.scratch:
			p.Free()
		default:
			return err
		}
	}
}

// command writes one command and copies its response out. body starts after the header; at
// respOff it gets the address of the response page when resp is not empty.
func (c *Connector) command(cmd uint32, body []byte, respOff int, resp []byte) error {
	buf := make([]byte, sizeHdr+len(body))
	host.PutUint32(buf[0:], cmd)
	host.PutUint16(buf[4:], uint16(len(body)))
	host.PutUint16(buf[6:], uint16(len(resp)))
	copy(buf[sizeHdr:], body)
	var page *hostmem.Region
	if len(resp) > 0 {
		var err error
		if page, err = c.page(); err != nil {
			return err
		}
		defer c.release(page)
		clear(page.Bytes()[:len(resp)])
		host.PutUint64(buf[sizeHdr+respOff:], page.Addr())
	}
	var werr error
	if err := c.raw.Control(func(fd uintptr) {
		for {
			if _, werr = unix.Write(int(fd), buf); werr != unix.EINTR {
				return
			}
		}
	}); err != nil {
		return err
	}
	if werr != nil {
		return werr
	}
	if page != nil {
		copy(resp, page.Bytes())
	}
	return nil
}

// page is a page outside Go's heap that a command may point to; release takes it back.
func (c *Connector) page() (*hostmem.Region, error) {
	select {
	case p := <-c.scratch:
		return p, nil
	default:
		return hostmem.Alloc(os.Getpagesize())
	}
}

func (c *Connector) release(p *hostmem.Region) {
	select {
	case c.scratch <- p:
	default:
		p.Free()
	}
}

// eventLoop reads events until the file is closed. GET_EVENT is a write(2) that answers EAGAIN while
// there is none, but the descriptor only ever becomes readable, so the wait is RawConn.Read's.
func (c *Connector) eventLoop(page *hostmem.Region) {
	var cmd [sizeHdr + sizeGetEvent]byte
	host.PutUint32(cmd[0:], cmdGetEvent)
	host.PutUint16(cmd[4:], sizeGetEvent)
	host.PutUint16(cmd[6:], sizeEvent)
	host.PutUint64(cmd[8:], page.Addr())
	for {
		var werr error
		err := c.raw.Read(func(fd uintptr) bool {
			_, werr = unix.Write(int(fd), cmd[:])
			return werr != unix.EAGAIN
		})
		if err == nil && werr == nil {
			c.dispatch(parseEvent(page.Bytes()))
			continue
		}
		if err == nil && werr == unix.EINTR {
			continue
		}
		if err == nil {
			err = fmt.Errorf("ucm: reading events: %w", werr)
		} else {
			err = verbs.ErrClosed
		}
		c.mu.Lock()
		c.fail = err
		ids := c.ids
		c.ids = map[uint64]*id{}
		c.mu.Unlock()
		for _, x := range ids {
			x.end(err)
		}
		page.Free()
		close(c.done)
		return
	}
}

func (c *Connector) dispatch(ev event) {
	c.mu.Lock()
	x := c.ids[ev.uid]
	c.mu.Unlock()
	if x != nil {
		x.handle(ev)
		return
	}
	if ev.kind == evConnectRequest {
		// The listener was closed while the request was on its way.
		c.destroy(ev.id)
	}
}

// register enters an id that the kernel made, or will make, under a fresh uid.
// Uid 0 would get no events at all (ucma.c).
func (c *Connector) register(x *id) error {
	x.uid = c.uid.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fail != nil {
		return c.fail
	}
	c.ids[x.uid] = x
	return nil
}

func (c *Connector) unregister(x *id) {
	c.mu.Lock()
	delete(c.ids, x.uid)
	c.mu.Unlock()
}

func (c *Connector) create(ps uint16) (*id, error) {
	x := newID(c)
	if err := c.register(x); err != nil {
		return nil, err
	}
	var resp [sizeCreateIDResp]byte
	if err := c.command(cmdCreateID, encodeCreateID(x.uid, ps), 8, resp[:]); err != nil {
		c.unregister(x)
		return nil, fmt.Errorf("ucm: create id: %w", err)
	}
	x.handle32 = host.Uint32(resp[:])
	return x, nil
}

func encodeCreateID(uid uint64, ps uint16) []byte {
	b := make([]byte, sizeCreateID)
	host.PutUint64(b[0:], uid)
	host.PutUint16(b[16:], ps)
	b[18] = qpTypeRC
	return b
}

func (c *Connector) destroy(handle uint32) error {
	var body [sizeDestroyID]byte
	var resp [sizeDestroyIDResp]byte
	host.PutUint32(body[8:], handle)
	return c.command(cmdDestroyID, body[:], 0, resp[:])
}

// encodeResolveAddr is RESOLVE_ADDR: src may be the zero AddrPort.
func encodeResolveAddr(handle uint32, src netip.AddrPort, dst cm.Addr, scope uint32) []byte {
	b := make([]byte, sizeResolveAddr)
	host.PutUint32(b[0:], handle)
	host.PutUint32(b[4:], resolveTimeoutMS)
	if src.IsValid() {
		host.PutUint16(b[8:], uint16(putSockaddrIP(b[16:144], src, scope)))
	}
	if dst.IsIB() {
		host.PutUint16(b[10:], uint16(putSockaddrIB(b[144:], dst)))
	} else {
		host.PutUint16(b[10:], uint16(putSockaddrIP(b[144:], dst.IP, scope)))
	}
	return b
}

// Resolve implements cm.Connector.
func (c *Connector) Resolve(ctx context.Context, src netip.AddrPort, dst cm.Addr) (cm.Conn, error) {
	x, err := c.resolve(ctx, src, dst)
	if err != nil {
		return nil, err
	}
	if c.dev != nil && x.route.NodeGUID != c.guid {
		x.Close()
		return nil, fmt.Errorf("ucm: %s is reached by the device with node GUID %016x (port %d), not by %s (node GUID %016x)",
			dst, x.route.NodeGUID, x.route.Port, c.dev.Name(), c.guid)
	}
	return x, nil
}

// ResolveDevice reports the route to dst without connecting: Route.NodeGUID and Route.Port tell which
// device reaches it.
func ResolveDevice(ctx context.Context, src netip.AddrPort, dst cm.Addr) (cm.Route, error) {
	c, err := Open(nil)
	if err != nil {
		return cm.Route{}, err
	}
	defer c.Close()
	x, err := c.resolve(ctx, src, dst)
	if err != nil {
		return cm.Route{}, err
	}
	defer x.Close()
	return x.route, nil
}

func (c *Connector) resolve(ctx context.Context, src netip.AddrPort, dst cm.Addr) (_ *id, err error) {
	ps := uint16(portSpaceTCP)
	if dst.IsIB() {
		ps = portSpaceIB
		if src.IsValid() {
			return nil, fmt.Errorf("ucm: a source address (%s) does not go with an InfiniBand destination", src)
		}
	}
	scope, err := scopeID(dst.IP.Addr())
	if err != nil {
		return nil, err
	}
	x, err := c.create(ps)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			x.Close()
		}
	}()
	if err := c.command(cmdResolveAddr, encodeResolveAddr(x.handle32, src, dst, scope), 0, nil); err != nil {
		return nil, resolveError("address", dst, err)
	}
	if _, err := x.await(ctx, evAddrResolved); err != nil {
		return nil, resolveError("address", dst, err)
	}
	var rr [sizeResolveRoute]byte
	host.PutUint32(rr[0:], x.handle32)
	host.PutUint32(rr[4:], resolveTimeoutMS)
	if err := c.command(cmdResolveRoute, rr[:], 0, nil); err != nil {
		return nil, resolveError("route", dst, err)
	}
	if _, err := x.await(ctx, evRouteResolved); err != nil {
		return nil, resolveError("route", dst, err)
	}
	if err := x.query(); err != nil {
		return nil, fmt.Errorf("ucm: query route to %s: %w", dst, err)
	}
	return x, nil
}

// scopeID is the interface index of a zoned IPv6 address.
func scopeID(a netip.Addr) (uint32, error) {
	zone := a.Zone()
	if zone == "" {
		return 0, nil
	}
	// sysfs rather than net.InterfaceByName: package net would ask netlink for all of them.
	b, err := os.ReadFile("/sys/class/net/" + zone + "/ifindex")
	if err != nil {
		return 0, fmt.Errorf("ucm: address %s: there is no network interface %q", a, zone)
	}
	var n uint32
	if _, err := fmt.Sscan(string(b), &n); err != nil {
		return 0, fmt.Errorf("ucm: interface index of %q: %w", zone, err)
	}
	return n, nil
}

func resolveError(what string, dst cm.Addr, err error) error {
	hint := ""
	switch {
	case errors.Is(err, unix.ENODEV), errors.Is(err, unix.EADDRNOTAVAIL):
		hint = ": no RDMA device has the interface that leads there (ip route get, rdma link)"
	case errors.Is(err, unix.ETIMEDOUT):
		hint = ": nobody answers at that address"
	}
	return fmt.Errorf("ucm: resolve %s of %s: %w%s", what, dst, err, hint)
}

// query fills the route from QUERY's address and path options.
func (x *id) query() (err error) {
	var body [sizeQuery]byte
	host.PutUint32(body[8:], x.handle32)
	host.PutUint32(body[12:], queryAddr)
	var resp [sizeQueryAddrResp]byte
	if err := x.c.command(cmdQuery, body[:], 0, resp[:]); err != nil {
		return err
	}
	x.route.NodeGUID = wire.Uint64(resp[0:]) // __be64 in disguise (ucma_copy_iw/ib_route)
	x.route.Port = resp[8]
	x.route.PKey = host.Uint16(resp[10:])
	x.route.Local = getSockaddr(resp[16:144])
	x.route.Peer = getSockaddr(resp[144:272])
	host.PutUint32(body[12:], queryGID)
	if err := x.c.command(cmdQuery, body[:], 0, resp[:]); err != nil {
		return err
	}
	x.route.SGID = getSockaddr(resp[16:144]).GID
	x.route.DGID = getSockaddr(resp[144:272]).GID
	var path [sizeQueryPathHdr + 6*sizePathRecData]byte
	host.PutUint32(body[12:], queryPath)
	if err := x.c.command(cmdQuery, body[:], 0, path[:]); err != nil {
		return err
	}
	if n := host.Uint32(path[0:]); n > 0 {
		// The record is the SA's PathRecord, IBA vol. 1 table 208: MTU in the low 6 bits of byte 54.
		x.route.PathMTU = verbs.MTU(path[sizeQueryPathHdr+8+54] & 0x3f)
	}
	if x.c.dev != nil {
		x.route.Device = x.c.dev.Name()
		if x.route.PKey == 0 {
			// On Ethernet the kernel has no broadcast address to take it from; the queue pair uses entry 0.
			if x.route.PKey, err = x.c.dev.QueryPKey(x.route.Port, 0); err != nil {
				return err
			}
		}
		if g, err := x.c.dev.QueryGID(x.route.Port, 0); err == nil {
			x.route.LocalPortGID = g.GID
		}
	}
	return nil
}

// deadline is ctx bounded by timeout when that is positive.
func deadline(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout <= 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, timeout)
}
