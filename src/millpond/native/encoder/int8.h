// Products in eight bits: of int8 weights with states that are quantized row by row.
//
// A row is quantized in chunks of kChunk columns, each by its own range: x = step * (code - zero), with codes from 0 to
// 255 and the range from the least number or 0 to the greatest or 0. A product's chunks are summed in float32:
//   sum += (codes W - zero * sums of W's columns) * step * scale of the column
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

constexpr int64_t kChunk = 384;  // columns of a range, and inner columns of a feed that are computed and used together

struct Range {
  float step, zero;
};

struct Codes {
  uint8_t* at;
  int64_t stride;  // from panel to panel
  Range* ranges;   // [chunks][capacity]
  int64_t capacity;

  MILLPOND_INLINE uint8_t* row(int64_t row, int64_t column) const {
    return at + column / kCodePanel * stride + row * kCodePanel + column % kCodePanel;
  }
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

// The range of a row's `width` columns; NaN if one of them is not finite. Returns codes per unit of x.
template <class Isa>
MILLPOND_INLINE float range_of(const States<Isa>& from, int64_t row, int64_t start, int64_t width, Range* range) {
  Floats low = zeros(), high = zeros(), odd = zeros();
  for (int64_t c = start; c < start + width; c += kLanes) {
    const Floats x = Isa::load_state(from.row(row, c));
    low = smaller(low, x);
    high = maximum(high, x);
    odd = multiply_add(x, zeros(), odd);  // NaN from NaN and infinity on
  }
  const float least = -largest_of(difference(zeros(), low)), most = largest_of(high), rest = sum_of(odd);
  const float step = (0.5f * most - 0.5f * least) * (1.0f / 127.5f);  // the whole range may be beyond float32
  const bool some = step >= 1.2e-38f;  // less has no inverse: such numbers are 0
  const float codes = rest == 0.0f && some ? 1.0f / step : 0.0f;
  range->step = rest == 0.0f ? (some ? step : 0.0f) : __builtin_nanf("");
  range->zero = __builtin_rintf(-least * codes);
  return codes;
}

// Rows [first, last) of states in eight bits.
template <class Isa>
void quantize_rows(const States<Isa>& from, int64_t first, int64_t last, int64_t columns, const Codes& to) {
  for (int64_t start = 0; start < columns; start += kChunk) {
    const int64_t width = least_of(kChunk, columns - start);
    for (int64_t r = first; r < last; r++) {
      Range& range = to.ranges[start / kChunk * to.capacity + r];
      const Floats codes = broadcast(range_of<Isa>(from, r, start, width, &range));
      const Ints zero = broadcast_bits(int32_t(range.zero));
      for (int64_t c = start; c < start + width; c += kLanes)
        store_codes(to.row(r, c), scaled(Isa::load_state(from.row(r, c)), codes), zero);
      if (width % kCodePanel) std::memset(to.row(r, start + width), 0, kCodePanel / 2);
    }
  }
}

// sums = from + what a chunk's integers stand for.
MILLPOND_INLINE void add_integers(const int32_t* integers, const Range& range, const float* scales,
                                  const float* column_sums, const float* from, float* to) {
  for (int64_t c = 0; c < kColumns; c += kLanes) {
    const Floats whole = multiply_add(load(column_sums + c), broadcast(-(range.zero - kCodeShift)), to_floats(load_bits(integers + c)));
    store(to + c, multiply_add(whole, scaled(load(scales + c), broadcast(range.step)), load(from + c)));
  }
}

// Units [first, last) of chunks [chunk, end) of a weight. `sums_at(unit, row)` is where the sums [count, kColumns] of a
// block are: they start from the bias if `fresh`, else from what is there. `done(unit, row, count, sums)` gets each block.
// Tiles multiply a block while the vectors finish the one before.
template <class Isa, class SumsAt, class Done>
MILLPOND_INLINE void code_products(const Codes& codes, int64_t rows, const Weight& weight, int64_t chunk, int64_t end,
                                   int64_t first, int64_t last, bool fresh, const SumsAt& sums_at, const Done& done) {
  using Int8 = typename Int8Of<Isa>::Type;
  constexpr int64_t kPanels = kChunk / kCodePanel, kSize = kCodePanel * kColumns;
  alignas(64) int32_t integers[Int8::kTiles ? 2 : 1][Int8::kRows * kColumns];
  const int64_t panels = code_panels(weight.in), begin = chunk * kPanels, depth = least_of(end * kPanels, panels) - begin;
  CodeProduct p;
  p.panel = codes.stride;
  struct {
    int64_t unit, row, count;
    const int32_t* integers;
    const Range* ranges;
    const float *scales, *column_sums, *bias;  // bias null: the sums start from what is there
    float* sums;
    bool whole;  // nothing is added to the sums after this
  } block{};
  const auto finish = [&](int64_t from, int64_t to) __attribute__((always_inline)) {
    for (int64_t r = from; r < to; r++) {
      float* sums = block.sums + r * kColumns;
      add_integers(block.integers + r * kColumns, block.ranges[r], block.scales, block.column_sums,
                   block.bias ? block.bias : sums, sums);
    }
    if (block.whole) done(block.unit, block.row + from, to - from, block.sums + from * kColumns);
  };
  int turn = 0;
  p.ahead_lines = quotient_up(kSize / 64, quotient_up(rows, Int8::kRows));
  for (int64_t u = first; u < last; u++) {
    const auto* unit = (const int8_t*)weight.units + (u * panels + begin) * kSize;
    const float *scales = weight.scales + u * kColumns, *bias = weight.bias ? weight.bias + u * kColumns : kNoSums;
    p.ahead = (const char*)(unit + panels * kSize);
    for (int64_t row = 0; row < rows; row += Int8::kRows) {
      const int64_t count = least_of(rows - row, Int8::kRows);
      float* sums = sums_at(u, row);
      for (int64_t panel = 0; panel < depth; panel += kPanels) {
        p.rows = codes.row(row, panel * kCodePanel);
        p.unit = unit + panel * kSize;
        p.depth = least_of(kPanels, depth - panel);
        p.to = integers[turn];
        const int64_t pace = quotient_up(Int8::kRows, p.depth);  // rows of the block before for each panel
        Int8::block(p, count, [&](int64_t k) __attribute__((always_inline)) {
          const int64_t from = k * pace, to = least_of(from + pace, block.count);
          if (from < to) finish(from, to);
        });
        p.ahead += p.depth * p.ahead_lines * 64;
        block = {u, row, count, integers[turn], codes.ranges + panel / kPanels * codes.capacity + row, scales,
                 scales + (1 + chunk + panel / kPanels) * weight.out, fresh && panel == 0 ? bias : nullptr, sums,
                 panel + kPanels >= depth};
        if (Int8::kTiles)
          turn ^= 1;
        else
          finish(0, count);
      }
    }
  }
  if (Int8::kTiles) finish(0, block.count);
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
