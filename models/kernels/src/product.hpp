// x times a matrix, for one row of x and for hundreds.
//
// Knows: `V`, sixteen lanes (lanes_*.hpp). Must not know: which registers those are, threads.
//
// Every element of y is one sum in one order. With a plain matrix lane l adds up, from the first to
// the last, every sixteenth number from the l-th on, and the sixteen lanes are added in a tree.
// Neither how many rows of x there are, nor how they are tiled, nor which thread does it changes
// that order.
//
//   few.hpp     a plain matrix and one to kMostX rows of x
//   many.hpp    and more
//   packed.hpp  a packed one
#pragma once

#include "few.hpp"
#include "many.hpp"
#include "packed.hpp"

namespace mlxrunner::ISA {

template <class Format, int M = kMostX>
void product_of(const Matrix& w, Rows x, const float* bias, float* y, i64 ldy, i64 begin, i64 end,
                float* scratch) {
  if (x.count > M) return many<Format>(w, x, bias, y, ldy, begin, end, scratch);
  if constexpr (M > 1)
    if (x.count < M) return product_of<Format, M - 1>(w, x, bias, y, ldy, begin, end, scratch);
  few<Format, M>(w, x.data, x.stride, bias, y, ldy, begin, end);
}

// So many numbers of x stay near while rows of w pass by. Of more rows of x than that, w is read
// several times, the part that one thread has at a time; that part is not large.
inline constexpr i64 kNearX = 10240;

inline void product(const Matrix& w, Rows x, const float* bias, float* y, i64 ldy, i64 begin,
                    i64 end, float* scratch) {
  if (is_packed(w)) return packed_product(w, x, bias, y, ldy, begin, end, scratch);
  const i64 by_size = (x.count * w.width + kNearX - 1) / kNearX;
  const i64 groups = x.count > kMostX ? 1 : by_size;
  const i64 together = groups < x.count ? (x.count + groups - 1) / groups : 1;
  for_format(w, [&](auto format) {
    for (i64 m = 0; m < x.count; m += together) {
      const i64 some = x.count - m < together ? x.count - m : together;
      product_of<decltype(format)>(w, {x.data + m * x.stride, some, x.stride}, bias, y + m * ldy,
                                   ldy, begin, end, scratch);
    }
  });
}

inline i64 product_scratch(const Matrix& w, i64 count) {
  if (is_packed(w)) return w.rows % kStrip ? strip_scratch(w) : 0;
  static_assert(tile_rows(1) <= kPanel);
  return count > kMostX ? kPanel * apart(w.width) + 16 * kPanel * kManyX : 0;
}

// Rows that stay as they are, too, are copied where there are a few of them: registers are read
// twice as fast from whole lines, and MLX's arrays begin within one.
inline i64 arranged_stride(const Matrix& w, i64 count) {
  if (is_packed(w)) return whole_stride(w);
  return count > 2 ? apart(w.width) : 0;
}

inline void arrange(const Matrix& w, const float* x, i64 count, float* out, i64 stride) {
  for (i64 m = 0; m < count; m++, x += w.width, out += stride) {
    if (is_packed(w)) {
      arrange_whole(w, x, out);
      continue;
    }
    for (i64 k = 0; k < w.width; k += 16)
      store(out + k, load(x + k, w.width - k < 16 ? w.width - k : 16));
  }
}

inline void expand(const Matrix& w, i64 n, float* out) {
  if (is_packed(w)) return expand_packed(w, n, out);
  for_format(w, [&](auto format) {
    using Format = decltype(format);
    const Format row = rows_of<Format>(w, n);
    i64 k = 0;
    for (; k + 16 <= w.width; k += 16) store(out + k, row.at(0, k));
    if (k < w.width) store(out + k, row.tail(0, k, w.width - k), w.width - k);
  });
}

}  // namespace mlxrunner::ISA
