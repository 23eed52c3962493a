//go:build !amd64

package packet

import "hash/crc32"

// update is CRC-32 (IEEE) as hash/crc32 counts it; on arm64 that is one instruction for 8 bytes.
func update(crc uint32, b []byte) uint32 { return crc32.Update(crc, crc32.IEEETable, b) }

// updateCopy is update over src, which it also copies to dst. What lies ahead is not asked for.
func updateCopy(crc uint32, dst, src []byte, _ uint64) uint32 {
	copy(dst[:len(src)], src)
	return crc32.Update(crc, crc32.IEEETable, src)
}
