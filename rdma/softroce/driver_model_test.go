package softroce

// The interleaving proof of who watches the link: an explicit-state model checker over the real critical sections (channel.enter, collect, Device.leave,
// pumpTurn, Poll, Arm, Rests). A world is what the goroutines share and where each stands; a move loads it into a real device, runs one real section
// of one goroutine and saves what has become of it. Two channels with a queue each, a waiter per channel, an owner per queue, and the pump, on a
// link of which the model says what has arrived. There is no time: no deadline ever passes, and the pump never takes a poller for gone. In every world that any order of
// moves can reach, it holds that
//
//   - nobody begins to watch the link while an owner has promised to poll on;
//   - else somebody watches it, or has just been woken by it, while a waiter sleeps whose queue is armed and nobody polls it;
//   - without any further event from outside a world can be reached in which everything that has arrived is reaped, but for
//     a queue whose owner rests without having armed it.
//
// Rules are removed one by one; each must be noticed.

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"srp-initiator/rdma/softroce/udp"
	"srp-initiator/rdma/verbs"
)

// modelLink is the link of the loaded world. What arrives is an entry for a queue.
type modelLink struct{ m *watchModel }

func (modelLink) Addr() netip.Addr                { return netip.AddrFrom4([4]byte{127, 0, 0, 1}) }
func (modelLink) Send(t []udp.Train) (int, error) { return len(t), nil }
func (modelLink) GSO() bool                       { return false }
func (modelLink) WaitReadable() error             { panic("the pump is the model's") }
func (modelLink) Park() (bool, error)             { panic("waiters are the model's") }
func (modelLink) SetDeadline(time.Time) error     { return nil }
func (modelLink) Close() error                    { return nil }
func (l modelLink) Arm() error                    { l.m.w.linkArmed = true; return nil }
func (l modelLink) Disarm() error                 { l.m.w.linkArmed = false; return nil }
func (l modelLink) Unpark()                       { l.m.w.unparked = true }

func (l modelLink) Receive() ([]udp.Message, error) {
	for k, c := range l.m.cq {
		for ; l.m.w.arrived[k] > 0; l.m.w.arrived[k]-- {
			c.push(&verbs.WorkCompletion{}, false)
		}
	}
	return nil, nil
}

// Where a waiter stands.
const (
	entering = iota
	collecting
	asleep
	waking
	resigning
	noDozing
	serving // the notification, until the owner is done
	lateDozing
)

// Where an owner stands.
const (
	offDuty  = iota // armed, or resting
	polls           //
	deciding        // has seen the queue empty
)

type watchWaiter struct {
	pc                     uint8
	leads, readable, doing bool
}

type watchWorld struct {
	led, armed                bool
	linkArmed, unparked       bool
	arrived, ring             [2]int8
	produced, reaped          [2]int8
	cqArmed                   [2]uint32
	promised, drives, resting [2]bool
	pending, signal, dozes    [2]bool
	waits                     [2]waitsOn
	waiter                    [2]watchWaiter
	owner                     [2]uint8
	pump                      bool // woken
	wrong                     string
}

// watchScenario says how the two queues are owned.
type watchScenario struct {
	packets  [2]int8
	promises [2]bool // polls on behind an empty queue
	inPlace  [2]bool // the waiter serves what it was notified of itself, and is not in Wait meanwhile
	rests    [2]bool // may leave the queue unarmed, and takes it up again when it likes
}

func (s watchScenario) String() string {
	return fmt.Sprintf("packets=%v,promises=%v,inPlace=%v,rests=%v", s.packets, s.promises, s.inPlace, s.rests)
}

type watchVariation struct {
	name      string
	arm       func(c *completionQueue) (bool, error)
	rests     func(c *completionQueue)
	enter     func(ch *channel) bool
	leave     func(d *Device, readable bool)
	pump      func(d *Device)
	late      bool // the waiter says that it dozes when it no longer holds the mutex
	noCollect bool // the leader parks without a look at its channel
}

