// Products of a block's states with packed weights.
//
// A unit is kColumns columns of a weight by all of its inner numbers, in the order in which they are multiplied:
//   bfloat16  [panels of 32 inner numbers][2 halves][16 pairs of inner numbers][16 columns][2]
//   float32   [panels of 16 inner numbers][16 inner numbers][kColumns]
// A unit stays in the first cache while the rows of a block pass by; of the next one some lines are fetched meanwhile.
//
// An instruction set is a class `Isa` with its precision and
//   kRows                 rows of its largest block
//   kMostDepth            panels of a unit that fit into the first cache beside the rows; 0: no limit
//   kTiles                whether it multiplies beside the vectors (lagged_products.h), and has attend() (attention.h)
//   begin(), end()        of a thread's work
//   block(...)            sums of up to kRows rows and one unit
// A row's sums are computed in the same order in every block.
#pragma once

#include "states.h"

namespace {

// What one block multiplies. The sums start from `from`, and go to `to`.
template <class State>
struct BlockProduct {
  const State* rows;   // panels of the first row
  int64_t panel;       // from panel to panel
  const State* unit;
  int64_t depth;       // panels
  const float* from;   // [rows, kColumns]
  int64_t from_stride;  // 0: the same sums for each row
  float* to;
  int64_t to_stride;
  const char* ahead;      // memory to fetch into the second cache
  int64_t ahead_lines;    // of each panel
};

MILLPOND_INLINE void fetch(const char* ahead, int64_t lines) {
  for (int64_t i = 0; i < lines; i++) __builtin_prefetch(ahead + 64 * i, 0, 2);
}

// float32 by fused multiplications and additions.
struct FmaIsa : Float32 {
  static constexpr int kRows = kLanes == 16 ? 12 : 6;
  static constexpr int64_t kMostDepth = 0;
  static constexpr bool kTiles = false;
  static void begin() {}
  static void end() {}

