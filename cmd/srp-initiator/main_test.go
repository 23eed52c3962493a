package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"srp-initiator/bench"
	"srp-initiator/rdma/softroce"
	targetemu "srp-initiator/target-emu"
	"srp-initiator/target-emu/lun"
	"srp-initiator/target-emu/lun/luntest"
)

// The test binary is the program too, when asked.
func TestMain(m *testing.M) {
	if os.Getenv("SRP_INITIATOR_TEST_MAIN") == "1" {
		main()
	}
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP) // under nohup(1) the programs would ignore it
	os.Exit(m.Run())
}

// emulate starts a target-emu with LUN 0 (1 MiB), LUN 1 (8 MiB) and LUN 300 and returns its URL.
func emulate(t *testing.T, faults string) string {
	t.Helper()
	return emulateUnits(t, faults, map[uint32]string{0: "ram:1m", 1: "ram:8m", 300: "ram:2m,bs=4096"})
}

func emulateUnits(t *testing.T, faults string, specs map[uint32]string) string {
	t.Helper()
	d, err := softroce.Open(netip.Addr{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	units := luntest.Units(t, &lun.Map{Simple: true}, specs)
	f, err := targetemu.ParseFaults(faults)
	if err != nil {
		t.Fatal(err)
	}
	emu, err := targetemu.New(d, d.Connector(), targetemu.Config{Listen: netip.AddrPortFrom(d.Addr(), 5555), Units: units, IDExt: 0xabc, IOCGUID: 0xabc, Faults: f})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { emu.Serve(ctx); close(ended) }()
	t.Cleanup(func() { cancel(); <-ended })
	return fmt.Sprintf("srp://%s/abc", emu.Addr())
}

func command(args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), "SRP_INITIATOR_TEST_MAIN=1")
	return cmd
}

// awake returns when the program that cmd started has opened its device, which it does long after it has taken over its signals: the sooner ones would
// end it as they end any program.
func awake(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	fds := fmt.Sprintf("/proc/%d/fd", cmd.Process.Pid)
	for began := time.Now(); time.Since(began) < time.Minute; time.Sleep(5 * time.Millisecond) {
		open, _ := os.ReadDir(fds)
		for _, fd := range open {
			if to, _ := os.Readlink(filepath.Join(fds, fd.Name())); strings.HasPrefix(to, "socket:") {
				return
			}
		}
	}
	cmd.Process.Kill()
	t.Fatalf("%v has not opened its device within a minute", cmd.Args)
}

