package lun

import "srp-initiator/srp/scsi"

// Persistent reservations (SPC-4, 5.13). All state is guarded by Unit.mu; Unit.reserved lets the data path skip it.

// reservations is a unit's registrations and reservation. Keys live in the nexuses.
type reservations struct {
	generation uint32
	registered int
	held       bool
	typ        scsi.ReservationType
	holder     *Nexus // nil for the all-registrants types
}

// isHolderLocked reports whether n holds the reservation, which there is.
func (u *Unit) isHolderLocked(n *Nexus) bool {
	if u.pr.typ.AllRegistrants() {
		return n.key != 0
	}
	return n == u.pr.holder
}

// access classes of commands for reservation checks.
type access uint8

const (
	accessAlways access = iota // allowed whoever holds what
	accessRead                 // refused by the exclusive access types only
	accessWrite                // refused by all types
)

// accessOf classes a CDB (SPC-4, table 75; SBC-3, table 13).
func accessOf(cdb []byte) access {
	switch op := scsi.Opcode(cdb[0]); op {
	case scsi.OpTestUnitReady, scsi.OpInquiry, scsi.OpReportLUNs, scsi.OpRequestSense, scsi.OpPersistentReserveIn, scsi.OpPersistentReserveOut,
		scsi.OpReadCapacity10, scsi.OpServiceActionIn16:
		return accessAlways
	case scsi.OpStartStopUnit:
		if s, ok := scsi.ParseStartStopCDB(cdb); ok && s.Start && s.PowerCondition == 0 {
			return accessAlways
		}
		return accessWrite
	case scsi.OpPreventAllowRemoval:
		if cdb[4]&3 == 0 {
			return accessAlways
		}
		return accessWrite
	case scsi.OpRead6, scsi.OpRead10, scsi.OpRead12, scsi.OpRead16, scsi.OpVerify10, scsi.OpVerify12, scsi.OpVerify16, scsi.OpMaintenanceIn:
		return accessRead
	}
	return accessWrite
}

