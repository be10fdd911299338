// Norms over the columns of rows, in float32.
#pragma once

#include "plan.h"
#include "states.h"

namespace {

constexpr int64_t kMostColumns = 8192;  // of a row that is normalized: backends/native/plans/plan.py takes no wider models

// Normalizes `columns` numbers in place. The last ones of each piece may be padding: they are 0 before and after.
inline void normalize(float* row, int64_t columns, const NormWeights& norm, int64_t piece) {
  if (norm.kind == kCopy) return;
  if (norm.kind == kScale) {
    for (int64_t c = 0; c < columns; c += kLanes)
      store(row + c, sum_of(scaled(load(row + c), load(norm.weight + c)), load(norm.bias + c)));
    return;
  }
  const int64_t real = columns - norm.padding;
  float mean = 0;
  if (norm.kind == kLayerNorm) {
    Floats sum = zeros();
    for (int64_t c = 0; c < columns; c += kLanes) sum = sum_of(sum, load(row + c));
    mean = sum_of(sum) / float(real);
  }
  const Floats center = broadcast(mean);
  const int64_t used = piece - norm.padding * piece / columns;
  // Of RMS norms, and so of heads, whose padding is not behind all columns: the difference is 0 there.
  const auto off_center = [&](int64_t c) __attribute__((always_inline)) {
    const Floats off = difference(load(row + c), center);
    return norm.padding && norm.kind == kLayerNorm ? within(off, 0, used - 1 - c % piece, zeros()) : off;
  };
  Floats squares = zeros();
  for (int64_t c = 0; c < columns; c += kLanes) {
    const Floats off = off_center(c);
    squares = multiply_add(off, off, squares);
  }
  const float variance = sum_of(squares) / float(real);
  const Floats scale = broadcast(1.0f / __builtin_sqrtf(variance + float(norm.epsilon)));
  for (int64_t c = 0; c < columns; c += kLanes) {
    Floats x = scaled(off_center(c), scale);
    if (norm.weight) x = scaled(x, load(norm.weight + c));
    if (norm.bias) x = sum_of(x, load(norm.bias + c));
    store(row + c, x);
  }
}

// Rows [first, last): states = norm(sums), or of sums + states (`residual`), which are multiplied by the step's factors;
// with `target` 1 the sums take the result too, with 2 only the sums, with 4 the branch too.
template <class Isa>
void norm_to_states(const Sums& sums, const States<Isa>& states, const Sums& branch, int64_t first, int64_t last,
                    const Step& step) {
  alignas(64) float numbers[kMostColumns];
  const int64_t columns = step.columns, target = step.target;
  const float* factors = step.state_factors;
  for (int64_t r = first; r < last; r++) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      Floats x = load(sums.row(r, c));
      if (step.residual) {
        const Floats state = Isa::load_state(states.row(r, c));
        x = factors ? multiply_add(state, load(factors + c), x) : sum_of(x, state);
      }
      store(numbers + c, x);
    }
    normalize(numbers, columns, step.norm, columns);
    for (int64_t c = 0; c < columns; c += kLanes) {
      if (target != 2) Isa::store_state(states.row(r, c), load(numbers + c));
      if (target != 0) store((target == 4 ? branch : sums).row(r, c), load(numbers + c));
    }
  }
}

// Raises the peak of each column to the largest magnitude in rows [first, last).
template <class Isa>
void raise_peaks(const States<Isa>& states, int64_t first, int64_t last, int64_t columns, float* peaks) {
  for (int64_t r = first; r < last; r++)
    for (int64_t c = 0; c < columns; c += kLanes)
      store(peaks + c, maximum(magnitude(Isa::load_state(states.row(r, c))), load(peaks + c)));
}

// Rows [first, last): sums += norm(branch).
inline void norm_to_sums(const Sums& branch, const Sums& sums, int64_t first, int64_t last, int64_t columns,
                         const NormWeights& norm) {
  alignas(64) float numbers[kMostColumns];
  for (int64_t r = first; r < last; r++) {
    for (int64_t c = 0; c < columns; c += kLanes) store(numbers + c, load(branch.row(r, c)));
    normalize(numbers, columns, norm, columns);
    for (int64_t c = 0; c < columns; c += kLanes)
      store(sums.row(r, c), sum_of(load(sums.row(r, c)), load(numbers + c)));
  }
}

// Rows [first, last): states = norm(scale * sums + share * branch).
template <class Isa>
void norm_of_mixture(const Sums& sums, const Sums& branch, const States<Isa>& states, int64_t first, int64_t last,
                     const Step& step) {
  alignas(64) float numbers[kMostColumns];
  const Floats scale = broadcast(float(step.scale)), share = broadcast(float(step.share));
  for (int64_t r = first; r < last; r++) {
    for (int64_t c = 0; c < step.columns; c += kLanes)
      store(numbers + c, multiply_add(load(branch.row(r, c)), share, scaled(load(sums.row(r, c)), scale)));
    normalize(numbers, step.columns, step.norm, step.columns);
    for (int64_t c = 0; c < step.columns; c += kLanes) Isa::store_state(states.row(r, c), load(numbers + c));
  }
}

// A row's heads [first, first + count) normalized as one row of numbers, in place.
template <class Isa>
void normalize_heads(const States<Isa>& heads, int64_t row, int64_t first, int64_t count, int64_t dim,
                     const NormWeights& norm) {
  alignas(64) float numbers[kMostColumns];
  for (int64_t c = 0; c < count * dim; c += kLanes)
    store(numbers + c, Isa::load_state(heads.row(row, first * dim + c)));
  normalize(numbers, count * dim, norm, dim);
  for (int64_t c = 0; c < count * dim; c += kLanes)
    Isa::store_state(heads.row(row, first * dim + c), load(numbers + c));
}

// A row of queries and keys: each head, or all of them as one, normalized and then rotated by its position, in place.
template <class Isa>
void turn_heads(const States<Isa>& heads, int64_t row, int64_t position, const Step& step) {
  alignas(64) float numbers[kMostColumns];
  const int64_t half = step.dim / 2;
  if (step.whole) {
    normalize_heads<Isa>(heads, row, 0, step.heads, step.dim, step.norm);
    normalize_heads<Isa>(heads, row, step.heads, step.kv_heads, step.dim, step.key_norm);
    if (!step.cosines) return;
  }
  for (int64_t h = 0; h < step.heads + step.kv_heads; h++) {
    const NormWeights& norm = h < step.heads ? step.norm : step.key_norm;
    if (norm.kind == kCopy && !step.cosines) continue;
    for (int64_t d = 0; d < step.dim; d += kLanes)
      store(numbers + d, Isa::load_state(heads.row(row, h * step.dim + d)));
    if (!step.whole) normalize(numbers, step.dim, norm, step.dim);
    if (step.cosines) {
      const float *cosines = step.cosines + position * half, *sines = step.sines + position * half;
      for (int64_t d = 0; d < half; d += kLanes) {
        const Floats low = load(numbers + d), high = load(numbers + half + d), c = load(cosines + d), s = load(sines + d);
        store(numbers + d, difference(scaled(low, c), scaled(high, s)));
        store(numbers + half + d, multiply_add(high, c, scaled(low, s)));
      }
    }
    for (int64_t d = 0; d < step.dim; d += kLanes)
      Isa::store_state(heads.row(row, h * step.dim + d), load(numbers + d));
  }
}

}  // namespace
