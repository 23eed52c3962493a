package kernel

import (
	"fmt"
	"sync"
	"syscall"

	"srp-initiator/rdma/verbs/uverbs/internal/abi"
)

// Device issues verbs commands on one open device file. Its methods are safe
// for concurrent use. Driver-private bytes travel as driverIn and driverOut slices of exactly the length that the
// family's uapi header gives; nil where the family has none.
type Device struct {
	Calls
	driverID uint32
	ioctl    bool // the kernel has RDMA_VERBS_IOCTL with INVOKE_WRITE

	mu      sync.Mutex
	lacking map[[2]uint16]bool // typed methods (object, method) that the kernel answered with EPROTONOSUPPORT; guarded by mu
	asyncFD int                // set by GetContext
}

// NewDevice probes what the kernel behind calls can do. It takes calls over: Close closes it.
func NewDevice(calls Calls, driverID uint32) *Device {
	d := &Device{Calls: calls, driverID: driverID, lacking: map[[2]uint16]bool{}, asyncFD: -1}
	// INVOKE_WRITE without a command struct is ENOSPC where it exists: the
	// command's length check. A kernel without the ioctl says ENOTTY, one without the method EPROTONOSUPPORT.
	var cmd [8]byte
	cmd[0] = abi.CmdQueryDevice
	err := calls.Ioctl(&Ioctl{Object: abi.ObjectDevice, Method: abi.MethodInvokeWrite, DriverID: driverID,
		Attrs: []Attr{{ID: abi.AttrWriteCommand, Kind: In, Flags: abi.AttrMandatory, Data: cmd[:]}}})
	d.ioctl = errno(err) == syscall.ENOSPC
	return d
}

// HasIoctl reports whether the ioctl interface is in use; without it only the write interface is.
func (d *Device) HasIoctl() bool { return d.ioctl }

// AsyncFD is the asynchronous event file, owned by the caller of GetContext.
func (d *Device) AsyncFD() int { return d.asyncFD }

// errNoMethod says that a typed method must be replaced by the command of the write interface.
var errNoMethod = fmt.Errorf("kernel: no such typed method")

// Method issues a typed method. Attributes lacking flags are made mandatory. The error is
// errNoMethod where the kernel does not have it.
func (d *Device) method(object, method uint16, attrs []Attr) error {
	if !d.ioctl {
		return errNoMethod
	}
	key := [2]uint16{object, method}
	d.mu.Lock()
	lacking := d.lacking[key]
	d.mu.Unlock()
	if lacking {
		return errNoMethod
	}
	err := d.Ioctl(&Ioctl{Object: object, Method: method, DriverID: d.driverID, Attrs: attrs})
	if errno(err) == syscall.EPROTONOSUPPORT {
		d.mu.Lock()
		d.lacking[key] = true
		d.mu.Unlock()
		return errNoMethod
	}
	return err
}

// Method issues a typed method of the family's own (object and method ids of its uapi header).
// Attrs come back filled. A kernel without the method gives EPROTONOSUPPORT.
func (d *Device) Method(object, method uint16, attrs []Attr) error {
	err := d.method(object, method, attrs)
	if err == errNoMethod {
		return syscall.EPROTONOSUPPORT
	}
	return err
}

// command issues a command of the write interface, by ioctl where possible: that form does
// not mind a change of the process's credentials, which makes write() fail with EACCES.
func (d *Device) command(w *Write) error {
	if !d.ioctl {
		return d.Write(w)
	}
	return d.Ioctl(d.invoke(w))
}

// invoke wraps a command of the write interface for the ioctl.
func (d *Device) invoke(w *Write) *Ioctl {
	number := make([]byte, 8)
	copy(number, abi.Bytes(&w.Command))
	c := &Ioctl{Object: abi.ObjectDevice, Method: abi.MethodInvokeWrite, DriverID: d.driverID,
		Attrs: []Attr{{ID: abi.AttrWriteCommand, Kind: In, Flags: abi.AttrMandatory, Data: number}}}
	add := func(id uint16, kind AttrKind, b []byte) {
		if len(b) > 0 {
			c.Attrs = append(c.Attrs, Attr{ID: id, Kind: kind, Flags: abi.AttrMandatory, Data: b})
		}
	}
	add(abi.AttrCoreIn, In, w.CoreIn)
	add(abi.AttrCoreOut, Out, w.CoreOut)
	add(abi.AttrDriverIn, In, w.DriverIn)
	add(abi.AttrDriverOut, Out, w.DriverOut)
	return c
}

