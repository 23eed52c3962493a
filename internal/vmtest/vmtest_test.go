package vmtest

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"srp-initiator/internal/require"
	"time"
)

func TestCompareNumbers(t *testing.T) {
	names := []string{"linux-image-6.12.107+deb12-amd64", "linux-image-6.12.9+deb12-amd64", "linux-image-6.12.117+deb12-amd64"}
	if got := slices.MaxFunc(names, compareNumbers); got != names[2] {
		t.Errorf("newest is %s", got)
	}
}

func TestPackagePatterns(t *testing.T) {
	for name, series := range map[string]string{
		"linux-image-6.1.0-57-amd64":                "6.1",
		"linux-image-6.12.117+deb12-amd64":          "6.12",
		"linux-image-6.1.0-57-amd64-unsigned":       "",
		"linux-image-6.12.117+deb12-cloud-amd64":    "",
		"linux-image-6.12.117+deb12-amd64-unsigned": "",
		"linux-image-6.1.0-57-rt-amd64":             "",
	} {
		for s, re := range packageOf {
			if re.MatchString(name) != (s == series) {
				t.Errorf("%s taken for a kernel of series %s: %v", name, s, s != series)
			}
		}
	}
}

// TestMissingPackages: without a PATH the tools of /usr/bin are missing; the message is a command that installs their packages.
func TestMissingPackages(t *testing.T) {
	t.Setenv("PATH", "")
	err := EnsurePackages(t.Context(), false, func(string) { t.Error("something was installed") })
	var missing *MissingPackagesError
	if !errors.As(err, &missing) {
		t.Fatalf("error %v", err)
	}
	for _, p := range []string{"qemu-system-x86", "fio", "sg3-utils"} {
		if !slices.Contains(missing.Packages, p) || strings.Count(err.Error(), " "+p) != 1 {
			t.Errorf("%s is not named once in %q", p, err)
		}
	}
}

func TestQuote(t *testing.T) {
	for _, s := range []string{"", "plain", "it's", `a "b" $c \d`, "two\nlines", "''"} {
		out, err := exec.Command("sh", "-c", "printf %s "+quote(s)).Output()
		if err != nil || string(out) != s {
			t.Errorf("%q came out of the shell as %q (%v)", s, out, err)
		}
	}
}

// TestScript: the guest's script is valid shell, and a failing scenario cannot end PID 1.
func TestScript(t *testing.T) {
	j := Job{Kernel: "6.1", Scenario: NetNS4096SRPT, Programs: []Program{
		{Argv: []string{"sh", "-c", "echo 'x' | cat"}, Env: []string{"A=b c"}, Stderr: new(bytes.Buffer), Timeout: time.Second},
		{Argv: []string{"/usr/bin/true"}, Dir: "/a b"},
	}, Shell: true}
	cmd := exec.Command("sh", "-n")
	cmd.Stdin = strings.NewReader(j.script())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s\n%s", err, out, j.script())
	}
	cmd = exec.Command("sh", "-c", "scenario_netns4096_srpt() { exit 1; }\n"+j.script()+"echo alive")
	out, err := cmd.CombinedOutput()
	if err != nil || string(out) != "alive\n" {
		t.Fatalf("after a failing scenario: %v, %q", err, out)
	}
}

// TestGuestScripts: every scenario that Go knows exists in the library, the other way round, and the scripts are valid shell.
func TestGuestScripts(t *testing.T) {
	for _, name := range []string{"init", "guest.sh", "guestctl"} {
		data, err := guestScripts.ReadFile("guest/" + name)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("sh", "-n")
		cmd.Stdin = bytes.NewReader(data)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", name, err, out)
		}
		if name != "guest.sh" {
			continue
		}
		for _, s := range Scenarios {
			if !bytes.Contains(data, []byte("\nscenario_"+string(s)+"() {")) {
				t.Errorf("guest.sh has no scenario %s", s)
			}
		}
		if n := bytes.Count(data, []byte("\nscenario_")); n != len(Scenarios) {
			t.Errorf("guest.sh has %d scenarios, Go knows %d", n, len(Scenarios))
		}
	}
	scripts, err := filepath.Glob("testdata/*.sh")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, s := range scripts {
		if out, err := exec.Command("bash", "-n", s).CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", s, err, out)
		}
	}
}

