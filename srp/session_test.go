package srp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"srp-initiator/completion"
	"srp-initiator/srp"
	"srp-initiator/srp/scsi"
)

func TestNegotiation(t *testing.T) {
	s := newWorld(t).login(t)
	st := s.Stats()
	if len(st.Channels) != 1 || st.State != "running" {
		t.Fatalf("%+v", st)
	}
	c := st.Channels[0]
	if c.InitialCredits != 128 || c.QueueDepth != 62 || c.MaxITIULen != 8276 || c.IULimit != 8260 || c.Immediate != 8192 || c.Descriptors != 12 {
		t.Errorf("%+v", c)
	}
}

func TestInquiry(t *testing.T) {
	eachMode(t, func(t *testing.T, m completion.Mode) {
		s := newWorld(t).login(t, withMode(m))
		b := make([]byte, 4096)
		c := &srp.Command{CDB: scsi.Inquiry(uint16(len(b))), Dir: srp.DataIn, Data: b}
		do(t, s, c)
		if c.Residual <= 0 || c.Transferred() < scsi.StandardInquiryLen {
			t.Errorf("residual %d, transferred %d", c.Residual, c.Transferred())
		}
		q, err := scsi.ParseInquiry(b[:c.Transferred()])
		if err != nil || q.DeviceType != scsi.TypeDisk {
			t.Errorf("%+v, %v", q, err)
		}
		// An error with sense, and a command without data.
		bad := &srp.Command{CDB: scsi.Read10(0xfffffff0, 1), Dir: srp.DataIn, Data: b[:512]}
		err = s.Do(context.Background(), bad)
		if cc, ok := err.(*scsi.CheckConditionError); !ok || cc.Sense.Key != scsi.IllegalRequest || cc.Sense.ASC != scsi.ASCLBAOutOfRange {
			t.Errorf("read beyond the end: %v", err)
		}
		do(t, s, &srp.Command{CDB: scsi.TestUnitReady()})
	})
}

// Data of every size move right, in place and by bounce buffer, whole and in pieces.
func TestReadWrite(t *testing.T) {
	eachMode(t, func(t *testing.T, m completion.Mode) {
		s := newWorld(t).login(t, withMode(m), func(o *srp.LoginOptions) { o.CmdSGEntries = 255 })
		mem, err := s.AllocMemory(2 << 20)
		if err != nil {
			t.Fatal(err)
		}
		seed := uint64(0)
		for _, size := range []int{512, 4096, 8192, 8704, 65536, 512 << 10} {
			for _, pieces := range []int{1, 12, 255} {
				if size < pieces {
					continue
				}
				for _, inPlace := range []bool{true, false} {
					seed++
					buf := make([]byte, 2<<20)
					if inPlace {
						buf = mem.Bytes()
					}
					out, in := cut(buf[:1<<20], size, pieces), cut(buf[1<<20:], size, pieces)
					want := make([]byte, size)
					fill(want, seed)
					scatter(out, want)
					lba := uint32(seed * 1024 % 60000)
					do(t, s, &srp.Command{CDB: scsi.Write10(lba, uint16(size/512)), Dir: srp.DataOut, Gather: out})
					c := &srp.Command{CDB: scsi.Read10(lba, uint16(size/512)), Dir: srp.DataIn, Gather: in}
					do(t, s, c)
					if c.Residual != 0 {
						t.Errorf("residual %d", c.Residual)
					}
					if !bytes.Equal(bytes.Join(in, nil), want) {
						t.Errorf("%d bytes in %d pieces, in place %v: data differ", size, pieces, inPlace)
					}
				}
			}
		}
		st := s.Stats().Total
		if st.Immediate == 0 || st.Bounced == 0 {
			t.Errorf("not all ways of moving data were used: %+v", st)
		}
	})
}

// cut takes size bytes from buf in pieces of uneven length, with gaps, so that they cannot be joined.
func cut(buf []byte, size, pieces int) (list [][]byte) {
	at := 0
	for i := range pieces {
		n := size / pieces
		if i == pieces-1 {
			n = size - n*(pieces-1)
		}
		list = append(list, buf[at:at+n])
		at += n + 1 + i%7
	}
	return list
}

