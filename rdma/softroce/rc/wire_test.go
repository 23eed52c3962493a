package rc

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/verbs"
)

// rig is one queue pair whose peer is the test itself, packet by packet.
type rig struct {
	t      *testing.T
	q      *QP
	mem    *testMemory
	buf    *testRegion // all rights
	sent   []wirePacket
	done   []completion
	events []verbs.AsyncEventType
	now    Time
	room   int // packets that the output still takes; negative: any number
}

type wirePacket struct {
	packet.Packet
	at    Time
	ahead uint64
}

func (w wirePacket) String() string {
	s := fmt.Sprintf("%v psn %d len %d", w.Opcode, w.PSN, len(w.Payload))
	if w.HasAETH() {
		s += fmt.Sprintf(" syndrome %02x msn %d", uint8(w.AETH().Syndrome), w.AETH().MSN)
	}
	return s
}

func (r *rig) Packet(hdr []byte, payload [][]byte, pad uint8, ahead uint64) bool {
	if r.room == 0 {
		return false
	}
	r.room--
	b := bytes.Clone(hdr)
	for _, p := range payload {
		b = append(b, p...)
	}
	b = append(b, make([]byte, int(pad)+packet.ICRCLen)...)
	if b[1]&0x40 == 0 || b[4] != 0 || binary.BigEndian.Uint16(b[2:]) != 0xffff {
		r.t.Errorf("BTH % x: MigReq 1, reserved 0 and the default P_Key are due", b[:12])
	}
	w := wirePacket{at: r.now, ahead: ahead}
	if err := w.Parse(b); err != nil {
		r.t.Fatalf("own packet does not parse: %v", err)
	}
	r.sent = append(r.sent, w)
	return true
}

func (r *rig) Complete(wc *verbs.WorkCompletion, recv, se bool) {
	r.done = append(r.done, completion{*wc, recv, se})
}
func (r *rig) Event(e verbs.AsyncEventType) { r.events = append(r.events, e) }

const rigPSN = 40 // of both directions

