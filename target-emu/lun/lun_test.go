package lun

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"srp-initiator/srp/scsi"
)

// initiator runs commands through the device server as a transport does.
type initiator struct {
	t    testing.TB
	m    *Map
	n    *Nexus
	task Task
}

type result struct {
	status scsi.Status
	sense  scsi.Sense
	in     []byte
}

func newUnit(t testing.TB, spec string, cfg Config) *Unit {
	t.Helper()
	sp, err := ParseSpec(spec)
	if err != nil {
		t.Fatal(err)
	}
	st, err := OpenStore(sp)
	if err != nil {
		t.Fatal(err)
	}
	cfg.BlockSize = sp.BlockSize
	u, err := New(st, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { u.Close() })
	return u
}

func newMap(t testing.TB, u *Unit) *Map {
	m := &Map{}
	if err := m.Add(0, u); err != nil {
		t.Fatal(err)
	}
	return m
}

func attach(t testing.TB, m *Map, port byte) *initiator {
	i := &initiator{t: t, m: m}
	if u := m.Find(0); u != nil {
		i.n = u.Attach([16]byte{15: port})
	}
	i.task.Scratch = make([]byte, ScratchLen)
	return i
}

// do executes cdb with data-out out, moving streamed data in chunks of two blocks.
func (i *initiator) do(cdb scsi.CDB, out []byte) result {
	i.t.Helper()
	t := &i.task
	t.CDB = cdb.Bytes()
	i.m.Begin(t, i.n)
	var in []byte
	const chunk = 8192
	switch t.Way {
	case WayIn:
		in = append(in, t.Scratch[:t.InLen]...)
		t.SetStatus(scsi.StatusGood)
	case WayRead:
		in = make([]byte, t.InLen)
		for at := 0; at < len(in); at += chunk {
			if !t.ReadChunk(in[at:min(len(in), at+chunk)], int64(at)) {
				break
			}
		}
		t.FinishStream()
	case WayWrite, WayVerify:
		if int64(len(out)) != t.OutLen {
			i.t.Fatalf("%s: wants %d bytes of data-out, the test has %d", cdb, t.OutLen, len(out))
		}
		for at := 0; at < len(out); at += chunk {
			if !t.WriteChunk(out[at:min(len(out), at+chunk)], int64(at)) {
				break
			}
		}
		t.FinishStream()
	case WayWhole:
		if int64(len(out)) < t.OutLen {
			i.t.Fatalf("%s: wants %d bytes of data-out, the test has %d", cdb, t.OutLen, len(out))
		}
		t.FinishOut(out[:t.OutLen])
	}
	if t.Way == WayWork {
		t.Finish()
	}
	if !t.Done {
		i.t.Fatalf("%s: not done", cdb)
	}
	r := result{status: t.Status, in: in}
	if t.Status == scsi.StatusCheckCondition {
		var ok bool
		if r.sense, ok = scsi.ParseSense(t.Sense()); !ok {
			i.t.Fatalf("%s: unreadable sense % x", cdb, t.Sense())
		}
		r.in = nil
	}
	t.End()
	return r
}

func (i *initiator) good(cdb scsi.CDB, out []byte) []byte {
	i.t.Helper()
	r := i.do(cdb, out)
	if r.status != scsi.StatusGood {
		i.t.Fatalf("%s: %s, %s", cdb, r.status, r.sense)
	}
	return r.in
}

func (i *initiator) check(cdb scsi.CDB, out []byte, key scsi.SenseKey, asc scsi.ASC) scsi.Sense {
	i.t.Helper()
	r := i.do(cdb, out)
	if r.status != scsi.StatusCheckCondition || r.sense.Key != key || r.sense.ASC != asc {
		i.t.Fatalf("%s: %s, %s; want %s, %s", cdb, r.status, r.sense, key, asc)
	}
	return r.sense
}

func (i *initiator) conflict(cdb scsi.CDB, out []byte) {
	i.t.Helper()
	if r := i.do(cdb, out); r.status != scsi.StatusReservationConflict {
		i.t.Fatalf("%s: %s, %s; want RESERVATION CONFLICT", cdb, r.status, r.sense)
	}
}

func TestSpec(t *testing.T) {
	for _, s := range []string{"ram:1m", "null:4t", "file:/x,ro,bs=4096", "ram:64MiB,bs=4k,serial=abc,product=thing", "file:/x,size=1g"} {
		if _, err := ParseSpec(s); err != nil {
			t.Errorf("%s: %v", s, err)
		}
	}
	for _, s := range []string{"", "ram", "ram:", "ram:0", "ram:-1", "ram:1x", "tape:1m", "file:", "ram:1m,bs=1024", "ram:1m,rw", "ram:256", "ram:9999999t", "ram:1m,size=2m", "ram:2k,bs=4096", "ram:513", "null:1000", "ram:6k,bs=4096", "file:/x,size=1000", "ram:1m,serial=", "ram:1m,product=", "ram:1m,ro=0", "ram:1m,ro=1"} {
		if _, err := ParseSpec(s); err == nil {
			t.Errorf("%q was accepted", s)
		} else if strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v", s, err)
		}
	}
	for s, want := range map[string]int64{"1": 1, "512": 512, "1k": 1024, "3M": 3 << 20, "2gib": 2 << 30, "1tb": 1 << 40} {
		if n, err := ParseSize(s); err != nil || n != want {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", s, n, err, want)
		}
	}
}

func TestReadWriteEveryForm(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk")
	for _, spec := range []string{"ram:1m", "ram:1m,bs=4096", "file:" + path + ",size=1m"} {
		t.Run(spec[:4], func(t *testing.T) {
			u := newUnit(t, spec, Config{})
			i := attach(t, newMap(t, u), 1)
			bs := int(u.BlockSize())
			rnd := rand.New(rand.NewPCG(1, 2))
			want := make([]byte, 1<<20)
			for _, w := range []func(lba uint32, n int) scsi.CDB{
				func(l uint32, n int) scsi.CDB { return scsi.Write6(l, uint16(n)) },
				func(l uint32, n int) scsi.CDB { return scsi.Write10(l, uint16(n)) },
				func(l uint32, n int) scsi.CDB { return scsi.Write12(l, uint32(n)) },
				func(l uint32, n int) scsi.CDB { return scsi.Write16(uint64(l), uint32(n)) },
				func(l uint32, n int) scsi.CDB { return scsi.WriteCDB(uint64(l), uint32(n), true) },
			} {
				for range 10 {
					n := 1 + rnd.IntN(60)
					lba := rnd.IntN(int(u.Blocks()) - n)
					data := make([]byte, n*bs)
					for j := range data {
						data[j] = byte(rnd.Uint32())
					}
					copy(want[lba*bs:], data)
					i.good(w(uint32(lba), n), data)
				}
			}
			for _, r := range []scsi.CDB{scsi.Read10(0, uint16(u.Blocks())), scsi.Read12(0, uint32(u.Blocks())), scsi.Read16(0, uint32(u.Blocks()))} {
				if !bytes.Equal(i.good(r, nil), want) {
					t.Fatalf("%s: the disk differs from what was written", r)
				}
			}
			last := uint64(u.Blocks() - 1)
			if got := i.good(scsi.Read16(last, 1), nil); !bytes.Equal(got, want[int(last)*bs:]) {
				t.Error("the last block differs")
			}
			if s := i.check(scsi.Read16(last+1, 1), nil, scsi.IllegalRequest, scsi.ASCLBAOutOfRange); s.Information != last+1 {
				t.Errorf("information %d, want the first missing block %d", s.Information, last+1)
			}
			i.check(scsi.Read16(last, 2), nil, scsi.IllegalRequest, scsi.ASCLBAOutOfRange)
			i.check(scsi.Write16(1<<64-1, 1), nil, scsi.IllegalRequest, scsi.ASCLBAOutOfRange)
			i.check(scsi.Read16(1<<64-1, 1<<32-1), nil, scsi.IllegalRequest, scsi.ASCLBAOutOfRange)
			i.good(scsi.Read10(0, 0), nil)
			i.good(scsi.Write16(uint64(u.Blocks()), 0), nil)
			i.good(scsi.SynchronizeCache10(0, 0), nil)
			i.good(scsi.SynchronizeCache16(5, 10), nil)
			if len(i.good(scsi.Read6(0, 256), nil)) != 256*bs {
				t.Error("READ(6) with 0 does not mean 256 blocks")
			}
		})
	}
}

