// Exact MaxSim of queries over packed token rows: for each query token the best similarity to a token of a document,
// summed. Called by late_interaction/kernels/exact.py.
//
// A lane of a vector is a query token: the tokens of all queries stand side by side, so nothing is reduced across lanes
// until a document ends. Rows of documents go through in blocks, over the boundaries of documents: the similarities of
// a block to a pair of vectors are computed first, then folded into the maxima of the documents that the block touches.
// codecs.h says how rows and queries are multiplied.
#pragma once

#include <cstdlib>
#include <cstring>

#include "codecs.h"
#include "kernel_table.h"
#include "lanes.h"
#include "parallel.h"

struct MaxSimCall {
  const std::uint8_t* rows;           // [tokens] rows of `stride` bytes; nothing behind the last one is read
  const std::uint16_t* scales;        // [tokens] float16; null if the codec has none
  const std::int64_t* offsets;        // [stored documents + 1]
  const std::int64_t* documents;      // [count] documents to score; null: the first `count`
  const float* queries;               // [query tokens, dim]
  const std::int64_t* query_offsets;  // [query_count + 1]
  float* out;                         // [query_count, count]
  std::int64_t count, query_count, dim;
  std::int64_t stride;   // from a row to the next, 4-byte words rounded up at least
  std::int64_t threads;  // at most
};

namespace {

constexpr int64_t kGroupLanes = 256;        // query tokens that pass over a chunk of documents together
constexpr int64_t kChunkBytes = 192 << 10;  // rows that a thread takes at once: they stay in its cache for all groups
constexpr int64_t kThreadWork = 1 << 19;    // products of words and vectors that are worth a thread: about 0.2 ms

inline int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// The tokens of one query, or 256 of them, in a group of lanes.
struct Segment {
  int64_t query, lane, count;
  bool first;  // the first segment of its query sets the score, others add to it
};

struct Group {
  int64_t vector, vectors;    // of all lanes
  int64_t segment, segments;  // of all segments
};

struct Queries {
  int64_t vectors, groups, segments;
  Group* group;
  Segment* segment;
  float* scale;       // [vectors * kLanes]
  uint32_t* offset;   // [vectors * kLanes], what the sums of a lane start at
  uint32_t* panels;   // [vectors][panel words][kLanes]
};

// A run of rows of one document in a block.
struct Piece {
  const uint8_t* from;
  int64_t slot, count;
  bool begins, ends;
};

struct Scratch {
  uint32_t* rows;  // [kBlock][words], as the codec multiplies them
  float* scales;   // [kBlock]
  uint32_t* sums;  // [kBlock][2 * kLanes]
  float* carry;    // [kGroupLanes], maxima of the document that goes on in the next block
  float* best;     // [kBlock][kGroupLanes], maxima of the documents that end in this block
  Piece* pieces;   // [kBlock]
};

struct Memory {
  char* at;

  template <class T>
  T* take(int64_t count) {
    T* taken = (T*)at;
    at += up(count * int64_t(sizeof(T)), 64);
    return taken;
  }
};

inline int64_t length(const MaxSimCall& call, int64_t slot) {
  const int64_t document = call.documents ? call.documents[slot] : slot;
  return call.offsets[document + 1] - call.offsets[document];
}

// The rows of a chunk of documents, in blocks.
struct Cursor {
  int64_t slot, stop, row, left;  // next document, one past the last; next row of this one, and how many are left
  bool begun;

  void open(const MaxSimCall& call) {
    for (; slot < stop; slot++) {
      const int64_t document = call.documents ? call.documents[slot] : slot;
      row = call.offsets[document];
      left = call.offsets[document + 1] - row;
      begun = false;
      if (left > 0) return;
    }
  }
};

template <class Codec>
struct MaxSim {
  static constexpr int64_t kBlock = Codec::kBlock;

  const MaxSimCall& call;
  int64_t words;  // of a row in memory
  Queries queries;
  int64_t next;    // first document that no thread has taken
  int64_t failed;  // a thread had no memory

  // --- Queries ---------------------------------------------------------------------------------------------------

