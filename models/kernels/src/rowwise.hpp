// What happens to a row by itself, as operations of MLX: norms, rotations, gates. All take float32
// arrays, however they lie in memory, and return packed ones.
#pragma once

#include <optional>
#include <string>
#include <variant>

#include "arrays.hpp"
#include "kernels.hpp"

namespace mlxrunner {

// x [..., D] / sqrt(mean of squares + eps), times weight [D] where there is one.
mx::array rms_norm(const mx::array& x, std::optional<mx::array> weight, float eps);

// How heads are rotated: the first `dims` of them, halves against each other or, if traditional,
// neighbours; both times magnitude. periods: [dims / 2], positions per radian.
struct Rotary {
  mx::array periods;
  int dims;
  bool traditional;
  float magnitude;
};

// Raises where heads of `width` cannot be rotated so.
void want_rotary(const Rotary& rotary, int width);

// x [B, H, L, D], whose first position is offset (or [B], one each).
using Offset = std::variant<int, mx::array>;
mx::array rope(const mx::array& x, const Offset& offset, const Rotary& rotary);

// By its name; raises for one that is not here.
Activation activation_of(const std::string& kind);

// activation(gate) * up; kind: silu, gelu (with erf), gelu_tanh or relu.
mx::array gate(const std::string& kind, const mx::array& gate, const mx::array& up);

}  // namespace mlxrunner
