// Multiplication of x by a quantized matrix on tiles. The sums are the same exact integers as those
// of matmul_quantized.hpp, and the float32 operations on them are the same in the same order, so
// the results are bit-identical.
//
// Knows: tiles (tiles.hpp), quantized panels. Must not know: threads.
//
// A row of x consists of spans of 64 integers with one byte of each integer per plane, and then of
// a scale and a sum for each group:
//
//   a…(64) b…(64) c…(64)   a…(64) b…(64) c…(64)   …   scale sum scale sum …
#pragma once

#include "matmul_quantized.hpp"
#include "tiles.hpp"

namespace mlxrunner::ISA {

// Tiles are used for groups that consist of whole tiles.
inline bool fits_tiles(const Matrix& w) { return is_quantized(w) && w.group % kTileNumbers == 0; }

// The size of the working memory of tile_matmul: the 4-bit numbers of two panels, one per byte.
inline i64 tile_scratch_bytes(const Matrix& w) {
  return w.format == WeightFormat::q4 ? 2 * kPanelRows * w.width : 0;
}

// Lanes of 32-bit sums in memory.
using IntLanes [[gnu::vector_size(4 * kWordRows), gnu::may_alias, gnu::aligned(4)]] = std::int32_t;

inline IntLanes load_lanes(const std::int32_t* p) { return *reinterpret_cast<const IntLanes*>(p); }
inline SubVector lanes_to_float(IntLanes a) { return __builtin_convertvector(a, SubVector); }

// join_sums of int8_vnni.hpp. sums: of the first plane, the others follow.
template <int kPlanes>
inline SubVector join_tile_sums(const std::int32_t* sums) {
  const IntLanes first = load_lanes(sums);
  if constexpr (kPlanes == 1) return lanes_to_float(first);
  else {
    const IntLanes high = (first << 8) + load_lanes(sums + kTileBytes / 4);
    SubVector total = lanes_to_float(high);
    if constexpr (kPlanes == 3) {
      const SubVector high_part = total;
      total = lanes_to_float(load_lanes(sums + 2 * kTileBytes / 4));
      add_product(total, high_part, broadcast(256));
    }
    return total;
  }
}

// The integer sums of a group for a panel and up to sixteen rows of x, and where they are added.
struct GroupSums {
  const std::int32_t* sums;  // [planes][16][16]
  const float* x_scales;     // scale and sum of the first row; rows are `stride` apart
  i64 stride;
  const void *scales, *biases;
  ScaleType scale_type;
  i64 first_scale;
  float* out;  // [16][16]
};

// Adds rows [from, to).
template <int kPlanes>
inline void add_group(const GroupSums& g, int from, int to) {
  for (i64 first = 0; first < kPanelRows; first += kWordRows) {
    const SubVector scale = load_scales(g.scales, g.scale_type, g.first_scale + first),
                    bias = load_scales(g.biases, g.scale_type, g.first_scale + first);
    for (int m = from; m < to; m++) {
      const i64 at = m * kPanelRows + first;
      const SubVector total = join_tile_sums<kPlanes>(g.sums + at);
      const float* x_scale = g.x_scales + m * g.stride;
      SubVector sum = load_sub(g.out + at);
      add_product(sum, scale, multiply(total, broadcast(x_scale[0])));
      add_product(sum, bias, broadcast(x_scale[1]));
      store_sub(g.out + at, sum);
    }
  }
}

// Spreads 64 numbers of 4 bits of each row of a panel to bytes.
inline void spread_nibbles(const std::uint32_t* words, std::uint8_t* tile) {
  for (i64 i = 0; i < kTileNumbers / 8; i++)
    for (i64 n = 0; n < kPanelRows; n++) {
      const std::uint32_t word = words[i * kPanelRows + n];
      const std::uint32_t low = word & 0x0f0f0f0f, high = word >> 4 & 0x0f0f0f0f;
      __builtin_memcpy(tile + (2 * i * kPanelRows + n) * 4, &low, 4);
      __builtin_memcpy(tile + ((2 * i + 1) * kPanelRows + n) * 4, &high, 4);
    }
}

// Multiplies one or two panels by rows of x. The sums of a group are added to the results between
// the tile instructions of the next group, which hides this work.
template <class Tiles, int kBits, int kPlanes>
class PanelPair {
 public:
  // n: the first row of w. spread: tile_scratch_bytes.
  PanelPair(const Matrix& w, i64 n, int count, std::uint8_t* spread)
      : w_(w), groups_(w.width / w.group), count_(count), spread_(spread) {
    for (int i = 0; i < 2; i++) panels_[i] = get_panel(w, n + (i < count ? i * kPanelRows : 0));
    if constexpr (kBits == 4)
      for (i64 i = 0; i < count * (w.width / kTileNumbers); i++) {
        const i64 panel = i % count, span = i / count;
        spread_nibbles(panels_[panel].words + span * kSpanWords, tile(panel, span));
      }
  }

