package packet

import "golang.org/x/sys/cpu"

//go:noescape
func copyBlocks(dst, src *byte, n int)

//go:noescape
func prefetchLines(addr uint64, n int)

// copyMin is the length from which copy moves bytes as a string instruction does, which takes three times as long when source and destination
// are aligned differently. Payload behind headers and memory are.
const copyMin = 2048

// Copy copies src to the beginning of dst, which must not overlap it.
func Copy(dst, src []byte) {
	dst = dst[:len(src)]
	if cpu.X86.HasAVX2 && len(src) >= copyMin {
		n := len(src) &^ 127
		copyBlocks(&dst[0], &src[0], n)
		dst, src = dst[n:], src[n:]
	}
	copy(dst, src)
}
