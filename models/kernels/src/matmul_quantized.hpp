// Multiplication of x by a quantized matrix, in integers.
//
// Knows: integer dot products (int16_dot.hpp, int8_vnni.hpp), panels. Must not know: threads.
//
// A weight is scale * integer + bias, with an integer of 4 or 8 bits. An element of x becomes
// integer * scale, with an integer of 24 bits and one scale per group. The products within a group
// are added exactly, and the groups are added one after the other in float32:
//
//   y += scale of w * (scale of x * sum of products) + bias of w * (scale of x * sum of x)
//
// The order within a group does not matter, and the order of groups is always the same. The
// rounding error of x is at most 2^-24 of the largest element in its group, which is the float32
// rounding error of that element. llama.cpp keeps 8 bits of x. With 16 bits, the error of the
// logits of models was up to 3e-4.
//
// Sixteen rows of w form a panel, in which the words of the sixteen rows are adjacent:
//
//   row      0    1        15   0          15
//   k      0..7 0..7 ... 0..7  8..15 ... 8..15     4 bits; with 8 bits 0..3, 4..7
//
// Scales and biases have the same layout. In a word of 8-bit integers, the integers are in order.
// In a word of 4-bit integers, the first four are the low nibbles of the bytes, and the next four
// are the high nibbles. If the number of rows is not a multiple of sixteen, the last panel is
// narrower.
#pragma once

#include "panels.hpp"

namespace mlxrunner::ISA {

inline bool is_quantized(const Matrix& w) { return w.group != 0; }

// ---- x ---------------------------------------------------------------------------------------

// A quantized row of x consists of its integers, followed by a scale and a sum for each group.
// input_floats: the size of the integers, in floats.
inline i64 input_floats(const Matrix& w) { return w.width * kInputBytes / 4; }
inline i64 quantized_row_stride(const Matrix& w) {
  const i64 size = (input_floats(w) + 2 * (w.width / w.group) + 15) / 16 * 16;
  return size % 256 ? size : size + 16;
}

// kMaxInt24: slightly less than 0x7f7f7f, the maximum of three signed bytes, because the largest
// element is also rounded. kMinScale: a group whose largest absolute value is below this limit
// counts as zero, because the reciprocal of its scale would be infinite.
inline constexpr float kMaxInt24 = 0x7f7f70, kMinScale = 0x1p-100f;

// Returns the largest absolute value, or NaN if any element is NaN or infinite.
inline float max_abs(const float* x, i64 count) {
  V largest = zero(), non_finite = zero();
  for (i64 k = 0; k < count; k += 16) {
    const V values = load(x + k);
    largest = max(max(values, sub(zero(), values)), largest);
    non_finite = fma(values, zero(), non_finite);
  }
  float sizes[16], non_finites[16];
  store(sizes, largest);
  store(non_finites, non_finite);
  float size = 0, sum = 0;
  for (int i = 0; i < 16; i++) size = sizes[i] > size ? sizes[i] : size, sum += non_finites[i];
  return size + sum;
}

// Quantizes a group. If an element is not finite, the scale is NaN.
template <int kBits>
inline void quantize_group(const float* x, i64 count, std::int8_t* out, float* scale, float* sum) {
  const float size = max_abs(x, count);
  const bool nonzero = size >= kMinScale;
  const V inverse_scale = set1(nonzero ? kMaxInt24 / size : 0);
  std::int32_t numbers[128], total = 0;
  for (i64 k = 0; k < count; k += 16)
    store(numbers + k, nonzero ? mul(load(x + k), inverse_scale) : zero());
  for (i64 k = 0; k < count; k++) total += numbers[k];
  store_input<kBits>(numbers, count, out);
  *scale = nonzero ? size / kMaxInt24 : size - size;
  *sum = *scale * static_cast<float>(total);
}

inline void quantize_input_row(const Matrix& w, const float* x, float* out) {
  auto* numbers = reinterpret_cast<std::int8_t*>(out);
  float* scale = out + input_floats(w);
  for (i64 k = 0; k < w.width; k += w.group, scale += 2) {
    std::int8_t* numbers_out = numbers + k * kInputBytes;
    if (w.format == WeightFormat::q4)
      quantize_group<4>(x + k, w.group, numbers_out, scale, scale + 1);
    else quantize_group<8>(x + k, w.group, numbers_out, scale, scale + 1);
  }
}

// ---- w ---------------------------------------------------------------------------------------

struct QuantizedPanel {
  const std::uint32_t* words;
  const void *scales, *biases;
};

inline i64 scale_bytes(ScaleType type) { return type == ScaleType::f32 ? 4 : 2; }
inline i64 words_per_row(const Matrix& w) { return w.row_bytes() / 4; }

inline QuantizedPanel get_panel(const Matrix& w, i64 n) {
  const i64 groups = n * (w.width / w.group) * scale_bytes(w.scale_type);
  return {static_cast<const std::uint32_t*>(w.data) + n * words_per_row(w),
          static_cast<const char*>(w.scales) + groups, static_cast<const char*>(w.biases) + groups};
}

// Copies the last panel, which has fewer rows, and pads it to sixteen rows.
inline QuantizedPanel pad_panel(const Matrix& w, i64 n, float* buffer) {
  const QuantizedPanel partial = get_panel(w, n);
  const i64 rows = w.rows - n, groups = w.width / w.group, size = scale_bytes(w.scale_type);
  float *scales = buffer + kPanelRows * words_per_row(w), *biases = scales + kPanelRows * groups;
  pad_rows(partial.words, words_per_row(w), rows, 4, buffer);
  pad_rows(partial.scales, groups, rows, size, scales);
  pad_rows(partial.biases, groups, rows, size, biases);
  return {reinterpret_cast<const std::uint32_t*>(buffer), scales, biases};
}

inline i64 quantized_scratch(const Matrix& w) {
  return kPanelRows * (words_per_row(w) + 2 * (w.width / w.group));
}

inline SubVector load_scales(const void* p, ScaleType type, i64 index) {
  if (type == ScaleType::f32) return load_sub(static_cast<const float*>(p) + index);
  return load_sub(static_cast<const std::uint16_t*>(p) + index, type == ScaleType::bf16);
}

// ---- x times w -------------------------------------------------------------------------------

// Multiplies the integers of one word of each row, from the J-th kNumbersPerDot on, by M rows of x.
template <int kBits, int M, int C, int J = 0>
inline void dot_word(WordVector words, const std::int8_t* x, i64 stride, SplitSum (&sums)[C][M]) {
  if constexpr (J * kNumbersPerDot * kBits < 32) {
    const WordVector numbers = select_numbers<kBits, J>(words);
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++)
      add_dot(sums[J % C][m], numbers, x + m * stride + J * kNumbersPerDot * kInputBytes);
    dot_word<kBits, M, C, J + 1>(words, x, stride, sums);
  }
}

