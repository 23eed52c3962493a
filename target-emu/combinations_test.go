package targetemu

import (
	"bytes"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"
)

// example says how an action is tried: with arguments, behind rules that it needs.
type example struct{ args, before string }

var examples = map[string]example{
	"hold": {"late for=120ms", ""}, "release": {"late", "cmd op=inquiry : hold late"}, "delay": {"120ms", ""}, "shuffle": {"2 for=120ms", ""},
	"status": {"busy", ""}, "sense": {"medium-error 11/00", ""}, "sense-raw": {"70", ""}, "ua": {"2a/09", ""}, "credits": {"+3", ""}, "tag": {"xor=ff", ""},
	"duplicate": {"2", ""}, "residual": {"in-over=7", ""}, "claim": {"sense=9", ""}, "short": {"20", ""}, "flags": {"0x20", ""}, "rsp-data": {"00000007", ""},
	"raw": {"c1", ""}, "send": {"raw=ff", ""}, "corrupt": {"3", ""}, "cut": {"100", ""}, "code": {"5", ""}, "vanish": {"200ms", ""}, "reject": {"0x00010005", ""}, "reject-raw": {"c2ff", ""},
	"limit": {"2", ""}, "max-it": {"64", ""}, "max-ti": {"100", ""}, "rsp-flags": {"2", ""}, "formats": {"2", ""}, "accept-raw": {"c0ff", ""},
}

// played is what an initiator sees of a session.
type played struct {
	text    string        // what came, in which order, how the connection ended, and what the medium holds
	slowest time.Duration // what took longest from the request to the next unit that came
}

// transcript plays a session against a target. With silent some answers will never come, and are not waited for long; else they are, however slow
// the machine is. ticks says that the last rule of the script is a time rule, whose times must have come.
func transcript(t *testing.T, script string, silent, ticks bool) (s played) {
	var out strings.Builder
	r := newRig(t, Config{}, script, "0=ram:1m")
	p := newPeer(t, openFabric(t))
	enough := time.Minute
	if silent {
		enough = 300 * time.Millisecond
	}
	p.patience = enough
	start := time.Now()
	rej, err := p.dial(r, loginBytes(1, r.target.PortID(), false))
	s.slowest = time.Since(start)
	fmt.Fprintf(&out, "login: rej % x, error %v, rsp % x\n", rej[:min(len(rej), 40)], err != nil, p.rsp[:min(len(p.rsp), 40)])
	if err == nil && rej == nil {
		data := p.data(0, 1024)
		for i := range data {
			data[i] = byte(i/3) | 1
		}
		back := p.data(4096, 1024)
		// took takes the next unit; it reports whether one came.
		took := func(what string, d time.Duration) []byte {
			g, err := p.next(d)
			switch {
			case err == errTimeout:
				fmt.Fprintf(&out, "%s: nothing\n", what)
			case err != nil:
				fmt.Fprintf(&out, "%s: the connection is broken\n", what)
			default:
				fmt.Fprintf(&out, "%s: % x\n", what, g)
			}
			return g
		}
		timed := func(what string, b []byte) {
			if p.broken != nil {
				return
			}
			start := time.Now()
			p.sendOnly(b)
			if took(what, enough) != nil {
				s.slowest = max(s.slowest, time.Since(start))
			}
		}
		timed("write", p.direct(cmdBytes(1, 0, 0x10, rw10(0x2a, 0, 2)...), 0, 1024))
		if inquiry := p.direct(cmdBytes(2, 0, 0x01, 0x12, 0, 0, 0, 36, 0), 8192, 36); strings.HasPrefix(script, "cmd op=inquiry : hold") {
			p.send(inquiry) // what comes is for those that release it
		} else {
			timed("inquiry", inquiry)
		}
		timed("abort", tmfBytes(0x80000001, 0, 1, 99))
		if ticks {
			// The second of two from now on has seen all that was sent before.
			rule := len(r.target.Stats().Faults) - 1
			before := r.target.Stats().Faults[rule].Matched
			r.settles(func() bool { return r.target.Stats().Faults[rule].Matched >= before+2 })
		}
		timed("read", p.direct(cmdBytes(3, 0, 0x01, rw10(0x28, 0, 2)...), 4096, 1024))
		// Units come in the order in which they were sent: with the answer to this one nothing is missing.
		if p.broken == nil {
			p.sendOnly(cmdBytes(4, 0, 0))
			for g := took("rest", enough); g != nil && (len(g) < 16 || g[0] != 0xc1 || be.Uint64(g[8:]) != 4); {
				g = took("rest", enough)
			}
		}
		fmt.Fprintf(&out, "read: equal %v\n", bytes.Equal(back, data))
	}
	mem := r.units[0].Regions()[0].Bytes()[:1024]
	fmt.Fprintf(&out, "medium % x\n", mem)
	p.close()
	r.stop()
	s.text = out.String()
	return s
}

