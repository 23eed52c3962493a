package mlx5

// What the recordings do not hold: window binds, whose bytes testdata/libcost printed from libmlx5 44.0, and paths at the edge.

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"strings"
	"syscall"
	"testing"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/golden"
	"srp-initiator/rdma/verbs/uverbs/internal/ring"
)

// pair builds two queue pairs on one completion queue.
func pair(t *testing.T, profile string) *rig { return pairOf(t, profile, golden.PairCap.MaxSendSGE) }

// pairOf is pair with sends of up to sge entries.
func pairOf(t *testing.T, profile string, sge int) *rig {
	r, err := newRig(golden.PairCase(profile))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	reg := newRegister(ring.Addr(r.UARs[1][0x800:]), 256, optionsFromEnv(func(string) string { return "" }))
	reg.shared = true
	for i := range uint32(2) {
		want := golden.PairCap
		want.MaxSendSGE = sge
		l, err := SizeQP(want, recordedLimits)
		if err != nil {
			t.Fatal(err)
		}
		q := &QP{qpn: 0x1a3 + i, rsn: (1 - i) * 0xffffff}
		if profile == "mlx5-legacy" {
			q.rsn = q.qpn
		}
		r.add(q, l, r.Used(l.Bytes+64), reg, false, false)
	}
	return r
}

// arrive puts entry e at producer index i.
func (r *rig) arrive(i int, e []byte) { copy(r.CQBuf[0][i*len(e):], e) }

func TestEdges(t *testing.T) {
	golden.Edge{
		Driver:    driver,
		Profiles:  []string{"mlx5-static", "mlx5-legacy"},
		Pair:      func(t *testing.T, profile string) golden.PairRig { return pair(t, profile) },
		CQEntries: CQEntries, MaxEntries: 1 << 24,
		ByteLen: 20,
		Restarted: func(t *testing.T, r golden.PairRig) {
			if r.(*rig).QPs[0].nextFence != 0 {
				t.Error("a fence is left")
			}
			if _, err := r.PostSend(0, []verbs.SendWorkRequest{{}}); err == nil {
				t.Error("posted in RESET")
			}
		},
	}.Test(t)
}

