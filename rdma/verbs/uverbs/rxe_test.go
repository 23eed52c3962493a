package uverbs

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"srp-initiator/internal/require"
	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/abi"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
	"srp-initiator/rdma/verbs/verbstest"
)

// rxeDevices are the guest's soft-RoCE devices.
func rxeDevices(t testing.TB) (list []DeviceInfo) {
	t.Helper()
	require.Guest(t)
	all, err := Devices()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range all {
		if d.Driver == "rxe" {
			list = append(list, d)
		}
	}
	if len(list) == 0 {
		t.Fatal("the guest has no rxe device")
	}
	return list
}

// openOn opens d, with its system calls wrapped by wrap unless that is nil.
func openOn(t verbstest.TB, d DeviceInfo, wrap func(kernel.Calls) kernel.Calls) verbstest.Side {
	t.Helper()
	var ctx *Context
	var err error
	if wrap == nil {
		ctx, err = d.Open()
	} else {
		var f *kernel.File
		if f, err = kernel.Open(d.CharDev); err == nil {
			ctx, err = OpenOn(wrap(f), families[0], d.info, os.DirFS("/sys"))
		}
	}
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() {
		if err := ctx.Close(); err != nil && err != verbs.ErrClosed {
			t.Errorf("close: %v", err)
		}
	})
	s, err := verbstest.OpenSide(ctx)
	if err != nil {
		t.Fatalf("%v", err)
	}
	return s
}

// rxePair says where the kernel's rxe does less than the contract: docs/uverbs-abi.md, "rxe".
func rxePair(a, b verbstest.Side) verbstest.Pair {
	return verbstest.Pair{A: a, B: b, Windows: true, EagerArm: true, VagueLocalErrors: true, VagueLengthErrors: true, UnboundedWindows: true}
}

func TestRXE(t *testing.T) {
	for _, d := range rxeDevices(t) {
		t.Run(d.Name, func(t *testing.T) {
			verbstest.Run(t, func(t verbstest.TB) verbstest.Pair { return rxePair(openOn(t, d, nil), openOn(t, d, nil)) })
		})
	}
}

// refusing is a kernel that lacks something.
type refusing struct {
	kernel.Calls
	ioctl func(*kernel.Ioctl) error // nil result: ask the kernel
	write func(*kernel.Write) error
}

func (r refusing) Ioctl(c *kernel.Ioctl) error {
	if r.ioctl != nil {
		if err := r.ioctl(c); err != nil {
			return err
		}
	}
	return r.Calls.Ioctl(c)
}

func (r refusing) Write(c *kernel.Write) error {
	if r.write != nil {
		if err := r.write(c); err != nil {
			return err
		}
	}
	return r.Calls.Write(c)
}

// TestRXEByOtherWays runs on the real kernel what older and stricter kernels would make us do.
func TestRXEByOtherWays(t *testing.T) {
	d := rxeDevices(t)[0]
	for _, way := range []struct {
		name string
		wrap func(kernel.Calls) kernel.Calls
	}{
		{"NoIoctl", func(k kernel.Calls) kernel.Calls {
			return refusing{Calls: k, ioctl: func(*kernel.Ioctl) error { return syscall.ENOTTY }}
		}},
		{"NoWrite", func(k kernel.Calls) kernel.Calls {
			return refusing{Calls: k, write: func(*kernel.Write) error { return syscall.EACCES }}
		}},
		{"NoTypedMethods", func(k kernel.Calls) kernel.Calls {
			return refusing{Calls: k, ioctl: func(c *kernel.Ioctl) error {
				if c.Object == abi.ObjectDevice && c.Method == abi.MethodInvokeWrite {
					return nil
				}
				return syscall.EPROTONOSUPPORT
			}}
		}},
	} {
		t.Run(way.name, func(t *testing.T) {
			for _, c := range verbstest.Cases {
				switch c.Name {
				case "Queries", "Objects", "Send", "RDMARead", "SignalAll", "SendQueueFull", "ArmOnce", "NotificationPingPong",
					"TwoQueuesOneChannel", "DestroyOrder", "MemoryWindows", "ResetAndReuse", "CloseContext", "NoAllocation":
					t.Run(c.Name, func(t *testing.T) { c.Run(t, rxePair(openOn(t, d, way.wrap), openOn(t, d, way.wrap))) })
				}
			}
		})
	}
}

