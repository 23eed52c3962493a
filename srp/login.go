package srp

import (
	"context"
	"errors"
	"fmt"
	"time"

	"srp-initiator/completion"
	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/verbs"
	"srp-initiator/srp/iu"
)

// CM parameters of a login: what ib_srp sends, and READs enough for ib_srpt, which serves writes by up to four of them.
const (
	responderResources = 4
	rnrRetry           = 7
	staleRetries       = 3
)

// loginTag is the tag of a login request, as ib_srp's, which its answer repeats (SRP r16a, TAG field).
const loginTag = 0

type queues struct {
	slots       int
	signalEvery int
	send        uint32 // work requests
	recv        int
}

// queueSizes derives a channel's queues from its queue size.
func queueSizes(queueSize int) (q queues) {
	q.signalEvery = max(1, min(16, queueSize/4))
	// Besides the outstanding ones, up to signalEvery slots are answered but not known sent, and as many again while
	// the signaled completion is under way.
	q.slots = queueSize + 2*q.signalEvery
	q.send = uint32(q.slots + 2*replySlots + 2)
	q.recv = queueSize + taskReserve + targetRequests
	return q
}

// leastStride holds the longest command with a direct descriptor.
const leastStride = iu.CommandSize + 16 + iu.DescriptorSize

func align(n, to int) int { return (n + to - 1) / to * to }

// requestedIULen is the largest information unit that we ask to send.
func (s *Session) requestedIULen() int {
	o := &s.opts
	n := iu.CommandSize + 16 + iu.TableSize + o.CmdSGEntries*iu.DescriptorSize
	if o.ImmediateData && !s.noImmediate {
		n = max(n, immDataOffset+o.MaxImmediateData)
	}
	if o.MaxITIUSize > 0 {
		n = min(n, o.MaxITIUSize)
	}
	return max(n, iu.MinITIULen)
}

// connectAll logs in with all channels. Fewer than asked for is success, none is not.
func (s *Session) connectAll(ctx context.Context) ([]*channel, error) {
	if err := s.target.Resolve(ctx); err != nil {
		return nil, err
	}
	first, err := s.connect(ctx, 0)
	var rej *LoginRejectedError
	if errors.As(err, &rej) && rej.Reason == iu.RejectITIULenTooLarge && s.opts.ImmediateData && !s.noImmediate {
		// Targets older than immediate data refuse units that large: once more without.
		s.noImmediate = true
		s.note("the target refuses information units of %d bytes; trying without immediate data (use_imm_data=0)", immDataOffset+s.opts.MaxImmediateData)
		first, err = s.connect(ctx, 0)
	}
	if err != nil {
		return nil, err
	}
	chans := []*channel{first}
	for i := 1; i < s.opts.ChannelCount; i++ {
		ch, err := s.connect(ctx, i)
		if err != nil {
			if ctx.Err() != nil || first.failed.Load() {
				for _, c := range chans {
					s.dispose(c)
				}
				if first.failed.Load() {
					first.mu.Lock()
					err = first.err
					first.mu.Unlock()
				}
				return nil, err
			}
			s.note("running with %d of %d channels: %s", len(chans), s.opts.ChannelCount, err)
			break
		}
		chans = append(chans, ch)
	}
	s.iuLimit.Store(int32(first.iuLimit))
	return chans, nil
}

// connect logs in with one channel. A refusal as a stale connection is the target's memory of an earlier queue pair
// of the same number: another one may succeed.
func (s *Session) connect(ctx context.Context, index int) (ch *channel, err error) {
	for try := 0; try < staleRetries; try++ {
		ch, err = s.connectOnce(ctx, index)
		var rej *cm.RejectError
		if !errors.As(err, &rej) || rej.Reason != cm.ReasonStaleConnection {
			break
		}
	}
	return ch, err
}

