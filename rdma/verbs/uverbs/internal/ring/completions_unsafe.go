package ring

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"unsafe"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/udma"
)

// Format is what a family's completion entries look like.
type Format struct {
	Size      int   // bytes of an entry, a power of two
	Described int   // bytes at its end that describe the completion
	Owner     uint8 // the bit of the last byte that has the parity of the ring's lap in entries that are software's
	Unwritten int   // last bytes from here on are the adapter's in any lap; 256: none is
	Number    int   // offset in the description of the word with the 24-bit number of the queue pair
}

// Completions is the ring of a completion queue. An entry (CQE) belongs to the adapter until its owner bit has the
// parity of the ring's lap. A poll checks that bit of all entries it can take, fences once, reads the rest, and gives slots back by
// the consumer index in the doorbell record. One goroutine polls and arms; the lock is held against
// Purge only, which runs when a queue pair is reset or destroyed.
type Completions struct {
	buf     unsafe.Pointer
	rec     unsafe.Pointer // two words: consumer index, arm
	tail    uintptr        // bytes from an entry's start to its description
	last    uintptr        // to its last word
	shift   uint32
	entries uint32
	mask    uint32
	number  int
	sn      atomic.Uint32 // events received

	mu       sync.Mutex
	CI       uint32 // consumer index
	armedAny bool   // armed for any completion with sequence number anySN
	anySN    uint32

	owner uint8
	lap   [256]uint8 // by an entry's last byte, the parity of the lap in which it is software's; 2: none
}

// Init points the queue at its memory. sn is the first event's sequence number, of which two bits travel.
func (c *Completions) Init(buf, rec unsafe.Pointer, entries int, f Format, sn uint32) {
	c.buf, c.rec = buf, rec
	c.entries, c.mask = uint32(entries), uint32(entries)-1
	c.shift = uint32(bits.TrailingZeros(uint(f.Size)))
	c.tail, c.last = uintptr(f.Size-f.Described), uintptr(f.Size-4)
	c.owner = f.Owner
	for last := range c.lap {
		switch {
		case last >= f.Unwritten:
			c.lap[last] = 2
		case uint8(last)&f.Owner != 0:
			c.lap[last] = 1
		default:
			c.lap[last] = 0
		}
	}
	c.number = f.Number
	c.sn.Store(sn)
	*(*uint64)(rec) = 0
}

// Capacity is how many completions the queue holds.
func (c *Completions) Capacity() int { return int(c.entries) - 1 }

// Entry is the description in the entry of index i.
func (c *Completions) Entry(i uint32) unsafe.Pointer {
	return unsafe.Add(c.buf, uintptr(i&c.mask)<<(c.shift&31)+c.tail)
}

// Number is what the entry described at e calls its queue pair.
func (c *Completions) Number(e unsafe.Pointer) uint32 { return Get32(e, c.number) & 0xffffff }

// Ready reports whether the entry of index i is software's.
func (c *Completions) Ready(i uint32) bool {
	last := atomic.LoadUint32((*uint32)(unsafe.Add(c.buf, uintptr(i&c.mask)<<(c.shift&31)+c.last))) >> 24
	lap := uint8(0)
	if i&c.entries != 0 {
		lap = 1
	}
	return c.lap[uint8(last)] == lap
}

// Any reports whether there is an entry to take. The look without the lock is safe: Purge leaves the entry at the old index ready.
func (c *Completions) Any() bool { return c.Ready(c.CI) }

// Begin begins a poll of a queue that has an entry to take. It returns the consumer index.
func (c *Completions) Begin() uint32 {
	udma.Observed()
	c.mu.Lock()
	return c.CI
}

// Take returns the index behind entry ci, which is software's, and as many of the next as are too, up to max together. What they say is read
// behind all their owner bits.
func (c *Completions) Take(ci uint32, max int) uint32 {
	for ci++; max > 1 && c.Ready(ci); max-- {
		ci++
	}
	udma.FromDevice()
	return ci
}

// End ends a poll that has read the entries before ci.
func (c *Completions) End(ci uint32) {
	c.CI = ci
	udma.StoreRecord(c.rec, bits.ReverseBytes32(ci&0xffffff))
	c.mu.Unlock()
}

// BeginArm returns what a request for an event at the next completion says: the consumer index, the sequence number where it stands in the
// request, and whether any completion is meant, as it stays until it is answered (IBA vol. 1, 11.4.2.2), or a solicited one. The
// adapter compares the index with its own producer index, so an entry that arrives meanwhile raises the event too.
func (c *Completions) BeginArm(solicitedOnly bool) (ci, sn uint32, any bool) {
	c.mu.Lock()
	n := c.sn.Load()
	if !solicitedOnly {
		c.armedAny, c.anySN = true, n
	}
	return c.CI & 0xffffff, n & 3 << 28, c.armedAny && c.anySN == n
}

// ArmRecord is the second word of the doorbell record.
func (c *Completions) ArmRecord() unsafe.Pointer { return unsafe.Add(c.rec, 4) }

// EndArm reports, once the request is made, whether there is an entry to take.
func (c *Completions) EndArm() (missed bool) {
	missed = c.Ready(c.CI)
	c.mu.Unlock()
	return missed
}

// Notified tells the queue that its event has been read: the next arm
// request carries the next sequence number, without which the adapter would ignore it.
func (c *Completions) Notified() { c.sn.Add(1) }

// Purge takes the entries of the queue pair that they call number out of the queue. The adapter makes no more of them.
func (c *Completions) Purge(number uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	pi := c.CI
	for pi-c.CI < c.entries && c.Ready(pi) {
		pi++
	}
	freed := uint32(0)
	for i := pi; i != c.CI; {
		i--
		e := c.Entry(i)
		if c.Number(e) == number {
			freed++
		} else if freed > 0 {
			to, from := c.whole(i+freed), c.whole(i)
			last := &to[len(to)-1]
			own := *last & c.owner
			copy(to, from)
			*last = *last&^c.owner | own
		}
	}
	if freed > 0 {
		c.CI += freed
		udma.StoreRecord(c.rec, bits.ReverseBytes32(c.CI&0xffffff))
	}
}

// whole is all bytes of the entry of index i.
func (c *Completions) whole(i uint32) []byte {
	return unsafe.Slice((*byte)(unsafe.Add(c.Entry(i), -int(c.tail))), 1<<c.shift)
}

// Status translates the syndrome of an entry (mlx4dv.h, MLX4_CQE_SYNDROME_*; mlx5dv.h, MLX5_CQE_SYNDROME_*).
func Status(syndrome uint8) verbs.WCStatus {
	switch syndrome {
	case 0x01:
		return verbs.WCLocalLengthError
	case 0x02:
		return verbs.WCLocalQPOperationError
	case 0x04:
		return verbs.WCLocalProtectionError
	case 0x05:
		return verbs.WCFlushError
	case 0x06:
		return verbs.WCMWBindError
	case 0x10:
		return verbs.WCBadResponseError
	case 0x11:
		return verbs.WCLocalAccessError
	case 0x12:
		return verbs.WCRemoteInvalidRequestError
	case 0x13:
		return verbs.WCRemoteAccessError
	case 0x14:
		return verbs.WCRemoteOperationError
	case 0x15:
		return verbs.WCRetryExceeded
	case 0x16:
		return verbs.WCRNRRetryExceeded
	case 0x22:
		return verbs.WCRemoteAborted
	}
	return verbs.WCGeneralError
}
