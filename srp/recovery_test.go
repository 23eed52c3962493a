package srp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"srp-initiator/completion"
	"srp-initiator/rdma/cm"
	"srp-initiator/srp"
	"srp-initiator/srp/iu"
	"srp-initiator/srp/scsi"
	targetemu "srp-initiator/target-emu"
)

func quickTimeouts(o *srp.LoginOptions) {
	o.CommandTimeout, o.TaskMgmtTimeout = 300*time.Millisecond, 500*time.Millisecond
	o.ReconnectDelay = 100 * time.Millisecond
}

// soon fails the test when f takes longer than limit.
func soon(t *testing.T, limit time.Duration, what string, f func()) {
	t.Helper()
	began := time.Now()
	f()
	if d := time.Since(began); d > limit {
		t.Errorf("%s took %s, want at most %s", what, d.Round(time.Millisecond), limit)
	}
}

// A command that the target does not answer is aborted, and the session goes on with all its credits.
func TestAbort(t *testing.T) {
	eachMode(t, func(t *testing.T, m completion.Mode) {
		w := newWorld(t, withFaults("cmd op=read nth=2 : hold\ncmd op=read nth=5 : hold"))
		s := w.login(t, withMode(m), quickTimeouts)
		b := make([]byte, 512)
		failed := 0
		for range 6 {
			soon(t, 2*time.Second, "a read", func() {
				switch err := s.Do(context.Background(), read10(0, 1, b)); {
				case errors.Is(err, srp.ErrAborted):
					failed++
				case err != nil:
					t.Error(err)
				}
			})
		}
		st := s.Stats()
		if failed != 2 || st.Total.Aborts != 2 || st.Total.Resets != 0 || st.Reconnects != 0 {
			t.Errorf("%d aborted; %+v", failed, st.Total)
		}
		if c := st.Channels[0]; c.ReqLim != c.InitialCredits {
			t.Errorf("%d of %d credits left after aborts", c.ReqLim, c.InitialCredits)
		}
	})
}

// With a request limit of 2 every credit but the one for task management is used; aborts still go out, and commands that never
// were sent end without one.
func TestAbortWithLastCredit(t *testing.T) {
	w := newWorld(t, func(c *targetemu.Config) { c.RequestLimit = 2 }, withFaults("cmd op=read : hold keep"))
	s := w.login(t, quickTimeouts)
	var wg sync.WaitGroup
	var mu sync.Mutex
	count := map[error]int{}
	soon(t, 4*time.Second, "32 reads", func() {
		for range 32 {
			wg.Go(func() {
				err := s.Do(context.Background(), read10(0, 1, make([]byte, 512)))
				mu.Lock()
				defer mu.Unlock()
				for _, e := range []error{srp.ErrAborted, srp.ErrNotSent} {
					if errors.Is(err, e) {
						count[e]++
						return
					}
				}
				count[err]++
			})
		}
		wg.Wait()
	})
	if count[srp.ErrAborted] == 0 || count[srp.ErrAborted]+count[srp.ErrNotSent] != 32 {
		t.Errorf("%v", count)
	}
	if n := s.Stats().Total.TaskMgmt; n != uint64(count[srp.ErrAborted]) {
		t.Errorf("%d task management functions for %d aborted commands", n, count[srp.ErrAborted])
	}
}

// What the target answers to an abort decides what comes next.
func TestAbortAnswers(t *testing.T) {
	for name, tc := range map[string]struct {
		fault      string
		resets     uint64
		reconnects uint64
	}{
		"complete":                      {"", 0, 0},
		"not supported, reset complete": {"tmf func=abort : code 4", 1, 0},
		"failed, reset complete":        {"tmf func=abort : code 5", 1, 0},
		"no response data":              {"tmf func=abort : flags 0", 1, 0},
		"three bytes of response data":  {"tmf func=abort : rsp-data 000000", 1, 0},
		"four bytes claimed":            {"tmf func=abort : short 36", 1, 0},
		"no answer, reset complete":     {"tmf func=abort : drop", 1, 0},
		"wrong tag":                     {"tmf func=abort : tag xor=1", 1, 0},
		"nothing is answered":           {"tmf : drop", 1, 1},
		"all refused":                   {"tmf : code 4", 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, withFaults("cmd op=read nth=1 : hold keep\n"+tc.fault))
			s := w.login(t, quickTimeouts)
			soon(t, 4*time.Second, "the read", func() {
				err := s.Do(context.Background(), read10(0, 1, make([]byte, 512)))
				if tc.reconnects == 0 && !errors.Is(err, srp.ErrAborted) || tc.reconnects > 0 && !errors.Is(err, srp.ErrConnectionLost) {
					t.Error(err)
				}
			})
			if st := s.Stats(); st.Total.Aborts != 1 || st.Total.Resets != tc.resets || st.Reconnects > tc.reconnects {
				t.Errorf("%d aborts, %d resets, %d reconnects", st.Total.Aborts, st.Total.Resets, st.Reconnects)
			}
			do(t, s, read10(0, 1, make([]byte, 512))) // which a slow machine may try to abort
			if st := s.Stats(); st.Reconnects < tc.reconnects {
				t.Errorf("%d reconnects", st.Reconnects)
			}
		})
	}
}

// An abort names the right one of many commands; the others finish.
func TestAbortOneOfMany(t *testing.T) {
	w := newWorld(t, withFaults("cmd op=read first=16 : hold\ncmd op=tur nth=2 : release"))
	s := w.login(t)
	do(t, s, &srp.Command{CDB: scsi.TestUnitReady()})
	fillUnit(t, s, 16)
	ctx, cancel := context.WithCancelCause(context.Background())
	why := errors.New("number seven must go")
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			b := make([]byte, 512)
			c := context.Background()
			if i == 7 {
				c = ctx
			}
			err := s.Do(c, read10(uint32(i), 1, b))
			switch want := blockOf(i); {
			case i == 7:
				if !errors.Is(err, why) {
					t.Errorf("number 7: %v", err)
				}
			case err != nil:
				t.Errorf("number %d: %v", i, err)
			case !bytes.Equal(b, want):
				t.Errorf("number %d: data differ", i)
			}
		})
	}
	for s.Stats().Total.Commands < 1+16+16 {
		time.Sleep(time.Millisecond)
	}
	cancel(why)
	for s.Stats().Total.TaskMgmt == 0 {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(50 * time.Millisecond)
	do(t, s, &srp.Command{CDB: scsi.TestUnitReady()})
	wg.Wait()
}

func blockOf(i int) []byte {
	b := make([]byte, 512)
	fill(b, uint64(i)+1)
	return b
}

func fillUnit(t *testing.T, s *srp.Session, blocks int) {
	t.Helper()
	for i := range blocks {
		do(t, s, write10(uint32(i), 1, blockOf(i)))
	}
}

// A late answer to an aborted command is counted and dropped; the command that has its slot now is not touched by it.
func TestLateAnswer(t *testing.T) {
	w := newWorld(t, withFaults("cmd op=read nth=1 : hold keep\ncmd op=tur : release"))
	s := w.login(t, quickTimeouts, func(o *srp.LoginOptions) { o.QueueSize = 1 })
	if err := s.Do(context.Background(), read10(0, 1, make([]byte, 512))); !errors.Is(err, srp.ErrAborted) {
		t.Fatal(err)
	}
	for range 20 { // every slot has been used since
		do(t, s, read10(0, 1, make([]byte, 512)))
	}
	do(t, s, &srp.Command{CDB: scsi.TestUnitReady()})
	do(t, s, read10(0, 1, make([]byte, 512)))
	if st := s.Stats(); st.Total.UnknownTags != 1 || st.Reconnects != 0 {
		t.Errorf("%+v", st.Total)
	}
}

// Answers with tags that nobody waits for, twice, or with other tags.
func TestStrangeTags(t *testing.T) {
	w := newWorld(t, withFaults("cmd op=tur nth=2 : duplicate 3\ncmd op=tur nth=3 : tag random\ncmd op=tur nth=4 : tag previous"))
	s := w.login(t, quickTimeouts)
	for i := 1; i <= 8; i++ {
		err := s.Do(context.Background(), &srp.Command{CDB: scsi.TestUnitReady()})
		if lost := i == 3 || i == 4; lost != errors.Is(err, srp.ErrAborted) || !lost && err != nil && i > 1 {
			t.Errorf("command %d: %v", i, err)
		}
	}
	if st := s.Stats(); st.Total.UnknownTags < 5 || st.Reconnects != 0 {
		t.Errorf("%+v", st.Total)
	}
}

