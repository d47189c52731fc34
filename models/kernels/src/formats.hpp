// How the numbers of a matrix that is not packed become float32: a format for each kind.
//
// Knows: `V`, sixteen lanes (lanes_*.hpp). Must not know: x, tiles, threads.
//
// A format is a cursor on a few rows. `at(r, k)`: sixteen numbers of row r; `tail(r, k, n)`: the
// last n, where a row ends within a vector.
#pragma once

#include "kernels.hpp"

namespace mlxrunner::ISA {

using i64 = std::int64_t;

// Loops over registers: unrolled, or the registers would lie in memory.
#define MLXRUNNER_UNROLL _Pragma("GCC unroll 32")

struct F32 {
  const float* data;
  i64 width;
  V at(int r, i64 k) const { return load(data + r * width + k); }
  V tail(int r, i64 k, i64 n) const { return load(data + r * width + k, n); }
};

template <bool kBf16>
struct Half {
  const std::uint16_t* data;
  i64 width;
  V at(int r, i64 k) const {
    const std::uint16_t* p = data + r * width + k;
    return kBf16 ? load_bf16(p) : load_f16(p);
  }
  V tail(int r, i64 k, i64 n) const { return load(data + r * width + k, n, kBf16); }
};

// The rows from n on.
template <class Format>
inline Format rows_of(const Matrix& w, i64 n) {
  return {static_cast<decltype(Format::data)>(w.data) + n * w.width, w.width};
}

// Calls `with` of an empty Format of the matrix' kind, which is not a packed one.
template <class F>
inline auto for_format(const Matrix& w, F with) {
  switch (w.weight) {
    case Weight::bf16:
      return with(Half<true>{});
    case Weight::f16:
      return with(Half<false>{});
    default:
      return with(F32{});
  }
}

}  // namespace mlxrunner::ISA