func scatter(list [][]byte, from []byte) {
	for _, p := range list {
		from = from[copy(p, from):]
	}
}

// Several channels of one nexus carry I/O side by side.
func TestChannels(t *testing.T) {
	s := newWorld(t).login(t, func(o *srp.LoginOptions) { o.ChannelCount = 4 })
	if n := s.Channels(); n != 4 {
		t.Fatalf("%d channels", n)
	}
	load(t, s, 8, 16, 200)
	for _, c := range s.Stats().Channels {
		if c.Stats.Commands < 100 {
			t.Errorf("channel %d carried %d commands", c.Index, c.Stats.Commands)
		}
		if c.Index > 0 && c.MultiChannel != "others maintained" {
			t.Errorf("channel %d: %s", c.Index, c.MultiChannel)
		}
	}
}

// load runs jobs, each with depth commands under way, until each job has done rounds of a write and a read that
// verifies it.
func load(t testing.TB, s *srp.Session, jobs, depth, rounds int) {
	t.Helper()
	const size = 4096
	mem, err := s.AllocMemory(jobs * depth * size)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Free()
	var wg sync.WaitGroup
	var worst atomic.Int64
	for j := range jobs {
		wg.Go(func() {
			if err := runJob(s, mem, j, depth, rounds, &worst); err != nil {
				t.Errorf("job %d: %v", j, err)
			}
		})
	}
	wg.Wait()
	t.Logf("%d jobs, depth %d: slowest command %s", jobs, depth, time.Duration(worst.Load()).Round(time.Microsecond))
}

// runJob keeps depth commands under way and waits for them with one waiter, as an event loop would.
func runJob(s *srp.Session, mem *srp.Memory, job, depth, rounds int, worst *atomic.Int64) error {
	const size, blocks = 4096, 8
	var waiter completion.Waiter
	type slot struct {
		c     srp.Command
		buf   []byte
		busy  bool
		done  atomic.Bool
		seed  uint64
		write bool
		began time.Time
	}
	slots := make([]slot, depth)
	want := make([]byte, size)
	seed := uint64(job) << 32
	start := func(i int) error {
		x := &slots[i]
		lba := uint32((job*depth + i) * blocks)
		if x.write = !x.write; x.write {
			seed++
			x.seed = seed
			fill(x.buf, x.seed)
			x.c.CDB, x.c.Dir = scsi.Write10(lba, blocks), srp.DataOut
		} else {
			clear(x.buf)
			x.c.CDB, x.c.Dir = scsi.Read10(lba, blocks), srp.DataIn
		}
		x.c.Data = x.buf
		x.done.Store(false)
		x.busy = true
		x.began = time.Now()
		return s.Submit(&x.c)
	}
	for i := range slots {
		x := &slots[i]
		x.buf = mem.Bytes()[(job*depth+i)*size:][:size]
		x.c.Waiter, x.c.Queue, x.c.Retry = &waiter, job+1, true
		x.c.Done = func(*srp.Command) { x.done.Store(true) }
		if err := start(i); err != nil {
			return err
		}
	}
	left, active := 2*rounds-depth, depth
	for active > 0 {
		found := false
		for i := range slots {
			x := &slots[i]
			if !x.busy || !x.done.Load() {
				continue
			}
			found = true
			x.busy = false
			active--
			if d := int64(time.Since(x.began)); d > worst.Load() {
				worst.Store(d)
			}
			if err := x.c.Error(); err != nil {
				if x.c.Status == scsi.StatusCheckCondition {
					if sense, ok := scsi.ParseSense(x.c.Sense()); ok && sense.Key == scsi.UnitAttention {
						x.write = !x.write
						x.busy = true
						active++
						if err := start(i); err != nil {
							return err
						}
						continue
					}
				}
				return err
			}
			if !x.write {
				if fill(want, x.seed); !bytes.Equal(want, x.buf) {
					return fmt.Errorf("slot %d: data differ", i)
				}
			}
			if left > 0 || x.write { // never end on a write that is not verified
				left--
				active++
				if err := start(i); err != nil {
					return err
				}
			}
		}
		if !found {
			s.Wait(job+1, &waiter, time.Now().Add(20*time.Second))
		}
	}
	return nil
}

