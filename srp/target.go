package srp

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"unicode"

	"srp-initiator/rdma/cm"
	"srp-initiator/rdma/verbs"
	"srp-initiator/srp/iu"
)

// I/O classes of a target port: they decide the order of the halves of both port identifiers.
const (
	IOClassRev16a uint16 = 0x0100 // extension first
	IOClassRev10  uint16 = 0xff00 // GUID first
)

// TargetPort names an SRP target port and the way to it.
type TargetPort struct {
	IDExt   uint64 // identifier extension
	IOCGUID uint64 // I/O controller GUID
	IOClass uint16

	// Dest is the address for RDMA/CM; when a name was given, Host holds it with its port and Login resolves it.
	Dest netip.AddrPort
	Host string
	// Src is the local address to use, if valid; its port may be 0.
	Src netip.AddrPort

	// An InfiniBand target port has no Dest and Host but these.
	DGID      verbs.GID
	PKey      uint16
	ServiceID uint64
}

// IsIB reports that the port is reached by IB CM addressing, where login takes the 64-byte form.
func (t *TargetPort) IsIB() bool { return !t.Dest.IsValid() && t.Host == "" }

// ID is the 16-byte target port identifier.
func (t *TargetPort) ID() iu.PortID { return portID(t.IOClass, t.IDExt, t.IOCGUID) }

func portID(class uint16, ext, guid uint64) iu.PortID {
	if class == IOClassRev10 {
		return iu.MakePortID(guid, ext)
	}
	return iu.MakePortID(ext, guid)
}

// Addr is the destination for package cm; a host name must have been resolved.
func (t *TargetPort) Addr() cm.Addr {
	if t.IsIB() {
		return cm.Addr{GID: t.DGID, PKey: t.PKey, ServiceID: t.ServiceID}
	}
	return cm.Addr{IP: t.Dest}
}

// Resolve looks up the address of Host, if that is all there is. Login does so too.
func (t *TargetPort) Resolve(ctx context.Context) error {
	if t.Host == "" || t.Dest.IsValid() {
		return nil
	}
	host, port, err := net.SplitHostPort(t.Host)
	if err != nil {
		return &TargetError{Item: "dest", Value: t.Host, Reason: err.Error()}
	}
	network := "ip"
	if t.Src.IsValid() {
		if network = "ip6"; t.Src.Addr().Is4() {
			network = "ip4"
		}
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, network, host)
	if err != nil {
		return fmt.Errorf("srp: resolve target host: %w", err)
	}
	ap, err := netip.ParseAddrPort(net.JoinHostPort(addrs[0].Unmap().String(), port))
	if err != nil {
		return &TargetError{Item: "dest", Value: t.Host, Reason: err.Error()}
	}
	t.Dest = ap
	return nil
}

// destination is what the user typed for it.
func (t *TargetPort) destination() string {
	if t.Host != "" {
		return t.Host
	}
	return t.Dest.String()
}

// TargetError is a target description that cannot be used. It names the item and
// what is allowed there.
type TargetError struct {
	Item   string // key or part
	Value  string
	Reason string
}

func (e *TargetError) Error() string {
	if e.Value == "" {
		return fmt.Sprintf("target: %s: %s", printable(e.Item), e.Reason)
	}
	return fmt.Sprintf("target: %s=%s: %s", printable(e.Item), printable(e.Value), e.Reason)
}

// printable quotes what would break the error's line or speak to the terminal.
func printable(s string) string {
	if strings.ContainsFunc(s, func(r rune) bool { return r == unicode.ReplacementChar || !unicode.IsPrint(r) }) {
		return strconv.Quote(s)
	}
	return s
}

// ParseTarget reads a target port and its login options from either of
//
//	id_ext=..,ioc_guid=..,dest=HOST:PORT[,key=value..]     or with dgid=..,pkey=..,service_id=.. for dest
//	srp://HOST:PORT/ID_EXT[:IOC_GUID][?key=value&..]       IOC_GUID defaults to ID_EXT
//
// the first being what the kernel's ib_srp takes in add_target. Both know all keys of LoginKeys. Keys that are
// not given have their defaults. Errors are *TargetError.
func ParseTarget(s string) (TargetPort, LoginOptions, error) {
	t := TargetPort{IOClass: IOClassRev16a}
	o := DefaultLoginOptions()
	p := parser{t: &t, o: &o, seen: map[string]bool{}}
	var err error
	if rest, ok := strings.CutPrefix(s, "srp://"); ok {
		err = p.url(rest)
	} else {
		err = p.addTarget(s)
	}
	if err == nil {
		err = p.finish()
	}
	if err != nil {
		return TargetPort{}, LoginOptions{}, err
	}
	return t, o, nil
}

