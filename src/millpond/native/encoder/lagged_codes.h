// Products in eight bits for an instruction set that multiplies beside the vector units: while the integers of a block's
// chunk are computed, the vectors add those of the one before to its sums. Included by int8.h.
#pragma once

#include "int8.h"

namespace {

// As code_products(); `done` gets a block in pieces of some rows.
template <class Isa, class SumsAt, class Done>
MILLPOND_INLINE void lagged_code_products(const Codes& codes, int64_t rows, const Weight& weight, int64_t chunk,
                                          int64_t end, int64_t first, int64_t last, bool fresh, const SumsAt& sums_at,
                                          const Done& done) {
  using Int8 = typename Int8Of<Isa>::Type;
  constexpr int64_t kPanels = kChunk / kCodePanel, kSize = kCodePanel * kColumns;
  alignas(64) int32_t integers[2][Int8::kRows * kColumns];
  const int64_t panels = code_panels(weight.in), begin = chunk * kPanels, depth = least_of(end * kPanels, panels) - begin;
  // The chunk of a block whose integers are there and not added yet.
  struct {
    int64_t count, unit, row;
    const Range* ranges;
    const float *scales, *column_sums, *bias;  // bias: what the sums start from; null: what is there
    float* sums;
    bool finished;  // the block's last chunk
  } waiting{};
  int turn = 0;
  const auto add = [&](int64_t piece, int64_t piece_end) __attribute__((always_inline)) {
    const int32_t* from = integers[turn ^ 1] + piece * kColumns;
    float* to = waiting.sums + piece * kColumns;
    for (int64_t r = piece; r < piece_end; r++, from += kColumns, to += kColumns)
      add_integers(from, waiting.ranges[r], waiting.scales, waiting.column_sums, waiting.bias ? waiting.bias : to, to);
    if (waiting.finished)
      done(waiting.unit, waiting.row + piece, piece_end - piece, waiting.sums + piece * kColumns);
  };
  CodeProduct p;
  p.panel = codes.stride;
  p.ahead_lines = quotient_up(kSize / 64, quotient_up(rows, Int8::kRows));
  for (int64_t u = first; u < last; u++) {
    const auto* unit = (const int8_t*)weight.units + (u * panels + begin) * kSize;
    const float *scales = weight.scales + u * kColumns, *bias = weight.bias ? weight.bias + u * kColumns : kNoSums;
    p.ahead = (const char*)(unit + panels * kSize);
    for (int64_t row = 0; row < rows; row += Int8::kRows) {
      const int64_t count = least_of(rows - row, Int8::kRows);
      for (int64_t panel = 0; panel < depth; panel += kPanels) {
        p.rows = codes.row(row, panel * kCodePanel);
        p.unit = unit + panel * kSize;
        p.depth = least_of(kPanels, depth - panel);
        p.to = integers[turn];
        const int64_t pace = quotient_up(Int8::kRows, p.depth);
        const char* ahead = p.ahead;
        Int8::block(p, count, [&](int64_t k) __attribute__((always_inline)) {
          fetch(ahead, p.ahead_lines);
          ahead += 64 * p.ahead_lines;
          const int64_t piece = k * pace, piece_end = least_of(piece + pace, waiting.count);
          if (piece < piece_end) add(piece, piece_end);
        });
        p.ahead = ahead;
        waiting.count = count;
        waiting.unit = u;
        waiting.row = row;
        waiting.ranges = codes.ranges + panel / kPanels * codes.capacity + row;
        waiting.scales = scales;
        waiting.column_sums = scales + (1 + chunk + panel / kPanels) * weight.out;
        waiting.bias = fresh && panel == 0 ? bias : nullptr;
        waiting.sums = sums_at(u, row);
        waiting.finished = panel + kPanels >= depth;
        turn ^= 1;
      }
    }
  }
  if (waiting.count > 0) add(0, waiting.count);
}

}  // namespace
