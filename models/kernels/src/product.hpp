// x times a matrix, for one row of x and for hundreds.
//
// Knows: `V`, sixteen lanes (lanes_*.hpp). Must not know: which registers those are, threads.
//
// Every element of y is one sum in one order: lane l adds up, from the first to the last, what the
// formats' expansions put into lane l, and the sixteen lanes are added in a tree. Neither how many
// rows of x there are, nor how they are tiled, nor which thread does it changes that order.
//
//   few.hpp     one to kMostX rows of x
//   many.hpp    more
#pragma once

#include "few.hpp"
#include "many.hpp"

namespace mlxrunner::ISA {

template <class Format, int M = kMostX>
void product_of(const Matrix& w, Rows x, const float* bias, float* y, i64 ldy, i64 begin, i64 end,
                float* scratch) {
  if (x.count > M) return many<Format>(w, x, bias, y, ldy, begin, end, scratch);
  if constexpr (M > 1)
    if (x.count < M) return product_of<Format, M - 1>(w, x, bias, y, ldy, begin, end, scratch);
  few<Format, M>(w, x.data, x.stride, bias, y, ldy, begin, end, scratch);
}

// So many numbers of x stay near while rows of w pass by. Of more rows of x than that, w is read
// several times, the part that one thread has at a time; that part is not large.
inline constexpr i64 kNearX = 10240;

inline void product(const Matrix& w, Rows x, const float* bias, float* y, i64 ldy, i64 begin,
                    i64 end, float* scratch) {
  // Where numbers are looked up, tables leave no registers for more than four rows of x; and to
  // look them up again for each four is less than to keep them, as long as there are few fours.
  const bool tables = w.weight == Weight::q4 && kMostX > 4;
  const i64 most = tables ? 4 : kMostX;
  const i64 by_size = (x.count * w.width + kNearX - 1) / kNearX;
  const i64 by_count = (x.count + most - 1) / most;
  const bool all = x.count > (tables ? 16 : kMostX);
  const i64 groups = all ? 1 : by_size > by_count ? by_size : by_count;
  const i64 together = groups < x.count ? (x.count + groups - 1) / groups : 1;
  for_format(w, [&](auto format) {
    for (i64 m = 0; m < x.count; m += together) {
      const i64 some = x.count - m < together ? x.count - m : together;
      product_of<decltype(format)>(w, {x.data + m * x.stride, some, x.stride}, bias, y + m * ldy,
                                   ldy, begin, end, scratch);
    }
  });
}

// The scales and biases of so many rows, at most one for each 32 numbers.
inline i64 scales_scratch(const Matrix& w, i64 rows) {
  return 2 * rows * ((w.width / 32 + 15) / 16 * 16);
}

inline i64 product_scratch(const Matrix& w, i64 count) {
  static_assert(tile_rows(1, false) <= kPanel && tile_rows(1, true) <= kPanel);
  const i64 scales = scales_scratch(w, kPanel);
  return scales + (count > kMostX ? kPanel * apart(w.width) + 16 * kPanel * kManyX : 0);
}

// ---- orders of numbers -----------------------------------------------------------------------

template <class Format>
inline void arrange_row(const float* x, i64 width, float* out) {
  if constexpr (Format::kArranged) {
    for (i64 k = 0; k < width; k += Format::kStep)
      for (int p = 0; p < Format::kStep / 16; p++)
        for (int l = 0; l < 16; l++) out[k + 16 * p + l] = x[k + Format::natural(p, l)];
  } else {
    for (i64 k = 0; k < width; k += 16)
      store(out + k, load(x + k, width - k < 16 ? width - k : 16));
  }
}

// Also rows that are in order are copied where there are a few of them: registers are read twice as
// fast from whole lines, and MLX's arrays begin within one.
inline i64 arranged_stride(const Matrix& w, i64 count) {
  const bool ordered = for_format(w, [](auto format) { return decltype(format)::kArranged; });
  return ordered || count > 2 ? apart(w.width) : 0;
}

inline void arrange(const Matrix& w, const float* x, i64 count, float* out, i64 stride) {
  for_format(w, [&](auto format) {
    for (i64 m = 0; m < count; m++)
      arrange_row<decltype(format)>(x + m * w.width, w.width, out + m * stride);
  });
}

inline i64 expand_scratch(const Matrix& w) { return apart(w.width) + scales_scratch(w, 1); }

inline void expand(const Matrix& w, i64 n, float* out, float* scratch) {
  for_format(w, [&](auto format) {
    using Format = decltype(format);
    expand_row(rows_of<Format>(w, n, 1, scratch + apart(w.width)), 0, w.width, scratch);
    if constexpr (Format::kArranged) {
      for (i64 k = 0; k < w.width; k += Format::kStep)
        for (int p = 0; p < Format::kStep / 16; p++)
          for (int l = 0; l < 16; l++) out[k + Format::natural(p, l)] = scratch[k + 16 * p + l];
    } else {
      for (i64 k = 0; k < w.width; k++) out[k] = scratch[k];
    }
  });
}

}  // namespace mlxrunner::ISA
