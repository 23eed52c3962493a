package mlx4

// What the recordings do not hold: window binds, whose bytes testdata/libcost printed from libmlx4 44.0, and paths at the edge.

import (
	"encoding/binary"
	"encoding/hex"
	"testing"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/golden"
)

// pair builds two queue pairs on one completion queue.
func pair(t *testing.T) *rig {
	r, err := newRig(&golden.Case{Profile: "mlx4-roce", Setup: &golden.Objects{
		UARPages: make([]golden.UARPage, 2),
		CQ:       []golden.CQ{{Name: "cq0", CQN: 0x400, Entries: 16, IBVCQE: 15, CQESize: 64}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	bf := newBlueFlame(addr(r.uars[1]), recordedBlueFlame)
	for i := range uint32(2) {
		l, err := SizeQP(verbs.QPCap{MaxSendWR: 16, MaxRecvWR: 4, MaxSendSGE: 2, MaxRecvSGE: 2}, recordedLimits)
		if err != nil {
			t.Fatal(err)
		}
		q := &QP{qpn: 0x1a3 + i}
		q.send, q.recv = r.cqs[0], r.cqs[0]
		buf, rec := r.alloc(l.Bytes), r.alloc(4)
		for k := range buf {
			buf[k] = 0xee // what a reused entry holds
		}
		q.init(l, addr(buf), addr(r.alloc(notesBytes(&l))), addr(rec), addr(r.uars[0]), bf, false)
		q.beforeInit()
		r.table.Set(q.qpn, q)
		r.qps, r.states = append(r.qps, q), append(r.states, verbs.QPReadyToSend)
		r.qpBuf, r.qpRec = append(r.qpBuf, buf), append(r.qpRec, rec)
	}
	return r
}

type region struct{ verbs.MemoryRegion }

func (region) LKey() uint32 { return 0x1ee700 }

type window struct{ key uint32 }

func (w *window) RKey() uint32   { return w.key }
func (w *window) Dealloc() error { return nil }
func (w *window) Bound(k uint32) { w.key = k }

// posted is the first n bytes of the i-th send entry, without what belongs to BlueFlame.
func (r *rig) posted(i, n int) string {
	l := r.qps[0].lay
	e := append([]byte(nil), r.SQ(0)[i<<l.SendShift:][:n]...)
	e[1], e[2], e[4], e[5], e[6] = 0, 0, 0, 0, 0
	return hex.EncodeToString(e)
}

func TestBindWindow(t *testing.T) {
	const base = 0x100000000000
	r := pair(t)
	q := r.qps[0]
	w := &window{0x1ee800}
	for i, c := range []struct {
		off, length uint64
		access      verbs.AccessFlags
		want        string
	}{
		{0x1040, 1000, verbs.AccessRemoteRead | verbs.AccessRemoteWrite, "00000018000000030000008c000000006000000080000000001ee801001ee700000010000000104000000000000003e8"},
		{1, 1, verbs.AccessRemoteRead, "00000018000000030000008c000000002000000080000000001ee802001ee70000001000000000010000000000000001"},
		{0x12345, 0x54321, verbs.AccessRemoteWrite | verbs.AccessRemoteAtomic, "00000018000000030000008c00000000c000000080000000001ee803001ee70000001000000123450000000000054321"},
		{0, 1 << 20, verbs.AccessLocalWrite, "00000018000000030000008c000000000000000080000000001ee804001ee70000001000000000000000000000100000"},
	} {
		_, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpBindMW, Flags: verbs.SendSignaled, Bind: &verbs.BindMW{
			Window: w, Region: region{}, RKey: w.key + 1, Addr: base + c.off, Length: c.length, Access: c.access}}})
		if err != nil {
			t.Fatal(err)
		}
		l := q.lay
		if got := hex.EncodeToString(r.SQ(0)[i<<l.SendShift:][:48]); got != c.want {
			t.Errorf("bind %d:\n%s, want\n%s", i, got, c.want)
		}
	}
	if w.key != 0x1ee804 {
		t.Errorf("the window's key is %#x", w.key)
	}
	if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpLocalInv, ImmData: w.key}}); err != nil {
		t.Fatal(err)
	}
	const want = "0000001b0000000300000080000000000000000000000000001ee8040000000000000000000000000000000000000000"
	if got := hex.EncodeToString(r.SQ(0)[4<<q.lay.SendShift:][:48]); got != want {
		t.Errorf("LOCAL_INV:\n%s, want\n%s", got, want)
	}
	if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpBindMW, Bind: &verbs.BindMW{Window: w, Region: region{}}}}); err == nil {
		t.Error("a bind of no bytes was accepted")
	}
}

