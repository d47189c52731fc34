// Matrices as the kernels read them: plain.hpp and packed.hpp draw it.
#pragma once

#include "arrays.hpp"

namespace mlxrunner {

// [..., out, n], row after row -> the same shape, each sixteen rows side by side: numbers, scales,
// biases, or, with bits 4 or 8, words of uint32 in MLX's packing. back: the other way round. An
// array that nobody else holds is rearranged where it lies.
mx::array strips(const mx::array& a, int bits, bool back);

}  // namespace mlxrunner
