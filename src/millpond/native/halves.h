// float16 to float32 and back.
#pragma once

#ifndef __aarch64__
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace {

inline float half_to_float(std::uint16_t bits) {
#ifdef __aarch64__
  __fp16 half;
  std::memcpy(&half, &bits, sizeof half);
  return half;
#else
  return _cvtsh_ss(bits);
#endif
}

// To the nearest, to the even one of two.
inline std::uint16_t float_to_half(float number) {
#ifdef __aarch64__
  const __fp16 half = __fp16(number);
  std::uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
#else
  return _cvtss_sh(number, _MM_FROUND_TO_NEAREST_INT);
#endif
}

}  // namespace
