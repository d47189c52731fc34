// Whole numbers of x, and what they make with numbers of w, in fours of 8 bits: where a processor
// multiplies and adds those in one (VNNI), to the same bits as whole_pairs.hpp.
//
// Knows: words of kAbreast rows (lanes_avx512.hpp). Must not know: scales, strips.
//
// A number of x is 65536 * a + 256 * b + c, each in [-128, 128). Four numbers' are 12 bytes:
//
//   a a a a b b b b c c c c
#pragma once

#include "strips.hpp"

namespace mlxrunner::ISA {

inline constexpr int kShare = 4;        // numbers of a row that meet at once
inline constexpr int kNumberBytes = 3;  // of x
// Sums that do not wait for each other.
constexpr int chains(int x) { return x <= 2 ? 2 : 1; }

struct Whole {
  Sum a, b, c;
};

inline Whole nothing() { return {none(), none(), none()}; }

// the J-th four numbers of each row, a byte each
template <int kBits, int J>
inline Words share(Words words) {
  if constexpr (kBits == 8) return words;
  else
    return _mm512_and_si512(J ? _mm512_srli_epi32(words, 4 * J) : words,
                            _mm512_set1_epi8(0x0f));
}

// Four bytes of x, which all rows meet.
using Four [[gnu::may_alias, gnu::aligned(1)]] = std::int32_t;

// As the instruction itself: GCC 12 copies sums to and fro for _mm512_dpbusd_epi32, and takes a
// third longer for it.
inline void add_quads(Sum& sum, Words numbers, const Four& x) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(numbers), "m"(x));
}

inline void add_share(Whole& sum, Words numbers, const std::int8_t* x) {
  const auto* four = reinterpret_cast<const Four*>(x);
  add_quads(sum.a, numbers, four[0]);
  add_quads(sum.b, numbers, four[1]);
  add_quads(sum.c, numbers, four[2]);
}

inline Whole both(Whole x, Whole y) { return {both(x.a, y.a), both(x.b, y.b), both(x.c, y.c)}; }

// Numbers of x, sixteen at a time.
template <int kBits>
inline void put(const std::int32_t* numbers, i64 count, std::int8_t* out) {
  // four of a, of b and of c in turns
  const __m512i turns = _mm512_setr_epi32(0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11, 0, 0, 0, 0);
  const __m512i half = _mm512_set1_epi32(128);
  for (i64 k = 0; k < count; k += 16, out += 48) {
    const __m512i c = _mm512_loadu_si512(numbers + k);
    const __m512i b = _mm512_srai_epi32(_mm512_add_epi32(c, half), 8);
    const __m512i a = _mm512_srai_epi32(_mm512_add_epi32(b, half), 8);
    __m512i all = _mm512_castsi128_si512(_mm512_cvtepi32_epi8(a));
    all = _mm512_inserti32x4(all, _mm512_cvtepi32_epi8(b), 1);
    all = _mm512_inserti32x4(all, _mm512_cvtepi32_epi8(c), 2);
    _mm512_mask_storeu_epi32(out, 0x0fff, _mm512_permutexvar_epi32(turns, all));
  }
}

inline Part high_of(const Whole& sum) {
  return to_part(_mm512_add_epi32(_mm512_slli_epi32(sum.a, 8), sum.b));
}
inline Part low_of(const Whole& sum) { return to_part(sum.c); }

}  // namespace mlxrunner::ISA
