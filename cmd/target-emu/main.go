// Command target-emu is an SRP target in software: it exports RAM disks, null devices and files over RDMA, or over UDP where a machine has no
// RDMA device, and misbehaves on request.
package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"net/netip"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"srp-initiator/completion"
	"srp-initiator/internal/revision"
	"srp-initiator/rdma"
	"srp-initiator/rdma/verbs"
	targetemu "srp-initiator/target-emu"
	"srp-initiator/target-emu/lun"
)

const usage = `target-emu: an SRP target in software

Usage: target-emu [flags], or target-emu --version

It prints one line, the TARGET string that leads to it, and serves until it gets SIGINT, SIGTERM or SIGHUP.
The string is good for srp-initiator and for the kernel's add_target file.

Examples:
  target-emu                                   64 MiB RAM disk over UDP, on a loopback address of its own
  target-emu --lun 0=ram:1g --lun 7=null:4t    two logical units
  target-emu --lun 0=file:/tmp/disk,size=10g   a file, made when it is missing
  target-emu --device rxe0                     on a kernel RDMA device
  target-emu --listen 10.0.0.5                 over UDP port 4791 of 10.0.0.5, for other machines
  target-emu --faults drop.txt                 play a fault script, such as: cmd op=read every=100 : drop

Devices: %s
LUNs:    N=ram:SIZE, N=null:SIZE, N=file:PATH, each with options: ,bs=512|4096 ,ro ,serial=TEXT ,product=TEXT,
         for files also ,size=SIZE. SIZE: bytes, or with k, m, g, t; whole blocks.
Exit:    0 after such a signal, 1 when the device cannot be used or serving failed, 2 for a wrong argument.

Flags:
`

// usageError is a wrong argument: exit code 2.
type usageError struct{ error }

