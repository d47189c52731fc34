// Sixteen float32 in one AVX-512 register. What is said here once for all four files lanes_*.hpp:
// each operation rounds once, as IEEE 754 says, and `sum` adds in one tree, so that the files agree
// to the bit wherever they all have a fused multiply-add.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace mlxrunner::ISA {

#if defined(__AVX512VNNI__)  // that file's own name, as it were: isa_avx512_vnni.cpp
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
// the first n of 16, zeros behind
inline V load(const float* p, std::int64_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline void store(float* p, V a, std::int64_t n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
// a > b ? a : b and a < b ? a : b, so b where either is not a number
inline V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
// a < b ? x : y
inline V less(V a, V b, V x, V y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
// each lane's bits as an integer, 23 places further left: 2^n is made so (pointwise.hpp)
inline V raised(V a) {
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
inline V load_f16(const std::uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

// to whole numbers, halves to even ones
inline void store(std::int32_t* p, V a) { _mm512_storeu_si512(p, _mm512_cvtps_epi32(a.v)); }

// lanes i and i+8, then i and i+4, i and i+2, i and i+1
inline __m128 quarter(V a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}

}  // namespace mlxrunner::ISA
#include "sums_x86.hpp"
namespace mlxrunner::ISA {

// One register, of those that make a V.
using Part = __m512;
inline Part load_part(const float* p) { return _mm512_loadu_ps(p); }
inline void add_product(Part& sum, Part a, Part b) { sum = _mm512_fmadd_ps(a, b, sum); }

inline Part all_of(float x) { return _mm512_set1_ps(x); }
inline Part load_part(const std::uint16_t* p, bool bf16) {
  return bf16 ? load_bf16(p).v : load_f16(p).v;
}
inline Part times(Part a, Part b) { return _mm512_mul_ps(a, b); }
inline void store_part(float* p, Part a) { _mm512_storeu_ps(p, a); }

// Words of kAbreast rows; taken as pairs of whole numbers of 16 bits (whole_pairs.hpp), and sums of
// what such pairs make.
using Words = __m512i;
using Sum = __m512i;
inline constexpr int kAbreast = 16;
inline Words load_words(const std::uint32_t* p) { return _mm512_loadu_si512(p); }
inline Words all_words(const std::int8_t* p) {
  int word;
  __builtin_memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}
// bits [from, from + count) of each half
template <int kFrom, int kCount>
inline Words bits_of(Words a) {
  const Words down = kFrom ? _mm512_srli_epi16(a, kFrom) : a;
  return kFrom + kCount == 16 ? down : _mm512_and_si512(down, _mm512_set1_epi16((1 << kCount) - 1));
}
inline Sum none() { return _mm512_setzero_si512(); }
inline void add_pairs(Sum& sum, Words a, Words b) {
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
}
inline Sum both(Sum a, Sum b) { return _mm512_add_epi32(a, b); }
inline Part to_part(Sum a) { return _mm512_cvtepi32_ps(a); }

// of an address, not a pointer: it may lie behind the last row
inline void prefetch(std::uintptr_t p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}

// what the registers hold: strips and rows of x in a tile, rows of x in a tile of whole numbers, rows
// and sums in a tile of attention
inline constexpr int kStripsAbreast = 2, kBlockX = 12;
inline constexpr int kMostWhole = 6;
inline constexpr int kTileRows = 6, kTileSums = 24;

}  // namespace mlxrunner::ISA
