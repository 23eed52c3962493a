package mlx5

// What the recordings do not hold: window binds, whose bytes testdata/libcost printed from libmlx5 44.0, and paths at the edge.

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/golden"
)

// pair builds two queue pairs on one completion queue.
func pair(t *testing.T, profile string) *rig { return pairOf(t, profile, 2) }

// pairOf is pair with sends of up to sge entries.
func pairOf(t *testing.T, profile string, sge int) *rig {
	r, err := newRig(&golden.Case{Profile: profile, Setup: &golden.Objects{
		UARPages: make([]golden.UARPage, 2),
		CQ:       []golden.CQ{{Name: "cq0", CQN: 0x400, Entries: 16, IBVCQE: 15, CQESize: 64}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	reg := newRegister(addr(r.uars[1][0x800:]), 256, optionsFromEnv(func(string) string { return "" }))
	reg.shared = true
	for i := range uint32(2) {
		l, err := SizeQP(verbs.QPCap{MaxSendWR: 16, MaxRecvWR: 4, MaxSendSGE: sge, MaxRecvSGE: 2}, recordedLimits)
		if err != nil {
			t.Fatal(err)
		}
		q := &QP{qpn: 0x1a3 + i, rsn: (1 - i) * 0xffffff}
		if profile == "mlx5-legacy" {
			q.rsn = q.qpn
		}
		q.send, q.recv = r.cqs[0], r.cqs[0]
		buf, rec := r.alloc(l.Bytes+64), r.alloc(8)
		for k := range buf {
			buf[k] = 0xee // what a reused entry holds
		}
		q.init(l, addr(buf), addr(r.alloc(notesBytes(&l))), addr(rec), reg, false)
		q.state.Store(uint32(verbs.QPReadyToSend))
		r.table.Set(q.rsn, q)
		r.qps, r.qpBuf, r.qpRec = append(r.qps, q), append(r.qpBuf, buf), append(r.qpRec, rec)
	}
	return r
}

// arrive puts entry e at producer index i.
func (r *rig) arrive(i int, e []byte) { copy(r.cqBuf[0][i*len(e):], e) }

type region struct{ verbs.MemoryRegion }

func (region) LKey() uint32 { return 0x1ee700 }

type window struct{ key uint32 }

func (w *window) RKey() uint32   { return w.key }
func (w *window) Dealloc() error { return nil }
func (w *window) Bound(k uint32) { w.key = k }

func TestBindWindow(t *testing.T) {
	const base = 0x100000000000
	r := pair(t, "mlx5-static")
	q := r.qps[0]
	w := &window{0x1ee800}
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
			Window: w, Region: region{}, RKey: w.key + 1, Addr: base + c.off, Length: c.length, Access: c.access}}})
		if err != nil {
			t.Fatal(err)
		}
		got := hex.EncodeToString(r.SQ(0)[i*192 : (i+1)*192])
		if want := c.want + strings.Repeat("00", 48); got != want {
			t.Errorf("bind %d:\n%s, want\n%s", i, got, want)
		}
	}
	if w.key != 0x1ee804 {
		t.Errorf("the window's key is %#x", w.key)
	}
	if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpLocalInv, ImmData: w.key}}); err != nil {
		t.Fatal(err)
	}
	want := "00000c250001a30800000020001ee80498000000000000000000000020006000" + strings.Repeat("00", 32) +
		"40000000ffffff00" + strings.Repeat("00", 56)
	if got := hex.EncodeToString(r.SQ(0)[4*192:][:128]); got != want {
		t.Errorf("LOCAL_INV:\n%s, want\n%s", got, want)
	}
	if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpBindMW, Bind: &verbs.BindMW{Window: w, Region: region{}}}}); err == nil {
		t.Error("a bind of no bytes was accepted")
	}
	for _, n := range []uint64{1<<31 + 1, 1 << 32, 1 << 33, 5 << 31, 1 << 63} {
		if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpBindMW, Bind: &verbs.BindMW{Window: w, Region: region{}, Length: n}}}); err == nil {
			t.Errorf("a bind of %d bytes was accepted", n)
		}
	}
	if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpBindMW, Bind: &verbs.BindMW{Window: w, Region: region{}, Length: 1 << 31}}}); err != nil {
		t.Errorf("a bind of 2 GiB: %v", err)
	}
	l := q.lay
	for k := range 2 * l.SendBlocks { // so that each segment ends the ring some time
		q.sentPub.Store(q.head)
		wr := verbs.SendWorkRequest{Opcode: verbs.OpLocalInv}
		if k%2 == 0 {
			wr = verbs.SendWorkRequest{Opcode: verbs.OpBindMW, Bind: &verbs.BindMW{Window: &window{}, Region: region{}, Length: 1}}
		}
		if _, err := q.PostSend([]verbs.SendWorkRequest{wr}); err != nil {
			t.Fatal(err)
		}
		if got := r.qpBuf[0][l.Bytes:][:64]; !bytes.Equal(got, bytes.Repeat([]byte{0xee}, 64)) {
			t.Fatalf("request %d wrote past the ring: %x", k, got)
		}
	}
}

