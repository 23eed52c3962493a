package targetemu

import (
	"sync"
	"time"

	"srp-initiator/completion"
	"srp-initiator/target-emu/lun"
)

// Units over a disk are served by workers: a completion handler must not wait for one, because what else came on the channel, an abort of the
// very command among it, and in mode poll the channels of other initiators wait for the handler. RAM disks and null devices have none.
//
//	handler -> delegate: cmdMoving, on the unit's list -> a worker works, without ch.mu -> back, with it: what the handler would have gone on with
//
// An errand that has not begun when its command is aborted, or its channel ends, is taken back. A channel's memory is kept until its last
// errand has ended.

const (
	// unitWorkers is how many of a unit's commands are in its store at most.
	unitWorkers = 8
	// moreWorkers is how long errands lie on the list before one more worker is woken: what the page cache takes at once is
	// done sooner by one.
	moreWorkers = time.Millisecond
	// A WRITE that only goes into the page cache costs less than to hand it over. After quickWrites of them in a row, none of which took
	// quickWrite, the handler writes itself, one at a time in a unit, until one takes longer. Never in mode poll, where that one
	// would stop other channels too.
	quickWrites = 32
	quickWrite  = 200 * time.Microsecond
)

type errandKind uint8

const (
	errandRead   errandKind = iota // the next bytes of data-in into data
	errandWrite                    // data-out that has come, in data
	errandWhole                    // the whole data-out, in data
	errandFinish                   // what a command without data does
)

// errand is what a worker does for a command; it lives in the command.
type errand struct {
	kind   errandKind
	kept   bool // the command's data lie in receive slot slot
	filled bool // the next bytes of data-in have been read
	ok     bool
	slot   uint16
	data   []byte
	ch     *channel
	next   *command // in the list
	queued bool     // in the list; guarded by workers.mu
}

// workers serve one unit.
type workers struct {
	mu         sync.Mutex
	wake       sync.Cond
	head, tail *command // guarded by mu, as what follows
	busy, idle int
	closed     bool
	inline     bool // a handler writes
	quick      int  // WRITEs in a row that were quick
	armed      bool
	timer      *time.Timer
}

func newWorkers() *workers {
	w := &workers{}
	w.wake.L = &w.mu
	w.timer = time.AfterFunc(time.Hour, w.backlog)
	w.timer.Stop()
	return w
}

// close ends the workers; there are no errands any more.
func (w *workers) close() {
	w.mu.Lock()
	w.closed = true
	w.timer.Stop()
	w.mu.Unlock()
	w.wake.Broadcast()
}

func (w *workers) add(c *command) {
	w.mu.Lock()
	c.errand.next, c.errand.queued = nil, true
	if w.tail == nil {
		w.head = c
	} else {
		w.tail.errand.next = c
	}
	w.tail = c
	if w.busy == 0 {
		w.startLocked()
	} else if !w.armed && w.busy < unitWorkers {
		w.armed = true
		w.timer.Reset(moreWorkers)
	}
	w.mu.Unlock()
}

// startLocked sets one more worker to work.
func (w *workers) startLocked() {
	w.busy++
	if w.idle > 0 {
		w.idle--
		w.wake.Signal()
	} else {
		go w.run()
	}
}

// backlog is the timer's.
func (w *workers) backlog() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.armed = false
	if w.head == nil || w.closed || w.busy >= unitWorkers {
		return
	}
	w.startLocked()
	w.armed = true
	w.timer.Reset(moreWorkers)
}

// tryInline reports that a handler may write, after which it calls took.
func (w *workers) tryInline() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	ok := w.busy == 0 && !w.inline && w.quick >= quickWrites
	w.inline = w.inline || ok
	return ok
}

// took notes how long a WRITE was in the store.
func (w *workers) took(d time.Duration, inline bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if inline {
		w.inline = false
	}
	if d < quickWrite {
		w.quick++
	} else {
		w.quick = 0
	}
}

