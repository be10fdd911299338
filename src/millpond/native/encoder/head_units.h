// Keys and values of one head in bfloat16, packed like weights (products.h): keys as units of 32 keys, values as units of
// 32 columns. `row(key, column)` of `Rows` is the address of a number of a key; 32 numbers, or the last 16 of a dim that
// is no multiple of 32, are read from there. What a unit lacks is 0.
#pragma once

#include "states.h"

namespace {

// The rows of a block with the keys that a text attends to: those of the text that it continues, then its own.
struct KeyRows {
  int64_t lead_start, lead;  // lead: number of keys of the other text; 0: it continues none
  int64_t start;             // of its own rows

  MILLPOND_INLINE int64_t row(int64_t key) const { return key < lead ? lead_start + key : start + key - lead; }
};

#ifdef __AVX512BW__

// Transposes 16 rows of 16 numbers of 32 bits.
MILLPOND_INLINE void transpose(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

MILLPOND_INLINE void transpose(Floats rows[16]) {
  __m512i bits[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) bits[i] = as_ints(rows[i]);
  transpose(bits);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) rows[i] = as_floats(bits[i]);
}

inline __mmask32 columns_left(int64_t dim, int64_t column) { return dim - column >= 32 ? 0xffffffffu : 0xffffu; }

// [units of 32 keys][dim / 32][2 halves][16 pairs of columns][16 keys][2], dim rounded up.
template <class Rows>
void pack_key_units(const Rows& rows, int64_t count, int64_t dim, uint16_t* to) {
  for (int64_t unit = 0; unit < count; unit += 32)
    for (int64_t column = 0; column < dim; column += 32) {
      const __mmask32 mask = columns_left(dim, column);
      for (int64_t key = unit; key < unit + 32; key += 16, to += 512) {
        __m512i pairs[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
          pairs[i] =
              key + i < count ? _mm512_maskz_loadu_epi16(mask, rows.row(key + i, column)) : _mm512_setzero_si512();
        transpose(pairs);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + 32 * i, pairs[i]);
      }
    }
}

// [dim / 32][units of 32 keys][2 halves][16 pairs of keys][16 columns][2], dim rounded up.
template <class Rows>
void pack_value_units(const Rows& rows, int64_t count, int64_t dim, uint16_t* to) {
  for (int64_t column = 0; column < dim; column += 32) {
    const __mmask32 mask = columns_left(dim, column);
    for (int64_t unit = 0; unit < count; unit += 32, to += 1024)
      for (int64_t pair = 0; pair < 16; pair++) {
        const int64_t key = unit + 2 * pair;
        const __m512i none = _mm512_setzero_si512();
        const __m512i even = key < count ? _mm512_maskz_loadu_epi16(mask, rows.row(key, column)) : none;
        const __m512i odd = key + 1 < count ? _mm512_maskz_loadu_epi16(mask, rows.row(key + 1, column)) : none;
        const auto halves = [](__m256i low, __m256i high) {
          return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
        };
        _mm512_storeu_si512(to + 32 * pair, halves(_mm512_castsi512_si256(even), _mm512_castsi512_si256(odd)));
        _mm512_storeu_si512(to + 512 + 32 * pair,
                            halves(_mm512_extracti64x4_epi64(even, 1), _mm512_extracti64x4_epi64(odd, 1)));
      }
  }
}

#elif defined(__AVX2__)

// Transposes 8 rows of 8 numbers.
MILLPOND_INLINE void transpose(Floats r[8]) {
  Floats t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) r[i] = t[i];
}

#endif

}  // namespace
