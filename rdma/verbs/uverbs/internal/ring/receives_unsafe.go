package ring

import (
	"math/bits"
	"sync/atomic"
	"unsafe"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/udma"
)

const segSize = 16 // of a data segment

// InvalidLKey ends the scatter list of a receive that has fewer entries than its slot (mlx4dv.h, MLX4_INVALID_LKEY; mlx5dv.h,
// MLX5_INVALID_LKEY).
const InvalidLKey = 0x100

// Receives is a receive queue: entries of data segments, with a work request id beside each. The posting goroutine owns head, the
// poller of the completion queue owns received, which reaches the posting side by published.
type Receives struct {
	buf       unsafe.Pointer
	ids       unsafe.Pointer
	rec       unsafe.Pointer // one word: head
	shift     uint32
	mask      uint32
	maxWR     uint32
	maxSGE    int
	tooMany   error
	leaveOut  bool // segments of no bytes
	head      uint32
	published atomic.Uint32

	received uint32 // the poller's
}

// ReceiveShape is what the ring of a receive queue looks like.
type ReceiveShape struct {
	Count    int // entries, a power of two or 0
	Shift    int // log2 of the bytes of an entry
	Cap      verbs.QPCap
	TooMany  error // of a request with more scatter/gather entries than Cap has
	LeaveOut bool  // segments of no bytes, which the adapter would take for 2 GiB
}

// Init points the queue at its memory: ids has 8 bytes for each entry, rec is the word of the doorbell record.
func (r *Receives) Init(buf, ids, rec unsafe.Pointer, s ReceiveShape) {
	r.buf, r.ids, r.rec = buf, ids, rec
	r.shift, r.mask = uint32(s.Shift), uint32(s.Count)-1
	r.maxWR, r.maxSGE = uint32(s.Cap.MaxRecvWR), s.Cap.MaxRecvSGE
	r.tooMany, r.leaveOut = s.TooMany, s.LeaveOut
}

// Reset empties the queue, but for its record. Neither side is posting.
func (r *Receives) Reset() {
	r.head, r.received = 0, 0
	r.published.Store(0)
}

// Post writes one receive entry per request and publishes them in the doorbell record; the adapter
// reads it when a message arrives.
func (r *Receives) Post(wrs []verbs.RecvWorkRequest) (posted int, err error) {
	head := r.head
	free := r.maxWR - (head - r.published.Load())
	for posted < len(wrs) {
		wr := &wrs[posted]
		if free == 0 {
			err = verbs.ErrQueueFull
			break
		}
		if len(wr.SGList) > r.maxSGE {
			err = r.tooMany
			break
		}
		idx := head & r.mask
		seg := r.Entry(idx)
		n := 0
		for i := range wr.SGList {
			sge := &wr.SGList[i]
			if sge.Length == 0 && r.leaveOut {
				continue
			}
			Put64(seg, 0, uint64(sge.Length)<<32|uint64(sge.LKey))
			Put64(seg, 8, sge.Addr)
			seg = unsafe.Add(seg, segSize)
			n++
		}
		if n < r.maxSGE {
			Put64(seg, 0, InvalidLKey)
			Put64(seg, 8, 0)
		}
		*(*uint64)(unsafe.Add(r.ids, uintptr(idx)*8)) = wr.WRID
		head++
		free--
		posted++
	}
	if posted > 0 {
		r.head = head
		udma.Published()
		udma.StoreRecord(r.rec, bits.ReverseBytes32(head&0xffff))
	}
	return posted, err
}

// Entry is the slot of index i, which must be below the count.
func (r *Receives) Entry(i uint32) unsafe.Pointer { return unsafe.Add(r.buf, uintptr(i)<<(r.shift&31)) }

// Retire is the poller's: it takes back the oldest entry and returns its index and work request id.
func (r *Receives) Retire() (i uint32, id uint64) {
	i = r.received & r.mask
	r.received++
	return i, *(*uint64)(unsafe.Add(r.ids, uintptr(i)*8))
}

// Publish is the poller's: it tells the posting side of what was retired. r may be nil.
func (r *Receives) Publish() {
	if r != nil {
		r.published.Store(r.received)
	}
}
