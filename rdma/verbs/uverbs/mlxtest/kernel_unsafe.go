package mlxtest

import (
	"encoding/binary"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/abi"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
)

func newDevice(n *Net, c Config) *device {
	d := &device{net: n, cfg: c, nextKey: 0x1ee7, nextCQN: 0x400, pds: map[uint32]*pd{}, regions: map[uint32]*region{}, windows: map[uint32]*window{},
		channels: map[int]*channel{}, cqs: map[uint32]*cq{}, qps: map[uint32]*qp{}, byNum: map[uint32]*qp{}, keys: map[uint32]any{}}
	if c.Family == "mlx4" {
		d.fam, d.nextQPN = mlx4Model{}, 0xa48
	} else {
		d.fam, d.nextQPN = mlx5Model{}, 0x1a3
	}
	return d
}

// calls is the kernel's side of an open device file.
type calls struct{ *device }

// as looks at a command's struct. Command structs are 8-byte aligned by the binding.
func as[T any](b []byte) *T {
	var v T
	if len(b) < int(unsafe.Sizeof(v)) {
		return nil
	}
	return (*T)(unsafe.Pointer(unsafe.SliceData(b)))
}

func err(e unix.Errno) error {
	if e == 0 {
		return nil
	}
	return e
}

// Ioctl implements kernel.Calls.
func (k *calls) Ioctl(c *kernel.Ioctl) error {
	if k.cfg.Legacy {
		return unix.ENOTTY
	}
	k.net.mu.Lock()
	defer k.net.mu.Unlock()
	defer k.net.work.Store(true)
	want := uint32(abi.DriverMLX5)
	if k.cfg.Family == "mlx4" {
		want = abi.DriverMLX4
	}
	if k.closed {
		return os.ErrClosed
	}
	if c.DriverID != want {
		return unix.EINVAL
	}
	at := func(id uint16) *kernel.Attr {
		for i := range c.Attrs {
			if c.Attrs[i].ID == id {
				return &c.Attrs[i]
			}
		}
		return &kernel.Attr{}
	}
	u32 := func(id uint16) uint32 {
		if b := at(id).Data; len(b) >= 4 {
			return binary.NativeEndian.Uint32(b)
		}
		return 0
	}
	din, dout := at(abi.AttrDriverIn).Data, at(abi.AttrDriverOut).Data
	put32 := func(id uint16, v uint32) {
		if b := at(id).Data; len(b) >= 4 {
			binary.NativeEndian.PutUint32(b, v)
		}
	}
	switch [2]uint16{c.Object, c.Method} {
	case [2]uint16{abi.ObjectDevice, abi.MethodInvokeWrite}:
		w := &kernel.Write{Command: u32(abi.AttrWriteCommand), CoreIn: at(abi.AttrCoreIn).Data, CoreOut: at(abi.AttrCoreOut).Data,
			DriverIn: din, DriverOut: dout}
		if len(c.Attrs) == 1 {
			return unix.ENOSPC
		}
		return err(k.write(w))
	case [2]uint16{abi.ObjectDevice, abi.MethodGetContext}:
		e := k.fam.context(k.device, din, dout)
		put32(abi.AttrNumCompVectors, compVectors)
		put32(abi.AttrCoreSupport, 1) // optional memory region access flags
		return err(e)
	case [2]uint16{abi.ObjectDevice, abi.MethodQueryPort}:
		out := as[abi.QueryPortRespEx](at(abi.AttrQueryPortResp).Data)
		num := at(abi.AttrQueryPortNum).Data
		if out == nil || len(num) == 0 || num[0] != 1 {
			return unix.EINVAL
		}
		k.port(&out.Legacy)
		return nil
	case [2]uint16{abi.ObjectAsyncEvent, abi.MethodAsyncEventAlloc}:
		var e unix.Errno
		if k.async, e = newEventFile(); e != 0 {
			return e
		}
		at(abi.AttrAsyncEventFD).Value = uint64(k.async.fd)
		return nil
	case [2]uint16{abi.ObjectMLX5UAR, abi.MethodMLX5UARAlloc}:
		if k.cfg.Family != "mlx5" || k.cfg.StaticUARs {
			return unix.EPROTONOSUPPORT
		}
		u, e := k.newUAR()
		if e != 0 {
			return e
		}
		u.handle = k.handle()
		at(abi.AttrMLX5UARAllocHandle).Value = uint64(u.handle)
		binary.NativeEndian.PutUint64(at(abi.AttrMLX5UARAllocOffset).Data, dynamicUAR+uint64(len(k.uars)-1)*4096)
		put32(abi.AttrMLX5UARAllocLength, 4096)
		put32(abi.AttrMLX5UARAllocPageID, u.id)
		return nil
	case [2]uint16{abi.ObjectMLX5UAR, abi.MethodMLX5UARDestroy}:
		for _, u := range k.uars {
			if uint64(u.handle) == at(abi.AttrMLX5UARDestroyHandle).Value && !u.freed {
				u.freed = true
				return nil
			}
		}
		return unix.ENOENT
	case [2]uint16{abi.ObjectCQ, abi.MethodCQCreate}:
		fd := -1
		for i := range c.Attrs {
			if c.Attrs[i].ID == abi.AttrCreateCQCompChannel && c.Attrs[i].Kind == kernel.FDIn {
				fd = int(c.Attrs[i].Value)
			}
		}
		q, e := k.createCQ(binary.NativeEndian.Uint64(at(abi.AttrCreateCQUserHandle).Data), u32(abi.AttrCreateCQCQE), fd, din, dout)
		if e != 0 {
			return e
		}
		at(abi.AttrCreateCQHandle).Value = uint64(q.handle)
		put32(abi.AttrCreateCQRespCQE, q.entries-1)
		return nil
	case [2]uint16{abi.ObjectCQ, abi.MethodCQDestroy}:
		r, e := k.destroyCQ(uint32(at(abi.AttrDestroyCQHandle).Value))
		if out := as[abi.DestroyCQResp](at(abi.AttrDestroyCQResp).Data); out != nil {
			*out = r
		}
		return err(e)
	case [2]uint16{abi.ObjectQP, abi.MethodQPCreate}:
		cin := as[abi.QPCap](at(abi.AttrCreateQPCap).Data)
		if cin == nil {
			return unix.EINVAL
		}
		q, got, e := k.createQP(binary.NativeEndian.Uint64(at(abi.AttrCreateQPUserHandle).Data), uint32(at(abi.AttrCreateQPPDHandle).Value),
			uint32(at(abi.AttrCreateQPSendCQHandle).Value), uint32(at(abi.AttrCreateQPRecvCQHandle).Value),
			caps{cin.MaxSendWR, cin.MaxRecvWR, cin.MaxSendSGE, cin.MaxRecvSGE, cin.MaxInlineData},
			u32(abi.AttrCreateQPFlags)&abi.QPFlagSQSigAll != 0, din, dout)
		if e != 0 {
			return e
		}
		at(abi.AttrCreateQPHandle).Value = uint64(q.handle)
		put32(abi.AttrCreateQPRespQPNum, q.num)
		if out := as[abi.QPCap](at(abi.AttrCreateQPRespCap).Data); out != nil {
			*out = abi.QPCap{MaxSendWR: got.sendWR, MaxRecvWR: got.recvWR, MaxSendSGE: got.sendSGE, MaxRecvSGE: got.recvSGE, MaxInlineData: got.inline}
		}
		return nil
	case [2]uint16{abi.ObjectQP, abi.MethodQPDestroy}:
		n, e := k.destroyQP(uint32(at(abi.AttrDestroyQPHandle).Value))
		put32(abi.AttrDestroyQPResp, n)
		return err(e)
	case [2]uint16{abi.ObjectPD, abi.MethodPDDestroy}:
		return err(k.destroyPD(uint32(at(abi.AttrDestroyPDHandle).Value)))
	case [2]uint16{abi.ObjectMR, abi.MethodMRDestroy}:
		return err(k.destroyMR(uint32(at(abi.AttrDestroyMRHandle).Value)))
	case [2]uint16{abi.ObjectMW, abi.MethodMWDestroy}:
		return err(k.destroyMW(uint32(at(abi.AttrDestroyMWHandle).Value)))
	}
	return unix.EPROTONOSUPPORT
}

