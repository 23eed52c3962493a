package targetemu

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"srp-initiator/rdma/cm"
	"srp-initiator/srp/iu"
	"srp-initiator/srp/scsi"
	"srp-initiator/target-emu/lun"
)

var be = binary.BigEndian

// faultRun plays a fault script. Its lock is taken under a channel's lock, for the counters only.
type faultRun struct {
	t *Target

	mu    sync.Mutex
	rules []ruleState
	tags  []uint64 // the tags of the last commands, for "tag previous"
	off   bool
}

type ruleState struct {
	*rule
	acl     *ACL   // of from=
	matches uint64 // guarded by faultRun.mu, as acted
	acted   uint64
	rng     *rand.Rand
	timer   *time.Timer // of a time rule
}

// verdict is what the script wants done with one command.
type verdict struct {
	defers   bool // hold, delay, shuffle or drop
	released bool
	drop     bool
	keep     bool // an abort does not take it
	shuffle  bool
	name     string // hold group; "": none, or it has been released
	count    int    // release the group when so many are held
	wait     time.Duration
	delay    time.Duration // 0: none, or it is over
	rng      *rand.Rand

	corrupt, cut int64
	edits        []action  // of the response
	sends        []*action // units before the response
	dups         int64
}

// units is how many SENDs the answer may take, as far as a send queue of depth has room for what a script wants beside the largest step.
func (v *verdict) units(depth int) int {
	if v == nil {
		return 1
	}
	return 1 + max(0, min(len(v.sends)+int(v.dups), depth/2-maxStepWRs-1))
}

func newFaultRun(t *Target, f *Faults) *faultRun {
	r := &faultRun{t: t}
	for i := range f.rules {
		s := ruleState{rule: &f.rules[i], rng: rand.New(rand.NewPCG(f.Seed, uint64(f.rules[i].line)))}
		if s.from != "" {
			s.acl, _ = ParseACL([]string{s.from})
		}
		r.rules = append(r.rules, s)
	}
	return r
}

// fires counts a match and says whether it is one of those that the rule wants.
func (s *ruleState) fires() bool {
	s.matches++
	n := s.matches
	switch {
	case s.nth != 0 && n != s.nth,
		s.after != 0 && n <= s.after,
		s.first != 0 && n > s.first+s.after,
		s.every != 0 && n%s.every != 0,
		s.prob >= 0 && s.rng.Float64() >= s.prob:
		return false
	}
	s.acted++
	return true
}

// stats are the rules' counters, in the order of the script.
func (f *faultRun) stats() []RuleStats {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make([]RuleStats, len(f.rules))
	for i := range f.rules {
		s := &f.rules[i]
		out[i] = RuleStats{Line: s.line, Rule: s.text, Matched: s.matches, Acted: s.acted}
	}
	return out
}

// start arms the time rules.
func (f *faultRun) start() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range f.rules {
		if f.rules[i].event == onTime {
			f.armLocked(&f.rules[i], max(f.rules[i].at, f.rules[i].period))
		}
	}
}

func (f *faultRun) armLocked(s *ruleState, d time.Duration) {
	if !f.off {
		s.timer = time.AfterFunc(d, func() { f.tick(s) })
	}
}

func (f *faultRun) stop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.off = true
	for i := range f.rules {
		if t := f.rules[i].timer; t != nil {
			t.Stop()
		}
	}
}

// tick runs a time rule on every channel that it names.
func (f *faultRun) tick(s *ruleState) {
	acted := false
	for _, ch := range f.t.channels() {
		if s.channel >= 0 && int64(ch.number) != s.channel {
			continue
		}
		ch.mu.Lock()
		if !ch.closing {
			var now []*action
			for i := range s.actions {
				now = append(now, &s.actions[i])
			}
			ch.now(now, nil)
			ch.flush()
			acted = true
		}
		ch.mu.Unlock()
	}
	for i := range s.actions {
		if a := &s.actions[i]; a.verb == "vanish" {
			f.t.vanish(a.d)
			acted = true
		}
	}
	f.mu.Lock()
	s.matches++
	if acted {
		s.acted++
	}
	if s.period != 0 {
		f.armLocked(s, s.period)
	}
	f.mu.Unlock()
}

