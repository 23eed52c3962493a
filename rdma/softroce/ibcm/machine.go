package ibcm

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"srp-initiator/rdma/verbs"
)

// Limits. A node that is flooded forgets nothing it has promised and promises nothing beyond these.
const (
	maxConns    = 4096 // connections in every state, timewait included
	maxHalfOpen = 512  // passive connections before Established, over all listeners
)

// Times. The kernel waits 4 to 6 s between retransmissions; Machine starts earlier, which its duplicates rules allow.
const (
	firstWait    = time.Second      // before the first retransmission of a message
	longestWait  = 4 * time.Second  // between two
	requestTries = 15               // of a REQ or REP, as the kernel's CMA_MAX_CM_RETRIES
	leaveTries   = 5                // of a DREQ
	halfOpenLife = 60 * time.Second // a request that nobody takes

	longestTimeWait = 10 * time.Second // whatever ACK timeout the peer's REQ names
	longestPatience = 2 * time.Minute  // whatever an MRA asks

	cmTimeoutCode = 20 // 4.3 s: how soon each side may be expected to answer a CM message (CMA_CM_RESPONSE_TIMEOUT)
	patienceCode  = 20 // MRA service timeout
	ackDelayCode  = 15 // 134 ms: target ACK delay, as the kernel's rdma_cm assumes
)

// softrocePrefix marks the CA GUIDs of this implementation: a locally administered OUI (EUI-64 bit 0x02 set) in the
// upper 24 bits. A node that sees it knows that its peer reads UDP_SEGMENT trains and needs no IP identification.
const softrocePrefix = 0x0a5352

// NewCAGUID makes a CA GUID of this implementation from 40 random bits.
func NewCAGUID(random uint64) uint64 { return softrocePrefix<<40 | random&(1<<40-1) }

// IsSoftroce reports whether guid was made by NewCAGUID.
func IsSoftroce(guid uint64) bool { return guid>>40 == softrocePrefix }

// State is where a connection stands (IBA vol. 1, 12.9.5 and 12.9.6).
type State uint8

const (
	REQSent     State = iota // active: waiting for the REP
	REPReceived              // active: the consumer readies its queue pair
	REQReceived              // passive: the consumer thinks
	REPSent                  // passive: waiting for the RTU
	Established              //
	DREQSent                 // waiting for the DREP
	TimeWait                 // over; packets of it may still be under way
	Gone                     // forgotten
)

func (s State) String() string {
	return [...]string{"REQ sent", "REP received", "REQ received", "REP sent", "established", "DREQ sent", "timewait", "gone"}[s]
}

// ErrState: the call does not fit the connection's state, usually because the peer was faster.
type ErrState struct {
	Doing string
	State State
}

func (e *ErrState) Error() string {
	return fmt.Sprintf("ibcm: cannot %s: the connection is %v", e.Doing, e.State)
}

var (
	// ErrFull: maxConns connections.
	ErrFull = errors.New("ibcm: too many connections")
	// ErrPortInUse: somebody listens there already.
	ErrPortInUse = errors.New("ibcm: service port already in use")
)

// EventKind says what happened to a connection.
type EventKind uint8

const (
	EventRequest      EventKind = iota // passive: a REQ arrived; Conn is new
	EventReply                         // active: the REP arrived
	EventEstablished                   // passive: the RTU, or traffic in its place
	EventRejected                      // by a REJ; Reject holds it
	EventUnreachable                   // no answer to REQ or REP
	EventDisconnected                  // by either side's DREQ
	EventExpired                       // timewait is over: the queue pair number may be used again
)

// Event is one happening.
type Event struct {
	Kind   EventKind
	Conn   *Conn
	Reject REJ       // EventRejected; ARI is nil
	MTU    verbs.MTU // EventRejected for the path MTU: what the peer carries, 0 where it does not say
}

// Datagram is one MAD to send to QP1 of a node.
type Datagram struct {
	To  netip.Addr
	MAD MAD
}

