// Vectors of 32-bit lanes for ARM: 8, in two registers. So units have as many columns as with AVX2.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace {

using std::int32_t;
using std::int64_t;
using std::uint16_t;
using std::uint32_t;

constexpr int kLanes = 8;
struct Floats {
  float32x4_t a, b;
};
struct Ints {
  int32x4_t a, b;
};

inline Floats load(const float* from) { return {vld1q_f32(from), vld1q_f32(from + 4)}; }
inline Ints load_bits(const void* from) {
  const auto* at = (const uint8_t*)from;  // may be at any address
  return {vreinterpretq_s32_u8(vld1q_u8(at)), vreinterpretq_s32_u8(vld1q_u8(at + 16))};
}
inline void store(float* to, Floats x) {
  vst1q_f32(to, x.a);
  vst1q_f32(to + 4, x.b);
}
inline void store_bits(void* to, Ints x) {
  auto* at = (uint8_t*)to;
  vst1q_u8(at, vreinterpretq_u8_s32(x.a));
  vst1q_u8(at + 16, vreinterpretq_u8_s32(x.b));
}
inline Floats broadcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Ints broadcast_bits(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline Floats scaled(Floats x, Floats y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
inline Floats multiply_add(Floats x, Floats y, Floats sum) {
  return {vfmaq_f32(sum.a, x.a, y.a), vfmaq_f32(sum.b, x.b, y.b)};
}
inline Floats as_floats(Ints x) { return {vreinterpretq_f32_s32(x.a), vreinterpretq_f32_s32(x.b)}; }
inline Ints as_ints(Floats x) { return {vreinterpretq_s32_f32(x.a), vreinterpretq_s32_f32(x.b)}; }
inline Floats to_floats(Ints x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b)}; }

// The larger of each pair; `x` where one of them is NaN: FMAX would give the NaN, FMAXNM the other one.
inline float32x4_t maximum(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(y, x), y, x); }
inline Floats maximum(Floats x, Floats y) { return {maximum(x.a, y.a), maximum(x.b, y.b)}; }

inline Floats load_first(const float* from, int64_t count) {
  alignas(16) float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; i++) lanes[i] = from[i];
  return load(lanes);
}

struct NanLanes {
  uint32x4_t a = vdupq_n_u32(0), b = vdupq_n_u32(0);  // of the numbers that equal themselves, inverted
  void add(Floats x) {
    a = vornq_u32(a, vceqq_f32(x.a, x.a));
    b = vornq_u32(b, vceqq_f32(x.b, x.b));
  }
  Floats put_into(Floats x) const {
    const float32x4_t nan = vdupq_n_f32(__builtin_nanf(""));
    return {vbslq_f32(a, nan, x.a), vbslq_f32(b, nan, x.b)};
  }
};

inline float sum_of(Floats x) {
  const float32x4_t four = vaddq_f32(x.a, x.b);
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

}  // namespace
