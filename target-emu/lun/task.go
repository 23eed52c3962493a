package lun

import (
	"bytes"
	"errors"
	"syscall"

	"srp-initiator/srp/scsi"
)

// Way says how a task's data moves.
type Way uint8

const (
	WayNone   Way = iota // no data, or Done
	WayIn                // InLen bytes composed in Scratch
	WayRead              // InLen bytes streamed by ReadChunk or Direct
	WayWrite             // OutLen bytes streamed by WriteChunk or Direct
	WayVerify            // OutLen bytes streamed by WriteChunk, which compares
	WayWhole             // OutLen bytes in one buffer for FinishOut
	WayWork              // no data, but work in the store: Finish
)

// SenseLen is the most sense that a task makes.
const SenseLen = 64

// Task is one command. A transport keeps one per command slot and reuses it: set CDB and
// Scratch, then Begin. The zero value is ready.
type Task struct {
	CDB     []byte // as received; must stay valid until End
	Scratch []byte // ScratchLen bytes for composed data-in

	// Results of Begin.
	Done   bool
	Way    Way
	OutLen int64 // bytes of data-out that the CDB asks for
	InLen  int64 // bytes of data-in that it will give
	// Result, valid when Done.
	Status   scsi.Status
	senseBuf [SenseLen]byte
	senseLen int

	unit   *Unit
	nexus  *Nexus
	tr     scsi.Transfer
	off    int64 // in the store
	direct bool  // noted with beginDirect

	preempted [][16]byte
}

// Sense is the sense data that goes with CHECK CONDITION.
func (t *Task) Sense() []byte { return t.senseBuf[:t.senseLen] }

// Preempted is, after FinishOut of PREEMPT AND ABORT, the initiator ports whose tasks on the unit the transport has to end before it sends the
// status.
func (t *Task) Preempted() [][16]byte { return t.preempted }

// Unit is the unit that executes the task; nil for a LUN that does not exist.
func (t *Task) Unit() *Unit { return t.unit }

func (t *Task) reset() {
	t.Done, t.Way, t.OutLen, t.InLen = false, WayNone, 0, 0
	t.Status, t.senseLen, t.direct = scsi.StatusGood, 0, false
	t.tr, t.off, t.preempted = scsi.Transfer{}, 0, nil
}

// finish ends the task.
func (t *Task) finish(s scsi.Status) {
	t.Done, t.Status = true, s
	t.Way = WayNone
}

// Fail ends the task with CHECK CONDITION and s in the unit's sense format.
func (t *Task) Fail(s scsi.Sense) {
	if t.unit != nil && t.unit.descSense.Load() {
		s.Descriptor = true
	}
	b := s.Append(t.senseBuf[:0])
	t.senseLen = min(len(b), SenseLen)
	t.finish(scsi.StatusCheckCondition)
}

// SetSense ends the task with CHECK CONDITION and raw sense bytes, cut to SenseLen.
func (t *Task) SetSense(raw []byte) {
	t.senseLen = copy(t.senseBuf[:], raw)
	t.finish(scsi.StatusCheckCondition)
}

// SetStatus ends the task with a status that has no sense.
func (t *Task) SetStatus(s scsi.Status) {
	t.senseLen = 0
	t.finish(s)
}

func (t *Task) fail(key scsi.SenseKey, asc scsi.ASC) { t.Fail(scsi.Sense{Key: key, ASC: asc}) }

func (t *Task) badField(i uint16) { t.Fail(scsi.InvalidField(true, i)) }

func (t *Task) badParam(i uint16) { t.Fail(scsi.InvalidField(false, i)) }

// give hands out composed data, cut to the allocation length.
func (t *Task) give(data []byte, allocLen int) {
	n := min(len(data), allocLen, len(t.Scratch))
	if n > 0 && &data[0] != &t.Scratch[0] {
		copy(t.Scratch, data[:n])
	}
	if n == 0 {
		t.finish(scsi.StatusGood)
		return
	}
	t.Way, t.InLen = WayIn, int64(n)
}

