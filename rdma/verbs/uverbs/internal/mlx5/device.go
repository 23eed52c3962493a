package mlx5

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/abi"
	"srp-initiator/rdma/verbs/uverbs/internal/dbrec"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
	"srp-initiator/rdma/verbs/uverbs/internal/provider"
	"srp-initiator/rdma/verbs/uverbs/internal/ring"
)

const (
	pageSize   = 4096
	bfRegister = 0x800 // of the first doorbell register in a UAR page (MLX5_BF_OFFSET)

	// What the library asks for: 16 registers, 4 of them for latency. A kernel with static UARs grants them.
	totalBfregs      = 16
	lowLatencyBfregs = 4
	regsPerUAR       = 2 // in the order of the kernel's index there are 4, of which the last 2 are the firmware's

	// Queue pairs that have a register for themselves where the kernel allocates UARs one by
	// one; later ones share the last page's registers under a lock.
	exclusiveRegisters = 64
)

// Family is the ConnectX-4 and later family. The zero value takes the switches from the environment.
type Family struct {
	Getenv func(string) string
}

func (Family) Name() string              { return "mlx5" }
func (Family) DriverID() uint32          { return abi.DriverMLX5 }
func (Family) ABI() (oldest, newest int) { return abi.MLX5Version, abi.MLX5Version }

// device is an opened adapter.
type device struct {
	k       *kernel.Device
	opt     options
	resp    abi.MLX5GetContextResp
	lim     Limits
	vectors int
	qps     QPTable
	records dbrec.Records

	mu       sync.Mutex // guards what follows, and Set of qps
	pages    []*uar
	dynamic  bool
	cqPage   *uar // for completion queues; dynamic: the uncached page
	free     []*Register
	shared   []*Register // dynamic: registers that queue pairs share
	nextOpen int         // of shared
	made     int         // exclusive registers made
	static   map[uint32]*Register
}

// uar is one mapped page of doorbell registers.
type uar struct {
	mem    []byte
	id     uint32 // dynamic: what create commands call it
	handle uint64
}

// Open implements provider.Family.
func (f Family) Open(k *kernel.Device, info provider.Info) (provider.Device, error) {
	getenv := f.Getenv
	if getenv == nil {
		getenv = os.Getenv
	}
	d := &device{k: k, opt: optionsFromEnv(getenv), static: map[uint32]*Register{}}
	if err := d.getContext(); err != nil {
		return nil, err
	}
	d.lim = Limits{MaxSendDesc: int(d.resp.MaxSQDescSz), MaxRecvDesc: int(d.resp.MaxRQDescSz),
		MaxSendBlocks: int(d.resp.MaxSendWQEBB), MaxRecvWR: int(d.resp.MaxRecvWR)}
	d.records = dbrec.Records{Stride: max(8, int(d.resp.CacheLineSize))}
	d.dynamic = d.resp.TotBfregs == 0
	var err error
	if d.dynamic {
		d.cqPage, err = d.allocUAR(abi.MLX5UARNoCache)
	} else {
		err = d.mapStatic()
	}
	if err != nil {
		d.Close()
		return nil, fmt.Errorf("mlx5: doorbell pages: %w", err)
	}
	return d, nil
}

// getContext starts the context. A kernel that knows less than the request says EINVAL: shorter requests follow, as in libmlx5, and
// then the same without DEVX, which needs a privilege that nothing here depends on.
func (d *device) getContext() (err error) {
	for _, flags := range []uint32{abi.MLX5ContextDEVX, 0} {
		for _, n := range []int{32, 24, 16} {
			req := &abi.MLX5GetContext{TotalNumBfregs: totalBfregs, NumLowLatencyBfregs: lowLatencyBfregs, Flags: flags,
				MaxCQEVersion: 1, LibCaps: abi.MLX5Lib4KUAR | abi.MLX5LibDynUAR}
			d.resp = abi.MLX5GetContextResp{}
			d.vectors, err = d.k.GetContext(abi.Bytes(req)[:n], abi.Bytes(&d.resp))
			if !errors.Is(err, syscall.EINVAL) {
				return err
			}
		}
	}
	return err
}

