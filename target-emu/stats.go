package targetemu

import (
	"sync/atomic"

	"srp-initiator/completion"
)

// counters are a channel's own; the owner of the channel writes, anybody reads.
type counters struct {
	commands, reads, writes, others     atomic.Uint64
	bytesIn, bytesOut                   atomic.Uint64
	immediate, external                 atomic.Uint64
	taskMgmt, aborted                   atomic.Uint64
	checkConditions, otherStatus        atomic.Uint64
	malformed, beyondLimit              atomic.Uint64
	credits                             atomic.Int64
	doorbells, workRequests             atomic.Uint64
	waitedForBuffer, waitedForSendQueue atomic.Uint64
	outstanding                         atomic.Int64
	maxOutstanding                      atomic.Int64
	credRsp, aerRsp, faults             atomic.Uint64
}

// tally is what a batch of completions will add to the counters that every command moves: an addition that others may read at any time costs
// more than what it counts.
type tally struct {
	commands, reads, bytesIn uint64
	outstanding, credits     int64
}

// add adds t, and empties it.
func (c *counters) add(t *tally) {
	if *t == (tally{}) {
		return
	}
	c.commands.Add(t.commands)
	c.reads.Add(t.reads)
	c.bytesIn.Add(t.bytesIn)
	c.outstanding.Add(t.outstanding)
	c.credits.Add(t.credits)
	*t = tally{}
}

// ChannelStats are one channel's counters.
type ChannelStats struct {
	Channel        int    `json:"channel"`
	Asked          int32  `json:"channels_asked"`   // by logins of the initiator port since its last single-channel one, which counts
	Granted        int32  `json:"channels_granted"` // of these
	Initiator      string `json:"initiator_port"`
	Address        string `json:"address"`
	QPN            uint32 `json:"qpn"`
	Commands       uint64 `json:"commands"`
	Reads          uint64 `json:"reads"`
	Writes         uint64 `json:"writes"`
	Others         uint64 `json:"others"`
	BytesIn        uint64 `json:"bytes_in"`  // data-in, to the initiator
	BytesOut       uint64 `json:"bytes_out"` // data-out, from it
	Immediate      uint64 `json:"immediate_writes"`
	ExternalTables uint64 `json:"external_tables"`
	TaskManagement uint64 `json:"task_management"`
	Aborted        uint64 `json:"aborted"`
	CheckCondition uint64 `json:"check_conditions"`
	OtherStatus    uint64 `json:"other_status"`
	Malformed      uint64 `json:"malformed"`
	BeyondLimit    uint64 `json:"beyond_limit"` // requests received without a credit
	CreditsGranted int64  `json:"credits_granted"`
	Outstanding    int64  `json:"outstanding"`
	MaxOutstanding int64  `json:"max_outstanding"`
	Doorbells      uint64 `json:"doorbells"`
	WorkRequests   uint64 `json:"work_requests"`
	BufferWaits    uint64 `json:"buffer_waits"`
	SendQueueWaits uint64 `json:"send_queue_waits"`
	CreditAnswers  uint64 `json:"cred_rsp"`
	EventAnswers   uint64 `json:"aer_rsp"`
	Faults         uint64 `json:"faults"`

	Completion completion.Stats `json:"completion"`
}

// Stats are a target's counters.
type Stats struct {
	Logins   uint64         `json:"logins"`
	Rejected uint64         `json:"rejected"`
	Evicted  uint64         `json:"evicted"` // logins given up for newer ones before their peer had answered
	Ended    uint64         `json:"ended"`   // channels that are gone
	Channels []ChannelStats `json:"channels"`
	Past     []ChannelStats `json:"past_channels"` // the last maxPast of the ended ones, oldest first
	Faults   []RuleStats    `json:"fault_rules"`   // of the fault script, in its order
}

// maxPast bounds Stats.Past.
const maxPast = 64

func (ch *channel) snapshot() ChannelStats {
	c := &ch.count
	return ChannelStats{
		Channel: ch.number, Asked: ch.logins.asked.Load(), Granted: ch.logins.granted.Load(), Initiator: ch.nexus.initiator.String(), Address: ch.from.String(), QPN: ch.qp.QPN(),
		Commands: c.commands.Load(), Reads: c.reads.Load(), Writes: c.writes.Load(), Others: c.others.Load(),
		BytesIn: c.bytesIn.Load(), BytesOut: c.bytesOut.Load(), Immediate: c.immediate.Load(), ExternalTables: c.external.Load(),
		TaskManagement: c.taskMgmt.Load(), Aborted: c.aborted.Load(), CheckCondition: c.checkConditions.Load(), OtherStatus: c.otherStatus.Load(),
		Malformed: c.malformed.Load(), BeyondLimit: c.beyondLimit.Load(), CreditsGranted: c.credits.Load(),
		Outstanding: c.outstanding.Load(), MaxOutstanding: c.maxOutstanding.Load(),
		Doorbells: c.doorbells.Load(), WorkRequests: c.workRequests.Load(), BufferWaits: c.waitedForBuffer.Load(), SendQueueWaits: c.waitedForSendQueue.Load(),
		CreditAnswers: c.credRsp.Load(), EventAnswers: c.aerRsp.Load(), Faults: c.faults.Load(),
		Completion: ch.inst.Stats(),
	}
}
