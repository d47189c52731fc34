// Sixteen float32 values in four NEON registers. simd_avx512.hpp documents the rules for all SIMD
// headers.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace mlxrunner::ISA {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "packed words are read as bytes");

struct V {
  float32x4_t a, b, c, d;
};

inline V zero() {
  const float32x4_t z = vdupq_n_f32(0);
  return {z, z, z, z};
}
inline V set1(float x) {
  const float32x4_t s = vdupq_n_f32(x);
  return {s, s, s, s};
}
inline V load(const float* p) {
  return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}
inline void store(float* p, V x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
// the first n of 16 lanes, the others zero
inline V load(const float* p, std::int64_t n) {
  float lanes[16] = {};
  __builtin_memcpy(lanes, p, static_cast<std::size_t>(n) * 4);
  return load(lanes);
}
inline void store(float* p, V x, std::int64_t n) {
  float lanes[16];
  store(lanes, x);
  __builtin_memcpy(p, lanes, static_cast<std::size_t>(n) * 4);
}
inline V fma(V x, V y, V z) {
  return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c),
          vfmaq_f32(z.d, x.d, y.d)};
}
inline V add(V x, V y) {
  return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b), vaddq_f32(x.c, y.c), vaddq_f32(x.d, y.d)};
}
inline V sub(V x, V y) {
  return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b), vsubq_f32(x.c, y.c), vsubq_f32(x.d, y.d)};
}
inline V mul(V x, V y) {
  return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b), vmulq_f32(x.c, y.c), vmulq_f32(x.d, y.d)};
}
inline V div(V x, V y) {
  return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b), vdivq_f32(x.c, y.c), vdivq_f32(x.d, y.d)};
}
// a < b ? x : y
inline V less(V a, V b, V x, V y) {
  return {vbslq_f32(vcltq_f32(a.a, b.a), x.a, y.a), vbslq_f32(vcltq_f32(a.b, b.b), x.b, y.b),
          vbslq_f32(vcltq_f32(a.c, b.c), x.c, y.c), vbslq_f32(vcltq_f32(a.d, b.d), x.d, y.d)};
}
// a > b ? a : b and a < b ? a : b, so b if either is NaN; NEON's own instructions behave
// differently
inline V max(V a, V b) { return less(b, a, a, b); }
inline V min(V a, V b) { return less(a, b, a, b); }
// shifts each lane's bits, as an integer, left by 23
inline float32x4_t shift_into_exponent(float32x4_t x) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(x), 23));
}
inline V shift_into_exponent(V x) {
  return {shift_into_exponent(x.a), shift_into_exponent(x.b), shift_into_exponent(x.c),
          shift_into_exponent(x.d)};
}

inline float32x4_t bf16_to_f32(uint16x4_t h) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(h), 16));
}
inline float32x4_t f16_to_f32(uint16x4_t h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }
inline V load_bf16(const std::uint16_t* p) {
  return {bf16_to_f32(vld1_u16(p)), bf16_to_f32(vld1_u16(p + 4)), bf16_to_f32(vld1_u16(p + 8)),
          bf16_to_f32(vld1_u16(p + 12))};
}
// the even or odd ones of 32 numbers
inline float32x4_t even_bf16(const std::uint16_t* p) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(vld1q_u16(p)), 16));
}
inline float32x4_t odd_bf16(const std::uint16_t* p) {
  const uint32x4_t high = vdupq_n_u32(0xffff0000);
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(vld1q_u16(p)), high));
}
inline V load_even_bf16(const std::uint16_t* p) {
  return {even_bf16(p), even_bf16(p + 8), even_bf16(p + 16), even_bf16(p + 24)};
}
inline V load_odd_bf16(const std::uint16_t* p) {
  return {odd_bf16(p), odd_bf16(p + 8), odd_bf16(p + 16), odd_bf16(p + 24)};
}
inline V load_f16(const std::uint16_t* p) {
  return {f16_to_f32(vld1_u16(p)), f16_to_f32(vld1_u16(p + 4)), f16_to_f32(vld1_u16(p + 8)),
          f16_to_f32(vld1_u16(p + 12))};
}
inline V load(const std::uint16_t* p, std::int64_t n, bool bf16) {
  std::uint16_t lanes[16] = {};
  __builtin_memcpy(lanes, p, static_cast<std::size_t>(n) * 2);
  return bf16 ? load_bf16(lanes) : load_f16(lanes);
}
// rounding half to even
inline uint16x4_t f32_to_f16(float32x4_t x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
inline void store_f16(std::uint16_t* p, V x) {
  vst1_u16(p, f32_to_f16(x.a));
  vst1_u16(p + 4, f32_to_f16(x.b));
  vst1_u16(p + 8, f32_to_f16(x.c));
  vst1_u16(p + 12, f32_to_f16(x.d));
}
// to integers, rounding half to even
inline void store(std::int32_t* p, V x) {
  vst1q_s32(p, vcvtnq_s32_f32(x.a));
  vst1q_s32(p + 4, vcvtnq_s32_f32(x.b));
  vst1q_s32(p + 8, vcvtnq_s32_f32(x.c));
  vst1q_s32(p + 12, vcvtnq_s32_f32(x.d));
}

// adds lanes i and i+8, then i and i+4; `sum` then adds i and i+2, i and i+1
inline float32x4_t reduce_to_4(V x) { return vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d)); }
inline float sum(V x) {
  const float32x4_t q = reduce_to_4(x);
  const float32x2_t h = vadd_f32(vget_low_f32(q), vget_high_f32(q));
  return vget_lane_f32(h, 0) + vget_lane_f32(h, 1);
}
inline void sum4(V x, V y, V z, V w, float* out) {
  out[0] = sum(x), out[1] = sum(y), out[2] = sum(z), out[3] = sum(w);
}

