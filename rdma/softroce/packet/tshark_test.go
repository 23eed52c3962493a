package packet

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// buildAll is one packet of each opcode that this stack can send or must understand, each with other field values.
func buildAll() [][]byte {
	var out [][]byte
	for op := range 256 {
		o := Opcode(op)
		k := o.Kind()
		if k == 0 {
			continue
		}
		n := (op*37)%300 + 1
		switch {
		case k&(KindAck|KindRead) != 0 || o == Flush || o == CompareSwap || o == FetchAdd:
			n = 0
		case o == AtomicWrite:
			n = 8
		}
		b := make([]byte, o.HeaderLen(), Max)
		h := BTH{Opcode: o, Pad: Pad(n), Solicited: k&KindLast != 0 && k&KindSend != 0, AckReq: k&KindLast != 0 && k&KindRequest != 0,
			PKey: DefaultPKey, DestQPN: 0x010000 + uint32(op), PSN: MakePSN(0xffff00 + uint32(op)*3)}
		h.Put(b)
		at := BTHLen
		if o == Flush {
			at += 4
		}
		if k&KindUD != 0 {
			d := DETH{QKey: 0x80010000, SrcQPN: 0xabcd00 + uint32(op)}
			d.Put(b[at:])
			at += DETHLen
		}
		if k&kindRETH != 0 {
			r := RETH{Addr: 0x7f0012340000 + uint64(op), RKey: 0x11223300 + uint32(op), Length: uint32(n)}
			r.Put(b[at:])
			at += RETHLen
		}
		if k&kindAETH != 0 {
			a := AETH{Syndrome: SyndromeAck, MSN: 0xfedc00 + uint32(op)}
			if o == Acknowledge {
				a.Syndrome = NakRemoteAccess
			}
			a.Put(b[at:])
			at += AETHLen
		}
		if k&(KindImm|KindInv) != 0 {
			PutImm(b[at:], 0x5566aa00+uint32(op))
		}
		for i := range n + int(h.Pad) + ICRCLen {
			c := byte(0)
			if i < n {
				c = byte(i*13 + op)
			}
			b = append(b, c)
		}
		out = append(out, b)
	}
	return out
}

// ipPacket puts a RoCE packet into UDP and IP.
func ipPacket(src, dst netip.AddrPort, id uint16, b []byte) []byte {
	n := len(b) + 8
	var p []byte
	if dst.Addr().Is6() {
		p = append(p, 0x60, 0, 0, 0, byte(n>>8), byte(n), 17, 64)
	} else {
		t := n + 20
		p = append(p, 0x45, 0, byte(t>>8), byte(t), byte(id>>8), byte(id), 0x40, 0, 64, 17, 0, 0)
	}
	p = append(p, src.Addr().AsSlice()...)
	p = append(p, dst.Addr().AsSlice()...)
	if dst.Addr().Is4() {
		var s uint32
		for i := 0; i < 20; i += 2 {
			s += uint32(p[i])<<8 | uint32(p[i+1])
		}
		s = s&0xffff + s>>16
		s = s&0xffff + s>>16
		binary.BigEndian.PutUint16(p[10:], ^uint16(s))
	}
	p = binary.BigEndian.AppendUint16(p, src.Port())
	p = binary.BigEndian.AppendUint16(p, dst.Port())
	p = append(p, byte(n>>8), byte(n), 0, 0)
	p = append(p, b...)
	if dst.Addr().Is6() { // over IPv6 tshark objects to a UDP checksum of 0
		s := uint32(17 + n)
		for i := 8; i < len(p); i += 2 {
			s += uint32(p[i]) << 8
			if i+1 < len(p) {
				s += uint32(p[i+1])
			}
		}
		for s > 0xffff {
			s = s&0xffff + s>>16
		}
		binary.BigEndian.PutUint16(p[46:], ^uint16(s))
	}
	return p
}

