package mlx5

import (
	"math/bits"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/ring"
)

const (
	blockSize = 64 // MLX5_SEND_WQE_BB: the unit of the send queue
	segSize   = 16 // a control, remote address or data segment

	// sendOverhead is what a send WQE of an RC queue pair may need besides data: a control
	// segment, a UMR control segment and a memory key context (LOCAL_INV, BIND_MW).
	sendOverhead = 16 + 48 + 64 + 64

	inlineHeader = 4
	maxCQEntries = 1 << 24
)

// Limits are the queue limits that the kernel reports when the device is opened
// (struct mlx5_ib_alloc_ucontext_resp).
type Limits struct {
	MaxSendDesc   int // bytes of the largest send WQE
	MaxRecvDesc   int // bytes of the largest receive WQE
	MaxSendBlocks int // 64-byte blocks in a send queue
	MaxRecvWR     int // entries in a receive queue
}

// Layout is the shape of a queue pair's buffer: receive queue first, then send queue.
type Layout struct {
	SendBlocks int // 64-byte blocks, a power of two or 0
	RecvCount  int // entries, a power of two or 0
	RecvShift  int // log2 of the bytes of a receive entry
	SendOffset int // bytes from the start of the buffer
	Bytes      int // of the whole buffer
	Cap        verbs.QPCap
}

// SizeQP computes the buffer for the capabilities asked for, and what is granted,
// as mlx5_calc_wq_size of libmlx5 does. EINVAL when the device cannot hold it.
func SizeQP(want verbs.QPCap, lim Limits) (Layout, error) {
	l := Layout{Cap: want}
	if err := family.Negative(want); err != nil {
		return l, err
	}
	switch {
	case want.MaxInlineData > lim.MaxSendDesc:
		return l, family.Exceeds("inline data", want.MaxInlineData, lim.MaxSendDesc)
	}
	if want.MaxSendWR > 0 {
		if m := (lim.MaxSendDesc - sendOverhead) / segSize; want.MaxSendSGE > m {
			return l, family.Exceeds("send scatter/gather entries", want.MaxSendSGE, m)
		}
		wqe := sendOverhead + segSize*want.MaxSendSGE
		if want.MaxInlineData > 0 {
			wqe = max(wqe, sendOverhead+ring.Align(inlineHeader+want.MaxInlineData, segSize))
		}
		if wqe > lim.MaxSendDesc {
			return l, family.Exceeds("send work request size", wqe, lim.MaxSendDesc)
		}
		wqe = ring.Align(wqe, blockSize)
		if want.MaxSendWR > lim.MaxSendBlocks {
			return l, family.Exceeds("send work requests", want.MaxSendWR, lim.MaxSendBlocks)
		}
		size := ring.Pow2(want.MaxSendWR * wqe)
		l.SendBlocks = size / blockSize
		if l.SendBlocks > lim.MaxSendBlocks {
			return l, family.Exceeds("send queue blocks", l.SendBlocks, lim.MaxSendBlocks)
		}
		l.Cap.MaxSendWR = size / wqe
		l.Cap.MaxInlineData = max(0, wqe-sendOverhead-inlineHeader)
	}
	if want.MaxRecvWR > 0 {
		if want.MaxRecvWR > lim.MaxRecvWR {
			return l, family.Exceeds("receive work requests", want.MaxRecvWR, lim.MaxRecvWR)
		}
		stride := segSize * max(1, want.MaxRecvSGE)
		if stride > lim.MaxRecvDesc {
			return l, family.Exceeds("receive scatter/gather entries", want.MaxRecvSGE, lim.MaxRecvDesc/segSize)
		}
		stride = ring.Pow2(stride)
		size := max(ring.Pow2(want.MaxRecvWR)*stride, blockSize)
		l.RecvCount = size / stride
		l.RecvShift = bits.TrailingZeros(uint(stride))
		l.Cap.MaxRecvWR = l.RecvCount
		l.Cap.MaxRecvSGE = stride / segSize
	} else {
		l.Cap.MaxRecvSGE = 0
	}
	l.SendOffset = l.RecvCount << l.RecvShift
	l.Bytes = l.SendOffset + l.SendBlocks*blockSize
	return l, nil
}

// CQEntries is the number of entries of a completion queue that is to hold capacity.
func CQEntries(capacity int) (int, error) { return family.CQEntries(capacity, maxCQEntries) }
