package mlx5

import (
	"encoding/binary"
	"fmt"
	"testing"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/golden"
	"srp-initiator/rdma/verbs/uverbs/internal/ring"
)

// recordedLimits are those that the recordings' kernel reported.
var recordedLimits = Limits{MaxSendDesc: 1024, MaxRecvDesc: 512, MaxSendBlocks: 32768, MaxRecvWR: 32768}

// checkLayout compares a queue pair's computed shape with the recorded one.
func checkLayout(l Layout, q *golden.QP) error {
	got := fmt.Sprint(l.SendBlocks, l.RecvCount, l.SendOffset, l.Bytes, l.Cap)
	want := fmt.Sprint(q.SQEntries, q.RQEntries, q.SQOffset, q.BufBytes, q.ReturnedCap.Verbs())
	if got != want {
		return fmt.Errorf("layout of %s: %s, want %s", q.Name, got, want)
	}
	if q.RQEntries > 0 && 1<<l.RecvShift != q.RQStride {
		return fmt.Errorf("receive stride of %s: %d, want %d", q.Name, 1<<l.RecvShift, q.RQStride)
	}
	return nil
}

// rig builds the objects of a case's setup without a kernel.
type rig struct {
	golden.Parts[*CQ, *QP]
	table QPTable
}

// place finds the memory of a name like "uar1+0x800".
func place(name string) (page, off int) {
	fmt.Sscanf(name, "uar%d+0x%x", &page, &off)
	return page, off
}

func newRig(c *golden.Case) (*rig, error) {
	r := &rig{}
	opt := optionsFromEnv(func(k string) string { return c.Env[k] })
	byQPN := c.Profile == "mlx5-legacy"
	r.AddUARs(len(c.Setup.UARPages))
	for i := range c.Setup.CQ {
		g := &c.Setup.CQ[i]
		n, err := CQEntries(g.IBVCQE)
		if err != nil || n != g.Entries {
			return r, fmt.Errorf("%s: %d entries (%v), want %d", g.Name, n, err, g.Entries)
		}
		if opt.CQESize != g.CQESize {
			return r, fmt.Errorf("%s: CQE size %d, want %d", g.Name, opt.CQESize, g.CQESize)
		}
		buf, rec := r.Alloc(n*g.CQESize), r.Alloc(8)[:8]
		q := &CQ{cqn: uint32(g.CQN)}
		q.init(ring.Addr(buf), ring.Addr(rec), n, g.CQESize, &r.table, byQPN)
		q.armReg = ring.Addr(r.UARs[0][armOffset:])
		r.AddCQ(q, buf[:n*g.CQESize], rec)
	}
	regs := map[string]*Register{}
	for i := range c.Setup.QP {
		g := &c.Setup.QP[i]
		l, err := SizeQP(g.RequestedCap.Verbs(), recordedLimits)
		if err == nil {
			err = checkLayout(l, g)
		}
		if err != nil {
			return r, err
		}
		page, off := place(g.BFReg)
		reg := regs[g.BFReg]
		if reg == nil {
			reg = newRegister(ring.Addr(r.UARs[page][off:]), g.BFSize, opt)
			regs[g.BFReg] = reg
		} else {
			reg.shared = true
		}
		q := &QP{qpn: g.QPNum, rsn: uint32(g.UIDX)}
		if byQPN {
			q.rsn = q.qpn
		}
		q.send, q.recv = r.CQOf(g.SendCQ, 0), r.CQOf(g.RecvCQ, 1)
		r.add(q, l, r.Alloc(l.Bytes), reg, g.SQSigAll != 0, c.StartsInReset(g.Name))
	}
	return r, nil
}

// add adds a queue pair that is in RESET or in RTS, on the first completion queue unless it has others.
func (r *rig) add(q *QP, l Layout, buf []byte, reg *Register, signalAll, reset bool) {
	if q.send == nil {
		q.send, q.recv = r.CQs[0], r.CQs[0]
	}
	rec := r.Alloc(8)[:8]
	q.init(l, ring.Addr(buf), ring.Addr(r.Alloc(notesBytes(&l))), ring.Addr(rec), reg, signalAll)
	if !reset {
		q.state.Store(uint32(verbs.QPReadyToSend))
	}
	r.table.Set(q.rsn, q)
	r.AddQP(q, buf, rec)
}

func (r *rig) Modify(qp int, s verbs.QPState) error { r.QPs[qp].moved(s); return nil }
func (r *rig) SkipCompletions(cq int, to uint32)    { r.CQs[cq].CI = to }

func (r *rig) SQ(qp int) []byte {
	l := r.QPs[qp].lay
	return r.QPBuf[qp][l.SendOffset:l.Bytes]
}

func (r *rig) RQ(qp int) []byte { return r.QPBuf[qp][:r.QPs[qp].lay.SendOffset] }

func (r *rig) cqe(qp int, counter, producer uint32, op, sendOp byte) []byte {
	q := r.QPs[qp]
	e, lap := r.NewCQE(producer)
	d := e[len(e)-64:]
	d[33], d[34], d[35] = byte(q.rsn>>16), byte(q.rsn>>8), byte(q.rsn)
	d[56], d[57], d[58], d[59] = sendOp, byte(q.qpn>>16), byte(q.qpn>>8), byte(q.qpn)
	d[60], d[61] = byte(counter>>8), byte(counter)
	d[63] = op << 4
	if lap&1 != 0 {
		d[63] |= 1
	}
	return e
}

func (r *rig) SendCQE(qp int, index, producer uint32) []byte {
	return r.cqe(qp, index, producer, cqeRequester, opSend)
}

func (r *rig) RecvCQE(qp int, producer uint32) []byte {
	return r.cqe(qp, producer, producer, cqeRecvSend, 0)
}

func (r *rig) FailedCQE(qp int, index, producer uint32, recv bool, code uint16) []byte {
	op := byte(cqeErrRequester)
	if recv {
		op = cqeErrResponder
	}
	e := r.cqe(qp, index, producer, op, opSend)
	binary.BigEndian.PutUint16(e[len(e)-64+54:], code)
	return e
}

var driver = golden.Driver{
	Device: "mlx5",
	New:    func(c *golden.Case) (golden.Rig, error) { return newRig(c) },
	Layout: func(want verbs.QPCap) (verbs.QPCap, func(*golden.QP) error, error) {
		l, err := SizeQP(want, recordedLimits)
		return l.Cap, func(q *golden.QP) error { return checkLayout(l, q) }, err
	},
}

func TestGolden(t *testing.T) { driver.Test(t) }
