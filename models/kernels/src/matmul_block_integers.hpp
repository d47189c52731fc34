// Multiplication of x by a matrix with a K type of GGUF, with the small scales as integers.
//
// Knows: panels of blocks (block_formats.hpp), integer sums (matmul_quantized.hpp). Must not know:
// threads.
//
// x has 16 bits, and one scale per chunk of 256 numbers, so that the sum of a group times its small
// scale fits into 32 bits, and for each chunk
//
//   y += scale of x * (d * sum over groups of (small scale * sum of x * (code + offset))
//                      - dmin * sum over groups of (small minimum * sum of x))
//
// The products within a group, and the sum over minima, are exact. The products of groups are
// rounded to float32 and added one after the other. An instruction that multiplies integers does not
// compete with the dot products, unlike one that multiplies float32.
#pragma once

#include "matmul_quantized.hpp"

namespace mlxrunner::ISA {

inline constexpr i64 kMaxChunkGroups = kChunkNumbers / 16;

// The rows of x at a time. With more, the arithmetic at the end of a group fills the scheduler of a
// Zen 4, so that no dot product of the next group can start.
inline constexpr int kMaxScaledRows = 5;

// The words of kWordRows rows.
using BlockWords [[gnu::vector_size(4 * kWordRows), gnu::may_alias, gnu::aligned(4)]] =
    std::uint32_t;
// `bits` bits of each byte of the words, from `from` on, moved to `to`.
inline BlockWords move_bits(const std::uint32_t* at, int bits, int from, int to) {
  const BlockWords words = *reinterpret_cast<const BlockWords*>(at);
  const std::uint32_t mask = ((1u << bits) - 1) * 0x01010101u << to;
  return (from < to ? words << (to - from) : words >> (from - to)) & mask;
}

// Spreads codes to bytes.
template <int kLow, int kHigh>
inline void spread_codes(const std::uint32_t* words, i64 numbers, std::uint32_t* out) {
  constexpr int kSpan = span_numbers(kHigh), kLowFours = 8 / kLow,
                kHighFours = kHigh ? 8 / kHigh : 1;
  constexpr i64 kLowWords = kSpan * kLow / 32 * kPanelRows,
                kWords = kSpan * (kLow + kHigh) / 32 * kPanelRows;
  for (i64 k = 0; k < numbers; k += kSpan, words += kWords, out += kSpan / 4 * kPanelRows) {
    for (i64 i = 0; i < kWords; i += 16)
      prefetch(reinterpret_cast<std::uintptr_t>(words + i) + kPrefetchBytes);
    MLXRUNNER_UNROLL
    for (int four = 0; four < kSpan / 4; four++)
      MLXRUNNER_UNROLL
      for (int n = 0; n < kPanelRows; n += kWordRows) {
        BlockWords codes = move_bits(words + four / kLowFours * kPanelRows + n, kLow,
                                     four % kLowFours * kLow, 0);
        if constexpr (kHigh != 0)
          codes |= move_bits(words + kLowWords + four / kHighFours * kPanelRows + n, kHigh,
                             four % kHighFours * kHigh, kLow);
        *reinterpret_cast<BlockWords*>(out + four * kPanelRows + n) = codes;
      }
  }
}

// Whether the codes are stored as the integers that are multiplied.
inline bool is_in_place(const BlockFormat& f) {
  return !f.table && f.high_bits == 0 && f.low_bits != 2;
}

// Returns the integers of a chunk: in place if possible, otherwise in `buffer`.
inline const std::uint32_t* expand_codes(const BlockFormat& f, const char* chunk, i64 numbers,
                                         std::uint32_t* buffer) {
  const auto* words = reinterpret_cast<const std::uint32_t*>(chunk);
  if (is_in_place(f)) return words;
  if (f.low_bits == 2 && f.high_bits == 0) spread_codes<2, 0>(words, numbers, buffer);
  else if (f.low_bits == 2) spread_codes<2, 1>(words, numbers, buffer);
  else if (f.high_bits == 0) spread_codes<4, 0>(words, numbers, buffer);
  else if (f.high_bits == 1) spread_codes<4, 1>(words, numbers, buffer);
  else spread_codes<4, 2>(words, numbers, buffer);
  if (f.table)
    for (i64 i = 0; i < numbers / 4; i++) look_up(f.table, buffer + i * kPanelRows);
  return buffer;
}

// Splits `count` bytes: the low nibbles, then the high ones.
inline void split_nibbles(const char* both, i64 count, char* out) {
  for (i64 i = 0; i < count; i++) {
    const auto byte = static_cast<std::uint8_t>(both[i]);
    out[i] = static_cast<char>(byte & 15);
    out[count + i] = static_cast<char>(byte >> 4);
  }
}

inline const char* get_block_panel(const Matrix& w, i64 n) {
  return static_cast<const char*>(w.data) + n * block_row_bytes(w.format, w.width);
}

inline std::int32_t get_int(const float* p) {
  std::int32_t number;
  __builtin_memcpy(&number, p, sizeof number);
  return number;
}

// Adds up products of the M-th row's sums of x and minima.
template <int M>
inline void add_minima(const char* minima, i64 groups, const float* x_sums, i64 stride,
                       RowInts (&out)[M]) {
  MLXRUNNER_UNROLL
  for (int m = 0; m < M; m++) out[m] = broadcast_int(0);
  for (i64 g = 0; g < groups; g++) {
    const RowInts minimum = load_byte_ints(minima + g * kPanelRows);
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++)
      out[m] = plus(out[m], multiply(minimum, broadcast_int(get_int(x_sums + m * stride + 2 * g))));
  }
}