func TestReadOnlyAndSoftwareProtect(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(path, make([]byte, 65536), 0o600); err != nil {
		t.Fatal(err)
	}
	u := newUnit(t, "file:"+path+",ro", Config{})
	i := attach(t, newMap(t, u), 1)
	for _, c := range []scsi.CDB{scsi.Write10(0, 1), scsi.WriteSame16(0, 1, false, true), scsi.Unmap(false, 24), scsi.CompareAndWrite(0, 1)} {
		i.check(c, nil, scsi.DataProtect, scsi.ASCWriteProtected)
	}
	m, err := scsi.ParseMode(i.good(scsi.ModeSense6(scsi.AllModePages, 255), nil), false, false)
	if err != nil || m.Header.DeviceSpecific&scsi.ModeWriteProtected == 0 || m.Blocks != 128 || m.BlockSize != 512 || len(m.Pages) != len(modePages) {
		t.Errorf("MODE SENSE: %+v, %v", m, err)
	}
}

func TestModeSelect(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk")
	u := newUnit(t, "file:"+path+",size=64k", Config{})
	mp := newMap(t, u)
	a, b := attach(t, mp, 1), attach(t, mp, 2)
	m, err := scsi.ParseMode(a.good(scsi.ModeSense10(scsi.ModePageCaching, 255), nil), true, false)
	if err != nil || len(m.Pages) != 1 || m.Pages[0].Data[0]&4 == 0 {
		t.Fatalf("caching page of a file: %+v, %v", m, err)
	}
	page := append([]byte{0, 0, 0, 0, 0, 0, 0, 0, m.Pages[0].Page, byte(m.Pages[0].Length)}, m.Pages[0].Data...)
	page[10] &^= 4
	a.good(scsi.ModeSelectCDB{Ten: true, PF: true, ParamLen: uint16(len(page))}.CDB(), page)
	if u.writeBack.Load() {
		t.Error("WCE is still set")
	}
	b.check(scsi.TestUnitReady(), nil, scsi.UnitAttention, scsi.ASCModeParametersChanged)
	b.good(scsi.TestUnitReady(), nil)
	a.good(scsi.TestUnitReady(), nil)
	page[11] = 1 // a bit that cannot be changed
	a.check(scsi.ModeSelectCDB{Ten: true, PF: true, ParamLen: uint16(len(page))}.CDB(), page, scsi.IllegalRequest, scsi.ASCInvalidFieldInParameters)
	a.check(scsi.ModeSelectCDB{Ten: true, PF: true, ParamLen: 12}.CDB(), page[:12], scsi.IllegalRequest, scsi.ASCParameterListLength)
	a.check(scsi.ModeSenseCDB{PC: scsi.ModeSaved, Page: 8, AllocLen: 64}.CDB(), nil, scsi.IllegalRequest, scsi.ASCSavingNotSupported)
	a.check(scsi.ModeSense6(0x2a, 64), nil, scsi.IllegalRequest, scsi.ASCInvalidFieldInCDB)

	// Control page: descriptor sense and software write protect.
	ctl := []byte{0, 0, 0, 0, scsi.ModePageControl, 10, 0x04, 0x10, 0x08, 0x40, 0, 0, 0xff, 0xff, 0, 0}
	a.good(scsi.ModeSelectCDB{PF: true, ParamLen: uint16(len(ctl))}.CDB(), ctl)
	if s := a.check(scsi.Write10(0, 1), nil, scsi.DataProtect, scsi.ASCWriteProtected); !s.Descriptor {
		t.Error("D_SENSE is set but the sense is in fixed format")
	}
	u.Reset()
	a.check(scsi.Write10(0, 1), make([]byte, 512), scsi.UnitAttention, scsi.ASCBusDeviceReset)
	a.good(scsi.Write10(0, 1), make([]byte, 512))
}

func TestInquiryAndLists(t *testing.T) {
	u := newUnit(t, "ram:1m", Config{Serial: "SN42"})
	m := newMap(t, u)
	if err := m.Add(300, u); err != nil {
		t.Fatal(err)
	}
	i := attach(t, m, 1)
	d, err := scsi.ParseInquiry(i.good(scsi.Inquiry(255), nil))
	if err != nil || d.Vendor != "SRP-EMU" || d.Product != "ram disk" || d.Version != 6 || !d.CmdQueue || d.Length != 96 || len(d.VersionDescs) != 4 {
		t.Errorf("INQUIRY: %+v, %v", d, err)
	}
	if n := len(i.good(scsi.Inquiry(5), nil)); n != 5 {
		t.Errorf("5 bytes asked for, %d came", n)
	}
	i.good(scsi.Inquiry(0), nil)
	pages, _ := scsi.ParseVPD(i.good(scsi.InquiryVPD(0, 255), nil), 0)
	for _, p := range pages.Data {
		v, err := scsi.ParseVPD(i.good(scsi.InquiryVPD(p, 1024), nil), p)
		if err != nil || v.Truncated() {
			t.Errorf("page %02x: %+v, %v", p, v, err)
		}
		if p == scsi.VPDSerialNumber && v.SerialNumber() != "SN42" {
			t.Errorf("serial %q", v.SerialNumber())
		}
		if p == scsi.VPDDeviceID {
			if ds, err := v.Designators(); err != nil || len(ds) != 3 || ds[0].Type != scsi.DesignatorNAA || ds[0].ID[0]>>4 != 3 {
				t.Errorf("designators %v, %v", ds, err)
			}
		}
	}
	i.check(scsi.InquiryVPD(0xc0, 255), nil, scsi.IllegalRequest, scsi.ASCInvalidFieldInCDB)
	luns, total, err := scsi.ParseLUNList(i.good(scsi.ReportLUNs(0, 4096), nil))
	if err != nil || total != 2 || luns[0] != (scsi.LUN{}) || luns[1] != (scsi.LUN{0x41, 0x2c}) {
		t.Errorf("LUNs %v %d %v", luns, total, err)
	}
	m.Simple = true
	if luns, _, _ = scsi.ParseLUNList(i.good(scsi.ReportLUNs(0, 4096), nil)); luns[1] != (scsi.LUN{0x01, 0x2c}) {
		t.Errorf("LUN 300 the simple way: %v", luns[1])
	}
	c, err := scsi.ParseCapacity16(i.good(scsi.ReadCapacity16(32), nil))
	if err != nil || c.Blocks() != 2048 || c.BlockSize != 512 {
		t.Errorf("capacity %+v %v", c, err)
	}

	none := attach(t, &Map{}, 1)
	if d, _ := scsi.ParseInquiry(none.good(scsi.Inquiry(36), nil)); d.Qualifier != scsi.QualifierNotThere || d.DeviceType != scsi.TypeUnknown {
		t.Errorf("INQUIRY of no unit: %+v", d)
	}
	none.check(scsi.TestUnitReady(), nil, scsi.IllegalRequest, scsi.ASCLUNotSupported)
	if luns, _, _ := scsi.ParseLUNList(none.good(scsi.ReportLUNs(0, 64), nil)); len(luns) != 1 {
		t.Errorf("REPORT LUNS of an empty target: %v", luns)
	}
}

