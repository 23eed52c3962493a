package mlx4

// What the recordings do not hold: window binds, whose bytes testdata/libcost printed from libmlx4 44.0, and paths at the edge.

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"syscall"
	"testing"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/abi"
	"srp-initiator/rdma/verbs/uverbs/internal/golden"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
	"srp-initiator/rdma/verbs/uverbs/internal/provider"
	"srp-initiator/rdma/verbs/uverbs/internal/ring"
)

// pair builds two queue pairs on one completion queue.
func pair(t *testing.T) *rig {
	r, err := newRig(golden.PairCase("mlx4-roce"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	bf := newBlueFlame(ring.Addr(r.UARs[1]), recordedBlueFlame)
	for i := range uint32(2) {
		l, err := SizeQP(golden.PairCap, recordedLimits)
		if err != nil {
			t.Fatal(err)
		}
		r.add(&QP{qpn: 0x1a3 + i}, l, r.Used(l.Bytes), bf, false, false)
	}
	return r
}

func TestEdges(t *testing.T) {
	golden.Edge{
		Driver:    driver,
		Profiles:  []string{"mlx4-roce"},
		Pair:      func(t *testing.T, _ string) golden.PairRig { return pair(t) },
		CQEntries: CQEntries, MaxEntries: 1 << 22,
		ByteLen: 12, FirstSN: 1, Doorbell: 0x400,
	}.Test(t)
}

// posted is the first n bytes of the i-th send entry, without what belongs to BlueFlame.
func (r *rig) posted(i, n int) string {
	l := r.QPs[0].lay
	e := append([]byte(nil), r.SQ(0)[i<<l.SendShift:][:n]...)
	e[1], e[2], e[4], e[5], e[6] = 0, 0, 0, 0, 0
	return hex.EncodeToString(e)
}

func TestBindWindow(t *testing.T) {
	const base = 0x100000000000
	r := pair(t)
	q := r.QPs[0]
	w := &golden.Window{Key: 0x1ee800}
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
		_, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpBindMW, Flags: verbs.SendSignaled, ImmData: 0xffffffff, Bind: &verbs.BindMW{
			Window: w, Region: golden.Region{}, RKey: w.Key + 1, Addr: base + c.off, Length: c.length, Access: c.access}}})
		if err != nil {
			t.Fatal(err)
		}
		l := q.lay
		if got := hex.EncodeToString(r.SQ(0)[i<<l.SendShift:][:48]); got != c.want {
			t.Errorf("bind %d:\n%s, want\n%s", i, got, c.want)
		}
	}
	if w.Key != 0x1ee804 {
		t.Errorf("the window's key is %#x", w.Key)
	}
	if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpLocalInv, ImmData: w.Key}}); err != nil {
		t.Fatal(err)
	}
	const want = "0000001b0000000300000080000000000000000000000000001ee8040000000000000000000000000000000000000000"
	if got := hex.EncodeToString(r.SQ(0)[4<<q.lay.SendShift:][:48]); got != want {
		t.Errorf("LOCAL_INV:\n%s, want\n%s", got, want)
	}
	if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpLocalInv, ImmData: 0xffffffff}}); err != nil {
		t.Fatal(err)
	}
	const all = "0000001b000000030000008000000000" + "0000000000000000ffffffff00000000" + "00000000000000000000000000000000"
	if got := hex.EncodeToString(r.SQ(0)[5<<q.lay.SendShift:][:48]); got != all {
		t.Errorf("LOCAL_INV of the last key:\n%s, want\n%s", got, all)
	}
	if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpBindMW, Bind: &verbs.BindMW{Window: w, Region: golden.Region{}}}}); err == nil {
		t.Error("a bind of no bytes was accepted")
	}
}

