// Dot products of quantized x and w with AVX2. The results are bit-identical to those of
// int16_dot.hpp.
//
// Knows: words of kWordRows rows (simd_avx2.hpp). Must not know: scales, panels.
//
// 8-bit weights, and x with two planes, are multiplied in pairs of 16-bit integers, with the layout
// of x of int16_dot.hpp.
//
// Otherwise, the low byte of x and 4-bit weights are multiplied in bytes, which takes half as many
// instructions: each one multiplies four integers of a row and adds two pairs in 16 bits, which hold
// the sums of 32 integers. The eight integers of a word of w are stored as
//
//   the high parts in pairs (16 bytes, with three planes only), the low parts in order (8 bytes)
#pragma once

#include "input_rows_x86.hpp"

namespace mlxrunner::ISA {

constexpr bool has_byte_step(int bits, int planes) { return bits == 4 && planes != 2; }
inline constexpr int kNumbersPerDot = 2;  // integers of a row per add_dot
constexpr int step_numbers(int bits) { return bits == 4 ? 32 : 4; }  // per iteration
constexpr int num_sums(int planes) { return planes == 3 ? 2 : 1; }   // accumulators per row of x
constexpr bool fuses_codes(int) { return false; }          // see int8_vnni.hpp
inline constexpr int kHeaderBytes = 0;  // see int8_neon.hpp
// The distance of rows of x in floats, modulo 16. Zen 3 does not load from two cache lines at the
// same offset in one cycle, and the rows are read at the same time.
inline constexpr int kRowSkew = 5;

// per integer of x
constexpr int input_bytes(int bits, int planes) {
  return has_byte_step(bits, planes) ? planes : 2 * num_sums(planes);
}

template <int kBits, int J>
inline WordVector select_numbers(const std::uint32_t* words) {
  constexpr int kPerWord = 32 / kBits / kNumbersPerDot;
  return extract_bits<J % kPerWord * kBits, kBits>(load_words(words + J / kPerWord * kPanelRows));
}

// Adds products of the numbers and of four bytes of a row of x, which are broadcast to all rows of
// w. kOffset: their distance from the row's address. This is inline assembly, because GCC 12 would
// load and multiply for several rows first, and keep accumulators in memory. The last operand tells
// the compiler that memory is read.
#define MLXRUNNER_ADD_PRODUCTS(MULTIPLY, ADD)                                                     \
  const std::int8_t* base = x.base[kRow / 4];                                                     \
  const auto& memory = *reinterpret_cast<const std::int8_t(*)[]>(base);                           \
  WordVector word;                                                                                \
  if constexpr (kRow % 4 == 0)                                                                    \
    asm("vpbroadcastd %c4(%3), %1\n\t" MULTIPLY "\n\t" ADD                                        \
        : "+x"(sum), "=&x"(word) : "x"(numbers), "r"(base), "i"(kOffset), "m"(memory));           \
  else                                                                                            \
    asm("vpbroadcastd %c4(%3,%5,%c6), %1\n\t" MULTIPLY "\n\t" ADD                                 \
        : "+x"(sum), "=&x"(word)                                                                  \
        : "x"(numbers), "r"(base), "i"(kOffset), "r"(kRow % 4 == 3 ? x.triple_stride : x.stride), \
          "i"(kRow % 4 == 2 ? 2 : 1), "m"(memory))

// pairs of 16-bit integers, added in 32 bits
template <int kRow, int kOffset, int M>
[[gnu::always_inline]]
inline void add_pairs(IntVector& sum, WordVector numbers, const InputRows<M>& x) {
  MLXRUNNER_ADD_PRODUCTS("vpmaddwd %2, %1, %1", "vpaddd %1, %0, %0");
}

// pairs of unsigned bytes of w and signed bytes of x, added in 16 bits
template <int kRow, int kOffset, int M>
[[gnu::always_inline]]
inline void add_byte_pairs(IntVector& sum, WordVector numbers, const InputRows<M>& x) {
  MLXRUNNER_ADD_PRODUCTS("vpmaddubsw %1, %2, %1", "vpaddw %1, %0, %0");
}

// The J-th numbers of a step by row kRow of x. sums: of the high and the low parts, or of the whole
// integers.
template <int kRow, int J, int kSums, int M>
[[gnu::always_inline]]
inline void add_dot(IntVector (&sums)[kSums], WordVector numbers, const InputRows<M>& x) {
  constexpr int kOffset = J * kNumbersPerDot * 2 * kSums;
  add_pairs<kRow, kOffset>(sums[0], numbers, x);
  if constexpr (kSums == 2) add_pairs<kRow, kOffset + 4>(sums[1], numbers, x);
}

// The J-th pair of the high parts.
template <int J, int kRow = 0, class Sums, int M>
[[gnu::always_inline]]
inline void add_high_parts(WordVector numbers, const InputRows<M>& x, Sums (&sums)[M]) {
  if constexpr (kRow < M) {
    add_pairs<kRow, 4 * J>(sums[kRow].sums[0], numbers, x);
    add_high_parts<J, kRow + 1>(numbers, x, sums);
  }
}

// Four integers of the low parts. kOffset: their distance from the row's address.
template <int kOffset, int kRow = 0, int M>
[[gnu::always_inline]]
inline void add_low_parts(WordVector numbers, const InputRows<M>& x, IntVector (&sums)[M]) {
  if constexpr (kRow < M) {
    add_byte_pairs<kRow, kOffset>(sums[kRow], numbers, x);
    add_low_parts<kOffset, kRow + 1>(numbers, x, sums);
  }
}

// Multiplies 32 integers of 4 bits of each row by M rows of x.
template <int kPlanes, class Sums, int M>
[[gnu::always_inline]]
inline void add_byte_step(const std::uint32_t* words, InputRows<M> x, Sums (&sums)[M]) {
  static_assert(32 / 2 * 15 * 128 < 1 << 15);
  constexpr bool kHasHigh = kPlanes == 3;
  constexpr int kLow = kHasHigh ? 16 : 0;
  const __m256i nibbles = _mm256_set1_epi8(0x0f), ones = _mm256_set1_epi16(1);
  IntVector low[M];
  MLXRUNNER_UNROLL
  for (int m = 0; m < M; m++) low[m] = zero_int();
  for (int k = 0; k < 32; k += 8, words += kPanelRows, x.advance(8 * kPlanes)) {
    if constexpr (kHasHigh) {
      add_high_parts<0>(select_numbers<4, 0>(words), x, sums);
      add_high_parts<1>(select_numbers<4, 1>(words), x, sums);
      add_high_parts<2>(select_numbers<4, 2>(words), x, sums);
      add_high_parts<3>(select_numbers<4, 3>(words), x, sums);
    }
    const WordVector all = load_words(words);
    add_low_parts<kLow>(_mm256_and_si256(all, nibbles), x, low);
    add_low_parts<kLow + 4>(_mm256_and_si256(_mm256_srli_epi16(all, 4), nibbles), x, low);
  }
  MLXRUNNER_UNROLL
  for (int m = 0; m < M; m++) {
    IntVector& total = sums[m].sums[num_sums(kPlanes) - 1];
    total = add_int(total, _mm256_madd_epi16(low[m], ones));
  }
}

// Stores the integers of x.
template <int kBits, int kPlanes>
inline void store_input(const std::int32_t* numbers, i64 count, std::int8_t* out) {
  constexpr int kPerWord = 32 / kBits;
  constexpr bool kBytes = has_byte_step(kBits, kPlanes);
  // the number of 16-bit integers for each integer
  constexpr int kParts = kBytes ? (kPlanes == 3 ? 1 : 0) : num_sums(kPlanes);
  for (i64 n = 0; n < count; n += kPerWord) {
    std::int16_t pairs[kParts * kPerWord + 1];
    MLXRUNNER_UNROLL
    for (int k = 0; k < kPerWord && kParts; k++) {
      const std::int32_t number = numbers[n + k];
      const int pair = k % 2 * (kPerWord / 4) + k / 4, half = k % 4 / 2;
      std::int16_t* at = pairs + 2 * kParts * pair + half;
      at[0] = static_cast<std::int16_t>(kPlanes == 3 ? (number + 128) >> 8 : number);
      if constexpr (kParts == 2) at[2] = static_cast<std::int8_t>(number);
    }
    __builtin_memcpy(out, pairs, 2 * kParts * kPerWord);
    out += 2 * kParts * kPerWord;
    if constexpr (kBytes)
      for (int k = 0; k < kPerWord; k++) *out++ = static_cast<std::int8_t>(numbers[n + k]);
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
