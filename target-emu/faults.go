package targetemu

import (
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"srp-initiator/srp/iu"
	"srp-initiator/srp/scsi"
)

// Faults is a parsed fault script: what to do wrong, and when. The language is described in docs/target-emu.md.
//
// A script is replayable: with the same seed and the same order of events on the wire it does the same things.
type Faults struct {
	Seed  uint64
	rules []rule
}

// RuleStats say how often a rule of a fault script had its turn.
type RuleStats struct {
	Line    int    `json:"line"`
	Rule    string `json:"rule"`
	Matched uint64 `json:"matched"` // what its event and its selectors op, lun, channel, func and from fit; a time rule: how often its time came
	Acted   uint64 `json:"acted"`   // and nth, every, first, after and prob chose; a time rule: how often it found a channel, or made the target vanish
}

// Len is the number of rules.
func (f *Faults) Len() int { return len(f.rules) }

// Bounds of a script.
const (
	maxFaultScript = 1 << 20 // bytes
	maxFaultRules  = 1000
	maxFaultRaw    = txLen // bytes of one unit
	maxFaultDelay  = 24 * time.Hour
	maxFaultCount  = 1 << 20
)

type eventKind uint8

const (
	onLogin eventKind = iota
	onCommand
	onTaskMgmt
	onTime
)

var eventNames = map[string]eventKind{"login": onLogin, "cmd": onCommand, "tmf": onTaskMgmt, "time": onTime}

// rule is one line of a script.
type rule struct {
	line  int
	text  string // without comment and superfluous space
	event eventKind

	// What it matches; zero values match everything.
	op      map[scsi.Opcode]bool // by name or number
	lun     int64                // -1: any
	channel int64                // -1: any
	fn      iu.TaskFunction      // 0: any
	from    string               // login: address or port id

	// Which of the matches: all by default.
	nth, every, first, after uint64
	prob                     float64 // < 0: not given

	at, period time.Duration // time rules

	actions []action
}

// action is one thing to do.
type action struct {
	verb     string
	n        int64
	relative bool
	d, dMax  time.Duration
	data     []byte
	name     string
	count    int
	keep     bool
	sense    scsi.Sense
	which    string
}

// FaultError is a line of a script that makes no sense.
type FaultError struct {
	Line int
	Why  string
}

// The messages quote no more than 40 characters of a script's word (%.40q): whoever names another file by mistake gets one short line.
func (e *FaultError) Error() string { return fmt.Sprintf("fault script, line %d: %s", e.Line, e.Why) }

// ParseFaults reads a script.
func ParseFaults(text string) (*Faults, error) {
	f := &Faults{Seed: 1}
	if len(text) > maxFaultScript {
		return nil, &FaultError{1, fmt.Sprintf("the script is longer than %d bytes", maxFaultScript)}
	}
	for i, line := range strings.Split(text, "\n") {
		if j := strings.IndexByte(line, '#'); j >= 0 {
			line = line[:j]
		}
		words := strings.Fields(strings.ReplaceAll(line, ";", " ; "))
		if len(words) == 0 {
			continue
		}
		if words[0] == "seed" {
			if len(words) != 2 {
				return nil, &FaultError{i + 1, "want: seed NUMBER"}
			}
			n, err := strconv.ParseUint(words[1], 0, 64)
			if err != nil {
				return nil, &FaultError{i + 1, fmt.Sprintf("seed %.40q: want a number from 0 to 2^64-1, decimal or with 0x", words[1])}
			}
			f.Seed = n
			continue
		}
		r, err := parseRule(words)
		if err != nil {
			return nil, &FaultError{i + 1, err.Error()}
		}
		r.line, r.text = i+1, strings.Join(strings.Fields(line), " ")
		if len(f.rules) == maxFaultRules {
			return nil, &FaultError{i + 1, fmt.Sprintf("more than %d rules", maxFaultRules)}
		}
		f.rules = append(f.rules, r)
	}
	if err := f.checkReleases(); err != nil {
		return nil, err
	}
	return f, nil
}

