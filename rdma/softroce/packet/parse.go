package packet

import (
	"encoding/binary"
	"errors"
)

// Errors of Parse. All of them mean: drop the packet without an answer.
var (
	ErrShort   = errors.New("packet: shorter than its headers")
	ErrLong    = errors.New("packet: longer than any path MTU allows")
	ErrOpcode  = errors.New("packet: unknown opcode")
	ErrVersion = errors.New("packet: transport version is not 0")
	ErrPad     = errors.New("packet: padding does not fit the length")
)

// Packet is a parsed packet: values of the BTH and views of the bytes that
// were received. The views alias the receive buffer.
type Packet struct {
	Opcode    Opcode
	Pad       uint8
	Solicited bool
	AckReq    bool
	PKey      uint16
	Kind      Kind // Opcode.Kind
	DestQPN   uint32
	PSN       PSN
	Payload   []byte // without padding
	b         []byte // BTH and extension headers
}

// Parse reads b, one packet from BTH to ICRC inclusive, into p. It checks that
// the headers that the opcode calls for, the padding and the ICRC fit in b. It does not check the ICRC.
// FECN, BECN, MigReq and reserved bits are ignored, as the standard wants.
func (p *Packet) Parse(b []byte) error {
	if len(b) < BTHLen+ICRCLen {
		return ErrShort
	}
	if len(b) > Max {
		return ErrLong
	}
	info := &opcodes[b[0]]
	if info.kind == 0 {
		return ErrOpcode
	}
	f := b[1]
	if f&bthTVerMask != 0 {
		return ErrVersion
	}
	hdr, pad := int(info.hdr), f&bthPadMask>>4
	end := len(b) - ICRCLen
	if end < hdr {
		return ErrShort
	}
	if int(pad) > end-hdr || len(b)&3 != 0 {
		return ErrPad
	}
	if end-hdr-int(pad) > PayloadMax {
		return ErrLong
	}
	psn := binary.BigEndian.Uint32(b[8:])
	p.Opcode = Opcode(b[0])
	p.Kind = info.kind
	p.Pad = pad
	p.Solicited = f&bthSolicited != 0
	p.AckReq = psn>>31 != 0
	p.PKey = binary.BigEndian.Uint16(b[2:])
	p.DestQPN = binary.BigEndian.Uint32(b[4:]) & 0xffffff
	p.PSN = PSN(psn & psnMask)
	p.Payload = b[hdr : end-int(pad) : end-int(pad)]
	p.b = b[:hdr:hdr]
	return nil
}

// RETH is the packet's RETH; it panics on an opcode without one.
func (p *Packet) RETH() RETH {
	if p.Kind&kindRETH == 0 {
		panic("packet: no RETH in " + p.Opcode.String())
	}
	b := p.b[len(p.b)-RETHLen:]
	if p.Kind&KindImm != 0 {
		b = p.b[BTHLen:]
	}
	return RETH{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint32(b[12:])}
}

// AETH is the packet's AETH; it panics on an opcode without one.
func (p *Packet) AETH() AETH {
	if p.Kind&kindAETH == 0 {
		panic("packet: no AETH in " + p.Opcode.String())
	}
	v := binary.BigEndian.Uint32(p.b[BTHLen:])
	return AETH{Syndrome(v >> 24), v & 0xffffff}
}

// HasAETH reports an AETH: all responses but READ Response Middle.
func (p *Packet) HasAETH() bool { return p.Kind&kindAETH != 0 }

// DETH is the DETH of a UD packet; it panics on any other.
func (p *Packet) DETH() DETH {
	if p.Kind&KindUD == 0 {
		panic("packet: no DETH in " + p.Opcode.String())
	}
	b := p.b[BTHLen:]
	return DETH{binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:]) & 0xffffff}
}

// Imm is the immediate value or, for the INV opcodes, the R_Key to invalidate;
// it panics on an opcode with neither.
func (p *Packet) Imm() uint32 {
	off := opcodes[p.Opcode].imm
	if off == 0 {
		panic("packet: no immediate in " + p.Opcode.String())
	}
	return binary.BigEndian.Uint32(p.b[off:])
}
