package scsi

import (
	"fmt"
	"strings"
	"unicode"
)

// Peripheral device types (SPC-4, table 143) and qualifiers.
const (
	TypeDisk          = 0x00
	TypeTape          = 0x01
	TypeCDDVD         = 0x05
	TypeArray         = 0x0c
	TypeEnclosure     = 0x0d
	TypeRBC           = 0x0e
	TypeOSD           = 0x11
	TypeZoned         = 0x14
	TypeWellKnown     = 0x1e
	TypeUnknown       = 0x1f
	QualifierPresent  = 0
	QualifierAbsent   = 1 // could be there, is not now
	QualifierNotThere = 3
)

// DeviceTypeName names a peripheral device type.
func DeviceTypeName(t uint8) string {
	switch t & 0x1f {
	case TypeDisk:
		return "disk"
	case TypeTape:
		return "tape"
	case TypeCDDVD:
		return "cd/dvd"
	case TypeArray:
		return "array controller"
	case TypeEnclosure:
		return "enclosure"
	case TypeRBC:
		return "simplified disk"
	case TypeOSD:
		return "object storage"
	case TypeZoned:
		return "host managed zoned disk"
	case TypeWellKnown:
		return "well known logical unit"
	case TypeUnknown:
		return "no device"
	}
	return fmt.Sprintf("device type 0x%02x", t&0x1f)
}

// InquiryData is the standard INQUIRY data (SPC-4, 6.6.2).
type InquiryData struct {
	Qualifier      uint8 // 3 bits
	DeviceType     uint8 // 5 bits
	Removable      bool
	Version        uint8 // 5 SPC-3, 6 SPC-4
	NormACA        bool
	HiSup          bool
	ResponseFormat uint8
	SCCS           bool
	TPGS           uint8 // 2 bits: asymmetric logical unit access
	ThirdPartyCopy bool
	Protect        bool
	EncServ        bool
	MultiPort      bool
	CmdQueue       bool
	Vendor         string // 8 bytes, trailing blanks trimmed
	Product        string // 16
	Revision       string // 4
	VersionDescs   []uint16
	// Received is how many bytes there were and Length how many the device has (additional length + 5). Fields
	// that lie past Received are zero: absent, not zero in the device. Append ignores both.
	Received, Length int
}

// StandardInquiryLen is the size of the data up to and with the revision, the 36 bytes that every device has.
const StandardInquiryLen = 36

// Append appends the standard data: 36 bytes, or 96 when there are version descriptors (at most 8).
func (d InquiryData) Append(dst []byte) []byte {
	n := StandardInquiryLen
	if len(d.VersionDescs) > 0 {
		n = 96
	}
	start := len(dst)
	for range n {
		dst = append(dst, 0)
	}
	b := dst[start:]
	b[0] = d.Qualifier<<5 | d.DeviceType&0x1f
	bit(&b[1], 0x80, d.Removable)
	b[2] = d.Version
	b[3] = d.ResponseFormat & 0xf
	bit(&b[3], 0x20, d.NormACA)
	bit(&b[3], 0x10, d.HiSup)
	b[4] = byte(n - 5)
	b[5] = d.TPGS & 3 << 4
	bit(&b[5], 0x80, d.SCCS)
	bit(&b[5], 0x08, d.ThirdPartyCopy)
	bit(&b[5], 0x01, d.Protect)
	bit(&b[6], 0x40, d.EncServ)
	bit(&b[6], 0x10, d.MultiPort)
	bit(&b[7], 0x02, d.CmdQueue)
	padASCII(b[8:16], d.Vendor)
	padASCII(b[16:32], d.Product)
	padASCII(b[32:36], d.Revision)
	for i, v := range d.VersionDescs {
		if i == 8 {
			break
		}
		be.PutUint16(b[58+2*i:], v)
	}
	return dst
}

// ParseInquiry reads standard INQUIRY data from the bytes received; it needs the first one.
func ParseInquiry(b []byte) (d InquiryData, err error) {
	if len(b) < 1 {
		return d, shortError("INQUIRY data", 0, 1)
	}
	d.Qualifier, d.DeviceType = b[0]>>5, b[0]&0x1f
	if len(b) >= 5 {
		d.Length = int(b[4]) + 5
		if len(b) > d.Length {
			b = b[:d.Length]
		}
	}
	d.Received = len(b)
	at := func(i int) byte {
		if i < len(b) {
			return b[i]
		}
		return 0
	}
	d.Removable = at(1)&0x80 != 0
	d.Version = at(2)
	d.NormACA, d.HiSup, d.ResponseFormat = at(3)&0x20 != 0, at(3)&0x10 != 0, at(3)&0xf
	d.SCCS, d.TPGS, d.ThirdPartyCopy, d.Protect = at(5)&0x80 != 0, at(5)>>4&3, at(5)&8 != 0, at(5)&1 != 0
	d.EncServ, d.MultiPort, d.CmdQueue = at(6)&0x40 != 0, at(6)&0x10 != 0, at(7)&2 != 0
	d.Vendor, d.Product, d.Revision = text(b, 8, 16), text(b, 16, 32), text(b, 32, 36)
	for i := 58; i+2 <= 74 && i+2 <= len(b); i += 2 {
		if v := be.Uint16(b[i:]); v != 0 {
			d.VersionDescs = append(d.VersionDescs, v)
		}
	}
	return d, nil
}

func bit(b *byte, mask byte, on bool) {
	if on {
		*b |= mask
	}
}

// padASCII copies s left-aligned and fills with blanks.
func padASCII(dst []byte, s string) {
	for i := copy(dst, s); i < len(dst); i++ {
		dst[i] = ' '
	}
}

// text is the printable content of b[from:to], cut to what was received, with trailing blanks and NULs
// trimmed and bytes that are not printable ASCII escaped.
func text(b []byte, from, to int) string {
	if from >= len(b) {
		return ""
	}
	b = b[from:min(to, len(b))]
	s := strings.TrimRight(string(b), " \x00")
	for i := 0; i < len(s); i++ {
		if s[i] < 0x20 || s[i] > unicode.MaxASCII-1 {
			var e strings.Builder
			for i := 0; i < len(s); i++ {
				if s[i] < 0x20 || s[i] > unicode.MaxASCII-1 {
					fmt.Fprintf(&e, `\x%02x`, s[i])
				} else {
					e.WriteByte(s[i])
				}
			}
			return e.String()
		}
	}
	return s
}
