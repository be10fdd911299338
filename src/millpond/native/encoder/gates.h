// Factors of a row's heads, column by column: per-layer embeddings (EmbeddingGemma 2), and what NeoMME does to the result
// of its attention.
#pragma once

#include "activations.h"
#include "norms.h"

namespace {

// A row's queries = activation(columns from `factor` on) * norm(columns from `other` on).
template <class Isa>
void gate_row(const States<Isa>& heads, int64_t row, const Step& step) {
  alignas(64) float numbers[kMostColumns];
  for (int64_t c = 0; c < step.columns; c += kLanes)
    store(numbers + c, Isa::load_state(heads.row(row, step.other + c)));
  normalize(numbers, step.columns, step.norm, step.columns);
  for (int64_t c = 0; c < step.columns; c += kLanes) {
    const Floats factor = activated<Isa>(Isa::load_state(heads.row(row, step.factor + c)), step.activation);
    Isa::store_state(heads.row(row, c), scaled(factor, load(numbers + c)));
  }
}

// What each head of the attention's result has of the direction of the row's own values, times `distances[head]`, is
// taken away.
template <class Isa>
void exclude_values(const States<Isa>& heads, int64_t row, const Step& step) {
  const int64_t dim = step.dim, group = step.heads / step.kv_heads;
  for (int64_t h = 0; h < step.heads; h++) {
    const int64_t result = h * dim, values = (step.heads + step.kv_heads + h / group) * dim;
    Floats squares = zeros(), product = zeros();
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Floats value = Isa::load_state(heads.row(row, values + d));
      squares = multiply_add(value, value, squares);
      product = multiply_add(Isa::load_state(heads.row(row, result + d)), value, product);
    }
    const float size = __builtin_sqrtf(sum_of(squares)), length = size > 1e-12f ? size : 1e-12f;
    const Floats share = broadcast(-step.distances[h] * (sum_of(product) / length) / length);
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Floats value = Isa::load_state(heads.row(row, values + d));
      Isa::store_state(heads.row(row, result + d), multiply_add(value, share, Isa::load_state(heads.row(row, result + d))));
    }
  }
}

}  // namespace
