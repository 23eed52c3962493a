package lun

import (
	"bytes"
	"encoding/hex"

	"srp-initiator/srp/scsi"
)

// command is one row of what the device server supports; REPORT SUPPORTED OPERATION CODES shows the table, and Begin
// refuses what is not in it.
type command struct {
	op    scsi.Opcode
	sa    uint8
	hasSA bool
	usage string // CDB usage map in hexadecimal, opcode first
}

var commands = []command{
	{op: scsi.OpTestUnitReady, usage: "000000000000"},
	{op: scsi.OpRequestSense, usage: "03010000ff00"},
	{op: scsi.OpRead6, usage: "081fffffff00"},
	{op: scsi.OpWrite6, usage: "0a1fffffff00"},
	{op: scsi.OpInquiry, usage: "1201ffffff00"},
	{op: scsi.OpModeSelect6, usage: "15100000ff00"},
	{op: scsi.OpModeSense6, usage: "1a08ffffff00"},
	{op: scsi.OpStartStopUnit, usage: "1b010000f700"},
	{op: scsi.OpPreventAllowRemoval, usage: "1e0000000300"},
	{op: scsi.OpReadCapacity10, usage: "25000000000000000000"},
	{op: scsi.OpRead10, usage: "28f8ffffffff00ffff00"},
	{op: scsi.OpWrite10, usage: "2af8ffffffff00ffff00"},
	{op: scsi.OpWriteVerify10, usage: "2ef0ffffffff00ffff00"},
	{op: scsi.OpVerify10, usage: "2ff6ffffffff00ffff00"},
	{op: scsi.OpSynchronizeCache10, usage: "3502ffffffff00ffff00"},
	{op: scsi.OpWriteSame10, usage: "41f8ffffffff00ffff00"},
	{op: scsi.OpUnmap, usage: "42010000000000ffff00"},
	{op: scsi.OpModeSelect10, usage: "551000000000" + "00ffff00"},
	{op: scsi.OpModeSense10, usage: "5a18ffff000000ffff00"},
	{op: scsi.OpPersistentReserveIn, sa: scsi.PRReadKeys, hasSA: true, usage: "5e1f0000000000ffff00"},
	{op: scsi.OpPersistentReserveIn, sa: scsi.PRReadReservation, hasSA: true, usage: "5e1f0000000000ffff00"},
	{op: scsi.OpPersistentReserveIn, sa: scsi.PRReportCapabilities, hasSA: true, usage: "5e1f0000000000ffff00"},
	{op: scsi.OpPersistentReserveIn, sa: scsi.PRReadFullStatus, hasSA: true, usage: "5e1f0000000000ffff00"},
	{op: scsi.OpPersistentReserveOut, sa: scsi.PRRegister, hasSA: true, usage: "5f1fff0000ffffffff00"},
	{op: scsi.OpPersistentReserveOut, sa: scsi.PRReserve, hasSA: true, usage: "5f1fff0000ffffffff00"},
	{op: scsi.OpPersistentReserveOut, sa: scsi.PRRelease, hasSA: true, usage: "5f1fff0000ffffffff00"},
	{op: scsi.OpPersistentReserveOut, sa: scsi.PRClear, hasSA: true, usage: "5f1fff0000ffffffff00"},
	{op: scsi.OpPersistentReserveOut, sa: scsi.PRPreempt, hasSA: true, usage: "5f1fff0000ffffffff00"},
	{op: scsi.OpPersistentReserveOut, sa: scsi.PRPreemptAbort, hasSA: true, usage: "5f1fff0000ffffffff00"},
	{op: scsi.OpPersistentReserveOut, sa: scsi.PRRegisterIgnoreKey, hasSA: true, usage: "5f1fff0000ffffffff00"},
	{op: scsi.OpPersistentReserveOut, sa: scsi.PRRegisterMove, hasSA: true, usage: "5f1fff0000ffffffff00"},
	{op: scsi.OpRead16, usage: "88f8ffffffffffffffffffffffff0000"},
	{op: scsi.OpCompareAndWrite, usage: "89f8ffffffffffffffff000000ff0000"},
	{op: scsi.OpWrite16, usage: "8af8ffffffffffffffffffffffff0000"},
	{op: scsi.OpWriteVerify16, usage: "8ef0ffffffffffffffffffffffff0000"},
	{op: scsi.OpVerify16, usage: "8ff6ffffffffffffffffffffffff0000"},
	{op: scsi.OpSynchronizeCache16, usage: "9102ffffffffffffffffffffffff0000"},
	{op: scsi.OpWriteSame16, usage: "93f9ffffffffffffffffffffffff0000"},
	{op: scsi.OpServiceActionIn16, sa: scsi.SAReadCapacity16, hasSA: true, usage: "9e1f0000000000000000ffffffff0000"},
	{op: scsi.OpServiceActionIn16, sa: scsi.SAGetLBAStatus, hasSA: true, usage: "9e1fffffffffffffffffffffffff0000"},
	{op: scsi.OpReportLUNs, usage: "a000ff000000ffffffff0000"},
	{op: scsi.OpMaintenanceIn, sa: scsi.SAReportSupportedOpcodes, hasSA: true, usage: "a31f87ffffffffffffff0000"},
	{op: scsi.OpMaintenanceIn, sa: scsi.SAReportSupportedTMFs, hasSA: true, usage: "a31f80000000ffffffff0000"},
	{op: scsi.OpRead12, usage: "a8f8ffffffffffffffff0000"},
	{op: scsi.OpWrite12, usage: "aaf8ffffffffffffffff0000"},
	{op: scsi.OpWriteVerify12, usage: "aef0ffffffffffffffff0000"},
	{op: scsi.OpVerify12, usage: "aff6ffffffffffffffff0000"},
}

