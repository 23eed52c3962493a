package ring

import (
	"math/bits"
	"unsafe"
)

// Get32 loads a word of an entry.
func Get32(e unsafe.Pointer, off int) uint32 {
	return bits.ReverseBytes32(*(*uint32)(unsafe.Add(e, off)))
}

// Put32 stores one.
func Put32(e unsafe.Pointer, off int, v uint32) {
	*(*uint32)(unsafe.Add(e, off)) = bits.ReverseBytes32(v)
}

// Put64 stores one of 8 bytes.
func Put64(e unsafe.Pointer, off int, v uint64) {
	*(*uint64)(unsafe.Add(e, off)) = bits.ReverseBytes64(v)
}

// Addr is where mapped memory begins.
func Addr(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

// At is the address of b's byte off, which may be the one behind the last.
func At(b []byte, off int) unsafe.Pointer { return unsafe.Add(Addr(b), off) }

// AddrOf is the virtual address of mapped memory, for a command.
func AddrOf(b []byte) uint64 { return uint64(uintptr(Addr(b))) }