func newRig(t *testing.T, change func(*verbs.QPAttr), tune Tuning) *rig {
	r := &rig{t: t, mem: newTestMemory(0x1000), room: -1}
	b := make([]byte, 64<<10)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	r.buf = r.mem.register(b, allAccess)
	r.q = New(Config{QPN: 0x12, Cap: verbs.QPCap{MaxSendWR: 64, MaxRecvWR: 64, MaxSendSGE: 2, MaxRecvSGE: 2, MaxInlineData: 64}, Tuning: tune}, r.mem, r)
	at := baseAttr()
	at.PathMTU, at.DestQPN, at.RQPSN, at.SQPSN = verbs.MTU256, 0x34, rigPSN, rigPSN
	if change != nil {
		change(&at)
	}
	for _, st := range []struct {
		s verbs.QPState
		m verbs.QPAttrMask
	}{{verbs.QPInitState, verbs.QPMaskToInit}, {verbs.QPReadyToReceive, verbs.QPMaskToRTR}, {verbs.QPReadyToSend, verbs.QPMaskToRTS}} {
		at.State = st.s
		if err := r.q.Modify(0, &at, st.m); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func (r *rig) post(op verbs.SendOpcode, n int, more ...func(*verbs.SendWorkRequest)) {
	r.t.Helper()
	wr := verbs.SendWorkRequest{WRID: uint64(len(r.done)) + 1000, Opcode: op, Flags: verbs.SendSignaled, RemoteAddr: 0x9000, RKey: 0x77}
	if n > 0 {
		wr.SGList = []verbs.SGE{r.buf.sge(0, n)}
	}
	for _, f := range more {
		f(&wr)
	}
	if k, err := r.q.PostSend(r.now, []verbs.SendWorkRequest{wr}); k != 1 || err != nil {
		r.t.Fatalf("PostSend: %d, %v", k, err)
	}
	r.q.Ride(r.now)
}

func (r *rig) recv(n int) {
	r.t.Helper()
	if k, err := r.q.PostRecv([]verbs.RecvWorkRequest{{WRID: 5000, SGList: []verbs.SGE{r.buf.sge(32<<10, n)}}}); k != 1 || err != nil {
		r.t.Fatalf("PostRecv: %d, %v", k, err)
	}
}

type wire struct {
	op      packet.Opcode
	psn     packet.PSN
	reth    packet.RETH
	syn     packet.Syndrome
	imm     uint32
	payload []byte
	noAck   bool
}

// take gives the QP one packet from the peer.
func (r *rig) take(w wire) {
	r.t.Helper()
	h := packet.BTH{Opcode: w.op, Pad: packet.Pad(len(w.payload)), PKey: 0xffff, DestQPN: 0x12, PSN: w.psn, AckReq: !w.noAck}
	b := make([]byte, w.op.HeaderLen())
	h.Put(b)
	k := w.op.Kind()
	switch {
	case k&packet.KindRead != 0, k&packet.KindWrite != 0 && k&packet.KindFirst != 0:
		w.reth.Put(b[12:])
	case k&packet.KindResponse != 0 && len(b) > 12:
		a := packet.AETH{Syndrome: w.syn}
		a.Put(b[12:])
	}
	if k&(packet.KindImm|packet.KindInv) != 0 {
		packet.PutImm(b[len(b)-4:], w.imm)
	}
	b = append(b, w.payload...)
	b = append(b, make([]byte, int(h.Pad)+4)...)
	var p packet.Packet
	if err := p.Parse(b); err != nil {
		r.t.Fatal(err)
	}
	r.q.Receive(r.now, &p)
	r.checkState()
}

func (r *rig) checkState() {
	r.t.Helper()
	if err := r.q.check(); err != nil {
		r.t.Fatal(err)
	}
}

// expect says which packets have been sent since the last time, and forgets them.
func (r *rig) expect(want ...string) []wirePacket {
	r.t.Helper()
	var got []string
	for _, w := range r.sent {
		got = append(got, w.String())
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		r.t.Fatalf("sent %q\nwant %q", got, want)
	}
	s := r.sent
	r.sent = nil
	return s
}

func (r *rig) end(want ...string) {
	r.t.Helper()
	r.q.EndBatch(r.now, false)
	r.expect(want...)
}

// statuses says which completions came since the last time.
func (r *rig) statuses(want ...verbs.WCStatus) {
	r.t.Helper()
	var got []verbs.WCStatus
	for _, c := range r.done {
		got = append(got, c.wc.Status)
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		r.t.Fatalf("completed with %v, want %v", got, want)
	}
	r.done = nil
}

// at moves to the QP's deadline and runs it.
func (r *rig) expire() {
	r.t.Helper()
	d := r.q.Deadline()
	if d == Never {
		r.t.Fatal("no timer runs")
	}
	r.now = max(r.now, d)
	r.q.Tick(r.now)
	r.checkState()
}

const ok = verbs.WCSuccess

// A coalesced ACK beyond a READ completes what is in front of the READ, not the READ, which is asked for again; a partly answered READ is asked for from
// where it stopped, and the answer may start with MIDDLE (rxe) or FIRST (hardware).
func TestAckBeyondRead(t *testing.T) {
	for _, style := range []string{"rxe", "hardware"} {
		t.Run(style, func(t *testing.T) {
			r := newRig(t, nil, Tuning{})
			data := r.buf.buf[:1000]
			want := bytes.Repeat([]byte{0xa5, 0x5a}, 500)
			r.post(verbs.OpRDMAWrite, 10)
			r.post(verbs.OpRDMARead, 1000)
			r.post(verbs.OpRDMAWrite, 12)
			r.expect("RDMA WRITE Only psn 40 len 10", "RDMA READ Request psn 41 len 0", "RDMA WRITE Only psn 45 len 12")
			r.take(wire{op: packet.Acknowledge, psn: 45, syn: 0x1f})
			r.statuses(ok)
			p := r.expect("RDMA READ Request psn 41 len 0", "RDMA WRITE Only psn 45 len 12")
			if h := p[0].RETH(); h != (packet.RETH{Addr: 0x9000, RKey: 0x77, Length: 1000}) {
				t.Fatalf("READ asked for again: %+v", h)
			}
			r.take(wire{op: packet.Acknowledge, psn: 45, syn: 0x1f}) // the same implication again
			r.expect()
			r.take(wire{op: packet.ReadResponseFirst, psn: 41, syn: 0x1f, payload: want[:256]})
			r.take(wire{op: packet.ReadResponseMid, psn: 42, payload: want[256:512]})
			r.expire()
			p = r.expect("RDMA READ Request psn 43 len 0", "RDMA WRITE Only psn 45 len 12")
			if h := p[0].RETH(); h != (packet.RETH{Addr: 0x9000 + 512, RKey: 0x77, Length: 488}) {
				t.Fatalf("rest of the READ: %+v", h)
			}
			if style == "rxe" {
				r.take(wire{op: packet.ReadResponseMid, psn: 43, payload: want[512:768]})
			} else {
				r.take(wire{op: packet.ReadResponseFirst, psn: 43, syn: 0x1f, payload: want[512:768]})
			}
			r.take(wire{op: packet.ReadResponseLast, psn: 44, syn: 0x1f, payload: want[768:1000]})
			r.statuses(ok)
			if !bytes.Equal(data, want) {
				t.Error("other bytes")
			}
			r.take(wire{op: packet.Acknowledge, psn: 45, syn: 0x1f})
			r.statuses(ok)
			if r.q.Deadline() != Never {
				t.Error("a timer runs on an idle queue pair")
			}
		})
	}
}

// The last packet of a READ alone, asked for again, may come as LAST or ONLY.
func TestReadTail(t *testing.T) {
	for _, op := range []packet.Opcode{packet.ReadResponseLast, packet.ReadResponseOnly} {
		r := newRig(t, nil, Tuning{})
		r.post(verbs.OpRDMARead, 300)
		r.take(wire{op: packet.ReadResponseFirst, psn: 40, syn: 0x1f, payload: make([]byte, 256)})
		r.expire()
		r.expect("RDMA READ Request psn 40 len 0", "RDMA READ Request psn 41 len 0")
		r.take(wire{op: op, psn: 41, syn: 0x1f, payload: make([]byte, 44)})
		r.statuses(ok)
	}
}

// The same with another READ request behind it, which must not make the first one's restart forgotten.
func TestReadRestartWithMoreBehind(t *testing.T) {
	r := newRig(t, nil, Tuning{ReadChunk: 3})
	full := make([]byte, 256)
	r.post(verbs.OpRDMARead, 6*256)
	r.post(verbs.OpRDMARead, 10)
	r.take(wire{op: packet.ReadResponseFirst, psn: 40, syn: 0x1f, payload: full})
	r.expire()
	r.expect("RDMA READ Request psn 40 len 0", "RDMA READ Request psn 43 len 0", "RDMA READ Request psn 46 len 0",
		"RDMA READ Request psn 41 len 0", "RDMA READ Request psn 43 len 0", "RDMA READ Request psn 46 len 0")
	r.take(wire{op: packet.ReadResponseFirst, psn: 41, syn: 0x1f, payload: full})
	r.take(wire{op: packet.ReadResponseLast, psn: 42, syn: 0x1f, payload: full})
	r.take(wire{op: packet.ReadResponseFirst, psn: 43, syn: 0x1f, payload: full})
	r.take(wire{op: packet.ReadResponseMid, psn: 44, payload: full})
	r.take(wire{op: packet.ReadResponseLast, psn: 45, syn: 0x1f, payload: full})
	r.take(wire{op: packet.ReadResponseOnly, psn: 46, syn: 0x1f, payload: full[:10]})
	r.statuses(ok, ok)
}

func TestBadReadResponses(t *testing.T) {
	full := make([]byte, 256)
	for name, w := range map[string]wire{
		"MIDDLE first":            {op: packet.ReadResponseMid, psn: 40, payload: full},
		"LAST first":              {op: packet.ReadResponseLast, psn: 40, syn: 0x1f, payload: full},
		"ONLY for several":        {op: packet.ReadResponseOnly, psn: 40, syn: 0x1f, payload: full},
		"short FIRST":             {op: packet.ReadResponseFirst, psn: 40, syn: 0x1f, payload: full[:252]},
		"NAK syndrome with bytes": {op: packet.ReadResponseFirst, psn: 40, syn: 0x60, payload: full},
	} {
		r := newRig(t, nil, Tuning{})
		was := bytes.Clone(r.buf.buf)
		r.post(verbs.OpRDMARead, 700)
		r.post(verbs.OpSend, 4)
		r.take(w)
		r.statuses(verbs.WCBadResponseError, verbs.WCFlushError)
		if r.q.State() != verbs.QPError || !bytes.Equal(was, r.buf.buf) {
			t.Errorf("%s: state %s, memory touched %v", name, r.q.State(), !bytes.Equal(was, r.buf.buf))
		}
	}
	r := newRig(t, nil, Tuning{})
	r.post(verbs.OpSend, 4)
	r.take(wire{op: packet.ReadResponseOnly, psn: 40, syn: 0x1f, payload: full})
	r.statuses(verbs.WCBadResponseError)
}

func TestNakEndsConnection(t *testing.T) {
	for syn, st := range map[packet.Syndrome]verbs.WCStatus{
		0x61: verbs.WCRemoteInvalidRequestError, 0x62: verbs.WCRemoteAccessError, 0x63: verbs.WCRemoteOperationError,
	} {
		r := newRig(t, nil, Tuning{})
		r.recv(64)
		r.post(verbs.OpSend, 4)
		r.post(verbs.OpRDMARead, 2000)
		r.post(verbs.OpSend, 4)
		full := make([]byte, 256)
		r.take(wire{op: packet.ReadResponseFirst, psn: 41, syn: 0x1f, payload: full})
		r.take(wire{op: packet.ReadResponseMid, psn: 42, payload: full})
		r.take(wire{op: packet.Acknowledge, psn: 43, syn: syn})
		r.statuses(ok, st, verbs.WCFlushError, verbs.WCFlushError)
		if len(r.events) != 1 || r.q.Deadline() != Never {
			t.Errorf("%02x: events %v, deadline %d", syn, r.events, r.q.Deadline())
		}
		r.sent = nil
		r.take(wire{op: packet.SendOnly, psn: 40, payload: full[:4]})
		r.take(wire{op: packet.Acknowledge, psn: 49, syn: 0x1f})
		r.end() // nothing more is sent
		r.post(verbs.OpSend, 4)
		r.recv(4)
		r.statuses(verbs.WCFlushError, verbs.WCFlushError)
	}
	// A NAK beyond a READ whose data was lost: the READ is flushed, the request that was refused says so.
	r := newRig(t, nil, Tuning{})
	r.post(verbs.OpRDMARead, 100)
	r.post(verbs.OpSend, 4)
	r.take(wire{op: packet.Acknowledge, psn: 41, syn: 0x61})
	r.statuses(verbs.WCFlushError, verbs.WCRemoteInvalidRequestError)
}

func TestRNR(t *testing.T) {
	r := newRig(t, func(a *verbs.QPAttr) { a.RNRRetry = 3 }, Tuning{})
	r.post(verbs.OpSend, 4)
	r.post(verbs.OpSend, 5)
	r.expect("SEND Only psn 40 len 4", "SEND Only psn 41 len 5")
	for range 3 {
		r.take(wire{op: packet.Acknowledge, psn: 40, syn: 0x20 | 20})
		was := r.now
		r.post(verbs.OpSend, 6) // must not slip through
		r.expect()
		if d := r.q.Deadline(); d != was.Add(10240*time.Microsecond) {
			t.Fatalf("waits %v", time.Duration(d-was))
		}
		r.expire()
		if len(r.sent) < 3 || r.sent[0].PSN != 40 {
			t.Fatalf("after the wait: %v", r.sent)
		}
		r.sent = nil
	}
	r.take(wire{op: packet.Acknowledge, psn: 40, syn: 0x20 | 20})
	r.statuses(verbs.WCRNRRetryExceeded, verbs.WCFlushError, verbs.WCFlushError, verbs.WCFlushError, verbs.WCFlushError)

	// Progress renews the counter, and 7 never ends.
	for _, limit := range []uint8{1, 7} {
		r = newRig(t, func(a *verbs.QPAttr) { a.RNRRetry = limit }, Tuning{})
		for i := range packet.PSN(20) {
			r.post(verbs.OpSend, 4)
			for range 1 + 10*int(limit/7) {
				r.take(wire{op: packet.Acknowledge, psn: 40 + i, syn: 0x21})
				r.expire()
			}
			r.take(wire{op: packet.Acknowledge, psn: 40 + i, syn: 0x1f})
		}
		if len(r.done) != 20 || r.q.State() != verbs.QPReadyToSend {
			t.Fatalf("rnr_retry %d: %d of 20 done, %s", limit, len(r.done), r.q.State())
		}
	}
}

func TestRNRTable(t *testing.T) {
	for code, want := range map[uint8]time.Duration{
		0: 655360 * time.Microsecond, 1: 10 * time.Microsecond, 5: 60 * time.Microsecond, 12: 640 * time.Microsecond,
		20: 10240 * time.Microsecond, 31: 491520 * time.Microsecond,
	} {
		if d := RNRDelay(code); d != want {
			t.Errorf("code %d: %v, want %v", code, d, want)
		}
	}
	if AckTimeout(0) != 0 || AckTimeout(14) != 67108864*time.Nanosecond {
		t.Error("ACK timeout codes")
	}
}

func TestRetryExceeded(t *testing.T) {
	r := newRig(t, func(a *verbs.QPAttr) { a.RetryCount = 2 }, Tuning{})
	r.post(verbs.OpSend, 4)
	r.expect("SEND Only psn 40 len 4")
	for i := range 2 {
		was := r.now
		r.expire()
		if d := time.Duration(r.now - was); d != AckTimeout(10) {
			t.Errorf("retry %d after %v, want %v", i, d, AckTimeout(10))
		}
		r.expect("SEND Only psn 40 len 4")
	}
	r.expire()
	r.expect()
	r.statuses(verbs.WCRetryExceeded)
	if r.q.State() != verbs.QPError || r.q.Deadline() != Never || len(r.events) != 1 {
		t.Error("not in error, or a timer is left, or no event")
	}
}

// A timer that is noticed late gives the peer as long as it was late, at most a timeout, and once; then it is a timeout like any other.
func TestLateTimer(t *testing.T) {
	timeout := AckTimeout(10) // 4.2 ms
	for _, late := range []time.Duration{lateness - 1, lateness, 100 * timeout} {
		r := newRig(t, func(a *verbs.QPAttr) { a.RetryCount = 1 }, Tuning{})
		r.post(verbs.OpSend, 4)
		r.expect("SEND Only psn 40 len 4")
		for range 2 { // the second time it retries
			if late >= lateness {
				r.now = r.q.Deadline().Add(late)
				r.expire()
				r.expect()
				if d := time.Duration(r.q.Deadline() - r.now); d != min(late, timeout) {
					t.Fatalf("%v late: %v more", late, d)
				}
			}
			r.now = r.q.Deadline().Add(late)
			r.expire()
			if r.q.State() != verbs.QPReadyToSend {
				break
			}
			r.expect("SEND Only psn 40 len 4")
		}
		r.statuses(verbs.WCRetryExceeded)
		if s := r.q.Stats(); s.Timeouts != 2 || s.Retransmits != 1 {
			t.Errorf("%v late: %+v", late, s)
		}
	}
	// What comes meanwhile is in time.
	r := newRig(t, nil, Tuning{})
	r.post(verbs.OpSend, 4)
	r.now = r.q.Deadline().Add(time.Second)
	r.expire()
	r.take(wire{op: packet.Acknowledge, psn: 40, syn: 0x1f})
	r.statuses(ok)
	if s := r.q.Stats(); s.Timeouts != 0 || r.q.Deadline() != Never {
		t.Errorf("%+v, deadline %d", s, r.q.Deadline())
	}
}

func TestGoBackN(t *testing.T) {
	r := newRig(t, nil, Tuning{})
	r.post(verbs.OpSend, 700)
	r.post(verbs.OpRDMAWrite, 600)
	r.expect("SEND First psn 40 len 256", "SEND Middle psn 41 len 256", "SEND Last psn 42 len 188",
		"RDMA WRITE First psn 43 len 256", "RDMA WRITE Middle psn 44 len 256", "RDMA WRITE Last psn 45 len 88")
	// NAK sequence acknowledges what is in front of it; half-done messages go on in the middle.
	r.take(wire{op: packet.Acknowledge, psn: 44, syn: 0x60})
	r.statuses(ok)
	r.expect("RDMA WRITE Middle psn 44 len 256", "RDMA WRITE Last psn 45 len 88")
	r.take(wire{op: packet.Acknowledge, psn: 39, syn: 0x60}) // a ghost
	r.take(wire{op: packet.Acknowledge, psn: 46, syn: 0x1f}) // never sent
	r.take(wire{op: packet.Acknowledge, psn: 43, syn: 0x62})
	r.expect()
	r.take(wire{op: packet.Acknowledge, psn: 45, syn: 0x1f})
	r.statuses(ok)
}

// A WRITE of up to DivideWrites packets goes out as a message for each, a longer one and one with immediate data as one message. In either case the last packet alone asks
// for an acknowledgement and carries the solicited event, and all make one completion.
func TestDividedWrites(t *testing.T) {
	const at = 0x9000
	reth := func(off, n uint32) packet.RETH { return packet.RETH{Addr: at + uint64(off), RKey: 0x77, Length: n} }
	for _, c := range []struct {
		op    verbs.SendOpcode
		n     int
		want  []string
		reths []packet.RETH // of the first packets; the others have none
	}{
		{verbs.OpRDMAWrite, 0, []string{"RDMA WRITE Only psn 40 len 0"}, []packet.RETH{reth(0, 0)}},
		{verbs.OpRDMAWrite, 256, []string{"RDMA WRITE Only psn 40 len 256"}, []packet.RETH{reth(0, 256)}},
		{verbs.OpRDMAWrite, 257, []string{"RDMA WRITE Only psn 40 len 256", "RDMA WRITE Only psn 41 len 1"}, []packet.RETH{reth(0, 256), reth(256, 1)}},
		{verbs.OpRDMAWrite, 763, []string{"RDMA WRITE Only psn 40 len 256", "RDMA WRITE Only psn 41 len 256", "RDMA WRITE Only psn 42 len 251"},
			[]packet.RETH{reth(0, 256), reth(256, 256), reth(512, 251)}},
		{verbs.OpRDMAWrite, 768, []string{"RDMA WRITE Only psn 40 len 256", "RDMA WRITE Only psn 41 len 256", "RDMA WRITE Only psn 42 len 256"},
			[]packet.RETH{reth(0, 256), reth(256, 256), reth(512, 256)}},
		{verbs.OpRDMAWrite, 769, []string{"RDMA WRITE First psn 40 len 256", "RDMA WRITE Middle psn 41 len 256", "RDMA WRITE Middle psn 42 len 256", "RDMA WRITE Last psn 43 len 1"},
			[]packet.RETH{reth(0, 769)}},
		{verbs.OpRDMAWriteImm, 257, []string{"RDMA WRITE First psn 40 len 256", "RDMA WRITE Last with immediate psn 41 len 1"}, []packet.RETH{reth(0, 257)}},
		{verbs.OpSend, 257, []string{"SEND First psn 40 len 256", "SEND Last psn 41 len 1"}, nil},
	} {
		t.Run(fmt.Sprintf("opcode %d of %d bytes", c.op, c.n), func(t *testing.T) {
			r := newRig(t, nil, Tuning{DivideWrites: 3, AskRarely: true})
			r.post(c.op, c.n, func(w *verbs.SendWorkRequest) { w.Flags |= verbs.SendSolicited })
			var data []byte
			for i, p := range r.expect(c.want...) {
				if i < len(c.reths) && p.RETH() != c.reths[i] {
					t.Errorf("%s: %+v, want %+v", p, p.RETH(), c.reths[i])
				}
				if last := i == len(c.want)-1; p.AckReq != last || p.Solicited != last {
					t.Errorf("%s: AckReq %v, solicited %v", p, p.AckReq, p.Solicited)
				}
				data = append(data, p.Payload...)
			}
			if !bytes.Equal(data, r.buf.buf[:c.n]) {
				t.Error("other bytes")
			}
			for i := range c.want {
				r.statuses()
				r.take(wire{op: packet.Acknowledge, psn: rigPSN + packet.PSN(i), syn: 0x1f})
			}
			r.statuses(ok)
		})
	}
}

// Going back into a divided WRITE begins with the packet that is missing, as a message of its own, whatever the tuning is by then.
func TestGoBackIntoDividedWrite(t *testing.T) {
	for name, lose := range map[string]func(r *rig){
		"NAK":                   func(r *rig) { r.take(wire{op: packet.Acknowledge, psn: 42, syn: 0x60}) },
		"acknowledged in parts": func(r *rig) { r.take(wire{op: packet.Acknowledge, psn: 41, syn: 0x1f}); r.expire() },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil, Tuning{DivideWrites: 8})
			r.post(verbs.OpRDMAWrite, 200)
			r.post(verbs.OpRDMAWrite, 700)
			r.expect("RDMA WRITE Only psn 40 len 200", "RDMA WRITE Only psn 41 len 256", "RDMA WRITE Only psn 42 len 256", "RDMA WRITE Only psn 43 len 188")
			r.q.SetTuning(Tuning{})
			lose(r)
			r.statuses(ok)
			p := r.expect("RDMA WRITE Only psn 42 len 256", "RDMA WRITE Only psn 43 len 188")
			for i, want := range []packet.RETH{{Addr: 0x9000 + 256, RKey: 0x77, Length: 256}, {Addr: 0x9000 + 512, RKey: 0x77, Length: 188}} {
				if p[i].RETH() != want || !bytes.Equal(p[i].Payload, r.buf.buf[256+256*i:][:want.Length]) {
					t.Errorf("%s: %+v, want %+v", p[i], p[i].RETH(), want)
				}
			}
			r.take(wire{op: packet.Acknowledge, psn: 42, syn: 0x1f})
			r.statuses()
			r.take(wire{op: packet.Acknowledge, psn: 43, syn: 0x1f})
			r.statuses(ok)
		})
	}
}

