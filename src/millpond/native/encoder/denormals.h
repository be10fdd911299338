// Denormal numbers are 0 while a kernel runs: with them an instruction takes a hundred cycles.
#pragma once

#include <cstdint>

#ifndef __aarch64__
#include <immintrin.h>
#endif

namespace {

#ifdef __aarch64__

struct FlushDenormals {
  std::uint64_t before;
  FlushDenormals() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    set(before | 1 << 24);
  }
  ~FlushDenormals() { set(before); }
  static void set(std::uint64_t control) { __asm__ volatile("msr fpcr, %0" ::"r"(control) : "memory"); }
};

#else

struct FlushDenormals {
  unsigned before = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(before | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before); }
};

#endif

}  // namespace
