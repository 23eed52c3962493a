package rc

import (
	"fmt"
	"time"

	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/verbs"
)

type recvWQE struct {
	wrID   uint64
	length uint32      // room in bytes
	sge    []verbs.SGE // room for MaxRecvSGE
}

// readResource remembers an accepted READ: to answer it, and to answer it again.
type readResource struct {
	first   packet.PSN
	npkt    int
	msn     uint32
	rkey    uint32
	addr    uint64
	length  uint32
	pos     int    // next packet to send
	end     int    // and where to stop
	endLen  uint32 // bytes of the message up to there: less than length when a replay asks for less
	pending bool   // pos < end
	replay  bool   // the pending answer is not the first one
}

type ackKind uint8

const (
	ackNone ackKind = iota
	ackPlain
	ackNakSequence
	ackRNR
)

type message uint8

const (
	noMessage message = iota
	sendMessage
	writeMessage
)

// responder is the receiving half:
//
//	psn    expected PSN of the next request packet
//	msn    messages completed
//	msg    the message whose MIDDLE or LAST is due
//	silent a NAK for psn has been sent or is pending; what comes meanwhile is dropped without another (IBA vol. 1, 9.7.5.2.8),
//	       until the peer is seen to have gone back
//
// READ responses leave in PSN order, and no acknowledgement overtakes them.
type responder struct {
	rq         []recvWQE
	mask       uint32
	size       uint32
	head, tail uint32

	psn, ackPSN  packet.PSN
	msn          uint32
	msg          message
	silent       bool
	afterRead    bool // the last executed request was a READ: psn-1 must not be acknowledged plainly
	ahead        bool // packets up to aheadPSN were dropped since psn last moved
	aheadPSN     packet.PSN
	lastAhead    packet.PSN // the latest of them
	silentRNR    bool       // silent because of an RNR NAK
	ack          ackKind
	ackUrgent    bool
	ackAsked     bool // the peer asked for it
	unacked      int  // packets executed since the last acknowledgement
	rnrCode      uint8
	received     uint32 // SEND: bytes so far
	writeAddr    uint64 // WRITE: where the next packet goes
	writeLeft    uint32
	writeLength  uint32
	writeRKey    uint32
	reads        []readResource // ring, oldest at readHead
	readHead     int
	readCount    int
	readsPending int
	burst        int
	interval     time.Duration
	ackDelay     time.Duration
	ackUnasked   time.Duration
	ackEvery     int
	ackAt        Time
	resumeAt     Time
}

func (r *responder) init(c *verbs.QPCap) {
	n := ringSize(c.MaxRecvWR)
	r.rq = make([]recvWQE, n)
	r.mask, r.size = uint32(n-1), uint32(c.MaxRecvWR)
	sges := make([]verbs.SGE, n*c.MaxRecvSGE)
	for i := range r.rq {
		r.rq[i].sge = sges[i*c.MaxRecvSGE : i*c.MaxRecvSGE : (i+1)*c.MaxRecvSGE]
	}
	r.stop()
}

func (r *responder) setReadLimit(n int) {
	r.reads = make([]readResource, n)
	r.readHead, r.readCount, r.readsPending = 0, 0, 0
}

// stop forgets what is owed to the peer.
func (r *responder) stop() {
	r.ack, r.ackUrgent, r.msg = ackNone, false, noMessage
	r.ackAt, r.resumeAt = Never, Never
	r.readCount, r.readsPending, r.unacked = 0, 0, 0
}

func (r *responder) reset() {
	r.stop()
	r.head, r.tail, r.msn = 0, 0, 0
	r.silent, r.silentRNR, r.ahead, r.afterRead = false, false, false, false
}