// Requests of the target are answered with their tag; their credits count; unknown units do no harm.
func TestTargetRequests(t *testing.T) {
	w := newWorld(t, func(c *targetemu.Config) { c.RequestLimit = 32 }, withFaults(`
		cmd op=tur nth=2 : send cred-req delta=5 tag=0123456789abcdef
		cmd op=tur nth=3 : send aer-req delta=3 tag=fedcba9876543210 lun=1 asc=3f/0e
		cmd op=tur nth=4 : send opcode=7f
		cmd op=tur nth=5 : send opcode=00 len=64
		cmd op=tur nth=6 : send opcode=ff len=1
		cmd op=tur nth=7 : send cred-req delta=-4`))
	var events []string
	o := srp.DefaultLoginOptions()
	var mu sync.Mutex
	s, err := srp.Login(context.Background(), srp.Config{Device: w.device, Connector: w.connector, Event: func(l scsi.LUN, sense []byte) {
		x, _ := scsi.ParseSense(sense)
		mu.Lock()
		events = append(events, fmt.Sprintf("%s %04x", l, uint16(x.ASC)))
		mu.Unlock()
	}}, w.port, o)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for i := range 1000 {
		if err := s.Do(context.Background(), &srp.Command{CDB: scsi.TestUnitReady()}); err != nil && i > 0 {
			t.Fatalf("command %d: %v", i, err)
		}
	}
	st := s.Stats()
	c := st.Channels[0]
	if c.ReqLim != 32+5+3-4 || c.Stats.CreditRequests != 2 || c.Stats.AsyncEvents != 1 || c.Stats.UnknownUnits != 3 || st.Reconnects != 0 {
		t.Errorf("limit %d, %+v", c.ReqLim, c.Stats)
	}
	mu.Lock()
	if strings.Join(events, ",") != "1 3f0e" {
		t.Errorf("events %q", events)
	}
	mu.Unlock()
	e := w.emu.Stats().Channels[0]
	if e.CreditAnswers != 2 || e.EventAnswers != 1 {
		t.Errorf("the target got %d CRED_RSP and %d AER_RSP", e.CreditAnswers, e.EventAnswers)
	}
}

// What no target may send ends the connection, or the command, with an error that says what it was; and the session recovers.
func TestProtocolErrors(t *testing.T) {
	for name, tc := range map[string]struct {
		fault string
		lost  bool   // the connection ends
		text  string // in the command's error or the session's notices
	}{
		"sense longer than the unit": {"claim sense=200 ; flags 0x02", false, "too short"},
		"sense length wraps":         {"claim sense=0xffffffff ; claim data=0xffffffff ; flags 0x03", false, "too short"},
		"residual beyond the buffer": {"residual in-under=513", false, "residual larger"},
		"short response":             {"short 20", true, "SRP_RSP of 20 bytes"},
		"credits overflow":           {"credits =0x7fffffff", true, "request limit"},
		"credits underflow":          {"credits =-0x7fffffff", true, "request limit"},
		"logout":                     {"send t-logout reason=1", true, "logged out"},
		"short credit request":       {"send raw=8100", true, "SRP_CRED_REQ of 2 bytes"},
		"short event":                {"send raw=82000000000000000000000000000000000000000000000000000000000000ff00000000", true, "SRP_AER_REQ of 36 bytes"},
		"response code":              {"rsp-data 00000002 ; flags 0x01", false, "fields invalid"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, withFaults("cmd op=read nth=2 : status check-condition ; "+tc.fault))
			var notices []string
			var mu sync.Mutex
			o := srp.DefaultLoginOptions()
			quickTimeouts(&o)
			s, err := srp.Login(context.Background(), srp.Config{Device: w.device, Connector: w.connector, Notice: func(s string) {
				mu.Lock()
				notices = append(notices, s)
				mu.Unlock()
			}}, w.port, o)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			do(t, s, read10(0, 1, make([]byte, 512)))
			err = s.Do(context.Background(), read10(0, 1, make([]byte, 512)))
			do(t, s, read10(0, 1, make([]byte, 512)))
			mu.Lock()
			all := fmt.Sprint(err, notices)
			mu.Unlock()
			if !strings.Contains(all, tc.text) {
				t.Errorf("%q is not in: %s", tc.text, all)
			}
			if got := s.Stats().Reconnects > 0; got != tc.lost {
				t.Errorf("connection lost: %v; %s", got, all)
			}
			var pe *srp.ProtocolError
			if !tc.lost && !errors.As(err, &pe) {
				t.Errorf("%v is no ProtocolError", err)
			}
		})
	}
}

