package main

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"srp-initiator/internal/require"
)

// The sessions of an experiment live side by side, also where they share a device and with it the GUID of their initiator port; and a
// capture of all of them is one file that can be read.
func TestExperimentOnOneDevice(t *testing.T) {
	url := emulate(t, "")
	for name, sessions := range map[string]int{"e2": 3, "e3s": 2} {
		file := filepath.Join(t.TempDir(), name+".pcapng")
		args := []string{"experiment", name, url, "--device", "softroce:127.87.3.1", "--pcap", file, "--rounds", "1", "--runtime", "50ms", "--size", "512k"}
		if name == "e2" {
			args = append(args, "--write")
		}
		out, errs, code := runs(t, "", args...)
		if code != 0 {
			t.Errorf("experiment %s: exit code %d: %s", name, code, errs)
			continue
		}
		if !strings.Contains(out, "softroce:127.87.3.1") {
			t.Errorf("experiment %s does not name the device: %s", name, out)
		}
		seen, err := exec.Command(require.Program(t, "tshark"), "-r", file, "-Y", "infiniband.cm.req && ip.src == 127.87.3.1", "-T", "fields",
			"-e", "frame.number").Output()
		if n := len(strings.Fields(string(seen))); err != nil || n != sessions {
			t.Errorf("experiment %s: tshark: %v, sees %d logins, want %d", name, err, n, sessions)
		}
	}
}
