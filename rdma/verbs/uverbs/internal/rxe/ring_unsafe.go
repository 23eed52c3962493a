package rxe

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/abi"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
	"srp-initiator/rdma/verbs/uverbs/internal/udma"
)

// kernelWCWithInvalidate is IB_WC_WITH_INVALIDATE of include/rdma/ib_verbs.h.
const kernelWCWithInvalidate = 1 << 2

const ringHeader = unsafe.Sizeof(abi.RXEQueueBuf{})

// ring is a mapped queue. Size and stride are copied at map time, so that whatever happens to the shared page
// afterwards no access leaves the mapping.
type ring struct {
	mem  []byte
	head *abi.RXEQueueBuf
	data unsafe.Pointer
	mask uint32
	log2 uint32
}

// mapRing maps the ring that the kernel announced. Each can be mapped once only (rxe_mmap.c).
// minSlot is the least entry size the caller relies on.
func mapRing(k kernel.Calls, mi abi.RXEMMInfo, minSlot int) (ring, error) {
	if uintptr(mi.Size) < ringHeader {
		return ring{}, fmt.Errorf("rxe: the kernel announced a ring of %d bytes, its header has %d", mi.Size, ringHeader)
	}
	mem, err := k.Mmap(int64(mi.Offset), int(mi.Size), unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return ring{}, fmt.Errorf("rxe: map a ring of %d bytes: %w", mi.Size, err)
	}
	r := ring{mem: mem, head: (*abi.RXEQueueBuf)(unsafe.Pointer(unsafe.SliceData(mem)))}
	r.mask, r.log2 = r.head.IndexMask, r.head.Log2ElemSize
	if r.mask&(r.mask+1) != 0 || r.log2 > 20 || 1<<r.log2 < minSlot ||
		(uint64(r.mask)+1)<<r.log2 > uint64(len(mem))-uint64(ringHeader) {
		k.Munmap(mem)
		return ring{}, fmt.Errorf("rxe: ring of %d bytes claims mask %#x and entries of 2^%d bytes", len(mem), r.mask, r.log2)
	}
	r.data = unsafe.Pointer(&mem[ringHeader])
	return r, nil
}

func (r *ring) slot(i uint32) unsafe.Pointer {
	return unsafe.Add(r.data, uintptr(i&r.mask)<<r.log2)
}

func (r *ring) producer() uint32     { return atomic.LoadUint32(&r.head.ProducerIndex) & r.mask }
func (r *ring) consumer() uint32     { return atomic.LoadUint32(&r.head.ConsumerIndex) & r.mask }
func (r *ring) setProducer(i uint32) { atomic.StoreUint32(&r.head.ProducerIndex, i) }
func (r *ring) setConsumer(i uint32) { atomic.StoreUint32(&r.head.ConsumerIndex, i) }

// full tells whether slot i, the next to be produced, is the last one that tells a full ring from an empty one.
func (r *ring) full(i uint32) bool { return (i+1)&r.mask == r.consumer() }

// capacity is how many entries fit.
func (r *ring) capacity() int { return int(r.mask) }

// completion copies entry i to wc.
func (r *ring) completion(i uint32, wc *verbs.WorkCompletion) {
	e := (*abi.WC)(r.slot(i))
	*wc = verbs.WorkCompletion{WRID: e.WRID, Status: verbs.WCStatus(e.Status), QPN: e.QPNum}
	if e.Status != 0 {
		wc.VendorErr = e.VendorErr
		return
	}
	wc.Opcode = verbs.WCOpcode(e.Opcode)
	wc.ByteLen = e.ByteLen
	if wc.Opcode < verbs.WCRecv {
		return
	}
	// The flags are the kernel's own enum ib_wc_flags here, not the uapi's: invalidated is 4, not 8.
	wc.Flags = verbs.WCFlags(e.WCFlags) & (verbs.WCWithGRH | verbs.WCWithImm)
	switch {
	case wc.Flags&verbs.WCWithImm != 0:
		wc.ImmData = swap32(e.Ex)
	case e.WCFlags&kernelWCWithInvalidate != 0:
		wc.Flags |= verbs.WCWithInv
		wc.ImmData = e.Ex
	}
}

const sendWQESize = unsafe.Sizeof(abi.RXESendWQE{}) // SGEs or inline bytes follow
const recvWQESize = unsafe.Sizeof(abi.RXERecvWQE{}) // SGEs follow

// putSend fills send slot i. wr has been checked: its SGEs or inline bytes fit the slot, length is the sum over its SGEs.
// The slot is cleared first: the kernel left its own marks of the last lap there.
func (r *ring) putSend(i uint32, wr *verbs.SendWorkRequest, flags verbs.SendFlags, length, ssn uint32) {
	p := r.slot(i)
	e := (*abi.RXESendWQE)(p)
	*e = abi.RXESendWQE{SSN: ssn}
	e.WR.WRID = wr.WRID
	e.WR.Opcode = uint32(wr.Opcode)
	e.WR.SendFlags = uint32(flags)
	switch wr.Opcode {
	case verbs.OpRDMAWriteImm, verbs.OpSendWithImm:
		e.WR.Ex = swap32(wr.ImmData)
	case verbs.OpSendWithInv, verbs.OpLocalInv:
		e.WR.Ex = wr.ImmData
	}
	switch wr.Opcode {
	case verbs.OpRDMAWrite, verbs.OpRDMAWriteImm, verbs.OpRDMARead:
		*(*abi.RXERDMA)(unsafe.Pointer(&e.WR.WR)) = abi.RXERDMA{RemoteAddr: wr.RemoteAddr, RKey: wr.RKey}
		e.IOVA = wr.RemoteAddr
	case verbs.OpLocalInv:
		return
	case verbs.OpBindMW:
		b := wr.Bind
		*(*abi.RXEMW)(unsafe.Pointer(&e.WR.WR)) = abi.RXEMW{Addr: b.Addr, Length: b.Length, MRLKey: b.Region.LKey(),
			MWRKey: b.Window.RKey(), RKey: b.RKey, Access: uint32(b.Access)}
		return
	}
	e.DMA.Length, e.DMA.Resid = length, length
	payload := unsafe.Add(p, sendWQESize)
	if flags&verbs.SendInline != 0 {
		dst := unsafe.Slice((*byte)(payload), length)
		for j := range wr.SGList {
			s := &wr.SGList[j]
			udma.Gather(dst[:s.Length], s.Addr)
			dst = dst[s.Length:]
		}
		return
	}
	e.DMA.NumSGE = uint32(len(wr.SGList))
	putSGEs(payload, wr.SGList)
}

// putRecv fills receive slot i; wr has been checked.
func (r *ring) putRecv(i uint32, wr *verbs.RecvWorkRequest, length uint32) {
	p := r.slot(i)
	*(*abi.RXERecvWQE)(p) = abi.RXERecvWQE{WRID: wr.WRID,
		DMA: abi.RXEDMAInfo{Length: length, Resid: length, NumSGE: uint32(len(wr.SGList))}}
	putSGEs(unsafe.Add(p, recvWQESize), wr.SGList)
}

func putSGEs(p unsafe.Pointer, list []verbs.SGE) {
	dst := unsafe.Slice((*abi.RXESGE)(p), len(list))
	for i := range list {
		s := &list[i]
		dst[i] = abi.RXESGE{Addr: s.Addr, Length: s.Length, LKey: s.LKey}
	}
}
