#include "textflag.h"

// DSB options (Arm ARM, C6.2.82): 13 = LD, 14 = ST.

// func ToDevice()
TEXT ·ToDevice(SB), NOSPLIT, $0-0
	DSB $14
	RET

// func FromDevice()
TEXT ·FromDevice(SB), NOSPLIT, $0-0
	DSB $13
	RET

// func MMIOFlush()
TEXT ·MMIOFlush(SB), NOSPLIT, $0-0
	DSB $14
	RET

// func MMIOStore64(p unsafe.Pointer, v uint64)
TEXT ·MMIOStore64(SB), NOSPLIT, $0-16
	MOVD p+0(FP), R0
	MOVD v+8(FP), R1
	MOVD R1, (R0)
	RET

// func MMIOStore32(p unsafe.Pointer, v uint32)
TEXT ·MMIOStore32(SB), NOSPLIT, $0-12
	MOVD  p+0(FP), R0
	MOVWU v+8(FP), R1
	MOVW  R1, (R0)
	RET

// func MMIOCopy64(dst, src unsafe.Pointer, n int)
TEXT ·MMIOCopy64(SB), NOSPLIT, $0-24
	MOVD dst+0(FP), R0
	MOVD src+8(FP), R1
	MOVD n+16(FP), R2
loop:
	CMP  $8, R2
	BLT  done
	MOVD.P 8(R1), R3
	MOVD.P R3, 8(R0)
	SUB  $8, R2
	B    loop
done:
	RET
