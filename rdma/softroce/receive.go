package softroce

// The receive path: a message of the link is a datagram or a train of them, in the link's buffer until the next batch. Each
// datagram is parsed in place, matched to its queue pair and that one's peer, its ICRC verified, and only then shown to the queue pair,
// which copies what it wants out. What does not fit is counted and forgotten: nothing is allocated, and nothing answered, before
// the ICRC was good.

import (
	"net/netip"

	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/softroce/rc"
	"srp-initiator/rdma/softroce/udp"
	"srp-initiator/rdma/verbs"
)

// The general services interface (IBA vol. 1, 13.5.1 and 3.5.3).
const (
	gsiQPN  = 1
	gsiQKey = 0x80010000
)

func (d *Device) receive(now rc.Time, m *udp.Message) {
	size := m.Segment
	if size == 0 {
		size = len(m.Data)
	}
	for i, b := 0, m.Data; len(b) > 0; i++ {
		n := min(size, len(b))
		d.receivePacket(now, b[:n], m, uint16(i))
		b = b[n:]
	}
}

func (d *Device) receivePacket(now rc.Time, b []byte, m *udp.Message, index uint16) {
	d.stats.PacketsReceived++
	p := &d.pkt
	if err := p.Parse(b); err != nil {
		d.stats.Malformed++
		d.captureIn(b, m.From, 0)
		return
	}
	if p.DestQPN == gsiQPN {
		d.receiveMAD(now, b, m, index)
		return
	}
	q := d.lastQP
	if q == nil || q.qpn != p.DestQPN {
		q = d.qps[p.DestQPN]
	}
	if q == nil || p.Kind&packet.KindUD != 0 {
		d.stats.UnknownQPN++
		d.captureIn(b, m.From, index)
		return
	}
	if q.peer != m.From.Addr() {
		d.stats.WrongPeer++
		d.captureIn(b, m.From, index)
		return
	}
	if q.rxPort != m.From.Port() {
		q.rxPort = m.From.Port()
		q.rxFlow = packet.NewFlow(m.From, netip.AddrPortFrom(d.addr, packet.Port))
	}
	// What a peer of this implementation, or the simulated network, sends has the segment's index as identification, 0 for a datagram by
	// itself; the kernel may have cut a train to pieces that come alone. Of a foreign peer any identification is
	// possible, and the next one likely.
	hint := index
	if !q.soft {
		hint = q.nextID
	}
	if m.KnowsID {
		hint = 0
	}
	id, ok := q.rxFlow.Verify(b, hint)
	if ok && (m.KnowsID && id != 0 || q.soft && id >= udp.MaxSegments) {
		ok = false
	}
	d.captureIn(b, m.From, id)
	if !ok {
		d.stats.ICRCErrors++
		return
	}
	q.nextID = id + 1
	d.lastQP = q
	if !q.touched {
		q.touched = true
		d.touched = append(d.touched, q)
	}
	q.rc.Receive(now, p)
	if q.conn != nil && q.conn.awaitsRTU {
		q.conn.awaitsRTU = false
		d.cm.Traffic(q.conn.mc)
		d.settleCM(now)
	}
}

// receiveMAD takes a packet for QP1.
func (d *Device) receiveMAD(now rc.Time, b []byte, m *udp.Message, index uint16) {
	p := &d.pkt
	if p.Opcode != packet.UDSendOnly || p.DETH().QKey != gsiQKey || (p.PKey^packet.DefaultPKey)&0x7fff != 0 {
		d.stats.BadMAD++
		d.captureIn(b, m.From, index)
		return
	}
	flow := packet.NewFlow(m.From, netip.AddrPortFrom(d.addr, packet.Port))
	id, ok := flow.Verify(b, 0)
	if ok && m.KnowsID && id != 0 {
		ok = false
	}
	d.captureIn(b, m.From, id)
	if !ok {
		d.stats.ICRCErrors++
		return
	}
	if p.DETH().SrcQPN != gsiQPN {
		d.stats.BadMAD++
		return
	}
	d.cm.Receive(d.clock(now), m.From.Addr(), p.Payload)
	d.settleCM(now)
}

// Complete implements rc.Output.
func (q *queuePair) Complete(wc *verbs.WorkCompletion, recv, solicited bool) {
	c := q.sendCQ
	if recv {
		c = q.recvCQ
		q.d.came++
	}
	q.completed = true
	c.push(wc, solicited)
}

// Event implements rc.Output.
func (q *queuePair) Event(t verbs.AsyncEventType) {
	q.d.stats.QueuePairErrors++
	q.d.async(verbs.AsyncEvent{Type: t, QP: q})
}
