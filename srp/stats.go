package srp

import (
	"srp-initiator/completion"
	"srp-initiator/srp/iu"
)

// ChannelStats are the counters of one channel.
type ChannelStats struct {
	Commands       uint64 `json:"commands"`        // sent
	Responses      uint64 `json:"responses"`       // received, to task management too
	Doorbells      uint64 `json:"doorbells"`       // posts to the send queue
	Waited         uint64 `json:"waited"`          // commands that could not be sent at once
	ZeroReqLim     uint64 `json:"zero_req_lim"`    // times a command found no credit
	Immediate      uint64 `json:"immediate"`       // writes whose data travelled in the command
	Bounced        uint64 `json:"bounced"`         // commands whose data were copied
	BounceWaits    uint64 `json:"bounce_waits"`    // times a command found no bounce memory
	ExternalTables uint64 `json:"external_tables"` // commands with descriptors that the target had to fetch
	Residuals      uint64 `json:"residuals"`       // responses with a residual
	CreditRequests uint64 `json:"credit_requests"` // SRP_CRED_REQ
	AsyncEvents    uint64 `json:"async_events"`    // SRP_AER_REQ
	UnknownUnits   uint64 `json:"unknown_units"`   // information units of unknown type
	UnknownTags    uint64 `json:"unknown_tags"`    // responses to nothing: late or wrong
	ProtocolErrors uint64 `json:"protocol_errors"`
	WorkErrors     uint64 `json:"work_errors"` // failed or flushed work requests
	TaskMgmt       uint64 `json:"task_mgmt"`   // task management functions sent
	Aborts         uint64 `json:"aborts"`      // commands aborted because they were late or cancelled
	Resets         uint64 `json:"resets"`      // logical units reset because an abort did not help
	NotSent        uint64 `json:"not_sent"`    // commands that timed out or were cancelled before they were sent
	Retries        uint64 `json:"retries"`     // commands sent again after a reset
}

func (a *ChannelStats) add(b ChannelStats) {
	a.Commands += b.Commands
	a.Responses += b.Responses
	a.Doorbells += b.Doorbells
	a.Waited += b.Waited
	a.ZeroReqLim += b.ZeroReqLim
	a.Immediate += b.Immediate
	a.Bounced += b.Bounced
	a.BounceWaits += b.BounceWaits
	a.ExternalTables += b.ExternalTables
	a.Residuals += b.Residuals
	a.CreditRequests += b.CreditRequests
	a.AsyncEvents += b.AsyncEvents
	a.UnknownUnits += b.UnknownUnits
	a.UnknownTags += b.UnknownTags
	a.ProtocolErrors += b.ProtocolErrors
	a.WorkErrors += b.WorkErrors
	a.TaskMgmt += b.TaskMgmt
	a.Aborts += b.Aborts
	a.Resets += b.Resets
	a.NotSent += b.NotSent
	a.Retries += b.Retries
}

// Add is the sum of both.
func (a ChannelStats) Add(b ChannelStats) ChannelStats { a.add(b); return a }

// Sub is what was counted between before and a.
func (a ChannelStats) Sub(before ChannelStats) ChannelStats {
	a.Commands -= before.Commands
	a.Responses -= before.Responses
	a.Doorbells -= before.Doorbells
	a.Waited -= before.Waited
	a.ZeroReqLim -= before.ZeroReqLim
	a.Immediate -= before.Immediate
	a.Bounced -= before.Bounced
	a.BounceWaits -= before.BounceWaits
	a.ExternalTables -= before.ExternalTables
	a.Residuals -= before.Residuals
	a.CreditRequests -= before.CreditRequests
	a.AsyncEvents -= before.AsyncEvents
	a.UnknownUnits -= before.UnknownUnits
	a.UnknownTags -= before.UnknownTags
	a.ProtocolErrors -= before.ProtocolErrors
	a.WorkErrors -= before.WorkErrors
	a.TaskMgmt -= before.TaskMgmt
	a.Aborts -= before.Aborts
	a.Resets -= before.Resets
	a.NotSent -= before.NotSent
	a.Retries -= before.Retries
	return a
}

// ChannelInfo is what one channel negotiated, and where it stands.
type ChannelInfo struct {
	Index          int              `json:"index"`
	QPN            uint32           `json:"qpn"`
	Local          string           `json:"local"`
	Peer           string           `json:"peer"`
	PathMTU        int              `json:"path_mtu"`
	InitiatorPort  string           `json:"initiator_port"`
	MultiChannel   string           `json:"multi_channel"` // the target's answer
	InitialCredits int32            `json:"initial_credits"`
	ReqLim         int32            `json:"req_lim"`
	Inflight       int              `json:"inflight"`
	Waiting        int              `json:"waiting"`
	QueueDepth     int              `json:"queue_depth"`
	MaxITIULen     uint32           `json:"max_it_iu_len"` // the target's limit
	MaxTIIULen     uint32           `json:"max_ti_iu_len"`
	IULimit        int              `json:"iu_limit"` // the largest unit we send
	Descriptors    int              `json:"descriptors"`
	Immediate      int              `json:"immediate_bytes"` // 0: none
	Formats        uint16           `json:"buffer_formats"`
	Stats          ChannelStats     `json:"stats"`
	Completion     completion.Stats `json:"completion"`
}

// Stats are a session's counters.
type Stats struct {
	State      string        `json:"state"`
	Mode       string        `json:"mode"`
	Reconnects uint64        `json:"reconnects"`
	Failures   uint64        `json:"reconnect_failures"`
	Held       int           `json:"held"` // commands that wait for a connection
	Channels   []ChannelInfo `json:"channels"`
	// Total counts all channels there ever were.
	Total      ChannelStats     `json:"total"`
	Completion completion.Stats `json:"completion"`
}

func multiChannelText(f iu.LoginRspFlags) string {
	switch f & iu.MultiChannelResultMask {
	case iu.NoExistingChannel:
		return "no other channel"
	case iu.ChannelsTerminated:
		return "others terminated"
	case iu.ChannelsMaintained:
		return "others maintained"
	}
	return "reserved"
}

// Stats takes a snapshot. Each channel's is consistent in itself.
func (s *Session) Stats() Stats {
	s.mu.Lock()
	st := Stats{State: s.state.String(), Mode: s.Mode().String(), Reconnects: s.reconnects, Failures: s.failures,
		Held: s.held.n, Total: s.retired, Completion: s.retiredCQ}
	s.mu.Unlock()
	for _, ch := range s.channels() {
		ch.mu.Lock()
		i := ChannelInfo{Index: ch.index, QPN: ch.qp.QPN(), Local: ch.route.Local.String(), Peer: ch.route.Peer.String(),
			PathMTU:       ch.route.PathMTU.Bytes(),
			InitiatorPort: portID(s.target.IOClass, s.opts.InitiatorExt, ch.portGUID()).String(),
			MultiChannel:  multiChannelText(ch.login.Flags), InitialCredits: ch.login.ReqLimDelta, ReqLim: ch.reqLim,
			Inflight: ch.inflight, Waiting: ch.waiting.n, QueueDepth: ch.queueLimit,
			MaxITIULen: ch.login.MaxITIULen, MaxTIIULen: ch.login.MaxTIIULen, IULimit: ch.iuLimit, Descriptors: ch.inlineDescs,
			Immediate: ch.immLimit, Formats: uint16(ch.login.Formats), Stats: ch.stats}
		ch.mu.Unlock()
		i.Completion = ch.inst.Stats()
		st.Channels = append(st.Channels, i)
		st.Total.add(i.Stats)
		st.Completion = st.Completion.Add(i.Completion)
	}
	return st
}
