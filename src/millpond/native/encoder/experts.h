// A mixture of experts: a router gives each row a score for every feed forward; those with the highest ones compute the
// row, and their results are added up with weights. The rows of an expert are gathered, so that each of its weights is
// read once for all of them.
#pragma once

#include "activations.h"
#include "plan.h"
#include "states.h"

namespace {

template <class Isa>
struct Experts {
  using State = typename Isa::State;
  static constexpr int64_t kMost = 1024;  // experts: backends/native/plans/plan.py takes no more

  // Of one thread.
  struct Room {
    States<Isa> gathered, inner;  // rows of one expert
    Sums scores, results;
    int32_t *chosen, *rows;  // [rows, top] experts, and the rows of one expert
    float *weights, *shares;  // [rows, top], and of one expert's rows
  };

  struct Sizes {
    int64_t rows = 0, gathered = 0, inner = 0, scores = 0, results = 0, chosen = 0, bytes = 0;

    // Of a model whose slices have so many rows at most; `chunk`: inner columns that are computed at a time.
    static Sizes of(const Model& model, int64_t rows, int64_t chunk) {
      Sizes sizes;
      int64_t into = 0, inner = 0, count = 0, out = 0, top = 0;
      for (int64_t i = 0; i < model.count; i++) {
        const Step& step = model.steps[i];
        if (step.kind != kExperts) continue;
        into = most_of(into, step.weight.in);
        count = most_of(count, step.weight.out);
        inner = most_of(inner, least_of(chunk, step.experts[1].in));
        out = most_of(out, step.columns);
        top = most_of(top, step.top);
      }
      if (count == 0) return sizes;
      const auto bytes = [](int64_t numbers, int64_t size) { return (numbers * size + 4096 + 64) / 64 * 64; };
      sizes.rows = (rows + 31) / 32 * 32 + 32;
      sizes.gathered = bytes(sizes.rows * into, sizeof(State));
      sizes.inner = bytes(sizes.rows * inner, sizeof(State));
      sizes.scores = bytes(sizes.rows * count + 64 * count / kColumns, 4);
      sizes.results = bytes(sizes.rows * out + 64 * out / kColumns, 4);
      sizes.chosen = bytes(sizes.rows * (top + 1), 4);
      sizes.bytes = sizes.gathered + sizes.inner + sizes.scores + sizes.results + 2 * sizes.chosen;
      return sizes;
    }
  };

  static Room room_at(char* at, const Sizes& sizes) {
    Room room;
    const auto take = [&](int64_t bytes) {
      char* from = at;
      at += bytes;
      return from;
    };
    room.gathered = {(State*)take(sizes.gathered), sizes.rows * Isa::kPanel};
    room.inner = {(State*)take(sizes.inner), sizes.rows * Isa::kPanel};
    room.scores = {(float*)take(sizes.scores), sizes.rows * kColumns + 64};
    room.results = {(float*)take(sizes.results), sizes.rows * kColumns + 64};
    room.chosen = (int32_t*)take(sizes.chosen);
    room.weights = (float*)take(sizes.chosen);
    room.rows = room.chosen + (sizes.chosen / 4 - sizes.rows);
    room.shares = room.weights + (sizes.chosen / 4 - sizes.rows);
    return room;
  }

  // The experts of the first rows and their weights: the largest shares of a softmax over all.
  static void choose(const Step& step, const Room& room, int64_t rows) {
    const int64_t count = step.expert_count, columns = step.weight.out;
    alignas(64) float shares[kMost];
    for (int64_t r = 0; r < rows; r++) {
      Floats largest = broadcast(-__builtin_inff());
      for (int64_t c = 0; c < columns; c += kLanes) {
        const Floats s = within(load(room.scores.row(r, c)), 0, count - 1 - c, broadcast(-__builtin_inff()));
        store(shares + c, s);
        largest = maximum(s, largest);
      }
      const Floats top = broadcast(-largest_of(largest));
      Floats sum = zeros();
      for (int64_t c = 0; c < columns; c += kLanes) {
        const Floats below = scaled(sum_of(load(shares + c), top), broadcast(kLog2E));
        const Floats share = exp2_of<true>(below);
        store(shares + c, within(share, 0, count - 1 - c, broadcast(-1.0f)));
        sum = sum_of(sum, within(share, 0, count - 1 - c, zeros()));
      }
      float whole = sum_of(sum), used = 0;
      float* weights = room.weights + r * step.top;
      for (int64_t k = 0; k < step.top; k++) {
        int64_t best = 0;
        for (int64_t e = 1; e < count; e++)
          if (shares[e] > shares[best]) best = e;
        room.chosen[r * step.top + k] = int32_t(best);
        weights[k] = shares[best];
        used += shares[best];
        shares[best] = -1;
      }
      if (step.renormalized) whole = used;
      for (int64_t k = 0; k < step.top; k++) weights[k] /= whole;
    }
  }

  // The rows of an expert, side by side; how many there are. `first`: the row of `states` that is the first here.
  static int64_t gather(const Step& step, const Room& room, int64_t rows, int64_t expert, const States<Isa>& states,
                        int64_t first) {
    int64_t count = 0;
    for (int64_t i = 0; i < rows * step.top; i++) {
      if (room.chosen[i] != expert) continue;
      room.rows[count] = int32_t(i / step.top);
      room.shares[count++] = room.weights[i];
    }
    for (int64_t c = 0; c < step.weight.in; c += Isa::kPanel)
      for (int64_t i = 0; i < count; i++)
        std::memcpy(room.gathered.row(i, c), states.row(first + room.rows[i], c), Isa::kPanel * sizeof(State));
    return count;
  }

  // Adds the results of an expert's rows, weighted.
  static void scatter(const Step& step, const Room& room, int64_t count, const Sums& to, int64_t first) {
    for (int64_t c = 0; c < step.columns; c += kLanes)
      for (int64_t i = 0; i < count; i++) {
        float* at = to.row(first + room.rows[i], c);
        store(at, multiply_add(load(room.results.row(i, c)), broadcast(room.shares[i]), load(at)));
      }
  }
};

}  // namespace
