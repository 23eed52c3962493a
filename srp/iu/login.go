package iu

import "fmt"

// BufferFormats is the set of data buffer descriptor formats of a login (<scsi/srp.h>).
type BufferFormats uint16

const (
	DirectFormat   BufferFormats = 1 << 1
	IndirectFormat BufferFormats = 1 << 2
)

// LoginFlags is the REQ FLAGS byte of a login request (SRP r16a, table 9).
type LoginFlags uint8

const (
	MultiChannelMask  LoginFlags = 0x03
	SingleChannel     LoginFlags = 0x00 // end the nexus's other channels
	MultiChannel      LoginFlags = 0x01 // keep them
	LogoutSolicited   LoginFlags = 0x10 // LOSOLNT: solicited event with T_LOGOUT
	CreditSolicited   LoginFlags = 0x20 // CRSOLNT: with CRED_REQ
	EventSolicited    LoginFlags = 0x40 // AESOLNT: with AER_REQ
	ImmediateDataFlag LoginFlags = 0x80 // immediate data wanted; ImmDataOffset counts
)

// LoginRspFlags is the RSP FLAGS byte of a login response.
type LoginRspFlags uint8

const (
	MultiChannelResultMask LoginRspFlags = 0x03
	NoExistingChannel      LoginRspFlags = 0x00
	ChannelsTerminated     LoginRspFlags = 0x01
	ChannelsMaintained     LoginRspFlags = 0x02
	SolicitedSupported     LoginRspFlags = 0x10 // SOLNTSUP
	ImmediateSupported     LoginRspFlags = 0x80
)

// LoginReq is SRP_LOGIN_REQ.
type LoginReq struct {
	Tag           uint64
	ITIULen       uint32 // largest unit the initiator will send
	Formats       BufferFormats
	Flags         LoginFlags
	ImmDataOffset uint16 // of immediate data from the start of a command
	InitiatorPort PortID
	TargetPort    PortID
}

// EncodeIB writes the 64-byte form that IB CM carries.
func (r *LoginReq) EncodeIB(b []byte) (int, error) {
	if err := begin(b, OpLoginReq, LoginReqSizeIB, r.Tag); err != nil {
		return 0, err
	}
	be.PutUint32(b[16:], r.ITIULen)
	be.PutUint16(b[24:], uint16(r.Formats))
	b[26] = byte(r.Flags)
	be.PutUint16(b[28:], r.ImmDataOffset)
	copy(b[32:], r.InitiatorPort[:])
	copy(b[48:], r.TargetPort[:])
	return LoginReqSizeIB, nil
}

// DecodeIB reads the 64-byte form; what follows it is padding.
func (r *LoginReq) DecodeIB(b []byte) error {
	if err := check(b, OpLoginReq, LoginReqSizeIB); err != nil {
		return err
	}
	r.Tag = be.Uint64(b[8:])
	r.ITIULen = be.Uint32(b[16:])
	r.Formats = BufferFormats(be.Uint16(b[24:]))
	r.Flags = LoginFlags(b[26])
	r.ImmDataOffset = be.Uint16(b[28:])
	r.InitiatorPort = PortID(b[32:48])
	r.TargetPort = PortID(b[48:64])
	return nil
}

// EncodeCM writes the 56-byte form that RDMA/CM carries (struct srp_login_req_rdma).
func (r *LoginReq) EncodeCM(b []byte) (int, error) {
	if len(b) < LoginReqSizeCM {
		return 0, ErrNoRoom
	}
	clear(b[:LoginReqSizeCM])
	be.PutUint64(b[0:], r.Tag)
	be.PutUint16(b[8:], uint16(r.Formats))
	b[10] = byte(r.Flags)
	b[11] = byte(OpLoginReq)
	be.PutUint32(b[12:], r.ITIULen)
	copy(b[16:], r.InitiatorPort[:])
	copy(b[32:], r.TargetPort[:])
	be.PutUint16(b[48:], r.ImmDataOffset)
	return LoginReqSizeCM, nil
}

