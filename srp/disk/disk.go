package disk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"srp-initiator/completion"
	"srp-initiator/srp"
	"srp-initiator/srp/scsi"
)

// window is how many commands one ReadAt or WriteAt has under way.
const window = 8

// Disk is a logical unit as a block device. ReadAt and WriteAt take any offset and length: parts of blocks are
// written by reading the block, changing it and writing it back, one such write at a time per Disk;
// other users of the unit are not kept out meanwhile. Its methods are safe for concurrent use.
type Disk struct {
	unit      Unit
	inquiry   scsi.InquiryData
	blockSize int
	shift     int
	blocks    atomic.Uint64
	maxBytes  int // per command
	limits    scsi.BlockLimits
	prov      scsi.Provisioning
	thin      bool
	readZero  bool
	readOnly  bool
	fua       bool
	cache     bool

	depth   chan struct{} // max_cmd_per_lun, nil: no limit
	partial chan struct{} // one read-modify-write at a time
	turn    atomic.Uint32
	free    sync.Pool // *transfer
}

var (
	// ErrReadOnly: the unit is write-protected.
	ErrReadOnly = errors.New("disk: the unit is write-protected")
	// ErrNotSupported: the unit cannot do that.
	ErrNotSupported = errors.New("disk: not supported by the unit")
)

// RangeError is an access beyond the end.
type RangeError struct {
	Offset, Length, Size int64
}

func (e *RangeError) Error() string {
	return fmt.Sprintf("disk: bytes %d to %d of a unit of %d bytes", e.Offset, e.Offset+e.Length, e.Size)
}

// Open learns what it needs of a logical unit. It must be a direct-access block device.
func Open(ctx context.Context, s *srp.Session, lun scsi.LUN) (*Disk, error) {
	d := &Disk{unit: Unit{Session: s, LUN: lun}, partial: make(chan struct{}, 1)}
	d.unit.Attention = d.attention
	d.free.New = func() any { return newTransfer(d) }
	if n := s.Options().MaxCmdPerLUN; n > 0 {
		d.depth = make(chan struct{}, n)
	}
	fail := func(what string, err error) (*Disk, error) {
		return nil, fmt.Errorf("LUN %s: %s: %w", lun, what, err)
	}
	var err error
	if d.inquiry, err = d.unit.Inquiry(ctx); err != nil {
		return fail("INQUIRY", err)
	}
	switch {
	case d.inquiry.Qualifier != scsi.QualifierPresent || d.inquiry.DeviceType == scsi.TypeUnknown:
		return nil, fmt.Errorf("LUN %s: the target has no such logical unit", lun)
	case d.inquiry.DeviceType != scsi.TypeDisk && d.inquiry.DeviceType != scsi.TypeRBC && d.inquiry.DeviceType != scsi.TypeZoned:
		return nil, fmt.Errorf("LUN %s is a %s, not a disk", lun, scsi.DeviceTypeName(d.inquiry.DeviceType))
	}
	if err := d.unit.Ready(ctx); err != nil {
		return fail("TEST UNIT READY", err)
	}
	c, err := d.unit.Capacity(ctx)
	if err != nil {
		return fail("READ CAPACITY", err)
	}
	if err := d.setCapacity(c); err != nil {
		return fail("READ CAPACITY", err)
	}
	d.thin = c.Provisioned
	d.readZero = c.UnmappedZero
	d.learnPages(ctx)
	d.maxBytes = s.MaxTransfer() / d.blockSize * d.blockSize
	if d.maxBytes == 0 {
		return nil, fmt.Errorf("LUN %s: blocks of %d bytes, but commands of %d bytes at most (max_sect)", lun, d.blockSize, s.MaxTransfer())
	}
	if m := uint64(d.limits.MaxTransfer) * uint64(d.blockSize); m > 0 && m < uint64(d.maxBytes) {
		d.maxBytes = int(m)
	}
	return d, nil
}

func (d *Disk) setCapacity(c scsi.Capacity) error {
	n := int(c.BlockSize)
	if n < 256 || n > 1<<16 || n&(n-1) != 0 {
		return fmt.Errorf("blocks of %d bytes: want a power of two from 256 to 65536", n)
	}
	if d.blockSize != 0 && n != d.blockSize {
		return fmt.Errorf("the block size changed from %d to %d", d.blockSize, n)
	}
	if d.blockSize == 0 { // in Open; later others read it
		d.blockSize, d.shift = n, bits.TrailingZeros(uint(n))
	}
	blocks := c.Blocks()
	if blocks == 0 || blocks > 1<<62>>d.shift {
		return fmt.Errorf("%d blocks of %d bytes", blocks, n)
	}
	d.blocks.Store(blocks)
	return nil
}

