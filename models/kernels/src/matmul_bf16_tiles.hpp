// Multiplication of x by a bfloat16 matrix on tiles.
//
// Knows: tiles (tiles_bf16.hpp), panels of bfloat16 (matmul_float.hpp). Must not know: threads.
//
// An element of x is the sum of three bfloat16 parts, exactly, or of two with an error below 2^-17
// of the element (Matrix::planes). The products of all parts are added to one float32 sum, 32
// numbers k at a time, and for these the smallest part first. So the order of each sum depends only
// on the width and the parts, and each row has the same bits alone and with other rows. But the
// order differs from that of matmul_float.hpp, so a processor uses tiles for all numbers of rows.
//
// Sixteen rows of x form a block, and the last block may have fewer. A block consists of a tile per
// part for each 32 numbers, smallest part last:
//
//   part 0 [rows][32]  part 1 [rows][32]  (part 2 [rows][32])   part 0 [rows][32]  …
//
// If the width is not a multiple of 32, x and the panels are padded with zeros.
#pragma once

#include "matmul_float.hpp"
#include "tiles_bf16.hpp"

namespace mlxrunner::ISA {

inline int bf16_parts(const Matrix& w) { return w.planes == 3 ? 3 : 2; }

// the number of tiles in a panel
inline i64 bf16_steps(const Matrix& w) {
  return (w.width + kBf16TileNumbers - 1) / kBf16TileNumbers;
}

// ---- x ---------------------------------------------------------------------------------------

// The size of a row of x in floats.
inline i64 bf16_input_stride(const Matrix& w) {
  return bf16_steps(w) * bf16_parts(w) * kBf16TileNumbers / 2;
}

// Returns x rounded to bfloat16, and sets x to the remainder, which is exact. An infinity and NaN
// have no remainder. A number that would be rounded to infinity is truncated instead.
inline std::uint16_t split_bf16(float& x) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  const std::uint32_t exponent = 0x7f800000, quiet = 0x00400000;
  const std::uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
  const bool is_finite = (bits & exponent) != exponent,
             is_nan = (bits & 0x7fffffff) > exponent,
             overflows = (rounded & exponent) == exponent;
  std::uint32_t part = is_finite && !overflows ? rounded : bits;
  part = (is_nan ? part | quiet : part) & 0xffff0000;
  float number;
  __builtin_memcpy(&number, &part, sizeof number);
  x = is_finite ? x - number : 0;
  return static_cast<std::uint16_t>(part >> 16);
}

// Packs 32 numbers of a row. The parts are `stride` numbers apart.
template <int kParts>
inline void pack_bf16_parts(const float* x, std::uint16_t* out, i64 stride) {
  float rest[kBf16TileNumbers];
  __builtin_memcpy(rest, x, sizeof rest);
  for (int part = 0; part < kParts; part++, out += stride)
    for (i64 i = 0; i < kBf16TileNumbers; i++) out[i] = split_bf16(rest[i]);
}

template <int kParts>
inline void pack_input_bf16(const Matrix& w, const float* x, i64 count, float* out) {
  const i64 stride = bf16_input_stride(w), whole = w.width / kBf16TileNumbers;
  for (i64 m = 0; m < count; m++) {
    const i64 block = m / 16 * 16, rows = count - block < 16 ? count - block : 16;
    auto* to =
        reinterpret_cast<std::uint16_t*>(out + block * stride) + (m - block) * kBf16TileNumbers;
    const i64 tile = rows * kBf16TileNumbers;
    const float* row = x + m * w.width;
    for (i64 i = 0; i < whole; i++)
      pack_bf16_parts<kParts>(row + i * kBf16TileNumbers, to + i * kParts * tile, tile);
    if (whole == bf16_steps(w)) continue;
    float last[kBf16TileNumbers] = {};
    __builtin_memcpy(last, row + whole * kBf16TileNumbers,
                     static_cast<std::size_t>(w.width % kBf16TileNumbers) * sizeof(float));
    pack_bf16_parts<kParts>(last, to + whole * kParts * tile, tile);
  }
}

