// Pairs of 16-bit integers in NEON registers, for int16_dot.hpp.
#pragma once

#include "simd_neon.hpp"

namespace mlxrunner::ISA {

inline constexpr char kName[] = "neon";
inline constexpr int kMaxIntRows = 4;

// Words of kWordRows rows, and sums of integer pairs. The two integers of a pair have separate
// sums, which `to_float` adds.
using WordVector = uint16x8_t;
struct IntVector {
  int32x4_t lo, hi;
};
inline WordVector load_words(const std::uint32_t* p) { return vreinterpretq_u16_u32(vld1q_u32(p)); }
inline WordVector broadcast_word(const std::int8_t* p) {
  std::uint32_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return vreinterpretq_u16_u32(vdupq_n_u32(word));
}
template <int kFrom, int kCount>
inline WordVector extract_bits(WordVector a) {
  const WordVector down = vshlq_u16(a, vdupq_n_s16(-kFrom));
  return kFrom + kCount == 16 ? down : vandq_u16(down, vdupq_n_u16((1 << kCount) - 1));
}
inline IntVector zero_int() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
inline void add_pairs(IntVector& sum, WordVector x, WordVector y) {
  const int16x8_t a = vreinterpretq_s16_u16(x), b = vreinterpretq_s16_u16(y);
  sum.lo = vmlal_s16(sum.lo, vget_low_s16(a), vget_low_s16(b));
  sum.hi = vmlal_high_s16(sum.hi, a, b);
}
inline IntVector add_int(IntVector x, IntVector y) {
  return {vaddq_s32(x.lo, y.lo), vaddq_s32(x.hi, y.hi)};
}
inline RowInts join_pairs(IntVector x) { return vpaddq_s32(x.lo, x.hi); }
inline SubVector to_float(RowInts x) { return vcvtq_f32_s32(x); }
inline SubVector to_float(IntVector x) { return to_float(join_pairs(x)); }

}  // namespace mlxrunner::ISA
