package rxe

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"strings"
	"syscall"
	"testing"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/abi"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
	"srp-initiator/rdma/verbs/uverbs/internal/provider"
)

// board plays rdma_rxe as far as rings go: it gives them out, and a test reads and writes them as the kernel would.
type board struct {
	rings   map[int64][]byte
	answers []abi.RXEMMInfo // for the next CREATE commands, in order
	kicks   int
	flushes int
	notify  []uint32 // solicited_only of each arm
	armed   func()
}

func (b *board) ring(log2, mask uint32, size int) abi.RXEMMInfo {
	if size == 0 {
		size = int(ringHeader) + int(mask+1)<<log2
	}
	mem := make([]byte, size)
	binary.LittleEndian.PutUint32(mem[0:], log2)
	binary.LittleEndian.PutUint32(mem[4:], mask)
	off := int64(len(b.rings)+1) << 12
	b.rings[off] = mem
	return abi.RXEMMInfo{Offset: uint64(off), Size: uint32(size)}
}

func (b *board) Ioctl(c *kernel.Ioctl) error { return syscall.ENOTTY }

func (b *board) Write(w *kernel.Write) error {
	switch w.Command {
	case abi.CmdCreateCQ:
		binary.LittleEndian.PutUint32(w.CoreOut, 3)
		copy(w.DriverOut, abi.Bytes(&b.answers[0]))
		b.answers = b.answers[1:]
	case abi.CmdCreateQP:
		var r abi.CreateQPResp
		var req abi.CreateQP
		copy(abi.Bytes(&req), w.CoreIn)
		r = abi.CreateQPResp{QPHandle: 4, QPN: 0x11, MaxSendWR: req.MaxSendWR, MaxRecvWR: req.MaxRecvWR,
			MaxSendSGE: req.MaxSendSGE, MaxRecvSGE: req.MaxRecvSGE, MaxInlineData: 16 * req.MaxSendSGE}
		copy(w.CoreOut, abi.Bytes(&r))
		copy(w.DriverOut, abi.Bytes(&abi.RXECreateQPResp{RQMI: b.answers[0], SQMI: b.answers[1]}))
		b.answers = b.answers[2:]
	case abi.CmdPostSend:
		b.kicks++
	case abi.CmdModifyQP:
		b.flushes++
	case abi.CmdReqNotifyCQ:
		b.notify = append(b.notify, binary.LittleEndian.Uint32(w.CoreIn[4:]))
		if b.armed != nil {
			b.armed()
		}
	}
	return nil
}

func (b *board) Mmap(off int64, length, _ int) ([]byte, error) {
	mem := b.rings[off]
	if len(mem) != length {
		return nil, syscall.EINVAL
	}
	return mem, nil
}
func (b *board) Munmap([]byte) error { return nil }
func (b *board) Close() error        { return nil }

func open(t *testing.T) (*board, provider.Device) {
	t.Helper()
	b := &board{rings: map[int64][]byte{}}
	d, err := Family{}.Open(kernel.NewDevice(b, abi.DriverRXE), provider.Info{})
	if err != nil {
		t.Fatal(err)
	}
	return b, d
}

// newQP has a send ring of 7 slots of 512 bytes and a receive ring of 3 slots of 64.
func newQP(t *testing.T, signalAll bool) (b *board, q *qp, sq, rq []byte) {
	t.Helper()
	b, d := open(t)
	rqmi, sqmi := b.ring(6, 3, 0), b.ring(9, 7, 0)
	b.answers = []abi.RXEMMInfo{rqmi, sqmi}
	p, err := d.CreateQP(provider.QPArgs{QPArgs: kernel.QPArgs{SignalAll: signalAll,
		Cap: abi.QPCap{MaxSendWR: 5, MaxRecvWR: 3, MaxSendSGE: 3, MaxRecvSGE: 1}}})
	if err != nil {
		t.Fatal(err)
	}
	return b, p.(*qp), b.rings[int64(sqmi.Offset)], b.rings[int64(rqmi.Offset)]
}

