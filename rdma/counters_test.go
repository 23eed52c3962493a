package rdma

import (
	"maps"
	"os"
	"path/filepath"
	"testing"

	"srp-initiator/rdma/softroce"
	"srp-initiator/rdma/softroce/ibcm"
	"srp-initiator/rdma/softroce/rc"
)

func TestCounters(t *testing.T) {
	sys := t.TempDir()
	dir := filepath.Join(sys, "class/infiniband/rxe9/ports/1/hw_counters")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"sent_pkts": "18446744073709551615\n", "rcvd_seq_err": "0\n", "lifespan": "10\n", "odd": "n/a\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := hwCounters(sys, "rxe9"), (map[string]uint64{"sent_pkts": 1<<64 - 1, "rcvd_seq_err": 0}); !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := hwCounters(sys, "none"); len(got) != 0 {
		t.Errorf("no such device: %v", got)
	}
	got := softroceCounters(softroce.Stats{PacketsSent: 5, ICRCErrors: 1, Transport: rc.Stats{Retransmits: 2, RxRNR: 3}, CM: ibcm.Stats{Retransmits: 4}})
	for name, want := range map[string]uint64{"packets_sent": 5, "icrc_errors": 1, "retransmits": 2, "rnr_naks_received": 3, "cm_retransmits": 4, "duplicates": 0} {
		if n, ok := got[name]; !ok || n != want {
			t.Errorf("%s %d, want %d", name, n, want)
		}
	}
}
