package ring

import (
	"fmt"
	"math"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/verbs"
)

// Refusals are the errors of posts, made once: a post allocates nothing.
type Refusals struct {
	SendSGE, RecvSGE, Opcode                      error
	inline, atomicNone, bind, readInline, tooLong error

	maxBind uint64
}

// Refusals makes the family's. A bind takes from 1 to maxBind bytes, in words bindBytes; recvSGE is the library's error number for a
// receive of too many entries.
func (f Family) Refusals(maxBind uint64, bindBytes string, recvSGE unix.Errno) *Refusals {
	refuse := func(what string, e unix.Errno) error { return fmt.Errorf("%s: %s: %w", string(f), what, e) }
	return &Refusals{
		SendSGE:    refuse("more scatter/gather entries than the send queue allows", unix.ENOMEM),
		RecvSGE:    refuse("more scatter/gather entries than the receive queue allows", recvSGE),
		Opcode:     refuse("operation not known to this queue pair", unix.EINVAL),
		inline:     refuse("more inline data than the send queue allows", unix.ENOMEM),
		atomicNone: refuse("atomic operation without operands", unix.EINVAL),
		bind:       refuse("a bind needs a window, a region and "+bindBytes, unix.EINVAL),
		readInline: refuse("an RDMA READ or atomic operation cannot be inline", unix.EINVAL),
		tooLong:    refuse("scatter/gather entries of 4 GiB and more do not make one message", unix.EINVAL),
		maxBind:    maxBind,
	}
}

// Check refuses what a caller can get wrong in a send request whose operation and number of entries are right, before a byte of the
// entry is written. It returns the bytes of all SGEs.
func (r *Refusals) Check(wr *verbs.SendWorkRequest, maxInline int) (total int, err error) {
	for i := range wr.SGList {
		total += int(wr.SGList[i].Length)
	}
	inl := wr.Flags&verbs.SendInline != 0
	switch {
	case total > math.MaxUint32:
		return total, r.tooLong
	case inl && total > maxInline:
		return total, r.inline
	}
	switch wr.Opcode {
	case verbs.OpRDMARead:
		if inl {
			return total, r.readInline
		}
	case verbs.OpCompareSwap, verbs.OpFetchAdd:
		if inl {
			return total, r.readInline
		}
		if wr.Atomic == nil {
			return total, r.atomicNone
		}
	case verbs.OpBindMW:
		if b := wr.Bind; b == nil || b.Window == nil || b.Region == nil || b.Length == 0 || b.Length > r.maxBind {
			return total, r.bind
		}
	}
	return total, nil
}
