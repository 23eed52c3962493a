package bench

import (
	"encoding/binary"
	"fmt"
)

// What Verify writes into a block tells which block it is and how many times it was written:
//
//	0  offset in bytes, 8
//	8  generation, 4; 12 seed, low 4 bytes
//	16 a xorshift sequence seeded with the three, to the end
//
// so that a lost write, a misplaced one and a torn one all show.

func patternSeed(off int64, gen uint32, seed uint64) uint64 {
	x := uint64(off)*0x9e3779b97f4a7c15 ^ uint64(gen)<<32 ^ seed
	if x == 0 {
		x = 1
	}
	return x
}

func next(x uint64) uint64 {
	x ^= x << 13
	x ^= x >> 7
	return x ^ x<<17
}

// blank reports whether b has nothing but zeros, which no pattern has: its generation is 1 or more.
func blank(b []byte) bool {
	for _, v := range b {
		if v != 0 {
			return false
		}
	}
	return true
}

// fillPattern fills b, a multiple of 16 bytes.
func fillPattern(b []byte, off int64, gen uint32, seed uint64) {
	binary.LittleEndian.PutUint64(b, uint64(off))
	binary.LittleEndian.PutUint32(b[8:], gen)
	binary.LittleEndian.PutUint32(b[12:], uint32(seed))
	x := patternSeed(off, gen, seed)
	for i := 16; i+8 <= len(b); i += 8 {
		x = next(x)
		binary.LittleEndian.PutUint64(b[i:], x)
	}
}

// checkPattern says how b differs from what was written.
func checkPattern(b []byte, off int64, gen uint32, seed uint64) error {
	if blank(b) {
		return fmt.Errorf("%w: block at %d was written and reads as zeros: the unit lost it, or keeps nothing at all, as null units do, which cannot be verified", ErrVerify, off)
	}
	if o, g, s := binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint32(b[8:]), binary.LittleEndian.Uint32(b[12:]); o != uint64(off) || g != gen || s != uint32(seed) {
		return fmt.Errorf("%w: block at %d holds offset %d generation %d seed 0x%x, want generation %d seed 0x%x", ErrVerify, off, o, g, s, gen, uint32(seed))
	}
	x := patternSeed(off, gen, seed)
	for i := 16; i+8 <= len(b); i += 8 {
		x = next(x)
		if v := binary.LittleEndian.Uint64(b[i:]); v != x {
			return fmt.Errorf("%w: block at %d, byte %d: 0x%016x, want 0x%016x", ErrVerify, off, i, v, x)
		}
	}
	return nil
}
