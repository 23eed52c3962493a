package lun

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/srp/scsi"
)

var be = binary.BigEndian

// Limits of a unit, with their reasons.
const (
	// MaxNexuses bounds what strangers can make a unit remember.
	MaxNexuses = 1024
	// MaxRegistrations keeps READ FULL STATUS within ScratchLen.
	MaxRegistrations = 64
	// ScratchLen is the buffer that Begin composes data-in in; no reply is longer.
	ScratchLen = 8192
	// MaxUnmapExtents keeps an UNMAP parameter list below ScratchLen.
	MaxUnmapExtents = 256
	// WholeLen is the largest data-out that a command may need in one piece (COMPARE AND WRITE of MaxCompareAndWrite blocks).
	WholeLen = 256 << 10
	// maxUA is how many unit attentions a nexus can have pending; a further one is dropped, as SAM-5 5.14 allows.
	maxUA = 16
	// stripes of 1 MiB share locks.
	stripes     = 64
	stripeShift = 20
)

// Config says how a unit presents itself. Zero values are good defaults.
type Config struct {
	BlockSize uint32 // bytes; 0: 512
	Vendor    string // "": "SRP-EMU"
	Product   string // "": by the store's kind
	Revision  string // "": "0001"
	Serial    string // "": "0"
	// NAA is the unit's worldwide name, NAA locally assigned form; 0: made from Serial.
	NAA uint64
	// PowerOn makes each nexus's first command report POWER ON, RESET, OR BUS DEVICE RESET OCCURRED.
	PowerOn bool
	// Limits replaces page B0h when not nil; the unit enforces what it says.
	Limits *scsi.BlockLimits
}

// Unit is one logical unit.
type Unit struct {
	// Read-only after New.
	store     Store
	slow      Slow // store, if it is
	cfg       Config
	blockSize uint32
	shift     uint8
	blocks    uint64
	limits    scsi.BlockLimits
	readOnly  bool

	locks [stripes]sync.RWMutex // hold writes apart from each other and from reads, by stripe of the store

	flusher flusher

	directMu sync.Mutex // guards direct and, while held, keeps COMPARE AND WRITE apart from direct writes
	direct   []extent   // direct writes in flight

	reserved  atomic.Bool // a reservation exists: the slow path must look
	writeBack atomic.Bool // WCE
	swp       atomic.Bool // software write protect
	descSense atomic.Bool // D_SENSE

	mu      sync.Mutex
	nexuses map[[16]byte]*Nexus // guarded by mu
	pr      reservations        // guarded by mu
}

type extent struct{ off, n int64 }

// New makes a unit over store.
func New(store Store, cfg Config) (*Unit, error) {
	cfg.BlockSize = cmp.Or(cfg.BlockSize, 512)
	if cfg.BlockSize != 512 && cfg.BlockSize != 4096 {
		return nil, fmt.Errorf("lun: block size %d; want 512 or 4096", cfg.BlockSize)
	}
	cfg.Vendor = cmp.Or(cfg.Vendor, "SRP-EMU")
	cfg.Product = cmp.Or(cfg.Product, store.Kind()+" disk")
	cfg.Revision = cmp.Or(cfg.Revision, "0001")
	cfg.Serial = cmp.Or(cfg.Serial, "0")
	u := &Unit{store: store, cfg: cfg, blockSize: cfg.BlockSize, nexuses: map[[16]byte]*Nexus{}, readOnly: store.ReadOnly()}
	u.slow, _ = store.(Slow)
	u.shift = 9
	if cfg.BlockSize == 4096 {
		u.shift = 12
	}
	u.blocks = uint64(store.Size()) >> u.shift
	if u.blocks == 0 {
		return nil, fmt.Errorf("lun: %s is smaller than one block of %d bytes", store, cfg.BlockSize)
	}
	if cfg.NAA == 0 {
		// NAA 3, locally assigned: the serial number folded to 60 bits (FNV-1a).
		h := uint64(14695981039346656037)
		for _, c := range []byte(cfg.Serial) {
			h = (h ^ uint64(c)) * 1099511628211
		}
		u.cfg.NAA = 3<<60 | h>>4
	}
	if cfg.Limits != nil {
		u.limits = *cfg.Limits
	} else {
		u.limits = scsi.BlockLimits{
			WSNZ:                    true,
			MaxCompareAndWrite:      uint8(min(255, WholeLen/2>>u.shift)),
			OptimalGranularity:      uint16(4096 >> u.shift),
			OptimalTransfer:         1 << 20 >> u.shift,
			MaxUnmapBlocks:          1 << 30 >> u.shift,
			MaxUnmapDescriptors:     MaxUnmapExtents,
			OptimalUnmapGranularity: uint32(4096 >> u.shift),
			UnmapAlignmentValid:     true,
			MaxWriteSame:            256 << 20 >> u.shift,
		}
	}
	u.writeBack.Store(store.WriteBack())
	return u, nil
}

