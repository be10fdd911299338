// Residuals of 2 and 4 bits: exact MaxSim over them as they are stored, and the encoding of rows.
// Called by late_interaction/kernels/residuals.py.
#pragma once

#include "kernel_table.h"
#include "packing.h"
#include "products.h"

namespace {
namespace approximate {

struct ScoreCall {
  const uint16_t* codes;      // [stored tokens]
  const uint16_t* scales;     // [stored tokens] float16
  const uint8_t* residuals;   // [stored tokens, width]
  const int64_t* offsets;     // [stored documents + 1]
  const int64_t* documents;   // [count]
  const uint8_t* levels;      // [16] int8 + 128
  const int8_t* query;        // [tokens, dim]
  const float* query_scales;  // [columns]
  const float* similarities;  // [centroids, columns]
  float* out;                 // [count], all 0
  int64_t count, width, bits, dim, tokens, columns, threads, next, failed;
};

struct EncodeCall {
  const float* rows;       // [count, dim]
  const float* centroids;  // [centroids, dim]
  const uint16_t* codes;   // [count]
  const float* std;        // [dim]
  const float* levels;     // [2 ** bits] ascending
  uint16_t* scales;        // [count] float16
  uint8_t* residuals;      // [count, width], all 0
  int64_t count, dim, bits, width, threads, next, failed;
};

constexpr int64_t kScored = 16;     // documents that a thread takes at once
constexpr int64_t kEncoded = 1024;  // rows
constexpr int64_t kAhead = 24;      // tokens that are fetched ahead

// A thread's workspace.
struct Scratch {
  uint8_t* rows;     // [kRows][stride] levels + 128
  uint8_t* lanes;    // the query
  int32_t* minus;    // [columns]: 128 times the sum of each query token
  int64_t stride, groups;
};

// Adds to the scores of documents [begin, end) the best similarities of one or two tiles of query tokens.
template <int kBits, int kTiles>
inline void score_tiles(const ScoreCall& call, const Scratch& scratch, int64_t begin, int64_t end, int64_t tile) {
  // Copies: what is stored below could change the structs, for all that the compiler knows.
  const uint16_t *codes = call.codes, *scales = call.scales;
  const int64_t *offsets = call.offsets, *documents = call.documents;
  const int64_t width = call.width, columns = call.columns, column = tile * kLanes, groups = scratch.groups;
  const uint8_t* packed = scratch.lanes + tile * groups * kTileGroup;
  const uint8_t* residuals = call.residuals;
  const float* products_of_centroids = call.similarities + column;
  alignas(16) uint8_t levels[16];
  std::memcpy(levels, call.levels, sizeof levels);
  uint8_t* rows[kRows];
  for (int r = 0; r < kRows; r++) rows[r] = scratch.rows + r * scratch.stride;
  Floats weights[kTiles], best[kTiles];
  Ints minus[kTiles];
  for (int t = 0; t < kTiles; t++) {
    weights[t] = load(call.query_scales + column + t * kLanes);
    minus[t] = load(scratch.minus + column + t * kLanes);
  }
  // `slot` and `token` read ahead of `ending`: a block of rows may span documents.
  int64_t slot = begin, token = 0, stop = 0, ending = begin - 1, left = 0;
  const auto open = [&] {  // the next document with tokens
    for (; slot < end; slot++) {
      token = offsets[documents[slot]];
      stop = offsets[documents[slot] + 1];
      if (slot + 1 < call.count) {
        const int64_t next = offsets[documents[slot + 1]];
        for (int64_t at = next * width; at < (next + kAhead) * width; at += 64)
          __builtin_prefetch(residuals + at, 0, 3);
        __builtin_prefetch(codes + next, 0, 3);
        __builtin_prefetch(scales + next, 0, 3);
      }
      if (token < stop) return;
    }
  };
  const auto next_ending = [&] {
    while (++ending < end) {
      left = offsets[documents[ending] + 1] - offsets[documents[ending]];
      for (int t = 0; t < kTiles; t++) best[t] = fill(-__builtin_inff());
      if (left > 0) return;
    }
  };
  open();
  next_ending();
  while (slot < end) {
    const float* similarities[kRows];
    float scale[kRows];
    int several = 0;
    while (several < kRows && slot < end) {
      const uint8_t* from = residuals + token * width;
      __builtin_prefetch(from + kAhead * width, 0, 3);
      similarities[several] = products_of_centroids + codes[token] * columns;
      for (int t = 0; t < kTiles; t++) __builtin_prefetch(similarities[several] + t * kLanes, 0, 3);
      scale[several] = half_to_float(scales[token]);
      look_up<kBits>(from, width, levels, rows[several]);
      several++;
      if (++token == stop) {
        slot++;
        open();
      }
    }
    Ints products[kRows][kTiles];
    multiply<kTiles, true>(rows, packed, groups, products);
    for (int r = 0; r < several; r++) {
      for (int t = 0; t < kTiles; t++) {
        const Floats residual = to_floats(products[r][t] - minus[t]) * weights[t];
        best[t] = larger(best[t], multiply_add(residual, fill(scale[r]), load(similarities[r] + t * kLanes)));
      }
      if (--left == 0) {
        float total = 0.0f;
        for (int t = 0; t < kTiles; t++) total += sum(best[t]);
        call.out[ending] += total;
        next_ending();
      }
    }
  }
}

template <int kBits>
inline void score_documents(const ScoreCall& call, const Scratch& scratch, int64_t begin, int64_t end) {
  const int64_t tiles = call.columns / kLanes;
  int64_t tile = 0;
  for (; tile + 1 < tiles; tile += 2) score_tiles<kBits, 2>(call, scratch, begin, end, tile);
  if (tile < tiles) score_tiles<kBits, 1>(call, scratch, begin, end, tile);
  for (int64_t i = begin; i < end; i++)
    if (call.offsets[call.documents[i]] == call.offsets[call.documents[i] + 1]) call.out[i] = -__builtin_inff();
}

inline void score_work(void* job) {
  auto& call = *(ScoreCall*)job;
  const int64_t expanded = 8 / call.bits * call.width, tiles = call.columns / kLanes;
  Scratch scratch;
  scratch.groups = groups_of(expanded);
  scratch.stride = scratch.groups * kGroup;
  const int64_t lanes_bytes = tiles * scratch.groups * kTileGroup;
  uint8_t* room = (uint8_t*)std::malloc(lanes_bytes + call.columns * 4 + kRows * scratch.stride);
  if (!room) {
    __atomic_store_n(&call.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  scratch.lanes = room;
  scratch.minus = (int32_t*)(room + lanes_bytes);
  scratch.rows = (uint8_t*)(scratch.minus + call.columns);
  std::memset(scratch.rows, 0, kRows * scratch.stride);
  pack(call.query, call.tokens, call.dim, scratch.groups, true, scratch.lanes);
  for (int64_t i = 0; i < call.columns; i++) {
    int32_t total = 0;
    if (i < call.tokens)
      for (int64_t d = 0; d < call.dim; d++) total += call.query[i * call.dim + d];
    scratch.minus[i] = 128 * total;
  }
  for (int64_t begin; (begin = take(&call.next, kScored)) < call.count;) {
    const int64_t end = smaller(begin + kScored, call.count);
    (call.bits == 4 ? score_documents<4> : score_documents<2>)(call, scratch, begin, end);
  }
  std::free(room);
}

// Sums in 16 parts, which the compiler can keep in a vector.
struct Parts {
  float part[kLanes] = {};
  float total() const {
    float sum = 0.0f;
    for (int64_t l = 0; l < kLanes; l++) sum += part[l];
    return sum;
  }
};

// Zeros behind the width of a row: whole vectors.
struct EncodeRoom {
  float *row, *residual, *spread, *step;
  int32_t* numbers;
};

inline float product(const float* a, const float* b, int64_t padded) {
  Parts parts;
  for (int64_t d = 0; d < padded; d += kLanes)
    for (int64_t l = 0; l < kLanes; l++) parts.part[l] += a[d + l] * b[d + l];
  return parts.total();
}

inline void encode_row(const EncodeCall& call, int64_t i, const EncodeRoom& room) {
  const int64_t dim = call.dim, count = int64_t(1) << call.bits, padded = tiles_of(dim) * kLanes;
  const float* centroid = call.centroids + call.codes[i] * dim;
  std::memcpy(room.row, call.rows + i * dim, dim * sizeof(float));
  for (int64_t d = 0; d < dim; d++) {
    room.residual[d] = room.row[d] - centroid[d];
    room.spread[d] = room.residual[d] / call.std[d];
  }
  const float norm = 1.0f / (__builtin_sqrtf(product(room.spread, room.spread, padded) / float(dim)) + 1e-9f);
  // A number is how many borders between levels lie below; a level is the sum of the rises up to it.
  for (int64_t d = 0; d < dim; d++) {
    room.spread[d] *= norm;
    room.step[d] = call.levels[0];
    room.numbers[d] = 0;
  }
  for (int64_t b = 1; b < count; b++) {
    const float border = (call.levels[b] + call.levels[b - 1]) / 2, rise = call.levels[b] - call.levels[b - 1];
    for (int64_t d = 0; d < dim; d++) {
      const bool above = room.spread[d] > border;
      room.step[d] += above ? rise : 0.0f;
      room.numbers[d] += above;
    }
  }
  for (int64_t d = 0; d < dim; d++) room.step[d] *= call.std[d];
  const float length = product(room.row, room.row, padded), steps = product(room.step, room.step, padded);
  const float along = product(room.row, room.step, padded), wanted = product(room.row, room.residual, padded);
  const float match = product(room.residual, room.step, padded);
  const float weight = length > 0.0f ? float(dim) / length : 0.0f;
  const float plain = match / steps;
  float scale = (weight * along * wanted + match) / (weight * along * along + steps);
  scale = scale > 2.0f * plain ? 2.0f * plain : scale < 0.5f * plain ? 0.5f * plain : scale;
  call.scales[i] = float_to_half(scale < 65504.0f ? scale : 65504.0f);
  uint8_t* to = call.residuals + i * call.width;
  for (int64_t part = 0; part * call.width < dim; part++) {
    const int64_t first = part * call.width, some = smaller(call.width, dim - first);
    for (int64_t d = 0; d < some; d++) to[d] |= uint8_t(room.numbers[first + d] << (part * call.bits));
  }
}

inline void encode_work(void* job) {
  auto& call = *(EncodeCall*)job;
  const int64_t padded = tiles_of(call.dim) * kLanes;
  float* numbers = (float*)std::calloc(5 * padded, sizeof(float));
  if (!numbers) {
    __atomic_store_n(&call.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  const EncodeRoom room = {numbers, numbers + padded, numbers + 2 * padded, numbers + 3 * padded,
                           (int32_t*)(numbers + 4 * padded)};
  for (int64_t begin; (begin = take(&call.next, kEncoded)) < call.count;) {
    const int64_t end = smaller(begin + kEncoded, call.count);
    for (int64_t i = begin; i < end; i++) encode_row(call, i, room);
  }
  std::free(numbers);
}

int64_t score_residuals(const void* arguments) {
  auto call = *(const ScoreCall*)arguments;
  run(score_work, &call, call.threads, call.count, 4 * kScored);
  return call.failed ? -1 : 0;
}

int64_t encode_residuals(const void* arguments) {
  auto call = *(const EncodeCall*)arguments;
  run(encode_work, &call, call.threads, call.count, kEncoded);
  return call.failed ? -1 : 0;
}

}  // namespace approximate
}  // namespace
