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
