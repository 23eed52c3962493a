package softroce

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"srp-initiator/internal/require"
	"srp-initiator/rdma/verbs"
)

// icrc computes a RoCE v2 packet's ICRC from its IP header on by the book, byte by byte, and shares nothing with package packet.
func icrc(t *testing.T, ip []byte) (got, want uint32) {
	t.Helper()
	b := append(bytes.Repeat([]byte{0xff}, 8), ip...)
	h := b[8:]
	switch h[0] >> 4 {
	case 4:
		if int(binary.BigEndian.Uint16(h[2:])) != len(ip) {
			t.Fatalf("IPv4 total length %d of %d bytes", binary.BigEndian.Uint16(h[2:]), len(ip))
		}
		var sum uint32
		for i := 0; i < 20; i += 2 {
			sum += uint32(binary.BigEndian.Uint16(h[i:]))
		}
		if sum%0xffff != 0 {
			t.Fatalf("IPv4 header checksum does not add up")
		}
		h[1], h[8], h[10], h[11] = 0xff, 0xff, 0xff, 0xff
		h = h[20:]
	case 6:
		if int(binary.BigEndian.Uint16(h[4:]))+40 != len(ip) {
			t.Fatalf("IPv6 payload length %d of %d bytes", binary.BigEndian.Uint16(h[4:]), len(ip))
		}
		h[0], h[1], h[2], h[3], h[7] = 0x6f, 0xff, 0xff, 0xff, 0xff
		h = h[40:]
	default:
		t.Fatalf("IP version %d", h[0]>>4)
	}
	if int(binary.BigEndian.Uint16(h[4:])) != len(h) || binary.BigEndian.Uint16(h[2:]) != 4791 {
		t.Fatalf("UDP header % x", h[:8])
	}
	h[6], h[7], h[8+4] = 0xff, 0xff, 0xff
	end := len(b) - 4
	return binary.LittleEndian.Uint32(b[end:]), crc32.ChecksumIEEE(b[:end])
}

// packets are the IP packets of a pcapng file.
func packets(t *testing.T, b []byte) (ps [][]byte) {
	t.Helper()
	for len(b) > 0 {
		n := binary.LittleEndian.Uint32(b[4:])
		if n%4 != 0 || int(n) > len(b) || binary.LittleEndian.Uint32(b[n-4:]) != n {
			t.Fatalf("block of %d bytes in %d", n, len(b))
		}
		if binary.LittleEndian.Uint32(b) == blockPacket {
			k := binary.LittleEndian.Uint32(b[20:])
			ps = append(ps, b[28:28+k])
		}
		b = b[n:]
	}
	return ps
}

func TestCapture(t *testing.T) {
	for _, c := range []struct {
		name string
		addr []netip.Addr
		opts []Option
	}{
		{"IPv4", make([]netip.Addr, 2), nil}, {"IPv4 without offload", make([]netip.Addr, 2), []Option{WithoutOffload()}},
		{"IPv6", []netip.Addr{netip.IPv6Loopback()}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "a.pcapng")
			f, err := os.Create(path)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			var ds [2]*Device
			for i := range ds {
				if i == len(c.addr) {
					ds[i] = ds[0] // ::1 is the only one of its kind
					break
				}
				opts := c.opts
				if i == 0 {
					opts = append([]Option{WithCapture(f)}, opts...)
				}
				if ds[i], err = Open(c.addr[i], opts...); err != nil {
					if c.addr[i].Is6() {
						require.Missing(t, "IPv6 loopback: "+err.Error())
					}
					t.Fatal(err)
				}
				defer ds[i].Close()
			}
			t.Run("traffic", func(t *testing.T) {
				a, b := newEnd(t, ds[0], true), newEnd(t, ds[1], true)
				connect(t, a, b)
				for _, n := range []int{0, 1, 2, 3, 4096, 4097, 70000} {
					b.recv(t, 1, 1<<20, 1<<20)
					remote := verbs.SendWorkRequest{RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey(), SGList: a.sge(0, n)}
					w, r := remote, remote
					w.Opcode, r.Opcode = verbs.OpRDMAWrite, verbs.OpRDMARead
					a.send(t, w, r, verbs.SendWorkRequest{Opcode: verbs.OpSend, SGList: a.sge(0, n)})
					a.poll(t, 3)
					b.poll(t, 1)
				}
				if err := a.conn.Disconnect(); err != nil {
					t.Fatal(err)
				}
				<-a.conn.Done()
				quiet(t, a, b)
			})
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			ps := packets(t, b)
			if s := ds[0].Stats(); uint64(len(ps)) != s.PacketsSent+s.PacketsReceived {
				t.Errorf("%d packets captured, %d sent and %d received", len(ps), s.PacketsSent, s.PacketsReceived)
			}
			for i, p := range ps {
				if got, want := icrc(t, p); got != want {
					t.Fatalf("packet %d: ICRC %08x, want %08x", i+1, got, want)
				}
			}
			dissect(t, path, len(ps))
		})
	}
}

// dissect lets tshark, which knows nothing of this program, read a capture.
func dissect(t *testing.T, path string, n int) {
	t.Helper()
	out, err := exec.Command(require.Program(t, "tshark"), "-r", path,
		"--disable-protocol", "rpcordma", // which guesses that our payloads are its own
		"-o", "udp.check_checksum:TRUE", "-o", "ip.check_checksum:TRUE", "-T", "fields", "-e", "infiniband.bth.opcode", "-e", "infiniband.cm.req", "-e", "_ws.malformed", "-e", "_ws.expert.severity", "-e", "_ws.col.Info").Output()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	lines := strings.Split(strings.TrimRight(string(out), "\n"), "\n")
	for _, l := range lines {
		f := strings.Split(l, "\t")
		if len(f) != 5 || f[0] == "" || f[2] != "" || f[3] != "" {
			t.Fatalf("tshark says %q", l)
		}
		seen[f[0]]++
		if strings.Contains(f[4], "CM: ") {
			seen[f[4]]++
		}
	}
	if len(lines) != n {
		t.Fatalf("tshark sees %d packets of %d", len(lines), n)
	}
	for _, op := range []int{0x00, 0x01, 0x02, 0x04, 0x06, 0x07, 0x08, 0x0a, 0x0c, 0x0d, 0x0e, 0x0f, 0x10, 0x11, 0x64} {
		if seen[fmt.Sprint(op)] == 0 {
			t.Errorf("tshark sees no packet of opcode 0x%02x: %v", op, seen)
		}
	}
	for _, m := range []string{"ConnectRequest", "ConnectReply", "ReadyToUse", "DisconnectRequest", "DisconnectReply"} {
		found := false
		for s := range seen {
			found = found || strings.Contains(s, m)
		}
		if !found {
			t.Errorf("tshark sees no %s: %v", m, seen)
		}
	}
}
