package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// command makes a command that runs on CPU cpu when that is not negative.
func command(ctx context.Context, cpu int, name string, args ...string) *exec.Cmd {
	if cpu >= 0 {
		args = append([]string{"-c", strconv.Itoa(cpu), name}, args...)
		name = "taskset"
	}
	c := exec.CommandContext(ctx, name, args...)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return c
}

// output runs a command and returns what it printed and the CPU time it took.
func output(c *exec.Cmd) (string, time.Duration, error) {
	var out, errb bytes.Buffer
	c.Stdout, c.Stderr = &out, &errb
	c.WaitDelay = 5 * time.Second
	if err := c.Run(); err != nil {
		return "", 0, fmt.Errorf("%s: %w: %s", strings.Join(c.Args, " "), err, strings.TrimSpace(errb.String()))
	}
	return out.String(), c.ProcessState.UserTime() + c.ProcessState.SystemTime(), nil
}

// cpuOf is the CPU time a process has used so far (proc(5), stat: utime, stime in ticks of 1/100 s).
func cpuOf(pid int) time.Duration {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	u, _ := strconv.ParseInt(f[11], 10, 64)
	s, _ := strconv.ParseInt(f[12], 10, 64)
	return time.Duration(u+s) * 10 * time.Millisecond
}

// cpuOfMachine is the CPU time that all CPUs were not idle.
func cpuOfMachine() time.Duration {
	b, _ := os.ReadFile("/proc/stat")
	line, _, _ := strings.Cut(string(b), "\n")
	var total int64
	for i, f := range strings.Fields(line)[1:] {
		if i == 3 || i == 4 || i >= 8 { // idle, iowait, guest
			continue
		}
		n, _ := strconv.ParseInt(f, 10, 64)
		total += n
	}
	return time.Duration(total) * 10 * time.Millisecond
}

// server is a process that serves until stopped.
type server struct {
	cmd *exec.Cmd
}

func (s *server) pid() int { return s.cmd.Process.Pid }

func (s *server) stop() {
	if s.cmd != nil && s.cmd.Process != nil {
		s.cmd.Process.Signal(syscall.SIGTERM)
		done := make(chan struct{})
		go func() { s.cmd.Wait(); close(done) }()
		select {
		case <-done:
		case <-time.After(3 * time.Second):
			s.cmd.Process.Kill()
			<-done
		}
		s.cmd = nil
	}
}

// freePort is a TCP port of loopback that nobody has just now.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

