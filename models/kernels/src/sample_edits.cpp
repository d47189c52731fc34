#include "sample_edits.hpp"

#include <algorithm>
#include <limits>

namespace mlxrunner {

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

std::uint32_t hash32(std::uint32_t word) {
  word = (word ^ (word >> 16)) * 0x7FEB352Du;
  word = (word ^ (word >> 15)) * 0x846CA68Bu;
  return word ^ (word >> 16);
}

// Zeros for each token of a vocabulary. The user sets them to zero again.
std::int32_t* token_counts(std::int64_t vocab) {
  static thread_local std::vector<std::int32_t> counts;
  if (counts.size() < static_cast<std::size_t>(vocab))
    counts.assign(static_cast<std::size_t>(vocab), 0);
  return counts.data();
}

void add_bias(const SampleSettings& settings, float* logits) {
  // the values of a token that is listed twice are added first
  for (auto one = settings.bias.begin(); one != settings.bias.end();) {
    float sum = 0;
    const std::int32_t token = one->first;
    for (; one != settings.bias.end() && one->first == token; one++) sum += one->second;
    logits[token] += sum;
  }
}

// The operations and their order are the same as in app/engine/sampling/stages.py.
float penalize(const SampleSettings& settings, float logit, std::int32_t count) {
  const float repeated = std::max(logit, 0.0f) / settings.repetition_penalty +
                         std::min(logit, 0.0f) * settings.repetition_penalty;
  return repeated - settings.presence_penalty -
         settings.frequency_penalty * static_cast<float>(count);
}

void apply_penalties(const SampleSettings& settings, const TokenHistory& history, float* logits) {
  const std::int64_t size = history.size(), window = settings.penalty_window;
  const std::int64_t first = window < 0 || window > size ? 0 : size - window;
  std::int32_t* counts = token_counts(settings.vocab);
  // Some known tokens cannot be drawn. They occupy the window, but have no logit.
  for (std::int64_t i = first; i < size; i++)
    if (history[i] < settings.vocab) counts[history[i]]++;
  for (std::int64_t i = first; i < size; i++) {
    const std::uint32_t token = history[i];
    if (token >= settings.vocab || counts[token] == 0) continue;
    logits[token] = penalize(settings, logits[token], counts[token]);
    counts[token] = 0;
  }
}

void keep_only(const std::vector<std::int32_t>& tokens, std::int64_t vocab, float* logits) {
  std::vector<float> kept;
  for (const std::int32_t token : tokens) kept.push_back(logits[token]);
  std::fill(logits, logits + vocab, kNever);
  for (std::size_t i = 0; i < tokens.size(); i++) logits[tokens[i]] = kept[i];
}

// Whether the last token of the word would complete it.
bool is_begun(const std::vector<std::uint32_t>& word, const TokenHistory& history,
              std::int64_t output_begin) {
  const auto length = static_cast<std::int64_t>(word.size()) - 1;
  const std::int64_t begin = history.size() - length;
  if (begin < output_begin) return false;
  for (std::int64_t i = 0; i < length; i++)
    if (history[begin + i] != word[static_cast<std::size_t>(i)]) return false;
  return true;
}

}  // namespace

bool SampleSettings::has_penalties() const {
  return penalty_window != 0 &&
         (repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0);
}

bool SampleSettings::edits(std::int64_t drawn) const {
  return !bias.empty() || uses_history() || allowed_tokens ||
         (drawn < min_tokens && !stop_tokens.empty());
}

NoiseKey SampleSettings::noise_key(std::int64_t drawn) const {
  const std::uint32_t count = num_drawn + static_cast<std::uint32_t>(drawn);
  return {hash32(seed_words[0] + count * seed_words[2]),
          hash32(seed_words[1] + count * seed_words[3])};
}

void edit_logits(const SampleSettings& settings, const TokenHistory& history, std::int64_t drawn,
                 float* logits) {
  add_bias(settings, logits);
  if (settings.has_penalties()) apply_penalties(settings, history, logits);
  if (settings.allowed_tokens) keep_only(*settings.allowed_tokens, settings.vocab, logits);
  for (const auto& word : settings.bad_words)
    if (is_begun(word, history, settings.output_begin)) logits[word.back()] = kNever;
  if (drawn < settings.min_tokens)
    for (const std::int32_t token : settings.stop_tokens) logits[token] = kNever;
}

}  // namespace mlxrunner