// mapStatic maps the pages of registers that came with the context.
func (d *device) mapStatic() error {
	perPage := max(1, int(d.resp.NumUARsPerPage))
	cmd := abi.MLX5MmapRegular
	if d.opt.NoBlueFlame {
		cmd = abi.MLX5MmapNC
	}
	for i := range int(d.resp.TotBfregs) / (perPage * regsPerUAR) {
		mem, err := d.k.Mmap(int64(cmd<<8|i&0xff|i>>8<<16)*pageSize, pageSize, protWrite)
		if err != nil {
			return err
		}
		d.pages = append(d.pages, &uar{mem: mem, id: uint32(i)})
	}
	if len(d.pages) == 0 {
		return fmt.Errorf("the kernel grants %d registers: %w", d.resp.TotBfregs, syscall.EINVAL)
	}
	d.cqPage = d.pages[0]
	return nil
}

// protWrite is PROT_WRITE: registers are never read.
const protWrite = syscall.PROT_WRITE

// allocUAR makes a UAR object and maps its page.
func (d *device) allocUAR(typ byte) (*uar, error) {
	kind := [8]byte{typ}
	var offset, length, id [8]byte
	attrs := []kernel.Attr{
		{ID: abi.AttrMLX5UARAllocHandle, Kind: kernel.HandleOut, Flags: abi.AttrMandatory},
		{ID: abi.AttrMLX5UARAllocType, Kind: kernel.In, Flags: abi.AttrMandatory, Data: kind[:]},
		{ID: abi.AttrMLX5UARAllocOffset, Kind: kernel.Out, Flags: abi.AttrMandatory, Data: offset[:]},
		{ID: abi.AttrMLX5UARAllocLength, Kind: kernel.Out, Flags: abi.AttrMandatory, Data: length[:4]},
		{ID: abi.AttrMLX5UARAllocPageID, Kind: kernel.Out, Flags: abi.AttrMandatory, Data: id[:4]},
	}
	if err := d.k.Method(abi.ObjectMLX5UAR, abi.MethodMLX5UARAlloc, attrs); err != nil {
		return nil, err
	}
	u := &uar{handle: attrs[0].Value, id: binary.NativeEndian.Uint32(id[:])}
	mem, err := d.k.Mmap(int64(binary.NativeEndian.Uint64(offset[:])), int(binary.NativeEndian.Uint32(length[:])), protWrite)
	if err != nil {
		d.destroyUAR(u)
		return nil, err
	}
	u.mem = mem
	d.pages = append(d.pages, u)
	return u, nil
}

func (d *device) destroyUAR(u *uar) {
	if u.mem != nil {
		d.k.Munmap(u.mem)
	}
	if d.dynamic {
		d.k.Method(abi.ObjectMLX5UAR, abi.MethodMLX5UARDestroy, []kernel.Attr{
			{ID: abi.AttrMLX5UARDestroyHandle, Kind: kernel.HandleIn, Flags: abi.AttrMandatory, Value: u.handle}})
	}
}

func (d *device) CompVectors() int { return d.vectors }

// AllocPD implements provider.Device.
func (d *device) AllocPD() (uint32, error) {
	return d.k.AllocPD(nil, abi.Bytes(new(abi.MLX5AllocPDResp)))
}

// Close implements provider.Device.
func (d *device) Close() {
	for i := len(d.pages) - 1; i >= 0; i-- {
		d.destroyUAR(d.pages[i])
	}
	d.pages = nil
}

// blueFlame is how many bytes a half of a register takes, 0 when doorbells are all there is.
func (d *device) blueFlame() int { return int(d.resp.BFRegSize) / 2 }

