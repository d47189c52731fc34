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

// Calls add_vector(sum, offset) for each sixteen numbers of n, and add_rest(sum, offset) for fewer
// than sixteen at the end. Returns the total of the sums, which are added in an order that depends
// only on n.
template <typename Add, typename AddRest>
inline float sum_of_vectors(i64 n, Add add_vector, AddRest add_rest) {
  V sums[4] = {zero(), zero(), zero(), zero()};
  i64 i = 0;
  for (; i + 64 <= n; i += 64) {
    add_vector(sums[0], i);
    add_vector(sums[1], i + 16);
    add_vector(sums[2], i + 32);
    add_vector(sums[3], i + 48);
  }
  for (int next = 0; i + 16 <= n; i += 16) add_vector(sums[next++], i);
  if (i < n) add_rest(sums[0], i);
  return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

// Computes scaled = (x - largest) / temperature and mass = exp(scaled), see exp_or_zero. Returns the
// sum of mass.
inline float scale_and_exp(const float* x, i64 n, float largest, float temperature, float* scaled,
                           float* mass) {
  const V shift = set1(largest), divisor = set1(temperature);
  return sum_of_vectors(
      n,
      [=](V& total, i64 i) {
        const V s = div(sub(load(x + i), shift), divisor);
        const V e = exp_or_zero(s);
        store(scaled + i, s);
        store(mass + i, e);
        total = add(total, e);
      },
      [=](V& total, i64 i) {
        const V s = div(sub(load(x + i, n - i), shift), divisor);
        const V e = exp_or_zero(s);
        store(scaled + i, s, n - i);
        store(mass + i, e, n - i);
        float rest[16] = {};
        store(rest, e, n - i);
        total = add(total, load(rest));
      });
}

// The sum of mass of the tokens with scaled > edge, in the order of scale_and_exp.
inline float mass_above(const float* scaled, const float* mass, i64 n, float edge) {
  const V threshold = set1(edge);
  return sum_of_vectors(
      n,
      [=](V& total, i64 i) {
        total = add(total, less(threshold, load(scaled + i), load(mass + i), zero()));
      },
      [=](V& total, i64 i) {
        const V s = load(scaled + i, n - i), e = load(mass + i, n - i);
        total = add(total, less(threshold, s, e, zero()));
      });
}

// Computes the largest number of each block of kSampleBlock numbers. The last block may be shorter.
inline void block_maxima(const float* x, i64 n, float* maxima) {
  for (i64 begin = 0; begin < n; begin += kSampleBlock)
    *maxima++ = row_max(x + begin, n - begin < kSampleBlock ? n - begin : kSampleBlock);
}

// Calls examine(begin, end) for each block of kSampleBlock places, of n, in which test(begin,
// offset) is true for the place begin + offset of any. Ends early if `examine` returns true.
//
// The compiler vectorizes the test, if it has no branch. It gets the place in two parts, because
// 32-bit offsets are twice as many in a vector as 64-bit places.
template <typename Test, typename Examine>
inline void search_blocks(i64 n, Test test, Examine examine) {
  for (i64 begin = 0; begin < n; begin += kSampleBlock) {
    std::int32_t any = 0;
    const i64 count = n - begin < kSampleBlock ? n - begin : kSampleBlock;
    if (count == kSampleBlock) {
      for (int offset = 0; offset < kSampleBlock; offset++) any |= test(begin, offset);
    } else {
      for (int offset = 0; offset < count; offset++) any |= test(begin, offset);
    }
    if (any && examine(begin, begin + count)) return;
  }
}

// Stores the indices of the numbers in [low, high) in order. Returns how many there are.
inline i64 find_between(const float* x, i64 n, float low, float high, std::int32_t* found) {
  i64 count = 0;
  const auto is_between = [=](i64 begin, int offset) {
    return (x[begin + offset] >= low) & (x[begin + offset] < high);
  };
  search_blocks(n, is_between, [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; i++) {
      found[count] = static_cast<std::int32_t>(i);
      count += is_between(i, 0);
    }
    return false;
  });
  return count;
}

// The first index of a 0, or -1.
inline i64 find_zero(const float* x, i64 n) {
  i64 found = -1;
  const auto is_zero = [=](i64 begin, int offset) { return x[begin + offset] == 0.0f; };
  search_blocks(n, is_zero, [&](i64 begin, i64) {
    while (x[begin] != 0.0f) begin++;
    found = begin;
    return true;
  });
  return found;
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
  const i64 first = find_zero(scaled, n);  // the most likely token makes the bound small
  if (first < 0) return -1;
  const auto noisy = [=](i64 i) {
    return scaled[i] + gumbel(uniform(key, static_cast<std::uint32_t>(i)));
  };
  i64 winner = first;
  float best = noisy(first);
  // with a margin for the rounding of exp and of the logarithms
  const auto bound_of = [](float sum) { return __builtin_expf(-sum) * 1.001f; };
  float bound = bound_of(best);
  const auto can_win = [&](i64 begin, int offset) {
    const auto token = static_cast<std::uint32_t>(begin) + static_cast<std::uint32_t>(offset);
    return (uniform(key, token) <= mass[begin + offset] * bound) &
           (scaled[begin + offset] >= edge);
  };
  search_blocks(n, can_win, [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; i++) {
      if (i == first || !can_win(i, 0)) continue;
      const float sum = noisy(i);
      if (!(sum > best || (sum == best && i < winner))) continue;
      winner = i;
      if (sum != best) best = sum, bound = bound_of(best);
    }
    return false;
  });
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
