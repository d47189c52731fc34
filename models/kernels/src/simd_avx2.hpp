// Sixteen float32 values in two AVX2 registers. simd_avx512.hpp documents the rules for all SIMD
// headers.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace mlxrunner::ISA {

inline constexpr char kName[] = "avx2";

struct V {
  __m256 lo, hi;
};

inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
// mask of the first n of sixteen lanes, for lanes [from, from + 8)
inline __m256i first(std::int64_t n, int from) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n) - from), lanes);
}
// the first n of 16 lanes, the others zero
inline V load(const float* p, std::int64_t n) {
  return {_mm256_maskload_ps(p, first(n, 0)), _mm256_maskload_ps(p + 8, first(n, 8))};
}
inline void store(float* p, V a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store(float* p, V a, std::int64_t n) {
  // a masked store takes twelve cycles on Zen 3
  if (n == 16) return store(p, a);
  _mm256_maskstore_ps(p, first(n, 0), a.lo);
  _mm256_maskstore_ps(p + 8, first(n, 8), a.hi);
}
inline V fma(V a, V b, V c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline V add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline V sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline V mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline V div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
// a > b ? a : b and a < b ? a : b, so b if either is NaN
inline V max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline V min(V a, V b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
// a < b ? x : y
inline V less(V a, V b, V x, V y) {
  return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
inline __m256 shift_into_exponent(__m256 a) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23));
}
inline V shift_into_exponent(V a) { return {shift_into_exponent(a.lo), shift_into_exponent(a.hi)}; }

inline __m256 bf16_to_f32(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline V load_bf16(const std::uint16_t* p) {
  const auto* h = reinterpret_cast<const __m128i*>(p);
  return {bf16_to_f32(_mm_loadu_si128(h)), bf16_to_f32(_mm_loadu_si128(h + 1))};
}
// the even or odd ones of 32 numbers
inline V load_even_bf16(const std::uint16_t* p) {
  const auto* h = reinterpret_cast<const __m256i*>(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(h), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(h + 1), 16))};
}
inline V load_odd_bf16(const std::uint16_t* p) {
  const auto* h = reinterpret_cast<const __m256i*>(p);
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(h), high)),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(h + 1), high))};
}
inline V load_f16(const std::uint16_t* p) {
  const auto* h = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
}
inline V load(const std::uint16_t* p, std::int64_t n, bool bf16) {
  // masks apply to 32-bit words only, so the last 16-bit element of an odd n is loaded separately
  const std::int64_t words = n / 2;
  __m256i h = _mm256_maskload_epi32(reinterpret_cast<const int*>(p), first(words, 0));
  if (n % 2) {
    const __m256i at = _mm256_cmpeq_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                          _mm256_set1_epi32(static_cast<int>(words)));
    h = _mm256_or_si256(h, _mm256_and_si256(at, _mm256_set1_epi32(p[n - 1])));
  }
  const __m128i lo = _mm256_castsi256_si128(h), hi = _mm256_extracti128_si256(h, 1);
  if (bf16) return {bf16_to_f32(lo), bf16_to_f32(hi)};
  return {_mm256_cvtph_ps(lo), _mm256_cvtph_ps(hi)};
}
// rounding half to even
inline void store_f16(std::uint16_t* p, V a) {
  auto* h = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(h, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128(h + 1, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// to integers, rounding half to even
inline void store(std::int32_t* p, V a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvtps_epi32(a.lo));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), _mm256_cvtps_epi32(a.hi));
}

// adds lanes i and i+8, then i and i+4; `sum` then adds i and i+2, i and i+1
inline __m128 reduce_to_4(V a) {
  const __m256 h = _mm256_add_ps(a.lo, a.hi);
  return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}

}  // namespace mlxrunner::ISA
#include "shuffles_x86.hpp"
namespace mlxrunner::ISA {

// One of the registers of a V.
using SubVector = __m256;
inline SubVector load_sub(const float* p) {
  SubVector a = _mm256_loadu_ps(p);
  // force a load into a register, because a memory operand would be loaded once per product
  asm("" : "+x"(a));
  return a;
}
inline void add_product(SubVector& sum, SubVector a, SubVector b) {
  sum = _mm256_fmadd_ps(a, b, sum);
}

inline SubVector broadcast(float x) { return _mm256_set1_ps(x); }
inline SubVector load_sub(const std::uint16_t* p, bool bf16) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return bf16 ? bf16_to_f32(h) : _mm256_cvtph_ps(h);
}
inline SubVector multiply(SubVector a, SubVector b) { return _mm256_mul_ps(a, b); }
inline SubVector plus(SubVector a, SubVector b) { return _mm256_add_ps(a, b); }
inline void store_sub(float* p, SubVector a) { _mm256_storeu_ps(p, a); }
// kWordRows bytes as numbers
template <bool kSigned>
inline SubVector load_bytes(const void* p) {
  const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(kSigned ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
}
// replaces 64 bytes, all below 16, with table[byte]
inline void look_up(const std::uint8_t* table, void* bytes) {
  const __m256i entries =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  for (auto* at = static_cast<__m256i*>(bytes); at < static_cast<__m256i*>(bytes) + 2; at++)
    _mm256_storeu_si256(at, _mm256_shuffle_epi8(entries, _mm256_loadu_si256(at)));
}

// Words of kWordRows rows, and sums of integers; see simd_avx512.hpp.
using WordVector = __m256i;
using IntVector = __m256i;
inline constexpr int kWordRows = 8;
inline WordVector load_words(const std::uint32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
template <int kFrom, int kCount>
inline WordVector extract_bits(WordVector a) {
  const WordVector down = kFrom ? _mm256_srli_epi16(a, kFrom) : a;
  return kFrom + kCount == 16 ? down : _mm256_and_si256(down, _mm256_set1_epi16((1 << kCount) - 1));
}
inline IntVector zero_int() { return _mm256_setzero_si256(); }
inline IntVector add_int(IntVector a, IntVector b) { return _mm256_add_epi32(a, b); }
inline SubVector to_float(IntVector a) { return _mm256_cvtepi32_ps(a); }

// see simd_avx512.hpp
using RowInts = __m256i;
inline RowInts broadcast_int(std::int32_t x) { return _mm256_set1_epi32(x); }
inline RowInts plus(RowInts a, RowInts b) { return _mm256_add_epi32(a, b); }
inline RowInts multiply(RowInts a, RowInts b) { return _mm256_mullo_epi32(a, b); }
inline RowInts load_byte_ints(const void* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}
inline RowInts join_pairs(IntVector a) { return a; }

// takes an address, not a pointer: it may be past the last row
inline void prefetch(std::uintptr_t p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}

// tile sizes that fit into sixteen registers, two for each V
inline constexpr int kPanelsPerTile = 1, kInputRowsPerTile = 6;
inline constexpr int kMaxIntRows = 6;
inline constexpr int kTileRows = 3, kTileSums = 6;

}  // namespace mlxrunner::ISA
