package rc

// Flow of the data path, and who owns what:
//
//	PostSend -> sendWQE in the send ring (copies the request; an inline payload too)
//	         -> requester.go transmit: packets within the window -> Output (header copied, payload by reference to the SGE's memory)
//	peer's ACK, NAK, READ response -> completer.go: moves una, writes READ data into the SGEs' memory
//	         -> retire: Output.Complete in the order of posting; the memory is the caller's again
//	PostRecv -> recvWQE in the receive ring
//	peer's SEND, WRITE -> responder.go: payload copied from the receive buffer into memory -> Output.Complete
//	peer's READ -> readResource -> READ responses by reference to the region's memory -> Output
//	ACK and NAK: one pending acknowledgement, sent at EndBatch, by a timer or behind the next request
//
// Everything hangs on the QP and was allocated by New; the rings never grow.

import (
	"fmt"
	"time"

	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/verbs"
)

// QP is one reliable-connected queue pair. Calls must not overlap.
type QP struct {
	mem   Memory
	out   Output
	state verbs.QPState

	mtu      int
	mtuShift uint
	destQPN  uint32
	pkey     uint16
	access   verbs.AccessFlags

	snd requester
	rcv responder

	blocked bool // the Output refused a packet since the last Pump
	// sentRequests: since the last Ride.
	sentRequests bool
	hdr          [packet.HeaderMax]byte
	pieces       [][]byte // scratch: the payload of the packet being built
	ahead        uint64   // address of what the packet behind it carries; 0: not known
	wc           verbs.WorkCompletion
	stats        Stats
	cfg          Config
}

// New makes a queue pair in the reset state. cfg.Cap is taken as it is; sizes below 1 become 1.
func New(cfg Config, mem Memory, out Output) *QP {
	q := &QP{mem: mem, out: out, cfg: cfg, pkey: cfg.PKey}
	if q.pkey == 0 {
		q.pkey = packet.DefaultPKey
	}
	c := &q.cfg.Cap
	c.MaxSendWR, c.MaxRecvWR = max(c.MaxSendWR, 1), max(c.MaxRecvWR, 1)
	c.MaxSendSGE, c.MaxRecvSGE = max(c.MaxSendSGE, 1), max(c.MaxRecvSGE, 1)
	c.MaxInlineData = max(c.MaxInlineData, 0)
	q.pieces = make([][]byte, 0, max(c.MaxSendSGE, c.MaxRecvSGE))
	q.snd.init(c)
	q.rcv.init(c)
	q.SetTuning(cfg.Tuning)
	return q
}

// QPN is the queue pair's number.
func (q *QP) QPN() uint32 { return q.cfg.QPN }

// Cap is the queue pair's sizes.
func (q *QP) Cap() verbs.QPCap { return q.cfg.Cap }

// State is the queue pair's state.
func (q *QP) State() verbs.QPState { return q.state }

// Stats is a copy of the counters.
func (q *QP) Stats() Stats { return q.stats }

// DestQPN is the peer's queue pair, valid from RTR on.
func (q *QP) DestQPN() uint32 { return q.destQPN }

// SetTuning changes the tuning; READs and WRITEs that are under way keep their division.
func (q *QP) SetTuning(t Tuning) {
	s, r := &q.snd, &q.rcv
	s.window = MaxWindow
	if t.Window > 0 {
		s.window = min(t.Window, MaxWindow)
	}
	s.chunk = max(1, s.window/2)
	if t.ReadChunk > 0 {
		s.chunk = min(t.ReadChunk, s.window)
	}
	s.divide = max(0, t.DivideWrites)
	s.ackReqEvery = min(ackReqEvery, max(1, s.window/2))
	s.askRarely = t.AskRarely
	r.ackDelay, r.ackUnasked = max(0, t.AckDelay), max(0, t.AckUnasked)
	r.ackEvery = DefaultAckEvery
	if t.AckEvery > 0 {
		r.ackEvery = t.AckEvery
	}
	r.interval = max(0, t.ReadInterval)
	r.burst = max(1, t.ReadBurst)
	q.cfg.Tuning = t
}

// Tuning is what SetTuning or New was given.
func (q *QP) Tuning() Tuning { return q.cfg.Tuning }