// Residuals are data.
func TestResiduals(t *testing.T) {
	w := newWorld(t, withFaults("cmd op=read nth=2 : residual in-under=100\ncmd op=read nth=3 : residual in-over=7"))
	s := w.login(t)
	for i, want := range []int64{0, 100, -7} {
		c := read10(0, 1, make([]byte, 512))
		do(t, s, c)
		if c.Residual != want || want > 0 && c.Transferred() != 412 || want <= 0 && c.Transferred() != 512 {
			t.Errorf("read %d: residual %d, transferred %d", i, c.Residual, c.Transferred())
		}
	}
	// READ of a block without a buffer: the target speaks of the block that had no place.
	c := read10(0, 1, nil)
	c.Dir = srp.NoData
	do(t, s, c)
	if c.Residual != -512 || c.Transferred() != 0 {
		t.Errorf("no buffer: residual %d, transferred %d; want -512, 0", c.Residual, c.Transferred())
	}
}

// A residual that the target tells for the other direction is not lost; with both told, the command's own counts.
func TestResidualOfOtherDirection(t *testing.T) {
	w := newWorld(t, withFaults("cmd op=write nth=1 : residual in-under=100\ncmd op=write nth=2 : residual in-over=7\n"+
		"cmd op=read nth=1 : residual out-under=99\ncmd op=write nth=3 : residual out-under=5 ; flags 0x28"))
	s := w.login(t)
	for i, want := range []int64{100, -7, 5} {
		c := write10(0, 1, make([]byte, 512))
		do(t, s, c)
		if c.Residual != want {
			t.Errorf("write %d: residual %d, want %d", i, c.Residual, want)
		}
	}
	c := read10(0, 1, make([]byte, 512))
	do(t, s, c)
	if c.Residual != 99 {
		t.Errorf("read: residual %d, want 99", c.Residual)
	}
}

// The connection breaks under a verified load, again and again; nothing gets lost, done twice, or wrong.
func TestReconnectUnderLoad(t *testing.T) {
	every, rounds := 701, 700
	if testing.Short() {
		every, rounds = 251, 200
	}
	for _, how := range []string{"disconnect", "break", "send t-logout"} {
		t.Run(how, func(t *testing.T) {
			eachMode(t, func(t *testing.T, m completion.Mode) {
				if testing.Short() && how == "break" && m != completion.Interrupt && m != completion.Direct {
					t.Skip("each break costs a second of retries")
				}
				w := newWorld(t, withFaults(fmt.Sprintf("cmd op=any every=%d : %s", every, how)))
				s := w.login(t, withMode(m), quickTimeouts, func(o *srp.LoginOptions) {
					o.ChannelCount, o.ReconnectDelay, o.CommandTimeout = 2, 100*time.Millisecond, 5*time.Second
				})
				load(t, s, 2, 8, rounds)
				if st := s.Stats(); st.Reconnects < 2 || st.Held != 0 {
					t.Errorf("%d reconnects, %d held", st.Reconnects, st.Held)
				}
			})
		})
	}
}