type parser struct {
	t    *TargetPort
	o    *LoginOptions
	seen map[string]bool
}

func (p *parser) set(key, value string) error {
	if key == "tid_ext" { // SCST's spelling in login_info
		key = "id_ext"
	}
	k := findKey(key)
	if k == nil {
		return &TargetError{Item: key, Value: value, Reason: "unknown key" + nearest(key) + "; known keys: " + strings.Join(keyNames(), ", ")}
	}
	if p.seen[k.Name] {
		return &TargetError{Item: k.Name, Value: value, Reason: "given twice"}
	}
	p.seen[k.Name] = true
	if err := k.set(p.t, p.o, value); err != nil {
		return &TargetError{Item: k.Name, Value: value, Reason: err.Error() + "; want " + k.Values}
	}
	return nil
}

func (p *parser) addTarget(s string) error {
	if strings.TrimSpace(s) == "" {
		return &TargetError{Item: "TARGET", Reason: "empty; want id_ext=..,ioc_guid=..,dest=HOST:PORT or srp://HOST:PORT/ID_EXT"}
	}
	for _, f := range strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == '\n' }) {
		if f = strings.TrimSpace(f); f == "" {
			continue
		}
		key, value, ok := strings.Cut(f, "=")
		if !ok {
			return &TargetError{Item: f, Reason: "not of the form key=value; or write srp://HOST:PORT/ID_EXT"}
		}
		if err := p.set(key, value); err != nil {
			return err
		}
	}
	return nil
}

func (p *parser) url(s string) error {
	s, query, _ := strings.Cut(s, "?")
	host, ids, _ := strings.Cut(s, "/")
	if host == "" {
		return &TargetError{Item: "srp:// URL", Value: s, Reason: "has no HOST:PORT"}
	}
	host = strings.Replace(host, "%25", "%", 1) // a zone's, as in RFC 6874; without the escape is understood too
	if err := p.set("dest", host); err != nil {
		return err
	}
	if ids = strings.TrimSuffix(ids, "/"); ids != "" {
		ext, guid, two := strings.Cut(ids, ":")
		if !two {
			guid = ext
		}
		if err := p.set("id_ext", ext); err != nil {
			return err
		}
		if err := p.set("ioc_guid", guid); err != nil {
			return err
		}
	}
	for _, f := range strings.Split(query, "&") {
		if f == "" {
			continue
		}
		key, value, ok := strings.Cut(f, "=")
		if !ok {
			return &TargetError{Item: f, Reason: "not of the form key=value"}
		}
		value, err := url.QueryUnescape(value)
		if err != nil {
			return &TargetError{Item: key, Value: value, Reason: err.Error()}
		}
		if err := p.set(key, value); err != nil {
			return err
		}
	}
	return nil
}

// finish checks what concerns several keys.
func (p *parser) finish() error {
	need := []string{"id_ext", "ioc_guid", "dest"}
	ib := p.seen["dgid"] || p.seen["pkey"] || p.seen["service_id"]
	if p.seen["dest"] && ib {
		return &TargetError{Item: "dest", Value: p.t.destination(), Reason: "excludes dgid, pkey and service_id: give one address or the other"}
	}
	if ib {
		need = []string{"id_ext", "ioc_guid", "dgid", "pkey", "service_id"}
	}
	for _, k := range need {
		if !p.seen[k] {
			return &TargetError{Item: k, Reason: "missing; a target needs " + strings.Join(need, ", ")}
		}
	}
	for _, e := range []struct {
		item string
		at   netip.AddrPort
	}{{"dest", p.t.Dest}, {"src", p.t.Src}} {
		if a := e.at.Addr(); a.Is6() && a.IsLinkLocalUnicast() && a.Zone() == "" {
			return &TargetError{Item: e.item, Value: a.String(), Reason: fmt.Sprintf("%%INTERFACE is missing after the link-local address; want such as [%s%%eth0]", a)}
		}
	}
	if p.seen["src"] && ib {
		return &TargetError{Item: "src", Value: p.t.Src.String(), Reason: "goes with dest only"}
	}
	if p.seen["src"] && p.t.Dest.IsValid() && p.t.Src.Addr().Is4() != p.t.Dest.Addr().Is4() {
		return &TargetError{Item: "src", Value: p.t.Src.String(), Reason: "not of the same address family as dest " + p.t.Dest.String()}
	}
	return p.o.check(p.seen)
}

