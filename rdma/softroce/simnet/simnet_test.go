package simnet

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"
	"os"
	"testing"
	"testing/synctest"
	"time"
)

var (
	nodeA = netip.MustParseAddrPort("192.0.2.1:4791")
	nodeB = netip.MustParseAddrPort("192.0.2.2:4791")
)

var rough = Faults{
	Loss: 0.05, Duplicate: 0.05, Reorder: 0.05, Corrupt: 0.05,
	Delay: 10 * time.Microsecond, Jitter: 5 * time.Microsecond, ReorderDelay: 100 * time.Microsecond,
}

// trace sends 2000 numbered datagrams and hashes what arrives when.
func trace(seed uint64) (string, Stats) {
	n := New(seed)
	n.SetDefault(rough)
	h := fnv.New64a()
	a := n.Attach(nodeA, func(netip.AddrPort, []byte) {})
	n.Attach(nodeB, func(from netip.AddrPort, b []byte) { fmt.Fprint(h, n.Now(), from, b) })
	var b [16]byte
	for i := range 2000 {
		n.After(time.Duration(i)*time.Microsecond, func() {
			binary.BigEndian.PutUint32(b[:], uint32(i))
			a.Send(nodeB, b[:])
		})
	}
	n.Run(time.Second, nil)
	return fmt.Sprintf("%x", h.Sum64()), n.Stats(nodeA.Addr(), nodeB.Addr())
}

func TestSeedDecides(t *testing.T) {
	one, st := trace(7)
	two, _ := trace(7)
	other, _ := trace(8)
	if one != two {
		t.Error("one seed gave two histories")
	}
	if one == other {
		t.Error("two seeds gave one history")
	}
	for _, c := range []struct {
		name string
		n    uint64
	}{{"lost", st.Lost}, {"duplicated", st.Duplicated}, {"reordered", st.Reordered}, {"corrupted", st.Corrupted}} {
		if c.n < 60 || c.n > 150 {
			t.Errorf("%d of 2000 %s at 5 %%", c.n, c.name)
		}
	}
	if st.Delivered != st.Sent-st.Lost+st.Duplicated {
		t.Errorf("delivered %d of %+v", st.Delivered, st)
	}
}

func TestOrderWithoutReorder(t *testing.T) {
	n := New(1)
	n.SetDefault(Faults{Delay: time.Millisecond, Jitter: time.Millisecond})
	var got []byte
	a := n.Attach(nodeA, func(netip.AddrPort, []byte) {})
	n.Attach(nodeB, func(_ netip.AddrPort, b []byte) { got = append(got, b[0]) })
	for i := range 200 {
		a.Send(nodeB, []byte{byte(i)})
	}
	n.Run(time.Second, nil)
	for i, v := range got {
		if int(v) != i {
			t.Fatalf("datagram %d arrived in place %d", v, i)
		}
	}
	if len(got) != 200 {
		t.Fatalf("%d of 200 arrived", len(got))
	}
}

func TestPartitionIsOneWay(t *testing.T) {
	n := New(1)
	atA, atB := 0, 0
	a := n.Attach(nodeA, func(netip.AddrPort, []byte) { atA++ })
	b := n.Attach(nodeB, func(netip.AddrPort, []byte) { atB++ })
	n.Partition(nodeA.Addr(), nodeB.Addr(), true)
	a.Send(nodeB, []byte{1})
	b.Send(nodeA, []byte{1})
	n.Run(1, nil)
	n.Partition(nodeA.Addr(), nodeB.Addr(), false)
	a.Send(nodeB, []byte{1})
	n.Run(2, nil)
	if atA != 1 || atB != 1 {
		t.Errorf("A got %d, B got %d, want 1 and 1", atA, atB)
	}
}

func TestBandwidthAndQueue(t *testing.T) {
	n := New(1)
	n.SetDefault(Faults{Bandwidth: 1e6, Queue: 10_000})
	var last time.Duration
	got := 0
	a := n.Attach(nodeA, func(netip.AddrPort, []byte) {})
	n.Attach(nodeB, func(netip.AddrPort, []byte) { got, last = got+1, n.Now() })
	for range 20 {
		a.Send(nodeB, make([]byte, 1000))
	}
	n.Run(time.Second, nil)
	if got != 10 || last != 10*time.Millisecond {
		t.Errorf("%d datagrams by %v, want 10 by 10ms", got, last)
	}
}

func TestConnsInBubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		n := New(3)
		n.SetDefault(Faults{Delay: 20 * time.Millisecond})
		go n.Drive(ctx)
		a, err := n.Listen(nodeA)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := n.Listen(nodeB)
		if _, err := n.Listen(nodeB); err == nil {
			t.Error("an address was given out twice")
		}
		go func() { // echo
			buf := make([]byte, 64)
			for b.Wait(-1) == nil {
				for {
					k, from, ok := b.Receive(buf)
					if !ok {
						break
					}
					b.Send(from, buf[:k])
				}
			}
		}()
		start := time.Now()
		buf := make([]byte, 64)
		for i := range 100 {
			a.Send(nodeB, []byte{byte(i)})
			for {
				if k, _, ok := a.Receive(buf); ok {
					if k != 1 || buf[0] != byte(i) {
						t.Fatalf("round %d: %x", i, buf[:k])
					}
					break
				}
				if err := a.Wait(time.Second); err != nil {
					t.Fatal(err)
				}
			}
		}
		if d := time.Since(start); d != 100*40*time.Millisecond {
			t.Errorf("100 round trips took %v of virtual time, want 4s", d)
		}
		n.Partition(nodeA.Addr(), nodeB.Addr(), true)
		a.Send(nodeB, []byte{1})
		if err := a.Wait(time.Minute); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("Wait across a partition: %v", err)
		}
		a.Close()
		b.Close()
		if err := a.Wait(-1); !errors.Is(err, os.ErrClosed) {
			t.Errorf("Wait after Close: %v", err)
		}
		stop()
	})
}
