// Attention within the segments of a packed row, in bfloat16, for processors with AVX512-BF16.
//
// One segment and one head of keys at a time: keys and values are laid out in the order in which the processor multiplies
// pairs of bfloat16, then blocks of query rows pass over them. A block's scores stay in the cache as float32; the softmax
// is the careful one, which takes the largest score off. A row's result depends on its own segment alone.
//
// attention/native.py calls this.

#include <cstring>

#include "processor.h"

// What Python passes.
struct Call {
  const std::uint16_t* query;
  const std::uint16_t* key;
  const std::uint16_t* value;
  std::uint16_t* out;
  const std::int32_t* bounds;   // [segments + 1], cumulative
  const std::int32_t* used;     // [segments], how many of a segment's first keys count; null: all
  const std::int32_t* prefixes; // [segments, 2], first and one past the last token whose keys stand before; null: none
  const std::uint16_t* bias;    // [heads, longest, longest], added to the scores; null: none
  void* room;                   // threads times millpond_attention_room bytes
  std::int64_t query_token, query_head, key_token, key_head, value_token, value_head, out_token, out_head;  // strides
  std::int64_t bias_head, bias_row;
  std::int64_t segments, heads, kv_heads, dim;
  std::int64_t rows;     // of the longest segment
  std::int64_t longest;  // keys of a segment, those before it included
  std::int64_t before;   // how far a row looks back
  std::int64_t after;    // how far ahead
  std::int64_t threads;
  double scale;
  double softcap;  // 0: none
};

#if MILLPOND_NATIVE

MILLPOND_BEGIN

