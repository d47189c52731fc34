// Sampling of tokens and log probabilities: one operation over all rows, each of which is a task of
// the thread pool.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "sample_edits.hpp"

namespace mlxrunner {

// The settings of one row, shared with the operations that use them.
class SampleRow {
 public:
  // Raises std::invalid_argument if a token is not in the vocabulary.
  explicit SampleRow(SampleSettings settings);
  const std::shared_ptr<const SampleSettings>& settings() const { return settings_; }

 private:
  std::shared_ptr<const SampleSettings> settings_;
};

// Samples one token per row. Returns the tokens [rows] uint32, and valid [rows] bool: false if the
// logits contain NaN or +infinity, or no finite logit that `bitmask` allows. The token of an invalid
// row is arbitrary, but in the vocabulary.
//
// logits: [rows, V] float32. step: the number of earlier draws of this batch. num_earlier: the
// number of tokens that each row has drawn before this batch. For the rows that use their history:
// earlier: those tokens one row after the other, uint32; recent: [step or more, rows] uint32, the
// tokens drawn in this batch; either may be absent if it would be empty. bitmask: [rows, V / 32 or
// more] uint32, the tokens that may be drawn.
std::pair<mx::array, mx::array> sample(const mx::array& logits, const std::vector<SampleRow>& rows,
                                       const std::vector<std::int64_t>& num_earlier, int step,
                                       const std::optional<mx::array>& earlier,
                                       const std::optional<mx::array>& recent,
                                       const std::optional<mx::array>& bitmask);

// Computes log probabilities [rows] of `tokens` [rows] uint32 under logits [rows, V] float32, and
// the `count` most likely tokens and their log probabilities [rows, count], most likely first. All
// of them are NaN in a row with NaN, with +infinity, or without a finite logit.
std::vector<mx::array> logprobs(const mx::array& logits, const mx::array& tokens, int count);

}  // namespace mlxrunner
