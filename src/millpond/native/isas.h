// The instruction sets, in ascending order: kernels of a later one replace those of the sets before it. A row here and a
// folder x86_<name> or arm_<name> are all that one needs: the build (hatch_build.py), library.py and the tests read this
// table too.
//
// ISA(name, the set that it extends, its compiler flags beside those of that one, an instruction of it that shows
//     whether compiler and assembler know it, what a processor must have and the operating system must save)
#pragma once

#if defined(__x86_64__)
#define MILLPOND_ISAS(ISA)                                                                                             \
  /* FMA, AVX, F16C; AVX2, BMI2; xmm and ymm are saved */                                                              \
  ISA(avx2, none, "-mavx2 -mfma -mf16c -mbmi2", "vpmaddwd %ymm0, %ymm0, %ymm0",                                        \
      has(basic.ecx, bit(12) | bit(28) | bit(29)) && has(features.ebx, bit(5) | bit(8)) && has(saved, 0x6))            \
  /* integer products of 256 bits: Intel has them without AVX512, servers before 2023 have AVX512 without them */      \
  ISA(avxvnni, avx2, "-mavxvnni", "{vex} vpdpbusd %ymm0, %ymm0, %ymm0", has(more.eax, bit(4)))                         \
  /* F, DQ, BW, VL; VBMI, VNNI; mask registers and zmm are saved */                                                    \
  ISA(avx512, avx2, "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni", "vpdpbusd %zmm0, %zmm0, %zmm0",         \
      has(features.ebx, bit(16) | bit(17) | bit(30) | bit(31)) && has(features.ecx, bit(11)) && has(saved, 0xe6))      \
  ISA(avx512bf16, avx512, "-mavx512bf16", "vdpbf16ps %zmm0, %zmm0, %zmm0", has(more.eax, bit(5)))                      \
  /* BF16, TILE, INT8; both tile states are saved */                                                                   \
  ISA(amx, avx512bf16, "-mamx-tile -mamx-int8 -mamx-bf16", "tdpbssd %tmm0, %tmm1, %tmm2",                              \
      has(features.edx, bit(22) | bit(24) | bit(25)) && has(saved, 0x600e6) && tiles_granted())
#elif defined(__aarch64__)
// GCC needs the architecture, and warns that it takes no processor beside it; zig takes a processor alone. The last one of each counts.
#define MILLPOND_ISAS(ISA)                                                                                             \
  ISA(neon, none, "", "fmla v0.4s, v0.4s, v0.4s", true)                                                                      \
  ISA(dotprod, neon, "-march=armv8.2-a+dotprod -mcpu=generic+dotprod", "sdot v0.4s, v0.16b, v0.16b", features.dotprod)       \
  ISA(bf16, dotprod, "-march=armv8.2-a+dotprod+bf16+i8mm -mcpu=generic+dotprod+bf16+i8mm", "bfmmla v0.4s, v0.8h, v0.8h",        \
      features.bf16 && features.i8mm)
#else
#define MILLPOND_ISAS(ISA)
#endif
