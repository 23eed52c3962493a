// Package golden reads recorded device vectors and plays them against a driver or a
// device model. It is used by tests only.
//
// A vector file holds cases; a case holds steps; a step is one call of the C library with what was
// observed: bytes of work queue entries, doorbell records, register stores in order, completions, kernel
// commands. The recordings are of libmlx5 and libmlx4 44.0 in front of an imitated
// kernel; see docs/hardware.md for what that proves and what not.
package golden

import (
	"bytes"
	"compress/gzip"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
)

// Format is the only file format known.
const Format = "verbs-vectors-1"

// Hex is bytes in memory order.
type Hex []byte

func (h *Hex) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return err
	}
	v, err := hex.DecodeString(s)
	*h = v
	return err
}

// Num is an integer, plain or as a string with 0x.
type Num uint64

func (n *Num) UnmarshalJSON(b []byte) error {
	s := strings.Trim(string(b), `"`)
	v, err := strconv.ParseUint(s, 0, 64)
	if err != nil { // negative results
		var i int64
		if i, err = strconv.ParseInt(s, 0, 64); err == nil {
			v = uint64(i)
		}
	}
	*n = Num(v)
	return err
}

// File is one file of vectors.
type File struct {
	Path     string `json:"-"`
	Format   string
	Device   string
	Group    string
	Profiles map[string]string
	Cases    []Case
}

// Case is one recorded case.
type Case struct {
	Group, Name, Device, Profile string
	Description                  string
	Env                          map[string]string
	Setup                        *Objects
	Steps                        []Step
}

// Objects are the device objects that exist before the first step, or that a step made.
type Objects struct {
	UARPages []UARPage `json:"uar_pages"`
	CQ       []CQ
	QP       []QP
	Memory   *struct {
		Addr Num
		Len  int
		Fill string
	}
}

type UARPage struct {
	Name       string
	MmapOffset Num `json:"mmap_offset"`
}

type CQ struct {
	Name       string
	CQN        Num
	Entries    int
	CQESize    int  `json:"cqe_size"`
	IBVCQE     int  `json:"ibv_cq_cqe"`
	HasChannel bool `json:"has_channel"`
}

type Cap struct {
	MaxSendWR     int `json:"max_send_wr"`
	MaxRecvWR     int `json:"max_recv_wr"`
	MaxSendSGE    int `json:"max_send_sge"`
	MaxRecvSGE    int `json:"max_recv_sge"`
	MaxInlineData int `json:"max_inline_data"`
}

type QP struct {
	Name         string
	QPNum        uint32 `json:"qp_num"`
	RequestedCap Cap    `json:"requested_cap"`
	ReturnedCap  Cap    `json:"returned_cap"`
	SQSigAll     int    `json:"sq_sig_all"`
	SQEntries    int    `json:"sq_entries"`
	SQStride     int    `json:"sq_stride"`
	SQOffset     int    `json:"sq_offset_in_buf"`
	RQEntries    int    `json:"rq_entries"`
	RQStride     int    `json:"rq_stride"`
	RQOffset     int    `json:"rq_offset_in_buf"`
	BufBytes     int    `json:"buf_bytes"`
	UIDX         Num
	CreateFlags  Num    `json:"create_flags"`
	BFRegIndex   Num    `json:"bfreg_index"`
	BFReg        string `json:"bf_reg"`
	BFSize       int    `json:"bf_size"`
	SendCQ       string `json:"send_cq"`
	RecvCQ       string `json:"recv_cq"`
	SendDoorbell string `json:"send_doorbell"`
}

// Event is one store, run of stores, or fence, in program order.
type Event struct {
	Fence string
	Store string
	Off   int
	Hex   Hex
	Runs  [][2]int
}

// Block is queue memory after a call.
type Block struct {
	Off, Len  int
	Hex       Hex
	NotStored [][2]int `json:"not_stored"`
}

type SGE struct {
	Addr   Num
	Length uint32
	LKey   Num
	Data   Hex
}

