// Selects the instruction set.
#pragma once

#include <string>

#include "kernels.hpp"

namespace mlxrunner {

// The selected kernels, and the reasons why products with 4- and 8-bit matrices and those with
// bfloat16 matrices do not use tiles, or "" if they do.
struct Selection {
  const Kernels& kernels;
  std::string why_no_tiles, why_no_bf16_tiles;
};

// The beginning of such a reason if tiles compute wrong results.
inline constexpr char kTileTestFailed[] = "the known-answer test failed: ";

// Returns the kernels for the best instruction set of this machine, or for the one that
// MLXRUNNER_ISA names. They are selected only once. Throws if this machine does not support the
// requested one.
const Selection& selection();

inline const Kernels& kernels() { return selection().kernels; }

}  // namespace mlxrunner
