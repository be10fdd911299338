// Arithmetic of vectors of float32 that the encoder needs beyond lanes.h.
#pragma once

#include "../lanes.h"

#define MILLPOND_INLINE inline __attribute__((always_inline))

#ifdef __aarch64__
#include "../arm_neon/vectors.h"
#endif

namespace {

#if defined(__AVX512F__)

MILLPOND_INLINE Floats zeros() { return _mm512_setzero_ps(); }
MILLPOND_INLINE Floats sum_of(Floats x, Floats y) { return _mm512_add_ps(x, y); }
MILLPOND_INLINE Floats difference(Floats x, Floats y) { return _mm512_sub_ps(x, y); }
MILLPOND_INLINE Floats quotient(Floats x, Floats y) { return _mm512_div_ps(x, y); }
MILLPOND_INLINE Floats smaller(Floats x, Floats y) { return _mm512_min_ps(x, y); }
MILLPOND_INLINE Floats magnitude(Floats x) { return _mm512_abs_ps(x); }
MILLPOND_INLINE Floats with_sign_of(Floats size, Floats x) {
  const Floats sign = _mm512_set1_ps(-0.0f);
  return _mm512_or_ps(_mm512_andnot_ps(sign, size), _mm512_and_ps(x, sign));
}
// The smaller one of the magnitude of x and `most`, with the sign of x; `most` for NaN.
MILLPOND_INLINE Floats limited(Floats x, Floats most) { return _mm512_range_ps(x, most, 2); }
MILLPOND_INLINE Floats nearest_integer(Floats x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// Splits x <= 0 into an exponent for scale_by_power and a rest from 0 to 1, which is 0 for -infinity.
MILLPOND_INLINE Floats split_power(Floats x, Floats* rest) {
  *rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  return x;
}
// x * 2^exponent, of an exponent that is not whole with the integer below it; 0 and infinity where it leaves float32.
MILLPOND_INLINE Floats scale_by_power(Floats x, Floats exponent) { return _mm512_scalef_ps(x, exponent); }
MILLPOND_INLINE float largest_of(Floats x) { return _mm512_reduce_max_ps(x); }

// `x` in lanes first..last, elsewhere `other`.
MILLPOND_INLINE Floats within(Floats x, int64_t first, int64_t last, Floats other) {
  if (first < 0) first = 0;
  if (last > kLanes - 1) last = kLanes - 1;
  const __mmask16 lanes = last < first ? 0 : __mmask16(((2u << last) - 1) & ~((1u << first) - 1));
  return _mm512_mask_blend_ps(lanes, other, x);
}

#elif defined(__AVX2__)

MILLPOND_INLINE Floats zeros() { return _mm256_setzero_ps(); }
MILLPOND_INLINE Floats sum_of(Floats x, Floats y) { return _mm256_add_ps(x, y); }
MILLPOND_INLINE Floats difference(Floats x, Floats y) { return _mm256_sub_ps(x, y); }
MILLPOND_INLINE Floats quotient(Floats x, Floats y) { return _mm256_div_ps(x, y); }
MILLPOND_INLINE Floats smaller(Floats x, Floats y) { return _mm256_min_ps(x, y); }
MILLPOND_INLINE Floats magnitude(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
MILLPOND_INLINE Floats with_sign_of(Floats size, Floats x) {
  const Floats sign = _mm256_set1_ps(-0.0f);
  return _mm256_or_ps(_mm256_andnot_ps(sign, size), _mm256_and_ps(x, sign));
}
MILLPOND_INLINE Floats limited(Floats x, Floats most) { return with_sign_of(smaller(magnitude(x), most), x); }
MILLPOND_INLINE Floats nearest_integer(Floats x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
MILLPOND_INLINE Floats split_power(Floats x, Floats* rest) {
  const Floats bounded = _mm256_max_ps(_mm256_set1_ps(-127.0f), x), whole = _mm256_floor_ps(bounded);
  *rest = _mm256_sub_ps(bounded, whole);
  return whole;
}
// Of whole exponents; those below -126 give 0, above 127 the largest power: the callers' arguments end there.
MILLPOND_INLINE Floats scale_by_power(Floats x, Floats exponent) {
  const Floats least = _mm256_set1_ps(-127.0f), most = _mm256_set1_ps(127.0f);
  const Floats bounded = _mm256_min_ps(_mm256_max_ps(exponent, least), most);
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(bounded), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
}
MILLPOND_INLINE float largest_of(Floats x) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

MILLPOND_INLINE Floats within(Floats x, int64_t first, int64_t last, Floats other) {
  if (first < -1) first = -1;
  if (last > kLanes) last = kLanes;
  if (first > kLanes) first = kLanes;
  if (last < -1) last = -1;
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i low = _mm256_cmpgt_epi32(_mm256_set1_epi32(int32_t(first)), lane);
  const __m256i high = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(int32_t(last)));
  return _mm256_blendv_ps(x, other, _mm256_castsi256_ps(_mm256_or_si256(low, high)));
}

#endif

// The first `count` lanes; all of them if there are no more.
MILLPOND_INLINE void store_first(float* to, Floats x, int64_t count) {
  if (count >= kLanes) return store(to, x);
  alignas(64) float lanes[kLanes];
  store(lanes, x);
  for (int64_t i = 0; i < count; i++) to[i] = lanes[i];
}

MILLPOND_INLINE Floats multiply_add(Floats x, float y, float z) { return multiply_add(x, broadcast(y), broadcast(z)); }
MILLPOND_INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
MILLPOND_INLINE int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }
MILLPOND_INLINE int64_t quotient_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace
