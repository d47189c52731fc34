// How the numbers of a matrix become float32: a format for each kind.
//
// Knows: `V`, sixteen lanes (lanes_*.hpp), packed words. Must not know: x, tiles, threads.
//
// A format is a cursor on a few rows. kStep: how many numbers of row r `at(r, k)` stands for; it
// has kStep / 16 vectors, `get(p)`. `tail(r, k, n)`: the last n, where a row ends within a vector.
// kArranged: whether lanes get other numbers than those that follow each other.
#pragma once

#include "kernels.hpp"

namespace mlxrunner::ISA {

using i64 = std::int64_t;

// Loops over registers: unrolled, or the registers would lie in memory.
#define MLXRUNNER_UNROLL _Pragma("GCC unroll 32")

struct F32 {
  static constexpr int kStep = 16;
  static constexpr bool kArranged = false;
  const float* data;
  i64 width;
  struct At {
    const float* p;
    V get(int) const { return load(p); }
  };
  At at(int r, i64 k) const { return {data + r * width + k}; }
  V tail(int r, i64 k, i64 n) const { return load(data + r * width + k, n); }
};

template <bool kBf16>
struct Half {
  static constexpr int kStep = 16;
  static constexpr bool kArranged = false;
  const std::uint16_t* data;
  i64 width;
  struct At {
    const std::uint16_t* p;
    V get(int) const { return kBf16 ? load_bf16(p) : load_f16(p); }
  };
  At at(int r, i64 k) const { return {data + r * width + k}; }
  V tail(int r, i64 k, i64 n) const { return load(data + r * width + k, n, kBf16); }
};

// Scales and biases of a few rows, as float32. stride: from one row to the next.
struct Scales {
  const float *scales, *biases;
  i64 stride;
  int shift;  // of a number's place to its group's
};

struct Q8 {
  static constexpr int kStep = 32;
  static constexpr bool kArranged = false;
  const std::uint8_t* data;
  i64 row;
  Scales of;
  struct At {
    const std::uint8_t* p;
    V scale, bias;
    V get(int i) const { return fma(load_u8(p + 16 * i), scale, bias); }
  };
  At at(int r, i64 k) const {
    const i64 g = r * of.stride + (k >> of.shift);
    return {data + r * row + k, set1(of.scales[g]), set1(of.biases[g])};
  }
};

template <int kGroup>  // 32, or 64 for all multiples of it
struct Q4 {
  static constexpr int kStep = kGroup;
  static constexpr bool kArranged = true;
  const std::uint8_t* data;
  i64 row;
  Scales of;
  struct At {
    Nibbles numbers;
    V get(int p) const {
      if constexpr (kGroup == 32) return numbers.at32(p);
      else return numbers.at64(p);
    }
  };
  At at(int r, i64 k) const {
    const i64 g = r * of.stride + (k >> of.shift);
    const std::uint8_t* p = data + r * row + k / 2;
    if constexpr (kGroup == 32) return {Nibbles::of32(p, of.scales[g], of.biases[g])};
    else return {Nibbles::of64(p, of.scales[g], of.biases[g])};
  }
  // where in its step the number that stands in lane l of vector p lies
  static constexpr int natural(int p, int l) {
    return kGroup == 32 ? 8 * (l % 4) + 4 * p + l / 4 : 8 * (l % 8) + 2 * p + l / 8;
  }
};

inline void widen(const void* from, Float type, i64 count, float* into) {
  const auto* half = static_cast<const std::uint16_t*>(from);
  for (i64 i = 0; i < count; i += 16)
    store(into + i, load(half + i, count - i < 16 ? count - i : 16, type == Float::bf16));
}

// Of the rows from n: read in place where they are float32, else brought into `room`,
// 2 * count rows of groups padded to 16.
inline Scales scales_of(const Matrix& w, i64 n, i64 count, float* room) {
  const i64 groups = w.width / w.group, padded = (groups + 15) / 16 * 16;
  const int shift = w.group == 32 ? 5 : w.group == 64 ? 6 : 7;
  if (w.scale == Float::f32)
    return {static_cast<const float*>(w.scales) + n * groups,
            static_cast<const float*>(w.biases) + n * groups, groups, shift};
  float* biases = room + count * padded;
  for (i64 r = 0; r < count; r++) {
    const i64 at = (n + r) * groups;
    widen(static_cast<const std::uint16_t*>(w.scales) + at, w.scale, groups, room + r * padded);
    widen(static_cast<const std::uint16_t*>(w.biases) + at, w.scale, groups, biases + r * padded);
  }
  return {room, biases, padded, shift};
}

template <class Format>
inline Format rows_of(const Matrix& w, i64 n, i64 count, float* room) {
  if constexpr (requires(Format f) { f.of; })
    return {static_cast<const std::uint8_t*>(w.data) + n * w.row_bytes(), w.row_bytes(),
            scales_of(w, n, count, room)};
  else return {static_cast<decltype(Format::data)>(w.data) + n * w.width, w.width};
}

// Calls `with` of an empty Format of the matrix' kind.
template <class F>
inline auto for_format(const Matrix& w, F with) {
  switch (w.weight) {
    case Weight::bf16:
      return with(Half<true>{});
    case Weight::f16:
      return with(Half<false>{});
    case Weight::q8:
      return with(Q8{});
    case Weight::q4:
      return w.group == 32 ? with(Q4<32>{}) : with(Q4<64>{});
    default:
      return with(F32{});
  }
}

}  // namespace mlxrunner::ISA
