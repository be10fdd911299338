// What is multiplied in eight bits at a time.
#pragma once

#include "products.h"

namespace {

constexpr int64_t kCodePanel = 64;

using std::int8_t;
using std::uint8_t;

// What one block multiplies: integer sums of up to kRows rows and one unit.
struct CodeProduct {
  const uint8_t* rows;  // panels of the first row
  int64_t panel;        // from panel to panel
  const int8_t* unit;
  int64_t depth;  // panels
  int32_t* to;    // [rows, kColumns]
  const char* ahead;
  int64_t ahead_lines;  // of each panel
};

// rows_of() of an instruction set, for R rows at most.
template <class Isa, int R>
MILLPOND_INLINE void some_rows(const CodeProduct& p, int64_t rows) {
  if constexpr (R > 0) {
    if (rows == R) return Isa::template rows_of<R>(p);
    some_rows<Isa, R - 1>(p, rows);
  }
}

}  // namespace
