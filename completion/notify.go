package completion

// Notifications. One goroutine per instance is parked on the queue's channel, from
// Start to Close and in every mode. It takes ownership (schedule) and either serves the instance
// in place or sends it to the mode's executor.

import (
	"time"

	"srp-initiator/rdma/verbs"
)

// epoch makes monotonic times small integers.
var epoch = time.Now()

// now is nanoseconds of monotonic time.
func now() int64 { return int64(time.Since(epoch)) }

func (i *Instance) notifications() {
	defer close(i.notifier)
	var events [1]verbs.CompletionQueue
	for !i.stopping.Load() {
		n, err := i.channel.Wait(events[:])
		if err != nil {
			i.withoutNotifications(err)
			return
		}
		i.count.wakeups.Add(1)
		if n > 0 {
			i.count.notifications.Add(uint64(n))
			i.woken.Store(i.cfg.Batch < maxBatch)
			if i.takes(noting) {
				i.serve()
			}
		}
		if i.handedOver.CompareAndSwap(true, false) {
			i.serve()
		}
	}
}

// takes tries to become the owner. True: and is to serve the instance in place.
func (i *Instance) takes(from phase) bool {
	t := turn{phase: from, here: true}
	for t.phase != reaping && t.phase != gone {
		i.step(&t)
	}
	return t.phase == reaping
}

// withoutNotifications is what remains to be done on a dead channel: a last look at the queue, and
// ownership that Enable, SetMode and Wait send here.
func (i *Instance) withoutNotifications(err error) {
	if !i.stopping.Load() {
		i.fail(err)
		if i.takes(scheduling) {
			i.serve()
		}
	}
	for {
		if i.handedOver.CompareAndSwap(true, false) {
			i.serve()
		}
		if i.stopping.Load() {
			return
		}
		<-i.kick
	}
}

func (i *Instance) wakeNotifier() {
	i.channel.Wake()
	select {
	case i.kick <- struct{}{}:
	default:
	}
}

// serve runs an owned instance in the notification goroutine until somebody else has it.
func (i *Instance) serve() {
	switch i.Mode() {
	case Adaptive:
		i.serveAdaptive()
	case Poll:
		if p := i.poller.Load(); p.polling() {
			i.serveFirst(p)
			return
		}
		fallthrough
	default:
		i.serveUntilEmpty()
	}
}

// rest is what the notification goroutine, or the reaping thread, does with an instance that it has found empty.
func (i *Instance) rest() phase {
	if i.Mode().polledByWaiters() {
		return leaving
	}
	return arming
}

// serveUntilEmpty is the loop of thread=n and thread=y: reap, arm, reap what the
// arm reports, and give others a turn whenever the budget or the slice is used up.
func (i *Instance) serveUntilEmpty() {
	budget, began := i.cfg.Budget, int64(0)
	for work := 0; ; {
		t := turn{weight: i.weight, here: true}
		if i.run(&t) == idle {
			t.phase = i.rest()
			i.run(&t)
		}
		work += t.work
		if t.phase == gone {
			if work == 0 {
				i.count.barren.Add(1)
			}
			return
		}
		budget -= t.work
		at := now()
		switch {
		case began == 0:
			began = at
			if budget > 0 {
				continue
			}
			fallthrough
		case budget <= 0:
			i.count.budgetExhausted.Add(1)
		case at-began >= int64(i.cfg.Slice):
			i.count.timeExhausted.Add(1)
		default:
			continue
		}
		giveWay()
		budget, began = i.cfg.Budget, now()
	}
}

// startReaper starts mode Thread's goroutine.
func (i *Instance) startReaper() error {
	i.token, i.reaperOK = make(chan struct{}, 1), make(chan struct{})
	placed := make(chan error, 1)
	go i.reaper(i.token, i.reaperOK, placed)
	return <-placed
}

func (i *Instance) reaper(token <-chan struct{}, ended chan<- struct{}, placed chan<- error) {
	defer close(ended)
	if i.cfg.LockThread {
		// Never unlocked: the thread ends with the goroutine, and its nice value with it.
		if err := lockThread(i.cfg.CPUs, i.cfg.Nice); err != nil {
			placed <- err
			return
		}
	}
	placed <- nil
	for range token {
		i.count.wakeups.Add(1)
		i.serveUntilEmpty()
	}
}
