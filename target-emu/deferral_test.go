package targetemu

import (
	"errors"
	"strings"
	"testing"
	"time"
)

// A group of held answers goes at the earliest time that any of its answers has, whatever else holds one of them back, and takes no time over
// to the next group of its name. What must not go has a day of time; what must go is waited for.
func TestTimesOfHeldAnswers(t *testing.T) {
	const tur, abort = 't', 'a' // steps beside reads: TEST UNIT READY, ABORT TASK of the last read
	for _, tc := range []struct {
		script string
		steps  string // 1 to 9: a READ with that tag
		want   string // READs that are answered, in any order
		not    string // and those that are not
	}{
		// Delayed by one rule and held by another.
		{"cmd op=read nth=1 : delay 24h\ncmd op=read : hold for=10ms", "123", "23", "1"},
		{"cmd op=read : hold for=10ms\ncmd op=read nth=1 : delay 24h", "123", "23", "1"},
		{"cmd op=read nth=1 : delay 24h\ncmd op=read : shuffle 8 for=10ms", "123", "23", "1"},
		{"cmd op=read nth=2 : delay 24h\ncmd op=read : shuffle 8 for=10ms", "123", "13", "2"},
		{"cmd op=read : delay 1ms\ncmd op=read : hold for=24h\ncmd op=tur : release", "12t", "12", ""},
		{"cmd op=read : delay 10ms..50ms\ncmd op=read : hold for=1ms", "123", "123", ""},
		{"cmd op=read : delay 50ms\ncmd op=read : hold for=24h count=2", "123", "12", "3"},
		{"cmd op=read : delay 1ms\ncmd op=read : hold for=24h", "12", "", "12"},
		// Several times in one group.
		{"cmd op=read nth=1 : hold\ncmd op=read nth=2 : hold for=10ms", "12", "12", ""},
		{"cmd op=read nth=1 : hold for=24h\ncmd op=read nth=2 : hold for=10ms", "12", "12", ""},
		{"cmd op=read nth=1 : hold for=10ms\ncmd op=read nth=2 : hold for=24h", "12", "12", ""},
		{"cmd op=read nth=1 : hold A for=24h\ncmd op=read nth=2 : hold B for=10ms", "12", "2", "1"},
		// A time of a group that has gone before, or whose answers have.
		{"cmd op=read nth=1 : hold for=2s\ncmd op=read nth=2 : hold for=24h\ncmd op=tur : release", "1t2", "1", "2"},
		{"cmd op=read nth=1 : hold for=2s\ncmd op=read nth=2 : hold", "1a2", "", "12"},
		{"cmd op=read first=2 : hold for=2s count=2\ncmd op=read nth=3 : hold", "123", "12", "3"},
		{"cmd op=read nth=1 : hold for=24h\ncmd op=read after=1 : hold for=10ms\ncmd op=tur : release", "1t23", "123", ""},
	} {
		t.Run(strings.ReplaceAll(tc.script, "\n", ", "), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, Config{}, tc.script)
			p := r.login(openFabric(t), 1, false)
			last := uint64(0)
			for i, s := range []byte(tc.steps) {
				switch s {
				case tur:
					p.send(cmdBytes(uint64(100+i), 0, 0))
				case abort:
					p.send(tmfBytes(0x80000001, 0, 1, last))
				default:
					last = uint64(s - '0')
					p.read(last, 0)
				}
			}
			left := tc.want
			for patience := 10 * time.Second; ; {
				if left == "" {
					patience = 2500 * time.Millisecond // longer than the times of 2s, which do not count any more
				}
				g, err := p.next(patience)
				if err != nil {
					break
				}
				if tag := be.Uint64(g[8:]); tag < 10 {
					s := string(rune('0' + tag))
					if strings.Contains(tc.not, s) || !strings.Contains(left, s) {
						t.Errorf("READ %s is answered", s)
					}
					left = strings.ReplaceAll(left, s, "")
				}
			}
			if left != "" {
				t.Errorf("no answer to READs %s", left)
			}
		})
	}
}

// What a rule says twice, or with no time, is refused.
func TestRepeatsInARule(t *testing.T) {
	for bad, want := range map[string]string{
		"cmd op=read op=write : drop": "op=: twice", "cmd nth=1 nth=1 : drop": "nth=: twice", "time at=1s at=2s : disconnect": "at=: twice", "cmd lun=1 lun=1: drop": "lun=: twice",
		"cmd : hold for=1s for=2s": "for twice", "cmd : hold A A": "NAME twice", "cmd : hold A B": "NAME twice", "cmd : hold count=2 count=2": "count twice", "cmd : hold keep keep": "keep twice",
		"cmd : drop ; drop": "drop: twice", "cmd : vanish 1s ; vanish 1s": "vanish: twice", "cmd : vanish 0s": "above 0", "cmd : hold for=0s": "above 0", "cmd : shuffle 2 for=0s": "above 0",
		"cmd : sense 5 24/00 desc desc": "desc twice", "cmd : sense 5 24/00 info=1 info=1": "info=1 twice", "cmd : send cred-req delta=1 delta=1": "delta= twice",
	} {
		var fe *FaultError
		if _, err := ParseFaults(bad); !errors.As(err, &fe) || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want %q", bad, err, want)
		}
	}
	if _, err := ParseFaults("cmd op=read,write lun=0 nth=1 : hold A for=1s count=2 keep ; tag xor=1 ; tag xor=2 ; send raw=81 ; send raw=81"); err != nil {
		t.Error(err)
	}
}

// However long a word is that makes no sense, the message stays short.
func TestShortFaultMessages(t *testing.T) {
	for _, unit := range []string{"x", "\xff", "\x00", "9", "=", ":", "\U0001f4a5"} {
		long := strings.Repeat(unit, 100000/len(unit))
		for _, before := range []string{
			"", "seed ", "cmd ", "cmd op=", "cmd lun=", "cmd nth=", "cmd prob=", "cmd channel=", "login from=", "tmf func=", "time at=", "time nth", "cmd : ", "cmd : hold count=", "cmd : hold for=", "cmd : hold A keep=1 ",
			"cmd : drop ", "cmd : release ", "cmd : delay ", "cmd : delay 1ms..", "cmd : shuffle ", "cmd : shuffle 2 ", "cmd : status ", "cmd : sense ", "cmd : sense 5 ", "cmd : sense 5 24/00 ", "cmd : sense 5 24/00 info=",
			"cmd : sense-raw ", "cmd : ua ", "cmd : credits ", "cmd : tag ", "cmd : tag xor=", "cmd : duplicate ", "cmd : residual ", "cmd : residual in-over=", "cmd : claim ", "cmd : claim sense=", "cmd : short ", "cmd : flags ",
			"cmd : send ", "cmd : send cred-req ", "cmd : send cred-req delta=", "cmd : send cred-req tag=", "cmd : send aer-req asc=", "cmd : send opcode=", "cmd : send raw=", "cmd : vanish ", "tmf : code ", "login : reject ", "login : limit ",
		} {
			for _, after := range []string{"", " : drop", ": drop"} {
				if _, err := ParseFaults(before + long + after); err != nil && len(err.Error()) > 800 { // the longest lists what is allowed
					t.Errorf("%.60q: a message of %d bytes: %.200s", before+long+after, len(err.Error()), err)
				}
			}
		}
	}
}