// runs runs the program and returns what it printed and its exit code.
func runs(t *testing.T, stdin string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := command(args...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
	err := cmd.Run()
	if _, ok := err.(*exec.ExitError); err != nil && !ok {
		t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// Too few file descriptors are a limit of this machine, whatever they are too few for: exit code 3, and not "no such target".
func TestFewDescriptors(t *testing.T) {
	url := emulate(t, "")
	for _, args := range []string{"tur", "bench --rate=1000 --jobs=4 --runtime=20ms --ramp-time=0s"} { // with a rate each job has one more
		code := 3
		for n := 6; n < 64 && code != 0; n++ {
			cmd := exec.Command("sh", "-c", `ulimit -n $1 && exec "$0" $3 --device softroce "$2"`, os.Args[0], strconv.Itoa(n), url, args)
			cmd.Env = append(os.Environ(), "SRP_INITIATOR_TEST_MAIN=1")
			said, _ := cmd.CombinedOutput()
			if code = cmd.ProcessState.ExitCode(); bytes.HasPrefix(said, []byte("runtime: ")) {
				continue // the Go runtime's own descriptors come first
			}
			if code != 0 && (code != 3 || !strings.Contains(string(said), fmt.Sprintf("this process may have %d (ulimit -n)", n)) || bytes.Count(said, []byte("\n")) != 1) {
				t.Errorf("%s: %d descriptors: exit code %d, %s", args, n, code, said)
			}
		}
		if code != 0 {
			t.Errorf("%s: fails with 63 too", args)
		}
	}
}

// Data and JSON do not go to one standard output.
func TestRawDataAndJSON(t *testing.T) {
	stdout, _, code := runs(t, "", "raw", emulate(t, ""), "120000006000", "--in", "96", "-o", "-", "--json")
	var answer struct{ Error string }
	if err := json.Unmarshal([]byte(stdout), &answer); err != nil || code != 2 || !strings.Contains(answer.Error, "--output - and --json both say what standard output gets") {
		t.Errorf("exit code %d, %q, %v", code, stdout, err)
	}
}

func TestVerbs(t *testing.T) {
	url := emulate(t, "")
	raw := emulate(t, "login : reject-raw 0102")
	dir := t.TempDir()
	data := bytes.Repeat([]byte("0123456789abcdef!"), 123457)
	in, out := filepath.Join(dir, "in"), filepath.Join(dir, "out")
	if err := os.WriteFile(in, data, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		args []string
		code int
		want string // in standard output, or in standard error when code is not 0
	}{
		{[]string{"probe", url + "?ch_count=2"}, 0, "channels        2 of 2"},
		{[]string{"ls", url}, 0, "300    disk            2 MiB    4096"},
		{[]string{"inq", url, "--lun", "300"}, 0, "SRP-EMU"},
		{[]string{"inq", url, "--all"}, 0, "unit serial number"},
		{[]string{"readcap", url, "-l", "1"}, 0, "8388608"},
		{[]string{"tur", url}, 0, "ready"},
		{[]string{"write", url, "-l", "1", "-s", "777", "-i", in, "--verify"}, 0, ""},
		{[]string{"read", url, "-l", "1", "-s", "777", "-n", fmt.Sprint(len(data)), "-o", out}, 0, ""},
		{[]string{"sync", url}, 0, ""},
		{[]string{"unmap", url, "-s", "0", "-n", "64K", "--zero"}, 0, ""},
		{[]string{"reset", url}, 0, ""},
		{[]string{"raw", url, "12 00 00 00 60 00", "--in", "96"}, 0, "GOOD"},
		{[]string{"raw", url, "28 00 ff ff ff ff 00 00 01 00", "--in", "512"}, 1, "block address out of range"},
		{[]string{"write", url, "-i", in}, 2, "do not fit LUN 0"},
		{[]string{"read", url, "-s", "2M"}, 2, "beyond the end"},
		{[]string{"read", url, "-s", "5x"}, 2, "5x"},
		{[]string{"read", url, "--lun", "9"}, 1, "no such logical unit"},
		{[]string{"read", url, "--lun", "x"}, 2, "--lun \"x\": want a number up to 4294967295"},
		{[]string{"read", url, "-d", "nosuch0"}, 3, "nosuch0"},
		{[]string{"probe", url + "?queue_sise=5"}, 2, "did you mean queue_size?"},
		{[]string{"probe", url, "extra"}, 2, "unexpected argument"},
		{[]string{"probe", "-Z", url}, 2, "unknown"},
		{[]string{"probe", strings.Replace(url, "abc", "abd", 1)}, 5, "0x00010003"},
		{[]string{"probe", strings.Replace(url, "5555", "5556", 1)}, 4, "nobody listens"},
		{[]string{"probe", "srp://127.99.98.97:5555/1", "--connect-timeout", "500ms"}, 4, "no answer from 127.99.98.97:5555 within "},
		{[]string{"raw", url, "12"}, 2, "want 6 to 32"},
		{[]string{"bench", url, "--rounds", "5"}, 2, "goes with --compare"},
		{[]string{"bench", url, "--compare", "poll,thread", "--completion", "poll"}, 2, "--completion does not go with --compare"},
		{[]string{"bench", url, "--compare", "poll,thread", "--thread=y"}, 2, "--thread does not go with --compare"},
		{[]string{"bench", url, "--runtime", "1ns", "--ramp-time", "0"}, 1, "no command began and ended within 1ns: want a longer --runtime"},
		{[]string{"bench", url, "--runtime", "1ns", "--ramp-time", "0", "--rate", "5%"}, 1, "no peak to take 5 % of"},
		{[]string{"bench", url, "--runtime", "1ns", "--ramp-time", "0", "--compare", "poll,direct", "--rounds", "1"}, 1, "poll did no command in 1 round of 1ns"},
		{[]string{"bench", url, "--procs", "-1"}, 2, "procs: -1 is not 1 to 1024 CPUs, or 0 for all that the program may use\n"},
		{[]string{"bench", url, "--procs", "1025"}, 2, "procs: 1025 is not 1 to 1024"},
		{[]string{"bench", url, "--loops", "9"}, 0, " procs=1 "},
		{[]string{"bench", url, "--loops", "9", "--procs", "3"}, 0, " procs=3 "},
		{[]string{"bench", url, "--loops", "9", "--completion", "thread", "--lock-thread", "--procs", "1"}, 0, " procs=1 "},
		{[]string{"bench", url, "--loops", "9", "--compare", "direct,thread", "--rounds", "1"}, 0, " procs=1, 1 round, medians"},
		{[]string{"experiment", "e4", url, "--procs", "-1"}, 2, "--procs -1: want 1 to 1024 CPUs, or 0 for all that this program may use\n"},
		{[]string{"bench", url, "--loops", "0"}, 2, "--loops 0: want 1 or more"},
		{[]string{"bench", url, "--loops", "-1"}, 2, "--loops -1: want 1 or more"},
		{[]string{"bench", url, "--iodepth", "x"}, 2, "--iodepth=x: want a whole number\n"},
		{[]string{"bench", url, "--cpus", "0, 1"}, 2, "--cpus=0, 1: want whole numbers separated by commas"},
		{[]string{"bench", url, "--runtime", "5"}, 2, "--runtime=5: want a time such as 5s or 100ms"},
		{[]string{"bench", url, "--jobs", "1024", "--iodepth", "4096"}, 2, "want 65536 at most"},
		{[]string{"bench", url, "--rate", "0.5"}, 2, "--rate=0.5: want 0 (as many as go), 1 to 10000000 commands per second, or above 0% to 100%"},
		{[]string{"bench", url, "--rate", "1e12"}, 2, "1 to 10000000 commands per second"},
		{[]string{"bench", url, "--compare", "poll"}, 2, "want two modes or more"},
		{[]string{"bench", url, "--compare", "poll,,thread"}, 2, "allowed are interrupt, thread, poll, direct and adaptive, thread=n and thread=y"},
		{[]string{"bench", url, "--compare", "poll,direct+lock"}, 2, `direct+lock: "+lock" goes with thread and poll`},
		{[]string{"bench", url, "--compare", "poll,thread", "--cpus", "0"}, 2, "thread+lock or poll+lock"},
		{[]string{"bench", url, "--compare", "poll,thread", "--rounds", "0"}, 2, "--rounds 0: want 1 to 1000"},
		{[]string{"bench", url, "--rwmixread", "20"}, 2, "--rwmixread goes with --rw=randrw, not with randread"},
		{[]string{"bench", url, "--loops", "5", "--ramp-time", "1s"}, 2, "--ramp-time does not go with --loops"},
		{[]string{"bench", url, "--rw", "read", "--seed", "2"}, 2, "--seed goes with --verify and with --rw=randread, randwrite or randrw"},
		{[]string{"bench", url, "--cpuprofile", "-"}, 2, "--cpuprofile -: standard output has"},
		{[]string{"probe", url, "--pcap", "-"}, 2, "--pcap -: standard output has"},
		{[]string{"experiment", "e1", url, "--cpus", "0"}, 2, "--cpus: the experiment chooses who reaps"},
		{[]string{"experiment", "e1", url, "--poll-budget", "5"}, 2, "--poll-budget: the experiment chooses who reaps"},
		{[]string{"experiment", "e1", url, "--write"}, 2, "--write: e1 does not write; those that do are e2"},
		{[]string{"experiment", "e1", url, "--lun2", "1"}, 2, "--lun2: e1 uses one unit; those that stripe over two are e3, e3s"},
		{[]string{"experiment", "e1", url, "--markdown", "--csv", "-"}, 2, "--markdown and --csv both say what standard output gets"},
		{[]string{"experiment", "e1", url, "--plots", "-"}, 2, "--plots -: standard output has"},
		{[]string{"experiment", "e1", url, "-l", "300"}, 2, "5 of 16 points cannot run on this unit (512 B, saturated;"},
		{[]string{"experiment", "e1", url, "--offset", "2m", "--skip"}, 2, "offset: 2097152 is not a multiple of 512 below the unit's size 1048576"},
		{[]string{"bench", url, "--runtime", "0"}, 2, "--runtime 0s: want a time above 0"},
		{[]string{"bench", url, "--iodepth", "0"}, 2, "iodepth"},
		{[]string{"bench", url, "--bs", "0"}, 2, "bs"},
		{[]string{"tur", url, "--timeout", "0"}, 2, "--timeout 0s: want a time above 0"},
		{[]string{"tur", url, "--timeout", "-1s"}, 2, "--timeout -1s: want a time above 0"},
		{[]string{"tur", url, "--connect-timeout", "0"}, 2, "--connect-timeout 0s: want a time above 0"},
		{[]string{"read", url, "-o", ""}, 2, "--output is empty; want: file to write"},
		{[]string{"write", url, "-i", ""}, 2, "--input is empty; want: file to read"},
		{[]string{"tur", url, "-d", ""}, 2, "--device is empty; want: RDMA device: auto"},
		{[]string{"tur", url, "--completion="}, 2, "--completion is empty; want: who reaps"},
		{[]string{"tur", ""}, 2, "TARGET"},
		{[]string{"bench", url, "--cpuprofile", "/nonexistent/profile"}, 2, "no such file"},
		{[]string{"probe", url, "--thread", "maybe"}, 2, "y or n"},
		{[]string{"nonsense"}, 2, "unknown verb"},
		{[]string{"inq", url, "--lun", "9"}, 1, "no such logical unit"},
		{[]string{"inq", url, "--lun", "9", "--all"}, 1, "no such logical unit"},
		{[]string{"read", url, "-o", "/nonexistent/x"}, 2, "no such file"},
		// Flags that would do nothing.
		{[]string{"probe", url, "--timeout", "1s"}, 2, "--timeout: probe sends no SCSI command; want --connect-timeout"},
		{[]string{"raw", url, "000000000000", "-o", out}, 2, "--output goes with --in from 1 up"},
		{[]string{"raw", url, "000000000000", "-o", out, "--in", "0"}, 2, "--output goes with --in from 1 up"},
		{[]string{"raw", url, "2a000000000000000100", "-o", out, "--out", in}, 2, "--output goes with --in from 1 up"},
		{[]string{"reset", emulate(t, "tmf : drop") + "?tmf_tmo=600", "--timeout", "200ms"}, 1, "no answer in time"},
		{[]string{"raw", url, "2a000000000000000100", "--out", "/dev/zero"}, 2, "has more than 268435456 bytes"},
		// No server is asked for a name with an empty label: the test needs no network.
		{[]string{"probe", "srp://nosuch..host:5555/1"}, 4, "no such host"},
		{[]string{"probe", raw}, 5, "connection rejected by the peer: consumer defined"},
		{[]string{"probe", strings.Replace(url, "abc", "abd", 1)}, 5, "or its access list does not admit this initiator"},
		{[]string{"experiment", "e3", url, "--lun", "1", "--lun2", "1"}, 2, "are the same unit"},
		{[]string{"experiment", "e3s", url, "--lun", "1"}, 2, "are the same unit"},
		{[]string{"experiment", "zz", url}, 2, "allowed are depth, e1, e2, e3, e3s, e4 and matrix"},
		{[]string{"bench", url, "--compare", "poll,poll"}, 2, "poll is there twice"},
		{[]string{"bench", url, "--compare", "thread,thread=y"}, 2, "thread is there twice"},
		{[]string{"bench", url, "-l", "1", "--bs", "1m"}, 2, "max_sect=2048 in TARGET allows it"},
		{[]string{"help", "target"}, 0, "1, a key of its own for each, is refused ("},
		{[]string{"help", "target"}, 0, "srp://[fe80::1%25eth0]:5555/"},
		{[]string{"help", "target"}, 0, "is found by the first command that has no answer within cmd_tmo"},
		{[]string{"tur", url, "--timeout", "1ns"}, 2, "--timeout 1ns: want 100ms to 10000000s"},
		{[]string{"tur", url, "--connect-timeout", "1ns"}, 2, "--connect-timeout 1ns: want 100ms to 10000000s"},
		{[]string{"tur", url, "--poll-weight", "-1"}, 2, "--poll-weight -1: want 0 to 65536"},
		{[]string{"tur", url, "--poll-budget", "-1"}, 2, "--poll-budget -1: want 0 to 1048576"},
		{[]string{"tur", url, "--cpus", "0-1"}, 2, "--cpus=0-1: want whole numbers separated by commas, such as 0,1\n"},
		{[]string{"tur", url, "--timeout", "5"}, 2, "--timeout=5: want a time such as 5s or 100ms\n"},
		{[]string{"tur", url, "--json=maybe"}, 2, "--json=maybe: want true or false\n"},
		{[]string{"tur", url, "-d", "softroce:fe80::1"}, 2, "%INTERFACE is missing"},
		{[]string{"tur", "srp://[fe80::1]:5555/1"}, 2, "%INTERFACE is missing"},
		{[]string{"tur", url + "?register_always=1", "-d", "nosuch0"}, 2, "is not made here"},
		{[]string{"raw", url, "00"}, 2, "has 1 byte, want 6 to 32"},
		{[]string{"raw", url, ""}, 2, "has 0 bytes, want 6 to 32"},
		{[]string{"raw", url, strings.Repeat("00", 35)}, 2, "has 35 bytes, want 6 to 32"},
		{[]string{"experiment", "e1", url, "--rounds", "0"}, 2, "--rounds 0: want 1 to 1000"},
		{[]string{"experiment", "e1", url, "--plots", "/nonexistent"}, 2, "--plots /nonexistent: no such file or directory; want a directory that exists"},
		{[]string{"experiment", "e1", url, "--plots", "/dev/null"}, 2, "--plots /dev/null: not a directory"},
		{[]string{"help", "selftest"}, 0, "a free address of 127.0.0.0/8"},
		{[]string{"help", "target", "bogus", ""}, 2, `unexpected argument "bogus"`},
	} {
		args := tc.args
		if len(args) > 1 && !strings.Contains(strings.Join(args, " "), "-d ") && args[0] != "nonsense" && args[0] != "help" {
			args = append(args, "-d", "softroce")
		}
		stdout, stderr, code := runs(t, "", args...)
		text := stdout
		if tc.code != 0 {
			text = stderr
			if strings.Count(stderr, "\n") != 1 {
				t.Errorf("%v: the error is not one line: %q", tc.args, stderr)
			}
		}
		if code != tc.code || !strings.Contains(text, tc.want) {
			t.Errorf("%v: exit code %d, want %d and %q in\n%s%s", tc.args, code, tc.code, tc.want, stdout, stderr)
		}
	}
	if got, err := os.ReadFile(out); err != nil || !bytes.Equal(got, data) {
		t.Errorf("what was read differs from what was written (%v)", err)
	}
	// From and to pipes.
	if _, stderr, code := runs(t, string(data[:100000]), "write", url, "-l", "1", "-d", "softroce"); code != 0 {
		t.Errorf("write from a pipe: %s", stderr)
	}
	if got, stderr, code := runs(t, "", "read", url, "-l", "1", "-n", "100000", "-d", "softroce"); code != 0 || got != string(data[:100000]) {
		t.Errorf("read to a pipe: %d bytes, %s", len(got), stderr)
	}
	if _, stderr, code := runs(t, string(data), "write", url, "-s", "512", "-d", "softroce"); code != 1 || !strings.Contains(stderr, "does not fit") {
		t.Errorf("a pipe that does not fit: %d, %s", code, stderr)
	}
}

func TestJSON(t *testing.T) {
	url := emulate(t, "")
	for _, args := range [][]string{{"devices"}, {"probe", url}, {"ls", url}, {"inq", url}, {"inq", url, "--all"}, {"inq", url, "-p", "83"}, {"readcap", url},
		{"tur", url}, {"sync", url}, {"reset", url}, {"raw", url, "00 00 00 00 00 00"}, {"raw", url, "25000000000000000000", "--in", "8"}, {"unmap", url, "-s", "0", "-n", "4K"},
		{"probe", "srp://x"}, {"raw", url, "ff 00 00 00 00 00"}} {
		if len(args) > 1 {
			args = append(args, "-d", "softroce")
		}
		stdout, stderr, _ := runs(t, "", append(args, "--json")...)
		var v any
		if err := json.Unmarshal([]byte(stdout), &v); err != nil || stderr != "" {
			t.Errorf("%v: %v in %q; %q", args, err, stdout, stderr)
		}
	}
}

// A signal ends every verb within a second, whatever it waits for; on a busy machine with the race detector another may go by.
func TestSignals(t *testing.T) {
	const limit = exitDeadline + time.Second
	if exitDeadline >= time.Second {
		t.Errorf("the program takes %s by itself", exitDeadline)
	}
	held := emulate(t, "cmd op=read : hold keep\ntmf : drop")
	silent := emulate(t, "login : ignore")
	free := emulate(t, "")
	for _, args := range [][]string{
		{"read", held, "-o", os.DevNull},
		{"bench", held, "--runtime", "30s", "--iodepth", "8"},
		{"probe", silent},
		{"write", free}, // its input never comes
		{"bench", free, "--runtime", "30s", "--iodepth", "8", "--completion", "poll"},
		{"bench", free, "--runtime", "30s", "--iodepth", "1", "--completion", "direct"},
		{"bench", free, "--runtime", "30s", "--iodepth", "1", "--completion", "interrupt"},
		{"bench", free, "--runtime", "30s", "--iodepth", "32", "--completion", "thread"},
		{"bench", free, "--runtime", "30s", "--iodepth", "32", "--completion", "adaptive"},
		{"bench", held, "--runtime", "30s", "--iodepth", "4", "--completion", "direct"}, // the one who polls waits for answers that do not come
		{"bench", held, "--runtime", "30s", "--iodepth", "4", "--completion", "adaptive"},
		{"bench", held, "--runtime", "30s", "--iodepth", "4", "--completion", "poll"},
		{"experiment", "e3s", free, "--runtime", "30s"},
	} {
		for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
			if sig == syscall.SIGHUP && args[0] == "bench" && slices.Contains(args, "--completion") {
				continue // SIGTERM has shown it
			}
			cmd := command(append(args, "-d", "softroce")...)
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			var errs bytes.Buffer
			cmd.Stderr = &errs
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			awake(t, cmd)
			time.Sleep(500 * time.Millisecond)
			began := time.Now()
			cmd.Process.Signal(sig)
			cmd.Wait()
			in.Close()
			if took, code := time.Since(began), cmd.ProcessState.ExitCode(); took > limit || code != 128+int(sig) {
				t.Errorf("%v: %s ended it after %s with code %d: %s", args, sig, took.Round(time.Millisecond), code, errs.String())
			}
		}
	}
}

// --compare sets the modes itself: a signal must not change what a row is about.
func TestModeSignalBesideCompare(t *testing.T) {
	cmd := command("bench", emulate(t, ""), "--runtime", "600ms", "--compare", "direct,thread", "--rounds", "1", "-d", "softroce", "--json")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	awake(t, cmd)
	for range 8 {
		time.Sleep(100 * time.Millisecond)
		cmd.Process.Signal(syscall.SIGUSR1)
	}
	if err := cmd.Wait(); err != nil || strings.Contains(errs.String(), "completion mode") {
		t.Errorf("%v: %s", err, errs.String())
	}
	for _, mode := range []string{"direct", "thread"} {
		if !strings.Contains(out.String(), `"completion": "`+mode+`"`) {
			t.Errorf("no result of mode %s", mode)
		}
	}
}

// SIGINT shows what a measurement has come to.
func TestInterruptedBench(t *testing.T) {
	url := emulate(t, "")
	for _, tc := range []struct {
		args []string
		want []string
	}{
		{[]string{"bench", url, "--runtime", "30s"}, []string{"IOPS", "commands in 0."}},
		{[]string{"bench", url, "--runtime", "30s", "--json"}, []string{`"interrupted": true`}},
		{[]string{"bench", url, "--runtime", "10ms", "--ramp-time", "0", "--compare", "direct,adaptive", "--rounds", "1000"}, []string{"adaptive", "rounds, medians"}},
		{[]string{"experiment", "depth", url, "--runtime", "5ms", "--rounds", "1000"}, []string{"interrupted by SIGINT; finished: 0 of 8 points", "QD 1 (ended after ", "adaptive to interrupt"}},
		{[]string{"experiment", "depth", url, "--runtime", "5ms", "--rounds", "1000", "--json"}, []string{`"interrupted": "interrupted by SIGINT; finished: 0 of 8 points"`, `"cut": "after`}},
		{[]string{"experiment", "depth", url, "--runtime", "5ms", "--rounds", "1000", "--csv", "-"}, []string{"depth,\"4 KiB, QD 1\""}},
		{[]string{"experiment", "depth", url, "--runtime", "5ms", "--rounds", "1000", "--markdown"}, []string{"Ended before its end: interrupted by SIGINT"}},
	} {
		cmd := command(append(tc.args, "-d", "softroce")...)
		var out, errs bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errs
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		awake(t, cmd)
		time.Sleep(900 * time.Millisecond)
		cmd.Process.Signal(syscall.SIGINT)
		cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != exitSIGINT {
			t.Errorf("%v: exit code %d, want %d", tc.args, code, exitSIGINT)
		}
		for _, w := range tc.want {
			if !strings.Contains(out.String(), w) {
				t.Errorf("%v: no %q in\n%s%s", tc.args, w, out.String(), errs.String())
			}
		}
		if n := strings.Count(out.String(), "\n{"); n != 0 {
			t.Errorf("%v: prints more than one document:\n%s", tc.args, out.String())
		}
	}
}

// TestSwitchedModes: of many modes the first and the last are named, and how many changes there were.
func TestSwitchedModes(t *testing.T) {
	modes := strings.Fields("adaptive interrupt thread poll direct adaptive interrupt")
	for n, want := range map[int]string{
		2: "switched: adaptive -> interrupt",
		6: "switched: adaptive -> interrupt -> thread -> poll -> direct -> adaptive",
		7: "switched: adaptive -> interrupt -> thread -> poll -> ... -> interrupt (6 changes)",
	} {
		if got := switchedModes(slices.Clone(modes[:n])); got != want {
			t.Errorf("%d modes: %q, want %q", n, got, want)
		}
	}
}

// TestInterruptedBeforeMeasuring: a run that ends in its ramp says that it has nothing to show.
func TestInterruptedBeforeMeasuring(t *testing.T) {
	cmd := command("bench", emulate(t, ""), "--runtime", "30s", "--ramp-time", "30s", "-d", "softroce")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	awake(t, cmd)
	time.Sleep(900 * time.Millisecond) // into the ramp; before it there is nothing to show either
	cmd.Process.Signal(syscall.SIGINT)
	cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != exitSIGINT || !strings.Contains(errs.String(), "interrupted by SIGINT; nothing was measured until then") {
		t.Errorf("exit code %d, %q", code, errs.String())
	}
}

// A result that is about more than one mode says so.
func TestModeSignal(t *testing.T) {
	url := emulate(t, "")
	for switches, want := range []string{"completion=adaptive:", "completion=switched: adaptive -> interrupt -> thread:"} {
		cmd := command("bench", url, "--runtime", "1200ms", "--ramp-time", "0", "-d", "softroce")
		var out bytes.Buffer
		told, err := cmd.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stdout = &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if switches > 0 {
			time.Sleep(500 * time.Millisecond) // until it is logged in
			for range 2 {
				cmd.Process.Signal(syscall.SIGUSR1)
				if _, err := told.Read(make([]byte, 100)); err != nil {
					t.Error(err)
				}
			}
		}
		if err := cmd.Wait(); err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("%v: no %q in %s", err, want, out.String())
		}
	}
}

// What was finished goes into every file, however long writing takes.
func TestInterruptedFiles(t *testing.T) {
	dir := t.TempDir()
	table := filepath.Join(dir, "csv")
	// Whoever reads the table takes its time, and the pipe to it is short.
	if err := syscall.Mkfifo(table, 0o600); err != nil {
		t.Fatal(err)
	}
	pipe, err := os.OpenFile(table, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer pipe.Close()
	if _, err := unix.FcntlInt(pipe.Fd(), unix.F_SETPIPE_SZ, 4096); err != nil {
		t.Fatal(err)
	}
	taken := make(chan []byte, 1)
	cmd := command("experiment", "depth", emulate(t, ""), "--runtime", "50ms", "--rounds", "1", "--csv", table, "--plots", dir, "-d", "softroce", "-l", "1")
	told, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(told)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "depth 4/8") {
			cmd.Process.Signal(syscall.SIGTERM)
			go func() {
				time.Sleep(exitDeadline + 500*time.Millisecond)
				b, err := io.ReadAll(pipe)
				if err != nil {
					t.Error(err)
				}
				taken <- b
			}()
			break
		}
	}
	var rest []string
	for lines.Scan() {
		rest = append(rest, lines.Text())
	}
	cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != exitSIGTERM || !strings.Contains(strings.Join(rest, "\n"), "interrupted by SIGTERM") {
		t.Errorf("exit code %d: %q", code, rest)
	}
	if b := <-taken; !strings.Contains(string(b), "QD 4\"") {
		t.Errorf("the table has no third point:\n%s", b)
	}
	if files, _ := filepath.Glob(filepath.Join(dir, "depth-4kib-iops.*")); len(files) != 2 {
		t.Errorf("plots: %q", files)
	}
	if !strings.Contains(out.String(), "4 KiB, QD 4\n") {
		t.Errorf("the report has no third point:\n%s", out.String())
	}
}

