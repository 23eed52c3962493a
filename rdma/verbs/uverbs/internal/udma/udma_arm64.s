#include "textflag.h"

// DSB options (Arm ARM, DSB <option>): 14 = ST, 13 = LD.
#define DSB_ST DSB $14
#define DSB_LD DSB $13

// func StoreRecord(rec unsafe.Pointer, val uint32)
TEXT ·StoreRecord(SB), NOSPLIT, $0-12
	MOVD  rec+0(FP), R0
	MOVWU val+8(FP), R1
	DSB_ST
	MOVW  R1, (R0)
	RET

// func Ring(rec unsafe.Pointer, recVal uint32, reg unsafe.Pointer, val uint64)
TEXT ·Ring(SB), NOSPLIT, $0-32
	MOVD  rec+0(FP), R0
	MOVWU recVal+8(FP), R1
	MOVD  reg+16(FP), R2
	MOVD  val+24(FP), R3
	DSB_ST
	MOVW  R1, (R0)
	DSB_ST
	MOVD  R3, (R2)
	DSB_ST
	RET

// func RingBlueFlame(rec unsafe.Pointer, recVal uint32, reg, src, start, end unsafe.Pointer, chunks int)
TEXT ·RingBlueFlame(SB), NOSPLIT, $0-56
	MOVD  rec+0(FP), R0
	MOVWU recVal+8(FP), R1
	MOVD  reg+16(FP), R2
	MOVD  src+24(FP), R3
	MOVD  start+32(FP), R4
	MOVD  end+40(FP), R5
	MOVD  chunks+48(FP), R6
	DSB_ST
	MOVW  R1, (R0)
	DSB_ST
chunk:
	MOVD $8, R7
word:
	MOVD.P 8(R3), R8
	MOVD.P R8, 8(R2)
	SUBS $1, R7
	BNE  word
	CMP  R3, R5
	CSEL EQ, R4, R3, R3
	SUBS $1, R6
	BNE  chunk
	DSB_ST
	RET

// func CopyToRegister(reg, src unsafe.Pointer, chunks int)
TEXT ·CopyToRegister(SB), NOSPLIT, $0-24
	MOVD reg+0(FP), R2
	MOVD src+8(FP), R3
	MOVD chunks+16(FP), R6
	LSL  $3, R6
	DSB_ST
word:
	MOVD.P 8(R3), R8
	MOVD.P R8, 8(R2)
	SUBS $1, R6
	BNE  word
	DSB_ST
	RET

// func Store32(reg unsafe.Pointer, val uint32)
TEXT ·Store32(SB), NOSPLIT, $0-12
	MOVD  reg+0(FP), R0
	MOVWU val+8(FP), R1
	DSB_ST
	MOVW  R1, (R0)
	RET

// func Store64(reg unsafe.Pointer, val uint64)
TEXT ·Store64(SB), NOSPLIT, $0-16
	MOVD reg+0(FP), R0
	MOVD val+8(FP), R1
	DSB_ST
	MOVD R1, (R0)
	RET

// func FromDevice()
TEXT ·FromDevice(SB), NOSPLIT, $0-0
	DSB_LD
	RET
