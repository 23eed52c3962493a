package disk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"sync"
)

// Device is what a block device over SRP offers: a Disk, a Stripe or a Multipath.
type Device interface {
	io.ReaderAt
	io.WriterAt
	ReadAtContext(ctx context.Context, p []byte, off int64) (int, error)
	WriteAtContext(ctx context.Context, p []byte, off int64, fua bool) (int, error)
	Sync(ctx context.Context) error
	Discard(ctx context.Context, off, n int64) error
	WriteZeros(ctx context.Context, off, n int64, mayUnmap bool) error
	Size() int64
	BlockSize() int
	ReadOnly() bool
	CanDiscard() bool
}

var _ = []Device{(*Disk)(nil), (*Stripe)(nil), (*Multipath)(nil)}

// Poller is a member that can be polled: its session's completions are reaped in the caller's goroutine.
type Poller interface {
	// Poll reaps at most budget completions and returns how many. supported is false when the member cannot be polled.
	Poll(budget int) (work int, supported bool)
}

// Poll reaps completions of the disk's session.
func (d *Disk) Poll(budget int) (work int, supported bool) { return d.unit.Session.Poll(budget), true }

// Stripe is RAID-0: chunk bytes of the first member, then of the second, and so on. Members may belong to different
// targets. It has no redundancy: a member that fails, fails the stripe.
type Stripe struct {
	members []Device
	chunk   int64
	size    int64
	block   int
}

// NewStripe makes a stripe of members with the same block size. chunk must be a power of two and a multiple of it; what a member has
// beyond the smallest one's whole chunks is not used.
func NewStripe(members []Device, chunk int64) (*Stripe, error) {
	if len(members) < 2 {
		return nil, fmt.Errorf("disk: a stripe needs two members or more, not %d", len(members))
	}
	s := &Stripe{members: members, chunk: chunk, block: members[0].BlockSize()}
	if chunk < int64(s.block) || bits.OnesCount64(uint64(chunk)) != 1 {
		return nil, fmt.Errorf("disk: chunks of %d bytes: want a power of two, %d or more", chunk, s.block)
	}
	least := members[0].Size()
	for i, m := range members {
		if m.BlockSize() != s.block {
			return nil, fmt.Errorf("disk: member %d has blocks of %d bytes, member 0 of %d", i, m.BlockSize(), s.block)
		}
		least = min(least, m.Size())
	}
	if s.size = least / chunk * chunk * int64(len(members)); s.size == 0 {
		return nil, fmt.Errorf("disk: the smallest member has %d bytes, less than a chunk of %d", least, chunk)
	}
	return s, nil
}

// Size is the capacity in bytes.
func (s *Stripe) Size() int64 { return s.size }

// BlockSize is the members' logical block size in bytes.
func (s *Stripe) BlockSize() int { return s.block }

// Chunk is how many bytes lie on one member before the next one's turn.
func (s *Stripe) Chunk() int64 { return s.chunk }

// ReadOnly reports that a member is write-protected.
func (s *Stripe) ReadOnly() bool {
	for _, m := range s.members {
		if m.ReadOnly() {
			return true
		}
	}
	return false
}

// CanDiscard reports that Discard does something on every member.
func (s *Stripe) CanDiscard() bool {
	for _, m := range s.members {
		if !m.CanDiscard() {
			return false
		}
	}
	return true
}

// Poll polls every member once; a member that fails to be polled just now is skipped. Polling is supported
// only if every member supports it.
func (s *Stripe) Poll(budget int) (work int, supported bool) {
	for _, m := range s.members {
		if _, ok := m.(Poller); !ok {
			return 0, false
		}
	}
	supported = true
	for _, m := range s.members {
		w, ok := m.(Poller).Poll(budget)
		work += w
		supported = supported && ok
	}
	return work, supported
}

// Locate says where byte off lies, and how many bytes from there on lie together.
func (s *Stripe) Locate(off int64) (member int, at, run int64) {
	n := int64(len(s.members))
	row, in := off/s.chunk, off%s.chunk
	return int(row % n), row/n*s.chunk + in, s.chunk - in
}

// extent is a run of bytes on one member.
type extent struct {
	at, n int64
	from  int64 // in the request
}

// next is member m's first extent of the request for bytes off to end that begins at row, a row of m, or later.
func (s *Stripe) next(m int, row, off, end int64) (e extent, nextRow int64, ok bool) {
	n := int64(len(s.members))
	if row < 0 {
		row = off / s.chunk
		row += (int64(m) - row%n + n) % n // the first of m's that the request may touch
	}
	start := max(row*s.chunk, off)
	if start >= end {
		return extent{}, 0, false
	}
	return extent{at: row/n*s.chunk + start%s.chunk, n: min((row+1)*s.chunk, end) - start, from: start - off}, row + n, true
}

