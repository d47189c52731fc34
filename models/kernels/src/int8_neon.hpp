// Dot products of quantized x and w in groups of four 8-bit integers with NEON. The results are
// bit-identical to those of int16_dot.hpp.
//
// Knows: words of kWordRows rows (simd_neon.hpp). Must not know: scales, panels.
//
// The bytes of an integer of x are the same as in int8_vnni.hpp. Sixteen integers take one register
// for each plane:
//
//   a…(16) b…(16) c…(16)
//
// An instruction multiplies four bytes of such a register, selected by their index, by four
// integers of each of four rows of w. Therefore, x is not broadcast.
//
// With FEAT_I8MM, the integers of w are unsigned (usdot). With FEAT_DotProd alone, they are signed
// (sdot). For 4 bits, this makes no difference. For 8 bits, w - 128 is multiplied instead of w, and
// the sums start with 128 * (sum of x) instead of zero. These first sums, one for each plane, are
// stored in front of the integers of each group.
#pragma once

#include "panels.hpp"
#include "simd_neon.hpp"

namespace mlxrunner::ISA {

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define MLXRUNNER_DOT "usdot"
inline constexpr char kName[] = "neon-i8mm";
inline constexpr bool kSigned = false;
#else
#define MLXRUNNER_DOT "sdot"
inline constexpr char kName[] = "neon-dot";
inline constexpr bool kSigned = true;
#endif

inline constexpr int kNumbersPerDot = 16;                      // integers of a row per add_dot
constexpr int step_numbers(int) { return 32; }                 // integers of a row per iteration
constexpr int input_bytes(int, int planes) { return planes; }  // per integer of x
constexpr int num_sums(int planes) { return planes; }          // accumulators per row of x
inline constexpr int kHeaderBytes = kSigned ? 16 : 0;  // the size of the first sums of a group
constexpr bool has_byte_step(int, int) { return false; }  // see int16_avx2.hpp
constexpr bool fuses_codes(int) { return false; }          // see int8_vnni.hpp
inline constexpr int kRowSkew = 0;                        // see int16_avx2.hpp
// 18 accumulators, four registers of w, three of x and a mask. With eight rows, GCC 12 keeps
// accumulators in memory.
inline constexpr int kMaxIntRows = 6;

using IntVector = int32x4_t;
inline IntVector zero_int() { return vdupq_n_s32(0); }
inline IntVector add_int(IntVector x, IntVector y) { return vaddq_s32(x, y); }
inline SubVector to_float(IntVector x) { return vcvtq_f32_s32(x); }

// sixteen integers of each row, one byte each
struct Numbers {
  uint8x16_t fours[4];
};

// the J-th sixteen integers of a step
template <int kBits, int J>
inline Numbers select_numbers(const std::uint32_t* words) {
  Numbers numbers;
  MLXRUNNER_UNROLL
  for (int i = 0; i < 4; i++) {
    const std::uint32_t* word = words + (4 * J + i) * kBits / 8 * kPanelRows;
    const uint8x16_t bytes = vreinterpretq_u8_u32(vld1q_u32(word));
    if constexpr (kBits == 4)
      numbers.fours[i] = i % 2 ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
    else numbers.fours[i] = kSigned ? veorq_u8(bytes, vdupq_n_u8(128)) : bytes;
  }
  return numbers;
}

// M rows of x, which are `stride` bytes apart.
template <int M>
struct InputRows {
  const std::int8_t* x;
  i64 stride;

  void advance(i64 bytes) { x += bytes; }

  // Loads the first sums of a group, if they are not zero, and advances to its integers.
  template <int kBits, int kPlanes, class Sums>
  void load_first_sums(Sums (&sums)[M]) {
    MLXRUNNER_UNROLL
    for (int i = 0; kSigned && kBits == 8 && i < M * kPlanes; i++) {
      const auto* first = reinterpret_cast<const std::int32_t*>(x + i / kPlanes * stride);
      sums[i / kPlanes].sums[i % kPlanes] = vld1q_dup_s32(first + i % kPlanes);
    }
    advance(kHeaderBytes);
  }
};

// Multiplies four integers of each row of w by the kIndex-th four bytes of each plane of x. This is
// inline assembly, because GCC 12 copies accumulators back and forth with the intrinsics.
template <int kIndex, int kPlanes>
[[gnu::always_inline]]
inline void dot_planes(IntVector (&sums)[kPlanes], uint8x16_t w, const int8x16_t (&x)[kPlanes]) {
  MLXRUNNER_UNROLL
  for (int p = 0; p < kPlanes; p++)
    asm(MLXRUNNER_DOT " %0.4s, %1.16b, %2.4b[%c3]"
        : "+w"(sums[p]) : "w"(w), "w"(x[p]), "i"(kIndex));
}

// The J-th numbers of a step by row kRow of x. sums: one per plane, the most significant one first.
template <int kRow, int J, int kPlanes, int M>
[[gnu::always_inline]]
inline void add_dot(IntVector (&sums)[kPlanes], Numbers numbers, const InputRows<M>& x) {
  int8x16_t planes[kPlanes];
  MLXRUNNER_UNROLL
  for (int p = 0; p < kPlanes; p++)
    planes[p] = vld1q_s8(x.x + kRow * x.stride + (J * kPlanes + p) * kNumbersPerDot);
  dot_planes<0>(sums, numbers.fours[0], planes);
  dot_planes<1>(sums, numbers.fours[1], planes);
  dot_planes<2>(sums, numbers.fours[2], planes);
  dot_planes<3>(sums, numbers.fours[3], planes);
}

// Truncates sixteen integers to bytes.
inline int8x16_t narrow(const int32x4_t (&n)[4]) {
  const int16x8_t low = vcombine_s16(vmovn_s32(n[0]), vmovn_s32(n[1])),
                  high = vcombine_s16(vmovn_s32(n[2]), vmovn_s32(n[3]));
  return vcombine_s8(vmovn_s16(low), vmovn_s16(high));
}

// Stores the first sums and the integers of x, sixteen at a time.
template <int kBits, int kPlanes>
inline void store_input(const std::int32_t* numbers, i64 count, std::int8_t* out) {
  std::int32_t totals[4] = {};
  std::int8_t* bytes_out = out + kHeaderBytes;
  for (i64 k = 0; k < count; k += 16, bytes_out += 16 * kPlanes) {
    int32x4_t n[4];
    MLXRUNNER_UNROLL
    for (int i = 0; i < 4; i++) n[i] = vld1q_s32(numbers + k + 4 * i);
    MLXRUNNER_UNROLL
    for (int p = kPlanes - 1; p >= 0; p--) {
      const int8x16_t bytes = narrow(n);
      vst1q_s8(bytes_out + 16 * p, bytes);
      totals[p] += vaddlvq_s8(bytes);
      MLXRUNNER_UNROLL
      for (int i = 0; i < 4; i++) n[i] = vrshrq_n_s32(n[i], 8);
    }
  }
  if constexpr (kSigned && kBits == 8)
    vst1q_s32(reinterpret_cast<std::int32_t*>(out), vshlq_n_s32(vld1q_s32(totals), 7));
}

inline IntVector shift_and_add(IntVector high, IntVector low) {
  return vaddq_s32(vshlq_n_s32(high, 8), low);
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