// TestSupportedOpcodesTellTheTruth runs every command of the table and some that are not in it.
func TestSupportedOpcodesTellTheTruth(t *testing.T) {
	u := newUnit(t, "ram:1m", Config{})
	i := attach(t, newMap(t, u), 1)
	list, err := scsi.ParseCommandList(i.good(scsi.ReportOpcodesCDB{AllocLen: 8192}.CDB(), nil))
	if err != nil || len(list) != len(commands) {
		t.Fatalf("%d of %d commands, %v", len(list), len(commands), err)
	}
	listed := map[[2]uint16]bool{}
	for _, c := range list {
		listed[[2]uint16{uint16(c.Opcode), c.ServiceAction}] = true
		one, err := scsi.ParseCommandSupport(i.good(scsi.ReportOpcodesCDB{Options: scsi.ReportOneOpcodeOrAction, Opcode: c.Opcode, ServiceAction: c.ServiceAction, AllocLen: 64}.CDB(), nil))
		if err != nil || !one.Supported() || len(one.Usage) != int(c.CDBLen) || one.Usage[0] != byte(c.Opcode) || scsi.CDBLen(one.Usage) != int(c.CDBLen) {
			t.Errorf("%s: %+v, %v", c.Name(), one, err)
		}
	}
	for op := range 256 {
		for sa := range 32 {
			var raw [16]byte
			raw[0] = byte(op)
			n := scsi.CDBLen(raw[:])
			if n == 0 {
				continue
			}
			hasSA := false
			for _, c := range commands {
				hasSA = hasSA || c.op == scsi.Opcode(op) && c.hasSA
			}
			if hasSA {
				raw[1] = byte(sa)
			} else if sa > 0 {
				break
			}
			cdb, _ := scsi.NewCDB(raw[:n])
			i.task.CDB = cdb.Bytes()
			i.m.Begin(&i.task, i.n)
			s, _ := scsi.ParseSense(i.task.Sense())
			refused := i.task.Done && s.Key == scsi.IllegalRequest && (s.ASC == scsi.ASCInvalidOpcode || hasSA && s.ASC == scsi.ASCInvalidFieldInCDB && s.Field == 1)
			if l := listed[[2]uint16{uint16(op), uint16(sa)}]; l == refused {
				t.Errorf("%s service action %d: listed %v, refused %v (%s)", scsi.Opcode(op), sa, l, refused, s)
			}
			i.task.End()
		}
	}
}

func TestUnmapAndWriteSame(t *testing.T) {
	lim := scsi.BlockLimits{MaxUnmapBlocks: 1000, MaxUnmapDescriptors: 2, MaxWriteSame: 256, MaxCompareAndWrite: 4}
	u := newUnit(t, "ram:1m", Config{Limits: &lim})
	i := attach(t, newMap(t, u), 1)
	ones := bytes.Repeat([]byte{0xff}, 2048*512)
	i.good(scsi.Write16(0, 2048), ones)
	unmap := func(e ...scsi.Extent) (scsi.CDB, []byte) {
		b := scsi.AppendUnmap(nil, e)
		return scsi.Unmap(false, uint16(len(b))), b
	}
	c, b := unmap(scsi.Extent{LBA: 10, Blocks: 5}, scsi.Extent{LBA: 100, Blocks: 995})
	i.good(c, b)
	want := bytes.Clone(ones)
	clear(want[10*512 : 15*512])
	clear(want[100*512 : 1095*512])
	if !bytes.Equal(i.good(scsi.Read16(0, 2048), nil), want) {
		t.Error("UNMAP cleared other blocks than asked for")
	}
	c, b = unmap(scsi.Extent{LBA: 0, Blocks: 1001})
	i.check(c, b, scsi.IllegalRequest, scsi.ASCInvalidFieldInParameters)
	c, b = unmap(scsi.Extent{LBA: 0, Blocks: 1}, scsi.Extent{LBA: 2047, Blocks: 2})
	i.check(c, b, scsi.IllegalRequest, scsi.ASCLBAOutOfRange)
	if got := i.good(scsi.Read16(0, 1), nil); got[0] != 0xff {
		t.Error("a refused UNMAP unmapped its first extent")
	}
	c, b = unmap(make([]scsi.Extent, 3)...)
	i.check(c, b, scsi.IllegalRequest, scsi.ASCInvalidFieldInParameters)
	c, b = unmap(scsi.Extent{LBA: 1, Blocks: 1})
	b[3] = 0xf0 // a descriptor length beyond the list
	i.check(c, b, scsi.IllegalRequest, scsi.ASCParameterListLength)

	block := bytes.Repeat([]byte{0x5a}, 512)
	i.good(scsi.WriteSame16(20, 256, false, false), block)
	if got := i.good(scsi.Read16(19, 258), nil); !bytes.Equal(got[512:257*512], bytes.Repeat(block, 256)) || got[0] != 0xff {
		t.Error("WRITE SAME wrote the wrong blocks")
	}
	i.check(scsi.WriteSame10(20, 257, false), block, scsi.IllegalRequest, scsi.ASCInvalidFieldInCDB)
	i.good(scsi.WriteSame16(20, 8, true, true), nil)
	if got := i.good(scsi.Read16(20, 8), nil); !allZero(got) {
		t.Error("WRITE SAME with NDOB left data")
	}
	i.good(scsi.WriteSame10(1900, 0, false), block) // 0: to the end
	if got := i.good(scsi.Read16(2047, 1), nil); !bytes.Equal(got, block) {
		t.Error("WRITE SAME of 0 blocks did not reach the end")
	}
	i.check(scsi.WriteSame10(0, 0, false), block, scsi.IllegalRequest, scsi.ASCInvalidFieldInCDB) // more than the limit
}

func TestVerify(t *testing.T) {
	u := newUnit(t, "ram:1m", Config{})
	i := attach(t, newMap(t, u), 1)
	data := bytes.Repeat([]byte{7}, 64*512)
	i.good(scsi.Write10(8, 64), data)
	i.good(scsi.Verify10(8, 64, 0), nil)
	i.good(scsi.Verify10(8, 64, 1), data)
	i.good(scsi.Verify16(8, 64, 3), data[:512])
	data[63*512+511] = 8
	i.check(scsi.Verify10(8, 64, 1), data, scsi.Miscompare, scsi.ASCMiscompareDuringVerify)
	i.check(scsi.Verify16(7, 2, 3), data[:512], scsi.Miscompare, scsi.ASCMiscompareDuringVerify)
	i.check(scsi.Verify10(0, 1, 2), nil, scsi.IllegalRequest, scsi.ASCInvalidFieldInCDB)
	// One command is not hours of work.
	n := attach(t, newMap(t, newUnit(t, "null:2t", Config{})), 1)
	n.good(scsi.Verify16(0, 256<<20>>9, 3), make([]byte, 512))
	n.check(scsi.Verify16(0, 256<<20>>9+1, 3), nil, scsi.IllegalRequest, scsi.ASCInvalidFieldInCDB)
	n.check(scsi.Verify16(0, 1<<32-1, 3), nil, scsi.IllegalRequest, scsi.ASCInvalidFieldInCDB)
	// WRITE AND VERIFY writes; to compare as well is refused, and then nothing is written.
	for _, op := range []scsi.Opcode{scsi.OpWriteVerify10, scsi.OpWriteVerify12, scsi.OpWriteVerify16} {
		data := bytes.Repeat([]byte{byte(op)}, 512)
		i.good(scsi.Transfer{Op: op, LBA: 5, Blocks: 1}.CDB(), data)
		for bytchk := uint8(1); bytchk < 4; bytchk++ {
			i.check(scsi.Transfer{Op: op, LBA: 5, Blocks: 1, BytChk: bytchk}.CDB(), bytes.Repeat([]byte{9}, 512), scsi.IllegalRequest, scsi.ASCInvalidFieldInCDB)
		}
		if got := i.good(scsi.Read10(5, 1), nil); !bytes.Equal(got, data) {
			t.Errorf("%02x: what was written reads as % x...", op, got[:8])
		}
	}
}

// A file that was cut short is not taken for what the scratch memory happens to hold, and zeros that were asked for are there.
func TestFileCutShort(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk")
	u := newUnit(t, "file:"+path+",size=1m", Config{})
	i := attach(t, newMap(t, u), 1)
	data := bytes.Repeat([]byte{7}, 16*512)
	i.good(scsi.Write10(16, 16), data)
	i.good(scsi.Verify10(16, 16, 1), data)
	if err := os.Truncate(path, 16*512); err != nil {
		t.Fatal(err)
	}
	i.check(scsi.Read10(16, 16), nil, scsi.MediumError, scsi.ASCUnrecoveredRead)
	i.check(scsi.Verify10(16, 16, 1), data, scsi.MediumError, scsi.ASCUnrecoveredRead)
	i.check(scsi.Verify16(16, 16, 3), data[:512], scsi.MediumError, scsi.ASCUnrecoveredRead)
	i.check(scsi.Verify10(15, 17, 1), append(make([]byte, 512), data...), scsi.MediumError, scsi.ASCUnrecoveredRead)
	i.good(scsi.WriteSame16(16, 16, false, false), make([]byte, 512))
	if got := i.good(scsi.Read10(16, 16), nil); !allZero(got) || len(got) != 16*512 {
		t.Errorf("%d bytes, all zero: %t", len(got), allZero(got))
	}
}

