// Tile operations of Intel AMX: products of up to sixteen rows of x by the sixteen rows of a panel.
//
// Knows: tiles, which are registers of 16 rows of 64 bytes. Must not know: scales, panels, threads.
//
// There are eight tiles:
//
//   0 to 5   sums: sixteen 32-bit integers for each row of x
//   6        x: 64 signed bytes of each row
//   7        weights: for each four numbers of x one row, with four unsigned bytes for each row of
//            the panel. This is also the layout of a panel with 8 bits.
//
// The functions are inline assembly. GCC 12's _tile_loadconfig declares that it reads 8 of 64
// bytes, so the compiler never writes the others. Its tile loads do not declare that they read
// memory.
#pragma once

#include <cstdint>

namespace mlxrunner::ISA {

// An object owns the tiles of a thread during its life. It releases them in its destructor, because
// the system saves tiles that are in use at every context switch, and a forked process would
// inherit them.
class AmxTiles {
 public:
  AmxTiles() = default;
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
  ~AmxTiles() {
    if (rows_) asm volatile("tilerelease" ::: "memory");
  }

  // Sets the number of rows of x, from 1 to 16. The contents of all tiles are undefined afterwards.
  void set_rows(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    Config config{};
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
      config.bytes_per_row[i] = kRowBytes;
      config.rows[i] = static_cast<std::uint8_t>(i == kWeights ? 16 : rows);
    }
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }

  template <int kSums>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kSums));
  }
  // Loads the numbers of the rows of x, row after row.
  static void load_input(const std::int8_t* x) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(x), "r"(kRowBytes), "i"(kInput) : "memory");
  }
  static void load_weights(const std::uint8_t* weights) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(weights), "r"(kRowBytes), "i"(kWeights)
                 : "memory");
  }
  template <int kSums>
  static void add_dot() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kInput), "i"(kWeights));
  }
  // Stores the sums of all rows, sixteen per row.
  template <int kSums>
  static void store(std::int32_t* sums) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(sums), "r"(kRowBytes), "i"(kSums)
                 : "memory");
  }

 private:
  static constexpr int kInput = 6, kWeights = 7;
  static constexpr std::int64_t kRowBytes = 64;

  struct alignas(64) Config {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t bytes_per_row[16];
    std::uint8_t rows[16];
  };
  static_assert(sizeof(Config) == 64);

  int rows_ = 0;
};

}  // namespace mlxrunner::ISA