// Write implements kernel.Calls.
func (k *calls) Write(c *kernel.Write) error {
	k.net.mu.Lock()
	defer k.net.mu.Unlock()
	defer k.net.work.Store(true)
	if k.closed {
		return os.ErrClosed
	}
	return err(k.write(c))
}

const compVectors = 8

// dynamicUAR is where the mmap offsets of allocated UARs begin, as the kernel encodes them.
const dynamicUAR = 0x900000

func (d *device) handle() uint32 {
	d.nextHandle++
	return d.nextHandle - 1
}

func (d *device) newUAR() (*uar, unix.Errno) {
	mem, e := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if e != nil {
		return nil, unix.ENOMEM
	}
	u := &uar{mem: mem, id: uint32(0x11 + len(d.uars))}
	d.uars = append(d.uars, u)
	return u, 0
}

// Mmap implements kernel.Calls: the driver gets the very page that the engine looks at.
func (k *calls) Mmap(offset int64, length, prot int) ([]byte, error) {
	k.net.mu.Lock()
	defer k.net.mu.Unlock()
	if length != 4096 || prot != unix.PROT_WRITE || offset%4096 != 0 {
		return nil, unix.EINVAL
	}
	page := int(offset / 4096)
	if offset >= dynamicUAR && k.cfg.Family == "mlx5" {
		page = int(offset-dynamicUAR) / 4096
	} else {
		page &= 0xff // the command in bits 8..15 says how it is cached
		for page >= len(k.uars) && page < 16 {
			if _, e := k.newUAR(); e != 0 {
				return nil, e
			}
		}
	}
	if page >= len(k.uars) {
		return nil, unix.EINVAL
	}
	return k.uars[page].mem, nil
}