type WR struct {
	WRID          Num `json:"wr_id"`
	Opcode        string
	OpcodeNum     uint32   `json:"opcode_num"`
	SendFlags     []string `json:"send_flags"`
	SGList        []SGE    `json:"sg_list"`
	RemoteAddr    Num      `json:"remote_addr"`
	RKey          Num
	ImmData       Hex `json:"imm_data"`
	InvalidateKey Num `json:"invalidate_rkey"`
	CompareAdd    Num `json:"compare_add"`
	Swap          Num
}

// WC is a struct ibv_wc; nil fields were not written by the library.
type WC struct {
	WRID      Num `json:"wr_id"`
	Status    uint32
	Opcode    *uint32
	VendorErr *uint32 `json:"vendor_err"`
	ByteLen   *uint32 `json:"byte_len"`
	ImmData   *Hex    `json:"imm_data"`
	QPNum     uint32  `json:"qp_num"`
	SrcQP     *uint32 `json:"src_qp"`
	WCFlags   *uint32 `json:"wc_flags"`
	PKeyIndex *uint32 `json:"pkey_index"`
	SLID      *uint32
	SL        *uint32
	PathBits  *uint32 `json:"dlid_path_bits"`
}

// Args are a call's arguments.
type Args struct {
	QP            string
	CQ            string
	WR            []WR
	NumEntries    int    `json:"num_entries"`
	SolicitedOnly int    `json:"solicited_only"`
	QPState       string `json:"qp_state"`
	AttrMask      Num    `json:"attr_mask"`
	Attr          string
	Cap           *Cap
	QPType        string `json:"qp_type"`
	SQSigAll      int    `json:"sq_sig_all"`
	SendCQ        string `json:"send_cq"`
	RecvCQ        string `json:"recv_cq"`
	CQE           int
	Channel       bool
	CompVector    int `json:"comp_vector"`
	Addr          Num
	Length        Num
	Access        Num
}

// Attr is one attribute of a recorded ioctl.
type Attr struct {
	ID     uint16
	Name   string
	Kind   string
	Len    int
	Flags  uint16
	Inline bool
	In     Hex
	Out    Hex
	Value  json.RawMessage
	Reloc  []Reloc `json:"in_reloc"`
}

// Reloc is a field of a command whose value differs from run to run and was zeroed.
type Reloc struct {
	Off, Size int
	Sym       string
}

// Command is one system call of the library on the device file.
type Command struct {
	Via      string
	ObjectID uint16 `json:"object_id"`
	MethodID uint16 `json:"method_id"`
	Object   string
	Method   string
	WriteCmd string `json:"write_cmd"`
	CmdID    Num    `json:"write_cmd_id"`
	DriverID uint32 `json:"driver_id"`
	HdrLen   int    `json:"hdr_length"`
	NumAttrs int    `json:"num_attrs"`
	Attrs    []Attr
	Errno    string

	InWords          int     `json:"in_words"`
	OutWords         int     `json:"out_words"`
	ProviderInWords  int     `json:"provider_in_words"`
	ProviderOutWords int     `json:"provider_out_words"`
	CoreIn           Hex     `json:"core_in"`
	DriverIn         Hex     `json:"driver_in"`
	CoreOut          Hex     `json:"core_out"`
	DriverOut        Hex     `json:"driver_out"`
	CoreReloc        []Reloc `json:"core_in_reloc"`
	DriverReloc      []Reloc `json:"driver_in_reloc"`

	Offset   Num
	Length   int
	Prot     string
	MappedAs string `json:"mapped_as"`
}

