package completion

import (
	"fmt"
	"testing"
	"time"

	"srp-initiator/rdma/verbs"
)

// BenchmarkReap is the cost of one completion from the queue to the handler's return, in batches as deep as
// what is in flight, over several instances in turn. It should not depend on either.
func BenchmarkReap(b *testing.B) {
	for _, instances := range []int{1, 8, 64} {
		for _, depth := range []int{1, 32, 1024} {
			b.Run(fmt.Sprintf("instances=%d/depth=%d", instances, depth), func(b *testing.B) {
				seen := 0
				var all []*Instance
				var queues []*nullCQ
				for range instances {
					i, q := open(b, depth, Config{Mode: Direct}, func(wcs []verbs.WorkCompletion) { seen += len(wcs) })
					i.Wait(new(Waiter), time.Now().Add(time.Millisecond)) // the waiter that leaves leaves the queue unarmed
					all, queues = append(all, i), append(queues, q)
				}
				batch := make([]verbs.WorkCompletion, depth)
				b.ReportAllocs()
				b.ResetTimer()
				for n := 0; n < b.N; {
					k := n / depth % instances
					queues[k].complete(batch...)
					for want := seen + depth; seen < want; {
						if _, err := all[k].Poll(256); err != nil {
							b.Fatal(err)
						}
					}
					n += depth
				}
			})
		}
	}
}

// BenchmarkQueueDepthOne is a command's whole way in each mode, answered by the caller itself: complete, notify, reap, wake.
func BenchmarkQueueDepthOne(b *testing.B) {
	for _, m := range Modes() {
		b.Run(m.String(), func(b *testing.B) {
			var w Waiter
			i, q := open(b, 4, Config{Mode: m}, func([]verbs.WorkCompletion) { w.Signal() })
			b.ReportAllocs()
			for b.Loop() {
				q.complete(verbs.WorkCompletion{})
				i.Wait(&w, time.Time{})
			}
		})
	}
}
