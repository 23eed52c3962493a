package targetemu

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"srp-initiator/completion"
	"srp-initiator/srp/iu"
	"srp-initiator/target-emu/lun"
)

// Limits and their reasons.
const (
	// DefaultPort is the RDMA/CM port that Linux targets commonly use for SRP.
	DefaultPort = 5555
	// DefaultRequestLimit is what ib_srpt grants.
	DefaultRequestLimit = 128
	// MaxRequestLimit bounds the buffers of a channel.
	MaxRequestLimit = 4096
	// DefaultMaxITIULen is ib_srpt's srp_max_req_size: 8 KiB of immediate data at offset 80 and a descriptor.
	DefaultMaxITIULen = 8276
	// MinITIULen and MaxITIULen bound the IUs from the initiator: the least is the protocol's, the most the receive memory of a channel.
	MinITIULen = iu.MinITIULen
	MaxITIULen = 1 << 20
	// DefaultMaxChannels per I_T nexus; ib_srp asks for as many as the machine has CPUs.
	DefaultMaxChannels = 64
	// DefaultMaxSessions bounds all channels of the target, each of which holds about 5 MiB.
	DefaultMaxSessions = 256

	// spareReceives are posted beyond the request limit for what costs no credit: CRED_RSP, AER_RSP, I_LOGOUT.
	spareReceives = 16
	// signalEvery is how many responses may go by between two signaled ones. A completed
	// response's slot stays taken until a later signaled one completes.
	signalEvery = 16
	// smallLen is the data buffer that each command slot owns. Larger data goes straight to
	// and from the store's memory, or through a large buffer.
	smallLen = lun.ScratchLen
	// aheadLen is the most data of a read that go in front of everything else in a batch: together they fill trains. With more the first
	// response would wait for too much data of others.
	aheadLen = 16 << 10
	// largeLen is a large buffer; it must hold what a command needs in one piece.
	largeLen = lun.WholeLen
	// largeBuffers per channel. Commands that need one wait in order when all are taken.
	largeBuffers = 8
	// maxStepWRs is how many RDMA requests one command posts before others have a turn.
	maxStepWRs = 64
	// maxPiece is the most that one RDMA request moves; rxe's largest message is 8 MiB.
	maxPiece = 1 << 20
	// maxDescriptors is the longest descriptor table taken from a command: ib_srp's sg_tablesize goes to 2048.
	maxDescriptors = 4096
	// txLen is a response slot: 36 bytes, 4 of response data, sense, and room for what faults add.
	txLen = 512
	// maxLogins is how many logins may be under way at once.
	maxLogins = 64
	// maxLoginsFrom of them from one address: logins that one node begins and does not finish keep nobody else out.
	maxLoginsFrom = maxLogins / 2
	// breakTime is how long a channel that a fault broke off stays silent before its DREQ.
	breakTime = 10 * time.Second
	// ignoreTime is how long a login that a fault ignores is kept from being answered: longer than the kernel's CM repeats a request
	// (CMA_MAX_CM_RETRIES times 4.3 s).
	ignoreTime = 2 * time.Minute
	// loginTimeout ends a login whose peer does not finish it.
	loginTimeout = 10 * time.Second
	// halfOpenGrace is how long a channel's peer has for its RTU before others may have its session, where there are no more, or its address's
	// place.
	halfOpenGrace = time.Second
	// supersededGrace is how much longer a login may take after the same initiator port has sent another one.
	supersededGrace = time.Second
)

// Config says what target port to be. The zero value of each field is a good default, except Units.
type Config struct {
	// Listen is the RDMA/CM address; port 0: DefaultPort, or a free one with AnyPort.
	Listen  netip.AddrPort
	AnyPort bool

	// IDExt and IOCGUID are the halves of the target port identifier. 0: the device's node GUID, as ib_srpt.
	IDExt, IOCGUID uint64

	Units *lun.Map

	// ACL admits initiators by port identifier ("0x" and 32 hexadecimal digits, or the two halves with a colon), by
	// the second half alone (16 digits, a port GUID), or by IP address or prefix. Empty: everybody.
	ACL []string

	RequestLimit  int  // credits per channel; 2 or more
	MaxITIULen    int  // bytes, 64 to MaxITIULen
	MaxChannels   int  // per I_T nexus
	MaxSessions   int  // channels in all
	SingleChannel bool // refuse further channels (reason 0x00010005)
	NoImmediate   bool // do not offer immediate data
	// Formats are the descriptor formats offered; 0: direct and indirect.
	Formats iu.BufferFormats

	Completion completion.Config // mode and its knobs, per channel; Vector is set per channel

	Faults *Faults      // nil: none
	Log    *slog.Logger // control path only; nil: none
}

func (c *Config) fill() error {
	c.RequestLimit = cmp.Or(c.RequestLimit, DefaultRequestLimit)
	c.MaxITIULen = cmp.Or(c.MaxITIULen, DefaultMaxITIULen)
	c.MaxChannels = cmp.Or(c.MaxChannels, DefaultMaxChannels)
	c.MaxSessions = cmp.Or(c.MaxSessions, DefaultMaxSessions)
	c.Formats = cmp.Or(c.Formats, iu.DirectFormat|iu.IndirectFormat)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Listen.Port() == 0 && !c.AnyPort {
		c.Listen = netip.AddrPortFrom(c.Listen.Addr(), DefaultPort)
	}
	switch {
	case c.Units == nil:
		return errors.New("targetemu: no logical units")
	case c.RequestLimit < 2 || c.RequestLimit > MaxRequestLimit:
		return fmt.Errorf("targetemu: request limit %d: want 2 to %d (an initiator keeps one for task management)", c.RequestLimit, MaxRequestLimit)
	case c.MaxITIULen < MinITIULen || c.MaxITIULen > MaxITIULen:
		return fmt.Errorf("targetemu: IU length %d: want %d to %d bytes", c.MaxITIULen, MinITIULen, MaxITIULen)
	case c.MaxChannels < 1 || c.MaxSessions < 1:
		return errors.New("targetemu: at least one channel must be allowed")
	case c.Formats&^(iu.DirectFormat|iu.IndirectFormat) != 0:
		return fmt.Errorf("targetemu: descriptor formats 0x%04x: want a combination of 0x0002 (direct) and 0x0004 (indirect)", uint16(c.Formats))
	}
	return nil
}

// Check reports what is wrong with the configuration, without changing it.
func (c Config) Check() error { return c.fill() }

// SetFormats sets the descriptor formats offered, as the bits of SRP_LOGIN_RSP: 2 direct, 4 indirect.
func (c *Config) SetFormats(bits uint16) { c.Formats = iu.BufferFormats(bits) }
