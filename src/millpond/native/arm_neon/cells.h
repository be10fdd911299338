// Cells of approximate search, 16 or 32 of 8 bits, of which the largest of each column are kept and summed.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace {
namespace approximate {

struct Cells16 {
  static constexpr int kBytes = 16;
  uint8x16_t v;
  static Cells16 zero() { return {vdupq_n_u8(0)}; }
  void raise(const uint8_t* row) { v = vmaxq_u8(v, vld1q_u8(row)); }
  void raise(Cells16 other) { v = vmaxq_u8(v, other.v); }
  std::uint32_t total() const { return vaddlvq_u8(v); }
};

struct Cells32 {
  static constexpr int kBytes = 32;
  Cells16 a, b;
  static Cells32 zero() { return {Cells16::zero(), Cells16::zero()}; }
  void raise(const uint8_t* row) {
    a.raise(row);
    b.raise(row + 16);
  }
  void raise(Cells32 other) {
    a.raise(other.a);
    b.raise(other.b);
  }
  std::uint32_t total() const { return a.total() + b.total(); }
};

}  // namespace approximate
}  // namespace
