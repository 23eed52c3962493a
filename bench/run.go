package bench

// The flow of one command here. A job, one goroutine, owns its slots: command, buffer, offset. It fills a slot and submits it;
// from then on the slot is the session's. Done runs where completions are reaped: it takes the time and pushes the slot onto the job's
// stack of done slots, without a lock and without allocating. The job takes the whole stack, checks, counts and submits again. When nothing is
// done it waits in Session.Wait, which in some modes makes it the one who reaps.

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"srp-initiator/completion"
	"srp-initiator/srp"
	"srp-initiator/srp/disk"
	"srp-initiator/srp/scsi"
)

// Result is what one run of a workload measured. Latencies are from submission to completion.
type Result struct {
	Pattern       Pattern `json:"rw"`
	BlockSize     int     `json:"bs"`
	Depth         int     `json:"iodepth"`
	Jobs          int     `json:"jobs"`
	Procs         int     `json:"procs"` // CPUs that the process might use at once
	Mode          string  `json:"completion"`
	RateLimit     float64 `json:"rate_limit,omitempty"`  // commands per second asked for
	Interrupted   bool    `json:"interrupted,omitempty"` // before its end
	Seconds       float64 `json:"seconds"`
	Commands      int64   `json:"commands"`
	Bytes         int64   `json:"bytes"`
	ReadBacks     int64   `json:"read_backs,omitempty"` // of Commands, those that read back what Verify had written
	Verified      int64   `json:"verified,omitempty"`   // of the commands, those whose data were checked; in the warm-up they are too
	IOPS          float64 `json:"iops"`
	MBPerS        float64 `json:"mb_per_s"` // 10^6 bytes
	MeanUS        float64 `json:"lat_mean_us"`
	P50US         float64 `json:"lat_p50_us"`
	P99US         float64 `json:"lat_p99_us"`
	P999US        float64 `json:"lat_p999_us"`
	MaxUS         float64 `json:"lat_max_us"`
	UserCPU       float64 `json:"cpu_user_s"` // of this process
	SystemCPU     float64 `json:"cpu_system_s"`
	CPUPerIOUS    float64 `json:"cpu_us_per_io"`
	SwitchesPerIO float64 `json:"switches_per_io"` // context switches of this process's threads, voluntary or not
	// Notifications of completion queues, and how many commands each brought.
	NotificationsPerS  float64          `json:"notifications_per_s"`
	NotificationsPerIO float64          `json:"notifications_per_io"`
	CommandsPerNotif   float64          `json:"commands_per_notification"` // 0: there was none
	CompletionsPerWake float64          `json:"completions_per_wakeup"`
	Completion         completion.Stats `json:"completion_stats"` // in the measured time
	Channels           srp.ChannelStats `json:"srp_stats"`        // in the measured time
	AllocationsPerIO   float64          `json:"allocs_per_io"`
	latency            *hdrhistogram.Histogram
	LongestStallUS     float64 `json:"longest_stall_us"` // longest time in which no command at all completed, while some were under way
	longestStall       time.Duration
	// The measured time.
	Began, Ended time.Time `json:"-"`
}

// Histogram is the distribution of latencies in nanoseconds.
func (r *Result) Histogram() *hdrhistogram.Histogram { return r.latency }

// Latencies from 100 ns to a minute, to three digits.
func newHistogram() *hdrhistogram.Histogram { return hdrhistogram.New(100, int64(time.Minute), 3) }

type slot struct {
	srp.Command
	job     *job
	next    *slot // on the done stack
	index   int
	buf     []byte
	off     int64
	gen     uint32
	write   bool
	check   bool // the read-back of a write
	retry   disk.RetryPolicy
	started time.Time
}

type job struct {
	r      *runner
	index  int
	slots  []slot
	free   []*slot
	batch  []*srp.Command // about to be submitted
	done   atomic.Pointer[slot]
	waiter completion.Waiter
	rng    *rand.Rand
	hist   *hdrhistogram.Histogram
	at     int64 // next block of a sequential pattern
	count  int64 // submitted
	comp   int64 // completed in the measured part
	back   int64 // of those, read-backs
	verif  int64
	stall  time.Duration
	last   time.Time
	err    error
}