  // Up to sixteen rows of x. y: of the first row of x and the first row of the panels.
  void multiply(Tiles& tiles, PackedRows x, float* y, i64 ldy) {
    const int rows = static_cast<int>(x.count);
    const auto* numbers = reinterpret_cast<const std::int8_t*>(x.data);
    const float* x_scales = x.data + w_.width * kPlanes / 4;
    const i64 spans = w_.group / kTileNumbers;
    alignas(64) std::int32_t sums[2][2][kPlanes * kTileBytes / 4];
    alignas(64) float out[2][16 * kPanelRows] = {};
    GroupSums pending[2];
    int num_pending = 0;
    tiles.set_rows(rows);
    for (i64 g = 0; g < groups_; g++) {
      zero_sums(tiles);
      int slice = 0;
      const auto add_slice = [&] {
        const int from = rows * slice / kSlices, to = rows * (slice + 1) / kSlices;
        for (int i = 0; i < num_pending; i++) add_group<kPlanes>(pending[i], from, to);
        slice++;
      };
      for (i64 span = g * spans; span < (g + 1) * spans; span++)
        multiply_span(tiles, numbers + span * kTileNumbers * kPlanes, 4 * x.stride, span, [&] {
          if (slice < kSlices) add_slice();
        });
      while (slice < kSlices) add_slice();
      auto& now = sums[g & 1];
      store_sums<0>(tiles, now[0]);
      if (count_ == 2) store_sums<1>(tiles, now[1]);
      for (int i = 0; i < count_; i++)
        pending[i] = {now[i],           x_scales + 2 * g, x.stride, panels_[i].scales,
                      panels_[i].biases, w_.scale_type,    g * kPanelRows, out[i]};
      num_pending = count_;
    }
    for (int i = 0; i < num_pending; i++) add_group<kPlanes>(pending[i], 0, rows);
    for (int m = 0; m < rows; m++)
      for (int i = 0; i < count_; i++)
        __builtin_memcpy(y + m * ldy + i * kPanelRows, out[i] + m * kPanelRows, kPanelRows * 4);
  }

 private:
  static constexpr i64 kSpanWords = kTileNumbers * kBits / 32 * kPanelRows;
  static constexpr int kSlices = 2 * kPlanes;
  // tiles: the sums of each panel and plane, then x and a panel
  static constexpr int kInputTile = 6, kWeightTile = 7;

  std::uint8_t* tile(i64 panel, i64 span) {
    return spread_ + (span * count_ + panel) * kTileBytes;
  }
  const void* weights(i64 panel, i64 span) {
    if constexpr (kBits == 4) return tile(panel, span);
    else return panels_[panel].words + span * kSpanWords;
  }

