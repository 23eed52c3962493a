package mlx5

// A send work request travels so:
//
//	PostSend  writes one WQE per request into the send ring (owned by the adapter from the doorbell on),
//	          notes WRID and request count beside it, and rings once per call: doorbell record, fence, register.
//	adapter   reads the ring (or the register, with BlueFlame), then writes a CQE that names the WQE's block.
//	CQ.Poll   takes the WRID back by that block and retires every request up to it.
//
// The ring, the records and the notes are mapped memory outside Go's heap. PostSend's
// goroutine owns pi, head and the notes it writes; the poller of the send queue's CQ owns sent, which sentPub carries back to the
// posting side. Receives are package ring's.

import (
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/provider"
	"srp-initiator/rdma/verbs/uverbs/internal/ring"
	"srp-initiator/rdma/verbs/uverbs/internal/udma"
)

// Send opcodes of the adapter (mlx5dv.h, MLX5_OPCODE_*).
const (
	opSendInval    = 0x01
	opRDMAWrite    = 0x08
	opRDMAWriteImm = 0x09
	opSend         = 0x0a
	opSendImm      = 0x0b
	opRDMARead     = 0x10
	opAtomicCS     = 0x11
	opAtomicFA     = 0x12
	opUMR          = 0x25
)

// Control segment flags (mlx5dv.h, MLX5_WQE_CTRL_*).
const (
	ctrlSolicited  = 0x02
	ctrlCQUpdate   = 0x08
	ctrlSmallFence = 0x20
	ctrlFence      = 0x80
)

const maxOps = 16 // a power of two above every operation of package verbs

// sendOps says how each operation is built.
var sendOps = [maxOps]struct {
	code uint8
	kind uint8
	imm  uint32 // mask of the immediate value or key
}{
	verbs.OpRDMAWrite:    {opRDMAWrite, kindRDMA, 0},
	verbs.OpRDMAWriteImm: {opRDMAWriteImm, kindRDMA, ^uint32(0)},
	verbs.OpSend:         {opSend, kindSend, 0},
	verbs.OpSendWithImm:  {opSendImm, kindSend, ^uint32(0)},
	verbs.OpRDMARead:     {opRDMARead, kindRDMA, 0},
	verbs.OpCompareSwap:  {opAtomicCS, kindRare, 0},
	verbs.OpFetchAdd:     {opAtomicFA, kindRare, 0},
	verbs.OpLocalInv:     {opUMR, kindRare, ^uint32(0)},
	verbs.OpBindMW:       {opUMR, kindRare, 0},
	verbs.OpSendWithInv:  {opSendInval, kindSend, ^uint32(0)},
}

const (
	kindNone = iota // no operation
	kindRare        // atomics and memory keys
	kindSend        // data segments only
	kindRDMA        // remote address, data
)

// ctrlFlags translates verbs.SendFence, SendSignaled and SendSolicited.
var ctrlFlags = [...]uint8{0, ctrlFence, ctrlCQUpdate, ctrlCQUpdate | ctrlFence,
	ctrlSolicited, ctrlSolicited | ctrlFence, ctrlSolicited | ctrlCQUpdate, ctrlSolicited | ctrlCQUpdate | ctrlFence}

const family = ring.Family("mlx5")

var (
	refusals     = family.Refusals(1<<31, "1 to 2^31 bytes", unix.EINVAL)
	errSendState = fmt.Errorf("mlx5: send posted to a queue pair that is not in RTS: %w", unix.ENOMEM)
	errRecvState = fmt.Errorf("mlx5: receive posted to a queue pair in RESET: %w", unix.EINVAL)
)

// Register is a doorbell register of a UAR page. It has two halves that are
// used in turn, so that the write-combining buffer of one doorbell is not merged with the next.
type Register struct {
	base unsafe.Pointer
	half uintptr // bytes between the halves, 0: only one
	off  uintptr // 0 or half: where the next doorbell goes
	// copyMax is how many 16-byte units of a descriptor the register takes (BlueFlame),
	// 0 for none; copyInlineMax the same when the descriptor carries inline data.
	copyMax, copyInlineMax uint32
	shared                 bool   // other queue pairs may ring it: hold mu
	uar                    uint32 // page id, for the create command
	mu                     sync.Mutex
}

// newRegister makes the register at base with halves of half bytes, 0 for a register without BlueFlame.
func newRegister(base unsafe.Pointer, half int, opt options) *Register {
	r := &Register{base: base, half: uintptr(half)}
	if half > 0 && !opt.NoBlueFlame {
		r.copyInlineMax = uint32(half / segSize)
		if !opt.BlueFlameInlineOnly {
			r.copyMax = r.copyInlineMax
		}
	}
	return r
}

