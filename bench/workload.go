// Package bench drives logical units and measures them: workloads of many commands under way, honest
// comparisons of variants in alternating rounds, and the published experiments re-run.
package bench

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"srp-initiator/srp"
	"srp-initiator/srp/disk"
)

// Pattern is the order and direction of a workload's commands, with fio's names.
type Pattern string

const (
	Read      Pattern = "read"
	Write     Pattern = "write"
	RandRead  Pattern = "randread"
	RandWrite Pattern = "randwrite"
	RandRW    Pattern = "randrw"
)

// Patterns lists them all.
var Patterns = []Pattern{Read, Write, RandRead, RandWrite, RandRW}

func (p Pattern) random() bool { return p != Read && p != Write }
func (p Pattern) writes() bool { return p != Read && p != RandRead }

// Workload says what to do. Every job is a goroutine of its own that keeps Depth commands under way.
type Workload struct {
	Pattern   Pattern
	BlockSize int // bytes per command
	Depth     int // commands under way per job
	Jobs      int
	// Runtime of the measured part; 0: until Loops commands are done.
	Runtime time.Duration
	Warmup  time.Duration // before the measured part
	Loops   int64         // commands of all jobs together; 0: until Runtime has passed
	ReadPct int           // RandRW: percent of reads
	Rate    float64       // commands per second of all jobs together, MinRate to MaxRate; 0: as many as go
	Verify  bool          // check every byte read, and read back what was written
	Offset  int64         // of the range used
	Size    int64         // of the range used; 0: to the end of the unit
	Seed    uint64
	// Procs is how many CPUs the process's goroutines may use at once while the workload runs (runtime.GOMAXPROCS, which is put back at its
	// end); 0: as it is. With several, Go's scheduler wakes an idle thread whenever a goroutine becomes ready, which costs CPU
	// time with every command (docs/benchmarks.md). It is the process's: workloads that run at the same time want 0.
	Procs int
}

// Limits of a workload.
const (
	MaxDepth = 4096
	MaxJobs  = 1024
	// Commands under way in all, and the memory that they need.
	MaxCommands = 1 << 16
	MaxMemory   = 1 << 30
	// Commands per second.
	MinRate = 1
	MaxRate = 1e7
	// MaxProcs bounds Procs: the runtime keeps memory for every one.
	MaxProcs = 1024
	// maxVerifyBlocks bounds what Verify remembers, 4 bytes per block.
	maxVerifyBlocks = 1 << 28
)

// WorkloadError says which part of a workload is wrong and what is allowed.
type WorkloadError struct{ Item, Reason string }

func (e *WorkloadError) Error() string { return e.Item + ": " + e.Reason }

func badItem(item, format string, a ...any) error {
	return &WorkloadError{item, fmt.Sprintf(format, a...)}
}

// Validate checks what can be checked before the unit is known.
func (w *Workload) Validate() error {
	if !slices.Contains(Patterns, w.Pattern) {
		names := make([]string, len(Patterns))
		for i, p := range Patterns {
			names[i] = string(p)
		}
		return badItem("rw", "%q is none of %s", w.Pattern, strings.Join(names, ", "))
	}
	switch {
	case w.BlockSize <= 0:
		return badItem("bs", "%d is not a positive number of bytes", w.BlockSize)
	case w.Depth < 1 || w.Depth > MaxDepth:
		return badItem("iodepth", "%d is not 1 to %d", w.Depth, MaxDepth)
	case w.Jobs < 1 || w.Jobs > MaxJobs:
		return badItem("jobs", "%d is not 1 to %d", w.Jobs, MaxJobs)
	case w.Jobs*w.Depth > MaxCommands:
		return badItem("jobs", "%d times iodepth %d are %d commands under way; want %d at most", w.Jobs, w.Depth, w.Jobs*w.Depth, MaxCommands)
	case w.BlockSize > MaxMemory/(w.Jobs*w.Depth):
		return badItem("bs", "%d bytes for each of %s under way are more than %d in all; want %d at most", w.BlockSize, Counted(w.Jobs*w.Depth, "command"), MaxMemory, MaxMemory/(w.Jobs*w.Depth))
	case w.Runtime < 0:
		return badItem("runtime", "%s is negative; want a time such as 5s", w.Runtime)
	case w.Warmup < 0:
		return badItem("ramp-time", "%s is negative; want 0 or a time such as 200ms", w.Warmup)
	case w.Loops < 0:
		return badItem("loops", "%d is negative; want 1 or more", w.Loops)
	case w.Rate != 0 && !(w.Rate >= MinRate && w.Rate <= MaxRate):
		return badItem("rate", "%g is not 0 (as many as go) or %d to %.0f commands per second", w.Rate, MinRate, float64(MaxRate))
	case w.Runtime == 0 && w.Loops == 0:
		return badItem("runtime", "neither runtime nor loops says when to end")
	case w.ReadPct < 0 || w.ReadPct > 100:
		return badItem("rwmixread", "%d is not 0 to 100", w.ReadPct)
	case w.Offset < 0:
		return badItem("offset", "%d is negative", w.Offset)
	case w.Size < 0:
		return badItem("size", "%d is negative", w.Size)
	case w.Procs < 0 || w.Procs > MaxProcs:
		return badItem("procs", "%d is not 1 to %d CPUs, or 0 for all that the program may use", w.Procs, MaxProcs)
	}
	return nil
}

