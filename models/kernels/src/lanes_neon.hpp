// Sixteen float32 in four NEON registers; see lanes_avx512.hpp for what all such files keep to.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace mlxrunner::ISA {

inline constexpr char kName[] = "neon";

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
// the first n of 16, zeros behind
inline V load(const float* p, std::int64_t n) {
  float all[16] = {};
  __builtin_memcpy(all, p, static_cast<std::size_t>(n) * 4);
  return load(all);
}
inline void store(float* p, V x, std::int64_t n) {
  float all[16];
  store(all, x);
  __builtin_memcpy(p, all, static_cast<std::size_t>(n) * 4);
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
// a > b ? a : b and a < b ? a : b, so b where either is not a number: NEON's own say otherwise
inline V max(V a, V b) { return less(b, a, a, b); }
inline V min(V a, V b) { return less(a, b, a, b); }
// each lane's bits as an integer, 23 places further left
inline float32x4_t raised(float32x4_t x) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(x), 23));
}
inline V raised(V x) { return {raised(x.a), raised(x.b), raised(x.c), raised(x.d)}; }

inline float32x4_t wide_bf16(uint16x4_t h) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(h), 16));
}
inline float32x4_t wide_f16(uint16x4_t h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }
inline V load_bf16(const std::uint16_t* p) {
  return {wide_bf16(vld1_u16(p)), wide_bf16(vld1_u16(p + 4)), wide_bf16(vld1_u16(p + 8)),
          wide_bf16(vld1_u16(p + 12))};
}
inline V load_f16(const std::uint16_t* p) {
  return {wide_f16(vld1_u16(p)), wide_f16(vld1_u16(p + 4)), wide_f16(vld1_u16(p + 8)),
          wide_f16(vld1_u16(p + 12))};
}
inline V load(const std::uint16_t* p, std::int64_t n, bool bf16) {
  std::uint16_t all[16] = {};
  __builtin_memcpy(all, p, static_cast<std::size_t>(n) * 2);
  return bf16 ? load_bf16(all) : load_f16(all);
}
inline V load_u8(const std::uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t lo = vmovl_u8(vget_low_u8(bytes)), hi = vmovl_high_u8(bytes);
  return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(lo))), vcvtq_f32_u32(vmovl_high_u16(lo)),
          vcvtq_f32_u32(vmovl_u16(vget_low_u16(hi))), vcvtq_f32_u32(vmovl_high_u16(hi))};
}

// lanes i and i+8, then i and i+4, i and i+2, i and i+1
inline float32x4_t quarter(V x) { return vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d)); }
inline float sum(V x) {
  const float32x4_t q = quarter(x);
  const float32x2_t h = vadd_f32(vget_low_f32(q), vget_high_f32(q));
  return vget_lane_f32(h, 0) + vget_lane_f32(h, 1);
}
inline void sum4(V x, V y, V z, V w, float* out) {
  out[0] = sum(x), out[1] = sum(y), out[2] = sum(z), out[3] = sum(w);
}

// The registers of a V, one by one.
using Part = float32x4_t;
inline constexpr int kParts = 4;
inline Part& part(V& x, int i) { return i == 0 ? x.a : i == 1 ? x.b : i == 2 ? x.c : x.d; }
inline Part load_part(const float* p) { return vld1q_f32(p); }
inline void add_product(Part& sum, Part x, Part y) { sum = vfmaq_f32(sum, x, y); }

// Numbers of four bits, of one group, in the orders of lanes_avx512.hpp.
struct Nibbles {
  uint32x4_t lo, hi;
  float32x4_t scale, bias;

  static Nibbles of64(const std::uint8_t* p, float scale, float bias) {
    return {words(p), words(p + 16), vdupq_n_f32(scale), vdupq_n_f32(bias)};
  }
  static Nibbles of32(const std::uint8_t* p, float scale, float bias) {
    const uint32x4_t w = words(p);
    return {w, w, vdupq_n_f32(scale), vdupq_n_f32(bias)};
  }
  V at64(int p) const {
    return {at(lo, 8 * p), at(hi, 8 * p), at(lo, 8 * p + 4), at(hi, 8 * p + 4)};
  }
  V at32(int p) const {
    return {at(lo, 16 * p), at(lo, 16 * p + 4), at(lo, 16 * p + 8), at(lo, 16 * p + 12)};
  }

 private:
  static uint32x4_t words(const std::uint8_t* p) { return vreinterpretq_u32_u8(vld1q_u8(p)); }
  float32x4_t at(uint32x4_t words, int by) const {
    const uint32x4_t numbers = vandq_u32(vshlq_u32(words, vdupq_n_s32(-by)), vdupq_n_u32(15));
    return vfmaq_f32(bias, vcvtq_f32_u32(numbers), scale);
  }
};

// of an address, not a pointer: it may lie behind the last row
inline void prefetch(std::uintptr_t p) { __builtin_prefetch(reinterpret_cast<const void*>(p)); }

// what 32 registers hold, four for each V
inline constexpr int kMostX = 6;
constexpr int tile_rows(int x, bool) { return x == 1 ? 4 : x == 2 ? 2 : 1; }
inline constexpr int kBlockRows = 2, kBlockX = 3;
inline constexpr int kTileSums = 6;

}  // namespace mlxrunner::ISA
