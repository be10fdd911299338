// How rows of each codec are multiplied by query tokens, 32 bits of a row (a word: four int8, two bfloat16, one float32)
// at a time. Queries are packed into panels, [words][lanes], so that a word of a row times a word of the panel adds to the
// similarities of as many query tokens as a vector has lanes.
#pragma once

#include <cstring>

#include "lanes.h"
#include "packing.h"

#ifdef __aarch64__
#include "arm_neon/words.h"
#endif

namespace {

constexpr int64_t kAhead = 2048;  // bytes ahead at which rows that are read in place are brought into the cache

inline void prefetch(const uint8_t* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 3);
}

// A block of rows times vectors of query tokens.
struct Product {
  const void* rows;         // [count], as the codec multiplies them
  int64_t stride, count;    // bytes from a row to the next
  int64_t words;            // of a row in memory
  const uint32_t* panels;   // [vectors][panel]
  int64_t panel;            // words from a vector's panel to the next
  const uint32_t* offsets;  // [vectors][lanes], what the sums start at
  uint32_t* sums;           // [count][vectors][lanes]
  const uint8_t* ahead;     // the rows to bring into the cache meanwhile: as many as there are here
  int64_t ahead_stride;     // 0: none
};

// Words of rows into the form in which the codec multiplies them.
template <class Codec>
inline void copy(const uint8_t* from, int64_t words, uint32_t* to) {
  int64_t w = 0;
  for (; w + kLanes <= words; w += kLanes) {
    Codec::convert(load_bits(from + w * 4), to + w * Codec::kExpansion);
  }
  if (w == words) return;
  alignas(64) uint32_t rest[kLanes] = {}, converted[kLanes * Codec::kExpansion];
  std::memcpy(rest, from + w * 4, (words - w) * 4);
  Codec::convert(load_bits(rest), converted);
  std::memcpy(to + w * Codec::kExpansion, converted, (words - w) * 4 * Codec::kExpansion);
}

// A product of N vectors and copied rows, kRows at a time in registers. Up to kRows - 1 rows more than there are get sums,
// of whatever the copy's memory holds.
template <class Codec, int N>
inline void multiply_copied(const Product& product) {
  constexpr int R = Codec::kRows;
  const int64_t stride = product.stride, words = product.words * Codec::kExpansion;
  const int64_t step = (R * product.ahead_stride + words - 1) / words;
  const char* ahead = (const char*)product.ahead;
  uint32_t* sums = product.sums;
  for (int64_t first = 0; first < product.count; first += R, sums += R * N * kLanes) {
    const char* row[R / 3];
    for (int r = 0; r < R / 3; r++) row[r] = (const char*)product.rows + (first + 3 * r) * stride;
    Ints sum[R][N];
    for (int n = 0; n < N; n++) {
      const Ints offset = load_bits(product.offsets + n * kLanes);
      for (int r = 0; r < R; r++) sum[r][n] = offset;
    }
    for (int64_t w = 0; w < words; w++) {
      Ints query[N];
      for (int n = 0; n < N; n++) query[n] = load_bits(product.panels + n * product.panel + w * kLanes);
      __builtin_prefetch(ahead, 0, 3);
      ahead += step;
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        int32_t word;
        std::memcpy(&word, row[r / 3] + r % 3 * stride + w * 4, sizeof word);
        const Ints all = broadcast_bits(word);
        for (int n = 0; n < N; n++) sum[r][n] = Codec::add_product(sum[r][n], all, query[n]);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) store_bits(sums + (r * N + n) * kLanes, sum[r][n]);
  }
}

// What the codecs share that copy rows before they multiply them.
struct Copied {
#ifdef __AVX512F__
  static constexpr int kRows = 12;  // times two vectors: 24 sums in 32 registers
#else
  static constexpr int kRows = 6;  // times two vectors: 12 sums in 16 registers
#endif
  static constexpr int64_t kBlock = 48;
  static constexpr bool kReadsMemory = false;
  static void begin(int64_t) {}
  static void end() {}
  // The panel of a vector of query tokens, once all of them are packed.
  static void arrange(uint32_t*, int64_t) {}
};

struct Float32 : Copied {
  static constexpr int kExpansion = 1;
  static constexpr bool kRowsMayBeNan = true;
  static int64_t words(int64_t dim) { return dim; }
  static int64_t row_words(int64_t words) { return words; }
  static int64_t panel_words(int64_t words) { return words; }
  static void convert(Ints words, uint32_t* to) { store_bits(to, words); }
  static Ints add_product(Ints sum, Ints word, Ints query) {
    return as_ints(multiply_add(as_floats(word), as_floats(query), as_floats(sum)));
  }
  static Floats similarity(Ints sum, const float*) { return as_floats(sum); }
  static void pack_query(const float* from, int64_t dim, int64_t, uint32_t* to, float* scale, uint32_t*) {
    for (int64_t d = 0; d < dim; d++) std::memcpy(to + d * kLanes, from + d, 4);
    *scale = 1.0f;
  }
  template <int N>
  static void multiply(const Product& product) {
    multiply_copied<Float32, N>(product);
  }
};