func bad(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

func main() {
	err := run(os.Args[1:], os.Stdout, os.Stderr)
	var ue usageError
	switch {
	case err == nil:
	case errors.As(err, &ue):
		fmt.Fprintf(os.Stderr, "target-emu: %v\n", err)
		os.Exit(2)
	default:
		fmt.Fprintf(os.Stderr, "target-emu: %v\n", err)
		os.Exit(1)
	}
}

// options are the command line.
type options struct {
	device, listen, idExt, iocGUID, faults, mode, pcap string
	port                                               uint16
	luns, acl                                          []string
	seed                                               uint64
	limit, maxIU, maxChannels, maxSessions             int
	formats                                            uint16
	weight, budget                                     int
	single, noImm, simple, powerOn, lockThread         bool
	json, verbose, quiet, version                      bool
	stats                                              time.Duration
}

func flags(o *options) *pflag.FlagSet {
	f := pflag.NewFlagSet("target-emu", pflag.ContinueOnError)
	f.SortFlags = false
	f.StringVar(&o.device, "device", "softroce", "RDMA device")
	f.StringVar(&o.listen, "listen", "", "address or address:port to listen on (default: the device's own)")
	f.Uint16Var(&o.port, "port", targetemu.DefaultPort, "RDMA/CM port")
	f.StringArrayVar(&o.luns, "lun", nil, "logical unit N=SPEC; repeat for more (default 0=ram:64m)")
	f.BoolVar(&o.simple, "simple-luns", false, "report LUN 256 and up without addressing bits, as Linux LIO does")
	f.BoolVar(&o.powerOn, "power-on", false, "report the power-on unit attention to each initiator")
	f.StringVar(&o.idExt, "id-ext", "", "first half of the target port id, hexadecimal (default: made from the device)")
	f.StringVar(&o.iocGUID, "ioc-guid", "", "second half of the target port id")
	f.StringArrayVar(&o.acl, "acl", nil, "admit only this initiator: port id, port GUID, IP address or prefix; repeat for more")
	f.IntVar(&o.limit, "request-limit", targetemu.DefaultRequestLimit, "credits per channel")
	f.IntVar(&o.maxIU, "max-iu", targetemu.DefaultMaxITIULen, "largest initiator to target IU, bytes")
	f.IntVar(&o.maxChannels, "max-channels", targetemu.DefaultMaxChannels, "channels per initiator port")
	f.IntVar(&o.maxSessions, "max-sessions", targetemu.DefaultMaxSessions, "channels in all, of about 5 MiB each")
	f.BoolVar(&o.single, "single-channel", false, "refuse a second channel")
	f.BoolVar(&o.noImm, "no-immediate", false, "do not offer immediate data")
	f.Uint16Var(&o.formats, "formats", 6, "descriptor formats: 2 direct, 4 indirect, 6 both")
	f.StringVar(&o.faults, "faults", "", "fault script `FILE`")
	f.Uint64Var(&o.seed, "seed", 0, "seed of the fault script, in place of its own")
	f.StringVar(&o.mode, "completion", "adaptive", "completion mode: interrupt, thread, poll or adaptive")
	f.IntVar(&o.weight, "poll-weight", 0, "completions per turn (0: the default)")
	f.IntVar(&o.budget, "poll-budget", 0, "completions per wake-up (0: the default)")
	f.BoolVar(&o.lockThread, "lock-thread", false, "give the reaping goroutine of mode thread an OS thread of its own")
	f.StringVar(&o.pcap, "pcap", "", "write what goes over the wire to `FILE` (pcapng; softroce only)")
	f.DurationVar(&o.stats, "stats", 0, "print statistics to standard error at this interval, and at the end")
	f.BoolVar(&o.json, "json", false, "print the first line and the statistics at the end as JSON")
	f.BoolVarP(&o.verbose, "verbose", "v", false, "log logins and ends of channels to standard error")
	f.BoolVarP(&o.quiet, "quiet", "q", false, "log nothing, not even refused logins")
	f.BoolVar(&o.version, "version", false, "show what this program was built from, and do nothing else")
	return f
}

func run(args []string, out, errOut io.Writer) (err error) {
	var o options
	fs := flags(&o)
	fs.SetOutput(io.Discard)
	fs.Usage = func() {}
	switch err := fs.Parse(args); {
	case errors.Is(err, pflag.ErrHelp):
		_, err := fmt.Fprintf(out, usage+"%s", rdma.Names, fs.FlagUsages())
		return err
	case err != nil:
		var value *pflag.InvalidValueError
		if errors.As(err, &value) {
			if f := value.GetFlag(); f.Name == "port" {
				return bad("--port %.40s: want a number from 0 (any that is free) to 65535", value.GetValue())
			} else if f.Name == "formats" {
				return bad("--formats %.40s: want %s", value.GetValue(), wantedFormats)
			}
		}
		return bad("%v (see --help)", err)
	case fs.NArg() > 0:
		return bad("unexpected argument %q: target-emu takes flags only, such as --lun 0=ram:1g (see --help)", fs.Arg(0))
	}
	if o.version {
		if o.json {
			return json.NewEncoder(out).Encode(map[string]string{"name": "target-emu", "revision": revision.Program(), "go": runtime.Version()})
		}
		_, err := fmt.Fprintf(out, "target-emu %s (%s)\n", revision.Program(), runtime.Version())
		return err
	}
	cfg, err := o.config(fs.Changed)
	if err != nil {
		return err
	}
	level := slog.LevelWarn
	if o.verbose {
		level = slog.LevelInfo
	}
	if !o.quiet {
		cfg.Log = slog.New(slog.NewTextHandler(errOut, &slog.HandlerOptions{Level: level}))
	}
	var units []*lun.Unit
	defer func() {
		for _, u := range units {
			err = errors.Join(err, u.Close())
		}
	}()
	if units, err = o.units(cfg.Units); err != nil {
		return err
	}
	// From here on a signal means a clean end.
	ends := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // nohup(1) wants it ignored
		ends = append(ends, syscall.SIGHUP)
	}
	ctx, stop := signal.NotifyContext(context.Background(), ends...)
	defer stop()

	fabric, closeCapture, err := o.open(cfg, errOut)
	if err != nil {
		return err
	}
	defer func() {
		closed, captured := fabric.Close(), closeCapture()
		if captured != nil && errors.Is(closed, captured) { // the device was told by Write
			captured = nil
		}
		err = errors.Join(err, closed, captured)
	}()
	if a := cfg.Listen.Addr(); a.IsValid() && a.Unmap().IsUnspecified() && fabric.Context().Provider() == "softroce" { // which --device auto may have found
		return badListen(a)
	}
	if !cfg.Listen.Addr().IsValid() {
		addr, err := deviceAddr(fabric.Context())
		if err != nil {
			return err
		}
		cfg.Listen = netip.AddrPortFrom(addr, cfg.Listen.Port())
	}
	t, err := targetemu.New(fabric.Context(), fabric.Connector(), *cfg)
	if err != nil {
		return err
	}
	at := t.Addr()
	if at.Addr().IsUnspecified() {
		if addr, err := deviceAddr(fabric.Context()); err == nil {
			at = netip.AddrPortFrom(addr, at.Port())
		}
	}
	if o.json {
		first := struct {
			Target   string   `json:"target"`
			Address  string   `json:"address"`
			PortID   string   `json:"port_id"`
			Device   string   `json:"device"`
			Provider string   `json:"provider"`
			LUNs     []uint32 `json:"luns"`
		}{t.LoginString(at), at.String(), t.PortID().String(), fabric.Context().Name(), fabric.Context().Provider(), cfg.Units.Numbers()}
		if err := json.NewEncoder(out).Encode(first); err != nil {
			return err
		}
	} else if _, err := fmt.Fprintln(out, t.LoginString(at)); err != nil {
		return err
	}
	ticks := make(chan struct{})
	if o.stats > 0 {
		go func() {
			defer close(ticks)
			every := time.NewTicker(o.stats)
			defer every.Stop()
			for {
				select {
				case <-ctx.Done():
					return
				case <-every.C:
					writeStats(errOut, statistics{t.Stats(), fabric.Counters()}, o.json)
				}
			}
		}()
	} else {
		close(ticks)
	}
	last := statistics{}
	err = t.Serve(ctx, targetemu.OnEnd(func(s targetemu.Stats) { last.Stats = s }))
	stop()
	<-ticks
	last.Device = fabric.Counters()
	if o.json {
		return errors.Join(err, json.NewEncoder(out).Encode(last))
	}
	switch {
	case o.stats > 0:
		writeStats(errOut, last, false)
	case !o.quiet:
		writeFaults(errOut, last.Faults)
	}
	return err
}

