// DeBERTa's disentangled attention within a text: to the product of a query and a key, the query's product with the
// embedding of their distance as a key is added, and the key's product with that as a query.
//
// The embeddings of distances are weights with a column for each one that differs, in the order of distances. The columns
// of neighbouring distances are the same or neighbours. So the terms of a row for several keys are numbers of one vector,
// in order. With the embeddings as keys the products of a row are a row of terms. With those as queries they are a column,
// which is why 32 keys are multiplied with what a block of rows needs, and transposed.
#pragma once

#include "attention.h"

namespace {

MILLPOND_INLINE bool is_disentangled(const Step& step) { return step.key_columns || step.query_columns; }

// Numbers of kLanes neighbouring distances from `distance` on; column 0 is at `row`.
MILLPOND_INLINE Floats terms_of(const float* row, const int32_t* columns, int64_t reach, int64_t distance) {
  constexpr int64_t kEnds = 32;  // the columns of so many distances at both ends are the same
  const int64_t within = most_of(-reach, least_of(distance, reach - kEnds + 1));
  const int32_t* at = columns + reach + within;
  const Floats numbers = load(row + *at);
#if defined(__aarch64__)
  return permuted(numbers, load_bits(at), *at);
#elif defined(__AVX512F__)
  return _mm512_permutexvar_ps(_mm512_sub_epi32(load_bits(at), broadcast_bits(*at)), numbers);
#else
  return _mm256_permutevar8x32_ps(numbers, _mm256_sub_epi32(load_bits(at), broadcast_bits(*at)));
#endif
}

template <class Isa>
struct Disentangled {
  using State = typename Isa::State;
  static constexpr int64_t kBlock = 192;  // query rows whose scores are kept
  static constexpr int64_t kGroup = 32;   // rows that are multiplied with the same range of distances
  static constexpr int64_t kSpare = 16;   // numbers behind each row, so that rows do not meet in the same sets of the cache
  static constexpr int64_t kWidth = kBlock + 3 * kGroup + kSpare;  // of the terms of a block and a group of keys

  struct Room {
    float *scores, *terms, *sums;  // [kBlock, keys], [kGroup, distances], [kBlock, dim]
    State *weights, *keys;         // [keys / kPanel, kBlock, kPanel], [dim / kPanel, kGroup, kPanel]
    int64_t score_stride, term_stride;
  };

  static int64_t keys_of(int64_t keys) { return Attention<Isa>::padded(keys); }

  static int64_t room_bytes(int64_t keys, int64_t dim) {
    const int64_t floats = kBlock * (keys_of(keys) + kSpare) + kGroup * terms_stride(keys) + kBlock * dim;
    return floats * 4 + (kBlock * keys_of(keys) + kGroup * dim) * int64_t(sizeof(State)) + 5 * 64;
  }

  static int64_t terms_stride(int64_t keys) { return most_of(keys_of(keys) + 3 * kGroup + kSpare, kWidth); }

  static Room room_at(char* at, int64_t keys, int64_t dim) {
    Room room;
    room.score_stride = keys_of(keys) + kSpare;
    room.term_stride = terms_stride(keys);
    room.weights = (State*)at;
    room.keys = room.weights + kBlock * keys_of(keys);
    room.scores = (float*)(room.keys + kGroup * dim);
    room.terms = room.scores + kBlock * room.score_stride;
    room.sums = room.terms + kGroup * room.term_stride;
    return room;
  }

  // The rows' products with units [first, last), to `to` [rows, to_stride]. `unit`: numbers from a unit to the next.
  static void multiply(const State* a, int64_t panel, int64_t rows, const State* weight, int64_t unit, int64_t depth,
                       int64_t first, int64_t last, float* to, int64_t to_stride) {
    const int64_t blocks = quotient_up(rows, Isa::kRows), most = Isa::kTiles ? Isa::kRows : quotient_up(rows, blocks);
    BlockProduct<State> p;
    p.panel = panel;
    p.depth = depth;
    p.from = kNoSums;
    p.from_stride = 0;
    p.to_stride = to_stride;
    p.ahead = nullptr;
    p.ahead_lines = 0;
    for (int64_t u = first; u < last; u++) {
      p.unit = weight + u * unit;
      for (int64_t row = 0; row < rows; row += most) {
        p.rows = a + row * Isa::kPanel;
        p.to = to + row * to_stride + (u - first) * kColumns;
        Isa::block(p, least_of(rows - row, most));
      }
    }
  }

  // What all blocks of a head share.
  struct Head {
    const Step& step;
    const States<Isa>& heads;
    const KeyRows& key_rows;
    const typename Attention<Isa>::Room& packed;
    const Room& room;
    int64_t head, kv_head, count;  // count: of keys

    const State* table(const Weight& weight) const {
      return (const State*)weight.units + head * step.columns * step.dim;
    }
  };

  // Terms of rows for the distances from `from` to `to`; returns where column 0 is, or would be, in the first row.
  static const float* reach_out(const Head& head, const State* rows, int64_t panel, int64_t count, const Weight& weight,
                                const int32_t* columns, int64_t from, int64_t to) {
    const Step& step = head.step;
    const auto column = [&](int64_t distance) { return columns[step.reach + limit(distance, step.reach)]; };
    const int64_t first = column(from) / kColumns, last = column(to) / kColumns + 1;
    multiply(rows, panel, count, head.table(weight), kColumns * step.dim, step.dim / Isa::kPanel, first, last,
             head.room.terms, head.room.term_stride);
    return head.room.terms - first * kColumns;
  }

  static int64_t limit(int64_t distance, int64_t reach) { return most_of(-reach, least_of(distance, reach)); }

