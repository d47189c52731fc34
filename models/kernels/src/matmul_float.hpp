// x times a plain matrix, in float32.
//
// Knows: `V`, sixteen lanes (lanes_*.hpp), strips. Must not know: which registers those are, threads.
//
// Sixteen rows of w lie as a strip, the k-th numbers of all side by side: lane r of a register is
// row r's, and meets one number of x. So memory is read from its beginning to its end, and nothing
// has to be added across lanes. Where rows are no multiple of sixteen the last strip is narrower.
//
// Each sum is made of runs: from the first number of a run to its last, and then the runs, one
// after the other. That order does not depend on how many rows of x there are.
#pragma once

#include "strips.hpp"

namespace mlxrunner::ISA {

// A run of two strips and of kBlockX rows of x stays near while others meet it.
inline constexpr i64 kRun = 192;

struct F32 {
  using Number = float;
  static V at(const float* p) { return load(p); }
};
struct Bf16 {
  using Number = std::uint16_t;
  static V at(const std::uint16_t* p) { return load_bf16(p); }
};
struct F16 {
  using Number = std::uint16_t;
  static V at(const std::uint16_t* p) { return load_f16(p); }
};

// Calls `with` of an empty format of the matrix' kind, which is not a packed one.
template <class F>
inline auto for_format(const Matrix& w, F with) {
  switch (w.weight) {
    case Weight::bf16:
      return with(Bf16{});
    case Weight::f16:
      return with(F16{});
    default:
      return with(F32{});
  }
}

// ---- x ---------------------------------------------------------------------------------------

using Quarter = float __attribute__((vector_size(16)));

// Four numbers each of four rows: rows become columns.
inline void turn_four(const float* x, i64 width, float* out, i64 rows) {
  Quarter a, b, c, d;
  __builtin_memcpy(&a, x, sizeof a);
  __builtin_memcpy(&b, x + width, sizeof b);
  __builtin_memcpy(&c, x + 2 * width, sizeof c);
  __builtin_memcpy(&d, x + 3 * width, sizeof d);
  const Quarter ab = __builtin_shufflevector(a, b, 0, 4, 1, 5),
             cd = __builtin_shufflevector(c, d, 0, 4, 1, 5),
             ba = __builtin_shufflevector(a, b, 2, 6, 3, 7),
             dc = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  const Quarter turned[] = {
      __builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
      __builtin_shufflevector(ba, dc, 0, 1, 4, 5), __builtin_shufflevector(ba, dc, 2, 3, 6, 7)};
  for (int i = 0; i < 4; i++) __builtin_memcpy(out + i * rows, turned + i, sizeof *turned);
}

// Blocks of kBlockX rows, the last of what is left: the k-th numbers of a block lie side by side.
inline void arrange_block(const float* x, i64 width, i64 rows, float* out) {
  const i64 fours = rows / 4 * 4, whole = width / 4 * 4;
  for (i64 k = 0; k < whole; k += 4)
    for (i64 m = 0; m < fours; m += 4) turn_four(x + m * width + k, width, out + k * rows + m, rows);
  for (i64 m = 0; m < rows; m++)
    for (i64 k = m < fours ? whole : 0; k < width; k++) out[k * rows + m] = x[m * width + k];
}

inline void arrange_plain(const Matrix& w, const float* x, i64 count, float* out) {
  for (i64 m = 0; m < count; m += kBlockX)
    arrange_block(x + m * w.width, w.width, count - m < kBlockX ? count - m : kBlockX,
                  out + m * w.width);
}

// ---- both ------------------------------------------------------------------------------------

// Where the sums of a run go: rows `ldy` apart.
struct Sums {
  float* y;
  i64 ldy;
  bool begin;  // of the first run; the others are added to what is there
};

// Numbers [0, count) of R strips that lie `next` apart, and of M rows of x.
template <class Format, int R, int M>
inline void run(const typename Format::Number* w, i64 next, const float* x, i64 count, Sums to) {
  V sums[R][M];
  MLXRUNNER_UNROLL
  for (int r = 0; r < R; r++)
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++) sums[r][m] = zero();
  for (i64 k = 0; k < count; k++, w += kStrip, x += M) {
    V wide[R];
    MLXRUNNER_UNROLL
    for (int r = 0; r < R; r++) wide[r] = Format::at(w + r * next);
    // of one strip each line comes from afar; of several, all rows of x have met them before
    if constexpr (R == 1) prefetch(reinterpret_cast<std::uintptr_t>(w) + kAhead);
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++) {
      const V all = set1(x[m]);
      MLXRUNNER_UNROLL
      for (int r = 0; r < R; r++) sums[r][m] = fma(wide[r], all, sums[r][m]);
    }
  }
  MLXRUNNER_UNROLL
  for (int m = 0; m < M; m++)
    MLXRUNNER_UNROLL
    for (int r = 0; r < R; r++) {
      float* at = to.y + m * to.ldy + r * kStrip;
      store(at, to.begin ? sums[r][m] : add(load(at), sums[r][m]));
    }
}