// at checks the bytes at offsets of a slot and that all others are zero.
func at(t *testing.T, what string, slot []byte, want map[int]string) {
	t.Helper()
	rest := append([]byte(nil), slot...)
	for off, h := range want {
		w, err := hex.DecodeString(strings.ReplaceAll(h, " ", ""))
		if err != nil {
			t.Fatal(err)
		}
		if got := slot[off : off+len(w)]; string(got) != string(w) {
			t.Errorf("%s: offset %d holds % x, want % x", what, off, got, w)
		}
		clear(rest[off : off+len(w)])
	}
	for i, v := range rest {
		if v != 0 {
			t.Errorf("%s: offset %d holds %#x, want 0", what, i, v)
			return
		}
	}
}

func TestSendEntries(t *testing.T) {
	mem, err := hostmem.Alloc(4096)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Free()
	copy(mem.Bytes(), "inline bytes")
	sge := func(n uint32) verbs.SGE { return verbs.SGE{Addr: 0x1122334455667788, Length: n, LKey: 0xa1b2c3d4} }
	const addr = "8877665544332211"
	window := &fakeWindow{key: 0x500}
	for _, c := range []struct {
		name string
		wr   verbs.SendWorkRequest
		want map[int]string
	}{
		{"SEND of an SRP_CMD", verbs.SendWorkRequest{WRID: 0x0102030405060708, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: []verbs.SGE{sge(64)}},
			map[int]string{0: "0807060504030201", 12: "02", 16: "02", 184: "40", 188: "40", 196: "01", 208: addr + "40000000 d4c3b2a1"}},
		{"SEND of nothing", verbs.SendWorkRequest{WRID: 1, Opcode: verbs.OpSend, Flags: verbs.SendSolicited},
			map[int]string{0: "01", 12: "02", 16: "04"}},
		{"SEND_WITH_IMM", verbs.SendWorkRequest{Opcode: verbs.OpSendWithImm, ImmData: 0x01020304, SGList: []verbs.SGE{sge(1)}},
			map[int]string{12: "03", 20: "01020304", 184: "01", 188: "01", 196: "01", 208: addr + "01000000 d4c3b2a1"}},
		{"SEND_WITH_INV", verbs.SendWorkRequest{Opcode: verbs.OpSendWithInv, Flags: verbs.SendFence, ImmData: 0x01020304},
			map[int]string{12: "09", 16: "01", 20: "04030201"}},
		{"LOCAL_INV", verbs.SendWorkRequest{Opcode: verbs.OpLocalInv, ImmData: 0x01020304}, map[int]string{12: "07", 20: "04030201"}},
		{"RDMA_WRITE of three pieces", verbs.SendWorkRequest{Opcode: verbs.OpRDMAWrite, RemoteAddr: 0xcafe, RKey: 0x99, SGList: []verbs.SGE{sge(0x10), sge(0), sge(0x200)}},
			map[int]string{24: "feca", 32: "99", 152: "feca", 184: "1002", 188: "1002", 196: "03",
				208: addr + "10000000 d4c3b2a1" + addr + "00000000 d4c3b2a1" + addr + "00020000 d4c3b2a1"}},
		{"RDMA_WRITE_WITH_IMM", verbs.SendWorkRequest{Opcode: verbs.OpRDMAWriteImm, RemoteAddr: 0xcafe, RKey: 0x99, ImmData: 0x0a0b0c0d},
			map[int]string{12: "01", 20: "0a0b0c0d", 24: "feca", 32: "99", 152: "feca"}},
		{"RDMA_READ", verbs.SendWorkRequest{Opcode: verbs.OpRDMARead, RemoteAddr: 0xbeef, RKey: 0x77, SGList: []verbs.SGE{sge(8)}},
			map[int]string{12: "04", 24: "efbe", 32: "77", 152: "efbe", 184: "08", 188: "08", 196: "01", 208: addr + "08000000 d4c3b2a1"}},
		{"inline", verbs.SendWorkRequest{Opcode: verbs.OpSend, Flags: verbs.SendInline, SGList: []verbs.SGE{{Addr: mem.Addr(), Length: 7}, {Addr: mem.Addr() + 7, Length: 5}}},
			map[int]string{12: "02", 16: "08", 184: "0c", 188: "0c", 208: hex.EncodeToString([]byte("inline bytes"))}},
		{"BIND_MW", verbs.SendWorkRequest{Opcode: verbs.OpBindMW, Bind: &verbs.BindMW{Window: window, Region: fakeRegion{}, RKey: 0x501, Addr: 0xcafe, Length: 0x123, Access: 6}},
			map[int]string{12: "08", 24: "feca", 32: "2301", 40: "21", 44: "0005", 48: "0105", 52: "06"}},
	} {
		b, q, sq, _ := newQP(t, false)
		slot := sq[ringHeader : ringHeader+512]
		for i := range slot[:sendWQESize] {
			slot[i] = 0xff // the kernel's marks of the last lap
		}
		if n, err := q.PostSend([]verbs.SendWorkRequest{c.wr}); n != 1 || err != nil {
			t.Errorf("%s: %d posted, %v", c.name, n, err)
			continue
		}
		at(t, c.name, slot, c.want)
		if p := binary.LittleEndian.Uint32(sq[128:]); p != 1 || b.kicks != 1 {
			t.Errorf("%s: producer %d, %d kicks", c.name, p, b.kicks)
		}
	}
	if window.key != 0x501 {
		t.Errorf("the window's key is %#x after its bind", window.key)
	}
}

