// Multiplication of x by a matrix of 4 or 8 bits by its definition (matmul_quantized.hpp), in plain
// C++. All instruction sets with a fused multiply-add must give the same bits.
//
// Knows: the definition and the order of the words in a panel. Must not know: integer dot products,
// tiles, threads.
#pragma once

#include "matmul_quantized.hpp"

namespace mlxrunner::ISA {

// Writes the integers [width] of row n.
inline void unpack_row(const Matrix& w, i64 n, std::int32_t* numbers) {
  const i64 begin = n / kPanelRows * kPanelRows;
  const i64 rows = w.rows - begin < kPanelRows ? w.rows - begin : kPanelRows;
  const std::uint32_t* words = get_panel(w, begin).words + n - begin;
  const int bits = weight_bits(w), per_word = 32 / bits;
  for (i64 k = 0; k < w.width; k += per_word, words += rows)
    for (int i = 0; i < per_word; i++)
      numbers[k + i] = static_cast<std::int32_t>(*words >> (i % 4 * 8 + i / 4 * 4) &
                                                 ((1u << bits) - 1));
}

// The sum of products, as join_sums rounds it.
inline float multiply_group(const std::int32_t* x, const std::int32_t* w, i64 count, int planes) {
  std::int32_t high = 0, low = 0;
  for (i64 k = 0; k < count; k++) {
    const std::int32_t high_x = planes == 3 ? (x[k] + 128) >> 8 : 0;
    high += high_x * w[k];
    low += (x[k] - 256 * high_x) * w[k];
  }
  const auto total = static_cast<float>(low);
  return planes == 3 ? __builtin_fmaf(static_cast<float>(high), 256, total) : total;
}

inline i64 reference_scratch(const Matrix& w, i64 count) {
  return w.width + count * (w.width + 2 * (w.width / w.group));
}

// y: [count, w.rows]. scratch: reference_scratch floats.
inline void multiply_by_reference(const Matrix& w, const float* x, i64 count, float* y,
                                  float* scratch) {
  const i64 groups = w.width / w.group;
  auto* row = reinterpret_cast<std::int32_t*>(scratch);
  std::int32_t* numbers = row + w.width;
  float* scales = scratch + w.width + count * w.width;
  with_precision(w, [&]<int, int kPlanes>() {
    for (i64 i = 0; i < count * groups; i++)
      quantize_group<kPlanes>(x + i * w.group, w.group, scales + 2 * i, scales + 2 * i + 1,
                              [&](const std::int32_t* of_group) {
                                __builtin_memcpy(numbers + i * w.group, of_group,
                                                 static_cast<std::size_t>(4 * w.group));
                              });
  });
  for (i64 n = 0; n < w.rows; n++) {
    unpack_row(w, n, row);
    const i64 begin = n / kPanelRows * kPanelRows;
    const i64 rows = w.rows - begin < kPanelRows ? w.rows - begin : kPanelRows;
    const QuantizedPanel panel = get_panel(w, begin);
    for (i64 m = 0; m < count; m++) {
      float sum = 0;
      for (i64 g = 0; g < groups; g++) {
        const i64 i = m * groups + g, at = g * rows + n - begin;
        const float total =
            multiply_group(numbers + i * w.group, row + g * w.group, w.group, w.planes);
        sum = __builtin_fmaf(get_scale(panel.scales, w.scale_type, at), total * scales[2 * i], sum);
        sum = __builtin_fmaf(get_scale(panel.biases, w.scale_type, at), scales[2 * i + 1], sum);
      }
      y[m * w.rows + n] = sum;
    }
  }
}

}  // namespace mlxrunner::ISA