// Conn is one connection. Its fields are the machine's; the caller keeps its own in Owner.
type Conn struct {
	Owner any

	state     State
	active    bool
	peer      netip.Addr
	tid       uint64
	localID   uint32
	remoteID  uint32
	localQPN  uint32
	remoteQPN uint32
	guid      uint64 // the peer's CA GUID
	port      uint16 // service port

	req  REQ // sent or received
	rep  REP // received or sent
	addr Address

	mad      MAD // what a retransmission sends
	deadline time.Time
	wait     time.Duration
	tries    int
	end      time.Duration // timewait
	order    uint64        // of creation: what is due at once happens in this order

	pending bool // counts in its listener's backlog
	half    bool // counts in Machine.halfOpen
}

// State is where the connection stands.
func (c *Conn) State() State { return c.state }

// REQ is what the active side asked. It must not be changed.
func (c *Conn) REQ() *REQ { return &c.req }

// REP is what the passive side answered: valid from REPReceived or REPSent on.
func (c *Conn) REP() *REP { return &c.rep }

// Address is the RDMA/CM header of the REQ.
func (c *Conn) Address() Address { return c.addr }

// Peer is the node at the other end.
func (c *Conn) Peer() netip.Addr { return c.peer }

// ServicePort is the listener's port.
func (c *Conn) ServicePort() uint16 { return c.port }

// PeerIsSoftroce reports a peer of this implementation; known from REPReceived or REQReceived on.
func (c *Conn) PeerIsSoftroce() bool { return IsSoftroce(c.guid) }

// Stats counts what a Machine did.
type Stats struct {
	Sent, Received uint64 // MADs
	Retransmits    uint64 // MADs sent again because no answer came
	Duplicates     uint64 // received again
	Malformed      uint64
	Unexpected     uint64 // for no connection, in the wrong state, or from the wrong node
	Refused        uint64 // REQs answered by a REJ of the machine's own
	Dropped        uint64 // REQs beyond a limit, left without an answer
}

// Config is what a Machine needs to know of its node.
type Config struct {
	Addr   netip.Addr
	CAGUID uint64
	PKey   uint16
	MaxMTU verbs.MTU // the largest path MTU the node's link carries
	Random func() uint64
	// Refused, if not nil, hears of each REQ that the machine answers with a REJ of its own. It must not call the machine.
	Refused func(from netip.Addr, q *REQ, reason uint16)
}

type idKey struct {
	guid uint64
	id   uint32 // comm id or queue pair number
}

// Machine is the communication manager of one node with one address.
// Its methods must not run side by side.
type Machine struct {
	cfg       Config
	gid       verbs.GID
	conns     map[uint32]*Conn // by local comm id
	peers     map[idKey]*Conn  // passive, by the peer's GUID and comm id: duplicate REQs
	qpns      map[idKey]*Conn  // by the peer's GUID and queue pair number: stale connections
	listeners map[uint16]*listener
	halfOpen  int
	created   uint64
	next      time.Time // no deadline is earlier; zero: none
	stats     Stats

	out    []Datagram
	events []Event
}

type listener struct {
	owner   any
	backlog int
	pending int // connections in REQReceived
}

// New makes a machine without connections.
func New(cfg Config) *Machine {
	return &Machine{
		cfg: cfg, gid: verbs.GIDFromAddr(cfg.Addr),
		conns: map[uint32]*Conn{}, peers: map[idKey]*Conn{}, qpns: map[idKey]*Conn{}, listeners: map[uint16]*listener{},
	}
}

// Stats reports the counters.
func (m *Machine) Stats() Stats { return m.stats }

// Len is how many connections the machine knows, those in timewait included.
func (m *Machine) Len() int { return len(m.conns) }

// Outputs takes the datagrams that are to be sent. The slice is valid until the next call of any method.
func (m *Machine) Outputs() []Datagram {
	o := m.out
	m.out = m.out[:0]
	return o
}

// Events takes what happened since the last call. The slice is valid until the next call of any method.
func (m *Machine) Events() []Event {
	e := m.events
	m.events = m.events[:0]
	return e
}

// Next is when Tick wants to be called; zero when nothing waits.
func (m *Machine) Next() time.Time { return m.next }

// Listen takes service port for owner; port 0 takes a free one from 49152 up. At most backlog requests wait at once.
func (m *Machine) Listen(port uint16, backlog int, owner any) (uint16, error) {
	if port == 0 {
		for i := 0; ; i++ {
			if port = 49152 + uint16(m.cfg.Random()%16384); m.listeners[port] == nil {
				break
			}
			if i > 1<<16 {
				return 0, ErrPortInUse
			}
		}
	}
	if m.listeners[port] != nil {
		return 0, ErrPortInUse
	}
	m.listeners[port] = &listener{owner: owner, backlog: max(backlog, 1)}
	return port, nil
}

// Unlisten gives port back. Requests that wait keep waiting for their Reply or Reject.
func (m *Machine) Unlisten(port uint16) { delete(m.listeners, port) }

// ListenerOf is the owner given to Listen for c's service port, nil when it listens no more.
func (m *Machine) ListenerOf(c *Conn) any {
	if l := m.listeners[c.port]; l != nil {
		return l.owner
	}
	return nil
}

// ConnectParam is what the consumer decides of a REQ.
type ConnectParam struct {
	Peer               netip.AddrPort
	SourcePort         uint16
	LocalQPN           uint32
	StartingPSN        uint32 // what this side expects first
	ResponderResources uint8
	InitiatorDepth     uint8
	FlowControl        bool
	RetryCount         uint8
	RNRRetryCount      uint8
	PathMTU            verbs.MTU
	ACKTimeout         uint8
	PrivateData        []byte // at most 56 bytes
}

// Connect sends a REQ.
func (m *Machine) Connect(now time.Time, p ConnectParam, owner any) (*Conn, error) {
	if len(p.PrivateData) > PrivateREQ-AddressSize {
		return nil, fmt.Errorf("ibcm: %d bytes of private data, at most %d fit a REQ", len(p.PrivateData), PrivateREQ-AddressSize)
	}
	c, err := m.add(p.Peer.Addr())
	if err != nil {
		return nil, err
	}
	c.Owner, c.active, c.localQPN, c.port = owner, true, p.LocalQPN, p.Peer.Port()
	c.tid = m.cfg.Random()
	c.addr = Address{Source: netip.AddrPortFrom(m.cfg.Addr, p.SourcePort), Destination: p.Peer.Addr()}
	c.req = REQ{
		LocalCommID: c.localID, ServiceID: ServiceID(p.Peer.Port()), CAGUID: m.cfg.CAGUID, LocalQPN: p.LocalQPN,
		ResponderResources: p.ResponderResources, InitiatorDepth: p.InitiatorDepth,
		RemoteCMTimeout: cmTimeoutCode, LocalCMTimeout: cmTimeoutCode, Transport: TransportRC, FlowControl: p.FlowControl,
		StartingPSN: p.StartingPSN, RetryCount: p.RetryCount, PKey: m.cfg.PKey, PathMTU: p.PathMTU,
		RNRRetryCount: p.RNRRetryCount, MaxCMRetries: requestTries,
		Primary: Path{
			LocalLID: 0xffff, RemoteLID: 0xffff, LocalGID: m.gid, RemoteGID: verbs.GIDFromAddr(p.Peer.Addr()),
			// The flow label that the kernel's rdma_cm derives from the ports (cma.c, cma_get_roce_udp_flow_label).
			FlowLabel:  (uint32(p.SourcePort)*31 + uint32(p.Peer.Port())) & 0xfffff,
			PacketRate: 0x1e, HopLimit: 64, ACKTimeout: p.ACKTimeout,
		},
	}
	c.addr.Encode(c.req.PrivateData[:])
	copy(c.req.PrivateData[AddressSize:], p.PrivateData)
	c.end = min(codeTime(p.ACKTimeout), longestTimeWait)
	c.state = REQSent
	c.req.Encode(&c.mad, c.tid)
	m.send(c)
	m.arm(c, now, firstWait, requestTries)
	return c, nil
}

