package disk

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"srp-initiator/srp"
	"srp-initiator/srp/scsi"
)

// Policy chooses the path of a request.
type Policy uint8

const (
	RoundRobin Policy = iota // paths in turn
	LeastQueue               // the path with the fewest requests under way
)

// ParsePolicy reads a policy's name.
func ParsePolicy(s string) (Policy, error) {
	switch s {
	case "round-robin":
		return RoundRobin, nil
	case "least-queue":
		return LeastQueue, nil
	}
	return 0, fmt.Errorf("path policy %q: want round-robin or least-queue", s)
}

// probeInterval is how long a failed path is left alone.
const probeInterval = time.Second

// maxPaths fits the set of paths that one request has tried into a word.
const maxPaths = 64

// Multipath is one logical unit over several sessions. A request that fails because its path is lost is made
// again on another: reads and writes of given blocks may be executed twice. It returns an error only when no path
// is left. A session tells of a lost path after its fast_io_fail_tmo: keep that short.
type Multipath struct {
	paths  []*path
	policy Policy
	turn   atomic.Uint32
}

type path struct {
	disk   *Disk
	active atomic.Int64
	downAt atomic.Int64 // when it failed, ns since began; 0: it works
	failed atomic.Uint64
	sent   atomic.Uint64
}

// PathStats are one path's counters.
type PathStats struct {
	Requests uint64 `json:"requests"`
	Failures uint64 `json:"failures"`
	Up       bool   `json:"up"`
}

// NewMultipath joins paths that must lead to the same logical unit: their identifiers (VPD page 83h, else 80h) are compared.
func NewMultipath(ctx context.Context, disks []*Disk, p Policy) (*Multipath, error) {
	if len(disks) < 2 {
		return nil, fmt.Errorf("disk: multipath needs two paths or more, not %d", len(disks))
	}
	if len(disks) > maxPaths {
		return nil, fmt.Errorf("disk: %d paths; at most %d", len(disks), maxPaths)
	}
	m := &Multipath{policy: p}
	var id string
	for i, d := range disks {
		x, err := d.identity(ctx)
		if err != nil {
			return nil, fmt.Errorf("path %d: %w", i, err)
		}
		if i == 0 {
			id = x
		}
		if x != id || d.Size() != disks[0].Size() || d.BlockSize() != disks[0].BlockSize() {
			return nil, fmt.Errorf("disk: path %d leads to another unit (%s, %d bytes) than path 0 (%s, %d bytes)", i, x, d.Size(), id, disks[0].Size())
		}
		m.paths = append(m.paths, &path{disk: d})
	}
	return m, nil
}

// identity names the unit in a way that is the same on every path.
func (d *Disk) identity(ctx context.Context) (string, error) {
	if v, err := d.unit.VPD(ctx, scsi.VPDDeviceID); err == nil {
		if ds, err := v.Designators(); err == nil {
			best := ""
			for _, x := range ds {
				if x.Association == scsi.AssocLUN && (best == "" || x.Type == scsi.DesignatorNAA) {
					best = x.String()
				}
			}
			if best != "" {
				return best, nil
			}
		}
	}
	v, err := d.unit.VPD(ctx, scsi.VPDSerialNumber)
	if err != nil {
		return "", fmt.Errorf("the unit has no identifier by which paths could be compared: %w", err)
	}
	return v.SerialNumber(), nil
}

// isPathError reports that a request failed for its path, not for what it asked.
func isPathError(err error) bool {
	return errors.Is(err, srp.ErrConnectionLost) || errors.Is(err, srp.ErrFailFast) || errors.Is(err, srp.ErrDeviceLost) || errors.Is(err, srp.ErrClosed) ||
		errors.Is(err, srp.ErrAborted) || errors.Is(err, srp.ErrNotSent)
}