// Munmap implements kernel.Calls. The pages go with the device.
func (k *calls) Munmap([]byte) error { return nil }

// Close implements kernel.Calls.
func (k *calls) Close() error {
	k.net.mu.Lock()
	defer k.net.mu.Unlock()
	if k.closed {
		return unix.EBADF
	}
	k.closed = true
	k.byNum, k.qps, k.cqs = map[uint32]*qp{}, map[uint32]*qp{}, map[uint32]*cq{}
	k.async = eventFile{} // the driver has closed its descriptors
	for _, u := range k.uars {
		unix.Munmap(u.mem)
	}
	k.uars = nil
	return nil
}

// write issues a command of the write interface.
func (k *calls) write(c *kernel.Write) unix.Errno {
	in, out := c.CoreIn, c.CoreOut
	switch c.Command {
	case abi.CmdGetContext:
		r := as[abi.GetContextResp](out)
		if r == nil {
			return unix.EINVAL
		}
		if e := k.fam.context(k.device, c.DriverIn, c.DriverOut); e != 0 {
			return e
		}
		var e unix.Errno
		if k.async, e = newEventFile(); e != 0 {
			return e
		}
		r.AsyncFD, r.NumCompVectors = uint32(k.async.fd), compVectors
	case abi.CmdQueryDevice:
		r := as[abi.QueryDeviceResp](out)
		if r == nil {
			return unix.EINVAL
		}
		k.limits(r)
	case abi.CmdQueryPort:
		q, r := as[abi.QueryPort](in), as[abi.QueryPortResp](out)
		if q == nil || r == nil || q.PortNum != 1 {
			return unix.EINVAL
		}
		k.port(r)
	case abi.CmdAllocPD:
		r := as[abi.AllocPDResp](out)
		if r == nil {
			return unix.EINVAL
		}
		r.PDHandle = k.handle()
		k.pds[r.PDHandle] = &pd{}
		k.fam.allocPD(c.DriverOut)
	case abi.CmdDeallocPD:
		return k.destroyPD(as[abi.DeallocPD](in).PDHandle)
	case abi.CmdRegMR:
		return k.regMR(as[abi.RegMR](in), as[abi.RegMRResp](out))
	case abi.CmdDeregMR:
		return k.destroyMR(as[abi.DeregMR](in).MRHandle)
	case abi.CmdAllocMW:
		q, r := as[abi.AllocMW](in), as[abi.AllocMWResp](out)
		p := k.pds[q.PDHandle]
		if p == nil || q.MWType != abi.MWType2 {
			return unix.EINVAL
		}
		w := &window{pd: p, key: k.newKey()}
		p.refs++
		r.MWHandle, r.RKey = k.handle(), w.key
		k.windows[r.MWHandle], k.keys[w.key>>8] = w, w
	case abi.CmdDeallocMW:
		return k.destroyMW(as[abi.DeallocMW](in).MWHandle)
	case abi.CmdCreateCompChannel:
		r := as[abi.CreateCompChannelResp](out)
		p, e := newEventFile()
		if e != 0 {
			return e
		}
		k.channels[p.fd] = &channel{eventFile: p}
		r.FD = uint32(p.fd)
	case abi.CmdCreateCQ:
		q, r := as[abi.CreateCQ](in), as[abi.CreateCQResp](out)
		cq, e := k.createCQ(q.UserHandle, q.CQE, int(q.CompChannel), c.DriverIn, c.DriverOut)
		if e != 0 {
			return e
		}
		r.CQHandle, r.CQE = cq.handle, cq.entries-1
	case abi.CmdDestroyCQ:
		r, e := k.destroyCQ(as[abi.DestroyCQ](in).CQHandle)
		*as[abi.DestroyCQResp](out) = r
		return e
	case abi.CmdCreateQP:
		q, r := as[abi.CreateQP](in), as[abi.CreateQPResp](out)
		if q.QPType != abi.QPTypeRC || q.IsSRQ != 0 {
			return unix.EOPNOTSUPP
		}
		qp, got, e := k.createQP(q.UserHandle, q.PDHandle, q.SendCQHandle, q.RecvCQHandle,
			caps{q.MaxSendWR, q.MaxRecvWR, q.MaxSendSGE, q.MaxRecvSGE, q.MaxInlineData}, q.SQSigAll != 0, c.DriverIn, c.DriverOut)
		if e != 0 {
			return e
		}
		*r = abi.CreateQPResp{QPHandle: qp.handle, QPN: qp.num, MaxSendWR: got.sendWR, MaxRecvWR: got.recvWR,
			MaxSendSGE: got.sendSGE, MaxRecvSGE: got.recvSGE, MaxInlineData: got.inline}
	case abi.CmdModifyQP:
		return k.modifyQP(as[abi.ModifyQP](in))
	case abi.CmdDestroyQP:
		n, e := k.destroyQP(as[abi.DestroyQP](in).QPHandle)
		as[abi.DestroyQPResp](out).EventsReported = n
		return e
	default:
		return unix.EOPNOTSUPP
	}
	return 0
}

