// For approximate search: vectors of 16 lanes, and products of int8 rows with 16 packed rows at a time.
#pragma once

#include <arm_neon.h>

#include <cstring>

#include "../lane_tiles.h"

namespace {
namespace approximate {

constexpr int kRows = 4, kParts = 4;  // rows multiplied at a time; registers of a vector

struct Floats {
  float32x4_t v[kParts];
};
struct Ints {
  int32x4_t v[kParts];
};
struct Mask {
  uint32x4_t v[kParts];
};

// A vector of what `part(i)` gives for each of its registers.
template <class Vector, class Part>
inline __attribute__((always_inline)) Vector each(const Part& part) {
  return {{part(0), part(1), part(2), part(3)}};
}

inline Floats load(const float* from) {
  return each<Floats>([&](int i) { return vld1q_f32(from + 4 * i); });
}
inline Ints load(const int32_t* from) {
  return each<Ints>([&](int i) { return vld1q_s32(from + 4 * i); });
}
inline void store(float* to, Floats x) {
  for (int i = 0; i < kParts; i++) vst1q_f32(to + 4 * i, x.v[i]);
}
inline void store(int32_t* to, Ints x) {
  for (int i = 0; i < kParts; i++) vst1q_s32(to + 4 * i, x.v[i]);
}
inline Floats fill(float x) {
  return each<Floats>([&](int) { return vdupq_n_f32(x); });
}
inline Ints fill(int32_t x) {
  return each<Ints>([&](int) { return vdupq_n_s32(x); });
}
inline Floats operator+(Floats x, Floats y) {
  return each<Floats>([&](int i) { return vaddq_f32(x.v[i], y.v[i]); });
}
inline Floats operator-(Floats x, Floats y) {
  return each<Floats>([&](int i) { return vsubq_f32(x.v[i], y.v[i]); });
}
inline Floats operator*(Floats x, Floats y) {
  return each<Floats>([&](int i) { return vmulq_f32(x.v[i], y.v[i]); });
}
inline Ints operator-(Ints x, Ints y) {
  return each<Ints>([&](int i) { return vsubq_s32(x.v[i], y.v[i]); });
}
inline Floats multiply_add(Floats x, Floats y, Floats z) {
  return each<Floats>([&](int i) { return vfmaq_f32(z.v[i], x.v[i], y.v[i]); });
}
inline Mask greater(Floats x, Floats y) {
  return each<Mask>([&](int i) { return vcgtq_f32(x.v[i], y.v[i]); });
}
inline Floats choose(Mask mask, Floats yes, Floats no) {
  return each<Floats>([&](int i) { return vbslq_f32(mask.v[i], yes.v[i], no.v[i]); });
}
inline Ints choose(Mask mask, Ints yes, Ints no) {
  return each<Ints>([&](int i) { return vbslq_s32(mask.v[i], yes.v[i], no.v[i]); });
}
inline Floats larger(Floats x, Floats y) { return choose(greater(x, y), x, y); }
inline Floats to_floats(Ints x) {
  return each<Floats>([&](int i) { return vcvtq_f32_s32(x.v[i]); });
}
inline float sum(Floats x) {
  const float32x4_t four = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
// Rounded to the nearest even integer, 0 to 255.
inline void store_bytes(uint8_t* to, Floats x) {
  const auto words = [&](int i) { return vqmovun_s32(vcvtnq_s32_f32(x.v[i])); };
  const uint16x8_t low = vcombine_u16(words(0), words(1)), high = vcombine_u16(words(2), words(3));
  vst1q_u8(to, vcombine_u8(vqmovn_u16(low), vqmovn_u16(high)));
}

#ifdef __ARM_FEATURE_MATMUL_INT8

// Sums of four products in each lane. One side is unsigned.
template <bool kSignedLanes>
inline int32x4_t dot(int32x4_t sum, uint8x16_t row, uint8x16_t lane) {
  return kSignedLanes ? vusdotq_s32(sum, row, vreinterpretq_s8_u8(lane))
                      : vusdotq_s32(sum, lane, vreinterpretq_s8_u8(row));
}

#elif defined(__ARM_FEATURE_DOTPROD)

// Both sides are signed: what 128 less in the unsigned one takes away is added again.
template <bool kSignedLanes>
inline int32x4_t dot(int32x4_t sum, uint8x16_t row, uint8x16_t lane) {
  const int8x16_t is_signed = vreinterpretq_s8_u8(kSignedLanes ? lane : row), half = vdupq_n_s8(64);
  const int8x16_t shifted = vreinterpretq_s8_u8(veorq_u8(kSignedLanes ? row : lane, vdupq_n_u8(0x80)));
  return vdotq_s32(vdotq_s32(vdotq_s32(sum, is_signed, shifted), is_signed, half), is_signed, half);
}

#else

template <bool kSigned>
inline int16x8_t widened(uint8x8_t bytes) {
  return kSigned ? vmovl_s8(vreinterpret_s8_u8(bytes)) : vreinterpretq_s16_u16(vmovl_u8(bytes));
}

// Of numbers widened to 16 bits: all of it is exact.
template <bool kSignedLanes>
inline int32x4_t dot(int32x4_t sum, uint8x16_t row, uint8x16_t lane) {
  const auto half = [](uint8x8_t row, uint8x8_t lane) __attribute__((always_inline)) {
    const int16x8_t x = widened<!kSignedLanes>(row), y = widened<kSignedLanes>(lane);
    return vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
  };
  const int32x4_t low = half(vget_low_u8(row), vget_low_u8(lane)), high = half(vget_high_u8(row), vget_high_u8(lane));
  return vaddq_s32(sum, vpaddq_s32(low, high));
}

#endif

// out[r][t] = the product of row r with the 16 rows of tile t. The rows are unsigned if the lanes are signed, else signed.
template <int kTiles, bool kSignedLanes>
inline void multiply(uint8_t const* const* rows, const uint8_t* packed, int64_t groups, Ints (&out)[kRows][kTiles]) {
  for (int t = 0; t < kTiles; t++) {
    const uint8_t* tile = packed + t * groups * kTileGroup;
    int32x4_t sums[kRows][kParts];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
      for (int i = 0; i < kParts; i++) sums[r][i] = vdupq_n_s32(0);
    for (int64_t k = 0; k < groups; k++, tile += kTileGroup) {
      uint8x16_t row[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) {
        uint32_t columns;
        std::memcpy(&columns, rows[r] + k * kGroup, sizeof columns);
        row[r] = vreinterpretq_u8_u32(vdupq_n_u32(columns));
      }
#pragma GCC unroll 4
      for (int i = 0; i < kParts; i++) {
        const uint8x16_t lane = vld1q_u8(tile + 16 * i);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; r++) sums[r][i] = dot<kSignedLanes>(sums[r][i], row[r], lane);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
      for (int i = 0; i < kParts; i++) out[r][t].v[i] = sums[r][i];
  }
}

// Looks up the numbers of `width` packed bytes in 16 bytes: the lowest kBits of each come first, then the next of each.
template <int kBits>
inline void look_up(const uint8_t* packed, int64_t width, const uint8_t* levels, uint8_t* to) {
  constexpr int kMask = (1 << kBits) - 1;
  const uint8x16_t table = vld1q_u8(levels), low = vdupq_n_u8(kMask);
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) {
    uint8x16_t bytes = vld1q_u8(packed + i);
#pragma GCC unroll 4
    for (int part = 0; part < 8 / kBits; part++, bytes = vshrq_n_u8(bytes, kBits))
      vst1q_u8(to + part * width + i, vqtbl1q_u8(table, vandq_u8(bytes, low)));
  }
  for (; i < width; i++)
    for (int part = 0; part < 8 / kBits; part++) to[part * width + i] = levels[packed[i] >> (part * kBits) & kMask];
}

}  // namespace approximate
}  // namespace
