package mlxtest

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs/internal/golden"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
)

// The model is held to the recordings from the other side: it must read the library's entries as the requests that they were
// made from, write completions as the library reads them, see its doorbells and arm requests, and answer its commands as
// the recordings' kernel did.

func eachCase(t *testing.T, f func(t *testing.T, c *golden.Case)) {
	for _, dir := range golden.Dirs("../testdata/golden") {
		for _, device := range []string{"mlx5", "mlx4"} {
			files, err := golden.Load(dir, device)
			if err != nil {
				t.Fatal(err)
			}
			for _, file := range files {
				for i := range file.Cases {
					c := &file.Cases[i]
					t.Run(device+"/"+file.Group+"/"+c.Profile+"/"+c.Name, func(t *testing.T) { f(t, c) })
				}
			}
		}
	}
}

// qpOf finds a recorded queue pair, made in the setup or by a step.
func qpOf(c *golden.Case, name string) *golden.QP {
	if c.Setup != nil {
		for i := range c.Setup.QP {
			if c.Setup.QP[i].Name == name {
				return &c.Setup.QP[i]
			}
		}
	}
	for i := range c.Steps {
		for k := range c.Steps[i].QPs {
			if q := &c.Steps[i].QPs[k]; q.Name == name {
				return q
			}
		}
		if s := c.Steps[i].Setup; s != nil {
			for k := range s.QP {
				if s.QP[k].Name == name {
					return &s.QP[k]
				}
			}
		}
	}
	return nil
}

// TestGoldenRequests decodes every recorded WQE and compares it with the request.
func TestGoldenRequests(t *testing.T) {
	golden.FillMemory()
	n := 0
	eachCase(t, func(t *testing.T, c *golden.Case) {
		for i := range c.Steps {
			s := &c.Steps[i]
			if s.Call != "ibv_post_send" {
				continue
			}
			wrs, err := golden.SendRequests(s.Args.WR)
			if err != nil {
				t.Fatal(err)
			}
			q := qpOf(c, s.Args.QP)
			for k, w := range s.WQEs {
				var r request
				var why string
				units := uint32(1)
				if c.Device == "mlx5" {
					r, why = decodeMLX5(w, nil)
					units = uint32(len(w)+63) / 64
					if r.counter != uint16(s.WQEIndex[k]) {
						t.Errorf("step %d WQE %d: index %#x, want %#x", i, k, r.counter, s.WQEIndex[k])
					}
					if qpn := be.Uint32(w[4:]) >> 8; qpn != q.QPNum {
						t.Errorf("step %d WQE %d: queue pair %#x, want %#x", i, k, qpn, q.QPNum)
					}
				} else {
					r, why = decodeMLX4(w, nil, nil)
					if owner := w[0]&0x80 != 0; owner != (s.WQEIndex[k]&q.SQEntries != 0) {
						t.Errorf("step %d WQE %d: owner %v at index %#x", i, k, owner, s.WQEIndex[k])
					}
				}
				if why != "" || r.units != units {
					t.Errorf("step %d WQE %d: %s, %d units", i, k, why, r.units)
					continue
				}
				if got, want := show(&r), wanted(&wrs[k], c.Device, q.SQSigAll != 0); got != want {
					t.Errorf("step %d WQE %d:\n got  %s\n want %s", i, k, got, want)
				}
				n++
			}
		}
	})
	t.Logf("%d work queue entries", n)
	if n == 0 {
		t.Error("no entry was decoded")
	}
}

func show(r *request) string {
	return fmt.Sprintf("op %d signaled %v solicited %v fence %v imm %#x raddr %#x rkey %#x sges %x inline %x compare %#x swap %#x",
		r.op, r.signaled, r.solicited, r.fence, r.imm, r.raddr, r.rkey, r.sges, r.inline, r.compare, r.swap)
}

