// Products of the encoder in bfloat16 by BFMMLA: it multiplies two rows of four numbers with two columns of four.
//
// A unit is [panels of 32 inner numbers][8 groups of 4][kColumns][4].
#pragma once

#include "../encoder/attention.h"
#include "../encoder/int8.h"

namespace {

struct Bfloat16States {
  using State = uint16_t;
  static constexpr bool kExact = false;  // to the last digits of bfloat16
  static constexpr int64_t kPanel = 32;
  static MILLPOND_INLINE Floats load_state(const State* from) {
    const uint16x8_t halves = vld1q_u16(from);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(halves, 16))};
  }
  static MILLPOND_INLINE void store_state(State* to, Floats x) {
    vst1q_u16(to, vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x.a), x.b)));
  }
};

// Both halves of two vectors, side by side.
MILLPOND_INLINE float64x2_t halves_of(float32x4_t x, float32x4_t y, bool high) {
  const float64x2_t a = vreinterpretq_f64_f32(x), b = vreinterpretq_f64_f32(y);
  return high ? vzip2q_f64(a, b) : vzip1q_f64(a, b);
}

struct MmlaIsa : Bfloat16States {
  static constexpr int kRows = 6;
  static constexpr int64_t kMostDepth = 0;
  static constexpr bool kTiles = false;
  static void begin() {}
  static void end() {}

  // A sum is of two rows and two columns: [row, row, next row, next row]. The last row of an odd number is its own partner.
  template <int R>
  static void rows_of(const BlockProduct<uint16_t>& p) {
    constexpr int kPairs = (R + 1) / 2, kSums = kColumns / 2;
    const auto next = [](int pair) { return 2 * pair + 1 < R ? 2 * pair + 1 : 2 * pair; };
    float32x4_t sums[kPairs][kSums];
#pragma GCC unroll 3
    for (int i = 0; i < kPairs; i++) {
      const float *upper = p.from + 2 * i * p.from_stride, *lower = p.from + next(i) * p.from_stride;
#pragma GCC unroll 4
      for (int c = 0; c < kSums; c += 2) {
        const float32x4_t x = vld1q_f32(upper + 2 * c), y = vld1q_f32(lower + 2 * c);
        sums[i][c] = vreinterpretq_f32_f64(halves_of(x, y, false));
        sums[i][c + 1] = vreinterpretq_f32_f64(halves_of(x, y, true));
      }
    }
    const uint16_t *a = p.rows, *b = p.unit;
    const char* ahead = p.ahead;
    for (int64_t k = 0; k < p.depth; k++, a += p.panel) {
      fetch(ahead, p.ahead_lines);
      ahead += 64 * p.ahead_lines;
      for (int d = 0; d < kPanel; d += 8) {
        bfloat16x8_t rows[2][kPairs];
#pragma GCC unroll 3
        for (int i = 0; i < kPairs; i++) {
          const float32x4_t x = vreinterpretq_f32_u16(vld1q_u16(a + 2 * i * kPanel + d));
          const float32x4_t y = vreinterpretq_f32_u16(vld1q_u16(a + next(i) * kPanel + d));
          rows[0][i] = vreinterpretq_bf16_f64(halves_of(x, y, false));
          rows[1][i] = vreinterpretq_bf16_f64(halves_of(x, y, true));
        }
#pragma GCC unroll 2
        for (int four = 0; four < 2; four++, b += 4 * kColumns)
#pragma GCC unroll 8
          for (int c = 0; c < kSums; c++) {
            const bfloat16x8_t columns = vreinterpretq_bf16_u16(vld1q_u16(b + 8 * c));
#pragma GCC unroll 3
            for (int i = 0; i < kPairs; i++) sums[i][c] = vbfmmlaq_f32(sums[i][c], rows[four][i], columns);
          }
      }
    }
#pragma GCC unroll 3
    for (int i = 0; i < kPairs; i++) {
      float *upper = p.to + 2 * i * p.to_stride, *lower = p.to + next(i) * p.to_stride;
#pragma GCC unroll 4
      for (int c = 0; c < kSums; c += 2) {
        vst1q_f32(upper + 2 * c, vreinterpretq_f32_f64(halves_of(sums[i][c], sums[i][c + 1], false)));
        if (2 * i + 1 < R) vst1q_f32(lower + 2 * c, vreinterpretq_f32_f64(halves_of(sums[i][c], sums[i][c + 1], true)));
      }
    }
  }
  static void block(const BlockProduct<uint16_t>& p, int64_t rows) { RowsOf<MmlaIsa, kRows>::run(p, rows); }
};

// Keys [count, dim] as units of kColumns keys: the numbers of each key by fours.
template <class Isa>
void Attention<Isa>::pack_keys(const States<Isa>& heads, const KeyRows& rows, int64_t column, int64_t count, int64_t dim,
                               uint16_t* to) {
  for (int64_t unit = 0; unit < padded(count); unit += kColumns, to += dim * kColumns)
    for (int64_t key = 0; key < kColumns; key++)
      for (int64_t d = 0; d < dim; d += 4) {
        uint64_t four = 0;
        if (unit + key < count) std::memcpy(&four, heads.row(rows.row(unit + key), column + d), sizeof four);
        std::memcpy(to + d * kColumns + 4 * key, &four, sizeof four);
      }
}

// [units of kColumns columns][keys by fours][kColumns][4 keys]
template <class Isa>
void Attention<Isa>::pack_values(const States<Isa>& heads, const KeyRows& rows, int64_t column, int64_t count, int64_t dim,
                                 uint16_t* to) {
  for (int64_t d = 0; d < dim; d += kColumns)
    for (int64_t k = 0; k < padded(count); k += 4)
      for (int64_t c = 0; c < kColumns; c += 8, to += 32) {
        uint16x8x4_t four;
#pragma GCC unroll 4
        for (int64_t i = 0; i < 4; i++)
          four.val[i] = k + i < count ? vld1q_u16(heads.row(rows.row(k + i), column + d + c)) : vdupq_n_u16(0);
        vst4q_u16(to, four);
      }
}

template <>
struct Int8Of<MmlaIsa> : Int8Of<FmaIsa> {};

struct MmlaSpeed {
  static constexpr int64_t kOperations = 8 * kLanes;
  static MILLPOND_INLINE Floats multiply(Floats sum, Floats x) {
    const bfloat16x8_t a = vreinterpretq_bf16_f32(x.a), b = vreinterpretq_bf16_f32(x.b);
    return {vbfmmlaq_f32(sum.a, a, a), vbfmmlaq_f32(sum.b, b, b)};
  }
};

}  // namespace
