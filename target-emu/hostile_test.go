package targetemu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"srp-initiator/completion"
	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/softroce/ibcm"
	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/verbs"
	"srp-initiator/target-emu/lun"
)

// prOut sends PERSISTENT RESERVE OUT.
func (p *peer) prOut(tag uint64, action, typ byte, key, saKey uint64) {
	p.t.Helper()
	list := p.data(3<<20, 24)
	clear(list)
	be.PutUint64(list, key)
	be.PutUint64(list[8:], saKey)
	p.send(p.direct(cmdBytes(tag, 0, 0x10, 0x5f, action, typ, 0, 0, 0, 0, 0, 24, 0), 3<<20, 24))
}

// stuckWrite sends a WRITE whose data do not come, as from a node that loses its power: the target goes on asking for them.
func (p *peer) stuckWrite(r *rig) {
	p.t.Helper()
	r.target.memoryLock.Lock() // the target's device sees the command when the peer is dumb already
	var pieces [][2]int        // so many that the target asks for them in many steps, and what is under way in one of them is not the rest
	for i := range 2048 {
		pieces = append(pieces, [2]int{i * 1500, 1500})
	}
	p.sendOnly(p.indirect(cmdBytes(2, 0, 0x20, rw10(0x2a, 0, 6000)...), 7<<19, 0, pieces))
	p.dumb()
	r.target.memoryLock.Unlock()
	r.wait(1)
}

// dumb makes the peer's queue pair answer nothing any more.
func (p *peer) dumb() {
	p.t.Helper()
	if err := p.qp.Modify(&verbs.QPAttr{State: verbs.QPError}, verbs.QPMaskState); err != nil {
		p.t.Fatal(err)
	}
}

// What ends another's commands is answered, but not as long as one of them may still write to the unit.
func TestFunctionsWaitForOthersData(t *testing.T) {
	f := openFabric(t)
	for name, end := range map[string]func(b *peer){
		"LUN RESET":         func(b *peer) { b.send(tmfBytes(0x80000001, 0, 8, 0)) },
		"CLEAR TASK SET":    func(b *peer) { b.send(tmfBytes(0x80000001, 0, 4, 0)) },
		"PREEMPT AND ABORT": func(b *peer) { b.prOut(0x80000001, 5, 1, 2, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Config{}, "")
			a, b := r.login(f, 1, false), r.login(f, 2, false)
			a.prOut(1, 0, 0, 0, 1)
			a.good(a.recv(), 1)
			b.prOut(1, 0, 0, 0, 2)
			b.good(b.recv(), 1)
			a.stuckWrite(r)
			end(b)
			if g, err := b.next(300 * time.Millisecond); err != errTimeout {
				t.Errorf("answered while the other's data may come: % x, %v", g, err)
			}
			a.close()
			if g := b.recv(); be.Uint64(g[8:]) != 0x80000001 || g[19] != 0 {
				t.Errorf("% x", g)
			}
		})
	}
}

// Whatever the commands of others are doing, a function that ends them is answered, and they end with TASK ABORTED.
func TestFunctionsAgainstLoad(t *testing.T) {
	r := newRig(t, Config{}, "")
	f := openFabric(t)
	a, b := r.login(f, 1, false), r.login(f, 2, false)
	stop := make(chan struct{})
	var load sync.WaitGroup
	load.Go(func() {
		for n := uint64(0); ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			op, format := byte(0x2a), byte(0x10)
			if n%2 == 0 {
				op, format = 0x28, 0x01
			}
			a.send(a.direct(cmdBytes(n, 0, format, rw10(op, 0, 4096)...), 0, 2<<20))
			if g := a.recv(); be.Uint64(g[8:]) != n || g[19] != 0 && g[19] != 2 && g[19] != 0x40 {
				t.Errorf("% x", g)
			}
		}
	})
	for i := range uint64(60) {
		fn := byte(8)
		if i%2 == 0 {
			fn = 4
		}
		b.send(tmfBytes(0x80000000+i, 0, fn, 0))
		g, err := b.next(30 * time.Second)
		if err != nil {
			t.Fatalf("function %d of 60: %v", i, err)
		}
		b.tmfDone(g, 0x80000000+i, 0, 1)
		time.Sleep(time.Duration(i%7) * time.Millisecond)
	}
	close(stop)
	load.Wait()
}

