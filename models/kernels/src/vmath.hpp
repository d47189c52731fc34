// exp, tanh, erf, sine and cosine of sixteen lanes.
//
// Knows: `V`. Each function is a polynomial after a reduction of the argument. The polynomial is a
// least squares fit, weighted until the largest relative error is minimal. Each function is written
// only once for all instruction sets, so their results agree. The error is at most two units in the
// last place in the stated ranges. NaN stays NaN.
#pragma once

#include "kernels.hpp"

namespace mlxrunner::ISA {

using i64 = std::int64_t;

// c[0] + c[1] x + ... + c[N - 1] x^(N - 1)
template <int N>
inline V polynomial(V x, const float (&c)[N]) {
  V y = set1(c[N - 1]);
  for (int i = N - 2; i >= 0; i--) y = fma(y, x, set1(c[i]));
  return y;
}

// 1.5 * 2^23: a sum with this number has no fraction bits, and its lowest bits are the rounded
// integer
inline constexpr float kRoundMagic = 12582912.0f;

// Rounds to the nearest integer, |x| < 2^22.
inline V round_nearest(V x) { return sub(add(x, set1(kRoundMagic)), set1(kRoundMagic)); }

// Returns 2^n for an integer n in [-126, 127], by storing n + 127 in the exponent bits.
inline V exp2_int(V n) { return shift_into_exponent(add(n, set1(kRoundMagic + 127))); }

// exp(x) = fraction * 2^n, with a fraction near 1
struct Exponential {
  V fraction, n;
};

inline Exponential split_exp(V x) {
  const V n = round_nearest(mul(x, set1(1.44269504f)));
  // ln 2 in two parts; the first part has so few bits that its product with n is exact
  V r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  const V p = polynomial(r, {0.5f, 0.166665122f, 0.0416661873f, 0.00836959854f, 0.00139517174f});
  return {add(set1(1), fma(p, mul(r, r), r)), n};
}

inline V exp(V x) {
  // the result is 0 or inf outside of this range; with this order of operands, NaN is passed on
  const Exponential e = split_exp(min(set1(89.0f), max(set1(-104.0f), x)));
  // computed in two steps, because 2^n may overflow or underflow
  const V half = round_nearest(mul(e.n, set1(0.5f)));
  return mul(mul(e.fraction, exp2_int(half)), exp2_int(sub(e.n, half)));
}

// The same number for |x| <= 87, where neither 2^n nor the result overflows or is denormal.
inline V exp_in_range(V x) {
  const Exponential e = split_exp(x);
  return mul(e.fraction, exp2_int(e.n));
}

// exp(x) for x <= 0, but 0 below e^-80. Next to a weight of 1, such a small weight has no effect on
// a sum and is never drawn, and arithmetic with even smaller, denormal numbers is slow.
inline V exp_or_zero(V x) {
  const V lowest = set1(-80);
  return less(x, lowest, zero(), exp_in_range(max(lowest, x)));
}

inline V tanh(V x) {
  const V magnitude = max(sub(zero(), x), x), square = mul(x, x);
  const V p = polynomial(square, {-0.333333313f, 0.133331999f, -0.0539459921f, 0.0216960702f,
                                  -0.0081650326f, 0.00213090191f});
  const V small = fma(mul(square, x), p, x);
  const V large = sub(set1(1), div(set1(2), add(exp(add(magnitude, magnitude)), set1(1))));
  return less(magnitude, set1(0.625f), small, less(x, zero(), sub(zero(), large), large));
}

inline V erf(V x) {
  const V magnitude = max(sub(zero(), x), x);
  const V p = polynomial(mul(x, x), {0.128379166f, -0.376126319f, 0.112836838f, -0.026858706f,
                                     0.00519924704f, -0.000812188373f, 8.28038829e-05f});
  const V small = fma(p, x, x);
  // erfc(t) = e^(q(t) t - t); from 4 on, it is negligible compared with 1
  const V t = min(set1(4.0f), magnitude);
  const V q = polynomial(t, {-0.12865217f, -0.635135889f, -0.106263161f, 0.0237853602f,
                             -0.00365377055f, 0.000325654342f, -1.15224593e-05f});
  const V large = sub(set1(1), exp(fma(q, t, sub(zero(), t))));
  return less(magnitude, set1(0.92f), small, less(x, zero(), sub(zero(), large), large));
}

struct SinCos {
  V cos, sin;
};

// Angles must be below 2^20. They are reduced to n quarter turns and a remainder.
inline SinCos sincos(V angle) {
  const V n = round_nearest(mul(angle, set1(0.636619772f)));
  // Both n and pi / 2 are split into parts with few bits, so that the first four steps are exact
  // with or without fused multiply-add.
  const V high = mul(round_nearest(mul(n, set1(1.0f / 1024))), set1(1024)), low = sub(n, high);
  V r = fma(high, set1(-1.5703125f), angle);
  r = fma(low, set1(-1.5703125f), r);
  r = fma(high, set1(-0.00048387050628662109f), r);
  r = fma(low, set1(-0.00048387050628662109f), r);
  r = fma(n, set1(4.37113883e-8f), r);
  const V z = mul(r, r);
  const V s =
      fma(mul(z, r),
          polynomial(z, {-0.166666672f, 0.00833332911f, -0.000198391761f, 2.71681006e-06f}), r);
  const V c = fma(
      mul(z, z), polynomial(z, {0.0416666679f, -0.00138888834f, 2.47993503e-05f, -2.71963017e-07f}),
      fma(z, set1(-0.5f), set1(1)));
  // whether n mod 4 is 2 or 3, and whether it is odd
  const V n_mod_4 = fma(round_nearest(fma(n, set1(0.25f), set1(-0.375f))), set1(-4), n);
  const V is_2_or_3 = round_nearest(fma(n_mod_4, set1(0.5f), set1(-0.25f)));
  const V is_odd = fma(is_2_or_3, set1(-2), n_mod_4);
  const V sign = fma(is_2_or_3, set1(-2), set1(1)), other = fma(is_odd, set1(-2), set1(1));
  const V half = set1(0.5f);
  return {mul(mul(sign, other), less(is_odd, half, c, s)), mul(sign, less(is_odd, half, s, c))};
}

}  // namespace mlxrunner::ISA
