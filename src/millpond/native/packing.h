// Token rows in the form in which they are stored: int8 with a float16 scale a row, or bfloat16.
// Called by late_interaction/kernels/exact.py, whose numpy version gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "halves.h"
#include "kernel_table.h"

namespace {

using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::uint16_t;
using std::uint32_t;

struct PackCall {
  const float* from;  // [count, dim]
  void* rows;         // [count, width], int8 or bfloat16; columns from dim on are set to 0
  uint16_t* scales;   // [count] float16; null for bfloat16
  int64_t count, dim, width;
};

// The float16 scale of a row whose largest magnitude is given: rounded up if the largest number would exceed 127.
inline uint16_t scale_of(float largest) {
  uint16_t scale = float_to_half(largest / 127.0f);
  if (largest > half_to_float(scale) * 127.4f) scale++;
  return scale;
}

// Row of int8 numbers times their scale. A row with a NaN or an infinity is 0 with a NaN scale: its scores are NaN.
inline uint16_t quantize(const float* from, int64_t dim, int8_t* to) {
  // The bits of magnitudes are ordered as the magnitudes are, with infinity and NaN above all others.
  uint32_t most = 0;
  for (int64_t d = 0; d < dim; d++) {
    uint32_t bits;
    std::memcpy(&bits, from + d, sizeof bits);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  const uint16_t half = most < 0x7f800000 ? scale_of(largest) : uint16_t(0x7e00);
  const float scale = half_to_float(half);
  if (!(scale > 0.0f)) {
    std::memset(to, 0, dim);
    return half;
  }
  for (int64_t d = 0; d < dim; d++) {
    // Adding 1.5 * 2^23 rounds to the nearest even integer, into the low bits.
    const float shifted = from[d] / scale + 12582912.0f;
    int32_t integer;
    std::memcpy(&integer, &shifted, sizeof integer);
    to[d] = int8_t(integer);
  }
  return half;
}

inline uint16_t to_bfloat16(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
  return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);  // rounding could make a NaN an infinity
}

[[maybe_unused]] int64_t pack_int8(const void* arguments) {
  const auto& call = *(const PackCall*)arguments;
  for (int64_t i = 0; i < call.count; i++) {
    int8_t* row = (int8_t*)call.rows + i * call.width;
    call.scales[i] = quantize(call.from + i * call.dim, call.dim, row);
    std::memset(row + call.dim, 0, call.width - call.dim);
  }
  return 0;
}

[[maybe_unused]] int64_t pack_bfloat16(const void* arguments) {
  const auto& call = *(const PackCall*)arguments;
  for (int64_t i = 0; i < call.count; i++) {
    uint16_t* row = (uint16_t*)call.rows + i * call.width;
    const float* from = call.from + i * call.dim;
    for (int64_t d = 0; d < call.dim; d++) row[d] = to_bfloat16(from[d]);
    std::memset(row + call.dim, 0, 2 * (call.width - call.dim));
  }
  return 0;
}

}  // namespace
