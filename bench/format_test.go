package bench

import (
	"math"
	"strings"
	"testing"
)

// TestTimes: an interval shows on which side of 1 its ends lie.
func TestTimes(t *testing.T) {
	for _, c := range []struct {
		x    float64
		want string
	}{{1, "1.00"}, {1.0012, "1.001"}, {0.9971, "0.997"}, {1.004, "1.004"}, {1.25, "1.25"}, {0, "0.00"}, {0.0003, "0.0003"}, {2775.571, "2775.57"}} {
		if got := times(c.x); got != c.want {
			t.Errorf("%v: %q, want %q", c.x, got, c.want)
		}
	}
}

// TestNoNotifications: a round without a notification has no commands per notification, and a variant without any says so: it is not the worst, at 0.
func TestNoNotifications(t *testing.T) {
	m, _ := MetricNamed("commands_per_notification")
	round := func(per float64) *Result { return &Result{IOPS: 1, CommandsPerNotif: per, NotificationsPerS: per} }
	base := Compared{Rounds: []*Result{round(2), round(2), round(0), round(2)}}
	some := Compared{Rounds: []*Result{round(0), round(10), round(10), round(20)}}
	none := Compared{Rounds: []*Result{round(0), round(0), round(0), round(0)}}
	if s := some.Spread(m); s.Median != 10 || s.Min != 10 {
		t.Errorf("%+v, want the median of 10, 10 and 20", s)
	}
	if r, ok := some.Ratio(&base, m); !ok || r.Min != 5 || r.Max != 10 || math.IsNaN(r.Median) {
		t.Errorf("%+v, %v; want 5 to 10, of the rounds that have both", r, ok)
	}
	if _, ok := none.Ratio(&base, m); ok {
		t.Error("a ratio without any notification")
	}
	if got := none.medianText(m); got != "none" {
		t.Errorf("%q, want none", got)
	}
	if got := some.medianText(m); got != "10.0" {
		t.Errorf("%q, want 10.0", got)
	}
	if r := (Ratio{Spread: Spread{Median: 1.1}, Low: 1.001, High: 1.2, Verdict: Higher}); !strings.Contains(r.String(), "[1.001-1.20]") {
		t.Errorf("%v", r)
	}
}
