// Package verbstest is the contract of package verbs in executable form. A
// provider is what passes it: the kernel's rxe, the models of the mlx devices, the userspace device, and
// whatever hardware a user has.
//
// It knows package verbs only. Queue pairs are connected by hand: each side's
// number, first PSN and address are given to the other, without a connection manager.
//
// From a test:
//
//	verbstest.Run(t, func(t verbstest.TB) verbstest.Pair { ... })
//
// From a program: range over Cases with an own TB.
package verbstest

import (
	"errors"
	"fmt"
	"testing"

	"srp-initiator/rdma/verbs"
)

// TB is what a case needs of who runs it; *testing.T and *testing.B are such.
// Fatalf must not return.
type TB interface {
	Helper()
	Name() string
	Logf(format string, args ...any)
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
	Failed() bool
	Cleanup(func())
}

// Side is one end of a pair.
type Side struct {
	Context verbs.Context
	Port    uint8
	// GIDIndex is the source GID on a RoCE port. It is not used on InfiniBand, where LIDs address the peer.
	GIDIndex int
}

// Pair is two sides that can reach each other. They may be the same context, or two of one device.
type Pair struct {
	A, B Side
	// Windows says that the provider promises type 2 memory windows. Without it
	// AllocMW must answer verbs.ErrNotSupported.
	Windows bool
	// EagerArm says that an arm for solicited completions is answered by any completion.
	EagerArm bool
	// VagueLocalErrors says that a send request with a bad local key or range may complete as flushed, with its queue
	// pair failed, instead of with its own error.
	VagueLocalErrors bool
	// VagueLengthErrors says that a receive that is too small may fail as an operation
	// error on both sides, instead of a length error here and an invalid request there.
	VagueLengthErrors bool
	// UnboundedWindows says that a window opens its whole region: the provider does not check the
	// window's own range.
	UnboundedWindows bool
}

// OpenSide chooses port 1's address of ctx: on RoCE the first RoCE v2 entry of
// the GID table that is an IPv4 address, else the first RoCE v2 entry.
func OpenSide(ctx verbs.Context) (Side, error) {
	s := Side{Context: ctx, Port: 1}
	port, err := ctx.QueryPort(1)
	if err != nil {
		return s, err
	}
	if port.LinkLayer == verbs.LinkInfiniBand {
		return s, nil
	}
	found := false
	for i := 0; i < port.GIDTableLen; i++ {
		e, err := ctx.QueryGID(1, i)
		if errors.Is(err, verbs.ErrNoEntry) {
			continue
		}
		if err != nil {
			return s, err
		}
		if e.Type != verbs.GIDTypeRoCEv2 {
			continue
		}
		if e.GID.Addr().Is4() {
			s.GIDIndex = i
			return s, nil
		}
		if !found {
			s.GIDIndex, found = i, true
		}
	}
	if !found {
		return s, fmt.Errorf("%s port 1 has no RoCE v2 GID: its network device has no IP address, or is down", ctx.Name())
	}
	return s, nil
}

// Case is one promise of the contract.
type Case struct {
	Name string
	Run  func(t TB, p Pair)
}

// Cases is the contract, in the order in which failures are best read.
var Cases = []Case{
	{"Queries", queries},
	{"Objects", objects},
	{"RegistrationRules", registrationRules},
	{"PostingByState", postingByState},
	{"Send", send},
	{"SendWithImmediate", sendWithImmediate},
	{"RDMAWrite", rdmaWrite},
	{"RDMAWriteWithImmediate", rdmaWriteWithImmediate},
	{"RDMARead", rdmaRead},
	{"ManyReads", manyReads},
	{"FencedSend", fencedSend},
	{"ScatterGather", scatterGather},
	{"Inline", inline},
	{"LargestMessage", largestMessage},
	{"Batches", batches},
	{"UnsignaledSends", unsignaledSends},
	{"SignalAll", signalAll},
	{"ReceiveQueueFull", receiveQueueFull},
	{"SendQueueFull", sendQueueFull},
	{"RingLaps", ringLaps},
	{"PSNWrap", psnWrap},
	{"CounterWrap", counterWrap},
	{"CompletionQueueHoldsItsCapacity", queueHoldsCapacity},
	{"PollBounds", pollBounds},
	{"TwoQueuesPerPair", twoQueues},
	{"ManyQueuePairs", manyQueuePairs},
	{"FullDuplex", fullDuplex},
	{"BadWorkRequests", badWorkRequests},
	{"LocalKeyErrors", localKeyErrors},
	{"RemoteAccessErrors", remoteAccessErrors},
	{"ReceiveTooSmall", receiveTooSmall},
	{"ReceiverNotReady", receiverNotReady},
	{"SilentPeer", silentPeer},
	{"FlushInOrder", flushInOrder},
	{"PostingAfterError", postingAfterError},
	{"ResetAndReuse", resetAndReuse},
	{"ArmOnce", armOnce},
	{"ArmReportsMissed", armReportsMissed},
	{"ArmSolicited", armSolicited},
	{"NotificationPingPong", notificationPingPong},
	{"TwoQueuesOneChannel", twoQueuesOneChannel},
	{"WakeAndTimeout", wakeAndTimeout},
	{"CloseChannelWithWaiter", closeChannelWithWaiter},
	{"DestroyOrder", destroyOrder},
	{"MemoryWindows", memoryWindows},
	{"CloseContext", closeContext},
	{"NoAllocation", noAllocation},
}

// Run runs every case as a subtest, each on a pair of its own.
func Run(t *testing.T, open func(t TB) Pair) {
	for _, c := range Cases {
		t.Run(c.Name, func(t *testing.T) { c.Run(t, open(t)) })
	}
}