// ReplyParam is what the consumer decides of a REP.
type ReplyParam struct {
	LocalQPN           uint32
	StartingPSN        uint32 // what this side expects first
	ResponderResources uint8
	InitiatorDepth     uint8
	FlowControl        bool
	RNRRetryCount      uint8
	PrivateData        []byte // at most 196 bytes
}

// Reply accepts a request: it sends the REP. The queue pair must be ready to receive and to send before.
func (m *Machine) Reply(now time.Time, c *Conn, p ReplyParam) error {
	if c.state != REQReceived {
		return &ErrState{"accept", c.state}
	}
	if len(p.PrivateData) > PrivateREP {
		return fmt.Errorf("ibcm: %d bytes of private data, at most %d fit a REP", len(p.PrivateData), PrivateREP)
	}
	c.localQPN = p.LocalQPN
	c.rep = REP{
		LocalCommID: c.localID, RemoteCommID: c.remoteID, LocalQPN: p.LocalQPN, StartingPSN: p.StartingPSN,
		ResponderResources: p.ResponderResources, InitiatorDepth: p.InitiatorDepth, TargetACKDelay: ackDelayCode,
		FlowControl: p.FlowControl, RNRRetryCount: p.RNRRetryCount, CAGUID: m.cfg.CAGUID,
	}
	copy(c.rep.PrivateData[:], p.PrivateData)
	m.settle(c, false)
	c.state = REPSent
	c.rep.Encode(&c.mad, c.tid)
	m.send(c)
	m.arm(c, now, firstWait, int(max(c.req.MaxCMRetries, 1)))
	return nil
}

// Ready answers a REP with the RTU, once the queue pair is in RTS.
func (m *Machine) Ready(c *Conn) error {
	if c.state != REPReceived {
		return &ErrState{"go on", c.state}
	}
	c.state = Established
	m.disarm(c)
	m.sendRTU(c)
	return nil
}

func (m *Machine) sendRTU(c *Conn) {
	(&RTU{LocalCommID: c.localID, RemoteCommID: c.remoteID}).Encode(m.datagram(c.peer), c.tid)
}

// Reject refuses a request, or the REP the active side got. The connection is forgotten.
func (m *Machine) Reject(c *Conn, reason uint16, private []byte) error {
	if len(private) > PrivateREJ {
		return fmt.Errorf("ibcm: %d bytes of private data, at most %d fit a REJ", len(private), PrivateREJ)
	}
	r := REJ{LocalCommID: c.localID, RemoteCommID: c.remoteID, Message: MessageREQ, Reason: reason}
	switch c.state {
	case REQReceived:
	case REPReceived:
		r.Message = MessageREP
	default:
		return &ErrState{"reject", c.state}
	}
	copy(r.PrivateData[:], private)
	r.Encode(m.datagram(c.peer), c.tid)
	m.forget(c)
	return nil
}

// Disconnect leaves c in whatever state it is: a DREQ from Established on, before that the REJ that fits. Events
// that follow: EventDisconnected when the peer has answered or given no answer, then EventExpired; none when there was no connection yet.
func (m *Machine) Disconnect(now time.Time, c *Conn) {
	switch c.state {
	case REQSent:
		// The peer may not have our id yet: it matches reason 4 by the CA GUID and our id.
		ari := be.AppendUint64(nil, m.cfg.CAGUID)
		(&REJ{LocalCommID: c.localID, Message: MessageREQ, Reason: ReasonTimeout, ARI: ari}).Encode(m.datagram(c.peer), c.tid)
		m.forget(c)
	case REQReceived, REPReceived:
		m.Reject(c, ReasonConsumer, nil)
	case REPSent, Established:
		m.settle(c, true)
		c.state = DREQSent
		c.tid = m.cfg.Random()
		(&DREQ{LocalCommID: c.localID, RemoteCommID: c.remoteID, RemoteQPN: c.remoteQPN}).Encode(&c.mad, c.tid)
		m.send(c)
		m.arm(c, now, firstWait, leaveTries)
	}
}

