package ibcm

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"srp-initiator/rdma/verbs"
)

var (
	addrA = netip.MustParseAddr("192.0.2.1")
	addrB = netip.MustParseAddr("192.0.2.2")
)

// pair is two nodes joined by a network that the test decides about.
type pair struct {
	t      *testing.T
	now    time.Time
	nodes  map[netip.Addr]*Machine
	events map[netip.Addr][]Event
	// drop decides over each datagram; nil delivers all.
	drop func(from, to netip.Addr, d *MAD) bool
	seen []Attr
}

func newPair(t *testing.T) *pair {
	p := &pair{t: t, now: time.Unix(1000, 0), nodes: map[netip.Addr]*Machine{}, events: map[netip.Addr][]Event{}}
	for i, a := range []netip.Addr{addrA, addrB} {
		r := rand.New(rand.NewPCG(1, uint64(i)))
		p.nodes[a] = New(Config{Addr: a, CAGUID: NewCAGUID(r.Uint64()), PKey: 0xffff, MaxMTU: verbs.MTU4096, Random: r.Uint64})
	}
	return p
}

// settle delivers until no node has anything to say.
func (p *pair) settle() {
	for busy := true; busy; {
		busy = false
		for a, m := range p.nodes {
			out := append([]Datagram(nil), m.Outputs()...)
			p.events[a] = append(p.events[a], m.Events()...)
			for i := range out {
				busy = true
				p.seen = append(p.seen, out[i].MAD.Attr())
				if p.drop == nil || !p.drop(a, out[i].To, &out[i].MAD) {
					p.nodes[out[i].To].Receive(p.now, a, out[i].MAD[:])
				}
			}
		}
	}
}

// pass lets d go by, waking the machines whenever they ask.
func (p *pair) pass(d time.Duration) {
	for end := p.now.Add(d); ; {
		next := end
		for _, m := range p.nodes {
			if n := m.Next(); !n.IsZero() && n.Before(next) {
				next = n
			}
		}
		p.now = next
		for _, m := range p.nodes {
			m.Tick(p.now)
		}
		p.settle()
		if !next.Before(end) {
			return
		}
	}
}

func (p *pair) take(a netip.Addr, kind EventKind) *Event {
	p.t.Helper()
	if len(p.events[a]) == 0 {
		p.t.Fatalf("%v: no event where kind %d was due", a, kind)
	}
	e := p.events[a][0]
	p.events[a] = p.events[a][1:]
	if e.Kind != kind {
		p.t.Fatalf("%v: event of kind %d where %d was due", a, e.Kind, kind)
	}
	return &e
}

func (p *pair) none(a netip.Addr) {
	p.t.Helper()
	if len(p.events[a]) != 0 {
		p.t.Fatalf("%v: unexpected event of kind %d", a, p.events[a][0].Kind)
	}
}

func (p *pair) connect() *Conn {
	p.t.Helper()
	c, err := p.nodes[addrA].Connect(p.now, ConnectParam{
		Peer: netip.AddrPortFrom(addrB, 5555), SourcePort: 40000, LocalQPN: 0x111111, StartingPSN: 0xa1a1a1,
		ResponderResources: 4, InitiatorDepth: 3, RetryCount: 7, RNRRetryCount: 7, PathMTU: verbs.MTU1024, ACKTimeout: 17,
		PrivateData: []byte("login"),
	}, nil)
	if err != nil {
		p.t.Fatal(err)
	}
	return c
}

func (p *pair) listen() {
	p.t.Helper()
	if _, err := p.nodes[addrB].Listen(5555, 8, nil); err != nil {
		p.t.Fatal(err)
	}
}

var replyParam = ReplyParam{LocalQPN: 0x222222, StartingPSN: 0xb2b2b2, ResponderResources: 5, InitiatorDepth: 6, RNRRetryCount: 7, PrivateData: []byte("welcome")}

