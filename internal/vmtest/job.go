package vmtest

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Scenario names the devices and targets that a guest sets up before its programs run: a function scenario_NAME
// of guest/guest.sh, which says there what each one has.
type Scenario string

// Scenarios of guest/guest.sh.
const (
	None          Scenario = "none"           // nothing
	Net           Scenario = "net"            // eth0
	RXE           Scenario = "rxe"            // rxe0 on eth0, path MTU 1024
	RXE4096       Scenario = "rxe4096"        // and rxe1 on a dummy netdev, path MTU 4096
	SRPT          Scenario = "srpt"           // rxe0 and ib_srpt with LUNs 0, 1 and 300
	NetNS         Scenario = "netns"          // rxe1 on a veth pair into the namespace "peer", path MTU 1024
	NetNS4096     Scenario = "netns4096"      // the same with path MTU 4096
	NetNSSRPT     Scenario = "netns_srpt"     // netns and ib_srpt
	NetNS4096SRPT Scenario = "netns4096_srpt" // netns4096 and ib_srpt
)

// Scenarios lists all of them.
var Scenarios = []Scenario{None, Net, RXE, RXE4096, SRPT, NetNS, NetNS4096, NetNSSRPT, NetNS4096SRPT}

// File is copied into the guest before it runs anything; a folder with all below it.
type File struct {
	Host  string
	Guest string // absolute path
}

// Program is run in the guest as root.
type Program struct {
	Name    string // for messages; default: the last element of Argv[0]
	Argv    []string
	Dir     string        // where it runs; default /root
	Env     []string      // KEY=VALUE, added to the guest's
	Timeout time.Duration // 0: ten minutes; then it gets SIGQUIT, so that Go programs print their goroutines, and 10 s later SIGKILL

	// Stdout and Stderr get the program's output while it runs. A nil Stderr joins Stdout, a nil Stdout is dropped.
	Stdout, Stderr io.Writer
}

// Job is one boot of a guest.
type Job struct {
	Kernel   string // "6.1" or "6.12"
	Scenario Scenario
	Files    []File
	Programs []Program
	Shell    bool // after the programs an interactive shell on this process's terminal

	// OutDir, when not empty, is a folder of the host that gets what programs leave in $VMTEST_OUT, and the guest's kernel log as dmesg.txt.
	OutDir string
	// Console is the file that gets the guest's console; default: console-KERNEL.log in the cache folder. It is kept.
	Console string

	CPUs     int // default 2
	MemoryMB int // default 3072
	// Single lets the emulator's CPUs take turns instead of running in parallel: slower for pollers, but free of the emulator's fault.
	Single bool
	// Timeout limits the whole boot; 0: the sum of the programs' limits and three minutes.
	Timeout time.Duration

	// Log gets a line per step; nil: dropped.
	Log func(string)
}

// Result is what a program left.
type Result struct {
	Name     string
	ExitCode int
	Elapsed  time.Duration // guest's clock
	TimedOut bool
}

func (j *Job) log(format string, args ...any) {
	if j.Log != nil {
		j.Log(fmt.Sprintf(format, args...))
	}
}

func (p *Program) name() string {
	if p.Name != "" {
		return p.Name
	}
	return path.Base(p.Argv[0])
}

func (p *Program) timeout() time.Duration {
	if p.Timeout > 0 {
		return p.Timeout
	}
	return 10 * time.Minute
}

func (j *Job) timeout() time.Duration {
	if j.Timeout > 0 {
		return j.Timeout
	}
	d := 3 * time.Minute
	for i := range j.Programs {
		d += j.Programs[i].timeout() + 10*time.Second
	}
	return d
}

