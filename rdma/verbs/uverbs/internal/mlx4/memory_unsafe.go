package mlx4

import "unsafe"

func addr(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

// at is the address of b's byte off, which may be the one behind the last.
func at(b []byte, off int) unsafe.Pointer { return unsafe.Add(addr(b), off) }

// addrOf is the virtual address of mapped memory, for a command.
func addrOf(b []byte) uint64 { return uint64(uintptr(addr(b))) }