// Every action does something that an initiator sees, on every event that the parser lets it stand on; where it could do nothing the parser says
// where it belongs. What is seen is other units, or the same ones no sooner than the action lets them come: a slow machine may bring them late too.
func TestEveryActionOnEveryEvent(t *testing.T) {
	plain := map[string]played{} // transcripts without the action, by the rules before it
	selectors := map[string]string{"login": "", "cmd": " op=read,write", "tmf": "", "time": " every=30ms"}
	later := map[string]time.Duration{"hold": 120 * time.Millisecond, "shuffle": 120 * time.Millisecond, "delay": 120 * time.Millisecond, "vanish": 200 * time.Millisecond}
	for event := range eventNames {
		for verb := range verbsOf {
			ex := examples[verb]
			if ex.args == "" && !slices.Contains([]string{"drop", "disconnect", "break", "ignore"}, verb) {
				t.Fatalf("%s has no example", verb)
			}
			rule := fmt.Sprintf("%s%s : %s %s", event, selectors[event], verb, ex.args)
			allowed := slices.Contains(verbsFor(eventNames[event]), verb)
			_, err := ParseFaults(ex.before + "\n" + rule)
			if !allowed {
				if err == nil || !strings.Contains(err.Error(), verb+": not on "+event+"; it is for ") {
					t.Errorf("%s: %v", rule, err)
				}
				continue
			}
			if err != nil {
				t.Errorf("%s: %v", rule, err)
				continue
			}
			if _, ok := plain[ex.before]; !ok {
				plain[ex.before] = transcript(t, ex.before, false, false)
			}
			before := plain[ex.before]
			silent := slices.Contains([]string{"drop", "break", "disconnect", "ignore"}, verb) || event == "time" && verb == "vanish"
			t.Run(rule, func(t *testing.T) {
				t.Parallel()
				got := transcript(t, ex.before+"\n"+rule, silent, event == "time")
				if d, ok := later[verb]; got.text == before.text && (!ok || got.slowest < d) {
					t.Errorf("nothing differs, and nothing came later than after %s:\n%s", got.slowest, got.text)
				}
			})
		}
	}
	for _, s := range plain {
		if strings.Contains(s.text, "nothing") || strings.Contains(s.text, "broken") || !strings.Contains(s.text, "equal true") {
			t.Errorf("without a fault:\n%s", s.text)
		}
	}
	for _, bad := range []string{"cmd op=tur,sync : corrupt 3", "cmd op=0x1b : cut 1", "tmf : hold keep"} {
		if _, err := ParseFaults(bad); err == nil {
			t.Errorf("%s: accepted", bad)
		}
	}
}

// corrupt and cut do to data-out what they do to data-in, however the data come, in pieces or whole, and the response says that all is well.
func TestFaultsOfDataOut(t *testing.T) {
	for _, spec := range []string{"0=ram:4m", "0=file:" + t.TempDir() + "/disk,size=4m"} {
		for _, size := range []int{512, 8192, 1 << 20} {
			for _, immediate := range []bool{false, true} {
				if immediate && size > 8192 {
					continue
				}
				r := newRig(t, Config{}, "cmd op=write nth=1 : corrupt 7\ncmd op=write nth=2 : cut 100\ncmd op=write nth=3 : cut 4294967295\ncmd op=read nth=5 : corrupt 7", spec)
				p := r.login(openFabric(t), 1, false)
				src, back := p.data(0, size), p.data(2<<20, size)
				for i := range src {
					src[i] = 0x5a
				}
				tag := uint64(0)
				write := func(lba uint32) {
					tag++
					b := cmdBytes(tag, 0, 0x10, rw10(0x2a, lba, uint16(size/512))...)
					if immediate {
						b[5] = 0x30
						b = append(be.AppendUint32(b, uint32(size)), make([]byte, imm-52)...)
						b = append(b, src...)
					} else {
						b = p.direct(b, 0, size)
					}
					p.send(b)
					p.good(p.recv(), tag)
				}
				read := func(lba uint32) []byte {
					tag++
					clear(back)
					p.send(p.direct(cmdBytes(tag, 0, 0x01, rw10(0x28, lba, uint16(size/512))...), 2<<20, size))
					p.good(p.recv(), tag)
					return back
				}
				for i, want := range []struct{ good, flipped, zero int }{{size - 7, 7, 0}, {size - 100, 0, 100}, {0, 0, size}, {size, 0, 0}} {
					lba := uint32(i * 2048 % 6144)
					if i == 3 {
						lba = 0
					}
					write(lba)
					got := read(lba)
					if g, f, z := bytes.Count(got, []byte{0x5a}), bytes.Count(got, []byte{0xa5}), bytes.Count(got, []byte{0}); g != want.good || f != want.flipped || z != want.zero {
						t.Errorf("%s, %d bytes, immediate %v, write %d: %d as sent, %d flipped, %d zeros; want %+v", spec[:5], size, immediate, i+1, g, f, z, want)
					}
				}
				if f := bytes.Count(read(0), []byte{0xa5}); f != 7 { // however many pieces it has
					t.Errorf("%s, %d bytes: %d flipped in a read, want 7", spec[:5], size, f)
				}
				p.close()
				r.stop()
			}
		}
	}
}

