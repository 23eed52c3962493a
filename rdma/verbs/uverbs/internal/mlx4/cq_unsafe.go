package mlx4

import (
	"math/bits"
	"unsafe"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/numtable"
	"srp-initiator/rdma/verbs/uverbs/internal/ring"
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
	ring.Completions
	qps    *QPTable
	armReg unsafe.Pointer
	cqn    uint32
}

// init points the queue at its memory, which is zero. The kernel or the firmware gives the entries to the
// adapter when the queue is created; software must not touch them afterwards.
func (c *CQ) init(buf, rec, uar unsafe.Pointer, entries, cqeSize int, qps *QPTable) {
	c.Init(buf, rec, entries, ring.Format{Size: cqeSize, Described: 32, Owner: cqeOwner, Unwritten: 256}, 1)
	c.qps = qps
	c.armReg = unsafe.Add(uar, armDoorbell)
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
		qpn := ring.Get32(e, 0) & 0xffffff
		if q == nil || q.qpn != qpn {
			if q = c.qps.Get(qpn); q == nil {
				continue // of a queue pair that is gone
			}
		}
		wc := &wcs[n]
		n++
		op := uint32(*(*uint8)(unsafe.Add(e, 31)))
		if op&cqeSend != 0 {
			i := ring.Get32(e, 24) >> 16
			wc.WRID = *(*uint64)(unsafe.Add(q.wrid, uintptr(i&q.sqMask)*8))
			q.sent += uint32(uint16(i-q.sent)) + 1
			if sent != q {
				sent.publishSent()
				sent = q
			}
			d := &sendDone[op&cqeOp]
			wc.Status, wc.Opcode = verbs.WCSuccess, d.opcode
			wc.ByteLen, wc.ImmData = d.length|ring.Get32(e, 20)&d.mask, 0
			wc.QPN, wc.Flags, wc.VendorErr = qpn, d.flags, 0
		} else {
			_, wc.WRID = q.recvs.Retire()
			if recv != &q.recvs {
				recv.Publish()
				recv = &q.recvs
			}
			wc.Status, wc.ImmData, wc.QPN, wc.Flags, wc.VendorErr = verbs.WCSuccess, 0, qpn, 0, 0
			decodeResponder(wc, e, op&cqeOp)
		}
		if op&cqeOp == cqeError {
			b := ring.Get32(e, 24)
			*wc = verbs.WorkCompletion{WRID: wc.WRID, QPN: qpn, Status: ring.Status(uint8(b)), VendorErr: b >> 8 & 0xff}
		}
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
	wc.ByteLen = ring.Get32(e, 20)
	switch op {
	case cqeRecvWriteImm:
		wc.Opcode = verbs.WCRecvRDMAWr
		fallthrough
	case cqeRecvSendImm:
		wc.Flags = verbs.WCWithImm
		wc.ImmData = ring.Get32(e, 4)
	case cqeRecvSendInv:
		wc.Flags = verbs.WCWithInv
		wc.ImmData = ring.Get32(e, 4)
	}
	if ring.Get32(e, 8)>>31 != 0 {
		wc.Flags |= verbs.WCWithGRH
	}
}

// Arm asks for an event at the next completion.
func (c *CQ) Arm(solicitedOnly bool) (missed bool, err error) {
	ci, w, any := c.BeginArm(solicitedOnly)
	if any {
		w |= armAny
	} else {
		w |= armSolicited
	}
	udma.StoreRecord(c.ArmRecord(), bits.ReverseBytes32(w|ci))
	udma.Store64(c.armReg, bits.ReverseBytes64(uint64(w|c.cqn)<<32|uint64(ci)))
	return c.EndArm(), nil
}
