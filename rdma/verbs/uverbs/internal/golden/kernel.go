package golden

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/verbs/uverbs/internal/abi"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
)

// Kernel answers a driver's system calls as the recording's kernel answered the library's, and
// notes every difference between the two. It implements kernel.Calls.
type Kernel struct {
	Errors []string
	// Free lets every command pass unrecorded.
	Free bool
	// AsyncFD and CompFD are what the driver is given for the recorded file descriptors.
	AsyncFD, CompFD int
	// UARs are the pages mapped so far, in the recording's order.
	UARs [][]byte
	// Created gets the driver-private input and the user handle of each CQ and QP.
	Created func(object string, driverIn []byte, userHandle uint64)

	queue       []Command
	NewFD       func(comp bool) int
	UserHandles []uint64 // of CQs, in the order of creation
}

// Expect puts the commands of one library call before the kernel.
func (k *Kernel) Expect(cmds []Command) { k.queue = append(k.queue[:0], cmds...) }

// Done notes commands of the library call that the driver left out, other than those that it never needs.
func (k *Kernel) Done(step string) {
	for _, c := range k.queue {
		if why := libraryOnly(&c); why == "" {
			k.errorf("%s: the driver did not issue %s", step, c.name())
		}
	}
	k.queue = k.queue[:0]
}

func (c *Command) name() string {
	switch c.Via {
	case "ioctl":
		return strings.TrimSpace("ioctl " + c.Object + " " + c.Method + " " + c.WriteCmd)
	case "write":
		return "write " + c.WriteCmd
	}
	return fmt.Sprintf("mmap %#x %s", uint64(c.Offset), c.Prot)
}

// libraryOnly says why a driver need not issue a command that the library does, "" when it must.
func libraryOnly(c *Command) string {
	switch {
	case c.Via == "mmap" && c.Prot == "READ":
		return "the adapter's clock page: there are no timestamps here"
	case c.Method == "DEVX_OTHER":
		return "a query of capabilities for raw adapter objects"
	case c.WriteCmd == "EX_QUERY_DEVICE":
		return "limits of features that are not used; the plain query serves"
	case c.Method == "QUERY_PORT" || c.WriteCmd == "QUERY_PORT":
		return "cached for checksum offload of datagram queue pairs"
	case c.WriteCmd == "QUERY_DEVICE":
		return "the same"
	case c.Via == "ioctl" && c.Errno == "ENOTTY":
		return "the kernel has no ioctl; one probe tells"
	}
	return ""
}

func (k *Kernel) errorf(format string, args ...any) {
	k.Errors = append(k.Errors, fmt.Sprintf(format, args...))
}

// next finds the recorded command that the driver's call corresponds to, dropping what only the library issues.
func (k *Kernel) next(match func(*Command) bool) *Command {
	for i := range k.queue {
		c := k.queue[i]
		if match(&c) {
			k.queue = k.queue[i+1:]
			return &c
		}
		if libraryOnly(&c) == "" {
			return nil
		}
	}
	return nil
}

func errnoByName(name string) error {
	for e := syscall.Errno(1); e < 134; e++ {
		if unix.ErrnoName(e) == name {
			return e
		}
	}
	return syscall.EIO
}

var kinds = map[string]kernel.AttrKind{"ptr_in": kernel.In, "ptr_out": kernel.Out, "idr_in": kernel.HandleIn,
	"idr_out": kernel.HandleOut, "fd_in": kernel.FDIn, "fd_out": kernel.FDOut}

// fd translates a recorded descriptor.
func (k *Kernel) fd(raw json.RawMessage) int {
	var s string
	json.Unmarshal(raw, &s)
	if s == "fd:async" {
		return k.AsyncFD
	}
	return k.CompFD
}

// masked returns b with the fields zeroed that the recording zeroed.
func masked(b []byte, reloc []Reloc) []byte {
	out := bytes.Clone(b)
	for _, r := range reloc {
		if r.Off+r.Size <= len(out) {
			clear(out[r.Off : r.Off+r.Size])
		}
	}
	return out
}

