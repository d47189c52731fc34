// Which instruction set is used.
#pragma once

#include "kernels.hpp"

namespace mlxrunner {

// The best that this machine has, or the one that MLXRUNNER_ISA names; chosen once. Throws where
// there is none of that name.
const Kernels& kernels();

}  // namespace mlxrunner