// A later function waits for a command that an earlier one has already given up.
func TestSecondFunctionWaitsToo(t *testing.T) {
	r := newRig(t, Config{}, "")
	f := openFabric(t)
	a, b, c := r.login(f, 1, false), r.login(f, 2, false), r.login(f, 3, false)
	a.stuckWrite(r)
	for _, p := range []*peer{b, c} {
		p.send(tmfBytes(0x80000001, 0, 8, 0))
		if g, err := p.next(200 * time.Millisecond); err != errTimeout {
			t.Errorf("answered while the data may come: % x, %v", g, err)
		}
	}
	a.close()
	b.tmfDone(b.recv(), 0x80000001, 0, 1)
	c.tmfDone(c.recv(), 0x80000001, 0, 1)
}

// Of two logins of one initiator port the one that came last stays, whichever the target gets to first.
func TestLastLoginStays(t *testing.T) {
	f := openFabric(t)
	for round := range 6 {
		// They come 20 ms apart and go on at the same moment.
		r := newRig(t, Config{}, "login nth=1 : delay 250ms\nlogin nth=2 : delay 230ms\nlogin nth=3 : delay 210ms\nlogin nth=4 : delay 190ms")
		var logins sync.WaitGroup
		peers := make([]*peer, 4)
		var last error
		for i := range peers {
			peers[i] = newPeer(t, f)
			logins.Go(func() {
				rej, err := peers[i].dial(r, loginBytes(1, r.target.PortID(), false))
				if rej != nil {
					err = fmt.Errorf("refused: % x", rej)
				}
				if i == len(peers)-1 {
					last = err
				}
			})
			time.Sleep(20 * time.Millisecond)
			r.settles(func() bool { return r.target.arrivals.Load() >= uint64(i+1) })
		}
		logins.Wait()
		if last != nil {
			t.Fatalf("round %d: the last login: %v", round, last)
		}
		q := peers[len(peers)-1]
		q.sendOnly(cmdBytes(5, 0, 0, 0x12, 0, 0, 0, 0, 0))
		if g, err := q.next(5 * time.Second); err != nil {
			t.Fatalf("round %d: the channel of the last login: %v", round, err)
		} else {
			q.good(g, 5)
		}
		r.settles(func() bool { return len(r.target.Stats().Channels) == 1 })
		for _, p := range peers {
			p.close()
		}
		r.stop()
	}
}

// A script that sends more than the send queue holds has to wait for it, and the responses come all the same.
func TestScriptsBeyondTheSendQueue(t *testing.T) {
	for _, rule := range []string{"duplicate 9", "send opcode=7f len=20" + strings.Repeat(" ; send opcode=7f len=20", 9)} {
		r := newRig(t, Config{RequestLimit: 128}, fmt.Sprintf("cmd op=read : hold ; %s\ncmd op=tur : release", rule))
		p := r.login(openFabric(t), 1, false)
		for i := range uint64(60) {
			var pieces [][2]int
			const n = 59 // the eleventh leaves room for nine more
			for j := range n {
				pieces = append(pieces, [2]int{j * 512, 512})
			}
			b := p.indirect(cmdBytes(i, 0, 2, rw10(0x28, 0, uint16(n))...), 2<<20, n, pieces)
			b[7] = byte(n)
			p.send(b)
		}
		r.wait(60)
		p.send(cmdBytes(99, 0, 0))
		seen := map[uint64]bool{}
		for len(seen) < 61 {
			g, err := p.next(30 * time.Second)
			if err != nil {
				t.Fatalf("%.30s...: %d of 61 responses, then %v", rule, len(seen), err)
			}
			if g[0] == 0xc1 {
				seen[be.Uint64(g[8:])] = true
			}
		}
		p.close()
		r.stop()
	}
}