// Traffic tells that a packet of c's queue pair arrived: in REPSent it stands for the RTU.
func (m *Machine) Traffic(c *Conn) {
	if c.state == REPSent {
		m.establish(c)
	}
}

func (m *Machine) establish(c *Conn) {
	m.settle(c, true)
	m.disarm(c)
	c.state = Established
	m.event(Event{Kind: EventEstablished, Conn: c})
}

// Tick retransmits and expires what is due at now.
func (m *Machine) Tick(now time.Time) {
	if m.next.IsZero() || now.Before(m.next) {
		return
	}
	var due []*Conn
	for _, c := range m.conns {
		if !c.deadline.IsZero() && !now.Before(c.deadline) {
			due = append(due, c)
		}
	}
	slices.SortFunc(due, func(a, b *Conn) int { return cmp.Compare(a.order, b.order) })
	for _, c := range due {
		m.expire(now, c)
	}
	m.next = time.Time{}
	for _, c := range m.conns {
		if !c.deadline.IsZero() && (m.next.IsZero() || c.deadline.Before(m.next)) {
			m.next = c.deadline
		}
	}
}

func (m *Machine) expire(now time.Time, c *Conn) {
	switch c.state {
	case TimeWait:
		m.event(Event{Kind: EventExpired, Conn: c})
		m.forget(c)
		return
	case REQReceived:
		m.Reject(c, ReasonTimeout, nil)
		m.event(Event{Kind: EventUnreachable, Conn: c})
		return
	}
	if c.tries--; c.tries > 0 {
		m.stats.Retransmits++
		m.send(c)
		m.arm(c, now, min(2*c.wait, longestWait), c.tries)
		return
	}
	switch c.state {
	case REQSent, REPSent:
		r := REJ{LocalCommID: c.localID, RemoteCommID: c.remoteID, Message: MessageREQ, Reason: ReasonTimeout, ARI: be.AppendUint64(nil, m.cfg.CAGUID)}
		if c.state == REPSent {
			r.Message = MessageREP
		}
		r.Encode(m.datagram(c.peer), c.tid)
		m.event(Event{Kind: EventUnreachable, Conn: c})
		m.forget(c)
	case DREQSent:
		m.timewait(now, c)
	}
}

// Receive takes one MAD from a node. What it answers and means is in Outputs and Events.
func (m *Machine) Receive(now time.Time, from netip.Addr, b []byte) {
	var d MAD
	if err := d.Parse(b); err != nil {
		m.stats.Malformed++
		return
	}
	m.stats.Received++
	var err error
	switch d.Attr() {
	case AttrREQ:
		err = m.request(now, from, &d)
	case AttrREP:
		err = m.reply(now, from, &d)
	case AttrRTU:
		err = m.ready(from, &d)
	case AttrMRA:
		err = m.patience(now, from, &d)
	case AttrREJ:
		err = m.rejected(now, from, &d)
	case AttrDREQ:
		err = m.leave(now, from, &d)
	case AttrDREP:
		err = m.left(now, from, &d)
	default:
		m.stats.Unexpected++
	}
	if err != nil {
		m.stats.Malformed++
	}
}

// conn finds the connection a message is for: by our id, from the right node, and when the connection
// knows the peer's id with that one.
func (m *Machine) conn(from netip.Addr, local, remote uint32) *Conn {
	c := m.conns[local]
	if c == nil || c.peer != from || c.remoteID != 0 && c.remoteID != remote {
		m.stats.Unexpected++
		return nil
	}
	return c
}

