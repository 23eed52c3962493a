package softroce

// The engine. One mutex guards the device, and whoever holds it does what there is to do: a turn takes a batch of datagrams from the
// link, gives each to its queue pair, lets the queue pairs acknowledge, runs the timers, sends everything that was built in one
// batch, and then wakes those who armed a completion queue. Turns are driven by
//
//	pollers: Poll on an empty completion queue, when nobody else holds the mutex;
//	waiters: of the goroutines in Wait and the threads in WaitThread one, the leader, waits for the link itself, a goroutine only
//	while a queue is armed, either only while no poller has promised to go on (driver.go);
//	the pump, a goroutine parked on the link: for timers, for who waits while there is no leader, and
//	for everything when nobody has polled or waited for a millisecond.
//
// PostSend builds packets and sends them at once, unless a consumer is between taking completions and its next Poll or Arm, or polls
// in vain and has just done so, and this is not the first post since: what is posted in between, typically by the handler of those
// completions or by those whom it woke, leaves together (one sendmmsg, grouped into UDP_SEGMENT trains). The next Poll on an empty queue, Arm, turn of
// anybody, or at the latest the watchdog sends it. Where the peer has another CPU, the first deferAtFirst of
// them leave at once: it would be idle meanwhile. So does the first post after the link had to wake a leader: the peer may sleep too, and waking it takes
// as long as making the next posts does.

import (
	"errors"
	"os"
	"time"

	"srp-initiator/rdma/softroce/rc"
	"srp-initiator/rdma/softroce/udp"
	"srp-initiator/rdma/verbs"
)

func (d *Device) now() rc.Time { return rc.Time(time.Since(d.start)) }

// Silence makes the device lose every packet, sent or received, for a time, as a node does that has no power or no cable. What happened before has
// been sent. A later call counts from its own moment; 0 ends the silence.
func (d *Device) Silence(t time.Duration) {
	d.mu.Lock()
	defer d.unlock()
	now := d.now()
	d.flush(now)
	d.silent = now + rc.Time(t)
}

// isSilent reports that packets are lost at the moment.
func (d *Device) isSilent() bool { return d.silent != 0 && d.now() < d.silent }

func (d *Device) clock(t rc.Time) time.Time {
	if t == rc.Never {
		return time.Time{}
	}
	return d.start.Add(time.Duration(t))
}

// pollTurn is a turn driven by a poller. It returns when the turn began.
func (d *Device) pollTurn() rc.Time {
	d.polls++
	if d.armed && !d.watched() {
		d.disarmPump()
		d.wakeAt(d.now().Add(watchdog))
	}
	return d.turn()
}

func (d *Device) disarmPump() {
	if d.armed {
		d.armed = false
		d.link.Disarm()
	}
}

func (d *Device) armPump() {
	if !d.armed && !d.closed {
		d.armed = true
		d.link.Arm()
	}
}

// lead makes the caller the leader, who waits for the link; false when there is one. d.mu is held.
func (d *Device) lead() bool {
	if d.led || d.closed {
		return false
	}
	d.led = true
	d.polls++
	d.disarmPump()
	d.flushDeferred()
	return true
}

// resign ends leadership; turn says that there is something to receive. The leader goes off to poll its own queue;
// who waits besides is the pump's business until there is a leader again. d.mu is held.
func (d *Device) resign(turn bool) {
	d.led = false
	if d.closed {
		d.resigned.Broadcast()
		return
	}
	if turn {
		d.woken = true
		d.turn()
	}
	if d.watched() {
		d.armPump()
	} else if !d.armed {
		d.wakeAt(d.now().Add(watchdog))
	}
}

// turn does all there is to do now, and returns what time that is. d.mu is held.
func (d *Device) turn() rc.Time {
	now := d.now()
	if d.closed {
		return now
	}
	d.came = 0
	for range receiveRounds {
		ms, err := d.link.Receive()
		if err != nil || len(ms) == 0 {
			break
		}
		if d.isSilent() {
			continue
		}
		for i := range ms {
			d.receive(now, &ms[i])
		}
		for _, q := range d.touched {
			q.touched = false
			q.sendCQ.batches++
			q.recvCQ.batches++
			q.rc.EndBatch(now, q.completed)
			q.completed = false
			d.settle(q)
		}
		d.touched = d.touched[:0]
		d.flush(now)
		if len(ms) < cap(ms) {
			break
		}
	}
	d.deferAtMost = max(deferAtFirst, d.came)
	d.timers(now)
	d.flush(now)
	return now
}

// settle notes a queue pair's timer after any call into it.
func (d *Device) settle(q *queuePair) {
	if t := q.rc.Deadline(); t < d.nextTimer {
		d.nextTimer = t
		d.wakeAt(t)
	}
}

// settleCM sends what the connection manager has to say and tells its events.
func (d *Device) settleCM(now rc.Time) {
	for _, o := range d.cm.Outputs() {
		d.sendMAD(o.To, &o.MAD)
	}
	for _, e := range d.cm.Events() {
		d.cmEvent(now, &e)
	}
	// Events may have made the manager speak again, but only once: no event follows from what they do.
	for _, o := range d.cm.Outputs() {
		d.sendMAD(o.To, &o.MAD)
	}
	if t := d.cm.Next(); !t.IsZero() {
		if at := rc.Time(t.Sub(d.start)); at < d.nextTimer {
			d.nextTimer = at
			d.wakeAt(at)
		}
	}
}

