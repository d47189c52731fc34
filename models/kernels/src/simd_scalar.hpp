// Sixteen float32 values without intrinsics, for every processor. simd_avx512.hpp documents the
// rules for all SIMD headers. The compiler translates the vectors of four values to instructions of
// the target. If the target has no fused multiply-add (x86-64 below AVX2), products are rounded
// before they are added. In this case, the results differ from those of the other instruction sets
// in the last bits.
#pragma once

#include <cstdint>

namespace mlxrunner::ISA {

inline constexpr char kName[] = "scalar";

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "packed words are read as bytes");

using SubVector = float __attribute__((vector_size(16)));
using Bits = std::uint32_t __attribute__((vector_size(16)));
using Ints = std::int32_t __attribute__((vector_size(16)));
inline constexpr int kSubVectors = 4;

struct V {
  SubVector sub[kSubVectors];
};

inline SubVector splat(float x) { return SubVector{x, x, x, x}; }
inline SubVector load_sub(const float* p) {
  SubVector a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
inline void add_product(SubVector& sum, SubVector a, SubVector b) {
#if defined(__FP_FAST_FMAF)
  for (int i = 0; i < 4; i++) sum[i] = __builtin_fmaf(a[i], b[i], sum[i]);
#else
  sum = a * b + sum;
#endif
}

// f(i) for each sub-vector
template <class F>
inline V per_sub_vector(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}

inline V set1(float x) {
  return per_sub_vector([&](int) { return splat(x); });
}
inline V zero() { return set1(0); }
inline V load(const float* p) {
  return per_sub_vector([&](int i) { return load_sub(p + 4 * i); });
}
inline void store(float* p, V a) { __builtin_memcpy(p, &a, sizeof a); }
// the first n of 16 lanes, the others zero
inline V load(const float* p, std::int64_t n) {
  V a = zero();
  __builtin_memcpy(&a, p, static_cast<std::size_t>(n) * 4);
  return a;
}
inline void store(float* p, V a, std::int64_t n) {
  __builtin_memcpy(p, &a, static_cast<std::size_t>(n) * 4);
}
inline V fma(V a, V b, V c) {
  return per_sub_vector([&](int i) {
    SubVector sum = c.sub[i];
    add_product(sum, a.sub[i], b.sub[i]);
    return sum;
  });
}
inline V add(V a, V b) {
  return per_sub_vector([&](int i) { return a.sub[i] + b.sub[i]; });
}
inline V sub(V a, V b) {
  return per_sub_vector([&](int i) { return a.sub[i] - b.sub[i]; });
}
inline V mul(V a, V b) {
  return per_sub_vector([&](int i) { return a.sub[i] * b.sub[i]; });
}
inline V div(V a, V b) {
  return per_sub_vector([&](int i) { return a.sub[i] / b.sub[i]; });
}
inline SubVector select(Bits where, SubVector x, SubVector y) {
  return reinterpret_cast<SubVector>((where & reinterpret_cast<Bits>(x)) |
                                     (~where & reinterpret_cast<Bits>(y)));
}
// a < b ? x : y
inline V less(V a, V b, V x, V y) {
  return per_sub_vector([&](int i) {
    return select(reinterpret_cast<Bits>(a.sub[i] < b.sub[i]), x.sub[i], y.sub[i]);
  });
}
// a > b ? a : b and a < b ? a : b, so b if either is NaN
inline V max(V a, V b) { return less(b, a, a, b); }
inline V min(V a, V b) { return less(a, b, a, b); }
// shifts each lane's bits, as an integer, left by 23
inline V shift_into_exponent(V a) {
  return per_sub_vector(
      [&](int i) { return reinterpret_cast<SubVector>(reinterpret_cast<Bits>(a.sub[i]) << 23); });
}

inline Bits load_4_u16(const std::uint16_t* p) { return Bits{p[0], p[1], p[2], p[3]}; }
inline V load_bf16(const std::uint16_t* p) {
  return per_sub_vector(
      [&](int i) { return reinterpret_cast<SubVector>(load_4_u16(p + 4 * i) << 16); });
}
// the even or odd ones of 32 numbers
inline Bits load_4_u32(const std::uint16_t* p) {
  Bits a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
inline V load_even_bf16(const std::uint16_t* p) {
  return per_sub_vector(
      [&](int i) { return reinterpret_cast<SubVector>(load_4_u32(p + 8 * i) << 16); });
}
inline V load_odd_bf16(const std::uint16_t* p) {
  return per_sub_vector(
      [&](int i) { return reinterpret_cast<SubVector>(load_4_u32(p + 8 * i) & 0xffff0000); });
}
inline SubVector f16_to_f32(Bits h) {
  const Bits sign = (h & 0x8000) << 16, size = h & 0x7fff, bits = size << 13;
  // The exponent bias is 15 in float16 and 127 in float32. The product is also exact for denormals.
  const SubVector number = reinterpret_cast<SubVector>(bits) * splat(0x1p112f);
  // handles infinities and NaN; NaN becomes quiet
  const Bits quiet = reinterpret_cast<Bits>(size > 0x7c00) & 0x400000;
  const SubVector special = reinterpret_cast<SubVector>(bits | 0x7f800000 | quiet);
  const SubVector magnitude = select(reinterpret_cast<Bits>(size >= 0x7c00), special, number);
  return reinterpret_cast<SubVector>(reinterpret_cast<Bits>(magnitude) | sign);
}
inline V load_f16(const std::uint16_t* p) {
  return per_sub_vector([&](int i) { return f16_to_f32(load_4_u16(p + 4 * i)); });
}
inline V load(const std::uint16_t* p, std::int64_t n, bool bf16) {
  std::uint16_t lanes[16] = {};
  __builtin_memcpy(lanes, p, static_cast<std::size_t>(n) * 2);
  return bf16 ? load_bf16(lanes) : load_f16(lanes);
}
// rounding half to even; for numbers whose result is finite, and NaN
inline std::uint16_t f32_to_f16(float x) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  const std::uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<std::uint16_t>(sign | 0x7e00 | ((bits >> 13) & 0x3ff));
  if (bits < 0x38800000) {  // the result is denormal: adding 0.5 rounds at the right bit
    float size;
    __builtin_memcpy(&size, &bits, sizeof size);
    size += 0.5f;
    __builtin_memcpy(&bits, &size, sizeof bits);
    return static_cast<std::uint16_t>(sign | (bits - 0x3f000000));
  }
  // the exponent bias is 127 in float32 and 15 in float16
  bits += 0xfff + ((bits >> 13) & 1) - (112u << 23);
  return static_cast<std::uint16_t>(sign | (bits >> 13));
}
inline void store_f16(std::uint16_t* p, V a) {
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < 16; i++) p[i] = f32_to_f16(lanes[i]);
}
// to integers, rounding half to even
inline void store(std::int32_t* p, V a) {
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < 16; i++) p[i] = static_cast<std::int32_t>(__builtin_rintf(lanes[i]));
}

