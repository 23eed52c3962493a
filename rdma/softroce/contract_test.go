package softroce

import (
	"testing"

	"srp-initiator/rdma/verbs/verbstest"
)

func TestContract(t *testing.T) {
	for _, c := range []struct {
		name string
		opts []Option
		self bool
	}{{name: "two devices"}, {name: "one device", self: true}, {name: "without offload", opts: []Option{WithoutOffload()}}} {
		t.Run(c.name, func(t *testing.T) {
			if testing.Short() && c.name != "two devices" {
				t.Skip("the contract once is enough for a short run")
			}
			verbstest.Run(t, func(t verbstest.TB) verbstest.Pair {
				p := verbstest.Pair{Windows: true}
				for _, s := range []*verbstest.Side{&p.A, &p.B} {
					if c.self && s == &p.B {
						*s = p.A
						break
					}
					d, err := openForTest(c.opts...)
					if err != nil {
						t.Fatalf("%v", err)
					}
					t.Cleanup(func() { d.Close() })
					if *s, err = verbstest.OpenSide(d); err != nil {
						t.Fatalf("%v", err)
					}
				}
				return p
			})
		})
	}
}