// script is the guest's job.sh. The subshell keeps a failing scenario from ending PID 1.
func (j *Job) script() string {
	var b strings.Builder
	fmt.Fprintf(&b, "export VMTEST_GUEST=1 REQUIRE_ALL=1 VMTEST_KERNEL=%s VMTEST_SCENARIO=%s VMTEST_OUT=/host/out/files\n", j.Kernel, j.Scenario)
	b.WriteString("(\n")
	fmt.Fprintf(&b, "scenario_%s\necho ok >/host/out/scenario\n", strings.ReplaceAll(string(j.Scenario), "-", "_"))
	for i := range j.Programs {
		p := &j.Programs[i]
		fmt.Fprintf(&b, "echo 'vmtest: running '%s\n", quote(p.name()))
		errTo := "2>&1"
		if p.Stderr != nil {
			errTo = fmt.Sprintf("2>/host/out/%d.stderr", i)
		}
		dir := p.Dir
		if dir == "" {
			dir = "/root"
		}
		fmt.Fprintf(&b, "cd %s\n", quote(dir))
		b.WriteString("read -r t0 rest </proc/uptime\n")
		fmt.Fprintf(&b, "timeout -s QUIT -k 10 %d env", int(p.timeout().Seconds()))
		for _, e := range p.Env {
			b.WriteString(" " + quote(e))
		}
		for _, a := range p.Argv {
			b.WriteString(" " + quote(a))
		}
		fmt.Fprintf(&b, " </dev/null >/host/out/%d.stdout %s\n", i, errTo)
		fmt.Fprintf(&b, "rc=$?; read -r t1 rest </proc/uptime; echo \"$rc $t0 $t1\" >/host/out/%d.rc\n", i)
	}
	if j.Shell {
		b.WriteString("dmesg -n 8; echo 'Guest shell: guestctl lists the library, /host is shared, poweroff -f or Ctrl-A x ends it.'\n")
		b.WriteString(". /usr/lib/guest.sh; setsid cttyhack sh\n")
	}
	b.WriteString(")\n")
	return b.String()
}

// quote makes s one word of the shell.
func quote(s string) string {
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// layout fills the folder that the guest mounts on /host.
func (j *Job) layout(share string) error {
	for _, d := range []string{"files", "out/files"} {
		if err := os.MkdirAll(filepath.Join(share, d), 0o755); err != nil {
			return err
		}
	}
	for _, f := range j.Files {
		if !path.IsAbs(f.Guest) {
			return fmt.Errorf("file %s:%s: the guest's path must be absolute", f.Host, f.Guest)
		}
		if err := copyTree(filepath.Join(share, "files", path.Clean(f.Guest)), f.Host); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(share, "job.sh"), []byte(j.script()), 0o644)
}

// copyTree copies a file or folder, following links.
func copyTree(dst, src string) error {
	st, err := os.Stat(src)
	if err != nil {
		return err
	}
	if !st.IsDir() {
		return copyFile(dst, src, st.Mode().Perm())
	}
	return filepath.WalkDir(src, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(src, p)
		if err != nil {
			return err
		}
		if d.IsDir() {
			return os.MkdirAll(filepath.Join(dst, rel), 0o755)
		}
		st, err := os.Stat(p)
		if err != nil {
			return err
		}
		return copyFile(filepath.Join(dst, rel), p, st.Mode().Perm())
	})
}

func copyFile(dst, src string, mode fs.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
		return err
	}
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(dst, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	return err
}

// results reads what the guest wrote; it stops at the first program without a result.
func (j *Job) results(share string) []Result {
	var rs []Result
	for i := range j.Programs {
		p := &j.Programs[i]
		data, err := os.ReadFile(filepath.Join(share, "out", strconv.Itoa(i)+".rc"))
		if err != nil {
			break
		}
		var rc int
		var t0, t1 float64
		if _, err := fmt.Sscan(string(data), &rc, &t0, &t1); err != nil {
			break
		}
		elapsed := time.Duration((t1 - t0) * float64(time.Second))
		rs = append(rs, Result{Name: p.name(), ExitCode: rc, Elapsed: elapsed, TimedOut: elapsed >= p.timeout().Truncate(time.Second)})
	}
	return rs
}
