package softroce

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"srp-initiator/internal/require"
	"srp-initiator/rdma/softroce/rc"
	"srp-initiator/rdma/softroce/udp"
	"srp-initiator/rdma/verbs"
)

const lossyTimeout = 13 // code of the ACK timeout, 34 ms: what is lost last is missed only by the timer

// lossyTraffic connects two devices and runs verified requests between them for a time. It reports what came of it.
func lossyTraffic(t *testing.T, da, db *Device, lasts time.Duration) (mbs float64, s rc.Stats) {
	t.Helper()
	a, b := newEnd(t, da, true), newEnd(t, db, true)
	p := connParam
	p.ACKTimeout = lossyTimeout
	p.Timeout = time.Minute
	connectWith(t, a, b, p)
	const depth, size = 8, 48 << 10
	var moved int
	start := time.Now()
	for round := 0; round == 0 || time.Since(start) < lasts; round++ {
		var wrs []verbs.SendWorkRequest
		for i := range depth {
			fill(a.mem.Slice(i*size, size), byte(round+i))
			remote := b.mr.Addr() + 4<<20 + uint64(i*size)
			b.recv(t, uint64(i), i*size, size)
			wrs = append(wrs,
				verbs.SendWorkRequest{Opcode: verbs.OpRDMAWrite, SGList: a.sge(i*size, size), RemoteAddr: remote, RKey: b.mr.RKey()},
				verbs.SendWorkRequest{Opcode: verbs.OpRDMARead, SGList: a.sge(4<<20+i*size, size), RemoteAddr: remote, RKey: b.mr.RKey()},
				verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: a.sge(i*size, size)})
		}
		a.send(t, wrs...)
		for _, wc := range append(a.wait(t, len(wrs)), b.wait(t, depth)...) {
			if wc.Status != verbs.WCSuccess {
				t.Fatalf("round %d: %+v", round, wc)
			}
		}
		for i := range depth {
			want := a.mem.Slice(i*size, size)
			if !bytes.Equal(want, b.mem.Slice(i*size, size)) || !bytes.Equal(want, b.mem.Slice(4<<20+i*size, size)) || !bytes.Equal(want, a.mem.Slice(4<<20+i*size, size)) {
				t.Fatalf("round %d, slot %d: wrong bytes", round, i)
			}
		}
		moved += 3 * depth * size
	}
	return float64(moved) / 1e6 / time.Since(start).Seconds(), da.Stats().Transport
}

// lossy is a socket that forgets some of what it sends: whole trains.
type lossy struct {
	*udp.Socket
	r    *rand.Rand
	loss float64
	lost int
}

func (l *lossy) Send(trains []udp.Train) (int, error) {
	for i := range trains {
		if l.r.Float64() < l.loss {
			l.lost++
			continue
		}
		if _, err := l.Socket.Send(trains[i : i+1]); err != nil {
			return i, err
		}
	}
	return len(trains), nil
}

// TestLossyLink runs verified traffic in real time over sockets that lose trains, or single packets.
func TestLossyLink(t *testing.T) {
	lasts := time.Second
	if testing.Short() {
		lasts /= 4
	}
	for _, loss := range []float64{.001, .01, .05} {
		for _, c := range []struct {
			name string
			opts udp.Options
		}{{"trains", udp.Options{}}, {"packets", udp.Options{NoGSO: true, NoGRO: true}}} {
			t.Run(fmt.Sprintf("%g%% of %s", 100*loss, c.name), func(t *testing.T) {
				var ds [2]*Device
				var ls [2]*lossy
				for i := range ds {
					s, err := udp.OpenLoopback(c.opts)
					if err != nil {
						t.Fatal(err)
					}
					ls[i] = &lossy{Socket: s, r: rand.New(rand.NewPCG(uint64(i), 8)), loss: loss}
					if ds[i], err = OpenLink(ls[i], verbs.MTU4096); err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { ds[i].Close() })
				}
				mbs, s := lossyTraffic(t, ds[0], ds[1], lasts)
				ds[0].mu.Lock()
				lost := ls[0].lost
				ds[0].mu.Unlock()
				t.Logf("%.1f MB/s verified; %d packets, %d %s lost, %d packets sent again, %d timeouts", mbs, s.TxPackets, lost, c.name, s.Retransmits, s.Timeouts)
				if loss >= .01 && s.Retransmits == 0 {
					t.Error("nothing was sent again")
				}
			})
		}
	}
}

