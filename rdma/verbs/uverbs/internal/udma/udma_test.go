package udma

import (
	"bytes"
	"testing"
	"unsafe"
)

func TestStores(t *testing.T) {
	mem := make([]uint64, 20)
	src := make([]uint64, 16)
	for i := range src {
		src[i] = uint64(i+1) * 0x0101010101010101
	}
	MMIOCopy64(unsafe.Pointer(&mem[2]), unsafe.Pointer(&src[0]), 128)
	for i, v := range mem {
		want := uint64(0)
		if i >= 2 && i < 18 {
			want = src[i-2]
		}
		if v != want {
			t.Errorf("after MMIOCopy64 word %d is %#x, want %#x", i, v, want)
		}
	}
	MMIOStore64(unsafe.Pointer(&mem[1]), 0x1122334455667788)
	MMIOStore32(unsafe.Pointer(&mem[0]), 0xaabbccdd)
	MMIOFlush()
	ToDevice()
	FromDevice()
	if mem[1] != 0x1122334455667788 || mem[0] != 0xaabbccdd {
		t.Errorf("stores gave %#x %#x", mem[0], mem[1])
	}
	got := unsafe.Slice((*byte)(unsafe.Pointer(&mem[0])), 8)
	if !bytes.Equal(got, []byte{0xdd, 0xcc, 0xbb, 0xaa, 0, 0, 0, 0}) {
		t.Errorf("a 4-byte store left % x", got)
	}
}
