package lun

import (
	"errors"
	"fmt"
	"io"
	"math/bits"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/hostmem"
)

// Store holds a logical unit's bytes. Its methods may be called side by side; the
// Unit keeps writes to one block from overlapping.
type Store interface {
	io.ReaderAt
	io.WriterAt
	// Size is in bytes and does not change.
	Size() int64
	// Sync makes what was written durable.
	Sync() error
	// Zero makes n bytes at off read as zeros; with deallocate it gives their space back where it can.
	Zero(off, n int64, deallocate bool) error
	ReadOnly() bool
	// WriteBack reports that written data may be lost with the machine until Sync.
	WriteBack() bool
	// Regions is memory that a device may read and write in place of ReadAt and WriteAt; nil for none.
	Regions() []*hostmem.Region
	// Direct finds up to n bytes at off in one of Regions: its index, the offset in it, and how many bytes run from there. length 0: use
	// ReadAt and WriteAt.
	Direct(off, n int64, write bool) (region int, at, length int64)
	Close() error
	// Kind is "ram", "null" or "file", and String the whole specification.
	Kind() string
	String() string
}

// Slow is a Store whose methods may take as long as a disk does: a transport should not wait for them where others wait for it.
type Slow interface {
	// TryReadAt is ReadAt where that need not wait; false: it would have to, or went wrong, and p may hold anything.
	TryReadAt(p []byte, off int64) bool
}

// Spec is a parsed LUN specification: a store and how the unit presents it.
type Spec struct {
	Kind      string // ram, null, file
	Path      string // file
	Size      int64  // bytes; file: 0 takes the file's own size, else the file is made or grown
	BlockSize uint32 // bytes, 512 or 4096
	ReadOnly  bool
	Serial    string // "": the target makes one
	// Product is the INQUIRY product identification, "": by kind.
	Product string
}

// ParseSpec reads "ram:SIZE", "null:SIZE" or "file:PATH", each followed by options after commas: bs=512|4096, ro,
// serial=TEXT, product=TEXT, and size=SIZE for files. SIZE is a number of bytes with an optional k, m, g or t (powers of 1024).
func ParseSpec(s string) (Spec, error) {
	sp := Spec{BlockSize: 512}
	kind, rest, ok := strings.Cut(s, ":")
	if !ok {
		return sp, fmt.Errorf("LUN %q: want ram:SIZE, null:SIZE or file:PATH, each with options after commas", s)
	}
	parts := strings.Split(rest, ",")
	sp.Kind = kind
	switch kind {
	case "ram", "null":
		n, err := ParseSize(parts[0])
		if err != nil {
			return sp, fmt.Errorf("LUN %q: %w", s, err)
		}
		sp.Size = n
	case "file":
		if parts[0] == "" {
			return sp, fmt.Errorf("LUN %q: the path is missing", s)
		}
		sp.Path = parts[0]
	default:
		return sp, fmt.Errorf("LUN %q: unknown kind %q; want ram, null or file", s, kind)
	}
	for _, p := range parts[1:] {
		key, val, valued := strings.Cut(p, "=")
		switch key {
		case "ro":
			if valued {
				return sp, fmt.Errorf("LUN %q: ro takes no value; leave it out for a unit that can be written", s)
			}
			sp.ReadOnly = true
		case "bs":
			switch val {
			case "512":
				sp.BlockSize = 512
			case "4096", "4k":
				sp.BlockSize = 4096
			default:
				return sp, fmt.Errorf("LUN %q: bs=%s: the block size is 512 or 4096", s, val)
			}
		case "serial":
			if val == "" || len(val) > 32 || !printable(val) {
				return sp, fmt.Errorf("LUN %q: serial: 1 to 32 printable characters", s)
			}
			sp.Serial = val
		case "product":
			if val == "" || len(val) > 16 || !printable(val) {
				return sp, fmt.Errorf("LUN %q: product: 1 to 16 printable characters", s)
			}
			sp.Product = val
		case "size":
			if kind != "file" {
				return sp, fmt.Errorf("LUN %q: size= is for file; ram and null have it after the colon", s)
			}
			n, err := ParseSize(val)
			if err != nil {
				return sp, fmt.Errorf("LUN %q: %w", s, err)
			}
			sp.Size = n
		default:
			return sp, fmt.Errorf("LUN %q: unknown option %q; want bs, ro, serial, product or size", s, key)
		}
	}
	if sp.Size > 0 && sp.Size < int64(sp.BlockSize) {
		return sp, fmt.Errorf("LUN %q: smaller than one block of %d bytes", s, sp.BlockSize)
	}
	if sp.Size%int64(sp.BlockSize) != 0 {
		return sp, fmt.Errorf("LUN %q: %d bytes are no multiple of the block of %d bytes", s, sp.Size, sp.BlockSize)
	}
	return sp, nil
}

