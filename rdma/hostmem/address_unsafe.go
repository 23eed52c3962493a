package hostmem

import "unsafe"

// Addr is the virtual address of the region's first byte, as SGEs and peers name it.
func (r *Region) Addr() uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(r.buf)))) }