type runner struct {
	w         Workload
	ds        []*disk.Disk // more than one: blocks go to them in turn, chunk by chunk
	chunk     int64
	s         *srp.Session
	mem       *srp.Memory
	blocks    int64
	gens      []uint32      // Verify: generation per block, each owned by one slot
	busyLimit time.Duration // how long a target may answer a command with BUSY or TASK SET FULL
	begin     time.Time
	measure   time.Time // after the warm-up
	end       time.Time // zero: Loops end it
	left      atomic.Int64
	stop      atomic.Bool
	measuring atomic.Bool
}

// Run runs w on d, whose session is s. A command that fails ends the run with its error, as does ctx; once measuring has begun, the end of ctx
// gives both its cause and what was measured until then (Result.Interrupted).
func Run(ctx context.Context, s *srp.Session, d *disk.Disk, w Workload) (*Result, error) {
	return RunStriped(ctx, s, []*disk.Disk{d}, 1<<30, w)
}

// RunStriped is Run on several units of one session as if they were one, with chunks of chunk bytes on each in turn (RAID-0). Every
// command lies in one chunk: chunk is a multiple of the workload's block size.
func RunStriped(ctx context.Context, s *srp.Session, ds []*disk.Disk, chunk int, w Workload) (*Result, error) {
	if err := w.checkUnits(s, ds, chunk); err != nil {
		return nil, err
	}
	defer useProcs(w.Procs)()
	r := &runner{w: w, ds: ds, chunk: int64(chunk), s: s, blocks: w.Size / int64(w.BlockSize), busyLimit: s.Options().CommandTimeout}
	if w.Loops > 0 {
		r.left.Store(w.Loops)
	}
	mem, err := s.AllocMemory(w.Jobs * w.Depth * w.BlockSize)
	if err != nil {
		return nil, err
	}
	defer mem.Free()
	r.mem = mem
	for i, b := 0, mem.Bytes(); i+8 <= len(b) && w.Pattern.writes(); i += 8 {
		b[i] = byte(i >> 3)
	}
	jobs := make([]*job, w.Jobs)
	for i := range jobs {
		jobs[i] = r.newJob(i)
	}
	if w.Verify {
		r.gens = make([]uint32, r.blocks)
		if w.Pattern != Write && w.Pattern != RandWrite {
			if err := r.fill(ctx, jobs); err != nil {
				return nil, fmt.Errorf("filling for verify: %w", err)
			}
		}
	}
	return r.run(ctx, jobs)
}

func (r *runner) newJob(i int) *job {
	j := &job{r: r, index: i, slots: make([]slot, r.w.Depth), free: make([]*slot, 0, r.w.Depth), batch: make([]*srp.Command, 0, r.w.Depth),
		rng: rand.New(rand.NewPCG(r.w.Seed, uint64(i))), hist: newHistogram()}
	bs := r.w.BlockSize
	for k := range j.slots {
		c := &j.slots[k]
		c.job, c.index = j, i*r.w.Depth+k
		c.buf = r.mem.Bytes()[c.index*bs:][:bs:bs]
		c.Queue, c.Waiter = i+1, &j.waiter
		c.Done = slotDone
		j.free = append(j.free, c)
	}
	if r.w.Jobs > 0 && !r.w.Pattern.random() {
		j.at = r.blocks / int64(r.w.Jobs) * int64(i)
	}
	return j
}

// slotDone runs in the reaper.
func slotDone(c *srp.Command) {
	s := slotOf(c)
	j := s.job
	for {
		head := j.done.Load()
		s.next = head
		if j.done.CompareAndSwap(head, s) {
			return
		}
	}
}

// fill writes generation 1 to every block of the range.
func (r *runner) fill(ctx context.Context, jobs []*job) error {
	saved, loops := r.w, r.left.Load()
	r.w.Pattern, r.w.Rate = Write, 0
	r.left.Store(r.blocks)
	r.begin = time.Now()
	r.measure, r.end = time.Time{}, time.Time{}
	var at atomic.Int64
	err := r.each(ctx, jobs, func(j *job) error { return j.fill(ctx, &at) })
	r.w = saved
	r.left.Store(loops)
	return err
}

