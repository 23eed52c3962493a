package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"srp-initiator/internal/require"
	"srp-initiator/internal/revision"
	"srp-initiator/target-emu/lun"
)

func TestWrongArguments(t *testing.T) {
	script := filepath.Join(t.TempDir(), "faults")
	if err := os.WriteFile(script, []byte("cmd : nonsense\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	odd := filepath.Join(t.TempDir(), "odd")
	if err := os.WriteFile(odd, make([]byte, 1300), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{
		"--nonsense", "argument", "--lun 0", "--lun 0=file:/nonexistent/file", "--lun x=ram:1m", "--lun 0=ram:1x", "--lun 0=ram:1m --lun 0=ram:1m", "--completion direct", "--completion foo", "--id-ext xyz", "--id-ext 0",
		"--acl foo", "--listen foo", "--faults " + script, "--faults /nonexistent/file", "--request-limit 1", "--max-iu 10", "--formats 8", "--max-channels -1", "--request-limit 0", "--max-iu 0", "--max-channels 0", "--max-sessions 0", "--formats 0", "--poll-weight -1",
		"--device softroce:foo", "--pcap /nonexistent/dir/file", "--lun 0=ram:513", "--lun 0=ram:6k,bs=4096", "--lun 0=null:1000", "--lun 0=file:" + odd, "--lun 0=file:" + odd + ",bs=4096,size=1k", "--lun 0=file:" + odd + ",size=1000",
		"--stats 0s", "--stats -1s", "--lock-thread", "--lock-thread --completion poll", "--seed 3", "--lun 0=ram:1m,serial=", "--lun 0=ram:1m,product=", "--faults= --seed 3", "--faults=", "--pcap=", "--pcap -", "-q -v",
		"--listen 0.0.0.0", "--listen ::", "--listen [::]:5555", "--listen ::ffff:0.0.0.0", "--device softroce:127.0.0.77 --listen 0.0.0.0",
	} {
		err := run(strings.Fields(args), io.Discard, io.Discard)
		var ue usageError
		if !errors.As(err, &ue) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v; want one line and exit code 2", args, err)
		}
	}
}

func TestHelp(t *testing.T) {
	var out bytes.Buffer
	if err := run([]string{"--help"}, &out, io.Discard); err != nil || !strings.Contains(out.String(), "--faults FILE") {
		t.Errorf("%v\n%s", err, out.String())
	}
}

// A file whose size is no multiple of the block is served when size= makes it fit, and no byte of it is lost.
func TestOddFile(t *testing.T) {
	odd := filepath.Join(t.TempDir(), "odd")
	if err := os.WriteFile(odd, bytes.Repeat([]byte{7}, 1300), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		options    string
		size, file int64 // of the unit, and of the file afterwards; size 0: refused
	}{{"", 0, 1300}, {",ro", 0, 1300}, {",size=1k", 1024, 1300}, {",size=1k,ro", 1024, 1300}, {",size=1536", 1536, 1536}} {
		o := options{luns: []string{"0=file:" + odd + tc.options}}
		units, err := o.units(&lun.Map{})
		if tc.size == 0 {
			if err == nil || !strings.Contains(err.Error(), "1300 bytes, no multiple of the block of 512 bytes") || !strings.Contains(err.Error(), "size=1024") {
				t.Errorf("%q: %v", tc.options, err)
			}
		} else if err != nil || units[0].Capacity().Size() != uint64(tc.size) {
			t.Errorf("%q: %v, want %d bytes", tc.options, err, tc.size)
		}
		for _, u := range units {
			u.Close()
		}
		if b, err := os.ReadFile(odd); err != nil || int64(len(b)) != tc.file || !bytes.Equal(b[:1300], bytes.Repeat([]byte{7}, 1300)) {
			t.Errorf("%q: the file has %d bytes, want %d and what was there (%v)", tc.options, len(b), tc.file, err)
		}
	}
}

// A wrong value is told by the name of its flag, with what is allowed.
func TestFlagMessages(t *testing.T) {
	for args, want := range map[string]string{
		"--request-limit -5": "--request-limit -5: want 2 to 4096", "--request-limit 0": "--request-limit 0: want 2", "--request-limit 4097": "--request-limit 4097: want", "--max-iu 10": "--max-iu 10: want 64 to 1048576 bytes",
		"--max-channels -1": "--max-channels -1: want a number from 1 up", "--formats 1": "--formats 1: want 2 (direct), 4 (indirect) or 6 (both)", "--formats 70000": "--formats 70000: want 2 (direct)",
		"--port 70000": "--port 70000: want a number from 0 (any that is free) to 65535", "--port -1": "--port -1: want a number from 0", "--listen ::1:5": "for port 5 of ::1 want [::1]:5",
		"--listen fe80::1": "its interface too: fe80::1%INTERFACE", "--listen [fe80::1]:5": "its interface too: fe80::1%INTERFACE", "--lun 0=null:9999999t": "want less than 2^62 bytes", "--lun 0=ram:99999999999999999999": "want less than 2^62 bytes",
	} {
		err := run(strings.Fields(args), io.Discard, io.Discard)
		var ue usageError
		if !errors.As(err, &ue) || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "targetemu:") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v; want %q and exit code 2", args, err, want)
		}
	}
}