// driverAttrs appends the family's private bytes to a typed method's attributes.
func driverAttrs(attrs []Attr, in, out []byte) []Attr {
	if len(in) > 0 {
		attrs = append(attrs, Attr{ID: abi.AttrDriverIn, Kind: In, Flags: abi.AttrMandatory, Data: in})
	}
	if len(out) > 0 {
		attrs = append(attrs, Attr{ID: abi.AttrDriverOut, Kind: Out, Flags: abi.AttrMandatory, Data: out})
	}
	return attrs
}

func in[T any](id uint16, p *T) Attr {
	return Attr{ID: id, Kind: In, Flags: abi.AttrMandatory, Data: abi.Bytes(p)}
}

func out[T any](id uint16, p *T) Attr {
	return Attr{ID: id, Kind: Out, Flags: abi.AttrMandatory, Data: abi.Bytes(p)}
}

func value(id uint16, kind AttrKind, v uint64) Attr {
	return Attr{ID: id, Kind: kind, Flags: abi.AttrMandatory, Value: v}
}

// GetContext starts the device file's context. It returns the number of completion vectors
// and leaves the asynchronous event file in AsyncFD.
func (d *Device) GetContext(driverIn, driverOut []byte) (compVectors int, err error) {
	var vectors uint32
	var support uint64
	err = d.method(abi.ObjectDevice, abi.MethodGetContext, driverAttrs([]Attr{
		out(abi.AttrNumCompVectors, &vectors),
		out(abi.AttrCoreSupport, &support),
	}, driverIn, driverOut))
	if err == nil {
		return int(vectors), nil
	}
	if err != errNoMethod {
		return 0, err
	}
	var req abi.GetContext
	var resp abi.GetContextResp
	err = d.command(&Write{Command: abi.CmdGetContext, CoreIn: abi.Bytes(&req), DriverIn: driverIn,
		CoreOut: abi.Bytes(&resp), DriverOut: driverOut})
	if err != nil {
		return 0, err
	}
	d.asyncFD = int(resp.AsyncFD)
	return int(resp.NumCompVectors), nil
}

// AllocAsyncFD makes the asynchronous event file unless GetContext has done so.
func (d *Device) AllocAsyncFD() error {
	if d.asyncFD >= 0 {
		return nil
	}
	attrs := []Attr{value(abi.AttrAsyncEventFD, FDOut, 0)}
	if err := d.Method(abi.ObjectAsyncEvent, abi.MethodAsyncEventAlloc, attrs); err != nil {
		return err
	}
	d.asyncFD = int(attrs[0].Value)
	return nil
}

// QueryDevice reports the device's limits.
func (d *Device) QueryDevice() (*abi.QueryDeviceResp, error) {
	req, resp := new(abi.QueryDevice), new(abi.QueryDeviceResp)
	return resp, d.command(&Write{Command: abi.CmdQueryDevice, CoreIn: abi.Bytes(req), CoreOut: abi.Bytes(resp)})
}

// QueryPort reports port's state; ports count from 1.
func (d *Device) QueryPort(port uint8) (*abi.QueryPortResp, error) {
	var num [8]byte
	num[0] = port
	ex := new(abi.QueryPortRespEx)
	err := d.method(abi.ObjectDevice, abi.MethodQueryPort, []Attr{
		{ID: abi.AttrQueryPortNum, Kind: In, Flags: abi.AttrMandatory, Data: num[:]},
		out(abi.AttrQueryPortResp, ex),
	})
	if err != errNoMethod {
		return &ex.Legacy, err
	}
	req, resp := &abi.QueryPort{PortNum: port}, new(abi.QueryPortResp)
	return resp, d.command(&Write{Command: abi.CmdQueryPort, CoreIn: abi.Bytes(req), CoreOut: abi.Bytes(resp)})
}

// AllocPD makes a protection domain.
func (d *Device) AllocPD(driverIn, driverOut []byte) (handle uint32, err error) {
	req, resp := new(abi.AllocPD), new(abi.AllocPDResp)
	err = d.command(&Write{Command: abi.CmdAllocPD, CoreIn: abi.Bytes(req), DriverIn: driverIn,
		CoreOut: abi.Bytes(resp), DriverOut: driverOut})
	return resp.PDHandle, err
}

// DeallocPD fails with EBUSY while something uses the domain.
func (d *Device) DeallocPD(handle uint32) error {
	err := d.method(abi.ObjectPD, abi.MethodPDDestroy, []Attr{value(abi.AttrDestroyPDHandle, HandleIn, uint64(handle))})
	if err != errNoMethod {
		return err
	}
	return d.command(&Write{Command: abi.CmdDeallocPD, CoreIn: abi.Bytes(&abi.DeallocPD{PDHandle: handle})})
}

