// How fast a processor multiplies: a flag says that it has an instruction, but not how often it can begin one.
#pragma once

#include <time.h>

#include "vectors.h"

namespace {

struct SpeedCall {
  std::int64_t rounds;
  double seconds;     // of all rounds
  double operations;  // multiplications and additions of all rounds
};

struct FmaSpeed {
  static constexpr int64_t kOperations = 2 * kLanes;
  static MILLPOND_INLINE Floats multiply(Floats sum, Floats x) { return multiply_add(x, x, sum); }
};

#ifdef __AVX512BF16__
struct DotSpeed {
  static constexpr int64_t kOperations = 4 * kLanes;
  static MILLPOND_INLINE Floats multiply(Floats sum, Floats x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)x);
  }
};
#endif

#ifndef __aarch64__
MILLPOND_INLINE void keep(Floats& x) { __asm__ volatile("" : "+v"(x)); }
#endif

// Times an instruction that waits for nothing: of as many sums as hide its latency.
template <class Speed>
std::int64_t measure(const void* argument) {
  auto& call = *(SpeedCall*)argument;
  constexpr int kSums = 12;
  Floats sums[kSums];
  for (auto& sum : sums) sum = zeros();
  const Floats x = broadcast(1e-3f);
  timespec begun, ended;
  clock_gettime(CLOCK_MONOTONIC, &begun);
  for (int64_t round = 0; round < call.rounds; round++)
#pragma GCC unroll 12
    for (int i = 0; i < kSums; i++) {
      sums[i] = Speed::multiply(sums[i], x);
      keep(sums[i]);  // the compiler may not compute it otherwise
    }
  clock_gettime(CLOCK_MONOTONIC, &ended);
  call.seconds = double(ended.tv_sec - begun.tv_sec) + 1e-9 * double(ended.tv_nsec - begun.tv_nsec);
  call.operations = double(call.rounds * kSums * Speed::kOperations);
  return 0;
}

}  // namespace