// checkReleases finds a release of what no rule of the script holds.
func (f *Faults) checkReleases() error {
	held := map[string]bool{}
	for _, r := range f.rules {
		for _, a := range r.actions {
			if a.verb == "hold" {
				held[a.name] = true
			}
		}
	}
	for _, r := range f.rules {
		for _, a := range r.actions {
			if a.verb != "release" || held[a.name] {
				continue
			}
			why := fmt.Sprintf("release %.40s: no rule has hold %.40[1]s", a.name)
			if len(held) > 0 {
				why += "; held are " + strings.Join(slices.Sorted(maps.Keys(held)), ", ")
			}
			return &FaultError{r.line, why}
		}
	}
	return nil
}

// answerEdits change the answer to a command or a function, or are sent with it.
var answerEdits = []string{"credits", "tag", "duplicate", "residual", "claim", "short", "flags", "rsp-data", "raw", "code"}

// deferrals say when an answer is sent; a rule has one of them.
var deferrals = []string{"hold", "shuffle", "delay"}

// useless says what an action loses when another one of its rule is there: nothing of it would be seen.
var useless = []struct {
	because string
	nothing []string
	why     string
}{
	{"drop", slices.Concat(answerEdits, deferrals, []string{"send"}), "drop sends no answer"},
	{"disconnect", slices.Concat(answerEdits, deferrals), "disconnect sends no answer"},
	{"break", slices.Concat(answerEdits, deferrals), "break sends no answer"},
	{"raw", []string{"credits", "tag", "residual", "claim", "flags", "rsp-data", "code"}, "raw is all of the answer"},
	{"status", []string{"corrupt", "cut"}, "the command is not carried out and moves no data"},
	{"sense", []string{"corrupt", "cut"}, "the command is not carried out and moves no data"},
	{"sense-raw", []string{"corrupt", "cut"}, "the command is not carried out and moves no data"},
	{"reject", []string{"limit", "max-it", "max-ti", "rsp-flags", "formats", "accept-raw"}, "the login is refused"},
	{"reject-raw", []string{"limit", "max-it", "max-ti", "rsp-flags", "formats", "accept-raw"}, "the login is refused"},
	{"ignore", []string{"limit", "max-it", "max-ti", "rsp-flags", "formats", "accept-raw"}, "the login is not answered"},
}

// oneOf are actions of which a rule has one at most, and once.
var oneOf = [][]string{
	deferrals, {"status", "sense", "sense-raw"}, {"rsp-data", "code"}, {"disconnect", "break"}, {"reject", "reject-raw", "ignore"},
	{"drop"}, {"vanish"}, {"duplicate"}, {"residual"}, {"short"}, {"flags"}, {"raw"}, {"corrupt"}, {"cut"}, {"limit"}, {"max-it"}, {"max-ti"}, {"rsp-flags"}, {"formats"}, {"accept-raw"},
}

// checkActions finds actions of one rule of which one undoes the other.
func (r *rule) checkActions() error {
	has := map[string]bool{}
	for _, a := range r.actions {
		for _, group := range oneOf {
			if !slices.Contains(group, a.verb) {
				continue
			}
			for _, other := range group {
				if has[other] && (other != a.verb || other != "delay") { // delays add up
					if len(group) == 1 || other == a.verb {
						return fmt.Errorf("%s: twice in one rule; want it once", a.verb)
					}
					return fmt.Errorf("%s and %s in one rule: want one of %s", other, a.verb, strings.Join(group, ", "))
				}
			}
		}
		if end := firstOf(has, "disconnect", "break"); a.verb == "send" && end != "" {
			return fmt.Errorf("send behind %s is not sent; want it before", end)
		}
		has[a.verb] = true
	}
	for _, u := range useless {
		if lost := firstOf(has, u.nothing...); has[u.because] && lost != "" {
			return fmt.Errorf("%s and %s in one rule: %s; want one of them", u.because, lost, u.why)
		}
	}
	return nil
}

// firstOf is the first of names that is in has, or "".
func firstOf(has map[string]bool, names ...string) string {
	for _, n := range names {
		if has[n] {
			return n
		}
	}
	return ""
}