// A WRITE ends as it began when the tuning changes in the middle of it.
func TestDivisionIsKept(t *testing.T) {
	for _, c := range []struct {
		before, after int
		want          []string
	}{
		{0, 8, []string{"RDMA WRITE First psn 40 len 256", "RDMA WRITE Middle psn 41 len 256", "RDMA WRITE Last psn 42 len 88", "RDMA WRITE Only psn 43 len 256", "RDMA WRITE Only psn 44 len 4"}},
		{8, 0, []string{"RDMA WRITE Only psn 40 len 256", "RDMA WRITE Only psn 41 len 256", "RDMA WRITE Only psn 42 len 88", "RDMA WRITE First psn 43 len 256", "RDMA WRITE Last psn 44 len 4"}},
	} {
		r := newRig(t, nil, Tuning{Window: 1, DivideWrites: c.before})
		r.post(verbs.OpRDMAWrite, 600)
		r.post(verbs.OpRDMAWrite, 260)
		r.expect(c.want[0])
		r.q.SetTuning(Tuning{Window: 1, DivideWrites: c.after})
		for i, want := range c.want[1:] {
			r.take(wire{op: packet.Acknowledge, psn: rigPSN + packet.PSN(i), syn: 0x1f})
			r.expect(want)
		}
	}
}