// Modify moves the queue pair through its states (IBA vol. 1, 10.3.1): RESET to INIT to RTR to RTS with the attributes that
// verbs.QPMaskToInit, QPMaskToRTR and QPMaskToRTS name, anything to RESET or ERR. It checks values; the address vector, the port and the P_Key
// index are the driver's business.
func (q *QP) Modify(now Time, a *verbs.QPAttr, mask verbs.QPAttrMask) error {
	to := q.state
	if mask&verbs.QPMaskState != 0 {
		to = a.State
	}
	var need verbs.QPAttrMask
	switch {
	case to == verbs.QPReset:
		q.reset()
		return nil
	case to == verbs.QPError:
		if q.state == verbs.QPReset {
			q.state = verbs.QPError
			return nil
		}
		q.enterError()
		return nil
	case q.state == verbs.QPReset && to == verbs.QPInitState:
		need = verbs.QPMaskToInit
	case q.state == verbs.QPInitState && to == verbs.QPReadyToReceive:
		need = verbs.QPMaskToRTR
	case q.state == verbs.QPReadyToReceive && to == verbs.QPReadyToSend:
		need = verbs.QPMaskToRTS
	case q.state == to && to != verbs.QPError:
	default:
		return fmt.Errorf("rc: QP 0x%06x cannot go from %s to %s", q.cfg.QPN, q.state, to)
	}
	if miss := need &^ mask; miss != 0 {
		return fmt.Errorf("rc: QP 0x%06x: %s to %s lacks attributes (mask 0x%x)", q.cfg.QPN, q.state, to, uint32(miss))
	}
	switch {
	case mask&verbs.QPMaskPathMTU != 0 && a.PathMTU.Bytes() == 0:
		return fmt.Errorf("rc: path MTU code %d is none of 1 to 5", a.PathMTU)
	case mask&verbs.QPMaskRQPSN != 0 && a.RQPSN>>24 != 0, mask&verbs.QPMaskSQPSN != 0 && a.SQPSN>>24 != 0:
		return fmt.Errorf("rc: a PSN has 24 bits: 0x%x, 0x%x", a.RQPSN, a.SQPSN)
	case mask&verbs.QPMaskDestQPN != 0 && (a.DestQPN>>24 != 0 || a.DestQPN == 0):
		return fmt.Errorf("rc: 0x%x is not a QPN", a.DestQPN)
	case mask&verbs.QPMaskTimeout != 0 && a.Timeout > 31, mask&verbs.QPMaskMinRNRTimer != 0 && a.MinRNRTimer > 31:
		return fmt.Errorf("rc: timer codes have 5 bits: %d, %d", a.Timeout, a.MinRNRTimer)
	case mask&verbs.QPMaskRetryCount != 0 && a.RetryCount > 7, mask&verbs.QPMaskRNRRetry != 0 && a.RNRRetry > 7:
		return fmt.Errorf("rc: retry counts have 3 bits: %d, %d", a.RetryCount, a.RNRRetry)
	case mask&verbs.QPMaskMaxRdAtomic != 0 && a.MaxRdAtomic > MaxReadLimit,
		mask&verbs.QPMaskMaxDestRdAtomic != 0 && a.MaxDestRdAtomic > MaxReadLimit:
		return fmt.Errorf("rc: at most %d READs at a time: %d, %d", MaxReadLimit, a.MaxRdAtomic, a.MaxDestRdAtomic)
	case q.state != verbs.QPInitState && mask&(verbs.QPMaskPathMTU|verbs.QPMaskRQPSN|verbs.QPMaskDestQPN|verbs.QPMaskMaxDestRdAtomic) != 0,
		q.state != verbs.QPReadyToReceive && mask&(verbs.QPMaskSQPSN|verbs.QPMaskMaxRdAtomic) != 0:
		return fmt.Errorf("rc: attributes (mask 0x%x) cannot change in %s", uint32(mask), q.state)
	}
	if mask&verbs.QPMaskAccess != 0 {
		q.access = a.Access
	}
	if mask&verbs.QPMaskPathMTU != 0 {
		q.mtu = a.PathMTU.Bytes()
		q.mtuShift = 7 + uint(a.PathMTU)
	}
	if mask&verbs.QPMaskDestQPN != 0 {
		q.destQPN = a.DestQPN
	}
	if mask&verbs.QPMaskRQPSN != 0 {
		q.rcv.psn = packet.PSN(a.RQPSN)
	}
	if mask&verbs.QPMaskMaxDestRdAtomic != 0 {
		q.rcv.setReadLimit(int(a.MaxDestRdAtomic))
	}
	if mask&verbs.QPMaskMinRNRTimer != 0 {
		q.rcv.rnrCode = a.MinRNRTimer
	}
	s := &q.snd
	if mask&verbs.QPMaskSQPSN != 0 {
		s.una = packet.PSN(a.SQPSN)
		s.nxt, s.max, s.next = s.una, s.una, s.una
	}
	if mask&verbs.QPMaskMaxRdAtomic != 0 {
		s.maxReads = int(a.MaxRdAtomic)
	}
	if mask&verbs.QPMaskTimeout != 0 {
		s.timeout = AckTimeout(a.Timeout)
	}
	if mask&verbs.QPMaskRetryCount != 0 {
		s.retryMax, s.retries = a.RetryCount, a.RetryCount
	}
	if mask&verbs.QPMaskRNRRetry != 0 {
		s.rnrMax, s.rnr = a.RNRRetry, a.RNRRetry
	}
	q.state = to
	return nil
}

