package packet

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

func TestCopy(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	buf := make([]byte, 10000)
	for i := range buf {
		buf[i] = byte(r.Uint32())
	}
	check := func(from, to, n int) {
		t.Helper()
		dst := bytes.Repeat([]byte{0xee}, to+n+64)
		Copy(dst[to:len(dst)-32], buf[from:from+n])
		if !bytes.Equal(dst[to:to+n], buf[from:from+n]) {
			t.Fatalf("%d bytes from %d to %d differ", n, from, to)
		}
		for i, b := range dst {
			if (i < to || i >= to+n) && b != 0xee {
				t.Fatalf("%d bytes from %d to %d: wrote outside, at %d", n, from, to, i-to)
			}
		}
	}
	for n := range 4300 {
		check(r.IntN(64), r.IntN(64), n)
	}
	for range 500 {
		n := r.IntN(9900)
		check(r.IntN(64), r.IntN(64), n)
	}
	defer func() {
		if recover() == nil {
			t.Error("a copy into too little room was made")
		}
	}()
	Copy(make([]byte, 4095), buf[:4096])
}

// There need not be any memory ahead.
func TestCopyAhead(t *testing.T) {
	src, dst := make([]byte, 4096), make([]byte, 4096)
	for _, at := range []uint64{0, 1, 4096, 1<<47 - 1, 1 << 63, 1<<64 - 1} {
		for _, n := range []int{0, 1, 64, 1024, 4096} {
			want := ICRC(0).Data(src[:n])
			if got := ICRC(0).Copy(dst, src[:n], at); got != want {
				t.Errorf("%d bytes with 0x%x ahead: %08x, want %08x", n, at, got, want)
			}
		}
	}
}
