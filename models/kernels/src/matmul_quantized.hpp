// Multiplication of x by a quantized matrix, in integers.
//
// Knows: integer dot products (int16_dot.hpp, int8_vnni.hpp, int8_neon.hpp), panels. Must not know:
// threads.
//
// A weight is scale * integer + bias, with an integer of 4 or 8 bits. An element of x becomes
// integer * scale, with an integer of 24, 16 or 8 bits (`Matrix::planes` bytes) and one scale per
// group. The products within a group are added exactly, and the groups are added one after the
// other in float32:
//
//   y += scale of w * (scale of x * sum of products) + bias of w * (scale of x * sum of x)
//
// The order within a group does not matter, and the order of groups is always the same. With 24
// bits, the rounding error of x is at most 2^-24 of the largest element in its group, which is the
// float32 rounding error of that element. llama.cpp keeps 8 bits of x. `make bench
// ARGS=activations` measures the effect of fewer bits.
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

#include "block_formats.hpp"
#include "panels.hpp"

namespace mlxrunner::ISA {

inline bool is_quantized(const Matrix& w) { return w.group != 0; }
// The bits of the integers that are multiplied. Those of block types may be stored in fewer bits.
inline int weight_bits(const Matrix& w) {
  if (!has_blocks(w.format)) return w.format == WeightFormat::q4 ? 4 : 8;
  const BlockFormat f = block_format(w.format);
  return f.low_bits == 4 && f.high_bits == 0 && !f.table ? 4 : 8;
}

// ---- x ---------------------------------------------------------------------------------------

// A quantized row of x consists of its integers, followed by a scale and a sum for each group.
// group_bytes: the size of the integers of a group. input_floats: of all integers, in floats.
inline i64 group_bytes(i64 group, int bits, int planes) {
  return kHeaderBytes + group * input_bytes(bits, planes);
}
inline i64 input_floats(const Matrix& w) {
  return w.width / w.group * group_bytes(w.group, weight_bits(w), w.planes) / 4;
}
inline i64 quantized_row_stride(const Matrix& w) {
  const i64 size = (input_floats(w) + 2 * (w.width / w.group) + 15) / 16 * 16;
  return (size % 256 ? size : size + 16) + kRowSkew;
}

// The maximum of an integer of x. With three signed bytes, it is slightly less than 0x7f7f7f,
// because the largest element is also rounded.
constexpr float max_input(int planes) {
  return planes == 3 ? 0x7f7f70 : planes == 2 ? 0x7f7f : 0x7f;
}
// A group whose largest absolute value is below this limit counts as zero, because the reciprocal
// of its scale would be infinite.
inline constexpr float kMinScale = 0x1p-100f;

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

// Quantizes a group and passes the integers to `store_numbers`. If an element is not finite, the
// scale is NaN.
template <int kPlanes, class F>
inline void quantize_group(const float* x, i64 count, float* scale, float* sum, F store_numbers) {
  constexpr float kMaxInput = max_input(kPlanes);
  const float size = max_abs(x, count);
  const bool nonzero = size >= kMinScale;
  const V inverse_scale = set1(nonzero ? kMaxInput / size : 0);
  std::int32_t numbers[kChunkNumbers], total = 0;
  for (i64 k = 0; k < count; k += 16)
    store(numbers + k, nonzero ? mul(load(x + k), inverse_scale) : zero());
  for (i64 k = 0; k < count; k++) total += numbers[k];
  store_numbers(numbers);
  *scale = nonzero ? size / kMaxInput : size - size;
  *sum = *scale * static_cast<float>(total);
}

// The same with one scale per chunk, for matmul_block_integers.hpp. The sum of a group is a 32-bit
// integer, multiplied by the offset of the codes if there are no minima.
template <int kBits, int kPlanes>
inline void quantize_input_chunks(const Matrix& w, const float* x, float* out, float* scale) {
  auto* numbers_out = reinterpret_cast<std::int8_t*>(out);
  const i64 size = group_bytes(w.group, kBits, kPlanes);
  const int offset = static_cast<int>(block_format(w.format).offset), factor = offset ? offset : 1;
  for (i64 k = 0; k < w.width; k += kChunkNumbers) {
    float of_chunk, unused;
    quantize_group<kPlanes>(x + k, kChunkNumbers, &of_chunk, &unused, [&](std::int32_t* numbers) {
      for (i64 i = 0; i < kChunkNumbers; i += w.group, scale += 2, numbers_out += size) {
        store_input<kBits, kPlanes>(numbers + i, w.group, numbers_out);
        std::int32_t sum = 0;
        for (i64 j = 0; j < w.group; j++) sum += numbers[i + j];
        sum *= factor;
        __builtin_memcpy(scale + 1, &sum, sizeof sum);
      }
    });
    for (i64 g = 1; g <= kChunkNumbers / w.group; g++) scale[-2 * g] = of_chunk;
  }
}

template <int kBits, int kPlanes>
inline void quantize_input_row(const Matrix& w, const float* x, float* out, float* scale) {
  if constexpr (kPlanes == 2)
    if (has_blocks(w.format) && has_integer_scales(block_format(w.format), kPlanes))
      return quantize_input_chunks<kBits, kPlanes>(w, x, out, scale);
  auto* numbers_out = reinterpret_cast<std::int8_t*>(out);
  const i64 size = group_bytes(w.group, kBits, kPlanes);
  for (i64 k = 0; k < w.width; k += w.group, scale += 2, numbers_out += size)
    quantize_group<kPlanes>(x + k, w.group, scale, scale + 1, [&](const std::int32_t* numbers) {
      store_input<kBits, kPlanes>(numbers, w.group, numbers_out);
    });
}

// Calls function.operator()<bits, planes>() with the constants of the matrix.
template <class F>
inline void with_precision(const Matrix& w, F function) {
  const auto with_planes = [&]<int kPlanes>() {
    if (weight_bits(w) == 4) function.template operator()<4, kPlanes>();
    else function.template operator()<8, kPlanes>();
  };
  if (w.planes == 3) with_planes.template operator()<3>();
  else if (w.planes == 2) with_planes.template operator()<2>();
  else with_planes.template operator()<1>();
}

inline void quantize_input(const Matrix& w, const float* x, i64 count, float* out, i64 stride) {
  with_precision(w, [&]<int kBits, int kPlanes>() {
    for (i64 m = 0; m < count; m++, out += stride)
      quantize_input_row<kBits, kPlanes>(w, x + m * w.width, out, out + input_floats(w));
  });
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

// The maximum number of rows of x whose sums fit into the registers. kMaxIntRows is the number for
// three planes.
constexpr int max_rows(int planes) {
  return kMaxIntRows * (num_sums(3) + 1) / (num_sums(planes) + 1);
}

// The number of independent accumulators per sum.
constexpr int num_chains(int rows) { return rows <= 2 ? 2 : 1; }

// Otherwise GCC 12 for ARM would not inline all of these functions, and accumulators would be in
// memory.
#if defined(__aarch64__)
#define MLXRUNNER_DOT_INLINE [[gnu::always_inline]] inline
#else
#define MLXRUNNER_DOT_INLINE inline
#endif

// The accumulators of one row of x.
template <int kPlanes>
struct Sums {
  IntVector sums[num_sums(kPlanes)];
};

// It is always inlined, like the functions that it calls. Otherwise GCC 12 inlines some of them late or
// not at all, depending on the rest of the file, and accumulators are in memory.
template <int J, int kRow = 0, class Numbers, int kPlanes, int M>
[[gnu::always_inline]] inline void dot_rows(Numbers numbers, const InputRows<M>& x,
                                   Sums<kPlanes> (&sums)[M]) {
  if constexpr (kRow < M) {
    add_dot<kRow, J>(sums[kRow].sums, numbers, x);
    dot_rows<J, kRow + 1>(numbers, x, sums);
  }
}

// Multiplies kStep integers of each row, from the J-th kNumbersPerDot on, by M rows of x.
template <int kBits, int kPlanes, int kStep, int J = 0, int C, int M>
[[gnu::always_inline]] inline void dot_step(const std::uint32_t* words, const InputRows<M>& x,
                                   Sums<kPlanes> (&chains)[C][M]) {
  if constexpr (has_byte_step(kBits, kPlanes)) {
    add_byte_step<kPlanes>(words, x, chains[0]);
  } else if constexpr (J * kNumbersPerDot < kStep) {
    dot_rows<J>(select_numbers<kBits, J>(words), x, chains[J % C]);
    dot_step<kBits, kPlanes, kStep, J + 1>(words, x, chains);
  }
}

// Computes the integer sums of one group, for kWordRows rows of a panel. kStep: integers of a row
// per iteration.
template <int kBits, int kPlanes, int M, int kStep = step_numbers(kBits)>
MLXRUNNER_DOT_INLINE void dot_group(i64 group, const std::uint32_t* words, const std::int8_t* x,
                                     i64 stride, bool should_prefetch, Sums<kPlanes> (&out)[M]) {
  constexpr int C = num_chains(M), kSums = num_sums(kPlanes);
  constexpr int kStepWords = kStep * kBits / 32;
  constexpr i64 kStepBytes = kStep * input_bytes(kBits, kPlanes);
  Sums<kPlanes> chains[C][M];
  MLXRUNNER_UNROLL
  for (int i = 0; i < C * M * kSums; i++)
    chains[i / (M * kSums)][i / kSums % M].sums[i % kSums] = zero_int();
  InputRows<M> rows{x, stride};
  if constexpr (kHeaderBytes != 0) rows.template load_first_sums<kBits, kPlanes>(chains[0]);
  for (i64 k = 0; k < group; k += kStep, words += kStepWords * kPanelRows) {
    if (should_prefetch) {
      MLXRUNNER_UNROLL
      for (int i = 0; i < kStepWords; i++)
        prefetch(reinterpret_cast<std::uintptr_t>(words + i * kPanelRows) + kPrefetchBytes);
    }
    dot_step<kBits, kPlanes, kStep>(words, rows, chains);
    rows.advance(kStepBytes);
  }
  MLXRUNNER_UNROLL
  for (int i = 0; i < M * kSums; i++) {
    IntVector& sum = out[i / kSums].sums[i % kSums];
    sum = chains[0][i / kSums].sums[i % kSums];
    MLXRUNNER_UNROLL
    for (int c = 1; c < C; c++) sum = add_int(sum, chains[c][i / kSums].sums[i % kSums]);
  }
}

// The same for groups that may be shorter than an iteration.
template <int kBits, int kPlanes, int M>
MLXRUNNER_DOT_INLINE void dot_any_group(i64 group, const std::uint32_t* words, const std::int8_t* x,
                                        i64 stride, bool should_prefetch, Sums<kPlanes> (&out)[M]) {
  constexpr int kMinGroup = 16;
  if constexpr (kBits == 8 && step_numbers(8) > kMinGroup)
    if (group == kMinGroup)
      return dot_group<kBits, kPlanes, M, kMinGroup>(group, words, x, stride,
                                                            should_prefetch, out);
  dot_group<kBits, kPlanes, M>(group, words, x, stride, should_prefetch, out);
}

// Multiplies a panel by M rows of x. out: [M, kPanelRows], whose rows are `ldo` apart. It is not
// inlined, because GCC 12 would then keep accumulators in memory.
template <int kBits, int kPlanes, int M>
[[gnu::noinline]] void dot_panel(const Matrix& w, const QuantizedPanel& panel, const float* x,
                                 i64 stride, float* out, i64 ldo) {
  constexpr int kPerWord = 32 / kBits;
  const i64 groups = w.width / w.group, words = w.group / kPerWord * kPanelRows;
  for (i64 first = 0; first < kPanelRows; first += kWordRows) {
    SubVector sums[M];
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++) sums[m] = broadcast(0);
    const auto* numbers = reinterpret_cast<const std::int8_t*>(x);
    const float* x_scales = x + input_floats(w);
    for (i64 g = 0; g < groups; g++, x_scales += 2) {
      Sums<kPlanes> int_sums[M];
      dot_any_group<kBits, kPlanes, M>(w.group, panel.words + g * words + first,
                                              numbers + g * group_bytes(w.group, kBits, kPlanes),
                                              4 * stride, first == 0, int_sums);
      const SubVector scale = load_scales(panel.scales, w.scale_type, g * kPanelRows + first),
                      bias = load_scales(panel.biases, w.scale_type, g * kPanelRows + first);
      MLXRUNNER_UNROLL
      for (int m = 0; m < M; m++) {
        const SubVector total = join_sums(int_sums[m].sums);
        add_product(sums[m], scale, multiply(total, broadcast(x_scales[m * stride])));
        add_product(sums[m], bias, broadcast(x_scales[m * stride + 1]));
      }
    }
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++) store_sub(out + m * ldo + first, sums[m]);
  }
}

