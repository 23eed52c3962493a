package softroce

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"srp-initiator/rdma/softroce/udp"
	"srp-initiator/rdma/verbs"
)

// timeless is a socket that counts who is woken for packets, and whose device, once it is frozen, has no timers: no watchdog, no delayed acknowledgement
// and no retransmission makes up for a wake-up that was lost.
type timeless struct {
	*udp.Socket
	frozen atomic.Bool
	leader atomic.Int32 // wake-ups
	pump   atomic.Int32
}

func (l *timeless) SetDeadline(t time.Time) error {
	if l.frozen.Load() && t.Unix() > 1 { // what Close sets is for real
		return nil
	}
	return l.Socket.SetDeadline(t)
}

func (l *timeless) Park() (bool, error) {
	readable, err := l.Socket.Park()
	l.leader.Add(1)
	return readable, err
}

func (l *timeless) WaitReadable() error {
	err := l.Socket.WaitReadable()
	if err == nil {
		l.pump.Add(1)
	}
	return err
}

func (l *timeless) freeze() {
	l.frozen.Store(true)
	l.Socket.SetDeadline(time.Time{})
}

func openTimeless(t *testing.T) (*Device, *timeless) {
	t.Helper()
	s, err := udp.OpenLoopback(udp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	l := &timeless{Socket: s}
	d, err := OpenLink(l, verbs.MTU4096)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d, l
}

// within fails the test unless f comes true in 20 s.
func within(t *testing.T, what string, f func() bool) {
	t.Helper()
	for limit := time.Now().Add(20 * time.Second); !f(); runtime.Gosched() {
		if time.Now().After(limit) {
			t.Fatal(what)
		}
	}
}

// idle has e's queue armed and waits for its notifications; it counts what they bring.
func idle(e *end, thread bool, got *atomic.Int32) <-chan error {
	ended := make(chan error, 1)
	go func() {
		var wcs [4]verbs.WorkCompletion
		for {
			for n := 1; n > 0; got.Add(int32(n)) {
				n = e.cq.Poll(wcs[:])
			}
			missed, err := e.cq.Arm(false)
			if err == nil && !missed {
				if thread {
					_, err = e.ch.WaitThread(e.events, -1)
				} else {
					_, err = e.ch.Wait(e.events)
				}
			}
			if err != nil {
				ended <- err
				return
			}
		}
	}()
	return ended
}

// TestDriver: while an owner polls on nobody is woken for its packets, what comes for others reaches them, and when it no longer polls somebody watches the link again,
// whatever way the promise was taken back.
func TestDriver(t *testing.T) {
	for _, thread := range []bool{false, true} {
		for _, how := range []string{"arm", "rest", "destroy"} {
			t.Run(fmt.Sprintf("%s/thread=%v", how, thread), func(t *testing.T) {
				d, link := openTimeless(t)
				peers := open(t)
				busy, busyPeer := newEnd(t, d, false), newEnd(t, peers, false)
				connect(t, busy, busyPeer)
				others, peersOfOthers := make([]*end, 3), make([]*end, 3)
				got := make([]atomic.Int32, 3)
				for k := range others {
					others[k], peersOfOthers[k] = newEnd(t, d, false), newEnd(t, peers, false)
					connect(t, others[k], peersOfOthers[k])
					for i := range 64 {
						others[k].recv(t, uint64(i), 0, 8)
					}
				}
				link.freeze()
				var ends []<-chan error
				for k := range others {
					ends = append(ends, idle(others[k], thread, &got[k]))
				}
				armed := func(n int) func() bool {
					return func() bool {
						d.mu.Lock()
						defer d.mu.Unlock()
						return d.waiting == n && d.led
					}
				}
				within(t, "nobody leads", armed(3))
				hello := func(e *end) { e.send(t, verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: e.sge(0, 8)}) }
				exchange := func() {
					busy.recv(t, 1, 0, 8)
					hello(busyPeer)
					busy.poll(t, 1)
				}
				var wcs [1]verbs.WorkCompletion
				dozes := func() bool {
					d.mu.Lock()
					defer d.mu.Unlock()
					return !d.led && d.drivers == 1
				}
				for round := range 10 {
					busy.cq.(verbs.Driver).PollsOn()
					within(t, "the leader goes on watching the link", func() bool { exchange(); return dozes() })
					leader, pump := link.leader.Load(), link.pump.Load()
					for range 100 {
						exchange()
					}
					if l, p := link.leader.Load()-leader, link.pump.Load()-pump; l > 0 || p > 1 { // the pump may have been woken by the last of those before
						t.Errorf("the leader was woken %d times, and the pump %d times, for packets that somebody polled for", l, p)
					}
					// Nobody but the one who promised moves packets.
					k := round % 3
					before := got[k].Load()
					hello(peersOfOthers[k])
					within(t, "a poller does not notify others", func() bool { return busy.cq.Poll(wcs[:]) > 0 || got[k].Load() != before })
					within(t, "nobody waits", func() bool {
						d.mu.Lock()
						defer d.mu.Unlock()
						return d.waiting == 3
					})
					if how == "destroy" {
						break
					}
					if how == "rest" {
						busy.cq.(verbs.Driver).Rests()
					} else if missed, err := busy.cq.Arm(false); missed || err != nil {
						t.Fatal(missed, err)
					}
					for k := range others {
						before := got[k].Load()
						hello(peersOfOthers[k])
						within(t, "what comes for others is left to one who has taken back that he polls", func() bool { return got[k].Load() != before })
					}
					within(t, "nobody leads", armed(map[string]int{"rest": 3, "arm": 4}[how]))
				}
				if how == "destroy" {
					busy.cq.(verbs.Driver).PollsOn()
					busy.cq.Poll(wcs[:])
					busy.conn.Disconnect()
					if err := busy.qp.Destroy(); err != nil {
						t.Fatal(err)
					}
					for busy.cq.Poll(wcs[:]) > 0 {
					}
					if err := busy.cq.Destroy(); err != nil {
						t.Fatal(err)
					}
					for k := range others {
						before := got[k].Load()
						hello(peersOfOthers[k])
						within(t, "what comes for others is left to a queue that was destroyed", func() bool { return got[k].Load() != before })
					}
				}
				d.Close()
				for _, ended := range ends {
					select {
					case <-ended:
					case <-time.After(20 * time.Second):
						t.Fatal("a waiter stays behind")
					}
				}
			})
		}
	}
}

