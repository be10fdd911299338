// Products of the encoder in tiles of bfloat16.
//
// Tiles 0 to 3 are sums of 32 rows and 32 columns, 4 and 5 are of a unit, 6 and 7 of rows. The rows are loaded with
// TILELOADDT1: they pass by once for each unit, and plain loads would push the unit out of the first cache, which holds
// 48 KiB on the Xeons with AMX. Measured there, this made a product a quarter faster; the same for units gave nothing.
#pragma once

#include "../encoder/products.h"

namespace {

template <class State>
struct AttentionRows;

struct TileIsa : Bfloat16States {
  static constexpr int kRows = 32;
  static constexpr int64_t kMostDepth = 12;  // a unit of 24 KiB; 1,536 inner numbers in one go were a sixth slower
  static constexpr bool kTiles = true;

  static void begin() {
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config;
    std::memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = 16;
    }
    written(&config);
    _tile_loadconfig(&config);
  }
  static void end() { _tile_release(); }

  static void attend(const AttentionRows<uint16_t>& rows);  // tile_attention.h

  // Stores before this are done when it returns: GCC 12 does not know that a tile load reads memory.
  static MILLPOND_INLINE void written(const void* at = nullptr) { __asm__ volatile("" ::"r"(at) : "memory"); }

  // 16 rows, or 32 if `kTwo`; `side(panel)` is work for the vector units meanwhile.
  template <bool kTwo, class Side>
  static MILLPOND_INLINE void multiply(const BlockProduct<uint16_t>& p, const Side& side) {
    const uint16_t *rows = p.rows, *unit = p.unit;
    const int64_t panel = p.panel, depth = p.depth, from_bytes = 4 * p.from_stride, to_bytes = 4 * p.to_stride;
    const float* from = p.from;
    float* to = p.to;
    written();
    _tile_loadd(0, from, from_bytes);
    _tile_loadd(1, from + 16, from_bytes);
    if (kTwo) {
      _tile_loadd(2, from + 16 * p.from_stride, from_bytes);
      _tile_loadd(3, from + 16 * p.from_stride + 16, from_bytes);
    }
    for (int64_t k = 0; k < depth; k++, rows += panel, unit += 1024) {
      _tile_loadd(4, unit, 64);
      _tile_stream_loadd(6, rows, 64);
      _tile_loadd(5, unit + 512, 64);
      _tile_dpbf16ps(0, 6, 4);
      _tile_dpbf16ps(1, 6, 5);
      if (kTwo) {
        _tile_stream_loadd(7, rows + 512, 64);
        _tile_dpbf16ps(2, 7, 4);
        _tile_dpbf16ps(3, 7, 5);
      }
      side(k);
    }
    _tile_stored(0, to, to_bytes);
    _tile_stored(1, to + 16, to_bytes);
    if (kTwo) {
      _tile_stored(2, to + 16 * p.to_stride, to_bytes);
      _tile_stored(3, to + 16 * p.to_stride + 16, to_bytes);
    }
  }

  // Whole tiles of 16 rows are read and written, whatever is in the rows behind the last one.
  template <class Side>
  static MILLPOND_INLINE void block(const BlockProduct<uint16_t>& p, int64_t rows, const Side& side) {
    if (rows > 16)
      multiply<true>(p, side);
    else
      multiply<false>(p, side);
  }
  static MILLPOND_INLINE void block(const BlockProduct<uint16_t>& p, int64_t rows) {
    const char* ahead = p.ahead;
    block(p, rows, [&](int64_t) __attribute__((always_inline)) {
      fetch(ahead, p.ahead_lines);
      ahead += 64 * p.ahead_lines;
    });
  }
};

}  // namespace
