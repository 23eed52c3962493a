package softroce

import "unsafe"

// bytesAt is memory of the caller's at a virtual address: what an inline send reads, for the length of PostSend, during
// which the caller keeps it alive.
func bytesAt(addr uint64, n int) []byte {
	p := uintptr(addr)
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&p)), n)
}