func (d *device) limits(r *abi.QueryDeviceResp) {
	// As the recordings' kernel answers.
	*r = abi.QueryDeviceResp{FWVer: 16<<32 | 35<<16 | 2000, MaxMRSize: 1<<64 - 1, PageSizeCap: 0xfffff000, VendorID: 0x2c9, VendorPartID: 0x1017,
		MaxQP: 0x40000, MaxQPWR: 0x8000, DeviceCapFlags: 0x221c16, MaxSGE: 30, MaxSGERd: 30, MaxCQ: 1 << 24, MaxCQE: 0x3fffff, MaxMR: 1 << 24, MaxPD: 1 << 24,
		MaxQPRdAtom: 16, MaxResRdAtom: 0x400000, MaxQPInitRdAtom: 16, AtomicCap: 1, MaxMW: 1 << 24, MaxAH: 0x7fffffff,
		MaxSRQ: 0x800000, MaxSRQWR: 0x7fff, MaxSRQSGE: 31, MaxPKeys: 128, LocalCAAckDelay: 16, PhysPortCnt: 1}
	if d.cfg.Family == "mlx4" {
		r.FWVer, r.MaxQPWR, r.MaxSGE, r.VendorPartID = 2<<32|42<<16|5000, 16351, 32, 0x1003
	}
	binary.BigEndian.PutUint64(r.NodeGUID[:], d.guid)
	binary.BigEndian.PutUint64(r.SysImageGUID[:], d.guid|3)
}

