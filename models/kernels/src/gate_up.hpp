// Both products of a gated layer for those who are at work already.
#pragma once

#include "products.hpp"

namespace mlxrunner {

// activation(gate x) * (up x) -> [count, rows], on the threads of the pool. x: packed rows, few
// enough for a slab. gate and up: of one shape and format.
void multiply_gated(Activation kind, const Factor& gate, const Factor& up, const float* x,
                    std::int64_t count, float* y);

}  // namespace mlxrunner
