package mlxtest

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/abi"
)

// mlx5Model is the model of ConnectX-4 and later.
type mlx5Model struct{}

var be = binary.BigEndian

func (mlx5Model) context(d *device, in, out []byte) unix.Errno {
	q, r := as[abi.MLX5GetContext](in), as[abi.MLX5GetContextResp](out)
	if r == nil || len(in) < 16 {
		return unix.EINVAL
	}
	// As a ConnectX-5 and the kernel of the recordings answer.
	*r = abi.MLX5GetContextResp{QPTabSize: 0x40000, BFRegSize: 0x200, CacheLineSize: 64, MaxSQDescSz: 1024, MaxRQDescSz: 512,
		MaxSendWQEBB: 32768, MaxRecvWR: 32768, MaxSRQRecvWR: 32767, NumPorts: 1, CompMask: 0xf, ResponseLength: uint32(len(out)), CQEVersion: 1,
		CmdsSuppUHW: 3, EthMinInline: 1, HCACoreClockOffset: 0x340, LogUARSize: 12, NumUARsPerPage: 1, DumpFillMKey: 0x300}
	if d.cfg.NoBlueFlame {
		r.BFRegSize = 0
	}
	if d.cfg.Legacy || d.cfg.StaticUARs || q == nil || q.LibCaps&abi.MLX5LibDynUAR == 0 {
		r.TotBfregs, r.CompMask, r.NumDynBfregs = 16, 3, 512
	}
	if d.cfg.NoECE {
		r.CompMask = 3
	}
	if d.cfg.Legacy || q == nil || q.MaxCQEVersion == 0 {
		r.CQEVersion = 0
	}
	return 0
}

func (mlx5Model) allocPD(out []byte) {
	if r := as[abi.MLX5AllocPDResp](out); r != nil {
		r.PDN = 0x1d
	}
}

func (mlx5Model) createCQ(d *device, c *cq, in, out []byte) unix.Errno {
	q := as[abi.MLX5CreateCQ](in)
	if q == nil || len(out) < 8 || q.BufAddr%4096 != 0 || q.BufAddr == 0 || q.DBAddr == 0 || q.CQESize != 64 && q.CQESize != 128 {
		return unix.EINVAL
	}
	if d.dynamic() != (q.Flags&abi.MLX5CQUARPageIndex != 0) {
		return unix.EINVAL
	}
	c.buf, c.db, c.size = q.BufAddr, q.DBAddr, int(q.CQESize)
	// The driver must have made every entry the adapter's.
	for i := range c.entries {
		if user(c.buf+uint64(i)*uint64(c.size)+uint64(c.size)-1, 1)[0]>>4 != 0xf {
			d.net.fault("%s: completion entry %d is not the adapter's when the queue is made", d.name, i)
			return unix.EINVAL
		}
	}
	return 0
}

func (d *device) dynamic() bool { return !d.cfg.Legacy && !d.cfg.StaticUARs }

// bfregs are the registers that a kernel with static UARs hands out, in mlx5_ib's order.
var bfregs = [...]uint32{24, 25, 28, 29, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21}

func (mlx5Model) createQP(d *device, q *qp, want caps, in, out []byte) (caps, unix.Errno) {
	r, resp := as[abi.MLX5CreateQP](in), as[abi.MLX5CreateQPResp](out)
	pow2 := func(n uint32) bool { return n&(n-1) == 0 }
	if r == nil || resp == nil || r.BufAddr%4096 != 0 || r.BufAddr == 0 || r.DBAddr == 0 || !pow2(r.SQWQECount) || !pow2(r.RQWQECount) ||
		r.SQWQECount > 32768 || want.sendWR > 0x8000 || want.recvWR > 0x8000 {
		return want, unix.EINVAL
	}
	if d.dynamic() != (r.Flags&abi.MLX5QPUARPageIndex != 0) {
		return want, unix.EINVAL
	}
	legacy := d.cfg.Legacy
	if legacy != (r.UIDX == abi.MLX5NoUIDX) {
		return want, unix.EINVAL
	}
	for _, o := range d.qps {
		if !legacy && o.rsn == r.UIDX {
			return want, unix.EINVAL // the index must be unique
		}
	}
	q.buf, q.db, q.rsn = r.BufAddr, r.DBAddr, r.UIDX
	q.sqCount, q.rqCount, q.rqShift, q.sqShift = r.SQWQECount, r.RQWQECount, int(r.RQWQEShift), 6
	q.sqOff = int(r.RQWQECount) << r.RQWQEShift
	q.scatter = r.Flags&abi.MLX5QPScatterCQE != 0
	resp.ECEOptions = r.ECEOptions
	if d.dynamic() {
		q.uar = r.BfregIndex
		resp.BfregIndex = r.BfregIndex
	} else {
		n := bfregs[len(d.qps)%len(bfregs)]
		resp.BfregIndex = n
		q.uar = 0x11 + n/4
	}
	return want, 0
}

