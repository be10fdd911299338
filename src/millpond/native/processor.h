// The instruction set that the kernels are written for, bfloat16 loads and stores, and torch's thread pool.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define MILLPOND_NATIVE 1
#include <immintrin.h>

// Code between MILLPOND_BEGIN and MILLPOND_END may use AVX512-BF16; any x86-64 processor runs the rest.
#ifdef __clang__
// One literal: clang joins none in a _Pragma.
#define MILLPOND_BEGIN \
  _Pragma("clang attribute push(__attribute__((target(\"avx512f,avx512bw,avx512vl,avx512dq,avx512bf16\"))), apply_to = function)")
#define MILLPOND_END _Pragma("clang attribute pop")
#else
#define MILLPOND_BEGIN \
  _Pragma("GCC push_options") _Pragma("GCC target(\"avx512f,avx512bw,avx512vl,avx512dq,avx512bf16\")")
#define MILLPOND_END _Pragma("GCC pop_options")
#endif

// GCC's OpenMP, if torch brings it: torch's own threads are used, since a second pool would compete with them for the
// cores.
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));

MILLPOND_BEGIN
namespace {

using std::int32_t;
using std::int64_t;
using std::uint16_t;

constexpr int kLanes = 16;  // float32 numbers in a vector

// bfloat16 to float32.
inline __m512 to_float32(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline __m512 load_bf16(const uint16_t* from) { return to_float32(_mm256_loadu_si256((const __m256i*)from)); }

inline void store_bf16(uint16_t* to, __m512 numbers) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(numbers));
}

// Calls `work(job)` in at most `threads` threads at once. They share the job and take parts of it by its counter.
inline void run_parallel(void (*work)(void*), void* job, int64_t threads) {
  if (threads > 1 && GOMP_parallel)
    GOMP_parallel(work, job, (unsigned)threads, 0);
  else
    work(job);
}

}  // namespace
MILLPOND_END

#else
#define MILLPOND_NATIVE 0
#endif