// slowStore takes its time, when it is told to.
type slowStore struct {
	lun.Store
	gate atomic.Pointer[chan struct{}] // nil: no waiting
	in   atomic.Int32                  // calls that wait
	most atomic.Int32
}

func (s *slowStore) wait() {
	if g := s.gate.Load(); g != nil {
		n := s.in.Add(1)
		for m := s.most.Load(); n > m && !s.most.CompareAndSwap(m, n); m = s.most.Load() {
		}
		<-*g
		s.in.Add(-1)
	}
}

func (s *slowStore) ReadAt(p []byte, off int64) (int, error) { s.wait(); return s.Store.ReadAt(p, off) }
func (s *slowStore) WriteAt(p []byte, off int64) (int, error) {
	s.wait()
	return s.Store.WriteAt(p, off)
}
func (s *slowStore) Sync() error                                   { s.wait(); return s.Store.Sync() }
func (s *slowStore) Zero(off, n int64, d bool) error               { s.wait(); return s.Store.Zero(off, n, d) }
func (s *slowStore) Regions() []*hostmem.Region                    { return nil }
func (s *slowStore) Direct(_, _ int64, _ bool) (int, int64, int64) { return 0, 0, 0 }
func (s *slowStore) TryReadAt(p []byte, off int64) bool            { return false }
func (s *slowStore) WriteBack() bool                               { return true }

// shut makes calls wait until the returned function is called.
func (s *slowStore) shut() (open func()) {
	g := make(chan struct{})
	s.gate.Store(&g)
	return func() { s.gate.Store(nil); close(g) }
}

func (s *slowStore) waitFor(t *testing.T, n int32) {
	t.Helper()
	for limit := time.Now().Add(30 * time.Second); s.in.Load() != n; time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("%d calls wait in the store, want %d", s.in.Load(), n)
		}
	}
}

// newSlowRig serves a slow unit 0 and a RAM disk 1.
func newSlowRig(t *testing.T, mode completion.Mode) (*rig, *slowStore) {
	st, err := lun.OpenStore(lun.Spec{Kind: "ram", Size: 8 << 20, BlockSize: 512})
	if err != nil {
		t.Fatal(err)
	}
	s := &slowStore{Store: st}
	u, err := lun.New(s, lun.Config{})
	if err != nil {
		t.Fatal(err)
	}
	r := newRigWith(t, Config{Completion: completion.Config{Mode: mode}}, "", map[uint32]*lun.Unit{0: u}, "1=ram:1m")
	return r, s
}

// immediateWrite is a WRITE of zeros that brings them along.
func immediateWrite(tag uint64, n int) []byte {
	b := be.AppendUint32(cmdBytes(tag, 0, 0x30, rw10(0x2a, 8, uint16(n/512))...), uint32(n))
	return append(b, make([]byte, imm-len(b)+n)...)
}

