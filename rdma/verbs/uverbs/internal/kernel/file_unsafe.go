package kernel

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/verbs/uverbs/internal/abi"
)

// File is an open /dev/infiniband/uverbsN. It implements Calls.
type File struct {
	path string
	fd   atomic.Int32 // -1: closed

	mu sync.RWMutex // read-held during a control call, so that Close cannot free the number under it
}

// Open opens the device file at path.
func Open(path string) (*File, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := &File{path: path}
	f.fd.Store(int32(fd))
	return f, nil
}

// Close closes the file; the kernel destroys what was made through it.
func (f *File) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	fd := f.fd.Swap(-1)
	if fd < 0 {
		return os.ErrClosed
	}
	return unix.Close(int(fd))
}

// Mmap maps device or ring pages. They are kept from a forked child, where a copy-on-write would
// part our pages from the device's.
func (f *File) Mmap(offset int64, length, prot int) ([]byte, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	b, err := unix.Mmap(int(f.fd.Load()), offset, length, prot, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	if err := unix.Madvise(b, unix.MADV_DONTFORK); err != nil {
		unix.Munmap(b)
		return nil, fmt.Errorf("madvise: %w", err)
	}
	return b, nil
}

// Munmap undoes Mmap.
func (f *File) Munmap(b []byte) error { return unix.Munmap(b) }

// address is where b lies, for a field that the kernel dereferences and the collector cannot
// see. Go's heap objects do not move, and everything reachable from a *Ioctl or *Write is on the heap, because those
// travel through an interface; the caller keeps b referenced until the system call has returned.
func address(b []byte) uint64 {
	if len(b) == 0 {
		return 0
	}
	return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
}

const ioctlHeaderSize, ioctlAttrSize = 24, 16

// Ioctl implements Calls.
func (f *File) Ioctl(c *Ioctl) error {
	size := ioctlHeaderSize + ioctlAttrSize*len(c.Attrs)
	if cap(c.raw) < size {
		c.raw = make([]byte, size, size+ioctlAttrSize) // room for one more, so that attrs points inside even when there are none
	}
	c.raw = c.raw[:size]
	hdr := (*abi.IoctlHeader)(unsafe.Pointer(unsafe.SliceData(c.raw)))
	*hdr = abi.IoctlHeader{Length: uint16(size), ObjectID: c.Object, MethodID: c.Method,
		NumAttrs: uint16(len(c.Attrs)), DriverID: c.DriverID}
	attrs := unsafe.Slice((*abi.IoctlAttr)(unsafe.Add(unsafe.Pointer(hdr), ioctlHeaderSize)), len(c.Attrs))
	for i := range c.Attrs {
		a := &c.Attrs[i]
		attrs[i] = abi.IoctlAttr{AttrID: a.ID, Flags: a.Flags}
		switch a.Kind {
		case In:
			attrs[i].Len = uint16(len(a.Data))
			if len(a.Data) <= 8 {
				copy(abi.Bytes(&attrs[i].Data), a.Data)
				break
			}
			attrs[i].Data = address(a.Data)
		case Out:
			attrs[i].Len = uint16(len(a.Data))
			attrs[i].Data = address(a.Data)
		default:
			attrs[i].Data = a.Value
		}
	}
	f.mu.RLock()
	err := f.call(unix.SYS_IOCTL, abi.IoctlNumber, c.raw)
	f.mu.RUnlock()
	runtime.KeepAlive(c)
	if err != nil {
		return err
	}
	for i := range c.Attrs {
		if k := c.Attrs[i].Kind; k == HandleOut || k == FDOut {
			c.Attrs[i].Value = attrs[i].Data
		}
	}
	return nil
}

// Write implements Calls. Issuing the same *Write again allocates nothing, and a
// Fast one takes no lock that other queues take.
func (f *File) Write(c *Write) error {
	c.encode()
	if !c.Fast {
		f.mu.RLock()
		defer f.mu.RUnlock()
	}
	err := f.call(unix.SYS_WRITE, 0, c.raw)
	runtime.KeepAlive(c)
	if err != nil {
		return err
	}
	n := copy(c.CoreOut, c.resp)
	copy(c.DriverOut, c.resp[n:])
	return nil
}

// encode lays the command out in c.raw.
func (c *Write) encode() {
	const hdr, exHdr = 8, 16
	extended := c.Command&abi.CmdExtended != 0
	size := hdr + len(c.CoreIn) + len(c.DriverIn)
	core := hdr
	if extended {
		size += exHdr
		core += exHdr
	}
	respSize := len(c.CoreOut) + len(c.DriverOut)
	if len(c.raw) != size || len(c.resp) != respSize {
		// One 8-byte aligned object each, kept for the next issue.
		c.raw, c.resp = make([]byte, size), make([]byte, respSize)
	}
	h := (*abi.CmdHeader)(unsafe.Pointer(unsafe.SliceData(c.raw)))
	copy(c.raw[core:], c.CoreIn)
	copy(c.raw[core+len(c.CoreIn):], c.DriverIn)
	if extended {
		*h = abi.CmdHeader{Command: c.Command, InWords: uint16(len(c.CoreIn) / 8), OutWords: uint16(len(c.CoreOut) / 8)}
		*(*abi.ExCmdHeader)(unsafe.Pointer(&c.raw[hdr])) = abi.ExCmdHeader{Response: address(c.resp),
			ProviderInWords: uint16(len(c.DriverIn) / 8), ProviderOutWords: uint16(len(c.DriverOut) / 8)}
		return
	}
	*h = abi.CmdHeader{Command: c.Command, InWords: uint16(size / 4), OutWords: uint16(respSize / 4)}
	if c.CoreOut != nil {
		*(*uint64)(unsafe.Pointer(&c.raw[core])) = address(c.resp)
	}
}

// call issues a system call on the file. EINTR is possible only before the kernel
// began the command (uverbs_main.c waits for nothing after that), so it is safe to repeat.
func (f *File) call(nr, arg uintptr, buf []byte) error {
	fd := f.fd.Load()
	if fd < 0 {
		return os.ErrClosed
	}
	for {
		var r uintptr
		var e syscall.Errno
		p := unsafe.Pointer(unsafe.SliceData(buf))
		if nr == unix.SYS_WRITE {
			r, _, e = unix.Syscall(unix.SYS_WRITE, uintptr(fd), uintptr(p), uintptr(len(buf)))
		} else {
			_, _, e = unix.Syscall(unix.SYS_IOCTL, uintptr(fd), arg, uintptr(p))
		}
		switch {
		case e == unix.EINTR:
			continue
		case e != 0:
			return e
		case nr == unix.SYS_WRITE && int(r) != len(buf):
			return fmt.Errorf("%s: short write of %d bytes, %d taken", f.path, len(buf), r)
		}
		return nil
	}
}
