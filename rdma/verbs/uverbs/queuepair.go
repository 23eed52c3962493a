package uverbs

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/abi"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
	"srp-initiator/rdma/verbs/uverbs/internal/provider"
)

// queuePair is an RC queue pair. The rings are the family's (impl).
type queuePair struct {
	impl  provider.QP
	state atomic.Uint32 // verbs.QPState, or qpDestroyed

	ctx       *Context
	handle    uint64 // user handle
	asyncSeen atomic.Uint32

	mu sync.Mutex // serialises Modify and Destroy
}

const qpDestroyed = 0xff

// CreateQP implements verbs.ProtectionDomain.
func (pd *protectionDomain) CreateQP(init verbs.QPInit) (verbs.QueuePair, error) {
	c := pd.ctx
	send, ok1 := init.SendCQ.(*completionQueue)
	recv, ok2 := init.RecvCQ.(*completionQueue)
	if !ok1 || !ok2 || send.ctx != c || recv.ctx != c {
		return nil, fmt.Errorf("%s: create queue pair: it needs two completion queues of this device: %w", c.name, syscall.EINVAL)
	}
	for _, v := range []int{init.Cap.MaxSendWR, init.Cap.MaxRecvWR, init.Cap.MaxSendSGE, init.Cap.MaxRecvSGE, init.Cap.MaxInlineData} {
		if v < 0 || v > 1<<24 {
			return nil, fmt.Errorf("%s: create queue pair: size %d is not within 0 and 2^24: %w", c.name, v, syscall.EINVAL)
		}
	}
	q := &queuePair{ctx: c, handle: c.newHandle()}
	impl, err := c.dev.CreateQP(provider.QPArgs{
		QPArgs: kernel.QPArgs{UserHandle: q.handle, PD: pd.handle, SendCQ: send.impl.Handle(), RecvCQ: recv.impl.Handle(),
			Cap: abi.QPCap{MaxSendWR: uint32(init.Cap.MaxSendWR), MaxRecvWR: uint32(init.Cap.MaxRecvWR),
				MaxSendSGE: uint32(init.Cap.MaxSendSGE), MaxRecvSGE: uint32(init.Cap.MaxRecvSGE),
				MaxInlineData: uint32(init.Cap.MaxInlineData)},
			SignalAll: init.SignalAll},
		SendCQ: send.impl, RecvCQ: recv.impl})
	if err != nil {
		return nil, c.fail(fmt.Sprintf("create queue pair %+v", init.Cap), err)
	}
	q.impl = impl
	c.mu.Lock()
	c.elements[q.handle] = q
	c.mu.Unlock()
	if err := enter(c, c.qps, q); err != nil {
		q.Destroy()
		return nil, err
	}
	return q, nil
}

func (q *queuePair) QPN() uint32      { return q.impl.QPN() }
func (q *queuePair) Cap() verbs.QPCap { return q.impl.Cap() }

// State implements verbs.QueuePair.
func (q *queuePair) State() verbs.QPState {
	if s := q.state.Load(); s != qpDestroyed {
		return verbs.QPState(s)
	}
	return verbs.QPError
}

// failed notes what an asynchronous event said.
func (q *queuePair) failed() {
	for {
		s := q.state.Load()
		if s == qpDestroyed || s == uint32(verbs.QPReset) || q.state.CompareAndSwap(s, uint32(verbs.QPError)) {
			return
		}
	}
}

// Modify implements verbs.QueuePair.
func (q *queuePair) Modify(attr *verbs.QPAttr, mask verbs.QPAttrMask) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.state.Load() == qpDestroyed {
		return verbs.ErrClosed
	}
	from := q.State()
	to := from
	if mask&verbs.QPMaskState != 0 {
		to = attr.State
	}
	req := &abi.ModifyQP{
		QPHandle: q.impl.Handle(), AttrMask: uint32(mask),
		RQPSN: attr.RQPSN, SQPSN: attr.SQPSN, DestQPNum: attr.DestQPN, QPAccessFlags: uint32(attr.Access),
		PKeyIndex: attr.PKeyIndex, QPState: uint8(attr.State), PathMTU: uint8(attr.PathMTU),
		MaxRdAtomic: attr.MaxRdAtomic, MaxDestRdAtomic: attr.MaxDestRdAtomic, MinRNRTimer: attr.MinRNRTimer,
		PortNum: attr.Port, Timeout: attr.Timeout, RetryCnt: attr.RetryCount, RNRRetry: attr.RNRRetry,
		Dest: abi.QPDest{DGID: attr.AV.DGID, FlowLabel: attr.AV.FlowLabel, DLID: attr.AV.DLID, SGIDIndex: attr.AV.SGIDIndex,
			HopLimit: attr.AV.HopLimit, TrafficClass: attr.AV.TrafficClass, SL: attr.AV.SL, SrcPathBits: attr.AV.SrcPathBits,
			StaticRate: attr.AV.StaticRate, PortNum: attr.AV.Port},
	}
	if attr.AV.IsGlobal {
		req.Dest.IsGlobal = 1
	}
	if err := q.impl.Modify(req, from, to); err != nil {
		return q.ctx.fail(fmt.Sprintf("modify QP 0x%06x from %s to %s", q.QPN(), from, to), err)
	}
	if mask&verbs.QPMaskState != 0 {
		q.state.Store(uint32(to))
	}
	return nil
}

// PostSend implements verbs.QueuePair.
func (q *queuePair) PostSend(wrs []verbs.SendWorkRequest) (posted int, err error) {
	if s := q.state.Load(); s < uint32(verbs.QPReadyToSend) || s == qpDestroyed {
		return 0, q.wrongState("post a send", s)
	}
	posted, err = q.impl.PostSend(wrs)
	if err != nil {
		err = q.postError("post a send", err)
	}
	return posted, err
}

// PostRecv implements verbs.QueuePair.
func (q *queuePair) PostRecv(wrs []verbs.RecvWorkRequest) (posted int, err error) {
	if s := q.state.Load(); s == uint32(verbs.QPReset) || s == qpDestroyed {
		return 0, q.wrongState("post a receive", s)
	}
	posted, err = q.impl.PostRecv(wrs)
	if err != nil {
		err = q.postError("post a receive", err)
	}
	return posted, err
}

// postError gives a refused post its context. A full queue is a state, not a failure, and stays as it is.
func (q *queuePair) postError(doing string, err error) error {
	if err == verbs.ErrQueueFull {
		return err
	}
	return q.ctx.fail(fmt.Sprintf("%s on QP 0x%06x", doing, q.QPN()), err)
}

func (q *queuePair) wrongState(doing string, s uint32) error {
	if s == qpDestroyed {
		return verbs.ErrClosed
	}
	return fmt.Errorf("%s: %s on QP 0x%06x in state %s: %w", q.ctx.name, doing, q.QPN(), verbs.QPState(s), syscall.EINVAL)
}

// Destroy implements verbs.QueuePair.
func (q *queuePair) Destroy() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	was := q.state.Swap(qpDestroyed)
	if was == qpDestroyed {
		return verbs.ErrClosed
	}
	reported, err := q.impl.Destroy()
	if err != nil && !q.ctx.gone.Load() {
		q.state.Store(was)
		return q.ctx.fail("destroy queue pair", err)
	}
	if err == nil {
		acknowledged(&q.asyncSeen, reported)
	}
	q.ctx.mu.Lock()
	delete(q.ctx.elements, q.handle)
	delete(q.ctx.qps, q)
	q.ctx.mu.Unlock()
	return nil
}

var _ verbs.QueuePair = (*queuePair)(nil)
