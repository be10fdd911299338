// Products in eight bits: of int8 weights with states that are quantized row by row.
//
// A row is quantized in chunks of kChunk columns, each by its own range: x = step * (code - zero), with codes from 0 to
// 255 and the range from the least number or 0 to the greatest or 0. A product's chunks are summed in float32:
//   sum += (codes W - zero * sums of W's columns) * step * scale of the column in this chunk
// The bracket is a whole number below 2^25, from two that float32 holds exactly. Neither depends on other rows.
//
//   codes    panels of 64 bytes a row: [columns / 64][rows][64]
//   weights  units of kColumns columns: [panels of 64 inner numbers][2 halves][16 groups of 4][kLanes columns][4],
//            or groups of kCodeGroup
// Inner numbers beyond the last one are 0 in both.
//
// Blocks are multiplied by a class with kRows, block() and kTiles, as in products.h; Int8Of says which one goes with which
// of those.
#pragma once

#include "code_product.h"
#include "plan.h"

#ifdef __aarch64__
#include "../arm_neon/codes.h"
#else
#include "code_blocks.h"
#endif

namespace {

constexpr int64_t kFewRows = 12;  // that are quantized while they are in the first cache
constexpr int64_t kChunk = 384;  // columns of a range, and inner columns of a feed that are computed and used together

struct Codes {
  uint8_t* at;
  int64_t stride;  // from panel to panel
  Range* ranges;   // [chunks][capacity]
  int64_t capacity;

  MILLPOND_INLINE uint8_t* row(int64_t row, int64_t column) const {
    return at + column / kCodePanel * stride + row * kCodePanel + column % kCodePanel;
  }
  Codes from(int64_t row) const { return {at + row * kCodePanel, stride, ranges + row, capacity}; }
};

// Bytes of a unit of so many inner numbers.
constexpr int64_t code_panels(int64_t columns) { return (columns + kCodePanel - 1) / kCodePanel; }

// The integer products that go with an instruction set.
template <class Isa>
struct Int8Of;

template <>
struct Int8Of<FmaIsa> {
  using Type = VectorCodes;
};

#ifdef __AVX512BF16__
template <>
struct Int8Of<DotIsa> : Int8Of<FmaIsa> {};
#endif

// The least of some numbers or 0, and the greatest or 0.
struct Extremes {
  float least, most;
  bool finite;  // all of them
};

template <class Isa>
MILLPOND_INLINE Extremes extremes_of(const States<Isa>& from, int64_t row, int64_t start, int64_t width) {
#ifdef __AVX512BF16__
  if constexpr (sizeof(typename Isa::State) == 2) {
    // Positive ones are in order as signed integers; of unsigned ones the least number is the greatest.
    __m512i most = _mm512_setzero_si512(), least = most;
    for (int64_t c = start; c < start + width; c += Isa::kPanel) {
      const __m512i bits = _mm512_loadu_si512(from.row(row, c));
      most = _mm512_max_epi16(most, bits);
      least = _mm512_max_epu16(least, bits);
    }
    const __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_max_epu16(most, _mm512_srli_epi32(most, 16)),
                                                 _mm512_max_epu16(least, _mm512_slli_epi32(least, 16)));
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
    __m128i words = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    words = _mm_max_epu16(words, _mm_shuffle_epi32(words, 0x4e));
    const auto pair = uint32_t(_mm_cvtsi128_si32(_mm_max_epu16(words, _mm_shuffle_epi32(words, 0xb1))));
    const uint32_t high = pair << 16, low = pair & 0xffff0000;
    float numbers[2];
    std::memcpy(numbers, &high, 4);
    std::memcpy(numbers + 1, &low, 4);
    return {low >> 31 ? numbers[1] : 0.0f, numbers[0], high < 0x7f800000 && low < 0xff800000};
  }
#endif
  Floats low = zeros(), high = zeros(), odd = zeros();
  for (int64_t c = start; c < start + width; c += kLanes) {
    const Floats x = Isa::load_state(from.row(row, c));
    low = smaller(low, x);
    high = maximum(high, x);
    odd = multiply_add(x, zeros(), odd);  // NaN from NaN and infinity on
  }
  return {-largest_of(difference(zeros(), low)), largest_of(high), sum_of(odd) == 0.0f};
}

