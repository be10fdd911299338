// Low-rank adapters: the first factors of all adapters of a weight are one small weight, whose product with the states
// has columns for each adapter. Those of a text's own adapter stand behind the states, zeros for the others, and the
// second factors are further inner numbers of the weight itself. So texts with different adapters share its product.
#pragma once

#include "plan.h"
#include "states.h"

namespace {

// Rows [first, last) of `low`, to `to` from `column` on: the columns of one adapter, zeros elsewhere. -1: none.
template <class Isa>
void place_adapter(const Sums& low, const States<Isa>& to, int64_t column, int64_t first, int64_t last, int64_t adapter,
                   const Model& model) {
  const int64_t begin = adapter * model.rank, end = begin + model.rank;
  for (int64_t row = first; row < last; row++)
    for (int64_t c = 0; c < model.low; c += kLanes)
      Isa::store_state(to.row(row, column + c), within(load(low.row(row, c)), begin - c, end - 1 - c, zeros()));
}

// kLanes numbers of a word, from column `c` on, with its adapter.
MILLPOND_INLINE Floats adapted_word(Floats x, const Step& step, int64_t word, int64_t c, int64_t adapter, int64_t rank) {
  const float* factors = step.low_words + (adapter * step.vocabulary + word) * rank;
  const float* columns = step.low_columns + adapter * rank * step.columns + c;
  for (int64_t r = 0; r < rank; r++) x = multiply_add(broadcast(factors[r]), load(columns + r * step.columns), x);
  return x;
}

}  // namespace
