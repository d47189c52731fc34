// The table of one instruction set, whose name ISA is.
#pragma once

#include "attention.hpp"
#include "pointwise.hpp"
#include "product.hpp"

namespace mlxrunner::ISA {

inline constexpr Kernels kTable{
    .name = kName,
    .arranged_stride = arranged_stride,
    .block = kBlockX,
    .arrange = arrange,
    .product = product,
    .product_scratch = product_scratch,
    .expand = expand,
    .rms_norm = rms_norm,
    .angles = angles,
    .rotate = rotate,
    .gate = gate,
    .attend = attend,
    .attend_scratch = attend_scratch,
};

}  // namespace mlxrunner::ISA
