// Package numtable finds an object by the 24-bit number that a completion entry names: a
// queue pair number or a user index. Readers take no lock.
package numtable

import "sync/atomic"

const leafBits = 12

type leaf[T any] [1 << leafBits]atomic.Pointer[T]

// Table maps 24-bit numbers to objects. The zero value is empty. Get may run
// beside Set; calls of Set must not overlap.
type Table[T any] struct {
	dir [1 << leafBits]atomic.Pointer[leaf[T]]
}

// Get returns what number n names, or nil.
func (t *Table[T]) Get(n uint32) *T {
	l := t.dir[n>>leafBits&(1<<leafBits-1)].Load()
	if l == nil {
		return nil
	}
	return l[n&(1<<leafBits-1)].Load()
}

// Set makes number n name v; nil takes the name away.
func (t *Table[T]) Set(n uint32, v *T) {
	d := &t.dir[n>>leafBits&(1<<leafBits-1)]
	l := d.Load()
	if l == nil {
		if v == nil {
			return
		}
		l = new(leaf[T])
		d.Store(l)
	}
	l[n&(1<<leafBits-1)].Store(v)
}

// Free returns the lowest number below limit that names nothing, and whether there is one.
func (t *Table[T]) Free(limit uint32) (uint32, bool) {
	for n := uint32(0); n < limit; n++ {
		if t.Get(n) == nil {
			return n, true
		}
	}
	return 0, false
}
