package mlx5

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

// CQE opcodes, the high four bits of the last byte (mlx5dv.h, MLX5_CQE_*).
const (
	cqeRequester    = 0
	cqeRecvWriteImm = 1
	cqeRecvSend     = 2
	cqeRecvSendImm  = 3
	cqeRecvSendInv  = 4
	cqeErrRequester = 13
	cqeErrResponder = 14
	cqeInvalid      = 15
)

// Flags in the low four bits of the last byte.
const (
	cqeOwner      = 1
	cqePayload32  = 1 << 2
	cqePayload64  = 1 << 3
	cqeCompressed = cqePayload32 | cqePayload64
)

const (
	armSolicited = 1 << 24
	armOffset    = 0x20 // of the arm register in a UAR page (MLX5_CQ_DOORBELL)
)

// QPTable finds queue pairs by what CQEs call them.
type QPTable = numtable.Table[QP]

// CQ is the adapter side of a completion queue.
type CQ struct {
	buf     unsafe.Pointer
	rec     unsafe.Pointer // two words: consumer index, arm
	armReg  unsafe.Pointer // page + 0x20 of a UAR
	qps     *QPTable
	byQPN   bool // CQE version 0: entries name queue pairs by number, not user index
	shift   uint32
	tail    uintptr // bytes from an entry's start to its last 64
	entries uint32
	cqn     uint32
	sn      atomic.Uint32 // events received

	mu       sync.Mutex
	ci       uint32 // consumer index
	armedAny bool   // armed for any completion with sequence number anySN
	anySN    uint32
}

// init points the queue at its memory and makes every entry the adapter's. The kernel must see the buffer
// afterwards only.
func (c *CQ) init(buf, rec unsafe.Pointer, entries, cqeSize int, qps *QPTable, byQPN bool) {
	c.buf, c.rec = buf, rec
	c.entries = uint32(entries)
	c.shift = uint32(bits.TrailingZeros(uint(cqeSize)))
	c.tail = uintptr(cqeSize - 64)
	c.qps, c.byQPN = qps, byQPN
	for i := range uintptr(entries) {
		*(*uint8)(unsafe.Add(buf, i<<c.shift+c.tail+63)) = cqeInvalid << 4
	}
	*(*uint64)(rec) = 0
}

// entry is the 64 bytes that describe completion index i.
func (c *CQ) entry(i uint32) unsafe.Pointer {
	return unsafe.Add(c.buf, uintptr(i&(c.entries-1))<<(c.shift&31)+c.tail)
}

// ready reports whether e, entry of index i, is software's.
func (c *CQ) ready(e unsafe.Pointer, i uint32) bool {
	op := atomic.LoadUint32((*uint32)(unsafe.Add(e, 60))) >> 24
	return op>>4 != cqeInvalid && (op&cqeOwner != 0) == (i&c.entries != 0)
}

func get32(e unsafe.Pointer, off int) uint32 {
	return bits.ReverseBytes32(*(*uint32)(unsafe.Add(e, off)))
}

// statusOf translates a syndrome (mlx5dv.h, MLX5_CQE_SYNDROME_*).
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

