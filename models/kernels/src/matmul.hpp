// x times a matrix, for one row of x and for hundreds.
//
//   plain.hpp   a matrix of float32, bfloat16 or float16
//   packed.hpp  one of 4 or 8 bits
//
// Every element of y is one sum in one order, which neither depends on how many rows of x there
// are, nor on how they are tiled, nor on which thread does it.
#pragma once

#include "packed.hpp"
#include "plain.hpp"

namespace mlxrunner::ISA {

inline void product(const Matrix& w, Rows x, const float* bias, float* y, i64 ldy, i64 begin,
                    i64 end, float* scratch) {
  if (is_packed(w)) packed_product(w, x, y, ldy, begin, end, scratch);
  else plain_product(w, x, y, ldy, begin, end, scratch);
  if (!bias) return;
  for (i64 m = 0; m < x.count; m++)
    for (i64 n = begin; n < end; n++) y[m * ldy + n] = y[m * ldy + n] + bias[n];
}

inline i64 product_scratch(const Matrix& w) {
  if (w.rows % kStrip == 0) return 0;
  return is_packed(w) ? packed_scratch(w) : plain_scratch(w);
}

inline i64 arranged_stride(const Matrix& w, i64 count) {
  if (is_packed(w)) return whole_stride(w);
  return count > 1 ? w.width : 0;
}

inline void arrange(const Matrix& w, const float* x, i64 count, float* out, i64 stride) {
  if (!is_packed(w)) return arrange_plain(w, x, count, out);
  for (i64 m = 0; m < count; m++) arrange_whole(w, x + m * w.width, out + m * stride);
}

inline void expand(const Matrix& w, i64 n, float* out) {
  if (is_packed(w)) expand_packed(w, n, out);
  else expand_plain(w, n, out);
}

}  // namespace mlxrunner::ISA
