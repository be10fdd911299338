// A convolution of each column over the rows of a text, between two gates (LFM2).
#pragma once

#include "plan.h"
#include "states.h"

namespace {

template <class Isa>
struct Convolution {
  static constexpr int64_t kMostTaps = 8;  // backends/native/plans/plan.py takes no more

  // One vector of columns of a text's rows [start, start + length), of which the first `keys` count: the others are 0.
  // A row of queries is overwritten once its product with the values is in the window.
  static void run(const Step& step, const States<Isa>& heads, int64_t start, int64_t length, int64_t keys, int64_t column) {
    const int64_t taps = step.reach, ahead = step.after, width = step.dim;
    Floats window[kMostTaps], weights[kMostTaps];
    for (int64_t k = 0; k < taps; k++) {
      window[k] = zeros();
      weights[k] = load(step.distances + k * width + column);
    }
    for (int64_t row = 0; row < length + ahead; row++) {
      for (int64_t k = 0; k + 1 < taps; k++) window[k] = window[k + 1];
      const auto at = [&](int64_t r, int64_t part) { return heads.row(start + r, part * width + column); };
      window[taps - 1] = row < keys ? scaled(Isa::load_state(at(row, 0)), Isa::load_state(at(row, 2))) : zeros();
      const int64_t done = row - ahead;
      if (done < 0) continue;
      Floats sum = zeros();
      for (int64_t k = 0; k < taps; k++) sum = multiply_add(window[k], weights[k], sum);
      Isa::store_state(at(done, 0), done < keys ? scaled(sum, Isa::load_state(at(done, 1))) : zeros());
    }
  }
};

}  // namespace