// sendDone says how the completion of each send opcode is reported; one that is not known as a SEND, as libmlx5 does.
var sendDone = [256]struct {
	opcode verbs.WCOpcode
	flags  verbs.WCFlags
	length uint32
	mask   uint32 // of the entry's byte count
	noted  uint32 // mask of the slot's opcode
}{
	opSendImm:      {flags: verbs.WCWithImm},
	opRDMAWrite:    {opcode: verbs.WCRDMAWrite},
	opRDMAWriteImm: {opcode: verbs.WCRDMAWrite, flags: verbs.WCWithImm},
	opRDMARead:     {opcode: verbs.WCRDMARead, mask: ^uint32(0)},
	opAtomicCS:     {opcode: verbs.WCCompareSwap, length: 8},
	opAtomicFA:     {opcode: verbs.WCFetchAdd, length: 8},
	opUMR:          {noted: ^uint32(0)},
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
		rsn := get32(e, 32) & 0xffffff
		if c.byQPN {
			rsn = get32(e, 56) & 0xffffff
		}
		if q == nil || q.rsn != rsn {
			if q = c.qps.Get(rsn); q == nil {
				continue // of a queue pair that is gone
			}
		}
		last := *(*uint32)(unsafe.Add(e, 60))
		op := last >> 24
		kind := op >> 4
		wc := &wcs[n]
		switch kind {
		case cqeRequester, cqeErrRequester:
			s := (*slot)(unsafe.Add(q.slots, uintptr(uint32(bits.ReverseBytes16(uint16(last)))&q.sqMask)*slotSize))
			wc.WRID = s.wrid
			q.sent = s.head
			if sent != q {
				sent.publishSent()
				sent = q
			}
			d := &sendDone[*(*uint8)(unsafe.Add(e, 56))]
			wc.Status, wc.Opcode = verbs.WCSuccess, d.opcode|verbs.WCOpcode(s.op&d.noted)
			wc.ByteLen, wc.ImmData = d.length|get32(e, 44)&d.mask, 0
			wc.QPN, wc.Flags, wc.VendorErr = q.qpn, d.flags, 0
			if op&cqeCompressed != 0 && kind == cqeRequester {
				q.requesterPayload(wc, e, last)
			}
		case cqeRecvWriteImm, cqeRecvSend, cqeRecvSendImm, cqeRecvSendInv, cqeErrResponder:
			idx := q.received & q.rqMask
			wc.WRID = *(*uint64)(unsafe.Add(q.rwrid, uintptr(idx)*8))
			q.received++
			if recv != q {
				recv.publishReceived()
				recv = q
			}
			wc.Status, wc.ImmData, wc.QPN, wc.Flags, wc.VendorErr = verbs.WCSuccess, 0, q.qpn, 0, 0
			decodeResponder(wc, e, kind)
			if op&cqeCompressed != 0 && kind != cqeErrResponder {
				q.responderPayload(wc, e, op, idx)
			}
		default:
			continue // none that an RC queue pair makes
		}
		if kind == cqeErrRequester || kind == cqeErrResponder {
			b := get32(e, 52)
			*wc = verbs.WorkCompletion{WRID: wc.WRID, QPN: q.qpn, Status: statusOf(uint8(b)), VendorErr: b >> 8 & 0xff}
		}
		n++
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
	wc.ByteLen = get32(e, 44)
	switch op {
	case cqeRecvWriteImm:
		wc.Opcode = verbs.WCRecvRDMAWr
		fallthrough
	case cqeRecvSendImm:
		wc.Flags = verbs.WCWithImm
		wc.ImmData = get32(e, 36)
	case cqeRecvSendInv:
		wc.Flags = verbs.WCWithInv
		wc.ImmData = get32(e, 36)
	}
	if get32(e, 24)>>28&3 != 0 {
		wc.Flags |= verbs.WCWithGRH
	}
}

// payload is where the data lies that the adapter put into the entry itself: up to 32 bytes at the start of
// the describing part, or up to 64 in the first half of a 128-byte entry.
func payload(e unsafe.Pointer, op uint32) unsafe.Pointer {
	if op&cqePayload32 != 0 {
		return e
	}
	return unsafe.Add(e, -64)
}

// responderPayload scatters a received payload to the buffers of receive entry idx.
func (q *QP) responderPayload(wc *verbs.WorkCompletion, e unsafe.Pointer, op, idx uint32) {
	if op&cqeCompressed == cqeCompressed {
		wc.Status = verbs.WCGeneralError // a compressed entry, which was not asked for
		return
	}
	seg := unsafe.Add(q.rq, uintptr(idx)<<q.rqShift)
	end := unsafe.Add(seg, 1<<q.rqShift)
	if !scatter(payload(e, op), wc.ByteLen, seg, end, nil, uint32(q.cap.MaxRecvSGE)) {
		wc.Status = verbs.WCLocalLengthError
	}
}

