package scsi

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

// LUN is an 8-byte logical unit number as it travels (SAM-5, 4.7).
type LUN [8]byte

// MaxFlatLUN is the largest number that flat space addressing holds.
const MaxFlatLUN = 1<<14 - 1

// NewLUN encodes n: peripheral device addressing below 256, flat space addressing to MaxFlatLUN, and the
// 5-byte extended flat space form above that, up to 2^32-1 (SAM-5, 4.7.7).
//
// Linux LIO numbers 256 and up without the addressing bits (see NewSimpleLUN); a LUN of such a
// target must be addressed by the bytes that its REPORT LUNS gave.
func NewLUN(n uint32) (l LUN) {
	switch {
	case n < 256:
		l[1] = byte(n)
	case n <= MaxFlatLUN:
		l[0], l[1] = 0x40|byte(n>>8), byte(n)
	default:
		l[0] = 0xe2 // extended, length code 2: 5 further bytes, method 2
		be.PutUint32(l[2:], n)
	}
	return l
}

// NewSimpleLUN encodes n up to 16383 as two bytes with no addressing method, the way Linux LIO and the
// kernel's int_to_scsilun do: 300 is 01 2c 00 00 00 00 00 00.
func NewSimpleLUN(n uint16) (l LUN) {
	be.PutUint16(l[:], n&MaxFlatLUN)
	return l
}

// Number is the unit's number by any of the forms above; false when the LUN is of another form
// (several levels, logical unit addressing, well-known).
func (l LUN) Number() (uint32, bool) {
	switch l[0] >> 6 {
	case 0, 1:
		if [6]byte(l[2:]) != ([6]byte{}) {
			return 0, false
		}
		return uint32(be.Uint16(l[:]) & MaxFlatLUN), true
	case 3:
		switch {
		case l[0] == 0xd2 && [4]byte(l[4:]) == ([4]byte{}): // extended flat, 3 bytes
			return uint32(l[1])<<16 | uint32(l[2])<<8 | uint32(l[3]), true
		case l[0] == 0xe2 && l[1] == 0 && l[6] == 0 && l[7] == 0:
			return be.Uint32(l[2:]), true
		}
	}
	return 0, false
}

// IsWellKnown reports a well-known logical unit, and which (1 is REPORT LUNS).
func (l LUN) IsWellKnown() (uint8, bool) { return l[1], l[0] == 0xc1 }

// ReportLUNsLUN is the REPORT LUNS well-known logical unit.
var ReportLUNsLUN = LUN{0xc1, 0x01}

// String is the unit's number, or 16 hexadecimal digits where it has none or where another encoding of
// that number would be sent by NewLUN.
func (l LUN) String() string {
	if n, ok := l.Number(); ok && NewLUN(n) == l {
		return strconv.FormatUint(uint64(n), 10)
	}
	return "0x" + hex.EncodeToString(l[:])
}

// ParseLUN reads a number, which NewLUN encodes, or "0x" and exactly 16 hexadecimal digits: the 8 bytes themselves.
func ParseLUN(s string) (LUN, error) {
	if h, ok := strings.CutPrefix(s, "0x"); ok && len(h) == 16 {
		raw, err := hex.DecodeString(h)
		if err == nil {
			return LUN(raw), nil
		}
	}
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return LUN{}, fmt.Errorf("scsi: LUN %q: want a number up to 4294967295, or 0x and 16 hexadecimal digits", s)
	}
	return NewLUN(uint32(n)), nil
}

// AppendLUNList appends the REPORT LUNS parameter data (SPC-4, 6.33): an 8-byte header and luns.
func AppendLUNList(dst []byte, luns []LUN) []byte {
	dst = be.AppendUint32(dst, uint32(8*len(luns)))
	dst = append(dst, 0, 0, 0, 0)
	for _, l := range luns {
		dst = append(dst, l[:]...)
	}
	return dst
}

// ParseLUNList reads REPORT LUNS parameter data. total is the number of LUNs the target has, which
// may be more than were received: ask again with 8+8*total bytes.
func ParseLUNList(b []byte) (luns []LUN, total int, err error) {
	if len(b) < 8 {
		return nil, 0, shortError("REPORT LUNS data", len(b), 8)
	}
	total = int(be.Uint32(b)) / 8
	for b = b[8:]; len(b) >= 8 && len(luns) < total; b = b[8:] {
		luns = append(luns, LUN(b[:8]))
	}
	return luns, total, nil
}

// ShortDataError is a structure of which fewer bytes came than it needs.
type ShortDataError struct {
	What      string
	Got, Want int // bytes
}

func (e *ShortDataError) Error() string {
	return fmt.Sprintf("scsi: %s: %d bytes received, at least %d needed", e.What, e.Got, e.Want)
}

func shortError(what string, got, want int) error { return &ShortDataError{what, got, want} }
