package targetemu

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"srp-initiator/rdma/verbs"
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
	p.sendOnly(p.direct(cmdBytes(2, 0, 0x10, rw10(0x2a, 0, 6000)...), 0, 6000*512))
	if err := p.qp.Modify(&verbs.QPAttr{State: verbs.QPError}, verbs.QPMaskState); err != nil {
		p.t.Fatal(err)
	}
	r.wait(1)
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
		g, err := b.next(5 * time.Second)
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
		r := newRig(t, Config{}, "cmd op=tur : vanish 250ms")
		p := r.login(f, 9, false)
		p.sendOnly(cmdBytes(1, 0, 0))
		for len(r.target.Stats().Channels) > 0 {
			time.Sleep(time.Millisecond)
		}
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
		}
		logins.Wait()
		if last != nil {
			t.Fatalf("round %d: the last login: %v", round, last)
		}
		time.Sleep(20 * time.Millisecond)
		q := peers[len(peers)-1]
		q.sendOnly(cmdBytes(5, 0, 0, 0x12, 0, 0, 0, 0, 0))
		if g, err := q.next(5 * time.Second); err != nil {
			t.Fatalf("round %d: the channel of the last login: %v", round, err)
		} else {
			q.good(g, 5)
		}
		if n := len(r.target.Stats().Channels); n != 1 {
			t.Errorf("round %d: %d channels, want 1", round, n)
		}
		p.close()
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
			g, err := p.next(3 * time.Second)
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
