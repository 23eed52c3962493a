package softroce

import (
	"sync/atomic"
	"testing"
	"time"

	"srp-initiator/rdma/softroce/udp"
	"srp-initiator/rdma/verbs"
)

// watched counts how often a waiter watches the link itself.
type watched struct {
	*udp.Socket
	parks atomic.Int32
}

func (w *watched) Park() (bool, error) {
	w.parks.Add(1)
	return w.Socket.Park()
}

// TestUnarmedChannelDoesNotWatch: who waits on a channel while no queue is armed leaves the link to those who poll, whose packets would
// wake it; a queue that is armed then is watched at once all the same.
func TestUnarmedChannelDoesNotWatch(t *testing.T) {
	s, err := udp.OpenLoopback(udp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	link := &watched{Socket: s}
	d, err := OpenLink(link, verbs.MTU4096)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	a, b := newEnd(t, d, true), newEnd(t, open(t), true)
	connect(t, a, b)
	before := link.parks.Load()
	taken := make(chan error, 1)
	go func() {
		_, err := a.ch.Wait(a.events)
		taken <- err
	}()
	for end := time.Now().Add(10 * time.Second); !a.ch.(*channel).dozes.Load(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("nobody waits on the channel without watching the link")
		}
	}
	for i := range 100 {
		a.recv(t, uint64(i), 0, 8)
		b.send(t, verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: b.sge(0, 8)})
		a.poll(t, 1)
		b.poll(t, 1)
	}
	if n := link.parks.Load() - before; n != 0 {
		t.Errorf("the waiter watched the link %d times while others polled", n)
	}
	a.recv(t, 100, 0, 8)
	if _, err := a.cq.Arm(false); err != nil {
		t.Fatal(err)
	}
	d.mu.Lock()
	armed := d.armed
	d.mu.Unlock()
	if !armed {
		t.Error("nobody watches the link of an armed queue")
	}
	b.send(t, verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: b.sge(0, 8)})
	select {
	case err := <-taken:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("no notification")
	}
	b.poll(t, 1)
	a.poll(t, 1)
}