func (q *QP) reset() {
	q.state = verbs.QPReset
	q.blocked, q.sentRequests = false, false
	q.snd.reset()
	q.rcv.reset()
}

// enterError flushes both queues (IBA vol. 1, 10.3.1.7): every work request that is still queued completes, in order.
func (q *QP) enterError() { q.enterErrorAt(verbs.WCFlushError, 0, false) }

// enterErrorAt is enterError, but the send work request that psn belongs to (without psn or without such a request: the oldest)
// completes with status.
func (q *QP) enterErrorAt(status verbs.WCStatus, psn packet.PSN, hasPSN bool) {
	q.state = verbs.QPError
	q.snd.stopTimers()
	q.flushSends(status, psn, hasPSN)
	q.flushRecvs()
	q.rcv.stop()
}

// die is an error that the QP met by itself: sends end with status at psn.
func (q *QP) die(ev verbs.AsyncEventType, status verbs.WCStatus, psn packet.PSN, hasPSN bool) {
	q.enterErrorAt(status, psn, hasPSN)
	q.out.Event(ev)
}

// Receive takes one packet for this queue pair, parsed and with a good ICRC. Payload is copied out during the call.
func (q *QP) Receive(now Time, p *packet.Packet) {
	q.stats.RxPackets++
	// rxe_recv.c: 15 bits must agree and one side must be a full member.
	if (p.PKey^q.pkey)&0x7fff != 0 || (p.PKey|q.pkey)&0x8000 == 0 || p.Kind&packet.KindUD != 0 {
		q.stats.Dropped++
		return
	}
	switch {
	case p.Kind&packet.KindRequest != 0:
		if q.state != verbs.QPReadyToReceive && q.state != verbs.QPReadyToSend {
			q.stats.Dropped++
			return
		}
		q.receiveRequest(now, p)
	default:
		if q.state != verbs.QPReadyToSend {
			q.stats.Dropped++
			return
		}
		q.receiveResponse(now, p)
	}
}

// EndBatch tells the QP that the packets which arrived together have all been given to it: what is owed to the
// peer, and need not or must not wait, goes out. completed: the batch gave the consumer completions, who is likely to answer with requests
// that an acknowledgement could travel with; it may then wait for half as many packets more.
func (q *QP) EndBatch(now Time, completed bool) {
	r := &q.rcv
	if q.sentRequests {
		q.Ride(now)
		return
	}
	if completed && r.ack == ackPlain && !r.ackUrgent && r.ackDelay > 0 && r.unacked < r.ackEvery+r.ackEvery/2 {
		return
	}
	q.flushAck(now, batchEnded)
}

// Ride sends the acknowledgement that may travel with the requests which PostSend has sent. The driver calls it before it flushes
// the Output: behind the last of several PostSends an acknowledgement is the short end of their train, in between it would cut it.
func (q *QP) Ride(now Time) {
	if q.sentRequests {
		q.sentRequests = false
		q.flushAck(now, requestsSent)
	}
}

// Riding reports that Ride has something to look at, if only to forget it: requests that have left are no company for an
// acknowledgement that is owed later.
func (q *QP) Riding() bool { return q.sentRequests }

