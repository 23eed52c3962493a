package golden

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"srp-initiator/rdma/verbs"
)

// OwnVectors is the project's own recordings, as seen from a driver's folder.
const OwnVectors = "../../testdata/golden"

// Driver is what the drivers' tests have in common to play recordings against.
type Driver struct {
	Device string
	New    func(c *Case) (Rig, error)
	// Layout computes the shape of a queue pair that is asked for: what it grants, and what compares it with a recorded one.
	Layout func(want verbs.QPCap) (granted verbs.QPCap, check func(*QP) error, refused error)
}

// Test plays every recorded case: sizes, entries, records, register
// stores, completions. The kernel commands are in the control group, which TestGoldenControl plays.
func (d Driver) Test(t *testing.T) {
	for _, dir := range Dirs(OwnVectors) {
		files, err := Load(dir, d.Device)
		if err != nil {
			t.Fatal(err)
		}
		if len(files) == 0 {
			t.Fatalf("no %s vectors below %s", d.Device, dir)
		}
		for _, f := range files {
			if f.Group == "control" {
				continue
			}
			t.Run(f.Group, func(t *testing.T) {
				cases, steps := 0, 0
				for i := range f.Cases {
					c := &f.Cases[i]
					t.Run(c.Profile+"/"+c.Name, func(t *testing.T) {
						for _, err := range d.play(c) {
							t.Error(err)
						}
					})
					cases++
					steps += len(c.Steps)
				}
				t.Logf("%s: %d cases, %d steps", strings.TrimPrefix(f.Path, dir), cases, steps)
			})
		}
	}
}

func (d Driver) play(c *Case) (errs []string) {
	if c.Group == "qp_caps" {
		return d.caps(c)
	}
	FillMemory()
	r, err := d.New(c)
	if err != nil {
		return []string{err.Error()}
	}
	defer r.Close()
	p := Player{Case: c, Rig: r}
	p.Play()
	return p.Errors
}

func (d Driver) caps(c *Case) (errs []string) {
	for i := range c.Steps {
		s := &c.Steps[i]
		if s.Call != "ibv_create_qp" {
			errs = append(errs, fmt.Sprintf("step %d: unexpected call %s", i, s.Call))
			continue
		}
		_, check, refused := d.Layout(s.Args.Cap.Verbs())
		var err error
		if refused == nil && s.Ret == 0 {
			err = check(&s.QPs[0])
		}
		switch {
		case s.Ret != 0 && (refused == nil || Errno(refused) != s.Errno):
			errs = append(errs, fmt.Sprintf("step %d: %v, want %s", i, refused, s.Errno))
		case s.Ret == 0 && refused != nil:
			errs = append(errs, fmt.Sprintf("step %d: %v", i, refused))
		case err != nil:
			errs = append(errs, fmt.Sprintf("step %d: %v", i, err))
		}
	}
	return errs
}

// Verbs is the capabilities as package verbs has them.
func (c Cap) Verbs() verbs.QPCap {
	return verbs.QPCap{MaxSendWR: c.MaxSendWR, MaxRecvWR: c.MaxRecvWR, MaxSendSGE: c.MaxSendSGE,
		MaxRecvSGE: c.MaxRecvSGE, MaxInlineData: c.MaxInlineData}
}

// Bench is a queue pair of 2048 send requests with 64 bytes of inline data, on a completion queue of 4096 entries.
type Bench struct {
	Post   func(wrs []verbs.SendWorkRequest) (int, error)
	Poll   func(wcs []verbs.WorkCompletion) int
	Finish func(producer, index uint32, op byte) // writes the entry of a send into the completion queue
	Addr   uint64                                // of 8 KiB for data
}

// BenchCase is the setup of a Bench: its completion queue, and two register pages.
func BenchCase(profile string, cqeSize int) *Case {
	return &Case{Profile: profile, Setup: &Objects{UARPages: make([]UARPage, 2),
		CQ: []CQ{{Name: "cq0", CQN: 0x400, Entries: 4096, IBVCQE: 4095, CQESize: cqeSize}}}}
}

// BenchCap is its queue pair.
var BenchCap = verbs.QPCap{MaxSendWR: 2048, MaxRecvWR: 16, MaxSendSGE: 2, MaxRecvSGE: 1, MaxInlineData: 64}

// round is how many requests are timed at a time.
const round = 1024

// BenchmarkPost does what testdata/libcost/libcost.c does with the C library: 1024 requests in chains of 1 or 16, then the
// polls, 16 at a time, that retire them. The times are medians over rounds, as there.
func BenchmarkPost(b *testing.B, inlineBlocks uint32, rig func(*testing.B) Bench) {
	const opSend, opRDMARead = 0x0a, 0x10 // on both devices
	for _, k := range []struct {
		name  string
		wr    verbs.SendWorkRequest
		op    byte
		block uint32
	}{
		{"send", verbs.SendWorkRequest{Opcode: verbs.OpSend}, opSend, 1},
		{"inline64", verbs.SendWorkRequest{Opcode: verbs.OpSend, Flags: verbs.SendInline}, opSend, inlineBlocks},
		{"read", verbs.SendWorkRequest{Opcode: verbs.OpRDMARead, RKey: 0x1ee700}, opRDMARead, 1},
	} {
		for _, batch := range []int{1, 16} {
			b.Run(fmt.Sprintf("%s/batch%d", k.name, batch), func(b *testing.B) {
				r := rig(b)
				wrs := make([]verbs.SendWorkRequest, batch)
				for i := range wrs {
					wrs[i] = k.wr
					wrs[i].WRID, wrs[i].Flags = 1, k.wr.Flags|verbs.SendSignaled
					wrs[i].SGList = []verbs.SGE{{Addr: r.Addr, Length: 64, LKey: 0x1ee700}}
					wrs[i].RemoteAddr = r.Addr + 4096
				}
				var wcs [16]verbs.WorkCompletion
				post, poll := make([]float64, 0, 1<<16), make([]float64, 0, 1<<16)
				index, producer := uint32(0), uint32(0)
				b.ReportAllocs()
				for b.Loop() {
					t := time.Now()
					for range round / batch {
						if n, err := r.Post(wrs); n != batch || err != nil {
							b.Fatal(n, err)
						}
					}
					post = append(post, float64(time.Since(t))/round)
					for range round {
						r.Finish(producer, index, k.op)
						producer, index = producer+1, index+k.block
					}
					t = time.Now()
					for left := round; left > 0; {
						n := r.Poll(wcs[:])
						if n == 0 || wcs[0].Status != verbs.WCSuccess {
							b.Fatal(n, wcs[0])
						}
						left -= n
					}
					poll = append(poll, float64(time.Since(t))/round)
				}
				slices.Sort(post)
				slices.Sort(poll)
				b.ReportMetric(post[len(post)/2], "ns/WQE")
				b.ReportMetric(poll[len(poll)/2], "ns/CQE")
				b.ReportMetric(0, "ns/op") // of both and of what plays the adapter: says nothing
			})
		}
	}
}

// BenchmarkPollEmpty polls a queue in which nothing is.
func BenchmarkPollEmpty(b *testing.B, r Bench) {
	var wcs [16]verbs.WorkCompletion
	b.ReportAllocs()
	for b.Loop() {
		if r.Poll(wcs[:]) != 0 {
			b.Fatal("an entry from nowhere")
		}
	}
}
