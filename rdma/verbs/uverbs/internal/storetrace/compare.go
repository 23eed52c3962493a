//go:build linux && amd64

package storetrace

import (
	"bytes"
	"fmt"
	"strings"

	"srp-initiator/rdma/verbs/uverbs/internal/golden"
)

// Compare holds a traced call to the recorded events of the same step. Stores to queue memory are compared as to where
// between the others they come; records and registers store by store, with width and offset (their values the
// player compares, records here too). Locks are the library's own; more fences than the library's are allowed, fewer are not.
func Compare(device string, s *golden.Step, c *Call) []string {
	var errs []string
	want := sequence(recorded(s.Events))
	got := sequence(c.Events)
	switch {
	case s.Ret < 0:
		return nil // the library stops at an entry of an unknown queue pair, the driver goes on
	case s.Call == "ibv_poll_cq" && s.Ret == 0:
		want = nil // the library stores an unchanged index
	case s.Call == "ibv_poll_cq":
	case s.Ret != 0 && len(s.WQEIndex) > 0:
		// The library's refused entry: only the order of what is published counts, with the last good entry.
		want, got = published(want), published(got)
	case s.Ret != 0 && s.Call == "ibv_post_send":
		want = nil // the library may have begun the refused entry
	}
	if !covers(got, want) {
		errs = append(errs, fmt.Sprintf("events\n got  %s\n want %s", strings.Join(got, " "), strings.Join(want, " ")))
	}
	if device == "mlx4" && s.Call == "ibv_post_send" && s.Ret == 0 {
		errs = append(errs, firstWordLast(s, c)...)
	}
	return errs
}

func recorded(in []golden.Event) (out []Event) {
	for _, e := range in {
		switch {
		case e.Fence != "":
			out = append(out, Event{Fence: e.Fence})
		case len(e.Runs) > 0:
			out = append(out, Event{Store: e.Store})
		default:
			out = append(out, Event{Store: e.Store, Off: e.Off, Data: e.Hex})
		}
	}
	return out
}

// sequence writes events as words, consecutive stores to one queue as one, and likewise consecutive fences of loads: the
// library has one for each completion of a poll, the driver one for all.
func sequence(in []Event) (out []string) {
	for _, e := range in {
		w := ""
		switch {
		case e.Fence == "lock":
			continue
		case e.Fence != "" && e.Fence != "lfence":
			w = e.Fence
		case e.Fence != "" || strings.HasSuffix(e.Store, "q"): // fences of loads with no store between, too
			w = e.Fence + e.Store
			if n := len(out); n > 0 && out[n-1] == w {
				continue
			}
		case strings.HasSuffix(e.Store, "dbr"):
			w = fmt.Sprintf("%s+%d=%x", e.Store, e.Off, e.Data)
		default:
			w = fmt.Sprintf("%s+%#x/%d", e.Store, e.Off, len(e.Data))
		}
		out = append(out, w)
	}
	return out
}

func published(in []string) (out []string) {
	for _, w := range in {
		if !strings.HasSuffix(w, "q") {
			out = append(out, w)
		}
	}
	// One descriptor, or only its head: which one depends on what was refused.
	for len(out) > 4 && strings.HasPrefix(out[len(out)-2], "uar") && strings.HasPrefix(out[len(out)-3], "uar") {
		out = append(out[:len(out)-2], out[len(out)-1])
	}
	return out
}

// covers reports whether got is want with no more than fences added.
func covers(got, want []string) bool {
	i := 0
	for _, g := range got {
		if i < len(want) && g == want[i] {
			i++
		} else if !strings.HasSuffix(g, "fence") {
			return false
		}
	}
	return i == len(want)
}

// firstWordLast: the adapter prefetches lines of 64 bytes and goes by their first word, so that word of each line of a WQE is
// stored last.
func firstWordLast(s *golden.Step, c *Call) (errs []string) {
	queue := s.Args.QP + ".sq"
	copied := false // BlueFlame: index and number are put into the finished head
	for _, e := range s.Events {
		copied = copied || strings.HasPrefix(e.Store, "uar") && e.Off != 0x14
	}
	for _, b := range s.Queues[queue] {
		for line := b.Off; line < b.Off+b.Len; line += 64 {
			last, first := -1, -1
			for i, e := range c.Events {
				if e.Store != queue || e.Off+len(e.Data) <= line || e.Off >= line+64 {
					continue
				}
				last = i
				if e.Off <= line && (first < 0 || !copied) {
					first = i
				}
			}
			if last >= 0 && first != last && !(copied && line == b.Off) {
				errs = append(errs, fmt.Sprintf("line %#x: its first word is stored before the rest: %s", line, around(c.Events, first, last)))
			}
		}
	}
	return errs
}

func around(ev []Event, first, last int) string {
	var b bytes.Buffer
	for i := max(first, 0); i <= last && i < len(ev); i++ {
		fmt.Fprintf(&b, "%s+%#x/%d ", ev[i].Store, ev[i].Off, len(ev[i].Data))
	}
	return b.String()
}