// The timers of a lost connection: commands wait, then fail, then work again, or the session ends.
func TestOutageTimeline(t *testing.T) {
	w := newWorld(t, withFaults("cmd op=tur nth=2 : vanish 3s"))
	s := w.login(t, func(o *srp.LoginOptions) {
		o.ReconnectDelay, o.FastIOFail, o.DevLoss, o.ConnectTimeout = 200*time.Millisecond, time.Second, 20*time.Second, 500*time.Millisecond
		o.CommandTimeout, o.TaskMgmtTimeout = 300*time.Millisecond, 200*time.Millisecond
		o.TLRetryCount = 2
	})
	do(t, s, read10(0, 1, make([]byte, 512)))
	s.Do(context.Background(), &srp.Command{CDB: scsi.TestUnitReady()})
	s.Do(context.Background(), &srp.Command{CDB: scsi.TestUnitReady()}) // the target is gone from here on
	began := time.Now()
	c := read10(0, 1, make([]byte, 512))
	c.Retry = true
	err := s.Do(context.Background(), c)
	if held := time.Since(began); !errors.Is(err, srp.ErrFailFast) || held < 300*time.Millisecond || held > 3*time.Second {
		t.Fatalf("held for %s: %v", held, err)
	}
	soon(t, 100*time.Millisecond, "a read in state fail-fast", func() {
		if err := s.Do(context.Background(), read10(0, 1, make([]byte, 512))); !errors.Is(err, srp.ErrFailFast) {
			t.Error(err)
		}
	})
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if st, _ := s.State(); st == srp.Running {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("not reconnected")
		}
	}
	do(t, s, read10(0, 1, make([]byte, 512)))
}

func TestDeviceLoss(t *testing.T) {
	w := newWorld(t, withFaults("cmd op=tur nth=2 : vanish 1m"))
	s := w.login(t, func(o *srp.LoginOptions) {
		o.ReconnectDelay, o.FastIOFail, o.DevLoss, o.ConnectTimeout = 200*time.Millisecond, srp.Off, 1500*time.Millisecond, 5*time.Second
		o.CommandTimeout, o.TaskMgmtTimeout = 300*time.Millisecond, 200*time.Millisecond
	})
	for range 3 {
		s.Do(context.Background(), &srp.Command{CDB: scsi.TestUnitReady()})
	}
	soon(t, 5*time.Second, "the held read", func() {
		c := read10(0, 1, make([]byte, 512))
		c.Retry = true
		if err := s.Do(context.Background(), c); !errors.Is(err, srp.ErrDeviceLost) {
			t.Error(err)
		}
	})
	if st, err := s.State(); st != srp.Lost || err == nil {
		t.Errorf("%s, %v", st, err)
	}
	if err := s.Submit(read10(0, 1, make([]byte, 512))); !errors.Is(err, srp.ErrDeviceLost) {
		t.Error(err)
	}
}

// Close ends commands that the target holds, at once and each once.
func TestCloseUnderLoad(t *testing.T) {
	eachMode(t, func(t *testing.T, m completion.Mode) {
		w := newWorld(t, withFaults("cmd op=read after=5 : hold keep"))
		s, err := w.tryLogin(t, withMode(m), func(o *srp.LoginOptions) { o.ChannelCount = 2 })
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() {
				if err := s.Do(context.Background(), read10(0, 1, make([]byte, 512))); err != nil && !errors.Is(err, srp.ErrClosed) {
					var cc *scsi.CheckConditionError
					if !errors.As(err, &cc) {
						t.Error(err)
					}
				}
			})
		}
		time.Sleep(100 * time.Millisecond)
		soon(t, time.Second, "Close", func() {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			wg.Wait()
		})
		if err := s.Close(); err != nil {
			t.Errorf("second Close: %v", err)
		}
		if err := s.Submit(read10(0, 1, make([]byte, 512))); !errors.Is(err, srp.ErrClosed) {
			t.Errorf("submit after Close: %v", err)
		}
		if _, err := s.AllocMemory(4096); !errors.Is(err, srp.ErrClosed) {
			t.Errorf("memory after Close: %v", err)
		}
	})
}

