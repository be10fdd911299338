// Attention within a text: the keys and values of a head are packed like a weight, from the text's first token on, and
// blocks of its queries are multiplied with them. Nothing depends on where in a block the text is.
#pragma once

#include "activations.h"
#include "code_scores.h"
#include "head_units.h"
#include "products.h"

namespace {

// Query rows of a head, for an instruction set that computes their attention in its own way: Isa::attend(rows).
template <class State>
struct AttentionRows {
  const Step& step;
  const float* distances;      // of this head
  State* rows;                 // the queries, and then the result
  int64_t panel;               // from panel to panel
  int64_t count, position;     // rows, and the first one's position in the text
  const State *keys, *values;  // packed
  int64_t key_count, value_unit;
  float* scores;   // [keys rounded up, kRows]
  State* weights;  // [keys rounded up, kRows]
};

template <class Isa>
struct Attention {
  using State = typename Isa::State;
  static constexpr int64_t kStep = kColumns > Isa::kPanel ? kColumns : Isa::kPanel;  // keys
  static constexpr int64_t kTaskRows = 512;  // of a task, if several threads share a text

  struct Room {
    State *keys, *values, *weights;
    float* scores;
    int64_t capacity;  // keys
  };

  static int64_t padded(int64_t keys) { return quotient_up(keys, kStep) * kStep; }

  static int64_t room_bytes(int64_t keys, int64_t dim) {
    const int64_t several = padded(keys);
    return several * dim * 2 * int64_t(sizeof(State)) + several * Isa::kRows * int64_t(sizeof(State) + 4) + 4 * 64;
  }

  static Room room_at(char* at, int64_t keys, int64_t dim) {
    const int64_t several = padded(keys);
    Room room;
    room.capacity = several;
    room.keys = (State*)at;
    room.values = room.keys + several * dim;
    room.weights = room.values + several * dim;
    room.scores = (float*)(room.weights + several * Isa::kRows);
    return room;
  }

  // Keys [count, dim] as units of kColumns keys; keys that a unit lacks are 0.
  static void pack_keys(const States<Isa>& heads, const KeyRows& rows, int64_t column, int64_t count, int64_t dim,
                        float* to);
  static void pack_values(const States<Isa>& heads, const KeyRows& rows, int64_t column, int64_t count, int64_t dim,
                          float* to);
  static void pack_keys(const States<Isa>& heads, const KeyRows& rows, int64_t column, int64_t count, int64_t dim,
                        uint16_t* to);
  static void pack_values(const States<Isa>& heads, const KeyRows& rows, int64_t column, int64_t count, int64_t dim,
                          uint16_t* to);

  // Turns a row's scores, times `scale`, into weights; returns 1 / their sum.
  static float weigh(const Step& step, float scale, const float* distances, float* scores, State* weights, int64_t from,
                     int64_t to, int64_t count, int64_t position) {
    const bool plain = step.softcap == 0.0 && !distances;
    const float cap = float(step.softcap);
    const float factor = plain ? scale * kLog2E : 1.0f;
    const int64_t low = position - step.before, high = least_of(position + step.after, count - 1);
    Floats largest[2] = {broadcast(-__builtin_inff()), broadcast(-__builtin_inff())};
    for (int64_t k = from; k < to; k += kColumns) {
      float* at = scores + score_at(k - from);
      const bool cut = k < low || k + kColumns - 1 > high;
#pragma GCC unroll 2
      for (int64_t i = 0; i < 2; i++) {
        Floats s = load(at + i * kLanes);
        if (!plain) {
          s = scaled(s, broadcast(scale));
          if (cap != 0.0f) s = scaled(tanh_of<Isa::kExact>(scaled(s, broadcast(1.0f / cap))), broadcast(cap));
          if (distances) s = sum_of(s, load(distances + k + i * kLanes - position + step.reach - 1));
          s = scaled(s, broadcast(kLog2E));
        }
        if (cut) s = within(s, low - k - i * kLanes, high - k - i * kLanes, broadcast(-__builtin_inff()));
        if (!plain || cut) store(at + i * kLanes, s);
        largest[i] = maximum(s, largest[i]);
      }
    }
    const float most = largest_of(maximum(largest[0], largest[1])) * factor;
    const Floats top = broadcast(most == -__builtin_inff() ? 0.0f : -most), scales = broadcast(factor);
    Floats sums[2] = {zeros(), zeros()};
    for (int64_t k = from; k < to; k += kColumns) {
      const float* at = scores + score_at(k - from);
      State* weight = weights + weight_at(k - from);
#pragma GCC unroll 2
      for (int64_t i = 0; i < 2; i++) {
        const Floats s = multiply_add(load(at + i * kLanes), scales, top);
        const Floats w = exp2_of<Isa::kExact>(s);
        sums[i] = sum_of(sums[i], w);
        Isa::store_state(weight + weight_at(i * kLanes), w);
      }
    }
    const float total = sum_of(sum_of(sums[0], sums[1]));
    return total == 0.0f ? 0.0f : 1.0f / total;
  }

  static MILLPOND_INLINE int64_t score_at(int64_t key) {
    return key / kColumns * kColumns * Isa::kRows + key % kColumns;
  }
  static MILLPOND_INLINE int64_t weight_at(int64_t key) {
    return key / Isa::kPanel * Isa::kPanel * Isa::kRows + key % Isa::kPanel;
  }