// statistics are the target's counters and its device's.
type statistics struct {
	targetemu.Stats
	Device map[string]uint64 `json:"device"`
}

// writeStats prints counters in lines, or as one line of JSON.
func writeStats(w io.Writer, s statistics, asJSON bool) {
	if asJSON {
		_ = json.NewEncoder(w).Encode(s)
		return
	}
	fmt.Fprintf(w, "logins %d, rejected %d, ended %d", s.Logins, s.Rejected, s.Ended)
	if s.Evicted > 0 {
		fmt.Fprintf(w, ", given up for newer ones %d", s.Evicted)
	}
	fmt.Fprintln(w)
	for i, c := range append(slices.Clone(s.Past), s.Channels...) {
		state := ""
		if i < len(s.Past) {
			state = "ended: "
		}
		if c.Asked > c.Granted {
			state += fmt.Sprintf("(%d channels asked for, %d granted) ", c.Asked, c.Granted)
		}
		fmt.Fprintf(w, "  "+state+"%s channel %d from %s: %d commands (%d reads, %d writes), %d MiB in, %d MiB out, %d check conditions, %d aborted, most at once %d, %.1f requests per doorbell\n",
			c.Initiator, c.Channel, c.Address, c.Commands, c.Reads, c.Writes, c.BytesIn>>20, c.BytesOut>>20, c.CheckCondition, c.Aborted, c.MaxOutstanding,
			float64(c.WorkRequests)/float64(max(c.Doorbells, 1)))
	}
	writeFaults(w, s.Faults)
	fmt.Fprint(w, "  device:")
	for _, name := range slices.Sorted(maps.Keys(s.Device)) {
		if s.Device[name] > 0 {
			fmt.Fprintf(w, " %s %d", name, s.Device[name])
		}
	}
	fmt.Fprintln(w)
}

