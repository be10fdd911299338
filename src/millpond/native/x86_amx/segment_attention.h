// Attention within the segments of a packed row, in tiles, behind the interface of attention.cpp: rows are where torch has
// them. 16 queries at a time are copied into panels, keys and values are packed once for a head of a segment.
#pragma once

#include "../attention_call.h"
#include "../encoder/forward.h"
#include "tile_attention.h"

namespace {

struct SegmentAttention {
  static constexpr int64_t kTaskRows = 512;  // query rows of a task, which packs the keys and values once

  // A part of a thread's workspace: keys, values, queries, scores and weights of 16 rows.
  struct Room {
    uint16_t *keys, *values, *queries, *weights;
    float* scores;
    int64_t bytes;
  };

  static int64_t padded(int64_t count) { return quotient_up(count, 32) * 32; }

  static Room room_at(char* at, const AttentionCall& call) {
    const int64_t keys = padded(call.max_keys), dim = padded(call.dim);
    Room room;
    room.keys = (uint16_t*)(((std::uintptr_t)at + 63) & ~std::uintptr_t(63));
    room.values = room.keys + keys * dim;
    room.queries = room.values + keys * dim;
    room.weights = room.queries + kTileRows * dim;
    room.scores = (float*)(room.weights + kTileRows * keys);
    room.bytes = 64 + (2 * keys + kTileRows) * dim * 2 + kTileRows * keys * 6;
    return room;
  }

  // The keys or values of a segment: those of its prefix, then its own.
  struct SegmentRows {
    const uint16_t *of_prefix, *own;
    int64_t prefix, stride;

    MILLPOND_INLINE const uint16_t* row(int64_t key, int64_t column) const {
      return (key < prefix ? of_prefix + key * stride : own + (key - prefix) * stride) + column;
    }
  };

  struct Bias {
    static constexpr bool kAny = true;
    const uint16_t* at_row;  // of the first query
    int64_t stride;

    MILLPOND_INLINE Floats at(int64_t row, int64_t key, __mmask16 exist) const {
      const __m256i halves = _mm256_maskz_loadu_epi16(exist, at_row + row * stride + key);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
  };

  // Up to kTaskRows query rows of a segment, for the query heads that share one key head.
  static void attend(const AttentionCall& call, const Room& room, int64_t segment, int64_t kv_head, int64_t first_row) {
    const int64_t start = call.cu_seqlens[segment], length = call.cu_seqlens[segment + 1] - start;
    if (first_row >= length) return;
    const int64_t last_row = least_of(length, first_row + kTaskRows), dim = call.dim;
    const int32_t* span = call.prefixes ? call.prefixes + 2 * segment : nullptr;
    const int64_t prefix = span ? span[1] - span[0] : 0;
    const auto rows_of = [&](const uint16_t* from, int64_t stride, int64_t head_stride) {
      const uint16_t* head = from + kv_head * head_stride;
      return SegmentRows{span ? head + span[0] * stride : nullptr, head + start * stride, prefix, stride};
    };
    TileQueries q;
    q.rows = room.queries;
    q.panel = kTileRows * 32;
    q.panels = quotient_up(dim, 32);
    q.keys = room.keys;
    q.values = room.values;
    q.key_count = prefix + (call.seqused_k ? call.seqused_k[segment] : length);
    q.value_unit = padded(q.key_count) * 32;
    q.before = call.before;
    q.after = call.after;
    q.scale = float(call.scale);
    q.softcap = float(call.softcap);
    q.scores = room.scores;
    q.weights = room.weights;
    pack_key_units(rows_of(call.key, call.key_token_stride, call.key_head_stride), q.key_count, dim, room.keys);
    pack_value_units(rows_of(call.value, call.value_token_stride, call.value_head_stride), q.key_count, dim, room.values);
    const int64_t group = call.heads / call.kv_heads;
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++)
      for (int64_t row = first_row; row < last_row; row += kTileRows) {
        const uint16_t* queries = call.query + h * call.query_head_stride + (start + row) * call.query_token_stride;
        uint16_t* out = call.out + h * call.out_head_stride + (start + row) * call.out_token_stride;
        q.count = least_of(last_row - row, kTileRows);
        q.position = prefix + row;
        for (int64_t column = 0; column < dim; column += 32)
          for (int64_t r = 0; r < q.count; r++)
            store_bits(room.queries + column * kTileRows + r * 32,
                       _mm512_maskz_loadu_epi16(columns_left(dim, column), queries + r * call.query_token_stride + column));
        const auto put = [&](int64_t r, int64_t column, Ints numbers) __attribute__((always_inline)) {
          _mm512_mask_storeu_epi16(out + r * call.out_token_stride + column, columns_left(dim, column), numbers);
        };
        if (call.bias)
          TileAttention::run(
              q, Bias{call.bias + h * call.bias_head_stride + row * call.bias_row_stride, call.bias_row_stride}, put);
        else
          TileAttention::run(q, NothingAdded{}, put);
      }
  }

  struct Job {
    const AttentionCall* call;
    int64_t parts, tasks;  // of a segment, and of all
    int64_t next_task;     // a counter that the threads advance
  };

  static void work(void* argument, int64_t member) {
    auto& job = *(Job*)argument;
    const AttentionCall& call = *job.call;
    const Room room = room_at((char*)call.workspace + member * workspace(&call), call);
    const FlushDenormals flush;
    TileIsa::begin();
    for (int64_t task; (task = __atomic_fetch_add(&job.next_task, 1, __ATOMIC_RELAXED)) < job.tasks;) {
      const int64_t part = task % job.parts;
      attend(call, room, task / job.parts, part % call.kv_heads, part / call.kv_heads * kTaskRows);
    }
    TileIsa::end();
  }

  static int64_t workspace(const void* call) { return room_at(nullptr, *(const AttentionCall*)call).bytes; }

  static int64_t run(const void* argument) {
    const auto& call = *(const AttentionCall*)argument;
    const int64_t parts = quotient_up(call.max_rows, kTaskRows) * call.kv_heads;
    Job job{&call, parts, parts * call.segments, 0};
    run_team(work, &job, job.tasks > 1 ? call.threads : 1);
    return 0;
  }
};

}  // namespace