func parseRule(words []string) (r rule, err error) {
	r.lun, r.channel, r.prob = -1, -1, -1
	ev, ok := eventNames[strings.TrimSuffix(words[0], ":")]
	if !ok {
		return r, fmt.Errorf("unknown event %.40q; want login, cmd, tmf or time", words[0])
	}
	r.event = ev
	seen := map[string]bool{} // selectors
	i, colon := 0, strings.HasSuffix(words[0], ":")
	for !colon {
		if i++; i == len(words) {
			return r, errors.New("no action: want EVENT [SELECTOR...] : ACTION [; ACTION...]")
		}
		w := words[i]
		if w == ":" {
			break
		}
		w, colon = strings.CutSuffix(w, ":")
		key, _, _ := strings.Cut(w, "=")
		if seen[key] {
			return r, fmt.Errorf("%.40s=: twice in one rule; want it once", key)
		}
		seen[key] = true
		if err := r.selector(w); err != nil {
			return r, err
		}
	}
	if r.event == onTime && (r.at == 0) == (r.period == 0) {
		return r, errors.New("time wants at=DURATION or every=DURATION, one of them and longer than 0")
	}
	for rest := words[i+1:]; ; {
		n := len(rest)
		for j, w := range rest {
			if w == ";" {
				n = j
				break
			}
		}
		if n == 0 {
			return r, fmt.Errorf("an action is missing; %s takes %s", nameOf(r.event), strings.Join(verbsFor(r.event), ", "))
		}
		a, err := parseAction(r.event, rest[:n])
		if err != nil {
			return r, err
		}
		if (a.verb == "corrupt" || a.verb == "cut") && r.op != nil && !r.movesData() {
			return r, fmt.Errorf("%s: the commands of op= move no data; it is for read, write and others that do", a.verb)
		}
		r.actions = append(r.actions, a)
		if n == len(rest) {
			return r, r.checkActions()
		}
		rest = rest[n+1:]
	}
}

func (r *rule) selector(w string) error {
	key, val, ok := strings.Cut(w, "=")
	if !ok {
		return fmt.Errorf("selector %.40q: want KEY=VALUE, and a colon with an action behind the last one", w)
	}
	count := func(p *uint64) error {
		n, err := strconv.ParseUint(val, 10, 63)
		if err != nil || n == 0 {
			return fmt.Errorf("%s=%.40s: want a number from 1 up", key, val)
		}
		*p = n
		return nil
	}
	dur := func(p *time.Duration) (err error) { *p, err = parseDelay(val); return err }
	switch {
	case key == "at" && r.event == onTime:
		return dur(&r.at)
	case key == "every" && r.event == onTime:
		return dur(&r.period)
	case key == "channel" && r.event != onLogin:
		n, err := strconv.ParseUint(val, 10, 31)
		if err != nil {
			return fmt.Errorf("channel=%.40s: want a number, 0 for the first channel of each initiator", val)
		}
		r.channel = int64(n)
		return nil
	case r.event == onTime:
		return fmt.Errorf("unknown selector %.40q; time takes at, every and channel", key)
	case key == "nth":
		return count(&r.nth)
	case key == "every":
		return count(&r.every)
	case key == "first":
		return count(&r.first)
	case key == "after":
		return count(&r.after)
	case key == "prob":
		p, err := strconv.ParseFloat(val, 64)
		if err != nil || p < 0 || p > 1 || math.IsNaN(p) {
			return fmt.Errorf("prob=%.40s: want a number from 0 to 1", val)
		}
		r.prob = p
		return nil
	case key == "from" && r.event == onLogin:
		if _, err := ParseACL([]string{val}); err != nil {
			return fmt.Errorf("from=%.40s: want an initiator port id, a port GUID, an address or a prefix", val)
		}
		r.from = val
		return nil
	case key == "lun" && r.event != onLogin:
		n, err := strconv.ParseUint(val, 10, 32)
		if err != nil {
			return fmt.Errorf("lun=%.40s: want a number from 0 to %d", val, uint32(math.MaxUint32))
		}
		r.lun = int64(n)
		return nil
	case key == "op" && r.event == onCommand:
		return r.opSelector(val)
	case key == "func" && r.event == onTaskMgmt:
		fns := map[string]iu.TaskFunction{"abort": iu.AbortTask, "abort-set": iu.AbortTaskSet, "clear-set": iu.ClearTaskSet, "lun-reset": iu.LUNReset, "clear-aca": iu.ClearACA}
		fn, ok := fns[val]
		if !ok {
			return fmt.Errorf("func=%.40s: want abort, abort-set, clear-set, lun-reset or clear-aca", val)
		}
		r.fn = fn
		return nil
	}
	if what := map[string]string{"from": "login", "op": "cmd", "func": "tmf", "lun": "cmd and tmf", "channel": "cmd, tmf and time", "at": "time"}[key]; what != "" {
		return fmt.Errorf("selector %.40s=: not on %s; it is for %s", key, nameOf(r.event), what)
	}
	return fmt.Errorf("unknown selector %.40q; %s takes %s", key, nameOf(r.event), map[eventKind]string{
		onLogin: "from, nth, every, first, after and prob", onCommand: "op, lun, channel, nth, every, first, after and prob", onTaskMgmt: "func, lun, channel, nth, every, first, after and prob",
	}[r.event])
}

