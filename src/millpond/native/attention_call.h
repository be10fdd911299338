// The arguments of attention within the segments of a packed row.
#pragma once

#include <cstdint>

// The arguments, as attention/native.py lays them out.
struct AttentionCall {
  const std::uint16_t* query;        // [tokens, heads, dim]
  const std::uint16_t* key;          // [tokens, kv_heads, dim]
  const std::uint16_t* value;        // [tokens, kv_heads, dim]
  std::uint16_t* out;                // [tokens, heads, dim]
  const std::int32_t* cu_seqlens;    // [segments + 1]
  const std::int32_t* seqused_k;     // [segments], number of a segment's first keys that count; null: all
  const std::int32_t* prefixes;      // [segments, 2], first and one past the last token of its prefix; null: none
  const std::uint16_t* bias;         // [heads, max_rows, max_rows], added to the scores; null: none
  void* workspace;                   // threads * the bytes that the kernel asks for
  std::int64_t query_token_stride, query_head_stride, key_token_stride, key_head_stride;  // strides in elements
  std::int64_t value_token_stride, value_head_stride, out_token_stride, out_head_stride;
  std::int64_t bias_head_stride, bias_row_stride;
  std::int64_t segments, heads, kv_heads, dim;
  std::int64_t max_rows;  // of a segment
  std::int64_t max_keys;  // of a segment, its prefix included
  std::int64_t before;    // how many positions back a row attends
  std::int64_t after;     // how many positions ahead
  std::int64_t threads;
  double scale;
  double softcap;  // 0: none
};