// TestGarbageFields posts requests whose unused fields hold something, over entries that did.
func TestGarbageFields(t *testing.T) {
	r := pair(t)
	q := r.qps[0]
	sge := []verbs.SGE{{Addr: 0x100000000000, Length: 8, LKey: 0x1ee700}}
	const remote = "1122334455667788" + "0099880000000000"
	for i, c := range []struct {
		op   verbs.SendOpcode
		wire string // up to the data segment
	}{
		{verbs.OpSend, "0000000a" + "00000002" + "0000000000000000"},
		{verbs.OpRDMAWrite, "00000008" + "00000003" + "0000000000000000" + remote},
		{verbs.OpRDMARead, "00000010" + "00000003" + "0000000000000000" + remote},
		{verbs.OpCompareSwap, "00000011" + "00000004" + "0000000000000000" + remote + "0000000000000bbb" + "0000000000000aaa"},
		{verbs.OpFetchAdd, "00000012" + "00000004" + "0000000000000000" + remote + "0000000000000aaa" + "0000000000000000"},
	} {
		if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: c.op, ImmData: 0x55667789, RemoteAddr: 0x1122334455667788, RKey: 0x998800,
			Atomic: &verbs.Atomic{CompareAdd: 0xaaa, Swap: 0xbbb}, SGList: sge}}); err != nil {
			t.Fatal(err)
		}
		want := c.wire + "00000008001ee7000000100000000000"
		if got := r.posted(i, len(want)/2); got != want {
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
	for _, start := range []uint32{0, 8, 13} {
		r := pair(t)
		r.cqs[0].ci = start
		size := len(r.cqBuf[0]) / 16
		for i := range int(start) { // read in this lap
			r.cqBuf[0][i*size+int(r.cqs[0].tail)+31] &^= cqeOwner
		}
		for i, q := range r.qps {
			for k := range 4 {
				if _, err := q.PostRecv([]verbs.RecvWorkRequest{{WRID: uint64(10*i + k)}}); err != nil {
					t.Fatal(err)
				}
			}
		}
		for i, qp := range []int{0, 1, 0, 0, 1, 1} {
			at := start + uint32(i)
			e := r.RecvCQE(qp, at)
			binary.BigEndian.PutUint32(e[r.cqs[0].tail+20:], at) // byte count
			copy(r.cqBuf[0][int(at&15)*size:], e)
		}
		r.Modify(0, verbs.QPReset)
		if got := binary.BigEndian.Uint32(r.cqRec[0]); got != start+3 {
			t.Errorf("consumer index %d after the reset, want %d", got, start+3)
		}
		var wcs [8]verbs.WorkCompletion
		if n := r.cqs[0].Poll(wcs[:]); n != 3 {
			t.Fatalf("%d completions left, want 3", n)
		}
		for k, at := range []uint32{1, 4, 5} {
			if wcs[k].QPN != r.qps[1].qpn || wcs[k].WRID != uint64(10+k) || wcs[k].ByteLen != start+at {
				t.Errorf("completion %d is %+v", k, wcs[k])
			}
		}
		if got := binary.BigEndian.Uint32(r.cqRec[0]); got != start+6 {
			t.Errorf("consumer index %d, want %d", got, start+6)
		}
		r.Modify(0, verbs.QPInitState)
		for k := range 5 {
			_, err := r.qps[0].PostRecv([]verbs.RecvWorkRequest{{WRID: uint64(20 + k)}})
			if (err != nil) != (k == 4) {
				t.Errorf("receive %d after the reset: %v", k, err)
			}
		}
		at := start + 6
		copy(r.cqBuf[0][int(at&15)*size:], r.RecvCQE(0, at))
		if n := r.cqs[0].Poll(wcs[:]); n != 1 || wcs[0].WRID != 20 {
			t.Errorf("%d completions after the reset, %+v", n, wcs[0])
		}
	}
}