func (j *job) fill(ctx context.Context, at *atomic.Int64) error {
	r := j.r
	for {
		for len(j.free) > 0 && !r.stop.Load() {
			b := at.Add(1) - 1
			if b >= r.blocks {
				break
			}
			s := j.take()
			s.off, s.write, s.check, s.gen = r.w.Offset+b*int64(r.w.BlockSize), true, false, 1
			r.gens[b] = 1
			fillPattern(s.buf, s.off, 1, r.w.Seed)
			if err := j.submit(s); err != nil {
				// What is under way must end before its memory is freed.
				j.fail(err)
			}
		}
		if len(j.free) == len(j.slots) {
			return j.err
		}
		j.reap((*slot).failure)
	}
}

// fail ends the run; the first reason counts.
func (j *job) fail(err error) {
	if j.err == nil {
		j.err = err
	}
	j.r.stop.Store(true)
}

// failure is nil when the command was executed with a good status and all of its data moved, no more and no less.
func (s *slot) failure() error {
	switch {
	case s.Error() != nil:
		return s.Error()
	case s.Transferred() != len(s.buf):
		return fmt.Errorf("%d of %d bytes moved at offset %d", s.Transferred(), len(s.buf), s.off)
	case s.Residual < 0:
		return fmt.Errorf("the target speaks of %d bytes more than the command's %d at offset %d", -s.Residual, len(s.buf), s.off)
	}
	return nil
}

func (j *job) take() *slot {
	s := j.free[len(j.free)-1]
	j.free = j.free[:len(j.free)-1]
	return s
}

// prepare makes the command of slot s, which is submitted at time at.
func (j *job) prepare(s *slot, at time.Time) {
	d, off := j.r.place(s.off)
	if s.write {
		d.Write(&s.Command, off, s.buf, false)
	} else {
		d.Read(&s.Command, off, s.buf)
	}
	s.started = at
}

func (j *job) submit(s *slot) error {
	j.prepare(s, time.Now())
	if err := j.r.s.Submit(&s.Command); err != nil {
		j.free = append(j.free, s)
		return err
	}
	return nil
}

// submitAll submits the commands of j.batch, as many as are due at the same time. They count from one reading of the clock before the first of them is made.
func (j *job) submitAll() error {
	n, err := j.r.s.SubmitAll(j.batch)
	for _, c := range j.batch[n:] {
		j.free = append(j.free, slotOf(c))
	}
	j.batch = j.batch[:0]
	return err
}

// place finds the unit that holds the byte at off, and where.
func (r *runner) place(off int64) (*disk.Disk, int64) {
	n := int64(len(r.ds))
	if n == 1 {
		return r.ds[0], off
	}
	k := off / r.chunk
	return r.ds[k%n], k/n*r.chunk + off%r.chunk
}

// reap waits until at least one slot is done, calls f for each, and frees it unless f submitted it again.
func (j *job) reap(f func(*slot) error) {
	head := j.done.Swap(nil)
	for head == nil {
		j.r.s.Wait(j.index+1, &j.waiter, time.Time{})
		head = j.done.Swap(nil)
	}
	j.handle(head, f)
}

func (j *job) handle(head *slot, f func(*slot) error) {
	for s := head; s != nil; {
		n := s.next
		if s.Error() != nil && !j.r.stop.Load() {
			// A busy target, a full task set, a unit attention: not the end of a measurement, but its time.
			if wait, ok := s.retry.Again(&s.Command, j.r.busyLimit, func(scsi.Sense) {}); ok {
				time.Sleep(wait)
				err := j.r.s.Submit(&s.Command)
				if err == nil {
					s = n
					continue
				}
				s.Err = err // Submit has cleared what the last try had to say
			}
		}
		s.retry = disk.RetryPolicy{}
		j.free = append(j.free, s)
		if err := f(s); err != nil {
			j.fail(err)
		}
		s = n
	}
}

