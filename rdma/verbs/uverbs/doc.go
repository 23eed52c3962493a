// Package uverbs is the kernel-backed provider of package verbs, on
// /dev/infiniband/uverbsN.
//
// It relies on user-verbs ABI version 6 (/sys/class/infiniband_verbs/abi_version,
// unchanged since Linux 2.6.22) and checks it, as it checks the driver's own ABI version. Commands go by ioctl where the
// kernel has it and by write() where not; docs/uverbs-abi.md has the table. It was
// exercised on Linux 6.1 and 6.12 with rdma_rxe.
//
// What differs between device families is behind internal/provider. The system
// calls are behind internal/kernel, so that a simulated kernel can be put there.
package uverbs
