package mlxtest

import (
	"golang.org/x/sys/unix"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/abi"
)

// mlx4Model is the model of ConnectX-3.
type mlx4Model struct{}

func (mlx4Model) context(d *device, in, out []byte) unix.Errno {
	r := as[abi.MLX4GetContextResp](out)
	if r == nil {
		return unix.EINVAL
	}
	*r = abi.MLX4GetContextResp{DevCaps: abi.MLX4UserDevCapCQESize, QPTabSize: 0x80000, BFRegSize: 0x200, BFRegsPerPage: 8, CQESize: 64}
	if d.cfg.NoBlueFlame {
		r.BFRegSize, r.BFRegsPerPage = 0, 0
	}
	if d.cfg.Legacy || d.cfg.CQE32 {
		r.DevCaps, r.CQESize = 0, 32
	}
	return 0
}

func (mlx4Model) allocPD(out []byte) {
	if r := as[abi.MLX4AllocPDResp](out); r != nil {
		r.PDN = 0x1d
	}
}

func (mlx4Model) createCQ(d *device, c *cq, in, out []byte) unix.Errno {
	q := as[abi.MLX4CreateCQ](in)
	if q == nil || len(out) < 8 || q.BufAddr%4096 != 0 || q.BufAddr == 0 || q.DBAddr == 0 {
		return unix.EINVAL
	}
	c.buf, c.db, c.size = q.BufAddr, q.DBAddr, 64
	if d.cfg.Legacy || d.cfg.CQE32 {
		c.size = 32
	}
	b := user(c.buf, int(c.entries)*c.size)
	for i := range b { // mlx4_init_user_cqes of the kernel
		if b[i] != 0 {
			d.net.fault("%s: a completion ring is not zero when the queue is made", d.name)
			return unix.EINVAL
		}
		b[i] = 0xcc
	}
	return 0
}

func (mlx4Model) createQP(d *device, q *qp, want caps, in, out []byte) (caps, unix.Errno) {
	r := as[abi.MLX4CreateQP](in)
	if r == nil || r.BufAddr%4096 != 0 || r.BufAddr == 0 || r.DBAddr == 0 || r.LogSQStride < 6 || r.LogSQBBCount > 16 ||
		want.recvWR == 0 || want.recvSGE == 0 || want.sendWR > 16351 || want.recvWR > 16351 || want.sendSGE > 32 || want.recvSGE > 32 {
		return want, unix.EINVAL
	}
	pow2 := func(n uint32) uint32 {
		p := uint32(1)
		for p < n {
			p <<= 1
		}
		return p
	}
	// set_rq_size of the kernel.
	q.rqCount = pow2(want.recvWR)
	stride := pow2(want.recvSGE) * 16
	for q.rqShift = 4; 1<<q.rqShift < stride; q.rqShift++ {
	}
	q.sqCount, q.sqShift = 1<<r.LogSQBBCount, int(r.LogSQStride)
	q.buf, q.db = r.BufAddr, r.DBAddr
	if q.rqShift > q.sqShift {
		q.sqOff = int(q.rqCount) << q.rqShift
	} else {
		q.rqOff = int(q.sqCount) << q.sqShift
	}
	want.recvWR, want.recvSGE = q.rqCount, stride/16
	return want, 0
}

func (mlx4Model) scan(d *device) (busy bool) {
	if len(d.uars) == 0 {
		return false
	}
	rung := false
	if w := d.uars[0].word32(0x14); w != 0 {
		rung = true
		if d.byNum[w>>8] == nil {
			d.net.fault("%s: doorbell for queue pair %#x", d.name, w>>8)
		}
	}
	if len(d.uars) > 1 {
		for off := 0; off < 0x200; off += 0x100 {
			if w := d.uars[1].word(off); w != 0 {
				rung = true
				if d.byNum[uint32(w)>>8] == nil {
					d.net.fault("%s: BlueFlame for queue pair %#x", d.name, uint32(w)>>8)
				}
			}
		}
	}
	if rung {
		busy = true
		for _, q := range d.byNum {
			q.rung = true
		}
	}
	if d.uars[0].word(0x20) != 0 {
		busy = true
		for _, c := range d.cqs {
			c.arm(2 << 24)
		}
	}
	return busy
}

