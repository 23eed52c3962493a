package softroce

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/cm"
)

// Without a file descriptor left nothing is known of the interface or the way to a peer: no MTU is made up, and the peer is not called unreachable.
func TestNoDescriptorLeft(t *testing.T) {
	d := open(t)
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	next := int(f.Fd())
	f.Close()
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	few := old
	few.Cur = uint64(next)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	mtu, _, mtuErr := linkMTU(d.Addr())
	_, opened := Open(netip.Addr{})
	_, resolved := d.Connector().Resolve(context.Background(), netip.AddrPort{}, cm.Addr{IP: netip.AddrPortFrom(d.Addr(), 5555)})
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{"MTU of the interface": mtuErr, "Open": opened, "Resolve": resolved} {
		if !errors.Is(err, unix.EMFILE) || !strings.Contains(fmt.Sprint(err), fmt.Sprintf("this process may have %d (ulimit -n)", next)) || errors.Is(err, cm.ErrUnreachable) {
			t.Errorf("%s: %v; want EMFILE and the limit of %d", what, err, next)
		}
	}
	if mtu != 0 {
		t.Errorf("MTU code %d", mtu)
	}
	if mtu, netif, err := linkMTU(d.Addr()); err != nil || mtu == 0 || netif == "" {
		t.Errorf("with descriptors: MTU code %d, interface %q, %v", mtu, netif, err)
	}
}
