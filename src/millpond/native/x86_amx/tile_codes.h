// Products of the encoder in tiles of eight bits: codes of states, which have no sign, with int8 weights.
//
// The tiles are used as in tile_products.h. By peak this is twice as fast as bfloat16, and the vectors have the same work:
// how much is left of it was not measured.
#pragma once

#include "../encoder/int8.h"
#include "tile_products.h"

namespace {

struct CodeTileIsa {
  static constexpr int kRows = TileIsa::kRows;

  template <bool kTwo, class Side>
  static MILLPOND_INLINE void multiply(const CodeProduct& p, const Side& side) {
    const uint8_t* rows = p.rows;
    const int8_t* unit = p.unit;
    const int64_t panel = p.panel, depth = p.depth;
    int32_t* to = p.to;
    TileIsa::written();
    _tile_zero(0);
    _tile_zero(1);
    if (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k++, rows += panel, unit += 2048) {
      _tile_loadd(4, unit, 64);
      _tile_stream_loadd(6, rows, 64);
      _tile_loadd(5, unit + 1024, 64);
      _tile_dpbusd(0, 6, 4);
      _tile_dpbusd(1, 6, 5);
      if (kTwo) {
        _tile_stream_loadd(7, rows + 1024, 64);
        _tile_dpbusd(2, 7, 4);
        _tile_dpbusd(3, 7, 5);
      }
      side(k);
    }
    _tile_stored(0, to, 128);
    _tile_stored(1, to + 16, 128);
    if (kTwo) {
      _tile_stored(2, to + 16 * kColumns, 128);
      _tile_stored(3, to + 16 * kColumns + 16, 128);
    }
  }

  template <class Side>
  static MILLPOND_INLINE void block(const CodeProduct& p, int64_t rows, const Side& side) {
    if (rows > 16)
      multiply<true>(p, side);
    else
      multiply<false>(p, side);
  }
  static MILLPOND_INLINE void block(const CodeProduct& p, int64_t rows) {
    const char* ahead = p.ahead;
    block(p, rows, [&](int64_t) __attribute__((always_inline)) {
      fetch(ahead, p.ahead_lines);
      ahead += 64 * p.ahead_lines;
    });
  }
};

template <>
struct Int8Of<TileIsa> {
  static constexpr bool kOffered = true;
  using Type = CodeTileIsa;
};

}  // namespace
