package mlx5

import (
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"
	"testing"

	"srp-initiator/rdma/verbs/uverbs/internal/abi"
	"srp-initiator/rdma/verbs/uverbs/internal/golden"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
	"srp-initiator/rdma/verbs/uverbs/internal/provider"
	"srp-initiator/rdma/verbs/uverbs/internal/ring"
)

// madeUp is a kernel for one device: what it says of the context and of registers, and what it was asked for.
type madeUp struct {
	golden.Answers
	context abi.MLX5GetContextResp
	reg     uint32 // of the next queue pair, static
	qpn     uint32 // of the last one
	asked   abi.MLX5CreateQP
	uars    uint32
}

func openMadeUp(t *testing.T, context abi.MLX5GetContextResp, env map[string]string) (*madeUp, *device, provider.CQ) {
	k := &madeUp{context: context, qpn: 0x1a2}
	k.context.MaxSQDescSz, k.context.MaxRQDescSz, k.context.MaxSendWQEBB, k.context.MaxRecvWR = 1024, 512, 32768, 32768
	k.Answer = func(w *kernel.Write) error {
		switch w.Command {
		case abi.CmdGetContext:
			copy(w.DriverOut, abi.Bytes(&k.context))
		case abi.CmdCreateCQ:
			copy(w.DriverOut, abi.Bytes(&abi.MLX5CreateCQResp{CQN: 0x400}))
		case abi.CmdCreateQP:
			k.qpn++
			copy(abi.Bytes(&k.asked), w.DriverIn)
			copy(w.CoreOut, abi.Bytes(&abi.CreateQPResp{QPHandle: k.qpn, QPN: k.qpn}))
			copy(w.DriverOut, abi.Bytes(&abi.MLX5CreateQPResp{BfregIndex: k.reg}))
		}
		return nil
	}
	if context.TotBfregs == 0 {
		k.Method = func(c *kernel.Ioctl) error {
			if c.Object != abi.ObjectMLX5UAR || c.Method != abi.MethodMLX5UARAlloc {
				return syscall.EPROTONOSUPPORT
			}
			for i := range c.Attrs {
				switch a := &c.Attrs[i]; a.ID {
				case abi.AttrMLX5UARAllocOffset:
					binary.NativeEndian.PutUint64(a.Data, uint64(k.uars)<<20)
				case abi.AttrMLX5UARAllocLength:
					binary.NativeEndian.PutUint32(a.Data, 4096)
				case abi.AttrMLX5UARAllocPageID:
					binary.NativeEndian.PutUint32(a.Data, 100+k.uars)
				}
			}
			k.uars++
			return nil
		}
	}
	opened, err := Family{Getenv: func(s string) string { return env[s] }}.Open(kernel.NewDevice(k, abi.DriverMLX5), provider.Info{})
	if err != nil {
		t.Fatal(err)
	}
	d := opened.(*device)
	t.Cleanup(func() {
		if d.Close(); k.Unmaps != len(k.Maps) {
			t.Errorf("%d pages mapped, %d unmapped", len(k.Maps), k.Unmaps)
		}
	})
	c, err := d.CreateCQ(kernel.CQArgs{CQE: 15, CompFD: -1})
	if err != nil {
		t.Fatal(err)
	}
	return k, d, c
}

func create(d *device, c provider.CQ) (*qp, error) {
	a := provider.QPArgs{SendCQ: c, RecvCQ: c}
	a.Cap.MaxSendWR, a.Cap.MaxSendSGE = 1, 1
	q, err := d.CreateQP(a)
	if err != nil {
		return nil, err
	}
	return q.(*qp), nil
}

