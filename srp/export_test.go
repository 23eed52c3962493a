package srp

import "srp-initiator/completion"

// ChannelModes are the modes that the channels' completion instances are in.
func (s *Session) ChannelModes() (out []completion.Mode) {
	for _, ch := range s.channels() {
		out = append(out, ch.inst.Mode())
	}
	return out
}