// login lets the script have its say about an acceptable login: refuse it, or change rsp. raw replaces the encoded response.
func (f *faultRun) login(ctx context.Context, conn cm.Conn, req *iu.LoginReq, rsp *iu.LoginRsp) (rej *rejection, raw []byte) {
	var delay time.Duration
	from := peerAddr(conn)
	f.mu.Lock()
	for i := range f.rules {
		s := &f.rules[i]
		if s.event != onLogin || s.acl != nil && !s.acl.Admits(req.InitiatorPort, from) || !s.fires() {
			continue
		}
		for j := range s.actions {
			switch a := &s.actions[j]; a.verb {
			case "reject":
				rej = &rejection{reason: iu.RejectReason(a.n), why: fmt.Sprintf("fault, line %d", s.line)}
			case "reject-raw":
				rej = &rejection{raw: a.data, why: fmt.Sprintf("fault, line %d", s.line)}
			case "ignore":
				rej = &rejection{ignore: true}
			case "delay":
				delay += a.pick(s.rng)
			case "limit":
				rsp.ReqLimDelta = int32(a.n)
			case "max-it":
				rsp.MaxITIULen = uint32(a.n)
			case "max-ti":
				rsp.MaxTIIULen = uint32(a.n)
			case "rsp-flags":
				rsp.Flags = iu.LoginRspFlags(a.n)
			case "formats":
				rsp.Formats = iu.BufferFormats(a.n)
			case "accept-raw":
				raw = a.data
			case "vanish":
				f.t.vanish(a.d)
			}
		}
	}
	f.mu.Unlock()
	if delay > 0 {
		select {
		case <-ctx.Done():
		case <-conn.Done():
		case <-time.After(delay):
		}
	}
	return rej, raw
}

func (a *action) pick(rng *rand.Rand) time.Duration {
	if a.dMax <= a.d {
		return a.d
	}
	return a.d + time.Duration(rng.Int64N(int64(a.dMax-a.d)+1))
}

// command finds the rules that a command matches; ch is locked.
func (f *faultRun) command(ch *channel, c *command) *verdict {
	return f.match(ch, c, func(s *ruleState) bool {
		return s.event == onCommand && (s.op == nil || len(c.task.CDB) > 0 && s.op[scsi.Opcode(c.task.CDB[0])])
	})
}

// taskMgmt is command for a task management function.
func (f *faultRun) taskMgmt(ch *channel, c *command, fn iu.TaskFunction) *verdict {
	return f.match(ch, c, func(s *ruleState) bool { return s.event == onTaskMgmt && (s.fn == 0 || s.fn == fn) })
}

func (f *faultRun) match(ch *channel, c *command, hit func(*ruleState) bool) *verdict {
	var v *verdict
	var now []*action
	gone := false // the rule ends the channel: no answer any more
	f.mu.Lock()
	for i := range f.rules {
		s := &f.rules[i]
		if !hit(s) || s.lun >= 0 && uint32(s.lun) != c.number || s.channel >= 0 && s.channel != int64(ch.number) || !s.fires() {
			continue
		}
		ch.count.faults.Add(1)
		if v == nil {
			v = &verdict{rng: s.rng}
		}
		for j := range s.actions {
			a := &s.actions[j]
			switch a.verb {
			case "hold":
				v.defers, v.name, v.count, v.wait, v.keep, v.shuffle = true, a.name, a.count, a.d, a.keep, false
			case "shuffle":
				v.defers, v.name, v.count, v.wait, v.keep, v.shuffle = true, fmt.Sprintf("shuffle %d", s.line), a.count, a.d, false, true
			case "drop":
				v.defers, v.drop = true, true
			case "delay":
				v.defers = true
				v.delay += a.pick(s.rng)
			case "corrupt":
				v.corrupt = a.n
			case "cut":
				v.cut = a.n
			case "duplicate":
				v.dups = a.n
			case "send":
				v.sends = append(v.sends, a)
			case "release", "ua":
				now = append(now, a)
			case "disconnect", "break", "vanish":
				gone = gone || a.verb != "vanish"
				now = append(now, v.sends...)
				v.sends = nil
				now = append(now, a)
			case "tag":
				e := *a
				switch a.which {
				case "random":
					e.n = int64(s.rng.Uint64())
					e.which = "set"
				case "previous":
					e.which = "set"
					if len(f.tags) > 0 {
						e.n = int64(f.tags[len(f.tags)-1])
					}
				}
				v.edits = append(v.edits, e)
			default:
				v.edits = append(v.edits, *a)
			}
		}
	}
	f.tags = append(f.tags, c.tag)
	if len(f.tags) > 16 {
		f.tags = f.tags[1:]
	}
	f.mu.Unlock()
	ch.now(now, c)
	if gone {
		v.defers, v.drop = true, true
	}
	return v
}

