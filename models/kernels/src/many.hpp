// x times a matrix, for many rows of x: kPanel rows of the matrix are expanded to float32 once, and
// meet x in blocks that lie in registers.
#pragma once

#include "formats.hpp"

namespace mlxrunner::ISA {

inline constexpr i64 kPanel = 8;       // rows of w that are expanded together
inline constexpr i64 kDepth = 768;     // numbers of them that meet x at a time: they stay near
inline constexpr i64 kManyX = 192;     // rows of x that a panel meets before it is expanded again,
inline constexpr i64 kNear = 1 << 17;  // and how many numbers they have: they stay near, too

// Rows this far apart: whole registers, and not by a power of two, which would have the numbers
// that meet compete for the same lines of the cache.
inline i64 apart(i64 width) {
  const i64 padded = (width + 15) / 16 * 16;
  return padded % 256 ? padded : padded + 16;
}

template <class Format>
inline void expand_row(const Format& w, int r, i64 width, float* out) {
  i64 k = 0;
  for (; k + 16 <= width; k += 16) store(out + k, w.at(r, k));
  if (k < width) store(out + k, w.tail(r, k, width - k));
}

// Where the sums of a tile come from and where they go.
struct Sums {
  float* kept;        // [R, M, 16], between two depths
  bool begin, end;    // whether they start at zero; whether they are done
  const float* bias;  // of the first of these rows of w, or nullptr
  float* y;
  i64 ldy;
};

// R rows of w and M of x, of which the numbers [from, to) meet.
template <int R, int M>
inline void block(const float* w, i64 ldw, const float* x, i64 ldx, i64 from, i64 to, Sums s) {
  V sums[M][R];
  MLXRUNNER_UNROLL
  for (int m = 0; m < M; m++)
    MLXRUNNER_UNROLL
    for (int r = 0; r < R; r++) sums[m][r] = s.begin ? zero() : load(s.kept + 16 * (m * R + r));
  for (i64 k = from; k < to; k += 16) {
    // register after register: where a V takes several, all of them would be too many
    MLXRUNNER_UNROLL
    for (int i = 0; i < kParts; i++) {
      const i64 at = k + 16 / kParts * i;
      Part wide[R];
      MLXRUNNER_UNROLL
      for (int r = 0; r < R; r++) wide[r] = load_part(w + r * ldw + at);
      MLXRUNNER_UNROLL
      for (int m = 0; m < M; m++) {
        const Part of_x = load_part(x + m * ldx + at);
        MLXRUNNER_UNROLL
        for (int r = 0; r < R; r++) add_product(part(sums[m][r], i), wide[r], of_x);
      }
    }
  }
  if (!s.end) {
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++)
      MLXRUNNER_UNROLL
      for (int r = 0; r < R; r++) store(s.kept + 16 * (m * R + r), sums[m][r]);
    return;
  }
  MLXRUNNER_UNROLL
  for (int m = 0; m < M; m++) {
    float* y = s.y + m * s.ldy;
    if constexpr (R == 4) sum4(sums[m][0], sums[m][1], sums[m][2], sums[m][3], y);
    else
      MLXRUNNER_UNROLL
      for (int r = 0; r < R; r++) y[r] = sum(sums[m][r]);
    if (s.bias)
      MLXRUNNER_UNROLL
      for (int r = 0; r < R; r++) y[r] = y[r] + s.bias[r];
  }
}

// All `rows` of a panel and M rows of x, which are near now.
template <int M>
inline void across(const float* w, i64 ldw, i64 rows, const float* x, i64 ldx, i64 from, i64 to,
                   Sums s) {
  i64 r = 0;
  for (; rows - r >= kBlockRows; r += kBlockRows) {
    block<kBlockRows, M>(w + r * ldw, ldw, x, ldx, from, to, s);
    s.y += kBlockRows, s.kept += 16 * kBlockRows * M;
    if (s.bias) s.bias += kBlockRows;
  }
  for (; r < rows; r++) {
    block<1, M>(w + r * ldw, ldw, x, ldx, from, to, s);
    s.y += 1, s.kept += 16 * M;
    if (s.bias) s.bias += 1;
  }
}

// The same and all rows of x, as many at a time as there are registers for.
template <int M>
inline void along(const float* w, i64 ldw, i64 rows, const float* x, i64 ldx, i64 count, i64 from,
                  i64 to, Sums s) {
  for (; count >= M; count -= M) {
    across<M>(w, ldw, rows, x, ldx, from, to, s);
    x += M * ldx, s.y += M * s.ldy, s.kept += 16 * rows * M;
  }
  if constexpr (M > 1) along<M / 2>(w, ldw, rows, x, ldx, count, from, to, s);
}

template <class Format>
void many(const Matrix& w, Rows x, const float* bias, float* y, i64 ldy, i64 begin, i64 end,
          float* scratch) {
  const i64 padded = apart(w.width);
  const i64 depths = (w.width + kDepth - 1) / kDepth;
  const i64 depth = ((w.width + depths - 1) / depths + 15) / 16 * 16;
  float *panel = scratch, *kept = panel + kPanel * padded;
  const i64 fits = kNear / padded / kBlockX * kBlockX;
  const i64 together = fits < kBlockX ? kBlockX : fits < kManyX ? fits : kManyX;
  for (i64 m = 0; m < x.count; m += together) {
    const i64 count = x.count - m < together ? x.count - m : together;
    for (i64 n = begin; n < end; n += kPanel) {
      const i64 rows = end - n < kPanel ? end - n : kPanel;
      const Format of_panel = rows_of<Format>(w, n);
      for (i64 r = 0; r < rows; r++) expand_row(of_panel, r, w.width, panel + r * padded);
      for (i64 from = 0; from < w.width; from += depth) {
        const i64 to = from + depth < w.width ? from + depth : w.width;
        Sums s{kept, from == 0, to == w.width, bias ? bias + n : nullptr, y + m * ldy + n, ldy};
        along<kBlockX>(panel, padded, rows, x.data + m * x.stride, x.stride, count, from, to, s);
      }
    }
  }
}

}  // namespace mlxrunner::ISA