var faultOps = map[string][]scsi.Opcode{
	"inquiry": {scsi.OpInquiry}, "report-luns": {scsi.OpReportLUNs}, "test-unit-ready": {scsi.OpTestUnitReady}, "tur": {scsi.OpTestUnitReady},
	"read-capacity": {scsi.OpReadCapacity10, scsi.OpServiceActionIn16}, "mode-sense": {scsi.OpModeSense6, scsi.OpModeSense10},
	"mode-select": {scsi.OpModeSelect6, scsi.OpModeSelect10}, "request-sense": {scsi.OpRequestSense}, "unmap": {scsi.OpUnmap},
	"write-same": {scsi.OpWriteSame10, scsi.OpWriteSame16}, "compare-and-write": {scsi.OpCompareAndWrite},
	"sync": {scsi.OpSynchronizeCache10, scsi.OpSynchronizeCache16}, "verify": {scsi.OpVerify10, scsi.OpVerify12, scsi.OpVerify16},
	"pr-in": {scsi.OpPersistentReserveIn}, "pr-out": {scsi.OpPersistentReserveOut},
	"read": {scsi.OpRead6, scsi.OpRead10, scsi.OpRead12, scsi.OpRead16}, "write": {scsi.OpWrite6, scsi.OpWrite10, scsi.OpWrite12, scsi.OpWrite16},
	"read10": {scsi.OpRead10}, "read16": {scsi.OpRead16}, "write10": {scsi.OpWrite10}, "write16": {scsi.OpWrite16},
}

func (r *rule) opSelector(val string) error {
	if val == "any" {
		return nil
	}
	if r.op == nil {
		r.op = map[scsi.Opcode]bool{}
	}
	for _, v := range strings.Split(val, ",") {
		if ops, ok := faultOps[v]; ok {
			for _, o := range ops {
				r.op[o] = true
			}
			continue
		}
		n, err := strconv.ParseUint(v, 0, 8)
		if err != nil || !strings.HasPrefix(v, "0x") {
			return fmt.Errorf("op=%.40s: want any, an operation code such as 0x28, or one of %s", v, strings.Join(slices.Sorted(maps.Keys(faultOps)), ", "))
		}
		r.op[scsi.Opcode(n)] = true
	}
	return nil
}

// movesData reports whether one of the rule's commands has data to spoil.
func (r *rule) movesData() bool {
	for op := range r.op {
		switch op {
		case scsi.OpTestUnitReady, scsi.OpStartStopUnit, scsi.OpPreventAllowRemoval, scsi.OpSynchronizeCache10, scsi.OpSynchronizeCache16:
		default:
			return true
		}
	}
	return false
}

func parseDelay(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 || d > maxFaultDelay {
		return 0, fmt.Errorf("%.40q: want a duration such as 5ms, 2s or 1m, at most %s", s, maxFaultDelay)
	}
	return d, nil
}

// parseTime is parseDelay without 0: what is to last that long would not be, or for ever.
func parseTime(s string) (time.Duration, error) {
	d, err := parseDelay(s)
	if err == nil && d == 0 {
		err = fmt.Errorf("%.40q: want a duration above 0, such as 5ms, 2s or 1m, at most %s", s, maxFaultDelay)
	}
	return d, err
}

