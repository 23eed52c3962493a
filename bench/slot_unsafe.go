package bench

import (
	"unsafe"

	"srp-initiator/srp"
)

// slotOf is the slot that c is the first field of.
func slotOf(c *srp.Command) *slot { return (*slot)(unsafe.Pointer(c)) }