// now does what does not wait for a response; ch is locked. c is the command that triggered it, nil for a time rule.
func (ch *channel) now(actions []*action, c *command) {
	var sent *command // the last unit sent here: a disconnect waits for it
	for _, a := range actions {
		switch a.verb {
		case "release":
			ch.releaseHeld(a.name)
			for _, other := range ch.t.channels() {
				if other != ch && c != nil { // a time rule comes to every channel by itself
					go func() {
						other.mu.Lock()
						defer other.mu.Unlock()
						if !other.closing {
							other.releaseHeld(a.name)
							other.flush()
						}
					}()
				}
			}
		case "ua":
			if c == nil {
				for _, u := range ch.units {
					u.nexus.Establish(a.sense.ASC)
				}
			} else if c.unit != nil {
				c.unit.nexus.Establish(a.sense.ASC)
			}
		case "disconnect":
			why := errors.New("fault: disconnect")
			if sent == nil {
				ch.fail(why)
				break
			}
			sent.bye = why
			time.AfterFunc(time.Second, func() { ch.fail(why) })
		case "break":
			ch.breakOff()
		case "vanish":
			if c != nil { // a time rule's is tick's
				ch.flush() // what was said before
				ch.t.vanish(a.d)
			}
		case "send":
			sent = ch.sendFault(a)
		}
	}
}

func (ch *channel) sendFault(a *action) *command {
	c := ch.sendUnit(a.data)
	if c != nil {
		ch.limit += a.n
		ch.count.credits.Add(a.n)
		ch.count.faults.Add(1)
	}
	return c
}

// preempted applies what the script decides before a command is executed: a status or sense of its choice. It reports
// whether the command is done with.
func (ch *channel) preempted(c *command, nx *lun.Nexus) bool {
	for i := range c.verdict.edits {
		switch a := &c.verdict.edits[i]; a.verb {
		case "status":
			c.task.SetStatus(scsi.Status(a.n))
		case "sense":
			c.task.SetSense(a.sense.Append(nil))
		case "sense-raw":
			c.task.SetSense(a.data)
		default:
			continue
		}
		c.task.OutLen, c.task.InLen = 0, 0
		ch.answer(c)
		return true
	}
	return false
}

// groupEnd is the earliest time at which a group of held answers goes.
type groupEnd struct {
	at    time.Time
	timer *time.Timer
}

// deferred takes a finished command away when the script holds its answer back. What one rule delays and another one holds
// goes when both are over.
func (ch *channel) deferred(c *command) bool {
	v := c.verdict
	if v == nil || !v.defers || v.released {
		return false
	}
	c.state = cmdHeld
	ch.held = append(ch.held, c.index)
	if v.drop {
		return true
	}
	if v.delay > 0 {
		time.AfterFunc(v.delay, func() {
			ch.mu.Lock()
			defer ch.mu.Unlock()
			v.delay = 0
			if c.verdict == v && c.state == cmdHeld && v.name == "" && !ch.closing {
				ch.unhold(c)
				v.released = true
				ch.resume(c)
				ch.flush()
			}
		})
	}
	if v.name == "" {
		return true
	}
	n := 0
	for _, i := range ch.held {
		if w := ch.cmds[i].verdict; w != nil && !w.drop && w.name == v.name {
			n++
		}
	}
	if n == 1 {
		ch.endGroup(v.name) // its other answers may have been aborted
	}
	if v.count > 0 && n >= v.count {
		ch.releaseHeld(v.name)
	} else if v.wait > 0 {
		ch.limitGroup(v.name, v.wait)
	}
	return true
}

// limitGroup lets a group go after d, unless it goes before.
func (ch *channel) limitGroup(name string, d time.Duration) {
	at := time.Now().Add(d)
	if e := ch.groupEnds[name]; e != nil && e.at.Before(at) {
		return
	}
	ch.endGroup(name)
	e := &groupEnd{at: at}
	e.timer = time.AfterFunc(d, func() {
		ch.mu.Lock()
		defer ch.mu.Unlock()
		if ch.groupEnds[name] == e && !ch.closing {
			ch.releaseHeld(name)
			ch.flush()
		}
	})
	if ch.groupEnds == nil {
		ch.groupEnds = map[string]*groupEnd{}
	}
	ch.groupEnds[name] = e
}

