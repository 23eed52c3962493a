// Command limit measures what the machine allows: it moves the same packets as an SRP read over RoCE v2 does, with the
// same sizes, ICRCs and copies, between two processes over UDP loopback, and knows nothing else of either
// protocol. What the real stack reaches is told as a part of this.
//
//	go run ./bench/limit --bs 4096 --qd 32 --wait yield --time 2s
//
// One I/O is a request (SRP_CMD in a SEND, 80 bytes), the data in RDMA WRITE packets of path MTU 4096 (12 bytes of BTH, 16 of
// RETH in the first, 4 of ICRC), and a response (SRP_RSP in a SEND, 52 bytes). Each side acknowledges once per batch that it took from its
// socket. Equal packets are grouped with UDP_SEGMENT, and received with UDP_GRO.
//
// The data come from 256 MiB of memory, as in the programs that this one is compared with, and from where their workloads
// find them: I/Os of up to 4 KiB at a random place each, which is far from any cache, larger ones one behind the other.
package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"srp-initiator/rdma/hostmem"
)

const (
	mtu     = 4096
	reqLen  = 80
	rspLen  = 52
	ackLen  = 20
	window  = 128 // packets of data that may be unacknowledged
	bth     = 12
	reth    = 16
	icrcLen = 4

	diskSize = 256 << 20
)

// Packet kinds, in byte 0; bytes 4 to 7 hold the I/O's slot, 8 to 11 the count of an acknowledgement.
const (
	kindReq = iota + 1
	kindFirst
	kindMiddle
	kindRsp
	kindAck
)

func fatal(format string, a ...any) {
	fmt.Fprintf(os.Stderr, "limit: "+format+"\n", a...)
	os.Exit(1)
}

func main() {
	bs := pflag.Int("bs", 4096, "bytes per I/O, a multiple of 4096 up to 4 MiB, or less than 4096")
	qd := pflag.Int("qd", 1, "I/Os in flight, 1 to 1024")
	wait := pflag.String("wait", "yield", "how both sides wait: yield (poll, giving the CPU up each time) or block")
	span := pflag.Duration("time", 2*time.Second, "how long to measure")
	serve := pflag.String("serve", "", "be the target that talks to this address (used by the program itself)")
	pflag.Parse()
	if *bs < 1 || *bs > 4<<20 || *bs > mtu && *bs%mtu != 0 || *qd < 1 || *qd > 1024 || *wait != "yield" && *wait != "block" {
		fmt.Fprintln(os.Stderr, "limit: --bs is 1 to 4095 or a multiple of 4096 up to 4194304, --qd 1 to 1024, --wait yield or block")
		os.Exit(2)
	}
	runtime.LockOSThread()
	if *serve != "" {
		runServer(*serve, *bs, *wait)
		return
	}
	runClient(*bs, *qd, *wait, *span)
}

// open makes a plain socket: the runtime's poller must not own it, because both loops read it directly.
func open() (fd int, addr string) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	}
	if err != nil {
		fatal("socket: %v", err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		fatal("getsockname: %v", err)
	}
	return fd, fmt.Sprintf("127.0.0.1:%d", sa.(*unix.SockaddrInet4).Port)
}

func connect(fd int, addr string) {
	a, err := net.ResolveUDPAddr("udp4", addr)
	if err != nil {
		fatal("%v", err)
	}
	if err := unix.Connect(fd, &unix.SockaddrInet4{Port: a.Port, Addr: [4]byte(a.IP.To4())}); err != nil {
		fatal("connect: %v", err)
	}
}

// seal puts the ICRC of a packet at its end; check recomputes it.
func seal(p []byte) {
	n := len(p) - icrcLen
	binary.LittleEndian.PutUint32(p[n:], crc32.ChecksumIEEE(p[:n]))
}

