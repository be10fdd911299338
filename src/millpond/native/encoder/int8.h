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
    const float *scales = weight.scales + u * kColumns, *bias = weight.bias ? weight.bias + u * kColumns : kNoSums;
    p.ahead = (const char*)(unit + panels * kSize);
    for (int64_t row = 0; row < rows; row += most) {
      const int64_t count = least_of(rows - row, most);
      float* sums = sums_at(u, row);
      for (int64_t panel = 0; panel < depth; panel += kPanels) {
        p.rows = codes.row(row, panel * kCodePanel);
        p.unit = unit + panel * kSize;
        p.depth = least_of(kPanels, depth - panel);
        const bool from_bias = fresh && panel == 0, whole = panel + kPanels >= depth;
        const CodeSums to{codes.ranges + panel / kPanels * codes.capacity + row, scales,
                          scales + (1 + chunk + panel / kPanels) * weight.out, from_bias ? bias : sums,
                          from_bias ? 0 : kColumns, sums};
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
