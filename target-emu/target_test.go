package targetemu

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"srp-initiator/completion"
	"srp-initiator/internal/require"
	"srp-initiator/rdma"
	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/softroce"
	"srp-initiator/rdma/verbs"
	"srp-initiator/srp/iu"
	"srp-initiator/target-emu/lun"
	"srp-initiator/target-emu/lun/luntest"
)

// The peer of these tests writes its information units as bytes, from the offsets of SRP r16a and <scsi/srp.h>: it does not use package iu, so
// that a mistake that both ends of this project share shows.

// rig is a running target on a softroce device of its own.
type rig struct {
	t      *testing.T
	target *Target
	fabric *rdma.Fabric
	units  map[uint32]*lun.Unit
	cancel context.CancelFunc
	served chan error
}

func openFabric(t testing.TB) *rdma.Fabric {
	t.Helper()
	f, err := rdma.Open("softroce")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// newRig serves specs: "0=ram:1m". cfg.Units and cfg.Listen are filled in.
func newRig(t *testing.T, cfg Config, script string, specs ...string) *rig {
	t.Helper()
	return newRigWith(t, cfg, script, map[uint32]*lun.Unit{}, specs...)
}

// newRigWith serves units too, and closes them.
func newRigWith(t *testing.T, cfg Config, script string, units map[uint32]*lun.Unit, specs ...string) *rig {
	t.Helper()
	r := &rig{t: t, fabric: openFabric(t), units: maps.Clone(units), served: make(chan error, 1)}
	cfg.Units = &lun.Map{}
	for n, u := range units {
		if err := cfg.Units.Add(n, u); err != nil {
			t.Fatal(err)
		}
	}
	if len(specs) == 0 {
		specs = []string{"0=ram:8m"}
	}
	for _, s := range specs {
		num, spec, _ := strings.Cut(s, "=")
		u := luntest.Unit(t, spec, lun.Config{Serial: s})
		n, err := strconv.ParseUint(num, 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		if err := cfg.Units.Add(uint32(n), u); err != nil {
			t.Fatal(err)
		}
		r.units[uint32(n)] = u
	}
	if script != "" {
		f, err := ParseFaults(script)
		if err != nil {
			t.Fatal(err)
		}
		cfg.Faults = f
	}
	g, err := r.fabric.Context().QueryGID(1, 0)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Listen = netip.AddrPortFrom(g.GID.Addr(), 5555)
	if r.target, err = New(r.fabric.Context(), r.fabric.Connector(), cfg); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	go func() { r.served <- r.target.Serve(ctx) }()
	t.Cleanup(func() {
		r.stop()
		for _, u := range units {
			u.Close()
		}
	})
	return r
}

func (r *rig) stop() {
	r.cancel()
	select {
	case err := <-r.served:
		if err != nil {
			r.t.Errorf("Serve: %v", err)
		}
		r.served <- nil
	case <-time.After(20 * time.Second):
		buf := make([]byte, 1<<20)
		r.t.Fatalf("Serve does not end:\n%s", buf[:runtime.Stack(buf, true)])
	}
}

// peer is a raw initiator with one channel.
type peer struct {
	t    testing.TB
	f    *rdma.Fabric
	pd   verbs.ProtectionDomain
	cq   verbs.CompletionQueue
	qp   verbs.QueuePair
	mem  *hostmem.Region
	mr   verbs.MemoryRegion
	conn cm.Conn
	rsp  []byte // private data of the REP
	got  [][]byte
	last int // completions of the last poll that had any

	ctx      context.Context // of the login; nil: none
	patience time.Duration   // for the answer to the login; 0: 10 s
	broken   error           // why the queue pair has failed
}

const (
	peerSlots = 64
	peerSlot  = 1024
	peerTx    = peerSlots * peerSlot // transmit slot of 16 KiB
	peerData  = peerTx + 16384       // data
	peerMem   = peerData + 4<<20
	imm       = 68
)

var errTimeout = errors.New("nothing came within the time")

func newPeer(t testing.TB, f *rdma.Fabric) *peer {
	t.Helper()
	p := &peer{t: t, f: f}
	var err error
	fatal := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	p.pd, err = f.Context().AllocPD()
	fatal(err)
	p.cq, err = f.Context().CreateCQ(verbs.CQInit{Capacity: 512})
	fatal(err)
	p.qp, err = p.pd.CreateQP(verbs.QPInit{SendCQ: p.cq, RecvCQ: p.cq, Cap: verbs.QPCap{MaxSendWR: 128, MaxRecvWR: peerSlots, MaxSendSGE: 1, MaxRecvSGE: 1}})
	fatal(err)
	p.mem, err = hostmem.Alloc(peerMem)
	fatal(err)
	p.mr, err = p.pd.RegisterMemory(p.mem, verbs.AccessLocalWrite|verbs.AccessRemoteRead|verbs.AccessRemoteWrite)
	fatal(err)
	t.Cleanup(p.close)
	return p
}

func (p *peer) close() {
	if p.qp == nil {
		return
	}
	if p.conn != nil {
		p.conn.Disconnect()
	}
	p.qp.Destroy()
	p.qp = nil
	p.cq.Destroy()
	p.mr.Deregister()
	p.mem.Free()
	p.pd.Dealloc()
	if p.conn != nil {
		p.conn.Close()
	}
}

// loginBytes is the RDMA/CM login form (56 bytes), written by hand.
func loginBytes(port byte, target [16]byte, multi bool) []byte {
	b := make([]byte, 56)
	copy(b[0:], []byte{1, 2, 3, 4, 5, 6, 7, 8}) // tag
	b[9] = 0x06                                 // direct and indirect
	b[10] = 0x80                                // immediate data
	if multi {
		b[10] |= 0x01
	}
	copy(b[12:], []byte{0, 0, 0x20, 0x44}) // 8260
	b[31] = port
	copy(b[32:], target[:])
	b[49] = imm
	return b
}

// connect logs in with data; it returns the rejection's private data on refusal.
func (p *peer) connect(r *rig, data []byte) (rej []byte) {
	p.t.Helper()
	rej, err := p.dial(r, data)
	if err != nil {
		p.t.Fatalf("connect: %v", err)
	}
	return rej
}

// dial is connect for logins that may come to nothing.
func (p *peer) dial(r *rig, data []byte) (rej []byte, err error) {
	p.t.Helper()
	ctx := p.ctx
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, max(15*time.Second, p.patience+5*time.Second))
	defer cancel()
	conn, err := p.f.Connector().Resolve(ctx, netip.AddrPort{}, cm.Addr{IP: r.target.Addr()})
	if err != nil {
		p.t.Fatal(err)
	}
	p.conn = conn
	if err := conn.InitQP(p.qp); err != nil {
		p.t.Fatal(err)
	}
	for i := range peerSlots {
		p.post(i)
	}
	rep, err := conn.Connect(ctx, cm.ConnParam{PrivateData: data, ResponderResources: 4, RetryCount: 7, RNRRetryCount: 7, FlowControl: true, Timeout: p.patience})
	var re *cm.RejectError
	switch {
	case errors.As(err, &re):
		return re.PrivateData, nil
	case err != nil:
		return nil, err
	}
	p.rsp = rep.PrivateData
	return nil, nil
}

// wait waits until the target has n requests under way, on all channels together.
func (r *rig) wait(n int64) {
	r.t.Helper()
	var sum int64
	for limit := time.Now().Add(10 * time.Second); time.Now().Before(limit); time.Sleep(time.Millisecond) {
		sum = 0
		for _, c := range r.target.Stats().Channels {
			sum += c.Outstanding
		}
		if sum == n {
			return
		}
	}
	r.t.Fatalf("%d requests under way, want %d", sum, n)
}

func (r *rig) login(f *rdma.Fabric, port byte, multi bool) *peer {
	r.t.Helper()
	p := newPeer(r.t, f)
	if rej := p.connect(r, loginBytes(port, r.target.PortID(), multi)); rej != nil {
		r.t.Fatalf("login rejected: % x", rej[:32])
	}
	return p
}

func (p *peer) post(i int) {
	p.t.Helper()
	w := []verbs.RecvWorkRequest{{WRID: uint64(i), SGList: []verbs.SGE{{Addr: p.mr.Addr() + uint64(i*peerSlot), Length: peerSlot, LKey: p.mr.LKey()}}}}
	if _, err := p.qp.PostRecv(w); err != nil {
		p.t.Fatal(err)
	}
}

// send sends b and waits for the SEND's completion.
func (p *peer) send(b []byte) {
	p.t.Helper()
	p.sendOnly(b)
	for limit := time.Now().Add(10 * time.Second); ; {
		done, err := p.poll()
		if err != nil {
			p.t.Fatal(err)
		}
		if done {
			return
		}
		if time.Now().After(limit) {
			p.t.Fatal("the SEND does not complete")
		}
		time.Sleep(20 * time.Microsecond)
	}
}

// sendOnly sends b, which may well end the channel before the SEND completes.
func (p *peer) sendOnly(b []byte) {
	p.t.Helper()
	copy(p.mem.Slice(peerTx, 16384), b)
	w := []verbs.SendWorkRequest{{WRID: 1 << 32, Opcode: verbs.OpSend, Flags: verbs.SendSignaled, SGList: []verbs.SGE{{Addr: p.mr.Addr() + peerTx, Length: uint32(len(b)), LKey: p.mr.LKey()}}}}
	if _, err := p.qp.PostSend(w); err != nil {
		p.t.Fatal(err)
	}
}

// poll takes completions: received units go to p.got; sent reports a SEND completion.
func (p *peer) poll() (sent bool, err error) {
	var wcs [32]verbs.WorkCompletion
	n := p.cq.Poll(wcs[:])
	if n > 0 {
		p.last = n
	}
	for _, wc := range wcs[:n] {
		if wc.Status != verbs.WCSuccess {
			p.broken = &verbs.StatusError{Status: wc.Status, QPN: wc.QPN, Doing: "peer"}
			return false, p.broken
		}
		if wc.WRID >= 1<<32 {
			sent = true
			continue
		}
		i := int(wc.WRID)
		p.got = append(p.got, bytes.Clone(p.mem.Slice(i*peerSlot, int(wc.ByteLen))))
		p.post(i)
	}
	return sent, nil
}

// next is the next received unit.
func (p *peer) next(d time.Duration) ([]byte, error) {
	for limit := time.Now().Add(d); ; {
		if len(p.got) > 0 {
			b := p.got[0]
			p.got = p.got[1:]
			return b, nil
		}
		if _, err := p.poll(); err != nil {
			return nil, err
		}
		if len(p.got) == 0 {
			if time.Now().After(limit) {
				return nil, errTimeout
			}
			time.Sleep(20 * time.Microsecond)
		}
	}
}

func (p *peer) recv() []byte {
	p.t.Helper()
	b, err := p.next(30 * time.Second)
	if err != nil {
		p.t.Fatal(err)
	}
	return b
}

// gone waits until the channel has ended.
func (p *peer) gone(d time.Duration) {
	p.t.Helper()
	select {
	case <-p.conn.Done():
	case <-time.After(d):
		p.t.Error("the connection still lives")
	}
}

// cmd is SRP_CMD without descriptors.
func cmdBytes(tag uint64, lunNo uint16, format byte, cdb ...byte) []byte {
	b := make([]byte, 48)
	b[0] = 0x02
	b[5] = format
	be.PutUint64(b[8:], tag)
	be.PutUint16(b[20:], lunNo)
	copy(b[32:], cdb)
	return b
}

// direct appends a direct descriptor of n bytes at off of the data area.
func (p *peer) direct(b []byte, off, n int) []byte {
	b = be.AppendUint64(b, p.mr.Addr()+peerData+uint64(off))
	b = be.AppendUint32(b, p.mr.RKey())
	return be.AppendUint32(b, uint32(n))
}

// indirect appends a table of pieces; inline says how many of them go into the command. The whole table lies in memory at tableOff.
func (p *peer) indirect(b []byte, tableOff, inline int, pieces [][2]int) []byte {
	var table []byte
	total := 0
	for _, d := range pieces {
		table = p.direct(table, d[0], d[1])
		total += d[1]
	}
	copy(p.mem.Slice(peerData+tableOff, len(table)), table)
	b = p.direct(b, tableOff, len(table))
	b = be.AppendUint32(b, uint32(total))
	return append(b, table[:16*inline]...)
}

func (p *peer) data(off, n int) []byte { return p.mem.Slice(peerData+off, n) }

// good checks a response to tag: GOOD, one credit, no residual.
func (p *peer) good(b []byte, tag uint64) {
	p.t.Helper()
	want := make([]byte, 36)
	want[0] = 0xc1
	want[7] = 1
	be.PutUint64(want[8:], tag)
	if !bytes.Equal(b, want) {
		p.t.Errorf("response\n got % x\nwant % x", b, want)
	}
}

func rw10(op byte, lba uint32, blocks uint16) []byte {
	c := make([]byte, 10)
	c[0] = op
	be.PutUint32(c[2:], lba)
	be.PutUint16(c[7:], blocks)
	return c
}

func TestLoginResponse(t *testing.T) {
	r := newRig(t, Config{}, "")
	f := openFabric(t)
	p := r.login(f, 1, false)
	want := make([]byte, 52)
	want[0] = 0xc0
	want[7] = 128
	copy(want[8:], []byte{1, 2, 3, 4, 5, 6, 7, 8})
	copy(want[16:], []byte{0, 0, 0x20, 0x54, 0, 0, 0x20, 0x44, 0, 0x06, 0x90})
	if !bytes.Equal(p.rsp[:52], want) {
		t.Errorf("LOGIN_RSP\n got % x\nwant % x", p.rsp[:52], want)
	}
	q := r.login(f, 1, true)
	if q.rsp[26] != 0x92 {
		t.Errorf("second channel: flags %02x, want 92 (channels maintained)", q.rsp[26])
	}
	if n := len(r.target.Stats().Channels); n != 2 {
		t.Errorf("%d channels, want 2", n)
	}
	s := r.login(f, 1, false)
	if s.rsp[26] != 0x91 {
		t.Errorf("single-channel login: flags %02x, want 91 (channels terminated)", s.rsp[26])
	}
	p.gone(5 * time.Second)
	q.gone(5 * time.Second)
	s.send(cmdBytes(7, 0, 0))
	s.good(s.recv(), 7)
}

// Two targets cannot listen on one port; the second is refused and leaves nothing behind.
func TestPortTaken(t *testing.T) {
	r := newRig(t, Config{}, "")
	for range 2 {
		_, err := New(r.fabric.Context(), r.fabric.Connector(), Config{Units: r.target.cfg.Units, Listen: r.target.Addr()})
		if err == nil || !strings.Contains(err.Error(), r.target.Addr().String()) {
			t.Fatalf("%v; want an error that names %s", err, r.target.Addr())
		}
	}
	p := r.login(openFabric(t), 1, false)
	p.send(cmdBytes(1, 0, 0))
	p.good(p.recv(), 1)
}

// A device that has nothing left for a channel refuses that login, whatever runs out first, and serves the others.
func TestNothingLeftForAChannel(t *testing.T) {
	r := newRig(t, Config{}, "login nth=3 : limit 2147483647")
	f := openFabric(t)
	old := r.login(f, 1, false)
	var taken []verbs.CompletionQueue
	for {
		cq, err := r.fabric.Context().CreateCQ(verbs.CQInit{Capacity: 1})
		if err != nil {
			break
		}
		taken = append(taken, cq)
	}
	rej := newPeer(t, f).connect(r, loginBytes(2, r.target.PortID(), false))
	if rej == nil || rej[0] != 0xc2 || be.Uint32(rej[4:]) != 0x10001 {
		t.Errorf("LOGIN_REJ % x, want reason 10001", rej)
	}
	old.send(cmdBytes(1, 0, 0))
	old.good(old.recv(), 1)
	for _, cq := range taken {
		if err := cq.Destroy(); err != nil {
			t.Fatal(err)
		}
	}
	// The third login's response promises more credits than any memory holds buffers for.
	p := r.login(f, 2, false)
	p.send(cmdBytes(2, 0, 0))
	p.good(p.recv(), 2)
}

func TestLoginRejections(t *testing.T) {
	r := newRig(t, Config{MaxChannels: 2, MaxSessions: 3, ACL: []string{"00000000000000000000000000000001", "0000000000000002"}}, "")
	f := openFabric(t)
	tid := r.target.PortID()
	for _, tc := range []struct {
		name   string
		reason uint32
		edit   func(b []byte)
	}{
		{"IU of 63 bytes", 0x10002, func(b []byte) { copy(b[12:], []byte{0, 0, 0, 63}) }},
		{"IU of 8277 bytes", 0x10002, func(b []byte) { copy(b[12:], []byte{0, 0, 0x20, 0x55}) }},
		{"other target port", 0x10003, func(b []byte) { b[40] ^= 1 }},
		{"other id_ext", 0x10003, func(b []byte) { b[32] ^= 1 }},
		{"no descriptor format", 0x10004, func(b []byte) { b[9] = 0 }},
		{"unknown format", 0x10004, func(b []byte) { b[9] = 0x08 }},
		{"not on the access list", 0x10003, func(b []byte) { b[31] = 9 }},
		{"reserved multi-channel action", 0x10005, func(b []byte) { b[10] |= 2 }},
		{"not a login", 0x10000, func(b []byte) { b[11] = 1 }},
	} {
		b := loginBytes(1, tid, false)
		tc.edit(b)
		p := newPeer(t, f)
		rej := p.connect(r, b)
		if rej == nil {
			t.Errorf("%s: accepted", tc.name)
			continue
		}
		if rej[0] != 0xc2 || be.Uint32(rej[4:]) != tc.reason || tc.reason != 0x10000 && !bytes.Equal(rej[8:16], b[:8]) || rej[25] != 6 {
			t.Errorf("%s: LOGIN_REJ % x, want reason %x", tc.name, rej[:32], tc.reason)
		}
	}
	r.login(f, 1, false)
	r.login(f, 1, true)
	for _, tc := range []struct {
		port   byte
		multi  bool
		reason uint32
	}{{1, true, 0x10006}} {
		if rej := newPeer(t, f).connect(r, loginBytes(tc.port, tid, tc.multi)); rej == nil || be.Uint32(rej[4:]) != tc.reason {
			t.Errorf("%+v: % x", tc, rej)
		}
	}
	r.login(f, 2, false)
	if rej := newPeer(t, f).connect(r, loginBytes(2, tid, true)); rej == nil || be.Uint32(rej[4:]) != 0x10001 {
		t.Errorf("beyond the session limit: % x", rej)
	}
	// Both halves swapped, as I/O class 0xff00 writes them, is the same port.
	swapped := append(append([]byte{}, tid[8:]...), tid[:8]...)
	if rej := newPeer(t, f).connect(r, loginBytes(1, [16]byte(swapped), false)); rej != nil {
		t.Errorf("I/O class 0xff00: % x", rej[:32])
	}

	one := newRig(t, Config{SingleChannel: true}, "")
	one.login(f, 1, false)
	if rej := newPeer(t, f).connect(one, loginBytes(1, one.target.PortID(), true)); rej == nil || be.Uint32(rej[4:]) != 0x10005 {
		t.Errorf("second channel at a single-channel target: % x", rej)
	}
}

// TestDataWays moves data in every way that a command can describe it, on each kind of store.
func TestDataWays(t *testing.T) {
	file := t.TempDir() + "/disk"
	r := newRig(t, Config{}, "", "0=ram:8m", "1=file:"+file+",size=8m", "2=ram:8m,bs=4096")
	p := r.login(openFabric(t), 1, false)
	rnd := rand.New(rand.NewPCG(3, 4))
	tag := uint64(0xfedcba9876543210)
	for _, lunNo := range []uint16{0, 1, 2} {
		bs := 512
		if lunNo == 2 {
			bs = 4096
		}
		for _, size := range []int{bs, 4096, 8192, 12288, 65536, 262144, 1 << 20, 1<<20 + 4096} {
			blocks := uint16(size / bs)
			for _, way := range []string{"direct", "indirect", "external", "immediate", "many"} {
				if way == "immediate" && size > 8192 {
					continue
				}
				lba := uint32(rnd.IntN(1000))
				src := p.data(0, size)
				for i := range src {
					src[i] = byte(rnd.Uint32())
				}
				want := bytes.Clone(src)
				pieces := [][2]int{{0, size}}
				switch way {
				case "indirect", "external":
					pieces = split(rnd, size, 5)
				case "many":
					pieces = split(rnd, size, 200)
				}
				describe := func(b []byte, out bool) []byte {
					f := byte(0x01)
					switch way {
					case "indirect":
						f = 0x02
						b = p.indirect(b, 3<<20, len(pieces), pieces)
					case "external", "many":
						f = 0x02
						b = p.indirect(b, 3<<20, min(2, len(pieces)-1), pieces)
					default:
						b = p.direct(b, 0, size)
					}
					n := byte(0)
					if f == 2 {
						n = byte(len(pieces))
						if way != "indirect" {
							n = byte(min(2, len(pieces)-1))
						}
					}
					if out {
						b[5], b[6] = f<<4, n
					} else {
						b[5], b[7] = f, n
					}
					return b
				}
				tag++
				b := cmdBytes(tag, lunNo, 0, rw10(0x2a, lba, blocks)...)
				if way == "immediate" {
					b[5] = 0x30
					b = be.AppendUint32(b, uint32(size))
					b = append(b, make([]byte, imm-len(b))...)
					b = append(b, src...)
				} else {
					b = describe(b, true)
				}
				p.send(b)
				p.good(p.recv(), tag)
				clear(p.data(0, size))
				tag++
				p.send(describe(cmdBytes(tag, lunNo, 0, rw10(0x28, lba, blocks)...), false))
				p.good(p.recv(), tag)
				if !bytes.Equal(p.data(0, size), want) {
					t.Fatalf("LUN %d, %d bytes, %s: read other bytes than written", lunNo, size, way)
				}
			}
		}
	}
	if got, err := os.ReadFile(file); err != nil || len(got) != 8<<20 {
		t.Errorf("the file has %d bytes, %v", len(got), err)
	}
}

// split cuts size bytes at n-1 random places.
func split(rnd *rand.Rand, size, n int) (pieces [][2]int) {
	off := 0
	for i := range n {
		l := size - off
		if i < n-1 {
			l = min(l, rnd.IntN(2*size/n)+1)
		}
		if l > 0 {
			pieces = append(pieces, [2]int{off, l})
		}
		off += l
	}
	if len(pieces) == 1 { // external needs two
		pieces = [][2]int{{0, 1}, {1, size - 1}}
	}
	return pieces
}

// sense finds the sense data of a response and its key and code.
func senseOf(b []byte) (key byte, asc uint16) {
	if len(b) < 36+14 || b[18]&2 == 0 {
		return 0xff, 0
	}
	s := b[36+be.Uint32(b[32:]):]
	return s[2] & 0xf, be.Uint16(s[12:])
}

func TestResidualsAndRefusals(t *testing.T) {
	r := newRig(t, Config{}, "", "0=ram:1m")
	p := r.login(openFabric(t), 1, false)
	check := func(name string, b []byte, status, flags byte, out, in uint32, key byte, asc uint16) {
		t.Helper()
		tag := be.Uint64(b[8:])
		p.send(b)
		g := p.recv()
		k, a := senseOf(g)
		if status != 2 {
			k, a = 0xff, 0
		}
		if len(g) < 36 || be.Uint64(g[8:]) != tag || g[19] != status || g[18]&^3 != flags || be.Uint32(g[20:]) != out || be.Uint32(g[24:]) != in || k != key || a != asc {
			t.Errorf("%s: % x", name, g)
		}
	}
	const none = 0xff
	inq := []byte{0x12, 0, 0, 0, 36, 0}
	check("INQUIRY of 36 into 4096", p.direct(cmdBytes(1, 0, 1, inq...), 0, 4096), 0, 0x20, 0, 4096-36, none, 0)
	check("INQUIRY of 36 into 10", p.direct(cmdBytes(2, 0, 1, inq...), 0, 10), 0, 0x10, 0, 26, none, 0)
	check("READ of 2 blocks into 1", p.direct(cmdBytes(3, 0, 1, rw10(0x28, 0, 2)...), 0, 512), 0, 0x10, 0, 512, none, 0)
	check("READ of 1 block into 2", p.direct(cmdBytes(4, 0, 1, rw10(0x28, 0, 1)...), 0, 1024), 0, 0x20, 0, 512, none, 0)
	check("READ of no blocks into 512", p.direct(cmdBytes(5, 0, 1, rw10(0x28, 0, 0)...), 0, 512), 0, 0x20, 0, 512, none, 0)
	check("READ without a buffer", cmdBytes(6, 0, 0, rw10(0x28, 0, 1)...), 0, 0x10, 0, 512, none, 0)
	check("WRITE of 2 blocks from 1", p.direct(cmdBytes(7, 0, 0x10, rw10(0x2a, 0, 2)...), 0, 512), 2, 0x04, 512, 0, 5, 0x0e03)
	check("WRITE of 1 block from 2", p.direct(cmdBytes(8, 0, 0x10, rw10(0x2a, 0, 1)...), 0, 1024), 0, 0x08, 512, 0, none, 0)
	check("WRITE without a buffer", cmdBytes(9, 0, 0, rw10(0x2a, 0, 1)...), 2, 0x04, 512, 0, 5, 0x0e03)
	check("READ beyond the end", p.direct(cmdBytes(10, 0, 1, rw10(0x28, 2048, 1)...), 0, 512), 2, 0x20, 0, 512, 5, 0x2100)
	check("no such LUN", cmdBytes(11, 7, 0), 2, 0, 0, 0, 5, 0x2500)
	check("unknown opcode", cmdBytes(12, 0, 0, 0xff), 2, 0, 0, 0, 5, 0x2000)

	// Units that do not hold together: refused, and the channel lives.
	lies := map[string][]byte{
		"descriptor cut": p.direct(cmdBytes(20, 0, 1, rw10(0x28, 0, 1)...), 0, 512)[:60],
		"255 inline descriptors": func() []byte {
			b := p.indirect(cmdBytes(21, 0, 2, rw10(0x28, 0, 1)...), 0, 1, [][2]int{{0, 512}})
			b[7] = 255
			return b
		}(),
		"both directions":       p.direct(p.direct(cmdBytes(22, 0, 0x11, rw10(0x28, 0, 1)...), 0, 512), 0, 512),
		"format 4":              cmdBytes(23, 0, 0x40, rw10(0x2a, 0, 1)...),
		"immediate data-in":     cmdBytes(24, 0, 0x03, rw10(0x28, 0, 1)...),
		"additional CDB beyond": func() []byte { b := cmdBytes(25, 0, 0); b[31] = 0xfc; return b }(),
		"sum of descriptors differs": func() []byte {
			b := p.indirect(cmdBytes(26, 0, 2, rw10(0x28, 0, 2)...), 0, 2, [][2]int{{0, 512}, {512, 512}})
			b[7] = 2
			be.PutUint32(b[64:], 0xffffffff)
			return b
		}(),
		"huge table": func() []byte {
			b := p.indirect(cmdBytes(27, 0, 2, rw10(0x28, 0, 1)...), 0, 0, [][2]int{{0, 512}})
			be.PutUint32(b[60:], 0xfffffff0)
			return b
		}(),
	}
	for _, n := range []uint32{0, 1, 32, 33, 0x7fffffff, 0xffffffb0, 0xffffffbc, 0xffffffff} { // a unit of 100 bytes: 32 of data fit
		b := be.AppendUint32(cmdBytes(uint64(100+n), 0, 0x30, rw10(0x2a, 0, 1)...), n)
		lies["immediate length "+hex.EncodeToString(b[48:])] = append(b, make([]byte, 100-len(b))...)
	}
	for name, b := range lies {
		p.send(b)
		g := p.recv()
		if k, a := senseOf(g); !bytes.Equal(g[8:16], b[8:16]) || g[19] != 2 || k != 5 || a != 0x0e03 {
			t.Errorf("%s: % x", name, g)
		}
	}
	p.send(cmdBytes(50, 0, 0))
	p.good(p.recv(), 50)

	// What has no tag, or a type that no initiator sends, ends the channel: T_LOGOUT, then the disconnect.
	for _, b := range [][]byte{{0x02, 0, 0}, append([]byte{0x77}, make([]byte, 47)...), append([]byte{0xc1}, make([]byte, 47)...)} {
		q := r.login(p.f, 3, false)
		q.sendOnly(b)
		if g, err := q.next(2 * time.Second); err == nil && (len(g) != 16 || g[0] != 0x80 || be.Uint32(g[4:]) != 2) {
			t.Errorf("% x answered with % x", b, g)
		}
		q.gone(5 * time.Second)
	}
	p.send(cmdBytes(51, 0, 0))
	p.good(p.recv(), 51)
	q := r.login(p.f, 4, false)
	q.sendOnly(append([]byte{0x03}, make([]byte, 15)...)) // I_LOGOUT
	q.gone(5 * time.Second)
}

func tmfBytes(tag uint64, lunNo uint16, fn byte, task uint64) []byte {
	b := make([]byte, 48)
	b[0] = 0x01
	be.PutUint64(b[8:], tag)
	be.PutUint16(b[20:], lunNo)
	b[30] = fn
	be.PutUint64(b[32:], task)
	return b
}

func (p *peer) tmfDone(b []byte, tag uint64, code byte, delta uint32) {
	p.t.Helper()
	if len(b) != 40 || b[0] != 0xc1 || be.Uint64(b[8:]) != tag || b[18] != 1 || be.Uint32(b[32:]) != 4 || b[39] != code || be.Uint32(b[4:]) != delta {
		p.t.Errorf("task management response % x; want tag %x, code %d, delta %d", b, tag, code, delta)
	}
}

func TestTaskManagement(t *testing.T) {
	r := newRig(t, Config{}, "cmd op=tur lun=1 : hold\ncmd op=inquiry : release", "0=ram:1m", "1=ram:1m")
	f := openFabric(t)
	a, a2, b := r.login(f, 1, false), r.login(f, 1, true), r.login(f, 2, false)

	// ABORT TASK: the held command goes without a response and its credit comes with the function's.
	a.send(cmdBytes(1, 1, 0))
	a.send(tmfBytes(0x80000001, 1, 1, 1))
	a.tmfDone(a.recv(), 0x80000001, 0, 2)
	a.send(tmfBytes(0x80000002, 1, 1, 99)) // nothing to abort
	a.tmfDone(a.recv(), 0x80000002, 0, 1)
	// From the other channel of the nexus.
	a.send(cmdBytes(2, 1, 0))
	r.wait(1)
	a2.send(tmfBytes(0x80000003, 1, 1, 2))
	a2.tmfDone(a2.recv(), 0x80000003, 0, 1)
	// Another nexus cannot abort it.
	a.send(cmdBytes(3, 1, 0))
	r.wait(1)
	b.send(tmfBytes(0x80000004, 1, 1, 3))
	b.tmfDone(b.recv(), 0x80000004, 0, 1)
	a.send(cmdBytes(4, 1, 0x00, 0x12, 0, 0, 0, 0, 0)) // INQUIRY of no bytes releases
	for range 2 {
		g := a.recv()
		if tag := be.Uint64(g[8:]); tag != 3 && tag != 4 || g[19] != 0 {
			t.Errorf("after release: % x", g)
		}
	}
	// ABORT TASK SET: both channels of the nexus, one LUN, nobody else's.
	a.send(cmdBytes(5, 1, 0))
	a2.send(cmdBytes(6, 1, 0))
	b.send(cmdBytes(7, 1, 0))
	r.wait(3)
	a.send(tmfBytes(0x80000005, 1, 2, 0))
	a.tmfDone(a.recv(), 0x80000005, 0, 2)
	// CLEAR TASK SET from a: b's command ends with TASK ABORTED, and b hears of it.
	a.send(tmfBytes(0x80000006, 1, 4, 0))
	a.tmfDone(a.recv(), 0x80000006, 0, 1)
	if g := b.recv(); be.Uint64(g[8:]) != 7 || g[19] != 0x40 {
		t.Errorf("cleared command: % x", g)
	}
	b.send(cmdBytes(8, 1, 0x00, rw10(0x28, 0, 0)...))
	if k, asc := senseOf(b.recv()); k != 6 || asc != 0x2f00 {
		t.Errorf("after CLEAR TASK SET: sense %x/%04x", k, asc)
	}
	// LUN RESET: everybody's commands end, everybody gets the unit attention.
	a2.send(cmdBytes(9, 1, 0))
	b.send(cmdBytes(10, 1, 0))
	r.wait(2)
	a.send(tmfBytes(0x80000007, 1, 8, 0))
	a.tmfDone(a.recv(), 0x80000007, 0, 1)
	if g := b.recv(); be.Uint64(g[8:]) != 10 || g[19] != 0x40 {
		t.Errorf("reset command: % x", g)
	}
	for i, q := range []*peer{a, b} {
		q.send(cmdBytes(uint64(20+i), 1, 0x00, rw10(0x28, 0, 0)...))
		if k, asc := senseOf(q.recv()); k != 6 || asc != 0x2903 {
			t.Errorf("after LUN RESET: sense %x/%04x", k, asc)
		}
	}
	// Refusals.
	a.send(tmfBytes(0x80000008, 1, 0x40, 0))
	a.tmfDone(a.recv(), 0x80000008, 4, 1)
	a.send(tmfBytes(0x80000009, 1, 0x33, 0))
	a.tmfDone(a.recv(), 0x80000009, 4, 1)
	a.send(tmfBytes(0x8000000a, 9, 8, 0))
	a.tmfDone(a.recv(), 0x8000000a, 2, 1)
}

// TestCreditsComeBack aborts many commands and looks at the books at the end.
func TestCreditsComeBack(t *testing.T) {
	r := newRig(t, Config{RequestLimit: 8}, "cmd op=tur every=3 : drop")
	p := r.login(openFabric(t), 1, false)
	credits := int32(be.Uint32(p.rsp[4:]))
	if credits != 8 {
		t.Fatalf("%d credits granted", credits)
	}
	for i := range uint64(60) {
		p.send(cmdBytes(i, 0, 0))
		credits--
		if i%3 == 2 {
			p.send(tmfBytes(1<<31|i, 0, 1, i))
			credits--
		}
		g := p.recv()
		credits += int32(be.Uint32(g[4:]))
	}
	if credits != 8 {
		t.Errorf("%d credits at the end, want 8", credits)
	}
	s := r.target.Stats().Channels[0]
	if s.Aborted != 20 || s.Outstanding != 0 || s.BeyondLimit != 0 || s.Commands != 60 {
		t.Errorf("%+v", s)
	}
}

// TestHeldAnswersComeTogether is what tests of completion batching rely on.
func TestHeldAnswersComeTogether(t *testing.T) {
	r := newRig(t, Config{}, "cmd op=read : hold count=16")
	p := r.login(openFabric(t), 1, false)
	for i := range uint64(16) {
		if len(p.got) != 0 {
			t.Fatal("an answer came before the group was complete")
		}
		p.send(p.direct(cmdBytes(i, 0, 1, rw10(0x28, 0, 8)...), int(i)*4096, 4096))
	}
	before := r.target.Stats().Channels[0].Doorbells
	for i := range uint64(16) {
		p.good(p.recv(), i)
	}
	if n := r.target.Stats().Channels[0].Doorbells - before; n > 1 {
		t.Errorf("%d doorbells for the group", n)
	}
}

// TestSmallDataLeaveAsTrains holds the responses of a batch behind the data of all its commands: equal packets in a row, which the socket takes
// in few pieces. With data and response in turn there would be a piece per command.
func TestSmallDataLeaveAsTrains(t *testing.T) {
	const n = 16
	for _, size := range []int{4096, 8192, 16384} {
		blocks := uint32(size / 512)
		r := newRig(t, Config{}, fmt.Sprintf("cmd op=read : hold count=%d", n))
		dev := r.fabric.Context().(*softroce.Device)
		if !dev.Stats().Socket.GSO {
			require.Missing(t, "UDP_SEGMENT")
		}
		p := r.login(openFabric(t), 1, false)
		out := make([]byte, size)
		for i := range out {
			out[i] = byte(i*7 + i>>8)
		}
		copy(p.data(0, size), out)
		p.send(p.direct(cmdBytes(99, 0, 0x10, rw10(0x2a, blocks, uint16(blocks))...), 0, size))
		p.good(p.recv(), 99)
		for i := range uint64(n - 1) {
			p.send(p.direct(cmdBytes(i, 0, 1, rw10(0x28, blocks*uint32(i%2), uint16(blocks))...), int(i)*size, size))
		}
		before := dev.Stats().Socket.TrainsSent
		p.send(p.direct(cmdBytes(n-1, 0, 1, rw10(0x28, blocks, uint16(blocks))...), (n-1)*size, size))
		for i := range uint64(n) {
			p.good(p.recv(), i)
		}
		// Fifteen packets of data are a piece, all responses one; two for acknowledgements.
		most := uint64((n*size/4096+14)/15 + 1 + 2)
		if got := dev.Stats().Socket.TrainsSent - before; got > most {
			t.Errorf("%d pieces for %d commands of %d bytes, want at most %d", got, n, size, most)
		}
		for i := range n {
			want := out
			if i%2 == 0 && i != n-1 {
				want = make([]byte, size)
			}
			if !bytes.Equal(p.data(i*size, size), want) {
				t.Errorf("command %d of %d bytes read something else", i, size)
			}
		}
	}
}

// recorder notes the order in which requests are posted.
type recorder struct {
	verbs.QueuePair
	posted [][]verbs.SendWorkRequest // guarded by channel.mu
}

func (q *recorder) PostSend(wrs []verbs.SendWorkRequest) (int, error) {
	q.posted = append(q.posted, slices.Clone(wrs))
	return q.QueuePair.PostSend(wrs)
}

// TestNoResponseBeforeItsData looks at the posts of batches of reads: a response that left before its command's data would let the initiator look at
// memory that is still to be written. The data of up to 16 KiB go in front of all responses, larger ones each in front of its own. So do data that a fault changes, in
// which case they lie in the few large buffers of the channel.
func TestNoResponseBeforeItsData(t *testing.T) {
	const n = largeBuffers
	gathered, inPlace := strings.Repeat("W", n)+strings.Repeat("S", n), strings.Repeat("WS", n)
	for _, c := range []struct {
		size  int
		fault string
		moved int // of each command, in bytes
		bad   int // of them, changed
		want  string
	}{
		{4096, "", 4096, 0, gathered},
		{8192, "", 8192, 0, gathered},
		{16384, "", 16384, 0, gathered},
		{16384 + 512, "", 16384 + 512, 0, inPlace},
		{32768, "", 32768, 0, inPlace},
		{8192 + 512, "; corrupt 3", 8192 + 512, 3, gathered},
		{16384, "; corrupt 3", 16384, 3, gathered},
		{16384, "; cut 100", 16384 - 100, 0, gathered},
		{16384 + 512, "; cut 512", 16384, 0, gathered},
		{16384 + 512, "; cut 511", 16384 + 1, 0, inPlace},
		{16384 + 512, "; corrupt 3", 16384 + 512, 3, inPlace},
	} {
		size := c.size
		r := newRig(t, Config{}, fmt.Sprintf("cmd op=read : hold count=%d%s", n, c.fault))
		p := r.login(openFabric(t), 1, false)
		disk := p.data(3<<20, n*size)
		for i := range disk {
			disk[i] = byte(i)*7 + byte(i>>8)*13 + byte(i>>16)
		}
		p.send(p.direct(cmdBytes(99, 0, 0x10, rw10(0x2a, 0, uint16(n*size/512))...), 3<<20, n*size))
		p.good(p.recv(), 99)
		for r.target.logins.Load() == 0 {
			time.Sleep(time.Millisecond) // the login still uses the queue pair
		}
		ch := r.target.channels()[0]
		ch.mu.Lock()
		rec := &recorder{QueuePair: ch.qp}
		ch.qp = rec
		ch.mu.Unlock()
		for i := range uint64(n) {
			p.send(p.direct(cmdBytes(i, 0, 1, rw10(0x28, uint32(i)*uint32(size/512), uint16(size/512))...), int(i)*size, size))
		}
		for i := range uint64(n) {
			p.good(p.recv(), i)
		}
		ch.mu.Lock()
		order := ""
		for _, wrs := range rec.posted {
			for _, w := range wrs {
				switch w.Opcode {
				case verbs.OpRDMAWrite:
					order += "W"
				case verbs.OpSend:
					order += "S"
				}
			}
		}
		if order != c.want {
			t.Errorf("%d bytes%s: posted %s, want %s", size, c.fault, order, c.want)
		}
		ch.qp = rec.QueuePair
		ch.mu.Unlock()
		for i := range n {
			bad := 0
			for k, b := range p.data(i*size, c.moved) {
				if b != disk[i*size+k] {
					bad++
				}
			}
			if bad != c.bad || !bytes.Equal(p.data(i*size+c.moved, size-c.moved), make([]byte, size-c.moved)) {
				t.Errorf("%d bytes%s: command %d: %d bytes are others, want %d", size, c.fault, i, bad, c.bad)
			}
		}
	}
}

// TestMoreCommandsThanLargeBuffers has many commands at once that all need a large buffer: for a table, or for their data.
func TestMoreCommandsThanLargeBuffers(t *testing.T) {
	r := newRig(t, Config{Completion: completion.Config{Mode: completion.Poll}}, "", "0=ram:4m", "1=file:"+t.TempDir()+"/disk,size=4m")
	p := r.login(openFabric(t), 1, false)
	finish := func(n uint64) {
		t.Helper()
		want := map[uint64]bool{}
		for i := range n {
			want[i] = true
		}
		for range n {
			g := p.recv()
			tag := be.Uint64(g[8:])
			if !want[tag] || g[19] != 0 {
				t.Errorf("% x", g)
			}
			delete(want, tag)
		}
	}
	// Data first: on a fresh channel nothing but the rule that frees large buffers makes a response signaled.
	for i := range uint64(40) {
		op, format := byte(0x28), byte(0x01)
		if i > 20 && i%2 == 0 { // an RDMA READ's completion retires all before it: only READs at first
			op, format = 0x2a, 0x10
		}
		p.send(p.direct(cmdBytes(i, 1, format, rw10(op, uint32(i)*128, 128)...), int(i)*65536, 65536))
	}
	finish(40)
	for i := range uint64(40) {
		pieces := [][2]int{{int(i) * 1024, 256}, {int(i)*1024 + 256, 768}}
		b := p.indirect(cmdBytes(i, 0, 2, rw10(0x28, 0, 2)...), 2<<20+int(i)*64, 1, pieces)
		b[7] = 1
		p.send(b)
	}
	finish(40)
}

func TestLoginLoopsLeaveNothing(t *testing.T) {
	r := newRig(t, Config{}, "")
	f := openFabric(t)
	fresh := runtime.NumGoroutine()
	one := func() {
		p := r.login(f, 1, false)
		p.send(cmdBytes(1, 0, 0))
		p.good(p.recv(), 1)
		p.close()
	}
	one()
	// What remains goes within any time; what leaks stays for ever.
	settle := func(atMost int) (n int) {
		for range 1000 {
			if n = runtime.NumGoroutine(); n <= atMost && len(r.target.Stats().Channels) == 0 {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		return n
	}
	before := settle(fresh + 1)
	for range 20 {
		one()
	}
	if after := settle(before + 1); after > before+1 {
		buf := make([]byte, 1<<20)
		t.Errorf("%d goroutines before, %d after 20 logins\n%s", before, after, buf[:runtime.Stack(buf, true)])
	}
	if s := r.target.Stats(); s.Logins != 21 || len(s.Channels) != 0 {
		t.Errorf("%+v", s)
	}
}

func TestConcurrentLoginsOfOneNexus(t *testing.T) {
	r := newRig(t, Config{}, "")
	f := openFabric(t)
	r.login(f, 1, false)
	var wg sync.WaitGroup
	peers := make([]*peer, 8)
	for i := range peers {
		peers[i] = newPeer(t, f)
	}
	for _, p := range peers {
		wg.Go(func() {
			if rej := p.connect(r, loginBytes(1, r.target.PortID(), true)); rej != nil {
				t.Errorf("rejected: % x", rej[:32])
				return
			}
			p.send(cmdBytes(5, 0, 0))
			p.good(p.recv(), 5)
		})
	}
	wg.Wait()
	if n := len(r.target.Stats().Channels); n != 9 {
		t.Errorf("%d channels, want 9", n)
	}
}

// TestBlocksAreWhole reads a block while another channel writes it: what comes is the old block or the new one.
func TestBlocksAreWhole(t *testing.T) {
	const block = 4096
	r := newRig(t, Config{}, "", "0=ram:1m,bs=4096")
	reader, writer := r.login(openFabric(t), 1, false), r.login(openFabric(t), 2, false)
	pattern := func(p *peer, v int) {
		for b, i := p.data(0, 2*block), 0; i < len(b); i += 8 {
			be.PutUint64(b[i:], uint64(v)*0x0101010101010101)
		}
	}
	pattern(writer, 0)
	writer.send(writer.direct(cmdBytes(1, 0, 0x10, rw10(0x2a, 0, 2)...), 0, 2*block))
	writer.good(writer.recv(), 1)
	reads, mixed := 0, 0
	for v, limit := 1, time.Now().Add(2*time.Second); time.Now().Before(limit); v++ {
		pattern(writer, v&0x7f)
		writer.sendOnly(writer.direct(cmdBytes(1, 0, 0x10, rw10(0x2a, 0, 2)...), 0, 2*block))
		for done := false; !done; reads++ {
			reader.send(reader.direct(cmdBytes(2, 0, 0x01, rw10(0x28, 0, 2)...), 0, 2*block))
			reader.good(reader.recv(), 2)
			for at := 0; at < 2*block; at += block {
				b := reader.data(at, block)
				for i := 8; i < block; i += 8 {
					if be.Uint64(b[i:]) != be.Uint64(b) {
						t.Fatalf("read %d: a torn block: %x at 0, %x at %d", reads, b[:8], b[i:i+8], i)
					}
				}
			}
			if b := reader.data(0, 2*block); b[0] != b[block] {
				mixed++
			}
			_, err := writer.poll()
			if err != nil {
				t.Fatal(err)
			}
			done = len(writer.got) > 0
		}
		writer.good(writer.recv(), 1)
	}
	t.Logf("%d reads, %d of them between the two blocks of a write", reads, mixed)
}

func TestDividedBlocks(t *testing.T) {
	for _, c := range []struct {
		lens []uint32
		want bool
	}{
		{nil, true}, {[]uint32{100}, true}, {[]uint32{4096, 4096}, true}, {[]uint32{8192, 4096, 100}, true},
		{[]uint32{4000, 4192}, false}, {[]uint32{4096, 512, 3584}, false},
	} {
		var c1 command
		for _, n := range c.lens {
			c1.descs = append(c1.descs, iu.Descriptor{Len: n})
		}
		if got := c1.onBlocks(4096); got != c.want {
			t.Errorf("%v: %t", c.lens, got)
		}
	}
}