// A command that needs its data-out whole has zeros for what is cut, and what is flipped is in it.
func TestFaultsOfWholeDataOut(t *testing.T) {
	for _, spec := range []string{"0=ram:1m", "0=file:" + t.TempDir() + "/disk,size=1m"} {
		for _, immediate := range []bool{false, true} {
			r := newRig(t, Config{}, "cmd op=write-same nth=1 : corrupt 7\ncmd op=write-same nth=2 : cut 100\ncmd op=verify : corrupt 1", spec)
			p := r.login(openFabric(t), 1, false)
			src, back := p.data(0, 512), p.data(4096, 512)
			for i := range src {
				src[i] = 0x5a
			}
			out := func(tag uint64, cdb ...byte) {
				b := cmdBytes(tag, 0, 0x10, cdb...)
				if immediate {
					b[5] = 0x30
					b = append(append(be.AppendUint32(b, 512), make([]byte, imm-52)...), src...)
				} else {
					b = p.direct(b, 0, 512)
				}
				p.send(b)
			}
			for i, want := range []int{512 - 7, 512 - 100, 512} {
				out(uint64(i), rw10(0x41, 8, 2)...)
				p.good(p.recv(), uint64(i))
				clear(back)
				p.send(p.direct(cmdBytes(50, 0, 0x01, rw10(0x28, 9, 1)...), 4096, 512))
				p.good(p.recv(), 50)
				if n := bytes.Count(back, []byte{0x5a}); n != want {
					t.Errorf("%s, immediate %v, WRITE SAME %d: %d bytes as sent, want %d", spec[:5], immediate, i+1, n, want)
				}
			}
			v := rw10(0x2f, 8, 1)
			v[1] = 2
			out(60, v...)
			if k, asc := senseOf(p.recv()); k != 0xe || asc != 0x1d00 {
				t.Errorf("%s, immediate %v: VERIFY of flipped data: sense %x/%04x, want a miscompare", spec[:5], immediate, k, asc)
			}
			p.close()
			r.stop()
		}
	}
}

// The statistics say of each rule how often it matched and how often it acted.
func TestRuleStatistics(t *testing.T) {
	r := newRig(t, Config{}, "# first\ncmd op=tur nth=2 :   status busy # why not\n\ntmf : drop\nlogin from=127.0.0.0/8 : max-ti 100\ntime every=20ms : send raw=ff\ntime at=10ms channel=9 : send raw=fe")
	if s := r.target.Stats().Faults; len(s) != 5 || s[0].Matched != 0 {
		t.Fatalf("%+v", s)
	}
	p := r.login(openFabric(t), 1, false)
	for i := range uint64(3) {
		p.send(cmdBytes(i, 0, 0))
		for p.recv()[0] != 0xc1 {
		}
	}
	r.settles(func() bool { s := r.target.Stats().Faults; return s[3].Acted >= 2 && s[4].Matched == 1 })
	got := r.target.Stats().Faults
	if ticks := got[3]; ticks.Matched < ticks.Acted {
		t.Errorf("%+v", ticks)
	}
	got[3].Matched, got[3].Acted = 0, 0
	want := []RuleStats{{2, "cmd op=tur nth=2 : status busy", 3, 1}, {4, "tmf : drop", 0, 0}, {5, "login from=127.0.0.0/8 : max-ti 100", 1, 1}, {6, "time every=20ms : send raw=ff", 0, 0}, {7, "time at=10ms channel=9 : send raw=fe", 1, 0}}
	if !slices.Equal(got, want) {
		t.Errorf("%+v\nwant %+v", got, want)
	}
}

// An initiator that asks for more channels than it may have is told so in the log, by one line, and each of its channels in the statistics says both numbers.
func TestMoreChannelsAskedThanGranted(t *testing.T) {
	for _, cfg := range []Config{{MaxChannels: 2}, {SingleChannel: true}} {
		var log bytes.Buffer
		cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
		r := newRig(t, cfg, "")
		f := openFabric(t)
		granted := 2
		if cfg.SingleChannel {
			granted = 1
		}
		r.login(f, 1, false)
		for range granted - 1 {
			r.login(f, 1, true)
		}
		if rej := newPeer(t, f).connect(r, loginBytes(1, r.target.PortID(), true)); rej == nil {
			t.Fatal("one more was granted")
		}
		r.settles(func() bool { return r.target.logins.Load() == uint64(granted) })
		s := r.target.Stats().Channels
		r.stop()
		if len(s) != granted {
			t.Errorf("%d channels, want %d", len(s), granted)
		}
		for _, c := range s {
			if c.Asked != int32(granted)+1 || c.Granted != int32(granted) {
				t.Errorf("channel %d: %d asked for, %d granted; want %d and %d", c.Channel, c.Asked, c.Granted, granted+1, granted)
			}
		}
		want := fmt.Sprintf("channel %d asked for by the initiator port, %d granted", granted+1, granted)
		if n := strings.Count(log.String(), want); n != 1 {
			t.Errorf("%d lines with %q in\n%s", n, want, log.String())
		}
	}
}
