package scsi

import (
	"encoding/hex"
	"fmt"
	"strings"
)

// Vital product data pages (SPC-4, 7.8; SBC-3, 6.6).
const (
	VPDSupportedPages       = 0x00
	VPDSerialNumber         = 0x80
	VPDDeviceID             = 0x83
	VPDBlockLimits          = 0xb0
	VPDBlockCharacteristics = 0xb1
	VPDProvisioning         = 0xb2
)

// VPD is one vital product data page: its header and the bytes of it that were received.
type VPD struct {
	Qualifier  uint8
	DeviceType uint8
	Page       uint8
	Length     int    // page length: bytes after the 4-byte header, as the device states it
	Data       []byte // what was received of them; aliases the input
}

// Truncated reports that fewer bytes were received than the page has.
func (v VPD) Truncated() bool { return len(v.Data) < v.Length }

// ParseVPD reads the header of page. It fails when the header is short or names another page.
func ParseVPD(b []byte, page uint8) (VPD, error) {
	if len(b) < 4 {
		return VPD{}, shortError(fmt.Sprintf("VPD page 0x%02x", page), len(b), 4)
	}
	v := VPD{Qualifier: b[0] >> 5, DeviceType: b[0] & 0x1f, Page: b[1], Length: int(be.Uint16(b[2:]))}
	v.Data = b[4:min(4+v.Length, len(b))]
	if v.Page != page {
		return v, fmt.Errorf("scsi: VPD page 0x%02x asked for, 0x%02x received", page, v.Page)
	}
	return v, nil
}

// AppendVPD appends a page's header and data.
func AppendVPD(dst []byte, deviceType, page uint8, data []byte) []byte {
	dst = append(dst, deviceType, page)
	dst = be.AppendUint16(dst, uint16(len(data)))
	return append(dst, data...)
}

// SerialNumber is the text of page 80h: trimmed on both sides, control bytes escaped.
func (v VPD) SerialNumber() string { return strings.TrimLeft(text(v.Data, 0, len(v.Data)), " ") }

// Association, code set and type of a Designator (SPC-4, 7.8.6).
const (
	AssocLUN    = 0
	AssocPort   = 1
	AssocTarget = 2

	CodeBinary = 1
	CodeASCII  = 2
	CodeUTF8   = 3

	DesignatorVendor       = 0
	DesignatorT10          = 1
	DesignatorEUI64        = 2
	DesignatorNAA          = 3
	DesignatorRelativePort = 4
	DesignatorPortGroup    = 5
	DesignatorSCSIName     = 8
)

// Designator is one designation descriptor of page 83h.
type Designator struct {
	Protocol    uint8 // protocol identifier when PIV is set: 4 is SRP
	PIV         bool
	Association uint8
	CodeSet     uint8
	Type        uint8
	ID          []byte
}

func (d Designator) String() string {
	names := [...]string{"vendor", "t10", "eui-64", "naa", "relative port", "port group", "lun group", "md5", "scsi name"}
	kind := fmt.Sprintf("type %d", d.Type)
	if int(d.Type) < len(names) {
		kind = names[d.Type]
	}
	switch d.CodeSet {
	case CodeASCII, CodeUTF8:
		return kind + "." + text(d.ID, 0, len(d.ID))
	}
	return kind + "." + hex.EncodeToString(d.ID)
}

// AppendDesignator appends d's descriptor; an ID longer than 255 bytes is cut.
func AppendDesignator(dst []byte, d Designator) []byte {
	id := d.ID[:min(len(d.ID), 255)]
	b1 := d.Association&3<<4 | d.Type&0xf
	if d.PIV {
		b1 |= 0x80
	}
	dst = append(dst, d.Protocol<<4|d.CodeSet&0xf, b1, 0, byte(len(id)))
	return append(dst, id...)
}

// Designators are the descriptors of page 83h. Those before a damaged one are returned with the error.
func (v VPD) Designators() (out []Designator, err error) {
	for b := v.Data; len(b) > 0; {
		if len(b) < 4 {
			return out, shortError("designation descriptor", len(b), 4)
		}
		n := int(b[3])
		if 4+n > len(b) {
			return out, shortError("designation descriptor", len(b), 4+n)
		}
		out = append(out, Designator{
			Protocol: b[0] >> 4, CodeSet: b[0] & 0xf,
			PIV: b[1]&0x80 != 0, Association: b[1] >> 4 & 3, Type: b[1] & 0xf, ID: b[4 : 4+n],
		})
		b = b[4+n:]
	}
	if v.Truncated() {
		return out, shortError("device identification page", len(v.Data)+4, v.Length+4)
	}
	return out, nil
}

// BlockLimits is page B0h (SBC-3, 6.6.4). 0 means the device states no limit, except where said.
type BlockLimits struct {
	WSNZ                        bool   // WRITE SAME with 0 blocks is refused
	MaxCompareAndWrite          uint8  // blocks; 0: COMPARE AND WRITE is not supported
	OptimalGranularity          uint16 // blocks
	MaxTransfer                 uint32 // blocks
	OptimalTransfer             uint32 // blocks
	MaxPrefetch                 uint32 // blocks
	MaxUnmapBlocks              uint32 // 0xffffffff: no limit; 0: UNMAP is not supported
	MaxUnmapDescriptors         uint32 // as MaxUnmapBlocks
	OptimalUnmapGranularity     uint32 // blocks
	UnmapAlignment              uint32 // blocks, when UnmapAlignmentValid
	UnmapAlignmentValid         bool
	MaxWriteSame                uint64 // blocks
	UnmapInfo, WriteSameLimited bool   // which of the later fields the page was long enough to hold
}

