package targetemu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/softroce"
	"srp-initiator/rdma/verbs"
	"srp-initiator/target-emu/lun"
	"srp-initiator/target-emu/lun/luntest"
)

// lines hands on what a log writes.
type lines chan string

func (l lines) Write(p []byte) (int, error) {
	l <- string(bytes.TrimSpace(p))
	return len(p), nil
}

// What the device refuses before the target hears of it is in the log, with the numbers that do not match.
func TestRefusedByTheDevice(t *testing.T) {
	d, err := softroce.Open(netip.Addr{}, softroce.WithMTU(verbs.MTU1024))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	log := make(lines, 16)
	target, err := New(d, d.Connector(), Config{
		Listen: netip.AddrPortFrom(d.Addr(), 5555), Units: luntest.Units(t, &lun.Map{}, map[uint32]string{0: "ram:1m"}), Log: slog.New(slog.NewTextHandler(log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var served sync.WaitGroup
	served.Go(func() { target.Serve(ctx) })
	defer served.Wait()
	defer cancel()

	f := openFabric(t)
	gid, err := f.Context().QueryGID(1, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		port   uint16
		reason uint16
		why    string
	}{
		{5555, cm.ReasonConsumerDefined, "invalid path MTU (CM reason 26): 4096 bytes asked for, this device's link carries 1024"}, // then the peer asks for 1024, and the target finds no login in the request
		{5556, 8, "invalid service id: nobody listens on that port (CM reason 8)"},
	} {
		p := newPeer(t, f)
		conn, err := f.Connector().Resolve(ctx, netip.AddrPort{}, cm.Addr{IP: netip.AddrPortFrom(d.Addr(), c.port)})
		if err != nil {
			t.Fatal(err)
		}
		p.conn = conn
		if err := conn.InitQP(p.qp); err != nil {
			t.Fatal(err)
		}
		var rej *cm.RejectError
		if _, err := conn.Connect(ctx, cm.ConnParam{Timeout: 10 * time.Second}); !errors.As(err, &rej) || rej.Reason != c.reason {
			t.Errorf("port %d: %v, want a REJ of reason %d", c.port, err, c.reason)
		}
		for found, limit := false, time.After(5*time.Second); !found; {
			select {
			case line := <-log: // the target's own refusal may come before the device's
				found = strings.Contains(line, "level=WARN") && strings.Contains(line, "from="+gid.GID.Addr().String()) && strings.Contains(line, fmt.Sprintf("why=%q", c.why))
			case <-limit:
				t.Fatalf("port %d: the log does not say %q", c.port, c.why)
			}
		}
	}
}

// Strangers cannot fill the log.
func TestLogOfRefusalsIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, refused, quit := make(lines, 1000), make(chan cm.Refusal), make(chan struct{})
		go logRefusals(slog.New(slog.NewTextHandler(log, nil)), refused, quit)
		defer close(quit)
		send := func(n int) {
			for range n {
				refused <- cm.Refusal{From: netip.MustParseAddr("192.0.2.1"), Reason: 26, AskedMTU: 6}
			}
			synctest.Wait()
		}
		for range 3 {
			send(100)
			if n := len(log); n != refusalsInARow {
				t.Fatalf("%d lines of 100 refusals, want %d", n, refusalsInARow)
			}
			for range refusalsInARow {
				if line := <-log; !strings.Contains(line, "code 6 asked for, codes are 1 to 5") {
					t.Errorf("the log has %q", line)
				}
			}
			time.Sleep(refusalsPause + time.Second)
			synctest.Wait()
			if len(log) != 1 {
				t.Fatalf("%d lines after the pause, want one that counts the rest", len(log))
			}
			if line := <-log; !strings.Contains(line, "count=92") {
				t.Errorf("the log has %q", line)
			}
		}
		send(1)
		time.Sleep(refusalsPause + time.Second)
		synctest.Wait()
		if len(log) != 1 {
			t.Errorf("%d lines of one refusal", len(log))
		}
	})
}