// slowCommands are the kinds that touch the store.
func slowCommands(p *peer) map[string]func(tag uint64) []byte {
	block := func(tag uint64, format byte, n int, cdb ...byte) []byte {
		return p.direct(cmdBytes(tag, 0, format, cdb...), 0, n)
	}
	unmap := make([]byte, 24)
	be.PutUint16(unmap, 22)
	be.PutUint16(unmap[2:], 16)
	be.PutUint32(unmap[16:], 4)
	return map[string]func(tag uint64) []byte{
		"READ":        func(tag uint64) []byte { return block(tag, 0x01, 4096, rw10(0x28, 8, 8)...) },
		"large READ":  func(tag uint64) []byte { return block(tag, 0x01, 1<<20, rw10(0x28, 8, 2048)...) },
		"immediate":   func(tag uint64) []byte { return immediateWrite(tag, 4096) },
		"WRITE":       func(tag uint64) []byte { return block(tag, 0x10, 4096, rw10(0x2a, 8, 8)...) },
		"large WRITE": func(tag uint64) []byte { return block(tag, 0x10, 1<<20, rw10(0x2a, 8, 2048)...) },
		"VERIFY": func(tag uint64) []byte {
			clear(p.data(0, 4096))
			return block(tag, 0x10, 4096, 0x2f, 2, 0, 0, 0x20, 0, 0, 0, 8)
		},
		"SYNC":       func(tag uint64) []byte { return cmdBytes(tag, 0, 0, 0x35) },
		"WRITE SAME": func(tag uint64) []byte { return block(tag, 0x10, 512, rw10(0x41, 8, 8)...) },
		"NDOB":       func(tag uint64) []byte { return cmdBytes(tag, 0, 0, 0x93, 1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 8, 0, 0) },
		"UNMAP": func(tag uint64) []byte {
			copy(p.data(0, 24), unmap)
			return block(tag, 0x10, 24, 0x42, 0, 0, 0, 0, 0, 0, 0, 24)
		},
		"COMPARE...": func(tag uint64) []byte {
			clear(p.data(0, 1024))
			return block(tag, 0x10, 1024, 0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1)
		},
	}
}

// While a disk does not answer, the channel, its other units and other initiators are served, and what it keeps can be aborted.
func TestSlowStoreStopsNobody(t *testing.T) {
	f := openFabric(t)
	for _, mode := range []completion.Mode{completion.Interrupt, completion.Poll} {
		r, s := newSlowRig(t, mode)
		a, b := r.login(f, 1, false), r.login(f, 2, false)
		for name, cmd := range slowCommands(a) {
			open := s.shut()
			a.send(cmd(1))
			s.waitFor(t, 1)
			for _, p := range []*peer{a, b} {
				p.send(p.direct(cmdBytes(2, 1, 1, rw10(0x28, 0, 1)...), 2<<20, 512))
				g, err := p.next(30 * time.Second)
				if err != nil {
					t.Fatalf("%s, %s: another unit: %v", mode, name, err)
				}
				p.good(g, 2)
			}
			if name == "WRITE" { // the same unit, too
				b.send(cmdBytes(3, 0, 0))
				b.good(b.recv(), 3)
			}
			open()
			a.good(a.recv(), 1)
		}
		// More than the workers: all are answered.
		open := s.shut()
		for i := range uint64(40) {
			a.send(a.direct(cmdBytes(i, 0, 1, rw10(0x28, uint32(i), 1)...), int(i)*512, 512))
		}
		s.waitFor(t, unitWorkers)
		// One in the store, one on the list: the function waits for the first and not for the second, which is not carried out.
		a.send(tmfBytes(0x80000001, 0, 1, 39))
		a.tmfDone(a.recv(), 0x80000001, 0, 2)
		a.send(tmfBytes(0x80000002, 0, 1, 0))
		if g, err := a.next(100 * time.Millisecond); err != errTimeout {
			t.Errorf("%s: aborted while it is in the store: % x, %v", mode, g, err)
		}
		open()
		for range 39 {
			if g := a.recv(); be.Uint64(g[8:]) == 0 || be.Uint64(g[8:]) == 39 {
				t.Errorf("an aborted command was answered: % x", g)
			}
		}
		if n := s.most.Load(); n > unitWorkers {
			t.Errorf("%d calls at once", n)
		}
		// A channel that ends takes its memory along only when the store has let go of it.
		open = s.shut()
		a.send(a.direct(cmdBytes(1, 0, 1, rw10(0x28, 0, 1)...), 0, 512))
		s.waitFor(t, 1)
		a.close()
		time.Sleep(50 * time.Millisecond)
		b.send(cmdBytes(4, 1, 0))
		b.good(b.recv(), 4)
		open()
		b.close()
		r.stop()
	}
}

