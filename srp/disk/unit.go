// Package disk presents the logical units of an SRP session: Unit executes single SCSI commands with the retries that
// every initiator makes, Disk is a block device over one unit.
package disk

import (
	"context"
	"errors"
	"fmt"
	"time"

	"srp-initiator/srp"
	"srp-initiator/srp/scsi"
)

// Retry policy, after the kernel's scsi_decide_disposition.
const (
	maxAttentions = 8 // unit attentions reported one after another
	maxAborted    = 5 // ABORTED COMMAND, TASK ABORTED
	busyFirst     = 10 * time.Millisecond
	busyLongest   = 640 * time.Millisecond
)

// Unit is one logical unit.
type Unit struct {
	Session *srp.Session
	LUN     scsi.LUN
	// Attention, if set, is told of every unit attention that was retried.
	Attention func(scsi.Sense)
}

// Exec executes a command and retries what is not the command's fault: unit attentions, BUSY and TASK SET FULL until
// the session's command timeout, aborted commands. It returns how many bytes of data moved. Errors are those of srp.Session.Do.
func (u *Unit) Exec(ctx context.Context, cdb scsi.CDB, dir srp.Direction, data []byte) (int, error) {
	c := srp.Command{LUN: u.LUN, CDB: cdb, Dir: dir, Data: data}
	if len(data) == 0 {
		c.Dir = srp.NoData
	}
	var p RetryPolicy
	for {
		err := u.Session.Do(ctx, &c)
		if err == nil {
			return c.Transferred(), nil
		}
		wait, again := p.Again(&c, u.Session.Options().CommandTimeout, u.attention)
		if !again {
			return 0, err
		}
		if wait > 0 {
			t := time.NewTimer(wait)
			select {
			case <-t.C:
			case <-ctx.Done():
				t.Stop()
				return 0, context.Cause(ctx)
			}
		}
	}
}

func (u *Unit) attention(s scsi.Sense) {
	if u.Attention != nil {
		u.Attention(s)
	}
}

// RetryPolicy is the memory of one command's retries; the zero value is for a command that was not sent yet.
type RetryPolicy struct {
	attentions, aborted int
	busy                time.Duration
	busySince           time.Time
}

// Again decides whether a command that failed is to be sent again, and after what time. limit
// bounds how long a busy target is asked again (negative: 30 s); attention gets the sense data of unit attentions.
func (p *RetryPolicy) Again(c *srp.Command, limit time.Duration, attention func(scsi.Sense)) (time.Duration, bool) {
	if c.Err != nil {
		return 0, false // the session has done what can be done
	}
	switch c.Status {
	case scsi.StatusBusy, scsi.StatusTaskSetFull:
		now := time.Now()
		if p.busy == 0 {
			p.busy, p.busySince = busyFirst, now
		} else if p.busy < busyLongest {
			p.busy *= 2
		}
		if limit < 0 {
			limit = 30 * time.Second
		}
		return p.busy, now.Sub(p.busySince)+p.busy < limit
	case scsi.StatusTaskAborted:
		p.aborted++
		return 0, p.aborted < maxAborted
	case scsi.StatusCheckCondition:
		s, ok := scsi.ParseSense(c.Sense())
		if !ok || s.Deferred {
			return 0, false
		}
		switch s.Key {
		case scsi.UnitAttention:
			attention(s)
			p.attentions++
			return 0, p.attentions < maxAttentions
		case scsi.AbortedCommand:
			p.aborted++
			return busyFirst, p.aborted < maxAborted
		}
	}
	return 0, false
}

// Inquiry reads the standard data.
func (u *Unit) Inquiry(ctx context.Context) (scsi.InquiryData, error) {
	var b [96]byte
	n, err := u.Exec(ctx, scsi.Inquiry(uint16(len(b))), srp.DataIn, b[:])
	if err != nil {
		return scsi.InquiryData{}, err
	}
	return scsi.ParseInquiry(b[:n])
}

