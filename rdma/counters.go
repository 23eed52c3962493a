package rdma

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"srp-initiator/rdma/softroce"
)

// Counters are the device's own counters by name. Those of a softroce device begin at Open; those of a kernel device are its hw_counters
// (Documentation/ABI/stable/sysfs-class-infiniband) of port 1, which belong to all its users.
func (f *Fabric) Counters() map[string]uint64 {
	if d, ok := f.ctx.(*softroce.Device); ok {
		return softroceCounters(d.Stats())
	}
	return hwCounters("/sys", f.ctx.Name())
}

func softroceCounters(s softroce.Stats) map[string]uint64 {
	t := &s.Transport
	return map[string]uint64{
		"packets_sent": s.PacketsSent, "packets_received": s.PacketsReceived,
		"icrc_errors": s.ICRCErrors, "malformed": s.Malformed, "unknown_qp": s.UnknownQPN, "wrong_peer": s.WrongPeer, "bad_mads": s.BadMAD, "mads_lost": s.MADsLost,
		"send_stalls": s.SendStalls, "cq_overruns": s.CQOverruns, "qp_errors": s.QueuePairErrors,
		"retransmits": t.Retransmits, "timeouts": t.Timeouts, "early_retransmits": t.EarlyRetransmits,
		"sequence_naks_sent": t.TxNakSequence, "sequence_naks_received": t.RxNakSequence, "implied_naks": t.ImpliedNaks, "rnr_naks_sent": t.TxRNR, "rnr_naks_received": t.RxRNR,
		"fatal_naks_sent": t.TxNakFatal, "fatal_naks_received": t.RxNakFatal, "duplicates": t.Duplicates, "out_of_order": t.OutOfOrder, "read_replays": t.ReadReplays, "useless": t.Dropped,
		"cm_retransmits": s.CM.Retransmits, "cm_duplicates": s.CM.Duplicates, "cm_malformed": s.CM.Malformed, "cm_unexpected": s.CM.Unexpected, "cm_dropped": s.CM.Dropped,
		"socket_drops": s.Socket.KernelDrops, "socket_send_errors": s.Socket.SendErrors, "socket_truncated": s.Socket.Truncated,
	}
}

func hwCounters(sys, device string) map[string]uint64 {
	files, _ := filepath.Glob(filepath.Join(sys, "class/infiniband", device, "ports/1/hw_counters/*"))
	m := map[string]uint64{}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		if n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64); err == nil && filepath.Base(file) != "lifespan" {
			m[filepath.Base(file)] = n
		}
	}
	return m
}