// A thread of its own is of no use without another CPU: with it all that the program may use are the default.
func TestProcsOfLockedThread(t *testing.T) {
	url := emulate(t, "")
	const all = 3 // told to the program, whatever this machine has
	t.Setenv("GOMAXPROCS", strconv.Itoa(all))
	for _, c := range []struct {
		args string
		want int
	}{
		{"--completion thread", 1},
		{"--completion thread --lock-thread", all},
		{"--completion poll --lock-thread", all},
		{"--completion poll --lock-thread --procs 2", 2},
		{"--compare thread,poll --rounds 1", 1},
		{"--compare thread,thread+lock --rounds 1", all},
		{"--compare thread,poll+lock --rounds 1 --procs 1", 1},
		{"--procs 0", all},
	} {
		out, errs, code := runs(t, "", append([]string{"bench", url, "--loops", "9", "-d", "softroce"}, strings.Fields(c.args)...)...)
		if want := fmt.Sprintf(" procs=%d", c.want); code != 0 || !strings.Contains(out, want) {
			t.Errorf("%s: exit code %d, no %q in %s%s", c.args, code, want, out, errs)
		}
	}
	for args, want := range map[string]string{"e1": "1 CPU", "e1 --procs 2": "2 CPUs", "e4": "3 CPUs", "e4 --procs 1": "1 CPU"} {
		// Not the exit code: where the machine has other work, no command may be done in 3 ms, and a point fails.
		out, errs, _ := runs(t, "", append(append([]string{"experiment"}, strings.Fields(args)...), url, "-l", "1", "--runtime", "3ms", "--rounds", "1", "-d", "softroce")...)
		if want := "initiator on " + want + " at once"; !strings.Contains(out, want) {
			t.Errorf("%s: no %q in %s%s", args, want, out, errs)
		}
	}
}

