// Tile operations: products of two blocks of up to sixteen rows of x by the sixteen rows of a panel,
// over 32 numbers of bfloat16, with float32 sums.
//
// Knows: tiles, which are registers of 16 rows of 64 bytes. Must not know: parts of x, panels,
// threads.
//
// There are eight tiles: sums (0 to 3, of the first block of x in 0 and 1), panels (4 and 5) and x
// (6 of the first block, 7 of the second). A tile of x has 32 numbers per row. A tile of a panel has
// one row for each two numbers k, and in it two numbers for each row of the panel. This is also the
// layout of a panel of bfloat16. A tile of sums has sixteen float32 per row.
//
// A product of tiles computes two sums from zero, of the even and of the odd k, then adds them to
// each other and then to the tile of sums. Each step rounds to nearest even. Denormal numbers count
// as zero, as operands and as results.
//
//   ScalarBf16Tiles   portable, the reference
//   AmxBf16Tiles      Intel AMX-BF16. Both have the same functions and give the same sums.
//
// tiles.hpp explains the life of such an object.
#pragma once

#include "panels.hpp"

namespace mlxrunner::ISA {

inline constexpr i64 kBf16TileNumbers = 32, kBf16TileSize = 512;  // in numbers

class ScalarBf16Tiles {
 public:
  // Sets the number of rows of x in each block, from 1 to 16, or 0 for a second block that is not
  // used. The contents of all tiles are undefined afterwards.
  void set_rows(int first, int second) { rows_[0] = first, rows_[1] = second; }

  template <int T>
  void zero() {
    __builtin_memset(tiles_[T], 0, sizeof tiles_[T]);
  }
  template <int T>
  void load_input(const std::uint16_t* x) {
    __builtin_memcpy(tiles_[T], x, static_cast<std::size_t>(rows<T>()) * 64);
  }
  template <int T>
  void load_weights(const std::uint16_t* w) {
    __builtin_memcpy(tiles_[T], w, sizeof tiles_[T]);
  }
  // Rows of sums are `stride` floats apart.
  template <int T>
  void load_sums(const float* y, i64 stride) {
    for (int m = 0; m < rows<T>(); m++) __builtin_memcpy(tiles_[T][m], y + m * stride, 64);
  }
  template <int T>
  void store_sums(float* y, i64 stride) {
    for (int m = 0; m < rows<T>(); m++) __builtin_memcpy(y + m * stride, tiles_[T][m], 64);
  }
  // Adds the products of the rows of tile X and the panel in tile W to the sums in tile S.
  template <int S, int X, int W>
  void add_dot() {
    for (int m = 0; m < rows<S>(); m++) {
      V even = zero_lanes(), odd = zero_lanes();
      for (int k = 0; k < 16; k++) {
        const std::uint16_t* x = tiles_[X][m] + 2 * k;
        even = flush(fma(broadcast(x), flush(load_even_bf16(tiles_[W][k])), even));
        odd = flush(fma(broadcast(x + 1), flush(load_odd_bf16(tiles_[W][k])), odd));
      }
      float sums[16];
      __builtin_memcpy(sums, tiles_[S][m], sizeof sums);
      store(sums, flush(add(flush(load(sums)), flush(add(even, odd)))));
      __builtin_memcpy(tiles_[S][m], sums, sizeof sums);
    }
  }

 private:
  template <int T>
  int rows() const {
    return rows_[T == 2 || T == 3 || T == 7];
  }
  static V zero_lanes() { return set1(0); }
  static V broadcast(const std::uint16_t* x) {
    const std::uint32_t bits = static_cast<std::uint32_t>(*x) << 16;
    float number;
    __builtin_memcpy(&number, &bits, sizeof number);
    return flush(set1(number));
  }
  // denormal numbers become zero
  static V flush(V a) { return less(max(a, sub(set1(0), a)), set1(0x1p-126f), set1(0), a); }

  int rows_[2] = {16, 16};
  std::uint16_t tiles_[8][16][32];
};

#if defined(MLXRUNNER_AMX_BF16)

// tiles.hpp explains why these functions are inline assembly.
class AmxBf16Tiles {
 public:
  AmxBf16Tiles() = default;
  AmxBf16Tiles(const AmxBf16Tiles&) = delete;
  AmxBf16Tiles& operator=(const AmxBf16Tiles&) = delete;
  ~AmxBf16Tiles() { asm volatile("tilerelease" ::: "memory"); }

  void set_rows(int first, int second) {
    if (first == first_ && second == second_) return;
    first_ = first, second_ = second;
    Config config{};
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
      const bool is_panel = i == 4 || i == 5, is_second = i == 2 || i == 3 || i == 7;
      const int rows = is_panel ? 16 : is_second ? second : first;
      config.bytes_per_row[i] = rows ? 64 : 0;
      config.rows[i] = static_cast<std::uint8_t>(rows);
    }
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }

  template <int T>
  void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  void load_input(const std::uint16_t* x) {
    load<T>(x, 64);
  }
  template <int T>
  void load_weights(const std::uint16_t* w) {
    load<T>(w, 64);
  }
  template <int T>
  void load_sums(const float* y, i64 stride) {
    load<T>(y, 4 * stride);
  }
  template <int T>
  void store_sums(float* y, i64 stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(y), "r"(4 * stride), "i"(T) : "memory");
  }
  template <int S, int X, int W>
  void add_dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(S), "i"(X), "i"(W));
  }

 private:
  template <int T>
  static void load(const void* p, i64 stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  struct alignas(64) Config {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t bytes_per_row[16];
    std::uint8_t rows[16];
  };
  static_assert(sizeof(Config) == 64);

  int first_ = 0, second_ = 0;
};

#endif

}  // namespace mlxrunner::ISA
