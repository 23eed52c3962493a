package mlxtest

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"srp-initiator/rdma/verbs"
)

// family is what differs between the models of mlx5 and mlx4.
type family interface {
	// context answers GET_CONTEXT.
	context(d *device, driverIn, driverOut []byte) unix.Errno
	createCQ(d *device, c *cq, driverIn, driverOut []byte) unix.Errno
	createQP(d *device, q *qp, capIn caps, driverIn, driverOut []byte) (caps, unix.Errno)
	allocPD(driverOut []byte)
	// scan looks at the register pages and marks queue pairs and queues; it reports whether there was anything.
	scan(d *device) bool
	// nextSend decodes the WQE at the queue pair's send index. more is false when there is none.
	nextSend(q *qp) (r request, more bool)
	// putCQE writes the entry of producer index c.pi.
	putCQE(c *cq, e *entry)
	recvHead(q *qp) uint32
}

// caps are struct ib_uverbs_qp_cap.
type caps struct{ sendWR, recvWR, sendSGE, recvSGE, inline uint32 }

// device is one adapter with one opened context.
type device struct {
	net    *Net
	cfg    Config
	fam    family
	name   string
	lid    uint16
	addr   netip.Addr
	guid   uint64
	closed bool

	nextHandle uint32
	pds        map[uint32]*pd
	regions    map[uint32]*region
	windows    map[uint32]*window
	channels   map[int]*channel // by the descriptor that the driver got
	cqs        map[uint32]*cq
	qps        map[uint32]*qp
	byNum      map[uint32]*qp
	keys       map[uint32]any // *region or *window, by key without its low byte
	nextKey    uint32
	nextQPN    uint32
	nextCQN    uint32
	async      eventFile
	uars       []*uar

	// Room to work in, so that the engine allocates nothing while tests count allocations.
	entry entry
	cqe   [128]byte
}

type pd struct{ refs int }

// region is a memory region.
type region struct {
	pd      *pd
	addr    uint64
	len     uint64
	access  verbs.AccessFlags
	key     uint32
	windows int
}

// window is a type 2 memory window.
type window struct {
	pd     *pd
	key    uint32
	region *region // nil: not bound
	qp     *qp
	addr   uint64
	len    uint64
	access verbs.AccessFlags
}

// uar is a page of registers.
type uar struct {
	mem    []byte
	handle uint32
	id     uint32
	freed  bool
}

// word takes a register's word away: 0 when nothing was stored since.
func (u *uar) word(off int) uint64 {
	p := (*uint64)(unsafe.Pointer(&u.mem[off]))
	if atomic.LoadUint64(p) == 0 {
		return 0
	}
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], atomic.SwapUint64(p, 0))
	return binary.BigEndian.Uint64(b[:])
}

func (u *uar) word32(off int) uint32 {
	p := (*uint32)(unsafe.Pointer(&u.mem[off]))
	if atomic.LoadUint32(p) == 0 {
		return 0
	}
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], atomic.SwapUint32(p, 0))
	return binary.BigEndian.Uint32(b[:])
}

// record reads a word of a doorbell record.
func record(addr uint64, i int) uint32 {
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], atomic.LoadUint32((*uint32)(pointer(addr+uint64(4*i)))))
	return binary.BigEndian.Uint32(b[:])
}

func pointer(addr uint64) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&addr)) }

// user is n bytes of the process's memory.
func user(addr uint64, n int) []byte { return unsafe.Slice((*byte)(pointer(addr)), n) }

// publish stores the last word of an entry, which makes it the driver's.
func publish(dst, src []byte) {
	atomic.StoreUint32((*uint32)(unsafe.Pointer(unsafe.SliceData(dst))), binary.NativeEndian.Uint32(src))
}

// loadWord loads the first word of a WQE, which its writer stores last.
func loadWord(b []byte) uint32 {
	var v [4]byte
	binary.NativeEndian.PutUint32(v[:], atomic.LoadUint32((*uint32)(unsafe.Pointer(unsafe.SliceData(b)))))
	return binary.BigEndian.Uint32(v[:])
}

// eventFile is an event file: one descriptor, which the driver owns, reads and closes. In this process the kernel's side writes
// by the same descriptor, while a queue that reports to it exists.
type eventFile struct{ fd int }

func newEventFile() (eventFile, unix.Errno) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return eventFile{}, unix.EMFILE
	}
	// A pipe opened for reading and writing needs one descriptor only.
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", p[0]), unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	unix.Close(p[0])
	unix.Close(p[1])
	if err != nil {
		return eventFile{}, unix.EMFILE
	}
	return eventFile{fd}, 0
}

// drop takes unread events of size bytes about element out and returns how many there were.
func (p *eventFile) drop(size int, element uint64) (n uint32) {
	if p.fd == 0 {
		return 0
	}
	var keep []byte
	b := make([]byte, size)
	for {
		if k, err := unix.Read(p.fd, b); k != size || err != nil {
			break
		}
		if binary.NativeEndian.Uint64(b) == element {
			n++
		} else {
			keep = append(keep, b...)
		}
	}
	for len(keep) > 0 {
		unix.Write(p.fd, keep[:size])
		keep = keep[size:]
	}
	return n
}

// channel is a completion channel.
type channel struct {
	eventFile
	refs int
}

