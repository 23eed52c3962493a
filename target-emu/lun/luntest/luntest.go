// Package luntest makes the logical units of tests.
package luntest

import (
	"fmt"
	"testing"

	"srp-initiator/target-emu/lun"
)

// Unit makes a unit of spec ("ram:1m,bs=4096"), whose block size cfg takes; its storage is closed when the test ends.
func Unit(t testing.TB, spec string, cfg lun.Config) *lun.Unit {
	t.Helper()
	sp, err := lun.ParseSpec(spec)
	if err != nil {
		t.Fatal(err)
	}
	st, err := lun.OpenStore(sp)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	cfg.BlockSize = sp.BlockSize
	u, err := lun.New(st, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// Units adds units of specs to m, each with its number in its serial number.
func Units(t testing.TB, m *lun.Map, specs map[uint32]string) *lun.Map {
	t.Helper()
	for n, spec := range specs {
		if err := m.Add(n, Unit(t, spec, lun.Config{Serial: fmt.Sprintf("unit%d", n)})); err != nil {
			t.Fatal(err)
		}
	}
	return m
}
