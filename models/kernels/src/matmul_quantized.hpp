// x times a packed matrix, in whole numbers.
//
// Knows: how whole numbers meet (whole_*.hpp), strips. Must not know: threads.
//
// A weight is scale * number + bias, with a number of 4 or 8 bits; a number of x becomes
// scale * number with one of 24 bits, the same scale for all of a group. The numbers of a group are
// multiplied and added up exactly, and groups one after the other in float32:
//
//   y += scale of w * (scale of x * sum of products) + bias of w * (scale of x * sum of x)
//
// So the order in a group cannot matter, and the order of groups is always the same. Of x at most
// 2^-24 of the largest in its group is rounded away, as much as float32 rounds away of that one.
// (llama.cpp keeps 8 bits of x. With 16, models' logits were off by up to 3e-4.)
//
// Sixteen rows of w lie as a strip, words of the sixteen rows side by side:
//
//   row      0    1        15   0          15
//   k      0..7 0..7 ... 0..7  8..15 ... 8..15     4 bits; with 8 bits 0..3, 4..7
//
// and so do scales and biases. In a word of 8 bits, numbers lie as they follow each other; in one of
// 4 bits the first four are the lower halves of its bytes, and the next four the upper. Where rows
// are no multiple of sixteen the last strip is narrower.
#pragma once

#include "strips.hpp"

namespace mlxrunner::ISA {

inline bool is_packed(const Matrix& w) { return w.group != 0; }

// ---- x ---------------------------------------------------------------------------------------

// A row of x: its whole numbers, then for each group a scale and the sum. How many floats.
inline i64 numbers_of(const Matrix& w) { return w.width * kNumberBytes / 4; }
inline i64 whole_stride(const Matrix& w) {
  const i64 size = (numbers_of(w) + 2 * (w.width / w.group) + 15) / 16 * 16;
  return size % 256 ? size : size + 16;
}

// A little less than 0x7f7f7f, the most that three signed bytes hold: the largest is rounded, too.
// And below what size all numbers of a group count as zero: the reciprocal of their scale would be
// infinite.
inline constexpr float kTop = 0x7f7f70, kLeast = 0x1p-100f;

// Of all sizes; not a number where one is not, or is infinite.
inline float largest(const float* x, i64 count) {
  V most = zero(), odd = zero();
  for (i64 k = 0; k < count; k += 16) {
    const V some = load(x + k);
    most = max(max(some, sub(zero(), some)), most);
    odd = fma(some, zero(), odd);
  }
  float sizes[16], odds[16];
  store(sizes, most);
  store(odds, odd);
  float size = 0, sum = 0;
  for (int i = 0; i < 16; i++) size = sizes[i] > size ? sizes[i] : size, sum += odds[i];
  return size + sum;
}

// A group. Where it holds what is no finite number, its scale is none either.
template <int kBits>
inline void to_whole(const float* x, i64 count, std::int8_t* out, float* scale, float* sum) {
  const float size = largest(x, count);
  const bool counts = size >= kLeast;
  const V up = set1(counts ? kTop / size : 0);
  std::int32_t numbers[128], total = 0;
  for (i64 k = 0; k < count; k += 16) store(numbers + k, counts ? mul(load(x + k), up) : zero());
  for (i64 k = 0; k < count; k++) total += numbers[k];
  put<kBits>(numbers, count, out);
  *scale = counts ? size / kTop : size - size;
  *sum = *scale * static_cast<float>(total);
}

inline void arrange_whole(const Matrix& w, const float* x, float* out) {
  auto* numbers = reinterpret_cast<std::int8_t*>(out);
  float* of = out + numbers_of(w);
  for (i64 k = 0; k < w.width; k += w.group, of += 2) {
    std::int8_t* into = numbers + k * kNumberBytes;
    if (w.weight == Weight::q4) to_whole<4>(x + k, w.group, into, of, of + 1);
    else to_whole<8>(x + k, w.group, into, of, of + 1);
  }
}

// ---- w ---------------------------------------------------------------------------------------

struct Strip {
  const std::uint32_t* words;
  const void *scales, *biases;
};

inline i64 size_of(Float type) { return type == Float::f32 ? 4 : 2; }
inline i64 words_of(const Matrix& w) { return w.row_bytes() / 4; }

inline Strip strip_at(const Matrix& w, i64 n) {
  const i64 groups = n * (w.width / w.group) * size_of(w.scale);
  return {static_cast<const std::uint32_t*>(w.data) + n * words_of(w),
          static_cast<const char*>(w.scales) + groups, static_cast<const char*>(w.biases) + groups};
}

// The last strip, of fewer rows, as one of sixteen.
inline Strip whole_strip(const Matrix& w, i64 n, float* room) {
  const Strip narrow = strip_at(w, n);
  const i64 rows = w.rows - n, groups = w.width / w.group, size = size_of(w.scale);
  float *scales = room + kStrip * words_of(w), *biases = scales + kStrip * groups;
  widen_lines(narrow.words, words_of(w), rows, 4, room);
  widen_lines(narrow.scales, groups, rows, size, scales);
  widen_lines(narrow.biases, groups, rows, size, biases);
  return {reinterpret_cast<const std::uint32_t*>(room), scales, biases};
}

inline i64 packed_scratch(const Matrix& w) {
  return kStrip * (words_of(w) + 2 * (w.width / w.group));
}

inline Part load_scales(const void* p, Float type, i64 at) {
  if (type == Float::f32) return load_part(static_cast<const float*>(p) + at);
  return load_part(static_cast<const std::uint16_t*>(p) + at, type == Float::bf16);
}

// ---- both ------------------------------------------------------------------------------------

// The numbers of one word of each row, from the J-th share on, and of M rows of x.
template <int kBits, int M, int C, int J = 0>
inline void meet(Words words, const std::int8_t* x, i64 stride, Whole (&sums)[C][M]) {
  if constexpr (J * kShare * kBits < 32) {
    const Words some = share<kBits, J>(words);
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++)
      add_share(sums[J % C][m], some, x + m * stride + J * kShare * kNumberBytes);
    meet<kBits, M, C, J + 1>(words, x, stride, sums);
  }
}