// Without an instruction for it, bfloat16 is multiplied as float32: exactly, and added in float32.
struct Bfloat16 : Copied {
  static constexpr bool kRowsMayBeNan = true;
  static int64_t words(int64_t dim) { return (dim + 1) / 2; }
  static Floats similarity(Ints sum, const float*) { return as_floats(sum); }
#ifdef __AVX512BF16__
  static constexpr int kExpansion = 1;
  static void convert(Ints words, uint32_t* to) { store_bits(to, words); }
  static Ints add_product(Ints sum, Ints word, Ints query) {
    return as_ints(_mm512_dpbf16_ps(as_floats(sum), (__m512bh)word, (__m512bh)query));
  }
#else
  static constexpr int kExpansion = 2;
  // [low, high] halves of a word are the columns [2 w, 2 w + 1]: they stay in order.
  static void convert(Ints words, uint32_t* to) {
#if defined(__aarch64__)
    widen_bfloat16(words, to);
#elif defined(__AVX512F__)
    store_bits(to, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(words)), 16));
    store_bits(to + kLanes, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words, 1)), 16));
#else
    store_bits(to, _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(words)), 16));
    store_bits(to + kLanes, _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(words, 1)), 16));
#endif
  }
  static Ints add_product(Ints sum, Ints word, Ints query) { return Float32::add_product(sum, word, query); }
#endif
  static int64_t row_words(int64_t words) { return words * kExpansion; }
  static int64_t panel_words(int64_t words) { return words * kExpansion; }
  static void pack_query(const float* from, int64_t dim, int64_t, uint32_t* to, float* scale, uint32_t*) {
    for (int64_t d = 0; d < dim; d++) {
      const uint16_t half = to_bfloat16(from[d]);
      if (kExpansion == 2)
        to[d * kLanes] = uint32_t(half) << 16;
      else
        to[d / 2 * kLanes] |= uint32_t(half) << (d % 2 * 16);
    }
    *scale = 1.0f;
  }
  template <int N>
  static void multiply(const Product& product) {
    multiply_copied<Bfloat16, N>(product);
  }
};

// int8 queries: the largest magnitude of a token is 127, the scale float32. Returns the scale; NaN for a token with a
// NaN or an infinity.
inline float quantize_query(const float* from, int64_t dim) {
  uint32_t most = 0;
  for (int64_t d = 0; d < dim; d++) {
    uint32_t bits;
    std::memcpy(&bits, from + d, sizeof bits);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  return most < 0x7f800000 ? largest / 127.0f : __builtin_nanf("");
}

inline int32_t quantized(float number, float scale) {
  return scale > 0.0f ? int32_t(__builtin_rintf(number / scale)) : 0;
}

struct Int8 : Copied {
  static constexpr bool kRowsMayBeNan = false;  // their scales are looked at
  static int64_t words(int64_t dim) { return (dim + 3) / 4; }
  static Floats similarity(Ints sum, const float* scale) { return scaled(to_floats(sum), broadcast(*scale)); }
#ifdef MILLPOND_BYTE_PRODUCTS
  // The processor multiplies unsigned by signed: rows are offset by 128, and the sums start at -128 times the sum of
  // the query. All of it is exact.
  static constexpr int kExpansion = 1;
  static void convert(Ints words, uint32_t* to) {
    store_bits(to, words ^ broadcast_bits(int32_t(0x80808080)));
  }
  static Ints add_product(Ints sum, Ints word, Ints query) { return add_byte_products(sum, word, query); }
  static void pack_query(const float* from, int64_t dim, int64_t, uint32_t* to, float* scale, uint32_t* offset) {
    *scale = quantize_query(from, dim);
    int32_t sum = 0;
    for (int64_t d = 0; d < dim; d++) {
      const int32_t number = quantized(from[d], *scale);
      to[d / 4 * kLanes] |= uint32_t(number & 0xff) << (d % 4 * 8);
      sum += number;
    }
    *offset = uint32_t(-128 * sum);
  }
#elif defined(__ARM_FEATURE_DOTPROD)
  static constexpr int kExpansion = 1;
  static void convert(Ints words, uint32_t* to) { store_bits(to, words); }
  static Ints add_product(Ints sum, Ints word, Ints query) { return add_dot(sum, word, query); }
  static void pack_query(const float* from, int64_t dim, int64_t, uint32_t* to, float* scale, uint32_t*) {
    *scale = quantize_query(from, dim);
    for (int64_t d = 0; d < dim; d++)
      to[d / 4 * kLanes] |= uint32_t(quantized(from[d], *scale) & 0xff) << (d % 4 * 8);
  }
#else
  // Products of 16-bit numbers, added in pairs: those of 8 bits would saturate.
  static constexpr int kExpansion = 2;
#ifdef __aarch64__
  static void convert(Ints words, uint32_t* to) { widen_int8(words, to); }
  static Ints add_product(Ints sum, Ints word, Ints query) { return add_pairs(sum, word, query); }
#else
  static void convert(Ints words, uint32_t* to) {
    store_bits(to, _mm256_cvtepi8_epi16(_mm256_castsi256_si128(words)));
    store_bits(to + kLanes, _mm256_cvtepi8_epi16(_mm256_extracti128_si256(words, 1)));
  }
  static Ints add_product(Ints sum, Ints word, Ints query) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(word, query));
  }
#endif
  static void pack_query(const float* from, int64_t dim, int64_t, uint32_t* to, float* scale, uint32_t*) {
    *scale = quantize_query(from, dim);
    for (int64_t d = 0; d < dim; d++)
      to[d / 2 * kLanes] |= uint32_t(quantized(from[d], *scale) & 0xffff) << (d % 2 * 16);
  }
#endif
  static int64_t row_words(int64_t words) { return words * kExpansion; }
  static int64_t panel_words(int64_t words) { return words * kExpansion; }
  template <int N>
  static void multiply(const Product& product) {
    multiply_copied<Int8, N>(product);
  }
};

}  // namespace
