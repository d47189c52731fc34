#include "sample_ops.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "isa_dispatch.hpp"
#include "thread_pool.hpp"

namespace mlxrunner {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The number of buckets that divide the logits of a nucleus by size.
constexpr std::int64_t kBuckets = 2048;

struct ForRow;
struct ForScaled;
struct ForMass;
struct ForMaxima;
struct ForFound;

struct Filters {
  float temperature;
  std::int64_t top_k;
  float top_p, min_p;
};

// A token and its logit. Tokens are ordered by logit, and then by ID.
struct Candidate {
  float logit;
  std::int32_t token;
};

bool is_more_likely(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

std::uint32_t hash32(std::uint32_t word) {
  word = (word ^ (word >> 16)) * 0x7FEB352Du;
  word = (word ^ (word >> 15)) * 0x846CA68Bu;
  return word ^ (word >> 16);
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
  for (std::int64_t i = 0; i < n; i++)
    if (scaled[i] >= lowest) sums[bucket_of(scaled[i])] += mass[i];
  std::int64_t crossing = 0;
  double before = 0;
  while (crossing < kBuckets - 1 && before + sums[crossing] < bound) before += sums[crossing++];
  // a range of logits that contains the bucket
  const float slack = 1e-3f - lowest / kBuckets;
  const float high = static_cast<float>(crossing) / width + slack;
  const float low = std::max(lowest, static_cast<float>(crossing + 1) / width - slack);
  std::int32_t* found = index_scratch(n);
  const std::int64_t count = kernels().find_between(scaled, n, low, high, found);
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

// Returns the k most likely tokens of a row, most likely first.
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
  const std::int64_t count =
      kernels().find_between(logits, n, low, std::numeric_limits<float>::infinity(), found);
  std::vector<Candidate> best(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; i++) best[i] = {logits[found[i]], found[i]};
  k = std::min(k, count);
  std::nth_element(best.begin(), best.begin() + k - (k > 0), best.end(), is_more_likely);
  best.resize(static_cast<std::size_t>(k));
  std::sort(best.begin(), best.end(), is_more_likely);
  return best;
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

std::int64_t sample_row(const float* logits, std::int64_t n, const Filters& filters,
                        NoiseKey key) {
  const float largest = kernels().row_max(logits, n);
  if (!std::isfinite(largest)) return 0;
  if (filters.top_k > 0 && filters.top_k < n)
    return sample_top_k(logits, n, largest, filters, key);
  float* scaled = scratch<ForScaled>(static_cast<std::size_t>(n));
  float* mass = scratch<ForMass>(static_cast<std::size_t>(n));
  const float total =
      kernels().scale_and_exp(logits, n, largest, filters.temperature, scaled, mass);
  float low = filters.min_p;
  if (filters.top_p < 1 && std::isfinite(total))
    low = std::max(low, find_nucleus_edge(scaled, mass, n, total, filters.top_p));
  return std::max<std::int64_t>(0, kernels().draw(scaled, mass, n, low, key));
}

class SamplePrimitive : public CpuPrimitive {
 public:
  SamplePrimitive(mx::Stream stream, int step) : CpuPrimitive(stream), step_(step) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    allocate(outs[0]);
    if (!outs[0].size()) return;
    const std::int64_t rows = in[0].shape(0), n = in[0].shape(1), row_step = in[0].strides()[0],
                       step = in[0].strides()[1];
    const float *logits = in[0].data<float>(), *settings = in[1].data<float>();
    const std::uint32_t* words = in[2].data<std::uint32_t>();
    std::uint32_t* tokens = outs[0].data<std::uint32_t>();
    mx::cpu::get_command_encoder(stream()).dispatch([=, draws = step_] {
      // each row is a task, because a row is at least a thousand times as much work as a task
      ThreadPool::shared().run(rows, [&](std::int64_t row) {
        const float* x = logits + row * row_step;
        if (step != 1) {
          float* copy = scratch<ForRow>(static_cast<std::size_t>(n));
          for (std::int64_t i = 0; i < n; i++) copy[i] = x[i * step];
          x = copy;
        }
        const float* s = settings + 4 * row;
        const std::uint32_t *w = words + 5 * row, count = w[4] + static_cast<std::uint32_t>(draws);
        const NoiseKey key{hash32(w[0] + count * w[2]), hash32(w[1] + count * w[3])};
        const Filters filters{s[0], static_cast<std::int64_t>(s[1]), s[2], s[3]};
        tokens[row] = static_cast<std::uint32_t>(sample_row(x, n, filters, key));
      });
    });
  }

  const char* name() const override { return "mlxrunner::Sample"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  int step_;
};

}  // namespace

mx::array sample(const mx::array& logits, const mx::array& settings, const mx::array& words,
                 int step) {
  require(logits.dtype() == mx::float32 && logits.ndim() == 2 && logits.shape(1) > 0,
          "logits must be float32 [rows, V]");
  require(logits.shape(1) <= std::numeric_limits<std::int32_t>::max(), "V must be below 2^31");
  const int rows = logits.shape(0);
  require(settings.dtype() == mx::float32 && settings.shape() == mx::Shape{rows, 4},
          "settings must be float32 [rows, 4]");
  require(words.dtype() == mx::uint32 && words.shape() == mx::Shape{rows, 5},
          "words must be uint32 [rows, 5]");
  return mx::array({rows}, mx::uint32, std::make_shared<SamplePrimitive>(cpu(), step),
                   {logits, contiguous_rows(settings), contiguous_rows(words)});
}

}  // namespace mlxrunner
