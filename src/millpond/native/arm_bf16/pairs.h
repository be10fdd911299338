// MaxSim by instructions that multiply two rows of eight bytes with two query tokens: SMMLA for int8, BFMMLA for bfloat16.
#pragma once

#include "../codecs.h"

namespace {

struct Pairs {
  static constexpr int kRows = 6;  // times two vectors of query tokens: 24 sums in 32 registers
  static constexpr int64_t kBlock = 48;
  static constexpr int kExpansion = 1;
  static constexpr bool kReadsMemory = false;
  static void begin(int64_t) {}
  static void end() {}
  static int64_t row_words(int64_t words) { return words; }
  static int64_t panel_words(int64_t words) { return (words + 1) / 2 * 2; }
  static void convert(Ints words, uint32_t* to) { store_bits(to, words); }

  // Two words of a token become neighbours.
  static void arrange(uint32_t* panel, int64_t words) {
    for (int64_t w = 0; w < words; w += 2, panel += 2 * kLanes) {
      uint32_t pairs[2 * kLanes];
      for (int lane = 0; lane < kLanes; lane++) {
        pairs[2 * lane] = panel[lane];
        pairs[2 * lane + 1] = panel[lane + kLanes];
      }
      std::memcpy(panel, pairs, sizeof pairs);
    }
  }

  // Sums are of two rows and two tokens: [row, row, next row, next row]. `Codec::add` multiplies.
  template <class Codec, int N>
  static void multiply_pairs(const Product& product) {
    constexpr int kPairs = kRows / 2, kSums = N * kLanes / 2;
    const int64_t stride = product.stride, words = product.words, step = (kRows * product.ahead_stride + words - 1) / words;
    const uint8_t* ahead = product.ahead;
    uint32_t* sums = product.sums;
    for (int64_t first = 0; first < product.count; first += kRows, sums += kRows * N * kLanes) {
      const uint8_t* row = (const uint8_t*)product.rows + first * stride;
      int32x4_t sum[kPairs][kSums];
#pragma GCC unroll 3
      for (int i = 0; i < kPairs; i++)
#pragma GCC unroll 8
        for (int s = 0; s < kSums; s++) sum[i][s] = vdupq_n_s32(0);
      for (int64_t w = 0; w < words; w += 2, row += 8) {
        const bool both = w + 1 < words;  // else the last word is alone
        int32x4_t rows[kPairs];
#pragma GCC unroll 3
        for (int i = 0; i < kPairs; i++) {
          const uint64_t upper = word_pair(row + 2 * i * stride, both), lower = word_pair(row + (2 * i + 1) * stride, both);
          rows[i] = vreinterpretq_s32_u64(vcombine_u64(vcreate_u64(upper), vcreate_u64(lower)));
        }
        __builtin_prefetch(ahead, 0, 3);
        ahead += 2 * step;
#pragma GCC unroll 8
        for (int s = 0; s < kSums; s++) {
          const int64_t vector = s / (kLanes / 2), lane = s % (kLanes / 2);
          const uint32_t* panel = product.panels + vector * product.panel + w * kLanes;
          const int32x4_t tokens = vreinterpretq_s32_u32(vld1q_u32(panel + 4 * lane));
#pragma GCC unroll 3
          for (int i = 0; i < kPairs; i++) sum[i][s] = Codec::add(sum[i][s], rows[i], tokens);
        }
      }
#pragma GCC unroll 3
      for (int i = 0; i < kPairs; i++)
#pragma GCC unroll 4
        for (int s = 0; s < kSums; s += 2) {
          const int64x2_t x = vreinterpretq_s64_s32(sum[i][s]), y = vreinterpretq_s64_s32(sum[i][s + 1]);
          uint32_t* to = sums + 2 * i * N * kLanes + 2 * s;
          vst1q_u32(to, vreinterpretq_u32_s64(vzip1q_s64(x, y)));
          vst1q_u32(to + N * kLanes, vreinterpretq_u32_s64(vzip2q_s64(x, y)));
        }
    }
  }

  static uint64_t word_pair(const uint8_t* from, bool both) {
    uint64_t pair = 0;
    if (both)
      std::memcpy(&pair, from, 8);
    else
      std::memcpy(&pair, from, 4);
    return pair;
  }
};

struct Int8Pairs : Pairs {
  static constexpr bool kRowsMayBeNan = false;
  static int64_t words(int64_t dim) { return Int8::words(dim); }
  static Floats similarity(Ints sum, const float* scale) { return Int8::similarity(sum, scale); }
  static void pack_query(const float* from, int64_t dim, int64_t words, uint32_t* to, float* scale, uint32_t* offset) {
    Int8::pack_query(from, dim, words, to, scale, offset);
  }
  static int32x4_t add(int32x4_t sum, int32x4_t rows, int32x4_t tokens) {
    return vmmlaq_s32(sum, vreinterpretq_s8_s32(rows), vreinterpretq_s8_s32(tokens));
  }
  template <int N>
  static void multiply(const Product& product) {
    multiply_pairs<Int8Pairs, N>(product);
  }
};

struct Bfloat16Pairs : Pairs {
  static constexpr bool kRowsMayBeNan = true;
  static int64_t words(int64_t dim) { return Bfloat16::words(dim); }
  static Floats similarity(Ints sum, const float*) { return as_floats(sum); }
  static void pack_query(const float* from, int64_t dim, int64_t, uint32_t* to, float* scale, uint32_t*) {
    for (int64_t d = 0; d < dim; d++) to[d / 2 * kLanes] |= uint32_t(to_bfloat16(from[d])) << (d % 2 * 16);
    *scale = 1.0f;
  }
  static int32x4_t add(int32x4_t sum, int32x4_t rows, int32x4_t tokens) {
    return vreinterpretq_s32_f32(vbfmmlaq_f32(vreinterpretq_f32_s32(sum), vreinterpretq_bf16_s32(rows),
                                              vreinterpretq_bf16_s32(tokens)));
  }
  template <int N>
  static void multiply(const Product& product) {
    multiply_pairs<Bfloat16Pairs, N>(product);
  }
};

}  // namespace
