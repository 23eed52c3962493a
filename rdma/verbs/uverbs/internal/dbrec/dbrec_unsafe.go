// Package dbrec hands out doorbell records.
package dbrec

import (
	"sync"
	"unsafe"

	"srp-initiator/rdma/hostmem"
)

// Records hands out doorbell records: small aligned cells of mapped pages, which a device reads. A
// record never crosses a page.
type Records struct {
	Stride int // bytes of a record, a power of two

	mu    sync.Mutex
	pages []*recordPage
}

type recordPage struct {
	mem  *hostmem.Region
	used []bool
}

const recordPageSize = 4096

// Alloc returns the lowest free record, zeroed.
func (r *Records) Alloc() ([]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.pages {
		for i, used := range p.used {
			if !used {
				return p.take(r, i), nil
			}
		}
	}
	mem, err := hostmem.Alloc(recordPageSize)
	if err != nil {
		return nil, err
	}
	p := &recordPage{mem: mem, used: make([]bool, recordPageSize/r.Stride)}
	r.pages = append(r.pages, p)
	return p.take(r, 0), nil
}

func (p *recordPage) take(r *Records, i int) []byte {
	p.used[i] = true
	b := p.mem.Slice(i*r.Stride, r.Stride)
	clear(b)
	return b
}

// Free takes back a record; the device has forgotten it. The last record of a page frees the page.
func (r *Records) Free(b []byte) {
	if b == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for k, p := range r.pages {
		off := int(uintptr(unsafe.Pointer(unsafe.SliceData(b))) - uintptr(unsafe.Pointer(unsafe.SliceData(p.mem.Bytes()))))
		if off < 0 || off >= p.mem.Len() {
			continue
		}
		p.used[off/r.Stride] = false
		for _, used := range p.used {
			if used {
				return
			}
		}
		p.mem.Free()
		r.pages = append(r.pages[:k], r.pages[k+1:]...)
		return
	}
}