func (k *Kernel) Ioctl(c *kernel.Ioctl) error {
	if k.Free {
		return nil
	}
	invoke := c.Object == abi.ObjectDevice && c.Method == abi.MethodInvokeWrite
	var cmd uint32
	if invoke {
		cmd = binary.NativeEndian.Uint32(c.Attrs[0].Data)
	}
	probe := invoke && len(c.Attrs) == 1
	want := k.next(func(w *Command) bool {
		switch {
		case w.Via != "ioctl" || w.ObjectID != c.Object || w.MethodID != c.Method:
			return false
		case probe:
			return len(w.Attrs) == 1 // whatever command the library probes with
		case invoke && cmd == abi.CmdQueryDevice && w.WriteCmd == "EX_QUERY_DEVICE":
			return true // the driver asks the plain question, whose answer is the beginning of the other's
		case invoke:
			return uint32(w.CmdID) == cmd
		}
		return true
	})
	if want == nil {
		k.errorf("the library issues no ioctl object %#x method %#x command %#x here", c.Object, c.Method, cmd)
		return syscall.EOPNOTSUPP
	}
	name := want.name()
	if probe {
		return errnoByName(want.Errno)
	}
	if c.DriverID != want.DriverID {
		k.errorf("%s: driver id %d, want %d", name, c.DriverID, want.DriverID)
	}
	if want.WriteCmd == "EX_QUERY_DEVICE" && cmd == abi.CmdQueryDevice {
		for _, w := range want.Attrs {
			if w.Name == "CORE_OUT" {
				copy(c.Attrs[2].Data, w.Out)
			}
		}
		return nil
	}
	if len(c.Attrs) != len(want.Attrs) {
		k.errorf("%s: %d attributes, want %d", name, len(c.Attrs), len(want.Attrs))
		return syscall.EINVAL
	}
	var driverIn []byte
	var user uint64
	for i := range c.Attrs {
		g, w := &c.Attrs[i], &want.Attrs[i]
		if g.ID != w.ID || g.Kind != kinds[w.Kind] || g.Flags != w.Flags {
			k.errorf("%s: attribute %d is %#x kind %d flags %d, want %#x (%s) kind %s flags %d", name, i, g.ID, g.Kind, g.Flags, w.ID, w.Name, w.Kind, w.Flags)
			return syscall.EINVAL
		}
		switch g.Kind {
		case kernel.In:
			if len(g.Data) != w.Len || !bytes.Equal(masked(g.Data, w.Reloc), w.In) {
				k.errorf("%s: %s is %x, want %x", name, w.Name, g.Data, []byte(w.In))
			}
			if w.Name == "UHW_IN" {
				driverIn = g.Data
				k.checkAddresses(name, g.Data, w.Reloc)
			}
			if strings.HasSuffix(w.Name, "USER_HANDLE") {
				user = binary.NativeEndian.Uint64(g.Data)
			}
		case kernel.Out:
			if len(g.Data) != w.Len {
				k.errorf("%s: room of %d bytes for %s, want %d", name, len(g.Data), w.Name, w.Len)
			}
			if want.Errno == "" {
				copy(g.Data, w.Out)
			}
			if want.WriteCmd == "CREATE_COMP_CHANNEL" && w.Name == "CORE_OUT" {
				k.CompFD = k.NewFD(true)
				binary.NativeEndian.PutUint32(g.Data, uint32(k.CompFD))
			}
		case kernel.HandleIn:
			var v uint64
			json.Unmarshal(w.Value, &v)
			if g.Value != v {
				k.errorf("%s: %s is %d, want %d", name, w.Name, g.Value, v)
			}
		case kernel.HandleOut:
			json.Unmarshal(w.Value, &g.Value)
		case kernel.FDIn:
			if int(g.Value) != k.fd(w.Value) {
				k.errorf("%s: %s is descriptor %d, want %d", name, w.Name, g.Value, k.fd(w.Value))
			}
		case kernel.FDOut:
			k.AsyncFD = k.NewFD(false)
			g.Value = uint64(k.AsyncFD)
		}
	}
	if want.Errno != "" {
		return errnoByName(want.Errno)
	}
	k.created(want.Object+want.Method, driverIn, user)
	return nil
}

func (k *Kernel) created(what string, driverIn []byte, user uint64) {
	switch what {
	case "CQCQ_CREATE", "CREATE_CQ":
		k.UserHandles = append(k.UserHandles, user)
		k.Created("cq", driverIn, user)
	case "QPQP_CREATE", "CREATE_QP":
		k.Created("qp", driverIn, user)
	}
}

