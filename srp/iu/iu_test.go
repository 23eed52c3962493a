package iu

import (
	"bytes"
	"encoding/hex"
	"errors"
	"reflect"
	"strings"
	"testing"
)

// unhex joins hexadecimal text with blanks and line ends in it.
func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

type unit interface {
	Encode([]byte) (int, error)
	Decode([]byte) error
}

type loginIB struct{ LoginReq }

func (l *loginIB) Encode(b []byte) (int, error) { return l.EncodeIB(b) }
func (l *loginIB) Decode(b []byte) error        { return l.DecodeIB(b) }

type loginCM struct{ LoginReq }

func (l *loginCM) Encode(b []byte) (int, error) { return l.EncodeCM(b) }
func (l *loginCM) Decode(b []byte) error        { return l.DecodeCM(b) }

var (
	testLogin = LoginReq{Tag: 0x1122334455667788, ITIULen: 8260, Formats: DirectFormat | IndirectFormat,
		Flags: MultiChannel | ImmediateDataFlag, ImmDataOffset: 68,
		InitiatorPort: MakePortID(0x0001020304050607, 0x505400fffe123457),
		TargetPort:    MakePortID(0x08090a0b0c0d0e0f, 0x505400fffe123456)}
	lun3  = LUN{0, 3}
	cdb32 = append([]byte{0x7f, 0, 0, 0, 0, 0, 0, 0x18}, bytes.Repeat([]byte{0xaa}, 24)...)
)

