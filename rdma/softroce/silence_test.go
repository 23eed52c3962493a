package softroce

import (
	"bytes"
	"testing"
	"time"

	"srp-initiator/rdma/verbs"
)

// A silent device loses what it sends and what comes, acknowledgements too; after it the transport's retries make up for that. What was posted before has left.
func TestSilence(t *testing.T) {
	const silent = 300 * time.Millisecond
	a, b := pair(t)
	for i, quietEnd := range []*end{a, b} { // the sender, the receiver
		fill(a.mem.Slice(0, 100), byte(i))
		b.recv(t, 1, 4096, 100)
		before := b.d.Stats().PacketsReceived
		quietEnd.d.Silence(silent)
		start := time.Now()
		a.send(t, verbs.SendWorkRequest{WRID: 2, Opcode: verbs.OpSend, SGList: a.sge(0, 100)})
		if wc := a.poll(t, 1); wc[0].Status != verbs.WCSuccess || time.Since(start) < silent {
			t.Errorf("end %d silent: %s after %s", i, wc[0].Status, time.Since(start))
		}
		b.poll(t, 1)
		if !bytes.Equal(b.mem.Slice(4096, 100), a.mem.Slice(0, 100)) || b.d.Stats().PacketsReceived == before {
			t.Errorf("end %d silent: other bytes came", i)
		}
	}
	if s := a.d.Stats().Transport; s.Retransmits < 2 {
		t.Errorf("%d packets sent again", s.Retransmits)
	}
	// 0 ends it, and a silence that is over is none.
	b.d.Silence(time.Hour)
	b.d.Silence(0)
	b.recv(t, 1, 4096, 100)
	a.send(t, verbs.SendWorkRequest{WRID: 2, Opcode: verbs.OpSend, SGList: a.sge(0, 100)})
	if wc := a.poll(t, 1); wc[0].Status != verbs.WCSuccess {
		t.Error(wc[0].Status)
	}
}
