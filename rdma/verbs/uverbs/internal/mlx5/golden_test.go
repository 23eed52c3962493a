package mlx5

import (
	"fmt"
	"testing"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/golden"
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
	memory []*hostmem.Region
	uars   [][]byte
	cqs    []*CQ
	qps    []*QP
	cqBuf  [][]byte
	cqRec  [][]byte
	qpBuf  [][]byte
	qpRec  [][]byte
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

// place finds the memory of a name like "uar1+0x800".
func place(name string) (page, off int) {
	fmt.Sscanf(name, "uar%d+0x%x", &page, &off)
	return page, off
}

func newRig(c *golden.Case) (*rig, error) {
	r := &rig{}
	opt := optionsFromEnv(func(k string) string { return c.Env[k] })
	byQPN := c.Profile == "mlx5-legacy"
	for range c.Setup.UARPages {
		r.uars = append(r.uars, r.alloc(4096))
	}
	for i := range c.Setup.CQ {
		g := &c.Setup.CQ[i]
		n, err := CQEntries(g.IBVCQE)
		if err != nil || n != g.Entries {
			return r, fmt.Errorf("%s: %d entries (%v), want %d", g.Name, n, err, g.Entries)
		}
		if opt.CQESize != g.CQESize {
			return r, fmt.Errorf("%s: CQE size %d, want %d", g.Name, opt.CQESize, g.CQESize)
		}
		buf, rec := r.alloc(n*g.CQESize), r.alloc(8)[:8]
		q := &CQ{cqn: uint32(g.CQN)}
		q.init(addr(buf), addr(rec), n, g.CQESize, &r.table, byQPN)
		q.armReg = addr(r.uars[0][armOffset:])
		r.cqs = append(r.cqs, q)
		r.cqBuf, r.cqRec = append(r.cqBuf, buf[:n*g.CQESize]), append(r.cqRec, rec)
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
		buf, rec := r.alloc(l.Bytes), r.alloc(8)[:8]
		page, off := place(g.BFReg)
		reg := regs[g.BFReg]
		if reg == nil {
			reg = newRegister(addr(r.uars[page][off:]), g.BFSize, opt)
			regs[g.BFReg] = reg
		} else {
			reg.shared = true
		}
		q := &QP{qpn: g.QPNum, rsn: uint32(g.UIDX)}
		if byQPN {
			q.rsn = q.qpn
		}
		find := func(name string) *CQ {
			if name == "" {
				return r.cqs[0]
			}
			n := 0
			fmt.Sscanf(name, "cq%d", &n)
			return r.cqs[n]
		}
		q.send, q.recv = find(g.SendCQ), find(g.RecvCQ)
		if g.SendCQ == "" && len(r.cqs) > 1 {
			q.send, q.recv = r.cqs[0], r.cqs[1]
		}
		q.init(l, addr(buf), addr(r.alloc(notesBytes(&l))), addr(rec), reg, g.SQSigAll != 0)
		q.state.Store(uint32(verbs.QPReadyToSend))
		for _, s := range c.Steps { // a case that goes to INIT itself starts in RESET
			if s.Call == "ibv_modify_qp" && s.Args.QP == g.Name {
				if s.Args.QPState == "INIT" {
					q.state.Store(uint32(verbs.QPReset))
				}
				break
			}
		}
		r.table.Set(q.rsn, q)
		r.qps = append(r.qps, q)
		r.qpBuf, r.qpRec = append(r.qpBuf, buf), append(r.qpRec, rec)
	}
	return r, nil
}

func (r *rig) PostSend(qp int, w []verbs.SendWorkRequest) (int, error) { return r.qps[qp].PostSend(w) }
func (r *rig) PostRecv(qp int, w []verbs.RecvWorkRequest) (int, error) { return r.qps[qp].PostRecv(w) }
func (r *rig) Poll(cq int, wcs []verbs.WorkCompletion) int             { return r.cqs[cq].Poll(wcs) }
func (r *rig) Arm(cq int, solicited bool) (bool, error)                { return r.cqs[cq].Arm(solicited) }
func (r *rig) Notified(cq int)                                         { r.cqs[cq].Notified() }
func (r *rig) Modify(qp int, s verbs.QPState) error                    { r.qps[qp].moved(s); return nil }
func (r *rig) QPRecord(qp int) []byte                                  { return r.qpRec[qp] }
func (r *rig) CQRing(cq int) []byte                                    { return r.cqBuf[cq] }
func (r *rig) CQRecord(cq int) []byte                                  { return r.cqRec[cq] }
func (r *rig) UAR(page int) []byte                                     { return r.uars[page] }
func (r *rig) SkipCompletions(cq int, to uint32)                       { r.cqs[cq].ci = to }

func (r *rig) SQ(qp int) []byte {
	l := r.qps[qp].lay
	return r.qpBuf[qp][l.SendOffset:l.Bytes]
}

func (r *rig) RQ(qp int) []byte { return r.qpBuf[qp][:r.qps[qp].lay.SendOffset] }

func (r *rig) cqe(qp int, counter, producer uint32, op, sendOp byte) []byte {
	q, c := r.qps[qp], r.cqs[0]
	e := make([]byte, 1<<c.shift)
	d := e[c.tail:]
	d[33], d[34], d[35] = byte(q.rsn>>16), byte(q.rsn>>8), byte(q.rsn)
	d[56], d[57], d[58], d[59] = sendOp, byte(q.qpn>>16), byte(q.qpn>>8), byte(q.qpn)
	d[60], d[61] = byte(counter>>8), byte(counter)
	d[63] = op << 4
	if producer&c.entries != 0 {
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

func (r *rig) Close() {
	for _, m := range r.memory {
		m.Free()
	}
}

var driver = golden.Driver{
	Device: "mlx5",
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
