// Fused gate and up projections of a gated MLP, for use within other operations.
#pragma once

#include "matmul_ops.hpp"

namespace mlxrunner {

// Computes activation(gate x) * (up x) -> [count, rows] on the thread pool. x: contiguous rows, at
// most max_input_rows of them. gate and up must have the same shape and format.
void multiply_gate_up(Activation kind, const MatrixAndBias& gate, const MatrixAndBias& up,
                      const float* x, std::int64_t count, float* y);

}  // namespace mlxrunner
