package scsi

import "encoding/binary"

var be = binary.BigEndian

// Transfer is a CDB that names a run of logical blocks: READ, WRITE, WRITE AND VERIFY, VERIFY,
// SYNCHRONIZE CACHE, WRITE SAME and COMPARE AND WRITE (SBC-3, clause 5). Fields that a form lacks are zero.
type Transfer struct {
	Op  Opcode
	LBA uint64
	// Blocks is the number of logical blocks. READ(6) and WRITE(6) encode 256 as 0, which Parse resolves;
	// in all other forms 0 is no blocks (READ, WRITE, VERIFY, COMPARE AND WRITE) or all up to the last (WRITE SAME, SYNCHRONIZE CACHE).
	Blocks  uint32
	Protect uint8 // RDPROTECT, WRPROTECT or VRPROTECT, 3 bits
	DPO     bool
	FUA     bool
	BytChk  uint8 // VERIFY and WRITE AND VERIFY, 2 bits
	Unmap   bool  // WRITE SAME
	Anchor  bool  // WRITE SAME
	NDOB    bool  // WRITE SAME(16): no data-out buffer, the block is zeros
	Immed   bool  // SYNCHRONIZE CACHE
}

// Limits of the shorter forms.
const (
	MaxLBA6     = 1<<21 - 1
	MaxBlocks6  = 256
	MaxLBA10    = 1<<32 - 1
	MaxBlocks10 = 1<<16 - 1
)

// ParseTransfer decodes cdb. ok is false when the opcode is none of Transfer's or cdb is too short for it.
func ParseTransfer(cdb []byte) (t Transfer, ok bool) {
	if len(cdb) == 0 {
		return t, false
	}
	t.Op = Opcode(cdb[0])
	switch t.Op {
	case OpRead6, OpWrite6:
		if len(cdb) < 6 {
			return t, false
		}
		t.LBA = uint64(cdb[1]&0x1f)<<16 | uint64(cdb[2])<<8 | uint64(cdb[3])
		if t.Blocks = uint32(cdb[4]); t.Blocks == 0 {
			t.Blocks = MaxBlocks6
		}
		return t, true
	case OpRead10, OpWrite10, OpWriteVerify10, OpVerify10, OpSynchronizeCache10, OpWriteSame10:
		if len(cdb) < 10 {
			return t, false
		}
		t.LBA = uint64(be.Uint32(cdb[2:]))
		t.Blocks = uint32(be.Uint16(cdb[7:]))
	case OpRead12, OpWrite12, OpWriteVerify12, OpVerify12:
		if len(cdb) < 12 {
			return t, false
		}
		t.LBA = uint64(be.Uint32(cdb[2:]))
		t.Blocks = be.Uint32(cdb[6:])
	case OpRead16, OpWrite16, OpWriteVerify16, OpVerify16, OpSynchronizeCache16, OpWriteSame16:
		if len(cdb) < 16 {
			return t, false
		}
		t.LBA = be.Uint64(cdb[2:])
		t.Blocks = be.Uint32(cdb[10:])
	case OpCompareAndWrite:
		if len(cdb) < 16 {
			return t, false
		}
		t.LBA = be.Uint64(cdb[2:])
		t.Blocks = uint32(cdb[13])
	default:
		return t, false
	}
	f := cdb[1]
	switch t.Op {
	case OpSynchronizeCache10, OpSynchronizeCache16:
		t.Immed = f&0x02 != 0
	case OpWriteSame10, OpWriteSame16:
		t.Protect = f >> 5
		t.Anchor = f&0x10 != 0
		t.Unmap = f&0x08 != 0
		t.NDOB = f&0x01 != 0 && t.Op == OpWriteSame16
	case OpVerify10, OpVerify12, OpVerify16, OpWriteVerify10, OpWriteVerify12, OpWriteVerify16:
		t.Protect = f >> 5
		t.DPO = f&0x10 != 0
		t.BytChk = f >> 1 & 3
	default:
		t.Protect = f >> 5
		t.DPO = f&0x10 != 0
		t.FUA = f&0x08 != 0
	}
	return t, true
}

func (t *Transfer) flags() byte {
	var f byte
	set := func(on bool, bit byte) {
		if on {
			f |= bit
		}
	}
	switch t.Op {
	case OpRead6, OpWrite6:
		return 0
	case OpSynchronizeCache10, OpSynchronizeCache16:
		set(t.Immed, 0x02)
		return f
	case OpWriteSame10, OpWriteSame16:
		set(t.Anchor, 0x10)
		set(t.Unmap, 0x08)
		set(t.NDOB && t.Op == OpWriteSame16, 0x01)
	case OpVerify10, OpVerify12, OpVerify16, OpWriteVerify10, OpWriteVerify12, OpWriteVerify16:
		set(t.DPO, 0x10)
		f |= t.BytChk & 3 << 1
	default:
		set(t.DPO, 0x10)
		set(t.FUA, 0x08)
	}
	return f | t.Protect<<5
}