func (mlx5Model) scan(d *device) (busy bool) {
	for _, u := range d.uars {
		rung := false
		for off := 0x800; off < 0xc00; off += 0x100 {
			w := u.word(off)
			if w == 0 {
				continue
			}
			rung = true
			if q := d.byNum[uint32(w)>>8]; q == nil || q.uar != u.id {
				d.net.fault("%s: doorbell for queue pair %#x on page %#x", d.name, uint32(w)>>8, u.id)
			}
		}
		if rung {
			busy = true
			for _, q := range d.byNum {
				if q.uar == u.id {
					q.sqTarget = record(q.db, 1) & 0xffff
				}
			}
		}
		if u.word(0x20) != 0 {
			busy = true
			for _, c := range d.cqs {
				c.arm(0)
			}
		}
	}
	return busy
}

func (mlx5Model) recvHead(q *qp) uint32 { return record(q.db, 0) & 0xffff }

// ring returns n bytes of the send ring from 64-byte block index on, in q's room.
func (q *qp) ring(index uint32, n int) []byte {
	all := user(q.buf+uint64(q.sqOff), int(q.sqCount)<<q.sqShift)
	out := q.wqe[:n]
	start := int(index&(q.sqCount-1)) << q.sqShift
	k := copy(out, all[start:])
	copy(out[k:], all)
	return out
}

func (m mlx5Model) nextSend(q *qp) (request, bool) {
	if q.sqCount == 0 || q.sqCI&0xffff == q.sqTarget {
		return request{}, false
	}
	head := q.ring(q.sqCI, 16)
	ds := int(head[7] & 0x3f)
	if be.Uint16(head[1:]) != uint16(q.sqCI) || be.Uint32(head[4:])>>8 != q.num || ds == 0 {
		q.dev.net.fault("%s: WQE at index %#x of queue pair %#x begins with %x", q.dev.name, q.sqCI, q.num, head)
		q.sqTarget = q.sqCI & 0xffff
		return request{}, false
	}
	r, why := decodeMLX5(q.ring(q.sqCI, ds*16), q.sges[:0])
	q.sges = r.sges
	if why != "" {
		q.dev.net.fault("%s: WQE at index %#x of queue pair %#x: %s", q.dev.name, q.sqCI, q.num, why)
	}
	if ahead := (q.sqTarget - q.sqCI) & 0xffff; r.units > ahead || ahead > q.sqCount {
		q.dev.net.fault("%s: the record of queue pair %#x says %#x, the WQE at %#x takes %d blocks", q.dev.name, q.num, q.sqTarget, q.sqCI, r.units)
	}
	return r, true
}

var mlx5Ops = map[byte]verbs.SendOpcode{0x01: verbs.OpSendWithInv, 0x08: verbs.OpRDMAWrite, 0x09: verbs.OpRDMAWriteImm, 0x0a: verbs.OpSend,
	0x0b: verbs.OpSendWithImm, 0x10: verbs.OpRDMARead, 0x11: verbs.OpCompareSwap, 0x12: verbs.OpFetchAdd, 0x25: verbs.OpLocalInv}

// decodeMLX5 reads a linear WQE; data segments are appended to sges.
func decodeMLX5(w []byte, sges []verbs.SGE) (r request, why string) {
	op, ok := mlx5Ops[w[3]]
	if !ok {
		return request{units: 1, sges: sges}, "unknown opcode"
	}
	fm := w[11]
	r = request{op: op, signaled: fm&8 != 0, solicited: fm&2 != 0, fence: fm&0x80 != 0, imm: be.Uint32(w[12:]),
		counter: be.Uint16(w[1:]), units: uint32(len(w)+63) / 64, sges: sges}
	rest := w[16:]
	short := func(n int) bool { return len(rest) < n }
	switch op {
	case verbs.OpRDMAWrite, verbs.OpRDMAWriteImm, verbs.OpRDMARead, verbs.OpCompareSwap, verbs.OpFetchAdd:
		if short(16) {
			return r, "no remote address segment"
		}
		r.raddr, r.rkey = be.Uint64(rest), be.Uint32(rest[8:])
		rest = rest[16:]
		if op == verbs.OpCompareSwap || op == verbs.OpFetchAdd {
			if short(16) {
				return r, "no atomic segment"
			}
			r.swap, r.compare = be.Uint64(rest), be.Uint64(rest[8:])
			rest = rest[16:]
		}
	case verbs.OpLocalInv:
		if short(112) {
			return r, "no UMR segments"
		}
		if key := rest[48:]; key[0]&0x40 == 0 { // not freed: a bind
			if short(176) {
				return r, "no translation segment"
			}
			r.op = verbs.OpBindMW
			b := &bindRequest{oldKey: r.imm, newKey: r.imm&^0xff | uint32(key[7]), hasOld: true, addr: be.Uint64(key[16:]), len: be.Uint64(key[24:]), lkey: be.Uint32(rest[116:])}
			for bit, a := range map[byte]verbs.AccessFlags{1 << 3: verbs.AccessLocalWrite, 1 << 4: verbs.AccessRemoteRead, 1 << 5: verbs.AccessRemoteWrite, 1 << 6: verbs.AccessRemoteAtomic} {
				if key[2]&bit != 0 {
					b.access |= a
				}
			}
			r.bind = b
			r.imm = 0
		}
		return r, ""
	}
	if len(rest) >= 4 && be.Uint32(rest)>>31 != 0 {
		n := int(be.Uint32(rest) & 0x7fffffff)
		if short(4 + n) {
			return r, "inline data longer than the WQE"
		}
		r.inline, r.isInline = rest[4:4+n], true
		return r, ""
	}
	for ; len(rest) >= 16; rest = rest[16:] {
		r.sges = append(r.sges, verbs.SGE{Addr: be.Uint64(rest[8:]), Length: be.Uint32(rest), LKey: be.Uint32(rest[4:])})
		if be.Uint32(rest) == 0 {
			return r, "a data segment of length 0, which the adapter takes for 2 GiB"
		}
	}
	return r, ""
}

