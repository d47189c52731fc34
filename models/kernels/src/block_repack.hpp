// Converts rows of GGUF's blocks to the panels that block_formats.hpp describes.
#pragma once

#include "arrays.hpp"
#include "kernels.hpp"

namespace mlxrunner {

// Returns the format of a type by its number in a file (enum ggml_type). Raises std::invalid_argument
// for other types.
WeightFormat parse_block_type(int type_id);

// The number of weights in a row of `bytes` bytes of the file. Raises std::invalid_argument if the
// row does not consist of blocks.
std::int64_t count_block_weights(WeightFormat format, std::int64_t bytes);

// Converts [..., out, bytes] uint8, as in the file, to panels [..., out rounded up to sixteen,
// block_row_bytes]. No bit is lost.
mx::array repack_blocks(const mx::array& raw, int type_id);

}  // namespace mlxrunner
