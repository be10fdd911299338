// Products of the encoder in tiles of eight bits: tiles are used as in tile_products.h.
#pragma once

#include "../encoder/int8.h"
#include "tile_products.h"

namespace {

struct TileCodes {
  static constexpr int kRows = 32;
  static constexpr bool kTiles = true;

  // 16 rows, or 32 if `kTwo`; `side(panel)` is work for the vector units meanwhile.
  template <bool kTwo, class Side>
  static MILLPOND_INLINE void multiply(const CodeProduct& p, int32_t* to, const Side& side) {
    const uint8_t* rows = p.rows;
    const int8_t* unit = p.unit;
    const char* ahead = p.ahead;
    constexpr int64_t kBytes = 4 * kColumns;
    _tile_zero(0);
    _tile_zero(1);
    if (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
    TileIsa::written();
    for (int64_t k = 0; k < p.depth; k++, rows += p.panel, unit += 2048) {
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
      fetch(ahead, p.ahead_lines);
      ahead += 64 * p.ahead_lines;
      side(k);
    }
    _tile_stored(0, to, kBytes);
    _tile_stored(1, to + 16, kBytes);
    if (kTwo) {
      _tile_stored(2, to + 16 * kColumns, kBytes);
      _tile_stored(3, to + 16 * kColumns + 16, kBytes);
    }
  }

  // Integers [kRows, kColumns]. Whole tiles of 16 rows are read and written, whatever is in the rows behind the last one.
  template <class Side>
  static MILLPOND_INLINE void block(const CodeProduct& p, int64_t rows, int32_t* to, const Side& side) {
    if (rows > 16)
      multiply<true>(p, to, side);
    else
      multiply<false>(p, to, side);
  }
};

template <>
struct Int8Of<TileIsa> {
  using Type = TileCodes;
};

}  // namespace
