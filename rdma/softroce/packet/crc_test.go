package packet

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"
)

func TestCRC(t *testing.T) {
	forceFold(t)
	r := rand.New(rand.NewPCG(5, 6))
	buf := make([]byte, 5000)
	for i := range buf {
		buf[i] = byte(r.Uint32())
	}
	check := func(off, n int) {
		t.Helper()
		src := buf[off : off+n]
		was := bytes.Clone(src)
		seed := r.Uint32()
		want := crc32.Update(seed, crc32.IEEETable, src)
		if got := update(seed, src); got != want {
			t.Fatalf("%d bytes at %d: %08x, want %08x", n, off, got, want)
		}
		dst := bytes.Repeat([]byte{0xee}, n+64)
		ahead := uint64(n) & 1 * r.Uint64()
		if got := updateCopy(seed, dst[32:32+n], src, ahead); got != want {
			t.Fatalf("%d bytes at %d copied: %08x, want %08x", n, off, got, want)
		}
		if !bytes.Equal(dst[32:32+n], was) || !bytes.Equal(src, was) {
			t.Fatalf("%d bytes at %d: copy differs", n, off)
		}
		for i, b := range dst {
			if (i < 32 || i >= 32+n) && b != 0xee {
				t.Fatalf("%d bytes at %d: wrote outside, at %d", n, off, i-32)
			}
		}
	}
	for n := range 1300 {
		check(r.IntN(64), n)
	}
	for range 2000 {
		n := r.IntN(4200)
		check(r.IntN(len(buf)-n+1), n)
	}
}

func BenchmarkCRC(b *testing.B) {
	for _, n := range []int{256, 512, 1024, 4096} {
		src, dst := make([]byte, n), make([]byte, n)
		run := func(name string, f func()) {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				b.SetBytes(int64(n))
				for range b.N {
					f()
				}
			})
		}
		var c uint32
		run("hash-crc32", func() { c = crc32.Update(c, crc32.IEEETable, src) })
		run("update", func() { c = update(c, src) })
		run("copy+hash-crc32", func() { copy(dst, src); c = crc32.Update(c, crc32.IEEETable, dst) })
		run("updateCopy", func() { c = updateCopy(c, dst, src, 0) })
	}
}
