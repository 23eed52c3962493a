package abi

import "unsafe"

// Bytes views *p as the bytes that the kernel sees. T must be one of this
// package's structs or of the same kind: fixed-width fields, no pointers, no implicit padding.
func Bytes[T any](p *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(p)), unsafe.Sizeof(*p))
}
