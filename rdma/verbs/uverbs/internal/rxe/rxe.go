package rxe

import (
	"fmt"
	"math"
	"math/bits"
	"sync/atomic"
	"syscall"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/abi"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
	"srp-initiator/rdma/verbs/uverbs/internal/provider"
)

// swap32 turns a big endian word of the ring into a host one, and back. Both
// architectures that this program is built for are little endian.
func swap32(v uint32) uint32 { return bits.ReverseBytes32(v) }

// Family is the soft-RoCE family.
type Family struct{}

func (Family) Name() string              { return "rxe" }
func (Family) DriverID() uint32          { return abi.DriverRXE }
func (Family) ABI() (oldest, newest int) { return abi.RXEVersion, abi.RXEVersion }

// Open starts the context; rxe has no private part.
func (Family) Open(k *kernel.Device, info provider.Info) (provider.Device, error) {
	vectors, err := k.GetContext(nil, nil)
	if err != nil {
		return nil, err
	}
	return &device{k: k, vectors: vectors}, nil
}

type device struct {
	k       *kernel.Device
	vectors int
}

func (d *device) CompVectors() int         { return d.vectors }
func (d *device) AllocPD() (uint32, error) { return d.k.AllocPD(nil, nil) }
func (d *device) Close()                   {}

// cq is a completion queue.
type cq struct {
	ring   ring
	arm    *kernel.Doorbell
	k      *kernel.Device
	handle uint32
}

// CreateCQ implements provider.Device.
func (d *device) CreateCQ(a kernel.CQArgs) (provider.CQ, error) {
	resp := new(abi.RXECreateCQResp)
	handle, _, err := d.k.CreateCQ(a, nil, abi.Bytes(resp))
	if err != nil {
		return nil, err
	}
	c := &cq{k: d.k, handle: handle}
	if c.ring, err = mapRing(d.k, resp.MI, len(abi.Bytes(new(abi.WC)))); err != nil {
		d.k.DestroyCQ(handle)
		return nil, err
	}
	c.arm = d.k.NewDoorbell(abi.CmdReqNotifyCQ, abi.Bytes(&abi.ReqNotifyCQ{CQHandle: handle}), nil)
	return c, nil
}

// Poll implements provider.CQ.
func (c *cq) Poll(wcs []verbs.WorkCompletion) int {
	r := &c.ring
	cons, prod := r.consumer(), r.producer()
	n := 0
	for n < len(wcs) && cons != prod {
		r.completion(cons, &wcs[n])
		cons = (cons + 1) & r.mask
		n++
	}
	if n > 0 {
		r.setConsumer(cons)
	}
	return n
}

// Arm implements provider.CQ. The command reports nothing of entries already there (uverbs_cmd.c drops the driver's
// answer), so the ring is asked once the command is done: an entry that came before
// it is seen here, one that comes after it raises the event.
//
// An arm for solicited completions arms for any: rxe posts the entries of failed requests, which
// must count as solicited, as if they were not (failed sends on 6.1 and 6.12, flushed receives on 6.12), and a
// consumer would sleep through the failure of its queue pair.
func (c *cq) Arm(solicitedOnly bool) (missed bool, err error) {
	if err := c.arm.Ring(); err != nil {
		return false, err
	}
	return c.ring.consumer() != c.ring.producer(), nil
}

func (c *cq) Notified()      {}
func (c *cq) Capacity() int  { return c.ring.capacity() }
func (c *cq) Handle() uint32 { return c.handle }

// Destroy implements provider.CQ.
func (c *cq) Destroy() (abi.DestroyCQResp, error) {
	resp, err := c.k.DestroyCQ(c.handle)
	if err == nil || kernel.Gone(err) {
		c.k.Munmap(c.ring.mem)
	}
	return resp, err
}

// qp is a queue pair.
type qp struct {
	sq, rq    ring
	kick      *kernel.Doorbell
	cap       verbs.QPCap
	ssn       uint32
	signalAll bool
	failed    atomic.Bool // moved to ERR by Modify

	k      *kernel.Device
	handle uint32
	qpn    uint32
}

