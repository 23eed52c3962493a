package packet

import (
	"encoding/binary"
	"hash/crc32"

	"golang.org/x/sys/cpu"
)

// foldMin is the length from which folding is worth its start and end.
const foldMin = 1024

//go:noescape
func foldCopy(dst, src *byte, n int, reg uint32, k *[4]uint64, rest *[32]byte, ahead uint64)

//go:noescape
func fold(src *byte, n int, reg uint32, k *[4]uint64, rest *[32]byte)

func cpuid7() (ecx uint32)

// hasFold: AVX2, enabled by the system, and VPCLMULQDQ on 256 bits, which processors without AVX-512 have too (CPUID.7.ECX bit 10).
var hasFold = cpu.X86.HasAVX2 && cpuid7()>>10&1 != 0

// foldAlone: fold also without a copy. Where there is AVX-512, hash/crc32 has a loop of its own on 512 bits, which is as fast.
var foldAlone = hasFold && !cpu.X86.HasAVX512VPCLMULQDQ

// foldK has the multipliers of folding by 2048 and by 256 bits: x^(d+32) and x^(d-32) mod P for the two halves of a lane,
// bit-reflected and one bit up, because the product of two reflected numbers comes out one bit down.
var foldK = func() (k [4]uint64) {
	pow := func(n int) uint64 {
		r := uint32(1 << 31)
		for range n {
			r = r>>1 ^ poly&-(r&1)
		}
		return uint64(r) << 1
	}
	return [4]uint64{pow(2048 + 32), pow(2048 - 32), pow(256 + 32), pow(256 - 32)}
}()

// finishFold is the register after the 32 bytes that folding left.
func finishFold(b *[32]byte) (r uint32) {
	for i := 0; i < 32; i += 4 {
		r = step4(r, binary.LittleEndian.Uint32(b[i:]))
	}
	return r
}

// update is CRC-32 (IEEE) as hash/crc32 counts it.
func update(crc uint32, b []byte) uint32 {
	if foldAlone && len(b) >= foldMin {
		var rest [32]byte
		n := len(b) &^ 255
		fold(&b[0], n, ^crc, &foldK, &rest)
		crc = ^finishFold(&rest)
		if b = b[n:]; len(b) == 0 {
			return crc
		}
	}
	return crc32.Update(crc, crc32.IEEETable, b)
}

// updateCopy is update over src, which it also copies to dst. Meanwhile it has as many bytes at ahead fetched into the cache, if that is not 0.
func updateCopy(crc uint32, dst, src []byte, ahead uint64) uint32 {
	dst = dst[:len(src)]
	if hasFold && len(src) >= foldMin {
		var rest [32]byte
		n := len(src) &^ 255
		foldCopy(&dst[0], &src[0], n, ^crc, &foldK, &rest, ahead)
		crc = ^finishFold(&rest)
		if dst, src = dst[n:], src[n:]; len(src) == 0 {
			return crc
		}
	} else if ahead != 0 && len(src) > 0 {
		prefetchLines(ahead, (len(src)+63)>>6)
	}
	copy(dst, src)
	return crc32.Update(crc, crc32.IEEETable, dst)
}
