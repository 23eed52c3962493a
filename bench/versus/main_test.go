package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"srp-initiator/bench"
)

// TestTable: a table says with which values it was made.
func TestTable(t *testing.T) {
	one := bench.NewSpread([]float64{1})
	rows := []*row{{Point: "4 KiB randread QD 1", Name: "a", IOPS: one, CPU: one, bs: 4096}}
	var b bytes.Buffer
	printTable(&b, rows, []string{"a"}, []string{"/usr/local/bin/versus", "fio", "--rounds", "1", "--only", "QD 1"}, 1, time.Second)
	for _, want := range []string{"`versus fio --rounds 1 --only 'QD 1'`\n\n", "1 round of 1s", "**4 KiB randread QD 1**", "| a | 1 [1-1] |"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}
