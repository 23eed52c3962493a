package verbs

import (
	"sync"

	"srp-initiator/rdma/hostmem"
)

// AccessFlags says what may be done to a region and by whom
// (enum ib_uverbs_access_flags).
type AccessFlags uint32

const (
	AccessLocalWrite   AccessFlags = 1 << 0
	AccessRemoteWrite  AccessFlags = 1 << 1
	AccessRemoteRead   AccessFlags = 1 << 2
	AccessRemoteAtomic AccessFlags = 1 << 3
	AccessMWBind       AccessFlags = 1 << 4
)

// ProtectionDomain ties queue pairs to the regions they may touch.
type ProtectionDomain interface {
	Context() Context
	// RegisterMemory makes mem reachable by the device. mem must stay mapped until
	// Deregister. Remote write without local write is refused (EINVAL), as the
	// kernel refuses it. Pages count against RLIMIT_MEMLOCK on kernel devices.
	RegisterMemory(mem *hostmem.Region, access AccessFlags) (MemoryRegion, error)
	// AllocMW allocates a type 2 memory window: an R_Key that is bound to part of a
	// region by OpBindMW and revoked by OpLocalInv or by the peer's SEND_WITH_INV.
	// ErrNotSupported where the provider has none.
	AllocMW() (MemoryWindow, error)
	CreateQP(QPInit) (QueuePair, error)
	Dealloc() error
}

// MemoryRegion is registered memory. Addresses used in SGEs and given to peers
// are the region's own virtual addresses.
type MemoryRegion interface {
	Addr() uint64 // of the first byte
	Len() int     // bytes
	LKey() uint32
	RKey() uint32
	Deregister() error
}

// MemoryLocker is what a Context is besides when it moves data with the CPU, packet by packet, and holds a lock over each. Who holds
// MemoryLock for a change of registered memory makes it between two packets: none carries a part of the change. While it is held no verb may be called.
type MemoryLocker interface {
	MemoryLock() sync.Locker
}

// MemoryWindow is a type 2 memory window. Its R_Key's low byte is the
// caller's: each bind must use a value different from the last one.
type MemoryWindow interface {
	// RKey is the key that the most recent bind made, or the initial key.
	RKey() uint32
	Dealloc() error
}

// SGE is one scatter/gather entry: length bytes of registered memory at a
// virtual address.
type SGE struct {
	Addr   uint64
	Length uint32
	LKey   uint32
}
