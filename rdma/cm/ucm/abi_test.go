package ucm

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"srp-initiator/internal/require"
	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/verbs"
)

// layout is what the code assumes of <rdma/rdma_user_cm.h>: C expression = value.
var layout = map[string]int{
	"sizeof(struct rdma_ucm_cmd_hdr)": sizeHdr, "sizeof(struct rdma_ucm_create_id)": sizeCreateID,
	"sizeof(struct rdma_ucm_destroy_id)": sizeDestroyID, "sizeof(struct rdma_ucm_resolve_route)": sizeResolveRoute,
	"sizeof(struct rdma_ucm_connect)": sizeConnect, "sizeof(struct rdma_ucm_listen)": sizeListen,
	"sizeof(struct rdma_ucm_accept)": sizeAccept, "sizeof(struct rdma_ucm_reject)": sizeReject,
	"sizeof(struct rdma_ucm_disconnect)": sizeDisconnect, "sizeof(struct rdma_ucm_init_qp_attr)": sizeInitQPAttr,
	"sizeof(struct rdma_ucm_get_event)": sizeGetEvent, "sizeof(struct rdma_ucm_set_option)": sizeSetOption,
	"sizeof(struct rdma_ucm_query)": sizeQuery, "sizeof(struct rdma_ucm_bind)": sizeBind,
	"sizeof(struct rdma_ucm_resolve_addr)": sizeResolveAddr, "sizeof(struct rdma_ucm_conn_param)": sizeConnParam,
	"sizeof(struct rdma_ucm_create_id_resp)": sizeCreateIDResp, "sizeof(struct rdma_ucm_destroy_id_resp)": sizeDestroyIDResp,
	"sizeof(struct rdma_ucm_query_addr_resp)": sizeQueryAddrResp, "sizeof(struct rdma_ucm_query_path_resp)": sizeQueryPathHdr,
	"sizeof(struct ib_path_rec_data)": sizePathRecData, "sizeof(struct ib_uverbs_qp_attr)": sizeQPAttr,
	"sizeof(struct rdma_ucm_event_resp)": sizeEvent, "sizeof(struct __kernel_sockaddr_storage)": sizeSockaddrStorage,
	"sizeof(struct sockaddr_ib)": 48,

	"offsetof(struct rdma_ucm_create_id, response)": 8, "offsetof(struct rdma_ucm_create_id, ps)": 16, "offsetof(struct rdma_ucm_create_id, qp_type)": 18,
	"offsetof(struct rdma_ucm_destroy_id, id)": 8, "offsetof(struct rdma_ucm_resolve_route, timeout_ms)": 4,
	"offsetof(struct rdma_ucm_connect, id)": 272, "offsetof(struct rdma_ucm_listen, backlog)": 4,
	"offsetof(struct rdma_ucm_accept, uid)": 0, "offsetof(struct rdma_ucm_accept, conn_param)": 8, "offsetof(struct rdma_ucm_accept, id)": 280,
	"offsetof(struct rdma_ucm_reject, private_data_len)": 4, "offsetof(struct rdma_ucm_reject, reason)": 5, "offsetof(struct rdma_ucm_reject, private_data)": 8,
	"offsetof(struct rdma_ucm_init_qp_attr, id)": 8, "offsetof(struct rdma_ucm_init_qp_attr, qp_state)": 12,
	"offsetof(struct rdma_ucm_set_option, id)": 8, "offsetof(struct rdma_ucm_set_option, level)": 12, "offsetof(struct rdma_ucm_set_option, optname)": 16, "offsetof(struct rdma_ucm_set_option, optlen)": 20,
	"offsetof(struct rdma_ucm_query, id)": 8, "offsetof(struct rdma_ucm_query, option)": 12,
	"offsetof(struct rdma_ucm_bind, addr_size)": 4, "offsetof(struct rdma_ucm_bind, addr)": 8,
	"offsetof(struct rdma_ucm_resolve_addr, timeout_ms)": 4, "offsetof(struct rdma_ucm_resolve_addr, src_size)": 8, "offsetof(struct rdma_ucm_resolve_addr, dst_size)": 10,
	"offsetof(struct rdma_ucm_resolve_addr, src_addr)": 16, "offsetof(struct rdma_ucm_resolve_addr, dst_addr)": 144,
	"offsetof(struct rdma_ucm_conn_param, private_data)": 8, "offsetof(struct rdma_ucm_conn_param, private_data_len)": 264,
	"offsetof(struct rdma_ucm_conn_param, responder_resources)": 266, "offsetof(struct rdma_ucm_conn_param, initiator_depth)": 267,
	"offsetof(struct rdma_ucm_conn_param, flow_control)": 268, "offsetof(struct rdma_ucm_conn_param, retry_count)": 269,
	"offsetof(struct rdma_ucm_conn_param, rnr_retry_count)": 270, "offsetof(struct rdma_ucm_conn_param, valid)": 271,
	"offsetof(struct rdma_ucm_query_addr_resp, port_num)": 8, "offsetof(struct rdma_ucm_query_addr_resp, pkey)": 10,
	"offsetof(struct rdma_ucm_query_addr_resp, src_addr)": 16, "offsetof(struct rdma_ucm_query_addr_resp, dst_addr)": 144,
	"offsetof(struct rdma_ucm_event_resp, id)": 8, "offsetof(struct rdma_ucm_event_resp, event)": 12,
	"offsetof(struct rdma_ucm_event_resp, status)": 16, "offsetof(struct rdma_ucm_event_resp, param)": 20,
	"offsetof(struct ib_path_rec_data, path_rec)":  8,
	"offsetof(struct ib_uverbs_qp_attr, qp_state)": 4, "offsetof(struct ib_uverbs_qp_attr, path_mtu)": 12,
	"offsetof(struct ib_uverbs_qp_attr, rq_psn)": 24, "offsetof(struct ib_uverbs_qp_attr, sq_psn)": 28, "offsetof(struct ib_uverbs_qp_attr, dest_qp_num)": 32,
	"offsetof(struct ib_uverbs_qp_attr, qp_access_flags)": 36, "offsetof(struct ib_uverbs_qp_attr, ah_attr)": 40,
	"offsetof(struct ib_uverbs_qp_attr, pkey_index)": 124, "offsetof(struct ib_uverbs_qp_attr, max_rd_atomic)": 130,
	"offsetof(struct ib_uverbs_qp_attr, max_dest_rd_atomic)": 131, "offsetof(struct ib_uverbs_qp_attr, min_rnr_timer)": 132,
	"offsetof(struct ib_uverbs_qp_attr, port_num)": 133, "offsetof(struct ib_uverbs_qp_attr, timeout)": 134,
	"offsetof(struct ib_uverbs_qp_attr, retry_cnt)": 135, "offsetof(struct ib_uverbs_qp_attr, rnr_retry)": 136,
	"offsetof(struct ib_uverbs_ah_attr, grh.flow_label)": 16, "offsetof(struct ib_uverbs_ah_attr, grh.sgid_index)": 20,
	"offsetof(struct ib_uverbs_ah_attr, grh.hop_limit)": 21, "offsetof(struct ib_uverbs_ah_attr, grh.traffic_class)": 22,
	"offsetof(struct ib_uverbs_ah_attr, dlid)": 24, "offsetof(struct ib_uverbs_ah_attr, sl)": 26, "offsetof(struct ib_uverbs_ah_attr, src_path_bits)": 27,
	"offsetof(struct ib_uverbs_ah_attr, static_rate)": 28, "offsetof(struct ib_uverbs_ah_attr, is_global)": 29, "offsetof(struct ib_uverbs_ah_attr, port_num)": 30,
	"offsetof(struct sockaddr_ib, sib_pkey)": 2, "offsetof(struct sockaddr_ib, sib_addr)": 8, "offsetof(struct sockaddr_ib, sib_sid)": 24, "offsetof(struct sockaddr_ib, sib_sid_mask)": 32,

	"RDMA_USER_CM_CMD_CREATE_ID": cmdCreateID, "RDMA_USER_CM_CMD_DESTROY_ID": cmdDestroyID, "RDMA_USER_CM_CMD_RESOLVE_ROUTE": cmdResolveRoute,
	"RDMA_USER_CM_CMD_CONNECT": cmdConnect, "RDMA_USER_CM_CMD_LISTEN": cmdListen, "RDMA_USER_CM_CMD_ACCEPT": cmdAccept, "RDMA_USER_CM_CMD_REJECT": cmdReject,
	"RDMA_USER_CM_CMD_DISCONNECT": cmdDisconnect, "RDMA_USER_CM_CMD_INIT_QP_ATTR": cmdInitQPAttr, "RDMA_USER_CM_CMD_GET_EVENT": cmdGetEvent,
	"RDMA_USER_CM_CMD_SET_OPTION": cmdSetOption, "RDMA_USER_CM_CMD_QUERY": cmdQuery, "RDMA_USER_CM_CMD_BIND": cmdBind, "RDMA_USER_CM_CMD_RESOLVE_ADDR": cmdResolveAddr,
	"RDMA_PS_IB": portSpaceIB, "RDMA_PS_TCP": portSpaceTCP, "RDMA_USER_CM_QUERY_ADDR": queryAddr, "RDMA_USER_CM_QUERY_PATH": queryPath, "RDMA_USER_CM_QUERY_GID": queryGID,
	"RDMA_OPTION_ID_REUSEADDR": optionReuseAddr, "RDMA_OPTION_ID_AFONLY": optionAFOnly, "RDMA_OPTION_ID_ACK_TIMEOUT": optionACKTimeout,
	"AF_INET": afInet, "AF_INET6": afInet6, "AF_IB": afIB,
	"RDMA_CM_EVENT_ADDR_RESOLVED": evAddrResolved, "RDMA_CM_EVENT_ADDR_ERROR": evAddrError, "RDMA_CM_EVENT_ROUTE_RESOLVED": evRouteResolved,
	"RDMA_CM_EVENT_ROUTE_ERROR": evRouteError, "RDMA_CM_EVENT_CONNECT_REQUEST": evConnectRequest, "RDMA_CM_EVENT_CONNECT_RESPONSE": evConnectResponse,
	"RDMA_CM_EVENT_CONNECT_ERROR": evConnectError, "RDMA_CM_EVENT_UNREACHABLE": evUnreachable, "RDMA_CM_EVENT_REJECTED": evRejected,
	"RDMA_CM_EVENT_ESTABLISHED": evEstablished, "RDMA_CM_EVENT_DISCONNECTED": evDisconnected, "RDMA_CM_EVENT_DEVICE_REMOVAL": evDeviceRemoval,
	"RDMA_CM_EVENT_ADDR_CHANGE": evAddrChange, "RDMA_CM_EVENT_TIMEWAIT_EXIT": evTimewaitExit,
}