// beginNoUnit answers for a LUN that does not exist (SPC-4, 6.6.1 and 4.5.? via SAM-5 4.12): INQUIRY says so,
// REPORT LUNS works anywhere, REQUEST SENSE reports it, all else is refused.
func (m *Map) beginNoUnit(t *Task, op scsi.Opcode) {
	switch op {
	case scsi.OpInquiry:
		q, _ := scsi.ParseInquiryCDB(t.CDB)
		if q.EVPD || q.Page != 0 {
			t.badField(1)
			return
		}
		d := scsi.InquiryData{Qualifier: scsi.QualifierNotThere, DeviceType: scsi.TypeUnknown, Version: 6, ResponseFormat: 2, HiSup: true, CmdQueue: true}
		t.give(d.Append(t.Scratch[:0]), int(q.AllocLen))
	case scsi.OpReportLUNs:
		m.reportLUNs(t)
	case scsi.OpRequestSense:
		desc, alloc, _ := scsi.ParseRequestSenseCDB(t.CDB)
		s := scsi.Sense{Key: scsi.IllegalRequest, ASC: scsi.ASCLUNotSupported, Descriptor: desc}
		t.give(s.Append(t.Scratch[:0]), int(alloc))
	default:
		t.fail(scsi.IllegalRequest, scsi.ASCLUNotSupported)
	}
}

func (m *Map) reportLUNs(t *Task) {
	sel, alloc, ok := scsi.ParseReportLUNsCDB(t.CDB)
	switch {
	case !ok:
		t.badField(0)
	case sel > 2:
		t.badField(2)
	case alloc < 16:
		t.badField(6)
	default:
		luns := m.list()
		if sel == 1 { // well-known logical units: none
			luns = nil
		} else if len(luns) == 0 || luns[0] != (scsi.LUN{}) {
			luns = append([]scsi.LUN{{}}, luns...)
		}
		t.give(scsi.AppendLUNList(t.Scratch[:0], luns), int(min(alloc, ScratchLen)))
	}
}