// oneRXE is an end with everything, not connected: enough for what fails or is flushed.
type oneRXE struct {
	ctx *Context
	pd  verbs.ProtectionDomain
	ch  verbs.CompletionChannel
	cq  verbs.CompletionQueue
	qp  verbs.QueuePair
	mem *hostmem.Region
	mr  verbs.MemoryRegion
}

func newOneRXE(t testing.TB) *oneRXE {
	t.Helper()
	side := openOn(t, rxeDevices(t)[0], nil)
	o := &oneRXE{ctx: side.Context.(*Context)}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var err error
	o.pd, err = o.ctx.AllocPD()
	must(err)
	o.ch, err = o.ctx.CreateCompletionChannel()
	must(err)
	o.cq, err = o.ctx.CreateCQ(verbs.CQInit{Capacity: 64, Channel: o.ch})
	must(err)
	o.qp, err = o.pd.CreateQP(verbs.QPInit{SendCQ: o.cq, RecvCQ: o.cq, Cap: verbs.QPCap{MaxSendWR: 8, MaxRecvWR: 8, MaxSendSGE: 1, MaxRecvSGE: 1}})
	must(err)
	o.mem, err = hostmem.Alloc(4096)
	must(err)
	o.mr, err = o.pd.RegisterMemory(o.mem, verbs.AccessLocalWrite)
	must(err)
	must(o.qp.Modify(&verbs.QPAttr{State: verbs.QPInitState, Port: 1}, verbs.QPMaskToInit))
	must(o.qp.Modify(&verbs.QPAttr{State: verbs.QPError}, verbs.QPMaskState))
	return o
}

// flush makes one completion: a receive that is flushed.
func (o *oneRXE) flush(t testing.TB) {
	t.Helper()
	if n, err := o.qp.PostRecv([]verbs.RecvWorkRequest{{WRID: 5, SGList: []verbs.SGE{{Addr: o.mr.Addr(), Length: 16, LKey: o.mr.LKey()}}}}); n != 1 {
		t.Fatalf("PostRecv: %v", err)
	}
	var wc [1]verbs.WorkCompletion
	for end := time.Now().Add(10 * time.Second); o.cq.Poll(wc[:]) == 0; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatal("no completion")
		}
	}
}

// TestRXEEventsReported: the kernel's count of events read is ours.
func TestRXEEventsReported(t *testing.T) {
	o := newOneRXE(t)
	for range 7 {
		if _, err := o.cq.Arm(false); err != nil {
			t.Fatal(err)
		}
		o.flush(t)
		var events [3]verbs.CompletionQueue
		if n, err := o.ch.WaitThread(events[:], 10*time.Second); n != 1 || err != nil {
			t.Fatalf("WaitThread = %d, %v", n, err)
		}
	}
	if _, err := o.cq.Arm(false); err != nil {
		t.Fatal(err)
	}
	o.flush(t) // an event that stays unread
	cq := o.cq.(*completionQueue)
	if err := o.qp.Destroy(); err != nil {
		t.Fatal(err)
	}
	resp, err := cq.impl.Destroy()
	if err != nil || resp.CompEventsReported != 7 || cq.compSeen.Load() != 7 {
		t.Errorf("the kernel counts %d events, we %d, want 7 (%v)", resp.CompEventsReported, cq.compSeen.Load(), err)
	}
	cq.destroyed.Store(true)
	leave(o.ctx, o.ctx.cqs, cq)
	delete(o.ch.(*channel).cqs, cq.handle)
}