// slot is what PostSend notes beside the first block of a WQE.
type slot struct {
	wrid uint64
	head uint32 // requests posted up to and including this one
	op   uint32 // verbs.WCOpcode of a UMR
}

const slotSize = unsafe.Sizeof(slot{})

// QP is the adapter side of an RC queue pair.
type QP struct {
	qpn  uint32
	rsn  uint32 // what CQEs call the queue pair: uidx, or qpn with CQE version 0
	cap  verbs.QPCap
	lay  Layout
	send *CQ
	recv *CQ

	state atomic.Uint32 // verbs.QPState

	// Send side, PostSend's.
	sq, sqEnd unsafe.Pointer
	slots     unsafe.Pointer
	rec       unsafe.Pointer // two words: receive head, send block index
	reg       *Register
	sqMask    uint32
	pi        uint32 // running block index
	head      uint32 // requests posted
	inline    uint32 // bytes of inline data that a request may have
	signal    uint8  // flags of every request
	nextFence uint8  // flags that the next request must carry
	sentPub   atomic.Uint32

	recvs ring.Receives

	sent uint32 // the poller's
}

func (q *QP) QPN() uint32      { return q.qpn }
func (q *QP) Cap() verbs.QPCap { return q.cap }

// notesBytes is the mapped memory that a queue pair's WRIDs and counts need.
func notesBytes(l *Layout) int { return l.SendBlocks*int(slotSize) + l.RecvCount*8 }

// init points the queue pair at its memory: buf holds the rings as l says, notes is notesBytes long, rec the doorbell record.
func (q *QP) init(l Layout, buf, notes, rec unsafe.Pointer, reg *Register, signalAll bool) {
	q.lay, q.cap = l, l.Cap
	q.sq = unsafe.Add(buf, l.SendOffset)
	q.sqEnd = unsafe.Add(buf, l.Bytes)
	q.sqMask = uint32(l.SendBlocks) - 1
	q.inline = uint32(l.Cap.MaxInlineData)
	q.slots = notes
	q.rec = rec
	q.recvs.Init(buf, unsafe.Add(notes, l.SendBlocks*int(slotSize)), rec,
		ring.ReceiveShape{Count: l.RecvCount, Shift: l.RecvShift, Cap: l.Cap, TooMany: refusals.RecvSGE, LeaveOut: true})
	q.reg = reg
	if signalAll {
		q.signal = ctrlCQUpdate
	}
}

// reset puts the software side in the state of a new queue pair. Neither side
// is posting, and the completion queues hold nothing of it.
func (q *QP) reset() {
	q.pi, q.head, q.nextFence, q.sent = 0, 0, 0, 0
	q.sentPub.Store(0)
	q.recvs.Reset()
	if q.rec != nil {
		*(*uint64)(q.rec) = 0
	}
}

// chain is what a call of PostSend knows of the requests it has built.
type chain struct {
	pi, head uint32
	free     uint32
	fence    uint8          // flags that the next request must carry
	inline   bool           // some WQE of the call carries inline data
	units    uint32         // 16-byte units of the last WQE
	ctrl     unsafe.Pointer // of the last WQE
}

// PostSend builds one WQE per request and rings the doorbell once.
func (q *QP) PostSend(wrs []verbs.SendWorkRequest) (posted int, err error) {
	if s := verbs.QPState(q.state.Load()); s < verbs.QPReadyToSend {
		return 0, errSendState
	}
	w := chain{pi: q.pi, head: q.head, free: uint32(q.cap.MaxSendWR) - (q.head - q.sentPub.Load()), fence: q.nextFence}
	for {
		posted += q.plain(&w, wrs[posted:])
		if posted == len(wrs) {
			break
		}
		if err = q.build(&w, &wrs[posted]); err != nil {
			break
		}
		posted++
	}
	if posted == 0 {
		return 0, err
	}
	q.pi, q.head, q.nextFence = w.pi, w.head, w.fence

	reg := q.reg
	if reg.shared {
		reg.mu.Lock()
	}
	limit := reg.copyMax
	if w.inline {
		limit = reg.copyInlineMax
	}
	dst := unsafe.Add(reg.base, reg.off)
	reg.off ^= reg.half
	rec := unsafe.Add(q.rec, 4)
	recVal := bits.ReverseBytes32(w.pi & 0xffff)
	// The doorbell is the last thing: its answer may lead to the next PostSend before this one has returned.
	udma.Published()
	if posted == 1 && w.units > 1 && w.units <= limit {
		udma.RingBlueFlame(rec, recVal, dst, w.ctrl, q.sq, q.sqEnd, int(w.units+3)/4)
	} else {
		udma.Ring(rec, recVal, dst, *(*uint64)(w.ctrl))
	}
	if reg.shared {
		reg.mu.Unlock()
	}
	return posted, err
}

