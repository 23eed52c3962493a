package srp

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"srp-initiator/completion"
)

// Off disables a timer of LoginOptions.
const Off time.Duration = -1

// LoginOptions are the parameters of a login and of the session that it makes. The zero value is not
// usable: start from DefaultLoginOptions.
type LoginOptions struct {
	InitiatorExt   uint64 // first half of the initiator port identifier
	MaxSectors     int    // 512-byte sectors per command
	QueueSize      int    // commands outstanding per channel
	MaxCmdPerLUN   int    // commands outstanding per logical unit, 0: no limit of its own
	TargetCanQueue int    // commands outstanding per target, 0: no limit of its own
	CmdSGEntries   int    // descriptors inside a command
	AllowExtSG     bool   // descriptors beyond those may stay in a table that the target fetches
	SGTableSize    int    // descriptors in all; 0: as CmdSGEntries, which is also the limit without AllowExtSG
	CompVector     int    // completion vector of the first channel
	TLRetryCount   int    // transport retries of the queue pair
	MaxITIUSize    int    // cap of the information units we send, 0: none
	ChannelCount   int

	ImmediateData    bool // small writes travel inside the command, if the target can
	MaxImmediateData int  // bytes
	RegisterAlways   bool // a key of its own for each command's data, revoked after the response

	// The transport's timers, as the kernel's srp_remote_ports have them. Off disables one.
	ReconnectDelay time.Duration // between attempts
	FastIOFail     time.Duration // after it, commands fail instead of waiting for the connection
	DevLoss        time.Duration // after it, the session is given up

	ConnectTimeout  time.Duration // of one channel's login
	CommandTimeout  time.Duration // before a command is aborted, unless it says otherwise
	TaskMgmtTimeout time.Duration // for the answer to an abort or reset

	// Completion says who reaps the completion queues; Vector is set per channel.
	Completion completion.Config
}

// DefaultLoginOptions are ib_srp's defaults, except: one channel (the kernel counts processors and vectors), a first reconnect
// after one second rather than ten, and keys that are not made anew for each command.
func DefaultLoginOptions() LoginOptions {
	return LoginOptions{
		MaxSectors: 1024, QueueSize: 62, CmdSGEntries: 12, TLRetryCount: 7, ChannelCount: 1,
		ImmediateData: true, MaxImmediateData: 8192,
		ReconnectDelay: time.Second, FastIOFail: 15 * time.Second, DevLoss: 600 * time.Second,
		ConnectTimeout: 10 * time.Second, CommandTimeout: 30 * time.Second, TaskMgmtTimeout: 5 * time.Second,
	}
}

// Limits of the options.
const (
	MaxQueueSize    = 4096
	MaxChannels     = 256
	maxSGTableSize  = 2048 // SG_MAX_SEGMENTS of the kernel
	maxCmdSGEntries = 255  // the counts in a command are bytes
	maxSectorsLimit = 1 << 21

	// maxBounce bounds the bounce memory of all channels, which is there, and registered, from the login on.
	maxBounce = 1 << 30

	// Of every timer.
	LeastTimeout = 100 * time.Millisecond
	MostTimeout  = 1e7 * time.Second
)

// LoginKey describes one key of a target description.
type LoginKey struct {
	Name    string
	Values  string // what is allowed, in words
	Default string // "" for a key that must be given or has no value by default
	Help    string

	set func(*TargetPort, *LoginOptions, string) error
	get func(*TargetPort, *LoginOptions) string // "" when the key need not be written
}

// LoginKeys are all keys, in the order in which they are printed. Those up to ch_count are the kernel's add_target keys,
// the rest its module parameters and transport timers and our own.
func LoginKeys() []LoginKey { return append([]LoginKey(nil), loginKeys...) }

func findKey(name string) *LoginKey {
	for i := range loginKeys {
		if loginKeys[i].Name == name {
			return &loginKeys[i]
		}
	}
	return nil
}

func keyNames() (names []string) {
	for _, k := range loginKeys {
		names = append(names, k.Name)
	}
	return names
}

func eachKey(t TargetPort, o LoginOptions, f func(*LoginKey, string)) {
	for i := range loginKeys {
		if v := loginKeys[i].get(&t, &o); v != "" {
			f(&loginKeys[i], v)
		}
	}
}

var defaults = DefaultLoginOptions()