// A thread of its own can be compared with none.
func TestCompareLockedThread(t *testing.T) {
	url := emulate(t, "")
	out, errs, code := runs(t, "", "bench", url, "--compare", "thread=n, thread=y, thread=y+lock,poll+lock", "--cpus", "0", "--runtime", "10ms", "--ramp-time", "0", "--rounds", "2", "-d", "softroce:127.87.3.2", "--json")
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, errs)
	}
	var cs []struct {
		Name   string
		Rounds []struct {
			Completion string
			Commands   int
		}
		Ratio *struct{ Verdict string } `json:"iops_ratio"`
	}
	if err := json.Unmarshal([]byte(out), &cs); err != nil || len(cs) != 4 {
		t.Fatalf("%v: %s", err, out)
	}
	for k, want := range []string{"interrupt", "thread", "thread+lock", "poll+lock"} {
		if c := cs[k]; c.Name != want || len(c.Rounds) != 2 || c.Rounds[0].Commands == 0 || c.Rounds[1].Completion != want || k > 0 && (c.Ratio == nil || c.Ratio.Verdict != bench.FewRounds) {
			t.Errorf("%+v, want %s", c, want)
		}
	}
}

// An experiment with points that fail is no success, and one whose points do not fit the unit begins only when told to skip them.
func TestExperimentPoints(t *testing.T) {
	url := emulate(t, "cmd op=read nth=60 : sense 3 11/00")
	out, errs, code := runs(t, "", "experiment", "e1", url, "-l", "1", "--runtime", "50ms", "--rounds", "1", "-d", "softroce")
	if code != exitFailed || !strings.Contains(out, "512 B, saturated: failed: ") || !strings.Contains(out, "512 B, 10 % load: failed: no peak") || !strings.Contains(out, "4 KiB, saturated\n") || !strings.Contains(errs, "5 of 16 points failed, the first: 512 B, saturated: ") {
		t.Errorf("exit code %d: %s\n%s", code, errs, out)
	}
	url = emulate(t, "")
	out, errs, code = runs(t, "", "experiment", "e4", url, "-l", "300", "--skip", "--runtime", "50ms", "--rounds", "1", "-d", "softroce", "--csv", "-")
	if lines := strings.Split(out, "\n"); code != 0 || !strings.HasPrefix(lines[0], "experiment,point,") || strings.Contains(out, "512 B") || !strings.Contains(out, "4 KiB x 1") {
		t.Errorf("exit code %d: %s\n%s", code, errs, out)
	}
	for _, args := range [][]string{{"--json", "--markdown"}, {"--json", "--csv", "-"}} {
		out, _, code := runs(t, "", append([]string{"experiment", "e4", url, "-d", "softroce"}, args...)...)
		if code != exitUsage || !strings.Contains(out, args[0]+" and "+args[1]+" both say what standard output gets") {
			t.Errorf("%v: exit code %d: %s", args, code, out)
		}
	}
	if _, err := os.Stat("-"); err == nil {
		t.Error(`there is a file called "-"`)
	}
}

