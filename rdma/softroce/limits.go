package softroce

import "time"

// Limits of a device: what QueryDevice reports, and what a flood cannot exceed.
const (
	maxQP       = 4096
	maxQPWR     = 16384
	maxSGE      = 32
	maxInline   = 1024
	maxCQ       = 4096
	maxCQE      = 1 << 20
	maxKeys     = 1 << 16 // regions and windows together; a key's index has 24 bits, so guessing one is 1 in 256 at the very best, and 1 in 2^16 with its low byte
	maxPD       = 4096
	maxReads    = 16 // RDMA READs per queue pair, either way
	maxAsync    = 256
	maxRefusals = 64
	maxPeers    = 1024 // destinations that are remembered
	maxMessage  = 1 << 30
	recentQPNs  = 4096 // queue pair numbers that are not given out again for now
	compVectors = 1
)

const (
	// ackDelay lets an acknowledgement to a peer of this implementation wait for the next request or answer and travel with it: a
	// datagram of its own costs as much as one with data. It is what a peer waits at most for the completion of a lone SEND or WRITE, and far below every ACK timeout.
	ackDelay = 100 * time.Microsecond
	// ackUnasked is how long a message may stay unacknowledged whose sender does not wait for its completion: below the 2 ms after which a
	// requester that has seen losses goes back. Every queue pair acknowledges such messages; only to peers of this implementation are they sent.
	ackUnasked = time.Millisecond
	// ackEvery is how many packets may wait for one acknowledgement: half the window.
	ackEvery = 64
	// watchdog bounds how long work may lie when a poller has stopped polling without arming its queue.
	watchdog = time.Millisecond
	// turnTime is how long after a Poll that returned entries their owner is taken to be at work on them.
	turnTime = 300 * time.Microsecond
	// pollTime is how long after a Poll in vain its caller is taken to poll on: several empty polls, and the submissions of those whom
	// the last completions woke.
	pollTime = 100 * time.Microsecond
	// deferAtFirst is how many packets of a turn PostSend holds back from a peer that could work on them meanwhile. With 32 commands under way each end
	// then has half of them at a time; with all of them the one slept while the other worked.
	deferAtFirst = 16
	// divideWrites is the largest WRITE, in packets, that is divided where packets leave in trains. FIRST and MIDDLE differ in size, so that each WRITE of a few packets takes a train or two
	// of its own, and a train costs more than its packets: with 8 KiB at path MTU 4096 divided ones do 1.4 times as many reads at depth 16. A long WRITE fills trains with its MIDDLEs anyway.
	divideWrites = 8
	// receiveRounds bounds the batches of one turn, so that completions are reaped in between.
	receiveRounds = 4
)
