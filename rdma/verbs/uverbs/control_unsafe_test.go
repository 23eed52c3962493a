package uverbs

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/fstest"
	"unsafe"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/golden"
	"srp-initiator/rdma/verbs/uverbs/internal/mlx4"
	"srp-initiator/rdma/verbs/uverbs/internal/mlx5"
	"srp-initiator/rdma/verbs/uverbs/internal/provider"
)

// controlRig plays the control group: the whole binding, from Open to Close, on the recording's kernel.
type controlRig struct {
	t    *testing.T
	k    *golden.Kernel
	p    *golden.Player
	ctx  *Context
	fam  provider.Family
	info provider.Info

	pd    verbs.ProtectionDomain
	mrs   []uint32
	ch    verbs.CompletionChannel
	event *[2]int // the channel's pipe
	cqs   []verbs.CompletionQueue
	qps   []verbs.QueuePair
	cqIn  [][]byte // driver input of each CREATE_CQ
	qpIn  [][]byte
}

func bytesAt(addr uint64, n int) []byte {
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&addr))), n)
}

func word(b []byte, i int) uint64 { return binary.NativeEndian.Uint64(b[8*i:]) }

func (r *controlRig) PostSend(qp int, w []verbs.SendWorkRequest) (int, error) {
	return r.qps[qp].PostSend(w)
}
func (r *controlRig) PostRecv(qp int, w []verbs.RecvWorkRequest) (int, error) {
	return r.qps[qp].PostRecv(w)
}
func (r *controlRig) Poll(cq int, wcs []verbs.WorkCompletion) int { return r.cqs[cq].Poll(wcs) }
func (r *controlRig) Arm(cq int, s bool) (bool, error)            { return r.cqs[cq].Arm(s) }
func (r *controlRig) UAR(page int) []byte                         { return r.k.UARs[page] }
func (r *controlRig) CQRecord(cq int) []byte                      { return bytesAt(word(r.cqIn[cq], 1), 8) }
func (r *controlRig) SkipCompletions(int, uint32)                 {}
func (r *controlRig) SendCQE(int, uint32, uint32) []byte          { return nil }
func (r *controlRig) RecvCQE(int, uint32) []byte                  { return nil }
func (r *controlRig) Close()                                      {}

func (r *controlRig) setup() *golden.Objects { return r.p.Case.Setup }

func (r *controlRig) CQRing(cq int) []byte {
	g := &r.setup().CQ[cq]
	return bytesAt(word(r.cqIn[cq], 0), g.Entries*g.CQESize)
}

func (r *controlRig) SQ(qp int) []byte {
	g := &r.setup().QP[qp]
	return bytesAt(word(r.qpIn[qp], 0)+uint64(g.SQOffset), g.SQEntries*g.SQStride)
}

func (r *controlRig) RQ(qp int) []byte {
	g := &r.setup().QP[qp]
	return bytesAt(word(r.qpIn[qp], 0)+uint64(g.RQOffset), g.RQEntries*g.RQStride)
}

func (r *controlRig) QPRecord(qp int) []byte {
	n := 8
	if r.fam.Name() == "mlx4" {
		n = 4
	}
	return bytesAt(word(r.qpIn[qp], 1), n)
}

// Notified delivers an event through the channel's file.
func (r *controlRig) Notified(cq int) {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], r.k.UserHandles[cq])
	unix.Write(r.event[1], b[:])
	var ev [1]verbs.CompletionQueue
	if n, err := r.ch.Wait(ev[:]); n != 1 || err != nil || ev[0] != r.cqs[cq] {
		r.t.Errorf("event of cq%d: %d, %v", cq, n, err)
	}
}

