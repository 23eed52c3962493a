package ring

import "testing"

func TestRounding(t *testing.T) {
	for n := range 300 {
		p := 1
		for p < n {
			p *= 2
		}
		if got := Pow2(n); got != p {
			t.Errorf("Pow2(%d) = %d", n, got)
		}
		for to := 1; to <= 4096; to *= 2 {
			up := 0
			for up < n {
				up += to
			}
			if got := Align(n, to); got != up {
				t.Errorf("Align(%d, %d) = %d", n, to, got)
			}
		}
	}
}
