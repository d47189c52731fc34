// Draws a token of one row with temperature, top_k, top_p, min_p and noise, as
// app/engine/sampling/draw.py defines them.
//
// Knows: the passes over a row (sampling.hpp). Must not know: MLX, other rows, where the logits come
// from.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.hpp"

namespace mlxrunner {

// temperature: 0 for the most likely token. top_k: 0 if off. top_p: infinity if off. min_p: its
// logarithm, -infinity if off.
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

// Returns the k most likely of n tokens, most likely first. There are fewer if logits are NaN or
// +infinity.
std::vector<Candidate> find_top_k(const float* logits, std::int64_t n, std::int64_t k);

// largest: the largest logit. If it is not finite, the token is 0.
std::int64_t draw_token(const float* logits, std::int64_t n, float largest, const Filters& filters,
                        NoiseKey key);

}  // namespace mlxrunner