// attrs reads the recording's words for a queue pair's attributes.
func attrs(state verbs.QPState, text string) *verbs.QPAttr {
	a := &verbs.QPAttr{State: state}
	for _, part := range strings.Split(text, ",") {
		f := strings.Fields(part)
		if len(f) > 0 && f[0] == "global" {
			a.AV.IsGlobal = true
			f = f[1:]
		}
		for i := 0; i+1 < len(f); i += 2 {
			var n uint32
			fmt.Sscan(f[i+1], &n)
			switch f[i] {
			case "port":
				a.Port = uint8(n)
			case "pkey_index":
				a.PKeyIndex = uint16(n)
			case "access":
				for name, bit := range map[string]verbs.AccessFlags{"LOCAL_WRITE": verbs.AccessLocalWrite,
					"REMOTE_WRITE": verbs.AccessRemoteWrite, "REMOTE_READ": verbs.AccessRemoteRead, "REMOTE_ATOMIC": verbs.AccessRemoteAtomic} {
					for _, have := range strings.Split(f[i+1], "|") {
						if have == name {
							a.Access |= bit
						}
					}
				}
			case "mtu":
				for a.PathMTU = verbs.MTU256; a.PathMTU.Bytes() != int(n); a.PathMTU++ {
				}
			case "dest_qp":
				a.DestQPN = n
			case "rq_psn":
				a.RQPSN = n
			case "sq_psn":
				a.SQPSN = n
			case "max_dest_rd_atomic":
				a.MaxDestRdAtomic = uint8(n)
			case "max_rd_atomic":
				a.MaxRdAtomic = uint8(n)
			case "min_rnr":
				a.MinRNRTimer = uint8(n)
			case "timeout":
				a.Timeout = uint8(n)
			case "retry":
				a.RetryCount = uint8(n)
			case "rnr_retry":
				a.RNRRetry = uint8(n)
			case "sl":
				a.AV.SL = uint8(n)
			case "dlid":
				a.AV.DLID = uint16(n)
			case "dgid":
				a.AV.DGID = netip.MustParseAddr(f[i+1]).As16()
			case "sgid_index":
				a.AV.SGIDIndex = uint8(n)
			case "hop":
				a.AV.HopLimit = uint8(n)
			case "tclass":
				a.AV.TrafficClass = uint8(n)
			case "flow":
				a.AV.FlowLabel = n
			default:
				panic("attribute " + f[i])
			}
		}
	}
	if state == verbs.QPReadyToReceive {
		a.AV.Port = 1
	}
	return a
}

var stateNames = map[string]verbs.QPState{"RESET": verbs.QPReset, "INIT": verbs.QPInitState, "RTR": verbs.QPReadyToReceive,
	"RTS": verbs.QPReadyToSend, "ERR": verbs.QPError}

// Modify is not reached: the control group's transitions go through play, which knows their attributes.
func (r *controlRig) Modify(qp int, state verbs.QPState) error { return nil }

