// Activations, to the last digits of the model's precision.
#pragma once

#include "plan.h"
#include "states.h"

namespace {

constexpr float kLog2E = 1.44269504f;

// 2^x for x <= 0: for float32 to two units in the last place, for bfloat16 to 8e-5; 0 for -127 and less.
template <bool kExact>
MILLPOND_INLINE Floats exp2_of(Floats x) {
  if (!kExact) {
    Floats rest;
    const Floats exponent = split_power(x, &rest);
    Floats p = multiply_add(broadcast(0.07802443f), rest, broadcast(0.22606730f));
    p = multiply_add(p, rest, broadcast(0.69583350f));
    return scale_by_power(multiply_add(p, rest, broadcast(0.99992522f)), exponent);
  }
  x = maximum(x, broadcast(-127.0f));
  const Floats whole = nearest_integer(x), rest = difference(x, whole);  // within [-0.5, 0.5]
  Floats p = multiply_add(broadcast(1.54353161e-4f), rest, broadcast(1.33335581e-3f));
  p = multiply_add(p, rest, broadcast(9.61812911e-3f));
  p = multiply_add(p, rest, broadcast(5.55041087e-2f));
  p = multiply_add(p, rest, broadcast(2.40226507e-1f));
  p = multiply_add(p, rest, broadcast(6.93147181e-1f));
  p = multiply_add(p, rest, broadcast(1.0f));
  return scale_by_power(p, whole);
}

template <bool kExact>
MILLPOND_INLINE Floats tanh_of(Floats x) {
  const Floats one = broadcast(1.0f);
  const Floats t = exp2_of<kExact>(scaled(magnitude(x), broadcast(-2.0f * kLog2E)));
  return with_sign_of(quotient(difference(one, t), sum_of(one, t)), x);
}

// 1 / (1 + e^-x)
template <bool kExact>
MILLPOND_INLINE Floats sigmoid_of(Floats x) {
  const Floats one = broadcast(1.0f);
  const Floats t = exp2_of<kExact>(scaled(magnitude(x), broadcast(-kLog2E))), share = quotient(one, sum_of(one, t));
  // For negative x it is 1 - share, computed without cancellation as t * share.
  const Floats negative = scaled(t, share);
  const Floats half = with_sign_of(broadcast(0.5f), x), above = sum_of(half, broadcast(0.5f));  // 1 or 0
  return multiply_add(above, difference(share, negative), negative);
}

// x Phi(x) with Phi as a polynomial: |error| < 9e-5.
MILLPOND_INLINE Floats rough_gelu_of(Floats x) {
  const Floats t = limited(x, broadcast(4.2f)), u = scaled(t, t);
  Floats p = multiply_add(u, broadcast(-9.01736075e-10f), broadcast(7.94121888e-08f));
  p = multiply_add(p, u, broadcast(-3.03789716e-06f));
  p = multiply_add(p, u, broadcast(6.68901921e-05f));
  p = multiply_add(p, u, broadcast(-9.50653397e-04f));
  p = multiply_add(p, u, broadcast(9.29821097e-03f));
  p = multiply_add(p, u, broadcast(-6.55281618e-02f));
  p = multiply_add(p, u, broadcast(3.98465842e-01f));
  // Below -4.2 Phi is 0, and the polynomial some 1e-6: a huge x would show it.
  return scaled(maximum(x, broadcast(-4.2f)), multiply_add(p, t, broadcast(0.5f)));
}

// erf by Abramowitz and Stegun's 7.1.26 has an error of 1.5e-7.
MILLPOND_INLINE Floats exact_gelu_of(Floats x) {
  const Floats one = broadcast(1.0f), z = scaled(magnitude(x), broadcast(0.707106781f));
  const Floats t = quotient(one, multiply_add(z, broadcast(0.3275911f), one));
  Floats p = multiply_add(broadcast(1.061405429f), t, broadcast(-1.453152027f));
  p = multiply_add(p, t, broadcast(1.421413741f));
  p = multiply_add(p, t, broadcast(-0.284496736f));
  p = multiply_add(p, t, broadcast(0.254829592f));
  const Floats tail = exp2_of<true>(scaled(scaled(z, z), broadcast(-kLog2E)));
  const Floats erf = with_sign_of(difference(one, scaled(scaled(p, t), tail)), x);
  return scaled(scaled(x, broadcast(0.5f)), sum_of(one, erf));
}

template <class Precision>
MILLPOND_INLINE Floats activated(Floats x, int64_t activation) {
  constexpr bool kExact = Precision::kExact;
  switch (activation) {
    case kGelu: return kExact ? exact_gelu_of(x) : rough_gelu_of(x);
    case kGeluTanh: {
      const Floats cube = scaled(scaled(x, x), x);
      const Floats inner = scaled(multiply_add(cube, broadcast(0.044715f), x), broadcast(0.797884561f));
      return scaled(scaled(x, broadcast(0.5f)), sum_of(broadcast(1.0f), tanh_of<kExact>(inner)));
    }
    case kSilu: return scaled(x, sigmoid_of<kExact>(x));
    case kRelu: return maximum(x, zeros());
    case kSigmoid: return sigmoid_of<kExact>(x);
    case kReluSquared: return scaled(maximum(x, zeros()), maximum(x, zeros()));
    default: return x;
  }
}

// Sums [count, kColumns] of a product, activated, to rows of states. Gated: of gate and up side by side, to half as many.
template <class Isa, bool kGated, int64_t kActivation>
MILLPOND_INLINE void store_activated(const float* sums, int64_t count, const States<Isa>& to, int64_t row,
                                     int64_t column) {
  for (int64_t r = 0; r < count; r++, sums += kColumns) {
    const Floats low = activated<Isa>(load(sums), kActivation), high = load(sums + kLanes);
    if (kGated) {
      Isa::store_state(to.row(row + r, column), scaled(low, high));
    } else {
      Isa::store_state(to.row(row + r, column), low);
      Isa::store_state(to.row(row + r, column + kLanes), activated<Isa>(high, kActivation));
    }
  }
}

}  // namespace
