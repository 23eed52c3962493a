package rc

import (
	"time"

	"srp-initiator/rdma/softroce/packet"
)

// Early retransmission. RC detects a loss when something arrives behind the gap. What is lost at the end of a burst, and a NAK that is
// lost, is detected by the ACK timeout alone, which is a hundred milliseconds or more: thousands of round trips. Therefore, on a connection that has lost
// packets lately, the requester also goes back when nothing has moved for a few round trips, as TCP does (RFC 6298). This is not a retry in the sense of
// the retry counter, which the ACK timeout alone counts down: a peer is given up neither sooner nor later than without. On a connection without
// losses it never happens, however slow the peer is to answer.

const (
	// lossyFor is how long a loss is remembered.
	lossyFor = 10 * time.Second
	// earlyMin is the shortest early timeout: above the delay that an acknowledgement may have.
	earlyMin = 2 * time.Millisecond
	// earlyMaxBackoff bounds the doubling of the early timeout without progress.
	earlyMaxBackoff = 6
)

// sawLoss notes that the network lost something.
func (s *requester) sawLoss(now Time) { s.lossyUntil = now.Add(lossyFor) }

// armEarly starts the early timer, if the connection is lossy and the timeout shorter than what remains to the ACK timeout.
func (s *requester) armEarly(now Time) {
	s.earlyAt = Never
	if s.srtt == 0 || now >= s.lossyUntil || s.rnrAt != Never {
		return
	}
	if at := now.Add(max(earlyMin, s.srtt+4*s.rttvar) << s.backoff); at < s.rtxAt {
		s.earlyAt = at
	}
}

// sample takes the round trip that ends when una moves to psn.
func (s *requester) sample(now Time, psn packet.PSN) {
	if !s.sampling || !s.samplePSN.Before(psn) {
		return
	}
	s.sampling = false
	rtt := max(1, time.Duration(now-s.sampleAt))
	if s.srtt == 0 {
		s.srtt, s.rttvar, s.rtt0 = rtt, rtt/2, rtt
		return
	}
	s.rtt0 = min(s.rtt0, rtt)
	d := rtt - s.srtt
	s.srtt += d / 8
	s.rttvar += (max(d, -d) - s.rttvar) / 4
}

// goBackEarly goes back without counting a retry; the ACK timeout runs on.
func (q *QP) goBackEarly(now Time) {
	s := &q.snd
	if s.backoff < earlyMaxBackoff {
		s.backoff++
	}
	if !q.blocked {
		q.stats.EarlyRetransmits++
		q.goBack(now)
	}
	s.armEarly(now)
}