  // Rows [first_row, last_row) of a text for the query heads of one key head; `count`: keys, the lead's included.
  static void run(const Step& step, const States<Isa>& heads, const Room& room, const KeyRows& key_rows, int64_t count,
                  int64_t kv_head, int64_t first_row, int64_t last_row) {
    const int64_t dim = step.dim, panels = dim / Isa::kPanel, group = step.heads / step.kv_heads, keys = padded(count);
    const bool in_codes = CodeScores<Isa>::suits(step, count);
    const typename CodeScores<Isa>::Keys codes = CodeScores<Isa>::keys_at(room.keys, keys, dim);
    typename CodeScores<Isa>::Queries queries;
    if (in_codes)
      CodeScores<Isa>::pack(heads, key_rows, (step.heads + kv_head) * dim, count, keys, dim, codes);
    else
      pack_keys(heads, key_rows, (step.heads + kv_head) * dim, count, dim, room.keys);
    pack_values(heads, key_rows, (step.heads + step.kv_heads + kv_head) * dim, count, dim, room.values);
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
      const float* distances = step.distances ? step.distances + h * (2 * step.reach - 1) : nullptr;
      for (int64_t row = first_row; row < last_row; row += Isa::kRows) {
        const int64_t rows = least_of(last_row - row, Isa::kRows);
        const int64_t position = key_rows.lead + row;
        if constexpr (Isa::kTiles) {
          Isa::attend({step, distances, heads.row(key_rows.start + row, h * dim), heads.stride, rows, position, room.keys,
                       room.values, count, keys * kColumns, room.scores, room.weights});
          continue;
        }
        int64_t from = position - step.before, to = least_of(position + rows - 1 + step.after + 1, count);
        if (from > to - 1) from = to - 1;  // no row attends to anything: one step of masked scores
        from = from < 0 ? 0 : from / kStep * kStep;
        to = padded(to);
        BlockProduct<State> p;
        p.rows = heads.row(key_rows.start + row, h * dim);
        p.panel = heads.stride;
        p.depth = panels;
        p.from = kNoSums;
        p.from_stride = 0;
        p.to_stride = kColumns;
        p.ahead = nullptr;
        p.ahead_lines = 0;
        if (in_codes) {
          CodeScores<Isa>::quantize(heads, key_rows.start + row, h * dim, rows, dim, &queries);
          CodeScores<Isa>::score(queries, codes, rows, from, to, dim, room.scores);
        }
        for (int64_t k = from; k < to && !in_codes; k += kColumns) {
          p.unit = room.keys + k * dim;
          p.to = room.scores + score_at(k - from);
          Isa::block(p, rows);
        }
        float shares[Isa::kRows];
        for (int64_t r = 0; r < rows; r++) {
          const float scale = float(step.scale) * (in_codes ? queries.scales[r] : 1.0f);
          shares[r] = weigh(step, scale, distances, room.scores + r * kColumns, room.weights + r * Isa::kPanel, from, to,
                            count, position + r);
        }
        alignas(64) float sums[Isa::kRows * kColumns];
        p.rows = room.weights;
        p.panel = Isa::kPanel * Isa::kRows;
        p.depth = (to - from) / Isa::kPanel;
        p.to = sums;
        for (int64_t d = 0; d < dim; d += kColumns) {
          p.unit = room.values + d * keys + from * kColumns;
          Isa::block(p, rows);
          for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < kColumns; c += kLanes)
              Isa::store_state(heads.row(key_rows.start + row + r, h * dim + d + c),
                               scaled(load(sums + r * kColumns + c), broadcast(shares[r])));
        }
      }
    }
  }
};

template <class Isa>
void Attention<Isa>::pack_keys(const States<Isa>& heads, const KeyRows& rows, int64_t column, int64_t count, int64_t dim,
                               float* to) {
  for (int64_t k = 0; k < padded(count); k += kColumns)
    for (int64_t d = 0; d < dim; d += kLanes, to += kLanes * kColumns)
      for (int64_t c = 0; c < kColumns; c += kLanes) {
        Floats lanes[kLanes];
#pragma GCC unroll 16
        for (int64_t i = 0; i < kLanes; i++)
          lanes[i] = k + c + i < count ? load((const float*)heads.row(rows.row(k + c + i), column + d)) : zeros();
        transpose(lanes);
#pragma GCC unroll 16
        for (int64_t i = 0; i < kLanes; i++) store(to + i * kColumns + c, lanes[i]);
      }
}

template <class Isa>
void Attention<Isa>::pack_values(const States<Isa>& heads, const KeyRows& rows, int64_t column, int64_t count, int64_t dim,
                                 float* to) {
  for (int64_t d = 0; d < dim; d += kColumns)
    for (int64_t k = 0; k < padded(count); k++)
      for (int64_t c = 0; c < kColumns; c += kLanes, to += kLanes)
        store(to, k < count ? load((const float*)heads.row(rows.row(k), column + d + c)) : zeros());
}

// One head of a block's keys or values.
template <class Isa>
struct HeadRowsOf {
  const States<Isa>& heads;
  const KeyRows& rows;
  int64_t column;
  MILLPOND_INLINE const uint16_t* row(int64_t key, int64_t of_dim) const {
    return (const uint16_t*)heads.row(rows.row(key), column + of_dim);
  }
};

#ifdef __AVX512BW__
template <class Isa>
void Attention<Isa>::pack_keys(const States<Isa>& heads, const KeyRows& rows, int64_t column, int64_t count, int64_t dim,
                               uint16_t* to) {
  pack_key_units(HeadRowsOf<Isa>{heads, rows, column}, count, dim, to);
}

template <class Isa>
void Attention<Isa>::pack_values(const States<Isa>& heads, const KeyRows& rows, int64_t column, int64_t count, int64_t dim,
                                 uint16_t* to) {
  pack_value_units(HeadRowsOf<Isa>{heads, rows, column}, count, dim, to);
}
#endif

}  // namespace
