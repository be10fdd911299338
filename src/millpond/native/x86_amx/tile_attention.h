// Attention of 16 query rows of a head, in tiles.
//
// It is bound by the vector operations of the softmax, not by the tiles: maxima of 16 rows by one tree, 2^x in seven
// operations, and the sums of the weights by a product with a tile of ones, which leaves them in every lane.
#pragma once

#include "../encoder/attention.h"
#include "tile_products.h"

namespace {

constexpr int64_t kTileRows = 16;
alignas(64) const uint16_t kOnes[512] = {
#define MILLPOND_ONES 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80
#define MILLPOND_MORE_ONES \
  MILLPOND_ONES, MILLPOND_ONES, MILLPOND_ONES, MILLPOND_ONES, MILLPOND_ONES, MILLPOND_ONES, MILLPOND_ONES, MILLPOND_ONES
    MILLPOND_MORE_ONES, MILLPOND_MORE_ONES, MILLPOND_MORE_ONES, MILLPOND_MORE_ONES,
    MILLPOND_MORE_ONES, MILLPOND_MORE_ONES, MILLPOND_MORE_ONES, MILLPOND_MORE_ONES,
#undef MILLPOND_MORE_ONES
#undef MILLPOND_ONES
};

// Rows of queries, and what they attend to. Keys and values are packed as in head_units.h.
struct TileQueries {
  const uint16_t* rows;   // [panels][16][32]
  int64_t panel, panels;  // from panel to panel; dim / 32
  int64_t count;          // rows that count
  int64_t position;       // of the first row, among the keys
  const uint16_t *keys, *values;
  int64_t key_count;
  int64_t value_unit;     // from a unit of values to the next
  int64_t before, after;  // how many positions back and ahead a row attends
  float scale, softcap;   // of the scores; a softcap of 0 is none
  float* scores;          // [keys / 16][16 rows][16 keys], keys rounded up to 32
  uint16_t* weights;      // [keys / 32][16 rows][32 keys]
};

struct NothingAdded {
  static constexpr bool kAny = false;
  MILLPOND_INLINE Floats at(int64_t, int64_t, __mmask16) const { return zeros(); }
};

// The largest number of each of 16 vectors, in a vector: 45 operations.
MILLPOND_INLINE Floats largest_of_each(const Floats rows[16]) {
  Floats two[8], four[4], half[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    two[i] = _mm512_max_ps(_mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]),
                           _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512d x = _mm512_castps_pd(two[2 * i]), y = _mm512_castps_pd(two[2 * i + 1]);
    four[i] = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    half[i] = _mm512_max_ps(_mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0x88),
                            _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0xdd));
  return _mm512_max_ps(_mm512_shuffle_f32x4(half[0], half[1], 0x88), _mm512_shuffle_f32x4(half[0], half[1], 0xdd));
}

MILLPOND_INLINE Ints narrowed(Floats low, Floats high) { return (Ints)_mm512_cvtne2ps_pbh(high, low); }

struct TileAttention {
  // Scores of keys [from, to) in tiles 0 and 1, with the queries of up to four panels in tiles 2 to 5.
  template <int kPanels>
  static MILLPOND_INLINE void score(const TileQueries& q, int64_t from, int64_t to) {
    TileIsa::written();
    if (kPanels >= 1) _tile_loadd(2, q.rows, 64);
    if (kPanels >= 2) _tile_loadd(3, q.rows + q.panel, 64);
    if (kPanels >= 3) _tile_loadd(4, q.rows + 2 * q.panel, 64);
    if (kPanels >= 4) _tile_loadd(5, q.rows + 3 * q.panel, 64);
    float* scores = q.scores;
    for (int64_t key = from; key < to; key += 32, scores += 512) {
      const uint16_t* unit = q.keys + key * 32 * q.panels;
      const bool two = key + 16 < to;
      _tile_zero(0);
      _tile_zero(1);
#define MILLPOND_PANEL(panel, tile)                     \
  _tile_loadd(6, unit + 1024 * (panel), 64);            \
  _tile_dpbf16ps(0, tile, 6);                           \
  if (two) {                                            \
    _tile_loadd(7, unit + 1024 * (panel) + 512, 64);    \
    _tile_dpbf16ps(1, tile, 7);                         \
  }
      if (kPanels >= 1) { MILLPOND_PANEL(0, 2) }
      if (kPanels >= 2) { MILLPOND_PANEL(1, 3) }
      if (kPanels >= 3) { MILLPOND_PANEL(2, 4) }
      if (kPanels >= 4) { MILLPOND_PANEL(3, 5) }
      if (kPanels == 0)  // any number of them
        for (int64_t panel = 0; panel < q.panels; panel++) {
          _tile_loadd(2, q.rows + panel * q.panel, 64);
          MILLPOND_PANEL(panel, 2)
        }
#undef MILLPOND_PANEL
      _tile_stored(0, scores, 64);
      if (two) _tile_stored(1, scores + 256, 64);
    }
  }

