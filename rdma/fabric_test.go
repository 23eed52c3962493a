package rdma_test

import (
	"bytes"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"srp-initiator/internal/require"
	"srp-initiator/rdma"
	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/cm/cmtest"
)

// TestSoftroceContract connects two userspace devices on loopback.
func TestSoftroceContract(t *testing.T) {
	cmtest.Run(t, func(t *testing.T) (active, passive cmtest.Node) {
		return node(t, "softroce"), node(t, "softroce")
	})
}

func node(t *testing.T, name string, opts ...rdma.Option) cmtest.Node {
	t.Helper()
	f, err := rdma.Open(name, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Errorf("close %s: %v", name, err)
		}
	})
	g, err := f.Context().QueryGID(1, 0)
	if err != nil {
		t.Fatal(err)
	}
	return cmtest.Node{Context: f.Context(), Connector: f.Connector(), Addr: g.GID.Addr()}
}

func TestBadNames(t *testing.T) {
	for _, c := range []struct{ name, say string }{
		{"softroce:nowhere", `"nowhere" is not an IP address`},
		{"softroce:fe80::1", "%INTERFACE is missing after the link-local address: want such as softroce:fe80::1%eth0"},
		{"mlx5_0/0", `port "0" is not a number from 1 to 255`},
		{"mlx5_0/x", `port "x" is not a number from 1 to 255`},
	} {
		_, err := rdma.Open(c.name)
		var ne *rdma.NameError
		if !errors.As(err, &ne) || !strings.Contains(err.Error(), c.say) || !strings.Contains(err.Error(), "allowed: ") {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if _, err := rdma.Open("nodev9"); err == nil || !strings.Contains(err.Error(), "nodev9") {
		t.Errorf("nodev9: %v", err)
	}
	if _, err := rdma.Open("softroce:192.0.2.1"); err == nil {
		t.Error("opened an address that is not this machine's")
	}
}

// TestAutoNearPeer: towards loopback the device takes an address of its own.
func TestAutoNearPeer(t *testing.T) {
	dst := cm.Addr{IP: netip.MustParseAddrPort("127.0.0.1:5555")}
	a := node(t, "softroce", rdma.WithPeer(netip.AddrPort{}, dst))
	b := node(t, "softroce", rdma.WithPeer(netip.AddrPort{}, dst))
	if a.Addr == b.Addr || !a.Addr.IsLoopback() || !b.Addr.IsLoopback() {
		t.Errorf("addresses %s and %s", a.Addr, b.Addr)
	}
}

// TestKernelDevices runs where there are some.
func TestKernelDevices(t *testing.T) {
	require.Guest(t)
	list, err := rdma.Devices()
	if err != nil {
		t.Fatal(err)
	}
	if len(list) == 0 {
		t.Fatal("no devices")
	}
	d := list[0]
	if d.Name != "rxe0" || d.Provider != "rxe" || d.Unserved != "" || d.CompVectors == 0 || len(d.Ports) != 1 || len(d.CharDevices) == 0 || d.NodeGUID == "" {
		t.Errorf("%+v", d)
	}
	p := d.Ports[0]
	if p.State != "ACTIVE" || p.LinkLayer != "Ethernet" || p.MTU != 1024 || len(p.GIDs) < 3 || len(p.PKeys) != 1 || len(p.Netdevs) != 1 || p.Netdevs[0] != "eth0" {
		t.Errorf("port %+v", p)
	}
	if d.PCIAddress == "" {
		t.Errorf("the NIC below rxe0 has a PCI address")
	}
	dst := cm.Addr{IP: netip.MustParseAddrPort("10.0.0.1:5555")}
	for _, name := range []string{"rxe0", "rxe0/1", "eth0", "auto"} {
		f, err := rdma.Open(name, rdma.WithPeer(netip.AddrPort{}, dst))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if f.Context().Name() != "rxe0" {
			t.Errorf("%s opened %s", name, f.Context().Name())
		}
		f.Close()
	}
	if _, err := rdma.Open("rxe0/2"); err == nil || !strings.Contains(err.Error(), "no port 2") {
		t.Errorf("rxe0/2: %v", err)
	}
	if _, err := rdma.Open("rxe0", rdma.WithCapture(&bytes.Buffer{})); err == nil {
		t.Error("a kernel device cannot be captured")
	}
	if _, err := rdma.Open("softroce:10.0.0.1"); err == nil || !strings.Contains(err.Error(), "4791") {
		t.Errorf("rxe holds UDP port 4791: %v", err)
	}
}
