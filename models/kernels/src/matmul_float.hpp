// Multiplication of x by a float matrix, in float32.
//
// Knows: `V`, sixteen lanes (simd_*.hpp), panels. Must not know: the registers of an instruction
// set, threads.
//
// Sixteen rows of w form a panel, in which the k-th elements of all rows are adjacent. Therefore
// lane r of a register belongs to row r, and a register is multiplied by one broadcast element of
// x. Memory is read sequentially, and no sum crosses lanes. If the number of rows is not a multiple
// of sixteen, the last panel is narrower. In a panel of bfloat16, elements 2k and 2k + 1 of a row are
// adjacent, as tiles need them (matmul_bf16_tiles.hpp); if the width is odd, the last elements have
// no second one.
//
// Each sum is computed in K blocks. Within a block, products are added from the first element to
// the last. Then the blocks are added one after the other. This order does not depend on the number
// of rows of x.
#pragma once

#include "panels.hpp"

namespace mlxrunner::ISA {

// The size of a K block. A block of two panels and of kInputRowsPerTile rows of x stays in the
// cache while it is reused.
inline constexpr i64 kBlockK = 192;

// kColumns: the number of columns of a panel that are interleaved.
struct F32 {
  using Number = float;
  static constexpr int kColumns = 1;
  static V load_column(const float* p) { return load(p); }
};
struct Bf16 {
  using Number = std::uint16_t;
  static constexpr int kColumns = 2;
  static V load_column(const std::uint16_t* p) { return load_bf16(p); }
  static V load_first(const std::uint16_t* p) { return load_even_bf16(p); }
  static V load_second(const std::uint16_t* p) { return load_odd_bf16(p); }
};
struct F16 {
  using Number = std::uint16_t;
  static constexpr int kColumns = 1;
  static V load_column(const std::uint16_t* p) { return load_f16(p); }
};

// Calls `with` with an empty object of the matrix's format, which must not be a quantized format.
template <class F>
inline auto for_format(const Matrix& w, F with) {
  switch (w.format) {
    case WeightFormat::bf16:
      return with(Bf16{});
    case WeightFormat::f16:
      return with(F16{});
    default:
      return with(F32{});
  }
}

// ---- x ---------------------------------------------------------------------------------------

using Float4 = float __attribute__((vector_size(16)));

// Transposes four elements of each of four rows.
inline void transpose_4x4(const float* x, i64 width, float* out, i64 rows) {
  Float4 a, b, c, d;
  __builtin_memcpy(&a, x, sizeof a);
  __builtin_memcpy(&b, x + width, sizeof b);
  __builtin_memcpy(&c, x + 2 * width, sizeof c);
  __builtin_memcpy(&d, x + 3 * width, sizeof d);
  const Float4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5),
               cd = __builtin_shufflevector(c, d, 0, 4, 1, 5),
               ba = __builtin_shufflevector(a, b, 2, 6, 3, 7),
               dc = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  const Float4 columns[] = {
      __builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
      __builtin_shufflevector(ba, dc, 0, 1, 4, 5), __builtin_shufflevector(ba, dc, 2, 3, 6, 7)};
  for (int i = 0; i < 4; i++) __builtin_memcpy(out + i * rows, columns + i, sizeof *columns);
}

// Packs a block of up to kInputRowsPerTile rows. The k-th elements of the block become adjacent.
inline void pack_input_block(const float* x, i64 width, i64 rows, float* out) {
  const i64 fours = rows / 4 * 4, whole = width / 4 * 4;
  for (i64 k = 0; k < whole; k += 4)
    for (i64 m = 0; m < fours; m += 4)
      transpose_4x4(x + m * width + k, width, out + k * rows + m, rows);
  for (i64 m = 0; m < rows; m++)
    for (i64 k = m < fours ? whole : 0; k < width; k++) out[k * rows + m] = x[m * width + k];
}

inline void pack_input_float(const Matrix& w, const float* x, i64 count, float* out) {
  for (i64 m = 0; m < count; m += kInputRowsPerTile)
    pack_input_block(x + m * w.width, w.width,
                     count - m < kInputRowsPerTile ? count - m : kInputRowsPerTile,
                     out + m * w.width);
}

