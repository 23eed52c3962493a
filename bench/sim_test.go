package bench_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"srp-initiator/bench"
	"srp-initiator/completion"
	"srp-initiator/rdma/softroce/simlink"
	"srp-initiator/rdma/softroce/simnet"
	"srp-initiator/rdma/verbs"
	"srp-initiator/srp"
	"srp-initiator/srp/disk"
	"srp-initiator/srp/scsi"
	targetemu "srp-initiator/target-emu"
	"srp-initiator/target-emu/lun"
)

// keptSeeds once failed.
var keptSeeds = []uint64{}

// TestSessionsOverBadNetwork runs whole SRP sessions, initiator and target, in virtual time over a network that loses, duplicates, reorders and
// corrupts up to 5 % of its packets each. Every command is executed exactly once (both ends count the same), every byte is right; then
// the faults end and the session must make progress at once. SRP_SESSIONS is how many seeds.
func TestSessionsOverBadNetwork(t *testing.T) {
	n := 200
	if testing.Short() || raceEnabled {
		n = 20
	}
	if os.Getenv("REQUIRE_ALL") == "1" && !testing.Short() && !raceEnabled {
		n = 2000
	}
	if v := os.Getenv("SRP_SESSIONS"); v != "" {
		var err error
		if n, err = strconv.Atoi(v); err != nil {
			t.Fatal(err)
		}
	}
	var total simTotals
	seeds := append([]uint64(nil), keptSeeds...)
	for i := range n {
		seeds = append(seeds, uint64(i))
	}
	for _, seed := range seeds {
		synctest.Test(t, func(t *testing.T) { simSession(t, seed, &total) })
		if t.Failed() {
			t.Fatalf("seed %d failed", seed)
		}
	}
	t.Logf("%d sessions: %d commands verified, %d packets resent, %d with a bad ICRC refused, %s of virtual time", len(seeds), total.commands, total.resent, total.corrupt, total.took.Round(time.Second))
	if total.resent == 0 || total.corrupt == 0 {
		t.Error("the network did no harm: the test shows nothing")
	}
}

type simTotals struct {
	commands, resent, corrupt uint64
	took                      time.Duration
}

func simSession(t *testing.T, seed uint64, total *simTotals) {
	r := rand.New(rand.NewPCG(seed, 77))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	net := simnet.New(seed)
	f := simnet.Faults{Loss: r.Float64() * .05, Duplicate: r.Float64() * .05, Reorder: r.Float64() * .05, Corrupt: r.Float64() * .05,
		Delay: time.Duration(r.IntN(500)) * time.Microsecond, Jitter: time.Duration(r.IntN(200)) * time.Microsecond, ReorderDelay: time.Millisecond}
	net.SetDefault(f)
	go net.Drive(ctx)
	mtu := verbs.MTU256 + verbs.MTU(r.IntN(5))
	check := func(what string, err error) {
		if err != nil {
			t.Fatalf("seed %d, %s: %v", seed, what, err)
		}
	}
	td, err := simlink.Open(net, netip.MustParseAddr("192.0.2.1"), mtu)
	check("open", err)
	defer td.Close()
	id, err := simlink.Open(net, netip.MustParseAddr("192.0.2.2"), mtu)
	check("open", err)
	defer id.Close()
	sp, err := lun.ParseSpec("ram:1m")
	check("spec", err)
	st, err := lun.OpenStore(sp)
	check("store", err)
	defer st.Close()
	u, err := lun.New(st, lun.Config{BlockSize: 512, Serial: "sim"})
	check("unit", err)
	units := &lun.Map{}
	check("map", units.Add(0, u))
	modes := []completion.Mode{completion.Interrupt, completion.Thread}
	target, err := targetemu.New(td, td.Connector(), targetemu.Config{Listen: netip.MustParseAddrPort("192.0.2.1:5555"), Units: units, IDExt: 1, IOCGUID: 2, RequestLimit: 16,
		Completion: completion.Config{Mode: modes[r.IntN(2)]}})
	check("target", err)
	ended := make(chan error, 1)
	go func() { ended <- target.Serve(ctx) }()

	p, o, err := srp.ParseTarget("srp://192.0.2.1:5555/1:2?queue_size=12&max_sect=128&ch_count=" + strconv.Itoa(1+r.IntN(2)))
	check("target string", err)
	o.Completion = completion.Config{Mode: modes[r.IntN(2)]}
	o.ConnectTimeout, o.CommandTimeout = 10*time.Minute, 10*time.Minute
	began := time.Now()
	s, err := srp.Login(ctx, srp.Config{Device: id, Connector: id.Connector()}, p, o)
	check("login", err)
	l, err := scsi.ParseLUN("0")
	check("lun", err)
	d, err := disk.Open(ctx, s, l)
	check("disk", err)
	w := bench.Workload{Pattern: bench.RandRW, BlockSize: 512 << r.IntN(6), Depth: 1 + r.IntN(8), Jobs: 1 + r.IntN(2), Loops: 30, Verify: true, ReadPct: 50, Seed: seed, Size: 512 << 10}
	res, err := bench.Run(ctx, s, d, w)
	check("workload "+fmt.Sprintf("%+v", w), err)
	total.commands += uint64(res.Verified)
	total.took += time.Since(began)

	// Safety was shown; now liveness: without faults, 30 more commands in well under a second of their time.
	net.SetDefault(simnet.Faults{Delay: f.Delay})
	synctest.Wait()
	time.Sleep(10 * time.Second) // what is under way arrives, timers of the bad times run out
	began = time.Now()
	w.Seed++
	_, err = bench.Run(ctx, s, d, w)
	check("after the faults", err)
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("seed %d: %v for a workload on a perfect network", seed, took)
	}
	ours := s.Stats()
	var theirs uint64
	for _, c := range append(target.Stats().Past, target.Stats().Channels...) {
		theirs += c.Commands
	}
	if ours.Total.Commands != theirs || ours.Total.Responses != ours.Total.Commands || ours.Total.Retries != 0 || ours.Total.UnknownTags != 0 || ours.Reconnects != 0 {
		t.Errorf("seed %d: %d commands sent, %d executed, %d answered, %d sent again, %d unknown tags, %d reconnects", seed, ours.Total.Commands, theirs, ours.Total.Responses, ours.Total.Retries, ours.Total.UnknownTags, ours.Reconnects)
	}
	a, b := id.Stats(), td.Stats()
	total.resent += a.Transport.Retransmits + b.Transport.Retransmits
	total.corrupt += a.ICRCErrors + b.ICRCErrors
	check("close", s.Close())
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("seed %d: target: %v", seed, err)
	}
}