func hexKey(name, help string, bits int, field func(*TargetPort, *LoginOptions) *uint64, always bool) LoginKey {
	return LoginKey{Name: name, Values: fmt.Sprintf("1 to %d hexadecimal digits", bits/4), Help: help,
		set: func(t *TargetPort, o *LoginOptions, s string) (err error) {
			*field(t, o), err = parseHex(s, bits)
			return err
		},
		get: func(t *TargetPort, o *LoginOptions) string {
			if v := *field(t, o); v != 0 || always {
				return fmt.Sprintf("%0*x", bits/4, v)
			}
			return ""
		}}
}

func intKey(name, help string, min, max int, field func(*LoginOptions) *int) LoginKey {
	d := *field(&defaults)
	k := LoginKey{Name: name, Values: fmt.Sprintf("%d to %d", min, max), Help: help,
		set: func(_ *TargetPort, o *LoginOptions, s string) error {
			v, err := strconv.Atoi(s)
			if err != nil || strings.HasPrefix(s, "+") {
				return fmt.Errorf("not a decimal number in range")
			}
			if v < min || v > max {
				return fmt.Errorf("out of range")
			}
			*field(o) = v
			return nil
		},
		get: func(_ *TargetPort, o *LoginOptions) string {
			if v := *field(o); v != d {
				return strconv.Itoa(v)
			}
			return ""
		}}
	if d != 0 {
		k.Default = strconv.Itoa(d)
	}
	return k
}

func boolKey(name, help string, field func(*LoginOptions) *bool) LoginKey {
	text := func(v bool) string {
		if v {
			return "1"
		}
		return "0"
	}
	d := *field(&defaults)
	return LoginKey{Name: name, Values: "0 or 1", Default: text(d), Help: help,
		set: func(_ *TargetPort, o *LoginOptions, s string) error {
			switch s {
			case "1", "y", "Y":
				*field(o) = true
			case "0", "n", "N":
				*field(o) = false
			default:
				return fmt.Errorf("neither")
			}
			return nil
		},
		get: func(_ *TargetPort, o *LoginOptions) string {
			if v := *field(o); v != d {
				return text(v)
			}
			return ""
		}}
}

func secondsKey(name, help string, canBeOff bool, field func(*LoginOptions) *time.Duration) LoginKey {
	d := *field(&defaults)
	values := "seconds, 1 or more (fractions allowed down to 0.1)"
	if canBeOff {
		values += `, or "off"`
	}
	text := func(v time.Duration) string {
		if v < 0 {
			return "off"
		}
		return strconv.FormatFloat(v.Seconds(), 'f', -1, 64)
	}
	return LoginKey{Name: name, Values: values, Default: text(d), Help: help,
		set: func(_ *TargetPort, o *LoginOptions, s string) error {
			if canBeOff && (s == "off" || s == "-1") {
				*field(o) = Off
				return nil
			}
			v, err := strconv.ParseFloat(s, 64)
			if err != nil || strings.Trim(s, "0123456789.") != "" || v < LeastTimeout.Seconds() || v > MostTimeout.Seconds() {
				return fmt.Errorf("out of range")
			}
			*field(o) = time.Duration(v * float64(time.Second)).Round(time.Millisecond)
			return nil
		},
		get: func(_ *TargetPort, o *LoginOptions) string {
			if v := *field(o); v != d {
				return text(v)
			}
			return ""
		}}
}

