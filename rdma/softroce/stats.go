package softroce

import (
	"srp-initiator/rdma/softroce/ibcm"
	"srp-initiator/rdma/softroce/rc"
	"srp-initiator/rdma/softroce/udp"
)

// Stats counts what a device did since Open.
type Stats struct {
	PacketsSent, PacketsReceived uint64 // RoCE packets, not datagram trains
	// Dropped without an answer:
	ICRCErrors uint64
	Malformed  uint64 // no RoCE v2 packet
	UnknownQPN uint64
	WrongPeer  uint64 // not from the address that the queue pair is connected to
	BadMAD     uint64 // for QP1, but not what QP1 takes

	MADsLost        uint64 // found no room to be sent
	SendStalls      uint64 // times that the link had no room
	CQOverruns      uint64 // completions that did not fit their queue
	QueuePairErrors uint64 // queue pairs that failed by themselves
	AsyncEventsLost uint64

	Transport rc.Stats   // of all queue pairs, those destroyed included
	CM        ibcm.Stats // of the connection manager
	Socket    udp.Stats  // of the UDP socket; zero on another link

	retired rc.Stats // of destroyed queue pairs
}

// addTransport adds one queue pair's counters.
func addTransport(s *rc.Stats, o rc.Stats) {
	s.TxPackets += o.TxPackets
	s.RxPackets += o.RxPackets
	s.TxAcks += o.TxAcks
	s.RxAcks += o.RxAcks
	s.Retransmits += o.Retransmits
	s.Timeouts += o.Timeouts
	s.EarlyRetransmits += o.EarlyRetransmits
	s.TxNakSequence += o.TxNakSequence
	s.RxNakSequence += o.RxNakSequence
	s.ImpliedNaks += o.ImpliedNaks
	s.TxRNR += o.TxRNR
	s.RxRNR += o.RxRNR
	s.TxNakFatal += o.TxNakFatal
	s.RxNakFatal += o.RxNakFatal
	s.Duplicates += o.Duplicates
	s.OutOfOrder += o.OutOfOrder
	s.ReadReplays += o.ReadReplays
	s.Dropped += o.Dropped
	s.Messages += o.Messages
	s.ReadsServed += o.ReadsServed
}

// Stats reports the device's counters.
func (d *Device) Stats() Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.stats
	s.Transport = d.stats.retired
	for _, q := range d.order {
		addTransport(&s.Transport, q.rc.Stats())
	}
	s.CM = d.cm.Stats()
	if u, ok := d.link.(*udp.Socket); ok {
		s.Socket = u.Stats()
	}
	return s
}

// QPStats reports the transport counters of one queue pair; false when the device does not know it any more.
func (d *Device) QPStats(qpn uint32) (rc.Stats, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if q := d.qps[qpn]; q != nil {
		return q.rc.Stats(), true
	}
	return rc.Stats{}, false
}