func (d *device) port(r *abi.QueryPortResp) {
	*r = abi.QueryPortResp{PortCapFlags: 0x04010000, MaxMsgSz: 1 << 30, GIDTblLen: 256, PKeyTblLen: 1, State: uint8(verbs.PortActive), MaxMTU: uint8(verbs.MTU4096),
		ActiveMTU: uint8(verbs.MTU1024), SubnetTimeout: 18, ActiveWidth: 2, ActiveSpeed: 32, PhysState: 5, LinkLayer: uint8(verbs.LinkEthernet)}
	if d.cfg.InfiniBand {
		r.GIDTblLen, r.PKeyTblLen = 8, 128
		r.LID, r.SMLID, r.ActiveMTU, r.LinkLayer = d.lid, 1, uint8(verbs.MTU4096), uint8(verbs.LinkInfiniBand)
	}
}

func (d *device) newKey() uint32 {
	d.nextKey++
	return (d.nextKey - 1) << 8
}

func (d *device) regMR(q *abi.RegMR, r *abi.RegMRResp) unix.Errno {
	p := d.pds[q.PDHandle]
	a := verbs.AccessFlags(q.AccessFlags)
	switch {
	case p == nil, q.Length == 0, q.Start%4096 != q.HCAVA%4096:
		return unix.EINVAL
	case a&(verbs.AccessRemoteWrite|verbs.AccessRemoteAtomic) != 0 && a&verbs.AccessLocalWrite == 0:
		return unix.EINVAL
	}
	m := &region{pd: p, addr: q.Start, len: q.Length, access: a, key: d.newKey()}
	p.refs++
	*r = abi.RegMRResp{MRHandle: d.handle(), LKey: m.key, RKey: m.key}
	d.regions[r.MRHandle], d.keys[m.key>>8] = m, m
	return 0
}

func (d *device) destroyMR(h uint32) unix.Errno {
	m := d.regions[h]
	switch {
	case m == nil:
		return unix.EINVAL
	case m.windows > 0:
		return unix.EBUSY
	}
	m.pd.refs--
	delete(d.regions, h)
	delete(d.keys, m.key>>8)
	return 0
}

func (d *device) destroyMW(h uint32) unix.Errno {
	w := d.windows[h]
	if w == nil {
		return unix.EINVAL
	}
	w.unbind()
	w.pd.refs--
	delete(d.windows, h)
	delete(d.keys, w.key>>8)
	return 0
}

func (d *device) destroyPD(h uint32) unix.Errno {
	p := d.pds[h]
	switch {
	case p == nil:
		return unix.EINVAL
	case p.refs > 0:
		return unix.EBUSY
	}
	delete(d.pds, h)
	return 0
}

func (d *device) createCQ(userID uint64, cqe uint32, fd int, driverIn, driverOut []byte) (*cq, unix.Errno) {
	c := &cq{dev: d, userID: userID, entries: cqe + 1, armSN: ^uint32(0)}
	if cqe == 0 || c.entries&(c.entries-1) != 0 || c.entries > 1<<22 {
		return nil, unix.EINVAL
	}
	if fd >= 0 {
		if c.ch = d.channels[fd]; c.ch == nil {
			return nil, unix.EBADF
		}
	}
	if e := d.fam.createCQ(d, c, driverIn, driverOut); e != 0 {
		return nil, e
	}
	if c.ch != nil {
		c.ch.refs++
	}
	binary.NativeEndian.PutUint32(user(c.db+4, 4), neverArmed)
	c.handle, c.num = d.handle(), d.nextCQN
	d.nextCQN++
	binary.NativeEndian.PutUint32(driverOut, c.num)
	d.cqs[c.handle] = c
	return c, 0
}

func (d *device) destroyCQ(h uint32) (abi.DestroyCQResp, unix.Errno) {
	c := d.cqs[h]
	switch {
	case c == nil:
		return abi.DestroyCQResp{}, unix.EINVAL
	case c.refs > 0:
		return abi.DestroyCQResp{}, unix.EBUSY
	}
	delete(d.cqs, h)
	r := abi.DestroyCQResp{CompEventsReported: c.events, AsyncEventsReported: c.asyncOut - d.async.drop(16, c.userID)}
	if c.ch != nil {
		r.CompEventsReported -= c.ch.drop(8, c.userID)
		c.ch.refs--
	}
	return r, 0
}