inline void pack_input_bf16(const Matrix& w, const float* x, i64 count, float* out) {
  if (bf16_parts(w) == 3) pack_input_bf16<3>(w, x, count, out);
  else pack_input_bf16<2>(w, x, count, out);
}

// ---- x times w -------------------------------------------------------------------------------

// Panels of equal size. tails: the last tile of each panel, if it is padded.
struct Bf16Panels {
  const std::uint16_t* data;
  i64 stride, count;
  const std::uint16_t* tails;
  i64 whole;  // the number of tiles that are not padded

  const std::uint16_t* tile(i64 panel, i64 step) const {
    return step < whole ? data + panel * stride + step * kBf16TileSize
                        : tails + panel * kBf16TileSize;
  }
};

// Sums in memory; rows are `stride` apart.
struct Bf16Sums {
  float* data;
  i64 stride;
};

// These sizes keep two blocks of x in the L1 cache while they are multiplied by a block of panels,
// and these panels in the L2 cache. They do not change the order of a sum.
inline constexpr i64 kBf16BlockPanels = 16, kBf16StepsInL2 = 32, kBf16StepsInL1 = 4;

template <class Tiles, int kParts>
class Bf16Product {
 public:
  Bf16Product(const Matrix& w, PackedRows x, float* scratch) : w_(w), x_(x), steps_(bf16_steps(w)) {
    tails_ = reinterpret_cast<std::uint16_t*>(scratch);
    padded_ = tails_ + kBf16BlockPanels * kBf16TileSize;
    sums_ = scratch + (kBf16BlockPanels + steps_) * kBf16TileSize / 2;
    // one block of rows reads each panel once, from the first to the last tile
    if (x.count <= 16) steps_in_l2_ = steps_in_l1_ = steps_;
  }

  static i64 scratch_floats(const Matrix& w) {
    return (kBf16BlockPanels + bf16_steps(w)) * kBf16TileSize / 2 +
           kBf16BlockPanels * kPanelRows * 32;
  }

  // Multiplies rows [begin, end) of w.
  void multiply(float* y, i64 ldy, i64 begin, i64 end) {
    const i64 whole = end - (end - begin) % kPanelRows;
    const auto* data = static_cast<const std::uint16_t*>(w_.data);
    for (i64 n = begin; n < whole; n += kBf16BlockPanels * kPanelRows) {
      const i64 count = min((whole - n) / kPanelRows, kBf16BlockPanels);
      const Bf16Panels panels{data + n * w_.width, w_.width * kPanelRows, count, tails_,
                              w_.width / kBf16TileNumbers};
      pad_tails(panels);
      for (i64 k = 0; k < steps_; k += steps_in_l2_)
        for (i64 m = 0; m < x_.count; m += 32) multiply_block(panels, m, k, y + m * ldy + n, ldy);
    }
    if (whole < end) multiply_last_panel(whole, y + whole, ldy);
  }

 private:
  static i64 min(i64 a, i64 b) { return a < b ? a : b; }

  void pad_tails(const Bf16Panels& panels) {
    if (panels.whole == steps_) return;
    const i64 count = (w_.width - panels.whole * kBf16TileNumbers) * kPanelRows;
    for (i64 i = 0; i < panels.count; i++)
      copy_padded(panels.data + i * panels.stride + panels.whole * kBf16TileSize, count,
                  tails_ + i * kBf16TileSize, kBf16TileSize);
  }
  // Copies the last columns of a panel. An odd one has no second number of its pairs.
  static void copy_padded(const std::uint16_t* in, i64 count, std::uint16_t* out, i64 size) {
    const i64 pairs = count / (2 * kPanelRows) * 2 * kPanelRows;
    __builtin_memcpy(out, in, static_cast<std::size_t>(pairs) * 2);
    __builtin_memset(out + pairs, 0, static_cast<std::size_t>(size - pairs) * 2);
    if (pairs < count)
      for (i64 r = 0; r < kPanelRows; r++) out[pairs + 2 * r] = in[pairs + r];
  }

