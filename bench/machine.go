package bench

import (
	"bufio"
	"fmt"
	"math/bits"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"srp-initiator/internal/revision"
)

// Machine is what a figure depends on besides the program: recorded with every report.
type Machine struct {
	CPU         string  `json:"cpu"`              // model name of the first one
	CPUs        int     `json:"cpus"`             // this process might use when it began
	Pinned      string  `json:"pinned,omitempty"` // the CPUs it may use now, if they are fewer: "1" or "0,2"
	MemoryMiB   int64   `json:"memory_mib"`
	Hypervisor  bool    `json:"hypervisor"` // the CPU says that it is a virtual one
	Kernel      string  `json:"kernel"`     // release and build
	OS          string  `json:"os"`
	Arch        string  `json:"arch"`
	Go          string  `json:"go"`
	MaxProcs    int     `json:"gomaxprocs"`
	Version     string  `json:"version"` // of this program: the commit it was built from
	LoadAverage float64 `json:"load_average"`
	Time        string  `json:"time"` // RFC 3339, UTC
	Device      string  `json:"device,omitempty"`
	Target      string  `json:"target,omitempty"`
}

// ThisMachine describes where the program runs, as far as it can be read.
func ThisMachine() Machine {
	m := Machine{CPUs: runtime.NumCPU(), Arch: runtime.GOARCH, Go: runtime.Version(), MaxProcs: runtime.GOMAXPROCS(0),
		Time: time.Now().UTC().Format(time.RFC3339)}
	eachLine("/proc/cpuinfo", func(line string) bool {
		key, value, _ := strings.Cut(line, ":")
		switch strings.TrimSpace(key) {
		case "model name":
			m.CPU = strings.TrimSpace(value)
		case "flags":
			m.Hypervisor = strings.Contains(value+" ", " hypervisor ")
			return false
		}
		return true
	})
	eachLine("/etc/os-release", func(line string) bool {
		if v, ok := strings.CutPrefix(line, "PRETTY_NAME="); ok {
			m.OS = strings.Trim(v, `"`)
		}
		return m.OS == ""
	})
	eachLine("/proc/loadavg", func(line string) bool {
		if f := strings.Fields(line); len(f) > 0 {
			m.LoadAverage, _ = strconv.ParseFloat(f[0], 64)
		}
		return false
	})
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:]) + " " + unix.ByteSliceToString(u.Version[:])
	}
	var si unix.Sysinfo_t
	if unix.Sysinfo(&si) == nil {
		m.MemoryMiB = int64(uint64(si.Totalram) * uint64(si.Unit) >> 20)
	}
	m.Version = ProgramVersion()
	return m
}

// pinned lists the CPUs that the calling thread may use, "" if they are as many as all.
func pinned(all int) string {
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) != nil || set.Count() >= all {
		return ""
	}
	var cpus []string
	for c := range len(set) * bits.UintSize {
		if set.IsSet(c) {
			cpus = append(cpus, strconv.Itoa(c))
		}
	}
	return strings.Join(cpus, ",")
}

// cpusText says how many CPUs there were, and to which of them the process was pinned.
func (m *Machine) cpusText() string {
	if m.Pinned == "" {
		return Counted(m.CPUs, "CPU")
	}
	return fmt.Sprintf("%s, pinned to %s", Counted(m.CPUs, "CPU"), m.Pinned)
}

// ProgramVersion says what the program was built from.
func ProgramVersion() string { return revision.Program() }

// eachLine calls f for the lines of a file until it returns false. A file that cannot be read has none.
func eachLine(path string, f func(string) bool) {
	file, err := os.Open(path)
	if err != nil {
		return
	}
	defer file.Close()
	for s := bufio.NewScanner(file); s.Scan() && f(s.Text()); {
	}
}