func (d *device) createQP(user uint64, ph, sh, rh uint32, want caps, sigAll bool, driverIn, driverOut []byte) (*qp, caps, unix.Errno) {
	q := &qp{dev: d, userID: user, pd: d.pds[ph], send: d.cqs[sh], recv: d.cqs[rh], sigAll: sigAll}
	if q.pd == nil || q.send == nil || q.recv == nil {
		return nil, want, unix.EINVAL
	}
	got, e := d.fam.createQP(d, q, want, driverIn, driverOut)
	if e != 0 {
		return nil, want, e
	}
	q.handle, q.num = d.handle(), d.nextQPN
	d.nextQPN++
	if q.rsn == abi.MLX5NoUIDX {
		q.rsn = q.num
	}
	q.pd.refs++
	q.send.refs++
	q.recv.refs++
	d.qps[q.handle], d.byNum[q.num] = q, q
	return q, got, 0
}

func (d *device) destroyQP(h uint32) (uint32, unix.Errno) {
	q := d.qps[h]
	if q == nil {
		return 0, unix.EINVAL
	}
	// A doorbell that was rung before the command must not be taken for one that was rung after it.
	d.fam.scan(d)
	for _, w := range d.windows {
		if w.region != nil && w.qp == q {
			w.unbind()
		}
	}
	delete(d.qps, h)
	delete(d.byNum, q.num)
	q.pd.refs--
	q.send.refs--
	q.recv.refs--
	return q.asyncOut - d.async.drop(16, q.userID), 0
}

// modifyQP checks transitions and their masks as ib_modify_qp_is_ok of the kernel does for RC.
func (d *device) modifyQP(r *abi.ModifyQP) unix.Errno {
	q := d.qps[r.QPHandle]
	if q == nil {
		return unix.EINVAL
	}
	mask, to := verbs.QPAttrMask(r.AttrMask), q.state
	if mask&verbs.QPMaskState != 0 {
		to = verbs.QPState(r.QPState)
	}
	need := verbs.QPAttrMask(0)
	switch from := q.state; {
	case to == verbs.QPError && from != verbs.QPReset, to == verbs.QPReset:
	case to == verbs.QPError: // RESET to ERR is allowed as well
	case from == verbs.QPReset && to == verbs.QPInitState:
		need = verbs.QPMaskToInit
	case from == verbs.QPInitState && to == verbs.QPInitState:
	case from == verbs.QPInitState && to == verbs.QPReadyToReceive:
		need = verbs.QPMaskToRTR
	case from == verbs.QPReadyToReceive && to == verbs.QPReadyToSend:
		need = verbs.QPMaskToRTS
	case from == verbs.QPReadyToSend && (to == verbs.QPReadyToSend || to == verbs.QPSendQueueDrained):
	default:
		return unix.EINVAL
	}
	if mask&need != need || mask&verbs.QPMaskPort != 0 && r.PortNum != 1 {
		return unix.EINVAL
	}
	if mask&verbs.QPMaskAccess != 0 {
		q.access = verbs.AccessFlags(r.QPAccessFlags)
	}
	if mask&verbs.QPMaskAV != 0 {
		q.av = addressVector{global: r.Dest.IsGlobal != 0, dgid: r.Dest.DGID, dlid: r.Dest.DLID}
		if !q.av.global && !d.cfg.InfiniBand {
			return unix.EINVAL
		}
	}
	if mask&verbs.QPMaskDestQPN != 0 {
		q.destQPN = r.DestQPNum
	}
	if mask&verbs.QPMaskTimeout != 0 {
		q.timeout = r.Timeout
	}
	if mask&verbs.QPMaskRetryCount != 0 {
		q.retry = r.RetryCnt
	}
	if mask&verbs.QPMaskRNRRetry != 0 {
		q.rnrRetry = r.RNRRetry
	}
	if mask&verbs.QPMaskMinRNRTimer != 0 {
		q.rnrTimer = r.MinRNRTimer
	}
	if to == verbs.QPReset {
		q.sqCI, q.rqCI, q.sqTarget, q.rung = 0, 0, 0, false
		q.waiting, q.tries = false, 0
		q.av, q.destQPN = addressVector{}, 0
	}
	q.state = to
	return 0
}
