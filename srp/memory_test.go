package srp

import (
	"math/rand/v2"
	"testing"

	"srp-initiator/rdma/hostmem"
)

// The pool never hands out a unit twice and gets all of them back.
func TestBouncePool(t *testing.T) {
	region, err := hostmem.Alloc(100 * bounceUnit)
	if err != nil {
		t.Fatal(err)
	}
	defer region.Free()
	var p bouncePool
	p.init(&Memory{region: region})
	rnd := rand.New(rand.NewPCG(1, 2))
	type piece struct{ at, size int }
	var held []piece
	owner := make([]bool, 100)
	for range 20000 {
		if rnd.IntN(2) == 0 && len(held) > 0 {
			i := rnd.IntN(len(held))
			h := held[i]
			held = append(held[:i], held[i+1:]...)
			for u := h.at; u < h.at+unitsOf(h.size); u++ {
				owner[u] = false
			}
			p.give(h.at, h.size)
			continue
		}
		size := 1 + rnd.IntN(20*bounceUnit)
		at := p.take(size)
		if at < 0 {
			run := 0 // refused: there must indeed be no room
			for _, o := range owner {
				if run++; o {
					run = 0
				}
				if run == unitsOf(size) {
					t.Fatalf("refused %d units though there is room", run)
				}
			}
			continue
		}
		for u := at; u < at+unitsOf(size); u++ {
			if owner[u] {
				t.Fatalf("unit %d handed out twice", u)
			}
			owner[u] = true
		}
		held = append(held, piece{at, size})
	}
	for _, h := range held {
		p.give(h.at, h.size)
	}
	if p.free != 100 || p.take(100*bounceUnit) != 0 && p.next == 0 {
		t.Errorf("%d units free at the end", p.free)
	}
}
