// Products for an instruction set that multiplies beside the vector units: while a block is multiplied, the vectors finish
// the sums of the one before piece by piece. Included by products.h.
//
// A unit that does not fit into the first cache is multiplied in parts of its inner numbers, each for all rows. The sums
// between two parts are float32 as in the tiles, so a row's result does not depend on the parts.
#pragma once

#include "products.h"

namespace {

constexpr int64_t kPartialRows = 512;  // rows whose sums wait for the next part: 64 KiB

template <class Isa>
MILLPOND_INLINE int64_t parts_of(int64_t rows, int64_t depth) {
  if (Isa::kMostDepth == 0 || rows <= Isa::kRows) return 1;  // one block reads a unit once
  return quotient_up(depth, Isa::kMostDepth);
}

// Lines of the next unit, fetched evenly while a unit is multiplied.
struct NextUnit {
  const char *at, *end;
  int64_t lines;  // of each panel of a block

  template <class Isa>
  static MILLPOND_INLINE NextUnit of(const typename Isa::State* unit, int64_t size, int64_t rows, int64_t depth) {
    const int64_t bytes = unit_size<Isa>(depth) * int64_t(sizeof(typename Isa::State));
    const char* next = (const char*)(unit + size);
    return {next, next + bytes, quotient_up(bytes / 64, quotient_up(rows, Isa::kRows) * depth)};
  }
  MILLPOND_INLINE void fetch_some() {
    if (at >= end) return;
    fetch(at, lines);
    at += 64 * lines;
  }
};

// As product(); `done` gets a block in pieces of some rows.
template <class Isa, class Done>
MILLPOND_INLINE void lagged_product(const States<Isa>& a, int64_t rows, const typename Isa::State* weight, int64_t unit,
                                    int64_t depth, int64_t first, int64_t last, const float* bias, const Done& done) {
  alignas(64) float finished[2][Isa::kRows * kColumns];
  alignas(64) float partial[kPartialRows * kColumns];
  const int64_t parts = parts_of<Isa>(rows, depth);
  int64_t waiting = 0, waiting_unit = 0, waiting_row = 0;  // rows of the block that is not finished yet
  int turn = 0;
  for (int64_t u = first; u < last; u++) {
    NextUnit next = NextUnit::of<Isa>(weight + u * unit, unit, rows, depth);
    for (int64_t group = 0; group < rows; group += kPartialRows) {
      const int64_t group_end = least_of(rows, group + kPartialRows);
      for (int64_t part = 0; part < parts; part++) {
        const int64_t panel = depth * part / parts;
        BlockProduct<typename Isa::State> p{};
        p.panel = a.stride;
        p.unit = weight + u * unit + unit_size<Isa>(panel);
        p.depth = depth * (part + 1) / parts - panel;
        p.to_stride = kColumns;
        const int64_t pace = quotient_up(Isa::kRows, p.depth);  // rows of the waiting block for each panel
        for (int64_t row = group; row < group_end; row += Isa::kRows) {
          const int64_t count = least_of(rows - row, Isa::kRows);
          float* sums = partial + (row - group) * kColumns;
          const float* before = finished[turn ^ 1];
          p.rows = a.row(row, panel * Isa::kPanel);
          p.from = part > 0 ? sums : bias ? bias + u * kColumns : kNoSums;
          p.from_stride = part > 0 ? kColumns : 0;
          p.to = part < parts - 1 ? sums : finished[turn];
          Isa::block(p, count, [&](int64_t k) __attribute__((always_inline)) {
            next.fetch_some();
            const int64_t piece = k * pace, end = least_of(piece + pace, waiting);
            if (piece < end) done(waiting_unit, waiting_row + piece, end - piece, before + piece * kColumns);
          });
          waiting = 0;
          if (part < parts - 1) continue;
          waiting = count;
          waiting_unit = u;
          waiting_row = row;
          turn ^= 1;
        }
      }
    }
  }
  if (waiting > 0) done(waiting_unit, waiting_row, waiting, finished[turn ^ 1]);
}

// As product_to_sums().
template <class Isa>
MILLPOND_INLINE void product_to_sums_in_parts(const States<Isa>& a, int64_t rows, const typename Isa::State* weight,
                                              int64_t unit, int64_t depth, int64_t first, int64_t last, const float* bias,
                                              const Sums& to) {
  const int64_t parts = parts_of<Isa>(rows, depth);
  for (int64_t u = first; u < last; u++) {
    NextUnit next = NextUnit::of<Isa>(weight + u * unit, unit, rows, depth);
    for (int64_t part = 0; part < parts; part++) {
      const int64_t panel = depth * part / parts;
      const bool fresh = bias && part == 0;
      BlockProduct<typename Isa::State> p{};
      p.panel = a.stride;
      p.unit = weight + u * unit + unit_size<Isa>(panel);
      p.depth = depth * (part + 1) / parts - panel;
      p.from_stride = fresh ? 0 : kColumns;
      p.to_stride = kColumns;
      for (int64_t row = 0; row < rows; row += Isa::kRows) {
        p.rows = a.row(row, panel * Isa::kPanel);
        p.to = to.row(row, u * kColumns);
        p.from = fresh ? bias + u * kColumns : p.to;
        Isa::block(p, least_of(rows - row, Isa::kRows),
                   [&](int64_t) __attribute__((always_inline)) { next.fetch_some(); });
      }
    }
  }
}

}  // namespace