// register finds a doorbell register for a queue pair where UARs are allocated one by one. mu is held.
func (d *device) register() (*Register, error) {
	if d.blueFlame() == 0 || d.opt.NoBlueFlame {
		// The uncached page: plain doorbells do not combine, and share it without a lock.
		return d.makeRegister(d.cqPage, bfRegister, 0), nil
	}
	if n := len(d.free); n > 0 {
		r := d.free[n-1]
		d.free = d.free[:n-1]
		return r, nil
	}
	if d.made >= exclusiveRegisters {
		r := d.shared[d.nextOpen%len(d.shared)]
		d.nextOpen++
		return r, nil
	}
	u, err := d.allocUAR(abi.MLX5UARBlueFlame)
	if err != nil {
		return nil, err
	}
	first := d.makeRegister(u, bfRegister, d.blueFlame())
	second := d.makeRegister(u, bfRegister+2*d.blueFlame(), d.blueFlame())
	d.made += 2
	if d.made >= exclusiveRegisters {
		first.shared, second.shared = true, true
		d.shared = []*Register{first, second}
		d.nextOpen = 1
		return first, nil
	}
	d.free = append(d.free, second)
	return first, nil
}

func (d *device) makeRegister(u *uar, off, half int) *Register {
	r := newRegister(ring.Addr(u.mem[off:]), half, d.opt)
	r.uar = u.id
	return r
}

// staticRegister is the register that the kernel chose. mu is held.
func (d *device) staticRegister(index uint32) (*Register, error) {
	if r := d.static[index]; r != nil {
		return r, nil
	}
	page, n := int(index/4), int(index%4)
	off := bfRegister + n*int(d.resp.BFRegSize)
	if page >= len(d.pages) || off+8 > pageSize {
		return nil, fmt.Errorf("mlx5: the kernel names register %d, there are %d pages: %w", index, len(d.pages), syscall.EINVAL)
	}
	half := d.blueFlame()
	if index == 0 {
		half = 0 // for doorbells only
	}
	r := d.makeRegister(d.pages[page], off, half)
	r.shared = true // the kernel may give it to other queue pairs too
	d.static[index] = r
	return r, nil
}

// giveBack returns an exclusive register. mu is held.
func (d *device) giveBack(r *Register) {
	if d.dynamic && r != nil && !r.shared && r.half > 0 {
		d.free = append(d.free, r)
	}
}

// CreateCQ implements provider.Device.
func (d *device) CreateCQ(a kernel.CQArgs) (_ provider.CQ, err error) {
	n, err := CQEntries(a.CQE)
	if err != nil {
		return nil, err
	}
	c := &cq{d: d}
	defer func() {
		if err != nil {
			c.Release()
		}
	}()
	size := d.opt.CQESize
	if err = c.Alloc(n*size, &d.records); err != nil {
		return nil, err
	}
	c.init(ring.Addr(c.Pages.Bytes()), ring.Addr(c.Record), n, size, &d.qps, d.resp.CQEVersion == 0)
	req := &abi.MLX5CreateCQ{BufAddr: c.Pages.Addr(), DBAddr: ring.AddrOf(c.Record), CQESize: uint32(size)}
	page := d.cqPage
	if d.dynamic {
		req.Flags = abi.MLX5CQUARPageIndex
		req.UARPageIndex = uint16(page.id)
	}
	c.armReg = ring.Addr(page.mem[armOffset:]) // of a closed device: the command fails before it is used
	resp := new(abi.MLX5CreateCQResp)
	a.CQE = n - 1
	if c.ID, _, err = d.k.CreateCQ(a, abi.Bytes(req), abi.Bytes(resp)); err != nil {
		return nil, err
	}
	c.cqn = resp.CQN
	return c, nil
}

// cq is a completion queue with what it owns.
type cq struct {
	CQ
	ring.Queue
	d *device
}

// Destroy implements provider.CQ.
func (c *cq) Destroy() (abi.DestroyCQResp, error) { return ring.DestroyCQ(c.d.k, &c.Queue) }

// qp is a queue pair with what it owns.
type qp struct {
	QP
	ring.Queue
	d *device
}