// PostRecv queues receives; allowed from INIT on. In the error state they complete at once. It returns how many were taken.
func (q *QP) PostRecv(wrs []verbs.RecvWorkRequest) (int, error) {
	if q.state == verbs.QPReset {
		return 0, fmt.Errorf("rc: QP 0x%06x: receive posted in %s", q.cfg.QPN, q.state)
	}
	r := &q.rcv
	for i := range wrs {
		wr := &wrs[i]
		if q.state == verbs.QPError {
			q.completeRecv(wr.WRID, verbs.WCFlushError)
			continue
		}
		if r.tail-r.head >= r.size {
			return i, verbs.ErrQueueFull
		}
		w := &r.rq[r.tail&r.mask]
		if len(wr.SGList) > cap(w.sge) {
			return i, fmt.Errorf("rc: QP 0x%06x: %d scatter/gather entries, at most %d", q.cfg.QPN, len(wr.SGList), cap(w.sge))
		}
		var total uint64
		for j := range wr.SGList {
			total += uint64(wr.SGList[j].Length)
		}
		if total > MaxMessage {
			return i, fmt.Errorf("rc: QP 0x%06x: receive of %d bytes, at most %d", q.cfg.QPN, total, MaxMessage)
		}
		w.wrID, w.length = wr.WRID, uint32(total)
		w.sge = append(w.sge[:0], wr.SGList...)
		r.tail++
	}
	return len(wrs), nil
}

func (q *QP) completeRecv(id uint64, st verbs.WCStatus) {
	q.wc = verbs.WorkCompletion{WRID: id, Status: st, Opcode: verbs.WCRecv, QPN: q.cfg.QPN}
	q.out.Complete(&q.wc, true, true)
}

func (q *QP) flushRecvs() {
	r := &q.rcv
	for ; r.head != r.tail; r.head++ {
		q.completeRecv(r.rq[r.head&r.mask].wrID, verbs.WCFlushError)
	}
}

// receiveRequest takes one request packet.
func (q *QP) receiveRequest(now Time, p *packet.Packet) {
	r := &q.rcv
	if d := p.PSN.Sub(r.psn); d != 0 {
		if d < 0 {
			q.duplicate(now, p)
		} else {
			q.outOfOrder(now, p)
		}
		return
	}
	// A NAK that has not left yet is about packets that are no longer missing, or about receives that may be there now.
	unsentNak := r.ack == ackNakSequence || r.ack == ackRNR
	if unsentNak {
		r.clearAck()
	}
	r.silent, r.silentRNR = false, false
	read := false
	switch {
	case p.Kind&packet.KindSend != 0:
		if !q.executeSend(now, p) {
			return
		}
	case p.Kind&packet.KindWrite != 0:
		if !q.executeWrite(now, p) {
			return
		}
	case p.Kind&packet.KindRead != 0:
		if !q.executeRead(now, p) {
			return
		}
		read = true
	default: // atomics and other operations that this stack does not offer
		q.refuse(p.PSN, packet.NakInvalidRequest, verbs.WCRemoteInvalidRequestError)
		return
	}
	r.afterRead = read
	if !read {
		r.psn = r.psn.Add(1)
		r.unacked++
		if p.AckReq {
			r.ackPSN = p.PSN
			q.oweAck(now, ackPlain, false)
		} else if r.ackUnasked > 0 && p.Kind&packet.KindLast != 0 {
			r.ackPSN = p.PSN
			if r.ack == ackNone {
				r.ack, r.ackUrgent, r.ackAsked = ackPlain, false, false
				r.ackAt = now.Add(r.ackUnasked)
			}
		}
	}
	if r.ahead {
		if r.aheadPSN.Before(r.psn) {
			r.ahead = false
		} else if unsentNak {
			// Packets beyond this one were dropped, and the peer has not been told.
			r.silent = true
			q.oweAck(now, ackNakSequence, true)
		}
	}
}

func (q *QP) outOfOrder(now Time, p *packet.Packet) {
	r := &q.rcv
	q.stats.OutOfOrder++
	// Out of order and not further on than the last: the peer has gone back, and what it went back for was lost again. Without another
	// NAK it would wait for its timer.
	again := r.ahead && p.PSN.Sub(r.lastAhead) <= 0 && !r.silentRNR
	if !r.ahead || r.aheadPSN.Before(p.PSN) {
		r.aheadPSN = p.PSN
	}
	r.ahead, r.lastAhead = true, p.PSN
	if r.silent && !again {
		return
	}
	r.silent, r.silentRNR = true, false
	q.oweAck(now, ackNakSequence, true)
}