func (r *controlRig) play(i int) (err error) {
	s := &r.p.Case.Steps[i]
	r.k.Expect(s.Kernel)
	defer func() { r.k.Done(fmt.Sprintf("step %d (%s)", i, s.Call)) }()
	setup := r.setup()
	switch s.Call {
	case "ibv_open_device":
		r.ctx, err = OpenOn(r.k, r.fam, r.info, fstest.MapFS{})
		setup.UARPages = s.UARPages
	case "ibv_close_device":
		err = r.ctx.Close()
		r.ctx = nil
	case "ibv_alloc_pd":
		r.pd, err = r.ctx.AllocPD()
	case "ibv_dealloc_pd":
		err = r.pd.Dealloc()
	case "ibv_reg_mr":
		m, e := r.ctx.k.RegMR(r.pd.(*protectionDomain).handle, uint64(s.Args.Addr), uint64(s.Args.Length), uint32(s.Args.Access))
		if err = e; err == nil {
			r.mrs = append(r.mrs, m.MRHandle)
			if m.LKey != uint32(s.LKey) || m.RKey != uint32(s.RKey) {
				err = fmt.Errorf("keys %#x %#x", m.LKey, m.RKey)
			}
		}
	case "ibv_dereg_mr":
		// The recording destroys in the order of creation or its reverse; the handle tells.
		h := r.mrs[0]
		for _, c := range s.Kernel {
			for _, a := range c.Attrs {
				if a.Kind == "idr_in" {
					fmt.Sscan(string(a.Value), &h)
				}
			}
			if len(c.CoreIn) == 4 {
				h = binary.NativeEndian.Uint32(c.CoreIn)
			}
		}
		err = r.ctx.k.DeregMR(h)
	case "ibv_create_comp_channel":
		r.ch, err = r.ctx.CreateCompletionChannel()
	case "ibv_destroy_comp_channel":
		err = r.ch.Close()
	case "ibv_create_cq":
		init := verbs.CQInit{Capacity: s.Args.CQE, Vector: s.Args.CompVector}
		if s.Args.Channel {
			init.Channel = r.ch
		}
		cq, e := r.ctx.CreateCQ(init)
		if err = e; err == nil {
			r.cqs = append(r.cqs, cq)
			setup.CQ = append(setup.CQ, s.CQs...)
			if cq.Capacity() != s.CQs[0].IBVCQE {
				err = fmt.Errorf("capacity %d, want %d", cq.Capacity(), s.CQs[0].IBVCQE)
			}
			if r.fam.Name() == "mlx4" { // the kernel's doing
				ring := r.CQRing(len(r.cqs) - 1)
				for b := range ring {
					ring[b] = 0xcc
				}
			}
		}
	case "ibv_destroy_cq":
		err = r.cqs[num(s.CQName)].Destroy()
	case "ibv_create_qp":
		c := s.Args.Cap
		q, e := r.pd.CreateQP(verbs.QPInit{SendCQ: r.cqs[num(s.Args.SendCQ)], RecvCQ: r.cqs[num(s.Args.RecvCQ)], SignalAll: s.Args.SQSigAll != 0,
			Cap: verbs.QPCap{MaxSendWR: c.MaxSendWR, MaxRecvWR: c.MaxRecvWR, MaxSendSGE: c.MaxSendSGE, MaxRecvSGE: c.MaxRecvSGE, MaxInlineData: c.MaxInlineData}})
		if err = e; err == nil {
			r.qps = append(r.qps, q)
			setup.QP = append(setup.QP, s.QPs...)
			setup.UARPages = s.UARPages
			w := s.QPs[0].ReturnedCap
			want := verbs.QPCap{MaxSendWR: w.MaxSendWR, MaxRecvWR: w.MaxRecvWR, MaxSendSGE: w.MaxSendSGE, MaxRecvSGE: w.MaxRecvSGE, MaxInlineData: w.MaxInlineData}
			if q.Cap() != want || q.QPN() != s.QPs[0].QPNum {
				err = fmt.Errorf("QP %#x %+v, want %#x %+v", q.QPN(), q.Cap(), s.QPs[0].QPNum, want)
			}
		}
	case "ibv_destroy_qp":
		err = r.qps[num(s.Args.QP)].Destroy()
	case "ibv_modify_qp":
		st, ok := stateNames[s.Args.QPState]
		if !ok {
			return fmt.Errorf("unknown state %s", s.Args.QPState)
		}
		n := num(s.Args.QP)
		err = r.qps[n].Modify(attrs(st, s.Args.Attr), verbs.QPAttrMask(s.Args.AttrMask))
		if got := fmt.Sprintf("%x", r.QPRecord(n)); err == nil && got != fmt.Sprintf("%x", []byte(s.QPDBRAfter)) {
			err = fmt.Errorf("doorbell record %s", got)
		}
	case "ibv_query_device":
		a, e := r.ctx.QueryDevice()
		if err = e; err == nil {
			var fw string
			var wr, sge int
			fmt.Sscanf(string(s.Raw["fw_ver"]), "%q", &fw)
			fmt.Sscan(string(s.Raw["max_qp_wr"]), &wr)
			fmt.Sscan(string(s.Raw["max_sge"]), &sge)
			if a.FirmwareVersion != fw || a.MaxQPWR != wr || a.MaxSGE != sge {
				err = fmt.Errorf("firmware %s, %d work requests, %d SGEs", a.FirmwareVersion, a.MaxQPWR, a.MaxSGE)
			}
		}
	case "ibv_query_port":
		a, e := r.ctx.QueryPort(1)
		if err = e; err == nil {
			var lid, layer, state int
			fmt.Sscan(string(s.Raw["lid"]), &lid)
			fmt.Sscan(string(s.Raw["link_layer"]), &layer)
			fmt.Sscan(string(s.Raw["state"]), &state)
			if int(a.LID) != lid || int(a.LinkLayer) != layer || int(a.State) != state {
				err = fmt.Errorf("lid %d, link layer %d, state %d", a.LID, a.LinkLayer, a.State)
			}
		}
	case "setup":
		// The recording moved the queue pairs to RTS without saying so.
		r.k.Free = true
		for _, q := range r.qps {
			for _, st := range []verbs.QPState{verbs.QPInitState, verbs.QPReadyToReceive, verbs.QPReadyToSend} {
				if q.State() < st {
					if err := q.Modify(&verbs.QPAttr{State: st}, verbs.QPMaskState); err != nil {
						return err
					}
				}
			}
		}
		r.k.Free = false
	default:
		r.p.Step(i)
	}
	return err
}

