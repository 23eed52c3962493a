package iu

// BufferFormat is a data buffer descriptor format code of a command.
type BufferFormat uint8

const (
	NoData    BufferFormat = 0
	Direct    BufferFormat = 1
	Indirect  BufferFormat = 2
	Immediate BufferFormat = 3 // data-out only: the bytes are in the command itself
)

func (f BufferFormat) String() string {
	switch f {
	case NoData:
		return "none"
	case Direct:
		return "direct"
	case Indirect:
		return "indirect"
	case Immediate:
		return "immediate"
	}
	return "reserved"
}

// Descriptor is a memory descriptor: Len bytes at Addr under Key (struct srp_direct_buf).
type Descriptor struct {
	Addr uint64
	Key  uint32
	Len  uint32
}

func (d Descriptor) put(b []byte) {
	be.PutUint64(b[0:], d.Addr)
	be.PutUint32(b[8:], d.Key)
	be.PutUint32(b[12:], d.Len)
}

func getDescriptor(b []byte) Descriptor {
	return Descriptor{Addr: be.Uint64(b[0:]), Key: be.Uint32(b[8:]), Len: be.Uint32(b[12:])}
}

// PutDescriptor writes d in wire form, as an external descriptor table holds it; b must have 16 bytes.
func PutDescriptor(b []byte, d Descriptor) {
	_ = b[DescriptorSize-1]
	d.put(b)
}

// GetDescriptor reads the wire form from b, which must have 16 bytes.
func GetDescriptor(b []byte) Descriptor {
	_ = b[DescriptorSize-1]
	return getDescriptor(b)
}

// Buffer describes the data of one direction of a command.
type Buffer struct {
	Format BufferFormat
	// Desc is the memory of a direct buffer, the descriptor table of an indirect one.
	Desc Descriptor
	// Total is the length of the data of an indirect or immediate buffer.
	Total uint32
	// List is the partial descriptor list of an indirect buffer: the table's first
	// entries, at most 255. Decode reuses its capacity.
	List []Descriptor
}

// Len is the length of the data in bytes.
func (b *Buffer) Len() uint32 {
	switch b.Format {
	case Direct:
		return b.Desc.Len
	case Indirect, Immediate:
		return b.Total
	}
	return 0
}

// TableEntries is how many descriptors the table of an indirect buffer has in all.
func (b *Buffer) TableEntries() int {
	if b.Format != Indirect {
		return 0
	}
	return int(b.Desc.Len / DescriptorSize)
}

func (b *Buffer) size() int {
	switch b.Format {
	case Direct:
		return DescriptorSize
	case Indirect:
		return TableSize + DescriptorSize*len(b.List)
	case Immediate:
		return ImmediateSize
	}
	return 0
}

func (b *Buffer) put(p []byte) {
	switch b.Format {
	case Direct:
		b.Desc.put(p)
	case Indirect:
		b.Desc.put(p)
		be.PutUint32(p[16:], b.Total)
		for i, d := range b.List {
			d.put(p[TableSize+DescriptorSize*i:])
		}
	case Immediate:
		be.PutUint32(p, b.Total)
	}
}

// get reads a descriptor of b.Format with n list entries and returns how many bytes it took.
func (b *Buffer) get(p []byte, n int) (int, error) {
	b.Desc, b.Total, b.List = Descriptor{}, 0, b.List[:0]
	switch b.Format {
	case NoData:
		return 0, nil
	case Direct:
		if len(p) < DescriptorSize {
			return 0, ErrShort
		}
		b.Desc = getDescriptor(p)
		return DescriptorSize, nil
	case Indirect:
		if len(p) < TableSize+DescriptorSize*n {
			return 0, ErrShort
		}
		b.Desc = getDescriptor(p)
		b.Total = be.Uint32(p[16:])
		// The partial list is a copy of the table's beginning: it cannot be longer.
		if b.Desc.Len%DescriptorSize != 0 || b.Desc.Len/DescriptorSize < uint32(n) || b.Desc.Len == 0 {
			return 0, ErrFormat
		}
		for i := range n {
			b.List = append(b.List, getDescriptor(p[TableSize+DescriptorSize*i:]))
		}
		return TableSize + DescriptorSize*n, nil
	case Immediate:
		if len(p) < ImmediateSize {
			return 0, ErrShort
		}
		b.Total = be.Uint32(p)
		return ImmediateSize, nil
	}
	return 0, ErrFormat
}

