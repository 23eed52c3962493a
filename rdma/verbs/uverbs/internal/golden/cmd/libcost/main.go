// libcost compares what the drivers and the C libraries need per work request and per completion. It runs the program of
// testdata/libcost and the drivers' benchmarks in turn, round by round, so that what else the machine does meets both.
//
//	libcost [-rounds N] [-repeat N] LIBCOST GO.TEST FAMILY
//
// A round's figure is the median of its repetitions of 1024 requests; the table has the medians of the rounds, and of the
// rounds' ratios the median and the quarter on either side.
package main

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// rows are the table's lines, by the names that the C program prints.
var rows = []struct{ name, text string }{
	{"send/batch1", "SEND 64 B, a doorbell each"},
	{"send/batch16", "SEND 64 B, 16 to a doorbell"},
	{"inline64/batch1", "inline SEND 64 B, a doorbell each"},
	{"inline64/batch16", "inline SEND 64 B, 16 to a doorbell"},
	{"read/batch1", "RDMA READ, a doorbell each"},
	{"read/batch16", "RDMA READ, 16 to a doorbell"},
	{"poll", "poll, per completion"},
	{"pollempty", "poll of an empty queue"},
}

func main() {
	rounds := flag.Int("rounds", 41, "rounds")
	repeat := flag.Int("repeat", 60, "repetitions in a round")
	flag.Parse()
	if flag.NArg() != 3 {
		flag.Usage()
		os.Exit(2)
	}
	if err := run(flag.Arg(0), flag.Arg(1), flag.Arg(2), *rounds, *repeat); err != nil {
		fmt.Fprintln(os.Stderr, "libcost:", err)
		os.Exit(1)
	}
}

func run(libcost, test, family string, rounds, repeat int) error {
	dir, err := os.MkdirTemp("", "libcost")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	c, g := map[string][]float64{}, map[string][]float64{}
	allocs := 0.0
	for range rounds {
		out, err := output(libcost, family, filepath.Join(dir, family), strconv.Itoa(repeat))
		if err != nil {
			return err
		}
		for s := bufio.NewScanner(bytes.NewReader(out)); s.Scan(); {
			f := strings.Fields(s.Text())
			if len(f) != 2 {
				return fmt.Errorf("%s printed %q", libcost, s.Text())
			}
			if err := add(c, f[0], f[1]); err != nil {
				return err
			}
		}
		for bench, n := range map[string]int{"^BenchmarkPost$": repeat, "^BenchmarkPollEmpty$": repeat * 1024} {
			out, err := output(test, "-test.run=^$", "-test.bench="+bench, "-test.benchtime="+strconv.Itoa(n)+"x")
			if err != nil {
				return err
			}
			for s := bufio.NewScanner(bytes.NewReader(out)); s.Scan(); {
				a, err := benchmark(g, s.Text())
				if err != nil {
					return err
				}
				allocs += a
			}
		}
	}
	fmt.Printf("| %s, %d rounds | C, ns | Go, ns | ratio | quarters |\n|---|---|---|---|---|\n", family, rounds)
	for _, r := range rows {
		x, y := c[r.name], g[r.name]
		if len(x) != rounds || len(y) != rounds {
			return fmt.Errorf("%s: %d figures of C and %d of Go in %d rounds", r.name, len(x), len(y), rounds)
		}
		ratio := make([]float64, rounds)
		for i := range ratio {
			ratio[i] = y[i] / x[i]
		}
		slices.Sort(x)
		slices.Sort(y)
		slices.Sort(ratio)
		fmt.Printf("| %s | %.1f | %.1f | %.2f | %.2f to %.2f |\n", r.text, x[rounds/2], y[rounds/2], ratio[rounds/2], ratio[rounds/4], ratio[rounds-1-rounds/4])
	}
	if allocs > 0 {
		return fmt.Errorf("the benchmarks allocate")
	}
	return nil
}

func output(name string, args ...string) ([]byte, error) {
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("%s %v: %w\n%s", name, args, err, out)
	}
	return out, nil
}

func add(to map[string][]float64, name, value string) error {
	v, err := strconv.ParseFloat(value, 64)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	to[name] = append(to[name], v)
	return nil
}

// benchmark takes the figures of a benchmark's line and returns its allocations.
func benchmark(to map[string][]float64, line string) (allocs float64, err error) {
	f := strings.Fields(line)
	if len(f) < 4 || !strings.HasPrefix(f[0], "Benchmark") {
		return 0, nil
	}
	name, _, _ := strings.Cut(strings.TrimPrefix(f[0], "Benchmark"), "-") // the processors' number
	for i := 2; i+1 < len(f); i += 2 {
		switch f[i+1] {
		case "ns/WQE":
			err = add(to, strings.TrimPrefix(name, "Post/"), f[i])
		case "ns/CQE":
			if name == "Post/send/batch16" {
				err = add(to, "poll", f[i])
			}
		case "ns/op":
			if name == "PollEmpty" {
				err = add(to, "pollempty", f[i])
			}
		case "allocs/op":
			allocs, err = strconv.ParseFloat(f[i], 64)
		}
		if err != nil {
			return 0, err
		}
	}
	return allocs, nil
}
