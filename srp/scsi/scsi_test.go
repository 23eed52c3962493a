package scsi

import (
	"bytes"
	"encoding/hex"
	"reflect"
	"strings"
	"testing"
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestCDBGolden holds the builders to bytes written out from the tables of SPC-4 and SBC-3, and the parsers to the builders.
func TestCDBGolden(t *testing.T) {
	for _, g := range []struct {
		name string
		cdb  CDB
		hex  string
	}{
		{"TEST UNIT READY", TestUnitReady(), "00 00 00 00 00 00"},
		{"REQUEST SENSE", RequestSense(true, 252), "03 01 00 00 fc 00"},
		{"READ(6)", Read6(0x1f2345, 256), "08 1f 23 45 00 00"},
		{"WRITE(6)", Write6(0x012345, 7), "0a 01 23 45 07 00"},
		{"INQUIRY", Inquiry(36), "12 00 00 00 24 00"},
		{"INQUIRY", InquiryVPD(0x83, 0x1234), "12 01 83 12 34 00"},
		{"MODE SELECT(6)", ModeSelectCDB{PF: true, SP: true, ParamLen: 24}.CDB(), "15 11 00 00 18 00"},
		{"MODE SENSE(6)", ModeSenseCDB{DBD: true, PC: 2, Page: 8, Subpage: 1, AllocLen: 192}.CDB(), "1a 08 88 01 c0 00"},
		{"START STOP UNIT", StartStopCDB{Immed: true, Start: true, LoEj: true, PowerCondition: 3}.CDB(), "1b 01 00 00 33 00"},
		{"READ CAPACITY(10)", ReadCapacity10(), "25 00 00 00 00 00 00 00 00 00"},
		{"READ(10)", Read10(0x01020304, 0x0506), "28 00 01 02 03 04 00 05 06 00"},
		{"WRITE(10)", WriteCDB(0x01020304, 0x0506, true), "2a 08 01 02 03 04 00 05 06 00"},
		{"VERIFY(10)", Verify10(1, 2, 1), "2f 02 00 00 00 01 00 00 02 00"},
		{"SYNCHRONIZE CACHE(10)", SynchronizeCache10(1, 2), "35 00 00 00 00 01 00 00 02 00"},
		{"WRITE SAME(10)", WriteSame10(1, 2, true), "41 08 00 00 00 01 00 00 02 00"},
		{"UNMAP", Unmap(false, 24), "42 00 00 00 00 00 00 00 18 00"},
		{"MODE SELECT(10)", ModeSelectCDB{Ten: true, PF: true, ParamLen: 0x1234}.CDB(), "55 10 00 00 00 00 00 12 34 00"},
		{"MODE SENSE(10)", ModeSenseCDB{Ten: true, LLBAA: true, Page: 0x3f, AllocLen: 0x1234}.CDB(), "5a 10 3f 00 00 00 00 12 34 00"},
		{"PERSISTENT RESERVE IN", PersistentReserveIn(PRReadFullStatus, 0x1234), "5e 03 00 00 00 00 00 12 34 00"},
		{"PERSISTENT RESERVE OUT", PersistentReserveOut(PRPreempt, ExclusiveAccess, 24), "5f 04 03 00 00 00 00 00 18 00"},
		{"READ(16)", Read16(0x0102030405060708, 0x090a0b0c), "88 00 01 02 03 04 05 06 07 08 09 0a 0b 0c 00 00"},
		{"COMPARE AND WRITE", CompareAndWrite(0x0102030405060708, 9), "89 00 01 02 03 04 05 06 07 08 00 00 00 09 00 00"},
		{"WRITE(16)", WriteCDB(1<<32, 1, false), "8a 00 00 00 00 01 00 00 00 00 00 00 00 01 00 00"},
		{"WRITE(16)", WriteCDB(0, 65536, true), "8a 08 00 00 00 00 00 00 00 00 00 01 00 00 00 00"},
		{"VERIFY(16)", Verify16(1, 2, 3), "8f 06 00 00 00 00 00 00 00 01 00 00 00 02 00 00"},
		{"SYNCHRONIZE CACHE(16)", SynchronizeCache16(1, 2), "91 00 00 00 00 00 00 00 00 01 00 00 00 02 00 00"},
		{"WRITE SAME(16)", WriteSame16(1, 2, true, true), "93 09 00 00 00 00 00 00 00 01 00 00 00 02 00 00"},
		{"READ CAPACITY(16)", ReadCapacity16(32), "9e 10 00 00 00 00 00 00 00 00 00 00 00 20 00 00"},
		{"GET LBA STATUS", GetLBAStatus(1, 24), "9e 12 00 00 00 00 00 00 00 01 00 00 00 18 00 00"},
		{"REPORT LUNS", ReportLUNs(2, 0x01020304), "a0 00 02 00 00 00 01 02 03 04 00 00"},
		{"REPORT SUPPORTED OPERATION CODES", ReportOpcodesCDB{RCTD: true, Options: 3, Opcode: 0x9e, ServiceAction: 0x12, AllocLen: 256}.CDB(), "a3 0c 83 9e 00 12 00 00 01 00 00 00"},
		{"REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS", ReportSupportedTMFs(4), "a3 0d 00 00 00 00 00 00 00 04 00 00"},
		{"READ(12)", Read12(0x01020304, 0x05060708), "a8 00 01 02 03 04 05 06 07 08 00 00"},
		{"WRITE(12)", Write12(0x01020304, 0x05060708), "aa 00 01 02 03 04 05 06 07 08 00 00"},
	} {
		want := unhex(t, g.hex)
		if !bytes.Equal(g.cdb.Bytes(), want) {
			t.Errorf("%s: % x, want % x", g.name, g.cdb.Bytes(), want)
		}
		if n := CDBLen(want); n != len(want) {
			t.Errorf("%s: CDBLen %d, want %d", g.name, n, len(want))
		}
		if n := CommandName(want); n != g.name {
			t.Errorf("named %q, want %q", n, g.name)
		}
		if tr, ok := ParseTransfer(want); ok {
			if back := tr.CDB(); back != g.cdb {
				t.Errorf("%s: parsed and built again: % x", g.name, back.Bytes())
			}
		}
		for n := range want {
			if _, ok := ParseTransfer(want[:n]); ok {
				t.Errorf("%s: %d bytes parsed as a transfer", g.name, n)
			}
		}
	}
	if m, ok := ParseModeSenseCDB(unhex(t, "5a1848ff00000001fc00")); !ok || m != (ModeSenseCDB{Ten: true, DBD: true, LLBAA: true, PC: 1, Page: 8, Subpage: 0xff, AllocLen: 508}) {
		t.Errorf("MODE SENSE(10): %+v", m)
	}
	if r, ok := ParseReportOpcodesCDB(unhex(t, "a30c839e0012000001000000")); !ok || r != (ReportOpcodesCDB{RCTD: true, Options: 3, Opcode: 0x9e, ServiceAction: 0x12, AllocLen: 256}) {
		t.Errorf("REPORT SUPPORTED OPERATION CODES: %+v", r)
	}
	if sa, scope, typ, n, ok := ParsePersistentReserveOut(unhex(t, "5f041300000000001800")); !ok || sa != 4 || scope != 1 || typ != ExclusiveAccess || n != 24 {
		t.Error("PERSISTENT RESERVE OUT")
	}
	if _, err := ParseCDB("12 00 00 00 24 00"); err != nil {
		t.Error(err)
	}
	for _, s := range []string{"", "1", "zz", strings.Repeat("00", 33)} {
		if _, err := ParseCDB(s); err == nil {
			t.Errorf("ParseCDB(%q) succeeded", s)
		}
	}
}

func TestTransferDoesNotAllocate(t *testing.T) {
	var c CDB
	var tr Transfer
	if n := testing.AllocsPerRun(100, func() {
		c = ReadCDB(1<<33, 8)
		tr, _ = ParseTransfer(c.Bytes())
		c = WriteCDB(tr.LBA, tr.Blocks, true)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestLUN(t *testing.T) {
	for _, g := range []struct {
		n      uint32
		hex    string
		simple string
	}{
		{0, "0000000000000000", "0000000000000000"},
		{255, "00ff000000000000", "00ff000000000000"},
		{256, "4100000000000000", "0100000000000000"},
		{300, "412c000000000000", "012c000000000000"}, // LIO lists 300 the second way
		{16383, "7fff000000000000", "3fff000000000000"},
		{16384, "e200000040000000", ""},
		{1<<32 - 1, "e200ffffffff0000", ""},
	} {
		if l := NewLUN(g.n); hex.EncodeToString(l[:]) != g.hex {
			t.Errorf("NewLUN(%d) = %x, want %s", g.n, l[:], g.hex)
		} else if n, ok := l.Number(); !ok || n != g.n {
			t.Errorf("Number of %x = %d, %v", l[:], n, ok)
		} else if back, err := ParseLUN(l.String()); err != nil || back != l {
			t.Errorf("%s parsed as %x, %v", l, back[:], err)
		}
		if g.simple != "" {
			l := NewSimpleLUN(uint16(g.n))
			if hex.EncodeToString(l[:]) != g.simple {
				t.Errorf("NewSimpleLUN(%d) = %x", g.n, l[:])
			}
			if n, ok := l.Number(); !ok || n != g.n {
				t.Errorf("Number of %x = %d, %v", l[:], n, ok)
			}
			if back, err := ParseLUN(l.String()); err != nil || back != l {
				t.Errorf("%s parsed as %x, %v: the bytes are lost", l, back[:], err)
			}
		}
	}
	if n, ok := (LUN{0xd2, 1, 2, 3}).Number(); !ok || n != 0x010203 {
		t.Errorf("extended flat: %x %v", n, ok)
	}
	for _, l := range []LUN{{0xc1, 1}, {0, 1, 0, 2}, {0x80, 1}, {0xe2, 1}} {
		if n, ok := l.Number(); ok {
			t.Errorf("%x has number %d", l[:], n)
		}
	}
	for _, s := range []string{"", "-1", "4294967296", "0x12", "x"} {
		if _, err := ParseLUN(s); err == nil {
			t.Errorf("ParseLUN(%q) succeeded", s)
		}
	}
}

func TestSense(t *testing.T) {
	for _, g := range []struct {
		name  string
		s     Sense
		fixed string
		desc  string
		text  string
	}{
		{"invalid field in CDB", InvalidField(true, 2),
			"70 00 05 00000000 0a 00000000 24 00 00 c00002", "72 05 24 00 000000 08 0206 0000 c00002 00",
			"ILLEGAL REQUEST, invalid field in CDB (24h/00h), at byte 2 of the CDB"},
		{"LBA out of range", Sense{Key: IllegalRequest, ASC: ASCLBAOutOfRange, HasInformation: true, Information: 0x01020304},
			"f0 00 05 01020304 0a 00000000 21 00 00 000000", "72 05 21 00 000000 0c 000a 80 00 0000000001020304",
			"ILLEGAL REQUEST, logical block address out of range (21h/00h), information 0x1020304"},
		{"unit attention", Sense{Key: UnitAttention, ASC: ASCPowerOn},
			"70 00 06 00000000 0a 00000000 29 00 00 000000", "72 06 29 00 000000 00",
			"UNIT ATTENTION, power on, reset, or bus device reset occurred (29h/00h)"},
		{"progress", Sense{Key: NotReady, ASC: 0x0404, HasProgress: true, Progress: 0x8000, Deferred: true},
			"71 00 02 00000000 0a 00000000 04 04 00 808000", "73 02 04 04 000000 08 0206 0000 808000 00",
			"deferred NOT READY, logical unit not ready, format in progress (04h/04h), 50 % done"},
	} {
		if b := g.s.AppendFixed(nil); !bytes.Equal(b, unhex(t, g.fixed)) {
			t.Errorf("%s, fixed: % x, want %s", g.name, b, g.fixed)
		} else if back, ok := ParseSense(b); !ok || back != g.s {
			t.Errorf("%s, fixed: parsed %+v", g.name, back)
		}
		d := g.s
		d.Descriptor = true
		if b := d.Append(nil); !bytes.Equal(b, unhex(t, g.desc)) {
			t.Errorf("%s, descriptor: % x, want %s", g.name, b, g.desc)
		} else if back, ok := ParseSense(b); !ok || back != d {
			t.Errorf("%s, descriptor: parsed %+v", g.name, back)
		}
		if got := g.s.String(); got != g.text {
			t.Errorf("%q, want %q", got, g.text)
		}
	}
	// 64 bits of information do not fit the fixed format: the field is then marked invalid.
	if s, _ := ParseSense(Sense{Key: MediumError, HasInformation: true, Information: 1 << 40}.AppendFixed(nil)); s.HasInformation {
		t.Error("a cut information field is marked valid")
	}
	for _, b := range [][]byte{nil, {0x70}, {0x70, 0}, {0, 0, 5, 0, 0, 0, 0, 0}, {0x74, 0, 0, 0}} {
		if _, ok := ParseSense(b); ok {
			t.Errorf("% x read as sense", b)
		}
	}
	if got := ASC(0x4085).String(); !strings.Contains(got, "component 85h") {
		t.Error(got)
	}
	err := Error([]byte{0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0}, StatusCheckCondition, unhex(t, "70 00 07 00000000 0a 00000000 27 00 00 000000"))
	if ce, ok := err.(*CheckConditionError); !ok || ce.Sense.Key != DataProtect || ce.Error() != "WRITE(10): DATA PROTECT, write protected (27h/00h)" {
		t.Errorf("%v", err)
	}
	if err := Error([]byte{0}, StatusGood, nil); err != nil {
		t.Error(err)
	}
	if err := Error([]byte{0x28}, StatusBusy, nil); err == nil || !StatusBusy.Retryable() || StatusReservationConflict.Retryable() {
		t.Error("BUSY")
	}
}

func TestInquiry(t *testing.T) {
	d := InquiryData{DeviceType: TypeDisk, Version: 6, ResponseFormat: 2, HiSup: true, CmdQueue: true, TPGS: 1, Protect: true, MultiPort: true,
		Vendor: "ACME", Product: "Disk", Revision: "12"}
	want := unhex(t, "00 00 06 12 1f 11 10 02 41434d4520202020 4469736b202020202020202020202020 31322020")
	if b := d.Append(nil); !bytes.Equal(b, want) {
		t.Errorf("% x, want % x", b, want)
	}
	back, err := ParseInquiry(want)
	d.Received, d.Length = 36, 36
	if err != nil || !reflect.DeepEqual(back, d) {
		t.Errorf("%+v %v", back, err)
	}
	// Lengths that lie, and short transfers: what was not received is absent.
	for _, c := range []struct {
		additional byte
		n          int
		vendor     string
		length     int
	}{{31, 36, "ACME", 36}, {91, 36, "ACME", 96}, {255, 36, "ACME", 260}, {0, 36, "", 5}, {31, 4, "", 0}, {31, 5, "", 36}, {31, 10, "AC", 36}, {31, 35, "ACME", 36}} {
		b := append([]byte{}, want[:c.n]...)
		if c.n > 4 {
			b[4] = c.additional
		}
		got, err := ParseInquiry(b)
		if err != nil || got.Vendor != c.vendor || got.Length != c.length {
			t.Errorf("%+v: %+v %v", c, got, err)
		}
	}
	if _, err := ParseInquiry(nil); err == nil {
		t.Error("no data parsed")
	}
	bad := append([]byte{}, want...)
	copy(bad[8:], "A\x07\xffB\x00\x00\x00")
	if got, _ := ParseInquiry(bad); got.Vendor != `A\x07\xffB` && !strings.HasPrefix(got.Vendor, `A\x07\xffB`) {
		t.Errorf("vendor %q", got.Vendor)
	}
}

func TestVPD(t *testing.T) {
	id := AppendDesignator(nil, Designator{CodeSet: CodeBinary, Type: DesignatorNAA, ID: unhex(t, "3000000000000001")})
	id = AppendDesignator(id, Designator{CodeSet: CodeASCII, Type: DesignatorT10, Association: AssocTarget, PIV: true, Protocol: 4, ID: bytes.Repeat([]byte("x"), 255)})
	page := AppendVPD(nil, 0, 0x83, id)
	if !bytes.Equal(page[:16], unhex(t, "00 83 010f 01 03 00 08 3000000000000001")) || !bytes.Equal(page[16:20], unhex(t, "42 a1 00 ff")) {
		t.Errorf("page 83: % x", page[:24])
	}
	v, err := ParseVPD(page, 0x83)
	ds, err2 := v.Designators()
	if err != nil || err2 != nil || len(ds) != 2 || ds[1].Protocol != 4 || !ds[1].PIV || ds[1].Association != AssocTarget || len(ds[1].ID) != 255 || ds[0].String() != "naa.3000000000000001" {
		t.Errorf("%+v %v %v", ds, err, err2)
	}
	// A page that is cut, or whose last descriptor runs past its end: the good ones are given, with an error.
	for _, b := range [][]byte{page[:20], page[:len(page)-1], append(AppendVPD(nil, 0, 0x83, append(append([]byte{}, id[:12]...), 1, 3, 0, 255)), 0)} {
		v, err := ParseVPD(b, 0x83)
		if err != nil {
			t.Fatal(err)
		}
		ds, err := v.Designators()
		if err == nil || len(ds) != 1 {
			t.Errorf("damaged page: %d designators, %v", len(ds), err)
		}
	}
	if _, err := ParseVPD(page, 0x80); err == nil {
		t.Error("page 83 accepted for page 80")
	}
	if _, err := ParseVPD(page[:3], 0x83); err == nil {
		t.Error("3 bytes accepted")
	}
	for want, raw := range map[string]string{"": "", "abc": "  abc  ", `a\x01`: "a\x01\x00", "S\\xe9": "S\xe9"} {
		v, _ := ParseVPD(AppendVPD(nil, 0, 0x80, []byte(raw)), 0x80)
		if got := v.SerialNumber(); got != want {
			t.Errorf("serial %q, want %q", got, want)
		}
	}
	l := BlockLimits{WSNZ: true, MaxCompareAndWrite: 1, OptimalGranularity: 2, MaxTransfer: 3, OptimalTransfer: 4, MaxPrefetch: 5, MaxUnmapBlocks: 6,
		MaxUnmapDescriptors: 7, OptimalUnmapGranularity: 8, UnmapAlignment: 9, UnmapAlignmentValid: true, MaxWriteSame: 10, UnmapInfo: true, WriteSameLimited: true}
	b := AppendVPD(nil, 0, 0xb0, l.Append(nil))
	if !bytes.Equal(b[:44], unhex(t, "00b0003c 01 01 0002 00000003 00000004 00000005 00000006 00000007 00000008 80000009 000000000000000a")) {
		t.Errorf("page B0: % x", b[:44])
	}
	v, _ = ParseVPD(b, 0xb0)
	if got, err := v.BlockLimits(); err != nil || got != l {
		t.Errorf("%+v %v", got, err)
	}
	v, _ = ParseVPD(b[:16], 0xb0) // SBC-2's page is this short
	if got, err := v.BlockLimits(); err != nil || got.MaxUnmapBlocks != 0 || got.UnmapInfo {
		t.Errorf("%+v %v", got, err)
	}
	p := Provisioning{Unmap: true, WriteSame16Unmap: true, ReadsZero: 1, Type: ProvisioningThin}
	v, _ = ParseVPD(AppendVPD(nil, 0, 0xb2, p.Append(nil)), 0xb2)
	if !bytes.Equal(v.Data, unhex(t, "00 c4 02 00")) {
		t.Errorf("page B2: % x", v.Data)
	}
	if got, err := v.Provisioning(); err != nil || got != p {
		t.Errorf("%+v %v", got, err)
	}
	c := BlockCharacteristics{RotationRate: 7200, FormFactor: 2}
	v, _ = ParseVPD(AppendVPD(nil, 0, 0xb1, c.Append(nil)), 0xb1)
	if got, err := v.BlockCharacteristics(); err != nil || got != c || !bytes.Equal(v.Data[:4], unhex(t, "1c20 00 02")) {
		t.Errorf("%+v %v", got, err)
	}
}

func TestBlockData(t *testing.T) {
	c := Capacity{LastLBA: 0x0102030405, BlockSize: 4096, Provisioned: true, UnmappedZero: true, PhysExponent: 3, LowestAligned: 7, ProtEnabled: true, ProtType: 2}
	want := unhex(t, "0000000102030405 00001000 05 03 c007") //
	b := c.Append(nil)
	if len(b) != 32 || !bytes.Equal(b[:16], want) {
		t.Errorf("% x, want % x", b[:16], want)
	}
	if got, err := ParseCapacity16(b); err != nil || got != c {
		t.Errorf("%+v %v", got, err)
	}
	if got, big, err := ParseCapacity10(c.Append10(nil)); err != nil || !big || got.BlockSize != 4096 {
		t.Errorf("%+v %v %v", got, big, err)
	}
	if got := (Capacity{LastLBA: 65535, BlockSize: 512}); got.Blocks() != 65536 || got.Size() != 32<<20 {
		t.Error("the last address is not the count")
	}
	u := AppendUnmap(nil, []Extent{{0x0102030405060708, 9}})
	if !bytes.Equal(u, unhex(t, "0016 0010 00000000 0102030405060708 00000009 00000000")) {
		t.Errorf("UNMAP list % x", u)
	}
	luns := AppendLUNList(nil, []LUN{{}, {1, 0x2c}})
	if !bytes.Equal(luns, unhex(t, "00000010 00000000 0000000000000000 012c000000000000")) {
		t.Errorf("LUN list % x", luns)
	}
	if got, total, err := ParseLUNList(luns[:20]); err != nil || total != 2 || len(got) != 1 {
		t.Errorf("cut LUN list: %v %d %v", got, total, err)
	}
	s := []LBAStatus{{Extent{1, 2}, LBADeallocated}}
	sb := AppendLBAStatus(nil, s)
	if !bytes.Equal(sb, unhex(t, "00000014 00000000 0000000000000001 00000002 01000000")) {
		t.Errorf("LBA status % x", sb)
	}
	if got, err := ParseLBAStatus(sb); err != nil || !reflect.DeepEqual(got, s) {
		t.Errorf("%v %v", got, err)
	}
}

func TestMode(t *testing.T) {
	page := unhex(t, "08 12 04 00 0000 0000 0000 0000 00 00 0000 00 000000")
	six := AppendMode(nil, false, true, false, ModeDPOFUA, 131072, 512, page)
	if !bytes.Equal(six, append(unhex(t, "1f 00 10 08 00020000 00000200"), page...)) {
		t.Errorf("MODE SENSE(6) % x", six)
	}
	ten := AppendMode(nil, true, true, true, ModeWriteProtected, 1<<40, 4096, page)
	if !bytes.Equal(ten, append(unhex(t, "002a 00 80 01 00 0010 0000010000000000 00000000 00001000"), page...)) {
		t.Errorf("MODE SENSE(10) % x", ten)
	}
	for i, b := range [][]byte{six, ten} {
		m, err := ParseMode(b, i == 1, false)
		if p, ok := m.Page(8, 0); err != nil || !ok || !m.BlockDesc || p.Data[0] != 4 || len(p.Data) != 18 {
			t.Errorf("%+v %v", m, err)
		}
		for n := range b { // cut anywhere: an error or less data, never a panic
			m, err := ParseMode(b[:n], i == 1, false)
			if p, ok := m.Page(8, 0); err == nil && ok && len(p.Data) == 18 {
				t.Errorf("%d of %d bytes gave a whole page", n, len(b))
			}
		}
	}
	if m, err := ParseMode(unhex(t, "03 00 80 00"), false, false); err != nil || m.Header.DeviceSpecific != ModeWriteProtected || len(m.Pages) != 0 {
		t.Errorf("header only: %+v %v", m, err)
	}
	for _, s := range []string{"", "ff", "ff 00 00 ff 00", "ff 00 00 00 08 ff 04", "ff 00 00 00 48", "ff 00 00 10 00000000"} {
		if _, err := ParseMode(unhex(t, s), false, false); err == nil {
			t.Errorf("% s parsed", s)
		}
	}
}

func TestReservationData(t *testing.T) {
	p := PROutParams{Key: 1, ServiceActionKey: 2, AllTargetPorts: true, PersistThroughPL: true, SpecInitiators: true}
	b := p.Append(nil)
	if !bytes.Equal(b, unhex(t, "0000000000000001 0000000000000002 00000000 0d 00 0000")) {
		t.Errorf("% x", b)
	}
	if got, err := ParsePROutParams(b); err != nil || got != p {
		t.Errorf("%+v %v", got, err)
	}
	r := PRReservation{Generation: 5, Held: true, Key: 6, Type: ExclusiveAccess}
	rb := r.Append(nil)
	if !bytes.Equal(rb, unhex(t, "00000005 00000010 0000000000000006 00000000 00 03 0000")) {
		t.Errorf("% x", rb)
	}
	if got, err := ParsePRReservation(rb); err != nil || got != r {
		t.Errorf("%+v %v", got, err)
	}
	if got, err := ParsePRReservation(PRReservation{Generation: 5}.Append(nil)); err != nil || got.Held {
		t.Errorf("%+v %v", got, err)
	}
	c := PRCapabilities{AllTargetPorts: true, TypeMask: 1<<1 | 1<<8}
	cb := c.Append(nil)
	if !bytes.Equal(cb, unhex(t, "0008 04 80 02 01 0000")) {
		t.Errorf("% x", cb)
	}
	if got, err := ParsePRCapabilities(cb); err != nil || got != c {
		t.Errorf("%+v %v", got, err)
	}
	id := SRPTransportID([16]byte{1, 15: 2})
	if !bytes.Equal(id[:], unhex(t, "04 00000000000000 01000000000000000000000000000002")) {
		t.Errorf("transport id % x", id)
	}
	fs := []PRFullStatus{{Key: 7, Holder: true, AllPorts: true, Type: WriteExclusive, RelativePort: 1, TransportID: id[:]}}
	fb := AppendPRFullStatus(nil, 3, fs)
	if gen, got, err := ParsePRFullStatus(fb); err != nil || gen != 3 || !reflect.DeepEqual(got, fs) {
		t.Errorf("%d %+v %v", gen, got, err)
	}
	m := PRMoveParams{Key: 1, ServiceActionKey: 2, Unregister: true, RelativePort: 1, TransportID: id[:]}
	if got, err := ParsePRMoveParams(m.Append(nil)); err != nil || !reflect.DeepEqual(got, m) {
		t.Errorf("%+v %v", got, err)
	}
	mb := m.Append(nil)
	copy(mb[20:], []byte{0xff, 0xff, 0xff, 0xff})
	if _, err := ParsePRMoveParams(mb); err == nil {
		t.Error("a transport id of 4 GiB was accepted")
	}
}