  // Distributes query tokens over lanes and groups. A query begins a new group if the last one has no room for it: so
  // its sum does not depend on the queries before it. Returns the number of lanes; null pointers: only counts.
  int64_t lay_out() {
    int64_t lane = 0, group_start = 0, vectors = 0;
    queries.groups = queries.segments = 0;
    const auto close = [&](int64_t lanes) {
      if (lanes == 0) return;
      const int64_t used = up(lanes, kLanes) / kLanes;
      if (queries.group) queries.group[queries.groups] = {vectors, used, group_start, queries.segments - group_start};
      queries.groups++;
      vectors += used;
      group_start = queries.segments;
    };
    for (int64_t q = 0; q < call.query_count; q++) {
      const int64_t tokens = call.query_offsets[q + 1] - call.query_offsets[q];
      if (lane + tokens > kGroupLanes) {
        close(lane);
        lane = 0;
      }
      for (int64_t done = 0; done < tokens;) {
        const int64_t count = tokens - done < kGroupLanes ? tokens - done : kGroupLanes;
        if (queries.segment) queries.segment[queries.segments] = {q, lane, count, done == 0};
        queries.segments++;
        done += count;
        lane += count;
        if (done < tokens) {
          close(lane);
          lane = 0;
        }
      }
    }
    close(lane);
    return (queries.vectors = vectors) * kLanes;
  }

  void pack_queries() {
    const int64_t panel = Codec::panel_words(words) * kLanes;
    std::memset(queries.panels, 0, queries.vectors * panel * 4);
    for (int64_t lane = 0; lane < queries.vectors * kLanes; lane++) {
      queries.scale[lane] = 0.0f;
      queries.offset[lane] = 0;
    }
    for (int64_t g = 0; g < queries.groups; g++) {
      const Group& group = queries.group[g];
      for (int64_t s = group.segment; s < group.segment + group.segments; s++) {
        const Segment& segment = queries.segment[s];
        int64_t first = call.query_offsets[segment.query];
        for (int64_t t = s; !queries.segment[t].first; t--) first += queries.segment[t - 1].count;
        for (int64_t i = 0; i < segment.count; i++) {
          const int64_t lane = group.vector * kLanes + segment.lane + i;
          Codec::pack_query(call.queries + (first + i) * call.dim, call.dim, words,
                            queries.panels + lane / kLanes * panel + lane % kLanes, queries.scale + lane,
                            queries.offset + lane);
        }
      }
    }
    for (int64_t v = 0; v < queries.vectors; v++) Codec::arrange(queries.panels + v * panel, words);
  }

  // --- Documents -------------------------------------------------------------------------------------------------

  // Takes the next chunk of documents; false if there is none.
  bool take(int64_t& start, int64_t& stop) {
    const int64_t most = 1 + kChunkBytes / call.stride;
    start = __atomic_load_n(&next, __ATOMIC_RELAXED);
    do {
      stop = start;
      for (int64_t rows = 0; stop < call.count && rows < most;) rows += 1 + length(call, stop++);
    } while (!__atomic_compare_exchange_n(&next, &start, stop, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return start < stop;
  }

  void work() {
    const int64_t group_lanes = up(kGroupLanes, kLanes), row_words = Codec::row_words(words);
    const int64_t bytes = kBlock * (row_words + 1 + 2 * kLanes + group_lanes) * 4 + group_lanes * 4 +
                          kBlock * int64_t(sizeof(Piece)) + 64 * 8;
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, bytes) != 0) {
      __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
      return;
    }
    Memory room{(char*)memory};
    Scratch scratch;
    scratch.rows = room.take<uint32_t>(kBlock * row_words);
    scratch.scales = room.take<float>(kBlock);
    scratch.sums = room.take<uint32_t>(kBlock * 2 * kLanes);
    scratch.carry = room.take<float>(group_lanes);
    scratch.best = room.take<float>(kBlock * group_lanes);
    scratch.pieces = room.take<Piece>(kBlock);
    std::memset(scratch.rows, 0, kBlock * row_words * 4);
    Codec::begin(words);
    for (int64_t start, stop; take(start, stop);) {
      for (int64_t slot = start; slot < stop; slot++) empty_score(slot);
      for (int64_t g = 0; g < queries.groups; g++) {
        Cursor cursor{start, stop, 0, 0, false};
        cursor.open(call);
        while (cursor.slot < stop) block(queries.group[g], cursor, scratch);
      }
    }
    Codec::end();
    std::free(memory);
  }

