package mlx4

// A completion entry (CQE) belongs to the adapter until its owner bit has the
// parity of the ring's lap. Poll checks that bit of all entries it can take, fences once, reads the rest, and gives slots back by
// the consumer index in the doorbell record. One goroutine polls and arms; mu is held against
// purge only, which runs when a queue pair is reset or destroyed.

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"unsafe"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/numtable"
	"srp-initiator/rdma/verbs/uverbs/internal/udma"
)

// The last byte of an entry (mlx4dv.h, MLX4_CQE_*).
const (
	cqeOwner = 0x80
	cqeSend  = 0x40
	cqeOp    = 0x1f

	cqeRecvWriteImm = 0 // 1 is a SEND
	cqeRecvSendImm  = 2
	cqeRecvSendInv  = 3
	cqeError        = 0x1e
)

const (
	armAny       = 2 << 24
	armSolicited = 1 << 24
	armDoorbell  = 0x20 // MLX4_CQ_DOORBELL, offset in the UAR page
)

// QPTable finds queue pairs by number.
type QPTable = numtable.Table[QP]

// CQ is the adapter side of a completion queue.
type CQ struct {
	buf     unsafe.Pointer
	rec     unsafe.Pointer // two words: consumer index, arm
	armReg  unsafe.Pointer
	qps     *QPTable
	shift   uint32
	tail    uintptr // bytes from an entry's start to its last 32
	entries uint32
	cqn     uint32
	sn      atomic.Uint32 // events received, from 1

	mu       sync.Mutex
	ci       uint32 // consumer index
	armedAny bool   // armed for any completion with sequence number anySN
	anySN    uint32
}

// init points the queue at its memory, which is zero. The kernel or the firmware gives the entries to the
// adapter when the queue is created; software must not touch them afterwards.
func (c *CQ) init(buf, rec, uar unsafe.Pointer, entries, cqeSize int, qps *QPTable) {
	c.buf, c.rec = buf, rec
	c.entries = uint32(entries)
	c.shift = uint32(bits.TrailingZeros(uint(cqeSize)))
	c.tail = uintptr(cqeSize - 32)
	c.qps = qps
	c.armReg = unsafe.Add(uar, armDoorbell)
	c.sn.Store(1) // of which two bits travel
	*(*uint64)(rec) = 0
}

func (c *CQ) entry(i uint32) unsafe.Pointer {
	return unsafe.Add(c.buf, uintptr(i&(c.entries-1))<<(c.shift&31)+c.tail)
}

// ready reports whether e, entry of index i, is software's.
func (c *CQ) ready(e unsafe.Pointer, i uint32) bool {
	op := atomic.LoadUint32((*uint32)(unsafe.Add(e, 28))) >> 24
	return (op&cqeOwner != 0) == (i&c.entries != 0)
}

func get32(e unsafe.Pointer, off int) uint32 {
	return bits.ReverseBytes32(*(*uint32)(unsafe.Add(e, off)))
}