// established goes all the way.
func (p *pair) established() (a, b *Conn) {
	p.t.Helper()
	a = p.connect()
	p.pass(0)
	for len(p.events[addrB]) == 0 {
		p.pass(time.Second)
	}
	b = p.take(addrB, EventRequest).Conn
	if err := p.nodes[addrB].Reply(p.now, b, replyParam); err != nil {
		p.t.Fatal(err)
	}
	p.pass(0)
	for len(p.events[addrA]) == 0 {
		p.pass(time.Second)
	}
	if c := p.take(addrA, EventReply).Conn; c != a {
		p.t.Fatal("reply for another connection")
	}
	if err := p.nodes[addrA].Ready(a); err != nil {
		p.t.Fatal(err)
	}
	p.pass(0)
	for b.State() != Established {
		p.pass(time.Second)
	}
	p.take(addrB, EventEstablished)
	p.none(addrA)
	p.none(addrB)
	return a, b
}

func TestConnectAndDisconnect(t *testing.T) {
	p := newPair(t)
	p.listen()
	a, b := p.established()
	q := b.REQ()
	if q.LocalQPN != 0x111111 || q.StartingPSN != 0xa1a1a1 || q.ResponderResources != 4 || q.InitiatorDepth != 3 ||
		!bytes.HasPrefix(q.PrivateData[AddressSize:], []byte("login\x00")) || q.Primary.ACKTimeout != 17 {
		t.Fatalf("REQ as received: %+v", q)
	}
	if got := b.Address(); got.Source != netip.AddrPortFrom(addrA, 40000) || got.Destination != addrB {
		t.Fatalf("addresses as received: %+v", got)
	}
	if r := a.REP(); r.LocalQPN != 0x222222 || r.StartingPSN != 0xb2b2b2 || !bytes.HasPrefix(r.PrivateData[:], []byte("welcome\x00")) {
		t.Fatalf("REP as received: %+v", r)
	}
	if !a.PeerIsSoftroce() || !b.PeerIsSoftroce() {
		t.Fatal("the peer's GUID was not recognized")
	}
	p.nodes[addrA].Disconnect(p.now, a)
	p.settle()
	p.take(addrA, EventDisconnected)
	p.take(addrB, EventDisconnected)
	if a.State() != TimeWait || b.State() != TimeWait {
		t.Fatalf("after DREQ and DREP: %v and %v", a.State(), b.State())
	}
	p.pass(511 * time.Millisecond)
	p.none(addrA)
	p.pass(time.Millisecond) // code 17 is 512 ms
	p.take(addrA, EventExpired)
	p.take(addrB, EventExpired)
	for n, m := range p.nodes {
		if m.Len() != 0 || len(m.peers) != 0 || len(m.qpns) != 0 || m.halfOpen != 0 || !m.Next().IsZero() {
			t.Errorf("%v remembers %d connections, %d peers, %d queue pairs, %d half open, next deadline %v", n, m.Len(), len(m.peers), len(m.qpns), m.halfOpen, m.Next())
		}
		if s := m.Stats(); s.Retransmits+s.Duplicates+s.Unexpected+s.Malformed != 0 {
			t.Errorf("%v: a quiet network gave %+v", n, s)
		}
	}
	want := []Attr{AttrREQ, AttrREP, AttrRTU, AttrDREQ, AttrDREP}
	if len(p.seen) != len(want) {
		t.Fatalf("messages %v, want %v", p.seen, want)
	}
}

// Each message of the exchange is lost once, then twice; the connection comes up and goes down all the same.
func TestEveryMessageLost(t *testing.T) {
	for _, attr := range []Attr{AttrREQ, AttrREP, AttrRTU, AttrDREQ, AttrDREP} {
		for times := 1; times <= 2; times++ {
			p := newPair(t)
			p.listen()
			left := times
			p.drop = func(_, _ netip.Addr, d *MAD) bool {
				if d.Attr() == attr && left > 0 {
					left--
					return true
				}
				return false
			}
			a, b := p.established()
			p.nodes[addrB].Disconnect(p.now, b)
			p.pass(20 * time.Second)
			p.take(addrA, EventDisconnected)
			p.take(addrA, EventExpired)
			p.take(addrB, EventDisconnected)
			p.take(addrB, EventExpired)
			p.none(addrA)
			p.none(addrB)
			if left != 0 || a.State() != Gone || b.State() != Gone {
				t.Errorf("%v lost %d times: %d losses left, %v, %v", attr, times, left, a.State(), b.State())
			}
		}
	}
}

