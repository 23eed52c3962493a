// Package mlx5 drives NVIDIA ConnectX-4 and later adapters (kernel driver mlx5_ib)
// from userspace: queue sizes, work queue entries, doorbells, completion entries.
//
// The layouts are those of the adapter family's programming manual as libmlx5 of rdma-core v44.0 uses them
// (providers/mlx5/{mlx5dv.h,wqe.h,qp.c,cq.c}) and as <rdma/mlx5-abi.h> passes them to the
// kernel. All fields in queues, doorbell records and registers are big-endian; driver
// structures passed to the kernel are in host order.
package mlx5
