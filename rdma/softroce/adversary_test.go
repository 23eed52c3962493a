package softroce

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"srp-initiator/rdma/softroce/ibcm"
	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/softroce/udp"
	"srp-initiator/rdma/verbs"
)

// raw is a node that says what it likes.
type raw struct {
	t  testing.TB
	s  *udp.Socket
	d  *Device
	to *udp.Destination
}

func newRaw(t testing.TB, d *Device) *raw {
	t.Helper()
	s, err := udp.OpenLoopback(udp.Options{NoGSO: true, NoGRO: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return &raw{t, s, d, udp.NewDestination(netip.AddrPortFrom(d.Addr(), packet.Port), 0)}
}

func (r *raw) send(b []byte) {
	r.t.Helper()
	if _, err := r.s.Send([]udp.Train{{Data: b, To: r.to}}); err != nil {
		r.t.Fatal(err)
	}
}

// seal makes a packet of a header and a payload.
func (r *raw) seal(hdr, payload []byte) []byte {
	b := append(append(append([]byte(nil), hdr...), payload...), make([]byte, 4)...)
	packet.NewFlow(netip.AddrPortFrom(r.s.Addr(), packet.Port), netip.AddrPortFrom(r.d.Addr(), packet.Port)).Seal(b, 0)
	return b
}

// answers are the packets that come back within a time.
func (r *raw) answers(wait time.Duration) (ps [][]byte) {
	for end := time.Now().Add(wait); time.Now().Before(end); time.Sleep(time.Millisecond) {
		ms, err := r.s.Receive()
		if err != nil {
			r.t.Fatal(err)
		}
		for _, m := range ms {
			ps = append(ps, bytes.Clone(m.Data))
		}
	}
	return ps
}

// firstAnswers are the packets that come within some milliseconds of the first, for which it waits.
func (r *raw) firstAnswers() (ps [][]byte) {
	for limit := time.Now().Add(10 * time.Second); len(ps) == 0 && time.Now().Before(limit); {
		ps = r.answers(time.Millisecond)
	}
	return append(ps, r.answers(20*time.Millisecond)...)
}

// connected is an end whose peer is r.
func (r *raw) connected() *end {
	r.t.Helper()
	e := newEnd(r.t, r.d, true)
	for _, m := range []struct {
		a    verbs.QPAttr
		mask verbs.QPAttrMask
	}{
		{verbs.QPAttr{State: verbs.QPInitState, Port: 1, Access: verbs.AccessRemoteRead | verbs.AccessRemoteWrite}, verbs.QPMaskToInit},
		{verbs.QPAttr{State: verbs.QPReadyToReceive, AV: verbs.AddressVector{DGID: verbs.GIDFromAddr(r.s.Addr()), IsGlobal: true}, PathMTU: verbs.MTU1024,
			DestQPN: 0x777, RQPSN: 100, MaxDestRdAtomic: 4, MinRNRTimer: 12}, verbs.QPMaskToRTR},
		{verbs.QPAttr{State: verbs.QPReadyToSend, SQPSN: 1, MaxRdAtomic: 4, Timeout: 14, RetryCount: 3, RNRRetry: 7}, verbs.QPMaskToRTS},
	} {
		if err := e.qp.Modify(&m.a, m.mask); err != nil {
			r.t.Fatal(err)
		}
	}
	return e
}

func sendOnly(qpn uint32, psn packet.PSN) []byte {
	b := make([]byte, packet.BTHLen)
	(&packet.BTH{Opcode: packet.SendOnly, AckReq: true, PKey: packet.DefaultPKey, DestQPN: qpn, PSN: psn}).Put(b)
	return b
}

func TestWhoIsAnswered(t *testing.T) {
	d := open(t)
	r := newRaw(t, d)
	e := r.connected()
	e.recv(t, 1, 0, 4096)
	e.recv(t, 2, 0, 4096)
	payload := []byte("four by four....")
	good := r.seal(sendOnly(e.qp.QPN(), 100), payload)
	silent := func(what string, b []byte, counter func(s *Stats) uint64) {
		t.Helper()
		s := d.Stats()
		before := counter(&s)
		r.send(b)
		for limit := time.Now().Add(10 * time.Second); counter(&s) == before && time.Now().Before(limit); s = d.Stats() {
			time.Sleep(time.Millisecond)
		}
		if ps := r.answers(20 * time.Millisecond); len(ps) != 0 {
			t.Errorf("%s: answered by % x", what, ps[0])
		}
		if s = d.Stats(); counter(&s) != before+1 {
			t.Errorf("%s: counted %d times: %+v", what, counter(&s)-before, s)
		}
	}
	for i := 4; i < len(good); i += 5 { // every field but those that decide the counter
		if i >= 5 && i < 8 {
			continue
		}
		b := bytes.Clone(good)
		if b[i] ^= 0x40; i == 4 {
			continue // FECN, BECN and reserved are not covered
		}
		silent("a changed byte", b, func(s *Stats) uint64 { return s.ICRCErrors })
	}
	silent("no such queue pair", r.seal(sendOnly(e.qp.QPN()^1, 100), payload), func(s *Stats) uint64 { return s.UnknownQPN })
	silent("nonsense", []byte("GET / HTTP/1.1\r\n\r\n"), func(s *Stats) uint64 { return s.Malformed })
	silent("other partition", r.seal(func() []byte { b := sendOnly(e.qp.QPN(), 100); b[2], b[3] = 0x80, 1; return b }(), payload), func(s *Stats) uint64 { return s.Transport.Dropped })
	mad := make([]byte, packet.BTHLen+packet.DETHLen)
	(&packet.BTH{Opcode: packet.UDSendOnly, PKey: packet.DefaultPKey, DestQPN: 1}).Put(mad)
	(&packet.DETH{QKey: 0x1234, SrcQPN: 1}).Put(mad[packet.BTHLen:])
	silent("a MAD with another Q_Key", r.seal(mad, make([]byte, 256)), func(s *Stats) uint64 { return s.BadMAD })
	(&packet.DETH{QKey: gsiQKey, SrcQPN: 1}).Put(mad[packet.BTHLen:])
	silent("a MAD of another class", r.seal(mad, make([]byte, 256)), func(s *Stats) uint64 { return s.CM.Malformed })
	var dreq ibcm.MAD // for a connection that is not there: answered, when its ICRC is good
	(&ibcm.DREQ{LocalCommID: 5, RemoteCommID: 6, RemoteQPN: 7}).Encode(&dreq, 8)
	goodbye := r.seal(mad, dreq[:])
	broken := bytes.Clone(goodbye)
	broken[len(mad)+100] ^= 1
	silent("a changed byte in a MAD", broken, func(s *Stats) uint64 { return s.ICRCErrors })
	r.send(goodbye)
	if ps := r.firstAnswers(); len(ps) != 1 || packet.Opcode(ps[0][0]) != packet.UDSendOnly {
		t.Fatalf("a good MAD got %d answers", len(ps))
	}
	other := newRaw(t, d)
	s := d.Stats()
	other.send(other.seal(sendOnly(e.qp.QPN(), 100), payload))
	for limit := time.Now().Add(10 * time.Second); d.Stats().WrongPeer == s.WrongPeer && time.Now().Before(limit); {
		time.Sleep(time.Millisecond)
	}
	if ps := other.answers(20 * time.Millisecond); len(ps) != 0 {
		t.Error("a stranger was answered")
	}
	if n := d.Stats().WrongPeer - s.WrongPeer; n != 1 {
		t.Errorf("a stranger's packet counted %d times", n)
	}
	if n := e.cq.Poll(make([]verbs.WorkCompletion, 1)); n != 0 {
		t.Fatal("one of them was received")
	}
	// And the real one.
	r.send(good)
	ps := r.firstAnswers()
	if len(ps) != 1 || packet.Opcode(ps[0][0]) != packet.Acknowledge || binary.BigEndian.Uint32(ps[0][4:]) != 0x777 {
		t.Fatalf("a good packet got %d answers", len(ps))
	}
	if wc := e.poll(t, 1)[0]; wc.ByteLen != uint32(len(payload)) || !bytes.Equal(e.mem.Slice(0, len(payload)), payload) {
		t.Fatalf("%+v", wc)
	}
	if err := e.qp.Destroy(); err != nil {
		t.Fatal(err)
	}
	silent("a queue pair that was destroyed", r.seal(sendOnly(e.qp.QPN(), 101), payload), func(s *Stats) uint64 { return s.UnknownQPN })
}

// A key finds its entry as long as that is in the table, whatever was found in between.
func TestMemoryTable(t *testing.T) {
	m := memoryTable{byIndex: map[uint32]*keyed{}}
	rng := rand.New(rand.NewPCG(3, 4))
	ks := make([]keyed, 200) // more than are remembered
	for i := range ks {
		m.insert(&ks[i], rng.Uint64)
	}
	check := func(i int, want *keyed) {
		t.Helper()
		if got := m.find(ks[i].key); got != want {
			t.Fatalf("key 0x%08x of entry %d found %p, want %p", ks[i].key, i, got, want)
		}
	}
	for range 10 * len(ks) {
		i := rng.IntN(len(ks))
		check(i, &ks[i])
		if k := m.find(ks[i].key ^ 1); k != nil {
			t.Fatal("a key with another low byte was found")
		}
	}
	for i := range ks {
		check(i, &ks[i])
		ks[i].key ^= 5 // as binding a window does
		check(i, &ks[i])
		m.remove(&ks[i])
		check(i, nil)
	}
}

// A flood of junk, some of it well made, costs no memory and does not keep the device from its work.
func TestFlood(t *testing.T) {
	a, b := pair(t)
	r := newRaw(t, a.d)
	rng := rand.New(rand.NewPCG(1, 1))
	var req ibcm.MAD
	mad := make([]byte, packet.BTHLen+packet.DETHLen)
	(&packet.BTH{Opcode: packet.UDSendOnly, PKey: packet.DefaultPKey, DestQPN: 1}).Put(mad)
	(&packet.DETH{QKey: gsiQKey, SrcQPN: 1}).Put(mad[packet.BTHLen:])
	l, err := a.d.Connector().Listen(netip.AddrPortFrom(a.d.Addr(), 0), 16)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	burst := func(n int) {
		for i := range n {
			junk := make([]byte, 16+rng.IntN(300))
			for j := range junk {
				junk[j] = byte(rng.Uint32())
			}
			switch i % 3 {
			case 0: // anything
			case 1: // a request for a random queue pair
				junk = r.seal(sendOnly(rng.Uint32(), packet.MakePSN(rng.Uint32())), junk[:16])
			case 2: // a connection request of somebody new
				q := ibcm.REQ{LocalCommID: rng.Uint32() | 1, ServiceID: ibcm.ServiceID(l.Addr().Port()), CAGUID: rng.Uint64(), LocalQPN: 2 + rng.Uint32N(1<<20), PKey: 0xffff,
					PathMTU: verbs.MTU1024, Primary: ibcm.Path{LocalGID: verbs.GIDFromAddr(r.s.Addr()), RemoteGID: verbs.GIDFromAddr(a.d.Addr())}}
				(&ibcm.Address{Source: netip.AddrPortFrom(r.s.Addr(), 1), Destination: a.d.Addr()}).Encode(q.PrivateData[:])
				q.Encode(&req, rng.Uint64())
				junk = r.seal(mad, req[:])
			}
			r.send(junk)
		}
		r.answers(5 * time.Millisecond)
	}
	work := func() {
		t.Helper()
		fill(a.mem.Slice(0, 10000), byte(rng.Uint32()))
		b.recv(t, 1, 1<<20, 10000)
		a.send(t, verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: a.sge(0, 10000)})
		a.poll(t, 1)
		b.poll(t, 1)
		if !bytes.Equal(a.mem.Slice(0, 10000), b.mem.Slice(1<<20, 10000)) {
			t.Fatal("wrong data")
		}
	}
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	burst(3000)
	work()
	before := heap()
	for range 15 {
		burst(3000)
		work()
	}
	if after := heap(); after > before+1<<20 {
		t.Errorf("the heap grew from %d to %d bytes", before, after)
	}
	s := a.d.Stats()
	if n := a.d.cm.Len(); n > 32 {
		t.Errorf("%d connections are remembered", n)
	}
	if s.Malformed == 0 || s.UnknownQPN == 0 || s.CM.Dropped == 0 {
		t.Errorf("%+v", s)
	}
}

// Keys, numbers and first PSNs are not to be guessed from others.
func TestUnpredictable(t *testing.T) {
	d := open(t)
	var keys, qpns []uint32
	for range 16 {
		e := newEnd(t, d, true)
		keys = append(keys, e.mr.RKey())
		qpns = append(qpns, e.qp.QPN())
	}
	for _, v := range [][]uint32{keys, qpns} {
		near := 0
		for i := 1; i < len(v); i++ {
			if diff := int64(v[i]) - int64(v[i-1]); diff > -4096 && diff < 4096 {
				near++
			}
		}
		if near > 2 {
			t.Errorf("neighbours: %x", v)
		}
	}
}