// Store is what the unit is over.
func (u *Unit) Store() Store { return u.store }

// Slow reports that chunks and Finish methods of the unit's tasks may take as long as a disk does.
func (u *Unit) Slow() bool { return u.slow != nil }

// BlockSize is in bytes.
func (u *Unit) BlockSize() uint32 { return u.blockSize }

// Blocks is the number of logical blocks.
func (u *Unit) Blocks() uint64 { return u.blocks }

// Regions is the store's device-visible memory.
func (u *Unit) Regions() []*hostmem.Region { return u.store.Regions() }

// AddMemoryLock makes every change of the store's memory hold l as well, in whole blocks: for a device that reads Regions a packet at a
// time under l, so that no packet carries a part of a block's change. Call it before the device reads.
func (u *Unit) AddMemoryLock(l sync.Locker) {
	if r, ok := u.store.(*ram); ok {
		r.locks.add(l)
	}
}

// RemoveMemoryLock undoes AddMemoryLock, when the device reads no more.
func (u *Unit) RemoveMemoryLock(l sync.Locker) {
	if r, ok := u.store.(*ram); ok {
		r.locks.remove(l)
	}
}

// Close closes the store, when what SYNCHRONIZE CACHE with IMMED has begun is done.
func (u *Unit) Close() error { return errors.Join(u.flusher.close(), u.store.Close()) }

// flush makes what was written durable. An error of a flush that nobody waited for comes out here: the operating system tells it once.
func (u *Unit) flush() error { return u.flusher.flush(u.store) }

// Nexus is one initiator port's view of a unit (an I_T_L nexus). It is kept while the unit lives or until
// room is needed and nobody uses it, so that registrations outlive a lost connection.
type Nexus struct {
	unit *Unit
	port [16]byte

	pending atomic.Int32 // unit attentions waiting

	// Guarded by unit.mu.
	ua       []scsi.ASC
	attached int
	key      uint64 // persistent reservation key, 0: not registered
}

// Unit is the logical unit of the nexus.
func (n *Nexus) Unit() *Unit { return n.unit }

// Attach finds or makes the nexus of an initiator port; nil when the unit knows too many.
func (u *Unit) Attach(port [16]byte) *Nexus {
	u.mu.Lock()
	defer u.mu.Unlock()
	n := u.nexuses[port]
	if n == nil {
		if n = u.newNexusLocked(port); n == nil {
			return nil
		}
	}
	n.attached++
	return n
}

func (u *Unit) newNexusLocked(port [16]byte) *Nexus {
	if len(u.nexuses) >= MaxNexuses {
		for p, old := range u.nexuses {
			if old.attached == 0 && old.key == 0 {
				delete(u.nexuses, p)
				break
			}
		}
		if len(u.nexuses) >= MaxNexuses {
			return nil
		}
	}
	n := &Nexus{unit: u, port: port}
	u.nexuses[port] = n
	if u.cfg.PowerOn {
		n.establishLocked(scsi.ASCPowerOn)
	}
	return n
}

// Detach undoes one Attach.
func (n *Nexus) Detach() {
	n.unit.mu.Lock()
	n.attached--
	n.unit.mu.Unlock()
}

// Establish makes asc pending for the nexus: its next command reports it (SAM-5, 5.14).
func (n *Nexus) Establish(asc scsi.ASC) {
	n.unit.mu.Lock()
	n.establishLocked(asc)
	n.unit.mu.Unlock()
}

func (n *Nexus) establishLocked(asc scsi.ASC) {
	if slices.Contains(n.ua, asc) || len(n.ua) >= maxUA {
		return
	}
	n.ua = append(n.ua, asc)
	n.pending.Store(int32(len(n.ua)))
}

// takeUA takes the oldest pending unit attention.
func (n *Nexus) takeUA() (asc scsi.ASC, ok bool) {
	n.unit.mu.Lock()
	defer n.unit.mu.Unlock()
	if len(n.ua) == 0 {
		return 0, false
	}
	asc = n.ua[0]
	n.ua = slices.Delete(n.ua, 0, 1)
	n.pending.Store(int32(len(n.ua)))
	return asc, true
}

// EstablishAll makes asc pending for every nexus but except (which may be nil).
func (u *Unit) EstablishAll(asc scsi.ASC, except *Nexus) {
	u.mu.Lock()
	u.establishAllLocked(asc, except)
	u.mu.Unlock()
}

func (u *Unit) establishAllLocked(asc scsi.ASC, except *Nexus) {
	for _, n := range u.nexuses {
		if n != except {
			n.establishLocked(asc)
		}
	}
}

