// Dot products of quantized x and w in pairs of 16-bit integers, which every processor supports.
//
// Knows: words of kWordRows rows (simd_*.hpp). Must not know: scales, panels. int8_vnni.hpp
// and int8_neon.hpp compute bit-identical results differently.
//
// An integer of x with three planes is 256 * high + low, with low in [-128, 128). It is stored as
// two 16-bit integers. A pair of integers takes 8 bytes:
//
//   high high low low
//
// An integer with one or two planes is stored as one 16-bit integer.
//
// The J-th pair of a word is bits [J * kBits, (J + 1) * kBits) of both halves of the word. These
// two integers are not adjacent in a row, so x is stored in the same order.
#pragma once

#include "panels.hpp"

namespace mlxrunner::ISA {

inline constexpr int kNumbersPerDot = 2;  // integers of a row per instruction
constexpr int step_numbers(int bits) { return 32 / bits; }  // integers of a row per iteration
constexpr int num_sums(int planes) { return planes == 3 ? 2 : 1; }  // accumulators per row of x
inline constexpr int kHeaderBytes = 0;  // see int8_neon.hpp
constexpr int input_bytes(int, int planes) { return 2 * num_sums(planes); }  // per integer of x
constexpr bool has_byte_step(int, int) { return false; }  // see int16_avx2.hpp
constexpr bool fuses_codes(int) { return false; }          // see int8_vnni.hpp
inline constexpr int kRowSkew = 0;                        // see int16_avx2.hpp

template <int kBits, int J>
inline WordVector select_numbers(const std::uint32_t* words) {
  return extract_bits<J * kBits, kBits>(load_words(words));
}

// M rows of x, which are `stride` bytes apart.
template <int M>
struct InputRows {
  const std::int8_t* x;
  i64 stride;

  void advance(i64 bytes) { x += bytes; }
};

// The J-th numbers of a word by row kRow of x. sums: of the high and the low parts, or of the whole
// integers.
template <int kRow, int J, int kSums, int M>
[[gnu::always_inline]]
inline void add_dot(IntVector (&sums)[kSums], WordVector numbers, const InputRows<M>& x) {
  const std::int8_t* at = x.x + kRow * x.stride + J * kNumbersPerDot * 2 * kSums;
  MLXRUNNER_UNROLL
  for (int s = 0; s < kSums; s++) add_pairs(sums[s], numbers, broadcast_word(at + 4 * s));
}

// Stores the integers of x in the order of the words.
template <int kBits, int kPlanes>
inline void store_input(const std::int32_t* numbers, i64 count, std::int8_t* out) {
  constexpr int kPerWord = 32 / kBits, kSums = num_sums(kPlanes);
  std::int16_t word[kSums * kPerWord];
  for (i64 n = 0; n < count; n += kPerWord, out += sizeof word) {
    MLXRUNNER_UNROLL
    for (int k = 0; k < kPerWord; k++) {
      const int pair = k % 2 * (kPerWord / 4) + k / 4, half = k % 4 / 2;
      if constexpr (kSums == 1) {
        word[2 * pair + half] = static_cast<std::int16_t>(numbers[n + k]);
      } else {
        word[4 * pair + half] = static_cast<std::int16_t>((numbers[n + k] + 128) >> 8);
        word[4 * pair + 2 + half] = static_cast<std::int8_t>(numbers[n + k]);
      }
    }
    __builtin_memcpy(out, word, sizeof word);
  }
}

// The sum of products, exact. With two accumulators, it may have more than 32 bits.
template <int kSums>
inline RowInts join_exact(const IntVector (&sums)[kSums]) {
  static_assert(kSums == 1);
  return join_pairs(sums[0]);
}
// The same as float32.
template <int kSums>
inline SubVector join_sums(const IntVector (&sums)[kSums]) {
  SubVector total = to_float(sums[kSums - 1]);
  if constexpr (kSums == 2) add_product(total, to_float(sums[0]), broadcast(256));
  return total;
}

}  // namespace mlxrunner::ISA
