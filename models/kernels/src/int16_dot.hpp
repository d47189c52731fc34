// Dot products of quantized x and w in pairs of 16-bit integers, which every processor supports.
//
// Knows: words of kWordRows rows (simd_*.hpp). Must not know: scales, panels. int8_vnni.hpp
// computes bit-identical results in another way.
//
// An integer of x is 256 * high + low, with low in [-128, 128). It is stored as two 16-bit
// integers. A pair of integers takes 8 bytes:
//
//   high high low low
//
// The J-th pair of a word is bits [J * kBits, (J + 1) * kBits) of both halves of the word. These
// two integers are not adjacent in a row, so x is stored in the same order.
#pragma once

#include "panels.hpp"

namespace mlxrunner::ISA {

inline constexpr int kNumbersPerDot = 2;  // integers of a row per instruction
inline constexpr int kInputBytes = 4;     // per integer of x
// The number of independent accumulators.
constexpr int num_chains(int x) { return x <= 2 ? 2 : 1; }

struct SplitSum {
  IntVector high, low;
};

inline SplitSum zero_sum() { return {zero_int(), zero_int()}; }

template <int kBits, int J>
inline WordVector select_numbers(WordVector words) {
  return extract_bits<J * kBits, kBits>(words);
}

inline void add_dot(SplitSum& sum, WordVector numbers, const std::int8_t* x) {
  add_pairs(sum.high, numbers, broadcast_word(x));
  add_pairs(sum.low, numbers, broadcast_word(x + 4));
}

inline SplitSum add_sums(SplitSum a, SplitSum b) {
  return {add_int(a.high, b.high), add_int(a.low, b.low)};
}

// Stores the integers of x in the order of the words.
template <int kBits>
inline void store_input(const std::int32_t* numbers, i64 count, std::int8_t* out) {
  constexpr int kPerWord = 32 / kBits;
  std::int16_t word[2 * kPerWord];
  for (i64 n = 0; n < count; n += kPerWord, out += sizeof word) {
    MLXRUNNER_UNROLL
    for (int k = 0; k < kPerWord; k++) {
      const int pair = k % 2 * (kPerWord / 4) + k / 4, half = k % 4 / 2;
      word[4 * pair + half] = static_cast<std::int16_t>((numbers[n + k] + 128) >> 8);
      word[4 * pair + 2 + half] = static_cast<std::int8_t>(numbers[n + k]);
    }
    __builtin_memcpy(out, word, sizeof word);
  }
}

inline SubVector high_part(const SplitSum& sum) { return to_float(sum.high); }
inline SubVector low_part(const SplitSum& sum) { return to_float(sum.low); }

}  // namespace mlxrunner::ISA
