// exp, tanh, erf, sine and cosine of sixteen lanes.
//
// Knows: `V`. Each is a polynomial (least squares, weighted until the largest relative error is
// smallest) behind a reduction of its argument, and is written once for all instruction sets, which
// so agree. Off by two units in the last place at most, in the ranges that are named; what is not a
// number stays that.
#pragma once

#include "kernels.hpp"

namespace mlxrunner::ISA {

using i64 = std::int64_t;

// c[0] + c[1] x + ... + c[N - 1] x^(N - 1)
template <int N>
inline V series(V x, const float (&c)[N]) {
  V y = set1(c[N - 1]);
  for (int i = N - 2; i >= 0; i--) y = fma(y, x, set1(c[i]));
  return y;
}

// 1.5 * 2^23: to what is added to it nothing remains behind the point, and its lowest bits are that
inline constexpr float kWhole = 12582912.0f;

// To the nearest whole number, where |x| < 2^22.
inline V nearest(V x) { return sub(add(x, set1(kWhole)), set1(kWhole)); }

// 2^n for whole n in [-126, 127]: n + 127 in the bits of the exponent.
inline V power(V n) { return raised(add(n, set1(kWhole + 127))); }

inline V exp(V x) {
  // beyond these all is 0, all is inf; in this order what is not a number passes
  x = min(set1(89.0f), max(set1(-104.0f), x));
  const V n = nearest(mul(x, set1(1.44269504f)));
  // ln 2 in two parts, of which the first has so few bits that n times it is exact
  V r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  const V p = series(r, {0.5f, 0.166665122f, 0.0416661873f, 0.00836959854f, 0.00139517174f});
  const V y = add(set1(1), fma(p, mul(r, r), r));
  // in two steps: 2^n alone may be too large or too small for a number
  const V half = nearest(mul(n, set1(0.5f)));
  return mul(mul(y, power(half)), power(sub(n, half)));
}

inline V tanh(V x) {
  const V size = max(sub(zero(), x), x), square = mul(x, x);
  const V p = series(square, {-0.333333313f, 0.133331999f, -0.0539459921f, 0.0216960702f,
                              -0.0081650326f, 0.00213090191f});
  const V small = fma(mul(square, x), p, x);
  const V large = sub(set1(1), div(set1(2), add(exp(add(size, size)), set1(1))));
  return less(size, set1(0.625f), small, less(x, zero(), sub(zero(), large), large));
}

inline V erf(V x) {
  const V size = max(sub(zero(), x), x);
  const V p = series(mul(x, x), {0.128379166f, -0.376126319f, 0.112836838f, -0.026858706f,
                                 0.00519924704f, -0.000812188373f, 8.28038829e-05f});
  const V small = fma(p, x, x);
  // erfc(t) = e^(q(t) t - t); from 4 on nothing of it remains beside 1
  const V t = min(set1(4.0f), size);
  const V q = series(t, {-0.12865217f, -0.635135889f, -0.106263161f, 0.0237853602f,
                         -0.00365377055f, 0.000325654342f, -1.15224593e-05f});
  const V large = sub(set1(1), exp(fma(q, t, sub(zero(), t))));
  return less(size, set1(0.92f), small, less(x, zero(), sub(zero(), large), large));
}

struct Turn {
  V cos, sin;
};

// Of angles below 2^20: n quarter turns and a rest.
inline Turn turn(V angle) {
  const V n = nearest(mul(angle, set1(0.636619772f)));
  // Both n and pi / 2 in parts of few bits: with a fused multiply-add or without, the first four
  // steps are exact.
  const V most = mul(nearest(mul(n, set1(1.0f / 1024))), set1(1024)), rest = sub(n, most);
  V r = fma(most, set1(-1.5703125f), angle);
  r = fma(rest, set1(-1.5703125f), r);
  r = fma(most, set1(-0.00048387050628662109f), r);
  r = fma(rest, set1(-0.00048387050628662109f), r);
  r = fma(n, set1(4.37113883e-8f), r);
  const V z = mul(r, r);
  const V s = fma(mul(z, r), series(z, {-0.166666672f, 0.00833332911f, -0.000198391761f,
                                        2.71681006e-06f}), r);
  const V c = fma(mul(z, z), series(z, {0.0416666679f, -0.00138888834f, 2.47993503e-05f,
                                        -2.71963017e-07f}), fma(z, set1(-0.5f), set1(1)));
  // of n mod 4: whether it is 2 or 3, whether it is odd
  const V four = fma(nearest(fma(n, set1(0.25f), set1(-0.375f))), set1(-4), n);
  const V back = nearest(fma(four, set1(0.5f), set1(-0.25f)));
  const V odd = fma(back, set1(-2), four);
  const V sign = fma(back, set1(-2), set1(1)), other = fma(odd, set1(-2), set1(1));
  const V half = set1(0.5f);
  return {mul(mul(sign, other), less(odd, half, c, s)), mul(sign, less(odd, half, s, c))};
}

}  // namespace mlxrunner::ISA
