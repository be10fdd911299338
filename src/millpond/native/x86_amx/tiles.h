// Products of rows and queries in tiles: 16 rows of 64 bytes. Written for AMX, which only new servers have; the tests run
// it with the tile instructions emulated.
#pragma once

#include "../codecs.h"

namespace {

constexpr int kTileWords = 16;  // of a row that a tile holds, and rows of a tile

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Tiles 0 to 3 are sums, [16 rows][16 query tokens]; 4 and 5 are rows of documents, 6 and 7 words of queries.
//
// Rows are read where they are in memory, a block of neighbours at a time. The last words of a row that do not fill a
// tile are read with the ones before them, which the query has as 0 then: so nothing behind the row is read.
struct Tiles {
  static constexpr int64_t kBlock = 32;
  static constexpr int kExpansion = 1;
  static constexpr bool kReadsMemory = true;

  static void begin(int64_t words) {
    const int64_t used = words < kTileWords ? words : kTileWords;
    TileConfig config;
    std::memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
      const bool document = tile == 4 || tile == 5, query = tile >= 6;
      config.rows[tile] = query ? uint8_t(used) : 16;
      config.row_bytes[tile] = document ? uint16_t(used * 4) : 64;
    }
    __asm__ volatile("" ::"r"(&config) : "memory");  // the instruction's declaration names the first 8 bytes only
    _tile_loadconfig(&config);
  }
  static void end() { _tile_release(); }
  static void arrange(uint32_t*, int64_t) {}

  static int64_t row_words(int64_t words) { return words; }
  static int64_t panel_words(int64_t words) { return words + kTileWords; }
  static void convert(Ints words, uint32_t* to) { store_bits(to, words); }

  // Adds bits to word `word` of a query token, and to its copy in the tile of the last words.
  static void set(uint32_t* panel, int64_t words, int64_t word, uint32_t bits) {
    panel[word * kLanes] |= bits;
    if (word >= words / kTileWords * kTileWords && words > kTileWords)
      panel[(word + kTileWords) * kLanes] |= bits;
  }

  template <class Codec, int N>
  static void multiply_tiles(const Product& product) {
    static_assert(kLanes == kTileWords, "a vector of query tokens is a column of tiles");
    const char* rows = (const char*)product.rows;
    const char* below = rows + 16 * product.stride;
    const int64_t whole = product.words / kTileWords, steps = (product.words + kTileWords - 1) / kTileWords;
    const bool two = product.count > 16;
    const uint8_t* ahead = product.ahead - product.count * product.ahead_stride + kAhead;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    __asm__ volatile("" ::: "memory");
    for (int64_t step = 0; step < steps; step++) {
      int64_t column = step * kTileWords, word = column;
      if (step == whole && whole > 0) {  // the last words, with some before them
        column = product.words - kTileWords;
        word = product.words;
      }
      const uint32_t* query = product.panels + word * kLanes;
      if (product.ahead_stride > 0) prefetch(ahead + step * kBlock * 64, kBlock * 64);
      _tile_loadd(4, rows + column * 4, product.stride);
      _tile_loadd(6, query, 64);
      Codec::tile_product_0();
      if (two) {
        _tile_loadd(5, below + column * 4, product.stride);
        Codec::tile_product_2();
      }
      if (N == 2) {
        _tile_loadd(7, query + product.panel, 64);
        Codec::tile_product_1();
        if (two) Codec::tile_product_3();
      }
    }
    uint32_t* sums = product.sums;
    _tile_stored(0, sums, N * 64);
    if (N == 2) _tile_stored(1, sums + 16, N * 64);
    if (two) _tile_stored(2, sums + 16 * N * 16, N * 64);
    if (two && N == 2) _tile_stored(3, sums + 16 * N * 16 + 16, N * 64);
    __asm__ volatile("" ::: "memory");
  }
};

struct Int8Tiles : Tiles {
  static constexpr bool kRowsMayBeNan = false;
  static int64_t words(int64_t dim) { return Int8::words(dim); }
  static Floats similarity(Ints sum, const float* scale) { return Int8::similarity(sum, scale); }
  static void pack_query(const float* from, int64_t dim, int64_t words, uint32_t* to, float* scale, uint32_t*) {
    *scale = quantize_query(from, dim);
    for (int64_t d = 0; d < dim; d++)
      set(to, words, d / 4, uint32_t(quantized(from[d], *scale) & 0xff) << (d % 4 * 8));
  }
  static void tile_product_0() { _tile_dpbssd(0, 4, 6); }
  static void tile_product_1() { _tile_dpbssd(1, 4, 7); }
  static void tile_product_2() { _tile_dpbssd(2, 5, 6); }
  static void tile_product_3() { _tile_dpbssd(3, 5, 7); }
  template <int N>
  static void multiply(const Product& product) {
    multiply_tiles<Int8Tiles, N>(product);
  }
};

struct Bfloat16Tiles : Tiles {
  static constexpr bool kRowsMayBeNan = true;
  static int64_t words(int64_t dim) { return Bfloat16::words(dim); }
  static Floats similarity(Ints sum, const float*) { return as_floats(sum); }
  static void pack_query(const float* from, int64_t dim, int64_t words, uint32_t* to, float* scale, uint32_t*) {
    for (int64_t d = 0; d < dim; d++) set(to, words, d / 2, uint32_t(to_bfloat16(from[d])) << (d % 2 * 16));
    *scale = 1.0f;
  }
  static void tile_product_0() { _tile_dpbf16ps(0, 4, 6); }
  static void tile_product_1() { _tile_dpbf16ps(1, 4, 7); }
  static void tile_product_2() { _tile_dpbf16ps(2, 5, 6); }
  static void tile_product_3() { _tile_dpbf16ps(3, 5, 7); }
  template <int N>
  static void multiply(const Product& product) {
    multiply_tiles<Bfloat16Tiles, N>(product);
  }
};

}  // namespace
