// Sums of rows, each row added to one of several sums.

#include <cstdint>

// Adds row `i` of rows [count, width] to row `places[i]` of sums, in order: equal inputs give equal bits.
extern "C" void millpond_add_rows(float* sums, const float* rows, const int64_t* places, int64_t count, int64_t width) {
  for (int64_t i = 0; i < count; i++) {
    float* __restrict to = sums + places[i] * width;
    const float* __restrict from = rows + i * width;
    for (int64_t j = 0; j < width; j++) to[j] += from[j];
  }
}

// Row `i` of out [texts, width], which is zero, becomes the mean of the rows of table [tokens, width] that
// ids[begins[i]..ends[i]) name. The id `tokens` names no row and counts as zeros.
extern "C" void millpond_mean_rows(float* out, const float* table, const int32_t* ids, const int32_t* begins,
                                   const int32_t* ends, int64_t texts, int64_t tokens, int64_t width) {
  constexpr int64_t kAhead = 8;  // rows that are fetched before they are added: the table is larger than the caches
  for (int64_t i = 0; i < texts; i++) {
    float* __restrict to = out + i * width;
    for (int64_t at = begins[i]; at < ends[i]; at++) {
      if (at + kAhead < ends[texts - 1] && ids[at + kAhead] < tokens) {
        const float* next = table + ids[at + kAhead] * width;
        for (int64_t j = 0; j < width; j += 16) __builtin_prefetch(next + j);
      }
      if (ids[at] == tokens) continue;
      const float* __restrict from = table + ids[at] * width;
      for (int64_t j = 0; j < width; j++) to[j] += from[j];
    }
    const float count = ends[i] > begins[i] ? (float)(ends[i] - begins[i]) : 1.0f;
    for (int64_t j = 0; j < width; j++) to[j] /= count;
  }
}