// Adds up the products of the groups of a chunk with their scales, for kWordRows rows of a panel.
// x_sums: the sum of the first group. out: [M, kPanelRows]. Not inlined for the same reason as
// dot_panel.
template <int kBits, int kGroup, bool kHasMinima, int M>
[[gnu::noinline]] void dot_chunk(const std::uint32_t* words, const char* scales,
                                 const std::int8_t* numbers, const float* x_sums, i64 stride,
                                 bool should_prefetch, float* out) {
  constexpr int kStep = step_numbers(kBits) < kGroup ? step_numbers(kBits) : kGroup;
  SubVector sums[M];
  MLXRUNNER_UNROLL
  for (int m = 0; m < M; m++) sums[m] = broadcast(0);
  for (i64 g = 0; g < kChunkNumbers / kGroup; g++) {
    Sums<2> int_sums[M];
    dot_group<kBits, 2, M, kStep>(kGroup, words, numbers, 4 * stride, should_prefetch,
                                        int_sums);
    const RowInts scale = load_byte_ints(scales);
    MLXRUNNER_UNROLL
    for (int m = 0; m < M; m++) {
      RowInts total = join_exact(int_sums[m].sums);
      if constexpr (!kHasMinima)
        total = plus(total, broadcast_int(get_int(x_sums + m * stride)));
      sums[m] = plus(sums[m], to_float(multiply(total, scale)));
    }
    words += kGroup * kBits / 32 * kPanelRows, numbers += group_bytes(kGroup, kBits, 2);
    scales += kPanelRows, x_sums += 2;
  }
  MLXRUNNER_UNROLL
  for (int m = 0; m < M; m++) store_sub(out + m * kPanelRows, sums[m]);
}

// Multiplies a panel by M rows of x. kBits: of the integers, or of codes that are multiplied as they
// are stored. codes: the integers of the panel, or nullptr. out: [M, kPanelRows], whose rows are
// `ldo` apart. Not inlined for the same reason as dot_panel.
template <int kBits, int kGroup, bool kHasMinima, int M>
[[gnu::noinline]] void dot_integer_panel(const Matrix& w, const char* panel,
                                         const std::uint32_t* codes, const float* x, i64 stride,
                                         float* out, i64 ldo) {
  constexpr i64 kGroups = kChunkNumbers / kGroup;
  const BlockFormat f = block_format(w.format);
  const ChunkParts parts = chunk_parts(f, kChunkNumbers);
  const bool in_place = fuses_codes(kBits) || is_in_place(f);
  const i64 x_bytes = group_bytes(kGroup, kBits, 2);
  const auto* numbers = reinterpret_cast<const std::int8_t*>(x);
  const float* x_scales = x + input_floats(w);
  alignas(64) std::uint32_t buffer[kChunkNumbers / 4 * kPanelRows];
  char nibbles[2 * kMaxChunkGroups * kPanelRows];
  alignas(64) float totals[M * kPanelRows] = {};
  for (i64 k = 0; k < w.width; k += kChunkNumbers, panel += parts.bytes() * kPanelRows) {
    const std::uint32_t* words = codes;
    if (codes) codes += kChunkNumbers / 4 * kPanelRows;
    else if (in_place) words = reinterpret_cast<const std::uint32_t*>(panel);
    else words = expand_codes(f, panel, kChunkNumbers, buffer);
    const char* small = panel + parts.codes * kPanelRows;
    const auto* supers = reinterpret_cast<const std::uint16_t*>(small + parts.scales * kPanelRows);
    for (i64 i = 0; i < (parts.scales + parts.supers) * kPanelRows; i += 64)
      prefetch(reinterpret_cast<std::uintptr_t>(small + i) + kPrefetchBytes);
    if (f.scales == BlockScales::k_nibbles) {
      split_nibbles(small, kGroups * kPanelRows, nibbles);
      small = nibbles;
    }
    for (i64 first = 0; first < kPanelRows; first += kWordRows) {
      alignas(64) float sums[M * kPanelRows];
      dot_chunk<kBits, kGroup, kHasMinima, M>(words + first, small + first, numbers,
                                                       x_scales + 1, stride, in_place && first == 0,
                                                       sums);
      const SubVector d = load_sub(supers + first, false);
      RowInts minima[M];
      if constexpr (kHasMinima)
        add_minima<M>(small + kGroups * kPanelRows + first, kGroups, x_scales + 1, stride, minima);
      MLXRUNNER_UNROLL
      for (int m = 0; m < M; m++) {
        SubVector total = multiply(d, load_sub(sums + m * kPanelRows));
        if constexpr (kHasMinima)
          add_product(total, multiply(load_sub(supers + kPanelRows + first, false), broadcast(-1)),
                      to_float(minima[m]));
        SubVector sum = load_sub(totals + m * kPanelRows + first);
        add_product(sum, total, broadcast(x_scales[m * stride]));
        store_sub(totals + m * kPanelRows + first, sum);
      }
    }
    numbers += kGroups * x_bytes, x_scales += 2 * kGroups;
  }
  for (i64 m = 0; m < M; m++)
    __builtin_memcpy(out + m * ldo, totals + m * kPanelRows, kPanelRows * sizeof(float));
}