  // A document without tokens scores -inf, a query without tokens 0.
  void empty_score(int64_t slot) {
    const bool empty = length(call, slot) == 0;
    for (int64_t q = 0; q < call.query_count; q++) {
      const bool tokens = call.query_offsets[q + 1] > call.query_offsets[q];
      if (empty || !tokens) call.out[q * call.count + slot] = tokens ? -__builtin_inff() : 0.0f;
    }
  }

  // The next block of rows: multiplied by all query tokens of a group, folded, and its ended documents scored.
  void block(const Group& group, Cursor& cursor, Scratch& scratch) {
    int64_t rows = 0, pieces = 0;
    bool nan = Codec::kRowsMayBeNan;
    while (rows < kBlock && cursor.slot < cursor.stop) {
      const int64_t count = cursor.left < kBlock - rows ? cursor.left : kBlock - rows;
      const uint8_t* from = call.rows + cursor.row * call.stride;
      if (call.documents && !cursor.begun && cursor.slot + 2 < cursor.stop)
        prefetch(call.rows + call.offsets[call.documents[cursor.slot + 2]] * call.stride, kAhead);
      if (call.scales)
        for (int64_t i = 0; i < count; i++) {
          const float scale = half_to_float(call.scales[cursor.row + i]);
          scratch.scales[rows + i] = scale;
          nan |= scale != scale;
        }
      scratch.pieces[pieces++] = {from, cursor.slot, count, !cursor.begun, cursor.left == count};
      rows += count;
      cursor.row += count;
      cursor.left -= count;
      cursor.begun = true;
      if (cursor.left == 0) {
        cursor.slot++;
        cursor.open(call);
      }
    }
    const Piece& last = scratch.pieces[pieces - 1];
    const int64_t panel = Codec::panel_words(words) * kLanes;
    Product product = rows_of(scratch, pieces, rows);
    product.words = words;
    product.panel = panel;
    product.sums = scratch.sums;
    product.ahead = last.from + last.count * call.stride;
    product.ahead_stride = call.stride;
    for (int64_t v = 0; v < group.vectors; v += 2) {
      product.panels = queries.panels + (group.vector + v) * panel;
      product.offsets = queries.offset + (group.vector + v) * kLanes;
      if (v + 1 < group.vectors) {
        Codec::template multiply<2>(product);
        nan ? fold<2, true>(scratch, pieces, v) : fold<2, false>(scratch, pieces, v);
      } else {
        Codec::template multiply<1>(product);
        nan ? fold<1, true>(scratch, pieces, v) : fold<1, false>(scratch, pieces, v);
      }
      product.ahead_stride = 0;
    }
    score(group, scratch, pieces);
  }

  // The rows of a block as the codec multiplies them: copied, or in place where it can read a whole block of neighbours.
  Product rows_of(Scratch& scratch, int64_t pieces, int64_t rows) {
    Product product{};
    product.count = rows;
    if (Codec::kReadsMemory && rows == kBlock) {
      const uint8_t* expected = scratch.pieces[0].from;
      int64_t p = 0;
      for (; p < pieces && scratch.pieces[p].from == expected; p++) expected += scratch.pieces[p].count * call.stride;
      product.rows = scratch.pieces[0].from;
      product.stride = call.stride;
      if (p == pieces) return product;
    }
    const int64_t row_words = Codec::row_words(words);
    product.rows = scratch.rows;
    product.stride = row_words * 4;
    uint32_t* to = scratch.rows;
    for (int64_t p = 0; p < pieces; p++) {
      const Piece& piece = scratch.pieces[p];
      if (call.stride == words * 4) {
        copy<Codec>(piece.from, words * piece.count, to);
      } else {
        for (int64_t i = 0; i < piece.count; i++)
          copy<Codec>(piece.from + i * call.stride, words, to + i * row_words);
      }
      to += piece.count * row_words;
    }
    return product;
  }

