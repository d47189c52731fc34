// Dot products of quantized x and w in groups of four 8-bit integers with AVX-512 VNNI. The results
// are bit-identical to those of int16_dot.hpp.
//
// Knows: words of kWordRows rows (simd_avx512.hpp). Must not know: scales, panels.
//
// An integer of x is 65536 * a + 256 * b + c, each in [-128, 128). Four integers take 12 bytes:
//
//   a a a a b b b b c c c c
#pragma once

#include "panels.hpp"

namespace mlxrunner::ISA {

inline constexpr int kNumbersPerDot = 4;  // integers of a row per instruction
inline constexpr int kInputBytes = 3;     // per integer of x
// The number of independent accumulators.
constexpr int num_chains(int x) { return x <= 2 ? 2 : 1; }

struct SplitSum {
  IntVector a, b, c;
};

inline SplitSum zero_sum() { return {zero_int(), zero_int(), zero_int()}; }

// the J-th four integers of each row, one byte each
template <int kBits, int J>
inline WordVector select_numbers(WordVector words) {
  if constexpr (kBits == 8) return words;
  else
    return _mm512_and_si512(J ? _mm512_srli_epi32(words, 4 * J) : words,
                            _mm512_set1_epi8(0x0f));
}

// Four bytes of x, broadcast to all rows.
using FourBytes [[gnu::may_alias, gnu::aligned(1)]] = std::int32_t;

// This is inline assembly, because GCC 12 moves the accumulators of _mm512_dpbusd_epi32 back and
// forth, which takes a third longer.
inline void dot_vnni(IntVector& sum, WordVector numbers, const FourBytes& x) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(numbers), "m"(x));
}

inline void add_dot(SplitSum& sum, WordVector numbers, const std::int8_t* x) {
  const auto* four = reinterpret_cast<const FourBytes*>(x);
  dot_vnni(sum.a, numbers, four[0]);
  dot_vnni(sum.b, numbers, four[1]);
  dot_vnni(sum.c, numbers, four[2]);
}

inline SplitSum add_sums(SplitSum x, SplitSum y) {
  return {add_int(x.a, y.a), add_int(x.b, y.b), add_int(x.c, y.c)};
}

// Stores the integers of x, sixteen at a time.
template <int kBits>
inline void store_input(const std::int32_t* numbers, i64 count, std::int8_t* out) {
  // interleave four bytes of a, of b and of c
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11, 0, 0, 0, 0);
  const __m512i half = _mm512_set1_epi32(128);
  for (i64 k = 0; k < count; k += 16, out += 48) {
    const __m512i c = _mm512_loadu_si512(numbers + k);
    const __m512i b = _mm512_srai_epi32(_mm512_add_epi32(c, half), 8);
    const __m512i a = _mm512_srai_epi32(_mm512_add_epi32(b, half), 8);
    __m512i all = _mm512_castsi128_si512(_mm512_cvtepi32_epi8(a));
    all = _mm512_inserti32x4(all, _mm512_cvtepi32_epi8(b), 1);
    all = _mm512_inserti32x4(all, _mm512_cvtepi32_epi8(c), 2);
    _mm512_mask_storeu_epi32(out, 0x0fff, _mm512_permutexvar_epi32(order, all));
  }
}

inline SubVector high_part(const SplitSum& sum) {
  return to_float(_mm512_add_epi32(_mm512_slli_epi32(sum.a, 8), sum.b));
}
inline SubVector low_part(const SplitSum& sum) { return to_float(sum.c); }

}  // namespace mlxrunner::ISA