// CDB encodes t. Fields that do not fit the form are cut: callers choose the form by its limits, or let
// ReadCDB and WriteCDB choose.
func (t Transfer) CDB() (c CDB) {
	b := &c.b
	b[0] = byte(t.Op)
	b[1] = t.flags()
	switch t.Op {
	case OpRead6, OpWrite6:
		b[1] = byte(t.LBA>>16) & 0x1f
		b[2], b[3], b[4] = byte(t.LBA>>8), byte(t.LBA), byte(t.Blocks)
		c.n = 6
	case OpRead10, OpWrite10, OpWriteVerify10, OpVerify10, OpSynchronizeCache10, OpWriteSame10:
		be.PutUint32(b[2:], uint32(t.LBA))
		be.PutUint16(b[7:], uint16(t.Blocks))
		c.n = 10
	case OpRead12, OpWrite12, OpWriteVerify12, OpVerify12:
		be.PutUint32(b[2:], uint32(t.LBA))
		be.PutUint32(b[6:], t.Blocks)
		c.n = 12
	case OpCompareAndWrite:
		be.PutUint64(b[2:], t.LBA)
		b[13] = byte(t.Blocks)
		c.n = 16
	default:
		be.PutUint64(b[2:], t.LBA)
		be.PutUint32(b[10:], t.Blocks)
		c.n = 16
	}
	return c
}

// ReadCDB is READ(10) where lba and blocks fit it, else READ(16).
func ReadCDB(lba uint64, blocks uint32) CDB {
	if lba <= MaxLBA10 && blocks <= MaxBlocks10 {
		return Read10(uint32(lba), uint16(blocks))
	}
	return Read16(lba, blocks)
}

// WriteCDB is WRITE(10) where lba and blocks fit it, else WRITE(16); fua asks for force unit access.
func WriteCDB(lba uint64, blocks uint32, fua bool) CDB {
	op := OpWrite16
	if lba <= MaxLBA10 && blocks <= MaxBlocks10 {
		op = OpWrite10
	}
	return Transfer{Op: op, LBA: lba, Blocks: blocks, FUA: fua}.CDB()
}

// Read6 reads 1 to 256 blocks at lba, below MaxLBA6.
func Read6(lba uint32, blocks uint16) CDB {
	return Transfer{Op: OpRead6, LBA: uint64(lba), Blocks: uint32(blocks)}.CDB()
}

// Write6 writes 1 to 256 blocks at lba, below MaxLBA6.
func Write6(lba uint32, blocks uint16) CDB {
	return Transfer{Op: OpWrite6, LBA: uint64(lba), Blocks: uint32(blocks)}.CDB()
}

// Read10 reads blocks blocks at lba; 0 reads none.
func Read10(lba uint32, blocks uint16) CDB {
	return Transfer{Op: OpRead10, LBA: uint64(lba), Blocks: uint32(blocks)}.CDB()
}

// Write10 writes blocks blocks at lba; 0 writes none.
func Write10(lba uint32, blocks uint16) CDB {
	return Transfer{Op: OpWrite10, LBA: uint64(lba), Blocks: uint32(blocks)}.CDB()
}

// Read12 is Read10 with a 32-bit count.
func Read12(lba, blocks uint32) CDB {
	return Transfer{Op: OpRead12, LBA: uint64(lba), Blocks: blocks}.CDB()
}

// Write12 is Write10 with a 32-bit count.
func Write12(lba, blocks uint32) CDB {
	return Transfer{Op: OpWrite12, LBA: uint64(lba), Blocks: blocks}.CDB()
}

// Read16 is Read10 with a 64-bit address and a 32-bit count.
func Read16(lba uint64, blocks uint32) CDB {
	return Transfer{Op: OpRead16, LBA: lba, Blocks: blocks}.CDB()
}

// Write16 is Write10 with a 64-bit address and a 32-bit count.
func Write16(lba uint64, blocks uint32) CDB {
	return Transfer{Op: OpWrite16, LBA: lba, Blocks: blocks}.CDB()
}

// Verify10 checks blocks on the medium; with bytchk 1 it compares them with the data-out buffer.
func Verify10(lba uint32, blocks uint16, bytchk uint8) CDB {
	return Transfer{Op: OpVerify10, LBA: uint64(lba), Blocks: uint32(blocks), BytChk: bytchk}.CDB()
}

// Verify16 is Verify10 with the long form.
func Verify16(lba uint64, blocks uint32, bytchk uint8) CDB {
	return Transfer{Op: OpVerify16, LBA: lba, Blocks: blocks, BytChk: bytchk}.CDB()
}

// SynchronizeCache10 flushes blocks at lba; 0 blocks: up to the last one.
func SynchronizeCache10(lba uint32, blocks uint16) CDB {
	return Transfer{Op: OpSynchronizeCache10, LBA: uint64(lba), Blocks: uint32(blocks)}.CDB()
}

// SynchronizeCache16 is SynchronizeCache10 with the long form.
func SynchronizeCache16(lba uint64, blocks uint32) CDB {
	return Transfer{Op: OpSynchronizeCache16, LBA: lba, Blocks: blocks}.CDB()
}

// WriteSame10 writes one block of data-out to blocks at lba; with unmap it may deallocate them.
func WriteSame10(lba uint32, blocks uint16, unmap bool) CDB {
	return Transfer{Op: OpWriteSame10, LBA: uint64(lba), Blocks: uint32(blocks), Unmap: unmap}.CDB()
}

// WriteSame16 is WriteSame10 with the long form; ndob: no data-out buffer, write zeros.
func WriteSame16(lba uint64, blocks uint32, unmap, ndob bool) CDB {
	return Transfer{Op: OpWriteSame16, LBA: lba, Blocks: blocks, Unmap: unmap, NDOB: ndob}.CDB()
}

// CompareAndWrite compares blocks at lba with the first half of data-out (blocks blocks) and, if
// equal, writes the second half.
func CompareAndWrite(lba uint64, blocks uint8) CDB {
	return Transfer{Op: OpCompareAndWrite, LBA: lba, Blocks: uint32(blocks)}.CDB()
}
