package rc

import (
	"math/rand/v2"
	"testing"
	"time"

	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/softroce/simnet"
	"srp-initiator/rdma/verbs"
)

// exchange does SRP-like reads of 4 KiB, qd at a time, over a link of 10 Gbit/s and 20 us one way; it returns reads per (virtual) second.
func exchange(t *testing.T, qd int, loss float64) (perSecond float64, a, b Stats) {
	const total = 3000
	net := simnet.New(1)
	net.SetDefault(simnet.Faults{Loss: loss, Delay: 20 * time.Microsecond, Bandwidth: 1.25e9})
	r := rand.New(rand.NewPCG(1, 1))
	var ends [2]*endpoint
	var bufs [2]*testRegion
	at := baseAttr()
	at.Timeout = 15 // 134 ms
	for i := range ends {
		self, peer := addrA, addrB
		if i == 1 {
			self, peer = peer, self
		}
		cfg := Config{QPN: uint32(i + 1), Cap: verbs.QPCap{MaxSendWR: 256, MaxRecvWR: 256}, Tuning: Tuning{AckDelay: 100 * time.Microsecond, AckUnasked: time.Millisecond, AskRarely: true}}
		ends[i] = newEndpoint(net, r, self, peer, cfg, newTestMemory(7))
		ends[i].batchDelay = 3 * time.Microsecond
		bufs[i] = ends[i].mem.register(make([]byte, 1<<16), allAccess)
	}
	if err := connect(ends[0], ends[1], verbs.MTU4096, 1, 7, at); err != nil {
		t.Fatal(err)
	}
	ini, tgt := ends[0], ends[1]
	recv := func(i int) {
		ends[i].qp.PostRecv([]verbs.RecvWorkRequest{{SGList: []verbs.SGE{bufs[i].sge(0, 256)}}})
	}
	for range 200 {
		recv(0)
		recv(1)
	}
	// received empties the completions and reposts the receives.
	received := func(i int) (n int) {
		for _, c := range ends[i].done {
			if c.wc.Status != verbs.WCSuccess {
				t.Fatalf("loss %v, queue depth %d: %+v", loss, qd, c)
			}
			if c.recv {
				n++
				recv(i)
			}
		}
		ends[i].done = ends[i].done[:0]
		return n
	}
	done, asked := 0, 0
	ask := func(n int) {
		for ; n > 0 && asked < total; n-- {
			asked++
			ini.qp.PostSend(ini.now(), []verbs.SendWorkRequest{{Opcode: verbs.OpSend, SGList: []verbs.SGE{bufs[0].sge(0, 100)}, Flags: verbs.SendSignaled}})
		}
		ini.after()
	}
	ini.handle = func() {
		n := received(0)
		done += n
		net.After(time.Microsecond, func() { ask(n) })
	}
	tgt.handle = func() {
		n := received(1)
		net.After(time.Microsecond, func() {
			for range n {
				tgt.qp.PostSend(tgt.now(), []verbs.SendWorkRequest{
					{Opcode: verbs.OpRDMAWrite, SGList: []verbs.SGE{bufs[1].sge(0, 4096)}, RemoteAddr: bufs[0].addr + 8192, RKey: bufs[0].key},
					{Opcode: verbs.OpSend, SGList: []verbs.SGE{bufs[1].sge(0, 80)}, Flags: verbs.SendSignaled},
				})
			}
			tgt.after()
		})
	}
	net.After(0, func() { ask(qd) })
	if !net.Run(1000*time.Second, func() bool { return done == total }) {
		t.Fatalf("loss %v, queue depth %d: %d of %d reads", loss, qd, done, total)
	}
	return total / net.Now().Seconds(), ini.qp.Stats(), tgt.qp.Stats()
}

// A lossy link costs throughput, not all of it: losses that nothing arrives behind must not each cost an ACK timeout.
func TestLossyThroughput(t *testing.T) {
	for qd, want := range map[int]map[float64]float64{
		1:  {0.001: 0.5, 0.01: 0.2, 0.05: 0.08},
		8:  {0.001: 0.8, 0.01: 0.5, 0.05: 0.1},
		64: {0.001: 0.6, 0.01: 0.3, 0.05: 0.04},
	} {
		if testing.Short() && qd != 8 {
			continue
		}
		clean, _, _ := exchange(t, qd, 0)
		for loss, part := range want {
			got, a, b := exchange(t, qd, loss)
			t.Logf("queue depth %d, loss %.1f %%: %.0f/s of %.0f/s; %d of %d packets sent again, %d early, %d ACK timeouts", qd, 100*loss, got, clean,
				a.Retransmits+b.Retransmits, a.TxPackets+b.TxPackets, a.EarlyRetransmits+b.EarlyRetransmits, a.Timeouts+b.Timeouts)
			if loss == 0.001 && qd == 1 {
				continue // one ACK timeout decides, the first: nothing is known of losses before
			}
			if got < part*clean {
				t.Errorf("queue depth %d, loss %.1f %%: %.0f reads/s of %.0f/s without loss", qd, 100*loss, got, clean)
			}
		}
	}
}

