package mlxtest

import (
	"encoding/binary"
	"time"

	"srp-initiator/rdma/verbs"
)

// run executes what q has to do and reports whether there was any.
func (q *qp) run(now time.Time) (busy bool) {
	switch q.state {
	case verbs.QPReadyToSend, verbs.QPSendQueueDrained:
	case verbs.QPError:
		return q.flush()
	default:
		return false
	}
	for range 64 {
		if q.waiting && now.Before(q.until) && !q.receiveArrived() {
			return busy
		}
		r, more := q.dev.fam.nextSend(q)
		if !more {
			return busy
		}
		if !q.execute(&r, now) {
			return busy
		}
		busy = true
		if q.state == verbs.QPError {
			q.flush()
			return true
		}
		q.waiting, q.tries = false, 0
	}
	return busy
}

// receiveArrived reports whether the peer of a request that waits for a receive has one now.
func (q *qp) receiveArrived() bool {
	p := q.peer()
	return p != nil && p.fits() && p.dev.fam.recvHead(p) != p.rqCI&0xffff
}

// fits reports whether q answers requests.
func (q *qp) fits() bool {
	return q.state == verbs.QPReadyToReceive || q.state == verbs.QPReadyToSend || q.state == verbs.QPSendQueueDrained
}

// peer is the queue pair at the other end, when it knows this one.
func (q *qp) peer() *qp {
	d := q.dev.net.peer(&q.av)
	if d == nil {
		return nil
	}
	p := d.byNum[q.destQPN]
	if p == nil || p.destQPN != q.num || p.dev.net.peer(&p.av) != q.dev {
		return nil
	}
	return p
}

// retire takes the request off the ring, with a completion when it asks for one or failed.
func (q *qp) retire(r *request, status verbs.WCStatus, n uint32, data []byte) {
	q.sqCI += r.units
	if status == verbs.WCSuccess && !r.signaled && !q.sigAll {
		return
	}
	e := &q.dev.entry
	*e = entry{QPN: q.num, RSN: q.rsn, Send: true, Status: status, Vendor: vendorOf(status), Op: r.op, Counter: r.counter, ByteLen: n, Data: data}
	q.send.put(e)
}

func vendorOf(s verbs.WCStatus) uint8 {
	if s == verbs.WCSuccess {
		return 0
	}
	return 0x80 | uint8(s)
}

// fail retires the request with an error and moves q to ERR.
func (q *qp) fail(r *request, status verbs.WCStatus) bool {
	q.retire(r, status, 0, nil)
	q.state = verbs.QPError
	return true
}

// refuse fails q's side as responder: the queue pair goes to ERR and says so.
func (q *qp) refuse(typ verbs.AsyncEventType) {
	q.state = verbs.QPError
	q.dev.asyncEvent(q.userID, typ)
	q.asyncOut++
}

// silent waits for a peer that does not answer, as long as the retries take.
func (q *qp) silent(r *request, now time.Time) bool {
	if !q.waiting {
		if q.timeout == 0 {
			q.waiting, q.until = true, now.Add(time.Hour)
			return false
		}
		wait := 4096 * time.Nanosecond << q.timeout * time.Duration(q.retry+1)
		q.waiting, q.until = true, now.Add(min(wait, 100*time.Millisecond))
		return false
	}
	if now.Before(q.until) {
		return false
	}
	return q.fail(r, verbs.WCRetryExceeded)
}

// rnrDelay is a code of IBA vol. 1, table 45, cut short at the long end.
func rnrDelay(code uint8) time.Duration {
	ms100 := [...]int{65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152}
	return min(time.Duration(ms100[code&31])*10*time.Microsecond, 20*time.Millisecond)
}