// TestWholeImmediate: each bit of immediate data or a key reaches the control segment, where the operation has one.
func TestWholeImmediate(t *testing.T) {
	r := pair(t, "mlx5-static")
	q := r.qps[0]
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
	bind := verbs.BindMW{Window: &window{1<<32 - 1}, Region: region{}, RKey: 1<<32 - 1, Length: 1}
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
	q := r.qps[0]
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

// TestPurge resets one of two queue pairs whose completions are mixed in one queue, at the ring's end too.
func TestPurge(t *testing.T) {
	for _, profile := range []string{"mlx5-static", "mlx5-legacy"} {
		for _, start := range []uint32{0, 8, 13} {
			r := pair(t, profile)
			r.cqs[0].ci = start
			mem, err := hostmem.Alloc(64)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { mem.Free() })
			for i, q := range r.qps {
				for k := range 4 {
					if _, err := q.PostRecv([]verbs.RecvWorkRequest{{WRID: uint64(10*i + k), SGList: []verbs.SGE{{Addr: mem.Addr(), Length: 64}}}}); err != nil {
						t.Fatal(err)
					}
				}
			}
			for i, qp := range []int{0, 1, 0, 0, 1, 1} {
				at := start + uint32(i)
				e := r.RecvCQE(qp, at)
				binary.BigEndian.PutUint32(e[44:], at)
				r.arrive(int(at&15), e)
			}
			r.qps[0].moved(verbs.QPReset)
			if got := binary.BigEndian.Uint32(r.cqRec[0]); got != start+3 {
				t.Errorf("%s: consumer index %d after the reset, want %d", profile, got, start+3)
			}
			var wcs [8]verbs.WorkCompletion
			n := r.cqs[0].Poll(wcs[:])
			if n != 3 {
				t.Fatalf("%s: %d completions left, want 3", profile, n)
			}
			for k, at := range []uint32{1, 4, 5} {
				if wcs[k].QPN != r.qps[1].qpn || wcs[k].WRID != uint64(10+k) || wcs[k].ByteLen != start+at {
					t.Errorf("%s: completion %d is %+v", profile, k, wcs[k])
				}
			}
			if got := binary.BigEndian.Uint32(r.cqRec[0]); got != start+6 {
				t.Errorf("%s: consumer index %d, want %d", profile, got, start+6)
			}
			r.qps[0].moved(verbs.QPInitState)
			for k := range 5 {
				_, err := r.qps[0].PostRecv([]verbs.RecvWorkRequest{{WRID: uint64(20 + k)}})
				if (err != nil) != (k == 4) {
					t.Errorf("%s: receive %d after the reset: %v", profile, k, err)
				}
			}
			at := start + 6
			r.arrive(int(at&15), r.RecvCQE(0, at))
			if n := r.cqs[0].Poll(wcs[:]); n != 1 || wcs[0].WRID != 20 {
				t.Errorf("%s: %d completions after the reset, %+v", profile, n, wcs[0])
			}
		}
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
		ring := r.alloc(16 * c.size)
		r.cqs[0].init(addr(ring), addr(r.alloc(8)), 16, c.size, &r.table, false)
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
		if _, err := r.qps[0].PostSend([]verbs.SendWorkRequest{wr, wr}); err != nil {
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
		copy(ring, e)
		var wcs [2]verbs.WorkCompletion
		if k := r.cqs[0].Poll(wcs[:]); k != 1 || wcs[0].WRID != 7 || wcs[0].Status != c.status || wcs[0].ByteLen != uint32(c.n) {
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
			ring := r.alloc(16 * c.size)
			r.cqs[0].init(addr(ring), addr(r.alloc(8)), 16, c.size, &r.table, false)
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
			if _, err := r.qps[0].PostSend([]verbs.SendWorkRequest{wr}); err != nil {
				t.Fatal(err)
			}
			e := r.cqe(0, 0, 0, cqeRequester, opRDMARead)
			d := e[c.size-64:]
			copy(e, data[:c.entries+more])
			d[63] |= c.flag
			n := uint32(c.entries + more)
			binary.BigEndian.PutUint32(d[44:], n)
			copy(ring, e)
			status := verbs.WCSuccess
			if more > 0 {
				status = verbs.WCLocalLengthError
			}
			var wcs [2]verbs.WorkCompletion
			if k := r.cqs[0].Poll(wcs[:]); k != 1 || wcs[0].WRID != 7 || wcs[0].Status != status || wcs[0].ByteLen != n {
				t.Errorf("%d entries, %d bytes: %d completions, %+v", c.entries, n, k, wcs[0])
			}
			if !bytes.Equal(mem.Bytes()[:128], want) {
				t.Errorf("%d entries, %d bytes: memory %q, want %q", c.entries, n, mem.Bytes()[:128], want)
			}
		}
	}
}

func TestCQEntriesLimits(t *testing.T) {
	for _, c := range [][2]int{{1, 2}, {15, 16}, {16, 32}} { // one more than asked for, as the library has it
		if k, err := CQEntries(c[0]); err != nil || k != c[1] {
			t.Errorf("a queue for %d completions has %d (%v), want %d", c[0], k, err, c[1])
		}
	}
	for _, n := range []int{-1, 0, 1 << 24} {
		if k, err := CQEntries(n); err == nil {
			t.Errorf("a queue for %d completions has %d", n, k)
		} else if k != 0 || !strings.Contains(err.Error(), fmt.Sprintf(" %d exceeds the device's 16777215:", n)) {
			t.Errorf("%d completions: %d, %v", n, k, err)
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
	c := r.cqs[0]
	var wcs [2]verbs.WorkCompletion
	for _, ci := range []uint32{0, 16, 0xfffff0} {
		c.ci = ci
		other := byte(1)
		if ci&16 != 0 {
			other = 0
		}
		for op := range 0x100 {
			if op := byte(op); op&1 != other && op>>4 != cqeInvalid {
				continue
			}
			r.cqBuf[0][63] = byte(op)
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
			c := r.cqs[0]
			c.ci = ci
			q := r.qps[0]
			at := 32
			if c.byQPN {
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
			if got := binary.BigEndian.Uint32(r.cqRec[0]); got != next {
				t.Errorf("index %#x: the record says %#x, want %#x", ci, got, next)
			}
			c.Arm(true)
			if got := binary.BigEndian.Uint32(r.cqRec[0][4:]); got != 0x01000000|next {
				t.Errorf("index %#x: the arm record says %#x", ci, got)
			}
			if got := binary.BigEndian.Uint64(r.uars[0][0x20:]); got != 0x01000000<<32|uint64(next)<<32|0x400 {
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
			c := r.cqs[0]
			ring := r.alloc(16 * size)
			c.init(addr(ring), addr(r.cqRec[0]), 16, size, &r.table, c.byQPN)
			c.ci = 0xffffffff
			at := 32
			if c.byQPN {
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
				copy(ring[int(i-1)&15*size:], e)
			}
			c.purge(0xffffff)
			if got := binary.BigEndian.Uint32(r.cqRec[0]); got != 1 {
				t.Errorf("%s: consumer index %d", profile, got)
			}
			for k, i := range []int{1, 2, 4} {
				e := ring[(k+1)*size:][:size]
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

// TestStaleCompletions: what a completion has no word for is zero, whatever the caller's memory held.
func TestStaleCompletions(t *testing.T) {
	r := pair(t, "mlx5-static")
	q, c := r.qps[0], r.cqs[0]
	if _, err := q.PostSend([]verbs.SendWorkRequest{{WRID: 1}, {WRID: 2}}); err != nil {
		t.Fatal(err)
	}
	if _, err := q.PostRecv([]verbs.RecvWorkRequest{{WRID: 3}, {WRID: 4}}); err != nil {
		t.Fatal(err)
	}
	size := len(r.cqBuf[0]) / 16
	for i, e := range [][]byte{r.SendCQE(0, 0, 0), failed(r.cqe(0, 1, 1, cqeErrRequester, opSend), 0x8115), r.RecvCQE(0, 2), failed(r.cqe(0, 3, 3, cqeErrResponder, 0), 0xf505)} {
		copy(r.cqBuf[0][i*size:], e)
	}
	stale := verbs.WorkCompletion{WRID: 1<<64 - 1, Status: 1<<31 - 1, Opcode: 1<<31 - 1, ByteLen: 1<<32 - 1, ImmData: 1<<32 - 1, QPN: 1<<32 - 1,
		Flags: 1<<31 - 1, VendorErr: 1<<32 - 1}
	wcs := [5]verbs.WorkCompletion{stale, stale, stale, stale, stale}
	want := [5]verbs.WorkCompletion{
		{WRID: 1, QPN: q.qpn},
		{WRID: 2, QPN: q.qpn, Status: verbs.WCRetryExceeded, VendorErr: 0x81},
		{WRID: 3, QPN: q.qpn, Opcode: verbs.WCRecv},
		{WRID: 4, QPN: q.qpn, Status: verbs.WCFlushError, VendorErr: 0xf5},
		stale,
	}
	if n := c.Poll(wcs[:]); n != 4 || wcs != want {
		t.Errorf("%d completions\n%+v, want\n%+v", n, wcs, want)
	}
}

// failed puts vendor code and syndrome into an entry.
func failed(e []byte, code uint16) []byte {
	binary.BigEndian.PutUint16(e[54:], code)
	return e
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
	for n, granted := range []int{1, 1, 2, 4, 4, 8, 8, 8, 8, 16, 16, 16, 16, 16, 16, 16, 16, 32} {
		got, err := SizeQP(verbs.QPCap{MaxSendWR: 5, MaxRecvWR: 3, MaxSendSGE: 1, MaxRecvSGE: n}, recordedLimits)
		if err != nil || got.Cap.MaxRecvSGE != granted || got.Cap.MaxRecvWR != 4 {
			t.Errorf("%d receive entries: %+v (%v)", n, got.Cap, err)
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
			if _, err := r.qps[0].PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpSendWithImm, Flags: flags | ^verbs.SendFlags(15), ImmData: 0xffffffff, SGList: sges}}); err != nil {
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
				sges = append(sges, verbs.SGE{Addr: addrOf(data), Length: n, LKey: 0x1ee700})
				total += n
			}
			if _, err := r.qps[0].PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpSend, Flags: flags, SGList: sges}}); err != nil {
				t.Fatal(err)
			}
			if got := !bytes.Equal(r.uars[1][0x810:0x840], make([]byte, 48)); got != (total > 0) {
				t.Errorf("%v bytes, flags %#x: through the register %v", split, flags, got)
			}
		}
	}
}

// TestOpcodes: an operation that is none is refused, wherever its bits lie.
func TestOpcodes(t *testing.T) {
	r := pair(t, "mlx5-static")
	before := bytes.Clone(r.SQ(0))
	for _, sges := range [][]verbs.SGE{nil, {{Addr: 0x100000000000, Length: 8}}} {
		for _, op := range []verbs.SendOpcode{11, 15, 16, 18, 32 + verbs.OpSend, 1<<8 + verbs.OpSend, 1<<30 + verbs.OpRDMARead} {
			if n, err := r.qps[0].PostSend([]verbs.SendWorkRequest{{Opcode: op, SGList: sges}}); n != 0 || !errors.Is(err, syscall.EINVAL) {
				t.Errorf("operation %d: %d, %v", op, n, err)
			}
		}
	}
	if !bytes.Equal(before, r.SQ(0)) {
		t.Error("a refused request was written")
	}
}

// TestRestart takes a used queue pair through RESET: it holds what it held when new, and no more.
func TestRestart(t *testing.T) {
	r := pair(t, "mlx5-static")
	q, c := r.qps[0], r.cqs[0]
	var wcs [4]verbs.WorkCompletion
	for lap := range 3 {
		first, done := c.ci, []uint32{2, 0, 1}[lap]
		for i, n := 0, q.cap.MaxSendWR+1; i < n; i++ {
			_, err := q.PostSend([]verbs.SendWorkRequest{{WRID: uint64(i)}})
			if (err != nil) != (i == n-1) {
				t.Fatalf("lap %d: send %d of %d: %v", lap, i, n-1, err)
			}
		}
		for i, n := 0, q.cap.MaxRecvWR+1; i < n; i++ {
			_, err := q.PostRecv([]verbs.RecvWorkRequest{{WRID: uint64(100 + i)}})
			if (err != nil) != (i == n-1) {
				t.Fatalf("lap %d: receive %d of %d: %v", lap, i, n-1, err)
			}
		}
		r.arrive(int(first&15), r.SendCQE(0, done, first))
		r.arrive(int((first+1)&15), r.RecvCQE(0, first+1))
		if n := c.Poll(wcs[:]); n != 2 || wcs[0].WRID != uint64(done) || wcs[1].WRID != 100 {
			t.Fatalf("lap %d: %d completions, %+v", lap, n, wcs)
		}
		for i := range done + 2 { // as many sends are done, and a receive
			_, err := q.PostSend([]verbs.SendWorkRequest{{}})
			if (err != nil) != (i == done+1) {
				t.Fatalf("lap %d: send %d after a completion: %v", lap, i, err)
			}
			if i > 1 {
				continue
			}
			if _, err = q.PostRecv([]verbs.RecvWorkRequest{{}}); (err != nil) != (i == 1) {
				t.Fatalf("lap %d: receive %d after a completion: %v", lap, i, err)
			}
		}
		if _, err := q.PostSend(nil); err != nil {
			t.Error(err)
		}
		q.moved(verbs.QPReset)
		if binary.BigEndian.Uint64(r.qpRec[0]) != 0 || q.nextFence != 0 {
			t.Errorf("lap %d: the record says %x", lap, r.qpRec[0][:8])
		}
		if _, err := q.PostSend([]verbs.SendWorkRequest{{}}); err == nil {
			t.Error("posted in RESET")
		}
		if lap == 1 { // one entry to be purged
			r.arrive(int(c.ci&15), r.SendCQE(1, 0, c.ci))
			r.arrive(int((c.ci+1)&15), r.RecvCQE(0, c.ci+1))
			q.moved(verbs.QPReset)
			if n := c.Poll(wcs[:]); n != 1 || wcs[0].QPN != r.qps[1].qpn {
				t.Errorf("%d completions after the purge: %+v", n, wcs[:n])
			}
		}
		q.moved(verbs.QPReadyToSend)
	}
}

// TestNotes: what is noted beside the rings takes the room it says, to the byte.
func TestNotes(t *testing.T) {
	r := pair(t, "mlx5-static")
	q := r.qps[0]
	l := q.lay
	if n := notesBytes(&l); n != 16*l.SendBlocks+8*l.RecvCount {
		t.Errorf("%d bytes of notes for %d and %d entries", n, l.SendBlocks, l.RecvCount)
	}
	notes := r.alloc(4096)
	q.init(l, addr(r.qpBuf[0]), addr(notes), addr(r.qpRec[0]), q.reg, false)
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
	q := r.qps[0]
	q.init(l, addr(r.alloc(l.Bytes)), addr(r.alloc(notesBytes(&l))), addr(r.alloc(8)), q.reg, false)
	sge := []verbs.SGE{{Addr: 0x100000000000, Length: 8, LKey: 0x1ee700}}
	for _, op := range []verbs.SendOpcode{verbs.OpSend, verbs.OpRDMAWrite, verbs.OpRDMARead} {
		if n, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: op}, {Opcode: op, SGList: sge}}); n != 1 || !errors.Is(err, syscall.ENOMEM) {
			t.Errorf("%v: %d, %v", op, n, err)
		}
	}
}