func num(name string) (n int) {
	fmt.Sscanf(strings.TrimLeft(name, "cqp"), "%d", &n)
	return n
}

// open opens the device, and makes what the case's first call needs, by the commands of another case of the same profile.
func (r *controlRig) open(all []golden.File) error {
	for _, f := range all {
		for i := range f.Cases {
			c := &f.Cases[i]
			if c.Profile != r.p.Case.Profile || c.Name == "open_no_devx" || len(c.Env) > 0 || len(c.Steps) == 0 || c.Steps[0].Call != "ibv_open_device" {
				continue
			}
			r.k.Expect(c.Steps[0].Kernel)
			var err error
			if r.ctx, err = OpenOn(r.k, r.fam, r.info, fstest.MapFS{}); err != nil {
				return err
			}
			r.k.Done("open")
			for _, s := range c.Steps {
				if s.Call == "ibv_alloc_pd" {
					r.k.Expect(s.Kernel)
					r.pd, err = r.ctx.AllocPD()
					return err
				}
			}
		}
	}
	return fmt.Errorf("no case of profile %s opens the device", r.p.Case.Profile)
}

// TestGoldenControl plays the kernel commands of both families, byte by byte.
func TestGoldenControl(t *testing.T) {
	var all []golden.File
	for _, device := range []string{"mlx5", "mlx4"} {
		for _, dir := range golden.Dirs("testdata/golden") {
			files, err := golden.Load(dir, device)
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range files {
				if f.Group == "control" {
					all = append(all, f)
				}
			}
			for _, f := range files {
				if f.Group != "control" {
					continue
				}
				cases, steps, commands := 0, 0, 0
				for i := range f.Cases {
					c := &f.Cases[i]
					t.Run(c.Profile+"/"+c.Name, func(t *testing.T) { playControl(t, c, all) })
					cases++
					steps += len(c.Steps)
					for _, s := range c.Steps {
						commands += len(s.Kernel)
					}
				}
				t.Logf("%s: %d cases, %d steps, %d commands", strings.TrimPrefix(f.Path, dir), cases, steps, commands)
			}
		}
	}
}

func playControl(t *testing.T, c *golden.Case, all []golden.File) {
	golden.FillMemory()
	r := &controlRig{t: t}
	if c.Device == "mlx5" {
		r.fam = mlx5.Family{Getenv: func(k string) string { return c.Env[k] }}
		r.info = provider.Info{Name: "mlx5_0", ABIVersion: 1}
	} else {
		r.fam = mlx4.Family{}
		r.info = provider.Info{Name: "mlx4_0", ABIVersion: 4}
	}
	if c.Setup == nil {
		c.Setup = &golden.Objects{}
	}
	var pipes [][2]int
	r.k = &golden.Kernel{
		NewFD: func(comp bool) int {
			var p [2]int
			if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
				t.Fatal(err)
			}
			pipes = append(pipes, p)
			if comp {
				r.event = &pipes[len(pipes)-1]
			}
			return p[0]
		},
		Created: func(object string, in []byte, user uint64) {
			if object == "cq" {
				r.cqIn = append(r.cqIn, in)
			} else {
				r.qpIn = append(r.qpIn, in)
			}
		},
	}
	r.p = &golden.Player{Case: c, Rig: r}
	r.p.Prepare()
	if c.Steps[0].Call != "ibv_open_device" {
		if err := r.open(all); err != nil {
			t.Fatal(err)
		}
	}
	for i := range c.Steps {
		if err := r.play(i); err != nil {
			t.Errorf("step %d (%s): %v", i, c.Steps[i].Call, err)
			break
		}
		if len(r.k.Errors) > 0 || len(r.p.Errors) > 0 {
			break
		}
	}
	for _, e := range append(r.k.Errors, r.p.Errors...) {
		t.Error(e)
	}
	if r.ctx != nil {
		r.k.Free = true
		r.ctx.Close()
	}
	for _, p := range pipes {
		unix.Close(p[1])
	}
}