// learnPages reads what is good to know. Units may list pages and refuse them: then the limits stay unknown.
func (d *Disk) learnPages(ctx context.Context) {
	pages, _ := d.unit.SupportedVPD(ctx)
	for _, p := range pages {
		switch p {
		case scsi.VPDBlockLimits:
			if v, err := d.unit.VPD(ctx, p); err == nil {
				d.limits, _ = v.BlockLimits()
			}
		case scsi.VPDProvisioning:
			if v, err := d.unit.VPD(ctx, p); err == nil {
				d.prov, _ = v.Provisioning()
			}
		}
	}
	if m, err := d.unit.ModeSense(ctx, scsi.ModePageCaching); err == nil || m.Header.DataLength > 0 {
		d.readOnly = m.Header.DeviceSpecific&scsi.ModeWriteProtected != 0
		d.fua = m.Header.DeviceSpecific&scsi.ModeDPOFUA != 0
		if p, ok := m.Page(scsi.ModePageCaching, 0); ok && len(p.Data) > 0 {
			d.cache = p.Data[0]&0x04 != 0 // WCE
		}
	}
}

// attention acts on a unit attention that is being retried.
func (d *Disk) attention(s scsi.Sense) {
	if s.ASC == scsi.ASCCapacityChanged {
		go d.Refresh(context.Background()) // the attention is told from within a command
	}
}

// Refresh asks for the capacity again.
func (d *Disk) Refresh(ctx context.Context) error {
	u := Unit{Session: d.unit.Session, LUN: d.unit.LUN}
	c, err := u.Capacity(ctx)
	if err != nil {
		return err
	}
	return d.setCapacity(c)
}

// Unit is the logical unit.
func (d *Disk) Unit() *Unit { return &d.unit }

// Inquiry is the unit's standard data.
func (d *Disk) Inquiry() scsi.InquiryData { return d.inquiry }

// BlockSize is the logical block size in bytes.
func (d *Disk) BlockSize() int { return d.blockSize }

// Size is the capacity in bytes.
func (d *Disk) Size() int64 { return int64(d.blocks.Load() << d.shift) }

// MaxTransfer is the largest transfer of one command in bytes.
func (d *Disk) MaxTransfer() int { return d.maxBytes }

// Limits are the block limits that the unit states.
func (d *Disk) Limits() scsi.BlockLimits { return d.limits }

// ReadOnly reports a write-protected unit.
func (d *Disk) ReadOnly() bool { return d.readOnly }

// WriteCache reports that written data may be lost until Sync.
func (d *Disk) WriteCache() bool { return d.cache }

// CanDiscard reports that Discard does something.
func (d *Disk) CanDiscard() bool { return d.canUnmap() || d.prov.WriteSame16Unmap }

func (d *Disk) canUnmap() bool {
	return d.limits.MaxUnmapBlocks > 0 && d.limits.MaxUnmapDescriptors > 0 && (d.prov.Unmap || d.thin && d.prov == scsi.Provisioning{})
}

func (d *Disk) checkRange(off, n int64) error {
	if size := d.Size(); off < 0 || n < 0 || off > size || n > size-off {
		return &RangeError{off, n, size}
	}
	return nil
}

// Read fills c for a READ of n bytes at off into data, both multiples of the block size. The
// caller sets the rest and submits; it is for callers that keep many commands under way.
func (d *Disk) Read(c *srp.Command, off int64, data []byte) {
	c.LUN, c.Dir, c.Data, c.Gather, c.Retry = d.unit.LUN, srp.DataIn, data, nil, true
	c.CDB = scsi.ReadCDB(uint64(off)>>d.shift, uint32(len(data)>>d.shift))
}

// Write fills c for a WRITE, as Read.
func (d *Disk) Write(c *srp.Command, off int64, data []byte, fua bool) {
	c.LUN, c.Dir, c.Data, c.Gather, c.Retry = d.unit.LUN, srp.DataOut, data, nil, true
	c.CDB = scsi.WriteCDB(uint64(off)>>d.shift, uint32(len(data)>>d.shift), fua)
}