func TestCQEntriesLimits(t *testing.T) {
	for _, c := range [][2]int{{1, 2}, {15, 16}, {16, 32}} { // one more than asked for, as the library has it
		if k, err := CQEntries(c[0]); err != nil || k != c[1] {
			t.Errorf("a queue for %d completions has %d (%v), want %d", c[0], k, err, c[1])
		}
	}
	for _, n := range []int{-1, 0, 1 << 22} {
		if k, err := CQEntries(n); err == nil {
			t.Errorf("a queue for %d completions has %d", n, k)
		}
	}
}

// TestStampedRing looks at a whole new ring: each entry software's, its lines after the first marked.
func TestStampedRing(t *testing.T) {
	r := &rig{}
	t.Cleanup(r.Close)
	l, err := SizeQP(verbs.QPCap{MaxSendWR: 5, MaxSendSGE: 8}, recordedLimits)
	if err != nil {
		t.Fatal(err)
	}
	q, buf := &QP{}, r.alloc(l.Bytes)
	q.init(l, addr(buf), addr(r.alloc(notesBytes(&l))), addr(r.alloc(4)), addr(r.alloc(4096)), &blueFlame{}, false)
	q.beforeInit()
	if l.SendShift != 8 {
		t.Fatalf("entries of %d bytes", 1<<l.SendShift)
	}
	for i := range l.SendCount {
		e := buf[l.SendOffset+i<<l.SendShift:][:256]
		if got := hex.EncodeToString(e[:8]); got != "8000000000000010" {
			t.Errorf("entry %d: %s", i, got)
		}
		for o := 64; o < 256; o += 64 {
			if got := hex.EncodeToString(e[o:][:8]); got != "ffffffff00000000" {
				t.Errorf("entry %d at %d: %s", i, o, got)
			}
		}
	}
	for i := range l.SendCount { // a request stamps the one entry that is next to be the adapter's
		clear(buf[l.SendOffset+i<<l.SendShift:][64:256])
	}
	send := []verbs.SendWorkRequest{{Opcode: verbs.OpSend}, {Opcode: verbs.OpSend}, {Opcode: verbs.OpSend}}
	for n := 0; n < l.SendCount+6; n += 4 { // one, then three at once
		for _, chain := range [][]verbs.SendWorkRequest{send[:1], send} {
			q.sentPub.Store(q.head)
			if _, err := q.PostSend(chain); err != nil {
				t.Fatal(err)
			}
			for i := range l.SendCount {
				// An entry that has been posted again says itself how far it reaches: one line.
				stamped := buf[l.SendOffset+i<<l.SendShift+64] == 0xff
				if want := i >= l.SendSpare && i < int(q.head)+l.SendSpare; stamped != want {
					t.Errorf("after %d requests entry %d is stamped: %v", q.head, i, stamped)
				}
			}
		}
	}
}

// TestOwner: an entry of the other lap is the adapter's, whatever else its last byte says.
func TestOwner(t *testing.T) {
	r := pair(t)
	c := r.cqs[0]
	var wcs [2]verbs.WorkCompletion
	for _, ci := range []uint32{0, 16, 0xfffff0} {
		c.ci = ci
		size := len(r.cqBuf[0]) / 16
		for op := range 0x80 {
			r.cqBuf[0][size-1] = byte(op)
			if ci&16 == 0 {
				r.cqBuf[0][size-1] |= 0x80
			}
			if n := c.Poll(wcs[:]); n != 0 {
				t.Fatalf("index %#x: an entry %#x of the adapter's was polled", ci, op)
			}
		}
	}
}