func printable(s string) bool {
	for i := range len(s) {
		if s[i] < 0x20 || s[i] > 0x7e {
			return false
		}
	}
	return true
}

// ParseSize reads a number of bytes with an optional suffix k, m, g or t, powers of 1024.
func ParseSize(s string) (int64, error) {
	shift := 0
	num := strings.TrimSuffix(strings.ToLower(s), "b")
	num = strings.TrimSuffix(num, "i")
	if num != "" {
		if i := strings.IndexByte("kmgt", num[len(num)-1]); i >= 0 {
			shift = 10 * (i + 1)
			num = num[:len(num)-1]
		}
	}
	n, err := strconv.ParseInt(num, 10, 64)
	if errors.Is(err, strconv.ErrRange) || err == nil && n > 0 && bits.Len64(uint64(n))+shift > 62 {
		return 0, fmt.Errorf("size %.40q: want less than 2^62 bytes (4194304t)", s)
	}
	if err != nil || n <= 0 {
		return 0, fmt.Errorf("size %.40q: want a number of bytes from 1 up, with an optional k, m, g or t", s)
	}
	return n << shift, nil
}

// OpenStore makes the store that sp describes.
func OpenStore(sp Spec) (Store, error) {
	switch sp.Kind {
	case "ram":
		return newRAM(sp)
	case "null":
		return newNull(sp)
	case "file":
		return newFile(sp)
	}
	return nil, fmt.Errorf("lun: unknown kind %q", sp.Kind)
}

var errRange = errors.New("lun: outside the store")

func checkRange(off int64, n int, size int64) error {
	if off < 0 || int64(n) > size-off {
		return errRange
	}
	return nil
}

// ram is a RAM disk in device-visible memory.
type ram struct {
	mem   *hostmem.Region
	size  int64
	ro    bool
	locks lockList // of devices that read mem packet by packet
}

// changeLen is how much of a RAM disk changes under its locks at a time: whole blocks, and so little that a device can wait for it.
const changeLen = 16 << 10

// lockList is the locks to hold for a change. It is replaced, not changed, so that writers need no lock to read it.
type lockList struct {
	mu   sync.Mutex
	list atomic.Pointer[[]sync.Locker]
}

func (l *lockList) load() []sync.Locker {
	if p := l.list.Load(); p != nil {
		return *p
	}
	return nil
}

func (l *lockList) add(m sync.Locker) {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := append(slices.Clone(l.load()), m)
	l.list.Store(&list)
}

func (l *lockList) remove(m sync.Locker) {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := slices.Clone(l.load())
	if i := slices.Index(list, m); i >= 0 {
		list = slices.Delete(list, i, i+1)
	}
	l.list.Store(&list)
}

// change calls f for n bytes at off in pieces of changeLen, each under all locks. Two devices that share a lock are not expected.
func (r *ram) change(off int64, n int, f func(b []byte, at int)) {
	locks := r.locks.load()
	for at := 0; at < n; at += changeLen {
		b := r.mem.Bytes()[off+int64(at):][:min(changeLen, n-at)]
		for _, l := range locks {
			l.Lock()
		}
		f(b, at)
		for i := len(locks) - 1; i >= 0; i-- {
			locks[i].Unlock()
		}
	}
}