// Verified I/O in every mode at several depths; nothing may stall for want of an event.
func TestLoad(t *testing.T) {
	rounds := 2000
	if testing.Short() {
		rounds = 200
	}
	if s := os.Getenv("SRP_LOAD_ROUNDS"); s != "" { // each a write and a read that verifies it; 50000 make 100,000 commands
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatalf("SRP_LOAD_ROUNDS: %v", err)
		}
		rounds = n
	}
	eachMode(t, func(t *testing.T, m completion.Mode) {
		s := newWorld(t).login(t, withMode(m), func(o *srp.LoginOptions) { o.QueueSize = 64 })
		for _, depth := range []int{1, 32, 64} {
			load(t, s, 1, depth, rounds)
		}
		st := s.Stats()
		if n := st.Total.UnknownTags + st.Total.ProtocolErrors + st.Total.Aborts + st.Reconnects; n > 0 {
			t.Errorf("%+v", st)
		}
	})
}

// Do from many goroutines at once, in every mode.
func TestDoConcurrently(t *testing.T) {
	eachMode(t, func(t *testing.T, m completion.Mode) {
		s := newWorld(t).login(t, withMode(m), func(o *srp.LoginOptions) { o.ChannelCount = 2; o.QueueSize = 8 })
		do(t, s, read10(0, 1, make([]byte, 512)))
		var wg sync.WaitGroup
		for g := range 16 {
			wg.Go(func() {
				b, want := make([]byte, 1024), make([]byte, 1024)
				for i := range 50 {
					fill(want, uint64(g)<<16|uint64(i))
					copy(b, want)
					lba := uint32(g * 2)
					for _, c := range []*srp.Command{write10(lba, 2, b), read10(lba, 2, b)} {
						if err := s.Do(context.Background(), c); err != nil {
							t.Errorf("goroutine %d: %v", g, err)
							return
						}
					}
					if !bytes.Equal(b, want) {
						t.Errorf("goroutine %d: data differ", g)
						return
					}
				}
			})
		}
		wg.Wait()
	})
}

// The mode can be changed under load, any to any.
func TestSetModeUnderLoad(t *testing.T) {
	s := newWorld(t).login(t, func(o *srp.LoginOptions) { o.ChannelCount = 2 })
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
			}
			m := completion.Modes()[i*3%5]
			if err := s.SetMode(m); err != nil {
				t.Errorf("SetMode(%s): %v", m, err)
			}
		}
	})
	load(t, s, 4, 8, 500)
	close(stop)
	wg.Wait()
}