// One group: what its numbers make, for rows of the strip from `first` on.
template <int kBits, int M>
inline void group_of(i64 group, const std::uint32_t* words, const std::int8_t* x, i64 stride,
                     bool ahead, Whole (&sums)[M]) {
  constexpr int C = chains(M), kPerWord = 32 / kBits;
  Whole apart[C][M];
  MLXRUNNER_UNROLL
  for (int c = 0; c < C; c++)
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++) apart[c][m] = nothing();
  for (i64 k = 0; k < group; k += kPerWord, words += kStrip, x += kPerWord * kNumberBytes) {
    if (ahead) prefetch(reinterpret_cast<std::uintptr_t>(words) + kAhead);
    meet<kBits, M, C>(load_words(words), x, stride, apart);
  }
  MLXRUNNER_UNROLL
  for (int m = 0; m < M; m++) {
    sums[m] = apart[0][m];
    MLXRUNNER_UNROLL
    for (int c = 1; c < C; c++) sums[m] = both(sums[m], apart[c][m]);
  }
}

// A strip and M rows of x -> out, [M, kStrip] that lie `ldo` apart.
template <int kBits, int M>
inline void across_strip(const Matrix& w, const Strip& strip, const float* x, i64 stride,
                         float* out, i64 ldo) {
  constexpr int kPerWord = 32 / kBits;
  const i64 groups = w.width / w.group, words = w.group / kPerWord * kStrip;
  for (i64 first = 0; first < kStrip; first += kAbreast) {
    Part sums[M];
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++) sums[m] = all_of(0);
    const auto* numbers = reinterpret_cast<const std::int8_t*>(x);
    const float* of_x = x + numbers_of(w);
    for (i64 g = 0; g < groups; g++, of_x += 2) {
      Whole whole[M];
      group_of<kBits, M>(w.group, strip.words + g * words + first,
                         numbers + g * w.group * kNumberBytes, 4 * stride, first == 0, whole);
      const Part scale = load_scales(strip.scales, w.scale, g * kStrip + first),
                 bias = load_scales(strip.biases, w.scale, g * kStrip + first);
      MLXRUNNER_UNROLL
      for (int m = 0; m < M; m++) {
        Part total = low_of(whole[m]);
        add_product(total, high_of(whole[m]), all_of(256));
        add_product(sums[m], scale, times(total, all_of(of_x[m * stride])));
        add_product(sums[m], bias, all_of(of_x[m * stride + 1]));
      }
    }
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++) store_part(out + m * ldo + first, sums[m]);
  }
}

