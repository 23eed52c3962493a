package mlx4

import (
	"fmt"
	"math/bits"
	"sync"
	"syscall"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/abi"
	"srp-initiator/rdma/verbs/uverbs/internal/dbrec"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
	"srp-initiator/rdma/verbs/uverbs/internal/provider"
	"srp-initiator/rdma/verbs/uverbs/internal/ring"
)

const pageSize = 4096

// Family is the ConnectX-3 family.
type Family struct{}

func (Family) Name() string              { return "mlx4" }
func (Family) DriverID() uint32          { return abi.DriverMLX4 }
func (Family) ABI() (oldest, newest int) { return abi.MLX4VersionV3, abi.MLX4Version }

// device is an opened adapter.
type device struct {
	k         *kernel.Device
	lim       Limits
	cqeSize   int
	vectors   int
	uar       []byte // doorbell page
	bfPage    []byte // BlueFlame page, nil without
	bf        *blueFlame
	qps       QPTable
	cqRecords dbrec.Records
	qpRecords dbrec.Records

	mu sync.Mutex // held while queue pairs come and go; guards Set of qps
}

// Open implements provider.Family.
func (Family) Open(k *kernel.Device, info provider.Info) (provider.Device, error) {
	d := &device{k: k, cqeSize: 32, bf: &blueFlame{},
		cqRecords: dbrec.Records{Stride: 8}, qpRecords: dbrec.Records{Stride: 4}}
	var resp abi.MLX4GetContextResp
	var err error
	if info.ABIVersion == abi.MLX4VersionV3 {
		var v3 abi.MLX4GetContextRespV3
		d.vectors, err = k.GetContext(nil, abi.Bytes(&v3))
		resp.BFRegSize, resp.BFRegsPerPage = v3.BFRegSize, v3.BFRegsPerPage
	} else {
		d.vectors, err = k.GetContext(nil, abi.Bytes(&resp))
	}
	if err != nil {
		return nil, err
	}
	if resp.DevCaps&abi.MLX4UserDevCapCQESize != 0 {
		d.cqeSize = int(resp.CQESize)
		if d.cqeSize != 32 && d.cqeSize != 64 {
			return nil, fmt.Errorf("mlx4: completion entries of %d bytes are not known: %w", d.cqeSize, syscall.EINVAL)
		}
	}
	if d.uar, err = k.Mmap(0, pageSize, syscall.PROT_WRITE); err != nil {
		return nil, fmt.Errorf("mlx4: doorbell page: %w", err)
	}
	if resp.BFRegSize > 0 {
		// Without the page there are still doorbells.
		if d.bfPage, err = k.Mmap(pageSize, pageSize, syscall.PROT_WRITE); err == nil {
			d.bf = newBlueFlame(ring.Addr(d.bfPage), int(resp.BFRegSize)/2)
		}
	}
	attr, err := k.QueryDevice()
	if err != nil {
		d.Close()
		return nil, fmt.Errorf("mlx4: device limits: %w", err)
	}
	d.lim = Limits{MaxWR: int(attr.MaxQPWR), MaxSGE: int(attr.MaxSGE)}
	return d, nil
}

func (d *device) CompVectors() int { return d.vectors }

// AllocPD implements provider.Device.
func (d *device) AllocPD() (uint32, error) {
	return d.k.AllocPD(nil, abi.Bytes(new(abi.MLX4AllocPDResp)))
}

// Close implements provider.Device.
func (d *device) Close() {
	for _, m := range [][]byte{d.uar, d.bfPage} {
		if m != nil {
			d.k.Munmap(m)
		}
	}
}

// cq is a completion queue with what it owns.
type cq struct {
	CQ
	ring.Queue
	d *device
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
	if err = c.Alloc(n*d.cqeSize, &d.cqRecords); err != nil {
		return nil, err
	}
	c.init(ring.Addr(c.Pages.Bytes()), ring.Addr(c.Record), ring.Addr(d.uar), n, d.cqeSize, &d.qps)
	req := &abi.MLX4CreateCQ{BufAddr: c.Pages.Addr(), DBAddr: ring.AddrOf(c.Record)}
	resp := new(abi.MLX4CreateCQResp)
	a.CQE = n - 1
	if c.ID, _, err = d.k.CreateCQ(a, abi.Bytes(req), abi.Bytes(resp)); err != nil {
		return nil, err
	}
	c.cqn = resp.CQN
	return c, nil
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
	defer func() {
		if err != nil {
			q.Release()
		}
	}()
	notes := ring.Align(l.Bytes, pageSize) // behind the rings, on pages that the adapter does not see
	if err = q.Alloc(notes+notesBytes(&l), &d.qpRecords); err != nil {
		return nil, err
	}
	req := &abi.MLX4CreateQP{BufAddr: q.Pages.Addr(), DBAddr: ring.AddrOf(q.Record),
		LogSQBBCount: uint8(bits.TrailingZeros(uint(l.SendCount))), LogSQStride: uint8(l.SendShift)}
	a.Cap.MaxRecvWR, a.Cap.MaxRecvSGE = max(1, a.Cap.MaxRecvWR), max(1, a.Cap.MaxRecvSGE) // the driver takes no less
	d.mu.Lock()
	defer d.mu.Unlock()
	r, err := d.k.CreateQP(a.QPArgs, abi.Bytes(req), nil)
	if err != nil {
		return nil, err
	}
	q.qpn, q.ID = r.QPN, r.Handle
	q.init(l, ring.Addr(q.Pages.Bytes()), ring.At(q.Pages.Bytes(), notes), ring.Addr(q.Record), ring.Addr(d.uar), d.bf, a.SignalAll)
	d.qps.Set(q.qpn, &q.QP)
	return q, nil
}

// Modify implements provider.QP.
func (q *qp) Modify(req *abi.ModifyQP, from, to verbs.QPState) error {
	state := req.AttrMask&uint32(verbs.QPMaskState) != 0
	if state && from == verbs.QPReset && to == verbs.QPInitState {
		q.beforeInit()
	}
	if err := q.d.k.ModifyQP(req); err != nil {
		return err
	}
	if state && to == verbs.QPReset {
		q.afterReset()
	}
	return nil
}

// Destroy implements provider.QP. After the command the adapter makes no more entries of the queue pair; once it is out of
// the table and its entries are out of the queues, no poller can meet it.
func (q *qp) Destroy() (uint32, error) {
	// Held throughout, and in CreateQP: the kernel may give the number to a new queue pair at once.
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	n, err := q.d.k.DestroyQP(q.ID)
	if err != nil {
		return n, err
	}
	q.d.qps.Set(q.qpn, nil)
	q.purge()
	q.Release()
	return n, nil
}