// Step is one call and what was observed. Queues holds the memory of "qpN.sq" and "qpN.rq".
type Step struct {
	Call       string
	Args       Args
	Ret        int
	Errno      string
	BadWRIndex *int  `json:"bad_wr_index"`
	WQEIndex   []int `json:"wqe_index"`
	WQEs       []Hex
	Events     []Event
	DBR        map[string]Hex
	Queues     map[string][]Block `json:"-"`

	// hw_write_cqe
	CQName        string `json:"-"`
	What          string
	ProducerIndex uint32 `json:"producer_index"`
	Slot          int
	OwnerBit      int `json:"owner_bit"`
	Hex           Hex
	Addr          Num

	WC         []WC
	CQs        []CQ `json:"-"`
	QPs        []QP `json:"-"`
	QPDBRAfter Hex  `json:"qp_dbr_after"`
	CQ0        Hex  `json:"cq0"`
	Kernel     []Command
	UARPages   []UARPage `json:"uar_pages"`
	Text       string
	Setup      *Objects `json:"-"`
	LKey, RKey Num
	Raw        map[string]json.RawMessage `json:"-"`
}

func (s *Step) UnmarshalJSON(b []byte) error {
	if err := json.Unmarshal(b, &s.Raw); err != nil {
		return err
	}
	type plain Step
	// "cq" and "qp" are a name in some calls and a list of new objects in others.
	strip := map[string]json.RawMessage{}
	for k, v := range s.Raw {
		switch {
		case k == "cq" || k == "qp":
			if v[0] == '"' {
				var name string
				if err := json.Unmarshal(v, &name); err != nil {
					return err
				}
				if k == "cq" {
					s.CQName = name
				} else {
					s.Args.QP = name
				}
			} else if k == "cq" {
				if err := json.Unmarshal(v, &s.CQs); err != nil {
					return err
				}
			} else if err := json.Unmarshal(v, &s.QPs); err != nil {
				return err
			}
		case strings.HasSuffix(k, ".sq") || strings.HasSuffix(k, ".rq"):
			var blocks []Block
			if err := json.Unmarshal(v, &blocks); err != nil {
				return err
			}
			if s.Queues == nil {
				s.Queues = map[string][]Block{}
			}
			s.Queues[k] = blocks
		default:
			strip[k] = v
		}
	}
	if s.Raw["call"] != nil && string(s.Raw["call"]) == `"setup"` {
		s.Setup = new(Objects)
		if err := json.Unmarshal(b, s.Setup); err != nil {
			return err
		}
		delete(strip, "memory")
	}
	b, err := json.Marshal(strip)
	if err != nil {
		return err
	}
	raw, cqs, qps, cq, qp, queues, setup := s.Raw, s.CQs, s.QPs, s.CQName, s.Args.QP, s.Queues, s.Setup
	if err := json.Unmarshal(b, (*plain)(s)); err != nil {
		return fmt.Errorf("%w in step %s", err, raw["call"])
	}
	s.Raw, s.CQs, s.QPs, s.CQName, s.Queues, s.Setup = raw, cqs, qps, cq, queues, setup
	if qp != "" {
		s.Args.QP = qp
	}
	return nil
}

// Load reads all vector files, *.json or *.json.gz, below dir; index files are left out. Only files of the device are returned.
func Load(dir, device string) ([]File, error) {
	var files []File
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		name := strings.TrimSuffix(e.Name(), ".gz")
		if !strings.HasSuffix(name, ".json") || name == "index.json" {
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if strings.HasSuffix(path, ".gz") {
			z, err := gzip.NewReader(bytes.NewReader(b))
			if err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			if b, err = io.ReadAll(z); err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
		}
		var f File
		if err := json.Unmarshal(b, &f); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if f.Format != Format {
			return fmt.Errorf("%s: format %q, want %q", path, f.Format, Format)
		}
		f.Path = path
		if f.Device == device {
			files = append(files, f)
		}
		return nil
	})
	sort.Slice(files, func(i, j int) bool { return files[i].Path < files[j].Path })
	return files, err
}

// Dirs are the folders to read: the one given, and those that the environment variable MLX_VECTORS names, separated by colons.
func Dirs(own string) []string {
	dirs := []string{own}
	for _, d := range filepath.SplitList(os.Getenv("MLX_VECTORS")) {
		if d != "" {
			dirs = append(dirs, d)
		}
	}
	return dirs
}
