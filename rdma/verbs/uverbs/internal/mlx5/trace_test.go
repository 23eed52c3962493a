//go:build linux && amd64 && !race

package mlx5

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"srp-initiator/internal/require"
	"srp-initiator/rdma/verbs/uverbs/internal/golden"
	"srp-initiator/rdma/verbs/uverbs/internal/storetrace"
)

// regions names the memory of a rig as the recordings do.
func (r *rig) regions() (list []storetrace.Region) {
	add := func(name string, b []byte) {
		if len(b) > 0 {
			list = append(list, storetrace.Region{Name: name, Addr: addrOf(b), Len: len(b)})
		}
	}
	for i := range r.qps {
		add(fmt.Sprintf("qp%d.sq", i), r.SQ(i))
		add(fmt.Sprintf("qp%d.rq", i), r.RQ(i))
		add(fmt.Sprintf("qp%d.dbr", i), r.qpRec[i])
	}
	for i := range r.cqs {
		add(fmt.Sprintf("cq%d.dbr", i), r.cqRec[i])
	}
	for i := range r.uars {
		add(fmt.Sprintf("uar%d", i), r.uars[i])
	}
	return list
}

// traceCases are the cases to trace: some of each group, and with REQUIRE_ALL=1 all. What some repeat tens of
// thousands of times before their recording starts is not traced.
func traceCases(t *testing.T) map[string]*golden.Case {
	cases := map[string]*golden.Case{}
	for _, dir := range golden.Dirs(ownVectors) {
		files, err := golden.Load(dir, "mlx5")
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if f.Group == "control" || f.Group == "qp_caps" {
				continue
			}
			for i := range f.Cases {
				if c := &f.Cases[i]; os.Getenv("REQUIRE_ALL") == "1" || i%5 == 0 {
					cases[f.Path+" "+c.Profile+" "+c.Name] = c
				}
			}
		}
	}
	return cases
}

// TestStoreOrder steps through the driver's machine code in every recorded call and compares stores and fences, in order, with
// the library's.
func TestStoreOrder(t *testing.T) {
	if storetrace.IsChild() {
		traced(t)
		return
	}
	if why := storetrace.Available(); why != "" {
		require.Missing(t, why)
	}
	cases := traceCases(t)
	calls, steps, seen := 0, 0, map[string]int{}
	args := []string{"-test.run=^TestStoreOrder$", "-test.timeout=5m"}
	err := storetrace.Trace(args, []string{"MLX_VECTORS=" + os.Getenv("MLX_VECTORS")}, func(c *storetrace.Call) {
		name, n, _ := strings.Cut(c.Key, "|")
		i := 0
		fmt.Sscan(n, &i)
		s := &cases[name].Steps[i]
		calls++
		steps += c.Steps
		seen[s.Call]++
		for k := range i { // a poll that met an unknown queue pair has taken what the next one took in the recording
			if earlier := &cases[name].Steps[k]; earlier.Ret < 0 && s.Call == "ibv_poll_cq" {
				return
			}
		}
		for _, e := range storetrace.Compare("mlx5", s, c) {
			t.Errorf("%s step %d (%s): %s", name, i, s.Call, e)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	want := 0
	for _, c := range cases {
		for i := range c.Steps {
			switch c.Steps[i].Call {
			case "ibv_post_send", "ibv_post_recv", "ibv_poll_cq", "ibv_req_notify_cq":
				want++
			}
		}
	}
	t.Logf("%d calls %v, %d instructions", calls, seen, steps)
	if calls != want {
		t.Errorf("%d calls were traced, %d recorded", calls, want)
	}
}

// traced is the child's side.
func traced(t *testing.T) {
	child, err := storetrace.NewChild()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range traceCases(t) {
		golden.FillMemory()
		r, err := newRig(c)
		if err != nil {
			t.Fatal(err)
		}
		p := golden.Player{Case: c, Rig: r, Around: func(s *golden.Step, call func()) {
			for i := range c.Steps {
				if s == &c.Steps[i] {
					child.Run(fmt.Sprintf("%s|%d", name, i), r.regions(), call)
				}
			}
		}}
		p.Play()
		r.Close()
	}
}
