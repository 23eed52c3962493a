//go:build linux && amd64

// Package storetrace watches the machine code of a driver as it runs: every store
// to chosen memory and every fence, in program order, by single-stepping a child process. It is used by tests only.
//
// The recordings of the C library were made in the same way, so that their events and a driver's compare without
// any hook in the driver. The child is the same program: its text lies at the same addresses, and the tracer
// decodes each instruction from its own memory.
package storetrace

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"syscall"
	"unsafe"

	"golang.org/x/arch/x86/x86asm"
	"golang.org/x/sys/unix"
)

// Region is memory to watch.
type Region struct {
	Name string
	Addr uint64
	Len  int
}

// Event is one store to a region, with the bytes it left, or a fence: "sfence", "lfence", "mfence", "lock".
type Event struct {
	Fence string
	Store string
	Off   int
	Data  []byte
}

// Call is one traced call. Key is the child's name for it.
type Call struct {
	Key     string
	Regions []Region
	Events  []Event `json:"-"`
	Steps   int     `json:"-"`
}

const childEnv = "STORETRACE_PIPE"

// IsChild reports whether this process is to be traced.
func IsChild() bool { return os.Getenv(childEnv) != "" }

// Child is the traced side.
type Child struct{ out *os.File }

// NewChild prepares the calling goroutine, which keeps its thread, to be traced.
func NewChild() (*Child, error) {
	runtime.LockOSThread()
	debug.SetGCPercent(-1)
	c := &Child{out: os.NewFile(3, "storetrace")}
	if _, err := fmt.Fprintln(c.out, unix.Gettid()); err != nil {
		return nil, err
	}
	// The tracer says when it has hold of the thread.
	var b [1]byte
	_, err := io.ReadFull(os.NewFile(4, "storetrace"), b[:])
	return c, err
}

// Run runs call under the tracer's eyes.
func (c *Child) Run(key string, regions []Region, call func()) {
	b, err := json.Marshal(Call{Key: key, Regions: regions})
	if err == nil {
		_, err = c.out.Write(append(b, '\n'))
	}
	if err != nil {
		panic(err)
	}
	runtime.Breakpoint()
	call()
	runtime.Breakpoint()
}

// Available tells why tracing cannot work here, "" when it can.
func Available() string {
	if b, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope"); err == nil && len(b) > 0 && b[0] >= '2' {
		return "kernel.yama.ptrace_scope forbids ptrace"
	}
	return ""
}

// Trace runs this test program again with args and hands every traced call to f.
func Trace(args []string, env []string, f func(*Call)) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	fromChild, childOut, err := os.Pipe()
	if err != nil {
		return err
	}
	childIn, toChild, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(append(os.Environ(), childEnv+"=1"), env...)
	cmd.ExtraFiles = []*os.File{childOut, childIn}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	childOut.Close()
	childIn.Close()
	defer cmd.Wait()
	defer cmd.Process.Kill()
	in := bufio.NewReaderSize(fromChild, 1<<16)
	var tid int
	if _, err := fmt.Fscanln(in, &tid); err != nil {
		return fmt.Errorf("storetrace: the child does not start: %w", err)
	}
	const seize = 0x4206 // PTRACE_SEIZE
	if _, _, e := unix.Syscall6(unix.SYS_PTRACE, seize, uintptr(tid), 0, 0, 0, 0); e != 0 {
		return fmt.Errorf("storetrace: ptrace: %w", e)
	}
	toChild.Write([]byte{1})
	t := &tracer{tid: tid}
	for {
		alive, err := t.untilTrap()
		if err != nil || !alive {
			return err
		}
		line, err := in.ReadBytes('\n')
		if err != nil {
			return fmt.Errorf("storetrace: the child stopped without saying where: %w", err)
		}
		c := new(Call)
		if err := json.Unmarshal(line, c); err != nil {
			return err
		}
		if err := t.follow(c); err != nil {
			return fmt.Errorf("storetrace: %s: %w", c.Key, err)
		}
		f(c)
	}
}

type tracer struct{ tid int }

// untilTrap lets the thread run until its next breakpoint. alive is false when it has ended.
func (t *tracer) untilTrap() (alive bool, err error) {
	for sig := 0; ; {
		if err := unix.PtraceCont(t.tid, sig); err != nil && err != syscall.ESRCH {
			return false, err
		}
		s, err := t.wait()
		if err != nil || s.Exited() || s.Signaled() {
			return false, err
		}
		if s.StopSignal() == unix.SIGTRAP && s.TrapCause() == 0 {
			return true, nil
		}
		sig = forward(s)
	}
}

// forward is the signal to deliver. Preemption requests are not: they would lead away from the call.
func forward(s unix.WaitStatus) int {
	if g := s.StopSignal(); g != unix.SIGURG && g != unix.SIGTRAP {
		return int(g)
	}
	return 0
}

func (t *tracer) wait() (unix.WaitStatus, error) {
	for {
		var s unix.WaitStatus
		_, err := unix.Wait4(t.tid, &s, unix.WALL, nil)
		if err == unix.EINTR {
			continue
		}
		return s, err
	}
}

const breakpoint = 0xcc

