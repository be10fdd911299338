// Layer norm of a sum, and RMS norm, in one pass over bfloat16 rows, computed in float32.
// Called by add_norm.py and rms_norm.py of backends/torch/forwards/.

#include "processor.h"

#if MILLPOND_NATIVE

MILLPOND_BEGIN
namespace {

constexpr int64_t kMaxDim = 4096;  // add_norm.py passes no more columns
constexpr int64_t kChunk = 64;  // rows that a thread takes at once

struct AddNorm {
  uint16_t* states;  // [rows, dim]; overwritten with the result
  const uint16_t* residual;
  const uint16_t* weight;
  const uint16_t* bias;
  int64_t rows, dim, stride, residual_stride;
  float epsilon;
  int64_t next;  // first row that no thread has taken
};

void add_norm_row(const AddNorm& norm, int64_t row, float* sums) {
  uint16_t* states = norm.states + row * norm.stride;
  const uint16_t* residual = norm.residual + row * norm.residual_stride;
  __m512 sum = _mm512_setzero_ps();
  for (int64_t d = 0; d < norm.dim; d += kLanes) {
    const __m512 s = _mm512_add_ps(load_bf16(states + d), load_bf16(residual + d));
    _mm512_storeu_ps(sums + d, s);
    sum = _mm512_add_ps(sum, s);
  }
  const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / float(norm.dim));
  __m512 squares = _mm512_setzero_ps();
  for (int64_t d = 0; d < norm.dim; d += kLanes) {
    const __m512 off = _mm512_sub_ps(_mm512_loadu_ps(sums + d), mean);
    squares = _mm512_fmadd_ps(off, off, squares);
  }
  const float variance = _mm512_reduce_add_ps(squares) / float(norm.dim);
  const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(variance + norm.epsilon));
  for (int64_t d = 0; d < norm.dim; d += kLanes) {
    const __m512 normed = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(sums + d), mean), scale);
    const __m512 out = _mm512_fmadd_ps(normed, load_bf16(norm.weight + d), load_bf16(norm.bias + d));
    store_bf16(states + d, out);
  }
}

void add_norm_rows(void* job) {
  auto& norm = *(AddNorm*)job;
  alignas(64) float sums[kMaxDim];
  for (int64_t row; (row = __atomic_fetch_add(&norm.next, kChunk, __ATOMIC_RELAXED)) < norm.rows;) {
    const int64_t stop = row + kChunk < norm.rows ? row + kChunk : norm.rows;
    for (; row < stop; row++) add_norm_row(norm, row, sums);
  }
}

struct RmsNorm {
  const uint16_t* states;  // [tokens, heads, dim]
  uint16_t* out;           // [tokens, heads, dim], contiguous
  const uint16_t* weight;  // [dim], or [heads, dim]
  int64_t tokens, heads, dim, token_stride, head_stride, weight_head_stride;
  float offset;  // added to the weight: 1 for Gemma, which stores weight - 1
  float epsilon;
  int64_t next;  // first token that no thread has taken
};

inline void rms_norm_row(const RmsNorm& rms, const uint16_t* states, const uint16_t* weight, uint16_t* out) {
  const int64_t dim = rms.dim;
  __m512 squares = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; d += kLanes) {
    const __m512 s = load_bf16(states + d);
    squares = _mm512_fmadd_ps(s, s, squares);
  }
  const float mean = _mm512_reduce_add_ps(squares) / float(dim);
  const __m512 offset = _mm512_set1_ps(rms.offset);
  const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + rms.epsilon));
  for (int64_t d = 0; d < dim; d += kLanes) {
    const __m512 factor = _mm512_add_ps(load_bf16(weight + d), offset);
    const __m512 normed = _mm512_mul_ps(_mm512_mul_ps(load_bf16(states + d), scale), factor);
    store_bf16(out + d, normed);
  }
}

void rms_norm_rows(void* job) {
  auto& rms = *(RmsNorm*)job;
  for (int64_t token; (token = __atomic_fetch_add(&rms.next, kChunk, __ATOMIC_RELAXED)) < rms.tokens;) {
    const int64_t stop = token + kChunk < rms.tokens ? token + kChunk : rms.tokens;
    for (; token < stop; token++)
      for (int64_t h = 0; h < rms.heads; h++)
        rms_norm_row(rms, rms.states + token * rms.token_stride + h * rms.head_stride,
                     rms.weight + h * rms.weight_head_stride, rms.out + (token * rms.heads + h) * rms.dim);
  }
}

}  // namespace
MILLPOND_END

// x / rms(x) * (offset + weight) over each head's columns, a multiple of 16.
extern "C" void millpond_rms_norm(const std::uint16_t* states, std::uint16_t* out, const std::uint16_t* weight,
                                  std::int64_t tokens, std::int64_t heads, std::int64_t dim, std::int64_t token_stride,
                                  std::int64_t head_stride, std::int64_t weight_head_stride, double offset, double epsilon,
                                  std::int64_t threads) {
  RmsNorm rms{states,      out,          weight,             tokens,        heads,          dim,
              token_stride, head_stride, weight_head_stride, float(offset), float(epsilon), 0};
  run_parallel(rms_norm_rows, &rms, tokens > kChunk ? threads : 1);
}

// states = layer_norm(states + residual); rows of at most kMaxDim columns, a multiple of 16.
extern "C" void millpond_add_norm(std::uint16_t* states, const std::uint16_t* residual, const std::uint16_t* weight,
                                  const std::uint16_t* bias, std::int64_t rows, std::int64_t dim, std::int64_t stride,
                                  std::int64_t residual_stride, double epsilon, std::int64_t threads) {
  AddNorm norm{states, residual, weight, bias, rows, dim, stride, residual_stride, float(epsilon), 0};
  run_parallel(add_norm_rows, &norm, rows > kChunk ? threads : 1);
}

#endif