// checkAddresses compares where buffers and records lie as far as the recording says: buffers at page starts, records at
// the same offset in their page.
func (k *Kernel) checkAddresses(name string, in []byte, reloc []Reloc) {
	for _, r := range reloc {
		v := binary.NativeEndian.Uint64(in[r.Off:])
		var off uint64
		switch {
		case strings.HasSuffix(r.Sym, ".buf"):
		case strings.HasPrefix(r.Sym, "dbr page +"):
			fmt.Sscanf(r.Sym, "dbr page +0x%x", &off)
		default:
			continue
		}
		if v == 0 || v%4096 != off {
			k.errorf("%s: %s at %#x, want offset %#x in a page", name, r.Sym, v, off)
		}
	}
}

func (k *Kernel) Write(c *kernel.Write) error {
	if k.Free {
		return nil
	}
	want := k.next(func(w *Command) bool {
		return w.Via == "write" && (uint32(w.CmdID) == c.Command || c.Command == abi.CmdQueryDevice && w.WriteCmd == "EX_QUERY_DEVICE")
	})
	if want == nil {
		k.errorf("the library writes no command %#x here", c.Command)
		return syscall.EOPNOTSUPP
	}
	name := want.name()
	if want.WriteCmd == "EX_QUERY_DEVICE" && c.Command == abi.CmdQueryDevice {
		copy(c.CoreOut, want.CoreOut)
		return nil
	}
	words := 8 + len(c.CoreIn) + len(c.DriverIn)
	if words/4 != want.InWords || (len(c.CoreOut)+len(c.DriverOut))/4 != want.OutWords {
		k.errorf("%s: %d words in, %d out, want %d and %d", name, words/4, (len(c.CoreOut)+len(c.DriverOut))/4, want.InWords, want.OutWords)
	}
	if !bytes.Equal(masked(c.CoreIn, want.CoreReloc), want.CoreIn) {
		k.errorf("%s: command is %x, want %x", name, c.CoreIn, []byte(want.CoreIn))
	}
	for _, r := range want.CoreReloc {
		if r.Sym == "fd:comp_channel0" {
			if v := binary.NativeEndian.Uint32(c.CoreIn[r.Off:]); int(v) != k.CompFD {
				k.errorf("%s: channel descriptor %d, want %d", name, v, k.CompFD)
			}
		}
	}
	if !bytes.Equal(masked(c.DriverIn, want.DriverReloc), want.DriverIn) {
		k.errorf("%s: driver part is %x, want %x", name, c.DriverIn, []byte(want.DriverIn))
	}
	k.checkAddresses(name, c.DriverIn, want.DriverReloc)
	if want.Errno != "" {
		return errnoByName(want.Errno)
	}
	copy(c.CoreOut, want.CoreOut)
	copy(c.DriverOut, want.DriverOut)
	switch want.WriteCmd {
	case "GET_CONTEXT":
		k.AsyncFD = k.NewFD(false)
		binary.NativeEndian.PutUint32(c.CoreOut, uint32(k.AsyncFD))
	case "CREATE_COMP_CHANNEL":
		k.CompFD = k.NewFD(true)
		binary.NativeEndian.PutUint32(c.CoreOut, uint32(k.CompFD))
	}
	var user uint64
	if len(c.CoreIn) >= 16 {
		user = binary.NativeEndian.Uint64(c.CoreIn[8:])
	}
	k.created(want.WriteCmd, c.DriverIn, user)
	return nil
}

func (k *Kernel) Mmap(offset int64, length, prot int) ([]byte, error) {
	want := k.next(func(w *Command) bool { return w.Via == "mmap" && w.Prot == "WRITE" })
	if want == nil {
		k.errorf("the library maps nothing here, the driver %#x", offset)
		return nil, syscall.EINVAL
	}
	if int64(want.Offset) != offset || want.Length != length || prot != unix.PROT_WRITE {
		k.errorf("mmap %#x of %d bytes with protection %d, want %#x, %d, write", offset, length, prot, uint64(want.Offset), want.Length)
	}
	// Readable too, so that the test can look.
	b, err := unix.Mmap(-1, 0, length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err == nil {
		k.UARs = append(k.UARs, b)
	}
	return b, err
}

func (k *Kernel) Munmap(b []byte) error { return unix.Munmap(b) }
func (k *Kernel) Close() error          { return nil }