// Every reason to refuse a login comes back in words with its code.
func TestLoginRefusals(t *testing.T) {
	for code := iu.RejectUnableToEstablish; code <= iu.RejectChannelLimit+1; code++ {
		w := newWorld(t, withFaults(fmt.Sprintf("login : reject %#08x", uint32(code))))
		_, err := w.tryLogin(t)
		var rej *srp.LoginRejectedError
		if !errors.As(err, &rej) || rej.Reason != code || !strings.Contains(err.Error(), fmt.Sprintf("0x%08x", uint32(code))) {
			t.Errorf("%#x: %v", uint32(code), err)
		}
	}
	for name, tc := range map[string]struct{ fault, text string }{
		"zeros in the REJ":   {"login : reject-raw 00", "consumer defined"},
		"no response":        {"login : accept-raw 00", "SRP_LOGIN_RSP"},
		"limit 1":            {"login : limit 1", "request limit 1"},
		"limit 0":            {"login : limit 0", "request limit 0"},
		"negative limit":     {"login : limit -5", "request limit -5"},
		"tiny units":         {"login : max-it 63", "63 bytes"},
		"tiny answers":       {"login : max-ti 35", "35 bytes"},
		"another unit":       {"login : accept-raw c10000000000000100000000000000000000000000000000000000000000000000000000", "SRP_LOGIN_RSP"},
		"a truncated answer": {"login : accept-raw c0000000000000800000000000000000", "SRP_LOGIN_RSP"},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := newWorld(t, withFaults(tc.fault)).tryLogin(t)
			if err == nil {
				s.Close()
			}
			if err == nil || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("%v; want %q in it", err, tc.text)
			}
		})
	}
	w := newWorld(t)
	w.port.IDExt++
	var rej *srp.LoginRejectedError
	if _, err := w.tryLogin(t); !errors.As(err, &rej) || rej.Reason != iu.RejectUnableToAssociate || !strings.Contains(err.Error(), w.port.ID().String()) {
		t.Errorf("wrong identifier: %v", err)
	}
}

