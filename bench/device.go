package bench

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"srp-initiator/completion"
	"srp-initiator/srp"
	"srp-initiator/srp/disk"
)

// usage is what this process and the sessions have spent so far.
type usage struct {
	cpu   syscall.Rusage
	stats completion.Stats
	srp   srp.ChannelStats
	at    time.Time
}

func usageNow(ss []*srp.Session) (u usage) {
	for _, s := range ss {
		st := s.Stats()
		u.stats, u.srp = u.stats.Add(st.Completion), u.srp.Add(st.Total)
	}
	syscall.Getrusage(syscall.RUSAGE_SELF, &u.cpu)
	u.at = time.Now()
	return u
}

// RunDevice measures random reads from a block device, as its users make them: w.Jobs times w.Depth goroutines, each in ReadAt all the
// time. ss are the sessions that the device stands on; the first decides what its mode is called. A read that fails ends the run with its
// error. When ctx ends, the sessions are closed.
func RunDevice(ctx context.Context, dev disk.Device, ss []*srp.Session, w Workload) (*Result, error) {
	if err := w.checkDevice(dev); err != nil {
		return nil, err
	}
	if w.Pattern != RandRead || w.Rate > 0 || w.Loops > 0 || w.Verify {
		return nil, badItem("rw", "of a stacked device only random reads for a time are measured")
	}
	defer useProcs(w.Procs)()
	users := w.Jobs * w.Depth
	var measuring, stop atomic.Bool
	defer context.AfterFunc(ctx, func() {
		stop.Store(true)
		for _, s := range ss {
			s.Close() // who waits for a dead target is set free
		}
	})()
	hists, errs := make([]*hdrhistogram.Histogram, users), make([]error, users)
	var mem [2]runtime.MemStats
	var wg sync.WaitGroup
	for k := range users {
		hists[k] = newHistogram()
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(w.Seed, uint64(k)))
			buf := make([]byte, w.BlockSize)
			for !stop.Load() {
				counts := measuring.Load()
				off := w.Offset + rng.Int64N(w.Size/int64(w.BlockSize))*int64(w.BlockSize)
				began := time.Now()
				if _, err := dev.ReadAt(buf, off); err != nil {
					errs[k] = err
					stop.Store(true)
					return
				}
				if took := time.Since(began); counts && measuring.Load() {
					hists[k].RecordValue(min(max(int64(took), 100), int64(time.Minute)))
				}
			}
		})
	}
	sleep := func(d time.Duration) {
		select {
		case <-time.After(d):
		case <-ctx.Done():
		}
	}
	sleep(w.Warmup)
	runtime.ReadMemStats(&mem[0])
	before := usageNow(ss)
	measuring.Store(true)
	sleep(w.Runtime)
	measuring.Store(false)
	after := usageNow(ss)
	stop.Store(true)
	wg.Wait()
	runtime.ReadMemStats(&mem[1])
	if cause := context.Cause(ctx); cause != nil {
		return nil, cause
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	r := &Result{Pattern: w.Pattern, BlockSize: w.BlockSize, Depth: w.Depth, Jobs: w.Jobs, Procs: runtime.GOMAXPROCS(0), Mode: ss[0].Mode().String(), latency: newHistogram()}
	for _, h := range hists {
		r.latency.Merge(h)
	}
	r.Commands = r.latency.TotalCount()
	r.Bytes = r.Commands * int64(w.BlockSize)
	r.measured(before, after, mem[1].Mallocs-mem[0].Mallocs)
	return r, nil
}

// measured fills in what follows from commands, latencies and what was spent.
func (r *Result) measured(before, after usage, allocations uint64) {
	r.Seconds = after.at.Sub(before.at).Seconds()
	r.UserCPU = tv(after.cpu.Utime) - tv(before.cpu.Utime)
	r.SystemCPU = tv(after.cpu.Stime) - tv(before.cpu.Stime)
	r.Began, r.Ended = before.at, after.at
	r.Completion = after.stats.Sub(before.stats)
	r.Channels = after.srp.Sub(before.srp)
	n := float64(r.Commands)
	if n == 0 {
		return
	}
	r.IOPS = n / r.Seconds
	r.MBPerS = float64(r.Bytes) / r.Seconds / 1e6
	r.CPUPerIOUS = (r.UserCPU + r.SystemCPU) / n * 1e6
	r.SwitchesPerIO = float64(after.cpu.Nvcsw-before.cpu.Nvcsw+after.cpu.Nivcsw-before.cpu.Nivcsw) / n
	r.NotificationsPerIO = float64(r.Completion.Notifications) / n
	r.AllocationsPerIO = float64(allocations) / n
	us := func(ns int64) float64 { return float64(ns) / 1e3 }
	r.MeanUS = r.latency.Mean() / 1e3
	r.P50US, r.P99US, r.P999US = us(r.latency.ValueAtQuantile(50)), us(r.latency.ValueAtQuantile(99)), us(r.latency.ValueAtQuantile(99.9))
	r.MaxUS = us(r.latency.Max())
	r.NotificationsPerS = float64(r.Completion.Notifications) / r.Seconds
	if r.Completion.Notifications > 0 {
		r.CommandsPerNotif = n / float64(r.Completion.Notifications)
	}
	r.CompletionsPerWake = r.Completion.CompletionsPerWakeup()
}