// A handler that writes itself, because the store was quick so far, is stopped by it once and alone.
func TestQuickStoreThatStops(t *testing.T) {
	f := openFabric(t)
	for _, mode := range []completion.Mode{completion.Interrupt, completion.Poll} {
		r, s := newSlowRig(t, mode)
		a, b := r.login(f, 1, false), r.login(f, 2, false)
		write := func(p *peer, tag uint64) {
			if tag%2 == 0 {
				p.send(immediateWrite(tag, 4096))
			} else {
				p.send(p.direct(cmdBytes(tag, 0, 0x10, rw10(0x2a, 0, 1)...), 0, 512))
			}
		}
		for i := range uint64(500) { // enough, even if some of them are not quick on a busy machine
			write(a, i)
			a.good(a.recv(), i)
		}
		served := func(p *peer) {
			t.Helper()
			p.send(cmdBytes(7, 1, 0))
			if _, err := p.next(30 * time.Second); err != nil {
				t.Errorf("%s: another unit: %v", mode, err)
			}
		}
		open := s.shut()
		write(a, 1)
		s.waitFor(t, 1)
		served(b)
		write(b, 1)
		served(b) // a second one is not written by a handler
		if mode == completion.Poll {
			served(a)
		}
		time.Sleep(time.Millisecond)
		open()
		a.good(a.recv(), 1)
		b.good(b.recv(), 1)
		open = s.shut()
		write(a, 2)
		s.waitFor(t, 1)
		served(a)
		open()
		a.good(a.recv(), 2)
		a.close()
		b.close()
		r.stop()
	}
}

// Data that come in many pieces are put together for commands that need them whole.
func TestWholeDataInManyPieces(t *testing.T) {
	for _, spec := range []string{"0=ram:1m", "0=file:" + t.TempDir() + "/disk,size=1m"} {
		r := newRig(t, Config{}, "", spec)
		p := r.login(openFabric(t), 1, false)
		const blocks = 40
		data := p.data(0, 2*blocks*512)
		clear(data)
		for i := range blocks * 512 {
			data[blocks*512+i] = byte(i/512 + i)
		}
		var pieces [][2]int
		for at := 0; at < len(data); at += 320 {
			pieces = append(pieces, [2]int{at, 320})
		}
		b := p.indirect(cmdBytes(1, 0, 0x20, 0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, blocks, 0, 0), 2<<20, 0, pieces)
		p.send(b)
		p.good(p.recv(), 1)
		p.send(p.direct(cmdBytes(2, 0, 1, rw10(0x28, 0, blocks)...), 1<<20, blocks*512))
		p.good(p.recv(), 2)
		if !bytes.Equal(p.data(1<<20, blocks*512), data[blocks*512:]) {
			t.Errorf("%s: COMPARE AND WRITE wrote other data than were sent", spec)
		}
		p.close()
		r.stop()
	}
}

