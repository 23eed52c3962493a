package packet

import (
	"bytes"
	"errors"
	"testing"
)

func TestParse(t *testing.T) {
	for _, b := range buildAll() {
		o := Opcode(b[0])
		var p Packet
		if err := p.Parse(b); err != nil {
			t.Fatalf("%v: %v", o, err)
		}
		if p.DestQPN != 0x010000+uint32(o) || p.PSN != MakePSN(0xffff00+uint32(o)*3) || p.PKey != DefaultPKey || p.Opcode != o {
			t.Errorf("%v: %+v", o, p)
		}
		if len(p.Payload)+int(p.Pad)+o.HeaderLen()+ICRCLen != len(b) {
			t.Errorf("%v: payload of %d in %d", o, len(p.Payload), len(b))
		}
		k := o.Kind()
		if k&kindRETH != 0 {
			if h := p.RETH(); o != Flush && o != AtomicWrite && h.RKey != 0x11223300+uint32(o) {
				t.Errorf("%v: %+v", o, h)
			}
		}
		if p.HasAETH() && p.AETH().MSN != 0xfedc00+uint32(o) {
			t.Errorf("%v: %+v", o, p.AETH())
		}
		if k&KindUD != 0 && p.DETH() != (DETH{0x80010000, 0xabcd00 + uint32(o)}) {
			t.Errorf("%v: %+v", o, p.DETH())
		}
		if k&(KindImm|KindInv) != 0 && p.Imm() != 0x5566aa00+uint32(o) {
			t.Errorf("%v: %x", o, p.Imm())
		}
		// Cut short anywhere inside the headers it is refused.
		for n := 0; n < o.HeaderLen()+ICRCLen; n++ {
			if err := p.Parse(b[:n]); err == nil {
				t.Errorf("%v: %d bytes accepted", o, n)
			}
		}
	}
}

func TestParseRefuses(t *testing.T) {
	ok := make([]byte, 20)
	h := BTH{Opcode: SendOnly, Pad: 0, PKey: DefaultPKey, DestQPN: 3}
	h.Put(ok)
	for _, c := range []struct {
		name   string
		change func(b []byte) []byte
		want   error
	}{
		{"nothing", func(b []byte) []byte { return nil }, ErrShort},
		{"15 bytes", func(b []byte) []byte { return b[:15] }, ErrShort},
		{"RETH missing", func(b []byte) []byte { b[0] = byte(WriteOnly); return b }, ErrShort},
		{"too long", func(b []byte) []byte { return append(b, make([]byte, Max)...) }, ErrLong},
		{"payload beyond MTU 4096", func(b []byte) []byte { return append(b, make([]byte, 4096)...) }, ErrLong},
		{"opcode 0x15", func(b []byte) []byte { b[0] = 0x15; return b }, ErrOpcode},
		{"UC SEND", func(b []byte) []byte { b[0] = 0x24; return b }, ErrOpcode},
		{"CNP", func(b []byte) []byte { b[0] = 0x81; return b }, ErrOpcode},
		{"TVer", func(b []byte) []byte { b[1] |= 1; return b }, ErrVersion},
		{"pad without payload", func(b []byte) []byte { b[1] |= 0x30; return b[:16] }, ErrPad},
		{"length not of 4", func(b []byte) []byte { return b[:19] }, ErrPad},
	} {
		var p Packet
		if err := p.Parse(c.change(bytes.Clone(ok))); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	// What a receiver must not mind: MigReq, FECN, BECN, reserved bits.
	b := bytes.Clone(ok)
	b[1] ^= 0x40
	b[4] = 0xff
	b[8] |= 0x7f
	var p Packet
	if err := p.Parse(b); err != nil || p.DestQPN != 3 || len(p.Payload) != 4 {
		t.Errorf("%v, %+v", err, p)
	}
}

func FuzzParse(f *testing.F) {
	for _, b := range buildAll() {
		f.Add(b)
	}
	v4, v6 := NewFlow(v4a, v4b), NewFlow(v6a, v6b)
	f.Fuzz(func(t *testing.T, b []byte) {
		was := bytes.Clone(b)
		for _, fl := range []Flow{v4, v6} {
			if id, ok := fl.Verify(b, 3); ok {
				c := bytes.Clone(b)
				fl.Seal(c, id)
				if !bytes.Equal(b, c) {
					t.Fatalf("verified under identification %#x, which seals it otherwise", id)
				}
			}
		}
		var p Packet
		err := p.Parse(b)
		if !bytes.Equal(was, b) {
			t.Fatal("input changed")
		}
		if err != nil {
			return
		}
		if len(p.Payload) > PayloadMax || len(p.Payload)+int(p.Pad)+p.Opcode.HeaderLen()+ICRCLen != len(b) {
			t.Fatalf("payload of %d in %d bytes", len(p.Payload), len(b))
		}
		// Every accessor that the kind allows reads inside the packet, and rebuilding from the fields gives the header back.
		hdr := make([]byte, p.Opcode.HeaderLen())
		h := BTH{p.Opcode, p.Pad, p.Solicited, p.AckReq, p.PKey, p.DestQPN, p.PSN}
		h.Put(hdr)
		at := BTHLen
		if p.Kind&KindUD != 0 {
			d := p.DETH()
			d.Put(hdr[at:])
			at += DETHLen
			b[at-4] = 0 // reserved
		}
		if p.Kind&kindRETH != 0 {
			r := p.RETH()
			if p.Opcode == Flush {
				copy(hdr[at:], b[at:at+4])
				at += 4
			}
			r.Put(hdr[at:])
			at += RETHLen
		}
		if p.Kind&kindAETH != 0 {
			a := p.AETH()
			a.Put(hdr[at:])
			at += AETHLen
		}
		if p.Kind&(KindImm|KindInv) != 0 {
			PutImm(hdr[at:], p.Imm())
			at += ImmLen
		}
		copy(hdr[at:], b[at:])
		b[1] |= bthMigReq
		b[4] = 0
		b[8] &= bthAckReq
		if !bytes.Equal(hdr, b[:len(hdr)]) {
			t.Fatalf("%v rebuilt:\n% x\n% x", p.Opcode, hdr, b[:len(hdr)])
		}
	})
}
