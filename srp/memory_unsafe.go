package srp

import "unsafe"

// addressOf is the virtual address of b's first byte.
func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
