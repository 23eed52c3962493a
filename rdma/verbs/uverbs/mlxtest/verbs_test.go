package mlxtest

import (
	"testing"

	"srp-initiator/rdma/verbs/verbstest"
)

// TestVerbs runs the contract suite on every kind of device.
func TestVerbs(t *testing.T) {
	for name, c := range map[string]Config{
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
	} {
		t.Run(name, func(t *testing.T) {
			verbstest.Run(t, func(t verbstest.TB) verbstest.Pair {
				n := NewNet()
				p := verbstest.Pair{Windows: true}
				t.Cleanup(func() {
					for _, s := range []verbstest.Side{p.A, p.B} {
						if s.Context != nil {
							s.Context.Close()
						}
					}
					n.Close()
					for _, f := range n.Faults() {
						t.Errorf("fault: %s", f)
					}
				})
				for _, s := range []*verbstest.Side{&p.A, &p.B} {
					ctx, err := n.Open(c)
					if err != nil {
						t.Fatalf("open: %v", err)
					}
					if *s, err = verbstest.OpenSide(ctx); err != nil {
						t.Fatalf("%v", err)
					}
				}
				return p
			})
		})
	}
}
