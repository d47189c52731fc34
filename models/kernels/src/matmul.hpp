// Multiplication of x by a matrix, for one or more rows of x.
//
//   matmul_float.hpp      a matrix of float32, bfloat16 or float16 (bfloat16 on tiles:
//                         matmul_bf16_tiles.hpp)
//   matmul_quantized.hpp  a matrix of 4 or 8 bits
//   matmul_blocks.hpp     a matrix with a block type of GGUF
//
// Every element of y is a sum in a fixed order. The order does not depend on the number of rows of
// x, tiling or threads.
#pragma once

#include "matmul_blocks.hpp"
#include "matmul_quantized.hpp"
#include "matmul_float.hpp"

namespace mlxrunner::ISA {

inline void matmul(const Matrix& w, PackedRows x, const float* bias, float* y, i64 ldy, i64 begin,
                   i64 end, float* scratch) {
  if (has_blocks(w.format)) block_matmul(w, x, y, ldy, begin, end, scratch);
  else if (is_quantized(w)) quantized_matmul(w, x, y, ldy, begin, end, scratch);
  else float_matmul(w, x, y, ldy, begin, end, scratch);
  add_bias(bias, y, ldy, x.count, begin, end);
}

inline i64 matmul_scratch(const Matrix& w) {
  if (has_blocks(w.format)) return block_scratch(w);
  if (w.rows % kPanelRows == 0) return 0;
  return is_quantized(w) ? quantized_scratch(w) : float_scratch(w);
}

inline i64 packed_input_stride(const Matrix& w, i64 count) {
  if (is_quantized(w)) return quantized_row_stride(w);
  return count > 1 ? w.width : 0;
}

inline i64 input_block(const Matrix&, i64) { return kInputRowsPerTile; }

inline void pack_input(const Matrix& w, const float* x, i64 count, i64 from, i64 to, float* out) {
  const i64 stride = packed_input_stride(w, count);
  x += from * w.width, out += from * stride;
  if (is_quantized(w)) quantize_input(w, x, to - from, out, stride);
  else pack_input_float(w, x, to - from, out);
}

inline void dequantize_row(const Matrix& w, i64 n, float* out) {
  if (has_blocks(w.format)) dequantize_block_row(w, n, out);
  else if (is_quantized(w)) dequantize_affine_row(w, n, out);
  else convert_float_row(w, n, out);
}

}  // namespace mlxrunner::ISA
