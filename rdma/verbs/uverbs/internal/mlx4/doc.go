// Package mlx4 drives NVIDIA ConnectX-3 adapters (kernel driver mlx4_ib) from
// userspace: queue sizes, work queue entries, doorbells, completion entries.
//
// The layouts are those of libmlx4 of rdma-core v44.0 (providers/mlx4/{mlx4dv.h,wqe.h,qp.c,cq.c}) and of
// <rdma/mlx4-abi.h>. All fields in queues, doorbell records and registers are
// big-endian; driver structures passed to the kernel are in host order.
package mlx4
