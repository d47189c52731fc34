#include "sample_ops.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "isa_dispatch.hpp"
#include "thread_pool.hpp"

namespace mlxrunner {

namespace {

struct ForRow;
struct ForEdits;
struct ForScaled;
struct ForMass;

// The rows of an evaluated array [rows, n] of float32 with any strides.
struct Rows {
  const float* data;
  std::int64_t n, row_step, step;

  explicit Rows(const mx::array& a)
      : data(a.data<float>()), n(a.shape(1)), row_step(a.strides()[0]), step(a.strides()[1]) {}

  // Returns contiguous numbers, which are valid until the next call on this thread.
  const float* row(std::int64_t row) const {
    const float* x = data + row * row_step;
    if (step == 1) return x;
    float* copy = scratch<ForRow>(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; i++) copy[i] = x[i * step];
    return copy;
  }
};

// The number of words that hold a bit for each of n tokens.
std::int64_t num_words(std::int64_t n) { return (n + 31) / 32; }

bool allows_all(const std::uint32_t* bits, std::int64_t n) {
  for (std::int64_t i = 0; i < n / 32; i++)
    if (bits[i] != ~std::uint32_t{0}) return false;
  const std::uint32_t rest = (std::uint32_t{1} << n % 32) - 1;
  return n % 32 == 0 || (bits[n / 32] & rest) == rest;
}

struct Sampled {
  std::int64_t token;
  bool valid;
};

// bits: the tokens that may be drawn, or nullptr for all.
Sampled sample_row(const SampleSettings& settings, const float* logits, const std::uint32_t* bits,
                   const TokenHistory& history, std::int64_t drawn) {
  const std::int64_t n = settings.vocab;
  float largest = kernels().checked_max(logits, n);
  if (!std::isfinite(largest)) return {0, false};
  const bool masked = bits && !allows_all(bits, n), edited = settings.edits(drawn);
  float* copy = masked || edited ? scratch<ForEdits>(static_cast<std::size_t>(n)) : nullptr;
  if (masked) {
    kernels().mask(logits, bits, n, copy);
    largest = kernels().row_max(copy, n);
    if (!std::isfinite(largest)) return {0, false};
  }
  if (edited) {
    if (!masked) std::copy(logits, logits + n, copy);
    edit_logits(settings, history, drawn, copy);
    largest = kernels().row_max(copy, n);
  }
  const float* processed = copy ? copy : logits;
  return {draw_token(processed, n, largest, settings.filters, settings.noise_key(drawn)), true};
}

// The settings of a row, and where its tokens are in `earlier`.
struct RowInput {
  std::shared_ptr<const SampleSettings> settings;
  std::int64_t num_earlier, first_earlier;

  // Returns no tokens if the row does not use them.
  TokenHistory history(const std::uint32_t* earlier, const std::uint32_t* recent,
                       std::int64_t num_recent, std::int64_t stride) const {
    if (!settings->uses_history()) return {settings->known, nullptr, 0, nullptr, 0, 0};
    return {settings->known, num_earlier ? earlier + first_earlier : nullptr, num_earlier, recent,
            num_recent, stride};
  }
};

class SamplePrimitive : public CpuPrimitive {
 public:
  SamplePrimitive(mx::Stream stream, std::vector<RowInput> rows, int step, int earlier, int recent,
                  int bitmask)
      : CpuPrimitive(stream), rows_(std::move(rows)), step_(step), earlier_(earlier),
        recent_(recent), bitmask_(bitmask) {}

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    for (mx::array& out : outs) allocate(out);
    const Rows logits(in[0]);
    const std::uint32_t *earlier = words(in, earlier_), *recent = words(in, recent_),
                        *bitmask = words(in, bitmask_);
    const std::int64_t mask_step = bitmask ? in[bitmask_].shape(1) : 0;
    std::uint32_t* tokens = outs[0].data<std::uint32_t>();
    bool* valid = outs[1].data<bool>();
    mx::cpu::get_command_encoder(stream()).dispatch([=, inputs = rows_, step = step_] {
      const auto rows = static_cast<std::int64_t>(inputs.size());
      // each row is a task, because a row is at least a thousand times as much work as a task
      ThreadPool::shared().run(rows, [&](std::int64_t row) {
        const RowInput& input = inputs[static_cast<std::size_t>(row)];
        const TokenHistory history =
            input.history(earlier, recent ? recent + row : nullptr, step, rows);
        const std::uint32_t* bits = bitmask ? bitmask + row * mask_step : nullptr;
        const Sampled sampled = sample_row(*input.settings, logits.row(row), bits, history,
                                           input.num_earlier + step);
        tokens[row] = static_cast<std::uint32_t>(sampled.token), valid[row] = sampled.valid;
      });
    });
  }

