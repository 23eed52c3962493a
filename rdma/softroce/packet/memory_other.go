//go:build !amd64

package packet

// Copy copies src to the beginning of dst, which must not overlap it.
func Copy(dst, src []byte) { copy(dst[:len(src)], src) }