// column i of the four rows becomes four contiguous numbers at to + i * to_step
inline void transpose_4x4(const float* const (&rows)[4], float* to, std::int64_t to_step) {
  const float32x4_t a = vld1q_f32(rows[0]), b = vld1q_f32(rows[1]), c = vld1q_f32(rows[2]),
                    d = vld1q_f32(rows[3]);
  const auto pairs = [](float32x4_t x) { return vreinterpretq_f64_f32(x); };
  const float64x2_t even_ab = pairs(vtrn1q_f32(a, b)), odd_ab = pairs(vtrn2q_f32(a, b)),
                    even_cd = pairs(vtrn1q_f32(c, d)), odd_cd = pairs(vtrn2q_f32(c, d));
  const auto put = [&](int i, float64x2_t x) {
    vst1q_f32(to + i * to_step, vreinterpretq_f32_f64(x));
  };
  put(0, vtrn1q_f64(even_ab, even_cd));
  put(1, vtrn1q_f64(odd_ab, odd_cd));
  put(2, vtrn2q_f64(even_ab, even_cd));
  put(3, vtrn2q_f64(odd_ab, odd_cd));
}

// One of the registers of a V.
using SubVector = float32x4_t;
inline SubVector load_sub(const float* p) { return vld1q_f32(p); }
inline void add_product(SubVector& sum, SubVector x, SubVector y) { sum = vfmaq_f32(sum, x, y); }

inline SubVector broadcast(float x) { return vdupq_n_f32(x); }
inline SubVector load_sub(const std::uint16_t* p, bool bf16) {
  return bf16 ? bf16_to_f32(vld1_u16(p)) : f16_to_f32(vld1_u16(p));
}
inline SubVector multiply(SubVector x, SubVector y) { return vmulq_f32(x, y); }
inline SubVector plus(SubVector x, SubVector y) { return vaddq_f32(x, y); }
inline void store_sub(float* p, SubVector x) { vst1q_f32(p, x); }
// kWordRows bytes as numbers
template <bool kSigned>
inline SubVector load_bytes(const void* p) {
  std::uint32_t word;
  __builtin_memcpy(&word, p, sizeof word);
  const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(word));
  if constexpr (kSigned)
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(bytes)))));
  else return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
}

// see simd_avx512.hpp
using RowInts = int32x4_t;
inline RowInts broadcast_int(std::int32_t x) { return vdupq_n_s32(x); }
inline RowInts plus(RowInts x, RowInts y) { return vaddq_s32(x, y); }
inline RowInts multiply(RowInts x, RowInts y) { return vmulq_s32(x, y); }
inline RowInts load_byte_ints(const void* p) {
  std::uint32_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(word)))));
}
// replaces 64 bytes, all below 16, with table[byte]
inline void look_up(const std::uint8_t* table, void* bytes) {
  const uint8x16_t entries = vld1q_u8(table);
  auto* at = static_cast<std::uint8_t*>(bytes);
  for (int i = 0; i < 64; i += 16) vst1q_u8(at + i, vqtbl1q_u8(entries, vld1q_u8(at + i)));
}

inline constexpr int kWordRows = 4;  // see int16_neon.hpp and int8_neon.hpp

// Takes an address, not a pointer: it may be past the last row. GCC 12 could remove a call that it
// does not inline, because the function returns nothing.
[[gnu::always_inline]] inline void prefetch(std::uintptr_t p) {
  __builtin_prefetch(reinterpret_cast<const void*>(p));
}

// tile sizes that fit into 32 registers, four for each V
inline constexpr int kPanelsPerTile = 1, kInputRowsPerTile = 6;
inline constexpr int kTileRows = 3, kTileSums = 6;

}  // namespace mlxrunner::ISA
