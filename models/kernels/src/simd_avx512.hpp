// Sixteen float32 values in one AVX-512 register. The following rules apply to all SIMD headers
// (simd_*.hpp). Each operation rounds once, as IEEE 754 requires. `sum` adds in a fixed tree.
// Therefore the results of all instruction sets with fused multiply-add are bit-identical, except
// for products with bfloat16 matrices on tiles (matmul_bf16_tiles.hpp).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace mlxrunner::ISA {

#if defined(__AVX512VNNI__)  // a separate name for isa_avx512_vnni.cpp
inline constexpr char kName[] = "avx512-vnni";
#else
inline constexpr char kName[] = "avx512";
#endif

struct V {
  __m512 v;
};

inline V zero() { return {_mm512_setzero_ps()}; }
inline V set1(float x) { return {_mm512_set1_ps(x)}; }
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline __mmask16 first(std::int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
// the first n of 16 lanes, the others zero
inline V load(const float* p, std::int64_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline void store(float* p, V a, std::int64_t n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
// a > b ? a : b and a < b ? a : b, so b if either is NaN
inline V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
// a < b ? x : y
inline V less(V a, V b, V x, V y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
// shifts each lane's bits, as an integer, left by 23; vmath.hpp computes 2^n with it
inline V shift_into_exponent(V a) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), 23))};
}

inline V load(const std::uint16_t* p, std::int64_t n, bool bf16) {
  __m256i h = _mm256_maskz_loadu_epi16(first(n), p);
  if (!bf16) return {_mm512_cvtph_ps(h)};
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline V load_bf16(const std::uint16_t* p) {
  __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
// the even or odd ones of 32 numbers
inline V load_even_bf16(const std::uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
inline V load_odd_bf16(const std::uint16_t* p) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), high))};
}
inline V load_f16(const std::uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

// rounding half to even
inline void store_f16(std::uint16_t* p, V a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// to integers, rounding half to even
inline void store(std::int32_t* p, V a) { _mm512_storeu_si512(p, _mm512_cvtps_epi32(a.v)); }

// adds lanes i and i+8, then i and i+4; `sum` then adds i and i+2, i and i+1
inline __m128 reduce_to_4(V a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}

}  // namespace mlxrunner::ISA
#include "shuffles_x86.hpp"
namespace mlxrunner::ISA {

// One of the registers of a V.
using SubVector = __m512;
inline SubVector load_sub(const float* p) { return _mm512_loadu_ps(p); }
inline void add_product(SubVector& sum, SubVector a, SubVector b) {
  sum = _mm512_fmadd_ps(a, b, sum);
}

inline SubVector broadcast(float x) { return _mm512_set1_ps(x); }
inline SubVector load_sub(const std::uint16_t* p, bool bf16) {
  return bf16 ? load_bf16(p).v : load_f16(p).v;
}
inline SubVector multiply(SubVector a, SubVector b) { return _mm512_mul_ps(a, b); }
inline SubVector plus(SubVector a, SubVector b) { return _mm512_add_ps(a, b); }
inline void store_sub(float* p, SubVector a) { _mm512_storeu_ps(p, a); }
// kWordRows bytes as numbers
template <bool kSigned>
inline SubVector load_bytes(const void* p) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(kSigned ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}
// replaces 64 bytes, all below 16, with table[byte]
inline void look_up(const std::uint8_t* table, void* bytes) {
  const __m512i entries =
      _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  _mm512_storeu_si512(bytes, _mm512_shuffle_epi8(entries, _mm512_loadu_si512(bytes)));
}

// Words of kWordRows rows, used as pairs of 16-bit integers (int16_dot.hpp), and sums of the
// products of such pairs.
using WordVector = __m512i;
using IntVector = __m512i;
inline constexpr int kWordRows = 16;
inline WordVector load_words(const std::uint32_t* p) { return _mm512_loadu_si512(p); }
inline WordVector broadcast_word(const std::int8_t* p) {
  int word;
  __builtin_memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}
// bits [from, from + count) of each half of a word
template <int kFrom, int kCount>
inline WordVector extract_bits(WordVector a) {
  const WordVector down = kFrom ? _mm512_srli_epi16(a, kFrom) : a;
  return kFrom + kCount == 16 ? down : _mm512_and_si512(down, _mm512_set1_epi16((1 << kCount) - 1));
}
inline IntVector zero_int() { return _mm512_setzero_si512(); }
[[gnu::always_inline]] inline void add_pairs(IntVector& sum, WordVector a, WordVector b) {
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
}
inline IntVector add_int(IntVector a, IntVector b) { return _mm512_add_epi32(a, b); }
inline SubVector to_float(IntVector a) { return _mm512_cvtepi32_ps(a); }

// An integer of each of kWordRows rows.
using RowInts = __m512i;
inline RowInts broadcast_int(std::int32_t x) { return _mm512_set1_epi32(x); }
inline RowInts plus(RowInts a, RowInts b) { return _mm512_add_epi32(a, b); }
// the lower 32 bits
inline RowInts multiply(RowInts a, RowInts b) { return _mm512_mullo_epi32(a, b); }
// kWordRows signed bytes
inline RowInts load_byte_ints(const void* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline RowInts join_pairs(IntVector a) { return a; }

// takes an address, not a pointer: it may be past the last row
inline void prefetch(std::uintptr_t p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}

// tile sizes that fit into the registers: panels and rows of x in a tile, rows of x in an integer
// tile, rows and sums in an attention tile
inline constexpr int kPanelsPerTile = 2, kInputRowsPerTile = 12;
inline constexpr int kMaxIntRows = 6;
inline constexpr int kTileRows = 6, kTileSums = 24;

}  // namespace mlxrunner::ISA
