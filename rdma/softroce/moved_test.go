package softroce

import (
	"testing"
	"time"

	"srp-initiator/rdma/verbs"
)

// TestMoved: a queue tells whether its last empty Poll moved packets of its own queue pairs.
func TestMoved(t *testing.T) {
	a, b := pair(t)
	cq := a.cq.(verbs.Mover)
	other := newEnd(t, a.d, true)
	polled := func(c verbs.CompletionQueue) bool {
		t.Helper()
		if n := c.Poll(make([]verbs.WorkCompletion, 1)); n != 0 {
			t.Fatalf("%d completions", n)
		}
		return c.(verbs.Mover).Moved()
	}
	limit := time.Now().Add(10 * time.Second)
	within := func(what string, f func() bool) {
		t.Helper()
		for !f() {
			if time.Now().After(limit) {
				t.Fatal(what)
			}
		}
	}
	write := func() {
		b.send(t, verbs.SendWorkRequest{Opcode: verbs.OpRDMAWrite, SGList: b.sge(0, 256<<10), RemoteAddr: a.mr.Addr(), RKey: a.mr.RKey()})
	}
	// A write completes nothing here. The pump may be quicker now and then.
	within("no poll that received a part of a long message says so", func() bool {
		write()
		moved := false
		for done := 0; done == 0; done = b.cq.Poll(make([]verbs.WorkCompletion, 1)) {
			moved = polled(a.cq) || moved
		}
		return moved
	})
	within("an empty link moves packets", func() bool { return !polled(a.cq) })
	// What another's poll moves is not its own work.
	for range 10 {
		write()
		for done := 0; done == 0; done = b.cq.Poll(make([]verbs.WorkCompletion, 1)) {
			if polled(other.cq) {
				t.Fatal("a queue takes the packets of another's queue pair for its own")
			}
		}
	}
	// Nor is what somebody else moves who holds the device.
	within("no poll moves packets", func() bool {
		write()
		moved := polled(a.cq)
		b.poll(t, 1)
		return moved
	})
	a.d.mu.Lock()
	moved := polled(a.cq)
	a.d.mu.Unlock()
	if moved || cq.Moved() {
		t.Error("a poll that did not get at the device says that it moved packets")
	}
}