// TestLayout compiles the kernel's header and compares every size, offset and number above.
func TestLayout(t *testing.T) {
	if os.Getenv("VMTEST_GUEST") != "" {
		t.Skip("the compiler's part of this suite runs outside the guest")
	}
	cc, err := exec.LookPath("gcc")
	if err != nil {
		require.Missing(t, "gcc (Debian package gcc)")
	}
	for _, h := range []string{"/usr/include/rdma/rdma_user_cm.h", "/usr/include/rdma/rdma_cma.h", "/usr/include/infiniband/ib.h"} {
		if _, err := os.Stat(h); err != nil {
			require.Missing(t, h+" (Debian packages linux-libc-dev, librdmacm-dev, libibverbs-dev)")
		}
	}
	// The two headers define the same enumerators twice, so that each needs a program of its own.
	events, kernel := map[string]int{}, map[string]int{}
	for e, v := range layout {
		if strings.HasPrefix(e, "RDMA_CM_EVENT_") {
			events[e] = v
		} else {
			kernel[e] = v
		}
	}
	compare(t, cc, "#include <rdma/rdma_cma.h>\n", events)
	compare(t, cc, "#include <rdma/rdma_user_cm.h>\n#include <infiniband/ib.h>\n", kernel)
}

func compare(t *testing.T, cc, include string, layout map[string]int) {
	t.Helper()
	dir := t.TempDir()
	var src bytes.Buffer
	src.WriteString("#include <stdio.h>\n#include <stddef.h>\n#include <sys/socket.h>\n" + include + "int main(void){\n")
	for e := range layout {
		src.WriteString("printf(\"" + e + "=%ld\\n\",(long)(" + e + "));\n")
	}
	src.WriteString("return 0;}\n")
	file, bin := filepath.Join(dir, "layout.c"), filepath.Join(dir, "layout")
	if err := os.WriteFile(file, src.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(cc, "-o", bin, file).CombinedOutput(); err != nil {
		t.Fatalf("compile: %v\n%s", err, out)
	}
	out, err := exec.Command(bin).Output()
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for sc := bufio.NewScanner(bytes.NewReader(out)); sc.Scan(); n++ {
		i := strings.LastIndexByte(sc.Text(), '=')
		e, got := sc.Text()[:i], sc.Text()[i+1:]
		if want := layout[e]; got != strconv.Itoa(want) {
			t.Errorf("%s is %s in the header, %d here", e, got, want)
		}
	}
	if n != len(layout) {
		t.Errorf("the header's program printed %d values, want %d", n, len(layout))
	}
}

// TestInfiniBandBytes pins the command bytes of an AF_IB login, which needs a fabric that no test machine has.
func TestInfiniBandBytes(t *testing.T) {
	dst := cm.Addr{
		GID:  verbs.GID{0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x00, 0x02, 0xc9, 0x03, 0x00, 0x12, 0x34, 0x57},
		PKey: 0x8001, ServiceID: 0x0002c90300123456,
	}
	want := strings.Join([]string{
		"07000000", "88130000", "0000", "3000", "00000000", // id 7, 5000 ms, no source, 48 bytes of destination
		strings.Repeat("00", 128),
		"1b00", "8001", "00000000", "fe800000000000000002c90300123457", "0002c90300123456", "ffffffffffffffff", "0000000000000000",
		strings.Repeat("00", 80),
	}, "")
	if got := hex.EncodeToString(encodeResolveAddr(7, netip.AddrPort{}, dst, 0)); got != want {
		t.Errorf("RESOLVE_ADDR\n got %s\nwant %s", got, want)
	}
	if got, want := hex.EncodeToString(encodeCreateID(3, portSpaceIB)), "0300000000000000"+"0000000000000000"+"3f01"+"02"+"0000000000"; got != want {
		t.Errorf("CREATE_ID got %s want %s", got, want)
	}
	// The 64-byte login form fits the 92 bytes of a REQ without the RDMA/CM header.
	login := bytes.Repeat([]byte{0xa5}, 64)
	b := encodeConnect(7, &cm.ConnParam{PrivateData: login, ResponderResources: 4, InitiatorDepth: 1, FlowControl: true, RetryCount: 7, RNRRetryCount: 7}, 0x11)
	wantConn := "11000000" + "00000000" + strings.Repeat("a5", 64) + strings.Repeat("00", 256-64) + "40" + "00" + "04" + "01" + "01" + "07" + "07" + "01" +
		"07000000" + strings.Repeat("00", 12)
	if got := hex.EncodeToString(b); got != wantConn {
		t.Errorf("CONNECT\n got %s\nwant %s", got, wantConn)
	}
	if a := getSockaddr(encodeResolveAddr(7, netip.AddrPort{}, dst, 0)[144:]); a != dst {
		t.Errorf("socket address reads back as %+v", a)
	}
}

// TestIPAddressBytes pins both IP families, with a scope.
func TestIPAddressBytes(t *testing.T) {
	for _, c := range []struct {
		addr  string
		scope uint32
		want  string
	}{
		{"10.0.0.1:5555", 0, "0200" + "15b3" + "0a000001" + "0000000000000000"},
		{"[::ffff:10.0.0.1]:5555", 0, "0200" + "15b3" + "0a000001" + "0000000000000000"},
		{"[fe80::2]:5555", 9, "0a00" + "15b3" + "00000000" + "fe800000000000000000000000000002" + "09000000"},
	} {
		var b [128]byte
		n := putSockaddrIP(b[:], netip.MustParseAddrPort(c.addr), c.scope)
		if got := hex.EncodeToString(b[:n]); got != c.want {
			t.Errorf("%s: got %s want %s", c.addr, got, c.want)
		}
	}
}
