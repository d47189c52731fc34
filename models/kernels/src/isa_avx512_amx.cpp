// The kernels for AVX-512 with VNNI and AMX. They differ from isa_avx512_vnni.cpp only in products
// with quantized matrices: with many rows of x, these use tiles. Only this file is compiled for that
// instruction set, and only if the compiler supports it (MLXRUNNER_AMX).
#if defined(__x86_64__) && defined(MLXRUNNER_AMX)

#define ISA avx512_amx
#include "simd_avx512.hpp"
#include "int8_vnni.hpp"
#include "matmul.hpp"
#include "matmul_tiles.hpp"

namespace mlxrunner {

namespace avx512_amx {

namespace {

// With fewer rows of x, tiles are mostly empty, and VNNI is faster (docs/decisions/kernels.md).
constexpr i64 kMinTileRows = 7;

void matmul_on_tiles(const Matrix& w, PackedRows x, const float* bias, float* y, i64 ldy, i64 begin,
                     i64 end, float* scratch) {
  if (!fits_tiles(w) || x.count < kMinTileRows)
    return matmul(w, x, bias, y, ldy, begin, end, scratch);
  const i64 whole = end - (end - begin) % kPanelRows;
  tile_matmul<AmxTiles>(w, x, y, ldy, begin, whole, scratch);
  if (whole < end) matmul(w, x, nullptr, y, ldy, whole, end, scratch);
  add_bias(bias, y, ldy, x.count, begin, end);
}

i64 scratch_floats(const Matrix& w) {
  const i64 rows = matmul_scratch(w);
  if (!fits_tiles(w)) return rows;
  const i64 tiles = tile_scratch_bytes(w) / 4;
  return tiles > rows ? tiles : rows;
}

}  // namespace

}  // namespace avx512_amx

const Kernels* kernels_avx512_amx() {
  const Kernels* vnni = kernels_avx512_vnni();
  if (!vnni) return nullptr;
  static const Kernels table = [&] {
    Kernels all = *vnni;
    all.name = "avx512-amx";
    all.packed_input_stride = avx512_amx::packed_input_stride;
    all.pack_input = avx512_amx::pack_input;
    all.matmul = avx512_amx::matmul_on_tiles;
    all.matmul_scratch = avx512_amx::scratch_floats;
    all.tile_reference = avx512_amx::tile_reference;
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