// A local error in the middle of a divided WRITE ends the queue pair when all in front of it is complete; what has left of it is not sent again.
func TestLocalKeyOfDividedWrite(t *testing.T) {
	r := newRig(t, nil, Tuning{DivideWrites: 8})
	r.post(verbs.OpSend, 4)
	r.post(verbs.OpRDMAWrite, 0, func(w *verbs.SendWorkRequest) {
		bad := r.buf.sge(0, 300)
		bad.LKey++
		w.SGList = []verbs.SGE{r.buf.sge(0, 256), bad}
	})
	r.post(verbs.OpSend, 4)
	r.expect("SEND Only psn 40 len 4", "RDMA WRITE Only psn 41 len 256")
	r.statuses()
	r.take(wire{op: packet.Acknowledge, psn: 40, syn: 0x60})
	r.expect("SEND Only psn 40 len 4")
	r.take(wire{op: packet.Acknowledge, psn: 41, syn: 0x1f})
	r.statuses(ok, verbs.WCLocalProtectionError, verbs.WCFlushError)
	r.expect()
}

// A refusal in the middle of a divided WRITE is that WRITE's, whichever packet it names.
func TestRefusedDividedWrite(t *testing.T) {
	for psn := packet.PSN(41); psn < 44; psn++ {
		r := newRig(t, nil, Tuning{DivideWrites: 8})
		r.post(verbs.OpSend, 4)
		r.post(verbs.OpRDMAWrite, 700)
		r.post(verbs.OpRDMAWrite, 700)
		r.take(wire{op: packet.Acknowledge, psn: psn, syn: packet.NakRemoteAccess})
		r.statuses(ok, verbs.WCRemoteAccessError, verbs.WCFlushError)
	}
}

func TestAckReq(t *testing.T) {
	r := newRig(t, nil, Tuning{})
	r.post(verbs.OpSend, 200*256)
	if len(r.sent) != MaxWindow {
		t.Fatalf("%d packets in flight, window %d", len(r.sent), MaxWindow)
	}
	for i, p := range r.sent {
		if p.AckReq != (i == 63 || i == 127) {
			t.Errorf("packet %d: AckReq %v", i, p.AckReq)
		}
	}
	r.take(wire{op: packet.Acknowledge, psn: 40 + 127, syn: 0x1f})
	if n := len(r.sent); n != 200 || !r.sent[n-1].AckReq {
		t.Errorf("%d packets, AckReq %v on the last", n, r.sent[n-1].AckReq)
	}
	r = newRig(t, nil, Tuning{Window: 8})
	r.post(verbs.OpSend, 200*256)
	if len(r.sent) != 8 || !r.sent[3].AckReq || !r.sent[7].AckReq {
		t.Errorf("window 8: %v", r.sent)
	}
}

func TestReadChunksAndLimits(t *testing.T) {
	r := newRig(t, func(a *verbs.QPAttr) { a.MaxRdAtomic = 2 }, Tuning{Window: 16, ReadChunk: 4})
	r.post(verbs.OpRDMARead, 12*256)
	r.post(verbs.OpSend, 4, func(w *verbs.SendWorkRequest) { w.Flags |= verbs.SendFence })
	p := r.expect("RDMA READ Request psn 40 len 0", "RDMA READ Request psn 44 len 0") // two at a time
	if h := p[1].RETH(); h.Addr != 0x9000+4*256 || h.Length != 4*256 {
		t.Errorf("second chunk %+v", h)
	}
	psn := packet.PSN(40)
	chunk := func() {
		full := make([]byte, 256)
		r.take(wire{op: packet.ReadResponseFirst, psn: psn, syn: 0x1f, payload: full})
		r.take(wire{op: packet.ReadResponseMid, psn: psn + 1, payload: full})
		r.take(wire{op: packet.ReadResponseMid, psn: psn + 2, payload: full})
		r.take(wire{op: packet.ReadResponseLast, psn: psn + 3, syn: 0x1f, payload: full})
		psn += 4
	}
	chunk()
	r.expect("RDMA READ Request psn 48 len 0")
	chunk()
	r.expect()
	r.statuses()
	chunk()
	r.statuses(ok)
	r.expect("SEND Only psn 52 len 4") // the fence opens

	if _, err := newRig(t, func(a *verbs.QPAttr) { a.MaxRdAtomic = 0 }, Tuning{}).q.PostSend(0, []verbs.SendWorkRequest{{Opcode: verbs.OpRDMARead}}); err == nil {
		t.Error("READ accepted with max_rd_atomic 0")
	}
}

