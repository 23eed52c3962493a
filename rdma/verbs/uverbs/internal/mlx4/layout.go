package mlx4

import (
	"math/bits"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/ring"
)

const (
	segSize   = 16
	lineSize  = 64 // what the adapter prefetches; inline data is cut at it
	maxInline = 1024
	prefetch  = 2048 // bytes that the adapter may read ahead in the send queue
	maxCQE    = 1 << 22
)

// Limits are the device's (struct ib_uverbs_query_device_resp).
type Limits struct {
	MaxWR  int // work requests in a queue
	MaxSGE int
}

// Layout is the shape of a queue pair's buffer, in which the queue with the larger stride comes first.
type Layout struct {
	SendCount  int // entries, a power of two
	SendShift  int // log2 of the bytes of a send entry
	SendSpare  int // entries that stay free for the adapter's prefetch
	RecvCount  int
	RecvShift  int
	SendOffset int // bytes from the start of the buffer
	RecvOffset int
	Bytes      int
	Cap        verbs.QPCap
}

// SizeQP computes the buffer for the capabilities asked for, and what is granted, as
// mlx4_create_qp of libmlx4 does. EINVAL when the device cannot hold it.
func SizeQP(want verbs.QPCap, lim Limits) (Layout, error) {
	l := Layout{}
	if err := family.Negative(want); err != nil {
		return l, err
	}
	switch {
	case want.MaxSendWR > lim.MaxWR:
		return l, family.Exceeds("send work requests", want.MaxSendWR, lim.MaxWR)
	case want.MaxRecvWR > lim.MaxWR:
		return l, family.Exceeds("receive work requests", want.MaxRecvWR, lim.MaxWR)
	case want.MaxSendSGE > lim.MaxSGE:
		return l, family.Exceeds("send scatter/gather entries", want.MaxSendSGE, lim.MaxSGE)
	case want.MaxRecvSGE > lim.MaxSGE:
		return l, family.Exceeds("receive scatter/gather entries", want.MaxRecvSGE, lim.MaxSGE)
	case want.MaxInlineData > maxInline:
		return l, family.Exceeds("inline data", want.MaxInlineData, maxInline)
	}
	// Inline data carries a 4-byte header in each line; the first line of a WQE has 64-16-16-4 = 28
	// bytes for it, and the count rounds up so that any alignment fits (num_inline_segs of libmlx4).
	const perLine = lineSize - 4
	pieces := (want.MaxInlineData + segSize + segSize + perLine - 1) / perLine
	units := max(ring.Align(want.MaxInlineData+4*pieces, segSize)/segSize, want.MaxSendSGE)
	size := max(units*segSize+segSize, 48) // a remote address, or remote address, atomic and one entry
	size += segSize                        // control
	stride := max(ring.Pow2(size), lineSize)
	l.SendShift = bits.TrailingZeros(uint(stride))
	l.SendSpare = prefetch/stride + 1
	l.SendCount = ring.Pow2(want.MaxSendWR + l.SendSpare)
	l.Cap.MaxSendWR = l.SendCount - l.SendSpare
	room := stride - 2*segSize
	l.Cap.MaxSendSGE = room / segSize
	l.Cap.MaxInlineData = room - 4*(ring.Align(room, lineSize)/lineSize)

	l.RecvCount = ring.Pow2(want.MaxRecvWR)
	recv := ring.Pow2(segSize * max(1, want.MaxRecvSGE))
	l.RecvShift = bits.TrailingZeros(uint(recv))
	l.Cap.MaxRecvWR = l.RecvCount
	l.Cap.MaxRecvSGE = recv / segSize
	if recv > stride {
		l.SendOffset = l.RecvCount << l.RecvShift
	} else {
		l.RecvOffset = l.SendCount << l.SendShift
	}
	l.Bytes = l.RecvCount<<l.RecvShift + l.SendCount<<l.SendShift
	return l, nil
}

// CQEntries is the number of entries of a completion queue that is to hold capacity.
func CQEntries(capacity int) (int, error) { return family.CQEntries(capacity, maxCQE) }
