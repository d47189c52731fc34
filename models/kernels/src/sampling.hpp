// The passes over a row of logits that sampling needs.
//
// Knows: `V`, vmath. Must not know: filters, sorting. This header uses plain loops where the
// compiler vectorizes them for the instruction set.
#pragma once

#include "kernels.hpp"
#include "vmath.hpp"

namespace mlxrunner::ISA {

// The largest of n numbers. If one of them is NaN, the result is arbitrary.
inline float row_max(const float* x, i64 n) {
  float best = -__builtin_inff();
  i64 i = 0;
  if (n >= 16) {
    V lanes = load(x);
    for (i = 16; i + 16 <= n; i += 16) lanes = max(load(x + i), lanes);
    float each[16];
    store(each, lanes);
    for (float one : each) best = one > best ? one : best;
  }
  for (; i < n; i++) best = x[i] > best ? x[i] : best;
  return best;
}

// The largest of n numbers; NaN if one of them is NaN or +infinity.
inline float checked_max(const float* x, i64 n) {
  const V infinity = set1(__builtin_inff()), one = set1(1);
  float best = -__builtin_inff();
  bool bad = false;
  V lanes = set1(best), flags = zero();
  i64 i = 0;
  for (; i + 16 <= n; i += 16) {
    const V some = load(x + i);
    lanes = max(some, lanes);
    flags = less(some, infinity, flags, one);
  }
  float each[16], flag[16];
  store(each, lanes), store(flag, flags);
  for (int lane = 0; lane < 16; lane++) {
    best = each[lane] > best ? each[lane] : best;
    bad |= flag[lane] != 0;
  }
  for (; i < n; i++) {
    best = x[i] > best ? x[i] : best;
    bad |= !(x[i] < __builtin_inff());
  }
  return bad ? __builtin_nanf("") : best;
}

// Computes out = x where bit i of `bits` is set, and -infinity elsewhere. out may be x.
inline void mask(const float* x, const std::uint32_t* bits, i64 n, float* out) {
  for (i64 begin = 0; begin < n; begin += 32) {
    const std::uint32_t word = bits[begin / 32];
    const i64 end = n - begin < 32 ? n : begin + 32;
    for (i64 i = begin; i < end; i++)
      out[i] = word & (std::uint32_t{1} << (i - begin)) ? x[i] : -__builtin_inff();
  }
}

// exp(x), but 0 below e^-80. Such a small mass has no effect on a sum and is never drawn, and
// arithmetic with even smaller, denormal numbers is slow.
inline V exp_or_zero(V x) {
  const V lowest = set1(-80);
  return less(x, lowest, zero(), exp(max(lowest, x)));
}

// Computes scaled = (x - largest) / temperature and mass = exp(scaled), see exp_or_zero. Returns the
// sum of mass, which is added in an order that depends only on n.
inline float scale_and_exp(const float* x, i64 n, float largest, float temperature, float* scaled,
                           float* mass) {
  const V shift = set1(largest), divisor = set1(temperature);
  V sums[4] = {zero(), zero(), zero(), zero()};
  i64 i = 0;
  for (i64 block = 0; i + 16 <= n; i += 16, block++) {
    const V s = div(sub(load(x + i), shift), divisor);
    const V e = exp_or_zero(s);
    store(scaled + i, s);
    store(mass + i, e);
    sums[block % 4] = add(sums[block % 4], e);
  }
  if (i < n) {
    const V s = div(sub(load(x + i, n - i), shift), divisor);
    const V e = exp_or_zero(s);
    store(scaled + i, s, n - i);
    store(mass + i, e, n - i);
    float rest[16] = {};
    store(rest, e, n - i);
    sums[0] = add(sums[0], load(rest));
  }
  return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

// The sum of mass of the tokens with scaled > edge, in the order of scale_and_exp.
inline float mass_above(const float* scaled, const float* mass, i64 n, float edge) {
  const V threshold = set1(edge);
  V sums[4] = {zero(), zero(), zero(), zero()};
  i64 i = 0;
  for (i64 block = 0; i + 16 <= n; i += 16, block++)
    sums[block % 4] =
        add(sums[block % 4], less(threshold, load(scaled + i), load(mass + i), zero()));
  if (i < n) {
    const V s = load(scaled + i, n - i), e = load(mass + i, n - i);
    sums[0] = add(sums[0], less(threshold, s, e, zero()));
  }
  return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

// Computes the largest number of each block of kSampleBlock numbers. The last block may be shorter.
inline void block_maxima(const float* x, i64 n, float* maxima) {
  for (i64 begin = 0; begin < n; begin += kSampleBlock)
    *maxima++ = row_max(x + begin, n - begin < kSampleBlock ? n - begin : kSampleBlock);
}

// Stores the indices of the numbers in [low, high) in order. Returns how many there are.
inline i64 find_between(const float* x, i64 n, float low, float high, std::int32_t* found) {
  i64 count = 0;
  for (i64 begin = 0; begin < n; begin += kSampleBlock) {
    const i64 end = n - begin < kSampleBlock ? n : begin + kSampleBlock;
    std::int32_t any = 0;
    for (i64 i = begin; i < end; i++) any |= (x[i] >= low) & (x[i] < high);
    if (!any) continue;
    for (i64 i = begin; i < end; i++) {
      found[count] = static_cast<std::int32_t>(i);
      count += (x[i] >= low) & (x[i] < high);
    }
  }
  return count;
}

// lowbias32 from Wellons, "Prospecting for Hash Functions", 2018
inline std::uint32_t hash32(std::uint32_t word) {
  word = (word ^ (word >> 16)) * 0x7FEB352Du;
  word = (word ^ (word >> 15)) * 0x846CA68Bu;
  return word ^ (word >> 16);
}

// The uniform number in (0, 1) of a token, and its Gumbel noise. app/engine/sampling/draw.py has
// the same formulas, and explains them.
inline float uniform(NoiseKey key, std::uint32_t token) {
  return (static_cast<float>(hash32(key.base + token * (key.stride | 1u))) + 0.5f) * kUniformUnit;
}
inline float gumbel(float u) {
  const float rest = 1.0f - u;
  const float below = rest - 1.0f < -0x1p-25f ? rest - 1.0f : -0x1p-25f;
  const float log1p = __builtin_logf(rest) * u / below;
  return -__builtin_logf(u > log1p ? u : log1p);
}

// Returns argmax(scaled + noise) of the tokens with scaled >= edge. The most likely token, whose
// scaled logit is 0, is always among them; if there is none because of NaN, the result is -1. mass:
// exp(scaled). Of equal sums, the first one is returned.
//
// The noise is at most -log(u). A token can therefore only be the result if u <= mass / exp(best).
// This test needs no logarithm, and only few tokens pass it.
inline i64 draw(const float* scaled, const float* mass, i64 n, float edge, NoiseKey key) {
  i64 winner = -1;
  float best = -__builtin_inff();
  const auto consider = [&](i64 i) {
    const float sum = scaled[i] + gumbel(uniform(key, static_cast<std::uint32_t>(i)));
    if (sum > best || (sum == best && i < winner)) best = sum, winner = i;
  };
  for (i64 i = 0; i < n; i++) {  // the most likely token makes the bound small
    if (scaled[i] == 0.0f) {
      consider(i);
      break;
    }
  }
  if (winner < 0) return -1;
  const i64 first = winner;
  // with a margin for the rounding of exp and of the logarithms
  float bound = __builtin_expf(-best) * 1.001f;
  for (i64 begin = 0; begin < n; begin += kSampleBlock) {
    const i64 end = n - begin < kSampleBlock ? n : begin + kSampleBlock;
    std::int32_t any = 0;
    for (i64 i = begin; i < end; i++) {
      const float u = uniform(key, static_cast<std::uint32_t>(i));
      any |= (u <= mass[i] * bound) & (scaled[i] >= edge);
    }
    if (!any) continue;
    for (i64 i = begin; i < end; i++) {
      const float u = uniform(key, static_cast<std::uint32_t>(i));
      if (i == first || !(u <= mass[i] * bound) || !(scaled[i] >= edge)) continue;
      const float before = best;
      consider(i);
      if (best != before) bound = __builtin_expf(-best) * 1.001f;
    }
  }
  return winner;
}

// The same for the listed tokens only, as a place in the list; -1 if no token is left.
inline i64 draw_listed(const float* scaled, const std::int32_t* tokens, i64 n, float edge,
                       NoiseKey key) {
  i64 winner = -1;
  float best = -__builtin_inff();
  for (i64 i = 0; i < n; i++) {
    if (!(scaled[i] >= edge)) continue;
    const float sum = scaled[i] + gumbel(uniform(key, static_cast<std::uint32_t>(tokens[i])));
    if (winner < 0 || sum > best) best = sum, winner = i;
  }
  return winner;
}

}  // namespace mlxrunner::ISA
