package uverbs

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/abi"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
	"srp-initiator/rdma/verbs/uverbs/internal/provider"
)

// TestDevices reads a sysfs with one device of every kind.
func TestDevices(t *testing.T) {
	sys := fstest.MapFS{}
	file := func(name, content string) { sys[name] = &fstest.MapFile{Data: []byte(content + "\n")} }
	add := func(n, name, version string) {
		file("class/infiniband_verbs/uverbs"+n+"/ibdev", name)
		file("class/infiniband_verbs/uverbs"+n+"/abi_version", version)
		file("class/infiniband/"+name+"/node_guid", "5054:00ff:fe12:3456")
		file("class/infiniband/"+name+"/ports/1/state", "4: ACTIVE")
	}
	file("class/infiniband_verbs/abi_version", "6")
	add("3", "rxe0", "2")
	file("class/infiniband/rxe0/parent", "eth0")
	add("1", "rxe1", "9")
	file("class/infiniband/rxe1/parent", "eth1")
	add("0", "cxgb4_0", "3")
	sys["class/infiniband/cxgb4_0/device/driver"] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte("../../../../bus/pci/drivers/cxgb4")}
	add("2", "siw0", "1")

	list, err := devices(sys)
	if err != nil || len(list) != 4 {
		t.Fatalf("%d devices, %v", len(list), err)
	}
	for i, want := range []struct{ name, char, driver, provider, reason string }{
		{"cxgb4_0", "/dev/infiniband/uverbs0", "cxgb4", "", `no provider for driver "cxgb4"`},
		{"rxe0", "/dev/infiniband/uverbs3", "rxe", "rxe", ""},
		{"rxe1", "/dev/infiniband/uverbs1", "rxe", "", "driver rxe has ABI version 9, this program knows 2 to 2"},
		{"siw0", "/dev/infiniband/uverbs2", "unknown", "", `no provider for driver "unknown"`},
	} {
		d := list[i]
		if d.Name != want.name || d.CharDev != want.char || d.Driver != want.driver || d.Provider != want.provider || d.Reason != want.reason ||
			d.NodeGUID != 0x505400fffe123456 || d.Ports != 1 {
			t.Errorf("%+v, want %+v", d, want)
		}
		if want.provider == "" {
			if _, err := d.Open(); err == nil || !strings.Contains(err.Error(), want.reason) {
				t.Errorf("opening %s: %v", d.Name, err)
			}
		}
	}
	// Another user-verbs ABI: nothing is served, both numbers are named.
	file("class/infiniband_verbs/abi_version", "7")
	if list, _ = devices(sys); list[1].Provider != "" || !strings.Contains(list[1].Reason, `"7"`) || !strings.Contains(list[1].Reason, "6") {
		t.Errorf("%+v", list[1])
	}
	// No RDMA at all is no error.
	if list, err := devices(fstest.MapFS{}); len(list) != 0 || err != nil {
		t.Errorf("%v, %v", list, err)
	}
}

// stub is a kernel of few words: it makes objects and events when a test says so.
type stub struct {
	mu     sync.Mutex
	gone   bool
	async  [2]int // pipe
	comp   [2]int
	handle uint32
}

func newStub(t *testing.T) *stub {
	s := &stub{}
	for _, p := range []*[2]int{&s.async, &s.comp} {
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func (s *stub) Ioctl(*kernel.Ioctl) error { return syscall.ENOTTY }

func (s *stub) Write(w *kernel.Write) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return syscall.EIO
	}
	switch w.Command {
	case abi.CmdGetContext:
		copy(w.CoreOut, abi.Bytes(&abi.GetContextResp{AsyncFD: uint32(s.async[0]), NumCompVectors: 1}))
	case abi.CmdCreateCompChannel:
		copy(w.CoreOut, abi.Bytes(&abi.CreateCompChannelResp{FD: uint32(s.comp[0])}))
	default:
		s.handle++
		if len(w.CoreOut) >= 4 && w.Command != abi.CmdDestroyCQ && w.Command != abi.CmdDestroyQP {
			binary.NativeEndian.PutUint32(w.CoreOut, s.handle)
		}
	}
	return nil
}

func (s *stub) Mmap(int64, int, int) ([]byte, error) { return nil, syscall.EINVAL }
func (s *stub) Munmap([]byte) error                  { return nil }
func (s *stub) Close() error                         { return nil }

func (s *stub) event(t *testing.T, element uint64, typ verbs.AsyncEventType) {
	t.Helper()
	if _, err := unix.Write(s.async[1], abi.Bytes(&abi.AsyncEventDesc{Element: element, EventType: uint32(typ)})); err != nil {
		t.Error(err)
	}
}

