package mlx4

import (
	"testing"

	"srp-initiator/rdma/verbs/uverbs/internal/golden"
	"srp-initiator/rdma/verbs/uverbs/internal/ring"
)

func benchRig(b *testing.B) golden.Bench {
	r, err := newRig(golden.BenchCase("mlx4-static", 32))
	if err != nil {
		b.Fatal(err)
	}
	l, err := SizeQP(golden.BenchCap, recordedLimits)
	if err != nil {
		b.Fatal(err)
	}
	q := &QP{qpn: 0x1a3}
	r.add(q, l, r.Alloc(l.Bytes), newBlueFlame(ring.Addr(r.UARs[1]), recordedBlueFlame), false, false)
	b.Cleanup(r.Close)
	return golden.Bench{Post: q.PostSend, Poll: r.CQs[0].Poll, Finish: r.fillCQE, Addr: ring.AddrOf(r.Alloc(1 << 20))}
}

func BenchmarkPost(b *testing.B)      { golden.BenchmarkPost(b, 1, benchRig) }
func BenchmarkPollEmpty(b *testing.B) { golden.BenchmarkPollEmpty(b, benchRig(b)) }

// fillCQE writes the entry of a send, in place.
func (r *rig) fillCQE(producer, index uint32, op byte) {
	q, entries := r.QPs[0], uint32(r.CQs[0].Capacity()+1)
	d := r.CQBuf[0][producer&(entries-1)<<5:][:32]
	clear(d[:31])
	d[2], d[3], d[24], d[25] = byte(q.qpn>>8), byte(q.qpn), byte(index>>8), byte(index)
	d[31] = cqeSend | op | byte(producer/entries&1)<<7
}
