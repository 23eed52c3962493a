package srp_test

// The sessions of these tests run in two worlds: in a test guest against the kernel's ib_srpt over its rxe
// device, elsewhere against target-emu over softroce, both in this process.

import (
	"context"
	"log/slog"
	"net/netip"
	"os"
	"testing"
	"time"

	"srp-initiator/completion"
	"srp-initiator/internal/require"
	"srp-initiator/rdma"
	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/softroce"
	"srp-initiator/rdma/verbs"
	"srp-initiator/srp"
	"srp-initiator/srp/scsi"
	targetemu "srp-initiator/target-emu"
	"srp-initiator/target-emu/lun"
	"srp-initiator/target-emu/lun/luntest"
)

type world struct {
	device    verbs.Context
	connector cm.Connector
	port      srp.TargetPort
	emu       *targetemu.Target // nil: the kernel's target
	restart   func()            // emu only: ends the target and starts one like it on the same address
}

func inGuest() bool { return os.Getenv("VMTEST_GUEST") != "" }

// newWorld starts a target, or finds the kernel's, and opens a device to reach it. change alters target-emu's configuration.
func newWorld(t testing.TB, change ...func(*targetemu.Config)) *world {
	t.Helper()
	if inGuest() {
		if len(change) > 0 {
			t.Skip("needs a target that misbehaves on request")
		}
		return kernelWorld(t)
	}
	return emuWorld(t, change...)
}

func kernelWorld(t testing.TB) *world {
	addr, id := require.SRPT(t)
	p, _, err := srp.ParseTarget("srp://" + addr + "/" + id)
	if err != nil {
		t.Fatal(err)
	}
	f, err := rdma.Open("auto", rdma.WithPeer(p.Src, p.Addr()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Errorf("close fabric: %v", err)
		}
	})
	return &world{device: f.Context(), connector: f.Connector(), port: p}
}

// openDevices opens a device for the target and one for the initiator: softroce, or models of the adapter that
// SRP_TEST_DEVICE names (models_test.go).
func openDevices(t testing.TB) (target, initiator endpoint) {
	t.Helper()
	if name := os.Getenv("SRP_TEST_DEVICE"); name != "" {
		return openModels(t, name)
	}
	open := func() endpoint {
		d, err := softroce.Open(netip.Addr{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		return endpoint{d, d.Connector(), d.Addr()}
	}
	return open(), open()
}

// endpoint is a device with its connection manager and address.
type endpoint struct {
	context   verbs.Context
	connector cm.Connector
	addr      netip.Addr
}

func emuWorld(t testing.TB, change ...func(*targetemu.Config)) *world {
	td, id := openDevices(t)
	cfg := targetemu.Config{
		Listen:  netip.AddrPortFrom(td.addr, 5555),
		Units:   luntest.Units(t, &lun.Map{}, map[uint32]string{0: "ram:64m", 1: "ram:64m", 300: "ram:16m", 7: "ram:16m,bs=4096"}),
		IDExt:   0x1122334455667788,
		IOCGUID: 0x99aabbccddeeff00,
	}
	if testing.Verbose() && os.Getenv("EMU_LOG") != "" {
		cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	for _, f := range change {
		f(&cfg)
	}
	w := &world{device: id.context, connector: id.connector,
		port: srp.TargetPort{IDExt: cfg.IDExt, IOCGUID: cfg.IOCGUID, IOClass: srp.IOClassRev16a, Dest: cfg.Listen}}
	var stop func()
	start := func() {
		target, err := targetemu.New(td.context, td.connector, cfg)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() { ended <- target.Serve(ctx) }()
		w.emu = target
		stop = func() {
			cancel()
			select {
			case err := <-ended:
				if err != nil {
					t.Errorf("target: %v", err)
				}
			case <-time.After(20 * time.Second):
				t.Error("the target does not end")
			}
		}
	}
	start()
	t.Cleanup(func() { stop() })
	w.restart = func() { stop(); start() }
	return w
}

// withFaults makes the target follow a fault script.
func withFaults(script string) func(*targetemu.Config) {
	return func(c *targetemu.Config) {
		f, err := targetemu.ParseFaults(script)
		if err != nil {
			panic(err)
		}
		c.Faults = f
	}
}

// login logs in with the default options as changed, and logs out at the end of the test.
func (w *world) login(t testing.TB, change ...func(*srp.LoginOptions)) *srp.Session {
	t.Helper()
	s, err := w.tryLogin(t, change...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return s
}

func (w *world) tryLogin(t testing.TB, change ...func(*srp.LoginOptions)) (*srp.Session, error) {
	t.Helper()
	o := srp.DefaultLoginOptions()
	for _, f := range change {
		f(&o)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	cfg := srp.Config{Device: w.device, Connector: w.connector, Notice: func(s string) { t.Log("notice: " + s) }}
	return srp.Login(ctx, cfg, w.port, o)
}

func withMode(m completion.Mode) func(*srp.LoginOptions) {
	return func(o *srp.LoginOptions) { o.Completion.Mode = m }
}

// eachMode runs a test in every completion mode.
func eachMode(t *testing.T, f func(t *testing.T, m completion.Mode)) {
	for _, m := range completion.Modes() {
		t.Run(m.String(), func(t *testing.T) { f(t, m) })
	}
}

// do executes a command and fails the test when it does not succeed after unit attentions.
func do(t testing.TB, s *srp.Session, c *srp.Command) {
	t.Helper()
	var err error
	for range 5 {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		err = s.Do(ctx, c)
		cancel()
		if c.Status != scsi.StatusCheckCondition {
			break
		}
	}
	if err != nil {
		t.Fatalf("%s: %v", c.CDB, err)
	}
}

func read10(lba uint32, blocks uint16, b []byte) *srp.Command {
	return &srp.Command{CDB: scsi.Read10(lba, blocks), Dir: srp.DataIn, Data: b}
}

func write10(lba uint32, blocks uint16, b []byte) *srp.Command {
	return &srp.Command{CDB: scsi.Write10(lba, blocks), Dir: srp.DataOut, Data: b}
}

// fill writes a pattern that depends on seed and position.
func fill(b []byte, seed uint64) {
	x := seed*0x9e3779b97f4a7c15 + 1
	for i := range b {
		if i%8 == 0 {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
		}
		b[i] = byte(x >> (i % 8 * 8))
	}
}