  // Multiplies the last panel, which has fewer rows.
  void multiply_last_panel(i64 n, float* y, i64 ldy) {
    const i64 rows = w_.rows - n, width = w_.width, pairs = width / 2;
    const auto* data = static_cast<const std::uint16_t*>(w_.data) + n * width;
    __builtin_memset(padded_, 0, static_cast<std::size_t>(steps_ * kBf16TileSize) * 2);
    for (i64 i = 0; i < pairs; i++)
      __builtin_memcpy(padded_ + i * 2 * kPanelRows, data + i * 2 * rows,
                       static_cast<std::size_t>(rows) * 4);
    for (i64 r = 0; r < rows && width % 2; r++)
      padded_[(pairs * kPanelRows + r) * 2] = data[2 * pairs * rows + r];
    const Bf16Panels panel{padded_, 0, 1, nullptr, steps_};
    alignas(64) float out[32 * kPanelRows];
    for (i64 m = 0; m < x_.count; m += 32) {
      for (i64 k = 0; k < steps_; k += steps_in_l2_) multiply_block(panel, m, k, out, kPanelRows);
      for (i64 i = 0; i < min(x_.count - m, 32); i++)
        for (i64 r = 0; r < rows; r++) y[(m + i) * ldy + r] = out[i * kPanelRows + r];
    }
  }

  // Multiplies up to 32 rows of x and steps_in_l2_ tiles of each panel. y: of the first of these
  // rows and panels.
  void multiply_block(const Bf16Panels& panels, i64 m, i64 k, float* y, i64 ldy) {
    const i64 first = min(x_.count - m, 16), second = min(x_.count - m - first, 16),
              last = min(k + steps_in_l2_, steps_);
    tiles_.set_rows(static_cast<int>(first), static_cast<int>(second));
    for (i64 from = k; from < last; from += steps_in_l1_) {
      const i64 to = min(from + steps_in_l1_, last);
      for (i64 n = 0; n < panels.count; n += 2) {
        // between the first and the last tiles, sums are next to each other
        const Bf16Sums result{y + n * kPanelRows, ldy},
            partial{sums_ + n * kPanelRows * 32, 2 * kPanelRows};
        with_sizes(second ? 2 : 1, panels.count - n, [&]<int kBlocks, int kPanels>() {
          add_products<kBlocks, kPanels>(panels, n, m, from, to, from > k ? partial : result,
                                         to < last ? partial : result);
        });
      }
    }
  }

  template <class F>
  static void with_sizes(int blocks, i64 panels, F f) {
    if (blocks == 2) panels > 1 ? f.template operator()<2, 2>() : f.template operator()<2, 1>();
    else panels > 1 ? f.template operator()<1, 2>() : f.template operator()<1, 1>();
  }

  // the rows of x of the block that begins at row m
  const std::uint16_t* input(i64 m) const {
    return reinterpret_cast<const std::uint16_t*>(x_.data + m * x_.stride);
  }
  i64 tile_size(i64 m) const { return min(x_.count - m, 16) * kBf16TileNumbers; }