// What the responder must refuse: once, with the packet's PSN, and nothing after it.
func TestRefusals(t *testing.T) {
	full := make([]byte, 256)
	type step = wire
	good := func(r *rig) packet.RETH { return packet.RETH{Addr: r.buf.addr, RKey: r.buf.key, Length: 600} }
	for _, c := range []struct {
		name   string
		change func(*verbs.QPAttr)
		recv   int
		steps  func(r *rig) []step
		want   string
	}{
		{"SEND MIDDLE without FIRST", nil, 999, func(r *rig) []step { return []step{{op: packet.SendMiddle, psn: 40, payload: full}} }, "61"},
		{"SEND LAST without FIRST", nil, 999, func(r *rig) []step { return []step{{op: packet.SendLast, psn: 40, payload: full}} }, "61"},
		{"SEND FIRST twice", nil, 999, func(r *rig) []step {
			return []step{{op: packet.SendFirst, psn: 40, payload: full, noAck: true}, {op: packet.SendFirst, psn: 41, payload: full}}
		}, "61"},
		{"WRITE in a SEND", nil, 999, func(r *rig) []step {
			return []step{{op: packet.SendFirst, psn: 40, payload: full, noAck: true}, {op: packet.WriteMiddle, psn: 41, payload: full}}
		}, "61"},
		{"READ in a SEND", nil, 999, func(r *rig) []step {
			return []step{{op: packet.SendFirst, psn: 40, payload: full, noAck: true}, {op: packet.ReadRequest, psn: 41, reth: good(r)}}
		}, "61"},
		{"FIRST short", nil, 999, func(r *rig) []step { return []step{{op: packet.SendFirst, psn: 40, payload: full[:255]}} }, "61"},
		{"ONLY long", nil, 999, func(r *rig) []step { return []step{{op: packet.SendOnly, psn: 40, payload: make([]byte, 257)}} }, "61"},
		{"MIDDLE long", nil, 999, func(r *rig) []step {
			return []step{{op: packet.SendFirst, psn: 40, payload: full, noAck: true}, {op: packet.SendMiddle, psn: 41, payload: make([]byte, 260)}}
		}, "61"},
		{"LAST empty", nil, 999, func(r *rig) []step {
			return []step{{op: packet.SendFirst, psn: 40, payload: full, noAck: true}, {op: packet.SendLast, psn: 41}}
		}, "61"},
		{"longer than the receive", nil, 300, func(r *rig) []step {
			return []step{{op: packet.SendFirst, psn: 40, payload: full, noAck: true}, {op: packet.SendLast, psn: 41, payload: full[:45]}}
		}, "61"},
		{"WRITE key", nil, 0, func(r *rig) []step {
			h := good(r)
			h.RKey++
			return []step{{op: packet.WriteFirst, psn: 40, reth: h, payload: full}}
		}, "62"},
		{"WRITE beyond the region", nil, 0, func(r *rig) []step {
			h := good(r)
			h.Addr += uint64(len(r.buf.buf)) - 599
			return []step{{op: packet.WriteFirst, psn: 40, reth: h, payload: full}}
		}, "62"},
		{"WRITE that wraps", nil, 0, func(r *rig) []step {
			h := good(r)
			h.Addr = ^uint64(0) - 10
			return []step{{op: packet.WriteFirst, psn: 40, reth: h, payload: full}}
		}, "62"},
		{"WRITE not allowed by the queue pair", func(a *verbs.QPAttr) { a.Access = 0 }, 0, func(r *rig) []step {
			return []step{{op: packet.WriteFirst, psn: 40, reth: good(r), payload: full}}
		}, "61"},
		{"WRITE ONLY shorter than it says", nil, 0, func(r *rig) []step {
			return []step{{op: packet.WriteOnly, psn: 40, reth: good(r), payload: full}}
		}, "61"},
		{"WRITE FIRST that could be ONLY", nil, 0, func(r *rig) []step {
			h := good(r)
			h.Length = 256
			return []step{{op: packet.WriteFirst, psn: 40, reth: h, payload: full}}
		}, "61"},
		{"WRITE ends early", nil, 0, func(r *rig) []step {
			return []step{{op: packet.WriteFirst, psn: 40, reth: good(r), payload: full, noAck: true}, {op: packet.WriteLast, psn: 41, payload: full}}
		}, "61"},
		{"WRITE goes on too long", nil, 0, func(r *rig) []step {
			return []step{{op: packet.WriteFirst, psn: 40, reth: good(r), payload: full, noAck: true}, {op: packet.WriteMiddle, psn: 41, payload: full, noAck: true},
				{op: packet.WriteMiddle, psn: 42, payload: full}}
		}, "61"},
		{"WRITE of more than 2^31", nil, 0, func(r *rig) []step {
			h := good(r)
			h.Length = 1<<31 + 1
			return []step{{op: packet.WriteFirst, psn: 40, reth: h, payload: full}}
		}, "61"},
		{"READ key", nil, 0, func(r *rig) []step {
			h := good(r)
			h.RKey++
			return []step{{op: packet.ReadRequest, psn: 40, reth: h}}
		}, "62"},
		{"READ beyond the region", nil, 0, func(r *rig) []step {
			h := good(r)
			h.Length = 64<<10 + 1
			return []step{{op: packet.ReadRequest, psn: 40, reth: h}}
		}, "62"},
		{"READ not allowed by the queue pair", func(a *verbs.QPAttr) { a.Access = verbs.AccessRemoteWrite }, 0, func(r *rig) []step {
			return []step{{op: packet.ReadRequest, psn: 40, reth: good(r)}}
		}, "61"},
		{"READ with max_dest_rd_atomic 0", func(a *verbs.QPAttr) { a.MaxDestRdAtomic = 0 }, 0, func(r *rig) []step {
			return []step{{op: packet.ReadRequest, psn: 40, reth: good(r)}}
		}, "61"},
		{"READ with a payload", nil, 0, func(r *rig) []step {
			return []step{{op: packet.ReadRequest, psn: 40, reth: good(r), payload: full}}
		}, "61"},
		{"invalidate an unknown key", nil, 99, func(r *rig) []step { return []step{{op: packet.SendOnlyInv, psn: 40, imm: 0xbad}} }, "62"},
		{"COMPARE SWAP", nil, 0, func(r *rig) []step { return []step{{op: packet.CompareSwap, psn: 40}} }, "61"},
		{"FETCH ADD", nil, 0, func(r *rig) []step { return []step{{op: packet.FetchAdd, psn: 40}} }, "61"},
		{"FLUSH", nil, 0, func(r *rig) []step { return []step{{op: packet.Flush, psn: 40}} }, "61"},
		{"ATOMIC WRITE", nil, 0, func(r *rig) []step { return []step{{op: packet.AtomicWrite, psn: 40, payload: full[:8]}} }, "61"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, c.change, Tuning{})
			if c.recv > 0 {
				r.recv(c.recv)
			}
			was := bytes.Clone(r.buf.buf)
			st := c.steps(r)
			var last packet.PSN
			for _, s := range st {
				r.take(s)
				last = s.psn
			}
			r.end(fmt.Sprintf("Acknowledge psn %d len 0 syndrome %s msn 0", last, c.want))
			if r.q.State() != verbs.QPError || len(r.events) != 1 {
				t.Errorf("state %s, events %v", r.q.State(), r.events)
			}
			if c.recv > 0 && (len(r.done) != 1 || r.done[0].wc.Status == ok) {
				t.Errorf("completions %+v", r.done)
			}
			if len(st) == 1 && !bytes.Equal(was, r.buf.buf) {
				t.Error("memory was touched")
			}
			for _, s := range st {
				r.take(s)
			}
			r.end()
		})
	}
}

func TestLocalKeyOfReceive(t *testing.T) {
	r := newRig(t, nil, Tuning{})
	r.q.PostRecv([]verbs.RecvWorkRequest{{WRID: 1, SGList: []verbs.SGE{{Addr: 1, Length: 100, LKey: 2}}}})
	r.take(wire{op: packet.SendOnly, psn: 40, payload: make([]byte, 10)})
	r.end("Acknowledge psn 40 len 0 syndrome 63 msn 0")
	r.statuses(verbs.WCLocalProtectionError)

	r = newRig(t, nil, Tuning{})
	r.post(verbs.OpSend, 4)
	r.post(verbs.OpSend, 4, func(w *verbs.SendWorkRequest) { w.SGList[0].LKey++ })
	r.post(verbs.OpSend, 4)
	r.expect("SEND Only psn 40 len 4")
	r.statuses() // the one in front may still succeed
	r.take(wire{op: packet.Acknowledge, psn: 40, syn: 0x1f})
	r.statuses(ok, verbs.WCLocalProtectionError, verbs.WCFlushError)
}

func TestEmptyMessages(t *testing.T) {
	r := newRig(t, nil, Tuning{})
	r.take(wire{op: packet.WriteOnly, psn: 40})
	r.take(wire{op: packet.ReadRequest, psn: 41})
	r.expect("RDMA READ Response Only psn 41 len 0 syndrome 1f msn 2")
	r.recv(8)
	r.take(wire{op: packet.SendOnly, psn: 42})
	r.end("Acknowledge psn 42 len 0 syndrome 1f msn 3")
	if len(r.done) != 1 || r.done[0].wc.ByteLen != 0 {
		t.Errorf("completions %+v", r.done)
	}
	// And again, as duplicates: the WRITE in front of the READ is acknowledged by its own PSN, for an ACK must not claim the READ.
	r.take(wire{op: packet.WriteOnly, psn: 40})
	r.take(wire{op: packet.ReadRequest, psn: 41})
	r.take(wire{op: packet.SendOnly, psn: 42})
	r.expect("RDMA READ Response Only psn 41 len 0 syndrome 1f msn 2")
	r.end("Acknowledge psn 42 len 0 syndrome 1f msn 3")
	if len(r.done) != 1 {
		t.Errorf("a duplicate SEND completed a receive: %+v", r.done)
	}

	r = newRig(t, nil, Tuning{})
	r.take(wire{op: packet.WriteOnly, psn: 40})
	r.end("Acknowledge psn 40 len 0 syndrome 1f msn 1")
	r.take(wire{op: packet.ReadRequest, psn: 41})
	r.expect("RDMA READ Response Only psn 41 len 0 syndrome 1f msn 2")
	r.take(wire{op: packet.WriteOnly, psn: 40})
	r.end("Acknowledge psn 40 len 0 syndrome 1f msn 2")

	r.post(verbs.OpSend, 0)
	r.post(verbs.OpRDMAWrite, 0)
	r.post(verbs.OpRDMARead, 0)
	r.expect("SEND Only psn 40 len 0", "RDMA WRITE Only psn 41 len 0", "RDMA READ Request psn 42 len 0")
	r.take(wire{op: packet.ReadResponseOnly, psn: 42, syn: 0x1f})
	r.statuses(ok, ok, ok)
}