// writeFaults prints how often each rule of the fault script had its turn.
func writeFaults(w io.Writer, rules []targetemu.RuleStats) {
	for _, r := range rules {
		fmt.Fprintf(w, "  fault script, line %d: matched %d, acted %d: %s\n", r.Line, r.Matched, r.Acted, r.Rule)
	}
}

const wantedFormats = "2 (direct), 4 (indirect) or 6 (both)"

// config checks the command line.
func (o *options) config(given func(flag string) bool) (*targetemu.Config, error) {
	// In a Config 0 means the default; whoever writes it here means none, which no target can do.
	for _, l := range []struct {
		flag        string
		val, lo, hi int
		want        string
	}{
		{"request-limit", o.limit, 2, targetemu.MaxRequestLimit, fmt.Sprintf("2 to %d; an initiator keeps one for task management", targetemu.MaxRequestLimit)},
		{"max-iu", o.maxIU, targetemu.MinITIULen, targetemu.MaxITIULen, fmt.Sprintf("%d to %d bytes", targetemu.MinITIULen, targetemu.MaxITIULen)},
		{"max-channels", o.maxChannels, 1, math.MaxInt, "a number from 1 up"},
		{"max-sessions", o.maxSessions, 1, math.MaxInt, "a number from 1 up"},
	} {
		if l.val < l.lo || l.val > l.hi {
			return nil, bad("--%s %d: want %s", l.flag, l.val, l.want)
		}
	}
	if o.formats == 0 || o.formats&^6 != 0 {
		return nil, bad("--formats %d: want %s", o.formats, wantedFormats)
	}
	c := &targetemu.Config{
		ACL: o.acl, Units: &lun.Map{Simple: o.simple}, RequestLimit: o.limit, MaxITIULen: o.maxIU, MaxChannels: o.maxChannels, MaxSessions: o.maxSessions,
		SingleChannel: o.single, NoImmediate: o.noImm, AnyPort: true,
	}
	c.SetFormats(o.formats)
	switch {
	case given("stats") && o.stats <= 0:
		return nil, bad("--stats %s: want a time above 0, such as 5s", o.stats)
	case given("seed") && o.faults == "":
		return nil, bad("--seed goes with --faults, which it is the seed of")
	case given("faults") && o.faults == "":
		return nil, bad("--faults is empty; want a file")
	case given("pcap") && o.pcap == "":
		return nil, bad("--pcap is empty; want a file")
	case o.pcap == "-":
		return nil, bad("--pcap -: standard output has the target string; want the name of a file")
	case o.verbose && o.quiet:
		return nil, bad("--verbose and --quiet exclude each other: want one of them")
	}
	mode, err := completion.ParseMode(o.mode)
	if err != nil || mode == completion.Direct {
		return nil, bad("--completion %s: want interrupt, thread, poll or adaptive", o.mode)
	}
	c.Completion = completion.Config{Mode: mode, Weight: o.weight, Budget: o.budget, LockThread: o.lockThread}
	if o.lockThread && mode != completion.Thread {
		return nil, bad("--lock-thread goes with --completion thread, not with %s", o.mode)
	}
	for name, v := range map[string]int{"poll-weight": o.weight, "poll-budget": o.budget} {
		if v < 0 {
			return nil, bad("--%s %d: want 0 (the default) or a number from 1 up", name, v)
		}
	}
	if mode == completion.Poll && o.budget > 0 { // else the common poller, which has a budget of its own
		if c.Completion.Poller, err = completion.NewPoller(completion.PollerConfig{Budget: o.budget}); err != nil {
			return nil, usageError{err}
		}
	}
	for _, h := range []struct {
		flag, val string
		to        *uint64
	}{{"id-ext", o.idExt, &c.IDExt}, {"ioc-guid", o.iocGUID, &c.IOCGUID}} {
		if h.val == "" {
			continue
		}
		if *h.to, err = strconv.ParseUint(strings.TrimPrefix(h.val, "0x"), 16, 64); err != nil || *h.to == 0 {
			return nil, bad("--%s %s: want up to 16 hexadecimal digits, not all zero", h.flag, h.val)
		}
	}
	if _, err := targetemu.ParseACL(o.acl); err != nil {
		return nil, bad("--acl: %w", err)
	}
	if text := o.listen; text != "" {
		if ap, err := netip.ParseAddrPort(o.listen); err == nil {
			text, o.port = ap.Addr().String(), ap.Port()
		}
		a, err := netip.ParseAddr(strings.Trim(text, "[]"))
		if err != nil {
			return nil, bad("--listen %.80s: want an IP address, with or without a port, such as 10.0.0.5, 10.0.0.5:5555 or [fd00::1]:5555", o.listen)
		}
		if a.Is6() && a.IsLinkLocalUnicast() && a.Zone() == "" {
			return nil, bad("--listen %s: a link-local address wants its interface too: %[1]s%%INTERFACE", a)
		}
		if dev, _, _ := strings.Cut(o.device, ":"); dev == "softroce" && a.Unmap().IsUnspecified() {
			return nil, badListen(a)
		}
		c.Listen = netip.AddrPortFrom(a, o.port)
	} else {
		c.Listen = netip.AddrPortFrom(netip.Addr{}, o.port)
	}
	if o.faults != "" {
		text, err := os.ReadFile(o.faults)
		if err != nil {
			return nil, bad("--faults: want a file that can be read: %w", err)
		}
		if c.Faults, err = targetemu.ParseFaults(string(text)); err != nil {
			return nil, bad("%s: %w", o.faults, err)
		}
		if given("seed") {
			c.Faults.Seed = o.seed
		}
	}
	if err := c.Check(); err != nil {
		return nil, usageError{err}
	}
	return c, nil
}

