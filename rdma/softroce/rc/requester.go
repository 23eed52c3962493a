package rc

import (
	"fmt"
	"time"

	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/verbs"
)

// sendWQE is one posted send work request. PSNs are given out when its first packet is sent.
type sendWQE struct {
	first   packet.PSN
	npkt    int // PSNs; 0 for local operations
	chunk   int // READ, WRITE: packets per request of the wire
	op      verbs.SendOpcode
	flags   verbs.SendFlags
	started bool
	status  verbs.WCStatus // not success: it cannot go on, and completes with this when it is the oldest
	length  uint32         // bytes
	remote  uint64
	rkey    uint32
	imm     uint32
	wrID    uint64
	sge     []verbs.SGE // room for MaxSendSGE
	inline  []byte      // room for MaxInlineData
	bind    verbs.BindMW
}

func (w *sendWQE) local() bool { return w.op == verbs.OpLocalInv || w.op == verbs.OpBindMW }

func (w *sendWQE) end() packet.PSN { return w.first.Add(w.npkt) }

// requester is the sending half:
//
//	una            oldest PSN that the peer has not acknowledged
//	nxt            PSN of the next packet to send: packet curPkt of request cur. Behind max while going back.
//	max            end of what was ever sent
//	next           PSN that the next request to start will get
//
// una <= nxt <= max <= next in circular order; requests head..tail are in the ring, head..cur have been started.
type requester struct {
	sq              []sendWQE
	mask            uint32
	size            uint32 // MaxSendWR; the ring may be larger
	head, cur, tail uint32
	curPkt          int

	una, nxt, max, next packet.PSN

	window, chunk, ackReqEvery int
	divide                     int // WRITEs of up to so many packets are divided
	sinceAckReq                int
	askRarely                  bool
	reads, maxReads            int // READ requests that wait for responses
	readWQEs                   int // started READ work requests in the ring; a fence waits for 0
	rtxAt, rnrAt, earlyAt      Time
	excused                    bool // a timer was late since una moved or the cursor went back, see late
	timeout                    time.Duration
	retries, retryMax          uint8
	rnr, rnrMax                uint8
	implied                    bool       // an implied NAK was acted on, and will not be again before una moves
	reReq                      packet.PSN // where the latest READ request for the rest of a chunk started

	// Early retransmission, see early.go.
	lossyUntil         Time
	srtt, rttvar, rtt0 time.Duration // smoothed round trip, its deviation, the shortest; 0: not measured
	sampling           bool
	samplePSN          packet.PSN
	sampleAt, wentAt   Time
	backoff            uint8
}

func ringSize(n int) int {
	s := 1
	for s < n {
		s <<= 1
	}
	return s
}

func (s *requester) init(c *verbs.QPCap) {
	n := ringSize(c.MaxSendWR)
	s.sq = make([]sendWQE, n)
	s.mask, s.size = uint32(n-1), uint32(c.MaxSendWR)
	sges := make([]verbs.SGE, n*c.MaxSendSGE)
	inl := make([]byte, n*c.MaxInlineData)
	for i := range s.sq {
		s.sq[i].sge = sges[i*c.MaxSendSGE : i*c.MaxSendSGE : (i+1)*c.MaxSendSGE]
		s.sq[i].inline = inl[i*c.MaxInlineData : i*c.MaxInlineData : (i+1)*c.MaxInlineData]
	}
	s.stopTimers()
}

func (s *requester) at(i uint32) *sendWQE { return &s.sq[i&s.mask] }

func (s *requester) stopTimers() { s.rtxAt, s.rnrAt, s.earlyAt = Never, Never, Never }

func (s *requester) reset() {
	s.stopTimers()
	s.head, s.cur, s.tail, s.curPkt = 0, 0, 0, 0
	s.sinceAckReq, s.reads, s.readWQEs, s.implied, s.excused = 0, 0, 0, false, false
	s.lossyUntil, s.srtt, s.rttvar, s.rtt0, s.sampling, s.wentAt, s.backoff = 0, 0, 0, 0, false, 0, 0
}