func parseHex(s string) ([]byte, error) {
	b, err := hex.DecodeString(strings.TrimPrefix(s, "0x"))
	if err != nil || len(b) > maxFaultRaw {
		return nil, fmt.Errorf("%.40q: want at most %d bytes as hexadecimal digits", s, maxFaultRaw)
	}
	return b, nil
}

var statusNames = map[string]scsi.Status{
	"good": scsi.StatusGood, "busy": scsi.StatusBusy, "task-set-full": scsi.StatusTaskSetFull, "reservation-conflict": scsi.StatusReservationConflict,
	"task-aborted": scsi.StatusTaskAborted, "condition-met": scsi.StatusConditionMet, "aca-active": scsi.StatusACAActive, "check-condition": scsi.StatusCheckCondition,
}

var keyNames = map[string]scsi.SenseKey{
	"no-sense": scsi.NoSense, "recovered": scsi.RecoveredError, "not-ready": scsi.NotReady, "medium-error": scsi.MediumError, "hardware-error": scsi.HardwareError,
	"illegal-request": scsi.IllegalRequest, "unit-attention": scsi.UnitAttention, "data-protect": scsi.DataProtect, "aborted-command": scsi.AbortedCommand,
	"miscompare": scsi.Miscompare,
}

func parseASC(s string) (scsi.ASC, error) {
	a, q, ok := strings.Cut(s, "/")
	x, err1 := strconv.ParseUint(a, 16, 8)
	y, err2 := strconv.ParseUint(q, 16, 8)
	if !ok || err1 != nil || err2 != nil {
		return 0, fmt.Errorf("%.40q: want an additional sense code and qualifier such as 2a/09", s)
	}
	return scsi.ASC(x<<8 | y), nil
}

// verbsOf says which actions an event can have: c cmd, t tmf, l login, * time.
var verbsOf = map[string]string{
	"hold": "ct", "release": "ct*", "delay": "ctl", "shuffle": "ct", "drop": "ct", "status": "c", "sense": "c", "sense-raw": "c", "ua": "c*",
	"credits": "ct", "tag": "ct", "duplicate": "ct", "residual": "c", "claim": "ct", "short": "ct", "flags": "ct", "rsp-data": "ct", "raw": "ct", "send": "ct*",
	"corrupt": "c", "cut": "c", "code": "t", "disconnect": "ct*", "break": "ct*", "vanish": "ct*l",
	"reject": "l", "reject-raw": "l", "ignore": "l", "limit": "l", "max-it": "l", "max-ti": "l", "rsp-flags": "l", "formats": "l", "accept-raw": "l",
}

var eventLetter = [...]string{onLogin: "l", onCommand: "c", onTaskMgmt: "t", onTime: "*"}

func nameOf(ev eventKind) string {
	for name, e := range eventNames {
		if e == ev {
			return name
		}
	}
	return "?"
}

// verbsFor lists the actions of an event.
func verbsFor(ev eventKind) (verbs []string) {
	for v, on := range verbsOf {
		if strings.Contains(on, eventLetter[ev]) {
			verbs = append(verbs, v)
		}
	}
	slices.Sort(verbs)
	return verbs
}

