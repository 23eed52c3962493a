package kernel

import (
	"sync/atomic"
	"syscall"
)

// Doorbell is a command that is issued again and again with the same buffers: a
// queue pair's POST_SEND kick, a completion queue's arm. It allocates nothing per
// Ring. One goroutine rings at a time, and sees to it that the device stays open during it.
//
// It goes by write(), which costs the kernel less than the ioctl. write() is refused
// with EACCES when the caller's credentials are not those of the opener; from then on it goes by ioctl.
type Doorbell struct {
	d      *Device
	write  Write
	ioctl  *Ioctl
	change atomic.Bool
}

// NewDoorbell prepares command; coreIn may be altered between rings.
func (d *Device) NewDoorbell(command uint32, coreIn, coreOut []byte) *Doorbell {
	b := &Doorbell{d: d, write: Write{Command: command, CoreIn: coreIn, CoreOut: coreOut, Fast: true}}
	if d.ioctl {
		b.ioctl = d.invoke(&b.write)
	}
	return b
}

// Ring issues the command.
func (b *Doorbell) Ring() error {
	if !b.change.Load() {
		err := b.d.Write(&b.write)
		if err == nil || b.ioctl == nil || errno(err) != syscall.EACCES {
			return err
		}
		b.change.Store(true)
	}
	return b.d.Ioctl(b.ioctl)
}