// Random loss and duplication, many connections: all get established exactly once, and nothing is left in the end.
func TestLossAndDuplication(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 7))
		p := newPair(t)
		p.listen()
		p.drop = func(from, to netip.Addr, d *MAD) bool {
			if r.IntN(4) == 0 {
				return true
			}
			if r.IntN(5) == 0 {
				m := *d
				p.nodes[to].Receive(p.now, from, m[:])
			}
			return false
		}
		a, b := p.established()
		p.nodes[addrA].Disconnect(p.now, a)
		if seed%2 == 0 {
			p.nodes[addrB].Disconnect(p.now, b)
		}
		p.pass(time.Minute)
		p.take(addrA, EventDisconnected)
		p.take(addrA, EventExpired)
		p.none(addrA)
		for n, m := range p.nodes {
			if m.halfOpen != 0 || n == addrA && m.Len() != 0 {
				t.Fatalf("seed %d: %v remembers %d connections, %d half open", seed, n, m.Len(), m.halfOpen)
			}
		}
	}
}

func TestTrafficStandsForRTU(t *testing.T) {
	p := newPair(t)
	p.listen()
	p.drop = func(_, _ netip.Addr, d *MAD) bool { return d.Attr() == AttrRTU }
	a := p.connect()
	p.settle()
	b := p.take(addrB, EventRequest).Conn
	p.nodes[addrB].Reply(p.now, b, replyParam)
	p.settle()
	p.nodes[addrA].Ready(a)
	p.settle()
	p.nodes[addrB].Traffic(b)
	p.settle()
	p.take(addrB, EventEstablished)
	if b.State() != Established {
		t.Fatal(b.State())
	}
}

func TestRefusals(t *testing.T) {
	good := func(p *pair) REQ {
		q := REQ{
			LocalCommID: 77, ServiceID: ServiceID(5555), CAGUID: 42, LocalQPN: 0x333, PKey: 0xffff, PathMTU: verbs.MTU1024,
			Primary: Path{LocalGID: verbs.GIDFromAddr(addrA), RemoteGID: verbs.GIDFromAddr(addrB)},
		}
		(&Address{Source: netip.AddrPortFrom(addrA, 1), Destination: addrB}).Encode(q.PrivateData[:])
		return q
	}
	for _, c := range []struct {
		name   string
		change func(*REQ)
		reason uint16
	}{
		{"nothing wrong", func(*REQ) {}, 0},
		{"limited member", func(q *REQ) { q.PKey = 0x7fff }, 0},
		{"no listener", func(q *REQ) { q.ServiceID++ }, ReasonInvalidServiceID},
		{"other port space", func(q *REQ) { q.ServiceID = 0x0111<<16 | 5555 }, ReasonInvalidServiceID},
		{"unreliable connection", func(q *REQ) { q.Transport = 1 }, ReasonInvalidTransport},
		{"other partition", func(q *REQ) { q.PKey = 0x8001 }, ReasonUnsupported},
		{"MTU 0", func(q *REQ) { q.PathMTU = 0 }, ReasonInvalidMTU},
		{"MTU code 6", func(q *REQ) { q.PathMTU = 6 }, ReasonInvalidMTU},
		{"not our GID", func(q *REQ) { q.Primary.RemoteGID[15]++ }, ReasonInvalidGID},
		{"not the sender's GID", func(q *REQ) { q.Primary.LocalGID[15]++ }, ReasonInvalidGID},
		{"RDMA/CM version", func(q *REQ) { q.PrivateData[0] = 1 }, ReasonConsumer},
		{"RDMA/CM IP version", func(q *REQ) { q.PrivateData[1] = 0x50 }, ReasonConsumer},
		{"RDMA/CM destination", func(q *REQ) { q.PrivateData[35]++ }, ReasonConsumer},
		{"RDMA/CM source multicast", func(q *REQ) { q.PrivateData[16] = 224 }, ReasonConsumer},
	} {
		p := newPair(t)
		p.listen()
		q := good(p)
		c.change(&q)
		var d MAD
		q.Encode(&d, 99)
		b := p.nodes[addrB]
		b.Receive(p.now, addrA, d[:])
		out, ev := b.Outputs(), b.Events()
		if c.reason == 0 {
			if len(out) != 0 || len(ev) != 1 || ev[0].Kind != EventRequest {
				t.Errorf("%s: %d answers, %d events", c.name, len(out), len(ev))
			}
			continue
		}
		if len(out) != 1 || len(ev) != 0 || b.Len() != 0 {
			t.Errorf("%s: %d answers, %d events, %d connections", c.name, len(out), len(ev), b.Len())
			continue
		}
		var r REJ
		if err := r.Decode(&out[0].MAD); err != nil || r.Reason != c.reason || r.RemoteCommID != 77 || out[0].MAD.TID() != 99 {
			t.Errorf("%s: %v, %+v", c.name, err, r)
		}
	}
}