// Help shows what can be given.
func TestHiddenFlags(t *testing.T) {
	for verb, want := range map[string]bool{"experiment": false, "bench": true, "read": true} {
		out, _, _ := runs(t, "", verb, "--help")
		for _, name := range completionFlags {
			if strings.Contains(out, "  --"+name) != want {
				t.Errorf("%s --help: --%s shown: %v, want %v", verb, name, !want, want)
			}
		}
	}
}

// A unit that is read-only is no unit to write to: bad input, found before data move.
func TestReadOnlyUnit(t *testing.T) {
	url := emulateUnits(t, "", map[uint32]string{0: "ram:1m,ro"})
	for _, args := range [][]string{{"write", url}, {"unmap", url, "-s", "0", "-n", "64K"}, {"unmap", url, "-s", "0", "-n", "64K", "--zero"}, {"bench", url, "--rw", "write"},
		{"bench", url, "--verify"}, {"experiment", "e2", url, "--write"}} {
		_, errs, code := runs(t, "data", append(args, "-d", "softroce")...)
		if code != exitUsage || strings.Count(errs, "\n") != 1 || !strings.Contains(errs, "read-only") && !strings.Contains(errs, "write-protected") {
			t.Errorf("%v: exit code %d: %s", args, code, errs)
		}
	}
}

