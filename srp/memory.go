package srp

import (
	"fmt"
	"math/bits"
	"sort"
	"sync"
	"sync/atomic"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
)

// Memory is memory that targets may read and write: data of commands that lie in it
// move without a copy. It outlives reconnects.
type Memory struct {
	region *hostmem.Region
	mr     verbs.MemoryRegion
	base   uint64
	lkey   uint32
	rkey   uint32
	own    *memories
}

// Bytes is the whole of it.
func (m *Memory) Bytes() []byte { return m.region.Bytes() }

// Free deregisters and unmaps the memory. No command may be using it.
func (m *Memory) Free() error {
	m.own.remove(m)
	if err := m.mr.Deregister(); err != nil {
		return fmt.Errorf("srp: deregister %d bytes: %w", m.region.Len(), err)
	}
	return m.region.Free()
}

const dataAccess = verbs.AccessLocalWrite | verbs.AccessRemoteRead | verbs.AccessRemoteWrite

func register(pd verbs.ProtectionDomain, size int, access verbs.AccessFlags) (*Memory, error) {
	region, err := hostmem.Alloc(size)
	if err != nil {
		return nil, err
	}
	mr, err := pd.RegisterMemory(region, access)
	if err != nil {
		region.Free()
		return nil, fmt.Errorf("srp: register %d bytes with %s: %w", size, pd.Context().Name(), err)
	}
	return &Memory{region: region, mr: mr, base: mr.Addr(), lkey: mr.LKey(), rkey: mr.RKey()}, nil
}

// memories are a session's registered memories in order of address. Readers
// do not lock: the slice is replaced, never changed.
type memories struct {
	mu   sync.Mutex
	list atomic.Pointer[[]*Memory]
}

func (ms *memories) load() []*Memory {
	if p := ms.list.Load(); p != nil {
		return *p
	}
	return nil
}

func (ms *memories) add(m *Memory) {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	m.own = ms
	l := append([]*Memory{m}, ms.load()...)
	sort.Slice(l, func(i, j int) bool { return l[i].base < l[j].base })
	ms.list.Store(&l)
}

func (ms *memories) remove(m *Memory) {
	if ms == nil {
		return
	}
	ms.mu.Lock()
	defer ms.mu.Unlock()
	var l []*Memory
	for _, o := range ms.load() {
		if o != m {
			l = append(l, o)
		}
	}
	ms.list.Store(&l)
}

// find is the memory that b lies in as a whole, or nil.
func (ms *memories) find(b []byte) *Memory {
	addr := addressOf(b)
	l := ms.load()
	lo, hi := 0, len(l)
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if l[mid].base <= addr {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo == 0 {
		return nil
	}
	m := l[lo-1]
	if addr-m.base+uint64(len(b)) > uint64(m.mr.Len()) {
		return nil
	}
	return m
}

func (ms *memories) freeAll() (err error) {
	for _, m := range ms.load() {
		if e := m.Free(); e != nil && err == nil {
			err = e
		}
	}
	return err
}

// bounceUnit is the granularity of bounce memory.
const bounceUnit = 4096

// bouncePool hands out contiguous pieces of one registered memory, for data that do not lie in
// registered memory. It belongs to a channel and is used under its lock.
type bouncePool struct {
	mem  *Memory
	used []uint64 // one bit per unit
	free int      // units
	next int      // where the last search ended
}

func (p *bouncePool) init(m *Memory) {
	n := m.region.Len() / bounceUnit
	p.mem, p.free = m, n
	p.used = make([]uint64, (n+63)/64)
	for i := n; i < len(p.used)*64; i++ { // units that do not exist are never free
		p.used[i/64] |= 1 << (i % 64)
	}
}

func unitsOf(size int) int { return (size + bounceUnit - 1) / bounceUnit }

// take finds room for size bytes and returns its first unit, or -1 when there is none now.
func (p *bouncePool) take(size int) int {
	n := unitsOf(size)
	if n > p.free {
		return -1
	}
	total := len(p.used) * 64
	at := p.find(p.next, total, n)
	if at < 0 {
		at = p.find(0, min(p.next+n, total), n)
	}
	if at < 0 {
		return -1
	}
	p.mark(at, n, true)
	p.free -= n
	p.next = at + n
	if p.next >= total {
		p.next = 0
	}
	return at
}

// find looks for n free units in [from, to), skipping words that are full.
func (p *bouncePool) find(from, to, n int) int {
	run := 0
	for i := from; i < to; {
		if w := p.used[i/64] >> (i % 64); w&1 != 0 {
			run = 0
			i += bits.TrailingZeros64(^w) // all ones from here: the shift brought in zeros, so this is at least 1
			continue
		}
		if run++; run == n {
			return i - n + 1
		}
		i++
	}
	return -1
}

func (p *bouncePool) mark(at, n int, set bool) {
	for i := at; i < at+n; i++ {
		if set {
			p.used[i/64] |= 1 << (i % 64)
		} else {
			p.used[i/64] &^= 1 << (i % 64)
		}
	}
}

func (p *bouncePool) give(at, size int) {
	n := unitsOf(size)
	p.mark(at, n, false)
	p.free += n
}

func (p *bouncePool) bytes(at, size int) []byte { return p.mem.region.Slice(at*bounceUnit, size) }