func TestRejectReachesTheCaller(t *testing.T) {
	p := newPair(t)
	p.connect()
	p.settle()
	if e := p.take(addrA, EventRejected); e.Reject.Reason != ReasonInvalidServiceID {
		t.Fatalf("%+v", e.Reject)
	}
	p.listen()
	p.connect()
	p.settle()
	b := p.take(addrB, EventRequest).Conn
	if err := p.nodes[addrB].Reject(b, ReasonConsumer, []byte("not today")); err != nil {
		t.Fatal(err)
	}
	p.settle()
	if e := p.take(addrA, EventRejected); e.Reject.Reason != ReasonConsumer || !bytes.HasPrefix(e.Reject.PrivateData[:], []byte("not today\x00")) {
		t.Fatalf("%+v", e.Reject)
	}
	var se *ErrState
	if err := p.nodes[addrB].Reply(p.now, b, replyParam); !errors.As(err, &se) {
		t.Fatalf("reply after reject: %v", err)
	}
	for _, m := range p.nodes {
		if m.Len() != 0 || m.halfOpen != 0 {
			t.Fatal("a refused connection is remembered")
		}
	}
}

// The active side gives up before the passive side answered.
func TestCallerGivesUp(t *testing.T) {
	p := newPair(t)
	p.listen()
	a := p.connect()
	p.settle()
	b := p.take(addrB, EventRequest).Conn
	p.nodes[addrA].Disconnect(p.now, a)
	p.settle()
	if e := p.take(addrB, EventRejected); e.Conn != b || e.Reject.Reason != ReasonTimeout {
		t.Fatalf("%+v", e)
	}
	if p.nodes[addrB].Len() != 0 {
		t.Fatal("the passive side remembers")
	}
}

func TestNobodyAnswers(t *testing.T) {
	p := newPair(t)
	p.drop = func(_, _ netip.Addr, _ *MAD) bool { return true }
	p.connect()
	p.pass(2 * time.Minute)
	p.take(addrA, EventUnreachable)
	if n := len(p.seen); n != requestTries+1 { // and a REJ that says so
		t.Fatalf("%d messages, want %d", n, requestTries+1)
	}
}

// A slow consumer: duplicates of the REQ get an MRA and the active side waits.
func TestPatience(t *testing.T) {
	p := newPair(t)
	p.listen()
	a := p.connect()
	p.pass(30 * time.Second)
	b := p.take(addrB, EventRequest).Conn
	mra := 0
	for _, s := range p.seen {
		if s == AttrMRA {
			mra++
		}
	}
	if mra == 0 || mra > 8 {
		t.Fatalf("%d MRAs in 30 s", mra)
	}
	p.none(addrA)
	p.nodes[addrB].Reply(p.now, b, replyParam)
	p.settle()
	if p.take(addrA, EventReply).Conn != a {
		t.Fatal("wrong connection")
	}
}

