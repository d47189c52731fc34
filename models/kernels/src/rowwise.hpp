// Row-wise MLX operations: norms, rotations and gated activations. All take float32 arrays with any
// strides and return contiguous ones.
#pragma once

#include <optional>
#include <string>
#include <variant>

#include "arrays.hpp"
#include "kernels.hpp"

namespace mlxrunner {

// Returns x [..., D] / sqrt(mean of squares + eps), times weight [D] if given.
mx::array rms_norm(const mx::array& x, std::optional<mx::array> weight, float eps);

// The parameters of a rotary embedding. The first `dims` elements of a head are rotated, in pairs
// with one element from each half or, if traditional, in pairs of adjacent elements. The rotated
// elements are multiplied by magnitude. periods: [dims / 2], positions per radian.
struct RopeParams {
  mx::array periods;
  int dims;
  bool traditional;
  float magnitude;
};

// Raises if the parameters are not valid for heads of this size.
void check_rope(const RopeParams& params, int head_dim);

// x: [B, H, L, D]. offset: the first position, or [B] with one position per row.
using Offset = std::variant<int, mx::array>;
mx::array rope(const mx::array& x, const Offset& offset, const RopeParams& params);

// Raises if the name is unknown.
Activation parse_activation(const std::string& activation);

// Returns cap * tanh(x / cap) for float32 x.
mx::array softcap(const mx::array& x, float cap);

// Returns activation(gate) * up. activation: silu, gelu (with erf), gelu_tanh or relu.
mx::array glu(const std::string& activation, const mx::array& gate, const mx::array& up);

}  // namespace mlxrunner
