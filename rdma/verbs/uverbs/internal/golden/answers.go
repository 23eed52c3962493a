package golden

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/verbs/uverbs/internal/abi"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
)

// Answers is a kernel whose answers a test makes up.
type Answers struct {
	Answer func(w *kernel.Write) error // to commands of the write interface
	Method func(c *kernel.Ioctl) error // to typed methods; nil: a kernel without the ioctl
	Maps   []int64                     // offsets that were mapped
	Unmaps int
}

func (k *Answers) Ioctl(c *kernel.Ioctl) error {
	switch {
	case k.Method == nil:
		return unix.ENOTTY
	case c.Object != abi.ObjectDevice || c.Method != abi.MethodInvokeWrite:
		return k.Method(c)
	case len(c.Attrs) == 1:
		return unix.ENOSPC
	}
	w := &kernel.Write{}
	for _, a := range c.Attrs {
		switch a.ID {
		case abi.AttrWriteCommand:
			w.Command = binary.NativeEndian.Uint32(a.Data)
		case abi.AttrCoreIn:
			w.CoreIn = a.Data
		case abi.AttrCoreOut:
			w.CoreOut = a.Data
		case abi.AttrDriverIn:
			w.DriverIn = a.Data
		case abi.AttrDriverOut:
			w.DriverOut = a.Data
		}
	}
	return k.Answer(w)
}

func (k *Answers) Write(w *kernel.Write) error { return k.Answer(w) }
func (k *Answers) Munmap(b []byte) error       { k.Unmaps++; return unix.Munmap(b) }
func (k *Answers) Close() error                { return nil }

// Mmap gives ordinary memory.
func (k *Answers) Mmap(offset int64, length, prot int) ([]byte, error) {
	k.Maps = append(k.Maps, offset)
	return unix.Mmap(-1, 0, length, unix.PROT_READ|prot, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
}
