package ucm

import (
	"encoding/binary"
	"net/netip"

	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/verbs"
)

// Command numbers of <rdma/rdma_user_cm.h>.
const (
	cmdCreateID     = 0
	cmdDestroyID    = 1
	cmdResolveRoute = 4
	cmdConnect      = 6
	cmdListen       = 7
	cmdAccept       = 8
	cmdReject       = 9
	cmdDisconnect   = 10
	cmdInitQPAttr   = 11
	cmdGetEvent     = 12
	cmdSetOption    = 14
	cmdQuery        = 19
	cmdBind         = 20
	cmdResolveAddr  = 21
)

// Port spaces (enum rdma_ucm_port_space) and the RC queue pair type.
const (
	portSpaceIB  = 0x013f
	portSpaceTCP = 0x0106
	qpTypeRC     = 2
)

// Options of QUERY, and of SET_OPTION at level RDMA_OPTION_ID.
const (
	queryAddr = 0
	queryPath = 1
	queryGID  = 2

	optionReuseAddr  = 1
	optionAFOnly     = 2
	optionACKTimeout = 3
)

// Events (enum rdma_cm_event_type).
const (
	evAddrResolved    = 0
	evAddrError       = 1
	evRouteResolved   = 2
	evRouteError      = 3
	evConnectRequest  = 4
	evConnectResponse = 5
	evConnectError    = 6
	evUnreachable     = 7
	evRejected        = 8
	evEstablished     = 9
	evDisconnected    = 10
	evDeviceRemoval   = 11
	evAddrChange      = 14
	evTimewaitExit    = 15
)

// Sizes in bytes of the command and response structures; the layout test
// holds them, and the offsets below, against the header.
const (
	sizeHdr          = 8
	sizeCreateID     = 24
	sizeDestroyID    = 16
	sizeResolveRoute = 8
	sizeConnect      = 288
	sizeListen       = 8
	sizeAccept       = 296
	sizeReject       = 264
	sizeDisconnect   = 4
	sizeInitQPAttr   = 16
	sizeGetEvent     = 8
	sizeSetOption    = 24
	sizeQuery        = 16
	sizeBind         = 136
	sizeResolveAddr  = 272
	sizeConnParam    = 272

	sizeCreateIDResp  = 4
	sizeDestroyIDResp = 4
	sizeQueryAddrResp = 280
	sizeQueryPathHdr  = 8
	sizePathRecData   = 72
	sizeQPAttr        = 144
	sizeEvent         = 336

	sizeSockaddrStorage = 128
)

const (
	afInet  = 2
	afInet6 = 10
	afIB    = 27
)

var (
	host = binary.NativeEndian
	wire = binary.BigEndian
)

// putSockaddrIP writes the C socket address of a into b, which is zero and at
// least 28 bytes, and returns its size. The scope is the interface index of a
// link-local IPv6 address.
func putSockaddrIP(b []byte, a netip.AddrPort, scope uint32) int {
	addr := a.Addr()
	if addr.Is4() || addr.Is4In6() {
		host.PutUint16(b[0:], afInet)
		wire.PutUint16(b[2:], a.Port())
		v4 := addr.Unmap().As4()
		copy(b[4:], v4[:])
		return 16
	}
	host.PutUint16(b[0:], afInet6)
	wire.PutUint16(b[2:], a.Port())
	v6 := addr.As16()
	copy(b[8:], v6[:])
	host.PutUint32(b[24:], scope)
	return 28
}

// putSockaddrIB writes a struct sockaddr_ib (include/rdma/ib.h): the GID, P_Key and service
// id of an AF_IB destination, and returns its size. The mask makes every bit of the service id count.
func putSockaddrIB(b []byte, a cm.Addr) int {
	host.PutUint16(b[0:], afIB)
	wire.PutUint16(b[2:], a.PKey)
	// b[4:8] flow label 0
	copy(b[8:24], a.GID[:])
	wire.PutUint64(b[24:], a.ServiceID)
	wire.PutUint64(b[32:], ^uint64(0))
	// b[40:48] scope id 0
	return 48
}