// plain builds the WQEs of the leading requests that are a SEND, WRITE or READ of one scatter/gather entry with data, and returns
// how many. It calls next to nothing, so that what it works with stays in registers. What it does not know it leaves to build.
func (q *QP) plain(w *chain, wrs []verbs.SendWorkRequest) int {
	if w.fence != 0 || q.cap.MaxSendSGE == 0 {
		return 0
	}
	pi, head := w.pi, w.head
	c, ds := w.ctrl, w.units
	i := 0
	for ; i < len(wrs); i++ {
		wr := &wrs[i]
		op := &sendOps[wr.Opcode&(maxOps-1)]
		if len(wr.SGList) != 1 || op.kind < kindSend || wr.Opcode >= maxOps || head-w.head == w.free {
			break
		}
		sge := &wr.SGList[0]
		length := sge.Length
		if length == 0 {
			break
		}
		idx := pi & q.sqMask
		wqe := unsafe.Add(q.sq, uintptr(idx)*blockSize)
		seg := unsafe.Add(wqe, segSize)
		n := uint32(1)
		if op.kind == kindRDMA {
			seg = unsafe.Add(seg, segSize)
			n = 2
		}
		if wr.Flags&verbs.SendInline == 0 {
			ring.Put64(seg, 0, uint64(length)<<32|uint64(sge.LKey)) // a control and an address segment do not reach the ring's end
			ring.Put64(seg, 8, sge.Addr)
			n++
		} else {
			if wr.Opcode == verbs.OpRDMARead || length > q.inline || uintptr(q.sqEnd)-uintptr(seg) < uintptr(length)+inlineHeader {
				break
			}
			w.inline = true
			*(*uint32)(seg) = bits.ReverseBytes32(0x80000000 | length)
			udma.CopyInline(unsafe.Add(seg, inlineHeader), udma.Pointer(sge.Addr), int(length))
			n += (inlineHeader + length + segSize - 1) / segSize
		}
		if op.kind == kindRDMA {
			ring.Put64(wqe, segSize, wr.RemoteAddr)
			ring.Put64(wqe, segSize+8, uint64(wr.RKey)<<32)
		}
		c, ds = wqe, n
		ring.Put64(c, 8, uint64(ctrlFlags[wr.Flags&7]|q.signal)<<32|uint64(wr.ImmData&op.imm))
		ring.Put64(c, 0, uint64(pi&0xffff)<<40|uint64(op.code)<<32|uint64(q.qpn)<<8|uint64(ds))
		head++
		s := (*slot)(unsafe.Add(q.slots, uintptr(idx)*slotSize))
		s.wrid, s.head, s.op = wr.WRID, head, 0
		pi += (ds + 3) / 4
	}
	w.free -= head - w.head
	w.pi, w.head, w.ctrl, w.units = pi, head, c, ds
	return i
}

// build makes the WQE of one request of any kind.
func (q *QP) build(w *chain, wr *verbs.SendWorkRequest) error {
	op := &sendOps[wr.Opcode&(maxOps-1)]
	if op.kind == kindNone || wr.Opcode >= maxOps {
		return refusals.Opcode
	}
	if w.free == 0 {
		return verbs.ErrQueueFull
	}
	if len(wr.SGList) > q.cap.MaxSendSGE {
		return refusals.SendSGE
	}
	total, err := refusals.Check(wr, q.cap.MaxInlineData)
	if err != nil {
		return err
	}
	sges := wr.SGList
	inl := wr.Flags&verbs.SendInline != 0
	sq, end := q.sq, q.sqEnd
	idx := w.pi & q.sqMask
	c := unsafe.Add(sq, uintptr(idx)*blockSize)
	seg := unsafe.Add(c, segSize)
	ds := uint32(1)
	flags := ctrlFlags[wr.Flags&7] | q.signal
	if flags&ctrlFence == 0 {
		flags |= w.fence
	}
	w.fence = 0
	imm := wr.ImmData & op.imm
	wcop := uint32(0)
	switch op.kind {
	case kindRDMA:
		ring.Put64(seg, 0, wr.RemoteAddr)
		ring.Put64(seg, 8, uint64(wr.RKey)<<32)
		seg = unsafe.Add(seg, segSize)
		ds = 2
	case kindRare:
		seg, ds, imm, wcop = q.rare(wr, seg, imm)
		if wcop != 0 {
			w.fence = ctrlSmallFence
		}
		sges, inl = nil, false
	}
	if inl && len(sges) > 0 {
		w.inline = true
		ds += putInline(sq, end, seg, sges, total)
	} else {
		ds += putSGEs(sq, end, seg, sges)
	}
	ring.Put64(c, 8, uint64(flags)<<32|uint64(imm))
	ring.Put64(c, 0, uint64(w.pi&0xffff)<<40|uint64(op.code)<<32|uint64(q.qpn)<<8|uint64(ds))
	w.head++
	s := (*slot)(unsafe.Add(q.slots, uintptr(idx)*slotSize))
	s.wrid, s.head, s.op = wr.WRID, w.head, wcop
	w.pi += (ds + 3) / 4
	w.free--
	w.ctrl, w.units = c, ds
	return nil
}

