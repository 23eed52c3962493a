package iu

// ResponseFlags is the flags byte of a response.
type ResponseFlags uint8

const (
	RspValid     ResponseFlags = 0x01 // response data present
	SenseValid   ResponseFlags = 0x02 // sense data present
	OutOverflow  ResponseFlags = 0x04 // DOOVER
	OutUnderflow ResponseFlags = 0x08 // DOUNDER
	InOverflow   ResponseFlags = 0x10 // DIOVER
	InUnderflow  ResponseFlags = 0x20 // DIUNDER
)

// Response is SRP_RSP.
type Response struct {
	Tag         uint64
	SolNot      SolicitedNotification
	ReqLimDelta int32
	Flags       ResponseFlags
	Status      uint8  // SCSI status
	OutResidual uint32 // bytes, with OutOverflow or OutUnderflow
	InResidual  uint32 // bytes, with InOverflow or InUnderflow
	// Data is the response data (RspValid), Sense the sense data (SenseValid). Decode
	// leaves a slice nil whose flag is clear; Encode derives both flags from the slices.
	Data, Sense []byte
}

// Encode writes the response. RspValid and SenseValid are set when Data and Sense are not empty.
func (r *Response) Encode(b []byte) (int, error) {
	n := ResponseSize + len(r.Data) + len(r.Sense)
	if len(b) < n {
		return 0, ErrNoRoom
	}
	if err := begin(b, OpResponse, ResponseSize, r.Tag); err != nil {
		return 0, err
	}
	f := r.Flags &^ (RspValid | SenseValid)
	if len(r.Data) > 0 {
		f |= RspValid
	}
	if len(r.Sense) > 0 {
		f |= SenseValid
	}
	b[1] = byte(r.SolNot)
	be.PutUint32(b[4:], uint32(r.ReqLimDelta))
	b[18] = byte(f)
	b[19] = r.Status
	be.PutUint32(b[20:], r.OutResidual)
	be.PutUint32(b[24:], r.InResidual)
	be.PutUint32(b[28:], uint32(len(r.Sense)))
	be.PutUint32(b[32:], uint32(len(r.Data)))
	copy(b[ResponseSize:], r.Data)
	copy(b[ResponseSize+len(r.Data):], r.Sense)
	return n, nil
}

// Decode reads a response. Data and Sense alias b. A length field counts when its flag is set; sense data begin
// behind the response data length whether or not that flag is set, as the kernel reads it.
// When ErrShort is due to the lengths alone, all fixed fields have been read: the request limit delta counts even then.
func (r *Response) Decode(b []byte) error {
	if err := check(b, OpResponse, ResponseSize); err != nil {
		return err
	}
	r.Tag = be.Uint64(b[8:])
	r.SolNot = SolicitedNotification(b[1])
	r.ReqLimDelta = int32(be.Uint32(b[4:]))
	r.Flags = ResponseFlags(b[18])
	r.Status = b[19]
	r.OutResidual = be.Uint32(b[20:])
	r.InResidual = be.Uint32(b[24:])
	r.Data, r.Sense = nil, nil
	sense, data := uint64(be.Uint32(b[28:])), uint64(be.Uint32(b[32:]))
	rest := b[ResponseSize:]
	if r.Flags&(RspValid|SenseValid) == 0 {
		return nil
	}
	if data > uint64(len(rest)) {
		return ErrShort
	}
	if r.Flags&RspValid != 0 {
		r.Data = rest[:data:data]
	}
	if r.Flags&SenseValid != 0 {
		if data+sense > uint64(len(rest)) {
			return ErrShort
		}
		r.Sense = rest[data : data+sense : data+sense]
	}
	return nil
}

// TaskCode is the response code of a response to task management; false when the
// response holds none (RspValid clear or fewer than four bytes of response data).
func (r *Response) TaskCode() (TaskCode, bool) {
	if r.Flags&RspValid == 0 || len(r.Data) < 4 {
		return 0, false
	}
	return TaskCode(r.Data[3]), true
}
