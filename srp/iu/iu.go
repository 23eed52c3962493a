// Package iu encodes and decodes the information units of the SCSI RDMA
// Protocol: T10 SRP revision 16a, the login form that RDMA/CM carries, and the
// immediate-data extension, both as in the kernel's <scsi/srp.h>.
//
// Every type has Encode, which writes into the caller's buffer, and Decode,
// which reads from received bytes. Neither allocates: decoded slices alias the
// bytes given to Decode, descriptor lists reuse the capacity of the value
// decoded into. Decode believes no length that the received bytes do not
// cover. Fields that the standard reserves are written as zero and ignored when
// read. All fields are big-endian; a tag is eight opaque bytes, held here as
// the uint64 that reads them big-endian, so that an echo is exact.
package iu

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Opcode is the first byte of an information unit (the twelfth of an RDMA/CM login).
type Opcode uint8

// Opcodes, as in <scsi/srp.h>. Bit 7: sent by the target port. Bit 6: a response.
const (
	OpLoginReq Opcode = 0x00
	OpTaskMgmt Opcode = 0x01
	OpCommand  Opcode = 0x02
	OpILogout  Opcode = 0x03
	OpCredRsp  Opcode = 0x41
	OpAERRsp   Opcode = 0x42
	OpTLogout  Opcode = 0x80
	OpCredReq  Opcode = 0x81
	OpAERReq   Opcode = 0x82
	OpLoginRsp Opcode = 0xc0
	OpResponse Opcode = 0xc1
	OpLoginRej Opcode = 0xc2
)

func (o Opcode) String() string {
	switch o {
	case OpLoginReq:
		return "SRP_LOGIN_REQ"
	case OpTaskMgmt:
		return "SRP_TSK_MGMT"
	case OpCommand:
		return "SRP_CMD"
	case OpILogout:
		return "SRP_I_LOGOUT"
	case OpCredRsp:
		return "SRP_CRED_RSP"
	case OpAERRsp:
		return "SRP_AER_RSP"
	case OpTLogout:
		return "SRP_T_LOGOUT"
	case OpCredReq:
		return "SRP_CRED_REQ"
	case OpAERReq:
		return "SRP_AER_REQ"
	case OpLoginRsp:
		return "SRP_LOGIN_RSP"
	case OpResponse:
		return "SRP_RSP"
	case OpLoginRej:
		return "SRP_LOGIN_REJ"
	}
	return fmt.Sprintf("unknown opcode 0x%02x", uint8(o))
}

// Sizes of the fixed parts, in bytes.
const (
	LoginReqSizeIB = 64 // private data of a REQ with IB addressing
	LoginReqSizeCM = 56 // private data of a REQ with RDMA/CM addressing
	LoginRspSize   = 52
	LoginRejSize   = 32
	CommandSize    = 48 // additional CDB and buffer descriptors follow
	TaskMgmtSize   = 48
	ResponseSize   = 36 // response data and sense data follow
	AERReqSize     = 36 // sense data follows
	ShortSize      = 16 // CRED_REQ, CRED_RSP, AER_RSP, I_LOGOUT, T_LOGOUT
	DescriptorSize = 16
	TableSize      = 20 // indirect buffer descriptor without its partial list
	ImmediateSize  = 4  // immediate buffer descriptor

	// MinITIULen is the smallest REQUESTED INITIATOR TO TARGET IU LENGTH.
	MinITIULen = 64
)

// Errors of Decode and Encode, to be found with errors.Is.
var (
	// ErrShort: the unit ends before what its fields announce.
	ErrShort = errors.New("iu: information unit too short")
	// ErrOpcode: the bytes are another unit than the one asked for.
	ErrOpcode = errors.New("iu: unexpected opcode")
	// ErrFormat: a field has a value that the standard gives no meaning.
	ErrFormat = errors.New("iu: malformed information unit")
	// ErrNoRoom: the buffer given to Encode is too small.
	ErrNoRoom = errors.New("iu: buffer too small for the information unit")
)

// PortID is an initiator or target port identifier, 16 bytes.
type PortID [16]byte

// MakePortID joins the two halves; for I/O class 0x0100 the extension comes first, for 0xff00 the GUID.
func MakePortID(first, second uint64) (p PortID) {
	binary.BigEndian.PutUint64(p[0:], first)
	binary.BigEndian.PutUint64(p[8:], second)
	return p
}

// Halves are the two halves of the identifier.
func (p PortID) Halves() (first, second uint64) {
	return binary.BigEndian.Uint64(p[0:]), binary.BigEndian.Uint64(p[8:])
}

// String is the identifier as 32 hexadecimal digits with a colon between its halves.
func (p PortID) String() string {
	a, b := p.Halves()
	return fmt.Sprintf("%016x:%016x", a, b)
}

// LUN is a logical unit number in its eight-byte form (SAM-5 4.7).
type LUN [8]byte

// SolicitedNotification is the SOLNT/UCSOLNT field.
type SolicitedNotification uint8

const (
	NotifyOnSuccess SolicitedNotification = 0x02 // requests: solicited event for a good response
	NotifyOnFailure SolicitedNotification = 0x04 // requests: solicited event for any other response
	Solicited       SolicitedNotification = 0x01 // responses and target requests: sent with solicited event
)

// PeekOpcode is the opcode of a unit received by SEND; false when b is empty.
func PeekOpcode(b []byte) (Opcode, bool) {
	if len(b) == 0 {
		return 0, false
	}
	return Opcode(b[0]), true
}

// PeekTag is the tag of a unit received by SEND, wherever decoding the rest may fail. All units but the RDMA/CM
// login have it at byte 8.
func PeekTag(b []byte) (uint64, bool) {
	if len(b) < ShortSize {
		return 0, false
	}
	return binary.BigEndian.Uint64(b[8:]), true
}

func check(b []byte, op Opcode, size int) error {
	if len(b) < size {
		return ErrShort
	}
	if Opcode(b[0]) != op {
		return ErrOpcode
	}
	return nil
}

// begin clears the fixed part and writes opcode and tag.
func begin(b []byte, op Opcode, size int, tag uint64) error {
	if len(b) < size {
		return ErrNoRoom
	}
	clear(b[:size])
	b[0] = byte(op)
	binary.BigEndian.PutUint64(b[8:], tag)
	return nil
}

var be = binary.BigEndian
