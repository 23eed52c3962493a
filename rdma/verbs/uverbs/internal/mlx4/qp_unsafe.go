package mlx4

// A send work request travels so:
//
//	PostSend  writes one fixed-size WQE per request. The adapter may fetch a WQE as soon as its first word carries the
//	          owner bit of the ring's lap, and it prefetches whole 64-byte lines before: so the first word is stored last, a data
//	          segment's length after its address, and lines of entries soon to be reused are stamped invalid.
//	          One doorbell per call, or one BlueFlame copy.
//	adapter   executes and writes a CQE that names the WQE's index.
//	CQ.Poll   takes the WRID back by that index and retires every request up to it.
//
// The ring, the record and the WRIDs are mapped memory outside Go's heap. PostSend's
// goroutine owns head; the poller of the send queue's CQ owns sent, which sentPub carries back to the posting side.
// Receives are package ring's.

import (
	"math"
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

// Send opcodes of the adapter (mlx4dv.h, MLX4_OPCODE_*).
const (
	opSendInval    = 0x01
	opRDMAWrite    = 0x08
	opRDMAWriteImm = 0x09
	opSend         = 0x0a
	opSendImm      = 0x0b
	opRDMARead     = 0x10
	opAtomicCS     = 0x11
	opAtomicFA     = 0x12
	opBindMW       = 0x18
	opLocalInval   = 0x1b
)

// Flags of the control segment's third word (mlx4dv.h, MLX4_WQE_CTRL_*).
const (
	ctrlSolicited = 0x2
	ctrlCQUpdate  = 0xc
	ctrlStrong    = 0x80
)

const (
	ctrlOwner = 1 << 31
	ctrlFence = 0x40 // in the size byte
	stamped   = 0xffffffff
	noData    = 0x80000000 // in a data segment: a length of 0

	sendDoorbell = 0x14 // MLX4_SEND_DOORBELL, offset in the UAR page
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
	verbs.OpLocalInv:     {opLocalInval, kindRare, 0},
	verbs.OpBindMW:       {opBindMW, kindRare, 0},
	verbs.OpSendWithInv:  {opSendInval, kindSend, ^uint32(0)},
}

const (
	kindNone = iota // no operation
	kindRare        // atomics and memory keys
	kindSend        // data segments only
	kindRDMA        // remote address, data
)

// ctrlFlags translates verbs.SendSignaled and SendSolicited.
var ctrlFlags = [...]uint32{0, ctrlCQUpdate, ctrlSolicited, ctrlSolicited | ctrlCQUpdate}

const family = ring.Family("mlx4")

// refusals: a bind's length may be any.
var refusals = family.Refusals(math.MaxUint64, "a length", unix.ENOMEM)

// blueFlame is the context's one BlueFlame register, in two halves that are used in turn.
type blueFlame struct {
	mu    sync.Mutex
	base  unsafe.Pointer
	half  uintptr
	off   uintptr
	units uint32 // 16-byte units that a half takes; 0: the device has none
}

func newBlueFlame(base unsafe.Pointer, half int) *blueFlame {
	return &blueFlame{base: base, half: uintptr(half), units: uint32(half / segSize)}
}

// QP is the adapter side of an RC queue pair.
type QP struct {
	qpn  uint32
	cap  verbs.QPCap
	lay  Layout
	send *CQ
	recv *CQ

	// Send side, PostSend's.
	sq       unsafe.Pointer
	wrid     unsafe.Pointer
	doorbell unsafe.Pointer
	rec      unsafe.Pointer // one word: receive head
	bf       *blueFlame
	sqShift  uint32
	sqMask   uint32
	spare    uint32
	head     uint32
	signal   uint32
	inline   uint32 // bytes of inline data that a request may have
	sentPub  atomic.Uint32

	recvs ring.Receives

	sent uint32 // the poller's
}

func (q *QP) QPN() uint32      { return q.qpn }
func (q *QP) Cap() verbs.QPCap { return q.cap }

// notesBytes is the mapped memory that a queue pair's WRIDs need.
func notesBytes(l *Layout) int { return (l.SendCount + l.RecvCount) * 8 }

// init points the queue pair at its memory: buf holds the rings as l says, notes is notesBytes long, uar the doorbell page.
func (q *QP) init(l Layout, buf, notes, rec, uar unsafe.Pointer, bf *blueFlame, signalAll bool) {
	q.lay, q.cap = l, l.Cap
	q.sq = unsafe.Add(buf, l.SendOffset)
	q.sqShift = uint32(l.SendShift)
	q.sqMask = uint32(l.SendCount) - 1
	q.spare = uint32(l.SendSpare)
	q.inline = uint32(l.Cap.MaxInlineData)
	q.wrid = notes
	q.rec = rec
	q.recvs.Init(unsafe.Add(buf, l.RecvOffset), unsafe.Add(notes, l.SendCount*8), rec,
		ring.ReceiveShape{Count: l.RecvCount, Shift: l.RecvShift, Cap: l.Cap, TooMany: refusals.RecvSGE})
	q.doorbell = unsafe.Add(uar, sendDoorbell)
	q.bf = bf
	if signalAll {
		q.signal = ctrlCQUpdate
	}
}

func (q *QP) entry(i uint32) unsafe.Pointer {
	return unsafe.Add(q.sq, uintptr(i&q.sqMask)<<q.sqShift)
}

// beforeInit gives every send entry to software and stamps it, as the adapter expects when the
// queue pair leaves RESET. It runs before the command.
func (q *QP) beforeInit() {
	for i := range q.sqMask + 1 {
		e := q.entry(i)
		*(*uint32)(e) = bits.ReverseBytes32(ctrlOwner)
		*(*uint8)(unsafe.Add(e, 7)) = 1 << (q.sqShift - 4)
		q.stamp(i)
	}
}

// stamp marks the lines of entry i after the first as unused, as far as its last WQE reached.
func (q *QP) stamp(i uint32) {
	e := q.entry(i)
	n := uintptr(*(*uint8)(unsafe.Add(e, 7))&0x3f) * segSize
	for o := uintptr(lineSize); o < n; o += lineSize {
		*(*uint32)(unsafe.Add(e, o)) = stamped
	}
}

// afterReset puts the software side in the state of a new queue pair.
func (q *QP) afterReset() {
	q.purge()
	q.head, q.sent = 0, 0
	q.sentPub.Store(0)
	q.recvs.Reset()
	*(*uint32)(q.rec) = 0
}

// purge takes the queue pair's entries out of its completion queues.
func (q *QP) purge() {
	q.recv.Purge(q.qpn)
	if q.send != q.recv {
		q.send.Purge(q.qpn)
	}
}

// chain is what a call of PostSend knows of the requests it has built.
type chain struct {
	head uint32
	free uint32
	ctrl unsafe.Pointer // of the last WQE
	ds   uint32         // its 16-byte units
	copy bool           // it is of a kind that BlueFlame pays for
}

// PostSend builds one WQE per request and rings once.
func (q *QP) PostSend(wrs []verbs.SendWorkRequest) (posted int, err error) {
	w := chain{head: q.head, free: uint32(q.cap.MaxSendWR) - (q.head - q.sentPub.Load())}
	for {
		posted += q.plain(&w, wrs[posted:])
		if posted == len(wrs) {
			break
		}
		if err = q.build(&w, &wrs[posted]); err != nil {
			break
		}
		if posted++; posted < len(wrs) {
			q.stamp(w.head - 1 + q.spare)
		}
	}
	if posted == 0 {
		return 0, err
	}
	if posted == 1 && w.copy && w.ds <= q.bf.units {
		*(*uint32)(w.ctrl) |= bits.ReverseBytes32(q.head & 0xffff << 8)
		*(*uint32)(unsafe.Add(w.ctrl, 4)) |= bits.ReverseBytes32(q.qpn << 8)
		q.head = w.head
		bf := q.bf
		bf.mu.Lock()
		udma.Published()
		udma.CopyToRegister(unsafe.Add(bf.base, bf.off), w.ctrl, int(w.ds+3)/4)
		bf.off ^= bf.half
		bf.mu.Unlock()
	} else {
		q.head = w.head
		udma.Published()
		udma.Store32(q.doorbell, bits.ReverseBytes32(q.qpn<<8))
	}
	q.stamp(w.head - 1 + q.spare)
	return posted, err
}

// plain builds the WQEs of the leading requests that are a SEND, WRITE or READ of one scatter/gather entry, and returns how many.
// It calls next to nothing, so that what it works with stays in registers. What it does not know it leaves to build.
func (q *QP) plain(w *chain, wrs []verbs.SendWorkRequest) int {
	head := w.head
	c, n, bf := w.ctrl, w.ds, w.copy
	i := 0
	for ; i < len(wrs); i++ {
		wr := &wrs[i]
		op := &sendOps[wr.Opcode&(maxOps-1)]
		if len(wr.SGList) != 1 || op.kind < kindSend || wr.Opcode >= maxOps || head-w.head == w.free {
			break
		}
		sge := &wr.SGList[0]
		length := sge.Length
		if wr.Flags&verbs.SendInline != 0 && (wr.Opcode == verbs.OpRDMARead || length > q.inline) {
			break
		}
		idx := head & q.sqMask
		c = unsafe.Add(q.sq, uintptr(idx)<<(q.sqShift&31))
		*(*uint64)(unsafe.Add(q.wrid, uintptr(idx)*8)) = wr.WRID
		ring.Put64(c, 8, uint64(ctrlFlags[wr.Flags>>1&3]|q.signal)<<32|uint64(wr.ImmData&op.imm))
		seg := unsafe.Add(c, segSize)
		n = 1
		bf = false
		if op.kind == kindRDMA {
			ring.Put64(seg, 0, wr.RemoteAddr)
			ring.Put64(seg, 8, uint64(wr.RKey)<<32)
			seg = unsafe.Add(seg, segSize)
			n = 2
			bf = wr.Opcode == verbs.OpRDMARead
		}
		if wr.Flags&verbs.SendInline == 0 {
			ring.Put32(seg, 4, sge.LKey)
			ring.Put64(seg, 8, sge.Addr)
			if length == 0 {
				length = noData
			}
			udma.StoreOrdered(seg, bits.ReverseBytes32(length))
			n++
		} else if length > 0 {
			bf = true
			n += inlineOne(seg, udma.Pointer(sge.Addr), int(length))
		}
		size := n
		if wr.Flags&verbs.SendFence != 0 {
			size |= ctrlFence
		}
		ring.Put32(c, 4, size)
		owner := uint32(op.code)
		if head&(q.sqMask+1) != 0 {
			owner |= ctrlOwner
		}
		udma.StoreOrdered(c, bits.ReverseBytes32(owner))
		if i+1 < len(wrs) {
			q.stamp(head + q.spare)
		}
		head++
	}
	w.free -= head - w.head
	w.head, w.ctrl, w.ds, w.copy = head, c, n, bf
	return i
}

// build makes the WQE of one request of any kind.
func (q *QP) build(w *chain, wr *verbs.SendWorkRequest) error {
	if w.free == 0 {
		return verbs.ErrQueueFull
	}
	sges := wr.SGList
	if len(sges) > q.cap.MaxSendSGE {
		return refusals.SendSGE
	}
	op := &sendOps[wr.Opcode&(maxOps-1)]
	if op.kind == kindNone || wr.Opcode >= maxOps {
		return refusals.Opcode
	}
	inl := wr.Flags&verbs.SendInline != 0
	total, err := refusals.Check(wr, q.cap.MaxInlineData)
	if err != nil {
		return err
	}
	c := q.entry(w.head)
	*(*uint64)(unsafe.Add(q.wrid, uintptr(w.head&q.sqMask)*8)) = wr.WRID
	flags := ctrlFlags[wr.Flags>>1&3] | q.signal
	imm := wr.ImmData & op.imm
	seg := unsafe.Add(c, segSize)
	n := uint32(1)
	bf := false
	switch op.kind {
	case kindRDMA:
		ring.Put64(seg, 0, wr.RemoteAddr)
		ring.Put64(seg, 8, uint64(wr.RKey)<<32)
		seg = unsafe.Add(seg, segSize)
		n = 2
		bf = wr.Opcode == verbs.OpRDMARead || len(sges) == 0
	case kindRare:
		var strong uint32
		seg, strong = rare(wr, seg)
		flags |= strong
		n = 3
		if wr.Opcode == verbs.OpBindMW {
			sges, inl = nil, false
		}
	}
	ring.Put64(c, 8, uint64(flags)<<32|uint64(imm))
	if inl && len(sges) > 0 {
		n += putInline(seg, sges)
		bf = total > 0
	} else {
		for i := len(sges) - 1; i >= 0; i-- {
			d := unsafe.Add(seg, i*segSize)
			ring.Put32(d, 4, sges[i].LKey)
			ring.Put64(d, 8, sges[i].Addr)
			length := sges[i].Length
			if length == 0 {
				length = noData
			}
			udma.StoreOrdered(d, bits.ReverseBytes32(length))
		}
		n += uint32(len(sges))
	}
	size := n
	if wr.Flags&verbs.SendFence != 0 {
		size |= ctrlFence
	}
	ring.Put32(c, 4, size)
	owner := uint32(op.code)
	if w.head&(q.sqMask+1) != 0 {
		owner |= ctrlOwner
	}
	udma.StoreOrdered(c, bits.ReverseBytes32(owner))
	w.head++
	w.free--
	w.ctrl, w.ds, w.copy = c, n, bf
	return nil
}

// Bind segment (mlx4dv.h, MLX4_WQE_MW_*, MLX4_WQE_BIND_*).
const (
	bindType2       = 1 << 31
	bindRemoteRead  = 1 << 29
	bindRemoteWrite = 1 << 30
	bindAtomic      = 1 << 31
)

func bindRights(a verbs.AccessFlags) (r uint64) {
	if a&verbs.AccessRemoteRead != 0 {
		r |= bindRemoteRead
	}
	if a&verbs.AccessRemoteWrite != 0 {
		r |= bindRemoteWrite
	}
	if a&verbs.AccessRemoteAtomic != 0 {
		r |= bindAtomic
	}
	return r
}

// rare writes the 32 bytes after the control segment of an atomic operation or a change of a memory
// key. It returns where the WQE goes on, and control flags.
func rare(wr *verbs.SendWorkRequest, seg unsafe.Pointer) (unsafe.Pointer, uint32) {
	flags := uint32(0)
	switch wr.Opcode {
	case verbs.OpLocalInv:
		flags = ctrlStrong
		ring.Put64(seg, 0, 0)
		ring.Put64(seg, 8, uint64(wr.ImmData)<<32)
		ring.Put64(seg, 16, 0)
		ring.Put64(seg, 24, 0)
	case verbs.OpBindMW:
		b := wr.Bind
		flags = ctrlStrong
		ring.Put64(seg, 0, bindRights(b.Access)<<32|bindType2)
		ring.Put64(seg, 8, uint64(b.RKey)<<32|uint64(b.Region.LKey()))
		ring.Put64(seg, 16, b.Addr)
		ring.Put64(seg, 24, b.Length)
		if w, ok := b.Window.(provider.Window); ok {
			w.Bound(b.RKey)
		}
	default:
		ring.Put64(seg, 0, wr.RemoteAddr)
		ring.Put64(seg, 8, uint64(wr.RKey)<<32)
		if wr.Opcode == verbs.OpCompareSwap {
			ring.Put64(seg, 16, wr.Atomic.Swap)
			ring.Put64(seg, 24, wr.Atomic.CompareAdd)
		} else {
			ring.Put64(seg, 16, wr.Atomic.CompareAdd)
			ring.Put64(seg, 24, 0)
		}
	}
	return unsafe.Add(seg, 2*segSize), flags
}

// inlineOne copies n bytes in pieces that end at 64-byte lines, each behind its own header, which is stored after
// the piece, and returns how many 16-byte units they take. A piece that would be empty gets no header. At seg, the line has
// at least 32 bytes left.
func inlineOne(seg, src unsafe.Pointer, n int) uint32 {
	header, dst := seg, unsafe.Add(seg, 4)
	room := lineSize - int(uintptr(dst)&(lineSize-1))
	bytes := n
	for n >= room {
		udma.Copy16(dst, src, room)
		udma.StoreOrdered(header, bits.ReverseBytes32(0x80000000|uint32(room)))
		src, header, dst = unsafe.Add(src, room), unsafe.Add(dst, room), unsafe.Add(dst, room+4)
		bytes += 4
		n -= room
		room = lineSize - 4
	}
	if n > 0 {
		udma.CopyInline(dst, src, n)
		udma.StoreOrdered(header, bits.ReverseBytes32(0x80000000|uint32(n)))
		bytes += 4
	}
	return uint32(bytes+segSize-1) / segSize
}

// putInline does the same with the bytes of several entries.
func putInline(seg unsafe.Pointer, sges []verbs.SGE) uint32 {
	header := seg
	dst := unsafe.Add(seg, 4)
	room := lineSize - int(uintptr(dst)&(lineSize-1))
	piece, bytes := 0, 0
	for i := range sges {
		src, n := udma.Pointer(sges[i].Addr), int(sges[i].Length)
		for n >= room {
			udma.CopyInline(dst, src, room)
			src, n = unsafe.Add(src, room), n-room
			dst = unsafe.Add(dst, room)
			piece += room
			bytes += piece + 4
			udma.StoreOrdered(header, bits.ReverseBytes32(0x80000000|uint32(piece)))
			header, dst = dst, unsafe.Add(dst, 4)
			room, piece = lineSize-4, 0
		}
		udma.CopyInline(dst, src, n)
		dst = unsafe.Add(dst, n)
		room -= n
		piece += n
	}
	if piece > 0 {
		bytes += piece + 4
		udma.StoreOrdered(header, bits.ReverseBytes32(0x80000000|uint32(piece)))
	}
	return uint32(bytes+segSize-1) / segSize
}

// PostRecv writes one receive entry per request and publishes them in the doorbell record.
func (q *QP) PostRecv(wrs []verbs.RecvWorkRequest) (posted int, err error) { return q.recvs.Post(wrs) }
