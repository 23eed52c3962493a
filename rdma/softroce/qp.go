package softroce

import (
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"srp-initiator/rdma/softroce/ibcm"
	"srp-initiator/rdma/softroce/packet"
	"srp-initiator/rdma/softroce/rc"
	"srp-initiator/rdma/softroce/udp"
	"srp-initiator/rdma/verbs"
)

// queuePair implements verbs.QueuePair over an rc.QP, and is that one's Memory and Output. Guarded by Device.mu.
type queuePair struct {
	d      *Device
	pd     *protectionDomain
	sendCQ *completionQueue
	recvCQ *completionQueue
	qpn    uint32
	rc     *rc.QP
	cap    verbs.QPCap
	conn   *connection
	gone   bool

	peer   netip.Addr
	to     *udp.Destination
	txFlow packet.Flow
	rxFlow packet.Flow
	rxPort uint16 // that rxFlow is for
	nextID uint16 // the IP identification expected next
	soft   bool   // the peer is of this implementation: its IP identifications are known, and it takes trains
	group  bool   // soft, and the link can send trains

	touched   bool // in Device.touched
	completed bool // got completions in this batch
	blocked   bool // in Device.blocked
	riding    bool // in Device.riders
}

// anyPeer is the tuning that suits every peer.
var anyPeer = rc.Tuning{AckUnasked: ackUnasked}

