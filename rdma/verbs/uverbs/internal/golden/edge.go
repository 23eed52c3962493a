package golden

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"srp-initiator/rdma/verbs"
)

// PairRig is two queue pairs, of 4 receives each, on one completion queue of 16 entries. All are new.
type PairRig interface {
	Rig
	QPN(qp int) uint32
	Cap(qp int) verbs.QPCap
	// FailedCQE is the completion entry of a request that failed, with code in the two bytes of vendor code and syndrome.
	FailedCQE(qp int, index, producer uint32, recv bool, code uint16) []byte
}

// PairCase is the setup of a PairRig: its completion queue, and two register pages.
func PairCase(profile string) *Case {
	return &Case{Profile: profile, Setup: &Objects{UARPages: make([]UARPage, 2),
		CQ: []CQ{{Name: "cq0", CQN: 0x400, Entries: 16, IBVCQE: 15, CQESize: 64}}}}
}

// PairCap is its queue pairs.
var PairCap = verbs.QPCap{MaxSendWR: 16, MaxRecvWR: 4, MaxSendSGE: 2, MaxRecvSGE: 2}

// Edge is what the drivers' tests have in common at the edges that the recordings do not reach.
type Edge struct {
	Driver
	Profiles []string // kinds of pairs
	Pair     func(t *testing.T, profile string) PairRig
	// CQEntries is the driver's, for less than MaxEntries.
	CQEntries  func(capacity int) (int, error)
	MaxEntries int
	ByteLen    int    // offset of the byte count from a completion entry's end
	FirstSN    uint32 // sequence number of the first event
	Doorbell   uint32 // what the first word of the arm doorbell has besides the record's
	// Restarted looks at the first queue pair after RESET, before INIT, and takes it to where it can post. nil: it can.
	Restarted func(t *testing.T, r PairRig)
}

// Test runs all.
func (e Edge) Test(t *testing.T) {
	for _, profile := range e.Profiles {
		t.Run(profile, func(t *testing.T) {
			t.Run("Purge", func(t *testing.T) { e.purge(t, profile) })
			t.Run("PurgeIndex", func(t *testing.T) { e.purgeIndex(t, profile) })
			t.Run("StaleCompletions", func(t *testing.T) { e.staleCompletions(t, profile) })
			t.Run("Opcodes", func(t *testing.T) { e.opcodes(t, profile) })
			t.Run("Restart", func(t *testing.T) { e.restart(t, profile) })
			t.Run("Sequence", func(t *testing.T) { e.sequence(t, profile) })
		})
	}
	t.Run("CQEntries", e.entries)
	t.Run("ReceiveCaps", e.receiveCaps)
}

// arrive puts entry b at producer index i.
func arrive(r PairRig, i uint32, b []byte) { copy(r.CQRing(0)[int(i&15)*len(b):], b) }

// skip moves the consumer index of a new queue, whose entries are then those of completions that have been read.
func skip(r PairRig, to uint32) {
	for i := to - 16; i != to; i++ {
		arrive(r, i, r.RecvCQE(0, i))
	}
	r.SkipCompletions(0, to)
}

// purge resets one of two queue pairs whose completions are mixed in one queue, at the ring's end too.
func (e Edge) purge(t *testing.T, profile string) {
	for _, start := range []uint32{0, 8, 13} {
		r := e.Pair(t, profile)
		skip(r, start)
		for qp := range 2 {
			for k := range 4 {
				if _, err := r.PostRecv(qp, []verbs.RecvWorkRequest{{WRID: uint64(10*qp + k), SGList: []verbs.SGE{{Addr: MemoryAddr, Length: 64}}}}); err != nil {
					t.Fatal(err)
				}
			}
		}
		for i, qp := range []int{0, 1, 0, 0, 1, 1} {
			at := start + uint32(i)
			b := r.RecvCQE(qp, at)
			binary.BigEndian.PutUint32(b[len(b)-e.ByteLen:], at)
			arrive(r, at, b)
		}
		r.Modify(0, verbs.QPReset)
		if got := binary.BigEndian.Uint32(r.CQRecord(0)); got != start+3 {
			t.Errorf("consumer index %d after the reset, want %d", got, start+3)
		}
		var wcs [8]verbs.WorkCompletion
		if n := r.Poll(0, wcs[:]); n != 3 {
			t.Fatalf("%d completions left, want 3", n)
		}
		for k, at := range []uint32{1, 4, 5} {
			if wcs[k].QPN != r.QPN(1) || wcs[k].WRID != uint64(10+k) || wcs[k].ByteLen != start+at {
				t.Errorf("completion %d is %+v", k, wcs[k])
			}
		}
		if got := binary.BigEndian.Uint32(r.CQRecord(0)); got != start+6 {
			t.Errorf("consumer index %d, want %d", got, start+6)
		}
		r.Modify(0, verbs.QPInitState)
		for k := range 5 {
			_, err := r.PostRecv(0, []verbs.RecvWorkRequest{{WRID: uint64(20 + k)}})
			if (err != nil) != (k == 4) {
				t.Errorf("receive %d after the reset: %v", k, err)
			}
		}
		at := start + 6
		arrive(r, at, r.RecvCQE(0, at))
		if n := r.Poll(0, wcs[:]); n != 1 || wcs[0].WRID != 20 {
			t.Errorf("%d completions after the reset, %+v", n, wcs[0])
		}
	}
}

