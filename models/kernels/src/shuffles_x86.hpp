// Horizontal sums and transposition on x86-64, for SIMD headers that define `reduce_to_4`.
#pragma once

#include <immintrin.h>

namespace mlxrunner::ISA {

inline float sum(V a) {
  __m128 q = reduce_to_4(a);
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
// computes four sums together, added in the same tree
inline void sum4(V a, V b, V c, V d, float* out) {
  const __m128 p = reduce_to_4(a), q = reduce_to_4(b), r = reduce_to_4(c), s = reduce_to_4(d);
  const __m128 pq = _mm_add_ps(_mm_unpacklo_ps(p, q), _mm_unpackhi_ps(p, q));
  const __m128 rs = _mm_add_ps(_mm_unpacklo_ps(r, s), _mm_unpackhi_ps(r, s));
  _mm_storeu_ps(out, _mm_add_ps(_mm_movelh_ps(pq, rs), _mm_movehl_ps(rs, pq)));
}

// column i of the four rows becomes four contiguous numbers at to + i * to_step
inline void transpose_4x4(const float* const (&rows)[4], float* to, std::int64_t to_step) {
  __m128 a = _mm_loadu_ps(rows[0]), b = _mm_loadu_ps(rows[1]), c = _mm_loadu_ps(rows[2]),
         d = _mm_loadu_ps(rows[3]);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps(to, a);
  _mm_storeu_ps(to + to_step, b);
  _mm_storeu_ps(to + 2 * to_step, c);
  _mm_storeu_ps(to + 3 * to_step, d);
}

}  // namespace mlxrunner::ISA