// useProcs lets the process use so many CPUs at once, 0: as many as it does, until the returned function is called.
func useProcs(n int) (restore func()) {
	if n == 0 {
		return func() {}
	}
	old := runtime.GOMAXPROCS(n)
	return func() { runtime.GOMAXPROCS(old) }
}

// checkUnits completes w for units of one session, striped when they are several.
func (w *Workload) checkUnits(s *srp.Session, ds []*disk.Disk, chunk int) error {
	most, size, block := s.MaxTransfer(), int64(0), 0
	for i, d := range ds {
		most = min(most, d.MaxTransfer())
		if i == 0 || d.Size() < size {
			size = d.Size()
		}
		block = max(block, d.BlockSize())
		switch {
		case !d.ReadOnly():
		case w.Pattern.writes():
			return badItem("rw", "%s writes, and the unit is read-only: want read or randread", w.Pattern)
		case w.Verify:
			return badItem("verify", "it fills the range first, and the unit is read-only")
		}
	}
	if len(ds) > 1 {
		if chunk < w.BlockSize || w.BlockSize > 0 && chunk%w.BlockSize != 0 {
			return badItem("bs", "%d does not divide the stripe's chunk of %d bytes", w.BlockSize, chunk)
		}
		size = size / int64(chunk) * int64(chunk) * int64(len(ds))
	}
	return w.check(size, block, most)
}

// checkDevice completes w for a stacked device, which splits what is too large for a command.
func (w *Workload) checkDevice(dev disk.Device) error {
	return w.check(dev.Size(), dev.BlockSize(), w.BlockSize)
}

// check completes w for a unit of size bytes in blocks of block bytes, of which one command moves at most most bytes.
func (w *Workload) check(size int64, block, most int) error {
	if err := w.Validate(); err != nil {
		return err
	}
	switch {
	case w.BlockSize%block != 0:
		return badItem("bs", "%d is not a multiple of the unit's block size %d", w.BlockSize, block)
	case w.BlockSize > most:
		return badItem("bs", "%d is more than one command may move here, %d; max_sect=%d in TARGET allows it where the unit does", w.BlockSize, most, (w.BlockSize+511)/512)
	case w.Offset%int64(block) != 0 || w.Offset >= size:
		return badItem("offset", "%d is not a multiple of %d below the unit's size %d", w.Offset, block, size)
	}
	if w.Size == 0 {
		w.Size = size - w.Offset
	}
	if w.Size > size-w.Offset {
		return badItem("size", "%d bytes at %d reach past the unit's end at %d", w.Size, w.Offset, size)
	}
	if n := w.Size / int64(w.BlockSize); n < int64(w.Jobs*w.Depth) {
		if n == 0 {
			return badItem("size", "%d bytes hold no command of %d bytes", w.Size, w.BlockSize)
		}
		if w.Verify {
			return badItem("size", "with verify each of the %d commands under way needs a place of its own: %d bytes hold %d", w.Jobs*w.Depth, w.Size, n)
		}
	}
	if w.Verify && w.Size/int64(w.BlockSize) > maxVerifyBlocks {
		return badItem("size", "verify remembers at most %d blocks of %d bytes: give a smaller size", maxVerifyBlocks, w.BlockSize)
	}
	return nil
}

// ErrVerify is wrapped by every mismatch that Verify finds.
var ErrVerify = errors.New("data mismatch")
