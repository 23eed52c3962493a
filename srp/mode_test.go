package srp_test

import (
	"context"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"srp-initiator/completion"
	"srp-initiator/rdma/cm"
	"srp-initiator/srp"
)

// beforeConnect is a Connector whose connections call a function before they send their REQ.
type beforeConnect struct {
	cm.Connector
	hook *atomic.Pointer[func(context.Context)]
}

func (c beforeConnect) Resolve(ctx context.Context, src netip.AddrPort, dst cm.Addr) (cm.Conn, error) {
	conn, err := c.Connector.Resolve(ctx, src, dst)
	if err != nil {
		return nil, err
	}
	return hookedConn{conn, c.hook}, nil
}

type hookedConn struct {
	cm.Conn
	hook *atomic.Pointer[func(context.Context)]
}

func (c hookedConn) Connect(ctx context.Context, p cm.ConnParam) (cm.ConnParam, error) {
	if f := c.hook.Load(); f != nil {
		(*f)(ctx)
	}
	return c.Conn.Connect(ctx, p)
}

// hookConnect makes w's logins call what hook holds.
func (w *world) hookConnect() (hook *atomic.Pointer[func(context.Context)]) {
	hook = new(atomic.Pointer[func(context.Context)])
	w.connector = beforeConnect{w.connector, hook}
	return hook
}

// A mode that is set while a connection is being made anew holds for the new channels, whether their instances exist by then or not.
func TestSetModeWhileReconnecting(t *testing.T) {
	w := newWorld(t, withFaults("cmd op=read nth=2 : disconnect\ncmd op=read nth=4 : disconnect"))
	hook := w.hookConnect()
	s := w.login(t, withMode(completion.Interrupt), func(o *srp.LoginOptions) { o.ReconnectDelay, o.ChannelCount = 100*time.Millisecond, 2 })
	b := make([]byte, 512)
	for i, m := range []completion.Mode{completion.Poll, completion.Thread} {
		set := func(context.Context) {
			if s.Mode() != m {
				if n := s.Channels(); n != 0 {
					t.Errorf("%d channels while one is being made", n)
				}
				if err := s.SetMode(m); err != nil {
					t.Error(err)
				}
			}
		}
		hook.Store(&set)
		for range 2 {
			c := read10(0, 1, b)
			c.Retry = true
			do(t, s, c)
		}
		hook.Store(nil)
		if n := s.Stats().Reconnects; n != uint64(i+1) {
			t.Fatalf("%d reconnects, want %d", n, i+1)
		}
		got := s.ChannelModes()
		if len(got) != 2 || got[0] != m || got[1] != m || s.Mode() != m {
			t.Errorf("set to %s: the session says %s, its channels are in %v", m, s.Mode(), got)
		}
	}
	if err := s.SetMode(completion.Mode(99)); err == nil || s.Mode() != completion.Thread {
		t.Errorf("mode 99: %v, now %s", err, s.Mode())
	}
}
