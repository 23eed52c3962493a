package udma

import (
	"bytes"
	"strings"
	"testing"
	"unsafe"
)

// TestStores: every function stores what it says, where it says, and nothing else. Order and
// fences are seen by the drivers' traces.
func TestStores(t *testing.T) {
	var mem [64]uint64 // registers at 8, records at 0
	var ring [32]uint64
	for i := range ring {
		ring[i] = uint64(i+1) * 0x0101010101010101
	}
	at := func(i int) unsafe.Pointer { return unsafe.Pointer(&mem[i]) }
	check := func(what string, want map[int]uint64) {
		t.Helper()
		for i, v := range mem {
			if v != want[i] {
				t.Errorf("after %s word %d is %#x, want %#x", what, i, v, want[i])
			}
		}
		clear(mem[:])
	}
	StoreRecord(unsafe.Add(at(0), 4), 0x11223344)
	check("StoreRecord", map[int]uint64{0: 0x11223344 << 32})
	Ring(at(0), 0xaabbccdd, at(8), 0x1122334455667788)
	check("Ring", map[int]uint64{0: 0xaabbccdd, 8: 0x1122334455667788})
	Store32(unsafe.Add(at(9), 4), 0xdeadbeef)
	check("Store32", map[int]uint64{9: 0xdeadbeef << 32})
	Store64(at(9), 0x8877665544332211)
	check("Store64", map[int]uint64{9: 0x8877665544332211})
	CopyToRegister(at(16), unsafe.Pointer(&ring[8]), 2)
	want := map[int]uint64{}
	for i := range 16 {
		want[16+i] = ring[8+i]
	}
	check("CopyToRegister", want)
	// The last two lines of the ring, then the first.
	RingBlueFlame(at(0), 7, at(16), unsafe.Pointer(&ring[16]), unsafe.Pointer(&ring[0]), unsafe.Add(unsafe.Pointer(&ring[0]), len(ring)*8), 3)
	want = map[int]uint64{0: 7}
	for i := range 24 {
		want[16+i] = ring[(16+i)%len(ring)]
	}
	check("RingBlueFlame", want)
	FromDevice()
	check("FromDevice", nil)
	b := []byte{1, 2, 3}
	if p := Pointer(uint64(uintptr(unsafe.Pointer(&b[0])))); *(*byte)(p) != 1 {
		t.Errorf("Pointer lost its way")
	}
}

// TestGather: the copy is as long as its destination, down to one byte and none at all.
func TestGather(t *testing.T) {
	src := []byte("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
	for n := range len(src) + 1 {
		dst := bytes.Repeat([]byte{'.'}, len(src)+1)
		Gather(dst[:n], uint64(uintptr(unsafe.Pointer(&src[0]))))
		if want := string(src[:n]) + strings.Repeat(".", len(src)+1-n); string(dst) != want {
			t.Errorf("%d bytes: %q, want %q", n, dst, want)
		}
	}
	Gather(nil, 1<<63) // an entry without bytes may have any address
}

// TestCopyInline: all bytes and none beside them, for every length around the limits between the ways to copy.
func TestCopyInline(t *testing.T) {
	src := make([]byte, 320)
	for i := range src {
		src[i] = byte(i%255) + 1
	}
	for n := range len(src) + 1 {
		for name, f := range map[string]func(dst, src unsafe.Pointer, n int){"CopyInline": CopyInline, "Copy16": Copy16} {
			if name == "Copy16" && n < 16 {
				continue
			}
			dst := make([]byte, 16+len(src)+64)
			f(unsafe.Pointer(&dst[16]), unsafe.Pointer(&src[0]), n)
			if !bytes.Equal(dst[16:][:n], src[:n]) {
				t.Errorf("%s of %d bytes: % x", name, n, dst[16:][:n])
			}
			clear(dst[16:][:n])
			if !bytes.Equal(dst, make([]byte, len(dst))) {
				t.Errorf("%s of %d bytes wrote beside them: % x", name, n, dst)
			}
		}
	}
}