// golden bytes are written out from the offsets of SRP r16a and <scsi/srp.h>, not by the encoder.
var golden = []struct {
	name string
	u    unit
	hex  string
}{
	{"LOGIN_REQ IB", &loginIB{testLogin}, `
		00 00000000000000 1122334455667788 00002044 00000000 0006 81 00 0044 0000
		0001020304050607 505400fffe123457 08090a0b0c0d0e0f 505400fffe123456`},
	{"LOGIN_REQ RDMA/CM", &loginCM{testLogin}, `
		1122334455667788 0006 81 00 00002044
		0001020304050607 505400fffe123457 08090a0b0c0d0e0f 505400fffe123456 0044 000000000000`},
	{"LOGIN_RSP", &LoginRsp{Tag: 5, ReqLimDelta: 128, MaxITIULen: 8276, MaxTIIULen: 8260, Formats: 6,
		Flags: ImmediateSupported | ChannelsMaintained}, `
		c0 000000 00000080 0000000000000005 00002054 00002044 0006 82 00
		000000000000000000000000000000000000000000000000`},
	{"LOGIN_REJ", &LoginRej{Tag: 6, Reason: RejectChannelLimit, Formats: 6}, `
		c2 000000 00010006 0000000000000006 0000000000000000 0006 000000000000`},
	{"I_LOGOUT", &ILogout{Tag: 7}, `03 00000000000000 0000000000000007`},
	{"T_LOGOUT", &TLogout{Tag: 8, SolNot: Solicited, Reason: LogoutInactive}, `80 01 0000 00000001 0000000000000008`},
	{"CRED_REQ", &CredReq{Tag: 9, ReqLimDelta: -2}, `81 00 0000 fffffffe 0000000000000009`},
	{"CRED_RSP", &CredRsp{Tag: 9}, `41 00000000000000 0000000000000009`},
	{"AER_REQ", &AERReq{Tag: 10, ReqLimDelta: 3, LUN: lun3, Sense: []byte{0x70, 0, 6}}, `
		82 00 0000 00000003 000000000000000a 00000000 0003000000000000 00000003 00000000 700006`},
	{"AER_RSP", &AERRsp{Tag: 10}, `42 00000000000000 000000000000000a`},
	{"TSK_MGMT", &TaskMgmt{Tag: 0x80000001, SolNot: NotifyOnFailure, LUN: lun3, Function: AbortTask, TaskTag: 0x0000010038000100}, `
		01 04 000000000000 0000000080000001 00000000 0003000000000000 0000 01 00 0000010038000100 0000000000000000`},
	{"CMD no data", &Command{Tag: 1, LUN: lun3, CDB: make([]byte, 16), TaskAttr: Ordered}, `
		02 00 000000 00 00 00 0000000000000001 00000000 0003000000000000 00 02 00 00 00000000000000000000000000000000`},
	{"CMD direct in", &Command{Tag: 1, LUN: lun3, CDB: []byte{0x28, 4: 1, 8: 8, 15: 0},
		In: Buffer{Format: Direct, Desc: Descriptor{0x7f0102030405, 0xdeadbeef, 4096}}}, `
		02 00 000000 01 00 00 0000000000000001 00000000 0003000000000000 00 00 00 00 28000000010000000800000000000000
		00007f0102030405 deadbeef 00001000`},
	{"CMD indirect out, long CDB", &Command{Tag: 1, SolNot: NotifyOnSuccess, CDB: cdb32,
		Out: Buffer{Format: Indirect, Desc: Descriptor{0x10, 0x20, 48}, Total: 0x600,
			List: []Descriptor{{1, 2, 0x200}, {3, 4, 0x200}}}}, `
		02 02 000000 20 02 00 0000000000000001 00000000 0000000000000000 00 00 00 10 7f00000000000018 aaaaaaaaaaaaaaaa
		aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
		0000000000000010 00000020 00000030 00000600
		0000000000000001 00000002 00000200 0000000000000003 00000004 00000200`},
	{"CMD both ways: data-out first", &Command{Tag: 1, CDB: make([]byte, 16),
		Out: Buffer{Format: Direct, Desc: Descriptor{1, 2, 3}},
		In:  Buffer{Format: Indirect, Desc: Descriptor{4, 5, 16}, Total: 6, List: []Descriptor{{4, 5, 6}}}}, `
		02 00 000000 12 00 01 0000000000000001 00000000 0000000000000000 00 00 00 00 00000000000000000000000000000000
		0000000000000001 00000002 00000003
		0000000000000004 00000005 00000010 00000006 0000000000000004 00000005 00000006`},
	{"CMD immediate", &Command{Tag: 1, CDB: make([]byte, 16), Out: Buffer{Format: Immediate, Total: 4096}}, `
		02 00 000000 30 00 00 0000000000000001 00000000 0000000000000000 00 00 00 00 00000000000000000000000000000000
		00001000`},
	{"RSP good with residual", &Response{Tag: 1, ReqLimDelta: 1, Flags: InUnderflow, InResidual: 0xff0}, `
		c1 00 0000 00000001 0000000000000001 0000 20 00 00000000 00000ff0 00000000 00000000`},
	{"RSP task management", &Response{Tag: 0x80000001, ReqLimDelta: 2, Flags: RspValid, Data: []byte{0, 0, 0, 5}}, `
		c1 00 0000 00000002 0000000080000001 0000 01 00 00000000 00000000 00000000 00000004 00000005`},
	{"RSP sense", &Response{Tag: 1, ReqLimDelta: 1, Flags: SenseValid | OutOverflow, Status: 2, OutResidual: 8, Sense: []byte{0x70, 0, 5}}, `
		c1 00 0000 00000001 0000000000000001 0000 06 02 00000008 00000000 00000003 00000000 700005`},
	{"RSP data and sense", &Response{Tag: 1, Flags: SenseValid | RspValid, Status: 2, Data: []byte{0, 0, 0, 0}, Sense: []byte{0x72}}, `
		c1 00 0000 00000000 0000000000000001 0000 03 02 00000000 00000000 00000001 00000004 00000000 72`},
}

