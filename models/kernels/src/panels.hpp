// Panels: sixteen rows of a matrix, interleaved in memory. repack.hpp creates them.
#pragma once

#include "kernels.hpp"

namespace mlxrunner::ISA {

using i64 = std::int64_t;

// Unrolls loops over registers. Otherwise the compiler would keep the registers in memory.
#define MLXRUNNER_UNROLL _Pragma("GCC unroll 32")

// the number of bytes to prefetch ahead
inline constexpr std::uintptr_t kPrefetchBytes = 8192;

// Pads `count` rows of `rows` elements of `size` bytes to kPanelRows elements each, with zeros.
inline void pad_rows(const void* in, i64 count, i64 rows, i64 size, void* out) {
  for (i64 i = 0; i < count; i++) {
    char* row = static_cast<char*>(out) + i * kPanelRows * size;
    __builtin_memset(row, 0, static_cast<std::size_t>(kPanelRows * size));
    __builtin_memcpy(row, static_cast<const char*>(in) + i * rows * size,
                     static_cast<std::size_t>(rows * size));
  }
}

// bias: of all rows of w, or null.
inline void add_bias(const float* bias, float* y, i64 ldy, i64 count, i64 begin, i64 end) {
  if (!bias) return;
  for (i64 m = 0; m < count; m++)
    for (i64 n = begin; n < end; n++) y[m * ldy + n] = y[m * ldy + n] + bias[n];
}

}  // namespace mlxrunner::ISA