// family is a device family without rings.
type family struct{}

func (family) Name() string     { return "stub" }
func (family) DriverID() uint32 { return 99 }
func (family) ABI() (int, int)  { return 1, 1 }
func (family) Open(k *kernel.Device, _ provider.Info) (provider.Device, error) {
	n, err := k.GetContext(nil, nil)
	return &stubDevice{k: k, n: n}, err
}

type stubDevice struct {
	k *kernel.Device
	n int
}

func (d *stubDevice) CompVectors() int         { return d.n }
func (d *stubDevice) AllocPD() (uint32, error) { return d.k.AllocPD(nil, nil) }
func (d *stubDevice) Close()                   {}
func (d *stubDevice) CreateCQ(a kernel.CQArgs) (provider.CQ, error) {
	h, _, err := d.k.CreateCQ(a, nil, nil)
	if err != nil {
		return nil, err
	}
	return &stubCQ{d: d, handle: h}, nil
}
func (d *stubDevice) CreateQP(a provider.QPArgs) (provider.QP, error) {
	r, err := d.k.CreateQP(a.QPArgs, nil, nil)
	if err != nil {
		return nil, err
	}
	return &stubQP{d: d, handle: r.Handle}, nil
}

type stubCQ struct {
	d      *stubDevice
	handle uint32
}

func (c *stubCQ) Poll([]verbs.WorkCompletion) int     { return 0 }
func (c *stubCQ) Arm(bool) (bool, error)              { return false, nil }
func (c *stubCQ) Notified()                           {}
func (c *stubCQ) Capacity() int                       { return 1 }
func (c *stubCQ) Handle() uint32                      { return c.handle }
func (c *stubCQ) Destroy() (abi.DestroyCQResp, error) { return c.d.k.DestroyCQ(c.handle) }

type stubQP struct {
	d      *stubDevice
	handle uint32
}

func (q *stubQP) PostSend(w []verbs.SendWorkRequest) (int, error)  { return len(w), nil }
func (q *stubQP) PostRecv(w []verbs.RecvWorkRequest) (int, error)  { return len(w), nil }
func (q *stubQP) Handle() uint32                                   { return q.handle }
func (q *stubQP) QPN() uint32                                      { return q.handle }
func (q *stubQP) Cap() verbs.QPCap                                 { return verbs.QPCap{} }
func (q *stubQP) Modify(r *abi.ModifyQP, _, _ verbs.QPState) error { return q.d.k.ModifyQP(r) }
func (q *stubQP) Destroy() (uint32, error)                         { return q.d.k.DestroyQP(q.handle) }

