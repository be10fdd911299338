// What is multiplied in eight bits at a time, and what becomes of its sums.
#pragma once

#include "products.h"

namespace {

constexpr int64_t kCodePanel = 64;

using std::int8_t;
using std::uint8_t;

#ifdef __aarch64__
constexpr float kCodeShift = 128.0f;  // less than the code is what is stored
#else
constexpr float kCodeShift = 0.0f;
#endif

struct Range {
  float step, zero;
};

// What one block multiplies: integer sums of up to kRows rows and one unit.
struct CodeProduct {
  const uint8_t* rows;  // panels of the first row
  int64_t panel;        // from panel to panel
  const int8_t* unit;
  int64_t depth;  // panels
  const char* ahead;
  int64_t ahead_lines;  // of each panel
};

// Where a block's sums go: to = from + what its integers stand for.
struct CodeSums {
  const Range* ranges;  // of the rows
  const float *scales, *column_sums;
  const float* from;
  int64_t from_stride;  // 0: the same for each row
  float* to;            // [rows, kColumns]

  MILLPOND_INLINE void add(int64_t row, Ints low, Ints high) const {
    const Floats zero = broadcast(-(ranges[row].zero - kCodeShift)), step = broadcast(ranges[row].step);
    const auto sum = [&](int64_t column, Ints integers) __attribute__((always_inline)) {
      const Floats whole = multiply_add(load(column_sums + column), zero, to_floats(integers));
      return multiply_add(whole, scaled(load(scales + column), step), load(from + row * from_stride + column));
    };
    const Floats first = sum(0, low), second = sum(kLanes, high);
    store(to + row * kColumns, first);
    store(to + row * kColumns + kLanes, second);
  }

  // Rows [first, last) of integers [rows, kColumns].
  MILLPOND_INLINE void add_rows(int64_t first, int64_t last, const int32_t* integers) const {
    for (int64_t r = first; r < last; r++)
      add(r, load_bits(integers + r * kColumns), load_bits(integers + r * kColumns + kLanes));
  }
};

// rows_of() of an instruction set, for R rows at most.
template <class Isa, int R, class To>
MILLPOND_INLINE void some_rows(const CodeProduct& p, To& to, int64_t rows) {
  if constexpr (R > 0) {
    if (rows == R) return Isa::template rows_of<R>(p, to);
    some_rows<Isa, R - 1>(p, to, rows);
  }
}

}  // namespace
