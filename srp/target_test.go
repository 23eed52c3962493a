package srp

import (
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode"

	"srp-initiator/srp/iu"
)

func TestParseTargetForms(t *testing.T) {
	for _, tc := range []struct {
		in   string
		want func(*TargetPort, *LoginOptions) bool
	}{
		{"id_ext=505400fffe123456,ioc_guid=505400fffe123457,dest=10.0.0.1:5555", func(p *TargetPort, o *LoginOptions) bool {
			return p.IDExt == 0x505400fffe123456 && p.IOCGUID == 0x505400fffe123457 && p.Dest.String() == "10.0.0.1:5555" && !p.IsIB() &&
				o.QueueSize == 62 && o.CmdSGEntries == 12 && o.TLRetryCount == 7 && o.ImmediateData && p.IOClass == IOClassRev16a
		}},
		// blktests' form, with a scope and line ends.
		{"id_ext=5054:00ff:fe12:3456,ioc_guid=505400fffe123456,dest=[fe80::1%eth0]:5555,\nallow_ext_sg=1,cmd_sg_entries=255,sg_tablesize=2048,ch_count=4\n",
			func(p *TargetPort, o *LoginOptions) bool {
				return p.IDExt == p.IOCGUID && p.Dest.Addr().Zone() == "eth0" && o.AllowExtSG && o.CmdSGEntries == 255 && o.SGTableSize == 2048 && o.ChannelCount == 4
			}},
		{"id_ext=1,ioc_guid=2,dgid=fe80000000000000505400fffe123456,pkey=7fff,service_id=505400fffe123456,io_class=ff00,initiator_ext=0x5", func(p *TargetPort, o *LoginOptions) bool {
			return p.IsIB() && p.PKey == 0x7fff && p.ServiceID == 0x505400fffe123456 && p.DGID.String() == "fe80:0000:0000:0000:5054:00ff:fe12:3456" &&
				p.ID() == iu.MakePortID(2, 1) && o.InitiatorExt == 5
		}},
		{"srp://10.0.0.1:5555/505400fffe123456", func(p *TargetPort, o *LoginOptions) bool {
			return p.IDExt == p.IOCGUID && p.IDExt == 0x505400fffe123456 && p.ID() == iu.MakePortID(p.IDExt, p.IOCGUID)
		}},
		{"srp://[::1]:5555/1:2?queue_size=128&src=[::2]&reconnect_delay=off&dev_loss_tmo=2.5&fast_io_fail_tmo=1", func(p *TargetPort, o *LoginOptions) bool {
			return p.IOCGUID == 2 && o.QueueSize == 128 && p.Src.Addr().String() == "::2" && o.ReconnectDelay == Off && o.DevLoss == 2500*time.Millisecond
		}},
		{"srp://storage-1.example:5555/1?use_imm_data=n", func(p *TargetPort, o *LoginOptions) bool {
			return p.Host == "storage-1.example:5555" && !p.Dest.IsValid() && !p.IsIB() && !o.ImmediateData
		}},
		{"tid_ext=0002c9020023130c,ioc_guid=0002c9020023130c,dest=1.2.3.4:5", func(p *TargetPort, o *LoginOptions) bool { return p.IDExt == 0x0002c9020023130c }},
	} {
		p, o, err := ParseTarget(tc.in)
		if err != nil {
			t.Errorf("%q: %v", tc.in, err)
			continue
		}
		if !tc.want(&p, &o) {
			t.Errorf("%q: %+v %+v", tc.in, p, o)
		}
		for _, again := range []string{AddTarget(p, o), URL(p, o)} {
			if again == "" {
				continue
			}
			p2, o2, err := ParseTarget(again)
			if err != nil || p2 != p || AddTarget(p2, o2) != AddTarget(p, o) {
				t.Errorf("%q printed as %q: %+v, %v", tc.in, again, p2, err)
			}
		}
	}
}

