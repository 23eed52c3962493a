// Package hostmem provides memory that a device may see: page-aligned
// anonymous mappings outside Go's heap, which neither move nor are returned to the
// kernel behind the device's back, and which a fork does not share.
package hostmem

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// hugePage is the size of the large pages that are asked for, by architecture not always the kernel's; asking in vain costs nothing.
const hugePage = 2 << 20

// Region is one anonymous mapping. The slice from Bytes is valid until Free.
type Region struct {
	buf    []byte
	mapped []byte // buf and what was mapped to align it
}

// Alloc maps size bytes, rounded up to whole pages, zeroed and touched, and marks them
// MADV_DONTFORK: a copy-on-write after fork would detach the device's pages from ours. A region
// that can hold huge pages gets them where the system allows: random accesses to a large one otherwise spend
// as long in the page tables, of which a virtual machine has two, as on the data.
func Alloc(size int) (*Region, error) {
	if size <= 0 {
		return nil, fmt.Errorf("hostmem: cannot map %d bytes", size)
	}
	page := os.Getpagesize()
	size = (size + page - 1) &^ (page - 1)
	slack := 0
	if size >= hugePage {
		slack = hugePage
	}
	mapped, err := unix.Mmap(-1, 0, size+slack, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("hostmem: map %d bytes: %w", size, err)
	}
	r := &Region{buf: mapped, mapped: mapped}
	if slack > 0 {
		r.buf = mapped[-r.Addr()&(hugePage-1):][:size:size] // what lies in front and behind is never touched
		_ = unix.Madvise(r.buf, unix.MADV_HUGEPAGE)         // the kernel may have none
	}
	if err := unix.Madvise(mapped, unix.MADV_DONTFORK); err != nil {
		unix.Munmap(mapped)
		return nil, fmt.Errorf("hostmem: madvise: %w", err)
	}
	if unix.Madvise(r.buf, unix.MADV_POPULATE_WRITE) != nil { // a kernel older than 5.14, or no memory, which touching will show
		for i := 0; i < size; i += page {
			r.buf[i] = 0
		}
	}
	return r, nil
}

// Bytes is the whole region.
func (r *Region) Bytes() []byte { return r.buf }

// Len is the region's size in bytes, a whole number of pages.
func (r *Region) Len() int { return len(r.buf) }

// Slice is size bytes at offset off; it panics when they are not inside.
func (r *Region) Slice(off, size int) []byte { return r.buf[off : off+size : off+size] }

// Free unmaps the region. The caller has deregistered it before.
func (r *Region) Free() error {
	if r.mapped == nil {
		return nil
	}
	mapped := r.mapped
	r.buf, r.mapped = nil, nil
	return unix.Munmap(mapped)
}
