package ibcm

import (
	"bytes"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"srp-initiator/rdma/verbs"
)

// FuzzReceive: up to eight datagrams of any content, at nodes in every state of a connection, break no count and no index, speak to nobody but the
// two nodes and are forgotten in time. What decodes is encoded again to the same message.
func FuzzReceive(f *testing.F) {
	var all []byte
	p := newPair(&testing.T{})
	p.listen()
	p.drop = func(_, _ netip.Addr, d *MAD) bool {
		f.Add(bytes.Clone(d[:]))
		all = append(all, d[:]...)
		return false
	}
	// A whole life, one that is rejected with private data, one that the active side gives up before it has an answer, and an MRA.
	a, _ := p.established()
	p.nodes[addrA].Disconnect(p.now, a)
	p.pass(longestTimeWait)
	p.connect()
	p.settle()
	e := p.events[addrB][len(p.events[addrB])-1]
	if err := p.nodes[addrB].Reject(e.Conn, ReasonConsumer, bytes.Repeat([]byte{0xc2}, PrivateREJ)); err != nil {
		f.Fatal(err)
	}
	p.settle()
	p.nodes[addrA].Disconnect(p.now, p.connect())
	p.settle()
	p.connect()
	p.settle()
	p.pass(firstWait) // the REQ comes again, and the answer to that is an MRA
	// What the machine never says: each for the two connections that the target below makes.
	p = newPair(&testing.T{})
	p.listen()
	a, b := p.established()
	c := p.connect()
	for _, c := range []*Conn{a, b, c} {
		for _, m := range []interface{ Encode(*MAD, uint64) }{
			&MRA{LocalCommID: c.remoteID, RemoteCommID: c.localID, Message: MessageREP, ServiceTimeout: 31},
			&MRA{LocalCommID: 7, RemoteCommID: c.localID, Message: MessageREQ, ServiceTimeout: 31},
			&REJ{LocalCommID: c.remoteID, RemoteCommID: c.localID, Message: MessageOther, Reason: ReasonInvalidGID, ARI: make([]byte, 16)},
			&REJ{LocalCommID: c.localID, Message: MessageREQ, Reason: ReasonTimeout, ARI: be.AppendUint64(nil, p.nodes[addrA].cfg.CAGUID)},
			&DREQ{LocalCommID: c.remoteID, RemoteCommID: c.localID, RemoteQPN: c.localQPN},
			&DREP{LocalCommID: c.remoteID, RemoteCommID: c.localID},
			&RTU{LocalCommID: c.remoteID, RemoteCommID: c.localID},
			&REP{LocalCommID: 7, RemoteCommID: c.localID, LocalQPN: 9},
		} {
			var d MAD
			m.Encode(&d, c.tid)
			f.Add(bytes.Clone(d[:]))
			all = append(all, d[:]...)
		}
	}
	// A REQ of another node with the ids of one that waits.
	q, other := c.req, netip.MustParseAddr("192.0.2.9")
	var d1, d2 MAD
	q.LocalQPN++
	q.Encode(&d1, 5)
	q.LocalQPN++
	q.Primary.LocalGID = verbs.GIDFromAddr(other)
	(&Address{Source: netip.AddrPortFrom(other, 1), Destination: addrB}).Encode(q.PrivateData[:])
	q.Encode(&d2, 5)
	f.Add(append(bytes.Clone(d1[:]), d2[:]...))
	for len(all) > 0 {
		n := min(len(all), 8*MADSize)
		f.Add(bytes.Clone(all[:n]))
		all = all[n:]
	}
	f.Add([]byte{1, classCM, classVersion, methodSend})

	f.Fuzz(func(t *testing.T, b []byte) {
		p := newPair(t)
		p.listen()
		p.established()
		p.connect()
		for range 8 {
			n := min(len(b), MADSize)
			codec(t, b[:n:n])
			for _, m := range p.nodes {
				for _, from := range []netip.Addr{addrA, addrB, netip.MustParseAddr("192.0.2.9")} {
					s := m.stats
					m.Receive(p.now, from, b[:n:n])
					consistent(t, m)
					if got := m.stats.Received + m.stats.Malformed - s.Received - s.Malformed; got == 0 {
						t.Fatal("a datagram that was not counted")
					}
				}
			}
			if b = b[n:]; len(b) == 0 {
				break
			}
		}
		p.drop = func(_, _ netip.Addr, _ *MAD) bool { return true }
		for _, m := range p.nodes {
			for _, d := range m.Outputs() {
				var back MAD
				if err := back.Parse(d.MAD[:]); err != nil || d.To != addrA && d.To != addrB && d.To != netip.MustParseAddr("192.0.2.9") {
					t.Fatalf("to %v: %v", d.To, err)
				}
			}
		}
		p.pass(longestPatience + 15*longestWait + halfOpenLife)
		for _, m := range p.nodes {
			consistent(t, m)
			for _, c := range m.Conns() {
				// Only what both sides had agreed to, or what waits for its consumer, stays without a deadline.
				if c.state != Established && c.state != REPReceived {
					t.Fatalf("%v long after the last datagram", c.state)
				}
			}
		}
	})
}

