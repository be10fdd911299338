#include "unit_rows.h"

namespace {

// The sum of squares as numpy's einsum adds it: four sums, of sixteen numbers the last four first.
float square_of(const float* row, std::int64_t width) {
  float sums[4] = {};
  std::int64_t c = 0;
  for (; c + 16 <= width; c += 16)
    for (std::int64_t part = 12; part >= 0; part -= 4)
      for (int lane = 0; lane < 4; lane++) sums[lane] += row[c + part + lane] * row[c + part + lane];
  for (; c < width; c += 4)
    for (int lane = 0; lane < 4 && c + lane < width; lane++) sums[lane] += row[c + lane] * row[c + lane];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

}  // namespace

bool finish_rows(float* rows, std::int64_t count, std::int64_t width, bool unit) {
  bool finite = true;
  for (std::int64_t i = 0; i < count; i++, rows += width) {
    const float square = square_of(rows, width);
    finite = finite && square - square == 0;
    if (!unit) continue;
    const float root = __builtin_sqrtf(square), length = root > 1e-12f ? root : 1e-12f;
    for (std::int64_t c = 0; c < width; c++) rows[c] /= length;
  }
  return finite;
}

// The same for Python, where it is compared with numpy.
extern "C" int millpond_finish_rows(float* rows, std::int64_t count, std::int64_t width, int unit) {
  return finish_rows(rows, count, width, unit != 0);
}