// Nobody answers: the error comes at the chosen time.
func TestLoginTimeout(t *testing.T) {
	w := newWorld(t, withFaults("login : ignore"))
	began := time.Now()
	_, err := w.tryLogin(t, func(o *srp.LoginOptions) { o.ConnectTimeout = time.Second })
	if d := time.Since(began); err == nil || d < 900*time.Millisecond || d > 2*time.Second {
		t.Errorf("after %s: %v", d, err)
	}
	if !errors.Is(err, cm.ErrUnreachable) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

// A target that does not take units large enough for immediate data gets a second login without.
func TestLoginWithoutImmediateData(t *testing.T) {
	w := newWorld(t, func(c *targetemu.Config) { c.MaxITIULen = 580; c.NoImmediate = true })
	s := w.login(t)
	c := s.Stats().Channels[0]
	if c.Immediate != 0 || c.IULimit > 580 {
		t.Errorf("%+v", c)
	}
	load(t, s, 1, 8, 50)
}

// A target that accepts but takes shorter units than asked for: gather lists that do not fit are bounced.
func TestShortUnits(t *testing.T) {
	for _, most := range []int{64, 100, 256, 2116} {
		w := newWorld(t, withFaults(fmt.Sprintf("login : max-it %d", most)))
		s := w.login(t, func(o *srp.LoginOptions) { o.CmdSGEntries = 255 })
		mem, err := s.AllocMemory(1 << 20)
		if err != nil {
			t.Fatal(err)
		}
		want := make([]byte, 64<<10)
		fill(want, uint64(most))
		for _, pieces := range []int{1, 2, 12, 255} {
			list := cut(mem.Bytes(), len(want), pieces)
			scatter(list, want)
			do(t, s, &srp.Command{CDB: scsi.Write10(0, 128), Dir: srp.DataOut, Gather: list})
			clear(mem.Bytes())
			do(t, s, &srp.Command{CDB: scsi.Read10(0, 128), Dir: srp.DataIn, Gather: list})
			if !bytes.Equal(bytes.Join(list, nil), want) {
				t.Errorf("max_it_iu_len %d, %d pieces: data differ", most, pieces)
			}
		}
	}
}

// With allow_ext_sg descriptors beyond those in the command are fetched by the target.
func TestExternalTable(t *testing.T) {
	w := newWorld(t)
	if w.emu == nil {
		t.Skip("ib_srpt does not fetch tables")
	}
	s := w.login(t, func(o *srp.LoginOptions) { o.CmdSGEntries, o.SGTableSize, o.AllowExtSG = 12, 300, true })
	mem, err := s.AllocMemory(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	want := make([]byte, 64<<10)
	fill(want, 99)
	for _, pieces := range []int{12, 13, 100, 300} {
		list := cut(mem.Bytes(), len(want), pieces)
		scatter(list, want)
		do(t, s, &srp.Command{CDB: scsi.Write10(0, 128), Dir: srp.DataOut, Gather: list})
		clear(mem.Bytes())
		do(t, s, &srp.Command{CDB: scsi.Read10(0, 128), Dir: srp.DataIn, Gather: list})
		if !bytes.Equal(bytes.Join(list, nil), want) {
			t.Errorf("%d pieces: data differ", pieces)
		}
	}
	if n := w.emu.Stats().Channels[0].ExternalTables; n != 6 {
		t.Errorf("the target fetched %d tables, want 6", n)
	}
}

// Fewer channels than asked for is not a failure.
func TestFewerChannels(t *testing.T) {
	for name, change := range map[string]func(*targetemu.Config){
		"limit":  func(c *targetemu.Config) { c.MaxChannels = 2 },
		"single": func(c *targetemu.Config) { c.SingleChannel = true },
	} {
		t.Run(name, func(t *testing.T) {
			s := newWorld(t, change).login(t, func(o *srp.LoginOptions) { o.ChannelCount = 8 })
			if n := s.Channels(); n < 1 || n > 2 {
				t.Errorf("%d channels", n)
			}
			load(t, s, 4, 8, 50)
		})
	}
}

// Random credit deltas: never more requests outstanding than the target granted.
func TestCreditsVary(t *testing.T) {
	w := newWorld(t, func(c *targetemu.Config) { c.RequestLimit = 8 },
		withFaults("cmd prob=0.2 : credits =0\ncmd prob=0.2 : credits +1\ncmd every=20 : send cred-req delta=2\ncmd every=30 : send cred-req delta=-1"))
	s := w.login(t, func(o *srp.LoginOptions) {
		o.QueueSize, o.TaskMgmtTimeout, o.ReconnectDelay = 64, 200*time.Millisecond, 100*time.Millisecond
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		load(t, s, 1, 64, 400)
	}()
	select {
	case <-done:
	case <-time.After(60 * time.Second):
		t.Fatalf("stuck: %+v", s.Stats())
	}
	for _, c := range w.emu.Stats().Channels {
		if c.BeyondLimit > 0 {
			t.Errorf("%d requests beyond the limit", c.BeyondLimit)
		}
	}
}

// A target that takes all credits back and sends none leaves commands waiting: the session reports it and reconnects.
func TestNoCreditsLeft(t *testing.T) {
	w := newWorld(t, func(c *targetemu.Config) { c.RequestLimit = 4 }, withFaults("cmd op=read first=10 : credits =0"))
	s := w.login(t, func(o *srp.LoginOptions) {
		o.TaskMgmtTimeout, o.ReconnectDelay, o.CommandTimeout = 300*time.Millisecond, 100*time.Millisecond, 20*time.Second
	})
	soon(t, 10*time.Second, "12 reads", func() {
		for i := range 12 {
			c := read10(0, 1, make([]byte, 512))
			c.Retry = true
			if err := s.Do(context.Background(), c); err != nil {
				t.Errorf("read %d: %v", i, err)
			}
		}
	})
	if st := s.Stats(); st.Reconnects == 0 || st.Total.ZeroReqLim == 0 {
		t.Errorf("%d reconnects, %d times without credit", st.Reconnects, st.Total.ZeroReqLim)
	}
}

// A reset ends what is under way at the unit on all channels; what may be retried is.
func TestLUNReset(t *testing.T) {
	w := newWorld(t, withFaults("cmd op=read first=12 : hold keep"))
	s := w.login(t, func(o *srp.LoginOptions) { o.ChannelCount = 3 })
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			c := read10(0, 1, make([]byte, 512))
			c.Queue, c.Retry = i+1, i%2 == 0
			err := s.Do(context.Background(), c)
			var cc *scsi.CheckConditionError // of the unit attention that follows
			if c.Retry && err != nil && !errors.As(err, &cc) || !c.Retry && !errors.Is(err, srp.ErrReset) {
				t.Errorf("read %d (may be retried: %v): %v", i, c.Retry, err)
			}
		})
	}
	for s.Stats().Total.Commands < 12 {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(20 * time.Millisecond)
	soon(t, 3*time.Second, "the reset", func() {
		if err := s.LUNReset(scsi.LUN{}); err != nil {
			t.Error(err)
		}
		wg.Wait()
	})
	if st := s.Stats(); st.Reconnects > 0 {
		t.Error("the connection was lost")
	}
	do(t, s, read10(0, 1, make([]byte, 512)))
}
