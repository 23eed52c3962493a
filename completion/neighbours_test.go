package completion_test

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"srp-initiator/completion"
	"srp-initiator/rdma/softroce"
	"srp-initiator/rdma/softroce/udp"
	"srp-initiator/rdma/verbs"
)

// timeless is a softroce device that has no timers once it is frozen: nothing makes up for a wake-up that was lost.
type timeless struct {
	*softroce.Device
	link *timelessLink
}

func (f timeless) Context() verbs.Context { return f.Device }

type timelessLink struct {
	*udp.Socket
	frozen atomic.Bool
}

func (l *timelessLink) SetDeadline(t time.Time) error {
	if l.frozen.Load() && t.Unix() > 1 { // what Close sets is for real
		return nil
	}
	return l.Socket.SetDeadline(t)
}

func openTimeless(t *testing.T) timeless {
	t.Helper()
	s, err := udp.OpenLoopback(udp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	l := &timelessLink{Socket: s}
	d, err := softroce.OpenLink(l, verbs.MTU4096)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return timeless{d, l}
}

// TestIdleNeighbours: several instances share a device on which there are no timers. One is busy with one message after the other, and polls where its mode does; what the others wait for is held, and
// released while it is busy, or when it has fallen silent, with nothing behind it. In every mode, and on either side.
func TestIdleNeighbours(t *testing.T) {
	if os.Getenv("VMTEST_GUEST") != "" {
		t.Skip("about softroce")
	}
	const jobs = 4
	for _, frozen := range []string{"client", "server"} {
		for _, m := range completion.Modes() {
			for weight, neighbours := range map[int][]completion.Mode{
				1:  {completion.Interrupt, completion.Adaptive, completion.Direct, completion.Poll},
				32: {completion.Interrupt, completion.Thread}, // who never polls takes nothing that is another's
			} {
				t.Run(fmt.Sprintf("%s/%v/weight=%d", frozen, m, weight), func(t *testing.T) {
					var link *timelessLink
					var client, server fabric
					if frozen == "client" {
						f := openTimeless(t)
						client, server, link = f, openFabric(t), f.link
					} else {
						f := openTimeless(t)
						client, server, link = openFabric(t), f, f.link
					}
					var poller *completion.Poller
					cfg := func(m completion.Mode) completion.Config {
						c := completion.Config{Mode: m, Weight: weight, IdleGuard: -1}
						if m == completion.Poll {
							if poller == nil {
								var err error
								if poller, err = completion.NewPoller(completion.PollerConfig{}); err != nil {
									t.Fatal(err)
								}
							}
							c.Poller = poller
						}
						return c
					}
					serverMode := m
					if m == completion.Direct { // nobody waits at a server
						serverMode = completion.Adaptive
					}
					pairs := []*pair{newPairOn(t, client, server, cfg(m), completion.Config{Mode: serverMode, Weight: weight})}
					for _, other := range neighbours {
						served := other
						if other == completion.Direct {
							served = completion.Thread
						}
						pairs = append(pairs, newPairOn(t, client, server, cfg(other), completion.Config{Mode: served, Weight: weight}))
					}
					for _, p := range pairs {
						if frozen == "server" { // whose acknowledgements come when it has something to say
							p.client.flags = 0
						}
					}
					link.frozen.Store(true)
					link.Socket.SetDeadline(time.Time{})
					defer func() {
						link.frozen.Store(false)
						link.Socket.SetDeadline(time.Now())
					}()
					for round := range short(300) {
						var busy, others sync.WaitGroup
						var stop atomic.Bool
						busy.Go(func() {
							for n := 0; !stop.Load(); n++ {
								pairs[0].call(n % depth)
							}
						})
						for _, p := range pairs[1:] {
							p.setHolding(true)
							for job := range jobs {
								others.Go(func() { p.call(job) })
							}
						}
						for end := time.Now().Add(patience); ; time.Sleep(50 * time.Microsecond) {
							held := 0
							for _, p := range pairs[1:] {
								held += p.heldCount()
							}
							if held == jobs*(len(pairs)-1) {
								break
							}
							if time.Now().After(end) {
								t.Fatalf("round %d: %d messages have come", round, held)
							}
						}
						silent := round%2 == 0
						if silent {
							stop.Store(true)
							busy.Wait()
						}
						for _, p := range pairs[1:] {
							p.setHolding(false)
						}
						others.Wait()
						stop.Store(true)
						busy.Wait()
						for _, p := range pairs {
							p.check()
						}
					}
				})
			}
		}
	}
}

var _ fabric = timeless{}
