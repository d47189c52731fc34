// The kernels for AVX-512 with VNNI and AMX. They differ from isa_avx512_vnni.cpp only in products
// with quantized matrices: with many rows of x, these use tiles. Only this file is compiled for that
// instruction set, and only if the compiler supports it (MLXRUNNER_AMX).
#if defined(__x86_64__) && defined(MLXRUNNER_AMX)

#define ISA avx512_amx
#include "simd_avx512.hpp"
#include "int8_vnni.hpp"
#include "matmul_tiles.hpp"

namespace mlxrunner {

namespace avx512_amx {

namespace {

const Kernels& vnni() { return *kernels_avx512_vnni(); }

// With fewer rows of x, tiles are mostly empty, and VNNI is faster (docs/decisions/kernels.md).
constexpr i64 kMinTileRows = 7;

bool uses_tiles(const Matrix& w, i64 count) { return fits_tiles(w) && count >= kMinTileRows; }

i64 packed_input_stride(const Matrix& w, i64 count) {
  return uses_tiles(w, count) ? tile_input_stride(w) : vnni().packed_input_stride(w, count);
}

i64 input_block(const Matrix& w, i64 count) {
  return uses_tiles(w, count) ? kInputBlock : vnni().input_block(w, count);
}

void pack_input(const Matrix& w, const float* x, i64 count, i64 from, i64 to, float* out) {
  if (!uses_tiles(w, count)) return vnni().pack_input(w, x, count, from, to, out);
  pack_tiles(w, x + from * w.width, to - from, out + from * tile_input_stride(w));
}

void matmul(const Matrix& w, PackedRows x, const float* bias, float* y, i64 ldy, i64 begin,
            i64 end, float* scratch) {
  if (!uses_tiles(w, x.count)) return vnni().matmul(w, x, bias, y, ldy, begin, end, scratch);
  tile_matmul(w, x, y, ldy, begin, end, scratch);
  add_bias(bias, y, ldy, x.count, begin, end);
}

i64 matmul_scratch(const Matrix& w) {
  const i64 rows = vnni().matmul_scratch(w), tiles = fits_tiles(w) ? tile_scratch(w) : 0;
  return tiles > rows ? tiles : rows;
}

}  // namespace

}  // namespace avx512_amx

const Kernels* kernels_avx512_amx() {
  if (!kernels_avx512_vnni()) return nullptr;
  static const Kernels table = [] {
    Kernels all = avx512_amx::vnni();
    all.name = "avx512-amx";
    all.packed_input_stride = avx512_amx::packed_input_stride;
    all.input_block = avx512_amx::input_block;
    all.pack_input = avx512_amx::pack_input;
    all.matmul = avx512_amx::matmul;
    all.matmul_scratch = avx512_amx::matmul_scratch;
    return all;
  }();
  return &table;
}

}  // namespace mlxrunner

#else
#include "kernels.hpp"
namespace mlxrunner {
const Kernels* kernels_avx512_amx() { return nullptr; }
}  // namespace mlxrunner
#endif