func TestRounding(t *testing.T) {
	for n := range 300 {
		p := 1
		for p < n {
			p *= 2
		}
		if got := pow2(n); got != p {
			t.Errorf("pow2(%d) = %d", n, got)
		}
		for to := 1; to <= 4096; to *= 2 {
			up := 0
			for up < n {
				up += to
			}
			if got := align(n, to); got != up {
				t.Errorf("align(%d, %d) = %d", n, to, got)
			}
		}
	}
}

// TestSequence: two bits of the number of events travel with a request for the next, and they come round.
func TestSequence(t *testing.T) {
	r := pair(t, "mlx5-static")
	c := r.cqs[0]
	for sn := range uint32(70) {
		c.Arm(true)
		want := sn%4<<28 | 1<<24
		if got := binary.BigEndian.Uint32(r.cqRec[0][4:]); got != want {
			t.Errorf("after %d events: record %#x, want %#x", sn, got, want)
		}
		if got := binary.BigEndian.Uint32(r.uars[0][0x20:]); got != want {
			t.Errorf("after %d events: doorbell %#x, want %#x", sn, got, want)
		}
		c.Notified()
	}
}

// TestShortReceive: a payload inside a completion ends where the receive's list does, not in what an earlier receive left behind it.
func TestShortReceive(t *testing.T) {
	r := pair(t, "mlx5-static")
	l, err := SizeQP(verbs.QPCap{MaxRecvWR: 2, MaxRecvSGE: 4}, recordedLimits)
	if err != nil || l.RecvCount != 2 {
		t.Fatal(l, err)
	}
	q, c := r.qps[0], r.cqs[0]
	q.init(l, addr(r.alloc(l.Bytes)), addr(r.alloc(notesBytes(&l))), addr(r.alloc(8)), q.reg, false)
	mem := r.alloc(64)
	entry := func(i int) verbs.SGE { return verbs.SGE{Addr: addrOf(mem) + uint64(8*i), Length: 4, LKey: 0x1ee700} }
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

// TestPurgeIndex looks at all bits of the consumer index that a purge stores.
func TestPurgeIndex(t *testing.T) {
	for _, start := range []uint32{0x555553, 0xaaaaa8, 0xfffffd, 0xffffffff} {
		r := pair(t, "mlx5-static")
		r.cqs[0].ci = start
		size := len(r.cqBuf[0]) / 16
		for i := range uint32(2) {
			copy(r.cqBuf[0][int((start+i)&15)*size:], r.RecvCQE(0, start+i))
		}
		r.cqs[0].purge(r.qps[0].rsn)
		if got := binary.BigEndian.Uint32(r.cqRec[0]); got != (start+2)&0xffffff {
			t.Errorf("from %#x: %#x", start, got)
		}
	}
}
