package softroce

// Who watches the link.
//
// Packets come for the whole device, and whoever takes them takes them for all. Somebody parked on the link, the leader among the waiters or the pump,
// is woken by the kernel for every packet, also for those that a poller takes itself: a thread for each packet, which costs more than the packet. So it
// matters that nobody is parked there who is not needed. Nobody is
//
//	while no queue is armed: nobody then waits for a notification;
//	while an owner polls on (verbs.Driver): its polls take the packets, and notify those whose queues are armed, as every turn does.
//
// Device.watched tells which it is. The rule that no wake-up is lost: whenever Device.mu is free, the device is watched, and somebody whose own
// completion it is not yet has to wait for it, then there is a leader, or the pump is armed, or who armed its queue last is on its way to the
// channel (channel.served). All that can make it untrue happens under Device.mu, and is followed there by what makes it true again:
//
//	a queue is armed              Arm: armPump, unless the queue's waiter is on its way
//	the last promise is withdrawn rest, called by Arm, Rests and Destroy: armPump if others are armed
//	the leader leaves             resign: armPump
//	the pump was woken            pumpTurn: armPump
//	the pump is disarmed          lead: there is a leader; pollTurn: only while the device is not watched
//
// The check and what it decides, to lead or to doze, are one critical section too (channel.enter). Both the link's ways of parking tell what has arrived before, so nothing
// is lost between it and the parking.
//
// The promise is cheap. PollsOn writes one word of the owner's; the promise counts from the owner's next turn on, which holds the
// mutex anyway. Nobody is kicked off the link for it: the leader, or the pump, stays parked until the next packet, wakes for that one, finds that the
// device is not watched and stays away. A stretch of polling so costs one vain wake-up at most, and none if no packet comes. Withdrawing takes the mutex, and
// one epoll_ctl(2) where others are armed; the pump then stands in until one of the waiters is back in Wait.
//
// The price: while the promise lasts, what comes for others waits for its owner's next poll. That is soon as long as its thread runs. When it has
// not for a millisecond, the pump takes over (idle in pumpTurn), as it does from any poller that does not come back; nothing depends on that.

// watched reports whether somebody has to be parked on the link. d.mu is held.
func (d *Device) watched() bool { return d.waiting > 0 && d.drivers == 0 }

// PollsOn implements verbs.Driver.
func (c *completionQueue) PollsOn() { c.promised = true }

// Rests implements verbs.Driver.
func (c *completionQueue) Rests() {
	c.promised = false
	if c.drives { // else no turn has counted it
		c.d.mu.Lock()
		c.rest()
		c.d.unlock()
	}
}

// drive counts the owner's promise, in a turn of its own. d.mu is held.
func (c *completionQueue) drive() {
	if c.promised && !c.drives {
		c.drives = true
		c.d.drivers++
	}
}

// rest withdraws the owner's promise. d.mu is held.
func (c *completionQueue) rest() {
	c.promised = false
	if !c.drives {
		return
	}
	d := c.d
	c.drives = false
	if d.drivers--; d.watched() && !d.led {
		d.armPump()
	}
}

// leave ends leadership; readable says that there is something to receive.
func (d *Device) leave(readable bool) {
	d.mu.Lock()
	defer d.unlock()
	d.resign(readable)
}