// consistent holds the machine's indices and counts to its connections.
func consistent(t *testing.T, m *Machine) {
	t.Helper()
	half, pending := 0, map[uint16]int{}
	for id, c := range m.conns {
		if c.localID != id || id == 0 || c.state == Gone || c.pending && !c.half || c.active && c.half {
			t.Fatalf("connection %#x: %+v", id, c)
		}
		if waits := c.state != Established && c.state != REPReceived; waits == c.deadline.IsZero() {
			t.Fatalf("%v with the deadline %v", c.state, c.deadline)
		}
		if !c.deadline.IsZero() && (m.next.IsZero() || c.deadline.Before(m.next)) {
			t.Fatalf("%v is due at %v, the machine wakes at %v", c.state, c.deadline, m.next)
		}
		if limit := 3 * time.Minute; c.wait > limit {
			t.Fatalf("%v waits %v", c.state, c.wait)
		}
		if c.half {
			half++
		}
		if c.pending {
			pending[c.port]++
		}
		if k := (idKey{c.guid, c.remoteQPN}); c.remoteID != 0 && m.qpns[k] != c {
			t.Fatalf("%v is not found by its peer's queue pair number", c.state)
		}
		if k := (idKey{c.guid, c.remoteID}); !c.active && m.peers[k] != c {
			t.Fatalf("%v is not found by its peer's comm id", c.state)
		}
	}
	if m.halfOpen != half {
		t.Fatalf("%d half open, counted as %d", half, m.halfOpen)
	}
	for port, l := range m.listeners {
		if l.pending != pending[port] || l.pending > l.backlog {
			t.Fatalf("port %d: %d pending, counted as %d of %d", port, pending[port], l.pending, l.backlog)
		}
	}
	for k, c := range m.peers {
		if m.conns[c.localID] != c || k != (idKey{c.guid, c.remoteID}) {
			t.Fatalf("index of comm ids: %+v finds a connection that is %v", k, c.state)
		}
	}
	for k, c := range m.qpns {
		if m.conns[c.localID] != c || k != (idKey{c.guid, c.remoteQPN}) {
			t.Fatalf("index of queue pair numbers: %+v finds a connection that is %v", k, c.state)
		}
	}
}

// codec decodes b as every message; what one accepts, it writes again, and reads the same.
func codec(t *testing.T, b []byte) {
	t.Helper()
	var d MAD
	if err := d.Parse(b); err != nil {
		if len(b) == MADSize && b[0] == 1 && b[1] == classCM && b[2] == classVersion && b[3] == methodSend {
			t.Fatal(err)
		}
		return
	}
	accepted := 0
	for _, m := range []interface {
		Decode(*MAD) error
		Encode(*MAD, uint64)
	}{&REQ{}, &REP{}, &RTU{}, &MRA{}, &REJ{}, &DREQ{}, &DREP{}} {
		if m.Decode(&d) != nil {
			continue
		}
		accepted++
		var again MAD
		m.Encode(&again, d.TID())
		back := reflect.New(reflect.TypeOf(m).Elem()).Interface().(interface{ Decode(*MAD) error })
		if err := back.Decode(&again); err != nil || !reflect.DeepEqual(back, m) || again.TID() != d.TID() || again.Attr() != d.Attr() {
			t.Fatalf("%v: %+v became %+v, %v", d.Attr(), m, back, err)
		}
		if q, ok := m.(*REQ); ok {
			if port, ok := ServicePort(q.ServiceID); ok && ServiceID(port) != q.ServiceID {
				t.Fatalf("service id %#x became port %d", q.ServiceID, port)
			}
			var a, back Address
			if a.Decode(q.PrivateData[:]) == nil && !a.Source.Addr().Is4In6() && !a.Destination.Is4In6() {
				var h [AddressSize]byte
				a.Encode(h[:])
				if err := back.Decode(h[:]); err != nil || back != a {
					t.Fatalf("address header %+v became %+v, %v", a, back, err)
				}
			}
		}
	}
	if accepted > 1 {
		t.Fatalf("%v is %d messages", d.Attr(), accepted)
	}
}