// FlushAck sends the pending acknowledgement, if any, now.
func (q *QP) FlushAck(now Time) { q.flushAck(now, timeIsUp) }

// AckPending reports that an acknowledgement waits for AckDelay, for a next request or for room.
func (q *QP) AckPending() bool { return q.rcv.ack != ackNone }

// Blocked reports that the Output refused a packet: the driver calls Pump when it has room.
func (q *QP) Blocked() bool { return q.blocked }

// Pump goes on where the Output refused a packet.
func (q *QP) Pump(now Time) {
	q.blocked = false
	if q.state != verbs.QPReadyToReceive && q.state != verbs.QPReadyToSend {
		return
	}
	q.respond(now)
	q.flushAck(now, batchEnded)
	q.transmit(now)
	q.Ride(now)
}

// Deadline is when Tick wants to be called next; Never without a timer.
func (q *QP) Deadline() Time {
	return min(q.snd.rtxAt, q.snd.rnrAt, q.snd.earlyAt, q.rcv.ackAt, q.rcv.resumeAt)
}

// Tick runs the timers that have expired.
func (q *QP) Tick(now Time) {
	if q.rcv.resumeAt <= now {
		q.rcv.resumeAt = Never
		q.respond(now)
		q.flushAck(now, batchEnded)
	}
	if q.rcv.ackAt <= now {
		q.flushAck(now, timeIsUp)
	}
	s := &q.snd
	switch {
	case s.rnrAt <= now:
		s.rnrAt = Never
		q.armTimer(now)
		q.transmit(now)
	case s.rtxAt <= now && q.blocked: // this end did not get to send
		q.armTimer(now)
	case s.late(now):
	case s.rtxAt <= now:
		q.stats.Timeouts++
		s.sawLoss(now)
		q.retry(now)
		q.transmit(now)
	case s.earlyAt <= now:
		q.goBackEarly(now)
		q.transmit(now)
	}
	q.Ride(now)
}

// AckTimeout is the retransmission timeout of a 5-bit code: 4.096 us * 2^code; 0, for code 0, means none (IBA vol. 1, 9.7.6.1.3).
func AckTimeout(code uint8) time.Duration {
	if code == 0 {
		return 0
	}
	return 4096 * time.Nanosecond << (code & 31)
}

// RNRDelay is the wait that an RNR NAK timer code asks for (IBA vol. 1, table 45).
func RNRDelay(code uint8) time.Duration {
	return 10 * time.Microsecond * time.Duration(rnrTable[code&31])
}

// In units of 10 us.
var rnrTable = [32]int32{
	65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192,
	256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
}

// gather points q.pieces at n bytes of the SGEs from offset off; false when a key or range is not good.
func (q *QP) gather(w *sendWQE, off, n uint32) bool {
	q.pieces = q.pieces[:0]
	if n == 0 {
		return true
	}
	if w.flags&verbs.SendInline != 0 {
		q.pieces = append(q.pieces, w.inline[off:off+n])
		return true
	}
	for i := range w.sge {
		g := &w.sge[i]
		if off >= g.Length {
			off -= g.Length
			continue
		}
		k := min(n, g.Length-off)
		b, ok := q.mem.Local(g.LKey, g.Addr+uint64(off), k, false)
		if !ok {
			return false
		}
		q.pieces = append(q.pieces, b)
		if n -= k; n == 0 {
			return true
		}
		off = 0
	}
	return false
}

// scatter copies data to offset off of the SGEs, which have the room; false when a key or range is not good.
func (q *QP) scatter(sge []verbs.SGE, off uint32, data []byte) bool {
	for i := range sge {
		if len(data) == 0 {
			break
		}
		g := &sge[i]
		if off >= g.Length {
			off -= g.Length
			continue
		}
		k := min(uint32(len(data)), g.Length-off)
		b, ok := q.mem.Local(g.LKey, g.Addr+uint64(off), k, true)
		if !ok {
			return false
		}
		packet.Copy(b, data[:k])
		data = data[k:]
		off = 0
	}
	return len(data) == 0
}

// send gives one packet with the header in q.hdr[:n] and the payload in q.pieces to the Output.
func (q *QP) send(n int, pad uint8) bool {
	if !q.out.Packet(q.hdr[:n], q.pieces, pad, q.ahead) {
		q.blocked = true
		return false
	}
	q.stats.TxPackets++
	return true
}