// Two sessions add to one block with COMPARE AND WRITE: each success counts once, and no READ finds a block of two minds.
func TestCompareAndWriteBetweenSessions(t *testing.T) {
	f := openFabric(t)
	for _, spec := range []string{"0=ram:1m", "0=ram:1m,bs=4096", "0=file:" + t.TempDir() + "/disk,size=1m"} {
		bs := 512
		if strings.Contains(spec, "4096") {
			bs = 4096
		}
		r := newRig(t, Config{}, "", spec)
		const each = 60
		var wg sync.WaitGroup
		for i := range 2 {
			p := r.login(f, byte(1+i), false)
			wg.Go(func() {
				tag := uint64(0)
				read := func() uint64 {
					tag++
					p.send(p.direct(cmdBytes(tag, 0, 1, rw10(0x28, 3, 1)...), 0, bs))
					p.good(p.recv(), tag)
					b := p.data(0, bs)
					n := be.Uint64(b)
					for at := 0; at < bs; at += 8 {
						if v := be.Uint64(b[at:]); v != n {
							t.Errorf("%s: a block with %d and %d", spec, n, v)
							break
						}
					}
					return n
				}
				for done := 0; done < each; {
					old := read()
					pair := p.data(1<<20, 2*bs)
					for at := 0; at < bs; at += 8 {
						be.PutUint64(pair[at:], old)
						be.PutUint64(pair[bs+at:], old+1)
					}
					tag++
					p.send(p.direct(cmdBytes(tag, 0, 0x10, 0x89, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1), 1<<20, 2*bs))
					g := p.recv()
					switch key, _ := senseOf(g); {
					case g[19] == 0:
						done++
					case g[19] != 2 || key != 0xe:
						t.Errorf("%s: % x", spec, g)
						return
					}
				}
			})
		}
		wg.Wait()
		p := r.login(f, 9, false)
		p.send(p.direct(cmdBytes(1, 0, 1, rw10(0x28, 3, 1)...), 0, bs))
		p.good(p.recv(), 1)
		if n := be.Uint64(p.data(0, bs)); n != 2*each {
			t.Errorf("%s: %d after %d successes", spec, n, 2*each)
		}
		p.close()
		r.stop()
	}
}

// A reservation outlives the session that made it, holds others off, and is taken over by PREEMPT; the new session of the old holder finds
// its registration gone.
func TestReservationOutlivesSession(t *testing.T) {
	f := openFabric(t)
	r := newRig(t, Config{}, "")
	a, b := r.login(f, 1, false), r.login(f, 2, false)
	for i, p := range []*peer{a, b} {
		p.prOut(1, 0, 0, 0, uint64(i+1))
		p.good(p.recv(), 1)
	}
	a.prOut(2, 1, 1, 1, 0) // write exclusive
	a.good(a.recv(), 2)
	a.dumb() // dies without a word
	write := func(p *peer, tag uint64, status byte) {
		t.Helper()
		p.send(p.direct(cmdBytes(tag, 0, 0x10, rw10(0x2a, 0, 1)...), 0, 512))
		if g := p.recv(); g[19] != status {
			t.Errorf("write: status %x, want %x", g[19], status)
		}
	}
	write(b, 3, 0x18)
	a.close()
	write(b, 4, 0x18)
	a = r.login(f, 1, false) // the same port, anew: it still holds
	write(a, 5, 0)
	write(b, 5, 0x18)
	b.prOut(6, 4, 1, 2, 1)
	b.good(b.recv(), 6)
	write(b, 7, 0)
	write(a, 8, 2) // REGISTRATIONS PREEMPTED
	write(a, 9, 0x18)
	a.prOut(10, 1, 1, 1, 0)
	if g := a.recv(); g[19] != 0x18 {
		t.Errorf("RESERVE by an unregistered nexus: status %x", g[19])
	}
}

// spoofer sends connection requests from any address of 127.0.0.0/8 and never answers what comes back.
type spoofer struct {
	t       *testing.T
	sockets map[int]*net.UDPConn
}

// addr is its i-th address, which nobody else has.
func (s *spoofer) addr(i int) netip.Addr {
	s.t.Helper()
	for tries := 0; s.sockets[i] == nil; tries++ {
		a := netip.AddrFrom4([4]byte{127, byte(rand.IntN(256)), byte(rand.IntN(256)), byte(1 + rand.IntN(254))})
		c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, packet.Port)))
		switch {
		case err == nil:
			s.t.Cleanup(func() { c.Close() })
			s.sockets[i] = c
		case tries == 20:
			s.t.Fatal(err)
		}
	}
	return s.sockets[i].LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
}

