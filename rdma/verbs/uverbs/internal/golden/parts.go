package golden

import (
	"fmt"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
)

// Parts is what the drivers' rigs are made of: queues without a kernel, on memory that is laid open. It has most of a Rig's methods.
type Parts[CQ interface {
	Poll(wcs []verbs.WorkCompletion) int
	Arm(solicitedOnly bool) (missed bool, err error)
	Notified()
	Capacity() int
}, QP interface {
	PostSend(wrs []verbs.SendWorkRequest) (int, error)
	PostRecv(wrs []verbs.RecvWorkRequest) (int, error)
	QPN() uint32
	Cap() verbs.QPCap
}] struct {
	UARs         [][]byte
	CQs          []CQ
	QPs          []QP
	CQBuf, CQRec [][]byte
	QPBuf, QPRec [][]byte

	memory []*hostmem.Region
}

// Alloc gets n bytes of pages; Close frees them.
func (p *Parts[CQ, QP]) Alloc(n int) []byte {
	m, err := hostmem.Alloc(max(n, 1))
	if err != nil {
		panic(err)
	}
	p.memory = append(p.memory, m)
	return m.Bytes()
}

// Used is Alloc for rings whose entries are not as new: software must write all that counts.
func (p *Parts[CQ, QP]) Used(n int) []byte {
	b := p.Alloc(n)
	for i := range b {
		b[i] = 0xee
	}
	return b
}

// AddUARs adds n register pages.
func (p *Parts[CQ, QP]) AddUARs(n int) {
	for range n {
		p.UARs = append(p.UARs, p.Alloc(4096))
	}
}

// AddCQ adds a completion queue.
func (p *Parts[CQ, QP]) AddCQ(c CQ, ring, record []byte) {
	p.CQs, p.CQBuf, p.CQRec = append(p.CQs, c), append(p.CQBuf, ring), append(p.CQRec, record)
}

// AddQP adds a queue pair.
func (p *Parts[CQ, QP]) AddQP(q QP, rings, record []byte) {
	p.QPs, p.QPBuf, p.QPRec = append(p.QPs, q), append(p.QPBuf, rings), append(p.QPRec, record)
}

// CQOf is the completion queue of the recorded name; without a name it is number def, or the last.
func (p *Parts[CQ, QP]) CQOf(name string, def int) CQ {
	if name == "" {
		return p.CQs[min(def, len(p.CQs)-1)]
	}
	n := 0
	fmt.Sscanf(name, "cq%d", &n)
	return p.CQs[n]
}

// NewCQE is an empty entry for the first completion queue, and the lap of producer index i.
func (p *Parts[CQ, QP]) NewCQE(i uint32) (entry []byte, lap uint32) {
	n := p.CQs[0].Capacity() + 1
	return make([]byte, len(p.CQBuf[0])/n), i / uint32(n)
}

func (p *Parts[CQ, QP]) PostSend(qp int, w []verbs.SendWorkRequest) (int, error) {
	return p.QPs[qp].PostSend(w)
}
func (p *Parts[CQ, QP]) PostRecv(qp int, w []verbs.RecvWorkRequest) (int, error) {
	return p.QPs[qp].PostRecv(w)
}
func (p *Parts[CQ, QP]) QPN(qp int) uint32                           { return p.QPs[qp].QPN() }
func (p *Parts[CQ, QP]) Cap(qp int) verbs.QPCap                      { return p.QPs[qp].Cap() }
func (p *Parts[CQ, QP]) Poll(cq int, wcs []verbs.WorkCompletion) int { return p.CQs[cq].Poll(wcs) }
func (p *Parts[CQ, QP]) Arm(cq int, solicited bool) (bool, error)    { return p.CQs[cq].Arm(solicited) }
func (p *Parts[CQ, QP]) Notified(cq int)                             { p.CQs[cq].Notified() }
func (p *Parts[CQ, QP]) QPRecord(qp int) []byte                      { return p.QPRec[qp] }
func (p *Parts[CQ, QP]) CQRing(cq int) []byte                        { return p.CQBuf[cq] }
func (p *Parts[CQ, QP]) CQRecord(cq int) []byte                      { return p.CQRec[cq] }
func (p *Parts[CQ, QP]) UAR(page int) []byte                         { return p.UARs[page] }

func (p *Parts[CQ, QP]) Close() {
	for _, m := range p.memory {
		m.Free()
	}
}

// StartsInReset reports whether the case takes the queue pair to INIT itself.
func (c *Case) StartsInReset(qp string) bool {
	for _, s := range c.Steps {
		if s.Call == "ibv_modify_qp" && s.Args.QP == qp {
			return s.Args.QPState == "INIT"
		}
	}
	return false
}

// Region is a registered region for posts.
type Region struct{ verbs.MemoryRegion }

func (Region) LKey() uint32 { return 0x1ee700 }

// Window is a memory window that a bind may name.
type Window struct{ Key uint32 }

func (w *Window) RKey() uint32   { return w.Key }
func (w *Window) Dealloc() error { return nil }
func (w *Window) Bound(k uint32) { w.Key = k }
