package srp_test

import (
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"srp-initiator/rdma/verbs/uverbs/mlxtest"
)

// models are the adapters that the sessions run on, besides the userspace device and real kernels.
var models = map[string]mlxtest.Config{
	"mlx5":        {Family: "mlx5"},
	"mlx5-legacy": {Family: "mlx5", InfiniBand: true, Legacy: true},
	"mlx4":        {Family: "mlx4"},
	"mlx4-ib":     {Family: "mlx4", InfiniBand: true},
}

// openModels opens two model adapters of one net, which must see no fault.
func openModels(t testing.TB, name string) (target, initiator endpoint) {
	t.Helper()
	c, ok := models[name]
	if !ok {
		t.Fatalf("SRP_TEST_DEVICE=%s is none of the models", name)
	}
	n := mlxtest.NewNet()
	t.Cleanup(func() {
		n.Close()
		for _, f := range n.Faults() {
			t.Errorf("the adapter model saw a fault: %s", f)
		}
	})
	open := func() endpoint {
		ctx, err := n.Open(c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ctx.Close() })
		return endpoint{ctx, n.Connector(ctx), n.Addr(ctx)}
	}
	return open(), open()
}

// TestModels runs this package's tests again on each model, in processes of their own: the short ones on
// two, with REQUIRE_ALL=1 all on all, and in a short run those on two that move data or lose the device: the rest does not see what device it
// is on, and most of it waits for timeouts.
func TestModels(t *testing.T) {
	if os.Getenv("SRP_TEST_DEVICE") != "" || inGuest() {
		return
	}
	names := []string{"mlx5", "mlx4"}
	args := []string{"-test.count=1", "-test.timeout=4m", "-test.short"}
	if os.Getenv("REQUIRE_ALL") == "1" && !testing.Short() {
		args = args[:2]
		names = slices.Sorted(maps.Keys(models))
	}
	if testing.Short() {
		args = append(args, "-test.run=^Test(Negotiation|ReadWrite|Large.*|Channels|Load|SetModeUnderLoad|NoAllocation|AbortOneOfMany|DeviceLoss|CloseUnderLoad|ExternalTable)$")
	}
	if testing.Verbose() {
		args = append(args, "-test.v")
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they mostly wait
			cmd := exec.Command(os.Args[0], args...)
			cmd.Env = append(os.Environ(), "SRP_TEST_DEVICE="+name)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%v\n%s", err, out)
			} else if testing.Verbose() {
				t.Logf("%d tests passed", strings.Count(string(out), "--- PASS"))
			}
		})
	}
}
