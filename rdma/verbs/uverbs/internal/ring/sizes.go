package ring

import (
	"fmt"
	"math/bits"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/verbs"
)

// Pow2 is the lowest power of two that is at least n and 1.
func Pow2(n int) int {
	if n < 1 {
		return 1
	}
	return 1 << bits.Len(uint(n-1))
}

// Align rounds n up to a multiple of to, a power of two.
func Align(n, to int) int { return (n + to - 1) &^ (to - 1) }

// Family is the name that begins a family's errors.
type Family string

// Exceeds says that more was asked for than the device has.
func (f Family) Exceeds(what string, got, max int) error {
	return fmt.Errorf("%s: %s %d exceeds the device's %d: %w", string(f), what, got, max, unix.EINVAL)
}

// Negative refuses a capability below zero.
func (f Family) Negative(want verbs.QPCap) error {
	if want.MaxSendWR < 0 || want.MaxRecvWR < 0 || want.MaxSendSGE < 0 || want.MaxRecvSGE < 0 || want.MaxInlineData < 0 {
		return fmt.Errorf("%s: negative queue pair capability: %w", string(f), unix.EINVAL)
	}
	return nil
}

// CQEntries is the number of entries of a completion queue that is to hold capacity, which must be below max.
func (f Family) CQEntries(capacity, max int) (int, error) {
	if capacity < 1 || capacity >= max {
		return 0, f.Exceeds("completion queue entries", capacity, max-1)
	}
	return Pow2(capacity + 1), nil
}
