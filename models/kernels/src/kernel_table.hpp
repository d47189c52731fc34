// The kernel table of one instruction set, in namespace ISA.
#pragma once

#include "attention.hpp"
#include "mamba2.hpp"
#include "matmul.hpp"
#include "matmul_bf16_tiles.hpp"
#include "matmul_reference.hpp"
#include "pointwise.hpp"
#include "sampling.hpp"

namespace mlxrunner::ISA {

inline constexpr Kernels kTable{
    .name = kName,
    .bf16_on_tiles = false,
    .packed_input_stride = packed_input_stride,
    .input_block = input_block,
    .pack_input = pack_input,
    .matmul = matmul,
    .matmul_scratch = matmul_scratch,
    .multiply_by_reference = multiply_by_reference,
    .reference_scratch = reference_scratch,
    .bf16_tile_reference = bf16_tile_reference,
    .bf16_tile_reference_scratch = bf16_tile_reference_scratch,
    .dequantize_row = dequantize_row,
    .rms_norm = rms_norm,
    .rope_angles = rope_angles,
    .rotate = rotate,
    .glu = glu,
    .softcap = softcap,
    .convolve = convolve,
    .scan = scan,
    .row_max = row_max,
    .checked_max = checked_max,
    .mask = mask,
    .scale_and_exp = scale_and_exp,
    .mass_above = mass_above,
    .block_maxima = block_maxima,
    .find_between = find_between,
    .draw = draw,
    .draw_listed = draw_listed,
    .store_kv_row = store_kv_row,
    .attend = attend,
    .attend_scratch = attend_scratch,
};

}  // namespace mlxrunner::ISA
