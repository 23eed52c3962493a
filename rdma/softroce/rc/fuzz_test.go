package rc

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"

	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/verbs"
)

// record is the packets of one direction of a short conversation with all operations.
func record(tb testing.TB) []byte {
	c := newCouple(tb, Tuning{ReadChunk: 2})
	var all []byte
	keep := func() {
		for _, p := range c.ao.pkts {
			b := c.ao.slab[p[0]:p[1]]
			if len(b) < 600 {
				all = binary.BigEndian.AppendUint16(all, uint16(len(b)))
				all = append(all, b...)
			}
		}
		c.settle()
	}
	for range 4 {
		c.b.PostRecv([]verbs.RecvWorkRequest{{SGList: []verbs.SGE{c.bufB.sge(0, 100)}}})
		c.a.PostRecv([]verbs.RecvWorkRequest{{SGList: []verbs.SGE{c.bufA.sge(0, 100)}}})
	}
	w := c.mb.window(c.bufB, 0, 64, verbs.AccessRemoteWrite)
	for _, op := range []verbs.SendOpcode{verbs.OpSend, verbs.OpSendWithImm, verbs.OpRDMAWrite, verbs.OpRDMAWriteImm, verbs.OpRDMARead, verbs.OpSendWithInv} {
		mustPost(tb, c.a, 0, []verbs.SendWorkRequest{{Opcode: op, SGList: []verbs.SGE{c.bufA.sge(0, 77)}, RemoteAddr: c.bufB.addr, RKey: c.bufB.key, ImmData: w.key}})
		keep()
		// ACKs and READ responses of A
		mustPost(tb, c.b, 0, []verbs.SendWorkRequest{{Opcode: verbs.OpRDMARead, SGList: []verbs.SGE{c.bufB.sge(0, 50)}, RemoteAddr: c.bufA.addr, RKey: c.bufA.key}})
		c.bo.deliver(0, c.a)
		keep()
	}
	return all
}

// discard is an Output that keeps nothing but counts, so that an attack that makes the QP produce without bound shows.
type discard struct{ packets, completions int }

func (d *discard) Packet(hdr []byte, payload [][]byte, pad uint8, ahead uint64) bool {
	d.packets++
	return d.packets%7 != 0
}
func (d *discard) Complete(*verbs.WorkCompletion, bool, bool) { d.completions++ }
func (d *discard) Event(verbs.AsyncEventType)                 {}

// victim is a queue pair with work of all kinds outstanding.
func victim(tb testing.TB) (*QP, *discard, *testMemory) {
	mem := newTestMemory(2)
	// The same first key and address as the recorded peer's, so that recorded packets hit.
	buf := mem.register(make([]byte, 1<<20), allAccess)
	mem.window(buf, 0, 64, verbs.AccessRemoteWrite)
	out := &discard{}
	q := New(Config{QPN: 2, Cap: verbs.QPCap{MaxSendWR: 16, MaxRecvWR: 8, MaxSendSGE: 2, MaxRecvSGE: 2}, Tuning: Tuning{ReadBurst: 3, ReadInterval: time.Microsecond}}, mem, out)
	at := baseAttr()
	at.PathMTU, at.DestQPN = verbs.MTU4096, 1
	for _, st := range []struct {
		s verbs.QPState
		m verbs.QPAttrMask
	}{{verbs.QPInitState, verbs.QPMaskToInit}, {verbs.QPReadyToReceive, verbs.QPMaskToRTR}, {verbs.QPReadyToSend, verbs.QPMaskToRTS}} {
		at.State = st.s
		if err := q.Modify(0, &at, st.m); err != nil {
			tb.Fatal(err)
		}
	}
	for range 8 {
		q.PostRecv([]verbs.RecvWorkRequest{{SGList: []verbs.SGE{buf.sge(0, 300)}}})
	}
	for i := range 12 {
		op := []verbs.SendOpcode{verbs.OpSend, verbs.OpRDMARead, verbs.OpRDMAWrite}[i%3]
		q.PostSend(0, []verbs.SendWorkRequest{{Opcode: op, SGList: []verbs.SGE{buf.sge(0, 50)}, RemoteAddr: 1, RKey: 2}})
	}
	return q, out, mem
}

// FuzzReceive feeds a queue pair whatever parses: no panic, no broken invariant, every request completes at most once.
func FuzzReceive(f *testing.F) {
	conversation := record(f)
	f.Add(conversation)
	r := rand.New(rand.NewPCG(1, 1))
	for range 8 {
		c := bytes.Clone(conversation)
		for range 1 + r.IntN(6) {
			c[r.IntN(len(c))] = byte(r.Uint32())
		}
		f.Add(c)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		q, out, mem := victim(t)
		posted := 20
		now := Time(0)
		var p packet.Packet
		for n := 0; len(b) >= 2 && n < 200; n++ {
			k := int(binary.BigEndian.Uint16(b))
			b = b[2:]
			k = min(k, len(b))
			if p.Parse(b[:k]) == nil {
				q.Receive(now, &p)
			}
			b = b[k:]
			if n%4 == 3 {
				q.EndBatch(now, false)
				q.Pump(now)
				if d := q.Deadline(); d != Never && n%8 == 7 {
					now = max(now, d)
					q.Tick(now)
				}
			}
			if err := q.check(); err != nil {
				t.Fatal(err)
			}
		}
		if out.completions > posted {
			t.Fatalf("%d completions of %d requests", out.completions, posted)
		}
		if q.Modify(now, &verbs.QPAttr{State: verbs.QPError}, verbs.QPMaskState) != nil || q.check() != nil {
			t.Fatal("cannot be ended")
		}
		if len(mem.regions) > 2 {
			t.Fatal("the peer made memory")
		}
	})
}

// A flood of packets of any kind costs no memory.
func TestFloodAllocatesNothing(t *testing.T) {
	c := record(t)
	q, _, _ := victim(t)
	r := rand.New(rand.NewPCG(2, 2))
	var p packet.Packet
	scratch := make([]byte, 600)
	f := func() {
		for b := c; len(b) >= 2; {
			k := int(binary.BigEndian.Uint16(b))
			s := scratch[:k]
			copy(s, b[2:])
			b = b[2+k:]
			if r.IntN(2) == 0 {
				s[r.IntN(len(s))] ^= byte(r.Uint32())
			}
			s[11] = byte(r.IntN(40)) // PSN near what is expected
			if p.Parse(s) == nil && (q.State() == verbs.QPReadyToSend) {
				q.Receive(0, &p)
			}
		}
		q.EndBatch(0, false)
		q.Pump(0)
		q.Tick(0)
	}
	if n := testing.AllocsPerRun(200, f); n != 0 {
		t.Errorf("%v allocations per round", n)
	}
}