// RegMR registers length bytes at virtual address start, which peers name by the same address.
func (d *Device) RegMR(pd uint32, start, length uint64, access uint32) (*abi.RegMRResp, error) {
	req, resp := &abi.RegMR{Start: start, Length: length, HCAVA: start, PDHandle: pd, AccessFlags: access}, new(abi.RegMRResp)
	return resp, d.command(&Write{Command: abi.CmdRegMR, CoreIn: abi.Bytes(req), CoreOut: abi.Bytes(resp)})
}

// DeregMR fails with EBUSY while a memory window is bound to the region.
func (d *Device) DeregMR(handle uint32) error {
	err := d.method(abi.ObjectMR, abi.MethodMRDestroy, []Attr{value(abi.AttrDestroyMRHandle, HandleIn, uint64(handle))})
	if err != errNoMethod {
		return err
	}
	return d.command(&Write{Command: abi.CmdDeregMR, CoreIn: abi.Bytes(&abi.DeregMR{MRHandle: handle})})
}

// AllocMW makes a type 2 memory window.
func (d *Device) AllocMW(pd uint32) (*abi.AllocMWResp, error) {
	req, resp := &abi.AllocMW{PDHandle: pd, MWType: abi.MWType2}, new(abi.AllocMWResp)
	return resp, d.command(&Write{Command: abi.CmdAllocMW, CoreIn: abi.Bytes(req), CoreOut: abi.Bytes(resp)})
}

// DeallocMW destroys a window, bound or not.
func (d *Device) DeallocMW(handle uint32) error {
	err := d.method(abi.ObjectMW, abi.MethodMWDestroy, []Attr{value(abi.AttrDestroyMWHandle, HandleIn, uint64(handle))})
	if err != errNoMethod {
		return err
	}
	return d.command(&Write{Command: abi.CmdDeallocMW, CoreIn: abi.Bytes(&abi.DeallocMW{MWHandle: handle})})
}

// CreateCompChannel makes a completion channel and returns its file descriptor, which the caller owns.
func (d *Device) CreateCompChannel() (fd int, err error) {
	req, resp := new(abi.CreateCompChannel), new(abi.CreateCompChannelResp)
	err = d.command(&Write{Command: abi.CmdCreateCompChannel, CoreIn: abi.Bytes(req), CoreOut: abi.Bytes(resp)})
	if err != nil {
		return -1, err
	}
	return int(resp.FD), nil
}

// CQArgs says what completion queue to create.
type CQArgs struct {
	UserHandle uint64 // comes back in events
	CQE        int    // entries
	CompFD     int    // completion channel, -1: none
	CompVector int
}

// CreateCQ makes a completion queue and returns its handle and how many entries the kernel says it has.
func (d *Device) CreateCQ(a CQArgs, driverIn, driverOut []byte) (handle uint32, cqe int, err error) {
	n, vector, user := uint32(a.CQE), uint32(a.CompVector), a.UserHandle
	var got uint32
	attrs := []Attr{
		value(abi.AttrCreateCQHandle, HandleOut, 0),
		out(abi.AttrCreateCQRespCQE, &got),
		in(abi.AttrCreateCQCQE, &n),
		in(abi.AttrCreateCQUserHandle, &user),
	}
	if a.CompFD >= 0 {
		attrs = append(attrs, value(abi.AttrCreateCQCompChannel, FDIn, uint64(a.CompFD)))
	}
	attrs = append(attrs, in(abi.AttrCreateCQCompVector, &vector))
	if d.asyncFD >= 0 {
		// Optional: Linux before 5.6 does not know it.
		attrs = append(attrs, Attr{ID: abi.AttrCreateCQEventFD, Kind: FDIn, Value: uint64(d.asyncFD)})
	}
	attrs = driverAttrs(attrs, driverIn, driverOut)
	err = d.method(abi.ObjectCQ, abi.MethodCQCreate, attrs)
	if err != errNoMethod {
		return uint32(attrs[0].Value), int(got), err
	}
	req, resp := &abi.CreateCQ{UserHandle: user, CQE: n, CompVector: vector, CompChannel: int32(a.CompFD)}, new(abi.CreateCQResp)
	err = d.command(&Write{Command: abi.CmdCreateCQ, CoreIn: abi.Bytes(req), DriverIn: driverIn,
		CoreOut: abi.Bytes(resp), DriverOut: driverOut})
	return resp.CQHandle, int(resp.CQE), err
}

// DestroyCQ fails with EBUSY while a queue pair uses the queue. It reports how many events of the
// queue were read; unread ones are dropped by the kernel.
func (d *Device) DestroyCQ(handle uint32) (abi.DestroyCQResp, error) {
	resp := new(abi.DestroyCQResp)
	err := d.method(abi.ObjectCQ, abi.MethodCQDestroy, []Attr{
		out(abi.AttrDestroyCQResp, resp),
		value(abi.AttrDestroyCQHandle, HandleIn, uint64(handle)),
	})
	if err == errNoMethod {
		err = d.command(&Write{Command: abi.CmdDestroyCQ, CoreIn: abi.Bytes(&abi.DestroyCQ{CQHandle: handle}), CoreOut: abi.Bytes(resp)})
	}
	return *resp, err
}