// duplicate: the peer sent a request again (IBA vol. 1, 9.7.5.1.2 and 9.7.5.1.3: SEND and WRITE are acknowledged again and not executed,
// a READ is answered again from memory).
func (q *QP) duplicate(now Time, p *packet.Packet) {
	r := &q.rcv
	q.stats.Duplicates++
	switch {
	case p.Kind&(packet.KindSend|packet.KindWrite) != 0:
		psn := p.PSN
		if !r.afterRead {
			psn = r.psn.Add(-1)
		}
		switch {
		case r.ack == ackNone:
			r.ackPSN = psn
			q.oweAck(now, ackPlain, true)
		case r.ack == ackPlain:
			if r.ackPSN.Before(psn) {
				r.ackPSN = psn
			}
			r.ackUrgent = true
		}
	case p.Kind&packet.KindRead != 0:
		q.replayRead(now, p)
	}
}

// replayRead answers a duplicate READ: one that lies within a remembered READ, at the place that its PSN says, under the
// same key. Others are dropped: the peer's own retry counter decides.
func (q *QP) replayRead(now Time, p *packet.Packet) {
	r := &q.rcv
	h := p.RETH()
	for i := range r.readCount {
		m := r.readAt(i)
		k := p.PSN.Sub(m.first)
		if k < 0 || k >= m.npkt {
			continue
		}
		off := uint32(k) << q.mtuShift
		if len(p.Payload) != 0 || h.RKey != m.rkey || h.Addr != m.addr+uint64(off) || h.Length > m.length-off ||
			h.Length == 0 && m.length != 0 {
			break
		}
		end, endLen := k+q.packets(h.Length), off+h.Length
		q.stats.ReadReplays++
		if !m.pending {
			m.pending, m.replay = true, true
			r.readsPending++
			m.pos, m.end, m.endLen = k, end, endLen
		} else {
			// What is still to be sent was asked for by others: it is only ever widened.
			m.pos = min(m.pos, k)
			if m.endLen < endLen {
				m.end, m.endLen = end, endLen
			}
		}
		q.respond(now)
		return
	}
	q.stats.Dropped++
}

func (r *responder) readAt(i int) *readResource {
	i += r.readHead
	if i >= len(r.reads) {
		i -= len(r.reads)
	}
	return &r.reads[i]
}

// oweAck makes kind the pending acknowledgement.
func (q *QP) oweAck(now Time, kind ackKind, urgent bool) {
	r := &q.rcv
	if r.ack == ackNone {
		r.ackUrgent, r.ackAsked = false, false
	}
	if !r.ackAsked {
		r.ackAsked = true
		if r.ackDelay > 0 {
			r.ackAt = min(r.ackAt, now.Add(r.ackDelay))
		}
	}
	r.ack = kind
	r.ackUrgent = r.ackUrgent || urgent
}

// Occasions to send the pending acknowledgement.
type occasion uint8

const (
	batchEnded occasion = iota
	requestsSent
	timeIsUp
)

// flushAck sends the pending acknowledgement when it is due; never in front of READ responses.
func (q *QP) flushAck(now Time, on occasion) {
	r := &q.rcv
	if r.ack == ackNone || r.readsPending > 0 {
		if r.ack != ackNone { // whoever sends the last of them comes here again
			r.ackUrgent, r.ackAt = true, Never
		}
		return
	}
	switch {
	case on == timeIsUp || r.ackUrgent || r.unacked >= r.ackEvery:
	case !r.ackAsked:
		if on != requestsSent || r.unacked < unaskedEvery {
			return
		}
	case on == batchEnded && r.ackDelay > 0:
		return
	}
	a := packet.AETH{Syndrome: packet.SyndromeAck, MSN: r.msn}
	psn := r.ackPSN
	switch r.ack {
	case ackNakSequence:
		a.Syndrome, psn = packet.NakPSNSequence, r.psn
	case ackRNR:
		a.Syndrome, psn = packet.SyndromeRNR|packet.Syndrome(r.rnrCode), r.psn
	}
	if !q.sendAck(a, psn) {
		r.ackAt = Never // Pump goes on
		r.ackUrgent = true
		return
	}
	switch r.ack {
	case ackNakSequence:
		q.stats.TxNakSequence++
	case ackRNR:
		q.stats.TxRNR++
	default:
		q.stats.TxAcks++
	}
	r.clearAck()
	r.unacked = 0
}