var (
	mlx5SendOps = map[verbs.SendOpcode]byte{verbs.OpSendWithInv: 0x01, verbs.OpRDMAWrite: 0x08, verbs.OpRDMAWriteImm: 0x09, verbs.OpSend: 0x0a,
		verbs.OpSendWithImm: 0x0b, verbs.OpRDMARead: 0x10, verbs.OpCompareSwap: 0x11, verbs.OpFetchAdd: 0x12, verbs.OpLocalInv: 0x25, verbs.OpBindMW: 0x25}
	mlx5RecvOps = map[verbs.SendOpcode]byte{verbs.OpRDMAWriteImm: 1, verbs.OpSend: 2, verbs.OpSendWithImm: 3, verbs.OpSendWithInv: 4}
	syndromes   = map[verbs.WCStatus]byte{verbs.WCLocalLengthError: 0x01, verbs.WCLocalQPOperationError: 0x02, verbs.WCLocalProtectionError: 0x04,
		verbs.WCFlushError: 0x05, verbs.WCMWBindError: 0x06, verbs.WCBadResponseError: 0x10, verbs.WCLocalAccessError: 0x11,
		verbs.WCRemoteInvalidRequestError: 0x12, verbs.WCRemoteAccessError: 0x13, verbs.WCRemoteOperationError: 0x14,
		verbs.WCRetryExceeded: 0x15, verbs.WCRNRRetryExceeded: 0x16, verbs.WCRemoteAborted: 0x22, verbs.WCGeneralError: 0xff}
)

// encodeMLX5 builds an entry in b, for CQE version 1 or 0.
func encodeMLX5(b []byte, e *entry, version0 bool) {
	clear(b)
	size := len(b)
	d := b[size-64:]
	if !version0 {
		be.PutUint32(d[32:], e.RSN&0xffffff)
	}
	be.PutUint32(d[56:], e.QPN)
	be.PutUint16(d[60:], e.Counter)
	op := byte(0)
	switch {
	case e.Status != verbs.WCSuccess:
		d[54], d[55] = e.Vendor, syndromes[e.Status]
		op = 14
		if e.Send {
			op = 13
			d[56] = mlx5SendOps[e.Op]
		}
	case e.Send:
		d[56] = mlx5SendOps[e.Op]
		if e.Op == verbs.OpRDMARead {
			be.PutUint32(d[44:], e.ByteLen)
		}
	default:
		op = mlx5RecvOps[e.Op]
		be.PutUint32(d[44:], e.ByteLen)
		d[17] = 0x80 | e.PathBits
		be.PutUint16(d[22:], e.SLID)
		w := uint32(e.SL)<<24 | e.SrcQP&0xffffff
		if e.GRH {
			w |= 1 << 28
		}
		be.PutUint32(d[24:], w)
		if e.Op != verbs.OpSend {
			be.PutUint32(d[36:], e.Imm)
		}
		d[56] = 0x20
	}
	d[63] = op << 4
	if n := len(e.Data); n > 0 {
		if size == 128 && n > 32 {
			copy(b, e.Data)
			d[63] |= 1 << 3
		} else {
			copy(d, e.Data)
			d[63] |= 1 << 2
		}
	}
	if e.Owner {
		d[63] |= 1
	}
}

func (mlx5Model) putCQE(c *cq, e *entry) {
	b := c.dev.cqe[:c.size]
	encodeMLX5(b, e, c.dev.cfg.Legacy)
	slot := user(c.buf+uint64(c.pi&(c.entries-1))*uint64(c.size), c.size)
	copy(slot, b[:c.size-4])
	publish(slot[c.size-4:], b[c.size-4:])
}