// TestRXECredentials: a thread that gave up its user id may not write() any more; the ioctl goes on.
func TestRXECredentials(t *testing.T) {
	o := newOneRXE(t)
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		result <- func() error {
			if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, 65534, 65534, 65534); e != 0 {
				return e
			}
			file := o.ctx.k.Calls.(*kernel.File)
			req := &abi.ReqNotifyCQ{CQHandle: o.cq.(*completionQueue).impl.Handle()}
			if err := file.Write(&kernel.Write{Command: abi.CmdReqNotifyCQ, CoreIn: abi.Bytes(req)}); err != syscall.EACCES {
				return fmt.Errorf("a plain write() after setresuid: %v, want EACCES", err)
			}
			if _, err := o.cq.Arm(false); err != nil {
				return fmt.Errorf("arm: %w", err)
			}
			if n, err := o.qp.PostSend([]verbs.SendWorkRequest{{WRID: 9, Opcode: verbs.OpSend}}); n != 1 || err != nil {
				return fmt.Errorf("post: %d, %w", n, err)
			}
			var wc [1]verbs.WorkCompletion
			for end := time.Now().Add(10 * time.Second); o.cq.Poll(wc[:]) == 0; {
				if time.Now().After(end) {
					return errors.New("no completion")
				}
			}
			cq, err := o.ctx.CreateCQ(verbs.CQInit{Capacity: 4})
			if err != nil {
				return err
			}
			return cq.Destroy()
		}()
	}()
	if err := <-result; err != nil {
		t.Error(err)
	}
}

// TestRXESignals makes and destroys objects, and waits for events, under a hail of signals as the Go scheduler sends them.
func TestRXESignals(t *testing.T) {
	d := rxeDevices(t)[0]
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		for !stop.Load() {
			syscall.Kill(os.Getpid(), syscall.SIGURG)
			time.Sleep(100 * time.Microsecond)
		}
	}()
	for _, c := range verbstest.Cases {
		switch c.Name {
		case "Objects", "NotificationPingPong", "WakeAndTimeout", "ManyQueuePairs":
			t.Run(c.Name, func(t *testing.T) { c.Run(t, rxePair(openOn(t, d, nil), openOn(t, d, nil))) })
		}
	}
	stop.Store(true)
	wg.Wait()
}

// TestRXENothingLeaks: descriptors, mappings and goroutines are as before.
func TestRXENothingLeaks(t *testing.T) {
	d := rxeDevices(t)[0]
	count := func() (fds, maps, goroutines int) {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile("/proc/self/maps")
		if err != nil {
			t.Fatal(err)
		}
		return len(list), strings.Count(string(b), "uverbs"), runtime.NumGoroutine()
	}
	round := func() {
		t.Run("round", func(t *testing.T) {
			newOneRXE(t) // Close cleans up
			side := openOn(t, d, nil)
			for _, c := range []verbs.CQInit{{Capacity: 1 << 28}, {Capacity: 4}} { // one fails, one is left to Close
				side.Context.CreateCQ(c)
			}
		})
		// Failures at every step of opening.
		for fail := range 4 {
			f, err := kernel.Open(d.CharDev)
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			ctx, err := OpenOn(refusing{Calls: f, ioctl: func(*kernel.Ioctl) error {
				if n++; n > fail {
					return syscall.ENOMEM
				}
				return nil
			}, write: func(*kernel.Write) error { return syscall.ENOMEM }}, families[0], d.info, os.DirFS("/sys"))
			if err == nil {
				ctx.Close()
			}
		}
	}
	round()
	fds, maps, goroutines := count()
	for range 50 {
		round()
	}
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		f, m, g := count()
		if f <= fds && m <= maps && g <= goroutines {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d descriptors, %d ring mappings, %d goroutines; before: %d, %d, %d", f, m, g, fds, maps, goroutines)
		}
	}
}

// TestRXEChildren starts programs while data moves: a fork must not part our pages from the device's.
func TestRXEChildren(t *testing.T) {
	d := rxeDevices(t)[0]
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Add(1)
	started := 0
	go func() {
		defer wg.Done()
		for !stop.Load() {
			if err := exec.Command("true").Run(); err != nil {
				t.Errorf("true: %v", err)
				return
			}
			started++
		}
	}()
	for range 4 {
		for _, c := range verbstest.Cases {
			switch c.Name {
			case "RDMARead", "RDMAWrite", "FullDuplex":
				t.Run(c.Name, func(t *testing.T) { c.Run(t, rxePair(openOn(t, d, nil), openOn(t, d, nil))) })
			}
		}
	}
	stop.Store(true)
	wg.Wait()
	if started == 0 {
		t.Error("no child was started")
	}
	t.Logf("%d children", started)
}

func TestRXEOpenUnknown(t *testing.T) {
	require.Guest(t)
	_, err := Open("mlx9_7")
	if err == nil || !strings.Contains(err.Error(), "mlx9_7") || !strings.Contains(err.Error(), "rxe0") {
		t.Errorf("%v; want an error that names the device asked for and those there are", err)
	}
}
