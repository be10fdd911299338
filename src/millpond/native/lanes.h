// Vectors of 32-bit lanes: 16 with AVX512, 8 with AVX2 and NEON. Same source, other compiler flags.
#pragma once

#ifdef __aarch64__
#include "arm_neon/lanes.h"
#else
#include <immintrin.h>

#include <cstdint>

namespace {

using std::int64_t;
using std::uint16_t;
using std::uint32_t;

#ifdef __AVX512F__

constexpr int kLanes = 16;
using Floats = __m512;
using Ints = __m512i;

inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Ints load_bits(const void* from) { return _mm512_loadu_si512(from); }
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline void store_bits(void* to, Ints x) { _mm512_storeu_si512(to, x); }
inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
inline Ints broadcast_bits(int32_t x) { return _mm512_set1_epi32(x); }
inline Floats scaled(Floats x, Floats y) { return _mm512_mul_ps(x, y); }
inline Floats multiply_add(Floats x, Floats y, Floats sum) { return _mm512_fmadd_ps(x, y, sum); }
inline Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }
inline Ints as_ints(Floats x) { return _mm512_castps_si512(x); }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
// The larger of each pair; `x` where one of them is NaN.
inline Floats maximum(Floats x, Floats y) { return _mm512_max_ps(y, x); }
inline Floats load_first(const float* from, int64_t count) {
  return _mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from);
}

struct NanLanes {
  __mmask16 lanes = 0;
  void add(Floats x) { lanes |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
  Floats put_into(Floats x) const { return _mm512_mask_blend_ps(lanes, x, _mm512_set1_ps(__builtin_nanf(""))); }
};

inline float sum_of(Floats x) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
#else

constexpr int kLanes = 8;
using Floats = __m256;
using Ints = __m256i;

inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline Ints load_bits(const void* from) { return _mm256_loadu_si256((const __m256i*)from); }
inline void store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
inline void store_bits(void* to, Ints x) { _mm256_storeu_si256((__m256i*)to, x); }
inline Floats broadcast(float x) { return _mm256_set1_ps(x); }
inline Ints broadcast_bits(int32_t x) { return _mm256_set1_epi32(x); }
inline Floats scaled(Floats x, Floats y) { return _mm256_mul_ps(x, y); }
inline Floats multiply_add(Floats x, Floats y, Floats sum) { return _mm256_fmadd_ps(x, y, sum); }
inline Floats as_floats(Ints x) { return _mm256_castsi256_ps(x); }
inline Ints as_ints(Floats x) { return _mm256_castps_si256(x); }
inline Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Floats maximum(Floats x, Floats y) { return _mm256_max_ps(y, x); }
inline Floats load_first(const float* from, int64_t count) {
  alignas(32) static const int32_t kMask[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return _mm256_maskload_ps(from, _mm256_loadu_si256((const __m256i*)(kMask + 8 - count)));
}

struct NanLanes {
  __m256 lanes = _mm256_setzero_ps();
  void add(Floats x) { lanes = _mm256_or_ps(lanes, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
  Floats put_into(Floats x) const { return _mm256_blendv_ps(x, _mm256_set1_ps(__builtin_nanf("")), lanes); }
};

inline float sum_of(Floats x) {
  const __m256 half = x;
#endif
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

// The sum of each lane, and the products of its four unsigned bytes with four signed ones.
#if defined(__AVX512VNNI__)
#define MILLPOND_BYTE_PRODUCTS
inline Ints add_byte_products(Ints sum, Ints bytes, Ints factors) { return _mm512_dpbusd_epi32(sum, bytes, factors); }
#elif defined(__AVXVNNI__)
#define MILLPOND_BYTE_PRODUCTS
inline Ints add_byte_products(Ints sum, Ints bytes, Ints factors) { return _mm256_dpbusd_avx_epi32(sum, bytes, factors); }
#endif

}  // namespace

#endif