// wanted is what decoding the request's WQE must give.
func wanted(w *verbs.SendWorkRequest, device string, sigAll bool) string {
	r := request{op: w.Opcode, signaled: sigAll || w.Flags&verbs.SendSignaled != 0, solicited: w.Flags&verbs.SendSolicited != 0, fence: w.Flags&verbs.SendFence != 0}
	switch w.Opcode {
	case verbs.OpSendWithImm, verbs.OpRDMAWriteImm, verbs.OpSendWithInv, verbs.OpLocalInv:
		r.imm = w.ImmData
	}
	switch w.Opcode {
	case verbs.OpRDMAWrite, verbs.OpRDMAWriteImm, verbs.OpRDMARead, verbs.OpCompareSwap, verbs.OpFetchAdd:
		r.raddr, r.rkey = w.RemoteAddr, w.RKey
	}
	if a := w.Atomic; a != nil {
		r.swap, r.compare = a.Swap, a.CompareAdd
		if w.Opcode == verbs.OpFetchAdd {
			r.swap = a.CompareAdd
			r.compare = 0 // means nothing there
		}
	}
	if w.Flags&verbs.SendInline != 0 {
		for _, s := range w.SGList {
			r.inline = append(r.inline, golden.Memory()[s.Addr-golden.MemoryAddr:][:s.Length]...)
		}
		return show(&r)
	}
	for _, s := range w.SGList {
		if s.Length > 0 || device == "mlx4" {
			r.sges = append(r.sges, s)
		}
	}
	return show(&r)
}

// TestGoldenCompletions builds every recorded CQE that the library polled from what it made of it.
func TestGoldenCompletions(t *testing.T) {
	n, general := 0, 0
	eachCase(t, func(t *testing.T, c *golden.Case) {
		type cqe struct {
			step int
			s    *golden.Step
		}
		waiting := map[string][]cqe{}
		requests := map[uint64]verbs.SendOpcode{}
		for i := range c.Steps {
			s := &c.Steps[i]
			switch s.Call {
			case "ibv_post_send":
				for _, w := range s.Args.WR {
					requests[uint64(w.WRID)] = verbs.SendOpcode(w.OpcodeNum)
				}
			case "hw_write_cqe":
				waiting[s.CQName] = append(waiting[s.CQName], cqe{i, s})
			case "ibv_modify_qp":
				if s.Args.QPState == "RESET" {
					clear(waiting) // purged; what is left moved
				}
			case "ibv_poll_cq":
				name := s.Args.CQ
				if s.Ret < 0 && len(waiting[name]) > 0 {
					waiting[name] = waiting[name][1:]
				}
				for k := range s.WC {
					if len(waiting[name]) == 0 {
						break
					}
					w := waiting[name][0]
					waiting[name] = waiting[name][1:]
					switch checkCQE(t, c, w.step, w.s, &s.WC[k], requests[uint64(s.WC[k].WRID)]) {
					case 1:
						n++
					case 2:
						general++
					}
				}
			}
		}
	})
	t.Logf("%d completion entries, and %d of syndromes that the library lumps together", n, general)
	if n == 0 {
		t.Error("no entry was built")
	}
}