// TaskAttribute is the TASK ATTRIBUTE of a command (SRP r16a, table 21).
type TaskAttribute uint8

const (
	Simple      TaskAttribute = 0
	HeadOfQueue TaskAttribute = 1
	Ordered     TaskAttribute = 2
	ACA         TaskAttribute = 4
)

// Limits of a command.
const (
	MaxCDB         = 16 + 63*4 // bytes: ADDITIONAL CDB LENGTH is six bits of words
	MaxPartialList = 255       // descriptors: the counts are bytes
)

// Command is SRP_CMD.
type Command struct {
	Tag      uint64
	LUN      LUN
	SolNot   SolicitedNotification
	TaskAttr TaskAttribute
	// CDB is 1 to MaxCDB bytes. Decode gives the 16 bytes of the fixed field and
	// the additional ones; the operation code says how many of them mean something.
	CDB     []byte
	Out, In Buffer // data to and from the logical unit
}

// additional is the length of the additional CDB, in whole words.
func (c *Command) additional() int {
	if len(c.CDB) <= 16 {
		return 0
	}
	return (len(c.CDB) - 16 + 3) &^ 3
}

// Size is the length of the encoded command without immediate data.
func (c *Command) Size() int {
	return CommandSize + c.additional() + c.Out.size() + c.In.size()
}

// Encode writes the command and returns its length, which does not include immediate
// data: those the caller places at the negotiated offset.
func (c *Command) Encode(b []byte) (int, error) {
	n := c.Size()
	if len(b) < n {
		return 0, ErrNoRoom
	}
	if len(c.CDB) == 0 || len(c.CDB) > MaxCDB || c.Out.Format > Immediate || c.In.Format > Indirect ||
		len(c.Out.List) > MaxPartialList || len(c.In.List) > MaxPartialList {
		return 0, ErrFormat
	}
	add := c.additional()
	clear(b[:CommandSize+add])
	b[0] = byte(OpCommand)
	b[1] = byte(c.SolNot)
	b[5] = byte(c.Out.Format)<<4 | byte(c.In.Format)
	if c.Out.Format == Indirect {
		b[6] = byte(len(c.Out.List))
	}
	if c.In.Format == Indirect {
		b[7] = byte(len(c.In.List))
	}
	be.PutUint64(b[8:], c.Tag)
	copy(b[20:], c.LUN[:])
	b[29] = byte(c.TaskAttr)
	b[31] = byte(add) // the word count in bits 7:2
	copy(b[32:], c.CDB)
	p := b[CommandSize+add:]
	c.Out.put(p)
	c.In.put(p[c.Out.size():])
	return n, nil
}

// Decode reads a command. CDB aliases b. What follows the descriptors is not looked at; ImmediateData finds immediate data.
func (c *Command) Decode(b []byte) error {
	if err := check(b, OpCommand, CommandSize); err != nil {
		return err
	}
	add := int(b[31] &^ 3)
	if len(b) < CommandSize+add {
		return ErrShort
	}
	c.SolNot = SolicitedNotification(b[1])
	c.Out.Format, c.In.Format = BufferFormat(b[5]>>4), BufferFormat(b[5]&15)
	if c.In.Format == Immediate {
		return ErrFormat
	}
	c.Tag = be.Uint64(b[8:])
	c.LUN = LUN(b[20:28])
	c.TaskAttr = TaskAttribute(b[29] & 7)
	c.CDB = b[32 : CommandSize+add : CommandSize+add]
	p := b[CommandSize+add:]
	n, err := c.Out.get(p, int(b[6]))
	if err != nil {
		return err
	}
	_, err = c.In.get(p[n:], int(b[7]))
	return err
}

// ImmediateData is the data of a command whose Out is Immediate: Out.Total bytes at offset of b, the unit that the
// command was decoded from. They must lie behind the descriptors and inside b.
func (c *Command) ImmediateData(b []byte, offset uint16) ([]byte, error) {
	if c.Out.Format != Immediate || int(offset) < c.Size() {
		return nil, ErrFormat
	}
	end := uint64(offset) + uint64(c.Out.Total)
	if end > uint64(len(b)) {
		return nil, ErrShort
	}
	return b[offset:end:end], nil
}