func TestBindWindow(t *testing.T) {
	const base = 0x100000000000
	r := pair(t, "mlx5-static")
	q := r.QPs[0]
	w := &golden.Window{Key: 0x1ee800}
	for i, c := range []struct {
		off, length uint64
		access      verbs.AccessFlags
		want        string // up to the zeros at the end
	}{
		{0x1040, 1000, verbs.AccessRemoteRead | verbs.AccessRemoteWrite,
			"000000250001a30c00000008001ee800b00000000004000000000000203c6041" + strings.Repeat("00", 32) +
				"000030000001a3010000000000000000000010000000104000000000000003e8" + strings.Repeat("00", 32) +
				"000003e8001ee7000000100000001040"},
		{1, 1, verbs.AccessRemoteRead,
			"000003250001a30c00000028001ee801b00000000004000000000000203c6041" + strings.Repeat("00", 32) +
				"000010000001a302000000000000000000001000000000010000000000000001" + strings.Repeat("00", 32) +
				"00000001001ee7000000100000000001"},
		{0x12345, 0x54321, verbs.AccessRemoteWrite | verbs.AccessRemoteAtomic,
			"000006250001a30c00000028001ee802b00000000004000000000000203c6041" + strings.Repeat("00", 32) +
				"000060000001a303000000000000000000001000000123450000000000054321" + strings.Repeat("00", 32) +
				"00054321001ee7000000100000012345"},
		{0, 1 << 20, verbs.AccessLocalWrite,
			"000009250001a30c00000028001ee803b00000000004000000000000203c6041" + strings.Repeat("00", 32) +
				"000008000001a304000000000000000000001000000000000000000000100000" + strings.Repeat("00", 32) +
				"00100000001ee7000000100000000000"},
	} {
		_, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpBindMW, Flags: verbs.SendSignaled, ImmData: 0xffffffff, Bind: &verbs.BindMW{
			Window: w, Region: golden.Region{}, RKey: w.Key + 1, Addr: base + c.off, Length: c.length, Access: c.access}}})
		if err != nil {
			t.Fatal(err)
		}
		got := hex.EncodeToString(r.SQ(0)[i*192 : (i+1)*192])
		if want := c.want + strings.Repeat("00", 48); got != want {
			t.Errorf("bind %d:\n%s, want\n%s", i, got, want)
		}
	}
	if w.Key != 0x1ee804 {
		t.Errorf("the window's key is %#x", w.Key)
	}
	if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpLocalInv, ImmData: w.Key}}); err != nil {
		t.Fatal(err)
	}
	want := "00000c250001a30800000020001ee80498000000000000000000000020006000" + strings.Repeat("00", 32) +
		"40000000ffffff00" + strings.Repeat("00", 56)
	if got := hex.EncodeToString(r.SQ(0)[4*192:][:128]); got != want {
		t.Errorf("LOCAL_INV:\n%s, want\n%s", got, want)
	}
	if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpBindMW, Bind: &verbs.BindMW{Window: w, Region: golden.Region{}}}}); err == nil {
		t.Error("a bind of no bytes was accepted")
	}
	for _, n := range []uint64{1<<31 + 1, 1 << 32, 1 << 33, 5 << 31, 1 << 63} {
		if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpBindMW, Bind: &verbs.BindMW{Window: w, Region: golden.Region{}, Length: n}}}); err == nil {
			t.Errorf("a bind of %d bytes was accepted", n)
		}
	}
	if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpBindMW, Bind: &verbs.BindMW{Window: w, Region: golden.Region{}, Length: 1 << 31}}}); err != nil {
		t.Errorf("a bind of 2 GiB: %v", err)
	}
	l := q.lay
	for k := range 2 * l.SendBlocks { // so that each segment ends the ring some time
		q.sentPub.Store(q.head)
		wr := verbs.SendWorkRequest{Opcode: verbs.OpLocalInv}
		if k%2 == 0 {
			wr = verbs.SendWorkRequest{Opcode: verbs.OpBindMW, Bind: &verbs.BindMW{Window: &golden.Window{}, Region: golden.Region{}, Length: 1}}
		}
		if _, err := q.PostSend([]verbs.SendWorkRequest{wr}); err != nil {
			t.Fatal(err)
		}
		if got := r.QPBuf[0][l.Bytes:][:64]; !bytes.Equal(got, bytes.Repeat([]byte{0xee}, 64)) {
			t.Fatalf("request %d wrote past the ring: %x", k, got)
		}
	}
}

// TestWholeImmediate: each bit of immediate data or a key reaches the control segment, where the operation has one.
func TestWholeImmediate(t *testing.T) {
	r := pair(t, "mlx5-static")
	q := r.QPs[0]
	for op, want := range map[verbs.SendOpcode]uint32{
		verbs.OpRDMAWrite: 0, verbs.OpSend: 0, verbs.OpRDMARead: 0, verbs.OpCompareSwap: 0, verbs.OpFetchAdd: 0,
		verbs.OpRDMAWriteImm: 1<<32 - 1, verbs.OpSendWithImm: 1<<32 - 1, verbs.OpSendWithInv: 1<<32 - 1, verbs.OpLocalInv: 1<<32 - 1,
	} {
		at := int(q.pi&q.sqMask) * blockSize
		wr := verbs.SendWorkRequest{Opcode: op, ImmData: 1<<32 - 1, Atomic: &verbs.Atomic{}}
		if op != verbs.OpLocalInv {
			wr.SGList = []verbs.SGE{{Addr: 0x1000, Length: 8}}
		}
		if _, err := q.PostSend([]verbs.SendWorkRequest{wr}); err != nil {
			t.Fatal(err)
		}
		if got := binary.BigEndian.Uint32(r.SQ(0)[at+12:]); got != want {
			t.Errorf("%v: immediate %#x, want %#x", op, got, want)
		}
	}
	// A bind names the window by the key it has, and in the last byte of a word says what the key becomes.
	at := int(q.pi&q.sqMask) * blockSize
	bind := verbs.BindMW{Window: &golden.Window{Key: 1<<32 - 1}, Region: golden.Region{}, RKey: 1<<32 - 1, Length: 1}
	if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpBindMW, Bind: &bind}}); err != nil {
		t.Fatal(err)
	}
	if got := binary.BigEndian.Uint32(r.SQ(0)[at+12:]); got != 1<<32-1 {
		t.Errorf("bind: immediate %#x", got)
	}
	if got := binary.BigEndian.Uint32(r.SQ(0)[at+64+4:]); got != q.qpn<<8|0xff {
		t.Errorf("bind: queue pair and key %#x, want %#x", got, q.qpn<<8|0xff)
	}
}