func check(p []byte) {
	n := len(p) - icrcLen
	if n < bth || binary.LittleEndian.Uint32(p[n:]) != crc32.ChecksumIEEE(p[:n]) {
		fatal("a packet of %d bytes was corrupted", len(p))
	}
}

// packer builds trains of equal packets in one buffer.
type packer struct {
	buf    []byte
	trains []train
	used   int
	open   int // start of the open train, -1: none
	seg    int
	count  int
}

func (p *packer) reset() { p.trains, p.used, p.open = p.trains[:0], 0, -1 }

// add makes room for a packet of n bytes at the end of the current train, or of a new one.
func (p *packer) add(n int) []byte {
	if p.open < 0 || p.seg != n || p.count == maxSegments || p.used+n-p.open > maxTrain {
		p.finish()
		p.open, p.seg, p.count = p.used, n, 0
	}
	b := p.buf[p.used : p.used+n]
	p.used += n
	p.count++
	return b
}

func (p *packer) finish() {
	if p.open >= 0 {
		p.trains = append(p.trains, train{p.buf[p.open:p.used], p.seg})
	}
	p.open = -1
}

type result struct {
	BS        int     `json:"bs"`
	QD        int     `json:"qd"`
	Wait      string  `json:"wait"`
	IOPS      float64 `json:"iops"`
	MBs       float64 `json:"mb_per_s"`
	CPUPerIO  float64 `json:"cpu_us_per_io"` // both processes
	Completed int     `json:"completed"`
}

func runClient(bs, qd int, wait string, span time.Duration) {
	fd, local := open()
	s, err := newSocket(fd)
	if err != nil {
		fatal("%v", err)
	}
	self, err := os.Executable()
	if err != nil {
		fatal("%v", err)
	}
	cmd := exec.Command(self, "--serve", local, "--bs", fmt.Sprint(bs), "--wait", wait)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		fatal("%v", err)
	}
	if err := cmd.Start(); err != nil {
		fatal("%v", err)
	}
	// The target says where it is when it is ready, and what it took to get there, which does not count.
	var addr string
	var ready time.Duration
	if _, err := fmt.Fscan(out, &addr, &ready); err != nil {
		fatal("the target said nothing: %v", err)
	}
	connect(fd, addr)
	data := make([]byte, qd*bs)
	got := make([]int, qd)
	free := make([]uint32, 0, qd)
	for i := range qd {
		free = append(free, uint32(i))
	}
	p := packer{buf: make([]byte, 1<<20)}
	var packets uint32
	var done int
	var before syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_THREAD, &before)
	begin := time.Now()
	now := begin
	dirty := false
	handle := func(b []byte) {
		check(b)
		slot := binary.BigEndian.Uint32(b[4:])
		switch b[0] {
		case kindFirst, kindMiddle:
			h := bth
			if b[0] == kindFirst {
				h += reth
			}
			pl := b[h : len(b)-icrcLen]
			copy(data[int(slot)*bs+got[slot]:], pl)
			got[slot] += len(pl)
			packets++
			dirty = true
		case kindRsp:
			if got[slot] != bs {
				fatal("response after %d of %d bytes: packets were lost", got[slot], bs)
			}
			got[slot] = 0
			done++
			free = append(free, slot)
			packets++
			dirty = true
		case kindAck:
		}
	}
	end := begin.Add(span)
	idle := time.Now()
	for now.Before(end) || len(free) < qd {
		p.reset()
		if now.Before(end) {
			for _, slot := range free {
				b := p.add(reqLen)
				b[0] = kindReq
				binary.BigEndian.PutUint32(b[4:], slot)
				seal(b)
			}
			free = free[:0]
		}
		if dirty {
			b := p.add(ackLen)
			b[0] = kindAck
			binary.BigEndian.PutUint32(b[8:], packets)
			seal(b)
			dirty = false
		}
		p.finish()
		s.send(p.trains)
		for !s.receive(handle) {
			now = time.Now()
			if now.Sub(idle) > 5*time.Second {
				fatal("no answer for five seconds: packets were lost")
			}
			if wait == "block" {
				s.readable()
			} else {
				schedYield()
			}
		}
		now = time.Now()
		idle = now
	}
	took := time.Since(begin)
	var after syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_THREAD, &after)
	b := make([]byte, ackLen)
	binary.BigEndian.PutUint32(b[4:], 0)
	seal(b) // kind 0: the end
	s.send([]train{{b, ackLen}})
	if err := cmd.Wait(); err != nil {
		fatal("the target: %v", err)
	}
	cpu := tv(after.Utime) + tv(after.Stime) - tv(before.Utime) - tv(before.Stime) + cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime() - ready
	json.NewEncoder(os.Stdout).Encode(result{BS: bs, QD: qd, Wait: wait, Completed: done,
		IOPS: float64(done) / took.Seconds(), MBs: float64(done) * float64(bs) / took.Seconds() / 1e6,
		CPUPerIO: float64(cpu.Microseconds()) / float64(done)})
}

