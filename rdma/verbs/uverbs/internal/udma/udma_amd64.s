#include "textflag.h"

// func ToDevice()
TEXT ·ToDevice(SB), NOSPLIT, $0-0
	RET

// func FromDevice()
TEXT ·FromDevice(SB), NOSPLIT, $0-0
	LFENCE
	RET

// func MMIOFlush()
TEXT ·MMIOFlush(SB), NOSPLIT, $0-0
	SFENCE
	RET

// func MMIOStore64(p unsafe.Pointer, v uint64)
TEXT ·MMIOStore64(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), AX
	MOVQ v+8(FP), BX
	MOVQ BX, (AX)
	RET

// func MMIOStore32(p unsafe.Pointer, v uint32)
TEXT ·MMIOStore32(SB), NOSPLIT, $0-12
	MOVQ p+0(FP), AX
	MOVL v+8(FP), BX
	MOVL BX, (AX)
	RET

// func MMIOCopy64(dst, src unsafe.Pointer, n int)
TEXT ·MMIOCopy64(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
loop:
	CMPQ CX, $8
	JLT  done
	MOVQ (SI), AX
	MOVQ AX, (DI)
	ADDQ $8, SI
	ADDQ $8, DI
	SUBQ $8, CX
	JMP  loop
done:
	RET