// PostSend queues wrs and sends what the window allows. It returns how many were taken: all, or those in front of the
// one that err is about. In the error state requests are taken and complete at once.
func (q *QP) PostSend(now Time, wrs []verbs.SendWorkRequest) (int, error) {
	if q.state != verbs.QPReadyToSend && q.state != verbs.QPError {
		return 0, fmt.Errorf("rc: QP 0x%06x: send posted in %s", q.cfg.QPN, q.state)
	}
	for i := range wrs {
		if err := q.queueSend(&wrs[i]); err != nil {
			if i > 0 {
				q.transmit(now)
			}
			return i, err
		}
	}
	q.transmit(now)
	return len(wrs), nil
}

func (q *QP) queueSend(wr *verbs.SendWorkRequest) error {
	s := &q.snd
	if q.state == verbs.QPError {
		q.completeSend(wr.WRID, wr.Opcode, 0, verbs.WCFlushError)
		return nil
	}
	if s.tail-s.head >= s.size {
		return verbs.ErrQueueFull
	}
	w := s.at(s.tail)
	if len(wr.SGList) > cap(w.sge) {
		return fmt.Errorf("rc: QP 0x%06x: %d scatter/gather entries, at most %d", q.cfg.QPN, len(wr.SGList), cap(w.sge))
	}
	var total uint64
	for i := range wr.SGList {
		total += uint64(wr.SGList[i].Length)
	}
	if total > MaxMessage {
		return fmt.Errorf("rc: QP 0x%06x: message of %d bytes, at most %d", q.cfg.QPN, total, MaxMessage)
	}
	flags := wr.Flags
	switch wr.Opcode {
	case verbs.OpSend, verbs.OpSendWithImm, verbs.OpSendWithInv, verbs.OpRDMAWrite, verbs.OpRDMAWriteImm:
	case verbs.OpRDMARead:
		if s.maxReads == 0 {
			return fmt.Errorf("rc: QP 0x%06x: RDMA READ posted with max_rd_atomic 0", q.cfg.QPN)
		}
		if flags&verbs.SendInline != 0 {
			return fmt.Errorf("rc: QP 0x%06x: RDMA READ cannot be inline", q.cfg.QPN)
		}
	case verbs.OpLocalInv:
		flags &^= verbs.SendInline
	case verbs.OpBindMW:
		if wr.Bind == nil || wr.Bind.Window == nil || wr.Bind.Region == nil {
			return fmt.Errorf("rc: QP 0x%06x: bind without window or region", q.cfg.QPN)
		}
		flags &^= verbs.SendInline
	default:
		return fmt.Errorf("rc: QP 0x%06x: send opcode %d: %w", q.cfg.QPN, wr.Opcode, verbs.ErrNotSupported)
	}
	w.sge, w.inline = w.sge[:0], w.inline[:0]
	if flags&verbs.SendInline != 0 {
		if total > uint64(cap(w.inline)) {
			return fmt.Errorf("rc: QP 0x%06x: %d bytes inline, at most %d", q.cfg.QPN, total, cap(w.inline))
		}
		for i := range wr.SGList {
			g := &wr.SGList[i]
			if g.Length == 0 {
				continue
			}
			b, ok := q.mem.Inline(g.Addr, g.Length)
			if !ok {
				return fmt.Errorf("rc: QP 0x%06x: no memory at 0x%x for an inline send", q.cfg.QPN, g.Addr)
			}
			w.inline = append(w.inline, b[:g.Length]...)
		}
	} else {
		w.sge = append(w.sge, wr.SGList...)
	}
	w.op, w.flags, w.wrID = wr.Opcode, flags, wr.WRID
	w.remote, w.rkey, w.imm = wr.RemoteAddr, wr.RKey, wr.ImmData
	w.length = uint32(total)
	w.started, w.status, w.npkt, w.chunk = false, verbs.WCSuccess, 0, 0
	if wr.Opcode == verbs.OpBindMW {
		w.bind = *wr.Bind
	}
	if !w.local() {
		w.npkt = q.packets(w.length)
	}
	s.tail++
	return nil
}

// packets is the number of PSNs that a message of n bytes takes: an empty one takes one.
func (q *QP) packets(n uint32) int {
	return int(max(1, (uint64(n)+uint64(q.mtu)-1)>>q.mtuShift))
}

