package completion

import "sync/atomic"

// Stats are an instance's counters since Start, as of one moment but not
// of one instant.
type Stats struct {
	Notifications   uint64 `json:"notifications"`    // events of the queue taken from its channel
	Wakeups         uint64 `json:"wakeups"`          // times a parked reaper was woken: by a notification, a hand-over, a change of mode
	Polls           uint64 `json:"polls"`            // calls of CompletionQueue.Poll
	EmptyPolls      uint64 `json:"empty_polls"`      // those that found nothing
	Completions     uint64 `json:"completions"`      // entries given to the handler
	BudgetExhausted uint64 `json:"budget_exhausted"` // turns ended by the total budget
	TimeExhausted   uint64 `json:"time_exhausted"`   // turns ended by the time slice
	Arms            uint64 `json:"arms"`             // calls of CompletionQueue.Arm
	Missed          uint64 `json:"missed"`           // arms that reported an entry not yet seen
	Refused         uint64 `json:"refused"`          // notifications and requests that found the instance owned already
	Spurious        uint64 `json:"spurious"`         // wake-ups that found nothing to reap
	Leads           uint64 `json:"leads"`            // times a waiting goroutine took the polling role
	PollEntered     uint64 `json:"poll_entered"`     // Adaptive: times it entered polling
	PollStalled     uint64 `json:"poll_stalled"`     // Adaptive: times the stall guard ended polling
}

// CompletionsPerWakeup is 0 when there was no wake-up.
func (s Stats) CompletionsPerWakeup() float64 {
	if s.Wakeups == 0 {
		return 0
	}
	return float64(s.Completions) / float64(s.Wakeups)
}

// Sub is what was counted between before and s.
func (s Stats) Sub(before Stats) Stats {
	return Stats{
		Notifications:   s.Notifications - before.Notifications,
		Wakeups:         s.Wakeups - before.Wakeups,
		Polls:           s.Polls - before.Polls,
		EmptyPolls:      s.EmptyPolls - before.EmptyPolls,
		Completions:     s.Completions - before.Completions,
		BudgetExhausted: s.BudgetExhausted - before.BudgetExhausted,
		TimeExhausted:   s.TimeExhausted - before.TimeExhausted,
		Arms:            s.Arms - before.Arms,
		Missed:          s.Missed - before.Missed,
		Refused:         s.Refused - before.Refused,
		Spurious:        s.Spurious - before.Spurious,
		Leads:           s.Leads - before.Leads,
		PollEntered:     s.PollEntered - before.PollEntered,
		PollStalled:     s.PollStalled - before.PollStalled,
	}
}

// Add sums the counters of several instances.
func (s Stats) Add(o Stats) Stats {
	var zero Stats
	return s.Sub(zero.Sub(o))
}

// counters is Stats while it is being counted.
type counters struct {
	notifications, wakeups, polls, emptyPolls, completions, budgetExhausted, timeExhausted,
	arms, missed, refused, barren, leads, pollEntered, pollStalled atomic.Uint64
}

func (c *counters) snapshot() Stats {
	return Stats{
		Notifications:   c.notifications.Load(),
		Wakeups:         c.wakeups.Load(),
		Polls:           c.polls.Load(),
		EmptyPolls:      c.emptyPolls.Load(),
		Completions:     c.completions.Load(),
		BudgetExhausted: c.budgetExhausted.Load(),
		TimeExhausted:   c.timeExhausted.Load(),
		Arms:            c.arms.Load(),
		Missed:          c.missed.Load(),
		Refused:         c.refused.Load(),
		Spurious:        c.barren.Load(),
		Leads:           c.leads.Load(),
		PollEntered:     c.pollEntered.Load(),
		PollStalled:     c.pollStalled.Load(),
	}
}
