// Package softroce is an RDMA device in userspace: reliable connections of RoCE v2 over a plain UDP socket, wire-compatible with the
// kernel's rdma_rxe and with hardware. It needs no kernel module and no privileges. A Device implements verbs.Context, and
// its Connector connects queue pairs by the InfiniBand connection manager with RDMA/CM addressing.
//
// Rooms: packet is the wire format, rc the reliable transport and ibcm the connection manager as pure machines, udp the socket. This
// package owns what they share: memory, queues, time, the lock and who drives it all (engine.go). docs/softroce.md tells the rest.
package softroce

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/softroce/ibcm"
	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/softroce/rc"
	"srp-initiator/rdma/softroce/udp"
	"srp-initiator/rdma/verbs"
)

// Device is one userspace RoCE v2 device with one port and one address.
type Device struct {
	name  string
	addr  netip.Addr
	gid   verbs.GID
	guid  uint64
	scope uint32 // interface index of a link-local address
	apart bool   // peers run on other CPUs than this process
	mtu   verbs.MTU
	netif string
	link  Link
	start time.Time

	random  func() uint64
	capture *capture
	events  chan verbs.AsyncEvent
	refused chan cm.Refusal
	done    chan struct{}                   // closed by Close
	pumped  chan struct{}                   // closed when the pump has ended
	reaper  atomic.Pointer[completionQueue] // whose owner took entries last

	mu       sync.Mutex // guards all that follows, the machines included
	closed   bool
	qps      map[uint32]*queuePair
	lastQP   *queuePair   // that got the last packet
	order    []*queuePair // the same, in order of creation
	cqs      map[*completionQueue]struct{}
	channels map[*channel]struct{}
	pds      int
	recent   []uint32 // numbers of destroyed queue pairs, a ring
	recentAt int
	memory   memoryTable
	cm       *ibcm.Machine
	peers    map[netip.Addr]*udp.Destination
	gsiPSN   packet.PSN
	tx       transmitter
	pkt      packet.Packet

	touched   []*queuePair // got packets in this batch
	blocked   []*queuePair // found the arena full
	riders    []*queuePair // have sent requests that an acknowledgement may travel with
	overrun   []*completionQueue
	notify    []*completionQueue
	nextTimer rc.Time // no timer is earlier
	pumpAt    rc.Time // when the pump looks at the latest
	armed     bool    // the pump wakes for datagrams
	deferred  bool    // PostSend has left packets in the arena
	woken     bool    // the link has woken a leader, and PostSend has sent nothing since
	// deferAtMost is how many it leaves there in this turn, where apart.
	deferAtMost int
	came        int // messages received in this turn
	// sentBehind is the poll in vain behind which PostSend has sent something.
	sentBehind rc.Time
	polls      uint64 // turns driven by pollers
	waiting    int    // armed completion queues
	drivers    int    // completion queues whose owners poll on
	led        bool   // a leader waits for the link
	resigned   *sync.Cond
	silent     rc.Time // until then nothing is sent or received; 0: never silenced
	stats      Stats
}

// Option changes what Open makes.
type Option func(*options)

type options struct {
	udp     udp.Options
	capture io.Writer
	guid    uint64
	random  func() uint64
	mtu     verbs.MTU
}

// WithCapture writes every packet, sent or received, to w as pcapng, with the IP and UDP headers that it has on the wire.
func WithCapture(w io.Writer) Option { return func(o *options) { o.capture = w } }

// WithoutOffload leaves UDP_SEGMENT and UDP_GRO alone.
func WithoutOffload() Option {
	return func(o *options) { o.udp = udp.Options{NoGSO: true, NoGRO: true} }
}

// WithNodeGUID sets the GUID by which peers tell this node from others. The default is random, for each Open.
func WithNodeGUID(guid uint64) Option { return func(o *options) { o.guid = guid } }

// WithRandom replaces the cryptographic source of keys, queue pair numbers and packet sequence numbers, for tests that must repeat.
func WithRandom(random func() uint64) Option { return func(o *options) { o.random = random } }

// WithMTU bounds the path MTU below what the interface carries.
func WithMTU(m verbs.MTU) Option { return func(o *options) { o.mtu = m } }

