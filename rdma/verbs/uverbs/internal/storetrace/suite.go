//go:build linux && amd64

package storetrace

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"srp-initiator/internal/require"
	"srp-initiator/rdma/verbs/uverbs/internal/golden"
)

// traceCases are the cases to trace: some of each group, and with REQUIRE_ALL=1 all. What some repeat tens of
// thousands of times before their recording starts is not traced.
func traceCases(t *testing.T, device string) map[string]*golden.Case {
	cases := map[string]*golden.Case{}
	for _, dir := range golden.Dirs(golden.OwnVectors) {
		files, err := golden.Load(dir, device)
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

// Test steps through the driver's machine code in every recorded call and compares stores and fences, in order, with
// the library's. It is called by the driver's TestStoreOrder.
func Test(t *testing.T, d golden.Driver) {
	if IsChild() {
		traced(t, d)
		return
	}
	if why := Available(); why != "" {
		require.Missing(t, why)
	}
	cases := traceCases(t, d.Device)
	calls, steps, seen := 0, 0, map[string]int{}
	args := []string{"-test.run=^TestStoreOrder$", "-test.timeout=5m"}
	err := Trace(args, []string{"MLX_VECTORS=" + os.Getenv("MLX_VECTORS")}, func(c *Call) {
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
		for _, e := range Compare(d.Device, s, c) {
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

// regions names the memory of a rig as the recordings do.
func regions(c *golden.Case, r golden.Rig) (list []Region) {
	add := func(name string, i int, part string, b []byte) {
		if len(b) > 0 {
			list = append(list, regionOf(fmt.Sprintf("%s%d%s", name, i, part), b))
		}
	}
	for i := range c.Setup.QP {
		add("qp", i, ".sq", r.SQ(i))
		add("qp", i, ".rq", r.RQ(i))
		add("qp", i, ".dbr", r.QPRecord(i))
	}
	for i := range c.Setup.CQ {
		add("cq", i, ".dbr", r.CQRecord(i))
	}
	for i := range c.Setup.UARPages {
		add("uar", i, "", r.UAR(i))
	}
	return list
}

// traced is the child's side.
func traced(t *testing.T, d golden.Driver) {
	child, err := NewChild()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range traceCases(t, d.Device) {
		golden.FillMemory()
		r, err := d.New(c)
		if err != nil {
			t.Fatal(err)
		}
		list := regions(c, r)
		p := golden.Player{Case: c, Rig: r, Around: func(s *golden.Step, call func()) {
			for i := range c.Steps {
				if s == &c.Steps[i] {
					child.Run(fmt.Sprintf("%s|%d", name, i), list, call)
				}
			}
		}}
		p.Play()
		r.Close()
	}
}