// Their range; NaN if one of them is not finite. Returns codes per unit of x.
MILLPOND_INLINE float range_of(const Extremes& numbers, Range* range) {
  const float step = (0.5f * numbers.most - 0.5f * numbers.least) * (1.0f / 127.5f);  // the whole may be beyond float32
  const bool some = step >= 1.2e-38f;  // less has no inverse: such numbers are 0
  const float codes = numbers.finite && some ? 1.0f / step : 0.0f;
  range->step = numbers.finite ? (some ? step : 0.0f) : __builtin_nanf("");
  range->zero = __builtin_rintf(-numbers.least * codes);
  return codes;
}

// Codes of a row's columns [start, end) of one range, `codes` of them a unit of x.
template <class Isa>
MILLPOND_INLINE void quantize_row(const States<Isa>& from, int64_t row, int64_t start, int64_t end, float codes,
                                  float zero, const Codes& to) {
  const Floats factor = broadcast(codes);
  const Ints shift = broadcast_bits(int32_t(zero));
#ifdef __AVX512BF16__
  if constexpr (sizeof(typename Isa::State) == 2) {
    for (int64_t c = start; c < end; c += kCodePanel)
      store_codes(to.row(row, c), from.row(row, c), c + Isa::kPanel < end ? from.row(row, c + Isa::kPanel) : nullptr,
                  factor, shift);
    return;
  }
#endif
  for (int64_t c = start; c < end; c += kLanes)
    store_codes(to.row(row, c), scaled(Isa::load_state(from.row(row, c)), factor), shift);
  if (end % kCodePanel) std::memset(to.row(row, end), 0, kCodePanel / 2);
}

// Rows [first, last) of states in eight bits. A few rows at a time: a range waits for one step after another.
template <class Isa>
void quantize_rows(const States<Isa>& from, int64_t first, int64_t last, int64_t columns, const Codes& to) {
  for (int64_t row = first; row < last; row += kFewRows) {
    const int64_t end = least_of(row + kFewRows, last);
    for (int64_t start = 0; start < columns; start += kChunk) {
      const int64_t width = least_of(kChunk, columns - start);
      Range* ranges = to.ranges + start / kChunk * to.capacity;
      float codes[kFewRows];
      for (int64_t r = row; r < end; r++) codes[r - row] = range_of(extremes_of<Isa>(from, r, start, width), ranges + r);
      for (int64_t r = row; r < end; r++)
        quantize_row<Isa>(from, r, start, start + width, codes[r - row], ranges[r].zero, to);
    }
  }
}

// A block of tiles whose integers wait until the next one is multiplied.
template <class Int8>
struct Waiting {
  struct Block {
    int64_t unit, row, count;
    CodeSums to;
    bool whole;  // nothing is added to the sums after this
  };
  alignas(64) int32_t integers[2][Int8::kRows * kColumns];
  int turn = 0;
  Block block{};

  // Rows [from, to) of the block.
  template <class Done>
  MILLPOND_INLINE void finish(int64_t from, int64_t to, const Done& done) const {
    to = least_of(to, block.count);
    if (from >= to) return;
    block.to.add_rows(from, to, integers[turn]);
    if (block.whole) done(block.unit, block.row + from, to - from, block.to.to + from * kColumns);
  }

  // Multiplies the next block, and finishes this one some rows for each panel.
  template <class Done>
  MILLPOND_INLINE void follow(const CodeProduct& p, const Block& next, const Done& done) {
    const int64_t pace = quotient_up(Int8::kRows, p.depth);
    Int8::block(p, next.count, integers[turn ^ 1],
                [&](int64_t panel) __attribute__((always_inline)) { finish(panel * pace, (panel + 1) * pace, done); });
    turn ^= 1;
    block = next;
  }
};