// CreateQP implements provider.Device.
func (d *device) CreateQP(a provider.QPArgs) (provider.QP, error) {
	resp := new(abi.RXECreateQPResp)
	r, err := d.k.CreateQP(a.QPArgs, nil, abi.Bytes(resp))
	if err != nil {
		return nil, err
	}
	q := &qp{k: d.k, handle: r.Handle, qpn: r.QPN, signalAll: a.SignalAll}
	inline := int(r.Cap.MaxInlineData)
	q.sq, err = mapRing(d.k, resp.SQMI, int(sendWQESize)+max(16*int(r.Cap.MaxSendSGE), inline))
	if err == nil {
		q.rq, err = mapRing(d.k, resp.RQMI, int(recvWQESize)+16*int(r.Cap.MaxRecvSGE))
	}
	if err != nil {
		d.k.DestroyQP(r.Handle)
		q.unmap()
		return nil, err
	}
	// The kernel's answer for the number of work requests is the request (6.1) or the
	// rounded ring (6.12); the rings themselves are the truth on both.
	q.cap = verbs.QPCap{MaxSendWR: q.sq.capacity(), MaxRecvWR: q.rq.capacity(),
		MaxSendSGE: int(r.Cap.MaxSendSGE), MaxRecvSGE: int(r.Cap.MaxRecvSGE), MaxInlineData: inline}
	q.kick = d.k.NewDoorbell(abi.CmdPostSend, abi.Bytes(&abi.PostSend{QPHandle: r.Handle, WQESize: abi.SendWRSize}),
		abi.Bytes(new(abi.PostSendResp)))
	return q, nil
}

func (q *qp) unmap() {
	for _, r := range []*ring{&q.sq, &q.rq} {
		if r.mem != nil {
			q.k.Munmap(r.mem)
		}
	}
}

// PostSend implements provider.QP. On Linux 6.1 the kick itself runs the requester, so that packets, and even completions,
// may be out before it returns; on 6.12 it only queues the kernel's work.
func (q *qp) PostSend(wrs []verbs.SendWorkRequest) (posted int, err error) {
	r := &q.sq
	prod := r.producer()
	for i := range wrs {
		wr := &wrs[i]
		var length uint32
		if length, err = q.checkSend(wr); err != nil {
			break
		}
		if r.full(prod) {
			err = verbs.ErrQueueFull
			break
		}
		flags := wr.Flags
		if q.signalAll {
			flags |= verbs.SendSignaled
		}
		r.putSend(prod, wr, flags, length, q.ssn)
		if wr.Opcode == verbs.OpBindMW {
			if w, ok := wr.Bind.Window.(provider.Window); ok {
				w.Bound(wr.Bind.RKey)
			}
		}
		q.ssn++
		prod = (prod + 1) & r.mask
		posted++
	}
	if posted == 0 {
		return 0, err
	}
	r.setProducer(prod)
	// The requests are the kernel's now, whatever the kick says: a requester that is already running finds them.
	if kickErr := q.kick.Ring(); kickErr != nil {
		return posted, kickErr
	}
	return posted, err
}