// badListen refuses the unspecified address: softroce would serve one address of its choice.
func badListen(a netip.Addr) error {
	return bad("--listen %s is no single address, and device softroce serves one: want an address of this machine, or no --listen for a loopback address of its own; a kernel device (--device rxe0) serves all of its addresses", a)
}

// units opens the LUNs.
func (o *options) units(m *lun.Map) (units []*lun.Unit, err error) {
	specs := o.luns
	if len(specs) == 0 {
		specs = []string{"0=ram:64m"}
	}
	for _, s := range specs {
		num, text, ok := strings.Cut(s, "=")
		n, err := strconv.ParseUint(num, 10, 32)
		if !ok || err != nil {
			return units, bad("--lun %s: want N=ram:SIZE, N=null:SIZE or N=file:PATH with a number N from 0 to %d", s, uint32(math.MaxUint32))
		}
		sp, err := lun.ParseSpec(text)
		if err != nil {
			return units, bad("--lun %s: %w", num, err)
		}
		st, err := lun.OpenStore(sp)
		if err != nil {
			return units, bad("--lun %s: %w", s, err)
		}
		serial := sp.Serial
		if serial == "" {
			serial = fmt.Sprintf("EMU%05d", n)
		}
		u, err := lun.New(st, lun.Config{BlockSize: sp.BlockSize, Serial: serial, Product: sp.Product, PowerOn: o.powerOn})
		if err != nil {
			return units, errors.Join(err, st.Close())
		}
		units = append(units, u)
		if err := m.Add(uint32(n), u); err != nil {
			return units, bad("--lun %s: %w", s, err)
		}
	}
	return units, nil
}