// TestThreadDozes: a thread that waits, and does not watch the link for the sake of one who polls, can rely on it that somebody does once his queue is armed.
func TestThreadDozes(t *testing.T) {
	d, link := openTimeless(t)
	peers := open(t)
	busy, e, peer := newEnd(t, d, false), newEnd(t, d, false), newEnd(t, peers, false)
	connect(t, e, peer)
	e.recv(t, 1, 0, 8)
	link.freeze()
	var wcs [1]verbs.WorkCompletion
	for n := 1; n > 0; n = busy.cq.Poll(wcs[:]) {
		busy.cq.(verbs.Driver).PollsOn()
	}
	taken := make(chan error, 1)
	go func() {
		_, err := e.ch.WaitThread(e.events, -1)
		taken <- err
	}()
	ch := e.ch.(*channel)
	within(t, "the thread does not wait", func() bool {
		ch.mu.Lock()
		defer ch.mu.Unlock()
		return ch.waits == onEvent
	})
	busy.cq.(verbs.Driver).Rests()
	if missed, err := e.cq.Arm(false); missed || err != nil {
		t.Fatal(missed, err)
	}
	peer.send(t, verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: peer.sge(0, 8)})
	select {
	case err := <-taken:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("nobody watches the link for the thread")
	}
}