// Open opens a device on UDP port 4791 of addr, an address of this machine. The zero address takes a free one of 127.0.0.0/8. A port
// that is taken is a *udp.PortInUseError.
func Open(addr netip.Addr, opts ...Option) (*Device, error) {
	var o options
	for _, f := range opts {
		f(&o)
	}
	var s *udp.Socket
	var err error
	if addr.IsValid() {
		s, err = udp.Open(addr, o.udp)
	} else {
		s, err = udp.OpenLoopback(o.udp)
	}
	if err != nil {
		return nil, fmt.Errorf("softroce: %w", NameLimit(err))
	}
	mtu, netif, err := linkMTU(s.Addr())
	if err != nil {
		_ = s.Close()
		return nil, fmt.Errorf("softroce: %w", err)
	}
	d := newDevice(s, mtu, o)
	d.netif = netif
	d.scope = udp.Scope(s.Addr())
	d.run()
	return d, nil
}

// OpenLink opens a device on a link that carries path MTU mtu.
func OpenLink(link Link, mtu verbs.MTU, opts ...Option) (*Device, error) {
	var o options
	for _, f := range opts {
		f(&o)
	}
	if mtu.Bytes() == 0 {
		return nil, fmt.Errorf("softroce: path MTU code %d is none of 1 to 5", mtu)
	}
	d := newDevice(link, mtu, o)
	d.run()
	return d, nil
}

func newDevice(link Link, mtu verbs.MTU, o options) *Device {
	if o.random == nil {
		o.random = cryptoRandom
	}
	if o.mtu != 0 {
		mtu = min(mtu, o.mtu)
	}
	d := &Device{
		name: "softroce:" + link.Addr().String(), addr: link.Addr().WithZone(""), gid: verbs.GIDFromAddr(link.Addr()), guid: o.guid, mtu: mtu,
		link: link, start: time.Now().Add(-time.Second), random: o.random,
		events: make(chan verbs.AsyncEvent, maxAsync), refused: make(chan cm.Refusal, maxRefusals), done: make(chan struct{}), pumped: make(chan struct{}),
		qps: map[uint32]*queuePair{}, cqs: map[*completionQueue]struct{}{}, channels: map[*channel]struct{}{},
		memory: memoryTable{byIndex: map[uint32]*keyed{}}, peers: map[netip.Addr]*udp.Destination{},
		nextTimer: rc.Never, pumpAt: rc.Never,
		// On one CPU a peer of the same machine can do nothing until this process rests.
		apart: !link.Addr().IsLoopback() || runtime.NumCPU() > 1,
	}
	if d.guid == 0 {
		d.guid = ibcm.NewCAGUID(d.random())
	}
	d.resigned = sync.NewCond(&d.mu)
	d.tx.init()
	d.cm = ibcm.New(ibcm.Config{Addr: d.addr, CAGUID: d.guid, PKey: packet.DefaultPKey, MaxMTU: mtu, Random: d.random, Refused: d.noteRefusal})
	if o.capture != nil {
		d.capture = newCapture(o.capture)
	}
	return d
}

// Refusals has the connection requests that the device refused by itself: no listener hears of those. What nobody takes in time is dropped.
func (d *Device) Refusals() <-chan cm.Refusal { return d.refused }

func (d *Device) noteRefusal(from netip.Addr, q *ibcm.REQ, reason uint16) {
	select {
	case d.refused <- cm.Refusal{From: from, Reason: reason, AskedMTU: q.PathMTU, OwnMTU: d.mtu}:
	default:
	}
}

func (d *Device) run() {
	d.armed = true
	d.link.Arm()
	go d.pump()
}

func cryptoRandom() uint64 {
	var b [8]byte
	rand.Read(b[:]) // never fails: crypto/rand ends the program instead
	return binary.LittleEndian.Uint64(b[:])
}

// Addr is the device's address.
func (d *Device) Addr() netip.Addr { return d.addr }

// Name is "softroce:" and the address.
func (d *Device) Name() string { return d.name }

// Provider is "softroce".
func (d *Device) Provider() string { return "softroce" }

// QueryDevice reports the limits of limits.go.
func (d *Device) QueryDevice() (verbs.DeviceAttr, error) {
	return verbs.DeviceAttr{
		FirmwareVersion: "softroce", NodeGUID: d.guid, SysImageGUID: d.guid, MaxMRSize: 1 << 62, MaxQP: maxQP, MaxQPWR: maxQPWR,
		MaxSGE: maxSGE, MaxSGERead: maxSGE, MaxCQ: maxCQ, MaxCQE: maxCQE, MaxMR: maxKeys, MaxMW: maxKeys, MaxPD: maxPD,
		MaxQPReadAtom: maxReads, MaxQPInitRdAtom: maxReads, LocalACKDelay: 15, PhysPorts: 1, CompVectors: compVectors,
	}, nil
}