// pick chooses a path that works and is not in tried; a failed one only when there is no other, or once in a while to see whether it is back.
func (m *Multipath) pick(tried uint64) int {
	now := int64(time.Since(clock)) + 1
	n := len(m.paths)
	first := int(m.turn.Add(1)&0xffffff) % n
	best, fallback := -1, -1
	for k := range n {
		i := (first + k) % n
		if tried&(1<<i) != 0 {
			continue
		}
		p := m.paths[i]
		st, _ := p.disk.unit.Session.State()
		down := p.downAt.Load()
		if st != srp.Running || down != 0 && now-down < int64(probeInterval) {
			if fallback < 0 || st == srp.Running {
				fallback = i
			}
			continue
		}
		if best < 0 || m.policy == LeastQueue && p.active.Load() < m.paths[best].active.Load() {
			best = i
		}
	}
	if best < 0 {
		return fallback
	}
	return best
}

var clock = time.Now()

// on runs f on one path after another until one does not fail for the path.
func (m *Multipath) on(ctx context.Context, f func(*Disk) error) error {
	var tried uint64
	var last error
	for {
		i := m.pick(tried)
		if i < 0 {
			return fmt.Errorf("disk: no path left: %w", last)
		}
		tried |= 1 << i
		p := m.paths[i]
		p.sent.Add(1)
		p.active.Add(1)
		err := f(p.disk)
		p.active.Add(-1)
		if err == nil || !isPathError(err) || ctx.Err() != nil {
			if err == nil {
				p.downAt.Store(0)
			}
			return err
		}
		p.failed.Add(1)
		p.downAt.Store(int64(time.Since(clock)) + 1)
		last = err
	}
}

// Stats are the paths' counters, in the order of NewMultipath.
func (m *Multipath) Stats() (out []PathStats) {
	for _, p := range m.paths {
		st, _ := p.disk.unit.Session.State()
		out = append(out, PathStats{Requests: p.sent.Load(), Failures: p.failed.Load(), Up: st == srp.Running && p.downAt.Load() == 0})
	}
	return out
}

// Size is the capacity in bytes.
func (m *Multipath) Size() int64 { return m.paths[0].disk.Size() }

// BlockSize is the logical block size in bytes.
func (m *Multipath) BlockSize() int { return m.paths[0].disk.BlockSize() }

// ReadOnly reports a write-protected unit.
func (m *Multipath) ReadOnly() bool { return m.paths[0].disk.ReadOnly() }

// CanDiscard reports that Discard does something.
func (m *Multipath) CanDiscard() bool { return m.paths[0].disk.CanDiscard() }

// Poll polls the sessions of all paths.
func (m *Multipath) Poll(budget int) (work int, supported bool) {
	for _, p := range m.paths {
		w, _ := p.disk.Poll(budget)
		work += w
	}
	return work, true
}

// ReadAt is io.ReaderAt.
func (m *Multipath) ReadAt(p []byte, off int64) (int, error) {
	return m.ReadAtContext(context.Background(), p, off)
}

// ReadAtContext reads on one path.
func (m *Multipath) ReadAtContext(ctx context.Context, p []byte, off int64) (n int, err error) {
	err = m.on(ctx, func(d *Disk) (err error) { n, err = d.ReadAtContext(ctx, p, off); return err })
	return n, err
}

// WriteAt is io.WriterAt.
func (m *Multipath) WriteAt(p []byte, off int64) (int, error) {
	return m.WriteAtContext(context.Background(), p, off, false)
}

// WriteAtContext writes on one path.
func (m *Multipath) WriteAtContext(ctx context.Context, p []byte, off int64, fua bool) (n int, err error) {
	err = m.on(ctx, func(d *Disk) (err error) { n, err = d.WriteAtContext(ctx, p, off, fua); return err })
	return n, err
}

// Sync syncs the unit's cache, which is the same on every path.
func (m *Multipath) Sync(ctx context.Context) error {
	return m.on(ctx, func(d *Disk) error { return d.Sync(ctx) })
}

// Discard is Disk.Discard on one path.
func (m *Multipath) Discard(ctx context.Context, off, n int64) error {
	return m.on(ctx, func(d *Disk) error { return d.Discard(ctx, off, n) })
}

// WriteZeros is Disk.WriteZeros on one path.
func (m *Multipath) WriteZeros(ctx context.Context, off, n int64, mayUnmap bool) error {
	return m.on(ctx, func(d *Disk) error { return d.WriteZeros(ctx, off, n, mayUnmap) })
}