  // Which of the 16 keys from `key` on a row attends to.
  static MILLPOND_INLINE __mmask16 allowed(const TileQueries& q, int64_t position, int64_t key) {
    const int64_t first = most_of(position - q.before - key, 0);
    const int64_t last = least_of(least_of(position + q.after, q.key_count - 1) - key, 15);
    return last < first ? 0 : __mmask16((2u << last) - (1u << first));
  }

  static MILLPOND_INLINE __mmask16 existing(const TileQueries& q, int64_t key) {
    return q.key_count - key >= 16 ? __mmask16(0xffff) : __mmask16((1u << (q.key_count - key)) - 1);
  }

  // Puts all but scale and maximum into the scores of 16 keys: softcap, what is added, and -infinity where it is masked.
  template <class Added>
  static void adjust(const TileQueries& q, const Added& added, int64_t key, float* scores) {
    const Floats scale = broadcast(q.scale), none = broadcast(-__builtin_inff());
    const bool plain = !Added::kAny && q.softcap == 0.0f;
    for (int64_t r = 0; r < kTileRows; r++, scores += 16) {
      const int64_t row = least_of(r, q.count - 1), position = q.position + row;  // what is added ends with the last row
      Floats s = load(scores);
      if (!plain) {
        s = scaled(s, scale);
        if (q.softcap != 0.0f) s = scaled(tanh_of<true>(scaled(s, broadcast(1.0f / q.softcap))), broadcast(q.softcap));
        if (Added::kAny) s = sum_of(s, added.at(row, key, existing(q, key)));
        s = scaled(s, broadcast(kLog2E));
      }
      store(scores, _mm512_mask_blend_ps(allowed(q, position, key), none, s));
    }
  }

  // The columns of two panels of values, or of one: their sums are in tiles 0 to 3, those of the weights in tile 4.
  template <bool kTwo>
  static MILLPOND_INLINE void mix(const TileQueries& q, int64_t key, const uint16_t* weights, const uint16_t* values) {
    const uint16_t* unit = values + key * 32;
    _tile_loadd(5, weights, 64);
    _tile_loadd(6, unit, 64);
    _tile_dpbf16ps(0, 5, 6);
    _tile_loadd(6, unit + 512, 64);
    _tile_dpbf16ps(1, 5, 6);
    if (kTwo) {
      unit += q.value_unit;
      _tile_loadd(6, unit, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(6, unit + 512, 64);
      _tile_dpbf16ps(3, 5, 6);
    }
  }

  template <bool kTwo>
  static MILLPOND_INLINE void clear() {
    _tile_zero(0);
    _tile_zero(1);
    if (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }

  // Stores 32 columns of each row from two tiles of sums. `put(row, column, numbers)` takes 32 bfloat16.
  template <class Put>
  static MILLPOND_INLINE void put_panel(const TileQueries& q, const float* sums, const float* shares, int64_t column,
                                        const Put& put) {
    for (int64_t r = 0; r < q.count; r++) {
      const Floats share = load(shares + 16 * r);
      put(r, column, narrowed(scaled(load(sums + 16 * r), share), scaled(load(sums + 256 + 16 * r), share)));
    }
  }

  template <bool kTwo, class Put>
  static MILLPOND_INLINE void put_panels(const TileQueries& q, const float* shares, int64_t column, const Put& put) {
    alignas(64) float sums[4 * 256];
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    if (kTwo) {
      _tile_stored(2, sums + 512, 64);
      _tile_stored(3, sums + 768, 64);
    }
    put_panel(q, sums, shares, column, put);
    if (kTwo) put_panel(q, sums + 512, shares, column + 32, put);
  }

  // Turns the scores of keys [from, to) into weights, and mixes the first panels of values by them.
  template <bool kTwo, class Added, class Put>
  static MILLPOND_INLINE void weigh_and_mix(const TileQueries& q, const Added& added, int64_t from, int64_t to,
                                            float* shares, const Put& put) {
    const bool plain = !Added::kAny && q.softcap == 0.0f;
    const Floats factor = broadcast(plain ? q.scale * kLog2E : 1.0f);
    const int64_t last_row = q.position + q.count - 1;
    Floats largest[kTileRows];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; r++) largest[r] = broadcast(-__builtin_inff());
    for (int64_t key = from; key < to; key += 16) {
      float* scores = q.scores + (key - from) * kTileRows;
      const bool inside = key >= last_row - q.before;  // of the window of all rows
      if (!plain || !inside || least_of(key + 15, q.key_count - 1) > q.position + q.after) {
        adjust(q, added, key, scores);
      } else if (key + 15 >= q.key_count) {
        const __mmask16 exist = existing(q, key);
#pragma GCC unroll 4
        for (int r = 0; r < kTileRows; r++)
          store(scores + 16 * r, _mm512_mask_blend_ps(exist, broadcast(-__builtin_inff()), load(scores + 16 * r)));
      }
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; r++) largest[r] = maximum(load(scores + 16 * r), largest[r]);
    }
    alignas(64) float tops[kTileRows];
    const Floats most = largest_of_each(largest);
    const __mmask16 any = _mm512_cmp_ps_mask(most, broadcast(-__builtin_inff()), _CMP_NEQ_UQ);  // keys it attends to
    store(tops, _mm512_maskz_sub_ps(any, zeros(), scaled(most, factor)));
    clear<kTwo>();
    _tile_zero(4);
    _tile_loadd(7, kOnes, 64);
    for (int64_t key = from; key < to; key += 32) {
      const float* scores = q.scores + (key - from) * kTileRows;
      uint16_t* weights = q.weights + (key - from) * kTileRows;
      if (key + 16 < to) {
#pragma GCC unroll 4
        for (int r = 0; r < kTileRows; r++) {
          const Floats top = broadcast(tops[r]);
          const Floats low = exp2_of<false>(multiply_add(load(scores + 16 * r), factor, top));
          const Floats high = exp2_of<false>(multiply_add(load(scores + 256 + 16 * r), factor, top));
          store_bits(weights + 32 * r, narrowed(low, high));
        }
      } else {
#pragma GCC unroll 4
        for (int r = 0; r < kTileRows; r++) {
          const Floats low = exp2_of<false>(multiply_add(load(scores + 16 * r), factor, broadcast(tops[r])));
          store_bits(weights + 32 * r, narrowed(low, zeros()));
        }
      }
      TileIsa::written();
      mix<kTwo>(q, key, weights, q.values);
      _tile_dpbf16ps(4, 5, 7);
    }
    _tile_stored(4, shares, 64);
    for (int r = 0; r < kTileRows; r++) {  // 1 / sum, 0 for a row that attends to nothing
      const Floats sum = load(shares + 16 * r), rough = _mm512_rcp14_ps(sum);
      const __mmask16 some = _mm512_cmp_ps_mask(sum, zeros(), _CMP_NEQ_UQ);
      store(shares + 16 * r, _mm512_maskz_mul_ps(some, rough, _mm512_fnmadd_ps(sum, rough, broadcast(2.0f))));
    }
    put_panels<kTwo>(q, shares, 0, put);
  }

