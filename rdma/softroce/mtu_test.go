package softroce

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/softroce/ibcm"
	"srp-initiator/rdma/verbs"
)

// A peer that carries less is asked again for that: the connection has its path MTU, and moves data.
func TestPeerCarriesLess(t *testing.T) {
	a, b := newEnd(t, open(t), true), newEnd(t, open(t, WithMTU(verbs.MTU512)), true)
	connect(t, a, b)
	for _, e := range []*end{a, b} {
		if m := e.conn.Route().PathMTU; m != verbs.MTU512 {
			t.Errorf("%s: path MTU %d", e.d.Name(), m.Bytes())
		}
	}
	if n := b.d.Stats().CM.Refused; n != 1 {
		t.Errorf("%d requests refused", n)
	}
	const n = 10000
	for i, way := range [][2]*end{{a, b}, {b, a}} {
		src, dst := way[0].mem.Slice(0, n), way[1].mem.Slice(1<<20, n)
		fill(src, byte(i))
		way[1].recv(t, 7, 1<<20, n)
		way[0].send(t, verbs.SendWorkRequest{WRID: 1, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: way[0].sge(0, n)})
		for _, e := range way {
			if wc := e.poll(t, 1)[0]; wc.Status != verbs.WCSuccess {
				t.Fatalf("%+v", wc)
			}
		}
		if !bytes.Equal(src, dst) {
			t.Error("data differ")
		}
	}
	quiet(t, a, b)
}

// A refusal for the path MTU that no other can mend names what was asked for and what the peer says; the connection has ended then.
func TestRefusedMTU(t *testing.T) {
	for mtu, want := range map[verbs.MTU]string{
		0: "path MTU 4096 asked for, the peer does not say what it carries", verbs.MTU4096: "path MTU 4096 asked for, the peer carries 4096 at most",
	} {
		e := newEnd(t, open(t), true)
		peer := open(t)
		l, err := peer.Connector().Listen(netip.AddrPortFrom(peer.Addr(), 0), 4) // nobody accepts
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		conn, err := e.d.Connector().Resolve(ctx, netip.AddrPort{}, cm.Addr{IP: l.Addr()})
		if err != nil {
			t.Fatal(err)
		}
		e.conn = conn
		if err := conn.InitQP(e.qp); err != nil {
			t.Fatal(err)
		}
		refused := make(chan error, 1)
		go func() {
			_, err := conn.Connect(ctx, connParam)
			refused <- err
		}()
		c := conn.(*connection)
		for {
			e.d.mu.Lock()
			mc := c.mc
			if mc != nil {
				now := e.d.now()
				e.d.cmEvent(now, &ibcm.Event{Kind: ibcm.EventRejected, Conn: mc, Reject: ibcm.REJ{Reason: ibcm.ReasonInvalidMTU}, MTU: mtu})
			}
			e.d.unlock()
			if mc != nil {
				break
			}
			time.Sleep(time.Millisecond)
		}
		err = <-refused
		var rej *cm.RejectError
		if !errors.As(err, &rej) || rej.Reason != ibcm.ReasonInvalidMTU || !strings.Contains(err.Error(), want) || conn.Err() == nil {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
