package softroce

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"srp-initiator/rdma/cm"
)

// Callers that give up before anybody takes them leave their places in the backlog to others, and are given to nobody.
func TestCallersThatGiveUp(t *testing.T) {
	const backlog = 4
	a, b := open(t), open(t)
	l, err := b.Connector().Listen(netip.AddrPortFrom(b.Addr(), 0), backlog)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	// call calls until ctx ends or somebody answers.
	call := func(ctx context.Context, e *end, data string) error {
		c, err := a.Connector().Resolve(ctx, netip.AddrPort{}, cm.Addr{IP: l.Addr()})
		if err != nil {
			return err
		}
		defer c.Close()
		if err := c.InitQP(e.qp); err != nil {
			return err
		}
		p := connParam
		p.PrivateData, p.Timeout = []byte(data), time.Minute
		_, err = c.Connect(ctx, p)
		return err
	}
	waits := func(n int) {
		t.Helper()
		for began := time.Now(); ; time.Sleep(time.Millisecond) {
			b.mu.Lock()
			got := len(l.(*listener).queue)
			b.mu.Unlock()
			if got == n {
				return
			}
			if time.Since(began) > 30*time.Second {
				t.Fatalf("%d calls wait, want %d", got, n)
			}
		}
	}
	for range 3 {
		ctx, giveUp := context.WithCancel(context.Background())
		gone := make(chan error, backlog)
		for range backlog {
			e := newEnd(t, a, true)
			go func() { gone <- call(ctx, e, "gone") }()
		}
		waits(backlog)
		giveUp()
		for range backlog {
			if err := <-gone; !errors.Is(err, context.Canceled) {
				t.Errorf("a call that gives up: %v", err)
			}
		}
		waits(0)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	answer := make(chan error, 1)
	e := newEnd(t, a, true)
	go func() { answer <- call(ctx, e, "here") }()
	c, err := l.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if got := string(c.Request().PrivateData[:4]); got != "here" {
		t.Errorf("Accept gives %q, a caller that has gone", got)
	}
	if err := c.Reject([]byte("no")); err != nil {
		t.Error(err)
	}
	var rej *cm.RejectError
	if err := <-answer; !errors.As(err, &rej) || rej.Reason != cm.ReasonConsumerDefined || string(rej.PrivateData[:2]) != "no" {
		t.Errorf("the caller that waited: %v", err)
	}
}