func (r *responder) clearAck() { r.ack, r.ackUrgent, r.ackAt = ackNone, false, Never }

func (q *QP) sendAck(a packet.AETH, psn packet.PSN) bool {
	h := packet.BTH{Opcode: packet.Acknowledge, PKey: q.pkey, DestQPN: q.destQPN, PSN: psn}
	h.Put(q.hdr[:])
	a.Put(q.hdr[packet.BTHLen:])
	q.pieces, q.ahead = q.pieces[:0], 0
	return q.send(packet.BTHLen+packet.AETHLen, 0)
}

// refuse answers a request with a NAK that ends the connection. READ responses that are due go out in front of it, paced or not. The receive
// that was being filled completes with status.
func (q *QP) refuse(psn packet.PSN, syn packet.Syndrome, status verbs.WCStatus) {
	r := &q.rcv
	r.ack = ackNone
	for r.readsPending > 0 && !q.blocked {
		if m := r.oldestPending(); !q.sendRead(m) && !q.blocked {
			r.forget(m)
		}
	}
	if r.readsPending == 0 {
		q.stats.TxNakFatal++
		q.sendAck(packet.AETH{Syndrome: syn, MSN: r.msn}, psn)
	}
	if r.msg == sendMessage && r.head != r.tail {
		q.completeRecv(r.rq[r.head&r.mask].wrID, status)
		r.head++
	}
	ev := verbs.EventQPRequestError
	switch syn {
	case packet.NakRemoteAccess:
		ev = verbs.EventQPAccessError
	case packet.NakRemoteOperational:
		ev = verbs.EventQPFatal
	}
	q.die(ev, verbs.WCFlushError, 0, false)
}

// notReady answers a request for which no receive is posted.
func (q *QP) notReady(now Time) {
	q.rcv.silent, q.rcv.silentRNR = true, true
	q.oweAck(now, ackRNR, true)
}

// sizeOK checks a SEND or WRITE packet's length against its place in the message (rxe 6.12 rxe_resp.c check_length): FIRST and MIDDLE are
// exactly one MTU, LAST is never empty, nothing is longer than the MTU.
func (q *QP) sizeOK(p *packet.Packet) bool {
	n := len(p.Payload)
	switch p.Kind & (packet.KindFirst | packet.KindMiddle | packet.KindLast) {
	case packet.KindFirst | packet.KindLast:
		return n <= q.mtu
	case packet.KindLast:
		return n > 0 && n <= q.mtu
	}
	return n == q.mtu
}

func (q *QP) executeSend(now Time, p *packet.Packet) bool {
	r := &q.rcv
	if (p.Kind&packet.KindFirst != 0) != (r.msg == noMessage) || r.msg == writeMessage || !q.sizeOK(p) {
		q.refuse(p.PSN, packet.NakInvalidRequest, verbs.WCRemoteInvalidRequestError)
		return false
	}
	if p.Kind&packet.KindFirst != 0 {
		if r.head == r.tail {
			q.notReady(now)
			return false
		}
		r.msg, r.received = sendMessage, 0
	}
	w := &r.rq[r.head&r.mask]
	n := uint32(len(p.Payload))
	if n > w.length-r.received {
		q.refuse(p.PSN, packet.NakInvalidRequest, verbs.WCLocalLengthError)
		return false
	}
	if n > 0 && !q.scatter(w.sge, r.received, p.Payload) {
		q.refuse(p.PSN, packet.NakRemoteOperational, verbs.WCLocalProtectionError)
		return false
	}
	r.received += n
	if p.Kind&packet.KindLast == 0 {
		return true
	}
	wc := &q.wc
	*wc = verbs.WorkCompletion{WRID: w.wrID, Opcode: verbs.WCRecv, ByteLen: r.received, QPN: q.cfg.QPN}
	if p.Kind&packet.KindInv != 0 {
		key := p.Imm()
		if !q.mem.Invalidate(key, true) {
			q.refuse(p.PSN, packet.NakRemoteAccess, verbs.WCRemoteInvalidRequestError)
			return false
		}
		wc.Flags, wc.ImmData = verbs.WCWithInv, key
	} else if p.Kind&packet.KindImm != 0 {
		wc.Flags, wc.ImmData = verbs.WCWithImm, p.Imm()
	}
	q.finishRecv(p)
	return true
}

