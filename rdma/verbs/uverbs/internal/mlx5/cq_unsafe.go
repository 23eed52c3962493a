package mlx5

import (
	"math/bits"
	"unsafe"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/numtable"
	"srp-initiator/rdma/verbs/uverbs/internal/ring"
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
	ring.Completions
	qps    *QPTable
	armReg unsafe.Pointer // page + 0x20 of a UAR
	cqn    uint32
}

// init points the queue at its memory and makes every entry the adapter's. The kernel must see the buffer
// afterwards only. byQPN is CQE version 0: entries name queue pairs by number, not user index.
func (c *CQ) init(buf, rec unsafe.Pointer, entries, cqeSize int, qps *QPTable, byQPN bool) {
	f := ring.Format{Size: cqeSize, Described: 64, Owner: cqeOwner, Unwritten: cqeInvalid << 4, Number: 32}
	if byQPN {
		f.Number = 56
	}
	c.Init(buf, rec, entries, f, 0)
	c.qps = qps
	for i := range uint32(entries) {
		*(*uint8)(unsafe.Add(c.Entry(i), 63)) = cqeInvalid << 4
	}
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
func (c *CQ) Poll(wcs []verbs.WorkCompletion) (n int) {
	if len(wcs) == 0 || !c.Any() {
		return 0
	}
	ci := c.Begin()
	for n < len(wcs) && c.Ready(ci) { // again when entries were of queue pairs that are gone
		end := c.Take(ci, len(wcs)-n)
		n += c.decode(wcs[n:], ci, end)
		ci = end
	}
	c.End(ci)
	return n
}

// decode reports the entries from ci to end.
func (c *CQ) decode(wcs []verbs.WorkCompletion, ci, end uint32) (n int) {
	var (
		q    *QP            // the last one seen
		sent *QP            // has an unpublished send count
		recv *ring.Receives // has an unpublished receive count
	)
	for ; ci != end && n < len(wcs); ci++ {
		e := c.Entry(ci)
		rsn := c.Number(e)
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
			wc.ByteLen, wc.ImmData = d.length|ring.Get32(e, 44)&d.mask, 0
			wc.QPN, wc.Flags, wc.VendorErr = q.qpn, d.flags, 0
			if op&cqeCompressed != 0 && kind == cqeRequester {
				q.requesterPayload(wc, e, last)
			}
		case cqeRecvWriteImm, cqeRecvSend, cqeRecvSendImm, cqeRecvSendInv, cqeErrResponder:
			var idx uint32
			idx, wc.WRID = q.recvs.Retire()
			if recv != &q.recvs {
				recv.Publish()
				recv = &q.recvs
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
			b := ring.Get32(e, 52)
			*wc = verbs.WorkCompletion{WRID: wc.WRID, QPN: q.qpn, Status: ring.Status(uint8(b)), VendorErr: b >> 8 & 0xff}
		}
		n++
	}
	sent.publishSent()
	recv.Publish()
	return n
}

func (q *QP) publishSent() {
	if q != nil {
		q.sentPub.Store(q.sent)
	}
}

func decodeResponder(wc *verbs.WorkCompletion, e unsafe.Pointer, op uint32) {
	wc.Opcode = verbs.WCRecv
	wc.ByteLen = ring.Get32(e, 44)
	switch op {
	case cqeRecvWriteImm:
		wc.Opcode = verbs.WCRecvRDMAWr
		fallthrough
	case cqeRecvSendImm:
		wc.Flags = verbs.WCWithImm
		wc.ImmData = ring.Get32(e, 36)
	case cqeRecvSendInv:
		wc.Flags = verbs.WCWithInv
		wc.ImmData = ring.Get32(e, 36)
	}
	if ring.Get32(e, 24)>>28&3 != 0 {
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
	seg, end := q.recvs.Entry(idx), q.recvs.Entry(idx+1)
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
	ds := ring.Get32(c, 4) & 0x3f
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
		room, key := ring.Get32(seg, 0), ring.Get32(seg, 4)
		if room == 0 && key == ring.InvalidLKey {
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

// Arm asks for an event at the next completion.
func (c *CQ) Arm(solicitedOnly bool) (missed bool, err error) {
	ci, w, any := c.BeginArm(solicitedOnly)
	if w |= ci; !any {
		w |= armSolicited
	}
	udma.Ring(c.ArmRecord(), bits.ReverseBytes32(w), c.armReg, bits.ReverseBytes64(uint64(w)<<32|uint64(c.cqn)))
	return c.EndArm(), nil
}