  template <int R>
  static void rows_of(const BlockProduct<float>& p) {
    Floats sums[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      sums[r][0] = load(p.from + r * p.from_stride);
      sums[r][1] = load(p.from + r * p.from_stride + kLanes);
    }
    const float *a = p.rows, *b = p.unit;
    const char* ahead = p.ahead;
    for (int64_t k = 0; k < p.depth; k++, a += p.panel) {
      fetch(ahead, p.ahead_lines);
      ahead += 64 * p.ahead_lines;
#pragma GCC unroll 4
      for (int d = 0; d < kPanel; d++, b += kColumns) {
        const Floats b0 = load(b), b1 = load(b + kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          const Floats x = broadcast(a[r * kPanel + d]);
          sums[r][0] = multiply_add(x, b0, sums[r][0]);
          sums[r][1] = multiply_add(x, b1, sums[r][1]);
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      store(p.to + r * p.to_stride, sums[r][0]);
      store(p.to + r * p.to_stride + kLanes, sums[r][1]);
    }
  }
  static void block(const BlockProduct<float>& p, int64_t rows);
};

#ifdef __AVX512BF16__
// bfloat16 by dot products of pairs.
struct DotIsa : Bfloat16States {
  static constexpr int kRows = 12;
  static constexpr int64_t kMostDepth = 0;
  static constexpr bool kTiles = false;
  static void begin() {}
  static void end() {}

  template <int R>
  static void rows_of(const BlockProduct<uint16_t>& p) {
    __m512 sums[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      sums[r][0] = load(p.from + r * p.from_stride);
      sums[r][1] = load(p.from + r * p.from_stride + kLanes);
    }
    const uint16_t *a = p.rows, *b = p.unit;
    const char* ahead = p.ahead;
    for (int64_t k = 0; k < p.depth; k++, a += p.panel, b += 2 * 512) {
      fetch(ahead, p.ahead_lines);
      ahead += 64 * p.ahead_lines;
#pragma GCC unroll 4
      for (int d = 0; d < 16; d++) {
        const __m512bh b0 = (__m512bh)_mm512_loadu_si512(b + d * 32), b1 = (__m512bh)_mm512_loadu_si512(b + 512 + d * 32);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          int32_t pair;
          std::memcpy(&pair, a + r * kPanel + 2 * d, sizeof pair);
          const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
          sums[r][0] = _mm512_dpbf16_ps(sums[r][0], x, b0);
          sums[r][1] = _mm512_dpbf16_ps(sums[r][1], x, b1);
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      store(p.to + r * p.to_stride, sums[r][0]);
      store(p.to + r * p.to_stride + kLanes, sums[r][1]);
    }
  }
  static void block(const BlockProduct<uint16_t>& p, int64_t rows);
};
#endif

// Calls the version of a block for so many rows.
template <class Isa, int R>
struct RowsOf {
  static MILLPOND_INLINE void run(const BlockProduct<typename Isa::State>& p, int64_t rows) {
    if (rows == R)
      Isa::template rows_of<R>(p);
    else
      RowsOf<Isa, R - 1>::run(p, rows);
  }
};
template <class Isa>
struct RowsOf<Isa, 0> {
  static void run(const BlockProduct<typename Isa::State>&, int64_t) {}
};

inline void FmaIsa::block(const BlockProduct<float>& p, int64_t rows) { RowsOf<FmaIsa, kRows>::run(p, rows); }
#ifdef __AVX512BF16__
inline void DotIsa::block(const BlockProduct<uint16_t>& p, int64_t rows) { RowsOf<DotIsa, kRows>::run(p, rows); }
#endif

alignas(64) const float kNoSums[2 * 16] = {};

// Numbers of a unit of so many panels.
template <class Isa>
constexpr int64_t unit_size(int64_t panels) {
  return panels * Isa::kPanel * kColumns;
}

// In lagged_products.h.
template <class Isa, class Done>
void lagged_product(const States<Isa>& a, int64_t rows, const typename Isa::State* weight, int64_t unit, int64_t depth,
                    int64_t first, int64_t last, const float* bias, const Done& done);
template <class Isa>
void product_to_sums_in_parts(const States<Isa>& a, int64_t rows, const typename Isa::State* weight, int64_t unit,
                              int64_t depth, int64_t first, int64_t last, const float* bias, const Sums& to);

// Units [first, last) of a weight, for `rows` rows; `done(unit, row, count, sums [count][kColumns])` gets each block.
// `depth` panels of the weight are multiplied, of units that are `unit` numbers apart.
template <class Isa, class Done>
MILLPOND_INLINE void product(const States<Isa>& a, int64_t rows, const typename Isa::State* weight, int64_t unit,
                             int64_t depth, int64_t first, int64_t last, const float* bias, const Done& done) {
  if constexpr (Isa::kTiles) return lagged_product<Isa>(a, rows, weight, unit, depth, first, last, bias, done);
  alignas(64) float sums[Isa::kRows * kColumns];
  // Blocks of about the same size: a last one of a row or two would wait for its sums.
  const int64_t blocks = quotient_up(rows, Isa::kRows), most = quotient_up(rows, blocks);
  const int64_t lines = unit_size<Isa>(depth) * int64_t(sizeof(typename Isa::State)) / 64;
  const int64_t ahead_lines = quotient_up(lines, blocks * depth);
  for (int64_t u = first; u < last; u++) {
    BlockProduct<typename Isa::State> p;
    p.panel = a.stride;
    p.unit = weight + u * unit;
    p.depth = depth;
    p.from = bias ? bias + u * kColumns : kNoSums;
    p.from_stride = 0;
    p.to = sums;
    p.to_stride = kColumns;
    p.ahead = (const char*)(p.unit + unit);
    p.ahead_lines = ahead_lines;
    for (int64_t row = 0; row < rows; row += most) {
      const int64_t count = least_of(rows - row, most);
      p.rows = a.row(row, 0);
      Isa::block(p, count);
      p.ahead += depth * ahead_lines * 64;
      done(u, row, count, sums);
    }
  }
}

// The same, with the sums left in memory: they start from a bias, or from what is there (`bias` null).
template <class Isa>
MILLPOND_INLINE void product_to_sums(const States<Isa>& a, int64_t rows, const typename Isa::State* weight, int64_t unit,
                                     int64_t depth, int64_t first, int64_t last, const float* bias, const Sums& to) {
  if constexpr (Isa::kTiles)
    return product_to_sums_in_parts<Isa>(a, rows, weight, unit, depth, first, last, bias, to);
  // Blocks of about the same size: a last one of a row or two would wait for its sums.
  const int64_t blocks = quotient_up(rows, Isa::kRows), most = quotient_up(rows, blocks);
  const int64_t lines = unit_size<Isa>(depth) * int64_t(sizeof(typename Isa::State)) / 64;
  const int64_t ahead_lines = quotient_up(lines, blocks * depth);
  for (int64_t u = first; u < last; u++) {
    BlockProduct<typename Isa::State> p;
    p.panel = a.stride;
    p.unit = weight + u * unit;
    p.depth = depth;
    p.from_stride = bias ? 0 : kColumns;
    p.to_stride = kColumns;
    p.ahead = (const char*)(p.unit + unit);
    p.ahead_lines = ahead_lines;
    for (int64_t row = 0; row < rows; row += most) {
      p.rows = a.row(row, 0);
      p.to = to.row(row, u * kColumns);
      p.from = bias ? bias + u * kColumns : p.to;
      Isa::block(p, least_of(rows - row, most));
      p.ahead += depth * ahead_lines * 64;
    }
  }
}

}  // namespace

#include "lagged_products.h"