// The peer restarted and uses a queue pair number that we still know: REJ 10, and the old connection ends.
func TestStaleConnection(t *testing.T) {
	p := newPair(t)
	p.listen()
	_, b := p.established()
	q := *b.REQ()
	q.LocalCommID++
	var d MAD
	q.Encode(&d, 5)
	m := p.nodes[addrB]
	m.Receive(p.now, addrA, d[:])
	out := m.Outputs()
	if len(out) != 2 || out[0].MAD.Attr() != AttrREJ || out[1].MAD.Attr() != AttrDREQ {
		t.Fatalf("%d answers", len(out))
	}
	var r REJ
	if r.Decode(&out[0].MAD); r.Reason != ReasonStale {
		t.Fatalf("reason %d", r.Reason)
	}
}

// The same while the request is not answered yet: whoever holds it learns that it is over, so that nobody is asked to answer it.
func TestStaleRequest(t *testing.T) {
	p := newPair(t)
	p.listen()
	p.connect()
	p.settle()
	b := p.take(addrB, EventRequest).Conn
	q := *b.REQ()
	q.LocalCommID++
	var d MAD
	q.Encode(&d, 5)
	m := p.nodes[addrB]
	m.Receive(p.now, addrA, d[:])
	var reasons []uint16
	for _, o := range m.Outputs() {
		var r REJ
		if err := r.Decode(&o.MAD); err != nil {
			t.Error(err)
		}
		reasons = append(reasons, r.Reason)
	}
	if !slices.Equal(reasons, []uint16{ReasonStale, ReasonConsumer}) {
		t.Errorf("refused for the reasons %d", reasons)
	}
	if e := m.Events(); len(e) != 1 || e[0].Kind != EventDisconnected || e[0].Conn != b || b.State() != Gone || m.Len() != 0 {
		t.Errorf("%+v, %s, %d connections", e, b.State(), m.Len())
	}
}

// Another node that gives the GUID and comm id of a connection gets none, and takes nothing from whose they are.
func TestIDsOfAnotherNode(t *testing.T) {
	p := newPair(t)
	p.listen()
	a := p.connect()
	p.settle()
	b := p.take(addrB, EventRequest).Conn
	m, other := p.nodes[addrB], netip.MustParseAddr("192.0.2.9")
	q := *b.REQ()
	q.LocalQPN, q.Primary.LocalGID = q.LocalQPN+1, verbs.GIDFromAddr(other)
	(&Address{Source: netip.AddrPortFrom(other, 1), Destination: addrB}).Encode(q.PrivateData[:])
	var d MAD
	q.Encode(&d, 5)
	m.Receive(p.now, other, d[:])
	out := m.Outputs()
	var r REJ
	if len(out) != 1 || out[0].To != other || r.Decode(&out[0].MAD) != nil || r.Reason != ReasonDuplicateCommID || r.RemoteCommID != q.LocalCommID {
		t.Fatalf("%d answers, %+v", len(out), r)
	}
	// The caller gives up, and is found by its GUID and comm id.
	p.nodes[addrA].Disconnect(p.now, a)
	p.settle()
	if e := p.take(addrB, EventRejected); e.Conn != b {
		t.Fatal("another connection was rejected")
	}
	if m.Len() != 0 {
		t.Fatalf("%d connections remembered", m.Len())
	}
}

