//go:build linux && amd64 && !race

package mlx5

import (
	"fmt"
	"testing"

	"srp-initiator/rdma/verbs/uverbs/internal/storetrace"
)

// Regions names the memory of a rig as the recordings do.
func (r *rig) Regions() (list []storetrace.Region) {
	add := func(name string, b []byte) {
		if len(b) > 0 {
			list = append(list, storetrace.Region{Name: name, Addr: addrOf(b), Len: len(b)})
		}
	}
	for i := range r.qps {
		add(fmt.Sprintf("qp%d.sq", i), r.SQ(i))
		add(fmt.Sprintf("qp%d.rq", i), r.RQ(i))
		add(fmt.Sprintf("qp%d.dbr", i), r.qpRec[i])
	}
	for i := range r.cqs {
		add(fmt.Sprintf("cq%d.dbr", i), r.cqRec[i])
	}
	for i := range r.uars {
		add(fmt.Sprintf("uar%d", i), r.uars[i])
	}
	return list
}

func TestStoreOrder(t *testing.T) { storetrace.Test(t, driver) }
