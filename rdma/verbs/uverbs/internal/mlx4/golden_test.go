package mlx4

import (
	"encoding/binary"
	"fmt"
	"testing"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/golden"
	"srp-initiator/rdma/verbs/uverbs/internal/ring"
)

// recordedLimits are those that the recordings' kernel reported.
var recordedLimits = Limits{MaxWR: 16351, MaxSGE: 32}

// recordedBlueFlame is half of the recordings' BlueFlame register.
const recordedBlueFlame = 256

func checkLayout(l Layout, q *golden.QP) error {
	got := fmt.Sprint(l.SendCount, 1<<l.SendShift, l.RecvCount, 1<<l.RecvShift, l.SendOffset, l.RecvOffset, l.Bytes, l.Cap)
	want := fmt.Sprint(q.SQEntries, q.SQStride, q.RQEntries, q.RQStride, q.SQOffset, q.RQOffset, q.BufBytes, q.ReturnedCap.Verbs())
	if got != want {
		return fmt.Errorf("layout of %s: %s, want %s", q.Name, got, want)
	}
	return nil
}

// rig builds the objects of a case's setup without a kernel.
type rig struct {
	golden.Parts[*CQ, *QP]
	table  QPTable
	states []verbs.QPState
}

func newRig(c *golden.Case) (*rig, error) {
	r := &rig{}
	r.AddUARs(len(c.Setup.UARPages))
	for i := range c.Setup.CQ {
		g := &c.Setup.CQ[i]
		n, err := CQEntries(g.IBVCQE)
		if err != nil || n != g.Entries {
			return r, fmt.Errorf("%s: %d entries (%v), want %d", g.Name, n, err, g.Entries)
		}
		buf, rec := r.Alloc(n * g.CQESize)[:n*g.CQESize], r.Alloc(8)[:8]
		for k := range buf { // the kernel's doing
			buf[k] = 0xcc
		}
		q := &CQ{cqn: uint32(g.CQN)}
		q.init(ring.Addr(buf), ring.Addr(rec), ring.Addr(r.UARs[0]), n, g.CQESize, &r.table)
		r.AddCQ(q, buf, rec)
	}
	bf := &blueFlame{}
	if len(r.UARs) > 1 {
		bf = newBlueFlame(ring.Addr(r.UARs[1]), recordedBlueFlame)
	}
	for i := range c.Setup.QP {
		g := &c.Setup.QP[i]
		l, err := SizeQP(g.RequestedCap.Verbs(), recordedLimits)
		if err == nil {
			err = checkLayout(l, g)
		}
		if err != nil {
			return r, err
		}
		q := &QP{qpn: g.QPNum}
		q.send, q.recv = r.CQOf(g.SendCQ, 0), r.CQOf(g.RecvCQ, 1)
		r.add(q, l, r.Alloc(l.Bytes), bf, g.SQSigAll != 0, c.StartsInReset(g.Name))
	}
	return r, nil
}

// add adds a queue pair that is in RESET or in RTS, on the first completion queue unless it has others.
func (r *rig) add(q *QP, l Layout, buf []byte, bf *blueFlame, signalAll, reset bool) {
	if q.send == nil {
		q.send, q.recv = r.CQs[0], r.CQs[0]
	}
	rec := r.Alloc(4)[:4]
	q.init(l, ring.Addr(buf), ring.Addr(r.Alloc(notesBytes(&l))), ring.Addr(rec), ring.Addr(r.UARs[0]), bf, signalAll)
	state := verbs.QPReset
	if !reset {
		state = verbs.QPReadyToSend
		q.beforeInit()
	}
	r.table.Set(q.qpn, q)
	r.AddQP(q, buf, rec)
	r.states = append(r.states, state)
}

func (r *rig) SkipCompletions(cq int, to uint32) { r.CQs[cq].CI = to }

func (r *rig) Modify(qp int, s verbs.QPState) error {
	if r.states[qp] == verbs.QPReset && s == verbs.QPInitState {
		r.QPs[qp].beforeInit()
	}
	if s == verbs.QPReset {
		r.QPs[qp].afterReset()
	}
	r.states[qp] = s
	return nil
}

func (r *rig) SQ(qp int) []byte {
	l := r.QPs[qp].lay
	return r.QPBuf[qp][l.SendOffset:][:l.SendCount<<l.SendShift]
}

func (r *rig) RQ(qp int) []byte {
	l := r.QPs[qp].lay
	return r.QPBuf[qp][l.RecvOffset:][:l.RecvCount<<l.RecvShift]
}

func (r *rig) cqe(qp int, idx, producer uint32, op byte) []byte {
	e, lap := r.NewCQE(producer)
	d := e[len(e)-32:]
	binary.BigEndian.PutUint32(d, r.QPs[qp].qpn)
	binary.BigEndian.PutUint16(d[24:], uint16(idx))
	d[31] = op
	if lap&1 != 0 {
		d[31] |= cqeOwner
	}
	return e
}

func (r *rig) SendCQE(qp int, index, producer uint32) []byte {
	return r.cqe(qp, index, producer, cqeSend|opSend)
}

func (r *rig) RecvCQE(qp int, producer uint32) []byte {
	return r.cqe(qp, producer, producer, 1)
}

func (r *rig) FailedCQE(qp int, index, producer uint32, recv bool, code uint16) []byte {
	e := r.cqe(qp, index, producer, cqeError)
	if !recv {
		e[len(e)-1] |= cqeSend
	}
	binary.BigEndian.PutUint16(e[len(e)-32+26:], code)
	return e
}

var driver = golden.Driver{
	Device: "mlx4",
	New:    func(c *golden.Case) (golden.Rig, error) { return newRig(c) },
	Layout: func(want verbs.QPCap) (verbs.QPCap, func(*golden.QP) error, error) {
		l, err := SizeQP(want, recordedLimits)
		return l.Cap, func(q *golden.QP) error { return checkLayout(l, q) }, err
	},
}

func TestGolden(t *testing.T) { driver.Test(t) }