func checkCQE(t *testing.T, c *golden.Case, step int, s *golden.Step, wc *golden.WC, op verbs.SendOpcode) int {
	e := &entry{QPN: wc.QPNum, RSN: wc.QPNum, Status: verbs.WCStatus(wc.Status), Owner: s.OwnerBit != 0, RoCE: strings.HasSuffix(c.Profile, "roce")}
	for i := range 64 {
		if q := qpOf(c, fmt.Sprintf("qp%d", i)); q != nil && q.QPNum == wc.QPNum {
			e.RSN = uint32(q.UIDX)
		}
	}
	hex := []byte(s.Hex)
	n := 64
	if c.Device == "mlx4" {
		n = 32
	}
	body := hex[len(hex)-n:]
	e.Send = !strings.Contains(s.What, "receive") && !strings.Contains(s.What, "responder")
	val := func(p *uint32) uint32 {
		if p == nil {
			return 0
		}
		return *p
	}
	e.Vendor = uint8(val(wc.VendorErr))
	e.ByteLen = val(wc.ByteLen)
	// What the harness fills in at will: the counter of a receive, and below the fields that nobody reads.
	if c.Device == "mlx5" {
		e.Counter = be.Uint16(body[60:])
	} else {
		e.Counter = be.Uint16(body[24:])
	}
	if e.Send {
		e.Op = op
	} else {
		e.Op = verbs.OpSend
		flags := verbs.WCFlags(val(wc.WCFlags))
		switch {
		case val(wc.Opcode) == uint32(verbs.WCRecvRDMAWr):
			e.Op = verbs.OpRDMAWriteImm
		case flags&verbs.WCWithImm != 0:
			e.Op = verbs.OpSendWithImm
		case flags&verbs.WCWithInv != 0:
			e.Op = verbs.OpSendWithInv
		}
		e.GRH = flags&verbs.WCWithGRH != 0
		if wc.ImmData != nil {
			e.Imm = be.Uint32(*wc.ImmData)
			if flags&verbs.WCWithInv != 0 {
				e.Imm = binary.LittleEndian.Uint32(*wc.ImmData)
			}
		}
		e.SrcQP, e.SL, e.PathBits = val(wc.SrcQP), uint8(val(wc.SL)), uint8(val(wc.PathBits))
		e.SLID = uint16(val(wc.SLID))
	}
	got := make([]byte, len(hex))
	want := bytes.Clone(hex)
	wb := want[len(want)-len(body):]
	if c.Device == "mlx5" {
		if p := body[63] & 0xc; p != 0 { // payload: where it lies is the question here
			at := len(hex) - 64
			if p == 8 {
				at = 0
			}
			e.Data = hex[at:][:min(int(e.ByteLen), 64)]
			if e.Status != verbs.WCSuccess {
				return 0 // a length error that the library found itself
			}
		}
		encodeMLX5(got, e, strings.HasSuffix(c.Profile, "legacy"))
		gb := got[len(got)-64:]
		free := []int{62, 48, 49, 50, 51, 52, 53} // signature, time stamp
		if e.Status == verbs.WCSuccess {
			free = append(free, 54, 55)
		} else {
			free = append(free, 56) // the opcode of a failed request is not looked at
		}
		if !e.Send {
			free = append(free, 56)
		}
		for _, k := range free {
			gb[k], wb[k] = 0, 0
		}
		if e.Status == verbs.WCGeneralError {
			gb[55], wb[55] = 0, 0
		}
		if len(e.Data) > 32 && len(hex) == 128 || len(hex) == 64 {
			clear(got[:min(len(e.Data), 32)])
			clear(want[:min(len(e.Data), 32)])
		}
	} else {
		encodeMLX4(got, e)
		if e.Status == verbs.WCGeneralError {
			got[len(got)-5], want[len(want)-5] = 0, 0
		}
	}
	if !bytes.Equal(got, want) {
		t.Errorf("step %d (%s):\n got  %x\n want %x", step, s.What, got, want)
	}
	if e.Status == verbs.WCGeneralError {
		return 2
	}
	return 1
}

// TestGoldenDoorbells shows the recorded register stores and records to the model's eyes.
func TestGoldenDoorbells(t *testing.T) {
	rung, armed := 0, 0
	rec, err := hostmem.Alloc(4096)
	if err != nil {
		t.Fatal(err)
	}
	defer rec.Free()
	eachCase(t, func(t *testing.T, c *golden.Case) {
		sn := map[string]uint32{}
		first := uint32(0)
		if c.Device == "mlx4" {
			first = 1
		}
		for i := range c.Steps {
			s := &c.Steps[i]
			switch s.Call {
			case "ibv_post_send":
				var stores []golden.Event
				for _, e := range s.Events {
					if strings.HasPrefix(e.Store, "uar") {
						stores = append(stores, e)
					}
				}
				if len(stores) == 0 || s.Ret != 0 {
					continue
				}
				q := qpOf(c, s.Args.QP)
				u := &uar{mem: rec.Bytes()}
				clear(u.mem)
				for _, e := range stores {
					copy(u.mem[e.Off:], e.Hex)
				}
				last := len(s.WQEs) - 1
				off := stores[0].Off
				if c.Device == "mlx5" {
					w := u.word(off)
					if qpn, idx := uint32(w)>>8, uint16(w>>40); qpn != q.QPNum || idx != uint16(s.WQEIndex[last]) {
						t.Errorf("step %d: doorbell of queue pair %#x index %#x, want %#x %#x", i, qpn, idx, q.QPNum, s.WQEIndex[last])
					}
					if off < 0x800 || off%0x100 != 0 || off >= 0xc00 {
						t.Errorf("step %d: doorbell at %#x, where the model does not look", i, off)
					}
					copy(u.mem, s.DBR[s.Args.QP])
					end := uint32(s.WQEIndex[last]) + uint32(len(s.WQEs[last])+63)/64
					if pi := record(addressOf(u.mem), 1); pi != end&0xffff {
						t.Errorf("step %d: record says %#x, want %#x", i, pi, end&0xffff)
					}
				} else {
					qpn := u.word32(0x14) >> 8
					if stores[0].Store != "uar0" {
						qpn = uint32(u.word(off)) >> 8
					}
					if qpn != q.QPNum {
						t.Errorf("step %d: doorbell of queue pair %#x, want %#x", i, qpn, q.QPNum)
					}
				}
				rung++
			case "ibv_req_notify_cq":
				u := &uar{mem: rec.Bytes()}
				clear(u.mem)
				for _, e := range s.Events {
					if strings.HasPrefix(e.Store, "uar") {
						copy(u.mem[0x100+e.Off:], e.Hex)
					}
				}
				if u.word(0x120) == 0 {
					t.Errorf("step %d: no arm request where the model looks", i)
				}
				copy(u.mem, s.DBR[s.Args.CQ])
				ci := record(addressOf(u.mem), 0)
				cq := &cq{dev: &device{net: &Net{}}, db: addressOf(u.mem), armSN: ^uint32(0), pi: ci}
				any := uint32(0)
				if c.Device == "mlx4" {
					any = 2 << 24
				}
				if !cq.arm(any) || !cq.armed || cq.solicited != (s.Args.SolicitedOnly != 0) || cq.armSN != (first+sn[s.Args.CQ])&3 {
					t.Errorf("step %d: armed %v solicited %v sequence %d, want solicited %d sequence %d", i, cq.armed, cq.solicited, cq.armSN, s.Args.SolicitedOnly, (first+sn[s.Args.CQ])&3)
				}
				armed++
			case "ibv_get_cq_event":
				sn[s.CQName]++
			}
		}
	})
	t.Logf("%d doorbells, %d arm requests", rung, armed)
	if rung == 0 || armed == 0 {
		t.Error("nothing was seen")
	}
}

