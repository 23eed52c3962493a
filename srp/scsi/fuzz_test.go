package scsi

import (
	"bytes"
	"reflect"
	"strings"
	"testing"
)

// same holds what was parsed, written and parsed again to what was parsed first.
func same(t *testing.T, what string, back, first any) {
	t.Helper()
	if !reflect.DeepEqual(back, first) {
		t.Errorf("%s: %+v became %+v", what, first, back)
	}
}

// FuzzParse: no bytes make a parser panic or read beyond what came, and what a parser has read, its builder writes so that it reads the same.
func FuzzParse(f *testing.F) {
	for _, c := range []CDB{
		TestUnitReady(), Inquiry(36), InquiryVPD(0x83, 0x1234), ReportLUNs(2, 0x01020304), RequestSense(true, 252), ReadCapacity10(),
		ReadCapacity16(32), GetLBAStatus(1, 24), ModeSense6(8, 192), ModeSense10(0x3f, 512), Unmap(true, 24), ReportSupportedTMFs(4),
		ModeSelectCDB{PF: true, SP: true, ParamLen: 24}.CDB(), ModeSelectCDB{Ten: true, PF: true, ParamLen: 0x1234}.CDB(),
		StartStopCDB{Immed: true, Start: true, LoEj: true, PowerCondition: 3}.CDB(),
		ReportOpcodesCDB{RCTD: true, Options: 3, Opcode: 0x9e, ServiceAction: 0x12, AllocLen: 256}.CDB(),
		PersistentReserveIn(PRReadFullStatus, 0x1234), PersistentReserveOut(PRPreempt, ExclusiveAccess, 24),
		Read6(1, 256), Write6(1, 2), Read10(1, 2), WriteCDB(1, 2, true), Read12(1, 2), Write12(1, 2), Read16(1, 2), Write16(1, 2), Verify10(1, 2, 1),
		Verify16(1, 2, 3), SynchronizeCache10(1, 2), SynchronizeCache16(1, 2), WriteSame10(1, 2, true), WriteSame16(1, 2, true, true), CompareAndWrite(1, 2),
	} {
		f.Add(bytes.Clone(c.Bytes()))
	}
	id := SRPTransportID([16]byte{1, 15: 2})
	f.Add(InvalidField(true, 2).AppendFixed(nil))
	f.Add(Sense{Key: MediumError, HasInformation: true, Information: 1, FRU: 3, CommandInfo: 4}.AppendDescriptor(nil))
	f.Add(Sense{Key: NotReady, Deferred: true, HasProgress: true, Progress: 77}.AppendDescriptor(nil))
	f.Add(InquiryData{Vendor: "x", Product: "y z", Revision: "1", VersionDescs: []uint16{0x940}}.Append(nil))
	f.Add(AppendVPD(nil, 0, VPDSerialNumber, []byte(" 42 ")))
	f.Add(AppendVPD(nil, 0, VPDDeviceID, AppendDesignator(AppendDesignator(nil, Designator{ID: []byte("abc")}), Designator{PIV: true, Protocol: 4, Type: 1, ID: id[:]})))
	f.Add(AppendVPD(nil, 0, VPDBlockLimits, BlockLimits{UnmapAlignmentValid: true, UnmapAlignment: 4, MaxWriteSame: 5}.Append(nil)))
	f.Add(AppendVPD(nil, 0, VPDBlockCharacteristics, BlockCharacteristics{RotationRate: 1}.Append(nil)))
	f.Add(AppendVPD(nil, 0, VPDProvisioning, Provisioning{Unmap: true, ReadsZero: 1, Type: 2}.Append(nil)))
	f.Add(AppendMode(nil, true, true, true, 0, 1, 512, []byte{0x48, 1, 0, 2, 1, 2}))
	f.Add(AppendMode(nil, false, true, false, ModeDPOFUA, 1, 512, []byte{8, 2, 4, 0}))
	f.Add(AppendUnmap(nil, []Extent{{1, 2}, {3, 4}}))
	f.Add(AppendLBAStatus(nil, []LBAStatus{{Extent{1, 2}, LBADeallocated}}))
	f.Add(AppendLUNList(nil, []LUN{{1}, {0x41, 2}}))
	f.Add(Capacity{LastLBA: 1 << 33, BlockSize: 512, Provisioned: true}.Append(nil))
	f.Add(AppendPRKeys(nil, 1, []uint64{1, 2}))
	f.Add(PRReservation{Generation: 1, Held: true, Key: 2, Type: ExclusiveAccess}.Append(nil))
	f.Add(AppendPRFullStatus(nil, 1, []PRFullStatus{{TransportID: id[:]}, {Holder: true, Type: WriteExclusive, TransportID: make([]byte, 4)}}))
	f.Add(PRMoveParams{Key: 1, TransportID: id[:]}.Append(nil))
	f.Add(PROutParams{Key: 1, PersistThroughPL: true}.Append(nil))
	f.Add(PRCapabilities{TypeMask: 1 << 8}.Append(nil))
	f.Add(id[:])
	f.Add(AppendCommandList(nil, []CommandDescriptor{{Opcode: OpRead10, CDBLen: 10}, {Opcode: OpServiceActionIn16, HasServiceAction: true, ServiceAction: 0x10, CDBLen: 16}}, true))
	f.Add(CommandSupport{Support: 3, Usage: []byte{1, 2}}.Append(nil, true))
	f.Fuzz(func(t *testing.T, b []byte) {
		b = b[:len(b):len(b)] // what is read beyond the bytes received must not be there
		fuzzCDB(t, b)
		fuzzSense(t, b)
		fuzzInquiry(t, b)
		fuzzParameterData(t, b)
		fuzzReservations(t, b)
		if len(b) >= 8 {
			l := LUN(b[:8])
			if back, err := ParseLUN(l.String()); err != nil || back != l {
				t.Errorf("LUN %x became %x, %v", l[:], back[:], err)
			}
		}
	})
}