  const char* name() const override { return "mlxrunner::Sample"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  static const std::uint32_t* words(const std::vector<mx::array>& in, int place) {
    return place ? in[static_cast<std::size_t>(place)].data<std::uint32_t>() : nullptr;
  }

  std::vector<RowInput> rows_;
  int step_;
  int earlier_, recent_, bitmask_;  // the places of the optional inputs; 0: absent
};

void score_row(const float* logits, std::int64_t n, std::int64_t token, std::int64_t count,
               float* logprob, std::uint32_t* top_tokens, float* top_logprobs) {
  const float largest = kernels().checked_max(logits, n);
  if (!std::isfinite(largest)) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    *logprob = nan;
    for (std::int64_t i = 0; i < count; i++)
      top_tokens[i] = static_cast<std::uint32_t>(i), top_logprobs[i] = nan;
    return;
  }
  float* relative = scratch<ForScaled>(static_cast<std::size_t>(n));
  float* mass = scratch<ForMass>(static_cast<std::size_t>(n));
  const float total =
      std::log(kernels().scale_and_exp(logits, n, largest, 1.0f, relative, mass));
  *logprob = relative[token] - total;
  if (count == 0) return;
  const std::vector<Candidate> best = find_top_k(logits, n, count);
  for (std::size_t i = 0; i < best.size(); i++) {
    top_tokens[i] = static_cast<std::uint32_t>(best[i].token);
    top_logprobs[i] = relative[best[i].token] - total;
  }
}

class LogprobsPrimitive : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& outs) override {
    for (mx::array& out : outs) allocate(out);
    const Rows logits(in[0]);
    const std::int64_t rows = in[0].shape(0), count = outs[1].shape(1);
    const std::uint32_t* tokens = in[1].data<std::uint32_t>();
    float *chosen = outs[0].data<float>(), *top_logprobs = outs[2].data<float>();
    std::uint32_t* top_tokens = outs[1].data<std::uint32_t>();
    mx::cpu::get_command_encoder(stream()).dispatch([=] {
      ThreadPool::shared().run(rows, [&](std::int64_t row) {
        // a token that other code computed is checked, because it is an index
        const auto token = std::min<std::int64_t>(tokens[row], logits.n - 1);
        score_row(logits.row(row), logits.n, token, count, chosen + row, top_tokens + row * count,
                  top_logprobs + row * count);
      });
    });
  }

  const char* name() const override { return "mlxrunner::Logprobs"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }
};

void require_logits(const mx::array& logits) {
  require(logits.dtype() == mx::float32 && logits.ndim() == 2 && logits.shape(1) > 0,
          "logits must be float32 [rows, V]");
  require(logits.shape(1) <= std::numeric_limits<std::int32_t>::max(), "V must be below 2^31");
}

}  // namespace

SampleRow::SampleRow(SampleSettings settings) {
  const auto check = [&](std::int64_t token) {
    require(0 <= token && token < settings.vocab, "each token must be in the vocabulary");
  };
  for (const auto& [token, value] : settings.bias) check(token);
  if (settings.allowed_tokens)
    for (const std::int32_t token : *settings.allowed_tokens) check(token);
  for (const std::int32_t token : settings.stop_tokens) check(token);
  for (const auto& word : settings.bad_words) {
    require(!word.empty(), "a bad word must have tokens");
    check(word.back());
  }
  std::stable_sort(settings.bias.begin(), settings.bias.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  settings_ = std::make_shared<const SampleSettings>(std::move(settings));
}

std::pair<mx::array, mx::array> sample(const mx::array& logits, const std::vector<SampleRow>& rows,
                                       const std::vector<std::int64_t>& num_earlier, int step,
                                       const std::optional<mx::array>& earlier,
                                       const std::optional<mx::array>& recent,
                                       const std::optional<mx::array>& bitmask) {
  require_logits(logits);
  const int count = logits.shape(0);
  require(rows.size() == static_cast<std::size_t>(count) && num_earlier.size() == rows.size(),
          "each row of the logits must have its settings and its number of earlier tokens");
  require(step >= 0, "step must be 0 or more");
  std::vector<RowInput> row_inputs;
  std::int64_t used = 0;
  bool any = false;
  for (std::size_t row = 0; row < rows.size(); row++) {
    const auto& settings = rows[row].settings();
    require(settings->vocab == logits.shape(1), "the rows must be of the same vocabulary");
    require(num_earlier[row] >= 0, "a number of earlier tokens must be 0 or more");
    row_inputs.push_back({settings, num_earlier[row], used});
    if (!settings->uses_history()) continue;
    any = true, used += num_earlier[row];
  }
  std::vector<mx::array> inputs{logits};
  const auto add = [&](const std::optional<mx::array>& a) {
    if (!a) return 0;
    inputs.push_back(contiguous_rows(*a));
    return static_cast<int>(inputs.size()) - 1;
  };
  require(earlier ? earlier->dtype() == mx::uint32 && earlier->ndim() == 1 &&
                        earlier->shape(0) == used
                  : used == 0,
          "earlier must be uint32 [tokens of the rows that use their history]");
  require(recent ? recent->dtype() == mx::uint32 && recent->ndim() == 2 &&
                       recent->shape(0) >= step && recent->shape(1) == count
                 : !any || step == 0,
          "recent must be uint32 [step or more, rows]");
  require(!bitmask || (bitmask->dtype() == mx::uint32 && bitmask->ndim() == 2 &&
                       bitmask->shape(0) == count &&
                       bitmask->shape(1) >= num_words(logits.shape(1))),
          "bitmask must be uint32 [rows, V / 32 or more]");
  const int earlier_place = add(earlier), recent_place = add(recent), mask_place = add(bitmask);
  std::vector<mx::array> outs = mx::array::make_arrays(
      {{count}, {count}}, {mx::uint32, mx::bool_},
      std::make_shared<SamplePrimitive>(cpu(), std::move(row_inputs), step, earlier_place,
                                        recent_place, mask_place),
      inputs);
  return {outs[0], outs[1]};
}

std::vector<mx::array> logprobs(const mx::array& logits, const mx::array& tokens, int count) {
  require_logits(logits);
  const int rows = logits.shape(0);
  require(tokens.dtype() == mx::uint32 && tokens.shape() == mx::Shape{rows},
          "tokens must be uint32 [rows]");
  require(0 <= count && count <= logits.shape(1), "count must be from 0 to V");
  return mx::array::make_arrays({{rows}, {rows, count}, {rows, count}},
                                {mx::float32, mx::uint32, mx::float32},
                                std::make_shared<LogprobsPrimitive>(cpu()),
                                {logits, contiguous_rows(tokens)});
}

}  // namespace mlxrunner
