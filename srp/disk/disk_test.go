package disk_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"

	"srp-initiator/completion"
	"srp-initiator/rdma/softroce"
	"srp-initiator/srp"
	"srp-initiator/srp/disk"
	"srp-initiator/srp/scsi"
	targetemu "srp-initiator/target-emu"
	"srp-initiator/target-emu/lun"
	"srp-initiator/target-emu/lun/luntest"
)

// target starts a target-emu with units on softroce and returns how to log in to it.
func target(t testing.TB, faults string, units *lun.Map) func(change ...func(*srp.LoginOptions)) *srp.Session {
	t.Helper()
	device := func() *softroce.Device {
		d, err := softroce.Open(netip.Addr{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		return d
	}
	td := device()
	f, err := targetemu.ParseFaults(faults)
	if err != nil {
		t.Fatal(err)
	}
	cfg := targetemu.Config{Listen: netip.AddrPortFrom(td.Addr(), 5555), Units: units, IDExt: 1, IOCGUID: 2, Faults: f}
	emu, err := targetemu.New(td, td.Connector(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { emu.Serve(ctx); close(ended) }()
	t.Cleanup(func() { cancel(); <-ended })
	return func(change ...func(*srp.LoginOptions)) *srp.Session {
		o := srp.DefaultLoginOptions()
		for _, f := range change {
			f(&o)
		}
		d := device()
		s, err := srp.Login(context.Background(), srp.Config{Device: d, Connector: d.Connector(), Notice: func(s string) { t.Log(s) }},
			srp.TargetPort{IDExt: 1, IOCGUID: 2, IOClass: srp.IOClassRev16a, Dest: cfg.Listen}, o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return s
	}
}

func units(t testing.TB, us ...*lun.Unit) *lun.Map {
	m := &lun.Map{}
	for i, u := range us {
		if err := m.Add(uint32(i), u); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

func open(t testing.TB, s *srp.Session, n uint32) *disk.Disk {
	t.Helper()
	d, err := disk.Open(context.Background(), s, scsi.NewLUN(n))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// exercise writes and reads random ranges of d and holds them against a copy.
func exercise(t *testing.T, d disk.Device, rounds int) {
	t.Helper()
	size := d.Size()
	model := make([]byte, size)
	if _, err := d.ReadAt(model, 0); err != nil {
		t.Fatal(err)
	}
	rnd := rand.New(rand.NewPCG(3, 4))
	ctx := context.Background()
	for i := range rounds {
		n := 1 + rnd.Int64N(1<<(1+rnd.IntN(20)))
		off := rnd.Int64N(size)
		n = min(n, size-off)
		switch i % 5 {
		case 0, 1:
			p := make([]byte, n)
			for j := range p {
				p[j] = byte(rnd.Uint32())
			}
			m, err := d.WriteAtContext(ctx, p, off, i%2 == 0)
			if err != nil || int64(m) != n {
				t.Fatalf("write %d at %d: %d, %v", n, off, m, err)
			}
			copy(model[off:], p)
		case 2:
			if err := d.WriteZeros(ctx, off, n, true); err != nil {
				t.Fatalf("zero %d at %d: %v", n, off, err)
			}
			clear(model[off : off+n])
		default:
			p := make([]byte, n)
			m, err := d.ReadAt(p, off)
			if err != nil || int64(m) != n {
				t.Fatalf("read %d at %d: %d, %v", n, off, m, err)
			}
			if !bytes.Equal(p, model[off:off+n]) {
				t.Fatalf("read %d at %d: data differ", n, off)
			}
		}
	}
	if err := d.Sync(ctx); err != nil {
		t.Error(err)
	}
	all := make([]byte, size)
	if _, err := d.ReadAt(all, 0); err != nil || !bytes.Equal(all, model) {
		t.Errorf("the whole device differs (%v)", err)
	}
	// The ends.
	var re *disk.RangeError
	if n, err := d.ReadAt(make([]byte, 1000), size-600); n != 600 || err != io.EOF {
		t.Errorf("read over the end: %d, %v", n, err)
	}
	if n, err := d.ReadAt(make([]byte, 10), size); n != 0 || err != io.EOF {
		t.Errorf("read at the end: %d, %v", n, err)
	}
	if _, err := d.WriteAt(make([]byte, 1000), size-600); !errors.As(err, &re) {
		t.Errorf("write over the end: %v", err)
	}
	if _, err := d.ReadAt(make([]byte, 10), size+1); !errors.As(err, &re) {
		t.Errorf("read beyond the end: %v", err)
	}
	if n, err := d.ReadAt(nil, 5); n != 0 || err != nil {
		t.Errorf("read nothing: %d, %v", n, err)
	}
}

func TestDisk(t *testing.T) {
	for _, spec := range []string{"ram:4m", "ram:4m,bs=4096"} {
		for _, m := range completion.Modes() {
			t.Run(fmt.Sprintf("%s/%s", spec, m), func(t *testing.T) {
				login := target(t, "", units(t, luntest.Unit(t, spec, lun.Config{})))
				s := login(func(o *srp.LoginOptions) {
					o.Completion.Mode, o.ChannelCount, o.MaxSectors, o.MaxCmdPerLUN = m, 2, 128, 5
				})
				exercise(t, open(t, s, 0), 60)
			})
		}
	}
}

// The unit's limits bind: no command moves, unmaps or zeroes more.
func TestLimits(t *testing.T) {
	limits := scsi.BlockLimits{MaxTransfer: 8, OptimalTransfer: 7, MaxUnmapBlocks: 1000, MaxUnmapDescriptors: 1, OptimalUnmapGranularity: 128,
		UnmapAlignment: 8, UnmapAlignmentValid: true, MaxWriteSame: 256, WSNZ: true}
	login := target(t, "", units(t, luntest.Unit(t, "ram:2m", lun.Config{Limits: &limits})))
	d := open(t, login(), 0)
	if d.MaxTransfer() != 4096 {
		t.Errorf("transfers of %d bytes", d.MaxTransfer())
	}
	exercise(t, d, 40)
	if err := d.Discard(context.Background(), 512+13, 1<<20+512); err != nil {
		t.Error(err)
	}
}

// Unit attentions, BUSY and TASK SET FULL are retried; a reservation conflict is not.
func TestRetries(t *testing.T) {
	login := target(t, `
		cmd op=read nth=2 : ua 29/00
		cmd op=read nth=3 : ua 2a/09
		cmd op=read nth=8 : status busy
		cmd op=read nth=9 : status task-set-full
		cmd op=read nth=10 : status task-aborted
		cmd op=read nth=11 : sense aborted-command 47/03
		cmd op=write : status reservation-conflict`, units(t, luntest.Unit(t, "ram:1m", lun.Config{})))
	d := open(t, login(), 0)
	b := make([]byte, 512)
	for i := range 12 {
		if _, err := d.ReadAt(b, 0); err != nil {
			t.Errorf("read %d: %v", i, err)
		}
	}
	began := time.Now()
	var se *scsi.StatusError
	if _, err := d.WriteAt(b, 0); !errors.As(err, &se) || se.Status != scsi.StatusReservationConflict || time.Since(began) > time.Second {
		t.Errorf("write: %v", err)
	}
}

// BUSY for ever ends with the command's time limit.
func TestBusyForEver(t *testing.T) {
	login := target(t, "cmd op=read : status busy", units(t, luntest.Unit(t, "ram:1m", lun.Config{})))
	d := open(t, login(func(o *srp.LoginOptions) { o.CommandTimeout = 500 * time.Millisecond }), 0)
	began := time.Now()
	var se *scsi.StatusError
	_, err := d.ReadAt(make([]byte, 512), 0)
	if took := time.Since(began); !errors.As(err, &se) || took < 100*time.Millisecond || took > 2*time.Second {
		t.Errorf("after %s: %v", took, err)
	}
}

// Success with bytes missing is no success.
func TestShortTransfer(t *testing.T) {
	login := target(t, "cmd op=read : residual in-under=512", units(t, luntest.Unit(t, "ram:1m", lun.Config{})))
	d := open(t, login(), 0)
	if n, err := d.ReadAt(make([]byte, 4096), 0); err == nil || n != 4096-512 {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// Who waits for one of the unit's max_cmd_per_lun commands, or for its turn to change a part of a block, stops when its context ends.
func TestWaitsHeedContext(t *testing.T) {
	login := target(t, "cmd op=read : hold", units(t, luntest.Unit(t, "ram:1m", lun.Config{})))
	for _, part := range []bool{false, true} {
		s := login(func(o *srp.LoginOptions) {
			if !part {
				o.MaxCmdPerLUN = 1
			}
		})
		d := open(t, s, 0)
		access := func(ctx context.Context, off int64) error {
			if part {
				_, err := d.WriteAtContext(ctx, []byte("part of a block"), off, false)
				return err
			}
			_, err := d.ReadAtContext(ctx, make([]byte, 512), off)
			return err
		}
		first, cancel := context.WithCancel(context.Background())
		held := make(chan error, 1)
		go func() { held <- access(first, 0) }()
		for s.Stats().Channels[0].Inflight == 0 {
			time.Sleep(time.Millisecond)
		}
		before := s.Stats().Total.Commands
		waits := make(chan error, 2)
		soon, end := context.WithTimeout(context.Background(), 20*time.Millisecond)
		ended, already := context.WithCancel(context.Background())
		already()
		go func() { waits <- access(soon, 4096) }()
		go func() { waits <- access(ended, 4096) }()
		for range 2 {
			select {
			case err := <-waits:
				if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled) {
					t.Errorf("part %v: %v", part, err)
				}
			case <-time.After(10 * time.Second):
				t.Errorf("part %v: waits on after its context has ended", part)
			}
		}
		if n := s.Stats().Total.Commands; n != before {
			t.Errorf("part %v: %d commands sent", part, n-before)
		}
		cancel()
		if err := <-held; !errors.Is(err, context.Canceled) {
			t.Errorf("part %v: the access that was held: %v", part, err)
		}
		end()
	}
}

const spanSize = 16 << 10

// spanLog is a device that remembers what it was told to discard and to zero.
type spanLog struct {
	disk.Device
	mu    sync.Mutex
	calls [][2]int64
}

func (l *spanLog) add(off, n int64) {
	l.mu.Lock()
	l.calls = append(l.calls, [2]int64{off, n})
	l.mu.Unlock()
}

func (l *spanLog) Discard(_ context.Context, off, n int64) error { l.add(off, n); return nil }
func (l *spanLog) WriteZeros(_ context.Context, off, n int64, _ bool) error {
	l.add(off, n)
	return nil
}
func (l *spanLog) Size() int64    { return spanSize }
func (l *spanLog) BlockSize() int { return 512 }

// What a stripe discards and zeroes is, byte for byte, what its chunks say, in one request for each member.
func TestStripeSpans(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 8))
	ctx := context.Background()
	for _, members := range []int{2, 3, 5} {
		var logs []*spanLog
		var ds []disk.Device
		for range members {
			l := &spanLog{}
			logs, ds = append(logs, l), append(ds, l)
		}
		const chunk = 1024
		s, err := disk.NewStripe(ds, chunk)
		if err != nil {
			t.Fatal(err)
		}
		size := s.Size()
		for i := range 2000 {
			off := rnd.Int64N(size)
			n := rnd.Int64N(size - off + 1)
			switch i % 4 { // ends at, just before and just behind those of chunks
			case 0:
				off = off / chunk * chunk
			case 1:
				off = off/chunk*chunk + rnd.Int64N(3)
				n = min(n/chunk*chunk+rnd.Int64N(3), size-off)
			case 2:
				n = min(n, rnd.Int64N(2*chunk))
			}
			var want [5][spanSize]bool
			for b := off; b < off+n; b++ {
				m, at, _ := s.Locate(b)
				want[m][at] = true
			}
			if i%2 == 0 {
				err = s.Discard(ctx, off, n)
			} else {
				err = s.WriteZeros(ctx, off, n, true)
			}
			if err != nil {
				t.Fatal(err)
			}
			for m, l := range logs {
				if len(l.calls) > 1 {
					t.Fatalf("%d bytes at %d: %d requests of member %d", n, off, len(l.calls), m)
				}
				var got [spanSize]bool
				for _, c := range l.calls {
					for b := c[0]; b < c[0]+c[1]; b++ {
						got[b] = true
					}
				}
				if got != want[m] {
					t.Fatalf("%d bytes at %d: member %d is asked for %v", n, off, m, l.calls)
				}
				l.calls = nil
			}
		}
	}
}

// A large discard costs what its commands cost, not what its chunks would.
func TestStripeDiscardLarge(t *testing.T) {
	us := units(t, luntest.Unit(t, "null:1t", lun.Config{}), luntest.Unit(t, "null:1t", lun.Config{}))
	s := target(t, "", us)()
	first := open(t, s, 0)
	st, err := disk.NewStripe([]disk.Device{first, open(t, s, 1)}, 64<<10)
	if err != nil {
		t.Fatal(err)
	}
	before := s.Stats().Total.Commands
	var a, b runtime.MemStats
	runtime.ReadMemStats(&a)
	const off, n = 12345, 1 << 40
	if err := st.Discard(context.Background(), off, n); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&b)
	most := n/(int64(first.Limits().MaxUnmapBlocks)*512) + 2
	commands, allocated := int64(s.Stats().Total.Commands-before), b.TotalAlloc-a.TotalAlloc
	t.Logf("%d commands, %d bytes in %d objects allocated", commands, allocated, b.Mallocs-a.Mallocs)
	if commands > most || allocated > 8<<20 {
		t.Errorf("%d commands, at most %d can be needed; %d bytes allocated", commands, most, allocated)
	}
}

func TestStripe(t *testing.T) {
	login := target(t, "", units(t, luntest.Unit(t, "ram:1m", lun.Config{}), luntest.Unit(t, "ram:1m", lun.Config{}), luntest.Unit(t, "ram:1200k", lun.Config{})))
	a, b := login(), login(func(o *srp.LoginOptions) { o.InitiatorExt = 2 })
	members := []disk.Device{open(t, a, 0), open(t, b, 1), open(t, a, 2)}
	s, err := disk.NewStripe(members, 16<<10)
	if err != nil {
		t.Fatal(err)
	}
	if s.Size() != 3<<20 {
		t.Errorf("size %d", s.Size())
	}
	for _, x := range []struct{ off, member, at, run int64 }{{0, 0, 0, 16384}, {16384, 1, 0, 16384}, {16384*3 + 5, 0, 16384 + 5, 16379}, {16384*5 - 1, 1, 32767, 1}} {
		if m, at, run := s.Locate(x.off); int64(m) != x.member || at != x.at || run != x.run {
			t.Errorf("byte %d: member %d, %d, run %d", x.off, m, at, run)
		}
	}
	exercise(t, s, 60)
	if _, ok := s.Poll(10); !ok {
		t.Error("a stripe of disks can be polled")
	}
	if _, err := disk.NewStripe(members, 1000); err == nil {
		t.Error("chunk of 1000 bytes accepted")
	}
	if _, err := disk.NewStripe(members[:1], 4096); err == nil {
		t.Error("stripe of one accepted")
	}
}

// A path is lost under load and comes back; no write gets lost.
func TestMultipath(t *testing.T) {
	for _, policy := range []disk.Policy{disk.RoundRobin, disk.LeastQueue} {
		u := luntest.Unit(t, "ram:4m", lun.Config{Serial: "shared"})
		one := target(t, "cmd op=write nth=30 : vanish 2s", units(t, u))
		two := target(t, "", units(t, u))
		quick := func(o *srp.LoginOptions) {
			o.ReconnectDelay, o.FastIOFail, o.ConnectTimeout = 100*time.Millisecond, 100*time.Millisecond, 200*time.Millisecond
			o.CommandTimeout, o.TaskMgmtTimeout, o.TLRetryCount = 300*time.Millisecond, 200*time.Millisecond, 2
		}
		ctx := context.Background()
		m, err := disk.NewMultipath(ctx, []*disk.Disk{open(t, one(quick), 0), open(t, two(quick), 0)}, policy)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for g := range 4 {
			wg.Go(func() {
				p, back := make([]byte, 4096), make([]byte, 4096)
				for i := range 150 {
					for j := range p {
						p[j] = byte(i*31 + g*7 + j)
					}
					off := int64(g)<<20 + int64(i)*4096
					if _, err := m.WriteAt(p, off); err != nil {
						t.Errorf("write: %v", err)
						return
					}
					if _, err := m.ReadAt(back, off); err != nil || !bytes.Equal(p, back) {
						t.Errorf("read back: %v, equal %v", err, bytes.Equal(p, back))
						return
					}
				}
			})
		}
		wg.Wait()
		st := m.Stats()
		t.Logf("%+v", st)
		if st[0].Requests == 0 || st[1].Requests == 0 || st[0].Failures == 0 || st[1].Failures > 0 {
			t.Errorf("%+v: both paths carry requests, and the first failed", st)
		}
	}
	other := target(t, "", units(t, luntest.Unit(t, "ram:4m", lun.Config{Serial: "a"}), luntest.Unit(t, "ram:4m", lun.Config{Serial: "b"})))
	s := other()
	if _, err := disk.NewMultipath(context.Background(), []*disk.Disk{open(t, s, 0), open(t, s, 1)}, disk.RoundRobin); err == nil {
		t.Error("two different units accepted as paths of one")
	}
}