// UMR control segment and memory key context (mlx5dv.h, MLX5_WQE_UMR_CTRL_*, MLX5_WQE_MKEY_CONTEXT_*).
const (
	umrInline      = 1 << 7
	umrCheckFree   = 1 << 5
	umrOffset      = 1 << 4
	umrCheckQPN    = 1 << 3
	maskKey        = 1<<29 | 1<<14 | 1<<13                       // free state, QPN, key
	maskWindow     = 1<<0 | 1<<6 | 1<<18 | 1<<19 | 1<<20 | 1<<21 // length, address, access rights
	keyFree        = 1 << 6
	keyLocalWrite  = 1 << 3
	keyRemoteRead  = 1 << 4
	keyRemoteWrite = 1 << 5
	keyAtomic      = 1 << 6
	klmOctowords   = 4 // of one translation entry, rounded up to eight halves
)

// freeKey writes the UMR control segment and the memory key context that put a
// key in the free state: LOCAL_INV. It returns where the WQE goes on.
func (q *QP) freeKey(seg unsafe.Pointer) unsafe.Pointer {
	ring.Put64(seg, 0, (umrInline|umrOffset|umrCheckQPN)<<56)
	ring.Put64(seg, 8, maskKey)
	clear48(seg)
	seg = q.wrap(unsafe.Add(seg, 48))
	ring.Put64(seg, 0, keyFree<<56|0xffffff00)
	for i := 8; i < 64; i += 8 {
		ring.Put64(seg, i, 0)
	}
	return q.wrap(unsafe.Add(seg, 64))
}

// bind writes the UMR segments that open a type 2 window. It returns where the WQE goes on.
func (q *QP) bind(seg unsafe.Pointer, b *verbs.BindMW) unsafe.Pointer {
	ring.Put64(seg, 0, (umrInline|umrOffset|umrCheckFree)<<56|klmOctowords<<16)
	ring.Put64(seg, 8, maskKey|maskWindow)
	clear48(seg)
	seg = q.wrap(unsafe.Add(seg, 48))
	rights := uint64(0) // local read is the kernel's
	if b.Access&verbs.AccessLocalWrite != 0 {
		rights |= keyLocalWrite
	}
	if b.Access&verbs.AccessRemoteWrite != 0 {
		rights |= keyRemoteWrite
	}
	if b.Access&verbs.AccessRemoteRead != 0 {
		rights |= keyRemoteRead
	}
	if b.Access&verbs.AccessRemoteAtomic != 0 {
		rights |= keyAtomic
	}
	ring.Put64(seg, 0, rights<<40|uint64(q.qpn)<<8|uint64(b.RKey&0xff))
	ring.Put64(seg, 8, 0)
	ring.Put64(seg, 16, b.Addr)
	ring.Put64(seg, 24, b.Length)
	for i := 32; i < 64; i += 8 {
		ring.Put64(seg, i, 0)
	}
	seg = q.wrap(unsafe.Add(seg, 64))
	ring.Put64(seg, 0, b.Length<<32|uint64(b.Region.LKey()))
	ring.Put64(seg, 8, b.Addr)
	for i := 16; i < 64; i += 8 {
		ring.Put64(seg, i, 0)
	}
	return q.wrap(unsafe.Add(seg, 64))
}

func clear48(seg unsafe.Pointer) {
	for i := 16; i < 48; i += 8 {
		ring.Put64(seg, i, 0)
	}
}

func (q *QP) wrap(seg unsafe.Pointer) unsafe.Pointer {
	if seg == q.sqEnd {
		return q.sq
	}
	return seg
}