// execute carries request r out; false: it must wait.
func (q *qp) execute(r *request, now time.Time) bool {
	total := uint32(len(r.inline))
	need := verbs.AccessFlags(0)
	if r.op == verbs.OpRDMARead || r.op == verbs.OpCompareSwap || r.op == verbs.OpFetchAdd {
		need = verbs.AccessLocalWrite
	}
	if !r.isInline {
		for _, s := range r.sges {
			if !q.localKey(s, need) {
				return q.fail(r, verbs.WCLocalProtectionError)
			}
			total += s.Length
		}
	}
	switch r.op {
	case verbs.OpLocalInv:
		w, _ := q.dev.keys[r.imm>>8].(*window)
		if w == nil || w.key != r.imm || w.region == nil || w.qp != q {
			return q.fail(r, verbs.WCLocalQPOperationError)
		}
		w.unbind()
		q.retire(r, verbs.WCSuccess, 0, nil)
		return true
	case verbs.OpBindMW:
		if !q.bindWindow(r.bind) {
			return q.fail(r, verbs.WCMWBindError)
		}
		q.retire(r, verbs.WCSuccess, 0, nil)
		return true
	}
	p := q.peer()
	if p == nil || !p.fits() {
		return q.silent(r, now)
	}
	switch r.op {
	case verbs.OpRDMAWrite, verbs.OpRDMAWriteImm, verbs.OpRDMARead, verbs.OpCompareSwap, verbs.OpFetchAdd:
		n := uint64(total)
		right := verbs.AccessRemoteWrite
		switch r.op {
		case verbs.OpRDMARead:
			right = verbs.AccessRemoteRead
		case verbs.OpCompareSwap, verbs.OpFetchAdd:
			right, n = verbs.AccessRemoteAtomic, 8
		}
		if n > 0 && !p.remoteKey(r.rkey, r.raddr, n, right) {
			p.refuse(verbs.EventQPAccessError)
			return q.fail(r, verbs.WCRemoteAccessError)
		}
		if n == 0 && p.access&right == 0 {
			p.refuse(verbs.EventQPAccessError)
			return q.fail(r, verbs.WCRemoteAccessError)
		}
	}
	needRecv := false
	switch r.op {
	case verbs.OpSend, verbs.OpSendWithImm, verbs.OpSendWithInv, verbs.OpRDMAWriteImm:
		needRecv = true
	}
	if needRecv && p.dev.fam.recvHead(p) == p.rqCI&0xffff {
		return q.notReady(r, p, now)
	}
	src := r.sges
	switch r.op {
	case verbs.OpRDMAWrite, verbs.OpRDMAWriteImm:
		q.gather(r, user(r.raddr, int(total)))
		if r.op == verbs.OpRDMAWriteImm {
			p.received(q, r, total, nil)
		}
	case verbs.OpRDMARead:
		from := user(r.raddr, int(total))
		// A few bytes may travel inside the completion instead.
		if q.scatter && q.sigAll && total > 0 && total <= 32 {
			q.retire(r, verbs.WCSuccess, total, from)
			return true
		}
		for _, s := range src {
			copy(user(s.Addr, int(s.Length)), from)
			from = from[s.Length:]
		}
		q.retire(r, verbs.WCSuccess, total, nil)
		return true
	case verbs.OpCompareSwap, verbs.OpFetchAdd:
		at := user(r.raddr, 8)
		old := binary.NativeEndian.Uint64(at)
		switch {
		case r.op == verbs.OpFetchAdd:
			binary.NativeEndian.PutUint64(at, old+r.swap)
		case old == r.compare:
			binary.NativeEndian.PutUint64(at, r.swap)
		}
		for _, s := range src {
			binary.NativeEndian.PutUint64(user(s.Addr, 8), old)
		}
	default:
		if r.op == verbs.OpSendWithInv {
			w, _ := p.dev.keys[r.imm>>8].(*window)
			if w == nil || w.key != r.imm || w.region == nil || w.qp != p {
				p.refuse(verbs.EventQPAccessError)
				return q.fail(r, verbs.WCRemoteAccessError)
			}
		}
		if st, there := p.take(q, r, total); st != verbs.WCSuccess {
			p.state = verbs.QPError
			p.received(q, r, 0, nil, there)
			return q.fail(r, st)
		}
	}
	n := uint32(0)
	if r.op == verbs.OpCompareSwap || r.op == verbs.OpFetchAdd {
		n = 8
	}
	q.retire(r, verbs.WCSuccess, n, nil)
	return true
}

// notReady answers a request for which there is no receive.
func (q *qp) notReady(r *request, p *qp, now time.Time) bool {
	if q.waiting && now.Before(q.until) {
		return false
	}
	if q.waiting && q.rnrRetry != 7 && q.tries >= q.rnrRetry || q.rnrRetry == 0 {
		return q.fail(r, verbs.WCRNRRetryExceeded)
	}
	if q.waiting {
		q.tries++
	}
	if q.tries == 0 {
		q.tries = 1
	}
	q.waiting, q.until = true, now.Add(rnrDelay(p.rnrTimer))
	return false
}

// gather copies the request's bytes to dst.
func (q *qp) gather(r *request, dst []byte) {
	if r.isInline {
		copy(dst, r.inline)
		return
	}
	for _, s := range r.sges {
		n := copy(dst, user(s.Addr, int(s.Length)))
		dst = dst[n:]
	}
}

// scatter copies the request's bytes to list, which has room for them.
func scatter(r *request, list []verbs.SGE) {
	var dst []byte
	put := func(src []byte) {
		for len(src) > 0 {
			for len(dst) == 0 {
				dst = user(list[0].Addr, int(list[0].Length))
				list = list[1:]
			}
			n := copy(dst, src)
			src, dst = src[n:], dst[n:]
		}
	}
	if r.isInline {
		put(r.inline)
		return
	}
	for _, s := range r.sges {
		put(user(s.Addr, int(s.Length)))
	}
}