// ReadAt reads len(p) bytes at off, as io.ReaderAt: at the end of the unit it reads fewer and returns io.EOF.
func (d *Disk) ReadAt(p []byte, off int64) (int, error) {
	return d.ReadAtContext(context.Background(), p, off)
}

// ReadAtContext is ReadAt under a context.
func (d *Disk) ReadAtContext(ctx context.Context, p []byte, off int64) (n int, err error) {
	size := d.Size()
	if off < 0 || off > size {
		return 0, &RangeError{off, int64(len(p)), size}
	}
	short := false
	if int64(len(p)) > size-off {
		p, short = p[:size-off], true
	}
	n, err = d.read(ctx, p, off)
	if err == nil && short {
		err = io.EOF
	}
	return n, err
}

func (d *Disk) read(ctx context.Context, p []byte, off int64) (n int, err error) {
	mask := int64(d.blockSize - 1)
	if head := int(off & mask); head != 0 || int64(len(p)) < int64(d.blockSize) {
		if len(p) == 0 {
			return 0, nil
		}
		part := min(d.blockSize-head, len(p))
		block := make([]byte, d.blockSize)
		if _, err := d.move(ctx, srp.DataIn, block, off-int64(head), false); err != nil {
			return 0, err
		}
		n = copy(p[:part], block[head:])
	}
	whole := (len(p) - n) &^ int(mask)
	if whole > 0 {
		m, err := d.move(ctx, srp.DataIn, p[n:n+whole], off+int64(n), false)
		if n += m; err != nil {
			return n, err
		}
	}
	if n < len(p) {
		m, err := d.read(ctx, p[n:], off+int64(n))
		return n + m, err
	}
	return n, nil
}

// WriteAt writes len(p) bytes at off, as io.WriterAt. Beyond the end nothing is written and the error is a *RangeError.
func (d *Disk) WriteAt(p []byte, off int64) (int, error) {
	return d.WriteAtContext(context.Background(), p, off, false)
}

// WriteAtContext is WriteAt under a context; with fua the data are on the medium when it returns.
func (d *Disk) WriteAtContext(ctx context.Context, p []byte, off int64, fua bool) (n int, err error) {
	if err := d.checkRange(off, int64(len(p))); err != nil {
		return 0, err
	}
	if d.readOnly {
		return 0, ErrReadOnly
	}
	bit := fua && d.fua
	if n, err = d.write(ctx, p, off, bit); err != nil {
		return n, err
	}
	if fua && !bit {
		err = d.Sync(ctx)
	}
	return n, err
}

func (d *Disk) write(ctx context.Context, p []byte, off int64, fua bool) (n int, err error) {
	mask := int64(d.blockSize - 1)
	if head := int(off & mask); head != 0 || int64(len(p)) < int64(d.blockSize) {
		if len(p) == 0 {
			return 0, nil
		}
		part := min(d.blockSize-head, len(p))
		if err := d.writePart(ctx, p[:part], off-int64(head), head, fua); err != nil {
			return 0, err
		}
		n = part
	}
	whole := (len(p) - n) &^ int(mask)
	if whole > 0 {
		m, err := d.move(ctx, srp.DataOut, p[n:n+whole], off+int64(n), fua)
		if n += m; err != nil {
			return n, err
		}
	}
	if n < len(p) {
		m, err := d.write(ctx, p[n:], off+int64(n), fua)
		return n + m, err
	}
	return n, nil
}

// writePart changes p's bytes of the block at off, from its byte head on.
func (d *Disk) writePart(ctx context.Context, p []byte, off int64, head int, fua bool) error {
	select {
	case d.partial <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-d.partial }()
	block := make([]byte, d.blockSize)
	if _, err := d.move(ctx, srp.DataIn, block, off, false); err != nil {
		return err
	}
	copy(block[head:], p)
	_, err := d.move(ctx, srp.DataOut, block, off, fua)
	return err
}

// Sync makes the unit put what was written on its medium. Units without a cache refuse the command; that is success.
func (d *Disk) Sync(ctx context.Context) error {
	cdb := scsi.SynchronizeCache10(0, 0)
	if d.blocks.Load() > scsi.MaxLBA10 {
		cdb = scsi.SynchronizeCache16(0, 0)
	}
	_, err := d.unit.Exec(ctx, cdb, srp.NoData, nil)
	var cc *scsi.CheckConditionError
	if errors.As(err, &cc) && cc.Sense.Key == scsi.IllegalRequest && cc.Sense.ASC == scsi.ASCInvalidOpcode {
		return nil
	}
	return err
}

