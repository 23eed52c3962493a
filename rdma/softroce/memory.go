package softroce

// The memory table: which bytes a key opens, and to whom. Keys are 24 random bits that find the entry and 8 bits
// that must agree with it: random for regions, the caller's choice for windows. All of it is guarded by Device.mu, and so is
// every copy from or to registered memory: once Deregister or an invalidation has returned, no packet touches the bytes.

import (
	"fmt"
	"sync"
	"syscall"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
)

// keyed is what a key stands for: a region, or a window onto one.
type keyed struct {
	key    uint32
	pd     *protectionDomain
	access verbs.AccessFlags
	addr   uint64 // of buf[0]
	buf    []byte // what the key opens: empty for a window that is not bound
	region *region
	window *window
	bound  *queuePair // the queue pair that bound the window: a type 2 window serves no other
}

// slice is n bytes at addr, when they are inside.
func (k *keyed) slice(addr uint64, n uint32) ([]byte, bool) {
	off := addr - k.addr // wraps for an address below, and is then larger than any length
	size := uint64(len(k.buf))
	if off > size || uint64(n) > size-off {
		return nil, false
	}
	return k.buf[off : off+uint64(n) : off+uint64(n)], true
}

// MemoryLock implements verbs.MemoryLocker.
func (d *Device) MemoryLock() sync.Locker { return &d.mu }

type memoryTable struct {
	byIndex map[uint32]*keyed // by key>>8
	// found has what was asked for last, by the low bits of the index: the few keys of a connection come with every packet.
	found [64]*keyed
}

// insert gives k a fresh unpredictable key.
func (t *memoryTable) insert(k *keyed, random func() uint64) {
	for {
		key := uint32(random())
		if index := key >> 8; index != 0 && t.byIndex[index] == nil {
			k.key = key
			t.byIndex[index] = k
			return
		}
	}
}

func (t *memoryTable) find(key uint32) *keyed {
	last := &t.found[key>>8%uint32(len(t.found))]
	if k := *last; k != nil && k.key == key {
		return k
	}
	k := t.byIndex[key>>8]
	if k == nil || k.key != key {
		return nil
	}
	*last = k
	return k
}

func (t *memoryTable) remove(k *keyed) {
	delete(t.byIndex, k.key>>8)
	if last := &t.found[k.key>>8%uint32(len(t.found))]; *last == k {
		*last = nil
	}
}

func (t *memoryTable) clear() {
	clear(t.byIndex)
	clear(t.found[:])
}

// region implements verbs.MemoryRegion.
type region struct {
	d       *Device
	mem     *hostmem.Region
	entry   keyed
	windows int // bound to it
	gone    bool
}

const knownAccess = verbs.AccessLocalWrite | verbs.AccessRemoteWrite | verbs.AccessRemoteRead | verbs.AccessRemoteAtomic | verbs.AccessMWBind

func (pd *protectionDomain) RegisterMemory(mem *hostmem.Region, access verbs.AccessFlags) (verbs.MemoryRegion, error) {
	if access&^knownAccess != 0 {
		return nil, fmt.Errorf("softroce: register memory: access flags 0x%x: %w", uint32(access&^knownAccess), syscall.EINVAL)
	}
	if access&(verbs.AccessRemoteWrite|verbs.AccessRemoteAtomic) != 0 && access&verbs.AccessLocalWrite == 0 {
		return nil, fmt.Errorf("softroce: register memory: remote write needs local write: %w", syscall.EINVAL)
	}
	if mem == nil || mem.Len() == 0 {
		return nil, fmt.Errorf("softroce: register memory: no memory: %w", syscall.EINVAL)
	}
	d := pd.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := pd.usable(); err != nil {
		return nil, err
	}
	if len(d.memory.byIndex) >= maxKeys {
		return nil, fmt.Errorf("softroce: register memory: %d keys in use: %w", maxKeys, syscall.ENOMEM)
	}
	r := &region{d: d, mem: mem}
	r.entry = keyed{pd: pd, access: access, addr: mem.Addr(), buf: mem.Bytes(), region: r}
	d.memory.insert(&r.entry, d.random)
	pd.users++
	return r, nil
}

func (r *region) Addr() uint64 { return r.entry.addr }
func (r *region) Len() int     { return r.mem.Len() }
func (r *region) LKey() uint32 { return r.entry.key }

// RKey is 0 for a region that no peer may touch.
func (r *region) RKey() uint32 {
	if r.entry.access&(verbs.AccessRemoteRead|verbs.AccessRemoteWrite) == 0 {
		return 0
	}
	return r.entry.key
}