// Units [first, last) of chunks [chunk, end) of a weight. `sums_at(unit, row)` is where the sums [count, kColumns] of a
// block are: they start from the bias if `fresh`, else from what is there. `done(unit, row, count, sums)` gets each block.
// Tiles multiply a block while the vectors finish the one before.
template <class Isa, class SumsAt, class Done>
MILLPOND_INLINE void code_products(const Codes& codes, int64_t rows, const Weight& weight, int64_t chunk, int64_t end,
                                   int64_t first, int64_t last, bool fresh, const SumsAt& sums_at, const Done& done) {
  using Int8 = typename Int8Of<Isa>::Type;
  constexpr int64_t kPanels = kChunk / kCodePanel, kSize = kCodePanel * kColumns;
  const int64_t panels = code_panels(weight.in), begin = chunk * kPanels, depth = least_of(end * kPanels, panels) - begin;
  const int64_t blocks = quotient_up(rows, Int8::kRows), most = Int8::kTiles ? Int8::kRows : quotient_up(rows, blocks);
  CodeProduct p;
  p.panel = codes.stride;
  p.ahead_lines = quotient_up(kSize / 64, blocks);
  [[maybe_unused]] Waiting<Int8> waiting;
  for (int64_t u = first; u < last; u++) {
    const auto* unit = (const int8_t*)weight.units + (u * panels + begin) * kSize;
    const float* bias = weight.bias ? weight.bias + u * kColumns : kNoSums;
    p.ahead = (const char*)(unit + panels * kSize);
    for (int64_t row = 0; row < rows; row += most) {
      const int64_t count = least_of(rows - row, most);
      float* sums = sums_at(u, row);
      for (int64_t panel = 0; panel < depth; panel += kPanels) {
        p.rows = codes.row(row, panel * kCodePanel);
        p.unit = unit + panel * kSize;
        p.depth = least_of(kPanels, depth - panel);
        const bool from_bias = fresh && panel == 0, whole = panel + kPanels >= depth;
        const float* scales = weight.scales + 2 * (chunk + panel / kPanels) * weight.out + u * kColumns;
        const CodeSums to{codes.ranges + panel / kPanels * codes.capacity + row, scales, scales + weight.out,
                          from_bias ? bias : sums, from_bias ? 0 : kColumns, sums};
        if constexpr (Int8::kTiles) {
          waiting.follow(p, {u, row, count, to, whole}, done);
        } else {
          Int8::block(p, to, count);
          if (whole) done(u, row, count, sums);
        }
        p.ahead += p.depth * p.ahead_lines * 64;
      }
    }
  }
  if constexpr (Int8::kTiles) waiting.finish(0, Int8::kRows, done);
}

// As `product` of products.h.
template <class Isa, class Done>
MILLPOND_INLINE void code_product(const Codes& codes, int64_t rows, const Weight& weight, int64_t first, int64_t last,
                                  const Done& done) {
  alignas(64) float sums[Int8Of<Isa>::Type::kRows * kColumns];
  code_products<Isa>(
      codes, rows, weight, 0, quotient_up(weight.in, kChunk), first, last, true,
      [&](int64_t, int64_t) { return sums; }, done);
}

// As `product_to_sums` of products.h, for inner columns [column, column + width).
template <class Isa>
MILLPOND_INLINE void code_product_to_sums(const Codes& codes, int64_t rows, const Weight& weight, int64_t column,
                                          int64_t width, int64_t first, int64_t last, bool fresh, const Sums& to) {
  code_products<Isa>(
      codes, rows, weight, column / kChunk, quotient_up(column + width, kChunk), first, last, fresh,
      [&](int64_t unit, int64_t row) { return to.row(row, unit * kColumns); },
      [](int64_t, int64_t, int64_t, const float*) {});
}

}  // namespace
