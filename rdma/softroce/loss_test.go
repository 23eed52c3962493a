package softroce

import (
	"bytes"
	"fmt"
	"os/exec"
	"testing"
	"time"

	"srp-initiator/internal/require"
	"srp-initiator/rdma/verbs"
)

// TestLossyLoopback runs verified traffic over a loopback that loses packets, in real time. It changes the machine's loopback, so
// it runs in a guest. With offload netem loses whole trains, without it single packets.
func TestLossyLoopback(t *testing.T) {
	require.Guest(t)
	tc := require.Program(t, "tc")
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("loopback: %v %s", err, out)
	}
	for _, loss := range []string{"0.1%", "1%", "5%"} {
		for _, c := range []struct {
			name string
			opts []Option
		}{{"trains", nil}, {"packets", []Option{WithoutOffload()}}} {
			t.Run(loss+" of "+c.name, func(t *testing.T) {
				if out, err := exec.Command(tc, "qdisc", "replace", "dev", "lo", "root", "netem", "loss", loss, "limit", "100000").CombinedOutput(); err != nil {
					t.Fatalf("netem: %v %s", err, out)
				}
				defer exec.Command(tc, "qdisc", "del", "dev", "lo", "root").Run()
				a, b := newEnd(t, open(t, c.opts...), true), newEnd(t, open(t, c.opts...), true)
				p := connParam
				p.ACKTimeout = 13 // 34 ms: what is lost last is missed only by the timer
				p.Timeout = time.Minute
				connectWith(t, a, b, p)
				const depth, size = 8, 48 << 10
				var moved int
				start := time.Now()
				for round := 0; time.Since(start) < 2*time.Second; round++ {
					var wrs []verbs.SendWorkRequest
					for i := range depth {
						fill(a.mem.Slice(i*size, size), byte(round+i))
						remote := b.mr.Addr() + 4<<20 + uint64(i*size)
						b.recv(t, uint64(i), i*size, size)
						wrs = append(wrs,
							verbs.SendWorkRequest{Opcode: verbs.OpRDMAWrite, SGList: a.sge(i*size, size), RemoteAddr: remote, RKey: b.mr.RKey()},
							verbs.SendWorkRequest{Opcode: verbs.OpRDMARead, SGList: a.sge(4<<20+i*size, size), RemoteAddr: remote, RKey: b.mr.RKey()},
							verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: a.sge(i*size, size)})
					}
					a.send(t, wrs...)
					for _, wc := range append(a.wait(t, len(wrs)), b.wait(t, depth)...) {
						if wc.Status != verbs.WCSuccess {
							t.Fatalf("round %d: %+v", round, wc)
						}
					}
					for i := range depth {
						want := a.mem.Slice(i*size, size)
						if !bytes.Equal(want, b.mem.Slice(i*size, size)) || !bytes.Equal(want, b.mem.Slice(4<<20+i*size, size)) || !bytes.Equal(want, a.mem.Slice(4<<20+i*size, size)) {
							t.Fatalf("round %d, slot %d: wrong bytes", round, i)
						}
					}
					moved += 3 * depth * size
				}
				s := a.d.Stats().Transport
				mbs := float64(moved) / 1e6 / time.Since(start).Seconds()
				t.Logf("%.1f MB/s verified; %d packets, %d sent again, %d timeouts", mbs, s.TxPackets, s.Retransmits, s.Timeouts)
				fmt.Printf("loss %s of %s: %.1f MB/s, %d of %d packets sent again\n", loss, c.name, mbs, s.Retransmits, s.TxPackets)
			})
		}
	}
}
