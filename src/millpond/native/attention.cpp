// Attention within the segments of a packed row, in bfloat16, for processors with AVX512-BF16.
//
// One segment and one key head at a time: keys and values are packed into the order in which the processor multiplies
// pairs of bfloat16, then blocks of query rows pass over them. A block's scores stay in the cache as float32. The
// softmax subtracts the largest score of each row. A row's result depends on its own segment alone.
//
// Called by attention/native.py, where the kernel table has no other.

#include <cstring>

#include "attention_call.h"
#include "processor.h"

#if MILLPOND_NATIVE

MILLPOND_BEGIN

namespace {

constexpr int kRows = 6;  // query rows of a block: times four vectors of columns, 24 accumulators in 32 registers
constexpr int64_t kTaskRows = 512;  // query rows of a task, which packs the keys and values once
constexpr float kLog2E = 1.44269504f;

inline __m512bh load_pairs(const void* from) { return (__m512bh)_mm512_loadu_si512(from); }

inline __m512bh broadcast_pair(const uint16_t* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// 2^x for x <= 0, to two units in the last place of float32. Below -126 it is 0: denormal results would be slow.
inline __m512 exp2_of(__m512 x) {
  // "Not less" is true for NaN, which stays NaN.
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);  // within [-0.5, 0.5]
  __m512 p = _mm512_set1_ps(1.33335581e-3f);    // (ln 2)^5 / 5!, then the lower terms of the series
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(9.61812911e-3f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(5.55041087e-2f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(2.40226507e-1f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(6.93147181e-1f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(normal, p, whole);
}

inline __m512 tanh_of(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);
  const __m512 t = exp2_of(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2.0f * kLog2E)));
  const __m512 size = _mm512_div_ps(_mm512_sub_ps(one, t), _mm512_add_ps(one, t));
  return _mm512_or_ps(size, _mm512_and_ps(x, sign));
}

// Transposes 16 rows of 16 numbers of 32 bits.
inline void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// The rows of keys or values that a segment attends to: those of its prefix, then its own.
struct KeyRows {
  const uint16_t* of_prefix;
  const uint16_t* own;
  int64_t prefix, stride;

  const uint16_t* row(int64_t j) const { return j < prefix ? of_prefix + j * stride : own + (j - prefix) * stride; }
};

// keys [count, dim] -> [blocks of 16 keys][dim / 2][16 keys][2]; the last block is filled up with 0.
void pack_keys(const KeyRows& keys, int64_t count, int dim, uint16_t* to) {
  for (int64_t first = 0; first < count; first += kLanes, to += dim * kLanes)
    for (int d = 0; d < dim; d += 32) {
      const int width = dim - d < 32 ? dim - d : 32;
      const __mmask32 mask = width == 32 ? 0xffffffffu : 0xffffu;
      __m512i rows[16];
      for (int j = 0; j < 16; j++)
        rows[j] = first + j < count ? _mm512_maskz_loadu_epi16(mask, keys.row(first + j) + d) : _mm512_setzero_si512();
      transpose(rows);
      for (int i = 0; i < width / 2; i++) _mm512_storeu_si512(to + (d / 2 + i) * 2 * kLanes, rows[i]);
    }
}

// values [count, dim] -> [pairs of keys][dim][2]; an odd last row is paired with 0.
void pack_values(const KeyRows& values, int64_t count, int dim, uint16_t* to) {
  for (int64_t j = 0; j < count; j += 2, to += 2 * dim) {
    const uint16_t* even = values.row(j);
    const uint16_t* odd = j + 1 < count ? values.row(j + 1) : nullptr;
    for (int d = 0; d < dim; d += kLanes) {
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(even + d)));
      const __m512i high =
          odd ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(odd + d))) : _mm512_setzero_si512();
      _mm512_storeu_si512(to + 2 * d, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}

// What all rows of a segment and a head share.
struct Head {
  const uint16_t* keys;    // packed
  const uint16_t* values;  // packed
  const uint16_t* bias;    // [rows, keys] of this head, or null
  int64_t count;           // number of keys
  int64_t bias_row_stride, before, after;
  int dim;
  float scale, softcap;  // log2(e) is in the scale without a softcap, in the softcap with one
  float* scores;         // [kRows, width] of a block
  uint16_t* weights;     // [kRows, width] of a block
};

struct Block {
  const uint16_t* rows[kRows];  // queries; an incomplete block repeats its last one
  int64_t position[kRows];      // their positions among the keys
  __m512 largest[kRows];        // scores, 16 partial maxima of each row
};

// Which of the 16 keys from `column` on a row at `position` attends to.
inline __mmask16 allowed(const Head& head, int64_t position, int64_t column) {
  int64_t low = position - head.before - column, high = position + head.after - column;
  if (high > head.count - 1 - column) high = head.count - 1 - column;
  if (low < 0) low = 0;
  if (high > kLanes - 1) high = kLanes - 1;
  return high < low ? 0 : __mmask16(((1u << (high + 1)) - 1) & ~((1u << low) - 1));
}

// Scores (times log2 e) of a block's rows for N vectors of keys from `first` on; `edge`: some keys are masked.
template <int N>
void score(const Head& head, Block& block, int64_t first, bool edge, float* scores, int64_t width) {
  __m512 sums[kRows][N];
  for (int r = 0; r < kRows; r++)
    for (int n = 0; n < N; n++) sums[r][n] = _mm512_setzero_ps();
  const uint16_t* keys = head.keys + first * head.dim;
  for (int d = 0; d < head.dim; d += 2) {
    __m512bh k[N];
    for (int n = 0; n < N; n++) k[n] = load_pairs(keys + n * head.dim * kLanes + d * kLanes);
    for (int r = 0; r < kRows; r++) {
      const __m512bh q = broadcast_pair(block.rows[r] + d);
      for (int n = 0; n < N; n++) sums[r][n] = _mm512_dpbf16_ps(sums[r][n], q, k[n]);
    }
  }
  const __m512 scale = _mm512_set1_ps(head.scale), cap = _mm512_set1_ps(head.softcap);
  for (int r = 0; r < kRows; r++)
    for (int n = 0; n < N; n++) {
      const int64_t column = first + n * kLanes;
      __m512 s = _mm512_mul_ps(sums[r][n], scale);
      if (head.softcap != 0.0f) s = _mm512_mul_ps(tanh_of(s), cap);
      if (head.bias) {
        const int64_t remaining = head.count - column;
        const __mmask16 mask = remaining >= kLanes ? 0xffff : __mmask16((1u << remaining) - 1);
        const uint16_t* row = head.bias + block.position[r] * head.bias_row_stride;
        const __m256i bias = _mm256_maskz_loadu_epi16(mask, row + column);
        s = _mm512_fmadd_ps(to_float32(bias), _mm512_set1_ps(kLog2E), s);
      }
      if (edge)
        s = _mm512_mask_blend_ps(allowed(head, block.position[r], column), _mm512_set1_ps(-__builtin_inff()), s);
      block.largest[r] = _mm512_max_ps(block.largest[r], s);
      _mm512_storeu_ps(scores + r * width + n * kLanes, s);
    }
}

// Turns a row's scores into unnormalized weights in bfloat16; returns 1 / their sum.
inline float exponentiate(const float* scores, int64_t vectors, __m512 largest, uint16_t* weights) {
  const float maximum = _mm512_reduce_max_ps(largest);
  const __m512 top = _mm512_set1_ps(maximum == -__builtin_inff() ? 0.0f : maximum);  // the window may hold no key
  __m512 sum = _mm512_setzero_ps();
  for (int64_t v = 0; v < vectors; v += 2) {
    const float* s = scores + v * kLanes;
    const __m512 low = exp2_of(_mm512_sub_ps(_mm512_loadu_ps(s), top));
    const __m512 high =
        v + 1 < vectors ? exp2_of(_mm512_sub_ps(_mm512_loadu_ps(s + kLanes), top)) : _mm512_setzero_ps();
    sum = _mm512_add_ps(sum, _mm512_add_ps(low, high));
    _mm512_storeu_si512(weights + v * kLanes, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  const float total = _mm512_reduce_add_ps(sum);
  return total == 0.0f ? 0.0f : 1.0f / total;
}

// Weighted sums of N vectors of the values' columns, for the first `count` rows of a block.
template <int N>
void mix(const uint16_t* weights, int64_t width, const uint16_t* values, int dim, int64_t key_pairs,
         const float* normalizer, int count, uint16_t* out, int64_t out_token_stride) {
  __m512 sums[kRows][N];
  for (int r = 0; r < kRows; r++)
    for (int n = 0; n < N; n++) sums[r][n] = _mm512_setzero_ps();
  for (int64_t j = 0; j < key_pairs; j++) {
    __m512bh v[N];
    for (int n = 0; n < N; n++) v[n] = load_pairs(values + (j * dim + n * kLanes) * 2);
    for (int r = 0; r < kRows; r++) {
      const __m512bh w = broadcast_pair(weights + r * width + 2 * j);
      for (int n = 0; n < N; n++) sums[r][n] = _mm512_dpbf16_ps(sums[r][n], w, v[n]);
    }
  }
  for (int r = 0; r < count; r++)
    for (int n = 0; n < N; n++)
      store_bf16(out + r * out_token_stride + n * kLanes, _mm512_mul_ps(sums[r][n], _mm512_set1_ps(normalizer[r])));
}

// Attention of the first `count` rows of a block, written to `out`.
void attend(const Head& head, Block& block, int count, uint16_t* out, int64_t out_token_stride) {
  int64_t from = block.position[0] - head.before, to = block.position[count - 1] + head.after + 1;
  if (to > head.count) to = head.count;
  if (from > to - 1) from = to - 1;  // no row attends to anything: one vector of masked scores
  from = from < 0 ? 0 : from / kLanes * kLanes;
  const int64_t vectors = (to - from + kLanes - 1) / kLanes, width = (vectors + 1) / 2 * 2 * kLanes;
  for (int r = 0; r < kRows; r++) block.largest[r] = _mm512_set1_ps(-__builtin_inff());
  for (int64_t v = 0; v < vectors;) {
    const int64_t first = from + v * kLanes;
    const int n = vectors - v < 4 ? int(vectors - v) : 4;
    const int64_t last = first + n * kLanes - 1;
    const bool edge =
        last >= head.count || first < block.position[count - 1] - head.before || last > block.position[0] + head.after;
    float* scores = head.scores + v * kLanes;
    switch (n) {
      case 4: score<4>(head, block, first, edge, scores, width); break;
      case 3: score<3>(head, block, first, edge, scores, width); break;
      case 2: score<2>(head, block, first, edge, scores, width); break;
      default: score<1>(head, block, first, edge, scores, width);
    }
    v += n;
  }
  float normalizer[kRows];
  for (int r = 0; r < count; r++)
    normalizer[r] = exponentiate(head.scores + r * width, vectors, block.largest[r], head.weights + r * width);
  for (int r = count; r < kRows; r++) std::memcpy(head.weights + r * width, head.weights, width * sizeof(uint16_t));
  const int64_t key_pairs = (to - from + 1) / 2;
  for (int d = 0; d < head.dim;) {
    const uint16_t* values = head.values + (from * head.dim + 2 * d);
    const int remaining = (head.dim - d) / kLanes;
    if (remaining >= 4) {
      mix<4>(head.weights, width, values, head.dim, key_pairs, normalizer, count, out + d, out_token_stride);
      d += 4 * kLanes;
    } else if (remaining >= 2) {
      mix<2>(head.weights, width, values, head.dim, key_pairs, normalizer, count, out + d, out_token_stride);
      d += 2 * kLanes;
    } else {
      mix<1>(head.weights, width, values, head.dim, key_pairs, normalizer, count, out + d, out_token_stride);
      d += kLanes;
    }
  }
}

inline int64_t padded(int64_t keys) { return (keys + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }

// Attention of up to kTaskRows query rows of one segment, for the query heads that share one key head.
void attend_rows(const AttentionCall& call, int64_t segment, int64_t kv_head, int64_t first_row, char* workspace) {
  const int64_t start = call.cu_seqlens[segment], length = call.cu_seqlens[segment + 1] - start;
  if (first_row >= length) return;
  const int64_t last_row = length - first_row < kTaskRows ? length : first_row + kTaskRows;
  const int32_t* span = call.prefixes ? call.prefixes + 2 * segment : nullptr;
  const int64_t prefix = span ? span[1] - span[0] : 0, max_keys = padded(call.max_keys);
  const int dim = int(call.dim);
  Head head;
  auto* keys = (uint16_t*)(((std::uintptr_t)workspace + 63) & ~std::uintptr_t(63));
  auto* values = keys + max_keys * dim;
  head.keys = keys;
  head.values = values;
  head.scores = (float*)(values + max_keys * dim);
  head.weights = (uint16_t*)(head.scores + kRows * (max_keys + 2 * kLanes));
  head.count = prefix + (call.seqused_k ? call.seqused_k[segment] : length);
  head.bias_row_stride = call.bias_row_stride;
  head.before = call.before;
  head.after = call.after;
  head.dim = dim;
  const bool capped = call.softcap != 0.0;
  head.scale = float(capped ? call.scale / call.softcap : call.scale * kLog2E);
  head.softcap = float(call.softcap * kLog2E);
  const uint16_t* key_head = call.key + kv_head * call.key_head_stride;
  const uint16_t* value_head = call.value + kv_head * call.value_head_stride;
  KeyRows key{nullptr, key_head + start * call.key_token_stride, prefix, call.key_token_stride};
  KeyRows value{nullptr, value_head + start * call.value_token_stride, prefix, call.value_token_stride};
  if (span) {
    key.of_prefix = key_head + span[0] * call.key_token_stride;
    value.of_prefix = value_head + span[0] * call.value_token_stride;
  }
  pack_keys(key, head.count, dim, keys);
  pack_values(value, head.count, dim, values);
  const int64_t group = call.heads / call.kv_heads;
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
    head.bias = call.bias ? call.bias + h * call.bias_head_stride : nullptr;
    const uint16_t* query = call.query + h * call.query_head_stride;
    uint16_t* out = call.out + h * call.out_head_stride;
    for (int64_t row = first_row; row < last_row; row += kRows) {
      const int count = last_row - row < kRows ? int(last_row - row) : kRows;
      Block block;
      for (int r = 0; r < kRows; r++) {
        const int64_t own = row + (r < count ? r : count - 1);
        block.position[r] = prefix + own;
        block.rows[r] = query + (start + own) * call.query_token_stride;
      }
      attend(head, block, count, out + (start + row) * call.out_token_stride, call.out_token_stride);
    }
  }
}

inline int64_t tasks_per_head(int64_t rows) { return (rows + kTaskRows - 1) / kTaskRows; }

struct AttentionJob {
  const AttentionCall* call;
  int64_t tasks_per_segment, tasks, workspace_bytes;  // the last of one thread
  int64_t next_task, next_thread;                     // counters that the threads advance
};

void run_tasks(void* argument) {
  auto& job = *(AttentionJob*)argument;
  const int64_t thread = __atomic_fetch_add(&job.next_thread, 1, __ATOMIC_RELAXED);
  char* workspace = (char*)job.call->workspace + thread * job.workspace_bytes;
  const int64_t heads = job.call->kv_heads;
  for (int64_t task; (task = __atomic_fetch_add(&job.next_task, 1, __ATOMIC_RELAXED)) < job.tasks;) {
    const int64_t part = task % job.tasks_per_segment;
    attend_rows(*job.call, task / job.tasks_per_segment, part % heads, part / heads * kTaskRows, workspace);
  }
}

}  // namespace

MILLPOND_END

// Size of the struct: Python's must be equal.
extern "C" std::int64_t millpond_attention_call_bytes(void) { return sizeof(AttentionCall); }

// Number of tasks of a call: more threads would find nothing to do.
extern "C" std::int64_t millpond_attention_tasks(std::int64_t segments, std::int64_t kv_heads, std::int64_t max_rows) {
  return segments * kv_heads * tasks_per_head(max_rows);
}

// Bytes of workspace that each thread needs.
extern "C" std::int64_t millpond_attention_workspace(std::int64_t max_keys, std::int64_t dim) {
  const std::int64_t keys = padded(max_keys);
  return (64 + 2 * keys * dim * 2 + kRows * (keys + 2 * kLanes) * 6 + 63) / 64 * 64;
}

extern "C" void millpond_attention(const AttentionCall* call) {
  const std::int64_t per_segment = tasks_per_head(call->max_rows) * call->kv_heads;
  const std::int64_t workspace_bytes = millpond_attention_workspace(call->max_keys, call->dim);
  AttentionJob job{call, per_segment, per_segment * call->segments, workspace_bytes, 0, 0};
  run_parallel(run_tasks, &job, job.tasks > 1 ? call->threads : 1);
}

#endif
