// The kernels for AVX-512 with VNNI. They differ from isa_avx512.cpp only in products with quantized
// matrices. Only this file is compiled for that instruction set.
#if defined(__x86_64__)

#define ISA avx512_vnni
#include "simd_avx512.hpp"
#include "int8_vnni.hpp"
#include "matmul.hpp"

namespace mlxrunner {

const Kernels* kernels_avx512_vnni() {
  const Kernels* avx512 = kernels_avx512();
  if (!avx512 || !__builtin_cpu_supports("avx512vnni")) return nullptr;
  static const Kernels table = [&] {
    Kernels all = *avx512;
    all.name = avx512_vnni::kName;
    all.packed_input_stride = avx512_vnni::packed_input_stride;
    all.pack_input = avx512_vnni::pack_input;
    all.matmul = avx512_vnni::matmul;
    all.matmul_scratch = avx512_vnni::matmul_scratch;
    return all;
  }();
  return &table;
}

}  // namespace mlxrunner

#else
#include "kernels.hpp"
namespace mlxrunner {
const Kernels* kernels_avx512_vnni() { return nullptr; }
}  // namespace mlxrunner
#endif
