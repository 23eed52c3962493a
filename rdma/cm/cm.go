// Package cm is the vocabulary of connection management: how two queue pairs
// find each other. Package ucm implements it on the kernel's rdma_cm, package
// softroce on its own CM machine over QP1.
//
// The active side resolves an address into a Conn, creates its queue pair, calls InitQP, posts its
// receives and then Connect. The passive side gets a Conn from Listener.Accept with the peer's request in it, calls InitQP,
// posts its receives and then Accept or Reject. Either way the queue pair is
// in RTS when Connect or Accept returns without error.
package cm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"srp-initiator/rdma/verbs"
)

// Private-data room for the caller, in bytes, after the RDMA/CM header took its share (IBA vol. 1, 12.6; the
// kernel's cma header is 36 bytes).
const (
	MaxConnectData   = 56  // REQ with RDMA/CM addressing
	MaxConnectDataIB = 92  // REQ with AF_IB addressing: no RDMA/CM header
	MaxAcceptData    = 196 // REP
	MaxRejectData    = 148 // REJ
)

// Addr names a peer: an IP endpoint (RDMA/CM, port space TCP), or on an InfiniBand fabric a GID, P_Key and service id (AF_IB).
type Addr struct {
	IP netip.AddrPort // valid: RDMA/CM addressing
	// The following count when IP is not valid.
	GID       verbs.GID
	PKey      uint16
	ServiceID uint64
}

// IsIB reports AF_IB addressing.
func (a Addr) IsIB() bool { return !a.IP.IsValid() }

func (a Addr) String() string {
	if a.IsIB() {
		return fmt.Sprintf("gid %s pkey 0x%04x service 0x%016x", a.GID, a.PKey, a.ServiceID)
	}
	return a.IP.String()
}

// ConnParam are the parameters of a REQ or REP (struct rdma_ucm_conn_param).
type ConnParam struct {
	PrivateData        []byte
	ResponderResources uint8 // RDMA READs this side will serve at once
	InitiatorDepth     uint8 // RDMA READs this side will have outstanding
	FlowControl        bool
	RetryCount         uint8         // 3 bits
	RNRRetryCount      uint8         // 3 bits, 7 for ever
	MinRNRTimer        uint8         // 0: the provider's choice of 0.64 ms (code 12); else a code of IBA vol. 1 table 45
	ACKTimeout         uint8         // 0: the provider's; else 4.096 us * 2^n
	Timeout            time.Duration // of the whole exchange; 0: the provider's
}

// Route is what address resolution found.
type Route struct {
	Device       string // verbs.Context.Name
	Port         uint8
	Local, Peer  Addr
	SGID, DGID   verbs.GID
	PKey         uint16
	PathMTU      verbs.MTU
	NodeGUID     uint64
	LocalPortGID verbs.GID // GID index 0, whose low half the kernel initiator uses as port GUID
}

// Connector starts connections on the device it belongs to.
type Connector interface {
	// Resolve finds the route to dst, from src when src is valid. The address may lead to another device
	// than the Connector's: that is an error naming both.
	Resolve(ctx context.Context, src netip.AddrPort, dst Addr) (Conn, error)
	// Listen accepts connections on addr; port 0 lets the provider choose.
	Listen(addr netip.AddrPort, backlog int) (Listener, error)
}

// Listener hands out connection requests.
type Listener interface {
	Addr() netip.AddrPort
	// Accept waits for the next request. After Close: net.ErrClosed.
	Accept(ctx context.Context) (Conn, error)
	Close() error
}

// Conn is one connection from resolution, or the arrival of a request, to its end.
type Conn interface {
	// Route is what resolution found; the path MTU, once Connect has returned, what the peer agreed to.
	Route() Route
	// Request holds what the peer's REQ said; passive side only. PrivateData is padded with zeros to the CM field's size.
	Request() ConnParam
	// InitQP binds qp to the connection and moves it to INIT.
	InitQP(qp verbs.QueuePair) error
	// Connect sends the REQ, waits for the answer, moves the queue pair through RTR to RTS, sends the RTU and
	// returns what the REP said. A refusal is a *RejectError.
	Connect(ctx context.Context, p ConnParam) (ConnParam, error)
	// Accept moves the queue pair to RTS, sends the REP and waits for the RTU.
	Accept(ctx context.Context, p ConnParam) error
	// Reject refuses the request with reason 28, consumer defined, and data.
	Reject(data []byte) error
	// Disconnect moves the queue pair to ERR and sends the DREQ. It does not wait; Done tells. It is safe to call twice
	// and after the peer's own DREQ.
	Disconnect() error
	// Done is closed when the connection has ended, by either side or because the device went away.
	Done() <-chan struct{}
	// Err says why it ended: nil while it lives, ErrDisconnected, verbs.ErrDeviceGone, or another error.
	Err() error
	// Close releases the connection's resources, disconnecting first if need be. Destroy the queue pair before.
	Close() error
}

var (
	// ErrDisconnected is an orderly end by either side.
	ErrDisconnected = errors.New("cm: disconnected")
	// ErrUnreachable: no answer to the REQ, or no route.
	ErrUnreachable = errors.New("cm: peer unreachable")
)

// RejectError is a CM REJ.
type RejectError struct {
	Reason      uint16 // IBA vol. 1, 12.6.7.2
	PrivateData []byte // as received, padded with zeros to MaxRejectData
}

// Refusal is a connection request that this side's device refused without asking a listener.
type Refusal struct {
	From             netip.Addr
	Reason           uint16    // IBA vol. 1, 12.6.7.2
	AskedMTU, OwnMTU verbs.MTU // path MTU: of the request, and the largest of the device
}

func (r Refusal) String() string {
	s := fmt.Sprintf("%s (CM reason %d)", reasonText(r.Reason), r.Reason)
	switch {
	case r.Reason != reasonInvalidMTU:
	case r.AskedMTU.Bytes() == 0:
		s += fmt.Sprintf(": code %d asked for, codes are 1 to 5", r.AskedMTU)
	default:
		s += fmt.Sprintf(": %d bytes asked for, this device's link carries %d", r.AskedMTU.Bytes(), r.OwnMTU.Bytes())
	}
	return s
}

const reasonInvalidMTU = 26

// ReasonConsumerDefined is the REJ reason by which a consumer such as an SRP target refuses; the private data is the consumer's.
const ReasonConsumerDefined = 28

// ReasonStaleConnection: the peer still knows this queue pair number; a new queue pair may succeed.
const ReasonStaleConnection = 10

var rejectText = map[uint16]string{
	1: "no queue pair available", 3: "no resources available", 4: "timeout", 5: "unsupported request",
	6: "invalid communication id", 7: "invalid communication instance", 8: "invalid service id: nobody listens on that port",
	9: "invalid transport service type", 10: "stale connection", 12: "invalid primary GID", 13: "invalid primary LID",
	24: "port and CM redirection", 25: "port redirection", 26: "invalid path MTU", 27: "insufficient responder resources",
	28: "consumer defined", 29: "invalid RNR retry count", 30: "duplicate local communication id",
	31: "invalid class version", 32: "invalid primary flow label", 35: "vendor option not supported",
}

func (e *RejectError) Error() string {
	return fmt.Sprintf("connection rejected by the peer: %s (CM reason %d)", reasonText(e.Reason), e.Reason)
}

func reasonText(reason uint16) string { return cmp.Or(rejectText[reason], "unknown reason") }
