// Arithmetic of vectors of float32 that the encoder needs beyond lanes.h.
#pragma once

#include "lanes.h"

namespace {

MILLPOND_INLINE Floats zeros() { return broadcast(0.0f); }
MILLPOND_INLINE Floats sum_of(Floats x, Floats y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
MILLPOND_INLINE Floats difference(Floats x, Floats y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
MILLPOND_INLINE Floats quotient(Floats x, Floats y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
// The smaller of each pair; `y` where one of them is NaN.
MILLPOND_INLINE float32x4_t smaller(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
MILLPOND_INLINE Floats smaller(Floats x, Floats y) { return {smaller(x.a, y.a), smaller(x.b, y.b)}; }
MILLPOND_INLINE Floats magnitude(Floats x) { return {vabsq_f32(x.a), vabsq_f32(x.b)}; }
MILLPOND_INLINE Floats with_sign_of(Floats size, Floats x) {
  const uint32x4_t sign = vdupq_n_u32(0x80000000u);
  return {vbslq_f32(sign, x.a, size.a), vbslq_f32(sign, x.b, size.b)};
}
// The smaller one of the magnitude of x and `most`, with the sign of x; `most` for NaN.
MILLPOND_INLINE Floats limited(Floats x, Floats most) { return with_sign_of(smaller(magnitude(x), most), x); }
MILLPOND_INLINE Floats nearest_integer(Floats x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b)}; }

// Splits x <= 0 into an exponent for scale_by_power and a rest from 0 to 1, which is 0 for -infinity.
MILLPOND_INLINE Floats split_power(Floats x, Floats* rest) {
  const Floats bounded = maximum(x, broadcast(-127.0f)), whole{vrndmq_f32(bounded.a), vrndmq_f32(bounded.b)};
  *rest = difference(bounded, whole);
  return whole;
}

// Of whole exponents; those below -126 give 0, above 127 the largest power: the callers' arguments end there.
MILLPOND_INLINE float32x4_t power_of_two(float32x4_t exponent) {
  const float32x4_t bounded = smaller(maximum(vdupq_n_f32(-127.0f), exponent), vdupq_n_f32(127.0f));
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(bounded), vdupq_n_s32(127)), 23));
}
MILLPOND_INLINE Floats scale_by_power(Floats x, Floats exponent) {
  return {vmulq_f32(x.a, power_of_two(exponent.a)), vmulq_f32(x.b, power_of_two(exponent.b))};
}

MILLPOND_INLINE float largest_of(Floats x) {
  const float32x4_t four = maximum(x.b, x.a);
  const float32x4_t two = maximum(vextq_f32(four, four, 2), four);
  return vgetq_lane_f32(maximum(vextq_f32(two, two, 1), two), 0);
}

// `x` in lanes first..last, elsewhere `other`.
MILLPOND_INLINE Floats within(Floats x, int64_t first, int64_t last, Floats other) {
  if (first < -1) first = -1;
  if (last > kLanes) last = kLanes;
  if (first > kLanes) first = kLanes;
  if (last < -1) last = -1;
  alignas(16) static const int32_t kLane[] = {0, 1, 2, 3, 4, 5, 6, 7};
  const int32x4_t low = vdupq_n_s32(int32_t(first)), high = vdupq_n_s32(int32_t(last));
  const auto chosen = [&](int32x4_t lane, float32x4_t yes, float32x4_t no) __attribute__((always_inline)) {
    return vbslq_f32(vandq_u32(vcgeq_s32(lane, low), vcleq_s32(lane, high)), yes, no);
  };
  return {chosen(vld1q_s32(kLane), x.a, other.a), chosen(vld1q_s32(kLane + 4), x.b, other.b)};
}

// The exponents of normal positive numbers.
MILLPOND_INLINE float32x4_t exponent_of(float32x4_t x) {
  const int32x4_t biased = vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_f32(x), 23));
  return vcvtq_f32_s32(vsubq_s32(biased, vdupq_n_s32(127)));
}
MILLPOND_INLINE Floats exponent_of(Floats x) { return {exponent_of(x.a), exponent_of(x.b)}; }

// Lane i: that of `x` with the number at[i] - first, which is below 8.
MILLPOND_INLINE Floats permuted(Floats x, Ints at, int32_t first) {
  const uint8x16x2_t bytes = {{vreinterpretq_u8_f32(x.a), vreinterpretq_u8_f32(x.b)}};
  const auto four = [&](int32x4_t numbers) __attribute__((always_inline)) {
    const int32x4_t lane = vsubq_s32(numbers, vdupq_n_s32(first));
    const int32x4_t places = vmlaq_n_s32(vdupq_n_s32(0x03020100), lane, 0x04040404);
    return vreinterpretq_f32_u8(vqtbl2q_u8(bytes, vreinterpretq_u8_s32(places)));
  };
  return {four(at.a), four(at.b)};
}

// Transposes 8 rows of 8 numbers.
MILLPOND_INLINE void transpose(float32x4_t r[4]) {
  const float32x4_t t0 = vtrn1q_f32(r[0], r[1]), t1 = vtrn2q_f32(r[0], r[1]);
  const float32x4_t t2 = vtrn1q_f32(r[2], r[3]), t3 = vtrn2q_f32(r[2], r[3]);
  const auto low = [](float32x4_t x, float32x4_t y) __attribute__((always_inline)) {
    return vreinterpretq_f32_f64(vtrn1q_f64(vreinterpretq_f64_f32(x), vreinterpretq_f64_f32(y)));
  };
  const auto high = [](float32x4_t x, float32x4_t y) __attribute__((always_inline)) {
    return vreinterpretq_f32_f64(vtrn2q_f64(vreinterpretq_f64_f32(x), vreinterpretq_f64_f32(y)));
  };
  r[0] = low(t0, t2);
  r[1] = low(t1, t3);
  r[2] = high(t0, t2);
  r[3] = high(t1, t3);
}
MILLPOND_INLINE void transpose(Floats rows[8]) {
  float32x4_t parts[4][4];  // [2 row | column halves][4 rows]
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    parts[0][i] = rows[i].a;
    parts[1][i] = rows[i + 4].a;
    parts[2][i] = rows[i].b;
    parts[3][i] = rows[i + 4].b;
  }
#pragma GCC unroll 4
  for (int part = 0; part < 4; part++) transpose(parts[part]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    rows[i] = {parts[0][i], parts[1][i]};
    rows[i + 4] = {parts[2][i], parts[3][i]};
  }
}

MILLPOND_INLINE void keep(Floats& x) { __asm__ volatile("" : "+w"(x.a), "+w"(x.b)); }

}  // namespace