// Discard tells the unit that n bytes at off are not needed. Whole blocks only: parts of blocks at the ends are left alone. What they
// read as afterwards is the unit's choice. ErrNotSupported: it cannot.
func (d *Disk) Discard(ctx context.Context, off, n int64) error {
	if err := d.checkRange(off, n); err != nil {
		return err
	}
	if d.readOnly {
		return ErrReadOnly
	}
	first := uint64(off+int64(d.blockSize)-1) >> d.shift
	end := uint64(off+n) >> d.shift
	if end <= first {
		return nil
	}
	switch {
	case d.canUnmap():
		return d.unmap(ctx, first, end-first)
	case d.prov.WriteSame16Unmap:
		return d.writeSame(ctx, first, end-first, true)
	}
	return ErrNotSupported
}

func (d *Disk) unmap(ctx context.Context, lba, blocks uint64) error {
	most := uint64(d.limits.MaxUnmapBlocks)
	if most > 1<<31 {
		most = 1 << 31
	}
	var list []byte
	for blocks > 0 {
		n := min(blocks, most)
		list = scsi.AppendUnmap(list[:0], []scsi.Extent{{LBA: lba, Blocks: uint32(n)}})
		if _, err := d.unit.Exec(ctx, scsi.Unmap(false, uint16(len(list))), srp.DataOut, list); err != nil {
			return err
		}
		lba, blocks = lba+n, blocks-n
	}
	return nil
}

// writeSame writes zeros, or with unmap lets the unit deallocate instead.
func (d *Disk) writeSame(ctx context.Context, lba, blocks uint64, unmap bool) error {
	most := uint64(1 << 16) // a bounded command where the unit states no limit
	if m := d.limits.MaxWriteSame; m > 0 {
		most = min(m, 1<<31)
	}
	zero := make([]byte, d.blockSize)
	for blocks > 0 {
		n := min(blocks, most)
		if _, err := d.unit.Exec(ctx, scsi.WriteSame16(lba, uint32(n), unmap, false), srp.DataOut, zero); err != nil {
			return err
		}
		lba, blocks = lba+n, blocks-n
	}
	return nil
}

// WriteZeros makes n bytes at off read as zeros; with mayUnmap the unit may deallocate them if they read as zeros then.
func (d *Disk) WriteZeros(ctx context.Context, off, n int64, mayUnmap bool) error {
	if err := d.checkRange(off, n); err != nil {
		return err
	}
	if d.readOnly {
		return ErrReadOnly
	}
	first := uint64(off+int64(d.blockSize)-1) >> d.shift
	end := uint64(off+n) >> d.shift
	if end > first {
		unmap := mayUnmap && d.prov.WriteSame16Unmap && (d.readZero || d.prov.ReadsZero == 1)
		err := d.writeSame(ctx, first, end-first, unmap)
		if err == nil {
			// The parts of blocks at both ends.
			if head := int64(first<<d.shift) - off; head > 0 {
				if _, err := d.write(ctx, make([]byte, head), off, false); err != nil {
					return err
				}
			}
			if tail := off + n - int64(end<<d.shift); tail > 0 {
				_, err = d.write(ctx, make([]byte, tail), int64(end<<d.shift), false)
			}
			return err
		}
		if !isInvalidCommand(err) {
			return err
		}
	}
	zero := make([]byte, min(n, int64(d.maxBytes)))
	for n > 0 {
		m := min(n, int64(len(zero)))
		if _, err := d.write(ctx, zero[:m], off, false); err != nil {
			return err
		}
		off, n = off+m, n-m
	}
	return nil
}

// transfer is the state of one ReadAt or WriteAt: up to window commands that signal one waiter.
type transfer struct {
	d      *Disk
	waiter completion.Waiter
	parts  [window]part
}

type part struct {
	c      srp.Command
	at     int // in the caller's buffer
	busy   bool
	done   atomic.Bool
	policy RetryPolicy
	resume time.Time // not before
}

func newTransfer(d *Disk) *transfer {
	t := &transfer{d: d}
	for i := range t.parts {
		p := &t.parts[i]
		p.c.Waiter = &t.waiter
		p.c.Done = func(*srp.Command) { p.done.Store(true) }
	}
	return t
}

