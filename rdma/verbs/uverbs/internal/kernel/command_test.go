package kernel

import (
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"srp-initiator/rdma/verbs/uverbs/internal/abi"
)

// TestWriteEncoding compares whole write() buffers with those that the kernel was seen to accept
// (and which rdma-core sends). The response pointer is left out.
func TestWriteEncoding(t *testing.T) {
	for _, c := range []struct {
		name string
		w    Write
		want string
	}{
		{"GET_CONTEXT", Write{Command: abi.CmdGetContext, CoreIn: abi.Bytes(new(abi.GetContext)), CoreOut: abi.Bytes(new(abi.GetContextResp))},
			"00000000 0400 0200 ################"},
		{"GET_CONTEXT with a driver part", Write{Command: abi.CmdGetContext, CoreIn: abi.Bytes(new(abi.GetContext)), DriverIn: []byte{1, 2, 3, 4},
			CoreOut: abi.Bytes(new(abi.GetContextResp)), DriverOut: make([]byte, 16)},
			"00000000 0500 0600 ################ 01020304"},
		{"REG_MR", Write{Command: abi.CmdRegMR, CoreIn: abi.Bytes(&abi.RegMR{Start: 0x1000, Length: 0x2000, HCAVA: 0x1000, PDHandle: 3, AccessFlags: 7}),
			CoreOut: abi.Bytes(new(abi.RegMRResp))},
			"09000000 0c00 0300 ################ 0010000000000000 0020000000000000 0010000000000000 03000000 07000000"},
		{"MODIFY_QP", Write{Command: abi.CmdModifyQP, CoreIn: abi.Bytes(&abi.ModifyQP{QPHandle: 5, AttrMask: 1, QPState: 6})},
			"1a000000 1e00 0000" + strings.Repeat("00", 64) + "05000000 01000000" + strings.Repeat("00", 24) + "06" + strings.Repeat("00", 15)},
		{"POST_SEND", Write{Command: abi.CmdPostSend, CoreIn: abi.Bytes(&abi.PostSend{QPHandle: 9, WQESize: 56}), CoreOut: abi.Bytes(new(abi.PostSendResp))},
			"1c000000 0800 0100 ################ 09000000 00000000 00000000 38000000"},
		{"REQ_NOTIFY_CQ", Write{Command: abi.CmdReqNotifyCQ, CoreIn: abi.Bytes(&abi.ReqNotifyCQ{CQHandle: 2})},
			"17000000 0400 0000 02000000 00000000"},
		{"an extended command", Write{Command: abi.CmdQueryDevice | abi.CmdExtended, CoreIn: make([]byte, 8), CoreOut: make([]byte, 304), DriverOut: make([]byte, 104)},
			"01000080 0100 2600 ################ 0000 0d00 00000000 0000000000000000"},
	} {
		c.w.encode()
		got := hex.EncodeToString(c.w.raw)
		want := strings.ReplaceAll(c.want, " ", "")
		if i := strings.Index(want, "#"); i >= 0 {
			if got[i:i+16] == strings.Repeat("0", 16) {
				t.Errorf("%s: no response pointer", c.name)
			}
			got = got[:i] + strings.Repeat("#", 16) + got[i+16:]
		}
		if got != want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, got, want)
		}
		if len(c.w.resp) != len(c.w.CoreOut)+len(c.w.DriverOut) {
			t.Errorf("%s: room for %d response bytes", c.name, len(c.w.resp))
		}
		if len(c.w.CoreIn) >= 8 && c.w.CoreOut != nil && c.w.CoreIn[0] != 0 {
			t.Errorf("%s: encoding wrote to the caller's struct", c.name)
		}
		first := &c.w.raw[0]
		if c.w.encode(); first != &c.w.raw[0] {
			t.Errorf("%s: encoding again took a new buffer", c.name)
		}
	}
}

// script is a kernel that notes what it is asked and answers from a list of refusals.
type script struct {
	noIoctl  bool
	noMethod []string // "object.method"
	noWrite  error
	log      []string
}

func (s *script) Ioctl(c *Ioctl) error {
	name := fmt.Sprintf("%d.%d", c.Object, c.Method)
	if c.Object == abi.ObjectDevice && c.Method == abi.MethodInvokeWrite {
		name = fmt.Sprintf("invoke %d", c.Attrs[0].Data[0])
	}
	s.log = append(s.log, "ioctl "+name)
	switch {
	case s.noIoctl:
		return syscall.ENOTTY
	case slices.Contains(s.noMethod, name):
		return syscall.EPROTONOSUPPORT
	case len(c.Attrs) == 1 && strings.HasPrefix(name, "invoke"):
		return syscall.ENOSPC
	}
	for i := range c.Attrs {
		switch c.Attrs[i].Kind {
		case HandleOut:
			c.Attrs[i].Value = 77
		case Out:
			c.Attrs[i].Data[0] = 42
		}
	}
	return nil
}

