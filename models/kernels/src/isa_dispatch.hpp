// Selects the instruction set.
#pragma once

#include "kernels.hpp"

namespace mlxrunner {

// Returns the kernels for the best instruction set of this machine, or for the one that
// MLXRUNNER_ISA names. They are selected only once. Throws if this machine does not support the
// requested one.
const Kernels& kernels();

}  // namespace mlxrunner