  static void zero_sums(Tiles& tiles) {
    tiles.template zero<0>(), tiles.template zero<kPlanes>();
    if constexpr (kPlanes > 1) tiles.template zero<1>(), tiles.template zero<kPlanes + 1>();
    if constexpr (kPlanes > 2) tiles.template zero<2>(), tiles.template zero<kPlanes + 2>();
  }
  template <int kPanel>
  static void store_sums(Tiles& tiles, std::int32_t* sums) {
    constexpr int kFirst = kPanel * kPlanes;
    tiles.template store<kFirst>(sums);
    if constexpr (kPlanes > 1) tiles.template store<kFirst + 1>(sums + kTileBytes / 4);
    if constexpr (kPlanes > 2) tiles.template store<kFirst + 2>(sums + 2 * kTileBytes / 4);
  }

  // Calls add_slice after each product.
  template <class F>
  void multiply_span(Tiles& tiles, const std::int8_t* x, i64 stride, i64 span, F add_slice) {
    tiles.template load_weights<kWeightTile>(weights(0, span));
    add_planes<0>(tiles, x, stride, add_slice);
    if (count_ == 1) return;
    tiles.template load_weights<kWeightTile>(weights(1, span));
    add_planes<1>(tiles, x, stride, add_slice);
  }
  template <int kPanel, class F>
  static void add_planes(Tiles& tiles, const std::int8_t* x, i64 stride, F add_slice) {
    add_plane<kPanel, 0>(tiles, x, stride, add_slice);
    if constexpr (kPlanes > 1) add_plane<kPanel, 1>(tiles, x, stride, add_slice);
    if constexpr (kPlanes > 2) add_plane<kPanel, 2>(tiles, x, stride, add_slice);
  }
  template <int kPanel, int kPlane, class F>
  static void add_plane(Tiles& tiles, const std::int8_t* x, i64 stride, F add_slice) {
    tiles.template load_input<kInputTile>(x + kPlane * kTileNumbers, stride);
    tiles.template add_dot<kPanel * kPlanes + kPlane, kInputTile, kWeightTile>();
    add_slice();
  }

  const Matrix& w_;
  i64 groups_;
  int count_;
  std::uint8_t* spread_;
  QuantizedPanel panels_[2];
};

// Multiplies x in the layout of this file by whole panels [begin, end) of w. scratch:
// tile_scratch_bytes, aligned to 64 bytes.
template <class Tiles>
void tile_matmul(const Matrix& w, PackedRows x, float* y, i64 ldy, i64 begin, i64 end,
                 void* scratch) {
  Tiles tiles;
  with_precision(w, [&]<int kBits, int kPlanes>() {
    for (i64 n = begin; n < end; n += 2 * kPanelRows) {
      const int panels = end - n > kPanelRows ? 2 : 1;
      PanelPair<Tiles, kBits, kPlanes> pair(w, n, panels, static_cast<std::uint8_t*>(scratch));
      for (i64 m = 0; m < x.count; m += 16) {
        const i64 rows = x.count - m < 16 ? x.count - m : 16;
        pair.multiply(tiles, {x.data + m * x.stride, rows, x.stride}, y + m * ldy + n, ldy);
      }
    }
  });
}

// The same product on ScalarTiles, for any rows of x. y: [count, w.rows], of which the last partial
// panel is not written. scratch: tile_reference_scratch floats, aligned to 64 bytes.
inline i64 tile_input_stride(const Matrix& w) {
  return (w.width * w.planes / 4 + 2 * (w.width / w.group) + 15) / 16 * 16;
}
inline i64 tile_reference_scratch(const Matrix& w, i64 count) {
  return count * tile_input_stride(w) + tile_scratch_bytes(w) / 4;
}
inline void tile_reference(const Matrix& w, const float* x, i64 count, float* y, float* scratch) {
  const i64 stride = tile_input_stride(w);
  with_precision(w, [&]<int kBits, int kPlanes>() {
    for (i64 m = 0; m < count; m++) {
      float* row = scratch + m * stride;
      quantize_input_row<kBits, kPlanes, 64>(w, x + m * w.width, row, row + w.width * kPlanes / 4);
    }
  });
  const i64 whole = w.rows - w.rows % kPanelRows;
  tile_matmul<ScalarTiles>(w, {scratch, count, stride}, y, w.rows, 0, whole,
                           scratch + count * stride);
}

}  // namespace mlxrunner::ISA