// finishRecv completes the oldest receive with q.wc and the message with it.
func (q *QP) finishRecv(p *packet.Packet) {
	r := &q.rcv
	r.head++
	q.messageDone()
	q.out.Complete(&q.wc, true, p.Solicited)
}

func (q *QP) messageDone() {
	r := &q.rcv
	r.msg = noMessage
	r.msn = (r.msn + 1) & 0xffffff
	q.stats.Messages++
}

func (q *QP) executeWrite(now Time, p *packet.Packet) bool {
	r := &q.rcv
	first := p.Kind&packet.KindFirst != 0
	if first != (r.msg == noMessage) || r.msg == sendMessage || !q.sizeOK(p) || q.access&verbs.AccessRemoteWrite == 0 {
		q.refuse(p.PSN, packet.NakInvalidRequest, verbs.WCRemoteInvalidRequestError)
		return false
	}
	if p.Kind&packet.KindImm != 0 && r.head == r.tail {
		q.notReady(now) // before any byte is written: the packet will come again
		return false
	}
	n := uint32(len(p.Payload))
	last := p.Kind&packet.KindLast != 0
	addr, key, left := r.writeAddr, r.writeRKey, r.writeLeft
	var whole []byte
	if first {
		h := p.RETH()
		if h.Length > 1<<31 || last && h.Length != n || !last && h.Length <= n {
			q.refuse(p.PSN, packet.NakInvalidRequest, verbs.WCRemoteInvalidRequestError)
			return false
		}
		addr, key, left = h.Addr, h.RKey, h.Length
		if left > 0 { // an empty WRITE names no memory (IBA vol. 1, 9.7.4.1.5)
			var ok bool
			if whole, ok = q.mem.Remote(key, addr, left, verbs.AccessRemoteWrite); !ok {
				q.refuse(p.PSN, packet.NakRemoteAccess, verbs.WCRemoteAccessError)
				return false
			}
		}
		r.writeLength = left
	} else {
		if last && n != left || !last && n >= left {
			q.refuse(p.PSN, packet.NakInvalidRequest, verbs.WCRemoteInvalidRequestError)
			return false
		}
		// Asked for each packet: the key may have been revoked since the first.
		var ok bool
		if whole, ok = q.mem.Remote(key, addr, n, verbs.AccessRemoteWrite); !ok {
			q.refuse(p.PSN, packet.NakRemoteAccess, verbs.WCRemoteAccessError)
			return false
		}
	}
	packet.Copy(whole, p.Payload)
	r.writeAddr, r.writeRKey, r.writeLeft = addr+uint64(n), key, left-n
	if !last {
		r.msg = writeMessage
		return true
	}
	if p.Kind&packet.KindImm != 0 {
		q.wc = verbs.WorkCompletion{
			WRID: r.rq[r.head&r.mask].wrID, Opcode: verbs.WCRecvRDMAWr, ByteLen: r.writeLength,
			ImmData: p.Imm(), Flags: verbs.WCWithImm, QPN: q.cfg.QPN,
		}
		q.finishRecv(p)
	} else {
		q.messageDone()
	}
	return true
}