// rare writes the segments of an atomic operation or a change of a memory key. It returns where the WQE goes on, its
// 16-byte units so far, the control segment's key, and of a key change what its completion is called.
func (q *QP) rare(wr *verbs.SendWorkRequest, seg unsafe.Pointer, imm uint32) (unsafe.Pointer, uint32, uint32, uint32) {
	switch wr.Opcode {
	case verbs.OpLocalInv:
		return q.freeKey(seg), 8, imm, uint32(verbs.WCLocalInv)
	case verbs.OpBindMW:
		imm = wr.Bind.Window.RKey()
		seg = q.bind(seg, wr.Bind)
		if w, ok := wr.Bind.Window.(provider.Window); ok {
			w.Bound(wr.Bind.RKey)
		}
		return seg, 12, imm, uint32(verbs.WCBindMW)
	}
	ring.Put64(seg, 0, wr.RemoteAddr)
	ring.Put64(seg, 8, uint64(wr.RKey)<<32)
	if wr.Opcode == verbs.OpCompareSwap {
		ring.Put64(seg, 16, wr.Atomic.Swap)
		ring.Put64(seg, 24, wr.Atomic.CompareAdd)
	} else {
		ring.Put64(seg, 16, wr.Atomic.CompareAdd)
		ring.Put64(seg, 24, 0)
	}
	seg = unsafe.Add(seg, 2*segSize)
	ds := uint32(3)
	for i := range wr.SGList {
		if wr.SGList[i].Length == 0 {
			continue
		}
		seg = q.wrap(seg)
		ring.Put64(seg, 0, 8<<32|uint64(wr.SGList[i].LKey)) // the operand's size, whatever the entry says
		ring.Put64(seg, 8, wr.SGList[i].Addr)
		seg = unsafe.Add(seg, segSize)
		ds++
	}
	return seg, ds, imm, 0
}

// putSGEs writes data segments, over the ring's end if need be, and returns how many. Empty entries are left
// out: the adapter would take 0 for 2 GiB.
func putSGEs(sq, end, seg unsafe.Pointer, sges []verbs.SGE) (n uint32) {
	for i := range sges {
		sge := &sges[i]
		if sge.Length == 0 {
			continue
		}
		if seg == end {
			seg = sq
		}
		ring.Put64(seg, 0, uint64(sge.Length)<<32|uint64(sge.LKey))
		ring.Put64(seg, 8, sge.Addr)
		seg = unsafe.Add(seg, segSize)
		n++
	}
	return n
}

// putInline copies the total bytes of sges behind one header, over the ring's end if need be,
// and returns how many 16-byte units they take.
func putInline(sq, end, seg unsafe.Pointer, sges []verbs.SGE, total int) uint32 {
	if total == 0 {
		return 0
	}
	if seg == end {
		seg = sq
	}
	*(*uint32)(seg) = bits.ReverseBytes32(0x80000000 | uint32(total))
	dst := unsafe.Add(seg, inlineHeader)
	units := uint32(inlineHeader+total+segSize-1) / segSize
	if uintptr(end)-uintptr(dst) >= uintptr(total) {
		for i := range sges {
			n := int(sges[i].Length)
			udma.CopyInline(dst, udma.Pointer(sges[i].Addr), n)
			dst = unsafe.Add(dst, n)
		}
		return units
	}
	for i := range sges {
		n := int(sges[i].Length)
		src := udma.Pointer(sges[i].Addr)
		if room := int(uintptr(end) - uintptr(dst)); n >= room {
			udma.CopyInline(dst, src, room)
			src = unsafe.Add(src, room)
			n -= room
			dst = sq
		}
		udma.CopyInline(dst, src, n)
		dst = unsafe.Add(dst, n)
	}
	return units
}

// moved follows a change of the queue pair's state that the kernel has made.
func (q *QP) moved(to verbs.QPState) {
	if to == verbs.QPReset {
		q.purge()
		q.reset()
	}
	q.state.Store(uint32(to))
}

// purge takes the queue pair's entries out of its completion queues.
func (q *QP) purge() {
	q.recv.Purge(q.rsn)
	if q.send != q.recv {
		q.send.Purge(q.rsn)
	}
}

// PostRecv writes one receive entry per request and publishes them in the doorbell record.
func (q *QP) PostRecv(wrs []verbs.RecvWorkRequest) (posted int, err error) {
	if verbs.QPState(q.state.Load()) == verbs.QPReset {
		return 0, errRecvState
	}
	return q.recvs.Post(wrs)
}
