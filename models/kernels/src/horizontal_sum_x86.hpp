// The end of a sum on x86-64, for all lanes that leave four of sixteen by `quarter`.
#pragma once

#include <immintrin.h>

namespace mlxrunner::ISA {

inline float sum(V a) {
  __m128 q = quarter(a);
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
// four sums at once, made in the same tree
inline void sum4(V a, V b, V c, V d, float* out) {
  const __m128 p = quarter(a), q = quarter(b), r = quarter(c), s = quarter(d);
  const __m128 pq = _mm_add_ps(_mm_unpacklo_ps(p, q), _mm_unpackhi_ps(p, q));
  const __m128 rs = _mm_add_ps(_mm_unpacklo_ps(r, s), _mm_unpackhi_ps(r, s));
  _mm_storeu_ps(out, _mm_add_ps(_mm_movelh_ps(pq, rs), _mm_movehl_ps(rs, pq)));
}

}  // namespace mlxrunner::ISA