// DecodeCM reads the 56-byte form; what follows it is padding.
func (r *LoginReq) DecodeCM(b []byte) error {
	if len(b) < LoginReqSizeCM {
		return ErrShort
	}
	if Opcode(b[11]) != OpLoginReq {
		return ErrOpcode
	}
	r.Tag = be.Uint64(b[0:])
	r.Formats = BufferFormats(be.Uint16(b[8:]))
	r.Flags = LoginFlags(b[10])
	r.ITIULen = be.Uint32(b[12:])
	r.InitiatorPort = PortID(b[16:32])
	r.TargetPort = PortID(b[32:48])
	r.ImmDataOffset = be.Uint16(b[48:])
	return nil
}

// LoginRsp is SRP_LOGIN_RSP.
type LoginRsp struct {
	Tag         uint64
	ReqLimDelta int32  // first value of the request limit
	MaxITIULen  uint32 // largest unit the target takes
	MaxTIIULen  uint32 // largest unit the target sends
	Formats     BufferFormats
	Flags       LoginRspFlags
}

// Encode writes the unit's 52 bytes.
func (r *LoginRsp) Encode(b []byte) (int, error) {
	if err := begin(b, OpLoginRsp, LoginRspSize, r.Tag); err != nil {
		return 0, err
	}
	be.PutUint32(b[4:], uint32(r.ReqLimDelta))
	be.PutUint32(b[16:], r.MaxITIULen)
	be.PutUint32(b[20:], r.MaxTIIULen)
	be.PutUint16(b[24:], uint16(r.Formats))
	b[26] = byte(r.Flags)
	return LoginRspSize, nil
}

// Decode reads the unit; what follows its 52 bytes is padding.
func (r *LoginRsp) Decode(b []byte) error {
	if err := check(b, OpLoginRsp, LoginRspSize); err != nil {
		return err
	}
	r.Tag = be.Uint64(b[8:])
	r.ReqLimDelta = int32(be.Uint32(b[4:]))
	r.MaxITIULen = be.Uint32(b[16:])
	r.MaxTIIULen = be.Uint32(b[20:])
	r.Formats = BufferFormats(be.Uint16(b[24:]))
	r.Flags = LoginRspFlags(b[26])
	return nil
}

// RejectReason is the reason of a SRP_LOGIN_REJ (enum srp_login_rej_reason).
type RejectReason uint32

const (
	RejectUnableToEstablish     RejectReason = 0x00010000
	RejectInsufficientResources RejectReason = 0x00010001
	RejectITIULenTooLarge       RejectReason = 0x00010002
	RejectUnableToAssociate     RejectReason = 0x00010003
	RejectUnsupportedFormat     RejectReason = 0x00010004
	RejectMultiChannel          RejectReason = 0x00010005
	RejectChannelLimit          RejectReason = 0x00010006
)

func (r RejectReason) String() string {
	switch r {
	case RejectUnableToEstablish:
		return "unable to establish an RDMA channel"
	case RejectInsufficientResources:
		return "insufficient RDMA channel resources"
	case RejectITIULenTooLarge:
		return "requested initiator-to-target IU length too large"
	case RejectUnableToAssociate:
		return "unable to associate the RDMA channel with the I_T nexus"
	case RejectUnsupportedFormat:
		return "unsupported data buffer descriptor format"
	case RejectMultiChannel:
		return "multiple RDMA channels per I_T nexus not supported"
	case RejectChannelLimit:
		return "RDMA channel limit reached for this initiator"
	}
	return fmt.Sprintf("unknown reason 0x%08x", uint32(r))
}

// LoginRej is SRP_LOGIN_REJ.
type LoginRej struct {
	Tag     uint64
	Reason  RejectReason
	Formats BufferFormats // that the target supports
}

// Encode writes the unit's 32 bytes.
func (r *LoginRej) Encode(b []byte) (int, error) {
	if err := begin(b, OpLoginRej, LoginRejSize, r.Tag); err != nil {
		return 0, err
	}
	be.PutUint32(b[4:], uint32(r.Reason))
	be.PutUint16(b[24:], uint16(r.Formats))
	return LoginRejSize, nil
}

// Decode reads the unit; what follows its 32 bytes is padding.
func (r *LoginRej) Decode(b []byte) error {
	if err := check(b, OpLoginRej, LoginRejSize); err != nil {
		return err
	}
	r.Tag = be.Uint64(b[8:])
	r.Reason = RejectReason(be.Uint32(b[4:]))
	r.Formats = BufferFormats(be.Uint16(b[24:]))
	return nil
}