func (s *Session) connectOnce(ctx context.Context, index int) (_ *channel, err error) {
	ch := &channel{s: s, index: index, taskDone: make(chan taskAnswer, 1)}
	defer func() {
		if err != nil {
			s.dispose(ch)
		}
	}()
	// connect_tmo is what the network and the target may take. What is prepared here in between, large memory above all, does not count.
	left := s.opts.ConnectTimeout
	began := time.Now()
	resolving, cancel := context.WithTimeout(ctx, left)
	ch.conn, err = s.cfg.Connector.Resolve(resolving, s.target.Src, s.target.Addr())
	cancel()
	left -= time.Since(began)
	if err != nil {
		return nil, fmt.Errorf("srp: resolve %s: %w", s.target.Addr(), err)
	}
	ch.route = ch.conn.Route()
	reqLen := s.requestedIULen()
	q := queueSizes(s.opts.QueueSize)
	if err := ch.allocate(q, reqLen); err != nil {
		return nil, err
	}
	cfg := s.opts.Completion
	cfg.Mode = s.Mode()
	if s.attr.CompVectors > 0 {
		cfg.Vector = (s.opts.CompVector + index) % s.attr.CompVectors
	}
	cfg.Failed = func(err error) { ch.failLocking(fmt.Errorf("srp: channel %d: %w", index, err)) }
	if ch.inst, err = completion.New(s.cfg.Device, int(q.send)+q.recv, cfg, ch.handle); err != nil {
		return nil, fmt.Errorf("srp: channel %d: %w", index, err)
	}
	ch.qp, err = s.pd.CreateQP(verbs.QPInit{SendCQ: ch.inst.CQ(), RecvCQ: ch.inst.CQ(),
		Cap: verbs.QPCap{MaxSendWR: int(q.send), MaxRecvWR: q.recv, MaxSendSGE: 1, MaxRecvSGE: 1}})
	if err != nil {
		return nil, fmt.Errorf("srp: channel %d: create queue pair (lower queue_size or ch_count?): %w", index, err)
	}
	if err := ch.conn.InitQP(ch.qp); err != nil {
		return nil, fmt.Errorf("srp: channel %d: %w", index, err)
	}
	// All receives are posted before the target can send.
	if n, err := ch.qp.PostRecv(ch.recvs); err != nil || n != len(ch.recvs) {
		return nil, fmt.Errorf("srp: channel %d: posted %d of %d receives: %w", index, n, len(ch.recvs), err)
	}
	ch.posted = len(ch.recvs)

	req := iu.LoginReq{Tag: loginTag, ITIULen: uint32(reqLen), Formats: iu.DirectFormat | iu.IndirectFormat,
		TargetPort:    s.target.ID(),
		InitiatorPort: portID(s.target.IOClass, s.opts.InitiatorExt, ch.portGUID())}
	if index > 0 {
		req.Flags = iu.MultiChannel
	}
	if s.opts.ImmediateData && !s.noImmediate && reqLen > immDataOffset {
		req.Flags |= iu.ImmediateDataFlag
		req.ImmDataOffset = immDataOffset
	}
	var buf [iu.LoginReqSizeIB]byte
	n := 0
	if s.target.IsIB() {
		n, err = req.EncodeIB(buf[:])
	} else {
		n, err = req.EncodeCM(buf[:])
	}
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("srp: channel %d: %w", index, context.Cause(ctx))
	}
	connecting, cancel := context.WithTimeout(ctx, left)
	defer cancel()
	rep, err := ch.conn.Connect(connecting, cm.ConnParam{PrivateData: buf[:n], ResponderResources: responderResources,
		FlowControl: true, RetryCount: uint8(s.opts.TLRetryCount), RNRRetryCount: rnrRetry, Timeout: left})
	if err != nil {
		return nil, s.loginError(index, err)
	}
	ch.route = ch.conn.Route() // the peer may have asked for a smaller path MTU
	if err := ch.accepted(rep.PrivateData, reqLen); err != nil {
		return nil, err
	}
	if err := ch.inst.Start(); err != nil {
		return nil, fmt.Errorf("srp: channel %d: %w", index, err)
	}
	go ch.watch()
	return ch, nil
}

// portGUID is the GUID half of the initiator port identifier: the interface id of the port's GID 0, as ib_srp takes it, so
// that a target's access list fits both.
func (ch *channel) portGUID() uint64 {
	_, guid := iu.PortID(ch.route.LocalPortGID).Halves()
	if guid == 0 {
		guid = ch.route.NodeGUID
	}
	return guid
}

// allocate maps, registers and lays out the channel's information units.
func (ch *channel) allocate(q queues, reqLen int) (err error) {
	s := ch.s
	ch.stride = align(max(reqLen, leastStride), 64)
	ch.slots = make([]txSlot, q.slots)
	ch.signalEvery = q.signalEvery
	ch.sendCapacity = q.send
	ch.tableAt = align(ch.taskAt()+replySize, 64)
	size := ch.tableAt
	if s.opts.sgLimit() > s.opts.CmdSGEntries {
		size += q.slots * s.opts.SGTableSize * iu.DescriptorSize
	}
	if ch.tx, err = register(s.pd, size, verbs.AccessLocalWrite|verbs.AccessRemoteRead); err != nil {
		return err
	}
	if ch.rx, err = register(s.pd, q.recv*rxSize, verbs.AccessLocalWrite); err != nil {
		return err
	}
	for i := q.slots - 1; i >= 0; i-- {
		ch.free = append(ch.free, uint16(i))
	}
	for i := replySlots - 1; i >= 0; i-- {
		ch.replies = append(ch.replies, uint16(i))
	}
	ch.sends = make([]sent, 1)
	for len(ch.sends) < int(q.send) { // a power of two, so that the sequence may wrap
		ch.sends = make([]sent, 2*len(ch.sends))
	}
	ch.batch = make([]verbs.SendWorkRequest, 0, maxBatch)
	ch.sges = make([]verbs.SGE, 0, maxBatch)
	ch.descs = make([]iu.Descriptor, 0, s.opts.sgLimit())
	ch.repost = make([]verbs.RecvWorkRequest, 0, q.recv)
	ch.recvSGE = make([]verbs.SGE, q.recv)
	ch.recvs = make([]verbs.RecvWorkRequest, q.recv)
	for i := range ch.recvs {
		ch.recvSGE[i] = verbs.SGE{Addr: ch.rx.base + uint64(i*rxSize), Length: rxSize, LKey: ch.rx.lkey}
		ch.recvs[i] = verbs.RecvWorkRequest{WRID: wrRecv | uint64(i), SGList: ch.recvSGE[i : i+1 : i+1]}
	}
	m, err := register(s.pd, s.opts.bounceSize(), dataAccess)
	if err != nil {
		return err
	}
	ch.bounce.init(m)
	return nil
}

