package golden

import (
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The user buffer of the recordings: its addresses are in the work queue entries.
const (
	MemoryAddr = 0x100000000000
	memoryLen  = 1 << 20
)

var memoryOnce = sync.OnceValues(func() ([]byte, error) {
	addr, _, e := unix.Syscall6(unix.SYS_MMAP, MemoryAddr, memoryLen, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED_NOREPLACE, ^uintptr(0), 0)
	if e != 0 {
		return nil, fmt.Errorf("map the recordings' buffer at %#x: %w", uint64(MemoryAddr), e)
	}
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&addr))), memoryLen), nil
})

// Memory is the user buffer at MemoryAddr.
func Memory() []byte {
	b, err := memoryOnce()
	if err != nil {
		panic(err)
	}
	return b
}

// FillMemory gives the user buffer its recorded contents.
func FillMemory() {
	b := Memory()
	for o := range b {
		b[o] = byte(o*7 + (o>>8)*13 + 5)
	}
}
