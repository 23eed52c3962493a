package mlx4

import "unsafe"

func addr(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

// addrOf is the virtual address of mapped memory, for a command.
func addrOf(b []byte) uint64 { return uint64(uintptr(addr(b))) }
