// Sixteen float32 without intrinsics, for every processor there is; see lanes_avx512.hpp for what
// all such files keep to. The vectors of four are the compiler's: it makes of them what the target
// has. Where that has no fused multiply-add (x86-64 below AVX2) products are rounded before they
// are added, so that results differ from the other files' in the last bits.
#pragma once

#include <cstdint>

namespace mlxrunner::ISA {

inline constexpr char kName[] = "scalar";

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "packed words are read as bytes");

using Part = float __attribute__((vector_size(16)));
using Bits = std::uint32_t __attribute__((vector_size(16)));
using Ints = std::int32_t __attribute__((vector_size(16)));
inline constexpr int kParts = 4;

struct V {
  Part parts[kParts];
};

inline Part all(float x) { return Part{x, x, x, x}; }
inline Part load_part(const float* p) {
  Part a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
inline void add_product(Part& sum, Part a, Part b) {
#if defined(__FP_FAST_FMAF)
  for (int i = 0; i < 4; i++) sum[i] = __builtin_fmaf(a[i], b[i], sum[i]);
#else
  sum = a * b + sum;
#endif
}

// f(i) for each part
template <class F>
inline V each(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}

inline V set1(float x) {
  return each([&](int) { return all(x); });
}
inline V zero() { return set1(0); }
inline V load(const float* p) {
  return each([&](int i) { return load_part(p + 4 * i); });
}
inline void store(float* p, V a) { __builtin_memcpy(p, &a, sizeof a); }
// the first n of 16, zeros behind
inline V load(const float* p, std::int64_t n) {
  V a = zero();
  __builtin_memcpy(&a, p, static_cast<std::size_t>(n) * 4);
  return a;
}
inline void store(float* p, V a, std::int64_t n) {
  __builtin_memcpy(p, &a, static_cast<std::size_t>(n) * 4);
}
inline V fma(V a, V b, V c) {
  return each([&](int i) {
    Part sum = c.parts[i];
    add_product(sum, a.parts[i], b.parts[i]);
    return sum;
  });
}
inline V add(V a, V b) {
  return each([&](int i) { return a.parts[i] + b.parts[i]; });
}
inline V sub(V a, V b) {
  return each([&](int i) { return a.parts[i] - b.parts[i]; });
}
inline V mul(V a, V b) {
  return each([&](int i) { return a.parts[i] * b.parts[i]; });
}
inline V div(V a, V b) {
  return each([&](int i) { return a.parts[i] / b.parts[i]; });
}
inline Part chosen(Bits where, Part x, Part y) {
  return reinterpret_cast<Part>((where & reinterpret_cast<Bits>(x)) |
                                (~where & reinterpret_cast<Bits>(y)));
}
// a < b ? x : y
inline V less(V a, V b, V x, V y) {
  return each([&](int i) {
    return chosen(reinterpret_cast<Bits>(a.parts[i] < b.parts[i]), x.parts[i], y.parts[i]);
  });
}
// a > b ? a : b and a < b ? a : b, so b where either is not a number
inline V max(V a, V b) { return less(b, a, a, b); }
inline V min(V a, V b) { return less(a, b, a, b); }
// each lane's bits as an integer, 23 places further left
inline V raised(V a) {
  return each([&](int i) {
    return reinterpret_cast<Part>(reinterpret_cast<Bits>(a.parts[i]) << 23);
  });
}

inline Bits four(const std::uint16_t* p) { return Bits{p[0], p[1], p[2], p[3]}; }
inline V load_bf16(const std::uint16_t* p) {
  return each([&](int i) { return reinterpret_cast<Part>(four(p + 4 * i) << 16); });
}
inline Part wide_f16(Bits h) {
  const Bits sign = (h & 0x8000) << 16, size = h & 0x7fff, bits = size << 13;
  // the exponent counts from 15 there and from 127 here; so denormal numbers, too, come out right
  const Part number = reinterpret_cast<Part>(bits) * all(0x1p112f);
  // infinite or not a number, and then a quiet one
  const Bits quiet = reinterpret_cast<Bits>(size > 0x7c00) & 0x400000;
  const Part beyond = reinterpret_cast<Part>(bits | 0x7f800000 | quiet);
  const Part of_size = chosen(reinterpret_cast<Bits>(size >= 0x7c00), beyond, number);
  return reinterpret_cast<Part>(reinterpret_cast<Bits>(of_size) | sign);
}
inline V load_f16(const std::uint16_t* p) {
  return each([&](int i) { return wide_f16(four(p + 4 * i)); });
}
inline V load(const std::uint16_t* p, std::int64_t n, bool bf16) {
  std::uint16_t all_of[16] = {};
  __builtin_memcpy(all_of, p, static_cast<std::size_t>(n) * 2);
  return bf16 ? load_bf16(all_of) : load_f16(all_of);
}
// to whole numbers, halves to even ones
inline void store(std::int32_t* p, V a) {
  float all_of[16];
  store(all_of, a);
  for (int i = 0; i < 16; i++) p[i] = static_cast<std::int32_t>(__builtin_rintf(all_of[i]));
}

// lanes i and i+8, then i and i+4, i and i+2, i and i+1
inline float sum(V a) {
  const Part q = (a.parts[0] + a.parts[2]) + (a.parts[1] + a.parts[3]);
  return (q[0] + q[2]) + (q[1] + q[3]);
}
inline void sum4(V a, V b, V c, V d, float* out) {
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
}

inline Part all_of(float x) { return all(x); }
inline Part load_part(const std::uint16_t* p, bool bf16) {
  return bf16 ? reinterpret_cast<Part>(four(p) << 16) : wide_f16(four(p));
}
inline Part times(Part a, Part b) { return a * b; }
inline void store_part(float* p, Part a) { __builtin_memcpy(p, &a, sizeof a); }

// Words of kAbreast rows, and sums of what pairs make; see lanes_avx512.hpp.
using Words = Bits;
using Sum = Ints;
inline constexpr int kAbreast = 4;
inline Words load_words(const std::uint32_t* p) {
  Words a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
inline Words all_words(const std::int8_t* p) {
  std::uint32_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return Words{word, word, word, word};
}
template <int kFrom, int kCount>
inline Words bits_of(Words a) {
  return (a >> kFrom) & ((1u << kCount) - 1) * 0x10001u;
}
inline Sum none() { return Sum{}; }
inline void add_pairs(Sum& sum, Words a, Words b) {
  const Ints x = reinterpret_cast<Ints>(a), y = reinterpret_cast<Ints>(b);
  sum += (reinterpret_cast<Ints>(a << 16) >> 16) * (reinterpret_cast<Ints>(b << 16) >> 16) +
         (x >> 16) * (y >> 16);
}
inline Sum both(Sum a, Sum b) { return a + b; }
inline Part to_part(Sum a) { return __builtin_convertvector(a, Part); }

// of an address, not a pointer: it may lie behind the last row
inline void prefetch(std::uintptr_t p) { __builtin_prefetch(reinterpret_cast<const void*>(p)); }

// what sixteen registers of four lanes hold
inline constexpr int kStripsAbreast = 1, kBlockX = 3;
inline constexpr int kMostWhole = 2;
inline constexpr int kTileRows = 3, kTileSums = 3;

}  // namespace mlxrunner::ISA