func (s *spoofer) request(r *rig, i int, login []byte) {
	s.t.Helper()
	from := s.addr(i)
	m := ibcm.New(ibcm.Config{Addr: from, CAGUID: ibcm.NewCAGUID(rand.Uint64()), PKey: 0xffff, MaxMTU: verbs.MTU1024, Random: rand.Uint64})
	_, err := m.Connect(time.Now(), ibcm.ConnectParam{Peer: r.target.Addr(), LocalQPN: 17, ResponderResources: 4, RetryCount: 7, RNRRetryCount: 7, FlowControl: true,
		PathMTU: verbs.MTU1024, ACKTimeout: 15, PrivateData: login}, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	to := netip.AddrPortFrom(r.target.Addr().Addr(), packet.Port)
	for _, d := range m.Outputs() {
		b := make([]byte, packet.BTHLen+packet.DETHLen+ibcm.MADSize+packet.ICRCLen)
		h := packet.BTH{Opcode: packet.UDSendOnly, PKey: packet.DefaultPKey, DestQPN: 1}
		h.Put(b)
		(&packet.DETH{QKey: 0x80010000, SrcQPN: 1}).Put(b[packet.BTHLen:])
		copy(b[packet.BTHLen+packet.DETHLen:], d.MAD[:])
		packet.NewFlow(netip.AddrPortFrom(from, packet.Port), to).Seal(b, 0)
		if _, err := s.sockets[i].WriteToUDPAddrPort(b, to); err != nil {
			s.t.Fatal(err)
		}
	}
}

// pending is how many logins are under way, from an address or, when it is invalid, in all.
func (r *rig) pending(from netip.Addr) (n int) {
	r.target.mu.Lock()
	defer r.target.mu.Unlock()
	for _, l := range r.target.underWay {
		if !from.IsValid() || l.from == from {
			n++
		}
	}
	return n
}

// Requests in the names of others, who will not answer, keep nobody out: neither from many addresses, nor from one, nor where there are few
// sessions to be had. The sessions that there are stay.
func TestLoginsOfSpoofedAddresses(t *testing.T) {
	good := openFabric(t)
	flood := func(r *rig, s *spoofer, n int, from func(i int) int) {
		t.Helper()
		for i := range n {
			before := r.target.arrived()
			s.request(r, from(i), loginBytes(byte(i), r.target.PortID(), true))
			for limit := time.Now().Add(5 * time.Second); r.target.arrived() == before; time.Sleep(time.Millisecond) {
				if time.Now().After(limit) {
					t.Fatalf("request %d does not arrive", i)
				}
			}
			r.settles(func() bool { // it waits for the RTU
				r.target.mu.Lock()
				defer r.target.mu.Unlock()
				return !slices.ContainsFunc(r.target.underWay, func(l *pendingLogin) bool { return l.cancel == nil })
			})
			r.age()
		}
	}
	many := func(i int) int { return i }
	for name, c := range map[string]struct {
		cfg           Config
		from          func(i int) int // the number of an address
		n             int
		pending, most int
	}{
		"many addresses": {Config{RequestLimit: 4, MaxChannels: 200}, many, maxLogins + 20, maxLogins, 1},
		"one address":    {Config{RequestLimit: 4, MaxChannels: 200}, func(int) int { return 0 }, maxLoginsFrom + 8, maxLoginsFrom, maxLoginsFrom},
		"few sessions":   {Config{RequestLimit: 4, MaxChannels: 200, MaxSessions: 6}, many, 12, 5, 1},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, c.cfg, "")
			old := r.login(good, 0xf0, false)
			r.settles(func() bool { return r.pending(netip.Addr{}) == 0 }) // its RTU has come, before age makes it look late
			s := &spoofer{t: t, sockets: map[int]*net.UDPConn{}}
			flood(r, s, c.n, c.from)
			r.settles(func() bool { return r.pending(netip.Addr{}) == c.pending })
			if n := r.pending(s.addr(c.from(c.n - 1))); n < 1 || n > c.most {
				t.Errorf("%d logins under way from one address", n)
			}
			p := r.login(good, 0xf1, false)
			p.send(cmdBytes(1, 0, 0))
			p.good(p.recv(), 1)
			old.send(cmdBytes(2, 0, 0))
			old.good(old.recv(), 2)
			flood(r, s, 3, c.from)
			for i, q := range []*peer{old, p} {
				q.send(cmdBytes(uint64(3+i), 0, 0))
				q.good(q.recv(), uint64(3+i))
			}
			if st := r.target.Stats(); st.Evicted < uint64(c.n-c.pending) || st.Rejected != 0 {
				t.Errorf("%d given up, %d rejected", st.Evicted, st.Rejected)
			}
			r.stop()
			r.target.mu.Lock()
			defer r.target.mu.Unlock()
			if r.target.sessions != 0 || len(r.target.underWay) != 0 || len(r.target.nexuses) != 0 {
				t.Errorf("left at the end: %d sessions, %d logins, %d nexuses", r.target.sessions, len(r.target.underWay), len(r.target.nexuses))
			}
		})
	}
}

