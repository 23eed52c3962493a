package bench_test

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"
	"time"

	"srp-initiator/bench"
	"srp-initiator/completion"
	"srp-initiator/srp"
	targetemu "srp-initiator/target-emu"
)

// TestBusyLoop is no test: it is what contend runs in processes of its own. It ends when its input does.
func TestBusyLoop(t *testing.T) {
	if os.Getenv("BENCH_BUSY_LOOP") == "" {
		return
	}
	go func() {
		io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	var spins atomic.Uint64
	for {
		spins.Add(1)
	}
}

// contend keeps the CPUs busy with n processes until the test ends.
func contend(t *testing.T, n int) {
	t.Helper()
	for range n {
		cmd := exec.Command(os.Args[0], "-test.run=^TestBusyLoop$")
		cmd.Env = append(os.Environ(), "BENCH_BUSY_LOOP=1")
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { in.Close(); cmd.Wait() })
	}
}

// TestHeldAnswers has the target hold answers until as many are held as commands can be under way, and release them together: nothing
// follows them, so nothing covers a lost wake-up. Before that, one command after the other, answered at once, or so late that nobody polls any more. In every mode, with small, odd and large weights
// and budgets, on free CPUs and on CPUs that eight others want too. Commands have no timeout and there is no idle guard: a command that
// waited for a timer would end the test by its deadline.
func TestHeldAnswers(t *testing.T) {
	const depth = 24
	faults, err := targetemu.ParseFaults(fmt.Sprintf("cmd op=read : hold count=%d", depth))
	if err != nil {
		t.Fatal(err)
	}
	loops := int64(2000)
	if testing.Short() || raceEnabled {
		loops = 200
	}
	slow, err := targetemu.ParseFaults("cmd op=read : delay 3ms")
	if err != nil {
		t.Fatal(err)
	}
	late := startTargetWith(t, []func(*targetemu.Config){func(c *targetemu.Config) { c.Faults = slow }}, "ram:16m")
	held := startTargetWith(t, []func(*targetemu.Config){func(c *targetemu.Config) { c.Faults = faults }}, "ram:16m")
	free := startTarget(t, "ram:16m")
	for _, busy := range []int{0, 8} {
		contend(t, busy)
		for _, m := range completion.Modes() {
			for _, wb := range []struct{ weight, budget int }{{1, 1}, {3, 7}, {32, 256}, {1000, 31}} {
				t.Run(fmt.Sprintf("busy=%d/%v/weight=%d,budget=%d", busy, m, wb.weight, wb.budget), func(t *testing.T) {
					cfg := completion.Config{Mode: m, Weight: wb.weight, Budget: wb.budget, IdleGuard: -1}
					if m == completion.Poll {
						if cfg.Poller, err = completion.NewPoller(completion.PollerConfig{Budget: wb.budget}); err != nil {
							t.Fatal(err)
						}
					}
					for _, c := range []struct {
						what, target string
						depth        int
						loops        int64
					}{{"one after the other", free, 1, loops}, {"late", late, 1, loops / 20}, {"held", held, depth, loops / depth * depth}} {
						if busy > 0 {
							c.loops = c.loops / 10 / int64(c.depth) * int64(c.depth)
						}
						if c.loops == 0 {
							c.loops = int64(c.depth)
						}
						ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
						s, ds, end, err := openerWith(t, c.target, func(o *srp.LoginOptions) { o.CommandTimeout = srp.Off })(ctx, cfg, 1)
						if err != nil {
							t.Fatal(err)
						}
						r, err := bench.Run(ctx, s, ds[0], bench.Workload{Pattern: bench.RandRead, BlockSize: 4096, Depth: c.depth, Jobs: 1, Loops: c.loops, Size: 1 << 20})
						if err != nil || r.Commands != c.loops {
							t.Errorf("%s: %v, %+v", c.what, err, r)
						} else {
							t.Logf("%s: %d commands, the longest took %.0f us; %d notifications", c.what, r.Commands, r.MaxUS, r.Completion.Notifications)
						}
						cancel()
						if err := end(); err != nil {
							t.Error(err)
						}
					}
				})
			}
		}
	}
}
