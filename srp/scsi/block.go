package scsi

// Capacity is the READ CAPACITY(16) parameter data (SBC-3, 5.16.2); READ CAPACITY(10) fills the first two fields.
type Capacity struct {
	LastLBA       uint64 // the address of the last block, one less than their number
	BlockSize     uint32 // bytes
	ProtEnabled   bool
	ProtType      uint8 // 0..7 for types 1..8
	PIExponent    uint8
	PhysExponent  uint8 // logical blocks per physical block, as a power of two
	Provisioned   bool  // LBPME: thin or resource provisioned
	UnmappedZero  bool  // LBPRZ: unmapped blocks read as zeros
	LowestAligned uint16
}

// Blocks is the number of logical blocks. (0 for a device whose last block is 2^64-1, which no device has.)
func (c Capacity) Blocks() uint64 { return c.LastLBA + 1 }

// Size is the capacity in bytes.
func (c Capacity) Size() uint64 { return c.Blocks() * uint64(c.BlockSize) }

// Append appends the 32 bytes of READ CAPACITY(16).
func (c Capacity) Append(dst []byte) []byte {
	var b [32]byte
	be.PutUint64(b[0:], c.LastLBA)
	be.PutUint32(b[8:], c.BlockSize)
	b[12] = c.ProtType & 7 << 1
	bit(&b[12], 1, c.ProtEnabled)
	b[13] = c.PIExponent<<4 | c.PhysExponent&0xf
	be.PutUint16(b[14:], c.LowestAligned&0x3fff)
	bit(&b[14], 0x80, c.Provisioned)
	bit(&b[14], 0x40, c.UnmappedZero)
	return append(dst, b[:]...)
}

// Append10 appends the 8 bytes of READ CAPACITY(10): the last address is ffffffffh when it does not fit, which
// tells the initiator to use READ CAPACITY(16).
func (c Capacity) Append10(dst []byte) []byte {
	dst = be.AppendUint32(dst, uint32(min(c.LastLBA, 1<<32-1)))
	return be.AppendUint32(dst, c.BlockSize)
}

// ParseCapacity16 reads READ CAPACITY(16) data; 12 bytes are needed, 16 hold all fields.
func ParseCapacity16(b []byte) (c Capacity, err error) {
	if len(b) < 12 {
		return c, shortError("READ CAPACITY(16) data", len(b), 12)
	}
	c.LastLBA, c.BlockSize = be.Uint64(b), be.Uint32(b[8:])
	if len(b) >= 16 {
		c.ProtEnabled, c.ProtType = b[12]&1 != 0, b[12]>>1&7
		c.PIExponent, c.PhysExponent = b[13]>>4, b[13]&0xf
		c.Provisioned, c.UnmappedZero = b[14]&0x80 != 0, b[14]&0x40 != 0
		c.LowestAligned = be.Uint16(b[14:]) & 0x3fff
	}
	return c, nil
}

// ParseCapacity10 reads READ CAPACITY(10) data. tooBig: the last address does not fit, ask with READ CAPACITY(16).
func ParseCapacity10(b []byte) (c Capacity, tooBig bool, err error) {
	if len(b) < 8 {
		return c, false, shortError("READ CAPACITY(10) data", len(b), 8)
	}
	c.LastLBA, c.BlockSize = uint64(be.Uint32(b)), be.Uint32(b[4:])
	return c, c.LastLBA == 1<<32-1, nil
}

// Extent is a run of logical blocks.
type Extent struct {
	LBA    uint64
	Blocks uint32
}

// AppendUnmap appends an UNMAP parameter list (SBC-3, 5.28.2): 8 + 16*len(extents) bytes.
func AppendUnmap(dst []byte, extents []Extent) []byte {
	dst = be.AppendUint16(dst, uint16(6+16*len(extents)))
	dst = be.AppendUint16(dst, uint16(16*len(extents)))
	dst = append(dst, 0, 0, 0, 0)
	for _, e := range extents {
		dst = be.AppendUint64(dst, e.LBA)
		dst = be.AppendUint32(dst, e.Blocks)
		dst = append(dst, 0, 0, 0, 0)
	}
	return dst
}

// UnmapExtents calls f for each descriptor of an UNMAP parameter list until f returns false. It fails
// when the list is shorter than its header says.
func UnmapExtents(b []byte, f func(Extent) bool) error {
	if len(b) < 8 {
		return shortError("UNMAP parameter list", len(b), 8)
	}
	n := int(be.Uint16(b[2:])) &^ 15
	if 8+n > len(b) {
		return shortError("UNMAP parameter list", len(b), 8+n)
	}
	for d := b[8 : 8+n]; len(d) > 0; d = d[16:] {
		if !f(Extent{be.Uint64(d), be.Uint32(d[8:])}) {
			break
		}
	}
	return nil
}

// Provisioning states of GET LBA STATUS.
const (
	LBAMapped      = 0
	LBADeallocated = 1
	LBAAnchored    = 2
)

// LBAStatus is one descriptor of GET LBA STATUS (SBC-3, 5.10.2).
type LBAStatus struct {
	Extent
	State uint8
}

// AppendLBAStatus appends the parameter data: an 8-byte header and 16 bytes per descriptor.
func AppendLBAStatus(dst []byte, list []LBAStatus) []byte {
	dst = be.AppendUint32(dst, uint32(4+16*len(list)))
	dst = append(dst, 0, 0, 0, 0)
	for _, s := range list {
		dst = be.AppendUint64(dst, s.LBA)
		dst = be.AppendUint32(dst, s.Blocks)
		dst = append(dst, s.State&0xf, 0, 0, 0)
	}
	return dst
}

// ParseLBAStatus reads the descriptors that were received.
func ParseLBAStatus(b []byte) (list []LBAStatus, err error) {
	if len(b) < 8 {
		return nil, shortError("GET LBA STATUS data", len(b), 8)
	}
	n := uint64(be.Uint32(b)) + 4
	if n < uint64(len(b)) {
		b = b[:n]
	}
	for b = b[min(8, len(b)):]; len(b) >= 16; b = b[16:] {
		list = append(list, LBAStatus{Extent{be.Uint64(b), be.Uint32(b[8:])}, b[12] & 0xf})
	}
	return list, nil
}
