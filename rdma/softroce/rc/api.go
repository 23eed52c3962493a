// Package rc is the reliable-connected transport of RoCE v2 as pure machines:
// requester, completer and responder of one queue pair (IBA vol. 1, chapter 9). No socket, no clock, no goroutine, no
// lock: time comes in as an argument, packets come in parsed and go out through an Output, memory is reached through a
// Memory. Whoever drives a QP serialises all calls on it.
//
// A driver's turn:
//
//	for each datagram: packet.Parse, ICRC, find the QP: qp.Receive(now, &pkt)
//	at the end of the batch, for each QP that received: qp.EndBatch(now, completed)
//	work from above: qp.PostSend(now, wrs), qp.PostRecv(now, wrs); before the flush that follows qp.Ride(now)
//	when qp.Deadline() has passed: qp.Tick(now)
//	when the Output refused a packet and has room again: qp.Pump(now)
//	flush what the Output gathered, deliver the completions
//
// Interoperation rules are those of the kernel's rxe (6.1 and 6.12) as well as the standard's; where they differ a
// comment says so.
package rc

import (
	"time"

	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/verbs"
)

// Time is a monotonic time: nanoseconds since a start that the driver chooses.
type Time int64

// Never is later than any other time.
const Never Time = 1<<63 - 1

// Add is t+d; Never stays Never.
func (t Time) Add(d time.Duration) Time {
	if t == Never {
		return Never
	}
	return t + Time(d)
}

// Memory finds the bytes behind keys. The slices are used during the call that asked for them and by Output until it
// has flushed what it was given: a driver that holds its lock from the call into the QP until its flush may let Deregister
// wait for that lock.
type Memory interface {
	// Local is the memory of an SGE: length bytes at addr under lkey, of the QP's protection domain. write asks for
	// local write permission. length is not 0.
	Local(lkey uint32, addr uint64, length uint32, write bool) ([]byte, bool)
	// Inline is the caller's memory that an inline send copies: no key is looked at.
	Inline(addr uint64, length uint32) ([]byte, bool)
	// Remote is memory that the peer names: access is verbs.AccessRemoteRead or verbs.AccessRemoteWrite. The range
	// must lie inside the region or window of rkey without wrapping. length is not 0.
	Remote(rkey uint32, addr uint64, length uint32, access verbs.AccessFlags) ([]byte, bool)
	// Invalidate revokes the window of rkey. byPeer: the peer asked, by SEND with invalidate. A key that may not be invalidated is false.
	Invalidate(rkey uint32, byPeer bool) bool
	// Bind executes OpBindMW.
	Bind(b *verbs.BindMW) bool
}

// Output takes what a QP produces. None of it is retained by the QP.
type Output interface {
	// Packet takes one packet: BTH and extension headers (copied by the Output during the call), payload in pieces, and the number of zero bytes to
	// pad it with. The slice payload is the QP's, the pieces are the memory itself and hold their bytes until the Output has flushed
	// (a later change only spoils a packet that the peer has no more need of). The Output adds padding and ICRC. ahead is the address of what the next
	// packet will likely carry, which may lie anywhere; 0 when that is not known.
	// false: no room, the packet was not taken. The QP then waits for Pump.
	Packet(hdr []byte, payload [][]byte, pad uint8, ahead uint64) bool
	// Complete takes a completion of the send queue, or of the receive queue when recv is set. wc is valid during the call.
	// solicited: the peer asked for a notification; failed completions count as solicited.
	Complete(wc *verbs.WorkCompletion, recv, solicited bool)
	// Event reports that the QP moved to the error state by itself, and why: EventQPFatal,
	// EventQPRequestError (the peer's request was nonsense) or EventQPAccessError (it was not allowed).
	Event(verbs.AsyncEventType)
}

// Config is what a queue pair is created with.
type Config struct {
	QPN uint32
	Cap verbs.QPCap
	// SignalAll completes every send work request with an entry.
	SignalAll bool
	// PKey is the partition key; 0 is packet.DefaultPKey.
	PKey uint16
	Tuning
}