  template <bool kTwo, class Put>
  static MILLPOND_INLINE void mix_more(const TileQueries& q, int64_t panel, int64_t from, int64_t to,
                                       const float* shares, const Put& put) {
    clear<kTwo>();
    for (int64_t key = from; key < to; key += 32)
      mix<kTwo>(q, key, q.weights + (key - from) * kTileRows, q.values + panel * q.value_unit);
    put_panels<kTwo>(q, shares, 32 * panel, put);
  }

  template <class Added, class Put>
  static void run(const TileQueries& q, const Added& added, const Put& put) {
    int64_t from = q.position - q.before, to = least_of(q.position + q.count + q.after, q.key_count);
    if (from > to - 1) from = to - 1;  // no row attends to anything: one step of masked scores
    from = from < 0 ? 0 : from / 32 * 32;
    switch (q.panels) {
      case 1: score<1>(q, from, to); break;
      case 2: score<2>(q, from, to); break;
      case 3: score<3>(q, from, to); break;
      case 4: score<4>(q, from, to); break;
      default: score<0>(q, from, to);
    }
    alignas(64) float shares[kTileRows * 16];
    if (q.panels == 1) return weigh_and_mix<false>(q, added, from, to, shares, put);
    weigh_and_mix<true>(q, added, from, to, shares, put);
    int64_t panel = 2;
    for (; panel + 1 < q.panels; panel += 2) mix_more<true>(q, panel, from, to, shares, put);
    if (panel < q.panels) mix_more<false>(q, panel, from, to, shares, put);
  }
};

// Added to the scores of a query and a key by their distance.
struct Distances {
  static constexpr bool kAny = true;
  const float* middle;  // of distance 0
  int64_t position;     // of the first row
  MILLPOND_INLINE Floats at(int64_t row, int64_t key, __mmask16 exist) const {
    return _mm512_maskz_loadu_ps(exist, middle + key - position - row);
  }
};

inline void TileIsa::attend(const AttentionRows<uint16_t>& rows) {
  const Step& step = rows.step;
  for (int64_t first = 0; first < rows.count; first += kTileRows) {
    uint16_t* at = rows.rows + first * kPanel;
    const TileQueries q{at,
                        rows.panel,
                        step.dim / kPanel,
                        least_of(rows.count - first, kTileRows),
                        rows.position + first,
                        rows.keys,
                        rows.values,
                        rows.key_count,
                        rows.value_unit,
                        step.before,
                        step.after,
                        float(step.scale),
                        float(step.softcap),
                        rows.scores,
                        rows.weights};
    const auto put = [&](int64_t row, int64_t column, Ints numbers) __attribute__((always_inline)) {
      store_bits(at + column / kPanel * rows.panel + row * kPanel, numbers);
    };
    if (rows.distances)
      TileAttention::run(q, Distances{rows.distances + step.reach - 1, q.position}, put);
    else
      TileAttention::run(q, NothingAdded{}, put);
  }
}

}  // namespace