func openStub(t *testing.T) (*stub, *Context) {
	t.Helper()
	s := newStub(t)
	c, err := OpenOn(s, family{}, provider.Info{Name: "stub0"}, fstest.MapFS{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return s, c
}

// TestDeviceGone: the kernel lets go of the device in each of the ways it has. Every waiter must
// be told, soon, and none may spin.
func TestDeviceGone(t *testing.T) {
	for _, way := range []struct {
		name string
		lose func(t *testing.T, s *stub, c *Context)
	}{
		{"end of the completion file", func(t *testing.T, s *stub, c *Context) { unix.Close(s.comp[1]) }},
		{"end of the event file", func(t *testing.T, s *stub, c *Context) { unix.Close(s.async[1]) }},
		{"device fatal", func(t *testing.T, s *stub, c *Context) { s.event(t, 0, verbs.EventDeviceFatal) }},
		{"EIO to a command", func(t *testing.T, s *stub, c *Context) {
			s.mu.Lock()
			s.gone = true
			s.mu.Unlock()
			if _, err := c.AllocPD(); !errors.Is(err, verbs.ErrDeviceGone) {
				t.Errorf("AllocPD: %v", err)
			}
		}},
	} {
		for _, thread := range []bool{false, true} {
			s, c := openStub(t)
			ch, err := c.CreateCompletionChannel()
			if err != nil {
				t.Fatal(err)
			}
			cq, err := c.CreateCQ(verbs.CQInit{Capacity: 1, Channel: ch})
			if err != nil {
				t.Fatal(err)
			}
			result := make(chan error, 1)
			go func() {
				var events [1]verbs.CompletionQueue
				var err error
				if thread {
					_, err = ch.WaitThread(events[:], 10*time.Second)
				} else {
					_, err = ch.Wait(events[:])
				}
				result <- err
			}()
			time.Sleep(10 * time.Millisecond)
			way.lose(t, s, c)
			select {
			case err := <-result:
				if !errors.Is(err, verbs.ErrDeviceGone) {
					t.Errorf("%s: the waiter (thread %v) got %v", way.name, thread, err)
				}
			case <-time.After(5 * time.Second):
				t.Fatalf("%s: the waiter (thread %v) was not told", way.name, thread)
			}
			if _, err := ch.Wait(make([]verbs.CompletionQueue, 1)); !errors.Is(err, verbs.ErrDeviceGone) {
				t.Errorf("%s: the next Wait: %v", way.name, err)
			}
			// What is left can still be taken down, even though the kernel refuses commands now.
			s.mu.Lock()
			s.gone = true
			s.mu.Unlock()
			if err := cq.Destroy(); err != nil {
				t.Errorf("%s: destroy CQ: %v", way.name, err)
			}
			if err := ch.Close(); err != nil {
				t.Errorf("%s: close channel: %v", way.name, err)
			}
			if err := c.Close(); err != nil {
				t.Errorf("%s: close: %v", way.name, err)
			}
		}
	}
	// An event file that ends says so to whoever asks for events.
	s, c := openStub(t)
	s.event(t, 1, verbs.EventPortError)
	unix.Close(s.async[1])
	if e, err := c.NextAsyncEvent(); err != nil || e.Type != verbs.EventPortError || e.Port != 1 {
		t.Errorf("%+v, %v; want the port event that came before the end", e, err)
	}
	for range 2 {
		if _, err := c.NextAsyncEvent(); !errors.Is(err, verbs.ErrDeviceGone) {
			t.Errorf("NextAsyncEvent: %v", err)
		}
	}
}

// TestAsyncEvents: events find their objects, change what is known of them, and are
// dropped when their object is gone.
func TestAsyncEvents(t *testing.T) {
	s, c := openStub(t)
	pd, err := c.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	cq, err := c.CreateCQ(verbs.CQInit{Capacity: 1})
	if err != nil {
		t.Fatal(err)
	}
	qp, err := pd.CreateQP(verbs.QPInit{SendCQ: cq, RecvCQ: cq})
	if err != nil {
		t.Fatal(err)
	}
	if err := qp.Modify(&verbs.QPAttr{State: verbs.QPInitState}, verbs.QPMaskToInit); err != nil {
		t.Fatal(err)
	}
	qh, ch := qp.(*queuePair).handle, cq.(*completionQueue).handle
	next := func() verbs.AsyncEvent {
		t.Helper()
		e, err := c.NextAsyncEvent()
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	s.event(t, qh, verbs.EventCommEstablished)
	if e := next(); e.QP != qp || e.Type != verbs.EventCommEstablished || qp.State() != verbs.QPInitState {
		t.Errorf("%+v in state %s", e, qp.State())
	}
	s.event(t, qh, verbs.EventQPAccessError)
	if e := next(); e.QP != qp || e.CQ != nil || qp.State() != verbs.QPError {
		t.Errorf("%+v in state %s", e, qp.State())
	}
	s.event(t, ch, verbs.EventCQError)
	if e := next(); e.CQ != cq || e.QP != nil {
		t.Errorf("%+v", e)
	}
	if err := qp.Destroy(); err != nil {
		t.Fatal(err)
	}
	s.event(t, qh, verbs.EventQPFatal) // too late
	s.event(t, 2, verbs.EventPortActive)
	if e := next(); e.Type != verbs.EventPortActive || e.Port != 2 {
		t.Errorf("%+v", e)
	}
	// Nobody listens: the queue is bounded, the reader goes on, the last word is still heard.
	for range asyncQueueLen + 50 {
		s.event(t, 1, verbs.EventGIDChange)
	}
	s.event(t, 0, verbs.EventDeviceFatal)
	for end := time.Now().Add(5 * time.Second); !c.gone.Load(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a full queue of events hid that the device died")
		}
	}
	// Close wakes who waits.
	done := make(chan error)
	go func() {
		for {
			if _, err := c.NextAsyncEvent(); err != nil {
				done <- err
				return
			}
		}
	}()
	time.Sleep(5 * time.Millisecond)
	c.Close()
	if err := <-done; !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("%v", err)
	}
}

// TestEventsOfStrangers: a completion event with a handle that nobody has is skipped.
func TestEventsOfStrangers(t *testing.T) {
	s, c := openStub(t)
	chn, err := c.CreateCompletionChannel()
	if err != nil {
		t.Fatal(err)
	}
	cq, err := c.CreateCQ(verbs.CQInit{Capacity: 1, Channel: chn, Cookie: "mine"})
	if err != nil {
		t.Fatal(err)
	}
	event := func(h uint64) {
		var b [8]byte
		binary.NativeEndian.PutUint64(b[:], h)
		unix.Write(s.comp[1], b[:])
	}
	h := cq.(*completionQueue).handle
	for _, wait := range []func(ev []verbs.CompletionQueue) (int, error){
		chn.Wait,
		func(ev []verbs.CompletionQueue) (int, error) { return chn.WaitThread(ev, 5*time.Second) },
	} {
		for _, room := range []int{1, 2, 8} {
			event(0)
			event(h + 1000)
			event(h)
			ev := make([]verbs.CompletionQueue, room)
			if n, err := wait(ev); n != 1 || err != nil || ev[0].Cookie() != "mine" {
				t.Fatalf("room %d: %d events, %v", room, n, err)
			}
		}
		for range 3 {
			event(h)
		}
		ev := make([]verbs.CompletionQueue, 2)
		if n, err := wait(ev); n != 2 || err != nil {
			t.Fatalf("%d events, %v; want two of three", n, err)
		}
		if n, err := wait(ev); n != 1 || err != nil {
			t.Fatalf("%d events, %v; want the third", n, err)
		}
	}
	if n, err := chn.Wait(nil); n != 0 || err == nil {
		t.Errorf("Wait(nil) = %d, %v", n, err)
	}
}

// TestOpenFails: whatever refuses, the descriptors are given back. (internal tests on rxe count them.)
func TestOpenFails(t *testing.T) {
	s := newStub(t)
	s.gone = true
	if _, err := OpenOn(s, family{}, provider.Info{Name: "stub0"}, fstest.MapFS{}); err == nil {
		t.Error("a context on a device that is gone")
	}
}

func TestTables(t *testing.T) {
	s := newStub(t)
	port := "class/infiniband/stub0/ports/1/"
	sys := fstest.MapFS{
		port + "gids/0":            {Data: []byte("fe80:0000:0000:0000:5054:00ff:fe12:3456\n")},
		port + "gid_attrs/types/0": {Data: []byte("IB/RoCE v1\n")},
		port + "gids/1":            {Data: []byte("0000:0000:0000:0000:0000:ffff:0a00:0001\n")},
		port + "gid_attrs/types/1": {Data: []byte("RoCE v2\n")},
		port + "gid_attrs/ndevs/1": {Data: []byte("eth0\n")},
		port + "gids/2":            {Data: []byte("0000:0000:0000:0000:0000:0000:0000:0000\n")},
		port + "gids/3":            {Data: []byte("rubbish\n")},
		port + "link_layer":        {Data: []byte("Ethernet\n")},
		port + "pkeys/0":           {Data: []byte("0xffff\n")},
		port + "pkeys/1":           {Data: []byte("0x8001x\n")},
	}
	c, err := OpenOn(s, family{}, provider.Info{Name: "stub0"}, sys)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if e, err := c.QueryGID(1, 0); err != nil || e.Type != verbs.GIDTypeRoCEv1 || e.GID.String() != "fe80:0000:0000:0000:5054:00ff:fe12:3456" {
		t.Errorf("%+v, %v", e, err)
	}
	if e, err := c.QueryGID(1, 1); err != nil || e.Type != verbs.GIDTypeRoCEv2 || e.Netdev != "eth0" || e.GID.Addr().String() != "10.0.0.1" || e.Index != 1 {
		t.Errorf("%+v, %v", e, err)
	}
	for _, i := range []int{2, 4} {
		if _, err := c.QueryGID(1, i); !errors.Is(err, verbs.ErrNoEntry) {
			t.Errorf("GID %d: %v", i, err)
		}
	}
	for _, bad := range [][2]int{{1, 3}, {2, 0}} {
		if _, err := c.QueryGID(uint8(bad[0]), bad[1]); err == nil || errors.Is(err, verbs.ErrNoEntry) {
			t.Errorf("port %d GID %d: %v", bad[0], bad[1], err)
		}
	}
	sys[port+"link_layer"] = &fstest.MapFile{Data: []byte("InfiniBand\n")}
	if e, err := c.QueryGID(1, 0); err != nil || e.Type != verbs.GIDTypeIB {
		t.Errorf("%+v, %v", e, err)
	}
	if k, err := c.QueryPKey(1, 0); err != nil || k != 0xffff {
		t.Errorf("P_Key %#x, %v", k, err)
	}
	if _, err := c.QueryPKey(1, 1); err == nil {
		t.Error("a P_Key out of rubbish")
	}
	if _, err := c.QueryPKey(1, 2); !errors.Is(err, verbs.ErrNoEntry) {
		t.Errorf("%v", err)
	}
}