type watchModel struct {
	s  watchScenario
	v  *watchVariation
	d  *Device
	ch [2]*channel
	cq [2]*completionQueue
	w  *watchWorld
}

func newWatchModel(t testing.TB, s watchScenario, v *watchVariation) *watchModel {
	if v == nil {
		v = &watchVariation{}
	}
	m := &watchModel{s: s, v: v}
	m.d = newDevice(modelLink{m}, verbs.MTU1024, options{})
	for k := range m.cq {
		ch, err := m.d.CreateCompletionChannel()
		if err != nil {
			t.Fatal(err)
		}
		cq, err := m.d.CreateCQ(verbs.CQInit{Capacity: 8, Channel: ch})
		if err != nil {
			t.Fatal(err)
		}
		m.ch[k], m.cq[k] = ch.(*channel), cq.(*completionQueue)
		m.ch[k].served.Store(true)
	}
	return m
}

func (m *watchModel) load(w *watchWorld) {
	m.w = w
	d := m.d
	d.led, d.armed, d.waiting, d.drivers = w.led, w.armed, 0, 0
	for k, c := range m.cq {
		c.head.Store(0)
		c.tail.Store(uint32(w.ring[k]))
		c.armed.Store(w.cqArmed[k])
		c.promised, c.drives = w.promised[k], w.drives[k]
		if w.cqArmed[k] != armedNot {
			d.waiting++
		}
		if c.drives {
			d.drivers++
		}
		ch := m.ch[k]
		c.queued = w.pending[k]
		ch.pending = ch.pending[:0]
		if w.pending[k] {
			ch.pending = append(ch.pending, c)
		}
		ch.waits = w.waits[k]
		ch.dozes.Store(w.dozes[k])
		select {
		case <-ch.signal:
		default:
		}
		if w.signal[k] {
			ch.signal <- struct{}{}
		}
	}
}

func (m *watchModel) save(w *watchWorld) {
	d := m.d
	w.led, w.armed = d.led, d.armed
	waiting, drivers := 0, 0
	for k, c := range m.cq {
		w.ring[k] = int8(c.tail.Load() - c.head.Load())
		w.cqArmed[k] = c.armed.Load()
		w.promised[k], w.drives[k] = c.promised, c.drives
		if w.cqArmed[k] != armedNot {
			waiting++
		}
		if c.drives {
			drivers++
		}
		ch := m.ch[k]
		w.pending[k] = len(ch.pending) > 0
		w.waits[k] = ch.waits
		w.dozes[k] = ch.dozes.Load()
		w.signal[k] = len(ch.signal) > 0
	}
	for k := range m.cq {
		if p := &w.waiter[k]; p.pc == asleep && !p.leads && !w.signal[k] && w.owner[k] == offDuty && w.cqArmed[k] != armedNot && drivers == 0 && !w.led && !w.armed && !w.pump {
			w.wrong = "a waiter sleeps whose queue is armed, and nobody watches the link"
		}
	}
	if waiting != d.waiting || drivers != d.drivers {
		w.wrong = "the counts of armed queues and promises are wrong"
	}
}

func (m *watchModel) leaves(readable bool) {
	if m.v.leave != nil {
		m.v.leave(m.d, readable)
	} else {
		m.d.leave(readable)
	}
}