func TestGolden(t *testing.T) {
	for _, g := range golden {
		t.Run(g.name, func(t *testing.T) {
			want := unhex(t, g.hex)
			got := bytes.Repeat([]byte{0xa5}, 512) // a dirty buffer: reserved bytes must be cleared
			n, err := g.u.Encode(got)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got[:n], want) {
				t.Errorf("encoded\n got %x\nwant %x", got[:n], want)
			}
			if _, err := g.u.Encode(make([]byte, len(want)-1)); !errors.Is(err, ErrNoRoom) {
				t.Errorf("encode into %d bytes: %v, want ErrNoRoom", len(want)-1, err)
			}
			back := reflect.New(reflect.TypeOf(g.u).Elem()).Interface().(unit)
			if err := back.Decode(want); err != nil {
				t.Fatalf("decode: %v", err)
			}
			again := make([]byte, 512)
			n, err = back.Encode(again)
			if err != nil || !bytes.Equal(again[:n], want) {
				t.Errorf("encode(decode(golden)) = %x, %v", again[:n], err)
			}
			for n := range want { // no truncated unit may pass
				if err := back.Decode(want[:n:n]); err == nil {
					t.Errorf("decode of the first %d of %d bytes succeeded", n, len(want))
				}
			}
		})
	}
}

func TestOpcodes(t *testing.T) {
	for _, g := range golden {
		want := unhex(t, g.hex)
		if strings.Contains(g.name, "RDMA/CM") {
			want[11] ^= 0x01
		} else {
			want[0] ^= 0x10
		}
		if err := g.u.Decode(want); !errors.Is(err, ErrOpcode) {
			t.Errorf("%s with another opcode: %v, want ErrOpcode", g.name, err)
		}
	}
}

// Lengths that a hostile or broken peer may claim.
func TestCommandLies(t *testing.T) {
	base := func(f func(b []byte)) []byte {
		b := unhex(t, golden[13].hex) // indirect, CDB of 32 bytes: descriptors at 64
		f(b)
		return b
	}
	for _, tc := range []struct {
		name string
		b    []byte
		want error
	}{
		{"255 descriptors in a short unit", base(func(b []byte) { b[6] = 255 }), ErrShort},
		{"table not whole descriptors", base(func(b []byte) { b[64+15] = 0x31 }), ErrFormat},
		{"table shorter than the list", base(func(b []byte) { b[64+15] = 0x10 }), ErrFormat},
		{"empty table", base(func(b []byte) { b[64+15] = 0; b[6] = 0 }), ErrFormat},
		{"additional CDB beyond the unit", base(func(b []byte) { b[31] = 0xfc }), ErrShort},
		{"reserved format", base(func(b []byte) { b[5] = 0x40 }), ErrFormat},
		{"immediate data-in", base(func(b []byte) { b[5] = 0x03 }), ErrFormat},
	} {
		var c Command
		if err := c.Decode(tc.b); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
		}
	}
}

// The sum of offset and length must not wrap: only bytes that were received are data.
func TestImmediateBounds(t *testing.T) {
	b := make([]byte, 100)
	c := Command{Tag: 1, CDB: make([]byte, 16), Out: Buffer{Format: Immediate}}
	const offset = 80
	for _, n := range []uint32{0, 1, 19, 20, 21, 0x7fffffff, 0xffffffb0, 0xffffffb1, 0xffffffff} {
		c.Out.Total = n
		if _, err := c.Encode(b); err != nil {
			t.Fatal(err)
		}
		var d Command
		if err := d.Decode(b); err != nil {
			t.Fatal(err)
		}
		data, err := d.ImmediateData(b, offset)
		if ok := n <= 20; ok != (err == nil) || ok && len(data) != int(n) {
			t.Errorf("length %#x: %d bytes, %v", n, len(data), err)
		}
	}
	c.Out.Total = 4
	if _, err := c.ImmediateData(b, 51); !errors.Is(err, ErrFormat) {
		t.Errorf("data inside the descriptor: %v", err)
	}
}

func TestTaskCode(t *testing.T) {
	for _, tc := range []struct {
		flags ResponseFlags
		data  []byte
		code  TaskCode
		ok    bool
	}{
		{RspValid, []byte{0, 0, 0, 0}, TaskComplete, true},
		{RspValid, []byte{0, 0, 0, 4}, TaskNotSupported, true},
		{0, nil, 0, false},                    // nothing said is not success
		{RspValid, []byte{0, 0, 0}, 0, false}, // nor is a short answer
	} {
		r := Response{Flags: tc.flags, Data: tc.data}
		if code, ok := r.TaskCode(); code != tc.code || ok != tc.ok {
			t.Errorf("%+v: %v %v", tc, code, ok)
		}
	}
	b := unhex(t, golden[17].hex)[:ResponseSize] // four bytes claimed, none there
	var r Response
	if err := r.Decode(b); !errors.Is(err, ErrShort) {
		t.Errorf("claimed response data: %v", err)
	}
	if r.ReqLimDelta != 2 {
		t.Error("the credit of a response with bad lengths got lost")
	}
}