// conflicts reports whether the reservation keeps cdb of n out. PERSISTENT RESERVE OUT checks for itself.
func (u *Unit) conflicts(n *Nexus, cdb []byte) bool {
	a := accessOf(cdb)
	if a == accessAlways {
		return false
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.pr.held || u.isHolderLocked(n) {
		return false
	}
	if u.pr.typ.RegistrantsOnly() && n.key != 0 {
		return false
	}
	return a == accessWrite || u.pr.typ.ExcludesReads()
}

func (u *Unit) reserveIn(t *Task) {
	sa, alloc, _ := scsi.ParsePersistentReserveIn(t.CDB)
	u.mu.Lock()
	defer u.mu.Unlock()
	r := &u.pr
	var data []byte
	switch sa {
	case scsi.PRReadKeys:
		keys := make([]uint64, 0, r.registered)
		for _, n := range u.nexuses {
			if n.key != 0 {
				keys = append(keys, n.key)
			}
		}
		data = scsi.AppendPRKeys(t.Scratch[:0], r.generation, keys)
	case scsi.PRReadReservation:
		v := scsi.PRReservation{Generation: r.generation, Held: r.held, Type: r.typ}
		if r.held && r.holder != nil {
			v.Key = r.holder.key
		}
		data = v.Append(t.Scratch[:0])
	case scsi.PRReportCapabilities:
		v := scsi.PRCapabilities{AllTargetPorts: true, TypeMask: 1<<1 | 1<<3 | 1<<5 | 1<<6 | 1<<7 | 1<<8}
		data = v.Append(t.Scratch[:0])
	case scsi.PRReadFullStatus:
		list := make([]scsi.PRFullStatus, 0, r.registered)
		for _, n := range u.nexuses {
			if n.key == 0 {
				continue
			}
			id := scsi.SRPTransportID(n.port)
			list = append(list, scsi.PRFullStatus{Key: n.key, Holder: r.held && u.isHolderLocked(n), Type: r.typ, RelativePort: 1, TransportID: id[:]})
		}
		data = scsi.AppendPRFullStatus(t.Scratch[:0], r.generation, list)
	default:
		t.badField(1)
		return
	}
	t.give(data, int(alloc))
}

func (u *Unit) beginReserveOut(t *Task) {
	sa, scope, typ, n, _ := scsi.ParsePersistentReserveOut(t.CDB)
	switch sa {
	case scsi.PRRegister, scsi.PRRegisterIgnoreKey, scsi.PRClear:
	case scsi.PRReserve, scsi.PRRelease, scsi.PRPreempt, scsi.PRPreemptAbort:
		if scope != 0 || !typ.Valid() {
			t.badField(2)
			return
		}
	case scsi.PRRegisterMove:
		if n < 24+24 {
			t.fail(scsi.IllegalRequest, scsi.ASCParameterListLength)
			return
		}
		t.wholeOut(int64(n))
		return
	default:
		t.badField(1)
		return
	}
	if n != scsi.PROutParamsLen {
		t.fail(scsi.IllegalRequest, scsi.ASCParameterListLength)
		return
	}
	t.wholeOut(int64(n))
}

func (u *Unit) reserveOut(t *Task, list []byte) {
	sa, _, typ, _, _ := scsi.ParsePersistentReserveOut(t.CDB)
	n := t.nexus
	if sa == scsi.PRRegisterMove {
		u.registerMove(t, list)
		return
	}
	p, err := scsi.ParsePROutParams(list)
	if err != nil {
		t.fail(scsi.IllegalRequest, scsi.ASCParameterListLength)
		return
	}
	var aborted [][16]byte
	u.mu.Lock()
	switch sa {
	case scsi.PRRegister, scsi.PRRegisterIgnoreKey:
		u.registerLocked(t, n, p, sa == scsi.PRRegisterIgnoreKey)
	default:
		if n.key == 0 || n.key != p.Key {
			t.finish(scsi.StatusReservationConflict)
			break
		}
		switch sa {
		case scsi.PRReserve:
			u.reserveLocked(t, n, typ)
		case scsi.PRRelease:
			u.releaseLocked(t, n, typ)
		case scsi.PRClear:
			u.clearLocked(n)
		case scsi.PRPreempt, scsi.PRPreemptAbort:
			aborted = u.preemptLocked(t, n, typ, p.ServiceActionKey)
		}
	}
	u.reserved.Store(u.pr.held)
	u.mu.Unlock()
	if sa == scsi.PRPreemptAbort {
		t.preempted = aborted
	}
}

// registerLocked is REGISTER and REGISTER AND IGNORE EXISTING KEY (SPC-4, 5.13.7).
func (u *Unit) registerLocked(t *Task, n *Nexus, p scsi.PROutParams, ignoreKey bool) {
	switch {
	case p.SpecInitiators, p.PersistThroughPL: // neither is supported, as REPORT CAPABILITIES says
		t.badParam(20)
		return
	case !ignoreKey && n.key != p.Key: // for an unregistered nexus the key must be 0
		t.finish(scsi.StatusReservationConflict)
		return
	case n.key == 0 && p.ServiceActionKey == 0: // nothing to do
		return
	case n.key == 0:
		if u.pr.registered >= MaxRegistrations {
			t.fail(scsi.IllegalRequest, scsi.ASCInsufficientRegistrations)
			return
		}
		u.pr.registered++
		n.key = p.ServiceActionKey
	case p.ServiceActionKey == 0:
		u.unregisterLocked(n, n)
	default:
		n.key = p.ServiceActionKey
	}
	u.pr.generation++
}

// unregisterLocked removes n's registration and, where n was the (last) holder, the reservation (SPC-4, 5.13.11.2.3). by hears nothing of it.
func (u *Unit) unregisterLocked(n, by *Nexus) {
	wasHolder := u.pr.held && u.isHolderLocked(n)
	n.key = 0
	u.pr.registered--
	if wasHolder && (!u.pr.typ.AllRegistrants() || u.pr.registered == 0) {
		u.dropReservationLocked(by)
	}
}

// dropReservationLocked ends the reservation; other registrants hear of it when its type let them in.
func (u *Unit) dropReservationLocked(by *Nexus) {
	tell := u.pr.typ.RegistrantsOnly()
	u.pr.held, u.pr.holder, u.pr.typ = false, nil, 0
	if !tell {
		return
	}
	for _, n := range u.nexuses {
		if n != by && n.key != 0 {
			n.establishLocked(scsi.ASCReservationsReleased)
		}
	}
}

func (u *Unit) reserveLocked(t *Task, n *Nexus, typ scsi.ReservationType) {
	r := &u.pr
	switch {
	case !r.held:
		r.held, r.typ, r.holder = true, typ, n
		if typ.AllRegistrants() {
			r.holder = nil
		}
	case u.isHolderLocked(n) && r.typ == typ: // again: nothing to do
	default:
		t.finish(scsi.StatusReservationConflict)
	}
}

func (u *Unit) releaseLocked(t *Task, n *Nexus, typ scsi.ReservationType) {
	switch {
	case !u.pr.held || !u.isHolderLocked(n): // GOOD without effect
	case u.pr.typ != typ:
		t.fail(scsi.IllegalRequest, scsi.ASCInvalidRelease)
	default:
		u.dropReservationLocked(n)
	}
}

func (u *Unit) clearLocked(by *Nexus) {
	for _, n := range u.nexuses {
		if n.key != 0 && n != by {
			n.establishLocked(scsi.ASCReservationsPreempted)
		}
		n.key = 0
	}
	u.pr.registered = 0
	u.pr.held, u.pr.holder, u.pr.typ = false, nil, 0
	u.pr.generation++
}

// preemptLocked is PREEMPT (SPC-4, 5.13.11.2.4). It returns the ports whose registrations went.
func (u *Unit) preemptLocked(t *Task, by *Nexus, typ scsi.ReservationType, key uint64) (removed [][16]byte) {
	r := &u.pr
	takeOver := false // the reservation becomes by's
	match := func(n *Nexus) bool { return n.key == key }
	switch {
	case r.held && r.typ.AllRegistrants() && key == 0:
		takeOver = true
		match = func(n *Nexus) bool { return n.key != 0 }
	case key == 0:
		t.badParam(8)
		return nil
	case r.held && r.holder != nil && r.holder.key == key:
		takeOver = true
	}
	found := takeOver
	for _, n := range u.nexuses {
		if n.key == 0 || !match(n) {
			continue
		}
		found = true
		if n == by { // a holder that preempts itself only changes the type
			continue
		}
		n.key = 0
		r.registered--
		n.establishLocked(scsi.ASCRegistrationsPreempted)
		removed = append(removed, n.port)
	}
	if !found {
		t.finish(scsi.StatusReservationConflict)
		return nil
	}
	if by.key == key && !takeOver {
		// Preempting one's own key without holding the reservation removes that registration.
		by.key = 0
		r.registered--
		if r.held && r.typ.AllRegistrants() && r.registered == 0 {
			u.dropReservationLocked(by)
		}
	}
	if takeOver {
		changed := r.typ != typ
		r.held, r.typ, r.holder = true, typ, by
		if typ.AllRegistrants() {
			r.holder = nil
		}
		if changed {
			for _, n := range u.nexuses {
				if n != by && n.key != 0 {
					n.establishLocked(scsi.ASCReservationsReleased)
				}
			}
		}
	}
	r.generation++
	return removed
}

// registerMove is REGISTER AND MOVE (SPC-4, 5.13.8): the reservation goes to another initiator port.
func (u *Unit) registerMove(t *Task, list []byte) {
	p, err := scsi.ParsePRMoveParams(list)
	if err != nil {
		t.fail(scsi.IllegalRequest, scsi.ASCParameterListLength)
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	n := t.nexus
	port, err := scsi.ParseSRPTransportID(p.TransportID)
	switch {
	case n.key == 0 || n.key != p.Key:
		t.finish(scsi.StatusReservationConflict)
		return
	case !u.pr.held || !u.isHolderLocked(n):
		t.finish(scsi.StatusReservationConflict)
		return
	case u.pr.typ.AllRegistrants():
		t.finish(scsi.StatusReservationConflict)
		return
	case p.ServiceActionKey == 0:
		t.badParam(8)
		return
	case p.PersistThroughPL:
		t.badParam(17)
		return
	case p.RelativePort > 1:
		t.badParam(18)
		return
	case err != nil || port == n.port:
		t.badParam(24)
		return
	}
	to := u.nexuses[port]
	if to == nil {
		to = u.newNexusLocked(port)
	}
	if to == nil || to.key == 0 && u.pr.registered >= MaxRegistrations {
		t.fail(scsi.IllegalRequest, scsi.ASCInsufficientRegistrations)
		return
	}
	if to.key == 0 {
		u.pr.registered++
	}
	to.key = p.ServiceActionKey
	u.pr.holder = to
	if p.Unregister {
		n.key = 0
		u.pr.registered--
	}
	u.pr.generation++
}