// transmit sends what window, READ limit, fence, RNR wait and Output allow.
func (q *QP) transmit(now Time) {
	s := &q.snd
	if s.head == s.tail || q.state != verbs.QPReadyToSend {
		return
	}
	sent, retire := false, false
	for s.rnrAt == Never && s.cur != s.tail {
		w := s.at(s.cur)
		if w.status != verbs.WCSuccess {
			retire = true
			break
		}
		if !w.started {
			if w.flags&verbs.SendFence != 0 && s.readWQEs > 0 {
				break
			}
			if w.local() {
				w.started = true
				w.status = q.executeLocal(w)
				retire = true
				if w.status != verbs.WCSuccess {
					break
				}
				s.cur++
				continue
			}
		} else if w.local() {
			s.cur++
			continue
		}
		flight := s.nxt.Sub(s.una)
		n := 1
		if w.op == verbs.OpRDMARead {
			if !w.started {
				w.chunk = s.chunk
			}
			n = min(w.npkt, (s.curPkt/w.chunk+1)*w.chunk) - s.curPkt
			if s.reads >= s.maxReads || flight > 0 && flight+n > s.window {
				break
			}
		} else if flight >= s.window {
			break
		}
		if !w.started {
			w.first = s.next
			w.started = true
			s.next = w.end()
			switch w.op {
			case verbs.OpRDMARead:
				s.readWQEs++
			case verbs.OpRDMAWrite:
				w.chunk = w.npkt
				if w.npkt <= s.divide {
					w.chunk = 1
				}
			}
		}
		var ok bool
		if w.op == verbs.OpRDMARead {
			ok = q.sendReadRequest(w, n)
		} else {
			ok = q.sendRequest(w)
		}
		if !ok {
			retire = w.status != verbs.WCSuccess
			break
		}
		sent = true
		if s.nxt.Before(s.max) {
			q.stats.Retransmits++
		}
		if !s.sampling && s.nxt == s.max && s.sinceAckReq == 0 { // it asked for an answer
			s.sampling, s.samplePSN, s.sampleAt = true, s.nxt, now
		}
		s.nxt = s.nxt.Add(n)
		if s.max.Before(s.nxt) {
			s.max = s.nxt
		}
		if s.curPkt += n; s.curPkt == w.npkt {
			s.cur++
			s.curPkt = 0
		}
	}
	if sent {
		if s.rtxAt == Never {
			q.armTimer(now)
		}
		q.sentRequests = true // an acknowledgement can travel in company now
	}
	if retire {
		q.retire()
	}
}

func (q *QP) armTimer(now Time) {
	s := &q.snd
	if s.timeout == 0 || s.una == s.max {
		s.rtxAt, s.earlyAt = Never, Never
		return
	}
	s.rtxAt = now.Add(s.timeout)
	s.armEarly(now)
}

func (q *QP) executeLocal(w *sendWQE) verbs.WCStatus {
	if w.op == verbs.OpBindMW {
		if !q.mem.Bind(&w.bind) {
			return verbs.WCMWBindError
		}
	} else if !q.mem.Invalidate(w.imm, false) {
		return verbs.WCLocalQPOperationError
	}
	return verbs.WCSuccess
}

// ackReq decides whether the packet of w about to go asks for an acknowledgement: the last of w, divided or not, and one in ackReqEvery, so that
// a full window always holds one. With askRarely, the last of a request whose completion nobody waits for does not, unless it is sent
// again or the send queue fills up.
func (q *QP) ackReq(w *sendWQE, last bool) bool {
	s := &q.snd
	s.sinceAckReq++
	if s.sinceAckReq >= s.ackReqEvery {
		return true
	}
	return last && (!s.askRarely || w.flags&verbs.SendSignaled != 0 || q.cfg.SignalAll || s.nxt.Before(s.max) || s.tail-s.head > s.size/2)
}