// What the examples show must be able to call a difference.
func TestRoundsOfExamples(t *testing.T) {
	texts := map[string]string{}
	for _, v := range verbs_ {
		texts[v.name] = v.example
	}
	for _, file := range []string{"../../README.md", "../../internal/demo/demo.sh"} {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		texts[file] = string(b)
	}
	for name, text := range texts {
		for _, m := range regexp.MustCompile(`--rounds ([0-9]+)`).FindAllStringSubmatch(text, -1) {
			if n, err := strconv.Atoi(m[1]); err != nil || n < bench.FewestRounds {
				t.Errorf("%s: %s", name, m[0])
			}
		}
	}
}

// What verification finds on a unit that keeps nothing is told as such.
func TestVerifyNullUnit(t *testing.T) {
	url := emulateUnits(t, "", map[uint32]string{0: "null:1m"})
	in := filepath.Join(t.TempDir(), "in")
	if err := os.WriteFile(in, []byte("0123456789"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"write", url, "-i", in, "--verify"}, {"bench", url, "--rw", "randrw", "--verify", "--loops", "50"}} {
		if _, errs, code := runs(t, "", append(args, "-d", "softroce")...); code != exitFailed || !strings.Contains(errs, "null units") {
			t.Errorf("%v: exit code %d: %s", args, code, errs)
		}
	}
}

