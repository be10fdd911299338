// The nearest centroid of each row, the similarity of each centroid to the tokens of a query, and its 8-bit table.
// Called by late_interaction/kernels/centroids.py and scan.py.
#pragma once

#include "kernel_table.h"
#include "products.h"

namespace {
namespace approximate {

struct NearestCall {
  const float* rows;          // [count, dim]
  uint16_t* found;            // [count]
  const uint8_t* members;     // lanes of the centroids, group by group; a group's last one fills up its last tile
  const float* scales;        // [tiles * 16] of each lane
  const uint16_t* ids;        // [tiles * 16]: the centroid of each lane
  const int64_t* first_tile;  // [groups + 1]
  const uint8_t* centers;     // lanes of the groups' centers, all on one scale
  int64_t count, dim, groups, probes, threads, next, failed;
};

struct SimilaritiesCall {
  const int8_t* rows;         // [count, dim] centroids
  const float* scales;        // [count]
  const int32_t* sums;        // [count]: sum of each row
  const int8_t* query;        // [tokens, dim]
  const float* query_scales;  // [columns]; 0 behind the tokens
  float* out;                 // [count, columns]; columns: tokens, rounded up to 16
  int64_t count, dim, tokens, columns, threads, next, failed;
};

struct TableCall {
  const float* similarities;  // [count, columns]
  uint8_t* cells;             // [count, columns]
  int64_t count, columns, tokens;
  double span;
};

constexpr int64_t kBlock = 2048;  // rows that a thread takes at once
constexpr float kLowest = -3.4e38f;

// Rounds a row to int8 levels of its largest magnitude; returns their sum.
inline int32_t quantize_row(const float* from, int64_t dim, int8_t* to) {
  uint32_t most = 0;
  for (int64_t d = 0; d < dim; d++) {
    uint32_t bits;
    std::memcpy(&bits, from + d, sizeof bits);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  if (!(largest > 1e-30f) || most >= 0x7f800000) {  // as good as zeros, or not finite
    std::memset(to, 0, dim);
    return 0;
  }
  int32_t total = 0;
  const float scale = largest / 127.0f;
  for (int64_t d = 0; d < dim; d++) {
    const float shifted = from[d] / scale + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest even integer
    int32_t integer;
    std::memcpy(&integer, &shifted, sizeof integer);
    to[d] = int8_t(integer);
    total += int8_t(integer);
  }
  return total;
}

// A thread's workspace for a block of rows.
struct Block {
  int64_t stride;      // bytes of a row
  uint8_t* rows;       // [kBlock, stride] int8
  float* best;         // [kBlock, 16]
  int32_t* tile;       // [kBlock, 16]: the tile of each best
  int32_t* sums;       // [kBlock]
  int32_t* keys;       // [kRows, center lanes]
  uint16_t* picks;     // [kBlock, probes]
  int32_t* order;      // [kBlock * probes]: rows, group by group
  int32_t* starts;     // [groups + 1]
};

// The groups of the `probes` largest keys; the keys are destroyed.
inline void pick(int32_t* keys, int64_t lanes, int64_t probes, int32_t* tops, uint16_t* picks) {
  const int64_t tiles = lanes / kLanes;
  for (int64_t t = 0; t < tiles; t++) {
    int32_t top = keys[t * kLanes];
    for (int64_t l = 1; l < kLanes; l++) top = keys[t * kLanes + l] > top ? keys[t * kLanes + l] : top;
    tops[t] = top;
  }
  for (int64_t p = 0; p < probes; p++) {
    int32_t top = tops[0];
    for (int64_t t = 1; t < tiles; t++) top = tops[t] > top ? tops[t] : top;
    int64_t t = 0;
    while (tops[t] != top) t++;
    int32_t* tile = keys + t * kLanes;
    int64_t l = 0;
    while (tile[l] != top) l++;
    picks[p] = uint16_t(t * kLanes + l);
    tile[l] = INT32_MIN;
    int32_t next = tile[0];
    for (int64_t i = 1; i < kLanes; i++) next = tile[i] > next ? tile[i] : next;
    tops[t] = next;
  }
}

// Picks the groups of each row, and sorts the rows by group.
inline void probe(const NearestCall& call, const Block& block, int64_t count) {
  const int64_t groups = groups_of(call.dim), tiles = tiles_of(call.groups), width = tiles * kLanes;
  int32_t* tops = block.keys + kRows * width;
  for (int64_t i = 0; i < count; i += kRows) {
    const uint8_t* rows[kRows];
    for (int r = 0; r < kRows; r++) rows[r] = block.rows + smaller(i + r, count - 1) * block.stride;
    for (int64_t t = 0; t < tiles; t += 2) {
      // The sum of a row is left out: it is the same for all centers.
      if (t + 1 < tiles) {
        Ints products[kRows][2];
        multiply<2, false>(rows, call.centers + t * groups * kTileGroup, groups, products);
        for (int r = 0; r < kRows; r++)
          for (int v = 0; v < 2; v++) store(block.keys + r * width + (t + v) * kLanes, products[r][v]);
      } else {
        Ints products[kRows][1];
        multiply<1, false>(rows, call.centers + t * groups * kTileGroup, groups, products);
        for (int r = 0; r < kRows; r++) store(block.keys + r * width + t * kLanes, products[r][0]);
      }
    }
    for (int64_t r = 0; r < smaller(kRows, count - i); r++) {
      for (int64_t g = call.groups; g < width; g++) block.keys[r * width + g] = INT32_MIN;
      pick(block.keys + r * width, width, call.probes, tops, block.picks + (i + r) * call.probes);
    }
  }
  for (int64_t g = 0; g <= call.groups; g++) block.starts[g] = 0;
  for (int64_t i = 0; i < count * call.probes; i++) block.starts[block.picks[i] + 1]++;
  for (int64_t g = 0; g < call.groups; g++) block.starts[g + 1] += block.starts[g];
  for (int64_t i = 0; i < count; i++)
    for (int64_t p = 0; p < call.probes; p++) block.order[block.starts[block.picks[i * call.probes + p]]++] = int32_t(i);
  for (int64_t g = call.groups; g > 0; g--) block.starts[g] = block.starts[g - 1];
  block.starts[0] = 0;
}

template <int kTiles>
inline void compare(const NearestCall& call, const Block& block, const uint8_t* const* rows, const int32_t* some,
                    int64_t count, int64_t tile) {
  const int64_t groups = groups_of(call.dim);
  Ints products[kRows][kTiles];
  multiply<kTiles, false>(rows, call.members + tile * groups * kTileGroup, groups, products);
  for (int r = 0; r < kRows; r++) {
    if (r >= count) break;
    const int64_t row = some[r];
    const Ints offset = fill(128 * block.sums[row]);
    Floats best = load(block.best + row * kLanes);
    Ints where = load(block.tile + row * kLanes);
    for (int v = 0; v < kTiles; v++) {
      const Floats similarity = to_floats(products[r][v] - offset) * load(call.scales + (tile + v) * kLanes);
      const Mask better = greater(similarity, best);
      best = choose(better, similarity, best);
      where = choose(better, fill(int32_t(tile + v)), where);
    }
    store(block.best + row * kLanes, best);
    store(block.tile + row * kLanes, where);
  }
}

inline void nearest_block(const NearestCall& call, const Block& block, int64_t begin, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    int8_t* row = (int8_t*)block.rows + i * block.stride;
    block.sums[i] = quantize_row(call.rows + (begin + i) * call.dim, call.dim, row);
    store(block.best + i * kLanes, fill(kLowest));
    store(block.tile + i * kLanes, fill(int32_t(0)));
  }
  if (call.groups > 1) {
    probe(call, block, count);
  } else {
    for (int64_t i = 0; i < count; i++) block.order[i] = int32_t(i);
    block.starts[0] = 0;
    block.starts[1] = int32_t(count);
  }
  for (int64_t g = 0; g < call.groups; g++) {
    const int64_t last = call.first_tile[g + 1];
    for (int64_t i = block.starts[g]; i < block.starts[g + 1]; i += kRows) {
      const int64_t several = smaller(kRows, block.starts[g + 1] - i);
      const uint8_t* rows[kRows];
      for (int r = 0; r < kRows; r++) rows[r] = block.rows + block.order[i + smaller(r, several - 1)] * block.stride;
      int64_t tile = call.first_tile[g];
      for (; tile + 1 < last; tile += 2) compare<2>(call, block, rows, block.order + i, several, tile);
      if (tile < last) compare<1>(call, block, rows, block.order + i, several, tile);
    }
  }
  for (int64_t i = 0; i < count; i++) {
    float best = kLowest;
    uint16_t found = 0;
    for (int64_t l = 0; l < kLanes; l++) {
      const float similarity = block.best[i * kLanes + l];
      const uint16_t id = call.ids[block.tile[i * kLanes + l] * kLanes + l];
      if (l == 0 || similarity > best || (similarity == best && id < found)) {
        best = similarity;
        found = id;
      }
    }
    call.found[begin + i] = found;
  }
}

inline void nearest_work(void* job) {
  auto& call = *(NearestCall*)job;
  const int64_t stride = groups_of(call.dim) * kGroup, width = tiles_of(call.groups) * kLanes;
  const int64_t rows = smaller(kBlock, call.count);
  const int64_t numbers = rows * (2 * kLanes + 1 + call.probes) + (kRows + 1) * width + call.groups + 1;
  uint8_t* room = (uint8_t*)std::malloc(numbers * 4 + rows * (stride + 2 * call.probes));
  if (!room) {
    __atomic_store_n(&call.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  Block block;
  block.stride = stride;
  block.best = (float*)room;
  block.tile = (int32_t*)(block.best + rows * kLanes);
  block.sums = block.tile + rows * kLanes;
  block.keys = block.sums + rows;
  block.order = block.keys + (kRows + 1) * width;
  block.starts = block.order + rows * call.probes;
  block.picks = (uint16_t*)(block.starts + call.groups + 1);
  block.rows = (uint8_t*)(block.picks + rows * call.probes);
  std::memset(block.rows, 0, rows * stride);
  for (int64_t begin; (begin = take(&call.next, kBlock)) < call.count;)
    nearest_block(call, block, begin, smaller(kBlock, call.count - begin));
  std::free(room);
}

inline void similarities_work(void* job) {
  auto& call = *(SimilaritiesCall*)job;
  const int64_t groups = groups_of(call.dim), tiles = call.columns / kLanes, stride = groups * kGroup;
  uint8_t* packed = (uint8_t*)std::malloc(tiles * groups * kTileGroup + kRows * stride);
  if (!packed) {
    __atomic_store_n(&call.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  uint8_t* copies = packed + tiles * groups * kTileGroup;
  pack(call.query, call.tokens, call.dim, groups, false, packed);
  for (int64_t begin; (begin = take(&call.next, kBlock)) < call.count;) {
    const int64_t end = smaller(begin + kBlock, call.count);
    for (int64_t i = begin; i < end; i += kRows) {
      const uint8_t* rows[kRows];
      for (int r = 0; r < kRows; r++) {
        const int64_t row = smaller(i + r, call.count - 1);
        rows[r] = (const uint8_t*)call.rows + row * call.dim;
        if (row * call.dim + stride > call.count * call.dim) {  // its last group ends behind the array
          uint8_t* copy = copies + r * stride;
          std::memcpy(copy, rows[r], call.dim);
          std::memset(copy + call.dim, 0, stride - call.dim);
          rows[r] = copy;
        }
      }
      const int64_t several = smaller(kRows, end - i);
      const auto write = [&](Ints product, int64_t r, int64_t tile) {
        const Ints offset = fill(128 * call.sums[i + r]);
        const Floats similarity = to_floats(product - offset) * load(call.query_scales + tile * kLanes);
        store(call.out + (i + r) * call.columns + tile * kLanes, similarity * fill(call.scales[i + r]));
      };
      int64_t tile = 0;
      for (; tile + 1 < tiles; tile += 2) {
        Ints products[kRows][2];
        multiply<2, false>(rows, packed + tile * groups * kTileGroup, groups, products);
        for (int r = 0; r < several; r++)
          for (int v = 0; v < 2; v++) write(products[r][v], r, tile + v);
      }
      if (tile < tiles) {
        Ints products[kRows][1];
        multiply<1, false>(rows, packed + tile * groups * kTileGroup, groups, products);
        for (int r = 0; r < several; r++) write(products[r][0], r, tile);
      }
    }
  }
  std::free(packed);
}

inline void table_tile(const TableCall& call, int64_t column) {
  Floats top = fill(kLowest);
  for (int64_t i = 0; i < call.count; i++) top = larger(top, load(call.similarities + i * call.columns + column));
  const Floats low = top - fill(float(call.span)), scale = fill(float(255.0 / call.span));
  alignas(64) float used[kLanes];  // 1 where the query has a token
  for (int64_t l = 0; l < kLanes; l++) used[l] = column + l < call.tokens ? 1.0f : 0.0f;
  const Floats mask = load(used);
  for (int64_t i = 0; i < call.count; i++) {
    const Floats similarity = load(call.similarities + i * call.columns + column);
    store_bytes(call.cells + i * call.columns + column, (similarity - low) * scale * mask);
  }
}

int64_t nearest_centroids(const void* arguments) {
  auto call = *(const NearestCall*)arguments;
  run(nearest_work, &call, call.threads, call.count, kBlock);
  return call.failed ? -1 : 0;
}

int64_t centroid_similarities(const void* arguments) {
  auto call = *(const SimilaritiesCall*)arguments;
  run(similarities_work, &call, call.threads, call.count, kBlock);
  return call.failed ? -1 : 0;
}

int64_t similarity_table(const void* arguments) {
  const auto& call = *(const TableCall*)arguments;
  for (int64_t column = 0; column < call.columns; column += kLanes) table_tile(call, column);
  return 0;
}

}  // namespace approximate
}  // namespace