// ---- x times w -------------------------------------------------------------------------------

// The output of a tile; its rows are `ldy` apart.
struct OutputTile {
  float* y;
  i64 ldy;
  bool overwrite;  // true for the first K block; the others are added to the output
};

// Adds the products of one column of R panels and of M rows of x.
template <int R, int M>
inline void add_column(const V (&weights)[R], const float* x, V (&sums)[R][M]) {
  MLXRUNNER_UNROLL
  for (int m = 0; m < M; m++) {
    const V broadcast_x = set1(x[m]);
    MLXRUNNER_UNROLL
    for (int r = 0; r < R; r++) sums[r][m] = fma(weights[r], broadcast_x, sums[r][m]);
  }
}

// Multiplies elements [0, count) of R panels that are `next` apart by those of M rows of x.
template <class Format, int R, int M>
inline void tile_kernel(const typename Format::Number* w, i64 next, const float* x, i64 count,
                        OutputTile out) {
  V sums[R][M];
  MLXRUNNER_UNROLL
  for (int r = 0; r < R; r++)
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++) sums[r][m] = zero();
  // one panel is streamed from memory, but several panels are in the cache after the first rows of x
  const auto prefetch_panel = [&] {
    if constexpr (R == 1) prefetch(reinterpret_cast<std::uintptr_t>(w) + kPrefetchBytes);
  };
  V weights[R];
  i64 k = 0;
  if constexpr (Format::kColumns == 2)
    for (; k + 1 < count; k += 2, w += 2 * kPanelRows, x += 2 * M) {
      MLXRUNNER_UNROLL
      for (int r = 0; r < R; r++) weights[r] = Format::load_first(w + r * next);
      prefetch_panel();
      add_column<R, M>(weights, x, sums);
      MLXRUNNER_UNROLL
      for (int r = 0; r < R; r++) weights[r] = Format::load_second(w + r * next);
      add_column<R, M>(weights, x + M, sums);
    }
  for (; k < count; k++, w += kPanelRows, x += M) {
    MLXRUNNER_UNROLL
    for (int r = 0; r < R; r++) weights[r] = Format::load_column(w + r * next);
    prefetch_panel();
    add_column<R, M>(weights, x, sums);
  }
  MLXRUNNER_UNROLL
  for (int m = 0; m < M; m++)
    MLXRUNNER_UNROLL
    for (int r = 0; r < R; r++) {
      float* dst = out.y + m * out.ldy + r * kPanelRows;
      store(dst, out.overwrite ? sums[r][m] : add(load(dst), sums[r][m]));
    }
}

template <class Format, int M = kInputRowsPerTile>
void tile_kernel_dispatch(i64 rows, const typename Format::Number* w, const float* x, i64 count,
                          OutputTile out) {
  if constexpr (M > 1)
    if (rows < M) return tile_kernel_dispatch<Format, M - 1>(rows, w, x, count, out);
  tile_kernel<Format, 1, M>(w, 0, x, count, out);
}

// Multiplies one panel by one block of x.
template <class Format>
void panel_times_block(const typename Format::Number* w, const float* x, i64 rows, i64 width,
                       float* y, i64 ldy) {
  for (i64 k = 0; k < width; k += kBlockK)
    tile_kernel_dispatch<Format>(rows, w + k * kPanelRows, x + k * rows,
                                 width - k < kBlockK ? width - k : kBlockK, {y, ldy, k == 0});
}

// Multiplies one K block of R panels by all blocks of x.
template <class Format, int R>
void panels_times_all(const typename Format::Number* w, PackedRows x, i64 width, i64 k, float* y,
                      i64 ldy) {
  const i64 count = width - k < kBlockK ? width - k : kBlockK;
  for (i64 m = 0; m < x.count; m += kInputRowsPerTile) {
    const float* block = x.data + m * width;
    const OutputTile out{y + m * ldy, ldy, k == 0};
    const i64 rows = x.count - m;
    if (rows >= kInputRowsPerTile) {
      tile_kernel<Format, R, kInputRowsPerTile>(w + k * kPanelRows, width * kPanelRows,
                                                block + k * kInputRowsPerTile, count, out);
      continue;
    }
    for (int r = 0; r < R; r++)
      tile_kernel_dispatch<Format>(rows, w + (r * width + k) * kPanelRows, block + k * rows, count,
                                   {out.y + r * kPanelRows, ldy, out.overwrite});
  }
}