// A capture that cannot be written is told at once, by one line, and again by the exit code.
func TestCaptureFullDisk(t *testing.T) {
	r, w := io.Pipe()
	errs, told := io.Pipe()
	done := make(chan error, 1)
	go func() {
		done <- run([]string{"--lun", "0=ram:1m", "--port", "0", "--pcap", "/dev/full"}, w, told)
		w.Close()
		told.Close()
	}()
	line := make([]byte, 200)
	n, err := errs.Read(line)
	if got := string(line[:n]); err != nil || !strings.HasPrefix(got, "target-emu: --pcap: ") || !strings.Contains(got, "no space left on device") || strings.Count(got, "\n") != 1 {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := r.Read(make([]byte, 200)); err != nil { // it serves all the same
		t.Error(err)
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if more, err := io.ReadAll(errs); err != nil || len(more) > 0 {
		t.Errorf("a second line: %q, %v", more, err)
	}
	var ue usageError
	if err := <-done; !errors.Is(err, syscall.ENOSPC) || errors.As(err, &ue) || strings.Contains(err.Error(), "\n") {
		t.Errorf("%v; want one line, no space left and exit code 1", err)
	}
}

// The TARGET string of a link-local address has its interface: it leads nowhere without.
func TestLinkLocalTarget(t *testing.T) {
	at := require.LinkLocal(t)
	for _, asJSON := range []bool{false, true} {
		args := []string{"--lun", "0=ram:1m", "--port", "0", "--listen", at.String()}
		if asJSON {
			args = append(args, "--json")
		}
		r, w := io.Pipe()
		done := make(chan error, 1)
		go func() {
			done <- run(args, w, io.Discard)
			w.Close()
		}()
		line, err := bufio.NewReader(r).ReadString('\n')
		go io.Copy(io.Discard, r)
		want := "dest=[" + at.String() + "]:"
		if asJSON {
			want = `"address":"[` + at.String() + "]:"
		}
		if err != nil || !strings.Contains(line, want) || !strings.Contains(line, "dest=["+at.String()+"]:") {
			t.Errorf("%q, %v; want %s", line, err, want)
		}
		if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// A help text that could not be written is no success.
func TestHelpFullOutput(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	var ue usageError
	if err := run([]string{"--help"}, full, io.Discard); !errors.Is(err, syscall.ENOSPC) || errors.As(err, &ue) {
		t.Errorf("%v, want no space left and exit code 1", err)
	}
}

// TestServeUntilSignal starts the whole command, reads its line and ends it with a signal.
func TestServeUntilSignal(t *testing.T) {
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP) // under nohup(1) the program would ignore it
	defer signal.Stop(hangup)
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP} {
		t.Run(sig.String(), func(t *testing.T) { serveUntil(t, sig) })
	}
}

func serveUntil(t *testing.T, sig syscall.Signal) {
	r, w := io.Pipe()
	done := make(chan error, 1)
	capture := filepath.Join(t.TempDir(), "x.pcapng")
	var stats bytes.Buffer
	go func() {
		done <- run([]string{"--lun", "0=ram:1m", "--pcap", capture, "--port", "5556", "--stats", "1h"}, w, &stats)
		w.Close()
	}()
	line := make([]byte, 200)
	n, err := r.Read(line)
	if err != nil || !regexp.MustCompile(`^id_ext=[0-9a-f]{16},ioc_guid=[0-9a-f]{16},dest=127\.[0-9.]+:5556\n$`).Match(line[:n]) {
		t.Errorf("first line %q, %v", line[:n], err)
	}
	if err := syscall.Kill(os.Getpid(), sig); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Errorf("%s does not end it", sig)
	}
	if st, err := os.Stat(capture); err != nil || st.Size() == 0 {
		t.Errorf("capture: %v", err)
	}
	if !regexp.MustCompile(`^logins 0, rejected 0, ended 0\n  device:.*\n$`).Match(stats.Bytes()) {
		t.Errorf("statistics %q", stats.String())
	}
}

// What the program was built from, in words and as JSON; nothing is served.
func TestVersion(t *testing.T) {
	for _, args := range [][]string{{"--version"}, {"--version", "--json"}} {
		var out bytes.Buffer
		if err := run(args, &out, io.Discard); err != nil || strings.Count(out.String(), "\n") != 1 {
			t.Errorf("%v: %v, %q", args, err, out.String())
		}
		for _, want := range []string{"target-emu", revision.Program(), runtime.Version()} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%v: %q has no %q", args, out.String(), want)
			}
		}
	}
}

