package mlx4

import (
	"encoding/binary"
	"fmt"
	"testing"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/golden"
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
	memory []*hostmem.Region
	uars   [][]byte
	cqs    []*CQ
	qps    []*QP
	cqBuf  [][]byte
	cqRec  [][]byte
	qpBuf  [][]byte
	qpRec  [][]byte
	states []verbs.QPState
	table  QPTable
}

func (r *rig) alloc(n int) []byte {
	m, err := hostmem.Alloc(max(n, 1))
	if err != nil {
		panic(err)
	}
	r.memory = append(r.memory, m)
	return m.Bytes()
}

func newRig(c *golden.Case) (*rig, error) {
	r := &rig{}
	for range c.Setup.UARPages {
		r.uars = append(r.uars, r.alloc(4096))
	}
	for i := range c.Setup.CQ {
		g := &c.Setup.CQ[i]
		n, err := CQEntries(g.IBVCQE)
		if err != nil || n != g.Entries {
			return r, fmt.Errorf("%s: %d entries (%v), want %d", g.Name, n, err, g.Entries)
		}
		buf, rec := r.alloc(n * g.CQESize)[:n*g.CQESize], r.alloc(8)[:8]
		for k := range buf { // the kernel's doing
			buf[k] = 0xcc
		}
		q := &CQ{cqn: uint32(g.CQN)}
		q.init(addr(buf), addr(rec), addr(r.uars[0]), n, g.CQESize, &r.table)
		r.cqs = append(r.cqs, q)
		r.cqBuf, r.cqRec = append(r.cqBuf, buf), append(r.cqRec, rec)
	}
	bf := &blueFlame{}
	if len(r.uars) > 1 {
		bf = newBlueFlame(addr(r.uars[1]), recordedBlueFlame)
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
		buf, rec := r.alloc(l.Bytes), r.alloc(4)[:4]
		q := &QP{qpn: g.QPNum}
		find := func(name string, def int) *CQ {
			if name == "" {
				return r.cqs[min(def, len(r.cqs)-1)]
			}
			n := 0
			fmt.Sscanf(name, "cq%d", &n)
			return r.cqs[n]
		}
		q.send, q.recv = find(g.SendCQ, 0), find(g.RecvCQ, 1)
		q.init(l, addr(buf), addr(r.alloc(notesBytes(&l))), addr(rec), addr(r.uars[0]), bf, g.SQSigAll != 0)
		state := verbs.QPReadyToSend
		for _, s := range c.Steps {
			if s.Call == "ibv_modify_qp" && s.Args.QP == g.Name {
				if s.Args.QPState == "INIT" {
					state = verbs.QPReset
				}
				break
			}
		}
		if state != verbs.QPReset {
			q.beforeInit()
		}
		r.table.Set(q.qpn, q)
		r.qps, r.states = append(r.qps, q), append(r.states, state)
		r.qpBuf, r.qpRec = append(r.qpBuf, buf), append(r.qpRec, rec)
	}
	return r, nil
}

func (r *rig) PostSend(qp int, w []verbs.SendWorkRequest) (int, error) { return r.qps[qp].PostSend(w) }
func (r *rig) PostRecv(qp int, w []verbs.RecvWorkRequest) (int, error) { return r.qps[qp].PostRecv(w) }
func (r *rig) Poll(cq int, wcs []verbs.WorkCompletion) int             { return r.cqs[cq].Poll(wcs) }
func (r *rig) Arm(cq int, solicited bool) (bool, error)                { return r.cqs[cq].Arm(solicited) }
func (r *rig) Notified(cq int)                                         { r.cqs[cq].Notified() }
func (r *rig) QPRecord(qp int) []byte                                  { return r.qpRec[qp] }
func (r *rig) CQRing(cq int) []byte                                    { return r.cqBuf[cq] }
func (r *rig) CQRecord(cq int) []byte                                  { return r.cqRec[cq] }
func (r *rig) UAR(page int) []byte                                     { return r.uars[page] }
func (r *rig) SkipCompletions(cq int, to uint32)                       { r.cqs[cq].ci = to }

func (r *rig) Modify(qp int, s verbs.QPState) error {
	if r.states[qp] == verbs.QPReset && s == verbs.QPInitState {
		r.qps[qp].beforeInit()
	}
	if s == verbs.QPReset {
		r.qps[qp].afterReset()
	}
	r.states[qp] = s
	return nil
}

func (r *rig) SQ(qp int) []byte {
	l := r.qps[qp].lay
	return r.qpBuf[qp][l.SendOffset:][:l.SendCount<<l.SendShift]
}

func (r *rig) RQ(qp int) []byte {
	l := r.qps[qp].lay
	return r.qpBuf[qp][l.RecvOffset:][:l.RecvCount<<l.RecvShift]
}

func (r *rig) cqe(qp int, idx, producer uint32, op byte) []byte {
	c := r.cqs[0]
	e := make([]byte, 1<<c.shift)
	d := e[c.tail:]
	binary.BigEndian.PutUint32(d, r.qps[qp].qpn)
	binary.BigEndian.PutUint16(d[24:], uint16(idx))
	d[31] = op
	if producer&c.entries != 0 {
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

func (r *rig) Close() {
	for _, m := range r.memory {
		m.Free()
	}
}

var driver = golden.Driver{
	Device: "mlx4",
	New:    func(c *golden.Case) (golden.Rig, error) { return newRig(c) },
	Caps: func(s *golden.Step) (refused, err error) {
		l, refused := SizeQP(s.Args.Cap.Verbs(), recordedLimits)
		if refused == nil && s.Ret == 0 {
			err = checkLayout(l, &s.QPs[0])
		}
		return refused, err
	},
}

func TestGolden(t *testing.T) { driver.Test(t) }