// timers runs what has expired.
func (d *Device) timers(now rc.Time) {
	if now < d.nextTimer {
		return
	}
	d.nextTimer = rc.Never
	for _, q := range d.order {
		if q.rc.Deadline() <= now {
			q.rc.Tick(now)
		}
		if t := q.rc.Deadline(); t < d.nextTimer {
			d.nextTimer = t
		}
	}
	d.cm.Tick(d.clock(now))
	d.settleCM(now)
	if d.nextTimer != rc.Never {
		d.wakeAt(d.nextTimer)
	}
}

// flush sends what was built, and lets queue pairs go on that had found no room.
func (d *Device) flush(now rc.Time) {
	for _, q := range d.riders {
		q.riding = false
		q.rc.Ride(now)
	}
	d.riders = d.riders[:0]
	for {
		d.deferred = false
		if !d.tx.send(d) {
			d.wakeAt(now.Add(watchdog))
			return
		}
		if len(d.blocked) == 0 {
			return
		}
		n := len(d.blocked)
		for i := range n {
			q := d.blocked[i]
			q.blocked = false
			q.rc.Pump(now)
			d.settle(q)
		}
		d.blocked = append(d.blocked[:0], d.blocked[n:]...)
	}
}

// flushOrDefer is the end of PostSend.
func (d *Device) flushOrDefer(now rc.Time) {
	wakes := d.woken && d.apart && d.deferAtMost == deferAtFirst
	d.woken = false
	if c := d.reaper.Load(); c != nil && !d.tx.crowded() && !d.crossesOver() && !wakes {
		// Who took entries long ago and has not come back does not mean to; nor who found none and has not polled again. Behind a
		// poll in vain the first post leaves at once: it may be the only one, of somebody who is not going to poll for now.
		at, limit := rc.Time(c.reapedAt.Load()), turnTime
		ready := at != 0
		if !ready {
			at, limit = rc.Time(c.polledAt.Load()), pollTime
			ready = at != 0 && d.sentBehind == at
			d.sentBehind = at
		}
		if ready && now < at.Add(limit) {
			d.deferred = true
			d.wakeAt(now.Add(watchdog)) // should the owner not come back
			return
		}
	}
	d.flush(now)
}

// crossesOver reports that what is held back is enough for the peer to begin with, on its own CPU. It is as much as the peer sent together: where that is more
// than deferAtFirst, more is under way than either end handles at a time, and the peer has something to do anyway.
func (d *Device) crossesOver() bool { return d.apart && d.tx.packets >= d.deferAtMost }

func (d *Device) flushDeferred() {
	if d.deferred {
		d.flush(d.now())
	}
}

// wakeAt makes the pump look again at t at the latest.
func (d *Device) wakeAt(t rc.Time) {
	if t < d.pumpAt {
		d.pumpAt = t
		d.link.SetDeadline(d.clock(t))
	}
}

// pump is the goroutine that drives the device when nobody else does.
func (d *Device) pump() {
	defer close(d.pumped)
	var polls uint64
	for {
		err := d.link.WaitReadable()
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		d.mu.Lock()
		if d.closed {
			d.mu.Unlock()
			return
		}
		polls = d.pumpTurn(err == nil, polls)
		d.unlock()
	}
}

// pumpTurn is a turn driven by the pump, which the link has woken or its deadline. polls is what the last one returned. d.mu is held.
func (d *Device) pumpTurn(readable bool, polls uint64) uint64 {
	if readable {
		d.armed = false
	}
	d.turn()
	idle := d.polls == polls && len(d.notify) == 0
	if !d.led && (d.watched() || idle) {
		d.armPump()
	}
	at := d.nextTimer
	if !d.armed && !d.led || d.deferred || d.tx.stalled() {
		at = min(at, d.now().Add(watchdog))
	}
	d.pumpAt = at
	d.link.SetDeadline(d.clock(at))
	return d.polls
}

// unlock ends a critical section: it deals with overrun completion queues and wakes those whose queues were armed.
func (d *Device) unlock() {
	for len(d.overrun) > 0 {
		c := d.overrun[0]
		d.overrun = d.overrun[1:]
		d.async(verbs.AsyncEvent{Type: verbs.EventCQError, CQ: c})
		for _, q := range d.order {
			if q.sendCQ == c || q.recvCQ == c {
				q.fail(d.now())
			}
		}
	}
	for _, c := range d.notify {
		c.notified = false
		c.channel.post(c)
	}
	d.notify = d.notify[:0]
	d.mu.Unlock()
}

// async queues an asynchronous event; when nobody reads them, the oldest stay and the newest are lost.
func (d *Device) async(e verbs.AsyncEvent) {
	select {
	case d.events <- e:
	default:
		d.stats.AsyncEventsLost++
	}
}

var _ Link = (*udp.Socket)(nil)
