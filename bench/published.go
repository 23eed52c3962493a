package bench

import (
	"fmt"
	"slices"
	"strings"

	"srp-initiator/completion"
)

// The experiments and what was published for them.

var (
	interruptSetting = Setting{Name: "interrupt", Config: completion.Config{Mode: completion.Interrupt}}
	threadSetting    = Setting{Name: "thread", Config: completion.Config{Mode: completion.Thread}}
	directSetting    = Setting{Name: "direct", Config: completion.Config{Mode: completion.Direct}}
	adaptiveSetting  = Setting{Name: "adaptive", Config: completion.Config{Mode: completion.Adaptive}}
)

func pollSetting(name string, weight, budget int) Setting {
	return Setting{Name: name, Config: completion.Config{Mode: completion.Poll, Weight: weight}, Budget: budget}
}

func sizeName(n int) string {
	if n >= 1024 && n%1024 == 0 {
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d B", n)
}

// Experiments lists them by name.
func Experiments() []*Experiment {
	return []*Experiment{e1(), e2(), e3(), e3s(), e4(), modeMatrix(), depthSweep()}
}

// ExperimentNamed finds an experiment.
func ExperimentNamed(name string) (*Experiment, error) {
	var names []string
	for _, e := range Experiments() {
		if e.Name == name {
			return e, nil
		}
		names = append(names, e.Name)
	}
	slices.Sort(names)
	return nil, fmt.Errorf("experiment %q: allowed are %s and %s", name, strings.Join(names[:len(names)-1], ", "), names[len(names)-1])
}

// loadDepth is the queue depth of the experiments that go by load. Published interrupts brought 1.2 to 1.3 commands each; at this depth a notification of
// softroce brings sixteen, at 32 twenty-eight, and what a notification costs does not matter any more. The depth sweep has the other depths.
const loadDepth = 16

// e1 is blk-iopoll's introduction, with the loads below saturation that its review asked for.
func e1() *Experiment {
	e := &Experiment{Name: "e1", Title: "Budgeted polling against interrupts",
		Source:   "blk-iopoll, linux-kernel 2009 (weight 32, budget 256); loads below saturation were asked for in its review",
		Question: "Does polling bring more commands per notification and more IOPS at saturation, and what does it cost below?",
		XAxis:    "load, percent of the peak with interrupts",
		Settings: []Setting{interruptSetting, pollSetting("poll", 32, 256)},
		Procs:    1}
	published := map[int][]Published{
		512: {{"interrupt", "iops", 25168}, {"poll", "iops", 30355}, {"interrupt", "notifications", 19500}, {"poll", "notifications", 750},
			{"interrupt", "commands_per_notification", 1.3}, {"poll", "commands_per_notification", 40}},
		4096: {{"interrupt", "iops", 25612}, {"poll", "iops", 30231}, {"interrupt", "notifications", 21500}, {"poll", "notifications", 1200},
			{"interrupt", "commands_per_notification", 1.2}, {"poll", "commands_per_notification", 25}},
	}
	for _, bs := range []int{512, 4096, 8192} {
		w := Workload{Pattern: RandRead, BlockSize: bs, Depth: loadDepth, Jobs: 1}
		e.Points = append(e.Points, Point{Label: sizeName(bs) + ", saturated", Series: sizeName(bs), X: 100, Workload: w, Published: published[bs]})
		for _, load := range []float64{10, 30, 60, 90} {
			e.Points = append(e.Points, Point{Label: fmt.Sprintf("%s, %g %% load", sizeName(bs), load), Series: sizeName(bs), X: load, Workload: w, PercentOfPeak: load})
		}
	}
	// What was published for 8 KiB is the system time at one load.
	e.Points = append(e.Points, Point{Label: "8 KiB, 64,000/s", Series: "8 KiB, 64,000/s", X: 100,
		Workload:  Workload{Pattern: RandRead, BlockSize: 8192, Depth: loadDepth, Jobs: 1, Rate: 64000},
		Published: []Published{{"interrupt", "iops", 64000}, {"poll", "iops", 64000}, {"interrupt", "cpu_system", 45.01}, {"poll", "cpu_system", 42.32}}})
	return e
}

// e2 is the budget sweep from the 2017 discussion of polling in the AHCI driver.
func e2() *Experiment {
	e := &Experiment{Name: "e2", Title: "The budget of a poller",
		Source:   "polling in the AHCI driver, LSF/MM 2017 (mixed random I/O): budget 31 lost 20 % (276 to 220 IOPS), 128 and 256 equal the baseline",
		Question: "Which budget is too small?",
		XAxis:    "commands in flight", LogX: true,
		Settings: []Setting{interruptSetting},
		Procs:    1}
	for _, b := range []int{31, 128, 256} {
		e.Settings = append(e.Settings, pollSetting(fmt.Sprintf("poll, budget %d", b), min(b, 32), b))
	}
	for _, depth := range []int{8, 32, 64} {
		p := Point{Label: fmt.Sprintf("4 KiB mixed, QD %d", depth), Series: "4 KiB", X: float64(depth),
			Workload: Workload{Pattern: RandRW, ReadPct: 50, BlockSize: 4096, Depth: depth, Jobs: 1}}
		if depth == 32 { // the depth of AHCI's command queue
			p.Published = []Published{{"interrupt", "iops", 276}, {"poll, budget 31", "iops", 220}, {"poll, budget 128", "iops", 276}, {"poll, budget 256", "iops", 276}}
		}
		e.Points = append(e.Points, p)
	}
	return e
}

// e3 is polling on a device that is stacked on others.
func e3() *Experiment {
	e := &Experiment{Name: "e3", Title: "Polling on a stripe of two units",
		Source:   "polling for stacked block devices, linux-block 2020 (RAID-0 over two NVMe devices)",
		Question: "Does polling of the members reach the user of the stripe, as latency and as IOPS?",
		XAxis:    "commands in flight", LogX: true,
		Settings: []Setting{interruptSetting, directSetting},
		Units:    2, Chunk: 64 << 10,
		Procs: 1}
	for _, depth := range []int{1, 2, 4, 8, 16, 32, 64, 128} {
		p := Point{Label: fmt.Sprintf("4 KiB, QD %d", depth), Series: "4 KiB", X: float64(depth),
			Workload: Workload{Pattern: RandRead, BlockSize: 4096, Depth: depth, Jobs: 1}}
		switch depth {
		case 1:
			p.Published = []Published{{"interrupt", "lat_mean", 12.03}, {"direct", "lat_mean", 9.00}, {"interrupt", "iops", 78800}, {"direct", "iops", 108000}}
		case 16:
			p.Published = []Published{{"interrupt", "iops", 252000}, {"direct", "iops", 369000}}
		}
		e.Points = append(e.Points, p)
	}
	return e
}

// e3s is e3 as the user of a block device sees it: disk.Stripe over two sessions, a goroutine per command.
func e3s() *Experiment {
	e := e3()
	e.Name, e.Title, e.Stacked = "e3s", "Polling on disk.Stripe over two sessions", true
	e.XAxis = "goroutines, each in ReadAt"
	e.Points = slices.DeleteFunc(e.Points, func(p Point) bool { return p.X != 1 && p.X != 4 && p.X != 16 && p.X != 64 })
	for k := range e.Points {
		e.Points[k].Label = "4 KiB, " + Counted(int(e.Points[k].X), "reader")
	}
	return e
}

// e4 is the table of the ib_srp patch that reaped in a thread. What it asks is whether another CPU helps: all may be used.
func e4() *Experiment {
	e := &Experiment{Name: "e4", Title: "Reaping in a thread (thread=y) against in the interrupt (thread=n)",
		Source:   "the thread=y patch for the kernel's SRP initiator, linux-rdma 2010 (QDR InfiniBand, NULLIO storage, queue depth 128)",
		Question: "Does a reaping thread help many jobs, and what does it cost one?",
		XAxis:    "jobs", LogX: true,
		Settings: []Setting{interruptSetting, threadSetting}}
	for _, row := range []struct {
		bs, jobs int
		n, y     float64
	}{
		{512, 1, 25400, 23100}, {512, 128, 122000, 153000},
		{4096, 1, 25000, 22700}, {4096, 128, 121000, 157000},
		{64 << 10, 1, 14400, 13600}, {64 << 10, 4, 36700, 36600},
		{512 << 10, 1, 3430, 3420}, {512 << 10, 4, 5020, 4990},
	} {
		e.Points = append(e.Points, Point{Label: fmt.Sprintf("%s x %d", sizeName(row.bs), row.jobs), Series: sizeName(row.bs), X: float64(row.jobs),
			Workload:  Workload{Pattern: RandRead, BlockSize: row.bs, Depth: 1, Jobs: row.jobs},
			Published: []Published{{"interrupt", "iops", row.n}, {"thread", "iops", row.y}}})
	}
	return e
}

func everyMode() []Setting {
	return []Setting{interruptSetting, threadSetting, pollSetting("poll", 32, 256), directSetting, adaptiveSetting}
}

// modeMatrix is every mode at every load.
func modeMatrix() *Experiment {
	e := &Experiment{Name: "matrix", Title: "Every completion mode at every load",
		Source:   "none: our own",
		Question: "Which mode costs the least CPU time per command at a given load, and is adaptive always near it?",
		XAxis:    "load, percent of the peak with interrupts",
		Settings: everyMode(),
		Procs:    1}
	w := Workload{Pattern: RandRead, BlockSize: 4096, Depth: loadDepth, Jobs: 1}
	e.Points = append(e.Points, Point{Label: "4 KiB, saturated", Series: "4 KiB", X: 100, Workload: w})
	for _, load := range []float64{10, 30, 60, 90} {
		e.Points = append(e.Points, Point{Label: fmt.Sprintf("4 KiB, %g %% load", load), Series: "4 KiB", X: load, Workload: w, PercentOfPeak: load})
	}
	return e
}

// depthSweep is every mode at every queue depth.
func depthSweep() *Experiment {
	e := &Experiment{Name: "depth", Title: "Every completion mode at every queue depth",
		Source:   "none: our own",
		Question: "How do latency and CPU time per command grow with the commands in flight?",
		XAxis:    "commands in flight", LogX: true,
		Settings: everyMode(),
		Procs:    1}
	for _, depth := range []int{1, 2, 4, 8, 16, 32, 64, 128} {
		e.Points = append(e.Points, Point{Label: fmt.Sprintf("4 KiB, QD %d", depth), Series: "4 KiB", X: float64(depth),
			Workload: Workload{Pattern: RandRead, BlockSize: 4096, Depth: depth, Jobs: 1}})
	}
	return e
}