func (r *region) Deregister() error {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	if r.gone || r.d.closed {
		return verbs.ErrClosed
	}
	if r.windows > 0 {
		return fmt.Errorf("softroce: deregister memory: %d windows are bound to it: %w", r.windows, syscall.EBUSY)
	}
	r.gone = true
	r.d.memory.remove(&r.entry)
	r.entry.buf = nil
	r.entry.pd.users--
	return nil
}

// window implements verbs.MemoryWindow.
type window struct {
	d     *Device
	entry keyed
	onto  *region
	gone  bool
}

func (pd *protectionDomain) AllocMW() (verbs.MemoryWindow, error) {
	d := pd.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := pd.usable(); err != nil {
		return nil, err
	}
	if len(d.memory.byIndex) >= maxKeys {
		return nil, fmt.Errorf("softroce: allocate memory window: %d keys in use: %w", maxKeys, syscall.ENOMEM)
	}
	w := &window{d: d}
	w.entry = keyed{pd: pd, window: w}
	d.memory.insert(&w.entry, d.random)
	pd.users++
	return w, nil
}

func (w *window) RKey() uint32 {
	w.d.mu.Lock()
	defer w.d.mu.Unlock()
	return w.entry.key
}

func (w *window) unbind() {
	if w.onto != nil {
		w.onto.windows--
		w.onto = nil
	}
	w.entry.buf, w.entry.access, w.entry.bound = nil, 0, nil
}

func (w *window) Dealloc() error {
	w.d.mu.Lock()
	defer w.d.mu.Unlock()
	if w.gone || w.d.closed {
		return verbs.ErrClosed
	}
	w.gone = true
	w.unbind()
	w.d.memory.remove(&w.entry)
	w.entry.pd.users--
	return nil
}

// The methods of rc.Memory: what the keys open for one queue pair.

func (q *queuePair) Local(lkey uint32, addr uint64, length uint32, write bool) ([]byte, bool) {
	k := q.d.memory.find(lkey)
	if k == nil || k.region == nil || k.pd != q.pd || write && k.access&verbs.AccessLocalWrite == 0 {
		return nil, false
	}
	return k.slice(addr, length)
}

func (q *queuePair) Remote(rkey uint32, addr uint64, length uint32, access verbs.AccessFlags) ([]byte, bool) {
	k := q.d.memory.find(rkey)
	if k == nil || k.pd != q.pd || k.access&access != access || k.window != nil && k.bound != q {
		return nil, false
	}
	return k.slice(addr, length)
}

// Invalidate revokes a window's key. Regions live until Deregister.
func (q *queuePair) Invalidate(rkey uint32, byPeer bool) bool {
	k := q.d.memory.find(rkey)
	if k == nil || k.window == nil || k.pd != q.pd || k.bound != q {
		return false
	}
	k.window.unbind()
	return true
}

// Bind executes a type 2 bind (IBA vol. 1, 10.6.7.2.6 and 11.6 "Post Send": bind checks).
func (q *queuePair) Bind(b *verbs.BindMW) bool {
	w, ok := b.Window.(*window)
	if !ok || w.gone || w.d != q.d || w.entry.pd != q.pd {
		return false
	}
	r, ok := b.Region.(*region)
	if !ok || r.gone || r.d != q.d || r.entry.pd != q.pd || r.entry.access&verbs.AccessMWBind == 0 {
		return false
	}
	switch {
	case w.onto != nil: // a bound window must be invalidated first
		return false
	case b.RKey>>8 != w.entry.key>>8 || b.RKey == w.entry.key:
		return false
	case b.Access&^(verbs.AccessRemoteRead|verbs.AccessRemoteWrite) != 0:
		return false
	case b.Access&verbs.AccessRemoteWrite != 0 && r.entry.access&verbs.AccessLocalWrite == 0:
		return false
	case b.Length == 0 || b.Length > uint64(r.Len()) || b.Addr-r.entry.addr > uint64(r.Len())-b.Length:
		return false
	}
	off := b.Addr - r.entry.addr
	w.entry.buf = r.entry.buf[off : off+b.Length : off+b.Length]
	w.entry.addr, w.entry.access, w.entry.key, w.entry.bound = b.Addr, b.Access, b.RKey, q
	w.onto = r
	r.windows++
	return true
}

// Inline is the caller's memory that an inline send copies during PostSend.
func (q *queuePair) Inline(addr uint64, length uint32) ([]byte, bool) {
	if addr == 0 {
		return nil, false
	}
	return bytesAt(addr, int(length)), true
}