// Multiplies all full panels in [begin, end).
template <class Format>
void panels_matmul(const Matrix& w, PackedRows x, float* y, i64 ldy, i64 begin, i64 end) {
  const auto* panels = static_cast<const typename Format::Number*>(w.data);
  if (x.count <= kInputRowsPerTile) {
    for (i64 n = begin; n < end; n += kPanelRows)
      panel_times_block<Format>(panels + n * w.width, x.data, x.count, w.width, y + n, ldy);
    return;
  }
  constexpr int R = kPanelsPerTile;
  for (i64 k = 0; k < w.width; k += kBlockK) {
    i64 n = begin;
    for (; n + R * kPanelRows <= end; n += R * kPanelRows)
      panels_times_all<Format, R>(panels + n * w.width, x, w.width, k, y + n, ldy);
    for (; n < end; n += kPanelRows)
      panels_times_all<Format, 1>(panels + n * w.width, x, w.width, k, y + n, ldy);
  }
}

// Multiplies the last panel, which has fewer rows and is padded to sixteen.
template <class Format>
void last_panel_matmul(const Matrix& w, PackedRows x, float* y, i64 ldy, i64 begin,
                       float* scratch) {
  using Number = typename Format::Number;
  const i64 rows = w.rows - begin;
  auto* weights = reinterpret_cast<Number*>(scratch);
  constexpr i64 kColumns = Format::kColumns;
  const auto* panel = static_cast<const Number*>(w.data) + begin * w.width;
  const i64 whole = w.width / kColumns, rest = w.width % kColumns, paired = whole * kColumns;
  pad_rows(panel, whole, rows, kColumns * sizeof(Number), weights);
  pad_rows(panel + paired * rows, rest, rows, sizeof(Number), weights + paired * kPanelRows);
  float* out = scratch + w.width * kPanelRows;
  for (i64 m = 0; m < x.count; m += kInputRowsPerTile) {
    const i64 num_rows = x.count - m < kInputRowsPerTile ? x.count - m : kInputRowsPerTile;
    panel_times_block<Format>(weights, x.data + m * w.width, num_rows, w.width, out, kPanelRows);
    for (i64 i = 0; i < num_rows; i++)
      for (i64 r = 0; r < rows; r++) y[(m + i) * ldy + begin + r] = out[i * kPanelRows + r];
  }
}

inline void float_matmul(const Matrix& w, PackedRows x, float* y, i64 ldy, i64 begin, i64 end,
                         float* scratch) {
  const i64 whole = end - (end - begin) % kPanelRows;
  for_format(w, [&](auto format) {
    using Format = decltype(format);
    panels_matmul<Format>(w, x, y, ldy, begin, whole);
    if (whole < end) last_panel_matmul<Format>(w, x, y, ldy, whole, scratch);
  });
}

inline i64 float_scratch(const Matrix& w) { return kPanelRows * (w.width + kInputRowsPerTile); }

// Converts row n to row-major order.
inline void convert_float_row(const Matrix& w, i64 n, float* out) {
  const i64 begin = n / kPanelRows * kPanelRows;
  const i64 rows = w.rows - begin < kPanelRows ? w.rows - begin : kPanelRows;
  for_format(w, [&](auto format) {
    using Format = decltype(format);
    using Number = typename Format::Number;
    constexpr i64 kColumns = Format::kColumns;
    const auto* panel = static_cast<const Number*>(w.data) + begin * w.width;
    const i64 row = n - begin, paired = w.width / kColumns * kColumns;
    Number numbers[kPanelRows] = {};
    for (i64 k = 0; k < w.width; k += kPanelRows) {
      const i64 count = w.width - k < kPanelRows ? w.width - k : kPanelRows;
      for (i64 i = 0; i < count; i++) {
        const i64 at = k + i, first = at / kColumns * kColumns;
        numbers[i] = at < paired ? panel[first * rows + row * kColumns + at - first]
                                 : panel[at * rows + row];
      }
      store(out + k, format.load_column(numbers), count);
    }
  });
}

}  // namespace mlxrunner::ISA
