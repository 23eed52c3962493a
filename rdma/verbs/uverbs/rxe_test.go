package uverbs_test

import (
	"os"
	"testing"

	"srp-initiator/rdma/verbs"
	"srp-initiator/rdma/verbs/uverbs"
	"srp-initiator/rdma/verbs/verbstest"
)

// rxeDevice is the name of the machine's first soft-RoCE device. Without one the test is
// skipped, or fails where REQUIRE_ALL=1 says that nothing may be missing and we are in the guest that has one.
func rxeDevice(t testing.TB) string {
	t.Helper()
	list, err := uverbs.Devices()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range list {
		if d.Driver == "rxe" {
			return d.Name
		}
	}
	if os.Getenv("VMTEST_GUEST") == "1" {
		t.Fatal("no rxe device in the guest")
	}
	t.Skip("no rxe device here; internal/vmtest runs this test in a guest that has one")
	return ""
}

func openRXE(t verbstest.TB, name string) verbstest.Side {
	t.Helper()
	ctx, err := uverbs.Open(name)
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() {
		if err := ctx.Close(); err != nil && err != verbs.ErrClosed {
			t.Errorf("close: %v", err)
		}
	})
	s, err := verbstest.OpenSide(ctx)
	if err != nil {
		t.Fatalf("%v", err)
	}
	return s
}

func TestRXE(t *testing.T) {
	name := rxeDevice(t)
	verbstest.Run(t, func(t verbstest.TB) verbstest.Pair {
		return verbstest.Pair{A: openRXE(t, name), B: openRXE(t, name), Windows: true,
			EagerArm: true, VagueLocalErrors: true, VagueLengthErrors: true, UnboundedWindows: true}
	})
}
