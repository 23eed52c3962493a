package selftest

import (
	"io"
	"strings"
	"testing"
	"time"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/mlxtest"
	"srp-initiator/rdma/verbs/verbstest"
)

func options(n *mlxtest.Net, c mlxtest.Config) Options {
	return Options{Duration: 200 * time.Millisecond, Open: func() (verbs.Context, io.Closer, error) {
		ctx, err := n.Open(c)
		return ctx, ctx, err
	}}
}

// TestReport runs everything on a model adapter; with -short the contract is left out, which the model's own tests run.
func TestReport(t *testing.T) {
	if testing.Short() {
		all := verbstest.Cases
		verbstest.Cases = all[:6]
		defer func() { verbstest.Cases = all }()
	}
	n := mlxtest.NewNet()
	defer n.Close()
	r, err := Run(t.Context(), options(n, mlxtest.Config{Family: "mlx5"}))
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	r.WriteTo(&b)
	if !r.Passed() || !strings.Contains(b.String(), "all passed") {
		t.Errorf("%s", b.String())
	}
	for _, f := range r.Figures {
		if f.Value <= 0 {
			t.Errorf("%s is %v", f.Name, f.Value)
		}
	}
	t.Log("\n" + b.String())
}

// TestFailures: what fails is in the report, and the run goes on.
func TestFailures(t *testing.T) {
	all := verbstest.Cases
	defer func() { verbstest.Cases = all }()
	cleaned := 0
	verbstest.Cases = []verbstest.Case{
		{Name: "Errs", Run: func(t verbstest.TB, p verbstest.Pair) { t.Errorf("wrong %d", 1); t.Cleanup(func() { cleaned++ }) }},
		{Name: "Ends", Run: func(t verbstest.TB, p verbstest.Pair) {
			t.Cleanup(func() { cleaned++ })
			t.Fatalf("over")
			cleaned += 100
		}},
		{Name: "Panics", Run: func(t verbstest.TB, p verbstest.Pair) {
			t.Cleanup(func() { cleaned++; t.Fatalf("in the clean-up") })
			panic("broken")
		}},
		{Name: "Passes", Run: func(t verbstest.TB, p verbstest.Pair) { t.Cleanup(func() { cleaned++ }) }},
	}
	n := mlxtest.NewNet()
	defer n.Close()
	r, err := Run(t.Context(), options(n, mlxtest.Config{Family: "mlx4", InfiniBand: true}))
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	r.WriteTo(&b)
	for _, want := range []string{"1 of 4 cases", "wrong 1", "over", "panic: broken; in the clean-up", "NOT all passed"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the report does not say %q:\n%s", want, b.String())
		}
	}
	if cleaned != 4 {
		t.Errorf("%d clean-ups, want 4", cleaned)
	}
}