// getSockaddr reads a socket address of the kernel. An unknown family is the zero Addr.
func getSockaddr(b []byte) cm.Addr {
	switch host.Uint16(b) {
	case afInet:
		return cm.Addr{IP: netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), wire.Uint16(b[2:]))}
	case afInet6:
		return cm.Addr{IP: netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[8:24])).Unmap(), wire.Uint16(b[2:]))}
	case afIB:
		return cm.Addr{GID: verbs.GID(b[8:24]), PKey: wire.Uint16(b[2:]), ServiceID: wire.Uint64(b[24:])}
	}
	return cm.Addr{}
}

// putConnParam writes a struct rdma_ucm_conn_param into b; valid is 0 for the accept
// that only sends the RTU.
func putConnParam(b []byte, p *cm.ConnParam, qpn uint32) {
	host.PutUint32(b[0:], qpn)
	copy(b[8:264], p.PrivateData)
	b[264] = byte(len(p.PrivateData))
	b[266] = p.ResponderResources
	b[267] = p.InitiatorDepth
	if p.FlowControl {
		b[268] = 1
	}
	b[269] = p.RetryCount
	b[270] = p.RNRRetryCount
	b[271] = 1
}

// event is a struct rdma_ucm_event_resp, copied out of the response page.
type event struct {
	uid    uint64
	id     uint32
	kind   uint32
	status int32
	param  cm.ConnParam // PrivateData has the CM field's fixed size
}

func parseEvent(b []byte) event {
	c := b[20:]
	n := min(int(c[264]), 256)
	return event{
		uid:    host.Uint64(b[0:]),
		id:     host.Uint32(b[8:]),
		kind:   host.Uint32(b[12:]),
		status: int32(host.Uint32(b[16:])),
		param: cm.ConnParam{
			PrivateData: append([]byte(nil), c[8:8+n]...),
			// The kernel swaps the two (cm_format_req_event, cm_format_rep_event): its responder_resources are the READs that
			// this side should be ready to serve. Swapped back they are what the peer's message said.
			ResponderResources: c[267],
			InitiatorDepth:     c[266],
			FlowControl:        c[268] != 0,
			RetryCount:         c[269],
			RNRRetryCount:      c[270],
		},
	}
}

// qpAttr reads a struct ib_uverbs_qp_attr, which INIT_QP_ATTR answers with.
func qpAttr(b []byte) (verbs.QPAttr, verbs.QPAttrMask) {
	ah := b[40:72]
	return verbs.QPAttr{
		State:   verbs.QPState(host.Uint32(b[4:])),
		PathMTU: verbs.MTU(host.Uint32(b[12:])),
		RQPSN:   host.Uint32(b[24:]) & 0xffffff,
		SQPSN:   host.Uint32(b[28:]) & 0xffffff,
		DestQPN: host.Uint32(b[32:]),
		Access:  verbs.AccessFlags(host.Uint32(b[36:])),
		AV: verbs.AddressVector{
			DGID:         verbs.GID(ah[0:16]),
			FlowLabel:    host.Uint32(ah[16:]),
			SGIDIndex:    ah[20],
			HopLimit:     ah[21],
			TrafficClass: ah[22],
			DLID:         host.Uint16(ah[24:]),
			SL:           ah[26],
			SrcPathBits:  ah[27],
			StaticRate:   ah[28],
			IsGlobal:     ah[29] != 0,
			Port:         ah[30],
		},
		PKeyIndex:       host.Uint16(b[124:]),
		MaxRdAtomic:     b[130],
		MaxDestRdAtomic: b[131],
		MinRNRTimer:     b[132],
		Port:            b[133],
		Timeout:         b[134],
		RetryCount:      b[135],
		RNRRetry:        b[136],
	}, verbs.QPAttrMask(host.Uint32(b[0:]))
}