// TestGarbageFields posts requests whose unused fields hold something, over entries that did.
func TestGarbageFields(t *testing.T) {
	r := pair(t, "mlx5-static")
	q := r.QPs[0]
	sge := []verbs.SGE{{Addr: 0x100000000000, Length: 8, LKey: 0x1ee700}}
	for i, c := range []struct {
		op   verbs.SendOpcode
		wire string // control segment after the ring index, then what precedes the data segment
	}{
		{verbs.OpSend, "0a0001a3020000000000000000"},
		{verbs.OpRDMAWrite, "080001a3030000000000000000" + "1122334455667788" + "0099880000000000"},
		{verbs.OpRDMARead, "100001a3030000000000000000" + "1122334455667788" + "0099880000000000"},
		{verbs.OpCompareSwap, "110001a3040000000000000000" + "1122334455667788" + "0099880000000000" + "0000000000000bbb" + "0000000000000aaa"},
		{verbs.OpSendWithImm, "0b0001a30200000000ffffffff"},
		{verbs.OpSendWithInv, "010001a30200000000ffffffff"},
		{verbs.OpRDMAWriteImm, "090001a30300000000ffffffff" + "1122334455667788" + "0099880000000000"},
		{verbs.OpFetchAdd, "120001a3040000000000000000" + "1122334455667788" + "0099880000000000" + "0000000000000aaa" + "0000000000000000"},
	} {
		if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: c.op, ImmData: 0xffffffff, RemoteAddr: 0x1122334455667788, RKey: 0x998800,
			Atomic: &verbs.Atomic{CompareAdd: 0xaaa, Swap: 0xbbb}, SGList: sge}}); err != nil {
			t.Fatal(err)
		}
		want := c.wire + "00000008001ee7000000100000000000"
		if got := hex.EncodeToString(r.SQ(0)[i*64+3:][:len(want)/2]); got != want {
			t.Errorf("%v: %s, want %s", c.op, got, want)
		}
	}
	if _, err := q.PostRecv([]verbs.RecvWorkRequest{{SGList: sge}, {}}); err != nil {
		t.Fatal(err)
	}
	const want = "00000008001ee7000000100000000000" + "00000000000001000000000000000000" + "00000000000001000000000000000000"
	if got := hex.EncodeToString(r.RQ(0)[:48]); got != want {
		t.Errorf("receives: %s, want %s", got, want)
	}
}

