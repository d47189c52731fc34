// Packed matrices as the kernels read them: packed.hpp draws it.
#pragma once

#include "arrays.hpp"

namespace mlxrunner {

// [..., out, n], row after row -> the same shape, each sixteen rows side by side: words of MLX's
// packing in `bits` (4 or 8) of uint32, or, with bits 0, scales or biases. back: the other way
// round. An array that nobody else holds is rearranged where it lies.
mx::array strips(const mx::array& a, int bits, bool back);

}  // namespace mlxrunner
