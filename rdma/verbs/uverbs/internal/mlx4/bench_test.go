package mlx4

import (
	"slices"
	"testing"
	"time"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/golden"
)

// The benchmarks do what testdata/libcost/libcost.c does with the C library: 1024 requests in chains of 1 or 16, then the
// polls, 16 at a time, that retire them. The times are medians over rounds, as there.

const round = 1024

func benchRig(b *testing.B) (*rig, []byte, *hostmem.Region) {
	c := &golden.Case{Profile: "mlx4-static", Setup: &golden.Objects{
		UARPages: make([]golden.UARPage, 2),
		CQ:       []golden.CQ{{Name: "cq0", CQN: 0x400, Entries: 4096, IBVCQE: 4095, CQESize: 32}},
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
	q.init(l, addr(buf), addr(r.alloc(notesBytes(&l))), addr(r.alloc(4)), addr(r.uars[0]), newBlueFlame(addr(r.uars[1]), 256), false)
	q.beforeInit()
	r.table.Set(q.qpn, q)
	r.qps, r.qpBuf, r.qpRec = append(r.qps, q), append(r.qpBuf, buf), append(r.qpRec, nil)
	mem, err := hostmem.Alloc(1 << 20)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { mem.Free(); r.Close() })
	return r, buf, mem
}

func BenchmarkPost(b *testing.B) {
	for _, k := range []struct {
		name  string
		wr    verbs.SendWorkRequest
		op    byte
		block uint32
	}{
		{"send", verbs.SendWorkRequest{Opcode: verbs.OpSend}, opSend, 1},
		{"inline64", verbs.SendWorkRequest{Opcode: verbs.OpSend, Flags: verbs.SendInline}, opSend, 1},
		{"read", verbs.SendWorkRequest{Opcode: verbs.OpRDMARead, RKey: 0x1ee700}, opRDMARead, 1},
	} {
		for _, batch := range []int{1, 16} {
			name := k.name + "/batch1"
			if batch == 16 {
				name += "6"
			}
			b.Run(name, func(b *testing.B) {
				r, _, mem := benchRig(b)
				q, c := r.qps[0], r.cqs[0]
				wrs := make([]verbs.SendWorkRequest, batch)
				for i := range wrs {
					wrs[i] = k.wr
					wrs[i].WRID, wrs[i].Flags = 1, k.wr.Flags|verbs.SendSignaled
					wrs[i].SGList = []verbs.SGE{{Addr: mem.Addr(), Length: 64, LKey: 0x1ee700}}
					wrs[i].RemoteAddr = mem.Addr() + 4096
				}
				var qp verbs.QueuePair = qpOnly{QP: q} // through an interface, as callers have it
				var wcs [16]verbs.WorkCompletion
				post, poll := make([]float64, 0, 1<<16), make([]float64, 0, 1<<16)
				index, producer := uint32(0), uint32(0)
				b.ReportAllocs()
				for b.Loop() {
					t := time.Now()
					for range round / batch {
						if n, err := qp.PostSend(wrs); n != batch || err != nil {
							b.Fatal(n, err)
						}
					}
					post = append(post, float64(time.Since(t))/round)
					for range round {
						r.fillCQE(producer, index, k.op)
						producer, index = producer+1, index+k.block
					}
					t = time.Now()
					for left := round; left > 0; {
						n := c.Poll(wcs[:])
						if n == 0 || wcs[0].Status != verbs.WCSuccess {
							b.Fatal(n, wcs[0])
						}
						left -= n
					}
					poll = append(poll, float64(time.Since(t))/round)
				}
				slices.Sort(post)
				slices.Sort(poll)
				b.ReportMetric(post[len(post)/2], "ns/WQE")
				b.ReportMetric(poll[len(poll)/2], "ns/CQE")
				b.ReportMetric(0, "ns/op") // of both and of what plays the adapter: says nothing
			})
		}
	}
}

// qpOnly has what the benchmark does not use.
type qpOnly struct {
	*QP
	verbs.QueuePair
}

func (q qpOnly) PostSend(w []verbs.SendWorkRequest) (int, error) { return q.QP.PostSend(w) }
func (q qpOnly) PostRecv(w []verbs.RecvWorkRequest) (int, error) { return q.QP.PostRecv(w) }

func BenchmarkPollEmpty(b *testing.B) {
	r, _, _ := benchRig(b)
	var wcs [16]verbs.WorkCompletion
	b.ReportAllocs()
	for b.Loop() {
		if r.cqs[0].Poll(wcs[:]) != 0 {
			b.Fatal("an entry from nowhere")
		}
	}
}

// fillCQE writes the entry of a send, in place.
func (r *rig) fillCQE(producer, index uint32, op byte) {
	c, q := r.cqs[0], r.qps[0]
	d := r.cqBuf[0][producer&(c.entries-1)<<5:][:32]
	clear(d[:31])
	d[2], d[3], d[24], d[25] = byte(q.qpn>>8), byte(q.qpn), byte(index>>8), byte(index)
	d[31] = cqeSend | op | byte(producer/c.entries&1)<<7
}
