package verbs

import "net/netip"

// Context is one opened RDMA device. It is safe for concurrent use. Close
// destroys whatever was left open; callers are expected to have destroyed
// their queue pairs, completion queues, regions and domains before.
type Context interface {
	// Name is the device's name, "rxe0", "mlx5_0" or "softroce:127.0.0.1".
	Name() string
	// Provider names the code that serves the device: "rxe", "mlx5", "mlx4", "softroce".
	Provider() string
	QueryDevice() (DeviceAttr, error)
	// QueryPort reports port, counted from 1.
	QueryPort(port uint8) (PortAttr, error)
	// QueryGID reports entry index of port's GID table. A hole in the table is ErrNoEntry.
	QueryGID(port uint8, index int) (GIDEntry, error)
	// QueryPKey reports entry index of port's P_Key table. Past its end: ErrNoEntry.
	QueryPKey(port uint8, index int) (uint16, error)
	AllocPD() (ProtectionDomain, error)
	CreateCompletionChannel() (CompletionChannel, error)
	CreateCQ(CQInit) (CompletionQueue, error)
	// NextAsyncEvent blocks until the device reports an asynchronous event.
	// After Close it returns ErrClosed.
	NextAsyncEvent() (AsyncEvent, error)
	Close() error
}

// DeviceAttr holds the limits of a device (struct ib_uverbs_query_device_resp).
type DeviceAttr struct {
	FirmwareVersion string
	NodeGUID        uint64 // host order
	SysImageGUID    uint64
	VendorID        uint32
	VendorPartID    uint32
	HWVersion       uint32
	MaxMRSize       uint64 // bytes
	MaxQP           int
	MaxQPWR         int // work requests per work queue
	MaxSGE          int // scatter/gather entries per work request
	MaxSGERead      int // the same for RDMA READ
	MaxCQ           int
	MaxCQE          int // entries per completion queue
	MaxMR           int
	MaxMW           int
	MaxPD           int
	MaxQPReadAtom   int   // RDMA READs outstanding as responder, per QP
	MaxQPInitRdAtom int   // the same as requester
	LocalACKDelay   uint8 // 4.096 us * 2^n
	PhysPorts       int
	CompVectors     int // completion vectors
}

// PortState is the logical port state (IBA vol. 1, PortInfo:PortState).
type PortState uint8

const (
	PortNop PortState = iota
	PortDown
	PortInit
	PortArmed
	PortActive
	PortActiveDefer
)

// LinkLayer tells InfiniBand from Ethernet.
type LinkLayer uint8

const (
	LinkUnspecified LinkLayer = iota
	LinkInfiniBand
	LinkEthernet
)

// MTU is a path MTU code: 1 to 5 for 256 to 4096 bytes (IBA vol. 1, enum ib_mtu).
type MTU uint8

const (
	MTU256 MTU = iota + 1
	MTU512
	MTU1024
	MTU2048
	MTU4096
)

// Bytes is the MTU in bytes, 0 for a code that is none.
func (m MTU) Bytes() int {
	if m < MTU256 || m > MTU4096 {
		return 0
	}
	return 128 << m
}

// PortAttr describes one port (struct ib_uverbs_query_port_resp).
type PortAttr struct {
	State       PortState
	MaxMTU      MTU
	ActiveMTU   MTU
	LinkLayer   LinkLayer
	LID         uint16
	SMLID       uint16
	GIDTableLen int
	PKeyTblLen  int
	MaxMsgSize  uint32 // bytes
	ActiveSpeed uint8  // enum ib_port_speed
	ActiveWidth uint8  // enum ib_port_width
	PhysState   uint8
}

// GID is a 128-bit global identifier, in network order.
type GID [16]byte

// Addr is the GID as an IP address; IPv4-mapped GIDs become IPv4 addresses.
func (g GID) Addr() netip.Addr { return netip.AddrFrom16(g).Unmap() }

// GIDFromAddr is the RoCE v2 GID of an IP address.
func GIDFromAddr(a netip.Addr) GID { return GID(a.As16()) }

// String formats the GID as the kernel does in sysfs: eight groups of four digits.
func (g GID) String() string {
	const hex = "0123456789abcdef"
	b := make([]byte, 0, 39)
	for i, v := range g {
		if i > 0 && i%2 == 0 {
			b = append(b, ':')
		}
		b = append(b, hex[v>>4], hex[v&15])
	}
	return string(b)
}

// IsZero reports an unused table entry.
func (g GID) IsZero() bool { return g == GID{} }

// GIDType tells how packets under a GID are framed.
type GIDType uint8

const (
	GIDTypeIB GIDType = iota
	GIDTypeRoCEv1
	GIDTypeRoCEv2
)

// GIDEntry is one entry of a port's GID table.
type GIDEntry struct {
	GID    GID
	Type   GIDType
	Index  int
	Netdev string // "" on InfiniBand and softroce
}

// AsyncEventType is enum ib_event_type.
type AsyncEventType uint32

const (
	EventCQError         AsyncEventType = 0
	EventQPFatal         AsyncEventType = 1
	EventQPRequestError  AsyncEventType = 2
	EventQPAccessError   AsyncEventType = 3
	EventCommEstablished AsyncEventType = 4
	EventSQDrained       AsyncEventType = 5
	EventDeviceFatal     AsyncEventType = 8
	EventPortActive      AsyncEventType = 9
	EventPortError       AsyncEventType = 10
	EventLIDChange       AsyncEventType = 11
	EventPKeyChange      AsyncEventType = 12
	EventSMChange        AsyncEventType = 13
	EventQPLastWQE       AsyncEventType = 16
	EventGIDChange       AsyncEventType = 18
)

// AsyncEvent is one asynchronous event. QP or CQ is set for events about one;
// Port for events about a port.
type AsyncEvent struct {
	Type AsyncEventType
	QP   QueuePair
	CQ   CompletionQueue
	Port uint8
}