type fakeWindow struct{ key uint32 }

func (w *fakeWindow) RKey() uint32   { return w.key }
func (w *fakeWindow) Bound(k uint32) { w.key = k }
func (w *fakeWindow) Dealloc() error { return nil }

type fakeRegion struct{ verbs.MemoryRegion }

func (fakeRegion) LKey() uint32 { return 0x21 }

func TestRingArithmetic(t *testing.T) {
	b, q, sq, rq := newQP(t, true)
	if c := q.Cap(); c.MaxSendWR != 7 || c.MaxRecvWR != 3 || c.MaxInlineData != 48 {
		t.Errorf("%+v", c)
	}
	consumer := func(ring []byte, i uint32) { binary.LittleEndian.PutUint32(ring[256:], i) }
	next := uint64(0)
	posted := func(want int, wantErr error, n int) {
		t.Helper()
		wrs := make([]verbs.SendWorkRequest, n)
		for i := range wrs {
			wrs[i] = verbs.SendWorkRequest{WRID: next + uint64(i), Opcode: verbs.OpSend}
		}
		got, err := q.PostSend(wrs)
		if got != want || !errors.Is(err, wantErr) {
			t.Fatalf("%d of %d posted, %v; want %d, %v", got, n, err, want, wantErr)
		}
		next += uint64(got)
	}
	posted(7, verbs.ErrQueueFull, 9)
	posted(0, verbs.ErrQueueFull, 1)
	if b.kicks != 1 {
		t.Errorf("%d kicks for one batch and one refusal", b.kicks)
	}
	for lap := uint32(0); lap < 40; lap++ { // five laps of one at a time, always full
		consumer(sq, (lap+1)&7)
		posted(1, nil, 1)
		posted(0, verbs.ErrQueueFull, 1)
		slot := sq[int(ringHeader)+int((lap+7)&7)<<9:]
		if id := binary.LittleEndian.Uint64(slot); id != next-1 {
			t.Fatalf("lap %d: wr_id %d in the slot, want %d", lap, id, next-1)
		}
		if slot[16] != 2 {
			t.Fatalf("signal-all: flags %d", slot[16])
		}
	}
	consumer(rq, 2)
	binary.LittleEndian.PutUint32(rq[128:], 2)
	r := make([]verbs.RecvWorkRequest, 5)
	for i := range r {
		r[i] = verbs.RecvWorkRequest{WRID: uint64(50 + i), SGList: []verbs.SGE{{Addr: 0x10, Length: 256, LKey: 9}}}
	}
	if n, err := q.PostRecv(r); n != 3 || !errors.Is(err, verbs.ErrQueueFull) {
		t.Fatalf("%d receives posted, %v", n, err)
	}
	if p := binary.LittleEndian.Uint32(rq[128:]); p != 1 { // 2, 3, 0
		t.Errorf("producer %d", p)
	}
	at(t, "RECV of 256 bytes", rq[int(ringHeader)+3<<6:][:64], map[int]string{0: "33", 16: "0001", 20: "0001", 28: "01", 40: "1000000000000000 00010000 09000000"})
	if b.flushes != 0 {
		t.Error("a receive made a command")
	}
	// In ERR a receive makes the kernel look.
	if err := q.Modify(&abi.ModifyQP{}, verbs.QPReadyToSend, verbs.QPError); err != nil {
		t.Fatal(err)
	}
	consumer(rq, 1)
	if n, err := q.PostRecv(r[:1]); n != 1 || err != nil || b.flushes != 2 {
		t.Errorf("%d posted in ERR, %v, %d commands", n, err, b.flushes)
	}
}

