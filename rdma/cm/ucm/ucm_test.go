package ucm_test

import (
	"net/netip"
	"os"
	"testing"

	"srp-initiator/internal/require"
	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/cm/cmtest"
	"srp-initiator/rdma/cm/ucm"
	"srp-initiator/rdma/verbs/uverbs"
)

// TestContract runs over rxe's loop: both ends on one address.
func TestContract(t *testing.T) {
	require.Guest(t)
	for _, addr := range []string{"10.0.0.1", "fd00::1"} {
		t.Run(addr, func(t *testing.T) {
			cmtest.Run(t, func(t *testing.T) (active, passive cmtest.Node) {
				n := open(t, addr)
				return n, n
			})
		})
	}
}

func open(t *testing.T, addr string) cmtest.Node {
	t.Helper()
	ctx, err := uverbs.Open("rxe0")
	if err != nil {
		t.Fatal(err)
	}
	conn, err := ucm.Open(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Errorf("close connector: %v", err)
		}
		if err := ctx.Close(); err != nil {
			t.Errorf("close device: %v", err)
		}
	})
	return cmtest.Node{Context: ctx, Connector: conn, Addr: netip.MustParseAddr(addr)}
}

func TestNoRoute(t *testing.T) {
	require.Guest(t)
	n := open(t, "10.0.0.1")
	_, err := n.Connector.Resolve(t.Context(), netip.AddrPort{}, cm.Addr{IP: netip.MustParseAddrPort("127.0.0.1:5555")})
	if err == nil {
		t.Error("loopback has no RDMA device, yet it was resolved")
	}
	t.Log(err)
}

func TestResolveDevice(t *testing.T) {
	require.Guest(t)
	n := open(t, "10.0.0.1")
	attr, err := n.Context.QueryDevice()
	if err != nil {
		t.Fatal(err)
	}
	r, err := ucm.ResolveDevice(t.Context(), netip.AddrPort{}, cm.Addr{IP: netip.MustParseAddrPort("10.0.0.1:5555")})
	if err != nil || r.NodeGUID != attr.NodeGUID || r.Port != 1 {
		t.Errorf("route %+v, %v; node GUID %016x", r, err, attr.NodeGUID)
	}
}

func TestMissingModule(t *testing.T) {
	if _, err := os.Stat(ucm.DevicePath); err == nil {
		t.Skip("this machine has the device")
	}
	if _, err := ucm.Open(nil); err == nil {
		t.Error("opened a device that is not there")
	}
}
