package softroce

// The transmit path: queue pairs give packets as header and pieces of registered memory; they are laid out one behind the other in
// the arena, ICRC and all (one copy, in the same pass as the ICRC: the bytes counted are the bytes sent, so a buffer
// that changes under way cannot spoil it), and grouped into trains: consecutive packets to one node that are
// equal in size but for a shorter last one. send gives all trains to the link and the arena is empty again. When the link has no room, the arena keeps its
// trains and takes no packets; the queue pairs wait for Pump.

import (
	"net/netip"

	"srp-initiator/rdma/softroce/ibcm"
	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/softroce/udp"
)

const (
	arenaSize  = 1 << 20
	maxTrains  = 256
	arenaAlign = 64
)

type transmitter struct {
	buf     []byte
	used    int
	trains  []udp.Train
	open    bool // the last train takes another packet
	count   int  // packets in it
	full    bool // the link had no room
	packets int  // in all trains
}

func (t *transmitter) init() {
	t.buf = make([]byte, arenaSize)
	t.trains = make([]udp.Train, 0, maxTrains)
}

// crowded reports that what was built should leave soon.
func (t *transmitter) crowded() bool { return t.used > arenaSize/2 || len(t.trains) > maxTrains/2 }

func (t *transmitter) stalled() bool { return t.full }

// room finds place for a packet of n bytes and tells the index in its train, which the IP identification will be.
func (t *transmitter) room(to *udp.Destination, n int, group bool) (b []byte, id uint16) {
	if t.full {
		return nil, 0
	}
	if t.open && group {
		tr := &t.trains[len(t.trains)-1]
		if tr.To == to && n <= tr.Segment && t.count < udp.MaxSegments && len(tr.Data)+n <= udp.MaxTrain && t.used+n <= len(t.buf) {
			b = t.buf[t.used : t.used+n]
			t.used += n
			tr.Data = tr.Data[:len(tr.Data)+n]
			id = uint16(t.count)
			t.count++
			t.open = n == tr.Segment
			return b, id
		}
	}
	start := (t.used + arenaAlign - 1) &^ (arenaAlign - 1)
	if start+n > len(t.buf) || len(t.trains) == cap(t.trains) {
		return nil, 0
	}
	t.used = start + n
	t.trains = append(t.trains, udp.Train{Data: t.buf[start:t.used:len(t.buf)], Segment: n, To: to})
	t.open, t.count = group, 1
	return t.buf[start:t.used], 0
}

// send gives everything to the link. false: the link has no room, the rest stays.
func (t *transmitter) send(d *Device) bool {
	if len(t.trains) == 0 {
		return true
	}
	n, err := len(t.trains), error(nil)
	silent := d.isSilent()
	if !silent {
		n, err = d.link.Send(t.trains)
	}
	if d.capture != nil && !silent {
		for i := range t.trains[:n] {
			d.captureTrain(&t.trains[i])
		}
	}
	if err != nil && n < len(t.trains) {
		d.stats.SendStalls++
		rest := copy(t.trains, t.trains[n:])
		clear(t.trains[rest:])
		t.trains = t.trains[:rest]
		t.full, t.open = true, false
		return false
	}
	clear(t.trains)
	t.trains = t.trains[:0]
	t.used, t.packets, t.open, t.full = 0, 0, false, false
	return true
}

// Packet implements rc.Output: one packet of a queue pair.
func (q *queuePair) Packet(hdr []byte, payload [][]byte, pad uint8, ahead uint64) bool {
	d := q.d
	n := len(hdr) + int(pad) + packet.ICRCLen
	for _, p := range payload {
		n += len(p)
	}
	b, id := d.tx.room(q.to, n, q.group)
	if b == nil {
		if !q.blocked {
			q.blocked = true
			d.blocked = append(d.blocked, q)
		}
		return false
	}
	crc := q.txFlow.Begin(n, id).Header(hdr)
	k := copy(b, hdr)
	for _, p := range payload {
		crc = crc.Copy(b[k:], p, ahead)
		k += len(p)
	}
	crc.Finish(b[k:], pad)
	d.stats.PacketsSent++
	d.tx.packets++
	return true
}

// sendMAD sends one management datagram from QP1 to QP1. Without room it is lost, and the connection manager sends it again.
func (d *Device) sendMAD(to netip.Addr, m *ibcm.MAD) {
	const n = packet.BTHLen + packet.DETHLen + ibcm.MADSize + packet.ICRCLen
	b, id := d.tx.room(d.destination(to), n, false)
	if b == nil {
		d.stats.MADsLost++
		return
	}
	// PSNs of QP1 mean nothing to anybody; they count as those of rxe do.
	h := packet.BTH{Opcode: packet.UDSendOnly, PKey: packet.DefaultPKey, DestQPN: gsiQPN, PSN: d.gsiPSN}
	h.Put(b)
	(&packet.DETH{QKey: gsiQKey, SrcQPN: gsiQPN}).Put(b[packet.BTHLen:])
	copy(b[packet.BTHLen+packet.DETHLen:], m[:])
	d.gsiPSN = d.gsiPSN.Add(1)
	packet.NewFlow(netip.AddrPortFrom(d.addr, packet.Port), netip.AddrPortFrom(to, packet.Port)).Seal(b, id)
	d.stats.PacketsSent++
}

// destination is the socket address of a node, made once.
func (d *Device) destination(to netip.Addr) *udp.Destination {
	if t := d.peers[to]; t != nil {
		return t
	}
	if len(d.peers) >= maxPeers {
		clear(d.peers) // queue pairs keep theirs
	}
	t := udp.NewDestination(netip.AddrPortFrom(to, packet.Port), d.scope)
	d.peers[to] = t
	return t
}