func (pd *protectionDomain) CreateQP(init verbs.QPInit) (verbs.QueuePair, error) {
	d := pd.d
	send, ok1 := init.SendCQ.(*completionQueue)
	recv, ok2 := init.RecvCQ.(*completionQueue)
	if !ok1 || !ok2 || send.d != d || recv.d != d {
		return nil, fmt.Errorf("softroce: create queue pair: its completion queues must be this device's: %w", syscall.EINVAL)
	}
	c := init.Cap
	for _, l := range []struct {
		name     string
		got, max int
	}{
		{"send work requests", c.MaxSendWR, maxQPWR}, {"receive work requests", c.MaxRecvWR, maxQPWR},
		{"send scatter/gather entries", c.MaxSendSGE, maxSGE}, {"receive scatter/gather entries", c.MaxRecvSGE, maxSGE},
		{"inline bytes", c.MaxInlineData, maxInline},
	} {
		if l.got < 0 || l.got > l.max {
			return nil, fmt.Errorf("softroce: create queue pair: %d %s, at most %d: %w", l.got, l.name, l.max, syscall.EINVAL)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := pd.usable(); err != nil {
		return nil, err
	}
	if send.gone || recv.gone {
		return nil, fmt.Errorf("softroce: create queue pair: the completion queue was destroyed: %w", syscall.EINVAL)
	}
	if len(d.order) >= maxQP {
		return nil, fmt.Errorf("softroce: %d queue pairs in use: %w", maxQP, syscall.ENOMEM)
	}
	q := &queuePair{d: d, pd: pd, sendCQ: send, recvCQ: recv}
	for {
		q.qpn = uint32(d.random()) & 0xffffff
		if q.qpn > 1 && q.qpn != 0xffffff && d.qps[q.qpn] == nil && !slices.Contains(d.recent, q.qpn) {
			break
		}
	}
	q.rc = rc.New(rc.Config{QPN: q.qpn, Cap: c, SignalAll: init.SignalAll, Tuning: anyPeer}, q, q)
	q.cap = q.rc.Cap()
	d.qps[q.qpn] = q
	d.order = append(d.order, q)
	pd.users++
	send.users++
	recv.users++
	return q, nil
}

func (q *queuePair) QPN() uint32      { return q.qpn }
func (q *queuePair) Cap() verbs.QPCap { return q.cap }

func (q *queuePair) State() verbs.QPState {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	return q.rc.State()
}

func (q *queuePair) Modify(a *verbs.QPAttr, mask verbs.QPAttrMask) error {
	d := q.d
	d.mu.Lock()
	defer d.unlock()
	return q.modify(a, mask)
}

func (q *queuePair) modify(a *verbs.QPAttr, mask verbs.QPAttrMask) error {
	d := q.d
	if q.gone || d.closed {
		return verbs.ErrClosed
	}
	switch {
	case mask&verbs.QPMaskPort != 0 && a.Port != 1:
		return fmt.Errorf("softroce: modify queue pair: port %d, the device has port 1 only: %w", a.Port, syscall.EINVAL)
	case mask&verbs.QPMaskPKeyIndex != 0 && a.PKeyIndex != 0:
		return fmt.Errorf("softroce: modify queue pair: P_Key index %d, the table has one entry: %w", a.PKeyIndex, syscall.EINVAL)
	case mask&verbs.QPMaskPathMTU != 0 && a.PathMTU > d.mtu:
		return fmt.Errorf("softroce: modify queue pair: path MTU %d, the link carries %d: %w", a.PathMTU.Bytes(), d.mtu.Bytes(), syscall.EINVAL)
	case mask&verbs.QPMaskMaxRdAtomic != 0 && a.MaxRdAtomic > maxReads, mask&verbs.QPMaskMaxDestRdAtomic != 0 && a.MaxDestRdAtomic > maxReads:
		return fmt.Errorf("softroce: modify queue pair: %d and %d RDMA READs, at most %d: %w", a.MaxRdAtomic, a.MaxDestRdAtomic, maxReads, syscall.EINVAL)
	}
	var peer netip.Addr
	if mask&verbs.QPMaskAV != 0 {
		peer = a.AV.DGID.Addr()
		if a.AV.SGIDIndex != 0 {
			return fmt.Errorf("softroce: modify queue pair: GID index %d, the table has one entry: %w", a.AV.SGIDIndex, syscall.EINVAL)
		}
		if peer.Is4() != d.addr.Is4() || peer.IsUnspecified() || peer.IsMulticast() {
			return fmt.Errorf("softroce: modify queue pair: no way from %s to %s: %w", d.addr, peer, syscall.EINVAL)
		}
	}
	now := d.now()
	if err := q.rc.Modify(now, a, mask); err != nil {
		return err
	}
	if mask&verbs.QPMaskAV != 0 {
		q.peer = peer
		q.to = d.destination(peer)
		q.txFlow = packet.NewFlow(netip.AddrPortFrom(d.addr, packet.Port), q.to.AddrPort())
		q.rxPort, q.nextID = 0, 0
		// Only this implementation lives on loopback; of other peers the connection manager learns it.
		q.setSoft(peer.IsLoopback() || peer == d.addr)
	}
	d.settle(q)
	d.flush(now)
	return nil
}

// setSoft says whether the peer is of this implementation.
func (q *queuePair) setSoft(yes bool) {
	q.soft = yes
	q.group = yes && q.d.link.GSO()
	t := anyPeer // also of a queue pair whose last peer was of this implementation
	if yes {
		t = rc.Tuning{AckDelay: ackDelay, AckEvery: ackEvery, AckUnasked: ackUnasked, AskRarely: true}
	}
	if q.group {
		t.DivideWrites = divideWrites
	}
	q.rc.SetTuning(t)
}

// fail moves the queue pair to the error state.
func (q *queuePair) fail(now rc.Time) {
	if q.gone {
		return
	}
	if s := q.rc.State(); s != verbs.QPReset && s != verbs.QPError {
		q.rc.Modify(now, &verbs.QPAttr{State: verbs.QPError}, verbs.QPMaskState)
		q.d.settle(q)
	}
}

func (q *queuePair) PostSend(wrs []verbs.SendWorkRequest) (int, error) {
	d := q.d
	d.mu.Lock()
	if q.gone || d.closed {
		d.mu.Unlock()
		return 0, verbs.ErrClosed
	}
	now := d.now()
	n, err := q.rc.PostSend(now, wrs)
	if !q.riding && q.rc.Riding() {
		q.riding = true
		d.riders = append(d.riders, q)
	}
	d.settle(q)
	d.flushOrDefer(now)
	d.unlock()
	return n, err
}

func (q *queuePair) PostRecv(wrs []verbs.RecvWorkRequest) (int, error) {
	d := q.d
	d.mu.Lock()
	if q.gone || d.closed {
		d.mu.Unlock()
		return 0, verbs.ErrClosed
	}
	n, err := q.rc.PostRecv(wrs)
	d.unlock()
	return n, err
}

func (q *queuePair) Destroy() error {
	d := q.d
	d.mu.Lock()
	defer d.unlock()
	if q.gone {
		return verbs.ErrClosed
	}
	d.flush(d.now()) // what it has built leaves before it does
	q.gone = true
	delete(d.qps, q.qpn)
	if d.lastQP == q {
		d.lastQP = nil
	}
	d.order = slices.DeleteFunc(d.order, func(o *queuePair) bool { return o == q })
	d.touched = slices.DeleteFunc(d.touched, func(o *queuePair) bool { return o == q })
	d.blocked = slices.DeleteFunc(d.blocked, func(o *queuePair) bool { return o == q })
	d.riders = slices.DeleteFunc(d.riders, func(o *queuePair) bool { return o == q })
	for _, k := range d.memory.byIndex {
		if k.bound == q {
			k.window.unbind()
		}
	}
	// Packets of the old connection may still be under way when a new queue pair is made.
	if len(d.recent) < recentQPNs {
		d.recent = append(d.recent, q.qpn)
	} else {
		d.recent[d.recentAt] = q.qpn
		d.recentAt = (d.recentAt + 1) % recentQPNs
	}
	q.pd.users--
	q.sendCQ.users--
	q.recvCQ.users--
	addTransport(&d.stats.retired, q.rc.Stats())
	if c := q.conn; c != nil {
		c.qp = nil
		q.conn = nil
		if c.mc == nil {
			return nil // resolved, never connected
		}
		// A connection without its queue pair is none.
		if s := c.mc.State(); s == ibcm.Established || s == ibcm.REPSent {
			d.cm.Disconnect(d.clock(d.now()), c.mc)
			d.settleCM(d.now())
			d.flush(d.now())
		}
	}
	return nil
}
