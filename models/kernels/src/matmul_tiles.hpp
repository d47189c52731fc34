// Multiplication of x by a quantized matrix on tiles. The sums are the same exact integers as those
// of matmul_quantized.hpp, and the float32 operations on them are the same in the same order, so
// the results are bit-identical.
//
// Knows: tiles (tiles.hpp), quantized panels, AVX-512 registers. Must not know: threads.
//
// x is packed in blocks of sixteen rows; the last block has fewer, padded with zeros to a multiple
// of four. In a block, the tiles of each group are adjacent, so that they are loaded from
// contiguous memory:
//
//   group 0: a [rows][64] b [rows][64] c [rows][64]   group 1: a … b … c …   …
//   group 0: scales [rows] sums [rows]                group 1: scales … sums …   …
//
// where a, b and c are the bytes of a number (int8_vnni.hpp).
//
// The bottleneck is the float32 work on the sums of each group: eight instructions for each row of
// x and each panel, as many cycles as the products. Therefore the results are in registers while
// the groups of a block are added, and the sums of a group are added while the tiles compute the
// next ones.
#pragma once

#include "matmul_quantized.hpp"
#include "tiles.hpp"

namespace mlxrunner::ISA {

inline constexpr i64 kTileNumbers = 64, kInputBlock = 16;

// A block of panels stays in the second cache while it is multiplied by all blocks of x, and a
// block of groups of x in the first one while it is multiplied by all of these panels.
inline constexpr i64 kMaxBlockPanels = 16, kMaxBlockBytes = 1 << 20, kBlockNumbers = 512;

// Tiles are used for groups that consist of whole tiles.
inline bool fits_tiles(const Matrix& w) {
  return is_quantized(w) && !has_blocks(w.format) && w.group % kTileNumbers == 0;
}

// ---- x ---------------------------------------------------------------------------------------

inline i64 pad_block(i64 rows) { return (rows + 3) / 4 * 4; }

// The size of a row. The buffer has room for whole blocks.
inline i64 tile_input_stride(const Matrix& w) {
  return w.width * w.planes / 4 + 2 * (w.width / w.group);
}

// Stores the planes of the integers of a group, one byte each, in tiles of 64 numbers. plane_bytes:
// the size of a tile.
template <int kPlanes>
inline void store_planes(const std::int32_t* numbers, i64 count, i64 plane_bytes,
                         std::int8_t* out) {
  for (i64 k = 0; k < count; k += kTileNumbers, out += kPlanes * plane_bytes)
    for (i64 i = 0; i < kTileNumbers; i += 16) {
      __m512i number = _mm512_loadu_si512(numbers + k + i);
      MLXRUNNER_UNROLL
      for (int p = kPlanes - 1; p >= 0; p--) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + p * plane_bytes + i),
                         _mm512_cvtepi32_epi8(number));
        number = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(128)), 8);
      }
    }
}

// Packs up to sixteen rows.
template <int kPlanes>
inline void pack_block(const Matrix& w, const float* x, i64 rows, float* out) {
  const i64 padded = pad_block(rows), plane_bytes = padded * kTileNumbers;
  auto* numbers_out = reinterpret_cast<std::int8_t*>(out);
  float* scales = out + padded * w.width * kPlanes / 4;
  if (rows < padded)
    __builtin_memset(out, 0, static_cast<std::size_t>(4 * padded * tile_input_stride(w)));
  for (i64 m = 0; m < rows; m++)
    for (i64 k = 0; k < w.width; k += w.group) {
      float* scale = scales + k / w.group * 2 * padded + m;
      quantize_group<kPlanes>(
          x + m * w.width + k, w.group, scale, scale + padded, [&](const std::int32_t* numbers) {
            store_planes<kPlanes>(numbers, w.group, plane_bytes,
                                  numbers_out + (k * kPlanes * padded + m * kTileNumbers));
          });
    }
}

// Packs rows of x, from the first row of a block on.
inline void pack_tiles(const Matrix& w, const float* x, i64 count, float* out) {
  with_precision(w, [&]<int, int kPlanes>() {
    for (i64 m = 0; m < count; m += kInputBlock)
      pack_block<kPlanes>(w, x + m * w.width, count - m < kInputBlock ? count - m : kInputBlock,
                          out + m * tile_input_stride(w));
  });
}

