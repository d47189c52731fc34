// Conversion of matrices to the panels that matmul_float.hpp and matmul_quantized.hpp describe.
#pragma once

#include "arrays.hpp"

namespace mlxrunner {

// [..., out, n] in row-major order -> the same shape, in panels of sixteen rows: floats, scales,
// biases, or, with bits 4 or 8, uint32 words in MLX's packing. undo: from panels to row-major
// order. An array with no other reference is repacked in place.
mx::array repack(const mx::array& a, int bits, bool undo);

}  // namespace mlxrunner