// arrived is how many connection requests came.
func (t *Target) arrived() uint64 {
	return t.arrivals.Load() + t.rejected.Load()
}

// age makes half-open logins as old as those that nobody finishes become.
func (r *rig) age() {
	r.target.mu.Lock()
	defer r.target.mu.Unlock()
	for _, l := range r.target.underWay {
		l.since = l.since.Add(-2 * halfOpenGrace)
	}
}

// settles waits until ok; what will not be so within half a minute never is.
func (r *rig) settles(ok func() bool) {
	r.t.Helper()
	for limit := time.Now().Add(30 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			r.t.Fatal("does not come to be")
		}
	}
}

// Logins that one node begins and does not finish keep another one out of nothing.
func TestUnfinishedLoginsOfOneNode(t *testing.T) {
	bad, good := openFabric(t), openFabric(t)
	g, err := bad.Context().QueryGID(1, 0)
	if err != nil {
		t.Fatal(err)
	}
	// Those that may be under way at once wait until their peers give up.
	r := newRig(t, Config{}, fmt.Sprintf("login from=%s first=%d : delay 24h", g.GID.Addr(), maxLoginsFrom))
	ctx, giveUp := context.WithCancel(context.Background())
	defer giveUp()
	var logins sync.WaitGroup
	var refused, gone atomic.Int32
	for i := range maxLogins + 6 {
		p := newPeer(t, bad)
		p.ctx, p.patience = ctx, 5*time.Minute
		logins.Go(func() {
			switch rej, err := p.dial(r, loginBytes(byte(10+i), r.target.PortID(), false)); {
			case rej != nil:
				refused.Add(1)
			case errors.Is(err, context.Canceled):
				gone.Add(1)
			default:
				t.Errorf("login: %v", err)
			}
		})
	}
	r.settles(func() bool { return refused.Load() == maxLogins+6-maxLoginsFrom })
	p := r.login(good, 1, false)
	p.send(cmdBytes(1, 0, 0))
	p.good(p.recv(), 1)
	if n := r.pending(g.GID.Addr()); n != maxLoginsFrom {
		t.Errorf("%d logins under way from one address, want %d", n, maxLoginsFrom)
	}
	giveUp()
	logins.Wait()
	if n, m := refused.Load(), gone.Load(); n != maxLogins+6-maxLoginsFrom || m != maxLoginsFrom {
		t.Errorf("%d refused, want %d; %d waited, want %d", n, maxLogins+6-maxLoginsFrom, m, maxLoginsFrom)
	}
	// And all is as before.
	r.settles(func() bool { return r.pending(g.GID.Addr()) == 0 })
	q := r.login(bad, 2, false)
	q.send(cmdBytes(1, 0, 0))
	q.good(q.recv(), 1)
}
