// The kernels for AVX2 with FMA. Only this file is compiled for that instruction set.
#if defined(__x86_64__)

#define ISA avx2
#include "simd_avx2.hpp"
#include "int16_avx2.hpp"
#include "kernel_table.hpp"

namespace mlxrunner {

const Kernels* kernels_avx2() {
  const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                   __builtin_cpu_supports("f16c");
  return has ? &avx2::kTable : nullptr;
}

}  // namespace mlxrunner

#else
#include "kernels.hpp"
namespace mlxrunner {
const Kernels* kernels_avx2() { return nullptr; }
}  // namespace mlxrunner
#endif
