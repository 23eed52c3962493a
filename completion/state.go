package completion

import "sync/atomic"

// Ownership of an instance is one word. Its transitions are pure functions of
// the old word, applied by compare-and-swap, so that the interleaving proof
// (model_test.go) runs exactly what production runs.
//
//	        schedule                     schedule (refused: leaves a mark)
//	free ---------------> owned --------------------------> owned|rang
//	 ^                    |   ^                                 |
//	 |  release           |   | release finds the mark          |
//	 +--------------------+   +---------------------------------+
//	                      |
//	 disable              v  release or exhausted weight
//	owned --> owned|disabling --> owned (by the disabler) --Enable--> owned (by the mode's executor)
//
// owned is irq_poll's IRQ_POLL_F_SCHED, disabling its IRQ_POLL_F_DISABLE, and rang is
// NAPI's NAPIF_STATE_MISSED.
const (
	owned     uint32 = 1 << iota // somebody owns the instance
	rang                         // somebody was refused since the owner last looked
	disabling                    // a disabler waits for the owner to hand over
)

// state is the ownership word.
type state struct{ word atomic.Uint32 }

// tryOwn takes a free instance, and leaves no mark when it is not free.
func (s *state) tryOwn() bool {
	return s.word.Load() == 0 && s.word.CompareAndSwap(0, owned)
}

// schedule is the atomic test-and-set: true makes the caller the owner. False
// says that there is an owner, who cannot release before it has looked again.
func (s *state) schedule() bool {
	for {
		w := s.word.Load()
		if w&owned == 0 {
			if s.word.CompareAndSwap(w, w|owned) {
				return true
			}
		} else if w&rang != 0 || s.word.CompareAndSwap(w, w|rang) {
			return false
		}
	}
}

// release outcomes.
type outcome uint8

const (
	released  outcome = iota // free; somebody else may own it by now
	lookAgain                // the caller still owns it: it must reap and arm once more
	handed                   // the disabler owns it now
)

// release gives an owned instance back. A disabler is served first; a mark left by schedule keeps the caller the owner.
func (s *state) release() outcome {
	for {
		w := s.word.Load()
		switch {
		case w&owned == 0:
			panic("completion: released by somebody who does not own it")
		case w&disabling != 0:
			if s.word.CompareAndSwap(w, owned) {
				return handed
			}
		case w&rang != 0:
			if s.word.CompareAndSwap(w, w&^rang) {
				return lookAgain
			}
		default:
			if s.word.CompareAndSwap(w, 0) {
				return released
			}
		}
	}
}

// disablerWaits reports that a disabler waits for the owner, who asks.
func (s *state) disablerWaits() bool { return s.word.Load()&disabling != 0 }

// yieldToDisabler hands an owned instance to a waiting disabler, whatever work is left.
func (s *state) yieldToDisabler() bool {
	for {
		w := s.word.Load()
		if w&disabling == 0 {
			return false
		}
		if s.word.CompareAndSwap(w, owned) {
			return true
		}
	}
}

// requestDisable takes a free instance for the disabler (true), or asks its owner for it. One disabler at a time.
func (s *state) requestDisable() bool {
	for {
		w := s.word.Load()
		if w&owned == 0 {
			if s.word.CompareAndSwap(w, owned) {
				return true
			}
		} else if s.word.CompareAndSwap(w, w|disabling) {
			return false
		}
	}
}
