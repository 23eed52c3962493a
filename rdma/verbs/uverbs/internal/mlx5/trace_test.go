//go:build linux && amd64 && !race

package mlx5

import (
	"testing"

	"srp-initiator/rdma/verbs/uverbs/internal/storetrace"
)

func TestStoreOrder(t *testing.T) { storetrace.Test(t, driver) }