func (m *Machine) request(now time.Time, from netip.Addr, d *MAD) error {
	var q REQ
	if err := q.Decode(d); err != nil {
		return err
	}
	if q.LocalCommID == 0 {
		return fmt.Errorf("%w: REQ with comm id 0", ErrMalformed)
	}
	if c := m.peers[idKey{q.CAGUID, q.LocalCommID}]; c != nil {
		if c.peer == from {
			m.duplicate(c, d)
		} else { // else the connection would no longer be found by its peer's ids
			m.refuse(from, d, &q, ReasonDuplicateCommID, nil)
		}
		return nil
	}
	port, ok := ServicePort(q.ServiceID)
	l := m.listeners[port]
	if !ok || l == nil {
		m.refuse(from, d, &q, ReasonInvalidServiceID, nil)
		return nil
	}
	switch {
	case q.Transport != TransportRC:
		m.refuse(from, d, &q, ReasonInvalidTransport, nil)
		return nil
	case !verbsPKeyMatch(q.PKey, m.cfg.PKey):
		m.refuse(from, d, &q, ReasonUnsupported, nil)
		return nil
	case q.PathMTU.Bytes() == 0 || q.PathMTU > m.cfg.MaxMTU:
		m.refuse(from, d, &q, ReasonInvalidMTU, []byte{uint8(m.cfg.MaxMTU)})
		return nil
	case q.Primary.RemoteGID != m.gid || q.Primary.LocalGID.Addr() != from.WithZone(""):
		m.refuse(from, d, &q, ReasonInvalidGID, m.gid[:])
		return nil
	}
	var a Address
	if err := a.Decode(q.PrivateData[:]); err != nil || a.Destination != m.cfg.Addr.WithZone("") {
		m.refuse(from, d, &q, ReasonConsumer, nil)
		return nil
	}
	if old := m.qpns[idKey{q.CAGUID, q.LocalQPN}]; old != nil {
		// The peer has lost the old connection and does not know it.
		m.refuse(from, d, &q, ReasonStale, nil)
		m.Disconnect(now, old)
		if old.state == Gone { // a request that nobody has answered yet: no event follows
			m.event(Event{Kind: EventDisconnected, Conn: old})
		}
		return nil
	}
	if l.pending >= l.backlog || m.halfOpen >= maxHalfOpen {
		m.stats.Dropped++
		return nil
	}
	c, err := m.add(from)
	if err != nil {
		m.stats.Dropped++
		return nil
	}
	c.state, c.tid, c.remoteID, c.guid, c.remoteQPN = REQReceived, d.TID(), q.LocalCommID, q.CAGUID, q.LocalQPN
	c.req, c.addr, c.port = q, a, port
	c.end = min(codeTime(q.Primary.ACKTimeout), longestTimeWait)
	m.peers[idKey{c.guid, c.remoteID}] = c
	m.qpns[idKey{c.guid, c.remoteQPN}] = c
	c.pending, c.half = true, true
	l.pending++
	m.halfOpen++
	m.arm(c, now, halfOpenLife, 1)
	m.event(Event{Kind: EventRequest, Conn: c})
	return nil
}

// duplicate answers a REQ that came again.
func (m *Machine) duplicate(c *Conn, d *MAD) {
	m.stats.Duplicates++
	switch c.state {
	case REQReceived:
		(&MRA{LocalCommID: c.localID, RemoteCommID: c.remoteID, Message: MessageREQ, ServiceTimeout: patienceCode}).Encode(m.datagram(c.peer), d.TID())
	case REPSent:
		m.send(c)
	case TimeWait, DREQSent:
		(&REJ{LocalCommID: c.localID, RemoteCommID: c.remoteID, Message: MessageREQ, Reason: ReasonStale}).Encode(m.datagram(c.peer), d.TID())
	}
}

// refuse answers a REQ that has no connection.
func (m *Machine) refuse(to netip.Addr, d *MAD, q *REQ, reason uint16, ari []byte) {
	m.stats.Refused++
	if m.cfg.Refused != nil {
		m.cfg.Refused(to, q, reason)
	}
	(&REJ{RemoteCommID: q.LocalCommID, Message: MessageREQ, Reason: reason, ARI: ari}).Encode(m.datagram(to), d.TID())
}