func TestParseTargetErrors(t *testing.T) {
	const ok = "id_ext=1,ioc_guid=2,dest=10.0.0.1:5555,"
	for in, want := range map[string]string{
		"":                                           "empty",
		"10.0.0.1":                                   "key=value",
		ok + "foo=1":                                 "unknown key; known keys: id_ext, ioc_guid",
		ok + "queue_sise=1":                          "did you mean queue_size?",
		ok + "queue_size=5x":                         "want 1 to 4096",
		ok + "queue_size=-1":                         "want 1 to 4096",
		ok + "queue_size=0":                          "want 1 to 4096",
		ok + "queue_size= 5":                         "want 1 to 4096",
		ok + "queue_size=0x10":                       "want 1 to 4096",
		ok + "queue_size=1e3":                        "want 1 to 4096",
		ok + "queue_size=+5":                         "want 1 to 4096",
		ok + "tl_retry_count=8":                      "want 2 to 7",
		ok + "tl_retry_count=1":                      "want 2 to 7",
		ok + "cmd_sg_entries=256":                    "want 1 to 255",
		ok + "sg_tablesize=2049":                     "want 1 to 2048",
		ok + "allow_ext_sg=2":                        "want 0 or 1",
		ok + "io_class=0200":                         "want 0100",
		ok + "max_it_iu_size=63":                     "needs 64",
		ok + "queue_size=1,queue_size=2":             "given twice",
		ok + "dgid=fe80000000000000505400fffe123456": "excludes",
		ok + "fast_io_fail_tmo=30,dev_loss_tmo=30":   "must be shorter than dev_loss_tmo",
		ok + "reconnect_delay=off,fast_io_fail_tmo=off,dev_loss_tmo=off": "not all three",
		ok + "register_always=1":                              "register_always=1: a key for each command is not made here: it would cost two work requests per command",
		ok + "reconnect_delay=0":                              "want seconds",
		ok + "sg_tablesize=4,cmd_sg_entries=8,allow_ext_sg=1": "less than cmd_sg_entries",
		"id_ext=1,ioc_guid=2,dest=[fe80::1]:5555":             "dest=fe80::1: %INTERFACE is missing after the link-local address; want such as [fe80::1%eth0]",
		"srp://[fe80::1]:5555/1":                              "dest=fe80::1: %INTERFACE is missing",
		"srp://[::1]:5555/1?src=fe80::1":                      "src=fe80::1: %INTERFACE is missing",
		ok + "src=::1":                                        "address family",
		ok + "src=fe80::2%eth0]:5000":                         "src=fe80::2%eth0]:5000: not an address and port; want ADDR or ADDR:PORT",
		ok + "src=[fe80::2%eth0":                              "not an address and port",
		ok + "src=[::2]]":                                     "not an address and port",
		ok + "src=::2]":                                       "not an address and port",
		ok + "src=[127.0.0.1":                                 "not an address and port",
		ok + "src=fe80::2%et h0":                              "not an address and port",
		ok + "src=fe80::2%\x1b[2J":                            "not an address and port",
		"id_ext=1,ioc_guid=2,dest=[fe80::1%a/b]:5":            "neither an IP address nor a host name",
		"id_ext=1,dest=10.0.0.1:5555":                         "ioc_guid: missing",
		"id_ext=1,ioc_guid=2":                                 "dest: missing",
		"id_ext=1,ioc_guid=2,dgid=fe80":                       "32 hexadecimal digits",
		"id_ext=1,ioc_guid=2,pkey=ffff":                       "dgid: missing",
		"id_ext=00112233445566778,ioc_guid=2,dest=1.2.3.4:5":  "16 hexadecimal digits",
		"id_ext=xyz,ioc_guid=2,dest=1.2.3.4:5":                "hexadecimal",
		"id_ext=1,ioc_guid=2,dest=1.2.3.4":                    "has no port",
		"id_ext=1,ioc_guid=2,dest=1.2.3.4:0":                  "1 to 65535",
		"srp://\n:1/0":                                        "neither an IP address nor a host name",
		"id_ext=1,ioc_guid=2,dest=a\x1bb:1":                   "neither an IP address nor a host name",
		"id_ext=1,ioc_guid=2,dest=1.2.3.4.5:1":                "neither an IP address nor a host name",
		"srp:///1":                                            "HOST:PORT",
		"srp://1.2.3.4:5":                                     "id_ext: missing",
		"srp://1.2.3.4:5/1?id_ext=2":                          "given twice",
		"srp://1.2.3.4:5/1?queue_size=1%0a":                   `queue_size="1\n": not a decimal number`,
		ok + "max_sect=2097152,ch_count=8":                    "max_sect=2097152: with ch_count=8 this takes 8192 MiB of memory, more than 1024; want max_sect of 262144 or less with that many channels, or ch_count of 1 or less",
		ok + "max_sect=262145,ch_count=8":                     "max_sect=262145: with ch_count=8",
		ok + "ch_count=256,max_sect=8193":                     "max_sect of 8192 or less",
		ok + "a\x1b[2J=1":                                     `"a\x1b[2J"=1: unknown key`,
	} {
		_, _, err := ParseTarget(in)
		var te *TargetError
		if !errors.As(err, &te) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want a TargetError with %q", in, err, want)
		}
		if err != nil && strings.ContainsFunc(err.Error(), unicode.IsControl) {
			t.Errorf("%q: more than a line, or speaks to the terminal", in)
		}
	}
}

