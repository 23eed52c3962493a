package srp

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"srp-initiator/completion"
	"srp-initiator/srp/iu"
	"srp-initiator/srp/scsi"
)

// Direction is where the data of a command go.
type Direction uint8

const (
	NoData  Direction = iota
	DataIn            // from the logical unit into memory
	DataOut           // from memory to the logical unit
)

// Command is one SCSI command. The caller fills the first block, gives it to Session.Submit or Session.Do and
// must not touch it or its data until it is done; then it may be used again.
type Command struct {
	LUN  scsi.LUN
	CDB  scsi.CDB
	Attr iu.TaskAttribute
	Dir  Direction
	// Data is the buffer. What lies in memory from Session.AllocMemory moves
	// without a copy, other memory by way of a bounce buffer.
	Data []byte
	// Gather, if not empty, is the buffer in pieces, in place of Data.
	Gather [][]byte
	// Queue chooses the channel: n > 0 is channel (n-1) modulo their number, 0 takes them in turn.
	Queue int
	// Timeout before the command is aborted: 0 is LoginOptions.CommandTimeout, Off none.
	Timeout time.Duration
	// Retry lets the session send the command again when the connection broke while it was on its way. Only
	// for commands that may be executed twice, as reads and writes of given blocks may.
	Retry bool
	// Done is called when the command is done, from whichever goroutine reaps completions: it must
	// not block, but may submit. Optional.
	Done func(*Command)
	// Waiter is signaled when the command is done. Set it when a goroutine will be in Session.Wait
	// with it: then nobody else needs to be woken for this command. Optional.
	Waiter *completion.Waiter

	// Results, valid when done.
	Status   scsi.Status
	Residual int64 // bytes of the buffer that did not move; negative: so many more there would have been
	Err      error // why there is no status: nil when the target answered
	// Ended is when the command was done: one reading of the clock for all whose answers were reaped together.
	Ended time.Time

	senseLen int
	sense    [252]byte // the length of sense data is at most 252 (SPC-4 4.5.1)

	// The session's from Submit until done.
	state    atomic.Uint32
	own      completion.Waiter // for Do
	next     *Command          // in a list of the channel or session
	length   int               // bytes of the buffer
	pieces   int               // non-empty ones
	inPlace  bool              // every piece lies in registered memory
	deadline int64             // session clock, 0: none
	tries    int
	bounce   int  // first unit of its bounce memory, -1: none
	cancel   bool // abort it as soon as possible
	why      error
	attended bool // somebody waits: not counted as unattended
	slot     int32
	where    atomic.Pointer[channel] // where it is or was last, for Do
}

const (
	cmdIdle uint32 = iota
	cmdSubmitted
)

// Sense is the sense data of the answer; it aliases the command.
func (c *Command) Sense() []byte { return c.sense[:c.senseLen] }

// Transferred is how many bytes of the buffer moved, as the target reported it.
func (c *Command) Transferred() int {
	if c.Residual > 0 {
		return c.length - int(c.Residual)
	}
	return c.length
}

// Length is the size of the buffer in bytes.
func (c *Command) Length() int { return c.length }

// Error is nil when the command was executed with a good status. Else it is Err, or what scsi.Error says of the status.
// A residual is no error.
func (c *Command) Error() error {
	if c.Err != nil {
		return c.Err
	}
	return scsi.Error(c.CDB.Bytes(), c.Status, c.Sense())
}

// Errors of commands and sessions.
var (
	// ErrClosed: the session was closed.
	ErrClosed = errors.New("srp: the session is closed")
	// ErrAborted: the command took longer than its timeout and was aborted.
	ErrAborted = errors.New("srp: command timed out and was aborted")
	// ErrNotSent: the command timed out before the target's request limit let it be sent.
	ErrNotSent = errors.New("srp: command timed out waiting to be sent")
	// ErrReset: a logical unit reset, made because another command timed out, ended the command.
	ErrReset = errors.New("srp: command ended by a logical unit reset")
	// ErrConnectionLost: the connection broke before the answer came; whether the command was executed is not known.
	ErrConnectionLost = errors.New("srp: connection lost")
	// ErrFailFast: the connection has been down for longer than fast_io_fail_tmo.
	ErrFailFast = errors.New("srp: no connection to the target (fast_io_fail_tmo passed); still trying to reconnect")
	// ErrDeviceLost: the connection has been down for longer than dev_loss_tmo, or cannot come back.
	ErrDeviceLost = errors.New("srp: session lost")
)

// ProtocolError is something that an SRP target must not send.
type ProtocolError struct {
	Channel int
	What    string
	Err     error
}

