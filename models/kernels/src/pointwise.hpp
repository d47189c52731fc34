// Norms, rotations and gated activations, which are the row-wise operations between two products.
//
// Knows: rows of float32. An element depends only on its row. In `glu`, it depends only on the same
// element of the inputs.
#pragma once

#include "vmath.hpp"

namespace mlxrunner::ISA {

inline i64 min(i64 a, i64 b) { return a < b ? a : b; }

inline void rms_norm(const float* x, i64 width, const float* weight, float eps, float* out) {
  V squares = zero();
  i64 k = 0;
  for (; k + 16 <= width; k += 16) squares = fma(load(x + k), load(x + k), squares);
  if (k < width) squares = fma(load(x + k, width - k), load(x + k, width - k), squares);
  const V scale = set1(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + eps));
  for (k = 0; k < width; k += 16) {
    const i64 n = min(width - k, 16);
    V y = mul(load(x + k, n), scale);
    if (weight) y = mul(y, load(weight + k, n));
    store(out + k, y, n);
  }
}

inline void rope_angles(float position, const float* periods, i64 half, float* cos, float* sin) {
  for (i64 k = 0; k < half; k += 16) {
    const i64 n = min(half - k, 16);
    const SinCos t = sincos(mul(set1(position), div(set1(1), load(periods + k, n))));
    store(cos + k, t.cos, n);
    store(sin + k, t.sin, n);
  }
}

inline void rotate(const Rotation& rotation, const float* x, const float* cos, const float* sin,
                   float* out) {
  const i64 half = rotation.dims / 2;
  if (rotation.traditional) {
    for (i64 k = 0; k < half; k++) {
      const float a = x[2 * k] * rotation.magnitude, b = x[2 * k + 1] * rotation.magnitude;
      const float ac = a * cos[k], bs = b * sin[k], as = a * sin[k], bc = b * cos[k];
      out[2 * k] = ac - bs;
      out[2 * k + 1] = as + bc;
    }
  } else {
    for (i64 k = 0; k < half; k += 16) {
      const i64 n = min(half - k, 16);
      const V c = load(cos + k, n), s = load(sin + k, n), m = set1(rotation.magnitude);
      const V a = mul(load(x + k, n), m), b = mul(load(x + half + k, n), m);
      store(out + k, sub(mul(a, c), mul(b, s)), n);
      store(out + half + k, add(mul(a, s), mul(b, c)), n);
    }
  }
  for (i64 k = 2 * half; k < rotation.width; k++) out[k] = x[k];
}

inline void softcap(const float* x, float cap, i64 size, float* out) {
  for (i64 k = 0; k < size; k += 16) {
    const i64 n = min(size - k, 16);
    store(out + k, mul(set1(cap), tanh(div(load(x + k, n), set1(cap)))), n);
  }
}

// ---- gated linear units ----------------------------------------------------------------------

template <Activation kind>
inline V activate(V x) {
  if constexpr (kind == Activation::silu) return div(x, add(set1(1), exp(sub(zero(), x))));
  if constexpr (kind == Activation::relu) return max(zero(), x);
  V curve;
  if constexpr (kind == Activation::gelu) curve = erf(mul(x, set1(0.707106781f)));
  if constexpr (kind == Activation::gelu_tanh) {
    const V cubed = mul(mul(mul(x, x), x), set1(0.044715f));
    curve = tanh(mul(add(x, cubed), set1(0.797884561f)));
  }
  return mul(mul(x, set1(0.5f)), add(set1(1), curve));
}

template <Activation kind>
inline void apply_glu(const float* gate, const float* up, float* out, i64 n) {
  i64 k = 0;
  for (; k + 16 <= n; k += 16) store(out + k, mul(activate<kind>(load(gate + k)), load(up + k)));
  if (k == n) return;
  store(out + k, mul(activate<kind>(load(gate + k, n - k)), load(up + k, n - k)), n - k);
}

inline void glu(Activation kind, const float* gate, const float* up, float* out, i64 n) {
  switch (kind) {
    case Activation::silu:
      return apply_glu<Activation::silu>(gate, up, out, n);
    case Activation::gelu:
      return apply_glu<Activation::gelu>(gate, up, out, n);
    case Activation::gelu_tanh:
      return apply_glu<Activation::gelu_tanh>(gate, up, out, n);
    case Activation::relu:
      return apply_glu<Activation::relu>(gate, up, out, n);
  }
}

}  // namespace mlxrunner::ISA
