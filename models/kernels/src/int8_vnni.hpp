// Dot products of quantized x and w in groups of four 8-bit integers with AVX-512 VNNI. The results
// are bit-identical to those of int16_dot.hpp.
//
// Knows: words of kWordRows rows (simd_avx512.hpp). Must not know: scales, panels.
//
// An integer of x is 65536 * a + 256 * b + c, each in [-128, 128), if it has three planes. With two
// planes, there is no a, and with one plane only c. Four integers take 12 bytes:
//
//   a a a a b b b b c c c c
#pragma once

#include "input_rows_x86.hpp"

namespace mlxrunner::ISA {

inline constexpr int kNumbersPerDot = 4;  // integers of a row per instruction
// Whether codes of 5 and 6 bits are multiplied as they are stored (block_formats.hpp).
constexpr bool fuses_codes(int bits) { return bits == 5 || bits == 6; }
// integers of a row per iteration
constexpr int step_numbers(int bits) { return bits == 5 ? 32 : bits == 6 ? 16 : 32 / bits; }
constexpr int input_bytes(int, int planes) { return planes; }  // per integer of x
constexpr int num_sums(int planes) { return planes; }          // accumulators per row of x
inline constexpr int kHeaderBytes = 0;                         // see int8_neon.hpp
constexpr bool has_byte_step(int, int) { return false; }       // see int16_avx2.hpp
inline constexpr int kRowSkew = 0;                             // see int16_avx2.hpp

// Moves the bits of a mask, of each byte, from `kFrom` to bit 4.
template <int kFrom, int kMask>
inline WordVector move_high_bits(const std::uint32_t* p) {
  WordVector words = load_words(p);
  if constexpr (kFrom < 4) words = _mm512_slli_epi32(words, 4 - kFrom);
  else words = _mm512_srli_epi32(words, kFrom - 4);
  return _mm512_and_si512(words, _mm512_set1_epi8(kMask << 4));
}

// the J-th four integers of each row, one byte each
template <int kBits, int J>
inline WordVector select_numbers(const std::uint32_t* p) {
  if constexpr (kBits == 5)
    return _mm512_or_si512(select_numbers<4, J % 2>(p + J / 2 * kPanelRows),
                           move_high_bits<J, 1>(p + 4 * kPanelRows));
  if constexpr (kBits == 6)
    return _mm512_or_si512(select_numbers<4, J % 2>(p + J / 2 * kPanelRows),
                           move_high_bits<2 * J, 3>(p + 2 * kPanelRows));
  const WordVector words = load_words(p);
  if constexpr (kBits == 8) return words;
  else
    return _mm512_and_si512(J ? _mm512_srli_epi32(words, 4 * J) : words,
                            _mm512_set1_epi8(0x0f));
}

// Multiplies the numbers by four bytes of a row of x, broadcast to all rows of w. kOffset: their
// distance from the row's address. This is inline assembly, because GCC 12 moves the accumulators
// of _mm512_dpbusd_epi32 back and forth, which takes a third longer. The last operand tells the
// compiler that memory is read.
template <int kRow, int kOffset, int M>
[[gnu::always_inline]]
inline void dot_vnni(IntVector& sum, WordVector numbers, const InputRows<M>& x) {
  const std::int8_t* base = x.base[kRow / 4];
  const auto& memory = *reinterpret_cast<const std::int8_t(*)[]>(base);
  if constexpr (kRow % 4 == 0)
    asm("vpdpbusd %c3(%2)%{1to16%}, %1, %0"
        : "+v"(sum) : "v"(numbers), "r"(base), "i"(kOffset), "m"(memory));
  else if constexpr (kRow % 4 == 2)
    asm("vpdpbusd %c4(%2,%3,2)%{1to16%}, %1, %0"
        : "+v"(sum) : "v"(numbers), "r"(base), "r"(x.stride), "i"(kOffset), "m"(memory));
  else
    asm("vpdpbusd %c4(%2,%3)%{1to16%}, %1, %0"
        : "+v"(sum)
        : "v"(numbers), "r"(base), "r"(kRow % 4 == 1 ? x.stride : x.triple_stride), "i"(kOffset),
          "m"(memory));
}

// The J-th numbers of a word by row kRow of x. sums: one per plane, the most significant one first.
template <int kRow, int J, int kPlanes, int M>
[[gnu::always_inline]]
inline void add_dot(IntVector (&sums)[kPlanes], WordVector numbers, const InputRows<M>& x) {
  constexpr int kFirst = J * kNumbersPerDot * kPlanes;
  dot_vnni<kRow, kFirst>(sums[0], numbers, x);
  if constexpr (kPlanes > 1) dot_vnni<kRow, kFirst + kNumbersPerDot>(sums[1], numbers, x);
  if constexpr (kPlanes > 2) dot_vnni<kRow, kFirst + 2 * kNumbersPerDot>(sums[2], numbers, x);
}

// Stores the integers of x, sixteen at a time.
template <int kBits, int kPlanes>
inline void store_input(const std::int32_t* numbers, i64 count, std::int8_t* out) {
  // interleave four bytes of each plane
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11, 0, 0, 0, 0);
  const __m512i half = _mm512_set1_epi32(128);
  for (i64 k = 0; k < count; k += 16, out += 16 * kPlanes) {
    const __m512i c = _mm512_loadu_si512(numbers + k);
    const __m128i low = _mm512_cvtepi32_epi8(c);
    if constexpr (kPlanes == 1) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), low);
    } else {
      const __m512i b = _mm512_srai_epi32(_mm512_add_epi32(c, half), 8);
      const __m128i middle = _mm512_cvtepi32_epi8(b);
      if constexpr (kPlanes == 2) {
        const __m128i first = _mm_unpacklo_epi32(middle, low);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), first);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16), _mm_unpackhi_epi32(middle, low));
      } else {
        const __m512i a = _mm512_srai_epi32(_mm512_add_epi32(b, half), 8);
        __m512i all = _mm512_castsi128_si512(_mm512_cvtepi32_epi8(a));
        all = _mm512_inserti32x4(all, middle, 1);
        all = _mm512_inserti32x4(all, low, 2);
        _mm512_mask_storeu_epi32(out, 0x0fff, _mm512_permutexvar_epi32(order, all));
      }
    }
  }
}

inline IntVector shift_and_add(IntVector high, IntVector low) {
  return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}

// The sum of products, exact. With three planes, it may have more than 32 bits.
template <int kPlanes>
inline RowInts join_exact(const IntVector (&sums)[kPlanes]) {
  static_assert(kPlanes < 3);
  if constexpr (kPlanes == 1) return sums[0];
  else return shift_and_add(sums[0], sums[1]);
}
// The same as float32.
template <int kPlanes>
inline SubVector join_sums(const IntVector (&sums)[kPlanes]) {
  if constexpr (kPlanes < 3) return to_float(join_exact(sums));
  else {
    SubVector total = to_float(sums[2]);
    add_product(total, to_float(shift_and_add(sums[0], sums[1])), broadcast(256));
    return total;
  }
}

}  // namespace mlxrunner::ISA