// checkSend returns the sum of wr's SGE lengths, in bytes.
func (q *qp) checkSend(wr *verbs.SendWorkRequest) (uint32, error) {
	switch wr.Opcode {
	case verbs.OpSend, verbs.OpSendWithImm, verbs.OpSendWithInv, verbs.OpRDMAWrite, verbs.OpRDMAWriteImm:
	case verbs.OpRDMARead:
		if wr.Flags&verbs.SendInline != 0 {
			return 0, fmt.Errorf("rxe: an RDMA READ cannot be inline: %w", syscall.EINVAL)
		}
	case verbs.OpLocalInv:
		return 0, nil
	case verbs.OpBindMW:
		if wr.Bind == nil || wr.Bind.Window == nil || wr.Bind.Region == nil {
			return 0, fmt.Errorf("rxe: a bind names no window or no region: %w", syscall.EINVAL)
		}
		return 0, nil
	default:
		return 0, fmt.Errorf("rxe: opcode %d is none that an RC queue pair takes: %w", wr.Opcode, syscall.EINVAL)
	}
	if wr.Flags&verbs.SendInline == 0 && len(wr.SGList) > q.cap.MaxSendSGE {
		return 0, fmt.Errorf("rxe: %d SGEs, the queue pair takes %d: %w", len(wr.SGList), q.cap.MaxSendSGE, syscall.EINVAL)
	}
	total := sum(wr.SGList)
	if wr.Flags&verbs.SendInline != 0 && total > uint64(q.cap.MaxInlineData) {
		return 0, fmt.Errorf("rxe: %d inline bytes, the queue pair takes %d: %w", total, q.cap.MaxInlineData, syscall.EINVAL)
	}
	if total > math.MaxUint32 {
		return 0, fmt.Errorf("rxe: SGEs of %d bytes do not make one message: %w", total, syscall.EINVAL)
	}
	return uint32(total), nil
}

// sum adds in 64 bits, which 2^32 SGEs of 2^32 bytes cannot overflow.
func sum(list []verbs.SGE) (n uint64) {
	for i := range list {
		n += uint64(list[i].Length)
	}
	return n
}

// PostRecv implements provider.QP. It makes no system call, except in ERR, where the
// kernel flushes what it finds only when something makes it look.
func (q *qp) PostRecv(wrs []verbs.RecvWorkRequest) (posted int, err error) {
	r := &q.rq
	prod := r.producer()
	for i := range wrs {
		wr := &wrs[i]
		total := sum(wr.SGList)
		if len(wr.SGList) > q.cap.MaxRecvSGE || total > math.MaxUint32 {
			err = fmt.Errorf("rxe: a receive of %d SGEs and %d bytes, the queue pair takes %d SGEs: %w",
				len(wr.SGList), total, q.cap.MaxRecvSGE, syscall.EINVAL)
			break
		}
		if r.full(prod) {
			err = verbs.ErrQueueFull
			break
		}
		r.putRecv(prod, wr, uint32(total))
		prod = (prod + 1) & r.mask
		posted++
	}
	if posted == 0 {
		return 0, err
	}
	r.setProducer(prod)
	if q.failed.Load() {
		if flushErr := q.flush(); flushErr != nil {
			return posted, flushErr
		}
	}
	return posted, err
}

// flush makes the kernel look at the rings of a queue pair in ERR: the transition
// from ERR to ERR runs its requester, completer and responder (rxe_qp.c, rxe_qp_error).
func (q *qp) flush() error {
	return q.k.ModifyQP(&abi.ModifyQP{QPHandle: q.handle, AttrMask: uint32(verbs.QPMaskState), QPState: uint8(verbs.QPError)})
}

func (q *qp) Handle() uint32   { return q.handle }
func (q *qp) QPN() uint32      { return q.qpn }
func (q *qp) Cap() verbs.QPCap { return q.cap }

// Modify implements provider.QP. The kernel empties the rings on RESET and sets their indices to zero, where
// the next post reads them.
func (q *qp) Modify(req *abi.ModifyQP, from, to verbs.QPState) error {
	// Before the command: a receive posted meanwhile is either in the ring when the kernel flushes it, or
	// its poster sees the mark and flushes itself.
	was := q.failed.Swap(to == verbs.QPError)
	err := q.k.ModifyQP(req)
	if err != nil {
		q.failed.Store(was)
	}
	return err
}

// Destroy implements provider.QP.
func (q *qp) Destroy() (eventsReported uint32, err error) {
	n, err := q.k.DestroyQP(q.handle)
	if err == nil || kernel.Gone(err) {
		q.unmap()
	}
	return n, err
}