func (m *Machine) reply(now time.Time, from netip.Addr, d *MAD) error {
	var p REP
	if err := p.Decode(d); err != nil {
		return err
	}
	c := m.conn(from, p.RemoteCommID, p.LocalCommID)
	if c == nil {
		return nil
	}
	switch c.state {
	case REQSent:
		if p.LocalCommID == 0 {
			return fmt.Errorf("%w: REP with comm id 0", ErrMalformed)
		}
		if m.qpns[idKey{p.CAGUID, p.LocalQPN}] != nil {
			r := REJ{LocalCommID: c.localID, RemoteCommID: p.LocalCommID, Message: MessageREP, Reason: ReasonStale}
			r.Encode(m.datagram(c.peer), c.tid)
			m.event(Event{Kind: EventRejected, Conn: c, Reject: r})
			m.forget(c)
			return nil
		}
		c.state, c.remoteID, c.remoteQPN, c.guid, c.rep = REPReceived, p.LocalCommID, p.LocalQPN, p.CAGUID, p
		m.qpns[idKey{c.guid, c.remoteQPN}] = c
		m.disarm(c)
		m.event(Event{Kind: EventReply, Conn: c})
	case Established: // our RTU was lost
		m.stats.Duplicates++
		if c.active {
			m.sendRTU(c)
		}
	case REPReceived:
		m.stats.Duplicates++
	default:
		m.stats.Unexpected++
	}
	return nil
}

func (m *Machine) ready(from netip.Addr, d *MAD) error {
	var r RTU
	if err := r.Decode(d); err != nil {
		return err
	}
	c := m.conn(from, r.RemoteCommID, r.LocalCommID)
	switch {
	case c == nil:
	case c.state == REPSent:
		m.establish(c)
	case c.state == Established && !c.active:
		m.stats.Duplicates++
	default:
		m.stats.Unexpected++
	}
	return nil
}

func (m *Machine) patience(now time.Time, from netip.Addr, d *MAD) error {
	var a MRA
	if err := a.Decode(d); err != nil {
		return err
	}
	c := m.conn(from, a.RemoteCommID, a.LocalCommID)
	switch {
	case c == nil:
	case c.state == REQSent && a.Message == MessageREQ, c.state == REPSent && a.Message == MessageREP:
		m.arm(c, now, min(codeTime(a.ServiceTimeout), longestPatience)+firstWait, c.tries)
		c.wait = firstWait
	default:
		m.stats.Unexpected++
	}
	return nil
}

func (m *Machine) rejected(now time.Time, from netip.Addr, d *MAD) error {
	var r REJ
	if err := r.Decode(d); err != nil {
		return err
	}
	var c *Conn
	if r.RemoteCommID == 0 && r.Reason == ReasonTimeout && len(r.ARI) >= 8 {
		// The active side gave up before it knew our id.
		c = m.peers[idKey{be.Uint64(r.ARI), r.LocalCommID}]
	} else {
		c = m.conns[r.RemoteCommID]
		// A node that refuses out of hand may give no id of its own.
		if c != nil && c.remoteID != 0 && r.LocalCommID != 0 && c.remoteID != r.LocalCommID {
			c = nil
		}
	}
	if c == nil || c.peer != from || c.state >= DREQSent {
		m.stats.Unexpected++
		return nil
	}
	e := Event{Kind: EventRejected, Conn: c}
	if r.Reason == ReasonInvalidMTU && len(r.ARI) > 0 && verbs.MTU(r.ARI[0]).Bytes() > 0 {
		e.MTU = verbs.MTU(r.ARI[0])
	}
	r.ARI = nil
	e.Reject = r
	m.event(e)
	if c.state == Established {
		m.timewaitQuietly(now, c)
		return nil
	}
	m.forget(c)
	return nil
}

func (m *Machine) leave(now time.Time, from netip.Addr, d *MAD) error {
	var q DREQ
	if err := q.Decode(d); err != nil {
		return err
	}
	c := m.conns[q.RemoteCommID]
	if c == nil || c.peer != from || c.remoteID != q.LocalCommID {
		// The peer still knows a connection that we do not: let it go in peace.
		m.stats.Unexpected++
		(&DREP{LocalCommID: q.RemoteCommID, RemoteCommID: q.LocalCommID}).Encode(m.datagram(from), d.TID())
		return nil
	}
	if q.RemoteQPN != c.localQPN {
		m.stats.Unexpected++
		return nil
	}
	switch c.state {
	case REPReceived, REPSent, Established, DREQSent:
		m.timewait(now, c)
	case TimeWait:
		m.stats.Duplicates++
	default:
		m.stats.Unexpected++
		return nil
	}
	(&DREP{LocalCommID: c.localID, RemoteCommID: c.remoteID}).Encode(m.datagram(c.peer), d.TID())
	return nil
}

