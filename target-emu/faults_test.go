package targetemu

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"srp-initiator/rdma/verbs"
)

func TestParseFaults(t *testing.T) {
	good := `
# comment
seed 0x2a
cmd op=read lun=0 channel=1 every=10 : hold reads count=16 for=1s keep   # trailing comment
cmd op=0x28,write prob=0.5: delay 1ms..5ms; credits +3
cmd nth=3 : status busy
cmd first=5 : status 0x28
cmd : sense illegal-request 24/00 desc info=0x10 ; duplicate 2
cmd : sense-raw 70000200000000
cmd op=tur : ua 2a/09
cmd : tag random ; tag previous ; tag xor=ff ; tag 0102030405060708
cmd : residual in-under=512 ; claim sense=4096 ; short 20 ; flags 0x20 ; rsp-data 00000005
cmd : raw c100
cmd : send cred-req delta=-2 tag=7 ; send aer-req delta=3 asc=3f/0e lun=1 ; send t-logout reason=1 ; send opcode=7f len=16 ; send raw=81
cmd : corrupt 1 ; cut 512 ; drop
cmd : shuffle 8 for=50ms
tmf func=abort : code 5 ; delay 1s
tmf : drop
login from=10.0.0.0/8 first=1 : reject 0x00010006
login : reject-raw c2 ; delay 1s ; vanish 2s
login : limit 2 ; max-it 64 ; max-ti 100 ; rsp-flags 0x81 ; formats 2 ; accept-raw c0 ; delay 1s ; delay 1s
login nth=9 : ignore
time at=5s : send cred-req delta=1 ; disconnect
time every=1s channel=0 : release reads ; ua 29/00 ; break
time at=1h : vanish 20s
`
	f, err := ParseFaults(good)
	if err != nil {
		t.Fatal(err)
	}
	if f.Seed != 42 || f.Len() != 22 {
		t.Errorf("seed %d, %d rules", f.Seed, f.Len())
	}
	for _, bad := range []string{
		"seed", "seed x", "cmd", "cmd :", "cmd : ;", "cmd : drop ;", "foo : drop", "cmd op=nonsense : drop", "cmd lun=x : drop", "cmd bogus=1 : drop", "cmd nth=0 : drop",
		"cmd prob=2 : drop", "cmd prob=NaN : drop", "cmd : nonsense", "cmd : delay", "cmd : delay x", "cmd : delay 5ms..1ms", "cmd : delay -1s", "cmd : delay 1000h", "cmd : status", "cmd : status foo",
		"cmd : sense", "cmd : sense 5", "cmd : sense 5 2400", "cmd : sense 99 24/00", "cmd : raw zz", "cmd : raw " + strings.Repeat("00", maxFaultRaw+1), "cmd : credits 99999999999",
		"cmd : reject 1", "login : drop", "login op=read : ignore", "time : drop", "time at=1s : drop", "time at=1s every=1s : disconnect", "time : disconnect", "cmd : send", "cmd : send foo",
		"cmd : send cred-req delta", "cmd : send cred-req foo=1", "cmd : send opcode=zz", "cmd : send opcode=1 len=0", "cmd : send raw=", "cmd : drop extra", "cmd : duplicate 0", "cmd : short 0",
		"cmd : claim foo=1", "cmd : residual foo=1", "tmf func=foo : drop", "tmf : code 256", "cmd : code 5", "login : reject", "login from=nowhere : ignore", "cmd op=read", "cmd : tag", "cmd : tag xor=", "cmd at=1s : drop",
	} {
		_, err := ParseFaults("# first line\n" + bad)
		var fe *FaultError
		if !errors.As(err, &fe) || fe.Line != 2 || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// Actions of one rule of which one undoes the other are refused, and so is the release of what nothing holds; what has an effect together is not.
func TestActionsThatUndoEachOther(t *testing.T) {
	for rule, want := range map[string]string{
		"cmd : drop ; duplicate":                      "drop and duplicate in one rule: drop sends no answer; want one of them",
		"cmd : credits +1 ; drop":                     "drop and credits",
		"tmf : drop ; code 5":                         "drop and code",
		"cmd : drop ; send raw=ff":                    "drop and send",
		"cmd : hold ; drop":                           "drop and hold",
		"cmd : disconnect ; tag random":               "disconnect and tag",
		"cmd : short 20 ; break":                      "break and short",
		"cmd : disconnect ; send raw=ff":              "send behind disconnect is not sent; want it before",
		"time at=1s : break ; send raw=ff":            "send behind break",
		"time at=1s : disconnect ; break":             "disconnect and break in one rule: want one of disconnect, break",
		"cmd : hold a count=2 ; delay 1s":             "hold and delay in one rule: want one of hold, shuffle, delay",
		"tmf : shuffle 2 ; hold":                      "shuffle and hold",
		"cmd : hold a ; hold b":                       "hold: twice in one rule; want it once",
		"cmd : status busy ; sense 5 24/00":           "status and sense in one rule: want one of status, sense, sense-raw",
		"cmd : short 20 ; short 30":                   "short: twice in one rule; want it once",
		"cmd : raw c1 ; flags 2":                      "raw and flags in one rule: raw is all of the answer",
		"cmd : corrupt 1 ; status busy":               "status and corrupt",
		"tmf : code 5 ; rsp-data 00000005":            "code and rsp-data in one rule",
		"login : reject 1 ; limit 2":                  "reject and limit in one rule: the login is refused",
		"login : ignore ; accept-raw c0":              "ignore and accept-raw",
		"login : reject 1 ; ignore":                   "reject and ignore in one rule",
		"login : max-it 64 ; max-it 65":               "max-it: twice",
		"cmd : release late":                          "release late: no rule has hold late",
		"cmd op=tur : hold early\ntmf : release late": "release late: no rule has hold late; held are early",
		"cmd op=tur : hold early\ntmf : release":      "release held: no rule has hold held; held are early",
	} {
		_, err := ParseFaults(rule)
		var fe *FaultError
		if !errors.As(err, &fe) || fe.Line != 1+strings.Count(rule, "\n") || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want one line with %q", rule, err, want)
		}
	}
	for _, rule := range []string{
		"cmd : status busy ; drop", "cmd : corrupt 1 ; drop", "cmd : ua 29/00 ; drop", "cmd : send raw=ff ; disconnect", "cmd : send raw=ff ; send raw=fe ; break", "cmd : drop ; vanish 1s",
		"cmd : delay 1s ; delay 2s", "cmd : credits +1 ; credits +2", "cmd : raw c1 ; duplicate 2 ; delay 1s", "cmd : raw c1ff ; short 1", "cmd : sense 5 24/00 ; residual in-under=1 ; flags 2 ; claim sense=9 ; claim data=9",
		"cmd op=read : drop\ncmd : duplicate 2",
		"cmd op=tur : release\ncmd op=read : hold", "cmd : hold a ; release a", "login : delay 1s ; reject 1 ; vanish 1s", "login : accept-raw c0 ; limit 2",
	} {
		if _, err := ParseFaults(rule); err != nil {
			t.Errorf("%q: %v", rule, err)
		}
	}
}

func FuzzParseFaults(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.faults")
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(b))
	}
	f.Add("cmd op=read nth=2 : hold x count=3 ; send aer-req delta=1 asc=29/00 lun=3\nlogin : reject 0x10001")
	f.Add("time every=1s : send opcode=82 len=40 tag=1")
	f.Fuzz(func(t *testing.T, s string) {
		p, err := ParseFaults(s)
		if err != nil {
			var fe *FaultError
			if !errors.As(err, &fe) || fe.Line < 1 {
				t.Errorf("%v", err)
			}
			return
		}
		if again, err := ParseFaults(s); err != nil || again.Len() != p.Len() {
			t.Errorf("second reading: %v", err)
		}
	})
}

// read sends a READ(10) of one block with tag.
func (p *peer) read(tag uint64, lba uint32) {
	p.t.Helper()
	p.send(p.direct(cmdBytes(tag, 0, 1, rw10(0x28, lba, 1)...), int(tag%64)*512, 512))
}

// TestFaultResponses plays one rule at a time against READ(10) with tag 5 and compares what comes back.
func TestFaultResponses(t *testing.T) {
	hexTag := "0000000000000005"
	ok := "c1000000 00000001 " + hexTag + " 0000 00 00 00000000 00000000 00000000 00000000"
	for _, tc := range []struct {
		rule string
		want []string
	}{
		{"credits 0", []string{"c1000000 00000000 " + hexTag + " 0000 00 00 00000000 00000000 00000000 00000000"}},
		{"credits +3", []string{"c1000000 00000004 " + hexTag + " 0000 00 00 00000000 00000000 00000000 00000000"}},
		{"credits -2", []string{"c1000000 ffffffff " + hexTag + " 0000 00 00 00000000 00000000 00000000 00000000"}},
		{"credits =0x7fffffff", []string{"c1000000 7fffffff " + hexTag + " 0000 00 00 00000000 00000000 00000000 00000000"}},
		{"tag 1122334455667788", []string{"c1000000 00000001 1122334455667788 0000 00 00 00000000 00000000 00000000 00000000"}},
		{"tag xor=ff", []string{"c1000000 00000001 00000000000000fa 0000 00 00 00000000 00000000 00000000 00000000"}},
		{"duplicate 2", []string{ok, ok, ok}},
		{"residual in-under=512", []string{"c1000000 00000001 " + hexTag + " 0000 20 00 00000000 00000200 00000000 00000000"}},
		{"residual out-over=7", []string{"c1000000 00000001 " + hexTag + " 0000 04 00 00000007 00000000 00000000 00000000"}},
		{"claim sense=4096 ; flags 0x02", []string{"c1000000 00000001 " + hexTag + " 0000 02 00 00000000 00000000 00001000 00000000"}},
		{"claim data=0xffffffff ; flags 1", []string{"c1000000 00000001 " + hexTag + " 0000 01 00 00000000 00000000 00000000 ffffffff"}},
		{"short 20", []string{"c1000000 00000001 " + hexTag + " 0000 00 00"}},
		{"raw c1", []string{"c1"}},
		{"rsp-data 00000007", []string{"c1000000 00000001 " + hexTag + " 0000 01 00 00000000 00000000 00000000 00000004 00000007"}},
		{"status busy", []string{"c1000000 00000001 " + hexTag + " 0000 20 08 00000000 00000200 00000000 00000000"}},
		{"status task-set-full", []string{"c1000000 00000001 " + hexTag + " 0000 20 28 00000000 00000200 00000000 00000000"}},
		{"sense medium-error 11/00", []string{"c1000000 00000001 " + hexTag + " 0000 22 02 00000000 00000200 00000012 00000000 700003000000000a 00000000 1100 00 00 0000"}},
		{"sense-raw 7f01", []string{"c1000000 00000001 " + hexTag + " 0000 22 02 00000000 00000200 00000002 00000000 7f01"}},
		{"ua 2a/09", []string{"c1000000 00000001 " + hexTag + " 0000 22 02 00000000 00000200 00000012 00000000 700006000000000a 00000000 2a09 00 00 0000"}},
		{"send cred-req delta=-2 tag=9", []string{"81000000 fffffffe 0000000000000009", ok}},
		{"send aer-req delta=3 lun=1 asc=29/00", []string{"82000000 00000003 000000000000ae40 00000000 0001000000000000 00000012 00000000 700006000000000a 00000000 2900 00 00 0000", ok}},
		{"send t-logout reason=1", []string{"80000000 00000001 0000000000000000", ok}},
		{"send opcode=7f len=20", []string{"7f000000 00000000 0000000000000000 00000000", ok}},
		{"send raw=8100", []string{"8100", ok}},
		{"delay 20ms", []string{ok}},
		{"hold for=20ms", []string{ok}},
	} {
		r := newRig(t, Config{}, "cmd op=read first=1 : "+tc.rule)
		p := r.login(openFabric(t), 1, false)
		p.read(5, 0)
		for _, w := range tc.want {
			if g, want := p.recv(), unhex(t, w); !bytes.Equal(g, want) {
				t.Errorf("%s:\n got % x\nwant % x", tc.rule, g, want)
			}
		}
		p.read(6, 0) // and the rule is over
		p.good(p.recv(), 6)
		p.close()
		r.stop()
	}
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := parseHex(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestFaultCorruptAndCut(t *testing.T) {
	r := newRig(t, Config{}, "cmd op=read nth=1 : corrupt 3\ncmd op=read nth=2 : cut 100")
	p := r.login(openFabric(t), 1, false)
	data := p.data(0, 16384)
	count := func(v byte) (n int) {
		for _, b := range p.data(0, 16384) {
			if b == v {
				n++
			}
		}
		return n
	}
	for i := range data {
		data[i] = 0x5a
	}
	p.send(p.direct(cmdBytes(1, 0, 0x10, rw10(0x2a, 0, 32)...), 0, 16384))
	p.good(p.recv(), 1)
	for i, want := range []int{16384 - 3, 16384 - 100, 16384} {
		clear(data)
		p.send(p.direct(cmdBytes(uint64(2+i), 0, 0x01, rw10(0x28, 0, 32)...), 0, 16384))
		p.good(p.recv(), uint64(2+i)) // says that all is well
		if n := count(0x5a); n != want {
			t.Errorf("read %d: %d good bytes, want %d", i, n, want)
		}
	}
}

// TestFaultOrder: shuffled answers come in the order of the seed, and the same seed gives the same order.
func TestFaultOrder(t *testing.T) {
	order := func(seed string) (tags []uint64) {
		r := newRig(t, Config{}, "seed "+seed+"\ncmd op=read : shuffle 8 for=10m")
		p := r.login(openFabric(t), 1, false)
		for i := range uint64(8) {
			p.read(i, 0)
		}
		for range 8 {
			tags = append(tags, be.Uint64(p.recv()[8:]))
		}
		p.close()
		r.stop()
		return tags
	}
	a, b, c := order("7"), order("7"), order("8")
	same := func(x, y []uint64) bool {
		for i := range x {
			if x[i] != y[i] {
				return false
			}
		}
		return true
	}
	if !same(a, b) || same(a, c) || same(a, []uint64{0, 1, 2, 3, 4, 5, 6, 7}) {
		t.Errorf("seed 7: %v and %v, seed 8: %v", a, b, c)
	}
}

// TestFaultLateAnswer: an aborted command's answer that comes all the same ("keep").
func TestFaultLateAnswer(t *testing.T) {
	r := newRig(t, Config{}, "cmd op=read first=1 : hold late keep\ncmd op=tur : release late")
	p := r.login(openFabric(t), 1, false)
	p.read(1, 0)
	p.send(tmfBytes(0x80000001, 0, 1, 1))
	p.tmfDone(p.recv(), 0x80000001, 0, 1)
	p.send(cmdBytes(2, 0, 0))
	tags := map[uint64]bool{}
	for range 2 {
		tags[be.Uint64(p.recv()[8:])] = true
	}
	if !tags[1] || !tags[2] {
		t.Errorf("tags %v", tags)
	}
}

func TestFaultTaskManagement(t *testing.T) {
	r := newRig(t, Config{}, "tmf func=abort nth=1 : code 5\ntmf func=abort nth=2 : short 36\ntmf func=lun-reset : drop\ncmd op=tur : drop")
	p := r.login(openFabric(t), 1, false)
	p.send(cmdBytes(1, 0, 0))
	p.send(tmfBytes(0x80000001, 0, 1, 1))
	p.tmfDone(p.recv(), 0x80000001, 5, 2)
	p.send(tmfBytes(0x80000002, 0, 1, 1))
	if g := p.recv(); len(g) != 36 {
		t.Errorf("% x", g)
	}
	p.send(tmfBytes(0x80000003, 0, 8, 0))
	if g, err := p.next(100 * time.Millisecond); err != errTimeout {
		t.Errorf("% x, %v", g, err)
	}
}

func TestFaultLogins(t *testing.T) {
	f := openFabric(t)
	for _, tc := range []struct{ rule, rej, rsp string }{
		{"reject 0x00010005", "c2000000 00010005 0102030405060708 0000000000000000 0006", ""},
		{"reject-raw c2ff", "c2ff", ""},
		{"limit 2 ; max-it 64 ; max-ti 100 ; formats 2 ; rsp-flags 0x02", "", "c0000000 00000002 0102030405060708 00000040 00000064 0002 02"},
		{"accept-raw c0ffee", "", "c0ffee00"},
		{"delay 50ms", "", "c0000000 00000080"},
	} {
		r := newRig(t, Config{}, "login first=1 : "+tc.rule)
		p := newPeer(t, f)
		rej := p.connect(r, loginBytes(1, r.target.PortID(), false))
		if tc.rej != "" {
			if want := unhex(t, tc.rej); !bytes.HasPrefix(rej, want) {
				t.Errorf("%s: % x", tc.rule, rej)
			}
			if rej := newPeer(t, f).connect(r, loginBytes(1, r.target.PortID(), false)); rej != nil {
				t.Errorf("%s: the second login is refused too", tc.rule)
			}
		} else if want := unhex(t, tc.rsp); rej != nil || !bytes.HasPrefix(p.rsp, want) {
			t.Errorf("%s: % x, % x", tc.rule, rej, p.rsp)
		}
		p.close()
		r.stop()
	}
}

func TestFaultEnds(t *testing.T) {
	f := openFabric(t)
	r := newRig(t, Config{}, "cmd op=tur nth=1 : send t-logout reason=1 ; disconnect\ncmd op=tur nth=2 : break")
	p := r.login(f, 1, false)
	p.sendOnly(cmdBytes(1, 0, 0))
	if g, err := p.next(5 * time.Second); err != nil || g[0] != 0x80 || g[7] != 1 {
		t.Errorf("% x, %v", g, err)
	}
	p.gone(5 * time.Second)
	// break: no DREQ comes, and nothing is answered any more.
	p = r.login(f, 1, false)
	p.sendOnly(cmdBytes(2, 0, 0))
	if g, err := p.next(300 * time.Millisecond); err == nil {
		t.Errorf("answered with % x", g)
	}
	select {
	case <-p.conn.Done():
		t.Error("a DREQ came")
	default:
	}
	p.close()
}

// A target that has vanished answers nothing, transport included, and then goes on as before: sessions whose retries have lasted live, and what
// was asked meanwhile is answered.
func TestFaultVanish(t *testing.T) {
	const away = 400 * time.Millisecond // within the peer's eight tries of 134 ms
	f := openFabric(t)
	for _, tc := range []struct {
		rule string
		do   func(r *rig, p *peer) // sets the rule off and returns when the answer is there
	}{
		{"cmd op=tur : vanish 400ms", func(r *rig, p *peer) {
			p.send(cmdBytes(2, 0, 0))
			p.good(p.recv(), 2)
		}},
		{"cmd op=tur : send raw=ff ; vanish 400ms", func(r *rig, p *peer) {
			p.sendOnly(cmdBytes(2, 0, 0))
			if g, err := p.next(away / 2); err != nil || g[0] != 0xff {
				t.Errorf("what is sent before it vanishes: % x, %v", g, err)
			}
			p.good(p.recv(), 2)
		}},
		{"tmf : vanish 400ms", func(r *rig, p *peer) {
			p.send(tmfBytes(0x80000001, 0, 1, 1))
			p.tmfDone(p.recv(), 0x80000001, 0, 1)
		}},
		{"login nth=2 : vanish 400ms", func(r *rig, p *peer) {
			q := r.login(f, 3, false)
			q.send(cmdBytes(2, 0, 0))
			q.good(q.recv(), 2)
		}},
		{"login nth=2 : reject 0x00010005 ; vanish 400ms", func(r *rig, p *peer) {
			if rej := newPeer(t, f).connect(r, loginBytes(3, r.target.PortID(), false)); len(rej) < 8 || be.Uint32(rej[4:]) != 0x10005 {
				t.Errorf("% x", rej)
			}
		}},
		{"time at=200ms : vanish 400ms", func(r *rig, p *peer) {
			for limit := time.Now().Add(5 * time.Second); r.target.vanishedFor() == 0 && time.Now().Before(limit); {
				time.Sleep(time.Millisecond)
			}
			p.send(cmdBytes(2, 0, 0))
			p.good(p.recv(), 2)
		}},
	} {
		r := newRig(t, Config{}, tc.rule)
		p := r.login(f, 1, false)
		tc.do(r, p)
		if back := r.target.gone.Load(); back == nil || time.Now().Before(*back) {
			t.Errorf("%s: answered before %v, when the target is back", tc.rule, back)
		}
		// The session that there was goes on.
		p.send(p.direct(cmdBytes(9, 0, 1, rw10(0x28, 0, 1)...), 0, 512))
		p.good(p.recv(), 9)
		if s := r.target.Stats(); s.Ended != 0 {
			t.Errorf("%s: %d channels ended", tc.rule, s.Ended)
		}
		p.close()
		r.stop()
	}
	// A login that comes meanwhile is answered when the peer's CM repeats it; a session whose retries do not last is over, without a DREQ.
	r := newRig(t, Config{}, "cmd op=tur nth=1 : vanish 2500ms")
	p := r.login(f, 1, false)
	start := time.Now()
	p.sendOnly(cmdBytes(1, 0, 0))
	for r.target.vanishedFor() == 0 {
		time.Sleep(time.Millisecond)
	}
	q := r.login(f, 3, false)
	if d := time.Since(start); d < 2500*time.Millisecond {
		t.Errorf("a login is answered %s after the target vanished", d)
	}
	q.send(cmdBytes(4, 0, 0))
	q.good(q.recv(), 4)
	if g, err := p.next(5 * time.Second); err == nil || err == errTimeout {
		t.Errorf("a session without retries left: % x, %v", g, err)
	}
}

// A login whose answer a script delays keeps its place no longer than its peer waits.
func TestDelayedLoginThatGivesUp(t *testing.T) {
	r := newRig(t, Config{}, "login nth=1 : delay 24h")
	p := newPeer(t, openFabric(t))
	ctx, giveUp := context.WithCancel(context.Background())
	p.ctx, p.patience = ctx, time.Minute
	gone := make(chan error, 1)
	go func() {
		_, err := p.dial(r, loginBytes(1, r.target.PortID(), false))
		gone <- err
	}()
	r.settles(func() bool { return r.target.Stats().Faults[0].Acted == 1 })
	giveUp()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Errorf("a login that gives up: %v", err)
	}
	r.settles(func() bool { return r.pending(netip.Addr{}) == 0 })
	q := r.login(openFabric(t), 1, false)
	q.send(cmdBytes(1, 0, 0))
	q.good(q.recv(), 1)
}

// A login that is ignored gets no answer, a REJ neither.
func TestFaultIgnore(t *testing.T) {
	if testing.Short() {
		t.Skip("12 s")
	}
	t.Parallel()
	f := openFabric(t)
	r := newRig(t, Config{}, "login first=1 : ignore")
	p := newPeer(t, f)
	p.patience = 12 * time.Second // longer than a login may take
	if rej, err := p.dial(r, loginBytes(1, r.target.PortID(), false)); err == nil || rej != nil {
		t.Errorf("% x, %v; want no answer", rej, err)
	}
	r.login(f, 2, false)
}

func TestFaultTimes(t *testing.T) {
	r := newRig(t, Config{}, "time every=50ms : send cred-req delta=1\ntime at=24h : send raw=ff ; disconnect\ncmd : hold\ntime every=200ms : release")
	p := r.login(openFabric(t), 1, false)
	p.send(cmdBytes(1, 0, 0))
	kinds := map[byte]int{}
	for kinds[0x81] < 2 || kinds[0xc1] == 0 {
		kinds[p.recv()[0]]++
	}
	r.target.faults.tick(&r.target.faults.rules[1]) // its time comes when the session is there, however long that took
	for {
		g, err := p.next(30 * time.Second)
		if err != nil {
			break
		}
		kinds[g[0]]++
	}
	if kinds[0x81] < 2 || kinds[0xff] != 1 || kinds[0xc1] != 1 {
		t.Errorf("units by opcode: %v", kinds)
	}
	p.gone(5 * time.Second)
}

// TestNoAllocation asserts that a READ and a WRITE of 4 KiB cost no allocation in this process, initiator's device included.
func TestNoAllocation(t *testing.T) {
	r := newRig(t, Config{}, "")
	p := r.login(openFabric(t), 1, false)
	read := p.direct(cmdBytes(1, 0, 1, rw10(0x28, 0, 8)...), 0, 4096)
	write := p.direct(cmdBytes(2, 0, 0x10, rw10(0x2a, 8, 8)...), 0, 4096)
	tx := p.mem.Slice(peerTx, 16384)
	copy(tx, read)
	copy(tx[1024:], write)
	var sends [1]verbs.SendWorkRequest
	sge := make([]verbs.SGE, 1)
	rx := []verbs.RecvWorkRequest{{SGList: make([]verbs.SGE, 1)}}
	wcs := make([]verbs.WorkCompletion, 16)
	one := func(off, n int) {
		sge[0] = verbs.SGE{Addr: p.mr.Addr() + peerTx + uint64(off), Length: uint32(n), LKey: p.mr.LKey()}
		sends[0] = verbs.SendWorkRequest{WRID: 1 << 32, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: sge}
		if _, err := p.qp.PostSend(sends[:]); err != nil {
			t.Fatal(err)
		}
		sent, got := false, false
		for limit := time.Now().Add(10 * time.Second); !sent || !got; {
			n := p.cq.Poll(wcs)
			for _, wc := range wcs[:n] {
				if wc.Status != verbs.WCSuccess {
					t.Fatal(wc.Status)
				}
				if wc.WRID >= 1<<32 {
					sent = true
					continue
				}
				got = true
				rx[0].WRID = wc.WRID
				rx[0].SGList[0] = verbs.SGE{Addr: p.mr.Addr() + wc.WRID*peerSlot, Length: peerSlot, LKey: p.mr.LKey()}
				if _, err := p.qp.PostRecv(rx); err != nil {
					t.Fatal(err)
				}
			}
			if n == 0 {
				if time.Now().After(limit) {
					t.Fatal("no answer")
				}
				time.Sleep(10 * time.Microsecond)
			}
		}
	}
	for range 100 { // whatever grows has grown
		one(0, len(read))
		one(1024, len(write))
	}
	// Not AllocsPerRun: it runs on one CPU, where each hand-over between the two ends takes milliseconds.
	const rounds = 1000
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range rounds {
		one(0, len(read))
		one(1024, len(write))
	}
	runtime.ReadMemStats(&after)
	if n := after.Mallocs - before.Mallocs; n > rounds/20 { // the runtime itself makes a few now and then
		t.Errorf("%d allocations for %d READs and WRITEs", n, rounds)
	}
}

// TestJunk sends random units; whatever the target does with them, it serves others afterwards.
func TestJunk(t *testing.T) {
	r := newRig(t, Config{}, "", "0=ram:1m")
	f := openFabric(t)
	rnd := rand.New(rand.NewPCG(9, 9))
	ops := []byte{0x00, 0x01, 0x02, 0x02, 0x02, 0x41, 0x42, 0xc1, 0xff}
	for range 60 {
		p := r.login(f, 7, false)
		for range 20 {
			b := make([]byte, 1+rnd.IntN(200))
			for i := range b {
				b[i] = byte(rnd.Uint32())
			}
			b[0] = ops[rnd.IntN(len(ops))]
			if len(b) > 48 && rnd.IntN(2) == 0 {
				b[5] = []byte{0, 1, 2, 0x10, 0x20, 0x30}[rnd.IntN(6)]
				b[6], b[7], b[31] = byte(rnd.IntN(4)), byte(rnd.IntN(4)), 0
				copy(b[20:28], make([]byte, 8))
				copy(b[32:], rw10([]byte{0x28, 0x2a, 0x12, 0x42, 0x41}[rnd.IntN(5)], uint32(rnd.IntN(100)), uint16(rnd.IntN(4))))
			}
			copy(p.mem.Slice(peerTx, 16384), b)
			w := []verbs.SendWorkRequest{{WRID: 1 << 32, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: []verbs.SGE{{Addr: p.mr.Addr() + peerTx, Length: uint32(len(b)), LKey: p.mr.LKey()}}}}
			if _, err := p.qp.PostSend(w); err != nil {
				break
			}
			if _, err := p.poll(); err != nil {
				break
			}
		}
		p.close()
	}
	p := r.login(f, 8, false)
	p.send(cmdBytes(1, 0, 0))
	p.good(p.recv(), 1)
}
