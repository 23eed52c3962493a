package simnet

import (
	"net/netip"
	"os"
	"sync"
	"time"
)

// connQueue bounds what a Conn holds unread, as a socket's receive buffer does.
const connQueue = 4096

// Conn is a port with a receive queue, for nodes that have goroutines. Its methods may be called from several.
type Conn struct {
	port    *Port
	mu      sync.Mutex
	queue   []datagram
	ready   chan struct{} // 1 buffered: something was queued, or Close, or Wake
	closed  bool
	Dropped uint64 // datagrams that found the queue full
}

// Listen opens a Conn. An address that is taken is an error (EADDRINUSE's role).
func (n *Net) Listen(addr netip.AddrPort) (*Conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ports[addr] != nil {
		return nil, os.ErrExist
	}
	c := &Conn{ready: make(chan struct{}, 1)}
	c.port = &Port{net: n, addr: addr, handle: c.arrive}
	n.ports[addr] = c.port
	return c, nil
}

func (c *Conn) arrive(from netip.AddrPort, b []byte) {
	c.mu.Lock()
	if len(c.queue) >= connQueue || c.closed {
		c.Dropped++
		c.mu.Unlock()
		return
	}
	c.queue = append(c.queue, datagram{from: from, b: append([]byte(nil), b...)})
	c.mu.Unlock()
	c.Wake()
}

// Addr is the bound address.
func (c *Conn) Addr() netip.AddrPort { return c.port.addr }

// Send sends one datagram; b is copied.
func (c *Conn) Send(to netip.AddrPort, b []byte) { c.port.Send(to, b) }

// Receive takes the oldest datagram into b without blocking; ok is false when there is none. What does not fit in b is cut off.
func (c *Conn) Receive(b []byte) (n int, from netip.AddrPort, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.queue) == 0 {
		return 0, netip.AddrPort{}, false
	}
	d := c.queue[0]
	c.queue[0] = datagram{}
	if c.queue = c.queue[1:]; len(c.queue) == 0 {
		c.queue = nil
	}
	return copy(b, d.b), d.from, true
}

// Wait parks the caller until there is something to receive, until Wake, or until timeout (negative: for ever). It returns os.ErrClosed after Close and
// os.ErrDeadlineExceeded after the timeout. A wake-up may be spurious.
func (c *Conn) Wait(timeout time.Duration) error {
	c.mu.Lock()
	some, closed := len(c.queue) > 0, c.closed
	c.mu.Unlock()
	switch {
	case closed:
		return os.ErrClosed
	case some:
		return nil
	}
	var expired <-chan time.Time
	if timeout >= 0 {
		t := time.NewTimer(timeout)
		defer t.Stop()
		expired = t.C
	}
	select {
	case <-c.ready:
	case <-expired:
		return os.ErrDeadlineExceeded
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return os.ErrClosed
	}
	return nil
}

// Wake ends the current or the next Wait.
func (c *Conn) Wake() {
	select {
	case c.ready <- struct{}{}:
	default:
	}
}

// Close takes the port off the network.
func (c *Conn) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.port.net.Attach(c.port.addr, nil)
	c.Wake()
	return nil
}