// minBounce is the least bounce memory of a channel, in bytes.
const minBounce = 2 << 20

// accepted reads the login response and makes the channel live.
func (ch *channel) accepted(data []byte, reqLen int) error {
	r := &ch.login
	if err := r.Decode(data); err != nil {
		return &ProtocolError{Channel: ch.index, What: fmt.Sprintf("the private data of the connection reply are no %s", iu.OpLoginRsp), Err: err}
	}
	bad := func(format string, a ...any) error {
		return &ProtocolError{Channel: ch.index, What: fmt.Sprintf("%s: ", iu.OpLoginRsp) + fmt.Sprintf(format, a...)}
	}
	switch {
	case r.Tag != loginTag:
		return bad("tag %#x answers another request; that of ours was %#x", r.Tag, uint64(loginTag))
	case r.ReqLimDelta < 2:
		return bad("request limit %d; 2 are needed, one for task management", r.ReqLimDelta)
	case r.MaxITIULen < iu.MinITIULen:
		return bad("takes information units of %d bytes; the least is %d", r.MaxITIULen, iu.MinITIULen)
	case r.MaxTIIULen < iu.ResponseSize:
		return bad("sends information units of %d bytes; a response has %d", r.MaxTIIULen, iu.ResponseSize)
	}
	ch.iuLimit = int(min(uint32(reqLen), r.MaxITIULen))
	if r.Flags&iu.ImmediateSupported != 0 && ch.s.opts.ImmediateData && !ch.s.noImmediate {
		ch.immLimit = max(0, min(ch.iuLimit-immDataOffset, ch.s.opts.MaxImmediateData))
	}
	// Descriptors that fit behind the longest CDB.
	room := ch.iuLimit - iu.CommandSize - 16 - iu.TableSize
	ch.inlineDescs = max(0, min(ch.s.opts.CmdSGEntries, room/iu.DescriptorSize))
	ch.maxDescs = ch.inlineDescs
	if ch.s.opts.AllowExtSG && room >= 0 {
		ch.maxDescs = ch.s.opts.sgLimit()
	}
	ch.mu.Lock()
	ch.reqLim = r.ReqLimDelta
	ch.queueLimit = int(min(int64(r.ReqLimDelta)-1, int64(ch.s.opts.QueueSize)))
	ch.state = live
	ch.mu.Unlock()
	return nil
}

// loginError explains why a REQ was refused.
func (s *Session) loginError(index int, err error) error {
	var rej *cm.RejectError
	if !errors.As(err, &rej) {
		return fmt.Errorf("srp: connect to %s: %w", s.target.destination(), err)
	}
	if rej.Reason == cm.ReasonConsumerDefined {
		var r iu.LoginRej
		if r.Decode(rej.PrivateData) == nil {
			return &LoginRejectedError{Reason: r.Reason, Formats: r.Formats, Channel: index, Hint: s.hint(r.Reason)}
		}
	}
	return fmt.Errorf("srp: connect to %s: %w", s.target.destination(), err)
}

// hint is what most often stands behind a reason, and what to do.
func (s *Session) hint(r iu.RejectReason) string {
	switch r {
	case iu.RejectInsufficientResources:
		return "the target port may be disabled, or short of queue pairs"
	case iu.RejectITIULenTooLarge:
		return fmt.Sprintf("we asked for %d bytes: set max_it_iu_size, or lower cmd_sg_entries", s.requestedIULen())
	case iu.RejectUnableToAssociate:
		return fmt.Sprintf("check the identifiers: the target port must be called %s (id_ext:ioc_guid); or its access list does not admit this initiator", s.target.ID())
	case iu.RejectUnsupportedFormat:
		return "the target knows neither direct nor indirect descriptors"
	case iu.RejectMultiChannel, iu.RejectChannelLimit:
		return "lower ch_count; Linux's ib_srpt also says this when its access list (acls) does not admit the initiator"
	}
	return ""
}

// watch ends the channel when its connection ends.
func (ch *channel) watch() {
	<-ch.conn.Done()
	err := ch.conn.Err()
	if err == nil {
		err = cm.ErrDisconnected
	}
	ch.failLocking(fmt.Errorf("srp: channel %d: %w", ch.index, err))
}