// TestIndexBits looks at the consumer index where all of its 24 bits are in use, and where it wraps.
func TestIndexBits(t *testing.T) {
	for _, ci := range []uint32{0x555555, 0xaaaaaa, 0xfffffe, 0xffffff, 0xffffffff} {
		r := pair(t)
		c := r.cqs[0]
		c.ci = ci
		q := r.qps[1]
		q.qpn = 0xffffff
		r.table.Set(q.qpn, q)
		if _, err := q.PostRecv([]verbs.RecvWorkRequest{{WRID: 5}, {WRID: 6}}); err != nil {
			t.Fatal(err)
		}
		size := len(r.cqBuf[0]) / 16
		for i := range uint32(2) {
			e := r.RecvCQE(1, ci+i)
			d := e[c.tail:]
			d[0] = 0xa5                                               // not of the number
			binary.BigEndian.PutUint32(d[8:], 0x7fffffff*(1-i)|i<<31) // path and source, then that there is a GRH
			copy(r.cqBuf[0][int((ci+i)&15)*size:], e)
		}
		var wcs [2]verbs.WorkCompletion
		if n := c.Poll(wcs[:]); n != 2 || wcs[0].WRID != 5 || wcs[1].WRID != 6 || wcs[0].QPN != 0xffffff {
			t.Fatalf("index %#x: %d completions %+v", ci, n, wcs)
		}
		if wcs[0].Flags != 0 || wcs[1].Flags != verbs.WCWithGRH {
			t.Errorf("flags %#x and %#x", wcs[0].Flags, wcs[1].Flags)
		}
		next := (ci + 2) & 0xffffff
		if got := binary.BigEndian.Uint32(r.cqRec[0]); got != next {
			t.Errorf("index %#x: the record says %#x, want %#x", ci, got, next)
		}
		c.Arm(true)
		if got := binary.BigEndian.Uint32(r.cqRec[0][4:]); got != 0x11000000|next {
			t.Errorf("index %#x: the arm record says %#x", ci, got)
		}
		if got := binary.BigEndian.Uint64(r.uars[0][0x20:]); got != 0x11000400<<32|uint64(next) {
			t.Errorf("index %#x: the arm doorbell says %#x", ci, got)
		}
	}
}

// TestPurgeOfAnyNumber: entries are told apart by all 24 bits of the number, and by no others.
func TestPurgeOfAnyNumber(t *testing.T) {
	r := pair(t)
	r.cqs[0].ci = 0xffffffff
	size := len(r.cqBuf[0]) / 16
	for i, n := range []uint32{0xffffff, 0x7fffff, 0xfffffe, 0xffffff, 0xffefff} {
		e := r.RecvCQE(0, uint32(i-1))
		binary.BigEndian.PutUint32(e[r.cqs[0].tail:], uint32(i)<<24|n)
		for k := range 24 {
			e[int(r.cqs[0].tail)+4+k] = byte(i)
		}
		copy(r.cqBuf[0][int(i-1)&15*size:], e)
	}
	r.cqs[0].purge(0xffffff)
	if got := binary.BigEndian.Uint32(r.cqRec[0]); got != 1 {
		t.Errorf("consumer index %d", got)
	}
	for k, i := range []int{1, 2, 4} {
		e := r.cqBuf[0][(k+1)*size+int(r.cqs[0].tail):][:32]
		for b := range 24 {
			if e[4+b] != byte(i) {
				t.Fatalf("entry %d is not the one that was at %d: %x", k, i, e)
			}
		}
	}
}

// TestStaleCompletions: what a completion has no word for is zero, whatever the caller's memory held.
func TestStaleCompletions(t *testing.T) {
	r := pair(t)
	q, c := r.qps[0], r.cqs[0]
	if _, err := q.PostSend([]verbs.SendWorkRequest{{WRID: 1}, {WRID: 2}}); err != nil {
		t.Fatal(err)
	}
	if _, err := q.PostRecv([]verbs.RecvWorkRequest{{WRID: 3}, {WRID: 4}}); err != nil {
		t.Fatal(err)
	}
	size := len(r.cqBuf[0]) / 16
	for i, e := range [][]byte{r.SendCQE(0, 0, 0), failed(r.cqe(0, 1, 1, cqeSend|cqeError), 0x8115), r.RecvCQE(0, 2), failed(r.cqe(0, 3, 3, cqeError), 0xf505)} {
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
	binary.BigEndian.PutUint16(e[len(e)-32+26:], code)
	return e
}