// A file that cannot be written is found before a login, and one that is there keeps its content until there is something to write.
func TestOutputFile(t *testing.T) {
	silent := emulate(t, "login : ignore")
	url := emulate(t, "")
	dir := t.TempDir()
	kept, fresh := filepath.Join(dir, "kept"), filepath.Join(dir, "fresh")
	if err := os.WriteFile(kept, []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"read", silent, "-o", dir}, {"raw", silent, "120000006000", "--in", "96", "-o", dir}, {"experiment", "e1", silent, "--csv", dir}} {
		began := time.Now()
		if _, errs, code := runs(t, "", args...); code != exitUsage || !strings.Contains(errs, "is a directory") || time.Since(began) > 5*time.Second {
			t.Errorf("%v: exit code %d after %s: %s", args, code, time.Since(began), errs)
		}
	}
	for _, file := range []string{kept, fresh} {
		for _, args := range [][]string{
			{"read", url, "-l", "77", "-o", file},
			{"raw", url, "-l", "77", "280000000000000001 00", "--in", "512", "-o", file},
			{"experiment", "e1", url, "-l", "77", "--csv", file},
		} {
			if _, errs, code := runs(t, "", args...); code != exitFailed {
				t.Errorf("%v: exit code %d: %s", args, code, errs)
			}
		}
	}
	if b, err := os.ReadFile(kept); err != nil || string(b) != "content" {
		t.Errorf("the file holds %q: %v", b, err)
	}
	if _, err := os.Stat(fresh); !os.IsNotExist(err) {
		t.Errorf("a file was made for nothing: %v", err)
	}
	if _, errs, code := runs(t, "", "read", url, "-n", "3", "-o", kept); code != 0 {
		t.Errorf("read: exit code %d: %s", code, errs)
	}
	if b, err := os.ReadFile(kept); err != nil || string(b) != "\x00\x00\x00" {
		t.Errorf("the file holds %q: %v", b, err)
	}
}

// A reader that goes away, as head does, ends the program with a clean disconnect: the session is not left for the target to find dead.
func TestClosedPipe(t *testing.T) {
	target := emulate(t, "")
	for _, args := range [][]string{{"read", target, "--lun", "1"}, {"ls", target}, {"probe", target, "--json"}} {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		r.Close()
		capture := filepath.Join(t.TempDir(), "pcapng")
		cmd := command(append(args, "-d", "softroce", "--pcap", capture)...)
		var errs bytes.Buffer
		cmd.Stdout, cmd.Stderr = w, &errs
		cmd.Run()
		w.Close()
		if code := cmd.ProcessState.ExitCode(); code != exitSIGPIPE || errs.Len() > 0 {
			t.Errorf("%v: exit code %d, want %d and no word: %s", args, code, exitSIGPIPE, errs.String())
		}
		// DREQ is attribute 0x15 of the CM class (7, version 2), method 3 (IBA 16.7).
		if b, err := os.ReadFile(capture); err != nil || !hasCM(b, 0x15) {
			t.Errorf("%v: no DREQ among the packets (%v)", args, err)
		}
	}
}

