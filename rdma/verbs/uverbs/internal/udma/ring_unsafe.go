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

// StoreFlush64 stores one 8-byte register between a write-combining fence and a flush.
//
//go:noescape
func StoreFlush64(reg unsafe.Pointer, val uint64)

// Store64 makes all earlier stores visible to the device and then stores one 8-byte register.
//
//go:noescape
func Store64(reg unsafe.Pointer, val uint64)

// LoadDevice32 loads a word that the device writes last, and orders all later loads behind it.
//
//go:noescape
func LoadDevice32(p unsafe.Pointer) uint32

// Pointer is the address in a scatter/gather entry as a pointer: memory outside
// Go's heap that the caller promises to be mapped.
func Pointer(addr uint64) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&addr)) }
