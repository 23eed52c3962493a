package hostmem

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"testing"

	"srp-initiator/internal/require"
)

// flags are the kernel's VmFlags of the mapping that holds addr (proc(5), smaps).
func flags(t *testing.T, addr uint64) []string {
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		require.Missing(t, err.Error())
	}
	defer f.Close()
	inside := false
	for s := bufio.NewScanner(f); s.Scan(); {
		var from, to uint64
		if n, _ := fmt.Sscanf(s.Text(), "%x-%x ", &from, &to); n == 2 {
			inside = from <= addr && addr < to
		}
		if rest, ok := strings.CutPrefix(s.Text(), "VmFlags:"); ok && inside {
			return strings.Fields(rest)
		}
	}
	t.Fatalf("no mapping at %#x", addr)
	return nil
}

func has(list []string, s string) bool {
	for _, v := range list {
		if v == s {
			return true
		}
	}
	return false
}

func TestAlloc(t *testing.T) {
	page := os.Getpagesize()
	_, err := os.Stat("/sys/kernel/mm/transparent_hugepage/enabled")
	hugePages := err == nil
	for _, size := range []int{1, page + 1, hugePage - page, hugePage, 2*hugePage + page + 1} {
		r, err := Alloc(size)
		if err != nil {
			t.Fatal(err)
		}
		want := (size + page - 1) / page * page
		b := r.Bytes()
		if r.Len() != want || len(b) != want || cap(b) != want {
			t.Errorf("%d bytes: length %d, %d bytes of room %d, want %d", size, r.Len(), len(b), cap(b), want)
		}
		for i, v := range b {
			if v != 0 {
				t.Fatalf("%d bytes: byte %d is %d", size, i, v)
			}
		}
		b[0], b[len(b)-1] = 1, 2
		large := size >= hugePage
		if at := r.Addr(); at%uint64(page) != 0 || large && at%hugePage != 0 {
			t.Errorf("%d bytes: at %#x", size, at)
		}
		for _, at := range []uint64{r.Addr(), r.Addr() + uint64(want) - 1} {
			f := flags(t, at)
			if !has(f, "dc") {
				t.Errorf("%d bytes: a fork would copy them: %v", size, f)
			}
			if hugePages && large && !has(f, "hg") {
				t.Errorf("%d bytes: no huge pages asked for: %v", size, f)
			}
		}
		if err := r.Free(); err != nil {
			t.Error(err)
		}
		if err := r.Free(); err != nil || r.Bytes() != nil {
			t.Errorf("freed again: %v, %d bytes", err, len(r.Bytes()))
		}
	}
	if _, err := Alloc(0); err == nil {
		t.Error("0 bytes were mapped")
	}
}