func (mlx4Model) recvHead(q *qp) uint32 { return record(q.db, 0) & 0xffff }

func (mlx4Model) nextSend(q *qp) (request, bool) {
	if !q.rung {
		return request{}, false
	}
	w := user(q.buf+uint64(q.sqOff)+uint64(q.sqCI&(q.sqCount-1))<<q.sqShift, 1<<q.sqShift)
	if (loadWord(w)>>31 != 0) != (q.sqCI&q.sqCount != 0) {
		q.rung = false
		return request{}, false
	}
	ds := int(w[7] & 0x3f)
	if ds == 0 || ds*16 > len(w) {
		q.dev.net.fault("%s: WQE %#x of queue pair %#x has %d units", q.dev.name, q.sqCI, q.num, ds)
		ds = 1
	}
	r, why := decodeMLX4(q.wqe[:copy(q.wqe[:], w[:ds*16])], q.sges[:0], q.inline[:0])
	q.sges, q.inline = r.sges, r.inline
	if why != "" {
		q.dev.net.fault("%s: WQE %#x of queue pair %#x: %s", q.dev.name, q.sqCI, q.num, why)
	}
	r.counter, r.units = uint16(q.sqCI), 1
	return r, true
}

var mlx4Ops = map[byte]verbs.SendOpcode{0x01: verbs.OpSendWithInv, 0x08: verbs.OpRDMAWrite, 0x09: verbs.OpRDMAWriteImm, 0x0a: verbs.OpSend,
	0x0b: verbs.OpSendWithImm, 0x10: verbs.OpRDMARead, 0x11: verbs.OpCompareSwap, 0x12: verbs.OpFetchAdd, 0x18: verbs.OpBindMW, 0x1b: verbs.OpLocalInv}

// decodeMLX4 reads a WQE; data segments are appended to sges, inline pieces to inline.
func decodeMLX4(w []byte, sges []verbs.SGE, inline []byte) (r request, why string) {
	op, ok := mlx4Ops[w[3]&0x1f]
	if !ok {
		return request{units: 1, sges: sges, inline: inline}, "unknown opcode"
	}
	flags := be.Uint32(w[8:])
	r = request{op: op, signaled: flags&0xc == 0xc, solicited: flags&2 != 0, fence: w[7]&0x40 != 0, imm: be.Uint32(w[12:]), units: 1, sges: sges, inline: inline}
	for o := 64; o < len(w); o += 64 {
		if be.Uint32(w[o:]) == 0xffffffff {
			return r, "a stamped line inside the WQE"
		}
	}
	at := 16
	need := func(n int) bool { return len(w) >= at+n }
	switch op {
	case verbs.OpRDMAWrite, verbs.OpRDMAWriteImm, verbs.OpRDMARead, verbs.OpCompareSwap, verbs.OpFetchAdd:
		if !need(16) {
			return r, "no remote address segment"
		}
		r.raddr, r.rkey = be.Uint64(w[at:]), be.Uint32(w[at+8:])
		at += 16
		if op == verbs.OpCompareSwap || op == verbs.OpFetchAdd {
			if !need(16) {
				return r, "no atomic segment"
			}
			r.swap, r.compare = be.Uint64(w[at:]), be.Uint64(w[at+8:])
			at += 16
		}
	case verbs.OpLocalInv:
		if !need(32) {
			return r, "no invalidate segment"
		}
		if r.imm != 0 {
			return r, "LOCAL_INV with an immediate"
		}
		r.imm = be.Uint32(w[at+8:])
		return r, ""
	case verbs.OpBindMW:
		if !need(32) {
			return r, "no bind segment"
		}
		b := &bindRequest{newKey: be.Uint32(w[at+8:]), lkey: be.Uint32(w[at+12:]), addr: be.Uint64(w[at+16:]), len: be.Uint64(w[at+24:])}
		for bit, a := range map[uint32]verbs.AccessFlags{1 << 29: verbs.AccessRemoteRead, 1 << 30: verbs.AccessRemoteWrite, 1 << 31: verbs.AccessRemoteAtomic} {
			if be.Uint32(w[at:])&bit != 0 {
				b.access |= a
			}
		}
		if be.Uint32(w[at+4:]) != 1<<31 {
			return r, "a bind of another type than 2"
		}
		r.bind = b
		return r, ""
	}
	for at+4 <= len(w) {
		n := be.Uint32(w[at:])
		if n>>31 != 0 && n != 1<<31 {
			// Inline: a piece reaches at most to the end of its line, where the next one's header follows.
			r.isInline = true
			end := at + 4 + int(n&0x7fffffff)
			if line := (at &^ 63) + 64; end > line || end > len(w) {
				return r, "an inline piece beyond its line"
			}
			r.inline = append(r.inline, w[at+4:end]...)
			at = end
			if at&63 != 0 {
				break
			}
			continue
		}
		if r.isInline || !need(16) {
			break
		}
		s := verbs.SGE{Addr: be.Uint64(w[at+8:]), Length: n, LKey: be.Uint32(w[at+4:])}
		if n == 0 {
			return r, "a data segment of length 0, which the adapter takes for 2 GiB"
		}
		if n == 1<<31 {
			s.Length = 0
		}
		r.sges = append(r.sges, s)
		at += 16
	}
	return r, ""
}