func fuzzCDB(t *testing.T, b []byte) {
	_ = CommandName(b)
	if n := CDBLen(b); len(b) > 0 && (n < 0 || n > 8+255) {
		t.Errorf("a CDB of %d bytes", n)
	}
	if tr, ok := ParseTransfer(b); ok {
		c := tr.CDB()
		back, _ := ParseTransfer(c.Bytes())
		same(t, "transfer", back, tr)
	}
	if q, ok := ParseInquiryCDB(b); ok {
		c := q.CDB()
		back, _ := ParseInquiryCDB(c.Bytes())
		same(t, "INQUIRY", back, q)
	}
	if sel, n, ok := ParseReportLUNsCDB(b); ok {
		c := ReportLUNs(sel, n)
		sel2, n2, _ := ParseReportLUNsCDB(c.Bytes())
		same(t, "REPORT LUNS", []any{sel2, n2}, []any{sel, n})
	}
	if desc, n, ok := ParseRequestSenseCDB(b); ok {
		c := RequestSense(desc, n)
		desc2, n2, _ := ParseRequestSenseCDB(c.Bytes())
		same(t, "REQUEST SENSE", []any{desc2, n2}, []any{desc, n})
	}
	if n, ok := ParseReadCapacity16CDB(b); ok {
		c := ReadCapacity16(n)
		n2, _ := ParseReadCapacity16CDB(c.Bytes())
		same(t, "READ CAPACITY(16)", n2, n)
	}
	if lba, n, ok := ParseGetLBAStatusCDB(b); ok {
		c := GetLBAStatus(lba, n)
		lba2, n2, _ := ParseGetLBAStatusCDB(c.Bytes())
		same(t, "GET LBA STATUS", []any{lba2, n2}, []any{lba, n})
	}
	if m, ok := ParseModeSenseCDB(b); ok {
		c := m.CDB()
		back, _ := ParseModeSenseCDB(c.Bytes())
		same(t, "MODE SENSE", back, m)
	}
	if m, ok := ParseModeSelectCDB(b); ok {
		c := m.CDB()
		back, _ := ParseModeSelectCDB(c.Bytes())
		same(t, "MODE SELECT", back, m)
	}
	if anchor, n, ok := ParseUnmapCDB(b); ok {
		c := Unmap(anchor, n)
		anchor2, n2, _ := ParseUnmapCDB(c.Bytes())
		same(t, "UNMAP", []any{anchor2, n2}, []any{anchor, n})
	}
	if s, ok := ParseStartStopCDB(b); ok {
		c := s.CDB()
		back, _ := ParseStartStopCDB(c.Bytes())
		same(t, "START STOP UNIT", back, s)
	}
	if r, ok := ParseReportOpcodesCDB(b); ok {
		c := r.CDB()
		back, _ := ParseReportOpcodesCDB(c.Bytes())
		same(t, "REPORT SUPPORTED OPERATION CODES", back, r)
	}
	if sa, n, ok := ParsePersistentReserveIn(b); ok {
		c := PersistentReserveIn(sa, n)
		sa2, n2, _ := ParsePersistentReserveIn(c.Bytes())
		same(t, "PERSISTENT RESERVE IN", []any{sa2, n2}, []any{sa, n})
	}
	if sa, scope, typ, n, ok := ParsePersistentReserveOut(b); ok && scope == 0 {
		c := PersistentReserveOut(sa, typ, n)
		sa2, _, typ2, n2, _ := ParsePersistentReserveOut(c.Bytes())
		same(t, "PERSISTENT RESERVE OUT", []any{sa2, typ2, n2}, []any{sa, typ, n})
	}
}