// TestGarbageFields posts requests whose unused fields hold something, over entries that did.
func TestGarbageFields(t *testing.T) {
	r := pair(t)
	q := r.QPs[0]
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
		{verbs.OpSendWithImm, "0000000b" + "00000002" + "00000000ffffffff"},
		{verbs.OpSendWithInv, "00000001" + "00000002" + "00000000ffffffff"},
		{verbs.OpRDMAWriteImm, "00000009" + "00000003" + "00000000ffffffff" + remote},
		{verbs.OpFetchAdd, "00000012" + "00000004" + "0000000000000000" + remote + "0000000000000aaa" + "0000000000000000"},
	} {
		if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: c.op, ImmData: 0xffffffff, RemoteAddr: 0x1122334455667788, RKey: 0x998800,
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

// TestStampedRing looks at a whole new ring: each entry software's, its lines after the first marked.
func TestStampedRing(t *testing.T) {
	r := &rig{}
	t.Cleanup(r.Close)
	l, err := SizeQP(verbs.QPCap{MaxSendWR: 5, MaxSendSGE: 8}, recordedLimits)
	if err != nil {
		t.Fatal(err)
	}
	q, buf := &QP{}, r.Alloc(l.Bytes)
	q.init(l, ring.Addr(buf), ring.Addr(r.Alloc(notesBytes(&l))), ring.Addr(r.Alloc(4)), ring.Addr(r.Alloc(4096)), &blueFlame{}, false)
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
	sge := []verbs.SGE{{Addr: 0x100000000000, Length: 8, LKey: 0x1ee700}}
	send := []verbs.SendWorkRequest{{Opcode: verbs.OpSend}, {Opcode: verbs.OpSend, SGList: sge}, {Opcode: verbs.OpSend, SGList: sge}}
	for n := 0; n < l.SendCount+6; n += 4 { // one, then three at once
		for _, chain := range [][]verbs.SendWorkRequest{send[1:2], send} {
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
	c := r.CQs[0]
	var wcs [2]verbs.WorkCompletion
	for _, ci := range []uint32{0, 16, 0xfffff0} {
		c.CI = ci
		size := len(r.CQBuf[0]) / 16
		for op := range 0x80 {
			r.CQBuf[0][size-1] = byte(op)
			if ci&16 == 0 {
				r.CQBuf[0][size-1] |= 0x80
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
		c := r.CQs[0]
		c.CI = ci
		q := r.QPs[1]
		q.qpn = 0xffffff
		r.table.Set(q.qpn, q)
		if _, err := q.PostRecv([]verbs.RecvWorkRequest{{WRID: 5}, {WRID: 6}}); err != nil {
			t.Fatal(err)
		}
		size := len(r.CQBuf[0]) / 16
		for i := range uint32(2) {
			e := r.RecvCQE(1, ci+i)
			d := e[size-32:]
			d[0] = 0xa5                                               // not of the number
			binary.BigEndian.PutUint32(d[8:], 0x7fffffff*(1-i)|i<<31) // path and source, then that there is a GRH
			copy(r.CQBuf[0][int((ci+i)&15)*size:], e)
		}
		var wcs [2]verbs.WorkCompletion
		if n := c.Poll(wcs[:]); n != 2 || wcs[0].WRID != 5 || wcs[1].WRID != 6 || wcs[0].QPN != 0xffffff {
			t.Fatalf("index %#x: %d completions %+v", ci, n, wcs)
		}
		if wcs[0].Flags != 0 || wcs[1].Flags != verbs.WCWithGRH {
			t.Errorf("flags %#x and %#x", wcs[0].Flags, wcs[1].Flags)
		}
		next := (ci + 2) & 0xffffff
		if got := binary.BigEndian.Uint32(r.CQRec[0]); got != next {
			t.Errorf("index %#x: the record says %#x, want %#x", ci, got, next)
		}
		c.Arm(true)
		if got := binary.BigEndian.Uint32(r.CQRec[0][4:]); got != 0x11000000|next {
			t.Errorf("index %#x: the arm record says %#x", ci, got)
		}
		if got := binary.BigEndian.Uint64(r.UARs[0][0x20:]); got != 0x11000400<<32|uint64(next) {
			t.Errorf("index %#x: the arm doorbell says %#x", ci, got)
		}
	}
}

// TestPurgeOfAnyNumber: entries are told apart by all 24 bits of the number, and by no others.
func TestPurgeOfAnyNumber(t *testing.T) {
	r := pair(t)
	r.CQs[0].CI = 0xffffffff
	size := len(r.CQBuf[0]) / 16
	for i, n := range []uint32{0xffffff, 0x7fffff, 0xfffffe, 0xffffff, 0xffefff} {
		e := r.RecvCQE(0, uint32(i-1))
		binary.BigEndian.PutUint32(e[size-32:], uint32(i)<<24|n)
		for k := range 24 {
			e[size-32+4+k] = byte(i)
		}
		copy(r.CQBuf[0][int(i-1)&15*size:], e)
	}
	r.CQs[0].Purge(0xffffff)
	if got := binary.BigEndian.Uint32(r.CQRec[0]); got != 1 {
		t.Errorf("consumer index %d", got)
	}
	for k, i := range []int{1, 2, 4} {
		e := r.CQBuf[0][(k+1)*size+size-32:][:32]
		for b := range 24 {
			if e[4+b] != byte(i) {
				t.Fatalf("entry %d is not the one that was at %d: %x", k, i, e)
			}
		}
	}
}

// TestWideEntries: how far a new entry's mark says that it reaches. Of 1024 bytes the six bits say nothing, as in the library.
func TestWideEntries(t *testing.T) {
	for sges, shift := range map[int]int{2: 6, 4: 7, 8: 8, 30: 9, 32: 10} {
		r := &rig{}
		t.Cleanup(r.Close)
		l, err := SizeQP(verbs.QPCap{MaxSendWR: 5, MaxSendSGE: sges}, recordedLimits)
		if err != nil || l.SendShift != shift {
			t.Fatalf("%d entries: shift %d (%v)", sges, l.SendShift, err)
		}
		q, buf := &QP{}, r.Alloc(l.Bytes)
		q.init(l, ring.Addr(buf), ring.Addr(r.Alloc(notesBytes(&l))), ring.Addr(r.Alloc(4)), ring.Addr(r.Alloc(4096)), &blueFlame{}, false)
		q.beforeInit()
		for i := range l.SendCount {
			e := buf[l.SendOffset+i<<l.SendShift:][:1<<l.SendShift]
			for o := 64; o < len(e); o += 64 {
				if got := binary.BigEndian.Uint32(e[o:]); (got == 0xffffffff) != (len(e) < 1024) {
					t.Fatalf("entry %d of %d bytes at %d: %#x", i, len(e), o, got)
				}
			}
		}
	}
}

// TestControlFlags posts every combination of flags with one entry and with two, which are built by different code.
func TestControlFlags(t *testing.T) {
	sge := verbs.SGE{Addr: 0x100000000000, Length: 8, LKey: 0x1ee700}
	for _, sges := range [][]verbs.SGE{{sge}, {sge, sge}} {
		for flags := range verbs.SendFlags(8) {
			r := pair(t)
			if _, err := r.QPs[0].PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpSendWithImm, Flags: flags | ^verbs.SendFlags(15), ImmData: 0xffffffff, SGList: sges}}); err != nil {
				t.Fatal(err)
			}
			size, word := byte(1+len(sges)), uint32(0)
			if flags&verbs.SendFence != 0 {
				size |= 0x40
			}
			if flags&verbs.SendSignaled != 0 {
				word |= 0xc
			}
			if flags&verbs.SendSolicited != 0 {
				word |= 2
			}
			e := r.SQ(0)
			if e[7] != size || binary.BigEndian.Uint32(e[8:]) != word || binary.BigEndian.Uint32(e[12:]) != 0xffffffff {
				t.Errorf("%d entries, flags %#x: %x", len(sges), flags, e[:16])
			}
		}
	}
}

// TestBlueFlameOfInline: a request with inline data goes through the register, however little the data; one without does not.
func TestBlueFlameOfInline(t *testing.T) {
	data := []byte("abcdefgh")
	for _, split := range [][]uint32{{0}, {0, 0}, {1}, {0, 1}, {1, 1}, {2, 1}, {3, 1}, {4, 4}} {
		r := pair(t)
		total := uint32(0)
		var sges []verbs.SGE
		for _, n := range split {
			sges = append(sges, verbs.SGE{Addr: ring.AddrOf(data), Length: n})
			total += n
		}
		if _, err := r.QPs[0].PostSend([]verbs.SendWorkRequest{{Opcode: verbs.OpSend, Flags: verbs.SendInline, SGList: sges}}); err != nil {
			t.Fatal(err)
		}
		if got := r.UARs[1][3] == opSend; got != (total > 0) {
			t.Errorf("%v bytes: through the register %v", split, got)
		}
	}
}

// TestNotes: what is noted beside the rings takes the room it says, to the byte.
func TestNotes(t *testing.T) {
	r := pair(t)
	q := r.QPs[0]
	l := q.lay
	if n := notesBytes(&l); n != 8*(l.SendCount+l.RecvCount) {
		t.Errorf("%d bytes of notes for %d and %d entries", n, l.SendCount, l.RecvCount)
	}
	notes := r.Alloc(4096)
	q.init(l, ring.Addr(r.QPBuf[0]), ring.Addr(notes), ring.Addr(r.QPRec[0]), ring.Addr(r.UARs[0]), &blueFlame{}, false)
	for i := range l.SendCount {
		q.sentPub.Store(q.head)
		if _, err := q.PostSend([]verbs.SendWorkRequest{{WRID: uint64(1 + i)}}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range l.RecvCount {
		if _, err := q.PostRecv([]verbs.RecvWorkRequest{{WRID: uint64(1 + l.SendCount + i)}}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range len(notes) / 8 {
		want := uint64(1 + i)
		if i >= l.SendCount+l.RecvCount {
			want = 0
		}
		if got := binary.NativeEndian.Uint64(notes[i*8:]); got != want {
			t.Errorf("note %d is %d", i, got)
		}
	}
}

// openDevice opens a device on a made-up kernel, whose last QP command's capabilities are in caps.
func openDevice(resp abi.MLX4GetContextResp, caps *abi.CreateQP) (*device, *golden.Answers, error) {
	k := &golden.Answers{Answer: func(w *kernel.Write) error {
		switch w.Command {
		case abi.CmdGetContext:
			copy(w.DriverOut, abi.Bytes(&resp))
		case abi.CmdQueryDevice:
			copy(w.CoreOut, abi.Bytes(&abi.QueryDeviceResp{MaxQPWR: 16351, MaxSGE: 30}))
		case abi.CmdCreateCQ:
			copy(w.DriverOut, abi.Bytes(&abi.MLX4CreateCQResp{CQN: 0x400}))
		case abi.CmdCreateQP:
			copy(abi.Bytes(caps), w.CoreIn)
			copy(w.CoreOut, abi.Bytes(&abi.CreateQPResp{QPHandle: 5, QPN: 0x1a3}))
		}
		return nil
	}}
	d, err := (Family{}).Open(kernel.NewDevice(k, abi.DriverMLX4), provider.Info{ABIVersion: 4})
	if err != nil {
		return nil, k, err
	}
	return d.(*device), k, nil
}

// TestOpen: the sizes of completion entries that are known, and the pages mapped.
func TestOpen(t *testing.T) {
	for _, c := range []struct {
		caps, size uint32
		bf         uint16
		want, maps int
	}{
		{1, 32, 512, 32, 2}, {1, 64, 512, 64, 2}, {0, 64, 512, 32, 2}, {2, 64, 512, 32, 2}, {3, 64, 0, 64, 1},
		{1, 33, 512, 0, 0}, {1, 16, 512, 0, 0}, {1, 65, 512, 0, 0}, {1, 128, 512, 0, 0}, {1, 0, 512, 0, 0},
	} {
		d, k, err := openDevice(abi.MLX4GetContextResp{DevCaps: c.caps, CQESize: c.size, BFRegSize: c.bf}, nil)
		if c.want == 0 {
			if !errors.Is(err, syscall.EINVAL) {
				t.Errorf("%+v: %v", c, err)
			}
			continue
		}
		if err != nil || d.cqeSize != c.want || len(k.Maps) != c.maps || k.Maps[0] != 0 || d.bf.units != uint32(c.bf/32) {
			t.Errorf("%+v: %v, %+v, %v", c, err, d, k.Maps)
			continue
		}
		if c.maps == 2 && k.Maps[1] != 4096 {
			t.Errorf("mapped %v", k.Maps)
		}
		if d.Close(); k.Unmaps != c.maps {
			t.Errorf("%d pages unmapped", k.Unmaps)
		}
	}
}

// TestDeviceStates: what the change of a queue pair's state does to its ring and records, and what the kernel is asked for.
func TestDeviceStates(t *testing.T) {
	var asked abi.CreateQP
	d, _, err := openDevice(abi.MLX4GetContextResp{BFRegSize: 512}, &asked)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	c, err := d.CreateCQ(kernel.CQArgs{CQE: 15, CompFD: -1})
	if err != nil {
		t.Fatal(err)
	}
	a := provider.QPArgs{SendCQ: c, RecvCQ: c}
	a.Cap.MaxSendWR, a.Cap.MaxSendSGE, a.Cap.MaxInlineData = 4, 2, 20
	p, err := d.CreateQP(a)
	if err != nil {
		t.Fatal(err)
	}
	if asked.MaxRecvWR != 1 || asked.MaxRecvSGE != 1 || asked.MaxSendWR != 4 || asked.MaxInlineData != 20 {
		t.Errorf("the kernel was asked for %+v", asked)
	}
	q := p.(*qp)
	sq := q.Pages.Bytes()[q.lay.SendOffset:][:q.lay.SendCount<<q.lay.SendShift]
	state := &abi.ModifyQP{AttrMask: 1}
	if err := q.Modify(&abi.ModifyQP{AttrMask: 1 << 3}, verbs.QPReset, verbs.QPReset); err != nil || sq[0] != 0 {
		t.Errorf("%v; entry %x", err, sq[:8])
	}
	if err := q.Modify(state, verbs.QPReset, verbs.QPInitState); err != nil || hex.EncodeToString(sq[:8]) != fmt.Sprintf("80000000000000%02x", 1<<q.lay.SendShift/16) {
		t.Errorf("%v; entry %x", err, sq[:8])
	}
	if _, err := q.PostRecv([]verbs.RecvWorkRequest{{}}); err != nil || q.Record[3] != 1 {
		t.Errorf("%v; record %x", err, q.Record)
	}
	if err := q.Modify(state, verbs.QPInitState, verbs.QPReset); err != nil || q.Record[3] != 0 {
		t.Errorf("%v; record %x after RESET", err, q.Record)
	}
	if _, err := q.PostRecv([]verbs.RecvWorkRequest{{}}); err != nil || q.Record[3] != 1 {
		t.Errorf("%v; record %x of the first receive after RESET", err, q.Record)
	}
	if _, err := q.Destroy(); err != nil || d.qps.Get(0x1a3) != nil {
		t.Error(err)
	}
	if _, err := c.Destroy(); err != nil {
		t.Error(err)
	}
}

// TestInlinePieces compares inline data, in one piece of memory and in several, with a plain reading of the rule: each 64-byte line
// has its own header with the bytes that follow in it.
func TestInlinePieces(t *testing.T) {
	r := &rig{}
	t.Cleanup(r.Close)
	data := make([]byte, 1024)
	for i := range data {
		data[i] = byte(i*7 + 1)
	}
	l, err := SizeQP(verbs.QPCap{MaxSendWR: 1, MaxSendSGE: 3, MaxInlineData: 400}, recordedLimits)
	if err != nil {
		t.Fatal(err)
	}
	q, buf := &QP{}, r.Alloc(l.Bytes)
	q.init(l, ring.Addr(buf), ring.Addr(r.Alloc(notesBytes(&l))), ring.Addr(r.Alloc(4)), ring.Addr(r.Alloc(4096)), &blueFlame{}, false)
	for op, start := range map[verbs.SendOpcode]int{verbs.OpSend: 16, verbs.OpRDMAWrite: 32} {
		for n := range l.Cap.MaxInlineData + 1 {
			want := bytes.Repeat([]byte{0xee}, 512)
			at, units := start, start/16
			for left := data[:n]; len(left) > 0; {
				k := min(len(left), 60-at%64)
				binary.BigEndian.PutUint32(want[at:], 0x80000000|uint32(k))
				copy(want[at+4:], left[:k])
				at, left = at+4+k, left[k:]
			}
			units += (at - start + 15) / 16
			for _, cuts := range [][2]int{{0, 0}, {1, 2}, {7, 29}, {28, 28}, {44, 104}, {88, 89}, {n / 2, n}} {
				a := min(cuts[0], n)
				b := max(a, min(cuts[1], n))
				sges := []verbs.SGE{{Addr: ring.AddrOf(data), Length: uint32(a)}, {Addr: ring.AddrOf(data[a:]), Length: uint32(b - a)}, {Addr: ring.AddrOf(data[b:]), Length: uint32(n - b)}}
				if cuts[1] == 0 {
					sges = sges[2:]
				}
				e := buf[l.SendOffset+int(q.head)%l.SendCount<<l.SendShift:][:512]
				for i := range e {
					e[i] = 0xee
				}
				q.sentPub.Store(q.head)
				if _, err := q.PostSend([]verbs.SendWorkRequest{{Opcode: op, Flags: verbs.SendInline, SGList: sges}}); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(e[start:], want[start:]) || int(e[7]) != units {
					t.Fatalf("%v of %d bytes cut at %d and %d: %d units, want %d\n%x, want\n%x", op, n, a, b, e[7], units, e, want)
				}
			}
		}
	}
}

// TestCaps grants what libmlx4 44.0 grants for each inline size and number of entries, as testdata/libcost printed it (its caps mode): 5
// sends asked for. A line holds until the next.
func TestCaps(t *testing.T) {
	type line struct{ from, wr, sge, inline int }
	for what, lines := range map[string][]line{
		"inline": {{0, 31, 2, 28}, {29, 15, 6, 88}, {89, 7, 14, 208}, {209, 11, 30, 448}, {449, 5, 62, 928}, {929, 6, 126, 1888}, {1025, 0, 0, 0}, {1100, 0, 0, 0}},
		"send":   {{0, 31, 2, 28}, {3, 15, 6, 88}, {7, 7, 14, 208}, {15, 11, 30, 448}, {31, 0, 0, 0}, {64, 0, 0, 0}},
	} {
		for i, l := range lines[:len(lines)-1] {
			for n := l.from; n < lines[i+1].from; n++ {
				ask := verbs.QPCap{MaxSendWR: 5, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1}
				if what == "inline" {
					ask.MaxInlineData = n
				} else {
					ask.MaxSendSGE = n
				}
				got, err := SizeQP(ask, Limits{MaxWR: 16351, MaxSGE: 30})
				want := verbs.QPCap{MaxSendWR: l.wr, MaxRecvWR: 4, MaxSendSGE: l.sge, MaxRecvSGE: 1, MaxInlineData: l.inline}
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
}

// TestStampReach: an entry about to be reused is stamped as far as its last request reached, whose 16-byte units may be odd.
func TestStampReach(t *testing.T) {
	for units, lines := range map[int]int{3: 0, 4: 0, 5: 1, 6: 1, 7: 1, 8: 1, 9: 2} {
		r := &rig{}
		t.Cleanup(r.Close)
		l, err := SizeQP(verbs.QPCap{MaxSendWR: 5, MaxSendSGE: 8}, recordedLimits)
		if err != nil || l.SendShift != 8 {
			t.Fatal(err)
		}
		q, buf := &QP{}, r.Alloc(l.Bytes)
		q.init(l, ring.Addr(buf), ring.Addr(r.Alloc(notesBytes(&l))), ring.Addr(r.Alloc(4)), ring.Addr(r.Alloc(4096)), &blueFlame{}, false)
		q.beforeInit()
		wr := []verbs.SendWorkRequest{{SGList: make([]verbs.SGE, units-1)}}
		wr[0].Opcode = verbs.OpSend
		for n := range 2 * l.SendCount {
			e := buf[l.SendOffset+(n+l.SendSpare)%l.SendCount<<l.SendShift:][:256]
			clear(e[64:])
			q.sentPub.Store(q.head)
			if _, err := q.PostSend(wr); err != nil {
				t.Fatal(err)
			}
			for line := 1; line < 4 && n >= l.SendCount; line++ {
				if got := binary.BigEndian.Uint32(e[64*line:]) == 0xffffffff; got != (line <= lines) {
					t.Fatalf("%d units, request %d: line %d is stamped: %v", units, n, line, got)
				}
			}
		}
	}
}
