// The Mamba-2 layer between its two projections, as one operation: the convolution, the recurrence,
// and the gated norm.
#pragma once

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "arrays.hpp"
#include "weights.hpp"

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

// The Mamba-2 half of a block, for a few rows: the norm before it, its projections, and the addition
// to the residual stream. The results are bit-identical to those of the separate operations.
struct Mamba2BlockWeights {
  RmsNorm norm;
  BoundMatmul in_proj, out_proj;
  Mamba2Weights mixer;
  Mamba2Params params;
};

class Mamba2Block {
 public:
  // Raises if the shapes of the weights do not match.
  explicit Mamba2Block(Mamba2BlockWeights weights);

  // Returns x + out_proj(mamba2(in_proj(norm(x)), ...)), the states and the tails. x: [B, L, hidden]
  // float32.
  std::tuple<mx::array, std::vector<mx::array>, std::vector<mx::array>> operator()(
      const mx::array& x, const std::vector<mx::array>& states,
      const std::vector<mx::array>& tails);

 private:
  std::shared_ptr<const Mamba2BlockWeights> weights_;
  PendingInputs pending_;
};

}  // namespace mlxrunner