// take puts a SEND of total bytes into the next receive. It returns how that ends at the requester, and here.
func (q *qp) take(from *qp, r *request, total uint32) (there, here verbs.WCStatus) {
	sges := q.recvSGEs()
	room := uint32(0)
	for _, s := range sges {
		room += s.Length
	}
	if total > room {
		return verbs.WCRemoteInvalidRequestError, verbs.WCLocalLengthError
	}
	left := total
	for _, s := range sges {
		if left == 0 {
			break
		}
		s.Length = min(s.Length, left)
		if !q.localKey(s, verbs.AccessLocalWrite) {
			return verbs.WCRemoteOperationError, verbs.WCLocalProtectionError
		}
		left -= s.Length
	}
	if r.op == verbs.OpSendWithInv {
		q.dev.keys[r.imm>>8].(*window).unbind()
	}
	limit := uint32(0)
	if q.scatter {
		limit = 32
		if q.recv.size == 128 {
			limit = 64
		}
	}
	if total > 0 && total <= limit {
		data := q.data[:total]
		from.gather(r, data)
		q.received(from, r, total, data)
		return verbs.WCSuccess, verbs.WCSuccess
	}
	scatter(r, sges)
	q.received(from, r, total, nil)
	return verbs.WCSuccess, verbs.WCSuccess
}

// received consumes a receive and completes it.
func (q *qp) received(from *qp, r *request, n uint32, data []byte, failed ...verbs.WCStatus) {
	e := &q.dev.entry
	*e = entry{QPN: q.num, RSN: q.rsn, Op: r.op, Counter: uint16(q.rqCI), ByteLen: n, Imm: r.imm, Solicited: r.solicited, Data: data,
		SrcQP: from.num, SLID: from.dev.lid, GRH: q.av.global, RoCE: !q.dev.cfg.InfiniBand}
	if len(failed) > 0 {
		e.Status, e.Vendor = failed[0], vendorOf(failed[0])
	}
	q.rqCI++
	q.recv.put(e)
}

// recvSGEs decodes the receive entry at rqCI.
func (q *qp) recvSGEs() []verbs.SGE {
	list := q.rsges[:0]
	b := user(q.buf+uint64(q.rqOff)+uint64(q.rqCI&(q.rqCount-1))<<q.rqShift, 1<<q.rqShift)
	for o := 0; o < len(b); o += 16 {
		n, key := binary.BigEndian.Uint32(b[o:]), binary.BigEndian.Uint32(b[o+4:])
		if n == 0 && key == 0x100 {
			break
		}
		list = append(list, verbs.SGE{Addr: binary.BigEndian.Uint64(b[o+8:]), Length: n, LKey: key})
	}
	q.rsges = list
	return list
}

// flush completes everything posted with WCFlushError. It reports whether there was anything.
func (q *qp) flush() (busy bool) {
	q.waiting = false
	for {
		r, more := q.dev.fam.nextSend(q)
		if !more {
			break
		}
		q.retire(&r, verbs.WCFlushError, 0, nil)
		busy = true
	}
	for q.dev.fam.recvHead(q) != q.rqCI&0xffff {
		q.received(q, &request{}, 0, nil, verbs.WCFlushError)
		busy = true
	}
	return busy
}

// localKey checks a scatter/gather entry.
func (q *qp) localKey(s verbs.SGE, need verbs.AccessFlags) bool {
	if s.Length == 0 {
		return true
	}
	m, _ := q.dev.keys[s.LKey>>8].(*region)
	return m != nil && m.key == s.LKey && m.pd == q.pd && m.access&need == need && inside(s.Addr, uint64(s.Length), m.addr, m.len)
}

// remoteKey checks what a peer asks for.
func (q *qp) remoteKey(key uint32, addr, n uint64, need verbs.AccessFlags) bool {
	if q.access&need != need {
		return false
	}
	switch m := q.dev.keys[key>>8].(type) {
	case *region:
		return m.key == key && m.pd == q.pd && m.access&need == need && inside(addr, n, m.addr, m.len)
	case *window:
		return m.key == key && m.region != nil && m.qp == q && m.access&need == need && inside(addr, n, m.addr, m.len)
	}
	return false
}

func inside(addr, n, start, size uint64) bool {
	return addr >= start && n <= size && addr-start <= size-n
}

func (w *window) unbind() {
	if w.region != nil {
		w.region.windows--
		w.region = nil
	}
}

// bindWindow opens a window (IBA vol. 1, 10.6.7.2.2): it must be free, in the queue pair's domain, the region allow binding, and
// remote write need local write.
func (q *qp) bindWindow(b *bindRequest) bool {
	w, _ := q.dev.keys[b.newKey>>8].(*window)
	m, _ := q.dev.keys[b.lkey>>8].(*region)
	switch {
	case w == nil || b.hasOld && w.key != b.oldKey || w.key == b.newKey || w.region != nil || w.pd != q.pd:
		return false
	case m == nil || m.key != b.lkey || m.pd != q.pd || m.access&verbs.AccessMWBind == 0 || !inside(b.addr, b.len, m.addr, m.len):
		return false
	case b.access&(verbs.AccessRemoteWrite|verbs.AccessRemoteAtomic) != 0 && m.access&verbs.AccessLocalWrite == 0:
		return false
	}
	w.key, w.region, w.qp, w.addr, w.len, w.access = b.newKey, m, q, b.addr, b.len, b.access
	m.windows++
	return true
}
