// For approximate search: vectors of 16 lanes, and products of int8 rows with 16 packed rows at a time. The same source
// for AVX512-VNNI, AVX2 and NEON.
#pragma once

#ifdef __aarch64__
#include "arm_neon/products.h"
#else
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "lane_tiles.h"
#include "parallel.h"

namespace {
namespace approximate {

#if defined(__AVX512VNNI__)

constexpr int kRows = 8;  // rows multiplied at a time

struct Floats {
  __m512 v;
};
struct Ints {
  __m512i v;
};
using Mask = __mmask16;

inline Floats load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Ints load(const int32_t* from) { return {_mm512_loadu_si512(from)}; }
inline void store(float* to, Floats a) { _mm512_storeu_ps(to, a.v); }
inline void store(int32_t* to, Ints a) { _mm512_storeu_si512(to, a.v); }
inline Floats fill(float a) { return {_mm512_set1_ps(a)}; }
inline Ints fill(int32_t a) { return {_mm512_set1_epi32(a)}; }
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats larger(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Mask greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
inline Floats choose(Mask mask, Floats yes, Floats no) { return {_mm512_mask_mov_ps(no.v, mask, yes.v)}; }
inline Ints choose(Mask mask, Ints yes, Ints no) { return {_mm512_mask_mov_epi32(no.v, mask, yes.v)}; }
inline float sum(Floats a) { return _mm512_reduce_add_ps(a.v); }
// Rounded to the nearest even integer, 0 to 255.
inline void store_bytes(uint8_t* to, Floats a) {
  const __m512i rounded = _mm512_cvtps_epi32(_mm512_max_ps(a.v, _mm512_setzero_ps()));
  _mm_storeu_si128((__m128i*)to, _mm512_cvtusepi32_epi8(rounded));
}

// out[r][t] = the product of row r with the 16 rows of tile t. The rows are unsigned if the lanes are signed, else signed.
template <int kTiles, bool kSignedLanes>
inline void multiply(uint8_t const* const* rows, const uint8_t* packed, int64_t groups, Ints (&out)[kRows][kTiles]) {
  __m512i sums[kRows][kTiles];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
    for (int t = 0; t < kTiles; t++) sums[r][t] = _mm512_setzero_si512();
  for (int64_t k = 0; k < groups; k++) {
    __m512i lane[kTiles];
#pragma GCC unroll 2
    for (int t = 0; t < kTiles; t++) lane[t] = _mm512_loadu_si512(packed + (t * groups + k) * kTileGroup);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      int32_t columns;
      std::memcpy(&columns, rows[r] + k * kGroup, sizeof columns);
      const __m512i row = _mm512_set1_epi32(columns);
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; t++)
        sums[r][t] = kSignedLanes ? _mm512_dpbusd_epi32(sums[r][t], row, lane[t])
                                  : _mm512_dpbusd_epi32(sums[r][t], lane[t], row);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
    for (int t = 0; t < kTiles; t++) out[r][t].v = sums[r][t];
}

// Looks up the numbers of `width` packed bytes in 16 bytes: the lowest kBits of each come first, then the next of each.
template <int kBits>
inline void look_up(const uint8_t* packed, int64_t width, const uint8_t* levels, uint8_t* to) {
  const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)levels));
  const __m512i low = _mm512_set1_epi8((1 << kBits) - 1);
  const __m256i half_table = _mm512_castsi512_si256(table), half_low = _mm512_castsi512_si256(low);
  int64_t i = 0;
  for (; i + 64 <= width; i += 64) {
    __m512i bytes = _mm512_loadu_si512(packed + i);
#pragma GCC unroll 4
    for (int part = 0; part < 8 / kBits; part++, bytes = _mm512_srli_epi16(bytes, kBits))
      _mm512_storeu_si512(to + part * width + i, _mm512_shuffle_epi8(table, _mm512_and_si512(bytes, low)));
  }
  // What is stored is read at once, which waits after a store under a mask: only the rest is stored so.
  if (i + 32 <= width) {
    __m256i bytes = _mm256_loadu_si256((const __m256i*)(packed + i));
#pragma GCC unroll 4
    for (int part = 0; part < 8 / kBits; part++, bytes = _mm256_srli_epi16(bytes, kBits))
      _mm256_storeu_si256((__m256i*)(to + part * width + i),
                          _mm256_shuffle_epi8(half_table, _mm256_and_si256(bytes, half_low)));
    i += 32;
  }
  if (i < width) {
    const __mmask32 some = (__mmask32(1) << (width - i)) - 1;
    __m256i bytes = _mm256_maskz_loadu_epi8(some, packed + i);
#pragma GCC unroll 4
    for (int part = 0; part < 8 / kBits; part++, bytes = _mm256_srli_epi16(bytes, kBits))
      _mm256_mask_storeu_epi8(to + part * width + i, some,
                              _mm256_shuffle_epi8(half_table, _mm256_and_si256(bytes, half_low)));
  }
}

#elif defined(__AVX2__)

constexpr int kRows = 2;

struct Floats {
  __m256 a, b;
};
struct Ints {
  __m256i a, b;
};
struct Mask {
  __m256 a, b;
};

inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline Ints load(const int32_t* from) {
  return {_mm256_loadu_si256((const __m256i*)from), _mm256_loadu_si256((const __m256i*)(from + 8))};
}
inline void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.a);
  _mm256_storeu_ps(to + 8, x.b);
}
inline void store(int32_t* to, Ints x) {
  _mm256_storeu_si256((__m256i*)to, x.a);
  _mm256_storeu_si256((__m256i*)(to + 8), x.b);
}
inline Floats fill(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Ints fill(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Floats operator+(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats operator-(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats operator*(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Ints operator-(Ints x, Ints y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline Floats multiply_add(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats larger(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Mask greater(Floats x, Floats y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)};
}
inline Floats choose(Mask mask, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.a, yes.a, mask.a), _mm256_blendv_ps(no.b, yes.b, mask.b)};
}
inline Ints choose(Mask mask, Ints yes, Ints no) {
  return {_mm256_blendv_epi8(no.a, yes.a, _mm256_castps_si256(mask.a)),
          _mm256_blendv_epi8(no.b, yes.b, _mm256_castps_si256(mask.b))};
}
inline float sum(Floats x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline void store_bytes(uint8_t* to, Floats x) {
  // Packing to 16 bits saturates at 32767, and to bytes at 0 and 255; it interleaves the halves of a vector.
  const __m256 most = _mm256_set1_ps(65536.0f);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_min_ps(x.a, most)),
                                                                    _mm256_cvtps_epi32(_mm256_min_ps(x.b, most))),
                                                 0xd8);
  _mm_storeu_si128((__m128i*)to,
                   _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

template <bool kSigned>
inline __m256i widen(__m128i bytes) {
  return kSigned ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes);
}

template <int kTiles, bool kSignedLanes>
inline void multiply(uint8_t const* const* rows, const uint8_t* packed, int64_t groups, Ints (&out)[kRows][kTiles]) {
  for (int t = 0; t < kTiles; t++) {
    const uint8_t* tile = packed + t * groups * kTileGroup;
    __m256i sums[kRows][4];  // of 4 lanes each, in two parts a lane
    for (int r = 0; r < kRows; r++)
      for (int q = 0; q < 4; q++) sums[r][q] = _mm256_setzero_si256();
    for (int64_t k = 0; k < groups; k++) {
      __m256i row[kRows];
      for (int r = 0; r < kRows; r++) {
        int32_t columns;
        std::memcpy(&columns, rows[r] + k * kGroup, sizeof columns);
        row[r] = widen<!kSignedLanes>(_mm_set1_epi32(columns));
      }
      for (int q = 0; q < 4; q++) {
        const __m128i bytes = _mm_loadu_si128((const __m128i*)(tile + k * kTileGroup + q * 16));
        const __m256i lane = widen<kSignedLanes>(bytes);
        for (int r = 0; r < kRows; r++)
          sums[r][q] = _mm256_add_epi32(sums[r][q], _mm256_madd_epi16(lane, row[r]));
      }
    }
    for (int r = 0; r < kRows; r++) {
      out[r][t].a = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[r][0], sums[r][1]), 0xd8);
      out[r][t].b = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[r][2], sums[r][3]), 0xd8);
    }
  }
}

template <int kBits>
inline void look_up(const uint8_t* packed, int64_t width, const uint8_t* levels, uint8_t* to) {
  constexpr int kMask = (1 << kBits) - 1;
  const __m128i table = _mm_loadu_si128((const __m128i*)levels), low = _mm_set1_epi8(kMask);
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) {
    __m128i bytes = _mm_loadu_si128((const __m128i*)(packed + i));
#pragma GCC unroll 4
    for (int part = 0; part < 8 / kBits; part++, bytes = _mm_srli_epi16(bytes, kBits))
      _mm_storeu_si128((__m128i*)(to + part * width + i), _mm_shuffle_epi8(table, _mm_and_si128(bytes, low)));
  }
  for (; i < width; i++)
    for (int part = 0; part < 8 / kBits; part++) to[part * width + i] = levels[packed[i] >> (part * kBits) & kMask];
}

#endif

inline int64_t groups_of(int64_t columns) { return (columns + kGroup - 1) / kGroup; }
inline int64_t tiles_of(int64_t rows) { return (rows + kLanes - 1) / kLanes; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// The first of `several` pieces of work that no thread has taken.
inline int64_t take(int64_t* next, int64_t several) { return __atomic_fetch_add(next, several, __ATOMIC_RELAXED); }

// Runs a job in at most `threads` threads, each of which has as much to do as `worth` says.
inline void run(void (*work)(void*), void* job, int64_t threads, int64_t size, int64_t worth) {
  run_threads(work, job, smaller(threads, 1 + size / worth));
}

// int8 rows [count, dim] as lanes; 128 is added to make them unsigned. Room for tiles_of(count) * groups * 64 bytes.
inline void pack(const int8_t* rows, int64_t count, int64_t dim, int64_t groups, bool is_signed, uint8_t* packed) {
  std::memset(packed, 0, tiles_of(count) * groups * kTileGroup);
  for (int64_t i = 0; i < count; i++) {
    uint8_t* tile = packed + i / kLanes * groups * kTileGroup + i % kLanes * kGroup;
    for (int64_t d = 0; d < dim; d++)
      tile[d / kGroup * kTileGroup + d % kGroup] = uint8_t(rows[i * dim + d]) ^ (is_signed ? 0 : 0x80);
  }
}

}  // namespace approximate
}  // namespace
