package packet

import "hash/crc32"

// update is CRC-32 (IEEE) as hash/crc32 counts it.
func update(crc uint32, b []byte) uint32 { return crc32.Update(crc, crc32.IEEETable, b) }
