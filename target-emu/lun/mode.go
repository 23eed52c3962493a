package lun

import "srp-initiator/srp/scsi"

// Mode pages (SPC-4, 7.5; SBC-3, 6.5). Only WCE of the caching page and D_SENSE and SWP of the control page can be changed.

// modePage appends one page with the values that pc asks for.
func (u *Unit) modePage(dst []byte, page, pc uint8) []byte {
	changeable := pc == scsi.ModeChangeable
	current := pc == scsi.ModeCurrent
	switch page {
	case scsi.ModePageErrorRecovery:
		p := [12]byte{scsi.ModePageErrorRecovery, 10}
		if !changeable {
			p[2] = 0xc0 // AWRE, ARRE
		}
		return append(dst, p[:]...)
	case scsi.ModePageDisconnect:
		p := [16]byte{scsi.ModePageDisconnect, 14}
		return append(dst, p[:]...)
	case scsi.ModePageCaching:
		p := [20]byte{scsi.ModePageCaching, 18}
		if changeable && u.store.WriteBack() || current && u.writeBack.Load() || pc == scsi.ModeDefault && u.store.WriteBack() {
			p[2] = 0x04 // WCE
		}
		return append(dst, p[:]...)
	case scsi.ModePageControl:
		p := [12]byte{scsi.ModePageControl, 10}
		if changeable || current && u.descSense.Load() {
			p[2] = 0x04 // D_SENSE
		}
		if !changeable {
			p[3] = 0x10 // queue algorithm modifier: unrestricted reordering
			p[5] = 0x40 // TAS: aborted tasks of another nexus end with TASK ABORTED
			be.PutUint16(p[8:], 0xffff)
		}
		if changeable || current && u.swp.Load() {
			p[4] = 0x08 // SWP
		}
		return append(dst, p[:]...)
	case scsi.ModePageInformational:
		p := [12]byte{scsi.ModePageInformational, 10}
		if !changeable {
			p[2] = 0x08 // DEXCPT: no informational exceptions
		}
		return append(dst, p[:]...)
	}
	return dst
}

var modePages = [...]uint8{scsi.ModePageErrorRecovery, scsi.ModePageDisconnect, scsi.ModePageCaching, scsi.ModePageControl, scsi.ModePageInformational}

func (u *Unit) modeSense(t *Task) {
	m, _ := scsi.ParseModeSenseCDB(t.CDB)
	if m.PC == scsi.ModeSaved {
		t.fail(scsi.IllegalRequest, scsi.ASCSavingNotSupported)
		return
	}
	pages := make([]byte, 0, 128)
	switch {
	case m.Page == scsi.AllModePages && (m.Subpage == 0 || m.Subpage == 0xff):
		for _, p := range modePages {
			pages = u.modePage(pages, p, m.PC)
		}
	case m.Subpage == 0:
		pages = u.modePage(pages, m.Page, m.PC)
	}
	if len(pages) == 0 {
		t.badField(2)
		return
	}
	var dev uint8 = scsi.ModeDPOFUA
	if u.readOnly || u.swp.Load() {
		dev |= scsi.ModeWriteProtected
	}
	t.give(scsi.AppendMode(t.Scratch[:0], m.Ten, !m.DBD, m.LLBAA, dev, u.blocks, u.blockSize, pages), int(m.AllocLen))
}

// modeSelect takes new values. The whole list is checked before anything changes (SPC-4, 6.9).
func (u *Unit) modeSelect(t *Task, list []byte) {
	c, _ := scsi.ParseModeSelectCDB(t.CDB)
	m, err := scsi.ParseMode(list, c.Ten, true)
	if err != nil {
		t.fail(scsi.IllegalRequest, scsi.ASCParameterListLength)
		return
	}
	if m.BlockDesc && m.BlockSize != u.blockSize || m.BlockDesc && m.Blocks != 0 && m.Blocks != min(u.blocks, 1<<32-1) && m.Blocks != u.blocks {
		t.badParam(0)
		return
	}
	type change struct {
		writeBack, swp, desc   bool
		hasCaching, hasControl bool
	}
	var ch change
	for _, p := range m.Pages {
		if p.Subpage != 0 {
			t.badParam(0)
			return
		}
		want := append([]byte{p.Page, byte(p.Length)}, p.Data...)
		cur := u.modePage(nil, p.Page, scsi.ModeCurrent)
		mask := u.modePage(nil, p.Page, scsi.ModeChangeable)
		if len(cur) == 0 || len(cur) != len(want) {
			t.badParam(0)
			return
		}
		for i := 2; i < len(cur); i++ {
			if (want[i]^cur[i])&^mask[i] != 0 { // a bit that cannot be changed
				t.badParam(uint16(i))
				return
			}
		}
		switch p.Page {
		case scsi.ModePageCaching:
			ch.hasCaching, ch.writeBack = true, want[2]&0x04 != 0
		case scsi.ModePageControl:
			ch.hasControl, ch.desc, ch.swp = true, want[2]&0x04 != 0, want[4]&0x08 != 0
		}
	}
	changed := false
	if ch.hasCaching {
		changed = u.writeBack.Swap(ch.writeBack) != ch.writeBack
		if changed && !ch.writeBack {
			if t.flush(); t.Done {
				return
			}
		}
	}
	if ch.hasControl {
		changed = u.descSense.Swap(ch.desc) != ch.desc || changed
		changed = u.swp.Swap(ch.swp) != ch.swp || changed
	}
	if changed {
		u.EstablishAll(scsi.ASCModeParametersChanged, t.nexus)
	}
}
