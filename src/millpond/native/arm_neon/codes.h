// Products of the encoder in eight bits. Both sides are signed: codes are stored with 128 less, which the sums of a weight's
// columns make good (int8.h).
#pragma once

#include "../encoder/code_product.h"

namespace {

// Codes of kLanes numbers. Both terms are rounded before they are added: the least number's code is 0, the greatest's 255
// or cut to it.
MILLPOND_INLINE void store_codes(uint8_t* to, Floats codes, Ints zero) {
  const auto words = [](float32x4_t x, int32x4_t y) { return vqmovun_s32(vaddq_s32(vcvtnq_s32_f32(x), y)); };
  const uint8x8_t bytes = vqmovn_u16(vcombine_u16(words(codes.a, zero.a), words(codes.b, zero.b)));
  vst1_u8(to, veor_u8(bytes, vdup_n_u8(0x80)));
}

#ifdef __ARM_FEATURE_MATMUL_INT8

constexpr int kCodeGroup = 8;  // inner numbers of a column that are neighbours

// SMMLA multiplies two rows of eight numbers with two columns of eight.
struct VectorCodes {
  static constexpr int kRows = 6;
  static constexpr bool kTiles = false;

  // A sum is of two rows and two columns: [row, row, next row, next row]. The last row of an odd number is its own partner.
  template <int R>
  static void rows_of(const CodeProduct& p, int32_t* integers) {
    constexpr int kPairs = (R + 1) / 2, kSums = kColumns / 2;
    constexpr int64_t kHalf = kCodePanel * kLanes;
    const auto next = [](int pair) { return 2 * pair + 1 < R ? 2 * pair + 1 : 2 * pair; };
    int32x4_t sums[kPairs][kSums];
#pragma GCC unroll 3
    for (int i = 0; i < kPairs; i++)
#pragma GCC unroll 8
      for (int c = 0; c < kSums; c++) sums[i][c] = vdupq_n_s32(0);
    const auto* a = (const int8_t*)p.rows;
    const int8_t* b = p.unit;
    const char* ahead = p.ahead;
    for (int64_t k = 0; k < p.depth; k++, a += p.panel, b += 2 * kHalf) {
      fetch(ahead, p.ahead_lines);
      ahead += 64 * p.ahead_lines;
      for (int d = 0; d < kCodePanel; d += 8) {
        int8x16_t rows[kPairs];
#pragma GCC unroll 3
        for (int i = 0; i < kPairs; i++)
          rows[i] = vcombine_s8(vld1_s8(a + 2 * i * kCodePanel + d), vld1_s8(a + next(i) * kCodePanel + d));
#pragma GCC unroll 8
        for (int c = 0; c < kSums; c++) {
          const int8x16_t columns = vld1q_s8(b + c / 4 * kHalf + d * kLanes + c % 4 * 16);
#pragma GCC unroll 3
          for (int i = 0; i < kPairs; i++) sums[i][c] = vmmlaq_s32(sums[i][c], rows[i], columns);
        }
      }
    }
#pragma GCC unroll 3
    for (int i = 0; i < kPairs; i++)
#pragma GCC unroll 4
      for (int c = 0; c < kSums; c += 2) {
        const int64x2_t x = vreinterpretq_s64_s32(sums[i][c]), y = vreinterpretq_s64_s32(sums[i][c + 1]);
        int32_t* to = integers + 2 * i * kColumns + 2 * c;
        vst1q_s32(to, vreinterpretq_s32_s64(vzip1q_s64(x, y)));
        if (2 * i + 1 < R) vst1q_s32(to + kColumns, vreinterpretq_s32_s64(vzip2q_s64(x, y)));
      }
  }
#else

constexpr int kCodeGroup = 4;

// Sums of the four products in each lane.
MILLPOND_INLINE int32x4_t add_fours(int32x4_t sum, int8x16_t x, int8x16_t y) {
#ifdef __ARM_FEATURE_DOTPROD
  return vdotq_s32(sum, x, y);
#else
  // No weight is -128: two products add up to 32512 at most.
  const int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(y)), high = vmull_high_s8(x, y);
  return vpadalq_s16(sum, vpaddq_s16(low, high));
#endif
}

struct VectorCodes {
  static constexpr int kRows = 6;
  static constexpr bool kTiles = false;

  template <int R>
  static void rows_of(const CodeProduct& p, int32_t* integers) {
    constexpr int kSums = kColumns / 4;
    constexpr int64_t kHalf = kCodePanel * kLanes;
    int32x4_t sums[R][kSums];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < kSums; c++) sums[r][c] = vdupq_n_s32(0);
    const uint8_t* a = p.rows;
    const int8_t* b = p.unit;
    const char* ahead = p.ahead;
    for (int64_t k = 0; k < p.depth; k++, a += p.panel, b += 2 * kHalf) {
      fetch(ahead, p.ahead_lines);
      ahead += 64 * p.ahead_lines;
      for (int d = 0; d < kCodePanel; d += 4) {
        int8x16_t columns[kSums];
#pragma GCC unroll 4
        for (int c = 0; c < kSums; c++) columns[c] = vld1q_s8(b + c / 2 * kHalf + d * kLanes + c % 2 * 16);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
          int32_t four;
          std::memcpy(&four, a + r * kCodePanel + d, sizeof four);
          const int8x16_t row = vreinterpretq_s8_s32(vdupq_n_s32(four));
#pragma GCC unroll 4
          for (int c = 0; c < kSums; c++) sums[r][c] = add_fours(sums[r][c], row, columns[c]);
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < kSums; c++) vst1q_s32(integers + r * kColumns + 4 * c, sums[r][c]);
  }
#endif

  static void block(const CodeProduct& p, const CodeSums& sums, int64_t rows) {
    alignas(64) int32_t integers[kRows * kColumns];
    some_rows<VectorCodes, kRows>(p, integers, rows);
    sums.add_rows(0, rows, integers);
  }
};

}  // namespace