func TestDREQForNothing(t *testing.T) {
	p := newPair(t)
	var d MAD
	(&DREQ{LocalCommID: 5, RemoteCommID: 6, RemoteQPN: 7}).Encode(&d, 8)
	m := p.nodes[addrB]
	m.Receive(p.now, addrA, d[:])
	out := m.Outputs()
	var r DREP
	if len(out) != 1 || r.Decode(&out[0].MAD) != nil || r.LocalCommID != 6 || r.RemoteCommID != 5 || out[0].MAD.TID() != 8 {
		t.Fatalf("%d answers, %+v", len(out), r)
	}
	// One with the wrong queue pair for a connection that lives is not believed.
	p.listen()
	_, b := p.established()
	(&DREQ{LocalCommID: b.remoteID, RemoteCommID: b.localID, RemoteQPN: b.localQPN + 1}).Encode(&d, 8)
	m.Receive(p.now, addrA, d[:])
	if b.State() != Established || len(m.Outputs()) != 0 {
		t.Fatal("a DREQ for another queue pair was believed")
	}
	// Nor is one from another node.
	(&DREQ{LocalCommID: b.remoteID, RemoteCommID: b.localID, RemoteQPN: b.localQPN}).Encode(&d, 8)
	m.Receive(p.now, netip.MustParseAddr("192.0.2.9"), d[:])
	if b.State() != Established {
		t.Fatal("a DREQ from another node was believed")
	}
}

// A flood of requests leaves at most the backlog behind, and the listener works afterwards.
func TestFloodIsBounded(t *testing.T) {
	p := newPair(t)
	p.listen()
	m := p.nodes[addrB]
	for i := range uint32(100_000) {
		q := REQ{LocalCommID: i + 1, ServiceID: ServiceID(5555), CAGUID: 42, LocalQPN: i + 2, PKey: 0xffff, PathMTU: verbs.MTU1024,
			Primary: Path{LocalGID: verbs.GIDFromAddr(addrA), RemoteGID: verbs.GIDFromAddr(addrB)}}
		(&Address{Source: netip.AddrPortFrom(addrA, 1), Destination: addrB}).Encode(q.PrivateData[:])
		var d MAD
		q.Encode(&d, 1)
		m.Receive(p.now, addrA, d[:])
	}
	if m.Len() != 8 || m.Stats().Dropped != 100_000-8 {
		t.Fatalf("%d connections, %d dropped", m.Len(), m.Stats().Dropped)
	}
	p.events[addrB] = nil
	m.Events()
	p.drop = func(_, to netip.Addr, d *MAD) bool { return d.Attr() == AttrREJ }
	p.pass(halfOpenLife)
	if m.Len() != 0 || m.halfOpen != 0 {
		t.Fatalf("%d connections, %d half open after their time", m.Len(), m.halfOpen)
	}
	p.events[addrB], p.events[addrA], p.drop = nil, nil, nil
	p.established()
}

// The REQ's bytes are those that the kernel's initiator (6.12, ib_srp over rxe) was seen to send for the same parameters.
func TestREQBytes(t *testing.T) {
	p := newPair(t)
	p.connect()
	out := p.nodes[addrA].Outputs()
	d := &out[0].MAD
	for _, w := range []struct {
		off  int
		want []byte
	}{
		{-24, []byte{1, 7, 2, 3, 0, 0, 0, 0}}, {-8, []byte{0, 0x10, 0, 0, 0, 0, 0, 0}},
		{8, []byte{0, 0, 0, 0, 1, 6, 0x15, 0xb3}}, {32, []byte{0x11, 0x11, 0x11, 4, 0, 0, 0, 3, 0, 0, 0, 0xa0}},
		{44, []byte{0xa1, 0xa1, 0xa1, 0xa7, 0xff, 0xff, 0x37, 0xf0, 0xff, 0xff, 0xff, 0xff}},
		{56, []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1}}, {92, []byte{0, 64, 0, 0x88}}, {96, make([]byte, 44)},
		{140, []byte{0, 0x40, 0x9c, 0x40}}, {156, []byte{192, 0, 2, 1}}, {172, []byte{192, 0, 2, 2}}, {176, []byte("login")},
	} {
		if got := d[24+w.off : 24+w.off+len(w.want)]; !bytes.Equal(got, w.want) {
			t.Errorf("body offset %d: % x, want % x", w.off, got, w.want)
		}
	}
}
