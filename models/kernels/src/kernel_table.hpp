// The kernel table of one instruction set, in namespace ISA.
#pragma once

#include "attention.hpp"
#include "pointwise.hpp"
#include "matmul.hpp"
#include "sampling.hpp"

namespace mlxrunner::ISA {

inline constexpr Kernels kTable{
    .name = kName,
    .packed_input_stride = packed_input_stride,
    .input_block = kInputRowsPerTile,
    .pack_input = pack_input,
    .matmul = matmul,
    .matmul_scratch = matmul_scratch,
    .dequantize_row = dequantize_row,
    .rms_norm = rms_norm,
    .rope_angles = rope_angles,
    .rotate = rotate,
    .glu = glu,
    .row_max = row_max,
    .scale_and_exp = scale_and_exp,
    .block_maxima = block_maxima,
    .find_between = find_between,
    .draw = draw,
    .draw_listed = draw_listed,
    .attend = attend,
    .attend_scratch = attend_scratch,
};

}  // namespace mlxrunner::ISA
