// Package hostmem provides memory that a device may see: page-aligned
// anonymous mappings outside Go's heap, which neither move nor are returned to the
// kernel behind the device's back, and which a fork does not share.
package hostmem

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Region is one anonymous mapping. The slice from Bytes is valid until Free.
type Region struct {
	buf []byte
}

// Alloc maps size bytes, rounded up to whole pages, zeroed and touched, and marks them
// MADV_DONTFORK: a copy-on-write after fork would detach the device's pages from ours.
func Alloc(size int) (*Region, error) {
	if size <= 0 {
		return nil, fmt.Errorf("hostmem: cannot map %d bytes", size)
	}
	page := os.Getpagesize()
	size = (size + page - 1) &^ (page - 1)
	buf, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("hostmem: map %d bytes: %w", size, err)
	}
	if err := unix.Madvise(buf, unix.MADV_DONTFORK); err != nil {
		unix.Munmap(buf)
		return nil, fmt.Errorf("hostmem: madvise: %w", err)
	}
	return &Region{buf: buf}, nil
}

// Bytes is the whole mapping.
func (r *Region) Bytes() []byte { return r.buf }

// Len is the mapping's size in bytes, a whole number of pages.
func (r *Region) Len() int { return len(r.buf) }

// Slice is size bytes at offset off; it panics when they are not inside.
func (r *Region) Slice(off, size int) []byte { return r.buf[off : off+size : off+size] }

// Free unmaps the region. The caller has deregistered it before.
func (r *Region) Free() error {
	if r.buf == nil {
		return nil
	}
	buf := r.buf
	r.buf = nil
	return unix.Munmap(buf)
}
