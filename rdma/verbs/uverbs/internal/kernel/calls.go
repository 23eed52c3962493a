// Package kernel turns verbs commands into calls on an open uverbs device file.
//
// Device has one method per command. It chooses how the command travels: the
// typed ioctl methods where the kernel has them, ioctl INVOKE_WRITE for the rest, and write() on
// kernels without the ioctl (before 4.20). docs/uverbs-abi.md says which is which.
//
// Calls is the system call seam below it. File is the real one; the device
// models of the mlx families implement it too, so that everything above the
// seam runs unchanged on a recorded or simulated kernel.
package kernel

import (
	"errors"
	"syscall"
)

// Calls are the system calls on one open uverbs device file. Implementations
// report the kernel's refusals as syscall.Errno. All methods may be called concurrently;
// one *Ioctl or *Write value is used by one call at a time.
type Calls interface {
	// Ioctl issues RDMA_VERBS_IOCTL and fills Out slices, handles and fds.
	Ioctl(*Ioctl) error
	// Write issues a command of the write interface and fills its response slices.
	Write(*Write) error
	// Mmap maps length bytes at offset, MAP_SHARED, with PROT_* bits prot.
	Mmap(offset int64, length, prot int) ([]byte, error)
	Munmap([]byte) error
	Close() error
}

// AttrKind says how an attribute's value travels.
type AttrKind uint8

const (
	In        AttrKind = iota + 1 // Data goes to the kernel: by pointer, or inside the attribute when it has at most 8 bytes
	Out                           // the kernel fills Data
	HandleIn                      // Value is an object handle
	HandleOut                     // the kernel sets Value to a new handle
	FDIn                          // Value is a file descriptor
	FDOut                         // the kernel sets Value to a new file descriptor
)

// Attr is one attribute of an ioctl.
type Attr struct {
	ID    uint16
	Kind  AttrKind
	Flags uint16
	Data  []byte
	Value uint64
}

// Ioctl is one RDMA_VERBS_IOCTL.
type Ioctl struct {
	Object   uint16
	Method   uint16
	DriverID uint32
	Attrs    []Attr

	raw []byte // File's encoding, kept for the next issue
}

// Write is one command of the write interface.
type Write struct {
	// Command is the number, with abi.CmdExtended for an extended one.
	Command uint32
	// CoreIn is the command's struct. When CoreOut is not nil and the command is not extended, its first 8
	// bytes are the place of the response pointer.
	CoreIn   []byte
	DriverIn []byte
	// CoreOut and DriverOut receive the response; CoreOut nil: the command has none.
	CoreOut   []byte
	DriverOut []byte
	// Fast marks a doorbell: the call takes no lock, and the caller sees to it that the file is not closed during it.
	Fast bool

	raw, resp []byte // File's encoding and response room, kept for the next issue
}

// Gone tells from a command's error that the device is no more: the kernel answers EIO once it let go
// of the device (uverbs_main.c), or ENODEV. What the kernel held for us is gone with it.
func Gone(err error) bool {
	return errors.Is(err, syscall.EIO) || errors.Is(err, syscall.ENODEV)
}

// errno is err as the kernel's number, 0 when it is none.
func errno(err error) syscall.Errno {
	e, _ := err.(syscall.Errno)
	return e
}
