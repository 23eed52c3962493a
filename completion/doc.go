// Package completion decides who reaps a completion queue, and when.
//
// An Instance is one completion queue, its notification channel and the
// handler that consumes its entries. Five modes share one reap loop (step, in reap.go)
// and differ only in who runs it:
//
//	Interrupt  the goroutine that took the notification, in place ("thread=n")
//	Thread     a dedicated reaping goroutine, on request its own OS thread ("thread=y")
//	Poll       a Poller that serves several instances under a budget (lib/irq_poll.c)
//	Direct     the goroutine that waits for a command (IB_POLL_DIRECT), without notifications
//	Adaptive   the waiting goroutine for a bounded time; else the notification, which
//	           stays and polls while polling finds more than one completion at a time
//
// At any time at most one goroutine owns an instance. Only the owner polls, arms
// and calls the handler. Ownership is one bit, taken by an atomic test-and-set; the
// rules are those of the kernel's irq_poll and of NAPI and are drawn in docs/completion.md.
package completion