// purgeIndex looks at all bits of the consumer index that a purge stores.
func (e Edge) purgeIndex(t *testing.T, profile string) {
	for _, start := range []uint32{0x555553, 0xaaaaa8, 0xfffffd, 0xffffffff} {
		r := e.Pair(t, profile)
		skip(r, start)
		for i := range uint32(2) {
			arrive(r, start+i, r.RecvCQE(0, start+i))
		}
		r.Modify(0, verbs.QPReset)
		if got := binary.BigEndian.Uint32(r.CQRecord(0)); got != (start+2)&0xffffff {
			t.Errorf("from %#x: %#x", start, got)
		}
	}
}

// staleCompletions: what a completion has no word for is zero, whatever the caller's memory held.
func (e Edge) staleCompletions(t *testing.T, profile string) {
	r := e.Pair(t, profile)
	if _, err := r.PostSend(0, []verbs.SendWorkRequest{{WRID: 1}, {WRID: 2}}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.PostRecv(0, []verbs.RecvWorkRequest{{WRID: 3}, {WRID: 4}}); err != nil {
		t.Fatal(err)
	}
	for i, b := range [][]byte{r.SendCQE(0, 0, 0), r.FailedCQE(0, 1, 1, false, 0x8115), r.RecvCQE(0, 2), r.FailedCQE(0, 3, 3, true, 0xf505)} {
		arrive(r, uint32(i), b)
	}
	stale := verbs.WorkCompletion{WRID: 1<<64 - 1, Status: 1<<31 - 1, Opcode: 1<<31 - 1, ByteLen: 1<<32 - 1, ImmData: 1<<32 - 1, QPN: 1<<32 - 1,
		Flags: 1<<31 - 1, VendorErr: 1<<32 - 1}
	wcs := [5]verbs.WorkCompletion{stale, stale, stale, stale, stale}
	qpn := r.QPN(0)
	want := [5]verbs.WorkCompletion{
		{WRID: 1, QPN: qpn},
		{WRID: 2, QPN: qpn, Status: verbs.WCRetryExceeded, VendorErr: 0x81},
		{WRID: 3, QPN: qpn, Opcode: verbs.WCRecv},
		{WRID: 4, QPN: qpn, Status: verbs.WCFlushError, VendorErr: 0xf5},
		stale,
	}
	if n := r.Poll(0, wcs[:]); n != 4 || wcs != want {
		t.Errorf("%d completions\n%+v, want\n%+v", n, wcs, want)
	}
}

// opcodes: an operation that is none is refused, wherever its bits lie.
func (e Edge) opcodes(t *testing.T, profile string) {
	r := e.Pair(t, profile)
	before := bytes.Clone(r.SQ(0))
	for _, sges := range [][]verbs.SGE{nil, {{Addr: MemoryAddr, Length: 8}}} {
		for _, op := range []verbs.SendOpcode{11, 15, 16, 18, 32 + verbs.OpSend, 1<<8 + verbs.OpSend, 1<<30 + verbs.OpRDMARead} {
			if n, err := r.PostSend(0, []verbs.SendWorkRequest{{Opcode: op, SGList: sges}}); n != 0 || !errors.Is(err, syscall.EINVAL) {
				t.Errorf("operation %d: %d, %v", op, n, err)
			}
		}
	}
	if !bytes.Equal(before, r.SQ(0)) {
		t.Error("a refused request was written")
	}
}

// restart takes a used queue pair through RESET: it holds what it held when new, and no more.
func (e Edge) restart(t *testing.T, profile string) {
	r := e.Pair(t, profile)
	reset := func(lap int) {
		r.Modify(0, verbs.QPReset)
		if rec := r.QPRecord(0); !bytes.Equal(rec, make([]byte, len(rec))) {
			t.Errorf("lap %d: the record says %x", lap, rec[:8])
		}
		if e.Restarted != nil {
			e.Restarted(t, r)
		}
		r.Modify(0, verbs.QPInitState)
		r.Modify(0, verbs.QPReadyToSend)
	}
	var wcs [4]verbs.WorkCompletion
	at := uint32(0) // producer index
	for lap := range 3 {
		done := []uint32{2, 0, 1}[lap]
		for i, n := 0, r.Cap(0).MaxSendWR+1; i < n; i++ {
			_, err := r.PostSend(0, []verbs.SendWorkRequest{{WRID: uint64(i)}})
			if (err != nil) != (i == n-1) {
				t.Fatalf("lap %d: send %d of %d: %v", lap, i, n-1, err)
			}
		}
		for i, n := 0, r.Cap(0).MaxRecvWR+1; i < n; i++ {
			_, err := r.PostRecv(0, []verbs.RecvWorkRequest{{WRID: uint64(100 + i)}})
			if (err != nil) != (i == n-1) {
				t.Fatalf("lap %d: receive %d of %d: %v", lap, i, n-1, err)
			}
		}
		arrive(r, at, r.SendCQE(0, done, at))
		arrive(r, at+1, r.RecvCQE(0, at+1))
		at += 2
		if n := r.Poll(0, wcs[:]); n != 2 || wcs[0].WRID != uint64(done) || wcs[1].WRID != 100 {
			t.Fatalf("lap %d: %d completions, %+v", lap, n, wcs)
		}
		for i := range done + 2 { // as many sends are done, and a receive
			_, err := r.PostSend(0, []verbs.SendWorkRequest{{}})
			if (err != nil) != (i == done+1) {
				t.Fatalf("lap %d: send %d after a completion: %v", lap, i, err)
			}
			if i > 1 {
				continue
			}
			if _, err = r.PostRecv(0, []verbs.RecvWorkRequest{{}}); (err != nil) != (i == 1) {
				t.Fatalf("lap %d: receive %d after a completion: %v", lap, i, err)
			}
		}
		reset(lap)
		if lap == 1 { // from here on with one entry to be purged
			arrive(r, at, r.SendCQE(1, 0, at))
			arrive(r, at+1, r.RecvCQE(0, at+1))
			at += 2
			reset(lap)
			if n := r.Poll(0, wcs[:]); n != 1 || wcs[0].QPN != r.QPN(1) {
				t.Errorf("%d completions after the purge: %+v", n, wcs[:n])
			}
		}
	}
}

// sequence: two bits of the number of events travel with a request for the next, and they come round. A request for any completion stays one
// until it is answered. The answer says whether there is an entry that was not polled.
func (e Edge) sequence(t *testing.T, profile string) {
	r := e.Pair(t, profile)
	for sn := range uint32(70) {
		if missed, err := r.Arm(0, true); missed || err != nil {
			t.Errorf("after %d events: missed %v (%v)", sn, missed, err)
		}
		want := (sn+e.FirstSN)%4<<28 | 1<<24
		if got := binary.BigEndian.Uint32(r.CQRecord(0)[4:]); got != want {
			t.Errorf("after %d events: record %#x, want %#x", sn, got, want)
		}
		if got := binary.BigEndian.Uint32(r.UAR(0)[0x20:]); got != want|e.Doorbell {
			t.Errorf("after %d events: doorbell %#x, want %#x", sn, got, want|e.Doorbell)
		}
		r.Arm(0, false)
		any := binary.BigEndian.Uint32(r.CQRecord(0)[4:])
		r.Arm(0, true)
		if got := binary.BigEndian.Uint32(r.CQRecord(0)[4:]); any == want || got != any {
			t.Errorf("after %d events: armed with %#x for any completion, then with %#x", sn, any, got)
		}
		r.Notified(0)
	}
	arrive(r, 0, r.RecvCQE(0, 0))
	if missed, err := r.Arm(0, false); !missed || err != nil {
		t.Errorf("an entry was missed unsaid: %v (%v)", missed, err)
	}
}

func (e Edge) entries(t *testing.T) {
	for _, c := range [][2]int{{1, 2}, {15, 16}, {16, 32}} { // one more than asked for, as the library has it
		if k, err := e.CQEntries(c[0]); err != nil || k != c[1] {
			t.Errorf("a queue for %d completions has %d (%v), want %d", c[0], k, err, c[1])
		}
	}
	for _, n := range []int{-1, 0, e.MaxEntries} {
		if k, err := e.CQEntries(n); err == nil {
			t.Errorf("a queue for %d completions has %d", n, k)
		} else if k != 0 || !strings.Contains(err.Error(), fmt.Sprintf(" %d exceeds the device's %d:", n, e.MaxEntries-1)) {
			t.Errorf("%d completions: %d, %v", n, k, err)
		}
	}
}

// receiveCaps: the kernel rounds the entries of a receive up in the same way (set_rq_size of mlx4_ib and mlx5_ib).
func (e Edge) receiveCaps(t *testing.T) {
	for n, granted := range []int{1, 1, 2, 4, 4, 8, 8, 8, 8, 16, 16, 16, 16, 16, 16, 16, 16, 32} {
		got, _, err := e.Layout(verbs.QPCap{MaxSendWR: 5, MaxRecvWR: 3, MaxSendSGE: 1, MaxRecvSGE: n})
		if err != nil || got.MaxRecvSGE != granted || got.MaxRecvWR != 4 {
			t.Errorf("%d receive entries: %+v (%v)", n, got, err)
		}
	}
}