func TestEarlyRetransmit(t *testing.T) {
	r := newRig(t, func(a *verbs.QPAttr) { a.Timeout, a.RetryCount = 14, 1 }, Tuning{}) // 67 ms
	ack := func(psn packet.PSN) { r.take(wire{op: packet.Acknowledge, psn: psn, syn: 0x1f}) }
	r.post(verbs.OpSend, 4)
	r.now += Time(50 * time.Microsecond)
	ack(40)
	r.post(verbs.OpSend, 4)
	// As long as nothing was ever lost, only the ACK timeout runs.
	if d := r.q.Deadline(); d != r.now.Add(AckTimeout(14)) {
		t.Fatalf("deadline after %v", time.Duration(d-r.now))
	}
	r.take(wire{op: packet.Acknowledge, psn: 41, syn: 0x60}) // a loss
	r.expect("SEND Only psn 40 len 4", "SEND Only psn 41 len 4", "SEND Only psn 41 len 4")
	r.now += Time(50 * time.Microsecond)
	ack(41)
	r.post(verbs.OpSend, 4)
	r.sent = nil
	start := r.now
	for i := range 5 { // 2, 4, 8, 16, 32 ms; then comes the ACK timeout
		was := r.now
		r.expire()
		if d := time.Duration(r.now - was); d != earlyMin<<i {
			t.Errorf("early retransmission %d after %v", i, d)
		}
		r.expect("SEND Only psn 42 len 4")
	}
	r.expire()
	if r.now != start.Add(AckTimeout(14)) || r.q.Stats().Timeouts != 1 || r.q.Stats().EarlyRetransmits != 5 {
		t.Errorf("ACK timeout at %v, %+v", time.Duration(r.now-start), r.q.Stats())
	}
	for r.q.State() == verbs.QPReadyToSend {
		r.expire()
	}
	// The retry counter saw ACK timeouts alone.
	if r.now != start.Add(2*AckTimeout(14)) {
		t.Errorf("given up after %v", time.Duration(r.now-start))
	}
	if st := r.done[len(r.done)-1].wc.Status; st != verbs.WCRetryExceeded {
		t.Error(st)
	}
}

// The peer went back and what it went back for was lost again: told once more. But not while an RNR NAK is being waited out, nor for packets
// that only go on.
func TestNakAgain(t *testing.T) {
	r := newRig(t, nil, Tuning{})
	for range 9 {
		r.recv(8)
	}
	r.take(wire{op: packet.SendOnly, psn: 41})
	r.take(wire{op: packet.SendOnly, psn: 42})
	r.end("Acknowledge psn 40 len 0 syndrome 60 msn 0")
	r.take(wire{op: packet.SendOnly, psn: 43})
	r.end()
	r.take(wire{op: packet.SendOnly, psn: 41}) // 40 is missing again
	r.take(wire{op: packet.SendOnly, psn: 42})
	r.end("Acknowledge psn 40 len 0 syndrome 60 msn 0")
	r.take(wire{op: packet.SendOnly, psn: 43})
	r.end()

	r = newRig(t, nil, Tuning{})
	r.take(wire{op: packet.SendOnly, psn: 40})
	r.take(wire{op: packet.SendOnly, psn: 42})
	r.take(wire{op: packet.SendOnly, psn: 41})
	r.end("Acknowledge psn 40 len 0 syndrome 21 msn 0")
	r.take(wire{op: packet.SendOnly, psn: 41})
	r.end()
}

// A second NAK that comes before the retransmission can have arrived is about the same loss.
func TestNakTwice(t *testing.T) {
	r := newRig(t, nil, Tuning{})
	r.post(verbs.OpSend, 4)
	r.now += 1000
	r.take(wire{op: packet.Acknowledge, psn: 40, syn: 0x1f}) // round trip: 1 us
	r.post(verbs.OpSend, 4)
	r.post(verbs.OpSend, 5)
	r.sent = nil
	nak := func(want ...string) {
		t.Helper()
		r.take(wire{op: packet.Acknowledge, psn: 41, syn: 0x60})
		r.expect(want...)
	}
	nak("SEND Only psn 41 len 4", "SEND Only psn 42 len 5")
	r.now += 999
	nak()
	r.now++
	nak("SEND Only psn 41 len 4", "SEND Only psn 42 len 5")
	for range 100 { // NAKs alone do not use up the retry counter
		r.now += 1000
		nak("SEND Only psn 41 len 4", "SEND Only psn 42 len 5")
	}
	if d := r.q.Deadline(); d > Time(1000).Add(AckTimeout(10)) {
		t.Errorf("NAKs put the ACK timeout off to %d", d)
	}
}
