package ring

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
)

func alloc(t *testing.T, n int) []byte {
	m, err := hostmem.Alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Free() })
	return m.Bytes()
}

// TestReceives: a segment of no bytes is left out or not, as the adapter wants; a short list ends with the key that is none.
func TestReceives(t *testing.T) {
	tooMany := errors.New("too many")
	const one, none, end = "00000010000000070000000000001000", "00000000000000080000000000002000", "00000000000001000000000000000000"
	for leaveOut, want := range map[bool]string{false: none + one + end, true: one + end} {
		buf, ids, rec := alloc(t, 4*64), alloc(t, 4*8), alloc(t, 4)
		var r Receives
		r.Init(Addr(buf), Addr(ids), Addr(rec), ReceiveShape{Count: 4, Shift: 6, Cap: verbs.QPCap{MaxRecvWR: 3, MaxRecvSGE: 4}, TooMany: tooMany, LeaveOut: leaveOut})
		list := []verbs.SGE{{Addr: 0x2000, LKey: 8}, {Addr: 0x1000, Length: 16, LKey: 7}}
		if n, err := r.Post([]verbs.RecvWorkRequest{{WRID: 5, SGList: list}, {WRID: 6, SGList: make([]verbs.SGE, 5)}}); n != 1 || err != tooMany {
			t.Fatal(n, err)
		}
		if got := hex.EncodeToString(buf[:len(want)/2]); got != want {
			t.Errorf("entry %s, want %s", got, want)
		}
		if n, err := r.Post(make([]verbs.RecvWorkRequest, 3)); n != 2 || !errors.Is(err, verbs.ErrQueueFull) || rec[3] != 3 {
			t.Fatal(n, err, rec[:4])
		}
		if i, id := r.Retire(); i != 0 || id != 5 {
			t.Errorf("entry %d with id %d is the oldest", i, id)
		}
		if n, _ := r.Post(make([]verbs.RecvWorkRequest, 1)); n != 0 {
			t.Error("an entry was posted before it was given back")
		}
		r.Publish()
		if n, err := r.Post(make([]verbs.RecvWorkRequest, 1)); n != 1 || err != nil || rec[3] != 4 {
			t.Error(n, err, rec[:4])
		}
	}
}

// TestCompletions: two formats, whose owner bit is the last byte's highest or lowest.
func TestCompletions(t *testing.T) {
	for _, f := range []Format{{Size: 64, Described: 32, Owner: 0x80, Unwritten: 256}, {Size: 128, Described: 64, Owner: 1, Unwritten: 0xf0, Number: 32}} {
		buf, rec := alloc(t, 4*f.Size), alloc(t, 8)
		var c Completions
		c.Init(Addr(buf), Addr(rec), 4, f, 0)
		arrive := func(i int, number uint32) {
			e := buf[i%4*f.Size:][:f.Size]
			clear(e)
			binary.BigEndian.PutUint32(e[f.Size-f.Described+f.Number:], number)
			binary.BigEndian.PutUint32(e, uint32(i)+1) // so that the entry's start travels with it
			if i/4%2 == 1 {
				e[f.Size-1] |= f.Owner
			}
		}
		for i := range 4 { // nobody's yet
			buf[i*f.Size+f.Size-1] = 0xff
		}
		if c.Any() || c.Capacity() != 3 {
			t.Errorf("%+v: an entry in a new queue of %d", f, c.Capacity())
		}
		for i := range 3 {
			arrive(i, 7)
		}
		ci := c.Begin()
		if end := c.Take(ci, 2); end != 2 || !c.Ready(2) || c.Take(2, 2) != 3 || c.Ready(3) {
			t.Errorf("%+v: took up to %d", f, end)
		}
		c.End(3)
		if got := binary.BigEndian.Uint32(rec); got != 3 || c.Any() {
			t.Errorf("%+v: consumer index %d", f, got)
		}
		for i, n := range []uint32{1 << 24, 9, 1, 1} {
			arrive(3+i, n)
		}
		c.Purge(1)
		if got := binary.BigEndian.Uint32(rec); got != 5 {
			t.Errorf("%+v: consumer index %d after the purge", f, got)
		}
		e := c.Entry(5)
		if got, first := c.Number(e), Get32(e, f.Described-f.Size); got != 0 || first != 4 && f.Number != 0 || !c.Ready(5) || c.Take(5, 4) != 7 {
			t.Errorf("%+v: entries of %d, that was at %d, remain up to %d", f, got, first, c.Take(5, 4))
		}
		if got := c.Number(c.Entry(6)); got != 9 {
			t.Errorf("%+v: then of %d", f, got)
		}
	}
}

// TestArmed: a request for any completion stays one until it is answered.
func TestArmed(t *testing.T) {
	var c Completions
	c.Init(Addr(alloc(t, 4*64)), Addr(alloc(t, 8)), 4, Format{Size: 64, Described: 64, Owner: 1, Unwritten: 256}, 6)
	c.CI = 0x5000007
	for i, s := range []struct {
		solicited, notified, any bool
		sn                       uint32
	}{{true, false, false, 2}, {false, false, true, 2}, {true, false, true, 2}, {true, true, false, 3}, {false, true, true, 0}, {true, true, false, 1}} {
		if s.notified {
			c.Notified()
		}
		if ci, sn, any := c.BeginArm(s.solicited); ci != 7 || sn != s.sn<<28 || any != s.any {
			t.Errorf("request %d: index %#x, sequence number %#x, any %v", i, ci, sn, any)
		}
		if missed := c.EndArm(); missed {
			t.Errorf("request %d missed something", i)
		}
	}
	c.CI = 0
	if _, _, _ = c.BeginArm(true); !c.EndArm() {
		t.Error("an entry of the first lap was missed unsaid")
	}
}

func TestRefusals(t *testing.T) {
	r := Family("x").Refusals(8, "8 bytes", unix.ENOMEM)
	b := &verbs.BindMW{Length: 8}
	for _, c := range []struct {
		wr   verbs.SendWorkRequest
		want error
	}{
		{verbs.SendWorkRequest{Opcode: verbs.OpSend, Flags: verbs.SendInline, SGList: []verbs.SGE{{Length: 2}, {Length: 2}}}, nil},
		{verbs.SendWorkRequest{Opcode: verbs.OpSend, Flags: verbs.SendInline, SGList: []verbs.SGE{{Length: 2}, {Length: 3}}}, r.inline},
		{verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{{Length: 1 << 31}, {Length: 1<<31 - 1}}}, nil},
		{verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{{Length: 1 << 31}, {Length: 1 << 31}}}, r.tooLong},
		{verbs.SendWorkRequest{Opcode: verbs.OpRDMARead, Flags: verbs.SendInline}, r.readInline},
		{verbs.SendWorkRequest{Opcode: verbs.OpFetchAdd, Flags: verbs.SendInline, Atomic: &verbs.Atomic{}}, r.readInline},
		{verbs.SendWorkRequest{Opcode: verbs.OpCompareSwap}, r.atomicNone},
		{verbs.SendWorkRequest{Opcode: verbs.OpBindMW, Bind: b}, r.bind},
	} {
		if _, err := r.Check(&c.wr, 4); err != c.want {
			t.Errorf("%+v: %v, want %v", c.wr, err, c.want)
		}
	}
	if got := r.bind.Error(); got != "x: a bind needs a window, a region and 8 bytes: invalid argument" {
		t.Error(got)
	}
	if !errors.Is(r.RecvSGE, unix.ENOMEM) {
		t.Error(r.RecvSGE)
	}
}