// TestCompareAndWriteIsAtomic lets many initiators count in one block: every increment must be seen once.
func TestCompareAndWriteIsAtomic(t *testing.T) {
	u := newUnit(t, "ram:1m", Config{})
	m := newMap(t, u)
	const workers, each = 4, 200
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			i := attach(t, m, byte(w))
			for done := 0; done < each; {
				cur := i.good(scsi.Read10(3, 1), nil)
				if be.Uint64(cur) != be.Uint64(cur[504:]) {
					t.Errorf("a torn block: %d and %d", be.Uint64(cur), be.Uint64(cur[504:]))
					return
				}
				next := bytes.Clone(cur)
				be.PutUint64(next, be.Uint64(next)+1)
				be.PutUint64(next[504:], be.Uint64(next[504:])+1)
				r := i.do(scsi.CompareAndWrite(3, 1), append(cur, next...))
				switch {
				case r.status == scsi.StatusGood:
					done++
				case r.sense.Key != scsi.Miscompare:
					t.Errorf("%s %s", r.status, r.sense)
					return
				}
			}
		})
	}
	wg.Wait()
	i := attach(t, m, 9)
	got := i.good(scsi.Read10(3, 1), nil)
	if a, b := be.Uint64(got), be.Uint64(got[504:]); a != workers*each || b != a {
		t.Errorf("counters %d and %d, want %d", a, b, workers*each)
	}
	// A direct write in flight keeps it off.
	w := &i.task
	c := scsi.Write10(0, 32)
	w.CDB = c.Bytes()
	m.Begin(w, i.n)
	if _, _, n := w.Direct(0, w.OutLen); n != w.OutLen {
		t.Fatalf("direct length %d", n)
	}
	j := attach(t, m, 10)
	if r := j.do(scsi.CompareAndWrite(3, 1), make([]byte, 1024)); r.status != scsi.StatusBusy {
		t.Errorf("COMPARE AND WRITE under a direct write: %s", r.status)
	}
	w.End()
	if r := j.do(scsi.CompareAndWrite(3, 1), append(bytes.Clone(got), make([]byte, 512)...)); r.status != scsi.StatusGood {
		t.Errorf("COMPARE AND WRITE after it: %s %s", r.status, r.sense)
	}
}

func TestStripesCoverWraps(t *testing.T) {
	u := newUnit(t, "null:1g", Config{})
	for _, e := range []extent{{0, 1}, {1 << 20, 1}, {1<<20 - 1, 2}, {63 << 20, 2 << 20}, {63<<20 + 5, 1 << 20}, {10 << 20, 100 << 20}, {62 << 20, 64 << 20}} {
		u.lock(e.off, e.n, true)
		held := 0
		for i := range u.locks {
			if u.locks[i].TryLock() {
				u.locks[i].Unlock()
			} else {
				held++
			}
		}
		want := int(min(stripes, (e.off+e.n-1)>>stripeShift-e.off>>stripeShift+1))
		if held != want {
			t.Errorf("%+v holds %d stripes, want %d", e, held, want)
		}
		u.unlock(e.off, e.n, true)
		for i := range u.locks {
			if !u.locks[i].TryLock() {
				t.Fatalf("%+v left stripe %d locked", e, i)
			}
			u.locks[i].Unlock()
		}
	}
}

func TestUnitAttention(t *testing.T) {
	u := newUnit(t, "ram:1m", Config{PowerOn: true})
	m := newMap(t, u)
	a := attach(t, m, 1)
	a.good(scsi.Inquiry(36), nil)
	a.good(scsi.ReportLUNs(0, 64), nil)
	a.n.Establish(scsi.ASCCapacityChanged)
	a.n.Establish(scsi.ASCCapacityChanged)
	a.check(scsi.TestUnitReady(), nil, scsi.UnitAttention, scsi.ASCPowerOn)
	s, _ := scsi.ParseSense(a.good(scsi.RequestSense(false, 252), nil))
	if s.Key != scsi.UnitAttention || s.ASC != scsi.ASCCapacityChanged {
		t.Errorf("REQUEST SENSE: %s", s)
	}
	a.good(scsi.TestUnitReady(), nil)
	if again := u.Attach([16]byte{15: 1}); again != a.n {
		t.Error("the nexus was not kept")
	}
}

func prOut(sa uint8, typ scsi.ReservationType, key, saKey uint64) (scsi.CDB, []byte) {
	return scsi.PersistentReserveOut(sa, typ, scsi.PROutParamsLen), scsi.PROutParams{Key: key, ServiceActionKey: saKey}.Append(nil)
}

