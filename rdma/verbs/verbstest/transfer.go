package verbstest

import (
	"fmt"

	"srp-initiator/rdma/verbs"
)

// sizes are message lengths at which packets begin to differ: nothing, odd tails, one packet exactly, one byte more, many.
func sizes(mtu int) []int {
	return []int{0, 1, 3, 4, 5, 64, 255, mtu - 1, mtu, mtu + 1, 2 * mtu, 3*mtu + 5, 16*mtu + 3, 64 << 10}
}

func send(t TB, p Pair) {
	r := newRig(t, p, setup{})
	for i, n := range sizes(r.a.pathMTU.Bytes()) {
		src, dst := r.a.mem[:n], r.b.mem[128<<10:]
		fill(src, byte(i))
		fill(dst[:n+64], 0x77)
		guard := append([]byte(nil), dst[n:n+64]...)
		rid := r.b.recv(128<<10, n+64)
		wr := verbs.SendWorkRequest{WRID: r.a.wrID(), Opcode: verbs.OpSend, Flags: verbs.SendSignaled}
		if n > 0 {
			wr.SGList = r.a.list(0, n)
		}
		r.a.post(wr)
		wc := r.b.awaitRecv(rid, verbs.WCRecv, n)
		if wc.Flags&(verbs.WCWithImm|verbs.WCWithInv) != 0 {
			t.Errorf("plain SEND of %d bytes came with flags %#x", n, wc.Flags)
		}
		r.a.awaitSend(wr.WRID, verbs.WCSend)
		same(t, fmt.Sprintf("SEND of %d bytes", n), dst[:n], src)
		same(t, "memory behind it", dst[n:n+64], guard)
	}
	// And the other way.
	fill(r.b.mem[:1000], 9)
	rid := r.a.recv(2048, 1000)
	wr := verbs.SendWorkRequest{WRID: r.b.wrID(), Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.b.list(0, 1000)}
	r.b.post(wr)
	r.a.awaitRecv(rid, verbs.WCRecv, 1000)
	r.b.awaitSend(wr.WRID, verbs.WCSend)
	same(t, "SEND from B", r.a.mem[2048:3048], r.b.mem[:1000])
}

func sendWithImmediate(t TB, p Pair) {
	r := newRig(t, p, setup{})
	for i, n := range []int{0, 1, 500, 2*r.a.pathMTU.Bytes() + 1} {
		fill(r.a.mem[:n], byte(i))
		imm := 0x01020304 + uint32(i)
		rid := r.b.recv(0, 64<<10)
		wr := verbs.SendWorkRequest{WRID: r.a.wrID(), Opcode: verbs.OpSendWithImm, Flags: verbs.SendSignaled, SGList: r.a.list(0, n), ImmData: imm}
		r.a.post(wr)
		wc := r.b.awaitRecv(rid, verbs.WCRecv, n)
		if wc.Flags&verbs.WCWithImm == 0 || wc.ImmData != imm {
			t.Errorf("immediate %#x flags %#x, want %#x", wc.ImmData, wc.Flags, imm)
		}
		r.a.awaitSend(wr.WRID, verbs.WCSend)
		same(t, "SEND with immediate", r.b.mem[:n], r.a.mem[:n])
	}
}

func rdmaWrite(t TB, p Pair) {
	r := newRig(t, p, setup{})
	const at = 64<<10 + 13
	for i, n := range sizes(r.a.pathMTU.Bytes()) {
		fill(r.a.mem[:n], byte(i))
		for j := range r.b.mem {
			r.b.mem[j] = 0xee
		}
		wr := verbs.SendWorkRequest{WRID: r.a.wrID(), Opcode: verbs.OpRDMAWrite, Flags: verbs.SendSignaled,
			SGList: r.a.list(0, n), RemoteAddr: r.b.mr.Addr() + at, RKey: r.b.mr.RKey()}
		r.a.post(wr)
		r.a.awaitSend(wr.WRID, verbs.WCRDMAWrite)
		same(t, fmt.Sprintf("WRITE of %d bytes", n), r.b.mem[at:at+n], r.a.mem[:n])
		untouched(t, "memory before", r.b.mem[:at])
		untouched(t, "memory behind", r.b.mem[at+n:])
	}
	nothing(t, r.b.recvCQ)
}

