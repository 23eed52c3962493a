package udp

import (
	"bytes"
	"errors"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

func open(t testing.TB, o Options) *Socket {
	t.Helper()
	s, err := OpenLoopback(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	return b
}

// receive collects datagrams until n bytes are there.
func receive(t *testing.T, s *Socket, n int) (datagrams [][]byte, from netip.AddrPort, messages int) {
	t.Helper()
	s.SetDeadline(time.Now().Add(5 * time.Second))
	for got := 0; got < n; {
		ms, err := s.Receive()
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range ms {
			messages++
			from = m.From
			size := m.Segment
			if size == 0 {
				size = len(m.Data)
			}
			for b := m.Data; len(b) > 0; {
				k := min(size, len(b))
				datagrams = append(datagrams, append([]byte(nil), b[:k]...))
				got += k
				b = b[k:]
			}
		}
		if len(ms) == 0 {
			if err := s.Arm(); err != nil {
				t.Fatal(err)
			}
			if err := s.WaitReadable(); err != nil {
				t.Fatalf("after %d of %d bytes: %v", got, n, err)
			}
		}
	}
	return datagrams, from, messages
}

func TestTrains(t *testing.T) {
	for _, c := range []struct {
		name string
		tx   Options
		rx   Options
	}{{"offloads", Options{}, Options{}}, {"receiver without", Options{}, Options{NoGRO: true}}, {"neither", Options{NoGSO: true}, Options{NoGRO: true}}} {
		t.Run(c.name, func(t *testing.T) {
			a, b := open(t, c.tx), open(t, c.rx)
			to := NewDestination(netip.AddrPortFrom(b.Addr(), Port), 0)
			data := pattern(15*4112 - 100)
			trains := []Train{{Data: []byte("hello"), To: to}}
			if a.GSO() {
				trains = append(trains, Train{Data: data, Segment: 4112, To: to})
			} else {
				for i := 0; i < len(data); i += 4112 {
					trains = append(trains, Train{Data: data[i:min(len(data), i+4112)], To: to})
				}
			}
			trains = append(trains, Train{Data: []byte("bye"), To: to})
			if n, err := a.Send(trains); n != len(trains) || err != nil {
				t.Fatalf("sent %d of %d: %v", n, len(trains), err)
			}
			got, from, messages := receive(t, b, len(data)+8)
			if from != netip.AddrPortFrom(a.Addr(), Port) {
				t.Fatalf("from %v", from)
			}
			if len(got) != 17 || string(got[0]) != "hello" || string(got[16]) != "bye" || !bytes.Equal(bytes.Join(got[1:16], nil), data) {
				t.Fatalf("%d datagrams, not what was sent", len(got))
			}
			if a.GSO() && b.Stats().GRO && messages != 3 {
				t.Errorf("a train came in %d messages", messages-2)
			}
			t.Logf("%+v", b.Stats())
		})
	}
}

// What the ICRC rests on: DF is set and the identification is 0 for a datagram, 0, 1, 2, ... for a train that the kernel splits.
// Seeing IP headers takes a raw socket, hence privileges; loopback does not split trains, so only datagrams are looked at here.
func TestIdentification(t *testing.T) {
	raw, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_RAW, syscall.IPPROTO_UDP)
	if err != nil {
		if os.Getenv("REQUIRE_ALL") == "1" {
			t.Fatalf("no raw socket: %v", err)
		}
		t.Skipf("needs CAP_NET_RAW to see IP headers: %v", err)
	}
	defer syscall.Close(raw)
	syscall.SetsockoptTimeval(raw, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &syscall.Timeval{Sec: 2})
	a, b := open(t, Options{}), open(t, Options{})
	// Only what is for b: the traffic of others would fill the raw socket's buffer, and ours would be dropped.
	if err := syscall.Bind(raw, &syscall.SockaddrInet4{Addr: b.Addr().As4()}); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 65536)
	for {
		if _, _, err := syscall.Recvfrom(raw, buf, syscall.MSG_DONTWAIT); err == syscall.EAGAIN {
			break // what came before the bind
		}
	}
	to := NewDestination(netip.AddrPortFrom(b.Addr(), Port), 0)
	for range 3 {
		if _, err := a.Send([]Train{{Data: []byte("x"), To: to}}); err != nil {
			t.Fatal(err)
		}
	}
	src := a.Addr().As4()
	for seen := 0; seen < 3; {
		n, _, err := syscall.Recvfrom(raw, buf, 0)
		if err == syscall.EINTR { // the runtime's own signals
			continue
		}
		if err != nil {
			t.Fatalf("after %d of 3 packets from %v to %v: %v", seen, a.Addr(), b.Addr(), err)
		}
		if h := buf[:n]; n >= 28 && bytes.Equal(h[12:16], src[:]) {
			seen++
			if !bytes.Equal(h[4:8], []byte{0, 0, 0x40, 0}) {
				t.Fatalf("identification and flags % x, want 00 00 40 00", h[4:8])
			}
		}
	}
}