// VPD reads a vital product data page, all of it.
func (u *Unit) VPD(ctx context.Context, page uint8) (scsi.VPD, error) {
	for size := 252; ; {
		b := make([]byte, size)
		n, err := u.Exec(ctx, scsi.InquiryVPD(page, uint16(size)), srp.DataIn, b)
		if err != nil {
			return scsi.VPD{}, err
		}
		v, err := scsi.ParseVPD(b[:n], page)
		if err != nil || !v.Truncated() || size >= 0xffff || n < size {
			return v, err
		}
		size = min(v.Length+4, 0xffff)
	}
}

// SupportedVPD lists the pages that the unit says it has.
func (u *Unit) SupportedVPD(ctx context.Context) ([]byte, error) {
	v, err := u.VPD(ctx, scsi.VPDSupportedPages)
	return v.Data, err
}

// Capacity asks with READ CAPACITY(16), or (10) of units that know no other.
func (u *Unit) Capacity(ctx context.Context) (scsi.Capacity, error) {
	var b [32]byte
	n, err := u.Exec(ctx, scsi.ReadCapacity16(uint32(len(b))), srp.DataIn, b[:])
	if err == nil {
		return scsi.ParseCapacity16(b[:n])
	}
	if !isInvalidCommand(err) {
		return scsi.Capacity{}, err
	}
	if n, err = u.Exec(ctx, scsi.ReadCapacity10(), srp.DataIn, b[:8]); err != nil {
		return scsi.Capacity{}, err
	}
	c, tooBig, err := scsi.ParseCapacity10(b[:n])
	if err == nil && tooBig {
		err = errors.New("disk: the unit has more blocks than READ CAPACITY(10) can say and refuses READ CAPACITY(16)")
	}
	return c, err
}

// isInvalidCommand reports that the unit does not know the command, or not this form of it.
func isInvalidCommand(err error) bool {
	var cc *scsi.CheckConditionError
	return errors.As(err, &cc) && cc.Sense.Key == scsi.IllegalRequest &&
		(cc.Sense.ASC == scsi.ASCInvalidOpcode || cc.Sense.ASC == scsi.ASCInvalidFieldInCDB)
}

// Ready waits until the unit is ready: TEST UNIT READY, while it says that it is becoming so.
func (u *Unit) Ready(ctx context.Context) error {
	for deadline := time.Now().Add(30 * time.Second); ; {
		_, err := u.Exec(ctx, scsi.TestUnitReady(), srp.NoData, nil)
		var cc *scsi.CheckConditionError
		if !errors.As(err, &cc) || cc.Sense.Key != scsi.NotReady || cc.Sense.ASC>>8 != 0x04 || cc.Sense.ASC == scsi.ASCUnitNotReadyManual ||
			time.Now().After(deadline) {
			return err
		}
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// ModeSense reads mode pages: MODE SENSE(10), or (6) of units that know no other.
func (u *Unit) ModeSense(ctx context.Context, page uint8) (scsi.ModeData, error) {
	var b [252]byte
	n, err := u.Exec(ctx, scsi.ModeSense10(page, uint16(len(b))), srp.DataIn, b[:])
	if err == nil {
		return scsi.ParseMode(b[:n], true, false)
	}
	if !isInvalidCommand(err) {
		return scsi.ModeData{}, err
	}
	if n, err = u.Exec(ctx, scsi.ModeSense6(page, uint8(len(b))), srp.DataIn, b[:]); err != nil {
		return scsi.ModeData{}, err
	}
	return scsi.ParseMode(b[:n], false, false)
}

// LUNs asks a target for its logical units, through LUN 0.
func LUNs(ctx context.Context, s *srp.Session) ([]scsi.LUN, error) {
	u := Unit{Session: s}
	for size := 8 + 8*256; ; {
		b := make([]byte, size)
		n, err := u.Exec(ctx, scsi.ReportLUNs(0, uint32(size)), srp.DataIn, b)
		if err != nil {
			return nil, err
		}
		luns, total, err := scsi.ParseLUNList(b[:n])
		if err != nil {
			return nil, err
		}
		if total <= len(luns) || 8+8*total <= size {
			return luns, nil
		}
		if size = 8 + 8*total; size > s.MaxTransfer() {
			return nil, fmt.Errorf("disk: the target has %d logical units: more than one command can list", total)
		}
	}
}
