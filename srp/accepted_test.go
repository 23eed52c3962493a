package srp

import (
	"errors"
	"strings"
	"testing"

	"srp-initiator/srp/iu"
)

// A login response must have the tag of the request.
func TestLoginResponseTag(t *testing.T) {
	for tag, want := range map[uint64]string{loginTag: "", loginTag + 5: "tag 0x5 answers another request"} {
		var b [iu.LoginRspSize]byte
		r := iu.LoginRsp{Tag: tag, ReqLimDelta: 10, MaxITIULen: 8192, MaxTIIULen: 8192}
		if _, err := r.Encode(b[:]); err != nil {
			t.Fatal(err)
		}
		ch := &channel{s: &Session{opts: DefaultLoginOptions()}}
		err := ch.accepted(b[:], 8192)
		var pe *ProtocolError
		switch {
		case want == "" && (err != nil || ch.state != live):
			t.Errorf("tag %#x: %v", tag, err)
		case want != "" && (!errors.As(err, &pe) || !strings.Contains(err.Error(), want) || ch.state == live):
			t.Errorf("tag %#x: %v, want %q", tag, err, want)
		}
	}
}
