package softroce

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"srp-initiator/rdma/softroce/udp"
	"srp-initiator/rdma/verbs"
)

// stingy is a socket whose kernel often has no room.
type stingy struct {
	*udp.Socket
	r       *rand.Rand
	refused int
}

func (s *stingy) Send(trains []udp.Train) (int, error) {
	if s.r.IntN(3) != 0 {
		return s.Socket.Send(trains)
	}
	s.refused++
	n, err := s.Socket.Send(trains[:s.r.IntN(len(trains))])
	if err == nil {
		err = udp.ErrWouldBlock
	}
	return n, err
}

// A link without room costs time, not packets: nothing is lost, sent twice or out of order.
func TestSendStalls(t *testing.T) {
	var ends [2]*end
	var links [2]*stingy
	for i := range ends {
		s, err := udp.OpenLoopback(udp.Options{})
		if err != nil {
			t.Fatal(err)
		}
		links[i] = &stingy{Socket: s, r: rand.New(rand.NewPCG(uint64(i), 1))}
		d, err := OpenLink(links[i], verbs.MTU4096)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		ends[i] = newEnd(t, d, true)
	}
	a, b := ends[0], ends[1]
	connect(t, a, b)
	const size = 200_000
	for round := range 30 {
		fill(a.mem.Slice(0, size), byte(round))
		b.recv(t, 1, 0, size)
		remote := verbs.SendWorkRequest{SGList: a.sge(0, size), RemoteAddr: b.mr.Addr() + 1<<20, RKey: b.mr.RKey()}
		w, r := remote, remote
		w.Opcode, r.Opcode = verbs.OpRDMAWrite, verbs.OpRDMARead
		r.SGList = a.sge(1<<20, size)
		a.send(t, w, r, verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: a.sge(0, size)})
		if round%2 == 0 {
			a.poll(t, 3)
			b.poll(t, 1)
		} else {
			a.wait(t, 3)
			b.wait(t, 1)
		}
		for _, got := range [][]byte{b.mem.Slice(0, size), b.mem.Slice(1<<20, size), a.mem.Slice(1<<20, size)} {
			if !bytes.Equal(got, a.mem.Slice(0, size)) {
				t.Fatalf("round %d: wrong data", round)
			}
		}
	}
	quiet(t, a, b)
	if links[0].refused < 10 || links[1].refused < 10 {
		t.Errorf("the links refused %d and %d times", links[0].refused, links[1].refused)
	}
}