func awaitPort(port int) error {
	for range 100 {
		if c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			c.Close()
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("nothing listens on port %d", port)
}

const diskSize = 256 << 20

// iscsi is tgt with one I/O thread, driven by libiscsi's iscsi-perf.
type iscsi struct {
	label, store string // store: rdwr or null
	srv          server
	port, ctl    int
	dir          string
	cpu          int
}

func (c *iscsi) name() string { return c.label }

func (c *iscsi) start(ctx context.Context, cpu int) (err error) {
	c.cpu = cpu
	if c.port, err = freePort(); err != nil {
		return err
	}
	c.ctl = c.port % 10000
	if c.dir, err = os.MkdirTemp("/dev/shm", "versus"); err != nil {
		return err
	}
	img := filepath.Join(c.dir, "lun")
	f, err := os.Create(img)
	if err != nil {
		return err
	}
	defer f.Close()
	if c.store == "null" {
		err = f.Truncate(diskSize)
	} else {
		// Written, not a hole: reading a hole would be too easy.
		b := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
		for range diskSize / len(b) {
			if _, err = f.Write(b); err != nil {
				break
			}
		}
	}
	if err != nil {
		return err
	}
	c.srv.cmd = command(ctx, cpu, "tgtd", "-f", "-t", "1", "-C", strconv.Itoa(c.ctl), "--iscsi", fmt.Sprintf("portal=127.0.0.1:%d", c.port))
	if err := c.srv.cmd.Start(); err != nil {
		return err
	}
	if err := awaitPort(c.port); err != nil {
		return err
	}
	for _, a := range [][]string{
		{"--op", "new", "--mode", "target", "--tid", "1", "-T", "iqn.2026-11.example:t1"},
		{"--op", "new", "--mode", "logicalunit", "--tid", "1", "--lun", "1", "-b", img, "--bstype", c.store},
		{"--op", "bind", "--mode", "target", "--tid", "1", "-I", "ALL"},
	} {
		if _, _, err := output(exec.CommandContext(ctx, "tgtadm", append([]string{"-C", strconv.Itoa(c.ctl), "--lld", "iscsi"}, a...)...)); err != nil {
			return err
		}
	}
	return nil
}

var iscsiAverage = regexp.MustCompile(`iops average (\d+)`)

func (c *iscsi) run(ctx context.Context, p point, span time.Duration) (sample, error) {
	secs := max(1, int(span.Round(time.Second)/time.Second))
	args := []string{"-m", strconv.Itoa(p.qd), "-b", strconv.Itoa(p.bs / 512), "-t", strconv.Itoa(secs)}
	if p.rw == "randread" {
		args = append(args, "-r")
	}
	before := cpuOf(c.srv.pid())
	out, cpu, err := output(command(ctx, c.cpu, "iscsi-perf", append(args, fmt.Sprintf("iscsi://127.0.0.1:%d/iqn.2026-11.example:t1/1", c.port))...))
	if err != nil {
		return sample{}, err
	}
	m := iscsiAverage.FindAllStringSubmatch(out, -1)
	if len(m) == 0 {
		return sample{}, fmt.Errorf("iscsi-perf printed no average: %q", out)
	}
	iops, _ := strconv.ParseFloat(m[len(m)-1][1], 64)
	return sample{IOPS: iops, CPU: perIO(cpu+cpuOf(c.srv.pid())-before, iops*float64(secs))}, nil
}

func perIO(cpu time.Duration, ios float64) float64 {
	if ios == 0 {
		return 0
	}
	return float64(cpu.Microseconds()) / ios
}

func (c *iscsi) stop() {
	c.srv.stop()
	os.RemoveAll(c.dir)
}

// nbd is nbdkit's memory plugin, driven by fio's nbd engine.
type nbd struct {
	label string
	args  []string
	srv   server
	port  int
	cpu   int
}

func (c *nbd) name() string { return c.label }

func (c *nbd) start(ctx context.Context, cpu int) (err error) {
	c.cpu = cpu
	if c.port, err = freePort(); err != nil {
		return err
	}
	c.srv.cmd = command(ctx, cpu, "nbdkit", append(c.args, "-f", "-i", "127.0.0.1", "-p", strconv.Itoa(c.port), "memory", strconv.Itoa(diskSize))...)
	if err := c.srv.cmd.Start(); err != nil {
		return err
	}
	if err := awaitPort(c.port); err != nil {
		return err
	}
	// Fill it, for the same reason as iSCSI's file.
	_, _, err = output(command(ctx, cpu, "fio", "--name=fill", "--ioengine=nbd", c.uri(), "--rw=write", "--bs=1m", "--size="+strconv.Itoa(diskSize)))
	return err
}

func (c *nbd) uri() string { return fmt.Sprintf("--uri=nbd://127.0.0.1:%d/", c.port) }

func (c *nbd) run(ctx context.Context, p point, span time.Duration) (sample, error) {
	before := cpuOf(c.srv.pid())
	s, err := fio(command(ctx, c.cpu, "fio", append(fioArgs(p, span), "--ioengine=nbd", c.uri())...))
	if err != nil {
		return s, err
	}
	s.CPU += perIO(cpuOf(c.srv.pid())-before, s.IOPS*span.Seconds())
	return s, nil
}

func (c *nbd) stop() { c.srv.stop() }

func fioArgs(p point, span time.Duration) []string {
	return []string{"--name=a", "--rw=" + p.rw, "--bs=" + strconv.Itoa(p.bs), "--iodepth=" + strconv.Itoa(p.qd),
		"--time_based", fmt.Sprintf("--runtime=%dms", span.Milliseconds()), "--output-format=json"}
}

// fio runs fio; the CPU time is that of its job.
func fio(c *exec.Cmd) (sample, error) {
	out, _, err := output(c)
	if err != nil {
		return sample{}, err
	}
	i := strings.IndexByte(out, '{')
	var r struct {
		Jobs []struct {
			Read struct {
				IOPS     float64
				TotalIOs int64 `json:"total_ios"`
				Runtime  int64
			}
			UsrCPU  float64 `json:"usr_cpu"`
			SysCPU  float64 `json:"sys_cpu"`
			Runtime int64   `json:"job_runtime"`
		}
	}
	if i < 0 || json.Unmarshal([]byte(out[i:]), &r) != nil || len(r.Jobs) != 1 {
		return sample{}, fmt.Errorf("fio printed no result: %q", out)
	}
	j := r.Jobs[0]
	cpu := time.Duration((j.UsrCPU + j.SysCPU) / 100 * float64(j.Runtime) * 1e6)
	return sample{IOPS: j.Read.IOPS, CPU: perIO(cpu, float64(j.Read.TotalIOs))}, nil
}

// limit is the raw program.
type limit struct {
	label, wait, bin string
	cpu              int
}

func (c *limit) name() string                         { return c.label }
func (c *limit) start(_ context.Context, n int) error { c.cpu = n; return nil }
func (c *limit) stop()                                {}

func (c *limit) run(ctx context.Context, p point, span time.Duration) (sample, error) {
	out, _, err := output(command(ctx, c.cpu, c.bin, "--bs", strconv.Itoa(p.bs), "--qd", strconv.Itoa(p.qd), "--wait", c.wait, "--time", span.String()))
	if err != nil {
		return sample{}, err
	}
	var s sample
	return s, json.Unmarshal([]byte(out), &s)
}

// srp is target-emu and srp-initiator over softroce; or with a target given, srp-initiator alone.
type srp struct {
	label            string
	bin              string
	mode, targetMode string
	target           string // of somebody else
	whole            bool   // count the whole machine's CPU time
	srv              server
	cpu              int
}

func (c *srp) name() string { return c.label }

func (c *srp) start(ctx context.Context, cpu int) error {
	c.cpu = cpu
	if c.whole {
		return nil
	}
	c.srv.cmd = command(ctx, cpu, filepath.Join(c.bin, "target-emu"), "--lun", fmt.Sprintf("0=ram:%d", diskSize), "--completion", c.targetMode)
	c.srv.cmd.Stderr = os.Stderr
	out, err := c.srv.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.srv.cmd.Start(); err != nil {
		return err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return fmt.Errorf("target-emu printed no target: %w", err)
	}
	c.target = strings.TrimSpace(line) + ",max_sect=2048"
	return nil
}

func (c *srp) run(ctx context.Context, p point, span time.Duration) (sample, error) {
	cpuBefore := func() time.Duration {
		if c.whole {
			return cpuOfMachine()
		}
		return cpuOf(c.srv.pid())
	}
	target := c.target
	if p.qd > 62 {
		target += ",queue_size=" + strconv.Itoa(min(p.qd, 126))
	}
	before := cpuBefore()
	out, cpu, err := output(command(ctx, c.cpu, filepath.Join(c.bin, "srp-initiator"), "bench", target, "--rw", p.rw, "--bs", strconv.Itoa(p.bs),
		"--iodepth", strconv.Itoa(p.qd), "--runtime", span.String(), "--ramp-time", "0s", "--completion", c.mode, "--json"))
	if err != nil {
		return sample{}, err
	}
	var r struct {
		IOPS     float64
		Commands float64
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		return sample{}, err
	}
	used := cpuBefore() - before
	if !c.whole {
		used += cpu
	}
	return sample{IOPS: r.IOPS, CPU: perIO(used, r.Commands)}, nil
}

func (c *srp) stop() { c.srv.stop() }

func peers(bin string) []contestant {
	lim := filepath.Join(bin, "limit")
	return []contestant{
		&iscsi{label: "iSCSI tgt tmpfs", store: "rdwr"},
		&iscsi{label: "iSCSI tgt null", store: "null"},
		&nbd{label: "NBD nbdkit"},
		&nbd{label: "NBD nbdkit -t 1", args: []string{"-t", "1"}},
		&srp{label: "SRP interrupt", bin: bin, mode: "interrupt", targetMode: "interrupt"},
		&srp{label: "SRP adaptive", bin: bin, mode: "adaptive", targetMode: "adaptive"},
		&srp{label: "SRP direct", bin: bin, mode: "direct", targetMode: "adaptive"},
		&limit{label: "limit, block", wait: "block", bin: lim},
		&limit{label: "limit, yield", wait: "yield", bin: lim},
	}
}

// kernelIO is fio on the disk of the kernel's ib_srp.
type kernelIO struct {
	host, dev string
}

func (c *kernelIO) name() string { return "fio on ib_srp" }

// start logs in with the guest's library, which docs/testing.md describes.
func (c *kernelIO) start(ctx context.Context, _ int) error {
	// On one device both initiators would have one port id, and each login would end the other's session.
	id := os.Getenv("VMTEST_SRPT_ID")
	out, _, err := output(exec.CommandContext(ctx, "guestctl", "srp_login", "rxe0",
		fmt.Sprintf("id_ext=%s,ioc_guid=%[1]s,initiator_ext=0000000000000001,dest=%s", id, os.Getenv("VMTEST_SRPT_ADDR"))))
	if err != nil {
		return err
	}
	c.host = strings.TrimSpace(out)
	if out, _, err = output(exec.CommandContext(ctx, "guestctl", "lun_dev", c.host, "0")); err != nil {
		return err
	}
	c.dev = strings.TrimSpace(out)
	return nil
}

func (c *kernelIO) run(ctx context.Context, p point, span time.Duration) (sample, error) {
	before := cpuOfMachine()
	s, err := fio(exec.CommandContext(ctx, "fio", append(fioArgs(p, span), "--ioengine=libaio", "--direct=1", "--filename="+c.dev)...))
	if err != nil {
		return s, err
	}
	s.CPU = perIO(cpuOfMachine()-before, s.IOPS*span.Seconds())
	return s, nil
}

func (c *kernelIO) stop() { exec.Command("guestctl", "srp_logout", c.host).Run() }

func kernelPair(bin string) []contestant {
	target := fmt.Sprintf("id_ext=%s,ioc_guid=%[1]s,dest=%s,max_sect=2048", os.Getenv("VMTEST_SRPT_ID"), os.Getenv("VMTEST_SRPT_ADDR"))
	cs := []contestant{&kernelIO{}}
	for _, m := range []string{"interrupt", "direct", "adaptive"} {
		cs = append(cs, &srp{label: "srp-initiator, " + m, bin: bin, mode: m, target: target, whole: true})
	}
	return cs
}