// Reset is a logical unit reset: mode parameters go back to their defaults and every nexus will hear of it, by's too
// (SAM-5, 6.3.3). Persistent reservations stay. The transport has aborted the tasks.
func (u *Unit) Reset() {
	u.writeBack.Store(u.store.WriteBack())
	u.swp.Store(false)
	u.descSense.Store(false)
	u.EstablishAll(scsi.ASCBusDeviceReset, nil)
}

// lock holds the stripes of n bytes at off, in ascending order so that two callers cannot wait for each other.
func (u *Unit) lock(off, n int64, write bool) {
	a, b := u.stripeRange(off, n)
	for i := range stripes {
		if inStripes(i, a, b) {
			if write {
				u.locks[i].Lock()
			} else {
				u.locks[i].RLock()
			}
		}
		if b < stripes && i >= b {
			break
		}
	}
}

func (u *Unit) unlock(off, n int64, write bool) {
	a, b := u.stripeRange(off, n)
	for i := range stripes {
		if inStripes(i, a, b) {
			if write {
				u.locks[i].Unlock()
			} else {
				u.locks[i].RUnlock()
			}
		}
		if b < stripes && i >= b {
			break
		}
	}
}

// tryRLock is lock for reading, unless it would have to wait.
func (u *Unit) tryRLock(off, n int64) bool {
	a, b := u.stripeRange(off, n)
	for i := range stripes {
		if inStripes(i, a, b) && !u.locks[i].TryRLock() {
			for j := range i {
				if inStripes(j, a, b) {
					u.locks[j].RUnlock()
				}
			}
			return false
		}
	}
	return true
}

// stripeRange gives the first and the last stripe, the latter beyond stripes when the range wraps.
func (u *Unit) stripeRange(off, n int64) (a, b int) {
	first, last := off>>stripeShift, (off+max(n, 1)-1)>>stripeShift
	if last-first >= stripes-1 {
		return 0, stripes - 1
	}
	a = int(first % stripes)
	return a, a + int(last-first)
}

func inStripes(i, a, b int) bool { return i >= a && i <= b || i+stripes <= b }

// beginDirect notes a direct write, so that COMPARE AND WRITE sees it.
func (u *Unit) beginDirect(off, n int64) {
	u.directMu.Lock()
	u.direct = append(u.direct, extent{off, n})
	u.directMu.Unlock()
}

func (u *Unit) endDirect(off, n int64) {
	u.directMu.Lock()
	if i := slices.Index(u.direct, extent{off, n}); i >= 0 {
		u.direct[i] = u.direct[len(u.direct)-1]
		u.direct = u.direct[:len(u.direct)-1]
	}
	u.directMu.Unlock()
}

func (u *Unit) overlapsDirectLocked(off, n int64) bool {
	for _, e := range u.direct {
		if off < e.off+e.n && e.off < off+n {
			return true
		}
	}
	return false
}

// Map is the logical units of a target by number.
type Map struct {
	mu    sync.RWMutex
	units map[uint32]*Unit
	// Simple reports numbers of 256 and up without an addressing method, as Linux LIO does, instead of flat space addressing.
	Simple bool
}

// Add gives u the number n.
func (m *Map) Add(n uint32, u *Unit) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.units == nil {
		m.units = map[uint32]*Unit{}
	}
	if m.units[n] != nil {
		return fmt.Errorf("number %d is taken; each unit wants one of its own", n)
	}
	if len(m.units) >= ScratchLen/8-1 {
		return fmt.Errorf("there are %d units, which is the limit", ScratchLen/8-1)
	}
	m.units[n] = u
	return nil
}

// Remove takes number n away.
func (m *Map) Remove(n uint32) {
	m.mu.Lock()
	delete(m.units, n)
	m.mu.Unlock()
}

// Find is the unit of a number, nil for none.
func (m *Map) Find(n uint32) *Unit {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.units[n]
}

// Numbers lists the numbers in ascending order.
func (m *Map) Numbers() []uint32 {
	m.mu.RLock()
	defer m.mu.RUnlock()
	out := make([]uint32, 0, len(m.units))
	for n := range m.units {
		out = append(out, n)
	}
	slices.Sort(out)
	return out
}

// Encode is the LUN under which the map reports n.
func (m *Map) Encode(n uint32) scsi.LUN {
	if m.Simple && n <= scsi.MaxFlatLUN {
		return scsi.NewSimpleLUN(uint16(n))
	}
	return scsi.NewLUN(n)
}

// list is the REPORT LUNS inventory. LUN 0 is listed whether it exists or not: without it an initiator would not look further (SPC-4, 6.33).
func (m *Map) list() []scsi.LUN {
	nums := m.Numbers()
	out := make([]scsi.LUN, 0, len(nums))
	for _, n := range nums {
		out = append(out, m.Encode(n))
	}
	return out
}