// standstill watches the CPUs that the process may use: each must run a thread every 10 ms. The function it returns ends that and tells how long one did not
// at the worst. Emulated and shared machines stand still for longer than an ACK timeout, and then nobody is late but they.
func standstill(t *testing.T) func() time.Duration {
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	n := 0
	worst := make(chan time.Duration)
	for cpu := range 1024 {
		if !all.IsSet(cpu) {
			continue
		}
		n++
		go func() {
			runtime.LockOSThread() // the thread ends with its goroutine
			var one unix.CPUSet
			one.Set(cpu)
			unix.SchedSetaffinity(0, &one)
			var w time.Duration
			pause := unix.NsecToTimespec(int64(10 * time.Millisecond))
			for last := time.Now(); !stop.Load(); {
				unix.Nanosleep(&pause, nil)
				now := time.Now()
				w = max(w, now.Sub(last))
				last = now
			}
			worst <- w
		}()
	}
	return func() time.Duration {
		stop.Store(true)
		var w time.Duration
		for range n {
			w = max(w, <-worst)
		}
		return w
	}
}

// quietTraffic is lossyTraffic where nothing is lost, and nothing may be sent again for another reason than those that it names.
func quietTraffic(t *testing.T, da, db *Device, lasts time.Duration) (mbs float64, s rc.Stats) {
	t.Helper()
	still := standstill(t)
	mbs, s = lossyTraffic(t, da, db, lasts)
	w := still()
	b := db.Stats()
	t.Logf("longest standstill of a CPU %v, %d requests out of order, %d answers beyond a gap", w, b.Transport.OutOfOrder, s.ImpliedNaks)
	if drops := da.Stats().Socket.KernelDrops + b.Socket.KernelDrops; drops > 0 {
		t.Errorf("the kernel dropped %d datagrams", drops)
	}
	reordered := b.Transport.OutOfOrder > 0 || s.ImpliedNaks > 0
	if s.Retransmits > 0 && !reordered && w < rc.AckTimeout(lossyTimeout)/2 {
		t.Errorf("%d packets sent again after %d timeouts on a link that loses and reorders nothing: %+v", s.Retransmits, s.Timeouts, s)
	}
	return mbs, s
}

// TestQuietLoopback: over a loopback that loses nothing, nothing is sent again.
func TestQuietLoopback(t *testing.T) {
	for _, c := range []struct {
		name string
		opts []Option
	}{{"trains", nil}, {"packets", []Option{WithoutOffload()}}} {
		t.Run(c.name, func(t *testing.T) {
			mbs, s := quietTraffic(t, open(t, c.opts...), open(t, c.opts...), 500*time.Millisecond)
			t.Logf("%.1f MB/s verified; %d packets, %d sent again, %d timeouts", mbs, s.TxPackets, s.Retransmits, s.Timeouts)
		})
	}
}

// TestLossyLoopback runs verified traffic over a loopback that loses packets by netem. It changes the machine's loopback, so
// it runs in a guest. With offload netem loses whole trains, without it single packets.
func TestLossyLoopback(t *testing.T) {
	require.Guest(t)
	tc := require.Program(t, "tc")
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("loopback: %v %s", err, out)
	}
	// The loopback hands packets over on the CPU that sends them, to a queue of that CPU. When the kernel is behind with one CPU's queue (ksoftirqd) and the
	// sender moves on to another CPU, its packets overtake those it sent before, which no wire lets them. Receive packet steering to one CPU makes it a wire.
	const rps = "/sys/class/net/lo/queues/rx-0/rps_cpus"
	if err := os.WriteFile(rps, []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	defer os.WriteFile(rps, []byte("0"), 0)
	for _, loss := range []string{"0%", "0.1%", "1%", "5%"} {
		for _, c := range []struct {
			name string
			opts []Option
		}{{"trains", nil}, {"packets", []Option{WithoutOffload()}}} {
			t.Run(loss+" of "+c.name, func(t *testing.T) {
				if out, err := exec.Command(tc, "qdisc", "replace", "dev", "lo", "root", "netem", "loss", loss, "limit", "100000").CombinedOutput(); err != nil {
					t.Fatalf("netem: %v %s", err, out)
				}
				defer exec.Command(tc, "qdisc", "del", "dev", "lo", "root").Run()
				if loss == "0%" { // by itself: an emulated machine that is watched is slower
					quietTraffic(t, open(t, c.opts...), open(t, c.opts...), 500*time.Millisecond)
				}
				da, db := open(t, c.opts...), open(t, c.opts...)
				mbs, s := lossyTraffic(t, da, db, 2*time.Second)
				t.Logf("%.1f MB/s verified; %d packets, %d sent again, %d timeouts", mbs, s.TxPackets, s.Retransmits, s.Timeouts)
				if o := db.Stats().Transport.OutOfOrder; loss == "0%" && (o > 0 || s.ImpliedNaks > 0) {
					t.Errorf("%d requests out of order and %d answers beyond a gap on a wire that loses nothing", o, s.ImpliedNaks)
				}
			})
		}
	}
}