// follow steps through a call until the breakpoint behind it.
func (t *tracer) follow(c *Call) error {
	var regs unix.PtraceRegs
	for ; c.Steps < 1_000_000; c.Steps++ {
		if err := unix.PtraceGetRegs(t.tid, &regs); err != nil {
			return err
		}
		code, err := t.text(regs.Rip)
		if err != nil {
			return err
		}
		if code[0] == breakpoint {
			// Execute it, so that the next continuation does not stop here again.
			if err := unix.PtraceCont(t.tid, 0); err != nil {
				return err
			}
			_, err := t.wait()
			return err
		}
		store, n, fence := decode(code, &regs)
		sig := 0
		for {
			if err := step(t.tid, sig); err != nil {
				return err
			}
			s, err := t.wait()
			if err != nil {
				return err
			}
			if s.Exited() || s.Signaled() {
				return fmt.Errorf("the child ended")
			}
			if s.StopSignal() == unix.SIGTRAP {
				break
			}
			if sig = forward(s); sig != 0 {
				return fmt.Errorf("signal %v at %#x", s.StopSignal(), regs.Rip)
			}
		}
		if fence != "" {
			c.Events = append(c.Events, Event{Fence: fence})
		}
		for _, r := range c.Regions {
			if n > 0 && store+uint64(n) > r.Addr && store < r.Addr+uint64(r.Len) {
				data, err := t.read(store, n)
				if err != nil {
					return err
				}
				c.Events = append(c.Events, Event{Store: r.Name, Off: int(int64(store - r.Addr)), Data: data})
			}
		}
	}
	return fmt.Errorf("the call does not end")
}

func step(tid, sig int) error {
	_, _, e := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SINGLESTEP, uintptr(tid), 0, uintptr(sig), 0, 0)
	if e != 0 {
		return e
	}
	return nil
}

// text is the code at pc. The program's own is in this process too; the rest, the kernel's vDSO, lies elsewhere here.
func (t *tracer) text(pc uint64) ([]byte, error) {
	if pc < 1<<32 {
		return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&pc))), 15), nil
	}
	return t.read(pc, 15)
}

func (t *tracer) read(addr uint64, n int) ([]byte, error) {
	b := make([]byte, n)
	local := []unix.Iovec{{Base: &b[0], Len: uint64(n)}}
	_, err := unix.ProcessVMReadv(t.tid, local, []unix.RemoteIovec{{Base: uintptr(addr), Len: n}}, 0)
	return b, err
}

// decode tells where an instruction stores, how many bytes, and whether it is a fence.
func decode(code []byte, r *unix.PtraceRegs) (addr uint64, n int, fence string) {
	if code[0] == 0x0f && code[1] == 0xae {
		switch code[2] {
		case 0xf8:
			return 0, 0, "sfence"
		case 0xe8:
			return 0, 0, "lfence"
		case 0xf0:
			return 0, 0, "mfence"
		}
	}
	in, err := x86asm.Decode(code, 64)
	if err != nil {
		return 0, 0, "" // AVX: block copies of inline data
	}
	switch in.Op {
	case x86asm.CMP, x86asm.TEST, x86asm.PUSH, x86asm.CALL, x86asm.JMP, x86asm.LEA, x86asm.NOP, x86asm.COMISD, x86asm.UCOMISD, x86asm.BT, x86asm.PREFETCHNTA, x86asm.PREFETCHT0:
		return 0, 0, ""
	case x86asm.MOVSB, x86asm.MOVSQ, x86asm.STOSB, x86asm.STOSQ:
		return r.Rdi, in.MemBytes, "" // one element per step
	}
	m, ok := in.Args[0].(x86asm.Mem)
	if !ok {
		if m, ok = in.Args[1].(x86asm.Mem); !ok || in.Op != x86asm.XCHG {
			return 0, 0, ""
		}
	}
	for _, p := range in.Prefix {
		if p&0xff == x86asm.PrefixLOCK&0xff && p != 0 {
			fence = "lock"
		}
	}
	if in.Op == x86asm.XCHG {
		fence = "lock"
	}
	if m.Segment != 0 {
		return 0, 0, fence
	}
	addr = uint64(m.Disp) + reg(m.Base, r) + reg(m.Index, r)*uint64(m.Scale)
	if m.Base == x86asm.RIP {
		addr = uint64(m.Disp) + r.Rip + uint64(in.Len)
	}
	return addr, in.MemBytes, fence
}

func reg(x x86asm.Reg, r *unix.PtraceRegs) uint64 {
	switch x {
	case x86asm.RAX:
		return r.Rax
	case x86asm.RCX:
		return r.Rcx
	case x86asm.RDX:
		return r.Rdx
	case x86asm.RBX:
		return r.Rbx
	case x86asm.RSP:
		return r.Rsp
	case x86asm.RBP:
		return r.Rbp
	case x86asm.RSI:
		return r.Rsi
	case x86asm.RDI:
		return r.Rdi
	case x86asm.R8:
		return r.R8
	case x86asm.R9:
		return r.R9
	case x86asm.R10:
		return r.R10
	case x86asm.R11:
		return r.R11
	case x86asm.R12:
		return r.R12
	case x86asm.R13:
		return r.R13
	case x86asm.R14:
		return r.R14
	case x86asm.R15:
		return r.R15
	}
	return 0
}

// regionOf names mapped memory.
func regionOf(name string, b []byte) Region {
	return Region{Name: name, Addr: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), Len: len(b)}
}
