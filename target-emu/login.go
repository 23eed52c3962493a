package targetemu

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"time"

	"srp-initiator/rdma/cm"
	"srp-initiator/srp/iu"
)

// ACL decides who may log in. The zero value admits everybody.
type ACL struct {
	ports    map[iu.PortID]bool
	guids    map[uint64]bool
	prefixes []netip.Prefix
	any      bool
}

// ParseACL reads entries of Config.ACL.
func ParseACL(entries []string) (*ACL, error) {
	a := &ACL{ports: map[iu.PortID]bool{}, guids: map[uint64]bool{}, any: len(entries) == 0}
	for _, e := range entries {
		if ip, err := netip.ParseAddr(e); err == nil {
			ip = ip.Unmap()
			a.prefixes = append(a.prefixes, netip.PrefixFrom(ip, ip.BitLen()))
			continue
		}
		if p, err := netip.ParsePrefix(e); err == nil {
			a.prefixes = append(a.prefixes, p)
			continue
		}
		digits := strings.ReplaceAll(strings.TrimPrefix(strings.ToLower(e), "0x"), ":", "")
		raw, err := hex.DecodeString(digits)
		switch {
		case err == nil && len(raw) == 16:
			a.ports[iu.PortID(raw)] = true
		case err == nil && len(raw) == 8:
			_, g := iu.PortID(append(make([]byte, 8), raw...)).Halves()
			a.guids[g] = true
		default:
			return nil, fmt.Errorf("access list entry %.40q: want an initiator port id (32 hexadecimal digits), a port GUID (16), an IP address or a prefix", e)
		}
	}
	return a, nil
}

// Admits reports whether an initiator port at addr may log in.
func (a *ACL) Admits(port iu.PortID, addr netip.Addr) bool {
	if a.any || a.ports[port] {
		return true
	}
	if _, guid := port.Halves(); a.guids[guid] {
		return true
	}
	addr = addr.Unmap().WithZone("")
	for _, p := range a.prefixes {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}

// rejection is a refused login: the reason that goes into SRP_LOGIN_REJ and the words that go to the log.
type rejection struct {
	reason iu.RejectReason
	why    string
	raw    []byte // sent in place of a SRP_LOGIN_REJ, by a fault
	ignore bool   // no answer at all, by a fault
}

func (r *rejection) Error() string { return fmt.Sprintf("%s: %s", r.reason, r.why) }

var errNotLogin = errors.New("the connection request holds no SRP login")

// decodeLogin reads the private data of a connection request.
func decodeLogin(data []byte, ib bool) (req iu.LoginReq, err error) {
	if ib {
		err = req.DecodeIB(data)
	} else {
		err = req.DecodeCM(data)
	}
	if err != nil {
		err = fmt.Errorf("%w: %w", errNotLogin, err)
	}
	return req, err
}

// judge checks a login request against what does not depend on other channels (SRP r16a, 5.2 and table 13). The order is ib_srpt's.
func (t *Target) judge(req *iu.LoginReq, from netip.Addr) *rejection {
	c := &t.cfg
	switch {
	case req.ITIULen < iu.MinITIULen || req.ITIULen > uint32(c.MaxITIULen):
		return &rejection{reason: iu.RejectITIULenTooLarge, why: fmt.Sprintf("requested IU length %d, allowed are %d to %d", req.ITIULen, iu.MinITIULen, c.MaxITIULen)}
	case req.TargetPort != t.port && req.TargetPort != t.portRev10:
		return &rejection{reason: iu.RejectUnableToAssociate, why: fmt.Sprintf("target port %s asked for, this is %s", req.TargetPort, t.port)}
	case req.Formats&c.Formats == 0:
		return &rejection{reason: iu.RejectUnsupportedFormat, why: fmt.Sprintf("descriptor formats 0x%04x, supported are 0x%04x", uint16(req.Formats), uint16(c.Formats))}
	case !t.acl.Admits(req.InitiatorPort, from):
		return &rejection{reason: iu.RejectUnableToAssociate, why: fmt.Sprintf("initiator port %s at %s is not on the access list", req.InitiatorPort, from)}
	case c.SingleChannel && req.Flags&iu.MultiChannelMask == iu.MultiChannel:
		return &rejection{reason: iu.RejectMultiChannel, why: fmt.Sprintf("channel %d asked for by the initiator port, %d granted: this target takes one channel of each (--single-channel)", t.asked(req.InitiatorPort), 1)}
	case req.Flags&iu.MultiChannelMask > iu.MultiChannel:
		return &rejection{reason: iu.RejectMultiChannel, why: fmt.Sprintf("reserved multi-channel action %d", req.Flags&iu.MultiChannelMask)}
	}
	return nil
}

// Bounds of the log of what the device refuses: strangers decide how often it does.
const (
	refusalsInARow = 8
	refusalsPause  = 10 * time.Second
)

// logRefusals says why logins fail that the device refuses before the target hears of them.
func logRefusals(log *slog.Logger, refused <-chan cm.Refusal, quit <-chan struct{}) {
	n := 0
	var pause <-chan time.Time
	for {
		select {
		case r := <-refused:
			if pause == nil {
				pause = time.After(refusalsPause)
			}
			if n++; n > refusalsInARow {
				continue
			}
			level := slog.LevelWarn
			if r.Reason == cm.ReasonStaleConnection { // the peer asks again by itself
				level = slog.LevelInfo
			}
			log.Log(context.Background(), level, "connection refused by the device", "from", r.From, "why", r)
		case <-pause:
			if n > refusalsInARow {
				log.Warn("more connections refused by the device", "count", n-refusalsInARow)
			}
			n, pause = 0, nil
		case <-quit:
			return
		}
	}
}

// accept makes the response to a login that may proceed.
func (t *Target) accept(req *iu.LoginReq) iu.LoginRsp {
	rsp := iu.LoginRsp{
		Tag:         req.Tag,
		ReqLimDelta: int32(t.cfg.RequestLimit),
		MaxITIULen:  uint32(t.cfg.MaxITIULen),
		MaxTIIULen:  req.ITIULen, // as ib_srpt: the kernel initiator makes its receive buffers this large
		Formats:     t.cfg.Formats,
		Flags:       iu.SolicitedSupported,
	}
	if req.Flags&iu.ImmediateDataFlag != 0 && !t.cfg.NoImmediate && req.ImmDataOffset >= iu.CommandSize+iu.ImmediateSize && int(req.ImmDataOffset) <= t.cfg.MaxITIULen {
		rsp.Flags |= iu.ImmediateSupported
	}
	return rsp
}