// TestDriversUnderWay: owners of all kinds on one device take and withdraw promises at any moment, while messages come singly and together, with nothing behind
// them and no timers. Each is found without another's help, and the device closes at any moment.
func TestDriversUnderWay(t *testing.T) {
	const ends, slots = 6, 64
	rounds := 2000
	if testing.Short() || raceEnabled {
		rounds = 200
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	d, link := openTimeless(t)
	peers := open(t)
	var mine, theirs [ends]*end
	var got [ends]atomic.Int32
	var resting [ends]atomic.Bool
	var takeUp [ends]chan struct{}
	for k := range mine {
		takeUp[k] = make(chan struct{}, 1)
		mine[k], theirs[k] = newEnd(t, d, false), newEnd(t, peers, false)
		connect(t, mine[k], theirs[k])
		for i := range slots {
			mine[k].recv(t, uint64(i), 0, 8)
		}
	}
	link.freeze()
	var wg sync.WaitGroup
	for k := range mine {
		e, r := mine[k], rand.New(rand.NewPCG(seed, uint64(k)))
		// The waiter serves itself, or goes back to wait while another serves.
		wait := func() error {
			var err error
			if k == 1 {
				_, err = e.ch.WaitThread(e.events, -1)
			} else {
				_, err = e.ch.Wait(e.events)
			}
			return err
		}
		if k%2 == 0 {
			rang, own := make(chan struct{}, 1), wait
			var over atomic.Bool
			wg.Go(func() {
				for own() == nil {
					select {
					case rang <- struct{}{}:
					default:
					}
				}
				over.Store(true)
				close(rang)
			})
			wait = func() error {
				if <-rang; over.Load() {
					return verbs.ErrClosed
				}
				return nil
			}
		}
		wg.Go(func() {
			var wcs [4]verbs.WorkCompletion
			driver := e.cq.(verbs.Driver)
			poll := func() int {
				n := e.cq.Poll(wcs[:])
				for i := range n {
					if wcs[i].Status == verbs.WCSuccess {
						e.qp.PostRecv([]verbs.RecvWorkRequest{{WRID: wcs[i].WRID, SGList: e.sge(0, 8)}})
					}
				}
				got[k].Add(int32(n))
				return n
			}
			for {
				for poll() > 0 {
				}
				for range r.IntN(3) * r.IntN(3) * r.IntN(200) {
					driver.PollsOn()
					poll()
					if r.IntN(4) == 0 {
						runtime.Gosched()
					}
				}
				if k >= 3 && r.IntN(2) == 0 {
					// Nothing moves here any more until all that came for others was found.
					driver.Rests()
					resting[k].Store(true)
					<-takeUp[k]
				}
				missed, err := e.cq.Arm(false)
				if err == nil && !missed {
					err = wait()
				}
				if err != nil {
					return
				}
			}
		})
	}
	r := rand.New(rand.NewPCG(seed, ends))
	var sent [ends]int32
	for round := range rounds {
		for range 1 + r.IntN(4)*r.IntN(4) {
			for range r.IntN(2) * r.IntN(300) { // one behind the other, or together
				runtime.Gosched()
			}
			k := r.IntN(ends)
			if sent[k]-got[k].Load() < slots/2 {
				sent[k]++
				theirs[k].send(t, verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: theirs[k].sge(0, 8)})
			}
		}
		if r.IntN(8) == 0 {
			continue // more on top
		}
		for k := range mine {
			within(t, fmt.Sprintf("round %d: queue %d: a message came and nobody was told", round, k), func() bool { return got[k].Load() == sent[k] || resting[k].Load() })
		}
		for k := range mine {
			if resting[k].Load() && r.IntN(3) == 0 {
				resting[k].Store(false)
				takeUp[k] <- struct{}{}
			}
		}
	}
	d.Close()
	for k := range takeUp {
		close(takeUp[k])
	}
	gone := make(chan struct{})
	go func() { wg.Wait(); close(gone) }()
	select {
	case <-gone:
	case <-time.After(20 * time.Second):
		t.Fatal("an owner or a waiter stays behind")
	}
}
