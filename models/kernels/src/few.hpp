// x times a matrix, for few rows of x: a tile of some rows of the matrix and all rows of x lies in
// registers, and the matrix is expanded there.
#pragma once

#include "formats.hpp"

namespace mlxrunner::ISA {

// One step of a tile: numbers k to k + kStep of R rows of w and of M rows of x.
template <class Format, int R, int M>
inline void step(const Format& w, i64 k, const float* x, i64 stride, V (&sums)[R][M]) {
  if constexpr (M <= 2) {
    MLXRUNNER_UNROLL
    for (int r = 0; r < R; r++) {
      const auto at = w.at(r, k);
      MLXRUNNER_UNROLL
      for (int p = 0; p < Format::kStep / 16; p++) {
        const V wide = at.get(p);
        MLXRUNNER_UNROLL
        for (int m = 0; m < M; m++)
          sums[r][m] = fma(wide, load(x + m * stride + k + 16 * p), sums[r][m]);
      }
    }
  } else {
    typename Format::At at[R];
    MLXRUNNER_UNROLL
    for (int r = 0; r < R; r++) at[r] = w.at(r, k);
    MLXRUNNER_UNROLL
    for (int p = 0; p < Format::kStep / 16; p++) {
      V wide[R];
      MLXRUNNER_UNROLL
      for (int r = 0; r < R; r++) wide[r] = at[r].get(p);
      MLXRUNNER_UNROLL
      for (int m = 0; m < M; m++) {
        const V of_x = load(x + m * stride + k + 16 * p);
        MLXRUNNER_UNROLL
        for (int r = 0; r < R; r++) sums[r][m] = fma(wide[r], of_x, sums[r][m]);
      }
    }
  }
}

// Memory is asked for this many bytes ahead, rows lying behind each other: streams as short as a
// row come too late by themselves.
inline constexpr std::uintptr_t kAhead = 16384;

template <class Format, int R, int M>
inline void tile(const Format& w, i64 width, i64 row_bytes, const float* x, i64 stride, float* y,
                 i64 ldy, const float* bias) {
  V sums[R][M];
  MLXRUNNER_UNROLL
  for (int r = 0; r < R; r++)
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++) sums[r][m] = zero();
  const auto next = reinterpret_cast<std::uintptr_t>(w.data) + kAhead;
  const i64 lines = R * row_bytes * Format::kStep / width;  // bytes that one step reads
  i64 k = 0;
  for (; k + Format::kStep <= width; k += Format::kStep) {
    const auto from = next + k / Format::kStep * lines;
    for (i64 line = 0; line < lines; line += 64) prefetch(from + line);
    step<Format, R, M>(w, k, x, stride, sums);
  }
  if constexpr (requires { w.tail(0, k, k); }) {
    if (k < width)
      for (int r = 0; r < R; r++) {
        const V wide = w.tail(r, k, width - k);
        for (int m = 0; m < M; m++)
          sums[r][m] = fma(wide, load(x + m * stride + k, width - k), sums[r][m]);
      }
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
         i64 begin, i64 end, float* scratch) {
  constexpr int R = tile_rows(M, Format::kArranged);
  i64 n = begin;
  for (; n + R <= end; n += R)
    tile<Format, R, M>(rows_of<Format>(w, n, R, scratch), w.width, w.row_bytes(), x, stride, y + n,
                       ldy, bias ? bias + n : nullptr);
  for (; n < end; n++)
    tile<Format, 1, M>(rows_of<Format>(w, n, 1, scratch), w.width, w.row_bytes(), x, stride, y + n,
                       ldy, bias ? bias + n : nullptr);
}

}  // namespace mlxrunner::ISA