// The statistics name each rule of a fault script, at the end too when no statistics were asked for.
func TestFaultStatistics(t *testing.T) {
	script := filepath.Join(t.TempDir(), "faults")
	if err := os.WriteFile(script, []byte("# no\ncmd op=read nth=3 : drop\ntime at=1ns : vanish 1ms\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, asJSON := range []bool{false, true} {
		args := []string{"--lun", "0=ram:1m", "--faults", script}
		if asJSON {
			args = append(args, "--json")
		}
		r, w := io.Pipe()
		done := make(chan error, 1)
		var errOut, rest bytes.Buffer
		go func() {
			done <- run(args, w, &errOut)
			w.Close()
		}()
		if _, err := r.Read(make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if _, err := rest.ReadFrom(r); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		if asJSON {
			var last struct {
				Rules []struct {
					Line           int
					Rule           string
					Matched, Acted *int
				} `json:"fault_rules"`
			}
			if err := json.Unmarshal(rest.Bytes(), &last); err != nil || len(last.Rules) != 2 || last.Rules[0].Line != 2 || last.Rules[0].Rule != "cmd op=read nth=3 : drop" || last.Rules[0].Matched == nil || last.Rules[0].Acted == nil {
				t.Errorf("%s, %v", rest.Bytes(), err)
			}
		} else if !strings.HasPrefix(errOut.String(), "  fault script, line 2: matched 0, acted 0: cmd op=read nth=3 : drop\n  fault script, line 3: matched ") {
			t.Errorf("%q", errOut.String())
		}
	}
}

// A message about a wrong argument names the argument and what is allowed in its place.
func TestMessagesSayWhatIsAllowed(t *testing.T) {
	script := filepath.Join(t.TempDir(), "faults")
	for args, want := range map[string]string{
		"argument": "flags only", "--request-limit 0": "2 to 4096", "--request-limit 5000": "2 to 4096", "--max-iu 0": "64 to 1048576", "--max-iu 5": "64 to 1048576", "--max-channels 0": "from 1 up", "--max-channels -1": "--max-channels -1: want a number from 1 up",
		"--max-sessions -1": "--max-sessions -1: want a number from 1 up", "--formats 0": "2 (direct), 4 (indirect)", "--formats 8": "2 (direct), 4 (indirect)", "--poll-weight -1": "--poll-weight -1: want 0", "--poll-budget -1": "--poll-budget -1: want 0",
		"--acl foo": "--acl: access list entry \"foo\": want", "--listen foo": "such as 10.0.0.5", "--listen 0.0.0.0": "want an address of this machine", "--listen [::]:5555": "--listen ::", "--completion x": "interrupt, thread, poll or adaptive", "--lock-thread": "--completion thread, not with adaptive", "--lun x=ram:1m": "from 0 to 4294967295",
		"--lun 0=tape:1": "ram, null or file", "--lun 0=ram:0": "from 1 up", "--lun 0=ram:1m,x=1": "bs, ro, serial, product or size", "--lun 0=ram:1m --lun 0=null:1m": "one of its own", "--lun 0=ram:1m,bs=9": "512 or 4096", "--id-ext q": "16 hexadecimal digits",
		"--faults /none": "--faults: want a file", "--pcap /none/x": "--pcap: want a file", "--stats 0s": "such as 5s",
		"FAULTS foo : drop": "login, cmd, tmf or time", "FAULTS cmd : foo": "cmd takes break, claim, corrupt", "FAULTS login : foo": "login takes accept-raw, delay", "FAULTS login : drop": "drop: not on login; it is for cmd, tmf", "FAULTS cmd : reject 1": "it is for login",
		"FAULTS cmd from=x : drop": "selector from=: not on cmd; it is for login", "FAULTS tmf op=read : drop": "it is for cmd", "FAULTS cmd foo=1 : drop": "cmd takes op, lun, channel", "FAULTS time nth=1 : disconnect": "at, every and channel", "FAULTS cmd op=foo : drop": "compare-and-write, inquiry",
		"FAULTS cmd : status foo": "task-set-full", "FAULTS cmd : sense foo 1/1": "medium-error", "FAULTS tmf func=foo : drop": "lun-reset", "FAULTS cmd : send cred-req x=1": "delta=, tag=", "FAULTS cmd : send aer-req lun=x": "2^32-1", "FAULTS cmd : send foo": "t-logout",
		"FAULTS cmd : drop 1": "semicolon", "FAULTS cmd op=tur : cut 1": "read, write and others", "FAULTS tmf : hold keep": "on cmd only", "FAULTS cmd lun=x : drop": "from 0 to 4294967295", "FAULTS seed x": "0 to 2^64-1", "FAULTS cmd :": "an action is missing; cmd takes",
	} {
		argv := strings.Fields(args)
		if line, ok := strings.CutPrefix(args, "FAULTS "); ok {
			if err := os.WriteFile(script, []byte(line+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			argv = []string{"--faults", script}
		}
		err := run(argv, io.Discard, io.Discard)
		var ue usageError
		if !errors.As(err, &ue) || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want one line with %q", args, err, want)
		}
	}
}

// The last line of --json has the target's counters and the device's, zeros included: a script may rely on them.
func TestJSONStatistics(t *testing.T) {
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		done <- run([]string{"--lun", "0=ram:1m", "--json"}, w, os.Stderr)
		w.Close()
	}()
	lines := json.NewDecoder(r)
	var first struct{ Target string }
	if err := lines.Decode(&first); err != nil || first.Target == "" {
		t.Fatalf("first line %+v, %v", first, err)
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	var last struct {
		Logins *int
		Device map[string]uint64
	}
	if err := lines.Decode(&last); err != nil || last.Logins == nil {
		t.Fatalf("last line %+v, %v", last, err)
	}
	for _, name := range []string{"icrc_errors", "retransmits", "packets_received"} {
		if n, ok := last.Device[name]; !ok || n != 0 {
			t.Errorf("%s %d (%v), want 0", name, n, ok)
		}
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A budget in mode poll is that of a poller: the common one has a budget of its own.
func TestPollBudget(t *testing.T) {
	for mode, own := range map[string]bool{"poll": true, "interrupt": false, "adaptive": false} {
		var o options
		fs := flags(&o)
		if err := fs.Parse([]string{"--completion", mode, "--poll-budget", "7"}); err != nil {
			t.Fatal(err)
		}
		if c, err := o.config(fs.Changed); err != nil || c.Completion.Budget != 7 || (c.Completion.Poller != nil) != own {
			t.Errorf("%s: %v, %+v", mode, err, c)
		}
	}
}