func parseAction(ev eventKind, w []string) (a action, err error) {
	a.verb = w[0]
	args := w[1:]
	allowed, ok := verbsOf[a.verb]
	if !ok {
		return a, fmt.Errorf("unknown action %.40q; %s takes %s", a.verb, nameOf(ev), strings.Join(verbsFor(ev), ", "))
	}
	if !strings.Contains(allowed, eventLetter[ev]) {
		var on []string
		for e := range eventLetter {
			if strings.Contains(allowed, eventLetter[e]) {
				on = append(on, nameOf(eventKind(e)))
			}
		}
		return a, fmt.Errorf("%s: not on %s; it is for %s", a.verb, nameOf(ev), strings.Join(on, ", "))
	}
	// arg takes the next word.
	arg := func(what string) string {
		if len(args) == 0 {
			if err == nil {
				err = fmt.Errorf("%s: want %s", a.verb, what)
			}
			return ""
		}
		v := args[0]
		args = args[1:]
		return v
	}
	num := func(s string, lo, hi int64) int64 {
		n, e := strconv.ParseInt(s, 0, 64)
		if (e != nil || n < lo || n > hi) && err == nil {
			err = fmt.Errorf("%s %.40s: want a number from %d to %d", a.verb, s, lo, hi)
		}
		return n
	}
	keep := func(e error) {
		if err == nil {
			err = e
		}
	}
	switch a.verb {
	case "drop", "disconnect", "break", "ignore":
	case "hold":
		a.name = "held"
		seen := map[string]bool{}
		for len(args) > 0 {
			v := arg("")
			key, val, _ := strings.Cut(v, "=")
			what := key
			if key != "count" && key != "for" && key != "keep" {
				what = "NAME"
			}
			if seen[what] {
				keep(fmt.Errorf("hold: %s twice; want it once", what))
			}
			seen[what] = true
			switch key {
			case "count":
				a.count = int(num(val, 1, maxFaultCount))
			case "for":
				d, e := parseTime(val)
				keep(e)
				a.d = d
			case "keep":
				if ev != onCommand {
					keep(errors.New("hold keep: on cmd only; nothing aborts a task management function"))
				}
				a.keep = true
			default:
				a.name = v
			}
		}
	case "release":
		a.name = "held"
		if len(args) > 0 {
			a.name = arg("")
		}
	case "delay":
		lo, hi, span := strings.Cut(arg("a duration, or two as 1ms..5ms"), "..")
		if !span {
			hi = lo
		}
		var e error
		a.d, e = parseDelay(lo)
		keep(e)
		a.dMax, e = parseDelay(hi)
		keep(e)
		if a.dMax < a.d {
			keep(fmt.Errorf("delay %.40s..%.40s: the second is shorter than the first", lo, hi))
		}
	case "shuffle":
		a.count = int(num(arg("how many answers to mix"), 2, maxFaultCount))
		a.d = 100 * time.Millisecond
		if len(args) > 0 {
			if v, ok := strings.CutPrefix(arg(""), "for="); ok {
				d, e := parseTime(v)
				keep(e)
				a.d = d
			} else {
				keep(errors.New("shuffle: the only option is for=DURATION"))
			}
		}
	case "vanish":
		d, e := parseTime(arg("a duration"))
		keep(e)
		a.d = d
	case "status":
		s := arg("a status")
		if st, ok := statusNames[s]; ok {
			a.n = int64(st)
		} else {
			n, e := strconv.ParseUint(s, 0, 8)
			if e != nil {
				keep(fmt.Errorf("status %.40s: want a number from 0 to 255, or one of %s", s, strings.Join(slices.Sorted(maps.Keys(statusNames)), ", ")))
			}
			a.n = int64(n)
		}
	case "sense":
		s := arg("a sense key")
		k, ok := keyNames[s]
		if !ok {
			n, e := strconv.ParseUint(s, 0, 4)
			if e != nil {
				keep(fmt.Errorf("sense %.40s: want a sense key from 0 to 15, or one of %s", s, strings.Join(slices.Sorted(maps.Keys(keyNames)), ", ")))
			}
			k = scsi.SenseKey(n)
		}
		asc, e := parseASC(arg("ASC/ASCQ"))
		keep(e)
		a.sense = scsi.Sense{Key: k, ASC: asc}
		for len(args) > 0 {
			v := arg("")
			if v == "desc" && a.sense.Descriptor || strings.HasPrefix(v, "info=") && a.sense.HasInformation {
				keep(fmt.Errorf("sense: %.40s twice; want it once", v))
			}
			if v == "desc" {
				a.sense.Descriptor = true
			} else if val, ok := strings.CutPrefix(v, "info="); ok {
				n, e := strconv.ParseUint(val, 0, 64)
				if e != nil {
					keep(fmt.Errorf("sense: info=%.40s: want a number from 0 to 2^64-1, decimal or with 0x", val))
				}
				a.sense.HasInformation, a.sense.Information = true, n
			} else {
				keep(fmt.Errorf("sense: unknown option %.40q; want desc or info=N", v))
			}
		}
	case "sense-raw", "raw", "rsp-data", "reject-raw", "accept-raw":
		b, e := parseHex(arg("hexadecimal digits"))
		keep(e)
		a.data = b
		switch {
		case a.verb == "reject-raw" && len(b) > 148, a.verb == "accept-raw" && len(b) > 196:
			keep(fmt.Errorf("%s: at most 148 bytes fit a REJ and 196 a REP", a.verb))
		case a.verb == "rsp-data" && len(b) > txLen-iu.ResponseSize-64:
			keep(fmt.Errorf("rsp-data: at most %d bytes", txLen-iu.ResponseSize-64))
		case a.verb == "raw" && len(b) == 0:
			keep(errors.New("raw: at least one byte"))
		}
	case "ua":
		asc, e := parseASC(arg("ASC/ASCQ"))
		keep(e)
		a.sense.ASC = asc
	case "credits":
		s := arg("a number, +N, -N or =N")
		switch {
		case strings.HasPrefix(s, "+"), strings.HasPrefix(s, "-"):
			a.relative = true
		default:
			s = strings.TrimPrefix(s, "=")
		}
		a.n = num(s, math.MinInt32, math.MaxInt32)
	case "tag":
		s := arg("random, previous, xor=HEX or 16 hexadecimal digits")
		switch v, xor := strings.CutPrefix(s, "xor="); {
		case s == "random", s == "previous":
			a.which = s
		default:
			n, e := strconv.ParseUint(strings.TrimPrefix(v, "0x"), 16, 64)
			if e != nil {
				keep(fmt.Errorf("tag %.40s: want random, previous, xor=HEX or 1 to 16 hexadecimal digits", s))
			}
			a.n = int64(n)
			a.which = "set"
			if xor {
				a.which = "xor"
			}
		}
	case "duplicate":
		a.n = 1
		if len(args) > 0 {
			a.n = num(arg(""), 1, 100)
		}
	case "residual":
		key, val, _ := strings.Cut(arg("in-under=N, in-over=N, out-under=N or out-over=N"), "=")
		flags := map[string]iu.ResponseFlags{"in-under": iu.InUnderflow, "in-over": iu.InOverflow, "out-under": iu.OutUnderflow, "out-over": iu.OutOverflow}
		f, ok := flags[key]
		if !ok {
			keep(fmt.Errorf("residual %.40s: want in-under, in-over, out-under or out-over", key))
		}
		a.count, a.n = int(f), num(val, 0, math.MaxUint32)
	case "claim":
		key, val, _ := strings.Cut(arg("sense=N or data=N"), "=")
		if key != "sense" && key != "data" {
			keep(fmt.Errorf("claim %.40s: want sense=N or data=N", key))
		}
		a.which, a.n = key, num(val, 0, math.MaxUint32)
	case "short":
		a.n = num(arg("a number of bytes"), 1, txLen)
	case "flags", "rsp-flags":
		a.n = num(arg("a number such as 0x20"), 0, 255)
	case "formats":
		a.n = num(arg("a number such as 0x0002"), 0, 65535)
	case "corrupt", "cut":
		a.n = num(arg("a number of bytes"), 1, math.MaxUint32)
	case "code":
		a.n = num(arg("a response code"), 0, 255)
	case "reject":
		n, e := strconv.ParseUint(arg("a reason such as 0x00010003"), 0, 32)
		if e != nil {
			keep(errors.New("reject: want a 32-bit reason such as 0x00010003, decimal or with 0x"))
		}
		a.n = int64(n)
	case "limit":
		a.n = num(arg("a number of credits"), math.MinInt32, math.MaxInt32)
	case "max-it", "max-ti":
		a.n = num(arg("a number of bytes"), 0, math.MaxUint32)
	case "send":
		if e := a.parseSend(arg("cred-req, aer-req, t-logout, opcode=HEX or raw=HEX"), &args); e != nil {
			keep(e)
		}
	}
	if err == nil && len(args) > 0 {
		err = fmt.Errorf("%s: unexpected %.40q; the next action comes behind a semicolon", a.verb, args[0])
	}
	return a, err
}