// The same for any number of rows up to M.
template <int kBits, int kGroup, bool kHasMinima, int M>
void dot_integer_rows(const Matrix& w, const char* panel, const std::uint32_t* codes, PackedRows x,
                      float* out, i64 ldo) {
  if constexpr (M > 1)
    if (x.count < M)
      return dot_integer_rows<kBits, kGroup, kHasMinima, M - 1>(w, panel, codes, x, out,
                                                                         ldo);
  dot_integer_panel<kBits, kGroup, kHasMinima, M>(w, panel, codes, x.data, x.stride, out,
                                                           ldo);
}

// Calls multiply(panel, is_first, rows of x, out, ldo) for each panel and for at most `max_rows` rows
// of x at a time.
template <class F>
inline void for_panels(const Matrix& w, PackedRows x, i64 max_rows_at_once, float* y, i64 ldy,
                       i64 begin, i64 end, F multiply) {
  const i64 blocks = (x.count + max_rows_at_once - 1) / max_rows_at_once;
  for (i64 n = begin; n < end; n += kPanelRows) {
    const i64 rows = end - n < kPanelRows ? end - n : kPanelRows;
    for (i64 i = 0, m = 0; i < blocks; i++) {
      const PackedRows part{x.data + m * x.stride, x.count * (i + 1) / blocks - m, x.stride};
      float partial[max_rows(1) * kPanelRows];
      const bool is_whole = rows == kPanelRows;
      multiply(get_block_panel(w, n), i == 0, part, is_whole ? y + m * ldy + n : partial,
               is_whole ? ldy : kPanelRows);
      for (i64 j = 0; !is_whole && j < part.count; j++)
        for (i64 r = 0; r < rows; r++) y[(m + j) * ldy + n + r] = partial[j * kPanelRows + r];
      m += part.count;
    }
  }
}

// scratch: for the integers of a panel.
template <int kBits>
void integer_block_matmul(const Matrix& w, PackedRows x, float* y, i64 ldy, i64 begin, i64 end,
                          float* scratch) {
  constexpr int kMaxRows = max_rows(2) < kMaxScaledRows ? max_rows(2) : kMaxScaledRows;
  const BlockFormat f = block_format(w.format);
  const bool has_minima = f.scales != BlockScales::k_signed;
  // With few rows of x, it is not worth it to expand the codes of a panel first.
  const bool fuses = fuses_codes(f.low_bits + f.high_bits);
  const bool expands = !is_in_place(f) && x.count > kMaxRows * (fuses ? 4 : 1);
  auto* expanded = reinterpret_cast<std::uint32_t*>(scratch);
  for_panels(w, x, kMaxRows, y, ldy, begin, end, [&](const char* panel, bool is_first,
                                                     PackedRows part, float* out, i64 ldo) {
    for (i64 k = 0; expands && is_first && k < w.width; k += kChunkNumbers)
      expand_codes(f, panel + block_row_bytes(w.format, k) * kPanelRows, kChunkNumbers,
                   expanded + k / 4 * kPanelRows);
    const std::uint32_t* codes = expands ? expanded : nullptr;
    const auto dot = [&]<int kCodeBits, int kGroup, bool kHasMinima>() {
      dot_integer_rows<kCodeBits, kGroup, kHasMinima, kMaxRows>(w, panel, codes, part, out,
                                                                         ldo);
    };
    if constexpr (kBits == 4) dot.template operator()<4, 32, true>();
    else if (fuses && !expands) {
      if constexpr (fuses_codes(5))
        if (has_minima) return dot.template operator()<5, 32, true>();
      if constexpr (fuses_codes(6)) dot.template operator()<6, 16, false>();
    } else if (!has_minima) dot.template operator()<8, 16, false>();
    else if (w.group == 16) dot.template operator()<8, 16, true>();
    else dot.template operator()<8, 32, true>();
  });
}

}  // namespace mlxrunner::ISA