func (e *ProtocolError) Error() string {
	s := fmt.Sprintf("srp: protocol error of the target on channel %d: %s", e.Channel, e.What)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

func (e *ProtocolError) Unwrap() error { return e.Err }

// ArgumentError is a command that cannot be sent as it is.
type ArgumentError struct{ Reason string }

func (e *ArgumentError) Error() string { return "srp: " + e.Reason }

// prepare checks the caller's part and measures the buffer.
func (c *Command) prepare(s *Session) error {
	if n := c.CDB.Len(); n == 0 || n > scsi.MaxCDBLen {
		return &ArgumentError{fmt.Sprintf("a CDB has 1 to %d bytes, not %d", scsi.MaxCDBLen, n)}
	}
	c.length, c.pieces, c.inPlace = 0, 0, true
	one := [1][]byte{c.Data}
	list := c.Gather
	if len(list) == 0 {
		list = one[:]
	}
	for _, p := range list {
		if len(p) == 0 {
			continue
		}
		c.length += len(p)
		c.pieces++
		if c.inPlace && s.memories.find(p) == nil {
			c.inPlace = false
		}
	}
	switch {
	case c.Dir > DataOut:
		return &ArgumentError{fmt.Sprintf("direction %d", c.Dir)}
	case c.Dir == NoData && c.length > 0:
		return &ArgumentError{"a buffer but no direction"}
	case c.length > s.maxTransfer:
		return &ArgumentError{fmt.Sprintf("%d bytes in one command; the session's limit is %d (max_sect)", c.length, s.maxTransfer)}
	}
	if n := c.CDB.Len(); n > 16 { // all others fit any target
		if size := iu.CommandSize + (n-16+3)&^3 + iu.DescriptorSize; size > int(s.iuLimit.Load()) {
			return &ArgumentError{fmt.Sprintf("a CDB of %d bytes makes a command of %d; the target takes %d", n, size, s.iuLimit.Load())}
		}
	}
	if c.pieces > s.opts.sgLimit() {
		c.inPlace = false // more pieces than descriptors: bounce
	}
	c.Status, c.Residual, c.Err, c.senseLen = 0, 0, nil, 0
	c.tries, c.bounce, c.cancel, c.why, c.slot = 0, -1, false, nil, -1
	c.attended = c.Waiter != nil
	return nil
}

// copyIn copies the buffer's first bytes to b.
func (c *Command) copyTo(b []byte) {
	if len(c.Gather) == 0 {
		copy(b, c.Data)
		return
	}
	for _, p := range c.Gather {
		b = b[copy(b, p):]
	}
}

// copyFrom fills the buffer from b.
func (c *Command) copyFrom(b []byte) {
	if len(c.Gather) == 0 {
		copy(c.Data, b)
		return
	}
	for _, p := range c.Gather {
		b = b[copy(p, b):]
	}
}

// list is a queue of commands linked by next.
type list struct {
	head, tail *Command
	n          int
}

func (l *list) push(c *Command) {
	c.next = nil
	if l.tail == nil {
		l.head = c
	} else {
		l.tail.next = c
	}
	l.tail = c
	l.n++
}

func (l *list) pop() *Command {
	c := l.head
	if c != nil {
		l.head = c.next
		if l.head == nil {
			l.tail = nil
		}
		c.next = nil
		l.n--
	}
	return c
}

// remove takes c out and reports whether it was in.
func (l *list) remove(c *Command) bool {
	var prev *Command
	for x := l.head; x != nil; prev, x = x, x.next {
		if x != c {
			continue
		}
		if prev == nil {
			l.head = c.next
		} else {
			prev.next = c.next
		}
		if l.tail == c {
			l.tail = prev
		}
		c.next = nil
		l.n--
		return true
	}
	return false
}

// Do submits c and waits until it is done; then its error, as Command.Error. When ctx ends first, the command is aborted, and Do
// returns when its buffers are out of use, which may take as long as the session's recovery does. Done and Waiter of c are not used.
func (s *Session) Do(ctx context.Context, c *Command) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	c.Done, c.Waiter = nil, &c.own
	if err := s.Submit(c); err != nil {
		return err
	}
	if ctx.Done() != nil {
		over := make(chan struct{})
		stop := context.AfterFunc(ctx, func() { s.Cancel(c, context.Cause(ctx)); close(over) })
		defer func() {
			if !stop() {
				<-over // it must not hit what the caller does with c next
			}
		}()
	}
	for c.state.Load() != cmdIdle {
		s.waitFor(c)
	}
	return c.Error()
}
