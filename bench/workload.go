// Package bench drives logical units and measures them: workloads of many commands under way, honest
// comparisons of variants in alternating rounds, and the published experiments re-run.
package bench

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
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
	Rate    float64       // commands per second of all jobs together; 0: as many as go
	Verify  bool          // check every byte read, and read back what was written
	Offset  int64         // of the range used
	Size    int64         // of the range used; 0: to the end of the unit
	Seed    uint64
}

// Limits of a workload.
const (
	MaxDepth = 4096
	MaxJobs  = 1024
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
	case w.Runtime < 0 || w.Loops < 0 || w.Warmup < 0 || w.Rate < 0:
		return badItem("runtime, loops, ramp-time, rate", "must not be negative")
	case w.Runtime == 0 && w.Loops == 0:
		return badItem("runtime", "neither runtime nor loops says when to end")
	case w.ReadPct < 0 || w.ReadPct > 100:
		return badItem("rwmixread", "%d is not 0 to 100", w.ReadPct)
	case w.Offset < 0:
		return badItem("offset", "%d is negative", w.Offset)
	case w.Size < 0:
		return badItem("size", "%d is negative", w.Size)
	}
	return nil
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
var ErrVerify = errors.New("bench: data mismatch")
