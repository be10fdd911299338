// Rotary positions in one pass, in bfloat16 with float32 inside: models/rotary.py calls this.

#include "processor.h"

#if MILLPOND_NATIVE

MILLPOND_BEGIN
namespace {

constexpr int64_t kChunk = 32;  // tokens that a thread takes at a time

struct Turn {
  const uint16_t* states;  // [tokens, heads, dim]
  uint16_t* out;           // the same, dense
  const uint16_t* cos;     // [tokens, dim]
  const uint16_t* sin;
  int64_t tokens, heads, dim, token_stride, head_stride, cos_stride, sin_stride;
  int64_t next;
};

void turn_token(const Turn& turn, int64_t token) {
  const int64_t half = turn.dim / 2;
  const uint16_t* cos = turn.cos + token * turn.cos_stride;
  const uint16_t* sin = turn.sin + token * turn.sin_stride;
  for (int64_t h = 0; h < turn.heads; h++) {
    const uint16_t* from = turn.states + token * turn.token_stride + h * turn.head_stride;
    uint16_t* to = turn.out + (token * turn.heads + h) * turn.dim;
    for (int64_t d = 0; d < half; d += kLanes) {
      const __m512 low = read(from + d), high = read(from + half + d);
      write(to + d, _mm512_fmsub_ps(low, read(cos + d), _mm512_mul_ps(high, read(sin + d))));
      write(to + half + d, _mm512_fmadd_ps(high, read(cos + half + d), _mm512_mul_ps(low, read(sin + half + d))));
    }
  }
}

void turn_tokens(void* given) {
  auto& turn = *(Turn*)given;
  for (int64_t token; (token = __atomic_fetch_add(&turn.next, kChunk, __ATOMIC_RELAXED)) < turn.tokens;) {
    const int64_t stop = token + kChunk < turn.tokens ? token + kChunk : turn.tokens;
    for (; token < stop; token++) turn_token(turn, token);
  }
}

}  // namespace
MILLPOND_END

// The two halves of each head are the coordinates of its turns; half a head is a multiple of 16 columns.
extern "C" void millpond_turn(const std::uint16_t* states, std::uint16_t* out, const std::uint16_t* cos,
                              const std::uint16_t* sin, std::int64_t tokens, std::int64_t heads, std::int64_t dim,
                              std::int64_t token_stride, std::int64_t head_stride, std::int64_t cos_stride,
                              std::int64_t sin_stride, std::int64_t threads) {
  Turn turn{states, out, cos, sin, tokens, heads, dim, token_stride, head_stride, cos_stride, sin_stride, 0};
  run_team(turn_tokens, &turn, tokens > kChunk ? threads : 1);
}

#endif