// ---- w ---------------------------------------------------------------------------------------

// Spreads 4-bit numbers of the rows of a panel to bytes.
inline void spread_nibbles(const std::uint32_t* words, i64 numbers, std::uint8_t* out) {
  const __m512i mask = _mm512_set1_epi8(0x0f);
  for (i64 k = 0; k < numbers; k += 8, words += kPanelRows, out += 8 * kPanelRows) {
    prefetch(reinterpret_cast<std::uintptr_t>(words) + kPrefetchBytes);
    const __m512i word = load_words(words);
    _mm512_storeu_si512(out, _mm512_and_si512(word, mask));
    _mm512_storeu_si512(out + 4 * kPanelRows, _mm512_and_si512(_mm512_srli_epi32(word, 4), mask));
  }
}

// Groups of a panel as they are multiplied.
struct TilePanel {
  const std::uint8_t* numbers;  // [numbers / 4][16][4]
  const float* scales;          // scales and biases [groups][2][16]
};

// ---- x times w -------------------------------------------------------------------------------

// Groups of a block of x.
struct TileInput {
  const std::int8_t* numbers;
  const float* scales;
};

// Adds the products of a group to the results. sums: of each plane [kRows][16].
template <int kPlanes, int kRows>
[[gnu::always_inline]] inline void add_group(const std::int32_t* sums, const float* scales,
                                             const float* x_scales, SubVector (&results)[kRows]) {
  const SubVector scale = load_sub(scales), bias = load_sub(scales + kPanelRows);
  MLXRUNNER_UNROLL
  for (int m = 0; m < kRows; m++) {
    IntVector planes[kPlanes];
    MLXRUNNER_UNROLL
    for (int p = 0; p < kPlanes; p++)
      planes[p] = _mm512_load_si512(sums + (p * kRows + m) * kPanelRows);
    add_product(results[m], scale, multiply(join_sums(planes), broadcast(x_scales[m])));
    add_product(results[m], bias, broadcast(x_scales[kRows + m]));
  }
}

// Computes the sums of a group in one of two sets of tiles. kTiles: of x, in each plane.
template <int kPlanes, int kRows, int kTiles, int kSet>
[[gnu::always_inline]] inline void dot_tiles(const std::int8_t* x, const std::uint8_t* w) {
  constexpr int kSums = kSet * 3;
  AmxTiles::zero<kSums>();
  if constexpr (kPlanes > 1) AmxTiles::zero<kSums + 1>();
  if constexpr (kPlanes > 2) AmxTiles::zero<kSums + 2>();
  MLXRUNNER_UNROLL
  for (int i = 0; i < kTiles; i++, x += kPlanes * kRows * kTileNumbers, w += 16 * kTileNumbers) {
    AmxTiles::load_weights(w);
    AmxTiles::load_input(x);
    AmxTiles::add_dot<kSums>();
    if constexpr (kPlanes > 1) {
      AmxTiles::load_input(x + kRows * kTileNumbers);
      AmxTiles::add_dot<kSums + 1>();
    }
    if constexpr (kPlanes > 2) {
      AmxTiles::load_input(x + 2 * kRows * kTileNumbers);
      AmxTiles::add_dot<kSums + 2>();
    }
  }
}

template <int kPlanes, int kRows, int kSet>
[[gnu::always_inline]] inline void store_tiles(std::int32_t* sums) {
  constexpr int kSums = kSet * 3;
  AmxTiles::store<kSums>(sums);
  if constexpr (kPlanes > 1) AmxTiles::store<kSums + 1>(sums + kRows * kPanelRows);
  if constexpr (kPlanes > 2) AmxTiles::store<kSums + 2>(sums + 2 * kRows * kPanelRows);
}

