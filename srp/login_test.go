package srp_test

import (
	"context"
	"testing"
	"time"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
	"srp-initiator/srp"
)

// slowMemory is a device that takes its time to register memory.
type slowMemory struct {
	verbs.Context
	each time.Duration
}

func (d slowMemory) AllocPD() (verbs.ProtectionDomain, error) {
	pd, err := d.Context.AllocPD()
	return slowPD{pd, d.each}, err
}

type slowPD struct {
	verbs.ProtectionDomain
	each time.Duration
}

func (p slowPD) RegisterMemory(r *hostmem.Region, access verbs.AccessFlags) (verbs.MemoryRegion, error) {
	time.Sleep(p.each)
	return p.ProtectionDomain.RegisterMemory(r, access)
}

// What the login prepares on this side does not count against connect_tmo; the target's time does.
func TestConnectTimeoutIsTheTargets(t *testing.T) {
	w := newWorld(t)
	hook := w.hookConnect()
	var left time.Duration
	look := func(ctx context.Context) {
		if at, ok := ctx.Deadline(); ok {
			left = time.Until(at)
		}
	}
	hook.Store(&look)
	const limit = 2 * time.Second
	w.device = slowMemory{w.device, limit/3 + 100*time.Millisecond} // three regions
	s, err := w.tryLogin(t, func(o *srp.LoginOptions) { o.ConnectTimeout = limit })
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if left <= 0 || left > limit {
		t.Errorf("%s left for the target, of %s", left, limit)
	}
}
