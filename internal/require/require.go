// Package require says for tests what they need: absent things skip a test, or fail it when REQUIRE_ALL=1, so that
// a complete run cannot pass by leaving tests out.
package require

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// Guest skips a test outside of a test guest (see docs/testing.md). It never fails: what calls it is registered
// in internal/vmtest and runs there, with the devices of the scenario.
func Guest(t testing.TB) {
	t.Helper()
	if os.Getenv("VMTEST_GUEST") == "" {
		t.Skip("runs in a test guest only")
	}
}

// SRPT is Guest for tests that need the kernel's SRP target. It returns the address to dial (IP:PORT) and the
// target's id_ext, which is its ioc_guid too, as 16 hex digits.
func SRPT(t testing.TB) (addr, id string) {
	t.Helper()
	Guest(t)
	addr, id = os.Getenv("VMTEST_SRPT_ADDR"), os.Getenv("VMTEST_SRPT_ID")
	if addr == "" {
		Missing(t, "the kernel's SRP target in this guest's scenario")
	}
	return addr, id
}

// Program returns the path of a program, or skips or fails the test that needs it.
func Program(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		Missing(t, "program "+name)
	}
	return path
}

// Root skips or fails a test that needs root's rights.
func Root(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		Missing(t, "root's rights")
	}
}

// LinkLocal returns a link-local address of this machine with its interface, or skips or fails the test that needs one. Packages are tested side by
// side, and only one device can have the address: until the test ends it is the test's alone, which holds a port of it as the sign.
func LinkLocal(t testing.TB) netip.Addr {
	t.Helper()
	ifs, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range ifs {
		addrs, _ := i.Addrs()
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && i.Flags&net.FlagRunning != 0 && p.Addr().Is6() && p.Addr().IsLinkLocalUnicast() {
				at := p.Addr().WithZone(i.Name)
				own(t, netip.AddrPortFrom(at, linkLocalSign))
				return at
			}
		}
	}
	Missing(t, "an interface with a link-local IPv6 address")
	return netip.Addr{}
}

const linkLocalSign = 47910 // a UDP port that nothing else here uses

func own(t testing.TB, sign netip.AddrPort) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		c, err := net.ListenUDP("udp6", net.UDPAddrFromAddrPort(sign))
		if err == nil {
			t.Cleanup(func() { c.Close() })
			return
		}
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) {
			t.Fatalf("another test has %s: %v", sign, err)
		}
	}
}

// Missing skips the test for want of what, or fails it when REQUIRE_ALL=1.
func Missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("REQUIRE_ALL") == "1" {
		t.Fatalf("REQUIRE_ALL=1, but missing: %s", what)
	}
	t.Skipf("missing: %s", what)
}