// sendRequest sends packet curPkt of a SEND or WRITE.
func (q *QP) sendRequest(w *sendWQE) bool {
	s := &q.snd
	i := s.curPkt
	first, last := i == 0, i == w.npkt-1
	off := uint32(i) << q.mtuShift
	n := uint32(q.mtu)
	if last {
		n = w.length - off
	}
	if !q.gather(w, off, n) {
		w.status = verbs.WCLocalProtectionError
		return false
	}
	q.ahead = s.ahead(w, off+n)
	h := packet.BTH{Pad: packet.Pad(int(n)), PKey: q.pkey, DestQPN: q.destQPN, PSN: s.nxt}
	if last {
		h.Solicited = w.flags&verbs.SendSolicited != 0
	}
	asked := s.sinceAckReq
	h.AckReq = q.ackReq(w, last)
	hl := packet.BTHLen
	imm := false
	switch w.op {
	case verbs.OpSend:
		h.Opcode = pick(first, last, packet.SendFirst, packet.SendMiddle, packet.SendLast, packet.SendOnly)
	case verbs.OpSendWithImm:
		h.Opcode = pick(first, last, packet.SendFirst, packet.SendMiddle, packet.SendLastImm, packet.SendOnlyImm)
		imm = last
	case verbs.OpSendWithInv:
		h.Opcode = pick(first, last, packet.SendFirst, packet.SendMiddle, packet.SendLastInv, packet.SendOnlyInv)
		imm = last
	case verbs.OpRDMAWrite:
		first = i%w.chunk == 0
		h.Opcode = pick(first, last || (i+1)%w.chunk == 0, packet.WriteFirst, packet.WriteMiddle, packet.WriteLast, packet.WriteOnly)
		if first {
			(&packet.RETH{Addr: w.remote + uint64(off), RKey: w.rkey, Length: min(w.length-off, uint32(w.chunk)<<q.mtuShift)}).Put(q.hdr[hl:])
			hl += packet.RETHLen
		}
	default: // OpRDMAWriteImm
		h.Opcode = pick(first, last, packet.WriteFirst, packet.WriteMiddle, packet.WriteLastImm, packet.WriteOnlyImm)
		imm = last
		h.Solicited = last && h.Solicited
		if first {
			(&packet.RETH{Addr: w.remote, RKey: w.rkey, Length: w.length}).Put(q.hdr[hl:])
			hl += packet.RETHLen
		}
	}
	if imm {
		packet.PutImm(q.hdr[hl:], w.imm)
		hl += packet.ImmLen
	}
	h.Put(q.hdr[:])
	if !q.send(hl, h.Pad) {
		s.sinceAckReq = asked
		return false
	}
	if h.AckReq {
		s.sinceAckReq = 0
	}
	return true
}

// ahead is where the memory lies that follows off bytes of w, the current request: the rest of it, or the next request.
func (s *requester) ahead(w *sendWQE, off uint32) uint64 {
	if off == w.length {
		if s.cur+1 == s.tail {
			return 0
		}
		if w, off = s.at(s.cur+1), 0; w.op == verbs.OpRDMARead {
			return 0
		}
	}
	for i := range w.sge {
		if g := &w.sge[i]; off < g.Length {
			return g.Addr + uint64(off)
		} else {
			off -= g.Length
		}
	}
	return 0
}

func pick(first, last bool, f, m, l, o packet.Opcode) packet.Opcode {
	switch {
	case first && last:
		return o
	case first:
		return f
	case last:
		return l
	}
	return m
}

// sendReadRequest asks for packets curPkt to curPkt+n of a READ: a whole chunk, or what is missing of one.
func (q *QP) sendReadRequest(w *sendWQE, n int) bool {
	s := &q.snd
	off := uint32(s.curPkt) << q.mtuShift
	length := min(w.length-off, uint32(n)<<q.mtuShift)
	h := packet.BTH{Opcode: packet.ReadRequest, AckReq: true, PKey: q.pkey, DestQPN: q.destQPN, PSN: s.nxt}
	h.Put(q.hdr[:])
	r := packet.RETH{Addr: w.remote + uint64(off), RKey: w.rkey, Length: length}
	r.Put(q.hdr[packet.BTHLen:])
	q.pieces, q.ahead = q.pieces[:0], 0
	if !q.send(packet.BTHLen+packet.RETHLen, 0) {
		return false
	}
	s.sinceAckReq = 0
	s.reads++
	if s.curPkt%w.chunk != 0 {
		s.reReq = s.nxt
	}
	return true
}