func TestPersistentReservations(t *testing.T) {
	u := newUnit(t, "ram:1m", Config{})
	m := newMap(t, u)
	a, b, c := attach(t, m, 1), attach(t, m, 2), attach(t, m, 3)
	out := func(i *initiator, sa uint8, typ scsi.ReservationType, key, saKey uint64) {
		t.Helper()
		cdb, p := prOut(sa, typ, key, saKey)
		i.good(cdb, p)
	}
	no := func(i *initiator, sa uint8, typ scsi.ReservationType, key, saKey uint64) {
		t.Helper()
		cdb, p := prOut(sa, typ, key, saKey)
		i.conflict(cdb, p)
	}
	blk := make([]byte, 512)

	no(a, scsi.PRRegister, 0, 5, 6)                  // a key that is not registered
	no(a, scsi.PRReserve, scsi.WriteExclusive, 0, 0) // not registered
	out(a, scsi.PRRegister, 0, 0, 0xa)
	out(b, scsi.PRRegisterIgnoreKey, 0, 99, 0xb)
	out(a, scsi.PRReserve, scsi.WriteExclusive, 0xa, 0)
	out(a, scsi.PRReserve, scsi.WriteExclusive, 0xa, 0) // again
	no(a, scsi.PRReserve, scsi.ExclusiveAccess, 0xa, 0)
	no(b, scsi.PRReserve, scsi.WriteExclusive, 0xb, 0)

	// Write exclusive: others read, nobody else writes, registered or not.
	a.good(scsi.Write10(0, 1), blk)
	for _, i := range []*initiator{b, c} {
		i.good(scsi.Read10(0, 1), nil)
		i.conflict(scsi.Write10(0, 1), blk)
		i.conflict(scsi.Unmap(false, 24), nil)
		i.conflict(scsi.ModeSense6(8, 64), nil)
		i.good(scsi.TestUnitReady(), nil)
		i.good(scsi.Inquiry(36), nil)
		i.good(scsi.ReadCapacity16(32), nil)
	}
	r, err := scsi.ParsePRReservation(c.good(scsi.PersistentReserveIn(scsi.PRReadReservation, 64), nil))
	if err != nil || !r.Held || r.Key != 0xa || r.Type != scsi.WriteExclusive {
		t.Errorf("READ RESERVATION %+v %v", r, err)
	}
	gen, keys, _, _ := scsi.ParsePRKeys(c.good(scsi.PersistentReserveIn(scsi.PRReadKeys, 64), nil))
	if gen != 2 || len(keys) != 2 {
		t.Errorf("READ KEYS generation %d, keys %x", gen, keys)
	}
	_, full, err := scsi.ParsePRFullStatus(c.good(scsi.PersistentReserveIn(scsi.PRReadFullStatus, 1024), nil))
	if err != nil || len(full) != 2 {
		t.Fatalf("READ FULL STATUS %+v %v", full, err)
	}
	for _, f := range full {
		port, err := scsi.ParseSRPTransportID(f.TransportID)
		if err != nil || f.Holder != (port[15] == 1) {
			t.Errorf("full status %+v", f)
		}
	}

	// Release with the wrong type, then rightly; a non-holder's release does nothing.
	cdb, p := prOut(scsi.PRRelease, scsi.ExclusiveAccess, 0xa, 0)
	a.check(cdb, p, scsi.IllegalRequest, scsi.ASCInvalidRelease)
	out(b, scsi.PRRelease, scsi.WriteExclusive, 0xb, 0)
	out(a, scsi.PRRelease, scsi.WriteExclusive, 0xa, 0)
	c.good(scsi.Write10(0, 1), blk)

	// Exclusive access, registrants only: b is in, c is out even for reads.
	out(a, scsi.PRReserve, scsi.ExclusiveAccessRegistrantsOnly, 0xa, 0)
	b.good(scsi.Write10(0, 1), blk)
	c.conflict(scsi.Read10(0, 1), nil)
	// The holder leaves: the others hear of it.
	out(a, scsi.PRRegister, 0, 0xa, 0)
	b.check(scsi.TestUnitReady(), nil, scsi.UnitAttention, scsi.ASCReservationsReleased)
	c.good(scsi.Read10(0, 1), nil)

	// Preempt: b takes a's exclusive reservation over; a loses its registration and hears of it.
	out(a, scsi.PRRegister, 0, 0, 0xa)
	out(a, scsi.PRReserve, scsi.ExclusiveAccess, 0xa, 0)
	out(b, scsi.PRPreemptAbort, scsi.WriteExclusive, 0xb, 0xa)
	if p := b.task.Preempted(); len(p) != 1 || p[0][15] != 1 {
		t.Errorf("tasks to be aborted: those of %v", p)
	}
	a.check(scsi.Read10(0, 1), nil, scsi.UnitAttention, scsi.ASCRegistrationsPreempted)
	a.good(scsi.Read10(0, 1), nil)
	a.conflict(scsi.Write10(0, 1), blk)
	no(b, scsi.PRPreempt, scsi.WriteExclusive, 0xb, 0x77) // no such key
	cdb, p = prOut(scsi.PRPreempt, scsi.WriteExclusive, 0xb, 0)
	b.check(cdb, p, scsi.IllegalRequest, scsi.ASCInvalidFieldInParameters)

	// All registrants hold it; the reservation goes with the last of them.
	out(b, scsi.PRClear, 0, 0xb, 0)
	out(a, scsi.PRRegister, 0, 0, 0xa)
	out(b, scsi.PRRegister, 0, 0, 0xb)
	out(a, scsi.PRReserve, scsi.WriteExclusiveAllRegistrants, 0xa, 0)
	out(b, scsi.PRReserve, scsi.WriteExclusiveAllRegistrants, 0xb, 0)
	b.good(scsi.Write10(0, 1), blk)
	out(a, scsi.PRRegister, 0, 0xa, 0)
	c.conflict(scsi.Write10(0, 1), blk)
	out(b, scsi.PRRegister, 0, 0xb, 0)
	c.good(scsi.Write10(0, 1), blk)
	if u.reserved.Load() {
		t.Error("the data path still looks for a reservation")
	}

	// Register and move.
	out(a, scsi.PRRegister, 0, 0, 0xa)
	out(a, scsi.PRReserve, scsi.WriteExclusive, 0xa, 0)
	id := scsi.SRPTransportID(c.n.port)
	mv := scsi.PRMoveParams{Key: 0xa, ServiceActionKey: 0xc, RelativePort: 1, TransportID: id[:]}.Append(nil)
	a.good(scsi.PersistentReserveOut(scsi.PRRegisterMove, scsi.WriteExclusive, uint32(len(mv))), mv)
	c.good(scsi.Write10(0, 1), blk)
	a.conflict(scsi.Write10(0, 1), blk)

	// What REPORT CAPABILITIES says no to.
	cdb = scsi.PersistentReserveOut(scsi.PRRegister, 0, scsi.PROutParamsLen)
	b.check(cdb, scsi.PROutParams{ServiceActionKey: 1, PersistThroughPL: true}.Append(nil), scsi.IllegalRequest, scsi.ASCInvalidFieldInParameters)
	b.check(scsi.PersistentReserveOut(scsi.PRRegister, 0, 20), nil, scsi.IllegalRequest, scsi.ASCParameterListLength)
	b.check(scsi.PersistentReserveOut(scsi.PRReserve, 2, 24), nil, scsi.IllegalRequest, scsi.ASCInvalidFieldInCDB)
}

func TestReadWriteDoNotAllocate(t *testing.T) {
	u := newUnit(t, "ram:1m", Config{})
	i := attach(t, newMap(t, u), 1)
	buf := make([]byte, 4096)
	var c scsi.CDB
	if n := testing.AllocsPerRun(200, func() {
		tk := &i.task
		c = scsi.WriteCDB(8, 8, false)
		tk.CDB = c.Bytes()
		i.m.Begin(tk, i.n)
		tk.WriteChunk(buf, 0)
		tk.FinishStream()
		tk.End()
		c = scsi.ReadCDB(8, 8)
		i.m.Begin(tk, i.n)
		tk.ReadChunk(buf, 0)
		tk.FinishStream()
		tk.End()
		c = scsi.WriteCDB(8, 8, false)
		i.m.Begin(tk, i.n)
		tk.Direct(0, tk.OutLen)
		tk.FinishStream()
		tk.End()
	}); n != 0 {
		t.Errorf("%v allocations for a WRITE, a READ and a direct WRITE; want 0", n)
	}
	i = attach(t, newMap(t, newUnit(t, "file:"+filepath.Join(t.TempDir(), "disk")+",size=1m", Config{})), 1)
	if n := testing.AllocsPerRun(200, func() {
		tk := &i.task
		c = scsi.ReadCDB(8, 8)
		tk.CDB = c.Bytes()
		i.m.Begin(tk, i.n)
		tk.TryReadChunk(buf, 0)
		tk.FinishStream()
		tk.End()
	}); n != 0 {
		t.Errorf("%v allocations for a READ from the page cache; want 0", n)
	}
}