// cq is a completion queue.
type cq struct {
	dev      *device
	handle   uint32
	num      uint32
	userID   uint64
	ch       *channel
	buf, db  uint64
	entries  uint32
	size     int // bytes of an entry
	pi       uint32
	refs     int
	overrun  bool
	asyncOut uint32 // events written
	events   uint32

	armed     bool
	solicited bool   // armed for solicited entries only
	armSN     uint32 // of the last request
	spent     bool   // its event has been raised
	solicitPI uint32 // producer index behind the last solicited entry
	anySol    bool
	record    [8]byte // of an event on its way to ch: under the race detector what is handed to write(2) escapes
}

const (
	armSolicited = 1 << 24
	armIndex     = 0xffffff
	// neverArmed is what the kernel leaves in a new queue's arm record, which only the driver writes and only the adapter
	// reads: zero would be mlx5's request for any entry.
	neverArmed = 0xffffffff
)

// arm reads the arm record. cmdAny is the command bits of a request for any entry.
func (c *cq) arm(cmdAny uint32) bool {
	w := record(c.db, 1)
	if w == neverArmed {
		return false
	}
	sn, ci := w>>28&3, w&armIndex
	if w>>24&3 != cmdAny>>24 && w&armSolicited == 0 {
		return false // not armed yet
	}
	sol := w>>24&3 != cmdAny>>24
	if sn != c.armSN {
		c.spent = false
	}
	if c.spent || c.armed && sn == c.armSN && sol == c.solicited {
		return false
	}
	// A request for any entry is not taken back by one for solicited ones.
	c.solicited = sol && !(c.armed && sn == c.armSN && !c.solicited)
	c.armed, c.armSN = true, sn
	if !c.solicited && c.pi&armIndex != ci || c.solicited && c.anySol && int32((c.solicitPI-ci)<<8) > 0 {
		c.event()
	}
	return true
}

// event raises the completion event.
func (c *cq) event() {
	c.armed, c.spent = false, true
	if c.ch == nil {
		return
	}
	binary.NativeEndian.PutUint64(c.record[:], c.userID)
	if _, err := unix.Write(c.ch.fd, c.record[:]); err != nil {
		c.dev.net.fault("%s: completion event: %v", c.dev.name, err)
		return
	}
	c.events++
}

// entry describes a completion.
type entry struct {
	QPN, RSN  uint32
	Send      bool
	Status    verbs.WCStatus
	Vendor    uint8
	Op        verbs.SendOpcode // what was executed or received
	Counter   uint16           // of the WQE
	ByteLen   uint32
	Imm       uint32
	Solicited bool
	Data      []byte // payload inside the entry
	// What a receive says of the path.
	SrcQP        uint32
	SL, PathBits uint8
	SLID         uint16
	GRH          bool
	RoCE         bool
	Owner        bool // set by put
}

// put appends e.
func (c *cq) put(e *entry) {
	ci := record(c.db, 0)
	if (c.pi-ci)&armIndex >= c.entries {
		if !c.overrun {
			c.overrun = true
			c.dev.asyncEvent(c.userID, verbs.EventCQError)
			c.asyncOut++
		}
		return
	}
	e.Owner = c.pi&c.entries != 0
	c.dev.fam.putCQE(c, e)
	c.pi++
	if e.Solicited || e.Status != verbs.WCSuccess {
		c.solicitPI, c.anySol = c.pi&armIndex, true
	}
	if c.armed && (!c.solicited || e.Solicited || e.Status != verbs.WCSuccess) {
		c.event()
	}
}

// asyncEvent tells about element.
func (d *device) asyncEvent(element uint64, typ verbs.AsyncEventType) {
	var b [16]byte
	binary.NativeEndian.PutUint64(b[:], element)
	binary.NativeEndian.PutUint32(b[8:], uint32(typ))
	if d.async.fd != 0 {
		unix.Write(d.async.fd, b[:])
	}
}

type addressVector struct {
	global bool
	dgid   verbs.GID
	dlid   uint16
}

// qp is an RC queue pair.
type qp struct {
	dev     *device
	handle  uint32
	num     uint32
	rsn     uint32
	userID  uint64
	pd      *pd
	send    *cq
	recv    *cq
	sigAll  bool
	scatter bool // payload may go into completion entries
	uar     uint32

	buf, db            uint64
	sqOff, rqOff       int
	sqCount, rqCount   uint32 // entries (mlx5: 64-byte blocks)
	sqShift, rqShift   int
	sqCI, rqCI         uint32
	sqTarget           uint32 // mlx5: the record's send index when the doorbell was seen
	rung               bool   // mlx4
	asyncOut           uint32
	state              verbs.QPState
	access             verbs.AccessFlags
	av                 addressVector
	destQPN            uint32
	timeout, retry     uint8
	rnrRetry, rnrTimer uint8

	// The request at sqCI waits: for a receive, or for an answer that will not come.
	waiting bool
	tries   uint8
	until   time.Time

	// Room to work in.
	wqe    [1024]byte
	inline []byte
	sges   []verbs.SGE
	rsges  []verbs.SGE
	data   [64]byte
}

// request is a decoded send WQE.
type request struct {
	op        verbs.SendOpcode
	signaled  bool
	solicited bool
	fence     bool
	imm       uint32
	raddr     uint64
	rkey      uint32
	sges      []verbs.SGE
	inline    []byte
	isInline  bool
	compare   uint64
	swap      uint64
	bind      *bindRequest
	counter   uint16
	units     uint32 // of the running index
}

type bindRequest struct {
	oldKey, newKey uint32
	hasOld         bool // the request names the window by its old key (mlx5)
	lkey           uint32
	addr, len      uint64
	access         verbs.AccessFlags
}
