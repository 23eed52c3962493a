package mlx5

import (
	"testing"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/golden"
)

func benchRig(b *testing.B) golden.Bench {
	c := &golden.Case{Profile: "mlx5-static", Setup: &golden.Objects{
		UARPages: make([]golden.UARPage, 2),
		CQ:       []golden.CQ{{Name: "cq0", CQN: 0x400, Entries: 4096, IBVCQE: 4095, CQESize: 64}},
	}}
	r, err := newRig(c)
	if err != nil {
		b.Fatal(err)
	}
	l, err := SizeQP(verbs.QPCap{MaxSendWR: 2048, MaxRecvWR: 16, MaxSendSGE: 2, MaxRecvSGE: 1, MaxInlineData: 64}, recordedLimits)
	if err != nil {
		b.Fatal(err)
	}
	q := &QP{qpn: 0x1a3}
	q.send, q.recv = r.cqs[0], r.cqs[0]
	buf := r.alloc(l.Bytes)
	q.rsn = 0
	q.init(l, addr(buf), addr(r.alloc(notesBytes(&l))), addr(r.alloc(8)), newRegister(addr(r.uars[1][0x800:]), 256, optionsFromEnv(func(string) string { return "" })), false)
	q.state.Store(uint32(verbs.QPReadyToSend))
	r.table.Set(q.rsn, q)
	r.qps, r.qpBuf, r.qpRec = append(r.qps, q), append(r.qpBuf, buf), append(r.qpRec, nil)
	mem, err := hostmem.Alloc(1 << 20)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { mem.Free(); r.Close() })
	return golden.Bench{Post: q.PostSend, Poll: r.cqs[0].Poll, Finish: r.fillCQE, Addr: mem.Addr()}
}

func BenchmarkPost(b *testing.B)      { golden.BenchmarkPost(b, 2, benchRig) }
func BenchmarkPollEmpty(b *testing.B) { golden.BenchmarkPollEmpty(b, benchRig(b)) }

// fillCQE writes the entry of a send, in place.
func (r *rig) fillCQE(producer, index uint32, op byte) {
	c, q := r.cqs[0], r.qps[0]
	d := r.cqBuf[0][producer&(c.entries-1)<<6:][:64]
	clear(d[:63])
	d[35] = byte(q.rsn)
	d[56], d[58], d[59], d[60], d[61] = op, byte(q.qpn>>8), byte(q.qpn), byte(index>>8), byte(index)
	d[63] = byte(producer / c.entries & 1)
}