// Begin looks at t.CDB, addressed by lun to one of m's units through nexus n (of that unit; nil when there is no such
// unit). It ends the task or sets Way.
func (m *Map) Begin(t *Task, n *Nexus) {
	t.reset()
	t.nexus, t.unit = n, nil
	if n != nil {
		t.unit = n.unit
	}
	if len(t.CDB) < 6 || len(t.CDB) < scsi.CDBLen(t.CDB) {
		t.fail(scsi.IllegalRequest, scsi.ASCInvalidFieldInCDB)
		return
	}
	op := scsi.Opcode(t.CDB[0])
	if t.unit == nil {
		m.beginNoUnit(t, op)
		return
	}
	// INQUIRY, REPORT LUNS and REQUEST SENSE neither report nor clear a unit attention (SAM-5, 5.14).
	if n.pending.Load() > 0 && op != scsi.OpInquiry && op != scsi.OpReportLUNs && op != scsi.OpRequestSense {
		if asc, ok := n.takeUA(); ok {
			t.fail(scsi.UnitAttention, asc)
			return
		}
	}
	if t.unit.reserved.Load() && t.unit.conflicts(n, t.CDB) {
		t.finish(scsi.StatusReservationConflict)
		return
	}
	if c := controlByte(t.CDB); c&0x04 != 0 { // NACA, which INQUIRY says is not supported
		t.badField(uint16(scsi.CDBLen(t.CDB) - 1))
		return
	}
	switch op {
	case scsi.OpRead6, scsi.OpRead10, scsi.OpRead12, scsi.OpRead16,
		scsi.OpWrite6, scsi.OpWrite10, scsi.OpWrite12, scsi.OpWrite16:
		t.beginTransfer()
	default:
		m.beginOther(t, op)
	}
}

func controlByte(cdb []byte) byte {
	n := scsi.CDBLen(cdb)
	if n == 0 || cdb[0] == byte(scsi.OpVariableLength) {
		return 0
	}
	return cdb[n-1]
}

func (t *Task) isWrite() bool {
	switch t.tr.Op {
	case scsi.OpRead6, scsi.OpRead10, scsi.OpRead12, scsi.OpRead16, scsi.OpVerify10, scsi.OpVerify12, scsi.OpVerify16,
		scsi.OpSynchronizeCache10, scsi.OpSynchronizeCache16:
		return false
	}
	return true
}

// checkTransfer parses the CDB into t.tr and checks protection, write protection and range.
func (t *Task) checkTransfer() bool {
	u := t.unit
	tr, ok := scsi.ParseTransfer(t.CDB)
	if !ok {
		t.fail(scsi.IllegalRequest, scsi.ASCInvalidOpcode)
		return false
	}
	t.tr = tr
	if tr.Protect != 0 {
		t.badField(1)
		return false
	}
	if t.isWrite() && (u.readOnly || u.swp.Load()) {
		t.fail(scsi.DataProtect, scsi.ASCWriteProtected)
		return false
	}
	if tr.LBA > u.blocks || uint64(tr.Blocks) > u.blocks-tr.LBA {
		t.outOfRange(tr.LBA)
		return false
	}
	t.off = int64(tr.LBA) << u.shift
	return true
}

// outOfRange refuses a range that begins at lba and runs behind the last block; the information field is the first block that is missing.
func (t *Task) outOfRange(lba uint64) {
	t.Fail(scsi.Sense{Key: scsi.IllegalRequest, ASC: scsi.ASCLBAOutOfRange, HasInformation: true, Information: max(lba, t.unit.blocks)})
}

// beginTransfer is READ and WRITE.
func (t *Task) beginTransfer() {
	if !t.checkTransfer() {
		return
	}
	u := t.unit
	if m := u.limits.MaxTransfer; m != 0 && t.tr.Blocks > m {
		t.badField(lengthField(t.tr.Op))
		return
	}
	n := int64(t.tr.Blocks) << u.shift
	if n == 0 {
		t.finish(scsi.StatusGood)
		return
	}
	if t.isWrite() {
		t.Way, t.OutLen = WayWrite, n
	} else {
		t.Way, t.InLen = WayRead, n
	}
}

// lengthField is the byte number of the transfer length.
func lengthField(op scsi.Opcode) uint16 {
	switch op >> 5 {
	case 0:
		return 4
	case 1, 2:
		return 7
	case 5:
		return 6
	}
	return 10
}

