//go:build guest

package vmtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// A guestTest is a row of the table: what runs in a guest, and in which scenario. Rows of one scenario share a boot.
type guestTest struct {
	scenario Scenario
	pkg      string        // package whose compiled tests run, relative to the module's root; or
	script   string        // shell script of testdata/ that runs, with srp-initiator and target-emu in PATH when the module has them
	match    string        // -test.run pattern for pkg; empty: all its tests
	short    bool          // -test.short for pkg
	peer     bool          // run in the network namespace "peer"
	timeout  time.Duration // 0: five minutes
}

// guestTests is the list. Add a line for a package that needs a kernel's RDMA devices, SRP target or SRP initiator.
// Inside, a test finds VMTEST_GUEST=1 and REQUIRE_ALL=1; docs/testing.md says what each scenario has.
var guestTests = []guestTest{
	{scenario: RXE, pkg: "rdma/cm/ucm"},
	{scenario: RXE, pkg: "rdma", match: "TestKernelDevices"},
	{scenario: NetNS, pkg: "rdma/softroce", match: "TestKernelPeer"},
	{scenario: NetNS, pkg: "rdma/softroce", match: "TestLossyLoopback", peer: true},
	{scenario: NetNS4096, pkg: "rdma/softroce", match: "TestKernelPeer"},
	{scenario: RXE, pkg: "rdma/verbs/uverbs", match: "TestRXE"},
	{scenario: RXE4096, pkg: "rdma/verbs/uverbs", match: "TestRXE$/rxe1"},
	{scenario: SRPT, script: "kernel-pair.sh"},
	{scenario: NetNS4096SRPT, script: "refusals.sh"},
	{scenario: SRPT, pkg: "srp", match: "Negotiation|Inquiry|ReadWrite|Large|Channels|Load|Concurrently|SetMode|LoginLoop|NoAllocation", short: true, timeout: 10 * time.Minute},
	{scenario: SRPT, script: "initiator.sh", timeout: 10 * time.Minute},
	{scenario: SRPT, script: "modes.sh", timeout: 10 * time.Minute},
	{scenario: NetNS4096SRPT, script: "initiator.sh", timeout: 10 * time.Minute},
	{scenario: RXE, script: "kernel-initiator.sh"},
	{scenario: NetNS, script: "kernel-initiator.sh"},
	{scenario: NetNS4096, script: "kernel-initiator.sh"},
	{scenario: RXE4096, script: "iu-size.sh"}, // the last of its boot: it leaves the port taken
}

func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// compile builds test binaries and the module's commands for the guest and returns the files to put there.
func compile(t *testing.T) []File {
	t.Helper()
	dir := t.TempDir()
	var files []File
	static := func(args ...string) {
		cmd := exec.Command("go", args...)
		cmd.Dir = root(t)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH=amd64")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	for _, name := range []string{"srp-initiator", "target-emu"} {
		if _, err := os.Stat(filepath.Join(root(t), "cmd", name)); err == nil {
			out := filepath.Join(dir, name)
			static("build", "-o", out, "./cmd/"+name)
			files = append(files, File{out, "/usr/local/bin/" + name})
		}
	}
	done := map[string]bool{}
	for _, g := range guestTests {
		if g.pkg == "" || done[g.pkg] {
			continue
		}
		done[g.pkg] = true
		out := filepath.Join(dir, binary(g.pkg))
		static("test", "-c", "-o", out, "./"+strings.TrimPrefix(g.pkg, "./"))
		if _, err := os.Stat(out); err != nil {
			t.Fatalf("%s has no tests", g.pkg)
		}
		files = append(files, File{out, guestDir(g.pkg) + "/" + binary(g.pkg)})
		if data := filepath.Join(root(t), g.pkg, "testdata"); isDir(data) {
			files = append(files, File{data, guestDir(g.pkg) + "/testdata"})
		}
	}
	return append(files, File{"testdata", "/root/scripts"})
}

func isDir(p string) bool {
	st, err := os.Stat(p)
	return err == nil && st.IsDir()
}

// guestDir is where a package's tests run, with its testdata folder beside them as go test has it.
func guestDir(pkg string) string { return "/root/" + strings.TrimPrefix(pkg, "./") }
func binary(pkg string) string   { return filepath.Base(pkg) + ".test" }

func (g *guestTest) name() string {
	switch {
	case g.script != "":
		return g.script
	case g.peer:
		return "peer:" + g.pkg
	}
	return g.pkg
}

func (g *guestTest) program(out *bytes.Buffer) Program {
	timeout := g.timeout
	if timeout == 0 {
		timeout = 5 * time.Minute
	}
	p := Program{Name: g.name(), Timeout: timeout, Stdout: out}
	if g.peer {
		// By way of a shell: busybox's env would run its own ip.
		p.Argv = []string{"bash", "-c", `exec ip netns exec peer "$@"`, "peer"}
	}
	if g.script != "" {
		p.Argv = append(p.Argv, "bash", "/root/scripts/"+g.script)
		return p
	}
	p.Dir = guestDir(g.pkg)
	p.Argv = append(p.Argv, "./"+binary(g.pkg), "-test.v", fmt.Sprintf("-test.timeout=%s", timeout-5*time.Second))
	if g.match != "" {
		p.Argv = append(p.Argv, "-test.run="+g.match)
	}
	if g.short {
		p.Argv = append(p.Argv, "-test.short")
	}
	return p
}

var (
	passLine = regexp.MustCompile(`(?m)^\s*--- PASS: `)
	skipLine = regexp.MustCompile(`(?m)^\s*--- SKIP: .*(\n\s+.*)?`)
)

