package packet

const (
	// Port is the UDP destination port of RoCE v2 (IBA annex A17).
	Port = 4791

	// Lengths of the headers and of the ICRC, in bytes (IBA vol. 1, 9.2 to 9.4).
	BTHLen  = 12
	RETHLen = 16
	AETHLen = 4
	DETHLen = 8
	ImmLen  = 4
	IETHLen = 4
	ICRCLen = 4

	// HeaderMax bounds BTH plus extension headers of every packet that this stack builds: BTH, RETH, ImmDt.
	HeaderMax = BTHLen + RETHLen + ImmLen
	// TrailerMax bounds padding plus ICRC.
	TrailerMax = 3 + ICRCLen
	// PayloadMax is the largest path MTU (code 5).
	PayloadMax = 4096
	// Max is the longest packet that Parse takes: any header, the largest payload, ICRC. The longest
	// extension header is AtomicETH's 28 bytes.
	Max = BTHLen + 28 + ImmLen + PayloadMax + ICRCLen

	// DefaultPKey is the full-member key of the default partition.
	DefaultPKey = 0xffff
)
