#include "textflag.h"

// func StoreRecord(rec unsafe.Pointer, val uint32)
TEXT ·StoreRecord(SB), NOSPLIT, $0-12
	MOVQ rec+0(FP), AX
	MOVL val+8(FP), CX
	MOVL CX, (AX)
	RET

// func Ring(rec unsafe.Pointer, recVal uint32, reg unsafe.Pointer, val uint64)
TEXT ·Ring(SB), NOSPLIT, $0-32
	MOVQ rec+0(FP), AX
	MOVL recVal+8(FP), CX
	MOVQ reg+16(FP), BX
	MOVQ val+24(FP), DX
	MOVL CX, (AX)
	SFENCE
	MOVQ DX, (BX)
	SFENCE
	RET

// func RingBlueFlame(rec unsafe.Pointer, recVal uint32, reg, src, start, end unsafe.Pointer, chunks int)
TEXT ·RingBlueFlame(SB), NOSPLIT, $0-56
	MOVQ rec+0(FP), AX
	MOVL recVal+8(FP), CX
	MOVQ reg+16(FP), DI
	MOVQ src+24(FP), SI
	MOVQ start+32(FP), R8
	MOVQ end+40(FP), R9
	MOVQ chunks+48(FP), DX
	MOVL CX, (AX)
	SFENCE
chunk:
	MOVQ 0(SI), AX
	MOVQ 8(SI), BX
	MOVQ 16(SI), CX
	MOVQ 24(SI), R10
	MOVQ AX, 0(DI)
	MOVQ BX, 8(DI)
	MOVQ CX, 16(DI)
	MOVQ R10, 24(DI)
	MOVQ 32(SI), AX
	MOVQ 40(SI), BX
	MOVQ 48(SI), CX
	MOVQ 56(SI), R10
	MOVQ AX, 32(DI)
	MOVQ BX, 40(DI)
	MOVQ CX, 48(DI)
	MOVQ R10, 56(DI)
	ADDQ $64, SI
	ADDQ $64, DI
	CMPQ SI, R9
	CMOVQEQ R8, SI
	DECQ DX
	JNE  chunk
	SFENCE
	RET

// func CopyToRegister(reg, src unsafe.Pointer, chunks int)
TEXT ·CopyToRegister(SB), NOSPLIT, $0-24
	MOVQ reg+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ chunks+16(FP), DX
	SFENCE
chunk:
	MOVQ 0(SI), AX
	MOVQ 8(SI), BX
	MOVQ 16(SI), CX
	MOVQ 24(SI), R10
	MOVQ AX, 0(DI)
	MOVQ BX, 8(DI)
	MOVQ CX, 16(DI)
	MOVQ R10, 24(DI)
	MOVQ 32(SI), AX
	MOVQ 40(SI), BX
	MOVQ 48(SI), CX
	MOVQ 56(SI), R10
	MOVQ AX, 32(DI)
	MOVQ BX, 40(DI)
	MOVQ CX, 48(DI)
	MOVQ R10, 56(DI)
	ADDQ $64, SI
	ADDQ $64, DI
	DECQ DX
	JNE  chunk
	SFENCE
	RET

// func Store32(reg unsafe.Pointer, val uint32)
TEXT ·Store32(SB), NOSPLIT, $0-12
	MOVQ reg+0(FP), AX
	MOVL val+8(FP), CX
	MOVL CX, (AX)
	RET

// func Store64(reg unsafe.Pointer, val uint64)
TEXT ·Store64(SB), NOSPLIT, $0-16
	MOVQ reg+0(FP), AX
	MOVQ val+8(FP), CX
	MOVQ CX, (AX)
	RET

// func FromDevice()
TEXT ·FromDevice(SB), NOSPLIT, $0-0
	LFENCE
	RET
