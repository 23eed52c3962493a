package vmtest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"syscall"
	"time"
)

// PanicError reports a guest whose kernel died.
type PanicError struct {
	Kernel  string
	Console string // path of the console log
	Tail    string // its last lines
}

func (e *PanicError) Error() string {
	return fmt.Sprintf("guest %s: kernel panic; console %s ends:\n%s", e.Kernel, e.Console, e.Tail)
}

// HangError reports a guest that did not end within its limit.
type HangError struct {
	Kernel  string
	Limit   time.Duration
	Running string // the program that was running; empty: the guest had not come that far
	Console string
	Tail    string
}

func (e *HangError) Error() string {
	what := "while running " + e.Running
	if e.Running == "" {
		what = "before its first program"
	}
	return fmt.Sprintf("guest %s: not finished after %v, %s; console %s ends:\n%s", e.Kernel, e.Limit, what, e.Console, e.Tail)
}

// ScenarioError reports a guest that could not set up its scenario.
type ScenarioError struct {
	Kernel   string
	Scenario Scenario
	Console  string
	Tail     string
}

func (e *ScenarioError) Error() string {
	return fmt.Sprintf("guest %s: scenario %s failed; console %s ends:\n%s", e.Kernel, e.Scenario, e.Console, e.Tail)
}

// errEmulator marks QEMU's own fault: while the kernel patches its text another emulated CPU may keep a stale
// breakpoint. It says nothing about the programs in the guest.
var errEmulator = errors.New("emulator fault: stale breakpoint (int3)")

var (
	int3Pattern  = regexp.MustCompile(`Oops: int3|int3: 0000|asm_exc_int3|exc_int3\+`)
	panicPattern = regexp.MustCompile(`Kernel panic - not syncing`)
)

// Run boots a guest, runs the job's programs in it and returns their results. A program that fails is not an
// error: see Result. Errors are MissingPackagesError, PanicError, HangError, ScenarioError, or one of the host.
// When the emulator's own fault ends a guest, Run says so and repeats the job once with Single set.
func Run(ctx context.Context, job Job) ([]Result, error) {
	if job.CPUs == 0 {
		job.CPUs = 2
	}
	if job.MemoryMB == 0 {
		job.MemoryMB = 3072
	}
	if job.Scenario == "" {
		job.Scenario = None
	}
	if err := EnsurePackages(ctx, os.Getenv("VMTEST_INSTALL") == "1", func(s string) { job.log("%s", s) }); err != nil {
		return nil, err
	}
	k, err := PrepareKernel(ctx, job.Kernel, os.Getenv("VMTEST_INSTALL") == "1", func(s string) { job.log("%s", s) })
	if err != nil {
		return nil, err
	}
	if job.Console == "" {
		cache, err := CacheDir()
		if err != nil {
			return nil, err
		}
		job.Console = filepath.Join(cache, "console-"+job.Kernel+".log")
	}
	unlock, err := lockFile(ctx, "guest.lock", func() { job.log("waiting for another guest to end") })
	if err != nil {
		return nil, err
	}
	defer unlock()
	image, err := buildInitramfs(ctx, k, func(s string) { job.log("%s", s) })
	if err != nil {
		return nil, err
	}
	rs, err := job.boot(ctx, k, image)
	if errors.Is(err, errEmulator) && !job.Single {
		job.log("%v; repeating with emulated CPUs taking turns", err)
		job.Single = true
		rs, err = job.boot(ctx, k, image)
	}
	return rs, err
}