// Computes the integer sums of one group, for kWordRows rows of a panel.
template <int kBits, int M>
inline void dot_group(i64 group, const std::uint32_t* words, const std::int8_t* x, i64 stride,
                      bool should_prefetch, SplitSum (&sums)[M]) {
  constexpr int C = num_chains(M), kPerWord = 32 / kBits;
  SplitSum chain_sums[C][M];
  MLXRUNNER_UNROLL
  for (int c = 0; c < C; c++)
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++) chain_sums[c][m] = zero_sum();
  for (i64 k = 0; k < group; k += kPerWord, words += kPanelRows, x += kPerWord * kInputBytes) {
    if (should_prefetch) prefetch(reinterpret_cast<std::uintptr_t>(words) + kPrefetchBytes);
    dot_word<kBits, M, C>(load_words(words), x, stride, chain_sums);
  }
  MLXRUNNER_UNROLL
  for (int m = 0; m < M; m++) {
    sums[m] = chain_sums[0][m];
    MLXRUNNER_UNROLL
    for (int c = 1; c < C; c++) sums[m] = add_sums(sums[m], chain_sums[c][m]);
  }
}

// Multiplies a panel by M rows of x. out: [M, kPanelRows], whose rows are `ldo` apart.
template <int kBits, int M>
inline void dot_panel(const Matrix& w, const QuantizedPanel& panel, const float* x, i64 stride,
                      float* out, i64 ldo) {
  constexpr int kPerWord = 32 / kBits;
  const i64 groups = w.width / w.group, words = w.group / kPerWord * kPanelRows;
  for (i64 first = 0; first < kPanelRows; first += kWordRows) {
    SubVector sums[M];
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++) sums[m] = broadcast(0);
    const auto* numbers = reinterpret_cast<const std::int8_t*>(x);
    const float* x_scales = x + input_floats(w);
    for (i64 g = 0; g < groups; g++, x_scales += 2) {
      SplitSum int_sums[M];
      dot_group<kBits, M>(w.group, panel.words + g * words + first,
                          numbers + g * w.group * kInputBytes, 4 * stride, first == 0, int_sums);
      const SubVector scale = load_scales(panel.scales, w.scale_type, g * kPanelRows + first),
                      bias = load_scales(panel.biases, w.scale_type, g * kPanelRows + first);
      MLXRUNNER_UNROLL
      for (int m = 0; m < M; m++) {
        SubVector total = low_part(int_sums[m]);
        add_product(total, high_part(int_sums[m]), broadcast(256));
        add_product(sums[m], scale, multiply(total, broadcast(x_scales[m * stride])));
        add_product(sums[m], bias, broadcast(x_scales[m * stride + 1]));
      }
    }
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++) store_sub(out + m * ldo + first, sums[m]);
  }
}

