// Rotary position embedding in one pass over bfloat16 rows, computed in float32. Called by backends/torch/forwards/rotary.py.

#include "processor.h"

#if MILLPOND_NATIVE

MILLPOND_BEGIN
namespace {

constexpr int64_t kChunk = 32;  // tokens that a thread takes at once

struct Rotary {
  const uint16_t* states;  // [tokens, heads, dim]
  uint16_t* out;           // [tokens, heads, dim], contiguous
  const uint16_t* cos;     // [tokens, dim]
  const uint16_t* sin;
  int64_t tokens, heads, dim, token_stride, head_stride, cos_stride, sin_stride;
  int64_t next;  // first token that no thread has taken
};

void rotate_token(const Rotary& rotary, int64_t token) {
  const int64_t half = rotary.dim / 2;
  const uint16_t* cos = rotary.cos + token * rotary.cos_stride;
  const uint16_t* sin = rotary.sin + token * rotary.sin_stride;
  for (int64_t h = 0; h < rotary.heads; h++) {
    const uint16_t* from = rotary.states + token * rotary.token_stride + h * rotary.head_stride;
    uint16_t* to = rotary.out + (token * rotary.heads + h) * rotary.dim;
    for (int64_t d = 0; d < half; d += kLanes) {
      const __m512 low = load_bf16(from + d), high = load_bf16(from + half + d);
      store_bf16(to + d, _mm512_fmsub_ps(low, load_bf16(cos + d), _mm512_mul_ps(high, load_bf16(sin + d))));
      const __m512 low_sin = _mm512_mul_ps(low, load_bf16(sin + half + d));
      store_bf16(to + half + d, _mm512_fmadd_ps(high, load_bf16(cos + half + d), low_sin));
    }
  }
}

void rotate_tokens(void* job) {
  auto& rotary = *(Rotary*)job;
  for (int64_t token; (token = __atomic_fetch_add(&rotary.next, kChunk, __ATOMIC_RELAXED)) < rotary.tokens;) {
    const int64_t stop = token + kChunk < rotary.tokens ? token + kChunk : rotary.tokens;
    for (; token < stop; token++) rotate_token(rotary, token);
  }
}

}  // namespace
MILLPOND_END

// Column d of a head's first half and column d of its second half are one rotated pair; half a head is a multiple of 16
// columns.
extern "C" void millpond_apply_rotary(const std::uint16_t* states, std::uint16_t* out, const std::uint16_t* cos,
                                      const std::uint16_t* sin, std::int64_t tokens, std::int64_t heads,
                                      std::int64_t dim, std::int64_t token_stride, std::int64_t head_stride,
                                      std::int64_t cos_stride, std::int64_t sin_stride, std::int64_t threads) {
  Rotary rotary{states, out, cos, sin, tokens, heads, dim, token_stride, head_stride, cos_stride, sin_stride, 0};
  run_parallel(rotate_tokens, &rotary, tokens > kChunk ? threads : 1);
}

#endif