func TestOneNakPerGap(t *testing.T) {
	r := newRig(t, nil, Tuning{})
	r.recv(8)
	r.recv(8)
	r.recv(8)
	r.take(wire{op: packet.SendOnly, psn: 41})
	r.end("Acknowledge psn 40 len 0 syndrome 60 msn 0")
	r.take(wire{op: packet.SendOnly, psn: 42})
	r.take(wire{op: packet.SendOnly, psn: 43})
	r.end()
	r.take(wire{op: packet.SendOnly, psn: 40})
	r.end("Acknowledge psn 40 len 0 syndrome 1f msn 1")
	r.take(wire{op: packet.SendOnly, psn: 42})
	r.end("Acknowledge psn 41 len 0 syndrome 60 msn 1") // a new gap
	r.take(wire{op: packet.SendOnly, psn: 41})
	r.end("Acknowledge psn 41 len 0 syndrome 1f msn 2")

	// Swapped within one batch: the NAK had not left, and what was dropped is named.
	r.take(wire{op: packet.SendOnly, psn: 43})
	r.take(wire{op: packet.SendOnly, psn: 42})
	r.end("Acknowledge psn 43 len 0 syndrome 60 msn 3")
}

func TestRNRNak(t *testing.T) {
	r := newRig(t, func(a *verbs.QPAttr) { a.MinRNRTimer = 12 }, Tuning{})
	r.take(wire{op: packet.SendOnly, psn: 40, payload: []byte{1, 2, 3, 4}})
	r.take(wire{op: packet.SendOnly, psn: 41, payload: []byte{5}})
	r.end("Acknowledge psn 40 len 0 syndrome 2c msn 0")
	r.recv(8)
	r.take(wire{op: packet.SendOnly, psn: 40, payload: []byte{1, 2, 3, 4}})
	r.end("Acknowledge psn 40 len 0 syndrome 1f msn 1")
	// WRITE with immediate needs a receive too, and writes nothing before it has one.
	h := packet.RETH{Addr: r.buf.addr, RKey: r.buf.key, Length: 4}
	was := bytes.Clone(r.buf.buf[:4])
	r.take(wire{op: packet.WriteOnlyImm, psn: 41, reth: h, imm: 7, payload: []byte{9, 9, 9, 9}})
	r.end("Acknowledge psn 41 len 0 syndrome 2c msn 1")
	if !bytes.Equal(was, r.buf.buf[:4]) {
		t.Error("written without a receive")
	}
	r.recv(8)
	r.take(wire{op: packet.WriteOnlyImm, psn: 41, reth: h, imm: 7, payload: []byte{9, 9, 9, 9}})
	r.end("Acknowledge psn 41 len 0 syndrome 1f msn 2")
	c := r.done[1].wc
	if c.Opcode != verbs.WCRecvRDMAWr || c.ByteLen != 4 || c.ImmData != 7 || c.Flags != verbs.WCWithImm || r.buf.buf[3] != 9 {
		t.Errorf("%+v", c)
	}
}

func TestReadReplay(t *testing.T) {
	r := newRig(t, nil, Tuning{})
	h := packet.RETH{Addr: r.buf.addr + 3, RKey: r.buf.key, Length: 900}
	r.take(wire{op: packet.ReadRequest, psn: 40, reth: h})
	p := r.expect("RDMA READ Response First psn 40 len 256 syndrome 1f msn 1", "RDMA READ Response Middle psn 41 len 256",
		"RDMA READ Response Middle psn 42 len 256", "RDMA READ Response Last psn 43 len 132 syndrome 1f msn 1")
	if !bytes.Equal(p[3].Payload, r.buf.buf[3+768:3+900]) {
		t.Error("other bytes")
	}
	// The rest, asked for as rxe and this stack do.
	rest := func(off uint64, n uint32) packet.RETH {
		return packet.RETH{Addr: h.Addr + off, RKey: h.RKey, Length: n}
	}
	r.take(wire{op: packet.ReadRequest, psn: 42, reth: rest(512, 388)})
	r.expect("RDMA READ Response Middle psn 42 len 256", "RDMA READ Response Last psn 43 len 132 syndrome 1f msn 1")
	r.take(wire{op: packet.ReadRequest, psn: 43, reth: rest(768, 132)})
	r.expect("RDMA READ Response Last psn 43 len 132 syndrome 1f msn 1")
	r.take(wire{op: packet.ReadRequest, psn: 40, reth: h})
	if len(r.expect("RDMA READ Response First psn 40 len 256 syndrome 1f msn 1", "RDMA READ Response Middle psn 41 len 256",
		"RDMA READ Response Middle psn 42 len 256", "RDMA READ Response Last psn 43 len 132 syndrome 1f msn 1")) != 4 {
		t.Fail()
	}
	// Not within what is remembered: dropped.
	for _, w := range []wire{
		{op: packet.ReadRequest, psn: 41, reth: rest(512, 388)},
		{op: packet.ReadRequest, psn: 40, reth: rest(0, 901)},
		{op: packet.ReadRequest, psn: 39, reth: h},
		{op: packet.ReadRequest, psn: 40, reth: packet.RETH{Addr: h.Addr, RKey: h.RKey + 1, Length: 900}},
		{op: packet.ReadRequest, psn: 43, reth: rest(768, 0)},
	} {
		r.take(w)
		r.end()
	}
	// Nor with a revoked key: no answer at all.
	delete(r.mem.regions, h.RKey)
	r.take(wire{op: packet.ReadRequest, psn: 40, reth: h})
	r.end()
	if r.q.State() != verbs.QPReadyToSend {
		t.Error("a late duplicate ended the connection")
	}
}

// READ responses are paced; acknowledgements and later READs keep behind them.
func TestPacedResponses(t *testing.T) {
	r := newRig(t, nil, Tuning{ReadBurst: 2, ReadInterval: time.Millisecond})
	r.recv(8)
	r.take(wire{op: packet.ReadRequest, psn: 40, reth: packet.RETH{Addr: r.buf.addr, RKey: r.buf.key, Length: 700}})
	r.take(wire{op: packet.SendOnly, psn: 43})
	r.take(wire{op: packet.ReadRequest, psn: 44, reth: packet.RETH{Addr: r.buf.addr, RKey: r.buf.key, Length: 5}})
	r.recv(8)
	r.take(wire{op: packet.SendOnly, psn: 45})
	r.end("RDMA READ Response First psn 40 len 256 syndrome 1f msn 1", "RDMA READ Response Middle psn 41 len 256")
	if d := r.q.Deadline(); d != r.now.Add(time.Millisecond) {
		t.Errorf("deadline %d", d)
	}
	r.expire()
	r.expect("RDMA READ Response Last psn 42 len 188 syndrome 1f msn 1", "RDMA READ Response Only psn 44 len 5 syndrome 1f msn 3",
		"Acknowledge psn 45 len 0 syndrome 1f msn 4")
}

// A peer may not have more READs outstanding than was agreed.
func TestReadLimitOfPeer(t *testing.T) {
	r := newRig(t, func(a *verbs.QPAttr) { a.MaxDestRdAtomic = 2 }, Tuning{ReadBurst: 1, ReadInterval: time.Millisecond})
	h := packet.RETH{Addr: r.buf.addr, RKey: r.buf.key, Length: 256 * 3}
	r.take(wire{op: packet.ReadRequest, psn: 40, reth: h})
	r.take(wire{op: packet.ReadRequest, psn: 43, reth: h})
	r.take(wire{op: packet.ReadRequest, psn: 46, reth: h})
	if r.q.State() != verbs.QPError || r.sent[len(r.sent)-1].AETH().Syndrome != packet.NakInvalidRequest {
		t.Errorf("%s, %v", r.q.State(), r.sent)
	}
	// The READs in front were answered first.
	if len(r.sent) != 7 {
		t.Errorf("%v", r.sent)
	}
}