func newRAM(sp Spec) (Store, error) {
	size := sp.Size &^ int64(sp.BlockSize-1)
	if int64(int(size)) != size {
		return nil, fmt.Errorf("lun: a RAM disk of %d bytes is too large for this machine", size)
	}
	mem, err := hostmem.Alloc(int(size))
	if err != nil {
		return nil, err
	}
	return &ram{mem: mem, size: size, ro: sp.ReadOnly}, nil
}

func (r *ram) ReadAt(p []byte, off int64) (int, error) {
	if err := checkRange(off, len(p), r.size); err != nil {
		return 0, err
	}
	return copy(p, r.mem.Bytes()[off:]), nil
}

func (r *ram) WriteAt(p []byte, off int64) (int, error) {
	if err := checkRange(off, len(p), r.size); err != nil {
		return 0, err
	}
	r.change(off, len(p), func(b []byte, at int) { copy(b, p[at:]) })
	return len(p), nil
}

func (r *ram) Size() int64     { return r.size }
func (r *ram) Sync() error     { return nil }
func (r *ram) ReadOnly() bool  { return r.ro }
func (r *ram) WriteBack() bool { return false }
func (r *ram) Close() error    { return r.mem.Free() }
func (r *ram) Kind() string    { return "ram" }
func (r *ram) String() string  { return fmt.Sprintf("ram:%d", r.size) }

func (r *ram) Zero(off, n int64, _ bool) error {
	if off < 0 || n < 0 || n > r.size-off {
		return errRange
	}
	r.change(off, int(n), func(b []byte, _ int) { clear(b) })
	return nil
}

func (r *ram) Regions() []*hostmem.Region { return []*hostmem.Region{r.mem} }

func (r *ram) Direct(off, n int64, _ bool) (int, int64, int64) {
	return 0, off, max(0, min(n, r.size-off))
}

// null answers reads with zeros and forgets writes, so that what is measured is the fabric.
type null struct {
	zeros, sink *hostmem.Region
	size        int64
	ro          bool
}

// nullWindow is the memory behind a null store, for each direction.
const nullWindow = 1 << 20

func newNull(sp Spec) (Store, error) {
	z, err := hostmem.Alloc(nullWindow)
	if err != nil {
		return nil, err
	}
	s, err := hostmem.Alloc(nullWindow)
	if err != nil {
		z.Free()
		return nil, err
	}
	return &null{zeros: z, sink: s, size: sp.Size &^ int64(sp.BlockSize-1), ro: sp.ReadOnly}, nil
}

func (z *null) ReadAt(p []byte, off int64) (int, error) {
	if err := checkRange(off, len(p), z.size); err != nil {
		return 0, err
	}
	clear(p)
	return len(p), nil
}