// TestStaticRegisters: which pages are mapped, and where in them the register lies that the kernel names.
func TestStaticRegisters(t *testing.T) {
	for _, c := range []struct {
		total, perPage uint32
		env            map[string]string
		pages          int
		first, step    int64 // of the offsets
	}{
		{16, 1, nil, 8, 0, 4096}, {16, 0, nil, 8, 0, 4096}, {16, 2, nil, 4, 0, 4096}, {2, 1, nil, 1, 0, 4096},
		{1024, 1, nil, 512, 0, 4096},
		{16, 1, map[string]string{"MLX5_SHUT_UP_BF": "1"}, 8, 0x300000, 4096},
	} {
		k, d, q := openMadeUp(t, abi.MLX5GetContextResp{TotBfregs: c.total, NumUARsPerPage: c.perPage, BFRegSize: 512, CacheLineSize: 64, CQEVersion: 1}, c.env)
		if len(k.Maps) != c.pages {
			t.Fatalf("%+v: %d pages", c, len(k.Maps))
		}
		for i, off := range k.Maps {
			if want := c.first + int64(i&0xff)*c.step + int64(i>>8)<<28; off != want { // the index's upper bits lie above the command
				t.Errorf("%+v: page %d at %#x, want %#x", c, i, off, want)
			}
		}
		for _, index := range []uint32{0, 1, 2, 3, 4, 7, uint32(4*c.pages) - 1} {
			if int(index) >= 4*c.pages {
				continue
			}
			k.reg = index
			p, err := create(d, q)
			if err != nil {
				t.Fatal(err)
			}
			half, units := uintptr(256), uint32(16)
			if index == 0 {
				half, units = 0, 0
			}
			if c.env != nil {
				units = 0
			}
			r := p.reg
			if uintptr(r.base) != uintptr(ring.Addr(d.pages[index/4].mem))+0x800+uintptr(index%4)*512 || r.half != half || r.copyMax != units || r.copyInlineMax != units || !r.shared {
				t.Errorf("%+v: register %d is %+v", c, index, r)
			}
			if k.asked.Flags&0x400 != 0 || k.asked.Flags&2 == 0 {
				t.Errorf("flags %#x", k.asked.Flags)
			}
			if again, err := create(d, q); err != nil || again.reg != r {
				t.Errorf("%+v: register %d twice: %v", c, index, err)
			}
		}
		k.reg = uint32(4 * c.pages)
		if _, err := create(d, q); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%+v: register %d: %v", c, k.reg, err)
		}
	}
	// A register whose 8 bytes would not lie in the page.
	k, d, q := openMadeUp(t, abi.MLX5GetContextResp{TotBfregs: 16, NumUARsPerPage: 1, BFRegSize: 1024, CQEVersion: 1}, nil)
	for reg, ok := range []bool{true, true, false, false} {
		k.reg = uint32(reg)
		if _, err := create(d, q); (err == nil) != ok {
			t.Errorf("register %d of 1024 bytes: %v", reg, err)
		}
	}
}

// TestDynamicRegisters: two queue pairs to a page, each with a register of its own, until there are 64; later ones
// share the last page's. A register that is given back goes to the next.
func TestDynamicRegisters(t *testing.T) {
	k, d, c := openMadeUp(t, abi.MLX5GetContextResp{BFRegSize: 512, CacheLineSize: 64, CQEVersion: 1}, nil)
	var qps []*qp
	for i := range 70 {
		q, err := create(d, c)
		if err != nil {
			t.Fatal(err)
		}
		page, second := min(i/2, 31), i%2
		r := q.reg
		if r.uar != uint32(101+page) || k.asked.BfregIndex != r.uar || k.asked.Flags&0x400 == 0 || r.shared != (i >= 62) ||
			uintptr(r.base) != uintptr(ring.Addr(d.pages[1+page].mem))+0x800+uintptr(second)*512 || r.half != 256 || r.copyMax != 16 {
			t.Errorf("queue pair %d, uar %d: %+v", i, k.asked.BfregIndex, r)
		}
		if k.asked.UIDX != uint32(i) || q.rsn != uint32(i) || d.qps.Get(uint32(i)) != &q.QP {
			t.Errorf("queue pair %d has index %d", i, k.asked.UIDX)
		}
		qps = append(qps, q)
	}
	if k.uars != 33 {
		t.Errorf("%d pages", k.uars)
	}
	for _, i := range []int{5, 66} {
		reg := qps[i].reg
		if _, err := qps[i].Destroy(); err != nil {
			t.Fatal(err)
		}
		q, err := create(d, c)
		if err != nil || q.rsn != uint32(i) || i == 5 && q.reg != reg || q.reg.shared != (i == 66) {
			t.Errorf("after queue pair %d: %v, %+v", i, err, q)
		}
	}
	// Without BlueFlame all ring the uncached page, where nothing combines.
	k, d, c = openMadeUp(t, abi.MLX5GetContextResp{CacheLineSize: 64, CQEVersion: 1}, nil)
	for range 3 {
		q, err := create(d, c)
		if err != nil {
			t.Fatal(err)
		}
		if r := q.reg; uintptr(r.base) != uintptr(ring.Addr(d.pages[0].mem))+0x800 || r.half != 0 || r.shared || r.uar != 100 || k.uars != 1 {
			t.Errorf("without BlueFlame: %+v", r)
		}
	}
}

// TestVersionZero: queue pairs go by their number, and by the index that says so.
func TestVersionZero(t *testing.T) {
	k, d, c := openMadeUp(t, abi.MLX5GetContextResp{TotBfregs: 16, NumUARsPerPage: 1, BFRegSize: 512, CacheLineSize: 1}, nil)
	q, err := create(d, c)
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprintf("%#x %#x %v", k.asked.UIDX, q.rsn, d.qps.Get(k.qpn) == &q.QP); got != "0xffffff 0x1a3 true" {
		t.Error(got)
	}
	if ring.AddrOf(q.Record)%8 != 0 || len(q.Record) < 8 {
		t.Errorf("record of %d bytes at %#x", len(q.Record), ring.AddrOf(q.Record))
	}
	if _, err := q.Destroy(); err != nil || d.qps.Get(k.qpn) != nil {
		t.Error(err)
	}
}