// watchMove makes choice of goroutine who; false when there is no such move. external: it is an event from outside.
func (m *watchModel) move(w *watchWorld, who, choice int) (made, external bool) {
	m.load(w)
	before := *w
	defer func() {
		if made {
			m.save(w)
			if before.drives != [2]bool{} && w.drives != [2]bool{} && (w.led && !before.led || w.armed && !before.armed) && w.wrong == "" {
				w.wrong = "somebody begins to watch the link for whom an owner polls"
			}
		}
	}()
	k := who / 2
	switch {
	case who == 4: // the pump
		if choice > 0 {
			return false, false
		}
		if !w.pump {
			if !w.linkArmed || w.arrived == [2]int8{} {
				return false, false
			}
			w.linkArmed, w.pump = false, true
			return true, false
		}
		w.pump = false
		if m.v.pump != nil {
			m.v.pump(m.d)
			return true, false
		}
		m.d.mu.Lock()
		m.d.pumpTurn(true, m.d.polls+1) // somebody has polled since
		m.d.unlock()
		return true, false
	case who == 5: // the network
		if choice > 1 || w.produced[choice] >= m.s.packets[choice] {
			return false, true
		}
		w.produced[choice]++
		w.arrived[choice]++
		return true, true
	case who%2 == 0:
		return m.moveWaiter(w, k, choice), false
	}
	switch w.owner[k] {
	case offDuty:
		if !w.resting[k] || choice > 0 || w.waiter[k].doing {
			return false, false
		}
		w.owner[k], w.resting[k] = polls, false
		return true, true
	case polls:
		if choice > 0 {
			return false, false
		}
		var wcs [1]verbs.WorkCompletion
		n := m.cq[k].Poll(wcs[:])
		w.reaped[k] += int8(n)
		if n == 0 {
			w.owner[k] = deciding
		}
		return true, false
	}
	switch choice {
	case 0:
		arm := m.v.arm
		if arm == nil {
			arm = func(c *completionQueue) (bool, error) { return c.Arm(false) }
		}
		missed, err := arm(m.cq[k])
		if err != nil {
			w.wrong = err.Error()
		}
		w.owner[k] = offDuty
		if missed {
			w.owner[k] = polls
		}
	case 1:
		if !m.s.promises[k] {
			return false, false
		}
		m.cq[k].PollsOn()
		w.owner[k] = polls
	case 2:
		if !m.s.rests[k] || w.cqArmed[k] != armedNot { // who has armed it has not left it unarmed
			return false, false
		}
		if m.v.rests != nil {
			m.v.rests(m.cq[k])
		} else {
			m.cq[k].Rests()
		}
		w.owner[k], w.resting[k] = offDuty, true
	default:
		return false, false
	}
	return true, false
}

// moveWaiter follows channel.Wait.
func (m *watchModel) moveWaiter(w *watchWorld, k, choice int) bool {
	p, ch := &w.waiter[k], m.ch[k]
	if choice > 0 && p.pc != asleep {
		return false
	}
	var events [1]verbs.CompletionQueue
	switch p.pc {
	case entering:
		switch {
		case m.v.enter != nil:
			p.leads = m.v.enter(ch)
		case m.v.late:
			was := ch.dozes.Load()
			p.leads = ch.enter()
			ch.dozes.Store(was)
			p.pc = lateDozing
			return true
		default:
			p.leads = ch.enter()
		}
		p.pc = collecting
	case lateDozing:
		ch.dozes.Store(!p.leads)
		p.pc = collecting
	case collecting:
		on := onSignal
		if p.leads {
			on = onLink
		}
		if m.v.noCollect && p.leads {
			ch.waits, p.pc = on, asleep
			return true
		}
		n, done, err := ch.collect(events[:], on)
		if err != nil {
			w.wrong = err.Error()
		}
		p.doing = n > 0
		switch {
		case !done:
			p.pc = asleep
		case p.leads:
			p.pc, p.readable = resigning, false
		default:
			p.pc = noDozing
		}
	case asleep:
		switch {
		case !p.leads:
			if !w.signal[k] || choice > 0 {
				return false
			}
			<-ch.signal
			p.pc = entering
		case choice == 0:
			if w.arrived == [2]int8{} {
				return false
			}
			p.pc, p.readable = waking, true
		case choice == 1:
			if !w.unparked {
				return false
			}
			w.unparked = false
			p.pc, p.readable = waking, false
		default:
			return false
		}
	case waking:
		ch.awake()
		p.pc = resigning
	case resigning:
		m.leaves(p.readable)
		p.pc, p.leads, p.readable = entering, false, false
		if p.doing {
			p.pc = serving
		}
	case noDozing:
		ch.dozes.Store(false)
		p.pc = entering
		if p.doing {
			p.pc = serving
		}
	case serving:
		// A notification for an owner that is at work, or rests, is in vain.
		if p.doing {
			p.doing = false
			if w.owner[k] == offDuty && !w.resting[k] {
				w.owner[k] = polls
			}
			return true
		}
		if m.s.inPlace[k] && w.owner[k] != offDuty {
			return false
		}
		p.pc = entering
	}
	return true
}

