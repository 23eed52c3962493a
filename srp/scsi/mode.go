package scsi

// ModeHeader is the mode parameter header (SPC-4, 7.5.4) of MODE SENSE data or of a MODE SELECT list, of either form.
type ModeHeader struct {
	DataLength     int // bytes after the length field; reserved (0) in MODE SELECT
	MediumType     uint8
	DeviceSpecific uint8 // for disks: WriteProtected, DPOFUA
	LongLBA        bool  // (10) only
	BlockDescLen   int   // bytes
}

// Bits of ModeHeader.DeviceSpecific for block devices (SBC-3, 6.4.1).
const (
	ModeWriteProtected = 0x80
	ModeDPOFUA         = 0x10
)

// ModePage is one mode page as received.
type ModePage struct {
	PS      bool // the page can be saved
	Page    uint8
	Subpage uint8
	Length  int    // of the page's parameters, as stated
	Data    []byte // what was received of them, from byte 2 (byte 4 of a subpage) on; aliases the input
}

// ModeData is parsed MODE SENSE data or a MODE SELECT parameter list.
type ModeData struct {
	Header ModeHeader
	// Blocks and BlockSize are of the first block descriptor; BlockDesc tells whether there is one.
	BlockDesc bool
	Blocks    uint64
	BlockSize uint32
	Pages     []ModePage
}

// Page finds a page.
func (m *ModeData) Page(page, subpage uint8) (ModePage, bool) {
	for _, p := range m.Pages {
		if p.Page == page && p.Subpage == subpage {
			return p, true
		}
	}
	return ModePage{}, false
}

// ParseMode reads MODE SENSE(6) or, with ten, (10) data. For a MODE SELECT list, whose length field is reserved, pass
// sel. What is there before the first damage is returned with the error.
func ParseMode(b []byte, ten, sel bool) (m ModeData, err error) {
	hdr := 4
	if ten {
		hdr = 8
	}
	if len(b) < hdr {
		return m, shortError("mode parameter header", len(b), hdr)
	}
	h := &m.Header
	if ten {
		h.DataLength = int(be.Uint16(b))
		h.MediumType, h.DeviceSpecific = b[2], b[3]
		h.LongLBA = b[4]&1 != 0
		h.BlockDescLen = int(be.Uint16(b[6:]))
	} else {
		h.DataLength = int(b[0])
		h.MediumType, h.DeviceSpecific = b[1], b[2]
		h.BlockDescLen = int(b[3])
	}
	if !sel {
		n := h.DataLength + 1
		if ten {
			n = h.DataLength + 2
		}
		if n < len(b) {
			b = b[:max(n, hdr)]
		}
	}
	b = b[hdr:]
	if h.BlockDescLen > len(b) {
		return m, shortError("mode block descriptor", len(b), h.BlockDescLen)
	}
	switch d := b[:h.BlockDescLen]; {
	case h.LongLBA && len(d) >= 16:
		m.BlockDesc, m.Blocks, m.BlockSize = true, be.Uint64(d), be.Uint32(d[12:])
	case !h.LongLBA && len(d) >= 8:
		m.BlockDesc, m.Blocks, m.BlockSize = true, uint64(be.Uint32(d)), be.Uint32(d[4:])&0xffffff
	}
	for b = b[h.BlockDescLen:]; len(b) > 0; {
		if len(b) < 2 {
			return m, shortError("mode page", len(b), 2)
		}
		p := ModePage{PS: b[0]&0x80 != 0, Page: b[0] & 0x3f, Length: int(b[1])}
		head := 2
		if b[0]&0x40 != 0 {
			if len(b) < 4 {
				return m, shortError("mode subpage", len(b), 4)
			}
			p.Subpage, p.Length, head = b[1], int(be.Uint16(b[2:])), 4
		}
		end := head + p.Length
		p.Data = b[head:min(end, len(b))]
		if p.Page != 0 || p.Length != 0 { // page 0 is vendor specific; an empty one is padding
			m.Pages = append(m.Pages, p)
		}
		if end > len(b) {
			return m, shortError("mode page", len(b), end)
		}
		b = b[end:]
	}
	return m, nil
}

// AppendMode appends MODE SENSE data: header, a block descriptor of blocks and blockSize when blockDesc, and pages, which
// are whole encoded pages.
func AppendMode(dst []byte, ten, blockDesc, longLBA bool, deviceSpecific uint8, blocks uint64, blockSize uint32, pages []byte) []byte {
	bd := 0
	if blockDesc {
		bd = 8
		if ten && longLBA {
			bd = 16
		}
	}
	if ten {
		dst = be.AppendUint16(dst, uint16(6+bd+len(pages)))
		long := byte(0)
		if bd == 16 {
			long = 1
		}
		dst = append(dst, 0, deviceSpecific, long, 0)
		dst = be.AppendUint16(dst, uint16(bd))
	} else {
		dst = append(dst, byte(min(3+bd+len(pages), 255)), 0, deviceSpecific, byte(bd))
	}
	switch bd {
	case 8:
		dst = be.AppendUint32(dst, uint32(min(blocks, 1<<32-1)))
		dst = be.AppendUint32(dst, blockSize&0xffffff)
	case 16:
		dst = be.AppendUint64(dst, blocks)
		dst = be.AppendUint64(dst, uint64(blockSize))
	}
	return append(dst, pages...)
}