func TestNoAllocation(t *testing.T) {
	var c Command
	var r Response
	cmd, rsp := unhex(t, golden[13].hex), unhex(t, golden[19].hex)
	out := make([]byte, 512)
	if err := c.Decode(cmd); err != nil { // the list grows once
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() {
		if c.Decode(cmd) != nil || r.Decode(rsp) != nil {
			t.Fatal("decode")
		}
		if _, err := c.Encode(out); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Encode(out); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations per command and response", n)
	}
}

// FuzzDecode: no input makes a decoder panic, and what a decoder accepts, it
// and the encoder agree about.
func FuzzDecode(f *testing.F) {
	for i, g := range golden {
		f.Add(uint8(i), unhex(f, g.hex), uint16(68))
	}
	f.Fuzz(func(t *testing.T, kind uint8, b []byte, offset uint16) {
		like := golden[int(kind)%len(golden)].u
		typ := reflect.TypeOf(like).Elem()
		u := reflect.New(typ).Interface().(unit)
		b = b[:len(b):len(b)] // what lies beyond the bytes received must not be there
		tag, _ := PeekTag(b)
		op, _ := PeekOpcode(b)
		if u.Decode(b) != nil {
			return
		}
		if _, cm := u.(*loginCM); !cm {
			if want := reflect.ValueOf(u).Elem().FieldByName("Tag").Uint(); tag != want {
				t.Fatalf("tag %#x, but %#x before decoding", want, tag)
			}
			if want := Opcode(unhex(t, golden[int(kind)%len(golden)].hex)[0]); op != want {
				t.Fatalf("%v decoded as a %v", op, want)
			}
		}
		switch u := u.(type) {
		case *Command:
			if d, err := u.ImmediateData(b, offset); err == nil && (len(d) != int(u.Out.Total) || len(d) > 0 && &d[0] != &b[offset]) {
				t.Fatal("immediate data that are not those announced")
			}
		case *Response:
			if code, ok := u.TaskCode(); ok && (u.Flags&RspValid == 0 || code != TaskCode(u.Data[3])) {
				t.Fatalf("task code %v of %+v", code, u)
			}
		}
		b1 := make([]byte, 2*len(b)+CommandSize)
		n1, err := u.Encode(b1)
		if err != nil {
			t.Fatalf("a decoded unit does not encode: %v", err)
		}
		v := reflect.New(typ).Interface().(unit)
		if err := v.Decode(b1[:n1]); err != nil {
			t.Fatalf("an encoded unit does not decode: %v", err)
		}
		if r, ok := u.(*Response); ok { // a flag with an empty field is not written
			r.Flags = r.Flags&^(RspValid|SenseValid) | v.(*Response).Flags&(RspValid|SenseValid)
		}
		if !reflect.DeepEqual(whole(v), whole(u)) {
			t.Fatalf("%+v became %+v", u, v)
		}
		b2 := make([]byte, len(b1))
		n2, err := v.Encode(b2)
		if err != nil || !bytes.Equal(b1[:n1], b2[:n2]) {
			t.Fatalf("not stable: %x, then %x (%v)", b1[:n1], b2[:n2], err)
		}
	})
}

// whole is u with its empty slices nil, and without the capacity of the others.
func whole(u unit) any {
	v := reflect.ValueOf(u).Elem()
	var tidy func(reflect.Value)
	tidy = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.Struct:
			for i := range v.NumField() {
				tidy(v.Field(i))
			}
		case reflect.Slice:
			if v.Len() == 0 {
				v.SetZero()
			}
		}
	}
	w := reflect.New(v.Type()).Elem()
	w.Set(v)
	tidy(w)
	return w.Interface()
}