// explore visits all worlds.
func (m *watchModel) explore() (int, string) {
	var first watchWorld
	first.armed, first.linkArmed = true, true // Device.run
	first.owner = [2]uint8{polls, polls}
	ids := map[watchWorld]int32{first: 0}
	worlds := []watchWorld{first}
	parent, by := []int32{-1}, []int8{0}
	type edge struct{ from, to int32 }
	var internal []edge
	for at := int32(0); int(at) < len(worlds); at++ {
		for who := range 6 {
			for choice := range 3 {
				w := worlds[at]
				made, external := m.move(&w, who, choice)
				if !made || w == worlds[at] {
					continue
				}
				id, seen := ids[w]
				if !seen {
					id = int32(len(worlds))
					ids[w] = id
					worlds, parent, by = append(worlds, w), append(parent, at), append(by, int8(who))
				}
				if w.wrong != "" {
					return len(worlds), w.wrong + watchPath(worlds, parent, by, id)
				}
				if len(worlds) > 4_000_000 {
					return len(worlds), "too many worlds"
				}
				if !external {
					internal = append(internal, edge{at, id})
				}
			}
		}
	}
	pred := make([][]int32, len(worlds))
	for _, e := range internal {
		pred[e.to] = append(pred[e.to], e.from)
	}
	ok := make([]bool, len(worlds))
	var todo []int32
	for id := range worlds {
		if m.settled(&worlds[id]) {
			ok[id] = true
			todo = append(todo, int32(id))
		}
	}
	for len(todo) > 0 {
		id := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, q := range pred[id] {
			if !ok[q] {
				ok[q] = true
				todo = append(todo, q)
			}
		}
	}
	for id := range worlds {
		if !ok[id] {
			return len(worlds), "a wake-up was lost" + watchPath(worlds, parent, by, int32(id))
		}
	}
	return len(worlds), ""
}

func (m *watchModel) settled(w *watchWorld) bool {
	for k := range m.cq {
		if !w.resting[k] && w.reaped[k] != w.produced[k] {
			return false
		}
	}
	return true
}

func watchPath(worlds []watchWorld, parent []int32, by []int8, id int32) string {
	names := [...]string{"waiter0", "owner0", "waiter1", "owner1", "pump", "network"}
	var steps []string
	for k := id; k > 0; k = parent[k] {
		steps = append(steps, fmt.Sprintf("\n\t%s %+v", names[by[k]], worlds[k]))
	}
	var b strings.Builder
	for k := len(steps) - 1; k >= 0; k-- {
		b.WriteString(steps[k])
	}
	return b.String()
}

var both = [2]bool{true, true}

// mirrored is the same with the queues the other way round.
func (s watchScenario) mirrored() watchScenario {
	swap := func(b [2]bool) [2]bool { return [2]bool{b[1], b[0]} }
	return watchScenario{packets: [2]int8{s.packets[1], s.packets[0]}, promises: swap(s.promises), inPlace: swap(s.inPlace), rests: swap(s.rests)}
}

func watchScenarios() (all []watchScenario) {
	for _, promises := range [][2]bool{{}, {true, false}, both} {
		for _, inPlace := range [][2]bool{{}, {true, false}, {false, true}, both} {
			for _, rests := range [][2]bool{{}, {true, false}, {false, true}, both} {
				s := watchScenario{packets: [2]int8{1, 1}, promises: promises, inPlace: inPlace, rests: rests}
				if mirrored := s.mirrored(); !slices.Contains(all, mirrored) {
					all = append(all, s)
				}
			}
		}
	}
	return append(all, watchScenario{packets: [2]int8{2, 1}, promises: [2]bool{true, false}, inPlace: [2]bool{false, true}, rests: [2]bool{true, false}})
}

