// Whole numbers of x, and what they make with numbers of w, in pairs of 16 bits: what every
// processor multiplies and adds.
//
// Knows: words of kAbreast rows (lanes_*.hpp). Must not know: scales, strips. The other way, to the
// same bits: whole_quads.hpp.
//
// A number of x is 256 * high + low, low in [-128, 128), as two of 16 bits. A pair's are 8 bytes:
//
//   high high low low
//
// The J-th pair of a word are bits [J * kBits, (J + 1) * kBits) of its halves, which are not
// neighbours in a row; those of x are put into that order.
#pragma once

#include "strips.hpp"

namespace mlxrunner::ISA {

inline constexpr int kShare = 2;        // numbers of a row that meet at once
inline constexpr int kNumberBytes = 4;  // of x
// Sums that do not wait for each other.
constexpr int chains(int x) { return x <= 2 ? 2 : 1; }

struct Whole {
  Sum high, low;
};

inline Whole nothing() { return {none(), none()}; }

template <int kBits, int J>
inline Words share(Words words) {
  return bits_of<J * kBits, kBits>(words);
}

inline void add_share(Whole& sum, Words numbers, const std::int8_t* x) {
  add_pairs(sum.high, numbers, all_words(x));
  add_pairs(sum.low, numbers, all_words(x + 4));
}

inline Whole both(Whole a, Whole b) { return {both(a.high, b.high), both(a.low, b.low)}; }

// Numbers of x, word by word.
template <int kBits>
inline void put(const std::int32_t* numbers, i64 count, std::int8_t* out) {
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

inline Part high_of(const Whole& sum) { return to_part(sum.high); }
inline Part low_of(const Whole& sum) { return to_part(sum.low); }

}  // namespace mlxrunner::ISA