namespace {

constexpr int kRows = 6;  // query rows of a block: times four vectors of columns, 24 sums in 32 registers
constexpr int64_t kUnit = 512;  // query rows for which keys are laid out once
constexpr float kLog2E = 1.44269504f;

inline __m512bh pairs(const void* from) { return (__m512bh)_mm512_loadu_si512(from); }

inline __m512bh pair(const uint16_t* from) {
  int32_t both;
  std::memcpy(&both, from, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}

// 2^x for x <= 0, within two units of float32's last place. Below -126 it is 0, which spares denormal numbers.
inline __m512 exp2_of(__m512 x) {
  const __mmask16 there = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // a NaN stays one
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);  // within [-0.5, 0.5]
  __m512 p = _mm512_set1_ps(1.33335581e-3f);    // (ln 2)^5 / 5!, and so on down
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(9.61812911e-3f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(5.55041087e-2f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(2.40226507e-1f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(6.93147181e-1f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(there, p, whole);
}

inline __m512 tanh_of(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);
  const __m512 t = exp2_of(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2.0f * kLog2E)));
  const __m512 size = _mm512_div_ps(_mm512_sub_ps(one, t), _mm512_add_ps(one, t));
  return _mm512_or_ps(size, _mm512_and_ps(x, sign));
}

// 16 rows of 16 numbers of 32 bits, turned.
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

// Rows of keys or of values: those of another segment first, where this one continues it.
struct Source {
  const uint16_t* earlier;
  const uint16_t* own;
  int64_t prefix, stride;

  const uint16_t* row(int64_t j) const { return j < prefix ? earlier + j * stride : own + (j - prefix) * stride; }
};

// keys [count, dim] -> [blocks of 16 keys][dim / 2][16 keys][2]; what the last block lacks is 0.
void lay_keys(const Source& keys, int64_t count, int dim, uint16_t* to) {
  for (int64_t first = 0; first < count; first += kLanes, to += dim * kLanes)
    for (int d = 0; d < dim; d += 32) {
      const int wide = dim - d < 32 ? dim - d : 32;
      const __mmask32 some = wide == 32 ? 0xffffffffu : 0xffffu;
      __m512i rows[16];
      for (int j = 0; j < 16; j++)
        rows[j] = first + j < count ? _mm512_maskz_loadu_epi16(some, keys.row(first + j) + d) : _mm512_setzero_si512();
      transpose(rows);
      for (int i = 0; i < wide / 2; i++) _mm512_storeu_si512(to + (d / 2 + i) * 2 * kLanes, rows[i]);
    }
}

// values [count, dim] -> [pairs of keys][dim][2]; an odd one is paired with 0.
void lay_values(const Source& values, int64_t count, int dim, uint16_t* to) {
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
  const uint16_t* keys;    // laid out
  const uint16_t* values;  // laid out
  const uint16_t* bias;    // [rows, keys] of this head, or null
  int64_t count;           // keys
  int64_t bias_row, before, after;
  int dim;
  float scale, softcap;  // both with log2(e) in them where no cap is
  float* scores;         // room for a block's
  uint16_t* weights;
};

struct Block {
  const uint16_t* rows[kRows];  // queries; those that lack repeat the last
  int64_t at[kRows];            // their places among the keys
  __m512 largest[kRows];
};

// Which of 16 columns from `column` on a row at `at` looks at.
inline __mmask16 seen(const Head& head, int64_t at, int64_t column) {
  int64_t low = at - head.before - column, high = at + head.after - column;
  if (high > head.count - 1 - column) high = head.count - 1 - column;
  if (low < 0) low = 0;
  if (high > kLanes - 1) high = kLanes - 1;
  return high < low ? 0 : __mmask16(((1u << (high + 1)) - 1) & ~((1u << low) - 1));
}

// Scores (times log2 e) of a block's rows and N vectors of keys from `first` on.
template <int N>
void score(const Head& head, Block& block, int64_t first, bool edge, float* scores, int64_t width) {
  __m512 sums[kRows][N];
  for (int r = 0; r < kRows; r++)
    for (int n = 0; n < N; n++) sums[r][n] = _mm512_setzero_ps();
  const uint16_t* keys = head.keys + first * head.dim;
  for (int d = 0; d < head.dim; d += 2) {
    __m512bh k[N];
    for (int n = 0; n < N; n++) k[n] = pairs(keys + n * head.dim * kLanes + d * kLanes);
    for (int r = 0; r < kRows; r++) {
      const __m512bh q = pair(block.rows[r] + d);
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
        const int64_t left = head.count - column;
        const __mmask16 there = left >= kLanes ? 0xffff : __mmask16((1u << left) - 1);
        const __m256i own = _mm256_maskz_loadu_epi16(there, head.bias + block.at[r] * head.bias_row + column);
        s = _mm512_fmadd_ps(widened(own), _mm512_set1_ps(kLog2E), s);
      }
      if (edge) s = _mm512_mask_blend_ps(seen(head, block.at[r], column), _mm512_set1_ps(-__builtin_inff()), s);
      block.largest[r] = _mm512_max_ps(block.largest[r], s);
      _mm512_storeu_ps(scores + r * width + n * kLanes, s);
    }
}

// Scores of a row in, its weights out in bfloat16; one over their sum.
inline float weigh(const float* scores, int64_t vectors, __m512 largest, uint16_t* weights) {
  const float most = _mm512_reduce_max_ps(largest);
  const __m512 top = _mm512_set1_ps(most == -__builtin_inff() ? 0.0f : most);  // a window may hold no key at all
  __m512 sum = _mm512_setzero_ps();
  for (int64_t v = 0; v < vectors; v += 2) {
    const float* s = scores + v * kLanes;
    const __m512 low = exp2_of(_mm512_sub_ps(_mm512_loadu_ps(s), top));
    const __m512 high =
        v + 1 < vectors ? exp2_of(_mm512_sub_ps(_mm512_loadu_ps(s + kLanes), top)) : _mm512_setzero_ps();
    sum = _mm512_add_ps(sum, _mm512_add_ps(low, high));
    _mm512_storeu_si512(weights + v * kLanes, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  const float whole = _mm512_reduce_add_ps(sum);
  return whole == 0.0f ? 0.0f : 1.0f / whole;
}

// Weighted sums of N vectors of the values' columns, for the rows of a block that are there.
template <int N>
void mix(const uint16_t* weights, int64_t width, const uint16_t* values, int dim, int64_t pairs_of_keys,
         const float* share, int there, uint16_t* out, int64_t out_token) {
  __m512 sums[kRows][N];
  for (int r = 0; r < kRows; r++)
    for (int n = 0; n < N; n++) sums[r][n] = _mm512_setzero_ps();
  for (int64_t j = 0; j < pairs_of_keys; j++) {
    __m512bh v[N];
    for (int n = 0; n < N; n++) v[n] = pairs(values + (j * dim + n * kLanes) * 2);
    for (int r = 0; r < kRows; r++) {
      const __m512bh w = pair(weights + r * width + 2 * j);
      for (int n = 0; n < N; n++) sums[r][n] = _mm512_dpbf16_ps(sums[r][n], w, v[n]);
    }
  }
  for (int r = 0; r < there; r++)
    for (int n = 0; n < N; n++)
      write(out + r * out_token + n * kLanes, _mm512_mul_ps(sums[r][n], _mm512_set1_ps(share[r])));
}

// The first `there` rows of a block, from queries to the rows of `out`.
void attend(const Head& head, Block& block, int there, uint16_t* out, int64_t out_token) {
  int64_t from = block.at[0] - head.before, to = block.at[there - 1] + head.after + 1;
  if (to > head.count) to = head.count;
  if (from > to - 1) from = to - 1;  // no row looks at anything: one vector of masked scores
  from = from < 0 ? 0 : from / kLanes * kLanes;
  const int64_t vectors = (to - from + kLanes - 1) / kLanes, width = (vectors + 1) / 2 * 2 * kLanes;
  for (int r = 0; r < kRows; r++) block.largest[r] = _mm512_set1_ps(-__builtin_inff());
  for (int64_t v = 0; v < vectors;) {
    const int64_t first = from + v * kLanes;
    const int n = vectors - v < 4 ? int(vectors - v) : 4;
    const int64_t last = first + n * kLanes - 1;
    const bool edge =
        last >= head.count || first < block.at[there - 1] - head.before || last > block.at[0] + head.after;
    float* scores = head.scores + v * kLanes;
    switch (n) {
      case 4: score<4>(head, block, first, edge, scores, width); break;
      case 3: score<3>(head, block, first, edge, scores, width); break;
      case 2: score<2>(head, block, first, edge, scores, width); break;
      default: score<1>(head, block, first, edge, scores, width);
    }
    v += n;
  }
  float share[kRows];
  for (int r = 0; r < there; r++)
    share[r] = weigh(head.scores + r * width, vectors, block.largest[r], head.weights + r * width);
  for (int r = there; r < kRows; r++) std::memcpy(head.weights + r * width, head.weights, width * sizeof(uint16_t));
  const int64_t count = (to - from + 1) / 2;
  for (int d = 0; d < head.dim;) {
    const uint16_t* values = head.values + (from * head.dim + 2 * d);
    const int left = (head.dim - d) / kLanes;
    if (left >= 4) {
      mix<4>(head.weights, width, values, head.dim, count, share, there, out + d, out_token);
      d += 4 * kLanes;
    } else if (left >= 2) {
      mix<2>(head.weights, width, values, head.dim, count, share, there, out + d, out_token);
      d += 2 * kLanes;
    } else {
      mix<1>(head.weights, width, values, head.dim, count, share, there, out + d, out_token);
      d += kLanes;
    }
  }
}

inline int64_t padded(int64_t keys) { return (keys + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }

// Up to kUnit query rows of one segment, for the heads that share one head of keys.
void unit(const Call& call, int64_t segment, int64_t kv_head, int64_t first_row, char* room) {
  const int64_t start = call.bounds[segment], length = call.bounds[segment + 1] - start;
  if (first_row >= length) return;
  const int64_t last_row = length - first_row < kUnit ? length : first_row + kUnit;
  const int32_t* before = call.prefixes ? call.prefixes + 2 * segment : nullptr;
  const int64_t prefix = before ? before[1] - before[0] : 0, wide = padded(call.longest);
  const int dim = int(call.dim);
  Head head;
  auto* keys = (uint16_t*)(((std::uintptr_t)room + 63) & ~std::uintptr_t(63));
  auto* values = keys + wide * dim;
  head.keys = keys;
  head.values = values;
  head.scores = (float*)(values + wide * dim);
  head.weights = (uint16_t*)(head.scores + kRows * (wide + 2 * kLanes));
  head.count = prefix + (call.used ? call.used[segment] : length);
  head.bias_row = call.bias_row;
  head.before = call.before;
  head.after = call.after;
  head.dim = dim;
  const bool capped = call.softcap != 0.0;
  head.scale = float(capped ? call.scale / call.softcap : call.scale * kLog2E);
  head.softcap = float(call.softcap * kLog2E);
  Source key{nullptr, call.key + start * call.key_token + kv_head * call.key_head, prefix, call.key_token};
  Source value{nullptr, call.value + start * call.value_token + kv_head * call.value_head, prefix, call.value_token};
  if (before) {
    key.earlier = call.key + before[0] * call.key_token + kv_head * call.key_head;
    value.earlier = call.value + before[0] * call.value_token + kv_head * call.value_head;
  }
  lay_keys(key, head.count, dim, keys);
  lay_values(value, head.count, dim, values);
  const int64_t group = call.heads / call.kv_heads;
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
    head.bias = call.bias ? call.bias + h * call.bias_head : nullptr;
    for (int64_t row = first_row; row < last_row; row += kRows) {
      const int there = last_row - row < kRows ? int(last_row - row) : kRows;
      Block block;
      for (int r = 0; r < kRows; r++) {
        const int64_t own = row + (r < there ? r : there - 1);
        block.at[r] = prefix + own;
        block.rows[r] = call.query + (start + own) * call.query_token + h * call.query_head;
      }
      attend(head, block, there, call.out + (start + row) * call.out_token + h * call.out_head, call.out_token);
    }
  }
}

inline int64_t units_of(int64_t rows) { return (rows + kUnit - 1) / kUnit; }

struct Team {
  const Call* call;
  int64_t per_segment, units, room;
  int64_t next, members;  // counted up by the threads
};

void work(void* given) {
  auto& team = *(Team*)given;
  const int64_t member = __atomic_fetch_add(&team.members, 1, __ATOMIC_RELAXED);
  char* room = (char*)team.call->room + member * team.room;
  const int64_t heads = team.call->kv_heads;
  for (int64_t u; (u = __atomic_fetch_add(&team.next, 1, __ATOMIC_RELAXED)) < team.units;) {
    const int64_t part = u % team.per_segment;
    unit(*team.call, u / team.per_segment, part % heads, part / heads * kUnit, room);
  }
}

}  // namespace

MILLPOND_END

// What Python has to agree to.
extern "C" std::int64_t millpond_attention_bytes(void) { return sizeof(Call); }

// How many threads have something to do.
extern "C" std::int64_t millpond_attention_units(std::int64_t segments, std::int64_t kv_heads, std::int64_t rows) {
  return segments * kv_heads * units_of(rows);
}

// Bytes of room that each thread needs.
extern "C" std::int64_t millpond_attention_room(std::int64_t longest, std::int64_t dim) {
  const std::int64_t wide = padded(longest);
  return (64 + 2 * wide * dim * 2 + kRows * (wide + 2 * kLanes) * 6 + 63) / 64 * 64;
}

extern "C" void millpond_attention(const Call* call) {
  const std::int64_t per_segment = units_of(call->rows) * call->kv_heads;
  Team team{call, per_segment, per_segment * call->segments, millpond_attention_room(call->longest, call->dim), 0, 0};
  run_team(work, &team, team.units > 1 ? call->threads : 1);
}

#endif