// BlockLimitsLen is the page length of B0h.
const BlockLimitsLen = 0x3c

// Append appends the page's data without its header.
func (l BlockLimits) Append(dst []byte) []byte {
	var b [BlockLimitsLen]byte
	bit(&b[0], 1, l.WSNZ)
	b[1] = l.MaxCompareAndWrite
	be.PutUint16(b[2:], l.OptimalGranularity)
	be.PutUint32(b[4:], l.MaxTransfer)
	be.PutUint32(b[8:], l.OptimalTransfer)
	be.PutUint32(b[12:], l.MaxPrefetch)
	be.PutUint32(b[16:], l.MaxUnmapBlocks)
	be.PutUint32(b[20:], l.MaxUnmapDescriptors)
	be.PutUint32(b[24:], l.OptimalUnmapGranularity)
	if l.UnmapAlignmentValid {
		be.PutUint32(b[28:], l.UnmapAlignment|1<<31)
	}
	be.PutUint64(b[32:], l.MaxWriteSame)
	return append(dst, b[:]...)
}

// BlockLimits reads page B0h; short pages (older standards) leave later fields zero.
func (v VPD) BlockLimits() (l BlockLimits, err error) {
	b := v.Data
	if len(b) < 12 {
		return l, shortError("block limits page", len(b)+4, 16)
	}
	l.WSNZ = b[0]&1 != 0
	l.MaxCompareAndWrite = b[1]
	l.OptimalGranularity = be.Uint16(b[2:])
	l.MaxTransfer = be.Uint32(b[4:])
	l.OptimalTransfer = be.Uint32(b[8:])
	if len(b) >= 16 {
		l.MaxPrefetch = be.Uint32(b[12:])
	}
	if len(b) >= 32 {
		l.UnmapInfo = true
		l.MaxUnmapBlocks = be.Uint32(b[16:])
		l.MaxUnmapDescriptors = be.Uint32(b[20:])
		l.OptimalUnmapGranularity = be.Uint32(b[24:])
		a := be.Uint32(b[28:])
		l.UnmapAlignmentValid, l.UnmapAlignment = a>>31 != 0, a&^(1<<31)
	}
	if len(b) >= 40 {
		l.WriteSameLimited = true
		l.MaxWriteSame = be.Uint64(b[32:])
	}
	return l, nil
}

// BlockCharacteristics is page B1h (SBC-3, 6.6.2).
type BlockCharacteristics struct {
	RotationRate uint16 // rpm; 0 not reported, 1 no rotating medium
	FormFactor   uint8
}

// Append appends the page's data (3Ch bytes) without its header.
func (c BlockCharacteristics) Append(dst []byte) []byte {
	var b [0x3c]byte
	be.PutUint16(b[0:], c.RotationRate)
	b[3] = c.FormFactor & 0xf
	return append(dst, b[:]...)
}

// BlockCharacteristics reads page B1h; 4 bytes behind the header are needed.
func (v VPD) BlockCharacteristics() (c BlockCharacteristics, err error) {
	if len(v.Data) < 4 {
		return c, shortError("block device characteristics page", len(v.Data)+4, 8)
	}
	return BlockCharacteristics{RotationRate: be.Uint16(v.Data), FormFactor: v.Data[3] & 0xf}, nil
}

// Provisioning types of page B2h.
const (
	ProvisioningFull = 0
	ProvisioningRes  = 1 // resource provisioned
	ProvisioningThin = 2
)

// Provisioning is page B2h (SBC-3, 6.6.6).
type Provisioning struct {
	ThresholdExponent uint8
	Unmap             bool  // UNMAP is supported
	WriteSame16Unmap  bool  // WRITE SAME(16) with UNMAP is
	WriteSame10Unmap  bool  // WRITE SAME(10) with UNMAP is
	ReadsZero         uint8 // LBPRZ, 3 bits: 1: unmapped blocks read as zeros
	AnchorSupported   bool
	Type              uint8 // 3 bits
}

// Append appends the page's data (4 bytes) without its header.
func (p Provisioning) Append(dst []byte) []byte {
	b := [4]byte{p.ThresholdExponent, p.ReadsZero & 7 << 2, p.Type & 7, 0}
	bit(&b[1], 0x80, p.Unmap)
	bit(&b[1], 0x40, p.WriteSame16Unmap)
	bit(&b[1], 0x20, p.WriteSame10Unmap)
	bit(&b[1], 0x02, p.AnchorSupported)
	return append(dst, b[:]...)
}

// Provisioning reads page B2h; 3 bytes behind the header are needed.
func (v VPD) Provisioning() (p Provisioning, err error) {
	b := v.Data
	if len(b) < 3 {
		return p, shortError("logical block provisioning page", len(b)+4, 7)
	}
	return Provisioning{
		ThresholdExponent: b[0], Unmap: b[1]&0x80 != 0, WriteSame16Unmap: b[1]&0x40 != 0, WriteSame10Unmap: b[1]&0x20 != 0,
		ReadsZero: b[1] >> 2 & 7, AnchorSupported: b[1]&2 != 0, Type: b[2] & 7,
	}, nil
}