// TestWatchEveryInterleaving is the proof.
func TestWatchEveryInterleaving(t *testing.T) {
	if raceEnabled {
		t.Skip("the model runs in one goroutine")
	}
	total := 0
	for _, s := range watchScenarios() {
		n, wrong := newWatchModel(t, s, nil).explore()
		total += n
		if wrong != "" {
			t.Fatalf("%v: %s", s, wrong)
		}
		t.Logf("%v: %d worlds", s, n)
	}
	t.Logf("%d worlds", total)
}

// TestRemovedWatchRuleIsNoticed runs the proof on devices that lack one rule.
func TestRemovedWatchRuleIsNoticed(t *testing.T) {
	if raceEnabled {
		t.Skip("the model runs in one goroutine")
	}
	one := watchScenario{packets: [2]int8{1, 1}, promises: [2]bool{true, false}, inPlace: both, rests: [2]bool{true, false}}
	apart := one
	apart.inPlace = [2]bool{}
	for _, v := range []struct {
		watchVariation
		in watchScenario
	}{
		{watchVariation{name: "Arm keeps the promise", arm: func(c *completionQueue) (bool, error) {
			drives := c.drives
			c.drives = false
			missed, err := c.Arm(false)
			c.drives = drives
			return missed, err
		}}, one},
		{watchVariation{name: "Arm withdraws the promise and leaves the others to its waiter", arm: func(c *completionQueue) (bool, error) {
			if c.drives {
				c.drives = false
				c.d.drivers--
			}
			return c.Arm(false)
		}}, one},
		{watchVariation{name: "who rests keeps the promise", rests: func(c *completionQueue) {}}, one},
		{watchVariation{name: "nobody takes the link when the last promise is withdrawn", rests: func(c *completionQueue) {
			c.promised = false
			if c.drives {
				c.drives = false
				c.d.drivers--
			}
		}}, one},
		{watchVariation{name: "who rests asks who watches before it withdraws", rests: func(c *completionQueue) {
			if c.d.watched() && !c.d.led {
				c.d.armPump()
			}
			c.promised = false
			if c.drives {
				c.drives = false
				c.d.drivers--
			}
		}}, one},
		{watchVariation{name: "the leader goes back to the link of those who poll", enter: func(ch *channel) bool {
			leader := ch.d.waiting > 0 && ch.d.lead()
			ch.dozes.Store(!leader)
			return leader
		}}, one},
		{watchVariation{name: "the pump goes back to the link of those who poll", pump: func(d *Device) {
			d.armed = false
			d.turn()
			if !d.led && d.waiting > 0 {
				d.armPump()
			}
			d.unlockForModel()
		}}, one},
		{watchVariation{name: "the leader leaves the link to nobody", leave: func(d *Device, readable bool) {
			d.led = false
			if readable {
				d.turn()
			}
			d.unlockForModel()
		}}, one},
		{watchVariation{name: "the pump leaves the link to nobody", pump: func(d *Device) {
			d.armed = false
			d.turn()
			d.unlockForModel()
		}}, apart},
		{watchVariation{name: "a waiter says that it dozes after it has looked", late: true}, apart},
		{watchVariation{name: "the leader parks without a look at its channel", noCollect: true}, one},
	} {
		t.Run(v.name, func(t *testing.T) {
			n, wrong := newWatchModel(t, v.in, &v.watchVariation).explore()
			if wrong == "" {
				t.Errorf("not noticed in %d worlds", n)
			}
			first, _, _ := strings.Cut(wrong, "\n")
			t.Log(first)
		})
	}
}

// unlockForModel is unlock of a mutex that nobody needs to hold here.
func (d *Device) unlockForModel() {
	d.mu.Lock()
	d.unlock()
}
