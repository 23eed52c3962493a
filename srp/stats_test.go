package srp

import (
	"reflect"
	"testing"
)

// TestChannelStats: no counter is forgotten when counters are added and subtracted.
func TestChannelStats(t *testing.T) {
	var a, b ChannelStats
	va, vb := reflect.ValueOf(&a).Elem(), reflect.ValueOf(&b).Elem()
	for k := range va.NumField() {
		va.Field(k).SetUint(uint64(100 * (k + 1)))
		vb.Field(k).SetUint(uint64(k + 1))
	}
	sum, difference := reflect.ValueOf(a.Add(b)), reflect.ValueOf(a.Sub(b))
	for k := range va.NumField() {
		if s, d := sum.Field(k).Uint(), difference.Field(k).Uint(); s != uint64(101*(k+1)) || d != uint64(99*(k+1)) {
			t.Errorf("%s: sum %d, difference %d", va.Type().Field(k).Name, s, d)
		}
	}
}
