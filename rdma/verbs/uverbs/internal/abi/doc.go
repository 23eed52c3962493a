// Package abi declares what the kernel's user-verbs interface puts in memory:
// commands, responses, attributes and, for the families whose rings the kernel
// shares, ring entries. It has structs and numbers only.
//
// Each block names its uapi header. Values are explicit because the list is
// cherry-picked. Padding is written out and must be zero: the kernel refuses non-zero
// reserved bytes of ioctl attributes and may give them a meaning in commands. Field
// offsets and sizes are held to testdata/layout.txt, which gcc prints
// from the headers (layout_test.go).
//
// All integers are in host order unless a comment says big endian.
package abi

// Version is the user-verbs ABI version this package describes, as in
// /sys/class/infiniband_verbs/abi_version (IB_USER_VERBS_ABI_VERSION).
const Version = 6

// Driver ids of the ioctl header (enum rdma_driver_id, ib_user_ioctl_verbs.h).
const (
	DriverMLX5 = 1
	DriverMLX4 = 2
	DriverRXE  = 14
)