// Multiplies M rows of x by rows [begin, end) of w.
template <int kBits, int kPlanes, int M>
void matmul_rows(const Matrix& w, const float* x, i64 stride, float* y, i64 ldy, i64 begin, i64 end,
                 float* scratch) {
  for (i64 n = begin; n < end; n += kPanelRows) {
    const i64 rows = end - n < kPanelRows ? end - n : kPanelRows;
    if (rows == kPanelRows) {
      dot_panel<kBits, kPlanes, M>(w, get_panel(w, n), x, stride, y + n, ldy);
    } else {
      float out[M * kPanelRows];
      dot_panel<kBits, kPlanes, M>(w, pad_panel(w, n, scratch), x, stride, out, kPanelRows);
      for (i64 m = 0; m < M; m++)
        for (i64 r = 0; r < rows; r++) y[m * ldy + n + r] = out[m * kPanelRows + r];
    }
  }
}

template <int kBits, int kPlanes, int M = max_rows(kPlanes)>
void matmul_rows_dispatch(const Matrix& w, PackedRows x, float* y, i64 ldy, i64 begin, i64 end,
                          float* scratch) {
  if constexpr (M > 1)
    if (x.count < M)
      return matmul_rows_dispatch<kBits, kPlanes, M - 1>(w, x, y, ldy, begin, end, scratch);
  matmul_rows<kBits, kPlanes, M>(w, x.data, x.stride, y, ldy, begin, end, scratch);
}

// begin must be the first row of a panel. end must be the first row of a panel or the number of
// rows.
inline void quantized_matmul(const Matrix& w, PackedRows x, float* y, i64 ldy, i64 begin, i64 end,
                             float* scratch) {
  with_precision(w, [&]<int kBits, int kPlanes>() {
    const i64 blocks = (x.count + max_rows(kPlanes) - 1) / max_rows(kPlanes);
    for (i64 i = 0, m = 0; i < blocks; i++) {
      const i64 num_rows = x.count * (i + 1) / blocks - m;
      matmul_rows_dispatch<kBits, kPlanes>(w, {x.data + m * x.stride, num_rows, x.stride},
                                                  y + m * ldy, ldy, begin, end, scratch);
      m += num_rows;
    }
  });
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
  const int bits = weight_bits(w), per_word = 32 / bits;
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