func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// configOf is the device that answers as a profile's kernel did.
func configOf(c *golden.Case) Config {
	return Config{Family: c.Device, InfiniBand: !strings.HasSuffix(c.Profile, "roce") && c.Profile != "mlx5-nobf",
		Legacy: strings.HasSuffix(c.Profile, "legacy"), StaticUARs: c.Profile == "mlx5-static", NoBlueFlame: strings.HasSuffix(c.Profile, "nobf"),
		NoECE: c.Profile == "mlx5-ib", CQE32: c.Profile == "mlx4-cqe32"}
}

// TestGoldenKernel issues the recorded commands to the model and compares its answers.
func TestGoldenKernel(t *testing.T) {
	n, left := 0, map[string]int{}
	eachCase(t, func(t *testing.T, c *golden.Case) {
		if c.Group != "control" || len(c.Steps) == 0 || c.Steps[0].Call != "ibv_open_device" || c.Name == "open_no_devx" {
			return
		}
		if c.Name == "reg_mr" { // the recordings' kernel takes remote write without local write, a real one and the model do not
			left["regions that a kernel refuses"] += len(c.Steps)
			return
		}
		net := NewNet()
		defer net.Close()
		d := newDevice(net, configOf(c))
		d.lid, d.guid = 7, 0x0002c90300000001
		k := &calls{d}
		defer k.Close()
		var memory []*hostmem.Region
		defer func() {
			for _, m := range memory {
				m.Free()
			}
		}()
		patch := func(b []byte, rel []golden.Reloc) {
			for _, r := range rel {
				switch {
				case strings.HasSuffix(r.Sym, ".buf"):
					m, err := hostmem.Alloc(1 << 20)
					if err != nil {
						t.Fatal(err)
					}
					memory = append(memory, m)
					if c.Device == "mlx5" && strings.HasPrefix(r.Sym, "cq") {
						for i := range m.Bytes() {
							m.Bytes()[i] = 0xf0
						}
					}
					binary.NativeEndian.PutUint64(b[r.Off:], m.Addr())
				case strings.HasPrefix(r.Sym, "dbr"):
					m, err := hostmem.Alloc(4096)
					if err != nil {
						t.Fatal(err)
					}
					memory = append(memory, m)
					binary.NativeEndian.PutUint64(b[r.Off:], m.Addr())
				case r.Sym == "fd:comp_channel0":
					binary.NativeEndian.PutUint32(b[r.Off:], channelFD(d))
				}
			}
		}
		for i := range c.Steps {
			for x := range c.Steps[i].Kernel {
				cmd := &c.Steps[i].Kernel[x]
				name := cmd.Object + " " + cmd.Method + " " + cmd.WriteCmd
				if why := unanswered(cmd); why != "" {
					left[why]++
					continue
				}
				var err error
				switch cmd.Via {
				case "mmap":
					_, err = k.Mmap(int64(cmd.Offset), cmd.Length, unix.PROT_WRITE)
				case "ioctl":
					io := &kernel.Ioctl{Object: cmd.ObjectID, Method: cmd.MethodID, DriverID: cmd.DriverID}
					for _, a := range cmd.Attrs {
						at := kernel.Attr{ID: a.ID, Flags: a.Flags, Kind: attrKinds[a.Kind], Data: make([]byte, a.Len)}
						copy(at.Data, a.In)
						patch(at.Data, a.Reloc)
						switch a.Kind {
						case "idr_in":
							json.Unmarshal(a.Value, &at.Value)
						case "fd_in":
							if at.Value = uint64(d.async.fd); strings.Contains(string(a.Value), "comp_channel") {
								at.Value = uint64(channelFD(d))
							}
						}
						io.Attrs = append(io.Attrs, at)
					}
					err = k.Ioctl(io)
					if err == nil {
						for j, a := range cmd.Attrs {
							switch a.Kind {
							case "ptr_out":
								if !bytes.Equal(io.Attrs[j].Data, a.Out) && cmd.WriteCmd != "CREATE_COMP_CHANNEL" {
									t.Errorf("step %d %s: %s\n got  %x\n want %x", i, name, a.Name, io.Attrs[j].Data, []byte(a.Out))
								}
							case "idr_out":
								var v uint64
								json.Unmarshal(a.Value, &v)
								if io.Attrs[j].Value != v {
									t.Errorf("step %d %s: %s is %d, want %d", i, name, a.Name, io.Attrs[j].Value, v)
								}
							}
						}
					}
				case "write":
					w := &kernel.Write{Command: uint32(cmd.CmdID), CoreIn: bytes.Clone(cmd.CoreIn), DriverIn: bytes.Clone(cmd.DriverIn),
						CoreOut: make([]byte, len(cmd.CoreOut)), DriverOut: make([]byte, len(cmd.DriverOut))}
					patch(w.CoreIn, cmd.CoreReloc)
					patch(w.DriverIn, cmd.DriverReloc)
					if err = k.Write(w); err == nil {
						switch cmd.WriteCmd {
						case "CREATE_COMP_CHANNEL", "GET_CONTEXT":
							clear(w.CoreOut[:4]) // a descriptor
						}
						if !bytes.Equal(w.CoreOut, cmd.CoreOut) || !bytes.Equal(w.DriverOut, cmd.DriverOut) {
							t.Errorf("step %d %s:\n got  %x %x\n want %x %x", i, name, w.CoreOut, w.DriverOut, []byte(cmd.CoreOut), []byte(cmd.DriverOut))
						}
					}
				}
				if got := golden.Errno(err); err != nil && got != cmd.Errno || err == nil && cmd.Errno != "" {
					t.Errorf("step %d %s: %v, want %q", i, name, err, cmd.Errno)
				}
				n++
			}
			if c.Steps[i].Call == "ibv_get_cq_event" { // the event was written and read
				for _, q := range d.cqs {
					q.events++
				}
			}
		}
	})
	t.Logf("%d commands answered alike; left out: %v", n, left)
	if n == 0 {
		t.Error("no command was issued")
	}
}

var attrKinds = map[string]kernel.AttrKind{"ptr_in": kernel.In, "ptr_out": kernel.Out, "idr_in": kernel.HandleIn,
	"idr_out": kernel.HandleOut, "fd_in": kernel.FDIn, "fd_out": kernel.FDOut}

// unanswered says why the model does not answer a command of the library, "" when it does.
func unanswered(c *golden.Command) string {
	switch {
	case c.Via == "mmap" && c.Prot == "READ":
		return "clock page"
	case c.Method == "DEVX_OTHER":
		return "DEVX"
	case c.WriteCmd == "EX_QUERY_DEVICE":
		return "extended device query"
	}
	return ""
}

// channelFD is the one completion channel that a recording has.
func channelFD(d *device) uint32 {
	for fd := range d.channels {
		return uint32(fd)
	}
	return 0
}
