package rc

import (
	"time"

	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/verbs"
)

// receiveResponse takes an ACK, a NAK or a READ response.
func (q *QP) receiveResponse(now Time, p *packet.Packet) {
	s := &q.snd
	// Only PSNs in [una, max) can be answered; others are ghosts of answers that came earlier.
	if p.PSN.Before(s.una) || !p.PSN.Before(s.max) {
		q.stats.Dropped++
		return
	}
	switch {
	case p.Kind&packet.KindReadResponse != 0:
		q.receiveReadData(now, p)
	case p.Opcode == packet.Acknowledge && len(p.Payload) == 0:
		q.receiveAck(now, p)
	default: // no atomic was ever requested
		q.stats.Dropped++
		return
	}
	q.transmit(now)
}

func (q *QP) receiveAck(now Time, p *packet.Packet) {
	s := &q.snd
	switch a := p.AETH(); {
	case a.Syndrome.IsAck():
		q.stats.RxAcks++
		if !q.ackTo(now, p.PSN.Add(1)) {
			q.impliedNak(now)
		}
	case a.Syndrome.IsRNR():
		q.stats.RxRNR++
		q.ackTo(now, p.PSN)
		if s.rnr == 0 {
			q.die(verbs.EventQPFatal, verbs.WCRNRRetryExceeded, s.una, true)
			return
		}
		if s.rnrMax != 7 { // 7: for ever (IBA vol. 1, 9.7.5.2.8)
			s.rnr--
		}
		s.seek(s.una)
		s.sinceAckReq = 0
		s.rtxAt, s.earlyAt = Never, Never
		s.rnrAt = now.Add(RNRDelay(a.Syndrome.RNRTimer()))
	case a.Syndrome == packet.NakPSNSequence:
		q.stats.RxNakSequence++
		s.sawLoss(now)
		moved := s.una != p.PSN
		q.ackTo(now, p.PSN)
		// A second NAK for the same packet is about its retransmission, unless that cannot have arrived yet.
		if s.rnrAt == Never && (moved || s.wentAt == 0 || time.Duration(now-s.wentAt) >= s.rtt0) {
			q.goBack(now)
		}
	case a.Syndrome == packet.NakInvalidRequest:
		q.nakked(now, p.PSN, verbs.WCRemoteInvalidRequestError)
	case a.Syndrome == packet.NakRemoteAccess:
		q.nakked(now, p.PSN, verbs.WCRemoteAccessError)
	case a.Syndrome == packet.NakRemoteOperational:
		q.nakked(now, p.PSN, verbs.WCRemoteOperationError)
	default: // reserved
		q.stats.Dropped++
	}
}

// nakked ends the connection: the request of psn gets status. What is in front of it and not complete, a READ whose data was
// lost, cannot be had from the peer any more and is flushed.
func (q *QP) nakked(now Time, psn packet.PSN, status verbs.WCStatus) {
	q.stats.RxNakFatal++
	q.ackTo(now, psn)
	if q.state == verbs.QPReadyToSend {
		q.die(verbs.EventQPFatal, status, psn, true)
	}
}

// ackTo acknowledges everything before psn, which is in [una, max], but stops at the first READ that still lacks data: only responses complete a
// READ. It reports whether it got as far as psn.
func (q *QP) ackTo(now Time, psn packet.PSN) bool {
	s := &q.snd
	u, reached := s.una, true
	for i := s.head; i != s.tail; i++ {
		w := s.at(i)
		if !w.started {
			break
		}
		if w.local() {
			continue
		}
		if psn.Sub(w.first) <= 0 {
			break
		}
		if w.op == verbs.OpRDMARead && u.Before(w.end()) {
			if u.Before(w.first) {
				u = w.first
			}
			reached = u == psn
			break
		}
		if end := w.end(); end.Before(psn) {
			u = end
		} else {
			u = psn
			break
		}
	}
	if s.una.Before(u) {
		q.advance(now, u)
	}
	return reached
}

// advance moves una forward to psn: progress, which renews the counters and the timer.
func (q *QP) advance(now Time, psn packet.PSN) {
	s := &q.snd
	s.sample(now, psn)
	s.una = psn
	s.backoff = 0
	s.retries, s.rnr = s.retryMax, s.rnrMax
	if s.nxt.Before(psn) {
		s.seek(psn)
	}
	s.implied, s.excused = false, false
	s.rnrAt = Never
	q.armTimer(now)
	q.retire()
}

// impliedNak: the peer answered beyond a READ whose data has not all come, so it has been lost (IBA vol. 1, 9.7.5.1.3: "implied
// NAK"). The rest of what is on its way would imply the same again: one retry for each una.
func (q *QP) impliedNak(now Time) {
	s := &q.snd
	if q.state != verbs.QPReadyToSend || s.implied {
		return
	}
	q.stats.ImpliedNaks++
	s.sawLoss(now)
	s.implied = true
	if s.rnrAt == Never {
		q.goBack(now)
	}
}

// receiveReadData takes one packet of READ data. Data is taken in order only.
func (q *QP) receiveReadData(now Time, p *packet.Packet) {
	s := &q.snd
	if p.HasAETH() && !p.AETH().Syndrome.IsAck() {
		q.badResponse(p)
		return
	}
	if p.PSN != s.una {
		// A READ response acknowledges the SENDs and WRITEs in front of it.
		if !q.ackTo(now, p.PSN) {
			q.impliedNak(now)
			return
		}
		if q.state != verbs.QPReadyToSend {
			return
		}
	}
	i := s.head
	for i != s.tail && s.at(i).local() {
		i++
	}
	if i == s.tail {
		q.stats.Dropped++
		return
	}
	w := s.at(i)
	if !w.started || w.op != verbs.OpRDMARead {
		q.badResponse(p)
		return
	}
	k := p.PSN.Sub(w.first)
	start := k / w.chunk * w.chunk
	end := min(w.npkt, start+w.chunk)
	// The peer answers a READ request FIRST, MIDDLE.., LAST or ONLY. A request for the rest of a chunk is answered from its own FIRST by hardware
	// (IBA vol. 1, 9.7.5.1.2) and with the MIDDLE and LAST of the chunk by rxe.
	begins := k == start || p.PSN == s.reReq
	inside := k > start
	n := q.mtu
	var ok bool
	switch p.Opcode {
	case packet.ReadResponseFirst:
		ok = begins && k < end-1
	case packet.ReadResponseMid:
		ok = inside && k < end-1
	case packet.ReadResponseLast:
		ok = inside && k == end-1
	default:
		ok = begins && k == end-1
	}
	off := uint32(k) << q.mtuShift
	if k == w.npkt-1 {
		n = int(w.length - off)
	}
	if !ok || len(p.Payload) != n {
		q.badResponse(p)
		return
	}
	if !q.scatter(w.sge, off, p.Payload) {
		q.die(verbs.EventQPFatal, verbs.WCLocalProtectionError, p.PSN, true)
		return
	}
	if e := w.first.Add(end); k == end-1 && !s.nxt.Before(e) {
		s.reads-- // asked for since the last time the cursor went back
	}
	q.advance(now, p.PSN.Add(1))
}

// badResponse: no correct peer sends this; the request it claims to answer cannot be trusted any more.
func (q *QP) badResponse(p *packet.Packet) {
	q.die(verbs.EventQPFatal, verbs.WCBadResponseError, p.PSN, true)
}
