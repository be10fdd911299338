// The processor that the kernels are written for, and torch's threads.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define MILLPOND_NATIVE 1
#include <immintrin.h>

// Between these two, functions may use AVX512 with bfloat16; outside, every x86-64 runs them.
#ifdef __clang__
#define MILLPOND_BEGIN                                                                                              \
  _Pragma("clang attribute push(__attribute__((target(\"avx512f,avx512bw,avx512vl,avx512dq,avx512bf16\"))), "      \
          "apply_to = function)")
#define MILLPOND_END _Pragma("clang attribute pop")
#else
#define MILLPOND_BEGIN \
  _Pragma("GCC push_options") _Pragma("GCC target(\"avx512f,avx512bw,avx512vl,avx512dq,avx512bf16\")")
#define MILLPOND_END _Pragma("GCC pop_options")
#endif

// The threads that torch has started, where they are those of GCC's OpenMP: a second pool would fight with them.
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));

MILLPOND_BEGIN
namespace {

using std::int32_t;
using std::int64_t;
using std::uint16_t;

constexpr int kLanes = 16;  // float32 of a vector

// bfloat16 as float32.
inline __m512 widened(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline __m512 read(const uint16_t* from) { return widened(_mm256_loadu_si256((const __m256i*)from)); }

inline void write(uint16_t* to, __m512 numbers) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(numbers));
}

// `work` in up to so many threads at once, each with the same argument.
inline void run_team(void (*work)(void*), void* team, int64_t threads) {
  if (threads > 1 && GOMP_parallel)
    GOMP_parallel(work, team, (unsigned)threads, 0);
  else
    work(team);
}

}  // namespace
MILLPOND_END

#else
#define MILLPOND_NATIVE 0
#endif