// TestReadPayload hands data that came inside the completion to the buffers of the READ or atomic operation.
func TestReadPayload(t *testing.T) {
	const data = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	for _, c := range []struct {
		op     verbs.SendOpcode
		code   byte
		size   int // of a completion
		n      int
		status verbs.WCStatus
		want   [2]string // at 1 and 20
	}{
		{verbs.OpRDMARead, opRDMARead, 64, 13, verbs.WCSuccess, [2]string{"ABC", "DEFGHIJKLM"}},
		{verbs.OpRDMARead, opRDMARead, 128, 13, verbs.WCSuccess, [2]string{"ABC", "DEFGHIJKLM"}},
		{verbs.OpRDMARead, opRDMARead, 64, 14, verbs.WCLocalLengthError, [2]string{"ABC", "DEFGHIJKLM"}},
		{verbs.OpFetchAdd, opAtomicFA, 64, 8, verbs.WCSuccess, [2]string{"", "ABCDEFGH"}},
		{verbs.OpCompareSwap, opAtomicCS, 128, 8, verbs.WCSuccess, [2]string{"", "ABCDEFGH"}},
	} {
		r := pair(t, "mlx5-static")
		r.CQBuf[0] = r.Alloc(16 * c.size)[:16*c.size]
		r.CQs[0].init(ring.Addr(r.CQBuf[0]), ring.Addr(r.Alloc(8)), 16, c.size, &r.table, false)
		mem, err := hostmem.Alloc(64)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { mem.Free() })
		wr := verbs.SendWorkRequest{WRID: 7, Opcode: c.op, Flags: verbs.SendSignaled, Atomic: &verbs.Atomic{CompareAdd: 1<<64 - 1, Swap: 1<<64 - 1}, RemoteAddr: 0x1122334455667788, RKey: 0x998800,
			SGList: []verbs.SGE{{Addr: mem.Addr() + 1, Length: 3}, {Addr: mem.Addr() + 20, Length: 10}}}
		if c.op != verbs.OpRDMARead {
			wr.SGList[0].Length = 0 // left out
		}
		if _, err := r.QPs[0].PostSend([]verbs.SendWorkRequest{wr, wr}); err != nil {
			t.Fatal(err)
		}
		e := r.cqe(0, 0, 0, cqeRequester, c.code)
		d := e[c.size-64:]
		if copy(e, data[:c.n]); c.size == 128 {
			d[63] |= cqePayload64
		} else {
			d[63] |= cqePayload32
		}
		binary.BigEndian.PutUint32(d[44:], uint32(c.n))
		copy(r.CQBuf[0], e)
		var wcs [2]verbs.WorkCompletion
		if k := r.CQs[0].Poll(wcs[:]); k != 1 || wcs[0].WRID != 7 || wcs[0].Status != c.status || wcs[0].ByteLen != uint32(c.n) {
			t.Fatalf("%v: %d completions, %+v", c.op, k, wcs[0])
		}
		want := make([]byte, 64)
		copy(want[1:], c.want[0])
		copy(want[20:], c.want[1])
		if !bytes.Equal(mem.Bytes()[:64], want) {
			t.Errorf("%v: memory %q", c.op, mem.Bytes()[:64])
		}
	}
}

// TestSpreadPayload hands a payload to as many buffers as a READ may name, one byte to each. The counts of 16-byte units are
// 8, 16, 32 and the largest.
func TestSpreadPayload(t *testing.T) {
	const data = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	for _, c := range []struct {
		entries int
		size    int // of a completion
		flag    byte
	}{{6, 64, cqePayload32}, {8, 64, cqePayload32}, {14, 64, cqePayload32}, {30, 64, cqePayload32}, {52, 128, cqePayload64}} {
		for _, more := range []int{0, 1} { // bytes that find no buffer
			if more > 0 && c.entries == len(data) {
				continue
			}
			r := pairOf(t, "mlx5-static", c.entries)
			r.CQBuf[0] = r.Alloc(16 * c.size)[:16*c.size]
			r.CQs[0].init(ring.Addr(r.CQBuf[0]), ring.Addr(r.Alloc(8)), 16, c.size, &r.table, false)
			mem, err := hostmem.Alloc(128)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { mem.Free() })
			clear(mem.Bytes())
			wr := verbs.SendWorkRequest{WRID: 7, Opcode: verbs.OpRDMARead, Flags: verbs.SendSignaled}
			want := make([]byte, 128)
			for i := range c.entries { // backwards, each with a gap behind it
				at := 2 * (c.entries - 1 - i)
				wr.SGList = append(wr.SGList, verbs.SGE{Addr: mem.Addr() + uint64(at), Length: 1})
				want[at] = data[i]
			}
			if _, err := r.QPs[0].PostSend([]verbs.SendWorkRequest{wr}); err != nil {
				t.Fatal(err)
			}
			e := r.cqe(0, 0, 0, cqeRequester, opRDMARead)
			d := e[c.size-64:]
			copy(e, data[:c.entries+more])
			d[63] |= c.flag
			n := uint32(c.entries + more)
			binary.BigEndian.PutUint32(d[44:], n)
			copy(r.CQBuf[0], e)
			status := verbs.WCSuccess
			if more > 0 {
				status = verbs.WCLocalLengthError
			}
			var wcs [2]verbs.WorkCompletion
			if k := r.CQs[0].Poll(wcs[:]); k != 1 || wcs[0].WRID != 7 || wcs[0].Status != status || wcs[0].ByteLen != n {
				t.Errorf("%d entries, %d bytes: %d completions, %+v", c.entries, n, k, wcs[0])
			}
			if !bytes.Equal(mem.Bytes()[:128], want) {
				t.Errorf("%d entries, %d bytes: memory %q, want %q", c.entries, n, mem.Bytes()[:128], want)
			}
		}
	}
}

