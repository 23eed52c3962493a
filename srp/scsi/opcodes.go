package scsi

import "encoding/hex"

// CommandDescriptor is one entry of REPORT SUPPORTED OPERATION CODES (all commands format, SPC-4, 6.34.2).
type CommandDescriptor struct {
	Opcode           Opcode
	HasServiceAction bool
	ServiceAction    uint16
	CDBLen           uint16
}

// Name names the command.
func (c CommandDescriptor) Name() string {
	if c.HasServiceAction {
		return CommandName([]byte{byte(c.Opcode), byte(c.ServiceAction) & 0x1f})
	}
	return c.Opcode.String()
}

// AppendCommandList appends the all-commands data; with rctd each entry gets a (zero) timeouts descriptor.
func AppendCommandList(dst []byte, list []CommandDescriptor, rctd bool) []byte {
	start := len(dst)
	dst = append(dst, 0, 0, 0, 0)
	for _, c := range list {
		var b [8]byte
		b[0] = byte(c.Opcode)
		be.PutUint16(b[2:], c.ServiceAction)
		bit(&b[5], 1, c.HasServiceAction)
		bit(&b[5], 2, rctd)
		be.PutUint16(b[6:], c.CDBLen)
		dst = append(dst, b[:]...)
		if rctd {
			dst = appendNoTimeouts(dst)
		}
	}
	be.PutUint32(dst[start:], uint32(len(dst)-start-4))
	return dst
}

// appendNoTimeouts appends a command timeouts descriptor that states none (SPC-4, 6.34.4).
func appendNoTimeouts(dst []byte) []byte {
	return append(dst, 0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
}

// ParseCommandList reads the all-commands data that was received.
func ParseCommandList(b []byte) (list []CommandDescriptor, err error) {
	if len(b) < 4 {
		return nil, shortError("supported operation codes", len(b), 4)
	}
	if n := uint64(be.Uint32(b)) + 4; n < uint64(len(b)) {
		b = b[:n]
	}
	for b = b[4:]; len(b) >= 8; {
		c := CommandDescriptor{Opcode: Opcode(b[0]), HasServiceAction: b[5]&1 != 0, ServiceAction: be.Uint16(b[2:]), CDBLen: be.Uint16(b[6:])}
		list = append(list, c)
		n := 8
		if b[5]&2 != 0 {
			n = 20
		}
		b = b[min(n, len(b)):]
	}
	return list, nil
}

// Support values of the one-command format.
const (
	CommandUnknown     = 0 // data not available now
	CommandUnsupported = 1
	CommandSupported   = 3 // as the standard says
	CommandVendor      = 5 // in a vendor-specific way
)

// CommandSupport is the one-command data (SPC-4, 6.34.3).
type CommandSupport struct {
	Support uint8
	// Usage is the CDB usage map: a 1 bit for each bit that the device looks at, the opcode in byte 0.
	Usage []byte
}

// Supported reports that the command works.
func (c CommandSupport) Supported() bool {
	return c.Support == CommandSupported || c.Support == CommandVendor
}

func (c CommandSupport) String() string {
	if !c.Supported() {
		return "not supported"
	}
	return "supported, usage " + hex.EncodeToString(c.Usage)
}

// Append appends the one-command data.
func (c CommandSupport) Append(dst []byte, rctd bool) []byte {
	b1 := c.Support & 7
	if rctd {
		b1 |= 0x80
	}
	dst = append(dst, 0, b1)
	dst = be.AppendUint16(dst, uint16(len(c.Usage)))
	dst = append(dst, c.Usage...)
	if rctd {
		dst = appendNoTimeouts(dst)
	}
	return dst
}

// ParseCommandSupport reads the one-command data.
func ParseCommandSupport(b []byte) (c CommandSupport, err error) {
	if len(b) < 4 {
		return c, shortError("one operation code's support", len(b), 4)
	}
	c.Support = b[1] & 7
	n := int(be.Uint16(b[2:]))
	c.Usage = b[4:min(4+n, len(b))]
	return c, nil
}