// Without allow_ext_sg a larger table is limited, as ib_srp limits it; a smaller one lowers cmd_sg_entries.
func TestSGTableSize(t *testing.T) {
	const ok = "id_ext=1,ioc_guid=2,dest=10.0.0.1:5555,"
	for in, want := range map[string]int{
		"": 12, "sg_tablesize=100": 12, "sg_tablesize=100,allow_ext_sg=1": 100, "sg_tablesize=4": 4, "cmd_sg_entries=255": 255,
	} {
		_, o, err := ParseTarget(ok + in)
		if err != nil || o.sgLimit() != want {
			t.Errorf("%q: limit %d, %v; want %d", in, o.sgLimit(), err, want)
		}
	}
}

// The most memory that bounce buffers may take.
func TestMostBounceMemory(t *testing.T) {
	for _, in := range []string{"max_sect=2097152", "max_sect=262144,ch_count=8", "max_sect=8192,ch_count=256", "ch_count=256"} {
		if _, _, err := ParseTarget("id_ext=1,ioc_guid=2,dest=10.0.0.1:5555," + in); err != nil {
			t.Errorf("%s: %v", in, err)
		}
	}
}

// What is printed can be pasted: addresses without escapes, and without a port that nobody gave.
func TestSourceAddress(t *testing.T) {
	for in, want := range map[string][2]string{
		"srp://127.1.1.1:5555/1?src=127.9.9.9":      {"src=127.9.9.9", "srp://127.1.1.1:5555/0000000000000001?src=127.9.9.9"},
		"srp://127.1.1.1:5555/1?src=127.9.9.9%3A77": {"src=127.9.9.9:77", "srp://127.1.1.1:5555/0000000000000001?src=127.9.9.9:77"},
		"srp://[::1]:5555/1?src=::2":                {"src=[::2]", "srp://[::1]:5555/0000000000000001?src=[::2]"},
		"srp://[::1]:5555/1?src=[::2]:5000":         {"src=[::2]:5000", "srp://[::1]:5555/0000000000000001?src=[::2]:5000"},
		"srp://127.1.1.1:5/1?src=::ffff:127.9.9.9":  {"src=127.9.9.9", "srp://127.1.1.1:5/0000000000000001?src=127.9.9.9"},
		// Zones, with a port and without.
		"srp://[::1]:5/1?src=[fe80::2%25eth0]:5000":      {"src=[fe80::2%eth0]:5000", "srp://[::1]:5/0000000000000001?src=[fe80::2%25eth0]:5000"},
		"srp://[::1]:5/1?src=[fe80::2%25eth0]":           {"src=[fe80::2%eth0]", "srp://[::1]:5/0000000000000001?src=[fe80::2%25eth0]"},
		"srp://[::1]:5/1?src=fe80::2%25eth0":             {"src=[fe80::2%eth0]", "srp://[::1]:5/0000000000000001?src=[fe80::2%25eth0]"},
		"srp://[fe80::1%25eth0]:5/1?src=fe80::2%25eth0":  {"dest=[fe80::1%eth0]:5", "srp://[fe80::1%25eth0]:5/0000000000000001?src=[fe80::2%25eth0]"},
		"srp://[fe80::1%eth0.7]:5/1":                     {"dest=[fe80::1%eth0.7]:5", "srp://[fe80::1%25eth0.7]:5/0000000000000001"},
		"id_ext=1,ioc_guid=1,dest=[fe80::1%25]:5,src=::": {"dest=[fe80::1%25]:5", "srp://[fe80::1%2525]:5/0000000000000001?src=[::]"},
	} {
		p, o, err := ParseTarget(in)
		if err != nil {
			t.Errorf("%s: %v", in, err)
			continue
		}
		if got := AddTarget(p, o); !strings.Contains(got+",", ","+want[0]+",") {
			t.Errorf("%s: %s, want %s", in, got, want[0])
		}
		got := URL(p, o)
		if p2, o2, err := ParseTarget(got); got != want[1] || err != nil || p2 != p || AddTarget(p2, o2) != AddTarget(p, o) {
			t.Errorf("%s: %s (%v), want %s", in, got, err, want[1])
		}
	}
}

