// Norms of rows in one pass, in bfloat16 with float32 inside: models/add_norm.py and models/rms_norm.py call them.

#include "processor.h"

#if MILLPOND_NATIVE

MILLPOND_BEGIN
namespace {

constexpr int64_t kChunk = 64;  // rows that a thread takes at a time

struct Norm {
  uint16_t* states;  // [rows, dim], the result too
  const uint16_t* residual;
  const uint16_t* weight;
  const uint16_t* bias;
  int64_t rows, dim, stride, residual_stride;
  float epsilon;
  int64_t next;
};

void norm_row(const Norm& norm, int64_t row, float* sums) {
  uint16_t* states = norm.states + row * norm.stride;
  const uint16_t* residual = norm.residual + row * norm.residual_stride;
  __m512 sum = _mm512_setzero_ps();
  for (int64_t d = 0; d < norm.dim; d += kLanes) {
    const __m512 s = _mm512_add_ps(read(states + d), read(residual + d));
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
    const __m512 out = _mm512_fmadd_ps(normed, read(norm.weight + d), read(norm.bias + d));
    write(states + d, out);
  }
}

void norm_rows(void* given) {
  auto& norm = *(Norm*)given;
  alignas(64) float sums[4096];  // MILLPOND_WIDEST
  for (int64_t row; (row = __atomic_fetch_add(&norm.next, kChunk, __ATOMIC_RELAXED)) < norm.rows;) {
    const int64_t stop = row + kChunk < norm.rows ? row + kChunk : norm.rows;
    for (; row < stop; row++) norm_row(norm, row, sums);
  }
}

struct Rms {
  const uint16_t* states;  // [tokens, heads, dim]
  uint16_t* out;           // the same, dense
  const uint16_t* weight;  // [dim], or [heads, dim]
  int64_t tokens, heads, dim, token_stride, head_stride, weight_head;
  float neutral;  // what a weight counts from
  float epsilon;
  int64_t next;
};

inline void rms_row(const Rms& rms, const uint16_t* states, const uint16_t* weight, uint16_t* out) {
  const int64_t dim = rms.dim;
  __m512 squares = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; d += kLanes) {
    const __m512 s = read(states + d);
    squares = _mm512_fmadd_ps(s, s, squares);
  }
  const float mean = _mm512_reduce_add_ps(squares) / float(dim);
  const __m512 neutral = _mm512_set1_ps(rms.neutral);
  const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + rms.epsilon));
  for (int64_t d = 0; d < dim; d += kLanes) {
    const __m512 factor = _mm512_add_ps(read(weight + d), neutral);
    const __m512 normed = _mm512_mul_ps(_mm512_mul_ps(read(states + d), scale), factor);
    write(out + d, normed);
  }
}

void rms_rows(void* given) {
  auto& rms = *(Rms*)given;
  for (int64_t token; (token = __atomic_fetch_add(&rms.next, kChunk, __ATOMIC_RELAXED)) < rms.tokens;) {
    const int64_t stop = token + kChunk < rms.tokens ? token + kChunk : rms.tokens;
    for (; token < stop; token++)
      for (int64_t h = 0; h < rms.heads; h++)
        rms_row(rms, rms.states + token * rms.token_stride + h * rms.head_stride, rms.weight + h * rms.weight_head,
                rms.out + (token * rms.heads + h) * rms.dim);
  }
}

}  // namespace
MILLPOND_END

// x / rms(x) * (neutral + weight) of each head's columns, a multiple of 16 of them.
extern "C" void millpond_rms_norm(const std::uint16_t* states, std::uint16_t* out, const std::uint16_t* weight,
                                  std::int64_t tokens, std::int64_t heads, std::int64_t dim, std::int64_t token_stride,
                                  std::int64_t head_stride, std::int64_t weight_head, double neutral, double epsilon,
                                  std::int64_t threads) {
  Rms rms{states,      out,         weight,      tokens,         heads,          dim, token_stride,
          head_stride, weight_head, float(neutral), float(epsilon), 0};
  run_team(rms_rows, &rms, tokens > kChunk ? threads : 1);
}

// layer_norm(states + residual) into states; rows of at most 4,096 columns, a multiple of 16.
extern "C" void millpond_add_norm(std::uint16_t* states, const std::uint16_t* residual,
                                  const std::uint16_t* weight, const std::uint16_t* bias, std::int64_t rows, std::int64_t dim, std::int64_t stride,
                                  std::int64_t residual_stride, double epsilon, std::int64_t threads) {
  Norm norm{states, residual, weight, bias, rows, dim, stride, residual_stride, float(epsilon), 0};
  run_team(norm_rows, &norm, rows > kChunk ? threads : 1);
}

#endif
