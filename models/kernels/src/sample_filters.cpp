#include "sample_filters.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "isa_dispatch.hpp"
#include "scratch.hpp"

namespace mlxrunner {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The number of buckets that divide the logits of a nucleus by size.
constexpr std::int64_t kBuckets = 2048;

// The number of draws before the edge of the nucleus is computed, and the smallest top_p with which
// draws are tried before.
constexpr int kMaxTrialDraws = 4;
constexpr float kMinTrialTopP = 0.5f;

struct ForScaled;
struct ForMass;
struct ForMaxima;
struct ForFound;

bool is_more_likely(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

std::int32_t* index_scratch(std::int64_t count) {
  static_assert(sizeof(std::int32_t) == sizeof(float));
  return reinterpret_cast<std::int32_t*>(scratch<ForFound>(static_cast<std::size_t>(count)));
}

// The smallest scaled logit in the nucleus. `before` is the probability mass of all more likely
// tokens; a token is in the nucleus if it is less than `bound`. Tokens with equal logits are kept
// or removed together.
class NucleusEdge {
 public:
  NucleusEdge(double before, double bound) : before_(before), bound_(bound) {}

  // Takes tokens in descending order. Returns false at the first one outside of the nucleus.
  bool take(float scaled, float mass) {
    if (scaled != edge_) {
      before_ += pending_;
      pending_ = 0;
      if (!(before_ < bound_)) return false;
      edge_ = scaled;
    }
    pending_ += mass;
    return true;
  }

  float edge() const { return edge_; }

 private:
  double before_, bound_, pending_ = 0;
  float edge_ = kInfinity;
};

// Finds the nucleus edge of a row without sorting it. Tokens are counted in buckets by their scaled
// logit. Only the tokens of the bucket in which the mass reaches the bound are sorted.
float find_nucleus_edge(const float* scaled, const float* mass, std::int64_t n, float total,
                        float top_p) {
  const double bound = static_cast<double>(top_p) * total;
  // All tokens with less mass than this together have less mass than the rest outside of the
  // nucleus, so none of them is inside.
  const double least = 0.999 * (1.0 - top_p) * total / static_cast<double>(n);
  const float lowest = std::max(-80.0f, static_cast<float>(std::log(std::max(least, 1e-34))));
  double sums[kBuckets] = {};
  const float width = static_cast<float>(kBuckets) / (lowest - 1e-3f);
  const auto bucket_of = [&](float s) {
    return std::min<std::int64_t>(kBuckets - 1, static_cast<std::int64_t>(s * width));
  };
  // A list, and not a branch in the loop: a branch on each logit is often mispredicted.
  std::int32_t* found = index_scratch(n);
  std::int64_t count = kernels().find_between(scaled, n, lowest, kInfinity, found);
  for (std::int64_t i = 0; i < count; i++) sums[bucket_of(scaled[found[i]])] += mass[found[i]];
  std::int64_t crossing = 0;
  double before = 0;
  while (crossing < kBuckets - 1 && before + sums[crossing] < bound) before += sums[crossing++];
  // a range of logits that contains the bucket
  const float slack = 1e-3f - lowest / kBuckets;
  const float high = static_cast<float>(crossing) / width + slack;
  const float low = std::max(lowest, static_cast<float>(crossing + 1) / width - slack);
  count = kernels().find_between(scaled, n, low, high, found);
  std::vector<Candidate> inside;
  for (std::int64_t i = 0; i < count; i++)
    if (bucket_of(scaled[found[i]]) == crossing) inside.push_back({scaled[found[i]], found[i]});
  std::sort(inside.begin(), inside.end(), is_more_likely);
  NucleusEdge edge(before, bound);
  for (const Candidate& one : inside)
    if (!edge.take(one.logit, mass[one.token])) break;
  // the bucket may be empty, if rounding moved the bound beyond the last token
  return inside.empty() ? lowest : edge.edge();
}

// Draws a token of the nucleus with scaled >= low.
//
// If the nucleus has most of the mass, a draw from the whole row is likely to be inside, and one pass
// shows whether it is. If it is outside, all tokens that are not more likely are outside as well, so
// the next draw is from the more likely ones. The noise is the same in each draw, so the first token
// inside is the one that a draw from the nucleus alone would find.
std::int64_t draw_from_nucleus(const float* scaled, const float* mass, std::int64_t n, float total,
                               float top_p, float low, NoiseKey key) {
  for (int draws = 0; draws < kMaxTrialDraws && top_p >= kMinTrialTopP; draws++) {
    const std::int64_t token = kernels().draw(scaled, mass, n, low, key);
    if (token < 0 || scaled[token] == 0) return token;  // the most likely token is always inside
    if (kernels().mass_above(scaled, mass, n, scaled[token]) < top_p * total) return token;
    low = std::nextafter(scaled[token], kInfinity);
  }
  low = std::max(low, find_nucleus_edge(scaled, mass, n, total, top_p));
  return kernels().draw(scaled, mass, n, low, key);
}

// The token of the largest logit; of equal ones, the first.
std::int64_t find_largest(const float* logits, std::int64_t n, float largest) {
  std::int32_t* found = index_scratch(n);
  return kernels().find_between(logits, n, largest, kInfinity, found) ? found[0] : 0;
}

std::int64_t sample_top_k(const float* logits, std::int64_t n, float largest,
                          const Filters& filters, NoiseKey key) {
  const std::vector<Candidate> best = find_top_k(logits, n, filters.top_k);
  const auto count = static_cast<std::int64_t>(best.size());
  std::vector<float> values(best.size()), scaled(best.size()), mass(best.size());
  std::vector<std::int32_t> tokens(best.size());
  for (std::int64_t i = 0; i < count; i++) values[i] = best[i].logit, tokens[i] = best[i].token;
  const float total = kernels().scale_and_exp(values.data(), count, largest, filters.temperature,
                                              scaled.data(), mass.data());
  float low = filters.min_p;
  if (filters.top_p < kInfinity) {
    NucleusEdge edge(0, static_cast<double>(filters.top_p) * total);
    for (std::int64_t i = 0; i < count; i++)
      if (!edge.take(scaled[i], mass[i])) break;
    low = std::max(low, edge.edge());
  }
  const std::int64_t place =
      kernels().draw_listed(scaled.data(), tokens.data(), count, low, key);
  return place < 0 ? 0 : tokens[place];
}

}  // namespace

std::vector<Candidate> find_top_k(const float* logits, std::int64_t n, std::int64_t k) {
  const std::int64_t blocks = (n + kSampleBlock - 1) / kSampleBlock;
  float low = -kInfinity;
  if (k < blocks) {
    // there are k blocks with a maximum of at least `low`, so k tokens are at least as large
    float* maxima = scratch<ForMaxima>(static_cast<std::size_t>(blocks));
    kernels().block_maxima(logits, n, maxima);
    std::nth_element(maxima, maxima + k - 1, maxima + blocks, std::greater<float>());
    low = maxima[k - 1];
  }
  std::int32_t* found = index_scratch(n);
  const std::int64_t count = kernels().find_between(logits, n, low, kInfinity, found);
  std::vector<Candidate> best(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; i++) best[i] = {logits[found[i]], found[i]};
  k = std::min(k, count);
  std::nth_element(best.begin(), best.begin() + k - (k > 0), best.end(), is_more_likely);
  best.resize(static_cast<std::size_t>(k));
  std::sort(best.begin(), best.end(), is_more_likely);
  return best;
}

std::int64_t draw_token(const float* logits, std::int64_t n, float largest, const Filters& filters,
                        NoiseKey key) {
  if (!std::isfinite(largest)) return 0;
  if (filters.temperature == 0) return find_largest(logits, n, largest);
  if (filters.top_k > 0 && filters.top_k < n)
    return sample_top_k(logits, n, largest, filters, key);
  float* scaled = scratch<ForScaled>(static_cast<std::size_t>(n));
  float* mass = scratch<ForMass>(static_cast<std::size_t>(n));
  const float total =
      kernels().scale_and_exp(logits, n, largest, filters.temperature, scaled, mass);
  const float low = filters.min_p;
  const bool has_nucleus = filters.top_p < 1 && std::isfinite(total);
  const std::int64_t token =
      has_nucleus ? draw_from_nucleus(scaled, mass, n, total, filters.top_p, low, key)
                  : kernels().draw(scaled, mass, n, low, key);
  return std::max<std::int64_t>(0, token);
}

}  // namespace mlxrunner