func (z *null) WriteAt(p []byte, off int64) (int, error) {
	if err := checkRange(off, len(p), z.size); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (z *null) Size() int64                     { return z.size }
func (z *null) Sync() error                     { return nil }
func (z *null) Zero(off, n int64, _ bool) error { return nil }
func (z *null) ReadOnly() bool                  { return z.ro }
func (z *null) WriteBack() bool                 { return false }
func (z *null) Close() error                    { return errors.Join(z.zeros.Free(), z.sink.Free()) }
func (z *null) Kind() string                    { return "null" }
func (z *null) String() string                  { return fmt.Sprintf("null:%d", z.size) }
func (z *null) Regions() []*hostmem.Region      { return []*hostmem.Region{z.zeros, z.sink} }

func (z *null) Direct(off, n int64, write bool) (int, int64, int64) {
	r := 0
	if write {
		r = 1
	}
	return r, 0, max(0, min(n, nullWindow, z.size-off))
}

// file is a regular file or a block device, through the page cache.
type file struct {
	f    *os.File
	size int64
	ro   bool
	path string
}

func newFile(sp Spec) (Store, error) {
	flags := os.O_RDWR
	if sp.ReadOnly {
		flags = os.O_RDONLY
	} else if sp.Size > 0 {
		flags |= os.O_CREATE
	}
	f, err := os.OpenFile(sp.Path, flags, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lun: %w", err)
	}
	end, err := f.Seek(0, io.SeekEnd)
	if err == nil && sp.Size > end && !sp.ReadOnly {
		if err = f.Truncate(sp.Size); err == nil {
			end = sp.Size
		}
	}
	if err == nil && sp.Size > end {
		err = fmt.Errorf("%s has %d bytes, fewer than the %d asked for", sp.Path, end, sp.Size)
	}
	if sp.Size > 0 {
		end = min(end, sp.Size)
	}
	switch bs := int64(sp.BlockSize); {
	case err != nil:
	case end < bs:
		err = fmt.Errorf("%s is smaller than one block of %d bytes; give size= to make it", sp.Path, bs)
	case end%bs != 0:
		grow := fmt.Sprintf("size=%d grows it, ", end+bs-end%bs)
		if sp.ReadOnly {
			grow = ""
		}
		err = fmt.Errorf("%s has %d bytes, no multiple of the block of %d bytes; %ssize=%d leaves out its end", sp.Path, end, bs, grow, end-end%bs)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lun: %w", err)
	}
	return &file{f: f, size: end, ro: sp.ReadOnly, path: sp.Path}, nil
}

func (f *file) ReadAt(p []byte, off int64) (int, error)       { return f.f.ReadAt(p, off) }
func (f *file) WriteAt(p []byte, off int64) (int, error)      { return f.f.WriteAt(p, off) }
func (f *file) Size() int64                                   { return f.size }
func (f *file) ReadOnly() bool                                { return f.ro }
func (f *file) WriteBack() bool                               { return true }
func (f *file) Close() error                                  { return f.f.Close() }
func (f *file) Kind() string                                  { return "file" }
func (f *file) String() string                                { return "file:" + f.path }
func (f *file) Regions() []*hostmem.Region                    { return nil }
func (f *file) Direct(_, _ int64, _ bool) (int, int64, int64) { return 0, 0, 0 }

// TryReadAt reads what is in the page cache.
func (f *file) TryReadAt(p []byte, off int64) bool {
	iov := [1][]byte{p}
	n, err := unix.Preadv2(int(f.f.Fd()), iov[:], off, unix.RWF_NOWAIT)
	return err == nil && n == len(p)
}

func (f *file) Sync() error {
	if f.ro {
		return nil
	}
	return uninterrupted(func() error { return unix.Fdatasync(int(f.f.Fd())) })
}

// uninterrupted repeats a call that a signal broke off, as the runtime's own, which end long computations, do.
func uninterrupted(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

var fallocate = unix.Fallocate // a test puts a device of larger blocks in its place

func (f *file) Zero(off, n int64, deallocate bool) error {
	// Without FALLOC_FL_KEEP_SIZE: if the file was cut short meanwhile, the zeros must be there to be read.
	mode := uint32(unix.FALLOC_FL_ZERO_RANGE)
	if deallocate {
		mode = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	}
	err := uninterrupted(func() error { return fallocate(int(f.f.Fd()), mode, off, n) })
	if err == nil || err != unix.EOPNOTSUPP && err != unix.ENOSYS && err != unix.EINVAL {
		return err
	}
	// The file system can do neither, or a block device has larger blocks than the unit: write the zeros.
	zeros := make([]byte, min(n, 1<<20))
	for n > 0 {
		w, err := f.f.WriteAt(zeros[:min(n, int64(len(zeros)))], off)
		if err != nil {
			return err
		}
		off, n = off+int64(w), n-int64(w)
	}
	return nil
}
