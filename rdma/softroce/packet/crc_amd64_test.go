package packet

import "testing"

// forceFold takes the folding code also where hash/crc32 would be preferred.
func forceFold(t *testing.T) {
	if !hasFold {
		t.Log("no VPCLMULQDQ here: hash/crc32 alone is tested")
		return
	}
	was := foldAlone
	foldAlone = true
	t.Cleanup(func() { foldAlone = was })
}
