#include "textflag.h"

// CRC-32 by folding (V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009), 32 bytes a
// register with VPCLMULQDQ. Eight accumulators Y0 to Y7 stand for the last 256 bytes of a message that is congruent to
// what has been read; each turn multiplies them by x^2048 modulo P and adds the next 256 bytes. At the end they are folded into one.

// FOLD multiplies accumulator a by the constants in Y15 and leaves the product in a; t is scratch.
#define FOLD(a, t) \
	VPCLMULQDQ $0x00, Y15, a, t; \
	VPCLMULQDQ $0x11, Y15, a, a; \
	VPXOR      t, a, a

// LOADING and COPYING read 32 bytes at off; COPYING also writes them.
#define LOADING(off, d) \
	VMOVDQU off(SI), d

#define COPYING(off, d) \
	VMOVDQU off(SI), d; \
	VMOVDQU d, off(DI)

#define FIRST(step) \
	step(0, Y0); \
	step(32, Y1); \
	step(64, Y2); \
	step(96, Y3); \
	step(128, Y4); \
	step(160, Y5); \
	step(192, Y6); \
	step(224, Y7); \
	VPXOR Y14, Y0, Y0

#define NEXT(step, off, a, t, d) \
	FOLD(a, t); \
	step(off, d); \
	VPXOR d, a, a

#define BLOCK(step) \
	NEXT(step, 0, Y0, Y8, Y9); \
	NEXT(step, 32, Y1, Y10, Y11); \
	NEXT(step, 64, Y2, Y12, Y13); \
	NEXT(step, 96, Y3, Y8, Y9); \
	NEXT(step, 128, Y4, Y10, Y11); \
	NEXT(step, 160, Y5, Y12, Y13); \
	NEXT(step, 192, Y6, Y8, Y9); \
	NEXT(step, 224, Y7, Y10, Y11)

// REDUCE folds Y0 to Y7 into Y7 by the constants at 16(DX) and stores it at R8.
#define REDUCE \
	VBROADCASTI128 16(DX), Y15; \
	FOLD(Y0, Y8); \
	VPXOR Y0, Y1, Y1; \
	FOLD(Y1, Y8); \
	VPXOR Y1, Y2, Y2; \
	FOLD(Y2, Y8); \
	VPXOR Y2, Y3, Y3; \
	FOLD(Y3, Y8); \
	VPXOR Y3, Y4, Y4; \
	FOLD(Y4, Y8); \
	VPXOR Y4, Y5, Y5; \
	FOLD(Y5, Y8); \
	VPXOR Y5, Y6, Y6; \
	FOLD(Y6, Y8); \
	VPXOR Y6, Y7, Y7; \
	VMOVDQU Y7, (R8)

// AHEAD asks for the 256 bytes at R9, as many as are being copied: the loads of what comes next run beside the folding.
#define AHEAD \
	PREFETCHT0 (R9); \
	PREFETCHT0 64(R9); \
	PREFETCHT0 128(R9); \
	PREFETCHT0 192(R9); \
	ADDQ       $256, R9

// func foldCopy(dst, src *byte, n int, reg uint32, k *[4]uint64, rest *[32]byte, ahead uint64)
TEXT ·foldCopy(SB), NOSPLIT, $0-56
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	MOVL reg+24(FP), AX
	MOVQ k+32(FP), DX
	MOVQ rest+40(FP), R8
	MOVQ ahead+48(FP), R9
	TESTQ R9, R9
	CMOVQEQ SI, R9 // nothing to fetch but what is being read anyway
	VMOVD AX, X14
	VBROADCASTI128 (DX), Y15
	AHEAD
	FIRST(COPYING)
	SUBQ $256, CX
	JZ   done
	PCALIGN $32
loop:
	ADDQ $256, SI
	ADDQ $256, DI
	AHEAD
	BLOCK(COPYING)
	SUBQ $256, CX
	JNZ  loop
done:
	REDUCE
	VZEROUPPER
	RET

// func fold(src *byte, n int, reg uint32, k *[4]uint64, rest *[32]byte)
TEXT ·fold(SB), NOSPLIT, $0-40
	MOVQ src+0(FP), SI
	MOVQ n+8(FP), CX
	MOVL reg+16(FP), AX
	MOVQ k+24(FP), DX
	MOVQ rest+32(FP), R8
	VMOVD AX, X14
	VBROADCASTI128 (DX), Y15
	FIRST(LOADING)
	SUBQ $256, CX
	JZ   done
	PCALIGN $32
loop:
	ADDQ $256, SI
	BLOCK(LOADING)
	SUBQ $256, CX
	JNZ  loop
done:
	REDUCE
	VZEROUPPER
	RET

// func cpuid7() (ecx uint32): CPUID leaf 7, subleaf 0
TEXT ·cpuid7(SB), NOSPLIT, $0-4
	MOVL $0, AX
	CPUID
	CMPL AX, $7
	JLT  none
	MOVL $7, AX
	MOVL $0, CX
	CPUID
	MOVL CX, ecx+0(FP)
	RET
none:
	MOVL $0, ecx+0(FP)
	RET

// func copyBlocks(dst, src *byte, n int): n bytes, a multiple of 128
TEXT ·copyBlocks(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	PCALIGN $32
loop:
	VMOVDQU (SI), Y0
	VMOVDQU 32(SI), Y1
	VMOVDQU 64(SI), Y2
	VMOVDQU 96(SI), Y3
	VMOVDQU Y0, (DI)
	VMOVDQU Y1, 32(DI)
	VMOVDQU Y2, 64(DI)
	VMOVDQU Y3, 96(DI)
	ADDQ $128, SI
	ADDQ $128, DI
	SUBQ $128, CX
	JNZ  loop
	VZEROUPPER
	RET

// func prefetchLines(addr uint64, n int): n lines of 64 bytes
TEXT ·prefetchLines(SB), NOSPLIT, $0-16
	MOVQ addr+0(FP), SI
	MOVQ n+8(FP), CX
loop:
	PREFETCHT0 (SI)
	ADDQ $64, SI
	DECQ CX
	JNZ  loop
	RET