var mlx4SendOps = map[verbs.SendOpcode]byte{verbs.OpSendWithInv: 0x01, verbs.OpRDMAWrite: 0x08, verbs.OpRDMAWriteImm: 0x09, verbs.OpSend: 0x0a,
	verbs.OpSendWithImm: 0x0b, verbs.OpRDMARead: 0x10, verbs.OpCompareSwap: 0x11, verbs.OpFetchAdd: 0x12, verbs.OpBindMW: 0x18, verbs.OpLocalInv: 0x1b}

var mlx4RecvOps = map[verbs.SendOpcode]byte{verbs.OpRDMAWriteImm: 0, verbs.OpSend: 1, verbs.OpSendWithImm: 2, verbs.OpSendWithInv: 3}

// encodeMLX4 builds an entry in b.
func encodeMLX4(b []byte, e *entry) {
	clear(b)
	d := b[len(b)-32:]
	be.PutUint32(d, e.QPN&0xffffff)
	be.PutUint16(d[24:], e.Counter)
	switch {
	case e.Status != verbs.WCSuccess:
		d[26], d[27], d[31] = e.Vendor, syndromes[e.Status], 0x1e
	case e.Send:
		d[31] = mlx4SendOps[e.Op]
		if e.Op == verbs.OpRDMARead {
			be.PutUint32(d[20:], e.ByteLen)
		}
	default:
		d[31] = mlx4RecvOps[e.Op]
		be.PutUint32(d[20:], e.ByteLen)
		if e.Op != verbs.OpSend {
			be.PutUint32(d[4:], e.Imm)
		}
		w := uint32(e.PathBits)<<24 | e.SrcQP&0xffffff
		if e.GRH {
			w |= 1 << 31
		}
		be.PutUint32(d[8:], w)
		shift := 12
		if e.RoCE {
			shift = 13
		}
		be.PutUint16(d[12:], uint16(e.SL)<<shift)
		be.PutUint16(d[14:], e.SLID)
	}
	if e.Send {
		d[31] |= 0x40
	}
	if e.Owner {
		d[31] |= 0x80
	}
}

func (mlx4Model) putCQE(c *cq, e *entry) {
	b := c.dev.cqe[:c.size]
	encodeMLX4(b, e)
	slot := user(c.buf+uint64(c.pi&(c.entries-1))*uint64(c.size), c.size)
	copy(slot, b[:c.size-4])
	publish(slot[c.size-4:], b[c.size-4:])
}