func TestCompletions(t *testing.T) {
	b, d := open(t)
	mi := b.ring(7, 7, 0)
	b.answers = []abi.RXEMMInfo{mi}
	p, err := d.CreateCQ(kernel.CQArgs{CQE: 5, CompFD: -1})
	if err != nil {
		t.Fatal(err)
	}
	ring := b.rings[int64(mi.Offset)]
	prod := uint32(0)
	put := func(wc abi.WC) {
		copy(ring[int(ringHeader)+int(prod)<<7:], abi.Bytes(&wc))
		prod = (prod + 1) & 7
		binary.LittleEndian.PutUint32(ring[128:], prod)
	}
	if p.Capacity() != 7 {
		t.Errorf("capacity %d", p.Capacity())
	}
	wcs := make([]verbs.WorkCompletion, 8)
	for _, c := range []struct {
		in   abi.WC
		want verbs.WorkCompletion
	}{
		{abi.WC{WRID: 1, QPNum: 17, ByteLen: 5}, verbs.WorkCompletion{WRID: 1, QPN: 17, ByteLen: 5}},
		{abi.WC{WRID: 2, Opcode: 2, QPNum: 17, ByteLen: 4096}, verbs.WorkCompletion{WRID: 2, Opcode: verbs.WCRDMARead, QPN: 17, ByteLen: 4096}},
		{abi.WC{WRID: 3, Opcode: 128, ByteLen: 80, WCFlags: 1, QPNum: 18, SrcQP: 9}, verbs.WorkCompletion{WRID: 3, Opcode: verbs.WCRecv, ByteLen: 80, QPN: 18, Flags: verbs.WCWithGRH}},
		{abi.WC{WRID: 4, Opcode: 129, WCFlags: 3, Ex: 0x04030201}, verbs.WorkCompletion{WRID: 4, Opcode: verbs.WCRecvRDMAWr, Flags: verbs.WCWithGRH | verbs.WCWithImm, ImmData: 0x01020304}},
		{abi.WC{WRID: 5, Opcode: 128, WCFlags: 5, Ex: 0x04030201}, verbs.WorkCompletion{WRID: 5, Opcode: verbs.WCRecv, Flags: verbs.WCWithGRH | verbs.WCWithInv, ImmData: 0x04030201}},
		{abi.WC{WRID: 6, Status: 10, Opcode: 129, WCFlags: 7, Ex: 1, ByteLen: 9, QPNum: 3, VendorErr: 8}, verbs.WorkCompletion{WRID: 6, Status: verbs.WCRemoteAccessError, QPN: 3, VendorErr: 8}},
		{abi.WC{WRID: 7, Opcode: 0, WCFlags: 2, Ex: 99}, verbs.WorkCompletion{WRID: 7}}, // a SEND with immediate, at its sender
	} {
		put(c.in)
		if n := p.Poll(wcs); n != 1 || wcs[0] != c.want {
			t.Errorf("%d entries, %+v, want %+v", n, wcs[0], c.want)
		}
	}
	// Seven entries over the end, in twos.
	for i := range 7 {
		put(abi.WC{WRID: uint64(100 + i)})
	}
	for got := 0; got < 7; {
		n := p.Poll(wcs[:2])
		for i := range n {
			if wcs[i].WRID != uint64(100+got) {
				t.Fatalf("wr_id %d, want %d", wcs[i].WRID, 100+got)
			}
			got++
		}
		if n == 0 {
			t.Fatalf("empty after %d of 7", got)
		}
		if c := binary.LittleEndian.Uint32(ring[256:]); c != (prod+uint32(got)-7)&7 {
			t.Fatalf("consumer %d after %d of 7", c, got)
		}
	}
	// Missed is what lies in the ring after the command.
	if missed, err := p.Arm(false); missed || err != nil {
		t.Errorf("Arm on an empty ring: %v, %v", missed, err)
	}
	b.armed = func() { put(abi.WC{WRID: 1}) }
	if missed, err := p.Arm(true); !missed || err != nil {
		t.Errorf("Arm while an entry comes: %v, %v", missed, err)
	}
	if len(b.notify) != 2 || b.notify[0] != 0 || b.notify[1] != 0 {
		t.Errorf("armed with %v", b.notify)
	}
}

