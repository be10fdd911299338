// The precision of a model's states, and the layouts of a block's buffers.
//
//   states  panels of 64 bytes a row: [columns / kPanel][rows][kPanel], kPanel 32 in bfloat16 and 16 in float32. The rows
//           of a panel are neighbours in memory: a tile of 16 rows is one KiB, at any row.
//   sums    units of float32: [columns / kColumns][rows][kColumns], kColumns two vectors.
#pragma once

#include <cstring>

#include "vectors.h"

namespace {

constexpr int64_t kColumns = 2 * kLanes;  // of a unit: what a product computes at a time

struct Float32 {
  using State = float;
  static constexpr bool kExact = true;  // functions to the last digits of float32
  static constexpr int64_t kPanel = 16;
  static MILLPOND_INLINE Floats load_state(const State* from) { return load(from); }
  static MILLPOND_INLINE void store_state(State* to, Floats x) { store(to, x); }
};

#ifdef __AVX512BF16__
struct Bfloat16States {
  using State = uint16_t;
  static constexpr bool kExact = false;  // to the last digits of bfloat16
  static constexpr int64_t kPanel = 32;
  static MILLPOND_INLINE Floats load_state(const State* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
  }
  static MILLPOND_INLINE void store_state(State* to, Floats x) {
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x));
  }
};
#endif

template <class Precision>
struct States {
  typename Precision::State* at;
  int64_t stride;  // from panel to panel

  MILLPOND_INLINE typename Precision::State* row(int64_t row, int64_t column) const {
    return at + column / Precision::kPanel * stride + row * Precision::kPanel + column % Precision::kPanel;
  }
};

struct Sums {
  float* at;
  int64_t stride;  // from unit to unit

  MILLPOND_INLINE float* row(int64_t row, int64_t column) const {
    return at + column / kColumns * stride + row * kColumns + column % kColumns;
  }
};

}  // namespace