// hasCM tells whether a capture has a CM datagram with that attribute.
func hasCM(b []byte, attribute byte) bool {
	for {
		i := bytes.Index(b, []byte{0x01, 0x07, 0x02, 0x03}) // base version, class, class version, method
		if i < 0 || len(b) < i+18 {
			return false
		}
		if b[i+16] == 0 && b[i+17] == attribute {
			return true
		}
		b = b[i+4:]
	}
}

// What could not be printed is no success.
func TestFullOutput(t *testing.T) {
	target := emulate(t, "")
	for _, args := range [][]string{{"ls", target}, {"ls", target, "--json"}, {"read", target, "--json"}, {"tur", target}, {"read", target}, {"inq", target}} {
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		cmd := command(append(args, "-d", "softroce")...)
		var errs bytes.Buffer
		cmd.Stdout, cmd.Stderr = full, &errs
		cmd.Run()
		full.Close()
		if code := cmd.ProcessState.ExitCode(); code != exitFailed || strings.Count(errs.String(), "\n") != 1 || !strings.Contains(errs.String(), "no space left") {
			t.Errorf("%v: exit code %d, want %d and the reason: %q", args, code, exitFailed, errs.String())
		}
	}
}

// Nor is a file that a full disk has lost, and its name is told.
func TestFullFiles(t *testing.T) {
	target := emulate(t, "")
	for _, args := range [][]string{
		{"bench", target, "--loops", "10", "--cpuprofile", "/dev/full"},
		{"read", target, "-n", "4096", "-o", "/dev/full"},
		{"raw", target, "12 00 00 00 60 00", "--in", "96", "-o", "/dev/full"},
		{"tur", target, "--pcap", "/dev/full"},
		{"experiment", "depth", target, "--runtime", "50ms", "--rounds", "1", "--csv", "/dev/full"},
	} {
		_, errs, code := runs(t, "", append(args, "-d", "softroce")...)
		lines := strings.Split(strings.TrimSpace(errs), "\n")
		if last := lines[len(lines)-1]; code != exitFailed || !strings.Contains(last, "write /dev/full: no space left") || len(lines) > 1 && args[0] != "experiment" {
			t.Errorf("%v: exit code %d: %q", args, code, errs)
		}
	}
}

// --timeout bounds how long a busy unit is asked again, with bench as with single commands.
func TestBusyTimeout(t *testing.T) {
	target := emulate(t, "cmd op=read : status busy")
	for _, args := range [][]string{{"bench", target, "--loops", "5"}, {"read", target, "-n", "512"}} {
		began := time.Now()
		_, errs, code := runs(t, "", append(args, "--timeout", "500ms", "-d", "softroce")...)
		if took := time.Since(began); code != exitFailed || !strings.Contains(errs, "BUSY") || took > 20*time.Second {
			t.Errorf("%v: exit code %d after %s: %s", args, code, took, errs)
		}
	}
}

// A help text that could not be printed is no success either.
func TestFullOutputHelp(t *testing.T) {
	for _, args := range [][]string{{"help"}, {"--help"}, {"help", "target"}, {"help", "read"}, {"read", "--help"}, {"version"}} {
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		cmd := command(args...)
		var errs bytes.Buffer
		cmd.Stdout, cmd.Stderr = full, &errs
		cmd.Run()
		full.Close()
		if code := cmd.ProcessState.ExitCode(); code != exitFailed || strings.Count(errs.String(), "\n") != 1 || !strings.Contains(errs.String(), "no space left") {
			t.Errorf("%v: exit code %d, want %d and the reason: %q", args, code, exitFailed, errs.String())
		}
	}
}

func TestVersion(t *testing.T) {
	if _, stderr, code := runs(t, "", "version", "foo"); code != exitUsage || !strings.HasSuffix(stderr, "srp-initiator version\n") {
		t.Errorf("exit code %d, %q", code, stderr)
	}
	for _, args := range [][]string{{"version"}, {"--version"}, {"--version", "--json"}} {
		stdout, stderr, code := runs(t, "", args...)
		if code != 0 || stderr != "" || !strings.Contains(stdout, "srp-initiator") || !strings.Contains(stdout, bench.ProgramVersion()) || !strings.Contains(stdout, runtime.Version()) {
			t.Errorf("%v: exit code %d, %q, %q", args, code, stdout, stderr)
		}
	}
}

// The device on an address of the user's choice passes its self-test: the second one takes another.
func TestSelftestAddress(t *testing.T) {
	if testing.Short() {
		t.Skip("takes all cases of the contract")
	}
	d, err := softroce.Open(netip.Addr{}) // an address that was free just now
	if err != nil {
		t.Fatal(err)
	}
	name := "softroce:" + d.Addr().String()
	d.Close()
	stdout, stderr, code := runs(t, "", "selftest", name, "--duration", "20ms", "-q")
	if code != 0 || !strings.Contains(stdout, name) || !strings.Contains(stdout, "all passed\n") {
		t.Errorf("exit code %d\n%s%s", code, stdout, stderr)
	}
	if _, stderr, code := runs(t, "", "selftest", "softroce:::1"); code != 2 || !strings.Contains(stderr, "IPv4") {
		t.Errorf("IPv6: exit code %d, %s", code, stderr)
	}
}

func TestParseSize(t *testing.T) {
	for s, want := range map[string]int64{"0": 0, "512": 512, "4k": 4096, "4K": 4096, "1M": 1 << 20, "1MiB": 1 << 20, "2G": 2 << 30, "1T": 1 << 40, "1MB": 1e6, "1kB": 1000} {
		if n, err := parseSize(s); err != nil || n != want {
			t.Errorf("%q: %d, %v", s, n, err)
		}
	}
	for _, s := range []string{"", "k", "-1", "+1", " 5", "5x", "0x10", "1e3", "99999999999999999999", "9999999T", "1 M"} {
		if n, err := parseSize(s); err == nil {
			t.Errorf("%q: %d", s, n)
		}
	}
}
