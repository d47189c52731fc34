// The changes of a row's logits before a token is drawn: logit bias, penalties, and tokens that may
// not be drawn.
//
// Knows: the settings and the tokens of one sequence. Must not know: MLX, other rows, filters.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "sample_filters.hpp"

namespace mlxrunner {

// The settings of one sequence, which never change. All listed tokens are below `vocab`, except
// those of `known`.
struct SampleSettings {
  std::int64_t vocab;
  Filters filters;

  // Two start words and two odd strides of the noise, and the number of tokens that were drawn
  // before this object was created.
  std::array<std::uint32_t, 4> seed_words;
  std::uint32_t num_drawn;

  // The tokens at the start of the sequence. Its output begins at index `output_begin`.
  std::vector<std::uint32_t> known;
  std::int64_t output_begin;

  std::vector<std::pair<std::int32_t, float>> bias;

  // The number of last tokens that penalties count; -1: all.
  float repetition_penalty, presence_penalty, frequency_penalty;
  std::int64_t penalty_window;

  std::optional<std::vector<std::int32_t>> allowed_tokens;
  std::vector<std::vector<std::uint32_t>> bad_words;  // none is empty

  // Tokens that may not be among the first `min_tokens` ones.
  std::vector<std::int32_t> stop_tokens;
  std::int64_t min_tokens;

  bool has_penalties() const;
  // Whether the edits depend on the tokens of the sequence.
  bool uses_history() const { return has_penalties() || !bad_words.empty(); }
  // Returns whether a logit may change after `drawn` tokens.
  bool edits(std::int64_t drawn) const;
  // Returns the noise of the token that follows `drawn` tokens.
  NoiseKey noise_key(std::int64_t drawn) const;
};

// The tokens of a sequence: the known ones, then those that were drawn in earlier batches, then
// those that were drawn in this batch.
struct TokenHistory {
  const std::vector<std::uint32_t>& known;
  const std::uint32_t* earlier;
  std::int64_t num_earlier;
  const std::uint32_t* recent;
  std::int64_t num_recent, recent_stride;

  std::int64_t size() const {
    return static_cast<std::int64_t>(known.size()) + num_earlier + num_recent;
  }
  std::uint32_t operator[](std::int64_t place) const {
    if (place < static_cast<std::int64_t>(known.size()))
      return known[static_cast<std::size_t>(place)];
    place -= static_cast<std::int64_t>(known.size());
    return place < num_earlier ? earlier[place] : recent[(place - num_earlier) * recent_stride];
  }
};

// Changes the row's logits [vocab] in place, in the order of app/engine/sampling/stages.py. A token
// that may not be drawn gets -infinity. drawn: the number of tokens drawn since the settings were
// created. history: is empty unless `uses_history`.
void edit_logits(const SampleSettings& settings, const TokenHistory& history, std::int64_t drawn,
                 float* logits);

}  // namespace mlxrunner