func checkPort(port uint8) error {
	if port != 1 {
		return fmt.Errorf("softroce: port %d, the device has port 1 only: %w", port, syscall.EINVAL)
	}
	return nil
}

// QueryPort reports the one port, which is always up; ActiveMTU is what the address's interface carries.
func (d *Device) QueryPort(port uint8) (verbs.PortAttr, error) {
	if err := checkPort(port); err != nil {
		return verbs.PortAttr{}, err
	}
	return verbs.PortAttr{
		State: verbs.PortActive, MaxMTU: verbs.MTU4096, ActiveMTU: d.mtu, LinkLayer: verbs.LinkEthernet, GIDTableLen: 1, PKeyTblLen: 1,
		MaxMsgSize: maxMessage, ActiveSpeed: 1, ActiveWidth: 1, PhysState: 5, // 2.5 Gb/s and link up, as rxe says
	}, nil
}

// QueryGID reports the one GID, the device's address.
func (d *Device) QueryGID(port uint8, index int) (verbs.GIDEntry, error) {
	if err := checkPort(port); err != nil {
		return verbs.GIDEntry{}, err
	}
	if index != 0 {
		return verbs.GIDEntry{}, verbs.ErrNoEntry
	}
	return verbs.GIDEntry{GID: d.gid, Type: verbs.GIDTypeRoCEv2}, nil
}

// QueryPKey reports the one P_Key, full membership of the default partition.
func (d *Device) QueryPKey(port uint8, index int) (uint16, error) {
	if err := checkPort(port); err != nil {
		return 0, err
	}
	if index != 0 {
		return 0, verbs.ErrNoEntry
	}
	return packet.DefaultPKey, nil
}

// protectionDomain implements verbs.ProtectionDomain.
type protectionDomain struct {
	d     *Device
	users int // regions, windows and queue pairs
	gone  bool
}

// AllocPD makes a protection domain.
func (d *Device) AllocPD() (verbs.ProtectionDomain, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, verbs.ErrClosed
	}
	if d.pds >= maxPD {
		return nil, fmt.Errorf("softroce: %d protection domains in use: %w", maxPD, syscall.ENOMEM)
	}
	d.pds++
	return &protectionDomain{d: d}, nil
}

func (pd *protectionDomain) Context() verbs.Context { return pd.d }

// usable is checked with Device.mu held before something is added to the domain.
func (pd *protectionDomain) usable() error {
	switch {
	case pd.d.closed:
		return verbs.ErrClosed
	case pd.gone:
		return fmt.Errorf("softroce: the protection domain was deallocated: %w", syscall.EINVAL)
	}
	return nil
}

func (pd *protectionDomain) Dealloc() error {
	d := pd.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if pd.gone || d.closed {
		return verbs.ErrClosed
	}
	if pd.users > 0 {
		return fmt.Errorf("softroce: deallocate protection domain: %d regions, windows and queue pairs use it: %w", pd.users, syscall.EBUSY)
	}
	pd.gone = true
	d.pds--
	return nil
}

// NextAsyncEvent waits for a queue pair that failed by itself or a completion queue that overflowed.
func (d *Device) NextAsyncEvent() (verbs.AsyncEvent, error) {
	select {
	case e := <-d.events:
		return e, nil
	case <-d.done:
		return verbs.AsyncEvent{}, verbs.ErrClosed
	}
}

// Close says goodbye to every peer, once and without waiting for answers, and closes the device.
func (d *Device) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return verbs.ErrClosed
	}
	now := d.now()
	for _, q := range d.order {
		q.fail(now)
	}
	d.leaveAll(now)
	d.flush(now)
	d.closed = true
	for _, q := range d.order {
		q.gone = true
	}
	clear(d.qps)
	d.lastQP = nil
	d.order = nil
	d.memory.clear()
	for c := range d.cqs {
		c.retire()
	}
	for ch := range d.channels {
		ch.end(false)
	}
	clear(d.channels)
	close(d.done)
	d.unlock()
	// The pump and the leader end before the descriptors do: they may be inside a call on them.
	d.link.SetDeadline(time.Unix(1, 0))
	<-d.pumped
	d.mu.Lock()
	defer d.mu.Unlock()
	for d.led {
		d.resigned.Wait()
	}
	err := d.link.Close()
	if d.capture != nil {
		if cerr := d.capture.err; err == nil {
			err = cerr
		}
	}
	return err
}