// ReadChunk fills p with data-in from offset at of the task's data, and reports success; on failure the task is Done.
func (t *Task) ReadChunk(p []byte, at int64) bool {
	u := t.unit
	off := t.off + at
	u.lock(off, int64(len(p)), false)
	n, err := u.store.ReadAt(p, off)
	u.unlock(off, int64(len(p)), false)
	if n == len(p) {
		return true
	}
	t.storeError(err, false, off)
	return false
}

// TryReadChunk is ReadChunk where that need wait for nothing; false: it would have to, and nothing has happened.
func (t *Task) TryReadChunk(p []byte, at int64) bool {
	u := t.unit
	off := t.off + at
	if u.slow == nil || !u.tryRLock(off, int64(len(p))) {
		return false
	}
	ok := u.slow.TryReadAt(p, off)
	u.unlock(off, int64(len(p)), false)
	return ok
}

// WriteChunk takes data-out for offset at of the task's data: it writes it, or for WayVerify compares it. On failure
// the task is Done.
func (t *Task) WriteChunk(p []byte, at int64) bool {
	u := t.unit
	off := t.off + at
	if t.Way == WayVerify {
		return t.compare(p, off)
	}
	u.lock(off, int64(len(p)), true)
	n, err := u.store.WriteAt(p, off)
	u.unlock(off, int64(len(p)), true)
	if n == len(p) && err == nil {
		return true
	}
	t.storeError(err, true, off)
	return false
}

// compare checks p against the store at off.
func (t *Task) compare(p []byte, off int64) bool {
	u := t.unit
	for len(p) > 0 {
		n := min(len(p), len(t.Scratch))
		u.lock(off, int64(n), false)
		got, err := u.store.ReadAt(t.Scratch[:n], off)
		u.unlock(off, int64(n), false)
		if got < n {
			t.storeError(err, false, off)
			return false
		}
		if !bytes.Equal(p[:n], t.Scratch[:n]) {
			t.fail(scsi.Miscompare, scsi.ASCMiscompareDuringVerify)
			return false
		}
		p, off = p[n:], off+int64(n)
	}
	return true
}

// Direct finds memory of the store for up to n bytes at offset at of the task's data (WayRead and WayWrite): the index of
// its region, the offset there, and how many bytes run from it; length 0: use the chunk methods. A direct write is
// noted until End, and COMPARE AND WRITE to its blocks answers BUSY meanwhile.
func (t *Task) Direct(at, n int64) (region int, where, length int64) {
	write := t.Way == WayWrite
	region, where, length = t.unit.store.Direct(t.off+at, n, write)
	if write && length > 0 && !t.direct {
		t.direct = true
		t.unit.beginDirect(t.off, t.OutLen)
	}
	return region, where, length
}

// FinishStream ends a streamed task whose data has all moved.
func (t *Task) FinishStream() {
	if t.Done {
		return
	}
	if t.Syncs() {
		if t.flush(); t.Done {
			return
		}
	}
	t.finish(scsi.StatusGood)
}

// Syncs reports that FinishStream will make what was written durable.
func (t *Task) Syncs() bool {
	return t.Way == WayWrite && t.unit.store.WriteBack() && (t.tr.FUA || !t.unit.writeBack.Load() || t.isWriteVerify())
}

func (t *Task) isWriteVerify() bool {
	return t.tr.Op == scsi.OpWriteVerify10 || t.tr.Op == scsi.OpWriteVerify12 || t.tr.Op == scsi.OpWriteVerify16
}

// End releases what the task holds. It is called once, after the last use of memory that Direct named.
func (t *Task) End() {
	if t.direct {
		t.direct = false
		t.unit.endDirect(t.off, t.OutLen)
	}
}

// storeError turns an error of the store into sense data.
func (t *Task) storeError(err error, write bool, off int64) {
	s := scsi.Sense{Key: scsi.MediumError, ASC: scsi.ASCUnrecoveredRead, HasInformation: true, Information: uint64(off) >> t.unit.shift}
	switch {
	case errors.Is(err, syscall.ENOSPC):
		s = scsi.Sense{Key: scsi.DataProtect, ASC: 0x2707}
	case write:
		s.ASC = scsi.ASCWriteError
	}
	t.Fail(s)
}