// requesterPayload scatters what a READ or an atomic operation returned to the buffers that its WQE names.
func (q *QP) requesterPayload(wc *verbs.WorkCompletion, e unsafe.Pointer, last uint32) {
	op := last >> 24
	if op&cqeCompressed == cqeCompressed {
		wc.Status = verbs.WCGeneralError
		return
	}
	skip := uint32(2) // control and remote address
	switch wc.Opcode {
	case verbs.WCRDMARead:
	case verbs.WCCompareSwap, verbs.WCFetchAdd:
		skip = 3
	default:
		return
	}
	idx := uint32(bits.ReverseBytes16(uint16(last))) & q.sqMask
	c := unsafe.Add(q.sq, uintptr(idx)*blockSize)
	ds := get32(c, 4) & 0x3f
	if ds < skip {
		wc.Status = verbs.WCLocalLengthError
		return
	}
	seg := unsafe.Add(c, uintptr(skip)*segSize)
	if seg == q.sqEnd {
		seg = q.sq
	}
	if !scatter(payload(e, op), wc.ByteLen, seg, q.sqEnd, q.sq, ds-skip) {
		wc.Status = verbs.WCLocalLengthError
	}
}

// scatter copies n bytes to the buffers of up to max data segments from seg on;
// at end it goes on at wrap. It reports whether they had room.
func scatter(src unsafe.Pointer, n uint32, seg, end, wrap unsafe.Pointer, max uint32) bool {
	for ; n > 0 && max > 0; max-- {
		if seg == end {
			seg = wrap
		}
		room, key := get32(seg, 0), get32(seg, 4)
		if room == 0 && key == invalidLKey {
			return false
		}
		addr := bits.ReverseBytes64(*(*uint64)(unsafe.Add(seg, 8)))
		k := min(n, room)
		copy(unsafe.Slice((*byte)(udma.Pointer(addr)), k), unsafe.Slice((*byte)(src), k))
		src = unsafe.Add(src, k)
		n -= k
		seg = unsafe.Add(seg, segSize)
	}
	return n == 0
}

// Arm asks for an event at the next completion. The adapter compares the consumer index in the request
// with its own producer index, so an entry that arrives meanwhile raises the event too.
func (c *CQ) Arm(solicitedOnly bool) (missed bool, err error) {
	c.mu.Lock()
	sn := c.sn.Load()
	w := sn&3<<28 | c.ci&0xffffff
	if !solicitedOnly {
		c.armedAny, c.anySN = true, sn
	} else if !c.armedAny || c.anySN != sn {
		w |= armSolicited // a request for any completion that has not been answered stays one (IBA vol. 1, 11.4.2.2)
	}
	udma.Ring(unsafe.Add(c.rec, 4), bits.ReverseBytes32(w), c.armReg, bits.ReverseBytes64(uint64(w)<<32|uint64(c.cqn)))
	missed = c.ready(c.entry(c.ci), c.ci)
	c.mu.Unlock()
	return missed, nil
}

// Notified tells the queue that its event has been read: the next arm
// request carries the next sequence number, without which the adapter would ignore it.
func (c *CQ) Notified() { c.sn.Add(1) }

// purge takes the entries of queue pair rsn out of the queue. The adapter makes no more of them.
func (c *CQ) purge(rsn uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	pi := c.ci
	for pi-c.ci < c.entries && c.ready(c.entry(pi), pi) {
		pi++
	}
	freed := uint32(0)
	size := uintptr(1) << c.shift
	for i := pi; i != c.ci; {
		i--
		e := c.entry(i)
		got := get32(e, 32) & 0xffffff
		if c.byQPN {
			got = get32(e, 56) & 0xffffff
		}
		if got == rsn {
			freed++
		} else if freed > 0 {
			d := c.entry(i + freed)
			own := *(*uint8)(unsafe.Add(d, 63)) & cqeOwner
			copy(unsafe.Slice((*byte)(unsafe.Add(d, -int(c.tail))), size), unsafe.Slice((*byte)(unsafe.Add(e, -int(c.tail))), size))
			p := (*uint8)(unsafe.Add(d, 63))
			*p = *p&^cqeOwner | own
		}
	}
	if freed > 0 {
		c.ci += freed
		udma.StoreRecord(c.rec, bits.ReverseBytes32(c.ci&0xffffff))
	}
}
