// The layout of the block types of GGUF in panels. block_repack.cpp creates it.
//
// Knows: sizes. Must not know: MLX, instruction sets. Like kernels.hpp, this header contains no code
// that could be shared between files that are compiled for different instruction sets.
//
// A panel has sixteen rows; the last panel of a matrix is padded with zeros. It consists of chunks of
// 256 numbers per row; the last chunk is shorter if blocks have 32 numbers. A chunk contains, each
// with the sixteen rows adjacent:
//
//   codes                         spans of 32 numbers, or of 16 with 6 bits: the words with the low
//                                 8, 4 or 2 bits, then those with the high bits, none, 1 or 2
//   small scales                  one byte or one float16 per group; then the same for the minima
//   d, dmin                       float16, the K types only, per chunk
//
// Codes are stored in groups of four, one per byte of a word: the first four in the lowest bits of
// the bytes, the next four in the bits above, and so on. 4-bit codes therefore have the layout of
// matmul_quantized.hpp.
#pragma once

#include "kernels.hpp"

namespace mlxrunner {

inline constexpr std::int64_t kChunkNumbers = 256;

// How the scale and the bias of a group are stored.
//   f16       scale                      f16_pair  scale, bias
//   e8m0      the exponent of the scale
//   k_pair    small scale and minimum in a byte each, multiplied by d and -dmin
//   k_nibbles the same in one byte
//   k_signed  small signed scale, multiplied by d
enum class BlockScales : std::uint8_t { f16, f16_pair, e8m0, k_pair, k_nibbles, k_signed };

// The codes of a block type. low_bits, high_bits: of a code. group: numbers per scale. If a type has
// no minima, a weight is scale * (code + offset). table: the codes are indices of table entries.
struct BlockFormat {
  int low_bits, high_bits;
  BlockScales scales;
  int group;
  float offset;
  const std::uint8_t* table;
};

// The values of the codes of IQ4_NL and IQ4_XS, plus 128, and of MXFP4, doubled and plus 12.
inline constexpr std::uint8_t kIq4Table[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                               129, 141, 153, 166, 181, 197, 217, 241};
inline constexpr std::uint8_t kE2m1Table[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                12, 11, 10, 9,  8,  6,  4,  0};

[[gnu::always_inline]] inline constexpr BlockFormat block_format(WeightFormat format) {
  using enum WeightFormat;
  switch (format) {
    case ggml_q4_0:
      return {4, 0, BlockScales::f16, 32, -8, nullptr};
    case ggml_q4_1:
      return {4, 0, BlockScales::f16_pair, 32, 0, nullptr};
    case ggml_q5_0:
      return {4, 1, BlockScales::f16, 32, -16, nullptr};
    case ggml_q5_1:
      return {4, 1, BlockScales::f16_pair, 32, 0, nullptr};
    case ggml_q2_k:
      return {2, 0, BlockScales::k_nibbles, 16, 0, nullptr};
    case ggml_q3_k:
      return {2, 1, BlockScales::k_signed, 16, -4, nullptr};
    case ggml_q4_k:
      return {4, 0, BlockScales::k_pair, 32, 0, nullptr};
    case ggml_q5_k:
      return {4, 1, BlockScales::k_pair, 32, 0, nullptr};
    case ggml_q6_k:
      return {4, 2, BlockScales::k_signed, 16, -32, nullptr};
    case ggml_iq4_nl:
      return {4, 0, BlockScales::f16, 32, -128, kIq4Table};
    case ggml_iq4_xs:
      return {4, 0, BlockScales::k_signed, 32, -128, kIq4Table};
    case ggml_mxfp4:
      return {4, 0, BlockScales::e8m0, 32, -12, kE2m1Table};
    default:  // ggml_q8_0; codes are stored plus 128
      return {8, 0, BlockScales::f16, 32, -128, nullptr};
  }
}

[[gnu::always_inline]] inline constexpr bool has_blocks(WeightFormat format) {
  return format >= WeightFormat::ggml_q4_0;
}

// Whether a product multiplies by the small scales as integers, with x rounded to `planes` bytes
// (matmul_block_integers.hpp). Three bytes, or the codes of a table, would need more than 32 bits.
// With one byte, a scale of x per group is worth its time.
[[gnu::always_inline]] inline constexpr bool has_integer_scales(const BlockFormat& f, int planes) {
  return f.scales >= BlockScales::k_pair && !f.table && planes == 2;
}

[[gnu::always_inline]] inline constexpr int span_numbers(int high_bits) {
  return high_bits == 2 ? 16 : 32;
}

// The sizes of the parts of a chunk of `numbers` per row, in bytes per row.
struct ChunkParts {
  std::int64_t codes, scales, supers;

  [[gnu::always_inline]] constexpr std::int64_t bytes() const { return codes + scales + supers; }
};

[[gnu::always_inline]] inline constexpr ChunkParts chunk_parts(const BlockFormat& f,
                                                               std::int64_t numbers) {
  const std::int64_t groups = numbers / f.group;
  const bool pair = f.scales == BlockScales::f16_pair || f.scales == BlockScales::k_pair;
  const bool is_f16 = f.scales == BlockScales::f16 || f.scales == BlockScales::f16_pair;
  const bool is_k = f.scales >= BlockScales::k_pair;
  const std::int64_t supers = !is_k ? 0 : f.scales == BlockScales::k_signed ? 2 : 4;
  return {numbers * (f.low_bits + f.high_bits) / 8, groups * (is_f16 ? 2 : 1) * (1 + pair), supers};
}

// The size of a row in a panel.
[[gnu::always_inline]] inline constexpr std::int64_t block_row_bytes(WeightFormat format,
                                                                     std::int64_t width) {
  const BlockFormat f = block_format(format);
  const std::int64_t rest = width % kChunkNumbers;
  return width / kChunkNumbers * chunk_parts(f, kChunkNumbers).bytes() +
         (rest ? chunk_parts(f, rest).bytes() : 0);
}

}  // namespace mlxrunner
