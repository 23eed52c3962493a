package uverbs

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/provider"
)

// protectionDomain implements verbs.ProtectionDomain.
type protectionDomain struct {
	ctx    *Context
	handle uint32
	once   closeOnce
}

// closeOnce lets one destruction succeed and tells later ones.
type closeOnce struct {
	mu   sync.Mutex
	done bool // guarded by mu
}

// do runs f unless it has succeeded before.
func (o *closeOnce) do(f func() error) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.done {
		return verbs.ErrClosed
	}
	err := f()
	o.done = err == nil || errors.Is(err, verbs.ErrDeviceGone)
	return err
}

// AllocPD implements verbs.Context.
func (c *Context) AllocPD() (verbs.ProtectionDomain, error) {
	h, err := c.dev.AllocPD()
	if err != nil {
		return nil, c.fail("allocate protection domain", err)
	}
	pd := &protectionDomain{ctx: c, handle: h}
	if err := enter(c, c.pds, pd); err != nil {
		pd.Dealloc()
		return nil, err
	}
	return pd, nil
}

func (pd *protectionDomain) Context() verbs.Context { return pd.ctx }

// Dealloc implements verbs.ProtectionDomain.
func (pd *protectionDomain) Dealloc() error {
	return pd.once.do(func() error {
		if err := pd.ctx.k.DeallocPD(pd.handle); err != nil {
			return pd.ctx.fail("deallocate protection domain", err)
		}
		leave(pd.ctx, pd.ctx.pds, pd)
		return nil
	})
}

// memoryRegion implements verbs.MemoryRegion. It keeps the memory from being collected, not from being freed.
type memoryRegion struct {
	ctx        *Context
	mem        *hostmem.Region
	addr       uint64
	len        int
	handle     uint32
	lkey, rkey uint32
	once       closeOnce
}

// RegisterMemory implements verbs.ProtectionDomain.
func (pd *protectionDomain) RegisterMemory(mem *hostmem.Region, access verbs.AccessFlags) (verbs.MemoryRegion, error) {
	c := pd.ctx
	r, err := c.k.RegMR(pd.handle, mem.Addr(), uint64(mem.Len()), uint32(access))
	if err != nil {
		doing := fmt.Sprintf("register %d bytes", mem.Len())
		if err == syscall.ENOMEM || err == syscall.EPERM {
			doing += memlockHint(mem.Len())
		}
		return nil, c.fail(doing, err)
	}
	mr := &memoryRegion{ctx: c, mem: mem, addr: mem.Addr(), len: mem.Len(), handle: r.MRHandle, lkey: r.LKey, rkey: r.RKey}
	if err := enter(c, c.other, interface{ drop() error }(mr)); err != nil {
		mr.Deregister()
		return nil, err
	}
	return mr, nil
}

// memlockHint says what ENOMEM and EPERM mean here: pinned pages count against RLIMIT_MEMLOCK (umem.c).
func memlockHint(size int) string {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim) != nil || lim.Cur == math.MaxUint64 {
		return ""
	}
	return fmt.Sprintf(" (the limit on locked memory, ulimit -l, is %d KiB for all regions together; raise it or grant CAP_IPC_LOCK)", lim.Cur>>10)
}

func (mr *memoryRegion) Addr() uint64 { return mr.addr }
func (mr *memoryRegion) Len() int     { return mr.len }
func (mr *memoryRegion) LKey() uint32 { return mr.lkey }
func (mr *memoryRegion) RKey() uint32 { return mr.rkey }
func (mr *memoryRegion) drop() error  { return mr.Deregister() }

// Deregister implements verbs.MemoryRegion.
func (mr *memoryRegion) Deregister() error {
	return mr.once.do(func() error {
		if err := mr.ctx.k.DeregMR(mr.handle); err != nil {
			return mr.ctx.fail("deregister memory", err)
		}
		leave(mr.ctx, mr.ctx.other, interface{ drop() error }(mr))
		return nil
	})
}

// memoryWindow implements verbs.MemoryWindow and provider.Window.
type memoryWindow struct {
	ctx    *Context
	handle uint32
	rkey   atomic.Uint32
	once   closeOnce
}

// AllocMW implements verbs.ProtectionDomain.
func (pd *protectionDomain) AllocMW() (verbs.MemoryWindow, error) {
	c := pd.ctx
	r, err := c.k.AllocMW(pd.handle)
	if err != nil {
		if err == syscall.EOPNOTSUPP || err == syscall.ENOSYS {
			return nil, verbs.ErrNotSupported
		}
		return nil, c.fail("allocate memory window", err)
	}
	mw := &memoryWindow{ctx: c, handle: r.MWHandle}
	mw.rkey.Store(r.RKey)
	if err := enter(c, c.other, interface{ drop() error }(mw)); err != nil {
		mw.Dealloc()
		return nil, err
	}
	return mw, nil
}

func (mw *memoryWindow) RKey() uint32      { return mw.rkey.Load() }
func (mw *memoryWindow) Bound(rkey uint32) { mw.rkey.Store(rkey) }
func (mw *memoryWindow) drop() error       { return mw.Dealloc() }

// Dealloc implements verbs.MemoryWindow.
func (mw *memoryWindow) Dealloc() error {
	return mw.once.do(func() error {
		if err := mw.ctx.k.DeallocMW(mw.handle); err != nil {
			return mw.ctx.fail("deallocate memory window", err)
		}
		leave(mw.ctx, mw.ctx.other, interface{ drop() error }(mw))
		return nil
	})
}

var (
	_ verbs.ProtectionDomain = (*protectionDomain)(nil)
	_ verbs.MemoryRegion     = (*memoryRegion)(nil)
	_ provider.Window        = (*memoryWindow)(nil)
)
