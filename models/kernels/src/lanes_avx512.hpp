// Sixteen float32 in one AVX-512 register. What is said here once for all four files lanes_*.hpp:
// each operation rounds once, as IEEE 754 says, and `sum` adds in one tree, so that the files agree
// to the bit wherever they all have a fused multiply-add.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace mlxrunner::ISA {

inline constexpr char kName[] = "avx512";

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
inline V load_u8(const std::uint8_t* p) {
  __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(b))};
}

// lanes i and i+8, then i and i+4, i and i+2, i and i+1
inline __m128 quarter(V a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}

}  // namespace mlxrunner::ISA
#include "sums_x86.hpp"
namespace mlxrunner::ISA {

// The registers of a V, one by one.
using Part = __m512;
inline constexpr int kParts = 1;
inline Part& part(V& a, int) { return a.v; }
inline Part load_part(const float* p) { return _mm512_loadu_ps(p); }
inline void add_product(Part& sum, Part a, Part b) { sum = _mm512_fmadd_ps(a, b, sum); }

// A group's sixteen possible weights: what a number of four bits stands for is looked up.
struct Nibbles {
  __m512 table;
  __m512i words;

  // the 64 numbers of eight words: lane l of vector p is number 8 * (l % 8) + 2 * p + l / 8
  static Nibbles of64(const std::uint8_t* p, float scale, float bias) {
    __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {entries(scale, bias), _mm512_broadcast_i64x4(w)};
  }
  // the 32 numbers of four words: lane l of vector p is number 8 * (l % 4) + 4 * p + l / 4
  static Nibbles of32(const std::uint8_t* p, float scale, float bias) {
    __m128i w = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {entries(scale, bias), _mm512_broadcast_i32x4(w)};
  }
  V at64(int p) const {
    const __m512i by = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
    return at(_mm512_add_epi32(by, _mm512_set1_epi32(8 * p)));
  }
  V at32(int p) const {
    const __m512i by = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    return at(_mm512_add_epi32(by, _mm512_set1_epi32(16 * p)));
  }

 private:
  static __m512 entries(float scale, float bias) {
    const __m512 numbers =
        _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_fmadd_ps(numbers, _mm512_set1_ps(scale), _mm512_set1_ps(bias));
  }
  V at(__m512i by) const {
    // the permutation reads the lowest four bits of each lane, and no others
    return {_mm512_permutexvar_ps(_mm512_srlv_epi32(words, by), table)};
  }
};

// of an address, not a pointer: it may lie behind the last row
inline void prefetch(std::uintptr_t p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}

// what the registers hold: accumulators of a tile, rows of a tile with one and with many x
inline constexpr int kMostX = 8;
// packed: whether tables of numbers take registers, too
constexpr int tile_rows(int x, bool packed) {
  if (x <= 2) return packed ? 8 : 4;
  if (x <= 4) return packed ? 4 : 6;
  return x <= 6 ? (packed ? 3 : 4) : (packed ? 2 : 3);
}
inline constexpr int kBlockRows = 4, kBlockX = 6;
// accumulators of a tile of attention
inline constexpr int kTileSums = 24;

}  // namespace mlxrunner::ISA