func fuzzSense(t *testing.T, b []byte) {
	if err := Error(b, StatusCheckCondition, b); err == nil || strings.ContainsAny(err.Error(), "\n\x1b") {
		t.Errorf("CHECK CONDITION is the error %q", err)
	}
	s, ok := ParseSense(b)
	if !ok {
		return
	}
	_ = s.String()
	// Read, but not written where they mean nothing.
	if !s.HasInformation {
		s.Information = 0
	}
	if !s.HasBit {
		s.BitPointer = 0
	}
	s.Descriptor = false
	if s.Information <= 1<<32-1 && s.CommandInfo <= 1<<32-1 {
		back, _ := ParseSense(s.AppendFixed(nil))
		same(t, "fixed sense", back, s)
	}
	s.Descriptor, s.FilemarkEOMILI = true, 0
	back, _ := ParseSense(s.AppendDescriptor(nil))
	same(t, "descriptor sense", back, s)
}

func fuzzInquiry(t *testing.T, b []byte) {
	if d, err := ParseInquiry(b); err == nil {
		if d.Received > len(b) || len(b) >= 5 && d.Received > d.Length {
			t.Errorf("%d bytes received, counted as %d of %d", len(b), d.Received, d.Length)
		}
		back, err := ParseInquiry(d.Append(nil))
		if err != nil {
			t.Error(err)
		}
		d.Received, d.Length, back.Received, back.Length = 0, 0, 0, 0
		if strings.Contains(d.Vendor+d.Product+d.Revision, `\`) { // escaped, or one that the device has
			d.Vendor, d.Product, d.Revision, back.Vendor, back.Product, back.Revision = "", "", "", "", "", ""
		}
		same(t, "INQUIRY data", back, d)
	}
	for _, p := range []uint8{VPDSupportedPages, VPDSerialNumber, VPDDeviceID, VPDBlockLimits, VPDBlockCharacteristics, VPDProvisioning} {
		v, err := ParseVPD(b, p)
		if err != nil {
			continue
		}
		if v.Page != p || len(v.Data) > v.Length || len(v.Data) > len(b)-4 {
			t.Errorf("page %#x: %+v", p, v)
		}
		again := func(data []byte) VPD { return VPD{Page: p, Length: len(data), Data: data} }
		if strings.ContainsAny(v.SerialNumber(), "\n\x1b") {
			t.Errorf("serial number %q", v.SerialNumber())
		}
		if ds, err := v.Designators(); err == nil {
			var data []byte
			for _, d := range ds {
				_ = d.String()
				data = AppendDesignator(data, d)
			}
			back, _ := again(data).Designators()
			same(t, "designators", back, ds)
		}
		if l, err := v.BlockLimits(); err == nil {
			if !l.UnmapAlignmentValid {
				l.UnmapAlignment = 0
			}
			l.UnmapInfo, l.WriteSameLimited = true, true // a whole page is written
			back, _ := again(l.Append(nil)).BlockLimits()
			same(t, "block limits", back, l)
		}
		if c, err := v.BlockCharacteristics(); err == nil {
			back, _ := again(c.Append(nil)).BlockCharacteristics()
			same(t, "block characteristics", back, c)
		}
		if pr, err := v.Provisioning(); err == nil {
			back, _ := again(pr.Append(nil)).Provisioning()
			same(t, "provisioning", back, pr)
		}
	}
}

func fuzzParameterData(t *testing.T, b []byte) {
	for _, ten := range []bool{false, true} {
		for _, sel := range []bool{false, true} {
			m, err := ParseMode(b, ten, sel)
			sum := 0
			for i, p := range m.Pages {
				sum += len(p.Data)
				if whole := len(p.Data) == p.Length; !whole && (err == nil || i < len(m.Pages)-1) {
					t.Errorf("mode page %#x: %d bytes of %d and %v", p.Page, len(p.Data), p.Length, err)
				}
			}
			if sum > len(b) {
				t.Errorf("%d bytes of mode pages in %d", sum, len(b))
			}
			if err == nil && m.Header.LongLBA && !ten {
				t.Error("a long block descriptor in MODE SENSE(6) data")
			}
		}
	}
	if luns, total, err := ParseLUNList(b); err == nil {
		if len(luns) > total || len(luns) > (len(b)-8)/8 {
			t.Errorf("%d LUNs of %d in %d bytes", len(luns), total, len(b))
		}
		back, n, _ := ParseLUNList(AppendLUNList(nil, luns))
		same(t, "LUN list", back, luns)
		same(t, "LUN count", n, len(luns))
	}
	if c, err := ParseCapacity16(b); err == nil {
		back, _ := ParseCapacity16(c.Append(nil))
		same(t, "READ CAPACITY(16) data", back, c)
	}
	if c, tooBig, err := ParseCapacity10(b); err == nil {
		back, tooBig2, _ := ParseCapacity10(c.Append10(nil))
		same(t, "READ CAPACITY(10) data", []any{back, tooBig2}, []any{c, tooBig})
	}
	var extents []Extent
	if err := UnmapExtents(b, func(e Extent) bool { extents = append(extents, e); return true }); err == nil {
		var back []Extent
		err := UnmapExtents(AppendUnmap(nil, extents), func(e Extent) bool { back = append(back, e); return true })
		if err != nil {
			t.Error(err)
		}
		same(t, "UNMAP list", back, extents)
	} else if extents != nil {
		t.Error("extents of a list that is too short")
	}
	if list, err := ParseLBAStatus(b); err == nil {
		back, _ := ParseLBAStatus(AppendLBAStatus(nil, list))
		same(t, "LBA status", back, list)
	}
	if list, err := ParseCommandList(b); err == nil {
		for _, rctd := range []bool{false, true} {
			back, _ := ParseCommandList(AppendCommandList(nil, list, rctd))
			same(t, "command list", back, list)
		}
		for _, c := range list {
			_ = c.Name()
		}
	}
	if c, err := ParseCommandSupport(b); err == nil {
		for _, rctd := range []bool{false, true} {
			back, _ := ParseCommandSupport(c.Append(nil, rctd))
			same(t, "command support", back, c)
		}
	}
}

func fuzzReservations(t *testing.T, b []byte) {
	if gen, keys, total, err := ParsePRKeys(b); err == nil {
		if len(keys) > total || len(keys) > (len(b)-8)/8 {
			t.Errorf("%d keys of %d in %d bytes", len(keys), total, len(b))
		}
		gen2, back, _, _ := ParsePRKeys(AppendPRKeys(nil, gen, keys))
		same(t, "keys", []any{gen2, back}, []any{gen, keys})
	}
	if r, err := ParsePRReservation(b); err == nil {
		back, _ := ParsePRReservation(r.Append(nil))
		same(t, "reservation", back, r)
	}
	if gen, list, err := ParsePRFullStatus(b); err == nil {
		for i := range list {
			if !list[i].Holder { // then they mean nothing, and are not written
				list[i].Scope, list[i].Type = 0, 0
			}
		}
		gen2, back, _ := ParsePRFullStatus(AppendPRFullStatus(nil, gen, list))
		same(t, "full status", []any{gen2, back}, []any{gen, list})
	}
	if p, err := ParsePRMoveParams(b); err == nil {
		back, _ := ParsePRMoveParams(p.Append(nil))
		same(t, "REGISTER AND MOVE", back, p)
	}
	if p, err := ParsePROutParams(b); err == nil {
		back, _ := ParsePROutParams(p.Append(nil))
		same(t, "PERSISTENT RESERVE OUT list", back, p)
	}
	if c, err := ParsePRCapabilities(b); err == nil {
		back, _ := ParsePRCapabilities(c.Append(nil))
		same(t, "capabilities", back, c)
	}
	if id, err := ParseSRPTransportID(b); err == nil {
		whole := SRPTransportID(id)
		back, _ := ParseSRPTransportID(whole[:])
		same(t, "transport id", back, id)
	}
}