func FuzzParseTarget(f *testing.F) {
	f.Add("id_ext=505400fffe123456,ioc_guid=505400fffe123457,dest=10.0.0.1:5555")
	f.Add("srp://[::1]:5555/1:2?queue_size=128&src=[::2]&reconnect_delay=off")
	f.Add("id_ext=1,ioc_guid=2,dgid=fe80000000000000505400fffe123456,pkey=7fff,service_id=505400fffe123456")
	f.Add("srp://[fe80::1%25eth0]:5/1?src=[fe80::2%25eth0]:5000")
	f.Add("id_ext=1,ioc_guid=2,dest=[fe80::1%25]:5,src=fe80::2%eth0")
	f.Add("srp://storage-1.example:5555/1?use_imm_data=n&fast_io_fail_tmo=1&dev_loss_tmo=2.5")
	f.Add("id_ext=5054:00ff:fe12:3456,ioc_guid=1,dest=[fe80::1%eth0]:5555,\nallow_ext_sg=1,cmd_sg_entries=255,sg_tablesize=2048,ch_count=4\n")
	for _, k := range LoginKeys() {
		f.Add("id_ext=1,ioc_guid=2,dest=10.0.0.1:5555," + k.Name + "=2")
		f.Add("srp://[::1]:5555/1?" + k.Name + "=off")
	}
	f.Fuzz(func(t *testing.T, in string) {
		p, o, err := ParseTarget(in)
		if err != nil {
			var te *TargetError
			if !errors.As(err, &te) {
				t.Fatalf("%q: %v is no TargetError", in, err)
			}
			if strings.ContainsFunc(err.Error(), unicode.IsControl) {
				t.Fatalf("%q: the error %q is more than a line, or speaks to the terminal", in, err)
			}
			return
		}
		for _, s := range []string{AddTarget(p, o), URL(p, o)} {
			if s == "" {
				continue
			}
			p2, o2, err := ParseTarget(s)
			if err != nil || p2 != p || !reflect.DeepEqual(o2, o) {
				t.Fatalf("%q printed as %q: %v", in, s, err)
			}
		}
		if err := o.validate(); err != nil {
			t.Fatalf("%q parses but does not validate: %v", in, err)
		}
	})
}