func tv(t syscall.Timeval) time.Duration { return time.Duration(t.Nano()) }

func runServer(peer string, bs int, wait string) {
	fd, local := open()
	s, err := newSocket(fd)
	if err != nil {
		fatal("%v", err)
	}
	connect(fd, peer)
	mem, err := hostmem.Alloc(diskSize)
	if err != nil {
		fatal("%v", err)
	}
	disk := mem.Bytes()
	for i := range mtu {
		disk[i] = byte(i * 7)
	}
	for i := mtu; i < len(disk); i += mtu {
		copy(disk[i:], disk[:mtu])
	}
	at := 0
	rng := rand.New(rand.NewPCG(1, 2))
	type job struct {
		slot uint32
		sent int
	}
	var queue []job
	var sent, acked uint32
	var dirty, over bool
	handle := func(b []byte) {
		check(b)
		switch b[0] {
		case kindReq:
			queue = append(queue, job{slot: binary.BigEndian.Uint32(b[4:])})
			dirty = true
		case kindAck:
			acked = binary.BigEndian.Uint32(b[8:])
		default:
			over = true
		}
	}
	p := packer{buf: make([]byte, 4<<20)}
	var used syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &used)
	fmt.Println(local, int64(tv(used.Utime)+tv(used.Stime)))
	var finished []uint32
	for !over {
		for !s.receive(handle) && !over {
			if wait == "block" {
				s.readable()
			} else {
				schedYield()
			}
		}
		for {
			p.reset()
			finished = finished[:0]
			// All data of the batch first, then all responses: the order of the packets is the fence.
			for len(queue) > 0 && sent-acked < window {
				j := &queue[0]
				for j.sent < bs && sent-acked < window {
					n := min(mtu, bs-j.sent)
					h, kind := bth, byte(kindMiddle)
					if j.sent == 0 {
						h, kind = bth+reth, kindFirst
					}
					b := p.add(h + n + icrcLen)
					b[0] = kind
					binary.BigEndian.PutUint32(b[4:], j.slot)
					if bs <= mtu {
						at = rng.IntN(len(disk)/bs) * bs
					}
					copy(b[h:], disk[at:at+n])
					seal(b)
					if at += n; at+mtu > len(disk) {
						at = 0
					}
					j.sent += n
					sent++
				}
				if j.sent < bs {
					break
				}
				finished = append(finished, j.slot)
				queue = queue[:copy(queue, queue[1:])]
			}
			for _, slot := range finished {
				b := p.add(rspLen)
				b[0] = kindRsp
				binary.BigEndian.PutUint32(b[4:], slot)
				seal(b)
				sent++
			}
			if dirty {
				b := p.add(ackLen)
				b[0] = kindAck
				seal(b)
				dirty = false
			}
			p.finish()
			if len(p.trains) == 0 {
				break
			}
			s.send(p.trains)
		}
	}
}