func (s *script) Write(c *Write) error {
	s.log = append(s.log, fmt.Sprintf("write %d", c.Command))
	if s.noWrite != nil {
		return s.noWrite
	}
	if len(c.CoreOut) > 0 {
		c.CoreOut[0] = 43
	}
	return nil
}

func (s *script) Mmap(int64, int, int) ([]byte, error) { return nil, syscall.EINVAL }
func (s *script) Munmap([]byte) error                  { return nil }
func (s *script) Close() error                         { return nil }

// TestCommandTravel: which form each command takes on which kernel.
func TestCommandTravel(t *testing.T) {
	use := func(d *Device) error {
		_, err := d.GetContext(nil, nil)
		if err == nil {
			_, _, err = d.CreateCQ(CQArgs{CQE: 4, CompFD: -1}, nil, nil)
		}
		if err == nil {
			_, err = d.DestroyCQ(77)
		}
		if err == nil {
			err = d.ModifyQP(new(abi.ModifyQP))
		}
		if err == nil {
			_, err = d.QueryPort(1)
		}
		if err == nil {
			err = d.DeallocPD(1)
		}
		return err
	}
	for _, c := range []struct {
		name string
		s    script
		want string
	}{
		{"today's kernel", script{}, "ioctl invoke 1, ioctl 0.3, ioctl 3.0, ioctl 3.1, ioctl invoke 26, ioctl 0.2, ioctl 1.0"},
		{"a kernel without the ioctl", script{noIoctl: true}, "ioctl invoke 1, write 0, write 18, write 20, write 26, write 2, write 4"},
		{"a kernel without some methods", script{noMethod: []string{"0.3", "3.0", "1.0"}},
			"ioctl invoke 1, ioctl 0.3, ioctl invoke 0, ioctl 3.0, ioctl invoke 18, ioctl 3.1, ioctl invoke 26, ioctl 0.2, ioctl 1.0, ioctl invoke 4"},
	} {
		d := NewDevice(&c.s, abi.DriverRXE)
		if err := use(d); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if got := strings.Join(c.s.log, ", "); got != c.want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, got, c.want)
		}
	}
	// A missing method is asked for once.
	s := script{noMethod: []string{"1.0"}}
	d := NewDevice(&s, abi.DriverRXE)
	for range 3 {
		if err := d.DeallocPD(1); err != nil {
			t.Error(err)
		}
	}
	if got := strings.Join(s.log, ", "); got != "ioctl invoke 1, ioctl 1.0, ioctl invoke 4, ioctl invoke 4, ioctl invoke 4" {
		t.Error(got)
	}
}

// TestDoorbell: by write() while that works, by ioctl once the kernel says EACCES, and other errors as they are.
func TestDoorbell(t *testing.T) {
	s := script{}
	b := NewDevice(&s, abi.DriverRXE).NewDoorbell(abi.CmdPostSend, make([]byte, 24), make([]byte, 4))
	ring := func(want error) {
		t.Helper()
		if err := b.Ring(); !errors.Is(err, want) {
			t.Errorf("Ring: %v, want %v", err, want)
		}
	}
	ring(nil)
	s.noWrite = syscall.EINVAL
	ring(syscall.EINVAL)
	s.noWrite = syscall.EACCES
	ring(nil)
	ring(nil)
	if got := strings.Join(s.log[1:], ", "); got != "write 28, write 28, write 28, ioctl invoke 28, ioctl invoke 28" {
		t.Error(got)
	}
	old := script{noIoctl: true, noWrite: syscall.EACCES}
	b = NewDevice(&old, abi.DriverRXE).NewDoorbell(abi.CmdPostSend, make([]byte, 24), make([]byte, 4))
	ring(syscall.EACCES)
}

func TestClosedFile(t *testing.T) {
	if _, err := Open("testdata/none"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Open: %v", err)
	}
	f, err := Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Ioctl(&Ioctl{}); !errors.Is(err, syscall.ENOTTY) {
		t.Errorf("ioctl on /dev/null: %v", err)
	}
	if err := f.Write(&Write{CoreIn: make([]byte, 8)}); err != nil {
		t.Errorf("write to /dev/null: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	for what, err := range map[string]error{"ioctl": f.Ioctl(&Ioctl{}), "write": f.Write(&Write{CoreIn: make([]byte, 8)}), "close": f.Close()} {
		if !errors.Is(err, os.ErrClosed) {
			t.Errorf("%s after Close: %v", what, err)
		}
	}
}
