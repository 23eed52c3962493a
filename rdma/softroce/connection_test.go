package softroce

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"srp-initiator/internal/require"
	"srp-initiator/rdma/cm"
)

// A device on a link-local address reaches its link: the kernel is asked for the way with the interface. Nothing is sent.
func TestLinkLocalRoute(t *testing.T) {
	a := require.LinkLocal(t)
	d, err := Open(a)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	l, err := d.Connector().Listen(netip.AddrPort{}, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if l.Addr().Addr() != a {
		t.Errorf("listens on %s, want %s", l.Addr(), a)
	}
	to := func(s string) error {
		_, err := d.Connector().Resolve(context.Background(), netip.AddrPort{}, cm.Addr{IP: netip.AddrPortFrom(netip.MustParseAddr(s), 5555)})
		return err
	}
	for _, s := range []string{"fe80::5:5:5:5%" + a.Zone(), "fe80::5:5:5:5"} {
		if err := to(s); err != nil {
			t.Errorf("%s: %v", s, err)
		}
	}
	if err := to("fe80::5:5:5:5%nosuch"); !errors.Is(err, cm.ErrUnreachable) || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), "ADDR%INTERFACE") {
		t.Errorf("another interface: %v", err)
	}
}

// The error of an address without a route is one line, and a link-local address to open has its interface.
func TestNoRoute(t *testing.T) {
	d, err := Open(netip.MustParseAddr("127.86.5.1"))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // as the kernel's refusal, it ends the question
	_, err = d.Connector().Resolve(ctx, netip.AddrPort{}, cm.Addr{IP: netip.MustParseAddrPort("127.86.5.2:5555")})
	if !errors.Is(err, cm.ErrUnreachable) || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), "no route from device") {
		t.Errorf("%v", err)
	}
	for _, s := range []string{"fe80::1", "fe80::1%nosuch"} {
		if d, err := Open(netip.MustParseAddr(s)); err == nil {
			d.Close()
			t.Errorf("%s: opened", s)
		} else if want := map[string]string{"fe80::1": "%INTERFACE is missing", "fe80::1%nosuch": `no network interface "nosuch"`}[s]; !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", s, err)
		}
	}
}

// The time that an answer was waited for is the one that was granted.
func TestNoAnswer(t *testing.T) {
	d, err := Open(netip.MustParseAddr("127.86.5.3"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	e := newEnd(t, d, false)
	c, err := d.Connector().Resolve(t.Context(), netip.AddrPort{}, cm.Addr{IP: netip.MustParseAddrPort("127.86.5.4:5555")})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.InitQP(e.qp); err != nil {
		t.Fatal(err)
	}
	_, err = c.Connect(t.Context(), cm.ConnParam{Timeout: 210 * time.Millisecond})
	if !errors.Is(err, cm.ErrUnreachable) || !strings.Contains(err.Error(), "no answer from 127.86.5.4:5555 within 210ms:") {
		t.Errorf("%v", err)
	}
}
