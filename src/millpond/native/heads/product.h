// Products of a head with rows of float32, and the exact GELU.
#pragma once

#include <cstdlib>

#include "../encoder/forward.h"
#include "calls.h"

namespace {

// Rows of float32 as states of `in` columns: zeros behind the last one.
template <class Precision>
MILLPOND_INLINE void rows_to_states(const float* rows, int64_t count, int64_t columns, int64_t in,
                                    const States<Precision>& to) {
  for (int64_t r = 0; r < count; r++, rows += columns)
    for (int64_t c = 0; c < in; c += kLanes) {
      const int64_t left = columns - c;
      const Floats x = left >= kLanes ? load(rows + c) : left > 0 ? load_first(rows + c, left) : zeros();
      Precision::store_state(to.row(r, c), x);
    }
}

// Memory of a call, of which each thread has a part.
struct Parts {
  char* at;
  int64_t size;

  Parts(int64_t size, int64_t threads) : size(quotient_up(size, 64) * 64) {
    at = (char*)std::aligned_alloc(64, this->size * threads);
  }
  ~Parts() { std::free(at); }
  char* of(int64_t member) const { return at + member * size; }
};

// The rows of a piece, and of its panels, which are an odd number of 32 rows apart (see Forward::sizes_of).
constexpr int64_t kPieceRows = 64, kPanelRows = 96;

struct HeadProduct {
  struct Job {
    const ProductCall* call;
    const Parts* parts;
    int64_t next;  // row
  };

  static void work(void* argument, int64_t member) {
    auto& job = *(Job*)argument;
    const ProductCall& call = *job.call;
    const FlushDenormals flush;
    const States<FmaIsa> states{(float*)job.parts->of(member), kPanelRows * FmaIsa::kPanel};
    const int64_t depth = call.weight.in / FmaIsa::kPanel, units = quotient_up(call.columns, kColumns);
    for (;;) {
      const int64_t first = __atomic_fetch_add(&job.next, kPieceRows, __ATOMIC_RELAXED);
      if (first >= call.count) return;
      const int64_t rows = least_of(kPieceRows, call.count - first);
      rows_to_states(call.rows + first * call.width, rows, call.width, call.weight.in, states);
      product<FmaIsa>(states, rows, (const float*)call.weight.units, unit_size<FmaIsa>(depth), depth, 0, units,
                      call.weight.bias, [&](int64_t unit, int64_t row, int64_t count, const float* sums) {
                        float* to = call.out + (first + row) * call.columns + unit * kColumns;
                        const int64_t columns = least_of(kColumns, call.columns - unit * kColumns);
                        for (int64_t r = 0; r < count; r++, to += call.columns, sums += kColumns)
                          std::memcpy(to, sums, columns * sizeof(float));
                      });
    }
  }

  static int64_t run(const void* argument) {
    const auto& call = *(const ProductCall*)argument;
    const Parts parts(call.weight.in * kPanelRows * int64_t(sizeof(float)), call.threads);
    if (!parts.at) return -1;
    Job job{&call, &parts, 0};
    run_team(work, &job, least_of(call.threads, quotient_up(call.count, kPieceRows)));
    return 0;
  }
};

// x Phi(x) to the last digits of float32: max(x, 0) - |x| exp(-x^2 / 2) t Q(t) with t = 1 / (1 + 0.3 |x|), where t Q(t) is
// erfc(|x| / sqrt(2)) exp(x^2 / 2) / 2 and Q a polynomial that was fitted to 2e-9.
MILLPOND_INLINE Floats precise_gelu_of(Floats x) {
  const Floats one = broadcast(1.0f), z = smaller(magnitude(x), broadcast(14.0f));  // beyond it the tail is 0
  const Floats t = quotient(one, multiply_add(z, broadcast(0.3f), one));
  Floats q = multiply_add(broadcast(0.0326304985f), t, broadcast(-0.222815911f));
  q = multiply_add(q, t, broadcast(0.480618283f));
  q = multiply_add(q, t, broadcast(-0.267037897f));
  q = multiply_add(q, t, broadcast(0.274115253f));
  q = multiply_add(q, t, broadcast(0.0785066328f));
  q = multiply_add(q, t, broadcast(0.123983016f));
  const Floats exponent = scaled(scaled(z, z), broadcast(-0.5f * kLog2E));
  const Floats tail = scaled(scaled(q, t), exp2_of<true>(exponent));
  return difference(maximum(x, zeros()), scaled(z, tail));
}

inline int64_t gelu(const void* argument) {
  const auto& call = *(const GeluCall*)argument;
  const FlushDenormals flush;
  int64_t i = 0;
  for (; i + kLanes <= call.count; i += kLanes) store(call.numbers + i, precise_gelu_of(load(call.numbers + i)));
  if (i == call.count) return 0;
  alignas(64) float last[kLanes];
  store(last, precise_gelu_of(load_first(call.numbers + i, call.count - i)));
  std::memcpy(call.numbers + i, last, (call.count - i) * sizeof(float));
  return 0;
}

}  // namespace