// Multiplies `groups` groups of a panel by a block of x. results: [kRows][16]; they are overwritten
// if is_first. Not inlined, so that the compiler keeps the results in registers.
template <int kPlanes, int kRows, int kTiles>
[[gnu::noinline]] void multiply_groups(TileInput x, TilePanel w, i64 groups, bool is_first,
                                       float* results) {
  alignas(64) std::int32_t sums[2][kPlanes * kRows * kPanelRows];
  SubVector totals[kRows];
  MLXRUNNER_UNROLL
  for (int m = 0; m < kRows; m++)
    totals[m] = is_first ? broadcast(0) : load_sub(results + m * kPanelRows);
  const auto dot = [&]<int kSet>() __attribute__((always_inline)) {
    dot_tiles<kPlanes, kRows, kTiles, kSet>(x.numbers, w.numbers);
    x.numbers += kPlanes * kRows * kTiles * kTileNumbers;
    w.numbers += kPanelRows * kTiles * kTileNumbers;
  };
  const auto add = [&](const std::int32_t* of_group) __attribute__((always_inline)) {
    add_group<kPlanes, kRows>(of_group, w.scales, x.scales, totals);
    w.scales += 2 * kPanelRows, x.scales += 2 * kRows;
  };
  dot.template operator()<0>();
  store_tiles<kPlanes, kRows, 0>(sums[0]);
  for (;; groups -= 2) {
    if (groups > 1) dot.template operator()<1>();
    add(sums[0]);
    if (groups == 1) break;
    store_tiles<kPlanes, kRows, 1>(sums[1]);
    if (groups > 2) dot.template operator()<0>();
    add(sums[1]);
    if (groups == 2) break;
    store_tiles<kPlanes, kRows, 0>(sums[0]);
  }
  MLXRUNNER_UNROLL
  for (int m = 0; m < kRows; m++) store_sub(results + m * kPanelRows, totals[m]);
}

inline i64 block_panels(const Matrix& w) {
  const i64 panels = kMaxBlockBytes / (w.width * kPanelRows);
  return panels < 1 ? 1 : panels > kMaxBlockPanels ? kMaxBlockPanels : panels;
}

// The working memory of tile_matmul: the numbers, scales and results of a block of panels, and a
// padded panel.
inline i64 tile_panel_floats(const Matrix& w) {
  return w.format == WeightFormat::q4 ? w.width * kPanelRows / 4 : 0;
}
inline i64 tile_scale_floats(const Matrix& w) { return w.width / w.group * 2 * kPanelRows; }
inline i64 tile_scratch(const Matrix& w) {
  return block_panels(w) *
             (tile_panel_floats(w) + tile_scale_floats(w) + kInputBlock * kPanelRows) +
         quantized_scratch(w);
}

// Multiplies blocks of x by blocks of panels.
template <int kPlanes>
class TileProduct {
 public:
  // scratch: tile_scratch floats, aligned to 64 bytes.
  TileProduct(const Matrix& w, PackedRows x, float* scratch)
      : w_(w), x_(x), results_(scratch), scales_(results_ + block_panels(w) * kResults),
        numbers_(scales_ + block_panels(w) * tile_scale_floats(w)),
        padded_(numbers_ + block_panels(w) * tile_panel_floats(w)) {}

  // Multiplies rows [begin, end) of w, at most block_panels panels.
  void multiply(i64 begin, i64 end, float* y, i64 ldy) {
    for (i64 m = 0; m < x_.count; m += kInputBlock) {
      const i64 rows = x_.count - m < kInputBlock ? x_.count - m : kInputBlock;
      switch (pad_block(rows)) {
        case 4: multiply_block<4>(m, begin, end); break;
        case 8: multiply_block<8>(m, begin, end); break;
        case 12: multiply_block<12>(m, begin, end); break;
        default: multiply_block<16>(m, begin, end);
      }
      for (i64 i = 0; i < rows; i++)
        for (i64 n = begin; n < end; n += kPanelRows) {
          const float* results = results_ + (n - begin) * kInputBlock + i * kPanelRows;
          float* out = y + (m + i) * ldy + n;
          if (end - n >= kPanelRows) store_sub(out, load_sub(results));
          else __builtin_memcpy(out, results, static_cast<std::size_t>(end - n) * sizeof(float));
        }
    }
  }

 private:
  static constexpr i64 kResults = kInputBlock * kPanelRows;

