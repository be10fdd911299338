// Words of rows in the forms in which MaxSim's codecs multiply them.
#pragma once

#include "lanes.h"

namespace {

// [low, high] halves of a word are two columns: they stay in order.
inline void widen_bfloat16(Ints words, uint32_t* to) {
  const auto put = [&](int at, int32x4_t four) {
    const uint16x8_t halves = vreinterpretq_u16_s32(four);
    vst1q_u32(to + at, vshll_n_u16(vget_low_u16(halves), 16));
    vst1q_u32(to + at + 4, vshll_n_u16(vget_high_u16(halves), 16));
  };
  put(0, words.a);
  put(kLanes, words.b);
}

inline void widen_int8(Ints words, uint32_t* to) {
  const auto put = [&](int at, int32x4_t four) {
    const int8x16_t bytes = vreinterpretq_s8_s32(four);
    vst1q_u32(to + at, vreinterpretq_u32_s16(vmovl_s8(vget_low_s8(bytes))));
    vst1q_u32(to + at + 4, vreinterpretq_u32_s16(vmovl_high_s8(bytes)));
  };
  put(0, words.a);
  put(kLanes, words.b);
}

// Adds the two products of 16 bits of each word.
inline Ints add_pairs(Ints sum, Ints word, Ints query) {
  const auto pairs = [](int32x4_t x, int32x4_t y) {
    const int16x8_t a = vreinterpretq_s16_s32(x), b = vreinterpretq_s16_s32(y);
    return vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
  };
  return {vaddq_s32(sum.a, pairs(word.a, query.a)), vaddq_s32(sum.b, pairs(word.b, query.b))};
}

#ifdef __ARM_FEATURE_DOTPROD
// Adds the four products of 8 bits of each word.
inline Ints add_dot(Ints sum, Ints word, Ints query) {
  return {vdotq_s32(sum.a, vreinterpretq_s8_s32(word.a), vreinterpretq_s8_s32(query.a)),
          vdotq_s32(sum.b, vreinterpretq_s8_s32(word.b), vreinterpretq_s8_s32(query.b))};
}
#endif

}  // namespace