func (j *Job) boot(ctx context.Context, k *Kernel, image string) ([]Result, error) {
	dir, err := os.MkdirTemp("", "vmtest-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	share := filepath.Join(dir, "host")
	if err := j.layout(share); err != nil {
		return nil, err
	}
	console, err := os.Create(j.Console)
	if err != nil {
		return nil, err
	}
	defer console.Close()

	qmp := filepath.Join(dir, "qmp")
	qemu, err := lookPath("qemu-system-x86_64")
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(qemu, j.qemuArgs(k, image, share, qmp)...)
	cmd.Stdout, cmd.Stderr = console, console
	if j.Shell {
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	} else {
		stdin, err := cmd.StdinPipe()
		if err != nil {
			return nil, err
		}
		defer stdin.Close()
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	exited := make(chan error, 1)
	started := make(chan error, 1)
	go func() {
		// Pdeathsig fires when the starting thread ends, so that thread must last as long as QEMU.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			exited <- cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	mode := "parallel"
	if j.Single {
		mode = "taking turns"
	}
	j.log("booted %s (%d CPUs %s), scenario %s, console %s", k.Version, j.CPUs, mode, j.Scenario, j.Console)

	follow := newFollower(j, share)
	limit := time.NewTimer(j.timeout())
	defer limit.Stop()
	if j.Shell {
		limit.Stop()
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	watch := &consoleWatch{path: j.Console}
	var qemuErr error
	hung := false
	for running := true; running; {
		select {
		case qemuErr = <-exited:
			running = false
		case <-tick.C:
			follow.step()
			if watch.sees(int3Pattern) && !j.Shell {
				// It may print on for a while, but nothing that follows can be trusted.
				time.Sleep(time.Second)
				cmd.Process.Kill()
				<-exited
				running = false
			}
		case <-limit.C:
			hung = true
			askKernel(qmp)
			cmd.Process.Kill()
			<-exited
			running = false
		case <-ctx.Done():
			cmd.Process.Kill()
			<-exited
			return nil, ctx.Err()
		}
	}
	follow.step()
	rs := j.results(share)
	if j.OutDir != "" {
		if err := j.collect(share); err != nil {
			return rs, err
		}
	}
	_, doneErr := os.Stat(filepath.Join(share, "done"))
	switch {
	case j.Shell:
		return rs, nil
	case watch.sees(int3Pattern):
		return rs, errEmulator
	case watch.sees(panicPattern):
		return rs, &PanicError{j.Kernel, j.Console, watch.tail(60)}
	case hung:
		running := ""
		if _, err := os.Stat(filepath.Join(share, "out", "scenario")); err == nil && len(rs) < len(j.Programs) {
			running = j.Programs[len(rs)].name()
		}
		return rs, &HangError{j.Kernel, j.timeout(), running, j.Console, watch.tail(80)}
	case doneErr != nil:
		return rs, fmt.Errorf("guest %s ended early (QEMU: %v); console %s ends:\n%s", j.Kernel, qemuErr, j.Console, watch.tail(40))
	}
	if _, err := os.Stat(filepath.Join(share, "out", "scenario")); err != nil {
		return rs, &ScenarioError{j.Kernel, j.Scenario, j.Console, watch.tail(20)}
	}
	if len(rs) != len(j.Programs) {
		return rs, fmt.Errorf("guest %s: %d results of %d programs; console %s ends:\n%s", j.Kernel, len(rs), len(j.Programs), j.Console, watch.tail(20))
	}
	return rs, nil
}

func (j *Job) qemuArgs(k *Kernel, image, share, qmp string) []string {
	threads := "multi"
	if j.Single {
		threads = "single"
	}
	serial := "stdio,id=con,signal=off"
	if j.Shell {
		serial = "stdio,id=con,signal=off,mux=on"
	}
	args := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-accel", "tcg,thread=" + threads,
		// Without erms and fsrm the kernel copies by loops: the emulator runs "rep movsb" slowly.
		"-cpu", "max,-erms,-fsrm",
		"-smp", strconv.Itoa(j.CPUs), "-m", strconv.Itoa(j.MemoryMB),
		"-kernel", k.Image, "-initrd", image,
		"-append", "console=ttyS0 panic=-1 oops=panic mitigations=off nokaslr quiet random.trust_cpu=on sysrq_always_enabled",
		"-chardev", serial, "-serial", "chardev:con",
		"-qmp", "unix:" + qmp + ",server=on,wait=off",
		"-fsdev", "local,id=host,path=" + share + ",security_model=none", "-device", "virtio-9p-pci,fsdev=host,mount_tag=host",
		// A NIC without a peer never completes its sends; restrict=on keeps the guest from any other network.
		"-netdev", "user,id=net,restrict=on", "-device", "virtio-net-pci,netdev=net,mac=52:54:00:12:34:56,romfile=",
		"-device", "virtio-rng-pci",
	}
	if j.Shell {
		args = append(args, "-mon", "chardev=con,mode=readline")
	}
	return args
}

// collect copies what the programs left and the kernel log to OutDir.
func (j *Job) collect(share string) error {
	if err := copyTree(j.OutDir, filepath.Join(share, "out", "files")); err != nil {
		return err
	}
	dmesg := filepath.Join(share, "out", "dmesg.txt")
	if _, err := os.Stat(dmesg); err != nil {
		return nil // the guest died before
	}
	return copyTree(filepath.Join(j.OutDir, "dmesg.txt"), dmesg)
}

// A follower passes the programs' output on while it grows.
type follower struct {
	files []*followed
}

type followed struct {
	path string
	off  int64
	w    io.Writer
}

func newFollower(j *Job, share string) *follower {
	f := &follower{}
	for i := range j.Programs {
		p := &j.Programs[i]
		base := filepath.Join(share, "out", strconv.Itoa(i))
		if p.Stdout != nil {
			f.files = append(f.files, &followed{path: base + ".stdout", w: p.Stdout})
		}
		if p.Stderr != nil {
			f.files = append(f.files, &followed{path: base + ".stderr", w: p.Stderr})
		}
	}
	return f
}

func (f *follower) step() {
	for _, d := range f.files {
		st, err := os.Stat(d.path)
		if err != nil || st.Size() <= d.off {
			continue
		}
		file, err := os.Open(d.path)
		if err != nil {
			continue
		}
		n, _ := io.Copy(d.w, io.NewSectionReader(file, d.off, st.Size()-d.off))
		d.off += n
		file.Close()
	}
}

// consoleWatch looks for patterns in the console log as it grows.
type consoleWatch struct {
	path string
	size int64
	text []byte
}

func (c *consoleWatch) sees(re *regexp.Regexp) bool {
	if st, err := os.Stat(c.path); err == nil && st.Size() != c.size {
		if data, err := os.ReadFile(c.path); err == nil {
			c.text, c.size = data, int64(len(data))
		}
	}
	return re.Match(c.text)
}

func (c *consoleWatch) tail(lines int) string {
	data, err := os.ReadFile(c.path)
	if err != nil {
		return err.Error()
	}
	data = bytes.TrimSpace(bytes.ReplaceAll(data, []byte("\r"), nil))
	for i := len(data) - 1; i >= 0; i-- {
		if data[i] == '\n' {
			if lines--; lines == 0 {
				return string(data[i+1:])
			}
		}
	}
	return string(data)
}

// askKernel makes a hung guest's kernel print its blocked tasks and what its CPUs do (SysRq w and l) on the console. Best effort: a dead kernel prints nothing.
func askKernel(qmp string) {
	conn, err := net.DialTimeout("unix", qmp, time.Second)
	if err != nil {
		return
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	dec := json.NewDecoder(conn)
	enc := json.NewEncoder(conn)
	var answer json.RawMessage
	if dec.Decode(&answer) != nil { // greeting
		return
	}
	execute := func(command string, args map[string]any) {
		m := map[string]any{"execute": command}
		if args != nil {
			m["arguments"] = args
		}
		if enc.Encode(m) == nil {
			dec.Decode(&answer)
		}
	}
	execute("qmp_capabilities", nil)
	for _, key := range []string{"w", "l"} {
		keys := []map[string]any{}
		for _, k := range []string{"alt", "sysrq", key} {
			keys = append(keys, map[string]any{"type": "qcode", "data": k})
		}
		execute("send-key", map[string]any{"keys": keys})
		time.Sleep(3 * time.Second)
	}
}
