// The kernels for AVX-512 with VNNI, AMX and AMX-BF16. They differ from isa_avx512_amx.cpp only in
// products with bfloat16 matrices, which use tiles for all numbers of rows, so that a row has the
// same bits alone and with others. These bits differ from those of the other instruction sets. Only
// this file is compiled for that instruction set, and only if the compiler supports it
// (MLXRUNNER_AMX_BF16).
#if defined(__x86_64__) && defined(MLXRUNNER_AMX_BF16)

#define ISA avx512_amx_bf16
#include "simd_avx512.hpp"
#include "matmul_bf16_tiles.hpp"

namespace mlxrunner {

namespace avx512_amx_bf16 {

namespace {

const Kernels& others() { return *kernels_avx512_amx(); }
bool is_bf16(const Matrix& w) { return w.format == WeightFormat::bf16; }

i64 packed_stride(const Matrix& w, i64 count) {
  return is_bf16(w) ? bf16_input_stride(w) : others().packed_input_stride(w, count);
}

i64 block_rows(const Matrix& w, i64 count) {
  return is_bf16(w) ? 16 : others().input_block(w, count);
}

void pack(const Matrix& w, const float* x, i64 count, i64 from, i64 to, float* out) {
  if (!is_bf16(w)) return others().pack_input(w, x, count, from, to, out);
  pack_input_bf16(w, x + from * w.width, to - from, out + from * bf16_input_stride(w));
}

void matmul(const Matrix& w, PackedRows x, const float* bias, float* y, i64 ldy, i64 begin,
              i64 end, float* scratch) {
  if (!is_bf16(w)) return others().matmul(w, x, bias, y, ldy, begin, end, scratch);
  bf16_tile_matmul<AmxBf16Tiles>(w, x, y, ldy, begin, end, scratch);
  add_bias(bias, y, ldy, x.count, begin, end);
}

i64 scratch_floats(const Matrix& w) {
  return is_bf16(w) ? bf16_tile_scratch(w) : others().matmul_scratch(w);
}

}  // namespace

}  // namespace avx512_amx_bf16

const Kernels* kernels_avx512_amx_bf16() {
  const Kernels* amx = kernels_avx512_amx();
  if (!amx) return nullptr;
  static const Kernels table = [&] {
    Kernels all = *amx;
    all.name = "avx512-amx-bf16";
    all.bf16_on_tiles = true;
    all.packed_input_stride = avx512_amx_bf16::packed_stride;
    all.input_block = avx512_amx_bf16::block_rows;
    all.pack_input = avx512_amx_bf16::pack;
    all.matmul = avx512_amx_bf16::matmul;
    all.matmul_scratch = avx512_amx_bf16::scratch_floats;
    return all;
  }();
  return &table;
}

}  // namespace mlxrunner

#else
#include "kernels.hpp"
namespace mlxrunner {
const Kernels* kernels_avx512_amx_bf16() { return nullptr; }
}  // namespace mlxrunner
#endif