// endGroup forgets when a group was to go: the next one of its name has a time of its own.
func (ch *channel) endGroup(name string) {
	if e := ch.groupEnds[name]; e != nil {
		e.timer.Stop()
		delete(ch.groupEnds, name)
	}
}

// unhold takes c off the held list.
func (ch *channel) unhold(c *command) {
	if i := slices.Index(ch.held, c.index); i >= 0 {
		ch.held = slices.Delete(ch.held, i, i+1)
	}
}

// releaseHeld lets a group's answers go, all with the same doorbell; those that are delayed too go when that is over.
func (ch *channel) releaseHeld(name string) {
	ch.endGroup(name)
	var group []*command
	ch.held = slices.DeleteFunc(ch.held, func(i uint16) bool {
		c := &ch.cmds[i]
		v := c.verdict
		if v == nil || v.drop || v.name != name {
			return false
		}
		if v.name = ""; v.delay > 0 {
			return false
		}
		group = append(group, c)
		return true
	})
	if len(group) > 0 && group[0].verdict.shuffle {
		f, rng := ch.t.faults, group[0].verdict.rng
		f.mu.Lock() // the generator is the rule's
		rng.Shuffle(len(group), func(i, j int) { group[i], group[j] = group[j], group[i] })
		f.mu.Unlock()
	}
	for _, c := range group {
		c.verdict.released = true
	}
	for _, c := range group {
		ch.resume(c)
	}
}

// spoil flips bytes of data-in that is about to be sent, or of data-out that has come: those of the command's bytes that lie in b, the
// next ones to move. They are spread over all that the command moves, which is less than 4 GiB.
func (ch *channel) spoil(c *command, b []byte) {
	n, want, moved := uint64(min(c.verdict.corrupt, c.want)), uint64(c.want), uint64(c.moved)
	if n == 0 {
		return
	}
	for i := (moved*n + want - 1) / want; i < n; i++ {
		at := want*i/n - moved
		if at >= uint64(len(b)) {
			return
		}
		b[at] ^= 0xff
	}
}

// curtail leaves out the end of the data where a fault cuts it: the response will say that all have moved.
func (c *command) curtail() {
	if c.verdict != nil && c.verdict.cut > 0 {
		c.cut = min(c.verdict.cut, c.want)
		c.want -= c.cut
	}
}

// whole is the data-out of a command that needs it in one piece, at the beginning of b, with zeros for what a fault cuts.
func (c *command) whole(b []byte) []byte {
	b = b[:c.task.OutLen]
	clear(b[c.want:])
	return b
}

// distort encodes a response as the script wants it, with what it wants sent before, and returns its length.
func (ch *channel) distort(c *command, r *iu.Response) int {
	v := c.verdict
	for i := range v.sends {
		if ch.sqFree > 1 { // the response's own place
			ch.sendFault(v.sends[i])
		}
	}
	short, raw := 0, []byte(nil)
	for i := range v.edits {
		switch a := &v.edits[i]; a.verb {
		case "credits":
			if a.relative {
				r.ReqLimDelta += int32(a.n)
			} else {
				r.ReqLimDelta = int32(a.n)
			}
		case "tag":
			if a.which == "xor" {
				r.Tag ^= uint64(a.n)
			} else {
				r.Tag = uint64(a.n)
			}
		case "residual":
			f := iu.ResponseFlags(a.count)
			r.Flags = f
			r.InResidual, r.OutResidual = 0, 0
			if f&(iu.InOverflow|iu.InUnderflow) != 0 {
				r.InResidual = uint32(a.n)
			} else {
				r.OutResidual = uint32(a.n)
			}
		case "rsp-data":
			r.Data = a.data
		case "code":
			r.Data = []byte{0, 0, 0, byte(a.n)}
		}
	}
	n, err := r.Encode(c.tx)
	if err != nil {
		n = copy(c.tx, make([]byte, iu.ResponseSize))
	}
	for i := range v.edits {
		switch a := &v.edits[i]; a.verb {
		case "claim":
			if a.which == "sense" {
				be.PutUint32(c.tx[28:], uint32(a.n))
			} else {
				be.PutUint32(c.tx[32:], uint32(a.n))
			}
		case "flags":
			c.tx[18] = byte(a.n)
		case "short":
			short = int(a.n)
		case "raw":
			raw = a.data
		}
	}
	if raw != nil {
		n = copy(c.tx, raw)
	}
	if short > 0 {
		n = min(n, short)
	}
	return n
}
