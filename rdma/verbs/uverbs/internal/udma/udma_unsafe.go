// Package udma holds the fences and stores that a device's memory needs, named by what they order.
// Go has no other way to say them: sync/atomic orders ordinary memory and compiles a store to
// a locked exchange on amd64, which is wrong on device pages.
//
// The instructions are those of rdma-core's util/udma_barrier.h and util/mmio.h:
//
//	             amd64        arm64
//	ToDevice     (compiler)   DSB ST
//	FromDevice   LFENCE       DSB LD
//	MMIOFlush    SFENCE       DSB ST
//
// On amd64 ordinary stores are seen in order by a device, so ToDevice only keeps the
// compiler from moving stores; a call of an assembly function does that.
package udma

import "unsafe"

// ToDevice orders earlier stores to ring memory before later stores that hand
// it to the device (owner bits, doorbell records): udma_to_device_barrier.
func ToDevice()

// FromDevice orders the load that found an entry valid before loads of the entry's body:
// udma_from_device_barrier.
func FromDevice()

// MMIOFlush orders ring and doorbell record stores before the register store that follows, and
// empties write-combining buffers of the one that precedes: mmio_wc_start, mmio_flush_writes.
func MMIOFlush()

// MMIOStore64 makes exactly one 8-byte store, in memory order as given. p is 8-byte aligned.
func MMIOStore64(p unsafe.Pointer, v uint64)

// MMIOStore32 makes exactly one 4-byte store. p is 4-byte aligned.
func MMIOStore32(p unsafe.Pointer, v uint32)

// MMIOCopy64 copies n bytes, a multiple of 64, to a device page in ascending 8-byte stores (mmio_memcpy_x64).
func MMIOCopy64(dst, src unsafe.Pointer, n int)

// Gather copies the bytes at virtual address addr to dst: inline data, which an SGE names by its address. The
// caller of a post vouches for the address as it does towards a device.
func Gather(dst []byte, addr uint64) {
	if len(dst) == 0 {
		return
	}
	p := *(*unsafe.Pointer)(unsafe.Pointer(&addr))
	copy(dst, unsafe.Slice((*byte)(p), len(dst)))
}