// QPArgs says what RC queue pair to create.
type QPArgs struct {
	UserHandle     uint64 // comes back in asynchronous events
	PD             uint32
	SendCQ, RecvCQ uint32
	Cap            abi.QPCap
	SignalAll      bool
}

// QPResult is a new queue pair.
type QPResult struct {
	Handle uint32
	QPN    uint32
	Cap    abi.QPCap // as the kernel granted it
}

// CreateQP makes an RC queue pair.
func (d *Device) CreateQP(a QPArgs, driverIn, driverOut []byte) (QPResult, error) {
	typ := [8]byte{abi.QPTypeRC}
	user, capIn := a.UserHandle, a.Cap
	var r QPResult
	if d.asyncFD >= 0 {
		capOut, qpn := new(abi.QPCap), new(uint32)
		attrs := []Attr{
			value(abi.AttrCreateQPPDHandle, HandleIn, uint64(a.PD)),
			value(abi.AttrCreateQPSendCQHandle, HandleIn, uint64(a.SendCQ)),
			value(abi.AttrCreateQPRecvCQHandle, HandleIn, uint64(a.RecvCQ)),
			value(abi.AttrCreateQPHandle, HandleOut, 0),
			{ID: abi.AttrCreateQPType, Kind: In, Flags: abi.AttrMandatory, Data: typ[:]},
			in(abi.AttrCreateQPUserHandle, &user),
			in(abi.AttrCreateQPCap, &capIn),
			value(abi.AttrCreateQPEventFD, FDIn, uint64(d.asyncFD)),
		}
		if a.SignalAll {
			flags := uint32(abi.QPFlagSQSigAll)
			attrs = append(attrs, in(abi.AttrCreateQPFlags, &flags))
		}
		attrs = append(attrs, out(abi.AttrCreateQPRespCap, capOut), out(abi.AttrCreateQPRespQPNum, qpn))
		attrs = driverAttrs(attrs, driverIn, driverOut)
		err := d.method(abi.ObjectQP, abi.MethodQPCreate, attrs)
		if err != errNoMethod {
			return QPResult{Handle: uint32(attrs[3].Value), QPN: *qpn, Cap: *capOut}, err
		}
	}
	req, resp := &abi.CreateQP{UserHandle: user, PDHandle: a.PD, SendCQHandle: a.SendCQ, RecvCQHandle: a.RecvCQ,
		MaxSendWR: capIn.MaxSendWR, MaxRecvWR: capIn.MaxRecvWR, MaxSendSGE: capIn.MaxSendSGE, MaxRecvSGE: capIn.MaxRecvSGE,
		MaxInlineData: capIn.MaxInlineData, QPType: abi.QPTypeRC}, new(abi.CreateQPResp)
	if a.SignalAll {
		req.SQSigAll = 1
	}
	err := d.command(&Write{Command: abi.CmdCreateQP, CoreIn: abi.Bytes(req), DriverIn: driverIn,
		CoreOut: abi.Bytes(resp), DriverOut: driverOut})
	r = QPResult{Handle: resp.QPHandle, QPN: resp.QPN, Cap: abi.QPCap{MaxSendWR: resp.MaxSendWR, MaxRecvWR: resp.MaxRecvWR,
		MaxSendSGE: resp.MaxSendSGE, MaxRecvSGE: resp.MaxRecvSGE, MaxInlineData: resp.MaxInlineData}}
	return r, err
}

// ModifyQP issues req, whose AttrMask names the fields that count.
func (d *Device) ModifyQP(req *abi.ModifyQP) error {
	return d.command(&Write{Command: abi.CmdModifyQP, CoreIn: abi.Bytes(req)})
}

// DestroyQP reports how many asynchronous events of the queue pair were read; unread ones are dropped.
func (d *Device) DestroyQP(handle uint32) (eventsReported uint32, err error) {
	resp := new(abi.DestroyQPResp)
	err = d.method(abi.ObjectQP, abi.MethodQPDestroy, []Attr{
		out(abi.AttrDestroyQPResp, resp),
		value(abi.AttrDestroyQPHandle, HandleIn, uint64(handle)),
	})
	if err == errNoMethod {
		err = d.command(&Write{Command: abi.CmdDestroyQP, CoreIn: abi.Bytes(&abi.DestroyQP{QPHandle: handle}), CoreOut: abi.Bytes(resp)})
	}
	return resp.EventsReported, err
}