func TestPortInUse(t *testing.T) {
	a := open(t, Options{})
	_, err := Open(a.Addr(), Options{})
	var busy *PortInUseError
	if !errors.As(err, &busy) || !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), a.Addr().String()) {
		t.Fatalf("second socket on %v: %v", a.Addr(), err)
	}
	if _, err := Open(netip.MustParseAddr("192.0.2.77"), Options{}); !errors.Is(err, syscall.EADDRNOTAVAIL) {
		t.Fatalf("an address that is not ours: %v", err)
	}
	for _, bad := range []netip.Addr{{}, netip.IPv4Unspecified(), netip.MustParseAddr("224.0.0.1"), netip.IPv6Unspecified()} {
		if _, err := Open(bad, Options{}); err == nil {
			t.Errorf("%v was accepted", bad)
		}
	}
}

func TestIPv6(t *testing.T) {
	a, err := Open(netip.IPv6Loopback(), Options{})
	if err != nil {
		if os.Getenv("REQUIRE_ALL") == "1" {
			t.Fatal(err)
		}
		t.Skipf("needs ::1: %v", err)
	}
	defer a.Close()
	to := NewDestination(netip.AddrPortFrom(a.Addr(), Port), 0)
	if _, err := a.Send([]Train{{Data: pattern(3000), Segment: 1000, To: to}}); err != nil {
		t.Fatal(err)
	}
	got, from, _ := receive(t, a, 3000)
	if len(got) != 3 || from != netip.AddrPortFrom(netip.IPv6Loopback(), Port) {
		t.Fatalf("%d datagrams from %v", len(got), from)
	}
}

func TestCloseEndsWait(t *testing.T) {
	s := open(t, Options{})
	done := make(chan error)
	go func() { done <- s.WaitReadable() }()
	time.Sleep(10 * time.Millisecond)
	s.Close()
	select {
	case err := <-done:
		if !errors.Is(err, os.ErrClosed) {
			t.Fatal(err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("Close did not end WaitReadable")
	}
}

// An armed socket fires once, for what came before as well as after; a disarmed one does not.
func TestArm(t *testing.T) {
	a, b := open(t, Options{}), open(t, Options{})
	send := func() {
		t.Helper()
		if _, err := a.Send([]Train{{Data: []byte("x"), To: NewDestination(netip.AddrPortFrom(b.Addr(), Port), 0)}}); err != nil {
			t.Fatal(err)
		}
	}
	wait := func(want error) {
		t.Helper()
		b.SetDeadline(time.Now().Add(30 * time.Millisecond))
		if want == nil {
			b.SetDeadline(time.Now().Add(5 * time.Second))
		}
		if err := b.WaitReadable(); !errors.Is(err, want) {
			t.Fatalf("WaitReadable: %v, want %v", err, want)
		}
	}
	send()
	wait(os.ErrDeadlineExceeded)
	b.Arm()
	wait(nil)
	wait(os.ErrDeadlineExceeded)
	b.Arm()
	b.Disarm()
	wait(os.ErrDeadlineExceeded)
	for ms, _ := b.Receive(); len(ms) != 0; ms, _ = b.Receive() {
	}
	b.Arm()
	wait(os.ErrDeadlineExceeded)
	time.AfterFunc(20*time.Millisecond, send)
	wait(nil)
}

func TestPark(t *testing.T) {
	a, b := open(t, Options{}), open(t, Options{})
	var mu sync.Mutex
	send := func() {
		mu.Lock()
		defer mu.Unlock()
		if _, err := a.Send([]Train{{Data: []byte("x"), To: NewDestination(netip.AddrPortFrom(b.Addr(), Port), 0)}}); err != nil {
			t.Error(err)
		}
	}
	park := func(want bool) {
		t.Helper()
		time.AfterFunc(5*time.Second, b.Unpark)
		if got, err := b.Park(); got != want || err != nil {
			t.Fatalf("Park: %v, %v", got, err)
		}
	}
	for range 3 {
		send()
		park(true)
		park(true) // it is still there
		for ms, _ := b.Receive(); len(ms) != 0; ms, _ = b.Receive() {
		}
		b.Unpark()
		park(false)
		time.AfterFunc(10*time.Millisecond, b.Unpark)
		park(false)
		time.AfterFunc(10*time.Millisecond, send)
		park(true)
		b.Receive()
	}
}

func TestNoAllocation(t *testing.T) {
	a, b := open(t, Options{}), open(t, Options{})
	to := NewDestination(netip.AddrPortFrom(b.Addr(), Port), 0)
	trains := []Train{{Data: pattern(8000), Segment: 4000, To: to}, {Data: []byte("x"), To: to}}
	if n := testing.AllocsPerRun(100, func() {
		if _, err := a.Send(trains); err != nil {
			t.Fatal(err)
		}
		for got := 0; got < 8001; {
			ms, err := b.Receive()
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range ms {
				got += len(m.Data)
			}
		}
	}); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}