func rdmaWriteWithImmediate(t TB, p Pair) {
	r := newRig(t, p, setup{})
	for i, n := range []int{0, 7, r.a.pathMTU.Bytes(), 3*r.a.pathMTU.Bytes() + 2} {
		fill(r.a.mem[:n], byte(i+40))
		rid := r.b.recv(0, 0)
		wr := verbs.SendWorkRequest{WRID: r.a.wrID(), Opcode: verbs.OpRDMAWriteImm, Flags: verbs.SendSignaled,
			SGList: r.a.list(0, n), RemoteAddr: r.b.mr.Addr() + 100, RKey: r.b.mr.RKey(), ImmData: 0xa1b2c3d4}
		r.a.post(wr)
		wc := r.b.awaitRecv(rid, verbs.WCRecvRDMAWr, n)
		if wc.Flags&verbs.WCWithImm == 0 || wc.ImmData != 0xa1b2c3d4 {
			t.Errorf("immediate %#x flags %#x", wc.ImmData, wc.Flags)
		}
		r.a.awaitSend(wr.WRID, verbs.WCRDMAWrite)
		same(t, "WRITE with immediate", r.b.mem[100:100+n], r.a.mem[:n])
	}
}

func rdmaRead(t TB, p Pair) {
	r := newRig(t, p, setup{})
	const at = 32<<10 + 7
	for i, n := range sizes(r.a.pathMTU.Bytes()) {
		fill(r.b.mem[at:at+n], byte(i))
		for j := range r.a.mem {
			r.a.mem[j] = 0xee
		}
		wr := verbs.SendWorkRequest{WRID: r.a.wrID(), Opcode: verbs.OpRDMARead, Flags: verbs.SendSignaled,
			RemoteAddr: r.b.mr.Addr() + at, RKey: r.b.mr.RKey()}
		// Odd lengths go into two pieces.
		if n%2 == 1 {
			wr.SGList = []verbs.SGE{r.a.sge(1000, n/2), r.a.sge(1000+n/2, n-n/2)}
		} else {
			wr.SGList = r.a.list(1000, n)
		}
		r.a.post(wr)
		wc := r.a.awaitSend(wr.WRID, verbs.WCRDMARead)
		if int(wc.ByteLen) != n {
			t.Errorf("READ of %d bytes reports %d", n, wc.ByteLen)
		}
		same(t, fmt.Sprintf("READ of %d bytes", n), r.a.mem[1000:1000+n], r.b.mem[at:at+n])
		untouched(t, "memory before", r.a.mem[:1000])
		untouched(t, "memory behind", r.a.mem[1000+n:])
	}
}

// manyReads posts more READs than may be outstanding: the queue pair must hold the rest back.
func manyReads(t TB, p Pair) {
	for _, depth := range []uint8{1, 4} {
		r := newRig(t, p, setup{rdAtomic: depth, cap: verbs.QPCap{MaxSendWR: 32}})
		const n, size = 32, 4096 + 11
		fill(r.b.mem[:n*size], depth)
		var wrs []verbs.SendWorkRequest
		for i := range n {
			wrs = append(wrs, verbs.SendWorkRequest{WRID: r.a.wrID(), Opcode: verbs.OpRDMARead, Flags: verbs.SendSignaled,
				SGList: r.a.list(i*size, size), RemoteAddr: r.b.mr.Addr() + uint64(i*size), RKey: r.b.mr.RKey()})
		}
		r.a.post(wrs...)
		for i, wc := range await(t, r.a.sendCQ, n) {
			r.a.check(wc, wrs[i].WRID, verbs.WCRDMARead)
		}
		same(t, fmt.Sprintf("32 READs, %d at a time", depth), r.a.mem[:n*size], r.b.mem[:n*size])
	}
}

