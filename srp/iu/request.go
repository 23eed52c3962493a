package iu

import "fmt"

// CredReq is SRP_CRED_REQ: the target port changes the request limit.
type CredReq struct {
	Tag         uint64
	SolNot      SolicitedNotification
	ReqLimDelta int32
}

// Encode writes the unit's 16 bytes.
func (r *CredReq) Encode(b []byte) (int, error) {
	if err := begin(b, OpCredReq, ShortSize, r.Tag); err != nil {
		return 0, err
	}
	b[1] = byte(r.SolNot)
	be.PutUint32(b[4:], uint32(r.ReqLimDelta))
	return ShortSize, nil
}

// Decode reads the unit.
func (r *CredReq) Decode(b []byte) error {
	if err := check(b, OpCredReq, ShortSize); err != nil {
		return err
	}
	*r = CredReq{Tag: be.Uint64(b[8:]), SolNot: SolicitedNotification(b[1]), ReqLimDelta: int32(be.Uint32(b[4:]))}
	return nil
}

// AERReq is SRP_AER_REQ: an asynchronous event of a logical unit.
type AERReq struct {
	Tag         uint64
	SolNot      SolicitedNotification
	ReqLimDelta int32
	LUN         LUN
	Sense       []byte
}

// Encode writes the unit.
func (r *AERReq) Encode(b []byte) (int, error) {
	if len(b) < AERReqSize+len(r.Sense) {
		return 0, ErrNoRoom
	}
	if err := begin(b, OpAERReq, AERReqSize, r.Tag); err != nil {
		return 0, err
	}
	b[1] = byte(r.SolNot)
	be.PutUint32(b[4:], uint32(r.ReqLimDelta))
	copy(b[20:], r.LUN[:])
	be.PutUint32(b[28:], uint32(len(r.Sense)))
	copy(b[AERReqSize:], r.Sense)
	return AERReqSize + len(r.Sense), nil
}

// Decode reads the unit; Sense aliases b.
func (r *AERReq) Decode(b []byte) error {
	if err := check(b, OpAERReq, AERReqSize); err != nil {
		return err
	}
	n := uint64(be.Uint32(b[28:]))
	if n > uint64(len(b)-AERReqSize) {
		return ErrShort
	}
	*r = AERReq{Tag: be.Uint64(b[8:]), SolNot: SolicitedNotification(b[1]), ReqLimDelta: int32(be.Uint32(b[4:])),
		LUN: LUN(b[20:28]), Sense: b[AERReqSize : AERReqSize+n : AERReqSize+n]}
	return nil
}

// CredRsp is SRP_CRED_RSP.
type CredRsp struct{ Tag uint64 }

// Encode writes the unit's 16 bytes.
func (r *CredRsp) Encode(b []byte) (int, error) { return encodeTag(b, OpCredRsp, r.Tag) }

// Decode reads the unit.
func (r *CredRsp) Decode(b []byte) error { return decodeTag(b, OpCredRsp, &r.Tag) }

// AERRsp is SRP_AER_RSP.
type AERRsp struct{ Tag uint64 }

// Encode writes the unit's 16 bytes.
func (r *AERRsp) Encode(b []byte) (int, error) { return encodeTag(b, OpAERRsp, r.Tag) }

// Decode reads the unit.
func (r *AERRsp) Decode(b []byte) error { return decodeTag(b, OpAERRsp, &r.Tag) }

// ILogout is SRP_I_LOGOUT: the initiator port is about to disconnect.
type ILogout struct{ Tag uint64 }

// Encode writes the unit's 16 bytes.
func (r *ILogout) Encode(b []byte) (int, error) { return encodeTag(b, OpILogout, r.Tag) }

// Decode reads the unit.
func (r *ILogout) Decode(b []byte) error { return decodeTag(b, OpILogout, &r.Tag) }

func encodeTag(b []byte, op Opcode, tag uint64) (int, error) {
	if err := begin(b, op, ShortSize, tag); err != nil {
		return 0, err
	}
	return ShortSize, nil
}

func decodeTag(b []byte, op Opcode, tag *uint64) error {
	if err := check(b, op, ShortSize); err != nil {
		return err
	}
	*tag = be.Uint64(b[8:])
	return nil
}

// LogoutReason is the reason of a SRP_T_LOGOUT.
type LogoutReason uint32

const (
	LogoutNoReason        LogoutReason = 0
	LogoutInactive        LogoutReason = 1
	LogoutInvalidType     LogoutReason = 2
	LogoutUnsolicitedRsp  LogoutReason = 3
	LogoutMultiChannel    LogoutReason = 4
	LogoutUnsupportedOutF LogoutReason = 6
	LogoutUnsupportedInF  LogoutReason = 7
	LogoutInvalidOutCount LogoutReason = 8
	LogoutInvalidInCount  LogoutReason = 9
)

func (r LogoutReason) String() string {
	switch r {
	case LogoutNoReason:
		return "no reason given"
	case LogoutInactive:
		return "RDMA channel inactive"
	case LogoutInvalidType:
		return "invalid information unit type"
	case LogoutUnsolicitedRsp:
		return "response without a request"
	case LogoutMultiChannel:
		return "ended by a login with another multi-channel action"
	case LogoutUnsupportedOutF:
		return "unsupported data-out buffer descriptor format"
	case LogoutUnsupportedInF:
		return "unsupported data-in buffer descriptor format"
	case LogoutInvalidOutCount:
		return "invalid data-out buffer descriptor count"
	case LogoutInvalidInCount:
		return "invalid data-in buffer descriptor count"
	}
	return fmt.Sprintf("unknown reason %d", uint32(r))
}

// TLogout is SRP_T_LOGOUT: the target port is about to disconnect.
type TLogout struct {
	Tag    uint64
	SolNot SolicitedNotification
	Reason LogoutReason
}

// Encode writes the unit's 16 bytes.
func (r *TLogout) Encode(b []byte) (int, error) {
	if err := begin(b, OpTLogout, ShortSize, r.Tag); err != nil {
		return 0, err
	}
	b[1] = byte(r.SolNot)
	be.PutUint32(b[4:], uint32(r.Reason))
	return ShortSize, nil
}

// Decode reads the unit.
func (r *TLogout) Decode(b []byte) error {
	if err := check(b, OpTLogout, ShortSize); err != nil {
		return err
	}
	*r = TLogout{Tag: be.Uint64(b[8:]), SolNot: SolicitedNotification(b[1]), Reason: LogoutReason(be.Uint32(b[4:]))}
	return nil
}