func TestOneWideReceive(t *testing.T) {
	l, err := SizeQP(verbs.QPCap{MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 8}, recordedLimits)
	if err != nil || l.RecvCount != 1 || l.RecvShift != 7 || l.SendOffset != 128 {
		t.Errorf("%+v, %v", l, err)
	}
}

// TestOwner: an entry of the other lap is the adapter's, whatever else its last byte says, and one never written in any lap.
func TestOwner(t *testing.T) {
	r := pair(t, "mlx5-static")
	c := r.CQs[0]
	var wcs [2]verbs.WorkCompletion
	for _, ci := range []uint32{0, 16, 0xfffff0} {
		c.CI = ci
		other := byte(1)
		if ci&16 != 0 {
			other = 0
		}
		for op := range 0x100 {
			if op := byte(op); op&1 != other && op>>4 != cqeInvalid {
				continue
			}
			r.CQBuf[0][63] = byte(op)
			if n := c.Poll(wcs[:]); n != 0 {
				t.Fatalf("index %#x: an entry %#x of the adapter's was polled", ci, op)
			}
		}
	}
}

// TestIndexBits looks at the consumer index where all of its 24 bits are in use, and where it wraps.
func TestIndexBits(t *testing.T) {
	for _, ci := range []uint32{0x555555, 0xaaaaaa, 0xfffffe, 0xffffff, 0xffffffff} {
		for _, profile := range []string{"mlx5-static", "mlx5-legacy"} {
			r := pair(t, profile)
			c := r.CQs[0]
			c.CI = ci
			q := r.QPs[0]
			at := 32
			if profile == "mlx5-legacy" {
				q.qpn, q.rsn, at = 0xffffff, 0xffffff, 56
				r.table.Set(q.rsn, q)
			}
			if _, err := q.PostRecv([]verbs.RecvWorkRequest{{WRID: 5}, {WRID: 6}, {WRID: 7}}); err != nil {
				t.Fatal(err)
			}
			for i, grh := range []uint32{^uint32(3 << 28), 1 << 28, 2 << 28} {
				e := r.RecvCQE(0, ci+uint32(i))
				e[at] = 0xa5 // not of the number
				binary.BigEndian.PutUint32(e[24:], grh)
				r.arrive(int((ci+uint32(i))&15), e)
			}
			var wcs [3]verbs.WorkCompletion
			if n := c.Poll(wcs[:]); n != 3 || wcs[0].WRID != 5 || wcs[1].WRID != 6 || wcs[2].QPN != q.qpn {
				t.Fatalf("%s index %#x: %d completions %+v", profile, ci, n, wcs)
			}
			if wcs[0].Flags != 0 || wcs[1].Flags != verbs.WCWithGRH || wcs[2].Flags != verbs.WCWithGRH {
				t.Errorf("flags %#x, %#x, %#x", wcs[0].Flags, wcs[1].Flags, wcs[2].Flags)
			}
			next := (ci + 3) & 0xffffff
			if got := binary.BigEndian.Uint32(r.CQRec[0]); got != next {
				t.Errorf("index %#x: the record says %#x, want %#x", ci, got, next)
			}
			c.Arm(true)
			if got := binary.BigEndian.Uint32(r.CQRec[0][4:]); got != 0x01000000|next {
				t.Errorf("index %#x: the arm record says %#x", ci, got)
			}
			if got := binary.BigEndian.Uint64(r.UARs[0][0x20:]); got != 0x01000000<<32|uint64(next)<<32|0x400 {
				t.Errorf("index %#x: the arm doorbell says %#x", ci, got)
			}
		}
	}
}

