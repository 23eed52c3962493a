// Package vmtest boots a real Linux kernel in QEMU and runs programs in it: the tests of everything that needs
// RDMA devices, the kernel's SRP target (LIO ib_srpt) or its SRP initiator (ib_srp).
//
// The kernels are Debian's, unpacked into a cache folder outside the source tree and never installed. A guest is an
// initramfs (kernel modules, busybox, foreign tools with their libraries) plus one folder shared over virtio-9p, which
// carries the programs in and their output, exit codes and files out. Emulation is in software (TCG): no KVM is needed.
//
// A guest that panics, hangs or exceeds its time limit gives a typed error with the tail of its console; the whole console is kept.
// Only one guest runs at a time for one cache folder: two of them on two cores cost each other far more than half.
package vmtest