  // Adds the products of tiles [from, to) of one or two panels and one or two blocks of x to the
  // sums in `in`, or to zero for the first tiles.
  template <int kBlocks, int kPanels>
  void add_products(const Bf16Panels& panels, i64 n, i64 m, i64 from, i64 to, Bf16Sums in,
                    Bf16Sums out) {
    const i64 sizes[] = {tile_size(m), kBlocks > 1 ? tile_size(m + 16) : 0};
    const std::uint16_t* x[] = {input(m) + from * kParts * sizes[0],
                                kBlocks > 1 ? input(m + 16) + from * kParts * sizes[1] : nullptr};
    for_sums<kBlocks, kPanels>([&]<int kBlock, int kPanel>() {
      constexpr int kSum = 2 * kBlock + kPanel;
      if (from)
        tiles_.template load_sums<kSum>(in.data + 16 * (kBlock * in.stride + kPanel), in.stride);
      else tiles_.template zero<kSum>();
    });
    for (i64 step = from; step < to; step++) {
      const std::uint16_t* w = panels.tile(n, step);
      if constexpr (kBlocks == 1) prefetch_tile(w);
      tiles_.template load_weights<4>(w);
      if constexpr (kPanels > 1) {
        const std::uint16_t* next = panels.tile(n + 1, step);
        if constexpr (kBlocks == 1) prefetch_tile(next);
        tiles_.template load_weights<5>(next);
      }
      MLXRUNNER_UNROLL
      for (int part = kParts - 1; part >= 0; part--) {
        add_part<0, kPanels>(x[0] + part * sizes[0]);
        if constexpr (kBlocks > 1) add_part<1, kPanels>(x[1] + part * sizes[1]);
      }
      for (int i = 0; i < kBlocks; i++) x[i] += kParts * sizes[i];
    }
    for_sums<kBlocks, kPanels>([&]<int kBlock, int kPanel>() {
      tiles_.template store_sums<2 * kBlock + kPanel>(
          out.data + 16 * (kBlock * out.stride + kPanel), out.stride);
    });
  }

  template <int kBlock, int kPanels>
  void add_part(const std::uint16_t* x) {
    tiles_.template load_input<6 + kBlock>(x);
    tiles_.template add_dot<2 * kBlock, 6 + kBlock, 4>();
    if constexpr (kPanels > 1) tiles_.template add_dot<2 * kBlock + 1, 6 + kBlock, 5>();
  }

  // Panels of one block of rows come from memory.
  static void prefetch_tile(const std::uint16_t* w) {
    MLXRUNNER_UNROLL
    for (int i = 0; i < 16; i++)
      prefetch(reinterpret_cast<std::uintptr_t>(w) + kPrefetchBytes + 64 * i);
  }

  template <int kBlocks, int kPanels, class F>
  static void for_sums(F f) {
    f.template operator()<0, 0>();
    if constexpr (kPanels > 1) f.template operator()<0, 1>();
    if constexpr (kBlocks > 1) f.template operator()<1, 0>();
    if constexpr (kBlocks > 1 && kPanels > 1) f.template operator()<1, 1>();
  }

  const Matrix& w_;
  PackedRows x_;
  i64 steps_, steps_in_l2_ = kBf16StepsInL2, steps_in_l1_ = kBf16StepsInL1;
  std::uint16_t *tails_, *padded_;
  float* sums_;
  Tiles tiles_;
};

// Multiplies x in the layout of this file. scratch: bf16_tile_scratch floats, aligned to 64 bytes.
inline i64 bf16_tile_scratch(const Matrix& w) {
  return Bf16Product<ScalarBf16Tiles, 2>::scratch_floats(w);
}
template <class Tiles>
void bf16_tile_matmul(const Matrix& w, PackedRows x, float* y, i64 ldy, i64 begin, i64 end,
                      float* scratch) {
  if (bf16_parts(w) == 3) Bf16Product<Tiles, 3>(w, x, scratch).multiply(y, ldy, begin, end);
  else Bf16Product<Tiles, 2>(w, x, scratch).multiply(y, ldy, begin, end);
}

// The same product on ScalarBf16Tiles. y: [count, w.rows]. scratch: aligned to 64 bytes.
inline i64 bf16_tile_reference_scratch(const Matrix& w, i64 count) {
  return count * bf16_input_stride(w) + bf16_tile_scratch(w);
}
inline void bf16_tile_reference(const Matrix& w, const float* x, i64 count, float* y,
                                float* scratch) {
  const i64 stride = bf16_input_stride(w);
  pack_input_bf16(w, x, count, scratch);
  bf16_tile_matmul<ScalarBf16Tiles>(w, {scratch, count, stride}, y, w.rows, 0, w.rows,
                                    scratch + count * stride);
}

}  // namespace mlxrunner::ISA