// Multiplies M rows of x by rows [begin, end) of w.
template <int kBits, int M>
void matmul_rows(const Matrix& w, const float* x, i64 stride, float* y, i64 ldy, i64 begin, i64 end,
                 float* scratch) {
  for (i64 n = begin; n < end; n += kPanelRows) {
    const i64 rows = end - n < kPanelRows ? end - n : kPanelRows;
    if (rows == kPanelRows) {
      dot_panel<kBits, M>(w, get_panel(w, n), x, stride, y + n, ldy);
    } else {
      float out[M * kPanelRows];
      dot_panel<kBits, M>(w, pad_panel(w, n, scratch), x, stride, out, kPanelRows);
      for (i64 m = 0; m < M; m++)
        for (i64 r = 0; r < rows; r++) y[m * ldy + n + r] = out[m * kPanelRows + r];
    }
  }
}

template <int kBits, int M = kMaxIntRows>
void matmul_rows_dispatch(const Matrix& w, PackedRows x, float* y, i64 ldy, i64 begin, i64 end,
                          float* scratch) {
  if constexpr (M > 1)
    if (x.count < M) return matmul_rows_dispatch<kBits, M - 1>(w, x, y, ldy, begin, end, scratch);
  matmul_rows<kBits, M>(w, x.data, x.stride, y, ldy, begin, end, scratch);
}

// begin must be the first row of a panel. end must be the first row of a panel or the number of
// rows.
inline void quantized_matmul(const Matrix& w, PackedRows x, float* y, i64 ldy, i64 begin, i64 end,
                             float* scratch) {
  const i64 blocks = (x.count + kMaxIntRows - 1) / kMaxIntRows;
  for (i64 i = 0, m = 0; i < blocks; i++) {
    const i64 num_rows = x.count * (i + 1) / blocks - m;
    const PackedRows x_rows{x.data + m * x.stride, num_rows, x.stride};
    float* y_rows = y + m * ldy;
    if (w.format == WeightFormat::q4)
      matmul_rows_dispatch<4>(w, x_rows, y_rows, ldy, begin, end, scratch);
    else matmul_rows_dispatch<8>(w, x_rows, y_rows, ldy, begin, end, scratch);
    m += num_rows;
  }
}

inline float get_scale(const void* p, ScaleType type, i64 index) {
  if (type == ScaleType::f32) return static_cast<const float*>(p)[index];
  float lanes[16];
  store(lanes, load(static_cast<const std::uint16_t*>(p) + index, 1, type == ScaleType::bf16));
  return lanes[0];
}

// Converts row n to row-major order.
inline void dequantize_affine_row(const Matrix& w, i64 n, float* out) {
  const i64 begin = n / kPanelRows * kPanelRows;
  const i64 rows = w.rows - begin < kPanelRows ? w.rows - begin : kPanelRows;
  const QuantizedPanel panel = get_panel(w, begin);
  const int bits = w.format == WeightFormat::q4 ? 4 : 8, per_word = 32 / bits;
  for (i64 k = 0; k < w.width; k += w.group) {
    const i64 index = k / w.group * rows + n - begin;
    const float scale = get_scale(panel.scales, w.scale_type, index),
                bias = get_scale(panel.biases, w.scale_type, index);
    for (i64 i = k; i < k + w.group; i++) {
      const std::uint32_t word = panel.words[i / per_word * rows + n - begin];
      const i64 position = i % per_word, shift = position % 4 * 8 + position / 4 * 4;
      const auto number = static_cast<float>(word >> shift & ((1u << bits) - 1));
      out[i] = __builtin_fmaf(scale, number, bias);
    }
  }
}

}  // namespace mlxrunner::ISA
