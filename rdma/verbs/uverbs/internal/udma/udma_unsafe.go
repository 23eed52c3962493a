// Package udma holds the few stores, loads and fences by which a userspace driver and a device see each other's memory in
// the intended order. They are in assembly because Go has no way to say them: sync/atomic stores are locked
// read-modify-writes on amd64, wrong on device registers, and the compiler may move plain stores. A call into
// assembly is also a barrier for the compiler, and one call per doorbell costs less than one per fence.
//
// The fences are those of rdma-core v44.0 (util/udma_barrier.h):
//
//	                            amd64            arm64
//	udma_to_device_barrier      none (TSO)       DSB ST
//	udma_from_device_barrier    LFENCE           DSB LD
//	mmio_wc_start               SFENCE           DSB ST
//	mmio_flush_writes           SFENCE           DSB ST
//
// Later releases of rdma-core weaken the first two on arm64 to DMB OSHST and DMB OSHLD; the stronger
// forms are right with both.
package udma

import "unsafe"

// StoreRecord makes all earlier stores visible to the device and then stores val, already in
// the device's byte order, into a doorbell record or an ownership word.
//
//go:noescape
func StoreRecord(rec unsafe.Pointer, val uint32)

// Ring publishes a batch of send work requests: the doorbell record, a write-combining
// fence, one 8-byte store to the register, and the flush of the write-combining buffer.
// Values are in the device's byte order.
//
//go:noescape
func Ring(rec unsafe.Pointer, recVal uint32, reg unsafe.Pointer, val uint64)

// RingBlueFlame is Ring with chunks*64 bytes copied from a ring of descriptors to the register instead of one word, in
// ascending 8-byte stores. src wraps at end to start; all three are multiples of 64 bytes apart.
//
//go:noescape
func RingBlueFlame(rec unsafe.Pointer, recVal uint32, reg, src, start, end unsafe.Pointer, chunks int)

// CopyToRegister copies chunks*64 bytes to a write-combining register in ascending 8-byte
// stores, between a write-combining fence and a flush.
//
//go:noescape
func CopyToRegister(reg, src unsafe.Pointer, chunks int)

// Store32 makes all earlier stores visible to the device and then stores one 4-byte register.
//
//go:noescape
func Store32(reg unsafe.Pointer, val uint32)

// Store64 makes all earlier stores visible to the device and then stores one 8-byte register.
//
//go:noescape
func Store64(reg unsafe.Pointer, val uint64)

// FromDevice orders all later loads behind the earlier ones: behind that of the word which the device writes last.
//
//go:noescape
func FromDevice()

// Pointer is the address in a scatter/gather entry as a pointer: memory outside
// Go's heap that the caller promises to be mapped.
func Pointer(addr uint64) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&addr)) }

// Gather copies the bytes at virtual address addr to dst: inline data, which an SGE names by its address. The
// caller of a post vouches for the address as it does towards a device.
func Gather(dst []byte, addr uint64) {
	if len(dst) > 0 {
		copy(dst, unsafe.Slice((*byte)(Pointer(addr)), len(dst)))
	}
}

// CopyInline copies n bytes at src to dst. It is made for the few dozen bytes of inline data, where a call of memmove
// costs more than the copy.
func CopyInline(dst, src unsafe.Pointer, n int) {
	switch {
	case n > 256:
		copy(unsafe.Slice((*byte)(dst), n), unsafe.Slice((*byte)(src), n))
	case n >= 16:
		Copy16(dst, src, n)
	case n >= 8:
		*(*uint64)(dst) = *(*uint64)(src)
		*(*uint64)(unsafe.Add(dst, n-8)) = *(*uint64)(unsafe.Add(src, n-8))
	default:
		for i := range n {
			*(*byte)(unsafe.Add(dst, i)) = *(*byte)(unsafe.Add(src, i))
		}
	}
}

// Copy16 is CopyInline for at least 16 bytes, small enough for the compiler to put it where it is used.
func Copy16(dst, src unsafe.Pointer, n int) {
	for i := 0; i < n-16; i += 16 {
		*(*[2]uint64)(unsafe.Add(dst, i)) = *(*[2]uint64)(unsafe.Add(src, i))
	}
	// The rest, together with bytes already copied.
	*(*[2]uint64)(unsafe.Add(dst, n-16)) = *(*[2]uint64)(unsafe.Add(src, n-16))
}