var loginKeys = []LoginKey{
	hexKey("id_ext", "first half of the target port identifier", 64, func(t *TargetPort, _ *LoginOptions) *uint64 { return &t.IDExt }, true),
	hexKey("ioc_guid", "second half of the target port identifier", 64, func(t *TargetPort, _ *LoginOptions) *uint64 { return &t.IOCGUID }, true),
	{Name: "dgid", Values: "32 hexadecimal digits", Help: "InfiniBand: GID of the target port",
		set: func(t *TargetPort, _ *LoginOptions, s string) (err error) { t.DGID, err = parseGID(s); return err },
		get: func(t *TargetPort, _ *LoginOptions) string {
			if !t.IsIB() {
				return ""
			}
			return fmt.Sprintf("%x", t.DGID[:])
		}},
	{Name: "pkey", Values: "1 to 4 hexadecimal digits", Help: "InfiniBand: P_Key",
		set: func(t *TargetPort, _ *LoginOptions, s string) error {
			v, err := parseHex(s, 16)
			t.PKey = uint16(v)
			return err
		},
		get: func(t *TargetPort, _ *LoginOptions) string {
			if !t.IsIB() {
				return ""
			}
			return fmt.Sprintf("%04x", t.PKey)
		}},
	{Name: "service_id", Values: "1 to 16 hexadecimal digits", Help: "InfiniBand: service id of the target",
		set: func(t *TargetPort, _ *LoginOptions, s string) (err error) {
			t.ServiceID, err = parseHex(s, 64)
			return err
		},
		get: func(t *TargetPort, _ *LoginOptions) string {
			if !t.IsIB() {
				return ""
			}
			return fmt.Sprintf("%016x", t.ServiceID)
		}},
	{Name: "dest", Values: "HOST:PORT, an IPv6 address in brackets, a link-local one with its interface: [fe80::1%eth0]:5555", Help: "address of the target for RDMA/CM",
		set: func(t *TargetPort, _ *LoginOptions, s string) (err error) {
			t.Dest, t.Host, err = parseEndpoint(s, true)
			return err
		},
		get: func(t *TargetPort, _ *LoginOptions) string {
			if t.IsIB() {
				return ""
			}
			return t.destination()
		}},
	{Name: "src", Values: "ADDR or ADDR:PORT, an IPv6 address as in dest", Help: "local address to connect from",
		set: func(t *TargetPort, _ *LoginOptions, s string) error {
			ap, name, err := parseEndpoint(s, false)
			if err == nil && name != "" {
				err = fmt.Errorf("not an IP address")
			}
			t.Src = ap
			return err
		},
		get: func(t *TargetPort, _ *LoginOptions) string {
			if !t.Src.IsValid() {
				return ""
			}
			if a := t.Src.Addr(); t.Src.Port() == 0 && a.Is4() {
				return a.String()
			} else if t.Src.Port() == 0 {
				return "[" + a.String() + "]"
			}
			return t.Src.String()
		}},
	intKey("max_sect", "largest command in 512-byte sectors; ch_count times as much memory is used, 1 GiB at most", 1, maxSectorsLimit, func(o *LoginOptions) *int { return &o.MaxSectors }),
	intKey("max_cmd_per_lun", "commands outstanding per logical unit", 1, MaxQueueSize, func(o *LoginOptions) *int { return &o.MaxCmdPerLUN }),
	intKey("target_can_queue", "commands outstanding per target", 1, MaxQueueSize, func(o *LoginOptions) *int { return &o.TargetCanQueue }),
	{Name: "io_class", Values: "0100 (SRP rev. 16a) or ff00 (rev. 10)", Default: "0100", Help: "order of the halves of the port identifiers",
		set: func(t *TargetPort, _ *LoginOptions, s string) error {
			v, err := parseHex(s, 16)
			if err == nil && v != uint64(IOClassRev16a) && v != uint64(IOClassRev10) {
				err = fmt.Errorf("unknown I/O class")
			}
			t.IOClass = uint16(v)
			return err
		},
		get: func(t *TargetPort, _ *LoginOptions) string {
			if t.IOClass == IOClassRev16a {
				return ""
			}
			return fmt.Sprintf("%04x", t.IOClass)
		}},
	hexKey("initiator_ext", "first half of the initiator port identifier; another one makes another path", 64,
		func(_ *TargetPort, o *LoginOptions) *uint64 { return &o.InitiatorExt }, false),
	intKey("cmd_sg_entries", "data descriptors inside a command", 1, maxCmdSGEntries, func(o *LoginOptions) *int { return &o.CmdSGEntries }),
	boolKey("allow_ext_sg", "let the target fetch further descriptors from our memory; few targets can", func(o *LoginOptions) *bool { return &o.AllowExtSG }),
	intKey("sg_tablesize", "data descriptors of a command in all; default cmd_sg_entries", 1, maxSGTableSize, func(o *LoginOptions) *int { return &o.SGTableSize }),
	intKey("comp_vector", "completion vector of the first channel; the next ones follow", 0, 1<<16-1, func(o *LoginOptions) *int { return &o.CompVector }),
	intKey("tl_retry_count", "transport retries before a connection is given up", 2, 7, func(o *LoginOptions) *int { return &o.TLRetryCount }),
	intKey("queue_size", "commands outstanding per channel", 1, MaxQueueSize, func(o *LoginOptions) *int { return &o.QueueSize }),
	intKey("max_it_iu_size", "cap of the information units we send, 0 for none", 0, 1<<20, func(o *LoginOptions) *int { return &o.MaxITIUSize }),
	intKey("ch_count", "RDMA channels", 1, MaxChannels, func(o *LoginOptions) *int { return &o.ChannelCount }),
	boolKey("use_imm_data", "small writes travel inside the command, if the target can", func(o *LoginOptions) *bool { return &o.ImmediateData }),
	intKey("max_imm_data", "bytes of data that may travel so", 1, 1<<16, func(o *LoginOptions) *int { return &o.MaxImmediateData }),
	boolKey("register_always", "0: the keys of the session's memory serve all commands; 1, a key of its own for each, is refused", func(o *LoginOptions) *bool { return &o.RegisterAlways }),
	secondsKey("reconnect_delay", "between attempts to reconnect", true, func(o *LoginOptions) *time.Duration { return &o.ReconnectDelay }),
	secondsKey("fast_io_fail_tmo", "without connection before commands fail instead of waiting", true, func(o *LoginOptions) *time.Duration { return &o.FastIOFail }),
	secondsKey("dev_loss_tmo", "without connection before the session is given up", true, func(o *LoginOptions) *time.Duration { return &o.DevLoss }),
	secondsKey("connect_tmo", "for the login of one channel", false, func(o *LoginOptions) *time.Duration { return &o.ConnectTimeout }),
	secondsKey("cmd_tmo", "before a command is aborted, and how long one is sent again to a busy unit", true, func(o *LoginOptions) *time.Duration { return &o.CommandTimeout }),
	secondsKey("tmf_tmo", "for the answer to an abort or reset", false, func(o *LoginOptions) *time.Duration { return &o.TaskMgmtTimeout }),
}

