package dbrec

import (
	"testing"
	"unsafe"
)

func place(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// TestRecords takes three pages of records and gives them back.
func TestRecords(t *testing.T) {
	for _, r := range []*Records{{Stride: 64}, {Stride: 8}, {Stride: 4}} {
		perPage := 4096 / r.Stride
		var all [][]byte
		seen := map[uintptr]bool{}
		for i := range 2*perPage + 2 {
			b, err := r.Alloc()
			if err != nil {
				t.Fatal(err)
			}
			at := place(b)
			if len(b) != r.Stride || seen[at] || at%4096 != uintptr(i%perPage*r.Stride) {
				t.Fatalf("stride %d: record %d has %d bytes at %#x", r.Stride, i, len(b), at)
			}
			if got := len(r.pages); got != i/perPage+1 {
				t.Fatalf("stride %d: %d pages for %d records", r.Stride, got, i+1)
			}
			seen[at] = true
			all = append(all, b)
		}
		for _, p := range r.pages {
			if p.mem.Len() != 4096 {
				t.Errorf("a page of %d bytes", p.mem.Len())
			}
		}
		for _, i := range []int{perPage + 5, 0, perPage - 1} { // comes back, and clean
			at := place(all[i])
			for k := range all[i] {
				all[i][k] = 0xff
			}
			r.Free(all[i])
			b, err := r.Alloc()
			if err != nil || place(b) != at {
				t.Fatalf("stride %d: freed record %d at %#x, got %#x (%v)", r.Stride, i, at, place(b), err)
			}
			for _, v := range b {
				if v != 0 {
					t.Errorf("stride %d: record %d holds %x", r.Stride, i, b)
				}
			}
		}
		r.Free(nil)
		for i, b := range all {
			r.Free(b)
			left := 3 - (i+1)/perPage
			if i == len(all)-1 {
				left = 0
			}
			if len(r.pages) != left {
				t.Fatalf("stride %d: %d pages after %d of %d records were freed, want %d", r.Stride, len(r.pages), i+1, len(all), left)
			}
		}
	}
}