// executeRead accepts a READ request and starts to answer it.
func (q *QP) executeRead(now Time, p *packet.Packet) bool {
	r := &q.rcv
	h := p.RETH()
	// With all resources taken by READs that have not been answered yet, the peer has more outstanding than was agreed.
	full := r.readCount == len(r.reads)
	if r.msg != noMessage || q.access&verbs.AccessRemoteRead == 0 || len(p.Payload) != 0 || h.Length > 1<<31 ||
		len(r.reads) == 0 || full && r.readAt(0).pending && !r.readAt(0).replay {
		q.refuse(p.PSN, packet.NakInvalidRequest, verbs.WCRemoteInvalidRequestError)
		return false
	}
	if h.Length > 0 {
		if _, ok := q.mem.Remote(h.RKey, h.Addr, h.Length, verbs.AccessRemoteRead); !ok {
			q.refuse(p.PSN, packet.NakRemoteAccess, verbs.WCRemoteAccessError)
			return false
		}
	}
	if full {
		if m := r.readAt(0); m.pending { // a replay that nobody may be waiting for
			r.forget(m)
		}
		r.readHead = (r.readHead + 1) % len(r.reads)
		r.readCount--
	}
	r.msn = (r.msn + 1) & 0xffffff
	m := r.readAt(r.readCount)
	r.readCount++
	*m = readResource{first: p.PSN, npkt: q.packets(h.Length), msn: r.msn, rkey: h.RKey, addr: h.Addr, length: h.Length, pending: true}
	m.end, m.endLen = m.npkt, m.length
	r.readsPending++
	r.psn = r.psn.Add(m.npkt)
	q.stats.ReadsServed++
	// The response acknowledges what is in front of it; a plain ACK behind it would be too old.
	r.clearAck()
	r.unacked = 0
	q.respond(now)
	return q.state != verbs.QPError
}

func (r *responder) oldestPending() *readResource {
	for i := range r.readCount {
		if m := r.readAt(i); m.pending {
			return m
		}
	}
	panic("rc: pending READ not found")
}

// forget drops the pending answer of m.
func (r *responder) forget(m *readResource) {
	m.pos, m.pending = m.end, false
	r.readsPending--
}

// respond sends READ responses as far as pacing and Output allow.
func (q *QP) respond(now Time) {
	r := &q.rcv
	if r.readsPending == 0 || r.resumeAt != Never || q.blocked {
		return
	}
	for sent := 0; r.readsPending > 0; sent++ {
		if sent == r.burst && r.interval > 0 {
			r.resumeAt = now.Add(r.interval)
			return
		}
		m := r.oldestPending()
		if !q.sendRead(m) {
			if q.blocked {
				return
			}
			// The key has been revoked. A replay is dropped, as a late duplicate is; a first answer becomes a NAK.
			psn := m.first.Add(m.pos)
			r.forget(m)
			if !m.replay {
				q.refuse(psn, packet.NakRemoteAccess, verbs.WCRemoteAccessError)
				return
			}
		}
	}
}

// sendRead sends the next packet of m. false: refused by the Output (q.blocked) or by the key.
func (q *QP) sendRead(m *readResource) bool {
	i := m.pos
	off := uint32(i) << q.mtuShift
	n := min(uint32(q.mtu), m.endLen-off)
	q.pieces, q.ahead = q.pieces[:0], 0
	if off+n < m.endLen {
		q.ahead = m.addr + uint64(off+n)
	}
	if n > 0 {
		b, ok := q.mem.Remote(m.rkey, m.addr+uint64(off), n, verbs.AccessRemoteRead)
		if !ok {
			return false
		}
		q.pieces = append(q.pieces, b)
	}
	h := packet.BTH{Pad: packet.Pad(int(n)), PKey: q.pkey, DestQPN: q.destQPN, PSN: m.first.Add(i)}
	// A replay from the middle goes on with MIDDLE and LAST, as rxe's do: rxe as requester takes a FIRST only at the
	// first PSN of the whole READ, while this stack takes either.
	h.Opcode = pick(i == 0, i == m.end-1, packet.ReadResponseFirst, packet.ReadResponseMid, packet.ReadResponseLast, packet.ReadResponseOnly)
	h.Put(q.hdr[:])
	hl := packet.BTHLen
	if h.Opcode != packet.ReadResponseMid {
		a := packet.AETH{Syndrome: packet.SyndromeAck, MSN: m.msn}
		a.Put(q.hdr[hl:])
		hl += packet.AETHLen
	}
	if !q.send(hl, h.Pad) {
		return false
	}
	if m.pos++; m.pos == m.end {
		m.pending = false
		q.rcv.readsPending--
	}
	return true
}