  // Adds the terms of the keys, with distances as queries, to the scores of `rows` rows from `position` on.
  static void add_terms_of_keys(const Head& head, int64_t rows, int64_t position) {
    const Step& step = head.step;
    const Room& room = head.room;
    const int64_t several = quotient_up(rows, kLanes) * kLanes, column = (step.heads + head.kv_head) * step.dim;
    for (int64_t key = 0; key < head.count; key += kGroup) {
      const int64_t count = least_of(kGroup, head.count - key);
      for (int64_t d = 0; d < step.dim; d += Isa::kPanel)
        for (int64_t i = 0; i < count; i++)
          std::memcpy(room.keys + d * kGroup + i * Isa::kPanel, head.heads.row(head.key_rows.row(key + i), column + d), 64);
      const float* terms = reach_out(head, room.keys, kGroup * Isa::kPanel, count, step.down, step.query_columns,
                                     position - key - kGroup + 1, position + several - 1 - key);
      for (int64_t row = 0; row < rows; row += kLanes)
        for (int64_t first = 0; first < count; first += kLanes) {
          Floats lanes[kLanes];  // of a key each, for several rows
#pragma GCC unroll 16
          for (int64_t i = 0; i < kLanes; i++)
            lanes[i] = terms_of(terms + (first + i) * room.term_stride, step.query_columns, step.reach,
                                position + row - key - first - i);
          transpose(lanes);
          float* scores = room.scores + row * room.score_stride + key + first;
#pragma GCC unroll 16
          for (int64_t r = 0; r < kLanes; r++)
            if (row + r < rows) {
              float* at = scores + r * room.score_stride;
              store(at, sum_of(load(at), lanes[r]));
            }
        }
    }
  }

  // Turns a row's scores into weights; returns 1 / their sum. `terms`: of the row, null without any.
  static float weigh(const Head& head, int64_t row, int64_t position, const float* terms) {
    const Step& step = head.step;
    const int64_t keys = keys_of(head.count);
    float* scores = head.room.scores + row * head.room.score_stride;
    State* weights = head.room.weights + row * Isa::kPanel;
    const Floats scale = broadcast(float(step.scale) * kLog2E), none = broadcast(-__builtin_inff());
    Floats largest = none;
    for (int64_t k = 0; k < keys; k += kLanes) {
      Floats s = load(scores + k);
      if (terms) s = sum_of(s, terms_of(terms, step.key_columns, step.reach, k - position));
      s = scaled(s, scale);
      if (k + kLanes > head.count) s = within(s, 0, head.count - 1 - k, none);
      store(scores + k, s);
      largest = maximum(s, largest);
    }
    const float most = largest_of(largest);
    const Floats top = broadcast(most == -__builtin_inff() ? 0.0f : -most);
    Floats sum = zeros();
    for (int64_t k = 0; k < keys; k += kLanes) {
      const Floats weight = exp2_of<Isa::kExact>(sum_of(load(scores + k), top));
      sum = sum_of(sum, weight);
      Isa::store_state(weights + k / Isa::kPanel * kBlock * Isa::kPanel + k % Isa::kPanel, weight);
    }
    const float total = sum_of(sum);
    return total == 0.0f ? 0.0f : 1.0f / total;
  }

  // Up to kBlock rows of a text from `first` on: attention replaces their queries.
  static void attend(const Head& head, int64_t first, int64_t rows) {
    const Step& step = head.step;
    const Room& room = head.room;
    const int64_t dim = step.dim, panels = dim / Isa::kPanel, keys = keys_of(head.count);
    const int64_t position = head.key_rows.lead + first, column = head.head * dim;
    State* queries = head.heads.row(head.key_rows.start + first, column);
    multiply(queries, head.heads.stride, rows, head.packed.keys, kColumns * dim, panels, 0, keys / kColumns, room.scores,
             room.score_stride);
    if (step.query_columns) add_terms_of_keys(head, rows, position);
    float shares[kBlock];
    for (int64_t group = 0; group < rows; group += kGroup) {
      const int64_t several = least_of(kGroup, rows - group), at = position + group;
      const float* terms = nullptr;
      if (step.key_columns)
        terms = reach_out(head, queries + group * Isa::kPanel, head.heads.stride, several, step.weight, step.key_columns,
                          1 - at - kGroup, keys - 1 - at);
      for (int64_t r = 0; r < several; r++)
        shares[group + r] = weigh(head, group + r, at + r, terms ? terms + r * room.term_stride : nullptr);
    }
    multiply(room.weights, kBlock * Isa::kPanel, rows, head.packed.values, keys * kColumns, keys / Isa::kPanel, 0,
             dim / kColumns, room.sums, dim);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t d = 0; d < dim; d += kLanes)
        Isa::store_state(head.heads.row(head.key_rows.start + first + r, column + d),
                         scaled(load(room.sums + r * dim + d), broadcast(shares[r])));
  }

  // As Attention::run.
  static void run(const Step& step, const States<Isa>& heads, const typename Attention<Isa>::Room& packed,
                  const Room& room, const KeyRows& key_rows, int64_t count, int64_t kv_head, int64_t first_row,
                  int64_t last_row) {
    const int64_t dim = step.dim, group = step.heads / step.kv_heads;
    Attention<Isa>::pack_keys(heads, key_rows, (step.heads + kv_head) * dim, count, dim, packed.keys);
    Attention<Isa>::pack_values(heads, key_rows, (step.heads + step.kv_heads + kv_head) * dim, count, dim, packed.values);
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
      const Head head{step, heads, key_rows, packed, room, h, kv_head, count};
      for (int64_t row = first_row; row < last_row; row += kBlock) attend(head, row, least_of(kBlock, last_row - row));
    }
  }
};

}  // namespace