// TestFaultPatterns: what ends a guest is told apart by its console.
func TestFaultPatterns(t *testing.T) {
	for line, want := range map[string]string{
		"[   7.1] Oops: int3: 0000 [#1] PREEMPT SMP NOPTI":                      "emulator",
		"[  29.0]  asm_exc_int3+0x3a/0x40":                                      "emulator",
		"[   9.2] Kernel panic - not syncing: sysrq triggered crash":            "panic",
		"[   9.2] ib_srpt receiving failed for ioctx 00000000c304c5f1 with st":  "",
		"[  12.2] BUG: kernel NULL pointer dereference, address: 0000000000000": "",
	} {
		got := ""
		if int3Pattern.MatchString(line) {
			got = "emulator"
		} else if panicPattern.MatchString(line) {
			got = "panic"
		}
		if got != want {
			t.Errorf("%q taken for %q, want %q", line, got, want)
		}
	}
}

func TestConsoleTail(t *testing.T) {
	p := filepath.Join(t.TempDir(), "console")
	if err := os.WriteFile(p, []byte("a\r\nb\r\nc\r\n\r\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	w := consoleWatch{path: p}
	if got := w.tail(2); got != "b\nc" {
		t.Errorf("tail %q", got)
	}
	if got := w.tail(20); got != "a\nb\nc" {
		t.Errorf("tail %q", got)
	}
}

// TestLock: a second guest waits for the first, says so, and gives up when its context ends.
func TestLock(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	unlock, err := lockFile(t.Context(), "x.lock", nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	said := false
	if _, err := lockFile(ctx, "x.lock", func() { said = true; cancel() }); !errors.Is(err, context.Canceled) || !said {
		t.Fatalf("second holder: %v, said %v", err, said)
	}
	unlock()
	again, err := lockFile(t.Context(), "x.lock", nil)
	if err != nil {
		t.Fatal(err)
	}
	again()
}

// TestArchive compares what a foreign cpio reads with what was put in.
func TestArchive(t *testing.T) {
	cpio, err := exec.LookPath("busybox")
	if err != nil {
		require.Missing(t, "busybox (Debian package busybox-static)")
	}
	dir := t.TempDir()
	src := filepath.Join(dir, "src")
	if err := os.WriteFile(src, []byte("from the host"), 0o751); err != nil {
		t.Fatal(err)
	}
	a := newArchive()
	a.bytes("etc/deep/conf", 0o640, []byte("abc"))
	a.link("lib", "usr/lib")
	a.add("usr/lib/x", entry{mode: modeFile | 0o751, source: src})
	var b bytes.Buffer
	if err := a.writeTo(&b); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "out")
	if err := os.Mkdir(out, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(cpio, "cpio", "-i", "-d")
	cmd.Dir, cmd.Stdin = out, &b
	if msg, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cpio: %v: %s", err, msg)
	}
	for name, want := range map[string]string{"etc/deep/conf": "abc", "usr/lib/x": "from the host", "lib/x": "from the host"} {
		got, err := os.ReadFile(filepath.Join(out, name))
		if err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if st, err := os.Stat(filepath.Join(out, "usr/lib/x")); err != nil || st.Mode().Perm() != 0o751 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	d1, err := a.digest()
	if err != nil {
		t.Fatal(err)
	}
	a.bytes("etc/deep/conf", 0o640, []byte("abd"))
	if d2, _ := a.digest(); d1 == d2 {
		t.Error("another content has the same digest")
	}
}
