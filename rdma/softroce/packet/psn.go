package packet

// PSN is a packet sequence number: 24 bits, circular (IBA vol. 1, 9.7.1).
type PSN uint32

const psnMask = 1<<24 - 1

// MakePSN is the low 24 bits of v.
func MakePSN(v uint32) PSN { return PSN(v & psnMask) }

// Add moves n packets on, back when n is negative.
func (p PSN) Add(n int) PSN { return PSN((uint32(p) + uint32(n)) & psnMask) }

// Sub is the signed distance from q to p: positive when p is after q. Distances lie in [-2^23, 2^23).
func (p PSN) Sub(q PSN) int { return int(int32((uint32(p)-uint32(q))<<8) >> 8) }

// Before reports that p precedes q.
func (p PSN) Before(q PSN) bool { return p.Sub(q) < 0 }