// Logging in and out leaves nothing behind.
func TestLoginLoop(t *testing.T) {
	w := newWorld(t)
	n := 200
	if testing.Short() {
		n = 20
	}
	loop := func(n int) {
		for range n {
			s, err := w.tryLogin(t, func(o *srp.LoginOptions) { o.ChannelCount = 2 })
			if err != nil {
				t.Fatal(err)
			}
			do(t, s, read10(0, 1, make([]byte, 512)))
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	loop(3)
	fds, goroutines, maps := openFDs(t), settledGoroutines(), mapped(t)
	loop(n)
	// The target takes the last session down on its own time.
	atMost(t, "file descriptors", fds, func() int { return openFDs(t) })
	atMost(t, "goroutines", goroutines+2, settledGoroutines)
	atMost(t, "mappings", maps+n/4, func() int { return mapped(t) })
}

// atMost waits until there are no more than limit.
func atMost(t *testing.T, what string, limit int, count func() int) {
	t.Helper()
	n := count()
	for end := time.Now().Add(5 * time.Second); n > limit && time.Now().Before(end); n = count() {
		time.Sleep(5 * time.Millisecond)
	}
	if n > limit {
		t.Errorf("%d %s, at most %d before", n, what, limit)
	}
}

func openFDs(t testing.TB) int {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

func mapped(t testing.TB) int {
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(b, []byte("\n"))
}

func settledGoroutines() int {
	n := runtime.NumGoroutine()
	for range 20 {
		time.Sleep(50 * time.Millisecond)
		m := runtime.NumGoroutine()
		if m >= n {
			return m
		}
		n = m
	}
	return n
}

// After the login no command makes the initiator allocate.
func TestNoAllocation(t *testing.T) {
	w := newWorld(t)
	if w.emu != nil {
		// The target and its device share the process; that they do not allocate either is for their own tests, but
		// an allocation of theirs fails this one too.
		t.Log("with the target in the same process")
	}
	for _, m := range []completion.Mode{completion.Interrupt, completion.Direct} {
		t.Run(m.String(), func(t *testing.T) {
			s := w.login(t, withMode(m))
			mem, err := s.AllocMemory(1 << 20)
			if err != nil {
				t.Fatal(err)
			}
			plain := make([]byte, 4096)
			gather := cut(mem.Bytes(), 65536, 12)
			cmds := map[string]*srp.Command{
				"read in place":   read10(0, 8, mem.Bytes()[:4096]),
				"read bounced":    read10(0, 8, plain),
				"write immediate": write10(0, 8, mem.Bytes()[:4096]),
				"read gathered":   {CDB: scsi.Read10(0, 128), Dir: srp.DataIn, Gather: gather},
				"write gathered":  {CDB: scsi.Write10(0, 128), Dir: srp.DataOut, Gather: gather},
			}
			for name, c := range cmds {
				c.Queue = 1
				do(t, s, c)
				ctx := context.Background()
				if n := testing.AllocsPerRun(200, func() {
					if err := s.Do(ctx, c); err != nil {
						t.Fatal(err)
					}
				}); n >= 1 {
					t.Errorf("%s: %.1f allocations per command", name, n)
				}
			}
		})
	}
}

// submitReads submits n reads together on a channel, and tells how many doorbells they took; wait waits until they are done.
func submitReads(t *testing.T, s *srp.Session, queue, n int) (wait func(), took uint64) {
	t.Helper()
	doorbells := func() uint64 { return s.Stats().Channels[queue-1].Stats.Doorbells }
	before := doorbells()
	var w completion.Waiter
	var left atomic.Int32
	left.Store(int32(n))
	var cs []*srp.Command
	for i := range n {
		c := read10(uint32(i), 1, make([]byte, 512))
		c.Queue, c.Waiter = queue, &w
		c.Done = func(c *srp.Command) {
			if err := c.Error(); err != nil {
				t.Error(err)
			}
			left.Add(-1)
		}
		cs = append(cs, c)
	}
	if m, err := s.SubmitAll(cs); m != n || err != nil {
		t.Fatalf("%d of %d commands taken: %v", m, n, err)
	}
	took = doorbells() - before
	return func() {
		for end := time.Now().Add(time.Minute); left.Load() > 0; {
			if !s.Wait(queue, &w, end) {
				t.Fatalf("%d of %d commands are not done", left.Load(), n)
			}
		}
	}, took
}

// Of commands submitted together the first leaves by itself if a notification has been taken since the last ones were and nothing is under way: it wakes the target.
func TestSubmitAllWakes(t *testing.T) {
	s := newWorld(t, withFaults("cmd op=read : hold\ncmd op=tur : release")).login(t, func(o *srp.LoginOptions) { o.Completion.Mode = completion.Interrupt })
	release := func() { do(t, s, &srp.Command{CDB: scsi.TestUnitReady()}) }
	notifications := func() uint64 { return s.Stats().Completion.Notifications }
	// Not every completion needs one: arming finds some.
	notified := func() {
		for before := notifications(); notifications() == before; {
			do(t, s, &srp.Command{CDB: scsi.Inquiry(36), Dir: srp.DataIn, Data: make([]byte, 36)})
		}
	}
	release() // and the unit attention is out of the way
	notified()
	first, took := submitReads(t, s, 1, 4)
	for took == 0 { // the handler was still at work on what the notification brought, and rings for all
		release()
		first()
		notified()
		first, took = submitReads(t, s, 1, 4)
	}
	if took != 2 {
		t.Errorf("behind a notification: %d doorbells, want 2", took)
	}
	notified()
	second, took := submitReads(t, s, 1, 4)
	if took > 1 {
		t.Errorf("with commands under way: %d doorbells, want 1 at most", took)
	}
	release()
	first()
	second()
	if err := s.SetMode(completion.Direct); err != nil {
		t.Fatal(err)
	}
	for again := true; again; { // now and then a notification comes even so
		before := notifications()
		wait, _ := submitReads(t, s, 1, 1)
		release()
		wait()
		wait, took = submitReads(t, s, 1, 4)
		if again = notifications() != before; !again && took > 1 {
			t.Errorf("without a notification: %d doorbells, want 1 at most", took)
		}
		release()
		wait()
	}
}

// Of sixteen or more commands submitted together the first half leaves by itself when nothing is under way.
func TestSubmitAllHalves(t *testing.T) {
	s := newWorld(t, withFaults("cmd op=read : hold\ncmd op=tur : release")).login(t, func(o *srp.LoginOptions) { o.ChannelCount, o.Completion.Mode = 2, completion.Direct })
	for queue := range 2 {
		release := func() { do(t, s, &srp.Command{CDB: scsi.TestUnitReady(), Queue: queue + 1}) }
		release()
		for _, c := range []struct {
			underWay, n int
			want        uint64
		}{{0, 15, 1}, {0, 16, 2}, {0, 21, 2}, {1, 16, 1}, {0, 16, 2}} {
			for again := true; again; { // a notification now and then wakes this end even so
				before := s.Stats().Completion.Notifications
				wait, _ := submitReads(t, s, queue+1, 1)
				if c.underWay == 0 {
					release()
					wait()
				}
				all, took := submitReads(t, s, queue+1, c.n)
				if again = s.Stats().Completion.Notifications != before; !again && took != c.want {
					t.Errorf("%d commands, %d under way: %d doorbells, want %d", c.n, c.underWay, took, c.want)
				}
				release()
				all()
				wait()
			}
		}
	}
}

// Commands submitted together leave with one doorbell for each channel, but perhaps the first, up to the first that is not taken.
func TestSubmitAll(t *testing.T) {
	s := newWorld(t, withFaults("cmd op=read : hold\ncmd op=tur : release")).login(t, func(o *srp.LoginOptions) { o.ChannelCount = 2 })
	do(t, s, &srp.Command{CDB: scsi.TestUnitReady()}) // a unit attention
	var cs []*srp.Command
	ended := make(chan *srp.Command, 10)
	for i := range 10 {
		c := read10(uint32(i), 1, make([]byte, 512))
		c.Queue = 1 + i/4
		c.Done = func(c *srp.Command) { ended <- c }
		cs = append(cs, c)
	}
	cs[8].Dir = srp.NoData // with a buffer: not taken
	before := s.Stats()
	began := time.Now()
	n, err := s.SubmitAll(cs)
	after := s.Stats()
	var arg *srp.ArgumentError
	if n != 8 || !errors.As(err, &arg) {
		t.Fatalf("%d commands taken, and then: %v", n, err)
	}
	for q := range 2 {
		do(t, s, &srp.Command{CDB: scsi.TestUnitReady(), Queue: q + 1})
	}
	for range n {
		c := <-ended
		if err := c.Error(); err != nil {
			t.Error(err)
		}
		if c.Ended.Before(began) || c.Ended.After(time.Now()) {
			t.Errorf("submitted after %s, done at %s", began, c.Ended)
		}
	}
	for i := range 2 {
		b, a := before.Channels[i].Stats, after.Channels[i].Stats
		if c, d := a.Commands-b.Commands, a.Doorbells-b.Doorbells; c != 4 || d > 2 { // two: TestSubmitAllWakes; none: a handler at work rings for all
			t.Errorf("channel %d: %d commands, %d doorbells", i, c, d)
		}
	}
	if n, err := s.SubmitAll(nil); n != 0 || err != nil {
		t.Errorf("nothing: %d, %v", n, err)
	}
}