// tshark dissects what this package writes: every field where it belongs, nothing malformed.
func TestTshark(t *testing.T) {
	bin, err := exec.LookPath("tshark")
	if err != nil {
		if os.Getenv("REQUIRE_ALL") == "1" {
			t.Fatal("tshark is not installed (Debian package tshark)")
		}
		t.Skip("tshark is not installed (Debian package tshark)")
	}
	pcap := binary.LittleEndian.AppendUint32(nil, 0xa1b2c3d4)
	pcap = append(pcap, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 101, 0, 0, 0) // LINKTYPE_RAW
	var all []Packet
	var crcs []uint32
	for i, ep := range [][2]netip.AddrPort{{v4a, v4b}, {v6a, v6b}} {
		f := NewFlow(ep[0], ep[1])
		for j, b := range buildAll() {
			id := uint16(i*1000 + j)
			f.Seal(b, id)
			var p Packet
			if err := p.Parse(b); err != nil {
				t.Fatalf("%v: %v", Opcode(b[0]), err)
			}
			all = append(all, p)
			crcs = append(crcs, binary.BigEndian.Uint32(b[len(b)-4:]))
			q := ipPacket(ep[0], ep[1], id, b)
			pcap = append(pcap, make([]byte, 8)...)
			pcap = binary.LittleEndian.AppendUint32(pcap, uint32(len(q)))
			pcap = binary.LittleEndian.AppendUint32(pcap, uint32(len(q)))
			pcap = append(pcap, q...)
		}
	}
	file := filepath.Join(t.TempDir(), "all.pcap")
	if err := os.WriteFile(file, pcap, 0o644); err != nil {
		t.Fatal(err)
	}
	fields := []string{"bth.opcode", "bth.se", "bth.m", "bth.padcnt", "bth.tver", "bth.p_key", "bth.destqp", "bth.a", "bth.psn",
		"reth.va", "reth.r_key", "reth.dmalen", "aeth.syndrome", "aeth.msn", "deth.q_key", "deth.srcqp", "immdt", "ieth", "invariant.crc"}
	args := []string{"-r", file, "-T", "fields", "-E", "separator=,", "-E", "occurrence=f", "-e", "_ws.malformed", "-e", "_ws.expert.severity"}
	for _, f := range fields {
		args = append(args, "-e", "infiniband."+f)
	}
	cmd := exec.Command(bin, args...)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v", cmd, err)
	}
	lines := strings.Split(strings.TrimRight(string(out), "\n"), "\n")
	if len(lines) != len(all) {
		t.Fatalf("tshark saw %d packets of %d", len(lines), len(all))
	}
	bit := func(b bool) string {
		if b {
			return "1"
		}
		return "0"
	}
	for i, p := range all {
		got := strings.Split(lines[i], ",")
		if p.Opcode == Flush || p.Opcode == AtomicWrite {
			continue // newer than this tshark
		}
		if p.Opcode == CompareSwap || p.Opcode == FetchAdd {
			got[11], got[12] = "", "" // AtomicETH's, under the same names
		}
		want := []string{"", "", fmt.Sprint(int(p.Opcode)), bit(p.Solicited), "1", fmt.Sprint(p.Pad), "0", fmt.Sprint(p.PKey), fmt.Sprintf("0x%06x", p.DestQPN), bit(p.AckReq), fmt.Sprint(uint32(p.PSN)),
			"", "", "", "", "", "", "", "", "", fmt.Sprintf("0x%08x", crcs[i])}
		if p.Kind&kindRETH != 0 {
			r := p.RETH()
			want[11], want[12], want[13] = fmt.Sprintf("0x%016x", r.Addr), fmt.Sprintf("0x%08x", r.RKey), fmt.Sprint(r.Length)
		}
		if p.Kind&kindAETH != 0 {
			a := p.AETH()
			want[14], want[15] = fmt.Sprint(uint8(a.Syndrome)), fmt.Sprint(a.MSN)
		}
		if p.Kind&KindUD != 0 {
			d := p.DETH()
			want[16], want[17] = fmt.Sprintf("0x%016x", d.QKey), fmt.Sprintf("0x%08x", d.SrcQPN)
		}
		if p.Kind&KindImm != 0 {
			want[18] = fmt.Sprintf("%08x", p.Imm())
		}
		if p.Kind&KindInv != 0 {
			want[19] = fmt.Sprintf("%08x", p.Imm())
		}
		if got, want := strings.Join(got, ","), strings.Join(want, ","); got != want {
			t.Errorf("%v\n%s\n%s", p.Opcode, got, want)
		}
	}
}
