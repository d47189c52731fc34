// Tile operations: products of sixteen rows of x by the sixteen rows of a panel, over 64 numbers.
//
// Knows: tiles, which are registers of 16 rows of 64 bytes. Must not know: scales, panels, threads.
//
// There are eight tiles. A tile has 64 signed bytes of x per row, or the numbers of a panel, or
// sixteen 32-bit sums per row. A tile of a panel has one row for each four numbers k, and in it
// four unsigned bytes for each row of the panel. This is also the layout of a panel with 8 bits.
//
//   ScalarTiles   plain C++, the reference
//   AmxTiles      Intel AMX. Both have the same functions and give the same sums.
//
// An object owns the tiles of a thread during its life. AmxTiles releases them in its destructor,
// because the system saves tiles that are in use at every context switch, and a forked process
// would inherit them.
#pragma once

#include <cstdint>

namespace mlxrunner::ISA {

inline constexpr std::int64_t kTileNumbers = 64, kTileBytes = 1024;

class ScalarTiles {
 public:
  // Sets the number of rows of x, from 1 to 16. The contents of all tiles are undefined afterwards.
  void set_rows(int rows) { rows_ = rows; }

  template <int T>
  void zero() {
    __builtin_memset(tiles_[T], 0, kTileBytes);
  }
  // Loads rows of x, which are `stride` bytes apart.
  template <int T>
  void load_input(const std::int8_t* x, std::int64_t stride) {
    for (int m = 0; m < rows_; m++)
      __builtin_memcpy(tiles_[T] + m * kTileNumbers, x + m * stride, kTileNumbers);
  }
  template <int T>
  void load_weights(const void* numbers) {
    __builtin_memcpy(tiles_[T], numbers, kTileBytes);
  }
  // Adds the products of the rows of tile X and the panel in tile W to the sums in tile S.
  template <int S, int X, int W>
  void add_dot() {
    const auto* weights = reinterpret_cast<const std::uint8_t*>(tiles_[W]);
    for (int m = 0; m < rows_; m++)
      for (int n = 0; n < 16; n++) {
        std::int32_t sum;
        __builtin_memcpy(&sum, tiles_[S] + m * kTileNumbers + n * 4, sizeof sum);
        for (int k = 0; k < kTileNumbers; k++)
          sum += tiles_[X][m * kTileNumbers + k] * weights[k / 4 * kTileNumbers + n * 4 + k % 4];
        __builtin_memcpy(tiles_[S] + m * kTileNumbers + n * 4, &sum, sizeof sum);
      }
  }
  // Stores the sums of all rows, sixteen per row.
  template <int T>
  void store(std::int32_t* sums) {
    __builtin_memcpy(sums, tiles_[T], static_cast<std::size_t>(rows_ * kTileNumbers));
  }

 private:
  int rows_ = 16;
  std::int8_t tiles_[8][kTileBytes];
};

#if defined(MLXRUNNER_AMX)

// These functions are inline assembly. GCC 12's _tile_loadconfig declares that it reads 8 of 64
// bytes, so the compiler never writes the others. Its tile loads do not declare that they read
// memory.
class AmxTiles {
 public:
  AmxTiles() { set_rows(16); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
  ~AmxTiles() { asm volatile("tilerelease" ::: "memory"); }

  void set_rows(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    Config config{};
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
      config.bytes_per_row[i] = kTileNumbers;
      // a panel always has sixteen rows
      config.rows[i] = static_cast<std::uint8_t>(i == kWeightTile ? 16 : rows);
    }
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }

  template <int T>
  void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  void load_input(const std::int8_t* x, std::int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(x), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  void load_weights(const void* numbers) {
    static_assert(T == kWeightTile);
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(numbers), "r"(kTileNumbers), "i"(T)
                 : "memory");
  }
  template <int S, int X, int W>
  void add_dot() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(S), "i"(X), "i"(W));
  }
  template <int T>
  void store(std::int32_t* sums) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(sums), "r"(kTileNumbers), "i"(T)
                 : "memory");
  }

 private:
  static constexpr int kWeightTile = 7;
  struct alignas(64) Config {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t bytes_per_row[16];
    std::uint8_t rows[16];
  };
  static_assert(sizeof(Config) == 64);

  int rows_ = 0;
};

#endif

}  // namespace mlxrunner::ISA
