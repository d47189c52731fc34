// x times a matrix, for few rows of x: a tile of some rows of the matrix and all rows of x lies in
// registers, and the matrix is expanded there.
#pragma once

#include "formats.hpp"

namespace mlxrunner::ISA {

// One step of a tile: numbers k to k + 16 of R rows of w and of M rows of x.
template <class Format, int R, int M>
inline void step(const Format& w, i64 k, const float* x, i64 stride, V (&sums)[R][M]) {
  V wide[R];
  MLXRUNNER_UNROLL
  for (int r = 0; r < R; r++) wide[r] = w.at(r, k);
  MLXRUNNER_UNROLL
  for (int m = 0; m < M; m++) {
    const V of_x = load(x + m * stride + k);
    MLXRUNNER_UNROLL
    for (int r = 0; r < R; r++) sums[r][m] = fma(wide[r], of_x, sums[r][m]);
  }
}

// Memory is asked for this many bytes ahead, rows lying behind each other: streams as short as a
// row come too late by themselves.
inline constexpr std::uintptr_t kAhead = 16384;

template <class Format, int R, int M>
inline void tile(const Format& w, i64 width, const float* x, i64 stride, float* y, i64 ldy,
                 const float* bias) {
  V sums[R][M];
  MLXRUNNER_UNROLL
  for (int r = 0; r < R; r++)
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++) sums[r][m] = zero();
  const auto next = reinterpret_cast<std::uintptr_t>(w.data) + kAhead;
  constexpr i64 lines = R * 16 * sizeof(*w.data);  // bytes that one step reads
  i64 k = 0;
  for (; k + 16 <= width; k += 16) {
    const auto from = next + k / 16 * lines;
    for (i64 line = 0; line < lines; line += 64) prefetch(from + line);
    step<Format, R, M>(w, k, x, stride, sums);
  }
  if (k < width)
    for (int r = 0; r < R; r++) {
      const V wide = w.tail(r, k, width - k);
      for (int m = 0; m < M; m++)
        sums[r][m] = fma(wide, load(x + m * stride + k, width - k), sums[r][m]);
    }
  MLXRUNNER_UNROLL
  for (int m = 0; m < M; m++)
    MLXRUNNER_UNROLL
    for (int r = 0; r < R; r++) {
      const float total = sum(sums[r][m]);
      y[m * ldy + r] = bias ? total + bias[r] : total;
    }
}

template <class Format, int M>
void few(const Matrix& w, const float* x, i64 stride, const float* bias, float* y, i64 ldy,
         i64 begin, i64 end) {
  constexpr int R = tile_rows(M);
  i64 n = begin;
  for (; n + R <= end; n += R)
    tile<Format, R, M>(rows_of<Format>(w, n), w.width, x, stride, y + n, ldy,
                       bias ? bias + n : nullptr);
  for (; n < end; n++)
    tile<Format, 1, M>(rows_of<Format>(w, n), w.width, x, stride, y + n, ldy,
                       bias ? bias + n : nullptr);
}

}  // namespace mlxrunner::ISA