// M rows of x and rows [begin, end) of w.
template <int kBits, int M>
void whole_rows(const Matrix& w, const float* x, i64 stride, float* y, i64 ldy, i64 begin, i64 end,
                float* scratch) {
  for (i64 n = begin; n < end; n += kStrip) {
    const i64 rows = end - n < kStrip ? end - n : kStrip;
    if (rows == kStrip) {
      across_strip<kBits, M>(w, strip_at(w, n), x, stride, y + n, ldy);
    } else {
      float out[M * kStrip];
      across_strip<kBits, M>(w, whole_strip(w, n, scratch), x, stride, out, kStrip);
      for (i64 m = 0; m < M; m++)
        for (i64 r = 0; r < rows; r++) y[m * ldy + n + r] = out[m * kStrip + r];
    }
  }
}

template <int kBits, int M = kMostWhole>
void whole_of(const Matrix& w, Rows x, float* y, i64 ldy, i64 begin, i64 end, float* scratch) {
  if constexpr (M > 1)
    if (x.count < M) return whole_of<kBits, M - 1>(w, x, y, ldy, begin, end, scratch);
  whole_rows<kBits, M>(w, x.data, x.stride, y, ldy, begin, end, scratch);
}

// begin: where a strip does. end: likewise, or behind the last row.
inline void packed_product(const Matrix& w, Rows x, float* y, i64 ldy, i64 begin, i64 end,
                           float* scratch) {
  const i64 blocks = (x.count + kMostWhole - 1) / kMostWhole;
  for (i64 i = 0, m = 0; i < blocks; i++) {
    const i64 some = x.count * (i + 1) / blocks - m;
    const Rows of_x{x.data + m * x.stride, some, x.stride};
    float* of_y = y + m * ldy;
    if (w.weight == Weight::q4) whole_of<4>(w, of_x, of_y, ldy, begin, end, scratch);
    else whole_of<8>(w, of_x, of_y, ldy, begin, end, scratch);
    m += some;
  }
}

inline float scale_at(const void* p, Float type, i64 at) {
  if (type == Float::f32) return static_cast<const float*>(p)[at];
  float all[16];
  store(all, load(static_cast<const std::uint16_t*>(p) + at, 1, type == Float::bf16));
  return all[0];
}

// Row n in its natural order.
inline void expand_packed(const Matrix& w, i64 n, float* out) {
  const i64 begin = n / kStrip * kStrip;
  const i64 rows = w.rows - begin < kStrip ? w.rows - begin : kStrip;
  const Strip strip = strip_at(w, begin);
  const int bits = w.weight == Weight::q4 ? 4 : 8, per_word = 32 / bits;
  for (i64 k = 0; k < w.width; k += w.group) {
    const i64 at = k / w.group * rows + n - begin;
    const float scale = scale_at(strip.scales, w.scale, at),
                bias = scale_at(strip.biases, w.scale, at);
    for (i64 i = k; i < k + w.group; i++) {
      const std::uint32_t word = strip.words[i / per_word * rows + n - begin];
      const i64 place = i % per_word, shift = place % 4 * 8 + place / 4 * 4;
      const auto number = static_cast<float>(word >> shift & ((1u << bits) - 1));
      out[i] = __builtin_fmaf(scale, number, bias);
    }
  }
}

}  // namespace mlxrunner::ISA
