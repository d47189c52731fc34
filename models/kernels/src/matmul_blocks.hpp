// Multiplication of x by a matrix with a block type of GGUF (block_formats.hpp).
//
// Knows: panels of blocks, the products of matmul_quantized.hpp. Must not know: threads.
//
// The K types multiply by their small scales as integers, if x has two bytes per number
// (matmul_block_integers.hpp). Otherwise, the codes of a chunk become integers of 4 or 8 bits, and its
// scales become float32. Then the products are the same as in matmul_quantized.hpp, in the same
// order: for a few rows of x chunk by chunk, so that the integers stay in the first cache, and for
// many rows a whole panel at a time. Scales and biases are exact in float32: their factors have at
// most 11 and 8 bits.
#pragma once

#include "matmul_block_integers.hpp"

namespace mlxrunner::ISA {

// Codes [numbers / 4] words and scales and biases [groups], each with sixteen rows adjacent.
struct ExpandedChunk {
  const std::uint32_t* words;
  const float *scales, *biases;
};

// Memory for a chunk.
struct ChunkBuffer {
  alignas(64) std::uint32_t words[kChunkNumbers / 4 * kPanelRows];
  alignas(64) float scales[kMaxChunkGroups * kPanelRows], biases[kMaxChunkGroups * kPanelRows];
};

// Converts the scales of a chunk to scales and biases [groups, kPanelRows].
inline void expand_scales(const BlockFormat& f, const char* chunk, i64 numbers, float* scales,
                          float* biases) {
  const ChunkParts parts = chunk_parts(f, numbers);
  const char* small = chunk + parts.codes * kPanelRows;
  const auto* supers = reinterpret_cast<const std::uint16_t*>(small + parts.scales * kPanelRows);
  const auto* halves = reinterpret_cast<const std::uint16_t*>(small);
  const i64 count = numbers / f.group * kPanelRows;  // of scales
  const SubVector offset = broadcast(f.offset);
  const auto store_both = [&](i64 i, SubVector scale, SubVector bias) {
    store_sub(scales + i, scale);
    store_sub(biases + i, bias);
  };
  // calls function(d, i): d are the scales of kWordRows rows, i is the index of each of their parts
  const auto for_rows_of_d = [&](auto function) {
    for (i64 n = 0; n < kPanelRows; n += kWordRows) {
      const SubVector d = load_sub(supers + n, false);
      for (i64 i = n; i < count; i += kPanelRows) function(d, i);
    }
  };
  const auto get_negative_minimum = [&](i64 i) {
    return multiply(load_sub(supers + kPanelRows + i % kPanelRows, false), broadcast(-1));
  };
  switch (f.scales) {
    case BlockScales::f16:
      for (i64 i = 0; i < count; i += kWordRows) {
        const SubVector scale = load_sub(halves + i, false);
        store_both(i, scale, multiply(offset, scale));
      }
      break;
    case BlockScales::f16_pair:
      for (i64 i = 0; i < count; i += kWordRows)
        store_both(i, load_sub(halves + i, false), load_sub(halves + count + i, false));
      break;
    case BlockScales::e8m0:  // half of 2^(e - 127), because the integers are doubled
      for (i64 i = 0; i < count; i++) {
        const std::uint32_t e = static_cast<std::uint8_t>(small[i]);
        const std::uint32_t bits = e < 2 ? 0x200000u << e : (e - 1) << 23;
        __builtin_memcpy(scales + i, &bits, 4);
        biases[i] = f.offset * scales[i];
      }
      break;
    case BlockScales::k_pair:
      for_rows_of_d([&](SubVector d, i64 i) {
        store_both(i, multiply(d, load_bytes<false>(small + i)),
                   multiply(get_negative_minimum(i),
                            load_bytes<false>(small + count + i)));
      });
      break;
    case BlockScales::k_nibbles: {
      char nibbles[2 * kMaxChunkGroups * kPanelRows];
      split_nibbles(small, count, nibbles);
      for_rows_of_d([&](SubVector d, i64 i) {
        store_both(i, multiply(d, load_bytes<false>(nibbles + i)),
                   multiply(get_negative_minimum(i), load_bytes<false>(nibbles + count + i)));
      });
      break;
    }
    case BlockScales::k_signed:
      for_rows_of_d([&](SubVector d, i64 i) {
        const SubVector scale = multiply(d, load_bytes<true>(small + i));
        store_both(i, scale, multiply(offset, scale));
      });
      break;
  }
}

// It is not inlined, because each of the many kernels below would contain a copy.
// only_scales: whether the codes are left as they are.
[[gnu::noinline]] inline ExpandedChunk expand_chunk(const BlockFormat& f, const char* chunk,
                                                    i64 numbers, bool only_scales,
                                                    ChunkBuffer& buffer) {
  expand_scales(f, chunk, numbers, buffer.scales, buffer.biases);
  const auto* words = reinterpret_cast<const std::uint32_t*>(chunk);
  if (!only_scales) words = expand_codes(f, chunk, numbers, buffer.words);
  return {words, buffer.scales, buffer.biases};
}

// Multiplies a panel by M rows of x, chunk by chunk. kBits: of the integers, or those of the codes
// if the instruction set multiplies them without expanding them (fuses_codes). out: [M, kPanelRows], whose rows are `ldo`
// apart. Not inlined for the same reason as dot_panel.
template <int kBits, int kPlanes, int M>
[[gnu::noinline]] void dot_block_panel(const Matrix& w, const char* panel, const float* x,
                                       i64 stride, float* out, i64 ldo) {
  const BlockFormat f = block_format(w.format);
  constexpr bool kFused = fuses_codes(kBits);
  const bool in_place = kFused || is_in_place(f);
  const i64 words = w.group * kBits / 32 * kPanelRows;
  const i64 x_bytes = group_bytes(w.group, kBits, kPlanes);
  const auto* numbers = reinterpret_cast<const std::int8_t*>(x);
  const float* x_scales = x + input_floats(w);
  ChunkBuffer buffer;
  alignas(64) float totals[M * kPanelRows] = {};
  for (i64 k = 0; k < w.width; k += kChunkNumbers) {
    const i64 count = w.width - k < kChunkNumbers ? w.width - k : kChunkNumbers;
    const ExpandedChunk chunk = expand_chunk(f, panel, count, kFused, buffer);
    panel += chunk_parts(f, count).bytes() * kPanelRows;
    const i64 groups = count / w.group;
    for (i64 first = 0; first < kPanelRows; first += kWordRows) {
      SubVector sums[M];
      MLXRUNNER_UNROLL
      for (int m = 0; m < M; m++) sums[m] = load_sub(totals + m * kPanelRows + first);
      for (i64 g = 0; g < groups; g++) {
        Sums<kPlanes> int_sums[M];
        dot_any_group<kBits, kPlanes, M>(
            w.group, chunk.words + g * words + first, numbers + g * x_bytes, 4 * stride,
            in_place && first == 0, int_sums);
        const SubVector scale = load_sub(chunk.scales + g * kPanelRows + first),
                        bias = load_sub(chunk.biases + g * kPanelRows + first);
        MLXRUNNER_UNROLL
        for (int m = 0; m < M; m++) {
          const float* x_scale = x_scales + m * stride + 2 * g;
          const SubVector total = join_sums(int_sums[m].sums);
          add_product(sums[m], scale, multiply(total, broadcast(x_scale[0])));
          add_product(sums[m], bias, broadcast(x_scale[1]));
        }
      }
      MLXRUNNER_UNROLL
      for (int m = 0; m < M; m++) store_sub(totals + m * kPanelRows + first, sums[m]);
    }
    numbers += groups * x_bytes, x_scales += 2 * groups;
  }
  for (i64 m = 0; m < M; m++)
    __builtin_memcpy(out + m * ldo, totals + m * kPanelRows, kPanelRows * sizeof(float));
}

// The same for any number of rows up to M.
template <int kBits, int kPlanes, int M>
void dot_few_rows(const Matrix& w, const char* panel, PackedRows x, float* out, i64 ldo) {
  if constexpr (M > 1)
    if (x.count < M) return dot_few_rows<kBits, kPlanes, M - 1>(w, panel, x, out, ldo);
  dot_block_panel<kBits, kPlanes, M>(w, panel, x.data, x.stride, out, ldo);
}

// The same if the instruction set supports it. With two planes, codes of 6 bits have integer scales.
template <int kBits, int kPlanes, int M>
void dot_fused(const Matrix& w, const char* panel, PackedRows x, float* out, i64 ldo) {
  if constexpr (fuses_codes(kBits) && (kBits != 6 || kPlanes != 2))
    dot_few_rows<kBits, kPlanes, M>(w, panel, x, out, ldo);
}

template <int kBits, int kPlanes, int M>
void dot_expanded(const Matrix& w, const QuantizedPanel& panel, PackedRows x, float* out, i64 ldo) {
  if constexpr (M > 1)
    if (x.count < M) return dot_expanded<kBits, kPlanes, M - 1>(w, panel, x, out, ldo);
  dot_panel<kBits, kPlanes, M>(w, panel, x.data, x.stride, out, ldo);
}

// Expands a whole panel. buffer: block_scratch floats.
inline QuantizedPanel expand_panel(const Matrix& w, const char* panel, float* buffer) {
  const BlockFormat f = block_format(w.format);
  const i64 bits = weight_bits(w), groups = w.width / w.group * kPanelRows;
  auto* words = reinterpret_cast<std::uint32_t*>(buffer);
  float *scales = buffer + w.width * bits / 32 * kPanelRows, *biases = scales + groups;
  const QuantizedPanel expanded{words, scales, biases};
  for (i64 k = 0; k < w.width; k += kChunkNumbers) {
    const i64 count = w.width - k < kChunkNumbers ? w.width - k : kChunkNumbers;
    expand_scales(f, panel, count, scales, biases);
    const i64 num_words = count * bits / 32 * kPanelRows;
    const std::uint32_t* found = expand_codes(f, panel, count, words);
    if (found != words)
      __builtin_memcpy(words, found, static_cast<std::size_t>(num_words) * sizeof *words);
    words += num_words;
    scales += count / w.group * kPanelRows, biases += count / w.group * kPanelRows;
    panel += chunk_parts(f, count).bytes() * kPanelRows;
  }
  return expanded;
}

inline i64 block_scratch(const Matrix& w) {
  return kPanelRows * (w.width * weight_bits(w) / 32 + 2 * (w.width / w.group));
}

// begin must be the first row of a panel. end must be the first row of a panel or the number of
// rows.
inline void block_matmul(const Matrix& w, PackedRows x, float* y, i64 ldy, i64 begin, i64 end,
                         float* scratch) {
  with_precision(w, [&]<int kBits, int kPlanes>() {
    const BlockFormat f = block_format(w.format);
    if constexpr (kPlanes == 2)
      if (has_integer_scales(f, kPlanes))
        return integer_block_matmul<kBits>(w, x, y, ldy, begin, end, scratch);
    constexpr int kMaxRows = max_rows(kPlanes);
    Matrix expanded = w;  // in the formats of matmul_quantized.hpp
    expanded.format = kBits == 4 ? WeightFormat::q4 : WeightFormat::q8;
    expanded.scale_type = ScaleType::f32;
    const int fused_bits = f.table || !fuses_codes(f.low_bits + f.high_bits)
                               ? 0
                               : f.low_bits + f.high_bits;
    // integers that are multiplied in place are not worth a copy for a few more rows
    const bool expands = x.count > kMaxRows * (is_in_place(f) || fused_bits ? 2 : 1);
    QuantizedPanel whole{};
    for_panels(w, x, kMaxRows, y, ldy, begin, end,
               [&](const char* panel, bool is_first, PackedRows part, float* out, i64 ldo) {
      if (expands && is_first) whole = expand_panel(w, panel, scratch);
      if (expands) dot_expanded<kBits, kPlanes, kMaxRows>(expanded, whole, part, out, ldo);
      else if (fused_bits == 5) dot_fused<5, kPlanes, kMaxRows>(w, panel, part, out, ldo);
      else if (fused_bits == 6) dot_fused<6, kPlanes, kMaxRows>(w, panel, part, out, ldo);
      else dot_few_rows<kBits, kPlanes, kMaxRows>(w, panel, part, out, ldo);
    });
  });
}

// Converts row n to row-major order.
inline void dequantize_block_row(const Matrix& w, i64 n, float* out) {
  const BlockFormat f = block_format(w.format);
  const int bits = weight_bits(w), per_word = 32 / bits;
  const char* panel = get_block_panel(w, n / kPanelRows * kPanelRows);
  ChunkBuffer buffer;
  for (i64 k = 0; k < w.width; k += kChunkNumbers) {
    const i64 count = w.width - k < kChunkNumbers ? w.width - k : kChunkNumbers;
    const ExpandedChunk chunk = expand_chunk(f, panel, count, false, buffer);
    for (i64 i = 0; i < count; i++) {
      const std::uint32_t word = chunk.words[i / per_word * kPanelRows + n % kPanelRows];
      const i64 position = i % per_word, shift = position % 4 * 8 + position / 4 * 4;
      const auto number = static_cast<float>(word >> shift & ((1u << bits) - 1));
      const i64 group = i / f.group * kPanelRows + n % kPanelRows;
      out[k + i] = __builtin_fmaf(chunk.scales[group], number, chunk.biases[group]);
    }
    panel += chunk_parts(f, count).bytes() * kPanelRows;
  }
}

}  // namespace mlxrunner::ISA