// TestPurgeOfAnyNumber: entries are told apart by all 24 bits of what they call the queue pair, and by no others; the owner bits of
// their places stay.
func TestPurgeOfAnyNumber(t *testing.T) {
	for _, profile := range []string{"mlx5-static", "mlx5-legacy"} {
		for _, size := range []int{64, 128} {
			r := pair(t, profile)
			c := r.CQs[0]
			r.CQBuf[0] = r.Alloc(16 * size)[:16*size]
			c.init(ring.Addr(r.CQBuf[0]), ring.Addr(r.CQRec[0]), 16, size, &r.table, profile == "mlx5-legacy")
			c.CI = 0xffffffff
			at := 32
			if profile == "mlx5-legacy" {
				at = 56
			}
			for i, n := range []uint32{0xffffff, 0x7fffff, 0xfffffe, 0xffffff, 0xffefff} {
				e := r.RecvCQE(0, uint32(i-1))
				for k := range size - 4 {
					if k != size-64+35 { // of the index in the legacy profile
						e[k] = byte(i)
					}
				}
				binary.BigEndian.PutUint32(e[size-64+at:], uint32(i)<<24|n)
				copy(r.CQBuf[0][int(i-1)&15*size:], e)
			}
			c.Purge(0xffffff)
			if got := binary.BigEndian.Uint32(r.CQRec[0]); got != 1 {
				t.Errorf("%s: consumer index %d", profile, got)
			}
			for k, i := range []int{1, 2, 4} {
				e := r.CQBuf[0][(k+1)*size:][:size]
				for b, v := range e[:size-4] {
					if b >= size-64+at && b < size-64+at+4 || b == size-64+35 {
						continue
					}
					if v != byte(i) {
						t.Fatalf("%s: entry %d is not the one that was at %d: %x", profile, k, i, e)
					}
				}
				if e[size-1] != cqeRecvSend<<4 {
					t.Errorf("%s: entry %d ends with %#x", profile, k, e[size-1])
				}
			}
		}
	}
}

// TestCaps grants what libmlx5 44.0 grants for each inline size and number of entries, as testdata/libcost printed it (its caps mode): 5
// sends and 3 receives asked for. A line holds until the next.
func TestCaps(t *testing.T) {
	type line struct{ from, wr, inline int }
	for what, lines := range map[string][]line{
		"inline": {{0, 8, 60}, {61, 6, 124}, {125, 5, 188}, {189, 9, 252}, {253, 8, 316}, {317, 7, 380}, {381, 6, 444}, {445, 5, 508}, {509, 5, 572},
			{573, 9, 636}, {637, 9, 700}, {701, 8, 764}, {765, 8, 828}, {829, 0, 0}, {1100, 0, 0}},
		"send": {{1, 8, 60}, {5, 6, 124}, {9, 5, 188}, {13, 9, 252}, {17, 8, 316}, {21, 7, 380}, {25, 6, 444}, {29, 5, 508}, {33, 5, 572},
			{37, 9, 636}, {41, 9, 700}, {45, 8, 764}, {49, 8, 828}, {53, 0, 0}, {64, 0, 0}},
	} {
		for i, l := range lines[:len(lines)-1] {
			for n := l.from; n < lines[i+1].from; n++ {
				ask := verbs.QPCap{MaxSendWR: 5, MaxRecvWR: 3, MaxSendSGE: 1, MaxRecvSGE: 1}
				want := verbs.QPCap{MaxSendWR: l.wr, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: l.inline}
				if what == "inline" {
					ask.MaxInlineData = n
				} else {
					ask.MaxSendSGE, want.MaxSendSGE = n, n
				}
				got, err := SizeQP(ask, recordedLimits)
				if l.wr == 0 {
					if !errors.Is(err, syscall.EINVAL) {
						t.Errorf("%s %d: %v", what, n, err)
					}
				} else if err != nil || got.Cap != want {
					t.Errorf("%s %d: %+v (%v), want %+v", what, n, got.Cap, err, want)
				}
			}
		}
	}
	// Where the library grants 2^32-4 bytes of inline data.
	if got, err := SizeQP(verbs.QPCap{MaxSendWR: 5}, recordedLimits); err != nil || got.Cap != (verbs.QPCap{MaxSendWR: 5}) {
		t.Errorf("no send entries: %+v (%v)", got.Cap, err)
	}
	if got, err := SizeQP(verbs.QPCap{MaxSendWR: 5, MaxInlineData: 1}, recordedLimits); err != nil || got.Cap != (verbs.QPCap{MaxSendWR: 8, MaxInlineData: 60}) {
		t.Errorf("inline data alone: %+v (%v)", got.Cap, err)
	}
	if _, err := SizeQP(verbs.QPCap{MaxRecvWR: 3, MaxRecvSGE: 33}, recordedLimits); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("33 receive entries: %v", err)
	}
}