// fencedSend sends on what an RDMA READ before it fetches.
func fencedSend(t TB, p Pair) {
	r := newRig(t, p, setup{})
	for i := range 8 {
		const n = 20000
		fill(r.b.mem[:n], byte(i))
		rid := r.b.recv(64<<10, n)
		r.a.post(
			verbs.SendWorkRequest{WRID: 1, Opcode: verbs.OpRDMARead, SGList: r.a.list(0, n), RemoteAddr: r.b.mr.Addr(), RKey: r.b.mr.RKey()},
			verbs.SendWorkRequest{WRID: 2, Opcode: verbs.OpSend, Flags: verbs.SendSignaled | verbs.SendFence, SGList: r.a.list(0, n)})
		r.b.awaitRecv(rid, verbs.WCRecv, n)
		r.a.awaitSend(2, verbs.WCSend)
		same(t, "fenced SEND", r.b.mem[64<<10:64<<10+n], r.b.mem[:n])
	}
}

// scatterGather sends from uneven pieces into other uneven pieces, empty ones among them.
func scatterGather(t TB, p Pair) {
	const sges = 6
	r := newRig(t, p, setup{cap: verbs.QPCap{MaxSendSGE: sges, MaxRecvSGE: sges}})
	mtu := r.a.pathMTU.Bytes()
	splits := [][]int{
		{1}, {0, 5}, {5, 0}, {1, 2, 3}, {mtu, 1}, {1, mtu}, {mtu - 1, 2, mtu + 1, 7},
		{0, 0, 3, 0, 4, 0}, {13, 511, mtu, 3, 2*mtu + 1, 1}, {0, 0},
	}
	lay := func(e *end, base int, split []int) (list []verbs.SGE, pieces [][]byte) {
		off := base
		for _, n := range split {
			list = append(list, e.sge(off, n))
			pieces = append(pieces, e.mem[off:off+n])
			off += n + 17 // a hole between any two
		}
		return list, pieces
	}
	join := func(pieces [][]byte) (b []byte) {
		for _, p := range pieces {
			b = append(b, p...)
		}
		return b
	}
	for i, from := range splits {
		total := 0
		for _, n := range from {
			total += n
		}
		for j, into := range splits {
			room := 0
			for _, n := range into {
				room += n
			}
			into := append([]int(nil), into...)
			if room < total {
				into[len(into)-1] += total - room
			}
			src, from := lay(r.a, 0, from)
			dst, to := lay(r.b, 0, into)
			fill(r.a.mem[:16<<10], byte(i*16+j))
			for k := range r.b.mem[:64<<10] {
				r.b.mem[k] = 0xee
			}
			rwr := verbs.RecvWorkRequest{WRID: r.b.wrID(), SGList: dst}
			r.b.postRecv(rwr)
			wr := verbs.SendWorkRequest{WRID: r.a.wrID(), Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: src}
			r.a.post(wr)
			r.b.awaitRecv(rwr.WRID, verbs.WCRecv, total)
			r.a.awaitSend(wr.WRID, verbs.WCSend)
			same(t, fmt.Sprintf("pieces %d into pieces %d", i, j), join(to)[:total], join(from))
			off := 0
			for _, n := range into {
				untouched(t, "hole between pieces", r.b.mem[off+n:off+n+17])
				off += n + 17
			}
		}
	}
}

// inline sends bytes that the caller changes as soon as PostSend has returned.
func inline(t TB, p Pair) {
	r := newRig(t, p, setup{cap: verbs.QPCap{MaxInlineData: 64, MaxSendSGE: 3}})
	limit := r.a.qp.Cap().MaxInlineData
	for _, n := range []int{0, 1, 31, 60, 61, 64, limit - 1, limit} {
		for _, op := range []verbs.SendOpcode{verbs.OpSend, verbs.OpRDMAWrite} {
			src := r.a.mem[:n]
			fill(src, byte(n))
			want := append([]byte(nil), src...)
			wr := verbs.SendWorkRequest{WRID: r.a.wrID(), Opcode: op, Flags: verbs.SendSignaled | verbs.SendInline,
				RemoteAddr: r.b.mr.Addr() + 9000, RKey: r.b.mr.RKey()}
			// Three pieces, keys that mean nothing.
			for _, piece := range [][2]int{{0, n / 3}, {n / 3, n - n/3}, {n, 0}} {
				s := r.a.sge(piece[0], piece[1])
				s.LKey = 0xdeadbeef
				wr.SGList = append(wr.SGList, s)
			}
			var rid uint64
			if op == verbs.OpSend {
				rid = r.b.recv(9000, 1024)
			}
			r.a.post(wr)
			clear(src)
			if op == verbs.OpSend {
				r.b.awaitRecv(rid, verbs.WCRecv, n)
				r.a.awaitSend(wr.WRID, verbs.WCSend)
			} else {
				r.a.awaitSend(wr.WRID, verbs.WCRDMAWrite)
			}
			same(t, fmt.Sprintf("inline, %d bytes", n), r.b.mem[9000:9000+n], want)
		}
	}
}