// each runs f in a goroutine per job and returns the first error; ctx's end stops them.
func (r *runner) each(ctx context.Context, jobs []*job, f func(*job) error) error {
	stopped := context.AfterFunc(ctx, func() { r.stop.Store(true) })
	defer stopped()
	var wg sync.WaitGroup
	errs := make([]error, len(jobs))
	for i, j := range jobs {
		wg.Go(func() { errs[i] = f(j) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return nil
}

func (r *runner) run(ctx context.Context, jobs []*job) (*Result, error) {
	var before, after usage
	var mem [2]runtime.MemStats
	runtime.ReadMemStats(&mem[0])
	ss := []*srp.Session{r.s}
	r.begin = time.Now()
	r.measure = r.begin.Add(r.w.Warmup)
	if r.w.Runtime > 0 {
		r.end = r.measure.Add(r.w.Runtime)
	}
	warm := make(chan struct{})
	if r.w.Warmup > 0 {
		go func() {
			defer close(warm)
			select {
			case <-time.After(r.w.Warmup):
			case <-ctx.Done():
			}
			before = usageNow(ss)
			r.measuring.Store(true)
		}()
	} else {
		before = usageNow(ss)
		r.measuring.Store(true)
		close(warm)
	}
	err := r.each(ctx, jobs, func(j *job) error { return j.loop() })
	<-warm
	after = usageNow(ss)
	if err != nil && (ctx.Err() == nil || !r.measuring.Load()) {
		return nil, err
	}
	runtime.ReadMemStats(&mem[1])
	res := &Result{Pattern: r.w.Pattern, BlockSize: r.w.BlockSize, Depth: r.w.Depth, Jobs: r.w.Jobs, Procs: runtime.GOMAXPROCS(0), Mode: r.s.Mode().String(), RateLimit: r.w.Rate, latency: newHistogram()}
	for _, j := range jobs {
		res.Commands += j.comp
		res.ReadBacks += j.back
		res.Verified += j.verif
		res.latency.Merge(j.hist)
		res.longestStall = max(res.longestStall, j.stall)
	}
	res.Bytes = res.Commands * int64(r.w.BlockSize)
	res.LongestStallUS = float64(res.longestStall) / 1e3
	res.measured(before, after, mem[1].Mallocs-mem[0].Mallocs)
	res.Interrupted = err != nil
	return res, err
}

// longestNap is how long a job may overlook the end of a run.
const longestNap = 20 * time.Millisecond

func tv(t syscall.Timeval) float64 { return float64(t.Nano()) / 1e9 }

// together is the time in which what is due is due at once, where there is a rate. Waking for each of 100,000 commands per second would take the whole CPU, and
// hide what the modes cost; and if it were left to the clock's granularity which commands come together, it would depend on the mode.
const together = 50 * time.Microsecond

// loop is one job's life in the measured part.
func (j *job) loop() error {
	r := j.r
	var interval time.Duration // between groups of commands that are due together
	group := 1
	if r.w.Rate > 0 {
		each := float64(time.Second) * float64(r.w.Jobs) / r.w.Rate
		group = int(math.Ceil(float64(together) / each))
		interval = time.Duration(float64(group) * each)
		// Else what is due in less than a millisecond would be submitted with all that is due until then.
		alarm, err := completion.NewAlarm()
		if err != nil {
			j.fail(err)
			return err
		}
		j.waiter.SetAlarm(alarm)
		defer func() {
			j.waiter.SetAlarm(nil)
			alarm.Close()
		}()
	}
	due := r.begin
	if interval > 0 {
		due = due.Add(interval * time.Duration(j.index) / time.Duration(r.w.Jobs)) // jobs take turns
	}
	j.last = time.Now()
	left := group // of the commands due at due
	for {
		now := time.Now()
		over := r.stop.Load() || !r.end.IsZero() && !now.Before(r.end)
		for !over && len(j.free) > 0 && (interval == 0 || !due.After(now)) {
			if r.w.Loops > 0 && r.left.Add(-1) < 0 {
				r.left.Store(0)
				over = true
				break
			}
			s := j.take()
			j.choose(s)
			j.prepare(s, now)
			j.batch = append(j.batch, &s.Command)
			if interval > 0 {
				if left--; left == 0 {
					due, left = due.Add(interval), group
				}
			}
		}
		if err := j.submitAll(); err != nil {
			j.fail(err)
			j.drain()
			return j.err
		}
		if over {
			j.drain()
			return j.err
		}
		head := j.done.Swap(nil)
		if head == nil {
			// With a rate the next command may be due before the next completion.
			var until time.Time
			if interval > 0 && len(j.free) > 0 {
				until = due
			}
			if len(j.free) == len(j.slots) {
				if until.IsZero() {
					j.drain()
					return j.err
				}
				if nap := now.Add(longestNap); due.Before(nap) {
					j.waiter.Wait(due)
				} else {
					j.waiter.Wait(nap) // the end may come before the next command is due
				}
				j.last = time.Now() // nothing was under way: no stall
				continue
			}
			r.s.Wait(j.index+1, &j.waiter, until)
			if head = j.done.Swap(nil); head == nil {
				continue
			}
		}
		j.handle(head, j.finished)
		if j.err != nil {
			j.drain()
			return j.err
		}
	}
}

// drain takes what is still under way.
func (j *job) drain() {
	for len(j.free) < len(j.slots) {
		j.reap(j.finished)
	}
}

// choose decides what slot s does next.
func (j *job) choose(s *slot) {
	r := j.r
	var b int64
	switch {
	case r.w.Verify:
		// A slot's own blocks are those with its index modulo all slots, so that no two commands meet.
		n := int64(r.w.Jobs * r.w.Depth)
		own := (r.blocks-int64(s.index)+n-1)/n - 1 // index of the last one
		if r.w.Pattern.random() {
			b = j.rng.Int64N(own + 1)
		} else {
			b = j.count / int64(r.w.Depth) % (own + 1)
		}
		b = b*n + int64(s.index)
	case r.w.Pattern.random():
		b = j.rng.Int64N(r.blocks)
	default:
		b = j.at
		if j.at++; j.at == r.blocks {
			j.at = 0
		}
	}
	j.count++
	s.off = r.w.Offset + b*int64(r.w.BlockSize)
	s.check = false
	s.write = r.w.Pattern == Write || r.w.Pattern == RandWrite || r.w.Pattern == RandRW && j.rng.IntN(100) >= r.w.ReadPct
	if r.gens == nil {
		return
	}
	if s.write {
		r.gens[b]++
	}
	s.gen = r.gens[b]
	if s.write {
		fillPattern(s.buf, s.off, s.gen, r.w.Seed)
	}
}

// finished counts a done slot. With Verify a write is read back at once, by a command that counts too.
func (j *job) finished(s *slot) error {
	if err := s.failure(); err != nil {
		return err
	}
	if gap := s.Ended.Sub(j.last); gap > j.stall && j.r.measuring.Load() {
		j.stall = gap
	}
	if s.Ended.After(j.last) {
		j.last = s.Ended
	}
	// A command that began in the warm-up counts for neither.
	counts := j.r.measuring.Load() && !s.started.Before(j.r.measure)
	if counts {
		j.comp++
		if s.check && !s.write {
			j.back++
		}
		if err := j.hist.RecordValue(min(max(int64(s.Ended.Sub(s.started)), 100), int64(time.Minute))); err != nil {
			return err
		}
	}
	if j.r.gens == nil {
		return nil
	}
	if s.write {
		i := slices.Index(j.free, s)
		j.free = slices.Delete(j.free, i, i+1)
		s.write, s.check = false, true
		clear(s.buf)
		return j.submit(s)
	}
	if err := checkPattern(s.buf, s.off, s.gen, j.r.w.Seed); err != nil {
		return err
	}
	if counts {
		j.verif++
	}
	return nil
}

// IsCanceled reports that a run ended because its context did.
func IsCanceled(err error) bool { return errors.Is(err, context.Canceled) }