func TestRevokedDuringAnswer(t *testing.T) {
	r := newRig(t, nil, Tuning{ReadBurst: 1, ReadInterval: time.Millisecond})
	r.take(wire{op: packet.ReadRequest, psn: 40, reth: packet.RETH{Addr: r.buf.addr, RKey: r.buf.key, Length: 600}})
	delete(r.mem.regions, r.buf.key)
	r.expire()
	r.expect("RDMA READ Response First psn 40 len 256 syndrome 1f msn 1", "Acknowledge psn 41 len 0 syndrome 62 msn 1")
	if r.q.State() != verbs.QPError {
		t.Error(r.q.State())
	}
	r = newRig(t, nil, Tuning{})
	r.take(wire{op: packet.WriteFirst, psn: 40, reth: packet.RETH{Addr: r.buf.addr, RKey: r.buf.key, Length: 600}, payload: make([]byte, 256), noAck: true})
	delete(r.mem.regions, r.buf.key)
	r.take(wire{op: packet.WriteMiddle, psn: 41, payload: make([]byte, 256)})
	r.end("Acknowledge psn 41 len 0 syndrome 62 msn 0")
}

func TestAckDelay(t *testing.T) {
	r := newRig(t, nil, Tuning{AckDelay: 100 * time.Microsecond, AckEvery: 3})
	for range 8 {
		r.recv(8)
	}
	r.take(wire{op: packet.SendOnly, psn: 40})
	r.end()
	if !r.q.AckPending() {
		t.Error("no acknowledgement pending")
	}
	r.post(verbs.OpSend, 4) // company
	r.expect("SEND Only psn 40 len 4", "Acknowledge psn 40 len 0 syndrome 1f msn 1")
	r.take(wire{op: packet.Acknowledge, psn: 40, syn: 0x1f})
	r.take(wire{op: packet.SendOnly, psn: 41})
	r.end()
	if d := r.q.Deadline(); d != r.now.Add(100*time.Microsecond) {
		t.Fatalf("deadline %d", d)
	}
	r.expire()
	r.expect("Acknowledge psn 41 len 0 syndrome 1f msn 2")
	for i := range packet.PSN(3) {
		r.end()
		r.take(wire{op: packet.SendOnly, psn: 42 + i})
	}
	r.end("Acknowledge psn 44 len 0 syndrome 1f msn 5")
	r.take(wire{op: packet.SendOnly, psn: 47}) // bad news does not wait
	r.end("Acknowledge psn 45 len 0 syndrome 60 msn 5")
	// Without AckReq nothing is owed.
	r.take(wire{op: packet.WriteOnly, psn: 45, noAck: true})
	r.end()
	if r.q.AckPending() {
		t.Error("acknowledgement without AckReq")
	}
}

// A message that asks for no acknowledgement gets one: behind requests when there is enough to acknowledge, or when its time is up.
func TestAckUnasked(t *testing.T) {
	r := newRig(t, nil, Tuning{AckDelay: 100 * time.Microsecond, AckUnasked: time.Millisecond, AckEvery: 64})
	psn := packet.PSN(40)
	unasked := func(n int) {
		t.Helper()
		for range n {
			r.recv(8)
			r.take(wire{op: packet.SendOnly, psn: psn, noAck: true})
			psn = psn.Add(1)
		}
		r.end()
	}
	unasked(1)
	if d := r.q.Deadline(); d != r.now.Add(time.Millisecond) {
		t.Fatalf("deadline %d", d)
	}
	r.post(verbs.OpSend, 4)
	r.expect("SEND Only psn 40 len 4") // company, but too little to say
	r.take(wire{op: packet.Acknowledge, psn: 40, syn: 0x1f})
	unasked(unaskedEvery - 1)
	r.post(verbs.OpSend, 4)
	r.expect("SEND Only psn 41 len 4", "Acknowledge psn 55 len 0 syndrome 1f msn 16")
	r.take(wire{op: packet.Acknowledge, psn: 41, syn: 0x1f})
	unasked(1)
	r.expire()
	r.expect("Acknowledge psn 56 len 0 syndrome 1f msn 17")
	// One that asks brings the time forward, and takes the first company.
	unasked(1)
	r.recv(8)
	r.take(wire{op: packet.SendOnly, psn: psn})
	r.end()
	if d := r.q.Deadline(); d != r.now.Add(100*time.Microsecond) {
		t.Fatalf("deadline %d after a message that asks", d)
	}
	r.post(verbs.OpSend, 4)
	r.expect("SEND Only psn 42 len 4", "Acknowledge psn 58 len 0 syndrome 1f msn 19")
	r.take(wire{op: packet.Acknowledge, psn: 42, syn: 0x1f})
	psn = psn.Add(1)
	// Without company after AckEvery packets, and after half as many more when the consumer was given completions.
	unasked(63)
	r.expect()
	r.recv(8)
	r.take(wire{op: packet.SendOnly, psn: psn, noAck: true})
	r.q.EndBatch(r.now, true)
	r.expect()
	r.end("Acknowledge psn 122 len 0 syndrome 1f msn 83")
}

// Who asks rarely asks for what completes with an entry, for what is sent again, and when the send queue fills up.
func TestAskRarely(t *testing.T) {
	r := newRig(t, nil, Tuning{AskRarely: true})
	asks := func(want bool) {
		t.Helper()
		if len(r.sent) != 1 || r.sent[0].AckReq != want {
			t.Errorf("sent %v, want one packet that asks: %v", r.sent, want)
		}
		r.sent = nil
	}
	quiet := func(w *verbs.SendWorkRequest) { w.Flags = 0 }
	r.post(verbs.OpSend, 8, quiet)
	asks(false)
	r.post(verbs.OpSend, 8)
	asks(true)
	r.take(wire{op: packet.Acknowledge, psn: 41, syn: 0x1f})
	r.post(verbs.OpSend, 8, quiet)
	asks(false)
	r.expire() // the ACK timeout
	asks(true)
}

// The Output refuses: nothing is lost, nothing is sent twice, the timer does not count it as a loss.
func TestNoRoom(t *testing.T) {
	r := newRig(t, nil, Tuning{})
	r.room = 2
	r.post(verbs.OpSend, 1000)
	r.expect("SEND First psn 40 len 256", "SEND Middle psn 41 len 256")
	if !r.q.Blocked() {
		t.Error("not blocked")
	}
	for range 20 {
		r.room = 0
		r.expire() // however long it lasts
	}
	r.room = 1
	r.q.Pump(r.now)
	r.room = -1
	r.q.Pump(r.now)
	r.expect("SEND Middle psn 42 len 256", "SEND Last psn 43 len 232")
	r.take(wire{op: packet.Acknowledge, psn: 43, syn: 0x1f})
	r.statuses(ok)

	r.room = 1
	r.take(wire{op: packet.ReadRequest, psn: 40, reth: packet.RETH{Addr: r.buf.addr, RKey: r.buf.key, Length: 600}})
	r.take(wire{op: packet.WriteOnly, psn: 43})
	r.q.EndBatch(r.now, false)
	r.room = 2
	r.q.Pump(r.now)
	r.room = -1
	r.q.Pump(r.now)
	r.expect("RDMA READ Response First psn 40 len 256 syndrome 1f msn 1", "RDMA READ Response Middle psn 41 len 256",
		"RDMA READ Response Last psn 42 len 88 syndrome 1f msn 1", "Acknowledge psn 43 len 0 syndrome 1f msn 2")
}

func TestIgnoredPackets(t *testing.T) {
	r := newRig(t, nil, Tuning{})
	r.recv(8)
	raw := func(change func(h *packet.BTH)) {
		h := packet.BTH{Opcode: packet.SendOnly, PKey: 0xffff, DestQPN: 0x12, PSN: 40, AckReq: true}
		change(&h)
		b := make([]byte, h.Opcode.HeaderLen()+4)
		h.Put(b)
		var p packet.Packet
		if err := p.Parse(b); err != nil {
			t.Fatal(err)
		}
		r.q.Receive(0, &p)
		r.end()
	}
	raw(func(h *packet.BTH) { h.PKey = 0xfffe })
	raw(func(h *packet.BTH) { h.Opcode = packet.UDSendOnly })
	raw(func(h *packet.BTH) { h.Opcode = packet.AtomicAcknowledge })
	raw(func(h *packet.BTH) { h.Opcode = packet.Acknowledge })
	if len(r.done) != 0 {
		t.Error("completed")
	}
	raw2 := packet.BTH{Opcode: packet.SendOnly, PKey: 0x7fff, DestQPN: 0x12, PSN: 40}
	b := make([]byte, 16)
	raw2.Put(b)
	var p packet.Packet
	p.Parse(b)
	r.q.Receive(0, &p)
	r.statuses(ok) // a limited member is welcome at a full one
}