// remove takes c off the list and reports whether it was there.
func (w *workers) remove(c *command) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !c.errand.queued {
		return false
	}
	c.errand.queued = false
	var prev *command
	for x := w.head; x != c; x = x.errand.next {
		prev = x
	}
	if prev == nil {
		w.head = c.errand.next
	} else {
		prev.errand.next = c.errand.next
	}
	if w.tail == c {
		w.tail = prev
	}
	return true
}

func (w *workers) run() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		c := w.head
		switch {
		case c != nil:
			if w.head = c.errand.next; w.head == nil {
				w.tail = nil
			}
			c.errand.queued = false
			w.mu.Unlock()
			c.errand.ch.serve(c)
			w.mu.Lock()
		case w.closed:
			return
		default:
			w.busy--
			w.idle++
			w.wake.Wait() // who wakes it counts it as busy
		}
	}
}

// slow reports whether c's unit has workers.
func (ch *channel) slow(c *command) bool { return c.unit != nil && c.unit.workers != nil }

// delegate hands c to its unit's workers.
func (ch *channel) delegate(c *command, kind errandKind, data []byte) {
	e := &c.errand
	e.kind, e.data, e.ch, e.ok = kind, data, ch, false
	if kind == errandWrite && !c.task.Syncs() && ch.t.cfg.Completion.Mode != completion.Poll && c.unit.workers.tryInline() {
		e.kept = false // receive posts the slot again
		ch.carryOut(c, true)
		ch.back(c)
		return
	}
	c.state = cmdMoving
	ch.errands.Add(1)
	c.unit.workers.add(c)
}

// recall takes back c's errand and reports true, unless it has begun or there is none.
func (ch *channel) recall(c *command) bool {
	if !ch.slow(c) || !c.unit.workers.remove(c) {
		return false
	}
	ch.errands.Done()
	return true
}

// arrived delegates what a step of data-out has brought.
func (ch *channel) arrived(c *command) {
	if c.task.Way != lun.WayWhole {
		ch.delegate(c, errandWrite, ch.buf(c)[:c.step])
		return
	}
	if c.moved += c.step; c.moved < c.want {
		ch.move(c)
		return
	}
	ch.delegate(c, errandWhole, c.whole(ch.largeBuf(c)))
}

// serve carries out c's errand. Called by a worker.
func (ch *channel) serve(c *command) {
	defer ch.errands.Done()
	ch.mu.Lock()
	wanted := !ch.closing && !c.dead && !c.tas
	ch.mu.Unlock()
	if wanted {
		ch.carryOut(c, false)
	}
	ch.mu.Lock()
	defer ch.mu.Unlock()
	if !ch.closing {
		ch.back(c)
		ch.flush()
	}
}

// carryOut does c's errand.
func (ch *channel) carryOut(c *command, inline bool) {
	e, t := &c.errand, &c.task
	switch e.kind {
	case errandRead:
		e.ok = t.ReadChunk(e.data, c.moved)
	case errandWrite:
		start := time.Now()
		if e.ok = t.WriteChunk(e.data, c.moved); e.ok && c.moved+int64(len(e.data)) == c.want {
			t.FinishStream()
		}
		c.unit.workers.took(time.Since(start), inline)
	case errandWhole:
		t.FinishOut(e.data)
	case errandFinish:
		t.Finish()
	}
}

// back goes on with a command whose errand has ended.
func (ch *channel) back(c *command) {
	e := &c.errand
	if e.kept {
		e.kept = false
		ch.repost(e.slot)
	}
	if ch.aborted(c) {
		return
	}
	switch {
	case e.ok && e.kind == errandRead:
		e.filled = true
		ch.move(c)
		return
	case e.ok && e.kind == errandWrite:
		if c.moved += int64(len(e.data)); c.moved < c.want {
			ch.move(c)
			return
		}
	}
	ch.executed(c)
}
