// Stored keys and values: loads as float32, and the rounding of new ones.
//
// Knows: `V`, the types of a cache. Must not know: attention, slots.
//
// Loads are exact. Therefore attention to a cache of a 16-bit type has the same bits as attention
// to a float32 cache with the rounded numbers.
#pragma once

#include "panels.hpp"

namespace mlxrunner::ISA {

struct StoredF32 {
  using Number = float;
  static V load_16(const float* p) { return load(p); }
  static V load_first(const float* p, i64 n) { return load(p, n); }
};
struct StoredBf16 {
  using Number = std::uint16_t;
  static V load_16(const std::uint16_t* p) { return load_bf16(p); }
  static V load_first(const std::uint16_t* p, i64 n) { return load(p, n, true); }
};
struct StoredF16 {
  using Number = std::uint16_t;
  static V load_16(const std::uint16_t* p) { return load_f16(p); }
  static V load_first(const std::uint16_t* p, i64 n) { return load(p, n, false); }
};

// Converts `count` rows of `width` numbers to float32 rows of `padded` numbers. The padding is zero.
template <class T>
inline void widen_rows(const typename T::Number* rows, i64 step, i64 count, i64 width, float* out,
                       i64 padded) {
  for (i64 r = 0; r < count; r++) {
    const typename T::Number* from = rows + r * step;
    float* to = out + r * padded;
    i64 k = 0;
    for (; k + 16 <= width; k += 16) store(to + k, T::load_16(from + k));
    if (k < width) store(to + k, T::load_first(from + k, width - k));
  }
}

// The loop is simple enough for the compiler to vectorize it.
inline void round_to_bf16(const float* x, i64 n, std::uint16_t* out) {
  for (i64 i = 0; i < n; i++) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, x + i, sizeof bits);
    const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    out[i] = static_cast<std::uint16_t>(nan ? 0x7fc0 : rounded);
  }
}

// Numbers beyond the range of float16 become its largest finite number, because an infinity would
// make all later attention NaN.
inline void round_to_f16(const float* x, i64 n, std::uint16_t* out) {
  const V largest = set1(65504.0f), smallest = set1(-65504.0f);
  for (i64 i = 0; i < n; i += 16) {
    const i64 count = n - i < 16 ? n - i : 16;
    // with these arguments, NaN remains NaN
    const V clamped = max(smallest, min(largest, load(x + i, count)));
    std::uint16_t lanes[16];
    store_f16(lanes, clamped);
    __builtin_memcpy(out + i, lanes, static_cast<std::size_t>(count) * 2);
  }
}

// Stores n numbers, rounded to nearest, ties to even.
inline void store_kv_row(KVType type, const float* x, i64 n, void* out) {
  switch (type) {
    case KVType::bf16:
      return round_to_bf16(x, n, static_cast<std::uint16_t*>(out));
    case KVType::f16:
      return round_to_f16(x, n, static_cast<std::uint16_t*>(out));
    case KVType::f32:
      __builtin_memcpy(out, x, static_cast<std::size_t>(n) * sizeof(float));
  }
}

}  // namespace mlxrunner::ISA
