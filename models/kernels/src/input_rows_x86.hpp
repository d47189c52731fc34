// The addresses of a few rows of quantized x, for the inline assembly of int8_vnni.hpp and
// int16_avx2.hpp.
#pragma once

#include "panels.hpp"

namespace mlxrunner::ISA {

// M rows of x, which are `stride` bytes apart. Four rows share a base address, so that the
// addresses of all rows need few registers. Otherwise GCC 12 keeps addresses in memory.
template <int M>
struct InputRows {
  const std::int8_t* base[(M + 3) / 4];
  i64 stride, triple_stride;

  InputRows(const std::int8_t* x, i64 row_stride)
      : stride(row_stride), triple_stride(3 * row_stride) {
    MLXRUNNER_UNROLL
    for (int i = 0; i < (M + 3) / 4; i++) base[i] = x + 4 * i * stride;
  }
  void advance(i64 bytes) {
    MLXRUNNER_UNROLL
    for (int i = 0; i < (M + 3) / 4; i++) base[i] += bytes;
  }
};

}  // namespace mlxrunner::ISA