// AddTarget is the port and the options that differ from the default in the form of ib_srp's add_target.
func AddTarget(t TargetPort, o LoginOptions) string {
	var b strings.Builder
	eachKey(t, o, func(k *LoginKey, v string) {
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(k.Name + "=" + v)
	})
	return b.String()
}

// readable takes back the escapes of an address, which a query does not need.
var readable = strings.NewReplacer("%3A", ":", "%5B", "[", "%5D", "]")

// URL is the same as an srp:// URL, or "" for a port that is not reached by RDMA/CM.
func URL(t TargetPort, o LoginOptions) string {
	if t.IsIB() {
		return ""
	}
	ids := fmt.Sprintf("%016x", t.IDExt)
	if t.IOCGUID != t.IDExt {
		ids += fmt.Sprintf(":%016x", t.IOCGUID)
	}
	var q []string
	eachKey(t, o, func(k *LoginKey, v string) {
		switch k.Name {
		case "id_ext", "ioc_guid", "dest":
		default:
			q = append(q, k.Name+"="+readable.Replace(url.QueryEscape(v)))
		}
	})
	s := "srp://" + strings.Replace(t.destination(), "%", "%25", 1) + "/" + ids
	if len(q) > 0 {
		s += "?" + strings.Join(q, "&")
	}
	return s
}

func parseHex(s string, bits int) (uint64, error) {
	d := strings.TrimPrefix(strings.TrimPrefix(s, "0x"), "0X")
	if bits == 64 && len(d) == 19 && strings.Count(d, ":") == 3 { // a GUID as sysfs shows it
		d = strings.ReplaceAll(d, ":", "")
	}
	v, err := strconv.ParseUint(d, 16, bits)
	if err != nil || strings.ContainsAny(d, "_+-") || len(d) > bits/4 {
		return 0, fmt.Errorf("not %d hexadecimal digits at most", bits/4)
	}
	return v, nil
}

func parseGID(s string) (g verbs.GID, err error) {
	d := strings.ReplaceAll(s, ":", "")
	if len(d) != 32 {
		return g, fmt.Errorf("has %d hexadecimal digits", len(d))
	}
	for i := range g {
		v, err := strconv.ParseUint(d[2*i:2*i+2], 16, 8)
		if err != nil {
			return g, fmt.Errorf("not hexadecimal")
		}
		g[i] = byte(v)
	}
	return g, nil
}

// parseEndpoint reads ADDR:PORT with an IPv6 address in brackets; a host name is returned as name. Without portNeeded ADDR alone will do, in
// brackets or not.
func parseEndpoint(s string, portNeeded bool) (ap netip.AddrPort, name string, err error) {
	if !portNeeded {
		alone := s
		if in, ok := strings.CutPrefix(s, "["); ok {
			if in, ok = strings.CutSuffix(in, "]"); ok {
				alone = in
			}
		}
		if a, err := parseAddr(alone); err == nil {
			return netip.AddrPortFrom(a, 0), "", nil
		}
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		if portNeeded && strings.Contains(err.Error(), "missing port") {
			return ap, "", fmt.Errorf("has no port")
		}
		return ap, "", fmt.Errorf("not an address and port")
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || portNeeded && n == 0 {
		return ap, "", fmt.Errorf("port %q is not 1 to 65535", port)
	}
	if a, err := parseAddr(host); err == nil {
		return netip.AddrPortFrom(a, uint16(n)), "", nil
	}
	if host == "" || strings.ContainsAny(host, noName) || printable(host) != host || strings.Trim(host, "0123456789.") == "" {
		return ap, "", fmt.Errorf("%q is neither an IP address nor a host name", host)
	}
	return ap, net.JoinHostPort(host, port), nil
}

// noName has what is in no name of a host or an interface, or would divide a target's description.
const noName = " /:%?#[]@,=&"

// parseAddr reads an address. Package netip takes anything for a zone, such as a bracket and a port; here it is the name or number of an interface.
func parseAddr(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err == nil && (strings.ContainsAny(a.Zone(), noName) || printable(a.Zone()) != a.Zone()) {
		err = fmt.Errorf("%q is not the name of an interface", a.Zone())
	}
	return a.Unmap(), err
}