// open opens the device, with a capture when asked for.
func (o *options) open(c *targetemu.Config, errOut io.Writer) (*rdma.Fabric, func() error, error) {
	nothing := func() error { return nil }
	name := o.device
	if a := c.Listen.Addr(); name == "softroce" && a.IsValid() && !a.IsUnspecified() {
		name = "softroce:" + a.String()
	}
	var opts []rdma.Option
	closer := nothing
	opened := func() {}
	if o.pcap != "" {
		f, err := os.Create(o.pcap)
		if err != nil {
			return nil, nothing, bad("--pcap: want a file that can be written: %w", err)
		}
		w := &captureFile{f: f, w: bufio.NewWriterSize(f, 1<<20), errOut: errOut}
		opts = append(opts, rdma.WithCapture(w))
		opened = w.flush
		closer = w.close
	}
	f, err := rdma.Open(name, opts...)
	if err != nil {
		_ = closer()
		var ne *rdma.NameError
		if errors.As(err, &ne) {
			return nil, nothing, usageError{err}
		}
		if addr, port, ok := unbracketed(o.listen); ok && errors.Is(err, syscall.EADDRNOTAVAIL) {
			return nil, nothing, bad("--listen %s: no interface has this address; for port %s of %s want [%[3]s]:%[2]s", o.listen, port, addr)
		}
		return nil, nothing, err
	}
	opened()
	return f, closer, nil
}

// unbracketed splits what may have been meant as an IPv6 address and a port.
func unbracketed(listen string) (addr, port string, ok bool) {
	i := strings.LastIndexByte(listen, ':')
	if i < 0 || strings.Contains(listen, "[") {
		return "", "", false
	}
	addr, port = listen[:i], listen[i+1:]
	a, err := netip.ParseAddr(addr)
	_, err2 := strconv.ParseUint(port, 10, 16)
	return addr, port, err == nil && err2 == nil && a.Is6()
}

// captureFile is the file of --pcap. The first write that fails is told at once: what goes over the wire from then on is lost.
type captureFile struct {
	mu     sync.Mutex
	f      *os.File
	w      *bufio.Writer
	errOut io.Writer
	told   bool
}

func (c *captureFile) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, err := c.w.Write(b)
	c.tell(err)
	return n, err
}

func (c *captureFile) tell(err error) {
	if err != nil && !c.told {
		c.told = true
		fmt.Fprintf(c.errOut, "target-emu: --pcap: the capture ends here: %v\n", err)
	}
}

// flush finds a file that takes nothing before anybody relies on it.
func (c *captureFile) flush() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tell(c.w.Flush())
}

func (c *captureFile) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return cmp.Or(c.w.Flush(), c.f.Close())
}

// deviceAddr is an address of the device: an IPv4 one of its GID table where there is one.
func deviceAddr(ctx verbs.Context) (netip.Addr, error) {
	pa, err := ctx.QueryPort(1)
	if err != nil {
		return netip.Addr{}, err
	}
	var found netip.Addr
	for i := range pa.GIDTableLen {
		g, err := ctx.QueryGID(1, i)
		if err != nil || g.GID.IsZero() || g.Type == verbs.GIDTypeRoCEv1 {
			continue
		}
		switch a := g.GID.Addr(); {
		case a.Is4():
			return a, nil
		case !found.IsValid() || found.IsLinkLocalUnicast():
			found = a
		}
	}
	if !found.IsValid() || found.IsLinkLocalUnicast() {
		return netip.Addr{}, bad("%s has no IP address that others can use; say --listen ADDRESS", ctx.Name())
	}
	return found, nil
}