// TestRingsThatLie: what the kernel announces and writes into a ring's head is checked before it is used.
func TestRingsThatLie(t *testing.T) {
	for name, make := range map[string]func(b *board) abi.RXEMMInfo{
		"smaller than its head":           func(b *board) abi.RXEMMInfo { return b.ring(7, 7, 100) },
		"mask that is none":               func(b *board) abi.RXEMMInfo { return b.ring(7, 6, 384+7<<7) },
		"more entries than bytes":         func(b *board) abi.RXEMMInfo { return b.ring(7, 15, 384+8<<7) },
		"entries smaller than a CQE":      func(b *board) abi.RXEMMInfo { return b.ring(5, 7, 0) },
		"entries of 2^33 bytes":           func(b *board) abi.RXEMMInfo { return b.ring(33, 7, 384+8<<7) },
		"entries whose total wraps":       func(b *board) abi.RXEMMInfo { return b.ring(20, 0xffffffff, 384+8<<7) },
		"something that cannot be mapped": func(b *board) abi.RXEMMInfo { return abi.RXEMMInfo{Offset: 1, Size: 4096} },
	} {
		b, d := open(t)
		b.answers = []abi.RXEMMInfo{make(b)}
		if _, err := d.CreateCQ(kernel.CQArgs{CQE: 5, CompFD: -1}); err == nil {
			t.Errorf("a ring %s was taken", name)
		}
	}
	// A send slot that does not hold what the kernel granted.
	b, d := open(t)
	b.answers = []abi.RXEMMInfo{b.ring(6, 3, 0), b.ring(8, 7, 0)}
	if _, err := d.CreateQP(provider.QPArgs{QPArgs: kernel.QPArgs{Cap: abi.QPCap{MaxSendSGE: 4, MaxRecvSGE: 1}}}); err == nil {
		t.Error("send slots of 256 bytes were taken for 4 SGEs, which need 272")
	}
}

func BenchmarkPostPoll(b *testing.B) {
	k := &board{rings: map[int64][]byte{}}
	d, _ := Family{}.Open(kernel.NewDevice(k, abi.DriverRXE), provider.Info{})
	k.answers = []abi.RXEMMInfo{k.ring(6, 127, 0), k.ring(9, 127, 0)}
	p, err := d.CreateQP(provider.QPArgs{QPArgs: kernel.QPArgs{Cap: abi.QPCap{MaxSendWR: 100, MaxRecvWR: 100, MaxSendSGE: 3, MaxRecvSGE: 1}}})
	if err != nil {
		b.Fatal(err)
	}
	q := p.(*qp)
	wr := []verbs.SendWorkRequest{{Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: []verbs.SGE{{Addr: 1, Length: 64, LKey: 2}}}}
	b.Run("PostSend", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if n, err := q.PostSend(wr); n != 1 {
				b.Fatal(err)
			}
			q.sq.setConsumer(q.sq.producer())
		}
	})
	rwr := []verbs.RecvWorkRequest{{SGList: []verbs.SGE{{Addr: 1, Length: 256, LKey: 2}}}}
	b.Run("PostRecv", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if n, err := q.PostRecv(rwr); n != 1 {
				b.Fatal(err)
			}
			q.rq.setConsumer(q.rq.producer())
		}
	})
	k.answers = []abi.RXEMMInfo{k.ring(7, 127, 0)}
	c, err := d.CreateCQ(kernel.CQArgs{CQE: 100, CompFD: -1})
	if err != nil {
		b.Fatal(err)
	}
	r := &c.(*cq).ring
	var wcs [1]verbs.WorkCompletion
	b.Run("Poll", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			r.setProducer((r.producer() + 1) & r.mask)
			if c.Poll(wcs[:]) != 1 {
				b.Fatal("empty")
			}
		}
	})
}
