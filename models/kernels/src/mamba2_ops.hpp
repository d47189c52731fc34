// The Mamba-2 layer between its two projections, as one operation: the convolution, the recurrence,
// and the gated norm.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "arrays.hpp"

namespace mlxrunner {

// H heads of P numbers, states of N numbers per number of a head, G groups, and channels C = H P +
// 2 G N. All arrays are float32.
struct Mamba2Weights {
  mx::array conv_weight;               // [width, C]
  std::optional<mx::array> conv_bias;  // [C]
  mx::array dt_bias, a_log, d;         // [H]
  mx::array norm_weight;               // [H P]
};

// eps: of the norm. min_step, max_step: the limits of the step sizes.
struct Mamba2Params {
  float eps, min_step, max_step;
};

// Returns the gated and normalized outputs [B, L, H P], the states, and the tails after the last
// position. projected: [B, L, H P + C + H], the gates, the input of the convolution, and the logits
// of the step sizes. states: arrays [b, H, N, P] whose rows b add up to B. tails: the last width - 1
// inputs of the convolution, [b, width - 1, C] of the same rows.
//
// States and tails are written in place if they have no other reference.
std::tuple<mx::array, std::vector<mx::array>, std::vector<mx::array>> mamba2(
    const mx::array& projected, const std::vector<mx::array>& states,
    const std::vector<mx::array>& tails, const Mamba2Weights& weights, const Mamba2Params& params);

}  // namespace mlxrunner