// check holds the rules that concern several options; seen has the keys that the user gave.
func (o *LoginOptions) check(seen map[string]bool) error {
	if o.SGTableSize != 0 && o.SGTableSize < o.CmdSGEntries && seen["sg_tablesize"] {
		if seen["cmd_sg_entries"] {
			return &TargetError{Item: "sg_tablesize", Value: strconv.Itoa(o.SGTableSize),
				Reason: fmt.Sprintf("less than cmd_sg_entries %d", o.CmdSGEntries)}
		}
		o.CmdSGEntries = o.SGTableSize
	}
	// The rules of the kernel's srp_tmo_valid.
	if o.ReconnectDelay < 0 && o.FastIOFail < 0 && o.DevLoss < 0 {
		return &TargetError{Item: "reconnect_delay, fast_io_fail_tmo, dev_loss_tmo", Reason: "not all three can be off"}
	}
	if o.FastIOFail >= 0 && o.DevLoss >= 0 && o.FastIOFail >= o.DevLoss {
		return &TargetError{Item: "fast_io_fail_tmo", Value: o.FastIOFail.String(), Reason: fmt.Sprintf("must be shorter than dev_loss_tmo %s", o.DevLoss)}
	}
	if o.RegisterAlways {
		return &TargetError{Item: "register_always", Value: "1", Reason: "a key for each command is not made here: it would cost two work requests per command, and rxe would not hold the target to its range; want 0"}
	}
	if n := o.MaxITIUSize; n != 0 && n < 64 {
		return &TargetError{Item: "max_it_iu_size", Value: strconv.Itoa(n), Reason: "an SRP command needs 64; 0 means no cap"}
	}
	if each := o.bounceSize(); each > maxBounce/o.ChannelCount {
		return &TargetError{Item: "max_sect", Value: strconv.Itoa(o.MaxSectors),
			Reason: fmt.Sprintf("with ch_count=%d this takes %d MiB of memory, more than %d; want max_sect of %d or less with that many channels, or ch_count of %d or less",
				o.ChannelCount, each*o.ChannelCount>>20, maxBounce>>20, maxBounce/o.ChannelCount/bounceUnit*(bounceUnit/512), maxBounce/each)}
	}
	return nil
}

// bounceSize is the bounce memory of one channel in bytes: room for the largest command.
func (o *LoginOptions) bounceSize() int { return max(minBounce, align(o.MaxSectors*512, bounceUnit)) }

// sgLimit is how many data descriptors one command may have.
func (o *LoginOptions) sgLimit() int {
	if o.AllowExtSG && o.SGTableSize > o.CmdSGEntries {
		return o.SGTableSize
	}
	return o.CmdSGEntries
}

// nearest suggests the known key with the smallest edit distance.
func nearest(key string) string {
	best, at := "", len(key)/3+1
	for _, k := range keyNames() {
		if d := editDistance(key, k); d < at {
			best, at = k, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf(" (did you mean %s?)", best)
}

func editDistance(a, b string) int {
	if len(a) > 64 {
		return len(a)
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		prev := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := prev
			if a[i-1] != b[j-1] {
				cost++
			}
			prev = row[j]
			row[j] = min(cost, row[j]+1, row[j-1]+1)
		}
	}
	return row[len(b)]
}