// seek puts the cursor on psn, which is not before una.
func (s *requester) seek(psn packet.PSN) {
	i := s.head
	s.curPkt = 0
	for ; i != s.tail; i++ {
		w := s.at(i)
		if !w.started || w.status != verbs.WCSuccess {
			break
		}
		if !w.local() && psn.Before(w.end()) {
			s.curPkt = psn.Sub(w.first)
			break
		}
	}
	s.cur, s.nxt = i, psn
	s.reads = 0
	s.sampling = false // which transmission an answer answers cannot be told (Karn)
}

// goBack makes una the next packet to send (go-back-N).
func (q *QP) goBack(now Time) {
	s := &q.snd
	s.seek(s.una)
	s.sinceAckReq = 0
	s.wentAt = now
	s.excused = false
}

// lateness is how late a timer must be noticed to say that this end stood still: more than timers are off on a machine that runs.
const lateness = 2 * time.Millisecond

// late sees to a timer that is noticed long after it expired, once: this end, and often the whole machine and the peer with it, stood still (a virtual CPU that
// its host forgot, a stopped process), so that the timer says nothing about the peer. He gets as much time as this end was late, and at most another timeout.
func (s *requester) late(now Time) bool {
	by := time.Duration(now - min(s.rtxAt, s.earlyAt))
	if s.excused || by < lateness {
		return false
	}
	s.excused = true
	if s.rtxAt <= now {
		s.rtxAt = now.Add(min(by, s.timeout))
	}
	s.armEarly(now)
	return true
}

// retry goes back because of the ACK timeout, or gives up when the retry counter is used up. Going back because of a NAK does not
// count, other than in IBA vol. 1, 9.7.5.2.8: the peer is alive, and the timer, which progress alone restarts, still bounds how long it may say so.
func (q *QP) retry(now Time) {
	s := &q.snd
	if s.retries == 0 {
		q.die(verbs.EventQPFatal, verbs.WCRetryExceeded, 0, false)
		return
	}
	s.retries--
	q.goBack(now)
	q.armTimer(now)
}

// retire completes what is done at the head of the ring.
func (q *QP) retire() {
	s := &q.snd
	for s.head != s.tail {
		w := s.at(s.head)
		if w.status != verbs.WCSuccess {
			q.die(verbs.EventQPFatal, w.status, 0, false)
			return
		}
		if !w.started || !w.local() && s.una.Before(w.end()) {
			return
		}
		if w.op == verbs.OpRDMARead {
			s.readWQEs--
		}
		s.head++
		if w.flags&verbs.SendSignaled != 0 || q.cfg.SignalAll {
			q.completeSend(w.wrID, w.op, w.length, verbs.WCSuccess)
		}
	}
}

func (q *QP) completeSend(id uint64, op verbs.SendOpcode, n uint32, st verbs.WCStatus) {
	wc := &q.wc
	*wc = verbs.WorkCompletion{WRID: id, Status: st, QPN: q.cfg.QPN}
	if st == verbs.WCSuccess {
		switch op {
		case verbs.OpRDMAWrite, verbs.OpRDMAWriteImm:
			wc.Opcode = verbs.WCRDMAWrite
		case verbs.OpRDMARead:
			wc.Opcode = verbs.WCRDMARead
			wc.ByteLen = n
		case verbs.OpLocalInv:
			wc.Opcode = verbs.WCLocalInv
		case verbs.OpBindMW:
			wc.Opcode = verbs.WCBindMW
		}
	}
	q.out.Complete(wc, false, st != verbs.WCSuccess)
}

// flushSends empties the send ring: the request of psn, or the oldest, with status, the others flushed.
func (q *QP) flushSends(status verbs.WCStatus, psn packet.PSN, hasPSN bool) {
	s := &q.snd
	if hasPSN {
		hasPSN = false
		for i := s.head; i != s.tail; i++ {
			if w := s.at(i); w.started && !w.local() && !psn.Before(w.first) && psn.Before(w.end()) {
				hasPSN = true
				break
			}
		}
	}
	for oldest := true; s.head != s.tail; oldest = false {
		w := s.at(s.head)
		s.head++
		st := verbs.WCFlushError
		if hasPSN {
			if w.started && !w.local() && !psn.Before(w.first) && psn.Before(w.end()) {
				st = status
			}
		} else if oldest {
			st = status
		}
		q.completeSend(w.wrID, w.op, 0, st)
	}
	s.cur, s.curPkt, s.reads, s.readWQEs = s.tail, 0, 0, 0
}