// statusOf translates a syndrome (mlx4dv.h, MLX4_CQE_SYNDROME_*).
func statusOf(syndrome uint8) verbs.WCStatus {
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

// sendDone says how the completion of each send opcode is reported.
var sendDone = [cqeOp + 1]struct {
	opcode verbs.WCOpcode
	flags  verbs.WCFlags
	length uint32
	mask   uint32 // of the entry's byte count
}{
	opSendImm:      {flags: verbs.WCWithImm},
	opRDMAWrite:    {opcode: verbs.WCRDMAWrite},
	opRDMAWriteImm: {opcode: verbs.WCRDMAWrite, flags: verbs.WCWithImm},
	opRDMARead:     {opcode: verbs.WCRDMARead, mask: ^uint32(0)},
	opAtomicCS:     {opcode: verbs.WCCompareSwap, length: 8},
	opAtomicFA:     {opcode: verbs.WCFetchAdd, length: 8},
	opLocalInval:   {opcode: verbs.WCLocalInv},
	opBindMW:       {opcode: verbs.WCBindMW},
}

// Poll takes up to len(wcs) completions.
func (c *CQ) Poll(wcs []verbs.WorkCompletion) int {
	// The look without the lock is safe: purge leaves the entry at the old index ready.
	if len(wcs) == 0 || !c.ready(c.entry(c.ci), c.ci) {
		return 0
	}
	udma.Observed()
	c.mu.Lock()
	n, ci := 0, c.ci
	for n < len(wcs) { // again when entries were of queue pairs that are gone
		end := c.complete(ci, len(wcs)-n)
		if end == ci {
			break
		}
		udma.FromDevice() // what they say behind all their owner bits
		n += c.decode(wcs[n:], ci, end)
		ci = end
	}
	c.ci = ci
	udma.StoreRecord(c.rec, bits.ReverseBytes32(ci&0xffffff))
	c.mu.Unlock()
	return n
}

// complete returns the index behind the entries from ci on, up to max, that are software's.
func (c *CQ) complete(ci uint32, max int) uint32 {
	for ; max > 0 && c.ready(c.entry(ci), ci); max-- {
		ci++
	}
	return ci
}

// decode reports the entries from ci to end.
func (c *CQ) decode(wcs []verbs.WorkCompletion, ci, end uint32) (n int) {
	var (
		q    *QP // the last one seen
		sent *QP // has an unpublished send count
		recv *QP // has an unpublished receive count
	)
	for ; ci != end && n < len(wcs); ci++ {
		e := c.entry(ci)
		qpn := get32(e, 0) & 0xffffff
		if q == nil || q.qpn != qpn {
			if q = c.qps.Get(qpn); q == nil {
				continue // of a queue pair that is gone
			}
		}
		wc := &wcs[n]
		n++
		op := uint32(*(*uint8)(unsafe.Add(e, 31)))
		if op&cqeSend != 0 {
			i := get32(e, 24) >> 16
			wc.WRID = *(*uint64)(unsafe.Add(q.wrid, uintptr(i&q.sqMask)*8))
			q.sent += uint32(uint16(i-q.sent)) + 1
			if sent != q {
				sent.publishSent()
				sent = q
			}
			d := &sendDone[op&cqeOp]
			wc.Status, wc.Opcode = verbs.WCSuccess, d.opcode
			wc.ByteLen, wc.ImmData = d.length|get32(e, 20)&d.mask, 0
			wc.QPN, wc.Flags, wc.VendorErr = qpn, d.flags, 0
		} else {
			wc.WRID = *(*uint64)(unsafe.Add(q.rwrid, uintptr(q.received&q.rqMask)*8))
			q.received++
			if recv != q {
				recv.publishReceived()
				recv = q
			}
			wc.Status, wc.ImmData, wc.QPN, wc.Flags, wc.VendorErr = verbs.WCSuccess, 0, qpn, 0, 0
			decodeResponder(wc, e, op&cqeOp)
		}
		if op&cqeOp == cqeError {
			b := get32(e, 24)
			*wc = verbs.WorkCompletion{WRID: wc.WRID, QPN: qpn, Status: statusOf(uint8(b)), VendorErr: b >> 8 & 0xff}
		}
	}
	sent.publishSent()
	recv.publishReceived()
	return n
}

func (q *QP) publishSent() {
	if q != nil {
		q.sentPub.Store(q.sent)
	}
}

func (q *QP) publishReceived() {
	if q != nil {
		q.receivedPub.Store(q.received)
	}
}

func decodeResponder(wc *verbs.WorkCompletion, e unsafe.Pointer, op uint32) {
	wc.Opcode = verbs.WCRecv
	wc.ByteLen = get32(e, 20)
	switch op {
	case cqeRecvWriteImm:
		wc.Opcode = verbs.WCRecvRDMAWr
		fallthrough
	case cqeRecvSendImm:
		wc.Flags = verbs.WCWithImm
		wc.ImmData = get32(e, 4)
	case cqeRecvSendInv:
		wc.Flags = verbs.WCWithInv
		wc.ImmData = get32(e, 4)
	}
	if get32(e, 8)>>31 != 0 {
		wc.Flags |= verbs.WCWithGRH
	}
}

// Arm asks for an event at the next completion. The adapter compares the consumer index in the request
// with its own producer index, so an entry that arrives meanwhile raises the event too.
func (c *CQ) Arm(solicitedOnly bool) (missed bool, err error) {
	c.mu.Lock()
	sn := c.sn.Load()
	w := sn & 3 << 28
	if !solicitedOnly {
		c.armedAny, c.anySN = true, sn
	}
	if c.armedAny && c.anySN == sn {
		w |= armAny // and stays so until it is answered (IBA vol. 1, 11.4.2.2)
	} else {
		w |= armSolicited
	}
	ci := c.ci & 0xffffff
	udma.StoreRecord(unsafe.Add(c.rec, 4), bits.ReverseBytes32(w|ci))
	udma.Store64(c.armReg, bits.ReverseBytes64(uint64(w|c.cqn)<<32|uint64(ci)))
	missed = c.ready(c.entry(c.ci), c.ci)
	c.mu.Unlock()
	return missed, nil
}

// Notified tells the queue that its event has been read: the next arm
// request carries the next sequence number, without which the adapter would ignore it.
func (c *CQ) Notified() { c.sn.Add(1) }

// purge takes the entries of queue pair qpn out of the queue. The adapter makes no more of them.
func (c *CQ) purge(qpn uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	pi := c.ci
	for pi-c.ci < c.entries && c.ready(c.entry(pi), pi) {
		pi++
	}
	freed := uint32(0)
	for i := pi; i != c.ci; {
		i--
		e := c.entry(i)
		if get32(e, 0)&0xffffff == qpn {
			freed++
		} else if freed > 0 {
			d := c.entry(i + freed)
			p := (*uint8)(unsafe.Add(d, 31))
			own := *p & cqeOwner
			*(*[32]byte)(d) = *(*[32]byte)(e)
			*p = *p&^cqeOwner | own
		}
	}
	if freed > 0 {
		c.ci += freed
		udma.StoreRecord(c.rec, bits.ReverseBytes32(c.ci&0xffffff))
	}
}
