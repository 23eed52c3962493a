//go:build !amd64

package packet

// Copy copies src to the beginning of dst, which must not overlap it.
func Copy(dst, src []byte) { copy(dst[:len(src)], src) }

// Prefetch asks for n bytes at a virtual address to be brought into the cache, on processors where that is known how to do.
func Prefetch(addr uint64, n uint32) {}
