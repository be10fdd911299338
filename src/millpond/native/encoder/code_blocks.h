// Integer products of a block of rows in eight bits with one unit of a weight, for the vector instructions of x86-64.
//
// States are unsigned, weights signed. AVX512-VNNI and AVX-VNNI add four products to a sum of 32 bits at once. AVX2 adds
// two as a number of 16 bits, which saturates, and widening costs as much again: there two such numbers are added first,
// and pack_rows.h makes the weights so small that nothing reaches 32768: kMostOfLane is what the weights of one sign add
// up to at most among those that meet in 16 bits. Of weights that are normally distributed that costs a bit.
#pragma once

#include "code_product.h"

namespace {

constexpr int kCodeGroup = 4;  // inner numbers of a column that are neighbours

// Codes of kLanes numbers. Both terms are rounded before they are added: the least number's code is 0, the greatest's 255
// or cut to it.
MILLPOND_INLINE void store_codes(uint8_t* to, Floats codes, Ints zero) {
#ifdef __AVX512F__
  _mm_storeu_si128((__m128i*)to, _mm512_cvtusepi32_epi8(_mm512_add_epi32(_mm512_cvtps_epi32(codes), zero)));
#else
  const __m256i whole = _mm256_add_epi32(_mm256_cvtps_epi32(codes), zero);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(words, words));
#endif
}

#ifdef __AVX512BF16__
// Codes of twice 32 numbers in bfloat16, of 0 if there are no second ones.
MILLPOND_INLINE void store_codes(uint8_t* to, const uint16_t* first, const uint16_t* second, Floats codes, Ints zero) {
  const Ints zeros = _mm512_or_si512(zero, _mm512_slli_epi32(zero, 16));
  const auto words = [&](const uint16_t* from) __attribute__((always_inline)) {
    const Ints bits = from ? _mm512_loadu_si512(from) : _mm512_setzero_si512();
    const Ints even = _mm512_cvtps_epi32(scaled(as_floats(_mm512_slli_epi32(bits, 16)), codes));
    const Ints odd = _mm512_cvtps_epi32(scaled(as_floats(_mm512_and_si512(bits, broadcast_bits(int32_t(0xffff0000)))), codes));
    return _mm512_add_epi16(_mm512_mask_blend_epi16(0xaaaaaaaa, even, _mm512_slli_epi32(odd, 16)), zeros);
  };
  const Ints bytes = _mm512_packus_epi16(words(first), words(second));  // of 8 numbers of each in turn
  store_bits(to, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), bytes));
}
#endif

// Numbers from -127 to 127 as bytes, the four of a lane side by side.
MILLPOND_INLINE Ints signed_bytes(Floats a, Floats b, Floats c, Floats d) {
#ifdef __AVX512F__
  const auto byte = [](Floats x) { return _mm512_and_si512(_mm512_cvtps_epi32(x), _mm512_set1_epi32(255)); };
  const Ints low = _mm512_or_si512(byte(a), _mm512_slli_epi32(byte(b), 8));
  const Ints high = _mm512_or_si512(byte(c), _mm512_slli_epi32(_mm512_cvtps_epi32(d), 8));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
#else
  const auto byte = [](Floats x) { return _mm256_and_si256(_mm256_cvtps_epi32(x), _mm256_set1_epi32(255)); };
  const Ints low = _mm256_or_si256(byte(a), _mm256_slli_epi32(byte(b), 8));
  const Ints high = _mm256_or_si256(byte(c), _mm256_slli_epi32(_mm256_cvtps_epi32(d), 8));
  return _mm256_or_si256(low, _mm256_slli_epi32(high, 16));
#endif
}

#ifdef MILLPOND_BYTE_PRODUCTS
constexpr int kTogether = 1;  // groups of four inner numbers
MILLPOND_INLINE Ints add_groups(Ints sum, const Ints* states, const Ints* weights) {
  return add_byte_products(sum, states[0], weights[0]);
}
#else
constexpr int kTogether = 2;
constexpr int kMostOfLane = 128;  // times states of 255: 32640
MILLPOND_INLINE Ints add_groups(Ints sum, const Ints* states, const Ints* weights) {
  const Ints halves = _mm256_add_epi16(_mm256_maddubs_epi16(states[0], weights[0]),
                                       _mm256_maddubs_epi16(states[1], weights[1]));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(halves, _mm256_set1_epi16(1)));
}
#endif

// The sums of a block's first R rows: not an array, which the compiler would keep in memory.
template <int R>
struct BlockSums {
  BlockSums<R - 1> before;
  Ints low = broadcast_bits(0), high = broadcast_bits(0);

  MILLPOND_INLINE void multiply(const uint8_t* rows, const Ints* low_weights, const Ints* high_weights) {
    before.multiply(rows, low_weights, high_weights);
    Ints states[kTogether];
#pragma GCC unroll 2
    for (int i = 0; i < kTogether; i++) {
      int32_t four;
      std::memcpy(&four, rows + (R - 1) * kCodePanel + 4 * i, sizeof four);
      states[i] = broadcast_bits(four);
    }
    low = add_groups(low, states, low_weights);
    high = add_groups(high, states, high_weights);
  }

  template <class To>
  MILLPOND_INLINE void add_to(const To& to) {
    before.add_to(to);
    __asm__ volatile("" : "+v"(low), "+v"(high));  // else GCC stores every sum in the loop, too
    to.add(R - 1, low, high);
  }
};
template <>
struct BlockSums<0> {
  MILLPOND_INLINE void multiply(const uint8_t*, const Ints*, const Ints*) {}
  template <class To>
  MILLPOND_INLINE void add_to(const To&) {}
};

struct VectorCodes {
  static constexpr int kRows = kLanes == 16 ? 10 : 6;  // 12 were measured: slower on Zen 4
  static constexpr bool kTiles = false;

  // `kGroups` of four inner numbers are a panel.
  template <int R, int kGroups = kCodePanel / kCodeGroup, class To>
  static void rows_of(const CodeProduct& p, const To& to) {
    constexpr int64_t kGroup = 4 * kLanes, kHalf = kGroups * kGroup;
    BlockSums<R> sums;
    const uint8_t* a = p.rows;
    const int8_t* b = p.unit;
    const char* ahead = p.ahead;
    for (int64_t k = 0; k < p.depth; k++, a += p.panel, b += 2 * kHalf) {
      fetch(ahead, p.ahead_lines);
      ahead += 64 * p.ahead_lines;
#pragma GCC unroll 4
      for (int d = 0; d < kGroups; d += kTogether) {
        Ints low[kTogether], high[kTogether];
#pragma GCC unroll 2
        for (int i = 0; i < kTogether; i++) {
          low[i] = load_bits(b + (d + i) * kGroup);
          high[i] = load_bits(b + kHalf + (d + i) * kGroup);
        }
        sums.multiply(a + 4 * d, low, high);
      }
    }
    sums.add_to(To(to));  // a copy, which no store may change
  }

  static void block(const CodeProduct& p, const CodeSums& sums, int64_t rows) {
    some_rows<VectorCodes, kRows>(p, sums, rows);
  }
};

}  // namespace