  // The maxima of N vectors of query tokens over the rows of each document; `Nan`: a NaN among them is the maximum.
  template <int N, bool Nan>
  void fold(Scratch& scratch, int64_t pieces, int64_t vector) {
    const uint32_t* sums = scratch.sums;
    const float* scales = scratch.scales;
    int64_t ended = 0;
    for (int64_t p = 0; p < pieces; p++) {
      const Piece& piece = scratch.pieces[p];
      float* carry = scratch.carry + vector * kLanes;
      Floats best[N];
      NanLanes nan[N];
      for (int n = 0; n < N; n++) best[n] = piece.begins ? broadcast(-__builtin_inff()) : load(carry + n * kLanes);
      for (int64_t r = 0; r < piece.count; r++, sums += N * kLanes)
        for (int n = 0; n < N; n++) {
          const Floats similarity = Codec::similarity(load_bits(sums + n * kLanes), scales + r);
          best[n] = maximum(best[n], similarity);
          if (Nan) nan[n].add(similarity);
        }
      scales += piece.count;
      float* to = piece.ends ? scratch.best + ended++ * kGroupLanes + vector * kLanes : carry;
      for (int n = 0; n < N; n++) store(to + n * kLanes, Nan ? nan[n].put_into(best[n]) : best[n]);
    }
  }

  // Sums the maxima of the documents that ended in a block over the tokens of each query.
  void score(const Group& group, const Scratch& scratch, int64_t pieces) {
    const float* best = scratch.best;
    const float* scale = queries.scale + group.vector * kLanes;
    for (int64_t p = 0; p < pieces; p++) {
      if (!scratch.pieces[p].ends) continue;
      float* out = call.out + scratch.pieces[p].slot;
      for (int64_t s = group.segment; s < group.segment + group.segments; s++) {
        const Segment& segment = queries.segment[s];
        const float* of_query = best + segment.lane;
        const float* scale_of_query = scale + segment.lane;
        Floats sum = broadcast(0.0f);
        int64_t i = 0;
        for (; i + kLanes <= segment.count; i += kLanes)
          sum = multiply_add(load(of_query + i), load(scale_of_query + i), sum);
        if (i < segment.count)
          sum = multiply_add(load_first(of_query + i, segment.count - i),
                             load_first(scale_of_query + i, segment.count - i), sum);
        float& score = out[segment.query * call.count];
        score = segment.first ? sum_of(sum) : score + sum_of(sum);
      }
      best += kGroupLanes;
    }
  }

  // --- The call --------------------------------------------------------------------------------------------------

  static void run(void* job) { ((MaxSim*)job)->work(); }

  static int64_t call_of(const void* arguments) {
    const auto& call = *(const MaxSimCall*)arguments;
    const int64_t words = Codec::words(call.dim);
    MaxSim maxsim{call, words, {}, 0, 0};
    const int64_t lanes = maxsim.lay_out();
    Queries& queries = maxsim.queries;
    const int64_t panel = Codec::panel_words(words) * lanes;
    const int64_t bytes = queries.groups * int64_t(sizeof(Group)) + queries.segments * int64_t(sizeof(Segment)) +
                          (2 * lanes + panel) * 4 + 64 * 6;
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, bytes) != 0) return -1;
    Memory room{(char*)memory};
    queries.group = room.take<Group>(queries.groups);
    queries.segment = room.take<Segment>(queries.segments);
    queries.scale = room.take<float>(lanes);
    queries.offset = room.take<uint32_t>(lanes);
    queries.panels = room.take<uint32_t>(panel);
    maxsim.lay_out();
    maxsim.pack_queries();
    int64_t rows = 0, threads = 1;
    if (call.threads > 1) {
      for (int64_t slot = 0; slot < call.count; slot++) rows += length(call, slot);
      threads = rows * words * (1 + lanes / kLanes) / kThreadWork;
      threads = threads < 1 ? 1 : threads < call.threads ? threads : call.threads;
    }
    run_threads(run, &maxsim, threads);
    std::free(memory);
    return maxsim.failed ? -1 : 0;
  }
};

}  // namespace