// TestControlFlags posts every combination of flags with one entry and with two, which are built by different code.
func TestControlFlags(t *testing.T) {
	sge := verbs.SGE{Addr: 0x100000000000, Length: 8, LKey: 0x1ee700}
	for _, sges := range [][]verbs.SGE{{sge}, {sge, sge}} {
		for flags := range verbs.SendFlags(8) {
			r := pair(t, "mlx5-static")
			if _, err := r.QPs[0].PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpSendWithImm, Flags: flags | ^verbs.SendFlags(15), ImmData: 0xffffffff, SGList: sges}}); err != nil {
				t.Fatal(err)
			}
			want := byte(0)
			if flags&verbs.SendFence != 0 {
				want |= 0x80
			}
			if flags&verbs.SendSignaled != 0 {
				want |= 8
			}
			if flags&verbs.SendSolicited != 0 {
				want |= 2
			}
			if e := r.SQ(0); e[7] != byte(1+len(sges)) || e[11] != want || e[8]|e[9]|e[10] != 0 || binary.BigEndian.Uint32(e[12:]) != 0xffffffff {
				t.Errorf("%d entries, flags %#x: %x", len(sges), flags, e[:16])
			}
		}
	}
}

// TestBlueFlameOfInline: a request goes through the register when it is more than its control segment.
func TestBlueFlameOfInline(t *testing.T) {
	data := []byte("abcdefgh")
	for _, split := range [][]uint32{{0}, {0, 0}, {1}, {0, 1}, {1, 1}, {2, 1}, {3, 1}, {4, 4}} {
		for _, flags := range []verbs.SendFlags{0, verbs.SendInline} {
			r := pair(t, "mlx5-static")
			total := uint32(0)
			var sges []verbs.SGE
			for _, n := range split {
				sges = append(sges, verbs.SGE{Addr: ring.AddrOf(data), Length: n, LKey: 0x1ee700})
				total += n
			}
			if _, err := r.QPs[0].PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpSend, Flags: flags, SGList: sges}}); err != nil {
				t.Fatal(err)
			}
			if got := !bytes.Equal(r.UARs[1][0x810:0x840], make([]byte, 48)); got != (total > 0) {
				t.Errorf("%v bytes, flags %#x: through the register %v", split, flags, got)
			}
		}
	}
}