// span is all that the request for bytes off to end means of member m: the chunks of one member follow one another
// there, and only the first and the last of a request may be parts.
func (s *Stripe) span(m int, off, end int64) (e extent, ok bool) {
	e, row, ok := s.next(m, -1, off, end)
	if !ok {
		return e, false
	}
	n := int64(len(s.members))
	last := (end - 1) / s.chunk
	last -= (last%n - int64(m) + n) % n
	if last >= row {
		x, _, _ := s.next(m, last, off, end)
		e.n = x.at + x.n - e.at
	}
	return e, true
}

// each works on all members at once, each in its own order and one extent at a time; extents of one member that meet there are not
// joined, since they do not meet in the caller's buffer. The result is how many bytes succeeded before the first that did not.
func (s *Stripe) each(off, n int64, f func(m Device, e extent) error) (int64, error) {
	if m, at, run := s.Locate(off); n <= run { // on one member: no goroutine
		if err := f(s.members[m], extent{at, n, 0}); err != nil {
			return 0, err
		}
		return n, nil
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	good := n
	var first error
	for i := range s.members {
		e, row, ok := s.next(i, -1, off, off+n)
		if !ok {
			continue
		}
		wg.Go(func() {
			for ; ok; e, row, ok = s.next(i, row, off, off+n) {
				if err := f(s.members[i], e); err != nil {
					mu.Lock()
					if e.from < good {
						good, first = e.from, fmt.Errorf("member %d: %w", i, err)
					}
					mu.Unlock()
					return
				}
			}
		})
	}
	wg.Wait()
	return good, first
}

// spans makes one request of each member that n bytes at off lie on, all at once: for what needs no buffer.
func (s *Stripe) spans(off, n int64, f func(m Device, at, n int64) error) error {
	if m, at, run := s.Locate(off); n <= run {
		return f(s.members[m], at, n)
	}
	errs := make([]error, len(s.members))
	var wg sync.WaitGroup
	for i := range s.members {
		if e, ok := s.span(i, off, off+n); ok {
			wg.Go(func() {
				if err := f(s.members[i], e.at, e.n); err != nil {
					errs[i] = fmt.Errorf("member %d: %w", i, err)
				}
			})
		}
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *Stripe) checkRange(off, n int64) error {
	if off < 0 || n < 0 || off > s.size || n > s.size-off {
		return &RangeError{off, n, s.size}
	}
	return nil
}

// ReadAt is io.ReaderAt.
func (s *Stripe) ReadAt(p []byte, off int64) (int, error) {
	return s.ReadAtContext(context.Background(), p, off)
}

// ReadAtContext reads like Disk.ReadAtContext, from all members at once.
func (s *Stripe) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	if off < 0 || off > s.size {
		return 0, &RangeError{off, int64(len(p)), s.size}
	}
	short := int64(len(p)) > s.size-off
	if short {
		p = p[:s.size-off]
	}
	n, err := s.each(off, int64(len(p)), func(m Device, e extent) error {
		_, err := m.ReadAtContext(ctx, p[e.from:e.from+e.n], e.at)
		return err
	})
	if err == nil && short {
		err = io.EOF
	}
	return int(n), err
}

// WriteAt is io.WriterAt.
func (s *Stripe) WriteAt(p []byte, off int64) (int, error) {
	return s.WriteAtContext(context.Background(), p, off, false)
}

// WriteAtContext writes like Disk.WriteAtContext, to all members at once.
func (s *Stripe) WriteAtContext(ctx context.Context, p []byte, off int64, fua bool) (int, error) {
	if err := s.checkRange(off, int64(len(p))); err != nil {
		return 0, err
	}
	n, err := s.each(off, int64(len(p)), func(m Device, e extent) error {
		_, err := m.WriteAtContext(ctx, p[e.from:e.from+e.n], e.at, fua)
		return err
	})
	return int(n), err
}

// Sync syncs every member.
func (s *Stripe) Sync(ctx context.Context) error {
	errs := make([]error, len(s.members))
	var wg sync.WaitGroup
	for i, m := range s.members {
		wg.Go(func() { errs[i] = m.Sync(ctx) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Discard discards on every member, with one request for each.
func (s *Stripe) Discard(ctx context.Context, off, n int64) error {
	if err := s.checkRange(off, n); err != nil {
		return err
	}
	return s.spans(off, n, func(m Device, at, n int64) error { return m.Discard(ctx, at, n) })
}

// WriteZeros zeroes on every member, with one request for each.
func (s *Stripe) WriteZeros(ctx context.Context, off, n int64, mayUnmap bool) error {
	if err := s.checkRange(off, n); err != nil {
		return err
	}
	return s.spans(off, n, func(m Device, at, n int64) error { return m.WriteZeros(ctx, at, n, mayUnmap) })
}