// parseSend encodes the unit to send.
func (a *action) parseSend(kind string, args *[]string) error {
	opt := map[string]string{}
	allow := func(keys string) error {
		for _, w := range *args {
			k, v, ok := strings.Cut(w, "=")
			if !ok || !strings.Contains(" "+keys+" ", " "+k+" ") {
				return fmt.Errorf("send %.40s: unknown option %.40q; want %s", kind, w, strings.ReplaceAll(keys, " ", "=, ")+"=")
			}
			if _, ok := opt[k]; ok {
				return fmt.Errorf("send %.40s: %s= twice; want it once", kind, k)
			}
			opt[k] = v
		}
		*args = nil
		return nil
	}
	num := func(k string, base, bits int, def uint64) (uint64, error) {
		v, ok := opt[k]
		if !ok {
			return def, nil
		}
		n, err := strconv.ParseUint(strings.TrimPrefix(v, "0x"), base, bits)
		if err != nil {
			want := fmt.Sprintf("a number from 0 to 2^%d-1", bits)
			if base == 16 {
				want = fmt.Sprintf("1 to %d hexadecimal digits", bits/4)
			}
			return 0, fmt.Errorf("send %.40s: %s=%.40s: want %s", kind, k, v, want)
		}
		return n, nil
	}
	delta := func() (int32, error) {
		v, ok := opt["delta"]
		if !ok {
			return 0, nil
		}
		n, err := strconv.ParseInt(v, 0, 32)
		if err != nil {
			return 0, fmt.Errorf("send %.40s: delta=%.40s: want a signed 32-bit number", kind, v)
		}
		return int32(n), nil
	}
	buf := make([]byte, txLen)
	switch {
	case kind == "cred-req":
		if err := allow("delta tag"); err != nil {
			return err
		}
		d, err := delta()
		tag, err2 := num("tag", 16, 64, 0xc0ed)
		if err = errors.Join(err, err2); err != nil {
			return err
		}
		u := iu.CredReq{Tag: tag, ReqLimDelta: d}
		n, _ := u.Encode(buf)
		a.data, a.n = buf[:n], int64(d)
	case kind == "aer-req":
		if err := allow("delta tag lun asc"); err != nil {
			return err
		}
		d, err := delta()
		tag, err2 := num("tag", 16, 64, 0xae40)
		lunNo, err3 := num("lun", 10, 32, 0)
		if err = errors.Join(err, err2, err3); err != nil {
			return err
		}
		asc := scsi.ASCReportedLUNsChanged
		if v, ok := opt["asc"]; ok {
			if asc, err = parseASC(v); err != nil {
				return err
			}
		}
		u := iu.AERReq{Tag: tag, ReqLimDelta: d, LUN: iu.LUN(scsi.NewLUN(uint32(lunNo))), Sense: scsi.Sense{Key: scsi.UnitAttention, ASC: asc}.AppendFixed(nil)}
		n, _ := u.Encode(buf)
		a.data, a.n = buf[:n], int64(d)
	case kind == "t-logout":
		if err := allow("reason tag"); err != nil {
			return err
		}
		reason, err := num("reason", 10, 32, 0)
		tag, err2 := num("tag", 16, 64, 0)
		if err = errors.Join(err, err2); err != nil {
			return err
		}
		u := iu.TLogout{Tag: tag, Reason: iu.LogoutReason(reason)}
		n, _ := u.Encode(buf)
		a.data = buf[:n]
	case strings.HasPrefix(kind, "opcode="):
		if err := allow("len tag"); err != nil {
			return err
		}
		op, err := strconv.ParseUint(strings.TrimPrefix(kind[7:], "0x"), 16, 8)
		length, err2 := num("len", 10, 16, iu.ShortSize)
		tag, err3 := num("tag", 16, 64, 0)
		if err = errors.Join(err, err2, err3); err != nil || length == 0 || length > maxFaultRaw {
			return fmt.Errorf("send %.40s: want opcode=HEX and len= from 1 to %d", kind, maxFaultRaw)
		}
		buf[0] = byte(op)
		be.PutUint64(buf[8:], tag)
		a.data = buf[:length]
	case strings.HasPrefix(kind, "raw="):
		b, err := parseHex(kind[4:])
		if err != nil || len(b) == 0 {
			return fmt.Errorf("send raw=: want 1 to %d bytes as hexadecimal digits", maxFaultRaw)
		}
		a.data = b
	default:
		return fmt.Errorf("send %.40s: want cred-req, aer-req, t-logout, opcode=HEX or raw=HEX", kind)
	}
	return nil
}