// Tuning is what may be changed at any time with SetTuning. Zero values mean the defaults.
type Tuning struct {
	// Window is the number of packets that may be in flight towards the peer, READ responses asked for included; 1 to MaxWindow, which is the
	// default.
	Window int
	// ReadChunk is the largest number of packets that one READ request asks for. A longer READ work request goes out as several
	// READ requests, which the peer cannot tell from several work requests; so a READ cannot make the peer send more at
	// once than Window. Default: half the window.
	ReadChunk int
	// DivideWrites is the largest number of packets of an RDMA WRITE without immediate data that goes out as one message for each packet, which the peer cannot tell from
	// several work requests. Its packets are then of one size, but for the last, and like those of the WRITEs around it, so that all may share a train. The peer checks
	// key and range of each packet by itself: of a WRITE that goes beyond its region what lies inside has been written when the rest is refused. 0: none is divided.
	DivideWrites int
	// AckDelay lets an acknowledgement wait for company: it goes out with the next request (Ride), after AckEvery
	// packets, or AckDelay after the packet that asked for it. 0: at the end of the batch, which suits every peer. It must be well below
	// the peer's retransmission timeout.
	AckDelay time.Duration
	// AckUnasked is how long the acknowledgement of messages may wait that did not ask for one: it goes out with a next request once
	// there are 16 packets to acknowledge, or after AckEvery, or AckUnasked after the first. 0: none is owed.
	AckUnasked time.Duration
	// AskRarely asks for acknowledgements only where a completion was asked for, and besides often enough to keep the window and the
	// send queue open. The peer must have AckUnasked, or what it does not acknowledge is sent again after the ACK timeout.
	AskRarely bool
	// AckEvery is the number of received request packets after which an acknowledgement waits no longer. Default 32.
	AckEvery int
	// ReadBurst and ReadInterval pace READ responses: at most ReadBurst packets, then a pause of ReadInterval.
	// ReadInterval 0: no pacing.
	ReadBurst    int
	ReadInterval time.Duration
}

// Limits, each with its reason.
const (
	// MaxWindow is rxe's RXE_MAX_UNACKED_PSNS.
	MaxWindow = 128
	// ackReqEvery bounds the request packets between two AckReq bits, as rxe does (RXE_MAX_PKT_PER_ACK); half the window when that is less.
	ackReqEvery = 64
	// unaskedEvery packets are worth an acknowledgement that nobody asked for, if it can travel with requests.
	unaskedEvery = 16
	// DefaultAckEvery keeps acknowledgements well ahead of the smallest window in use.
	DefaultAckEvery = 32
	// MaxMessage bounds a message so that even at path MTU 256 it spans 2^22 packets, a quarter of the PSN space: two PSNs of
	// work in flight are then always comparable.
	MaxMessage = 1 << 30
	// MaxReadLimit bounds max_dest_rd_atomic and max_rd_atomic.
	MaxReadLimit = 128
)

// Stats count since creation.
type Stats struct {
	TxPackets, RxPackets  uint64 // taken by the Output; given to Receive
	TxAcks, RxAcks        uint64 // ACKs without data
	Retransmits           uint64 // request packets sent again
	Timeouts              uint64 // ACK timeout expired
	EarlyRetransmits      uint64 // went back before it, see early.go
	TxNakSequence         uint64
	RxNakSequence         uint64
	ImpliedNaks           uint64 // response or ACK beyond an unfinished READ
	TxRNR, RxRNR          uint64
	TxNakFatal            uint64 // NAK invalid request, remote access, remote operational
	RxNakFatal            uint64
	Duplicates            uint64 // requests received again
	OutOfOrder            uint64 // requests ahead of the expected PSN
	ReadReplays           uint64 // duplicate READs answered again
	Dropped               uint64 // packets that no rule has a use for
	Messages, ReadsServed uint64 // received messages, READ requests accepted
}

// compile-time check that a header with everything fits the scratch buffer
var _ [packet.HeaderMax - packet.BTHLen - packet.RETHLen - packet.ImmLen]byte