// move transfers p, whole blocks, at off, and returns how many bytes moved before the first error.
func (d *Disk) move(ctx context.Context, dir srp.Direction, p []byte, off int64, fua bool) (int, error) {
	t := d.free.Get().(*transfer)
	defer d.free.Put(t)
	return t.run(ctx, dir, p, off, fua)
}

func (t *transfer) run(ctx context.Context, dir srp.Direction, p []byte, off int64, fua bool) (int, error) {
	d, s := t.d, t.d.unit.Session
	// One channel for all parts: the waiter may have to poll for them.
	queue := 1 + int(d.turn.Add(1)&0xffffff)
	if ctx.Done() != nil {
		stop := context.AfterFunc(ctx, t.waiter.Signal)
		defer stop()
	}
	var err error
	sent, good, active := 0, len(p), 0
	fail := func(at int, e error) {
		if at < good {
			good, err = at, e
		}
	}
	for {
		for i := range t.parts {
			if sent >= len(p) || err != nil {
				break
			}
			q := &t.parts[i]
			if q.busy {
				continue
			}
			if ctx.Err() != nil {
				fail(sent, context.Cause(ctx))
				break
			}
			if !d.enter() {
				if active > 0 {
					break
				}
				if e := d.await(ctx); e != nil {
					fail(sent, e)
					break
				}
			}
			n := min(len(p)-sent, d.maxBytes)
			if dir == srp.DataIn {
				d.Read(&q.c, off+int64(sent), p[sent:sent+n])
			} else {
				d.Write(&q.c, off+int64(sent), p[sent:sent+n], fua)
			}
			q.c.Queue, q.at, q.policy, q.resume = queue, sent, RetryPolicy{}, time.Time{}
			q.busy = true
			active++
			sent += n
			t.submit(q)
		}
		if active == 0 {
			return good, err
		}
		var wake time.Time // the earliest part that waits for its next try
		progress := false
		for i := range t.parts {
			q := &t.parts[i]
			if !q.busy {
				continue
			}
			if !q.resume.IsZero() {
				switch {
				case err != nil || ctx.Err() != nil:
					q.busy, q.resume = false, time.Time{}
					e := err
					if e == nil {
						e = context.Cause(ctx)
					}
					fail(q.at, e)
				case !time.Now().Before(q.resume):
					q.resume = time.Time{}
					t.submit(q)
					continue
				default:
					if wake.IsZero() || q.resume.Before(wake) {
						wake = q.resume
					}
					continue
				}
			} else if !q.done.Load() {
				continue
			} else if e := q.c.Error(); e != nil {
				if wait, again := q.policy.Again(&q.c, s.Options().CommandTimeout, d.unit.attention); again && ctx.Err() == nil {
					q.resume = time.Now().Add(wait)
					progress = true
					continue
				}
				q.busy = false
				fail(q.at, e)
			} else {
				q.busy = false
				if n := q.c.Transferred(); n != q.c.Length() || q.c.Residual < 0 {
					fail(q.at+n, fmt.Errorf("disk: the target moved %d of %d bytes at offset %d and reported no error", n, q.c.Length(), off+int64(q.at)))
				}
			}
			active--
			progress = true
			d.leave()
		}
		if progress {
			continue
		}
		if ctx.Err() != nil {
			for i := range t.parts {
				if q := &t.parts[i]; q.busy && !q.done.Load() {
					s.Cancel(&q.c, context.Cause(ctx))
				}
			}
		}
		s.Wait(queue, &t.waiter, wake)
	}
}

// enter takes one of the unit's max_cmd_per_lun commands, if there is one left.
func (d *Disk) enter() bool {
	if d.depth == nil {
		return true
	}
	select {
	case d.depth <- struct{}{}:
		return true
	default:
		return false
	}
}

// await is enter for a transfer that has no command under way, at whose end it could try again.
func (d *Disk) await(ctx context.Context) error {
	select {
	case d.depth <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (d *Disk) leave() {
	if d.depth != nil {
		<-d.depth
	}
}

func (t *transfer) submit(q *part) {
	q.done.Store(false)
	if err := t.d.unit.Session.Submit(&q.c); err != nil {
		q.c.Err = err
		q.done.Store(true)
	}
}