func TestStates(t *testing.T) {
	r := &rig{t: t, mem: newTestMemory(1), room: -1}
	r.buf = r.mem.register(make([]byte, 64<<10), allAccess)
	q := New(Config{QPN: 0x12, Cap: verbs.QPCap{MaxSendWR: 3, MaxRecvWR: 3}}, r.mem, r)
	r.q = q
	at := baseAttr()
	at.PathMTU, at.DestQPN = verbs.MTU1024, 1
	to := func(s verbs.QPState, m verbs.QPAttrMask) error {
		at.State = s
		return q.Modify(0, &at, m)
	}
	if _, err := q.PostRecv(make([]verbs.RecvWorkRequest, 1)); err == nil {
		t.Error("receive taken in RESET")
	}
	if to(verbs.QPReadyToReceive, verbs.QPMaskToRTR) == nil || to(verbs.QPInitState, verbs.QPMaskState) == nil {
		t.Error("RESET left without INIT or without attributes")
	}
	if err := to(verbs.QPInitState, verbs.QPMaskToInit); err != nil {
		t.Fatal(err)
	}
	if n, err := q.PostRecv(make([]verbs.RecvWorkRequest, 5)); n != 3 || err != verbs.ErrQueueFull {
		t.Errorf("PostRecv of 5 in a ring of 3: %d, %v", n, err)
	}
	r.take(wire{op: packet.SendOnly, psn: 0})
	r.end()
	for _, bad := range []func(){func() { at.PathMTU = 6 }, func() { at.RQPSN = 1 << 24 }, func() { at.DestQPN = 0 }, func() { at.MinRNRTimer = 32 }, func() { at.MaxDestRdAtomic = 200 }} {
		was := at
		bad()
		if to(verbs.QPReadyToReceive, verbs.QPMaskToRTR) == nil {
			t.Errorf("taken: %+v", at)
		}
		at = was
	}
	if err := to(verbs.QPReadyToReceive, verbs.QPMaskToRTR); err != nil {
		t.Fatal(err)
	}
	if _, err := q.PostSend(0, make([]verbs.SendWorkRequest, 1)); err == nil {
		t.Error("send taken in RTR")
	}
	r.take(wire{op: packet.SendOnly, psn: 0})
	r.end("Acknowledge psn 0 len 0 syndrome 1f msn 1") // requests are served in RTR
	if err := to(verbs.QPReadyToSend, verbs.QPMaskToRTS); err != nil {
		t.Fatal(err)
	}
	if to(verbs.QPReadyToSend, verbs.QPMaskState|verbs.QPMaskSQPSN) == nil {
		t.Error("PSN changed in RTS")
	}
	wr := []verbs.SendWorkRequest{{Opcode: verbs.OpSend}, {Opcode: verbs.OpSend}, {Opcode: verbs.OpSend}, {Opcode: verbs.OpSend}}
	if n, err := q.PostSend(0, wr); n != 3 || err != verbs.ErrQueueFull {
		t.Errorf("PostSend of 4 in a ring of 3: %d, %v", n, err)
	}
	r.done = nil
	if err := to(verbs.QPError, verbs.QPMaskState); err != nil {
		t.Fatal(err)
	}
	r.statuses(verbs.WCFlushError, verbs.WCFlushError, verbs.WCFlushError, verbs.WCFlushError, verbs.WCFlushError) // 3 sends, 2 receives
	if len(r.events) != 0 {
		t.Error("an event for what the caller did")
	}
	if to(verbs.QPReadyToSend, verbs.QPMaskToRTS) == nil {
		t.Error("ERR left for RTS")
	}
	// Round again.
	if err := to(verbs.QPReset, verbs.QPMaskState); err != nil {
		t.Fatal(err)
	}
	at.SQPSN, at.RQPSN = 9, 9
	if to(verbs.QPInitState, verbs.QPMaskToInit) != nil || to(verbs.QPReadyToReceive, verbs.QPMaskToRTR) != nil || to(verbs.QPReadyToSend, verbs.QPMaskToRTS) != nil {
		t.Fatal("second life")
	}
	r.sent = nil
	r.post(verbs.OpSend, 0)
	r.expect("SEND Only psn 9 len 0")
	r.take(wire{op: packet.WriteOnly, psn: 9})
	r.end("Acknowledge psn 9 len 0 syndrome 1f msn 1")
}

func TestPostErrors(t *testing.T) {
	r := newRig(t, nil, Tuning{})
	sg := r.buf.sge(0, 10)
	for name, wr := range map[string]verbs.SendWorkRequest{
		"opcode":        {Opcode: 5},
		"SGEs":          {SGList: []verbs.SGE{sg, sg, sg}},
		"length":        {SGList: []verbs.SGE{{Length: 1 << 30}, {Length: 1}}},
		"inline":        {SGList: []verbs.SGE{r.buf.sge(0, 65)}, Flags: verbs.SendInline},
		"inline READ":   {Opcode: verbs.OpRDMARead, Flags: verbs.SendInline},
		"bind":          {Opcode: verbs.OpBindMW},
		"inline nobody": {SGList: []verbs.SGE{{Addr: 3, Length: 3}}, Flags: verbs.SendInline},
	} {
		if n, err := r.q.PostSend(0, []verbs.SendWorkRequest{{Opcode: verbs.OpSend}, wr, {Opcode: verbs.OpSend}}); n != 1 || err == nil {
			t.Errorf("%s: %d, %v", name, n, err)
		}
	}
}

// Memory that an inline send named may change at once.
func TestInlineIsCopied(t *testing.T) {
	r := newRig(t, nil, Tuning{Window: 1})
	r.post(verbs.OpSend, 4)
	r.post(verbs.OpSend, 40, func(w *verbs.SendWorkRequest) { w.Flags |= verbs.SendInline; w.SGList[0].LKey = 0 })
	want := bytes.Clone(r.buf.buf[:40])
	clear(r.buf.buf)
	r.sent = nil
	r.take(wire{op: packet.Acknowledge, psn: 40, syn: 0x1f})
	if p := r.expect("SEND Only psn 41 len 40"); !bytes.Equal(p[0].Payload, want) {
		t.Error("sent what is there now")
	}
}

// Each packet is told where the next one's payload lies, if it lies in registered memory.
func TestAhead(t *testing.T) {
	r := newRig(t, nil, Tuning{})
	write := func(sg ...verbs.SGE) verbs.SendWorkRequest {
		return verbs.SendWorkRequest{Opcode: verbs.OpRDMAWrite, RemoteAddr: 0x9000, RKey: 0x77, SGList: sg}
	}
	inline := write(r.buf.sge(0, 32))
	inline.Flags = verbs.SendInline
	read := write(r.buf.sge(4096, 512))
	read.Opcode = verbs.OpRDMARead
	wrs := []verbs.SendWorkRequest{
		write(r.buf.sge(20000, 100), r.buf.sge(8000, 668)), // three packets, the first of both pieces
		write(r.buf.sge(512, 256)),
		inline,
		write(), // empty
		read,
		write(r.buf.sge(16, 16)),
	}
	if n, err := r.q.PostSend(r.now, wrs); n != len(wrs) || err != nil {
		t.Fatalf("PostSend: %d, %v", n, err)
	}
	at := func(off int) uint64 { return r.buf.addr + uint64(off) }
	want := []uint64{at(8000 + 156), at(8000 + 412), at(512), 0, 0, 0, 0, 0}
	if len(r.sent) != len(want) {
		t.Fatalf("%d packets, want %d", len(r.sent), len(want))
	}
	for i, w := range want {
		if got := r.sent[i].ahead; got != w {
			t.Errorf("%s is told 0x%x, want 0x%x", r.sent[i], got, w)
		}
	}
}

// So is each packet of a READ's answer.
func TestAheadOfReadResponse(t *testing.T) {
	r := newRig(t, nil, Tuning{})
	r.take(wire{op: packet.ReadRequest, psn: rigPSN, reth: packet.RETH{Addr: r.buf.addr + 64, RKey: r.buf.key, Length: 600}})
	want := []uint64{r.buf.addr + 64 + 256, r.buf.addr + 64 + 512, 0}
	if len(r.sent) != len(want) {
		t.Fatalf("%d packets, want %d", len(r.sent), len(want))
	}
	for i, w := range want {
		if got := r.sent[i].ahead; got != w {
			t.Errorf("%s is told 0x%x, want 0x%x", r.sent[i], got, w)
		}
	}
}