// CreateQP implements provider.Device.
func (d *device) CreateQP(a provider.QPArgs) (_ provider.QP, err error) {
	l, err := SizeQP(a.Wanted(), d.lim)
	if err != nil {
		return nil, err
	}
	send, recv, err := provider.OwnCQs[*cq](&a, string(family))
	if err != nil {
		return nil, err
	}
	q := &qp{d: d}
	q.send, q.recv = &send.CQ, &recv.CQ
	d.mu.Lock()
	defer d.mu.Unlock()
	byQPN := d.resp.CQEVersion == 0
	named := false
	defer func() {
		if err != nil {
			if named {
				d.qps.Set(q.rsn, nil)
			}
			d.giveBack(q.reg)
			q.Release()
		}
	}()
	notes := ring.Align(l.Bytes, pageSize) // behind the rings, on pages that the adapter does not see
	if err = q.Alloc(max(notes+notesBytes(&l), 1), &d.records); err != nil {
		return nil, err
	}
	req := &abi.MLX5CreateQP{BufAddr: q.Pages.Addr(), DBAddr: ring.AddrOf(q.Record), SQWQECount: uint32(l.SendBlocks),
		RQWQECount: uint32(l.RecvCount), RQWQEShift: uint32(l.RecvShift), UIDX: abi.MLX5NoUIDX}
	if !d.opt.NoScatterCQE {
		req.Flags |= abi.MLX5QPScatterCQE
	}
	if d.resp.CompMask&abi.MLX5RespECE != 0 {
		req.ECEOptions = abi.MLX5ECETrigger
	}
	if !byQPN {
		n, ok := d.qps.Free(abi.MLX5NoUIDX)
		if !ok {
			return nil, fmt.Errorf("mlx5: no user index is free: %w", syscall.ENOMEM)
		}
		q.rsn, req.UIDX, named = n, n, true
		d.qps.Set(n, &q.QP)
	}
	if d.dynamic {
		if q.reg, err = d.register(); err != nil {
			return nil, err
		}
		req.Flags |= abi.MLX5QPUARPageIndex
		req.BfregIndex = q.reg.uar
	}
	a.Cap.MaxInlineData = uint32(l.Cap.MaxInlineData)
	resp := new(abi.MLX5CreateQPResp)
	r, err := d.k.CreateQP(a.QPArgs, abi.Bytes(req), abi.Bytes(resp))
	if err != nil {
		return nil, err
	}
	q.qpn, q.ID = r.QPN, r.Handle
	if !d.dynamic {
		if q.reg, err = d.staticRegister(resp.BfregIndex); err != nil {
			d.k.DestroyQP(r.Handle)
			return nil, err
		}
	}
	q.init(l, ring.Addr(q.Pages.Bytes()), ring.At(q.Pages.Bytes(), notes), ring.Addr(q.Record), q.reg, a.SignalAll)
	if byQPN {
		q.rsn = q.qpn
		d.qps.Set(q.rsn, &q.QP)
	}
	return q, nil
}

// Modify implements provider.QP.
func (q *qp) Modify(req *abi.ModifyQP, from, to verbs.QPState) error {
	if err := q.d.k.ModifyQP(req); err != nil {
		return err
	}
	if req.AttrMask&uint32(verbs.QPMaskState) != 0 {
		q.moved(to)
	}
	return nil
}

// Destroy implements provider.QP. After the command the adapter makes no more entries of the queue pair; once it is out of
// the table and its entries are out of the queues, no poller can meet it.
func (q *qp) Destroy() (uint32, error) {
	// Held throughout, and in CreateQP: the kernel may give the number to a new queue pair at once.
	d := q.d
	d.mu.Lock()
	defer d.mu.Unlock()
	n, err := d.k.DestroyQP(q.ID)
	if err != nil {
		return n, err
	}
	d.qps.Set(q.rsn, nil)
	q.purge()
	d.giveBack(q.reg)
	q.Release()
	return n, nil
}