// adds lanes i and i+8, then i and i+4, i and i+2, i and i+1
inline float sum(V a) {
  const SubVector q = (a.sub[0] + a.sub[2]) + (a.sub[1] + a.sub[3]);
  return (q[0] + q[2]) + (q[1] + q[3]);
}
inline void sum4(V a, V b, V c, V d, float* out) {
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
}

// column i of the four rows becomes four contiguous numbers at to + i * to_step
inline void transpose_4x4(const float* const (&rows)[4], float* to, std::int64_t to_step) {
  for (int i = 0; i < 4; i++)
    for (int r = 0; r < 4; r++) to[i * to_step + r] = rows[r][i];
}

inline SubVector broadcast(float x) { return splat(x); }
inline SubVector load_sub(const std::uint16_t* p, bool bf16) {
  return bf16 ? reinterpret_cast<SubVector>(load_4_u16(p) << 16) : f16_to_f32(load_4_u16(p));
}
inline SubVector multiply(SubVector a, SubVector b) { return a * b; }
inline SubVector plus(SubVector a, SubVector b) { return a + b; }
inline void store_sub(float* p, SubVector a) { __builtin_memcpy(p, &a, sizeof a); }
// kWordRows bytes as numbers
template <bool kSigned>
inline SubVector load_bytes(const void* p) {
  SubVector numbers;
  for (int i = 0; i < 4; i++) {
    const std::uint8_t byte = static_cast<const std::uint8_t*>(p)[i];
    numbers[i] = kSigned ? static_cast<float>(static_cast<std::int8_t>(byte))
                         : static_cast<float>(byte);
  }
  return numbers;
}
// replaces 64 bytes, all below 16, with table[byte]
inline void look_up(const std::uint8_t* table, void* bytes) {
  auto* at = static_cast<std::uint8_t*>(bytes);
  for (int i = 0; i < 64; i++) at[i] = table[at[i]];
}

// Words of kWordRows rows, and sums of integer pairs; see simd_avx512.hpp.
using WordVector = Bits;
using IntVector = Ints;
inline constexpr int kWordRows = 4;
inline WordVector load_words(const std::uint32_t* p) {
  WordVector a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
inline WordVector broadcast_word(const std::int8_t* p) {
  std::uint32_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return WordVector{word, word, word, word};
}
template <int kFrom, int kCount>
inline WordVector extract_bits(WordVector a) {
  return (a >> kFrom) & ((1u << kCount) - 1) * 0x10001u;
}
inline IntVector zero_int() { return IntVector{}; }
[[gnu::always_inline]] inline void add_pairs(IntVector& sum, WordVector a, WordVector b) {
  const Ints x = reinterpret_cast<Ints>(a), y = reinterpret_cast<Ints>(b);
  sum += (reinterpret_cast<Ints>(a << 16) >> 16) * (reinterpret_cast<Ints>(b << 16) >> 16) +
         (x >> 16) * (y >> 16);
}
inline IntVector add_int(IntVector a, IntVector b) { return a + b; }
inline SubVector to_float(IntVector a) { return __builtin_convertvector(a, SubVector); }

// see simd_avx512.hpp
using RowInts = Ints;
inline RowInts broadcast_int(std::int32_t x) { return RowInts{x, x, x, x}; }
inline RowInts plus(RowInts a, RowInts b) { return a + b; }
inline RowInts multiply(RowInts a, RowInts b) { return a * b; }
inline RowInts load_byte_ints(const void* p) {
  const auto* bytes = static_cast<const std::int8_t*>(p);
  return RowInts{bytes[0], bytes[1], bytes[2], bytes[3]};
}
inline RowInts join_pairs(IntVector a) { return a; }

// takes an address, not a pointer: it may be past the last row
[[gnu::always_inline]] inline void prefetch(std::uintptr_t p) {
  __builtin_prefetch(reinterpret_cast<const void*>(p));
}

// tile sizes that fit into sixteen registers of four lanes
inline constexpr int kPanelsPerTile = 1, kInputRowsPerTile = 3;
inline constexpr int kMaxIntRows = 2;
inline constexpr int kTileRows = 3, kTileSums = 3;

}  // namespace mlxrunner::ISA