// TestNotes: what is noted beside the rings takes the room it says, to the byte.
func TestNotes(t *testing.T) {
	r := pair(t, "mlx5-static")
	q := r.QPs[0]
	l := q.lay
	if n := notesBytes(&l); n != 16*l.SendBlocks+8*l.RecvCount {
		t.Errorf("%d bytes of notes for %d and %d entries", n, l.SendBlocks, l.RecvCount)
	}
	notes := r.Alloc(4096)
	q.init(l, ring.Addr(r.QPBuf[0]), ring.Addr(notes), ring.Addr(r.QPRec[0]), q.reg, false)
	for i := range l.SendBlocks {
		q.sentPub.Store(q.head)
		if _, err := q.PostSend([]verbs.SendWorkRequest{{WRID: uint64(1 + i)}}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range l.RecvCount {
		if _, err := q.PostRecv([]verbs.RecvWorkRequest{{WRID: uint64(1 + i)}}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range len(notes) / 8 {
		want := uint64(0)
		switch {
		case i < 2*l.SendBlocks:
			want = uint64(1 + i/2) // the request's id, then its number
		case i < 2*l.SendBlocks+l.RecvCount:
			want = uint64(1 + i - 2*l.SendBlocks)
		}
		if got := binary.NativeEndian.Uint64(notes[i*8:]); got != want {
			t.Errorf("note %d is %d, want %d", i, got, want)
		}
	}
}

// TestNoEntries: a send queue without scatter/gather entries takes requests without data alone.
func TestNoEntries(t *testing.T) {
	r := pair(t, "mlx5-static")
	l, err := SizeQP(verbs.QPCap{MaxSendWR: 5}, recordedLimits)
	if err != nil {
		t.Fatal(err)
	}
	q := r.QPs[0]
	q.init(l, ring.Addr(r.Alloc(l.Bytes)), ring.Addr(r.Alloc(notesBytes(&l))), ring.Addr(r.Alloc(8)), q.reg, false)
	sge := []verbs.SGE{{Addr: 0x100000000000, Length: 8, LKey: 0x1ee700}}
	for _, op := range []verbs.SendOpcode{verbs.OpSend, verbs.OpRDMAWrite, verbs.OpRDMARead} {
		if n, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: op}, {Opcode: op, SGList: sge}}); n != 1 || !errors.Is(err, syscall.ENOMEM) {
			t.Errorf("%v: %d, %v", op, n, err)
		}
	}
}

// TestShortReceive: a payload inside a completion ends where the receive's list does, not in what an earlier receive left behind it.
func TestShortReceive(t *testing.T) {
	r := pair(t, "mlx5-static")
	l, err := SizeQP(verbs.QPCap{MaxRecvWR: 2, MaxRecvSGE: 4}, recordedLimits)
	if err != nil || l.RecvCount != 2 {
		t.Fatal(l, err)
	}
	q, c := r.QPs[0], r.CQs[0]
	q.init(l, ring.Addr(r.Alloc(l.Bytes)), ring.Addr(r.Alloc(notesBytes(&l))), ring.Addr(r.Alloc(8)), q.reg, false)
	mem := r.Alloc(64)
	entry := func(i int) verbs.SGE {
		return verbs.SGE{Addr: ring.AddrOf(mem) + uint64(8*i), Length: 4, LKey: 0x1ee700}
	}
	var wcs [2]verbs.WorkCompletion
	for i, sges := range [][]verbs.SGE{{entry(0), entry(1), entry(2), entry(3)}, {entry(0), entry(1), entry(2), entry(3)}, {entry(4)}, {entry(4), entry(5)}} {
		if _, err := q.PostRecv([]verbs.RecvWorkRequest{{SGList: sges}}); err != nil {
			t.Fatal(err)
		}
		e := r.RecvCQE(0, uint32(i))
		if i > 1 {
			copy(e, "ABCDEFGHIJKL")
			e[63] |= cqePayload32
			binary.BigEndian.PutUint32(e[44:], 12)
		}
		r.arrive(i, e)
		if n := c.Poll(wcs[:]); n != 1 || (wcs[0].Status == verbs.WCSuccess) != (i < 2) || i > 1 && wcs[0].Status != verbs.WCLocalLengthError {
			t.Fatalf("receive %d: %d completions, %+v", i, n, wcs[0])
		}
	}
	want := make([]byte, 64)
	copy(want[32:], "ABCD")
	copy(want[40:], "EFGH")
	if !bytes.Equal(mem[:64], want) {
		t.Errorf("memory %q", mem[:64])
	}
}