template <class Format, int M = kBlockX>
void run_of(i64 rows, const typename Format::Number* w, const float* x, i64 count, Sums to) {
  if constexpr (M > 1)
    if (rows < M) return run_of<Format, M - 1>(rows, w, x, count, to);
  run<Format, 1, M>(w, 0, x, count, to);
}

// One strip and one block of x.
template <class Format>
void across(const typename Format::Number* w, const float* x, i64 rows, i64 width, float* y,
            i64 ldy) {
  for (i64 k = 0; k < width; k += kRun)
    run_of<Format>(rows, w + k * kStrip, x + k * rows, width - k < kRun ? width - k : kRun,
                   {y, ldy, k == 0});
}

// R strips and all blocks of x, run by run.
template <class Format, int R>
void along(const typename Format::Number* w, Rows x, i64 width, i64 k, float* y, i64 ldy) {
  const i64 count = width - k < kRun ? width - k : kRun;
  for (i64 m = 0; m < x.count; m += kBlockX) {
    const float* block = x.data + m * width;
    const Sums to{y + m * ldy, ldy, k == 0};
    const i64 rows = x.count - m;
    if (rows >= kBlockX) {
      run<Format, R, kBlockX>(w + k * kStrip, width * kStrip, block + k * kBlockX, count, to);
      continue;
    }
    for (int r = 0; r < R; r++)
      run_of<Format>(rows, w + (r * width + k) * kStrip, block + k * rows, count,
                     {to.y + r * kStrip, ldy, to.begin});
  }
}

// Whole strips, from row `begin` on.
template <class Format>
void strips_product(const Matrix& w, Rows x, float* y, i64 ldy, i64 begin, i64 end) {
  const auto* strips = static_cast<const typename Format::Number*>(w.data);
  if (x.count <= kBlockX) {
    for (i64 n = begin; n < end; n += kStrip)
      across<Format>(strips + n * w.width, x.data, x.count, w.width, y + n, ldy);
    return;
  }
  constexpr int R = kStripsAbreast;
  for (i64 k = 0; k < w.width; k += kRun) {
    i64 n = begin;
    for (; n + R * kStrip <= end; n += R * kStrip)
      along<Format, R>(strips + n * w.width, x, w.width, k, y + n, ldy);
    for (; n < end; n += kStrip)
      along<Format, 1>(strips + n * w.width, x, w.width, k, y + n, ldy);
  }
}

// The last strip, of fewer rows: as one of sixteen.
template <class Format>
void narrow_product(const Matrix& w, Rows x, float* y, i64 ldy, i64 begin, float* scratch) {
  using Number = typename Format::Number;
  const i64 rows = w.rows - begin;
  auto* wide = reinterpret_cast<Number*>(scratch);
  widen_lines(static_cast<const Number*>(w.data) + begin * w.width, w.width, rows, sizeof(Number),
              wide);
  float* out = scratch + w.width * kStrip;
  for (i64 m = 0; m < x.count; m += kBlockX) {
    const i64 some = x.count - m < kBlockX ? x.count - m : kBlockX;
    across<Format>(wide, x.data + m * w.width, some, w.width, out, kStrip);
    for (i64 i = 0; i < some; i++)
      for (i64 r = 0; r < rows; r++) y[(m + i) * ldy + begin + r] = out[i * kStrip + r];
  }
}

inline void plain_product(const Matrix& w, Rows x, float* y, i64 ldy, i64 begin, i64 end,
                          float* scratch) {
  const i64 whole = end - (end - begin) % kStrip;
  for_format(w, [&](auto format) {
    using Format = decltype(format);
    strips_product<Format>(w, x, y, ldy, begin, whole);
    if (whole < end) narrow_product<Format>(w, x, y, ldy, whole, scratch);
  });
}

inline i64 plain_scratch(const Matrix& w) { return kStrip * (w.width + kBlockX); }

// Row n in its natural order.
inline void expand_plain(const Matrix& w, i64 n, float* out) {
  const i64 begin = n / kStrip * kStrip;
  const i64 rows = w.rows - begin < kStrip ? w.rows - begin : kStrip;
  for_format(w, [&](auto format) {
    using Number = typename decltype(format)::Number;
    const auto* at = static_cast<const Number*>(w.data) + begin * w.width + n - begin;
    Number line[kStrip] = {};
    for (i64 k = 0; k < w.width; k += kStrip) {
      const i64 some = w.width - k < kStrip ? w.width - k : kStrip;
      for (i64 i = 0; i < some; i++) line[i] = at[(k + i) * rows];
      store(out + k, format.at(line), some);
    }
  });
}

}  // namespace mlxrunner::ISA