// beginOther is every command but READ and WRITE.
func (m *Map) beginOther(t *Task, op scsi.Opcode) {
	u, n := t.unit, t.nexus
	switch op {
	case scsi.OpTestUnitReady, scsi.OpPreventAllowRemoval:
		t.finish(scsi.StatusGood)
	case scsi.OpInquiry:
		u.inquiry(t)
	case scsi.OpReportLUNs:
		m.reportLUNs(t)
	case scsi.OpRequestSense:
		desc, alloc, _ := scsi.ParseRequestSenseCDB(t.CDB)
		s := scsi.Sense{Descriptor: desc}
		if n.pending.Load() > 0 {
			if asc, ok := n.takeUA(); ok {
				s.Key, s.ASC = scsi.UnitAttention, asc
			}
		}
		t.give(s.Append(t.Scratch[:0]), int(alloc))
	case scsi.OpReadCapacity10:
		if t.CDB[8]&1 == 0 && be.Uint32(t.CDB[2:]) != 0 {
			t.badField(2)
			return
		}
		t.give(u.Capacity().Append10(t.Scratch[:0]), 8)
	case scsi.OpServiceActionIn16:
		switch t.CDB[1] & 0x1f {
		case scsi.SAReadCapacity16:
			alloc, _ := scsi.ParseReadCapacity16CDB(t.CDB)
			t.give(u.Capacity().Append(t.Scratch[:0]), int(min(alloc, ScratchLen)))
		case scsi.SAGetLBAStatus:
			u.lbaStatus(t)
		default:
			t.badField(1)
		}
	case scsi.OpModeSense6, scsi.OpModeSense10:
		u.modeSense(t)
	case scsi.OpModeSelect6, scsi.OpModeSelect10:
		c, _ := scsi.ParseModeSelectCDB(t.CDB)
		switch {
		case !c.PF:
			t.badField(1)
		case c.SP:
			t.fail(scsi.IllegalRequest, scsi.ASCInvalidFieldInCDB)
		default:
			t.wholeOut(int64(c.ParamLen))
		}
	case scsi.OpStartStopUnit:
		s, _ := scsi.ParseStartStopCDB(t.CDB)
		switch {
		case s.LoEj:
			t.badField(4)
		case s.NoFlush || s.Start && s.PowerCondition == 0:
			t.finish(scsi.StatusGood)
		default: // what is written is durable before the unit may lose its power (SBC-3, 5.25); it goes on as before
			t.sync(s.Immed)
		}
	case scsi.OpSynchronizeCache10, scsi.OpSynchronizeCache16:
		if !t.checkTransfer() {
			return
		}
		t.sync(t.tr.Immed)
	case scsi.OpVerify10, scsi.OpVerify12, scsi.OpVerify16:
		u.verify(t)
	case scsi.OpWriteVerify10, scsi.OpWriteVerify12, scsi.OpWriteVerify16:
		// Without BYTCHK the medium is verified, which a store's Sync does; data that went straight into the store cannot be compared with it.
		if tr, _ := scsi.ParseTransfer(t.CDB); tr.BytChk > 0 {
			t.badField(1)
			return
		}
		t.beginTransfer()
	case scsi.OpWriteSame10, scsi.OpWriteSame16:
		u.writeSame(t)
	case scsi.OpCompareAndWrite:
		if !t.checkTransfer() {
			return
		}
		if u.limits.MaxCompareAndWrite == 0 {
			t.fail(scsi.IllegalRequest, scsi.ASCInvalidOpcode)
			return
		}
		if t.tr.Blocks > uint32(u.limits.MaxCompareAndWrite) || int64(t.tr.Blocks)<<u.shift*2 > WholeLen {
			t.badField(13)
			return
		}
		t.wholeOut(2 * int64(t.tr.Blocks) << u.shift)
	case scsi.OpUnmap:
		anchor, n, _ := scsi.ParseUnmapCDB(t.CDB)
		switch {
		case u.limits.MaxUnmapBlocks == 0 || u.limits.MaxUnmapDescriptors == 0:
			t.fail(scsi.IllegalRequest, scsi.ASCInvalidOpcode)
		case anchor:
			t.badField(1)
		case u.readOnly || u.swp.Load():
			t.fail(scsi.DataProtect, scsi.ASCWriteProtected)
		default:
			t.wholeOut(int64(n))
		}
	case scsi.OpPersistentReserveIn:
		u.reserveIn(t)
	case scsi.OpPersistentReserveOut:
		u.beginReserveOut(t)
	case scsi.OpMaintenanceIn:
		switch t.CDB[1] & 0x1f {
		case scsi.SAReportSupportedOpcodes:
			u.reportOpcodes(t)
		case scsi.SAReportSupportedTMFs:
			alloc := be.Uint32(t.CDB[6:])
			if alloc < 4 {
				t.badField(6)
				return
			}
			// Abort task, abort task set, clear task set, logical unit reset (SPC-4, 6.35).
			data := append(t.Scratch[:0], 0xd8, 0, 0, 0)
			if t.CDB[2]&0x80 != 0 { // REPD: the extended form, with no timeouts stated
				data = append(data, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
				data[3] = 12
			}
			t.give(data, int(min(alloc, ScratchLen)))
		default:
			t.badField(1)
		}
	default:
		t.fail(scsi.IllegalRequest, scsi.ASCInvalidOpcode)
	}
}

// wholeOut asks for n bytes in one piece; none end the task.
func (t *Task) wholeOut(n int64) {
	switch {
	case n == 0:
		t.finish(scsi.StatusGood)
	case n > WholeLen:
		t.fail(scsi.IllegalRequest, scsi.ASCParameterListLength)
	default:
		t.Way, t.OutLen = WayWhole, n
	}
}

// FinishOut executes a WayWhole task; out is exactly OutLen bytes. The task is Done afterwards.
func (t *Task) FinishOut(out []byte) {
	u := t.unit
	switch scsi.Opcode(t.CDB[0]) {
	case scsi.OpModeSelect6, scsi.OpModeSelect10:
		u.modeSelect(t, out)
	case scsi.OpWriteSame10, scsi.OpWriteSame16:
		u.doWriteSame(t, out)
	case scsi.OpVerify10, scsi.OpVerify12, scsi.OpVerify16:
		u.verifySame(t, out)
	case scsi.OpCompareAndWrite:
		u.compareAndWrite(t, out)
	case scsi.OpUnmap:
		u.unmap(t, out)
	case scsi.OpPersistentReserveOut:
		u.reserveOut(t, out)
	}
	if !t.Done {
		t.finish(scsi.StatusGood)
	}
}

// Finish executes a WayWork task. The task is Done afterwards.
func (t *Task) Finish() {
	switch t.tr.Op {
	case scsi.OpWriteSame10, scsi.OpWriteSame16:
		t.unit.doWriteSame(t, nil)
	default:
		t.flush()
	}
	if !t.Done {
		t.finish(scsi.StatusGood)
	}
}

// sync is a command that makes what was written durable: before its status, or with IMMED after it (SBC-3, 5.22). A range is not looked
// at: all of the cache is written, as SBC-3 allows.
func (t *Task) sync(immed bool) {
	if immed {
		t.unit.flusher.begin(t.unit.store)
		t.finish(scsi.StatusGood)
		return
	}
	t.Way = WayWork
}

// flush makes what was written durable, or fails.
func (t *Task) flush() {
	if err := t.unit.flush(); err != nil {
		t.storeError(err, true, t.off)
	}
}

// written is the end of a command that has written without FUA: with the write cache off its data are durable before its status.
func (t *Task) written() {
	if t.unit.store.WriteBack() && !t.unit.writeBack.Load() {
		t.flush()
	}
}

// Capacity is what READ CAPACITY(16) reports.
func (u *Unit) Capacity() scsi.Capacity {
	return scsi.Capacity{LastLBA: u.blocks - 1, BlockSize: u.blockSize, Provisioned: u.limits.MaxUnmapBlocks != 0, UnmappedZero: u.limits.MaxUnmapBlocks != 0}
}

func (u *Unit) inquiry(t *Task) {
	q, _ := scsi.ParseInquiryCDB(t.CDB)
	if !q.EVPD {
		if q.Page != 0 {
			t.badField(2)
			return
		}
		d := scsi.InquiryData{
			Version: 6, ResponseFormat: 2, HiSup: true, CmdQueue: true, Vendor: u.cfg.Vendor, Product: u.cfg.Product, Revision: u.cfg.Revision,
			// SAM-5, SRP (T10/1415-D), SPC-4, SBC-3 (SPC-4, annex E, version descriptor values, no revision claimed).
			VersionDescs: []uint16{0x00a0, 0x0940, 0x0460, 0x04c0},
		}
		t.give(d.Append(t.Scratch[:0]), int(q.AllocLen))
		return
	}
	body := make([]byte, 0, 256)
	switch q.Page {
	case scsi.VPDSupportedPages:
		body = append(body, scsi.VPDSupportedPages, scsi.VPDSerialNumber, scsi.VPDDeviceID, scsi.VPDBlockLimits, scsi.VPDBlockCharacteristics, scsi.VPDProvisioning)
	case scsi.VPDSerialNumber:
		body = append(body, u.cfg.Serial...)
	case scsi.VPDDeviceID:
		body = scsi.AppendDesignator(body, scsi.Designator{CodeSet: scsi.CodeBinary, Type: scsi.DesignatorNAA, ID: be.AppendUint64(nil, u.cfg.NAA)})
		t10 := append(fixed(u.cfg.Vendor, 8), fixed(u.cfg.Product, 16)...)
		body = scsi.AppendDesignator(body, scsi.Designator{CodeSet: scsi.CodeASCII, Type: scsi.DesignatorT10, ID: append(t10, u.cfg.Serial...)})
		body = scsi.AppendDesignator(body, scsi.Designator{CodeSet: scsi.CodeBinary, Type: scsi.DesignatorRelativePort, Association: scsi.AssocPort, PIV: true, Protocol: 4, ID: []byte{0, 0, 0, 1}})
	case scsi.VPDBlockLimits:
		body = u.limits.Append(body)
	case scsi.VPDBlockCharacteristics:
		body = scsi.BlockCharacteristics{RotationRate: 1}.Append(body)
	case scsi.VPDProvisioning:
		on := u.limits.MaxUnmapBlocks != 0
		p := scsi.Provisioning{Unmap: on, WriteSame16Unmap: on, WriteSame10Unmap: on}
		if on {
			p.ReadsZero, p.Type = 1, scsi.ProvisioningThin
		}
		body = p.Append(body)
	default:
		t.badField(2)
		return
	}
	t.give(scsi.AppendVPD(t.Scratch[:0], scsi.TypeDisk, q.Page, body), int(q.AllocLen))
}

func fixed(s string, n int) []byte {
	b := bytes.Repeat([]byte{' '}, n)
	copy(b, s)
	return b
}

// lbaStatus reports everything as mapped: the stores do not tell what they have given back.
func (u *Unit) lbaStatus(t *Task) {
	lba, alloc, _ := scsi.ParseGetLBAStatusCDB(t.CDB)
	if lba >= u.blocks {
		t.outOfRange(lba)
		return
	}
	n := uint32(min(u.blocks-lba, 1<<32-1))
	list := []scsi.LBAStatus{{Extent: scsi.Extent{LBA: lba, Blocks: n}, State: scsi.LBAMapped}}
	t.give(scsi.AppendLBAStatus(t.Scratch[:0], list), int(min(alloc, ScratchLen)))
}

// verify is VERIFY: BYTCHK 0 checks only the range, 1 compares with data-out, 3 compares each block with one block of data-out.
func (u *Unit) verify(t *Task) {
	if !t.checkTransfer() {
		return
	}
	switch {
	case t.tr.BytChk == 0 || t.tr.Blocks == 0:
		t.finish(scsi.StatusGood)
	case t.tr.BytChk == 1:
		t.Way, t.OutLen = WayVerify, int64(t.tr.Blocks)<<u.shift
	case t.tr.BytChk == 3:
		if m := u.limits.MaxWriteSame; m != 0 && uint64(t.tr.Blocks) > m { // the same work as WRITE SAME, and the same bound
			t.badField(lengthField(t.tr.Op))
			return
		}
		t.wholeOut(int64(u.blockSize))
	default:
		t.badField(1)
	}
}

func (u *Unit) verifySame(t *Task, block []byte) {
	for i := range int64(t.tr.Blocks) {
		if !t.compare(block, t.off+i<<u.shift) {
			return
		}
	}
}

func (u *Unit) writeSame(t *Task) {
	if !t.checkTransfer() {
		return
	}
	lenField := lengthField(t.tr.Op)
	if t.tr.Blocks == 0 {
		if u.limits.WSNZ {
			t.badField(lenField)
			return
		}
		rest := u.blocks - t.tr.LBA
		if rest > 1<<32-1 || u.limits.MaxWriteSame != 0 && rest > u.limits.MaxWriteSame {
			t.badField(lenField)
			return
		}
		t.tr.Blocks = uint32(rest)
	}
	if m := u.limits.MaxWriteSame; m != 0 && uint64(t.tr.Blocks) > m {
		t.badField(lenField)
		return
	}
	if t.tr.Anchor {
		t.badField(1)
		return
	}
	if t.tr.NDOB {
		t.Way = WayWork
		return
	}
	t.wholeOut(int64(u.blockSize))
}

// doWriteSame writes block, or zeros when it is nil, to all blocks of t. With UNMAP zeros are given back.
func (u *Unit) doWriteSame(t *Task, block []byte) {
	n := int64(t.tr.Blocks) << u.shift
	if allZero(block) {
		u.lock(t.off, n, true)
		err := u.store.Zero(t.off, n, t.tr.Unmap)
		u.unlock(t.off, n, true)
		if err != nil {
			t.storeError(err, true, t.off)
			return
		}
		t.written()
		return
	}
	pattern := bytes.Repeat(block, int(min(n, 64<<10)>>u.shift))
	for off := t.off; n > 0; {
		w := min(n, int64(len(pattern)))
		u.lock(off, w, true)
		_, err := u.store.WriteAt(pattern[:w], off)
		u.unlock(off, w, true)
		if err != nil {
			t.storeError(err, true, off)
			return
		}
		off, n = off+w, n-w
	}
	t.written()
}

func allZero(b []byte) bool {
	for _, v := range b {
		if v != 0 {
			return false
		}
	}
	return true
}

// compareAndWrite compares the blocks with the first half of out and writes the second half, with nothing else between (SBC-3, 5.2).
func (u *Unit) compareAndWrite(t *Task, out []byte) {
	n := int64(len(out) / 2)
	u.directMu.Lock()
	defer u.directMu.Unlock()
	if u.overlapsDirectLocked(t.off, n) {
		t.finish(scsi.StatusBusy)
		return
	}
	u.lock(t.off, n, true)
	defer u.unlock(t.off, n, true)
	have := t.Scratch
	for at := int64(0); at < n; {
		c := min(n-at, int64(len(have)))
		if _, err := u.store.ReadAt(have[:c], t.off+at); err != nil {
			t.storeError(err, false, t.off+at)
			return
		}
		want := out[at : at+c]
		if !bytes.Equal(have[:c], want) {
			for i := range want {
				if have[i] != want[i] {
					// The information field is the offset of the first difference (SBC-3, 5.2).
					t.Fail(scsi.Sense{Key: scsi.Miscompare, ASC: scsi.ASCMiscompareDuringVerify, HasInformation: true, Information: uint64(at) + uint64(i)})
					return
				}
			}
		}
		at += c
	}
	if _, err := u.store.WriteAt(out[n:], t.off); err != nil {
		t.storeError(err, true, t.off)
		return
	}
	if u.store.WriteBack() && (t.tr.FUA || !u.writeBack.Load()) {
		t.flush()
	}
}

func (u *Unit) unmap(t *Task, list []byte) {
	if len(list) < 8 {
		t.fail(scsi.IllegalRequest, scsi.ASCParameterListLength)
		return
	}
	var extents, blocks uint64
	err := scsi.UnmapExtents(list, func(e scsi.Extent) bool {
		extents++
		blocks += uint64(e.Blocks)
		if e.LBA > u.blocks || uint64(e.Blocks) > u.blocks-e.LBA {
			t.outOfRange(e.LBA)
			return false
		}
		return true
	})
	switch {
	case t.Done:
		return
	case err != nil:
		t.fail(scsi.IllegalRequest, scsi.ASCParameterListLength)
		return
	case u.limits.MaxUnmapDescriptors != 1<<32-1 && extents > uint64(u.limits.MaxUnmapDescriptors),
		u.limits.MaxUnmapBlocks != 1<<32-1 && blocks > uint64(u.limits.MaxUnmapBlocks):
		t.badParam(2)
		return
	}
	// The list was checked whole before anything is unmapped.
	_ = scsi.UnmapExtents(list, func(e scsi.Extent) bool {
		if e.Blocks == 0 {
			return true
		}
		off, n := int64(e.LBA)<<u.shift, int64(e.Blocks)<<u.shift
		u.lock(off, n, true)
		err := u.store.Zero(off, n, true)
		u.unlock(off, n, true)
		if err != nil {
			t.storeError(err, true, off)
		}
		return err == nil
	})
	if !t.Done {
		t.written()
	}
}

func (u *Unit) reportOpcodes(t *Task) {
	r, _ := scsi.ParseReportOpcodesCDB(t.CDB)
	if r.Options == scsi.ReportAllOpcodes {
		list := make([]scsi.CommandDescriptor, 0, len(commands))
		for _, c := range commands {
			list = append(list, scsi.CommandDescriptor{Opcode: c.op, HasServiceAction: c.hasSA, ServiceAction: uint16(c.sa), CDBLen: uint16(len(c.usage) / 2)})
		}
		t.give(scsi.AppendCommandList(t.Scratch[:0], list, r.RCTD), int(min(r.AllocLen, ScratchLen)))
		return
	}
	known, withSA := false, false
	var found *command
	for i := range commands {
		c := &commands[i]
		if c.op != r.Opcode {
			continue
		}
		known, withSA = true, c.hasSA
		if !c.hasSA && r.ServiceAction == 0 || c.hasSA && uint16(c.sa) == r.ServiceAction {
			found = c
		}
	}
	switch {
	case r.Options > scsi.ReportOneOpcodeOrAction,
		r.Options == scsi.ReportOneOpcode && known && withSA,
		r.Options == scsi.ReportOneServiceAction && known && !withSA:
		t.badField(2)
		return
	case r.Options == scsi.ReportOneOpcode && known:
		for i := range commands {
			if commands[i].op == r.Opcode {
				found = &commands[i]
			}
		}
	}
	s := scsi.CommandSupport{Support: scsi.CommandUnsupported}
	if found != nil {
		s.Support = scsi.CommandSupported
		s.Usage, _ = hex.DecodeString(found.usage)
	}
	t.give(s.Append(t.Scratch[:0], r.RCTD && found != nil), int(min(r.AllocLen, ScratchLen)))
}