func largestMessage(t TB, p Pair) {
	port, err := p.A.Context.QueryPort(p.A.Port)
	if err != nil {
		t.Fatalf("%v", err)
	}
	n := 4 << 20
	if int64(port.MaxMsgSize) < int64(n) {
		n = int(port.MaxMsgSize)
	}
	r := newRig(t, p, setup{memory: n})
	fill(r.a.mem[:n], 1)
	rid := r.b.recv(0, n)
	r.a.post(verbs.SendWorkRequest{WRID: 1, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.a.list(0, n)})
	r.b.awaitRecv(rid, verbs.WCRecv, n)
	r.a.awaitSend(1, verbs.WCSend)
	same(t, "SEND of the largest message", r.b.mem[:n], r.a.mem[:n])

	fill(r.a.mem[:n], 2)
	r.a.post(verbs.SendWorkRequest{WRID: 2, Opcode: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGList: r.a.list(0, n),
		RemoteAddr: r.b.mr.Addr(), RKey: r.b.mr.RKey()})
	r.a.awaitSend(2, verbs.WCRDMAWrite)
	same(t, "WRITE of the largest message", r.b.mem[:n], r.a.mem[:n])

	fill(r.b.mem[:n], 3)
	r.a.post(verbs.SendWorkRequest{WRID: 3, Opcode: verbs.OpRDMARead, Flags: verbs.SendSignaled, SGList: r.a.list(0, n),
		RemoteAddr: r.b.mr.Addr(), RKey: r.b.mr.RKey()})
	r.a.awaitSend(3, verbs.WCRDMARead)
	same(t, "READ of the largest message", r.a.mem[:n], r.b.mem[:n])
}

// psnWrap crosses 0xffffff in both directions with every kind of message.
func psnWrap(t TB, p Pair) {
	for _, first := range []uint32{0xffffff, 0xfffffe, 0xfffff0} {
		r := newRig(t, p, setup{psnA: first, psnB: first - 1})
		n := 11*r.a.pathMTU.Bytes() + 3
		for i := range 4 {
			fill(r.a.mem[:n], byte(i))
			fill(r.b.mem[:n], byte(i+100))
			ra, rb := r.a.recv(64<<10, n), r.b.recv(64<<10, n)
			r.a.post(verbs.SendWorkRequest{WRID: 1, Opcode: verbs.OpSend, SGList: r.a.list(0, n)},
				verbs.SendWorkRequest{WRID: 2, Opcode: verbs.OpRDMARead, SGList: r.a.list(128<<10, n), RemoteAddr: r.b.mr.Addr(), RKey: r.b.mr.RKey()},
				verbs.SendWorkRequest{WRID: 3, Opcode: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGList: r.a.list(0, n), RemoteAddr: r.b.mr.Addr() + 128<<10, RKey: r.b.mr.RKey()})
			r.b.awaitRecv(rb, verbs.WCRecv, n)
			r.a.awaitSend(3, verbs.WCRDMAWrite)
			r.b.post(verbs.SendWorkRequest{WRID: 4, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: r.b.list(0, n)})
			r.a.awaitRecv(ra, verbs.WCRecv, n)
			r.b.awaitSend(4, verbs.WCSend)
			same(t, "SEND over the wrap", r.b.mem[64<<10:64<<10+n], r.a.mem[:n])
			same(t, "SEND back over the wrap", r.a.mem[64<<10:64<<10+n], r.b.mem[:n])
			same(t, "READ over the wrap", r.a.mem[128<<10:128<<10+n], r.b.mem[:n])
			same(t, "WRITE over the wrap", r.b.mem[128<<10:128<<10+n], r.a.mem[:n])
		}
	}
}
