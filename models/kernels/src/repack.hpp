// Converts matrices to the panels that matmul_float.hpp and matmul_quantized.hpp describe.
#pragma once

#include "arrays.hpp"

namespace mlxrunner {

// Converts [..., out, n] from row-major order to panels of sixteen rows, with the same shape. The
// array is a matrix of floats or, with 4 or 8 bits, of uint32 words in MLX's packing. undo: whether
// to convert from panels to row-major order instead. An array without other references is repacked
// in place.
mx::array repack(const mx::array& a, int bits, bool undo);

// The same for scales or biases.
mx::array repack_scales(const mx::array& a, bool undo);

}  // namespace mlxrunner