  // The block of x that begins at row m.
  template <int kRows>
  void multiply_block(i64 m, i64 begin, i64 end) {
    if (w_.group == kTileNumbers) multiply_block<kRows, 1>(m, begin, end);
    else multiply_block<kRows, 2>(m, begin, end);
  }
  template <int kRows, int kTiles>
  void multiply_block(i64 m, i64 begin, i64 end) {
    tiles_.set_rows(kRows);
    constexpr i64 kGroup = kTiles * kTileNumbers, kStep = kBlockNumbers / kGroup;
    const float* block = x_.data + m * x_.stride;
    const auto* numbers = reinterpret_cast<const std::int8_t*>(block);
    const float* scales = block + kRows * w_.width * kPlanes / 4;
    const i64 groups = w_.width / kGroup;
    for (i64 from = 0; from < groups; from += kStep) {
      const i64 to = from + kStep < groups ? from + kStep : groups;
      const TileInput x{numbers + from * kGroup * kPlanes * kRows, scales + from * 2 * kRows};
      for (i64 n = begin; n < end; n += kPanelRows) {
        const i64 panel = (n - begin) / kPanelRows;
        multiply_groups<kPlanes, kRows, kTiles>(x, expand(n, panel, from, to, m == 0), to - from,
                                                from == 0, results_ + panel * kResults);
      }
    }
  }

  // Returns groups [from, to) of the panel that begins at row n. is_first: whether they have to be
  // expanded. If there is only one block of x, panels are expanded in the same memory, which stays
  // in the first cache.
  TilePanel expand(i64 n, i64 panel, i64 from, i64 to, bool is_first) {
    const i64 at = x_.count > kInputBlock ? panel : 0;
    const QuantizedPanel source =
        n + kPanelRows <= w_.rows ? get_panel(w_, n) : pad(n, is_first && from == 0);
    float* scales = scales_ + at * tile_scale_floats(w_);
    const bool is_q4 = w_.format == WeightFormat::q4;
    auto* numbers = reinterpret_cast<std::uint8_t*>(numbers_ + at * tile_panel_floats(w_));
    if (is_first) {
      for (i64 g = from; g < to; g++) {
        store_sub(scales + 2 * g * kPanelRows,
                  load_scales(source.scales, w_.scale_type, g * kPanelRows));
        store_sub(scales + (2 * g + 1) * kPanelRows,
                  load_scales(source.biases, w_.scale_type, g * kPanelRows));
      }
      if (is_q4)
        spread_nibbles(source.words + from * w_.group / 8 * kPanelRows, (to - from) * w_.group,
                       numbers + from * w_.group * kPanelRows);
    }
    const auto* bytes = is_q4 ? numbers : reinterpret_cast<const std::uint8_t*>(source.words);
    return {bytes + from * w_.group * kPanelRows, scales + from * 2 * kPanelRows};
  }

  QuantizedPanel pad(i64 n, bool is_first) {
    if (is_first) last_ = pad_panel(w_, n, padded_);
    return last_;
  }

  const Matrix& w_;
  PackedRows x_;
  float *results_, *scales_, *numbers_, *padded_;
  QuantizedPanel last_{};
  AmxTiles tiles_;
};

// Multiplies x in the layout of this file by rows [begin, end) of w. begin must be the first row of
// a panel. end must be the first row of a panel or the number of rows. scratch: tile_scratch
// floats, aligned to 64 bytes.
inline void tile_matmul(const Matrix& w, PackedRows x, float* y, i64 ldy, i64 begin, i64 end,
                        float* scratch) {
  with_precision(w, [&]<int, int kPlanes>() {
    TileProduct<kPlanes> product(w, x, scratch);
    const i64 panels = (end - begin + kPanelRows - 1) / kPanelRows, most = block_panels(w),
              blocks = (panels + most - 1) / most;
    for (i64 i = 0, n = begin; i < blocks; i++) {
      const i64 next = begin + panels * (i + 1) / blocks * kPanelRows;
      product.multiply(n, next < end ? next : end, y, ldy);
      n = next;
    }
  });
}

}  // namespace mlxrunner::ISA
