package mlxtest

import (
	"testing"

	"srp-initiator/rdma/cm/cmtest"
	"srp-initiator/rdma/verbs/uverbs"
	"srp-initiator/rdma/verbs/verbstest"
)

// kinds are the devices that the suites run on; with -short, one of each family and the oldest kernel.
func kinds() map[string]Config {
	all := map[string]Config{
		"mlx5-roce":   {Family: "mlx5"},
		"mlx5-ib":     {Family: "mlx5", InfiniBand: true},
		"mlx5-static": {Family: "mlx5", InfiniBand: true, StaticUARs: true},
		"mlx5-legacy": {Family: "mlx5", InfiniBand: true, Legacy: true},
		"mlx5-nobf":   {Family: "mlx5", NoBlueFlame: true},
		"mlx5-cqe128": {Family: "mlx5", Getenv: func(k string) string { return map[string]string{"MLX5_CQE_SIZE": "128"}[k] }},
		"mlx4-roce":   {Family: "mlx4"},
		"mlx4-ib":     {Family: "mlx4", InfiniBand: true},
		"mlx4-legacy": {Family: "mlx4", InfiniBand: true, Legacy: true},
		"mlx4-nobf":   {Family: "mlx4", NoBlueFlame: true},
	}
	if testing.Short() {
		return map[string]Config{"mlx5-roce": all["mlx5-roce"], "mlx5-legacy": all["mlx5-legacy"], "mlx4-ib": all["mlx4-ib"]}
	}
	return all
}

// open opens two devices of a net that must see no fault.
func open(t verbstest.TB, c Config) (n *Net, a, b *uverbs.Context) {
	n = NewNet()
	t.Cleanup(func() {
		for _, ctx := range []*uverbs.Context{a, b} {
			if ctx != nil {
				ctx.Close()
			}
		}
		n.Close()
		for _, f := range n.Faults() {
			t.Errorf("fault: %s", f)
		}
	})
	var err error
	if a, err = n.Open(c); err == nil {
		b, err = n.Open(c)
	}
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	return n, a, b
}

// TestVerbs runs the contract of package verbs on every kind of device.
func TestVerbs(t *testing.T) {
	for name, c := range kinds() {
		t.Run(name, func(t *testing.T) {
			if testing.Short() && name == "mlx5-legacy" {
				t.Skip("the golden vectors tell it from mlx5-roce; a short run takes one of the two")
			}
			verbstest.Run(t, func(t verbstest.TB) verbstest.Pair {
				_, a, b := open(t, c)
				p := verbstest.Pair{Windows: true}
				for ctx, s := range map[*uverbs.Context]*verbstest.Side{a: &p.A, b: &p.B} {
					var err error
					if *s, err = verbstest.OpenSide(ctx); err != nil {
						t.Fatalf("%v", err)
					}
				}
				return p
			})
		})
	}
}

// TestConnections runs the contract of package cm on the net's connection manager.
func TestConnections(t *testing.T) {
	for name, c := range kinds() {
		t.Run(name, func(t *testing.T) {
			cmtest.Run(t, func(t *testing.T) (active, passive cmtest.Node) {
				n, a, b := open(t, c)
				return cmtest.Node{Context: a, Connector: n.Connector(a), Addr: n.Addr(a)},
					cmtest.Node{Context: b, Connector: n.Connector(b), Addr: n.Addr(b)}
			})
		})
	}
}