func (m *Machine) left(now time.Time, from netip.Addr, d *MAD) error {
	var p DREP
	if err := p.Decode(d); err != nil {
		return err
	}
	c := m.conn(from, p.RemoteCommID, p.LocalCommID)
	switch {
	case c == nil:
	case c.state == DREQSent:
		m.timewait(now, c)
	case c.state == TimeWait:
		m.stats.Duplicates++
	default:
		m.stats.Unexpected++
	}
	return nil
}

func (m *Machine) timewait(now time.Time, c *Conn) {
	m.event(Event{Kind: EventDisconnected, Conn: c})
	m.timewaitQuietly(now, c)
}

func (m *Machine) timewaitQuietly(now time.Time, c *Conn) {
	m.settle(c, true)
	c.state = TimeWait
	m.arm(c, now, c.end, 1)
}

// add makes a connection under a random local id.
func (m *Machine) add(peer netip.Addr) (*Conn, error) {
	if len(m.conns) >= maxConns {
		return nil, ErrFull
	}
	m.created++
	c := &Conn{peer: peer, order: m.created}
	for c.localID == 0 || m.conns[c.localID] != nil {
		c.localID = uint32(m.cfg.Random())
	}
	m.conns[c.localID] = c
	return c, nil
}

// settle takes a passive connection out of its listener's backlog; with established also out of the half-open count.
func (m *Machine) settle(c *Conn, established bool) {
	if c.pending {
		c.pending = false
		if l := m.listeners[c.port]; l != nil && l.pending > 0 {
			l.pending--
		}
	}
	if c.half && established {
		c.half = false
		m.halfOpen--
	}
}

func (m *Machine) forget(c *Conn) {
	m.settle(c, true)
	c.state = Gone
	delete(m.conns, c.localID)
	if k := (idKey{c.guid, c.remoteID}); m.peers[k] == c {
		delete(m.peers, k)
	}
	if k := (idKey{c.guid, c.remoteQPN}); m.qpns[k] == c {
		delete(m.qpns, k)
	}
}

func (m *Machine) event(e Event) { m.events = append(m.events, e) }

func (m *Machine) datagram(to netip.Addr) *MAD {
	m.stats.Sent++
	m.out = append(m.out, Datagram{To: to})
	return &m.out[len(m.out)-1].MAD
}

// send queues c's message, for the first time or again.
func (m *Machine) send(c *Conn) { *m.datagram(c.peer) = c.mad }

func (m *Machine) arm(c *Conn, now time.Time, wait time.Duration, tries int) {
	c.wait, c.tries, c.deadline = wait, tries, now.Add(wait)
	if m.next.IsZero() || c.deadline.Before(m.next) {
		m.next = c.deadline
	}
}

func (m *Machine) disarm(c *Conn) { c.deadline = time.Time{} }

// codeTime is the time of a CM timeout code: the kernel's reading, 2^(code-8) ms.
func codeTime(code uint8) time.Duration {
	return time.Millisecond << (max(code, 8) - 8)
}

// verbsPKeyMatch compares partition keys: the low 15 bits agree and one side at least is a full member
// (IBA vol. 1, 10.9.3).
func verbsPKeyMatch(a, b uint16) bool { return (a^b)&0x7fff == 0 && (a|b)&0x8000 != 0 }

// Conns are the connections that the machine knows, in order of creation.
func (m *Machine) Conns() []*Conn {
	cs := make([]*Conn, 0, len(m.conns))
	for _, c := range m.conns {
		cs = append(cs, c)
	}
	slices.SortFunc(cs, func(a, b *Conn) int { return cmp.Compare(a.order, b.order) })
	return cs
}