func FuzzBegin(f *testing.F) {
	for _, c := range commands {
		f.Add([]byte{byte(c.op), c.sa, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, []byte{})
	}
	mv := scsi.PRMoveParams{Key: 1, ServiceActionKey: 2, TransportID: make([]byte, 24)}.Append(nil)
	f.Add([]byte{0x5f, 7, 0, 0, 0, 0, 0, 0, byte(len(mv)), 0}, mv)
	f.Add([]byte{0x55, 0x10, 0, 0, 0, 0, 0, 0, 28, 0}, append(make([]byte, 8), 8, 18, 4))
	u := newUnit(f, "ram:64k", Config{})
	m := newMap(f, u)
	i := attach(f, m, 1)
	big := make([]byte, WholeLen)
	f.Fuzz(func(t *testing.T, cdb, out []byte) {
		i.task.CDB = cdb
		m.Begin(&i.task, i.n)
		tk := &i.task
		switch tk.Way {
		case WayIn:
			if tk.InLen > ScratchLen {
				t.Fatal("more data-in than the scratch buffer")
			}
		case WayRead:
			for at := int64(0); at < tk.InLen && tk.ReadChunk(big[:min(WholeLen, tk.InLen-at)], at); at += WholeLen {
			}
		case WayWrite, WayVerify:
			for at := int64(0); at < tk.OutLen && tk.WriteChunk(big[:min(WholeLen, tk.OutLen-at)], at); at += WholeLen {
			}
			tk.FinishStream()
		case WayWhole:
			if tk.OutLen > WholeLen {
				t.Fatal("more data-out than WholeLen")
			}
			b := make([]byte, tk.OutLen)
			copy(b, out)
			tk.FinishOut(b)
		case WayWork:
			tk.Finish()
		}
		tk.End()
	})
}

// watcher is a lock that knows what of a store may have changed: nothing while it is free.
type watcher struct {
	t     *testing.T
	mem   []byte
	was   []byte
	held  bool
	times int
}

func (w *watcher) Lock() {
	w.free()
	w.held = true
	w.times++
}

func (w *watcher) Unlock() {
	w.held = false
	changed := 0
	for i := range w.mem {
		if w.mem[i] != w.was[i] {
			changed++
		}
	}
	if changed > 16<<10 {
		w.t.Errorf("%d bytes changed while a device had to wait", changed)
	}
	copy(w.was, w.mem)
}

func (w *watcher) free() {
	w.t.Helper()
	if w.held || !bytes.Equal(w.mem, w.was) {
		w.t.Error("changed without the lock")
		copy(w.was, w.mem)
	}
}

func TestMemoryLock(t *testing.T) {
	u := newUnit(t, "ram:1m,bs=4096", Config{})
	i := attach(t, newMap(t, u), 1)
	mem := u.Regions()[0].Bytes()
	w, second := &watcher{t: t, mem: mem, was: bytes.Clone(mem)}, &watcher{t: t, mem: mem, was: bytes.Clone(mem)}
	u.AddMemoryLock(w)
	u.AddMemoryLock(second)
	ones := bytes.Repeat([]byte{1}, 64<<10)
	for _, c := range []struct {
		name  string
		cdb   scsi.CDB
		out   []byte
		times int
	}{
		{"write", scsi.Write10(0, 1), ones[:4096], 1},
		{"large write", scsi.Write10(1, 16), ones, 8}, // the test moves 8 KiB at a time
		{"compare and write", scsi.CompareAndWrite(0, 1), append(bytes.Clone(ones[:4096]), make([]byte, 4096)...), 1},
		{"write same", scsi.WriteSame16(17, 32, false, false), ones[:4096], 8},
		{"write same of zeros", scsi.WriteSame16(1, 20, false, false), make([]byte, 4096), 5},
	} {
		before := w.times
		if r := i.do(c.cdb, c.out); r.status != scsi.StatusGood {
			t.Fatalf("%s: %s %s", c.name, r.status, r.sense)
		}
		w.free()
		second.free()
		if n := w.times - before; n != c.times || second.times != w.times {
			t.Errorf("%s: locked %d times (%d and %d in all), want %d", c.name, n, w.times, second.times, c.times)
		}
	}
	u.RemoveMemoryLock(w)
	u.RemoveMemoryLock(second)
	before := w.times
	i.good(scsi.Write10(0, 1), ones[:4096])
	if w.times != before {
		t.Error("locked after the device was gone")
	}
}

// syncs counts what a store with a write cache is asked to make durable.
type syncs struct {
	Store
	n int
}

func newSyncs(t testing.TB) *syncs {
	t.Helper()
	ram, err := OpenStore(Spec{Kind: "ram", Size: 1 << 20, BlockSize: 512})
	if err != nil {
		t.Fatal(err)
	}
	return &syncs{Store: ram}
}

func (s *syncs) WriteBack() bool { return true }
func (s *syncs) Sync() error     { s.n++; return nil }

// With the write cache off every command that writes has made its data durable when it ends, those without an FUA bit too.
func TestWriteCacheOff(t *testing.T) {
	s := newSyncs(t)
	u, err := New(s, Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	i := attach(t, newMap(t, u), 1)
	list := scsi.AppendUnmap(nil, []scsi.Extent{{LBA: 1, Blocks: 2}})
	for name, c := range map[string]struct {
		cdb scsi.CDB
		out []byte
	}{
		"WRITE":           {scsi.Write10(0, 1), make([]byte, 512)},
		"WRITE SAME":      {scsi.WriteSame16(0, 8, false, false), bytes.Repeat([]byte{1}, 512)},
		"WRITE SAME of 0": {scsi.WriteSame16(0, 8, false, false), make([]byte, 512)},
		"WRITE SAME NDOB": {scsi.WriteSame16(0, 8, true, true), nil},
		"UNMAP":           {scsi.Unmap(false, uint16(len(list))), list},
		"COMPARE...":      {scsi.Transfer{Op: scsi.OpCompareAndWrite, LBA: 100, Blocks: 1}.CDB(), make([]byte, 1024)},
	} {
		for _, on := range []bool{true, false} {
			u.writeBack.Store(on)
			before := s.n
			i.good(c.cdb, c.out)
			if synced := s.n > before; synced == on {
				t.Errorf("%s, write cache %v: made durable: %v", name, on, synced)
			}
		}
	}
}

// Ranges that end with the last block are served and those that end behind it are refused as a whole, in both block sizes on every kind of store.
func TestRangesAtTheEnd(t *testing.T) {
	unlimited := scsi.BlockLimits{MaxUnmapBlocks: 1<<32 - 1, MaxUnmapDescriptors: MaxUnmapExtents, MaxCompareAndWrite: 4}
	for _, bs := range []int{512, 4096} {
		for _, kind := range []string{"ram:64k", "null:64k", "file:" + filepath.Join(t.TempDir(), "disk") + ",size=64k"} {
			for _, limits := range []*scsi.BlockLimits{nil, &unlimited} { // WRITE SAME of 0 blocks is refused, or goes to the end
				spec := fmt.Sprintf("%s,bs=%d", kind, bs)
				u := newUnit(t, spec, Config{Limits: limits})
				i := attach(t, newMap(t, u), 1)
				end := u.Blocks()
				last := end - 1
				ones := bytes.Repeat([]byte{1}, int(end)*bs)
				null := u.Store().Kind() == "null"
				block, zero := ones[:bs], make([]byte, bs)
				unmap := func(e ...scsi.Extent) (scsi.CDB, []byte) {
					b := scsi.AppendUnmap(nil, e)
					return scsi.Unmap(false, uint16(len(b))), b
				}
				for _, c := range []struct {
					name    string
					cdb     scsi.CDB
					out     []byte
					cleared uint64 // blocks at the end that read as zeros
					missing uint64 // the block that sense data name; 0: the command is good
				}{
					{"WRITE SAME(16) of the last block", scsi.WriteSame16(last, 1, false, false), zero, 1, 0},
					{"WRITE SAME(10) with UNMAP of the last block", scsi.WriteSame10(uint32(last), 1, true), zero, 1, 0},
					{"WRITE SAME(16) with NDOB of the last two", scsi.WriteSame16(last-1, 2, true, true), nil, 2, 0},
					{"WRITE SAME(16) of ones at the end", scsi.WriteSame16(last-1, 2, false, false), block, 0, 0},
					{"WRITE SAME(16) one too many", scsi.WriteSame16(last, 2, false, false), zero, 0, end},
					{"WRITE SAME(16) with NDOB one too many", scsi.WriteSame16(0, uint32(end)+1, true, true), nil, 0, end},
					{"WRITE SAME(10) behind the end", scsi.WriteSame10(uint32(end), 1, true), zero, 0, end},
					{"WRITE SAME(16) far behind the end", scsi.WriteSame16(1<<40, 1, true, false), zero, 0, 1 << 40},
					{"WRITE SAME(16) that wraps around", scsi.WriteSame16(1<<64-1, 2, true, false), zero, 0, 1<<64 - 1},
					{"UNMAP of the last block", first(unmap(scsi.Extent{LBA: last, Blocks: 1})), second(unmap(scsi.Extent{LBA: last, Blocks: 1})), 1, 0},
					{"UNMAP of nothing", first(unmap(scsi.Extent{LBA: 3}, scsi.Extent{LBA: end})), second(unmap(scsi.Extent{LBA: 3}, scsi.Extent{LBA: end})), 0, 0},
					{"UNMAP one too many", first(unmap(scsi.Extent{LBA: last, Blocks: 2})), second(unmap(scsi.Extent{LBA: last, Blocks: 2})), 0, end},
					{"UNMAP of a good range and one behind the end", first(unmap(scsi.Extent{LBA: last, Blocks: 1}, scsi.Extent{LBA: end, Blocks: 1})),
						second(unmap(scsi.Extent{LBA: last, Blocks: 1}, scsi.Extent{LBA: end, Blocks: 1})), 0, end},
					{"UNMAP of nothing behind the end", first(unmap(scsi.Extent{LBA: end + 1})), second(unmap(scsi.Extent{LBA: end + 1})), 0, end + 1},
					{"UNMAP that wraps around", first(unmap(scsi.Extent{LBA: 1<<64 - 1, Blocks: 1<<32 - 1})), second(unmap(scsi.Extent{LBA: 1<<64 - 1, Blocks: 1<<32 - 1})), 0, 1<<64 - 1},
					{"COMPARE AND WRITE of the last block", scsi.CompareAndWrite(last, 1), append(bytes.Clone(block), zero...), 1, 0},
					{"COMPARE AND WRITE one too many", scsi.CompareAndWrite(last, 2), nil, 0, end},
					{"WRITE one too many", scsi.Write16(last, 2), nil, 0, end},
					{"VERIFY one too many", scsi.Verify16(last, 2, 0), nil, 0, end},
					{"SYNCHRONIZE CACHE to the end", scsi.SynchronizeCache10(uint32(last), 0), nil, 0, 0},
					{"SYNCHRONIZE CACHE one too many", scsi.SynchronizeCache16(last, 2), nil, 0, end},
					{"GET LBA STATUS behind the end", scsi.GetLBAStatus(end, 64), nil, 0, end},
				} {
					if null && strings.HasPrefix(c.name, "COMPARE AND WRITE of") {
						continue // it reads zeros
					}
					name := spec + ": " + c.name
					i.good(scsi.Write16(0, uint32(end)), ones)
					r := i.do(c.cdb, c.out)
					switch {
					case c.missing == 0 && r.status != scsi.StatusGood:
						t.Errorf("%s: %s, %s", name, r.status, r.sense)
					case c.missing != 0 && (r.sense.Key != scsi.IllegalRequest || r.sense.ASC != scsi.ASCLBAOutOfRange || r.sense.HasInformation != (c.missing < 1<<32) || r.sense.HasInformation && r.sense.Information != c.missing):
						t.Errorf("%s: %s, %s; want LBA out of range, block %d", name, r.status, r.sense, c.missing)
					}
					want := bytes.Clone(ones)
					clear(want[(end-c.cleared)*uint64(bs):])
					if !null && !bytes.Equal(i.good(scsi.Read16(0, uint32(end)), nil), want) {
						t.Errorf("%s: other blocks changed than the last %d", name, c.cleared)
					}
				}
				// 0 blocks are those up to the last: none from behind it.
				r := i.do(scsi.WriteSame16(end, 0, true, true), nil)
				if limits == nil && r.sense.ASC != scsi.ASCInvalidFieldInCDB || limits != nil && r.status != scsi.StatusGood {
					t.Errorf("%s: WRITE SAME of 0 blocks from behind the last: %s, %s", spec, r.status, r.sense)
				}
			}
		}
	}
}

func first(c scsi.CDB, _ []byte) scsi.CDB { return c }
func second(_ scsi.CDB, b []byte) []byte  { return b }

// A block device whose blocks are larger than the unit's takes no hole of a part of one: the zeros are written.
func TestZeroOfAPartOfADevicesBlock(t *testing.T) {
	fallocate = func(fd int, mode uint32, off, n int64) error {
		if off%4096 != 0 || n%4096 != 0 {
			return unix.EINVAL
		}
		return unix.Fallocate(fd, mode, off, n)
	}
	defer func() { fallocate = unix.Fallocate }()
	i := attach(t, newMap(t, newUnit(t, "file:"+filepath.Join(t.TempDir(), "disk")+",size=64k", Config{})), 1)
	i.good(scsi.Write10(0, 128), bytes.Repeat([]byte{1}, 64<<10))
	i.good(scsi.WriteSame16(9, 3, true, true), nil)
	want := bytes.Repeat([]byte{1}, 64<<10)
	clear(want[9*512 : 12*512])
	if !bytes.Equal(i.good(scsi.Read10(0, 128), nil), want) {
		t.Error("other blocks are zeros than 9 to 11")
	}
}

// A unit that must not be written refuses every command that would write its medium and nothing else (SBC-3, 4.12): not PERSISTENT RESERVE, which
// changes the device server only (SPC-4), nor SYNCHRONIZE CACHE. Each command of the table is in one list or the other.
func TestReadOnlyRefusesEveryWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(path, make([]byte, 65536), 0o600); err != nil {
		t.Fatal(err)
	}
	list := scsi.AppendUnmap(nil, []scsi.Extent{{LBA: 1, Blocks: 1}})
	block := make([]byte, 512)
	writes := map[scsi.Opcode]struct {
		cdb scsi.CDB
		out []byte
	}{
		scsi.OpWrite6: {scsi.Write6(1, 1), block}, scsi.OpWrite10: {scsi.Write10(1, 1), block}, scsi.OpWrite12: {scsi.Write12(1, 1), block}, scsi.OpWrite16: {scsi.Write16(1, 1), block},
		scsi.OpWriteVerify10:   {scsi.Transfer{Op: scsi.OpWriteVerify10, LBA: 1, Blocks: 1}.CDB(), block},
		scsi.OpWriteVerify12:   {scsi.Transfer{Op: scsi.OpWriteVerify12, LBA: 1, Blocks: 1}.CDB(), block},
		scsi.OpWriteVerify16:   {scsi.Transfer{Op: scsi.OpWriteVerify16, LBA: 1, Blocks: 1}.CDB(), block},
		scsi.OpWriteSame10:     {scsi.WriteSame10(1, 1, true), block},
		scsi.OpWriteSame16:     {scsi.WriteSame16(1, 1, true, true), nil},
		scsi.OpUnmap:           {scsi.Unmap(false, uint16(len(list))), list},
		scsi.OpCompareAndWrite: {scsi.CompareAndWrite(1, 1), make([]byte, 1024)},
	}
	register, params := prOut(scsi.PRRegister, 0, 0, 5)
	harmless := map[scsi.Opcode]struct {
		cdb scsi.CDB
		out []byte
	}{
		scsi.OpTestUnitReady: {scsi.TestUnitReady(), nil}, scsi.OpRequestSense: {scsi.RequestSense(false, 252), nil}, scsi.OpInquiry: {scsi.Inquiry(36), nil},
		scsi.OpRead6: {scsi.Read6(0, 1), nil}, scsi.OpRead10: {scsi.Read10(0, 1), nil}, scsi.OpRead12: {scsi.Read12(0, 1), nil}, scsi.OpRead16: {scsi.Read16(0, 1), nil},
		scsi.OpModeSense6: {scsi.ModeSense6(8, 64), nil}, scsi.OpModeSense10: {scsi.ModeSense10(8, 64), nil},
		scsi.OpModeSelect6: {scsi.ModeSelectCDB{PF: true, ParamLen: 4}.CDB(), make([]byte, 4)}, scsi.OpModeSelect10: {scsi.ModeSelectCDB{Ten: true, PF: true, ParamLen: 8}.CDB(), make([]byte, 8)},
		scsi.OpStartStopUnit: {scsi.StartStopCDB{}.CDB(), nil}, scsi.OpPreventAllowRemoval: {mustCDB(t, 0x1e, 0, 0, 0, 1, 0), nil},
		scsi.OpReadCapacity10: {scsi.ReadCapacity10(), nil}, scsi.OpServiceActionIn16: {scsi.ReadCapacity16(32), nil},
		scsi.OpVerify10: {scsi.Verify10(0, 1, 0), nil}, scsi.OpVerify12: {scsi.Transfer{Op: scsi.OpVerify12, Blocks: 1}.CDB(), nil}, scsi.OpVerify16: {scsi.Verify16(0, 1, 0), nil},
		scsi.OpSynchronizeCache10: {scsi.SynchronizeCache10(0, 0), nil}, scsi.OpSynchronizeCache16: {scsi.SynchronizeCache16(0, 0), nil},
		scsi.OpPersistentReserveIn: {scsi.PersistentReserveIn(scsi.PRReadKeys, 64), nil}, scsi.OpPersistentReserveOut: {register, params},
		scsi.OpReportLUNs: {scsi.ReportLUNs(0, 64), nil}, scsi.OpMaintenanceIn: {scsi.ReportOpcodesCDB{AllocLen: 8192}.CDB(), nil},
	}
	for _, c := range commands {
		_, w := writes[c.op]
		if _, h := harmless[c.op]; w == h {
			t.Errorf("%s: in both lists or in none", c.op)
		}
	}
	for _, spec := range []string{"ram:64k,ro", "null:64k,ro", "file:" + path + ",ro", "ram:64k"} {
		u := newUnit(t, spec, Config{})
		u.swp.Store(!strings.HasSuffix(spec, ",ro")) // the last one: SWP of the control page
		i := attach(t, newMap(t, u), 1)
		for op, c := range writes {
			if r := i.do(c.cdb, c.out); r.status != scsi.StatusCheckCondition || r.sense.Key != scsi.DataProtect || r.sense.ASC != scsi.ASCWriteProtected {
				t.Errorf("%s: %s: %s, %s; want DATA PROTECT, write protected", spec, op, r.status, r.sense)
			}
		}
		for op, c := range harmless {
			if r := i.do(c.cdb, c.out); r.status != scsi.StatusGood {
				t.Errorf("%s: %s: %s, %s", spec, op, r.status, r.sense)
			}
		}
	}
}

func mustCDB(t testing.TB, b ...byte) scsi.CDB {
	t.Helper()
	c, err := scsi.NewCDB(b)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// gated is a store whose Sync waits.
type gated struct {
	syncs
	began chan struct{}
	gate  chan error
	in    atomic.Bool
}

func (g *gated) Sync() error {
	g.in.Store(true)
	defer g.in.Store(false)
	g.began <- struct{}{}
	return <-g.gate
}

func (g *gated) Close() error {
	if g.in.Load() {
		return errors.New("closed under a flush")
	}
	return nil
}

// What makes data durable does so before its status, or with IMMED after it, and then an error is told to whoever asks next.
func TestFlushes(t *testing.T) {
	s := newSyncs(t)
	u, err := New(s, Config{})
	if err != nil {
		t.Fatal(err)
	}
	i := attach(t, newMap(t, u), 1)
	for name, c := range map[string]struct {
		cdb  scsi.CDB
		want int
	}{
		"SYNCHRONIZE CACHE(10)":            {scsi.SynchronizeCache10(0, 0), 1},
		"SYNCHRONIZE CACHE(16) of a range": {scsi.SynchronizeCache16(100, 7), 1},
		"SYNCHRONIZE CACHE(10), IMMED":     {scsi.Transfer{Op: scsi.OpSynchronizeCache10, Immed: true}.CDB(), 1},
		"SYNCHRONIZE CACHE(16), IMMED":     {scsi.Transfer{Op: scsi.OpSynchronizeCache16, LBA: 3, Blocks: 4, Immed: true}.CDB(), 1},
		"stop":                             {scsi.StartStopCDB{}.CDB(), 1},
		"stop, IMMED":                      {scsi.StartStopCDB{Immed: true}.CDB(), 1},
		"standby":                          {scsi.StartStopCDB{PowerCondition: 3, Start: true}.CDB(), 1},
		"stop without a flush":             {scsi.StartStopCDB{NoFlush: true}.CDB(), 0},
		"start":                            {scsi.StartStopCDB{Start: true}.CDB(), 0},
	} {
		before := s.n
		i.good(c.cdb, nil)
		u.flusher.settle()
		if n := s.n - before; n != c.want {
			t.Errorf("%s: made durable %d times, want %d", name, n, c.want)
		}
	}
	i.check(scsi.StartStopCDB{LoEj: true}.CDB(), nil, scsi.IllegalRequest, scsi.ASCInvalidFieldInCDB)

	g := &gated{syncs: syncs{Store: s.Store}, began: make(chan struct{}), gate: make(chan error)}
	if u, err = New(g, Config{}); err != nil {
		t.Fatal(err)
	}
	i = attach(t, newMap(t, u), 1)
	immed := scsi.Transfer{Op: scsi.OpSynchronizeCache10, Immed: true}.CDB()
	i.good(immed, nil) // answered, though the store has not even begun
	g.next(t)
	for range 3 { // one more flush for all of them, as the data written since are not in the first
		i.good(immed, nil)
	}
	g.gate <- nil
	g.next(t)
	g.gate <- errors.New("lost")
	u.flusher.settle()
	go func() { <-g.began; g.gate <- nil }()
	i.check(scsi.SynchronizeCache10(0, 0), nil, scsi.MediumError, scsi.ASCWriteError)
	go func() { <-g.began; g.gate <- nil }()
	i.good(scsi.SynchronizeCache10(0, 0), nil)
	// The store is not closed under a flush.
	i.good(immed, nil)
	g.next(t)
	time.AfterFunc(20*time.Millisecond, func() { g.gate <- nil })
	if err := u.Close(); err != nil {
		t.Error(err)
	}
}

// Whoever makes data durable waits for the flush under way, which may have missed them, and for one more, and not for those that others
// ask for meanwhile. A flush's error is told to everybody whose data it may have met, and if nobody waits, to the next who does.
func TestFlushesOfOthers(t *testing.T) {
	g := &gated{syncs: *newSyncs(t), began: make(chan struct{}), gate: make(chan error)}
	u, err := New(g, Config{})
	if err != nil {
		t.Fatal(err)
	}
	m := newMap(t, u)
	stranger, last := attach(t, m, 1), byte(1)
	immed := scsi.Transfer{Op: scsi.OpSynchronizeCache10, Immed: true}.CDB()
	ask := func() chan scsi.Status { // returns when the command waits
		last++
		i, answer, before := attach(t, m, last), make(chan scsi.Status, 1), u.flusher.askers()
		go func() { answer <- i.do(scsi.SynchronizeCache10(0, 0), nil).status }()
		for deadline := time.Now().Add(5 * time.Second); u.flusher.askers() == before; runtime.Gosched() {
			if time.Now().After(deadline) {
				t.Fatal("does not wait")
			}
		}
		return answer
	}
	answered := func(answer chan scsi.Status, want scsi.Status) {
		t.Helper()
		select {
		case got := <-answer:
			if got != want {
				t.Errorf("status %v, want %v", got, want)
			}
		case <-time.After(5 * time.Second):
			t.Fatal("waits for the flushes of others")
		}
	}
	lost := errors.New("lost")

	stranger.good(immed, nil)
	g.next(t)
	a, b := ask(), ask()
	stranger.good(immed, nil)
	g.gate <- nil
	g.next(t)
	if len(a) > 0 || len(b) > 0 {
		t.Error("answered after a flush that had begun before the command")
	}
	stranger.good(immed, nil)
	g.gate <- nil
	answered(a, scsi.StatusGood)
	answered(b, scsi.StatusGood)

	// The stranger's flush fails while others wait for the next.
	g.next(t)
	a = ask()
	g.gate <- lost
	g.next(t)
	b = ask()
	g.gate <- nil
	answered(a, scsi.StatusCheckCondition)
	g.next(t)
	g.gate <- lost
	answered(b, scsi.StatusCheckCondition)

	// One that runs the flush itself leaves the next to others.
	a = ask()
	g.next(t)
	b = ask()
	c := ask()
	g.gate <- nil
	answered(a, scsi.StatusGood)
	g.next(t)
	g.gate <- lost
	answered(b, scsi.StatusCheckCondition)
	answered(c, scsi.StatusCheckCondition)
	a = ask()
	g.next(t)
	g.gate <- nil
	answered(a, scsi.StatusGood)

	// Closing waits for what has been asked for, and takes what nobody has been told.
	stranger.good(immed, nil)
	g.next(t)
	stranger.good(immed, nil)
	closed := make(chan error, 1)
	go func() { closed <- u.Close() }()
	g.gate <- lost
	g.next(t)
	g.gate <- nil
	if err := <-closed; !errors.Is(err, lost) {
		t.Errorf("closing: %v, want the error of the last flush but one", err)
	}
}

// settle waits until no flush is under way.
func (f *flusher) settle() {
	for busy := true; busy; runtime.Gosched() {
		f.mu.Lock()
		busy = f.running
		f.mu.Unlock()
	}
}

// askers counts the flushes and who waits for the next.
func (f *flusher) askers() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.waiting)
	if f.running {
		n++
	}
	return n
}

// next waits for the next call of Sync.
func (g *gated) next(t *testing.T) {
	t.Helper()
	select {
	case <-g.began:
	case <-time.After(5 * time.Second):
		t.Fatal("nothing is made durable")
	}
}
