package packet

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"math/rand/v2"
	"net/netip"
	"testing"
)

// referenceICRC computes the ICRC of a packet the long way: the masked headers are laid out in full.
func referenceICRC(src, dst netip.AddrPort, id uint16, b []byte) uint32 {
	in := []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	n := len(b) + 8
	if dst.Addr().Is6() {
		in = append(in, 0x6f, 0xff, 0xff, 0xff, byte(n>>8), byte(n), 17, 0xff)
	} else {
		t := n + 20
		in = append(in, 0x45, 0xff, byte(t>>8), byte(t), byte(id>>8), byte(id), 0x40, 0, 0xff, 17, 0xff, 0xff)
	}
	in = append(in, src.Addr().AsSlice()...)
	in = append(in, dst.Addr().AsSlice()...)
	in = binary.BigEndian.AppendUint16(in, src.Port())
	in = binary.BigEndian.AppendUint16(in, dst.Port())
	in = append(in, byte(n>>8), byte(n), 0xff, 0xff)
	at := len(in)
	in = append(in, b[:len(b)-4]...)
	in[at+4] = 0xff
	return crc32.ChecksumIEEE(in)
}

var (
	v4a = netip.MustParseAddrPort("192.0.2.1:49365")
	v4b = netip.MustParseAddrPort("192.0.2.77:4791")
	v6a = netip.MustParseAddrPort("[2001:db8::1]:65535")
	v6b = netip.MustParseAddrPort("[fe80::1234:5678:9abc:def0]:4791")
)

func TestICRCAgainstLaidOutHeaders(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, ep := range [][2]netip.AddrPort{{v4a, v4b}, {v6a, v6b}} {
		f := NewFlow(ep[0], ep[1])
		for range 2000 {
			b := make([]byte, 16+4*r.IntN(1032))
			for i := range b {
				b[i] = byte(r.Uint32())
			}
			id := uint16(r.Uint32())
			f.Seal(b, id)
			if got, want := binary.LittleEndian.Uint32(b[len(b)-4:]), referenceICRC(ep[0], ep[1], id, b); got != want {
				t.Fatalf("%v, %d bytes, id %#x: ICRC %#08x, want %#08x", ep, len(b), id, got, want)
			}
			// The identification is found from any hint.
			gotID, ok := f.Verify(b, uint16(r.Uint32()))
			if f.IsIPv6() {
				id = 0
			}
			if !ok || gotID != id {
				t.Fatalf("%v: Verify = %#x, %v, want %#x", ep, gotID, ok, id)
			}
			// Gathered in pieces it is the same.
			if len(b) >= 48 {
				pad := uint8(r.IntN(4))
				for i := range pad {
					b[len(b)-5-int(i)] = 0
				}
				f.Seal(b, id)
				pay := b[28 : len(b)-4-int(pad)]
				cut := r.IntN(len(pay) + 1)
				var tail [TrailerMax]byte
				n := f.Begin(len(b), id).Header(b[:28]).Data(pay[:cut]).Data(pay[cut:]).Finish(tail[:], pad)
				if string(tail[:n]) != string(b[len(b)-n:]) {
					t.Fatalf("gathered: %x, want %x", tail[:n], b[len(b)-n:])
				}
			}
		}
	}
}

// A damaged packet is refused: always over IPv6 for short bursts, and over IPv4 but for one in 2^16.
func TestVerifyRefusesDamage(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for _, ep := range [][2]netip.AddrPort{{v4a, v4b}, {v6a, v6b}} {
		f := NewFlow(ep[0], ep[1])
		passed := 0
		const rounds = 30000
		for range rounds {
			b := make([]byte, 16+4*r.IntN(60))
			for i := range b {
				b[i] = byte(r.Uint32())
			}
			f.Seal(b, 7)
			was := bytes.Clone(b)
			b[r.IntN(len(b))] ^= byte(r.Uint32())
			b[r.IntN(len(b))] ^= byte(r.Uint32())
			if was[4] = b[4]; bytes.Equal(was, b) { // byte 4 is not covered
				continue
			}
			if id, ok := f.Verify(b, 7); ok {
				if id == 7 && !f.IsIPv6() && binary.LittleEndian.Uint32(b[len(b)-4:]) != referenceICRC(ep[0], ep[1], 7, b) {
					t.Fatal("accepted with a wrong ICRC under the hinted identification")
				}
				if id != 7 || f.IsIPv6() {
					passed++
				}
			}
		}
		limit := 8 // 30000/65536 expected
		if f.IsIPv6() {
			limit = 0
		}
		if passed > limit {
			t.Errorf("%v: %d of %d damaged packets accepted", ep, passed, rounds)
		}
	}
}

func TestSeedRegister(t *testing.T) {
	r := ^uint32(0)
	for range 8 {
		r = r>>8 ^ slice4[0][uint8(r)^0xff]
	}
	if r != 0xdebb20e3 { // rxe_icrc.c
		t.Fatalf("register after 8 bytes 0xff is %#08x", r)
	}
}

func TestPSN(t *testing.T) {
	for _, c := range []struct {
		p, q PSN
		d    int
	}{{0, 0, 0}, {0, 0xffffff, 1}, {0xffffff, 0, -1}, {5, 0xfffffe, 7}, {0x7fffff, 0, 0x7fffff}, {0x800000, 0, -0x800000}, {0x123456, 0x123400, 0x56}} {
		if d := c.p.Sub(c.q); d != c.d {
			t.Errorf("%#x - %#x = %d, want %d", c.p, c.q, d, c.d)
		}
		if c.q.Add(c.d) != c.p {
			t.Errorf("%#x + %d = %#x, want %#x", c.q, c.d, c.q.Add(c.d), c.p)
		}
	}
	if !PSN(0xfffff0).Before(3) || PSN(3).Before(0xfffff0) {
		t.Error("order at the wrap is wrong")
	}
}

func BenchmarkSeal(b *testing.B) {
	f := NewFlow(v4a, v4b)
	hdr, pay := make([]byte, 28), make([]byte, 4096)
	var tail [TrailerMax]byte
	b.SetBytes(4096)
	for i := range b.N {
		f.Begin(28+4096+4, uint16(i)).Header(hdr).Data(pay).Finish(tail[:], 0)
	}
}

func BenchmarkVerify(b *testing.B) {
	f := NewFlow(v4a, v4b)
	pkt := make([]byte, 28+4096+4)
	f.Seal(pkt, 9)
	for _, c := range []struct {
		name string
		hint uint16
	}{{"Hinted", 9}, {"Computed", 0}} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(4096)
			for range b.N {
				if id, ok := f.Verify(pkt, c.hint); !ok || id != 9 {
					b.Fatal(id, ok)
				}
			}
		})
	}
}

func BenchmarkSealAck(b *testing.B) {
	f := NewFlow(v4a, v4b)
	hdr := make([]byte, 16)
	var tail [TrailerMax]byte
	for i := range b.N {
		f.Begin(20, uint16(i)).Header(hdr).Finish(tail[:], 0)
	}
}