// TestGuest runs the table on each kernel. VMTEST_ONLY, a regular expression, chooses rows by "kernel/scenario/name".
func TestGuest(t *testing.T) {
	only, err := regexp.Compile(os.Getenv("VMTEST_ONLY"))
	if err != nil {
		t.Fatalf("VMTEST_ONLY: %v", err)
	}
	files := compile(t)
	chosen := 0
	for _, kernel := range Kernels {
		t.Run(kernel, func(t *testing.T) {
			for _, scenario := range Scenarios {
				var rows []guestTest
				for _, g := range guestTests {
					if g.scenario == scenario && only.MatchString(kernel+"/"+string(scenario)+"/"+g.name()) {
						rows = append(rows, g)
					}
				}
				chosen += len(rows)
				if len(rows) > 0 {
					t.Run(string(scenario), func(t *testing.T) { runRows(t, kernel, scenario, rows, files) })
				}
			}
		})
	}
	if chosen == 0 {
		t.Errorf("VMTEST_ONLY=%s matches no row", only)
	}
}

func runRows(t *testing.T, kernel string, scenario Scenario, rows []guestTest, files []File) {
	t.Helper()
	outs := make([]bytes.Buffer, len(rows))
	job := Job{Kernel: kernel, Scenario: scenario, Files: files, Log: func(s string) { t.Log(s) }}
	for i := range rows {
		job.Programs = append(job.Programs, rows[i].program(&outs[i]))
	}
	rs, bootErr := Run(t.Context(), job)
	for i := range rows {
		t.Run(rows[i].name(), func(t *testing.T) {
			out := outs[i].String()
			switch {
			case i >= len(rs):
				t.Fatalf("did not end: %v\n%s", bootErr, out)
			case rs[i].TimedOut:
				t.Fatalf("not finished after %v\n%s", rs[i].Elapsed, out)
			case rs[i].ExitCode != 0:
				t.Fatalf("exit code %d\n%s", rs[i].ExitCode, out)
			}
			if rows[i].pkg == "" {
				t.Logf("%.1f s", rs[i].Elapsed.Seconds())
				return
			}
			passed := len(passLine.FindAllString(out, -1))
			if passed == 0 {
				t.Fatalf("no test ran\n%s", out)
			}
			t.Logf("%d tests and subtests passed in %.1f s", passed, rs[i].Elapsed.Seconds())
			for _, s := range skipLine.FindAllString(out, -1) {
				t.Log(strings.TrimSpace(s))
			}
		})
	}
	if bootErr != nil {
		t.Error(bootErr)
	}
}

// TestPanic and TestHang prove that a dying and a stuck guest are told apart and from a failing program.
func TestPanic(t *testing.T) {
	var out bytes.Buffer
	_, err := Run(t.Context(), Job{Kernel: "6.12", Scenario: Net, Programs: []Program{
		{Argv: []string{"sh", "-c", "echo before; sleep 1; echo c >/proc/sysrq-trigger"}, Stdout: &out},
	}})
	var p *PanicError
	if !errors.As(err, &p) {
		t.Fatalf("error %v, want a PanicError", err)
	}
	if !strings.Contains(p.Tail, "sysrq") {
		t.Errorf("console's tail lacks the reason:\n%s", p.Tail)
	}
	if out.String() != "before\n" {
		t.Errorf("output before the panic: %q", out.String())
	}
}

func TestHang(t *testing.T) {
	console := filepath.Join(t.TempDir(), "console")
	_, err := Run(t.Context(), Job{Kernel: "6.1", Scenario: Net, Console: console, Timeout: 25 * time.Second, Programs: []Program{
		{Name: "sleeper", Argv: []string{"sleep", "1000"}, Timeout: time.Hour},
	}})
	var h *HangError
	if !errors.As(err, &h) {
		t.Fatalf("error %v, want a HangError", err)
	}
	if h.Running != "sleeper" {
		t.Errorf("running %q, want sleeper", h.Running)
	}
	if !strings.Contains(h.Tail, "sysrq: Show Blocked State") {
		t.Errorf("console's tail lacks the kernel's own report:\n%s", h.Tail)
	}
}

func TestProgram(t *testing.T) {
	dir := t.TempDir()
	in := filepath.Join(dir, "in")
	if err := os.WriteFile(in, []byte("carried\n"), 0o640); err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	rs, err := Run(ctx, Job{
		Kernel: "6.12", Scenario: None, OutDir: filepath.Join(dir, "out"),
		Files: []File{{in, "/data/deep/in"}},
		Programs: []Program{
			{Argv: []string{"sh", "-c", `cat /data/deep/in >$VMTEST_OUT/copy; echo "it's $X"; echo oops >&2; exit 7`}, Env: []string{"X=a 'b' $c"}, Stdout: &out, Stderr: &errOut},
			{Argv: []string{"sleep", "60"}, Timeout: 2 * time.Second},
			{Argv: []string{"true"}},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	got := []int{rs[0].ExitCode, rs[2].ExitCode}
	if !slices.Equal(got, []int{7, 0}) || !rs[1].TimedOut || rs[1].ExitCode == 0 || rs[0].TimedOut {
		t.Errorf("results %+v", rs)
	}
	if out.String() != "it's a 'b' $c\n" || errOut.String() != "oops\n" {
		t.Errorf("stdout %q, stderr %q", out.String(), errOut.String())
	}
	if data, err := os.ReadFile(filepath.Join(dir, "out", "copy")); err != nil || string(data) != "carried\n" {
		t.Errorf("file out of the guest: %q, %v", data, err)
	}
	if data, err := os.ReadFile(filepath.Join(dir, "out", "dmesg.txt")); err != nil || !bytes.Contains(data, []byte("Linux version 6.12")) {
		t.Errorf("kernel log: %d bytes, %v", len(data), err)
	}
}
